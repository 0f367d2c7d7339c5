"""Judge bundles by their plans: the kernels of every rank, predicted and timed.

    python benchmarks/bench_calibration.py --bundles mine=FOLDER zen5=cpu_epyc_zen5 \
        --tables real_tables.json --out calibrated

For each task our planner makes a plan with each bundle, and TorchRec's planner makes
two. This machine then times the kernels of all plans on one thread, in rounds of
changing order. The time of a rank is the sum of its fused kernels, forward and
backward, and of the reordering of split columns. Collectives are not timed.

The script writes `<out>.json` (the times of every rank) and `<out>.md` (the page).
`--quick` is a dry run of one task. The machine should be quiet.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from harness.options import add_option
from harness.pages import table, write_page
from harness.provenance import describe_run
from planner_comparison.clusters import CLUSTERS, cluster_of
from planner_comparison.kernels import (
    KernelSettings,
    KernelTimer,
    copy_gb_per_s,
    kernels_of,
)
from planner_comparison.paired import ALL_TYPES, BEST_PRACTICE, OURS, POWER
from planner_comparison.planning import ask
from planner_comparison.plans import ROW_TYPES, RunPlan, Times, predict_kernels
from planner_comparison.results import at
from planner_comparison.rivals import Costs, load_costs, make_rivals
from planner_comparison.tasks import Task, TaskSettings, make_tasks

TORCHREC = (BEST_PRACTICE, ALL_TYPES)
LOST = 1.02
"""A plan lost if its busiest rank takes this many times as long as TorchRec's."""
TRAITS = (
    "log of the number of shards",
    "log of the lookups",
    "log of the mean rows of a shard",
    "log of the mean width, weighted by lookups",
    "share of lookups in row shards",
    "share of the largest shard in the lookups",
)
"""What the errors of ranks are compared with."""
_PLAN_SECONDS = 60.0

Data = Mapping[str, Any]
Floats = npt.NDArray[np.float64]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, after applying those of `--quick`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = functools.partial(add_option, parser)
    add("out", ..., "path of the results, without suffix", Path)
    named = "a name for the page, and the bundle's name or folder"
    add("bundles", ..., named, str, nargs="+", metavar="NAME=BUNDLE")
    add("tables", None, "JSON of published table sets", Path)
    add("seeds", [0, 1], "seeds of the tasks", int, nargs="+")
    add("batch_sizes", [2_048, 8_192], "samples over all ranks", int, nargs="+")
    add("num_tasks", 6, "tasks of each seed and batch size")
    add("max_rows", 400_000, "most rows of a table")
    add("rounds", 5, "timings of each kernel")
    add("quick", False, "one task")
    options = parser.parse_args(arguments)
    if not all(all(bundle.partition("=")) for bundle in options.bundles):
        parser.error("--bundles takes NAME=BUNDLE, for example mine=calibrated")
    if at(options.out, ".json").exists():
        parser.error(f"{at(options.out, '.json')} exists; take another --out")
    if options.quick:
        options.seeds, options.batch_sizes = options.seeds[:1], options.batch_sizes[:1]
        options.num_tasks = 1
    return options


def draw_tasks(options: argparse.Namespace) -> Iterator[tuple[str, Task]]:
    """Yield each task with the name of its group: its seed and its batch size.

    Each seed goes on in the list of tasks where the one before ended, so that the
    seeds have other tables and other numbers of ranks.
    """
    many = options.num_tasks
    seeds = enumerate(options.seeds)
    for (number, seed), batch in itertools.product(seeds, options.batch_sizes):
        drawn = TaskSettings(batch_size=batch, max_rows=options.max_rows, seed=seed)
        tasks = itertools.cycle(make_tasks(options.tables, drawn))
        for task in itertools.islice(tasks, number * many, (number + 1) * many):
            cluster = cluster_of(task.world_size).name
            name = f"seed {seed}, batch {batch:,}"
            yield name, dataclasses.replace(task, cluster=cluster)


