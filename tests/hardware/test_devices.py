"""Names of devices, and a GPU's state with stand-ins for its driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware import devices
from torchrec_neuroshard.hardware.devices import (
    as_device,
    find_gpu_monitor,
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
