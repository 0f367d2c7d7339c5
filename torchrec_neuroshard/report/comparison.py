"""Two plans of one model side by side: what they take, and what lies elsewhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from torchrec_neuroshard.placement import capitalised, format_bytes
from torchrec_neuroshard.report.html import HtmlReport, sentence, view
from torchrec_neuroshard.report.plan_report import PlanReport, plan_data, plan_page
from torchrec_neuroshard.simulator import PHASES

__all__ = ["PlanComparison", "TableMove"]

_GIB = 2**30
MAX_MOVES = 50
"""Tables that the text lists one by one; the JSON and the page have all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMove:
    """A table that lies otherwise in the second plan."""

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
    notes: tuple[str, ...] = ()
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
    def rows(self) -> tuple[tuple[str, float, float], ...]:
        """What is set side by side: name and unit, of the first, of the second."""
        first, second = self.first, self.second
        found: list[tuple[str, float, float]] = [
            ("critical path [ms]", first.critical_path_ms, second.critical_path_ms)
        ]
        for phase in PHASES:
            a, b = (
                max(getattr(k.costs, phase) for k in r.ranks) for r in (first, second)
            )
            found.append((f"{phase}, slowest rank [ms]", a, b))
        a, b = (max(k.used_bytes for k in r.ranks) / _GIB for r in (first, second))
        found.append(("memory, fullest rank [GiB]", a, b))
        found.append(("tables split", first.num_split, second.num_split))
        return tuple(found)

    def __str__(self) -> str:
        """Return the comparison as text."""
        return "\n".join(_lines(self))

    def _page_body(self) -> Iterator[str]:
        """Lay out both plans side by side, then each by itself."""
        yield f"<p>{escape(sentence(self.verdict))}</p>"
        if not math.isnan(self.saved_ms):
            sources = (
                f"predicted; compute: {self.second.compute_source}; collectives: "
                f"{self.second.comms_source}"
            )
            yield f"<p class='note'>{escape(sentence(sources))}</p>"
        names = [escape(name) for name in (self.first_name, self.second_name)]
        yield "<div class='pair'>"
        for number, name in enumerate(names):
            title = f"<h3>{capitalised(name)}</h3>"
            yield f"<div class='box'>{title}{view('phases', number)}</div>"
        yield f"</div>{view('legend')}"
        titles = "".join(f"<th class='number'>{name}</th>" for name in names)
        yield f"<div class='scroll'><table><tr><th></th>{titles}"
        yield "<th class='number'>change</th></tr>"
        for name, first, second in self.rows:
            shown = [_figure(first), _figure(second)]
            if isinstance(first, int):
                shown.append(f"{second - first:+,}")
            else:
                shown.append(f"{second / first - 1:+.1%}" if first > 0 else "")
            cells = "".join(f"<td class='number'>{text}</td>" for text in shown)
            yield f"<tr><td>{name}</td>{cells}</tr>"
        yield "</table></div>"
        yield "<h2>Tables that lie otherwise</h2>"
        if not self.moves:
            yield "<p>None.</p>"
        else:
            yield (
                f"<p>{len(self.moves)} of {self.second.num_tables}; ranks would fetch "
                f"{format_bytes(self.moved_bytes)} of weights.</p>"
            )
            yield view("moves")
        yield from (f"<p class='note'>{escape(note)}</p>" for note in self.notes)
        for number, report in enumerate((self.first, self.second)):
            name = names[number]
            yield f"<h1 class='plan'>{capitalised(name)}</h1>"
            yield from plan_page(report, number)

    def _page_data(self) -> dict[str, Any]:
        return {
            "plans": [
                plan_data(self.first, self.first_name),
                plan_data(self.second, self.second_name),
            ],
            "moves": [[m.table, m.before, m.after, m.moved_bytes] for m in self.moves],
        }

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        known = not math.isnan(self.saved_ms)
        return {
            "first": {"name": self.first_name, **self.first.to_json()},
            "second": {"name": self.second_name, **self.second.to_json()},
            "saved_ms": self.saved_ms if known else None,
            "moved_bytes": self.moved_bytes,
            "moves": [dataclasses.asdict(move) for move in self.moves],
            "notes": list(self.notes),
        }


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _lines(found: PlanComparison) -> Iterator[str]:
    yield found.verdict
    yield ""
    names = found.first_name, found.second_name
    wide = max(14, *(len(name) + 2 for name in names))
    yield f"{'':<30}" + "".join(f"{name:>{wide}}" for name in names)
    for name, first, second in found.rows:
        yield f"{name:<30}{_figure(first):>{wide}}{_figure(second):>{wide}}"
    yield ""
    total = found.second.num_tables
    if not found.moves:
        yield f"all {total} tables lie alike"
    else:
        yield (
            f"{len(found.moves)} of {total} tables lie otherwise; ranks would fetch "
            f"{format_bytes(found.moved_bytes)} of weights:"
        )
        yield from map(str, found.moves[:MAX_MOVES])
        if len(found.moves) > MAX_MOVES:
            yield f"... and {len(found.moves) - MAX_MOVES} more"
    if found.notes:
        yield ""
        yield from (f"- {note}" for note in found.notes)
