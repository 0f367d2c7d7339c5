"""Rules on ranks: where a table may lie, with which others, and with which never.

A set of tables that lie together is searched as one: its first table, the leader,
stands for all (see `merged`) and the others, its followers, are put beside it at the
end (see `follow`). Shapes: `N` shards, `T` tables, `W` ranks, `A` sets of tables that
lie apart, `K` such sets that one table is in at most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.placement import HOST, ShardingTask, format_bytes
from torchrec_neuroshard.placement_rules import PlacementRules, listed, quoted

__all__ = [
    "Rules",
    "check_constraints",
    "follow",
    "leaders",
    "merged",
    "require_unconstrained",
]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Rules:
    """Which ranks may take which shards, beside memory."""

    def __init__(self, task: ShardingTask) -> None:
        """Read them off a task; `together` is not looked at."""
        num_tables, num_ranks = len(task.tables), task.world_size
        self.allowed_TW: Bools | None = None
        """None where every table may be on any rank."""
        if task.allowed_ranks:
            self.allowed_TW = np.zeros((num_tables, num_ranks), dtype=bool)
            for row, ranks in zip(self.allowed_TW, task.allowed_ranks, strict=True):
                row[list(ranks) or slice(None)] = True
        self.num_sets = len(task.apart)
        self._members = np.array([t for s in task.apart for t in s], dtype=np.int64)
        sizes = [len(s) for s in task.apart]
        self._starts = np.cumsum([0, *sizes])[:-1]
        # Sets of each table, filled up with a set that is always empty.
        sets: list[list[int]] = [[] for _ in range(num_tables)]
        for number, tables in enumerate(task.apart):
            for table in tables:
                sets[table].append(number)
        most = max(map(len, sets))
        self.sets_TK: Ints = np.array(
            [[*s, *[self.num_sets] * (most - len(s))] for s in sets], dtype=np.int64
        ).reshape(num_tables, most)

    def __bool__(self) -> bool:
        return self.allowed_TW is not None or self.num_sets > 0

    def freedom(self, table_N: Ints) -> Ints:
        """Count the ranks that each table may be on: `N`; all 0 without such rules."""
        if self.allowed_TW is None:
            return np.zeros(len(table_N), dtype=np.int64)
        count: Ints = self.allowed_TW[table_N].sum(axis=1)
        return count

    def occupants(self, width_TW: Ints) -> Ints:
        """Count tables of each set on each rank, `A + 1 x W`; the last set is empty."""
        held = np.zeros((self.num_sets + 1, width_TW.shape[1]), dtype=np.int64)
        if self.num_sets:
            present = (width_TW[self._members] > 0).astype(np.int64)
            held[:-1] = np.add.reduceat(present, self._starts, axis=0)
        return held

    def open_ranks(self, width_TW: Ints, table: int) -> Bools:
        """Return which ranks the rules let take a shard of one table, `W`."""
        fine: Bools = np.ones(width_TW.shape[1], dtype=bool)
        if self.allowed_TW is not None:
            fine &= self.allowed_TW[table]
        if self.num_sets:
            sets_K = self.sets_TK[table]
            own_W = width_TW[table] > 0
            others_KW = self.occupants(width_TW)[sets_K]
            others_KW = others_KW - (own_W & (sets_K < self.num_sets)[:, None])
            fine &= (others_KW <= 0).all(axis=0)
        return fine


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
    sizes: dict[str, Any] = {}
    for prefix, memory in zip(("", "host_"), task.memories, strict=False):
        fixed, column = list(memory.fixed_bytes), list(memory.column_bytes)
        for tables in task.together:
            # Limits are whole bytes, so that rounding up breaks none.
            size = math.ceil(sum(_whole_bytes(memory, t) for t in tables))
            for table in tables:
                fixed[table], column[table] = 0, 0.0
            fixed[tables[0]] = size
        sizes[f"{prefix}fixed_bytes"] = tuple(fixed)
        sizes[f"{prefix}column_bytes"] = tuple(column)
    allowed = list(task.allowed_ranks or ((),) * len(task.tables))
    for tables in task.together:
        ranks = _common_ranks(task, tables)
        for table in tables:
            allowed[table] = ()
        if len(ranks) < task.world_size:
            allowed[tables[0]] = ranks
    return dataclasses.replace(
        task,
        **sizes,
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
    """Raise where rules on ranks contradict each other or the ranks' memory.

    Raises:
        ConfigError: The rules contradict each other; names the tables.
        InfeasibleError: Proven; names the tables and what would help.
    """
    if not task.is_constrained:
        return
    number = {way: n for n, ways in enumerate(task.ways) for way in ways}

    def proper(sets: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple({tuple(sorted({number[way] for way in s})) for s in sets})

    every = tuple(range(task.world_size))
    PlacementRules(
        names=tuple(task.tables[ways[0]].name for ways in task.ways),
        world_size=task.world_size,
        allowed={
            n: tuple(sorted({r for w in ways for r in task.allowed_ranks[w] or every}))
            for n, ways in enumerate(task.ways if task.allowed_ranks else ())
        },
        together=proper(task.together),
        apart=proper(task.apart),
    ).check()
    sets = {way: tables for tables in task.together for way in tables}
    for ways in task.ways:
        own = [sets[way] for way in ways if way in sets]
        if own and not any(_fits(task, tables) for tables in own):
            size = format_bytes(sum(_whole_bytes(task, t) for t in own[0]))
            raise InfeasibleError(
                f"tables {_named(task, own[0])} are to lie together and need {size}; "
                "no rank that may hold them has room. Take a table out of the set or "
                "allow it other ranks"
            )
    _check_shared_ranks(merged(task))


def _whole_bytes(task: ShardingTask, table: int) -> float:
    return task.shard_bytes(table, task.tables[table].embedding_dim)


def _common_ranks(task: ShardingTask, tables: Sequence[int]) -> tuple[int, ...]:
    """Ranks that all of some tables may be on."""
    rules = task.rules
    return tuple(sorted(set.intersection(*(set(rules.ranks(t)) for t in tables))))


def _named(task: ShardingTask, tables: Sequence[int]) -> str:
    return quoted([task.tables[t].name for t in tables])


def _fits(task: ShardingTask, tables: Sequence[int]) -> bool:
    """Whether a rank that may hold all of some tables has room for them."""
    sizes = [sum(_whole_bytes(m, t) for t in tables) for m in task.memories]
    return any(
        all(
            not memory.memory_bytes or size <= memory.memory_bytes[rank]
            for memory, size in zip(task.memories, sizes, strict=True)
        )
        for rank in _common_ranks(task, tables)
    )


def _check_shared_ranks(task: ShardingTask) -> None:
    """Check that tables fit the memory of the ranks that they are confined to."""
    if not task.allowed_ranks:
        return
    confined = [t for t, ranks in enumerate(task.allowed_ranks) if ranks]
    for ranks in sorted({task.allowed_ranks[t] for t in confined}):
        among = frozenset(ranks)
        ways = [w for w in task.ways if all(task.allowed_ranks[t] for t in w)]
        held = [
            w for w in ways if all(among.issuperset(task.allowed_ranks[t]) for t in w)
        ]
        for where, memory in zip(("", HOST), task.memories, strict=False):
            # Of a table that may be sharded in several ways, the one of least memory.
            size = sum(min(_whole_bytes(memory, t) for t in w) for w in held)
            room = sum(memory.memory_bytes[r] for r in ranks if memory.memory_bytes)
            if memory.memory_bytes and size > room:
                raise InfeasibleError(
                    f"{where}tables {_named(task, [w[0] for w in held])} may only be "
                    f"on {listed(ranks)} and need {format_bytes(size)}; there is room "
                    f"for {format_bytes(room)}. Allow some of them other ranks"
                )
