"""The CPU or GPU of this machine, and a GPU's state."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.device_types import BACKENDS, is_accelerator

_THROTTLING = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that make a measured time useless. The software
power cap (0x04) is left out: it is normal for a GPU under load."""


def accelerator(device_type: str) -> Any:
    """Return torch's module for an accelerator type, e.g. `torch.cuda`.

    Raises:
        RuntimeError: torch does not know the type.
    """
    return torch.get_device_module(device_type)


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its queue; a CPU returns at once."""
    if is_accelerator(device.type):
        accelerator(device.type).synchronize(device)


def free_cached_memory(device: torch.device) -> None:
    """Free the accelerator memory that torch's allocator caches."""
    if is_accelerator(device.type):
        accelerator(device.type).empty_cache()


_ARM_CORES = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x41", "0xd8e"): "Neoverse-N3",
    ("0x43", "0x0af"): "ThunderX2",
    ("0x46", "0x001"): "A64FX",
    ("0x48", "0xd01"): "TaiShan-v110",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}
"""Implementer and part of an ARM core of a server -> its name. Source: util-linux,
lscpu-arm.c."""


def cpu_name() -> str:
    """Return the model name of this machine's CPU, with its numbers."""
    return cpu_name_in(Path("/proc/cpuinfo").read_text(encoding="utf-8"))


def cpu_name_in(cpuinfo: str) -> str:
    """Return the name of the first CPU in a text like `/proc/cpuinfo`.

    An x86 CPU has family and model number. An ARM CPU has implementer, part and
    revision: two makers that use the same core often use another revision of it.
    """
    first = cpuinfo.split("\n\n")[0]
    fields = dict(re.findall(r"^(.+?)\s*: (.*?)\s*$", first, re.MULTILINE))
    if "CPU part" in fields:
        core = fields.get("CPU implementer", "?"), fields["CPU part"]
        variant = fields.get("CPU variant", "?").removeprefix("0x")
        revision = f"r{variant}p{fields.get('CPU revision', '?')}"
        name = fields.get("model name") or _ARM_CORES.get(core, platform.machine())
        return f"{name} ({'/'.join(core)} {revision})"
    name = fields.get("model name", platform.machine())
    return f"{name} ({fields.get('cpu family', '?')}/{fields.get('model', '?')})"


def current_device_name(device_type: str) -> str | None:
    """Return the name of this process's device of a type; None if there is none."""
    if not is_accelerator(device_type):
        return cpu_name()
    try:
        module = accelerator(device_type)
    except RuntimeError:  # this torch does not know the type
        return None
    return str(module.get_device_name()) if module.is_available() else None


def default_device_type() -> str:
    """Return the first accelerator type that torch sees; `cpu` without accelerators."""
    accelerators = filter(is_accelerator, BACKENDS)
    return next((t for t in accelerators if accelerator(t).is_available()), "cpu")


def as_device(name: str) -> torch.device:
    """Return a device of this machine.

    Args:
        name: Name of the device in torch, e.g. `cpu`, `cuda` or `cuda:1`.

    Raises:
        ConfigError: This machine has no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"torch knows no device '{name:.60}'; use {' or '.join(BACKENDS)}"
        ) from error
    if not is_accelerator(device.type):
        return device
    module = accelerator(device.type)
    count = module.device_count() if module.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(
            f"no device '{name}': torch sees {count} {device.type} devices. Use "
            "--device cpu or run 'neuroshard doctor'"
        )
    return device


def own_device(device_type: str, local_rank: int) -> torch.device:
    """Return the device of this process, one of a node's ranks.

    If torch sees several devices, it is the current one, or, while that is the first,
    the one numbered like the rank. Some jobs show each rank its own device alone.

    Args:
        device_type: Type of the device.
        local_rank: Number of the rank in its node. torchrun's `LOCAL_RANK` replaces it.

    Raises:
        ConfigError: This rank has no device.
    """
    if not is_accelerator(device_type):
        return torch.device(device_type)
    module = accelerator(device_type)
    count = module.device_count() if module.is_available() else 0
    index = int(module.current_device()) if count else 0
    if count > 1 and not index:
        index = int(os.environ.get("LOCAL_RANK", local_rank))
    if index >= count:
        raise ConfigError(
            f"local rank {index or local_rank} has no {device_type.upper()} device: "
            f"torch sees {count}. Show it all devices of the node, or its own alone"
        )
    return torch.device(device_type, index)


def device_bytes(device: torch.device) -> int | None:
    """Return the total memory of an accelerator [bytes]; None for a CPU."""
    if not is_accelerator(device.type):
        return None
    return int(accelerator(device.type).get_device_properties(device).total_memory)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Compute in fp32 on the CPU, whatever torch's defaults are.

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


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that this process can still take [bytes].

    It is what Linux reports as available, or what a memory limit of the process's
    control groups leaves, if that is less. A container has such limits.

    Args:
        root: The root of the file system.
    """
    sizes = _numbers(root / "proc/meminfo")
    return min([1024 * sizes["MemAvailable"], *_bytes_left_in_groups(root)])


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line, by the name before it."""
    pattern = r"^(\w+):?\s+(\d+)"
    text = path.read_text(encoding="utf-8")
    return {name: int(n) for name, n in re.findall(pattern, text, re.MULTILINE)}


_GROUP_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}
"""Controller in `/proc/self/cgroup` (none in version 2) -> its folder, the files of a
group's limit and usage, and the field of `memory.stat` with the cache of files that
Linux would free first."""


def _bytes_left_in_groups(root: Path) -> Iterator[int]:
    """Yield what each limit leaves to this process: its groups' and their parents'."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for controller in {*controllers.split(",")} & _GROUP_FILES.keys():
            mount, limit, usage, cache = _GROUP_FILES[controller]
            base = root / "sys/fs/cgroup" / mount
            # A container may see its own group as the root, and no others.
            names = [n for n in path.split("/") if n not in ("", "..")]
            for depth in range(len(names) + 1):
                group = base.joinpath(*names[:depth])
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    most, used = (int((group / n).read_text()) for n in (limit, usage))
                    stat = _numbers(group / "memory.stat")
                    yield max(0, most - used + stat.get(cache, 0))


@contextlib.contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Limit torch to a number of threads inside this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class GpuMonitor:
    """Reads a GPU's state with `pynvml` and counts how often the driver failed.

    Attributes:
        num_failures: Failed reads so far; they do not stop a measurement.
    """

    def __init__(self, device: torch.device) -> None:
        """Find the GPU; raises pynvml's error if the driver does not answer."""
        uuid = accelerator(device.type).get_device_properties(device).uuid
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.num_failures = 0
        self._read()

    def state(self) -> dict[str, Any]:
        """Return the current state as fields of a `CostRecord`; empty on failure."""
        try:
            return self._read()
        except Exception:  # driver libraries raise anything
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
    """Return a monitor for a GPU; None if `pynvml` is missing or does not answer."""
    try:
        return GpuMonitor(device)
    except Exception:  # driver libraries raise anything
        return None
