"""Race planners on a GPU that has minutes: plan and judge elsewhere, time there.

    python benchmarks/gpu/plans.py make --bundle B --tables T --out plans.pkl
    python benchmarks/gpu/plans.py time plans.pkl --out passes.pkl --seconds 100
    python benchmarks/gpu/plans.py judge plans.pkl passes.pkl --bundle B --out race

`make` plans tasks with every planner. `time` runs the kernels of all plans; it needs
neither planners nor cost models. `judge` writes `race.json` and `race.md`: what each
planner's plans take, beside what the bundle predicted.

Files are written after each task: `make` may be stopped once there are enough. `time`
ends when its seconds are over; given again, it goes on with the tasks that are left.
The `.pkl` files are pickles, which can run code when they are read: read only your own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import pickle
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner_comparison.planning import Outcome, PlanningSettings
    from planner_comparison.plans import Kernel, RunPlan
    from planner_comparison.tasks import Task

# Each command imports what it needs, so that `time` loads no planner.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ESTIMATE = "default, estimate"
"""Our plan by the estimate for a card that nobody has measured."""
PLANNERS = ("default", "neuroshard", "torchrec", "torchrec, best practice")

Made = dict[str, Any]
"""What `make` writes: `run`, and `tasks`, pairs of a task and planner -> entry."""


def make(args: argparse.Namespace) -> None:
    """Plan the tasks with every planner."""
    from harness.provenance import describe_run
    from planner_comparison.planning import Planners, PlanningSettings

    planning = PlanningSettings(
        names=tuple(args.planners),
        max_rows=args.max_rows,
        cost_model=args.bundle,
        device=args.device,
        plan_seconds=args.plan_seconds,
    )
    unmeasured = dataclasses.replace(
        planning, names=("default",), cost_model=estimate_for(planning)
    )
    planners, estimating = (
        Planners(settings, args.processes) for settings in (planning, unmeasured)
    )
    made: Made = {"run": {**describe_run(), "estimate": unmeasured.cost_model}}
    made["tasks"] = []
    tasks = choose_tasks(args)
    try:
        for task in tasks:
            found = planners.plan(task)
            found[ESTIMATE] = estimating.plan(task)["default"]
            made["tasks"].append((task, entries_of(found)))
            write(args.out, made)
            ended = {n: f"{o.status}, {o.seconds:.1f} s" for n, o in found.items()}
            print(f"{len(made['tasks'])}/{len(tasks)} {task.name}: {ended}", flush=True)
    finally:
        planners.close()
        estimating.close()


def estimate_for(planning: PlanningSettings) -> str:
    """Return the cost model of a user with the bundle's device and no bundle."""
    from torchrec_neuroshard.cost_models import load_cost_model
    from torchrec_neuroshard.gpu_cards import find_card

    model = load_cost_model(planning.cost_model, device_type=planning.device)
    card = find_card(model.hardware)
    return card.name if card else "measure"


def choose_tasks(args: argparse.Namespace) -> list[Task]:
    """Return the tasks, each on the first cluster of so many ranks."""
    from planner_comparison.clusters import clusters_of
    from planner_comparison.tasks import TaskSettings, make_tasks

    settings = TaskSettings(
        batch_size=args.batch_size,
        max_rows=args.max_rows,
        seed=args.seed,
        quick=args.quick,
        device_type=args.device,
    )
    tasks = make_tasks(args.tables, settings)
    wanted = [t for t in tasks if t.world_size in args.worlds]
    return [
        dataclasses.replace(t, cluster=clusters_of(t.world_size)[0].name)
        for t in wanted[:: args.every][: args.num_tasks]
    ]


