"""The emulated cache of FBGEMM, and models larger than the GPUs' memory."""

from __future__ import annotations

import numpy as np
import pytest

import bench_cache_misses
import bench_offload


@pytest.mark.parametrize("algorithm", bench_cache_misses.ALGORITHMS)
def test_a_cache_holds_what_it_has_slots_for(algorithm: str) -> None:
    cache = bench_cache_misses.RowCache(10_000, 0.1, algorithm)
    rng = np.random.default_rng(0)
    for number in range(30):
        rows, counts = np.unique(rng.integers(0, 10_000, 400), return_counts=True)
        missed = cache.feed(rows, counts)
        assert number > 0 or missed == len(rows)  # nothing is there at first
        place, slot = np.nonzero(cache.row_CS >= 0)
        held = cache.row_CS[place, slot]
        assert len(np.unique(held)) == len(held)
        np.testing.assert_array_equal(cache.set_R[held], place)
    again, times = np.unique(rows[:50], return_counts=True)
    if algorithm == "lru":
        assert cache.feed(again, times) <= 5  # unless a set had no slot for them


def test_the_most_frequent_rows_stay() -> None:
    cache = bench_cache_misses.RowCache(3_200, 0.02, "lfu")
    hot = np.arange(16)
    for number in range(20):
        cold = 16 + (np.arange(200) + 200 * number) % 3_000
        rows = np.concatenate([hot, np.sort(cold)])
        missed = cache.feed(rows, np.where(rows < 16, 50, 1))
    assert cache.is_full and set(hot.tolist()) <= set(cache.row_CS.ravel().tolist())
    assert missed >= 100


def test_tasks_are_twice_the_memory() -> None:
    tasks = list(bench_offload.make_tasks())
    assert len(tasks) == 10
    for task in tasks:
        devices = task.shared()["topology"].devices
        room = sum(d.storage.hbm for d in devices)
        assert room == pytest.approx(task.table_bytes / 2, rel=0.01)
