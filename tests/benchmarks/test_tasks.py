"""Random tasks and the inputs of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.tasks import (
    PRODUCTION_WIDTHS,
    TaskConfig,
    cap_rows,
    sample_tasks,
)
from tests.builders import make_tables
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError, TableError
from torchrec_neuroshard.tables.inputs import draw_batch, feature_names
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2
from torchrec_neuroshard.tables.profile import profile_ids

TABLES = make_tables([64] * 70, range(100, 7_100, 100))


def tasks(count: int = 1, **options: Any) -> tuple[ShardingTask, ...]:
    known = {"world_size": 4, "batch_size": 1_024, "seed": 11}
    return sample_tasks(TABLES, TaskConfig(**{**known, **options}), count)


def test_tasks_are_as_the_config_says() -> None:
    drawn = tasks(60)
    assert tasks(3) == drawn[:3] != tasks(3, seed=12)
    sizes = [len(task.tables) for task in drawn]
    assert min(sizes) >= 10 and max(sizes) <= 59
    assert len(set(sizes)) > 20
    widths = {t.embedding_dim for task in drawn for t in task.tables}
    assert widths == set(PRODUCTION_WIDTHS)
    for task in drawn:
        assert (task.world_size, task.batch_size) == (4, 1_024)
        assert task.memory_bytes == ()
        assert len({t.name for t in task.tables}) == len(task.tables)
        for table in task.tables:
            assert table.num_embeddings == 100 * (int(table.name[1:]) + 1)

    def largest(**options: int) -> int:
        found = tasks(10, **options)
        return max(sum(t.weight_bytes for t in task.tables) for task in found)

    assert largest(max_total_bytes=8_000_000) <= 8_000_000 < largest()


def test_capped_rows_hold_the_ids_that_are_read() -> None:
    big = dataclasses.replace(TABLES[0], num_embeddings=10**7, pooling_factor=20.0)
    small = cap_rows(dataclasses.replace(big, profile=None), 50)
    assert small.num_embeddings == 50 and small.profile is not None
    assert small.profile.num_distinct <= 50
    assert small.profile.pooling_factor == pytest.approx(20.0)
    assert cap_rows(big, 10**8).num_embeddings == 10**7


def test_batches_profile_as_expected() -> None:
    tables = mlperf_dlrm_v2(max_rows=20_000, embedding_dim=8)
    drawn = [draw_batch(tables, 512, seed) for seed in range(4)]
    for table in tables:
        of_table = [batch[table.name] for batch in drawn]
        ids, lengths = map(np.concatenate, zip(*of_table, strict=True))
        assert (lengths == table.pooling_factor).all()
        assert ids.min() >= 0 and ids.max() < table.num_embeddings
        found, expected = profile_ids(ids, lengths), table.profile_at(4 * 512)
        assert found.num_lookups == expected.num_lookups
        about = pytest.approx(expected.num_distinct, rel=0.06, abs=6)
        assert found.num_distinct == about
    # The draw depends on seed and table.
    for name, (ids, _) in draw_batch(tables, 512, 1).items():
        np.testing.assert_array_equal(ids, drawn[1][name][0])
    assert any((drawn[1][n][0] != drawn[2][n][0]).any() for n in drawn[1])
    alone = draw_batch(tables[5:6], 512, 1)
    np.testing.assert_array_equal(alone["cat_5"][0], drawn[1]["cat_5"][0])


def test_features_of_one_table_share_its_lookups() -> None:
    (table,) = make_tables([4], 50, 6.0, num_features=3)
    batch = draw_batch([table], 10, seed=0)
    assert tuple(batch) == feature_names(table) == ("t0:0", "t0:1", "t0:2")
    assert [lengths.sum() for _, lengths in batch.values()] == [20, 20, 20]
    assert not np.array_equal(batch["t0:0"][0], batch["t0:1"][0])


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: tasks(num_tables=(5, 4)), "num_tables"),
        (lambda: tasks(num_tables=71), "71 distinct tables"),
        (lambda: tasks(max_total_bytes=100), "max_total_bytes"),
        (lambda: draw_batch([], 4, 0), "no tables"),
        (lambda: draw_batch(TABLES[:1] * 2, 4, 0), "'t0'"),
        (lambda: draw_batch(TABLES, 0, 0), "batch_size"),
        (lambda: draw_batch(TABLES, 1, -1), "seed"),
    ],
)
def test_bad_requests_are_refused(call: Callable[[], object], value: str) -> None:
    with pytest.raises((ConfigError, InfeasibleError, TableError), match=value):
        call()