class Judge:
    """Makes, times and predicts the plans of tasks."""

    def __init__(self, bundles: Mapping[str, str], rounds: int, arena: int) -> None:
        """Prepare the timer, and measure the bandwidth of memory.

        Args:
            bundles: Name on the page -> name or folder of the bundle.
            rounds: Timings of each kernel.
            arena: Most bytes of the shards of a rank.
        """
        self._bundles = bundles
        settings = KernelSettings(rounds=rounds, passes=1, contends=0.0)
        self._timer = KernelTimer(torch.device("cpu"), arena, 0.0, settings)
        self._rivals = make_rivals((OURS, *TORCHREC), Path("none"), 0.0, "a CPU")
        self._gb_per_s = copy_gb_per_s()

    def describe(self, task: Task) -> dict[str, Any]:
        """Return the machine's speed, and the bundles as a task has them."""
        models = {name: self._costs(name, task).compute for name in self._bundles}
        return {
            "gb_per_s": round(self._gb_per_s, 2),
            "reference_ms": self._timer.reference_ms,
            "bundles": {
                name: {
                    "hardware": model.hardware,
                    "source": model.source,
                    "reference_ms": getattr(model, "reference_ms", 0.0),
                }
                for name, model in models.items()
            },
        }

    def judge(self, task: Task) -> dict[str, Any]:
        """Return the plans of a task with the times of their ranks.

        The first bundle's plan is timed a second time, as if its kernels were others.
        """
        start = time.monotonic()
        plans = self._plan(task)
        again = next(iter(plans.values())).again()
        planned = time.monotonic()
        times = self._timer.medians(self._timer.measure([*plans.values(), again]))
        ended = time.monotonic()
        kernels = kernels_of(plans.values())
        predicted = {
            name: predict_kernels(kernels, self._costs(name, task).compute)
            for name in self._bundles
        }
        return {
            "planning_seconds": round(planned - start, 1),
            "measuring_seconds": round(ended - planned, 1),
            "speed_spread": round(self._timer.speed_spread(), 3),
            "again_ms": rank_ms(again, times),
            "plans": {
                name: {
                    "sharding_types": [stage.sharding_type for stage in plan.stages],
                    "measured_ms": rank_ms(plan, times),
                    "predicted_ms": {b: rank_ms(plan, t) for b, t in predicted.items()},
                    "traits": rank_traits(plan),
                }
                for name, plan in plans.items()
            },
        }

    def _costs(self, bundle: str, task: Task) -> Costs:
        cluster = CLUSTERS[task.cluster]
        return load_costs(self._bundles[bundle], "cpu", cluster, task.world_size, 1.0)

    def _plan(self, task: Task) -> dict[str, RunPlan]:
        """Return planner -> plan: ours by the names of bundles, then TorchRec's."""
        ours, *stock = self._rivals
        task = dataclasses.replace(task, memory_gb_per_s=self._gb_per_s)
        asked = {name: (ours, task, self._costs(name, task)) for name in self._bundles}
        any_costs = self._costs(next(iter(asked)), task)
        asked |= {rival.name: (rival, task, any_costs) for rival in stock}
        outcomes = {n: ask(*given, "cpu", _PLAN_SECONDS) for n, given in asked.items()}
        for name, outcome in outcomes.items():
            if outcome.plan is None:
                print(f"{task.name}, {name}: {outcome.status}, {outcome.reason}")
        return {n: o.plan for n, o in outcomes.items() if o.plan is not None}


def rank_ms(plan: RunPlan, times: Times) -> list[float]:
    """Return the time of each rank's kernels, forward and backward [ms]."""
    total_W = np.zeros(len(plan.rank_bytes))
    for stage in plan.stages:
        order = sum(times[stage.column_order]) if stage.column_order else 0.0
        total_W += [order + (sum(times[k]) if k else 0.0) for k in stage.kernels]
    return [float(f"{ms:.4g}") for ms in total_W]


def rank_traits(plan: RunPlan) -> list[list[float]]:
    """Return the `TRAITS` of each rank."""
    found = []
    for rank in range(len(plan.rank_bytes)):
        held = [
            (
                shard.profile_at(kernel.batch_size).num_lookups,
                shard.num_embeddings,
                shard.embedding_dim,
                stage.sharding_type in ROW_TYPES,
            )
            for stage in plan.stages
            if (kernel := stage.kernels[rank])
            for shard in kernel.shards
        ]
        lookups_N, rows_N, width_N, in_rows_N = np.array(held or [(1, 1, 1, False)]).T
        total = lookups_N.sum()
        shares_N = lookups_N / total
        logs = np.log([len(rows_N), total, rows_N.mean(), shares_N @ width_N])
        traits = [*logs, shares_N @ in_rows_N, shares_N.max()]
        found.append([round(float(value), 3) for value in traits])
    return found


