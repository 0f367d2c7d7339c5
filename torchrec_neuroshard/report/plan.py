"""The report of one plan: time and memory of each rank, and why tables are split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from torchrec_neuroshard.costs.passes import COLLECTIVES, PASSES
from torchrec_neuroshard.costs.placement_rules import listed
from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.notes import SEVERITIES, Note
from torchrec_neuroshard.report.heat_map import heat_map
from torchrec_neuroshard.report.page import Report
from torchrec_neuroshard.report.parts import (
    MEMORY_PARTS,
    Bottleneck,
    LengthReport,
    PlanBasis,
    RankReport,
    ScheduleReport,
    SplitReport,
    TableReport,
    WeightSync,
)
from torchrec_neuroshard.report.sections import Grid, GridColumn, Section
from torchrec_neuroshard.report.timeline import Timeline
from torchrec_neuroshard.search import SearchResult

LOOSE_GAP = 1.0
"""With a larger gap the bound is too low to judge the plan."""
MAX_BARS = 8
"""Ranks in the text's chart; of more ranks, the slowest."""
MAX_SPLITS = 3
"""Column splits that the brief text explains."""

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
    ("host memory", "text", lambda table: table.host and str(table.host)),
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
    """Costs, bottleneck and placement of a plan; `print` shows the answer first."""

    critical_path_ms: float
    """The iteration if every rank takes its mean time."""
    spread_ms: float = 0.0
    """Time that the iteration is expected to take longer, since the slowest of nearly
    equal ranks takes longer than its mean; see `costs.expected`. Unequal lengths of
    samples count, too."""
    lengths: LengthReport | None = None
    """What unequal lengths of samples change; None: no profile tells."""
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    """Phases on the critical path, which they add up to; empty: unknown."""
    lower_bound_ms: float = 0.0
    bound_is_proven: bool = False
    """True: no plan can be faster than the bound. False: the bound is an estimate."""
    uncertainty: float = 0.0
    """See `simulator.PredictedCosts`."""
    compute_source: str = "unknown"
    comms_source: str = "unknown"
    compute_errors: tuple[float, float] | None = None
    """Relative errors of forward and backward kernels; None: unknown."""
    comms_error: float | None = None
    """Relative error of collectives; None: unknown."""
    search_seconds: float = 0.0
    num_evaluated: int = 0
    num_tables: int
    ranks: tuple[RankReport, ...]
    splits: tuple[SplitReport, ...] = ()
    """Column splits, the most useful first; at most `explain.MAX_SPLITS`."""
    tables: tuple[TableReport, ...]
    """All tables, the largest part of the critical path first."""
    bottleneck: Bottleneck | None = None
    """None if costs are unknown or 0."""
    fallback: str | None = None
    notes: tuple[Note, ...]
    """Facts worth knowing about the plan."""
    basis: PlanBasis | None = None
    """None: only a search is reported."""
    weight_sync: WeightSync | None = None
    """None: one sharding group of all ranks."""
    schedule: ScheduleReport | None = None
    """None: no pipeline and no dense layers were given."""
    timeline: Timeline | None = None
    """None: times are unknown, or the report is of an earlier version."""

    @classmethod
    def of(
        cls,
        result: SearchResult,
        tables: Sequence[TableReport],
        ranks: tuple[RankReport, ...],
        **known: Any,
    ) -> PlanReport:
        """Return the report of a search's plan, without `splits` (see `explain`).

        Args:
            result: The search's result, or `NeuroShardPlanner.last_result`.
            tables: All tables.
            ranks: All ranks.
            known: More fields: `basis`, `weight_sync`, `bottleneck`, `lengths`.
        """
        predicted = result.predicted
        return cls(
            critical_path_ms=predicted.critical_path_ms,
            spread_ms=predicted.expected_ms - predicted.critical_path_ms,
            parts_ms=predicted.parts_ms,
            lower_bound_ms=result.lower_bound_ms,
            bound_is_proven=result.bound_is_proven,
            uncertainty=predicted.uncertainty,
            compute_source=predicted.compute_source,
            comms_source=predicted.comms_source,
            compute_errors=predicted.compute_errors,
            comms_error=predicted.comms_error,
            search_seconds=result.search_seconds,
            num_evaluated=result.num_evaluated,
            num_tables=len(tables),
            ranks=ranks,
            tables=tuple(sorted(tables, key=lambda t: (-t.path_ms, -t.used_bytes))),
            fallback=result.fallback,
            notes=result.notes,
            schedule=ScheduleReport.of(predicted),
            timeline=Timeline.of(predicted),
            **known,
        )

    @property
    def gap(self) -> float:
        """Distance of the critical path to the lower bound, relative to the bound.

        It is infinite without a bound. The bound is without a spread, too.
        """
        bound_ms = self.lower_bound_ms
        return self.critical_path_ms / bound_ms - 1 if bound_ms > 0 else math.inf

    @property
    def fits(self) -> bool:
        """Whether every rank can run the plan: no note is an error."""
        return not any(note.severity == "error" for note in self.notes)

    @property
    def is_costed(self) -> bool:
        """Whether the plan's costs are known."""
        return not math.isnan(self.critical_path_ms)

    @property
    def sync_ms(self) -> float:
        """Averaging between replicas per iteration; 0 without replicas."""
        return self.weight_sync.ms_per_iteration if self.weight_sync else 0.0

    @property
    def iteration_ms(self) -> float:
        """Expected iteration: critical path, spread, and averaging between replicas."""
        return self.critical_path_ms + self.spread_ms + self.sync_ms

    @property
    def num_samples(self) -> int | None:
        """Samples per iteration over all ranks and replicas; None: unknown."""
        if self.basis is None:
            return None
        num_replicas = self.weight_sync.num_replicas if self.weight_sync else 1
        return len(self.ranks) * num_replicas * self.basis.batch_size

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second over all ranks and replicas; None: unknown."""
        if self.num_samples is None or not self.iteration_ms > 0:
            return None
        return self.num_samples / self.iteration_ms * 1e3

    @property
    def rank_samples_per_s(self) -> float | None:
        """Samples per second of one rank; None: unknown."""
        if self.basis is None or not self.iteration_ms > 0:
            return None
        return self.basis.batch_size / self.iteration_ms * 1e3

    @property
    def num_split(self) -> int:
        """Number of tables split by columns, by rows or both."""
        return sum(table.is_split for table in self.tables)

    @property
    def worst_ms(self) -> dict[str, float]:
        """Phase -> its time on its slowest rank."""
        return {p: max(getattr(r.costs, p) for r in self.ranks) for p in PHASES}

    @property
    def compute_error(self) -> float | None:
        """Relative error of the kernels on the critical path; None: unknown."""
        if self.compute_errors is None:
            return None
        both_ms = [self.parts_ms.get(phase, 0.0) for phase in PASSES]
        if not sum(both_ms) > 0:
            return 0.0
        return float(np.average(self.compute_errors, weights=both_ms))

    @property
    def error(self) -> float | None:
        """Relative error of the iteration; None: unknown.

        It follows from the errors of kernels and collectives, as if these were
        independent. What else happens in a training loop is not in it.
        """
        if self.compute_error is None or not self.iteration_ms > 0:
            return None
        exchanged = sum(self.parts_ms.get(name, 0.0) for name in COLLECTIVES)
        if exchanged > 0 and self.comms_error is None:
            return None
        computed = sum(self.parts_ms.get(name, 0.0) for name in PASSES)
        wrong_ms = math.hypot(
            computed * self.compute_error, exchanged * (self.comms_error or 0.0)
        )
        return wrong_ms / self.iteration_ms

    @property
    def sources(self) -> str:
        """Where times come from and how large their errors are, in words."""
        return (
            f"compute: {self.compute_source}, {_off(self.compute_error)}; collectives: "
            f"{self.comms_source}, {_off(self.comms_error)}"
        )

    @property
    def fullest(self) -> RankReport:
        """The rank with the most memory in use."""
        return max(self.ranks, key=lambda rank: rank.used_bytes)

    def heading(self) -> list[tuple[str, str]]:
        """See `Report`: card, ranks, batch, iteration and samples per second."""
        num_ranks, per_node = len(self.ranks), self._ranks_per_node
        nodes = ""
        if per_node < num_ranks:
            nodes = f" ({num_ranks // per_node:,} nodes of {per_node:,})"
        facts = [("Ranks", f"{num_ranks:,}{nodes}")]
        if self.basis is not None:
            batch = f"{self.basis.batch_size:,} samples per rank"
            card = self.basis.card or "unnamed"
            facts = [("Card", card), *facts, ("Batch", batch)]
        if self.is_costed:
            facts.append(("Iteration", self._iteration_text))
        if rate := self.rate:
            each = f" ({_short(self.rank_samples_per_s)} per rank)"
            facts.append(("Samples per second", rate + each))
        return facts

    def sections(self) -> Sequence[Section]:
        """See `Report`."""
        splits = [split.line(self.critical_path_ms) for split in self.splits]
        notes = sorted(self.notes, key=lambda n: -SEVERITIES.index(n.severity))
        num_warnings = sum(note.severity != "info" for note in notes)
        tables = Grid("tables", self.tables, _TABLE_COLUMNS)
        pairs = [(t, s) for t in self.tables for s in t.shards]
        shards = Grid("shards", pairs, _SHARD_COLUMNS, in_text=False)
        basis = self.basis.lines() if self.basis else []
        path, charts = [], [self._memory_chart()]
        heat = heat_map(self.tables, len(self.ranks), self._ranks_per_node)
        if self.is_costed:
            path = [self._iteration(self.timeline)] if self.timeline else []
            charts = [self.phase_chart, *charts]
        return [
            Section(lines=self._answer(), details=self._facts()),
            *path,
            Section(title="ranks", bars=self._bars(), charts=charts),
            Section(title="tables on ranks", charts=[heat] if heat["views"] else []),
            Section(title="notes", bullets=notes, brief=num_warnings),
            Section(title="ranks [ms]", grid=Grid("ranks", self.ranks, _RANK_COLUMNS)),
            Section(title="tables [ms]", grid=tables),
            Section(title="shards [ms]", grid=shards),
            Section(title="column splits", bullets=splits, brief=MAX_SPLITS),
            Section(title="what the costs rest on", bullets=basis),
        ]

    @property
    def phase_chart(self) -> dict[str, Any]:
        """The page's chart of each rank's phases."""
        rows = [[r.rank, *r.costs.to_json().values()] for r in self.ranks]
        return self._bar_chart("ms", PHASES, rows)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        data = to_fields(self)
        for fields, held in zip(data["tables"], self.tables, strict=True):
            for name in ("num_shards", "ranks", "used_bytes", "path_ms"):
                fields[name] = getattr(held, name)
        shown = ("iteration_ms", "error", "gap", "num_split", "samples_per_s")
        return data | {name: getattr(self, name) for name in shown}

    def _answer(self) -> list[str]:
        """Return time, bottleneck, overlaps and memory, in sentences."""
        num_ranks, full = len(self.ranks), self.fullest
        placed = (
            f"{self.num_tables:,} tables on {num_ranks:,} rank{'s' * (num_ranks > 1)}, "
            f"{self.num_split:,} of them split; rank {full.rank} is the fullest: "
            f"{full.memory}"
        )
        if self.lengths is not None:
            placed += " with the longest of 100 batches"
        if not self.is_costed:
            return ["iteration unknown", placed]
        iteration = f"iteration {self._iteration_text}"
        if rate := self.rate:
            iteration += f": {rate} samples per second"
            if num_ranks > 1:
                iteration += f", {_short(self.rank_samples_per_s)} per rank"
            if self.schedule is None or not self.schedule.dense_ms:
                iteration += ", dense layers not counted"
        path = f"critical path {self.critical_path_ms:.3f} ms"
        if self.lower_bound_ms > 0:
            path += f", {self._bound()}"
        elif round(self.iteration_ms - self.critical_path_ms, 3) <= 0:
            path = ""
        overlap = self.timeline if self.timeline and self.timeline.overlaps else None
        source = f"predicted; {self.sources}"
        slowest = self.bottleneck and self.bottleneck.line(self.iteration_ms)
        facts = iteration, path, slowest, overlap, placed, source
        return [str(fact) for fact in facts if fact]

    def _facts(self) -> list[str]:
        """Return what binds, spread, uncertainty and so on, in sentences."""
        if not self.is_costed:
            return []
        kind = "the cost model's nets differ by"
        if self.basis is not None and self.basis.estimate_error is not None:
            kind = "estimated kernel times have a standard deviation of"
        uncertainty = self.uncertainty and f"{kind} {self.uncertainty:.1%} per rank"
        chain = None if self.timeline and self.timeline.overlaps else self.timeline
        spread = self._spread, self.lengths
        facts = chain, *spread, uncertainty, self.weight_sync, self.schedule
        return [str(fact) for fact in facts if fact]

    def _bars(self) -> list[str]:
        """Return a line of at most 80 columns per rank, the slowest of many first."""

        def length(rank: RankReport) -> float:
            return rank.total_ms if self.is_costed else rank.used_bytes

        shown = list(self.ranks)
        if len(shown) > MAX_BARS:
            shown = sorted(shown, key=length, reverse=True)[:MAX_BARS]
        columns = [[f"rank {r.rank}" for r in shown], [r.memory for r in shown]]
        if self.is_costed:
            columns.insert(1, [f"{r.total_ms:.3f} ms" for r in shown])
        widths = [max(map(len, texts)) for texts in columns]
        most = max(map(length, shown)) or 1.0
        width = min(40, 80 - sum(widths) - 2 * len(widths))
        lines = []
        for rank, *texts in zip(shown, *columns, strict=True):
            whole = round(width * length(rank) / most)
            kernels = round(width * rank.kernels_ms / most) if self.is_costed else whole
            bar = "#" * kernels + "-" * (whole - kernels)
            name, *sizes = (f"{t:>{w}}" for t, w in zip(texts, widths, strict=True))
            lines.append("  ".join([name, f"{bar:{width}}", *sizes]))
        if left := len(self.ranks) - len(shown):
            lines.append(f"and {left:,} more rank{'s' * (left > 1)}")
        lines.append("# kernels, - collectives" if self.is_costed else "# memory")
        return lines

    def _bound(self) -> str:
        """Return the bound and the plan's distance to it, in words."""
        kind = "lower" if self.bound_is_proven else "estimated"
        known = f"{kind} bound {self.lower_bound_ms:.3f} ms"
        if self.gap > LOOSE_GAP:
            return f"{known}, too low to judge the plan by"
        return f"{known}, gap {self.gap:.1%}"

    @property
    def _iteration_text(self) -> str:
        """The iteration with its error."""
        error = "" if self.error is None else f" {_off(self.error)}"
        return f"{self.iteration_ms:.3f} ms{error}"

    @property
    def _spread(self) -> str:
        """What the spread adds, in a sentence without a full stop; empty: nothing."""
        if round(self.spread_ms, 3) <= 0:
            return ""
        unequal = " and of ranks with longer samples" if self.lengths else ""
        return (
            f"the slowest of nearly equal ranks{unequal} is expected to take longer "
            f"than its mean, which adds {self.spread_ms:.3f} ms to the critical path"
        )

    def _iteration(self, timeline: Timeline) -> Section:
        lines = ["outlined: what binds; pale: work of another batch", timeline.drawn]
        if self.lower_bound_ms > 0:
            lines.append(f"dashed: {self._bound()}")
        if spread := self._spread:
            lines.append(f"not drawn: {spread}")
        if self.sync_ms > 0:
            lines.append(f"averaging between replicas adds {self.sync_ms:.3f} ms")
        return Section(
            title="one iteration",
            lines=[line for line in lines if line],
            charts=[timeline.chart(self.lower_bound_ms)],
        )

    def _memory_chart(self) -> dict[str, Any]:
        """Return the page's chart of what fills each rank, what is free and reserved.

        Memory that is reserved for other purposes lies above a rank's limit.
        """
        known = [r.parts_bytes for r in self.ranks]
        parts = {
            part: label
            for part, label in MEMORY_PARTS.items()
            if any(bytes_of.get(part) for bytes_of in known)
        }
        if set(parts) <= {"unsplit"} or not all(known):
            parts = {}
        rows, limits = [], []
        for r in self.ranks:
            limit = r.memory_bytes or 0
            free = max(0.0, limit - r.used_bytes)
            reserved = max(0.0, (r.device_bytes or 0) - max(limit, r.used_bytes))
            used = [r.parts_bytes.get(p, 0.0) for p in parts] or [r.used_bytes]
            rows.append([r.rank, *(n / 2**30 for n in (*used, free, reserved))])
            limits.append(limit / 2**30 if reserved else None)
        names = (*(parts or ("used",)), "free", "reserved")
        if not any(limits):
            names, rows = names[:-1], [row[:-1] for row in rows]
        chart = self._bar_chart("GiB", names, rows)
        labels = {**parts, "reserved": "reserved, above the dashed limit"}
        return {**chart, "labels": labels, "limits": limits}

    def _bar_chart(
        self, unit: str, names: tuple[str, ...], rows: list[list[float]]
    ) -> dict[str, Any]:
        """Return a chart of a bar per rank.

        Args:
            unit: The unit of all values.
            names: What the parts of a bar are.
            rows: For each rank its number and the values of its parts.
        """
        shown = {"unit": unit, "names": names, "rows": rows}
        return {"kind": "bars", **shown, "ranks_per_node": self._ranks_per_node}

    @property
    def _ranks_per_node(self) -> int:
        """Ranks in a node; all ranks if that is unknown."""
        known = self.basis.ranks_per_node if self.basis else None
        return known or len(self.ranks)

    @property
    def time(self) -> str:
        """Milliseconds of an iteration and, if known, samples per second."""
        rate = f" ({self.rate} samples per second)" if self.rate else ""
        return f"{self.iteration_ms:.3f} ms per iteration{rate}"

    @property
    def rate(self) -> str | None:
        """Samples per second to three digits; None: unknown."""
        return _short(self.samples_per_s)


def _short(rate: float | None) -> str | None:
    return f"{float(f'{rate:.3g}'):,.0f}" if rate else None


def _off(error: float | None) -> str:
    return "error unknown" if error is None else f"+-{error:.0%}"
