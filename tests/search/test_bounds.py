"""Lower bounds: against hand calculation, against plans, and against each other."""

from __future__ import annotations

import copy
import math
import time
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
from torchrec_neuroshard.search import SearchConfig, balanced
from torchrec_neuroshard.search.bounds import lower_bound
from torchrec_neuroshard.search.lanes import Lanes
from torchrec_neuroshard.search.shards import Ints, ShardBank
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel


class NoSums(AnalyticCostModel):
    """The analytic model without `additive`, so that bounds need prices."""

    @property
    def additive(self) -> None:
        """No additive lower bound."""


def even_ranks(
    num_tables: int, model: type[AnalyticCostModel]
) -> tuple[ShardBank, Ints]:
    """Equal tables on four ranks; the launch is half of each rank's time."""
    task = make_task(make_tables([16] * num_tables, pooling=5.0), 4, 4096)
    launch_ms = num_tables / 4 * 4096 * 5.0 * (1.0 + 6.4) * 1e-6
    cost_model = model(launch_ms=launch_ms)
    width_TW = np.zeros((num_tables, 4), dtype=np.int64)
    width_TW[np.arange(num_tables), np.arange(num_tables) % 4] = 16
    return ShardBank(Simulator(task, cost_model, AnalyticCommsModel())), width_TW


@pytest.mark.parametrize("model", [AnalyticCostModel, NoSums])
def test_the_bound_includes_the_launch(model: type[AnalyticCostModel]) -> None:
    bank, width_TW = even_ranks(40, model)
    [optimum] = Lanes.of(bank, [width_TW]).critical_L
    found = lower_bound(bank, width_TW, 1.01 * optimum)
    assert found.ms == pytest.approx(optimum, rel=0.01)
    assert found.is_proven == (model is AnalyticCostModel)
    assert lower_bound(bank, width_TW, optimum).ms <= optimum


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
    found_ms = lower_bound(bank, width_TW, critical_ms).ms
    assert found_ms == pytest.approx(critical_ms, rel=1e-3)


def dlrm_task() -> ShardingTask:
    """40 of the DLRM tables, of several widths, on 8 ranks."""
    pool, rng = generate_dlrm_tables(0), np.random.default_rng(0)
    picks = rng.choice(len(pool), 40, replace=False)
    widths = rng.choice([4, 16, 64, 128], 40)
    tables = [pool[p].with_width(int(w)) for p, w in zip(picks, widths, strict=True)]
    return make_task(tables, 8, 4096)


def test_the_bound_is_near_the_plan_of_the_dlrm_tables() -> None:
    assert search(dlrm_task(), SearchConfig(bound="thorough")).gap < 0.03


def test_prices_of_a_net_are_near_the_plan_and_do_not_depend_on_the_clock() -> None:
    model, comms = load_cost_model("cpu"), AnalyticCommsModel()
    result = search(dlrm_task(), SearchConfig(bound="thorough"), model, comms)
    assert result.gap < 0.06 and not result.bound_is_proven
    bank = ShardBank(Simulator(dlrm_task(), model, comms))
    width_TW = np.zeros((40, 8), dtype=np.int64)
    for shard in result.placement.shards:
        width_TW[shard.table, shard.rank] = shard.width
    again = lower_bound(bank, width_TW, result.predicted.critical_path_ms)
    # A net's float32 rounding depends on how many sets it prices at once.
    assert again.ms == pytest.approx(result.lower_bound_ms, rel=1e-6)


def test_there_is_a_bound_even_after_the_deadline() -> None:
    bank, width_TW = even_ranks(40, NoSums)
    [optimum] = Lanes.of(bank, [width_TW]).critical_L
    found_ms = lower_bound(bank, width_TW, optimum, deadline=time.monotonic()).ms
    assert 0.9 * optimum < found_ms <= optimum


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
    monkeypatch.setattr(balanced, "optimize", fake)
    result = search(dlrm_task(), SearchConfig(bound="quick"))
    assert (result.lower_bound_ms, result.gap) == (0.0, math.inf)
    assert not result.bound_is_proven


def proof_of(case: Case) -> float:
    """Return the proven bound of a task; it needs no plan."""
    task, (cost_model, comms_model) = (
        against_truth.build(case),
        against_truth.models(case["models"]),
    )
    bank = ShardBank(Simulator(task, cost_model, comms_model))
    none_TW = np.zeros((len(task.tables), task.world_size), dtype=np.int64)
    found = lower_bound(bank, none_TW, np.inf, quick=True)
    assert found.is_proven
    return found.ms


def test_more_alternatives_never_have_a_higher_bound() -> None:
    rng, lower = np.random.default_rng(3), 0
    for _ in range(60):
        case = against_truth.draw(rng)
        for rule in ("memory", "host", "together", "apart"):
            case.pop(rule, None)
        fewer = copy.deepcopy(case)
        for table in fewer["tables"]:
            ways = table["ways"]
            kept = rng.choice(len(ways), int(rng.integers(1, len(ways) + 1)), False)
            table["ways"] = [ways[number] for number in sorted(kept)]
        more_ms, fewer_ms = proof_of(case), proof_of(fewer)
        # HiGHS stops within 0.1 % of the best choice.
        assert more_ms <= fewer_ms * 1.001
        lower += more_ms < 0.99 * fewer_ms
    assert lower > 5


def test_no_bound_is_above_the_best_placement_of_a_random_task() -> None:
    rng = np.random.default_rng(11)
    outcomes = [
        against_truth.examine(against_truth.draw(rng), all_bounds=True)
        for _ in range(15)
    ]
    assert not [text for text, _ in outcomes if text.startswith("failure")]
    assert sum("prices" in figures for _, figures in outcomes) > 5
