from __future__ import annotations

import contextlib
import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from torchrec_neuroshard.bundles.find import physical_estimate
from torchrec_neuroshard.measure.clock import (
    DeviceClock,
    PassCounts,
    SetTimer,
    time_on_host,
)
from torchrec_neuroshard.measure.records import Measurement
from torchrec_neuroshard.measure.sets import SamplingConfig, SetSampler

CPU = torch.device("cpu")
SMALL = SamplingConfig(
    max_shards=3, batch_sizes=(64, 128), rows=(10, 1_000), max_lookups=2_000
)
THREE = PassCounts(min_passes=3, max_passes=3, time_budget_seconds=0.0, num_batches=3)


def test_times_are_relative_to_the_reference_beside_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = SetTimer(CPU, 1 << 22, reference_ms=7.0, counts=THREE)
    sampled = SetSampler(SMALL, 0, [], physical_estimate("cpu")).sample(1)
    found = timer.measure(sampled)
    assert found.num_passes == 3
    assert min(found.fwd_ms, found.bwd_ms, found.reference_ms) > 0
    # The machine is three times as slow in the second pass, and disturbed in the third.
    times = [(2.0, 4.0, 7.0), (6.0, 12.0, 21.0), (9.0, 9.0, 7.0)]
    monkeypatch.setattr(timer, "time_passes", lambda *_: (times, {"throttled": "hot"}))
    assert timer.measure(sampled) == Measurement(
        fwd_ms=2.0,
        bwd_ms=4.0,
        num_passes=3,
        spread=0.0,
        reference_ms=7.0,
        throttled="hot",
    )


# A GPU's clock, with stand-ins for its events


class Queue(list[str]):
    """Records what is put into the device's queue."""

    busy_repeats = DeviceClock.REPEATS
    """Fewest repeats of the flush that keep the device busy."""


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.position = len(queue)
            queue.append("event")

        def query(self) -> bool:
            """Whether the device has finished a short flush before the host."""
            before = reversed(queue[: self.position])
            flushes = itertools.takewhile(lambda e: e.startswith("flush"), before)
            return len(list(flushes)) < queue.busy_repeats

        def synchronize(self) -> None:
            queue.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return float(end.position - self.position)

    class Cache(torch.Tensor):
        def zero_(self) -> Cache:
            queue.append(f"flush {self.numel()}")
            return self

    empty = torch.empty
    device = SimpleNamespace(
        Event=Event,
        device=contextlib.nullcontext,
        get_device_properties=lambda _: SimpleNamespace(L2_cache_size=500),
    )
    monkeypatch.setattr(
        "torchrec_neuroshard.measure.clock.accelerator", lambda _: device
    )
    monkeypatch.setattr(
        "torch.empty", lambda *size, **kw: empty(*size, **kw).as_subclass(Cache)
    )
    return queue


@pytest.mark.parametrize(("needed", "taken"), [(40, 64), (10**9, 256)])
def test_events_enclose_only_the_pass_after_a_long_enough_flush(
    queue: Queue, needed: int, taken: int
) -> None:
    queue.busy_repeats = needed
    clock = DeviceClock(CPU)

    def forward() -> torch.Tensor:
        queue.append("forward")
        return torch.ones(3)

    def backward(output: torch.Tensor) -> None:
        assert output.sum() == 3
        queue.extend(["backward", "step"])

    # Only the last attempt counts.
    assert clock(forward, backward)() == (2.0, 3.0)
    attempts = 1 + (taken // DeviceClock.REPEATS).bit_length() - 1
    assert queue.count("forward") == queue.count("step") == attempts
    assert clock.repeats == taken
    assert queue.count("wait") == 1  # queued again without waiting
    flush = ["flush 1000"] * taken
    last = [*flush, "event", "forward", "event"]
    last += [*flush, "event", "backward", "step", "event", "wait"]
    assert queue[-len(last) :] == last
    clock(forward, backward)()  # the next pass starts with the longer flush
    assert queue.count("forward") == attempts + 1
    # Soon after a late pass, the flush is as short as before.
    queue.busy_repeats = DeviceClock.REPEATS
    for _ in range(4 * DeviceClock.TIMELY_PASSES):
        clock(forward, backward)()
    assert clock.repeats == DeviceClock.REPEATS


def test_the_next_set_is_drawn_while_the_device_works(queue: Queue) -> None:
    timer = SetTimer(CPU, 1 << 20, reference_ms=1.0, counts=THREE)
    timer.reference, timer.clock = None, DeviceClock(CPU)
    sampled = SetSampler(SMALL, 0, [], physical_estimate("cpu")).sample(1)
    timer.measure(sampled, lambda: queue.append("drawn"))
    at = queue.index("drawn")
    assert queue[:at].count("event") == 12 and "wait" not in queue[:at]
    assert queue[at + 1 :] == ["wait"] * 3


def test_host_clock_times_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])

    def forward() -> torch.Tensor:
        now[0] += 0.01
        return torch.ones(1)

    def backward(output: torch.Tensor) -> None:
        now[0] += 0.03

    assert time_on_host(forward, backward)() == pytest.approx((10, 30))
