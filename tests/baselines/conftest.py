"""Small tasks that the tests of placement policies share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from torchrec_neuroshard.baselines.policy_training import (
    PolicyTaskConfig,
    SimulatedPlans,
    sample_policy_tasks,
    split_tables,
)
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel


@pytest.fixture(scope="session")
def policy_tables() -> tuple[TableConfig, ...]:
    """Tables of very different rows and pooling factors."""
    rng = np.random.default_rng(0)
    return tuple(
        TableConfig(
            name=f"t{i}",
            num_embeddings=int(10 ** rng.uniform(2, 6)),
            embedding_dim=64,
            pooling_factor=float(2 ** rng.uniform(-1, 6)),
        )
        for i in range(80)
    )


@pytest.fixture(scope="session")
def tables_file(
    policy_tables: tuple[TableConfig, ...], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same as a file of table sets."""
    path = tmp_path_factory.mktemp("tables") / "tables.json"
    workloads = [{"name": "w", "tables": [t.to_json() for t in policy_tables]}]
    path.write_text(json.dumps({"workloads": workloads}))
    return path


@pytest.fixture(scope="session")
def policy_costs() -> SimulatedPlans:
    """Lookups dominate, so that costs differ as pooling factors do."""
    return SimulatedPlans(
        AnalyticCostModel(lookup_ns=20.0), lambda world_size: AnalyticCommsModel()
    )


@pytest.fixture(scope="session")
def policy_tasks(
    policy_tables: tuple[TableConfig, ...],
) -> tuple[tuple[ShardingTask, ...], tuple[ShardingTask, ...]]:
    """Tasks to train on, 2 and 4 ranks; tasks of other tables, 3 and 6 ranks."""
    training, test = split_tables(policy_tables, seed=0)
    drawn = PolicyTaskConfig(widths=(4, 8, 16, 32, 64), batch_sizes=(512,))
    return (
        sample_policy_tasks(
            training,
            dataclasses.replace(drawn, num_tables=(6, 12), world_sizes=(2, 4)),
            16,
        ),
        sample_policy_tasks(
            test,
            dataclasses.replace(drawn, num_tables=(10, 18), world_sizes=(3, 6)),
            20,
        ),
    )
