"""Describe a chosen plan: its costs, the bound on them, what finding it took."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import Shard, ShardingOption, Topology

from torchrec_neuroshard.costs.placement_rules import quoted
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.cautions import cautions, optimizer_notes
from torchrec_neuroshard.planner.compat import is_stashed
from torchrec_neuroshard.planner.kernels import is_estimated
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import (
    OFFLOADED_KERNELS,
    device_tier,
    has_cache,
    is_fused,
    table_name,
)
from torchrec_neuroshard.planner.partitioner import SearchRecord
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.reader import (
    DEFAULT_INPUTS,
    TableReader,
)
from torchrec_neuroshard.planner.stashing import stash_notes
from torchrec_neuroshard.planner.topology import sharding_group
from torchrec_neuroshard.report import PlanReport, explain
from torchrec_neuroshard.report.parts import (
    HostTable,
    PlanBasis,
    ShardReport,
    TableReport,
    WeightSync,
)
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.tables.sharding_types import COLUMN_SHARDED_TYPES

__all__ = ["KnownPlan", "describe_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPlan:
    """A plan's result and its report."""

    result: SearchResult
    task: ShardingTask | None
    """The tables that the result's placement counts, in its order."""
    shown: PlanReport
    """Its report; what splits are good for is left out."""
    stashed: tuple[str, ...] = ()
    """Tables whose weights wait on the host while dense layers run."""

    def report(self, simulator: Simulator | None = None) -> PlanReport:
        """Return the plan's report.

        Args:
            simulator: Of its task. None: what splits are good for is left out.
        """
        if simulator is None:
            return self.shown
        result = self.result
        splits = explain(simulator, result.placement, result.predicted)
        return dataclasses.replace(self.shown, splits=splits)


def describe_plan(
    selected: Sequence[ShardingOption],
    costs: PlanCosts,
    room: Topology,
    *,
    records: Sequence[SearchRecord] = (),
    fallback: str | None = None,
    notes: Sequence[Note] = (),
    batch_size_is_default: bool = False,
    memory: MemoryModel | None = None,
) -> KnownPlan:
    """Describe a plan that was chosen.

    Args:
        selected: Its options, placed.
        costs: What plans cost.
        room: Devices with the memory that is left for shards.
        records: The searches that were made for it.
        fallback: Why TorchRec's own planner was asked, if it was.
        notes: What else to know of it.
        batch_size_is_default: Whether the caller gave no batch size.
        memory: What ranks allocate; None: not known.
    """
    placed = costs.placed(selected)
    predicted = placed.predicted
    path_ms = predicted.critical_path_ms
    known = [*costs.notes]
    kernels = {table_name(o): o.compute_kernel for o in selected}
    if hosted := [t for t, k in kernels.items() if k in OFFLOADED_KERNELS]:
        text = (
            f"tables in the host's memory: {quoted(hosted)}; compute_kernels=['fused'] "
            "in their constraints keeps them on the devices, if these have the room"
        )
        known.append(Note("host-memory", text, severity="info"))
    if fallback is not None:
        known.append(Note("fallback", f"TorchRec's own plan was taken: {fallback}"))
    own = [r for r in records if _covers(r.task, selected)]
    best = min(own, key=lambda r: r.result.predicted.critical_path_ms, default=None)
    bound, proven = 0.0, False
    if best is not None:
        proven = best.result.bound_is_proven and _is_whole(best, records, selected)
        bound = min(best.result.lower_bound_ms, path_ms)
        if bound < best.result.lower_bound_ms and any(map(has_cache, selected)):
            bound = 0.0  # it is of other sizes of caches
        proven = proven and math.isclose(bound, best.result.lower_bound_ms)
        known += best.result.notes if fallback is None else ()
    known += placed.range_notes()
    known += optimizer_notes(selected, costs.reader)
    known += stash_notes(costs, selected)
    if memory is not None and (full := memory.overflow(selected, room)):
        known.append(Note("memory", full, severity="error"))
    known += cautions(costs, selected, room)
    known += notes
    result = SearchResult(
        placement=placed.placement,
        predicted=predicted,
        lower_bound_ms=bound,
        gap=path_ms / bound - 1 if bound > 0 else math.inf,
        bound_is_proven=proven,
        search_seconds=sum(r.result.search_seconds for r in records),
        num_evaluated=sum(r.result.num_evaluated for r in records),
        notes=tuple(dict.fromkeys(known)),
        fallback=fallback,
    )
    hosts = placed.host_tables(selected)
    devices, tier = room.devices, device_tier(costs.topology)
    task = placed.task
    if task is not None and best is not None:
        task = _with_limits(task, best.task)
    shards_ms, bottleneck = placed.on_path()
    return KnownPlan(
        result=result,
        task=task,
        stashed=tuple(table_name(o) for o in selected if is_stashed(o)),
        shown=PlanReport.of(
            result,
            _table_reports(selected, tier, hosts, shards_ms),
            [int(getattr(d.storage, tier)) for d in devices],
            basis=_basis(selected, costs, batch_size_is_default),
            weight_sync=_weight_sync(selected, costs),
            bottleneck=bottleneck,
        ),
    )


