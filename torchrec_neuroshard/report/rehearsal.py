"""The report of a rehearsal: every rank of a plan, built without its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_neuroshard.costs.placement_rules import listed
from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report.page import Report
from torchrec_neuroshard.report.sections import Grid, GridColumn, Section


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRehearsal:
    """Kernels, memory [bytes] and faults of one rank."""

    rank: int
    num_shards: int
    num_kernels: int
    """Fused kernels and kernels of replicated tables."""
    weights_bytes: float
    """Weights, maps of ids to rows, and the gradients of replicated tables."""
    optimizer_bytes: float
    cache_bytes: float
    """Cached rows and the cache's state."""
    activation_bytes: float
    """Further memory at the peak of a step."""
    memory_bytes: int
    """Memory of the device."""
    faults: tuple[str, ...]
    """Reasons why the rank cannot run the plan: table, cause and way out."""

    @property
    def peak_bytes(self) -> float:
        """Memory at the peak of a step."""
        at_rest = self.weights_bytes + self.optimizer_bytes + self.cache_bytes
        return at_rest + self.activation_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal(Report):
    """Every rank of a plan; `print` shows whether all can run it."""

    world_size: int
    batch_size: int
    pipeline: str
    num_tables: int
    ranks: tuple[RankRehearsal, ...]
    num_built: int
    """Ranks whose sharded model was built; 0 if that is not possible."""
    seconds: float
    notes: tuple[Note, ...]

    @property
    def runs(self) -> bool:
        """Whether no rank has a fault."""
        return not any(rank.faults for rank in self.ranks)

    @property
    def fullest(self) -> RankRehearsal:
        """The rank that uses the largest share of its memory."""
        return max(self.ranks, key=lambda r: r.peak_bytes / max(1, r.memory_bytes))

    @property
    def _verdict(self) -> str:
        """Whether the ranks can run the plan, in words."""
        if count := sum(bool(rank.faults) for rank in self.ranks):
            return f"{count} rank{'s' * (count > 1)} cannot run the plan"
        if self.num_built < self.world_size:
            return "no fault found, but not every rank could be built here"
        return "every rank can run the plan"

    @property
    def _num_used(self) -> str:
        """The number of ranks with shards if it is not all, in words."""
        used = sum(bool(rank.num_shards) for rank in self.ranks)
        return f"{used} of " if used < self.world_size else ""

    def sections(self) -> Sequence[Section]:
        """See `Report`."""
        full = self.fullest
        at_fault: dict[str, list[int]] = {}
        for rank in self.ranks:
            for fault in rank.faults:
                at_fault.setdefault(fault, []).append(rank.rank)
        lines = [
            f"{self._verdict}: {self.num_tables} tables on {self._num_used}"
            f"{self.world_size} ranks, {self.batch_size} samples each, pipeline "
            f"{self.pipeline}",
            f"rank {full.rank} is the fullest: {format_bytes(full.peak_bytes)} of "
            f"{format_bytes(full.memory_bytes)} (predicted, embeddings alone)",
            f"{self.num_built} ranks built without a device in {self.seconds:.1f} s",
        ]
        columns: list[GridColumn] = [
            ("rank", "count", lambda r: r.rank),
            ("shards", "count", lambda r: r.num_shards),
            ("kernels", "count", lambda r: r.num_kernels),
            ("weights", "gib", lambda r: r.weights_bytes),
            ("optimizer", "gib", lambda r: r.optimizer_bytes),
            ("cache", "gib", lambda r: r.cache_bytes),
            ("activation", "gib", lambda r: r.activation_bytes),
            ("peak", "gib", lambda r: r.peak_bytes),
            ("memory", "gib", lambda r: r.memory_bytes),
            ("", "text", lambda r: "at fault" if r.faults else None),
        ]
        grid = Grid(
            "ranks",
            self.ranks,
            columns,
            brief=8,
            first=lambda r: (not r.faults, -r.peak_bytes),
        )
        faults = [f"{listed(at)}: {fault}" for fault, at in at_fault.items()]
        return [
            Section(lines=lines),
            Section(title="faults", bullets=faults, brief=len(faults)),
            Section(title="notes", bullets=self.notes, brief=len(self.notes)),
            Section(title="ranks [GiB]", grid=grid),
        ]
