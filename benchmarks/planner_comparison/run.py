"""The run: plan, measure and write one task after another."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import platform
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from harness.provenance import commit, now
from planner_comparison.collectives import RankGroup
from planner_comparison.kernels import KernelSettings, KernelTimer
from planner_comparison.page import short_table, write_pages
from planner_comparison.planning import Outcome, Planners, PlanningSettings
from planner_comparison.plans import (
    Collective,
    RunPlan,
    add_up,
    predict_collective,
    predict_kernels,
)
from planner_comparison.rivals import Costs, load_costs
from planner_comparison.tasks import FAMILIES, Task, TaskSettings, make_tasks
from torchrec_neuroshard.collect.fingerprint import device_fingerprint
from torchrec_neuroshard.cost_models import CommsModel

SCHEMA_VERSION = 1
_FREE_OPTIONS = ("out", "stop_after", "pages_only")
"""Options that may differ when a run goes on."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; `--quick` has changed the defaults of others."""
    parser = argparse.ArgumentParser(
        prog="compare_planners.py", description="Compare planners on measured plans."
    )
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    parser.add_argument("--tables", type=Path, help="JSON of published table sets")
    parser.add_argument("--device", default="cpu", help="where kernels run")
    parser.add_argument(
        "--cost-model", default="auto", help="a bundle's name or folder"
    )
    parser.add_argument(
        "--neuroshard-nets", type=Path, help="folder of the paper's nets"
    )
    parser.add_argument("--planners", nargs="*", help="only these")
    parser.add_argument("--families", nargs="*", choices=sorted(FAMILIES))
    parser.add_argument("--collectives", choices=("measured", "predicted", "none"))
    parser.add_argument(
        "--most-measured-ranks",
        type=int,
        default=8,
        help="collectives of more ranks are predicted",
    )
    parser.add_argument("--batch-size", type=int, default=2_048, help="over all ranks")
    parser.add_argument("--max-rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan-seconds", type=float, default=60.0)
    parser.add_argument("--solver-seconds", type=float, default=4.0)
    parser.add_argument("--planning-processes", type=int, default=2)
    parser.add_argument("--kernel-rounds", type=int, default=3)
    parser.add_argument("--kernel-passes", type=int, default=2, help="of a round")
    parser.add_argument("--comms-rounds", type=int, default=3)
    parser.add_argument("--comms-passes", type=int, default=3, help="of a round")
    parser.add_argument("--num-tasks", type=int, help="only the first")
    parser.add_argument("--stop-after", type=float, help="seconds; go on another time")
    parser.add_argument("--quick", action="store_true", help="a dry run: few, small")
    parser.add_argument(
        "--pages-only", action="store_true", help="write the pages of <out>.json again"
    )
    options = parser.parse_args(arguments)
    on_cpu = torch.device(options.device).type == "cpu"
    if options.collectives is None:
        options.collectives = "measured" if on_cpu else "predicted"
    if options.collectives == "measured" and not on_cpu:
        parser.error(
            "collectives are measured among processes on CPUs; with --device "
            f"{options.device} give --collectives predicted or none"
        )
    if options.quick:
        options.max_rows = min(options.max_rows, 20_000)
        options.plan_seconds = min(options.plan_seconds, 10.0)
        options.solver_seconds = min(options.solver_seconds, 1.0)
        for name in ("kernel_rounds", "comms_rounds"):
            setattr(options, name, 1)
    return options


