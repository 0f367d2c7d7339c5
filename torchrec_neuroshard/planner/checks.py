"""Checks of constraints, profiles and sharders against the model.

Values that make planning impossible are errors. Unknown names are notes: planning goes
on, as in TorchRec.
"""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheParams,
    KeyValueParams,
    ModuleSharder,
    ShardingType,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType

from torchrec_neuroshard.costs.placement_rules import quoted
from torchrec_neuroshard.costs.schedules import PREFETCHING
from torchrec_neuroshard.errors import (
    ConfigError,
    ProfileError,
    check_kind,
    is_number,
    suggestion,
)
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.compat import sharders_by_type
from torchrec_neuroshard.planner.option_facts import TABLE_MODULES, table_configs
from torchrec_neuroshard.planner.table_keys import constraint_on, paths_of
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table_keys import table_keys, unknown_table

KNOWN_VALUES: Mapping[str, Collection[str]] = {
    "sharding_types": [t.value for t in ShardingType],
    "compute_kernels": [k.value for k in EmbeddingComputeKernel],
}
"""Field of TorchRec's constraints -> its possible values."""
_NUMBERS = ("pooling_factors", "num_poolings", "batch_sizes")
"""Fields with one number per feature."""
_KINDS: Mapping[str, type] = {
    "cache_params": CacheParams,
    "bounds_check_mode": BoundsCheckMode,
    "output_dtype": DataType,
    "device_group": str,
    "key_value_params": KeyValueParams,
}
"""Field -> the class of its value."""
_FLAGS = ("is_weighted", "enforce_hbm", "stochastic_rounding", "use_virtual_table")
_MAX_BATCH = 2**31 - 1

_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING.value


def check_constraints(
    constraints: Mapping[str, ParameterConstraints], *, prefetches: bool = False
) -> None:
    """Check the values of constraints and their settings for host memory.

    Args:
        constraints: Table -> its constraints.
        prefetches: Whether the pipeline prefetches into caches.

    Raises:
        ConfigError: A field has a value that TorchRec does not know or cannot use, a
            cache's settings contradict prefetching, or a value is not
            `ParameterConstraints`.
    """
    check_kind("constraints", constraints, Mapping)
    for name, constraint in constraints.items():
        check_kind("a table's name in constraints", name, str)
        where = f"constraints of table '{name}'"
        check_kind(where, constraint, ParameterConstraints)
        for fault in _field_faults(constraint):
            raise ConfigError(f"{where}: {fault}")
        kernels, params = set(constraint.compute_kernels or ()), constraint.cache_params
        if not prefetches or params is None or (kernels and _CACHING not in kernels):
            continue
        is_lfu = params.algorithm is not None and params.algorithm.name == "LFU"
        if is_lfu or params.prefetch_pipeline is False:
            raise ConfigError(
                f"{where}: cache_params has algorithm LFU or prefetch_pipeline=False, "
                f"but pipeline_type {PREFETCHING} prefetches into caches, which FBGEMM "
                "supports only with LRU; change one of them"
            )


def _field_faults(constraint: ParameterConstraints) -> Iterator[str]:
    """Yield what is wrong with single fields of a constraint."""
    for field in (*_NUMBERS, *KNOWN_VALUES, "feature_names"):
        values = getattr(constraint, field)
        if isinstance(values, str | float | int):
            yield f"{field} is {values!r}, not a list; pass [{values!r}]"
        elif isinstance(values, Mapping) or (
            values is None and field == "pooling_factors"
        ):
            yield f"{field} is {values!r:.60}; pass a list, or leave it out"
        for value in () if values is None else values:
            if field in _NUMBERS and not _is_amount(value):
                yield (
                    f"{field} has {value!r:.60}; pass finite numbers of at least 0, or "
                    "leave the list out"
                )
            if field in KNOWN_VALUES and value not in KNOWN_VALUES[field]:
                near = suggestion(
                    str(value), KNOWN_VALUES[field], field.replace("_", " ")
                )
                yield f"{field} has {value!r:.60}, which TorchRec does not know; {near}"
    least = constraint.min_partition
    is_whole = is_number(least, whole=True) and _is_count(least)
    if least is not None and not is_whole:
        yield (
            f"min_partition is {least!r:.60}; pass the columns of the narrowest shard, "
            "a whole number of at least 1, or leave it out"
        )
    for field, kind in _KINDS.items():
        value = getattr(constraint, field)
        if value is not None and not isinstance(value, kind):
            yield f"{field} is {value!r:.60}; pass a {kind.__module__}.{kind.__name__}"
    for field in _FLAGS:
        if getattr(constraint, field) not in (None, False, True):
            yield f"{field} is {getattr(constraint, field)!r:.60}; pass True or False"
    params = constraint.cache_params
    load = params.load_factor if isinstance(params, CacheParams) else None
    if load is not None and not _is_amount(load):
        yield f"cache_params has load_factor {load!r:.60}; pass a share of the rows"


def _is_amount(value: Any) -> bool:
    """Whether a value is a finite number of at least 0."""
    try:
        return not isinstance(value, str) and 0 <= float(value) < math.inf
    except (TypeError, ValueError, OverflowError):
        return False


