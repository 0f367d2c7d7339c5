"""Two plans of one model side by side: what they take, and which tables move."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from html import escape
from typing import Any

from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.placement import capitalised, format_bytes
from torchrec_neuroshard.report.page import (
    HtmlReport,
    html_table,
    note_list,
    paragraphs,
    view,
)
from torchrec_neuroshard.report.plan import PlanReport, plan_data, plan_page
from torchrec_neuroshard.report.terminal import most, note_lines, table
from torchrec_neuroshard.simulator import PHASES

__all__ = ["PlanComparison", "TableMove"]

MAX_MOVES = 50
"""Tables that the text lists one by one; the JSON and the page have all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMove:
    """A table that the second plan places differently."""

    table: str
    before: str
    """Its sharding and ranks in the first plan; empty where it is not there."""
    after: str
    """The same in the second plan."""
    moved_bytes: float
    """Weights that ranks of the second plan hold and did not hold before."""

    def __str__(self) -> str:
        """Return it as a line of text."""
        before, after = self.before or "not there", self.after or "not there"
        return f"{self.table}: {before} -> {after}, {format_bytes(self.moved_bytes)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanComparison(HtmlReport):
    """Two plans by the same costs, or by those stored; `print` shows it as text."""

    first_name: str
    first: PlanReport
    second_name: str
    second: PlanReport
    moves: tuple[TableMove, ...]
    """Most bytes first."""
    notes: tuple[Note, ...] = ()
    """What to know of the comparison."""

    @property
    def saved_ms(self) -> float:
        """What the second plan saves of an iteration; NaN where one is not known."""
        return self.first.critical_path_ms - self.second.critical_path_ms

    @property
    def moved_bytes(self) -> float:
        """Weights to move from the first plan to the second."""
        return sum(move.moved_bytes for move in self.moves)

    @property
    def verdict(self) -> str:
        """What the second plan saves, in a sentence without a full stop."""
        if math.isnan(self.saved_ms):
            return "what the second saves is not known: a cost is not stored"
        path_ms, saved = self.second.critical_path_ms, self.saved_ms
        if f"{abs(saved):.3f}" == "0.000":
            return f"both take {path_ms:.3f} ms per iteration"
        first_ms = self.first.critical_path_ms
        change = f" ({-saved / first_ms:+.1%})" if first_ms > 0 else ""
        effect = f"saves {saved:.3f} ms" if saved > 0 else f"costs {-saved:.3f} ms more"
        return (
            f"{self.second_name} takes {path_ms:.3f} ms of {first_ms:.3f}{change}: it "
            f"{effect} per iteration"
        )

    @property
    def rows(self) -> list[list[str]]:
        """What is set side by side, as text: a heading, then one figure in a row."""
        plans = self.first, self.second
        rows = [["", self.first_name, self.second_name, "change"]]

        def add(name: str, a: float, b: float) -> None:
            rows.append(
                [name, f"{a:.3f}", f"{b:.3f}", f"{b / a - 1:+.1%}" if a else ""]
            )

        if not math.isnan(self.saved_ms):
            add("critical path [ms]", *(p.critical_path_ms for p in plans))
            for phase in PHASES:
                add(f"{phase}, slowest rank [ms]", *(p.worst_ms[phase] for p in plans))
        add(
            "memory, fullest rank [GiB]", *(p.fullest.used_bytes / 2**30 for p in plans)
        )
        a, b = (p.num_split for p in plans)
        return [*rows, ["tables split", f"{a:,}", f"{b:,}", f"{b - a:+,}"]]

    @property
    def moved(self) -> str:
        """How many tables are placed differently, in words."""
        if not self.moves:
            return f"all {self.second.num_tables} tables are placed alike"
        return (
            f"{len(self.moves)} of {self.second.num_tables} tables are placed "
            f"differently; ranks would fetch {format_bytes(self.moved_bytes)} of "
            "weights"
        )

    def __str__(self) -> str:
        """Return the comparison as text."""
        lines = [
            self.verdict,
            "",
            *table([[*row, ""] for row in self.rows], left=1),
            "",
        ]
        lines += [self.moved + ":" * bool(self.moves)]
        lines += most([str(move) for move in self.moves], MAX_MOVES)
        lines += ["", *note_lines(self.notes)] * bool(self.notes)
        return "\n".join(lines)

    def page(self) -> tuple[str, dict[str, Any]]:
        """See `HtmlReport`: both plans side by side, then each by itself."""
        both = (self.first_name, self.first), (self.second_name, self.second)
        data = {
            "plans": [plan_data(report, name) for name, report in both],
            "moves": [dataclasses.astuple(move) for move in self.moves],
        }
        titles = [capitalised(escape(name)) for name, _ in both]
        boxes = "".join(
            f"<div class='box'><h3>{title}</h3>{view('phases', number)}</div>"
            for number, title in enumerate(titles)
        )
        plans = "".join(
            f"<h1 class='plan'>{title}</h1>{plan_page(report, number)}"
            for number, (title, (_, report)) in enumerate(
                zip(titles, both, strict=True)
            )
        )
        sources = (
            f"predicted; compute: {self.second.compute_source}; collectives: "
            f"{self.second.comms_source}"
        )
        body = f"""{paragraphs([self.verdict])}{paragraphs([sources], "note")}
<div class='pair'>{boxes}</div>{view("legend")}
{html_table(self.rows)}
<h2>Tables that are placed differently</h2>
{paragraphs([self.moved])}{view("moves") if self.moves else ""}{note_list(self.notes)}
{plans}"""
        return body, data

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        known = not math.isnan(self.saved_ms)
        return {
            "first": {"name": self.first_name, **self.first.to_json()},
            "second": {"name": self.second_name, **self.second.to_json()},
            "saved_ms": self.saved_ms if known else None,
            "moved_bytes": self.moved_bytes,
            "moves": [to_fields(move) for move in self.moves],
            "notes": [to_fields(note) for note in self.notes],
        }
