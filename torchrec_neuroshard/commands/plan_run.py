"""The work of `neuroshard plan` and `sweep`, once torch is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import (
    PlannerError,
    StorageReservation,
    Topology,
)

from torchrec_neuroshard.commands.files import NamedDevices, PlannerFiles
from torchrec_neuroshard.commands.inputs import (
    GivenModel,
    first_line,
    made_model,
    planner_arguments,
    planning,
    reservation,
    topology_of,
)
from torchrec_neuroshard.commands.options import show, write_outputs
from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.torchrec_plan import stock_plan
from torchrec_neuroshard.plans.plan_files import save_plan
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.report import PlanComparison, Rehearsal, Sweep, SweepCell
from torchrec_neuroshard.report.page import Report
from torchrec_neuroshard.search import SearchConfig


def plan(
    args: argparse.Namespace,
    files: PlannerFiles,
    devices: NamedDevices,
    limits: SearchConfig,
) -> int:
    """Plan, show and write what the options of `neuroshard plan` ask for.

    Args:
        args: The options.
        files: What the files hold that they name.
        devices: What to plan for.
        limits: Settings of the default search.

    Returns:
        The exit code.
    """
    with phase("reading the model"):
        given = made_model(files.model)
    compared: PlanComparison | str | None = None
    rehearsed: Rehearsal | None = None
    start = time.monotonic()
    with planning(args.model):
        with phase("loading the cost model"):
            planner = NeuroShardPlanner(
                topology=topology_of(devices),
                batch_size=args.batch_size,
                search=limits if args.search == "default" else args.search,
                **planner_arguments(args, files, given),
            )
        with phase("planning"):
            made = planner.plan(given.module, given.sharders)
            seconds = time.monotonic() - start
            report = planner.report()
    # Comparing and rehearsing may take long, and may be interrupted.
    print(f"{args.model}: planned for {args.ranks} x {args.card} in {seconds:.1f} s")
    show(args, report, more_follows=args.compare or args.rehearse)
    if args.out:
        save_plan(made, args.out, model=given.module, planner=planner)
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
                reserved = reservation(args)
                compared = _compared(planner, given, limit, inputs, reserved)
        if args.rehearse:
            with phase("rehearsing every rank"):
                rehearsed = rehearse(
                    given.module,
                    made,
                    sharders=given.sharders,
                    profiles=planner.profiles,
                    pipeline_type=args.pipeline,
                    **inputs,
                )
    if args.compare or args.rehearse:
        show(args, compared, rehearsed)
    reports = {"plan": report, "compared": compared, "rehearsed": rehearsed}
    data = {name: r.to_json() for name, r in reports.items() if isinstance(r, Report)}
    shown = compared if isinstance(compared, PlanComparison) else report
    write_outputs(args, shown, f"Plan of {args.model}", data)
    return 0 if report.fits and (rehearsed is None or rehearsed.runs) else 1


def _compared(
    planner: NeuroShardPlanner,
    given: GivenModel,
    seconds: float,
    inputs: dict[str, Any],
    reservation: StorageReservation | None,
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
            storage_reservation=reservation,
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


def sweep(
    args: argparse.Namespace,
    files: PlannerFiles,
    devices: Sequence[NamedDevices],
    seconds: float,
) -> int:
    """Plan every cell, show and write what the options of `neuroshard sweep` ask for.

    Args:
        args: The options.
        files: What the files hold that they name.
        devices: What to plan for; with every batch size they are the cells.
        seconds: Search budget of a cell.

    Returns:
        The exit code.

    Raises:
        KeyboardInterrupt: The cells planned until then were shown and written.
    """
    with phase("reading the model"):
        given = made_model(files.model)
    cells = [
        (
            topology_of(each),
            {"card": each.card, "num_ranks": each.num_ranks, "batch_size": batch},
        )
        for each in devices
        for batch in args.batch_size or [BATCH_SIZE]
    ]
    arguments = planner_arguments(args, files, given)
    config = SearchConfig(
        time_budget_seconds=seconds, bound="thorough", progress=lambda best_ms: None
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
    write_outputs(args, swept, f"Sweep of {args.model}")
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
