"""Names of devices, and a GPU's state by way of stand-ins for its driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchrec_neuroshard.devices import (
    BACKENDS,
    GpuMonitor,
    GpuState,
    backend_of,
    cpu_name,
    current_device_name,
    device_type_of,
    find_gpu_monitor,
    gpu_uuid,
    nvidia_smi_reader,
    nvml_reader,
    torch_threads,
)

STATE = GpuState(
    sm_clock_mhz=1980.0,
    memory_clock_mhz=3201.0,
    temperature_c=41.0,
    throttle_reasons=0x1,
)
UUID = "GPU-7c1e"


class Nvml(SimpleNamespace):
    """What of `pynvml` is used."""

    started = False

    def nvmlInit(self) -> None:
        self.started = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.started
        if uuid != UUID:
            raise LookupError(uuid)
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert handle == "handle"
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return {0: 41}[sensor]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x1


def write_smi(folder: Path, *, known: str = "clocks_event_reasons") -> str:
    """A stand-in for nvidia-smi that knows one name of the reasons' field."""
    path = folder / "nvidia-smi"
    path.write_text(
        "#!/bin/sh\n"
        f'case "$2" in *,{known}.active) ;; *) echo no such field; exit 2;; esac\n'
        f'[ "$1" = --id={UUID} ] || exit 6\n'
        "echo '1980, 3201, 41, 0x0000000000000001'\n"
    )
    path.chmod(0o755)
    return str(path)


def test_this_cpu_has_a_name() -> None:
    assert current_device_name("cpu") == cpu_name() != ""
    assert current_device_name("tpu") is None


def test_a_gpu_is_named_as_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_uuid(torch.device("cpu")) is None
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid="7c-1e")
    )
    assert gpu_uuid(torch.device("cuda")) == "GPU-7c-1e"


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0x0, ""),
        (0x1, ""),  # idle
        (0x4, ""),  # power cap
        (0x8, "hardware slowdown"),
        (0x20 | 0x4, "software thermal slowdown"),
        (0x40 | 0x80, "hardware thermal slowdown, power brake"),
    ],
)
def test_reasons_that_make_a_time_useless(mask: int, words: str) -> None:
    state = GpuState(
        sm_clock_mhz=1.0, memory_clock_mhz=1.0, temperature_c=1.0, throttle_reasons=mask
    )
    assert state.throttled_by() == words


def test_monitor_asks_no_more_often_than_it_may() -> None:
    times = iter([0.0, 0.5, 0.99, 1.0, 2.5])
    asked: list[int] = []

    def read() -> GpuState:
        asked.append(1)
        return STATE

    monitor = GpuMonitor(
        read, source="x", min_interval_s=1.0, clock=lambda: next(times)
    )
    counts = []
    for _ in range(5):
        assert monitor.state() == STATE
        counts.append(len(asked))
    assert counts == [1, 1, 1, 2, 3]


def test_a_driver_that_falls_silent_is_counted() -> None:
    def read() -> GpuState:
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    monitor = GpuMonitor(read, source="x")
    assert monitor.state() is None and monitor.state() is None
    assert monitor.num_failures == 2


def test_nvml_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert nvml_reader(UUID)() == STATE
    with pytest.raises(LookupError):
        nvml_reader("GPU-other")


@pytest.mark.parametrize("known", ["clocks_event_reasons", "clocks_throttle_reasons"])
def test_nvidia_smi_is_read(tmp_path: Path, known: str) -> None:
    assert nvidia_smi_reader(UUID, write_smi(tmp_path, known=known))() == STATE
    with pytest.raises(ValueError, match="unpack"):
        nvidia_smi_reader("GPU-other", write_smi(tmp_path))()


def test_the_best_way_that_answers_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_gpu_monitor(UUID) is None
    write_smi(tmp_path)
    by_program = find_gpu_monitor(UUID)
    assert by_program is not None and by_program.source == "nvidia-smi"
    assert by_program.state() == STATE
    assert find_gpu_monitor("GPU-other") is None
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    by_module = find_gpu_monitor(UUID)
    assert by_module is not None and by_module.source == "pynvml"


def test_threads_are_as_before_even_after_a_failure() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before


def test_backends_belong_to_devices() -> None:
    assert {kind: backend_of(kind) for kind in BACKENDS} == BACKENDS
    assert {backend: device_type_of(backend) for backend in BACKENDS.values()} == {
        backend: kind for kind, backend in BACKENDS.items()
    }


def test_device_that_torch_does_not_know_has_no_name() -> None:
    assert current_device_name("abacus") is None
