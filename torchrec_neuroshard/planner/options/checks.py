"""Checks of what a caller says about tables and inputs.

What cannot be planned with is an error. A name that nothing has is a note: planning
goes on as TorchRec's would.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import CommOp, ModuleSharder, ShardingType

from torchrec_neuroshard.errors import ConfigError, ProfileError, suggestion
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.placement_rules import quoted
from torchrec_neuroshard.planner.compat import (
    can_remove_repeats,
    codec_registry,
    removes_repeats,
    sharder_params,
    sharders_by_type,
)
from torchrec_neuroshard.planner.options.table_reader import (
    OFFLOADED_KERNELS,
    TABLE_MODULES,
    table_configs,
)
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.schedules import PREFETCHING

__all__ = [
    "KNOWN_VALUES",
    "check_batch_size",
    "check_constraints",
    "check_kind",
    "check_profiles",
    "check_sharders",
    "unmatched_constraints",
    "unsharded_notes",
    "unsharded_tables",
]

KNOWN_VALUES: Mapping[str, Collection[str]] = {
    "sharding_types": [t.value for t in ShardingType],
    "compute_kernels": [k.value for k in EmbeddingComputeKernel],
}
"""Field of TorchRec's constraints -> the values that it may list."""

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


def check_batch_size(batch_size: Any) -> None:
    """Check that a batch size is a number of samples; None is TorchRec's default.

    Raises:
        ConfigError: It is not.
    """
    if batch_size is None:
        return
    number = isinstance(batch_size, numbers.Real) and not isinstance(batch_size, bool)
    if not number or not 0 <= batch_size < math.inf:
        raise ConfigError(
            "batch_size is the number of samples per rank, such as 512; got "
            f"{batch_size!r}"
        )


def check_constraints(
    constraints: Mapping[str, ParameterConstraints], *, prefetches: bool = False
) -> None:
    """Check what constraints say of features and of caches of rows.

    Args:
        constraints: By table.
        prefetches: Whether the pipeline loads caches ahead of lookups.

    Raises:
        ConfigError: A number that is not finite or below 0, something else where a
            list should be, two lists of a table that differ in length, a cache that
            FBGEMM cannot run, or no constraints at all.
    """
    for name, constraint in constraints.items():
        where = f"constraints of table '{name}'"
        check_kind(where, constraint, ParameterConstraints)
        for field in ("pooling_factors", "num_poolings", "batch_sizes", *KNOWN_VALUES):
            values = getattr(constraint, field)
            if values is not None and isinstance(values, str | float | int):
                raise ConfigError(
                    f"{where}: {field} is {values!r}, not a list; give [{values!r}]"
                )
        count = len(constraint.pooling_factors or [1.0])
        for field in ("pooling_factors", "num_poolings", "batch_sizes"):
            values = getattr(constraint, field) or []
            if values and len(values) != count:
                raise ConfigError(
                    f"{where}: {field} has {len(values)} values, pooling_factors "
                    f"{count}; give both one value per feature"
                )
            for number, value in enumerate(values):
                if not 0 <= value < math.inf:  # nan is neither
                    raise ConfigError(
                        f"{where}: {field}[{number}] is {value}; give a finite number "
                        "of at least 0, or leave the list out"
                    )
        if (constraint.min_partition or 0) < 0:
            raise ConfigError(
                f"{where}: min_partition is {constraint.min_partition}; give the "
                "columns of the narrowest shard, at least 1, or leave it out"
            )
        _check_cache(where, constraint, prefetches)


def _check_cache(
    where: str, constraint: ParameterConstraints, prefetches: bool
) -> None:
    kernels, params = set(constraint.compute_kernels or ()), constraint.cache_params
    if constraint.enforce_hbm and kernels and kernels <= OFFLOADED_KERNELS:
        raise ConfigError(
            f"{where}: enforce_hbm is True, and compute_kernels leaves "
            f"{', '.join(sorted(kernels))}, whose rows are in the host's memory; allow "
            "'fused', or leave enforce_hbm out"
        )
    if params is None or (kernels and _CACHING not in kernels):
        return
    load = params.load_factor
    # Where other kernels may be, too, there is no way with such a cache.
    if _CACHING in kernels and load is not None and not 0 < load < 1:
        raise ConfigError(
            f"{where}: cache_params.load_factor is {load}; give the share of the rows "
            "that the cache holds, above 0 and below 1, or leave it out for the "
            "search to choose. compute_kernels=['fused'] keeps all rows on the device"
        )
    is_lfu = params.algorithm is not None and params.algorithm.name == "LFU"
    if is_lfu and (params.prefetch_pipeline or prefetches):
        raise ConfigError(
            f"{where}: cache_params has algorithm LFU, and caches are loaded ahead "
            f"(prefetch_pipeline, or {PREFETCHING}), which FBGEMM runs by LRU alone; "
            "leave one of them out"
        )
    if prefetches and params.prefetch_pipeline is False:
        raise ConfigError(
            f"{where}: cache_params.prefetch_pipeline is False, and {PREFETCHING} "
            "prefetches: backward passes could write to the wrong rows; leave it out"
        )


