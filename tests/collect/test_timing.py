from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest
import torch

from torchrec_neuroshard.collect.sampling import SamplingConfig, sample_set
from torchrec_neuroshard.collect.timing import (
    Measurement,
    Reference,
    SetTimer,
    keep_freed_memory,
)

CPU = torch.device("cpu")
SMALL = SamplingConfig(
    max_shards=3, batch_sizes=(64, 128), rows=(10, 1_000), max_lookups=2_000
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def timer() -> SetTimer:
    return SetTimer(
        CPU,
        1 << 22,
        reference_ms=7.0,
        budget_seconds=0.0,
        min_passes=3,
        max_passes=5,
        num_batches=2,
    )


def measure(timer: SetTimer, index: int) -> Measurement:
    sampled = sample_set(index, 0, SMALL, [])
    return timer.measure(sampled.tables, sampled.access, sampled.batch_size, (0, index))


def test_keeping_freed_memory_says_whether_it_can() -> None:
    assert isinstance(keep_freed_memory(), bool)


@pytest.mark.parametrize("index", range(4))
def test_every_pass_has_its_reference(timer: SetTimer, index: int) -> None:
    found = measure(timer, index)
    # No budget: as few passes as allowed.
    assert len(found.fwd_raw_ms) == len(found.bwd_raw_ms) == len(found.ref_raw_ms) == 3
    for times in (found.fwd_raw_ms, found.bwd_raw_ms, found.ref_raw_ms):
        assert min(times) > 0


def test_time_is_the_median_ratio_times_the_nominal(timer: SetTimer) -> None:
    assert timer.reference_ms == 7.0
    found = measure(timer, 1)
    for raw, ms in ((found.fwd_raw_ms, found.fwd_ms), (found.bwd_raw_ms, found.bwd_ms)):
        ratios = [a / b for a, b in zip(raw, found.ref_raw_ms, strict=True)]
        assert ms == pytest.approx(7.0 * statistics.median(ratios))


def test_a_budget_allows_more_passes_up_to_the_most() -> None:
    patient = SetTimer(
        CPU,
        1 << 20,
        reference_ms=1.0,
        budget_seconds=60.0,
        min_passes=1,
        max_passes=4,
        num_batches=2,
    )
    assert len(measure(patient, 2).fwd_raw_ms) == 4


def test_reference_has_a_nominal_time() -> None:
    assert Reference(CPU).nominal_ms(num_passes=3) > 0
