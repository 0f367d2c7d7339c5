"""Names of devices, and a GPU's state by way of stand-ins for its driver."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch

from torchrec_neuroshard.hardware.devices import (
    GpuState,
    find_gpu_monitor,
    torch_threads,
)

STATE = GpuState(
    sm_clock_mhz=1980.0,
    memory_clock_mhz=3201.0,
    temperature_c=41.0,
    throttle_reasons=0x1,
)
UUID = "GPU-7c1e"


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0x1 | 0x4, ""),  # idle, or at the power cap
        (0x20 | 0x4, "software thermal slowdown"),
        (0x40 | 0x80, "hardware thermal slowdown, power brake"),
    ],
)
def test_reasons_that_make_a_time_useless(mask: int, words: str) -> None:
    state = dataclasses.replace(STATE, throttle_reasons=mask)
    assert state.throttled_by() == words


def test_nvml_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_gpu_monitor(UUID) is None
    handles: dict[str, str] = {}
    nvml = SimpleNamespace(  # what of `pynvml` is used
        nvmlInit=lambda: handles.update({UUID: "handle"}),
        nvmlDeviceGetHandleByUUID=handles.__getitem__,
        nvmlDeviceGetClockInfo=lambda _, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetTemperature=lambda _, sensor: {0: 41}[sensor],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x1,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert find_gpu_monitor("GPU-other") is None
    monitor = find_gpu_monitor(UUID)
    assert monitor is not None and monitor.state() == STATE
    monkeypatch.setattr(nvml, "nvmlDeviceGetTemperature", None)
    assert monitor.state() is None and monitor.num_failures == 1


def test_threads_are_as_before_even_after_a_failure() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before
