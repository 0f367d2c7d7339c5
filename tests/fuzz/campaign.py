"""Runs numbered cases and shrinks what fails.

Each case has a random generator of its own, from the seed and its number.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import operator
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    Of work, not of time: the machine may be shared.
    """

    def ring(*_: Any) -> None:
        raise HangError

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


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
        if isinstance(part, dict | list):
            keys = part if isinstance(part, dict) else range(len(part))
            inner += [((*path, key), part[key]) for key in keys]
            parts |= {(*path, key): part[key] for key in keys}
    for path in parts:
        yield edited(path)
    for path, number in parts.items():
        if isinstance(number, int) and number > 1:
            for less in {1, number // 2}:
                yield edited(path, less)


def run(
    draw: Callable[[np.random.Generator], Case],
    judge: Callable[[Case], Outcome],
) -> bool:
    """Run the campaign whose cases and seed the command line names: did any fail?"""
    num_cases, seed = map(int, sys.argv[1:])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for number in range(num_cases):
        case = draw(np.random.default_rng([seed, number]))
        outcome = judge(case)
        counts[kind_of(outcome)] += 1
        if outcome.startswith("failure"):
            shrunk = json.dumps(shrink(case, outcome, judge))
            print(f"case {number}: {outcome}\n  {shrunk}", flush=True)
    for kind, count in sorted(counts.items()):
        print(f"{count:>7}  {kind}")
    return any(kind.startswith("failure") for kind in counts)
