"""The ways to shard a table: TorchRec's options and additional ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.types import Shard, ShardingOption

from torchrec_neuroshard.planner.option_facts import (
    is_pooled,
    option_codecs,
)
from torchrec_neuroshard.planner.reader import (
    TableReader,
)
from torchrec_neuroshard.planner.spread_options import (
    SpreadOption,
    sample_shards,
)
from torchrec_neuroshard.tables.sharding_types import (
    COLUMN_SHARDED_TYPES,
    COLUMN_WISE,
    EQUAL_COLUMNS,
    SHARDING_TYPES,
    TABLE_COLUMN_WISE,
    TABLE_WISE,
)
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

MOST_NODES = 8
"""Most nodes that a search may choose from for a table within one node."""
_NODE = "_neuroshard_node"
"""Attribute of a table-column-wise option: the node of its shards."""
_EQUAL = "_neuroshard_equal"
"""Attribute of the column-wise options of `equal_columns`."""


class FreeOption(ShardingOption):
    """An option that stands for several ways to shard its table.

    For TorchRec's parts it is the option that it was made from.

    Attributes:
        ways: The options to choose from, including this one. A search can place all of
            them or none.
    """

    def __init__(self, option: ShardingOption, ways: Sequence[ShardingOption]) -> None:
        option = copy.copy(option)  # reading its shards below lists them
        self.__dict__.update(vars(option))
        self._option, self.shards = option, option.shards
        self.ways = tuple(ways)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingOption:
        """Return a copy of the single option, without the other ways."""
        copied: ShardingOption = copy.deepcopy(self._option, memo)
        return copied

    def __hash__(self) -> int:
        """Hash what differs between proposals, which TorchRec compares by hash."""
        return hash((self.fqn, len(self.ways), self.sharding_type, self.compute_kernel))

    @staticmethod
    def ways_of(option: ShardingOption) -> tuple[ShardingOption, ...]:
        """Return the ways that a proposed option stands for."""
        return option.ways if isinstance(option, FreeOption) else (option,)


def searched_type(option: ShardingOption) -> str:
    """Return an option's sharding type in the search.

    The search keeps the shards of a sequence table that is split by columns, since they
    have one width in a module; see `sequence_splits`. It also keeps the shards of
    `equal_columns`.
    """
    kind = str(option.sharding_type)
    if kind != COLUMN_WISE or len(option.shards) == 1:
        return kind
    is_kept = _EQUAL in vars(option) or not is_pooled(option)
    return EQUAL_COLUMNS if is_kept else kind


def is_placeable(option: ShardingOption, reader: TableReader) -> bool:
    """Whether a search may choose the option's shards and ranks.

    It may if the option has a cost and its shards are split as in `sharding_types`.
    """
    kind = SHARDING_TYPES.get(searched_type(option))
    if kind is None or option.dependency is not None or not reader.has_cost(option):
        return False
    if reader.run_fault(option):
        return False
    if kind.in_columns:  # a search may leave the table whole
        whole = int(option.tensor.shape[1])
        anywhere = option.sharding_type != TABLE_COLUMN_WISE
        is_free = anywhere or node_ranks(option, reader) is not None
        return is_free and whole <= reader.most_columns(in_fused_bags=is_pooled(option))
    size = kind.block_size(reader.world_size, reader.node_size)
    # Buckets and unequal memory of ranks lead to other splits of rows.
    rows, shards = int(option.tensor.shape[0]), sample_shards(option)
    count = int(option.num_shards)
    if count % size or not 0 < count <= reader.world_size:
        return False
    if int(shards[0].size[1]) != int(shards[-1].size[1]):
        return False
    if len(shards) < count:  # not listed yet, so the rows are even
        return True
    block = [kind.rows_at(place, rows, size)[1] for place in range(size)]
    return block * (count // size) == [int(s.size[0]) for s in shards]


def useful_ways(
    tables: Sequence[Sequence[ShardingOption]],
) -> list[list[ShardingOption]]:
    """Return each table's ways without those that its other ways include.

    A column-wise table may stay whole. So its table-wise option is useful only if
    another table of the module can only be table-wise, and both can share a kernel. The
    same holds for the table-column-wise option of a table that may be column-wise.
    The column-wise option of a sequence table has fixed shards, so the table keeps its
    table-wise option. If it is one shard, it is useful only if another table of the
    module can only be column-wise.

    Args:
        tables: The ways of each table, all placeable.
    """
    kinds = [(ways[0].path, {o.sharding_type for o in ways}) for ways in tables if ways]
    whole_modules = {
        path for path, own in kinds if own & COLUMN_SHARDED_TYPES == {TABLE_WISE}
    }
    column_modules = {
        path for path, own in kinds if own & {TABLE_WISE, COLUMN_WISE} == {COLUMN_WISE}
    }
    node_modules = {
        path
        for path, own in kinds
        if TABLE_COLUMN_WISE in own and COLUMN_WISE not in own
    }
    found = []
    for ways in tables:
        columns = {o.compute_kernel for o in ways if searched_type(o) == COLUMN_WISE}
        whole = {o.compute_kernel for o in ways if o.sharding_type == TABLE_WISE}
        included = {TABLE_COLUMN_WISE: columns, TABLE_WISE: columns}
        if ways and not is_pooled(ways[0]):
            included = {TABLE_COLUMN_WISE: columns, COLUMN_WISE: whole}
            if ways[0].path in column_modules:
                included.pop(COLUMN_WISE)
        elif ways and ways[0].path in whole_modules:
            included.pop(TABLE_WISE)
        if ways and ways[0].path in node_modules:
            included.pop(TABLE_COLUMN_WISE)
        found.append(
            [
                o
                for o in ways
                if o.compute_kernel not in included.get(searched_type(o), ())
            ]
        )
    return found


def on_nodes(
    option: ShardingOption, reader: TableReader, number: int
) -> list[ShardingOption]:
    """Return copies of a table-column-wise option, one per node.

    Args:
        option: Any option. There are no copies for other types or on a single node.
        reader: Knows the devices.
        number: The table's number. If nodes are equal, a search takes the first copy,
            so each table starts with another node. With many nodes, it gets the first
            `MOST_NODES` from there.
    """
    num_nodes = reader.world_size // reader.node_size
    if option.sharding_type != TABLE_COLUMN_WISE or num_nodes == 1:
        return []
    found = []
    for place in range(min(num_nodes, MOST_NODES)):
        found.append(copy.copy(option))
        vars(found[-1])[_NODE] = (number + place) % num_nodes
    return found


def node_ranks(option: ShardingOption, reader: TableReader) -> range | None:
    """Return the ranks of the node that an option's shards must be on.

    Args:
        option: Any option.
        reader: Knows the devices.

    Returns:
        None if the option is for no particular node; see `on_nodes`.
    """
    size = reader.node_size
    node = vars(option).get(_NODE, 0 if size == reader.world_size else None)
    return None if node is None else range(node * size, (node + 1) * size)


def even_rows(option: ShardingOption, reader: TableReader) -> list[ShardingOption]:
    """Return a copy of a row-wise option with the same number of rows on each rank.

    If the topology has ranks of different memory, TorchRec splits rows in proportion to
    it. Searches do not support that.

    Args:
        option: Any option. There is no copy for other types, or if rows are already
            even or in buckets.
        reader: Knows the table and the devices.

    Returns:
        Options without estimates.
    """
    kind = SHARDING_TYPES.get(option.sharding_type)
    if kind is None or not kind.splits_rows or kind.block != "world":
        return []
    config = reader.config(option)
    if config is None or config.use_virtual_table or isinstance(option, SpreadOption):
        return []
    rows, width = (int(n) for n in option.tensor.shape)
    world_size = reader.world_size
    parts = [kind.rows_at(rank, rows, world_size) for rank in range(world_size)]
    if [int(s.size[0]) for s in option.shards] == [count for _, count in parts]:
        return []
    other = copy.copy(option)
    other.shards = [Shard(size=[n, width], offset=[first, 0]) for first, n in parts]
    return [other]


def equal_columns(
    option: ShardingOption,
    reader: TableReader,
    least_columns: int = COLUMN_MULTIPLE,
) -> list[ShardingOption]:
    """Return copies of a column-wise option of a table too wide for one kernel.

    The search may leave column-wise tables whole, so it cannot place these. Each copy
    has equal shards that kernels support, at most one per rank. TorchRec only offers
    shards of `min_partition` columns, several of them on a rank.

    Args:
        option: Any option. There are no copies for others.
        reader: Knows the devices and the constraints (`min_partition`).
        least_columns: Default of `min_partition`.

    Returns:
        Options without estimates.
    """
    rows, width = (int(n) for n in option.tensor.shape)
    widest = reader.most_columns(in_fused_bags=True)
    if option.sharding_type != COLUMN_WISE or width <= widest or not is_pooled(option):
        return []
    least = min_partition(option, reader, least_columns)
    found = []
    for count in range(-(-width // widest), reader.world_size + 1):
        part, rest = divmod(width, count)
        if rest or part % COLUMN_MULTIPLE or part < least:
            continue
        other = copy.copy(option)
        vars(other)[_EQUAL] = True
        other.shards = [
            Shard(size=[rows, part], offset=[0, n * part]) for n in range(count)
        ]
        found.append(other)
    return found


def other_grids(
    option: ShardingOption,
    reader: TableReader,
    least_columns: int = COLUMN_MULTIPLE,
) -> list[ShardingOption]:
    """Return copies of a grid-sharded option with other equal blocks of columns.

    TorchRec only offers blocks of `min_partition` columns, and places several blocks of
    a table on a node if there are more blocks than nodes. Here each block has its own
    node, and blocks may be wider, down to two blocks; one, if no other number of blocks
    fits the nodes.

    Args:
        option: Any option. There are no copies for other types.
        reader: Knows the devices and the constraints (`min_partition`).
        least_columns: Default of `min_partition`.

    Returns:
        Options without estimates.
    """
    kind = SHARDING_TYPES.get(option.sharding_type)
    if kind is None or kind.in_columns or not kind.splits_columns:
        return []
    size = kind.block_size(reader.world_size, reader.node_size)
    width, own = int(option.tensor.shape[1]), int(option.shards[0].size[1])
    narrowest = min_partition(option, reader, least_columns)
    widest = reader.most_columns(in_fused_bags=is_pooled(option))
    found = []
    widths = [
        width // count
        for count in range(1, reader.world_size // size + 1)
        if not width % (count * COLUMN_MULTIPLE)
        and narrowest <= width // count <= widest
    ]
    several = [block for block in widths if block not in (width, own)]
    is_placeable_itself = option.num_shards <= reader.world_size
    for block in several or (() if is_placeable_itself else widths):
        other = copy.copy(option)
        other.shards = [
            Shard(size=[int(s.size[0]), block], offset=[int(s.offset[0]), column])
            for column in range(0, width, block)
            for s in option.shards[:size]
        ]
        found.append(other)
    return found


def min_partition(
    option: ShardingOption, reader: TableReader, least_columns: int
) -> int:
    """Return the narrowest width that a constraint allows, a multiple of four."""
    constraint = reader.constraint(option)
    asked = (constraint.min_partition if constraint else None) or least_columns
    return math.ceil(asked / COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def narrowest_shard(
    option: ShardingOption,
    reader: TableReader,
    least_columns: int = COLUMN_MULTIPLE,
) -> int:
    """Return the columns of the narrowest shard that a table may be split into.

    Args:
        option: An option of the table; its sharding type decides.
        reader: Knows the constraints (`min_partition`).
        least_columns: Default of `min_partition`; see `PlanCosts.least_columns`.
    """
    if searched_type(option) not in COLUMN_SHARDED_TYPES:
        return int(sample_shards(option)[0].size[1])
    splits = SHARDING_TYPES[option.sharding_type].splits_columns
    if not splits or not is_pooled(option):
        return int(option.tensor.shape[1])
    least = COLUMN_MULTIPLE * int(option.batch_size)
    if any(least % codec.row_values for codec in option_codecs(option)):
        return int(option.tensor.shape[1])
    least = min_partition(option, reader, least_columns)
    return min(int(option.tensor.shape[1]), least)
