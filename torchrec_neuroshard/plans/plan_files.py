"""Plan files: save a sharding plan, and load it in a job that it fits.

A plan file is JSON. Beside the plan it has a fingerprint of the job that the plan was
made for. On loading, a plan that may no longer be the best is a warning, and a plan for
another job is an error.

The state of row-wise Adagrad is one value per row *of each shard*, so a checkpoint only
fits the column splits it was written with. A job that resumes from a checkpoint should
therefore load its plan instead of planning again, or use `reshard`:

    plan = load_plan("plan.json", model=model, planner=planner)
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.planner.planners import EmbeddingPlannerBase
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
)

from torchrec_neuroshard import __version__
from torchrec_neuroshard.costs.placement_rules import quoted
from torchrec_neuroshard.costs.simulator import PHASES, RankCosts
from torchrec_neuroshard.errors import (
    PlanFileError,
    PlanMismatchError,
    StalePlanWarning,
    check_kind,
)
from torchrec_neuroshard.files import (
    check_outputs,
    from_fields,
    json_text,
    parse_json,
    read_json,
    to_fields,
    write_whole,
)
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.checks import unsharded_tables
from torchrec_neuroshard.planner.compat import (
    planner_part,
    sharders_by_type,
    torchrec_version,
)
from torchrec_neuroshard.planner.given_plans import (
    check_plan,
    model_tables,
    planned_once,
)
from torchrec_neuroshard.planner.groups import ShardingGroup, sharding_group
from torchrec_neuroshard.planner.option_facts import device_tier
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.table_keys import constraint_on, paths_of
from torchrec_neuroshard.plans.plan_json import plan_from_json, plan_to_json
from torchrec_neuroshard.report import PlanComparison, PlanReport
from torchrec_neuroshard.report.parts import TableReport, rank_reports
from torchrec_neuroshard.report.plan_tables import (
    PlanTable,
    full_name,
    plan_entries,
    plan_tables,
    table_moves,
)

PLAN_SCHEMA_VERSION = 1
"""Version of the file format. Files of other versions are refused."""

_FORMAT = "torchrec_neuroshard.plan"
_MUST_BE_EQUAL = ("unsharded", "world_size", "local_world_size", "compute_device")
_MAY_DIFFER = (
    "memory_bytes",
    "sharding_group",
    "batch_size",
    "cost_model",
    "pipeline_type",
    "torchrec",
)
_DECIDES_COSTS = ("compute_device", "hardware", "cost_model", "pipeline_type")
_DECIDES_SAMPLES = ("world_size", "batch_size")
_WHERE = ("in the file", "here")
_UNKNOWN = (None, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFingerprint:
    """The job that a plan was made for."""

    tables: tuple[PlanTable, ...]
    """Tables of the modules that the plan shards, sorted."""
    unsharded: tuple[str, ...] = ()
    """Tables of the model that are not in the plan."""
    world_size: int
    local_world_size: int
    compute_device: str
    memory_bytes: tuple[int, ...]
    """Memory of each rank for fused tables."""
    host_memory_bytes: tuple[int, ...] | None = None
    """Host memory of each rank. None: unknown, or the ranks run on the host."""
    sharding_group: ShardingGroup | None = None
    """The sharding group that the ranks form. None: they are all ranks, or unknown."""
    batch_size: int | None = None
    """Samples per rank. None: unknown."""
    cost_model: str | None = None
    """Name of the cost model. None: unknown, or planned without one."""
    hardware: str | None = None
    """The hardware that the cost model predicts."""
    pipeline_type: str | None = None
    """Train pipeline, "none" for a plain loop. None: unknown."""
    pooling_factors: Mapping[str, float] | None = None
    """Full table name -> ids per sample. None: unknown."""
    batch_sizes: Mapping[str, tuple[float, ...]] | None = None
    """Full table name -> samples per rank of each feature, for tables whose features
    have their own batch sizes. None: no table has, or unknown."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Package -> version."""

    @property
    def torchrec(self) -> str:
        """Version of TorchRec; "" if unknown."""
        return self.versions.get("torchrec", "")

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
    """The planner's report as stored. None: the file has none."""

    @property
    def made_for(self) -> str:
        """The job that the plan was made for, as a sentence without a full stop."""
        made = self.fingerprint
        batch = "unknown" if made.batch_size is None else f"{made.batch_size:,}"
        return (
            f"made for {made.world_size} ranks, {made.local_world_size} per node "
            f"({made.compute_device}); samples per rank: {batch}; cost model: "
            f"{made.cost_model or 'unknown'} ({made.hardware or 'unknown'}); by "
            f"torchrec_neuroshard {made.versions.get('torchrec_neuroshard', '?')}, "
            f"torchrec {made.torchrec or '?'}"
        )

    def report(self) -> PlanReport:
        """Return the report stored with the plan, without new predictions.

        If the file has no report that this version can read, costs are NaN, memory
        counts only weights, and a note says so.
        """
        made, num_ranks = self.fingerprint, self.fingerprint.world_size
        tables = plan_tables(self.plan, made.tables, num_ranks)
        try:
            report = from_fields(PlanReport, self.shown)
            is_whole = len(report.ranks) == num_ranks
            if is_whole and _places(report.tables) == _places(tables):
                return report
        except (TypeError, ValueError):
            pass
        costs = [RankCosts(*[0.0] * len(PHASES))] * num_ranks
        text = (
            "the plan file has no costs that this version can read; memory counts only "
            "weights"
        )
        return PlanReport(
            critical_path_ms=math.nan,
            num_tables=len(tables),
            ranks=rank_reports(tables, costs, made.memory_bytes),
            tables=tuple(sorted(tables, key=lambda t: -t.used_bytes)),
            notes=(Note("stored", text),),
        )

    def compared_to(self, other: StoredPlan, names: tuple[str, str]) -> PlanComparison:
        """Compare with another stored plan: moved tables and saved time.

        Args:
            other: The second plan.
            names: Names of this plan and the other in the comparison.

        Raises:
            PlanFileError: The plans are of different tables.
        """
        made = first, second = self.fingerprint, other.fingerprint
        if first.tables != second.tables:
            odd = min(t.full_name for t in {*first.tables} ^ {*second.tables})
            raise PlanFileError(
                f"'{names[0]}' and '{names[1]}' are plans of different tables: "
                f"'{odd}' is not the same in both. Compare plans of the same model"
            )
        where = f"in '{names[0]}'", f"in '{names[1]}'"
        obstacles = [*_differences(first, second, _DECIDES_COSTS, where)]
        ids, other_ids = (m.pooling_factors or {} for m in made)
        if odd_ids := [t for t, n in ids.items() if other_ids.get(t, n) != n]:
            obstacles.append(f"ids per sample differ for {quoted(odd_ids)}")
        reports = a, b = self.report(), other.report()
        dense_ms = [r.schedule.dense_ms if r.schedule else 0.0 for r in reports]
        if dense_ms[0] != dense_ms[1]:
            values = zip(dense_ms, where, strict=True)
            told = " and ".join(f"{ms:.3f} ms {place}" for ms, place in values)
            obstacles.append(f"other layers take {told}")
        sizes = [*_differences(first, second, _DECIDES_SAMPLES, where)]
        effect = "so an iteration trains another number of samples"
        if None in (a.num_samples, b.num_samples):
            obstacles, sizes = [*obstacles, *sizes], []
        elif a.num_samples == b.num_samples:
            effect = "but an iteration trains as many samples in both"
        notes = [f"{text}, so the costs are not comparable" for text in obstacles]
        return PlanComparison(
            first_name=names[0],
            first=a,
            second_name=names[1],
            second=b,
            moves=table_moves(
                self.plan,
                other.plan,
                first.tables,
                (first.world_size, second.world_size),
            ),
            notes=(
                *(Note("comparison", text) for text in notes),
                *(
                    Note("comparison", f"{text}, {effect}", severity="info")
                    for text in sizes
                ),
            ),
            obstacles=tuple(obstacles),
        )


