"""Runs numbered cases, goes on where it stopped, and shrinks what fails.

Each case has a random generator of its own, from the seed and its number, so that a
campaign may be run in parts and any case alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Case", "Outcome", "limited", "run", "shrink"]

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


def shrink(
    case: Case,
    outcome: Outcome,
    judge: Callable[[Case], Outcome],
    simpler: Callable[[Case], Iterator[Case]],
) -> Case:
    """Return a case that fails in the same way and of which nothing can be left out."""
    start, tried, again = time.monotonic(), {json.dumps(case)}, True
    while again:
        again = False
        for other in simpler(case):
            text = json.dumps(other)
            if text in tried:
                continue
            if time.monotonic() - start > MAX_SHRINKING_SECONDS:
                return case
            tried.add(text)
            if kind_of(judge(other)) == kind_of(outcome):
                case, again = other, True
                break
    return case


def run(
    description: str,
    draw: Callable[[np.random.Generator], Case],
    judge: Callable[[Case], Outcome],
    simpler: Callable[[Case], Iterator[Case]] | None = None,
) -> int:
    """Run the campaign that the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--log", type=Path, help="kept outcomes; goes on behind them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to stop")
    parser.add_argument("--no-shrinking", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    known: dict[int, Outcome] = {}
    if arguments.log and arguments.log.exists():
        for line in arguments.log.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["seed"] == arguments.seed:
                known[entry["case"]] = entry["outcome"]
    start, ran = time.monotonic(), 0
    wanted = range(arguments.first, arguments.first + arguments.cases)
    for number in wanted:
        if number in known:
            continue
        if time.monotonic() - start > arguments.seconds:
            break
        case = draw(np.random.default_rng([arguments.seed, number]))
        began = time.monotonic()
        outcome = known[number] = judge(case)
        ran += 1
        entry = {
            "seed": arguments.seed,
            "case": number,
            "outcome": outcome,
            "seconds": round(time.monotonic() - began, 2),
        }
        if outcome.startswith("failure"):
            print(f"case {number}: {outcome}\n  {json.dumps(case)}", flush=True)
            if simpler is not None and not arguments.no_shrinking:
                entry["shrunk"] = shrink(case, outcome, judge, simpler)
                print(f"  shrunk: {json.dumps(entry['shrunk'])}", flush=True)
        if arguments.log:
            with arguments.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
    seconds = time.monotonic() - start
    counts = Counter(kind_of(known[n]) for n in wanted if n in known)
    for kind, count in sorted(counts.items()):
        print(f"{count:>7}  {kind}")
    failed = sum(c for kind, c in counts.items() if kind.startswith("failure"))
    print(
        f"seed {arguments.seed}: {sum(counts.values())} cases, {failed} failures; now "
        f"{ran} in {seconds:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit("run a campaign: python -m tests.fuzz.against_stock")
