"""What the tasks together say: paired ratios, their spread, and what was expected."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner_comparison.tasks import SEED_FAMILY
from torchrec_neuroshard.baselines.heuristics import GREEDY_KEYS

OURS, PAPER, BEST_PRACTICE = "default", "neuroshard", "torchrec, best practice"
FITTED = "torchrec, best practice, fitted"
AGAIN = "default, again"
"""The same plan, timed as if it were another planner's: what chance makes of it."""
PAPER_NETS, POLICIES = "neuroshard, paper's nets", ("autoshard", "dreamshard")
PAPER_MEASURED = "neuroshard, measured nets"
COLUMNS, OUR_TYPES = "default, columns only", ", our types"
"""Our plans of the types that most rivals have; whom of them our types were given."""
GREEDIES = tuple(f"greedy-{key}" for key in GREEDY_KEYS)
"""The papers' own rules."""

PATH, KERNELS, COLLECTIVES = "critical_path_ms", "kernel_path_ms", "collectives_ms"
WORST_RANK = "worst_rank_ms"
WANTED = {BEST_PRACTICE: 0.80, FITTED: 0.90, PAPER: 0.97, PAPER_NETS: 0.97}
"""What was expected of `default` over these, of kernels and collectives together."""
WORST_OVER_STOCK = 1.03
"""On any task, of the shortest of TorchRec's plans."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """A line that was written down before the run."""

    expected: str
    found: str
    met: bool | None
    """None: the tasks at hand cannot tell."""
    of_ours: bool = True
    """Whether it is of this planner; else, of a method on its own ground."""


def measured(task: Task, planner: str, metric: str) -> float | None:
    """Return a measured figure; None where the planner has no plan that ran."""
    entry = task["planners"].get(planner, {})
    found = entry.get("measured")
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


def scaled(
    tasks: Iterable[Task], planner: str, yardstick: str, times: float
) -> dict[str, float]:
    """Return `ratios` of the sums, were kernels so many times faster."""
    found = {}
    for task in tasks:
        both = [
            (measured(task, n, KERNELS), measured(task, n, COLLECTIVES))
            for n in (planner, yardstick)
        ]
        sums = [k / times + c for k, c in both if k is not None and c is not None]
        if len(sums) == len(both):
            found[task["name"]] = sums[0] / sums[1]
    return found


def compare(
    tasks: Iterable[Task],
    planner: str,
    yardstick: str | Sequence[str],
    metric: str = PATH,
) -> Paired | None:
    """Compare two planners, or one with several; None where they share no task."""
    return pair(ratios(tasks, planner, yardstick, metric))


def pair(by_task: Mapping[str, float]) -> Paired | None:
    """Describe ratios of tasks; None where there is none."""
    if not by_task:
        return None
    values = list(by_task.values())
    worst = max(by_task, key=lambda name: by_task[name])
    low, high = bootstrap(values)
    return Paired(
        num_tasks=len(values),
        mean=geometric_mean(values),
        low=low,
        high=high,
        worst=by_task[worst],
        worst_task=worst,
        wins=sum(v < 1 - SAME for v in values),
        losses=sum(v > 1 + SAME for v in values),
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return math.exp(statistics.fmean(map(math.log, values)))


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the geometric mean when tasks are drawn anew."""
    rng = np.random.default_rng(SEED)
    logs = np.log(np.asarray(values, dtype=np.float64))
    means = rng.choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.exp(np.quantile(means, [tail, 1 - tail]))
    return float(low), float(high)


def asked(tasks: Iterable[Task], planner: str) -> list[Task]:
    """Return the tasks that a planner was to plan: of some, a part."""
    return [t for t in tasks if planner in t["planners"]]


def outcomes(tasks: Iterable[Task], planner: str) -> Counter[str]:
    """Count how a planner's tasks ended."""
    return Counter(t["planners"][planner]["status"] for t in asked(tasks, planner))


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


def expectations(tasks: Sequence[Task]) -> list[Expectation]:
    """Say of each line that was expected whether these tasks bear it out.

    Args:
        tasks: Of one cluster.
    """
    names = planners(tasks)
    found = []
    if OURS in names:
        found += [_is_quicker(tasks, o, w) for o, w in WANTED.items() if o in names]
        found += [
            _is_never_behind(tasks, names),
            is_never_slower(tasks),
            _always_plans(tasks),
        ]
    own = [t for t in tasks if t["family"] == SEED_FAMILY]
    for method in (PAPER, PAPER_NETS, PAPER_MEASURED, *POLICIES):
        if method in names and not set(GREEDIES).isdisjoint(names):
            found.append(_beats_greedies(own, method))
    return found


