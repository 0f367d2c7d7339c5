"""Statistics over tasks: paired ratios and their spread."""

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
"""Our plan, timed a second time: its difference from itself is noise."""
PAPER_NETS = "neuroshard, paper's nets"
ALL_TYPES = "torchrec, all types"
SPLIT_TYPES = "torchrec, all types, min_partition=32"
DEFAULT_BANDWIDTH = ", default bandwidth"
"""Ends the names of TorchRec's planners that do not know the card's bandwidth."""
UNMEASURED, FEW_SETS = "default, nothing measured", "default, 100 measured sets"
COLUMNS = "default, columns only"
"""Our planner with the sharding types that most rivals have."""

PATH, KERNELS, COLLECTIVES = "critical_path_ms", "kernel_path_ms", "collectives_ms"
POWER = 2.8
"""Standard errors of an effect that a 95 % test finds in four of five cases."""
SAME = 0.01
"""Ratios within this of 1 count as neither won nor lost."""
RESAMPLES, CONFIDENCE, SEED = 10_000, 0.95, 0

Task = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """A planner compared with another, on tasks for which both have a plan."""

    num_tasks: int
    mean: float
    """Geometric mean of the ratios; below 1 the planner is faster."""
    low: float
    high: float
    """Upper end of the bootstrap interval over tasks; `low` is the lower end."""
    worst: float
    worst_task: str
    wins: int
    losses: int

    def text(self) -> str:
        """Return the mean and its interval as text."""
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def measured(task: Task, planner: str, metric: str) -> float | None:
    """Return a measured figure; None if the planner has no measured plan."""
    found = task["planners"].get(planner, {}).get("measured")
    return None if found is None else float(found[metric])


def ratios(
    tasks: Iterable[Task],
    planner: str,
    yardstick: str | Sequence[str],
    metric: str = PATH,
) -> dict[str, float]:
    """Return task -> ratio of a planner's measured figure to another's.

    With several planners to compare with, the best one on each task counts. Tasks
    without both figures are left out.
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
    """Return a planner compared with one or several; None without common tasks."""
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
    """Return the bootstrap interval of the geometric mean."""
    rng = np.random.default_rng(SEED)
    logs = np.log(np.asarray(values, dtype=np.float64))
    means = rng.choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.exp(np.quantile(means, [tail, 1 - tail]))
    return float(low), float(high)


def outcomes(tasks: Iterable[Task], planner: str) -> Counter[str]:
    """Return the number of a planner's tasks with each status."""
    asked = [t["planners"][planner] for t in tasks if planner in t["planners"]]
    return Counter(entry["status"] for entry in asked)


def violations(tasks: Iterable[Task], planner: str) -> int:
    """Return the number of plans that exceed the memory of a rank."""
    return sum(
        bool(t["planners"].get(planner, {}).get("ranks_over_memory")) for t in tasks
    )


def prediction_ratios(tasks: Iterable[Task], planner: str, metric: str) -> list[float]:
    """Return predicted over measured figures of a planner's plans."""
    found = []
    for task in tasks:
        real = measured(task, planner, metric)
        if real is not None:
            found.append(task["planners"][planner]["predicted"][metric] / real)
    return found


def noise(tasks: Iterable[Task], metric: str = PATH) -> tuple[float, int]:
    """Return the noise of a plan timed twice, and the number of tasks.

    The noise is the standard deviation, over tasks, of the log ratio of two timings of
    our plan.
    """
    logs = [math.log(r) for r in ratios(tasks, AGAIN, OURS, metric).values()]
    if len(logs) < 2:
        return math.nan, len(logs)
    return math.sqrt(statistics.fmean(v * v for v in logs)), len(logs)


def detectable(tasks: Iterable[Task], metric: str = PATH) -> float:
    """Return the smallest difference of means that exceeds the noise."""
    deviation, count = noise(tasks, metric)
    return POWER * deviation / math.sqrt(max(count, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The plan of a task that is predicted to be fastest, compared with the fastest."""

    task: str
    num_plans: int
    predicted_best: str
    """Planner of the plan predicted fastest."""
    measured_best: str
    """Planner of the fastest measured plan."""
    regret: float
    """Relative loss by choosing the plan predicted fastest; 0: it is the fastest."""


def choices(
    tasks: Iterable[Task], metric: str = KERNELS, least_plans: int = 2
) -> list[Choice]:
    """Return the plan predicted fastest and the fastest plan of each task.

    Plans whose predictions agree to six digits count as one, and their measured times
    are averaged. A plan that was timed twice counts once.

    Args:
        tasks: Tasks with predicted and measured figures of each plan.
        metric: Figure to compare plans by.
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
