"""Tables that lie together, and rules on ranks that contradict each other.

A set of tables that lie together is searched as one: its first table, the leader,
stands for all (see `merged`) and the others, its followers, are put beside it at the
end (see `follow`). Shapes: `T` tables, `W` ranks, `M` memories.
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

__all__ = [
    "check_constraints",
    "follow",
    "leaders",
    "merged",
    "require_unconstrained",
]

Ints = npt.NDArray[np.int64]


def leaders(task: ShardingTask) -> Ints:
    """Return the table that stands for each table: of its set, or itself; `T`."""
    leader_T = np.arange(len(task.tables))
    for tables in task.together:
        leader_T[list(tables)] = tables[0]
    return leader_T


def merged(task: ShardingTask) -> ShardingTask:
    """Return the task in which leaders have their sets' bytes and rules.

    Followers need no memory there and may be anywhere.
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
            # Limits are whole bytes, so that rounding up breaks none.
            fixed_T[tables[0]] = math.ceil(sum(whole_T[members].tolist()))
        fields[f"{prefix}fixed_bytes"] = tuple(fixed_T.tolist())
        fields[f"{prefix}column_bytes"] = tuple(column_T.tolist())
    allowed = list(task.allowed_ranks or ((),) * len(task.tables))
    for tables in task.together:
        common = set.intersection(*(set(task.rules.ranks(t)) for t in tables))
        if not common:
            names = quoted([task.tables[t].name for t in tables])
            raise ConfigError(
                f"tables {names} belong together, but no rank may hold all of them. "
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
    """Put followers beside their leaders, in place, and return the widths."""
    for tables in task.together:
        held_W = width_TW[tables[0]] > 0
        for table in tables:
            width_TW[table] = held_W * task.tables[table].embedding_dim
    return width_TW


def require_unconstrained(task: ShardingTask, search: str) -> None:
    """Raise where a search that knows no rules on ranks is given some.

    Args:
        task: The task.
        search: What the search is called.

    Raises:
        ConfigError: The task has such rules; says which.
    """
    used = [n for n in ("allowed_ranks", "together", "apart") if getattr(task, n)]
    if used:
        raise ConfigError(
            f"the search '{search}' cannot keep to {' and '.join(used)} of the task; "
            "use search='default' or leave these rules out"
        )


def check_constraints(task: ShardingTask) -> None:
    """Raise where rules on ranks contradict each other, memory aside.

    Of tables that may be sharded in several ways, what some way lets them is asked.

    Raises:
        ConfigError: They do; names the tables.
    """
    rules, ways_N = task.rules, task.ways
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
