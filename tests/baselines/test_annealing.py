"""Simulated annealing: its running costs are exact, its steps legal, its plans good."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from torchrec_neuroshard.baselines.annealing import (
    AnnealingConfig,
    AnnealingSearcher,
    _Chains,
    _first,
    _Proposals,
)
from torchrec_neuroshard.baselines.heuristics import CostGreedySearcher
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search.exhaustive import ExhaustiveSearcher
from torchrec_neuroshard.search.shards import placement_from_widths
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.testing.cases import sample_task

MODELS = AnalyticCostModel(), AnalyticCommsModel(gb_per_s=1.0)
QUICK = AnnealingConfig(chains=4, steps=300)


@pytest.mark.parametrize("uneven", [True, False])
def test_running_costs_are_the_simulators(uneven: bool) -> None:
    task = sample_task(12, 3, uneven=uneven, groups=(0, 1, 2) * 4, stages=(0, 0, 1))
    simulator = Simulator(task, *MODELS)
    chains = _Chains(simulator, _first(simulator), 4)
    proposals = _Proposals(chains.bank, QUICK)
    rng = np.random.default_rng(0)
    limit = np.full(4, np.inf)
    moved = sum(
        len(chains.take(proposals.draw(chains.state, rng), limit)) for _ in range(100)
    )
    assert moved > 200
    assert len({widths.tobytes() for widths in chains.state.width_CTW}) == 4
    for widths, ms in zip(chains.state.width_CTW, chains.state.ms_C, strict=True):
        placement = placement_from_widths(widths)
        placement.check(task)
        assert len(placement.shards) > 12
        wanted = simulator.evaluate(placement).critical_path_ms
        assert ms == pytest.approx(wanted, rel=1e-9)


def test_refused_steps_change_nothing() -> None:
    simulator = Simulator(sample_task(12, 3), *MODELS)
    chains = _Chains(simulator, _first(simulator), 4)
    before = chains.state.width_CTW.copy(), chains.state.amounts_CWK.copy()
    proposals, rng = _Proposals(chains.bank, QUICK), np.random.default_rng(0)
    for _ in range(20):
        assert not len(chains.take(proposals.draw(chains.state, rng), np.zeros(4)))
    assert np.array_equal(chains.state.width_CTW, before[0])
    assert np.array_equal(chains.state.amounts_CWK, before[1])


@pytest.mark.parametrize("seed", range(4))
def test_tiny_tasks_are_solved(seed: int) -> None:
    task = sample_task(4, 3, seed=seed)
    best = ExhaustiveSearcher().search(task, *MODELS).predicted.critical_path_ms
    config = AnnealingConfig(chains=8, steps=1000)
    found = AnnealingSearcher(config).search(task, *MODELS)
    # Cuts are near even, so that the best of all placements may be out of reach.
    assert found.predicted.critical_path_ms <= 1.02 * best


def test_never_worse_than_where_it_starts() -> None:
    for seed in range(3):
        task = sample_task(20, 4, seed=seed)
        greedy = CostGreedySearcher().search(task, *MODELS)
        found = AnnealingSearcher(QUICK).search(task, *MODELS)
        bound = greedy.predicted.critical_path_ms
        assert found.predicted.critical_path_ms < bound


def test_memory_is_kept_all_along() -> None:
    task = sample_task(12, 3)
    sizes = [task.shard_bytes(i, t.embedding_dim) for i, t in enumerate(task.tables)]
    cap = int(1.05 * max(sum(sizes) / 3, *sizes))
    task = dataclasses.replace(task, memory_bytes=(cap,) * 3)
    placement = AnnealingSearcher(QUICK).search(task, *MODELS).placement
    placement.check(task)
    assert max(placement.rank_bytes(task)) <= cap


def test_seeds_and_budgets() -> None:
    task: ShardingTask = sample_task(20, 4)

    def place(config: AnnealingConfig) -> object:
        return AnnealingSearcher(config).search(task, *MODELS).placement

    assert place(QUICK) == place(QUICK)
    assert place(QUICK) != place(dataclasses.replace(QUICK, seed=1))
    config = dataclasses.replace(QUICK, time_budget_seconds=1e-9)
    (warning,) = AnnealingSearcher(config).search(task, *MODELS).warnings
    assert "spent after 0 of 300 steps, before it cooled down" in warning


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"chains": 0}, "chains and steps must be at least 1, got 0 and"),
        ({"hottest": 1e-9}, "temperatures must be above 0 and fall"),
        ({"split_share": 0.8}, r"lie in 0 to 1 together, got \(0.8, 0.3\)"),
        ({"time_budget_seconds": 0}, "time_budget_seconds must be above 0, got 0"),
    ],
)
def test_bad_settings_are_named(setting: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AnnealingConfig(**setting)  # type: ignore[arg-type]
