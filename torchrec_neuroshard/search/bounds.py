"""Lower bound: the critical path that no placement can beat, by the cost model.

The bound is the time of an iteration in which all ranks have equal work (`balanced`).
For that, the kernels' work must add up over shards. There are two kinds of work:

- Some cost models, such as estimates for cards, know an additive lower bound on their
  times (`CostModel.additive`). Then the bound is a *proof*, if balanced loads are the
  fastest for the collectives (`CommsModel.even_is_fastest`). More alternatives never
  raise it, except by HiGHS's tolerance.
- For other models, such as nets, each shard gets a *price*. The worth of a set of
  shards is the sum of their prices. Prices are valid if no set costs less than it is
  worth. The higher the valid prices, the higher the bound: this is the dual of packing
  sets into ranks. Prices start at the slopes of the model at the plan's average rank.
  Each round looks for sets that are worth as much as this rank and cost less, lowers
  the prices of their tables and raises all others (a subgradient method). Rounds may
  miss cheaper sets, so this bound is an *estimate*.

For some models both exist. The estimate is returned if it is clearly higher than the
proof.

Shapes: `N` shards, `I` items (one for each table and fusion group), `L` sets of items,
`P` preferences, `T` entries of the task (one for each way of a table), `O` tables, `W`
ranks, `G` fusion groups, `E` encoding values, `X` encoding values of all groups of a
stage, `K` rows of work, `2` forward and backward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchrec_neuroshard.search.balanced import Program, Work, list_options, owners
from torchrec_neuroshard.search.shards import Floats, Ints, ShardBank, sum_by

PROOF_WORTH = 0.01
"""A proof at most this relative amount below the estimate is returned instead of it."""
NUM_ROUNDS, NUM_QUICK_ROUNDS = 100, 3
"""Most changes of the prices: thorough and quick."""
NUM_SETS, NUM_STEPS = 6, 4
"""Number of sets that are made cheaper side by side, and steps per round."""
PREFERENCES = np.array([0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
"""A step tries one new set for each preference: the relative advantage of the items
that are already in the set."""
SLOPE_SHARE = 0.01
"""Relative change of an encoding value to find the model's slope."""
PATIENCE, SHRINKS = 10, 0.7
"""After `PATIENCE` rounds without a gain, prices change `SHRINKS` times as much."""
MAX_CHANGE = 0.5
"""Largest relative change of a price in a round."""
MAX_LONE, NUM_COMPANIONS = 512, 16
"""Nets may predict less time for more shards. So the `MAX_LONE` costliest shards are
also priced together with each of the `NUM_COMPANIONS` cheapest."""
TINY, ROUNDING = 1e-9, 1e-7


class Bound(NamedTuple):
    """A lower bound on the critical path of all placements."""

    ms: float
    is_proven: bool
    """False for an estimate: its prices are only checked on sets that were searched."""


def lower_bound(
    bank: ShardBank,
    plan_TW: Ints,
    critical_ms: float,
    *,
    deadline: float = math.inf,
    quick: bool = False,
) -> Bound:
    """Return a lower bound on the critical path of every placement.

    Args:
        bank: The task's shards, not merged.
        plan_TW: Widths of the best known placement.
        critical_ms: Critical path of that placement.
        deadline: `time.monotonic()` after which the bound is not improved. The result
            depends on the clock only if the deadline is reached.
        quick: Whether to stop at a proof, or after a few changes of the prices.

    Returns:
        At most `critical_ms`; 0 if the solver finds nothing.
    """
    simulator = bank.simulator
    additive = simulator.cost_model.additive
    end = time.monotonic() if quick else deadline
    proven_ms = 0.0
    if additive is not None and simulator.comms_model.even_is_fastest:
        proven_ms = _solved(bank, _Sums(bank, additive), end)
        if quick or proven_ms >= critical_ms * (1 - PROOF_WORTH):
            return Bound(min(proven_ms, critical_ms), proven_ms > 0)
    rounds = NUM_QUICK_ROUNDS if quick else NUM_ROUNDS
    prices = _Prices(bank, plan_TW, rounds, deadline)
    found_ms = min(_solved(bank, prices, end), critical_ms)
    if 0 < proven_ms >= found_ms * (1 - PROOF_WORTH):
        return Bound(proven_ms, True)
    return Bound(max(found_ms, proven_ms), False)


