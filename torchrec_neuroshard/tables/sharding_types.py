"""The sharding types as a table: how each splits a table, and its collectives.

A *block* is a group of ranks that share the rows of a table or hold replicas of it: one
rank, the ranks of a node, or all ranks. Blocks hold different columns, if the type
splits columns. Inside a block, ranks hold different rows, if the type splits rows:
equal parts, except that the last ranks may hold fewer rows or none.

Source: `torchrec/distributed/sharding`, one module per type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_to_all", "row_wise", "node_row_wise", "all_reduce"]
"""A method of `CommsModel`. An index all-to-all precedes all except the last."""

A2A = "POOLED_EMBEDDINGS_ALL_TO_ALL"
REDUCE_SCATTER = "POOLED_EMBEDDINGS_REDUCE_SCATTER"
"""TorchRec's names of collectives with codecs, in `CommOp`."""
_COMM_OPS: Mapping[Collective, tuple[str, ...]] = {
    "all_to_all": (A2A,),
    "row_wise": (REDUCE_SCATTER,),
    "node_row_wise": (REDUCE_SCATTER, A2A),
    "all_reduce": (),
}
_SEQUENCE_OPS = ("SEQUENCE_EMBEDDINGS_ALL_TO_ALL",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingType:
    """One sharding type of TorchRec: how it splits tables, and what TorchRec does."""

    name: str
    """TorchRec's name."""
    block: Literal["rank", "node", "world"] = "rank"
    """Ranks that share the rows of the same columns, or hold replicas."""
    splits_columns: bool = False
    """Whether different blocks may hold different columns."""
    splits_rows: bool = False
    """Whether the ranks of a block hold different rows."""
    is_replicated: bool = False
    """Whether every rank holds the whole table and reads it for its own samples."""
    has_fixed_blocks: bool = False
    """Whether a table's blocks all have one width, even if a block is one rank."""
    keeps_to_node: bool = False
    """Whether all blocks of a table, of one rank each, are in one node, or pod."""
    included_in: str | None = None
    """The type that a search may turn into this one, where a table may have both."""
    sequences_included_in: str | None = None
    """The same for tables that are not pooled."""
    same_in_one_node: str | None = None
    """The type that is the same where all ranks are in one node, or pod."""
    pooled: Collective = "all_to_all"
    """Collective that moves the outputs of pooling modules, or the gradients."""
    divides_means: Literal["kernel", "module", "nobody"] = "kernel"
    """What divides sums by the number of ids for pooling MEAN: the lookup kernel; or
    TorchRec, which then divides the outputs of all tables of the module; or nobody, so
    outputs are sums."""
    varies_batches_since: tuple[int, int] = (0, 0)
    """The release of TorchRec since which features may have their own batch sizes."""
    miscounts_row_states: bool = False
    """Whether TorchRec may miscount the shards of optimizer states of one value per
    row, so that it cannot build them."""
    can_be_moved: bool = False
    """Whether TorchRec moves shards to other ranks during training (`reshard`)."""

    @property
    def sequences(self) -> Collective:
        """Collective of modules that do not pool: whole rows, no partial sums."""
        return "all_to_all" if self.pooled == "row_wise" else self.pooled

    def comm_ops(self, *, pooled: bool) -> tuple[str, ...]:
        """Return TorchRec's names of the collectives of outputs, for their codecs."""
        if pooled or self.is_replicated:
            return _COMM_OPS[self.pooled]
        return _SEQUENCE_OPS

    def includer(self, *, pooled: bool) -> str | None:
        """Return the type that a search may turn into this one."""
        return self.included_in if pooled else self.sequences_included_in

    @property
    def in_columns(self) -> bool:
        """Whether every shard holds whole columns on one rank, of any width."""
        return self.block == "rank" and not self.has_fixed_blocks

    def block_size(self, world_size: int, node_size: int) -> int:
        """Return the number of ranks in a block."""
        return {"rank": 1, "node": node_size, "world": world_size}[self.block]

    def part_rows(self, num_embeddings: int, block_size: int) -> int:
        """Return the rows of each rank of a block; the last ranks may hold fewer."""
        return -(-num_embeddings // block_size) if self.splits_rows else num_embeddings

    def rows_at(
        self, place: int, num_embeddings: int, block_size: int
    ) -> tuple[int, int]:
        """Return the first row and the number of rows of a block's rank `place`."""
        if not self.splits_rows:
            return 0, num_embeddings
        part = self.part_rows(num_embeddings, block_size)
        first = min(place * part, num_embeddings)
        return first, min(part, num_embeddings - first)


TABLE_WISE, COLUMN_WISE = "table_wise", "column_wise"
TABLE_COLUMN_WISE = "table_column_wise"
"""Splits columns like `COLUMN_WISE`, but keeps all shards in one node."""
EQUAL_COLUMNS = "equal_columns"
"""Column-wise with a fixed number of equal shards. Only a search knows this type; for
TorchRec it is column-wise."""

_ROW_WISE = "row_wise"

_ROWS = (
    ShardingType(name=TABLE_WISE, included_in=COLUMN_WISE, can_be_moved=True),
    ShardingType(
        name=COLUMN_WISE,
        splits_columns=True,
        sequences_included_in=TABLE_WISE,
        can_be_moved=True,
    ),
    ShardingType(
        name=TABLE_COLUMN_WISE,
        splits_columns=True,
        keeps_to_node=True,
        included_in=COLUMN_WISE,
        sequences_included_in=COLUMN_WISE,
    ),
    ShardingType(name=EQUAL_COLUMNS, splits_columns=True, has_fixed_blocks=True),
    ShardingType(
        name=_ROW_WISE,
        block="world",
        splits_rows=True,
        pooled="row_wise",
        divides_means="module",
    ),
    ShardingType(
        name="table_row_wise",
        block="node",
        splits_rows=True,
        same_in_one_node=_ROW_WISE,
        pooled="node_row_wise",
        divides_means="module",
    ),
    ShardingType(
        name="grid_shard",
        block="node",
        splits_columns=True,
        splits_rows=True,
        same_in_one_node=_ROW_WISE,
        pooled="node_row_wise",
        divides_means="nobody",
        varies_batches_since=(1, 9),
        miscounts_row_states=True,
    ),
    ShardingType(
        name="data_parallel", block="world", is_replicated=True, pooled="all_reduce"
    ),
)

SHARDING_TYPES: Mapping[str, ShardingType] = {row.name: row for row in _ROWS}
"""TorchRec's name, or `EQUAL_COLUMNS` -> sharding type."""

NODE_TYPES: frozenset[str] = frozenset(
    name for name, kind in SHARDING_TYPES.items() if kind.block == "node"
)
"""Sharding types that split rows over the ranks of a node, or of a pod."""

WORLD_TYPES: frozenset[str] = frozenset(
    name for name, kind in SHARDING_TYPES.items() if kind.block == "world"
)
"""Sharding types with a shard or a replica on every rank."""

SPLITTING_TYPES: frozenset[str] = frozenset(
    name for name, kind in SHARDING_TYPES.items() if kind.splits_columns
)
"""Sharding types that may split a table's columns."""

MISCOUNTED_TYPES: frozenset[str] = frozenset(
    name for name, kind in SHARDING_TYPES.items() if kind.miscounts_row_states
)
"""Sharding types with `miscounts_row_states`."""

COLUMN_SHARDED_TYPES: frozenset[str] = frozenset(
    name for name, kind in SHARDING_TYPES.items() if kind.in_columns
)
"""Sharding types whose shards hold whole columns on one rank each."""
