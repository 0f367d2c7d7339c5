"""Fused kernels timed in training, kept as records that `neuroshard calibrate` takes.

Records of held-out tables judge what the others train, so that no table may be in both.
Here a table is held out by where it was first: what every fifth kernel held, and at
least one, is held out, and a set that mixes both kinds is not kept.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchrec_neuroshard.collect.fingerprint import device_fingerprint
from torchrec_neuroshard.phase_timer import KernelShard, PhaseTimes
from torchrec_neuroshard.record_store import RecordStore
from torchrec_neuroshard.records import (
    CostRecord,
    RunHeader,
    relative_spread,
    utc_now,
)
from torchrec_neuroshard.tables import TableConfig, row_shard

__all__ = ["KernelRecords", "TimedKernel", "timed_kernels"]

MOST_AT_ONCE = 8
"""Records per report; each is flushed to disk."""
_HELD_OUT_STEP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedKernel:
    """One fused kernel of one rank in the iterations of a report."""

    shards: tuple[KernelShard, ...]
    """Tables by their full names, "module.table"."""
    fwd_raw_ms: tuple[float, ...]
    bwd_raw_ms: tuple[float, ...]


def timed_kernels(
    iterations: Sequence[Sequence[PhaseTimes]],
    kernels: Mapping[str, Sequence[tuple[KernelShard, ...]]],
) -> list[TimedKernel]:
    """Find what each fused kernel of a rank took.

    Args:
        iterations: What `PhaseTimer.take_all` returned.
        kernels: `PhaseTimer.kernels`.

    Returns:
        The kernels that ran once in each direction in every iteration.
    """
    raw: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    for iteration in iterations:
        for times in iteration:
            for side, phase in enumerate(("fwd_compute", "bwd_compute")):
                spans = zip(times.spans[phase], times.kernels[phase], strict=True)
                for (start, end), number in spans:
                    both = raw.setdefault((times.module, number), ([], []))
                    both[side].append((end - start) * 1e3)
    found = []
    for (path, number), (forward, backward) in sorted(raw.items()):
        if len(forward) == len(backward) == len(iterations):
            shards = [
                dataclasses.replace(s, table=f"{path}.{s.table}" if path else s.table)
                for s in kernels[path][number]
            ]
            found.append(
                TimedKernel(
                    shards=tuple(shards),
                    fwd_raw_ms=tuple(forward),
                    bwd_raw_ms=tuple(backward),
                )
            )
    return found


class KernelRecords:
    """A file of records that grows with each report."""

    def __init__(
        self,
        path: Path,
        *,
        device: torch.device,
        batch_size: int,
        slowdown: tuple[float, float],
    ) -> None:
        """Open the file, or start it with the first record.

        Args:
            path: A Parquet file; what another run of this job kept stays in it.
            device: What the kernels run on.
            batch_size: Samples that they see.
            slowdown: How many times as long forward and backward kernels take beside
                those of other ranks; records are of a rank alone.

        Raises:
            RecordError: The file cannot be read.
            RecordMismatchError: It holds records of another device or another kind of
                run.
        """
        header = RunHeader(
            fingerprint=device_fingerprint(device, torch.get_num_threads()),
            reference_ms=0.0,
            seed=0,
            sampling={"source": "training", "compute_slowdown": list(slowdown)},
            command=f"PlanMonitor in {Path(sys.argv[0]).name}",
            created=utc_now(),
        )
        self._store = RecordStore(path, header)
        self._batch_size, self._slowdown = batch_size, slowdown
        self._held_out = {
            t.name for r in self._store.records if r.held_out for t in r.tables
        }
        self._turn = 0

    def add(
        self, timed: Sequence[TimedKernel], tables: Mapping[str, TableConfig]
    ) -> int:
        """Keep some of a report's kernels, in turn.

        Args:
            timed: Of all ranks.
            tables: Full name -> the table with its present profile.

        Returns:
            How many were kept.
        """
        if not self._store.records:
            self._held_out = _first_held_out(timed)
        first = self._turn % max(1, len(timed))
        self._turn += MOST_AT_ONCE
        kept = 0
        for kernel in [*timed[first:], *timed[:first]][:MOST_AT_ONCE]:
            names = {s.table for s in kernel.shards}
            held_out = bool(names & self._held_out)
            if not names <= tables.keys() or (held_out and names - self._held_out):
                continue
            self._store.append(self._record(kernel, tables, held_out))
            kept += 1
        return kept

    def close(self) -> None:
        """Fold what was kept into the Parquet file."""
        self._store.close()

    def _record(
        self, kernel: TimedKernel, tables: Mapping[str, TableConfig], held_out: bool
    ) -> CostRecord:
        forward, backward = self._slowdown
        fwd_ms = [ms / forward for ms in kernel.fwd_raw_ms]
        bwd_ms = [ms / backward for ms in kernel.bwd_raw_ms]
        total_ms = [f + b for f, b in zip(fwd_ms, bwd_ms, strict=True)]
        return CostRecord(
            index=max(self._store.done, default=-1) + 1,
            held_out=held_out,
            batch_size=self._batch_size,
            tables=tuple(self._shard(tables[s.table], s) for s in kernel.shards),
            fwd_ms=statistics.median(fwd_ms),
            bwd_ms=statistics.median(bwd_ms),
            num_passes=len(total_ms),
            spread=relative_spread(total_ms),
        )

    def _shard(self, table: TableConfig, shard: KernelShard) -> TableConfig:
        part = row_shard(table, shard.rows, self._batch_size)
        return dataclasses.replace(
            part.with_width(shard.width), profile=part.profile_at(self._batch_size)
        )


def _first_held_out(timed: Sequence[TimedKernel]) -> set[str]:
    """Tables of the kernels that are held out from now on."""
    chosen = timed[_HELD_OUT_STEP - 1 :: _HELD_OUT_STEP] or timed[1:2]
    return {s.table for kernel in chosen for s in kernel.shards}
