"""A plan's report: what it costs on each rank, and what its splits are good for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report.page import (
    HtmlReport,
    bullets,
    note_list,
    paragraphs,
    view,
)
from torchrec_neuroshard.report.parts import (
    Bottleneck,
    PlanBasis,
    RankReport,
    ScheduleReport,
    SplitReport,
    TableReport,
    WeightSync,
    rank_reports,
)
from torchrec_neuroshard.report.terminal import gib, most, note_lines, sentence, table
from torchrec_neuroshard.search import SearchResult
from torchrec_neuroshard.simulator import PHASES

__all__ = ["PlanReport", "plan_data", "plan_page"]

MAX_RANKS = 32
"""Ranks shown one by one; of more, those that set a phase and the least loaded."""
MAX_TABLES = 50
"""Tables that the text lists one by one; pages and JSON have all."""
LOOSE_GAP = 1.0
"""A bound this far below the plan says nothing about it."""


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
    notes: tuple[Note, ...]
    """What to know of it: each has a code, and maybe a table."""
    basis: PlanBasis | None = None
    """None where only a search is reported."""
    weight_sync: WeightSync | None = None
    """None where the plan is of all ranks, not of one of several sharding groups."""
    schedule: ScheduleReport | None = None
    """None where nobody said how the model is trained."""

    @classmethod
    def of(
        cls,
        result: SearchResult,
        tables: Sequence[TableReport],
        memory_bytes: Sequence[int],
        **known: Any,
    ) -> PlanReport:
        """Say what a plan costs; what its splits are good for, `explain` finds out.

        Args:
            result: A search's, or `NeuroShardPlanner.last_result`.
            tables: All of them.
            memory_bytes: What each rank has for them.
            known: More fields: `basis`, `weight_sync`, `bottleneck`.
        """
        predicted = result.predicted
        return cls(
            critical_path_ms=predicted.critical_path_ms,
            lower_bound_ms=result.lower_bound_ms,
            bound_is_proven=result.bound_is_proven,
            uncertainty=predicted.uncertainty,
            compute_source=predicted.compute_source,
            comms_source=predicted.comms_source,
            search_seconds=result.search_seconds,
            num_evaluated=result.num_evaluated,
            num_tables=len(tables),
            ranks=rank_reports(tables, predicted.ranks, memory_bytes),
            splits=(),
            tables=tuple(sorted(tables, key=lambda t: (-t.path_ms, -t.used_bytes))),
            fallback=result.fallback,
            notes=result.notes,
            schedule=ScheduleReport.of(predicted),
            **known,
        )

    @property
    def gap(self) -> float:
        """How far the plan is above the bound, relative to it; infinite without one."""
        bound_ms = self.lower_bound_ms
        return self.critical_path_ms / bound_ms - 1 if bound_ms > 0 else math.inf

    @property
    def fits(self) -> bool:
        """Whether no note says that a rank cannot run it."""
        return not any(note.severity == "error" for note in self.notes)

    @property
    def num_split(self) -> int:
        """Tables split by columns, by rows or both."""
        return sum(t.is_split_by_columns or t.is_split_by_rows for t in self.tables)

    @property
    def num_split_by_columns(self) -> int:
        """Tables split by columns, and maybe by rows too."""
        return sum(t.is_split_by_columns for t in self.tables)

    @property
    def worst_ms(self) -> dict[str, float]:
        """Phase -> what it takes on its slowest rank."""
        return {p: max(getattr(r.costs, p) for r in self.ranks) for p in PHASES}

    @property
    def fullest(self) -> RankReport:
        """The rank with the most memory in use."""
        return max(self.ranks, key=lambda rank: rank.used_bytes)

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
        kind = "the ensemble's nets differ by up to"
        if self.basis is not None and self.basis.estimate_error is not None:
            kind = "the estimate of kernels has a standard deviation of"
        return f"{kind} {self.uncertainty:.1%} on a rank" if self.uncertainty else ""

    @property
    def facts(self) -> list[str]:
        """What costs are made of, in sentences without a full stop."""
        facts = [
            self.bottleneck,
            f"compute: {self.compute_source}; collectives: {self.comms_source}",
            self.spread,
            self.weight_sync,
            self.schedule,
            self.fallback and f"TorchRec's own plan was taken: {self.fallback}",
        ]
        return [str(fact) for fact in facts if fact]

    def __str__(self) -> str:
        """Return the report as text."""
        parts: list[Iterable[str]] = [_head_lines(self), _rank_lines(self)]
        if self.tables:
            parts.append(_table_lines(self))
        if self.splits:
            parts.append(["Tables split by columns, and why:", *_split_lines(self)])
        if self.notes:
            parts.append(["Notes:", *note_lines(self.notes)])
        return "\n\n".join(map("\n".join, parts))

    def page(self) -> tuple[str, dict[str, Any]]:
        """See `HtmlReport`."""
        return plan_page(self, 0), {"plans": [plan_data(self, "")], "moves": []}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        data = to_fields(self)
        for fields, held in zip(data["tables"], self.tables, strict=True):
            for name in ("num_shards", "ranks", "used_bytes", "path_ms"):
                fields[name] = getattr(held, name)
        data |= {"gap": self.gap, "num_split": self.num_split}
        if self.basis is not None:
            data["basis"]["assumptions"] = list(self.basis.assumptions)
        return data


def _head_lines(report: PlanReport) -> Iterator[str]:
    head = f"{report.num_tables} tables on {len(report.ranks)} ranks, {report.layout}"
    if report.num_evaluated:
        head += f"; {report.num_evaluated:,} rank sets evaluated in "
        head += f"{report.search_seconds:.1f} s"
    yield head
    if math.isnan(report.critical_path_ms):
        yield "critical path not known"
        return
    yield f"critical path {report.critical_path_ms:.3f} ms, {report.bound}"
    yield from report.facts
    if report.basis is not None:
        yield from report.basis.lines()


def _rank_lines(report: PlanReport) -> Iterator[str]:
    """Phases of each rank; a star marks the slowest of a column."""
    worst = report.worst_ms
    limited = any(r.memory_bytes is not None for r in report.ranks)
    limit = ["of GiB"] * limited
    rows = [["rank", "shards", "columns", "GiB", *limit, *PHASES, "[ms]"]]
    for rank in _shown_ranks(report):
        counts = str(rank.rank), str(rank.num_shards), f"{rank.columns:,}"
        memory = [gib(rank.used_bytes), gib(rank.memory_bytes)][: 1 + limited]
        phases = (
            f"{ms:.3f}{'*' if 0 < worst[p] == ms else ' '}"
            for p, ms in rank.costs.to_json().items()
        )
        rows.append([*counts, *memory, *phases, ""])
    yield from table(rows)
    if len(report.ranks) > MAX_RANKS:
        yield (
            f"... of {len(report.ranks)} ranks, those that are slowest and least loaded"
        )


def _shown_ranks(report: PlanReport) -> list[RankReport]:
    """Return the ranks to show one by one: see `MAX_RANKS`."""
    ranks, worst = report.ranks, report.worst_ms.items()
    if len(ranks) <= MAX_RANKS:
        return [*ranks]
    by_load = sorted(ranks, key=lambda r: sum(r.costs.to_json().values()))
    slowest = (next(r for r in ranks if getattr(r.costs, p) == ms) for p, ms in worst)
    shown = {r.rank for r in (*slowest, *by_load[:2], *by_load[-6:])}
    return [r for r in ranks if r.rank in shown]


def _table_lines(report: PlanReport) -> Iterator[str]:
    known = any(t.path_ms for t in report.tables)
    first = " part of the critical path first [ms, GiB]" if known else " first [GiB]"
    yield f"Tables, the largest{first}:"
    rows = [
        (
            f"{t.path_ms:.3f}" if known else "",
            gib(t.used_bytes),
            f"{t.table} ({t.num_embeddings:,} x {t.embedding_dim}): {t.place}"
            + (f"; {t.host}" if t.host is not None else ""),
        )
        for t in report.tables
    ]
    yield from most(table(rows), MAX_TABLES)


def _split_lines(report: PlanReport) -> Iterator[str]:
    for split in report.splits:
        shards = ", ".join(f"{width} on rank {rank}" for width, rank in split.shards)
        yield f"{split.table}: {shards}\n    {split.reason(report.critical_path_ms)}"
    if report.splits and (more := report.num_split_by_columns - len(report.splits)):
        yield f"... and {more:,} more"


def plan_page(report: PlanReport, number: int) -> str:
    """Lay out one of a page's plans.

    Args:
        report: Of the plan.
        number: The plan's place in the page's data.
    """
    path_ms, full = report.critical_path_ms, report.fullest
    room = f"of {gib(full.memory_bytes)} GiB, " if full.memory_bytes else ""
    path = "not known" if math.isnan(path_ms) else f"{path_ms:.3f} ms"
    where = f"on {len(report.ranks)} ranks, {report.layout}"
    cards = "".join(
        f"<div><span>{title}</span><b>{value}</b><span>{more}</span></div>"
        for title, value, more in (
            ("critical path, predicted", path, report.bound),
            ("tables", f"{report.num_tables:,}", where),
            ("fullest rank", f"{gib(full.used_bytes)} GiB", f"{room}rank {full.rank}"),
        )
    )
    basis = report.basis.lines(with_sources=True) if report.basis else []
    return f"""<div class='cards'>{cards}</div>
{paragraphs(report.facts)}
<div class='box'><h2>Critical path</h2>{view("path", number)}
<h2>What each rank does in an iteration</h2>
{view("legend")}{view("phases", number)}
<h2>Memory of each rank</h2>
{view("memory", number)}</div>
<h2>Tables</h2>
{view("tables", number)}
<h2>Ranks</h2>
<p class='note'>Milliseconds; the slowest rank of a phase stands out.</p>
{view("ranks", number)}
{bullets("Tables split by columns, and why", [*_split_lines(report)])}
{bullets("What the costs rest on", basis)}
{note_list(report.notes)}
"""


def plan_data(report: PlanReport, name: str) -> dict[str, Any]:
    """Return what `page.js` draws of a plan, under the name that the page gives it."""
    return {
        "name": name,
        "path_ms": report.critical_path_ms,
        "bound_ms": report.lower_bound_ms,
        "bound_is_proven": report.bound_is_proven,
        "ranks": [dataclasses.astuple(rank) for rank in report.ranks],
        "tables": [
            [*dataclasses.astuple(t)[:-1], sentence(str(t.host)) if t.host else ""]
            for t in report.tables
        ],
    }
