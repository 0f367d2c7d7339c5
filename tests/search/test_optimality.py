"""The search and its bounds against every placement of tiny tasks."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from tests.builders import (
    draw_memory,
    draw_tables,
    make_tables,
    make_task,
    run_search,
    search,
)
from tests.fuzz import against_truth
from tests.search.exhaustive import ExhaustiveSearcher, count_placements
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

COMMS = AnalyticCommsModel(gb_per_s=10.0)
BOUNDED = SearchConfig(time_budget_seconds=60.0, bound="thorough")
NOTHING_FITS = (InfeasibleError, ConfigError)


def tiny_task(seed: int) -> ShardingTask:
    """Return a few tables on three ranks, with limits that vary with the seed."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 9))
    widths = [4, 8, 12, 16] if count <= 5 else [4, 8, 12] if count < 7 else [4, 4, 8]
    tables = draw_tables(rng, count, widths, spread=1.0)
    groups = tuple(i % 2 for i in range(count)) if seed % 4 in (1, 2) else ()
    return make_task(
        tables,
        3,
        4096,
        memory_bytes=draw_memory(rng, tables, 3, total=1.25) if seed % 2 else (),
        min_widths=() if seed % 3 else (8,) * count,
        uneven=seed % 5 != 0,
        groups=groups,
        stages=(0, 1) if groups and seed % 4 == 2 else (),
    )


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("analytic", range(10)),
        ("cpu", range(3)),
        pytest.param("analytic", range(10, 120), marks=pytest.mark.nightly),
        pytest.param("cpu", range(3, 24), marks=pytest.mark.nightly),
    ],
)
def test_the_search_finds_the_best_placement_and_no_bound_is_above_it(
    name: str, seeds: range
) -> None:
    analytic = AnalyticCostModel(launch_ms=0.03)
    model = analytic if name == "analytic" else load_cost_model(name)
    # Nets compute in single precision, which rounds more.
    rounding = 1e-9 if model is analytic else 1e-6
    losses, gaps = [], []
    for seed in seeds:
        task = tiny_task(seed)
        try:
            best = run_search(ExhaustiveSearcher(), task, model, COMMS)
        except NOTHING_FITS:
            with pytest.raises(NOTHING_FITS):
                search(task, BOUNDED, model, COMMS)
            continue
        best.placement.check(task)
        optimum = best.predicted.critical_path_ms
        assert best.lower_bound_ms == pytest.approx(optimum) and best.bound_is_proven
        result = search(task, BOUNDED, model, COMMS)
        result.placement.check(task)
        losses.append(result.predicted.critical_path_ms / optimum - 1)
        assert result.lower_bound_ms <= optimum * (1 + rounding), f"task {seed}"
        if model is analytic:
            bounds_ms = against_truth.bounds_of(task, (analytic, COMMS)).values()
            assert max(bounds_ms) <= optimum * (1 + rounding), f"task {seed}"
            gaps += [optimum / bound_ms - 1 for bound_ms in bounds_ms]
    assert len(losses) > len(seeds) / 3
    assert min(losses) >= -rounding and max(losses) <= 0.01
    assert (np.array(losses) < 1e-6).mean() >= 0.95
    assert model is not analytic or np.median(gaps) < 0.15


def test_exhaustive_search_tries_every_placement() -> None:
    """Tasks have all sharding types and rules; `Placement.check` says what is legal."""
    found = []
    for seed in range(40):
        case = against_truth.draw(Random(seed))
        task, models = against_truth.build(case), against_truth.models(case["models"])
        if math.prod(map(len, against_truth.choices(task))) > 1000:
            continue
        simulator = Simulator(task, *models)
        every = against_truth.placements(task)
        costs = [simulator.evaluate(p).critical_path_ms for p in every]
        found.append(len(costs))
        if not costs:
            with pytest.raises(NOTHING_FITS):
                run_search(ExhaustiveSearcher(), task, *models)
            continue
        best = run_search(ExhaustiveSearcher(), task, *models)
        assert best.predicted.critical_path_ms == pytest.approx(min(costs))
    assert min(found) == 0 and sum(count > 10 for count in found) > 3, found


def test_exhaustive_search_by_hand() -> None:
    # 100, 60 and 40 lookups per sample at width 4: best is {100} and {60, 40}.
    task = make_task(make_tables([4] * 3, pooling=[100.0, 60.0, 40.0]), 2, 1000)
    result = run_search(ExhaustiveSearcher(), task)
    rank = [s.rank for s in result.placement.shards]
    assert rank[0] != rank[1] == rank[2]
    # 0.01 + 1e5 lookups x (1 ns + 16 bytes x 0.1 ns) forward, twice that backward;
    # collectives: 8 of 12 columns x 1000 x 4 x 1/2 bytes at 1e8 bytes per ms, twice;
    # 1e5 ids and 2 x 1000 lengths of 8 bytes, half of them from the other rank.
    expected = 3 * (0.01 + 1e5 * 2.6e-6) + (2 * 8 * 2000 + 1.02e5 * 4) / 1e8
    assert result.predicted.critical_path_ms == pytest.approx(expected)
    assert count_placements(task) == pytest.approx(8)
