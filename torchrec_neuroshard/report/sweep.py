"""What one model would take on many devices: a table, CSV and a picture."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchrec_neuroshard.report.plan_report import LOOSE_GAP, PlanReport

__all__ = ["Sweep", "SweepCell"]

_GIB = 2**30
_KERNELS = ("fwd_compute", "bwd_compute")
_LINKS = ("index_comms", "fwd_comms", "bwd_comms")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _RIGHT = 860, 460, 90, 40, 190
_COLORS = ("#1b6ca8", "#e07b39", "#66c2a5", "#8d4fa8", "#a6761d", "#d6417b", "#555")
_DASHES = ("", "6 3", "2 3", "9 3 2 3")


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
    usd_per_hour: float | None = None
    """Of one rank; None: not said."""

    @classmethod
    def of(cls, report: PlanReport, **where: object) -> SweepCell:
        """Describe a plan.

        Args:
            report: Of the plan.
            where: The fields that say what it is for.
        """
        worst = {
            phase: max(getattr(rank.costs, phase) for rank in report.ranks)
            for phase in (*_KERNELS, *_LINKS)
        }
        sync = report.weight_sync.ms_per_iteration if report.weight_sync else 0.0
        fullest = max(report.ranks, key=lambda rank: rank.used_bytes)
        return cls(
            **where,  # type: ignore[arg-type]
            iteration_ms=report.critical_path_ms + sync,
            kernels_ms=sum(worst[phase] for phase in _KERNELS),
            links_ms=sum(worst[phase] for phase in _LINKS) + sync,
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
    def usd_per_million(self) -> float | None:
        """Price of a million samples; None where that of a rank is not said."""
        if self.usd_per_hour is None:
            return None
        return self.usd_per_hour * self.num_ranks / 3.6e-3 / self.samples_per_s

    @property
    def limit(self) -> str:
        """What it would take more of to be quicker: kernels, links or memory."""
        if not self.fits or self.num_in_host_memory:
            return "memory"
        return "kernels" if self.kernels_ms >= self.links_ms else "links"

    @property
    def sureness(self) -> str:
        """How sure the costs are, in words."""
        if not self.fits:
            return ""
        kernels, links = map(_kind, (self.kernels_source, self.links_source))
        both = f"kernels {kernels}, links {links}" if kernels != links else kernels
        return f"±{self.uncertainty:.0%}, {both}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Plans of one model for many devices; `print` shows a table."""

    cells: tuple[SweepCell, ...]

    def __str__(self) -> str:
        """Return a table, and the best of it below."""
        return "\n".join(_lines(self.cells))

    def to_csv(self) -> str:
        """Return all cells as CSV, with what each rests on."""
        derived = ("samples_per_s", "usd_per_million", "limit", "sureness")
        names = [f.name for f in dataclasses.fields(SweepCell)]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("fits", *names, *derived))
        for cell in self.cells:
            values = [getattr(cell, name) for name in (*names, *derived)]
            writer.writerow(
                (
                    str(cell.fits).lower(),
                    *(
                        "" if isinstance(v, float) and not math.isfinite(v) else v
                        for v in values
                    ),
                )
            )
        return out.getvalue()

    def to_svg(self) -> str:
        """Return a picture: samples per second over ranks, a line for each card."""
        return "".join(_picture([cell for cell in self.cells if cell.fits]))


