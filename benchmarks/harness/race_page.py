"""What a race shows: paired times of plans, predictions beside them, and a page."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.models import SEQUENCES
from harness.pages import table
from harness.planning import (
    ALL_TYPES,
    BEST_PRACTICE,
    CALIBRATED,
    OURS,
    PLANNERS,
    TORCHREC,
)
from harness.race_tasks import family_of
from torchrec_neuroshard.costs.simulator import PHASES

Floats = npt.NDArray[np.float64]

AGAIN = "best-practice-again"
"""The same plan as `BEST_PRACTICE`, trained as if another planner had made it."""
DENSE = "dense-layers"
"""The dense layers alone; what an iteration takes longer than they is the tables'."""
LOSS_TOLERANCE = 1e-4
"""Relative difference of the first losses: kernels add in different orders."""
ITERATION, EMBEDDING = "iteration_ms", "embedding_ms"
RACERS = {OURS: "this planner", CALIBRATED: "this planner, calibrated"}
MEASURES = {ITERATION: "iteration", EMBEDDING: "tables' part"}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A plan's time over another's, paired by rounds."""

    value: float
    """Middle of the rounds."""
    noise: float
    """Two standard errors of its logarithm."""

    def __str__(self) -> str:
        return f"{self.value:.3f} +-{self.noise:.3f}"


def trained(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the plans of a task that were trained in every round."""
    plans = task["plans"].items()
    return {n: e for n, e in plans if n != DENSE and "failed" not in e}


def times(task: dict[str, Any], name: str, what: str) -> Floats:
    """Return a plan's time in each round [ms]."""
    iteration = _means(task, name)
    return iteration if what == ITERATION else iteration - _means(task, DENSE)


def _means(task: dict[str, Any], name: str) -> Floats:
    each = np.array(task["plans"][name]["rounds"]["iteration_ms"], dtype=np.float64)
    means: Floats = each.mean(axis=1)
    return means


def ratio(task: dict[str, Any], name: str, base: str, what: str) -> Ratio:
    """Return one plan's time over another's."""
    mine, other = (times(task, n, what) for n in (name, base))
    logs = np.log(mine / other)
    # Hodges and Lehmann's estimate: the median of the means of all pairs of rounds.
    pairs = np.add.outer(logs, logs)[np.triu_indices(len(logs))] / 2
    middle = float(np.median(pairs))
    # Its standard error, if the middle of the rounds is like a normal law's.
    spread = 1.023 * 1.483 * float(np.median(np.abs(logs - middle)))
    return Ratio(math.exp(middle), 2 * spread / math.sqrt(len(logs)))


def better(task: dict[str, Any]) -> str:
    """Return TorchRec's plan with the shorter iteration."""
    there = [n for n in TORCHREC if n in trained(task)]
    return min(there, key=lambda n: float(np.median(times(task, n, ITERATION))))


def predicted(task: dict[str, Any], name: str, base: str) -> float:
    """Return the predicted time of a plan's tables over another's."""
    mine, other = (task["plans"][n]["predicted"][EMBEDDING] for n in (name, base))
    return float(mine / other)


def same(task: dict[str, Any], one: str, other: str) -> bool:
    """Whether two planners made the same plan."""
    return bool(task["plans"][one]["shards"] == task["plans"][other]["shards"])


def balanced(task: dict[str, Any], name: str) -> float:
    """Return a plan's tables' part over itself, if all ranks' kernels took the mean."""
    rounds = task["plans"][name]["rounds"]["rank_compute_ms"]
    by_rank = np.median(rounds, axis=0)  # forward and backward of each rank
    saved = (by_rank.max(axis=0) - by_rank.mean(axis=0)).sum()
    return float(1 - saved / np.median(times(task, name, EMBEDDING)))


def losses_differ(task: dict[str, Any]) -> float:
    """Return the largest relative difference of two plans' first losses."""
    first = [e["rounds"]["losses"][0][0] for e in trained(task).values()]
    return float(max(first) / min(first) - 1)


