"""Plans made by hand: how a model's load is split over sharding types and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE, TableConfig

TABLE, COLUMN, ROW = "table_wise", "column_wise", "row_wise"
REPLICA = "data_parallel"

MAX_REPLICA_BYTES = 2**17
"""Largest table that a layout replicates [bytes]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Shares of the load by sharding type, and by rank within a type.

    The load of a table is what a lookup reads: pooling factor times width. Tables are
    dealt out largest first.
    """

    name: str
    shares: Mapping[str, float]
    """Sharding type -> its share of the load."""
    ranks: Mapping[str, Sequence[float]]
    """Sharding type -> weight of each rank. Row-wise: always all ranks evenly."""
    replicates: bool = False
    """Whether the smallest tables are replicated instead."""

    def plan(
        self, tables: Sequence[TableConfig], paths: Sequence[str], world_size: int
    ) -> ShardingPlan:
        """Return the plan of a model.

        Args:
            tables: The model's tables.
            paths: Path of each table's module.
            world_size: Number of ranks, all of them on CPUs.
        """
        modules: dict[str, EmbeddingModuleShardingPlan] = {}
        for table, path, sharding in zip(
            tables, paths, self._shardings(tables, world_size), strict=True
        ):
            module = modules.setdefault(path, EmbeddingModuleShardingPlan())
            module[table.name] = sharding
        return ShardingPlan(plan=dict(modules))

    def _shardings(
        self, tables: Sequence[TableConfig], world_size: int
    ) -> list[ParameterSharding]:
        """Return the shards of each table."""
        kinds = list(self.shares)
        loads = [t.pooling_factor * t.embedding_dim for t in tables]
        fused = [
            i
            for i, table in enumerate(tables)
            if not (self.replicates and table.weight_bytes <= MAX_REPLICA_BYTES)
        ]
        kind_of = [REPLICA] * len(tables)
        dealt = _deal([loads[i] for i in fused], list(self.shares.values()))
        for i, number in zip(fused, dealt, strict=True):
            kind_of[i] = kinds[number]
        found: list[ParameterSharding | None] = [None] * len(tables)
        for kind in (*kinds, REPLICA):
            own = [i for i, k in enumerate(kind_of) if k == kind]
            weights = self.ranks.get(kind, [1.0] * world_size)
            holders = _deal([loads[i] for i in own], weights)
            for i, rank in zip(own, holders, strict=True):
                found[i] = _sharding(kind, tables[i], weights, rank)
        return [s for s in found if s is not None]


def _deal(loads: Sequence[float], weights: Sequence[float]) -> list[int]:
    """Return the bin of each load; bins get loads in proportion to their weights."""
    used = [b for b, weight in enumerate(weights) if weight > 0]
    held, found = [0.0] * len(weights), [0] * len(loads)
    for i in sorted(range(len(loads)), key=lambda i: -loads[i]):
        found[i] = min(used, key=lambda b: (held[b] + loads[i]) / weights[b])
        held[found[i]] += loads[i]
    return found


def _sharding(
    kind: str, table: TableConfig, weights: Sequence[float], rank: int
) -> ParameterSharding:
    """Return a table's shards; `rank` has the table if it is not split."""
    rows, dim, everyone = table.num_embeddings, table.embedding_dim, range(len(weights))
    if kind == REPLICA:
        return ParameterSharding(kind, compute_kernel="dense", ranks=list(everyone))
    parts = [((0, 0), (rows, dim), rank)]
    if kind == ROW:
        block = -(-rows // len(weights))
        starts = [min(rows, r * block) for r in (*everyone, len(weights))]
        parts = [
            ((starts[r], 0), (starts[r + 1] - starts[r], dim), r) for r in everyone
        ]
    if kind == COLUMN and all(weights) and dim >= COLUMN_MULTIPLE * len(weights):
        cuts = _cuts(dim, weights)
        parts = [((0, cuts[r]), (rows, cuts[r + 1] - cuts[r]), r) for r in everyone]
    shards = [
        ShardMetadata(list(offset), list(size), f"rank:{holder}/cpu")
        for offset, size, holder in parts
    ]
    return ParameterSharding(
        kind,
        compute_kernel="fused",
        ranks=[holder for *_, holder in parts],
        sharding_spec=EnumerableShardingSpec(shards),
    )


def _cuts(dim: int, weights: Sequence[float]) -> list[int]:
    """Return the first column of each rank's shard, and the end of the last one."""
    units, cuts = dim // COLUMN_MULTIPLE, [0]
    for rank in range(1, len(weights)):
        ideal = round(units * sum(weights[:rank]) / sum(weights))
        left = len(weights) - rank  # later shards that need a unit
        cuts.append(min(max(ideal, cuts[-1] + 1), units - left))
    return [COLUMN_MULTIPLE * cut for cut in cuts] + [dim]


EVEN, SKEWED, FIRST, SECOND = (1.0, 1.0), (3.0, 1.0), (1.0, 0.0), (0.0, 1.0)
LAYOUTS = (
    Layout(name="table-wise", shares={TABLE: 1}, ranks={}),
    Layout(name="table-wise, skewed", shares={TABLE: 1}, ranks={TABLE: SKEWED}),
    Layout(name="column-wise", shares={COLUMN: 1}, ranks={}),
    Layout(name="row-wise", shares={ROW: 1}, ranks={}),
    Layout(name="table + column", shares={TABLE: 1, COLUMN: 1}, ranks={}),
    Layout(name="table + row", shares={TABLE: 1, ROW: 1}, ranks={}),
    Layout(
        name="table + column, crossed",
        shares={TABLE: 1, COLUMN: 1},
        ranks={TABLE: FIRST, COLUMN: SECOND},
    ),
    Layout(
        name="table + column, both skewed",
        shares={TABLE: 1, COLUMN: 1},
        ranks={TABLE: SKEWED, COLUMN: SKEWED},
    ),
    Layout(name="table + column + row", shares={TABLE: 1, COLUMN: 1, ROW: 1}, ranks={}),
    Layout(
        name="table + column + row, crossed",
        shares={TABLE: 1, COLUMN: 1, ROW: 1},
        ranks={TABLE: FIRST, COLUMN: SECOND},
    ),
    Layout(name="table + replicas", shares={TABLE: 1}, ranks={}, replicates=True),
    Layout(
        name="column + row + replicas, crossed",
        shares={COLUMN: 1, ROW: 1},
        ranks={COLUMN: FIRST},
        replicates=True,
    ),
)
"""For two ranks."""
