"""A report as sections: text and page are both made from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.placement import capitalised

__all__ = ["Grid", "Section", "as_text", "listed_ranks", "shortened"]

MAX_ROWS = 50
"""Rows of a grid that the text prints; the page and JSON have all."""
MAX_RUNS = 8
"""Runs of ranks in a line of text."""
FORMATS: Mapping[str, Callable[[Any], str]] = {
    "text": str,
    "count": "{:,}".format,
    "rate": "{:,.0f}".format,
    "percent": "{:.0%}".format,
    "change": "{:+.1%}".format,
    "gib": lambda num_bytes: f"{num_bytes / 2**30:.2f}",
    "ms": "{:.3f}".format,
    "peak": "{:.3f}".format,
}
"""Kind of a column -> how it shows a value. Text begins at the left, the others end
at the right. Of peaks [ms] the largest stands out."""


GridColumn = tuple[str, str, Callable[[Any], Any]]
"""Title, kind (see `FORMATS`), and what returns an item's value; None is not known."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows and columns that the text prints, and that the page sorts and filters."""

    label: str
    """What its rows are."""
    columns: Sequence[tuple[str, str]]
    """Title and kind."""
    rows: Sequence[Sequence[Any]]
    """A value for each column."""
    limit: int
    """Rows that the text prints; 0: it is for the page alone."""

    @staticmethod
    def of(
        label: str,
        items: Sequence[Any],
        columns: Sequence[GridColumn],
        *,
        limit: int = MAX_ROWS,
        first: Callable[[Any], Any] | None = None,
    ) -> Grid:
        """Return a grid with a row for each item.

        Args:
            label: What its rows are.
            items: A row is made of each.
            columns: One of which no value is known is left out.
            limit: Rows that the text prints.
            first: By what to sort items where the text has no room for all.
        """
        if first is not None and len(items) > limit:
            items = sorted(items, key=first)
        values = [[value_of(item) for item in items] for *_, value_of in columns]
        known = [i for i, held in enumerate(values) if any(v is not None for v in held)]
        rows = list(zip(*(values[i] for i in known), strict=True))
        return Grid(label, [columns[i][:2] for i in known], rows, limit)

    def lines(self) -> Iterator[str]:
        """Return its first rows as text, below a heading; a star marks a peak."""
        laid_out = []
        for i, (title, kind) in enumerate(self.columns):
            values = [row[i] for row in self.rows]
            cells = [_shown(kind, value) for value in values[: self.limit]]
            if kind == "peak":
                title, top = f"{title} ", max(values)
                cells = [
                    cell + ("*" if 0 < top == value else " ")
                    for cell, value in zip(cells, values, strict=False)
                ]
            side, width = "<" if kind == "text" else ">", max(map(len, [title, *cells]))
            laid_out.append([f"{cell:{side}{width}}" for cell in (title, *cells)])
        yield from ("  ".join(cells).rstrip() for cells in zip(*laid_out, strict=True))
        if len(self.rows) > self.limit:
            yield f"... and {len(self.rows) - self.limit:,} more"


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a report, below a title."""

    title: str = ""
    lines: Sequence[str] = ()
    """Sentences without a full stop."""
    bullets: Sequence[str | Note] = ()
    grid: Grid | None = None
    charts: Sequence[Mapping[str, Any]] = ()
    """What `page.js` draws: `bars` of ranks, or the `path`. Such a section is for the
    page alone."""
    is_part: bool = False
    """Whether it begins a part of its own, which is for the page alone."""

    def text(self) -> str:
        """Return it as text; empty where it is for the page alone."""
        lines = [*self.lines, *(f"- {_bullet(b)}" for b in self.bullets)]
        if self.grid is not None and self.grid.limit:
            lines += self.grid.lines()
        if self.charts or not lines:
            return ""
        if self.title:
            lines.insert(0, f"{capitalised(self.title)}:")
        return "\n".join(lines)


def _shown(kind: str, value: Any) -> str:
    return "" if value is None else FORMATS[kind](value)


def _bullet(item: str | Note) -> str:
    return f"{item.severity}: {item}" if isinstance(item, Note) else item


def as_text(sections: Iterable[Section]) -> str:
    """Return the sections as text, with empty lines between them."""
    shown = itertools.takewhile(lambda section: not section.is_part, sections)
    return "\n\n".join(filter(None, (section.text() for section in shown)))


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
