"""Fused kernels and collectives that the ranks run for a sharding plan, by stage.

A stage has the kernels and collectives of the tables with one sharding type. Forward,
ids are sent, kernels look them up, and outputs come back. Backward, gradients are sent
and kernels update the tables. The plans of all planners are measured and predicted by
this description; `results.add_up` puts the times of its stages into one iteration.

Shapes: `W` ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.types import ParameterSharding, ShardingPlan

from planner_comparison.tasks import Task, held_bytes
from torchrec_neuroshard.costs.encoder import ShardEncoder
from torchrec_neuroshard.hardware.cards import find_card
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.planner.kernels import dense_factors
from torchrec_neuroshard.tables.features import OUTPUT_BYTES_PER_VALUE, table_features
from torchrec_neuroshard.tables.sharding_types import COLUMN_SHARDED_TYPES
from torchrec_neuroshard.tables.table import TableConfig, row_shard

ROW_TYPES = ("row_wise", "table_row_wise")
"""Types that split a table's rows over all ranks of one node."""
REPLICAS = "data_parallel"
_GPU_DENSE = 2.0
"""How much slower than fused kernels TorchRec estimates those of replicas on GPUs."""

_COMMS = ("index_comms", "fwd_comms", "bwd_comms")
_ID_BYTES, _LENGTH_BYTES = 8, 8
"""Ids and lengths of a KeyedJaggedTensor are int64."""


class NotRunError(Exception):
    """The plan has a sharding type or kernel that is not run here; see the message."""


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Shards of one fused kernel on one rank."""

    shards: tuple[TableConfig, ...]
    """Shards in a fixed order, so that equal sets are measured once."""
    batch_size: int
    """Samples that the kernel sees."""
    copy: int = 0
    """Equal sets with different numbers are timed separately."""
    replicated: bool = False
    """Whether it is the kernel of replicated tables. Its backward has the optimizer,
    which passes over whole tables."""


@dataclass(frozen=True, slots=True)
class ColumnOrder:
    """The kernel that reorders the columns of split tables, equal on all ranks."""

    widths: tuple[int, ...]
    """Columns of each part, in the order of arrival."""
    batch_size: int
    """Samples of a rank."""
    copy: int = 0
    """As in `KernelSet`."""


@dataclass(frozen=True, slots=True)
class Join:
    """The copy of all stages' outputs into one tensor, equal on all ranks."""

    widths: tuple[int, ...]
    """Columns of each stage."""
    batch_size: int
    """Samples of a rank."""
    copy: int = 0
    """As in `KernelSet`."""


@dataclass(frozen=True, slots=True)
class IdSplit:
    """The split of ids by row shard, before they are sent; equal on all ranks."""

    shards: tuple[TableConfig, ...]
    """The whole tables."""
    num_ranks: int
    """Ranks over which their rows are split."""
    batch_size: int
    """Samples of a rank."""
    copy: int = 0
    """As in `KernelSet`."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of all ranks."""

    kind: str
    """One of `records.COLLECTIVES`."""
    bytes_per_peer: tuple[int, ...]
    """As in `CommsRecord`."""
    batch_size: int
    """Samples of a rank."""
    lengths_share: float = 0.5
    """Share of lengths in the bytes of `index`."""


