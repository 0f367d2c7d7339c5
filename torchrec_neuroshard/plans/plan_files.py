"""Sharding plans as files: kept for the next start, refused where they do not fit.

A plan file is JSON. Beside the plan it holds a fingerprint of what the plan was made
for, so that a restart can tell a plan that still fits from one that is merely no longer
the best (a warning) and from one that cannot be right (an error).

The state of row-wise Adagrad is one value per row *of each shard*: a checkpoint fits
only the column splits it was written under. A job that goes on from a checkpoint should
therefore take its stored plan instead of planning again:

    plan = load_plan("plan.json", model=model, planner=planner)
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed import types as torchrec_types
from torchrec.distributed.planner.planners import EmbeddingPlannerBase
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from torchrec_neuroshard import __version__
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import (
    from_fields,
    json_text,
    parse_json,
    read_json,
    to_fields,
    write_whole,
)
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.placement_rules import quoted
from torchrec_neuroshard.planner.checks import unsharded_tables
from torchrec_neuroshard.planner.compat import (
    planner_part,
    sharders_by_type,
    torchrec_version,
)
from torchrec_neuroshard.planner.costs.given_plans import (
    PlanFileError,
    PlanTable,
    check_plan,
    model_tables,
    plan_entries,
    plan_tables,
    table_moves,
)
from torchrec_neuroshard.planner.options.table_reader import TableReader, device_tier
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.planner.topology import ShardingGroup, sharding_group
from torchrec_neuroshard.report import PlanComparison, PlanReport
from torchrec_neuroshard.report.parts import rank_reports
from torchrec_neuroshard.simulator import PHASES, RankCosts

__all__ = [
    "PLAN_SCHEMA_VERSION",
    "PlanFingerprint",
    "PlanMismatchError",
    "StalePlanWarning",
    "StoredPlan",
    "load_plan",
    "read_plan",
    "save_plan",
]

PLAN_SCHEMA_VERSION = 1
"""Version of the file's layout; files of a later one are refused."""

_FORMAT = "torchrec_neuroshard.plan"
_MUST_BE_EQUAL = ("unsharded", "world_size", "local_world_size", "compute_device")
_MAY_DIFFER = (
    "memory_bytes",
    "sharding_group",
    "batch_size",
    "cost_model",
    "pipeline_type",
)
_NOT_STORED = ("sharding_spec", "stats")
"""Fields left out: shards are stored in a form of their own, and access statistics
are an object of the user's that only planners read."""
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
"""Types of settings that a table's sharding may carry."""
_WAY_OUT = "Name a file that save_plan or neuroshard plan --out wrote, or plan anew"


class PlanMismatchError(PlanFileError):
    """A sound plan file that was made for other tables, ranks or devices."""


