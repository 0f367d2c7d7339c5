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
import os
import warnings
from collections.abc import Iterator, Sequence
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
from torchrec_neuroshard.errors import (
    PlanFileError,
    PlanMismatchError,
    StalePlanWarning,
    check_kind,
)
from torchrec_neuroshard.files import (
    check_outputs,
    json_text,
    parse_json,
    to_fields,
    write_whole,
)
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
from torchrec_neuroshard.planner.groups import sharding_group
from torchrec_neuroshard.planner.option_facts import device_tier
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.table_keys import constraint_on, paths_of
from torchrec_neuroshard.plans.plan_json import stored_shardings, torchrec_plan
from torchrec_neuroshard.plans.stored_plan import (
    PLAN_FORMAT,
    PLAN_SCHEMA_VERSION,
    WHERE,
    PlanFingerprint,
    differences,
    read_plan,
)
from torchrec_neuroshard.report.plan_tables import (
    PlanTable,
    full_name,
    plan_entries,
)

_MUST_BE_EQUAL = ("unsharded", "world_size", "local_world_size", "compute_device")
_MAY_DIFFER = (
    "memory_bytes",
    "sharding_group",
    "batch_size",
    "cost_model",
    "pipeline_type",
    "torchrec",
)


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
        "format": PLAN_FORMAT,
        "schema": PLAN_SCHEMA_VERSION,
        "fingerprint": to_fields(fingerprint),
        "plan": {
            path: {name: entry.to_json() for name, entry in tables.items()}
            for path, tables in stored_shardings(once).items()
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
    plan, made = torchrec_plan(stored), stored.fingerprint
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
    if stale := "; ".join(differences(made, current, _MAY_DIFFER)):
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
            for text in differences(theirs[name], ours[name], fields):
                yield f"table '{name}': {text}"
        else:
            yield f"table '{name}' is only {WHERE[name in ours]}"
    yield from differences(made, current, _MUST_BE_EQUAL)


def _forbidden(
    plan: ShardingPlan, planner: EmbeddingPlannerBase, world_size: int
) -> Iterator[str]:
    """Yield how tables of a plan break a planner's constraints."""
    constraints = planner_part(planner, "constraints") or {}
    if isinstance(planner, NeuroShardPlanner):
        constraints = planner.constraints
    ranks = {}
    for path, name, sharding in plan_entries(plan.plan):
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
