"""The run: plan, measure and write one task after another."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import logging
import os
import platform
import re
import shlex
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import compute, parquet

from harness.provenance import commit, now
from planner_comparison.clusters import CLUSTERS, GLOO, Cluster, clusters_of
from planner_comparison.collectives import RankGroup
from planner_comparison.kernels import KernelSettings, KernelTimer, Pass
from planner_comparison.page import headline, write_pages
from planner_comparison.paired import AGAIN, OURS
from planner_comparison.planning import (
    TRAINED,
    Outcome,
    Planners,
    PlanningSettings,
)
from planner_comparison.plans import (
    Collective,
    Kernel,
    Times,
    add_up,
    predict_collective,
    predict_kernels,
)
from planner_comparison.results import at, read_results, write_results
from planner_comparison.tasks import FAMILIES, Task, TaskSettings, make_tasks
from torchrec_neuroshard.collect.fingerprint import device_fingerprint
from torchrec_neuroshard.cost_models import load_cost_model

SCHEMA_VERSION = 3
_AGAIN = (
    {
        "name": AGAIN,
        "about": f"the plan of `{OURS}`, its kernels timed as if they were others",
        "training": {},
    },
)
_AHEAD = 3
"""Tasks that are planned while kernels of one are timed: some take longer than others.
"""
_MOST_SLOW = 3
"""Tasks in a row on a machine that is too slow, after which the run ends."""
_ENVIRONMENT = ("PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that plans and times may hang on."""
_FREE_OPTIONS = (
    "out",
    "stop_after",
    "pages_only",
    "readme",
    "least_speed",
    "most_scatter",
    "num_tasks",
    "every",
)
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
        "--trained",
        type=Path,
        default=TRAINED,
        metavar="FOLDER",
        help="nets, policies and bundles of the rivals' own (default: "
        "benchmarks/data/trained, which the checkout does not hold); whose nets are "
        "not there is left out, but AutoShard and DreamShard plan by the policies "
        "that ship",
    )
    parser.add_argument("--planners", nargs="*", help="only these")
    parser.add_argument("--families", nargs="*", choices=sorted(FAMILIES))
    parser.add_argument("--clusters", nargs="*", choices=sorted(CLUSTERS))
    parser.add_argument("--batch-size", type=int, help="over all ranks, of every task")
    parser.add_argument("--max-rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan-seconds", type=float, default=60.0)
    parser.add_argument("--solver-seconds", type=float, default=4.0)
    parser.add_argument("--planning-processes", type=int, default=2)
    parser.add_argument(
        "--plan-ahead",
        action="store_true",
        help="plan the next tasks while kernels of one are timed (on another core)",
    )
    parser.add_argument(
        "--kernels-faster",
        type=float,
        default=1.0,
        help="plan for and judge by kernels so many times faster than timed here, "
        "to learn what becomes of plans on quicker devices",
    )
    parser.add_argument("--kernel-rounds", type=int, default=5)
    parser.add_argument("--kernel-passes", type=int, default=1, help="of a round")
    parser.add_argument("--comms-rounds", type=int, default=3)
    parser.add_argument("--comms-passes", type=int, default=3, help="of a round")
    parser.add_argument(
        "--least-speed",
        type=float,
        default=0.9,
        help="do not keep tasks during which the machine is slower than this share of "
        "its nominal speed; end after three in a row",
    )
    parser.add_argument(
        "--most-scatter",
        type=float,
        default=0.15,
        help="do not keep tasks of which kernels' passes differ more: disturbed ones",
    )
    parser.add_argument("--num-tasks", type=int, help="only the first")
    parser.add_argument("--every", type=int, default=1, help="only every so many task")
    parser.add_argument("--stop-after", type=float, help="seconds; go on another time")
    parser.add_argument("--quick", action="store_true", help="a dry run: few, small")
    parser.add_argument(
        "--pages-only", action="store_true", help="write the pages of <out> again"
    )
    parser.add_argument("--readme", type=Path, help="renew the table in this file")
    options = parser.parse_args(arguments)
    if options.trained != TRAINED and not options.trained.is_dir():
        parser.error(f"--trained names no folder: {options.trained}")
    if not options.kernels_faster > 0:
        parser.error(f"--kernels-faster must be above 0, got {options.kernels_faster}")
    if options.quick:
        options.max_rows = min(options.max_rows, 20_000)
        options.batch_size = options.batch_size or 2_048
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
            device_type=self._device.type,
        )
        tasks = make_tasks(options.tables, settings)
        wanted = options.families or list(FAMILIES)
        self._clusters = set(options.clusters or CLUSTERS)
        if self._device.type != "cpu" or options.kernels_faster != 1:
            self._clusters.discard(GLOO)
        self._judged_on = self._spread(tasks)
        chosen = [t for t in tasks if t.family in wanted and self._judged_on[t.name]]
        self.tasks = chosen[:: options.every][: options.num_tasks]
        self._planning = PlanningSettings(
            names=None if options.planners is None else tuple(options.planners),
            trained=options.trained,
            max_rows=options.max_rows,
            cost_model=options.cost_model,
            device=self._device.type,
            plan_seconds=options.plan_seconds,
            solver_seconds=options.solver_seconds,
            faster=options.kernels_faster,
        )
        self._rivals = self._planning.rivals()
        self._planners = Planners(self._planning, options.planning_processes)
        self._cost_model = load_cost_model(
            options.cost_model, device_type=self._device.type
        )
        self._timer = KernelTimer(
            self._device,
            max(t.memory_bytes for t in self.tasks),
            getattr(self._cost_model, "reference_ms", 0.0),
            KernelSettings(rounds=options.kernel_rounds, passes=options.kernel_passes),
        )
        self._group: RankGroup | None = None
        self.data = self._open()

    def _spread(self, tasks: Sequence[Task]) -> dict[str, list[Cluster]]:
        """Return the clusters that each task is judged on, by the task's name."""
        seen: Counter[str] = Counter()
        found: dict[str, list[Cluster]] = {}
        for task in tasks:
            known = clusters_of(task.world_size)
            found[task.name] = [
                c
                for c in known
                if c.name in self._clusters and seen[c.name] % c.every == 0
            ]
            seen.update(c.name for c in known)
        return found

    def _open(self) -> dict[str, Any]:
        """Return what the file holds, or a new beginning."""
        fresh = self._beginning()
        path = at(self._options.out, ".json")
        if not path.exists():
            return fresh
        known = read_results(self._options.out)
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
            "environment": {n: os.environ[n] for n in _ENVIRONMENT if n in os.environ},
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
            },
            "clusters": {n: CLUSTERS[n].about for n in CLUSTERS if n in self._clusters},
            "options": options,
            "families": FAMILIES,
            "rivals": [
                *(
                    {"name": r.name, "about": r.about, "training": r.training()}
                    for r in self._rivals
                ),
                *_AGAIN[: any(r.name == OURS for r in self._rivals)],
            ],
            "num_tasks": len(self.tasks),
            "tasks": [],
            "not_kept": [],
        }

    def run(self) -> None:
        """Do the tasks that are left, writing after each."""
        start = time.monotonic()
        done = {t["task"] for t in self.data["tasks"]}
        left = [(n, t) for n, t in enumerate(self.tasks) if t.name not in done]
        ahead = _AHEAD if self._options.plan_ahead else 0
        slow = 0
        for index, (number, task) in enumerate(left):
            following = left[index + 1 : index + 1 + ahead]
            found = self._run_task(task, [t for _, t in following])
            speed = found[0]["machine_speed"]
            slow = slow + 1 if speed < self._options.least_speed else 0
            if slow:
                self._leave_out(
                    found[0],
                    f"the machine ran at {speed:.2f} of its usual speed, below "
                    f"{self._options.least_speed:g}",
                )
                if slow == _MOST_SLOW:
                    print(f"ended: {slow} such tasks in a row", flush=True)
                    break
                continue
            if (scatter := found[0]["scatter"]) > self._options.most_scatter:
                self._leave_out(
                    found[0],
                    f"the passes of its kernels differ by {scatter:.2f} of their "
                    f"mean, more than {self._options.most_scatter:g}",
                )
                continue
            self.data["tasks"] += found
            self.data["updated"] = now()
            write_results(self.data, self._options.out)
            write_pages(self.data, self._options.out)
            for entry in found:
                self._say(number, entry, time.monotonic() - start)
            limit = self._options.stop_after
            if limit is not None and time.monotonic() - start > limit:
                print("stopped; the same command goes on", flush=True)
                break

    def _leave_out(self, task: Mapping[str, Any], reason: str) -> None:
        """Say that a try is not kept; the results tell of it, too."""
        self.data["not_kept"].append({k: v for k, v in task.items() if k != "planners"})
        if self.data["tasks"]:  # else with the first that is kept
            write_results(self.data, self._options.out)
        print(
            f"{task['task']} is not kept: {reason}; the same command goes on with it",
            flush=True,
        )

    def close(self) -> None:
        """End what was started."""
        self._planners.close()
        if self._group is not None:
            self._group.close()

    def _each_cluster(self, task: Task) -> list[tuple[Task, Cluster]]:
        return [
            (dataclasses.replace(task, cluster=cluster.name), cluster)
            for cluster in self._judged_on[task.name]
        ]

    def _run_task(self, task: Task, following: Sequence[Task]) -> list[dict[str, Any]]:
        """Plan a task for each cluster and time the kernels of all plans together.

        Args:
            task: What to plan.
            following: Tasks to plan meanwhile.
        """
        clock = [time.monotonic()]
        judged: list[tuple[Task, Cluster, dict[str, Outcome]]] = []
        for own, cluster in self._each_cluster(task):
            outcomes = self._planners.plan(own)
            ours = outcomes.get(OURS)
            if ours is not None and ours.plan is not None:
                again = dataclasses.replace(ours, plan=ours.plan.again())
                outcomes[AGAIN] = again
            judged.append((own, cluster, outcomes))
        clock.append(time.monotonic())
        for own, _ in (pair for t in following for pair in self._each_cluster(t)):
            self._planners.begin(own)
        plans = [o.plan for _, _, some in judged for o in some.values() if o.plan]
        raw = self._timer.measure(plans)
        speed = self._timer.machine_speed()
        clock.append(time.monotonic())
        self._keep_passes(task, raw)
        faster = self._options.kernels_faster
        times = {
            kernel: (forward / faster, backward / faster)
            for kernel, (forward, backward) in self._timer.medians(raw).items()
        }
        numbers = {kernel: number for number, kernel in enumerate(raw)}
        shared = {
            "commit": commit(),
            "created": now(),
            "machine_speed": round(speed, 4),
            "scatter": round(self._timer.scatter(raw), 4),
            "least_speed": self._options.least_speed,
            "most_scatter": self._options.most_scatter,
            "seconds": {
                "planning": round(clock[1] - clock[0], 2),
                "kernels": round(clock[2] - clock[1], 2),
            },
        }
        return [
            {**own.to_json(), **shared, "planners": entries}
            for own, cluster, outcomes in judged
            for entries in [self._judge(own, cluster, outcomes, times, numbers)]
        ]

    def _judge(
        self,
        task: Task,
        cluster: Cluster,
        outcomes: dict[str, Outcome],
        times: Times,
        numbers: dict[Kernel, int],
    ) -> dict[str, Any]:
        """Say what the plans for a cluster take, and what was predicted."""
        costs = self._planning.costs(task)
        plans = [o.plan for o in outcomes.values() if o.plan is not None]
        collectives = list(dict.fromkeys(c for p in plans for c in p.collectives))
        kernels = list(dict.fromkeys(k for p in plans for k in p.kernels))
        expected_kernels = predict_kernels(
            kernels, costs.compute, costs.comms, task.world_size
        )
        expected = {
            c: predict_collective(c, costs.comms, task.world_size) for c in collectives
        }
        taken = self._collectives(cluster, collectives)
        entries = {}
        for name, outcome in outcomes.items():
            entry = entries[name] = _entry(outcome, task)
            if outcome.plan is None:
                continue
            entry["predicted"] = add_up(outcome.plan, expected_kernels, expected)
            entry["measured"] = add_up(outcome.plan, times, taken)
            entry["kernels"] = [
                [-1 if k is None else numbers[k] for k in stage.kernels]
                for stage in outcome.plan.stages
            ]
            entry["column_orders"] = [
                -1 if stage.column_order is None else numbers[stage.column_order]
                for stage in outcome.plan.stages
            ]
        return entries

    def _collectives(
        self, cluster: Cluster, collectives: Sequence[Collective]
    ) -> dict[Collective, float]:
        """Return what collectives take on a cluster [ms]."""
        if cluster.name != GLOO:
            return {c: cluster.collective_ms(c) for c in collectives}
        if self._group is None:
            self._group = RankGroup(2)
        rounds, passes = self._options.comms_rounds, self._options.comms_passes
        return self._group.measure(collectives, rounds, passes)

    def _keep_passes(self, task: Task, raw: Mapping[Kernel, Sequence[Pass]]) -> None:
        """Add every pass of a task's kernels to `<out>_passes.parquet`."""
        rows = [
            {"task": task.name, "kernel": number, **asdict(one)}
            for number, passes in enumerate(raw.values())
            for one in passes
        ]
        path = at(self._options.out, "_passes.parquet")
        table = pyarrow.Table.from_pylist(rows)
        if path.exists():
            known = parquet.read_table(path)
            others = known.filter(compute.field("task") != task.name)
            table = pyarrow.concat_tables([others, table])
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path)

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


def _shown(argument: str) -> str:
    """Leave out where this machine keeps its files."""
    path = Path(argument)
    return path.name if path.is_absolute() else argument


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = parse_arguments(arguments)
    if options.pages_only:
        known = read_results(options.out)
        write_pages(known, options.out)
        _show(known, options.readme)
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
    _show(comparison.data, options.readme)


def _show(data: dict[str, Any], readme: Path | None) -> None:
    """Print the headline, and put it in the place of an earlier one."""
    table = headline(data)
    print(table)
    if readme is not None:
        text = readme.read_text(encoding="utf-8")
        earlier = re.search(r"^\| planner, (.+\n)+\n\*.*\*$", text, re.MULTILINE)
        if earlier is None:
            sys.exit(f"{readme} holds no table of planners to renew")
        text = text[: earlier.start()] + table + text[earlier.end() :]
        readme.write_text(text, encoding="utf-8")
