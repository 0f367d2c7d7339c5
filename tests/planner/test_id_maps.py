"""Memory of maps from ids to rows: managed collisions, and pruning while training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import JaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
)
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules import mc_modules
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

from tests.builders import (
    ATTACHES_OPTIMIZERS,
    META,
    MIB,
    bag_config,
    bags,
    gpus,
    last_result,
    make_planner,
    only,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner.compat import torchrec_release
from torchrec_neuroshard.tables.profile import profile_ids

pytestmark = [
    *ATTACHES_OPTIMIZERS,
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
]

ROWS, BATCH, POOLING, INTERVAL = 1000, 64, 3.0, 5


def sorting(policy: Any, rows: int = ROWS) -> Any:
    return mc_modules.MCHManagedCollisionModule(
        zch_size=rows,
        device=META,
        eviction_policy=policy,
        eviction_interval=INTERVAL,
        buckets=2,
    )


def probing(evicts: bool) -> Any:
    # Importing these warns of a module of torch's.
    from torchrec.modules import hash_mc_evictions, hash_mc_modules

    name = hash_mc_evictions.HashZchEvictionPolicyName.LRU_EVICTION
    config = hash_mc_evictions.HashZchEvictionConfig(features=["f0"])
    return hash_mc_modules.HashZchManagedCollisionModule(
        zch_size=ROWS,
        device=META,
        total_num_buckets=2,
        eviction_policy_name=name if evicts else None,
        eviction_config=config if evicts else None,
    )


MAPS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "LFU": (lambda: sorting(mc_modules.LFU_EvictionPolicy()), 24, 1),
    "LRU": (lambda: sorting(mc_modules.LRU_EvictionPolicy()), 24, 2),
    "distance": (lambda: sorting(mc_modules.DistanceLFU_EvictionPolicy()), 32, 2),
    "hash": (lambda: probing(False), 8, 0),
    "hash with eviction": (lambda: probing(True), 12, 0),
}
"""A map -> itself, its bytes per row, and the values that it keeps of each id."""


class OnCpus(ManagedCollisionEmbeddingBagCollectionSharder):
    """Offers row-wise sharding on CPUs as well."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


def managed(ids: nn.Module, rows: int = ROWS, dim: int = 32) -> Any:
    inner = bags(bag_config(rows=rows, dim=dim))
    collection = mc_modules.ManagedCollisionCollection(
        {"t0": ids}, inner.embedding_bag_configs()
    )
    return ManagedCollisionEmbeddingBagCollection(inner, collection)


def planner_of(topology: Topology, kind: str, **arguments: Any) -> Any:
    limits = only(
        pooling_factors=[POOLING], sharding_types=[kind], compute_kernels=["fused"]
    )
    return make_planner(
        topology=topology, constraints=limits, batch_size=BATCH, **arguments
    )


@pytest.mark.skipif(
    torchrec_release() < (1, 8), reason="TorchRec shares buckets evenly since 1.8"
)
def test_buckets_that_ranks_cannot_share_are_refused() -> None:
    model = nn.ModuleDict({"mc": managed(MAPS["LFU"][0]())})
    sharders = [ManagedCollisionEmbeddingBagCollectionSharder()]
    message = "table 'mc.t0': the 3 ranks cannot share .* a multiple of 3 buckets"
    with pytest.raises(ConfigError, match=message):
        planner_of(gpus(3), "row_wise").plan(model, sharders)


class NoMap(nn.Module):
    def output_size(self) -> int:
        return ROWS

    def buckets(self) -> int:
        return 2


