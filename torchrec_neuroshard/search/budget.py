"""Bytes that a changed plan moves, and the limit on them.

A job already runs one plan, the *current plan*. A search may change it, but switching
to the new plan sends weights between ranks, and a budget limits these bytes.

The search only decides how many columns of a table each rank holds: equally many, as
TorchRec requires of a table that moves. This module decides which columns: each rank
gets one contiguous shard, in the order that moves the fewest bytes from the current
plan.

Shapes: `N` layouts of one table each, `T` tables, `W` ranks, `K` ranks of one table,
`U` units of 4 columns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MAX_ORDERED = 8
"""Up to this many shards of a table, all orders are compared. More shards keep the
order of the current plan; a rank new to the table takes the place of one that leaves.
"""

Shards = tuple[tuple[int, int, int], ...]
"""(offset, width, rank) of the shards of one table, by offset."""


class MoveBudget:
    """The current plan, the bytes that changes of it move, and the limit.

    Attributes:
        width_TW: Columns of each table on each rank in the current plan.
        movable_T: False for tables that must stay, or that only move with others.
    """

    def __init__(
        self,
        task: ShardingTask,
        at_work: Sequence[Shards],
        *,
        limit_bytes: float,
        column_bytes: Sequence[int],
        shard_bytes: Sequence[int],
        stay: Collection[int] = (),
        together: Sequence[Sequence[int]] = (),
        keep_cuts: Collection[int] = (),
        all_leave: bool = False,
        min_gain: float = 0.0,
    ) -> None:
        """Read the current plan and the limits.

        Args:
            task: The tables and ranks.
            at_work: Shards of each table; several may be on one rank.
            limit_bytes: Most bytes that may move.
            column_bytes: Per table: bytes that move with a column.
            shard_bytes: Per table: bytes that move with each shard or part of a shard.
            stay: Tables that must not change.
            together: Sets of tables that move to one rank together.
            keep_cuts: Tables that keep their number of shards.
            all_leave: Whether every column of a changed table must leave its rank.
            min_gain: Relative gain that is too small to move anything for.
        """
        num_ranks, every = task.world_size, np.arange(len(task.tables))
        num_tables = len(every)
        self.limit_bytes = limit_bytes
        self.together = [list(tables) for tables in together]
        self.min_gain = min_gain
        self._at_work = list(at_work)
        self._all_leave = all_leave
        self._known: dict[tuple[int, bytes], float] = {}
        self._unit_bytes_T = np.array(column_bytes, dtype=np.float64) * COLUMN_MULTIPLE
        self._shard_bytes_T = np.array(shard_bytes, dtype=np.float64)
        self._stays_T = np.isin(every, list(stay))
        self._keeps_T = np.isin(every, list(keep_cuts))
        self.movable_T: Bools = ~self._stays_T
        self.movable_T[[t for tables in self.together for t in tables]] = False
        units = max(t.embedding_dim for t in task.tables) // COLUMN_MULTIPLE
        self._rank_TU: Ints = np.full((num_tables, units), -1)
        self._first_TU: Bools = np.zeros((num_tables, units), dtype=bool)
        self.width_TW: Ints = np.zeros((num_tables, num_ranks), dtype=np.int64)
        self._count_T: Ints = np.array([len(shards) for shards in at_work])
        for table, shards in enumerate(at_work):
            for offset, width, rank in shards:
                start, end = offset // COLUMN_MULTIPLE, offset + width
                self._rank_TU[table, start : end // COLUMN_MULTIPLE] = rank
                self._first_TU[table, start] = True
                self.width_TW[table, rank] += width

    def colocated_with(self, table: int) -> list[int]:
        """Return the tables that move together with this one, including it."""
        return next((s for s in self.together if table in s), [table])

    def bytes(self, table_N: Ints, row_NW: Ints) -> Floats:
        """Return the fewest bytes to move until tables have these widths.

        Args:
            table_N: Tables.
            row_NW: Columns of each table on each rank.

        Returns:
            `N` bytes: 0 for an unchanged table, inf if the change is not allowed.
        """
        total = np.zeros(len(table_N))
        changed = (row_NW != self.width_TW[table_N]).any(axis=1)
        allowed = self._allows(table_N, row_NW)
        total[changed & ~allowed] = np.inf
        lines = np.flatnonzero(changed & allowed)
        count = np.count_nonzero(row_NW[lines], axis=1)
        for k in np.unique(count).tolist():
            part = lines[count == k]
            keys = [
                (t, row_NW[n].tobytes())
                for n, t in zip(part, table_N[part], strict=True)
            ]
            new = [i for i, key in enumerate(keys) if key not in self._known]
            if new:
                fresh = self._arrange(table_N[part[new]], row_NW[part[new]])[0]
                self._known.update(zip((keys[i] for i in new), fresh, strict=True))
            total[part] = [self._known[key] for key in keys]
        return total

    def shards(self, table: int, row_W: Ints) -> Shards:
        """Return the shards of a table that has these widths.

        An unchanged table keeps the shards of the current plan, except that adjacent
        shards on one rank are joined if the rules allow it.
        """
        tables, row_NW, at_work = np.array([table]), row_W[None], self._at_work[table]
        stays = bool((row_W == self.width_TW[table]).all())
        joins = len(at_work) > np.count_nonzero(row_W)
        if stays and not (joins and self._allows(tables, row_NW)[0]):
            return at_work
        best_N, order = self._arrange(tables, row_NW)
        if stays and best_N[0] > 0:
            return at_work
        ends = np.cumsum(row_W[order])
        return tuple(
            (int(end - row_W[rank]), int(row_W[rank]), rank)
            for end, rank in zip(ends, order, strict=True)
        )

    def doubled(self) -> list[tuple[int, int, list[int]]]:
        """Return where a rank holds several shards of one table in the current plan.

        Lists only tables that stay or keep their cuts. No other layout of theirs has
        such a width, so it can be priced as these shards (`ShardBank.price_as`).

        Returns:
            Table, its columns on the rank, and the widths of its shards there.
        """
        return [
            (table, sum(widths), widths)
            for table in np.flatnonzero(self._keeps_T | self._stays_T).tolist()
            for rank in {rank for *_, rank in self._at_work[table]}
            for widths in [[w for _, w, r in self._at_work[table] if r == rank]]
            if len(widths) > 1
        ]

    def _allows(self, table_N: Ints, row_NW: Ints) -> Bools:
        """Return whether tables may have these widths, `N`; bytes are not checked."""
        count = np.count_nonzero(row_NW, axis=1)
        fine: Bools = ~self._stays_T[table_N]
        fine &= count * row_NW.max(axis=1) == row_NW.sum(axis=1)
        fine &= ~self._keeps_T[table_N] | (count == self._count_T[table_N])
        return fine

    def _arrange(self, table_N: Ints, row_NW: Ints) -> tuple[Floats, list[int]]:
        """Return the fewest bytes over all orders of the shards, and that order.

        This is a dynamic program over sets of ranks: the best order of a set is the
        best order of a set with one rank less, followed by that rank.

        Args:
            table_N: Tables.
            row_NW: Their widths. Every table is on the same number of ranks.

        Returns:
            `N` bytes, and the first table's ranks in the order of their columns.
        """
        lines = np.arange(len(table_N))
        rank_NK = np.nonzero(row_NW)[1].reshape(len(table_N), -1)
        num = rank_NK.shape[1]
        if num <= MAX_ORDERED:
            # A set of ranks is a bit mask. A step adds rank k behind a set.
            steps = [
                (after ^ (1 << k), k, after)
                for after in range(1, 1 << num)
                for k in range(num)
                if after >> k & 1
            ]
        else:
            steps = [((1 << k) - 1, k, (2 << k) - 1) for k in range(num)]
            for line, table in enumerate(table_N.tolist()):
                rank_NK[line] = self._as_at_work(table, rank_NK[line].tolist())
        units_NK = row_NW[lines[:, None], rank_NK] // COLUMN_MULTIPLE
        away_NKU = self._rank_TU[table_N][:, None] != rank_NK[:, :, None]
        pad = ((0, 0), (0, 0), (1, 0))
        moved_NKU = np.pad(away_NKU.cumsum(axis=2), pad)
        cut_NKU = (away_NKU & self._first_TU[table_N][:, None]).cumsum(axis=2)
        unit_bytes, shard_bytes = (
            b[table_N] for b in (self._unit_bytes_T, self._shard_bytes_T)
        )
        place: dict[int, Ints] = {0: np.zeros(len(lines), dtype=np.int64)}
        best: dict[int, Floats] = {0: np.zeros(len(lines))}
        last: dict[int, Ints] = {}
        for before, k, after in steps:
            start, end = place[before], place[before] + units_NK[:, k]
            moved = moved_NKU[lines, k, end] - moved_NKU[lines, k, start]
            parts = cut_NKU[lines, k, end - 1] - cut_NKU[lines, k, start]
            parts += away_NKU[lines, k, start]
            cost = best[before] + unit_bytes * moved + shard_bytes * parts
            if self._all_leave:
                cost[moved < end - start] = np.inf
            known = best.get(after)
            better = cost < known if known is not None else np.ones_like(cost, bool)
            place[after] = end
            best[after] = cost if known is None else np.minimum(known, cost)
            last[after] = np.where(better, k, last.get(after, 0))
        order: list[int] = []
        left = (1 << num) - 1
        while left:
            k = int(last[left][0])
            order.insert(0, int(rank_NK[0, k]))
            left ^= 1 << k
        return best[(1 << num) - 1], order

    def _as_at_work(self, table: int, ranks: Sequence[int]) -> list[int]:
        """Sort ranks by the table's columns that they hold in the current plan."""
        own = dict.fromkeys(rank for *_, rank in self._at_work[table])
        new = [rank for rank in ranks if rank not in own]
        order = list[int]()
        for rank in own:
            if rank in ranks:
                order.append(rank)
            elif new:
                order.append(new.pop(0))
        return order + new