def _is_quicker(tasks: Sequence[Task], other: str, wanted: float) -> Expectation:
    found = compare(tasks, OURS, other)
    return Expectation(
        expected=f"`{OURS}` takes at most {wanted:g} of `{other}` (geometric mean)",
        found="no task with both plans"
        if found is None
        else f"{found.text()} on {found.num_tasks} tasks{_room(tasks, other)}",
        met=None if found is None else found.mean <= wanted,
    )


def _room(tasks: Sequence[Task], other: str) -> str:
    """Say what was predicted of the same ratio, and the least it could have been."""
    both = [
        (t["planners"][OURS], t["planners"][other]["predicted"][PATH])
        for t in tasks
        if measured(t, OURS, PATH) and measured(t, other, PATH)
    ]
    predicted = geometric_mean([o["predicted"][PATH] / p for o, p in both])
    text = f"; predicted {predicted:.3f}"
    bounds = [o["lower_bound_ms"] / p for o, p in both if o.get("lower_bound_ms")]
    if len(bounds) < len(both):
        return text
    return f"{text}, and by `{OURS}`'s bounds at least {geometric_mean(bounds):.3f}"


def _is_never_behind(tasks: Sequence[Task], names: Sequence[str]) -> Expectation:
    least = detectable(tasks)
    found = nearest(tasks, sorted(n for n in names if not n.startswith(OURS)))
    return Expectation(
        expected=f"`{OURS}` is behind no rival's geometric mean by more than can be "
        f"detected ({least:.1%})",
        found="no rival" if found is None else f"nearest: `{found[0]}`, {found[1]:.3f}",
        met=None if found is None or math.isnan(least) else found[1] <= 1 + least,
    )


def nearest(
    tasks: Sequence[Task], names: Sequence[str], metric: str = PATH
) -> tuple[str, float] | None:
    """Return who comes nearest to this planner, and the mean of ours over theirs."""
    paired = {n: compare(tasks, OURS, n, metric) for n in names}
    means = {n: p.mean for n, p in paired.items() if p is not None}
    return max(means.items(), key=lambda item: item[1], default=None)


def stock(tasks: Iterable[Task]) -> list[str]:
    """Return the names of TorchRec's planners."""
    return [n for n in planners(tasks) if n.startswith("torchrec")]


def planners(tasks: Iterable[Task]) -> list[str]:
    """Return all planners that were asked, in order."""
    return list(dict.fromkeys(n for t in tasks for n in t["planners"]))


def is_never_slower(tasks: Sequence[Task]) -> Expectation:
    """Compare with whichever of TorchRec's plans is the shortest on a task.

    Args:
        tasks: Of one cluster.
    """
    over = ratios(tasks, OURS, stock(tasks))
    worst = max(over, key=lambda name: over[name], default=None)
    above = [name for name, ratio in over.items() if ratio > WORST_OVER_STOCK]
    timed_again = ratios(tasks, AGAIN, stock(tasks))
    again = [timed_again[name] for name in above if name in timed_again]
    return Expectation(
        expected=f"`{OURS}` takes on no task more than {WORST_OVER_STOCK} of the "
        "shortest of TorchRec's plans",
        found="no task with both"
        if worst is None
        else f"{over[worst]:.3f} on {worst}; above on {len(above)} of {len(over)}"
        + (f", timed again {min(again):.3f} to {max(again):.3f}" if again else ""),
        met=None if worst is None else not above,
    )


def _always_plans(tasks: Sequence[Task]) -> Expectation:
    ended = outcomes(tasks, OURS)
    over = violations(tasks, OURS)
    others = ", ".join(
        f"{n} {status}" for status, n in ended.items() if status != "plan"
    )
    return Expectation(
        expected=f"`{OURS}` never fails to plan",
        found=f"{ended['plan']} plans of {len(tasks)} tasks, {over} over memory"
        + (f"; {others}" if others else ""),
        met=ended["plan"] == len(tasks) and not over,
    )


def _beats_greedies(tasks: Sequence[Task], method: str) -> Expectation:
    all_paired = {g: compare(tasks, method, g) for g in GREEDIES}
    known = {g: p for g, p in all_paired.items() if p is not None}
    return Expectation(
        expected=f"`{method}` beats each of the papers' greedies on the papers' own "
        f"tasks (`{SEED_FAMILY}`; geometric mean below 1)",
        found="; ".join(f"{g} {p.text()}" for g, p in known.items()) or "no task",
        met=all(p.mean < 1 for p in known.values()) if known else None,
        of_ours=False,
    )
