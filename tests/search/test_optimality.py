"""The search and its bound beside every placement there is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.builders import draw_memory, draw_tables, make_tables, make_task
from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.features import FEATURE_NAMES
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search import NeuroShardSearcher, SearchConfig
from torchrec_neuroshard.search.exhaustive import ExhaustiveSearcher, count_placements
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

LOCAL_SEARCH = SearchConfig(exhaustive_limit=0, time_budget_seconds=60.0)
"""Without the exact solution of tiny tasks, so that the search itself is tested."""


class RandomNetModel(CostModel):
    """A physical estimate bent by a random monotone net over the summed encodings."""

    name = "random net"

    def __init__(self, seed: int, latent: int = 20, hidden: int = 32) -> None:
        rng = np.random.default_rng(seed)
        self._latent = latent
        self._mix = rng.normal(size=(6, latent)) * 0.7
        self._shift = rng.normal(size=latent)
        self._first = np.abs(rng.normal(size=(latent, hidden))) * 0.4
        self._bias = rng.normal(size=hidden)
        self._second = np.abs(rng.normal(size=(hidden, 2))) / hidden

    @property
    def encoding_dim(self) -> int:
        return self._latent + 3

    def encode(self, features_NF: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        def column(name: str) -> npt.NDArray[np.float64]:
            return features_NF[:, FEATURE_NAMES.index(name)].astype(np.float64)

        inputs = np.stack(
            [
                np.log1p(column("num_lookups")) / 10,
                np.log1p(column("lookup_bytes")) / 12,
                column("log2_rows") / 16,
                column("log2_width") / 6,
                column("log2_reuse") / 5,
                column("width_mod_16"),
            ],
            axis=1,
        )
        totals = [column(n) for n in ("num_tables", "num_lookups", "lookup_bytes")]
        latent = np.log1p(np.exp(inputs @ self._mix + self._shift))
        return np.concatenate([np.stack(totals, axis=1), latent], axis=1)

    def predict_sums(self, sums_SE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        physical = 0.02 + sums_SE[:, 1] * 1e-6 + sums_SE[:, 2] * 1e-7
        hidden = np.maximum(
            0.0, np.log1p(np.maximum(sums_SE[:, 3:], 0.0)) @ self._first + self._bias
        )
        bend = 0.5 + hidden @ self._second / 3
        costs: npt.NDArray[np.float64] = physical[:, None] * bend * (1.0, 2.0)
        costs[sums_SE[:, 0] < 0.5] = 0.0
        return costs


def tiny_task(seed: int) -> ShardingTask:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 9))
    widths = [4, 8, 12, 16] if count <= 5 else [4, 8, 12] if count < 7 else [4, 4, 8]
    tables = draw_tables(rng, count, widths, spread=1.0)
    memory: tuple[int, ...] = ()
    if seed % 2:
        memory = draw_memory(rng, tables, 3, total=1.25)
    return make_task(
        tables,
        3,
        4096,
        memory_bytes=memory,
        min_widths=() if seed % 3 else (8,) * count,
        uneven=seed % 5 != 0,
    )


def losses(
    seeds: range, cost_model: CostModel, config: SearchConfig
) -> npt.NDArray[np.float64]:
    """Relative loss of the search on each feasible task; checks the bound as well."""
    comms_model: CommsModel = AnalyticCommsModel()
    found = []
    for seed in seeds:
        task = tiny_task(seed)
        try:
            best = ExhaustiveSearcher().search(task, cost_model, comms_model)
        except InfeasibleError:
            with pytest.raises(InfeasibleError, match=r"[GMK]iB"):
                NeuroShardSearcher(config).search(task, cost_model, comms_model)
            continue
        result = NeuroShardSearcher(config).search(task, cost_model, comms_model)
        result.placement.check(task)
        optimum = best.predicted.critical_path_ms
        assert best.lower_bound_ms == pytest.approx(optimum)
        assert result.lower_bound_ms <= optimum * (1 + 1e-9), f"task {seed}"
        found.append(result.predicted.critical_path_ms / optimum - 1)
    loss = np.array(found)
    assert loss.min() >= -1e-9
    return loss


def test_the_optimum_is_reached_and_never_beaten() -> None:
    loss = losses(range(14), AnalyticCostModel(launch_ms=0.02), LOCAL_SEARCH)
    assert len(loss) >= 8
    assert (loss < 1e-6).mean() >= 0.95
    assert loss.max() <= 0.01


def test_the_optimum_is_reached_under_a_net() -> None:
    loss = losses(range(10), RandomNetModel(1), LOCAL_SEARCH)
    assert len(loss) >= 5
    assert (loss < 1e-6).mean() >= 0.95
    assert loss.max() <= 0.01


@pytest.mark.nightly
def test_ninety_tasks() -> None:
    # 120 tasks, of which some 30 are infeasible.
    loss = losses(range(120), AnalyticCostModel(launch_ms=0.02), LOCAL_SEARCH)
    assert len(loss) >= 80
    assert (loss < 1e-6).mean() >= 0.95
    assert loss.max() <= 0.01


def test_tiny_tasks_are_solved_exactly() -> None:
    loss = losses(range(6), RandomNetModel(2), SearchConfig())
    assert loss.max() < 1e-12


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