class StalePlanWarning(UserWarning):
    """A plan that still works was made under other circumstances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFingerprint:
    """The job that a plan was made for."""

    tables: tuple[PlanTable, ...]
    """Of the modules that the plan shards, sorted."""
    unsharded: tuple[str, ...] = ()
    """Tables of the model that the plan leaves alone."""
    world_size: int
    local_world_size: int
    compute_device: str
    memory_bytes: tuple[int, ...]
    """Memory of each rank that fused tables live in."""
    host_memory_bytes: tuple[int, ...] | None = None
    """Host memory of each rank. None: unknown, or the ranks run on the host."""
    sharding_group: ShardingGroup | None = None
    """The sharding group that the ranks form. None: they are all ranks, or unknown."""
    batch_size: int | None = None
    """Samples per rank; None: not known."""
    cost_model: str | None = None
    """Its name; None: not known, or planned without one."""
    hardware: str | None = None
    """What the cost model predicts."""
    pipeline_type: str | None = None
    """Of the training loop, "none" for a plain one; None: not known."""
    pooling_factors: Mapping[str, float] | None = None
    """Full name of a table -> ids that a sample looks up in it; None: not known."""
    batch_sizes: Mapping[str, tuple[float, ...]] | None = None
    """Full table name -> samples per rank of each feature, for tables whose features
    have batch sizes of their own. None: no table has, or unknown."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Package -> version."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "host_memory_bytes"):
            sizes = getattr(self, name)
            if sizes is not None and len(sizes) != self.world_size:
                raise ValueError(f"{name} has {len(sizes)} values, not one per rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan:
    """The contents of a plan file."""

    plan: ShardingPlan
    fingerprint: PlanFingerprint
    shown: Mapping[str, Any] | None
    """The planner's report; None: not known when the plan was stored."""

    @property
    def made_for(self) -> str:
        """What the plan was made for, in a sentence without a full stop."""
        made = self.fingerprint
        batch = "not said" if made.batch_size is None else f"{made.batch_size:,}"
        return (
            f"made for {made.world_size} ranks, {made.local_world_size} per node "
            f"({made.compute_device}); samples per rank: {batch}; cost model: "
            f"{made.cost_model or 'not known'} ({made.hardware or 'not known'}); by "
            f"torchrec_neuroshard {made.versions.get('torchrec_neuroshard', '?')}, "
            f"torchrec {made.versions.get('torchrec', '?')}"
        )

    def report(self) -> PlanReport:
        """Return the report that is stored with the plan; predicts nothing.

        Raises:
            PlanFileError: The report is damaged.
        """
        made = self.fingerprint
        if self.shown is None:
            tables = plan_tables(self.plan, made.tables, made.world_size)
            costs = [RankCosts(*[0.0] * len(PHASES))] * made.world_size
            return PlanReport(
                critical_path_ms=math.nan,
                lower_bound_ms=0.0,
                uncertainty=0.0,
                compute_source="not known",
                comms_source="not known",
                search_seconds=0.0,
                num_evaluated=0,
                num_tables=len(tables),
                ranks=rank_reports(tables, costs, made.memory_bytes),
                splits=(),
                tables=tuple(sorted(tables, key=lambda t: -t.used_bytes)),
                fallback=None,
                notes=(
                    Note(
                        "stored",
                        "what the plan costs was not known when it was stored; memory "
                        "is that of the weights alone",
                    ),
                ),
            )
        try:
            report = from_fields(PlanReport, self.shown)
            if len(report.ranks) != made.world_size:
                raise ValueError(f"{len(report.ranks)} ranks, not {made.world_size}")
        except (TypeError, ValueError) as error:
            raise PlanFileError(
                f"the report stored with the plan is damaged: {error}. Store it again"
            ) from error
        return report

    def compared_to(self, other: StoredPlan, names: tuple[str, str]) -> PlanComparison:
        """Compare with another stored plan: which tables moved, and what that saves.

        Args:
            other: The second plan.
            names: What the comparison calls this one and the other.

        Raises:
            PlanFileError: The plans are of other tables.
        """
        first, second = self.fingerprint, other.fingerprint
        if first.tables != second.tables:
            odd = sorted(t.full_name for t in {*first.tables} ^ {*second.tables})
            raise PlanFileError(
                f"'{names[0]}' and '{names[1]}' are plans of other tables: '{odd[0]}' "
                "is not the same in both. Compare plans of one model"
            )
        fields = ("world_size", "batch_size", "cost_model", "hardware", "pipeline_type")
        notes = [
            f"{field} differs ({_show(a)}, {_show(b)}): the costs do not compare"
            for field in fields
            if (a := getattr(first, field)) != (b := getattr(second, field))
        ]
        ids, other_ids = (f.pooling_factors or {} for f in (first, second))
        if odd := [t for t, n in ids.items() if other_ids.get(t, n) != n]:
            notes.append(
                f"ids per sample differ for {quoted(odd)}: the costs do not compare"
            )
        return PlanComparison(
            first_name=names[0],
            first=self.report(),
            second_name=names[1],
            second=other.report(),
            moves=table_moves(
                self.plan,
                other.plan,
                first.tables,
                (first.world_size, second.world_size),
            ),
            notes=tuple(Note("comparison", text) for text in notes),
        )


def _made_for(
    plan: ShardingPlan,
    model: nn.Module,
    planner: EmbeddingPlannerBase | None,
    topology: Topology | None,
    batch_size: int | None,
) -> PlanFingerprint:
    """Describe the job that a plan is stored or wanted for.

    Raises:
        ConfigError: Neither a planner nor a topology is given, or both are.
    """
    known: dict[str, Any] = {}
    tables, unsharded = model_tables(plan.plan, model)
    if planner is not None:
        if topology is not None or batch_size is not None:
            raise ConfigError(
                "pass either planner or topology and batch_size: a planner has its own"
            )
        topology = planner_part(planner, "topology")
        batch_size = planner_part(planner, "batch_size")
        known = _inputs(planner, tables, batch_size)
    if topology is None:
        raise ConfigError(
            "a plan belongs to its ranks: pass the planner or the topology"
        )
    tier = device_tier(topology)
    storages = [device.storage for device in topology.devices]
    return PlanFingerprint(
        tables=tables,
        unsharded=unsharded,
        world_size=int(topology.world_size),
        local_world_size=int(topology.local_world_size),
        compute_device=str(topology.compute_device),
        memory_bytes=tuple(int(getattr(s, tier)) for s in storages),
        host_memory_bytes=None
        if tier == "ddr"
        else tuple(int(s.ddr) for s in storages),
        sharding_group=sharding_group(topology),
        batch_size=batch_size,
        versions={
            "torchrec_neuroshard": __version__,
            "torchrec": torchrec_version(),
        },
        **known,
    )


def _inputs(
    planner: EmbeddingPlannerBase, tables: Sequence[PlanTable], batch_size: int | None
) -> dict[str, Any]:
    """Return what a planner knows of costs and inputs, as a fingerprint has it."""
    known: dict[str, Any] = {}
    if isinstance(planner, NeuroShardPlanner):
        costs, reader = planner.costs, planner.costs.reader
        known = {
            "cost_model": costs.cost_model.name,
            "hardware": costs.cost_model.hardware,
            "pipeline_type": costs.schedule.name,
        }
    else:
        reader = TableReader(
            planner_part(planner, "topology"), planner_part(planner, "constraints")
        )
    sizes = {t.full_name: reader.batch_sizes(t.name) for t in tables}
    return known | {
        "pooling_factors": {
            t.full_name: reader.pooling_factor(t.name, t.feature_names, batch_size)
            for t in tables
        },
        "batch_sizes": {name: each for name, each in sizes.items() if each} or None,
    }


def _forbidden(
    plan: ShardingPlan, planner: EmbeddingPlannerBase, world_size: int
) -> Iterator[str]:
    """Say which tables of a plan break a planner's constraints."""
    constraints = planner_part(planner, "constraints") or {}
    ranks = {}
    for path, name, sharding in plan_entries(plan):
        full_name = f"{path}.{name}" if path else name
        ranks[full_name] = sharding.ranks
        asked = constraints.get(name) or ParameterConstraints()
        for field, allowed, found in (
            ("sharding_types", asked.sharding_types, sharding.sharding_type),
            ("compute_kernels", asked.compute_kernels, sharding.compute_kernel),
        ):
            if allowed and found not in allowed:
                yield _mismatch(
                    f"{field} of table '{full_name}'", tuple(allowed), found
                )
    if isinstance(planner, NeuroShardPlanner):
        rules = planner.placement_constraints.rules(ranks, world_size)
        held = {rules.index[name]: found for name, found in ranks.items()}
        if rules and (violation := rules.violation(held)):
            yield f"placement: {violation}"


def save_plan(
    plan: ShardingPlan,
    path: str | Path,
    *,
    model: nn.Module,
    planner: EmbeddingPlannerBase | None = None,
    topology: Topology | None = None,
    batch_size: int | None = None,
) -> None:
    """Write a plan and what it was made for; call it on one rank.

    Everything that `DistributedModelParallel` reads of a plan is stored.

    Args:
        plan: What a planner returned.
        path: The file; it is replaced whole or not at all.
        model: The model, as it was before `DistributedModelParallel` took it.
        planner: The planner, TorchRec's or this package's; in place of the next two.
            What its last plan costs is stored with that plan.
        topology: The ranks that the plan is for.
        batch_size: Samples per rank. None: not known.

    Raises:
        ConfigError: Neither a planner nor a topology is given, or both are.
        PlanFileError: The plan does not belong to the model, or holds settings that
            cannot be stored.
    """
    fingerprint = _made_for(plan, model, planner, topology, batch_size)
    check_plan(plan, fingerprint.tables, fingerprint.world_size)
    shown = None
    if isinstance(planner, NeuroShardPlanner) and plan == planner.last_plan:
        known = planner.last_known
        shown = None if known is None else to_fields(known.report())
    data = {
        "format": _FORMAT,
        "schema": PLAN_SCHEMA_VERSION,
        "fingerprint": to_fields(fingerprint),
        "plan": {
            module_path: {
                name: _encode_sharding(f"{module_path}.{name}", sharding)
                for name, sharding in module_plan.items()
            }
            for module_path, module_plan in plan.plan.items()
        },
        "report": shown,
    }
    text = json_text(data)
    try:
        parse_json(text)
    except ValueError as error:
        raise PlanFileError(f"the plan cannot be stored: {error}") from error
    write_whole(path, text)


def load_plan(
    path: str | Path,
    *,
    model: nn.Module,
    planner: EmbeddingPlannerBase | None = None,
    topology: Topology | None = None,
    batch_size: int | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
) -> ShardingPlan:
    """Read a plan that `save_plan` wrote, if it fits this job.

    A restarted job takes it in place of planning:

        plan = load_plan("plan.json", model=model, planner=planner)
        model = DistributedModelParallel(model, plan=plan, ...)

    Args:
        path: The file.
        model: The model, not yet in `DistributedModelParallel`.
        planner: The planner that would plan; in place of the next two. One of this
            package reports on the plan afterwards, by the costs that it knows now.
        topology: The ranks to run on.
        batch_size: Samples per rank. None: not compared.
        sharders: Of the model. None: those that the planner last planned with, if any.

    Returns:
        The plan, equal to the one stored.

    Raises:
        ConfigError: Neither a planner nor a topology is given, or both are.
        PlanMismatchError: Tables, ranks or devices are not those of the plan, the
            planner's constraints forbid it, or no sharder takes its modules.
        PlanFileError: The file is missing, damaged, or of a later version.

    Warns:
        UserWarning: Where the sharders are not known, modules that TorchRec's do not
            take.
        StalePlanWarning: Memory, batch size, cost model, pipeline, sharding group or
            TorchRec's release are not those of the plan: it works, but a new one may
            be better.
    """
    stored = read_plan(path)
    current = _made_for(stored.plan, model, planner, topology, batch_size)
    _check_job(stored, current, planner, path)
    if sharders is None and isinstance(planner, NeuroShardPlanner):
        sharders = planner.last_model[1] if planner.last_model else None
    _check_paths(stored.plan, model, sharders, path)
    if isinstance(planner, NeuroShardPlanner):
        planner.adopt(stored.plan, model, sharders)
    return stored.plan


def _check_job(
    stored: StoredPlan,
    current: PlanFingerprint,
    planner: EmbeddingPlannerBase | None,
    path: str | Path,
) -> None:
    """Refuse a plan that cannot be right; warn of one that may not be the best."""
    if found := "; ".join(_invalid(stored.fingerprint, current)):
        raise PlanMismatchError(
            f"plan file '{path}' was made for another job: {found}. Plan anew, or "
            "start the job that the plan belongs to"
        )
    forbidden: Iterable[str] = ()
    if planner is not None:
        forbidden = _forbidden(stored.plan, planner, current.world_size)
    if found := "; ".join(forbidden):
        raise PlanMismatchError(
            f"plan file '{path}' holds what the planner's constraints forbid: "
            f"{found}. Plan anew, or change the constraints"
        )
    if found := "; ".join(_stale(stored.fingerprint, current)):
        warnings.warn(
            f"plan file '{path}' still works, but was made under other "
            f"circumstances: {found}. A new plan may be faster",
            StalePlanWarning,
            stacklevel=3,
        )


def _check_paths(
    plan: ShardingPlan,
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]] | None,
    path: str | Path,
) -> None:
    """Refuse a plan of modules around those that are sharded; warn where unsure."""
    taken = sharders_by_type(sharders or get_default_sharders())
    inside = unsharded_tables(model, [])
    for name in plan.plan:
        module = model.get_submodule(name)
        if name in inside or sharder_name(type(module)) in taken:
            continue
        found = [p for p in inside if not name or p.startswith(f"{name}.")]
        text = (
            f"plan file '{path}' shards module '{name}', a {type(module).__name__}, "
            f"which no sharder is for; the tables are in {quoted(sorted(found))}. Plan "
            "this model itself, such as by neuroshard plan package.module:function"
        )
        if sharders is not None:
            raise PlanMismatchError(text)
        warnings.warn(f"{text}, or pass the sharders", stacklevel=3)


