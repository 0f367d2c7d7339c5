"""A plan's report: what it costs on each rank, and what its splits are good for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torchrec_neuroshard.costs.placement_rules import listed
from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report.page import Report
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
from torchrec_neuroshard.report.sections import Grid, GridColumn, Section
from torchrec_neuroshard.search import SearchResult

__all__ = ["PlanReport"]

LOOSE_GAP = 1.0
"""A bound this far below the plan says nothing about it."""


_RANK_COLUMNS: tuple[GridColumn, ...] = (
    ("rank", "count", lambda rank: rank.rank),
    ("shards", "count", lambda rank: rank.num_shards),
    ("columns", "count", lambda rank: rank.columns),
    ("GiB", "gib", lambda rank: rank.used_bytes),
    ("of GiB", "gib", lambda rank: rank.memory_bytes),
    ("all", "ms", lambda rank: rank.total_ms),
    *((phase, "peak", attrgetter(f"costs.{phase}")) for phase in PHASES),
)
_TABLE_COLUMNS: tuple[GridColumn, ...] = (
    ("path", "ms", lambda table: table.path_ms),
    ("kernels", "ms", lambda table: table.slowest_ms("compute_ms")),
    ("collectives", "ms", lambda table: table.slowest_ms("comms_ms")),
    ("GiB", "gib", lambda table: table.used_bytes),
    ("table", "text", lambda table: table.table),
    ("rows", "count", lambda table: table.num_embeddings),
    ("columns", "count", lambda table: table.embedding_dim),
    ("sharding", "text", lambda table: table.sharding_type),
    ("kernel", "text", lambda table: table.compute_kernel),
    ("shards", "count", lambda table: table.num_shards),
    ("on", "text", lambda table: listed(table.ranks)),
    ("in the host's memory", "text", lambda table: table.host and str(table.host)),
)
_SHARD_COLUMNS: tuple[GridColumn, ...] = (
    ("path", "ms", lambda pair: pair[1].path_ms),
    ("kernels", "ms", lambda pair: pair[1].compute_ms),
    ("collectives", "ms", lambda pair: pair[1].comms_ms),
    ("GiB", "gib", lambda pair: pair[1].used_bytes),
    ("table", "text", lambda pair: pair[0].table),
    ("rank", "count", lambda pair: pair[1].rank),
    ("rows", "count", lambda pair: pair[1].num_embeddings),
    ("columns", "count", lambda pair: pair[1].embedding_dim),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport(Report):
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
    """Tables split by columns, costliest in one piece first; at most `MAX_SPLITS`."""
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
    def is_costed(self) -> bool:
        """Whether its costs are known."""
        return not math.isnan(self.critical_path_ms)

    @property
    def num_split(self) -> int:
        """Tables split by columns, by rows or both."""
        return sum(table.is_split for table in self.tables)

    @property
    def worst_ms(self) -> dict[str, float]:
        """Phase -> what it takes on its slowest rank."""
        return {p: max(getattr(r.costs, p) for r in self.ranks) for p in PHASES}

    @property
    def fullest(self) -> RankReport:
        """The rank with the most memory in use."""
        return max(self.ranks, key=lambda rank: rank.used_bytes)

    def sections(self) -> Sequence[Section]:
        """See `Report`."""
        worst = self.worst_ms.items()

        def setting_the_path(rank: RankReport) -> tuple[int, float]:
            num_set = sum(getattr(rank.costs, phase) == ms for phase, ms in worst)
            return -num_set, -rank.total_ms

        why = [split.line(self.critical_path_ms) for split in self.splits]
        splits = "splits by columns, costliest in one piece first"
        ranks = Grid("ranks", self.ranks, _RANK_COLUMNS, first=setting_the_path)
        tables = Grid("tables", self.tables, _TABLE_COLUMNS)
        pairs = [(t, s) for t in self.tables for s in t.shards]
        shards = Grid("shards", pairs, _SHARD_COLUMNS, limit=0)
        basis = self.basis.lines() if self.basis else []
        path, charts = [], [self._memory_chart()]
        if self.is_costed:
            path, charts = [self._path_section()], [self.phase_chart, *charts]
        return [
            Section(lines=self._facts()),
            *path,
            Section(title="each rank", charts=charts),
            Section(title="ranks [ms]", grid=ranks),
            Section(title="tables [ms]", grid=tables),
            Section(title="shards [ms]", grid=shards),
            Section(title=splits, bullets=why),
            Section(title="what the costs rest on", bullets=basis),
            Section(title="notes", bullets=self.notes),
        ]

    @property
    def phase_chart(self) -> dict[str, Any]:
        """What the page draws of each rank's phases."""
        rows = [[r.rank, *r.costs.to_json().values()] for r in self.ranks]
        return {"kind": "bars", "unit": "ms", "names": PHASES, "rows": rows}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        data = to_fields(self)
        for fields, held in zip(data["tables"], self.tables, strict=True):
            for name in ("num_shards", "ranks", "used_bytes", "path_ms"):
                fields[name] = getattr(held, name)
        return data | {"gap": self.gap, "num_split": self.num_split}

    def _facts(self) -> list[str]:
        """What costs are, and what they are made of, in sentences."""
        place = f"{self.num_tables:,} tables on {len(self.ranks)} ranks"
        facts = [f"{place}, {self.num_split:,} of them split"]
        full = self.fullest
        room = full.memory_bytes and f" of {format_bytes(full.memory_bytes)}"
        facts.append(
            f"fullest: rank {full.rank}, {format_bytes(full.used_bytes)}{room or ''}"
        )
        if not self.is_costed:
            return ["critical path not known", *facts]
        kind = "the ensemble's nets differ by up to"
        if self.basis is not None and self.basis.estimate_error is not None:
            kind = "the estimate of kernels has a standard deviation of"
        more = [
            self.bottleneck,
            f"compute: {self.compute_source}; collectives: {self.comms_source}",
            self.uncertainty and f"{kind} {self.uncertainty:.1%} on a rank",
            self.weight_sync,
            self.schedule,
        ]
        path = f"critical path {self.critical_path_ms:.3f} ms, {self._bound()}"
        return [path, *facts, *(str(fact) for fact in more if fact)]

    def _bound(self) -> str:
        """How far the plan may be from the best one, in words."""
        if not self.lower_bound_ms > 0:
            return "bound not computed"
        kind = "lower" if self.bound_is_proven else "estimated"
        known = f"{kind} bound {self.lower_bound_ms:.3f} ms"
        if self.gap > LOOSE_GAP:
            return f"{known}, too low to judge the plan by"
        return f"{known}, gap {self.gap:.1%}"

    def _path_section(self) -> Section:
        lines = ["each phase is as long as on its slowest rank: the others wait for it"]
        if self.lower_bound_ms > 0:
            lines.append(f"dashed: the {self._bound()}")
        worst = self.worst_ms
        total = sum(worst.values())
        if abs(total - self.critical_path_ms) > 1e-3 * total:
            lines.append(
                f"together {total:.3f} ms; by stages, other layers and what runs at "
                f"the same time, the path is {self.critical_path_ms:.3f} ms"
            )
        chart = {"kind": "path", "phases": worst, "bound_ms": self.lower_bound_ms}
        return Section(title="critical path", lines=lines, charts=[chart])

    def _memory_chart(self) -> dict[str, Any]:
        rows = []
        for r in self.ranks:
            free = max(0.0, (r.memory_bytes or 0) - r.used_bytes)
            rows.append([r.rank, r.used_bytes / 2**30, free / 2**30])
        names = ("used", "free")
        return {"kind": "bars", "unit": "GiB", "names": names, "rows": rows}
