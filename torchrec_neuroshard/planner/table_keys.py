"""How constraints name tables: by name alone, or by module path and name.

TorchRec's parts look constraints up by a table's name. Here a key may name the module
as well, "path.to.module/table" or "path.to.module.table": it then means that module's
table alone, and goes before the bare name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption

from torchrec_neuroshard.errors import suggestion

__all__ = [
    "ModuleConstraints",
    "constraint_on",
    "table_keys",
    "unknown_table",
    "with_bare_names",
]


def table_keys(path: str, name: str) -> tuple[str, ...]:
    """Return the keys that mean a table, the most exact one first.

    Args:
        path: Of its module, as `named_modules()` has it; "" is the model itself.
        name: Of the table.
    """
    return (f"{path}/{name}", f"{path}.{name}", name) if path else (name,)


def constraint_on(
    constraints: Mapping[str, ParameterConstraints], path: str, name: str
) -> ParameterConstraints | None:
    """Return the constraints on one table of one module; None: there are none."""
    found = (constraints[k] for k in table_keys(path, name) if k in constraints)
    return next(found, None)


def unknown_table(verb: str, key: str, known: Collection[str]) -> str:
    """Say that the model has no table that a key means, and which may be meant.

    Args:
        verb: "name" or "names".
        key: As given.
        known: The keys that there are.
    """
    alike = [other for other in known if _separator(other) == _separator(key)]
    near = suggestion(key, alike or known, "tables")
    return f"{verb} table '{key:.60}', which the model does not have; {near}"


def _separator(key: str) -> str:
    """What stands between the path and the name of a key; "" of a bare name."""
    return next((mark for mark in "/." if mark in key), "")


class ModuleConstraints(dict[str, ParameterConstraints]):
    """Table name -> constraints, of one module at a time: what TorchRec's parts read.

    Attributes:
        given: The constraints on all tables.

    Args:
        given: By the keys of `table_keys`. None: there are none.
    """

    def __init__(self, given: Mapping[str, ParameterConstraints] | None) -> None:
        super().__init__()
        self.given = given or {}

    def enter(self, path: str, names: Iterable[str]) -> None:
        """Hold the constraints on a module's tables, and on no others."""
        self.clear()
        for name in names:
            if (constraint := constraint_on(self.given, path, name)) is not None:
                self[name] = constraint

    def parts(self, options: list[ShardingOption]) -> Iterator[list[ShardingOption]]:
        """Yield parts of the options, and hold the constraints on each meanwhile."""
        if not any(map(_separator, self.given)):
            self.update(self.given)
            yield options
            return
        modules: dict[str, list[ShardingOption]] = {}
        for option in options:
            modules.setdefault(option.path, []).append(option)
        for path, own in modules.items():
            self.enter(path, [option.name for option in own])
            yield own


def with_bare_names(
    constraints: Mapping[str, ParameterConstraints] | None,
) -> dict[str, ParameterConstraints] | None:
    """Add bare names for parts of TorchRec that never learn of modules.

    Storage reservations and statistics are such parts. Where several keys end in one
    name, and none is that name alone, the one with most ids per sample stands for all.

    Returns:
        The keys given, and the names that they end in; None where none were given.
    """
    if not constraints:
        return None
    found = dict(constraints)
    for key, constraint in constraints.items():
        for separator in re.finditer(r"[./]", key):
            name = key[separator.end() :]
            if name not in constraints:
                rivals = [found.get(name, constraint), constraint]
                found[name] = max(rivals, key=_ids_per_sample)
    return found


def _ids_per_sample(constraint: ParameterConstraints) -> float:
    return float(sum(constraint.pooling_factors))
