"""How short a critical path can be at best, under the same cost model.

The bound is what an iteration takes if every rank has its equal part of all work (see
`balanced`). That needs work which adds up:

- Of some models, estimates of cards above all, it does (`CostModel.additive`). Then the
  bound is a proof, if the model of collectives says that equal loads are the fastest
  (`CommsModel.even_is_fastest`). A task with more alternatives has no higher one, but
  for HiGHS's tolerance.
- Of others, nets above all, each shard gets a price. The best prices are the highest at
  which no set of shards costs less than it is worth: the dual of packing sets into
  ranks. Prices start at the slopes of the model around an average rank of the plan.
  Then sets that are worth as much as that rank and cost less are searched along the
  model's slopes. The prices of their tables fall and all others rise (a subgradient
  method). Cheaper sets may have been missed: such a bound is an estimate.

A model whose times are a sum and something above it (the longest bags of a card's
kernel) has both. The estimate is told where it is clearly higher than the proof.

Shapes: `N` shards, `I` items (tables in a fusion group), `L` sets, `P` preferences, `T`
ways, `W` ranks, `G` fusion groups, `E` encoding values, `X` those of all groups of a
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

__all__ = ["Bound", "lower_bound"]

PROOF_WORTH = 0.01
"""Part of an estimate that a proof may be below to be told in its place."""
NUM_ROUNDS, NUM_QUICK_ROUNDS = 100, 3
"""Times that prices are changed."""
NUM_SETS, NUM_STEPS = 6, 4
"""Sets that are made cheaper side by side, and steps of each in a round."""
PREFERENCES = np.array([0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
"""How much less items count that a set has, by which its next candidates differ."""
SLOPE_SHARE = 0.01
"""Part of an encoding's value by which it is changed to see the model's slope."""
PATIENCE, SHRINKS = 10, 0.7
"""Rounds without a gain after which prices change less, and how much less."""
MAX_CHANGE = 0.5
"""Most that a price changes in a round, relative."""
MAX_LONE, NUM_COMPANIONS = 512, 16
"""Shards that cost most alone, and the cheapest ones that are tried beside them."""
TINY, ROUNDING = 1e-9, 1e-7


class Bound(NamedTuple):
    """What no plan should be below."""

    ms: float
    is_proven: bool
    """False: an estimate, since prices rest on sets that were searched."""


def lower_bound(
    bank: ShardBank,
    plan_TW: Ints,
    critical_ms: float,
    *,
    deadline: float = math.inf,
    quick: bool = False,
) -> Bound:
    """Bound the critical path of every placement from below.

    Args:
        bank: The task's shards, each table for itself.
        plan_TW: The best placement known, as widths.
        critical_ms: Its critical path.
        deadline: `time.monotonic()` after which nothing is improved further. The bound
            depends on the clock only where this is reached.
        quick: Whether a proof, or prices that were changed a few times, are enough.

    Returns:
        Milliseconds, at most `critical_ms`; 0 where the solver finds nothing.
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
    """Return the bound by some work [ms]."""
    options = list_options(bank, work)
    room_M = bank.caps_MW.sum(axis=1) * (1 + ROUNDING)
    # Memory seldom decides: at first as if there was enough of it.
    for in_memory in (False, True):
        program = Program(bank, work, options, in_memory=in_memory)
        bound, bytes_M = program.solve(deadline - time.monotonic())
        if (bytes_M <= room_M).all():
            break
    return bound


