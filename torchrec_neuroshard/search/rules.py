"""Placement rules in a search: tables kept together, and contradictory rules.

Tables that are kept together are searched as one table. The first table of the set, the
*leader*, gets the memory and the rules of all (`merged`). The search places the leader
alone, and `follow` then puts the other tables, the *followers*, on the same rank.

Shapes: `T` tables, `W` ranks, `M` memories, `N` tables counted once for all their ways.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.placement_rules import PlacementRules, quoted
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError

Ints = npt.NDArray[np.int64]


def leaders(task: ShardingTask) -> Ints:
    """Return each table's leader, `T`; a table in no set is its own leader."""
    leader_T = np.arange(len(task.tables))
    for tables in task.together:
        leader_T[list(tables)] = tables[0]
    return leader_T


def merged(task: ShardingTask) -> ShardingTask:
    """Return the task in which each leader has the memory and rules of its whole set.

    Followers need no memory there and may be on any rank.

    Raises:
        ConfigError: No rank may hold all tables of a set.
    """
    if not task.together:
        return task
    leader_T = leaders(task)
    fields: dict[str, Any] = {}
    _, fixed_MT, column_MT = task.memory
    dims_T = np.array([table.embedding_dim for table in task.tables])
    whole_MT = fixed_MT + column_MT * dims_T
    for prefix, fixed_T, column_T, whole_T in zip(
        ("", "host_"), fixed_MT, column_MT, whole_MT, strict=False
    ):
        for tables in task.together:
            members = list(tables)
            fixed_T[members] = column_T[members] = 0
            # Limits are whole bytes, so rounding up excludes no placement.
            fixed_T[tables[0]] = math.ceil(sum(whole_T[members].tolist()))
        fields[f"{prefix}fixed_bytes"] = tuple(fixed_T.tolist())
        fields[f"{prefix}column_bytes"] = tuple(column_T.tolist())
    allowed = list(task.allowed_ranks or ((),) * len(task.tables))
    for tables in task.together:
        common = set.intersection(*(set(task.rules.ranks(t)) for t in tables))
        if not common:
            names = quoted([task.tables[t].name for t in tables])
            raise ConfigError(
                f"tables {names} must be together, but no rank may hold all of them. "
                "Pin them to a common rank"
            )
        for table in tables:
            allowed[table] = ()
        allowed[tables[0]] = tuple(sorted(common))
    return dataclasses.replace(
        task,
        **fields,
        allowed_ranks=tuple(allowed),
        together=(),
        apart=tuple(tuple(leader_T[list(s)].tolist()) for s in task.apart),
    )


def follow(task: ShardingTask, width_TW: Ints) -> Ints:
    """Put followers on their leaders' ranks, in place; return the widths."""
    for tables in task.together:
        held_W = width_TW[tables[0]] > 0
        for table in tables:
            width_TW[table] = held_W * task.tables[table].embedding_dim
    return width_TW


def require_unconstrained(task: ShardingTask, search: str) -> None:
    """Raise if the task has placement rules; for searches that do not support any.

    Args:
        task: The task.
        search: The search's name, for the message.

    Raises:
        ConfigError: The task has placement rules; names them.
    """
    used = [n for n in ("allowed_ranks", "together", "apart") if getattr(task, n)]
    if used:
        raise ConfigError(
            f"search '{search}' does not support placement rules "
            f"({' and '.join(used)}). Use search='default' or remove these rules"
        )


def check_constraints(task: ShardingTask) -> None:
    """Raise if placement rules contradict each other, even with unlimited memory.

    A table with several ways may be on every rank that one of its ways allows.

    Raises:
        ConfigError: Rules contradict each other; names the tables.
    """
    rules, ways_N = task.rules, task.ways
    if not (rules.together or rules.apart):
        return
    number = {way: n for n, ways in enumerate(ways_N) for way in ways}

    def proper(sets: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple({tuple(sorted({number[way] for way in s})) for s in sets})

    ranks_N = [sorted({r for way in ways for r in rules.ranks(way)}) for ways in ways_N]
    PlacementRules(
        names=tuple(task.tables[ways[0]].name for ways in ways_N),
        world_size=task.world_size,
        allowed={n: tuple(ranks) for n, ranks in enumerate(ranks_N)},
        together=proper(task.together),
        apart=proper(task.apart),
    ).check()