def mean_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean and its 95 % interval over drawn tasks."""
    logs = np.log(np.array(values))
    rng = np.random.default_rng(0)
    drawn = rng.choice(logs, (10_000, len(logs))).mean(axis=1)
    low, high = np.exp(np.quantile(drawn, [0.025, 0.975]))
    return float(np.exp(logs.mean())), float(low), float(high)


def figures(tasks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the summary, for expectations and for the page.

    Returns:
        Planner -> measure -> ratios of all tasks to TorchRec's better plan, or to the
        plans of one of its planners. "predicted" has predicted ratios, "equal" those of
        equal plans.
    """
    found: dict[str, Any] = {name: {} for name in RACERS}
    for name in RACERS:
        there = [t for t in tasks if name in trained(t)]
        for what in MEASURES:
            found[name][what] = [ratio(t, name, better(t), what).value for t in there]
        found[name]["predicted"] = [predicted(t, name, better(t)) for t in there]
        for rival in TORCHREC:
            found[name][rival] = [
                ratio(t, name, rival, ITERATION).value
                for t in there
                if rival in trained(t)
            ]
    found["equal"] = {
        what: [ratio(t, AGAIN, BEST_PRACTICE, what).value for t in tasks]
        for what in MEASURES
    }
    return found


def smallest(found: dict[str, Any], what: str) -> float:
    """Return the smallest difference of a task that is not noise.

    Twice the root mean square of the logarithms of equal plans' ratios.
    """
    logs = np.log(np.array(found["equal"][what]))
    return float(np.expm1(2 * np.sqrt((logs**2).mean())))


def mean(found: dict[str, Any], name: str, what: str) -> float:
    """Return the geometric mean of a planner's ratios."""
    return mean_with_interval(found[name][what])[0]


def gap(found: dict[str, Any], name: str) -> float:
    """Return the median difference of predicted and measured gains [points]."""
    pairs = zip(found[name]["predicted"], found[name][EMBEDDING], strict=True)
    return float(np.median([abs(said - real) * 100 for said, real in pairs]))


def num_above(found: dict[str, Any], name: str, limit: float) -> int:
    """Return the number of tasks whose iteration is above a ratio."""
    return sum(r > limit for r in found[name][ITERATION])


EXPECTED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "Equal plans: iterations differ by less than 1 % on average": lambda f: (
        abs(mean(f, "equal", ITERATION) - 1) < 0.01
    ),
    "Calibrated: iteration at most 0.97": lambda f: (
        mean(f, CALIBRATED, ITERATION) <= 0.97
    ),
    "Calibrated: tables' part at most 0.96": lambda f: (
        mean(f, CALIBRATED, EMBEDDING) <= 0.96
    ),
    "Calibrated: the iteration does not reach 0.92": lambda f: (
        mean(f, CALIBRATED, ITERATION) > 0.92
    ),
    "Calibrated: at most 4 iterations above 1.02": lambda f: (
        num_above(f, CALIBRATED, 1.02) <= 4
    ),
    "Calibrated: no iteration above 1.05": lambda f: (
        num_above(f, CALIBRATED, 1.05) == 0
    ),
    "Calibrated: predicted and measured gain of the tables differ by at most 5 points "
    "(median)": lambda f: gap(f, CALIBRATED) <= 5,
    "As shipped: iteration at most 1.00": lambda f: mean(f, OURS, ITERATION) <= 1.0,
    "As shipped: longer than calibrated": lambda f: (
        mean(f, OURS, ITERATION) > mean(f, CALIBRATED, ITERATION)
    ),
}
"""What was expected before the run -> whether it held. Four tasks had been tried with
fewer rounds, and with other prices of replicas and exchanges."""