class Comparison:
    """One run: what measures, and what is known so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Draw the tasks, load the models, and go on from the file if there is one."""
        self._options = options
        self._device = torch.device(options.device)
        settings = TaskSettings(
            batch_size=options.batch_size,
            max_rows=options.max_rows,
            seed=options.seed,
            quick=options.quick,
        )
        tasks = make_tasks(options.tables, settings)
        wanted = options.families or list(FAMILIES)
        self.tasks = [t for t in tasks if t.family in wanted][: options.num_tasks]
        planning = PlanningSettings(
            names=None if options.planners is None else tuple(options.planners),
            paper_nets=options.neuroshard_nets,
            cost_model=options.cost_model,
            device=self._device.type,
            plan_seconds=options.plan_seconds,
            solver_seconds=options.solver_seconds,
        )
        self._rivals = planning.rivals()
        self._planners = Planners(planning, options.planning_processes)
        self._cost_model = self._costs(1).compute
        self._timer = KernelTimer(
            self._device,
            max(t.memory_bytes for t in self.tasks),
            getattr(self._cost_model, "reference_ms", 0.0),
            KernelSettings(rounds=options.kernel_rounds, passes=options.kernel_passes),
        )
        self._groups: dict[int, RankGroup] = {}
        self.data = self._open()

    def _open(self) -> dict[str, Any]:
        """Return what the file holds, or a new beginning."""
        fresh = self._beginning()
        path = _at(self._options.out)
        if not path.exists():
            return fresh
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for key in ("schema_version", "hardware", "options", "rivals"):
            if known.get(key) != fresh[key]:
                raise SystemExit(
                    f"{path} is of another run: its {key} is {known.get(key)!r:.300}, "
                    f"now it is {fresh[key]!r:.300}. Take another --out or the same "
                    "options"
                )
        return known

    def _beginning(self) -> dict[str, Any]:
        options = {
            k: _shown(str(v)) if isinstance(v, Path) else v
            for k, v in vars(self._options).items()
            if k not in _FREE_OPTIONS
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "command": shlex.join(["python", *map(_shown, sys.argv)]),
            "created": now(),
            "updated": now(),
            "commit": commit(),
            "hardware": asdict(device_fingerprint(self._device, 1)),
            "python": platform.python_version(),
            "torchrec": importlib.metadata.version("torchrec"),
            "cost_model": {
                "name": self._cost_model.name,
                "hardware": self._cost_model.hardware,
                "source": self._cost_model.source,
                "reference_ms": self._timer.reference_ms,
                "comms_source": self._costs(4).comms.source,
            },
            "options": options,
            "families": FAMILIES,
            "rivals": [
                {"name": r.name, "about": r.about, "training": r.training()}
                for r in self._rivals
            ],
            "num_tasks": len(self.tasks),
            "tasks": [],
        }

    def run(self) -> None:
        """Do the tasks that are left, writing after each."""
        start = time.monotonic()
        done = {t["name"] for t in self.data["tasks"]}
        for number, task in enumerate(self.tasks):
            if task.name in done:
                continue
            self.data["tasks"].append(self._run_task(task))
            self.data["updated"] = now()
            write_pages(self.data, self._options.out)
            self._say(number, self.data["tasks"][-1], time.monotonic() - start)
            limit = self._options.stop_after
            if limit is not None and time.monotonic() - start > limit:
                print("stopped; the same command goes on", flush=True)
                break

    def close(self) -> None:
        """End what was started."""
        self._planners.close()
        for group in self._groups.values():
            group.close()

    def _run_task(self, task: Task) -> dict[str, Any]:
        costs = self._costs(task.world_size)
        clock = [time.monotonic()]
        outcomes = self._planners.plan(task)
        plans = {n: o.plan for n, o in outcomes.items() if o.plan is not None}
        clock.append(time.monotonic())
        kernels, passes = self._timer.measure(list(plans.values()))
        speed = self._timer.machine_speed
        clock.append(time.monotonic())
        how, collectives = self._run_collectives(task, plans, costs.comms, speed)
        clock.append(time.monotonic())
        everything = RunPlan(
            stages=tuple(s for p in plans.values() for s in p.stages),
            rank_bytes=(),
            num_shards=0,
            num_split=0,
        )
        predicted_kernels = predict_kernels(everything.kernels, self._cost_model)
        predicted_collectives = _predict(everything.collectives, costs.comms, task)
        entries = {}
        for name, outcome in outcomes.items():
            entry = entries[name] = _entry(outcome, task)
            if outcome.plan is None:
                continue
            entry["predicted"] = add_up(
                outcome.plan,
                predicted_kernels,
                predicted_collectives if how != "none" else {},
            )
            entry["measured"] = add_up(outcome.plan, kernels, collectives)
            entry["passes"] = min(passes[k] for k in outcome.plan.kernels)
        return {
            **task.to_json(),
            "commit": commit(),
            "created": now(),
            "collectives": how,
            "machine_speed": speed,
            "seconds": {
                name: round(end - begin, 2)
                for name, begin, end in zip(
                    ("planning", "kernels", "collectives"),
                    clock,
                    clock[1:],
                    strict=False,
                )
            },
            "planners": entries,
        }

    def _run_collectives(
        self,
        task: Task,
        plans: dict[str, RunPlan],
        comms_model: CommsModel,
        speed: float,
    ) -> tuple[str, dict[Collective, tuple[float, float]]]:
        """Return how the collectives' times were had, and the times."""
        how = self._options.collectives
        wanted = list(dict.fromkeys(c for p in plans.values() for c in p.collectives))
        if how == "none":
            return how, {}
        if how == "predicted" or task.world_size > self._options.most_measured_ranks:
            return "predicted", _predict(wanted, comms_model, task)
        group = self._groups.get(task.world_size)
        if group is None:
            group = self._groups[task.world_size] = RankGroup(task.world_size)
        taken = group.measure(
            wanted, self._options.comms_rounds, self._options.comms_passes
        )
        return how, {c: (f * speed, b * speed) for c, (f, b) in taken.items()}

    def _costs(self, world_size: int) -> Costs:
        options = self._options
        return load_costs(options.cost_model, self._device.type, world_size)

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
            f"{entry['name']} {entry['seconds']}: {', '.join(shown)}",
            flush=True,
        )


def _predict(
    collectives: Sequence[Collective], comms_model: CommsModel, task: Task
) -> dict[Collective, tuple[float, float]]:
    return {c: predict_collective(c, comms_model, task.world_size) for c in collectives}


def _entry(outcome: Outcome, task: Task) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "status": outcome.status,
        "seconds": outcome.seconds,
        "reason": outcome.reason,
        **outcome.notes,
    }
    if outcome.plan is not None:
        held = outcome.plan.rank_bytes
        entry["num_shards"] = outcome.plan.num_shards
        entry["num_split"] = outcome.plan.num_split
        entry["sharding_types"] = [s.sharding_type for s in outcome.plan.stages]
        entry["rank_bytes"] = list(held)
        entry["ranks_over_memory"] = [
            rank for rank, num_bytes in enumerate(held) if num_bytes > task.memory_bytes
        ]
    return entry


def _at(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")


def _shown(argument: str) -> str:
    """Leave out where this machine keeps its files."""
    path = Path(argument)
    return path.name if path.is_absolute() else argument


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = parse_arguments(arguments)
    if options.pages_only:
        known = json.loads(_at(options.out).read_text(encoding="utf-8"))
        write_pages(known, options.out)
        print(short_table(known))
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # Whoever ends this process ends the planners and ranks that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    comparison = Comparison(options)
    try:
        comparison.run()
    finally:
        comparison.close()
    print(short_table(comparison.data))
