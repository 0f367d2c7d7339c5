"""Rehearse a plan: build every rank on one machine, without its devices.

    report = rehearse(model, plan, topology, sharders, batch_size=8192)
    print(report)

TorchRec shards the model for one rank after another, on the "meta" device and with a
fake process group. Errors of `DistributedModelParallel` on any rank appear here. Ranks
with shards of the same sizes are built once. No weights are allocated. What this
machine cannot build without the devices is a note.
`planner.memory` predicts each rank's device memory, at rest and at the peak of a step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ModuleSharder,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.modules.itep_modules import GenericITEPModule

from torchrec_neuroshard.costs.placement_rules import listed, quoted
from torchrec_neuroshard.costs.schedules import PREFETCHING
from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.errors import (
    ConfigError,
    PlanFileError,
    check_kind,
    check_number,
)
from torchrec_neuroshard.hardware.device_types import GPU
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.compat import (
    EnumeratorByModule,
    pipeline_name,
    sharder_params,
    sharders_by_type,
)
from torchrec_neuroshard.planner.estimators import StorageEstimator
from torchrec_neuroshard.planner.given_plans import (
    copied,
    model_tables,
    placed_options,
)
from torchrec_neuroshard.planner.groups import sharding_group
from torchrec_neuroshard.planner.memory import RankMemory
from torchrec_neuroshard.planner.option_facts import (
    device_tier,
    has_cache,
    loads_ahead,
    table_name,
)
from torchrec_neuroshard.planner.outline import outline_of
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.table_keys import ModuleConstraints
from torchrec_neuroshard.plans.one_rank import is_of_this_machine, one_rank
from torchrec_neuroshard.report import RankRehearsal, Rehearsal
from torchrec_neuroshard.report.plan_tables import full_name, plan_entries
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.sharding_types import WORLD_TYPES

_BUILDABLE = frozenset({"fused", "fused_uvm", "fused_uvm_caching", "dense"})
"""Kernels that can be built on "meta"."""


def rehearse(
    model: nn.Module,
    plan: ShardingPlan,
    topology: Topology,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    *,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    profiles: Mapping[str, FeatureProfile] | None = None,
    pipeline_type: Any = None,
) -> Rehearsal:
    """Return each rank's memory under a plan, and whether the rank can run it.

    Args:
        model: The model before `DistributedModelParallel`, preferably on "meta". It is
            not changed.
        plan: Any plan of the model.
        topology: The devices, with their memory.
        sharders: The sharders of the embedding modules. None: TorchRec's defaults.
        batch_size: Samples per rank.
        constraints: Table name -> TorchRec's constraints on the table. They provide the
            ids per sample (`pooling_factors`).
        profiles: Feature name -> its measured profile; wins over `pooling_factors`.
        pipeline_type: TorchRec's `PipelineType` of the training loop. None: no
            pipeline.

    Returns:
        A report: `print` shows it as text, and `to_json` returns a dictionary. Memory
        covers the embedding part. Dense layers, their activations and, without a
        pipeline, the batch need memory in addition.

    Raises:
        ConfigError: This process has a process group, `batch_size` is below 1, or
            an item of `sharders` is not a sharder.
        PlanFileError: The plan has no tables, or does not fit this model, these ranks
            or their devices.
    """
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "rehearse needs a process without a process group, since it creates a fake "
            f"one for each rank; this process has one of {dist.get_world_size()} "
            "ranks. Call rehearse before torch.distributed.init_process_group, or in "
            "another process"
        )
    check_kind("topology", topology, Topology)
    check_number("batch_size", batch_size, least=1, whole=True)
    for name, given in (("constraints", constraints), ("profiles", profiles)):
        if given is not None:
            check_kind(name, given, Mapping)
    start = time.monotonic()
    sharders = sharders or get_default_sharders()
    sharders_by_type(sharders)  # checks that all are sharders
    sharders = list(sharders)
    world_size, tier = int(topology.world_size), device_tier(topology)
    reader = TableReader(topology, constraints, profiles)
    storage = StorageEstimator(
        topology, constraints, reader=reader, pipeline_type=pipeline_type
    )
    enumerator = EnumeratorByModule(
        topology, batch_size, ModuleConstraints(constraints), estimator=[storage]
    )
    options = placed_options(plan, model, sharders, enumerator, world_size)
    for other_devices in _other_devices(plan, topology):
        raise PlanFileError(
            f"{other_devices}: pass the topology that the plan was made for, or make a "
            "plan for this one"
        )
    _, unsharded = model_tables(plan.plan, model)
    if not options:
        more = f"; the model's tables are {quoted(unsharded)}" if unsharded else ""
        raise PlanFileError(
            f"the plan has no tables, so no rank can be rehearsed{more}. Pass sharders "
            "for the model's modules, and plan for devices that its constraints allow"
        )
    num_built, faults, texts = _build(model, plan, sharders, topology)
    if unsharded:
        texts.append(f"not in the plan, so not sharded: tables {quoted(unsharded)}")
    if group := sharding_group(topology):
        texts.append(f"the ranks are {group}; all groups hold the same")
    if unknown := [table_name(o) for o in options if not storage.memory.knows(o)]:
        texts.append(f"memory is TorchRec's estimate for tables {quoted(unknown)}")
    known = reader.run_faults(options)
    for option in options:
        fault = known.get(id(option)) or _cache_fault(option, sharders, pipeline_type)
        if fault:
            for rank in {shard.rank for shard in option.shards}:
                faults[rank].append(f"table '{table_name(option)}': {fault}")
    held: list[list[Shard]] = [[] for _ in topology.devices]
    for shard in (s for option in options for s in option.shards):
        held[shard.rank].append(shard)
    ranks = []
    for rank, memory in enumerate(storage.memory.ranks(options)):
        room = topology.devices[rank].storage
        faults[rank] += _memory_faults(memory, rank, held[rank], room, tier)
        ranks.append(
            RankRehearsal(
                rank=rank,
                num_shards=sum(bool(shard.size[0]) for shard in held[rank]),
                num_kernels=memory.num_kernels,
                weights_bytes=memory.static.weights + memory.static.id_maps,
                optimizer_bytes=memory.static.optimizer,
                cache_bytes=memory.static.cache + memory.static.index_tables,
                activation_bytes=memory.activations,
                memory_bytes=int(getattr(room, tier)),
                faults=tuple(faults[rank]),
            )
        )
    return Rehearsal(
        world_size=world_size,
        batch_size=batch_size,
        pipeline=pipeline_name(pipeline_type),
        num_tables=len(options),
        ranks=tuple(ranks),
        num_built=num_built,
        seconds=time.monotonic() - start,
        notes=tuple(Note("rehearsal", text, severity="info") for text in texts),
    )


def _cache_fault(
    option: ShardingOption,
    sharders: Sequence[ModuleSharder[Any]],
    pipeline_type: Any,
) -> str | None:
    """Return why a table's cache would write to wrong rows, or None."""
    if pipeline_name(pipeline_type) == PREFETCHING and has_cache(option):
        params = sharder_params(sharders_by_type(sharders))[option.module_type_key]
        if not (loads_ahead(option) or params.get("prefetch_pipeline")):
            return (
                f"{PREFETCHING} needs CacheParams(prefetch_pipeline=True), or the "
                "backward pass may write to wrong rows; plan with this pipeline_type"
            )
    return None


