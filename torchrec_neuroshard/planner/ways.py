"""The ways to shard tables: a row for each table, type, kernel, cache, block and node.

Tables of a module that differ only in their rows and inputs are a *class*. Rows of one
class, sharding type and kernel share a *kind*: an option that answers whatever does not
depend on the table's rows and inputs. `classes` lists rows by class. `ways_of` makes
rows of any options; each then is a kind of its own.

Shapes: `R` rows, `K` kinds, `T` tables.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import Shard, ShardingOption

from torchrec_neuroshard.planner.option_facts import (
    FACTS,
    VERDICT,
    has_open_cache,
    is_pooled,
    option_codecs,
)
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.spread_options import SpreadOption, sample_shards
from torchrec_neuroshard.tables.sharding_types import (
    COLUMN_SHARDED_TYPES,
    COLUMN_WISE,
    EQUAL_COLUMNS,
    SHARDING_TYPES,
    TABLE_WISE,
)
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

MOST_NODES = 8
"""Most nodes that a search may choose from for a table within one node."""
_NODE = "_neuroshard_node"
"""Attribute of a table-column-wise option: the node of its shards."""
_EQUAL = "_neuroshard_equal"
"""Attribute of the column-wise options of `equal_columns`."""
_OF_TABLE = frozenset(
    (
        "name",
        "_tensor",
        "_module",
        "input_lengths",
        "num_poolings",
        "feature_names",
        FACTS,
    )
)
"""Fields of an option that differ between tables of one class."""
_NOT_SHARED = frozenset((FACTS, VERDICT, "samples", "_world_size", "_price"))
"""Fields of a kind that its tables' options do not get: caches, and lazy shards."""


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """Ways to shard tables, a row each."""

    tables: tuple[ShardingOption, ...]
    """Options that describe the table of a row, whatever its sharding type."""
    kinds: tuple[ShardingOption, ...]
    """Options with the sharding type, kernel and settings of a row."""
    table_R: Ints
    """Each row's place in `tables`. Rows with replicas have another place than others
    of the same table, since dense kernels ignore a sharder's parameters."""
    kind_R: Ints
    """Each row's place in `kinds`."""

    @property
    def num_rows(self) -> int:
        """Number of ways, over all tables."""
        return len(self.kind_R)

    def take(self, rows: npt.ArrayLike) -> Ways:
        """Return some of the rows, in this order."""
        index = np.asarray(rows, dtype=np.int64)
        return Ways(self.tables, self.kinds, self.table_R[index], self.kind_R[index])

    def joined(self, others: Ways) -> Ways:
        """Return these rows, and after them those of others."""
        return Ways(
            (*self.tables, *others.tables),
            (*self.kinds, *others.kinds),
            np.concatenate([self.table_R, others.table_R + len(self.tables)]),
            np.concatenate([self.kind_R, others.kind_R + len(self.kinds)]),
        )

    def option(self, row: int) -> ShardingOption:
        """Return a row as TorchRec's option."""
        table = self.tables[self.table_R[row]]
        kind = self.kinds[self.kind_R[row]]
        return table if table is kind else _like(table, kind)

    def options(self, rows: Iterable[int]) -> list[ShardingOption]:
        """Return rows as TorchRec's options."""
        return [self.option(row) for row in rows]

    def kinds_of(self, rows: Iterable[int]) -> list[ShardingOption]:
        """Return the kind of each of these rows."""
        return [self.kinds[k] for k in self.kind_R[list(rows)].tolist()]

    def embedding_R(self) -> Ints:
        """Return the rows and columns of each row's table, `R x 2`."""
        shape_T2 = np.array([tuple(o.tensor.shape) for o in self.tables])
        size_R2: Ints = shape_T2.reshape(-1, 2)[self.table_R]
        return size_R2

    def largest_R2(self, world_size: int, node_size: int) -> Ints:
        """Return rows and columns of the largest shard that each row lists, `R x 2`.

        Args:
            world_size: Number of ranks.
            node_size: Ranks that share the rows of a table-row-wise table.
        """
        size_R2 = self.embedding_R().copy()
        order = np.argsort(self.kind_R, kind="stable")
        used, first = np.unique(self.kind_R[order], return_index=True)
        for number, rows in zip(used.tolist(), np.split(order, first[1:]), strict=True):
            option = self.kinds[number]
            largest = max(s.size for s in sample_shards(option))
            if len(rows) == 1 and self.tables[self.table_R[rows[0]]] is option:
                size_R2[rows] = largest
                continue
            kind = SHARDING_TYPES[option.sharding_type]
            if kind.splits_rows:
                block = kind.block_size(world_size, node_size)
                size_R2[rows, 0] = -(-size_R2[rows, 0] // block)
            size_R2[rows, 1] = int(largest[1])
        return size_R2


def ways_of(options: Sequence[ShardingOption]) -> Ways:
    """Return options as ways, a row each."""
    row_R = np.arange(len(options))
    return Ways(tuple(options), tuple(options), row_R, row_R)


def _like(table: ShardingOption, kind: ShardingOption) -> ShardingOption:
    """Return an option of a table with a kind's sharding type, kernel and settings."""
    if isinstance(kind, SpreadOption):
        return SpreadOption.spread(_with_settings(table, kind), kind.num_shards)
    rows = int(table.tensor.shape[0])
    new = _with_settings(table, kind)
    whole = int(kind.tensor.shape[0])
    if rows == whole or kind.sharding_type in COLUMN_SHARDED_TYPES:
        sizes = [
            ([rows, int(s.size[1])], [0, int(s.offset[1])])
            if int(s.size[0]) == whole
            else (list(s.size), list(s.offset))
            for s in kind.shards
        ]
    else:
        size = sum(int(s.offset[1]) == 0 for s in kind.shards)
        part = SHARDING_TYPES[kind.sharding_type].rows_at
        sizes = []
        for number, s in enumerate(kind.shards):
            first, count = part(number % size, rows, size)
            sizes.append(([count, int(s.size[1])], [first, int(s.offset[1])]))
    new.shards = [Shard(size=size, offset=offset) for size, offset in sizes]
    return new


def _with_settings(table: ShardingOption, kind: ShardingOption) -> ShardingOption:
    """Return an option of a table with a kind's sharding type and settings.

    Fields of later releases that are not named here come from the kind.
    """
    new = ShardingOption.__new__(ShardingOption)
    own = {n: value for n, value in vars(table).items() if n in _OF_TABLE}
    settings = {n: v for n, v in vars(kind).items() if n not in _NOT_SHARED}
    vars(new).update({**settings, **own, "shards": []})
    return new


class FreeOption(ShardingOption):
    """An option that stands for several ways to shard its table.

    For TorchRec's parts it is the option that it was made from.

    Attributes:
        ways: The ways of all tables.
        rows: The rows of this table among them. A search can place all or none.

    Args:
        option: The option that others see.
        ways: The ways of all tables.
        rows: The rows of this table.
    """

    def __init__(self, option: ShardingOption, ways: Ways, rows: Sequence[int]) -> None:
        option = copy.copy(option)  # reading its shards below lists them
        self.__dict__.update(vars(option))
        self._option, self.shards = option, option.shards
        self.ways, self.rows = ways, tuple(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingOption:
        """Return a copy of the single option, without the other ways."""
        copied: ShardingOption = copy.deepcopy(self._option, memo)
        return copied

    def __hash__(self) -> int:
        """Hash what differs between proposals, which TorchRec compares by hash."""
        return hash((self.fqn, len(self.rows), self.sharding_type, self.compute_kernel))

    @staticmethod
    def ways_of(option: ShardingOption) -> tuple[ShardingOption, ...]:
        """Return the ways that a proposed option stands for, as options."""
        if not isinstance(option, FreeOption):
            return (option,)
        return tuple(option.ways.options(option.rows))

    @staticmethod
    def kinds_of(option: ShardingOption) -> list[ShardingOption]:
        """Return the kinds of the ways that a proposed option stands for."""
        is_free = isinstance(option, FreeOption)
        return option.ways.kinds_of(option.rows) if is_free else [option]


def proposed_ways(proposal: Sequence[ShardingOption]) -> tuple[Ways, list[list[int]]]:
    """Return the ways that the options of a proposal stand for, and each one's rows."""
    first = proposal[0]
    if isinstance(first, FreeOption) and all(
        isinstance(o, FreeOption) and o.ways is first.ways for o in proposal
    ):
        return first.ways, [list(o.rows) for o in proposal]
    tables = [FreeOption.ways_of(option) for option in proposal]
    ends = np.cumsum([len(own) for own in tables]).tolist()
    rows = [
        list(range(end - len(own), end)) for own, end in zip(tables, ends, strict=True)
    ]
    return ways_of([option for own in tables for option in own]), rows


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
        is_free = not kind.keeps_to_node or node_ranks(option, reader) is not None
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


def useful_ways(ways: Ways, tables: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return each table's ways without those that its other ways include.

    The search may leave a column-wise table whole, which is table-wise. So a table-wise
    way is useful only if another table of the module can only be table-wise, and both
    can share a kernel. The same holds for the table-column-wise way of a table that may
    be column-wise. The column-wise way of a sequence table has fixed shards, so the
    table keeps its table-wise way. If it is one shard, it is useful only if another
    table of the module can only be column-wise.

    Args:
        ways: Ways to shard tables.
        tables: The rows of each table, all placeable.
    """
    kinds_T = [tuple(ways.kind_R[list(rows)].tolist()) for rows in tables]
    listed = {own: [ways.kinds[k] for k in own] for own in dict.fromkeys(kinds_T)}
    needed: set[tuple[str, str]] = set()
    for kinds in listed.values():
        names = {o.sharding_type for o in kinds}
        needed |= {
            (o.path, o.sharding_type)
            for o in kinds
            if _includer(o, o.sharding_type) not in names
        }
    is_useful: dict[tuple[int, ...], list[bool]] = {}
    for own, kinds in listed.items():
        kernels: dict[str, set[str]] = {}
        types = [searched_type(o) for o in kinds]
        for option, name in zip(kinds, types, strict=True):
            kernels.setdefault(name, set()).add(option.compute_kernel)
        is_useful[own] = [
            (o.path, name) in needed
            or o.compute_kernel not in kernels.get(_includer(o, name), ())
            for o, name in zip(kinds, types, strict=True)
        ]
    return [
        [row for row, useful in zip(rows, is_useful[own], strict=True) if useful]
        for rows, own in zip(tables, kinds_T, strict=True)
    ]


def _includer(option: ShardingOption, sharding_type: str) -> str:
    """Return the type that a search may turn into an option's; "" without one."""
    kind = SHARDING_TYPES[sharding_type]
    return kind.includer(pooled=is_pooled(option)) or ""


def useful_options(
    options: Sequence[ShardingOption], reader: TableReader
) -> list[ShardingOption]:
    """Leave out options that other options of a table include for the search.

    Column-wise options of sequence tables stay, since they get other shards before the
    search.

    Args:
        options: All options of some tables.
        reader: Knows the devices.
    """
    tables: dict[tuple[str, str], list[int]] = {}
    for row, option in enumerate(options):
        # Column-wise options already cover table-wise ones.
        if is_pooled(option) and (
            option.sharding_type == TABLE_WISE
            or (
                option.sharding_type in COLUMN_SHARDED_TYPES
                and is_placeable(option, reader)
            )
        ):
            tables.setdefault((option.path, option.name), []).append(row)
    left_out = {row for rows in tables.values() for row in rows}
    for rows in useful_ways(ways_of(options), [*tables.values()]):
        left_out.difference_update(rows)
    return [o for row, o in enumerate(options) if row not in left_out]


def may_vary(option: ShardingOption, reader: TableReader) -> bool:
    """Whether the functions below may return variants of a kind's options."""
    kind = SHARDING_TYPES.get(option.sharding_type)
    if kind is None:
        return False
    splits_wide = option.sharding_type == COLUMN_WISE and int(
        option.tensor.shape[1]
    ) > reader.most_columns(in_fused_bags=True)
    is_grid = kind.splits_columns and not kind.in_columns
    is_uneven = kind.splits_rows and not isinstance(option, SpreadOption)
    varies = splits_wide or is_grid or is_uneven or kind.keeps_to_node
    return varies or has_open_cache(option)


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
    kind = SHARDING_TYPES.get(option.sharding_type)
    if kind is None or not kind.keeps_to_node or num_nodes == 1:
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
    option: ShardingOption, reader: TableReader, least_columns: int = COLUMN_MULTIPLE
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
    option: ShardingOption, reader: TableReader, least_columns: int = COLUMN_MULTIPLE
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
    option: ShardingOption, reader: TableReader, least_columns: int = COLUMN_MULTIPLE
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