def read_plan(path: str | Path) -> StoredPlan:
    """Read a plan file, whatever job it was made for.

    Raises:
        PlanFileError: The file is missing, damaged, or of a later version.
    """
    try:
        data = read_json(path)
    except OSError as error:
        raise PlanFileError(
            f"cannot read the plan file '{path}': {error.strerror}. Plan anew and "
            "store the result with save_plan"
        ) from error
    except ValueError as error:
        raise PlanFileError(
            f"'{path}' is not a plan file, or is damaged: it is not JSON "
            f"({error!s:.500}). {_WAY_OUT}"
        ) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise PlanFileError(
            f"'{path}' is not a plan file: its format is not '{_FORMAT}'. {_WAY_OUT}"
        )
    schema = data.get("schema")
    if schema != PLAN_SCHEMA_VERSION:
        raise PlanFileError(
            f"plan file '{path}' has schema {schema!r}, this version reads "
            f"{PLAN_SCHEMA_VERSION}. Use the torchrec_neuroshard that wrote it, or "
            "plan anew"
        )
    try:
        fields = {f.name for f in dataclasses.fields(PlanFingerprint)}
        made_for = {k: v for k, v in data["fingerprint"].items() if k in fields}
        fingerprint = from_fields(PlanFingerprint, made_for)
        plan = ShardingPlan(
            {
                module_path: EmbeddingModuleShardingPlan(
                    {name: _decode_sharding(entry) for name, entry in tables.items()}
                )
                for module_path, tables in data["plan"].items()
            }
        )
        check_plan(plan, fingerprint.tables, fingerprint.world_size)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, PlanFileError) else repr(error)
        raise PlanFileError(
            f"plan file '{path}' is damaged: {reason!s:.500}. {_WAY_OUT}"
        ) from error
    return StoredPlan(plan=plan, fingerprint=fingerprint, shown=data.get("report"))


