"""Which ranks tables may be on, and with which others: what TorchRec cannot be told."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import sparse
from torchrec.distributed.planner.types import ShardingOption

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.placement import joined_sets
from torchrec_neuroshard.planner.checks import suggestion
from torchrec_neuroshard.planner.table_reader import table_name
from torchrec_neuroshard.sharding_types import SHARDING_TYPES

__all__ = ["PlacementConstraints", "PlacementRules", "ranks_by_table"]

_MAX_NAMED = 8
"""Tables or ranks that a message lists; of more, the first ones."""

_EVERY_RANK = frozenset(n for n, t in SHARDING_TYPES.items() if t.block == "world")
_WHOLE_NODES = frozenset(n for n, t in SHARDING_TYPES.items() if t.block == "node")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConstraints:
    """Which ranks may hold which tables, for `NeuroShardPlanner`.

    Tables are named as in TorchRec's `constraints`, or "module.table" where several
    modules have a table of that name:

        PlacementConstraints(
            pin={"user": [0, 1]},
            together=[["item", "shop"]],
            apart=[["country", "city"]],
            forbid_ranks=[3],
        )

    Every plan keeps them, whatever a table's sharding type and kernel: what would break
    them is no candidate. Row-wise and data-parallel tables are on every rank, so that
    tables with fewer ranks to be on are neither.

    Raises:
        ConfigError: A value is not of its kind, or says nothing.
    """

    pin: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Table -> the ranks that may hold shards of it. A name that several modules have a
    table of means all of these."""
    together: Collection[Collection[str]] = ()
    """Sets of tables that lie whole, all of a set on one common rank."""
    apart: Collection[Collection[str]] = ()
    """Sets of tables of which no rank holds shards of more than one."""
    forbid_ranks: Collection[int] = ()
    """Ranks that hold no table at all."""

    def __post_init__(self) -> None:
        pin = {}
        for name, ranks in self.pin.items():
            pin[name] = _ranks(ranks, f"pin['{name}']")
            if not pin[name]:
                raise ConfigError(
                    f"pin['{name}'] lists no rank: give at least one, or leave the "
                    "table out"
                )
        object.__setattr__(self, "pin", pin)
        object.__setattr__(
            self, "forbid_ranks", _ranks(self.forbid_ranks, "forbid_ranks")
        )
        for name in ("together", "apart"):
            object.__setattr__(self, name, _sets(getattr(self, name), name))

    def __bool__(self) -> bool:
        return bool(self.pin or self.together or self.apart or self.forbid_ranks)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; keywords of an equal object."""
        return {
            "pin": {name: list(ranks) for name, ranks in sorted(self.pin.items())},
            "together": [list(names) for names in self.together],
            "apart": [list(names) for names in self.apart],
            "forbid_ranks": list(self.forbid_ranks),
        }

    def rules(self, tables: Iterable[str], world_size: int) -> PlacementRules:
        """Say what the constraints mean for a model's tables.

        Args:
            tables: Full names, "module.table", of all of them.
            world_size: Ranks that there are.

        Raises:
            ConfigError: A table or rank does not exist, or constraints contradict
                each other.
        """
        if not self:
            return PlacementRules(world_size)
        names = _Names(tables)
        self._check_ranks(world_size)
        left = tuple(r for r in range(world_size) if r not in self.forbid_ranks)
        allowed = {t: left for t in names.tables} if self.forbid_ranks else {}
        for name, ranks in self.pin.items():
            kept = tuple(r for r in ranks if r in left)
            if not kept:
                raise ConfigError(
                    f"table '{name}' is pinned to {_listed(ranks)}, all of which "
                    "forbid_ranks forbids. Take one out of forbid_ranks or pin the "
                    "table elsewhere"
                )
            for table in names.all(name, "pin"):
                both = set(kept).intersection(allowed.get(table, kept))
                allowed[table] = tuple(sorted(both))
        rules = PlacementRules(
            world_size,
            {t: r for t, r in allowed.items() if len(r) < world_size},
            joined_sets(names.each(s, "together") for s in self.together),
            tuple(sorted({names.each(s, "apart") for s in self.apart})),
        )
        rules.check()
        propagated = rules.propagated()
        stuck = [table for table, ranks in propagated.allowed.items() if not ranks]
        if stuck:
            raise ConfigError(
                f"pin, together, apart and forbid_ranks leave no rank for table "
                f"'{min(stuck)}': others that it belongs apart from can be nowhere "
                "else. Allow some of them more ranks"
            )
        return propagated

    def _check_ranks(self, world_size: int) -> None:
        """Check that all ranks exist and some are left."""
        named = {f"pin['{name}']": ranks for name, ranks in self.pin.items()}
        for where, ranks in (named | {"forbid_ranks": self.forbid_ranks}).items():
            odd = [r for r in ranks if not 0 <= r < world_size]
            if odd:
                raise ConfigError(
                    f"{where} has rank {odd[0]}, which is not in 0 to {world_size - 1} "
                    f"(world_size {world_size})"
                )
        if len(self.forbid_ranks) == world_size:
            raise ConfigError(
                f"forbid_ranks forbids all {world_size} ranks; leave at least one for "
                "the tables"
            )


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """What `PlacementConstraints` mean for the tables of one model, by full names."""

    world_size: int
    allowed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Table -> ranks that may hold shards of it, sorted; others may be anywhere."""
    together: tuple[tuple[str, ...], ...] = ()
    """Sets without a common member."""
    apart: tuple[tuple[str, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.allowed or self.together or self.apart)

    def ranks(self, table: str) -> tuple[int, ...]:
        """Return the ranks that may hold shards of a table, sorted."""
        return self.allowed.get(table, tuple(range(self.world_size)))

    def colocated_with(self, table: str) -> tuple[str, ...]:
        """Return the tables that lie where this one lies, itself among them."""
        return next((s for s in self.together if table in s), (table,))

    def is_free(self, table: str) -> bool:
        """Whether nothing is asked of a table."""
        return table not in self.allowed and not any(
            table in names for names in (*self.together, *self.apart)
        )

    def permits(self, option: ShardingOption, node_size: int) -> bool:
        """Say whether the ranks that an option needs are open to its table.

        Args:
            option: One of a table's options, with or without ranks.
            node_size: Ranks that a table-row-wise table is spread over.
        """
        table = table_name(option)
        if any(table in names for names in self.together):
            whole = option.tensor.shape[0] == option.shards[0].size[0]
            if not whole or option.sharding_type in _EVERY_RANK:
                return False
        if option.sharding_type in _EVERY_RANK:
            return table not in self.allowed and not any(
                table in names for names in self.apart
            )
        if option.sharding_type in _WHOLE_NODES:
            ranks = set(self.ranks(table))
            starts = range(0, self.world_size, node_size)
            free = sum(ranks.issuperset(range(s, s + node_size)) for s in starts)
            return free * node_size >= len(option.shards)
        return True

    def propagated(self) -> PlacementRules:
        """Return the rules with what follows from them for the ranks of each table.

        Tables that lie together have the same ranks; one that has a single rank leaves
        that to none that it belongs apart from. A table's ranks are an empty tuple
        where nothing is left.
        """
        ranks = {
            name: set(self.ranks(name))
            for names in (*self.together, *self.apart)
            for name in names
        }
        before = -1
        while before != (before := sum(map(len, ranks.values()))):
            for names in self.together:
                common = set.intersection(*(ranks[name] for name in names))
                ranks.update({name: set(common) for name in names})
            for names in self.apart:
                for name in (n for n in names if len(ranks[n]) == 1):
                    for other in set(names) - {name}:
                        ranks[other] -= ranks[name]
        narrower = {
            name: tuple(sorted(left))
            for name, left in ranks.items()
            if len(left) < self.world_size
        }
        return dataclasses.replace(self, allowed={**self.allowed, **narrower})

    def restricted(self, held: Mapping[str, Collection[int]]) -> PlacementRules:
        """Return the rules for other tables, once some are on their ranks.

        Args:
            held: Placed table -> its ranks.

        Returns:
            A table's ranks are an empty tuple where the placed ones leave it none.
        """
        allowed = dict(self.allowed)
        for names in self.together:
            for mate in (held[n] for n in names if n in held):
                for name in names:
                    kept = [r for r in self.ranks(name) if r in mate]
                    allowed[name] = tuple(kept)
        for names in self.apart:
            taken = {n: held[n] for n in names if n in held}
            for name in set(names).difference(taken):
                for member in self.colocated_with(name):
                    before = allowed.get(member, self.ranks(member))
                    full = {r for ranks in taken.values() for r in ranks}
                    allowed[member] = tuple(r for r in before if r not in full)
        return dataclasses.replace(self, allowed=allowed).propagated()

    def violation(
        self,
        held: Mapping[str, Collection[int]],
        tables: Collection[str] | None = None,
    ) -> str | None:
        """Say how placed tables break the rules; None if they do not.

        Args:
            held: Table -> its ranks.
            tables: Those whose own ranks are looked at; sets that lie together or apart
                are in any case. None: all.
        """
        for table in sorted(self.allowed.keys() & (held if tables is None else tables)):
            odd = sorted(set(held[table]).difference(self.ranks(table)))
            if odd:
                return (
                    f"table '{table}' is on rank {odd[0]}; it may be on "
                    f"{_listed(self.ranks(table))} only"
                )
        for names in self.together:
            sets = {n: set(held[n]) for n in names if n in held}
            for name, ranks in sets.items():
                first = next(iter(sets))
                where = f"on {_listed(sorted(ranks | sets[first]))}"
                if len(ranks) > 1:
                    return f"table '{name}' is {where}; it belongs on one, with others"
                if ranks != sets[first]:
                    return f"tables '{first}' and '{name}' are {where}, not together"
        for names in self.apart:
            holder: dict[int, str] = {}
            for name in (n for n in names if n in held):
                for rank in sorted(set(held[name])):
                    if holder.setdefault(rank, name) != name:
                        return (
                            f"rank {rank} holds both '{holder[rank]}' and '{name}', "
                            "which belong apart"
                        )
        return None

    def check(self) -> None:
        """Check that the rules do not contradict each other, sizes aside.

        Raises:
            ConfigError: They do; names the tables.
        """
        for names in self.together:
            first, ranks = names[0], set(self.ranks(names[0]))
            for name in names[1:]:
                ranks &= set(self.ranks(name))
                if not ranks:
                    raise ConfigError(
                        f"tables '{first}' and '{name}' belong together, but no rank "
                        f"may hold both: '{first}' may be on "
                        f"{_listed(self.ranks(first))}, '{name}' on "
                        f"{_listed(self.ranks(name))}. Pin them to a common rank"
                    )
        for names in self.apart:
            for i, name in enumerate(names):
                mates = set(self.colocated_with(name)).intersection(names[:i])
                if mates:
                    raise ConfigError(
                        f"tables '{min(mates)}' and '{name}' are asked to lie both "
                        "together and apart. Take them out of one of the two"
                    )
            self._check_room(names)

    def _check_room(self, names: Sequence[str]) -> None:
        """Check that tables which belong apart can have a rank each."""
        may = np.zeros((len(names), self.world_size), dtype=bool)
        for row, name in enumerate(names):
            common = set(self.ranks(name)).intersection(
                *(self.ranks(mate) for mate in self.colocated_with(name))
            )
            may[row, sorted(common)] = True
        of_table = sparse.csgraph.maximum_bipartite_matching(
            sparse.csr_array(may), perm_type="column"
        )
        if (of_table < 0).any():
            ranks = np.flatnonzero(may.any(axis=0)).tolist()
            raise ConfigError(
                f"tables {_quoted(names)} belong apart, but there is not a rank for "
                f"each of them: they may be on {_listed(ranks)}"
                + (
                    ""
                    if len(ranks) < len(names)
                    else f", and nothing is left for '{names[of_table.argmin()]}'"
                )
                + ". Pin them elsewhere or take some out of the set"
            )


def ranks_by_table(plan: Iterable[ShardingOption]) -> dict[str, set[int]]:
    """Return table -> ranks that hold shards of it, by full name, of a placed plan."""
    return {table_name(o): {int(s.rank) for s in o.shards} for o in plan}


class _Names:
    """The tables of a model, by every name that may be used for them."""

    def __init__(self, tables: Iterable[str]) -> None:
        self.tables = tuple(tables)
        self._by_bare_name: dict[str, list[str]] = {}
        for table in self.tables:
            bare = table.rpartition(".")[2]
            self._by_bare_name.setdefault(bare, []).append(table)
        self._known = {t: [t] for t in self.tables}

    def all(self, name: str, where: str) -> list[str]:
        """Return all tables that a name means."""
        found = self._known.get(name) or self._by_bare_name.get(name)
        if found is None:
            raise ConfigError(
                f"{where} names table '{name}', which is not there; "
                + suggestion(name, [*self._by_bare_name, *self.tables], "tables")
            )
        return found

    def each(self, names: Iterable[str], where: str) -> tuple[str, ...]:
        """Return the tables of a set, in which each name means one table."""
        tables = set()
        for name in names:
            found = self.all(name, where)
            if len(found) > 1:
                raise ConfigError(
                    f"{where} names table '{name}', which several modules have; say "
                    f"which: {_quoted(sorted(found), ' or ')}"
                )
            tables.add(found[0])
        return tuple(sorted(tables))


def _ranks(value: Any, where: str) -> tuple[int, ...]:
    """Sorted ranks without repeats."""
    if isinstance(value, (str, bytes, int)) or not all(
        isinstance(r, (int, np.integer)) and not isinstance(r, bool) for r in value
    ):
        raise ConfigError(
            f"{where} takes a list of ranks, such as [0, 1]; got {value!r}"
        )
    return tuple(sorted({int(r) for r in value}))


def _sets(value: Any, where: str) -> tuple[tuple[str, ...], ...]:
    """Sets of table names, each in order and without repeats."""
    sets = []
    for names in value:
        if isinstance(names, str) or not all(isinstance(n, str) for n in names):
            raise ConfigError(
                f"{where} takes lists of tables, such as [['a', 'b']]; one of them is "
                f"{names!r}"
            )
        if len(set(names)) < 2:
            raise ConfigError(
                f"a set of {where} needs at least two tables, got {list(names)}"
            )
        sets.append(tuple(sorted(set(names))))
    return tuple(sorted(set(sets)))


def _listed(ranks: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_MAX_NAMED])) or "none"
    more = ", ..." if len(ranks) > _MAX_NAMED else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def _quoted(names: Sequence[str], joint: str = ", ") -> str:
    shown = joint.join(f"'{n}'" for n in names[:_MAX_NAMED])
    return shown + (" and more" if len(names) > _MAX_NAMED else "")
