"""The search and its bounds beside every placement there is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.builders import draw_memory, draw_tables, make_tables, make_task, search
from torchrec_neuroshard.cost_models import load_cost_model
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search import SearchConfig, bounds
from torchrec_neuroshard.search.bounds import lower_bound
from torchrec_neuroshard.search.exhaustive import ExhaustiveSearcher, count_placements
from torchrec_neuroshard.search.shards import ShardBank, placement_from_widths
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

COMMS = AnalyticCommsModel(gb_per_s=10.0)
LOCAL_SEARCH = SearchConfig(exhaustive_limit=0, time_budget_seconds=60.0)
"""Without the exact solution of tiny tasks, so that the search itself is tested."""
NOTHING_FITS = (InfeasibleError, ConfigError)


def draw_rules(rng: np.random.Generator, count: int) -> dict[str, Any]:
    """Some tables with few ranks, some sets of either kind."""

    def sets(chance: float) -> tuple[tuple[int, ...], ...]:
        if rng.random() > chance:
            return ()
        size = int(rng.integers(2, min(count, 4)))
        return (tuple(rng.choice(count, size, replace=False).tolist()),)

    return {
        "allowed_ranks": tuple(
            tuple(np.flatnonzero(rng.random(3) < 0.6).tolist())
            if rng.random() < 0.4
            else ()
            for _ in range(count)
        ),
        "together": sets(0.5),
        "apart": sets(0.6) + sets(0.3),
    }


def tiny_task(seed: int, *, ruled: bool, **fields: Any) -> ShardingTask:
    """A few tables on three ranks, with limits of all kinds, and rules on ranks."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 5 if ruled else 9))
    widths = [4, 8, 12, 16] if count <= 5 else [4, 8, 12] if count < 7 else [4, 4, 8]
    tables = draw_tables(rng, count, widths, spread=1.0)
    groups = tuple(i % 2 for i in range(count)) if seed % 4 in (1, 2) else ()
    limits: dict[str, Any] = {
        "memory_bytes": draw_memory(rng, tables, 3, total=1.25) if seed % 2 else (),
        "min_widths": () if seed % 3 else (8,) * count,
        "uneven": seed % 5 != 0,
        "groups": groups,
        "stages": (0, 1) if groups and seed % 4 == 2 else (),
        **(draw_rules(rng, count) if ruled else {}),
    }
    return make_task(tables, 3, 4096, **(limits | fields))


@pytest.mark.parametrize(
    ("name", "ruled", "seeds"),
    [
        ("analytic", False, range(10)),
        ("analytic", True, range(24)),
        ("cpu", False, range(3)),
        pytest.param("analytic", False, range(10, 120), marks=pytest.mark.nightly),
        pytest.param("analytic", True, range(24, 80), marks=pytest.mark.nightly),
        pytest.param("cpu", False, range(3, 24), marks=pytest.mark.nightly),
    ],
)
def test_the_best_of_all_placements_is_found_and_no_bound_is_above_it(
    name: str, ruled: bool, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    analytic = AnalyticCostModel(launch_ms=0.03)
    model = analytic if name == "analytic" else load_cost_model(name)
    # Nets compute in single precision.
    rounding = 1e-9 if model is analytic else 1e-6
    losses, gaps, infeasible = [], [], 0
    for seed in seeds:
        task = tiny_task(seed, ruled=ruled)
        try:
            best = ExhaustiveSearcher().search(task, model, COMMS)
        except NOTHING_FITS:
            with pytest.raises(NOTHING_FITS):
                search(task, LOCAL_SEARCH, model, COMMS)
            infeasible += 1
            continue
        best.placement.check(task)
        optimum = best.predicted.critical_path_ms
        assert best.lower_bound_ms == pytest.approx(optimum) and best.bound_is_proven
        result = search(task, LOCAL_SEARCH, model, COMMS)
        result.placement.check(task)
        losses.append(result.predicted.critical_path_ms / optimum - 1)
        assert result.lower_bound_ms <= optimum * (1 + rounding), f"task {seed}"
        exact = search(task, SearchConfig(), model, COMMS).predicted.critical_path_ms
        assert exact == pytest.approx(optimum, rel=1e-3 * rounding)
        if ruled:
            continue
        width_TW = np.zeros((len(task.tables), 3), dtype=np.int64)
        for shard in best.placement.shards:
            width_TW[shard.table, shard.rank] = shard.width
        bank = ShardBank(Simulator(task, model, COMMS))
        for most, is_proven in ((bounds.MAX_ENUMERATED, True), (0, False)):
            with monkeypatch.context() as patch:
                patch.setattr(bounds, "MAX_ENUMERATED", most)
                # A cutoff above the optimum, as after a search that missed it.
                bound = lower_bound(bank, [width_TW], 1.02 * optimum)
            assert bound.ms <= optimum * (1 + rounding), f"task {seed}"
            assert bound.is_proven is is_proven
            gaps.append(optimum / bound.ms - 1)
    assert len(losses) > len(seeds) / 3 and (infeasible or len(seeds) < 10)
    assert min(losses) >= -rounding and max(losses) <= 0.01
    assert (np.array(losses) < 1e-6).mean() >= 0.95
    assert ruled or np.median(gaps) < 0.1


def test_every_placement_of_whole_tables_is_tried() -> None:
    """Against the placement's own check of each."""
    model = AnalyticCostModel(launch_ms=0.05)
    for seed in range(12):
        count = len(tiny_task(seed, ruled=True).tables)
        task = tiny_task(seed, ruled=True, max_shards=(1,) * count)
        simulator, costs = Simulator(task, model, COMMS), []
        for ranks in itertools.product(range(3), repeat=count):
            width_TW = np.zeros((count, 3), dtype=np.int64)
            for table, rank in enumerate(ranks):
                width_TW[table, rank] = task.tables[table].embedding_dim
            placement = placement_from_widths(width_TW)
            try:
                placement.check(task)
            except ValueError:
                continue
            costs.append(simulator.evaluate(placement).critical_path_ms)
        if not costs:
            with pytest.raises(NOTHING_FITS):
                ExhaustiveSearcher().search(task, model, COMMS)
            continue
        best = ExhaustiveSearcher().search(task, model, COMMS)
        assert best.predicted.critical_path_ms == pytest.approx(min(costs))


def test_exhaustive_search_by_hand() -> None:
    # Lookups 100, 60, 40 per sample at width 4: {100} against {60, 40}.
    task = make_task(make_tables([4] * 3, pooling=[100.0, 60.0, 40.0]), 2, 1000)
    result = ExhaustiveSearcher().search(
        task, AnalyticCostModel(), AnalyticCommsModel()
    )
    rank = [s.rank for s in result.placement.shards]
    assert rank[0] != rank[1] == rank[2]
    # 0.01 + 1e5 lookups x (1 ns + 16 bytes x 0.1 ns) forward, twice that backward;
    # collectives: 8 of 12 columns x 1000 x 4 x 1/2 bytes over 1e8 bytes per ms, twice;
    # 1e5 ids and 2 x 1000 lengths of 8 bytes, of which half come from the other rank.
    expected = 3 * (0.01 + 1e5 * 2.6e-6) + (2 * 8 * 2000 + 1.02e5 * 4) / 1e8
    assert result.predicted.critical_path_ms == pytest.approx(expected)
    assert count_placements(task) == pytest.approx(8)
