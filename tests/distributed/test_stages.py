"""Ranks do not wait for each other between a module's sharding types."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from tests.builders import CPU, META, bag_config, bag_sharders, bags
from tests.distributed.ranks import ONE_NODE, Jobs, OfJob
from tests.distributed.unsharded import draw_batch
from torchrec_neuroshard import PhaseTimer

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

NUM_TABLES, ROWS, DIM = 8, 20_000, 32
BATCH, NUM_IDS, WARM_UP, NUM_STEPS = 1024, 40, 3, 24
KINDS = ("table_wise", "column_wise")
"""Sharding type of the tables on each rank. Half of the tables are on either rank."""
KERNELS = ("fwd_compute", "bwd_compute")


class Model(nn.Module):
    """Tables alone."""

    def __init__(self) -> None:
        super().__init__()
        tables = (bag_config(i, ROWS, DIM) for i in range(NUM_TABLES))
        self.tables = bags(*tables, device=META)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.tables(ids).values()
        return values.square().mean()


def shard() -> Any:
    """Return the model; each rank holds every second table, whole."""
    plan = EmbeddingModuleShardingPlan()
    for number in range(NUM_TABLES):
        rank = number % 2
        whole = ShardMetadata([0, 0], [ROWS, DIM], f"rank:{rank}/{CPU}")
        plan[f"t{number}"] = ParameterSharding(
            KINDS[rank],
            compute_kernel="fused",
            ranks=[rank],
            sharding_spec=EnumerableShardingSpec([whole]),
        )
    return DistributedModelParallel(
        Model(),
        device=CPU,
        plan=ShardingPlan({"tables": plan}),
        sharders=bag_sharders(),
    )


def train(rank: int) -> dict[str, Any]:
    """Return start and end of this rank's kernels in every step [s]."""
    model = shard()
    timer = PhaseTimer(model, CPU)
    keys = [f"f{i}" for i in range(NUM_TABLES)]
    ids = draw_batch(keys, BATCH, ROWS, rank, num_ids=(NUM_IDS, NUM_IDS))
    spans: dict[str, Any] = {name: [] for name in KERNELS}
    for step in range(WARM_UP + NUM_STEPS):
        dist.barrier()
        loss = model(ids)
        dist.barrier()
        loss.backward()
        (times,) = timer.take()
        if step >= WARM_UP:
            for name in KERNELS:
                spans[name] += times.spans[name]
    return spans


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    return {"train": lambda: train(rank)} if num_nodes == ONE_NODE else {}


@pytest.mark.parametrize("kernels", KERNELS)
def test_load_on_one_rank_runs_beside_another_types_load_on_the_other(
    results: OfJob, kernels: str
) -> None:
    """Kernels beside each other take half of their sum; with a wait, at least all.

    A busy machine delays a rank in some steps, so the lower quartile counts.
    """
    first, second = (of_rank[kernels] for of_rank in results("train"))
    assert len(first) == len(second) == NUM_STEPS  # a kernel on either rank
    shares = [
        (max(a[1], b[1]) - min(a[0], b[0])) / (a[1] - a[0] + b[1] - b[0])
        for a, b in zip(first, second, strict=True)
    ]
    assert statistics.quantiles(shares)[0] < 0.8, shares
