"""What a plan's report consists of: each part says in words what it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchrec_neuroshard.costs.placement_rules import listed, quoted
from torchrec_neuroshard.costs.schedules import SEQUENTIAL, TIMED
from torchrec_neuroshard.costs.simulator import PredictedCosts, RankCosts
from torchrec_neuroshard.costs.task import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFigure:
    """A figure of the devices that a plan is made for."""

    name: str
    value: float
    unit: str
    basis: str
    """"given", "this machine", a basis of `cards.Figure`, "TorchRec's default"."""
    source: str = ""
    """Who says so; empty where the basis says it."""

    def __str__(self) -> str:
        """Return value and unit."""
        return f"{self.value:,.4g} {self.unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBasis:
    """What the costs of a plan rest on."""

    card: str | None
    """Of every rank; None where it is not known."""
    figures: tuple[DeviceFigure, ...]
    batch_size: int
    """Samples per rank."""
    batch_size_is_default: bool
    """Whether it is TorchRec's default, since the caller gave none."""
    ids_per_sample: tuple[tuple[str, int], ...]
    """Where the features' ids per sample, and how often they repeat, are from -> how
    many features."""
    assumed_features: tuple[str, ...]
    """Those that nobody described: TorchRec's default of 1 id per sample."""
    estimate_error: str | None = None
    """How far off the estimate of kernels may be; None where they were measured."""

    def lines(self) -> list[str]:
        """Say what costs rest on, in sentences without a full stop."""
        card = self.card or "cards that are not named"
        default = " (TorchRec's default)" * self.batch_size_is_default
        lines = [f"planned for {card}, {self.batch_size:,} samples per rank{default}"]
        if self.estimate_error is not None:
            lines.append(f"the estimate of kernels may be off: {self.estimate_error}")
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
            lines.append(f"nobody says how many ids a sample has of {names}")
        return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """The table, rank and phase that make the critical path longest."""

    table: str
    """The one with the largest part of the phase on this rank."""
    rank: int
    """The slowest of the phase."""
    phase: str
    """One of `simulator.PHASES`."""
    phase_ms: float
    """What the phase adds to the critical path."""
    table_ms: float
    """The table's part of that."""

    def __str__(self) -> str:
        """Return it as a line of text."""
        return (
            f"bottleneck: table {self.table} on rank {self.rank}, {self.phase} "
            f"({self.table_ms:.3f} of its {self.phase_ms:.3f} ms)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSync:
    """How the replicas of a sharding group's tables are kept alike."""

    num_replicas: int
    interval: int
    """Iterations from one average to the next."""
    rank_bytes: float
    """Weights and optimizer state of the slowest rank."""
    sync_ms: float
    """What one average takes."""
    source: str
    """What that rests on."""

    @property
    def ms_per_iteration(self) -> float:
        """What it adds to an iteration, on average."""
        return self.sync_ms / self.interval

    def __str__(self) -> str:
        """Return it as a sentence without a full stop."""
        every = f"{self.interval} iterations" if self.interval > 1 else "iteration"
        return (
            f"weights of {self.num_replicas} replicas are averaged every {every}: "
            f"{format_bytes(self.rank_bytes)} of a rank in {self.sync_ms:.3f} ms, "
            f"{self.ms_per_iteration:.3f} ms per iteration on top of the critical "
            f"path ({self.source})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleReport:
    """What the train pipeline makes of a plan's phases; all of it is predicted."""

    pipeline_type: str
    dense_ms: float
    """What the rest of the model takes, of the critical path."""
    phases_ms: Mapping[str, float]
    """Phase -> what it takes on its slowest rank."""
    hidden_ms: Mapping[str, float]
    """Phase -> how much of that runs beside something longer."""

    @staticmethod
    def of(predicted: PredictedCosts) -> ScheduleReport | None:
        """Describe costs; None where nobody said how the model is trained."""
        schedule, dense = predicted.schedule, predicted.dense
        if schedule is SEQUENTIAL and not dense.total_ms:
            return None
        worst = predicted.timed_phases(schedule)[0].max(axis=0).sum(axis=0)
        return ScheduleReport(
            pipeline_type=schedule.name,
            dense_ms=dense.total_ms,
            phases_ms=dict(zip(TIMED, worst.tolist(), strict=True)),
            hidden_ms=predicted.hidden_ms(schedule),
        )

    def __str__(self) -> str:
        """Return it as a sentence without a full stop."""
        hidden = [
            f"{name} {self.hidden_ms[name]:.3f} of {ms:.3f}"
            for name, ms in self.phases_ms.items()
            if self.hidden_ms[name] > 1e-9
        ]
        return (
            f"trained by pipeline_type '{self.pipeline_type}' with "
            f"{self.dense_ms:.3f} ms of other layers; hidden beside something longer "
            f"[ms]: {', '.join(hidden) or 'nothing'}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank holds, in the memory that fused tables live in, and does."""

    rank: int
    num_shards: int
    columns: int
    """Widths of its shards together."""
    used_bytes: float
    memory_bytes: int | None
    """What the rank has for shards; None where it is not limited."""
    costs: RankCosts
    """Over all stages [ms]."""

    @property
    def total_ms(self) -> float:
        """All of its phases together."""
        return sum(self.costs.to_json().values())


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitReport:
    """Why one table lies in several pieces."""

    table: str
    shards: tuple[tuple[int, int], ...]
    """(width, rank), by offset."""
    whole_bytes: float
    """Memory that it would need in one piece."""
    whole_rank: int | None
    """The rank where it would cost least in one piece; None where none has room."""
    whole_ms: float | None
    """Critical path with it there, all else as planned."""
    compute_change_ms: float
    """How much longer the slowest ranks' kernels would then take."""
    comms_change_ms: float
    """How much longer the collectives would then take."""

    def line(self, planned_ms: float) -> str:
        """Say where it lies and what its split is good for.

        Args:
            planned_ms: Critical path of the plan.
        """
        shards = ", ".join(f"{width} on rank {rank}" for width, rank in self.shards)
        if self.whole_ms is None:
            whole_bytes = format_bytes(self.whole_bytes)
            return (
                f"{self.table}: {shards}; in one piece it needs {whole_bytes}, more "
                "than any rank has free"
            )
        change = self.whole_ms / planned_ms - 1 if planned_ms > 0 else 0.0
        verdict = "" if change > 0 else "by itself the split does not pay: "
        return (
            f"{self.table}: {shards}; {verdict}in one piece, at best on rank "
            f"{self.whole_rank}, the critical path would be {self.whole_ms:.3f} ms "
            f"({change:+.1%}: kernels {self.compute_change_ms:+.3f}, collectives "
            f"{self.comms_change_ms:+.3f})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTable:
    """What a table in the host's memory takes of it, and in each iteration."""

    ms_per_iteration: float
    """Moving rows to and from the slowest of its ranks; part of its kernels' time."""
    rank_bytes: tuple[tuple[int, float], ...]
    """(rank, bytes of the host's memory)."""
    load_factor: float | None = None
    """Share of the rows that its cache on the device holds; None: it has no cache."""
    missed: float | None = None
    """Share of a batch's distinct rows that this lacks."""

    def __str__(self) -> str:
        """Return it as a clause."""
        cache = "no cache"
        if self.load_factor is not None and self.missed is not None:
            cache = (
                f"cache_load_factor {self.load_factor:.4g}, which lacks "
                f"{self.missed:.1%} of the rows of a batch"
            )
        size = format_bytes(sum(size for _, size in self.rank_bytes))
        return (
            f"{size} of the hosts' memory, {cache}: {self.ms_per_iteration:.3f} ms per "
            "iteration"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """A piece of a table: where it lies and what it takes there."""

    rank: int
    num_embeddings: int
    """Rows of the table in it."""
    embedding_dim: int
    """Columns of the table in it."""
    used_bytes: float
    """In the memory that fused tables live in."""
    compute_ms: float = 0.0
    """Its part of what its rank's kernels take in an iteration; 0: not known."""
    comms_ms: float = 0.0
    """Its part of what its rank's collectives take."""
    path_ms: float = 0.0
    """Its part of the critical path: of the phases in which its rank is the slowest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableReport:
    """Where one table lies, what it takes there."""

    table: str
    sharding_type: str
    compute_kernel: str
    num_embeddings: int
    embedding_dim: int
    shards: tuple[ShardReport, ...]
    """In the order of rows and columns."""
    host: HostTable | None = None
    """None where its rows are on the devices, or nobody knows what they cost."""

    @property
    def num_shards(self) -> int:
        """Pieces that it lies in."""
        return len(self.shards)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that hold some of it, ascending."""
        return tuple(sorted({shard.rank for shard in self.shards}))

    @property
    def used_bytes(self) -> float:
        """Of all its shards, in the memory that fused tables live in."""
        return sum(shard.used_bytes for shard in self.shards)

    @property
    def path_ms(self) -> float:
        """Its part of the critical path; 0 where its ranks are never the slowest."""
        return sum(shard.path_ms for shard in self.shards)

    def slowest_ms(self, name: str) -> float:
        """Return a time of its shards, by name, on the rank where it is longest."""
        by_rank: dict[int, float] = defaultdict(float)
        for shard in self.shards:
            by_rank[shard.rank] += getattr(shard, name)
        return max(by_rank.values(), default=0.0)

    @property
    def is_split(self) -> bool:
        """Whether some shard lacks rows or columns."""
        whole = self.num_embeddings, self.embedding_dim
        return any((s.num_embeddings, s.embedding_dim) != whole for s in self.shards)

    @property
    def place(self) -> str:
        """How it is sharded, and where, in words."""
        kernel = "" if self.compute_kernel == "fused" else f" ({self.compute_kernel})"
        shards = f"{self.num_shards} shards on " if self.num_shards > 1 else ""
        return f"{self.sharding_type}{kernel}, {shards}{listed(self.ranks)}"


def rank_reports(
    tables: Iterable[TableReport],
    costs: Sequence[RankCosts],
    memory_bytes: Sequence[int | None],
) -> tuple[RankReport, ...]:
    """Say what each rank holds and does.

    Args:
        tables: All of them.
        costs: Of each rank.
        memory_bytes: What each has for shards.
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
            costs=cost,
        )
        for rank, (memory, cost) in enumerate(zip(memory_bytes, costs, strict=True))
    )