def _memory_faults(
    memory: RankMemory, rank: int, shards: Sequence[Shard], room: Storage, tier: str
) -> Iterator[str]:
    """Yield an error for each kind of memory that a rank lacks."""
    way_out = "Plan with this memory and batch size, or use more ranks"
    if memory.peak > (has := int(getattr(room, tier))):
        yield f"{memory.overflow(rank, has, has)}. {way_out}"
    host_bytes = sum(shard.storage.ddr for shard in shards)
    if tier != "ddr" and host_bytes > room.ddr:
        yield (
            f"rank {rank} needs {format_bytes(host_bytes)} of host memory and has "
            f"{format_bytes(room.ddr)}. {way_out}"
        )


def _other_devices(plan: ShardingPlan, topology: Topology) -> Iterator[str]:
    """Yield the tables of a plan that is for other ranks or devices."""
    kind, world = str(topology.compute_device), int(topology.world_size)
    node = int(topology.local_world_size)
    for path, name, sharding in plan_entries(plan.plan):
        table = f"table '{full_name(path, name)}'"
        ranks, spec = sharding.ranks or (), sharding.sharding_spec
        if ranks and len(ranks) != world and sharding.sharding_type in WORLD_TYPES:
            yield (
                f"{table} is {sharding.sharding_type} on {len(ranks)} ranks, but the "
                f"topology has {world}"
            )
        for place in (shard.placement for shard in (spec.shards if spec else ())):
            if place is None:
                continue
            rank, found = place.rank(), place.device()
            wanted = torch.device(placement(kind, rank, node).partition("/")[2])
            if found.type != wanted.type or found.index not in (None, wanted.index):
                yield (
                    f"{table} has a shard on '{found}' of rank {rank}, but the "
                    f"topology ({world} ranks, {node} per node) has '{wanted}' there"
                )


