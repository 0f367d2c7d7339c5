"""Lanes: several placements of one task in arrays, and the cost of changing them.

A *lane* is one placement, as a list of pieces. A *piece* is a column shard on one rank,
or a table on a block of ranks that share its rows or replicate it. All lanes are in the
same arrays, so a step of many lanes takes as few NumPy calls as a step of one.

Each rank of a lane keeps sums over its shards: encodings for the kernels' times, loads
of the collectives, and bytes. A *change* removes some pieces and adds others. Pricing
it takes only the sums of the ranks that it touches. A *candidate* is a change that a
search may apply.

The score of a lane is a smooth version of its critical path. A load counts by a norm of
a high power over the ranks instead of by the slowest rank. So relieving one of several
equally slow ranks already lowers the score. The higher the power, the closer the score
is to the critical path.

Ranks do not wait between stages. So the loads are the kernels up to each stage, in
TorchRec's order, of the forward and of the backward pass, and the exchanges of each
stage. A pass takes as long as its longest chain of loads (see `costs/timeline.py`).

Shapes: `L` lanes, `W` ranks, `T` entries of the task (one for each way of a table), `G`
fusion groups, `S` stages, `4` phases of a stage (forward, backward, exchange of ids,
exchange of outputs), `P` loads (four of each stage, in TorchRec's order), `E` encoding
values, `M` memories, `K` candidates, `N` pieces, `X` pieces on single ranks, `A` sets
of tables that must be apart, `C` kernels and `R` ranks that candidates change.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from torchrec_neuroshard.search.shards import (
    Bools,
    Floats,
    Ints,
    ShardBank,
    grouped,
    spread_out,
)

LEAST_MS, LEAST_SHARE = 1e-9, 1e-4
"""Smallest unit of a phase in the norm: in ms, and as a share of all phases. A phase
that nothing runs in yet needs a unit, too."""
MOST_UNITS, MOST_POWER, NEW_SHARE = 3e4, 1e300, 0.15
"""Phases are capped at `MOST_UNITS` units, and at fewer if their power would exceed
`MOST_POWER`. Units are so large that a phase may grow to `NEW_SHARE` of all phases."""
MOST_BYTES = 2**27
"""Most bytes that the sums of lanes side by side may take. They are `L x W x G x E`."""
MOST_ENTRIES = 2**17
"""Pieces on single ranks that are priced at once, so that their arrays stay small."""
OTHER_CHAINS = 0.03
"""Weight of the mean over all chains in the score of a pass; the rest is the longest
chain's."""
STEPS_PER_REFRESH = 64
"""After this many changes the sums are recomputed, so that rounding errors stay small.
"""


@dataclass(frozen=True, slots=True)
class Changes:
    """Candidate changes: each adds some pieces (+1) and removes others (-1)."""

    cand_N: Ints
    """Candidate of each piece, ascending."""
    table_N: Ints
    rank_N: Ints
    """First rank of the piece's block."""
    width_N: Ints
    sign_N: Ints
    lane_K: Ints
    """Lane of each candidate."""

    def pick(self, index_K: Ints) -> Changes:
        """Return some candidates, renumbered in the order of `index_K`.

        Pieces need not be sorted by candidate; those of the result are.
        """
        place_K = np.full(len(self.lane_K), -1)
        place_K[index_K] = np.arange(len(index_K))
        cand_N = place_K[self.cand_N]
        keep = np.flatnonzero(cand_N >= 0)
        keep = keep[np.argsort(cand_N[keep], kind="stable")]
        table_N, rank_N, width_N, sign_N = (
            values[keep]
            for values in (self.table_N, self.rank_N, self.width_N, self.sign_N)
        )
        lane_K = self.lane_K[index_K]
        return Changes(cand_N[keep], table_N, rank_N, width_N, sign_N, lane_K)

    @staticmethod
    def join(parts: Sequence[Changes]) -> Changes:
        """Return the candidates of several lists, concatenated."""
        starts = np.cumsum([0, *(len(p.lane_K) for p in parts)])
        return Changes(
            np.concatenate([p.cand_N + s for p, s in zip(parts, starts, strict=False)]),
            *(
                np.concatenate([getattr(p, name) for p in parts])
                for name in ("table_N", "rank_N", "width_N", "sign_N", "lane_K")
            ),
        )

    def __len__(self) -> int:
        return len(self.lane_K)


