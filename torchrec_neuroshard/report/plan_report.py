"""A plan's report: what it costs on each rank, and what its splits are good for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torchrec_neuroshard.report.html import HtmlReport, sentence, view
from torchrec_neuroshard.report.plan_parts import (
    Bottleneck,
    PlanBasis,
    RankReport,
    ScheduleReport,
    SplitReport,
    TableReport,
    WeightSync,
)
from torchrec_neuroshard.simulator import PHASES

__all__ = ["PlanReport", "plan_data", "plan_page"]

MAX_RANKS = 32
"""Ranks shown one by one; of more, those that set a phase and the least loaded."""
MAX_TABLES = 50
"""Tables that the text lists one by one; pages and JSON have all."""
LOOSE_GAP = 1.0
"""A bound this far below the plan says nothing about it."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport(HtmlReport):
    """A plan, for people to look at; `print` shows it as text."""

    critical_path_ms: float
    lower_bound_ms: float
    bound_is_proven: bool = False
    """Whether no plan can be below the bound; otherwise it is an estimate."""
    uncertainty: float
    """See `simulator.PredictedCosts`."""
    compute_source: str
    comms_source: str
    search_seconds: float
    num_evaluated: int
    num_tables: int
    ranks: tuple[RankReport, ...]
    splits: tuple[SplitReport, ...]
    """Tables split by columns, costliest in one piece first; at most `max_splits`."""
    tables: tuple[TableReport, ...]
    """All of them, the largest part of the critical path first."""
    bottleneck: Bottleneck | None = None
    """None where costs are not known or 0."""
    fallback: str | None
    warnings: tuple[str, ...]
    basis: PlanBasis | None = None
    """None where only a search is reported."""
    weight_sync: WeightSync | None = None
    """None where the plan is of all ranks, not of one of several sharding groups."""
    schedule: ScheduleReport | None = None
    """None where nobody said how the model is trained."""

    @property
    def gap(self) -> float:
        """How far the plan is above the bound, relative to it; infinite without one."""
        bound_ms = self.lower_bound_ms
        return self.critical_path_ms / bound_ms - 1 if bound_ms > 0 else math.inf

    @property
    def num_split(self) -> int:
        """Tables split by columns, by rows or both."""
        return sum(t.is_split_by_columns or t.is_split_by_rows for t in self.tables)

    @property
    def num_split_by_columns(self) -> int:
        """Tables split by columns, and maybe by rows too."""
        return sum(t.is_split_by_columns for t in self.tables)

    @property
    def layout(self) -> str:
        """How many tables are split, and how, in words."""
        by_rows = self.num_split - self.num_split_by_columns
        kinds = {"by columns": self.num_split_by_columns, "by rows": by_rows}
        split = [f"{count:,} split {kind}" for kind, count in kinds.items() if count]
        return ", ".join(split) or "none split"

    @property
    def bound(self) -> str:
        """How far the plan may be from the best one, in words."""
        if not self.lower_bound_ms > 0:
            return "bound not computed"
        kind = "lower" if self.bound_is_proven else "estimated"
        known = f"{kind} bound {self.lower_bound_ms:.3f} ms"
        if self.gap > LOOSE_GAP:
            return f"{known}, too low to judge the plan by"
        return f"{known}, gap {self.gap:.1%}"

    @property
    def spread(self) -> str:
        """How uncertain the costs are, in words; empty where that is not known."""
        if not self.uncertainty:
            return ""
        if self.basis is not None and self.basis.estimate_error is not None:
            return (
                "the estimate of kernels has a standard deviation of "
                f"{self.uncertainty:.1%} on a rank"
            )
        return f"the ensemble's nets differ by up to {self.uncertainty:.1%} on a rank"

    def __str__(self) -> str:
        """Return the report as text."""
        lines = [*_head_lines(self), "", *_rank_lines(self.ranks)]
        if tail := [*_tail_lines(self)]:
            lines += ["", *tail]
        return "\n".join(lines)

    def _page_body(self) -> Iterator[str]:
        return plan_page(self, 0)

    def _page_data(self) -> dict[str, Any]:
        return {"plans": [plan_data(self, "")], "moves": []}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        data = dataclasses.asdict(self)
        for rank, report in zip(data["ranks"], self.ranks, strict=True):
            rank["costs"] = report.costs.to_json()
        for table, held in zip(data["tables"], self.tables, strict=True):
            for name in ("num_shards", "ranks", "used_bytes", "path_ms"):
                table[name] = getattr(held, name)
        data |= {"gap": self.gap, "num_split": self.num_split}
        if self.basis is not None:
            data["basis"]["assumptions"] = list(self.basis.assumptions)
        return data


