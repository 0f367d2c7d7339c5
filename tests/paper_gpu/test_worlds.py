"""A plan of every sharding type and kernel, built rank by rank as TorchRec does.

The other ranks of the world are not there: tables are sharded, nothing is exchanged.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel, comm
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import Chosen, Nested, bag_sharders, gpus, make_ebc, make_planner
from tests.paper_gpu.build import needs_paper_gpus, run_inside
from tests.paper_gpu.process_groups import fake_world

pytestmark = [pytest.mark.nightly, needs_paper_gpus]

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
KERNEL = "SplitTableBatchedEmbeddingBagsCodegen"


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


def build(
    rank: int, module: nn.Module, plan: ShardingPlan
) -> tuple[list[tuple[Any, ...]], list[list[str]]]:
    """What a rank holds: shards (table, first row and column, size), and the tables of
    each fused kernel; sorted."""
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
    return sorted(shards), sorted(kernels)


def test_ranks_hold_the_shards_and_kernels_of_the_plan() -> None:
    run_inside(f"{__name__}:check_all_ranks")


def check_all_ranks() -> None:
    """Plan, and build every rank in turn; runs in a process that has paper GPUs."""
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
    shards: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for name, sharding in sharded.items():
        if sharding.sharding_type != "data_parallel":
            places = zip(sharding.sharding_spec.shards, sharding.ranks, strict=True)
            for shard, rank in places:
                shards[rank].append((name, *shard.shard_offsets, *shard.shard_sizes))
    # Tables share kernels as the simulator assumed.
    priced = planner.costs.price(chosen.options)
    groups: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for table, rank in zip(
        priced.table_N.tolist(), priced.rank_N.tolist(), strict=True
    ):
        if priced.options[table].compute_kernel != "dense":
            group = priced.task.groups[table]
            groups[rank][group].add(priced.options[table].name)
    for rank in range(WORLD_SIZE):
        built_shards, kernels = build(rank, module, plan)
        assert built_shards == sorted(shards[rank])
        assert kernels == sorted(map(sorted, groups[rank].values())), rank
