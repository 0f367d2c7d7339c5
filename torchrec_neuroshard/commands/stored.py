"""`neuroshard show`, `diff`, `rehearse` and `reshard`: use saved plans."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from torchrec.distributed.planner.types import ParameterConstraints, Topology

from torchrec_neuroshard.commands.inputs import planning, read_model
from torchrec_neuroshard.commands.options import (
    add_model,
    add_outputs,
    check_files,
    flag,
    number,
    option,
    show,
    whole,
    write_outputs,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import check_outputs
from torchrec_neuroshard.planner.groups import with_sharding_group
from torchrec_neuroshard.plans.plan_json import torchrec_plan
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.plans.reshard import reshard
from torchrec_neuroshard.plans.stored_plan import PlanFingerprint, read_plan
from torchrec_neuroshard.progress import phase

_GB = 10**9
_PLAN_HELP = "plan file, from 'neuroshard plan --out' or save_plan"


def add_show(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard show`."""
    parser.add_argument("plan", type=Path, help=_PLAN_HELP)
    add_outputs(parser)


def run_show(args: argparse.Namespace) -> int:
    """Show a saved plan.

    Raises:
        PlanFileError: The file cannot be used.
    """
    check_files(args, "plan")
    with phase("reading the plan"):
        stored = read_plan(args.plan)
        report = stored.report()
    print(f"{args.plan}: {stored.made_for}")
    show(args, report)
    write_outputs(args, report, f"Plan {args.plan}")
    return 0


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard diff`."""
    parser.add_argument("first", type=Path, help=_PLAN_HELP)
    parser.add_argument("second", type=Path, help="plan file of the same tables")
    add_outputs(parser)


def run_diff(args: argparse.Namespace) -> int:
    """Compare two saved plans: moved tables, bytes and milliseconds.

    Raises:
        PlanFileError: A file cannot be used, or the plans are of different tables.
    """
    check_files(args, "first", "second")
    names = str(args.first), str(args.second)
    with phase("comparing the plans"):
        found = read_plan(args.first).compared_to(read_plan(args.second), names)
    show(args, found)
    write_outputs(args, found, " and ".join(names))
    return 0


def add_rehearse(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard rehearse`."""
    parser.add_argument("plan", type=Path, help=_PLAN_HELP)
    add_model(parser)
    text = "samples per rank (default: the plan's)"
    option(parser, "--batch-size", whole(), text, metavar="N")
    text = "memory of a device in GB (default: the plan's)"
    option(parser, "--memory-gb", number(), text, metavar="GB")
    flag(parser, "--verbose", "print every rank's memory")
    option(parser, "--json", Path, "write the report as JSON", metavar="FILE")


def run_rehearse(args: argparse.Namespace) -> int:
    """Rehearse; return 1 if a rank cannot run the plan.

    Raises:
        NeuroShardError: The plan file or the model cannot be used.
    """
    check_files(args, "plan")
    with phase("reading the plan"):
        made_for = (stored := read_plan(args.plan)).fingerprint
    batch_size = made_for.batch_size if args.batch_size is None else args.batch_size
    if batch_size is None:
        raise ConfigError(
            f"plan file '{args.plan}' does not hold its batch size; pass --batch-size"
        )
    with phase("reading the model"):
        given = read_model(args.model)
    with planning(args.model), phase("rehearsing every rank"):
        report = rehearse(
            given.module,
            torchrec_plan(stored),
            _devices(made_for, args.memory_gb),
            given.sharders,
            batch_size=batch_size,
            constraints=_constraints(made_for, batch_size),
            pipeline_type=args.pipeline or made_for.pipeline_type,
        )
    show(args, report)
    write_outputs(args, report)
    return 0 if report.runs else 1


def add_reshard(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard reshard`."""
    text = "folder of torch.distributed.checkpoint.save"
    parser.add_argument("checkpoint", type=Path, help=text)
    option(parser, "--to", Path, _PLAN_HELP, required=True, metavar="PLAN")
    option(parser, "--out", Path, "new folder for the checkpoint", metavar="FOLDER")
    flag(parser, "--dry-run", "only say what would change")
    text = "iterations trained, for tables that become data-parallel"
    option(parser, "--step", whole(0), text, metavar="N")
    flag(parser, "--verbose", "print every table that changes")
    option(parser, "--json", Path, "write the report as JSON", metavar="FILE")


def run_reshard(args: argparse.Namespace) -> int:
    """Turn a checkpoint into one for another plan.

    Raises:
        NeuroShardError: The checkpoint or the plan cannot be used.
    """
    if args.out is None and not args.dry_run:
        raise ConfigError("pass the new folder as --out, or --dry-run")
    check_outputs(args.json, read=[args.to])
    if args.dry_run:
        args.out = None
    report = reshard(args.checkpoint, args.to, args.out, step=args.step)
    show(args, report)
    write_outputs(args, report)
    return 0


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
