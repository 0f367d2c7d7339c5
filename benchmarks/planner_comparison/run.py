"""The main loop: plan, measure and write one task after another."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from harness.options import add_option
from harness.provenance import describe_run, now
from planner_comparison.charts import draw_charts
from planner_comparison.clusters import CLUSTERS, cluster_of
from planner_comparison.kernels import (
    KernelSettings,
    KernelTimer,
    NoisyMachineError,
    copy_gb_per_s,
    kernels_of,
)
from planner_comparison.page import write_page
from planner_comparison.paired import AGAIN, OURS
from planner_comparison.planning import TRAINED, Outcome, Planners, PlanningSettings
from planner_comparison.plans import (
    Times,
    predict_collective,
    predict_kernels,
    stage_times,
)
from planner_comparison.results import add_up, at, write_results
from planner_comparison.rivals import faster_on
from planner_comparison.tasks import FAMILIES, Task, TaskSettings, make_tasks
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.hardware.cards import GPU_CARDS
from torchrec_neuroshard.measure.kernels import device_fingerprint

SCHEMA_VERSION = 6
_AGAIN_ABOUT = f"the plan of `{OURS}`, with its kernels timed a second time"
_ENVIRONMENT = ("PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that can change plans or times."""
_QUICK = {"max_rows": 20_000, "plan_seconds": 10.0, "solver_seconds": 1.0, "rounds": 1}
"""Upper limits of options under `--quick`."""
_QUICK_BATCH = 2_048
_RECENT = 5
"""The longest of so many tasks says how long the next one may take."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, after applying the limits of `--quick`."""
    parser = argparse.ArgumentParser(
        prog="compare_planners.py", description="Compare planners on measured plans."
    )
    add = functools.partial(add_option, parser)
    add("out", ..., "path of the results, without suffix", Path)
    add("tables", None, "JSON of published table sets", Path)
    add("device", "cpu", "device that times the kernels")
    add("cost_model", "auto", "a bundle's name or folder")
    nets = (
        "nets and policies of other methods (default: benchmarks/data/trained, which "
        "is not in the checkout); planners without their nets are left out, AutoShard "
        "and DreamShard then use the shipped policies"
    )
    add("trained", TRAINED, nets, Path, metavar="FOLDER")
    add("planners", None, "planners to run (default: all)", str, nargs="*")
    add("max_rows", 1_000_000, "most rows of a table")
    add("seed", 0, "seed of the tasks")
    add("plan_seconds", 60.0, "time limit of a planner")
    add("solver_seconds", 4.0, "time budget of searches that use all their time")
    add("planning_processes", 2, "planners at the same time")
    add("num_tasks", None, "run only the first tasks", int)
    few = "bundle of this machine that was calibrated on 100 sets"
    add("few_sets", None, few, str, metavar="FOLDER")
    scaled = (
        "compare a second time, with kernels as many times faster as the card's are by "
        "our estimate"
    )
    add("scaled_to", None, scaled, str, metavar="CARD")
    most = "leave out tasks, from the end, that this time is too short for"
    add("minutes", None, most, float)
    add("noisy", False, "do not check that the machine is quiet")
    add("max_lookups", None, "halve batches with more lookups", int)
    add("rounds", 5, "timings of each kernel")
    add("quick", False, "dry run with few small tasks")
    add("pictures", None, "folder of the charts (default: the folder of --out)", Path)
    options = parser.parse_args(arguments)
    if options.trained != TRAINED and not options.trained.is_dir():
        parser.error(f"--trained {options.trained} is not a folder")
    if (results := at(options.out, ".json.xz")).exists():
        parser.error(f"{results} exists; take another --out")
    if options.quick:
        for name, most in _QUICK.items():
            setattr(options, name, min(getattr(options, name), most))
    return options