def page(data: dict[str, Any]) -> str:
    """Return the comparison in Markdown."""
    where, tasks, kept = data["hardware"], data["tasks"], kept_tasks(data)
    found, config, costs = figures(kept), data["config"], data["cost_model"]
    drifted = [t["name"] for t in tasks if t not in kept]
    head = [
        f"# Jobs that train: {data['world_size']} ranks of {where['device']} over "
        f"{data['backend']}",
        f"`{data['command']}`, {data['date']}, commit {data['commit']}, "
        f"{data['minutes']:.0f} minutes; torch {where['torch']}, fbgemm "
        f"{where['fbgemm']}, torchrec {data['versions']['torchrec']}. Costs: "
        f"{costs['hardware']}; collectives: {costs['comms_source']}.",
        "\n".join(f"- *{name}*: {text}" for name, text in PLANNERS.items()),
        "Left out because the machine's speed drifted, twice: "
        f"{', '.join(drifted) or 'no task'}. Repeated: "
        f"{', '.join(t['name'] for t in kept if t.get('repeated')) or 'no task'}.",
    ]
    if not kept:
        return "\n\n".join(head) + "\n"
    parts = [
        *head,
        "## Summary",
        summary_table(kept),
        "Over TorchRec's better plan of each task; below 1 is shorter. Geometric "
        "means, 95 % intervals over tasks in brackets. Equal plans: TorchRec's best "
        "practice, trained twice. A difference of one task is noise below "
        f"{smallest(found, ITERATION):.1%} of the iteration and "
        f"{smallest(found, EMBEDDING):.1%} of the tables' part.",
        _families(kept),
        _potential(kept),
        "## Tasks",
        _task_table(tasks),
        f"Ratios are the middle of {config['rounds']} rounds, +- two standard errors. "
        f"A round trains each plan for {config['iterations']} iterations timed as a "
        f"whole and {config['phase_iterations']} with timed phases. *Tables' part* is "
        "what an iteration takes longer than the dense layers, which are trained alone "
        "in the same rounds. Predicted: the tables' part, by one cost model for all "
        "plans. A `=` marks plans equal to TorchRec's. Cut tables lost rows, so that "
        f"each model has at most {config['max_gib']} GiB. Freed memory is kept, as in "
        "jobs with a caching allocator.",
    ]
    if len(kept) > 2 and all(found[name][ITERATION] for name in RACERS):
        held = {text: check(found) for text, check in EXPECTED.items()}
        lines = [(text, "yes" if yes else "**no**") for text, yes in held.items()]
        parts += [
            "## Expected before the run",
            table("expected | held", lines),
            f"{sum(held.values())} of {len(held)} held.",
        ]
    parts += [
        "## Predicted and measured",
        _prediction_text(kept),
        _phase_table(tasks),
        "Milliseconds, predicted and measured, of the slowest rank in each phase; "
        "collectives from the last rank's arrival to the last rank's end. Measured "
        "times are medians of rounds, not corrected for the machine's speed. Phases of "
        "bags and of sequences in one model overlap.",
    ]
    return "\n\n".join(parts) + "\n"