def _places(tables: Iterable[TableReport]) -> dict[str, Any]:
    """Return table -> its sharding, and the rank and size of each shard."""
    return {
        t.table: [
            t.place,
            *((s.rank, s.num_embeddings, s.embedding_dim) for s in t.shards),
        ]
        for t in tables
    }


def _made_for(
    plan: ShardingPlan, model: nn.Module, planner: EmbeddingPlannerBase
) -> PlanFingerprint:
    """Return the fingerprint of the job that a plan is saved or loaded for."""
    check_kind("plan", plan, ShardingPlan)
    check_kind("planner", planner, EmbeddingPlannerBase)
    tables, unsharded = model_tables(plan.plan, model)
    topology, batch_size = (
        planner_part(planner, n) for n in ("topology", "batch_size")
    )
    known: dict[str, Any] = {}
    if isinstance(planner, NeuroShardPlanner):
        costs, reader = planner.costs, planner.costs.reader
        known = {
            "cost_model": costs.cost_model.name,
            "hardware": costs.cost_model.hardware,
            "pipeline_type": costs.schedule.name,
        }
    else:
        reader = TableReader(topology, planner_part(planner, "constraints"))
    sizes = {t.full_name: reader.batch_sizes(t.path, t.name) for t in tables}
    tier = device_tier(topology)
    storages = [device.storage for device in topology.devices]
    hosts = None if tier == "ddr" else tuple(int(s.ddr) for s in storages)
    return PlanFingerprint(
        tables=tables,
        unsharded=unsharded,
        world_size=int(topology.world_size),
        local_world_size=int(topology.local_world_size),
        compute_device=str(topology.compute_device),
        memory_bytes=tuple(int(getattr(s, tier)) for s in storages),
        host_memory_bytes=hosts,
        sharding_group=sharding_group(topology),
        batch_size=batch_size,
        pooling_factors={
            t.full_name: reader.pooling_factor(
                t.path, t.name, t.feature_names, batch_size
            )
            for t in tables
        },
        batch_sizes={name: each for name, each in sizes.items() if each} or None,
        versions={
            "torchrec_neuroshard": __version__,
            "torchrec": torchrec_version(),
        },
        **known,
    )


