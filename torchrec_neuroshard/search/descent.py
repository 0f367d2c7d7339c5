"""Local search: improve some placements (lanes).

1. A step applies the best moves of each lane (see `moves`). Moves of one step share no
   rank.
2. If no move helps, a table of a hot rank is laid out differently: split into more or
   fewer shards, or switched to another way.
3. The gain of another way often shows only after other tables have moved. So copies of
   the best lane switch one costly table each, and are improved (steps 1 and 2).
4. Changed copies of good lanes are improved, until rounds stop gaining. In most of
   them a rank gives its wide tables away; in the others a few tables are placed anew.
5. The best lanes are improved by sharper norms, which are closer to the critical path.

Equal lanes are merged, and lanes far behind are dropped.

Shapes: see `lanes`; `Q` lanes of a draft.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from torchrec_neuroshard.search.base import SearchConfig
from torchrec_neuroshard.search.construct import Draft
from torchrec_neuroshard.search.lanes import (
    LEAST_MS,
    Changes,
    Lanes,
    most_lanes,
)
from torchrec_neuroshard.search.moves import Moves, best_of
from torchrec_neuroshard.search.shards import (
    ALIGNMENT,
    Floats,
    Ints,
    ShardBank,
    spread_out,
)
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

Step = Callable[[Lanes, Ints, int], Ints]
"""Changes lanes in place. Takes all lanes, the active ones and the step's number;
returns the lanes that gained."""

NUM_EXACT = 8
"""Moves per hot rank that are evaluated exactly."""
NUM_TABLES, NUM_LAYOUTS = 4, 4
"""Tables per lane whose layout a step tries to change, and layouts that are evaluated
exactly."""
RACE_STEPS, FAR = 4, 1.03
"""After `RACE_STEPS` steps, lanes with a score above `FAR` times the goal are dropped.
In large tasks the worse half is dropped every `RACE_STEPS` steps."""
MIN_GAIN = 1e-7
"""Relative gain below which a change does not count."""
MOST_LANES, LANE_TABLES = 32, 2_000
"""Most lanes side by side, and most tables of all lanes together."""
MOST_PHASES = 2**21
"""Most phases of ranks, over all starts or layouts that are drafted at once."""
NUM_STARTS = 8
"""Constructed lanes that the first descent improves."""
NEAR = 1.1
"""Restarts start from lanes whose score is at most this many times the best one."""
ROUND_GAIN, LARGE_TASK, MORE_GAIN = 1e-3, 200, 5
"""Least relative gain of a round that counts. Rounds of large tasks take longer, so
above `LARGE_TASK` tables it grows with the number of tables, up to `MORE_GAIN` times.
"""
ACCEPT_WORSE = 0.003
"""Mean relative loss that is accepted after a restart."""
SMALL_TASK, MORE_ROUNDS, FEWER_ROUNDS = 32, 3, 0.5
"""Below `SMALL_TASK` tables, up to `MORE_ROUNDS` times as many rounds may fail to gain;
from `LARGE_TASK` on, `FEWER_ROUNDS` times as many. Between them, half as many rounds
made plans of 8 tasks of 60 to 200 tables 1.7 % longer (mean; up to 6.7 %)."""
TINY_LANES, TINY_ROUNDS, LEAST_LANES = 8, 2, 3
"""Most lanes of a round per table, and most rounds without a gain per table but one:
they shorten searches of 2 and 3 tables to half their time, with the same plans in 8
tasks. With fewer lanes than `LEAST_LANES`, as above 667 tables, no copies are
disturbed: in three tasks of 1,000 tables that gained nothing, for a tenth of the time.
"""
MOST_ROUNDS, MOST_STEPS = 40, 1_000
"""Most rounds of restarts, and most steps of one descent."""
FINAL_POWER, NUM_FINAL, LAST_POWER = 64, 3, 256
"""Power of the norm in the second to last descent, the number of lanes in it, and the
power in the last descent, of the best lane. The last descent makes plans 0.36 % better
(mean of 12 tasks of 150 to 1,000 tables; 0.09 to 1.3 %)."""
NUM_OTHERS, OTHERS_NEAR = 16, 1.3
"""Most placements with other ways that are kept, and their critical path over the best
one."""
OUT_FEWEST, OUT_MOST = 2, 8
"""Fewest and most tables that a disturbance removes."""
HALF = 0.5
"""Probability of each of these: a disturbance removes tables near the hottest rank; it
also removes a costly table of a hot rank; it may change ways; a table's way changes; a
split is uneven; its widths are multiples of 16."""
GATHERS = 0.75
"""Share of a round's copies in which a rank gives its wide tables away; the others are
disturbed."""
RESPLIT = 0.4
"""Probability that a removed table gets another number of shards."""


class Effort:
    """The deadline of a search, and the best placement so far.

    Attributes:
        best_ms: Its critical path; infinite before the first placement.
        best_TW: Its widths.
        others: Critical paths and widths of good placements that have other ways.
    """

    def __init__(
        self,
        deadline: float,
        tell: Callable[[float], None] = lambda _: None,
        *,
        keeps_others: bool = False,
    ) -> None:
        """Start without a placement.

        Args:
            deadline: `time.monotonic()` after which no step is taken.
            tell: Called with the critical path [ms] whenever it gets shorter.
            keeps_others: Whether good placements that are not the best are kept.
        """
        self.deadline, self._tell = deadline, tell
        self.best_ms = math.inf
        self.best_TW: Ints = np.zeros((0, 0), dtype=np.int64)
        self.others: dict[bytes, tuple[float, Ints]] = {}
        self._keeps_others = keeps_others

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def see(self, lanes: Lanes) -> None:
        """Keep the best lane if it beats the best placement so far."""
        lane = int(lanes.critical_L.argmin()) if lanes.num_lanes else -1
        if lane >= 0 and lanes.critical_L[lane] < self.best_ms * (1 - MIN_GAIN):
            self.best_ms = float(lanes.critical_L[lane])
            self.best_TW = lanes.width_TW(lane)
            self._tell(self.best_ms)
        if not self._keeps_others:
            return
        for lane in np.argsort(lanes.critical_L)[:NUM_OTHERS].tolist():
            ms, ways = float(lanes.critical_L[lane]), lanes.pieces_LT[lane] > 0
            if ms < self.others.get(ways.tobytes(), (math.inf,))[0] * (1 - MIN_GAIN):
                self.others[ways.tobytes()] = ms, lanes.width_TW(lane)
        ordered = sorted(self.others.items(), key=lambda entry: entry[1][0])
        near = [e for e in ordered if e[1][0] <= OTHERS_NEAR * self.best_ms]
        self.others = dict(near[:NUM_OTHERS])


def descend(
    lanes: Lanes, effort: Effort, goal: float = math.inf, step: Step | None = None
) -> None:
    """Improve lanes in place until no step gains.

    Args:
        lanes: Placements.
        effort: Deadline and best placement.
        goal: Score that lanes should reach; lanes far above it are dropped.
        step: The step; None means moves, and layouts if no move helps.
    """
    step = step or functools.partial(_move_or_lay_out, deadline=effort.deadline)
    active = np.arange(lanes.num_lanes)
    is_large = len(lanes.bank.task.ways) > LARGE_TASK
    for number in range(MOST_STEPS):
        if not len(active) or effort.is_over:
            break
        before_L = lanes.score_L.copy()
        gained = step(lanes, active, number)
        effort.see(lanes)
        # Collectives are exact only now, and may cancel the gain of a change.
        gained = gained[lanes.score_L[gained] < before_L[gained] * (1 - MIN_GAIN)]
        # Of equal lanes, keep one.
        score = _relative(lanes.score_L)[gained]
        active = gained[np.sort(np.unique(score, return_index=True)[1])]
        if number + 1 >= RACE_STEPS:
            active = active[lanes.score_L[active] < goal * FAR]
        if is_large and (number + 1) % RACE_STEPS == 0:
            better = np.argsort(lanes.score_L[active], kind="stable")
            active = np.sort(active[better[: -(-len(active) // 2)]])


def _move_or_lay_out(
    lanes: Lanes, active: Ints, number: int, *, deadline: float
) -> Ints:
    """Apply the best moves of each lane, or the best layout if no move helps."""
    gained = _move(lanes, active, number, deadline)
    rest = np.setdiff1d(active, gained)
    if len(rest):
        gained = np.union1d(gained, _lay_out(lanes, rest, deadline))
    return gained


def _move(lanes: Lanes, active: Ints, number: int, deadline: float) -> Ints:
    """Apply the best moves of each lane; return the lanes that gained."""
    moves = Moves(lanes, active, number)
    rank_K = moves.lane_K * lanes.bank.task.world_size + moves.source_K
    best = best_of(moves.gain_K, rank_K, NUM_EXACT)
    if not len(best):
        return active[:0]
    return _apply_best(lanes, moves.build(best), deadline)


def hot_pieces(lanes: Lanes, active: Ints, most: int) -> Ints:
    """Return the costliest pieces of hot ranks, at most `most` of each lane."""
    bank = lanes.bank
    moves = np.isin(lanes.lane_N, active) & ~bank.stays_T[lanes.table_N]
    own = np.flatnonzero(moves)
    lane, table, rank = lanes.lane_N[own], lanes.table_N[own], lanes.rank_N[own]
    weight_LW = lanes.weights()
    worth = bank.total_ms(table, lanes.width_N[own])
    size = bank.block_T[table]
    for block in np.unique(size).tolist():
        some = np.flatnonzero(size == block)
        weight_LB = weight_LW.reshape(len(weight_LW), -1, block).sum(axis=2)
        worth[some] *= weight_LB[lane[some], rank[some] // block]
    return own[best_of(worth, lane, most)]


def _pieces_of(lanes: Lanes, lane_Q: Ints, table_Q: Ints) -> tuple[Ints, Ints]:
    """Return the pieces of (lane, table) pairs: index of the pair, and the piece."""
    num_tables = len(lanes.bank.dims_T)
    key_N = lanes.lane_N * num_tables + lanes.table_N
    order = np.argsort(key_N, kind="stable")
    first = np.searchsorted(key_N[order], lane_Q * num_tables + table_Q)
    line, nth = spread_out(lanes.pieces_LT[lane_Q, table_Q].astype(np.int64))
    return line, order[first[line] + nth]


def drafted(
    lanes: Lanes,
    options: Sequence[tuple[int, int, int, int]],
    deadline: float = math.inf,
) -> tuple[Changes, Floats]:
    """Remove tables and place them again where they cost least.

    Args:
        lanes: Placements.
        options: (lane, table, new way, number of column shards) of each change.
        deadline: `time.monotonic()` after which no more options are tried.

    Returns:
        The changes that found room, and their approximate scores, `K`.
    """
    most = max(1, MOST_PHASES // lanes.phases_LWS4[0].size)
    parts = []
    for start in range(0, len(options), most):
        parts.append(_drafted(lanes, options[start : start + most]))
        if time.monotonic() >= deadline:
            break
    changes, about = zip(*parts, strict=True)
    return Changes.join(changes), np.concatenate(about)


def _drafted(
    lanes: Lanes, options: Sequence[tuple[int, int, int, int]]
) -> tuple[Changes, Floats]:
    """Return the changes of as many options as can be tried at once."""
    lane_Q, table_Q, way_Q, count_Q = np.array(options).T
    draft = Draft.of(lanes, lane_Q, *_pieces_of(lanes, lane_Q, table_Q))
    draft.place(np.arange(len(options)), way_Q, count_Q)
    changes, good = draft.changes()
    loads = lanes.loads(draft.phases_LWS4[good], changes.lane_K)
    powers = lanes.raised(loads / lanes.unit_LP[changes.lane_K][:, None])
    return changes, lanes.score(powers.sum(axis=1), changes.lane_K)


def _lay_out(lanes: Lanes, active: Ints, deadline: float) -> Ints:
    """Change the layout of one table per lane; return the lanes that gained."""
    bank = lanes.bank
    most = max(NUM_TABLES, bank.task.world_size // NUM_TABLES)
    pieces = hot_pieces(lanes, active, most)
    if bank.others:
        own = np.flatnonzero(np.isin(lanes.lane_N, active))
        saved = bank.saved_ms_T[lanes.table_N[own]]
        own, saved = own[np.isfinite(saved)], saved[np.isfinite(saved)]
        saving = own[best_of(saved, lanes.lane_N[own], most)]
        pieces = np.concatenate([pieces, saving])
    num_tables = len(bank.dims_T)
    pairs = np.unique(lanes.lane_N[pieces] * num_tables + lanes.table_N[pieces])
    mean_L = lanes.load_LW.mean(axis=1)
    options = [
        (lane, table, way, count)
        for lane, table in (divmod(pair, num_tables) for pair in pairs.tolist())
        for way, count in bank.layouts(
            table, int(lanes.pieces_LT[lane, table]), float(mean_L[lane])
        )
    ]
    if not options:
        return active[:0]
    changes, about_K = drafted(lanes, options, deadline)
    if not len(changes):
        return active[:0]
    exact = np.sort(best_of(-about_K, changes.lane_K, NUM_LAYOUTS * most // NUM_TABLES))
    return _apply_best(lanes, changes.pick(exact), deadline)


def _apply_best(lanes: Lanes, changes: Changes, deadline: float) -> Ints:
    """Apply the best candidates that pay.

    Within a lane they share no rank, and together split no table too often.

    Returns:
        The lanes that changed.
    """
    bank, lane_K = lanes.bank, changes.lane_K
    gain_K = lanes.score_L[lane_K] - lanes.evaluate(changes, deadline)
    pays = np.flatnonzero(gain_K > MIN_GAIN * lanes.score_L[lane_K])
    pays = pays[np.argsort(-gain_K[pays], kind="stable")]
    place, offset = spread_out(bank.block_T[changes.table_N])
    rank_X = changes.rank_N[place] + offset
    rank_X += lane_K[changes.cand_N[place]] * bank.task.world_size
    ends = np.searchsorted(changes.cand_N, [pays, pays + 1])
    ends_X = np.searchsorted(place, ends)
    used: set[int] = set()
    spare: dict[tuple[int, int], int] = {}  # shards that changed tables may still get
    chosen = []
    ranks, rows = rank_X.tolist(), np.column_stack([pays, *ends, *ends_X])
    for k, first, last, first_X, last_X in rows.tolist():
        if not used.isdisjoint(ranks[first_X:last_X]):
            continue
        lane, more = int(lane_K[k]), Counter[tuple[int, int]]()
        own = changes.table_N[first:last], changes.sign_N[first:last]
        for table, sign in zip(*(values.tolist() for values in own), strict=True):
            more[lane, table] += sign
        if any(n > spare.get(at, n) for at, n in more.items()):
            continue
        used.update(ranks[first_X:last_X])
        for at, n in more.items():
            left = spare.get(at, int(bank.most_T[at[1]] - lanes.pieces_LT[at]))
            spare[at] = left - n
        chosen.append(k)
    if chosen:
        lanes.apply(changes.pick(np.array(chosen)))
    return np.unique(lane_K[chosen])


def changed(lanes: Lanes, changes: Changes) -> Lanes:
    """Return one changed copy of a lane for each candidate."""
    other = lanes.take(changes.lane_K)
    if other.num_lanes:
        each_K = np.arange(other.num_lanes)
        other.apply(dataclasses.replace(changes, lane_K=each_K))
    return other


def _switched(lanes: Lanes, most: int) -> Lanes:
    """Return copies of a lane, each with one costly table in another way."""
    bank = lanes.bank
    table, first = np.unique(lanes.table_N, return_index=True)
    cost = bank.total_ms(table, lanes.width_N[first])
    options: list[tuple[int, int]] = []
    for now in table[np.argsort(-cost, kind="stable")].tolist():
        options += [(now, way) for way in bank.cuts(now)]
        if len(options) >= most:
            break
    if not options:
        return lanes.take(np.zeros(0, dtype=np.int64))
    table_Q, way_Q = np.array(options[:most]).T
    none_Q = np.zeros_like(table_Q)
    draft = Draft.of(lanes, none_Q, *_pieces_of(lanes, none_Q, table_Q))
    rank_ms = max(float(lanes.load_LW.mean()), 1e-12)
    wanted = bank.total_ms(way_Q, bank.dims_T[way_Q]) / rank_ms
    draft.place(np.arange(len(way_Q)), way_Q, bank.enough_splits(way_Q, wanted))
    return changed(lanes, draft.changes()[0])


def disturbed(lanes: Lanes, rng: np.random.Generator) -> Lanes:
    """Return copies of lanes with some tables removed and placed again."""
    bank, num_lanes = lanes.bank, lanes.num_lanes
    num_ranks = bank.task.world_size
    hot = hot_pieces(lanes, np.arange(num_lanes), LEAST_CHOICES)
    taken: list[list[int]] = []
    new: list[list[tuple[int, int, int]]] = []
    for lane in range(num_lanes):
        costly = lanes.table_N[hot[lanes.lane_N[hot] == lane]]
        out = _taken_out(lanes, lane, costly, rng)
        taken.append(out)
        again = _put_back(bank, lanes.pieces_LT[lane], out, rng)
        whole = np.array([(way, bank.dims_T[way]) for way, *_ in again]).T
        noise = rng.uniform(0.5, 1.5, len(again))
        order = np.argsort(-bank.total_ms(*whole) * noise, kind="stable")
        new.append([again[i] for i in order])
    draft, *_ = _without(lanes, taken)
    most = rng.uniform(0.0, 1.0, (num_lanes, 1))
    noise_LW = 1.0 + most * rng.uniform(0.0, 1.0, (num_lanes, num_ranks))
    for n in range(max(map(len, new))):
        own = np.array([lane for lane, again in enumerate(new) if len(again) > n])
        way_Q, count_Q, skew_Q = np.array([new[lane][n] for lane in own]).T
        draft.place(own, way_Q, count_Q, noise_LW[own], skew_Q)
    return changed(lanes, draft.changes()[0])


def _without(
    lanes: Lanes, out: Sequence[Sequence[int]]
) -> tuple[Draft, Ints, Ints, Ints]:
    """Remove some tables of each lane.

    Returns:
        The draft; and for each removed table its lane, its number among those of this
        lane, and the table: `Q` each.
    """
    lane_Q, nth_Q = spread_out(np.array([len(own) for own in out], dtype=np.int64))
    table_Q = np.array([table for own in out for table in own], dtype=np.int64)
    line, pieces = _pieces_of(lanes, lane_Q, table_Q)
    draft = Draft.of(lanes, np.arange(lanes.num_lanes), lane_Q[line], pieces)
    return draft, lane_Q, nth_Q, table_Q


def _varied(lanes: Lanes, rng: np.random.Generator) -> Lanes:
    """Return changed copies of lanes: most by `gathering`, the rest `disturbed`."""
    first = int(GATHERS * lanes.num_lanes) if lanes.bank.task.world_size > 1 else 0
    some, left = gathering(lanes.take(np.arange(first)), rng)
    left = np.concatenate([left, np.arange(first, lanes.num_lanes)])
    return Lanes.join([some, disturbed(lanes.take(left), rng)])


def gathering(lanes: Lanes, rng: np.random.Generator) -> tuple[Lanes, Ints]:
    """Return copies of lanes in which one rank has given away its wide tables.

    Other ranks with tables as wide take them, so the narrow tables that stay are looked
    up and updated in less time (see `construct.gathered`).

    Returns:
        The copies, and the lanes that could not be changed in this way.
    """
    bank, num_ranks = lanes.bank, lanes.bank.task.world_size
    own = np.flatnonzero(bank.moves_T[lanes.table_N] & ~bank.stays_T[lanes.table_N])
    most_LW = np.zeros((lanes.num_lanes, num_ranks), dtype=np.int64)
    np.maximum.at(most_LW, (lanes.lane_N[own], lanes.rank_N[own]), lanes.width_N[own])
    out: list[list[int]] = []
    open_LW = np.zeros_like(most_LW, dtype=bool)
    for lane, rank in enumerate(rng.integers(num_ranks, size=lanes.num_lanes)):
        here = own[(lanes.lane_N[own] == lane) & (lanes.rank_N[own] == rank)]
        widths = np.unique(lanes.width_N[here])[:-1]
        if len(widths):
            width = widths[int(rng.integers(len(widths)))]
            here = here[lanes.width_N[here] > width]
            open_LW[lane] = most_LW[lane] > width
            open_LW[lane, rank] = False
        tables = np.unique(lanes.table_N[here]) if open_LW[lane].any() else here[:0]
        cost = bank.total_ms(tables, bank.dims_T[tables])
        out.append(tables[np.argsort(-cost, kind="stable")].tolist())
    draft, lane_Q, nth_Q, table_Q = _without(lanes, out)
    count_Q = lanes.pieces_LT[lane_Q, table_Q].astype(np.int64)
    for n in range(int(nth_Q.max(initial=-1)) + 1):
        now = np.flatnonzero(nth_Q == n)
        some = lane_Q[now]
        # A table with more shards than these ranks may go anywhere.
        room_QW = open_LW[some] | (open_LW[some].sum(axis=1) < count_Q[now])[:, None]
        draft.place(some, table_Q[now], count_Q[now], open_QW=room_QW)
    draft.fits_L &= np.isin(np.arange(lanes.num_lanes), lane_Q)
    return changed(lanes, draft.changes()[0]), np.flatnonzero(~draft.fits_L)


LEAST_CHOICES = 3
"""A disturbance may pick one of this many costliest pieces of hot ranks."""


def _taken_out(
    lanes: Lanes, lane: int, costly: Ints, rng: np.random.Generator
) -> list[int]:
    """Draw the tables that a disturbance removes from a lane."""
    own = (lanes.lane_N == lane) & ~lanes.bank.stays_T[lanes.table_N]
    table, rank = lanes.table_N[own], lanes.rank_N[own]
    pool = np.unique(table)
    most = min(OUT_MOST, 2 + len(pool) // 4)
    count = OUT_FEWEST + int(rng.integers(0, max(1, most - 1)))
    if rng.random() < HALF:
        ranks = [lanes.load_LW[lane].argmax(), rng.integers(len(lanes.load_LW[lane]))]
        near = np.unique(table[np.isin(rank, ranks)])
        pool = near if len(near) else pool
    out: list[int] = rng.choice(pool, min(count, len(pool)), replace=False).tolist()
    if len(costly) and rng.random() < HALF:
        first = int(costly[int(rng.integers(len(costly)))])
        out = [first, *(t for t in out if t != first)]
    return out


def _put_back(
    bank: ShardBank, pieces_T: Ints, out: list[int], rng: np.random.Generator
) -> list[tuple[int, int, int]]:
    """Draw way, number of shards and skew of each removed table."""
    found = []
    retypes = rng.random() < HALF
    for n, table in enumerate(out):
        way, count = table, int(pieces_T[table])
        others = bank.cuts(table)
        if others and retypes and rng.random() < HALF:
            way, count = others[int(rng.integers(len(others)))], 1
        if bank.moves_T[way]:
            if n == 0 or count not in bank.splits(way) or rng.random() < RESPLIT:
                near = bank.near_splits(way, count)
                count = near[int(rng.integers(len(near)))]
        skew = 0
        if count > 1 and bank.task.uneven and bank.moves_T[way] and rng.random() < HALF:
            free = int(bank.dims_T[way] - count * bank.narrowest_T[way])
            step = ALIGNMENT if rng.random() < HALF else COLUMN_MULTIPLE
            skew = step * int(rng.integers(max(0, free) // step + 1))
        found.append((way, count, skew))
    return found


def improve(lanes: Lanes, config: SearchConfig, effort: Effort) -> None:
    """Improve placements; `effort` keeps the best one.

    Args:
        lanes: At least one placement, the most promising first.
        config: Effort, restarts and seed.
        effort: Deadline and best placement.
    """
    bank = lanes.bank
    num_tables = len(bank.task.ways)
    room = most_lanes(bank)
    most = min(MOST_LANES, room)
    size = int(np.clip(config.effort * LANE_TABLES // num_tables, 1, most))
    lanes = lanes.take(np.arange(min(lanes.num_lanes, max(2, min(size, NUM_STARTS)))))
    descend(lanes, effort, float(lanes.score_L.min()))
    if num_tables == 1:
        return  # it has tried the table's layouts
    lanes = _restarted(lanes.take(in_order(lanes.score_L)), config, effort, size)
    sharper = [effort.best_TW, *map(lanes.width_TW, range(lanes.num_lanes))]
    descend(Lanes.of(bank, sharper[: 1 + NUM_FINAL], power=FINAL_POWER), effort)
    descend(Lanes.of(bank, [effort.best_TW], power=LAST_POWER), effort)


def _restarted(lanes: Lanes, config: SearchConfig, effort: Effort, size: int) -> Lanes:
    """Improve changed copies of lanes in rounds, until rounds stop gaining.

    Args:
        lanes: Improved placements, the best one first.
        config: Restarts and seed.
        effort: Deadline and best placement.
        size: Most lanes of a round.

    Returns:
        The best lanes, in order.
    """
    bank, room = lanes.bank, most_lanes(lanes.bank)
    num_tables = len(bank.task.ways)
    restarts = size >= LEAST_LANES
    size = min(size, TINY_LANES * num_tables)
    rng = np.random.default_rng(config.seed)
    least = FEWER_ROUNDS if num_tables >= LARGE_TASK else 1.0
    share = float(np.clip(SMALL_TASK / num_tables, least, MORE_ROUNDS))
    patience = min(config.restarts * share, TINY_ROUNDS * (num_tables - 1))
    worth = 1 - ROUND_GAIN * float(np.clip(num_tables / LARGE_TASK, 1, MORE_GAIN))
    misses, switched = 0, math.inf
    for _ in range(MOST_ROUNDS):
        if misses >= patience or effort.is_over:
            break
        before_ms, leader = effort.best_ms, float(lanes.score_L[0])
        if bank.others and leader < switched * worth:
            # Copies of the best lane, each with one costly table in another way.
            switched = leader
            trial = _switched(
                lanes.take(np.zeros(1, dtype=np.int64)), min(max(2 * size, 8), room)
            )
            descend(trial, effort, leader)
            both = Lanes.join([lanes, trial])
        elif not restarts:
            break
        else:
            near = np.flatnonzero(lanes.score_L <= NEAR * leader)
            lanes = lanes.take(np.resize(near[: max(1, size // 2)], size))
            trial = _varied(lanes, rng)
            descend(trial, effort, leader)
            misses += 1
            both = succeeded(lanes, trial, rng)
        lanes = both.take(in_order(both.score_L)[:size])
        if effort.best_ms < before_ms * worth:
            misses = 0
    return lanes


def in_order(score_L: Floats) -> Ints:
    """Return lanes sorted by score, without duplicates."""
    order: Ints = np.argsort(score_L, kind="stable")
    first: Ints = order[np.diff(_relative(score_L)[order], prepend=-1.0) > 0]
    return first


def _relative(score_L: Floats) -> Floats:
    """Return scores as multiples of the best one, rounded; equal lanes get the same.

    The best score may be 0, since a cost model may return 0.
    """
    relative: Floats = np.round(score_L / max(float(score_L.min()), LEAST_MS), 9)
    return relative


def succeeded(lanes: Lanes, trial: Lanes, rng: np.random.Generator) -> Lanes:
    """Return the lanes after a round: all lanes, and trials that are hardly worse."""
    limit = float(lanes.score_L.max())
    worse = 1.0 + rng.exponential(ACCEPT_WORSE, trial.num_lanes)
    taken = np.flatnonzero(trial.score_L <= limit * worse)
    return Lanes.join([lanes, trial.take(taken)])
