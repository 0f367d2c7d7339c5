"""Lower bounds: against hand calculation, against plans, and against each other."""

from __future__ import annotations

import copy
import math
import time
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from harness.dlrm_tables import generate_dlrm_tables
from tests.builders import make_tables, make_task, search
from tests.fuzz import against_truth
from tests.fuzz.campaign import Case
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.search import SearchConfig, bounds
from torchrec_neuroshard.search.bounds import lower_bound
from torchrec_neuroshard.search.lanes import Lanes
from torchrec_neuroshard.search.shards import ShardBank
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel


def test_the_bound_includes_the_launch() -> None:
    # Equal tables on four ranks; the launch is half of each rank's time.
    task = make_task(make_tables([16] * 40, pooling=5.0), 4, 4096)
    launch_ms = 10 * 4096 * 5.0 * (1.0 + 6.4) * 1e-6
    cost_model = AnalyticCostModel(launch_ms=launch_ms)
    bank = ShardBank(Simulator(task, cost_model, AnalyticCommsModel()))
    width_TW = np.zeros((40, 4), dtype=np.int64)
    width_TW[np.arange(40), np.arange(40) % 4] = 16
    [optimum] = Lanes.of(bank, [width_TW]).critical_L
    assert 0.99 * optimum < lower_bound(bank) <= optimum
    assert 0.9 * optimum < lower_bound(bank, time.monotonic()) <= optimum


def test_the_bound_counts_the_lookups_of_each_shard() -> None:
    # Only lookups cost. One table has four times as many as all others together. Each
    # of its shards repeats them, so a split makes no rank quicker.
    task = make_task(make_tables([16] * 21, pooling=[400.0] + [5.0] * 20), 4)
    cost_model = AnalyticCostModel(launch_ms=0.0, lookup_ns=100.0, byte_ns=0.0)
    bank = ShardBank(Simulator(task, cost_model, AnalyticCommsModel(gb_per_s=1e6)))
    width_TW = np.zeros((21, 4), dtype=np.int64)
    width_TW[0, 0] = 16
    width_TW[np.arange(1, 21), 1 + np.arange(20) % 3] = 16
    [critical_ms] = Lanes.of(bank, [width_TW]).critical_L
    assert critical_ms == pytest.approx(3 * 400 * 1024 * 100e-6, rel=1e-3)
    assert lower_bound(bank) == pytest.approx(critical_ms, rel=1e-3)


def dlrm_task() -> ShardingTask:
    """40 of the DLRM tables, of several widths, on 8 ranks."""
    pool, rng = generate_dlrm_tables(0), np.random.default_rng(0)
    picks = rng.choice(len(pool), 40, replace=False)
    widths = rng.choice([4, 16, 64, 128], 40)
    tables = [pool[p].with_width(int(w)) for p, w in zip(picks, widths, strict=True)]
    return make_task(tables, 8, 4096)


def test_the_bound_is_near_the_plan_of_the_dlrm_tables() -> None:
    assert search(dlrm_task(), SearchConfig(bound="thorough")).gap < 0.03


class Unlike(AnalyticCommsModel):
    """Collectives for which unequal loads may be faster, like measured ones."""

    even_is_fastest = False


@pytest.mark.parametrize("part", ["net", "collectives"])
def test_there_is_no_bound_of_measured_costs(part: str) -> None:
    model = load_cost_model("cpu") if part == "net" else AnalyticCostModel()
    comms = Unlike() if part == "collectives" else AnalyticCommsModel()
    task = make_task(make_tables([16] * 4), 2)
    result = search(task, SearchConfig(bound="thorough"), model, comms)
    assert (result.lower_bound_ms, result.gap) == (0.0, math.inf)
    assert not result.bound_is_proven


def test_the_bound_is_0_if_the_solver_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(status=4, fun=None, x=None, mip_dual_bound=None)

    fake = SimpleNamespace(
        linprog=nothing,
        milp=nothing,
        Bounds=optimize.Bounds,
        LinearConstraint=optimize.LinearConstraint,
    )
    monkeypatch.setattr(bounds, "optimize", fake)
    result = search(dlrm_task(), SearchConfig(bound="quick"))
    assert (result.lower_bound_ms, result.gap) == (0.0, math.inf)
    assert not result.bound_is_proven


def bound_of(case: Case) -> float:
    """Return the bound of a task."""
    task, (cost_model, comms_model) = (
        against_truth.build(case),
        against_truth.models(case["models"]),
    )
    bank = ShardBank(Simulator(task, cost_model, comms_model))
    return lower_bound(bank, time.monotonic())


def test_more_alternatives_never_have_a_higher_bound() -> None:
    rng, lower = Random(3), 0
    for _ in range(60):
        case = against_truth.draw(rng)
        for rule in ("memory", "host", "together", "apart"):
            case.pop(rule, None)
        fewer = copy.deepcopy(case)
        for table in fewer["tables"]:
            ways = table["ways"]
            kept = rng.sample(range(len(ways)), rng.randint(1, len(ways)))
            table["ways"] = [ways[number] for number in sorted(kept)]
        more_ms, fewer_ms = bound_of(case), bound_of(fewer)
        # HiGHS stops within 0.1 % of the best choice.
        assert more_ms <= fewer_ms * 1.001
        lower += more_ms < 0.99 * fewer_ms
    assert lower > 5
