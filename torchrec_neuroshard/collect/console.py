"""What a measurement shows: how far it is, and how repeatable it was."""

from __future__ import annotations

import statistics
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

from torchrec_neuroshard.records import CommsRecord, CostRecord, repeatability

__all__ = ["RateProgress", "repeatability_text"]


class RateProgress(Progress):
    """Bars with count, rate and time left."""

    def __init__(self, console: Console, unit: str) -> None:
        """Lay out the columns.

        Args:
            console: Where it is drawn.
            unit: What is counted.
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
        )

    def add_bar(
        self, description: str, total: int, completed: int = 0
    ) -> Callable[[], None]:
        """Add a bar; call what is returned whenever one more is done."""
        bar = self.add_task(description, total=total, completed=completed, rate=0.0)

        def advance() -> None:
            task = next(t for t in self.tasks if t.id == bar)
            self.update(bar, advance=1, rate=task.speed or 0.0)

        return advance


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
