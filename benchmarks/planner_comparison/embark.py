"""EMBark's planning loop, on a shared cost model.

The loop places all shards, longest first, each on the least busy rank. It then splits
the most expensive shard of the busiest rank, places all shards again, and repeats this
while it helps. The plan with the shortest critical path is the result. Source: EMBark
(RecSys 2024) describes the loop. EMBark's kernels and cost tables are not used.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.papers.common import finish
from torchrec_neuroshard.search import SearchResult
from torchrec_neuroshard.search.base import Searcher

Floats = npt.NDArray[np.float64]
Shards = list[tuple[int, int]]
"""Table and width of each shard."""

PATIENCE = 8
"""Number of splits without a shorter path after which the loop ends."""
_STEP = 4
"""Widths of shards are multiples of this."""


class HottestSplitSearcher(Searcher):
    """Splits the costliest shard of the busiest rank as long as it helps."""

    name = "embark"

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Return the best placement of the loop.

        Raises:
            InfeasibleError: No placement fits, however far tables are split.
        """
        start = time.monotonic()
        shards = [(i, t.embedding_dim) for i, t in enumerate(task.tables)]
        best: tuple[float, Placement] | None = None
        left, tried = PATIENCE, 0
        while left:
            tried += 1
            table_N, width_N = np.array(shards).T
            priced = simulator.price(table_N, width_N)
            cost_N = simulator.single_compute(priced).sum(axis=1)
            rank_N = _place(task, shards, cost_N)
            hot = np.ones(len(shards), dtype=bool)
            left -= 1
            if rank_N is not None:
                triples = [
                    (*shard, rank)
                    for shard, rank in zip(shards, rank_N.tolist(), strict=True)
                ]
                placement = Placement.from_widths(task.world_size, triples, task)
                ms = simulator.evaluate(placement).critical_path_ms
                if best is None or ms < best[0]:
                    best, left = (ms, placement), PATIENCE
                load_W = np.bincount(rank_N, cost_N, task.world_size)
                hot = rank_N == load_W.argmax()
            weight_N = cost_N if rank_N is not None else _bytes(task, shards)
            halves = [_can_split(task, shards, i) for i in range(len(shards))]
            candidates = np.flatnonzero(hot & halves)
            if not len(candidates):
                break
            _split(shards, int(candidates[weight_N[candidates].argmax()]))
        if best is None:
            raise InfeasibleError("no placement fits, however far tables are split")
        best[1].check(task)
        return finish(best[1], simulator, start, tried)


def _bytes(task: ShardingTask, shards: Shards) -> Floats:
    return np.array([task.shard_bytes(t, w) for t, w in shards])


def _place(
    task: ShardingTask, shards: Shards, cost_N: Floats
) -> npt.NDArray[np.int64] | None:
    """Return the rank of each shard; None if a shard has no room."""
    size_N = _bytes(task, shards)
    load, used = np.zeros(task.world_size), np.zeros(task.world_size)
    limits = np.asarray(task.memory_bytes or [np.inf] * task.world_size, dtype=float)
    taken: list[set[int]] = [set() for _ in task.tables]
    rank_N = np.zeros(len(shards), dtype=np.int64)
    for shard in np.argsort(-cost_N, kind="stable").tolist():
        table = shards[shard][0]
        fits = used + size_N[shard] <= limits
        fits[list(taken[table])] = False
        if not fits.any():
            return None
        rank = int(np.where(fits, load, np.inf).argmin())
        load[rank] += cost_N[shard]
        used[rank] += size_N[shard]
        taken[table].add(rank)
        rank_N[shard] = rank
    return rank_N


def _can_split(task: ShardingTask, shards: Shards, shard: int) -> bool:
    table, width = shards[shard]
    parts = sum(t == table for t, _ in shards)
    least = max(_STEP, task.min_widths[table])
    return parts < min(task.max_shards[table], task.world_size) and width >= 2 * least


def _split(shards: Shards, shard: int) -> None:
    table, width = shards[shard]
    half = width // 2 // _STEP * _STEP
    shards[shard : shard + 1] = [(table, half), (table, width - half)]
