"""Ranks for shards: many greedy placements side by side.

Shapes: `L` lanes (placements in progress), `N` shards per lane, `W` ranks,
`M` memories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.search.shards import Floats, Ints, ShardBank

__all__ = ["LanePlans", "place_lanes", "plan_states"]

ORDERS: tuple[str, ...] = ("cost", "bytes")
"""Orders of placing: the costliest shard first, or the largest first."""

NUM_EXACT = 24
"""Lanes evaluated exactly, of those placed at a time."""


@dataclass(frozen=True, slots=True)
class LanePlans:
    """Greedy placements and their costs; `L` lanes, one placement each."""

    rows_LN: Ints
    """Bank rows, padded with -1."""
    rank_LN: Ints
    cost_L: Floats
    """Critical path [ms]; infinite where not placed or not evaluated."""
    phases_LWP: Floats
    """Phases of each rank [ms], approximate."""

    def widths(self, bank: ShardBank, lane: int) -> Ints:
        """Return one lane as a `T x W` matrix of widths."""
        task = bank.task
        width_TW = np.zeros((len(task.tables), task.world_size), dtype=np.int64)
        rows = self.rows_LN[lane]
        kept = rows >= 0
        rows, rank = rows[kept], self.rank_LN[lane][kept]
        np.add.at(width_TW, (bank.table(rows), rank), bank.width(rows))
        return width_TW


def place_lanes(
    bank: ShardBank, rows_LN: Ints, caps_L: Floats
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Put shards on ranks greedily, all lanes one shard at a time.

    Each shard goes to the rank whose resulting contribution to the critical path grows
    least, by the additive approximation and a smooth stand-in for the slowest rank of
    each phase: the sum over ranks and phases of the fourth powers. Eligible are ranks
    that may take it by the task's rules, have memory for it, hold no other shard of its
    table and stay within the lane's cap on columns. Where no rank stays within the cap,
    the rank with the fewest columns exceeds it.

    Args:
        bank: The task's shards.
        rows_LN: Bank rows in the order of placing, padded with -1 at the end.
        caps_L: Cap on a rank's columns, relative to the mean.

    Returns:
        The rank of each shard (-1 where none may take it) and whether all were placed.
    """
    num_lanes, num_ranks = len(rows_LN), bank.task.world_size
    used = np.maximum(rows_LN, 0)
    table_LN, width_LN = bank.table(used), bank.width(used)
    cost_NP = bank.approximate(table_LN.reshape(-1), width_LN.reshape(-1))
    # Relative to the average rank's phases, of which those that cost nothing are left
    # out; the potential grows with the fourth power of each.
    phases = np.flatnonzero(bank.mean_phases_P > 0)
    scale = bank.mean_phases_P[phases]
    cost_PLN = (cost_NP[:, phases] / scale).T.reshape(len(phases), *used.shape)
    sizes_MLN = bank.sizes(table_LN, width_LN)
    split_LN = (width_LN < bank.dims_T[table_LN]) & (rows_LN >= 0)
    split_tables = np.unique(table_LN[split_LN])
    slot_T = np.full(len(bank.dims_T), -1)
    slot_T[split_tables] = np.arange(len(split_tables))
    slot_LN = slot_T[table_LN]
    is_split_N: npt.NDArray[np.bool_] = np.any(split_LN, axis=0)

    limited = bool(np.isfinite(bank.caps_MW).any())
    # What ranks have: of each phase, columns, and each memory that is free. All lanes
    # lie in one line, since a step takes less time than many calls.
    num_memories = len(bank.caps_MW)
    amounts = [*cost_PLN, bank.columns(table_LN, width_LN), *-sizes_MLN]
    change_NAL = np.stack(amounts).transpose(2, 0, 1).copy()
    shape, size = (num_lanes, num_ranks), num_lanes * num_ranks
    has = np.zeros((len(amounts), size))
    has[-num_memories:] = np.tile(bank.caps_MW, num_lanes)
    loads = has[: len(phases)].reshape(-1, *shape)
    columns, *free_MLW = has[len(phases) :].reshape(-1, *shape)
    powers = np.empty(loads.shape)
    potential = np.zeros(size)
    room = np.repeat(
        (caps_L * bank.mean_columns * (1 + 1e-9))[:, None], num_ranks, axis=1
    )
    capped = bool(np.isfinite(caps_L).any())
    holds = np.zeros((num_lanes, len(split_tables), num_ranks), dtype=bool)
    rules = _LaneRules(bank, num_lanes) if bank.rules else None
    rank_NL = np.full(rows_LN.T.shape, -1, dtype=np.int64)
    placed = np.ones(num_lanes, dtype=bool)
    lanes = np.arange(num_lanes)
    for i, change_AL in enumerate(change_NAL):
        active = rows_LN[:, i] >= 0
        np.add(loads, change_AL[: len(phases), :, None], out=powers)
        np.square(powers, out=powers)
        np.square(powers, out=powers)
        grown = np.dot(scale[None], powers.reshape(len(phases), size))[0]
        result = (grown - potential).reshape(shape)
        if capped:
            # Ranks over the cap come after all others, those with fewest columns first.
            over = columns + change_AL[len(phases), :, None]
            over -= room
            result = np.where(over > 0, 1e12 + over, result)
        if limited:
            for free, size_LN in zip(free_MLW, sizes_MLN, strict=True):
                np.putmask(result, free < size_LN[:, i, None], np.inf)
        if is_split_N[i]:
            taken = holds[lanes, slot_LN[:, i]] & split_LN[:, i, None]
            result[taken] = np.inf
        if rules is not None:
            result[rules.closed(table_LN[:, i])] = np.inf
        chosen = result.argmin(axis=1)
        cell, lane = lanes * num_ranks + chosen, lanes
        fits = np.isfinite(result.reshape(-1)[cell])
        if np.count_nonzero(fits & active) < num_lanes:
            placed &= fits | ~active
            lane = lanes[active & fits]
            cell, chosen, change_AL = cell[lane], chosen[lane], change_AL[:, lane]
        rank_NL[i, lane] = chosen
        for amount, change_L in zip(has, change_AL, strict=True):
            amount[cell] += change_L
        potential[cell] = grown[cell]
        if is_split_N[i]:
            spread = split_LN[lane, i]
            holds[lane[spread], slot_LN[lane[spread], i], chosen[spread]] = True
        if rules is not None:
            rules.add(lane, table_LN[lane, i], chosen)
    return rank_NL.T.copy(), placed


