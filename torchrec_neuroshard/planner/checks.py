"""Checks of what a caller says about tables and inputs.

What cannot be planned with is an error. A name that nothing has is a note: planning
goes on as TorchRec's would.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_neuroshard.costs.placement_rules import quoted
from torchrec_neuroshard.costs.schedules import PREFETCHING
from torchrec_neuroshard.errors import ConfigError, ProfileError, suggestion
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.compat import sharders_by_type
from torchrec_neuroshard.planner.option_facts import (
    OFFLOADED_KERNELS,
    TABLE_MODULES,
    table_configs,
)
from torchrec_neuroshard.planner.table_keys import table_keys, unknown_table
from torchrec_neuroshard.tables.profile import FeatureProfile

__all__ = [
    "KNOWN_VALUES",
    "check_constraints",
    "check_kind",
    "check_profiles",
    "table_paths",
    "unmatched_constraints",
    "unsharded_notes",
    "unsharded_tables",
]

KNOWN_VALUES: Mapping[str, Collection[str]] = {
    "sharding_types": [t.value for t in ShardingType],
    "compute_kernels": [k.value for k in EmbeddingComputeKernel],
}
"""Field of TorchRec's constraints -> the values that it may list."""
_NUMBERS = ("pooling_factors", "num_poolings", "batch_sizes")
"""Fields that list a number for each feature."""

_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING.value


def check_kind(name: str, given: Any, kind: type) -> None:
    """Check the type of something given that is read much later.

    Raises:
        ConfigError: It is of another.
    """
    if not isinstance(given, kind):
        raise ConfigError(
            f"{name} is a {type(given).__name__}, {given!r:.60}: pass a "
            f"{kind.__module__}.{kind.__name__}"
        )


def check_constraints(
    constraints: Mapping[str, ParameterConstraints], *, prefetches: bool = False
) -> None:
    """Check what constraints say of features and of rows in the host's memory.

    Args:
        constraints: By table.
        prefetches: Whether the pipeline loads caches ahead of lookups.

    Raises:
        ConfigError: A number that is not finite or below 0, something else where a
            list should be, rows that must be on the device and may only be in the
            host's memory, a cache that must not be loaded ahead though it is, or no
            constraints at all.
    """
    for name, constraint in constraints.items():
        where = f"constraints of table '{name}'"
        check_kind(where, constraint, ParameterConstraints)
        for field in (*_NUMBERS, *KNOWN_VALUES):
            values = getattr(constraint, field)
            if isinstance(values, str | float | int):
                raise ConfigError(
                    f"{where}: {field} is {values!r}, not a list; give [{values!r}]"
                )
            for value in values or () if field in _NUMBERS else ():
                if not 0 <= value < math.inf:  # nan is neither
                    raise ConfigError(
                        f"{where}: {field} has {value}; give finite numbers of at "
                        "least 0, or leave the list out"
                    )
        kernels, params = set(constraint.compute_kernels or ()), constraint.cache_params
        if constraint.enforce_hbm and kernels and kernels <= OFFLOADED_KERNELS:
            raise ConfigError(
                f"{where}: enforce_hbm is True, and compute_kernels leaves "
                f"{', '.join(sorted(kernels))}, whose rows are in the host's memory; "
                "allow 'fused', or leave enforce_hbm out"
            )
        if not prefetches or params is None or (kernels and _CACHING not in kernels):
            continue
        is_lfu = params.algorithm is not None and params.algorithm.name == "LFU"
        if is_lfu or params.prefetch_pipeline is False:
            raise ConfigError(
                f"{where}: cache_params has algorithm LFU or prefetch_pipeline=False, "
                f"and {PREFETCHING} loads caches ahead, which FBGEMM does by LRU "
                "alone; leave one of them out"
            )


def table_paths(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> list[tuple[str, BaseEmbeddingConfig]]:
    """Return module path, as constraints name it, and configuration of all tables.

    Raises:
        ConfigError: Something given is no sharder.
    """
    return [
        (path, config)
        for path, child, _ in _table_modules(module, sharders)
        for config in table_configs(child)
    ]


def unmatched_constraints(
    module: nn.Module,
    sharders: Iterable[ModuleSharder[Any]],
    constraints: Mapping[str, ParameterConstraints],
) -> tuple[Note, ...]:
    """Return notes on constraints that do not fit the model's tables.

    TorchRec leaves those of tables that are not there unread, and reads the pooling
    factors of a table with another number of features as their mean.
    """
    features: dict[str, set[int]] = {}
    for path, config in table_paths(module, sharders):
        for key in table_keys(path, config.name):
            features.setdefault(key, set()).add(len(config.feature_names) or 1)
    notes = []
    for name, constraint in constraints.items():
        count = len(constraint.pooling_factors or ())
        if name not in features:
            text = f"constraints {unknown_table('name', name, features)}"
        elif count > 1 and count not in features[name]:
            known = max(features[name])
            text = (
                f"constraints of table '{name}': pooling_factors has {count} values "
                f"for {known} feature{'' if known == 1 else 's'}; each feature is "
                "taken to have their mean. Give one value per feature"
            )
        else:
            continue
        notes.append(Note("constraints", text, name))
    return tuple(notes)


def unsharded_tables(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> dict[str, list[str]]:
    """Return path of a module that no sharder takes, as TorchRec looks -> its tables.

    Raises:
        ConfigError: Something given is no sharder.
    """
    return {
        path: [config.name for config in table_configs(child)]
        for path, child, is_taken in _table_modules(module, sharders)
        if not is_taken
    }


def _table_modules(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield modules with tables, as TorchRec looks: path, module, if sharded."""
    taken = set(sharders_by_type(sharders))
    queue = [("", module)]
    while queue:
        path, child = queue.pop()
        is_taken = sharder_name(type(child)) in taken
        if is_taken or isinstance(child, TABLE_MODULES):
            yield path, child, is_taken
            continue
        inner = child.named_children()
        queue += [(f"{path}.{name}" if path else name, m) for name, m in inner]


def unsharded_notes(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> tuple[Note, ...]:
    """Return notes on tables that TorchRec leaves out of its plans without a word."""
    texts = (
        f"tables {quoted(tables)} are in no plan, and every rank keeps them whole: no "
        f"sharder is for the class of module '{path}', "
        f"{type(module.get_submodule(path)).__name__}; a class derived from one that "
        "is counts as another. Pass a sharder for it"
        for path, tables in sorted(unsharded_tables(module, sharders).items())
    )
    return tuple(Note("unsharded", text) for text in texts)


def check_profiles(module: nn.Module, profiles: Mapping[str, FeatureProfile]) -> None:
    """Check that each profile is one, and of a feature of the model.

    Raises:
        ProfileError: Something else than a profile, or one of a feature that no
            embedding table reads.
    """
    known = {
        feature
        for config in table_configs(module)
        for feature in (config.feature_names or [config.name])
    }
    for name, profile in profiles.items():
        if not isinstance(profile, FeatureProfile):
            raise ProfileError(
                f"profiles['{name}'] is a {type(profile).__name__}, not a "
                "FeatureProfile; profile_inputs(batches) makes the whole dictionary"
            )
        if name not in known:
            raise ProfileError(
                f"profiles holds feature '{name}', which no embedding table reads; "
                f"{suggestion(name, known, 'features')} Leave it out or correct its "
                "name"
            )
