"""The sharding types, a row each: how a table is cut, over which ranks, what moves.

A *block* is the ranks that share the rows of a table (or have replicas of it): one
rank, the ranks of a node, or all. A table is cut by columns between blocks, where its
type allows that, and by rows inside one; every rank of a block has its equal part of
the rows, the last ones less or none.

Source: `torchrec/distributed/sharding`, a module for each type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "COLUMN_SHARDED_TYPES",
    "COLUMN_WISE",
    "NODE_TYPES",
    "SHARDING_TYPES",
    "TABLE_COLUMN_WISE",
    "TABLE_WISE",
    "ShardingType",
]

Collective = Literal["all_to_all", "row_wise", "node_row_wise", "all_reduce"]
"""A method of `CommsModel`. All but the last follow an index all-to-all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingType:
    """One way to lay a table out over ranks."""

    name: str
    """TorchRec's."""
    block: Literal["rank", "node", "world"] = "rank"
    """Ranks that rows of the same columns, or replicas, are spread over."""
    splits_columns: bool = False
    """Whether different blocks may hold different columns."""
    splits_rows: bool = False
    """Whether the ranks of a block hold different rows."""
    is_replicated: bool = False
    """Whether every rank reads its own samples in a table of its own."""
    pooled: Collective = "all_to_all"
    """What moves outputs of modules that pool, or gradients."""

    @property
    def sequences(self) -> Collective:
        """The same of modules that do not pool: whole rows, no partial sums."""
        return "all_to_all" if self.pooled == "row_wise" else self.pooled

    @property
    def in_columns(self) -> bool:
        """Whether every shard is whole columns on one rank."""
        return self.block == "rank"

    def block_size(self, world_size: int, node_size: int) -> int:
        """Ranks of a block."""
        return {"rank": 1, "node": node_size, "world": world_size}[self.block]

    def part_rows(self, num_embeddings: int, block_size: int) -> int:
        """Rows that every rank of a block holds; the last ones less, or none."""
        return -(-num_embeddings // block_size) if self.splits_rows else num_embeddings

    def rows_at(
        self, place: int, num_embeddings: int, block_size: int
    ) -> tuple[int, int]:
        """First row that a rank of a block holds, by its place there, and how many."""
        if not self.splits_rows:
            return 0, num_embeddings
        part = self.part_rows(num_embeddings, block_size)
        first = min(place * part, num_embeddings)
        return first, min(part, num_embeddings - first)


TABLE_WISE, COLUMN_WISE = "table_wise", "column_wise"
TABLE_COLUMN_WISE = "table_column_wise"
"""Columns are cut as by `COLUMN_WISE`, but all shards are in one node."""

_ROWS = (
    ShardingType(name=TABLE_WISE),
    ShardingType(name=COLUMN_WISE, splits_columns=True),
    ShardingType(name=TABLE_COLUMN_WISE, splits_columns=True),
    ShardingType(name="row_wise", block="world", splits_rows=True, pooled="row_wise"),
    ShardingType(
        name="table_row_wise", block="node", splits_rows=True, pooled="node_row_wise"
    ),
    ShardingType(
        name="grid_shard",
        block="node",
        splits_columns=True,
        splits_rows=True,
        pooled="node_row_wise",
    ),
    ShardingType(
        name="data_parallel", block="world", is_replicated=True, pooled="all_reduce"
    ),
)

SHARDING_TYPES: Mapping[str, ShardingType] = {row.name: row for row in _ROWS}
"""By TorchRec's name."""

NODE_TYPES: frozenset[str] = frozenset(
    name for name, kind in SHARDING_TYPES.items() if kind.block == "node"
)
"""Sharding types that spread rows over the ranks of a node, or of a pod."""

COLUMN_SHARDED_TYPES: frozenset[str] = frozenset(
    name for name, kind in SHARDING_TYPES.items() if kind.in_columns
)
"""Sharding types whose shards are whole columns on one rank each."""
