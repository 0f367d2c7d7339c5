"""What a measurement shows: how far it is, and how repeatable it was."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.records import CommsRecord, CostRecord, repeatability

__all__ = ["RateProgress", "repeatability_text"]


class RateProgress(Progress):
    """Bars with count, rate and time left; lines now and then without a terminal."""

    LINE_EVERY_S = 10.0
    """Without a terminal: how often a line is printed."""

    def __init__(
        self,
        console: Console,
        unit: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lay out the columns.

        Args:
            console: Where it is drawn.
            unit: What is counted.
            clock: Seconds; for tests.
        """
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(f"{{task.fields[rate]:.2f}} {unit}/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._unit, self._clock = unit, clock
        self._in_place_of_line = contextlib.ExitStack()

    def start(self) -> None:
        """Show the bars, in place of the line of a command's phase."""
        self._in_place_of_line.enter_context(phase(""))
        super().start()

    def stop(self) -> None:
        """Take the bars away."""
        super().stop()
        self._in_place_of_line.close()

    def add_bar(
        self, description: str, total: int, completed: int = 0
    ) -> Callable[[], None]:
        """Add a bar; call what is returned whenever one more is done.

        The rate counts what is done from now on.
        """
        bar = self.add_task(description, total=total, completed=completed, rate=0.0)
        begin = last = self._clock()
        done = completed
        if not self.console.is_terminal:
            self._print_line(f"{description}: {done} of {total} {self._unit}")

        def advance() -> None:
            nonlocal done, last
            done += 1
            now = self._clock()
            rate = (done - completed) / max(now - begin, 1e-9)
            self.update(bar, advance=1, rate=rate)
            due = done == total or now - last >= self.LINE_EVERY_S
            if due and not self.console.is_terminal:
                last = now
                left = max(0, total - done) / rate
                self._print_line(
                    f"{description}: {done} of {total} {self._unit}, {rate:.2f} "
                    f"{self._unit}/s, {now - begin:.0f} s, {left:.0f} s left"
                )

        return advance

    def add_time_bar(self, description: str, seconds: float) -> Callable[[int], None]:
        """Add a bar of time; call what is returned with what is done by now."""
        begin = last = self._clock()
        bar = self.add_task(description, total=round(seconds), completed=0, rate=0.0)

        def show(done: int) -> None:
            nonlocal last
            now = self._clock()
            rate = done / max(now - begin, 1e-9)
            self.update(bar, completed=round(now - begin), rate=rate)
            if now - last >= self.LINE_EVERY_S and not self.console.is_terminal:
                last = now
                self._print_line(
                    f"{description}: {done} {self._unit}, {now - begin:.0f} of "
                    f"{seconds:.0f} s"
                )

        return show

    def _print_line(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False)
        self.console.file.flush()


def repeatability_text(
    records: Sequence[CostRecord | CommsRecord], of: str, unit: str
) -> str:
    """Say how repeatable a file's records are; empty for fewer than two repeats.

    Args:
        records: All of the file's.
        of: What is compared, after "repeatability".
        unit: What was measured again.
    """
    differences = repeatability(records)
    if len(differences) < 2:
        return ""
    tenth = statistics.quantiles(differences, n=10)[-1]
    return (
        f"; repeatability{of}: median {statistics.median(differences):.1%}, 90th "
        f"percentile {tenth:.1%} over {len(differences)} {unit} measured again"
    )
