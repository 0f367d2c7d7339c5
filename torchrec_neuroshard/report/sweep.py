"""The report of a sweep: plans of one model for many devices, also as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.report.page import Report
from torchrec_neuroshard.report.plan import LOOSE_GAP, PlanReport
from torchrec_neuroshard.report.sections import Grid, GridColumn, Section

_DERIVED = ("samples_per_s", "rank_samples_per_s", "limit")
"""Properties of a cell that CSV and JSON have, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCell:
    """A plan for one card, number of ranks and batch size, and its predicted costs."""

    card: str
    num_ranks: int
    batch_size: int
    """Samples per rank."""
    obstacle: str = ""
    """Reason why no plan fits; "": a plan fits. Without a plan, costs are None."""
    iteration_ms: float | None = None
    """Expected iteration; see `PlanReport`."""
    kernels_ms: float | None = None
    """Time of kernels on the slowest ranks."""
    links_ms: float | None = None
    """Time of collectives."""
    gap: float | None = None
    """Distance of the critical path to the lower bound; None: no bound."""
    memory_bytes: float | None = None
    """Memory in use on the fullest rank."""
    memory_limit_bytes: float | None = None
    """Memory available for tables on that rank."""
    num_in_host_memory: int = 0
    """Number of tables in host memory."""
    error: float | None = None
    """Relative error of the iteration; None: unknown."""
    kernels_source: str = ""
    links_source: str = ""

    @classmethod
    def of(cls, report: PlanReport, **where: Any) -> SweepCell:
        """Return the cell of a plan.

        Args:
            report: The plan's report.
            where: The card, ranks and batch.
        """
        worst, fullest = report.worst_ms, report.fullest
        kernels_ms = sum(ms for p, ms in worst.items() if p.endswith("compute"))
        return cls(
            **where,
            iteration_ms=report.iteration_ms,
            kernels_ms=kernels_ms,
            links_ms=sum(worst.values()) - kernels_ms,
            gap=report.gap if math.isfinite(report.gap) else None,
            memory_bytes=fullest.used_bytes,
            memory_limit_bytes=fullest.memory_bytes,
            num_in_host_memory=sum("uvm" in t.compute_kernel for t in report.tables),
            error=report.error,
            kernels_source=report.compute_source,
            links_source=report.comms_source,
        )

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return not self.obstacle

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second over all ranks; None: no plan fits."""
        if self.iteration_ms is None:
            return None
        return self.num_ranks * self.batch_size / self.iteration_ms * 1e3

    @property
    def rank_samples_per_s(self) -> float | None:
        """Samples per second of one rank; None: no plan fits."""
        rate = self.samples_per_s
        return rate and rate / self.num_ranks

    @property
    def limit(self) -> str:
        """The resource that limits speed: "kernels", "links" or "memory"."""
        if not self.fits or self.num_in_host_memory:
            return "memory"
        return "kernels" if (self.kernels_ms or 0) >= (self.links_ms or 0) else "links"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep(Report):
    """Plans of one model for many devices; `print` recommends the fastest."""

    cells: tuple[SweepCell, ...]
    """In planning order."""
    left_out: str = ""
    """What was not tried, and why."""
    search_seconds: float
    """Search budget of each cell."""

    def sections(self) -> Sequence[Section]:
        """See `Report`: the fastest cell, all cells, and where costs come from."""
        rows = sorted(self.cells, key=lambda c: -(c.samples_per_s or 0.0))
        best = next((cell for cell in rows if cell.fits), None)
        answer = ["nothing fits; each line says what would help"]
        if best is not None:
            answer = [
                f"most samples per second: {best.num_ranks} x {best.card}, "
                f"{best.batch_size:,} samples per rank, after "
                f"{self.search_seconds:g} s of search per row",
                *self._scaling(best),
            ]
        if self.left_out:
            answer.append(f"not tried: {self.left_out}")
        sources = dict.fromkeys(
            f"{c.card}: compute: {c.kernels_source}; collectives: {c.links_source}"
            for c in self.cells
            if c.fits
        )
        columns: tuple[GridColumn, ...] = (
            ("card", "text", lambda c: c.card),
            ("ranks", "count", lambda c: c.num_ranks),
            ("batch", "count", lambda c: c.batch_size),
            ("ms", "ms", lambda c: c.iteration_ms),
            ("+-", "percent", lambda c: c.error),
            ("gap", "percent", lambda c: c.gap if (c.gap or 0) <= LOOSE_GAP else None),
            ("samples/s", "rate", lambda c: c.samples_per_s),
            ("per rank", "rate", lambda c: c.rank_samples_per_s),
            ("GiB", "gib", lambda c: c.memory_bytes),
            ("of GiB", "gib", lambda c: c.memory_limit_bytes),
            ("limit", "text", lambda c: c.limit),
            ("", "text", lambda c: "best" if c is best else None),
            ("does not fit", "text", lambda c: c.obstacle or None),
        )
        cells = Grid("cells", rows, columns, brief=len(rows))
        return [
            Section(lines=answer),
            Section(title="predicted", grid=cells),
            Section(title="what the costs rest on", details=list(sources)),
        ]

    def _scaling(self, best: SweepCell) -> list[str]:
        """Return how the best cell's card and batch scale with ranks, in a sentence."""
        known = sorted(
            (cell.num_ranks, cell.rank_samples_per_s)
            for cell in self.cells
            if (cell.card, cell.batch_size) == (best.card, best.batch_size)
            and cell.rank_samples_per_s
        )
        if len(known) < 2:
            return []
        first = known[0][1]
        told = [f"{each / first:.0%} at {ranks} ranks" for ranks, each in known[1:]]
        return [
            f"samples per second per rank, compared with {known[0][0]} ranks: "
            f"{', '.join(told)}"
        ]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        data = to_fields(self)
        for fields, cell in zip(data["cells"], self.cells, strict=True):
            fields |= {name: getattr(cell, name) for name in ("fits", *_DERIVED)}
        return data

    def to_csv(self) -> str:
        """Return all cells as CSV, with the sources of their costs."""
        names = ["fits", *(f.name for f in dataclasses.fields(SweepCell)), *_DERIVED]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(cell, n) for n in names] for cell in self.cells)
        return out.getvalue()
