"""What became of every rank of a plan when it was built without its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_neuroshard.costs.placement_rules import listed
from torchrec_neuroshard.costs.task import format_bytes
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.report.page import Report
from torchrec_neuroshard.report.sections import Grid, GridColumn, Section

__all__ = ["RankRehearsal", "Rehearsal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRehearsal:
    """One rank: what it holds, and what it takes of its device [bytes]."""

    rank: int
    num_shards: int
    num_kernels: int
    """Fused kernels, and those of replicated tables."""
    weights_bytes: float
    """Of replicated tables, gradients as well."""
    optimizer_bytes: float
    cache_bytes: float
    """Cached rows, and what is known of them."""
    activation_bytes: float
    """At the peak of a step, beside what is there at rest."""
    memory_bytes: int
    """What the device has."""
    faults: tuple[str, ...]
    """Why it cannot run the plan: the table, the cause and the way out."""

    @property
    def peak_bytes(self) -> float:
        """The most that the rank takes."""
        at_rest = self.weights_bytes + self.optimizer_bytes + self.cache_bytes
        return at_rest + self.activation_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal(Report):
    """A plan on all of its ranks; `print` shows it as text."""

    world_size: int
    batch_size: int
    pipeline: str
    num_tables: int
    ranks: tuple[RankRehearsal, ...]
    num_built: int
    """Ranks whose sharded model was built; 0 where that is not possible."""
    seconds: float
    notes: tuple[Note, ...]

    @property
    def runs(self) -> bool:
        """Whether no rank has a fault."""
        return not any(rank.faults for rank in self.ranks)

    @property
    def fullest(self) -> RankRehearsal:
        """The rank that takes the most of its memory."""
        return max(self.ranks, key=lambda r: r.peak_bytes / max(1, r.memory_bytes))

    def sections(self) -> Sequence[Section]:
        """See `Report`."""
        full = self.fullest
        at_fault: dict[str, list[int]] = {}
        for rank in self.ranks:
            for fault in rank.faults:
                at_fault.setdefault(fault, []).append(rank.rank)
        count = sum(bool(rank.faults) for rank in self.ranks)
        verdict = f"{count} ranks cannot" if count else "every rank can"
        lines = [
            f"{self.num_tables} tables on {self.world_size} ranks, {self.batch_size} "
            f"samples each, pipeline {self.pipeline}: {verdict} run it",
            f"{self.num_built} ranks built without a device in {self.seconds:.1f} s; "
            "memory is predicted, of the embedding part alone",
            f"fullest: rank {full.rank}, {format_bytes(full.peak_bytes)} of "
            f"{format_bytes(full.memory_bytes)}",
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
            first=lambda r: (not r.faults, -r.peak_bytes),
        )
        faults = [f"{listed(at)}: {fault}" for fault, at in at_fault.items()]
        return [
            Section(lines=lines),
            Section(title="ranks [GiB]", grid=grid),
            Section(title="faults", bullets=faults),
            Section(title="notes", bullets=self.notes),
        ]
