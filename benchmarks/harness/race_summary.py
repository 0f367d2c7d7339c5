"""What a race prints about a task: times, noise, predictions, and a last sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.planning import ALL_TYPES, BEST_PRACTICE, CALIBRATED, OURS
from harness.race_page import (
    AGAIN,
    EMBEDDING,
    ITERATION,
    RACERS,
    Ratio,
    better,
    predicted,
    ratio,
    same,
    times,
    trained,
)
from torchrec_neuroshard.bundles.choice import POOR_ERROR
from torchrec_neuroshard.costs.simulator import PHASES

QUIET_DRIFT, QUIET_NOISE = 1.13, 0.102
"""Most drift, and most noise of the tables' part in the first 20 rounds, of the 20
tasks in `results/race_gloo2_202611.json.xz`. No other work ran on that machine."""
_PLANS = {
    OURS: "our plan",
    CALIBRATED: "our plan by measured costs",
    BEST_PRACTICE: "TorchRec's best practice",
    ALL_TYPES: "TorchRec's plan of all sharding types",
}


def summary(task: dict[str, Any], data: dict[str, Any]) -> str:
    """Return the result of a task as lines of text.

    Args:
        task: Result of the task.
        data: All results of the race.
    """
    base = better(task)
    racers = [name for name in RACERS if name in trained(task)]
    lines = [
        f"{task['name']}: {task['num_tables']} tables, {task['batch_size']:,} samples "
        f"a rank, {task['optimizer']}; {data['world_size']} ranks of "
        f"{data['hardware']['device']}"
    ]
    for name, entry in task["plans"].items():
        if "failed" in entry:
            lines.append(f"{name} failed: {entry['failed']}")
    titles = {EMBEDDING: "tables' part of an iteration", ITERATION: "whole iteration"}
    for what, title in titles.items():
        ms = np.median(times(task, base, what))
        lines.append(f"{title}: {ms:.1f} ms with {_PLANS[base]}")
        for name in racers:
            more = ""
            if what == EMBEDDING:
                more = f", predicted {predicted(task, name, base):.3f}"
                more += ", the same plan" * same(task, name, base)
            took, low, high = _bounds(ratio(task, name, base, what), 3)
            lines.append(f"  {_PLANS[name]}: {took} of it ({low} to {high}){more}")
    lines += _noise_lines(task, data, racers)
    lines += _prediction_lines(task, data, base)
    return "\n".join([*lines, *(verdict(task, data, name) for name in racers)])


def noise_of(task: dict[str, Any], names: Sequence[str], what: str) -> float:
    """Return the difference that plans must exceed, as a share of a time.

    It is the largest of these: how much the same plan differs that was trained twice,
    two standard errors of that, and two of each plan's ratio to TorchRec's better plan.
    """
    equal = ratio(task, AGAIN, BEST_PRACTICE, what)
    each = [ratio(task, name, better(task), what).noise for name in names]
    return math.expm1(max(abs(math.log(equal.value)), equal.noise, *each))


def _noise_lines(
    task: dict[str, Any], data: dict[str, Any], names: Sequence[str]
) -> list[str]:
    part, whole = (noise_of(task, names, what) for what in (EMBEDDING, ITERATION))
    lines = [
        f"noise: rounds vary by {task['drift'] - 1:.0%}; differences below {part:.1%} "
        f"of the tables' part and {whole:.1%} of the iteration are noise"
    ]
    if task["drift"] > QUIET_DRIFT or part > QUIET_NOISE:
        lines += [
            "  That is a noisy machine. Twenty models on a quiet one: rounds varied by "
            f"at most {QUIET_DRIFT - 1:.0%}, the noise was at most {QUIET_NOISE:.0%}.",
            "  Over the 5 minutes before the run, its load average was "
            f"{data['load_average'][1]:.1f}. Run it again while nothing else runs: "
            f"each of the {data['world_size']} ranks needs a core.",
        ]
    return lines


def _prediction_lines(
    task: dict[str, Any], data: dict[str, Any], base: str
) -> list[str]:
    """Return what is known about a prediction that is far off; else nothing."""
    said, rounds = (task["plans"][base][name] for name in ("predicted", "rounds"))
    ms = float(np.median(times(task, base, EMBEDDING)))
    if abs(math.log(said[EMBEDDING] / ms)) <= math.log1p(POOR_ERROR):
        return []
    real_ms = dict(zip(PHASES, np.median(rounds["phases_ms"], axis=0), strict=True))
    parts = []
    for title, ending in (("kernels", "_compute"), ("collectives", "_comms")):
        phases = [name for name in PHASES if name.endswith(ending)]
        both = (sum(ms[n] for n in phases) for ms in (said["phases_ms"], real_ms))
        parts.append("{} {:.1f}, measured {:.1f}".format(title, *both))
    costs = data["cost_model"]
    sources = costs["source"], costs["comms_source"]
    lines = [
        f"prediction: {said[EMBEDDING]:.1f} ms instead of {ms:.1f} for {_PLANS[base]} "
        f"({'; '.join(parts)})",
        "  A prediction is of the tables alone, on ranks that nothing else disturbs.",
        f"  kernels: {sources[0]}, {costs['hardware']}; collectives: {sources[1]}",
    ]
    if costs["reference_ms"]:
        slower = statistics.median(rounds["reference_ms"]) / costs["reference_ms"]
        lines.append(
            f"  A core takes {slower:.2f} times as long as when the kernels were "
            "measured."
        )
    is_here = costs["hardware"] == data["hardware"]["device"]
    is_measured = all(s.startswith("measured") for s in sources)
    if is_here and is_measured and "stand-in" not in sources[1]:
        return [
            *lines,
            "  All of it was measured on this kind of machine. If other work ran then, "
            "measure it again.",
        ]
    return [
        *lines,
        "  Not all of it was measured on this kind of machine. Measure it with 'make "
        "race TENTH=yes', then run",
        "  make demo DEMO_ARGS='--cost-model reproduced/measured_100 --planners "
        "calibrated,best-practice,all-types'",
    ]


def verdict(task: dict[str, Any], data: dict[str, Any], name: str) -> str:
    """Return a sentence: did our plan's tables take less time, beyond the noise?"""
    base = better(task)
    part, whole = (ratio(task, name, base, what) for what in (EMBEDDING, ITERATION))
    noise = noise_of(task, [name], EMBEDDING)
    took, low, high = _bounds(part, 2)
    said = (
        f"With {_PLANS[name]}, the tables' part took {took} of {_PLANS[base]} ({low} "
        f"to {high}), the iteration {whole.value:.2f}"
    )
    if task["drift"] > data["most_drift"]:
        varied = f"{task['drift'] - 1:.0%}"
        return f"{said}; but rounds varied by {varied}, so this run decides nothing."
    if abs(math.log(part.value)) <= math.log1p(noise):
        return f"{said}: no more than this machine's noise of {noise:.1%}."
    which = "faster" if part.value < 1 else "slower"
    return f"{said}: our plan is {which}, by more than the noise of {noise:.1%}."


def _bounds(over: Ratio, digits: int) -> list[str]:
    """Return a ratio, and two standard errors below and above it."""
    ends = (over.value * math.exp(sign * over.noise) for sign in (0, -1, 1))
    return [f"{end:.{digits}f}" for end in ends]
