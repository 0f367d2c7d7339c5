"""What is known of a plan that was chosen: its costs, how good it is, what it took."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torchrec.distributed.planner.types import ShardingOption

from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.planner.costs import PlanCosts
from torchrec_neuroshard.planner.partitioners import SearchRecord, placed_shards
from torchrec_neuroshard.planner.plan_conversion import LoweredPlan
from torchrec_neuroshard.report import OtherTable
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.search.bounds import lower_bound
from torchrec_neuroshard.search.shards import ShardBank

__all__ = ["KnownPlan", "describe_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPlan:
    """What is known of a plan."""

    result: SearchResult
    task: ShardingTask | None
    """The tables that the result's placement counts, in its order."""
    others: tuple[OtherTable, ...]
    """Tables outside the placement."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What planning took, part by part."""


def describe_plan(
    selected: Sequence[ShardingOption],
    costs: PlanCosts,
    records: Sequence[SearchRecord],
    fallback: str | None = None,
    notes: Sequence[str] = (),
) -> KnownPlan:
    """Say what is known of a plan.

    Args:
        selected: Its options, placed.
        costs: What plans cost.
        records: The searches that were made for it.
        fallback: Why another planner's plan was taken, if it was.
        notes: More warnings.
    """
    lowered = costs.lower(selected)
    predicted = costs.evaluate(lowered)
    path_ms = predicted.critical_path_ms
    texts = list(costs.warnings)
    column_ms = 0.0
    if lowered.task is not None:
        placed = placed_shards(lowered.task, lowered.placement)
        for record in records:
            if placed_shards(record.task, record.result.placement) == placed:
                texts += record.result.warnings
        column_ms = _column_bound(lowered, costs, records)
    bound = min(column_ms + costs.fixed_ms(lowered), path_ms)
    texts += costs.range_warnings(lowered)
    texts += costs.estimate_warnings(lowered)
    texts += notes
    if fallback is not None:
        texts.append(f"TorchRec's own plan was taken: {fallback}")
    result = SearchResult(
        placement=lowered.placement,
        predicted=predicted,
        lower_bound_ms=bound,
        gap=path_ms / bound - 1 if bound > 0 else math.inf,
        search_seconds=sum(r.result.search_seconds for r in records),
        num_evaluated=sum(r.result.num_evaluated for r in records),
        warnings=tuple(dict.fromkeys(texts)),
        fallback=fallback,
    )
    others = tuple(
        OtherTable(
            table=o.fqn,
            sharding_type=o.sharding_type,
            compute_kernel=o.compute_kernel,
        )
        for o in lowered.others
    )
    task = lowered.task and _with_limits(lowered.task, records)
    return KnownPlan(result=result, task=task, others=others)


def _column_bound(
    lowered: LoweredPlan, costs: PlanCosts, records: Sequence[SearchRecord]
) -> float:
    """Lower bound of the column shards' part of a plan."""
    task = lowered.task
    assert task is not None
    names = {t.name for t in task.tables}
    for record in records:
        if {t.name for t in record.task.tables} == names:
            return record.result.lower_bound_ms
    width_TW = np.zeros((len(task.tables), task.world_size), dtype=np.int64)
    for shard in lowered.placement.shards:
        width_TW[shard.table, shard.rank] += shard.width
    simulator = costs.simulator(task)
    path_ms = simulator.evaluate(lowered.placement).critical_path_ms
    return lower_bound(ShardBank(simulator), [width_TW], path_ms, rounds=0)


def _with_limits(task: ShardingTask, records: Sequence[SearchRecord]) -> ShardingTask:
    """Add what a search knew of memory to the task of a plan."""
    for record in records:
        place = {t.name: i for i, t in enumerate(record.task.tables)}
        if all(t.name in place for t in task.tables):
            order = [place[t.name] for t in task.tables]
            return dataclasses.replace(
                task,
                memory_bytes=record.task.memory_bytes,
                fixed_bytes=tuple(record.task.fixed_bytes[i] for i in order),
                column_bytes=tuple(record.task.column_bytes[i] for i in order),
            )
    return task
