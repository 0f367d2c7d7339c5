"""Improve the current plan without moving more bytes than a budget allows.

The *current plan* is the plan of a running job (see `budget`). It is improved by local
search like a new plan (see `descent`), with two differences:

- A step may move or swap shards, split a table differently, or move a set of tables
  that are kept together. It must leave the total of moved bytes within the budget.
- Changes compete by their gain in some lanes, and by their gain per byte in others.

Among the plans that are about as good as the best one, the plan that moves the fewest
bytes is returned.

Shapes: see `lanes`; `Y` tables that candidates change, `X` shards of these tables after
the change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from torchrec_neuroshard.search.base import SearchConfig
from torchrec_neuroshard.search.budget import MoveBudget
from torchrec_neuroshard.search.descent import (
    FINAL_POWER,
    HALF,
    MIN_GAIN,
    MORE_ROUNDS,
    NUM_EXACT,
    NUM_FINAL,
    ROUND_GAIN,
    SMALL_TASK,
    Effort,
    changed,
    descend,
    disturbed,
    drafted,
    hot_pieces,
    in_order,
    succeeded,
)
from torchrec_neuroshard.search.lanes import Changes, Lanes, most_lanes
from torchrec_neuroshard.search.moves import Moves, best_of
from torchrec_neuroshard.search.shards import (
    Bools,
    Floats,
    Ints,
    ShardBank,
    split_widths,
)

NUM_LAYOUTS = 8
"""Layouts per lane that are evaluated exactly."""
NUM_TABLES, NUM_TARGETS, NUM_HOT = 6, 8, 3
"""Costly tables per lane that a step tries to split differently, cold ranks that may
take tables, and hot ranks that sets of tables may leave."""
MOST_LANES, LANE_TABLES = 8, 1_600
"""Most lanes side by side, and most tables of all lanes together."""
TAKEN_BACK = 0.4
"""Probability that a disturbance undoes changes instead of moving tables."""

Layout = tuple[int, Mapping[int, Ints]]
"""A lane, and for some of its tables their new columns on each rank."""


def improve_within(
    bank: ShardBank, budget: MoveBudget, config: SearchConfig, deadline: float
) -> Ints:
    """Improve the current plan within a budget of bytes.

    Args:
        bank: The task's shards, not merged; tables that are kept together are in
            `budget.together`. Its `stays_T` is set.
        budget: The current plan, and the limit on moved bytes.
        config: Restarts, effort and seed.
        deadline: `time.monotonic()` after which the best plan so far is returned.

    Returns:
        Widths of the plan that moves the fewest bytes among those found whose critical
        path is within `budget.min_gain` of the best.
    """
    bank.stays_T = ~budget.movable_T
    first = Lanes.of(bank, [budget.width_TW])
    found = _Found(budget, deadline)
    found.see(first)
    _search(first, found, config)
    if first.critical_L[0] <= found.limit_ms:
        return budget.width_TW
    final = Lanes.of(bank, found.plans(), power=FINAL_POWER)
    descend(final, found, step=_Steps(budget, per_byte=True))
    even = [_taken_back(Lanes.of(bank, [w]), found) for w in found.plans()]
    best = min(even, key=lambda p: (_View(p, budget).moved_L[0], p.critical_L[0]))
    return best.width_TW(0)


class _Found(Effort):
    """The deadline, the best plan, and near-best plans that move the fewest bytes."""

    def __init__(self, budget: MoveBudget, deadline: float) -> None:
        super().__init__(deadline)
        self.budget = budget
        self._plans: list[tuple[float, float, Ints]] = []

    @property
    def limit_ms(self) -> float:
        """Longest critical path of a near-best plan [ms]."""
        return self.best_ms * (1 + max(self.budget.min_gain, MIN_GAIN))

    def see(self, lanes: Lanes) -> None:
        """Keep the best lane, and the near-best lanes that move the fewest bytes."""
        super().see(lanes)
        near = lanes.take(np.flatnonzero(lanes.critical_L <= self.limit_ms))
        view = _View(near, self.budget)
        for ms, moved, width_TW in zip(
            near.critical_L.tolist(), view.moved_L.tolist(), view.width_LTW, strict=True
        ):
            same = (math.isclose(ms, p[1]) for p in self._plans if p[0] == moved)
            if not any(same):
                self._plans.append((moved, ms, width_TW))
        good = [plan for plan in self._plans if plan[1] <= self.limit_ms]
        self._plans = sorted(good, key=lambda plan: plan[:2])[:NUM_FINAL]

    def plans(self) -> list[Ints]:
        """Return the widths of the near-best plans, fewest moved bytes first."""
        return [width_TW for *_, width_TW in self._plans]


def _search(first: Lanes, found: _Found, config: SearchConfig) -> None:
    """Improve the current plan in some lanes, then disturbed copies of these lanes.

    Results are kept in `found`.
    """
    bank, budget = first.bank, found.budget
    num_tables = len(bank.dims_T)
    tried = []
    # Gains per byte suit small budgets, plain gains suit large ones.
    for power, per_byte in ((FINAL_POWER, True), (first.power, True), (32, False)):
        lane = Lanes.of(bank, [budget.width_TW], power)
        descend(lane, found, step=_Steps(budget, per_byte=per_byte))
        tried.append(lane.width_TW(0))
    lanes = Lanes.of(bank, tried)
    lanes = lanes.take(in_order(lanes.score_L))
    most = max(2, min(MOST_LANES, most_lanes(bank)))
    size = int(np.clip(config.effort * LANE_TABLES // num_tables, 2, most))
    patience = config.restarts * float(np.clip(SMALL_TASK / num_tables, 1, MORE_ROUNDS))
    rng = np.random.default_rng(config.seed)
    misses = 0
    while misses < patience and not found.is_over:
        before_ms, leader = found.best_ms, float(lanes.score_L[0])
        many = lanes.take(np.resize(np.arange(lanes.num_lanes), size))
        trial = _disturbed(many, budget, rng)
        found.see(trial)
        per_byte_L = rng.random(trial.num_lanes) < HALF  # the others count plain gains
        parts = []
        for per_byte in (True, False):
            parts.append(trial.take(np.flatnonzero(per_byte_L == per_byte)))
            descend(parts[-1], found, leader, _Steps(budget, per_byte=per_byte))
        both = succeeded(lanes, Lanes.join(parts), rng)
        lanes = both.take(in_order(both.score_L)[:size])
        misses = 0 if found.best_ms < before_ms * (1 - ROUND_GAIN) else misses + 1


class _View:
    """Lanes as widths, with the bytes that they move from the current plan.

    Attributes:
        width_LTW: Columns of each table on each rank.
        moved_L: Moved bytes.
    """

    def __init__(self, lanes: Lanes, budget: MoveBudget) -> None:
        self.lanes, self.budget = lanes, budget
        shape = (lanes.num_lanes, *budget.width_TW.shape)
        self.width_LTW: Ints = np.zeros(shape, dtype=np.int64)
        self.width_LTW[lanes.lane_N, lanes.table_N, lanes.rank_N] = lanes.width_N
        every = np.arange(shape[1])
        moved = [budget.bytes(every, width_TW).sum() for width_TW in self.width_LTW]
        self.moved_L: Floats = np.array(moved, dtype=np.float64)

    def changes(self, layouts: Sequence[Layout]) -> Changes:
        """Return candidates that give tables new layouts.

        Args:
            layouts: One candidate each; every layout must differ from the current one.
        """
        lines = [
            (k, t, w) for k, (_, rows) in enumerate(layouts) for t, w in rows.items()
        ]
        cand_Y = np.array([k for k, _, _ in lines], dtype=np.int64)
        table_Y = np.array([table for _, table, _ in lines], dtype=np.int64)
        new_YW = np.array([w for *_, w in lines], dtype=np.int64)
        new_YW = new_YW.reshape(len(lines), self.width_LTW.shape[2])
        lane_K = np.array([lane for lane, _ in layouts], dtype=np.int64)
        old_YW = self.width_LTW[lane_K[cand_Y], table_Y]
        parts = []
        for row_YW, one in ((old_YW, -1), (new_YW, 1)):
            line, rank = np.nonzero((old_YW != new_YW) * row_YW)
            width = row_YW[line, rank]
            parts.append((cand_Y[line], table_Y[line], rank, width, line * 0 + one))
        cand, table, rank, width, sign = map(np.concatenate, zip(*parts, strict=True))
        changes = Changes(cand, table, rank, width, sign, lane_K)
        return changes.pick(np.arange(len(layouts)))

    def _rows(self, c: Changes) -> tuple[Ints, Ints, Ints, Ints]:
        """Return each candidate's tables, with their widths before and after.

        Returns:
            Candidates, tables, and `Y x W` widths before and after.
        """
        num_tables = self.width_LTW.shape[1]
        keys, line_N = np.unique(c.cand_N * num_tables + c.table_N, return_inverse=True)
        cand_Y, table_Y = np.divmod(keys, num_tables)
        old_YW = self.width_LTW[c.lane_K[cand_Y], table_Y]
        new_YW = old_YW.copy()
        np.add.at(new_YW, (line_N, c.rank_N), c.sign_N * c.width_N)
        return cand_Y, table_Y, old_YW, new_YW

    def more_bytes(self, c: Changes) -> Floats:
        """Return the additional bytes that candidates move, `K`; inf if too many."""
        cand_Y, table_Y, old_YW, new_YW = self._rows(c)
        more_Y = self.budget.bytes(table_Y, new_YW) - self.budget.bytes(table_Y, old_YW)
        more_K = np.bincount(cand_Y, more_Y, len(c))
        left_K = self.budget.limit_bytes - self.moved_L[c.lane_K]
        more: Floats = np.where(more_K <= left_K, more_K, np.inf)
        return more

    def fits(self, c: Changes) -> Bools:
        """Return whether memory and placement rules allow candidates, `K`.

        Unchanged tables may still break rules, as they do in the current plan.
        """
        lanes, bank, rules = self.lanes, self.lanes.bank, self.lanes.bank.rules
        cand_Y, table_Y, old_YW, new_YW = self._rows(c)
        fine_K: Bools = np.ones(len(c), dtype=bool)
        of_Y1 = table_Y[:, None]
        more_MYW = bank.sizes(of_Y1, new_YW) - bank.sizes(of_Y1, old_YW)
        for used_LW, caps_W, more_YW in zip(
            lanes.bytes_MLW, bank.caps_MW, more_MYW, strict=True
        ):
            more_KW = np.zeros((len(c), len(caps_W)))
            np.add.at(more_KW, cand_Y, more_YW)
            room_KW = (used_LW[c.lane_K] + more_KW <= caps_W) | (more_KW <= 0)
            fine_K &= room_KW.all(axis=1)
        line_X, rank_X = np.nonzero(new_YW)
        cand_X, table_X = cand_Y[line_X], table_Y[line_X]
        if rules.allowed_TW is not None:
            fine_K[cand_X[~rules.allowed_TW[table_X, rank_X]]] = False
        if rules.num_sets:
            held_KAW = lanes.occupants_LAW[c.lane_K]
            for sets_N in rules.sets_TK[c.table_N].T:
                np.add.at(held_KAW, (c.cand_N, sets_N, c.rank_N), c.sign_N)
            held_KAW[:, -1] = 0
            where = cand_X[:, None], rules.sets_TK[table_X], rank_X[:, None]
            fine_K[cand_X[(held_KAW[where] > 1).any(axis=1)]] = False
        return fine_K


class _Steps:
    """A step of a descent (see `descent.descend`) within a budget of bytes."""

    def __init__(self, budget: MoveBudget, *, per_byte: bool) -> None:
        """Take the settings.

        Args:
            budget: The limit on moved bytes.
            per_byte: Whether changes compete by their gain per byte.
        """
        self._budget, self._per_byte = budget, per_byte

    def __call__(self, lanes: Lanes, active: Ints, number: int) -> Ints:
        """Apply the best changes of each lane; return the lanes that gained."""
        view = _View(lanes, self._budget)
        changes = Changes.join(
            [self._moves(view, active, number), *self._layouts(view, active)]
        )
        changes = changes.pick(np.flatnonzero(view.fits(changes)))
        if not len(changes):
            return active[:0]
        more_K = view.more_bytes(changes)
        gain_K = lanes.score_L[changes.lane_K] - lanes.evaluate(changes)
        merit_K = self._merit(gain_K, more_K)
        pays = np.isfinite(more_K) & (gain_K > MIN_GAIN * lanes.score_L[changes.lane_K])
        left_L = self._budget.limit_bytes - view.moved_L
        starts = np.searchsorted(changes.cand_N, np.arange(len(changes) + 1))
        chosen = []
        used: set[tuple[int, int]] = set()
        for k in np.argsort(-np.where(pays, merit_K, -np.inf), kind="stable").tolist():
            lane, own = int(changes.lane_K[k]), slice(starts[k], starts[k + 1])
            # Each rank and table changes at most once, so that gains and bytes add up.
            ends = {(lane, rank) for rank in changes.rank_N[own].tolist()}
            ends |= {(lane, -1 - table) for table in changes.table_N[own].tolist()}
            if pays[k] and not used & ends and more_K[k] <= left_L[lane]:
                used |= ends
                left_L[lane] -= more_K[k]
                chosen.append(k)
        if chosen:
            lanes.apply(changes.pick(np.array(chosen)))
        return np.unique(changes.lane_K[chosen])

    def _merit(self, gain_K: Floats, more_K: Floats) -> Floats:
        """Return the gain or the gain per byte of candidates, `K`."""
        return gain_K / np.maximum(more_K, 1.0) if self._per_byte else gain_K

    def _best(
        self, view: _View, c: Changes, gain_K: Floats, group_K: Ints, count: int
    ) -> Changes:
        """Return the best `count` candidates of each group within the budget."""
        more_K = view.more_bytes(c)
        paid = np.flatnonzero(np.isfinite(more_K))
        merit_K = self._merit(gain_K, more_K)
        return c.pick(np.sort(paid[best_of(merit_K[paid], group_K[paid], count)]))

    def _moves(self, view: _View, active: Ints, number: int) -> Changes:
        """Return moves and swaps of shards, the best of each hot rank."""
        lanes = view.lanes
        moves = Moves(lanes, active, number)
        rank_K = moves.lane_K * lanes.bank.task.world_size + moves.source_K
        changes = moves.build(np.arange(len(rank_K)))
        return self._best(view, changes, moves.gain_K, rank_K, NUM_EXACT)

    def _layouts(self, view: _View, active: Ints) -> Iterator[Changes]:
        """Yield other splits of costly tables, and moves of sets of tables."""
        lanes, bank = view.lanes, view.lanes.bank
        layouts = list(self._joint_moves(view, active))
        options = []
        hot = hot_pieces(lanes, active, NUM_TABLES)
        pairs = set(
            zip(lanes.lane_N[hot].tolist(), lanes.table_N[hot].tolist(), strict=True)
        )
        for lane, table in sorted(pairs):
            layouts += _near_splits(view, lane, table)
            near = bank.near_splits(table, int(lanes.pieces_LT[lane, table]))
            options += [(lane, table, table, count) for count in near]
        yield view.changes(layouts)
        if options:
            changes, about_K = drafted(lanes, options)
            gain_K = lanes.score_L[changes.lane_K] - about_K
            yield self._best(view, changes, gain_K, changes.lane_K, NUM_LAYOUTS)

    def _joint_moves(self, view: _View, active: Ints) -> Iterator[Layout]:
        """Yield moves of sets of tables that move together, off the hot ranks."""
        lanes = view.lanes
        hot_LH = np.argsort(-lanes.weights(), axis=1, kind="stable")[:, :NUM_HOT]
        cold_LC = np.argsort(lanes.load_LW, axis=1, kind="stable")[:, :NUM_TARGETS]
        for lane in active.tolist() if self._budget.together else ():
            for tables in self._budget.together:
                now_YW = view.width_LTW[lane, tables]
                held_W = now_YW.sum(axis=0) > 0
                if held_W[hot_LH[lane]].any():
                    for rank in np.union1d(cold_LC[lane], np.flatnonzero(held_W)):
                        new_YW = np.zeros_like(now_YW)
                        new_YW[:, rank] = lanes.bank.dims_T[tables]
                        if (new_YW != now_YW).any():
                            yield lane, dict(zip(tables, new_YW, strict=True))


def _near_splits(view: _View, lane: int, table: int) -> Iterator[Layout]:
    """Yield even splits of a table over its ranks, or one rank more or less.

    Tables in fixed blocks, such as split sequence tables, get none.
    """
    bank, load_W = view.lanes.bank, view.lanes.load_LW[lane]
    if not bank.moves_T[table]:
        return
    row_W = view.width_LTW[lane, table]
    held = np.flatnonzero(row_W)
    cold = [r for r in np.argsort(load_W, kind="stable") if not row_W[r]]
    for ranks in (
        held,
        *(np.append(held, rank) for rank in cold[:NUM_TARGETS]),
        *(np.delete(held, place) for place in range(len(held))),
    ):
        if len(ranks) in bank.splits(table):
            new_W = np.zeros_like(row_W)
            new_W[ranks[np.argsort(load_W[ranks], kind="stable")]] = split_widths(
                bank.task, table, len(ranks)
            )
            if (new_W != row_W).any():
                yield lane, {table: new_W}


def _disturbed(lanes: Lanes, budget: MoveBudget, rng: np.random.Generator) -> Lanes:
    """Return copies of lanes in which changes were undone, or tables were moved."""
    view = _View(lanes, budget)
    layouts: list[Layout] = []
    for lane, now_TW in enumerate(view.width_LTW):
        new_TW = budget.width_TW
        other = lanes.take(np.zeros(0, dtype=np.int64))
        if rng.random() >= TAKEN_BACK and budget.movable_T.any():
            other = disturbed(lanes.take(np.array([lane])), rng)
        if other.num_lanes:
            # Take its changes in random order, as many as the budget allows.
            [new_TW] = _View(other, budget).width_LTW
            order = rng.permutation(np.flatnonzero((now_TW != new_TW).any(axis=1)))
            more = budget.bytes(order, new_TW[order]) - budget.bytes(
                order, now_TW[order]
            )
            order, more = order[np.isfinite(more)], more[np.isfinite(more)]
            total = np.maximum.accumulate(view.moved_L[lane] + more.cumsum())
            tables = set(order[total <= budget.limit_bytes].tolist())
        else:
            moved = np.flatnonzero((now_TW != new_TW).any(axis=1))
            taken = moved[rng.random(len(moved)) < HALF].tolist()
            tables = {t for table in taken for t in budget.colocated_with(table)}
        if tables:
            layouts.append((lane, {t: new_TW[t] for t in sorted(tables)}))
    changes = view.changes(layouts)
    fine = view.fits(changes) & np.isfinite(view.more_bytes(changes))
    return changed(lanes, changes.pick(np.flatnonzero(fine)))


def _taken_back(lanes: Lanes, found: _Found) -> Lanes:
    """Undo changes that a near-best plan does not need, the most bytes first."""
    budget = found.budget
    view = _View(lanes, budget)
    moved = np.flatnonzero((view.width_LTW[0] != budget.width_TW).any(axis=1))
    bytes_N = budget.bytes(moved, view.width_LTW[0, moved])
    sets = [
        budget.colocated_with(t) for t in moved[np.argsort(-bytes_N, kind="stable")]
    ]
    for tables in sets:
        view = _View(lanes, budget)
        changes = view.changes([(0, {t: budget.width_TW[t] for t in tables})])
        if len(changes.cand_N) and view.fits(changes).all():
            trial = changed(lanes, changes)
            if trial.critical_L[0] <= found.limit_ms:
                lanes = trial
    return lanes