def _is_count(value: Any) -> bool:
    """Whether a value is a whole number of at least 1; True is none."""
    return is_number(value) and _is_amount(value) and value >= 1 and value == int(value)


def check_batch_size(batch_size: Any) -> None:
    """Check the samples per rank.

    Raises:
        ConfigError: It is not a whole number that kernels can count.
    """
    check_kind("batch_size", batch_size, numbers.Real)
    if not _is_count(batch_size) or batch_size > _MAX_BATCH:
        raise ConfigError(
            f"batch_size is {batch_size}: pass the samples per rank, a whole number "
            f"from 1 to {_MAX_BATCH:,}"
        )


def table_paths(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> list[tuple[str, BaseEmbeddingConfig]]:
    """Return module path, as in constraints, and configuration of all tables.

    Raises:
        ConfigError: An item of `sharders` is not a sharder.
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
    """Return up to two notes on constraints that do not match the model's tables.

    TorchRec ignores constraints on unknown tables. If a table has another number of
    features than `pooling_factors` has values, it uses their mean.
    """
    features: dict[str, set[int]] = {}
    for path, config in table_paths(module, sharders):
        for key in table_keys(path, config.name):
            features.setdefault(key, set()).add(len(config.feature_names) or 1)
    unknown = [name for name in constraints if name not in features]
    uneven = [
        name
        for name, constraint in constraints.items()
        if (count := len(constraint.pooling_factors or ())) > 1
        and count not in features.get(name, (count,))
    ]
    notes = []
    if unknown:
        first, *more = unknown
        text = f"constraints {unknown_table('name', first, features)}"
        notes.append(Note.on("constraints", unknown, f"{text}{_also(more)}"))
    if uneven:
        first, *more = uneven
        count, known = len(constraints[first].pooling_factors), max(features[first])
        text = (
            f"constraints of table '{first}': pooling_factors has {count} values for "
            f"{known} feature{'' if known == 1 else 's'}; each feature gets their "
            "mean. Pass one value per feature"
        )
        notes.append(Note.on("constraints", uneven, f"{text}{_also(more)}"))
    return tuple(notes)


def _also(names: Sequence[str]) -> str:
    return f" The same holds for {quoted(names)}." if names else ""


def unsharded_tables(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> dict[str, list[str]]:
    """Return path of each module without a sharder -> its tables.

    Raises:
        ConfigError: An item of `sharders` is not a sharder.
    """
    return {
        path: [config.name for config in table_configs(child)]
        for path, child, is_taken in _table_modules(module, sharders)
        if not is_taken
    }


def _table_modules(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield modules with tables in TorchRec's order: path, module, has a sharder."""
    taken = set(sharders_by_type(sharders))

    def is_taken(child: nn.Module) -> bool:
        return sharder_name(type(child)) in taken

    found = paths_of(module, lambda m: is_taken(m) or isinstance(m, TABLE_MODULES))
    for child, paths in reversed(found.items()):
        yield paths[0], child, is_taken(child)


def unsharded_notes(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> tuple[Note, ...]:
    """Return notes on tables that TorchRec silently leaves out of its plans."""
    paths, tables = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for path, names in sorted(unsharded_tables(module, sharders).items()):
        kind = type(module.get_submodule(path)).__name__
        paths[kind].append(path)
        tables[kind] += names
    texts = (
        f"tables {quoted([*dict.fromkeys(tables[kind])])} are not sharded, and every "
        f"rank keeps a copy: no sharder matches module{'s' * (len(found) > 1)} "
        f"{quoted(found)} of class {kind}. Pass a sharder for exactly this class; a "
        "base class's does not match"
        for kind, found in paths.items()
    )
    return tuple(Note("unsharded", text) for text in texts)


def left_out_notes(
    module: nn.Module,
    sharders: Iterable[ModuleSharder[Any]],
    constraints: Mapping[str, ParameterConstraints],
    compute_device: str,
) -> tuple[Note, ...]:
    """Return notes on tables that constraints keep on other devices.

    TorchRec silently leaves them out of its plans.
    """
    elsewhere: dict[str, list[str]] = {}
    for path, config in table_paths(module, sharders):
        constraint = constraint_on(constraints, path, config.name)
        group = constraint.device_group if constraint else None
        if group and group != compute_device:
            name = f"{path}.{config.name}" if path else config.name
            elsewhere.setdefault(group, []).append(name)
    texts = (
        f"tables {quoted(tables)} are not in the plan: their constraints have "
        f"device_group '{group}', and the plan is for '{compute_device}' devices. "
        "Leave device_group out, or add their entries from a plan for those devices"
        for group, tables in sorted(elsewhere.items())
    )
    return tuple(Note("unsharded", text) for text in texts)


def check_profiles(module: nn.Module, profiles: Mapping[str, FeatureProfile]) -> None:
    """Check that all profiles are `FeatureProfile`s of the model's features.

    Raises:
        ProfileError: A value is not a profile, or no embedding table reads the
            feature.
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
                "FeatureProfile; profile_inputs(batches) returns the whole dictionary"
            )
        if name not in known:
            raise ProfileError(
                f"profiles has feature '{name}', which no embedding table reads; "
                f"{suggestion(name, known, 'features')} Remove it or correct its name"
            )
