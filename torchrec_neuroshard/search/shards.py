"""What the searches know of each possible shard, by (table, width).

Shapes: `N` shards, `R` known (table, width) rows, `T` tables, `W` ranks, `G` fusion
groups, `S` stages, `E` encoding values, `P` approximate phases: forward, backward and
collectives of each stage in turn, `Q` colocated tables, `K` parts of a table that
differ in rows, `3` amounts that collectives move (see `simulator.PricedShards`), `M`
memories: the device's and, where it is limited, the host's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.placement import ALL_ROWS, Placement, ShardingTask
from torchrec_neuroshard.search.rules import Rules, leaders, merged
from torchrec_neuroshard.simulator import (
    PricedShards,
    RankLoads,
    Simulator,
    critical_path,
)
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = [
    "ShardBank",
    "legal_splits",
    "placement_from_widths",
    "split_widths",
    "sum_by",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ALIGNMENT = 16
"""Columns of 64 bytes in fp32, a cache line."""
ROWS_AT_ONCE = 2**18
"""Shards of which encodings are held at a time: of thousands of tables, split by rows
over hundreds of ranks, there are millions."""
MUCH_BYTES = 2.0**60
"""What unlimited memory is taken as where memories are compared."""
MAX_ENCODED_TABLES = 32
"""Tables of which all widths are encoded at once."""
MIN_MARGINAL_SHARE = 0.05
"""A shard's marginal cost is taken as at least this share of its cost alone, so that a
model's local dips do not make it free."""


