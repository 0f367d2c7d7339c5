"""The problem (a sharding task) and its answer (a placement of column shards)."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.placement_rules import (
    PlacementRules,
    joined_sets,
    listed,
)
from torchrec_neuroshard.errors import ConfigError, InfeasibleError, PlacementError
from torchrec_neuroshard.tables.sharding_types import (
    COLUMN_SHARDED_TYPES,
    COLUMN_WISE,
    SHARDING_TYPES,
    ShardingType,
)
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE, TableConfig, check_tables

__all__ = [
    "ALL_ROWS",
    "HOST",
    "ColumnShard",
    "HostRows",
    "KernelFactors",
    "Placement",
    "ShardingTask",
    "WireCodec",
    "capitalised",
    "format_bytes",
]

Floats = npt.NDArray[np.float64]

ALL_ROWS = -1

_UNITS = (("GiB", 2**30, 10 * 2**20), ("MiB", 2**20, 2**20), ("KiB", 2**10, 2**10))
"""Name, bytes, and the least that is shown in it."""


def format_bytes(num_bytes: float) -> str:
    """Show memory in GiB; what would be 0.00 there, in MiB, KiB or bytes."""
    for unit, size, least in _UNITS:
        if num_bytes >= least:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def capitalised(text: str) -> str:
    """Begin a text with a capital; what follows stays as it is."""
    return f"{text[:1].upper()}{text[1:]}"


HOST = "in the host's memory, "
"""How messages begin that are about a rank's part of that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireCodec:
    """How a collective's values are coded on their way; by default not at all."""

    name: str = "fp32"
    wire_bytes: float = 4.0
    """That are sent for each value, scales of rows included."""
    encode_bytes: float = 0.0
    """Memory that coding a value reads and writes, in order: `ShardEncoder.stream_ms`
    each."""
    decode_bytes: float = 0.0
    """The same of the way back."""
    launches: float = 0.0
    """What both take besides, in launches of the fused forward kernel."""
    row_values: int = 1
    """Values that share a scale: what is sent to a rank must be a multiple of them."""