def centred_logs(above: Sequence[float], below: Sequence[float]) -> Floats:
    """Return the log of each rank's ratio, less the mean of all ranks."""
    logs: Floats = np.log(np.asarray(above) / np.asarray(below))
    centred: Floats = logs - logs.mean()
    return centred


def errors(plan: Data, bundle: str) -> Floats:
    """Return the errors of a plan's ranks, after taking off their mean."""
    return centred_logs(plan["measured_ms"], plan["predicted_ms"][bundle])


def pooled_sd(plans: Sequence[Floats]) -> float:
    """Return the standard deviation among the ranks of a plan, over several plans."""
    freedom = sum(len(own) - 1 for own in plans)
    return math.sqrt(sum(float(own @ own) for own in plans) / max(freedom, 1))


def noise_sd(tasks: Sequence[Data]) -> float:
    """Return the noise of a rank's time, from the plans that were timed twice."""
    twice = [centred_logs(t["again_ms"], _first(t)["measured_ms"]) for t in tasks]
    return pooled_sd(twice) / math.sqrt(2)


def over_torchrec(task: Data, bundle: str) -> float:
    """Return our busiest rank over that of TorchRec's shorter plan, both measured.

    It is NaN if one of them has no plan.
    """
    busiest = {n: max(plan["measured_ms"]) for n, plan in task["plans"].items()}
    theirs = min((busiest[n] for n in TORCHREC if n in busiest), default=math.nan)
    return float(busiest.get(bundle, math.nan) / theirs)


def page_text(data: Data) -> str:
    """Return the page of a run."""
    run, tasks = data["run"], data["tasks"]
    hardware, versions = run["hardware"], run["versions"]
    return f"""# Bundles judged by their plans

{hardware["device"]}, one thread; torch {versions["torch"]}, fbgemm \
{hardware["fbgemm"]}, torchrec {versions["torchrec"]}; commit {run["commit"]}; \
{run["date"]}; {data["minutes"]} minutes; load average {run["load_average"][0]:.1f} at \
the start.

    {run["command"]}

- Measured: the kernels of every rank on this processor, one rank after another, the
  median of {data["rounds"]} rounds. A rank's time is its fused kernels, forward and
  backward, and the reordering of split columns. Collectives are not timed.
- Predicted: the same sum by a bundle.
- TorchRec's shorter plan: of its planner's two plans ({", ".join(TORCHREC)}), the one
  whose busiest rank is measured shorter. This planner knows the bandwidth of memory,
  {data["gb_per_s"]:.1f} GB/s in a copy on one thread.
- Noise: the plans of the first bundle were timed twice. {_noise_text(tasks)}

## By bundle

{_by_bundle(data)}

"sd": standard deviation of the log of measured over predicted among the ranks of a
plan, after the plan's mean is taken off. "Without noise": the noise of a rank in these
tasks is subtracted. "Level": the busiest rank predicted over the busiest measured, both
in units of the reference set. Means are geometric, with the deviation over tasks.

## What the errors go with

Correlations with traits of ranks, over all plans, those of TorchRec included. Each
plan's mean is taken off.

{_correlations(data)}

## By task

Busiest rank over TorchRec's shorter plan; sd among ranks.

{_by_task(data)}
"""


def _first(task: Data) -> Data:
    plan: Data = next(iter(task["plans"].values()))
    return plan


def _noise_text(tasks: Sequence[Data]) -> str:
    sd = noise_sd(tasks)
    # A ratio has the noise of two ranks.
    least = POWER * math.sqrt(2 / len(tasks)) * sd
    return (
        f"The noise of a\n  rank's time is {sd:.1%}. A mean ratio of busiest ranks "
        f"over {len(tasks)} tasks shows differences\n  above {least:.1%}."
    )


def _by_bundle(data: Data) -> str:
    groups = {"all": data["tasks"]}
    for task in data["tasks"]:
        groups.setdefault(task["group"], []).append(task)
    rows = [
        [f"{bundle}, {group}", *_row(data, tasks, bundle)]
        for group, tasks in groups.items()
        for bundle in data["bundles"]
    ]
    head = (
        "bundle | plans | sd | without noise | TorchRec's plans: sd | without noise | "
        "level | busiest / mean rank | / TorchRec's shorter | from, to | above "
        f"{LOST}"
    )
    return table(head, rows)


