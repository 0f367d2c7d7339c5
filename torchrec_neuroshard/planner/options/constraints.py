"""Which ranks tables may be on, and with which others: what TorchRec cannot be told."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torchrec.distributed.planner.types import ShardingOption

from torchrec_neuroshard.errors import ConfigError, suggestion
from torchrec_neuroshard.placement_rules import (
    PlacementRules,
    joined_sets,
    listed,
    quoted,
)
from torchrec_neuroshard.planner.options.spread_options import sample_shards
from torchrec_neuroshard.planner.options.table_reader import TableReader, table_name
from torchrec_neuroshard.planner.options.ways import node_ranks
from torchrec_neuroshard.sharding_types import SHARDING_TYPES

__all__ = ["PlacementConstraints", "permits", "ranks_by_table", "too_few_ranks"]

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

    def __hash__(self) -> int:
        return hash((*self.pin.items(), self.together, self.apart, self.forbid_ranks))

    def rules(self, tables: Iterable[str], world_size: int) -> PlacementRules:
        """Say what the constraints mean for a model's tables; that is kept.

        Args:
            tables: Full names, "module.table", of all of them, in the order in which
                the rules count them.
            world_size: Ranks that there are.

        Raises:
            ConfigError: A table or rank does not exist, or constraints contradict
                each other.
        """
        return _resolved(self, tuple(tables), world_size)

    def check_ranks(self, world_size: int) -> None:
        """Check that all ranks exist and some are left.

        Raises:
            ConfigError: One does not, or none is.
        """
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


@functools.lru_cache(maxsize=4)
def _resolved(
    constraints: PlacementConstraints, tables: tuple[str, ...], world_size: int
) -> PlacementRules:
    """Resolve the names once for a model, whoever asks."""
    if not constraints:
        return PlacementRules(tables, world_size)
    names = _Names(tables)
    constraints.check_ranks(world_size)
    forbidden = constraints.forbid_ranks
    left = tuple(r for r in range(world_size) if r not in forbidden)
    allowed = dict.fromkeys(range(len(tables)), left) if forbidden else {}
    for name, ranks in constraints.pin.items():
        kept = tuple(r for r in ranks if r in left)
        if not kept:
            raise ConfigError(
                f"table '{name}' is pinned to {listed(ranks)}, all of which "
                "forbid_ranks forbids. Take one out of forbid_ranks or pin the table "
                "elsewhere"
            )
        for table in names.all(name, "pin"):
            both = set(kept).intersection(allowed.get(table, kept))
            allowed[table] = tuple(sorted(both))
    rules = PlacementRules(
        tables,
        world_size,
        {t: r for t, r in allowed.items() if len(r) < world_size},
        joined_sets(names.each(s, "together") for s in constraints.together),
        tuple(sorted({names.each(s, "apart") for s in constraints.apart})),
    )
    rules.check()
    propagated = rules.propagated()
    stuck = [tables[t] for t, ranks in propagated.allowed.items() if not ranks]
    if stuck:
        raise ConfigError(
            f"pin, together, apart and forbid_ranks leave no rank for table "
            f"'{min(stuck)}': others that it belongs apart from can be nowhere else. "
            "Allow some of them more ranks"
        )
    return propagated


def ranks_by_table(
    plan: Iterable[ShardingOption], rules: PlacementRules
) -> dict[int, set[int]]:
    """Return table -> ranks that hold shards of it, of a placed plan."""
    return {rules.index[table_name(o)]: {int(s.rank) for s in o.shards} for o in plan}


def permits(rules: PlacementRules, option: ShardingOption, reader: TableReader) -> bool:
    """Say whether the ranks that an option needs are open to its table.

    Args:
        rules: Of the model.
        option: One of a table's options, with or without ranks.
        reader: Knows the devices.
    """
    table, node_size = rules.index[table_name(option)], reader.node_size
    if any(table in tables for tables in rules.together):
        whole = option.tensor.shape[0] == sample_shards(option)[0].size[0]
        if not whole or option.sharding_type in _EVERY_RANK:
            return False
    node = node_ranks(option, reader)
    if node is not None and len(node) < rules.world_size:
        # Tables that lie together would all have to be for the same node.
        joined = any(table in tables for tables in rules.together)
        return not joined and not set(node).isdisjoint(rules.ranks(table))
    if option.sharding_type in _EVERY_RANK:
        return table not in rules.allowed and not any(
            table in tables for tables in rules.apart
        )
    if option.sharding_type in _WHOLE_NODES:
        ranks = set(rules.ranks(table))
        starts = range(0, rules.world_size, node_size)
        free = sum(ranks.issuperset(range(s, s + node_size)) for s in starts)
        return bool(free * node_size >= option.num_shards)
    return True


def too_few_ranks(
    options: Sequence[ShardingOption], how: str = "may only be sharded"
) -> str:
    """Say that none of a table's options is permitted."""
    kinds = ", ".join(sorted({o.sharding_type for o in options}))
    return (
        f"table '{table_name(options[0])}' {how} {kinds}, which needs "
        "more ranks than placement constraints leave it. Allow it more ranks or "
        "table-wise sharding"
    )


class _Names:
    """The tables of a model, by every name that may be used for them."""

    def __init__(self, tables: Sequence[str]) -> None:
        self.tables = tables
        self._by_bare_name: dict[str, list[int]] = {}
        for index, table in enumerate(tables):
            bare = table.rpartition(".")[2]
            self._by_bare_name.setdefault(bare, []).append(index)
        self._known = {table: [index] for index, table in enumerate(tables)}

    def all(self, name: str, where: str) -> list[int]:
        """Return all tables that a name means."""
        found = self._known.get(name) or self._by_bare_name.get(name)
        if found is None:
            raise ConfigError(
                f"{where} names table '{name:.60}', which is not there; "
                + suggestion(name, [*self._by_bare_name, *self.tables], "tables")
            )
        return found

    def each(self, names: Iterable[str], where: str) -> tuple[int, ...]:
        """Return the tables of a set, in which each name means one table."""
        tables = set()
        for name in names:
            found = self.all(name, where)
            if len(found) > 1:
                raise ConfigError(
                    f"{where} names table '{name}', which several modules have; say "
                    f"which: {quoted(sorted(self.tables[t] for t in found), ' or ')}"
                )
            tables.add(found[0])
        return tuple(sorted(tables))


def _ranks(value: Any, where: str) -> tuple[int, ...]:
    """Sorted ranks without repeats."""
    if isinstance(value, (str, bytes, int)) or not all(
        isinstance(r, (int, np.integer)) and not isinstance(r, bool) for r in value
    ):
        raise ConfigError(
            f"{where} takes a list of ranks, such as [0, 1]; got {value!r:.60}"
        )
    return tuple(sorted({int(r) for r in value}))


def _sets(value: Any, where: str) -> tuple[tuple[str, ...], ...]:
    """Sets of table names, each in order and without repeats."""
    sets = []
    for names in value:
        if isinstance(names, str) or not all(isinstance(n, str) for n in names):
            raise ConfigError(
                f"{where} takes lists of tables, such as [['a', 'b']]; one of them is "
                f"{names!r:.60}"
            )
        if len(set(names)) < 2:
            raise ConfigError(
                f"a set of {where} needs at least two tables, got {list(names)!s:.60}"
            )
        sets.append(tuple(sorted(set(names))))
    return tuple(sorted(set(sets)))