def _invalid(stored: PlanFingerprint, current: PlanFingerprint) -> Iterator[str]:
    """Differences that make a plan wrong."""
    theirs = {t.full_name: t for t in stored.tables}
    ours = {t.full_name: t for t in current.tables}
    for name in sorted(theirs.keys() | ours.keys()):
        if name in theirs and name in ours:
            fields = [f.name for f in dataclasses.fields(PlanTable)]
            of = f" of table '{name}'"
            yield from _differences(ours[name], theirs[name], fields, of)
        else:
            here, there = (
                "a table" if name in known else "no such table"
                for known in (ours, theirs)
            )
            yield _mismatch(f"table '{name}'", here, there)
    yield from _differences(current, stored, _MUST_BE_EQUAL)


def _stale(stored: PlanFingerprint, current: PlanFingerprint) -> Iterator[str]:
    """Differences under which another plan may be better."""
    yield from _differences(current, stored, _MAY_DIFFER)
    a, b = (f.versions.get("torchrec", "none") for f in (current, stored))
    if a != b:
        yield _mismatch("version of torchrec", a, b)


def _differences(
    expected: Any, found: Any, fields: Iterable[str], of: str = ""
) -> Iterator[str]:
    """Name the fields that differ, of those that both know."""
    for field in fields:
        a, b = getattr(expected, field), getattr(found, field)
        if a != b and a is not None and b is not None:
            yield _mismatch(f"{field}{of}", a, b)


