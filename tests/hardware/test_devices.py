"""Names of devices, and a GPU's state with stand-ins for its driver."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware import devices
from torchrec_neuroshard.hardware.devices import (
    as_device,
    cpu_name_in,
    find_gpu_monitor,
    free_host_bytes,
    own_device,
    torch_threads,
)

UUID = "7c1e"


def test_nvml_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    found = SimpleNamespace(uuid=UUID)
    driver = SimpleNamespace(get_device_properties=lambda _: found)
    monkeypatch.setattr(devices, "accelerator", lambda _: driver)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_gpu_monitor(gpu) is None
    handles: dict[str, str] = {}
    reasons = [0x1 | 0x4, 0x20 | 0x4, 0x40 | 0x80]  # idle, or at the power cap
    nvml = SimpleNamespace(  # the parts of `pynvml` that are used
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: handles.update({f"GPU-{UUID}": "handle"}),
        nvmlDeviceGetHandleByUUID=handles.__getitem__,
        nvmlDeviceGetClockInfo=lambda _, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetTemperature=lambda _, sensor: {0: 41}[sensor],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: reasons[0],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monitor = find_gpu_monitor(gpu)
    assert monitor is not None
    clocks = {"sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0}
    for words in (
        "",
        "software thermal slowdown",
        "hardware thermal slowdown, power brake",
    ):
        assert monitor.state() == {**clocks, "temperature_c": 41.0, "throttled": words}
        reasons.pop(0)
    assert monitor.state() == {} and monitor.num_failures == 1
    found.uuid = "other"
    assert find_gpu_monitor(gpu) is None


def test_threads_are_as_before_even_after_a_failure() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ConfigError, match="torch knows no device 'tpu'; use cpu or"):
        as_device("tpu")


GRACE = """processor\t: 0
BogoMIPS\t: 2000.00
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd4f
CPU revision\t: 0

processor\t: 1
"""
EPYC = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9354

processor\t: 1
cpu family\t: 26
"""


def test_arm_cpus_have_names() -> None:
    """Each core, and each revision of it, has another name."""
    assert cpu_name_in(GRACE) == "Neoverse-V2 (0x41/0xd4f r0p0)"
    others = [
        GRACE.replace("revision\t: 0", "revision\t: 1"),
        GRACE.replace("0xd4f", "0xd40"),
        GRACE.replace("0x41", "0xc0").replace("0xd4f", "0xac3"),
        GRACE.replace("0xd4f", "0xfff"),
    ]
    names = [cpu_name_in(text) for text in others]
    assert names[:3] == [
        "Neoverse-V2 (0x41/0xd4f r0p1)",
        "Neoverse-V1 (0x41/0xd40 r0p0)",
        "Ampere-1 (0xc0/0xac3 r0p0)",
    ]
    assert names[3].endswith(" (0x41/0xfff r0p0)")
    # Names of shipped bundles stay as they are.
    assert cpu_name_in(EPYC) == "AMD EPYC 9354 (25/17)"


GIB = 2**30
NO_LIMIT_V1 = 9223372036854771712


def write_group(folder: Path, version: int, limit: int | str, used: int) -> None:
    """Write a group's files; 1 GiB of its usage is cache of files."""
    names = {
        1: ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        2: ("max", "current", "inactive_file"),
    }[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{names[1]}").write_text(f"{used}\n")
    stat = f"anon {used - GIB}\n{names[2]} {GIB}\n"
    (folder / "memory.stat").write_text(stat)


@pytest.mark.parametrize(
    ("mine", "version", "groups", "left_gib"),
    [
        # A container of Docker or Kubernetes, which sees its group as the root.
        ("0::/", 2, {"": (8 * GIB, 3 * GIB)}, 6),
        # A job of SLURM: the group has no limit, but its parent has.
        ("0::/slurm/step", 2, {"slurm": (9 * GIB, 2 * GIB), "slurm/step": "max"}, 8),
        # The host's groups are not mounted, only the container's own.
        ("0::/docker/ab", 2, {"": (4 * GIB, 2 * GIB)}, 3),
        ("0::/../../x", 2, {"": (4 * GIB, 2 * GIB)}, 3),
        ("0::/", 2, {"": "max"}, 64),
        ("0::/", 2, {"": (99 * GIB, 2 * GIB)}, 64),
        ("0::/", 2, {"": (2 * GIB, 5 * GIB)}, 0),
        ("5:cpu:/a\n4:memory:/a\n0::/", 1, {"memory/a": (8 * GIB, 3 * GIB)}, 6),
        ("4:cpu,memory:/a", 1, {"memory/a": (NO_LIMIT_V1, 3 * GIB)}, 64),
        ("", 1, {}, 64),
    ],
)
def test_memory_limits_of_a_container_count(
    tmp_path: Path,
    mine: str,
    version: int,
    groups: Mapping[str, tuple[int, int] | str],
    left_gib: int,
) -> None:
    """The host has 64 GiB available."""
    (tmp_path / "proc/self").mkdir(parents=True)
    meminfo = f"MemTotal: 9 kB\nMemAvailable:   {64 * GIB // 1024} kB\n"
    (tmp_path / "proc/meminfo").write_text(meminfo)
    (tmp_path / "proc/self/cgroup").write_text(mine)
    for name, found in groups.items():
        limit, used = ("max", GIB) if isinstance(found, str) else found
        write_group(tmp_path / "sys/fs/cgroup" / name, version, limit, used)
    assert free_host_bytes(tmp_path) == left_gib * GIB
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_host_bytes(tmp_path) == 64 * GIB


def test_the_free_memory_of_this_host() -> None:
    assert 0 < free_host_bytes() < 2**50


@pytest.mark.parametrize(
    ("count", "current", "local_rank", "expected"),
    [
        (2, 0, 1, 1),
        (4, 2, 1, 2),  # the script has chosen its device
        (1, 0, 3, 0),  # CUDA_VISIBLE_DEVICES shows each rank its own device alone
        (2, 0, 3, None),
        (0, 0, 0, None),
    ],
)
@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_a_rank_takes_a_device_that_it_sees(
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    count: int,
    current: int,
    local_rank: int,
    expected: int | None,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if launcher == "torchrun":
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    module = SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        current_device=lambda: current,
    )
    monkeypatch.setattr(devices, "accelerator", lambda _: module)
    assert own_device("cpu", local_rank) == torch.device("cpu")
    # torchrun's number replaces the caller's.
    given = local_rank if launcher == "none" else 7
    if expected is None:
        with pytest.raises(ConfigError, match=rf"has no CUDA device: .* sees {count}"):
            own_device("cuda", given)
    else:
        assert own_device("cuda", given) == torch.device("cuda", expected)
