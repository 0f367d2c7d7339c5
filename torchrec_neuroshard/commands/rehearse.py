"""`neuroshard rehearse`: a plan file and a model in, a report on every rank out."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

from torchrec.distributed.planner.types import ParameterConstraints, Topology

from torchrec_neuroshard.commands.inputs import MODEL_HELP, read_model
from torchrec_neuroshard.commands.plan import planning, write_json
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import check_outputs
from torchrec_neuroshard.planner.options.groups import with_sharding_group
from torchrec_neuroshard.plans.plan_files import PlanFingerprint, read_plan
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.schedules import SCHEDULES

__all__ = ["add_arguments", "run"]

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("plan", type=Path, help="file that save_plan wrote")
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--batch-size", type=int, help="samples per rank (the plan's)")
    parser.add_argument(
        "--hbm-gib", type=float, help="memory of a device (what the plan was made for)"
    )
    parser.add_argument(
        "--pipeline",
        choices=list(SCHEDULES),
        help="of the training loop (the plan's)",
    )
    parser.add_argument("--json", type=Path, help="write the report there, too")


def run(args: argparse.Namespace) -> int:
    """Rehearse; 1 where some rank cannot run the plan.

    Raises:
        NeuroShardError: The plan file or the model cannot be used.
    """
    check_outputs(args.json, read=(args.plan, args.model))
    with phase("reading the plan"):
        stored = read_plan(args.plan)
    made_for = stored.fingerprint
    batch_size = args.batch_size
    if batch_size is None:
        batch_size = made_for.batch_size
    if batch_size is None:
        raise ConfigError(
            f"plan file '{args.plan}' does not say for which batch size it was made; "
            "pass --batch-size"
        )
    with phase("reading the model"):
        given = read_model(args.model)
    with planning(args.model), phase("rehearsing every rank"):
        report = rehearse(
            given.module,
            stored.plan,
            _topology(made_for, args.hbm_gib),
            given.sharders,
            batch_size=batch_size,
            constraints=_constraints(made_for, batch_size),
            pipeline_type=args.pipeline or made_for.pipeline_type,
        )
    print(report)
    if args.json:
        write_json(report.to_json(), args.json)
    return 0 if report.runs else 1


def _topology(made_for: PlanFingerprint, hbm_gib: float | None) -> Topology:
    if hbm_gib is not None and not 0 < hbm_gib < math.inf:
        raise ConfigError(f"--hbm-gib must be above 0 and finite, got {hbm_gib}")
    topology = Topology(
        world_size=made_for.world_size,
        local_world_size=made_for.local_world_size,
        compute_device=made_for.compute_device,
    )
    tier = "ddr" if made_for.compute_device == "cpu" else "hbm"
    for device, size in zip(topology.devices, made_for.memory_bytes, strict=True):
        sizes = {tier: size if hbm_gib is None else int(hbm_gib * _GIB)}
        if made_for.host_memory_bytes is not None:
            sizes["ddr"] = made_for.host_memory_bytes[device.rank]
        device.storage = dataclasses.replace(device.storage, **sizes)
    return with_sharding_group(topology, made_for.sharding_group)


def _constraints(
    made_for: PlanFingerprint, batch_size: int
) -> dict[str, ParameterConstraints]:
    """Ids per sample and samples of each table, as the plan was made for."""
    known: dict[str, list[float]] = {}
    batch_sizes: dict[str, list[int]] = {}
    for table in made_for.tables:
        factor = (made_for.pooling_factors or {}).get(table.full_name)
        sizes = (made_for.batch_sizes or {}).get(table.full_name)
        shares = [1.0] * max(1, len(table.feature_names))
        if sizes and made_for.batch_size:
            shares = [size / made_for.batch_size for size in sizes]
            batch_sizes[table.name] = [max(1, round(s * batch_size)) for s in shares]
        if factor is not None:
            known[table.name] = [factor / sum(shares)] * len(shares)
    return {
        name: ParameterConstraints(
            pooling_factors=factors, batch_sizes=batch_sizes.get(name)
        )
        for name, factors in known.items()
    }