def entries_of(found: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """Return planner -> plan, if there is one, and how planning ended."""
    from planner_comparison.paired import AGAIN, OURS

    entries = {
        name: {k: getattr(o, k) for k in ("status", "seconds", "reason", "plan")}
        for name, o in found.items()
    }
    ours = entries.get(OURS)
    if ours is not None and ours["plan"] is not None:
        entries[AGAIN] = {**ours, "plan": ours["plan"].again()}
    return entries


def plans_of(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, RunPlan]:
    """Return planner -> plan, of those that have one."""
    return {name: e["plan"] for name, e in entries.items() if e["plan"] is not None}


def time_plans(args: argparse.Namespace) -> None:
    """Time the kernels of all plans, task after task, until time is over."""
    end = time.monotonic() + args.seconds
    import torch

    from planner_comparison.kernels import KernelSettings, KernelTimer
    from torchrec_neuroshard.collect.fingerprint import device_fingerprint
    from torchrec_neuroshard.devices import free_cached_memory

    torch.set_num_threads(1)
    tasks = read(args.plans)["tasks"]
    timed = read(args.out) if args.out.exists() else {"passes": {}}
    device = torch.device(args.device)
    timer = KernelTimer(
        device,
        most_bytes(tasks),
        timed.get("reference_ms", 0.0),
        KernelSettings(rounds=args.rounds, passes=args.passes),
    )
    timed["reference_ms"] = timer.reference_ms
    timed["hardware"] = dataclasses.asdict(device_fingerprint(device, 1))
    taken: list[float] = []
    for task, entries in tasks:
        start = time.monotonic()
        if task.name in timed["passes"]:
            continue
        # The first task loads kernels, too.
        if start + max(taken[1:] or taken, default=0.0) > end:
            print("time is over", flush=True)
            break
        try:
            raw = timer.measure(list(plans_of(entries).values()))
        except torch.OutOfMemoryError as error:
            print(f"{task.name} does not fit: {str(error).splitlines()[0]}", flush=True)
            raw = {}
        if not raw:  # outside of the handler, which holds what was allocated
            free_cached_memory(device)
            continue
        timed["passes"][task.name] = list(raw.values())
        write(args.out, timed)
        taken.append(time.monotonic() - start)
        print(f"{task.name}: {len(raw)} kernels in {taken[-1]:.1f} s", flush=True)


def most_bytes(tasks: Sequence[tuple[Task, Mapping[str, Any]]]) -> int:
    """Return the bytes of the fullest rank of all plans."""
    return max(
        max(plan.rank_bytes)
        for _, entries in tasks
        for plan in plans_of(entries).values()
    )


def judge(args: argparse.Namespace) -> None:
    """Put times together, with published collectives, beside what was predicted."""
    from harness.provenance import describe_run
    from planner_comparison.planning import PlanningSettings

    made, timed = read(args.plans), read(args.timed)
    hardware = timed["hardware"]
    planning = PlanningSettings(cost_model=args.bundle, device=hardware["device_type"])
    data = {
        "hardware": hardware,
        "planned": made["run"],
        "judged": describe_run(),
        "num_planned": len(made["tasks"]),
        "tasks": [
            judge_task(task, entries, timed, planning)
            for task, entries in made["tasks"]
            if task.name in timed["passes"]
        ],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    page = report(data)
    args.out.with_suffix(".md").write_text(page)
    print(page)


def judge_task(
    task: Task,
    entries: Mapping[str, Mapping[str, Any]],
    timed: Mapping[str, Any],
    planning: PlanningSettings,
) -> dict[str, Any]:
    """Return a task with each planner's figures, as `planner_comparison` has them.

    Args:
        task: Planned and timed.
        entries: Of each planner.
        timed: What `time` wrote.
        planning: Says the bundle that predicts.
    """
    from planner_comparison.clusters import CLUSTERS
    from planner_comparison.kernels import kernels_of, median_times
    from planner_comparison.plans import add_up, predict_collective, predict_kernels

    plans = plans_of(entries)
    kernels: list[Kernel] = kernels_of(plans.values())
    passes = dict(zip(kernels, timed["passes"][task.name], strict=True))
    times = median_times(passes, timed["reference_ms"])
    costs, cluster = planning.costs(task), CLUSTERS[task.cluster]
    predicted = predict_kernels(kernels, costs.compute, costs.comms, task.world_size)
    collectives = dict.fromkeys(c for p in plans.values() for c in p.collectives)
    taken = {c: cluster.collective_ms(c) for c in collectives}
    expected = {
        c: predict_collective(c, costs.comms, task.world_size) for c in collectives
    }
    planners = {
        name: {k: v for k, v in entry.items() if k != "plan"}
        for name, entry in entries.items()
    }
    for name, plan in plans.items():
        planners[name]["measured"] = add_up(plan, times, taken)
        planners[name]["predicted"] = add_up(plan, predicted, expected)
    errors = [round(sum(predicted[k]) / sum(times[k]) - 1, 4) for k in kernels]
    return {**task.to_json(), "planners": planners, "kernel_errors": errors}


def report(data: Mapping[str, Any]) -> str:
    """Return the page: one table, and what it takes to read it."""
    from planner_comparison import paired
    from planner_comparison.page import Table

    tasks, hardware = data["tasks"], data["hardware"]
    table = Table(
        title=f"Plans' times over those of `{paired.BEST_PRACTICE}`",
        head=(
            "planner",
            "plans",
            "measured",
            "predicted",
            "won/lost",
            "kernels alone",
            "predicted",
            "kernels, predicted over measured",
        ),
        rows=[row_of(tasks, name) for name in paired.planners(tasks)],
    )
    return "\n\n".join(
        (
            f"# Planners on {hardware['device']}",
            f"{len(tasks)} of {data['num_planned']} tasks were timed. Kernels are "
            f"measured on {hardware['device']} (torch {hardware['torch']}, fbgemm "
            f"{hardware['fbgemm']}), one rank after another. Collectives are published "
            f"figures of {', '.join(sorted({t['cluster'] for t in tasks}))}.",
            "Ratios are geometric means over tasks, measured ones with a 95 % "
            "interval; below 1 the planner's plans are faster. Won and lost leave out "
            f"ratios within {paired.SAME:.0%} of 1. `{ESTIMATE}` is our planner with "
            f"the estimate `{data['planned']['estimate']}`, as on a card that nobody "
            "has measured.",
            table.markdown().rstrip(),
            *notes_of(data),
        )
    )


def notes_of(data: Mapping[str, Any]) -> list[str]:
    """Return what stands below the table: noise, errors, tasks without a plan."""
    from planner_comparison import paired

    tasks = data["tasks"]
    deviation, repeats = paired.noise(tasks)
    noise = f"{deviation:.1%} over {repeats} tasks" if repeats > 1 else "unknown"
    errors = [abs(e) for t in tasks for e in t["kernel_errors"]]
    off = f"{statistics.median(errors):.1%}" if errors else "unknown"
    return [
        f"`{paired.AGAIN}` is `{paired.OURS}`'s plan timed a second time: the ratio of "
        f"both is noise (standard deviation: {noise}).",
        f"A kernel's predicted time is off by {off} (median of {len(errors)}).",
        *(
            f"`{name}` has no plan for {t['name']}: {e['status']}. {e['reason']}"
            for t in tasks
            for name, e in t["planners"].items()
            if "measured" not in e
        ),
        *(
            f"{what} with `{run['command']}` at {run['commit']}, {run['date']}."
            for what, run in (("Planned", data["planned"]), ("Judged", data["judged"]))
        ),
        "",
    ]


def row_of(tasks: Sequence[dict[str, Any]], name: str) -> list[str]:
    """Return a planner's cells of the table."""
    from planner_comparison import paired

    forecasts = [{**t, "planners": as_predicted(t["planners"])} for t in tasks]
    path, kernels = (
        [paired.compare(some, name, paired.BEST_PRACTICE, metric) for some in both]
        for both in [(tasks, forecasts)]
        for metric in (paired.PATH, paired.KERNELS)
    )
    off = paired.prediction_ratios(tasks, name, paired.KERNELS)
    plans = paired.outcomes(tasks, name)["plan"]
    return [
        f"`{name}`",
        f"{plans} of {len(paired.asked(tasks, name))}",
        path[0].text() if path[0] else "-",
        f"{path[1].mean:.3f}" if path[1] else "-",
        f"{path[0].wins}/{path[0].losses}" if path[0] else "-",
        kernels[0].text() if kernels[0] else "-",
        f"{kernels[1].mean:.3f}" if kernels[1] else "-",
        f"{statistics.median(off):.3f}" if off else "-",
    ]


def as_predicted(planners: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the planners with what was predicted in the place of what was measured."""
    return {n: {**e, "measured": e.get("predicted")} for n, e in planners.items()}


def write(path: Path, data: Any) -> None:
    """Write a pickle, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(pickle.dumps(data))
    os.replace(part, path)


def read(path: Path) -> Any:
    """Read what `write` wrote."""
    return pickle.loads(path.read_bytes())


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; `run` is the command's function."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="make|time|judge")
    own = commands.add_parser("make", help="plan tasks with every planner, on a CPU")
    own.add_argument("--bundle", required=True, help="cost model: a name or folder")
    own.add_argument("--tables", type=Path, help="JSON of published table sets")
    own.add_argument("--device", default="cuda", help="type that is planned for")
    own.add_argument("--planners", nargs="+", default=PLANNERS)
    own.add_argument("--batch-size", type=int, default=65_536, help="over all ranks")
    own.add_argument("--max-rows", type=int, default=10_000_000, help="of a table")
    own.add_argument("--worlds", type=int, nargs="+", default=[8, 16], help="ranks")
    own.add_argument("--every", type=int, default=1, help="take every so many task")
    own.add_argument("--num-tasks", type=int, help="only the first; all families mix")
    own.add_argument("--seed", type=int, default=0)
    own.add_argument("--plan-seconds", type=float, default=120.0)
    own.add_argument("--processes", type=int, default=2, help="0: this one")
    own.add_argument("--quick", action="store_true", help="a rehearsal: small tasks")
    own.set_defaults(run=make)
    own = commands.add_parser("time", help="time kernels of all plans, on a GPU")
    own.add_argument("plans", type=Path)
    own.add_argument("--device", default="cuda")
    own.add_argument("--seconds", type=float, default=100.0, help="start no task after")
    own.add_argument("--rounds", type=int, default=2)
    own.add_argument("--passes", type=int, default=2, help="of a kernel in a round")
    own.set_defaults(run=time_plans)
    own = commands.add_parser("judge", help="compare the plans, on a CPU")
    own.add_argument("plans", type=Path)
    own.add_argument("timed", type=Path, help="what `time` wrote")
    own.add_argument(
        "--bundle", required=True, help="the one that plans were made with"
    )
    own.set_defaults(run=judge)
    for own in commands.choices.values():
        own.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # Of all libraries, here and in the processes that this one starts.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    options = parse_arguments()
    options.run(options)
