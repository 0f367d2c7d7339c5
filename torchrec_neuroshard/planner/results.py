"""Result and report of a chosen plan: its costs, its bound and its search."""

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
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.cautions import (
    cautions,
    hot_row_notes,
    length_notes,
    optimizer_notes,
    unknown_length_notes,
)
from torchrec_neuroshard.planner.compat import is_stashed
from torchrec_neuroshard.planner.greedy import memory_left
from torchrec_neuroshard.planner.groups import sharding_group, whole_nodes
from torchrec_neuroshard.planner.kernels import is_estimated
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import (
    device_tier,
    has_cache,
    is_fused,
    is_pooled,
    reads_host,
    table_name,
)
from torchrec_neuroshard.planner.partitioner import SearchRecord
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.reader import DEFAULT_INPUTS, TableReader
from torchrec_neuroshard.planner.stashing import stash_notes
from torchrec_neuroshard.planner.ways import searched_type
from torchrec_neuroshard.report import PlanReport, explain
from torchrec_neuroshard.report.parts import (
    HostTable,
    LengthReport,
    PlanBasis,
    ShardReport,
    TableReport,
    WeightSync,
    rank_reports,
)
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.tables.sharding_types import COLUMN_SHARDED_TYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPlan:
    """A plan's result and its report."""

    result: SearchResult
    task: ShardingTask | None
    """The tables of the result's placement, in its order."""
    shown: PlanReport
    """The report without the gains of splits."""
    stashed: tuple[str, ...] = ()
    """Tables whose weights are on the host while dense layers run."""

    def report(self, simulator: Simulator | None = None) -> PlanReport:
        """Return the plan's report.

        Args:
            simulator: The task's simulator. None: leave out the gains of splits.
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
    """Return the result and report of a plan.

    Args:
        selected: The plan's placed options.
        costs: Prices plans.
        room: The devices, with the memory left for shards.
        records: The searches that led to the plan.
        fallback: Why TorchRec's own planner ran; None if it did not.
        notes: Additional notes.
        batch_size_is_default: Whether the caller left out the batch size.
        memory: Predicts what ranks allocate. None: unknown.
    """
    placed = costs.placed(selected)
    predicted = placed.predicted
    path_ms = predicted.critical_path_ms
    known = [*costs.notes]
    if hosted := [table_name(o) for o in selected if reads_host(o)]:
        text = (
            f"tables in host memory: {quoted(hosted)}. compute_kernels=['fused'] in "
            "their constraints keeps them on the devices, if they fit"
        )
        known.append(Note("host-memory", text, severity="info"))
    if fallback is not None:
        text = f"this is TorchRec's own plan, since the search found none: {fallback}"
        known.append(Note("fallback", text))
    own = [r for r in records if _covers(r.task, selected)]
    best = min(own, key=lambda r: r.result.predicted.critical_path_ms, default=None)
    bound, proven = 0.0, False
    if best is not None:
        proven = best.result.bound_is_proven and _is_whole(best, records, selected)
        bound = min(best.result.lower_bound_ms, path_ms)
        if bound < best.result.lower_bound_ms and any(map(has_cache, selected)):
            bound = 0.0  # the bound was for other cache sizes
        proven = proven and math.isclose(bound, best.result.lower_bound_ms)
        known += best.result.notes if fallback is None else ()
    known += placed.range_notes()
    known += optimizer_notes(selected, costs.reader)
    known += unknown_length_notes(selected, costs.reader)
    known += hot_row_notes(selected, costs.reader)
    lengths = LengthReport.of(predicted)
    known += length_notes(lengths)
    known += stash_notes(costs, selected)
    parts_bytes = None
    if memory is not None:
        allocated = memory.ranks(selected)
        if full := memory.overflow(selected, room, allocated):
            known.append(Note("memory", full, severity="error"))
        parts_bytes = memory.parts(selected, allocated)
    known += cautions(costs, selected)
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
    shards_ms, bottleneck = placed.on_path()
    devices, tier = room.devices, device_tier(costs.topology)
    tables = _table_reports(selected, tier, hosts, shards_ms)
    ranks = rank_reports(
        tables,
        predicted.ranks,
        [int(getattr(d.storage, tier)) for d in devices],
        [int(getattr(d.storage, tier)) for d in costs.topology.devices],
        parts_bytes,
    )
    task = placed.task
    if task is not None and best is not None:
        left = [float(getattr(m, tier)) for m in memory_left(room, selected)]
        task = _with_limits(task, best.task, placed.placement, left)
    return KnownPlan(
        result=result,
        task=task,
        stashed=tuple(table_name(o) for o in selected if is_stashed(o)),
        shown=PlanReport.of(
            result,
            tables,
            ranks,
            basis=_basis(selected, costs, batch_size_is_default),
            weight_sync=_weight_sync(selected, costs),
            bottleneck=bottleneck,
            lengths=lengths,
        ),
    )


def _basis(
    plan: Sequence[ShardingOption], costs: PlanCosts, batch_size_is_default: bool
) -> PlanBasis:
    """Return the assumptions behind a plan's costs.

    Args:
        plan: The plan's options.
        costs: Prices plans.
        batch_size_is_default: Whether the caller left out the batch size.
    """
    inputs: dict[str, str] = {}
    for option in plan:
        inputs.update(costs.reader.inputs_from(option))
    counts = Counter(inputs.values())
    model = costs.cost_model
    some = [o for o in plan if costs.reader.has_cost(o) and not is_pooled(o)]
    devices, topology = costs.devices, costs.topology
    card = "CPUs" if topology.compute_device == "cpu" else None
    return PlanBasis(
        card=devices.card.title if devices.card else card,
        figures=tuple(devices.figures.values()),
        batch_size=int(plan[0].batch_size) if plan else 0,
        batch_size_is_default=batch_size_is_default,
        ids_per_sample=tuple(counts.most_common()),
        assumed_features=tuple(
            f for f, source in inputs.items() if source == DEFAULT_INPUTS
        ),
        estimate_error=None if model.error is None else str(model.error),
        sequence_error=model.sequence_error
        if some and not model.measures_sequences
        else None,
        ranks_per_node=whole_nodes(topology.world_size, topology.local_world_size),
    )


def _weight_sync(plan: Sequence[ShardingOption], costs: PlanCosts) -> WeightSync | None:
    """Return the predicted time to average the weights of sharding groups.

    Args:
        plan: Placed options, one per table.
        costs: Prices plans.

    Returns:
        None if there is only one replica, without `group_topology`.
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
    """Return the bytes that each rank of a group averages with its replicas.

    TorchRec averages weights type by type, then optimizer state, for fused kernels
    only: data-parallel tables never diverge.

    Args:
        options: Placed options, one per table.
        reader: Knows the tables' optimizers and the ranks.

    Returns:
        `W x K` bytes, for `K` collectives.
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
    """Return a report of each table in a placed and estimated plan."""
    return tuple(
        TableReport(
            table=table_name(option),
            sharding_type=option.sharding_type,
            compute_kernel=option.compute_kernel,
            num_embeddings=int(option.tensor.shape[0]),
            embedding_dim=int(option.tensor.shape[1]),
            # With more ranks than rows, some shards are empty.
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
    """Return a report of a shard; values that the enumerator did not estimate are 0."""
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
    """Return table -> its ways with column shards in a search's task."""
    ways: dict[str, list[int]] = {}
    for index, table in enumerate(task.tables):
        if task.sharding_type(index).in_columns:
            ways.setdefault(table.name, []).append(index)
    return ways


