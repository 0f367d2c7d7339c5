"""What became of every rank of a plan when it was built without its devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.placement import format_bytes
from torchrec_neuroshard.report.terminal import listed_ranks, note_lines, table

__all__ = ["RankRehearsal", "Rehearsal"]

MAX_RANKS = 32
"""Ranks shown one by one; of more, the fullest ones."""


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
class Rehearsal:
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

    def __str__(self) -> str:
        """Return the report as text."""
        return "\n".join(_lines(self))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return to_fields(self)


def _lines(report: Rehearsal) -> Iterator[str]:
    ranks, full = report.ranks, report.fullest
    faulty = [r for r in ranks if r.faults]
    verdict = f"{len(faulty)} ranks cannot" if faulty else "every rank can"
    yield (
        f"{report.num_tables} tables on {report.world_size} ranks, {report.batch_size} "
        f"samples each, pipeline {report.pipeline}: {verdict} run it"
    )
    yield (
        f"{report.num_built} ranks built without a device in {report.seconds:.1f} s; "
        "memory is predicted, of the embedding part alone"
    )
    yield (
        f"fullest: rank {full.rank}, {format_bytes(full.peak_bytes)} of "
        f"{format_bytes(full.memory_bytes)}"
    )
    yield ""
    names = ("weights", "optimizer", "cache", "activation", "peak", "memory")
    chosen = sorted(ranks, key=lambda r: (not r.faults, -r.peak_bytes))[:MAX_RANKS]
    rows = [["rank", "shards", "kernels", *names, "[GiB]"]]
    rows += [
        [
            *map(str, (rank.rank, rank.num_shards, rank.num_kernels)),
            *(f"{getattr(rank, f'{name}_bytes') / 2**30:.3f}" for name in names),
            "*" if rank.faults else "",
        ]
        for rank in sorted(chosen, key=lambda r: r.rank)
    ]
    yield from table(rows)
    if len(ranks) > MAX_RANKS:
        yield f"... of {len(ranks)} ranks, those at fault and the fullest"
    for fault in dict.fromkeys(fault for rank in faulty for fault in rank.faults):
        where = [rank.rank for rank in faulty if fault in rank.faults]
        yield f"- {listed_ranks(where)}: {fault}"
    yield from note_lines(report.notes)
