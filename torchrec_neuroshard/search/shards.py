"""Costs and sizes of every possible shard of a task, computed once and looked up.

A search prices the same shards over and over. `ShardBank` prices a shard the first time
it is asked for, and keeps the result as a row of its arrays, found by table and width.

The bank also estimates each shard's *marginal cost*: how much longer the phases of an
average rank get if the shard is added. Such estimates add up, so a search can discard
most changes without calling the cost model.

Shapes: `N` shards, `R` rows of the bank, `T` entries of the task (one for each way of a
table), `W` ranks, `G` fusion groups, `S` stages, `E` encoding values, `Q` followers of
one leader, `P` parts of tables with different rows, `U` widths in units of 4 columns,
`M` memories (the device's and, if it is limited, the host's), `3` loads of collectives
(see `simulator.PricedShards`), `4` phases of a stage: forward, backward, exchange of
ids, exchange of outputs and gradients.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.encoder import with_room
from torchrec_neuroshard.costs.simulator import ANY_ROW, Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.search.rules import leaders, merged
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ALIGNMENT = 16
"""Columns in a cache line: 64 bytes in fp32."""
MUCH_BYTES = 2.0**60
"""Stands for unlimited memory when memories are compared."""
MAX_ENCODED_TABLES = 32
"""If at most this many tables are asked for at once, all their widths are priced."""
MIN_MARGINAL_SHARE = 0.05
"""Least marginal cost of a shard, as a share of its cost alone. Without it, local dips
of the cost model would make shards look free."""


def split_widths(task: ShardingTask, table: int, num_shards: int) -> tuple[int, ...]:
    """Return the widths of a table split `num_shards` ways, as even as possible.

    Returns:
        Multiples of 4, widest first; empty if the task does not allow the split.
    """
    if num_shards not in legal_splits(task, table):
        return ()
    units = task.tables[table].embedding_dim // COLUMN_MULTIPLE
    narrow, wider = divmod(units, num_shards)
    widths = (narrow + 1,) * wider + (narrow,) * (num_shards - wider)
    return tuple(width * COLUMN_MULTIPLE for width in widths)


def legal_splits(task: ShardingTask, table: int) -> tuple[int, ...]:
    """Return the numbers of shards that a table may be split into, ascending."""
    most = min(task.max_shards[table], task.world_size)
    dim, narrowest = task.tables[table].embedding_dim, task.min_widths[table]
    return _legal_splits(dim, max(COLUMN_MULTIPLE, narrowest), most, task.uneven)


@functools.cache
def _legal_splits(dim: int, narrowest: int, most: int, uneven: bool) -> tuple[int, ...]:
    units = dim // COLUMN_MULTIPLE
    return 1, *(
        k
        for k in range(2, min(most, dim // narrowest) + 1)
        if units // k * COLUMN_MULTIPLE >= narrowest and (uneven or units % k == 0)
    )


class ShardBank:
    """Encodings, loads, sizes and estimated costs of shards, one row per shard.

    A "table" here is an entry of the task: a table with several ways has one entry for
    each (see `ShardingTask`).

    If a table is split by rows, the ranks of a block hold a full part, the smaller
    rest, or nothing. Each of these has its own row. If the ranks get unequal lookups
    (`Simulator.skewed_T`), each place of a block has its own row, too; the full part
    then stands for their mean.

    With `merge`, tables that are kept together are searched as one (see `rules`). The
    leader has the memory and the estimated costs of the whole set. Tables of one fusion
    group run in one kernel, so the first table of each group has the encoding and the
    loads of all of them. Such tables of other groups than the leader's are priced with
    it, see `colocated_shards`.
    """

    def __init__(self, simulator: Simulator, *, merge: bool = False) -> None:
        """Price the whole tables and the average rank.

        Args:
            simulator: The task's simulator.
            merge: Whether leaders stand for tables that are kept together. The bank's
                task is then the merged one (`rules.merged`).
        """
        self.simulator = simulator
        own = simulator.task
        self.task = task = merged(own) if merge else own
        self.rules = task.rules
        self.num_evaluated = 0
        num_tables = len(task.tables)
        everything = np.arange(num_tables)
        kinds = [task.sharding_type(t) for t in range(num_tables)]
        self.dims_T: Ints = np.array([t.embedding_dim for t in task.tables])
        self.groups_T: Ints = simulator.groups_T
        self.stages_T: Ints = simulator.stages_T
        self.caps_MW, self._fixed_MT, self._column_MT = task.memory
        self.limited = bool(np.isfinite(self.caps_MW).any())
        total_M = np.clip(self.caps_MW.sum(axis=1), 1.0, MUCH_BYTES)
        self.worth_M: Floats = total_M[0] / total_M
        """Worth of a byte of each memory, in bytes of the device's; scarce memory is
        worth more."""
        self.block_T: Ints = np.array([task.block_size(t) for t in range(num_tables)])
        self.moves_T: Bools = np.array([k.in_columns for k in kinds])
        """Whether a table is in column shards, which may move alone. False for tables
        that are split by rows or replicated."""
        self.stays_T: Bools = np.zeros(num_tables, dtype=bool)
        """Whether a search must leave a table where it is."""
        least = np.asarray(task.min_widths)
        self._least_T: Ints = np.where(
            self.moves_T, COLUMN_MULTIPLE, np.minimum(least, self.dims_T)
        )
        narrowest = -(-least // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        self.narrowest_T: Ints = np.maximum(narrowest, COLUMN_MULTIPLE)
        self.most_T: Ints = np.asarray(task.max_shards)
        self.num_blocks_T: Ints = np.array(
            [task.num_blocks(t) for t in range(num_tables)]
        )
        self.others: dict[int, tuple[int, ...]] = {
            way: tuple(w for w in ways if w != way)
            for ways in task.alternatives
            for way in ways
        }
        """Table -> its other ways, if it has any."""
        self._cuts: dict[int, tuple[int, ...]] = {}
        # Rows of each part of a block: full, rest, none. A table whose ranks get
        # unequal lookups also has a part for each place of a block.
        split_T = np.array([k.splits_rows for k in kinds])
        total_T = np.array([t.num_embeddings for t in task.tables])
        part_T = np.where(split_T, -(-total_T // self.block_T), total_T)
        self._full_T: Ints = np.where(split_T, total_T // part_T, self.block_T)
        rest_T = np.where(split_T, total_T % part_T, 0)
        num_alike = 3 if split_T.any() else 1
        self._places_T: Ints = np.where(simulator.skewed_T, self.block_T, 0)
        count_T = num_alike + self._places_T
        self._part_T: Ints = np.cumsum(count_T) - count_T
        self._num_alike = num_alike
        place_P = np.arange(int(count_T.sum())) - np.repeat(self._part_T, count_T)
        self._table_P: Ints = np.repeat(np.arange(num_tables), count_T)
        first_P = (place_P - num_alike) * part_T[self._table_P]
        total_P = total_T[self._table_P]
        self._first_P: Ints = np.where(
            place_P < num_alike, ANY_ROW, np.minimum(first_P, total_P)
        )
        alike_TK = np.stack([part_T, rest_T, np.zeros_like(rest_T)], axis=1)
        self._rows_P: Ints = np.where(
            place_P < num_alike,
            alike_TK[self._table_P, np.minimum(place_P, num_alike - 1)],
            np.minimum(part_T[self._table_P], total_P - self._first_P),
        )
        units = int(self.dims_T.max()) // COLUMN_MULTIPLE + 1
        self._row_PU = np.full((len(place_P), units), -1, dtype=np.int64)
        # Row 0 stands for no shard: width 0 and an encoding of zeros.
        self._row_PU[:, 0] = 0
        self._used = 1
        self._encoding_RE: Floats = np.zeros((1, self.encoding_dim))
        self._extra_R2: Floats = np.zeros((1, 2))
        self._loads_R3: Floats = np.zeros((1, 3))
        self.has_extra = False
        simulator.widest()  # encodes all tables in one batch
        self.whole_T = self.rows(everything, self.dims_T)
        # The average rank holds an equal share of all tables, but at least the average
        # table.
        encodings = self.encoding(self.whole_T) * self.block_T[:, None]
        self._context_GE = np.zeros((task.num_groups, self.encoding_dim))
        np.add.at(self._context_GE, self.groups_T, encodings)
        num_G = np.bincount(self.groups_T, self.block_T, task.num_groups)
        share_G = np.maximum(1.0 / task.world_size, 1.0 / np.maximum(num_G, 1))
        self._context_GE *= share_G[:, None]
        self._context_G2: Floats = np.zeros((task.num_groups, 2))
        self._context_G2[num_G > 0] = self.predict(self._context_GE[num_G > 0])
        self.leader_T: Ints = everything
        """Each table's leader; most tables are their own."""
        self.leads_T: Bools = np.ones(num_tables, dtype=bool)
        """False for followers, which go where their leaders go."""
        self._colocated_TQ: Ints = np.zeros((num_tables, 0), dtype=np.int64)
        if merge and own.together:
            self._merge(own)
        self.columns_T: Floats = self.loads_of(self.whole_T)[:, 1]
        """Output columns of a whole table, over all ranks of its block."""
        # A rank with some rows returns a sum for each bag, or a part of the rows.
        self.columns_T *= np.where(simulator.pooled_T, 1, self.block_T)
        total_T3 = self.loads_of(self.whole_T) * self.block_T[:, None]
        self._mean_loads_S3: Floats = np.zeros((task.num_stages, 3))
        np.add.at(self._mean_loads_S3, self.stages_T, total_T3)
        self._mean_loads_S3 /= task.world_size
        self.comms_per_load_S3 = self._comms_slopes()
        ends = np.cumsum(np.bincount(task.modules)).tolist()
        self.modules = [slice(a, b) for a, b in itertools.pairwise([0, *ends]) if a < b]
        """Places of each module's stages in TorchRec's order."""
        self.pooled_S = np.ones(task.num_stages, dtype=bool)
        self.pooled_S[self.stages_T] = simulator.pooled_T
        columns_S = np.bincount(self.stages_T, self.columns_T, task.num_stages)
        order_S = simulator.order_costs(np.maximum(columns_S, 1.0)[None])
        self.has_order = bool(order_S.any()) and bool(
            (self.most_T >= simulator.ordered_from_T).any()
        )

    def _part_numbers(self, table_N: Ints, rank_N: Ints | None, alike: bool) -> Ints:
        """Return which part of its table each rank holds; None means a full part."""
        part_N: Ints = self._part_T[table_N]
        if rank_N is None or self._num_alike == 1:
            return part_N
        place_N = rank_N % self.block_T[table_N]
        kind_N: Ints = np.clip(place_N - self._full_T[table_N] + 1, 0, 2)
        own_N = (self._places_T[table_N] > 0) & (not alike)
        return part_N + np.where(own_N, self._num_alike + place_N, kind_N)

    def no_widths(self) -> Ints:
        """Return `T x W` widths of 0, in a small data type to save memory."""
        small = int(self.dims_T.max()) <= np.iinfo(np.int16).max
        shape = (len(self.dims_T), self.task.world_size)
        return np.zeros(shape, dtype=np.int16 if small else np.int64)

    def parts(self, table_N: Ints, *, alike: bool = False) -> tuple[Ints, Ints, Ints]:
        """Return each distinct part of each table's block once.

        Args:
            table_N: Tables.
            alike: Whether parts with equally many rows count as equal, although the
                ranks of some tables get unequal lookups.

        Returns:
            Three arrays, one entry for each part: index into `table_N`; a rank of the
            first block that holds the part; number of the block's ranks that hold an
            equal part.
        """
        place, rank = spread_out(self.block_T[table_N])
        part = self._part_numbers(table_N[place], rank, alike)
        # A table's parts have rising numbers in the order of the block's ranks.
        key = place * len(self._table_P) + part
        first = np.flatnonzero(np.diff(key, prepend=-1))
        return place[first], rank[first], np.diff(first, append=len(key))

    def _merge(self, own: ShardingTask) -> None:
        """Give the first table of each set and fusion group the costs of all."""
        self.leader_T = leader_T = leaders(own)
        self.leads_T = leader_T == np.arange(len(leader_T))
        member_Q = np.array([t for tables in own.together for t in tables])
        key_Q = leader_T[member_Q] * own.num_groups + self.groups_T[member_Q]
        _, first, which = np.unique(key_Q, return_index=True, return_inverse=True)
        rows, target = self.whole_T[member_Q], first[which]
        encodings, extra, loads = (
            sum_by(target, of(rows), len(rows))
            for of in (self.encoding, self.extra, self.loads_of)
        )
        self._encoding_RE[rows] = encodings
        self._extra_R2[rows], self._loads_R3[rows] = extra, loads
        # Tables kept together are not split: every width means the whole table.
        row_T = np.zeros(len(leader_T), dtype=np.int64)
        row_T[member_Q] = rows
        whole_P = np.isin(self._table_P, member_Q)
        self._row_PU[whole_P, 1:] = row_T[self._table_P[whole_P], None]
        colocated = np.setdiff1d(member_Q[first], np.flatnonzero(self.leads_T))
        count_T = np.bincount(leader_T[colocated], minlength=len(leader_T))
        self._colocated_TQ = np.full((len(leader_T), int(count_T.max())), -1)
        for follower in colocated.tolist():
            row = self._colocated_TQ[leader_T[follower]]
            row[int((row >= 0).sum())] = follower

    def colocated_shards(self, table_N: Ints) -> tuple[Ints, Ints]:
        """Return the whole tables that are priced beside these tables.

        They are followers in other fusion groups than their leader's, one for each set
        and group.

        Args:
            table_N: Tables; only leaders have followers.

        Returns:
            For each follower its leader's index in `table_N`, and the follower.
        """
        colocated_NQ = self._colocated_TQ[table_N]
        index, place = (colocated_NQ >= 0).nonzero()
        colocated: Ints = colocated_NQ[index, place]
        return index, colocated

    @property
    def encoding_dim(self) -> int:
        """Number of values of an encoding."""
        return self.simulator.cost_model.encoding_dim

    def splits(self, table: int) -> tuple[int, ...]:
        """Return the numbers of column shards that a table may be split into."""
        return legal_splits(self.task, table) if self.moves_T[table] else (1,)

    def near_splits(self, table: int, count: int) -> tuple[int, ...]:
        """Return the allowed numbers of column shards next to a number, and itself."""
        splits = self.splits(table)
        place = sum(k < count for k in splits)
        return splits[max(0, place - 1) : place + 2]

    def layouts(self, table: int, count: int, rank_ms: float) -> list[tuple[int, int]]:
        """Return layouts to try instead of a table's current one.

        They are the next smaller and the next larger number of shards. Each other way
        is tried, too: whole, and in enough shards that none takes longer than an
        average rank.

        Args:
            table: The current way.
            count: Current number of shards.
            rank_ms: Time of an average rank [ms].

        Returns:
            Pairs of a way and a number of shards.
        """
        found = []
        for way in (table, *self.cuts(table)):
            splits = self.splits(way)
            if way != table:
                wanted = self._whole_ms_T[way] / max(rank_ms, 1e-12)
                enough = next((k for k in splits if k >= wanted), splits[-1])
                found += [(way, k) for k in sorted({1, enough})]
            elif self.moves_T[way]:
                near = self.near_splits(way, count)
                found += [(way, k) for k in near if k != count]
        return found

    @functools.cached_property
    def needed_shards_T(self) -> Ints:
        """Fewest shards of each table at which every shard fits an empty rank, `T`."""
        every = np.arange(len(self.dims_T))
        needed_T: Ints = np.ones(len(every), dtype=np.int64)
        room_MT = np.repeat(self.caps_MW.max(axis=1)[:, None], len(every), axis=1)
        for table, ranks in self.rules.allowed.items():
            room_MT[:, table] = self.caps_MW[:, ranks].max(axis=1, initial=0.0)
        fits_T = (self.sizes(every, self.dims_T) <= room_MT).all(axis=0)
        for table in np.flatnonzero(~fits_T & self.moves_T).tolist():
            splits = self.splits(table)
            widest = np.array([split_widths(self.task, table, k)[0] for k in splits])
            sizes_MK = self.sizes(np.full(len(splits), table), widest)
            fitting = (sizes_MK <= room_MT[:, table, None]).all(axis=0)
            needed_T[table] = splits[fitting.argmax() if fitting.any() else -1]
        return needed_T

    def enough_splits(self, table_N: Ints, wanted_N: Floats) -> Ints:
        """Return the fewest allowed column shards that are at least as many as wanted.

        Args:
            table_N: Tables.
            wanted_N: Number of shards wanted.

        Returns:
            `N`; the largest allowed number for tables that do not allow enough.
        """
        count_N: Ints = np.ones(len(table_N), dtype=np.int64)
        for n in np.flatnonzero((wanted_N > 1) & self.moves_T[table_N]).tolist():
            splits = self.splits(int(table_N[n]))
            count_N[n] = next((k for k in splits if k >= wanted_N[n]), splits[-1])
        return count_N

    def cuts(self, table: int) -> tuple[int, ...]:
        """Return a table's other ways, only the fastest kernel for each cut.

        A cut is a sharding type with a narrowest shard (`ShardingTask.min_widths`).
        """
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
        """Estimated time of all shards of each way, one after the other, `T` [ms]."""
        width_T = np.where(self.moves_T, self.dims_T, self._least_T)
        ms: Floats = self.total_ms(np.arange(len(width_T)), width_T)
        ms *= self.block_T * self.num_blocks_T
        return ms

    @functools.cached_property
    def saved_ms_T(self) -> Floats:
        """Estimated time saved by each table's best other way, `T` [ms].

        -inf for tables without another way.
        """
        saved = np.full(len(self.dims_T), -np.inf)
        for table, ways in self.others.items():
            saved[table] = self.own_ms_T[table] - self.own_ms_T[list(ways)].min()
        return saved

    @functools.cached_property
    def _whole_ms_T(self) -> list[float]:
        every = np.arange(len(self.dims_T))
        whole: list[float] = self.total_ms(every, self.dims_T).tolist()
        return whole

    def _comms_slopes(self) -> Floats:
        """Return the milliseconds of one more unit of each load on a rank, `S x 3`.

        They are measured on the model of collectives: all ranks have balanced loads,
        and one rank's load grows by a tenth. Loads are bytes of ids, output columns and
        bytes of gradients.
        """
        loads = np.tile(self._mean_loads_S3, (2, self.task.world_size, 1, 1))
        loads[1, 0] *= 1.1
        worst_S3 = self.simulator.comms_costs(loads).max(axis=1)
        gain_S3 = np.maximum(worst_S3[1] - worst_S3[0], 0.0) * 10
        replicated = (self._mean_loads_S3[:, 2] > 0).astype(np.int64)
        slopes_S3: Floats = np.zeros_like(gain_S3)
        slopes_S3[:, 0] = gain_S3[:, 0]
        slopes_S3[np.arange(len(replicated)), 1 + replicated] = (
            gain_S3[:, 1] + gain_S3[:, 2]
        )
        slopes_S3 /= np.maximum(self._mean_loads_S3, 1e-12)
        return slopes_S3

    def predict(self, sums_SE: Floats) -> Floats:
        """Predict the fused kernels of sets of shards, and count them as evaluated.

        Args:
            sums_SE: Sum of the encodings of each set; `S` are sets here.

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
        *,
        alike: bool = False,
    ) -> Ints:
        """Return the row of each shard; price the shards that are new.

        Width 0 is row 0, with an encoding of zeros.

        Args:
            table_N: Tables.
            width_N: Columns.
            rank_N: Ranks; they decide which part of a table that is split by rows is
                meant. None means a full part.
            alike: See `parts`.
        """
        table = np.asarray(table_N, dtype=np.int64)
        units = np.asarray(width_N, dtype=np.int64) // COLUMN_MULTIPLE
        part = self._part_numbers(table, rank_N, alike)
        rows: Ints = self._row_PU[part, units]
        new = rows < 0
        if new.any():
            self._add(part[new], units[new])
            rows = self._row_PU[part, units]
        return rows

    def _add(self, part_N: Ints, units_N: Ints) -> None:
        """Price new shards. For few tables, price all their widths at once.

        A search that asks for one width of a table soon asks for the others.
        """
        parts, place_N = np.unique(part_N, return_inverse=True)
        known, tables = self._row_PU[parts] >= 0, self._table_P[parts]
        wanted = np.zeros_like(known)
        wanted[place_N, units_N] = True
        if len(parts) <= MAX_ENCODED_TABLES and self.moves_T[tables].all():
            most = self.dims_T[tables, None] // COLUMN_MULTIPLE
            wanted |= np.arange(wanted.shape[1]) <= most
        place, units = np.nonzero(wanted & ~known)
        part, table, width = parts[place], tables[place], units * COLUMN_MULTIPLE
        priced = self.simulator.price(
            table, width, self._rows_P[part], self._first_P[part]
        )
        new = np.arange(self._used, self._used + len(table))
        self._used += len(table)
        for name, values in (
            ("_encoding_RE", priced.encoding_NE),
            ("_extra_R2", priced.extra_N2),
            ("_loads_R3", priced.loads_N3),
        ):
            known = with_room(getattr(self, name), self._used)
            known[new] = values
            setattr(self, name, known)
        self.has_extra = self.has_extra or bool(priced.extra_N2.any())
        self._row_PU[part, units] = new

    def price_as(self, table: int, width: int, parts: Sequence[int]) -> None:
        """From now on, price one width of a table as several shards on one rank.

        Args:
            table: Index of the table.
            width: Columns of all its shards on the rank.
            parts: Columns of each shard; their sum is `width`.
        """
        [row] = self.rows([table], [width])
        rows = self.rows([table] * len(parts), parts)
        self._encoding_RE[row] = self.encoding(rows).sum(axis=0)
        self._extra_R2[row] = self.extra(rows).sum(axis=0)
        self._loads_R3[row] = self.loads_of(rows).sum(axis=0)

    def _marginal(self, rows_T: Ints) -> Floats:
        """Predict how much longer an average rank's kernel takes with a shard.

        Args:
            rows_T: Row of a shard of each table.

        Returns:
            `T x 2` [ms]: forward and backward, at least a share of its cost alone.
        """
        sums_TE = self._context_GE[self.groups_T] + self.encoding(rows_T)
        added = self.predict(sums_TE) - self._context_G2[self.groups_T]
        added += self.extra(rows_T)
        marginal: Floats = np.maximum(added, MIN_MARGINAL_SHARE * self.alone(rows_T))
        return marginal

    def alone(self, rows_N: Ints) -> Floats:
        """Predict the kernel of each shard alone on its rank, `N x 2` [ms]."""
        alone: Floats = self.predict(self.encoding(rows_N)) + self.extra(rows_N)
        return alone

    def encoding(self, rows_N: Ints) -> Floats:
        """Return the encoding of each row, `N x E`."""
        return self._encoding_RE[rows_N]

    def extra(self, rows_N: Ints) -> Floats:
        """Return the time of each row beyond the fused kernel's, `N x 2` [ms]."""
        return self._extra_R2[rows_N]

    def loads_of(self, rows_N: Ints) -> Floats:
        """Return the loads of each row for the collectives, `N x 3`."""
        return self._loads_R3[rows_N]

    def sizes(self, table_N: Ints, width_N: Ints) -> Floats:
        """Return the memory of shards, `M x N` bytes; width 0 needs none."""
        fixed_MN = self._fixed_MT.take(table_N, axis=1)
        column_MN = self._column_MT.take(table_N, axis=1)
        size: Floats = np.where(width_N > 0, fixed_MN + column_MN * width_N, 0.0)
        return size

    def scarcest(self, sizes_MN: Floats) -> Floats:
        """Return the size of shards in the memory of which they take the largest share.

        Args:
            sizes_MN: Bytes in each memory.

        Returns:
            `N`, as bytes of device memory (see `worth_M`).
        """
        scarcest: Floats = (sizes_MN.T * self.worth_M).T.max(axis=0)
        return scarcest

    def sizes_of_ranks(self, table_N: Ints, width_N: Ints, rank_N: Ints) -> Floats:
        """Return the memory of shards, summed by rank, `M x W` bytes."""
        sizes_MN, num_ranks = self.sizes(table_N, width_N), self.caps_MW.shape[1]
        return np.array([np.bincount(rank_N, w, num_ranks) for w in sizes_MN])

    def total_ms(self, table_N: Ints, width_N: Ints) -> Floats:
        """Estimate how much longer shards make an average rank's phases, `N` [ms].

        The estimate is a straight line in the width, exact at 4 columns and for the
        whole table. Width 0 takes 0 ms.
        """
        offset_T, slope_T = self._total_affine
        total: Floats = offset_T[table_N] * (width_N > 0) + slope_T[table_N] * width_N
        return total

    @functools.cached_property
    def _total_affine(self) -> tuple[Floats, Floats]:
        """Offset and slope of `total_ms`; a leader's include its followers."""
        offset_T, slope_T = (values.sum(axis=1) for values in self._affine)
        leader, follower = self.colocated_shards(np.arange(len(offset_T)))
        whole_T = offset_T + slope_T * self.dims_T
        np.add.at(offset_T, leader, whole_T[follower])
        offset_T[~self.leads_T] = slope_T[~self.leads_T] = 0.0
        return offset_T, slope_T

    @functools.cached_property
    def unit_phases_S4(self) -> Floats:
        """Unit of each phase when tables are placed greedily, `S x 4`, above 0 [ms].

        It is the phase's time on an average rank. If tables have several ways, it is at
        least a kernel's launch, so that stages of few and of many tables compare.
        """
        offset_T4, slope_T4 = self._affine
        each = (offset_T4 + slope_T4 * self.dims_T[:, None]) * self.block_T[:, None]
        unit_S4 = np.zeros((self.task.num_stages, 4))
        np.add.at(unit_S4, self.stages_T, each)
        unit_S4 /= self.task.world_size
        if self.task.has_choices:
            launched_S2 = self.simulator.stage_compute(self._context_G2)
            unit_S4[:, :2] = np.maximum(unit_S4[:, :2], launched_S2)
        return np.maximum(unit_S4, 1e-12)

    @functools.cached_property
    def _affine(self) -> tuple[Floats, Floats]:
        """Offset and cost per column of each phase of a shard, `T x 4` each [ms].

        0 for tables whose cost is included in another table of their set and group.
        """
        every = np.arange(len(self.dims_T))
        narrow = self._marginal(self.rows(every, self._least_T))
        whole = self._marginal(self.whole_T)
        extra = (self.dims_T - self._least_T)[:, None]
        # A table of 4 columns has only this width, so its slope does not matter.
        slope = np.where(
            extra > 0, np.maximum(whole - narrow, 0.0) / np.maximum(extra, 1), 0.0
        )
        offset = whole - slope * self.dims_T[:, None]
        ms_T3 = self.loads_of(self.whole_T) * self.comms_per_load_S3[self.stages_T]
        column_ms = ms_T3[:, 1:].sum(axis=1) / self.dims_T
        none = np.zeros(len(every))
        offset_T4 = np.column_stack([offset, ms_T3[:, 0], none])
        slope_T4 = np.column_stack([slope, none, column_ms])
        counted = self.leads_T.copy()
        counted[self.colocated_shards(every)[1]] = True
        offset_T4[~counted] = slope_T4[~counted] = 0.0
        return offset_T4, slope_T4

    @functools.cached_property
    def stage_affine(self) -> tuple[Floats, Floats]:
        """Offset and slope of a shard's phases in its own stage, `T x 4` each [ms].

        A leader's include its followers of the same stage.
        """
        offset_T4, slope_T4 = self._affine
        whole_T4 = offset_T4 + slope_T4 * self.dims_T[:, None]
        leader, follower = self.colocated_shards(np.arange(len(whole_T4)))
        beside = self.stages_T[leader] == self.stages_T[follower]
        offset_T4 = offset_T4.copy()
        np.add.at(offset_T4, leader[beside], whole_T4[follower[beside]])
        return offset_T4, slope_T4


