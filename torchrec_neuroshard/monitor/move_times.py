"""What moving tables takes.

TorchRec's resharding builds all tables of a module anew on every rank: memory of zeros,
filled twice with first values. Then it sends what moves, table after table. Both are
timed on a few MiB when a monitor starts, and by the moves themselves from the first
ones on.
"""

from __future__ import annotations

import dataclasses
import mmap
import statistics
import time
from dataclasses import dataclass
from typing import Self

import torch

from torchrec_neuroshard.devices import synchronize
from torchrec_neuroshard.planner.plans.replan import ReplanResult

__all__ = ["MoveRates", "fill_ms_per_byte"]

_FILL_VALUES, _ROUNDS = 2**21, 3
_MODULE_MS, _MOVE_MS = 15.0, 4.0
"""What Python takes for a module and for a move, by moves of small tables on one CPU
(24 of 5,000 x 32 in `benchmarks/bench_monitor.py moves`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRates:
    """How fast the slowest rank builds and sends tables."""

    fill_ms_per_byte: float
    send_ms_per_byte: float
    factor: float = 1.0
    """What the last moves took over what was predicted for them."""

    def predict_ms(self, result: ReplanResult) -> float:
        """Predict what carrying out a plan's moves takes [ms]."""
        total_ms = 0.0
        for path in result.changed:
            moves = [m for m in result.moves if m.path == path]
            entries = result.plan.plan[path]
            rows = {
                name: int(entry.sharding_spec.shards[0].shard_sizes[0])
                for name, entry in entries.items()
            }
            sent_bytes = sum(m.num_bytes for m in moves)
            # Weights and optimizer state; of the others as of those that move.
            value_bytes = sent_bytes / sum(m.width * rows[m.table] for m in moves)
            values_R: dict[int, float] = {}
            for entry in entries.values():
                for shard, rank in zip(
                    entry.sharding_spec.shards, entry.ranks, strict=True
                ):
                    size = float(shard.shard_sizes[0] * shard.shard_sizes[1])
                    values_R[rank] = values_R.get(rank, 0.0) + size
            total_ms += (
                _MODULE_MS
                + _MOVE_MS * len(moves)
                + max(values_R.values()) * value_bytes * self.fill_ms_per_byte
                + sent_bytes * self.send_ms_per_byte
            )
        return self.factor * total_ms

    def corrected(self, predicted_ms: float, measured_ms: float) -> Self:
        """Return the rates as moves have shown them to be."""
        if not (predicted_ms > 0 and measured_ms > 0):
            return self
        return dataclasses.replace(
            self, factor=self.factor * measured_ms / predicted_ms
        )


def fill_ms_per_byte(device: torch.device) -> float:
    """Time memory that is filled as TorchRec fills new tables, on this rank."""
    generator = torch.Generator(device)  # the job's own random state stays
    taken_ms = []
    for _ in range(_ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        if device.type == "cpu":
            # Of the system: tables are larger than what the C library has at hand.
            memory = mmap.mmap(-1, 4 * _FILL_VALUES)
            values = torch.frombuffer(memory, dtype=torch.float32).zero_()
        else:
            values = torch.zeros(_FILL_VALUES, device=device)
        for _ in range(2):
            values.uniform_(-1.0, 1.0, generator=generator)
        synchronize(device)
        taken_ms.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken_ms) / (4 * _FILL_VALUES)
