"""The constraints on a table, found by the keys of `tables.table_keys`.

TorchRec's parts look up constraints by a table's name alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption

from torchrec_neuroshard.tables.table_keys import separator, table_keys


def paths_of(
    module: nn.Module, is_found: Callable[[nn.Module], bool]
) -> dict[nn.Module, list[str]]:
    """Return the modules that are found, and all paths under which a model has each.

    `DistributedModelParallel` shards a module under its first path, and uses the result
    under its other paths as well. Modules inside a found one do not count.

    Args:
        module: The model.
        is_found: Whether a module is one to find.
    """
    found: dict[nn.Module, list[str]] = {}
    queue = [("", module)]
    while queue:
        path, child = queue.pop()
        if is_found(child):
            found.setdefault(child, []).append(path)
            continue
        inner = [*child.named_children()]
        queue += [(f"{path}.{n}" if path else n, m) for n, m in reversed(inner)]
    return found


def constraint_on(
    constraints: Mapping[str, ParameterConstraints], path: str, name: str
) -> ParameterConstraints | None:
    """Return the constraints on a table of a module; None: there are none."""
    found = (constraints[k] for k in table_keys(path, name) if k in constraints)
    return next(found, None)


class ModuleConstraints(dict[str, ParameterConstraints]):
    """Table name -> constraints, for one module at a time. TorchRec's parts read it.

    Attributes:
        given: The constraints on all tables.

    Args:
        given: Key of `table_keys` -> constraints. None: there are none.
    """

    def __init__(self, given: Mapping[str, ParameterConstraints] | None) -> None:
        super().__init__()
        self.given = given or {}

    def enter(self, path: str, names: Iterable[str]) -> None:
        """Switch to the constraints on one module's tables."""
        self.clear()
        for name in names:
            if (constraint := constraint_on(self.given, path, name)) is not None:
                self[name] = constraint

    def parts(self, options: list[ShardingOption]) -> Iterator[list[ShardingOption]]:
        """Yield options module by module, each time switched to that module."""
        if not any(map(separator, self.given)):
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
    """Add bare names, for TorchRec's storage reservations and statistics.

    These parts know no modules. If several keys end in the same name and no key is the
    bare name, the constraints with most ids per sample are used for it.

    Returns:
        The given keys and the bare names they end in; None if there are none.
    """
    if not constraints:
        return None
    found = dict(constraints)
    for key, constraint in constraints.items():
        for mark in re.finditer(r"[./]", key):
            name = key[mark.end() :]
            if name not in constraints:
                rivals = [found.get(name, constraint), constraint]
                found[name] = max(rivals, key=_ids_per_sample)
    return found


def _ids_per_sample(constraint: ParameterConstraints) -> float:
    return float(sum(constraint.pooling_factors))
