"""`neuroshard plan`: a model or a file of tables in, a plan and its report out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrec.distributed.planner.types import PlannerError

from torchrec_neuroshard.commands.inputs import (
    MODEL_HELP,
    GivenModel,
    devices_named,
    read_constraints,
    read_model,
    read_placement,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.files import check_outputs, json_text, write_whole
from torchrec_neuroshard.planner.parts.shard_estimators import OutOfTimeError
from torchrec_neuroshard.planner.parts.torchrec_plan import stock_plan
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.plans.plan_files import save_plan
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.profiles import load_profiles
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.report import PlanComparison, Rehearsal, write_html
from torchrec_neuroshard.schedules import SCHEDULES
from torchrec_neuroshard.search import SEARCHES, SearchConfig
from torchrec_neuroshard.search.base import BOUNDS

__all__ = [
    "add_arguments",
    "add_planner_arguments",
    "files_read",
    "planner_arguments",
    "planning",
    "run",
    "write_json",
]


def add_planner_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every command that plans."""
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument(
        "--profiles", type=Path, help="features' profiles, as save_profiles writes them"
    )
    parser.add_argument(
        "--constraints", type=Path, help="JSON or YAML: table (or *) -> constraints"
    )
    parser.add_argument(
        "--cost-model",
        default="auto",
        help="auto, the name of a shipped bundle or of a card, or a bundle's folder",
    )
    parser.add_argument("--pipeline", choices=list(SCHEDULES), help="of the training")
    parser.add_argument(
        "--dense-ms", type=float, help="what the other layers take in an iteration"
    )


def files_read(args: argparse.Namespace) -> tuple[str | Path | None, ...]:
    """Return the files that these options name."""
    file, _, workload = args.model.rpartition(":")
    return file or workload, args.profiles, args.constraints


