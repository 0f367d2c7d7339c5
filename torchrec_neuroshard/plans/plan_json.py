"""Sharding plans as JSON, with all table settings in TorchRec's plans.

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


def plan_to_json(plan: ShardingPlan) -> dict[str, Any]:
    """Return a plan as JSON data: module path -> table -> its sharding.

    Raises:
        PlanFileError: A setting of a table cannot be stored.
    """
    return {
        path: {
            name: _encode_sharding(f"{path}.{name}".lstrip("."), sharding)
            for name, sharding in tables.items()
        }
        for path, tables in plan.plan.items()
    }


def plan_from_json(data: Mapping[str, Any]) -> ShardingPlan:
    """Return the plan from the data of `plan_to_json`.

    Raises:
        PlanFileError: The installed TorchRec does not know a setting.
        AttributeError, KeyError, TypeError, ValueError: The data is damaged.
    """
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(
                {name: _decode_sharding(entry) for name, entry in tables.items()}
            )
            for path, tables in data.items()
        }
    )


def _encode_sharding(where: str, sharding: ParameterSharding) -> dict[str, Any]:
    spec = sharding.sharding_spec
    shards = spec and [
        {
            "offset": [int(v) for v in meta.shard_offsets],
            "size": [int(v) for v in meta.shard_sizes],
            "placement": None if meta.placement is None else str(meta.placement),
        }
        for meta in spec.shards
    ]
    return _fields(where, sharding) | {"shards": shards}


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


def _decode_sharding(data: Mapping[str, Any]) -> ParameterSharding:
    values = dict(data)
    shards = values.pop("shards")
    metas = [
        ShardMetadata(
            shard_offsets=[int(v) for v in shard["offset"]],
            shard_sizes=[int(v) for v in shard["size"]],
            placement=shard["placement"],
        )
        for shard in shards or ()
    ]
    return ParameterSharding(
        **_decode_fields(ParameterSharding, values),
        sharding_spec=None if shards is None else EnumerableShardingSpec(metas),
    )


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
    """Return the fields of a dataclass or named tuple from the data of `_fields`."""
    for name in sorted(values.keys() - {*_field_names(kind)}):
        # A setting of None has no effect, so this TorchRec may lack it.
        if values[name] is not None:
            raise PlanFileError(f"this TorchRec release has no setting '{name}'")
    return {n: _decode(values[n]) for n in _field_names(kind) if n in values}
