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

Floats = npt.NDArray[np.float64]

ALL_ROWS = -1

_UNITS = (("GiB", 2**30, 10 * 2**20), ("MiB", 2**20, 2**20), ("KiB", 2**10, 2**10))
"""Name, bytes, and the smallest size that is shown in this unit."""


def format_bytes(num_bytes: float) -> str:
    """Show memory in GiB, or in MiB, KiB or bytes where that would read 0.00."""
    for unit, size, least in _UNITS:
        if num_bytes >= least:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def capitalised(text: str) -> str:
    """Return a text with a capital first letter; the rest stays as it is."""
    return f"{text[:1].upper()}{text[1:]}"


HOST = "in the host's memory, "
"""Prefix of messages about a rank's share of the host's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireCodec:
    """How a collective codes its values; the default is fp32 without coding."""

    name: str = "fp32"
    wire_bytes: float = 4.0
    """Bytes sent per value, including the scales of rows."""
    encode_bytes: float = 0.0
    """Bytes that coding a value reads and writes in sequence. Each takes
    `ShardEncoder.stream_ms`."""
    decode_bytes: float = 0.0
    """The same for decoding."""
    launches: float = 0.0
    """Overhead of both, in launches of the fused forward kernel."""
    row_values: int = 1
    """Values that share a scale. Each rank is sent a multiple of this many."""


_PLAIN = (WireCodec(), WireCodec())


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRows:
    """Rows in the host's memory, which GPU kernels read directly or through a cache."""

    gb_per_s: float
    """One-way bandwidth to host memory. A cost model with its own figure ignores it."""
    missed: float | None = None
    """Share of a batch's distinct rows that the cache misses; None without a cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFactors:
    """Cost of an unmeasured kernel, relative to the measured fused kernel."""

    forward: float = 1.0
    """Factor on the fused kernel's time without its launch."""
    backward: float = 1.0
    passes: float = 0.0
    """Sequential passes over all weights (`ShardEncoder.stream_ms` per byte): clearing
    and copying the gradient, and the optimizer. They belong to the backward."""
    host: HostRows | None = None
    """Set if the rows are in the host's memory; None if on the device."""

    @property
    def has_cache(self) -> bool:
        """Whether the device caches rows of the host's memory."""
        return self.host is not None and self.host.missed is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingTask:
    """Tables to place on ranks, and the rules for placing them.

    A *way* is a sharding type with a kernel. A table with several ways appears in
    `tables` once per way, and `alternatives` lists the entries of one table.
    """

    tables: tuple[TableConfig, ...]
    world_size: int
    batch_size: int
    """Samples of all ranks in one iteration: the batch that a kernel sees."""
    local_world_size: int = 0
    """Ranks per node; 0 means all."""
    memory_bytes: tuple[int, ...] = ()
    """Per rank: device bytes for shards. Empty: unlimited."""
    fixed_bytes: tuple[int, ...] = ()
    """Per table: bytes of a shard that do not depend on its width (input buffers,
    row-wise optimizer state). Empty: 0."""
    column_bytes: tuple[float, ...] = ()
    """Per table: bytes per column of a shard. Empty: the weights only."""
    host_memory_bytes: tuple[int, ...] = ()
    """Per rank: bytes of host memory for shards. Empty: unlimited."""
    host_fixed_bytes: tuple[int, ...] = ()
    """Like `fixed_bytes`, in host memory. Empty: 0."""
    host_column_bytes: tuple[float, ...] = ()
    """Like `column_bytes`, in host memory. Empty: 0."""
    min_widths: tuple[int, ...] = ()
    """Per table: narrowest shard. The table's full width forbids splitting, and is set
    if its sharding type keeps columns whole. For a grid: the width of every shard.
    Empty: 4."""
    max_shards: tuple[int, ...] = ()
    """Per table: most shards. Empty: the number of ranks."""
    groups: tuple[int, ...] = ()
    """Per table: fusion group, from 0. Tables of one group on one rank run as one
    kernel. Empty: one group."""
    stages: tuple[int, ...] = ()
    """Per fusion group: stage, from 0. Groups of a stage share its collectives. Empty:
    one stage."""
    modules: tuple[int, ...] = ()
    """Per stage: its module, in the model's order. Stages of a module overlap; without
    a pipeline, forward passes of modules add up. Empty: one module."""
    places: tuple[int, ...] = ()
    """Per table: its place in the model. Stages of a module run in the order of their
    first tables. Empty: the order of the task."""
    stage_names: tuple[str, ...] = ()
    """Names of the stages in reports. Empty: "stage 0" and so on."""
    uneven: bool = True
    """Whether shards of one table may differ in width."""
    allowed_ranks: tuple[tuple[int, ...], ...] = ()
    """Per table: ranks that may hold its shards; lowers `max_shards` to their number.
    An empty inner tuple allows all ranks; so does an empty field, for all tables."""
    together: tuple[tuple[int, ...], ...] = ()
    """Sets of tables (indices) that are placed whole on one common rank: their
    `max_shards` becomes 1. Sets with a common table are joined. A table with
    alternatives has one entry in each set, and the sets are chosen as one."""
    apart: tuple[tuple[int, ...], ...] = ()
    """Sets of tables (indices). No rank holds shards of two tables of a set."""
    alternatives: tuple[tuple[int, ...], ...] = ()
    """Sets of tables (indices) with one name: the ways of one table, of which exactly
    one is placed. Tables in no set have one way."""
    sharding_types: tuple[str, ...] = ()
    """Per table: a key of SHARDING_TYPES. It limits how columns may be split, together
    with the fields above. Empty: column-wise."""
    codecs: tuple[tuple[WireCodec, WireCodec], ...] = ()
    """Per table: codecs of its outputs (forward) and their gradients (backward). Tables
    of one stage have the same. Empty: fp32."""
    repeats: tuple[float, ...] = ()
    """Per table: ids in a rank's samples over distinct ids, where repeated ids are
    removed before the exchange. Empty: 1, none are removed."""
    kernels: tuple[KernelFactors | None, ...] = ()
    """Per table: how its kernel differs from the measured fused one. Empty: it does
    not."""
    node_size: int = 0
    """Ranks that share the rows of a table-row-wise table; 0 means
    `local_world_size`."""

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
            codecs=(_PLAIN,) * count,
            repeats=(1.0,) * count,
            kernels=(None,) * count,
            places=tuple(range(count)),
        )
        self._fill("group", self.num_groups, stages=(0,) * self.num_groups)
        names = tuple(f"stage {s}" for s in range(self.num_stages))
        one = (0,) * self.num_stages
        if not any(self.modules):  # one module, whatever the number of stages was
            self._set("modules", ())
        self._fill("stage", self.num_stages, stage_names=names, modules=one)
        for limits in ("memory_bytes", "host_memory_bytes"):
            if getattr(self, limits):
                self._fill("rank", world_size, **{limits: ()})
        # Sets of one table need no rule.
        sets = joined_sets(self._checked_sets("together"))
        self._set("together", tuple(tables for tables in sets if len(tables) > 1))
        apart = sorted(t for t in self._checked_sets("apart") if len(t) > 1)
        self._set("apart", tuple(apart))
        self._check_alternatives()
        self._check_tables({t for tables in sets for t in tables})

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _fill(self, what: str, count: int, **defaults: tuple[Any, ...]) -> None:
        """Set empty fields to their default, and check all lengths."""
        for name, default in defaults.items():
            value = getattr(self, name) or default
            if len(value) != count:
                raise ConfigError(
                    f"{name} needs one value per {what} ({count}), got {len(value)}"
                )
            self._set(name, value)

    def _check_names(self) -> None:
        """Check that names differ, except among the ways of one table."""
        seen: set[int] = set()
        sets = sorted(self._checked_sets("alternatives"))
        for ways in sets:
            if seen.intersection(ways):
                raise ConfigError(
                    f"alternatives has table {min(seen.intersection(ways))} twice; a "
                    "table may be in one set only"
                )
            seen.update(ways)
            first = self.tables[ways[0]].name
            for way in ways[1:]:
                if self.tables[way].name != first:
                    raise ConfigError(
                        f"alternatives has tables '{first}' and "
                        f"'{self.tables[way].name}' in one set; all ways of a table "
                        "must have its name"
                    )
        self._set("alternatives", tuple(ways for ways in sets if len(ways) > 1))
        check_tables([self.tables[ways[0]] for ways in self.ways])

    def _check_alternatives(self) -> None:
        """Check that either all ways of a table are in `together`, or none is."""
        number = {t: n for n, tables in enumerate(self.together) for t in tables}
        for ways in self.alternatives:
            sets = {number.get(way, -1 - way) for way in ways}
            if len(sets) < len(ways) or 0 < sum(n >= 0 for n in sets) < len(ways):
                raise ConfigError(
                    f"only some alternatives of table '{self.tables[ways[0]].name}' "
                    "are in 'together'; put each of them into its own set"
                )

    def _check_tables(self, whole: Container[int]) -> None:
        """Check each table's type and ranks, and lower its shards to what they allow.

        Args:
            whole: Tables that are kept together with others.
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
        """Return the field's sets of tables, each sorted and without repeats."""
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
        """Return a table's sharding type."""
        return SHARDING_TYPES[self.sharding_types[table]]

    def block_size(self, table: int) -> int:
        """Return how many ranks share a table's rows or hold replicas of it."""
        return self.sharding_type(table).block_size(self.world_size, self.node_size)

    def block_width(self, table: int) -> int:
        """Return the columns of each block's shards; for column shards, all columns."""
        width = self.tables[table].embedding_dim
        in_columns = self.sharding_type(table).in_columns
        return width if in_columns else min(width, self.min_widths[table])

    def num_blocks(self, table: int) -> int:
        """Return how many blocks a table's columns form; 1 for column shards."""
        return -(-self.tables[table].embedding_dim // self.block_width(table))

    @property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """The indices of each table's ways, sorted by the first."""
        several = {i for ways in self.alternatives for i in ways}
        alone = [(i,) for i in range(len(self.tables)) if i not in several]
        return tuple(sorted([*alone, *self.alternatives]))

    @property
    def has_choices(self) -> bool:
        """Whether some table may or must be sharded other than by columns."""
        return bool(self.alternatives) or not COLUMN_SHARDED_TYPES.issuperset(
            self.sharding_types
        )

    @property
    def num_groups(self) -> int:
        """Number of fusion groups."""
        return max(self.groups) + 1

    @property
    def num_stages(self) -> int:
        """Number of stages: sets of groups that share their collectives."""
        return max(self.stages) + 1

    @property
    def rules(self) -> PlacementRules:
        """Which ranks tables may be on, and which tables stay together or apart."""
        return PlacementRules(
            names=tuple(t.name for t in self.tables),
            world_size=self.world_size,
            allowed={t: ranks for t, ranks in enumerate(self.allowed_ranks) if ranks},
            together=self.together,
            apart=self.apart,
        )

    @property
    def memory(self) -> tuple[Floats, Floats, Floats]:
        """Bytes of ranks (`M x W`), and of shards, fixed and per column (`M x T` each).

        `M` is the device and, where it is limited, the host. Unlimited memory is
        infinite.
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
        """Return the device memory of one shard [bytes]."""
        return self.fixed_bytes[table] + self.column_bytes[table] * width


@dataclass(frozen=True, order=True, slots=True)
class ColumnShard:
    """Columns `offset` to `offset + width` of a table, of all or some rows."""

    table: int
    """Index into the task's tables."""
    offset: int
    width: int
    rank: int
    row_offset: int = 0
    rows: int = ALL_ROWS
    """Number of rows; ALL_ROWS if the table is not split by rows."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of every column of every table."""

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

        Shards of one table on one rank are merged. Columns are assigned in order of
        rank, block by block.

        Args:
            world_size: Number of ranks.
            triples: The shards.
            task: Has the tables' sharding types; None means column-wise.
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
            PlacementError: A column is missing or placed twice, a width or rank is not
                allowed, or the rules on tables together and apart are broken.
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
                    f"the placement has a shard of table {shard.table}, which the task "
                    "does not have"
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
                f"{format_bytes(used_MW[place, rank])}, but has "
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
                    f"table '{table.name}' ({kind.name}) must have equal shards on all "
                    f"of {listed(ranks)}"
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