def planner_arguments(args: argparse.Namespace, given: GivenModel) -> dict[str, Any]:
    """Return what these options say, as `NeuroShardPlanner` takes it.

    Raises:
        NeuroShardError: A file cannot be used.
    """
    constraints = dict(given.constraints)
    if args.constraints is not None:
        constraints = read_constraints(args.constraints, given)
    profiles = dict(given.profiles)
    if args.profiles is not None:
        profiles |= load_profiles(args.profiles)
    measures = {} if args.cost_model == "measure" else {"calibrate": "never"}
    return {
        "constraints": constraints or None,
        "profiles": profiles,
        "cost_model": args.cost_model,
        "pipeline_type": args.pipeline,
        "dense_ms": args.dense_ms,
        "debug": False,
        "stats": [],
        **measures,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_planner_arguments(parser)
    parser.add_argument("--card", default="h100", help="of every rank, or cpu (h100)")
    parser.add_argument("--ranks", type=int, default=8, help="all of them (8)")
    parser.add_argument(
        "--ranks-per-node", type=int, help="as the card's nodes are sold, of CPUs all"
    )
    parser.add_argument("--memory-gb", type=float, help="of a GPU (as sold)")
    parser.add_argument("--batch-size", type=int, help="samples per rank (512)")
    parser.add_argument(
        "--placement", type=Path, help="JSON or YAML: pin, together, apart, ..."
    )
    parser.add_argument("--search", choices=sorted(SEARCHES), default="default")
    parser.add_argument(
        "--seconds",
        type=float,
        help="that the default search may take, and again TorchRec's planner (20 each)",
    )
    parser.add_argument(
        "--bound",
        choices=BOUNDS,
        default="none",
        help="compute how short any plan's path could be (none)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="set the plan beside it that TorchRec's planner makes in --seconds",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="build every rank without its device"
    )
    parser.add_argument("--out", type=Path, help="file for load_plan to take")
    parser.add_argument("--html", type=Path, help="write the report there as a page")
    parser.add_argument("--json", type=Path, help="write it there as JSON")


def run(args: argparse.Namespace) -> int:
    """Plan; 1 where some rank cannot run the plan as rehearsed.

    Raises:
        NeuroShardError: Something that is given cannot be used, or no plan fits.
    """
    if args.batch_size == 0:  # TorchRec's planner takes its default for it
        raise ConfigError("--batch-size is the samples per rank, at least 1; got 0")
    read = *files_read(args), args.placement
    outputs = check_outputs(args.out, args.html, args.json, read=read)
    with phase("reading the model"):
        given = read_model(args.model)
    search: str | SearchConfig = args.search
    limits = SearchConfig(bound=args.bound)
    if args.seconds is not None:
        if search != "default" and not args.compare:
            raise ConfigError(f"--seconds is for the default search, not '{search}'")
        limits = SearchConfig(time_budget_seconds=args.seconds, bound=args.bound)
    if search == "default":
        search = limits
    placement = None if args.placement is None else read_placement(args.placement)
    start = time.monotonic()
    compared: PlanComparison | str | None = None
    rehearsed: Rehearsal | None = None
    with planning(args.model):
        with phase("loading the cost model"):
            planner = NeuroShardPlanner(
                topology=devices_named(
                    args.card, args.ranks, args.ranks_per_node, args.memory_gb
                ),
                batch_size=args.batch_size,
                search=search,
                placement_constraints=placement,
                **planner_arguments(args, given),
            )
        with phase("planning"):
            plan = planner.plan(given.module, given.sharders)
            seconds = time.monotonic() - start
            report = planner.report()
        if args.compare:
            compared = _compared(planner, given, limits.time_budget_seconds)
        if args.rehearse:
            with phase("rehearsing every rank"):
                rehearsed = rehearse(
                    given.module,
                    plan,
                    planner.topology,
                    given.sharders,
                    profiles=planner.profiles,
                    pipeline_type=args.pipeline,
                    **_inputs(planner),
                )
    print(f"{args.model}: planned for {args.ranks} x {args.card} in {seconds:.1f} s")
    print(report)
    found: dict[str, Any] = {"plan": report.to_json()}
    shown: Any = report
    if compared is not None:
        print(f"\n{compared}")
    if isinstance(compared, PlanComparison):
        shown, found["compared"] = compared, compared.to_json()
    if rehearsed is not None:
        print(f"\n{rehearsed}")
        found["rehearsed"] = rehearsed.to_json()
    with phase("writing"):
        if args.out:
            save_plan(plan, args.out, model=given.module, planner=planner)
        if args.html:
            write_html(shown, args.html, f"Plan of {args.model}")
        if args.json:
            write_json(found, args.json)
    for path in outputs:
        print(f"wrote {path}")
    return 0 if rehearsed is None or rehearsed.runs else 1


def _inputs(planner: NeuroShardPlanner) -> dict[str, Any]:
    """What plans of the same job are made for."""
    return {"batch_size": planner.batch_size, "constraints": planner.constraints}


def _compared(
    planner: NeuroShardPlanner, given: GivenModel, seconds: float
) -> PlanComparison | str:
    """The plan beside that of TorchRec's own planner; why there is none."""
    start = time.monotonic()
    with phase("comparing with TorchRec's planner"):
        try:
            theirs = stock_plan(
                given.module,
                given.sharders,
                topology=planner.topology,
                seconds=seconds,
                **_inputs(planner),
            )
        except OutOfTimeError as error:
            return (
                f"TorchRec's planner has no plan to compare with after {seconds:g} s: "
                f"{error}. Raise --seconds ({seconds:g}) to give it longer"
            )
        except PlannerError as error:
            reason = str(error).strip().splitlines()[0]
            return f"TorchRec's own planner has no plan: {reason}"
    notes: tuple[str, ...] = ()
    if time.monotonic() - start > seconds:
        notes = (
            f"TorchRec's planner was stopped after {seconds:g} s: this is the best "
            "plan that it had; --seconds gives it longer",
        )
    with phase("pricing TorchRec's plan"):
        compared = planner.compare(
            theirs, given.module, given.sharders, "TorchRec's own plan"
        )
    return dataclasses.replace(compared, notes=notes)


@contextlib.contextmanager
def planning(name: str) -> Iterator[None]:
    """Plan quietly: reports hold every warning; what fails is an error of ours.

    Raises:
        ConfigError: No plan fits.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except PlannerError as error:
        raise ConfigError(f"no plan for '{name}': {error}") from error
    except RuntimeError as error:
        # What TorchRec's enumerator says of constraints that leave a table nothing.
        if not str(error).startswith("No available sharding type"):
            raise
        reason = str(error).partition(". Module:")[0]
        raise ConfigError(
            f"no plan for '{name}': {reason}. No kernel of those that its constraints "
            "allow runs a sharding type that they allow: leave one of both out"
        ) from error
    finally:
        logging.disable(before)


def write_json(data: Any, path: Path) -> None:
    """Write JSON; what is infinite or not known becomes null."""
    write_whole(path, json_text(data))
