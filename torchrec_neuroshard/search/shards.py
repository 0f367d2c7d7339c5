"""What the searches know of each possible shard, by (table, width).

Shapes: `N` shards, `R` known (table, width) rows, `T` tables, `W` ranks, `G` fusion
groups, `E` encoding values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.simulator import Simulator, critical_path
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
    """

    def __init__(self, simulator: Simulator) -> None:
        """Encode the whole tables and the average rank."""
        self.simulator = simulator
        self.task = task = simulator.task
        self.num_evaluated = 0
        self.dims_T: Ints = np.array([t.embedding_dim for t in task.tables])
        self.groups_T: Ints = np.asarray(task.groups, dtype=np.int64)
        self.caps_W: Floats = np.asarray(
            task.memory_bytes or (np.inf,) * task.world_size, dtype=np.float64
        )
        self._fixed_T = np.asarray(task.fixed_bytes, dtype=np.float64)
        self._column_bytes_T = np.asarray(task.column_bytes, dtype=np.float64)
        self._row_TU: npt.NDArray[np.int32] = np.full(
            (len(task.tables), int(self.dims_T.max()) // COLUMN_MULTIPLE + 1),
            -1,
            dtype=np.int32,
        )
        size = 2 * len(task.tables) + 16
        self._used = 0
        self._table_R: Ints = np.zeros(size, dtype=np.int64)
        self._width_R: Ints = np.zeros(size, dtype=np.int64)
        self._encoding_RE: Floats = np.zeros((size, simulator.cost_model.encoding_dim))
        self._marginal_R2: Floats = np.zeros((size, 2))
        self._splits: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._affine_T6: Floats | None = None
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
        self.mean_columns = float(
            (self.dims_T * simulator.features_per_table).sum() / task.world_size
        )
        self.comms_per_column_2 = self._comms_slope()
        self.whole_T = self.rows(everything, self.dims_T)

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

    def _comms_slope(self) -> Floats:
        """Milliseconds, forward and backward, of one more column on the worst rank."""
        task = self.task
        columns = np.full((2, task.world_size), self.mean_columns)
        step = 0.1 * self.mean_columns
        columns[1, 0] += step
        worst = self.simulator.comms_model.all_to_all(columns, task.batch_size).max(
            axis=1
        )
        slope: Floats = np.maximum(worst[1] - worst[0], 0.0) / step
        return slope

    def predict(self, sums_SE: Floats) -> Floats:
        """Forward and backward of sets, `S x 2` [ms], counted as evaluations."""
        self.num_evaluated += len(sums_SE)
        return self.simulator.cost_model.predict_sums(sums_SE)

    def rows(self, table_N: npt.ArrayLike, width_N: npt.ArrayLike) -> Ints:
        """Return the row of each shard, computing those not met before."""
        table = np.asarray(table_N, dtype=np.int64)
        units = np.asarray(width_N, dtype=np.int64) // COLUMN_MULTIPLE
        rows = self._row_TU[table, units].astype(np.int64)
        if (rows < 0).any():
            missing = np.unique(np.stack([table[rows < 0], units[rows < 0]]), axis=1)
            self._add(missing[0], missing[1] * COLUMN_MULTIPLE)
            rows = self._row_TU[table, units].astype(np.int64)
        return rows

    def _add(self, table_N: Ints, width_N: Ints) -> None:
        end = self._used + len(table_N)
        while end > len(self._table_R):
            self._table_R = np.concatenate(
                [self._table_R, np.zeros_like(self._table_R)]
            )
            self._width_R = np.concatenate(
                [self._width_R, np.zeros_like(self._width_R)]
            )
            self._encoding_RE = np.concatenate(
                [self._encoding_RE, np.zeros_like(self._encoding_RE)]
            )
            self._marginal_R2 = np.concatenate(
                [self._marginal_R2, np.zeros_like(self._marginal_R2)]
            )
        new = slice(self._used, end)
        features = self.simulator.features(
            list(zip(table_N.tolist(), width_N.tolist(), strict=True))
        )
        encoding = self.simulator.cost_model.encode(features)
        self._table_R[new], self._width_R[new] = table_N, width_N
        self._encoding_RE[new] = encoding
        group = self.groups_T[table_N]
        with_shard = self.predict(self._context_GE[group] + encoding)
        marginal = with_shard - self.context_G2[group]
        alone = self.predict(encoding)
        marginal = np.maximum(marginal, MIN_MARGINAL_SHARE * alone)
        self._marginal_R2[new] = marginal
        self._row_TU[table_N, width_N // COLUMN_MULTIPLE] = np.arange(self._used, end)
        self._used = end

    def table(self, rows_N: Ints) -> Ints:
        """Table of each row."""
        return self._table_R[rows_N]

    def width(self, rows_N: Ints) -> Ints:
        """Width of each row."""
        return self._width_R[rows_N]

    def encoding(self, rows_N: Ints) -> Floats:
        """Encoding of each row, `N x E`."""
        return self._encoding_RE[rows_N]

    def marginal(self, rows_N: Ints) -> Floats:
        """What each shard adds to an average rank, `N x 2` [ms]."""
        return self._marginal_R2[rows_N]

    def columns(self, table_N: Ints, width_N: Ints) -> Floats:
        """Output columns of shards: width times features."""
        product: Floats = (self.simulator.features_per_table[table_N] * width_N).astype(
            np.float64
        )
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
            `N x 3` milliseconds; 0 where the width is 0.
        """
        offset, slope = self.affine(table_N)
        width = width_N[:, None]
        cost: Floats = offset * (width > 0) + slope * width
        return cost

    def affine(self, table_N: Ints) -> tuple[Floats, Floats]:
        """Offset and cost per column of `approximate`, `N x 3` each."""
        if self._affine_T6 is None:
            self._affine_T6 = self._fit_affine()
        affine = self._affine_T6[table_N]
        return affine[:, :3], affine[:, 3:]

    @property
    def mean_phases_3(self) -> Floats:
        """Forward, backward and collectives of the average rank [ms], approximate."""
        total = self.approximate(np.arange(len(self.dims_T)), self.dims_T).sum(axis=0)
        mean: Floats = total / self.task.world_size
        return mean

    def _fit_affine(self) -> Floats:
        tables = np.arange(len(self.dims_T))
        narrow = self.marginal(self.rows(tables, np.full(len(tables), COLUMN_MULTIPLE)))
        whole = self.marginal(self.whole_T)
        extra = (self.dims_T - COLUMN_MULTIPLE)[:, None]
        # A table of 4 columns has no other width: any slope will do.
        slope = np.where(
            extra > 0, np.maximum(whole - narrow, 0.0) / np.maximum(extra, 1), 0.0
        )
        comms = self.comms_per_column_2.sum() * self.simulator.features_per_table
        offset = whole - slope * self.dims_T[:, None]
        zero = np.zeros((len(tables), 1))
        return np.concatenate([offset, zero, slope, comms[:, None]], axis=1)

    def critical_paths(self, rows_LN: Ints, rank_LN: Ints) -> tuple[Floats, Floats]:
        """Evaluate placements exactly.

        Args:
            rows_LN: Bank rows, one placement per line, padded with -1.
            rank_LN: Rank of each shard; not read where the row is -1.

        Returns:
            `L` critical paths [ms] and `L x W x 3` phases of each rank: forward,
            backward and approximate collectives [ms].
        """
        task = self.task
        num_lanes, num_ranks, num_groups = (
            len(rows_LN),
            task.world_size,
            task.num_groups,
        )
        lane, place = np.nonzero(rows_LN >= 0)
        rows, rank = rows_LN[lane, place], rank_LN[lane, place]
        table, width = self.table(rows), self.width(rows)
        set_ids = (lane * num_ranks + rank) * num_groups + self.groups_T[table]
        sums = sum_by(set_ids, self.encoding(rows), num_lanes * num_ranks * num_groups)
        held = np.flatnonzero(np.bincount(set_ids, minlength=len(sums)))
        compute = np.zeros((len(sums), 2))
        compute[held] = self.predict(sums[held])
        compute_LW2 = compute.reshape(num_lanes, num_ranks, num_groups, 2).sum(axis=2)
        columns = (
            np.bincount(
                lane * num_ranks + rank,
                weights=self.columns(table, width),
                minlength=num_lanes * num_ranks,
            )
            .reshape(num_lanes, num_ranks)
            .astype(np.float64)
        )
        comms = self.simulator.comms_model.all_to_all(columns, task.batch_size)
        exposed = (columns * self.comms_per_column_2.sum())[..., None]
        phases = np.concatenate([compute_LW2, exposed], axis=2)
        return critical_path(compute_LW2, comms), phases


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