class _Sums:
    """Work of a model whose times add up."""

    covers: Sequence[tuple[int, ...]] = ((0,), (1,))

    def __init__(self, bank: ShardBank, additive: Floats) -> None:
        """Take what `CostModel.additive` says."""
        self._bank, self._launch_2, self._weights_E2 = bank, additive[0], additive[1:]

    def launch(self, groups: Sequence[int]) -> Floats:
        """See `Work.launch`: of several groups, a rank may have tables of one alone."""
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
    """Prices of shards, forward and backward together.

    The price of a shard is what the model's slope makes of its encoding, times a factor
    of its table in its fusion group.
    """

    covers: Sequence[tuple[int, ...]] = ((0, 1),)

    def __init__(
        self, bank: ShardBank, plan_TW: Ints, rounds: int, deadline: float
    ) -> None:
        """Find the prices of every fusion group.

        Args:
            bank: The task's shards.
            plan_TW: The best placement known, as widths.
            rounds: Times that prices are changed.
            deadline: `time.monotonic()` after which they are not.
        """
        self._bank, self._plan_TW = bank, plan_TW
        self._rounds, self._deadline = rounds, deadline
        self._own_T = owners(bank.task)
        num_groups, num_own = bank.task.num_groups, len(bank.task.ways)
        self._launches: dict[tuple[int, ...], float] = {}
        """Groups of a stage -> launch [ms]."""
        self._slope_GE: Floats = np.zeros((num_groups, bank.encoding_dim))
        self._factor_GO: Floats = np.ones((num_groups, num_own))
        self._light: dict[int, Floats] = {}
        """Group -> encodings of its cheapest tables."""
        for stage in np.unique(bank.stages_T).tolist():
            self._price(np.flatnonzero(bank.stages_T == stage))

    def launch(self, groups: Sequence[int]) -> Floats:
        """See `Work.launch`; known of all groups of a stage together."""
        return np.array([self._launches.get(tuple(groups), 0.0)])

    def of_shards(self, rows_N: Ints) -> Floats:
        """See `Work.of_shards`."""
        bank = self._bank
        table_N = bank.table(rows_N)
        group_N = bank.groups_T[table_N]
        slope_N = (bank.encoding(rows_N) * self._slope_GE[group_N]).sum(axis=1)
        factor_N = self._factor_GO[group_N, self._own_T[table_N]]
        price_N = np.maximum(slope_N, TINY) * factor_N
        work: Floats = (price_N + bank.extra(rows_N).sum(axis=1))[:, None]
        return work

    def alone(self, rows_N: Ints) -> Floats:
        """See `Work.alone`; nets dip: the costliest are tried beside others, too."""
        bank = self._bank
        encoding_NE = bank.encoding(rows_N)
        alone: Floats = bank.predict(encoding_NE)
        group_N = bank.groups_T[bank.table(rows_N)]
        for n in np.argsort(-alone.sum(axis=1), kind="stable")[:MAX_LONE].tolist():
            company = encoding_NE[n] + self._light[int(group_N[n])]
            alone[n] = np.minimum(alone[n], bank.predict(company).min(axis=0))
        return alone + bank.extra(rows_N)

    def _price(self, way_T: Ints) -> None:
        """Find the prices of one stage.

        Encodings of its fusion groups stand side by side: `X` values in all.
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
        # Items: each table in each group, in the way with the fastest kernel.
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
        if not len(row_N):  # then as if all tables were in the stage
            mean_X = share_I @ encoding_IX
        [slope_X], [mean_ms] = self._slopes(mean_X[None]), self._cost(mean_X[None])
        first_I = np.maximum(encoding_IX @ slope_X, TINY)
        # What ranks of the plan have of each item, by what it is worth.
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
        # Nets are nearly straight along the size of a set, and so are prices: what is
        # left of the cost where the slope reaches no shards is the launch.
        launch_ms = min(max(0.0, float(mean_ms - mean_X @ slope_X)), best_ms)
        self._launches[tuple(groups.tolist())] = launch_ms
        self._slope_GE[groups] = slope_X.reshape(shape)
        scale = (best_ms - launch_ms) / float(first_I @ share_I)
        factor_I = best_I / first_I * scale
        self._factor_GO[bank.groups_T[way_I], self._own_T[way_I]] = factor_I

    def _best(
        self,
        encoding_IX: Floats,
        first_I: Floats,
        share_I: Floats,
        plan: tuple[Floats, Floats],
        mean_ms: float,
    ) -> tuple[float, Floats]:
        """Change prices until sets worth an average rank cost much.

        Args:
            encoding_IX: The items.
            first_I: Their first prices.
            share_I: How many of each an average rank has.
            plan: What ranks of the plan have, `L x I`, and what it costs, `L` [ms].
            mean_ms: Cost of the average rank, as if the model was straight.

        Returns:
            The least cost of a set that is worth an average rank [ms], and the prices.
        """
        worth = float(first_I @ share_I)
        plan_LI, plan_L = plan
        # No prices can ask for more than the costliest rank of the plan takes.
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
        """Make sets cheaper that are worth enough.

        Items are taken in the order of what they add to the cost beside their price.
        Those of the set at hand have a preference that differs between candidates.

        Returns:
            The sets, and what each costs [ms].
        """
        for _ in range(NUM_STEPS):
            slope_LI = self._slopes(sets_LI @ encoding_IX) @ encoding_IX.T
            kept_PLI = 1 - PREFERENCES[:, None, None] * sets_LI
            order = np.argsort(slope_LI / price_I * kept_PLI, axis=2, kind="stable")
            price = price_I[order]
            left = worth * (1 - ROUNDING) - (np.cumsum(price, axis=2) - price)
            new_PLI = np.zeros(left.shape)
            np.put_along_axis(new_PLI, order, (left > 0).astype(np.float64), axis=2)
            # The last item fills what is left; another one may do so for less.
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
        """Return forward and backward of all groups, `... x X` -> `...` [ms]."""
        *shape, num_values = sums.shape
        num_groups = num_values // self._bank.encoding_dim
        each = self._bank.predict(sums.reshape(-1, self._bank.encoding_dim))
        each = each.reshape(*shape, 2 * num_groups)
        cost: Floats = each.sum(axis=-1)
        return cost

    def _slopes(self, sums_LX: Floats) -> Floats:
        """Return how the cost rises with each value, `L x X`."""
        flat = sums_LX.reshape(-1, self._bank.encoding_dim)
        step = np.maximum(np.abs(flat) * SLOPE_SHARE, TINY)
        moves = step[:, :, None] * np.eye(flat.shape[1])
        rise = self._cost(flat[:, None] + moves) - self._cost(flat[:, None] - moves)
        slope: Floats = rise / (2 * step)
        return slope.reshape(sums_LX.shape)
