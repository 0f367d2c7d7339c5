"""`neuroshard plan` and `sweep`: plan a model or a file of tables."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from torchrec_neuroshard.commands.files import (
    devices_named,
    given_figures,
    read_files,
)
from torchrec_neuroshard.commands.options import (
    add_devices,
    add_outputs,
    add_planner,
    check_files,
    examples,
    flag,
    loading,
    one_of,
    option,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.search import SEARCHES, SearchConfig
from torchrec_neuroshard.search.base import BOUNDS

_CELL_SECONDS = 3.0
"""Search budget of a cell. Less than a plan gets that is meant to run."""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard plan`."""
    default = SearchConfig()
    both = "the default search, and again of TorchRec's planner with --compare,"
    search = add_planner(parser, default.time_budget_seconds, both)
    text = "ranks of tables, as JSON or YAML: pin, together, apart, forbid_ranks"
    option(search, "--placement", Path, text, metavar="FILE")
    searches = sorted(SEARCHES)
    text = f"search method: {', '.join(searches)}"
    kind = one_of(searches, "searches")
    option(search, "--search", kind, text, "default", metavar="NAME")
    text = (
        "effort for a lower bound on the time of every plan, which estimates of cards "
        f"have: {', '.join(BOUNDS)}"
    )
    kind = one_of(BOUNDS, "efforts")
    option(search, "--bound", kind, text, default.bound, metavar="EFFORT")
    add_devices(parser)
    output = add_outputs(parser)
    flag(output, "--compare", "compare with the plan of TorchRec's planner")
    flag(output, "--rehearse", "build every rank, without its device")
    text = "write the plan, for load_plan and 'neuroshard show'"
    option(output, "--out", Path, text, metavar="FILE")
    examples(
        parser,
        "plan tables.csv --card h100 --ranks 16 --batch-size 4096 --compare",
        "plan package.module:make_model --ranks 8 --out plan.json --html plan.html",
        "plan - --sequences history --host-memory-gb 2000 < tables.csv",
    )


def run_plan(args: argparse.Namespace) -> int:
    """Plan; return 1 if a rank lacks memory, or cannot run the plan when rehearsed.

    Raises:
        InfeasibleError: No plan fits.
        NeuroShardError: An option or a file cannot be used.
    """
    check_files(args, "profiles", "constraints", "placement")
    if args.seconds is not None and not (args.search == "default" or args.compare):
        raise ConfigError(
            f"--seconds limits the default search, but --search is '{args.search}'; "
            "leave one out"
        )
    limits = SearchConfig(bound=args.bound)
    if args.seconds is not None:
        limits = dataclasses.replace(limits, time_budget_seconds=args.seconds)
    per_node, figures = args.ranks_per_node, given_figures(args)
    devices = devices_named(args.card, args.ranks, per_node, **figures)
    files = read_files(args, args.ranks)
    with loading():
        from torchrec_neuroshard.commands.plan_run import plan
    return plan(args, files, devices, limits)


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard sweep`."""
    add_planner(parser, _CELL_SECONDS, "each cell's search")
    add_devices(parser, many=True, ranks="8,16,32")
    text = "write all cells as CSV; - prints them"
    option(add_outputs(parser), "--csv", Path, text, metavar="FILE")
    examples(
        parser,
        "sweep tables.csv --card h100,b200 --ranks 8,16,32 --batch-size 2048,4096",
        "sweep tables.csv --ranks 8,16 --json - | jq '.cells[0]'",
    )


def run_sweep(args: argparse.Namespace) -> int:
    """Plan every cell; return 1 if none fits.

    Raises:
        KeyboardInterrupt: The cells planned until then were shown and written.
        NeuroShardError: An option or a file cannot be used.
    """
    check_files(args, "profiles", "constraints")
    per_node, figures = args.ranks_per_node, given_figures(args)
    devices = [
        devices_named(card, ranks, per_node, **figures)
        for card in args.card
        for ranks in args.ranks
    ]
    seconds = _CELL_SECONDS if args.seconds is None else args.seconds
    files = read_files(args, max(args.ranks))
    with loading():
        from torchrec_neuroshard.commands.plan_run import sweep
    return sweep(args, files, devices, seconds)