def kept_tasks(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tasks but those during both attempts of which the machine drifted."""
    return [t for t in data["tasks"] if t["drift"] <= data["most_drift"]]


def summary_table(tasks: Sequence[dict[str, Any]], *, brief: bool = False) -> str:
    """Return the means of all planners, and of equal plans.

    Args:
        tasks: Results of the tasks.
        brief: Whether to leave out the columns about single tasks.
    """
    found = figures(tasks)
    columns = {
        "iteration over TorchRec's better plan": ITERATION,
        "over its best practice": BEST_PRACTICE,
        "over all types": ALL_TYPES,
        "tables' part over the better plan's": EMBEDDING,
        "predicted": "predicted",
    }
    more = ["predicted and measured gain of the tables differ by (median)"]
    more += ["iterations above 1.02, above 1.05", "worst iteration", "the same plan"]
    rows = []
    for name, title in {**RACERS, "equal": "equal plans"}.items():
        own = found[name]
        count = len(own[ITERATION])
        if not count:  # not raced
            continue
        row = [
            title,
            str(count),
            *(_interval(own.get(c, [])) for c in columns.values()),
        ]
        if name in RACERS and not brief:
            over = [num_above(found, name, limit) for limit in (1.02, 1.05)]
            equal = sum(same(t, name, better(t)) for t in tasks if name in trained(t))
            row += [f"{gap(found, name):.1f} points", f"{over[0]}, {over[1]}"]
            row += [f"{max(own[ITERATION]):.3f}", str(equal)]
        rows.append(row + ["-"] * (7 + len(more) * (not brief) - len(row)))
    return table(["planner", "tasks", *columns, *more * (not brief)], rows)


def _interval(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, low, high = mean_with_interval(values)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _families(tasks: Sequence[dict[str, Any]]) -> str:
    """Return each planner's mean iteration by family, and without sequences."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for task in tasks:
        family = family_of(task["name"])
        parts.setdefault(family, []).append(task)
        if family != SEQUENCES:
            parts.setdefault(f"all but {SEQUENCES}", []).append(task)
    rows = []
    for family, own in sorted(parts.items()):
        found = figures(own)
        cells = [_interval(found[name][ITERATION]) for name in RACERS]
        rows.append((family, str(len(own)), *cells))
    head = [f"{title}: iteration" for title in RACERS.values()]
    return table(["family", "tasks", *head], rows)


def _potential(tasks: Sequence[dict[str, Any]]) -> str:
    """Return what perfect balance would gain."""
    shares = [balanced(t, better(t)) for t in tasks]
    return (
        "What balance alone could gain: if all ranks' kernels of TorchRec's better "
        "plan took the mean of the ranks, the tables' part would be "
        f"{_interval(shares)} of what it is, and {min(shares):.3f} in the task with "
        "most to gain."
    )


def _task_table(tasks: Sequence[dict[str, Any]]) -> str:
    rows = []
    for task in tasks:
        base = better(task)
        cells = []
        for name in RACERS:
            if name not in trained(task):
                cells += [task["plans"].get(name, {}).get("failed", "-"), "", ""]
                continue
            mark = " =" if same(task, name, base) else ""
            cells += [
                f"{predicted(task, name, base):.3f}{mark}",
                str(ratio(task, name, base, EMBEDDING)),
                str(ratio(task, name, base, ITERATION)),
            ]
        ms = np.median(times(task, base, ITERATION))
        differ = losses_differ(task)
        rows.append(
            (
                task["name"],
                f"{task['num_tables']} ({task['num_cut']}), {task['gib']:.1f} GiB",
                f"{task['batch_size']:,}, {task['optimizer']}",
                f"{base}, {ms:.0f} ms",
                *cells,
                str(ratio(task, AGAIN, BEST_PRACTICE, ITERATION)),
                "equal" if differ <= LOSS_TOLERANCE else f"differ ({differ:.1e})",
            )
        )
    titles = [
        f"{n}: {w}" for n in RACERS for w in ("predicted", "tables' part", "iteration")
    ]
    head = [
        "task",
        "tables (cut)",
        "samples a rank, optimizer",
        "TorchRec's better plan",
    ]
    return table([*head, *titles, "equal plans", "first losses"], rows)


def _prediction_text(tasks: Sequence[dict[str, Any]]) -> str:
    """Return how well predictions order the plans of a task, and their error."""
    right = pairs = 0
    errors = []
    for task in tasks:
        names = [n for n in PLANNERS if n in trained(task)]
        for name in names:
            real_ms = float(np.median(times(task, name, EMBEDDING)))
            errors.append(task["plans"][name]["predicted"][EMBEDDING] / real_ms)
        for one, other in itertools.combinations(names, 2):
            if same(task, one, other):
                continue
            real = ratio(task, one, other, EMBEDDING)
            if abs(math.log(real.value)) > real.noise:
                pairs += 1
                right += (predicted(task, one, other) < 1) == (real.value < 1)
    return (
        f"Of {pairs} pairs of a task's plans whose tables' parts differ by more than "
        f"two standard errors, {right} are in the predicted order. Predicted over "
        "measured: "
        f"{statistics.median(errors):.2f} (median; {min(errors):.2f} to "
        f"{max(errors):.2f})."
    )


def _phase_table(tasks: Sequence[dict[str, Any]]) -> str:
    rows = []
    for task in tasks:
        for name in PLANNERS:
            if name not in trained(task):
                continue
            entry = task["plans"][name]
            real = np.median(entry["rounds"]["phases_ms"], axis=0)
            said = entry["predicted"]["phases_ms"]
            kinds = ", ".join(
                f"{n} {k.partition('/')[0]}" for k, n in entry["sharding_types"].items()
            )
            cells = [
                f"{said[p]:.1f}, {ms:.1f}" for p, ms in zip(PHASES, real, strict=True)
            ]
            whole = np.median(times(task, name, EMBEDDING))
            iteration = np.median(times(task, name, ITERATION))
            rows.append(
                (
                    f"{task['name']}: {name}",
                    kinds,
                    *cells,
                    f"{entry['predicted'][EMBEDDING]:.1f}, {whole:.1f}",
                    f"{iteration:.1f}",
                )
            )
    head = ("plan", "tables", *PHASES, "tables' part", "iteration")
    return table(head, rows)
