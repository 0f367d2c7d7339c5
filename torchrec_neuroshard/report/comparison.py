"""Two plans of one model side by side: their costs, and the tables that move."""

from __future__ import annotations

import itertools
import math
import re
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMove:
    """A table that the second plan places differently."""

    table: str
    before: str
    """Its sharding and ranks in the first plan; empty: not in that plan."""
    after: str
    """Its sharding and ranks in the second plan; empty: not in that plan."""
    moved_bytes: float
    """Bytes of weights that ranks hold in the second plan only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanComparison(Report):
    """Two plans of one model; `print` shows what the second plan saves."""

    first_name: str
    first: PlanReport
    second_name: str
    second: PlanReport
    moves: tuple[TableMove, ...]
    """Tables placed differently, most bytes first."""
    notes: tuple[Note, ...] = ()
    """Facts worth knowing about the comparison."""
    obstacles: tuple[str, ...] = ()
    """Why the times of the plans cannot be compared."""

    @property
    def is_costed(self) -> bool:
        """Whether the costs of both plans are known."""
        return self.first.is_costed and self.second.is_costed

    @property
    def is_timed(self) -> bool:
        """Whether the times of both plans are known and can be compared."""
        return self.is_costed and not self.obstacles

    @property
    def is_same_batch(self) -> bool:
        """Whether an iteration trains as many samples in both plans, if known."""
        found = self.first.num_samples, self.second.num_samples
        return None in found or found[0] == found[1]

    @property
    def saved_ms(self) -> float:
        """Time per iteration that the second plan saves; NaN: not comparable."""
        if self.obstacles or not self.is_same_batch:
            return math.nan
        return self.first.iteration_ms - self.second.iteration_ms

    @property
    def error(self) -> float | None:
        """The larger relative error of the two iterations; None: unknown."""
        found = self.first.error, self.second.error
        return None if None in found else max(e for e in found if e is not None)

    @property
    def certainty(self) -> str:
        """Return whether the saved time is larger than the error, in a sentence."""
        if self.error is None or not round(abs(self.saved_ms), 3) > 0:
            return ""
        times = f"the error of a predicted iteration, {self.error:.0%}"
        if abs(self.saved_ms) > self.error * self.first.iteration_ms:
            return f"the difference is larger than {times}"
        return (
            f"the difference is smaller than {times}; both plans share a part of that "
            "error"
        )

    @property
    def moved_bytes(self) -> float:
        """Bytes of weights to move from the first plan to the second."""
        return sum(move.moved_bytes for move in self.moves)

    @property
    def verdict(self) -> str:
        """Return what the second plan saves, in a sentence without a full stop."""
        if not self.is_costed:
            return "saved time unknown: a plan's costs are not stored"
        if self.obstacles:
            parts = (self.first_name, self.first), (self.second_name, self.second)
            times = [f"{name} takes {plan.time}" for name, plan in parts]
            return (
                f"times are not compared, since {self.obstacles[0]}; predicted: "
                f"{' and '.join(times)}"
            )
        kernels = re.split("[,;]", self.second.compute_source)[0]
        predicted = f"predicted (kernels: {kernels})"
        if not self.is_same_batch:
            first, second = (
                plan.samples_per_s or math.nan for plan in (self.first, self.second)
            )
            return (
                f"{predicted}: {self.second_name} trains {self.second.rate} samples "
                f"per second instead of {self.first.rate} ({second / first - 1:+.1%}), "
                f"with {self.second.num_samples:,} instead of "
                f"{self.first.num_samples:,} per iteration"
            )
        path_ms, saved = self.second.iteration_ms, self.saved_ms
        if f"{abs(saved):.3f}" == "0.000":
            return f"{predicted}: both take {path_ms:.3f} ms per iteration"
        first_ms = self.first.iteration_ms
        change = f" ({-saved / first_ms:+.1%})" if first_ms > 0 else ""
        effect = f"saves {saved:.3f} ms" if saved > 0 else f"loses {-saved:.3f} ms"
        return (
            f"{predicted}: {self.second_name} takes {path_ms:.3f} ms instead of "
            f"{first_ms:.3f}{change} and {effect} per iteration"
        )

    def heading(self) -> list[tuple[str, str]]:
        """See `Report`: the second plan's."""
        return self.second.heading()

    def sections(self) -> Sequence[Section]:
        """See `Report`."""
        moved = f"all {self.second.num_tables} tables are placed the same"
        if self.moves:
            moved = (
                f"{len(self.moves)} of {self.second.num_tables} tables are placed "
                f"differently; switching moves {format_bytes(self.moved_bytes)} of "
                "weights"
            )
        lines = self.verdict, self.certainty, self.second.sources
        parts = (self.second_name, self.second), (self.first_name, self.first)
        charts = [{"title": name, **plan.phase_chart} for name, plan in parts]
        return [
            Section(lines=[*filter(None, lines)]),
            Section(title="each rank", charts=charts),
            Section(title="slowest ranks", grid=self._figures()),
            Section(
                title="tables that move",
                lines=[moved],
                grid=self._moves() if self.moves else None,
            ),
            Section(title="notes", bullets=self.notes, brief=len(self.notes)),
            *itertools.chain.from_iterable(
                [Section(title=name, is_part=True), *plan.sections()]
                for name, plan in parts
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "first": {"name": self.first_name, **self.first.to_json()},
            "second": {"name": self.second_name, **self.second.to_json()},
            "saved_ms": None if math.isnan(self.saved_ms) else self.saved_ms,
            "error": self.error,
            "moved_bytes": self.moved_bytes,
            "moves": [to_fields(move) for move in self.moves],
            "notes": [to_fields(note) for note in self.notes],
        }

    def _figures(self) -> Grid:
        """Return the rate, iteration, phases and memory of both plans.

        Changes are shown of what can be compared.
        """
        a, b = self.first, self.second
        full = (plan.fullest.used_bytes / 2**30 for plan in (a, b))
        figures = [("fullest rank [GiB]", *full, True)]
        if self.is_costed:
            timed, same = self.is_timed, self.is_timed and self.is_same_batch
            whole = "iteration [ms]", a.iteration_ms, b.iteration_ms, same
            paths = "critical path [ms]", a.critical_path_ms, b.critical_path_ms, same
            phases = [(f"{p} [ms]", a.worst_ms[p], b.worst_ms[p], same) for p in PHASES]
            figures = [whole, paths, *phases, *figures]
            if not self.is_same_batch:
                rates = (1e-3 * (plan.samples_per_s or math.nan) for plan in (a, b))
                figures.insert(0, ("1,000 samples per second", *rates, timed))
        columns: list[GridColumn] = [
            ("figure", "text", lambda row: row[0]),
            (self.second_name, "figure", lambda row: row[2]),
            (self.first_name, "figure", lambda row: row[1]),
            (
                "change",
                "change",
                lambda row: row[2] / row[1] - 1 if row[3] and row[1] else None,
            ),
        ]
        return Grid("figures", figures, columns, brief=len(figures))

    def _moves(self) -> Grid:
        columns: list[GridColumn] = [
            ("GiB to move", "gib", lambda move: move.moved_bytes),
            ("table", "text", lambda move: move.table),
            (self.first_name, "text", lambda move: move.before or "absent"),
            (self.second_name, "text", lambda move: move.after or "absent"),
        ]
        return Grid("moves", self.moves, columns, brief=5)