def _lines(cells: Sequence[SweepCell]) -> Iterator[str]:
    priced = any(cell.usd_per_hour is not None for cell in cells)
    yield (
        f"{'card':<11}{'ranks':>6}{'group':>6}{'batch':>8}{'ms':>10}{'gap':>6}"
        f"{'samples/s':>13}"
        f"{'GiB':>8}{'of GiB':>8}  {'limit':<8}"
        + (f"{'$/million':>10}  " if priced else "")
        + "how sure"
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
        price = ""
        if priced:
            usd = cell.usd_per_million
            price = f"{'?' if usd is None else f'{usd:.4f}':>10}  "
        yield (
            f"{start}{cell.iteration_ms:>10.3f}{gap:>6}{cell.samples_per_s:>13,.0f}"
            f"{cell.memory_bytes / _GIB:>8.2f}{cell.memory_limit_bytes / _GIB:>8.2f}"
            f"  {cell.limit:<8}{price}{cell.sureness}"
        )
    fitting = [cell for cell in cells if cell.fits]
    if not fitting:
        yield "nothing fits; each line says what would help"
        return
    fastest = max(fitting, key=lambda cell: cell.samples_per_s)
    yield f"most samples per second: {_named(fastest)}"
    if with_price := [c for c in fitting if c.usd_per_million is not None]:
        cheapest = min(with_price, key=lambda cell: cell.usd_per_million or 0.0)
        yield f"cheapest samples: {_named(cheapest)}"


def _kind(source: str) -> str:
    """What costs are, in a word or two."""
    if "not measured" in source:
        return "estimated"
    return "partly estimated" if "estimated" in source else "measured"


def _named(cell: SweepCell) -> str:
    group = (
        f", groups of {cell.group_size}" if cell.group_size != cell.num_ranks else ""
    )
    return (
        f"{cell.num_ranks} x {cell.card}, {cell.batch_size:,} samples per rank{group}"
    )


def _picture(cells: Sequence[SweepCell]) -> Iterator[str]:
    """SVG: both axes logarithmic."""
    yield (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' "
        "font-family='system-ui, sans-serif' font-size='12'>"
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='white'/>"
    )
    yield _text(_LEFT, 20, "predicted samples per second, by ranks")
    if not cells:
        yield _text(_LEFT, 50, "nothing fits") + "</svg>"
        return
    ranks = sorted({cell.num_ranks for cell in cells})
    rates = [cell.samples_per_s for cell in cells]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    high = max(high, low + 1)
    span = max(math.log2(ranks[-1] / ranks[0]), 1e-9)

    def x_of(count: int) -> float:
        if len(ranks) == 1:
            return _LEFT + (_WIDTH - _LEFT - _RIGHT) / 2
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log2(count / ranks[0]) / span

    def y_of(rate: float) -> float:
        share = (math.log10(rate) - low) / (high - low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 40) * share

    for power in range(low, high + 1):
        y = y_of(10.0**power)
        yield (
            f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}' "
            "stroke='#ddd'/>"
        ) + _text(_LEFT - 8, y + 4, f"{10**power:,}", "end")
    for count in ranks:
        yield _text(x_of(count), _HEIGHT - _BOTTOM + 20, str(count), "middle")
    yield _text(_WIDTH - _RIGHT + 12, _HEIGHT - _BOTTOM + 20, "ranks")
    cards = list(dict.fromkeys(cell.card for cell in cells))
    kinds: dict[tuple[int, int], None] = {}
    lines: dict[tuple[str, int, int], list[SweepCell]] = {}
    for cell in cells:
        group = 0 if cell.group_size == cell.num_ranks else cell.group_size
        kinds.setdefault((cell.batch_size, group))
        lines.setdefault((cell.card, cell.batch_size, group), []).append(cell)
    for held in lines.values():
        held.sort(key=lambda cell: cell.num_ranks)
    lowest = -math.inf
    ends = sorted(lines.items(), key=lambda item: -item[1][-1].samples_per_s)
    for (card, batch_size, group), held in ends:
        color = _COLORS[cards.index(card) % len(_COLORS)]
        dash = _DASHES[list(kinds).index((batch_size, group)) % len(_DASHES)]
        points = [(x_of(cell.num_ranks), y_of(cell.samples_per_s)) for cell in held]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield (
            f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='2' "
            f"stroke-dasharray='{dash}'/>"
        )
        for (x, y), cell in zip(points, held, strict=True):
            title = html.escape(
                f"{_named(cell)}: {cell.iteration_ms:.3f} ms, limited by {cell.limit}, "
                f"{cell.sureness}"
            )
            yield (
                f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{color}'>"
                f"<title>{title}</title></circle>"
            )
        name = card + (f", {batch_size:,}" if len(kinds) > 1 else "")
        name += f", groups of {group}" if group else ""
        lowest = max(lowest + 14, points[-1][1] + 4)
        yield _text(_WIDTH - _RIGHT + 12, lowest, name, color=color)
    yield "</svg>\n"


def _text(
    x: float, y: float, text: str, anchor: str = "start", color: str = "#222"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{color}'>"
        f"{html.escape(text)}</text>"
    )
