"""Simulated annealing: its running costs are exact, its steps legal, its plans good."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.papers.annealing import (
    AnnealingConfig,
    AnnealingSearcher,
)
from torchrec_neuroshard.papers.heuristics import CostGreedySearcher
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.testing.cases import sample_task
from torchrec_neuroshard.testing.exhaustive import ExhaustiveSearcher

MODELS = AnalyticCostModel(), AnalyticCommsModel(gb_per_s=1.0)


class Ordering(AnalyticCommsModel):
    """Columns of split tables are put in order, which costs about as much as helps."""

    def column_order(
        self, columns_N: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        return np.repeat(columns_N[:, None] * 5e-4, 2, axis=1)


@pytest.mark.parametrize("seed", range(2))
def test_more_steps_never_end_worse(seed: int) -> None:
    """Running costs that drift from the simulator's would take worse for better."""
    task = sample_task(12, 3, seed=seed, groups=(0, 1, 2) * 4, stages=(0, 0, 1))
    models = MODELS[0], Ordering(gb_per_s=1.0)
    # As cold at the end as at the start: the first steps of all runs are the same.
    cold = AnnealingConfig(chains=1, hottest=1e-9, coldest=1e-9)
    paths = [CostGreedySearcher().search(task, *models).predicted.critical_path_ms]
    for steps in (1, 2, 5, 10, 20, 50, 100, 200):
        searcher = AnnealingSearcher(dataclasses.replace(cold, steps=steps))
        found = searcher.search(task, *models)
        paths.append(found.predicted.critical_path_ms)
    assert all(late <= early * (1 + 1e-9) for early, late in pairwise(paths))
    assert paths[-1] < paths[1]


@pytest.mark.parametrize("seed", range(2))
def test_tiny_tasks_are_solved(seed: int) -> None:
    task = sample_task(4, 3, seed=seed)
    best = ExhaustiveSearcher().search(task, *MODELS).predicted.critical_path_ms
    config = AnnealingConfig(chains=8, steps=1000)
    found = AnnealingSearcher(config).search(task, *MODELS)
    # Cuts are near even, so that the best of all placements may be out of reach.
    assert found.predicted.critical_path_ms <= 1.02 * best


def test_a_spent_budget_and_bad_settings_are_told() -> None:
    config = AnnealingConfig(chains=4, steps=300, time_budget_seconds=1e-9)
    (warning,) = AnnealingSearcher(config).search(sample_task(20, 4), *MODELS).warnings
    assert "spent after 0 of 300 steps, before it cooled down" in warning
    with pytest.raises(ConfigError, match="chains and steps must be at least 1, got 0"):
        AnnealingConfig(chains=0)
    with pytest.raises(ConfigError, match="temperatures must be above 0 and fall"):
        AnnealingConfig(hottest=1e-9)
