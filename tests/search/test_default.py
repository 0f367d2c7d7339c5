from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.builders import (
    draw_memory,
    draw_tables,
    make_task,
    printed_elsewhere,
    search,
)
from torchrec_neuroshard.cost_models.base import RangeWarning
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.features import FEATURE_NAMES
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search import (
    NeuroShardSearcher,
    SearchConfig,
    make_searcher,
)
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

WIDTHS = (4, 8, 12, 20, 24, 32, 64, 128)


def random_task(
    num_tables: int,
    world_size: int,
    *,
    seed: int = 0,
    memory_share: float | None = 1.3,
    **fields: Any,
) -> ShardingTask:
    rng = np.random.default_rng(seed)
    tables = draw_tables(rng, num_tables, WIDTHS, most_rows=10**7, spread=1.2)
    if memory_share is not None:
        fields["memory_bytes"] = draw_memory(
            rng, tables, world_size, total=memory_share, evenness=50.0
        )
    return make_task(tables, world_size, 4096, **fields)


@pytest.mark.parametrize("seed", range(2))
def test_plan_keeps_every_rule(seed: int) -> None:
    task = random_task(30, 4, seed=seed)
    result = search(task)
    result.placement.check(task)  # columns once, widths, memory, distinct ranks
    assert 0 < result.lower_bound_ms <= result.predicted.critical_path_ms
    assert result.gap == pytest.approx(
        result.predicted.critical_path_ms / result.lower_bound_ms - 1
    )
    assert result.num_evaluated > 0


def test_one_rank_holds_all_tables_whole() -> None:
    task = random_task(40, 1)  # one placement, but 10^40 sets of shards
    result = make_searcher("default").search(
        task, AnalyticCostModel(), AnalyticCommsModel()
    )
    assert [(s.table, s.rank) for s in result.placement.shards] == [
        (table, 0) for table in range(40)
    ]
    assert result.gap == pytest.approx(0.0, abs=0.02)


def test_limits_on_splits_are_kept() -> None:
    count = 20
    narrow = tuple(64 if i % 2 else 16 for i in range(count))
    most = tuple(1 + i % 3 for i in range(count))
    task = random_task(count, 8, min_widths=narrow, max_shards=most, memory_share=None)
    placement = search(task).placement
    placement.check(task)
    assert max(len(placement.table_shards(i)) for i in range(count)) > 1
    for i in range(count):
        shards = placement.table_shards(i)
        assert len(shards) <= most[i]
        if len(shards) > 1:
            assert min(s.width for s in shards) >= narrow[i]


def test_even_splits_stay_even() -> None:
    task = random_task(12, 8, uneven=False, memory_share=None)
    placement = search(task).placement
    split = [placement.table_shards(i) for i in range(12)]
    assert max(map(len, split)) > 1
    for shards in split:
        assert len({s.width for s in shards}) == 1


def test_order_of_tables_does_not_matter() -> None:
    task = random_task(20, 4, memory_share=None)
    turned = dataclasses.replace(task, tables=task.tables[::-1])
    assert search(turned).predicted.critical_path_ms == pytest.approx(
        search(task).predicted.critical_path_ms, rel=0.01
    )


SCRIPT = """
import json
from tests.search.test_default import random_task
from tests.builders import search
result = search(random_task(25, 4))
print(json.dumps([result.placement.to_json(), result.lower_bound_ms]))
"""


def test_same_plan_in_every_process() -> None:
    result = search(random_task(25, 4))
    plans = [[result.placement.to_json(), result.lower_bound_ms]]
    plans += [printed_elsewhere(SCRIPT, hash_seed) for hash_seed in (1, 2)]
    assert plans[0] == plans[1] == plans[2]


def test_a_spent_budget_still_gives_a_valid_plan() -> None:
    task = random_task(60, 8)
    result = search(task, SearchConfig(time_budget_seconds=1e-6))
    result.placement.check(task)
    assert 0 < result.lower_bound_ms <= result.predicted.critical_path_ms


def test_a_total_that_does_not_fit_is_told() -> None:
    task = random_task(10, 4, memory_share=0.9)
    with pytest.raises(
        InfeasibleError, match=r"in all, the 4 ranks have .* GiB; .* Raise"
    ):
        search(task)


def test_make_searcher() -> None:
    assert make_searcher("default").name == "default"
    config = SearchConfig(beam_width=1)
    made = make_searcher(config)
    assert isinstance(made, NeuroShardSearcher) and made.config is config
    assert make_searcher(made) is made
    with pytest.raises(ConfigError, match=r"unknown search 'best'; one of .*default"):
        make_searcher("best")


@pytest.mark.nightly
def test_a_thousand_tables_on_64_ranks() -> None:
    task = random_task(1000, 64)
    result = search(task, SearchConfig(effort=0.05))
    result.placement.check(task)
    assert result.gap < 0.2


class NarrowModel(AnalyticCostModel):
    """The analytic model, with a training range on the width."""

    def range_warnings(
        self, features_NF: npt.NDArray[np.float32]
    ) -> Sequence[RangeWarning]:
        width = features_NF[:, FEATURE_NAMES.index("log2_width")]
        return [
            RangeWarning(int(i), "log2_width", float(width[i]), 2.0, 6.0)
            for i in np.flatnonzero(width > 6.0)
        ]


@pytest.mark.parametrize("limit", [0, 10**9])
def test_warnings_name_table_and_feature_once(limit: int) -> None:
    tables = tuple(
        TableConfig(name=n, num_embeddings=100, embedding_dim=w)
        for n, w in (("wide", 128), ("slim", 16))
    )
    task = make_task(tables, batch_size=64, min_widths=(128, 16))
    result = search(task, SearchConfig(exhaustive_limit=limit), NarrowModel())
    assert result.warnings == (
        "table 'wide': log2_width 7 is outside the cost model's range 2 to 6",
    )
