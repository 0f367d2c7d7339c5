"""What one model would take on many devices: a table, and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchrec_neuroshard.report.plan_report import LOOSE_GAP, PlanReport
from torchrec_neuroshard.simulator import PHASES

__all__ = ["Sweep", "SweepCell"]

_GIB = 2**30


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
        worst = {
            phase: max(getattr(rank.costs, phase) for rank in report.ranks)
            for phase in PHASES
        }
        kernels_ms = sum(ms for p, ms in worst.items() if p.endswith("compute"))
        sync_ms = report.weight_sync.ms_per_iteration if report.weight_sync else 0.0
        fullest = max(report.ranks, key=lambda rank: rank.used_bytes)
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
        return "\n".join(_lines(self.cells))

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


def _lines(cells: Sequence[SweepCell]) -> Iterator[str]:
    yield (
        f"{'card':<11}{'ranks':>6}{'group':>6}{'batch':>8}{'ms':>10}{'+-':>5}{'gap':>6}"
        f"{'samples/s':>13}{'GiB':>8}{'of GiB':>8}  limit"
    )
    for cell in cells:
        start = (
            f"{cell.card:<11}{cell.num_ranks:>6}{cell.group_size:>6}"
            f"{cell.batch_size:>8,}"
        )
        if not cell.fits:
            yield f"{start}  does not fit: {cell.obstacle}"
            continue
        gap = f"{cell.gap:.0%}" if cell.gap <= LOOSE_GAP else "?"
        yield (
            f"{start}{cell.iteration_ms:>10.3f}{cell.uncertainty:>5.0%}{gap:>6}"
            f"{cell.samples_per_s:>13,.0f}{cell.memory_bytes / _GIB:>8.2f}"
            f"{cell.memory_limit_bytes / _GIB:>8.2f}  {cell.limit}"
        )
    fitting = [cell for cell in cells if cell.fits]
    if not fitting:
        yield "nothing fits; each line says what would help"
        return
    fastest = max(fitting, key=lambda cell: cell.samples_per_s)
    yield f"most samples per second: {_named(fastest)}"
    yield from dict.fromkeys(
        f"{c.card}: compute: {c.kernels_source}; collectives: {c.links_source}"
        for c in fitting
    )


def _named(cell: SweepCell) -> str:
    group = (
        f", groups of {cell.group_size}" if cell.group_size != cell.num_ranks else ""
    )
    return (
        f"{cell.num_ranks} x {cell.card}, {cell.batch_size:,} samples per rank{group}"
    )