def _basis(
    plan: Sequence[ShardingOption], costs: PlanCosts, batch_size_is_default: bool
) -> PlanBasis:
    """Say what a plan's costs rest on.

    Args:
        plan: Its options.
        costs: What plans cost.
        batch_size_is_default: Whether the caller gave no batch size.
    """
    inputs: dict[str, str] = {}
    for option in plan:
        inputs.update(costs.reader.inputs_from(option))
    counts = Counter(inputs.values())
    error = costs.cost_model.error
    devices = costs.devices
    return PlanBasis(
        card=devices.card.title if devices.card else None,
        figures=tuple(devices.figures.values()),
        batch_size=int(plan[0].batch_size) if plan else 0,
        batch_size_is_default=batch_size_is_default,
        ids_per_sample=tuple(counts.most_common()),
        assumed_features=tuple(
            f for f, source in inputs.items() if source == DEFAULT_INPUTS
        ),
        estimate_error=None if error is None else str(error),
    )


def _weight_sync(plan: Sequence[ShardingOption], costs: PlanCosts) -> WeightSync | None:
    """Predict how replicas of a sharding group's plan are kept alike.

    Args:
        plan: Placed options, one of each table.
        costs: What plans cost.

    Returns:
        None where there is one replica: of all ranks; see `group_topology`.
    """
    group = sharding_group(costs.topology)
    if group is None or group.num_replicas == 1:
        return None
    bytes_WK = _synced_bytes(plan, costs.reader)
    sent = np.repeat(bytes_WK.reshape(-1, 1), group.num_replicas, axis=1)
    ms_WK = costs.replicas.all_reduce(sent).max(axis=1).reshape(bytes_WK.shape)
    slowest = int(ms_WK.sum(axis=1).argmax())
    return WeightSync(
        num_replicas=group.num_replicas,
        interval=group.sync_interval,
        rank_bytes=float(bytes_WK[slowest].sum()),
        sync_ms=float(ms_WK[slowest].sum()),
        source=costs.replicas.source,
    )


def _synced_bytes(
    options: Sequence[ShardingOption], reader: TableReader
) -> npt.NDArray[np.float64]:
    """Return what each rank of a group averages with its replicas.

    TorchRec averages the weights of each type, then the optimizers' state, of fused
    kernels alone: data-parallel tables never drift apart.

    Args:
        options: Placed, one of each table.
        reader: Knows the tables' optimizers and the ranks.

    Returns:
        `W x K` bytes, for each of `K` collectives.
    """
    sent: dict[str, npt.NDArray[np.float64]] = {}
    for option in filter(is_fused, options):
        per_value, per_row = reader.state_bytes(option)
        for shard in option.shards:
            rows, width = (int(n) for n in shard.size)
            for kind, num_bytes in (
                (str(option.tensor.dtype), rows * width * option.tensor.element_size()),
                ("state", rows * (width * per_value + per_row)),
            ):
                bytes_W = sent.setdefault(kind, np.zeros(reader.world_size))
                bytes_W[shard.rank] += num_bytes
    return np.stack([*sent.values()] or [np.zeros(reader.world_size)], axis=1)


