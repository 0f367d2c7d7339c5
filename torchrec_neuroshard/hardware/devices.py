"""Kinds of devices; which CPU or GPU this is, and what state a GPU is in."""

from __future__ import annotations

import contextlib
import importlib
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchrec_neuroshard.errors import ConfigError

__all__ = [
    "BACKENDS",
    "GPU",
    "GpuMonitor",
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

GPU = "cuda"
"""What torch calls the type of the cards in `cards`."""


def is_accelerator(device_type: str) -> bool:
    """Whether a type of device is not the CPU itself."""
    return device_type != "cpu"


def accelerator(device_type: str) -> Any:
    """Return torch's module for a type of accelerator, such as `torch.cuda`.

    Raises:
        RuntimeError: torch knows no such type.
    """
    return torch.get_device_module(device_type)


def backend_of(device_type: str) -> str:
    """Name what carries the collectives of a type of device; gloo, where unknown."""
    return BACKENDS.get(device_type, "gloo")


def device_type_of(backend: str) -> str:
    """Name the type of device whose collectives a backend carries."""
    return next(device for device, its in BACKENDS.items() if its == backend)


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator is through with its queue."""
    if is_accelerator(device.type):
        accelerator(device.type).synchronize(device)


def free_cached_memory(device: torch.device) -> None:
    """Give back what torch keeps of an accelerator's memory, in whatever pieces."""
    if is_accelerator(device.type):
        accelerator(device.type).empty_cache()


def cpu_name() -> str:
    """Model name of this machine's CPU, with family and model number."""
    first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    fields = dict(re.findall(r"^(.+?)\s*: (.*?)\s*$", first, re.MULTILINE))
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
    accelerators = filter(is_accelerator, BACKENDS)
    return next((t for t in accelerators if accelerator(t).is_available()), "cpu")


def as_device(name: str) -> torch.device:
    """Return a device of this machine.

    Args:
        name: As torch names them, such as `cpu`, `cuda` or `cuda:1`.

    Raises:
        ConfigError: It is not here.
    """
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
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class GpuMonitor:
    """Reads a GPU's state by `pynvml`, and counts how often the driver did not answer.

    Attributes:
        num_failures: Reads that failed: a measurement does not end for that.
    """

    def __init__(self, device: torch.device) -> None:
        """Find the GPU; raises whatever `pynvml` does where it does not answer."""
        uuid = accelerator(device.type).get_device_properties(device).uuid
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.num_failures = 0
        self._read()

    def state(self) -> dict[str, Any]:
        """Return the state now, as fields of a `CostRecord`; empty where that fails."""
        try:
            return self._read()
        except Exception:  # whatever a driver library raises
            self.num_failures += 1
            return {}

    def _read(self) -> dict[str, Any]:
        nvml, gpu = self._nvml, self._handle
        celsius = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        held = [text for bit, text in _THROTTLING.items() if reasons & bit]
        sm, memory = (
            float(nvml.nvmlDeviceGetClockInfo(gpu, kind))
            for kind in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)
        )
        return {
            "sm_clock_mhz": sm,
            "memory_clock_mhz": memory,
            "temperature_c": float(celsius),
            "throttled": ", ".join(held),
        }


def find_gpu_monitor(device: torch.device) -> GpuMonitor | None:
    """Return a monitor of a GPU; None where `pynvml` is missing or does not answer."""
    try:
        return GpuMonitor(device)
    except Exception:  # whatever a driver library raises
        return None
