"""Plans of whole GPU clusters, built and stepped rank by rank.

One plan per world holds every sharding type with every kernel that TorchRec's sharder
offers for it on CUDA.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from typing import NamedTuple

import pytest
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan

from harness.models import build_collection
from tests.builders import Chosen, bag_sharders, gpus, make_planner
from tests.paper_gpu.worlds import RankWalk, walk
from torchrec_neuroshard import TableConfig

BATCH_SIZE, LOCAL_WORLD_SIZE = 16, 8
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
"""Sharding type -> kernels."""
OPTIMIZERS = ("rowwise_adagrad", "sgd", "adagrad")


class World(NamedTuple):
    """A plan, what the planner knew of it, and every rank that was built by it."""

    world_size: int
    plan: ShardingPlan
    groups: dict[int, dict[int, set[str]]]
    """Rank -> fusion group that the simulator assumed -> tables."""
    walks: dict[int, RankWalk]


@functools.cache
def world(world_size: int) -> World:
    cases = [
        (kind, kernel)
        for kind, kernels in OFFERED.items()
        for kernel in kernels
        for _ in range(1 + (kernel == "fused"))  # two, to share a kernel
    ]
    tables = tuple(
        TableConfig(
            name=f"{kind}_{kernel}_{number}",
            num_embeddings=world_size * 8 + 40 * number,
            embedding_dim=32,
            pooling_factor=2.0,
            optimizer=OPTIMIZERS[list(OFFERED).index(kind) % len(OPTIMIZERS)],
        )
        for number, (kind, kernel) in enumerate(cases)
    )
    warnings.simplefilter("ignore")  # torch and TorchRec, about their own code
    module = nn.Module()
    module.embeddings = build_collection(tables)
    chosen = Chosen()
    planner = make_planner(
        topology=gpus(world_size, LOCAL_WORLD_SIZE),
        batch_size=BATCH_SIZE,
        callbacks=[chosen],
        constraints={
            t.name: ParameterConstraints(
                sharding_types=[kind],
                compute_kernels=[kernel],
                min_partition=8,
                pooling_factors=[t.pooling_factor],
            )
            for t, (kind, kernel) in zip(tables, cases, strict=True)
        },
    )
    plan = planner.plan(module, bag_sharders())
    found = planner.costs.price(chosen.options).found
    groups: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for table, rank in zip(found.table_N.tolist(), found.rank_N.tolist(), strict=True):
        if found.options[table].compute_kernel != "dense":
            group = found.task.groups[table]
            groups[rank][group].add(found.options[table].name)
    walks = walk(
        plan,
        tables,
        world_size=world_size,
        local_world_size=LOCAL_WORLD_SIZE,
        batch_size=BATCH_SIZE,
    )
    return World(world_size, plan, groups, walks)


WORLD_SIZES = (8, 16, 128)
every_world = pytest.mark.parametrize("world_size", WORLD_SIZES)


@every_world
def test_every_rank_holds_the_shards_of_the_plan(world_size: int) -> None:
    found = world(world_size)
    expected = defaultdict(list)
    kinds = set()
    for name, sharding in found.plan.plan["embeddings"].items():
        kinds.add((sharding.sharding_type, sharding.compute_kernel))
        if sharding.sharding_type == "data_parallel":
            continue
        for shard, rank in zip(
            sharding.sharding_spec.shards, sharding.ranks, strict=True
        ):
            expected[rank].append((name, *shard.shard_offsets, *shard.shard_sizes))
    assert kinds == {(t, k) for t, kernels in OFFERED.items() for k in kernels}
    assert list(found.walks) == list(range(world_size))
    for rank, walked in found.walks.items():
        held = [s for s in walked.shards if not s[0].startswith("data_parallel")]
        assert held == sorted(expected[rank])


@every_world
def test_tables_share_kernels_as_the_simulator_assumed(world_size: int) -> None:
    found = world(world_size)
    for rank, walked in found.walks.items():
        assumed = sorted(tuple(sorted(g)) for g in found.groups[rank].values())
        built = sorted(tuple(sorted(set(names))) for names in walked.kernels)
        assert built == assumed, f"rank {rank}"


@every_world
def test_every_pair_of_ranks_agrees_on_what_it_exchanges(world_size: int) -> None:
    walks = world(world_size).walks
    (count,) = {len(w.exchanges) for w in walks.values()}
    assert count
    for number in range(count):
        for sender, walked in walks.items():
            sent = walked.exchanges[number]
            for receiver, values in zip(sent.ranks, sent.sent, strict=True):
                theirs = walks[receiver].exchanges[number]
                assert (theirs.ranks, theirs.dtype) == (sent.ranks, sent.dtype)
                assert theirs.received[theirs.ranks.index(sender)] == values


@every_world
def test_managed_tables_are_not_in_the_cards_memory(world_size: int) -> None:
    found = world(world_size)
    for rank, walked in found.walks.items():
        managed = sum(
            4 * rows * columns
            for name, _, _, rows, columns in walked.shards
            if "_uvm" in name
        )
        assert walked.managed_bytes >= managed, f"rank {rank}"
        assert walked.peak_bytes > walked.static_bytes > 0