def _head_lines(report: PlanReport) -> Iterator[str]:
    """What the text says before it comes to the ranks."""
    searched = ""
    if report.num_evaluated:
        searched = (
            f"; {report.num_evaluated:,} rank sets evaluated in "
            f"{report.search_seconds:.1f} s"
        )
    yield (
        f"{report.num_tables} tables on {len(report.ranks)} ranks, "
        f"{report.layout}{searched}"
    )
    if math.isnan(report.critical_path_ms):
        yield "critical path not known"
        return
    yield f"critical path {report.critical_path_ms:.3f} ms, {report.bound}"
    yield from _facts(report)
    if report.basis is not None:
        yield from _basis_lines(report.basis)


def _facts(report: PlanReport) -> Iterator[str]:
    """What text and page say of a plan's costs, in sentences without a full stop."""
    if report.bottleneck is not None:
        yield str(report.bottleneck)
    yield f"compute: {report.compute_source}; collectives: {report.comms_source}"
    if report.spread:
        yield report.spread
    if report.weight_sync is not None:
        yield str(report.weight_sync)
    if report.schedule is not None:
        yield str(report.schedule)
    if report.fallback is not None:
        yield f"TorchRec's own plan was taken: {report.fallback}"


def _tail_lines(report: PlanReport) -> Iterator[str]:
    """What the text says after the ranks."""
    if report.tables:
        first = "the largest part of the critical path first [ms, GiB]"
        if not _are_costs_known(report.tables):
            first = "the largest first [GiB]"
        yield f"Tables, {first}:"
        yield from _table_lines(report.tables)
    if report.splits:
        yield ""
        yield "Tables split by columns, and why:"
        for split in report.splits:
            yield from _split_lines(split, report.critical_path_ms)
        if more := report.num_split_by_columns - len(report.splits):
            yield f"... and {more:,} more"
    if report.warnings:
        yield ""
        yield "Warnings:"
        yield from (f"- {text}" for text in report.warnings)


def _basis_lines(basis: PlanBasis, *, sources: bool = False) -> Iterator[str]:
    """What costs rest on, in sentences without a full stop."""
    card = basis.card or "cards that are not named"
    yield f"planned for {card}, {basis.batch_size:,} samples per rank"
    if basis.estimate_error is not None:
        yield f"the estimate of kernels may be off: {basis.estimate_error}"
    if basis.figures:
        yield ", ".join(
            f"{f.name} {f} ({f.basis}{f': {f.source}' if sources and f.source else ''})"
            for f in basis.figures
        )
    yield "ids per sample: " + ", ".join(
        f"{source} ({count} feature{'s' * (count != 1)})"
        for source, count in basis.ids_per_sample
    )
    if basis.assumptions:
        yield f"assumed: {'; '.join(basis.assumptions)}"


def _are_costs_known(tables: Sequence[TableReport]) -> bool:
    return any(table.path_ms for table in tables)


def _table_lines(tables: Sequence[TableReport]) -> Iterator[str]:
    known = _are_costs_known(tables)
    for table in tables[:MAX_TABLES]:
        cost = f"{table.path_ms:.3f}" if known else ""
        size = f"{table.num_embeddings:,} x {table.embedding_dim}"
        host = f"; {table.host}" if table.host is not None else ""
        yield (
            f"{cost:>12} {table.used_bytes / _GIB:>8.2f}  "
            f"{table.table} ({size}): {table.place}{host}"
        )
    if len(tables) > MAX_TABLES:
        yield f"... and {len(tables) - MAX_TABLES} more"


def _rank_lines(ranks: Sequence[RankReport]) -> Iterator[str]:
    """Phases of each rank; a star marks the slowest of a column."""
    worst = _worst(ranks)
    limited = any(r.memory_bytes is not None for r in ranks)
    title = f"{'rank':>5}{'shards':>8}{'columns':>9}{'GiB':>9}"
    yield (
        title
        + (f"{'of GiB':>9}" if limited else "")
        + "".join(f"{p:>13}" for p in PHASES)
        + "   [ms]"
    )
    for rank in _shown_ranks(ranks):
        cells = [
            f" {getattr(rank.costs, p):>11.3f}"
            + ("*" if 0 < worst[p] == getattr(rank.costs, p) else " ")
            for p in PHASES
        ]
        memory = f" {rank.used_bytes / _GIB:>8.2f}"
        if limited:
            free = rank.memory_bytes
            memory += f" {'' if free is None else f'{free / _GIB:.2f}':>8}"
        yield (
            f"{rank.rank:>5} {rank.num_shards:>7} {rank.columns:>8,}{memory}"
            + "".join(cells)
        ).rstrip()
    if len(ranks) > MAX_RANKS:
        yield f"  ... of {len(ranks)} ranks, those that are slowest and least loaded"


def _shown_ranks(ranks: Sequence[RankReport]) -> list[RankReport]:
    """Return the ranks to show one by one: see `MAX_RANKS`."""
    if len(ranks) <= MAX_RANKS:
        return list(ranks)
    worst = _worst(ranks)
    slowest = {
        next(r.rank for r in ranks if getattr(r.costs, p) == worst[p]) for p in PHASES
    }
    by_load = sorted(ranks, key=lambda r: sum(r.costs.to_json().values()))
    few = slowest | {r.rank for r in (*by_load[:2], *by_load[-6:])}
    return [r for r in ranks if r.rank in few]