def _row(data: Data, tasks: Sequence[Data], bundle: str) -> list[str]:
    own = [t["plans"][bundle] for t in tasks if bundle in t["plans"]]
    stock = [t["plans"][n] for t in tasks for n in TORCHREC if n in t["plans"]]
    sds = []
    for plans in (own, stock):
        sd = pooled_sd([errors(plan, bundle) for plan in plans])
        sds += [sd, math.sqrt(max(0.0, sd**2 - noise_sd(tasks) ** 2))]
    unit = data["reference_ms"] / (
        data["bundles"][bundle]["reference_ms"] or data["reference_ms"]
    )
    busiest = [(max(p["predicted_ms"][bundle]), max(p["measured_ms"])) for p in own]
    over = [v for t in tasks if not math.isnan(v := over_torchrec(t, bundle))]
    return [
        f"{len(own)}",
        *(f"{sd:.1%}" for sd in sds),
        _mean([unit * predicted / measured for predicted, measured in busiest]),
        _mean([max(p["measured_ms"]) / np.mean(p["measured_ms"]) for p in own]),
        _mean(over),
        f"{min(over):.3f}, {max(over):.3f}" if over else "",
        f"{sum(v > LOST for v in over)}",
    ]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    logs = np.log(values)
    return f"{np.exp(logs.mean()):.3f} ({logs.std(ddof=int(len(logs) > 1)):.1%})"


def _correlations(data: Data) -> str:
    plans = [p for task in data["tasks"] for p in task["plans"].values()]
    own = [np.array(plan["traits"]) for plan in plans]
    traits_RX = np.concatenate([t - t.mean(axis=0) for t in own])
    columns = []
    for bundle in data["bundles"]:
        error_R = np.concatenate([errors(plan, bundle) for plan in plans])
        fit, *_ = np.linalg.lstsq(traits_RX, error_R, rcond=None)
        left = 1 - ((error_R - traits_RX @ fit) ** 2).sum() / (error_R**2).sum()
        with np.errstate(invalid="ignore"):  # a trait may be the same on all ranks
            columns.append([*np.corrcoef(traits_RX.T, error_R)[-1, :-1], left])
    names = [*TRAITS, "share of the errors' variance that all traits explain"]
    return table(
        ["trait of a rank", *data["bundles"]],
        [
            [name, *(f"{value:+.2f}" for value in values)]
            for name, *values in zip(names, *columns, strict=True)
        ],
    )


def _by_task(data: Data) -> str:
    rows = []
    for task in data["tasks"]:
        plans, cells = task["plans"], []
        for bundle in data["bundles"]:
            cell = "no plan"
            if bundle in plans:
                sd = pooled_sd([errors(plans[bundle], bundle)])
                cell = f"{over_torchrec(task, bundle):.3f}; {sd:.1%}"
            cells.append(cell)
        theirs = [max(plans[n]["measured_ms"]) for n in TORCHREC if n in plans]
        shorter = f"{min(theirs):.1f}" if theirs else "no plan"
        rows.append([f"{task['task']}, {task['group']}", shorter, *cells])
    return table(["task", "TorchRec's shorter [ms]", *data["bundles"]], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge all tasks, and write the data and the page."""
    options = parse_arguments(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start, run = time.monotonic(), describe_run()
    tasks = list(draw_tasks(options))
    bundles = dict(bundle.split("=", 1) for bundle in options.bundles)
    arena = max(task.memory_bytes for _, task in tasks)
    judge = Judge(bundles, options.rounds, arena)
    data = {"run": run, "max_rows": options.max_rows, "rounds": options.rounds}
    data |= judge.describe(tasks[0][1]) | {"traits": TRAITS, "tasks": []}
    for group, task in tasks:
        found = {"group": group, **task.to_json(), **judge.judge(task)}
        data["tasks"].append(found)
        data["minutes"] = round((time.monotonic() - start) / 60, 1)
        write_page(options.out, data, page_text(data))
        over = [f"{name} {over_torchrec(found, name):.3f}" for name in bundles]
        line = f"{data['minutes']:5.1f} min, {task.name}, {group}: {', '.join(over)}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
