"""What one model would take on many devices: a table, and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_neuroshard.report.page import Report
from torchrec_neuroshard.report.plan import LOOSE_GAP, PlanReport
from torchrec_neuroshard.report.sections import Grid, GridColumn, Section

__all__ = ["Sweep", "SweepCell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCell:
    """A plan for so many ranks of a card, and what is predicted for it."""

    card: str
    num_ranks: int
    batch_size: int
    """Samples per rank."""
    group_size: int
    """Ranks that share the tables out; all, without replicas."""
    obstacle: str = ""
    """Why nothing fits; what is not known is None then."""
    iteration_ms: float | None = None
    """With its part of the replicas' average."""
    kernels_ms: float | None = None
    """Of kernels, on the slowest ranks."""
    links_ms: float | None = None
    """Of collectives, the replicas' average included."""
    gap: float | None = None
    """Of the plan to the lower bound; None where none is known."""
    memory_bytes: float | None = None
    """Of the fullest rank."""
    memory_limit_bytes: float | None = None
    """What that rank has for tables."""
    num_in_host_memory: int = 0
    """Tables for which the devices have no room."""
    uncertainty: float | None = None
    """Relative standard deviation of the iteration."""
    kernels_source: str = ""
    links_source: str = ""

    @classmethod
    def of(cls, report: PlanReport, **where: Any) -> SweepCell:
        """Describe a plan.

        Args:
            report: Of the plan.
            where: The fields that say what it is for.
        """
        worst, fullest = report.worst_ms, report.fullest
        kernels_ms = sum(ms for p, ms in worst.items() if p.endswith("compute"))
        sync_ms = report.weight_sync.ms_per_iteration if report.weight_sync else 0.0
        return cls(
            **where,
            iteration_ms=report.critical_path_ms + sync_ms,
            kernels_ms=kernels_ms,
            links_ms=sum(worst.values()) - kernels_ms + sync_ms,
            gap=report.gap if math.isfinite(report.gap) else None,
            memory_bytes=fullest.used_bytes,
            memory_limit_bytes=fullest.memory_bytes,
            num_in_host_memory=sum("uvm" in t.compute_kernel for t in report.tables),
            uncertainty=report.uncertainty,
            kernels_source=report.compute_source,
            links_source=report.comms_source,
        )

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return not self.obstacle

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks."""
        if self.iteration_ms is None:
            return None
        return self.num_ranks * self.batch_size / self.iteration_ms * 1e3

    @property
    def limit(self) -> str:
        """What it would take more of to be quicker: kernels, links or memory."""
        if not self.fits or self.num_in_host_memory:
            return "memory"
        return "kernels" if (self.kernels_ms or 0) >= (self.links_ms or 0) else "links"


_COLUMNS: tuple[GridColumn, ...] = (
    ("card", "text", lambda c: c.card),
    ("ranks", "count", lambda c: c.num_ranks),
    ("group", "count", lambda c: c.group_size),
    ("batch", "count", lambda c: c.batch_size),
    ("ms", "ms", lambda c: c.iteration_ms),
    ("+-", "percent", lambda c: c.uncertainty),
    ("gap", "percent", lambda c: c.gap if (c.gap or 0) <= LOOSE_GAP else None),
    ("samples/s", "rate", lambda c: c.samples_per_s),
    ("GiB", "gib", lambda c: c.memory_bytes),
    ("of GiB", "gib", lambda c: c.memory_limit_bytes),
    ("limit", "text", lambda c: c.limit),
    ("does not fit", "text", lambda c: c.obstacle or None),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep(Report):
    """Plans of one model for many devices; `print` shows a table."""

    cells: tuple[SweepCell, ...]

    def sections(self) -> Sequence[Section]:
        """See `Report`: all cells, the best of them, and what the costs rest on."""
        fitting = [cell for cell in self.cells if cell.fits]
        lines = ["nothing fits; each line says what would help"]
        if fitting:
            best = max(fitting, key=lambda cell: cell.samples_per_s or 0.0)
            lines = [
                f"most samples per second: {best.num_ranks} x {best.card} in groups of "
                f"{best.group_size}, {best.batch_size:,} samples per rank"
            ]
        lines += dict.fromkeys(
            f"{c.card}: compute: {c.kernels_source}; collectives: {c.links_source}"
            for c in fitting
        )
        cells = Grid("cells", self.cells, _COLUMNS, limit=len(self.cells))
        return [Section(grid=cells), Section(lines=lines)]

    def to_csv(self) -> str:
        """Return all cells as CSV, with what each rests on."""
        names = ["fits", *(f.name for f in dataclasses.fields(SweepCell))]
        names += ["samples_per_s", "limit"]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(cell, n) for n in names] for cell in self.cells)
        return out.getvalue()
