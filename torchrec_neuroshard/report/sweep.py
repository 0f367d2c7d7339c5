"""What one model would take on many devices: a table, and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchrec_neuroshard.report.plan import LOOSE_GAP, PlanReport
from torchrec_neuroshard.report.terminal import gib, table

__all__ = ["Sweep", "SweepCell"]

_HEAD = "card|ranks|group|batch|ms|+-|gap|samples/s|GiB|of GiB|limit".split("|")


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
    """Why nothing fits; NaN then stands for what is not known."""
    iteration_ms: float = math.nan
    """With its part of the replicas' average."""
    kernels_ms: float = math.nan
    """Of kernels, on the slowest ranks."""
    links_ms: float = math.nan
    """Of collectives, the replicas' average included."""
    gap: float = math.nan
    """Of the plan to the lower bound; infinite where none is known."""
    memory_bytes: float = math.nan
    """Of the fullest rank."""
    memory_limit_bytes: float = math.nan
    """What that rank has for tables."""
    num_in_host_memory: int = 0
    """Tables for which the devices have no room."""
    uncertainty: float = math.nan
    """Relative standard deviation of the iteration."""
    kernels_source: str = ""
    links_source: str = ""

    @classmethod
    def of(cls, report: PlanReport, **where: object) -> SweepCell:
        """Describe a plan.

        Args:
            report: Of the plan.
            where: The fields that say what it is for.
        """
        worst, fullest = report.worst_ms, report.fullest
        kernels_ms = sum(ms for p, ms in worst.items() if p.endswith("compute"))
        sync_ms = report.weight_sync.ms_per_iteration if report.weight_sync else 0.0
        return cls(
            **where,  # type: ignore[arg-type]
            iteration_ms=report.critical_path_ms + sync_ms,
            kernels_ms=kernels_ms,
            links_ms=sum(worst.values()) - kernels_ms + sync_ms,
            gap=report.gap,
            memory_bytes=fullest.used_bytes,
            memory_limit_bytes=float(fullest.memory_bytes or math.nan),
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
    def name(self) -> str:
        """What it is for, in words."""
        groups = f", groups of {self.group_size}" * (self.group_size != self.num_ranks)
        return (
            f"{self.num_ranks} x {self.card}, {self.batch_size:,} samples per "
            f"rank{groups}"
        )

    @property
    def row(self) -> list[str]:
        """It as text, in the columns of a sweep's table."""
        where = [self.card, str(self.num_ranks), str(self.group_size)]
        where.append(f"{self.batch_size:,}")
        if not self.fits:
            return [*where, f"does not fit: {self.obstacle}"]
        return [
            *where,
            f"{self.iteration_ms:.3f}",
            f"{self.uncertainty:.0%}",
            f"{self.gap:.0%}" if self.gap <= LOOSE_GAP else "?",
            f"{self.samples_per_s:,.0f}",
            gib(self.memory_bytes),
            gib(self.memory_limit_bytes),
            self.limit,
        ]

    @property
    def samples_per_s(self) -> float:
        """Of all ranks."""
        return self.num_ranks * self.batch_size / self.iteration_ms * 1e3

    @property
    def limit(self) -> str:
        """What it would take more of to be quicker: kernels, links or memory."""
        if not self.fits or self.num_in_host_memory:
            return "memory"
        return "kernels" if self.kernels_ms >= self.links_ms else "links"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Plans of one model for many devices; `print` shows a table."""

    cells: tuple[SweepCell, ...]

    def __str__(self) -> str:
        """Return a table; below it the best of it, and what the costs rest on."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from table([_HEAD, *(cell.row for cell in self.cells)], left=1)
        fitting = [cell for cell in self.cells if cell.fits]
        if not fitting:
            yield "nothing fits; each line says what would help"
            return
        fastest = max(fitting, key=lambda cell: cell.samples_per_s)
        yield f"most samples per second: {fastest.name}"
        yield from dict.fromkeys(
            f"{c.card}: compute: {c.kernels_source}; collectives: {c.links_source}"
            for c in fitting
        )

    def to_csv(self) -> str:
        """Return all cells as CSV, with what each rests on."""
        names = ["fits", *(f.name for f in dataclasses.fields(SweepCell))]
        names += ["samples_per_s", "limit"]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        for cell in self.cells:
            values = [getattr(cell, name) for name in names]
            writer.writerow(
                "" if isinstance(v, float) and not math.isfinite(v) else v
                for v in values
            )
        return out.getvalue()
