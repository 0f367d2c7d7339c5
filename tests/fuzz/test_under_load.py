"""Many plans in one process, plans made at the same time, and a day of a monitor."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.builders import CPU, bag_config, bag_sharders, bags, make_ebc, make_planner
from torchrec_neuroshard.monitor import plan_monitor
from torchrec_neuroshard.monitor.plan_monitor import PlanMonitor

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

NUM_PLANS, NUM_THREADS = 40, 8
NUM_REPORTS, SECONDS_PER_REPORT = 864, 100.0
MAX_LEAK_MIB = 1.0
"""Of a plan, or of a report."""


def resident_mib() -> float:
    """Memory of this process once all that is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def check_no_growth(repeats: int, action: Callable[[int], object]) -> None:
    """Repeat an action; after a quarter of the times nothing more may be held."""
    first = repeats // 4
    for number in range(repeats):
        if number == first:
            mib, files = resident_mib(), len(os.listdir("/proc/self/fd"))
        action(number)
    assert resident_mib() - mib < MAX_LEAK_MIB * (repeats - first)
    assert len(os.listdir("/proc/self/fd")) <= files


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
    check_no_growth(NUM_PLANS, plan_once)


def test_plans_made_at_the_same_time_are_those_made_alone() -> None:
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        together = list(pool.map(plan_once, range(NUM_THREADS)))
    assert together == [plan_once(seed) for seed in range(NUM_THREADS)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags(*(bag_config(i, 200, 8) for i in range(3)), device=CPU)
        self.dense = nn.Linear(24, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found: torch.Tensor = self.dense(self.ebc(features).values()).mean()
        return found


def test_a_day_of_reports_leaves_no_memory_and_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    planner = make_planner(world_size=1)
    model = Model()
    plan = planner.collective_plan(model, bag_sharders(), dist.group.WORLD)
    sharded = DistributedModelParallel(
        model, device=CPU, plan=plan, sharders=bag_sharders()
    )
    rng, every = np.random.default_rng(0), 8
    seconds = 0.0
    clock: Any = SimpleNamespace(perf_counter=lambda: seconds)
    monkeypatch.setattr(plan_monitor, "time", clock)
    monitor = PlanMonitor(sharded, planner, every=every, timed=1, max_overhead=1.0)
    reports = set()

    def report(_: int) -> None:
        nonlocal seconds
        for _ in range(every):
            seconds += SECONDS_PER_REPORT / every
            lengths = torch.from_numpy(rng.integers(0, 4, 12))
            ids = torch.from_numpy(rng.integers(0, 50, int(lengths.sum())))
            batch = KeyedJaggedTensor(["f0", "f1", "f2"], ids, lengths=lengths)
            sharded(batch).backward()
            monitor.step()
        reports.add(id(monitor.last_report))

    try:
        check_no_growth(NUM_REPORTS, report)
        assert monitor.is_on and len(reports) > 1
    finally:
        monitor.close()
        dist.destroy_process_group()