def _build(
    model: nn.Module,
    plan: ShardingPlan,
    sharders: Sequence[ModuleSharder[Any]],
    topology: Topology,
) -> tuple[int, list[list[str]], list[str]]:
    """Shard the model as each rank does.

    Returns:
        The number of ranks built, each rank's errors, and notes.
    """
    faults: list[list[str]] = [[] for _ in topology.devices]
    kernels = {sharding.compute_kernel for *_, sharding in plan_entries(plan.plan)}
    if others := sorted(kernels - _BUILDABLE):
        return 0, faults, [f"not built: kernels {', '.join(others)} need their devices"]
    num_built, notes = 0, []
    kind = str(topology.compute_device)
    pruned = any(isinstance(module, GenericITEPModule) for module in model.modules())
    if pruned and kind == GPU:
        notes.append("not built: the pruning state of ITEP modules needs its device")
    for ranks in _alike(plan, topology):
        with one_rank(ranks[0], topology):
            try:
                DistributedModelParallel(
                    outline_of(model),
                    env=ShardingEnv.from_process_group(dist.group.WORLD),
                    device=torch.device("meta"),
                    plan=_on_meta(plan),  # a fresh copy per rank: towers rewrite it
                    sharders=list(sharders),
                    init_data_parallel=False,
                )
                num_built += len(ranks)
            except Exception as error:
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
                if is_of_this_machine(error, kind):
                    notes.append(f"not built: {listed(ranks)} need devices ({text})")
                    continue
                for rank in ranks:
                    faults[rank].append(f"DistributedModelParallel raises {text}")
    return num_built, faults, notes


def _alike(plan: ShardingPlan, topology: Topology) -> list[list[int]]:
    """Return groups of ranks with shards of the same tables and sizes."""
    held: list[list[Any]] = [[] for _ in topology.devices]
    for path, name, sharding in plan_entries(plan.plan):
        if spec := sharding.sharding_spec:
            for shard, rank in zip(spec.shards, sharding.ranks, strict=True):
                held[rank].append((path, name, *shard.shard_sizes))
    groups: dict[Any, list[int]] = {}
    for rank, shards in enumerate(held):
        groups.setdefault(tuple(shards), []).append(rank)
    return list(groups.values())


def _on_meta(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with shards on "meta", since TorchRec compares devices."""
    found = copied(plan)
    for path, name, sharding in plan_entries(plan.plan):
        spec = sharding.sharding_spec
        if spec is not None:
            spec = EnumerableShardingSpec(
                [
                    dataclasses.replace(shard, placement=f"rank:{rank}/meta")
                    for shard, rank in zip(spec.shards, sharding.ranks, strict=True)
                ]
            )
        found.plan[path][name] = dataclasses.replace(sharding, sharding_spec=spec)
    return found