def spread_out(count_N: Ints) -> tuple[Ints, Ints]:
    """Repeat each index as often as its count says.

    Returns:
        `X` indices, and for each its number among equal ones, from 0.
    """
    place = np.arange(len(count_N)).repeat(count_N)
    if len(place) == len(count_N) and (count_N == 1).all():
        return place, np.zeros_like(place)
    starts = count_N.cumsum() - count_N
    return place, np.arange(len(place)) - starts[place]


def grouped(key_X: Ints) -> tuple[Ints, Ints, Ints]:
    """Group entries by key.

    Returns:
        The distinct keys, where each begins in the sorted order, and that order.
    """
    order = np.argsort(key_X, kind="stable")
    ordered = key_X[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    return ordered[starts], starts, order


def sum_by(ids_N: Ints, values_NE: Floats, num_ids: int) -> Floats:
    """Sum rows of values by id: `num_ids x E`. Equal ids add in the order of rows."""
    sums = np.zeros((num_ids, values_NE.shape[1]))
    ids, starts, order = grouped(ids_N)
    sums[ids] = np.add.reduceat(values_NE[order], starts, axis=0)
    return sums


def placement_from_widths(
    width_TW: Ints, task: ShardingTask | None = None
) -> Placement:
    """Return the placement for a `T x W` matrix of widths.

    Args:
        width_TW: Columns of each table on each rank.
        task: Its sharding types are used; None means column shards.
    """
    table, rank = np.nonzero(width_TW)
    triples: Sequence[tuple[int, int, int]] = list(
        zip(table.tolist(), width_TW[table, rank].tolist(), rank.tolist(), strict=True)
    )
    return Placement.from_widths(width_TW.shape[1], triples, task)
