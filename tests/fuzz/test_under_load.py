"""Many plans in one process, and plans made at the same time."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import bag_sharders, make_ebc, make_planner

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

NUM_PLANS, NUM_THREADS = 40, 8
MAX_LEAK_MIB = 1.0
"""Of a plan."""


def resident_mib() -> float:
    """Memory of this process once all that is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def plan_once(seed: int) -> dict[str, Any]:
    """Plan a model drawn from a seed; return the ranks of its tables."""
    rng = np.random.default_rng(seed)
    sizes = [
        (int(rng.integers(10, 10**6)), 4 * int(rng.integers(1, 33)))
        for _ in range(int(rng.integers(3, 12)))
    ]
    planner = make_planner(int(2 ** rng.integers(1, 3)), "cuda", search_only=False)
    plan = planner.plan(make_ebc(sizes), bag_sharders())
    return {name: (s.sharding_type, s.ranks) for name, s in plan.plan[""].items()}


def test_plans_leave_no_memory_and_no_files() -> None:
    first = NUM_PLANS // 4  # after which nothing more may be held
    for number in range(NUM_PLANS):
        if number == first:
            mib, files = resident_mib(), len(os.listdir("/proc/self/fd"))
        plan_once(number)
    assert resident_mib() - mib < MAX_LEAK_MIB * (NUM_PLANS - first)
    assert len(os.listdir("/proc/self/fd")) <= files


def test_plans_made_at_the_same_time_are_those_made_alone() -> None:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        together = list(pool.map(plan_once, range(NUM_THREADS)))
    assert together == [plan_once(seed) for seed in range(NUM_THREADS)]
