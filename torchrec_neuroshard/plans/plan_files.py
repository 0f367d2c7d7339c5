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
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.planner.planners import EmbeddingPlannerBase
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_neuroshard import __version__
from torchrec_neuroshard.costs.placement_rules import quoted
from torchrec_neuroshard.costs.simulator import PHASES, RankCosts
from torchrec_neuroshard.files import (
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
    PlanFileError,
    PlanTable,
    check_plan,
    model_tables,
    plan_entries,
    plan_tables,
    table_moves,
)
from torchrec_neuroshard.planner.option_facts import device_tier
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.table_keys import constraint_on
from torchrec_neuroshard.planner.topology import ShardingGroup, sharding_group
from torchrec_neuroshard.plans.plan_json import plan_from_json, plan_to_json
from torchrec_neuroshard.report import PlanComparison, PlanReport
from torchrec_neuroshard.report.parts import TableReport, rank_reports

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
    "torchrec",
)
_DECIDES_COSTS = ("world_size", "batch_size", "cost_model", "hardware", "pipeline_type")
_WHERE = ("in the file", "here")
_UNKNOWN = (None, "")


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

    @property
    def torchrec(self) -> str:
        """Version of TorchRec; empty: not known."""
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
            f"torchrec {made.torchrec or '?'}"
        )

    def report(self) -> PlanReport:
        """Return the report that is stored with the plan; predicts nothing.

        Where there is none of this plan that this version reads, costs are NaN, memory
        is that of the weights, and a note says so.
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
            "the plan file does not say what its plan costs, or says it as another "
            "version does; memory is that of the weights alone"
        )
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
            notes=(Note("stored", text),),
        )

    def compared_to(self, other: StoredPlan, names: tuple[str, str]) -> PlanComparison:
        """Compare with another stored plan: which tables moved, and what that saves.

        Args:
            other: The second plan.
            names: What the comparison calls this one and the other.

        Raises:
            PlanFileError: The plans are of different tables.
        """
        made = first, second = self.fingerprint, other.fingerprint
        if first.tables != second.tables:
            odd = min(t.full_name for t in {*first.tables} ^ {*second.tables})
            raise PlanFileError(
                f"'{names[0]}' and '{names[1]}' are plans of different tables: "
                f"'{odd}' is not the same in both. Compare plans of one model"
            )
        where = f"in '{names[0]}'", f"in '{names[1]}'"
        texts = [*_differences(first, second, _DECIDES_COSTS, where)]
        ids, other_ids = (m.pooling_factors or {} for m in made)
        if odd_ids := [t for t, n in ids.items() if other_ids.get(t, n) != n]:
            texts.append(f"ids per sample differ for {quoted(odd_ids)}")
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
            notes=tuple(
                Note("comparison", f"{text}: the costs do not compare")
                for text in texts
            ),
        )


def _places(tables: Iterable[TableReport]) -> dict[str, Any]:
    """Return table -> how it is sharded, and the rank and size of each shard."""
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
    """Describe the job that a plan is stored or wanted for."""
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
    """Write a plan and what it was made for; call it on one rank.

    Everything that `DistributedModelParallel` reads of a plan is stored.

    Args:
        plan: What a planner returned.
        path: The file; it is replaced whole or not at all.
        model: The model, as it was before `DistributedModelParallel` took it.
        planner: TorchRec's or this package's: says which ranks, batch size and inputs
            the plan is for. What its last plan costs is stored with that plan.

    Raises:
        PlanFileError: The plan does not belong to the model, or holds settings that
            cannot be stored.
    """
    fingerprint = _made_for(plan, model, planner)
    check_plan(plan, fingerprint.tables, fingerprint.world_size)
    shown = None
    if isinstance(planner, NeuroShardPlanner) and plan == planner.last_plan:
        known = planner.last_known
        shown = None if known is None else to_fields(known.report())
    data = {
        "format": _FORMAT,
        "schema": PLAN_SCHEMA_VERSION,
        "fingerprint": to_fields(fingerprint),
        "plan": plan_to_json(plan),
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
    """Read a plan that `save_plan` wrote, if it fits this job.

    A restarted job takes it in place of planning:

        plan = load_plan("plan.json", model=model, planner=planner)
        model = DistributedModelParallel(model, plan=plan, ...)

    Args:
        path: The file.
        model: The model, not yet in `DistributedModelParallel`.
        planner: The one that would plan, TorchRec's or this package's: says which ranks
            and batch size the job has. One of this package reports on the plan
            afterwards, by the costs that it knows now.
        sharders: Of the model. None: those that the planner last planned with, else
            TorchRec's defaults.

    Returns:
        The plan, equal to the one stored.

    Raises:
        PlanMismatchError: Tables, ranks or devices are not those of the plan, the
            planner's constraints forbid it, or no sharder takes its modules.
        PlanFileError: The file is missing, damaged, or of a later version.

    Warns:
        StalePlanWarning: Memory, batch size, cost model, pipeline, sharding group or
            TorchRec's release are not those of the plan: it works, but a new one may
            be better.
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
            f"plan file '{path}' does not fit this job: {'; '.join(wrong)}. Plan anew, "
            "or start the job that the plan belongs to"
        )
    if stale := "; ".join(_differences(made, current, _MAY_DIFFER)):
        warnings.warn(
            f"plan file '{path}' still works, but was made under other "
            f"circumstances: {stale}. A new plan may be faster",
            StalePlanWarning,
            stacklevel=2,
        )
    if ours is not None:
        ours.adopt(plan, model, sharders)
    return plan


