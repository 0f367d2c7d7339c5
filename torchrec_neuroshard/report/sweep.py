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
    layout: str = ""
    """Of the groups' ranks, "strided" or "adjacent"; "" where there is one group."""
    codec: str = "none"
    """Of the collectives of outputs and their gradients, both ways."""
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
    def groups(self) -> str:
        """The sharding groups, in words."""
        return f"{self.layout} groups of {self.group_size}".lstrip()

    @property
    def is_plain(self) -> bool:
        """Whether all ranks share the tables out, and send values as they are."""
        return self.group_size == self.num_ranks and self.codec == "none"

    @property
    def limit(self) -> str:
        """What it would take more of to be quicker: kernels, links or memory."""
        if not self.fits or self.num_in_host_memory:
            return "memory"
        return "kernels" if (self.kernels_ms or 0) >= (self.links_ms or 0) else "links"


def _share(cell: SweepCell, best: SweepCell) -> float:
    return (cell.samples_per_s or 0.0) / (best.samples_per_s or math.inf)


_COLUMNS: tuple[GridColumn, ...] = (
    ("card", "text", lambda c: c.card),
    ("ranks", "count", lambda c: c.num_ranks),
    ("group", "count", lambda c: c.group_size),
    ("layout", "text", lambda c: c.layout or None),
    ("codec", "text", lambda c: c.codec),
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
    """Plans of one model for many devices; `print` shows a table, the best first."""

    cells: tuple[SweepCell, ...]
    """In the order in which they were planned."""
    left_out: tuple[str, ...] = ()
    """What was not tried, and why."""
    search_seconds: float | None = None
    """That each cell was searched for."""
    sync_interval: int = 1
    """Iterations from one average of the groups to the next."""

    @property
    def best(self) -> SweepCell | None:
        """The cell of most samples per second; None where nothing fits."""
        fitting = [cell for cell in self.cells if cell.fits]
        return max(fitting, key=lambda c: c.samples_per_s or 0.0, default=None)

    def sections(self) -> Sequence[Section]:
        """See `Report`: all cells, the best of them, and what the costs rest on."""
        best = self.best
        fitting = [cell for cell in self.cells if cell.fits]
        lines = ["nothing fits; each line says what would help"]
        if best is not None:
            lines = [f"{self._recommended(best)}.", *self._scaling(best)]
        lines += dict.fromkeys(
            f"{c.card}: compute: {c.kernels_source}; collectives: {c.links_source}"
            for c in fitting
        )
        lines += [*self._assumed(), *(f"not tried: {text}" for text in self.left_out)]
        rows = sorted(self.cells, key=lambda c: -(c.samples_per_s or 0.0))
        mark = ("", "text", lambda c: "best" if c is best else None)
        cells = Grid("cells", rows, (*_COLUMNS[:-1], mark, _COLUMNS[-1]), len(rows))
        return [Section(grid=cells), Section(lines=lines)]

    def _recommended(self, best: SweepCell) -> str:
        """Name the best cell, and why it is."""
        said = (
            f"most samples per second: {best.num_ranks} x {best.card} in "
            f"{best.groups}, codec {best.codec}, {best.batch_size:,} samples per rank"
        )
        if self.search_seconds is not None:
            said += f", as far as {self.search_seconds:g} s of search for each row tell"
        same = ("card", "num_ranks", "batch_size")
        where = [getattr(best, name) for name in same]
        rivals = [
            cell
            for cell in self.cells
            if cell.fits
            and cell is not best
            and [getattr(cell, name) for name in same] == where
        ]
        plain = [cell for cell in rivals if cell.is_plain]
        if not rivals:
            return said
        rival = plain[0] if plain else max(rivals, key=lambda c: c.samples_per_s or 0)
        name = "without groups and codec"
        if not plain:
            name = f"in {rival.groups} with codec {rival.codec}"
        return (
            f"{said}. Its links take {best.links_ms:.3f} ms of an iteration and its "
            f"kernels {best.kernels_ms:.3f}; {name} {rival.links_ms:.3f} and "
            f"{rival.kernels_ms:.3f}, at {_share(rival, best):.0%} of its rate"
        )

    def _scaling(self, best: SweepCell) -> list[str]:
        """Say what more ranks are worth, of the best cell's card and batch."""
        rates: dict[int, float] = {}
        for cell in self.cells:
            if (cell.card, cell.batch_size) == (best.card, best.batch_size):
                rate = cell.samples_per_s or 0.0
                rates[cell.num_ranks] = max(rate, rates.get(cell.num_ranks, 0.0))
        known = [(ranks, rate / ranks) for ranks, rate in sorted(rates.items()) if rate]
        if len(known) < 2:
            return []
        first = known[0][1]
        told = ", ".join(f"{ranks}: {each / first:.0%}" for ranks, each in known)
        return [f"samples per second and rank, of those at {known[0][0]} ranks: {told}"]

    def _assumed(self) -> list[str]:
        """Say what the choice of codecs and groups rests on."""
        lines = []
        if any(c.codec != "none" for c in self.cells):
            lines += [
                "codecs: change bytes on the wire and add kernels that code and decode "
                "(on GPUs an estimate, by the memory that these move); what a codec "
                "does to the model is not known here"
            ]
        if any(c.codec in ("fp8", "mx4") for c in self.cells):
            lines.append(
                "fp8, mx4: sums of row-wise shards go as fp16 and come back as bf16"
            )
        if any(c.group_size < c.num_ranks for c in self.cells):
            every = self.sync_interval
            often = "every iteration" if every == 1 else f"every {every} iterations"
            lines.append(
                f"groups: replicas average their weights {often}; adjacent ones need "
                "use_inter_host_allreduce=True"
            )
        return lines

    def to_csv(self) -> str:
        """Return all cells as CSV, with what each rests on."""
        names = ["fits", *(f.name for f in dataclasses.fields(SweepCell))]
        names += ["samples_per_s", "limit"]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(cell, n) for n in names] for cell in self.cells)
        return out.getvalue()