def _solved(bank: ShardBank, work: Work, deadline: float) -> float:
    """Return the lower bound for this kind of work [ms]."""
    # An estimate takes the mean of a block with unequal lookups, which is quicker.
    options = list_options(bank, work, alike=isinstance(work, _Prices))
    room_M = bank.caps_MW.sum(axis=1) * (1 + ROUNDING)
    # Memory rarely matters: solve without its limits first, which is quicker.
    for in_memory in (False, True):
        program = Program(bank, work, options, in_memory=in_memory)
        bound, bytes_M = program.solve(deadline - time.monotonic())
        if (bytes_M <= room_M).all():
            break
    return bound


class _Sums:
    """Work of a model with an additive lower bound (`CostModel.additive`)."""

    covers: Sequence[tuple[int, ...]] = ((0,), (1,))
    in_stages: Sequence[int] = (0, 1)
    in_all: Sequence[int] = (0, 1)

    def __init__(self, bank: ShardBank, additive: Floats) -> None:
        """Take the coefficients of `CostModel.additive`."""
        self._bank, self._launch_2, self._weights_E2 = bank, additive[0], additive[1:]

    def launch(self, groups: Sequence[int]) -> Floats:
        """See `Work.launch`; 0 for several groups.

        The rank with the most work need not have tables of every group.
        """
        launch: Floats = self._launch_2 * (len(groups) == 1)
        return launch

    def of_shards(self, rows_N: Ints) -> Floats:
        """See `Work.of_shards`."""
        bank = self._bank
        work: Floats = bank.encoding(rows_N) @ self._weights_E2 + bank.extra(rows_N)
        return work

    def alone(self, rows_N: Ints) -> Floats:
        """See `Work.alone`."""
        bank = self._bank
        alone: Floats = bank.predict(bank.encoding(rows_N)) + bank.extra(rows_N)
        return alone


