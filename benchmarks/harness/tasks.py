"""Random sharding tasks, drawn as in the papers' benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.tables.table import TableConfig, check_tables

PRODUCTION_WIDTHS: tuple[int, ...] = (4, 8, 12, 16, 20, 24, 32, 64, 128, 256)
"""Widths in published production configurations (TorchRec's sharding statistics
example, FBGEMM's production TBE sweep)."""

NEUROSHARD_NUM_TABLES = (10, 59)
"""Fewest and most tables of a task in NeuroShard (arXiv 2305.01868)."""

_MAX_DRAWS = 10_000
_PROFILE_BATCH = 65_536
"""Samples of assumed profiles. A smaller batch would have too few distinct ids."""


def cap_rows(table: TableConfig, max_rows: int) -> TableConfig:
    """Return a table with at most `max_rows` rows and a profile that fits them.

    A table without a profile gets the assumed one. If the profile has more distinct ids
    than the table has rows left, it is replaced by Zipf's law with the same pooling
    factor.

    Args:
        table: The table.
        max_rows: Maximum number of rows.

    Raises:
        ConfigError: `max_rows` is below 1.
    """
    if max_rows < 1:
        raise ConfigError(f"max_rows must be at least 1, got {max_rows}")
    rows = min(table.num_embeddings, max_rows)
    profile = table.profile or table.profile_at(_PROFILE_BATCH)
    if rows < table.num_embeddings and profile.num_distinct > rows:
        profile = zipf_profile(
            batch_size=profile.batch_size,
            pooling_factor=profile.pooling_factor,
            num_embeddings=rows,
        )
    return dataclasses.replace(table, num_embeddings=rows, profile=profile)


def power_of_two_widths(max_width: int) -> tuple[int, ...]:
    """Return 4, 8, ... up to `max_width`, the widths of NeuroShard's tasks."""
    return tuple(2**i for i in range(2, max_width.bit_length()))


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """Settings of random tasks."""

    world_size: int
    batch_size: int
    """Samples over all ranks."""
    num_tables: int | tuple[int, int] = NEUROSHARD_NUM_TABLES
    """Tables per task, or an inclusive range to draw from."""
    widths: tuple[int, ...] = PRODUCTION_WIDTHS
    """Widths, drawn evenly for each table."""
    max_total_bytes: int | None = None
    """Most weight bytes of a task. Larger tasks are drawn again from the start."""
    memory_bytes_per_rank: int | None = None
    """Memory of each rank for shards [bytes]. None: unlimited."""
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.table_range
        if not 1 <= low <= high:
            raise ConfigError(
                f"num_tables needs 1 <= low <= high, got {self.num_tables}"
            )

    @property
    def table_range(self) -> tuple[int, int]:
        """Fewest and most tables of a task."""
        if isinstance(self.num_tables, int):
            return self.num_tables, self.num_tables
        return self.num_tables


def sample_tasks(
    tables: Sequence[TableConfig], config: TaskConfig, num_tasks: int
) -> tuple[ShardingTask, ...]:
    """Return random sharding tasks.

    Task k depends only on the tables, the config and k. A call for more tasks returns
    the same ones first, in any process.

    Args:
        tables: Tables to draw from.
        config: Settings of the tasks.
        num_tasks: Number of tasks.

    Raises:
        ConfigError: There are fewer tables than a task needs.
        InfeasibleError: All draws exceed `max_total_bytes`.
    """
    check_tables(tables)
    most = config.table_range[1]
    if most > len(tables):
        raise ConfigError(
            f"tasks need up to {most} distinct tables, but there are {len(tables)}; "
            "lower num_tables"
        )
    return tuple(_sample_task(tables, config, number) for number in range(num_tasks))


def _sample_task(
    tables: Sequence[TableConfig], config: TaskConfig, number: int
) -> ShardingTask:
    rng = np.random.default_rng([config.seed, number])
    for _ in range(_MAX_DRAWS):
        chosen = _draw_tables(rng, tables, config)
        total = sum(t.weight_bytes for t in chosen)
        if config.max_total_bytes is None or total <= config.max_total_bytes:
            break
    else:
        raise InfeasibleError(
            f"task {number}: {_MAX_DRAWS} draws of {config.num_tables} tables all "
            f"exceed max_total_bytes ({config.max_total_bytes}); raise it, or lower "
            "num_tables or the widths"
        )
    memory = config.memory_bytes_per_rank
    return ShardingTask(
        tables=tuple(chosen),
        world_size=config.world_size,
        batch_size=config.batch_size,
        memory_bytes=() if memory is None else (memory,) * config.world_size,
    )


def _draw_tables(
    rng: np.random.Generator, tables: Sequence[TableConfig], config: TaskConfig
) -> list[TableConfig]:
    low, high = config.table_range
    count = int(rng.integers(low, high + 1))
    picks = rng.choice(len(tables), size=count, replace=False)
    widths = rng.choice(config.widths, size=count)
    return [tables[i].with_width(int(w)) for i, w in zip(picks, widths, strict=True)]