def _covers(task: ShardingTask, selected: Sequence[ShardingOption]) -> bool:
    """Whether a search could have chosen a plan's sharding types and kernels.

    Tables outside the search are ignored.
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
        kind, measured = searched_type(option), not is_estimated(option)
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
    """Whether a search covered all tables and ways, without cache sizes to choose."""
    task = record.task
    return (
        len(task.ways) == len(selected)
        and len(task.tables) == max(len(r.task.tables) for r in records)
        and not any(k is not None and k.has_cache for k in task.kernels)
    )


def _with_limits(
    task: ShardingTask,
    searched: ShardingTask,
    placement: Placement,
    left_W: Sequence[float],
) -> ShardingTask:
    """Return the task of a plan's column shards with limits on their memory.

    Args:
        task: The task.
        searched: The search's task, with the memory of shards.
        placement: The column shards.
        left_W: Memory that the whole plan leaves on each rank.
    """
    place = {name: ways[0] for name, ways in _column_ways(searched).items()}
    if not searched.memory_bytes or not all(t.name in place for t in task.tables):
        return task
    order = [place[t.name] for t in task.tables]
    task = dataclasses.replace(
        task,
        memory_bytes=searched.memory_bytes,
        fixed_bytes=tuple(searched.fixed_bytes[i] for i in order),
        column_bytes=tuple(searched.column_bytes[i] for i in order),
    )
    # Other tables' shards and grown caches are not part of the search's limits.
    room_W = np.ceil(placement.rank_bytes(task)[0]) + np.maximum(0, left_W)
    return dataclasses.replace(task, memory_bytes=tuple(room_W.astype(int).tolist()))
