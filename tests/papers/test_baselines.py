"""Baselines of `benchmarks/papers`: greedies, an integer program, annealing."""

from __future__ import annotations

import dataclasses

import pytest

from papers.annealing import AnnealingConfig, AnnealingSearcher
from papers.heuristics import CostGreedySearcher, GreedySearcher
from papers.milp import MilpConfig, MilpSearcher
from tests.builders import make_tables, make_task, run_search
from tests.search.exhaustive import ExhaustiveSearcher
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.search.base import Searcher
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.testing.cases import sample_task

# Without a launch, costs of shards add up; collectives cost next to nothing.
MODELS = AnalyticCostModel(launch_ms=0.0), AnalyticCommsModel(gb_per_s=1e9)


def ranks_of(searcher: Searcher, problem: ShardingTask) -> list[int]:
    placement = run_search(searcher, problem, *MODELS).placement
    assert len(placement.shards) == len(problem.tables)  # whole tables only
    return [s.rank for s in placement.shards]


# Sizes 40, 32, 24, 16 (x 100 bytes): 40 | 32, then 24 joins 32, 16 joins 40.
# Widths 4, 8, 12, 16: 16 | 12, 8 joins 12, 4 joins 16.
# Lookups 4, 24, 12, 32: 32 | 24, 12 joins 24, 4 joins 32.
# Times log10 rows 9.6, 48, 20.4, 44.7: 48 | 44.7, 20.4 joins 44.7, 9.6 joins 48.
def test_greedies_by_hand() -> None:
    rows, widths, pooling = (250, 100, 50, 25), (4, 8, 12, 16), (1.0, 3.0, 1.0, 2.0)
    problem = make_task(make_tables(widths, rows, pooling), 2, 256)
    for key in ("size", "dim", "lookup"):
        assert ranks_of(GreedySearcher(key), problem) == [0, 1, 1, 0], key
    assert ranks_of(GreedySearcher("size-lookup"), problem) == [0, 0, 1, 1]
    tables = make_tables([16] * 5, 10**4, [1.0, 8.0, 5.0, 4.0, 2.0])
    # 8 | 5 -> 8 | 5 + 4 -> 8 + 2 | 9 -> 10 | 9 + 1
    expected = [1, 0, 1, 1, 0]
    assert ranks_of(CostGreedySearcher(), make_task(tables, 2, 512)) == expected


def test_a_full_rank_is_never_chosen() -> None:
    # After 32 | 24, rank 1 has the fewest columns, but its memory is full.
    tables = make_tables([32, 24, 16], [100, 4_000, 100])
    problem = make_task(tables, 2, memory=24 * 4 * 4_000)
    assert ranks_of(GreedySearcher("dim"), problem) == [0, 1, 0]


def test_annealing_solves_a_tiny_task_and_notes_a_short_budget() -> None:
    task, models = sample_task(4, 3), (AnalyticCostModel(), AnalyticCommsModel(1.0))
    best = run_search(ExhaustiveSearcher(), task, *models).predicted.critical_path_ms
    config = AnnealingConfig(chains=8, steps=1000)
    found = run_search(AnnealingSearcher(config), task, *models)
    # Shards are nearly equal, so the best placement may be out of reach.
    assert found.predicted.critical_path_ms <= 1.02 * best
    hurried = dataclasses.replace(config, time_budget_seconds=1e-9)
    (warning,) = run_search(AnnealingSearcher(hurried), task, *models).warnings
    assert "ended after 0 of 1000 steps, before the annealing cooled" in warning
    with pytest.raises(ConfigError, match="chains and steps must be at least 1, got 0"):
        AnnealingConfig(chains=0)


def test_the_integer_program_is_optimal_where_costs_add_up() -> None:
    exact = MilpSearcher(MilpConfig(relative_gap=0.0))
    problem = dataclasses.replace(sample_task(5, 3), max_shards=(1,) * 5)
    best = run_search(ExhaustiveSearcher(), problem, *MODELS)
    found = run_search(exact, problem, *MODELS)
    assert found.fallback is None
    optimum = best.predicted.critical_path_ms
    assert found.predicted.critical_path_ms == pytest.approx(optimum, rel=1e-5)
    # By the sum of both stages alone, one rank could hold all of a stage.
    alike = make_tables([16] * 4, pooling=9)
    staged = make_task(
        alike, 2, max_shards=(1,) * 4, groups=(0, 0, 1, 1), stages=(0, 1)
    )
    ranks = ranks_of(exact, staged)
    assert ranks[0] != ranks[1] and ranks[2] != ranks[3]


def test_without_a_plan_of_highs_the_greedy_plan_is_the_fallback() -> None:
    hurried = MilpSearcher(MilpConfig(time_budget_seconds=1e-9))
    fallback = run_search(hurried, sample_task(30, 4), *MODELS).fallback
    assert fallback is not None and "this is the greedy plan" in fallback
    # The greedy fails, since whole tables do not fit.
    wide = make_task(make_tables([64] * 3, pooling=9), 4, memory=800 * 64 * 4)
    fallback = run_search(hurried, wide, *MODELS).fallback
    assert fallback is not None and "a plan that fits" in fallback
