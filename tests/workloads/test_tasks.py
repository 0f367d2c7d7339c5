from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads.tasks import (
    PRODUCTION_WIDTHS,
    TaskConfig,
    cap_rows,
    sample_tasks,
)

TABLES = tuple(
    TableConfig(name=f"t{i}", num_embeddings=100 * (i + 1), embedding_dim=64)
    for i in range(70)
)
CONFIG = TaskConfig(world_size=4, batch_size=1_024, seed=11)


def test_tasks_are_as_the_config_says() -> None:
    tasks = sample_tasks(TABLES, CONFIG, 60)
    assert sample_tasks(TABLES, CONFIG, 3) == tasks[:3]
    assert sample_tasks(TABLES, dataclasses.replace(CONFIG, seed=12), 3) != tasks[:3]
    sizes = [len(task.tables) for task in tasks]
    assert min(sizes) >= 10 and max(sizes) <= 59
    assert len(set(sizes)) > 20
    widths = {t.embedding_dim for task in tasks for t in task.tables}
    assert widths == set(PRODUCTION_WIDTHS)
    for task in tasks:
        assert (task.world_size, task.batch_size) == (4, 1_024)
        assert task.memory_bytes == ()
        assert len({t.name for t in task.tables}) == len(task.tables)
        for table in task.tables:
            assert table.num_embeddings == 100 * (int(table.name[1:]) + 1)


def test_total_bytes_are_respected() -> None:
    def largest(config: TaskConfig) -> int:
        tasks = sample_tasks(TABLES, config, 10)
        return max(sum(t.weight_bytes for t in task.tables) for task in tasks)

    limited = dataclasses.replace(CONFIG, max_total_bytes=8_000_000)
    assert largest(limited) <= 8_000_000 < largest(CONFIG)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"num_tables": (5, 4)}, "num_tables"),
        ({"num_tables": 71}, "71 distinct tables"),
        ({"max_total_bytes": 100}, "max_total_bytes"),
        ({"world_size": 0}, "world_size"),
    ],
)
def test_bad_requests_are_refused(options: dict[str, Any], value: str) -> None:
    with pytest.raises((ConfigError, InfeasibleError), match=value):
        sample_tasks(TABLES, dataclasses.replace(CONFIG, **options), 1)


def test_capped_rows_hold_the_ids_that_are_read() -> None:
    table = TABLES[0]
    big = dataclasses.replace(table, num_embeddings=10**7, pooling_factor=20.0)
    small = cap_rows(dataclasses.replace(big, profile=None), 50)
    assert small.num_embeddings == 50
    assert small.profile is not None
    assert small.profile.num_distinct <= 50
    assert small.profile.pooling_factor == pytest.approx(20.0)
    assert cap_rows(big, 10**8).num_embeddings == 10**7
