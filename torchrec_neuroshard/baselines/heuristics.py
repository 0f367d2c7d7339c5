"""Random and greedy placement of whole tables, as the seed papers compare with.

Their released code puts a table that fits nowhere on the last rank without a word; here
a rank that is full is not offered, and a table that fits nowhere is an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import numpy as np

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.search.base import Searcher, SearchResult
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.tables import TableConfig

__all__ = ["GREEDY_KEYS", "GreedySearcher", "RandomSearcher"]

_GIB = 2**30

GREEDY_KEYS: Mapping[str, Callable[[TableConfig], float]] = {
    "size": lambda t: float(t.weight_bytes),
    "dim": lambda t: float(t.embedding_dim),
    "lookup": lambda t: t.embedding_dim * t.pooling_factor,
    "size-lookup": lambda t: (
        t.embedding_dim * t.pooling_factor * math.log10(max(t.num_embeddings, 2))
    ),
}
"""What each greedy balances: DreamShard's (arXiv 2210.02023) four rules."""


class GreedySearcher(Searcher):
    """Largest table first, each on the rank that has least so far and room left."""

    def __init__(self, key: str) -> None:
        """Choose what is balanced.

        Raises:
            ConfigError: `key` is not one of GREEDY_KEYS.
        """
        if key not in GREEDY_KEYS:
            raise ConfigError(
                f"unknown greedy key '{key}'; one of {', '.join(GREEDY_KEYS)}"
            )
        self.name = f"greedy-{key}"
        self._key = GREEDY_KEYS[key]

    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        """Place whole tables.

        Raises:
            InfeasibleError: A table fits on no rank any more.
        """
        start = time.monotonic()
        loads = np.array([self._key(t) for t in task.tables])
        held = np.zeros(task.world_size)
        used = np.zeros(task.world_size)
        ranks = np.zeros(len(task.tables), dtype=np.int64)
        for table in np.argsort(-loads, kind="stable"):
            free = _ranks_with_room(task, int(table), used)
            rank = free[np.argmin(held[free])]
            held[rank] += loads[table]
            used[rank] += _whole_bytes(task, int(table))
            ranks[table] = rank
        return _result(task, ranks, cost_model, comms_model, start)


class RandomSearcher(Searcher):
    """Each table on a random rank that has room."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        """Take the seed."""
        self._seed = seed

    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        """Place whole tables.

        Raises:
            InfeasibleError: A table fits on no rank any more.
        """
        start = time.monotonic()
        rng = np.random.default_rng(self._seed)
        used = np.zeros(task.world_size)
        ranks = np.zeros(len(task.tables), dtype=np.int64)
        for table in range(len(task.tables)):
            rank = rng.choice(_ranks_with_room(task, table, used))
            used[rank] += _whole_bytes(task, table)
            ranks[table] = rank
        return _result(task, ranks, cost_model, comms_model, start)


def _whole_bytes(task: ShardingTask, table: int) -> float:
    return task.shard_bytes(table, task.tables[table].embedding_dim)


def _ranks_with_room(
    task: ShardingTask, table: int, used_W: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if not task.memory_bytes:
        return np.arange(task.world_size)
    room = np.asarray(task.memory_bytes, dtype=np.float64) - used_W
    needed = _whole_bytes(task, table)
    free = np.flatnonzero(room >= needed)
    if not len(free):
        rank = int(room.argmax())
        raise InfeasibleError(
            f"table '{task.tables[table].name}' needs {needed / _GIB:.2f} GiB; the "
            f"freest rank, {rank}, has {room[rank] / _GIB:.2f} GiB left. This search "
            "keeps tables whole and never moves one: allow column splits by another "
            f"search or raise world_size ({task.world_size})."
        )
    return free


def _result(
    task: ShardingTask,
    ranks_T: np.ndarray[tuple[int], np.dtype[np.int64]],
    cost_model: CostModel,
    comms_model: CommsModel,
    start: float,
) -> SearchResult:
    placement = Placement.from_widths(
        task.world_size,
        [
            (i, t.embedding_dim, int(r))
            for i, (t, r) in enumerate(zip(task.tables, ranks_T, strict=True))
        ],
    )
    placement.check(task)
    predicted = Simulator(task, cost_model, comms_model).evaluate(placement)
    return SearchResult(
        placement=placement,
        predicted=predicted,
        lower_bound_ms=0.0,
        gap=math.inf,
        search_seconds=time.monotonic() - start,
        num_evaluated=task.world_size,
    )