def _worst(ranks: Sequence[RankReport]) -> dict[str, float]:
    """Phase -> what it takes on its slowest rank [ms]."""
    return {p: max(getattr(r.costs, p) for r in ranks) for p in PHASES}


def _split_lines(split: SplitReport, planned_ms: float) -> Iterator[str]:
    yield f"{split.table}: " + ", ".join(f"{w} on rank {r}" for w, r in split.shards)
    yield f"    {split.reason(planned_ms)}"


def plan_page(report: PlanReport, number: int) -> Iterator[str]:
    """Lay out one of a page's plans.

    Args:
        report: Of the plan.
        number: The plan's place in the page's data.
    """
    yield from _summary(report)
    yield f"<div class='box'><h2>Critical path</h2>{view('path', number)}"
    yield "<h2>What each rank does in an iteration</h2>"
    yield view("legend") + view("phases", number)
    yield "<h2>Memory of each rank</h2>"
    yield f"{view('memory', number)}</div>"
    yield "<h2>Tables</h2>"
    yield view("tables", number)
    yield "<h2>Ranks</h2>"
    yield "<p class='note'>Milliseconds; the slowest rank of a phase stands out.</p>"
    yield view("ranks", number)
    yield "<h2>Split tables, and why</h2>"
    yield f"<p>{escape(sentence(report.layout))}</p>"
    if report.splits:
        yield view("splits", number)
        if more := report.num_split_by_columns - len(report.splits):
            yield f"<p class='note'>... and {more:,} more, which matter less.</p>"
    elif report.num_split_by_columns:
        yield "<p class='note'>What the splits are good for is not known.</p>"
    yield from _basis(report.basis)
    yield from _warnings(report)


def _summary(report: PlanReport) -> Iterator[str]:
    path_ms = report.critical_path_ms
    path, known = f"{path_ms:.3f} ms", not math.isnan(path_ms)
    fullest = max(report.ranks, key=lambda rank: rank.used_bytes)
    room = ""
    if fullest.memory_bytes:
        room = f"of {fullest.memory_bytes / _GIB:.2f} GiB, "
    cards = (
        ("critical path, predicted", path if known else "not known", report.bound),
        (
            "tables",
            f"{report.num_tables:,}",
            f"on {len(report.ranks)} ranks, {report.layout}",
        ),
        (
            "fullest rank",
            f"{fullest.used_bytes / _GIB:.2f} GiB",
            f"{room}rank {fullest.rank}",
        ),
    )
    yield "<div class='cards'>"
    for title, value, more in cards:
        yield f"<div><span>{title}</span><b>{value}</b><span>{more}</span></div>"
    yield "</div>"
    yield from (f"<p>{escape(sentence(text))}</p>" for text in _facts(report))


def _basis(basis: PlanBasis | None) -> Iterator[str]:
    if basis is None:
        return
    yield "<h2>What the costs rest on</h2><ul>"
    yield from (
        f"<li>{escape(text)}</li>" for text in _basis_lines(basis, sources=True)
    )
    yield "</ul>"


def _warnings(report: PlanReport) -> Iterator[str]:
    if not report.warnings:
        return
    yield "<h2>Warnings</h2>"
    yield "<ul class='warning'>"
    yield from (f"<li>{escape(text)}</li>" for text in report.warnings)
    yield "</ul>"


def plan_data(report: PlanReport, name: str) -> dict[str, Any]:
    """Return what `page.js` draws of a plan, under the name that the page gives it."""
    path_ms = report.critical_path_ms
    return {
        "name": name,
        "path_ms": 0.0 if math.isnan(path_ms) else path_ms,
        "bound_ms": report.lower_bound_ms,
        "bound_is_proven": report.bound_is_proven,
        "ranks": [
            [
                rank.num_shards,
                rank.columns,
                rank.used_bytes,
                rank.memory_bytes,
                [getattr(rank.costs, phase) for phase in PHASES],
            ]
            for rank in report.ranks
        ],
        "tables": [_table_data(table) for table in report.tables],
        "splits": [
            [
                split.table,
                ", ".join(f"{width} ({rank})" for width, rank in split.shards),
                split.reason(path_ms),
            ]
            for split in report.splits
        ],
    }


def _table_data(table: TableReport) -> list[Any]:
    return [
        table.table,
        table.sharding_type,
        table.compute_kernel,
        table.num_embeddings,
        table.embedding_dim,
        "" if table.host is None else sentence(str(table.host)),
        [
            [
                shard.rank,
                shard.num_embeddings,
                shard.embedding_dim,
                round(shard.used_bytes),
                float(f"{shard.compute_ms:.6g}"),
                float(f"{shard.comms_ms:.6g}"),
                float(f"{shard.path_ms:.6g}"),
            ]
            for shard in table.shards
        ],
    ]
