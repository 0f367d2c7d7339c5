"""Kinds of devices; which CPU or GPU this is, and what state a GPU is in."""

from __future__ import annotations

import contextlib
import importlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_neuroshard.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "BACKENDS",
    "GPU",
    "GpuMonitor",
    "GpuState",
    "accelerator",
    "as_device",
    "backend_of",
    "cpu_name",
    "current_device_name",
    "default_device_type",
    "device_bytes",
    "device_type_of",
    "find_gpu_monitor",
    "free_cached_memory",
    "free_host_bytes",
    "gpu_uuid",
    "is_accelerator",
    "plain_torch",
    "synchronize",
    "torch_threads",
]

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Device type, as torch calls it -> what carries its collectives. All but the CPU are
accelerators, each with a module of torch's, such as `torch.cuda`."""

_THROTTLING = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that make a time useless. The software power cap
(0x04) is left out: under load it is a GPU's usual state."""
_NVML_SM, _NVML_MEMORY, _NVML_DIE = 1, 2, 0

GPU = "cuda"
"""What torch calls the type of the cards in `gpu_cards`."""


def is_accelerator(device_type: str) -> bool:
    """Whether a type of device is not the CPU itself."""
    return device_type != "cpu"


def accelerator(device_type: str) -> Any:
    """Return torch's module for a type of accelerator, such as `torch.cuda`.

    Raises:
        RuntimeError: torch knows no such type.
    """
    import torch

    return torch.get_device_module(device_type)


def backend_of(device_type: str) -> str:
    """Name what carries the collectives of a type of device; gloo, where unknown."""
    return BACKENDS.get(device_type, "gloo")


def device_type_of(backend: str) -> str:
    """Name the type of device whose collectives a backend carries."""
    return next(device for device, its in BACKENDS.items() if its == backend)


def synchronize(device: Any) -> None:
    """Wait until an accelerator (a `torch.device`) is through with its queue."""
    if is_accelerator(device.type):
        accelerator(device.type).synchronize(device)


def free_cached_memory(device: Any) -> None:
    """Give back what torch keeps of an accelerator's memory, in whatever pieces."""
    if is_accelerator(device.type):
        accelerator(device.type).empty_cache()


def gpu_uuid(device: Any) -> str | None:
    """Name a device as NVIDIA's driver does; None where it is not of its."""
    if device.type != GPU:
        return None
    return f"GPU-{accelerator(device.type).get_device_properties(device).uuid}"


def cpu_name() -> str:
    """Model name of this machine's CPU, with family and model number."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name", platform.machine())
    return f"{name} ({fields.get('cpu family', '?')}/{fields.get('model', '?')})"


def current_device_name(device_type: str) -> str | None:
    """Name of the device of a type that this process works on; None if it has none."""
    if not is_accelerator(device_type):
        return cpu_name()
    try:
        module = accelerator(device_type)
    except RuntimeError:  # this torch does not know the type
        return None
    return str(module.get_device_name()) if module.is_available() else None


def default_device_type() -> str:
    """Name the first type of accelerator that torch sees here; `cpu` without any."""
    for device_type in filter(is_accelerator, BACKENDS):
        if accelerator(device_type).is_available():
            return device_type
    return "cpu"


def as_device(name: str) -> torch.device:
    """Return a device of this machine.

    Args:
        name: As torch names them, such as `cpu`, `cuda` or `cuda:1`.

    Raises:
        ConfigError: It is not here.
    """
    import torch

    device = torch.device(name)
    if not is_accelerator(device.type):
        return device
    module = accelerator(device.type)
    count = module.device_count() if module.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(
            f"no device '{name}': torch sees {count} of them; use --device cpu or run "
            "'neuroshard doctor'"
        )
    return device


def device_bytes(device: torch.device) -> int | None:
    """All memory of an accelerator that is here; None for a CPU."""
    if not is_accelerator(device.type):
        return None
    return int(accelerator(device.type).get_device_properties(device).total_memory)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Compute in fp32 on the CPU, whatever the caller has told torch to do by default.

    A job may plan under another default dtype or device, autocast or fake tensors.
    """
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            unset_fake_temporarily(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


def free_host_bytes() -> int:
    """Memory of the host that is free or can be freed [bytes], by Linux's count."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return int(sizes["MemAvailable"].split()[0]) * 1024


@contextlib.contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Have torch use so many threads; leave it as it was afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """What a GPU's driver says of it at one moment."""

    sm_clock_mhz: float
    memory_clock_mhz: float
    temperature_c: float
    throttle_reasons: int
    """NVML's clock event reasons, a bit mask."""

    def throttled_by(self) -> str:
        """Why its clocks are held down, in words; empty if they are not."""
        return ", ".join(
            text for bit, text in _THROTTLING.items() if self.throttle_reasons & bit
        )


class GpuMonitor:
    """Reads a GPU's state, and counts how often the driver did not answer.

    Attributes:
        num_failures: Reads that failed: a measurement does not end for that.
    """

    def __init__(self, read: Callable[[], GpuState]) -> None:
        """Take what asks the driver."""
        self._read = read
        self.num_failures = 0

    def state(self) -> GpuState | None:
        """Return the state now; None where the driver did not answer."""
        try:
            return self._read()
        except Exception:  # whatever a driver library raises
            self.num_failures += 1
            return None


def find_gpu_monitor(uuid: str) -> GpuMonitor | None:
    """Return a monitor of a GPU, by the `pynvml` module.

    Args:
        uuid: The GPU's, with its prefix `GPU-`.

    Returns:
        None where `pynvml` is not installed or does not answer.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        read = partial(_read_nvml, nvml, handle)
        read()
    except Exception:  # whatever a driver library raises
        return None
    return GpuMonitor(read)


def _read_nvml(nvml: Any, handle: Any) -> GpuState:
    return GpuState(
        sm_clock_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, _NVML_SM)),
        memory_clock_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, _NVML_MEMORY)),
        temperature_c=float(nvml.nvmlDeviceGetTemperature(handle, _NVML_DIE)),
        throttle_reasons=int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    )