class Comparison:
    """One run: its tasks, planners, timer and results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Draw the tasks and load the models."""
        self._options = options
        self._device = torch.device(options.device)
        settings = TaskSettings(
            batch_size=_QUICK_BATCH if options.quick else None,
            max_rows=options.max_rows,
            seed=options.seed,
            quick=options.quick,
            device_type=self._device.type,
            max_lookups=options.max_lookups,
        )
        on_cpu = self._device.type == "cpu"
        known = {"memory_gb_per_s": round(copy_gb_per_s(), 2)} if on_cpu else {}
        self.tasks = [
            dataclasses.replace(t, cluster=cluster_of(t.world_size).name, **known)
            for t in make_tasks(options.tables, settings)[: options.num_tasks]
        ]
        self._planning = PlanningSettings(
            names=None if options.planners is None else tuple(options.planners),
            trained=options.trained,
            cost_model=options.cost_model,
            device=self._device.type,
            plan_seconds=options.plan_seconds,
            solver_seconds=options.solver_seconds,
            few_sets=options.few_sets,
        )
        self._planners = Planners(self._planning, options.planning_processes)
        model = load_cost_model(options.cost_model, device_type=self._device.type)
        self._scaled = 0.0
        if options.scaled_to:
            self._scaled = round(faster_on(options.scaled_to, model, self.tasks), 1)
        self._timer = KernelTimer(
            self._device,
            max(t.memory_bytes for t in self.tasks),
            getattr(model, "reference_ms", 0.0),
            KernelSettings(rounds=options.rounds, passes=1),
        )
        quiet = "not checked" if options.noisy else self._timer.check_quiet()
        self.data = describe(
            self._planning,
            rivals=describe_rivals(self._planning),
            hardware=asdict(device_fingerprint(self._device, 1)),
            options=vars(options),
            num_tasks=len(self.tasks),
        )
        self.data |= {"quiet": quiet, "kernels_faster": self._scaled}

    def run(self) -> None:
        """Run the tasks and write all results after each one."""
        start, taken = time.monotonic(), [0.0]
        for number, task in enumerate(self.tasks):
            begun = time.monotonic()
            limit = 60 * (self._options.minutes or math.inf)
            if begun + max(taken[-_RECENT:]) > start + limit:
                print(f"the time is up; {len(self.tasks) - number} tasks are left out")
                break
            found = self._run_task(task)
            taken.append(time.monotonic() - begun)
            self.data["tasks"] += found
            self.data["updated"] = now()
            self.data["minutes"] = round((time.monotonic() - start) / 60, 1)
            write_results(self.data, self._options.out)
            for entry in found:
                self._say(number, entry, time.monotonic() - start)
        publish(self.data, self._options.out, self._options.pictures)

    def close(self) -> None:
        """End the planning processes."""
        self._planners.close()

    def _run_task(self, task: Task) -> list[dict[str, Any]]:
        """Return the results of a task, and of the same with scaled kernels."""
        views = [task]
        if self._scaled:
            card = GPU_CARDS[self._options.scaled_to]
            views.append(
                dataclasses.replace(
                    task,
                    kernels_faster=self._scaled,
                    memory_gb_per_s=card.hbm_gb_per_s.value,
                )
            )
        planned = [(own, with_again(self._planners.plan(own))) for own in views]
        plans = [o.plan for _, some in planned for o in some.values() if o.plan]
        start = time.monotonic()
        times = self._timer.medians(self._timer.measure(plans))
        seconds = round(time.monotonic() - start, 1)
        speed = round(self._timer.machine_speed(), 4)
        spread = round(self._timer.speed_spread(), 4)
        return [
            {
                **own.to_json(),
                "machine_speed": speed,
                "speed_spread": spread,
                "measuring_seconds": seconds,
                "planners": judge(own, outcomes, times, self._planning),
            }
            for own, outcomes in planned
        ]

    def _say(self, number: int, entry: dict[str, Any], seconds: float) -> None:
        shown = []
        for name, planner in entry["planners"].items():
            found = planner.get("measured")
            shown.append(
                f"{name} {planner['status']}"
                if found is None
                else f"{name} {found['critical_path_ms']:.1f}"
            )
        print(
            f"{seconds:6.0f} s, task {number + 1} of {len(self.tasks)}, "
            f"{entry['name']}: {', '.join(shown)}",
            flush=True,
        )


def describe_rivals(planning: PlanningSettings) -> list[dict[str, str]]:
    """Return descriptions of each planner, and of our plan timed again."""
    found = [
        {"name": r.name, "about": r.about, "training": r.training()}
        for r in planning.rivals()
    ]
    if any(r["name"] == OURS for r in found):
        found.append({"name": AGAIN, "about": _AGAIN_ABOUT, "training": ""})
    return found


