"""`neuroshard plan` and `sweep`: plan a model or a file of tables."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import PlannerError, Topology

from torchrec_neuroshard.commands.inputs import (
    GivenModel,
    devices_named,
    first_line,
    planner_arguments,
    planning,
    read_model,
    read_placement,
)
from torchrec_neuroshard.commands.options import (
    add_devices,
    add_outputs,
    add_planner,
    check_files,
    flag,
    one_of,
    option,
    show,
    write_outputs,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.torchrec_plan import stock_plan
from torchrec_neuroshard.plans.plan_files import save_plan
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.report import PlanComparison, Rehearsal, Sweep, SweepCell
from torchrec_neuroshard.report.page import Report
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
    is_default = args.search == "default"
    if args.seconds is not None and not (is_default or args.compare):
        raise ConfigError(
            f"--seconds limits the default search, but --search is '{args.search}'; "
            "leave one out"
        )
    limits = SearchConfig(bound=args.bound)
    if args.seconds is not None:
        limits = dataclasses.replace(limits, time_budget_seconds=args.seconds)
    with phase("reading the model"):
        given = read_model(args.model)
    placement = None if args.placement is None else read_placement(args.placement)
    compared: PlanComparison | str | None = None
    rehearsed: Rehearsal | None = None
    start = time.monotonic()
    with planning(args.model):
        with phase("loading the cost model"):
            planner = NeuroShardPlanner(
                topology=devices_named(
                    args.card, args.ranks, args.ranks_per_node, args.memory_gb
                ),
                batch_size=args.batch_size,
                search=limits if is_default else args.search,
                placement_constraints=placement,
                **planner_arguments(args, given),
            )
        with phase("planning"):
            plan = planner.plan(given.module, given.sharders)
            seconds = time.monotonic() - start
            report = planner.report()
    # Comparing and rehearsing may take long, and may be interrupted.
    print(f"{args.model}: planned for {args.ranks} x {args.card} in {seconds:.1f} s")
    show(args, report, more_follows=args.compare or args.rehearse)
    if args.out:
        save_plan(plan, args.out, model=given.module, planner=planner)
    with planning(args.model):
        inputs: dict[str, Any] = {
            "topology": planner.topology,
            "batch_size": planner.batch_size,
            "constraints": planner.constraints,
        }
        if args.compare:
            limit = limits.time_budget_seconds
            text = f"comparing with TorchRec's planner, which has {limit:g} s, too"
            with phase(text):
                compared = _compared(planner, given, limit, inputs)
        if args.rehearse:
            with phase("rehearsing every rank"):
                rehearsed = rehearse(
                    given.module,
                    plan,
                    sharders=given.sharders,
                    profiles=planner.profiles,
                    pipeline_type=args.pipeline,
                    **inputs,
                )
    if args.compare or args.rehearse:
        show(args, compared, rehearsed)
    made = {"plan": report, "compared": compared, "rehearsed": rehearsed}
    data = {name: r.to_json() for name, r in made.items() if isinstance(r, Report)}
    shown = compared if isinstance(compared, PlanComparison) else report
    write_outputs(args, shown, f"Plan of {args.model}", data)
    return 0 if report.fits and (rehearsed is None or rehearsed.runs) else 1


def _compared(
    planner: NeuroShardPlanner,
    given: GivenModel,
    seconds: float,
    inputs: dict[str, Any],
) -> PlanComparison | str:
    """Compare with the plan of TorchRec's planner; return why not if it has none."""
    start = time.monotonic()
    try:
        theirs = stock_plan(
            given.module,
            given.sharders,
            planner.enumerator.all_options(given.module, given.sharders),
            timeout_seconds=seconds,
            debug=False,
            stats=[],
            **inputs,
        )
    except PlannerError as error:
        return (
            f"TorchRec's planner has no plan after {seconds:g} s: {first_line(error)}"
            ". If it ran out of time, raise --seconds"
        )
    compared = planner.compare(
        theirs, given.module, given.sharders, "TorchRec's own plan"
    )
    if (taken := time.monotonic() - start) <= seconds:
        return compared
    text = (
        f"TorchRec's planner took {taken:.0f} s and was stopped, since it had "
        f"{seconds:g} s; this is its best plan so far. --seconds gives it longer"
    )
    return dataclasses.replace(compared, notes=(Note("comparison", text),))


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
    with phase("reading the model"):
        given = read_model(args.model)
    cells = [
        (
            devices_named(card, ranks, args.ranks_per_node, args.memory_gb),
            {"card": card, "num_ranks": ranks, "batch_size": batch},
        )
        for card in args.card
        for ranks in args.ranks
        for batch in args.batch_size or [BATCH_SIZE]
    ]
    arguments = planner_arguments(args, given)
    config = SearchConfig(
        time_budget_seconds=_CELL_SECONDS if args.seconds is None else args.seconds,
        bound="thorough",
        progress=lambda best_ms: None,
    )
    swept = Sweep(cells=(), search_seconds=config.time_budget_seconds)
    interrupted = None
    try:
        with planning(args.model), phase("planning") as shown:
            for topology, where in cells:
                shown.text = f"planning: {len(swept.cells)} of {len(cells)} done"
                cell = _planned(given, topology, where, config, arguments)
                swept = dataclasses.replace(swept, cells=(*swept.cells, cell))
                if args.csv:  # whatever ends this process, the rows are kept
                    write_whole(args.csv, swept.to_csv())
    except KeyboardInterrupt as interrupt:
        if not swept.cells:
            raise
        interrupted = interrupt
        missing = f"{len(cells) - len(swept.cells)} of {len(cells)} cells"
        text = f"{missing}, since the command was interrupted"
        swept = dataclasses.replace(swept, left_out=text)
    show(args, swept)
    write_outputs(args, swept)
    if interrupted is not None:
        raise interrupted
    return 0 if any(cell.fits for cell in swept.cells) else 1


def _planned(
    given: GivenModel,
    topology: Topology,
    where: dict[str, Any],
    config: SearchConfig,
    arguments: dict[str, Any],
) -> SweepCell:
    """Plan one cell.

    Raises:
        ConfigError: An option cannot be used.
    """
    planner = NeuroShardPlanner(
        topology=topology,
        batch_size=where["batch_size"],
        search=config,
        strict_memory=True,
        **arguments,
    )
    try:
        planner.plan(given.module, given.sharders)
    except PlannerError as error:
        return SweepCell(obstacle=first_line(error), **where)
    return SweepCell.of(planner.report(), **where)
