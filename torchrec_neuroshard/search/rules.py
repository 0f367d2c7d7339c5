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
from torchrec_neuroshard.placement import (
    HOST,
    ShardingTask,
    capitalised,
    format_bytes,
)

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

_MAX_NAMED = 8
"""Tables or ranks that a message names; of more, the first ones."""


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

    def allows(
        self,
        width_TW: Ints,
        table_N: Ints,
        rank_N: Ints,
        leaving_N: Ints | None = None,
    ) -> Bools:
        """Say whether ranks may take shards of tables, memory aside.

        Args:
            width_TW: Columns of each table on each rank.
            table_N: Tables, one for each shard.
            rank_N: The rank that is asked about.
            leaving_N: Table that leaves that rank in exchange. None: none does.

        Returns:
            `N`: True where the rules allow it.
        """
        fine: Bools = np.ones(len(table_N), dtype=bool)
        if self.allowed_TW is not None:
            fine &= self.allowed_TW[table_N, rank_N]
        if self.num_sets:
            sets_NK = self.sets_TK[table_N]
            others = self.occupants(width_TW)[sets_NK, rank_N[:, None]]
            own = (width_TW[table_N, rank_N] > 0)[:, None] & (sets_NK < self.num_sets)
            others -= own
            if leaving_N is not None:
                theirs_NK = self.sets_TK[leaving_N]
                shared = (sets_NK[:, :, None] == theirs_NK[:, None, :]).any(axis=2)
                others -= shared & (sets_NK < self.num_sets)
            fine &= (others <= 0).all(axis=1)
        return fine

    def open_ranks(self, width_TW: Ints, table: int) -> Bools:
        """Return which ranks may take a shard of one table, `W`."""
        num_ranks = width_TW.shape[1]
        return self.allows(width_TW, np.full(num_ranks, table), np.arange(num_ranks))


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
        ConfigError: Two tables are to lie together and apart.
        InfeasibleError: Proven; names the tables and what would help.
    """
    if not task.is_constrained:
        return
    sets = {tables[0]: tables for tables in task.together}
    for ways in task.ways:
        _check_sets(task, [sets[way] for way in ways if way in sets])
    leader_T = leaders(task).tolist()
    for tables in task.apart:
        seen: dict[int, int] = {}
        for table in tables:
            other = seen.setdefault(leader_T[table], table)
            if other != table:
                raise ConfigError(
                    f"tables '{task.tables[other].name}' and "
                    f"'{task.tables[table].name}' are to lie both together and apart; "
                    "take them out of one of the two"
                )
    units = merged(task)
    first = {t: ways[0] for ways in task.ways for t in ways}
    for tables in units.apart:
        _check_apart(units, tuple(sorted({first[t] for t in tables})))
    _check_shared_ranks(units)


def _whole_bytes(task: ShardingTask, table: int) -> float:
    return task.shard_bytes(table, task.tables[table].embedding_dim)


def _common_ranks(task: ShardingTask, tables: Sequence[int]) -> tuple[int, ...]:
    """Ranks that all of some tables may be on."""
    rules = task.rules
    return tuple(sorted(set.intersection(*(set(rules.ranks(t)) for t in tables))))


def _named(task: ShardingTask, tables: Sequence[int]) -> str:
    names = ", ".join(f"'{task.tables[t].name}'" for t in tables[:_MAX_NAMED])
    more = len(tables) - _MAX_NAMED
    return f"{names} and {more} more" if more > 0 else names


def _numbered(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_NAMED]))
    return shown if len(ranks) <= _MAX_NAMED else f"{shown}, ..."


def _check_sets(task: ShardingTask, sets: Sequence[Sequence[int]]) -> None:
    """Check that tables that lie together have a rank to lie on, in some way."""
    problems = list[str]()
    for tables in sets:
        try:
            return _check_set(task, tables)
        except InfeasibleError as problem:
            problems.append(str(problem))
    if problems:
        # The first ways are the fastest; later ones may take the host's memory.
        host = [capitalised(p) for p in problems if p.startswith(HOST)]
        first, *_ = problems
        known = first.startswith(HOST)
        raise InfeasibleError(". ".join([first, *host[-1:][: not known]]))


def _check_set(task: ShardingTask, tables: Sequence[int]) -> None:
    """Check that tables that lie together have a rank to lie on."""
    ranks = _common_ranks(task, tables)
    if not ranks:
        kept = [
            f"'{task.tables[t].name}' on {_numbered(task.rules.ranks(t))}"
            for t in tables
            if t in task.rules.allowed
        ]
        raise InfeasibleError(
            f"tables {_named(task, tables)} are to lie together, but no rank may hold "
            f"them all (allowed_ranks: {'; '.join(kept[:_MAX_NAMED])}). Allow them a "
            "common rank"
        )
    for where, memory in zip(("", HOST), task.memories, strict=False):
        if not memory.memory_bytes:
            continue
        size = sum(_whole_bytes(memory, t) for t in tables)
        freest = max(ranks, key=lambda r: memory.memory_bytes[r])
        largest = max(range(task.world_size), key=lambda r: memory.memory_bytes[r])
        if size > memory.memory_bytes[freest]:
            other = f" or allow them rank {largest}, which has room"
            raise InfeasibleError(
                f"{where}tables {_named(task, tables)} are to lie together and need "
                f"{format_bytes(size)}; the freest rank that may hold them, {freest}, "
                f"has {format_bytes(memory.memory_bytes[freest])}. Take a table out of "
                f"the set{other * (size <= memory.memory_bytes[largest])}"
            )


def _check_apart(task: ShardingTask, tables: Sequence[int]) -> None:
    """Check that tables that lie apart have as many ranks as they are."""
    rules = task.rules
    allowed = {t: frozenset(rules.ranks(t)) for t in tables}
    for ranks in {*allowed.values(), frozenset().union(*allowed.values())}:
        held = [t for t in tables if allowed[t] <= ranks]
        if len(held) > len(ranks):
            way_out = "Allow them more ranks"
            if len(ranks) == task.world_size:
                way_out = f"Raise world_size ({len(ranks)}) to at least {len(held)}"
            raise InfeasibleError(
                f"the {len(held)} tables {_named(task, held)} are to lie apart, but "
                f"may only be on {len(ranks)} ranks ({_numbered(sorted(ranks))}). "
                f"{way_out} or take some out of the set"
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
                    f"on ranks {_numbered(ranks)} and need {format_bytes(size)}; these "
                    f"have {format_bytes(room)}. Allow some of them other ranks"
                )