_PLAIN = (WireCodec(), WireCodec())


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRows:
    """Rows in the host's memory, which a GPU's kernels read there or from a cache."""

    gb_per_s: float
    """Bandwidth to that memory, one way; a cost model that knows its own takes that."""
    missed: float | None = None
    """Share of a batch's distinct rows that the cache lacks; None: there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFactors:
    """What a kernel that was not measured takes, in the measured fused one's terms."""

    forward: float = 1.0
    """Times what the fused kernel takes above its launch."""
    backward: float = 1.0
    passes: float = 0.0
    """Over all weights, in order (`ShardEncoder.stream_ms`): to clear and copy the
    gradient, and for the optimizer. Part of the backward."""
    host: HostRows | None = None
    """Rows in the host's memory; None: on the device."""

    @property
    def has_cache(self) -> bool:
        """Whether rows in the host's memory have a cache on the device."""
        return self.host is not None and self.host.missed is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingTask:
    """Tables to put on ranks, and the rules.

    A table that may be sharded in several ways (types, kernels) stands among `tables`
    once for each, and `alternatives` says which of them are the same table.
    """

    tables: tuple[TableConfig, ...]
    world_size: int
    batch_size: int
    """Samples over all ranks of one iteration: what a kernel sees."""
    local_world_size: int = 0
    """Ranks per node; 0 means all."""
    memory_bytes: tuple[int, ...] = ()
    """Bytes that each rank has for shards; empty is unlimited."""
    fixed_bytes: tuple[int, ...] = ()
    """Per table: bytes that every shard of it needs whatever its width (input buffers,
    row-wise optimizer state). Empty: 0."""
    column_bytes: tuple[float, ...] = ()
    """Per table: bytes per column of a shard. Empty: the weights alone."""
    host_memory_bytes: tuple[int, ...] = ()
    """Bytes of the host's memory that each rank has for shards, beside its own; empty
    is unlimited."""
    host_fixed_bytes: tuple[int, ...] = ()
    """As `fixed_bytes`, in the host's memory. Empty: 0."""
    host_column_bytes: tuple[float, ...] = ()
    """As `column_bytes`, in the host's memory. Empty: 0."""
    min_widths: tuple[int, ...] = ()
    """Per table: narrowest shard allowed; a table's own width forbids splitting it, and
    is taken where its sharding type keeps columns whole. Of a grid, the width of every
    shard. Empty: 4."""
    max_shards: tuple[int, ...] = ()
    """Per table: most shards. Empty: the number of ranks."""
    groups: tuple[int, ...] = ()
    """Per table: fusion group; tables of one group on one rank run as one kernel.
    Groups count from 0. Empty: one group."""
    stages: tuple[int, ...] = ()
    """Per fusion group: stage, counting from 0. The groups of a stage share its index
    and output collectives; stages run one after another. Empty: one stage."""
    stage_names: tuple[str, ...] = ()
    """What the stages are called in reports. Empty: "stage 0" and so on."""
    uneven: bool = True
    """Whether shards of one table may differ in width."""
    allowed_ranks: tuple[tuple[int, ...], ...] = ()
    """Per table: the ranks that may hold shards of it, which `max_shards` is lowered to
    the number of. An empty inner tuple is any rank, an empty field any for all."""
    together: tuple[tuple[int, ...], ...] = ()
    """Sets of tables (indices) that lie whole, all of a set on one common rank: their
    `max_shards` becomes 1. Sets that share a table are joined. Of tables with
    alternatives, each has one in every set: they are chosen as one."""
    apart: tuple[tuple[int, ...], ...] = ()
    """Sets of tables (indices) of which no rank holds shards of more than one."""
    alternatives: tuple[tuple[int, ...], ...] = ()
    """Sets of tables (indices), of one name each, of which one is placed: the ways in
    which a table may be sharded. Tables in no set are placed as they stand."""
    sharding_types: tuple[str, ...] = ()
    """Per table: a key of SHARDING_TYPES. A table is split by columns as far as this
    and the fields above let it. Empty: column-wise."""
    pooled: tuple[bool, ...] = ()
    """Per table: whether its module pools. Empty: all do."""
    codecs: tuple[tuple[WireCodec, WireCodec], ...] = ()
    """Per table: how its outputs travel, forward, and their gradients, backward; alike
    in a stage. Empty: as fp32."""
    repeats: tuple[float, ...] = ()
    """Per table: how many times as many ids its samples have as are looked up, once
    repeated ids of a rank's samples were removed. Empty: 1, none are removed."""
    kernels: tuple[KernelFactors | None, ...] = ()
    """Per table: how its kernel differs from the measured fused one. Empty: not."""
    node_size: int = 0
    """Ranks that share the rows of a table-row-wise table; 0: `local_world_size`."""

    def __post_init__(self) -> None:
        self._check_names()
        world_size, count = self.world_size, len(self.tables)
        if world_size < 1 or self.batch_size < 1:
            raise ConfigError(
                "world_size and batch_size must be at least 1, got "
                f"{world_size} and {self.batch_size}"
            )
        for name, ranks in (
            ("local_world_size", self.local_world_size or world_size),
            ("node_size", self.node_size or self.local_world_size or world_size),
        ):
            if ranks < 1 or world_size % ranks:
                raise ConfigError(
                    f"world_size ({world_size}) must be a multiple of {name} ({ranks})"
                )
            self._set(name, ranks)
        self._fill(
            "table",
            count,
            fixed_bytes=(0,) * count,
            column_bytes=tuple(t.weight_bytes / t.embedding_dim for t in self.tables),
            host_fixed_bytes=(0,) * count,
            host_column_bytes=(0.0,) * count,
            min_widths=(COLUMN_MULTIPLE,) * count,
            max_shards=(world_size,) * count,
            groups=(0,) * count,
            allowed_ranks=((),) * count,
            sharding_types=(COLUMN_WISE,) * count,
            pooled=(True,) * count,
            codecs=(_PLAIN,) * count,
            repeats=(1.0,) * count,
            kernels=(None,) * count,
        )
        self._fill("group", self.num_groups, stages=(0,) * self.num_groups)
        names = tuple(f"stage {s}" for s in range(self.num_stages))
        self._fill("stage", self.num_stages, stage_names=names)
        for limits in ("memory_bytes", "host_memory_bytes"):
            if getattr(self, limits):
                self._fill("rank", world_size, **{limits: ()})
        # What one table alone is asked needs no set.
        sets = joined_sets(self._checked_sets("together"))
        self._set("together", tuple(tables for tables in sets if len(tables) > 1))
        apart = sorted(t for t in self._checked_sets("apart") if len(t) > 1)
        self._set("apart", tuple(apart))
        self._check_alternatives()
        self._check_tables({t for tables in sets for t in tables})

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _fill(self, what: str, count: int, **defaults: tuple[Any, ...]) -> None:
        """Set fields that are empty to a default, and check the length of all."""
        for name, default in defaults.items():
            value = getattr(self, name) or default
            if len(value) != count:
                raise ConfigError(
                    f"{name} needs one value per {what} ({count}), got {len(value)}"
                )
            self._set(name, value)

    def _check_names(self) -> None:
        """Check that names differ, but for the ways to shard one table."""
        seen: set[int] = set()
        sets = sorted(self._checked_sets("alternatives"))
        for ways in sets:
            if seen.intersection(ways):
                raise ConfigError(
                    f"alternatives has table {min(seen.intersection(ways))} twice; a "
                    "table is in one set at most"
                )
            seen.update(ways)
            first = self.tables[ways[0]].name
            for way in ways[1:]:
                if self.tables[way].name != first:
                    raise ConfigError(
                        f"alternatives has tables '{first}' and "
                        f"'{self.tables[way].name}' in one set; ways to shard one "
                        "table have its name"
                    )
        self._set("alternatives", tuple(ways for ways in sets if len(ways) > 1))
        check_tables([self.tables[ways[0]] for ways in self.ways])

    def _check_alternatives(self) -> None:
        """Check that the ways of a table lie together with others all or none."""
        number = {t: n for n, tables in enumerate(self.together) for t in tables}
        for ways in self.alternatives:
            sets = {number.get(way, -1 - way) for way in ways}
            if len(sets) < len(ways) or 0 < sum(n >= 0 for n in sets) < len(ways):
                raise ConfigError(
                    f"table '{self.tables[ways[0]].name}' lies together with others in "
                    "some of its alternatives; put each of them into a set of its own"
                )

    def _check_tables(self, whole: Container[int]) -> None:
        """Check each table's type and ranks; lower its shards to what these let it.

        Args:
            whole: Tables that lie together with others.
        """
        every = tuple(range(self.world_size))
        most, narrowest = list(self.max_shards), list(self.min_widths)
        allowed: list[tuple[int, ...]] = []
        for i, table in enumerate(self.tables):
            if self.sharding_types[i] not in SHARDING_TYPES:
                raise ConfigError(
                    f"table '{table.name}': unknown sharding type "
                    f"'{self.sharding_types[i]}'; one of {', '.join(SHARDING_TYPES)}"
                )
            ranks = tuple(sorted(set(self.allowed_ranks[i])))
            odd = [r for r in ranks if not 0 <= r < self.world_size]
            if odd:
                raise ConfigError(
                    f"table '{table.name}': allowed_ranks has rank {odd[0]}, which is "
                    f"not in 0 to {self.world_size - 1}"
                )
            allowed.append(() if ranks == every else ranks)
            kind, blocks = self.sharding_type(i), self.world_size // self.block_size(i)
            if not kind.splits_columns and not kind.in_columns:
                narrowest[i], blocks = table.embedding_dim, 1
            most[i] = min(most[i], blocks, len(ranks) or self.world_size)
            if i in whole:
                most[i] = 1
        self._set("max_shards", tuple(most))
        self._set("min_widths", tuple(narrowest))
        self._set("allowed_ranks", tuple(allowed) if any(allowed) else ())

    def _checked_sets(self, name: str) -> set[tuple[int, ...]]:
        """Return sets of tables, each sorted and without repeats."""
        sets: tuple[tuple[int, ...], ...] = getattr(self, name)
        for tables in sets:
            odd = [t for t in tables if not 0 <= t < len(self.tables)]
            if odd:
                raise ConfigError(
                    f"{name} has table {odd[0]}, which is not in 0 to "
                    f"{len(self.tables) - 1}"
                )
        return {tuple(sorted(set(tables))) for tables in sets if tables}

    def sharding_type(self, table: int) -> ShardingType:
        """How a table is laid out."""
        return SHARDING_TYPES[self.sharding_types[table]]

    def block_size(self, table: int) -> int:
        """Ranks that share a table's rows or have replicas of it."""
        return self.sharding_type(table).block_size(self.world_size, self.node_size)

    def block_width(self, table: int) -> int:
        """Columns of each block's shards; of a table in column shards, all columns."""
        width = self.tables[table].embedding_dim
        in_columns = self.sharding_type(table).in_columns
        return width if in_columns else min(width, self.min_widths[table])

    def num_blocks(self, table: int) -> int:
        """Blocks that the columns of a table lie in; 1 for a table in column shards."""
        return -(-self.tables[table].embedding_dim // self.block_width(table))

    @property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """Every table: the indices that stand for it, sorted by the first."""
        several = {i for ways in self.alternatives for i in ways}
        alone = [(i,) for i in range(len(self.tables)) if i not in several]
        return tuple(sorted([*alone, *self.alternatives]))

    @property
    def has_choices(self) -> bool:
        """Whether any table may or must be sharded other than by columns alone."""
        return bool(self.alternatives) or not COLUMN_SHARDED_TYPES.issuperset(
            self.sharding_types
        )

    @property
    def num_groups(self) -> int:
        """Fusion groups."""
        return max(self.groups) + 1

    @property
    def num_stages(self) -> int:
        """Sets of groups that share their collectives."""
        return max(self.stages) + 1

    @property
    def rules(self) -> PlacementRules:
        """Which ranks tables may be on, and in whose company."""
        return PlacementRules(
            names=tuple(t.name for t in self.tables),
            world_size=self.world_size,
            allowed={t: ranks for t, ranks in enumerate(self.allowed_ranks) if ranks},
            together=self.together,
            apart=self.apart,
        )

    @property
    def memory(self) -> tuple[Floats, Floats, Floats]:
        """Memory of ranks, `M x W`, and of shards, fixed and per column, `M x T` each.

        In bytes: of the device and, where it is limited, of the host. Unlimited memory
        is infinite.
        """
        device = self.memory_bytes, self.fixed_bytes, self.column_bytes
        host = self.host_memory_bytes, self.host_fixed_bytes, self.host_column_bytes
        parts = (device, host) if self.host_memory_bytes else (device,)
        everywhere = (math.inf,) * self.world_size
        return (
            np.array([caps or everywhere for caps, _, _ in parts], dtype=np.float64),
            np.array([fixed for _, fixed, _ in parts], dtype=np.float64),
            np.array([column for _, _, column in parts], dtype=np.float64),
        )

    def shard_bytes(self, table: int, width: int) -> float:
        """Device memory of one shard [bytes]."""
        return self.fixed_bytes[table] + self.column_bytes[table] * width


@dataclass(frozen=True, order=True, slots=True)
class ColumnShard:
    """Columns `offset` to `offset + width` of a table, or some rows of them."""

    table: int
    """Index into the task's tables."""
    offset: int
    width: int
    rank: int
    row_offset: int = 0
    rows: int = ALL_ROWS
    """Rows held; ALL_ROWS where the table is not split by rows."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every column of every table lives."""

    world_size: int
    shards: tuple[ColumnShard, ...]
    """Sorted by table, then offset."""

    @classmethod
    def from_widths(
        cls,
        world_size: int,
        triples: Sequence[tuple[int, int, int]],
        task: ShardingTask | None = None,
    ) -> Placement:
        """Build a placement from (table, width, rank) triples.

        Shards of one table on one rank become one; columns are handed out in order of
        rank, block by block.

        Args:
            world_size: Ranks.
            triples: What ranks hold.
            task: Says how tables are laid out. None: by columns.
        """
        widths: dict[tuple[int, int], int] = {}
        for table, width, rank in triples:
            widths[(table, rank)] = widths.get((table, rank), 0) + width
        shards, offsets = [], dict[int, int]()
        for (table, rank), width in sorted(widths.items()):
            size = 1 if task is None else task.block_size(table)
            offset, place = offsets.get(table, 0), rank % size
            if place == size - 1:
                offsets[table] = offset + width
            row_offset, rows = 0, ALL_ROWS
            if task is not None and task.sharding_type(table).splits_rows:
                row_offset, rows = task.sharding_type(table).rows_at(
                    place, task.tables[table].num_embeddings, size
                )
            shards.append(ColumnShard(table, offset, width, rank, row_offset, rows))
        return cls(world_size, tuple(shards))

    def check(self, task: ShardingTask) -> None:
        """Check the placement against its task.

        Raises:
            PlacementError: A column is missing or placed twice, a width is not allowed,
                a rank does not exist or is not one that the table may be on, or tables
                lie apart that belong together or the other way round.
            InfeasibleError: A rank holds more than its memory.
        """
        if self.world_size != task.world_size:
            raise PlacementError(
                f"placement is for {self.world_size} ranks, the task has "
                f"{task.world_size}"
            )
        by_table: dict[int, list[ColumnShard]] = {
            i: [] for i in range(len(task.tables))
        }
        for shard in self.shards:
            if shard.table not in by_table:
                raise PlacementError(
                    f"shard of table {shard.table}, which is not there"
                )
            by_table[shard.table].append(shard)
        for ways in task.ways:
            held = [i for i in ways if by_table[i]] or [ways[0]]
            if len(held) > 1:
                raise PlacementError(
                    f"table '{task.tables[held[0]].name}' is placed both "
                    f"{task.sharding_types[held[0]]} and {task.sharding_types[held[1]]}"
                )
            self._check_table(task, held[0], by_table[held[0]])
        ranks = {
            i: {s.rank for s in shards} for i, shards in by_table.items() if shards
        }
        violation = task.rules.violation(ranks)
        if violation is not None:
            raise PlacementError(violation)
        caps_MW, used_MW = task.memory[0], self.rank_bytes(task)
        for place, rank in np.argwhere(used_MW > caps_MW)[:1].tolist():
            raise InfeasibleError(
                f"{HOST * place}rank {rank} holds "
                f"{format_bytes(used_MW[place, rank])}, it has "
                f"{format_bytes(caps_MW[place, rank])}"
            )

    def _check_table(
        self, task: ShardingTask, i: int, shards: Sequence[ColumnShard]
    ) -> None:
        table = task.tables[i]
        if not task.sharding_type(i).in_columns:
            shards = self._checked_blocks(task, i, shards)
        end = 0
        for shard in sorted(shards, key=lambda s: s.offset):
            if shard.offset != end:
                raise PlacementError(
                    f"table '{table.name}': columns {min(end, shard.offset)} to "
                    f"{max(end, shard.offset)} are missing or placed twice"
                )
            end += shard.width
            whole = shard.width == table.embedding_dim
            if shard.width % COLUMN_MULTIPLE or (
                not whole and shard.width < task.min_widths[i]
            ):
                raise PlacementError(
                    f"table '{table.name}': a shard is {shard.width} wide; widths are "
                    f"multiples of {COLUMN_MULTIPLE} and at least {task.min_widths[i]}"
                )
            if not 0 <= shard.rank < self.world_size:
                raise PlacementError(
                    f"table '{table.name}': rank {shard.rank} is not in 0 to "
                    f"{self.world_size - 1}"
                )
        if end != table.embedding_dim:
            raise PlacementError(
                f"table '{table.name}': {end} of {table.embedding_dim} columns placed"
            )
        if len({s.rank for s in shards}) != len(shards):
            raise PlacementError(
                f"table '{table.name}': a rank holds two shards of it; join them"
            )
        if len(shards) > max(1, task.max_shards[i]):
            raise PlacementError(
                f"table '{table.name}': {len(shards)} shards, at most "
                f"{task.max_shards[i]} allowed"
            )

    def _checked_blocks(
        self, task: ShardingTask, i: int, shards: Sequence[ColumnShard]
    ) -> list[ColumnShard]:
        """Check the ranks and rows of each block; return the first shard of each."""
        table, size = task.tables[i], task.block_size(i)
        kind = task.sharding_type(i)
        blocks: dict[int, list[ColumnShard]] = {}
        for shard in sorted(shards, key=lambda s: (s.rank, s.offset)):
            blocks.setdefault(shard.rank // size, []).append(shard)
        first = []
        for number, held in blocks.items():
            ranks = list(range(number * size, (number + 1) * size))
            if [s.rank for s in held] != ranks or len({s.width for s in held}) > 1:
                raise PlacementError(
                    f"table '{table.name}' ({kind.name}) must be alike on all of "
                    f"{listed(ranks)}"
                )
            end = 0
            for shard in held if kind.splits_rows else ():
                if shard.row_offset != end:
                    raise PlacementError(
                        f"table '{table.name}': rows {min(end, shard.row_offset)} to "
                        f"{max(end, shard.row_offset)} are missing or placed twice"
                    )
                end += shard.rows
            if kind.splits_rows and end != table.num_embeddings:
                raise PlacementError(
                    f"table '{table.name}': {end} of {table.num_embeddings} rows placed"
                )
            first.append(held[0])
        return first

    def rank_bytes(self, task: ShardingTask) -> Floats:
        """Return the memory that each rank holds, `M x W` (see `task.memory`)."""
        caps_MW, fixed_MT, column_MT = task.memory
        used_MW = np.zeros_like(caps_MW)
        table = [s.table for s in self.shards]
        width, rank = [s.width for s in self.shards], [s.rank for s in self.shards]
        for used_W, fixed_T, column_T in zip(used_MW, fixed_MT, column_MT, strict=True):
            np.add.at(used_W, rank, fixed_T[table] + column_T[table] * width)
        return used_MW

    def table_shards(self, table: int) -> tuple[ColumnShard, ...]:
        """Return the shards of one table, by offset."""
        return tuple(s for s in self.shards if s.table == table)
