"""Simulated annealing: exact running costs, legal steps, good plans."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from papers.annealing import (
    AnnealingConfig,
    AnnealingSearcher,
)
from papers.heuristics import CostGreedySearcher
from tests.builders import run_search
from tests.search.exhaustive import ExhaustiveSearcher
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.testing.cases import sample_task


class Ordering(AnalyticCostModel):
    """Reordering split columns costs about what splits save, or nothing."""

    def __init__(self, byte_ms: float) -> None:
        super().__init__()
        self.byte_ms = byte_ms

    def column_order(self, bytes_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.repeat(bytes_N[..., None] * self.byte_ms, 2, axis=-1)


MODELS = Ordering(0.0), AnalyticCommsModel(gb_per_s=1.0)


@pytest.mark.parametrize("seed", range(2))
def test_more_steps_never_end_worse(seed: int) -> None:
    """If running costs drifted from the simulator's, a longer run could end worse."""
    task = sample_task(12, 3, seed=seed, groups=(0, 1, 2) * 4, stages=(0, 0, 1))
    local_bytes = 4 * task.batch_size / task.world_size
    models = Ordering(5e-4 / local_bytes), MODELS[1]
    # The temperature is constant, so all runs share their first steps.
    cold = AnnealingConfig(chains=1, hottest=1e-9, coldest=1e-9)
    paths = [run_search(CostGreedySearcher(), task, *models).predicted.critical_path_ms]
    for steps in (1, 2, 5, 10, 20, 50, 100, 200):
        searcher = AnnealingSearcher(dataclasses.replace(cold, steps=steps))
        found = run_search(searcher, task, *models)
        paths.append(found.predicted.critical_path_ms)
    assert all(late <= early * (1 + 1e-9) for early, late in pairwise(paths))
    assert paths[-1] < paths[1]


@pytest.mark.parametrize("seed", range(2))
def test_tiny_tasks_are_solved(seed: int) -> None:
    task = sample_task(4, 3, seed=seed)
    best = run_search(ExhaustiveSearcher(), task, *MODELS).predicted.critical_path_ms
    config = AnnealingConfig(chains=8, steps=1000)
    found = run_search(AnnealingSearcher(config), task, *MODELS)
    # Shards are nearly equal, so the best placement may be out of reach.
    assert found.predicted.critical_path_ms <= 1.02 * best


def test_a_short_time_budget_is_noted_and_bad_settings_are_errors() -> None:
    config = AnnealingConfig(chains=4, steps=300, time_budget_seconds=1e-9)
    (warning,) = run_search(
        AnnealingSearcher(config), sample_task(20, 4), *MODELS
    ).warnings
    assert "ended after 0 of 300 steps, before the annealing cooled" in warning
    with pytest.raises(ConfigError, match="chains and steps must be at least 1, got 0"):
        AnnealingConfig(chains=0)
    with pytest.raises(ConfigError, match="coldest must be above 0 and at most"):
        AnnealingConfig(hottest=1e-9)
