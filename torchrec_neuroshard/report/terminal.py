"""The one table that reports print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.placement import capitalised

__all__ = [
    "gib",
    "listed_ranks",
    "most",
    "note_lines",
    "sentence",
    "shortened",
    "table",
]

MAX_RUNS = 8
"""Runs of ranks in a line of text."""


def table(rows: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Lay cells out in columns as wide as they need.

    Args:
        rows: Of cells, a heading first. The last cell of a row is a remark: it needs
            no room in a column, so that a row may end early with one.
        left: How many columns begin at the left; the others end at the right.
    """
    widths = [0] * max(map(len, rows), default=0)
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths[column], len(cell))
    lines = []
    for row in rows:
        cells = [
            f"{cell:{'<' if column < left else '>'}{widths[column]}}"
            for column, cell in enumerate(row[:-1])
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def most(lines: Sequence[str], limit: int) -> Iterable[str]:
    """Return the first lines, and how many there are more."""
    yield from lines[:limit]
    if len(lines) > limit:
        yield f"... and {len(lines) - limit:,} more"


def note_lines(notes: Iterable[Note]) -> Iterable[str]:
    """Return a line for each note, with its severity."""
    return (f"- {note.severity}: {note}" for note in notes)


def gib(num_bytes: float | None) -> str:
    """Show memory in GiB, for a column of it; nothing where it is not known."""
    return "" if num_bytes is None else f"{num_bytes / 2**30:.2f}"


def sentence(text: str) -> str:
    """Begin a text with a capital and end it with a full stop."""
    return f"{capitalised(text)}."


def listed_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, ascending: runs of them by the first and the last."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) != 1)} {shortened(texts, MAX_RUNS)}"


def shortened(texts: Sequence[str], limit: int) -> str:
    """Join the first texts by commas, and say how many there are more."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more
