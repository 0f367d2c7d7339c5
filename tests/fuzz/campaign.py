"""Draws cases; in campaigns by hypothesis, which shrinks what fails.

Tests draw a few cases from seeds, the same in each run. Hypothesis would not: it draws
constants of all modules that are loaded. A campaign draws more cases, and others:

    FUZZ_CASES=20000 python -m pytest tests/fuzz/test_against_stock.py -k drawn
"""

from __future__ import annotations

import functools
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Case = dict[str, Any]
Outcome = str
"""What became of a case. Text before the colon is its kind. Kinds that start with
"failure" fail, and shrinking keeps the kind."""

_CASES = int(os.environ.get("FUZZ_CASES", "0"))


class HangError(BaseException):
    """A case did not end. Code under test cannot catch it as an `Exception`."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `HangError` in the main thread after so many seconds of processor time."""

    def ring(*_: Any) -> None:
        raise HangError

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


@functools.cache
def _failure(kind: str) -> type[AssertionError]:
    """An error of its own for each kind: hypothesis shrinks each type apart."""
    return type(kind, (AssertionError,), {})


def judge_drawn(
    num_cases: int,
    draw: Callable[[random.Random], Case],
    judge: Callable[[Case], Outcome],
) -> list[Outcome]:
    """Judge drawn cases and return their outcomes.

    Raises:
        AssertionError: A case failed; the message holds the case, in a campaign the
            smallest such case.
    """
    outcomes: list[Outcome] = []

    def judge_one(case: Case) -> None:
        outcome = judge(case)
        if outcome.startswith("failure"):
            raise _failure(outcome.partition(":")[0])(f"{outcome}, case {case}")
        outcomes.append(outcome)

    for seed in range(0 if _CASES else num_cases):
        judge_one(draw(random.Random(seed)))
    if not _CASES:
        return outcomes

    @st.composite
    def cases(choose: Any) -> Case:
        return draw(choose(st.randoms(use_true_random=False)))

    @settings(
        max_examples=_CASES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def check(case: Case) -> None:
        judge_one(case)

    check()
    return outcomes


def has_luck(rng: random.Random, share: float) -> bool:
    """Return true in this share of draws; shrinking makes it false."""
    return rng.random() >= 1 - share
