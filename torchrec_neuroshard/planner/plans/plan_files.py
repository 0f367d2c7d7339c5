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
import importlib.metadata
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.planner.planners import EmbeddingPlannerBase
from torchrec.distributed.planner.types import (
    Enumerator,
    PlanLoader,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from torchrec_neuroshard import __version__
from torchrec_neuroshard.cost_models import CostModel
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import (
    from_fields,
    json_text,
    parse_json,
    read_json,
    to_fields,
    write_whole,
)
from torchrec_neuroshard.placement_rules import quoted
from torchrec_neuroshard.planner.compat import (
    SETTING_TYPES,
    planner_part,
    removes_repeats,
    sharders_by_type,
    wire_codecs,
)
from torchrec_neuroshard.planner.costs.given_plans import (
    PlanFileError,
    PlanTable,
    check_plan,
    model_tables,
    plan_entries,
    plan_tables,
    table_moves,
    tables_of,
    with_shards,
)
from torchrec_neuroshard.planner.costs.plan_costs import PlanCosts
from torchrec_neuroshard.planner.options.checks import unsharded_tables
from torchrec_neuroshard.planner.options.constraints import PlacementConstraints
from torchrec_neuroshard.planner.options.groups import (
    ShardingGroup,
    sharding_group,
)
from torchrec_neuroshard.planner.options.table_reader import (
    TableReader,
    device_tier,
    has_cache,
)
from torchrec_neuroshard.planner.options.topologies import GB_PER_S
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.planner.results import KnownPlan
from torchrec_neuroshard.report import (
    Bottleneck,
    PlanComparison,
    PlanReport,
    TableReport,
)
from torchrec_neuroshard.report.plan_parts import rank_reports
from torchrec_neuroshard.schedules import DenseMs
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.simulator import PHASES, RankCosts

__all__ = [
    "PLAN_SCHEMA_VERSION",
    "NeuroShardPlanLoader",
    "PlanFingerprint",
    "PlanMismatch",
    "PlanMismatchError",
    "StalePlanWarning",
    "StoredPlan",
    "load_plan",
    "read_plan",
    "save_plan",
]

logger = logging.getLogger(__name__)

PLAN_SCHEMA_VERSION = 1
"""Version of the file's layout; files of a later one are refused."""

_BANDWIDTHS = (
    "hbm_mem_bw",
    "ddr_mem_bw",
    "hbm_to_ddr_mem_bw",
    "intra_host_bw",
    "inter_host_bw",
)
_SAME_MEASURED = 0.1
"""Relative difference in lookups, or in ms, from one measurement of a job to the next.
"""
_MOST_NAMED = 3

_FORMAT = "torchrec_neuroshard.plan"
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")


class PlanMismatchError(PlanFileError):
    """A sound plan file that was made for other tables, ranks or devices.

    Attributes:
        mismatches: What differs.
    """

    def __init__(self, message: str, mismatches: Sequence[PlanMismatch] = ()) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


class StalePlanWarning(UserWarning):
    """A plan that still works was made under other circumstances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMismatch:
    """One difference between a job and the plan file it wants to use."""

    field: str
    expected: str
    """What the job has."""
    found: str
    """What the file says."""

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFingerprint:
    """What a plan was made for."""

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
    """Host memory of each rank, beside that of its device; None: not known, or the
    device is the host."""
    sharding_group: ShardingGroup | None = None
    """What the ranks are a sharding group of; None: they are all, or not known."""
    batch_size: int | None = None
    """Samples per rank; None: not known."""
    cost_model: str | None = None
    """Its name; None: not known, or planned without one."""
    hardware: str | None = None
    """What the cost model predicts."""
    pipeline_type: str | None = None
    """Of the training loop, "none" for a plain one; None: not known."""
    dense_ms: DenseMs | None = None
    """What the rest of the model takes under a pipeline; None: not known, or it is of
    no account."""
    placement: Mapping[str, Any] | None = None
    """Which ranks tables may be on (`PlacementConstraints.to_json`); None: any, or not
    known."""
    gb_per_s: Mapping[str, float] | None = None
    """Bandwidths of the topology; None: not known."""
    pooling_factors: Mapping[str, float] | None = None
    """Full name of a table -> ids that a sample looks up in it; None: not known."""
    batch_sizes: Mapping[str, tuple[float, ...]] | None = None
    """Full name of a table -> samples per rank that each of its features has, of tables
    where they are others than the batch's; None: of none, or not known."""
    exchanges: Mapping[str, str] | None = None
    """Class of a module -> what its sharder does to what ranks exchange: codecs of
    collectives, forward and backward, and whether repeated ids are sent once; None: not
    known."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Package -> version."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "host_memory_bytes"):
            sizes = getattr(self, name)
            if sizes is not None and len(sizes) != self.world_size:
                raise ValueError(f"{name} has {len(sizes)} values, not one per rank")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; `from_json` reads it back."""
        return to_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanFingerprint:
        """Read what `to_json` wrote.

        Raises:
            PlanFileError: A value is missing or of the wrong kind.
        """
        try:
            known = {f.name for f in dataclasses.fields(cls)}
            return from_fields(cls, {k: v for k, v in data.items() if k in known})
        except (AttributeError, ValueError) as error:
            raise PlanFileError(f"not a fingerprint of a plan: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPlan:
    """The contents of a plan file."""

    plan: ShardingPlan
    fingerprint: PlanFingerprint
    predicted: Mapping[str, Any] | None
    """Predicted costs as stored (`PredictedCosts.to_json`, with `lower_bound_ms`,
    `gap` and `bound_is_proven`; of plans that the planner returned also `tables`,
    `memory_bytes` and `bottleneck`, as `PlanReport` has them); None: not known when it
    was stored."""

    @property
    def made_for(self) -> str:
        """What the plan was made for, in a sentence without a full stop."""
        made = self.fingerprint
        batch = "not said" if made.batch_size is None else f"{made.batch_size:,}"
        versions = ", ".join(
            f"{name} {made.versions[name]}"
            for name in ("torchrec_neuroshard", "torchrec")
            if name in made.versions
        )
        return (
            f"made for {made.world_size} ranks, {made.local_world_size} per node "
            f"({made.compute_device}); samples per rank: {batch}; cost model: "
            f"{made.cost_model or 'not known'} ({made.hardware or 'not known'}); by "
            f"{versions or 'versions that are not known'}"
        )

    def report(self) -> PlanReport:
        """Say what is stored of the plan; nothing is predicted anew.

        Raises:
            PlanFileError: What was predicted is damaged.
        """
        made = self.fingerprint
        notes: list[str] = []
        found = self.predicted
        if found is None:
            notes.append("what the plan costs was not known when it was stored")
            found = {"critical_path_ms": math.nan, "ranks": [{}] * made.world_size}
        try:
            tables, memory_bytes = self._tables(found)
            if "tables" not in found:
                notes.append("memory is that of the weights alone: no more is stored")
            bottleneck = found.get("bottleneck")
            gap, num_ranks = found.get("gap"), len(found["ranks"])
            if num_ranks != made.world_size:
                raise ValueError(f"ranks: {num_ranks}, not {made.world_size}")
            return PlanReport(
                critical_path_ms=float(found["critical_path_ms"]),
                lower_bound_ms=float(found.get("lower_bound_ms", 0.0)),
                gap=math.inf if gap is None else float(gap),
                bound_is_proven=bool(found.get("bound_is_proven", False)),
                # Older files do not say what the uncertainty is of.
                uncertainty=float(found["uncertainty"]) if "is_sampled" in found else 0,
                is_sampled=bool(found.get("is_sampled", False)),
                compute_source=str(found.get("compute_source", "not known")),
                comms_source=str(found.get("comms_source", "not known")),
                search_seconds=0.0,
                num_evaluated=0,
                num_tables=len(tables),
                ranks=rank_reports(
                    tables,
                    [
                        RankCosts(*(float(ms.get(p, 0.0)) for p in PHASES))
                        for ms in found["ranks"]
                    ],
                    memory_bytes,
                ),
                splits=(),
                tables=tuple(sorted(tables, key=lambda t: (-t.path_ms, -t.used_bytes))),
                bottleneck=from_fields(Bottleneck, bottleneck) if bottleneck else None,
                fallback=None,
                warnings=tuple(notes),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanFileError(
                f"the costs stored with the plan are damaged: {error!r}"
            ) from error

    def _tables(
        self, found: Mapping[str, Any]
    ) -> tuple[Sequence[TableReport], Sequence[int]]:
        """Tables, and what each rank has for them.

        Raises:
            ValueError: What is stored is not of this plan.
        """
        made = self.fingerprint
        weights = plan_tables(self.plan, made.tables, made.world_size)
        if "tables" not in found:
            return weights, made.memory_bytes
        tables = [from_fields(TableReport, table) for table in found["tables"]]
        if {t.table: t.ranks for t in tables} != {t.table: t.ranks for t in weights}:
            raise ValueError("tables: they are not those of the plan")
        return tables, [int(size) for size in found["memory_bytes"]]

    def compared_to(self, other: StoredPlan, names: tuple[str, str]) -> PlanComparison:
        """Say what lies elsewhere in another stored plan, and what that saves.

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
            f"{field} differs ({_show(a)}, {_show(b)}): the costs are not of one thing"
            for field in fields
            if (a := getattr(first, field)) != (b := getattr(second, field))
        ]
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
            notes=tuple(notes),
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """What plans are stored or wanted for, apart from the model."""

    topology: Topology
    batch_size: int | None
    cost_model: str | None = None
    hardware: str | None = None
    pipeline_type: str | None = None
    dense_ms: DenseMs | None = None
    placement: PlacementConstraints | None = None
    reader: TableReader | None = None
    """Knows how often tables are read; None: nobody said."""
    sharders: Sequence[ModuleSharder[Any]] | None = None
    """Of the model; None: nobody said."""

    @classmethod
    def of(
        cls,
        planner: EmbeddingPlannerBase | None,
        topology: Topology | None,
        batch_size: int | None,
        cost_model: str | CostModel | None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
    ) -> _Job:
        """Take a planner's own, or what the caller says in its place."""
        if planner is not None:
            if any(given is not None for given in (topology, batch_size, cost_model)):
                raise ConfigError(
                    "pass either planner or topology, batch_size and cost_model: a "
                    "planner has its own"
                )
            found = cls._of_planner(planner)
        elif topology is None:
            raise ConfigError(
                "a plan belongs to its ranks: pass the planner or the topology"
            )
        elif isinstance(cost_model, CostModel):
            name, hardware = cost_model.name, cost_model.hardware
            found = cls(topology, batch_size, cost_model=name, hardware=hardware)
        else:
            named = cost_model if isinstance(cost_model, str) else None
            found = cls(topology, batch_size, cost_model=named)
        if sharders is None:
            return found
        return dataclasses.replace(found, sharders=sharders)

    @classmethod
    def _of_planner(cls, planner: EmbeddingPlannerBase) -> _Job:
        devices: Topology = planner_part(planner, "topology")
        size = planner_part(planner, "batch_size")
        if not isinstance(planner, NeuroShardPlanner):
            reader = TableReader(
                world_size=int(devices.world_size),
                constraints=planner_part(planner, "constraints"),
                profiles=None,
            )
            return cls(devices, size, reader=reader)
        costs = planner.costs
        return cls(
            devices,
            size,
            cost_model=costs.cost_model.name,
            hardware=costs.cost_model.hardware,
            pipeline_type=costs.schedule.name,
            dense_ms=None if costs.schedule.adds_up(costs.dense) else costs.dense,
            placement=planner.placement_constraints,
            reader=costs.reader,
            sharders=planner.last_model[1] if planner.last_model else None,
        )

    def fingerprint(
        self, tables: tuple[PlanTable, ...], unsharded: tuple[str, ...] = ()
    ) -> PlanFingerprint:
        """Describe this job with these tables."""
        tier = device_tier(self.topology)
        storages = [d.storage for d in self.topology.devices]
        return PlanFingerprint(
            tables=tables,
            unsharded=unsharded,
            world_size=int(self.topology.world_size),
            local_world_size=int(self.topology.local_world_size),
            compute_device=str(self.topology.compute_device),
            memory_bytes=tuple(int(getattr(s, tier)) for s in storages),
            host_memory_bytes=None
            if tier == "ddr"
            else tuple(int(s.ddr) for s in storages),
            sharding_group=sharding_group(self.topology),
            batch_size=self.batch_size,
            cost_model=self.cost_model,
            hardware=self.hardware,
            pipeline_type=self.pipeline_type,
            dense_ms=self.dense_ms,
            placement=self.placement.to_json() if self.placement else None,
            gb_per_s={
                name: round(float(getattr(self.topology, name)) * GB_PER_S, 3)
                for name in _BANDWIDTHS
            },
            pooling_factors=None
            if self.reader is None
            else {
                t.full_name: self.reader.pooling_factor(
                    t.name, t.feature_names, self.batch_size
                )
                for t in tables
            },
            batch_sizes=None if self.reader is None else self._batch_sizes(tables),
            exchanges=None if self.sharders is None else _exchanges(self.sharders),
            versions=_versions(),
        )

    def _batch_sizes(
        self, tables: Sequence[PlanTable]
    ) -> dict[str, tuple[float, ...]] | None:
        assert self.reader is not None
        sizes = {t.full_name: self.reader.batch_sizes(t.name) for t in tables}
        return {name: each for name, each in sizes.items() if each} or None

    def check_placement(self, stored: StoredPlan, path: str | Path) -> None:
        """Refuse a plan with tables where this job does not want them."""
        if not self.placement:
            return
        tables = [t.full_name for t in stored.fingerprint.tables]
        rules = self.placement.rules(tables, stored.fingerprint.world_size)
        violation = rules.violation(
            {
                rules.index[f"{module}.{name}" if module else name]: sharding.ranks
                for module, name, sharding in plan_entries(stored.plan)
            }
        )
        if violation is not None:
            raise PlanMismatchError(
                f"plan file '{path}' breaks the planner's placement constraints: "
                f"{violation}. Plan anew, or change the constraints",
                [
                    PlanMismatch(
                        field="placement",
                        expected=_show(self.placement.to_json()),
                        found=violation,
                    )
                ],
            )


def save_plan(
    plan: ShardingPlan,
    path: str | Path,
    *,
    model: nn.Module,
    planner: EmbeddingPlannerBase | None = None,
    topology: Topology | None = None,
    batch_size: int | None = None,
    cost_model: str | CostModel | None = None,
    result: SearchResult | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
) -> None:
    """Write a plan and what it was made for; call it on one rank.

    Everything that `DistributedModelParallel` reads of a plan is stored. The access
    statistics that a table's `cache_params` may carry are not: only planners read them.

    Args:
        plan: What a planner returned.
        path: The file; it is replaced whole or not at all.
        model: The model, as it was before `DistributedModelParallel` took it.
        planner: The planner, TorchRec's or this package's; in place of the next three.
        topology: The ranks that the plan is for.
        batch_size: Samples per rank. None: not known.
        cost_model: The cost model or its name. None: not known.
        result: Predicted costs. None: the planner's `last_result`, if it has one.
        sharders: Of the model. None: those that the planner last planned with.

    Raises:
        ConfigError: Neither a planner nor a topology is given, or both are.
        PlanFileError: The plan does not belong to the model, or holds settings that
            cannot be stored.
    """
    job = _Job.of(planner, topology, batch_size, cost_model, sharders)
    fingerprint = job.fingerprint(*model_tables(plan.plan, model))
    check_plan(plan, fingerprint.tables, fingerprint.world_size)
    found = None if result is None else _predicted(result)
    if found is None and isinstance(planner, NeuroShardPlanner):
        known = planner.last_known
        found = None if known is None else _known(known, plan == planner.last_plan)
    data = {
        "format": _FORMAT,
        "schema": PLAN_SCHEMA_VERSION,
        "fingerprint": fingerprint.to_json(),
        "plan": {
            module_path: {
                name: _encode_sharding(f"{module_path}.{name}", sharding)
                for name, sharding in module_plan.items()
            }
            for module_path, module_plan in plan.plan.items()
        },
        "predicted": found,
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
    cost_model: str | CostModel | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
) -> ShardingPlan:
    """Read a plan that `save_plan` wrote, if it fits this job.

    A restarted job takes it in place of planning:

        plan = load_plan("plan.json", model=model, planner=planner)
        model = DistributedModelParallel(model, plan=plan, ...)

    Args:
        path: The file.
        model: The model, not yet in `DistributedModelParallel`.
        planner: The planner that would plan; in place of the next three. One of this
            package reports on the plan afterwards, by the costs that it knows now.
        topology: The ranks to run on.
        batch_size: Samples per rank. None: not compared.
        cost_model: The cost model or its name. None: not compared.
        sharders: Of the model. None: those that the planner last planned with, if any;
            else codecs and repeated ids are not compared.

    Returns:
        The plan, equal to the one stored.

    Raises:
        ConfigError: Neither a planner nor a topology is given, or both are.
        PlanMismatchError: Tables, ranks or devices are not those of the plan, it breaks
            the planner's placement constraints, or names modules that the sharders do
            not take.
        PlanFileError: The file is missing, damaged, or of a later version.

    Warns:
        UserWarning: Where the sharders are not known, modules that TorchRec's do not
            take.
        StalePlanWarning: Memory, bandwidths, batch size, pooling factors, cost model,
            the pipeline, the rest of the model, the sharding group, placement
            constraints, codecs of collectives, the treatment of repeated ids or package
            versions are not those of the plan: it works, but a new one may be better.
    """
    job = _Job.of(planner, topology, batch_size, cost_model, sharders)
    stored = read_plan(path)
    current = job.fingerprint(*model_tables(stored.plan.plan, model))
    _check_fits(stored.fingerprint, current, path, stacklevel=3)
    _check_paths(stored.plan, model, job.sharders, path)
    job.check_placement(stored, path)
    if isinstance(planner, NeuroShardPlanner):
        planner.adopt(stored.plan, model)
    return stored.plan


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
    """Read a plan file without asking what it is wanted for.

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
        named = _FORMAT.encode() in Path(path).read_bytes()
        why = (_damaged if named else _no_plan)(path, f"it is not JSON ({error})")
        raise PlanFileError(why) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise PlanFileError(_no_plan(path, f"its format is not '{_FORMAT}'"))
    schema = data.get("schema")
    if schema != PLAN_SCHEMA_VERSION:
        raise PlanFileError(
            f"plan file '{path}' has schema {schema!r}, this version reads "
            f"{PLAN_SCHEMA_VERSION}. Use the torchrec_neuroshard that wrote it, or "
            "plan anew"
        )
    try:
        fingerprint = PlanFingerprint.from_json(data["fingerprint"])
        plan = _decode_plan(data["plan"])
        predicted = data["predicted"]
        check_plan(plan, fingerprint.tables, fingerprint.world_size)
    except PlanFileError as error:
        raise PlanFileError(_damaged(path, str(error))) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanFileError(_damaged(path, repr(error))) from error
    return StoredPlan(plan=plan, fingerprint=fingerprint, predicted=predicted)


class NeuroShardPlanLoader(PlanLoader):
    """Makes any of TorchRec's planners return a stored plan instead of searching.

    The planner's own loop goes on around it: reservation, callbacks, statistics and
    validators see the stored plan as if it had been found anew.

        planner.plan_loader = NeuroShardPlanLoader("plan.json", planner)

    Where the loader must exist before the planner (`plan_loader=...`), give it the
    planner's enumerator and topology:

        loader = NeuroShardPlanLoader(path, enumerator=enumerator, topology=topology)
        planner = EmbeddingShardingPlanner(
            topology=topology, enumerator=enumerator, plan_loader=loader
        )

    TorchRec takes from the stored plan only shards and ranks; caching and the other
    settings of a table are those of the planner's constraints. A plan with caches of
    other sizes is therefore refused.

    Args:
        path: A file that `save_plan` wrote.
        planner: The planner; in place of the next four.
        enumerator: The planner's enumerator.
        topology: The ranks to run on.
        batch_size: Samples per rank. None: not compared.
        cost_model: The cost model or its name. None: not compared.
        missing_ok: Whether the planner may search where the file does not exist.

    Raises:
        ConfigError: Neither a planner nor an enumerator and a topology are given, or
            both are.
    """

    def __init__(
        self,
        path: str | Path,
        planner: EmbeddingPlannerBase | None = None,
        *,
        enumerator: Enumerator | None = None,
        topology: Topology | None = None,
        batch_size: int | None = None,
        cost_model: str | CostModel | None = None,
        missing_ok: bool = False,
    ) -> None:
        if (planner is None) == (enumerator is None):
            raise ConfigError(
                "a plan loader looks up a planner's search space: pass the planner, or "
                "its enumerator and topology"
            )
        self._path = Path(path)
        self._enumerator: Any = enumerator
        self._costs: PlanCosts | None = None
        if planner is not None:
            self._enumerator = planner_part(planner, "enumerator")
        if isinstance(planner, NeuroShardPlanner):
            self._costs = planner.costs
        self._job = _Job.of(planner, topology, batch_size, cost_model)
        self._missing_ok = missing_ok

    def get_plan_id(self) -> str:
        """Return what TorchRec calls the plan in its log: the file's name."""
        return str(self._path)

    def plan_context_hash(self) -> None:
        """Return no hash: `load` compares field by field, and says what differs."""
        return None

    def load(self) -> dict[int, ShardingOption] | None:
        """Return the stored shards, by the hash of the option they belong to.

        Returns:
            What TorchRec's planners take; None, with a line in the log, where the file
            does not exist and `missing_ok`.

        Raises:
            PlanMismatchError: Tables, ranks or devices are not those of the plan, or
                the planner's constraints allow it no longer.
            PlanFileError: The file is missing, damaged, or of a later version.

        Warns:
            StalePlanWarning: See `load_plan`.
        """
        if self._missing_ok and not self._path.exists():
            logger.info("no plan file '%s' yet; planning", self._path)
            return None
        stored = read_plan(self._path)
        space: list[ShardingOption] = self._enumerator.last_stored_search_space
        modules = {option.path: option.module[1] for option in space}
        current = self._job.fingerprint(
            tables_of(modules.items()), stored.fingerprint.unsharded
        )
        _check_fits(stored.fingerprint, current, self._path, stacklevel=4)
        self._job.check_placement(stored, self._path)
        loaded = {}
        for path, name, sharding in plan_entries(stored.plan):
            option = self._find(space, path, name, sharding)
            loaded[option.storage_hash()] = with_shards(option, sharding)
        self._enumerator.populate_estimates(list(loaded.values()))
        if self._costs is not None:
            self._costs.attribute(list(loaded.values()))
        return loaded

    def _find(
        self,
        space: Iterable[ShardingOption],
        path: str,
        name: str,
        sharding: ParameterSharding,
    ) -> ShardingOption:
        """Return the option of the search space that the stored table is one of."""
        wanted = sharding.sharding_type, sharding.compute_kernel
        offered = []
        for option in space:
            if (option.path, option.name) == (path, name):
                found = option.sharding_type, option.compute_kernel
                if found == wanted and _same_cache(option, sharding):
                    return option
                offered.append(_way(*found, option.cache_params))
        mismatch = PlanMismatch(
            field=f"sharding of table '{f'{path}.{name}' if path else name}'",
            expected=" or ".join(sorted(set(offered))),
            found=_way(*wanted, sharding.cache_params),
        )
        raise PlanMismatchError(
            f"plan file '{self._path}' holds what the planner may not choose: "
            f"{mismatch}. Change the constraints, or use load_plan, which asks no "
            "planner",
            [mismatch],
        )


def _same_cache(option: ShardingOption, sharding: ParameterSharding) -> bool:
    """Whether TorchRec, which takes caches from options, gives a plan's its size."""
    if not has_cache(option):
        return True
    sizes = [p and p.load_factor for p in (option.cache_params, sharding.cache_params)]
    return bool(sizes[0] == sizes[1])


def _way(sharding_type: str, compute_kernel: str, params: CacheParams | None) -> str:
    """Name a way to shard a table, with the size of its cache where that is given."""
    load = params.load_factor if params is not None else None
    size = "" if load is None else f", cache_params.load_factor={load:g}"
    return f"{sharding_type}/{compute_kernel}{size}"


def _exchanges(sharders: Iterable[ModuleSharder[Any]]) -> dict[str, str]:
    found = {}
    for sharder in sharders:
        told = [
            f"{name} {forward.name}/{backward.name}"
            for name, (forward, backward) in sorted(wire_codecs(sharder).items())
        ]
        if removes_repeats(sharder):
            told.append("repeated ids once")
        if told:
            found[sharder.module_type.__name__] = ", ".join(told)
    return found


def _versions() -> dict[str, str]:
    found = {"torchrec_neuroshard": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _predicted(result: SearchResult) -> dict[str, Any]:
    return {
        **result.predicted.to_json(),
        "lower_bound_ms": result.lower_bound_ms,
        "gap": result.gap if math.isfinite(result.gap) else None,
        "bound_is_proven": result.bound_is_proven,
    }


def _known(known: KnownPlan, is_this: bool) -> dict[str, Any]:
    """Return what a planner knows of its last plan, the tables if it is this one."""
    found = _predicted(known.result)
    if is_this:
        bottleneck = known.bottleneck
        found["tables"] = [to_fields(table) for table in known.tables]
        found["memory_bytes"] = list(known.memory_bytes)
        found["bottleneck"] = None if bottleneck is None else to_fields(bottleneck)
    return found


def _check_fits(
    stored: PlanFingerprint,
    current: PlanFingerprint,
    path: str | Path,
    *,
    stacklevel: int,
) -> None:
    """Refuse a plan that cannot be right; warn of one that may not be the best."""
    invalid = list(_invalid(stored, current))
    if invalid:
        raise PlanMismatchError(
            f"plan file '{path}' was made for another job: "
            f"{'; '.join(map(str, invalid))}. Plan anew, or start the job that the "
            "plan belongs to",
            invalid,
        )
    stale = list(_stale(stored, current))
    if stale:
        warnings.warn(
            f"plan file '{path}' still works, but was made under other circumstances: "
            f"{'; '.join(map(str, stale))}. A new plan may be faster",
            StalePlanWarning,
            stacklevel=stacklevel,
        )


def _invalid(
    stored: PlanFingerprint, current: PlanFingerprint
) -> Iterator[PlanMismatch]:
    """Differences that make a plan wrong."""
    theirs = {t.full_name: t for t in stored.tables}
    ours = {t.full_name: t for t in current.tables}
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in theirs or name not in ours:
            yield PlanMismatch(
                field=f"table '{name}'",
                expected="a table" if name in ours else "no such table",
                found="a table" if name in theirs else "no such table",
            )
            continue
        for field in dataclasses.fields(PlanTable):
            a, b = getattr(ours[name], field.name), getattr(theirs[name], field.name)
            if a != b:
                yield _mismatch(f"{field.name} of table '{name}'", a, b)
    for field_name in ("unsharded", "world_size", "local_world_size", "compute_device"):
        a, b = getattr(current, field_name), getattr(stored, field_name)
        if a != b:
            yield _mismatch(field_name, a, b)


def _stale(stored: PlanFingerprint, current: PlanFingerprint) -> Iterator[PlanMismatch]:
    """Differences under which another plan may be better."""
    groups = current.sharding_group, stored.sharding_group
    if groups[0] != groups[1]:
        yield _mismatch("sharding group", *(g or "all ranks" for g in groups))
    for field_name in (
        "memory_bytes",
        "host_memory_bytes",
        "batch_size",
        "cost_model",
        "hardware",
        "pipeline_type",
        "placement",
        "exchanges",
    ):
        a, b = getattr(current, field_name), getattr(stored, field_name)
        if a != b and a is not None and b is not None:
            yield _mismatch(field_name, a, b)
    ours, theirs = current.gb_per_s or {}, stored.gb_per_s or {}
    for name in sorted(ours.keys() & theirs.keys()):
        if not math.isclose(ours[name], theirs[name], rel_tol=1e-3):
            yield _mismatch(f"{name} [GB/s]", ours[name], theirs[name])
    if current.dense_ms and stored.dense_ms:
        ours, theirs = current.dense_ms.to_json(), stored.dense_ms.to_json()
        for name, ms in ours.items():
            if not math.isclose(ms, theirs[name], rel_tol=_SAME_MEASURED):
                yield _mismatch(f"dense_ms.{name}", ms, theirs[name])
    ours, theirs = current.pooling_factors or {}, stored.pooling_factors or {}
    changed = [
        name
        for name in sorted(ours.keys() & theirs.keys())
        if not math.isclose(ours[name], theirs[name], rel_tol=_SAME_MEASURED)
    ]
    for name in changed[:_MOST_NAMED]:
        yield _mismatch(f"pooling factor of table '{name}'", ours[name], theirs[name])
    if more := changed[_MOST_NAMED:]:
        total, before = (sum(p[n] for n in more) for p in (ours, theirs))
        yield _mismatch(f"those of {len(more)} more tables together", total, before)
    for package in sorted(current.versions.keys() | stored.versions.keys()):
        a = current.versions.get(package, "none")
        b = stored.versions.get(package, "none")
        if a != b:
            yield _mismatch(f"version of {package}", a, b)


def _mismatch(field: str, expected: Any, found: Any) -> PlanMismatch:
    return PlanMismatch(field=field, expected=_show(expected), found=_show(found))


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, tuple):
        return str(value)
    if len(value) > 1 and len(set(value)) == 1:
        return f"{len(value)} x {value[0]}"
    return ", ".join(map(str, value)) or "none"


def _damaged(path: str | Path, reason: str) -> str:
    return f"plan file '{path}' is damaged: {reason:.500}. Restore it, or plan anew"


def _no_plan(path: str | Path, reason: str) -> str:
    return (
        f"'{path}' is not a plan file: {reason:.500}. Name a file that save_plan or "
        "neuroshard plan --out wrote"
    )


def _encode_sharding(where: str, sharding: ParameterSharding) -> dict[str, Any]:
    spec = sharding.sharding_spec
    if spec is not None and not isinstance(spec, EnumerableShardingSpec):
        raise PlanFileError(
            f"table '{where}': only shards listed one by one can be stored, not "
            f"{type(spec).__name__}"
        )
    try:
        data = {
            f.name: _encode(getattr(sharding, f.name))
            for f in dataclasses.fields(sharding)
            if f.name != "sharding_spec"
        }
    except PlanFileError as error:
        raise PlanFileError(f"table '{where}': {error}") from None
    data["shards"] = None if spec is None else [_encode_shard(m) for m in spec.shards]
    return data


def _encode_shard(meta: ShardMetadata) -> dict[str, Any]:
    return {
        "offset": list(meta.shard_offsets),
        "size": list(meta.shard_sizes),
        "placement": None if meta.placement is None else str(meta.placement),
    }


def _encode(value: Any) -> Any:
    """Turn a setting of a table into JSON, with the type's name where it has one."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encode(v) for v in value]
    name = type(value).__name__
    if isinstance(value, Enum) and name in SETTING_TYPES:
        return {"enum": name, "member": value.name}
    if name in SETTING_TYPES:
        return {"record": name, "fields": _fields(value)}
    if isinstance(value, tuple):
        return {"tuple": [_encode(v) for v in value]}
    raise PlanFileError(f"a setting of type {name} cannot be stored: {value!r}")


def _fields(value: Any) -> dict[str, Any]:
    """Encoded fields of a dataclass or named tuple."""
    values = (
        {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if dataclasses.is_dataclass(value)
        else value._asdict()
    )
    if type(value).__name__ == "CacheParams":
        values["stats"] = None  # an object of the user's, which only planners read
    return {name: _encode(v) for name, v in values.items()}


def _decode_plan(data: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> ShardingPlan:
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(
                {name: _decode_sharding(entry) for name, entry in module_plan.items()}
            )
            for path, module_plan in data.items()
        }
    )


def _decode_sharding(data: Mapping[str, Any]) -> ParameterSharding:
    values = dict(data)
    shards = values.pop("shards")
    known = {f.name for f in dataclasses.fields(ParameterSharding)}
    for name in sorted(values.keys() - known):
        # Left at its default it says nothing that this TorchRec would not do anyway.
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
    if "enum" in value:
        return _known_type(value["enum"])[value["member"]]
    fields = {name: _decode(v) for name, v in value["fields"].items()}
    return _known_type(value["record"])(**fields)


def _known_type(name: str) -> Any:
    if name not in SETTING_TYPES:
        raise PlanFileError(f"this TorchRec knows no setting of type '{name}'")
    return SETTING_TYPES[name]
