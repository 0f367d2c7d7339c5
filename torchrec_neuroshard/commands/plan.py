"""`neuroshard plan` and `sweep`: plan a model or a file of tables."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from torchrec_neuroshard.commands.files import devices_named, read_files
from torchrec_neuroshard.commands.options import (
    add_devices,
    add_outputs,
    add_planner,
    check_files,
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
    add_planner(parser, default.time_budget_seconds, both)
    add_devices(parser)
    text = "ranks of tables, as JSON or YAML: pin, together, apart, forbid_ranks"
    option(parser, "--placement", Path, text, metavar="FILE")
    searches = sorted(SEARCHES)
    text = f"search method: {', '.join(searches)}"
    kind = one_of(searches, "searches")
    option(parser, "--search", kind, text, "default", metavar="NAME")
    text = (
        "effort for a lower bound on the time of every plan, which estimates of cards "
        f"have: {', '.join(BOUNDS)}"
    )
    kind = one_of(BOUNDS, "efforts")
    option(parser, "--bound", kind, text, default.bound, metavar="EFFORT")
    flag(parser, "--compare", "compare with the plan of TorchRec's planner")
    flag(parser, "--rehearse", "build every rank, without its device")
    text = "write the plan, for load_plan and 'neuroshard show'"
    option(parser, "--out", Path, text, metavar="FILE")
    add_outputs(parser)


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
    devices = devices_named(args.card, args.ranks, args.ranks_per_node, args.memory_gb)
    files = read_files(args, args.ranks)
    with loading():
        from torchrec_neuroshard.commands.plan_run import plan
    return plan(args, files, devices, limits)


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard sweep`."""
    add_planner(parser, _CELL_SECONDS, "each cell's search")
    add_devices(parser, many=True, ranks="8,16,32")
    text = "print what the figures rest on"
    flag(parser, "--verbose", text)
    option(parser, "--csv", Path, "write all cells as CSV", metavar="FILE")


def run_sweep(args: argparse.Namespace) -> int:
    """Plan every cell; return 1 if none fits.

    Raises:
        KeyboardInterrupt: The cells planned until then were shown and written.
        NeuroShardError: An option or a file cannot be used.
    """
    check_files(args, "profiles", "constraints")
    devices = [
        devices_named(card, ranks, args.ranks_per_node, args.memory_gb)
        for card in args.card
        for ranks in args.ranks
    ]
    seconds = _CELL_SECONDS if args.seconds is None else args.seconds
    files = read_files(args, max(args.ranks))
    with loading():
        from torchrec_neuroshard.commands.plan_run import sweep
    return sweep(args, files, devices, seconds)
