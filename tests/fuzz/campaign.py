"""Runs numbered cases, goes on where it stopped, and shrinks what fails.

Each case has a random generator of its own, from the seed and its number, so that a
campaign may be run in parts and any case alone.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import logging
import operator
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Case", "Outcome", "limited", "run"]

Case = dict[str, Any]
Outcome = str
"""What became of a case; those that start with "failure" are. Up to the first colon it
is a kind, by which outcomes are counted and shrinking is held to the same failure."""

MAX_SHRINKING_SECONDS = 120.0


class HangError(BaseException):
    """A case did not end; not to be caught by what it calls."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `HangError` in the main thread after so many seconds of work.

    Where nothing is worked at, after ten times as many: the machine may be shared.
    """

    def ring(*_: Any) -> None:
        raise HangError

    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, 10 * seconds),
    }
    before = {number: signal.signal(number, ring) for number in timers}
    for timer, limit in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0.0)
            signal.signal(number, before[number])


def kind_of(outcome: Outcome) -> str:
    """Return the part of an outcome that says what kind it is."""
    return outcome.partition(":")[0]


def shrink(case: Case, outcome: Outcome, judge: Callable[[Case], Outcome]) -> Case:
    """Return a case that fails in the same way, as short as two minutes allow."""
    start, tried = time.monotonic(), {json.dumps(case)}

    def fails(other: Case) -> bool:
        text = json.dumps(other)
        if text in tried or time.monotonic() - start > MAX_SHRINKING_SECONDS:
            return False
        tried.add(text)
        try:
            return kind_of(judge(other)) == kind_of(outcome)
        except Exception:  # what is left is no case
            return False

    while (found := next(filter(fails, simpler(case)), None)) is not None:
        case = found
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases in which a part is left out, large parts first, or a number less."""

    def edited(path: tuple[Any, ...], *value: int) -> Case:
        other = copy.deepcopy(case)
        holder: Any = functools.reduce(operator.getitem, path[:-1], other)
        if value:
            holder[path[-1]] = value[0]
        else:
            del holder[path[-1]]
        return other

    parts: dict[tuple[Any, ...], Any] = {}
    inner: list[tuple[tuple[Any, ...], Any]] = [((), case)]
    for path, part in inner:  # which grows
        keys = part if isinstance(part, dict) else range(len(part))
        below = {(*path, key): part[key] for key in keys}
        parts |= below
        inner += [(p, v) for p, v in below.items() if isinstance(v, dict | list)]
    for path in parts:
        yield edited(path)
    for path, number in parts.items():
        if isinstance(number, int) and number > 1:
            unit = 10 ** max(0, len(str(number)) - 2)
            for less in {1, number // 2, number // unit * unit} - {number}:
                yield edited(path, less)


def run(
    description: str,
    draw: Callable[[np.random.Generator], Case],
    judge: Callable[[Case], Outcome],
) -> int:
    """Run the campaign that the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="kept outcomes; goes on behind them")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    known: dict[int, Outcome] = {}
    if arguments.log and arguments.log.exists():
        for line in arguments.log.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["seed"] == arguments.seed:
                known[entry["case"]] = entry["outcome"]
    for number in range(arguments.cases):
        if number in known:
            continue
        case = draw(np.random.default_rng([arguments.seed, number]))
        outcome = known[number] = judge(case)
        entry = {"seed": arguments.seed, "case": number, "outcome": outcome}
        if outcome.startswith("failure"):
            entry["shrunk"] = shrink(case, outcome, judge)
            print(
                f"case {number}: {outcome}\n  {json.dumps(entry['shrunk'])}", flush=True
            )
        if arguments.log:
            with arguments.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
    counts = Counter(map(kind_of, known.values()))
    for kind, count in sorted(counts.items()):
        print(f"{count:>7}  {kind}")
    return int(any(kind.startswith("failure") for kind in counts))
