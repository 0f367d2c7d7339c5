"""Integer programming on single-shard costs: optimal if costs add up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from papers.milp import MilpConfig, MilpSearcher
from tests.builders import make_tables, make_task, run_search
from tests.search.exhaustive import ExhaustiveSearcher
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.testing.cases import sample_task

# Without a launch, costs of shards add up; collectives cost next to nothing.
MODELS = AnalyticCostModel(launch_ms=0.0), AnalyticCommsModel(gb_per_s=1e9)
EXACT = MilpConfig(relative_gap=0.0)


def alike(count: int, world_size: int, width: int = 16, **kwargs: Any) -> ShardingTask:
    return make_task(make_tables([width] * count, pooling=9), world_size, **kwargs)


@pytest.mark.parametrize("seed", range(2))
def test_no_assignment_is_better_where_costs_add_up(seed: int) -> None:
    problem = dataclasses.replace(sample_task(5, 3, seed=seed), max_shards=(1,) * 5)
    best = run_search(ExhaustiveSearcher(), problem, *MODELS)
    found = run_search(MilpSearcher(EXACT), problem, *MODELS)
    assert found.fallback is None
    optimum = best.predicted.critical_path_ms
    assert found.predicted.critical_path_ms == pytest.approx(optimum, rel=1e-5)


def test_tables_are_cut_where_that_pays() -> None:
    # Only bytes cost time here, and a cut halves them.
    models = AnalyticCostModel(launch_ms=0.0, lookup_ns=0.0), MODELS[1]
    found = run_search(MilpSearcher(EXACT), alike(3, 2), *models)
    whole = alike(3, 2, max_shards=(1,) * 3)
    kept = run_search(MilpSearcher(EXACT), whole, *models)
    assert sorted(s.width for s in found.placement.shards) in ([8, 8, 16, 16], [8] * 6)
    assert [s.width for s in kept.placement.shards] == [16] * 3
    ratio = found.predicted.critical_path_ms / kept.predicted.critical_path_ms
    assert ratio == pytest.approx(1.5 / 2, rel=1e-4)


def test_each_stage_is_balanced() -> None:
    # By the sum of both stages alone, one rank could hold all of a stage.
    problem = alike(4, 2, groups=(0, 0, 1, 1), stages=(0, 1), max_shards=(1,) * 4)
    found = run_search(MilpSearcher(EXACT), problem, *MODELS)
    ranks = [s.rank for s in found.placement.shards]
    assert ranks[0] != ranks[1] and ranks[2] != ranks[3]


def test_without_a_plan_of_highs_the_greedy_plan_is_the_fallback() -> None:
    hurried = MilpSearcher(MilpConfig(time_budget_seconds=1e-9))
    found = run_search(hurried, sample_task(30, 4), *MODELS)
    assert found.fallback is not None
    assert "this is the greedy plan" in found.fallback
    # The greedy fails, since whole tables do not fit.
    found = run_search(hurried, alike(3, 4, width=64, memory=800 * 64 * 4), *MODELS)
    assert found.fallback is not None
    assert (
        "HiGHS found no plan" in found.fallback and "a plan that fits" in found.fallback
    )


def test_bad_limits_are_named() -> None:
    with pytest.raises(ConfigError, match="time_budget_seconds must be above 0"):
        MilpConfig(time_budget_seconds=0)
