"""Local improvement of a placement: moves, swaps, re-splits, un-splits, other ways.

A placement is a `T x W` matrix of widths. One step transfers columns of a table from
one rank to another: all of a shard's columns (a move; a join, that is an un-split,
where the other rank already holds the table) or some (a split or an uneven re-split).
A swap is two such transfers. A budget (see `budget`) keeps the steps to what may be
moved from a plan at work. Shapes: `K` candidates, `T` tables, `W` ranks, `G` fusion
groups, `S` stages, `P` approximate phases, `M` memories (see `shards`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.search.base import SearchConfig
from torchrec_neuroshard.search.budget import MoveBudget
from torchrec_neuroshard.search.feasibility import spread_columns
from torchrec_neuroshard.search.shards import (
    Floats,
    Ints,
    ShardBank,
    aligned_widths,
    split_widths,
)
from torchrec_neuroshard.simulator import critical_path
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = ["Outcomes", "Plan", "refine_within"]

NUM_TARGETS = 8
"""Ranks tried as the other side of a transfer: the least loaded ones."""
MAX_SWAPS = 2000
"""Swaps looked at: those that come nearest to evening two ranks out."""
NUM_FIRST = 24
NUM_EXACT = 96
"""Candidates of a step that are evaluated exactly, best approximations first; those
after the first few only where none of these pays."""
SPREAD_WEIGHT = 0.005
"""Weight of the spread (the mean over ranks of the sixth powers of the phases, relative
to the average rank) beside the critical path: lets a step pay that relieves one of
several equally critical ranks."""
BASE_STEPS, STEPS_PER_TABLE, SMALL_TASK_STEPS = 50, 1.25, 8000.0
"""Steps of all descents together, at effort 1: see `refine`."""
NUM_RESPLIT = 4
"""Tables of a critical rank, the costliest first, that are split anew."""
SMALL_TASK = 64
"""Tasks with fewer tables than this are restarted more often."""
RESTART_GAIN = 1e-3
"""Relative gain of a restart that makes further ones worth while."""
ACCEPT_WORSE = 0.003
"""Mean relative loss at which a restart is gone on from although it is worse."""
PERTURB_NOISE = 1.0
"""Random load on each rank, relative to the mean, while a disturbance places tables."""
PERTURB_HOT = 0.5
"""Share of the disturbances that split a costly table of a critical rank anew."""
PERTURB_BACK = 0.5
"""Share of the disturbances within a budget that take changes back."""
PERTURB_RESPLIT = 0.4
"""Share of the tables of a disturbance that are split differently."""
NUM_LAST_STEPS = 10
"""Steps at the end, without regard to the spread."""
NUM_LAST_PLANS = 4
"""Of equally good plans within a budget, those of fewest bytes that get these steps."""
MAX_RANK_SETS = 8
"""Sets of ranks that tables of a critical rank may be on, of which some are tried."""
STEPS_PER_REFRESH = 64
"""Steps after which running sums are added up anew, so that rounding does not pile up.
"""
_ALL = slice(None)
MIN_GAIN = 1e-7
"""Relative improvement below which a step does not count."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Up to two transfers each: (table, columns) from `source` to `target` and back."""

    source_K: Ints
    target_K: Ints
    table_K: Ints
    columns_K: Ints
    back_table_K: Ints
    """-1 where nothing comes back."""
    back_columns_K: Ints
    bytes_K: Floats
    """What they move beyond what the plan does; 0 without a budget."""

    def pick(self, index: Ints) -> _Candidates:
        return _Candidates(*(getattr(self, name)[index] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.source_K)

    @staticmethod
    def join(parts: Sequence[_Candidates]) -> _Candidates:
        return _Candidates(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in _Candidates.__slots__
            )
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Changes of single shards, several to a candidate, colocated ones last."""

    line_N: Ints
    """Candidate."""
    side_N: Ints
    """0 on its source, 1 on its target."""
    rank_N: Ints
    table_N: Ints
    old_N: Ints
    new_N: Ints
    """Width before and after, 0 where there is no shard."""
    num_moved: int
    """Changes that are not of colocated shards."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Scores and sums after each candidate; `2` is source and target."""

    score_K: Floats
    sums_K2GE: Floats
    count_K2G: Ints
    compute_K2G2: Floats
    extra_K2S2: Floats
    loads_KWS3: Floats


class Plan:
    """A placement with its running sums and costs."""

    def __init__(
        self,
        bank: ShardBank,
        width_TW: Ints,
        spread: float = SPREAD_WEIGHT,
        budget: MoveBudget | None = None,
        *,
        per_byte: bool = False,
    ) -> None:
        """Evaluate a placement.

        Args:
            bank: The task's shards.
            width_TW: Columns of each table on each rank.
            spread: Weight of the spread in the score, beside the critical path.
            budget: Keeps candidates to what may be moved. None: anything.
            per_byte: Whether steps are compared by what they gain for each byte.
        """
        self.bank = bank
        self.width_TW = width_TW.copy()
        self.budget = budget
        self.per_byte = per_byte
        self.movable_T = bank.moves_T & (True if budget is None else budget.movable_T)
        self._bytes_T: Floats = np.zeros(len(width_TW))
        self._count_bytes(np.arange(len(width_TW)))
        task = bank.task
        num_ranks, num_groups = task.world_size, task.num_groups
        narrowest = -(-np.asarray(task.min_widths) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        self._narrowest_T: Ints = np.maximum(narrowest, COLUMN_MULTIPLE)
        self._most_T: Ints = np.asarray(task.max_shards)
        unit_P = bank.unit_phases_P
        self._per_unit_P1: Floats = 1.0 / unit_P[:, None]
        self._power_weights_P: Floats = spread * unit_P
        self._limited = bool(np.isfinite(bank.caps_MW).any())
        self.sums_WGE: Floats = np.zeros((num_ranks, num_groups, bank.encoding_dim))
        self.extra_WS2: Floats = np.zeros((num_ranks, task.num_stages, 2))
        self.loads_WS3: Floats = np.zeros((num_ranks, task.num_stages, 3))
        self.bytes_MW: Floats = np.zeros_like(bank.caps_MW)
        self.count_WG: Ints = np.zeros((num_ranks, num_groups), dtype=np.int64)
        self.shards_T: Ints = (width_TW > 0).sum(axis=1)
        self.compute_WG2: Floats = np.zeros((num_ranks, num_groups, 2))
        self.num_applied = 0
        self._refresh(np.arange(num_ranks))

    def _predict(self, sums_SE: Floats, count_S: Ints) -> Floats:
        held = np.flatnonzero(count_S)
        costs = np.zeros((len(sums_SE), 2))
        if len(held):
            costs[held] = self.bank.predict(sums_SE[held])
        return costs

    def _summarise(self) -> None:
        bank = self.bank
        stage_compute = bank.simulator.stage_compute(self.compute_WG2)
        self.compute_WS2: Floats = stage_compute + self.extra_WS2
        loads = self.compute_WS2, self.loads_WS3
        exact = bank.simulator.phases(*(part[None] for part in loads))
        self.comms_S: Floats = exact[0][:, :, [0, 2, 3]].max(axis=0).sum(axis=1)
        self.critical_ms = float(critical_path(exact)[0]) + self._summarise_order()
        self.phases_PW: Floats = bank.approximate_phases(*loads).T.copy()
        self.loads_W: Floats = self.phases_PW.sum(axis=0)
        self.powers_W: Floats = self._powers(self.phases_PW)
        self.score = self.critical_ms + float(self.powers_W.mean())

    def _summarise_order(self) -> float:
        """Note which outputs are put in order, and return how long that takes [ms]."""
        bank = self.bank
        if not bank.has_order:
            return 0.0
        split_T = bank.simulator.splits_columns_T & (self.shards_T > bank.block_T)
        num_stages = self.loads_WS3.shape[1]

        def by_stage(amount_T: npt.ArrayLike) -> Floats:
            total: Floats = np.bincount(
                bank.stages_T, weights=amount_T, minlength=num_stages
            ).astype(np.float64)
            return total

        self.num_split_S: Floats = by_stage(split_T)
        self.split_columns_S: Floats = by_stage(bank.columns_T * split_T)
        self.placed_columns_S: Floats = by_stage(bank.columns_T * (self.shards_T > 0))
        self.order_S: Floats = self._order_ms(
            np.arange(num_stages),
            self.num_split_S,
            self.split_columns_S,
            self.placed_columns_S,
        )
        return float(self.order_S.sum())

    def _order_ms(
        self, stage_N: Ints, split_N: Floats, split_columns_N: Floats, all_N: Floats
    ) -> Floats:
        """Putting outputs of stages in order, by what is split, `N` [ms]."""
        columns = np.where(
            self.bank.pooled_S[stage_N], all_N * (split_N > 0), split_columns_N
        )
        return self.bank.order_ms(columns[:, None])

    def set_rows(self, widths: Mapping[int, Ints]) -> None:
        """Lay some tables' columns out anew."""
        changed = np.zeros(len(self.loads_W), dtype=bool)
        for table, width_W in widths.items():
            changed |= width_W != self.width_TW[table]
            self.width_TW[table] = width_W
            self.shards_T[table] = (width_W > 0).sum()
        self._count_bytes(np.array(list(widths)))
        self._refresh(np.flatnonzero(changed))

    def _count_bytes(self, tables: Ints) -> None:
        """Count what some tables move."""
        if self.budget is not None:
            self._bytes_T[tables] = self.budget.bytes(tables, self.width_TW[tables])

    def _refresh(self, ranks: Ints) -> None:
        """Recompute some ranks from their shards."""
        bank = self.bank
        num_groups = self.sums_WGE.shape[1]
        table, place = self._held(ranks)
        width = self.width_TW[table, ranks[place]]
        rows = bank.rows(table, width, ranks[place])
        loads, count = bank.loads(rows, place, len(ranks))
        self.sums_WGE[ranks] = loads.sums_CWGE
        self.count_WG[ranks] = count
        self.extra_WS2[ranks] = loads.extra_CWS2
        self.loads_WS3[ranks] = loads.loads_CWS3
        used_MW = bank.sizes_of_ranks(table, width, ranks[place])
        self.bytes_MW[:, ranks] = used_MW[:, ranks]
        self.compute_WG2[ranks] = self._predict(
            loads.sums_CWGE.reshape(-1, bank.encoding_dim), count.reshape(-1)
        ).reshape(len(ranks), num_groups, 2)
        self._summarise()

    # Candidates.

    def _targets(self, sources: Ints, num_targets: int) -> Ints:
        """Ranks to take columns: the least loaded ones.

        Where tables of the sources may not be on all ranks, the least loaded of those
        that they may be on are among them.
        """
        targets: Ints = np.argsort(self.loads_W, kind="stable")
        allowed_TW = self.bank.rules.allowed_TW
        if allowed_TW is None:
            return targets[:num_targets]
        held = self.width_TW[:, sources].any(axis=1)
        wanted = np.zeros(len(targets), dtype=bool)
        wanted[:num_targets] = True
        for allowed_W in np.unique(allowed_TW[held], axis=0)[:MAX_RANK_SETS]:
            wanted[np.flatnonzero(allowed_W[targets])[:num_targets]] = True
        return targets[wanted]

    def _moving(self, ranks: Ints) -> tuple[Ints, Ints]:
        """Shards that may leave their ranks alone: tables, places in `ranks`."""
        table, place = self._held(ranks)
        moving = self.movable_T[table]
        return table[moving], place[moving]

    def _held(self, ranks: Ints) -> tuple[Ints, Ints]:
        """Shards of some ranks: tables, places in `ranks`."""
        # Of the ways of a table, all but one are nowhere.
        placed = np.flatnonzero(self.shards_T)
        table, place = np.nonzero(self.width_TW[placed[:, None], ranks])
        return placed[table], place

    def transfers(self, sources: Ints, num_targets: int = NUM_TARGETS) -> _Candidates:
        """List transfers of shards, or parts of them, to the least loaded ranks.

        Args:
            sources: Ranks that give.
            num_targets: Ranks that may take; those that hold other columns of the
                same table may in any case.

        Returns:
            Candidates within memory, rules and budget.
        """
        bank, task = self.bank, self.bank.task
        targets = self._targets(sources, num_targets)
        held, place = self._moving(sources)
        table = np.repeat(held, len(targets))
        source = np.repeat(sources[place], len(targets))
        target = np.tile(targets, len(held))
        split = np.flatnonzero(self.shards_T[held] > 1)
        if len(split):
            shard, other_rank = np.nonzero(self.width_TW[held[split]])
            table = np.concatenate([table, held[split[shard]]])
            source = np.concatenate([source, sources[place[split[shard]]]])
            target = np.concatenate([target, other_rank])
        width = self.width_TW[table, source]
        options = [width]
        if task.uneven:
            # The share that evens out the two ranks, a half, and the least there is.
            cost = bank.total_ms(table, width)
            excess = (self.loads_W[source] - self.loads_W[target]) / 2
            ideal = width * np.clip(excess / np.maximum(cost, 1e-12), 0.0, 1.0)
            down = ideal.astype(np.int64) // COLUMN_MULTIPLE * COLUMN_MULTIPLE
            half = width // (2 * COLUMN_MULTIPLE) * COLUMN_MULTIPLE
            options += [half, down, down + COLUMN_MULTIPLE, self._narrowest_T[table]]
        columns = np.concatenate(options)
        table, source, target, width = (
            np.tile(a, len(options)) for a in (table, source, target, width)
        )
        other = self.width_TW[table, target]
        after, grown = width - columns, other + columns
        shards = self.shards_T[table] - (after == 0) + (other == 0)
        narrowest = self._narrowest_T[table]
        legal = (columns > 0) & (source != target)
        legal &= (after == 0) | (after >= narrowest)
        whole = (after == 0) & (other == 0)
        # What is at work may be cut otherwise than the rules want it.
        legal &= (grown >= narrowest) | (grown == bank.dims_T[table]) | whole
        legal &= (shards <= self._most_T[table]) | (shards <= 1) | whole
        if not task.uneven:
            # All shards of a table keep one width: only moves to a rank without it.
            legal &= whole
        legal &= (
            self.bytes_MW[:, target]
            - bank.sizes(table, other)
            + bank.sizes(table, grown)
            <= bank.caps_MW[:, target]
        ).all(axis=0)
        if bank.rules:
            legal &= bank.rules.allows(self.width_TW, table, target)
        index = np.flatnonzero(legal)
        none = np.full(len(index), -1, dtype=np.int64)
        found = _Candidates(
            source[index],
            target[index],
            table[index],
            columns[index],
            none,
            np.zeros_like(none),
            np.zeros(len(none)),
        )
        return self._within_budget(found)

    def swaps(self, sources: Ints, num_targets: int = NUM_TARGETS) -> _Candidates:
        """List exchanges of whole shards between some ranks and less loaded ones.

        Args:
            sources: Ranks on one side.
            num_targets: The number of least loaded ranks on the other.

        Returns:
            Candidates within memory, rules and budget.
        """
        bank = self.bank
        targets = self._targets(sources, num_targets)
        mine, place = self._moving(sources)
        theirs, column = self._moving(targets)
        # Total load exchanged, beside what would even the two ranks out.
        given = bank.total_ms(mine, self.width_TW[mine, sources[place]])
        taken = bank.total_ms(theirs, self.width_TW[theirs, targets[column]])
        half = self.loads_W / 2
        miss = np.abs(
            (given - half[sources[place]])[:, None] - (taken - half[targets[column]])
        ).reshape(-1)
        near = np.arange(len(miss))
        if len(miss) > MAX_SWAPS:
            near = np.sort(np.argpartition(miss, MAX_SWAPS)[:MAX_SWAPS])
        mine_K, theirs_K = np.divmod(near, max(1, len(theirs)))
        table, source = mine[mine_K], sources[place[mine_K]]
        back, target = theirs[theirs_K], targets[column[theirs_K]]
        legal = (self.width_TW[table, target] == 0) & (self.width_TW[back, source] == 0)
        if bank.rules:
            legal &= bank.rules.allows(self.width_TW, table, target, back)
            legal &= bank.rules.allows(self.width_TW, back, source, table)
        index = np.flatnonzero(legal)
        table, source, back, target = (a[index] for a in (table, source, back, target))
        columns = self.width_TW[table, source]
        back_columns = self.width_TW[back, target]
        if self._limited:
            more = bank.sizes(table, columns) - bank.sizes(back, back_columns)
            used_MW, caps_MW = self.bytes_MW, bank.caps_MW
            fits = (used_MW[:, target] + more <= caps_MW[:, target]).all(axis=0)
            fits &= (used_MW[:, source] - more <= caps_MW[:, source]).all(axis=0)
            table, source, back, target, columns, back_columns = (
                a[fits] for a in (table, source, back, target, columns, back_columns)
            )
        nothing = np.zeros(len(table))
        return self._within_budget(
            _Candidates(source, target, table, columns, back, back_columns, nothing)
        )

    def _within_budget(self, c: _Candidates) -> _Candidates:
        """Keep the candidates that the budget pays for."""
        if self.budget is None or not len(c):
            return c
        k = np.flatnonzero(c.back_table_K >= 0)
        line = np.concatenate([np.arange(len(c)), k])
        table = np.concatenate([c.table_K, c.back_table_K[k]])
        moved = np.concatenate([c.columns_K, c.back_columns_K[k]])
        giver = np.concatenate([c.source_K, c.target_K[k]])
        taker = np.concatenate([c.target_K, c.source_K[k]])
        row_NW, part = self.width_TW[table], np.arange(len(line))
        row_NW[part, giver] -= moved
        row_NW[part, taker] += moved
        bytes_K = self._more_bytes(line, table, row_NW, len(c))
        paid = bytes_K <= self.budget.limit_bytes - self.moved_bytes
        if self.bank.rules:
            # What moves keeps to the rules then, also where the plan at work does not.
            held, rank = np.nonzero(self.width_TW)
            violation_TW = np.zeros(self.width_TW.shape, dtype=bool)
            violation_TW[held, rank] = ~self.bank.rules.allows(
                self.width_TW, held, rank
            )
            left = violation_TW[table].sum(axis=1) - (
                violation_TW[table, giver] & (row_NW[part, giver] == 0)
            )
            paid &= np.bincount(line, left, len(c)) == 0
        c = dataclasses.replace(c, bytes_K=bytes_K)
        return c.pick(np.flatnonzero(paid))

    @property
    def moved_bytes(self) -> float:
        """Bytes that the plan moves."""
        return float(self._bytes_T.sum())

    def _more_bytes(
        self, line_N: Ints, table_N: Ints, row_NW: Ints, num: int
    ) -> Floats:
        """Bytes that `num` changes move beyond what the plan does."""
        assert self.budget is not None
        more = self.budget.bytes(table_N, row_NW) - self._bytes_T[table_N]
        total: Floats = np.bincount(line_N, more, num).astype(np.float64)
        return total

    def changes(
        self, layouts: Sequence[Mapping[int, Ints]]
    ) -> tuple[list[Mapping[int, Ints]], Floats]:
        """Keep the layouts that are within memory, rules and budget.

        Args:
            layouts: Table -> `W` widths, each of a few tables.

        Returns:
            Those kept, and the bytes that each moves beyond what the plan does.
        """
        if self.budget is None or not layouts:
            return list(layouts), np.zeros(len(layouts))
        bank = self.bank
        line, table = np.array(
            [(k, t) for k, rows in enumerate(layouts) for t in rows]
        ).T
        new = np.stack([row_W for rows in layouts for row_W in rows.values()])
        old, of = self.width_TW[table], table[:, None]
        bytes_K = self._more_bytes(line, table, new, len(layouts))
        fine = bytes_K <= self.budget.limit_bytes - self.moved_bytes
        more = bank.sizes(of, new) - bank.sizes(of, old)
        for used_W, caps_W, more_LW in zip(
            self.bytes_MW, bank.caps_MW, more, strict=True
        ):
            more_KW = np.zeros((len(layouts), len(used_W)))
            np.add.at(more_KW, line, more_LW)
            fine &= ((used_W + more_KW <= caps_W) | (more_KW <= 0)).all(axis=1)
        for k in np.flatnonzero(fine).tolist() if bank.rules else ():
            width_TW = self.width_TW.copy()
            for t, row_W in layouts[k].items():
                width_TW[t] = row_W
            held, rank = np.nonzero(width_TW[list(layouts[k])])
            held = np.array(list(layouts[k]))[held]
            fine[k] = bank.rules.allows(width_TW, held, rank).all()
        kept = np.flatnonzero(fine)
        return [layouts[k] for k in kept.tolist()], bytes_K[kept]

    # Scores.

    def merit(self, score_K: Floats, bytes_K: Floats) -> Floats:
        """Rank candidates: lower is better.

        Args:
            score_K: Scores after each candidate; see `score`.
            bytes_K: Bytes that each would move.

        Returns:
            `K`: the score, or in a search per byte the change of score per byte moved;
            inf where a candidate gains nothing.
        """
        merit = score_K
        if self.per_byte:
            merit = (score_K - self.score) / np.maximum(bytes_K, 1.0)
        return np.where(score_K < self.score * (1 - MIN_GAIN), merit, np.inf)

    def approximate(self, candidates: _Candidates) -> Floats:
        """Score candidates by the additive approximation: lower is better.

        Phases of stages that none of them touches stay as they are.
        """
        c, (offset_PT, slope_PT) = candidates, self.bank.affine
        rows = self._touched(c)
        offset_PT, slope_PT = offset_PT[rows], slope_PT[rows]
        phases_PW, powers_W = self.phases_PW[rows], self.powers_W
        rest = 0.0
        if len(phases_PW) < len(self.phases_PW):
            powers_W = self._powers(phases_PW, rows)
            rest = self.approximate_score() - float(powers_W.mean())
            rest -= float(phases_PW.max(axis=1).sum())
        offset = offset_PT.take(c.table_K, axis=1)
        change = slope_PT.take(c.table_K, axis=1) * c.columns_K
        source = phases_PW.take(c.source_K, axis=1) - change
        target = phases_PW.take(c.target_K, axis=1) + change
        source -= offset * (self.width_TW[c.table_K, c.source_K] == c.columns_K)
        target += offset * (self.width_TW[c.table_K, c.target_K] == 0)
        swapped = np.flatnonzero(c.back_table_K >= 0)
        if len(swapped):
            # What comes back is always a whole shard.
            back = c.back_table_K[swapped]
            change = slope_PT.take(back, axis=1) * c.back_columns_K[swapped]
            change += offset_PT.take(back, axis=1)
            source[:, swapped] += change
            target[:, swapped] -= change
        worst: Floats = self._worst(c, phases_PW, source, target)
        return worst + (self._spread(c, source, target, powers_W, rows) + rest)

    def _touched(self, c: _Candidates) -> Ints | slice:
        """Phases of the stages whose tables some candidates move."""
        stage_T, num_stages = self.bank.stages_T, self.loads_WS3.shape[1]
        if num_stages == 1:
            return slice(None)
        moved = np.zeros(num_stages, dtype=bool)
        moved[stage_T[c.table_K]] = True
        moved[stage_T[c.back_table_K[c.back_table_K >= 0]]] = True
        rows: Ints = np.flatnonzero(np.repeat(moved, len(self.phases_PW) // num_stages))
        return rows

    def approximate_score(self) -> float:
        """Score the plan as `approximate` scores candidates."""
        return float(self.phases_PW.max(axis=1).sum() + self.powers_W.mean())

    @staticmethod
    def _worst(
        c: _Candidates, phases_PW: Floats, source_PK: Floats, target_PK: Floats
    ) -> Floats:
        """Sum of the phases' maxima after a change of two ranks."""
        num_phases, num_ranks = phases_PW.shape
        sources = np.flatnonzero(np.bincount(c.source_K, minlength=num_ranks))
        slot_W = np.zeros(num_ranks, dtype=np.int64)
        slot_W[sources] = np.arange(len(sources))
        # The largest value among the ranks that do not change, by source and target:
        # a line for each phase and source.
        left = np.repeat(phases_PW, len(sources), axis=0)
        lines = np.arange(len(left))
        left[lines, np.tile(sources, num_phases)] = 0.0
        first = left.argmax(axis=1)
        rest = np.repeat(left[lines, first], num_ranks).reshape(left.shape)
        left[lines, first] = 0.0
        rest[lines, first] = left.max(axis=1)
        pair_K = slot_W[c.source_K] * num_ranks + c.target_K
        worst = rest.reshape(num_phases, -1).take(pair_K, axis=1)
        np.maximum(worst, source_PK, out=worst)
        np.maximum(worst, target_PK, out=worst)
        total: Floats = worst.sum(axis=0)
        return total

    def _spread(
        self,
        c: _Candidates,
        source_PK: Floats,
        target_PK: Floats,
        powers_W: Floats,
        rows: Ints | slice = _ALL,
    ) -> Floats:
        changed = powers_W.sum() - powers_W[c.source_K] - powers_W[c.target_K]
        changed += self._powers(source_PK, rows) + self._powers(target_PK, rows)
        spread: Floats = changed / len(powers_W)
        return spread

    def _powers(self, phases_PN: Floats, rows: Ints | slice = _ALL) -> Floats:
        """Smooth stand-in for the worst of each phase, per rank [ms]."""
        squared = phases_PN * self._per_unit_P1[rows]
        np.square(squared, out=squared)
        sixth = np.square(squared)
        sixth *= squared
        powers: Floats = self._power_weights_P[rows] @ sixth
        return powers

    def _parts(self, c: _Candidates) -> _Parts:
        """List changes of ranks: both sides of each transfer, and colocated shards."""
        bank, line = self.bank, np.arange(len(c))
        k = np.flatnonzero(c.back_table_K >= 0)
        back, back_columns = c.back_table_K[k], c.back_columns_K[k]
        source, target = c.source_K, c.target_K
        side = np.repeat([0, 1, 0, 1], [len(c), len(c), len(k), len(k)])
        line = np.concatenate([line, line, k, k])
        rank = np.concatenate([source, target, source[k], target[k]])
        table = np.concatenate([c.table_K, c.table_K, back, back])
        old = self.width_TW[table, rank]
        columns = c.columns_K
        new = old + np.concatenate([-columns, columns, back_columns, -back_columns])
        num_moved = len(line)
        place, colocated = bank.colocated_shards(table)
        if len(colocated):
            dims = bank.dims_T[colocated]
            line, side, rank = (
                np.concatenate([a, a[place]]) for a in (line, side, rank)
            )
            table = np.concatenate([table, colocated])
            old, new = (np.concatenate([a, dims * (a[place] > 0)]) for a in (old, new))
        return _Parts(line, side, rank, table, old, new, num_moved)

    def evaluate(self, candidates: _Candidates) -> Outcomes:
        """Evaluate candidates exactly."""
        c, bank, parts = candidates, self.bank, self._parts(candidates)
        num, line, table = len(c), parts.line_N, parts.table_N
        stage = bank.stages_T[table]
        held = (parts.new_N > 0) * 1 - (parts.old_N > 0)
        pair_K2 = np.stack([c.source_K, c.target_K], axis=1)
        sums, count = self.sums_WGE[pair_K2], self.count_WG[pair_K2]
        id_N = (line * 2 + parts.side_N) * sums.shape[2] + bank.groups_T[table]
        new, old = bank.rows(table, parts.new_N), bank.rows(table, parts.old_N)
        change = bank.encoding(new) - bank.encoding(old)
        flat = sums.reshape(-1, sums.shape[-1])
        # Each side is met once in what is given, and once in what comes back.
        for part in (slice(2 * num), slice(2 * num, parts.num_moved)):
            flat[id_N[part]] += change[part]
        if len(line) > parts.num_moved:
            np.add.at(flat, id_N[parts.num_moved :], change[parts.num_moved :])
        np.add.at(count.reshape(-1), id_N, held)
        flat[count.reshape(-1) == 0] = 0.0
        loads_KWS3 = np.repeat(self.loads_WS3[None], num, axis=0)
        where = (line, parts.rank_N, stage)
        np.add.at(loads_KWS3, where, bank.loads_of(new) - bank.loads_of(old))
        extra = self.extra_WS2[pair_K2]
        if bank.has_extra:
            cell = (line, parts.side_N, stage)
            np.add.at(extra, cell, bank.extra(new) - bank.extra(old))
        compute_K2G2 = self._predict(flat, count.reshape(-1)).reshape(*count.shape, 2)
        score = self._scores(c, parts, compute_K2G2, extra, loads_KWS3)
        return Outcomes(score, sums, count, compute_K2G2, extra, loads_KWS3)

    def _scores(
        self,
        c: _Candidates,
        parts: _Parts,
        compute_K2G2: Floats,
        extra_K2S2: Floats,
        loads_KWS3: Floats,
    ) -> Floats:
        """Scores of candidates from what the ranks then hold and take."""
        bank, num = self.bank, len(c)
        compute_K2S2 = bank.simulator.stage_compute(compute_K2G2) + extra_K2S2
        compute = compute_K2S2.reshape(num, 2, -1)
        now_PW = self.compute_WS2.reshape(len(self.loads_W), -1).T
        critical = self._worst(c, now_PW, compute[:, 0].T, compute[:, 1].T)
        line, table = np.arange(num), c.table_K
        stage_N = bank.stages_T[parts.table_N]
        critical += self._comms_ms(loads_KWS3, parts.line_N, stage_N)
        # What is exchanged stays in as many shards.
        after = self.shards_T[table] - (
            (self.width_TW[table, c.source_K] == c.columns_K) & (c.back_table_K < 0)
        )
        after += (self.width_TW[table, c.target_K] == 0) & (c.back_table_K < 0)
        critical += self._reordering(line, table, after, num)
        pair = np.stack([c.source_K, c.target_K], axis=1)
        phases = bank.approximate_phases(compute_K2S2, loads_KWS3[line[:, None], pair])
        return critical + self._spread(c, phases[:, 0].T, phases[:, 1].T, self.powers_W)

    def _comms_ms(self, loads_KWS3: Floats, line_N: Ints, stage_N: Ints) -> Floats:
        """Collectives of candidates, of which some lines' stages change, `K` [ms]."""
        simulator = self.bank.simulator
        if self.loads_WS3.shape[1] == 1:
            return critical_path(simulator.comms_costs(loads_KWS3))
        total = np.full(len(loads_KWS3), float(self.comms_S.sum()))
        for stage in np.unique(stage_N).tolist():
            lines = np.unique(line_N[stage_N == stage])
            ms = simulator.stage_comms(stage, loads_KWS3[lines, :, stage])
            total[lines] += ms.max(axis=1).sum(axis=1) - self.comms_S[stage]
        return total

    def _reordering(
        self, line_N: Ints, table_N: Ints, num_shards_N: Ints, num_lines: int
    ) -> Floats:
        """Putting outputs in order once tables lie in so many shards, `K` [ms]."""
        bank = self.bank
        if not bank.has_order:
            return np.zeros(num_lines)
        block = bank.block_T[table_N]
        splits = bank.simulator.splits_columns_T[table_N]
        split = (splits & (num_shards_N > block)) * 1.0
        split -= splits & (self.shards_T[table_N] > block)
        placed = (num_shards_N > 0) * 1.0 - (self.shards_T[table_N] > 0)
        num_stages = len(self.order_S)
        cells, cell = np.unique(
            line_N * num_stages + bank.stages_T[table_N], return_inverse=True
        )
        line, stage = np.divmod(cells, num_stages)

        def after(now_S: Floats, change_N: npt.ArrayLike) -> Floats:
            change = np.bincount(cell, weights=change_N, minlength=len(cells))
            new_C: Floats = now_S[stage] + change
            return new_C

        columns = bank.columns_T[table_N]
        new = self._order_ms(
            stage,
            after(self.num_split_S, split),
            after(self.split_columns_S, split * columns),
            after(self.placed_columns_S, placed * columns),
        )
        total = np.full(num_lines, float(self.order_S.sum()))
        np.add.at(total, line, new - self.order_S[stage])
        return total

    def evaluate_layouts(self, layouts: Sequence[Mapping[int, Ints]]) -> Floats:
        """Score other layouts of few tables each, `K`: table -> `W` widths."""
        bank = self.bank
        parts = [
            (k, table, width_W)
            for k, layout in enumerate(layouts)
            for table, width_W in layout.items()
        ]
        part_K = np.array([k for k, _, _ in parts])
        table_L = np.array([table for _, table, _ in parts])
        new_LW = np.stack([width_W for _, _, width_W in parts])
        old_LW = self.width_TW[table_L]
        part, rank = np.nonzero(new_LW != old_LW)
        k, table = part_K[part], table_L[part]
        new = bank.rows(table, new_LW[part, rank], rank)
        old = bank.rows(table, old_LW[part, rank], rank)
        num_ranks, num_groups = self.count_WG.shape
        cells, cell = np.unique(
            (k * num_ranks + rank) * num_groups + bank.groups_T[table],
            return_inverse=True,
        )
        where, group_C = np.divmod(cells, num_groups)
        k_C, rank_C = np.divmod(where, num_ranks)
        sums, count = self.sums_WGE[rank_C, group_C], self.count_WG[rank_C, group_C]
        np.add.at(sums, cell, bank.encoding(new) - bank.encoding(old))
        np.add.at(count, cell, (new > 0) * 1 - (old > 0))
        compute = np.repeat(self.compute_WS2[None], len(layouts), axis=0)
        change = self._predict(sums, count) - self.compute_WG2[rank_C, group_C]
        stage_G = np.asarray(bank.task.stages)
        np.add.at(compute, (k_C, rank_C, stage_G[group_C]), change)
        stage = bank.stages_T[table]
        if bank.has_extra:
            np.add.at(compute, (k, rank, stage), bank.extra(new) - bank.extra(old))
        loads = np.repeat(self.loads_WS3[None], len(layouts), axis=0)
        np.add.at(loads, (k, rank, stage), bank.loads_of(new) - bank.loads_of(old))
        score: Floats = compute.max(axis=1).sum(axis=(1, 2))
        score += self._comms_ms(loads, k, stage)
        shards_L = np.count_nonzero(new_LW, axis=1)
        score += self._reordering(part_K, table_L, shards_L, len(layouts))
        phases = bank.approximate_phases(compute, loads)
        flat = phases.reshape(-1, phases.shape[-1]).T
        score += self._powers(flat).reshape(len(layouts), -1).mean(axis=1)
        return score

    def apply(self, candidates: _Candidates, k: int, outcomes: Outcomes) -> None:
        """Change the plan as one candidate says, in place.

        Args:
            candidates: `K` candidates.
            k: The one to take.
            outcomes: Of all of them, from `evaluate`.
        """
        c, bank = candidates, self.bank
        pair = np.array([c.source_K[k], c.target_K[k]])
        for table, columns in (
            (int(c.table_K[k]), int(c.columns_K[k])),
            (int(c.back_table_K[k]), -int(c.back_columns_K[k])),
        ):
            if table >= 0:
                old = self.width_TW[table, pair]
                new = old + np.array([-columns, columns])
                both = np.array([table, table])
                self.bytes_MW[:, pair] += bank.sizes(both, new) - bank.sizes(both, old)
                self.width_TW[table, pair] = new
                self.shards_T[table] = np.count_nonzero(self.width_TW[table])
                self._count_bytes(both[:1])
        self.num_applied += 1
        if self.num_applied % STEPS_PER_REFRESH == 0:
            self._refresh(np.arange(len(self.loads_W)))
            return
        self.sums_WGE[pair] = outcomes.sums_K2GE[k]
        self.count_WG[pair] = outcomes.count_K2G[k]
        self.compute_WG2[pair] = outcomes.compute_K2G2[k]
        self.extra_WS2[pair] = outcomes.extra_K2S2[k]
        self.loads_WS3 = outcomes.loads_KWS3[k].copy()
        self._summarise()

    def critical_ranks(self) -> list[int]:
        """Return the ranks that set a phase, and the one of the largest total."""
        worst = [*self.phases_PW.argmax(axis=1).tolist(), int(self.loads_W.argmax())]
        return list(dict.fromkeys(worst))


def _insert(
    bank: ShardBank,
    table: int,
    widths: tuple[int, ...],
    loads_W: Floats,
    free_MW: Floats,
    width_TW: Ints,
) -> Ints | None:
    """Put a table's shards on the least loaded ranks with memory, one rank each.

    Where they do not fit so, and widths may differ, columns go where there is memory.
    Changes `loads_W` and `free_MW`; `width_TW` says where the other tables are.

    Returns:
        `W` widths; None where there is no room.
    """
    width_W: Ints = np.zeros(len(loads_W), dtype=np.int64)
    room_MW = free_MW
    if bank.rules:
        room_MW = np.where(bank.rules.open_ranks(width_TW, table), free_MW, -np.inf)
    for width in widths:
        size_M1 = bank.sizes(np.array([table]), np.array([width]))
        fits_W = (room_MW >= size_M1).all(axis=0)
        loads = np.where(fits_W & (width_W == 0), loads_W, np.inf)
        rank = int(loads.argmin())
        if not np.isfinite(loads[rank]):
            spread = spread_columns(bank.task, table, room_MW)
            if spread is None:
                return None
            width_W[:] = 0
            width_W[list(spread)] = list(spread.values())
            break
        width_W[rank] = width
    tables = np.full(len(loads_W), table)
    loads_W += bank.total_ms(tables, width_W)
    free_MW -= bank.sizes(tables, width_W)
    return width_W


def _splits_anew(plan: Plan) -> list[Mapping[int, Ints]]:
    """Split the costliest tables of the critical ranks in more or fewer shards."""
    bank = plan.bank
    tables = list[int]()
    for rank in plan.critical_ranks():
        held = np.flatnonzero(plan.width_TW[:, rank])
        cost = bank.total_ms(held, plan.width_TW[held, rank])
        tables += held[np.argsort(-cost, kind="stable")[:NUM_RESPLIT]].tolist()
    found: list[Mapping[int, Ints]] = []
    for table in dict.fromkeys(tables):
        has_others = len(bank.colocated_shards(np.array([table]))[0]) > 0
        if not plan.movable_T[table] or has_others:
            continue
        if plan.budget is not None:
            found += _near_splits(plan, table)
        splits = bank.splits(table)
        place = sum(k < plan.shards_T[table] for k in splits)
        row = plan.width_TW[table]
        index = np.full(len(row), table)
        loads = plan.loads_W - bank.total_ms(index, row)
        free = bank.caps_MW - plan.bytes_MW + bank.sizes(index, row)
        for k in splits[max(0, place - 1) : place + 2]:
            for split in (split_widths, aligned_widths):
                widths = split(bank.task, table, k)
                if not widths:
                    continue
                width_W = _insert(
                    bank, table, widths, loads.copy(), free.copy(), plan.width_TW
                )
                if width_W is not None and (width_W != row).any():
                    found.append({table: width_W})
    return found


def _best_layout(
    plan: Plan, layouts: Sequence[Mapping[int, Ints]]
) -> tuple[float, Mapping[int, Ints]]:
    """Return the best of some layouts and its merit, inf where none pays."""
    layouts, bytes_K = plan.changes(layouts)
    if not layouts:
        return math.inf, {}
    merit = plan.merit(plan.evaluate_layouts(layouts), bytes_K)
    best = int(merit.argmin())
    return float(merit[best]), layouts[best]


def _lay_out(plan: Plan, layouts: Sequence[Mapping[int, Ints]]) -> bool:
    """Take the best of some layouts; False where none pays."""
    merit, layout = _best_layout(plan, layouts)
    if math.isfinite(merit):
        plan.set_rows(layout)
    return math.isfinite(merit)


def _near_splits(plan: Plan, table: int) -> list[Mapping[int, Ints]]:
    """Split a table evenly over its ranks, or one more or fewer of them."""
    row = plan.width_TW[table]
    held = np.flatnonzero(row)
    light = [r for r in np.argsort(plan.loads_W, kind="stable") if not row[r]]
    found: list[Mapping[int, Ints]] = []
    for ranks in (
        held,
        *(np.append(held, rank) for rank in light[:NUM_TARGETS]),
        *(np.delete(held, place) for place in range(len(held))),
    ):
        if len(ranks) in plan.bank.splits(table):
            width_W = np.zeros_like(row)
            width_W[ranks[np.argsort(plan.loads_W[ranks], kind="stable")]] = (
                split_widths(plan.bank.task, table, len(ranks))
            )
            if (width_W != row).any():
                found.append({table: width_W})
    return found


def _joint_moves(plan: Plan, budget: MoveBudget) -> list[Mapping[int, Ints]]:
    """Take sets of tables that move as one off the critical ranks."""
    critical = np.array(plan.critical_ranks())
    ranks = plan._targets(critical, NUM_TARGETS).tolist()
    layouts: list[Mapping[int, Ints]] = []
    for tables in budget.together:
        held_W = plan.width_TW[tables].sum(axis=0) > 0
        if held_W[critical].any():
            for rank in dict.fromkeys([*ranks, *np.flatnonzero(held_W).tolist()]):
                rows = np.zeros((len(tables), len(held_W)), dtype=np.int64)
                rows[:, rank] = plan.bank.dims_T[tables]
                layouts.append(dict(zip(tables, rows, strict=True)))
    return layouts


def _num_steps(num_tables: int, config: SearchConfig) -> int:
    """Steps of all descents.

    Few tables make a rugged landscape and cheap steps, the more so where they may be
    sharded in several ways; many tables need many steps.
    """
    small = SMALL_TASK_STEPS / num_tables
    steps = BASE_STEPS + STEPS_PER_TABLE * num_tables + small
    return math.ceil(config.effort * steps)


def _patience(num_tables: int, config: SearchConfig, num_bases: int = 1) -> int:
    """Restarts without a gain after which it is enough, of all bases together.

    A restart disturbs a few tables, which are next to nothing of many.
    """
    each = num_bases * min(10.0, SMALL_TASK / num_tables)
    return math.ceil(config.restarts * max(1.0, each))


class _Effort:
    """Steps left, and time."""

    def __init__(
        self,
        num_steps: int,
        deadline: float,
        tell: Callable[[float], None] | None = None,
    ) -> None:
        self.num_steps = num_steps
        self.deadline = deadline
        self.tell = tell

    def spend(self) -> bool:
        """Take one step off; False where none, or no time, is left."""
        self.num_steps -= 1
        return self.num_steps >= 0 and time.monotonic() < self.deadline


def _descend(plan: Plan, effort: _Effort) -> None:
    """Take the best step off the critical ranks until none pays."""
    while effort.spend():
        if not (_step(plan) or _lay_out(plan, _splits_anew(plan))):
            break
        if effort.tell is not None:
            effort.tell(plan.critical_ms)


def _step(plan: Plan) -> bool:
    """Take the best transfer or swap off the critical ranks; False where none pays.

    Within a budget all changes compete for it: new splits and sets of tables, too.
    """
    layout: Mapping[int, Ints] = {}
    rival, most = math.inf, NUM_EXACT
    if plan.budget is not None:
        joint = _joint_moves(plan, plan.budget)
        rival, layout = _best_layout(plan, [*_splits_anew(plan), *joint])
        most = min(NUM_EXACT, plan.budget.max_candidates)
    ranks = np.array(plan.critical_ranks())
    found = _Candidates.join([plan.transfers(ranks), plan.swaps(ranks)])
    about = plan.approximate(found) if len(found) else np.zeros(0)
    order = _first(about, most)
    tiers = [order[:NUM_FIRST], order[NUM_FIRST:]]
    if plan.per_byte:
        gain = plan.approximate_score() - about
        cheap = _first(-gain / np.maximum(found.bytes_K, 1.0), -(-most // 2))
        tiers = [np.unique(np.concatenate([order[: most - len(cheap)], cheap]))]
    for tier in tiers:
        if not len(tier):
            break
        some = found.pick(tier)
        outcomes = plan.evaluate(some)
        merit = plan.merit(outcomes.score_K, some.bytes_K)
        k = int(merit.argmin())
        if merit[k] < rival:
            before = plan.score
            plan.apply(some, k, outcomes)
            return plan.score < before
    if math.isfinite(rival):
        plan.set_rows(layout)
    return math.isfinite(rival)


def _first(values: Floats, count: int) -> Ints:
    """Places of the lowest values, lowest first; ties by place."""
    places = np.arange(len(values))
    if len(values) > count:
        limit = np.partition(values, count - 1)[count - 1]
        places = np.flatnonzero(values <= limit)
    first: Ints = places[np.argsort(values[places], kind="stable")[:count]]
    return first


def _hot_table(plan: Plan, rng: np.random.Generator) -> int:
    """Pick a table of a critical rank, the costlier the likelier; -1 for none."""
    ranks = plan.critical_ranks()
    rank = ranks[int(rng.integers(len(ranks)))]
    held = np.flatnonzero(plan.width_TW[:, rank])
    if not len(held):
        return -1
    cost = plan.bank.total_ms(held, plan.width_TW[held, rank])
    return int(rng.choice(held, p=cost / cost.sum()))


def _perturb(plan: Plan, rng: np.random.Generator) -> Plan | None:
    """Take some tables out and put them back elsewhere, split differently or not.

    Returns:
        The perturbed plan, or None where a table found no room.
    """
    bank = plan.bank
    num_tables, num_ranks = plan.width_TW.shape
    first = _hot_table(plan, rng) if rng.random() < PERTURB_HOT else -1
    placed_T = bank.leads_T & (plan.shards_T > 0)
    pool = np.flatnonzero(placed_T)
    if rng.random() < 0.5:
        ranks = [*plan.critical_ranks()[:1], int(rng.integers(num_ranks))]
        pool = np.flatnonzero(plan.width_TW[:, ranks].any(axis=1))
    count = min(len(pool), 2 + int(rng.integers(0, 2 + min(6, num_tables // 4))))
    if num_tables <= SMALL_TASK and rng.random() < 0.1:
        pool = np.flatnonzero(placed_T)
        count = len(pool)
    out = rng.choice(pool, count, replace=False)
    if first >= 0:
        out = np.append(out[out != first], first)
    width_TW = plan.width_TW.copy()
    held, rank = np.nonzero(width_TW[out])
    width = width_TW[out[held], rank]
    cost = bank.total_ms(out[held], width)
    loads = plan.loads_W - np.bincount(rank, weights=cost, minlength=num_ranks)
    free = bank.caps_MW - plan.bytes_MW
    free += bank.sizes_of_ranks(out[held], width, rank)
    width_TW[out] = 0
    loads += (
        rng.uniform(0.0, rng.uniform(0.0, PERTURB_NOISE), num_ranks)
        * plan.loads_W.mean()
    )
    whole = bank.total_ms(out, bank.dims_T[out])
    order = -whole * rng.uniform(0.5, 1.5, len(out))
    order[out == first] = -np.inf
    for table in out[np.argsort(order, kind="stable")].tolist():
        k, splits = int(plan.shards_T[table]), bank.splits(table)
        near = [o for o in splits if o <= k + 2]
        if table == first:
            near = [o for o in near if o != k] or near
        if table == first or k not in splits or rng.random() < PERTURB_RESPLIT:
            k = near[int(rng.integers(len(near)))]
        widths = split_widths(bank.task, table, k)
        aligned = aligned_widths(bank.task, table, k)
        if aligned and rng.random() < 0.5:
            widths = aligned
        width_W = _insert(bank, table, widths, loads, free, width_TW)
        if width_W is None:
            return None
        width_TW[table] = width_W
    return Plan(bank, width_TW)


def _perturb_within(
    plan: Plan, budget: MoveBudget, rng: np.random.Generator
) -> Plan | None:
    """Take some changes back, or perturb the plan, within the budget.

    Returns:
        The perturbed plan, or None where that does not work out.
    """
    width_TW = budget.width_TW
    taken_back = bool(rng.random() < PERTURB_BACK)
    if not taken_back:
        perturbed = _perturb(plan, rng)
        if perturbed is None:
            return None
        width_TW = perturbed.width_TW
    changed = np.flatnonzero((width_TW != plan.width_TW).any(axis=1))
    if taken_back:
        some = changed[rng.random(len(changed)) < 0.5].tolist()
        tables = sorted({t for table in some for t in budget.colocated_with(table)})
    else:
        # As many as the budget pays for, in any order.
        order = rng.permutation(changed[plan.movable_T[changed]])
        more = budget.bytes(order, width_TW[order]) - plan._bytes_T[order]
        order = order[np.isfinite(more)]
        total = plan.moved_bytes + more[np.isfinite(more)].cumsum()
        paid = np.maximum.accumulate(total) <= budget.limit_bytes
        tables = order[paid].tolist()
    layouts, _ = plan.changes([{t: width_TW[t] for t in tables}] if tables else [])
    if not layouts:
        return None
    perturbed = Plan(
        plan.bank, plan.width_TW, budget=budget, per_byte=bool(rng.random() < 0.5)
    )
    perturbed.set_rows(layouts[0])
    return perturbed


def _take_back(plan: Plan, budget: MoveBudget, most_ms: float) -> None:
    """Take back what is not needed to stay below so much, the most bytes first."""
    while True:
        changed = np.flatnonzero((plan.width_TW != budget.width_TW).any(axis=1))
        sets = {tuple(budget.colocated_with(table)) for table in changed.tolist()}
        layouts, bytes_K = plan.changes(
            [{t: budget.width_TW[t] for t in tables} for tables in sorted(sets)]
        )
        if not layouts:
            return
        late = plan.evaluate_layouts(layouts) > most_ms
        if late.all():
            return
        plan.set_rows(layouts[int(np.where(late, np.inf, bytes_K).argmin())])


def refine_within(
    bank: ShardBank, budget: MoveBudget, config: SearchConfig, deadline: float
) -> Ints:
    """Improve the plan at work by moves that a budget pays for.

    Args:
        bank: The task's shards, not merged: sets that lie together are the budget's.
        budget: What is at work, and what may be moved.
        config: Restarts, effort and seed.
        deadline: `time.monotonic()` after which the best so far is returned.

    Returns:
        The widths: of placements about as good as the best one, to `budget.min_gain`,
        one that moves few bytes.
    """
    base = Plan(bank, budget.width_TW, budget=budget)
    first_ms = best_ms = base.critical_ms
    found: list[tuple[float, float, Ints]] = []
    num_tables = len(bank.dims_T)
    effort = _Effort(_num_steps(num_tables, config), deadline)
    rng = np.random.default_rng(config.seed)
    # The cheapest steps make the most of a small budget, the longest of a large one.
    starts = [(0.0, True), (SPREAD_WEIGHT, True), (SPREAD_WEIGHT, False)]
    misses, patience = -len(starts), _patience(num_tables, config)
    while misses < patience and effort.spend():
        misses += 1
        trial: Plan | None
        if starts:
            spread, per_byte = starts.pop(0)
            trial = Plan(bank, budget.width_TW, spread, budget, per_byte=per_byte)
        else:
            spread, trial = SPREAD_WEIGHT, _perturb_within(base, budget, rng)
        if trial is None:
            continue
        _descend(trial, effort)
        found.append((trial.critical_ms, trial.moved_bytes, trial.width_TW.copy()))
        if trial.critical_ms < best_ms * (1 - RESTART_GAIN):
            misses = min(misses, 0)
        best_ms = min(best_ms, trial.critical_ms)
        if spread and trial.score <= base.score * (1 + rng.exponential(ACCEPT_WORSE)):
            base = trial
    lasts = []
    near = [f for f in found if f[0] <= best_ms * (1 + budget.min_gain)]
    for *_, width_TW in sorted(near, key=lambda f: f[1::-1])[:NUM_LAST_PLANS]:
        last = Plan(bank, width_TW, 0.0, budget, per_byte=True)
        _descend(last, _Effort(NUM_LAST_STEPS, deadline))
        lasts.append(last)
    most_ms = min([first_ms, best_ms, *(p.critical_ms for p in lasts)])
    most_ms *= 1 + budget.min_gain
    good = [p for p in lasts if p.critical_ms <= most_ms]
    if first_ms <= most_ms or not good:
        return budget.width_TW
    for last in good:
        _take_back(last, budget, most_ms)
    even = [Plan(bank, last.width_TW, budget=budget) for last in good]
    return min(even, key=lambda p: (p.moved_bytes, p.score)).width_TW