Floats = npt.NDArray[np.float64]
Kernel = KernelSet | ColumnOrder | Join | IdSplit
Times = Mapping[Kernel, tuple[float, float]]
"""Forward and backward of each kernel [ms]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Kernels and collectives of the tables of one sharding type."""

    sharding_type: str
    kernels: tuple[KernelSet | None, ...]
    """Kernel of each rank; None: the rank has no shard."""
    column_order: ColumnOrder | None = None
    """None: no table is split."""
    join: Join | None = None
    """Only the last of several stages has it."""
    id_split: IdSplit | None = None
    """None: no table is split by rows."""
    index_comms: tuple[Collective, ...] = ()
    fwd_comms: tuple[Collective, ...] = ()
    bwd_comms: tuple[Collective, ...] = ()

    @property
    def on_all_ranks(self) -> list[Kernel]:
        """Kernels that are equal on all ranks, besides lookups and updates."""
        found = (self.id_split, self.column_order, self.join)
        return [kernel for kernel in found if kernel is not None]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of the stage, in the order in which they run."""
        return self.index_comms + self.fwd_comms + self.bwd_comms


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The kernels and collectives of a plan."""

    stages: tuple[Stage, ...]
    """In TorchRec's order, which is that of the types' first tables."""
    rank_bytes: tuple[int, ...]
    """Bytes of weights and optimizer state on each rank."""
    num_shards: int
    num_split: int
    """Tables in several column shards."""

    @property
    def kernels(self) -> list[Kernel]:
        """All different kernels of all ranks."""
        ran = (k for s in self.stages for k in (*s.kernels, *s.on_all_ranks))
        return list(dict.fromkeys(k for k in ran if k is not None))

    def again(self) -> RunPlan:
        """Return the same plan with kernels that are timed separately."""

        def copied(kernel: Any) -> Any:
            return None if kernel is None else dataclasses.replace(kernel, copy=1)

        stages = (
            dataclasses.replace(
                stage,
                kernels=tuple(map(copied, stage.kernels)),
                column_order=copied(stage.column_order),
                join=copied(stage.join),
                id_split=copied(stage.id_split),
            )
            for stage in self.stages
        )
        return dataclasses.replace(self, stages=tuple(stages))

    @property
    def collectives(self) -> list[Collective]:
        """All different collectives."""
        return list(dict.fromkeys(c for s in self.stages for c in s.collectives))


@dataclass(frozen=True, slots=True)
class _Shard:
    table: TableConfig
    """The shard, described as a table."""
    rank: int
    number: int
    """Index of the table in the task."""