def describe(
    planning: PlanningSettings,
    *,
    rivals: Sequence[Mapping[str, str]],
    hardware: Mapping[str, Any],
    options: Mapping[str, Any],
    num_tasks: int,
) -> dict[str, Any]:
    """Return the results without tasks: a description of the run.

    Args:
        planning: Settings with the cost model.
        rivals: From `describe_rivals`.
        hardware: Device that times the kernels.
        options: Options of the command.
        num_tasks: Number of tasks to run.
    """
    model = load_cost_model(planning.cost_model, device_type=planning.device)
    run = describe_run()
    return {
        "schema_version": SCHEMA_VERSION,
        **run,
        "torchrec": run["versions"]["torchrec"],
        "environment": {n: os.environ[n] for n in _ENVIRONMENT if n in os.environ},
        "created": run["date"],
        "updated": run["date"],
        "hardware": hardware,
        "cost_model": {
            "name": model.name,
            "hardware": model.hardware,
            "source": model.source,
        },
        "clusters": {name: cluster.about for name, cluster in CLUSTERS.items()},
        "options": {
            name: value.name if isinstance(value, Path) else value
            for name, value in options.items()
        }
        | {"cost_model": model.name, "few_sets": Path(planning.few_sets or "").name},
        "families": FAMILIES,
        "rivals": rivals,
        "num_tasks": num_tasks,
        "tasks": [],
    }


def with_again(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """Return the outcomes, with our plan added a second time as another planner's."""
    ours = outcomes.get(OURS)
    if ours is None or ours.plan is None:
        return outcomes
    return {**outcomes, AGAIN: dataclasses.replace(ours, plan=ours.plan.again())}


def judge(
    task: Task,
    outcomes: Mapping[str, Outcome],
    times: Times | None,
    planning: PlanningSettings,
) -> dict[str, Any]:
    """Return measured and predicted times of each planner's plan on the cluster.

    Args:
        task: The task.
        outcomes: Planner -> outcome.
        times: Measured times of all kernels. None: the predictions.
        planning: Settings with the cost model.
    """
    costs, ranks = planning.costs(task), task.world_size
    plans = [o.plan for o in outcomes.values() if o.plan is not None]
    collectives = {c for p in plans for c in p.collectives}
    predicted = predict_kernels(kernels_of(plans), costs.compute)
    expected = {c: predict_collective(c, costs.comms, ranks) for c in collectives}
    cluster = CLUSTERS[task.cluster]
    taken = {c: cluster.collective_ms(c) for c in collectives}
    faster = task.kernels_faster
    if times is None:
        times = predicted
    else:
        times = {k: (fwd / faster, bwd / faster) for k, (fwd, bwd) in times.items()}
    entries = {name: _entry(outcome, task) for name, outcome in outcomes.items()}
    for name, outcome in outcomes.items():
        if outcome.plan is not None:
            entries[name] |= {
                "predicted": add_up(stage_times(outcome.plan, predicted, expected)),
                "measured": add_up(stage_times(outcome.plan, times, taken)),
            }
    return entries


def _entry(outcome: Outcome, task: Task) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "status": outcome.status,
        "seconds": outcome.seconds,
        "reason": outcome.reason,
        **outcome.notes,
    }
    if outcome.plan is not None:
        held = outcome.plan.rank_bytes
        entry |= {
            "num_shards": outcome.plan.num_shards,
            "num_split": outcome.plan.num_split,
            "sharding_types": [s.sharding_type for s in outcome.plan.stages],
            "rank_bytes": list(held),
            "ranks_over_memory": [
                rank for rank, used in enumerate(held) if used > task.memory_bytes
            ],
        }
    return entry


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison."""
    options = parse_arguments(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # If this process is terminated, its planning processes end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        comparison = Comparison(options)
    except NoisyMachineError as error:
        sys.exit(f"compare_planners: {error}")
    try:
        comparison.run()
    finally:
        comparison.close()
    print(f"the page is {at(options.out, '.md')}")


def publish(data: dict[str, Any], out: Path, folder: Path | None) -> None:
    """Write the page and its charts.

    Args:
        data: All results of the run.
        out: Path of the page, without suffix.
        folder: Folder of the charts. None: the page's.
    """
    pictures = draw_charts(data, (folder or out.parent) / out.name)
    write_page(data, out, pictures)
