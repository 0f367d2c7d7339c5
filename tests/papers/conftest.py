"""Small tasks for the tests of placement policies."""

from __future__ import annotations

import numpy as np
import pytest

from papers.data import PolicyTaskConfig, sample_policy_tasks, split_tables
from tests.builders import draw_tables
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.tables.table import TableConfig


@pytest.fixture(scope="session")
def policy_tables() -> tuple[TableConfig, ...]:
    """Return tasks whose tables differ widely in rows and pooling factor."""
    return draw_tables(np.random.default_rng(0), 80, [64])


@pytest.fixture(scope="session")
def training_tasks(policy_tables: tuple[TableConfig, ...]) -> tuple[ShardingTask, ...]:
    config = PolicyTaskConfig(
        num_tables=(6, 12), world_sizes=(2, 4), widths=(4, 8, 16), batch_sizes=(512,)
    )
    return sample_policy_tasks(split_tables(policy_tables, seed=0)[0], config, 16)


@pytest.fixture(scope="session")
def other_tasks(policy_tables: tuple[TableConfig, ...]) -> tuple[ShardingTask, ...]:
    """Return tasks with other tables and other numbers of ranks."""
    config = PolicyTaskConfig(
        num_tables=(10, 18), world_sizes=(3, 6), widths=(4, 8, 16), batch_sizes=(512,)
    )
    return sample_policy_tasks(split_tables(policy_tables, seed=0)[1], config, 20)
