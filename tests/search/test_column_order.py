"""Splits must pay for the reordering of the outputs that they bring about."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search.base import SearchConfig, SearchResult
from torchrec_neuroshard.search.default import NeuroShardSearcher
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

TASK = ShardingTask(
    tables=tuple(
        TableConfig(
            name=f"t{i}",
            num_embeddings=10_000,
            embedding_dim=width,
            pooling_factor=pooling,
        )
        for i, (width, pooling) in enumerate([(128, 40.0), (64, 5.0), (32, 2.0)] * 3)
    ),
    world_size=4,
    batch_size=4096,
)


class OrderCosts(AnalyticCommsModel):
    """So many milliseconds each way."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms

    def column_order(
        self, columns_C: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        return np.full((len(columns_C), 2), self.ms)


def search(order_ms: float, task: ShardingTask = TASK) -> SearchResult:
    config = SearchConfig(restarts=2, effort=0.3)
    return NeuroShardSearcher(config).search(
        task, AnalyticCostModel(), OrderCosts(order_ms)
    )


def is_split(result: SearchResult) -> bool:
    return len(result.placement.shards) > len(TASK.tables)


def test_tables_are_split_only_where_it_pays_for_the_order() -> None:
    free, whole = search(0.0), search(1e3)
    assert is_split(free) and not is_split(whole)
    gain = whole.predicted.critical_path_ms - free.predicted.critical_path_ms
    assert gain > 0
    # Each way costs a bit less, and a bit more, than half the gain.
    assert is_split(search(0.45 * gain))
    assert not is_split(search(0.55 * gain))


def test_result_counts_the_order_and_keeps_the_bound() -> None:
    for order_ms in (1e-3, 1e3):
        result = search(order_ms)
        again = Simulator(TASK, AnalyticCostModel(), OrderCosts(order_ms)).evaluate(
            result.placement
        )
        assert result.predicted.critical_path_ms == pytest.approx(
            again.critical_path_ms
        )
        assert 0 < result.lower_bound_ms <= result.predicted.critical_path_ms


def test_splits_that_memory_forces_stay() -> None:
    largest = max(t.weight_bytes for t in TASK.tables)
    tight = ShardingTask(
        tables=TASK.tables[:3],
        world_size=4,
        batch_size=TASK.batch_size,
        memory_bytes=(int(0.9 * largest),) * 4,
    )
    result = search(1e3, tight)
    assert len(result.placement.shards) > len(tight.tables)
