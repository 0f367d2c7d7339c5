"""`neuroshard show`, `diff`, `rehearse` and `reshard`: use saved plans."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_neuroshard.commands.files import check_checkpoint, find_model
from torchrec_neuroshard.commands.options import (
    add_model,
    add_outputs,
    check_files,
    examples,
    flag,
    loading,
    number,
    option,
    show,
    whole,
    write_outputs,
)
from torchrec_neuroshard.errors import CheckpointError, ConfigError
from torchrec_neuroshard.files import check_folder, check_outputs
from torchrec_neuroshard.plans.stored_plan import StoredPlan, read_plan
from torchrec_neuroshard.progress import phase

_PLAN_HELP = "plan file, from 'neuroshard plan --out' or save_plan"
_PIPED_HELP = f"{_PLAN_HELP}; - for standard input"


def _read(path: Path) -> StoredPlan:
    """Read a plan file; "-" is standard input."""
    return read_plan("/dev/stdin" if path == Path("-") else path)


def add_show(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard show`."""
    parser.add_argument("plan", type=Path, help=_PIPED_HELP)
    add_outputs(parser)
    examples(parser, "show plan.json", "show plan.json --html plan.html")


def run_show(args: argparse.Namespace) -> int:
    """Show a saved plan.

    Raises:
        PlanFileError: The file cannot be used.
    """
    check_files(args, "plan")
    with phase("reading the plan"):
        stored = _read(args.plan)
        report = stored.report()
    print(f"{args.plan}: {stored.made_for}")
    show(args, report)
    write_outputs(args, report, f"Plan {args.plan}")
    return 0


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard diff`."""
    parser.add_argument("first", type=Path, help=_PIPED_HELP)
    parser.add_argument("second", type=Path, help="plan file of the same tables")
    add_outputs(parser)
    examples(parser, "diff old.json new.json")


def run_diff(args: argparse.Namespace) -> int:
    """Compare two saved plans: moved tables, bytes and milliseconds.

    Raises:
        PlanFileError: A file cannot be used, or the plans are of different tables.
    """
    check_files(args, "first", "second")
    names = str(args.first), str(args.second)
    with phase("comparing the plans"):
        found = _read(args.first).compared_to(_read(args.second), names)
    show(args, found)
    write_outputs(args, found, " and ".join(names))
    return 0


def add_rehearse(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard rehearse`."""
    parser.add_argument("plan", type=Path, help=_PIPED_HELP)
    add_model(parser)
    devices = parser.add_argument_group("devices")
    text = "samples per rank (default: the plan's)"
    option(devices, "--batch-size", whole(), text, metavar="N")
    text = "memory of a device in GB (default: the plan's)"
    option(devices, "--memory-gb", number(), text, metavar="GB")
    examples(parser, "rehearse plan.json tables.csv --memory-gb 40")
    flag(parser, "--verbose", "print every rank's memory")
    option(parser, "--json", Path, "write the report as JSON", metavar="FILE")


def run_rehearse(args: argparse.Namespace) -> int:
    """Rehearse; return 1 if a rank cannot run the plan.

    Raises:
        NeuroShardError: The plan file or the model cannot be used.
    """
    check_files(args, "plan")
    with phase("reading the plan"):
        stored = _read(args.plan)
    batch_size = args.batch_size or stored.fingerprint.batch_size
    if batch_size is None:
        raise ConfigError(
            f"plan file '{args.plan}' does not hold its batch size; pass --batch-size"
        )
    model = find_model(args.model, args.sequences)
    with loading():
        from torchrec_neuroshard.commands.stored_run import rehearse_stored
    return rehearse_stored(args, stored, model, batch_size)


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
    examples(
        parser,
        "reshard checkpoint --to plan.json --dry-run",
        "reshard checkpoint --to plan.json --out checkpoint-new",
    )


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
    stored = read_plan(args.to)
    check_checkpoint(args.checkpoint)
    if args.out is not None:
        if args.out.exists():
            raise CheckpointError(f"'{args.out}' exists. Name a new folder")
        check_folder(args.out)
    with loading():
        from torchrec_neuroshard.plans.plan_json import torchrec_plan
        from torchrec_neuroshard.plans.reshard import reshard
    report = reshard(args.checkpoint, torchrec_plan(stored), args.out, step=args.step)
    show(args, report)
    write_outputs(args, report)
    return 0
