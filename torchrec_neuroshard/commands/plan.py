"""`neuroshard plan` and `sweep`: a model or a file of tables in, plans out."""

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
    NO_CODEC,
    check_codecs,
    coded_sharders,
    why_left_out,
)
from torchrec_neuroshard.commands.inputs import (
    GivenModel,
    devices_named,
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
    list_of,
    option,
    write_outputs,
)
from torchrec_neuroshard.errors import ConfigError, suggestion
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.topology import group_topology
from torchrec_neuroshard.planner.torchrec_plan import stock_plan
from torchrec_neuroshard.plans.plan_files import save_plan
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.report import PlanComparison, Rehearsal, Sweep, SweepCell
from torchrec_neuroshard.report.page import Report
from torchrec_neuroshard.search import SEARCHES, SearchConfig
from torchrec_neuroshard.search.base import BOUNDS

STRIDED, ADJACENT = "strided", "adjacent"
"""How sharding groups are dealt out: `use_inter_host_allreduce` False and True."""
_CELL_SECONDS = 3.0
"""For the search of a cell: less than for a plan that is to run."""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard plan`."""
    default = SearchConfig()
    both = "the default search, and again TorchRec's planner,"
    add_planner(parser, default.time_budget_seconds, both)
    add_devices(parser)
    text = "JSON or YAML: ranks of tables (pin, together, apart, forbid_ranks)"
    option(parser, "--placement", Path, text)
    kinds = sorted(SEARCHES)
    option(parser, "--search", str, "what finds placements", "default", choices=kinds)
    text = "how hard to look for a time that no plan can be below"
    option(parser, "--bound", str, text, default.bound, choices=BOUNDS)
    text = "compare the plan with the one of TorchRec's planner"
    parser.add_argument("--compare", action="store_true", help=text)
    text = "build every rank without its device"
    parser.add_argument("--rehearse", action="store_true", help=text)
    option(parser, "--out", Path, "write the plan there, for load_plan")
    add_outputs(parser)


def run_plan(args: argparse.Namespace) -> int:
    """Plan; 1 where a rank lacks memory for the plan, or cannot run it as rehearsed.

    Raises:
        InfeasibleError: No plan fits.
        NeuroShardError: Something that is given cannot be used.
    """
    if args.batch_size == 0:  # TorchRec's planner takes its default for it
        raise ConfigError("--batch-size is the samples per rank, at least 1; got 0")
    check_files(args, "profiles", "constraints", "placement")
    is_default = args.search == "default"
    if args.seconds is not None and not (is_default or args.compare):
        raise ConfigError(f"--seconds is for the default search, not '{args.search}'")
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
        inputs: dict[str, Any] = {
            "topology": planner.topology,
            "batch_size": planner.batch_size,
            "constraints": planner.constraints,
        }
        if args.compare:
            with phase("comparing with TorchRec's planner"):
                compared = _compared(planner, given, limits.time_budget_seconds, inputs)
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
    print(f"{args.model}: planned for {args.ranks} x {args.card} in {seconds:.1f} s")
    print(*filter(None, (report, compared, rehearsed)), sep="\n\n")
    if args.out:
        save_plan(plan, args.out, model=given.module, planner=planner)
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
    """Compare the plan with that of TorchRec's own planner; else say why not."""
    start = time.monotonic()
    try:
        theirs = stock_plan(
            given.module,
            given.sharders,
            planner.enumerator.last_stored_search_space or (),
            timeout_seconds=seconds,
            debug=False,
            stats=[],
            **inputs,
        )
    except PlannerError as error:
        return (
            f"TorchRec's planner has no plan after {seconds:g} s: {_first_line(error)}"
            ". Raise --seconds where it gave up for want of time"
        )
    compared = planner.compare(
        theirs, given.module, given.sharders, "TorchRec's own plan"
    )
    if time.monotonic() - start <= seconds:
        return compared
    text = (
        f"TorchRec's planner was stopped after {seconds:g} s: this is the best plan "
        "that it had; --seconds gives it longer"
    )
    return dataclasses.replace(compared, notes=(Note("comparison", text),))


def _first_line(error: PlannerError) -> str:
    return str(error).strip().partition("\n")[0]


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard sweep`."""
    add_planner(parser, _CELL_SECONDS, "the search of each cell")
    add_devices(parser, many=True, ranks="8,16,32")
    text = "ranks of a sharding group to try as well, such as 4,8"
    option(parser, "--group-sizes", list_of(int), text)
    text = "of groups: strided (averages stay in a node) or adjacent (groups do)"
    option(parser, "--layouts", list_of(str), text, STRIDED)
    text = "of collectives to try: none, fp16, bf16, fp8, int8, mx4"
    option(parser, "--codecs", list_of(str), text, NO_CODEC)
    text = "iterations from one average of the groups to the next"
    option(parser, "--sync-interval", int, text, 1)
    option(parser, "--csv", Path, "write all cells there")


def run_sweep(args: argparse.Namespace) -> int:
    """Plan every cell; 1 where none fits.

    Raises:
        NeuroShardError: Something that is given cannot be used.
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
    with planning(args.model), phase("planning") as shown:
        for topology, where in cells:
            shown.text = f"planning: {len(found)} of {len(cells)} done"
            codec, device_type = where["codec"], str(topology.compute_device)
            sharders = coded_sharders(given.sharders, codec, device_type)
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
                found.append(SweepCell(obstacle=_first_line(error), **where))
            except ConfigError as error:
                if codec == NO_CODEC:
                    raise
                left_out.append(f"{codec} at {where['num_ranks']} ranks: {error}")
            else:
                found.append(SweepCell.of(planner.report(), **where))
    swept = Sweep(
        cells=tuple(found),
        left_out=tuple(dict.fromkeys(left_out)),
        search_seconds=config.time_budget_seconds,
        sync_interval=args.sync_interval,
    )
    print(swept)
    write_outputs(args, swept)
    return 0 if any(cell.fits for cell in swept.cells) else 1


def _cells(
    args: argparse.Namespace,
) -> tuple[list[tuple[Topology, dict[str, Any]]], list[str]]:
    """Return the devices of each cell and what it is for, and what is not tried.

    Raises:
        ConfigError: There are no such devices, batches, codecs or groups.
    """
    check_codecs(args.codecs)
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
            f"--codecs leaves nothing to try: {'; '.join(dict.fromkeys(left_out))}. "
            f"Add '{NO_CODEC}'"
        )
    return found, left_out


def _devices(args: argparse.Namespace) -> Iterator[tuple[Topology, dict[str, Any]]]:
    """Yield the devices of cells without codecs, and what each is for.

    Raises:
        ConfigError: There are no such devices, batches or groups.
    """
    sizes = args.group_sizes or []
    for size in sizes:
        if not any(0 < size <= ranks and ranks % size == 0 for ranks in args.ranks):
            raise ConfigError(
                f"--group-sizes has {size}, which is no part of any of the --ranks "
                f"{', '.join(map(str, args.ranks))}: take a divisor of one"
            )
    for layout in (each for each in args.layouts if each not in (STRIDED, ADJACENT)):
        near = suggestion(layout, (STRIDED, ADJACENT), "layouts")
        raise ConfigError(f"--layouts has '{layout:.60}', which is no layout; {near}")
    batches = args.batch_size or [BATCH_SIZE]
    if min(batches) < 1:
        raise ConfigError(f"--batch-size must be above 0, got {min(batches)}")
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
