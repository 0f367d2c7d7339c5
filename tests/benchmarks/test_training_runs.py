"""Trials of plans, on one rank in this process; several: tests/benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingPlan

from harness.models import ConcatDLRM, draw_clicks
from harness.training_runs import TrialConfig, TrialError, run_trial
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.simulator import PHASES
from torchrec_neuroshard.tables import TableConfig

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        r"`torch\.jit\.\w+` is deprecated",
        "This API is deprecated",
        "`broadcast_buffers` is deprecated",
        # TorchRec 1.6 asks for the group's one device.
        "`_get_pg_default_device` will be deprecated",
        "Multiple backends are registered with this ProcessGroup",
    )
]

CPU = torch.device("cpu")
TABLES = tuple(
    TableConfig(
        name=f"t{i}",
        num_embeddings=100 * (i + 1),
        embedding_dim=8 * (i + 1),
        pooling_factor=3.0,
        optimizer="sgd",
    )
    for i in range(2)
)
QUICK = TrialConfig(warm_up=1, iterations=3, phase_iterations=2, learning_rate=0.5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    store = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def plan() -> ShardingPlan:
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"), batch_size=16
    )
    found: Any = planner.plan(
        ConcatDLRM(TABLES, CPU), [EmbeddingBagCollectionSharder()]
    )
    assert isinstance(found, ShardingPlan)
    return found


def batches(count: int = 2) -> list[Any]:
    return [draw_clicks(TABLES, 16, seed, CPU) for seed in range(count)]


def test_trial_tells_times_losses_and_memory(
    alone: dist.ProcessGroup, plan: ShardingPlan
) -> None:
    readings = iter([4.0, 6.0])
    found = run_trial(
        plan, TABLES, batches(), QUICK, control=alone, reference=lambda: next(readings)
    )
    assert len(found.iteration_ms) == 3 and min(found.iteration_ms) > 0
    assert len(found.embedding_ms) == 2
    assert set(found.phases_ms) == set(PHASES)
    for name in ("fwd_compute", "bwd_compute"):
        assert 0 < min(found.phases_ms[name])
    assert len(found.losses) == 1 + 3 + 1 + 2  # hooks need one to settle
    assert found.losses[2] < found.losses[0]  # the same batch again
    assert found.weight_bytes == (4 * (100 * 8 + 200 * 16),)
    assert found.peak_bytes == (0,)
    assert found.reference_ms == (5.0,)
    assert found.num_kernels[0] >= 1
    again = run_trial(plan, TABLES, batches(), QUICK, control=alone)
    assert again.losses == found.losses


def test_first_weights_follow_the_seed(
    alone: dist.ProcessGroup, plan: ShardingPlan
) -> None:
    one, two = (
        run_trial(
            plan,
            TABLES,
            batches(),
            dataclasses.replace(QUICK, seed=seed),
            control=alone,
        )
        for seed in (0, 1)
    )
    assert one.losses[0] != two.losses[0]


def test_plan_of_other_tables_is_a_trial_that_failed(
    alone: dist.ProcessGroup, plan: ShardingPlan
) -> None:
    other = [dataclasses.replace(t, name=f"x{t.name}") for t in TABLES]
    with pytest.raises(TrialError, match=r"^rank 0: KeyError: 'xt0'$"):
        run_trial(plan, other, batches(), QUICK, control=alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"phase_iterations": 0}, "phase_iterations must be at least 1, got 0"),
        ({"warm_up": -1}, "warm_up must be at least 0, got -1"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(QUICK, **changes)
