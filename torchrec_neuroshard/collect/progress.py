"""The progress bar of a measurement."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["measuring_progress"]


def measuring_progress(console: Console, unit: str) -> Progress:
    """Return a bar with count, rate and time left.

    Args:
        console: Where it is drawn.
        unit: What is counted; each task needs a field `rate`, per second.
    """
    return Progress(
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
