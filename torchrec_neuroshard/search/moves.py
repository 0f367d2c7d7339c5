"""List moves from hot to cold ranks, in many lanes at once.

A transfer moves a shard, or some of its columns. A swap exchanges two shards. Moves are
scored by sums of the shards' costs; only the best few are evaluated exactly.

Shapes: see `lanes`; `A` active lanes, `H` hot ranks of a lane, `C` cold ranks of each
hot one, `K` moves, `4` phases of a stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchrec_neuroshard.search.lanes import Changes, Lanes
from torchrec_neuroshard.search.shards import Bools, Floats, Ints
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

NUM_COLD = 8
"""Cold ranks that a hot rank may give to in one step."""
LEAST_HOT, MOST_HOT = 3, 32
"""Limits of the number of hot ranks, which is a quarter of the ranks."""
SWAP_SHIFTS = (-1, 0)
"""A swap balances two ranks if the cold rank's shard has a certain cost. The two shards
nearest to that cost are tried, one below and one above."""


class _Transfers(NamedTuple):
    """Columns of pieces that go to another rank."""

    lane_K: Ints
    piece_K: Ints
    table_K: Ints
    source_K: Ints
    target_K: Ints
    width_K: Ints
    """Columns of the piece."""
    moved_K: Ints
    """Columns that move."""
    held_K: Ints
    """Columns of the table that the target already holds."""

    def pick(self, index: Ints) -> _Transfers:
        return _Transfers(*(values[index] for values in self))


class Moves:
    """Transfers and swaps of some lanes.

    Attributes:
        gain_K: Approximate reduction of the score by each move [ms].
        lane_K: Lanes.
        source_K: Hot ranks, which give.
        target_K: Cold ranks, which take.
    """

    def __init__(self, lanes: Lanes, active_A: Ints, number: int = 0) -> None:
        """List the moves.

        Args:
            lanes: All lanes.
            active_A: The lanes to list moves of.
            number: The step's number; it rotates the pairs of hot and cold ranks.
        """
        bank = lanes.bank
        self._lanes, self._bank = lanes, bank
        num_ranks = bank.task.world_size
        moves_T = bank.moves_T & ~bank.stays_T
        own_N = np.flatnonzero(np.isin(lanes.lane_N, active_A) & moves_T[lanes.table_N])
        cost_N = bank.total_ms(lanes.table_N[own_N], lanes.width_N[own_N])
        self._most = float(cost_N.max(initial=0.0)) * 1.001 + 1e-12
        # Sort by lane, rank and cost, so that a rank's pieces are adjacent.
        key_N = lanes.lane_N[own_N] * num_ranks + lanes.rank_N[own_N]
        sort_N = key_N + cost_N / self._most
        order = np.argsort(sort_N, kind="stable")
        own_N, self._key_N, self._sort_N = own_N[order], key_N[order], sort_N[order]
        self._cost_N = cost_N[order]
        self._lane_N, self._table_N = lanes.lane_N[own_N], lanes.table_N[own_N]
        self._rank_N, self._width_N = lanes.rank_N[own_N], lanes.width_N[own_N]
        whole = self._whole_transfers(active_A, number)
        excess_K = (
            lanes.load_LW[whole.lane_K, whole.source_K]
            - lanes.load_LW[whole.lane_K, whole.target_K]
        ) / 2
        transfers = self._with_parts(whole, excess_K)
        self._transfers = transfers.pick(self._legal(transfers))
        self._mine_K, self._theirs_K = self._swaps(whole, excess_K)
        t, mine = self._transfers, self._mine_K
        self.gain_K: Floats = np.concatenate(
            [self._gain_of_transfers(), self._gain_of_swaps()]
        )
        self.lane_K: Ints = np.concatenate([t.lane_K, self._lane_N[mine]])
        self.source_K: Ints = np.concatenate([t.source_K, self._rank_N[mine]])
        self.target_K: Ints = np.concatenate([t.target_K, self._rank_N[self._theirs_K]])

    def _pairs(self, active_A: Ints, number: int) -> tuple[Ints, Ints]:
        """Return the hot ranks, `A x H`, and the cold ranks of each, `A x H x C`."""
        lanes, num_ranks = self._lanes, self._bank.task.world_size
        least = min(LEAST_HOT, num_ranks - 1)
        num_hot = int(np.clip(num_ranks // 4, least, MOST_HOT))
        hot_AH = np.argsort(-lanes.weights()[active_A], axis=1, kind="stable")
        by_load_AW = np.argsort(lanes.load_LW[active_A], axis=1, kind="stable")
        if num_ranks <= NUM_COLD + 1:
            cold_AHC = np.repeat(by_load_AW[:, None], num_hot, axis=1)
            return hot_AH[:, :num_hot], cold_AHC
        # Hot ranks get different cold ranks, so that many can give in one step.
        pool = min(num_ranks - num_hot, max(NUM_COLD, 2 * num_hot))
        stride = max(1, pool // NUM_COLD)
        place_HC = np.arange(num_hot)[:, None] + np.arange(NUM_COLD) * stride + number
        return hot_AH[:, :num_hot], by_load_AW[:, place_HC % pool]

    def _whole_transfers(self, active_A: Ints, number: int) -> _Transfers:
        """Return transfers of whole shards from hot ranks to their cold ranks."""
        lanes = self._lanes
        hot_AH, cold_AHC = self._pairs(active_A, number)
        slot_LW = np.full(lanes.load_LW.shape, -1)
        slot_LW[active_A[:, None], hot_AH] = np.arange(hot_AH.size).reshape(
            hot_AH.shape
        )
        slot_N = slot_LW[self._lane_N, self._rank_N]
        given = np.flatnonzero(slot_N >= 0)
        cold_SC = cold_AHC.reshape(hot_AH.size, cold_AHC.shape[2])
        piece = np.repeat(given, cold_SC.shape[1])
        target = cold_SC[slot_N[given]].reshape(-1)
        other = np.flatnonzero(target != self._rank_N[piece])
        piece, target = piece[other], target[other]
        lane, table = self._lane_N[piece], self._table_N[piece]
        width = self._width_N[piece]
        held = self._held(lane, table, target)
        source = self._rank_N[piece]
        return _Transfers(lane, piece, table, source, target, width, width, held)

    def _with_parts(self, whole: _Transfers, excess_K: Floats) -> _Transfers:
        """Return the transfers, with transfers of some columns if shards may differ."""
        if not self._bank.task.uneven:
            return whole
        # Half the shard, the share that balances the two ranks, and the narrowest one.
        width = whole.width_K
        share = excess_K / np.maximum(self._cost_N[whole.piece_K], 1e-12)
        even = (width * np.clip(share, 0.0, 1.0)).astype(np.int64) // COLUMN_MULTIPLE
        parts = [whole]
        for moved in (
            width // (2 * COLUMN_MULTIPLE) * COLUMN_MULTIPLE,
            even * COLUMN_MULTIPLE,
            (even + 1) * COLUMN_MULTIPLE,
            self._bank.narrowest_T[whole.table_K],
        ):
            some = np.flatnonzero((moved > 0) & (moved < width))
            parts.append(whole.pick(some)._replace(moved_K=moved[some]))
        return _Transfers(*map(np.concatenate, zip(*parts, strict=True)))

    def _held(self, lane_K: Ints, table_K: Ints, rank_K: Ints) -> Ints:
        """Return how many columns of a table each rank holds."""
        held_K: Ints = np.zeros(len(lane_K), dtype=np.int64)
        split = np.flatnonzero(self._lanes.pieces_LT[lane_K, table_K] > 1)
        if not len(split):
            return held_K
        num_tables, num_ranks = len(self._bank.dims_T), self._bank.task.world_size
        key_N = (self._lane_N * num_tables + self._table_N) * num_ranks + self._rank_N
        order = np.argsort(key_N, kind="stable")
        asked = (lane_K[split] * num_tables + table_K[split]) * num_ranks
        asked += rank_K[split]
        at = np.minimum(np.searchsorted(key_N[order], asked), len(key_N) - 1)
        found = key_N[order[at]] == asked
        held_K[split[found]] = self._width_N[order[at[found]]]
        return held_K

    # What is allowed.

    def _legal(self, t: _Transfers) -> Ints:
        """Return the transfers that memory, placement rules and widths allow."""
        bank, lanes = self._bank, self._lanes
        narrowest_K = bank.narrowest_T[t.table_K]
        after_K, grown_K = t.width_K - t.moved_K, t.held_K + t.moved_K
        whole = (after_K == 0) & (t.held_K == 0)
        shards_K = lanes.pieces_LT[t.lane_K, t.table_K] - (after_K == 0)
        shards_K = shards_K + (t.held_K == 0)
        fine = (after_K == 0) | (after_K >= narrowest_K)
        fine &= (grown_K >= narrowest_K) | (grown_K == bank.dims_T[t.table_K]) | whole
        fine &= (shards_K <= bank.most_T[t.table_K]) | (shards_K <= 1) | whole
        if not bank.task.uneven:
            # All shards of a table must keep the same width.
            fine &= whole
        more_MK = bank.sizes(t.table_K, grown_K) - bank.sizes(t.table_K, t.held_K)
        used_MK = lanes.bytes_MLW[:, t.lane_K, t.target_K] + more_MK
        fine &= (used_MK <= bank.caps_MW[:, t.target_K]).all(axis=0)
        if bank.rules:
            fine &= self._allowed(t.lane_K, t.table_K, t.target_K, t.held_K > 0)
        return np.flatnonzero(fine)

    def _allowed(
        self,
        lane_K: Ints,
        table_K: Ints,
        rank_K: Ints,
        held_K: Bools,
        leaving_K: Ints | None = None,
    ) -> Bools:
        """Whether the rules let ranks take tables, given the tables that leave them."""
        rules = self._bank.rules
        fine: Bools = np.ones(len(lane_K), dtype=bool)
        if rules.allowed_TW is not None:
            fine &= rules.allowed_TW[table_K, rank_K]
        if rules.num_sets:
            sets_KS = rules.sets_TK[table_K]
            real_KS = sets_KS < rules.num_sets
            where = lane_K[:, None], sets_KS, rank_K[:, None]
            others_KS = self._lanes.occupants_LAW[where] - (held_K[:, None] & real_KS)
            if leaving_K is not None:
                theirs_KS = rules.sets_TK[leaving_K]
                shared = (sets_KS[:, :, None] == theirs_KS[:, None, :]).any(axis=2)
                others_KS = others_KS - (shared & real_KS)
            fine &= (others_KS <= 0).all(axis=1)
        return fine

    def _swaps(self, whole: _Transfers, excess_K: Floats) -> tuple[Ints, Ints]:
        """Return pairs of pieces to swap: one of a hot rank, one of a cold rank."""
        num_ranks = self._bank.task.world_size
        alone = np.flatnonzero(whole.held_K == 0)
        piece = whole.piece_K[alone]
        key = whole.lane_K[alone] * num_ranks + whole.target_K[alone]
        wish = np.clip(self._cost_N[piece] - excess_K[alone], 0.0, self._most)
        at = np.searchsorted(self._sort_N, key + wish / self._most)
        mine, theirs = [], []
        for shift in SWAP_SHIFTS if len(self._key_N) else ():
            back = np.clip(at + shift, 0, len(self._key_N) - 1)
            found = np.flatnonzero(self._key_N[back] == key)
            mine.append(piece[found])
            theirs.append(back[found])
        none = np.zeros(0, dtype=np.int64)
        mine_K = np.concatenate([none, *mine])
        theirs_K = np.concatenate([none, *theirs])
        legal = self._swappable(mine_K, theirs_K)
        return mine_K[legal], theirs_K[legal]

    def _swappable(self, mine_K: Ints, theirs_K: Ints) -> Ints:
        bank, lanes = self._bank, self._lanes
        lane_K = self._lane_N[mine_K]
        one_K, two_K = self._table_N[mine_K], self._table_N[theirs_K]
        source_K, target_K = self._rank_N[mine_K], self._rank_N[theirs_K]
        fine = (self._held(lane_K, two_K, source_K) == 0) & (one_K != two_K)
        if bank.limited:
            more_MK = bank.sizes(one_K, self._width_N[mine_K])
            more_MK = more_MK - bank.sizes(two_K, self._width_N[theirs_K])
            for rank_K, more in ((target_K, more_MK), (source_K, -more_MK)):
                used_MK = lanes.bytes_MLW[:, lane_K, rank_K] + more
                fine &= (used_MK <= bank.caps_MW[:, rank_K]).all(axis=0)
        if bank.rules:
            none_K = np.zeros(len(lane_K), dtype=bool)
            fine &= self._allowed(lane_K, one_K, target_K, none_K, two_K)
            fine &= self._allowed(lane_K, two_K, source_K, none_K, one_K)
        return np.flatnonzero(fine)

    # What they gain.

    def _ms(self, lane_K: Ints, table_K: Ints, width_K: Ints) -> Floats:
        """Return the approximate times of shards in their stage, `K x 4` [ms]."""
        offset_T4, slope_T4 = self._bank.stage_affine
        ms_K4 = offset_T4[table_K] * (width_K > 0)[:, None]
        ms_K4 += slope_T4[table_K] * width_K[:, None]
        stage_K = self._bank.stages_T[table_K]
        ms_K4[:, 2:] *= self._lanes.scale_LS2[lane_K, stage_K]
        return ms_K4

    def _loads(self, lane_K: Ints, stage_K: Ints) -> tuple[Ints, Floats]:
        """Return a stage's loads on the longest chains, and how they count.

        Returns:
            `K x 4` indices of loads: forward, backward, ids, outputs; and the growth of
            the score with each load's norm, 0 where the stage's kernels are not on the
            chain.
        """
        lanes = self._lanes
        place_K = np.argsort(lanes.stages_LS, axis=1)[lane_K, stage_K]
        forward_K = lanes.forward_LS[lane_K, place_K]
        backward_K = lanes.backward_L[lane_K]
        places_K4 = np.stack([forward_K, backward_K, place_K, place_K], axis=1)
        load_K4 = 4 * places_K4 + np.arange(4)
        slope_K4 = lanes.slope_LP[lane_K[:, None], load_K4]
        slope_K4[:, 0] *= forward_K >= place_K
        slope_K4[:, 1] *= backward_K >= place_K
        return load_K4, slope_K4

    def _gain(
        self,
        lane_K: Ints,
        load_KQ: Ints,
        slope_KQ: Floats,
        changes: tuple[tuple[Ints, Floats], ...],
    ) -> Floats:
        """Return how much the norms of some loads shrink, `K` [ms].

        Args:
            lane_K: Lanes.
            load_KQ: The loads.
            slope_KQ: How they count.
            changes: Ranks, and the changes of their loads, `K x Q`.
        """
        lanes, line_K1 = self._lanes, lane_K[:, None]
        unit_KQ = lanes.unit_LP[line_K1, load_KQ]
        now_KQ = lanes.total_LP[line_K1, load_KQ]
        new_KQ = now_KQ.copy()
        for rank_K, change_KQ in changes:
            where = line_K1, rank_K[:, None], load_KQ
            loads = np.maximum(lanes.loads_LWP[where] + change_KQ, 0.0)
            new_KQ += lanes.raised(loads / unit_KQ) - lanes.powers_LWP[where]
        root = 1.0 / lanes.power
        shrinks = unit_KQ * (now_KQ**root - np.maximum(new_KQ, 0.0) ** root)
        gain: Floats = (shrinks * slope_KQ).sum(axis=1)
        return gain

    def _gain_of_transfers(self) -> Floats:
        t = self._transfers
        less = self._ms(t.lane_K, t.table_K, t.width_K - t.moved_K)
        less -= self._ms(t.lane_K, t.table_K, t.width_K)
        more = self._ms(t.lane_K, t.table_K, t.held_K + t.moved_K)
        more -= self._ms(t.lane_K, t.table_K, t.held_K)
        loads = self._loads(t.lane_K, self._bank.stages_T[t.table_K])
        return self._gain(t.lane_K, *loads, ((t.source_K, less), (t.target_K, more)))

    def _gain_of_swaps(self) -> Floats:
        mine_K, theirs_K = self._mine_K, self._theirs_K
        lane_K = self._lane_N[mine_K]
        source_K, target_K = self._rank_N[mine_K], self._rank_N[theirs_K]
        tables = self._table_N[mine_K], self._table_N[theirs_K]
        mine, theirs = (
            self._ms(lane_K, table_K, self._width_N[piece_K])
            for table_K, piece_K in zip(tables, (mine_K, theirs_K), strict=True)
        )
        stages = [self._bank.stages_T[table_K] for table_K in tables]
        load_K4, slope_K4 = self._loads(lane_K, stages[0])
        gain_K = np.zeros(len(mine_K))
        same, odd = (
            np.flatnonzero(stages[0] == stages[1]),
            np.flatnonzero(stages[0] != stages[1]),
        )
        if len(same):
            more = (mine - theirs)[same]
            ends = (source_K[same], -more), (target_K[same], more)
            gain_K[same] = self._gain(lane_K[same], load_K4[same], slope_K4[same], ends)
        if len(odd):
            other_K4, count_K4 = self._loads(lane_K[odd], stages[1][odd])
            one, two = mine[odd], theirs[odd]
            load_K8 = np.concatenate([load_K4[odd], other_K4], axis=1)
            change_K8 = np.concatenate(
                [one * (slope_K4[odd] > 0), -two * (count_K4 > 0)], axis=1
            )
            slope_K8 = np.concatenate([slope_K4[odd], count_K4], axis=1)
            # Kernels of both stages may be one load.
            for n in range(2):
                shared = load_K8[:, n] == load_K8[:, 4 + n]
                change_K8[shared, n] += change_K8[shared, 4 + n]
                slope_K8[shared, n] = np.maximum(
                    slope_K8[shared, n], slope_K8[shared, 4 + n]
                )
                slope_K8[shared, 4 + n] = 0.0
            ends = (source_K[odd], -change_K8), (target_K[odd], change_K8)
            gain_K[odd] = self._gain(lane_K[odd], load_K8, slope_K8, ends)
        return gain_K

    def build(self, chosen: Ints) -> Changes:
        """Return the chosen moves as changes, in their order."""
        num = len(self._transfers.lane_K)
        at_t, at_s = np.flatnonzero(chosen < num), np.flatnonzero(chosen >= num)
        t = self._transfers.pick(chosen[at_t])
        mine, theirs = (p[chosen[at_s] - num] for p in (self._mine_K, self._theirs_K))
        left, shared = t.width_K - t.moved_K, np.flatnonzero(t.held_K)
        cut = np.flatnonzero(left)
        one, two = self._table_N[mine], self._table_N[theirs]
        source, target = self._rank_N[mine], self._rank_N[theirs]
        own, others = self._width_N[mine], self._width_N[theirs]
        rows = [
            (at_t, t.table_K, t.source_K, t.width_K, -1),
            (at_t[cut], t.table_K[cut], t.source_K[cut], left[cut], 1),
            (at_t, t.table_K, t.target_K, t.held_K + t.moved_K, 1),
            (
                at_t[shared],
                t.table_K[shared],
                t.target_K[shared],
                t.held_K[shared],
                -1,
            ),
            (at_s, one, source, own, -1),
            (at_s, one, target, own, 1),
            (at_s, two, target, others, -1),
            (at_s, two, source, others, 1),
        ]
        cand, table, rank, width = (
            np.concatenate([row[n] for row in rows]) for n in range(4)
        )
        sign = np.repeat([row[4] for row in rows], [len(row[0]) for row in rows])
        changes = Changes(cand, table, rank, width, sign, self.lane_K[chosen])
        return changes.pick(np.arange(len(chosen)))


def best_of(gain_K: Floats, group_K: Ints, count: int) -> Ints:
    """Return the indices of the largest gains, at most `count` of each group."""
    order = np.lexsort((-gain_K, group_K))
    ordered = group_K[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    sizes = np.diff(first, append=len(ordered))
    best: Ints = order[np.arange(len(ordered)) - np.repeat(first, sizes) < count]
    return best
