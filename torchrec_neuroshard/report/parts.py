"""The parts of a plan's report. Each describes itself in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchrec_neuroshard.costs.passes import TIMED
from torchrec_neuroshard.costs.placement_rules import listed, quoted
from torchrec_neuroshard.costs.schedules import SEQUENTIAL
from torchrec_neuroshard.costs.simulator import PredictedCosts, RankCosts
from torchrec_neuroshard.costs.task import format_bytes

MEMORY_PARTS: Mapping[str, str] = {
    "weights": "weights",
    "optimizer": "the optimizer's state",
    "caches": "cached rows",
    "id_maps": "maps of ids to rows",
    "step": "inputs, outputs and gradients of a step",
    "unsplit": "not told apart",
}
"""What fills a rank's memory -> in words. The inputs, outputs and gradients of a step
peak together, so they have one figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFigure:
    """A figure of the devices that the plan is for."""

    name: str
    value: float
    unit: str
    basis: str
    """"given", "this machine", "TorchRec's default" or a basis of `cards.Figure`."""
    source: str = ""
    """Where the figure is published; empty if the basis says it."""

    def __str__(self) -> str:
        """Return the value with its unit."""
        return f"{self.value:,.4g} {self.unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBasis:
    """The devices and inputs that a plan's costs are predicted for."""

    card: str | None
    """The device of every rank; None: unknown."""
    figures: tuple[DeviceFigure, ...]
    batch_size: int
    """Samples per rank."""
    batch_size_is_default: bool
    """Whether the caller gave no batch size and TorchRec's default was used."""
    ids_per_sample: tuple[tuple[str, int], ...]
    """(source, number of features): where ids per sample and repeats come from."""
    assumed_features: tuple[str, ...]
    """Features without a description, planned with TorchRec's 1 id per sample."""
    estimate_error: str | None = None
    """Error of estimated kernel times, in words; None: kernels were measured."""
    sequence_error: str | None = None
    """Error of lookups of sequences, in words; None: measured, or no sequences."""
    ranks_per_node: int | None = None
    """None: unknown."""

    def lines(self) -> list[str]:
        """Return sentences without a full stop, one for each source of costs."""
        card = self.card or "unnamed devices"
        default = " (TorchRec's default)" * self.batch_size_is_default
        lines = [f"planned for {card}, {self.batch_size:,} samples per rank{default}"]
        if self.estimate_error is not None:
            lines.append(f"error of estimated kernel times: {self.estimate_error}")
        if self.sequence_error is not None:
            lines.append(self.sequence_error)
        for f in self.figures:
            source = f": {f.source}" if f.source else ""
            lines.append(f"{f.name} {f} ({f.basis}{source})")
        ids = (
            f"{source} ({count} feature{'s' * (count != 1)})"
            for source, count in self.ids_per_sample
        )
        lines.append(f"ids per sample: {', '.join(ids)}")
        if self.assumed_features:
            names = quoted(self.assumed_features)
            lines.append(f"1 id per sample assumed for {names}")
        return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """The phase that adds most to the critical path, with its rank and table."""

    table: str
    """The table that takes most of `phase_ms`."""
    rank: int
    """The rank that takes most of `phase_ms`."""
    phase: str
    """A name in `simulator.PHASES`."""
    phase_ms: float
    """Time of the phase on the critical path, over all stages."""
    table_ms: float
    """The table's part of `phase_ms`."""
    stage: str = ""
    """The only stage that `phase_ms` counts, in plan files of version 0.2."""

    def line(self, iteration_ms: float) -> str:
        """Return the phase's part of an iteration, in a sentence without a full stop.

        Args:
            iteration_ms: The whole iteration.
        """
        stage = f" of {self.stage}" if self.stage else ""
        most = f"{self.table} is most of it"
        if self.table_ms <= self.phase_ms / 2:
            most = f"its largest table, {self.table}, takes {self.table_ms:.3f}"
        return (
            f"slowest phase: {self.phase}{stage}, {self.phase_ms:.3f} of "
            f"{iteration_ms:.3f} ms, rank {self.rank}; {most}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthReport:
    """What unequal lengths of samples change in an iteration; see `costs.lengths`."""

    added_ms: float
    """Expected time beyond that of batches with mean lengths."""
    p95_ms: float
    """Iteration that 95 % of the batches do not exceed."""
    evened_ms: float
    """Time that every plan loses because ranks' samples differ. A shuffler that gives
    all ranks equally long samples saves it."""
    expected_ms: float

    @classmethod
    def of(cls, predicted: PredictedCosts) -> LengthReport | None:
        """Return the report; None if no profile has lengths that differ."""
        if predicted.lengths is None:
            return None
        drawn_D = predicted.drawn_ms()
        expected_ms = float(drawn_D.mean())
        equal_ms = float(predicted.drawn_ms(equal=True).mean())
        evened_ms = expected_ms - float(predicted.drawn_ms(even=True).mean())
        return cls(
            added_ms=max(expected_ms - equal_ms, 0.0),
            p95_ms=float(np.quantile(drawn_D, 0.95)),
            evened_ms=max(evened_ms, 0.0),
            expected_ms=expected_ms,
        )

    @property
    def share(self) -> float:
        """Share of the iteration that a balancing shuffler saves."""
        return self.evened_ms / self.expected_ms if self.expected_ms > 0 else 0.0

    def __str__(self) -> str:
        """Return a sentence without a full stop."""
        return (
            f"unequal lengths of samples add {self.added_ms:.3f} ms; 95 % of the "
            f"batches take up to {self.p95_ms:.3f} ms"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSync:
    """The averaging of weights between the replicas of a sharding group."""

    num_replicas: int
    interval: int
    """Iterations between two averages."""
    rank_bytes: float
    """Bytes of weights and optimizer state that the slowest rank averages."""
    sync_ms: float
    """Time of one average."""
    source: str
    """Where the predicted time comes from."""

    @property
    def ms_per_iteration(self) -> float:
        """Mean time that averaging adds to an iteration."""
        return self.sync_ms / self.interval

    def __str__(self) -> str:
        """Return a sentence without a full stop."""
        every = f"{self.interval} iterations" if self.interval > 1 else "iteration"
        return (
            f"weights of {self.num_replicas} replicas are averaged every {every}: "
            f"{format_bytes(self.rank_bytes)} per rank in {self.sync_ms:.3f} ms adds "
            f"{self.ms_per_iteration:.3f} ms per iteration to the critical path "
            f"({self.source})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleReport:
    """How a train pipeline overlaps the plan's phases, as predicted."""

    pipeline_type: str
    dense_ms: float
    """Time of the other layers."""
    phases_ms: Mapping[str, float]
    """Phase -> its time on its slowest rank."""
    hidden_ms: Mapping[str, float]
    """Phase -> the part of that time that overlaps with something longer."""

    @staticmethod
    def of(predicted: PredictedCosts) -> ScheduleReport | None:
        """Describe predicted costs; None without a pipeline and dense layers."""
        schedule, dense = predicted.schedule, predicted.dense
        if schedule is SEQUENTIAL and not dense.total_ms:
            return None
        worst = predicted.phases(schedule).totals_C6[0]
        return ScheduleReport(
            pipeline_type=schedule.name,
            dense_ms=dense.total_ms,
            phases_ms=dict(zip(TIMED, worst.tolist(), strict=True)),
            hidden_ms=predicted.hidden_ms(schedule),
        )

    def __str__(self) -> str:
        """Return a sentence without a full stop."""
        hidden = [
            f"{name} {self.hidden_ms[name]:.3f} of {ms:.3f}"
            for name, ms in self.phases_ms.items()
            if self.hidden_ms[name] > 1e-9
        ]
        return (
            f"pipeline_type '{self.pipeline_type}' with {self.dense_ms:.3f} ms of "
            f"other layers; overlapped [ms]: {', '.join(hidden) or 'nothing'}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """The shards, memory and time of one rank."""

    rank: int
    num_shards: int
    columns: int
    """Sum of its shards' widths."""
    used_bytes: float
    """In the memory of fused tables: the device's, or the host's for CPUs."""
    memory_bytes: int | None
    """Memory available for shards; None: unlimited."""
    device_bytes: int | None = None
    """Memory of the device, of which some may be reserved; None: unknown."""
    parts_bytes: Mapping[str, float] = field(default_factory=dict)
    """Parts of `used_bytes`, by the names in `MEMORY_PARTS`; empty: unknown."""
    costs: RankCosts
    """Sum over all stages [ms]."""

    @property
    def total_ms(self) -> float:
        """Sum of all phases."""
        return sum(self.costs.to_json().values())

    @property
    def kernels_ms(self) -> float:
        """Time of forward and backward kernels."""
        return self.costs.fwd_compute + self.costs.bwd_compute

    @property
    def memory(self) -> str:
        """Memory in use and available, in words."""
        if not self.memory_bytes:
            return format_bytes(self.used_bytes)
        return f"{format_bytes(self.used_bytes)} of {format_bytes(self.memory_bytes)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitReport:
    """The reason for a table's column split."""

    table: str
    shards: tuple[tuple[int, int], ...]
    """(width, rank) of each shard, in column order."""
    whole_bytes: float
    """Memory of the unsplit table."""
    whole_rank: int | None
    """Best rank for the unsplit table; None: no rank has room for it."""
    whole_ms: float | None
    """Critical path with the unsplit table on that rank, all else as planned."""
    compute_change_ms: float
    """Change of the kernels' time on the critical path for the unsplit table."""
    comms_change_ms: float
    """Change of the collectives' time on the critical path."""

    def line(self, planned_ms: float) -> str:
        """Return the table's shards, and the critical path without its split.

        Args:
            planned_ms: The plan's critical path.
        """
        places = [f"{width} on rank {rank}" for width, rank in self.shards]
        said = f"{self.table}: columns {', '.join(places)}"
        if self.whole_ms is None:
            size = format_bytes(self.whole_bytes)
            return f"{said}; unsplit it needs {size}, more than any rank has free"
        change = self.whole_ms / planned_ms - 1 if planned_ms > 0 else 0.0
        verdict = "" if change > 0 else "this split alone does not pay: "
        return (
            f"{said}; {verdict}unsplit on rank {self.whole_rank}, its best rank, the "
            f"critical path would be {self.whole_ms:.3f} ms ({change:+.1%}; kernels "
            f"{self.compute_change_ms:+.3f} ms, collectives "
            f"{self.comms_change_ms:+.3f} ms)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTable:
    """Host memory and time per iteration of a table in host memory."""

    ms_per_iteration: float
    """Time to move rows on its slowest rank; part of its kernels' time."""
    rank_bytes: tuple[tuple[int, float], ...]
    """(rank, bytes of host memory)."""
    load_factor: float | None = None
    """Share of the rows in its cache on the device; None: no cache."""
    missed: float | None = None
    """Share of a batch's distinct rows that are not in the cache."""

    def __str__(self) -> str:
        """Return a sentence without a full stop."""
        cache = "no cache"
        if self.load_factor is not None and self.missed is not None:
            cache = (
                f"cache_load_factor {self.load_factor:.4g}, missing {self.missed:.1%} "
                "of a batch's rows"
            )
        size = format_bytes(sum(size for _, size in self.rank_bytes))
        return (
            f"{size} of host memory, {cache}: {self.ms_per_iteration:.3f} ms per "
            "iteration"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """The rank, size, memory and time of one shard."""

    rank: int
    num_embeddings: int
    """Rows of the shard."""
    embedding_dim: int
    """Columns of the shard."""
    used_bytes: float
    """In the memory of fused tables."""
    compute_ms: float = 0.0
    """Its share of its rank's kernel time per iteration; 0: unknown."""
    comms_ms: float = 0.0
    """Its share of its rank's collectives."""
    path_ms: float = 0.0
    """Its share of the phases in which its rank is the slowest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableReport:
    """The sharding, memory and time of one table."""

    table: str
    sharding_type: str
    compute_kernel: str
    num_embeddings: int
    embedding_dim: int
    shards: tuple[ShardReport, ...]
    """Ordered by rows, then by columns."""
    host: HostTable | None = None
    """None: its rows are on the devices, or their cost is unknown."""

    @property
    def num_shards(self) -> int:
        """Number of its shards."""
        return len(self.shards)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with a shard of the table, ascending."""
        return tuple(sorted({shard.rank for shard in self.shards}))

    @property
    def used_bytes(self) -> float:
        """Memory of all its shards, in the memory of fused tables."""
        return sum(shard.used_bytes for shard in self.shards)

    @property
    def path_ms(self) -> float:
        """Its part of the critical path; 0 if its ranks are never the slowest."""
        return sum(shard.path_ms for shard in self.shards)

    def slowest_ms(self, name: str) -> float:
        """Return the sum of this field over its shards on the slowest rank."""
        by_rank: dict[int, float] = defaultdict(float)
        for shard in self.shards:
            by_rank[shard.rank] += getattr(shard, name)
        return max(by_rank.values(), default=0.0)

    @property
    def is_split(self) -> bool:
        """Whether a shard holds only some of the rows or columns."""
        whole = self.num_embeddings, self.embedding_dim
        return any((s.num_embeddings, s.embedding_dim) != whole for s in self.shards)

    @property
    def place(self) -> str:
        """Sharding type, kernel, number of shards and ranks, in words."""
        kernel = "" if self.compute_kernel == "fused" else f" ({self.compute_kernel})"
        shards = f"{self.num_shards} shards on " if self.num_shards > 1 else ""
        return f"{self.sharding_type}{kernel}, {shards}{listed(self.ranks)}"


def rank_reports(
    tables: Iterable[TableReport],
    costs: Sequence[RankCosts],
    memory_bytes: Sequence[int | None],
    device_bytes: Sequence[int] | None = None,
    parts_bytes: Sequence[Mapping[str, float]] | None = None,
) -> tuple[RankReport, ...]:
    """Return the shards, memory and time of each rank.

    Args:
        tables: All tables.
        costs: One per rank.
        memory_bytes: Memory available for shards, one per rank.
        device_bytes: Memory of the devices, one per rank; None: unknown.
        parts_bytes: What fills each rank's memory; None: unknown.
    """
    held: list[list[ShardReport]] = [[] for _ in costs]
    for shard in (shard for table in tables for shard in table.shards):
        held[shard.rank].append(shard)
    return tuple(
        RankReport(
            rank=rank,
            num_shards=len(held[rank]),
            columns=sum(s.embedding_dim for s in held[rank]),
            used_bytes=float(sum(s.used_bytes for s in held[rank])),
            memory_bytes=memory,
            device_bytes=device_bytes[rank] if device_bytes else None,
            parts_bytes=parts_bytes[rank] if parts_bytes else {},
            costs=cost,
        )
        for rank, (memory, cost) in enumerate(zip(memory_bytes, costs, strict=True))
    )
