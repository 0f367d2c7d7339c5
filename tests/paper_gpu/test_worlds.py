"""A plan of every sharding type and kernel, built rank by rank as TorchRec does.

The other ranks of the world are not there: tables are sharded, nothing is exchanged.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel, comm
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import Chosen, Nested, bag_sharders, gpus, make_ebc, make_planner
from tests.paper_gpu.process_groups import fake_world

pytestmark = pytest.mark.nightly

WORLD_SIZE, LOCAL_WORLD_SIZE = 16, 8
FUSED = ("fused", "fused_uvm", "fused_uvm_caching")
OFFERED = {
    "table_wise": FUSED,
    "column_wise": FUSED,
    "table_column_wise": FUSED,
    "row_wise": FUSED,
    "table_row_wise": FUSED,
    "grid_shard": FUSED,
    "data_parallel": ("dense",),
}
"""Sharding type -> kernels that TorchRec's sharder offers for it on CUDA."""


class Rank(NamedTuple):
    """What a rank built."""

    shards: list[tuple[Any, ...]]
    """Table, first row, first column, rows and columns of each part, sorted."""
    kernels: list[list[str]]
    """Tables of each fused kernel, sorted."""


@contextmanager
def one_rank(rank: int) -> Iterator[torch.device]:
    """Be one rank of the world; its device is the current one."""
    device = torch.device("cuda", rank % LOCAL_WORLD_SIZE)
    places = {"RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_RANK": device.index}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (places | {"LOCAL_WORLD_SIZE": LOCAL_WORLD_SIZE}).items():
            patch.setitem(os.environ, name, str(value))
        for name in ("_INTRA_PG", "_CROSS_PG"):
            patch.setattr(comm, name, None)
        torch.cuda.set_device(device)
        with fake_world(rank, WORLD_SIZE):
            yield device


def build(rank: int, module: nn.Module, plan: ShardingPlan) -> Rank:
    with one_rank(rank) as device:
        sharded = DistributedModelParallel(
            copy.deepcopy(module), device=device, plan=plan, sharders=bag_sharders()
        )
        kernels = [
            sorted({t.name for t in part._config.embedding_tables})
            for lookup in sharded.module.sparse["ebc"]._lookups
            for part in lookup.modules()
            if type(getattr(part, "_emb_module", None)).__name__ == KERNEL
        ]
        shards = [
            (key.split(".")[-2], *shard.metadata.shard_offsets, *shard.tensor.shape)
            for key, value in sharded.state_dict().items()
            if hasattr(value, "local_shards")
            for shard in value.local_shards()
        ]
    return Rank(sorted(shards), sorted(kernels))


KERNEL = "SplitTableBatchedEmbeddingBagsCodegen"


@functools.cache
def world() -> tuple[ShardingPlan, dict[int, dict[int, set[str]]], list[Rank]]:
    """The plan, the tables of each fusion group by rank, and what ranks built."""
    warnings.simplefilter("ignore")  # torch and TorchRec, about their own code
    cases = [
        (kind, kernel)
        for kind, kernels in OFFERED.items()
        for kernel in kernels
        for _ in range(1 + (kernel == "fused"))  # two, to share a kernel
    ]
    tables = make_ebc([(128 + 40 * i, 32) for i in range(len(cases))])
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    module = Nested(tables)
    chosen = Chosen()
    planner = make_planner(
        topology=gpus(WORLD_SIZE, LOCAL_WORLD_SIZE),
        callbacks=[chosen],
        constraints={
            f"t{i}": ParameterConstraints(
                sharding_types=[kind], compute_kernels=[kernel], min_partition=8
            )
            for i, (kind, kernel) in enumerate(cases)
        },
    )
    plan = planner.plan(module, bag_sharders())
    (sharded,) = plan.plan.values()
    planned = {(s.sharding_type, s.compute_kernel) for s in sharded.values()}
    assert planned == set(cases)
    found = planner.costs.price(chosen.options).found
    groups: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for table, rank in zip(found.table_N.tolist(), found.rank_N.tolist(), strict=True):
        if found.options[table].compute_kernel != "dense":
            group = found.task.groups[table]
            groups[rank][group].add(found.options[table].name)
    return plan, groups, [build(r, module, plan) for r in range(WORLD_SIZE)]


def test_every_rank_holds_the_shards_of_the_plan() -> None:
    plan, _, ranks = world()
    expected: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    (sharded,) = plan.plan.values()
    for name, sharding in sharded.items():
        if sharding.sharding_spec is None:  # replicas
            continue
        for shard, rank in zip(
            sharding.sharding_spec.shards, sharding.ranks, strict=True
        ):
            expected[rank].append((name, *shard.shard_offsets, *shard.shard_sizes))
    for rank, built in enumerate(ranks):
        assert built.shards == sorted(expected[rank])


def test_tables_share_kernels_as_the_simulator_assumed() -> None:
    _, groups, ranks = world()
    for rank, built in enumerate(ranks):
        assert built.kernels == sorted(map(sorted, groups[rank].values())), rank