def read_plan(plan: ShardingPlan, task: Task) -> RunPlan:
    """Return the kernels and collectives of a plan.

    Raises:
        NotRunError: The plan has a sharding type or kernel that is not run here.
    """
    numbers = {t.name: i for i, t in enumerate(task.tables)}
    by_type: dict[str, list[_Shard]] = {}
    entries = {n: s for tables in plan.plan.values() for n, s in tables.items()}
    assert set(entries) == set(numbers), "a plan leaves out tables"
    for name in numbers:  # stages are in the order of their first tables
        sharding = entries[name]
        found = by_type.setdefault(sharding.sharding_type, [])
        found += _shards(sharding, numbers[name], task)
    held = [0] * task.world_size
    for shard in (s for shards in by_type.values() for s in shards):
        held[shard.rank] += held_bytes(shard.table)
    column_shards = [s.number for k in COLUMN_SHARDED_TYPES for s in by_type.get(k, [])]
    stages = [_stage(kind, own, task) for kind, own in by_type.items()]
    if len(stages) > 1:
        widths = (
            sum(_columns_of(task.tables[number]) for number in {s.number for s in own})
            for own in by_type.values()
        )
        join = Join(tuple(widths), task.batch_size // task.world_size)
        stages[-1] = dataclasses.replace(stages[-1], join=join)
    return RunPlan(
        stages=tuple(stages),
        rank_bytes=tuple(held),
        num_shards=sum(map(len, by_type.values())),
        num_split=int((np.bincount(column_shards, minlength=1) > 1).sum()),
    )


def _shards(sharding: ParameterSharding, number: int, task: Task) -> list[_Shard]:
    kind, table = sharding.sharding_type, task.tables[number]
    if kind == REPLICAS:
        return [_Shard(table, rank, number) for rank in range(task.world_size)]
    if sharding.compute_kernel != "fused" or kind not in COLUMN_SHARDED_TYPES.union(
        ROW_TYPES
    ):
        raise NotRunError(f"{kind} tables with {sharding.compute_kernel} kernels")
    assert sharding.ranks is not None and sharding.sharding_spec is not None
    shards = []
    for meta, rank in zip(sharding.sharding_spec.shards, sharding.ranks, strict=True):
        rows, width = map(int, meta.shard_sizes)
        if kind in ROW_TYPES:
            shard = row_shard(table, rows, task.batch_size)
        else:
            shard = table.with_width(width)
        shards.append(_Shard(shard, int(rank), number))
    return shards


def _stage(kind: str, shards: Sequence[_Shard], task: Task) -> Stage:
    by_rank: list[list[_Shard]] = [[] for _ in range(task.world_size)]
    for shard in shards:
        by_rank[shard.rank].append(shard)
    local = task.batch_size // task.world_size
    batch = local if kind == REPLICAS else task.batch_size
    kernels = tuple(
        KernelSet(
            tuple(s.table for s in sorted(held, key=_order)),
            batch,
            replicated=kind == REPLICAS,
        )
        if held
        else None
        for held in by_rank
    )
    if kind == REPLICAS:
        gradients = sum(s.table.weight_bytes for s in by_rank[0])
        reduce = _even("all_reduce", gradients / task.world_size, local, task)
        return Stage(sharding_type=kind, kernels=kernels, bwd_comms=(reduce,))
    columns = [sum(_columns(s) for s in held) for held in by_rank]
    id_split = None
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    if kind in ROW_TYPES:
        each = OUTPUT_BYTES_PER_VALUE * local * max(columns)
        forward = (_even("reduce_scatter", each, local, task),)
        backward = (_even("all_gather", each, local, task),)
        split = dict.fromkeys(s.number for s in shards)
        id_split = IdSplit(
            tuple(task.tables[number] for number in split), task.world_size, local
        )
    else:
        sent = tuple(OUTPUT_BYTES_PER_VALUE * local * c for c in columns)
        forward = (Collective("pooled_forward", sent, local),)
        backward = (Collective("pooled_backward", sent, local),)
    return Stage(
        sharding_type=kind,
        kernels=kernels,
        column_order=None if kind in ROW_TYPES else _column_order(by_rank, local),
        id_split=id_split,
        index_comms=(_index(by_rank, task),),
        fwd_comms=forward,
        bwd_comms=backward,
    )


def _order(shard: _Shard) -> tuple[int, int]:
    return shard.number, shard.table.embedding_dim


def _columns(shard: _Shard) -> int:
    return _columns_of(shard.table)


def _columns_of(table: TableConfig) -> int:
    return table.embedding_dim * table.num_features


def _even(kind: str, num_bytes: float, local: int, task: Task) -> Collective:
    """Return a collective with equal data on all ranks, in whole values."""
    values = max(1, round(num_bytes / 8))
    return Collective(kind, (8 * values,) * task.world_size, local)


def _index(by_rank: Sequence[Sequence[_Shard]], task: Task) -> Collective:
    """Return the all-to-all of ids and lengths, in bytes per peer."""
    ids, lengths = (
        np.array([sum(map(count, held)) for held in by_rank], dtype=np.float64)
        for count in (
            lambda s: _ID_BYTES * s.table.profile_at(task.batch_size).num_lookups,
            lambda s: _LENGTH_BYTES * task.batch_size * s.table.num_features,
        )
    )
    total = ids + lengths
    per_peer = 8 * np.round(total / task.world_size / 8)
    share = float(lengths.sum() / total.sum())
    local = task.batch_size // task.world_size
    return Collective("index", tuple(map(int, per_peer)), local, round(share, 6))


def _column_order(
    by_rank: Sequence[Sequence[_Shard]], local: int
) -> ColumnOrder | None:
    """Return the reordering of outputs; None if no table is split."""
    parts = [s for held in by_rank for s in sorted(held, key=_order)]
    if len({s.number for s in parts}) == len(parts):
        return None
    return ColumnOrder(tuple(map(_columns, parts)), local)


def predict_kernels(
    kernels: Sequence[Kernel],
    cost_model: CostModel,
) -> Times:
    """Return the predicted forward and backward of each kernel [ms]."""
    predicted: dict[Kernel, tuple[float, float]] = {}
    encoder = ShardEncoder(cost_model)
    for kernel in kernels:
        if isinstance(kernel, KernelSet):
            sums = cost_model.encode(table_features(kernel.shards, kernel.batch_size))
            [found] = cost_model.predict_sums(sums.sum(axis=0, keepdims=True))
            if kernel.replicated:
                alone_N2 = cost_model.predict_sums(sums)
                found = found + _more_of_replicas(alone_N2, kernel.shards, encoder)
            predicted[kernel] = (float(found[0]), float(found[1]))
            continue
        if isinstance(kernel, IdSplit):
            profiles = [t.profile_at(kernel.batch_size) for t in kernel.shards]
            bags = kernel.batch_size * sum(t.num_bags for t in kernel.shards)
            costs = cost_model.ids
            ns = costs.pooled_ns * sum(p.num_lookups for p in profiles)
            ns += costs.rank_bag_ns * kernel.num_ranks * bags
            predicted[kernel] = (1e-6 * ns, 0.0)
            continue
        size = float(OUTPUT_BYTES_PER_VALUE * sum(kernel.widths) * kernel.batch_size)
        if isinstance(kernel, Join):  # as `Simulator` has it
            passes, launches = cost_model.join
            copied = passes * size * encoder.stream_ms
            copied += launches * float(encoder.launch_ms[0])
            predicted[kernel] = (copied, 0.0)
        else:
            [found] = encoder.column_order(np.array([size]))
            predicted[kernel] = (float(found[0]), float(found[1]))
    return predicted


def _more_of_replicas(
    alone_N2: Floats, shards: Sequence[TableConfig], encoder: ShardEncoder
) -> Floats:
    """Return what replicated tables take longer than a fused kernel, as the planner
    counts it [ms].

    Args:
        alone_N2: Fused kernels of each table alone [ms].
        shards: The tables, of one optimizer.
        encoder: Knows the launch and the passes over tables.
    """
    on_gpu = find_card(encoder.cost_model.hardware) is not None
    factors = dense_factors(shards[0].optimizer, _GPU_DENSE if on_gpu else None)
    above_launch_2 = np.maximum(alone_N2 - encoder.launch_ms, 0.0).sum(axis=0)
    more_2: Floats = above_launch_2 * (factors.forward - 1, factors.backward - 1)
    weight_bytes = sum(s.weight_bytes for s in shards)
    more_2[1] += factors.passes * weight_bytes * encoder.stream_ms
    return more_2


def predict_collective(
    collective: Collective, comms_model: CommsModel, world_size: int
) -> float:
    """Return the predicted time of a collective [ms]."""
    batch = collective.batch_size * world_size
    bytes_1W = np.array([collective.bytes_per_peer], dtype=np.float64)
    columns_1W = bytes_1W / (OUTPUT_BYTES_PER_VALUE * collective.batch_size)
    if collective.kind == "index":
        ms = comms_model.index_all_to_all(bytes_1W * world_size).max()
    elif collective.kind == "all_reduce":
        ms = comms_model.all_reduce(bytes_1W * world_size).max()
    elif collective.kind in ("reduce_scatter", "all_gather"):
        both = comms_model.row_wise(columns_1W, batch)
        ms = both[..., int(collective.kind == "all_gather")].max()
    else:
        both = comms_model.all_to_all(columns_1W, batch)
        ms = both[..., int(collective.kind == "pooled_backward")].max()
    return float(ms)


def stage_times(
    plan: RunPlan, kernels: Times, collectives: Mapping[Collective, float]
) -> list[dict[str, Any]]:
    """Return the times of a plan's stages, as files of results keep them.

    Args:
        plan: The plan.
        kernels: Forward and backward of each kernel [ms].
        collectives: Time of each collective [ms].

    Returns:
        One entry per stage, in TorchRec's order. Kernels have one value per rank; a
        rank without a kernel has 0. Collectives are those of the slowest rank.
    """
    entries = []
    for stage in plan.stages:
        forward, backward = zip(
            *(kernels[k] if k else (0.0, 0.0) for k in stage.kernels), strict=True
        )
        order = kernels[stage.column_order] if stage.column_order else (0.0, 0.0)
        joined, split = (
            kernels[k][0] if k else 0.0 for k in (stage.join, stage.id_split)
        )
        index, sent, returned = (
            sum(collectives[c] for c in getattr(stage, name)) for name in _COMMS
        )
        replicas = stage.sharding_type == REPLICAS
        entries.append(
            {
                "sharding_type": stage.sharding_type,
                "fwd_ms": list(forward),
                "bwd_ms": list(backward),
                "fwd_order_ms": order[0] + joined,
                "bwd_order_ms": order[1],
                "id_split_ms": split,
                "index_ms": index,
                "fwd_comms_ms": sent,
                "bwd_comms_ms": 0.0 if replicas else returned,
                "reduce_ms": returned if replicas else 0.0,
            }
        )
    return entries


def with_profiles(kernel: KernelSet) -> list[TableConfig]:
    """Return the shards to measure, with numbers as names and with profiles."""
    return [
        dataclasses.replace(
            shard, name=str(i), profile=shard.profile_at(kernel.batch_size)
        )
        for i, shard in enumerate(kernel.shards)
    ]