def _mismatch(field: str, expected: Any, found: Any) -> str:
    return f"{field}: expected {_show(expected)}, found {_show(found)}"


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, tuple):
        return str(value)
    if len(value) > 1 and len(set(value)) == 1:
        return f"{len(value)} x {value[0]}"
    return ", ".join(map(str, value)) or "none"


def _encode_sharding(where: str, sharding: ParameterSharding) -> dict[str, Any]:
    spec = sharding.sharding_spec
    if spec is not None and not isinstance(spec, EnumerableShardingSpec):
        raise PlanFileError(
            f"table '{where}': only shards listed one by one can be stored, not "
            f"{type(spec).__name__}"
        )
    shards = None
    if spec is not None:
        shards = [
            {
                "offset": list(meta.shard_offsets),
                "size": list(meta.shard_sizes),
                "placement": None if meta.placement is None else str(meta.placement),
            }
            for meta in spec.shards
        ]
    try:
        return _fields(sharding) | {"shards": shards}
    except PlanFileError as error:
        raise PlanFileError(f"table '{where}': {error}") from None


def _encode(value: Any) -> Any:
    """Turn a setting of a table into JSON, with the type's name where it has one."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encode(v) for v in value]
    name = type(value).__name__
    if isinstance(value, Enum) and name in _SETTING_TYPES:
        return {"enum": name, "member": value.name}
    if name in _SETTING_TYPES:
        return {"record": name, "fields": _fields(value)}
    if isinstance(value, tuple):
        return {"tuple": [_encode(v) for v in value]}
    raise PlanFileError(f"a setting of type {name} cannot be stored: {value!r}")


def _fields(value: Any) -> dict[str, Any]:
    """Encode the fields of a dataclass or named tuple."""
    names = getattr(value, "_fields", None) or [
        field.name for field in dataclasses.fields(value)
    ]
    return {n: _encode(getattr(value, n)) for n in names if n not in _NOT_STORED}


def _decode_sharding(data: Mapping[str, Any]) -> ParameterSharding:
    values = dict(data)
    shards = values.pop("shards")
    known = {f.name for f in dataclasses.fields(ParameterSharding)}
    for name in sorted(values.keys() - known):
        # A setting left at None changes nothing, so this TorchRec may lack it.
        if values.pop(name) is not None:
            raise PlanFileError(f"this TorchRec knows no setting '{name}'")
    spec = None
    if shards is not None:
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[int(v) for v in shard["offset"]],
                    shard_sizes=[int(v) for v in shard["size"]],
                    placement=shard["placement"],
                )
                for shard in shards
            ]
        )
    decoded = {name: _decode(value) for name, value in values.items()}
    return ParameterSharding(**decoded, sharding_spec=spec)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_decode(v) for v in value["tuple"])
    name = value["enum"] if "enum" in value else value["record"]
    if name not in _SETTING_TYPES:
        raise PlanFileError(f"this TorchRec knows no setting of type '{name}'")
    kind = _SETTING_TYPES[name]
    if "enum" in value:
        return kind[value["member"]]
    return kind(**{name: _decode(v) for name, v in value["fields"].items()})
