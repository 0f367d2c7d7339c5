"""Placement constraints: which ranks may hold a table, and which tables go together.

TorchRec's own constraints cannot express these.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrec_neuroshard.costs.placement_rules import (
    PlacementRules,
    joined_sets,
    quoted,
)
from torchrec_neuroshard.errors import ConfigError, check_kind
from torchrec_neuroshard.tables.table_keys import table_keys, unknown_table


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConstraints:
    """Which ranks may hold which tables.

    Name tables as in `constraints=`. If several modules have a table of that name, add
    the module's path ("path.to.module/table" or "path.to.module.table"):

        PlacementConstraints(
            pin={"user": [0, 1]},
            together=[["item", "shop"]],
            apart=[["country", "city"]],
            forbid_ranks=[3],
        )

    Every plan satisfies them, whatever a table's sharding type and kernel. Row-wise and
    data-parallel tables are on every rank, so a table that may not use all ranks is
    neither.

    Raises:
        ConfigError: A value has the wrong type or no effect.
    """

    pin: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Table -> the ranks that may hold its shards. A name that several modules use
    stands for all of these tables."""
    together: Collection[Collection[str]] = ()
    """Sets of tables. The tables of a set are not split and share one rank."""
    apart: Collection[Collection[str]] = ()
    """Sets of tables. No rank holds shards of two tables of a set."""
    forbid_ranks: Collection[int] = ()
    """Ranks that hold no tables."""

    def __post_init__(self) -> None:
        check_kind("pin", self.pin, Mapping)
        for name in self.pin:
            check_kind("a table's name in pin", name, str)
        pin = {name: _ranks(r, f"pin['{name}']") for name, r in self.pin.items()}
        for name, value in (
            ("pin", pin),
            ("forbid_ranks", _ranks(self.forbid_ranks, "forbid_ranks")),
            ("together", _sets(self.together, "together")),
            ("apart", _sets(self.apart, "apart")),
        ):
            object.__setattr__(self, name, value)

    @staticmethod
    def of(given: PlacementConstraints | None) -> PlacementConstraints:
        """Return the given constraints; None: there are none.

        Raises:
            ConfigError: It is something else.
        """
        if given is None:
            return PlacementConstraints()
        check_kind("placement", given, PlacementConstraints)
        return given

    def __bool__(self) -> bool:
        return bool(self.pin or self.together or self.apart or self.forbid_ranks)

    def __hash__(self) -> int:
        return hash((*self.pin.items(), self.together, self.apart, self.forbid_ranks))

    def rules(self, tables: Iterable[str], world_size: int) -> PlacementRules:
        """Return the constraints as rules for a model's tables; the result is cached.

        Args:
            tables: Full names, "module.table", of all tables. The rules number tables
                in this order.
            world_size: Number of ranks.

        Raises:
            ConfigError: A table or rank does not exist, or constraints contradict
                each other.
        """
        return _resolved(self, tuple(tables), world_size)


@functools.lru_cache(maxsize=4)
def _resolved(
    constraints: PlacementConstraints, tables: tuple[str, ...], world_size: int
) -> PlacementRules:
    """Return the rules of a model, resolved once for all callers."""
    if not constraints:
        return PlacementRules(tables, world_size)
    forbidden, by_name = constraints.forbid_ranks, _indices(tables)
    pins = {f"pin['{name}']": ranks for name, ranks in constraints.pin.items()}
    for where, ranks in {**pins, "forbid_ranks": forbidden}.items():
        for rank in ranks:
            if not 0 <= rank < world_size:
                raise ConfigError(
                    f"{where} has rank {rank}, but the {world_size} ranks are 0 to "
                    f"{world_size - 1}"
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
                f"'{tables[table]}'. Allow more ranks for it or for the tables that "
                "it must be apart from"
            )
    return propagated


def _indices(tables: Sequence[str]) -> dict[str, list[int]]:
    """Return key -> the tables it stands for; full names win over bare names."""
    found: dict[str, list[int]] = {}
    for index, table in enumerate(tables):
        path, _, name = table.rpartition(".")
        for key in table_keys(path, name):
            found.setdefault(key, []).append(index)
    return found | {table: [index] for index, table in enumerate(tables)}


def _meant(name: str, where: str, by_name: Mapping[str, list[int]]) -> list[int]:
    """Return all tables that a name stands for."""
    if name not in by_name:
        raise ConfigError(f"{where} {unknown_table('names', name, by_name)}")
    return by_name[name]


def _each(
    names: Iterable[str],
    where: str,
    by_name: Mapping[str, list[int]],
    tables: Sequence[str],
) -> tuple[int, ...]:
    """Return the tables of a set, in which each name stands for one table."""
    for name in names:
        if len(found := _meant(name, where, by_name)) > 1:
            raise ConfigError(
                f"{where} names table '{name}', which several modules have; "
                f"use {quoted(sorted(tables[t] for t in found), ' or ')}"
            )
    return tuple(sorted({by_name[name][0] for name in names}))


def _ranks(value: Any, where: str) -> tuple[int, ...]:
    """Return sorted ranks without repeats."""
    if (
        isinstance(value, (str, bytes))
        or not isinstance(value, Iterable)
        or not all(
            isinstance(r, (int, np.integer)) and not isinstance(r, bool) and r >= 0
            for r in value
        )
    ):
        raise ConfigError(
            f"{where} takes a list of ranks, for example [0, 1]; got {value!r:.60}"
        )
    return tuple(sorted({int(r) for r in value}))


def _sets(value: Any, where: str) -> tuple[tuple[str, ...], ...]:
    """Return sets of table names, each sorted and without repeats."""
    sets = set()
    for names in value if isinstance(value, Iterable) else [value]:
        if (
            isinstance(names, str)
            or not isinstance(names, Iterable)
            or not all(isinstance(n, str) for n in names)
            or len(set(names)) < 2
        ):
            raise ConfigError(
                f"{where} takes sets of at least two tables, for example "
                f"[['a', 'b']]; one set is {names!r:.60}"
            )
        sets.add(tuple(sorted(set(names))))
    return tuple(sorted(sets))
