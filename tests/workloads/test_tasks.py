from __future__ import annotations

import dataclasses
import json

import pytest

from tests.builders import printed_elsewhere
from torchrec_neuroshard.errors import ConfigError, InfeasibleError, TableError
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.workloads.tasks import (
    PRODUCTION_WIDTHS,
    TaskConfig,
    cap_rows,
    power_of_two_widths,
    sample_tasks,
)

TABLES = tuple(
    TableConfig(name=f"t{i}", num_embeddings=100 * (i + 1), embedding_dim=64)
    for i in range(70)
)
CONFIG = TaskConfig(world_size=4, batch_size=1_024, seed=11)

_IN_ANOTHER_PROCESS = """
import json
from tests.workloads.test_tasks import CONFIG, TABLES, sample_tasks
tasks = sample_tasks(TABLES, CONFIG, 3)
print(json.dumps([[t.to_json() for t in task.tables] for task in tasks]))
"""


def test_tasks_are_as_the_config_says() -> None:
    tasks = sample_tasks(TABLES, CONFIG, 60)
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


def test_more_tasks_begin_with_the_same() -> None:
    assert sample_tasks(TABLES, CONFIG, 5)[:2] == sample_tasks(TABLES, CONFIG, 2)


def test_seeds_differ() -> None:
    other = TaskConfig(world_size=4, batch_size=1_024, seed=12)
    assert sample_tasks(TABLES, CONFIG, 2) != sample_tasks(TABLES, other, 2)


def test_another_process_draws_the_same() -> None:
    found = printed_elsewhere(_IN_ANOTHER_PROCESS, hash_seed=123)
    here = [
        [t.to_json() for t in task.tables] for task in sample_tasks(TABLES, CONFIG, 3)
    ]
    assert found == json.loads(json.dumps(here))


def test_replacement_gives_unique_names() -> None:
    config = TaskConfig(
        world_size=2,
        batch_size=64,
        num_tables=20,
        with_replacement=True,
        memory_bytes_per_rank=1_000,
    )
    odd = (*TABLES[:3], TableConfig(name="t0#2", num_embeddings=7, embedding_dim=4))
    for task in sample_tasks(odd, config, 10):
        assert len(task.tables) == 20
        assert len({t.name for t in task.tables}) == 20
        assert task.memory_bytes == (1_000, 1_000)
        for table in task.tables:
            base = next(t for t in odd if t.num_embeddings == table.num_embeddings)
            assert table.name == base.name or table.name.startswith(f"{base.name}#")


def test_own_widths_are_kept() -> None:
    config = TaskConfig(world_size=1, batch_size=1, num_tables=(1, 3), widths=None)
    tables = [t for task in sample_tasks(TABLES, config, 5) for t in task.tables]
    assert all(t in TABLES for t in tables)


def test_total_bytes_are_respected() -> None:
    limit = 8_000_000
    config = TaskConfig(world_size=1, batch_size=1, max_total_bytes=limit)
    free = sample_tasks(TABLES, TaskConfig(world_size=1, batch_size=1), 10)
    assert any(sum(t.weight_bytes for t in task.tables) > limit for task in free)
    for task in sample_tasks(TABLES, config, 10):
        assert sum(t.weight_bytes for t in task.tables) <= limit


def test_too_small_a_limit_is_refused() -> None:
    config = TaskConfig(
        world_size=1, batch_size=1, num_tables=1, widths=None, max_total_bytes=100
    )
    with pytest.raises(InfeasibleError, match=r"exceed max_total_bytes \(100\)"):
        sample_tasks(TABLES, config, 1)


def test_widths_of_the_seed_papers() -> None:
    assert power_of_two_widths(128) == (4, 8, 16, 32, 64, 128)
    assert power_of_two_widths(100) == (4, 8, 16, 32, 64)
    with pytest.raises(ConfigError, match="at least 4, got 3"):
        power_of_two_widths(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tables": 0}, "1 <= low <= high"),
        ({"num_tables": (5, 4)}, "1 <= low <= high"),
        ({"widths": ()}, "positive multiples of 4"),
        ({"widths": (4, 6)}, "positive multiples of 4"),
        ({"max_total_bytes": 0}, "max_total_bytes must be at least 1"),
        ({"memory_bytes_per_rank": -1}, "memory_bytes_per_rank must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_bad_configs_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskConfig(world_size=2, batch_size=8, **options)  # type: ignore[arg-type]


def test_bad_requests_are_refused() -> None:
    with pytest.raises(TableError, match="no tables given"):
        sample_tasks([], CONFIG, 1)
    with pytest.raises(ConfigError, match="up to 59 distinct tables"):
        sample_tasks(TABLES[:20], CONFIG, 1)
    with pytest.raises(ConfigError, match="num_tasks must be at least 0"):
        sample_tasks(TABLES, CONFIG, -1)
    with pytest.raises(ConfigError, match="world_size and batch_size"):
        sample_tasks(TABLES, TaskConfig(world_size=0, batch_size=1), 1)


def test_capped_rows_hold_the_ids_that_are_read() -> None:
    table = TABLES[0]
    big = dataclasses.replace(table, num_embeddings=10**7, pooling_factor=20.0)
    small = cap_rows(dataclasses.replace(big, profile=None), 50)
    assert small.num_embeddings == 50
    assert small.profile is not None
    assert small.profile.num_distinct <= 50
    assert small.profile.pooling_factor == pytest.approx(20.0)
    assert cap_rows(big, 10**8).num_embeddings == 10**7
    with pytest.raises(ConfigError, match="max_rows must be at least 1, got 0"):
        cap_rows(big, 0)