def save_plan(
    plan: ShardingPlan,
    path: str | Path,
    *,
    model: nn.Module,
    planner: EmbeddingPlannerBase,
) -> None:
    """Write a plan and the job it was made for; call it on one rank.

    The file has everything that `DistributedModelParallel` reads from a plan.

    Args:
        plan: A planner's plan.
        path: The file. It is replaced completely or not at all.
        model: The model before `DistributedModelParallel`.
        planner: TorchRec's planner or a `NeuroShardPlanner`, which provides the ranks,
            batch size and inputs. If the plan is the last one of a `NeuroShardPlanner`,
            its costs are also stored.

    Raises:
        ConfigError: An argument has the wrong type, or the file cannot be written.
        PlanFileError: The plan does not fit the model, or has settings that cannot be
            stored.
    """
    check_kind("path", path, str, os.PathLike)
    check_outputs(Path(path))
    once = planned_once(plan, model)
    fingerprint = _made_for(once, model, planner)
    check_plan(once, fingerprint.tables, fingerprint.world_size)
    shown = None
    if isinstance(planner, NeuroShardPlanner) and plan == planner.last_plan:
        known = planner.last_known
        shown = None if known is None else to_fields(known.report())
    data = {
        "format": _FORMAT,
        "schema": PLAN_SCHEMA_VERSION,
        "fingerprint": to_fields(fingerprint),
        "plan": plan_to_json(once),
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
    planner: EmbeddingPlannerBase,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
) -> ShardingPlan:
    """Return the plan from a file of `save_plan`, if it fits this job.

    A restarted job loads it instead of planning:

        plan = load_plan("plan.json", model=model, planner=planner)
        model = DistributedModelParallel(model, plan=plan, ...)

    Args:
        path: The file.
        model: The model before `DistributedModelParallel`.
        planner: The planner that would otherwise plan, TorchRec's or a
            `NeuroShardPlanner`. It provides the job's ranks and batch size. A
            `NeuroShardPlanner` can then report on the plan, with its current costs.
        sharders: The model's sharders. None: those of the planner's last plan, else
            TorchRec's defaults.

    Returns:
        A plan equal to the saved one.

    Raises:
        PlanMismatchError: The job has other tables, ranks or devices, the planner's
            constraints forbid the plan, or a module has no sharder.
        PlanFileError: The file is missing, damaged, or of another version.

    Warns:
        StalePlanWarning: Memory, batch size, cost model, pipeline, sharding group or
            TorchRec's release differ. The plan works, but a new one may be better.
    """
    stored = read_plan(path)
    plan, made = stored.plan, stored.fingerprint
    current = _made_for(plan, model, planner)
    ours = planner if isinstance(planner, NeuroShardPlanner) else None
    if sharders is None and ours is not None and ours.last_model:
        sharders = ours.last_model[1]
    wrong = (
        list(_other_job(made, current))
        or list(_forbidden(plan, planner, current.world_size))
        or list(_unsharded_modules(plan, model, sharders or get_default_sharders()))
    )
    if wrong:
        raise PlanMismatchError(
            f"plan file '{path}' does not fit this job: {'; '.join(wrong)}. Make a new "
            "plan, or start the job that the plan was made for"
        )
    if stale := "; ".join(_differences(made, current, _MAY_DIFFER)):
        warnings.warn(
            f"plan file '{path}' works, but this job differs from the one it was made "
            f"for: {stale}. A new plan may be faster",
            StalePlanWarning,
            stacklevel=2,
        )
    plan = _with_other_paths(plan, model)
    if ours is not None:
        ours.adopt(plan, model, sharders)
    return plan


