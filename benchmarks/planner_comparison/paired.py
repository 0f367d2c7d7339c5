"""What the tasks together say: paired ratios and their spread."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

OURS, PAPER, BEST_PRACTICE = "default", "neuroshard", "torchrec, best practice"
AGAIN = "default, again"
"""Our plan, timed as if it were another planner's: the difference is chance."""
PAPER_NETS = "neuroshard, paper's nets"
COLUMNS = "default, columns only"
"""Our plans of the types that most rivals have."""

PATH, KERNELS, COLLECTIVES = "critical_path_ms", "kernel_path_ms", "collectives_ms"
WORST_RANK = "worst_rank_ms"
POWER = 2.8
"""Standard errors between nothing and what is found four times in five at 95 %."""
SAME = 0.01
"""Ratios this close to 1 are neither won nor lost."""
RESAMPLES, CONFIDENCE, SEED = 10_000, 0.95, 0

Task = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """A planner against another on the tasks that both have a plan for."""

    num_tasks: int
    mean: float
    """Geometric mean of the ratios; below 1 the planner is quicker."""
    low: float
    high: float
    """Bootstrap interval over tasks."""
    worst: float
    worst_task: str
    wins: int
    losses: int

    def text(self) -> str:
        """Mean and interval."""
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def measured(task: Task, planner: str, metric: str) -> float | None:
    """Return a measured figure; None where the planner has no plan that ran."""
    found = task["planners"].get(planner, {}).get("measured")
    return None if found is None else float(found[metric])


def ratios(
    tasks: Iterable[Task],
    planner: str,
    yardstick: str | Sequence[str],
    metric: str = PATH,
) -> dict[str, float]:
    """Return task -> measured figure over the yardstick's, where both have one.

    Of several yardsticks the least figure on each task counts.
    """
    others = [yardstick] if isinstance(yardstick, str) else yardstick
    found = {}
    for task in tasks:
        ours = measured(task, planner, metric)
        theirs = [m for n in others if (m := measured(task, n, metric)) is not None]
        if ours is not None and theirs:
            found[task["name"]] = ours / min(theirs)
    return found


def compare(
    tasks: Iterable[Task],
    planner: str,
    yardstick: str | Sequence[str],
    metric: str = PATH,
) -> Paired | None:
    """Compare two planners, or one with several; None where they share no task."""
    by_task = ratios(tasks, planner, yardstick, metric)
    if not by_task:
        return None
    values = list(by_task.values())
    worst = max(by_task, key=lambda name: by_task[name])
    low, high = bootstrap(values)
    return Paired(
        num_tasks=len(values),
        mean=statistics.geometric_mean(values),
        low=low,
        high=high,
        worst=by_task[worst],
        worst_task=worst,
        wins=sum(v < 1 - SAME for v in values),
        losses=sum(v > 1 + SAME for v in values),
    )


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the geometric mean when tasks are drawn anew."""
    rng = np.random.default_rng(SEED)
    logs = np.log(np.asarray(values, dtype=np.float64))
    means = rng.choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.exp(np.quantile(means, [tail, 1 - tail]))
    return float(low), float(high)


def outcomes(tasks: Iterable[Task], planner: str) -> Counter[str]:
    """Count how a planner's tasks ended."""
    asked = [t["planners"][planner] for t in tasks if planner in t["planners"]]
    return Counter(entry["status"] for entry in asked)


def violations(tasks: Iterable[Task], planner: str) -> int:
    """Count plans that put more on a rank than its memory."""
    return sum(
        bool(t["planners"].get(planner, {}).get("ranks_over_memory")) for t in tasks
    )


def prediction_ratios(tasks: Iterable[Task], planner: str, metric: str) -> list[float]:
    """Return what was predicted over what was measured, of each plan."""
    found = []
    for task in tasks:
        real = measured(task, planner, metric)
        if real is not None:
            found.append(task["planners"][planner]["predicted"][metric] / real)
    return found


def noise(tasks: Iterable[Task], metric: str = PATH) -> tuple[float, int]:
    """Return by how much a plan differs from itself: the deviation, and the tasks.

    The standard deviation over tasks of the ratio's logarithm, of a plan whose kernels
    were timed twice, as if they were two planners'.
    """
    logs = [math.log(r) for r in ratios(tasks, AGAIN, OURS, metric).values()]
    if len(logs) < 2:
        return math.nan, len(logs)
    return math.sqrt(statistics.fmean(v * v for v in logs)), len(logs)


def detectable(tasks: Iterable[Task], metric: str = PATH) -> float:
    """Return the smallest difference of means that measuring alone would not hide."""
    deviation, count = noise(tasks, metric)
    return POWER * deviation / math.sqrt(max(count, 1))


def nearest(
    tasks: Sequence[Task], names: Sequence[str], metric: str = PATH
) -> tuple[str, float] | None:
    """Return who comes nearest to this planner, and the mean of ours over theirs."""
    paired = {n: compare(tasks, OURS, n, metric) for n in names}
    means = {n: p.mean for n, p in paired.items() if p is not None}
    return max(means.items(), key=lambda item: item[1], default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The plan of a task that the costs call shortest, among different ones."""

    task: str
    num_plans: int
    predicted_best: str
    """Who made it."""
    measured_best: str
    """Who made the plan that is the shortest."""
    regret: float
    """How much longer the former takes, as a share; 0 where they are one plan."""


def choices(
    tasks: Iterable[Task], metric: str = KERNELS, least_plans: int = 2
) -> list[Choice]:
    """Return which of each task's plans the costs choose, and which is the shortest.

    Plans that are predicted to take the same, to six digits, count as one: their
    measured times are averaged. The plan that is timed twice is not counted twice.

    Args:
        tasks: With what was predicted and measured of each plan.
        metric: What plans are compared by.
        least_plans: Tasks with fewer different plans are left out.
    """
    found = []
    for task in tasks:
        by_prediction: dict[str, list[tuple[str, float]]] = {}
        for name, entry in task["planners"].items():
            real = measured(task, name, metric)
            if real is not None and name != AGAIN:
                key = f"{entry['predicted'][metric]:.6g}"
                by_prediction.setdefault(key, []).append((name, real))
        plans = [
            (float(key), statistics.fmean(ms for _, ms in same), same[0][0])
            for key, same in by_prediction.items()
        ]
        if len(plans) < least_plans:
            continue
        _, chosen_ms, chosen = min(plans)
        _, best_ms, best = min(plans, key=lambda plan: plan[1])
        found.append(
            Choice(
                task=task["name"],
                num_plans=len(plans),
                predicted_best=chosen,
                measured_best=best,
                regret=chosen_ms / best_ms - 1,
            )
        )
    return found


def planners(tasks: Iterable[Task]) -> list[str]:
    """Return all planners that were asked, in order."""
    return list(dict.fromkeys(n for t in tasks for n in t["planners"]))
