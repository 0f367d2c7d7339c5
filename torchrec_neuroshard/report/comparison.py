"""Two plans of one model side by side: what they take, and which tables move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report.page import Report
from torchrec_neuroshard.report.plan import PlanReport
from torchrec_neuroshard.report.sections import Grid, GridColumn, Section

__all__ = ["PlanComparison", "TableMove"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanComparison(Report):
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
    def is_costed(self) -> bool:
        """Whether the costs of both plans are known."""
        return self.first.is_costed and self.second.is_costed

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
        if not self.is_costed:
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

    def sections(self) -> Sequence[Section]:
        """See `Report`."""
        sources = (
            f"compute: {self.second.compute_source}; collectives: "
            f"{self.second.comms_source}"
        )
        moved = f"all {self.second.num_tables} tables are placed alike"
        if self.moves:
            moved = (
                f"{len(self.moves)} of {self.second.num_tables} tables are placed "
                "differently; ranks would fetch "
                f"{format_bytes(self.moved_bytes)} of weights"
            )
        charts = [
            {"title": self.first_name, **self.first.phase_chart},
            {"title": self.second_name, **self.second.phase_chart},
        ]
        return [
            Section(lines=[self.verdict, f"predicted; {sources}"]),
            Section(title="each rank", charts=charts),
            Section(title="on the slowest ranks", grid=self._figures()),
            Section(
                title="tables that move",
                lines=[moved],
                grid=self._moves() if self.moves else None,
            ),
            Section(title="notes", bullets=self.notes),
            Section(title=self.first_name, is_part=True),
            *self.first.sections(),
            Section(title=self.second_name, is_part=True),
            *self.second.sections(),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "first": {"name": self.first_name, **self.first.to_json()},
            "second": {"name": self.second_name, **self.second.to_json()},
            "saved_ms": self.saved_ms if self.is_costed else None,
            "moved_bytes": self.moved_bytes,
            "moves": [to_fields(move) for move in self.moves],
            "notes": [to_fields(note) for note in self.notes],
        }

    def _figures(self) -> Grid:
        """What plans take, a figure in a row."""
        a, b = self.first, self.second
        full = (plan.fullest.used_bytes / 2**30 for plan in (a, b))
        figures = [("fullest rank [GiB]", *full)]
        if self.is_costed:
            paths = "critical path [ms]", a.critical_path_ms, b.critical_path_ms
            phases = ((f"{p} [ms]", a.worst_ms[p], b.worst_ms[p]) for p in PHASES)
            figures = [paths, *phases, *figures]
        columns: list[GridColumn] = [
            ("figure", "text", lambda row: row[0]),
            (self.first_name, "ms", lambda row: row[1]),
            (self.second_name, "ms", lambda row: row[2]),
            ("change", "change", lambda row: row[2] / row[1] - 1 if row[1] else None),
        ]
        return Grid("figures", figures, columns)

    def _moves(self) -> Grid:
        columns: list[GridColumn] = [
            ("GiB to fetch", "gib", lambda move: move.moved_bytes),
            ("table", "text", lambda move: move.table),
            (self.first_name, "text", lambda move: move.before or "not there"),
            (self.second_name, "text", lambda move: move.after or "not there"),
        ]
        return Grid("moves", self.moves, columns)
