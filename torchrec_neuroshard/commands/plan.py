"""`neuroshard plan` and `sweep`: plan a model or a file of tables."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import PlannerError, Topology

from torchrec_neuroshard.commands.codecs import (
    CODECS,
    NO_CODEC,
    coded_sharders,
    why_left_out,
)
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
    list_of,
    one_of,
    option,
    show,
    whole,
    write_outputs,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import write_whole
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.groups import group_topology
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.torchrec_plan import stock_plan
from torchrec_neuroshard.plans.plan_files import save_plan
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.report import PlanComparison, Rehearsal, Sweep, SweepCell
from torchrec_neuroshard.report.page import Report
from torchrec_neuroshard.search import SEARCHES, SearchConfig
from torchrec_neuroshard.search.base import BOUNDS

STRIDED, ADJACENT = "strided", "adjacent"
"""Layouts of sharding groups: `use_inter_host_allreduce` False and True."""
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
    text = "also try sharding groups of these numbers of ranks, such as 4,8"
    option(parser, "--group-sizes", list_of(whole()), text, metavar="N,N")
    text = (
        f"group layouts: {STRIDED} keeps averaging inside a node, {ADJACENT} keeps a "
        "group inside a node"
    )
    layouts = list_of(one_of((STRIDED, ADJACENT), "layouts"))
    option(parser, "--layouts", layouts, text, STRIDED, metavar="NAME,NAME")
    text = f"codecs of collectives: {', '.join(CODECS)}"
    codecs = list_of(one_of(CODECS, "codecs"))
    option(parser, "--codecs", codecs, text, NO_CODEC, metavar="NAME,NAME")
    text = "iterations between two averages of the groups"
    option(parser, "--sync-interval", whole(), text, 1, metavar="N")
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
    cells, left_out = _cells(args)
    arguments = planner_arguments(args, given)
    config = SearchConfig(
        time_budget_seconds=_CELL_SECONDS if args.seconds is None else args.seconds,
        bound="thorough",
        progress=lambda best_ms: None,
    )
    found: list[SweepCell] = []

    def swept() -> Sweep:
        return Sweep(
            cells=tuple(found),
            left_out=tuple(dict.fromkeys(left_out)),
            search_seconds=config.time_budget_seconds,
            sync_interval=args.sync_interval,
        )

    number, interrupted = 0, None
    try:
        with planning(args.model), phase("planning") as shown:
            for number, (topology, where) in enumerate(cells):
                shown.text = f"planning: {number} of {len(cells)} done"
                try:
                    found.append(_planned(given, topology, where, config, arguments))
                except ConfigError as error:
                    if where["codec"] == NO_CODEC:
                        raise
                    ranks = where["num_ranks"]
                    left_out.append(f"{where['codec']} at {ranks} ranks: {error}")
                if args.csv:  # whatever ends this process, the rows are kept
                    write_whole(args.csv, swept().to_csv())
    except KeyboardInterrupt as interrupt:
        if not found:
            raise
        interrupted = interrupt
        missing = f"{len(cells) - number} of {len(cells)} cells"
        left_out.append(f"{missing}, since the command was interrupted")
    show(args, swept())
    write_outputs(args, swept())
    if interrupted is not None:
        raise interrupted
    return 0 if any(cell.fits for cell in found) else 1


def _planned(
    given: GivenModel,
    topology: Topology,
    where: dict[str, Any],
    config: SearchConfig,
    arguments: dict[str, Any],
) -> SweepCell:
    """Plan one cell.

    Raises:
        ConfigError: The codec cannot be used, or an option cannot.
    """
    device_type = str(topology.compute_device)
    sharders = coded_sharders(given.sharders, where["codec"], device_type)
    planner = NeuroShardPlanner(
        topology=topology,
        batch_size=where["batch_size"],
        search=config,
        strict_memory=True,
        **arguments,
    )
    try:
        planner.plan(given.module, sharders)
    except PlannerError as error:
        return SweepCell(obstacle=first_line(error), **where)
    return SweepCell.of(planner.report(), **where)


def _cells(
    args: argparse.Namespace,
) -> tuple[list[tuple[Topology, dict[str, Any]]], list[str]]:
    """Return each cell's devices and labels, and the codecs that are left out.

    Raises:
        ConfigError: The devices or groups do not exist, or no codec is left.
    """
    found, left_out = [], []
    for topology, where in _devices(args):
        for codec in args.codecs:
            size, kind = where["group_size"], str(topology.compute_device)
            if reason := why_left_out(codec, kind, size):
                left_out.append(f"{codec}: {reason}")
            else:
                found.append((topology, {**where, "codec": codec}))
    if not found:
        raise ConfigError(
            f"none of the --codecs can be tried: {'; '.join(dict.fromkeys(left_out))}. "
            f"Add '{NO_CODEC}'"
        )
    return found, left_out


def _devices(args: argparse.Namespace) -> Iterator[tuple[Topology, dict[str, Any]]]:
    """Yield the devices and labels of cells, before codecs.

    Raises:
        ConfigError: The devices or groups do not exist.
    """
    sizes = args.group_sizes or []
    for size in sizes:
        if not any(ranks % size == 0 for ranks in args.ranks):
            raise ConfigError(
                f"--group-sizes {size} divides none of the --ranks "
                f"{', '.join(map(str, args.ranks))}; give a divisor"
            )
    batches = args.batch_size or [BATCH_SIZE]
    for card, ranks, batch in itertools.product(args.card, args.ranks, batches):
        topology = devices_named(card, ranks, args.ranks_per_node, args.memory_gb)
        where = {"card": card, "num_ranks": ranks, "batch_size": batch}
        yield topology, {**where, "group_size": ranks}
        for size, layout in itertools.product(sizes, args.layouts):
            if size < ranks and ranks % size == 0:
                grouped = group_topology(
                    topology,
                    size,
                    sync_interval=args.sync_interval,
                    use_inter_host_allreduce=layout == ADJACENT,
                )
                yield grouped, {**where, "group_size": size, "layout": layout}