class _Prices:
    """Prices of shards, for forward and backward together.

    A shard's price is its encoding times the model's slope, times a factor of its table
    and fusion group. Changing prices means changing these factors. With several stages,
    shards have one price for sets of a stage and one for sets of all stages.
    """

    def __init__(
        self, bank: ShardBank, plan_TW: Ints, rounds: int, deadline: float
    ) -> None:
        """Find the prices of all stages.

        Args:
            bank: The task's shards.
            plan_TW: Widths of the best known placement.
            rounds: Most changes of the prices.
            deadline: `time.monotonic()` after which prices are not changed.
        """
        self._bank, self._plan_TW = bank, plan_TW
        self._rounds, self._deadline = rounds, deadline
        self._own_T = owners(bank.task)
        num_groups, num_own = bank.task.num_groups, len(bank.task.ways)
        stages = np.unique(bank.stages_T).tolist()
        rows = 1 if len(stages) == 1 else 2
        self.covers: Sequence[tuple[int, ...]] = ((0, 1),) * rows
        self.in_stages: Sequence[int] = (0,)
        self.in_all: Sequence[int] = (rows - 1,)
        self._launches: dict[tuple[int, ...], Floats] = {}
        """Fusion groups of a set -> launch for each row of work [ms]."""
        self._slope_KGE: Floats = np.zeros((rows, num_groups, bank.encoding_dim))
        self._factor_KGO: Floats = np.ones((rows, num_groups, num_own))
        self._light: dict[int, Floats] = {}
        """Fusion group -> encodings of its cheapest tables."""
        if rows > 1:
            self._price(np.arange(len(bank.stages_T)), 1)
        for stage in stages:
            self._price(np.flatnonzero(bank.stages_T == stage), 0)

    def launch(self, groups: Sequence[int]) -> Floats:
        """See `Work.launch`; only known for all groups that were priced together."""
        return self._launches.get(tuple(groups), np.zeros(len(self.covers)))

    def of_shards(self, rows_N: Ints) -> Floats:
        """See `Work.of_shards`."""
        bank = self._bank
        table_N = bank.table(rows_N)
        group_N, encoding_NE = bank.groups_T[table_N], bank.encoding(rows_N)
        slope_KN = np.stack(
            [(encoding_NE * s[group_N]).sum(1) for s in self._slope_KGE]
        )
        factor_KN = self._factor_KGO[:, group_N, self._own_T[table_N]]
        price_KN = np.maximum(slope_KN, TINY) * factor_KN
        work: Floats = (price_KN + bank.extra(rows_N).sum(axis=1)).T
        return work

    def alone(self, rows_N: Ints) -> Floats:
        """See `Work.alone` and `MAX_LONE`."""
        bank = self._bank
        encoding_NE = bank.encoding(rows_N)
        alone: Floats = bank.predict(encoding_NE)
        group_N = bank.groups_T[bank.table(rows_N)]
        for n in np.argsort(-alone.sum(axis=1), kind="stable")[:MAX_LONE].tolist():
            company = encoding_NE[n] + self._light[int(group_N[n])]
            alone[n] = np.minimum(alone[n], bank.predict(company).min(axis=0))
        return alone + bank.extra(rows_N)

    def _price(self, way_T: Ints, row: int) -> None:
        """Find the prices of shards in one or all stages, and store them.

        Args:
            way_T: The entries of the stages.
            row: The row of work.
        """
        bank, num_ranks = self._bank, self._bank.task.world_size
        groups, place_T = np.unique(bank.groups_T[way_T], return_inverse=True)
        shape = (len(groups), bank.encoding_dim)

        def encoding_of(table_N: Ints, row_N: Ints) -> Floats:
            encoding = np.zeros((len(row_N), *shape))
            group_N = np.searchsorted(groups, bank.groups_T[table_N])
            encoding[np.arange(len(row_N)), group_N] = bank.encoding(row_N)
            return encoding.reshape(len(row_N), shape[0] * shape[1])

        place, rank_N = np.nonzero(self._plan_TW[way_T])
        table_N = way_T[place]
        row_N = bank.rows(table_N, self._plan_TW[table_N, rank_N], rank_N)
        # An item is a table in a fusion group, in its way with the fastest kernel.
        extra_T = bank.extra(bank.whole_T[way_T]).sum(axis=1)
        key_T = place_T.reshape(-1) * len(bank.task.ways) + self._own_T[way_T]
        order = np.lexsort((extra_T, key_T))
        order = order[np.flatnonzero(np.diff(key_T[order], prepend=-1))]
        way_I, key_I = way_T[order], key_T[order]
        item_N = np.searchsorted(key_I, key_T[place])
        width_I = np.zeros(len(way_I), dtype=np.int64)
        np.maximum.at(width_I, item_N, bank.width(row_N))
        num_blocks_I = bank.num_blocks_T[way_I]
        width_I = np.where(width_I > 0, width_I, bank.dims_T[way_I] // num_blocks_I)
        item_row_I = bank.rows(way_I, width_I)
        encoding_IX = encoding_of(way_I, item_row_I)
        cost_I = self._cost(encoding_IX)
        for group in groups.tolist():
            own = np.flatnonzero(bank.groups_T[way_I] == group)
            light = own[np.argsort(cost_I[own], kind="stable")[:NUM_COMPANIONS]]
            self._light[group] = bank.encoding(item_row_I[light])
        sums_WX = sum_by(rank_N, encoding_of(table_N, row_N), num_ranks)
        mean_X = sums_WX.mean(axis=0)
        share_I = bank.block_T[way_I] * num_blocks_I / num_ranks
        if not len(row_N):  # no table of the plan is in the stage: assume all are
            mean_X = share_I @ encoding_IX
        [slope_X], [mean_ms] = self._slopes(mean_X[None]), self._cost(mean_X[None])
        first_I = np.maximum(encoding_IX @ slope_X, TINY)
        # Amount of each item on the plan's ranks, measured in first prices.
        part_N = np.maximum(encoding_of(table_N, row_N) @ slope_X, TINY)
        plan_WI = np.zeros((num_ranks, len(way_I)))
        np.add.at(plan_WI, (rank_N, item_N), part_N / first_I[item_N])
        if len(row_N):
            share_I = plan_WI.mean(axis=0)
        used = np.unique(rank_N)
        plan = plan_WI[used], self._cost(sums_WX[used])
        best_ms, best_I = self._best(
            encoding_IX, first_I, share_I, plan, float(mean_ms)
        )
        # Nets are nearly linear in the size of a set. So the launch is the cost minus
        # the slope times the average rank's encoding.
        launch_ms = min(max(0.0, float(mean_ms - mean_X @ slope_X)), best_ms)
        launch_K = self._launches.setdefault(
            tuple(groups.tolist()), np.zeros(len(self.covers))
        )
        launch_K[row] = launch_ms
        self._slope_KGE[row, groups] = slope_X.reshape(shape)
        scale = (best_ms - launch_ms) / float(first_I @ share_I)
        factor_I = best_I / first_I * scale
        self._factor_KGO[row, bank.groups_T[way_I], self._own_T[way_I]] = factor_I

    def _best(
        self,
        encoding_IX: Floats,
        first_I: Floats,
        share_I: Floats,
        plan: tuple[Floats, Floats],
        mean_ms: float,
    ) -> tuple[float, Floats]:
        """Change prices to raise the cost of the cheapest set worth an average rank.

        Args:
            encoding_IX: Encodings of the items.
            first_I: First prices of the items.
            share_I: Amount of each item on an average rank.
            plan: Items on the plan's ranks, `L x I`, and their cost, `L` [ms].
            mean_ms: Cost of the average rank's encoding.

        Returns:
            The least cost of a set that is worth an average rank [ms], and the prices
            at which this cost is highest.
        """
        worth = float(first_I @ share_I)
        plan_LI, plan_L = plan
        # No valid prices make an average rank worth more than the costliest rank costs.
        target = float(plan_L.max(initial=0.0)) or mean_ms
        place = np.linspace(0, len(plan_LI) - 1, NUM_SETS - 1).astype(np.int64)
        starts_LI = plan_LI[place] if len(plan_LI) else plan_LI
        sets_LI = np.concatenate([starts_LI, share_I[None]])
        best_ms, best_I, price_I, reach, idle = 0.0, first_I, first_I, 1.0, 0
        for _ in range(self._rounds + 1):
            sets_LI[-1] = share_I
            sets_LI, cost_L = self._cheaper(sets_LI, encoding_IX, price_I, worth)
            enough_L = plan_LI @ price_I >= worth * (1 - ROUNDING)
            now_ms = min(
                float(cost_L.min()), float(plan_L[enough_L].min(initial=target))
            )
            idle += 1
            if now_ms > best_ms:
                best_ms, best_I, idle = now_ms, price_I, 0
            if idle == PATIENCE:
                reach, idle, price_I = reach * SHRINKS, 0, best_I
            if now_ms >= target or time.monotonic() > self._deadline:
                break
            weight_L = np.maximum(target - cost_L, 0.0)
            gain_I = share_I - weight_L @ sets_LI / max(float(weight_L.sum()), TINY)
            step = reach * (target - now_ms) / max(float(price_I @ gain_I**2), TINY)
            change_I = np.clip(1 + step * gain_I, 1 - MAX_CHANGE, 1 + MAX_CHANGE)
            price_I = price_I * change_I
            price_I *= worth / float(price_I @ share_I)
        return best_ms, best_I

    def _cheaper(
        self, sets_LI: Floats, encoding_IX: Floats, price_I: Floats, worth: float
    ) -> tuple[Floats, Floats]:
        """Replace each set by a cheaper one that is worth enough.

        A new set takes items in ascending order of their added cost per price, until it
        is worth enough. Items of the old set are preferred, by `PREFERENCES`, and the
        cheapest of the new sets is kept.

        Returns:
            The sets, and the cost of each [ms].
        """
        for _ in range(NUM_STEPS):
            slope_LI = self._slopes(sets_LI @ encoding_IX) @ encoding_IX.T
            kept_PLI = 1 - PREFERENCES[:, None, None] * sets_LI
            order = np.argsort(slope_LI / price_I * kept_PLI, axis=2, kind="stable")
            price = price_I[order]
            left = worth * (1 - ROUNDING) - (np.cumsum(price, axis=2) - price)
            new_PLI = np.zeros(left.shape)
            np.put_along_axis(new_PLI, order, (left > 0).astype(np.float64), axis=2)
            # The last item only fills the rest; another may do so at less cost.
            last = (left > 0).sum(axis=2, keepdims=True) - 1
            gap = np.take_along_axis(left, last, axis=2)
            last = np.take_along_axis(order, last, axis=2)
            np.put_along_axis(new_PLI, last, 0.0, axis=2)
            fills = (new_PLI == 0) & (price_I >= gap)
            last = np.where(fills, slope_LI, np.inf).argmin(axis=2)[..., None]
            np.put_along_axis(new_PLI, last, 1.0, axis=2)
            cost_PL = self._cost(new_PLI @ encoding_IX)
            best_L = cost_PL.argmin(axis=0)
            line_L = np.arange(len(best_L))
            sets_LI = new_PLI[best_L, line_L]
        return sets_LI, cost_PL[best_L, line_L]

    def _cost(self, sums: Floats) -> Floats:
        """Return forward plus backward of all groups, `... x X` -> `...` [ms]."""
        *shape, num_values = sums.shape
        num_groups = num_values // self._bank.encoding_dim
        each = self._bank.predict(sums.reshape(-1, self._bank.encoding_dim))
        each = each.reshape(*shape, 2 * num_groups)
        cost: Floats = each.sum(axis=-1)
        return cost

    def _slopes(self, sums_LX: Floats) -> Floats:
        """Return the cost's slope by each encoding value, `L x X`."""
        flat = sums_LX.reshape(-1, self._bank.encoding_dim)
        step = np.maximum(np.abs(flat) * SLOPE_SHARE, TINY)
        moves = step[:, :, None] * np.eye(flat.shape[1])
        rise = self._cost(flat[:, None] + moves) - self._cost(flat[:, None] - moves)
        slope: Floats = rise / (2 * step)
        return slope.reshape(sums_LX.shape)
