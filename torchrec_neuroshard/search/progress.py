"""How far a search is: reports for whoever asks, and a line on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchrec_neuroshard.progress import Phase, phase, shown

__all__ = ["NO_REPORTS", "ProgressLine", "ProgressReporter", "SearchProgress"]

REPORT_SECONDS = 0.2
"""Reports come no more often, but for the first and the last of a phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchProgress:
    """State of a running search."""

    phase: str
    """`splits`, `refining`, `bounding` or `done`."""
    seconds: float
    """Since the search began."""
    seconds_left: float
    """Of its time budget; most searches end sooner."""
    best_ms: float
    """Critical path of the best plan so far; infinite where there is none yet."""
    bound_ms: float
    """Lower bound so far; 0 where there is none yet."""

    @property
    def gap(self) -> float:
        """`best_ms / bound_ms - 1`; infinite while either is unknown."""
        return self.best_ms / self.bound_ms - 1 if self.bound_ms > 0 else float("inf")


class ProgressReporter:
    """Reports to an observer how a search goes; does nothing where there is none."""

    def __init__(
        self,
        observer: Callable[[SearchProgress], None] | None,
        start: float,
        deadline: float,
    ) -> None:
        """Take the observer and the `time.monotonic()` of start and deadline."""
        self.observer = observer
        self._start, self._deadline = start, deadline
        self._best_ms, self._bound_ms = float("inf"), 0.0
        self._phase, self._last = "", -float("inf")

    def report(self, phase: str, *, best_ms: float | None = None) -> None:
        """Report a phase and the critical path of the best plan, where it changed."""
        if self.observer is None:
            return
        now = time.monotonic()
        if best_ms is not None:
            self._best_ms = min(self._best_ms, best_ms)
        if phase == self._phase and now - self._last < REPORT_SECONDS:
            return
        self._phase, self._last = phase, now
        self.observer(
            SearchProgress(
                phase=phase,
                seconds=now - self._start,
                seconds_left=max(0.0, self._deadline - now),
                best_ms=self._best_ms,
                bound_ms=self._bound_ms,
            )
        )

    def bound(self, bound_ms: float) -> None:
        """Take note of a lower bound."""
        self._bound_ms = max(self._bound_ms, bound_ms)


NO_REPORTS = ProgressReporter(None, 0.0, 0.0)
"""Of a search that nobody asks about."""


class ProgressLine:
    """Shows a search in one line on stderr, as phases of a command are shown.

    Nothing is written where that is not a terminal. Pass one as
    `SearchConfig(progress=...)`; it serves any number of searches.
    """

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._phase: Phase | None = None

    def __call__(self, progress: SearchProgress) -> None:
        """Show where the search stands."""
        if progress.phase == "done":
            self.close()
        elif sys.stderr.isatty():
            if self._phase is None:
                self._open.enter_context(shown())
                self._phase = self._open.enter_context(phase(""))
            self._phase.text = _describe(progress)

    def close(self) -> None:
        """Take the line away."""
        self._open.close()
        self._phase = None


def _describe(progress: SearchProgress) -> str:
    parts = [f"planning: {progress.phase}"]
    if progress.best_ms < float("inf"):
        parts.append(f"best {progress.best_ms:.3f} ms")
    if progress.gap <= 1.0:  # else the bound says nothing yet
        parts.append(f"gap {progress.gap:.1%}")
    parts.append(f"at most {progress.seconds_left:.0f} s left")
    return ", ".join(parts)
