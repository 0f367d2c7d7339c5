"""The work of `neuroshard rehearse`, once torch is loaded."""

from __future__ import annotations

import argparse
import dataclasses

from torchrec.distributed.planner.types import ParameterConstraints, Topology

from torchrec_neuroshard.commands.files import ModelFunction, TableFile
from torchrec_neuroshard.commands.inputs import made_model, planning
from torchrec_neuroshard.commands.options import show, write_outputs
from torchrec_neuroshard.planner.groups import with_sharding_group
from torchrec_neuroshard.plans.plan_json import torchrec_plan
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.plans.stored_plan import PlanFingerprint, StoredPlan
from torchrec_neuroshard.progress import phase

_GB = 10**9


def rehearse_stored(
    args: argparse.Namespace,
    stored: StoredPlan,
    model: TableFile | ModelFunction,
    batch_size: int,
) -> int:
    """Rehearse a plan file's plan, show and write the report.

    Args:
        args: The options of `neuroshard rehearse`.
        stored: The plan file.
        model: The model that the options name.
        batch_size: Samples per rank.

    Returns:
        The exit code.
    """
    made_for, plan = stored.fingerprint, torchrec_plan(stored)
    with phase("reading the model"):
        given = made_model(model)
    with planning(args.model), phase("rehearsing every rank"):
        report = rehearse(
            given.module,
            plan,
            _devices(made_for, args.memory_gb),
            given.sharders,
            batch_size=batch_size,
            constraints=_constraints(made_for, batch_size),
            pipeline_type=args.pipeline or made_for.pipeline_type,
        )
    show(args, report)
    write_outputs(args, report)
    return 0 if report.runs else 1


def _devices(made_for: PlanFingerprint, memory_gb: float | None) -> Topology:
    """Return the devices of a plan, with the memory of --memory-gb if given."""
    topology = Topology(
        world_size=made_for.world_size,
        local_world_size=made_for.local_world_size,
        compute_device=made_for.compute_device,
    )
    tier = "ddr" if made_for.compute_device == "cpu" else "hbm"
    for device, size in zip(topology.devices, made_for.memory_bytes, strict=True):
        sizes = {tier: size if memory_gb is None else round(memory_gb * _GB)}
        if made_for.host_memory_bytes is not None:
            sizes["ddr"] = made_for.host_memory_bytes[device.rank]
        device.storage = dataclasses.replace(device.storage, **sizes)
    return with_sharding_group(topology, made_for.sharding_group)


def _constraints(
    made_for: PlanFingerprint, batch_size: int
) -> dict[str, ParameterConstraints]:
    """Return the pooling factors and batch sizes that the plan was made for."""
    found: dict[str, ParameterConstraints] = {}
    factors, samples = made_for.pooling_factors or {}, made_for.batch_sizes or {}
    for table in (t for t in made_for.tables if t.full_name in factors):
        shares = [1.0] * max(1, len(table.feature_names))
        sizes = samples.get(table.full_name) if made_for.batch_size else None
        if sizes and made_for.batch_size:
            shares = [size / made_for.batch_size for size in sizes]
        found[table.full_name] = ParameterConstraints(
            pooling_factors=[factors[table.full_name] / sum(shares)] * len(shares),
            batch_sizes=sizes and [max(1, round(s * batch_size)) for s in shares],
        )
    return found