def most_lanes(bank: ShardBank) -> int:
    """Return how many lanes may be side by side, at least 1; see `MOST_BYTES`."""
    sums = bank.task.world_size * bank.task.num_groups * bank.encoding_dim
    return max(1, MOST_BYTES // (8 * sums))


class Lanes:
    """Several placements of one task, with their sums and scores.

    Attributes:
        score_L: Smooth version of the critical path [ms]; searches minimise it.
        critical_L: Critical path [ms].
        phases_LWS4: Each rank's phases [ms]; collectives approximately.
        loads_LWP: Each rank's loads [ms].
        slope_LP: How much the score grows with each load's norm.
        load_LW: Sum of a rank's phases [ms].
        pieces_LT: Number of pieces of each table.
    """

    def __init__(self, bank: ShardBank, num_lanes: int, power: int = 32) -> None:
        """Start with empty placements.

        Args:
            bank: The task's shards.
            num_lanes: Number of placements.
            power: Power of the score's norm; a power of two.
        """
        self.bank, self.power = bank, power
        self._most_units = min(MOST_UNITS, MOST_POWER ** (1.0 / power))
        task = bank.task
        num_ranks, num_stages = task.world_size, task.num_stages
        self._hold(*np.zeros((4, 0), dtype=np.int64))
        shape = (num_lanes, num_ranks)
        self.sums_LWGE = np.zeros((*shape, task.num_groups, bank.encoding_dim))
        self.count_LWG = np.zeros((*shape, task.num_groups), dtype=np.int64)
        self.compute_LWG2 = np.zeros((*shape, task.num_groups, 2))
        self.extra_LWS2 = np.zeros((*shape, num_stages, 2))
        self.loads_LWS3 = np.zeros((*shape, num_stages, 3))
        self.bytes_MLW = np.zeros((len(bank.caps_MW), *shape))
        self.pieces_LT = np.zeros((num_lanes, len(bank.dims_T)), dtype=np.int32)
        self.occupants_LAW = np.zeros((num_lanes, bank.rules.num_sets + 1, num_ranks))
        self._stage_G = np.asarray(task.stages)
        self._has_one_chain = num_stages == 1 and not bank.simulator.replicated_S.any()
        self.num_changes = 0

    @property
    def num_lanes(self) -> int:
        """Number of placements."""
        return len(self.pieces_LT)

    @classmethod
    def of(cls, bank: ShardBank, widths: Sequence[Ints], power: int = 32) -> Self:
        """Return lanes of placements that are given as `T x W` widths."""
        parts = []
        for lane, width_TW in enumerate(widths):
            table, rank = np.nonzero(width_TW)
            first = rank % bank.block_T[table] == 0
            table, rank = table[first], rank[first]
            parts.append((table * 0 + lane, table, rank, width_TW[table, rank]))
        pieces = [np.concatenate(p).astype(np.int64) for p in zip(*parts, strict=True)]
        return cls.placed(bank, len(widths), *pieces, power=power)

    @classmethod
    def placed(
        cls, bank: ShardBank, num_lanes: int, *pieces: Ints, power: int = 32
    ) -> Self:
        """Return lanes of placements that are given as pieces (see `_hold`)."""
        lanes = cls(bank, num_lanes, power)
        lanes._hold(*pieces)
        lanes.refresh()
        return lanes

    def _hold(self, lane_N: Ints, table_N: Ints, rank_N: Ints, width_N: Ints) -> None:
        """Set the pieces, without updating the sums."""
        self.lane_N, self.table_N = lane_N, table_N
        self.rank_N, self.width_N = rank_N, width_N

    def _exchange(self, kept: Ints | Bools, *new: Ints) -> None:
        """Drop all pieces but these, and add others, without updating the sums."""
        now = self.lane_N, self.table_N, self.rank_N, self.width_N
        self._hold(
            *(np.concatenate([a[kept], b]) for a, b in zip(now, new, strict=True))
        )

    def width_TW(self, lane: int) -> Ints:
        """Return one lane as `T x W` widths."""
        width_TW = self.bank.no_widths()
        own = np.flatnonzero(self.lane_N == lane)
        size = self.bank.block_T[self.table_N[own]]
        place, offset = spread_out(size)
        own = own[place]
        width_TW[self.table_N[own], self.rank_N[own] + offset] = self.width_N[own]
        return width_TW

    @staticmethod
    def join(parts: Sequence[Lanes]) -> Lanes:
        """Return the lanes of several objects, concatenated."""
        first = parts[0]
        other = Lanes(first.bank, 0, first.power)
        for name in vars(first):
            if name.split("_")[-1].startswith("L"):
                values = [getattr(p, name) for p in parts]
                setattr(other, name, np.concatenate(values))
        other.bytes_MLW = np.concatenate([p.bytes_MLW for p in parts], axis=1)
        starts = np.cumsum([0, *(p.num_lanes for p in parts)])
        pieces = [
            (p.lane_N + s, p.table_N, p.rank_N, p.width_N)
            for p, s in zip(parts, starts, strict=False)
        ]
        other._hold(*map(np.concatenate, zip(*pieces, strict=True)))
        return other

    def take(self, index_L: Ints, num_changes: int = 0) -> Lanes:
        """Return copies of some lanes, in the order of `index_L`."""
        other = Lanes(self.bank, 0, self.power)
        other.num_changes = num_changes
        for name, value in vars(self).items():
            if name.split("_")[-1].startswith("L"):
                setattr(other, name, value[index_L].copy())
        other.bytes_MLW = self.bytes_MLW[:, index_L].copy()
        order = np.argsort(self.lane_N, kind="stable")
        ends = np.cumsum(np.bincount(self.lane_N, minlength=self.num_lanes))
        count = np.diff(ends, prepend=0)[index_L]
        place, offset = spread_out(count)
        held = order[(ends - np.diff(ends, prepend=0))[index_L][place] + offset]
        other._hold(place, self.table_N[held], self.rank_N[held], self.width_N[held])
        return other

    def put(self, lanes: Lanes, index_L: Ints) -> None:
        """Replace some lanes, given by `index_L`, by all lanes of another object."""
        for name, value in vars(lanes).items():
            if name.split("_")[-1].startswith("L"):
                getattr(self, name)[index_L] = value
        self.bytes_MLW[:, index_L] = lanes.bytes_MLW
        self.num_changes = max(self.num_changes, lanes.num_changes)
        kept = ~np.isin(self.lane_N, index_L)
        new = lanes.table_N, lanes.rank_N, lanes.width_N
        self._exchange(kept, index_L[lanes.lane_N], *new)

    # Sums.

    def _parts(
        self, cand_N: Ints, table_N: Ints, rank_N: Ints, width_N: Ints, sign_N: Ints
    ) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
        """Return one entry for each rank of each piece.

        A leader's piece also gets an entry for each follower that is priced separately.

        Returns:
            Candidates, ranks, tables, rows of the bank, widths and signs, `X` each.
        """
        bank = self.bank
        size_N = bank.block_T[table_N]
        if (size_N > 1).any():
            place, offset = spread_out(size_N)
            cand_N, table_N, width_N, sign_N = (
                a[place] for a in (cand_N, table_N, width_N, sign_N)
            )
            rank_N = rank_N[place] + offset
        row_N = bank.rows(table_N, width_N, rank_N)
        place, beside = bank.colocated_shards(table_N)
        if len(beside):
            cand_N, rank_N, sign_N = (
                np.concatenate([a, a[place]]) for a in (cand_N, rank_N, sign_N)
            )
            table_N = np.concatenate([table_N, beside])
            row_N = np.concatenate([row_N, bank.whole_T[beside]])
            # Width 0 adds no bytes: the leader's bytes include its followers'.
            width_N = np.concatenate([width_N, np.zeros_like(beside)])
        return cand_N, rank_N, table_N, row_N, width_N, sign_N

    def refresh(self) -> None:
        """Recompute all sums and scores from the pieces."""
        for name in ("sums_LWGE", "count_LWG", "compute_LWG2", "extra_LWS2"):
            getattr(self, name)[:] = 0
        for name in ("loads_LWS3", "bytes_MLW", "pieces_LT", "occupants_LAW"):
            getattr(self, name)[:] = 0
        step = max(1, MOST_ENTRIES // max(1, int(self.bank.block_T.max())))
        for start in range(0, len(self.lane_N), step):
            some = slice(start, start + step)
            held = (self.lane_N[some], self.table_N[some], self.rank_N[some])
            ones = np.ones(len(held[0]), dtype=np.int64)
            self._add(*held, self.width_N[some], ones)
        self._predict(np.flatnonzero(self.count_LWG.reshape(-1)))
        self.summarise()

    def _add(
        self, lane_N: Ints, table_N: Ints, rank_N: Ints, width_N: Ints, sign_N: Ints
    ) -> Ints:
        """Add signed pieces to the sums.

        Returns:
            The changed kernels: indices into the flattened `L x W x G`.
        """
        bank = self.bank
        np.add.at(self.pieces_LT, (lane_N, table_N), sign_N)
        lane, rank, table, row, width, sign = self._parts(
            lane_N, table_N, rank_N, width_N, sign_N
        )
        num_ranks, num_groups = self.count_LWG.shape[1:]
        cell = (lane * num_ranks + rank) * num_groups + bank.groups_T[table]
        cells, starts, order = grouped(cell)
        flat = self.sums_LWGE.reshape(-1, bank.encoding_dim)
        flat[cells] += np.add.reduceat(
            bank.encoding(row[order]) * sign[order, None], starts, axis=0
        )
        self.count_LWG.reshape(-1)[cells] += np.add.reduceat(sign[order], starts)
        stage = bank.stages_T[table]
        where = lane, rank, stage
        np.add.at(self.loads_LWS3, where, bank.loads_of(row) * sign[:, None])
        if bank.has_extra:
            np.add.at(self.extra_LWS2, where, bank.extra(row) * sign[:, None])
        for used_LW, size_X in zip(
            self.bytes_MLW, bank.sizes(table, width), strict=True
        ):
            np.add.at(used_LW, (lane, rank), size_X * sign)
        if bank.rules.num_sets:
            for sets_X in bank.rules.sets_TK[table].T:
                np.add.at(self.occupants_LAW, (lane, sets_X, rank), sign)
            self.occupants_LAW[:, -1] = 0
        return cells

    def _predict(self, cells: Ints) -> None:
        """Predict the times of kernels, given by index as in `_add`."""
        flat = self.sums_LWGE.reshape(-1, self.bank.encoding_dim)
        compute = self.compute_LWG2.reshape(-1, 2)
        count = self.count_LWG.reshape(-1)
        held = count[cells] > 0
        compute[cells[~held]] = 0.0
        flat[cells[~held]] = 0.0
        held_cells = cells[held]
        for start in range(0, len(held_cells), MOST_ENTRIES):
            some = held_cells[start : start + MOST_ENTRIES]
            compute[some] = self.bank.predict(flat[some])

    def summarise(self) -> None:
        """Compute phases, scores and critical paths from the sums."""
        bank = self.bank
        # A rank that lost its last shard may keep a rounding error below 0.
        np.maximum(self.loads_LWS3, 0.0, out=self.loads_LWS3)
        compute_LWS2 = bank.simulator.stage_compute(self.compute_LWG2) + self.extra_LWS2
        exact = bank.simulator.phases(compute_LWS2, self.loads_LWS3)
        self.columns_LS3 = self._columns()
        reorder_LS2 = self._order_ms(self.columns_LS3)
        self.order_LS: Floats = reorder_LS2.sum(axis=2)
        self.stages_LS: Ints = bank.simulator.stage_order(self.pieces_LT > 0)
        self.critical_L: Floats = bank.simulator.path_ms(
            exact, reorder_LS2, self.stages_LS, self.loads_LWS3
        )
        # Collectives are approximated by sums over shards, and scaled so that the
        # slowest rank has its exact time.
        ms = self.loads_LWS3 * bank.comms_per_load_S3
        about = np.stack([ms[..., 0], ms[..., 1] + ms[..., 2]], axis=-1)
        most_LS2 = about.max(axis=1)
        worst = exact[..., [0, 2, 3]].max(axis=1)
        both_LS = worst[..., 1] + worst[..., 2]
        exact_LS2 = np.stack([worst[..., 0], both_LS], axis=-1)
        known = (exact_LS2 > 0) & (most_LS2 > 0)
        self.scale_LS2: Floats = np.where(
            known, exact_LS2 / np.maximum(most_LS2, LEAST_MS), 1.0
        )
        about *= self.scale_LS2[:, None]
        self.phases_LWS4: Floats = np.concatenate([compute_LWS2, about], axis=-1)
        forward_LS = worst[..., 1] / np.maximum(both_LS, LEAST_MS)
        self.sent_LS: Floats = np.take_along_axis(forward_LS, self.stages_LS, axis=1)
        self.reduced_LS: Bools = bank.simulator.replicated_S[self.stages_LS]
        every = np.arange(self.num_lanes)
        self.loads_LWP: Floats = self.loads(self.phases_LWS4, every)
        self.updated_LS: Floats = self.loads_LWP[:, :, 1::4].mean(axis=1)
        worst_LP = self.loads_LWP.max(axis=1)
        least_share = max(LEAST_SHARE, NEW_SHARE / self._most_units)
        least_L1 = least_share * worst_LP.sum(axis=1, keepdims=True)
        self.unit_LP: Floats = np.maximum(worst_LP, np.maximum(least_L1, LEAST_MS))
        self.powers_LWP: Floats = self.raised(self.loads_LWP / self.unit_LP[:, None])
        self.total_LP: Floats = self.powers_LWP.sum(axis=1)
        self.load_LW: Floats = self.phases_LWS4.sum(axis=(2, 3))
        self.score_L: Floats = self.score(self.total_LP, every)
        used_LS = compute_LWS2[..., 0].max(axis=1) > 0
        used_LS = np.take_along_axis(used_LS, self.stages_LS, axis=1)
        self.join_L: Floats = bank.simulator.joined_costs(used_LS).sum(axis=1)
        self.score_L += self.order_LS.sum(axis=1) + self.join_L
        self.slope_LP: Floats = self._slopes()

    def loads(self, phases_KWS4: Floats, lane_K: Ints) -> Floats:
        """Return the loads of ranks with these phases, `K x W x P` [ms].

        Args:
            phases_KWS4: Phases, or changes of phases.
            lane_K: Lanes whose order of stages holds.
        """
        num_lines, num_ranks, num_stages, _ = phases_KWS4.shape
        if num_stages > 1:
            row_KWS = np.arange(num_lines * num_ranks).reshape(num_lines, num_ranks, 1)
            row_KWS = row_KWS * num_stages + self.stages_LS[lane_K][:, None]
            phases_KWS4 = phases_KWS4.reshape(-1, 4)[row_KWS]
            phases_KWS4[..., 1] = phases_KWS4[..., 1].cumsum(axis=2)
            for some in self.bank.modules:
                phases_KWS4[:, :, some, 0] = phases_KWS4[:, :, some, 0].cumsum(axis=2)
        return phases_KWS4.reshape(num_lines, num_ranks, 4 * num_stages)

    def raised(self, values: Floats) -> Floats:
        """Return values raised to the power of the norm."""
        values, power = np.minimum(values, self._most_units), self.power
        while power > 1:
            values = values * values
            power //= 2
        return values

    def score(self, total_KP: Floats, lane_K: Ints) -> Floats:
        """Return the scores for sums of the loads' powers, without reordering, `K`.

        Args:
            total_KP: Sum over ranks of the loads' powers, in units.
            lane_K: Lanes that the candidates start from.
        """
        norm_KP = np.maximum(total_KP, 0.0) ** (1.0 / self.power)
        norm_KP *= self.unit_LP[lane_K]
        if self._has_one_chain:
            return np.asarray(norm_KP.sum(axis=1))
        score_K: Floats = norm_KP[:, 2::4].sum(axis=1)
        for chain_KS in self._chains(norm_KP, lane_K):
            num_stages = norm_KP.shape[1] // 4
            score_K += (1 - OTHER_CHAINS) * chain_KS.max(axis=1)
            score_K += OTHER_CHAINS * chain_KS[:, :num_stages].mean(axis=1)
        return score_K

    def _chains(self, norm_KP: Floats, lane_K: Ints) -> list[Floats]:
        """Return the chains of each forward pass and of the backward pass [ms].

        The backward pass has one chain for each place, and then, if tables are
        replicated, one that ends with the all-reduce of each place.
        """
        forward_KS, backward_KS, _, both_KS = (norm_KP[:, n::4] for n in range(4))
        sent_KS = both_KS * self.sent_LS[lane_K]
        left_KS = both_KS - sent_KS
        if not self.bank.simulator.comms_model.overlaps:
            # One chain each, with all kernels and all exchanges.
            sums = [
                forward_KS[:, some.stop - 1] + sent_KS[:, some].sum(axis=1)
                for some in self.bank.modules
            ]
            sums.append(backward_KS[:, -1] + left_KS.sum(axis=1))
            return [total_K[:, None] for total_K in sums]
        reduced_KS = left_KS * self.reduced_LS[lane_K]
        left_KS = (left_KS - reduced_KS)[:, ::-1].cumsum(axis=1)[:, ::-1]
        backward = [backward_KS + left_KS]
        if self.reduced_LS.any():
            # The kernels before an all-reduce are those of its place and after it.
            before_LS = np.zeros_like(self.updated_LS)
            before_LS[:, 1:] = self.updated_LS[:, :-1]
            ends_KS = backward_KS[:, -1:] - before_LS[lane_K]
            ends_KS = ends_KS + reduced_KS.cumsum(axis=1)
            backward.append(ends_KS * self.reduced_LS[lane_K])
        return [
            *(
                forward_KS[:, some] + sent_KS[:, some][:, ::-1].cumsum(axis=1)[:, ::-1]
                for some in self.bank.modules
            ),
            np.concatenate(backward, axis=1),
        ]

    def _slopes(self) -> Floats:
        """Return how much the score grows with each load's norm, `L x P`.

        Only the longest chains count. `forward_LS` and `backward_L` say which kernels
        are on them: those up to these places.
        """
        if self._has_one_chain:
            self.forward_LS: Ints = np.zeros_like(self.stages_LS)
            self.backward_L: Ints = np.zeros(self.num_lanes, dtype=np.int64)
            return np.ones_like(self.unit_LP)
        every = np.arange(self.num_lanes)
        norm_LP = self.unit_LP * self.total_LP ** (1.0 / self.power)
        slope_LP = np.zeros_like(norm_LP)
        slope_LP[:, 2::4] = 1.0
        place_S = np.arange(self.stages_LS.shape[1])
        if not self.bank.simulator.comms_model.overlaps:
            ends = [some.stop - 1 for some in self.bank.modules]
            slope_LP[:, 0::4] = np.isin(place_S, ends)
            slope_LP[:, 1::4] = place_S == place_S[-1]
            slope_LP[:, 3::4] = 1.0
            ends_S = np.repeat(ends, [s.stop - s.start for s in self.bank.modules])
            self.forward_LS = np.tile(ends_S, (self.num_lanes, 1))
            self.backward_L = np.full(self.num_lanes, place_S[-1])
            return slope_LP
        *forward, backward = self._chains(norm_LP, every)
        longest_L1 = backward.argmax(axis=1)[:, None]
        reduces_L1 = longest_L1 >= len(place_S)
        last_L1 = np.where(reduces_L1, place_S[-1], longest_L1)
        first_reduced = reduces_L1 & (place_S <= longest_L1 - len(place_S))
        returned = np.where(self.reduced_LS, first_reduced, place_S >= last_L1)
        slope_LP[:, 1::4] = place_S == last_L1
        slope_LP[:, 3::4] = returned * (1 - self.sent_LS)
        self.backward_L = last_L1[:, 0]
        self.forward_LS = np.zeros_like(self.stages_LS)
        for some, chain_LS in zip(self.bank.modules, forward, strict=True):
            last_L1 = chain_LS.argmax(axis=1)[:, None] + some.start
            sent_LS = (place_S[some] >= last_L1) * self.sent_LS[:, some]
            slope_LP[:, 0::4][:, some] = place_S[some] == last_L1
            slope_LP[:, 3::4][:, some] += sent_LS
            self.forward_LS[:, some] = last_L1
        return slope_LP

    def weights(self) -> Floats:
        """Return each rank's share in the score, `L x W`; hot ranks have the most."""
        total_LP = np.maximum(self.total_LP, 1e-300)
        slope_LP = self.unit_LP * total_LP ** (1.0 / self.power - 1.0) * self.slope_LP
        weight_LW: Floats = (self.powers_LWP * slope_LP[:, None]).sum(axis=2)
        return weight_LW

    # Reordering of output columns, which stages with split tables need.

    def _columns(self) -> Floats:
        """Return each stage's ordered tables, their columns and all, `L x S x 3`.

        All are 0 if reordering takes no time.
        """
        bank = self.bank
        num_stages = bank.task.num_stages
        if not bank.has_order:
            return np.zeros((self.num_lanes, num_stages, 3))
        member = np.zeros((len(bank.stages_T), num_stages))
        member[np.arange(len(member)), bank.stages_T] = 1.0
        split = self.pieces_LT >= bank.simulator.ordered_from_T
        placed = self.pieces_LT > 0
        parts = split, split * bank.columns_T, placed * bank.columns_T
        return np.stack([part @ member for part in parts], axis=2)

    def _order_ms(self, columns_XS3: Floats) -> Floats:
        """Return the time of reordering for sums as in `_columns`, `X x S x 2`."""
        split_XS, own_XS, all_XS = np.moveaxis(columns_XS3, -1, 0)
        columns = np.where(self.bank.pooled_S, all_XS * (split_XS > 0.5), own_XS)
        return self.bank.simulator.order_costs(columns)

    def _reordering(self, c: Changes) -> Floats:
        """Return how much longer candidates make the reordering, `K` [ms]."""
        bank = self.bank
        if not bank.has_order:
            return np.zeros(len(c))
        num_tables = len(bank.dims_T)
        cells, starts, order = grouped(c.cand_N * num_tables + c.table_N)
        cand, table = np.divmod(cells, num_tables)
        before = self.pieces_LT[c.lane_K[cand], table]
        after = before + np.add.reduceat(c.sign_N[order], starts)
        least = bank.simulator.ordered_from_T[table]
        split = (after >= least) * 1.0 - (before >= least)
        placed = (after > 0) * 1.0 - (before > 0)
        moved = (split != 0) | (placed != 0)
        if not moved.any():
            return np.zeros(len(c))
        columns, new_KS3 = bank.columns_T[table], self.columns_LS3[c.lane_K]
        for n, change in enumerate((split, split * columns, placed * columns)):
            np.add.at(new_KS3[..., n], (cand, bank.stages_T[table]), change)
        ms: Floats = self._order_ms(new_KS3).sum(axis=(1, 2))
        ms -= self.order_LS[c.lane_K].sum(axis=1)
        return ms

    # Changes.

    def evaluate(self, c: Changes, deadline: float = math.inf) -> Floats:
        """Return the lanes' scores after each candidate, `K` [ms].

        Kernels are priced exactly by the cost model, collectives approximately.

        Args:
            c: The candidates.
            deadline: `time.monotonic()` after which no more candidates are evaluated.
                The scores of the others are infinite.
        """
        size_N = self.bank.block_T[c.table_N]
        if size_N.sum() < MOST_ENTRIES:
            return self._evaluate(c)
        size_K = np.bincount(c.cand_N, size_N, len(c))
        ends_K = np.cumsum(size_K) // MOST_ENTRIES
        score_K: Floats = np.full(len(c), np.inf)
        for some in np.split(np.arange(len(c)), np.flatnonzero(np.diff(ends_K)) + 1):
            score_K[some] = self._evaluate(c.pick(some))
            if time.monotonic() >= deadline:
                break
        return score_K

    def _evaluate(self, c: Changes) -> Floats:
        """Return the scores of as many candidates as can be evaluated at once."""
        bank = self.bank
        num_ranks, num_groups = self.count_LWG.shape[1:]
        num_stages = bank.task.num_stages
        cand_X, rank_X, table_X, row_X, _, sign_X = self._parts(
            c.cand_N, c.table_N, c.rank_N, c.width_N, c.sign_N
        )
        line_X = cand_X * num_ranks + rank_X
        cells, starts, order = grouped(line_X * num_groups + bank.groups_T[table_X])
        line_C, group_C = np.divmod(cells, num_groups)
        cand_C, rank_C = np.divmod(line_C, num_ranks)
        where = (c.lane_K[cand_C], rank_C, group_C)
        sign = sign_X[order]
        change = bank.encoding(row_X[order]) * sign[:, None]
        sums = self.sums_LWGE[where] + np.add.reduceat(change, starts, axis=0)
        held = np.flatnonzero(self.count_LWG[where] + np.add.reduceat(sign, starts) > 0)
        compute = np.zeros((len(cells), 2))
        compute[held] = bank.predict(sums[held])
        compute -= self.compute_LWG2[where]
        lines, line_at = np.unique(line_C, return_inverse=True)
        cand_R, rank_R = np.divmod(lines, num_ranks)
        lane_R = c.lane_K[cand_R]
        size = len(lines) * num_stages
        cell_C = line_at * num_stages + self._stage_G[group_C]
        delta = np.zeros((size, 4))
        for n in range(2):
            delta[:, n] = np.bincount(cell_C, compute[:, n], size)
        stage_X = bank.stages_T[table_X]
        line_at_X = np.searchsorted(lines, line_X)
        cell_X = line_at_X * num_stages + stage_X
        ms_X3 = bank.loads_of(row_X) * bank.comms_per_load_S3[stage_X]
        ms_X3 *= sign_X[:, None]
        scale_X2 = self.scale_LS2[lane_R[line_at_X], stage_X]
        delta[:, 2] = np.bincount(cell_X, ms_X3[:, 0] * scale_X2[:, 0], size)
        outputs_X = (ms_X3[:, 1] + ms_X3[:, 2]) * scale_X2[:, 1]
        delta[:, 3] = np.bincount(cell_X, outputs_X, size)
        if bank.has_extra:
            extra = bank.extra(row_X) * sign_X[:, None]
            for n in range(2):
                delta[:, n] += np.bincount(cell_X, extra[:, n], size)
        change_R1S4 = delta.reshape(len(lines), 1, num_stages, 4)
        new_RP = self.loads_LWP[lane_R, rank_R] + self.loads(change_R1S4, lane_R)[:, 0]
        powers = self.raised(np.maximum(new_RP, 0.0) / self.unit_LP[lane_R])
        powers -= self.powers_LWP[lane_R, rank_R]
        first = np.flatnonzero(np.diff(cand_R, prepend=-1))
        total_KP = self.total_LP[c.lane_K]
        total_KP[cand_R[first]] += np.add.reduceat(powers, first, axis=0)
        score = self.score(total_KP, c.lane_K) + self._reordering(c)
        score += self.order_LS[c.lane_K].sum(axis=1) + self.join_L[c.lane_K]
        return score

    def apply(self, c: Changes) -> None:
        """Apply changes in place. The pieces that they remove must exist."""
        changed = np.unique(c.lane_K)
        if 2 * len(changed) <= self.num_lanes:
            # Sums of unchanged lanes need no update.
            part = self.take(changed, self.num_changes)
            lane_K = np.searchsorted(changed, c.lane_K)
            part.apply(dataclasses.replace(c, lane_K=lane_K))
            self.put(part, changed)
            return
        num_tables, num_ranks = len(self.bank.dims_T), self.bank.task.world_size
        lane = c.lane_K[c.cand_N]
        self.num_changes += 1
        key_N = (lane * num_tables + c.table_N) * num_ranks + c.rank_N
        mine = (self.lane_N * num_tables + self.table_N) * num_ranks + self.rank_N
        new, pieces = c.sign_N > 0, (lane, c.table_N, c.rank_N, c.width_N)
        kept = ~np.isin(mine, key_N[c.sign_N < 0])
        self._exchange(kept, *(values[new] for values in pieces))
        if self.num_changes % STEPS_PER_REFRESH == 0:
            self.refresh()
            return
        self._predict(self._add(*pieces, c.sign_N))
        self.summarise()
