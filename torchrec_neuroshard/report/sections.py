"""Sections of a report, which its text and its page are both made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_neuroshard.costs.task import capitalised
from torchrec_neuroshard.notes import Note

FORMATS: Mapping[str, Callable[[Any], str]] = {
    "text": str,
    "count": "{:,}".format,
    "rate": "{:,.0f}".format,
    "percent": "{:.0%}".format,
    "change": "{:+.1%}".format,
    "gib": lambda num_bytes: f"{num_bytes / 2**30:.2f}",
    "figure": "{:.3f}".format,
    "ms": "{:.3f}".format,
    "peak": "{:.3f}".format,
}
"""Kind of a column -> how to show a value. Text is aligned left, numbers right. The
largest value of a "peak" column [ms] stands out."""
TIMES = ("ms", "peak")

GridColumn = tuple[str, str, Callable[[Any], Any]]
"""Title, kind (a key of `FORMATS`), and a function from an item to its value. None is
an unknown value."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: the text prints it, the page sorts and filters it."""

    label: str
    """What the rows are, in the plural."""
    items: Sequence[Any]
    """One per row."""
    columns: Sequence[GridColumn]
    """A column is left out if no value is known, or if it has no time above 0."""
    brief: int = 0
    """Rows in the brief text."""
    first: Callable[[Any], Any] | None = None
    """Sort key for the brief text if not all rows fit there."""
    in_text: bool = True
    """False: only the page shows the grid."""

    def shown(
        self, items: Sequence[Any] | None = None
    ) -> tuple[list[tuple[str, str]], list[tuple[Any, ...]]]:
        """Return titles and kinds of the columns, and the rows.

        Args:
            items: What to show, in order; None: all items as given.
        """
        items = self.items if items is None else items
        kept, known = [], []
        for title, kind, value_of in self.columns:
            values = [value_of(item) for item in items]
            if any(v is not None and (v or kind not in TIMES) for v in values):
                kept.append((title, kind))
                known.append(values)
        return kept, list(zip(*known, strict=True))

    def lines(self, verbose: bool) -> Iterator[str]:
        """Return heading and rows as text. A star marks the largest value of a peak."""
        items, limit = self.items, len(self.items) if verbose else self.brief
        if not self.in_text or not items or not limit:
            return
        if self.first is not None and len(items) > limit:
            items = sorted(items, key=self.first)
        columns, rows = self.shown(items)
        laid_out = []
        for i, (title, kind) in enumerate(columns):
            values = [row[i] for row in rows]
            cells = [_shown(kind, value) for value in values[:limit]]
            if kind == "peak":
                title, top = f"{title} ", max(values)
                cells = [
                    cell + ("*" if 0 < top == value else " ")
                    for cell, value in zip(cells, values, strict=False)
                ]
            side, width = "<" if kind == "text" else ">", max(map(len, [title, *cells]))
            laid_out.append([f"{cell:{side}{width}}" for cell in (title, *cells)])
        yield from ("  ".join(cells).rstrip() for cells in zip(*laid_out, strict=True))
        yield from _rest(len(rows) - limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A titled part of a report."""

    title: str = ""
    lines: Sequence[str] = ()
    """Sentences without a full stop."""
    details: Sequence[str] = ()
    """More sentences. The brief text leaves them out."""
    bullets: Sequence[str | Note] = ()
    brief: int = 0
    """Bullets in the brief text."""
    grid: Grid | None = None
    charts: Sequence[Mapping[str, Any]] = ()
    """Drawn by the page's script: `bars` of ranks, the `timeline` or a `heat map`."""
    bars: Sequence[str] = ()
    """The charts as lines of text. Without them only the page shows a chart's
    section."""
    is_part: bool = False
    """Whether a new part of the page begins here. The text ends before it."""

    def text(self, verbose: bool) -> str:
        """Return the section as text; empty if there is nothing to show."""
        if self.charts and not self.bars:
            return ""
        bullets = self.bullets if verbose else self.bullets[: self.brief]
        lines = [*self.lines, *self.bars, *(self.details if verbose else ())]
        lines += [f"- {bullet}" for bullet in bullets]
        if bullets:
            lines += _rest(len(self.bullets) - len(bullets))
        if self.grid is not None:
            lines += self.grid.lines(verbose)
        if lines and self.title:
            lines.insert(0, f"{capitalised(self.title)}:")
        return "\n".join(lines)


def _rest(count: int) -> list[str]:
    return [f"... and {count:,} more"] if count > 0 else []


def _shown(kind: str, value: Any) -> str:
    return "" if value is None else FORMATS[kind](value)


def as_text(sections: Iterable[Section], verbose: bool) -> str:
    """Return the sections before the first part, with empty lines between them."""
    texts = []
    for section in sections:
        if section.is_part:
            break
        texts.append(section.text(verbose))
    return "\n\n".join(filter(None, texts))
