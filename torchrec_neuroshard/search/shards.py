"""What the searches know of each possible shard, by (table, width).

Shapes: `N` shards, `R` known (table, width) rows, `T` tables, `W` ranks, `G` fusion
groups, `S` stages, `E` encoding values, `P` approximate phases: forward, backward and
collectives of each stage in turn, `Q` riders.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.search.rules import Rules, leaders, merged
from torchrec_neuroshard.simulator import RankLoads, Simulator, critical_path
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = [
    "ShardBank",
    "aligned_widths",
    "legal_splits",
    "placement_from_widths",
    "split_widths",
    "sum_by",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ALIGNMENT = 16
"""Columns of 64 bytes in fp32, a cache line."""
MIN_MARGINAL_SHARE = 0.05
"""A shard's marginal cost is taken as at least this share of its cost alone, so that a
model's local dips do not make it free."""


MAX_ENCODED_TABLES = 32
"""Tables of which all widths are encoded at once."""


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


def aligned_widths(task: ShardingTask, table: int, num_shards: int) -> tuple[int, ...]:
    """Return the widths of a table split into multiples of 16, as even as these allow.

    Kernels read rows of such widths faster than those in between.

    Returns:
        Widest first; empty where the table or the task's rules forbid it, or where
        `split_widths` does the same.
    """
    width = task.tables[table].embedding_dim
    even = split_widths(task, table, num_shards)
    units, extra = divmod(width // ALIGNMENT, num_shards)
    if not (task.uneven and even and units) or width % ALIGNMENT:
        return ()
    narrow = units * ALIGNMENT
    widths = (narrow + ALIGNMENT,) * extra + (narrow,) * (num_shards - extra)
    return widths if widths != even and narrow >= task.min_widths[table] else ()


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
        self.dims_T: Ints = np.array([t.embedding_dim for t in task.tables])
        self.groups_T: Ints = np.asarray(task.groups, dtype=np.int64)
        self.stages_T: Ints = np.asarray(task.stages, dtype=np.int64)[self.groups_T]
        self.caps_W: Floats = np.asarray(
            task.memory_bytes or (np.inf,) * task.world_size, dtype=np.float64
        )
        self._fixed_T = np.asarray(task.fixed_bytes, dtype=np.float64)
        self._column_bytes_T = np.asarray(task.column_bytes, dtype=np.float64)
        most_units = int(self.dims_T.max()) // COLUMN_MULTIPLE
        self._row_TU: Ints = np.full((len(task.tables), most_units + 1), -1)
        # Row 0 is no shard: of width 0, with an encoding of zeros.
        self._row_TU[:, 0] = 0
        size = 2 * len(task.tables) + 16
        self._used = 1
        self._table_R: Ints = np.zeros(size, dtype=np.int64)
        self._width_R: Ints = np.zeros(size, dtype=np.int64)
        self._encoding_RE: Floats = np.zeros((size, simulator.cost_model.encoding_dim))
        self._splits: dict[tuple[int, int, int], tuple[int, ...]] = {}
        everything = np.arange(len(task.tables))
        encodings = simulator.encodings(
            list(zip(everything.tolist(), self.dims_T.tolist(), strict=True))
        )
        total_GE = np.zeros((task.num_groups, encodings.shape[1]))
        np.add.at(total_GE, self.groups_T, encodings)
        self.mean_GE: Floats = total_GE / task.world_size
        # The average rank, or the average table where ranks hold less than one.
        num_G = np.bincount(self.groups_T, minlength=task.num_groups)
        self.context_share_G: Floats = np.maximum(
            1.0 / task.world_size, 1.0 / np.maximum(num_G, 1)
        )
        self._context_GE = total_GE * self.context_share_G[:, None]
        self.context_G2: Floats = np.zeros((task.num_groups, 2))
        self.context_G2[num_G > 0] = self.predict(self._context_GE[num_G > 0])
        self._features_T: Floats = simulator.features_per_table.astype(np.float64)
        self.index_bytes_T: Floats = simulator.index_bytes_per_table
        self.leads_T: npt.NDArray[np.bool_] = np.ones(len(task.tables), dtype=bool)
        """False for followers, which are placed beside their leaders."""
        self._riders_TQ: Ints = np.zeros((len(task.tables), 0), dtype=np.int64)
        self._merged_TE: tuple[Ints, Floats] | None = None
        if merge and own.together:
            self._merge(own, encodings)
        columns_T = self.dims_T * self._features_T
        self.mean_columns = float(columns_T.sum() / task.world_size)
        self.mean_columns_S = self._stage_means(columns_T)
        self.mean_index_bytes_S = self._stage_means(self.index_bytes_T)
        self.comms_per_column_S, self.comms_per_index_byte_S = self._comms_slopes()
        self.whole_T = self.rows(everything, self.dims_T)

    def _merge(self, own: ShardingTask, encoding_TE: Floats) -> None:
        """Give the first table of each set and group what all of them have."""
        num_tables = len(own.tables)
        leader_T = leaders(own)
        self.leads_T = leader_T == np.arange(num_tables)
        first: dict[tuple[int, int], int] = {}
        keys = zip(leader_T.tolist(), self.groups_T.tolist(), strict=True)
        part_T = np.array([first.setdefault(key, t) for t, key in enumerate(keys)])

        def gathered(amount_T: Floats) -> Floats:
            total_T = np.bincount(part_T, weights=amount_T, minlength=num_tables)
            return total_T.astype(np.float64)

        self._features_T = gathered(self._features_T * self.dims_T) / self.dims_T
        self.index_bytes_T = gathered(self.index_bytes_T)
        in_sets = np.array([t for tables in own.together for t in tables])
        slot_T = np.full(num_tables, -1)
        slot_T[in_sets] = np.arange(len(in_sets))
        encodings = np.zeros((len(in_sets), encoding_TE.shape[1]))
        np.add.at(encodings, slot_T[part_T[in_sets]], encoding_TE[in_sets])
        self._merged_TE = slot_T, encodings
        riders = np.flatnonzero((part_T == np.arange(num_tables)) & ~self.leads_T)
        if len(riders):
            count_T = np.bincount(leader_T[riders], minlength=num_tables)
            self._riders_TQ = np.full((num_tables, int(count_T.max())), -1)
            for rider in riders.tolist():
                row = self._riders_TQ[leader_T[rider]]
                row[int((row >= 0).sum())] = rider

    def riders(self, table_N: Ints) -> tuple[Ints, Ints]:
        """Whole tables of other groups that go where leaders go.

        Returns:
            Places in `table_N` and the tables that ride there.
        """
        riders_NQ = self._riders_TQ[table_N]
        index, place = (riders_NQ >= 0).nonzero()
        riders: Ints = riders_NQ[index, place]
        return index, riders

    @property
    def encoding_dim(self) -> int:
        """Values per encoding."""
        return self.simulator.cost_model.encoding_dim

    def splits(self, table: int) -> tuple[int, ...]:
        """Return the numbers of near-even shards that a table may be split into."""
        task = self.task
        key = (
            task.tables[table].embedding_dim,
            task.min_widths[table],
            task.max_shards[table],
        )
        if key not in self._splits:
            self._splits[key] = legal_splits(task, table)
        return self._splits[key]

    def _stage_means(self, amount_T: npt.NDArray[np.float64] | Ints) -> Floats:
        """Amount per rank in each stage, `S`."""
        total_S = np.bincount(
            self.stages_T, weights=amount_T, minlength=self.task.num_stages
        )
        mean: Floats = total_S / self.task.world_size
        return mean

    def _comms_slopes(self) -> tuple[Floats, Floats]:
        """Milliseconds of one more column, and of one more index byte, on a rank.

        Taken at balanced loads, of which one rank's grows by a tenth; `S` each.
        """
        shape = (2, self.task.world_size, 1)
        columns = np.tile(self.mean_columns_S, shape)
        index_bytes = np.tile(self.mean_index_bytes_S, shape)
        columns[1, 0] *= 1.1
        index_bytes[1, 0] *= 1.1
        worst_S3 = self.simulator.comms_costs(columns, index_bytes).max(axis=1)
        gain_S3 = np.maximum(worst_S3[1] - worst_S3[0], 0.0) * 10
        per_column = gain_S3[:, 1:].sum(axis=1) / np.maximum(self.mean_columns_S, 1e-12)
        per_byte = gain_S3[:, 0] / np.maximum(self.mean_index_bytes_S, 1e-12)
        return per_column, per_byte

    def predict(self, sums_SE: Floats) -> Floats:
        """Forward and backward of sets, `S x 2` [ms], counted as evaluations."""
        self.num_evaluated += len(sums_SE)
        return self.simulator.cost_model.predict_sums(sums_SE)

    def rows(self, table_N: npt.ArrayLike, width_N: npt.ArrayLike) -> Ints:
        """Return the row of each shard, computing those not met before.

        A width of 0 has a row, too, with an encoding of zeros.
        """
        table = np.asarray(table_N, dtype=np.int64)
        units = np.asarray(width_N, dtype=np.int64) // COLUMN_MULTIPLE
        rows: Ints = self._row_TU[table, units]
        missing = rows < 0
        if missing.any():
            self._add(*self._worth_adding(table[missing], units[missing]))
            rows = self._row_TU[table, units]
        return rows

    def _worth_adding(self, table_N: Ints, units_N: Ints) -> tuple[Ints, Ints]:
        """Shards to encode: of few tables all widths at once, of many those asked for.

        Who asks for one width of a table mostly asks for others soon.
        """
        num_units = self._row_TU.shape[1]
        tables = np.unique(table_N)
        if len(tables) > MAX_ENCODED_TABLES:
            asked = np.unique(table_N * num_units + units_N)
            return asked // num_units, asked % num_units * COLUMN_MULTIPLE
        units = np.arange(1, num_units)
        new = (self._row_TU[tables, 1:] < 0) & (
            units * COLUMN_MULTIPLE <= self.dims_T[tables, None]
        )
        table, place = np.nonzero(new)
        return tables[table], units[place] * COLUMN_MULTIPLE

    def _add(self, table_N: Ints, width_N: Ints) -> None:
        end = self._used + len(table_N)
        if end > len(self._table_R):
            room = max(end, 2 * len(self._table_R)) - len(self._table_R)
            self._table_R = np.pad(self._table_R, (0, room))
            self._width_R = np.pad(self._width_R, (0, room))
            self._encoding_RE = np.pad(self._encoding_RE, ((0, room), (0, 0)))
        new = slice(self._used, end)
        features = self.simulator.shard_features(table_N, width_N)
        encoding = self.simulator.cost_model.encode(features)
        if self._merged_TE is not None:
            slot_T, encodings = self._merged_TE
            slot = slot_T[table_N]
            encoding[slot >= 0] = encodings[slot[slot >= 0]]
        self._table_R[new], self._width_R[new] = table_N, width_N
        self._encoding_RE[new] = encoding
        self._row_TU[table_N, width_N // COLUMN_MULTIPLE] = np.arange(self._used, end)
        self._used = end

    def added(self, rows_N: Ints) -> Floats:
        """What each shard adds to an average rank by the model, `N x 2` [ms].

        Below 0 where the model dips.
        """
        group = self.groups_T[self._table_R[rows_N]]
        with_shard = self.predict(self._context_GE[group] + self._encoding_RE[rows_N])
        added: Floats = with_shard - self.context_G2[group]
        return added

    def marginal(self, rows_N: Ints) -> Floats:
        """As `added`, but at least a share of the shard's cost alone."""
        alone = self.predict(self._encoding_RE[rows_N])
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
        return self._encoding_RE[rows_N]

    def columns(self, table_N: Ints, width_N: Ints) -> Floats:
        """Output columns of shards: width times features."""
        product: Floats = self._features_T[table_N] * width_N
        return product

    def bytes(self, table_N: Ints, width_N: Ints) -> Floats:
        """Memory of shards; a width of 0 needs none."""
        size: Floats = np.where(
            width_N > 0,
            self._fixed_T[table_N] + self._column_bytes_T[table_N] * width_N,
            0.0,
        )
        return size

    def approximate(self, table_N: Ints, width_N: Ints) -> Floats:
        """Forward, backward and collectives that shards add to an average rank.

        Affine in the width, exact at 4 columns and at the whole table.

        Returns:
            `N x P` milliseconds; 0 where the width is 0.
        """
        offset_PT, slope_PT = self.affine
        offset = offset_PT.take(table_N, axis=1) * (width_N > 0)
        cost: Floats = (offset + slope_PT.take(table_N, axis=1) * width_N).T
        return cost

    def total_ms(self, table_N: Ints, width_N: Ints) -> Floats:
        """Sum of `approximate` over the phases, `N`."""
        offset_T, slope_T = self._total_affine
        total: Floats = offset_T[table_N] * (width_N > 0) + slope_T[table_N] * width_N
        return total

    @functools.cached_property
    def _total_affine(self) -> tuple[Floats, Floats]:
        offset_PT, slope_PT = self.affine
        return offset_PT.sum(axis=0), slope_PT.sum(axis=0)

    def approximate_phases(
        self, compute_CWS2: Floats, columns_CWS: Floats, index_bytes_CWS: Floats
    ) -> Floats:
        """Return `C x W x P`: exact compute, collectives by their slopes [ms]."""
        comms = columns_CWS * self.comms_per_column_S
        comms += index_bytes_CWS * self.comms_per_index_byte_S
        phases = np.concatenate([compute_CWS2, comms[..., None]], axis=-1)
        return phases.reshape(*phases.shape[:-2], -1)

    @functools.cached_property
    def mean_phases_P(self) -> Floats:
        """Phases of the average rank [ms], approximate."""
        total = self.approximate(np.arange(len(self.dims_T)), self.dims_T).sum(axis=0)
        mean: Floats = total / self.task.world_size
        return mean

    @functools.cached_property
    def affine(self) -> tuple[Floats, Floats]:
        """Offset and cost per column of `approximate`, `P x T` each."""
        tables = np.arange(len(self.dims_T))
        narrow = self.marginal(self.rows(tables, np.full(len(tables), COLUMN_MULTIPLE)))
        whole = self.marginal(self.whole_T)
        extra = (self.dims_T - COLUMN_MULTIPLE)[:, None]
        # A table of 4 columns has no other width: any slope will do.
        slope = np.where(
            extra > 0, np.maximum(whole - narrow, 0.0) / np.maximum(extra, 1), 0.0
        )
        stage = self.stages_T
        index_ms = self.comms_per_index_byte_S[stage]
        index_ms = index_ms * self.index_bytes_T
        column_ms = self.comms_per_column_S[stage] * self._features_T
        offset = whole - slope * self.dims_T[:, None]
        spread = np.zeros((2, len(tables), self.task.num_stages, 3))
        spread[0, tables, stage] = np.column_stack([offset, index_ms])
        spread[1, tables, stage] = np.column_stack([slope, column_ms])
        offset_TP, slope_TP = spread.reshape(2, len(tables), -1)
        # What followers cost is their leaders' cost, wherever it arises.
        leader, rider = self.riders(tables)
        whole_NP = offset_TP[rider] + slope_TP[rider] * self.dims_T[rider, None]
        np.add.at(offset_TP, leader, whole_NP)
        offset_TP[~self.leads_T] = slope_TP[~self.leads_T] = 0.0
        return offset_TP.T.copy(), slope_TP.T.copy()

    def critical_paths(self, rows_LN: Ints, rank_LN: Ints) -> tuple[Floats, Floats]:
        """Evaluate placements exactly.

        Args:
            rows_LN: Bank rows, one placement per line, padded with -1.
            rank_LN: Rank of each shard; not read where the row is -1.

        Returns:
            `L` critical paths [ms] and `L x W x P` phases of each rank [ms], of which
            the collectives are approximate.
        """
        lane, place = np.nonzero(rows_LN >= 0)
        rows, rank = rows_LN[lane, place], rank_LN[lane, place]
        num_sets = len(rows_LN) * self.task.world_size
        loads, count = self.loads(rows, lane * self.task.world_size + rank, num_sets)
        compute = np.zeros((*count.shape, 2))
        compute[count > 0] = self.predict(loads.sums_CWGE[count > 0])
        shape = (len(rows_LN), self.task.world_size, self.task.num_stages)
        compute_LWS2 = self.simulator.stage_compute(compute).reshape(*shape, 2)
        columns_LWS = loads.columns_CWS.reshape(shape)
        index_bytes_LWS = loads.index_bytes_CWS.reshape(shape)
        exact = self.simulator.phases(compute_LWS2, columns_LWS, index_bytes_LWS)
        return critical_path(exact), self.approximate_phases(
            compute_LWS2, columns_LWS, index_bytes_LWS
        )

    def loads(self, rows_N: Ints, set_N: Ints, num_sets: int) -> tuple[RankLoads, Ints]:
        """Add up shards by the set (a rank of some placement) that they are in.

        Returns:
            Loads of the sets, first axis `num_sets` in place of `C x W`, and the number
            of shards, `num_sets x G`, riders among them.
        """
        num_groups, num_stages = self.task.num_groups, self.task.num_stages
        table = self.table(rows_N)
        place, riders = self.riders(table)
        if len(riders):
            table = np.concatenate([table, riders])
            rows_N = np.concatenate([rows_N, self.whole_T[riders]])
            set_N = np.concatenate([set_N, set_N[place]])
        cell = set_N * num_groups + self.groups_T[table]
        size = num_sets * num_groups
        sums = sum_by(cell, self.encoding(rows_N), size)
        count = np.bincount(cell, minlength=size).reshape(num_sets, num_groups)
        stage = set_N * num_stages + self.stages_T[table]
        amounts = [
            np.bincount(stage, weights=w, minlength=num_sets * num_stages)
            .reshape(num_sets, num_stages)
            .astype(np.float64)
            for w in (
                self.columns(table, self.width(rows_N)),
                self.index_bytes_T[table],
            )
        ]
        return RankLoads(sums.reshape(num_sets, num_groups, -1), *amounts), count


def sum_by(ids_N: Ints, values_NE: Floats, num_ids: int) -> Floats:
    """Sum rows of values by id, in the order of the rows: `num_ids x E`."""
    sums = np.zeros((num_ids, values_NE.shape[1]))
    if len(ids_N):
        order = np.argsort(ids_N, kind="stable")
        ordered = ids_N[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        sums[ordered[starts]] = np.add.reduceat(values_NE[order], starts, axis=0)
    return sums


def placement_from_widths(width_TW: Ints) -> Placement:
    """Return the placement that a `T x W` matrix of widths stands for."""
    table, rank = np.nonzero(width_TW)
    triples: Sequence[tuple[int, int, int]] = list(
        zip(table.tolist(), width_TW[table, rank].tolist(), rank.tolist(), strict=True)
    )
    return Placement.from_widths(width_TW.shape[1], triples)
