"""A report as sections: text and page are both made from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_neuroshard.costs.task import capitalised
from torchrec_neuroshard.notes import Note

__all__ = ["Grid", "Section", "as_text"]

MAX_ROWS = 50
"""Rows of a grid that the text prints; the page and JSON have all."""
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
TIMES = ("ms", "peak")

GridColumn = tuple[str, str, Callable[[Any], Any]]
"""Title, kind (see `FORMATS`), and what returns an item's value; None is not known."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows and columns that the text prints, and that the page sorts and filters."""

    label: str
    """What its rows are."""
    items: Sequence[Any]
    """A row is made of each."""
    columns: Sequence[GridColumn]
    """One of which no value is known, or no time above 0, is left out."""
    limit: int = MAX_ROWS
    """Rows that the text prints; 0: it is for the page alone."""
    first: Callable[[Any], Any] | None = None
    """By what to sort items where the text has no room for all."""

    def shown(self) -> tuple[list[tuple[str, str]], list[tuple[Any, ...]]]:
        """Return titles and kinds of the columns, and the rows."""
        items = self.items
        if self.first is not None and len(items) > self.limit:
            items = sorted(items, key=self.first)
        kept, known = [], []
        for title, kind, value_of in self.columns:
            values = [value_of(item) for item in items]
            if any(v is not None and (v or kind not in TIMES) for v in values):
                kept.append((title, kind))
                known.append(values)
        return kept, list(zip(*known, strict=True))

    def lines(self) -> Iterator[str]:
        """Return its first rows as text, below a heading; a star marks a peak."""
        columns, rows = self.shown()
        laid_out = []
        for i, (title, kind) in enumerate(columns):
            values = [row[i] for row in rows]
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
        if len(rows) > self.limit:
            yield f"... and {len(rows) - self.limit:,} more"


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
        lines = [*self.lines, *(f"- {bullet}" for bullet in self.bullets)]
        if self.grid is not None and self.grid.items and self.grid.limit:
            lines += self.grid.lines()
        if self.charts or not lines:
            return ""
        if self.title:
            lines.insert(0, f"{capitalised(self.title)}:")
        return "\n".join(lines)


def _shown(kind: str, value: Any) -> str:
    return "" if value is None else FORMATS[kind](value)


def as_text(sections: Iterable[Section]) -> str:
    """Return the sections as text, with empty lines between them."""
    shown = itertools.takewhile(lambda section: not section.is_part, sections)
    return "\n\n".join(filter(None, (section.text() for section in shown)))
