"""TorchRec's plans for plan files and from them, with all settings of their tables.

A setting of a TorchRec type is stored with the type's name. Only the types listed here
are read back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
from torchrec.distributed import types as torchrec_types
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from torchrec_neuroshard.errors import PlanFileError
from torchrec_neuroshard.planner.given_plans import check_plan
from torchrec_neuroshard.plans.stored_plan import StoredPlan, refusing_damage
from torchrec_neuroshard.report.plan_tables import Shardings, TableSharding, full_name

_NOT_STORED = ("sharding_spec", "stats")
"""Fields of a table's sharding that are not stored as settings. Shards have their own
form, and access statistics are a user's object that only planners read."""
_SETTING_TYPES: Mapping[str, Any] = {
    name: getattr(torchrec_types, name)
    for name in (
        "BoundsCheckMode",
        "CacheAlgorithm",
        "CacheParams",
        "DataType",
        "KVZCHTBEConfig",
        "KeyValueParams",
        "MultiPassPrefetchConfig",
        "TBEStatsReporterConfig",
    )
}
"""Types of settings in a table's sharding."""
_ALWAYS = ("sharding_type", "compute_kernel", "ranks")
"""Settings that every `TableSharding` has."""


def stored_shardings(plan: ShardingPlan) -> Shardings:
    """Return a plan as plan files store it.

    Raises:
        PlanFileError: A setting of a table cannot be stored.
    """
    return {
        path: {
            name: dataclasses.replace(
                TableSharding.of(sharding),
                settings=_settings(full_name(path, name), sharding),
            )
            for name, sharding in tables.items()
        }
        for path, tables in plan.plan.items()
    }


def torchrec_plan(stored: StoredPlan) -> ShardingPlan:
    """Return TorchRec's plan from the contents of a plan file.

    Raises:
        PlanFileError: The installed TorchRec does not know a setting or a kernel, or a
            setting is damaged.
    """
    made = stored.fingerprint
    with refusing_damage(stored.path):
        plan = ShardingPlan(
            {
                path: EmbeddingModuleShardingPlan(
                    {name: _sharding(entry) for name, entry in tables.items()}
                )
                for path, tables in stored.shardings.items()
            }
        )
        check_plan(plan, made.tables, made.world_size)
    return plan


def _settings(where: str, sharding: ParameterSharding) -> dict[str, Any]:
    """Return the settings of a table as JSON data, without those that all have."""
    found = _fields(where, sharding)
    return {name: value for name, value in found.items() if name not in _ALWAYS}


def _sharding(entry: TableSharding) -> ParameterSharding:
    metas = [
        ShardMetadata(
            shard_offsets=[box.top, box.left],
            shard_sizes=[box.bottom - box.top, box.width],
            placement=placement,
        )
        for box, placement in zip(entry.boxes or (), entry.placements, strict=True)
    ]
    return ParameterSharding(
        sharding_type=entry.sharding_type,
        compute_kernel=entry.compute_kernel,
        ranks=None if entry.ranks is None else [*entry.ranks],
        sharding_spec=None if entry.boxes is None else EnumerableShardingSpec(metas),
        **_decode_fields(ParameterSharding, entry.settings),
    )


def _encode(where: str, value: Any) -> Any:
    """Return a table's setting as JSON data, with its type's name if it is listed.

    Types are compared exactly: an `IntEnum` is an int, and a named tuple a tuple, but
    they must not come back as such.
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind, name = type(value), type(value).__name__
    if value is None or kind in (bool, int, str):
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is list:
        return [_encode(where, v) for v in value]
    if kind in (tuple, frozenset):
        parts = sorted(value) if kind is frozenset else value
        return {name: [_encode(where, v) for v in parts]}
    if kind is _SETTING_TYPES.get(name):
        if isinstance(value, Enum):
            return {"enum": name, "member": value.name}
        return {"record": name, "fields": _fields(where, value)}
    raise PlanFileError(
        f"table '{where}': a setting of type {name} cannot be stored: {value!r}"
    )


def _fields(where: str, value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or named tuple as JSON data."""
    return {
        n: _encode(where, getattr(value, n))
        for n in _field_names(value)
        if n not in _NOT_STORED
    }


def _field_names(value: Any) -> Sequence[str]:
    """Return the field names of a dataclass or named tuple."""
    found: Sequence[str] | None = getattr(value, "_fields", None)
    return found or [field.name for field in dataclasses.fields(value)]


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    for sequence in (tuple, frozenset):
        if sequence.__name__ in value:
            return sequence(_decode(v) for v in value[sequence.__name__])
    name = value["enum"] if "enum" in value else value["record"]
    if name not in _SETTING_TYPES:
        raise PlanFileError(f"this TorchRec release has no setting of type '{name}'")
    kind = _SETTING_TYPES[name]
    if "enum" in value:
        return kind[value["member"]]
    return kind(**_decode_fields(kind, value["fields"]))


def _decode_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass or named tuple from the data of `_fields`.

    Raises:
        PlanFileError: The installed TorchRec does not know a field.
    """
    for name in sorted(values.keys() - {*_field_names(kind)}):
        # A setting of None has no effect, so this TorchRec may lack it.
        if values[name] is not None:
            raise PlanFileError(f"this TorchRec release has no setting '{name}'")
    return {n: _decode(values[n]) for n in _field_names(kind) if n in values}
