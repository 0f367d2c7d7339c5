"""Placing whole tables by a rule of thumb: random, and four greedy balances.

Shapes: `T` tables, `W` ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.search.base import Searcher, SearchResult
from torchrec_neuroshard.simulator import Simulator

__all__ = ["HEURISTICS", "HeuristicSearcher", "make_heuristic"]

Floats = npt.NDArray[np.float64]

_GIB = 2**30


def _size(task: ShardingTask) -> Floats:
    return np.array(
        [task.shard_bytes(t, c.embedding_dim) for t, c in enumerate(task.tables)]
    )


def _dim(task: ShardingTask) -> Floats:
    return np.array([float(c.embedding_dim) for c in task.tables])


def _lookup(task: ShardingTask) -> Floats:
    pooling = [
        c.profile.pooling_factor if c.profile is not None else c.pooling_factor
        for c in task.tables
    ]
    product: Floats = _dim(task) * np.array(pooling)
    return product


def _size_lookup(task: ShardingTask) -> Floats:
    rows = np.array([float(c.num_embeddings) for c in task.tables])
    product: Floats = _lookup(task) * np.log10(rows)
    return product


HEURISTICS: dict[str, Callable[[ShardingTask], Floats] | None] = {
    "random": None,
    "size": _size,
    "dim": _dim,
    "lookup": _lookup,
    "size_lookup": _size_lookup,
}
"""What each greedy balances: bytes, width, width x pooling factor, and that times log10
rows, as in the published code of AutoShard, DreamShard and NeuroShard. None: random."""


class HeuristicSearcher(Searcher):
    """Whole tables, one after the other, each to a rank with memory for it.

    Random: any such rank, tables in random order. Greedy: in descending order of the
    balanced quantity, to the rank that has least of it so far.
    Source: NeuroShard (arXiv 2305.01868), baselines; differs: a table that fits on no
    rank is an error, where the published code puts it on the last one.
    """

    def __init__(self, name: str, seed: int = 0) -> None:
        """Take the name of a heuristic and, for the random one, a seed."""
        if name not in HEURISTICS:
            raise ConfigError(
                f"unknown heuristic '{name}'; one of {', '.join(sorted(HEURISTICS))}"
            )
        self.name = name
        self.seed = seed

    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        """Place the tables; the models only rate the result.

        The lower bound is 0 and the gap infinite: a heuristic proves nothing.

        Raises:
            InfeasibleError: A table fits no rank when its turn comes, which another
                order might avoid.
        """
        start = time.monotonic()
        placement = self.place(task)
        placement.check(task)
        predicted = Simulator(task, cost_model, comms_model).evaluate(placement)
        return SearchResult(
            placement=placement,
            predicted=predicted,
            lower_bound_ms=0.0,
            gap=float("inf"),
            search_seconds=time.monotonic() - start,
            num_evaluated=task.world_size,
        )

    def place(self, task: ShardingTask) -> Placement:
        """Return the placement alone; see `search`."""
        rng = np.random.default_rng(self.seed)
        balance = HEURISTICS[self.name]
        num_tables = len(task.tables)
        if balance is None:
            weight = rng.permutation(num_tables).astype(np.float64)
        else:
            weight = balance(task)
        size_T = _size(task)
        free_W = np.asarray(
            task.memory_bytes or (np.inf,) * task.world_size, dtype=np.float64
        ).copy()
        load_W = np.zeros(task.world_size)
        triples = []
        for table in np.argsort(-weight, kind="stable").tolist():
            fits = np.flatnonzero(free_W >= size_T[table])
            if not len(fits):
                config = task.tables[table]
                raise InfeasibleError(
                    f"heuristic '{self.name}': table '{config.name}' "
                    f"(num_embeddings={config.num_embeddings}, "
                    f"embedding_dim={config.embedding_dim}, {config.data_type}) needs "
                    f"{size_T[table] / _GIB:.2f} GiB; the freest rank, "
                    f"{int(free_W.argmax())}, has {free_W.max() / _GIB:.2f} GiB left. "
                    "Use a search that splits tables, or raise world_size "
                    f"({task.world_size})."
                )
            if balance is None:
                rank = int(rng.choice(fits))
            else:
                rank = int(fits[load_W[fits].argmin()])
            load_W[rank] += weight[table]
            free_W[rank] -= size_T[table]
            triples.append((table, task.tables[table].embedding_dim, rank))
        return Placement.from_widths(task.world_size, triples)


def make_heuristic(name: str, seed: int = 0) -> HeuristicSearcher:
    """Return a heuristic by name.

    Raises:
        ConfigError: The name is unknown.
    """
    return HeuristicSearcher(name, seed)