def _other_job(made: PlanFingerprint, current: PlanFingerprint) -> Iterator[str]:
    """Yield the differences between two jobs that make a plan invalid."""
    theirs, ours = ({t.full_name: t for t in m.tables} for m in (made, current))
    for name in sorted(theirs.keys() | ours.keys()):
        if name in theirs and name in ours:
            fields = [f.name for f in dataclasses.fields(PlanTable)]
            for text in _differences(theirs[name], ours[name], fields):
                yield f"table '{name}': {text}"
        else:
            yield f"table '{name}' is only {_WHERE[name in ours]}"
    yield from _differences(made, current, _MUST_BE_EQUAL)


def _differences(
    first: Any, second: Any, fields: Iterable[str], where: Sequence[str] = _WHERE
) -> Iterator[str]:
    """Yield the fields that differ, if both values are known."""
    for field in fields:
        a, b = getattr(first, field), getattr(second, field)
        if a != b and a not in _UNKNOWN and b not in _UNKNOWN:
            yield f"{field} is {_show(a)} {where[0]} and {_show(b)} {where[1]}"


def _show(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    if len(value) > 1 and len(set(value)) == 1:
        return f"{len(value)} x {value[0]}"
    return ", ".join(map(str, value)) or "none"


def _forbidden(
    plan: ShardingPlan, planner: EmbeddingPlannerBase, world_size: int
) -> Iterator[str]:
    """Yield how tables of a plan break a planner's constraints."""
    constraints = planner_part(planner, "constraints") or {}
    if isinstance(planner, NeuroShardPlanner):
        constraints = planner.constraints
    ranks = {}
    for path, name, sharding in plan_entries(plan):
        table = full_name(path, name)
        ranks[table] = sharding.ranks
        for field in ("sharding_type", "compute_kernel"):
            constraint = constraint_on(constraints, path, name)
            allowed = getattr(constraint, f"{field}s", None)
            if allowed and (value := getattr(sharding, field)) not in allowed:
                yield (
                    f"table '{table}' is {value} in the file, but constraints "
                    f"allow only {', '.join(allowed)}"
                )
    if isinstance(planner, NeuroShardPlanner):
        rules = planner.placement_constraints.rules(ranks, world_size)
        held = {rules.index[name]: found for name, found in ranks.items()}
        if rules and (violation := rules.violation(held)):
            yield f"placement_constraints: {violation}"


def _unsharded_modules(
    plan: ShardingPlan, model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[str]:
    """Yield the modules of a plan without a sharder, for example wrong paths."""
    taken, inside = sharders_by_type(sharders), unsharded_tables(model, [])
    for name in plan.plan:
        kind = type(model.get_submodule(name))
        if name not in inside and sharder_name(kind) not in taken:
            yield (
                f"no sharder matches module '{name}' of class {kind.__name__}; pass "
                f"its sharder, or load a plan of {quoted(sorted(inside))}"
            )


def read_plan(path: str | Path) -> StoredPlan:
    """Return the contents of a plan file, whatever job it was made for.

    Raises:
        PlanFileError: The file is missing, damaged, or of another version.
    """
    try:
        data = read_json(path)
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise PlanFileError(f"its format is not '{_FORMAT}'")
        if data["schema"] != PLAN_SCHEMA_VERSION:
            raise PlanFileError(
                f"its schema is {data['schema']!r}, but this version reads "
                f"{PLAN_SCHEMA_VERSION}"
            )
        fields = {f.name for f in dataclasses.fields(PlanFingerprint)}
        made_for = {k: v for k, v in data["fingerprint"].items() if k in fields}
        fingerprint = from_fields(PlanFingerprint, made_for)
        plan = plan_from_json(data["plan"])
        check_plan(plan, fingerprint.tables, fingerprint.world_size)
    except OSError as error:
        raise PlanFileError(
            f"cannot read the plan file '{path}': {error.strerror}. Name a file from "
            "save_plan or 'neuroshard plan --out'"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason: object = error if isinstance(error, ValueError) else repr(error)
        if isinstance(error, json.JSONDecodeError):
            reason = "it holds no JSON"
        raise PlanFileError(
            f"'{path}' is not a plan file, or is damaged: {reason!s:.500}. Use a file "
            "from save_plan or 'neuroshard plan --out', or make a new plan"
        ) from error
    return StoredPlan(plan=plan, fingerprint=fingerprint, shown=data.get("report"))


def _with_other_paths(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """Return a plan of `planned_once` with all paths under which a model has modules.

    Entries that the plan has stay as they are.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    planned = {modules[path]: own for path, own in plan.plan.items()}
    others = {
        path: EmbeddingModuleShardingPlan(planned[module])
        for module, paths in paths_of(model, planned.__contains__).items()
        for path in paths
        if path not in plan.plan
    }
    return ShardingPlan({**plan.plan, **others})
