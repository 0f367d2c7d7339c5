"""Which ranks tables may be on, and with which others: what TorchRec cannot be told."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torchrec.distributed.planner.types import ShardingOption

from torchrec_neuroshard.costs.placement_rules import (
    PlacementRules,
    joined_sets,
    quoted,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner.option_facts import (
    table_name,
)
from torchrec_neuroshard.planner.reader import (
    TableReader,
)
from torchrec_neuroshard.planner.spread_options import sample_shards
from torchrec_neuroshard.planner.table_keys import table_keys, unknown_table
from torchrec_neuroshard.planner.ways import node_ranks
from torchrec_neuroshard.tables.sharding_types import SHARDING_TYPES

__all__ = ["PlacementConstraints", "permits", "ranks_by_table", "too_few_ranks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConstraints:
    """Which ranks may hold which tables, for `NeuroShardPlanner`.

    Tables are named as in `constraints=`: by name, or with the path of their module
    where several have a table of that name ("path.to.module/table", or with a dot):

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
        pin = {name: _ranks(r, f"pin['{name}']") for name, r in self.pin.items()}
        for name, value in (
            ("pin", pin),
            ("forbid_ranks", _ranks(self.forbid_ranks, "forbid_ranks")),
            ("together", _sets(self.together, "together")),
            ("apart", _sets(self.apart, "apart")),
        ):
            object.__setattr__(self, name, value)

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


@functools.lru_cache(maxsize=4)
def _resolved(
    constraints: PlacementConstraints, tables: tuple[str, ...], world_size: int
) -> PlacementRules:
    """Resolve the names once for a model, whoever asks."""
    if not constraints:
        return PlacementRules(tables, world_size)
    forbidden, by_name = constraints.forbid_ranks, _indices(tables)
    pins = {f"pin['{name}']": ranks for name, ranks in constraints.pin.items()}
    for where, ranks in {**pins, "forbid_ranks": forbidden}.items():
        for rank in ranks:
            if not 0 <= rank < world_size:
                raise ConfigError(
                    f"{where} has rank {rank}, which is not in 0 to {world_size - 1} "
                    f"(world_size {world_size})"
                )
    left = tuple(r for r in range(world_size) if r not in forbidden)
    allowed = dict.fromkeys(range(len(tables)), left) if forbidden else {}
    for name, ranks in constraints.pin.items():
        for table in _meant(name, "pin", by_name):
            both = set(ranks).intersection(allowed.get(table, left))
            allowed[table] = tuple(sorted(both))
    sets: dict[str, list[tuple[int, ...]]] = {"together": [], "apart": []}
    for where, found in sets.items():
        for names in getattr(constraints, where):
            found.append(_each(names, where, by_name, tables))
    rules = PlacementRules(
        tables,
        world_size,
        {t: r for t, r in allowed.items() if len(r) < world_size},
        joined_sets(sets["together"]),
        tuple(sorted(set(sets["apart"]))),
    )
    rules.check()
    propagated = rules.propagated()
    for table, open_ranks in propagated.allowed.items():
        if not open_ranks:
            raise ConfigError(
                f"pin, together, apart and forbid_ranks leave no rank for table "
                f"'{tables[table]}'. Allow it, or the tables that it belongs apart "
                "from, more ranks"
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
    block = SHARDING_TYPES[option.sharding_type].block
    is_joined = any(table in tables for tables in rules.together)
    is_whole = option.tensor.shape[0] == sample_shards(option)[0].size[0]
    if is_joined and (block == "world" or not is_whole):
        return False
    node = node_ranks(option, reader)
    if node is not None and len(node) < rules.world_size:
        # Tables that lie together would all have to be for the same node.
        return not is_joined and not set(node).isdisjoint(rules.ranks(table))
    if block == "world":
        return rules.is_free(table)
    if block == "node":
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


def _indices(tables: Sequence[str]) -> dict[str, list[int]]:
    """Return key -> the tables that it means; full names go before bare ones."""
    found: dict[str, list[int]] = {}
    for index, table in enumerate(tables):
        path, _, name = table.rpartition(".")
        for key in table_keys(path, name):
            found.setdefault(key, []).append(index)
    return found | {table: [index] for index, table in enumerate(tables)}


def _meant(name: str, where: str, by_name: Mapping[str, list[int]]) -> list[int]:
    """Return all tables that a name means."""
    if name not in by_name:
        raise ConfigError(f"{where} {unknown_table('names', name, by_name)}")
    return by_name[name]


def _each(
    names: Iterable[str],
    where: str,
    by_name: Mapping[str, list[int]],
    tables: Sequence[str],
) -> tuple[int, ...]:
    """Return the tables of a set, in which each name means one table."""
    for name in names:
        if len(found := _meant(name, where, by_name)) > 1:
            raise ConfigError(
                f"{where} names table '{name}', which several modules have; say "
                f"which: {quoted(sorted(tables[t] for t in found), ' or ')}"
            )
    return tuple(sorted({by_name[name][0] for name in names}))


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
    sets = set()
    for names in value:
        if (
            isinstance(names, str)
            or not all(isinstance(n, str) for n in names)
            or len(set(names)) < 2
        ):
            raise ConfigError(
                f"{where} takes sets of at least two tables, such as [['a', 'b']]; one "
                f"of them is {names!r:.60}"
            )
        sets.add(tuple(sorted(set(names))))
    return tuple(sorted(sets))