def _table_reports(
    selected: Sequence[ShardingOption],
    tier: str,
    hosts: Mapping[str, HostTable],
    shards_ms: Sequence[Sequence[float]],
) -> tuple[TableReport, ...]:
    """Describe every table of a plan, placed and estimated."""
    return tuple(
        TableReport(
            table=table_name(option),
            sharding_type=option.sharding_type,
            compute_kernel=option.compute_kernel,
            num_embeddings=int(option.tensor.shape[0]),
            embedding_dim=int(option.tensor.shape[1]),
            # Ranks may be more than rows.
            shards=tuple(
                _shard_report(s, tier, ms)
                for s, ms in zip(option.shards, own_ms, strict=True)
                if s.size[0]
            ),
            host=hosts.get(table_name(option)),
        )
        for option, own_ms in zip(selected, shards_ms, strict=True)
    )


def _shard_report(shard: Shard, tier: str, path_ms: float) -> ShardReport:
    """Describe a shard; 0 is what an enumerator that was given has not estimated."""
    perf = shard.perf
    comms_ms = float(perf.fwd_comms + perf.bwd_comms) if perf else 0.0
    return ShardReport(
        rank=int(shard.rank),
        num_embeddings=int(shard.size[0]),
        embedding_dim=int(shard.size[1]),
        used_bytes=float(getattr(shard.storage, tier)) if shard.storage else 0.0,
        compute_ms=float(perf.total) - comms_ms if perf else 0.0,
        comms_ms=comms_ms,
        path_ms=path_ms,
    )


def _column_ways(task: ShardingTask) -> dict[str, list[int]]:
    """Table -> the ways of a search's task that lie in column shards."""
    ways: dict[str, list[int]] = {}
    for index, table in enumerate(task.tables):
        if task.sharding_type(index).in_columns:
            ways.setdefault(table.name, []).append(index)
    return ways


def _covers(task: ShardingTask, selected: Sequence[ShardingOption]) -> bool:
    """Whether a plan is one of those that a search chose from, its tables as searched.

    Tables that the search did not know are not looked at.
    """
    columns = _column_ways(task)
    known: dict[str, set[tuple[str, bool]]] = {}
    for name, kind, kernel in zip(
        (t.name for t in task.tables), task.sharding_types, task.kernels, strict=True
    ):
        known.setdefault(name, set()).add((kind, kernel is None))
    for option in selected:
        name = table_name(option)
        if name not in known:
            continue
        kind, measured = option.sharding_type, not is_estimated(option)
        if kind in COLUMN_SHARDED_TYPES:
            kinds = {task.kernels[i] is None for i in columns.get(name, ())}
            if measured not in kinds:
                return False
        elif (kind, measured) not in known[name]:
            return False
    return bool(known)


def _is_whole(
    record: SearchRecord,
    records: Sequence[SearchRecord],
    selected: Sequence[ShardingOption],
) -> bool:
    """Whether a search knew all tables and ways, without sizes of caches to choose."""
    task = record.task
    return (
        len(task.ways) == len(selected)
        and len(task.tables) == max(len(r.task.tables) for r in records)
        and not any(k is not None and k.has_cache for k in task.kernels)
    )


def _with_limits(task: ShardingTask, searched: ShardingTask) -> ShardingTask:
    """Add what a search knew of memory to the task of a plan's column shards."""
    place = {name: ways[0] for name, ways in _column_ways(searched).items()}
    if not all(t.name in place for t in task.tables):
        return task
    order = [place[t.name] for t in task.tables]
    return dataclasses.replace(
        task,
        memory_bytes=searched.memory_bytes,
        fixed_bytes=tuple(searched.fixed_bytes[i] for i in order),
        column_bytes=tuple(searched.column_bytes[i] for i in order),
    )