class _LaneRules:
    """Keeps count of the ranks that rules close to tables as lanes fill up."""

    def __init__(self, bank: ShardBank, num_lanes: int) -> None:
        self.rules = rules = bank.rules
        # The table of each set that a rank holds; the last set stays empty.
        shape = (num_lanes, rules.num_sets + 1, bank.task.world_size)
        self.holder_LAW = np.full(shape, -1, dtype=np.int32)

    def closed(self, table_L: Ints) -> npt.NDArray[np.bool_]:
        """Find the ranks that may not take a shard of each lane's table: `L x W`."""
        lanes, sets_LK = np.arange(len(table_L))[:, None], self.rules.sets_TK[table_L]
        holder_LKW = self.holder_LAW[lanes, sets_LK]
        other = (holder_LKW >= 0) & (holder_LKW != table_L[:, None, None])
        closed: npt.NDArray[np.bool_] = other.any(axis=1)
        if self.rules.allowed_TW is not None:
            closed |= ~self.rules.allowed_TW[table_L]
        return closed

    def add(self, lane_N: Ints, table_N: Ints, rank_N: Ints) -> None:
        """Put a shard on a rank in some lanes."""
        sets_NK = self.rules.sets_TK[table_N]
        self.holder_LAW[lane_N[:, None], sets_NK, rank_N[:, None]] = table_N[:, None]
        self.holder_LAW[:, -1] = -1


def plan_states(
    bank: ShardBank,
    states: Sequence[Ints],
    caps: Sequence[float],
    orders: Sequence[str],
) -> LanePlans:
    """Place each set of shards under each cap and in each order.

    The lanes that are best by the additive approximation are evaluated exactly.

    Args:
        bank: The task's shards.
        states: Sets of shards, as bank rows.
        caps: Caps on a rank's columns, relative to the mean.
        orders: Of `ORDERS`.

    Returns:
        Lane `(s * len(caps) + c) * len(orders) + o` is state s, cap c, order o.
    """
    longest = max(len(rows) for rows in states)
    ordered = np.full((len(states), len(orders), longest), -1, dtype=np.int64)
    for s, rows in enumerate(states):
        table, width = bank.table(rows), bank.width(rows)
        cost = bank.approximate(table, width).sum(axis=1)
        size = bank.scarcest(bank.sizes(table, width))
        for o, order in enumerate(orders):
            first, second = (cost, size) if order == "cost" else (size, cost)
            # Rows are numbered as they are met, so ties go by table and width. Tables
            # with few ranks to be on come before all others.
            freedom = bank.rules.freedom(table)
            ordered[s, o, : len(rows)] = rows[
                np.lexsort((-width, table, -second, -first, freedom))
            ]
    rows_LN = np.repeat(ordered[:, None], len(caps), axis=1).reshape(-1, longest)
    caps_L = np.tile(np.repeat(np.asarray(caps, dtype=float), len(orders)), len(states))
    rank_LN, placed = place_lanes(bank, rows_LN, caps_L)
    cost_L, phases = _approximate_cost(bank, rows_LN, rank_LN)
    cost_L[~placed] = np.inf
    best = np.argsort(cost_L, kind="stable")[:NUM_EXACT]
    best = np.sort(best[placed[best]])
    cost_L[:] = np.inf
    if len(best):
        cost_L[best], phases[best] = bank.critical_paths(rows_LN[best], rank_LN[best])
    return LanePlans(rows_LN, rank_LN, cost_L, phases)


def _approximate_cost(
    bank: ShardBank, rows_LN: Ints, rank_LN: Ints
) -> tuple[Floats, Floats]:
    """Critical path and phases of lanes by the additive approximation."""
    num_lanes, num_ranks = len(rows_LN), bank.task.world_size
    lane, place = np.nonzero(rank_LN >= 0)
    rows = rows_LN[lane, place]
    phases_NP = bank.approximate(bank.table(rows), bank.width(rows))
    cell = lane * num_ranks + rank_LN[lane, place]
    size = num_lanes * num_ranks
    phases_LWP: Floats = (
        np.stack(
            [np.bincount(cell, weights=phase, minlength=size) for phase in phases_NP.T],
            axis=1,
        )
        .astype(np.float64)
        .reshape(num_lanes, num_ranks, -1)
    )
    return phases_LWP.max(axis=1).sum(axis=1), phases_LWP