def unmatched_constraints(
    module: nn.Module, constraints: Mapping[str, ParameterConstraints]
) -> tuple[Note, ...]:
    """Return notes on constraints that do not fit the model's tables.

    TorchRec leaves those of tables that are not there unread, and reads the pooling
    factors of a table with another number of features as their mean.
    """
    features: dict[str, set[int]] = {}
    for config in table_configs(module):
        features.setdefault(config.name, set()).add(len(config.feature_names) or 1)
    notes = []
    for name, constraint in constraints.items():
        if name not in features:
            text = (
                f"constraints name table '{name}', which the model does not have; "
                + suggestion(name, features, "tables")
            )
            notes.append(Note("constraints", text, name))
            continue
        count = len(constraint.pooling_factors or ())
        if count > 1 and count not in features[name]:
            (*_, known) = sorted(features[name])
            text = (
                f"constraints of table '{name}': pooling_factors has {count} values "
                f"for {known} feature{'' if known == 1 else 's'}; each feature is "
                "taken to have their mean. Give one value per feature"
            )
            notes.append(Note("constraints", text, name))
    return tuple(notes)


def unsharded_tables(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> dict[str, list[str]]:
    """Return path of a module that no sharder takes, as TorchRec looks -> its tables.

    Raises:
        ConfigError: Something given is no sharder.
    """
    taken, found = set(sharders_by_type(sharders)), {}
    queue = [("", module)]
    while queue:
        path, child = queue.pop()
        if sharder_name(type(child)) in taken:
            continue
        if isinstance(child, TABLE_MODULES):
            found[path] = [config.name for config in table_configs(child)]
            continue
        inner = child.named_children()
        queue += [(f"{path}.{name}" if path else name, m) for name, m in inner]
    return found


def unsharded_notes(
    module: nn.Module, sharders: Iterable[ModuleSharder[Any]]
) -> tuple[Note, ...]:
    """Return notes on tables that TorchRec leaves out of its plans without a word."""
    modules = dict(module.named_modules(remove_duplicate=False))
    texts = (
        f"tables {quoted(tables)} are in no plan, and every rank keeps them whole: no "
        f"sharder is for the class of module '{path}', {type(modules[path]).__name__}; "
        "a class derived from one that is counts as another. Pass a sharder for it"
        for path, tables in sorted(unsharded_tables(module, sharders).items())
    )
    return tuple(Note("unsharded", text) for text in texts)


def check_sharders(sharders: Iterable[ModuleSharder[Any]], compute_device: str) -> None:
    """Check what sharders ask of collectives and ids.

    Args:
        sharders: Of the model's modules.
        compute_device: Of the topology.

    Raises:
        ConfigError: Repeated ids are to be removed where TorchRec does not, a codec is
            none or of no collective, or something is no sharder.
    """
    for sharder in sharders_by_type(sharders).values():
        where, module = type(sharder).__name__, sharder.module_type.__name__
        params = sharder_params({module: sharder})[module]
        if "use_index_dedup" in params or (
            removes_repeats(sharder) and "EmbeddingBag" in module
        ):
            raise ConfigError(
                f"{where}: use_index_dedup is not for {module}s; TorchRec looks "
                "repeated ids up once in EmbeddingCollections alone. Leave it out, or "
                "pass EmbeddingCollectionSharder(use_index_dedup=True) for those"
            )
        on_cpus = compute_device == "cpu"
        if on_cpus and removes_repeats(sharder) and not can_remove_repeats("cpu"):
            raise ConfigError(
                f"{where}(use_index_dedup=True): FBGEMM finds the distinct ids of a "
                "batch on GPUs alone; leave it out, or plan for GPUs"
            )
        for name in codec_registry(sharder):
            if name not in CommOp.__members__:
                raise ConfigError(
                    f"{where}: qcomm_codecs_registry quantises '{name}', which is no "
                    "collective; "
                    + suggestion(str(name), CommOp.__members__, "collectives")
                )


def check_profiles(module: nn.Module, profiles: Mapping[str, FeatureProfile]) -> None:
    """Check that each profile is one, and of a feature of the model.

    Raises:
        ProfileError: Something else than a profile, or one of a feature that no
            embedding table reads.
    """
    for name, profile in profiles.items():
        if not isinstance(profile, FeatureProfile):
            raise ProfileError(
                f"profiles['{name}'] is a {type(profile).__name__}, not a "
                "FeatureProfile; profile_inputs(batches) makes the whole dictionary"
            )
    if not profiles:
        return
    known = {
        feature
        for config in table_configs(module)
        for feature in (config.feature_names or [config.name])
    }
    for name in sorted(set(profiles) - known):
        raise ProfileError(
            f"profiles holds feature '{name}', which no embedding table reads; "
            f"{suggestion(name, known, 'features')} Leave it out or correct its name"
        )
