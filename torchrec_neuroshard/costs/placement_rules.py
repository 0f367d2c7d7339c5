"""Placement rules by table index: allowed ranks, tables together, tables apart.

This is their only description and check. `planner.constraints` resolves a caller's
names into these rules; a `ShardingTask` makes its own.

Shapes: `N` shards, `T` tables, `W` ranks, `K` most "apart" sets of one table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import scipy

from torchrec_neuroshard.errors import ConfigError

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_MAX_NAMED = 8
"""Most tables or ranks that a message lists."""

Member = TypeVar("Member", int, str)


@dataclass(frozen=True)
class PlacementRules:
    """Which ranks tables may be on, and which tables stay together or apart."""

    names: tuple[str, ...]
    """The tables' names, for messages."""
    world_size: int
    allowed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Table -> ranks that may hold its shards, sorted. Other tables may be anywhere."""
    together: tuple[tuple[int, ...], ...] = ()
    """Disjoint sets of tables that share one rank."""
    apart: tuple[tuple[int, ...], ...] = ()
    """Sets of tables of which a rank holds at most one."""

    def __bool__(self) -> bool:
        return bool(self.allowed or self.together or self.apart)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Table's name -> index."""
        return {name: table for table, name in enumerate(self.names)}

    def ranks(self, table: int) -> tuple[int, ...]:
        """Return the ranks that may hold shards of a table, sorted."""
        return self.allowed.get(table, tuple(range(self.world_size)))

    def colocated_with(self, table: int) -> tuple[int, ...]:
        """Return the tables that share this table's rank, including itself."""
        return next((s for s in self.together if table in s), (table,))

    def is_free(self, table: int) -> bool:
        """Whether no rule is about the table."""
        return table not in self.allowed and not any(
            table in tables for tables in (*self.together, *self.apart)
        )

    @cached_property
    def allowed_TW(self) -> Bools | None:
        """Which ranks may hold each table; None if every table may be on every rank."""
        if not self.allowed:
            return None
        allowed_TW = np.ones((len(self.names), self.world_size), dtype=bool)
        for table, ranks in self.allowed.items():
            allowed_TW[table] = np.isin(np.arange(self.world_size), ranks)
        return allowed_TW

    @property
    def num_sets(self) -> int:
        """Number of "apart" sets."""
        return len(self.apart)

    @cached_property
    def sets_TK(self) -> Ints:
        """The "apart" sets of each table, padded with `num_sets`."""
        sets: list[list[int]] = [[] for _ in self.names]
        for number, tables in enumerate(self.apart):
            for table in tables:
                sets[table].append(number)
        most = max(map(len, sets))
        filled = [[*s, *[self.num_sets] * (most - len(s))] for s in sets]
        return np.array(filled, dtype=np.int64).reshape(len(sets), most)

    def freedom(self, table_N: Ints) -> Ints:
        """Count the ranks that each table may be on: `N`; all 0 without rules."""
        if self.allowed_TW is None:
            return np.zeros(len(table_N), dtype=np.int64)
        count: Ints = self.allowed_TW[table_N].sum(axis=1)
        return count

    def propagated(self) -> PlacementRules:
        """Return the rules with each table's ranks narrowed by all rules.

        Tables kept together get the same ranks. A table with a single rank takes that
        rank from the tables that it stays apart from. A table with no rank left gets an
        empty tuple.
        """
        ranks = {
            table: set(self.ranks(table))
            for tables in (*self.together, *self.apart)
            for table in tables
        }
        before = -1
        while before != (before := sum(map(len, ranks.values()))):
            for tables in self.together:
                common = set.intersection(*(ranks[table] for table in tables))
                ranks.update({table: set(common) for table in tables})
            for tables in self.apart:
                for table in (t for t in tables if len(ranks[t]) == 1):
                    for other in set(tables) - {table}:
                        ranks[other] -= ranks[table]
        narrower = {
            table: tuple(sorted(left))
            for table, left in ranks.items()
            if len(left) < self.world_size
        }
        return dataclasses.replace(self, allowed={**self.allowed, **narrower})

    def restricted(self, held: Mapping[int, Collection[int]]) -> PlacementRules:
        """Return the rules for the remaining tables, given placed ones.

        Args:
            held: Placed table -> its ranks.

        Returns:
            Rules in which a table without a rank left has an empty tuple.
        """
        allowed = dict(self.allowed)
        for tables in self.together:
            for mate in (held[t] for t in tables if t in held):
                for table in tables:
                    kept = [r for r in self.ranks(table) if r in mate]
                    allowed[table] = tuple(kept)
        for tables in self.apart:
            taken = {t: held[t] for t in tables if t in held}
            for table in set(tables).difference(taken):
                for member in self.colocated_with(table):
                    before = allowed.get(member, self.ranks(member))
                    full = {r for ranks in taken.values() for r in ranks}
                    allowed[member] = tuple(r for r in before if r not in full)
        return dataclasses.replace(self, allowed=allowed).propagated()

    def violation(self, held: Mapping[int, Collection[int]]) -> str | None:
        """Return how placed tables break a rule; None if they do not.

        Args:
            held: Table -> its ranks; tables that are missing break no rule.
        """
        for table in sorted(self.allowed.keys() & held):
            odd = sorted(set(held[table]).difference(self.ranks(table)))
            if odd:
                return (
                    f"table '{self.names[table]}' is on rank {odd[0]}; it may be on "
                    f"{listed(self.ranks(table))} only"
                )
        for tables in self.together:
            sets = {t: set(held[t]) for t in tables if t in held}
            for table, ranks in sets.items():
                first = next(iter(sets))
                where = f"on {listed(ranks | sets[first])}"
                name = self.names[table]
                if len(ranks) > 1:
                    return f"table '{name}' is {where}; it must be on one, with others"
                if ranks != sets[first]:
                    return (
                        f"tables '{self.names[first]}' and '{name}' are {where}, not "
                        "together"
                    )
        for tables in self.apart:
            holder: dict[int, int] = {}
            for table in (t for t in tables if t in held):
                for rank in sorted(set(held[table])):
                    other = holder.setdefault(rank, table)
                    if other != table:
                        return (
                            f"rank {rank} holds both '{self.names[other]}' and "
                            f"'{self.names[table]}', which must be apart"
                        )
        return None

    def check(self) -> None:
        """Check that the rules do not contradict each other, apart from sizes.

        Raises:
            ConfigError: Two rules contradict each other; names the tables.
        """
        for tables in self.together:
            first, ranks = tables[0], set(self.ranks(tables[0]))
            for table in tables[1:]:
                ranks &= set(self.ranks(table))
                if not ranks:
                    one, two = self.names[first], self.names[table]
                    raise ConfigError(
                        f"tables '{one}' and '{two}' must be together, but no rank may "
                        f"hold both: '{one}' may be on {listed(self.ranks(first))}, "
                        f"'{two}' on {listed(self.ranks(table))}. Pin them to a common "
                        "rank"
                    )
        for tables in self.apart:
            for i, table in enumerate(tables):
                mates = set(self.colocated_with(table)).intersection(tables[:i])
                if mates:
                    raise ConfigError(
                        f"tables '{self.names[min(mates)]}' and '{self.names[table]}' "
                        "must be both together and apart. Take them out of one of the "
                        "two"
                    )
            self._check_room(tables)

    def _check_room(self, tables: Sequence[int]) -> None:
        """Check that there is a different rank for each table of an "apart" set."""
        may = np.zeros((len(tables), self.world_size), dtype=bool)
        for row, table in enumerate(tables):
            common = set(self.ranks(table)).intersection(
                *(self.ranks(mate) for mate in self.colocated_with(table))
            )
            may[row, sorted(common)] = True
        of_table = scipy.sparse.csgraph.maximum_bipartite_matching(
            scipy.sparse.csr_array(may), perm_type="column"
        )
        if (of_table < 0).any():
            ranks = np.flatnonzero(may.any(axis=0)).tolist()
            raise ConfigError(
                f"tables {quoted([self.names[t] for t in tables])} must be apart, but "
                f"there are too few ranks: they may be on {listed(ranks)}. Pin them "
                "elsewhere or take some out of the set"
            )


def joined_sets(sets: Iterable[Iterable[Member]]) -> tuple[tuple[Member, ...], ...]:
    """Join sets that share a member; returns disjoint sets, sorted."""
    joined: list[set[Member]] = []
    for members in map(set, sets):
        shared = [other for other in joined if other & members]
        joined = [other for other in joined if not other & members]
        joined.append(members.union(*shared))
    return tuple(sorted(tuple(sorted(members)) for members in joined))


def listed(ranks: Collection[int]) -> str:
    """Return ranks as text, such as "ranks 0-3, 7"; a long list is cut."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:_MAX_NAMED]) or "none"
    more = " and more" if len(runs) > _MAX_NAMED else ""
    return f"rank{'s' * (len(ranks) != 1)} {shown}{more}"


def quoted(names: Sequence[str], joint: str = ", ") -> str:
    """Return quoted names as text; a long list is cut."""
    shown = joint.join(f"'{n}'" for n in names[:_MAX_NAMED])
    return shown + (" and more" if len(names) > _MAX_NAMED else "")