def split_widths(task: ShardingTask, table: int, num_shards: int) -> tuple[int, ...]:
    """Return the widths of a table split `num_shards` ways, as even as possible.

    Returns:
        Multiples of 4, widest first; empty where the task's rules forbid the split.
    """
    width = task.tables[table].embedding_dim
    if num_shards == 1:
        return (width,)
    if num_shards > min(task.max_shards[table], task.world_size):
        return ()
    units, extra = divmod(width // COLUMN_MULTIPLE, num_shards)
    narrowest = units * COLUMN_MULTIPLE
    if narrowest < max(COLUMN_MULTIPLE, task.min_widths[table]):
        return ()
    if extra and not task.uneven:
        return ()
    wide = (units + 1) * COLUMN_MULTIPLE
    return (wide,) * extra + (narrowest,) * (num_shards - extra)


def legal_splits(task: ShardingTask, table: int) -> tuple[int, ...]:
    """Return the numbers of near-even shards that a table may be split into."""
    most = min(
        task.max_shards[table],
        task.world_size,
        task.tables[table].embedding_dim // max(1, task.min_widths[table]),
    )
    return (1, *(k for k in range(2, most + 1) if split_widths(task, table, k)))


class ShardBank:
    """Encodings, sizes and stand-alone figures of shards, one row per (table, width).

    Rows are computed once, in batches. The marginal cost of a shard is what it adds to
    a rank that already holds an average share of all tables: a good additive
    approximation of its cost anywhere in a balanced placement, which lets a search
    discard most candidates without asking the cost model.

    A table that may be sharded in several ways has an index, here called a table, too,
    for each (see `ShardingTask`). Of one that is split by rows, the ranks of a block
    hold equal parts, a smaller one, or none: rows of their own.

    Of tables that lie together, the first one in each fusion group can stand for all:
    its shard then has their encoding, columns and ids. The first of all, the leader,
    has their memory and approximate costs, too; those of other groups ride with it.
    """

    def __init__(self, simulator: Simulator, *, merge: bool = False) -> None:
        """Encode the whole tables and the average rank.

        Args:
            simulator: Of the task.
            merge: Let leaders stand for tables that lie together; the bank's task is
                then `rules.merged`.
        """
        self.simulator = simulator
        own = simulator.task
        self.task = task = merged(own) if merge else own
        self.rules = Rules(task)
        self.num_evaluated = 0
        num_tables = len(task.tables)
        everything = np.arange(num_tables)
        self.dims_T: Ints = np.array([t.embedding_dim for t in task.tables])
        self.groups_T: Ints = simulator.groups_T
        self.stages_T: Ints = simulator.stages_T
        everywhere = (np.inf,) * task.world_size
        self.caps_MW: Floats = np.array(
            [m.memory_bytes or everywhere for m in task.memories], dtype=np.float64
        )
        total_M = np.clip(self.caps_MW.sum(axis=1), 1.0, MUCH_BYTES)
        self.worth_M: Floats = total_M[0] / total_M
        """What a byte of each memory is worth, in bytes of the device's."""
        self._fixed_MT = np.array([m.fixed_bytes for m in task.memories], dtype=float)
        self._column_bytes_MT = np.array(
            [m.column_bytes for m in task.memories], dtype=float
        )
        self.block_T: Ints = np.array([task.block_size(t) for t in range(num_tables)])
        self.moves_T: npt.NDArray[np.bool_] = np.array(
            [task.sharding_type(t).in_columns for t in range(num_tables)]
        )
        """False for tables that are split by rows or replicated."""
        self.stays_T: npt.NDArray[np.bool_] = np.zeros(num_tables, dtype=bool)
        """True for tables that a search leaves where they are."""
        self.pooled_S = np.ones(task.num_stages, dtype=bool)
        self.pooled_S[self.stages_T] = simulator.pooled_T
        self._describe_parts()
        most_units = int(self.dims_T.max()) // COLUMN_MULTIPLE
        kinds = self._rows_TK.shape[1]
        self._row_TUK = np.full((num_tables, most_units + 1, kinds), -1, dtype=np.int64)
        # Row 0 is no shard: of width 0, with an encoding of zeros.
        self._row_TUK[:, 0] = 0
        size = 2 * num_tables + 16
        self._used = 1
        self._table_R: Ints = np.zeros(size, dtype=np.int64)
        self._width_R: Ints = np.zeros(size, dtype=np.int64)
        self._slot_R: Ints = np.zeros(size, dtype=np.int64)
        self._extra_R2: Floats = np.zeros((size, 2))
        self._loads_R3: Floats = np.zeros((size, 3))
        self.has_extra = False
        self.others: dict[int, tuple[int, ...]] = {
            way: tuple(w for w in ways if w != way)
            for ways in task.alternatives
            for way in ways
        }
        """Table -> the other ways in which it may be sharded, if there are any."""
        self._splits: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._cuts: dict[int, tuple[int, ...]] = {}
        self.leader_T: Ints = everything
        """The table beside which each is placed; of most, itself."""
        self.leads_T: npt.NDArray[np.bool_] = np.ones(num_tables, dtype=bool)
        """False for followers, which are placed beside their leaders."""
        self._colocated_TQ: Ints = np.zeros((num_tables, 0), dtype=np.int64)
        self._merged_T: Ints | None = None
        whole = simulator.price(everything, self.dims_T, self._rows_TK[:, 0])
        total_GE = np.zeros((task.num_groups, simulator.cost_model.encoding_dim))
        encodings = simulator.encoder.encoding(whole.row_N) * self.block_T[:, None]
        np.add.at(total_GE, self.groups_T, encodings)
        # The average rank, or the average table where ranks hold less than one.
        num_G = np.bincount(
            self.groups_T, weights=self.block_T, minlength=task.num_groups
        )
        self.context_share_G: Floats = np.maximum(
            1.0 / task.world_size, 1.0 / np.maximum(num_G, 1)
        )
        self._context_GE = total_GE * self.context_share_G[:, None]
        self.context_G2: Floats = np.zeros((task.num_groups, 2))
        self.context_G2[num_G > 0] = self.predict(self._context_GE[num_G > 0])
        if merge and own.together:
            self._merge(own, whole)
        self.whole_T = self.rows(everything, self.dims_T)
        narrowest = -(-np.asarray(task.min_widths) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        self.narrowest_T: Ints = np.maximum(narrowest, COLUMN_MULTIPLE)
        self.most_T: Ints = np.asarray(task.max_shards)
        self.num_blocks_T: Ints = np.array(
            [1 if m else task.num_blocks(t) for t, m in enumerate(self.moves_T)]
        )
        self.limited = bool(np.isfinite(self.caps_MW).any())
        total_T3 = self.loads_of(self.whole_T) * self.block_T[:, None]
        self.columns_T: Floats = self.loads_of(self.whole_T)[:, 1]
        """Output columns of the whole table on one rank."""
        mean_3S = [
            np.bincount(self.stages_T, amount_T, task.num_stages) / task.world_size
            for amount_T in total_T3.T
        ]
        self.mean_loads_S3: Floats = np.stack(mean_3S, axis=1)
        moved = self.columns_T[self.moves_T].sum()
        self.mean_columns = float(moved / task.world_size)
        self.comms_per_load_S3 = self._comms_slopes()
        order_S = simulator.order_costs(np.maximum(self._total_columns(), 1.0)[None])
        self.has_order = bool(order_S.any()) and bool(
            (simulator.splits_columns_T & (np.asarray(task.max_shards) > 1)).any()
        )

    def _describe_parts(self) -> None:
        """Rows of the parts of each table, `T x K`, and how many are equal."""
        task = self.task
        kinds = [task.sharding_type(t) for t in range(len(task.tables))]
        if not any(k.splits_rows for k in kinds):
            self._rows_TK = np.full((len(kinds), 1), ALL_ROWS, dtype=np.int64)
            self._full_T: Ints = np.ones(len(kinds), dtype=np.int64)
            return
        rows: list[tuple[int, int, int]] = []
        full = []
        for kind, table, size in zip(
            kinds, task.tables, self.block_T.tolist(), strict=True
        ):
            total = table.num_embeddings
            part = kind.part_rows(total, size)
            full.append(total // part if kind.splits_rows else size)
            rest = total - full[-1] * part
            rows.append((part, rest, 0) if kind.splits_rows else (ALL_ROWS,) * 3)
        self._rows_TK = np.array(rows, dtype=np.int64)
        self._full_T = np.array(full, dtype=np.int64)

    def _kinds(self, table_N: Ints, rank_N: Ints | None) -> Ints:
        """Which part of a table a rank holds: a full one, the rest, or nothing."""
        if rank_N is None or self._rows_TK.shape[1] == 1:
            return np.zeros(len(table_N), dtype=np.int64)
        place = rank_N % self.block_T[table_N]
        after = place - self._full_T[table_N]
        has_rest = self._rows_TK[table_N, 1] > 0
        kind: Ints = np.where(after < 0, 0, np.where((after == 0) & has_rest, 1, 2))
        kind[self._rows_TK[table_N, 0] == ALL_ROWS] = 0
        return kind

    def no_widths(self) -> Ints:
        """Return `T x W` widths of 0: of many ways on many ranks, in little memory."""
        small = int(self.dims_T.max()) <= np.iinfo(np.int16).max
        shape = (len(self.dims_T), self.task.world_size)
        return np.zeros(shape, dtype=np.int16 if small else np.int64)

    def parts(self, table_N: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the parts of tables that differ, each once.

        Returns:
            `M` each: place in `table_N`; a rank that has the part, of the first block;
            how many of the block's ranks have one like it.
        """
        size_N, full_N = self.block_T[table_N], self._full_T[table_N]
        rest_N = np.minimum(size_N - full_N, 1)
        count_N3 = np.stack([full_N, rest_N, size_N - full_N - rest_N], axis=1)
        rank_N3 = np.stack([np.zeros_like(full_N), full_N, full_N + 1], axis=1)
        place, kind = np.nonzero(count_N3)
        return place, rank_N3[place, kind], count_N3[place, kind]

    def _merge(self, own: ShardingTask, whole: PricedShards) -> None:
        """Give the first table of each set and group what all of them have."""
        num_tables = len(own.tables)
        self.leader_T = leader_T = leaders(own)
        self.leads_T = leader_T == np.arange(num_tables)
        first: dict[tuple[int, int], int] = {}
        keys = zip(leader_T.tolist(), self.groups_T.tolist(), strict=True)
        part_T = np.array([first.setdefault(key, t) for t, key in enumerate(keys)])
        encoder = self.simulator.encoder
        in_sets = np.array([t for tables in own.together for t in tables])
        place_T = np.full(num_tables, -1)
        place_T[in_sets] = np.arange(len(in_sets))
        encodings = np.zeros((len(in_sets), self.encoding_dim))
        target = place_T[part_T[in_sets]]
        np.add.at(encodings, target, encoder.encoding(whole.row_N[in_sets]))
        extra, loads = np.zeros((len(in_sets), 2)), np.zeros((len(in_sets), 3))
        np.add.at(extra, target, whole.extra_N2[in_sets])
        np.add.at(loads, target, whole.loads_N3[in_sets])
        self._merged_T = place_T
        self._merged = PricedShards(encoder.add(encodings), extra, loads)
        colocated = np.flatnonzero((part_T == np.arange(num_tables)) & ~self.leads_T)
        if len(colocated):
            count_T = np.bincount(leader_T[colocated], minlength=num_tables)
            self._colocated_TQ = np.full((num_tables, int(count_T.max())), -1)
            for follower in colocated.tolist():
                row = self._colocated_TQ[leader_T[follower]]
                row[int((row >= 0).sum())] = follower

    def colocated_shards(self, table_N: Ints) -> tuple[Ints, Ints]:
        """Return the whole tables of other groups that go where their leaders go.

        Args:
            table_N: `N` tables; only leaders have others with them.

        Returns:
            For each such table its leader's place in `table_N`, and the table.
        """
        colocated_NQ = self._colocated_TQ[table_N]
        index, place = (colocated_NQ >= 0).nonzero()
        colocated: Ints = colocated_NQ[index, place]
        return index, colocated

    @property
    def encoding_dim(self) -> int:
        """Values per encoding."""
        return self.simulator.cost_model.encoding_dim

    def splits(self, table: int) -> tuple[int, ...]:
        """Return the numbers of near-even shards that a table may be split into."""
        task = self.task
        if not self.moves_T[table]:
            return (1,)
        key = (
            task.tables[table].embedding_dim,
            task.min_widths[table],
            task.max_shards[table],
        )
        if key not in self._splits:
            self._splits[key] = legal_splits(task, table)
        return self._splits[key]

    def layouts(self, table: int, count: int, rank_ms: float) -> list[tuple[int, int]]:
        """Return the other ways to lay a table out: the way and the number of shards.

        Args:
            table: How it is laid out now.
            count: Its shards now.
            rank_ms: What an average rank has to do.
        """
        found = []
        for way in (table, *self.cuts(table)):
            if not self.moves_T[way]:
                found += [] if way == table else [(way, 1)]
                continue
            splits = self.splits(way)
            if way == table:
                place = sum(k < count for k in splits)
                near = splits[max(0, place - 1) : place + 2]
                found += [(way, k) for k in near if k != count]
                continue
            wanted = self._whole_ms_T[way] / max(rank_ms, 1e-12)
            enough = next((k for k in splits if k >= wanted), splits[-1])
            found += [(way, k) for k in sorted({1, enough})]
        return found

    @functools.cached_property
    def needed_shards_T(self) -> Ints:
        """Fewest shards of each table such that each fits some rank, `T`."""
        needed_T: Ints = np.ones(len(self.dims_T), dtype=np.int64)
        allowed_TW, sizes_MT = (
            self.rules.allowed_TW,
            self.sizes(np.arange(len(self.dims_T)), self.dims_T),
        )
        for memory, caps_W, size_T in zip(
            self.task.memories, self.caps_MW, sizes_MT, strict=True
        ):
            largest_T = np.full(len(needed_T), caps_W.max())
            if allowed_TW is not None:
                largest_T = np.where(allowed_TW, caps_W, 0.0).max(axis=1)
            for table in np.flatnonzero((size_T > largest_T) & self.moves_T).tolist():
                splits = [k for k in self.splits(table) if k >= needed_T[table]]
                widths = ((k, split_widths(self.task, table, k)[0]) for k in splits)
                room = largest_T[table]
                fitting = (k for k, w in widths if memory.shard_bytes(table, w) <= room)
                needed_T[table] = next(fitting, splits[-1])
        return needed_T

    def enough_splits(self, table_N: Ints, wanted_N: Floats) -> Ints:
        """Return the fewest legal shards of columns that are enough, `N`.

        Args:
            table_N: Tables.
            wanted_N: Shards wanted of each; the most there are where none are enough.
        """
        count_N: Ints = np.ones(len(table_N), dtype=np.int64)
        for n in np.flatnonzero((wanted_N > 1) & self.moves_T[table_N]).tolist():
            splits = self.splits(int(table_N[n]))
            count_N[n] = next((k for k in splits if k >= wanted_N[n]), splits[-1])
        return count_N

    def cuts(self, table: int) -> tuple[int, ...]:
        """Return the other ways of a table: of each cut, that of the fastest kernel."""
        found = self._cuts.get(table)
        if found is None:
            best: dict[tuple[str, int], int] = {}
            for way in sorted(
                self.others.get(table, ()), key=lambda w: self.own_ms_T[w]
            ):
                cut = self.task.sharding_types[way], self.task.min_widths[way]
                best.setdefault(cut, way)
            found = self._cuts[table] = tuple(best.values())
        return found

    @functools.cached_property
    def own_ms_T(self) -> Floats:
        """What all shards of each way take, one after the other [ms]."""
        width_T = np.where(
            self.moves_T, self.dims_T, np.minimum(self.narrowest_T, self.dims_T)
        )
        blocks_T = np.where(self.moves_T, 1, self.num_blocks_T)
        ms: Floats = self.total_ms(np.arange(len(width_T)), width_T)
        ms *= self.block_T * blocks_T
        return ms

    @functools.cached_property
    def saved_ms_T(self) -> Floats:
        """How much less the table takes in its best other way [ms]; -inf: none."""
        saved = np.full(len(self.dims_T), -np.inf)
        for table, ways in self.others.items():
            saved[table] = self.own_ms_T[table] - self.own_ms_T[list(ways)].min()
        return saved

    @functools.cached_property
    def _whole_ms_T(self) -> list[float]:
        every = np.arange(len(self.dims_T))
        whole: list[float] = self.total_ms(every, self.dims_T).tolist()
        return whole

    def _total_columns(self) -> Floats:
        """Output columns of all tables of each stage, `S`."""
        total: Floats = np.bincount(
            self.stages_T, weights=self.columns_T, minlength=self.task.num_stages
        ).astype(np.float64)
        return total

    def order_ms(self, columns_CS: Floats) -> Floats:
        """Putting these outputs in order, forward and backward, `C` [ms]."""
        if not self.has_order:
            return np.zeros(len(columns_CS))
        total: Floats = self.simulator.order_costs(columns_CS).sum(axis=(1, 2))
        return total

    def _comms_slopes(self) -> Floats:
        """Milliseconds of one more unit of each load on a rank, `S x 3`.

        Taken at balanced loads, of which one rank's grows by a tenth. Loads are bytes
        of ids, output columns and bytes of gradients.
        """
        shape = (2, self.task.world_size, 1, 1)
        loads = np.tile(self.mean_loads_S3, shape)
        loads[1, 0] *= 1.1
        worst_S3 = self.simulator.comms_costs(loads).max(axis=1)
        gain_S3 = np.maximum(worst_S3[1] - worst_S3[0], 0.0) * 10
        index, columns, gradients = np.maximum(self.mean_loads_S3, 1e-12).T
        replicated = self.mean_loads_S3[:, 2] > 0
        both = gain_S3[:, 1:].sum(axis=1)
        return np.stack(
            [
                gain_S3[:, 0] / index,
                np.where(replicated, 0.0, both / columns),
                np.where(replicated, both / gradients, 0.0),
            ],
            axis=1,
        )

    def predict(self, sums_SE: Floats) -> Floats:
        """Predict the fused kernel of sets and count them as evaluated.

        Args:
            sums_SE: Sums of the encodings of each set.

        Returns:
            `S x 2` [ms]: forward and backward.
        """
        self.num_evaluated += len(sums_SE)
        return self.simulator.cost_model.predict_sums(sums_SE)

    def rows(
        self,
        table_N: npt.ArrayLike,
        width_N: npt.ArrayLike,
        rank_N: Ints | None = None,
    ) -> Ints:
        """Return the row of each shard, computing those not met before.

        A width of 0 has a row, too, with an encoding of zeros.

        Args:
            table_N: Tables.
            width_N: Columns.
            rank_N: Says which part of the rows is meant, of tables split so. None: a
                full part.
        """
        table = np.asarray(table_N, dtype=np.int64)
        units = np.asarray(width_N, dtype=np.int64) // COLUMN_MULTIPLE
        kind = self._kinds(table, rank_N)
        rows: Ints = self._row_TUK[table, units, kind]
        missing = rows < 0
        if missing.any():
            self._add(
                *self._worth_adding(table[missing], units[missing], kind[missing])
            )
            rows = self._row_TUK[table, units, kind]
        return rows

    def _worth_adding(
        self, table_N: Ints, units_N: Ints, kind_N: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """Shards to price: of few tables all widths at once, of many those asked for.

        Who asks for one width of a table mostly asks for others soon.
        """
        _, num_units, num_kinds = self._row_TUK.shape
        tables = np.unique(table_N)
        few = len(tables) <= MAX_ENCODED_TABLES and self.moves_T[tables].all()
        if not few:
            asked = np.unique((table_N * num_units + units_N) * num_kinds + kind_N)
            asked, kind = np.divmod(asked, num_kinds)
            return asked // num_units, asked % num_units * COLUMN_MULTIPLE, kind
        units = np.arange(1, num_units)
        new = (self._row_TUK[tables, 1:, 0] < 0) & (
            units * COLUMN_MULTIPLE <= self.dims_T[tables, None]
        )
        table, place = np.nonzero(new)
        kinds = np.zeros_like(place)
        return tables[table], units[place] * COLUMN_MULTIPLE, kinds

    def _add(self, table_N: Ints, width_N: Ints, kind_N: Ints) -> None:
        end = self._used + len(table_N)
        if end > len(self._table_R):
            room = max(end, 2 * len(self._table_R)) - len(self._table_R)
            self._table_R = np.pad(self._table_R, (0, room))
            self._width_R = np.pad(self._width_R, (0, room))
            self._slot_R = np.pad(self._slot_R, (0, room))
            self._extra_R2 = np.pad(self._extra_R2, ((0, room), (0, 0)))
            self._loads_R3 = np.pad(self._loads_R3, ((0, room), (0, 0)))
        new = slice(self._used, end)
        priced = self.simulator.price(table_N, width_N, self._rows_TK[table_N, kind_N])
        self._table_R[new], self._width_R[new] = table_N, width_N
        self._slot_R[new] = priced.row_N
        self._extra_R2[new] = priced.extra_N2
        self._loads_R3[new] = priced.loads_N3
        if self._merged_T is not None:
            place = self._merged_T[table_N]
            rows, place = np.flatnonzero(place >= 0) + self._used, place[place >= 0]
            self._slot_R[rows] = self._merged.row_N[place]
            self._extra_R2[rows] = self._merged.extra_N2[place]
            self._loads_R3[rows] = self._merged.loads_N3[place]
        self.has_extra = self.has_extra or bool(self._extra_R2[new].any())
        self._row_TUK[table_N, width_N // COLUMN_MULTIPLE, kind_N] = np.arange(
            self._used, end
        )
        self._used = end

    def price_as(self, table: int, width: int, parts: Sequence[int]) -> None:
        """Price one width of a table as several shards of it on one rank.

        Args:
            table: Index of the table.
            width: Columns of all its shards there.
            parts: Columns of each of them; they add up to `width`.
        """
        [row] = self.rows([table], [width])
        rows = self.rows([table] * len(parts), parts)
        total = self.encoding(rows).sum(axis=0, keepdims=True)
        [self._slot_R[row]] = self.simulator.encoder.add(total)
        self._extra_R2[row] = self.extra(rows).sum(axis=0)
        self._loads_R3[row] = self.loads_of(rows).sum(axis=0)

    def added(self, rows_N: Ints) -> Floats:
        """Predict how much longer an average rank's kernel takes with each shard.

        Returns:
            `N x 2` [ms]: forward and backward; below 0 where the model dips.
        """
        group = self.groups_T[self._table_R[rows_N]]
        with_shard = self.predict(self._context_GE[group] + self.encoding(rows_N))
        added: Floats = with_shard - self.context_G2[group] + self._extra_R2[rows_N]
        return added

    def marginal(self, rows_N: Ints) -> Floats:
        """As `added`, but at least a share of the shard's cost alone."""
        alone = self.predict(self.encoding(rows_N)) + self._extra_R2[rows_N]
        marginal: Floats = np.maximum(self.added(rows_N), MIN_MARGINAL_SHARE * alone)
        return marginal

    def table(self, rows_N: Ints) -> Ints:
        """Table of each row."""
        return self._table_R[rows_N]

    def width(self, rows_N: Ints) -> Ints:
        """Width of each row."""
        return self._width_R[rows_N]

    def encoding(self, rows_N: Ints) -> Floats:
        """Encoding of each row, `N x E`."""
        return self.simulator.encoder.encoding(self._slot_R[rows_N])

    def extra(self, rows_N: Ints) -> Floats:
        """Time beside the fused kernel's of each row, `N x 2` [ms]."""
        return self._extra_R2[rows_N]

    def loads_of(self, rows_N: Ints) -> Floats:
        """Amounts that collectives move for each row, `N x 3`."""
        return self._loads_R3[rows_N]

    def columns(self, table_N: Ints, width_N: Ints) -> Floats:
        """Return the output columns of shards, width times features: `N`."""
        product: Floats = self.columns_T[table_N] / self.dims_T[table_N] * width_N
        return product

    @property
    def caps_W(self) -> Floats:
        """Memory of each rank's device [bytes]."""
        caps_W: Floats = self.caps_MW[0]
        return caps_W

    def bytes(self, table_N: Ints, width_N: Ints) -> Floats:
        """Return the device memory of shards, `N` bytes; a width of 0 needs none."""
        size: Floats = self.sizes(table_N, width_N)[0]
        return size

    def sizes(self, table_N: Ints, width_N: Ints) -> Floats:
        """Return the memory of shards, `M x N` bytes; a width of 0 needs none."""
        fixed_MN = self._fixed_MT.take(table_N, axis=1)
        column_MN = self._column_bytes_MT.take(table_N, axis=1)
        size: Floats = np.where(width_N > 0, fixed_MN + column_MN * width_N, 0.0)
        return size

    def scarcest(self, sizes_MN: Floats) -> Floats:
        """Return the memory of which shards take the largest share.

        Args:
            sizes_MN: What they take of each.

        Returns:
            `N`, in bytes of the device's memory.
        """
        scarcest: Floats = (sizes_MN.T * self.worth_M).T.max(axis=0)
        return scarcest

    def sizes_of_ranks(self, table_N: Ints, width_N: Ints, rank_N: Ints) -> Floats:
        """Add up the memory of shards by their ranks, `M x W` bytes."""
        sizes_MN, num_ranks = self.sizes(table_N, width_N), self.caps_MW.shape[1]
        return np.array([np.bincount(rank_N, w, num_ranks) for w in sizes_MN])

    def total_ms(self, table_N: Ints, width_N: Ints) -> Floats:
        """Estimate how much longer shards make an average rank's phases, `N` [ms].

        The estimate is affine in the width, and exact at 4 columns and at the whole
        table; 0 where the width is 0.
        """
        offset_T, slope_T = self._total_affine
        total: Floats = offset_T[table_N] * (width_N > 0) + slope_T[table_N] * width_N
        return total

    @functools.cached_property
    def _total_affine(self) -> tuple[Floats, Floats]:
        offset_PT, slope_PT = self.affine
        return offset_PT.sum(axis=0), slope_PT.sum(axis=0)

    def approximate_phases(self, compute_CWS2: Floats, loads_CWS3: Floats) -> Floats:
        """Return `C x W x P`: exact compute, collectives by their slopes [ms]."""
        comms = (loads_CWS3 * self.comms_per_load_S3).sum(axis=-1)
        phases = np.concatenate([compute_CWS2, comms[..., None]], axis=-1)
        return phases.reshape(*phases.shape[:-2], -1)

    @functools.cached_property
    def mean_phases_P(self) -> Floats:
        """Phases of the average rank [ms], approximate."""
        offset_PT, slope_PT = self.affine
        each = (offset_PT + slope_PT * self.dims_T).T
        mean: Floats = (each * self.block_T[:, None]).sum(axis=0) / self.task.world_size
        return mean

    @functools.cached_property
    def unit_phases_P(self) -> Floats:
        """Unit of each phase when ranks are evened out, `P` above 0 [ms].

        It is the average rank's phase. Where tables may be sharded in several ways, a
        kernel's launch is the least, so that stages of few and of many tables compare.
        """
        unit = self.mean_phases_P
        if self.task.has_choices:
            launched = np.zeros((1, self.task.num_stages, 2))
            launched[0] = self.simulator.stage_compute(self.context_G2[None])[0]
            loads = np.zeros((1, self.task.num_stages, 3))
            unit = np.maximum(unit, self.approximate_phases(launched, loads)[0])
        return np.maximum(unit, 1e-12)

    @functools.cached_property
    def unit_phases_S4(self) -> Floats:
        """Phases of the average rank, `S x 4` above 0 [ms]; see `stage_affine`."""
        unit_S3 = self.unit_phases_P.reshape(-1, 3)
        index_S = (self.mean_loads_S3 * self.comms_per_load_S3)[:, 0]
        rest = np.maximum(unit_S3[:, 2] - index_S, 0.0)
        each = np.column_stack([unit_S3[:, :2], index_S, rest])
        unit_S4: Floats = np.maximum(each, 1e-12)
        return unit_S4

    @functools.cached_property
    def affine(self) -> tuple[Floats, Floats]:
        """Offset and cost per column of shards' phases, `P x T` each [ms]."""
        tables = np.arange(len(self.dims_T))
        narrowest = np.where(
            self.moves_T, COLUMN_MULTIPLE, np.minimum(self.task.min_widths, self.dims_T)
        )
        rows = self.rows(tables, narrowest)
        narrow, whole = self.marginal(rows), self.marginal(self.whole_T)
        extra = (self.dims_T - narrowest)[:, None]
        # A table of 4 columns has no other width: any slope will do.
        slope = np.where(
            extra > 0, np.maximum(whole - narrow, 0.0) / np.maximum(extra, 1), 0.0
        )
        stage = self.stages_T
        loads_T3 = self.loads_of(self.whole_T) * self.comms_per_load_S3[stage]
        column_ms = loads_T3[:, 1:].sum(axis=1) / self.dims_T
        offset = whole - slope * self.dims_T[:, None]
        spread = np.zeros((2, len(tables), self.task.num_stages, 3))
        spread[0, tables, stage] = np.column_stack([offset, loads_T3[:, 0]])
        spread[1, tables, stage] = np.column_stack([slope, column_ms])
        offset_TP, slope_TP = spread.reshape(2, len(tables), -1)
        # What followers cost is their leaders' cost, wherever it arises.
        leader, follower = self.colocated_shards(tables)
        whole_NP = (
            offset_TP[follower] + slope_TP[follower] * self.dims_T[follower, None]
        )
        np.add.at(offset_TP, leader, whole_NP)
        offset_TP[~self.leads_T] = slope_TP[~self.leads_T] = 0.0
        return offset_TP.T.copy(), slope_TP.T.copy()

    @functools.cached_property
    def stage_affine(self) -> tuple[Floats, Floats]:
        """Offset and slope of a shard's phases in its own stage, `T x 4` each [ms].

        Forward, backward, exchange of ids, exchange of outputs and gradients.
        """
        offset_PT, slope_PT = self.affine
        column_T3 = self.stages_T[:, None] * 3 + np.arange(3)
        table = np.arange(len(self.dims_T))[:, None]
        offset, slope = offset_PT[column_T3, table], slope_PT[column_T3, table]
        none = np.zeros((len(table), 1))
        return (
            np.concatenate([offset, none], axis=1),
            np.concatenate([slope[:, :2], none, slope[:, 2:]], axis=1),
        )

    def critical_paths(self, rows_LN: Ints, rank_LN: Ints) -> Floats:
        """Evaluate placements exactly.

        Args:
            rows_LN: Bank rows, one placement per line, padded with -1.
            rank_LN: Rank of each shard; not read where the row is -1.

        Returns:
            `L` critical paths [ms].
        """
        lane, place = np.nonzero(rows_LN >= 0)
        rows, rank = rows_LN[lane, place], rank_LN[lane, place]
        num_sets = len(rows_LN) * self.task.world_size
        loads, count = self.loads(rows, lane * self.task.world_size + rank, num_sets)
        compute = np.zeros((*count.shape, 2))
        compute[count > 0] = self.predict(loads.sums_CWGE[count > 0])
        shape = (len(rows_LN), self.task.world_size, self.task.num_stages)
        compute_LWS2 = self.simulator.stage_compute(compute) + loads.extra_CWS2
        compute_LWS2 = compute_LWS2.reshape(*shape, 2)
        loads_LWS3 = loads.loads_CWS3.reshape(*shape, 3)
        exact = self.simulator.phases(compute_LWS2, loads_LWS3)
        path_L: Floats = critical_path(exact)
        return path_L + self._lane_order_ms(lane, rows, len(rows_LN))

    def _lane_order_ms(self, lane_N: Ints, rows_N: Ints, num_lanes: int) -> Floats:
        """Putting outputs in order, for placements of all tables, `L` [ms]."""
        if not self.has_order:
            return np.zeros(num_lanes)
        table = self.table(rows_N)
        split = np.flatnonzero(self.width(rows_N) < self.dims_T[table])
        num_stages = self.task.num_stages
        cell = lane_N[split] * num_stages + self.stages_T[table[split]]
        columns = np.bincount(
            cell,
            weights=self.loads_of(rows_N[split])[:, 1],
            minlength=num_lanes * num_stages,
        ).reshape(num_lanes, num_stages)
        whole = (columns > 0) * self._total_columns()
        return self.order_ms(np.where(self.pooled_S, whole, columns))

    def loads(self, rows_N: Ints, set_N: Ints, num_sets: int) -> tuple[RankLoads, Ints]:
        """Add up shards by the set (a rank of some placement) that they are in.

        Returns:
            Loads of the sets, first axis `num_sets` in place of `C x W`, and the number
            of shards, `num_sets x G`, colocated ones among them.
        """
        num_groups, num_stages = self.task.num_groups, self.task.num_stages
        table = self.table(rows_N)
        place, colocated = self.colocated_shards(table)
        if len(colocated):
            table = np.concatenate([table, colocated])
            rows_N = np.concatenate([rows_N, self.whole_T[colocated]])
            set_N = np.concatenate([set_N, set_N[place]])
        cell = set_N * num_groups + self.groups_T[table]
        size = num_sets * num_groups
        sums: Floats = np.zeros((size, self.encoding_dim))
        for first in range(0, len(cell), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            sums += sum_by(cell[some], self.encoding(rows_N[some]), size)
        count = np.bincount(cell, minlength=size).reshape(num_sets, num_groups)
        stage = set_N * num_stages + self.stages_T[table]
        amounts = np.concatenate([self.extra(rows_N), self.loads_of(rows_N)], axis=1)
        columns = [
            np.bincount(stage, weights=w, minlength=num_sets * num_stages)
            for w in amounts.T
        ]
        total: Floats = np.stack(columns, axis=1).astype(np.float64)
        total = total.reshape(num_sets, num_stages, 5)
        sums = sums.reshape(num_sets, num_groups, -1)
        return RankLoads(sums, total[..., :2].copy(), total[..., 2:].copy()), count


def sum_by(ids_N: Ints, values_NE: Floats, num_ids: int) -> Floats:
    """Sum rows of values by id, in the order of the rows: `num_ids x E`."""
    sums = np.zeros((num_ids, values_NE.shape[1]))
    if len(ids_N):
        order = np.argsort(ids_N, kind="stable")
        ordered = ids_N[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        sums[ordered[starts]] = np.add.reduceat(values_NE[order], starts, axis=0)
    return sums


def placement_from_widths(
    width_TW: Ints, task: ShardingTask | None = None
) -> Placement:
    """Return the placement that a `T x W` matrix of widths stands for.

    Args:
        width_TW: Columns of each table on each rank.
        task: Says how tables are laid out. None: by columns.
    """
    table, rank = np.nonzero(width_TW)
    triples: Sequence[tuple[int, int, int]] = list(
        zip(table.tolist(), width_TW[table, rank].tolist(), rank.tolist(), strict=True)
    )
    return Placement.from_widths(width_TW.shape[1], triples, task)
