"""Random and greedy placement of whole tables: the papers' baselines.

The papers' code silently puts a table that fits no rank on the last one. Here a full
rank is never chosen, and a table that fits no rank is an error.

Shapes: `T` tables, `W` ranks.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping

import numpy as np

from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask, format_bytes
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.papers.common import (
    finish,
    whole_bytes,
    whole_placement,
)
from torchrec_neuroshard.search.base import Searcher, SearchResult
from torchrec_neuroshard.search.rules import require_unconstrained
from torchrec_neuroshard.search.shards import Floats, Ints
from torchrec_neuroshard.tables.table import TableConfig

GREEDY_KEYS: Mapping[str, Callable[[TableConfig], float]] = {
    "size": lambda t: float(t.weight_bytes),
    "dim": lambda t: float(t.embedding_dim),
    "lookup": lambda t: t.embedding_dim * t.pooling_factor,
    "size-lookup": lambda t: (
        t.embedding_dim * t.pooling_factor * math.log10(max(t.num_embeddings, 2))
    ),
}
"""Name -> load that a greedy search balances. DreamShard (arXiv 2210.02023) compares
with these four."""


def place_greedily(task: ShardingTask, load_T: Floats) -> Ints:
    """Return each table's rank, balancing the load greedily.

    The table with the largest load is placed first. Each goes to the rank with the
    least load among the ranks with room.

    Args:
        task: The task.
        load_T: Load of each table, in any unit.

    Raises:
        InfeasibleError: A table has room on no rank.
    """
    size_T = whole_bytes(task)
    held, used = np.zeros(task.world_size), np.zeros(task.world_size)
    rank_T = np.zeros(len(task.tables), dtype=np.int64)
    for table in np.argsort(-load_T, kind="stable").tolist():
        free = _ranks_with_room(task, table, size_T[table], used)
        rank = free[np.argmin(held[free])]
        held[rank] += load_T[table]
        used[rank] += size_T[table]
        rank_T[table] = rank
    return rank_T


def place_by_cost(simulator: Simulator) -> Ints:
    """Return each table's rank, balancing the predicted compute of tables alone."""
    tables = simulator.task.tables
    dim_T = np.array([t.embedding_dim for t in tables])
    whole = simulator.price(np.arange(len(tables)), dim_T)
    return place_greedily(simulator.task, simulator.single_compute(whole).sum(axis=1))


class _WholeTableSearcher(Searcher):
    """Places whole tables in one pass, without pricing any placement."""

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Return a placement of whole tables; the models predict its costs.

        Raises:
            InfeasibleError: A table has room on no rank.
            ConfigError: The task has rules on which ranks tables use or share.
        """
        start = time.monotonic()
        require_unconstrained(task, self.name)
        placement = whole_placement(task, self._place(simulator))
        placement.check(task)
        return finish(placement, simulator, start, task.world_size)

    @abstractmethod
    def _place(self, simulator: Simulator) -> Ints:
        """Return the rank of each table."""


class GreedySearcher(_WholeTableSearcher):
    """Places the largest table first, on the least loaded rank with room."""

    def __init__(self, key: str) -> None:
        """Take the load to balance, a key of `GREEDY_KEYS`.

        Raises:
            ConfigError: The key is unknown.
        """
        if key not in GREEDY_KEYS:
            raise ConfigError(
                f"unknown greedy key '{key}'; take one of {', '.join(GREEDY_KEYS)}"
            )
        self.name = f"greedy-{key}"
        self._key = GREEDY_KEYS[key]

    def _place(self, simulator: Simulator) -> Ints:
        task = simulator.task
        return place_greedily(task, np.array([self._key(t) for t in task.tables]))


class CostGreedySearcher(_WholeTableSearcher):
    """Balances the predicted compute of each table alone, greedily.

    This is not in the papers. It shows how much of a method's gain comes from the cost
    model alone.
    """

    name = "greedy-cost"

    def _place(self, simulator: Simulator) -> Ints:
        return place_by_cost(simulator)


class RandomSearcher(_WholeTableSearcher):
    """Places each table on a random rank with room."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        """Take the seed."""
        self._seed = seed

    def _place(self, simulator: Simulator) -> Ints:
        task, rng = simulator.task, np.random.default_rng(self._seed)
        size_T, used = whole_bytes(task), np.zeros(simulator.task.world_size)
        rank_T = np.zeros(len(task.tables), dtype=np.int64)
        for table, size in enumerate(size_T):
            rank = rng.choice(_ranks_with_room(task, table, size, used))
            used[rank] += size
            rank_T[table] = rank
        return rank_T


def _ranks_with_room(
    task: ShardingTask, table: int, needed: float, used_W: Floats
) -> Ints:
    if not task.memory_bytes:
        return np.arange(task.world_size)
    room = np.asarray(task.memory_bytes, dtype=np.float64) - used_W
    free = np.flatnonzero(room >= needed)
    if not len(free):
        rank = int(room.argmax())
        raise InfeasibleError(
            f"table '{task.tables[table].name}' needs {format_bytes(needed)}; the "
            f"freest rank, {rank}, has {format_bytes(room[rank])} left. This search "
            "does not split tables and never moves one: use search='default' or raise "
            f"world_size ({task.world_size})."
        )
    return free