def held_on_a_rank(ids: Any) -> int:
    """Bytes of half of a map, as `DistributedModelParallel` builds and fills it."""
    half = ids.rebuild_with_output_id_range(
        (0, ROWS // 2), output_segments=[0, ROWS // 2, ROWS], device=META
    )
    every = dict([*half.named_parameters(), *half.named_buffers()]).values()
    tensors = [t for t in every if len(t) == ROWS // 2]
    if hasattr(half, "_init_history_buffers"):
        before = {name for name, _ in half.named_buffers()}
        count = int(POOLING * BATCH)
        batch = JaggedTensor(torch.zeros(count), lengths=torch.tensor([count]))
        half._init_history_buffers({"f0": batch})
        tensors += [t for name, t in half.named_buffers() if name not in before]
        tensors.append(half._history_accumulator)
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("kind", MAPS)
def test_maps_of_managed_collisions_are_counted(kind: str) -> None:
    build, per_row, num_kept = MAPS[kind]
    held = held_on_a_rank(build())
    kept = num_kept * INTERVAL * 1.25 * 8 * POOLING * BATCH
    assert held == per_row * ROWS / 2 + kept
    planner = planner_of(gpus(2), "row_wise")
    planner.plan(managed(build()), [OnCpus()])
    for found in planner.memory.ranks(planner.get_selected_options()):
        assert found.static.id_maps == held
    on_cpus = planner_of(Topology(2, "cpu"), "row_wise")
    [counted], [others] = (
        {
            shard.storage.ddr
            for option in on_cpus.enumerator.enumerate(managed(ids), [OnCpus()])
            for shard in option.shards
        }
        for ids in (build(), NoMap())
    )
    assert counted - others == held


def test_a_map_that_does_not_fit_is_refused() -> None:
    """Weights of 8 MB and a map of 12 MB are on each rank."""
    rows = 10**6
    ids = sorting(mc_modules.LFU_EvictionPolicy(), rows)
    planner = planner_of(gpus(2, hbm_cap=18 * MIB), "row_wise", strict_memory=True)
    with pytest.raises(PlannerError, match="t0"):
        planner.plan(managed(ids, rows, 4), [OnCpus()])
    planner = planner_of(gpus(2, hbm_cap=24 * MIB), "row_wise", strict_memory=True)
    planner.plan(managed(ids, rows, 4), [OnCpus()])


@pytest.mark.parametrize(
    ("kind", "parts"), [("row_wise", 2), ("table_wise", 1), ("column_wise", 1)]
)
def test_rows_of_unpruned_tables_are_counted(kind: str, parts: int) -> None:
    """TorchRec keeps 8 bytes of address and 4 of use per row before pruning."""
    unpruned = 5 * ROWS
    pruning = GenericITEPModule({"t0": unpruned, "t1": ROWS})
    pruning.current_device = META
    pruning.create_itep_buffers(unpruned // parts, [0, unpruned // parts], ["t0"], [1])
    held = pruning.address_lookup.nbytes + pruning.row_util.nbytes
    inner = bags(bag_config(0), bag_config(1))
    planner = planner_of(gpus(2), kind)
    module = ITEPEmbeddingBagCollection(inner, pruning)
    planner.plan(module, [ITEPEmbeddingBagCollectionSharder()])
    options = planner.get_selected_options()
    shards = {shard.rank for shard in options[0].shards}
    for rank, found in enumerate(planner.memory.ranks(options)):
        assert found.static.id_maps == held * (rank in shards)


def test_ids_that_a_map_turns_into_rows_count_as_even() -> None:
    ids, lengths = np.zeros(BATCH * 2 * 4, dtype=np.int64), np.full(BATCH * 2, 4)
    profiles = {"f0": profile_ids(ids, lengths)}
    found = []
    for model, sharder in (
        (managed(MAPS["LFU"][0]()), OnCpus()),
        (bags(bag_config(rows=ROWS)), EmbeddingBagCollectionSharder()),
    ):
        planner = planner_of(gpus(2), "row_wise", profiles=profiles)
        planner.plan(model, [sharder])
        first, second = last_result(planner).predicted.ranks
        found.append(first.fwd_compute == pytest.approx(second.fwd_compute))
    assert found == [True, False]