def _other_job(made: PlanFingerprint, current: PlanFingerprint) -> Iterator[str]:
    """Say what makes a plan wrong for another job than the one it was made for."""
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
    """Name the fields that differ, of those that both know."""
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
    """Say which tables of a plan break a planner's constraints."""
    constraints = planner_part(planner, "constraints") or {}
    if isinstance(planner, NeuroShardPlanner):
        constraints = planner.constraints
    ranks = {}
    for path, name, sharding in plan_entries(plan):
        full_name = f"{path}.{name}" if path else name
        ranks[full_name] = sharding.ranks
        for field in ("sharding_type", "compute_kernel"):
            constraint = constraint_on(constraints, path, name)
            allowed = getattr(constraint, f"{field}s", None)
            if allowed and (value := getattr(sharding, field)) not in allowed:
                yield (
                    f"table '{full_name}' is {value} in the file, and constraints "
                    f"allow {', '.join(allowed)}"
                )
    if isinstance(planner, NeuroShardPlanner):
        rules = planner.placement_constraints.rules(ranks, world_size)
        held = {rules.index[name]: found for name, found in ranks.items()}
        if rules and (violation := rules.violation(held)):
            yield f"placement_constraints: {violation}"


def _unsharded_modules(
    plan: ShardingPlan, model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[str]:
    """Say which modules of a plan no sharder is for, as where tables are deeper."""
    taken, inside = sharders_by_type(sharders), unsharded_tables(model, [])
    for name in plan.plan:
        kind = type(model.get_submodule(name))
        if name not in inside and sharder_name(kind) not in taken:
            yield (
                f"no sharder is for module '{name}', a {kind.__name__}; pass the "
                f"sharders, or a plan of {quoted(sorted(inside))}"
            )


def read_plan(path: str | Path) -> StoredPlan:
    """Read a plan file, whatever job it was made for.

    Raises:
        PlanFileError: The file is missing, damaged, or of a later version.
    """
    try:
        data = read_json(path)
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise PlanFileError(f"its format is not '{_FORMAT}'")
        if data["schema"] != PLAN_SCHEMA_VERSION:
            raise PlanFileError(
                f"it has schema {data['schema']!r}, this version reads "
                f"{PLAN_SCHEMA_VERSION}"
            )
        fields = {f.name for f in dataclasses.fields(PlanFingerprint)}
        made_for = {k: v for k, v in data["fingerprint"].items() if k in fields}
        fingerprint = from_fields(PlanFingerprint, made_for)
        plan = plan_from_json(data["plan"])
        check_plan(plan, fingerprint.tables, fingerprint.world_size)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        is_text = isinstance(error, ValueError | OSError)
        reason = getattr(error, "strerror", None) or (error if is_text else repr(error))
        raise PlanFileError(
            f"'{path}' is not a plan file, or is damaged: {reason!s:.500}. Name a file "
            "that save_plan or neuroshard plan --out wrote, or plan anew"
        ) from error
    return StoredPlan(plan=plan, fingerprint=fingerprint, shown=data.get("report"))
