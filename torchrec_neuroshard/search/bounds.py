"""How short a critical path can be at best, under the same cost model.

Give every shard a price: `offset_t + slope_t * width`, at least 0, for one of table t.
All columns are somewhere, so whatever the placement, some rank holds shards worth at
least the mean, and an iteration takes no less than the cheapest set worth so much:

    max over ranks of C(S_r)  >=  min { C(S) : worth(S) >= total worth / W }

Any prices give a bound. The best ones are the dual of the linear program that packs
fractions of sets into W ranks; they are found by generating columns: solve the program
over a pool of sets, search for sets that its prices value too high, add them, again.

- `C(S)` is forward plus backward compute plus the collectives that the set forces:
  those of a rank with so many columns and ids beside others that share the rest
  equally. Forward and backward are bound apart, too, since each waits for its own
  slowest rank; and stages wait for each other, so their bounds add up.
- Sets that cost more than the best plan known, or need more memory than any rank has,
  are left out: no better plan holds them. More sharply, for any limit, a plan either
  has a rank above it or is bound by the sets below it. Then a table whose shards cost
  more than the limit counts with the fewest shards that keep to it, each of which pays
  for its lookups.

Where few sets exist all are looked at: a proof, given assumption 1. On all other tasks
the cheapest sets are looked for by local search, last by a longer one, and cheaper
ones may have been missed; there the second assumption is made, too.

Rules on ranks (which, and in whose company) are not looked at: without them, no plan is
slower.

1. *Collectives* are shortest where all ranks hold equally many columns and ids, and for
   a rank that holds more than its share, where the others hold equally many; loosened
   where the best plan known shows otherwise.
2. *A shard alone* costs no more than any set with it; loosened by the cheapest of such
   sets among those at hand and by those that a greedy search finds.

Shapes: `L` sets, `M` places for shards in a set, `N` shards, `T` tables of a stage, `H`
heavy ones, `U` widths, `C` classes of tables that share a factor, `G` fusion groups,
`E` encoding values, `W` ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from torchrec_neuroshard.search.greedy_grid import place_lanes
from torchrec_neuroshard.search.shards import (
    Floats,
    Ints,
    ShardBank,
    split_widths,
    sum_by,
)
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = ["lower_bound"]

MAX_CLASSES = 40
"""Tables have a price each up to this many; of more, similar ones share a factor."""
MAX_ENUMERATED = 20_000
"""All sets of a stage are looked at where there are no more."""
NUM_STARTS = 16
"""Random placements whose ranks start the pool; a quarter of that for many tables."""
MANY_TABLES = 300
START_SPLIT_SHARE = 0.1
"""Share of the tables that are split in the random placements."""
NUM_ROUNDS, NUM_PHASE_ROUNDS = 4, 1
"""Rounds of linear program and search: of all compute, and of each direction alone."""
FIRST_REACH, REACH_SHRINKS = 0.3, 0.75
"""How far prices may move in a round, relative; less after each without a gain."""
POOL_BASE, POOL_PER_CLASS = 300, 6
"""Sets that a linear program sees: those that the prices value highest."""
MIN_GAP = 1e-3
"""The bound is good enough when it is so near the best plan."""
NUM_LANES, NUM_CANDIDATES = 24, 8
"""Sets that a search improves at a time, and changes of each that a step tries."""
NUM_STEPS, NUM_FINAL_STEPS = 12, 40
"""Steps of a round's search, and of the one at the end."""
SPARE_PLACES = 12
"""Shards that a set may hold more than the largest set at the start of a search."""
VALUE_BIAS = 3.0
"""How much likelier tables are tried that are worth more beside their cost."""
WHOLE_SHARE = 0.6
"""Share of the shards tried that are whole tables, beside those by chance."""
HEAVY_SHARE = 0.5
"""Tables that cost more than this share of a rank alone may need several shards."""
NUM_COMPANIONS = 64
"""Tables, the cheapest ones, that are tried beside such a shard."""
LEAST_ADDED = 1e-6
"""Share of the costliest table's price that every table has at the start."""
MAX_LIMITS = 24
"""Limits of a rank's cost that are looked at."""
MAX_GRID = 64
"""Points of the tables of collectives."""
TOLERANCE = 1e-9

_SWAP, _DROP, _ADD, _WIDTH = range(4)


def lower_bound(
    bank: ShardBank,
    placed: Sequence[Ints],
    critical_ms: float,
    *,
    seed: int = 0,
    deadline: float = math.inf,
    rounds: int = NUM_ROUNDS,
) -> float:
    """Bound the critical path of every placement from below.

    Args:
        bank: The task's shards.
        placed: Placements found by the search, `T x W` widths each, the best first.
        critical_ms: Critical path of the first.
        seed: Of the sets looked at.
        deadline: `time.monotonic()` after which prices are not improved further.
        rounds: Times that prices are improved; 0 for a quick bound.

    Returns:
        Milliseconds, at most `critical_ms`; see the module's docstring for what the
        bound rests on.
    """
    used = np.unique(bank.stages_T).tolist()
    known = [_Stage(bank, s, (1.0, 1.0)).least_comms_ms for s in used]
    for i, number in enumerate(used):
        cutoff = critical_ms - (sum(known) - known[i])
        known[i] = _stage_bound(bank, number, placed, cutoff, seed, deadline, rounds)
    return min(critical_ms, sum(known))


def _stage_bound(
    bank: ShardBank,
    number: int,
    placed: Sequence[Ints],
    cutoff_ms: float,
    seed: int,
    deadline: float,
    rounds: int,
) -> float:
    """Bound one stage: forward and backward as one, and each for itself."""
    whole = _Stage(bank, number, (1.0, 1.0))
    ranks = whole.place(placed[0])
    excess = float(whole.costs(whole.totals(ranks)).max()) - cutoff_ms
    whole.loosen(max(0.0, excess))
    least = whole.least_comms_ms
    prices = _Prices(whole, placed, cutoff_ms, seed)
    bound = max(least, prices.bound(rounds, deadline))
    apart = least
    for weights in ((0.0, 1.0), (1.0, 0.0)):
        good = bound >= cutoff_ms * (1 - MIN_GAP)
        if good or not rounds or time.monotonic() > deadline:
            return bound
        phase = _Stage(bank, number, weights)
        prices = _Prices(phase, placed, cutoff_ms - apart, seed)
        apart += prices.bound(min(rounds, NUM_PHASE_ROUNDS), deadline)
    return max(bound, apart)


@dataclass(frozen=True, slots=True)
class _Sets:
    """Sets of shards; -1 and 0 fill places that hold none."""

    table_LM: Ints
    """Index among the stage's tables."""
    width_LM: Ints

    def pick(self, index: Ints) -> _Sets:
        return _Sets(self.table_LM[index], self.width_LM[index])

    @staticmethod
    def alone(table_N: Ints, width_N: Ints) -> _Sets:
        """Each shard in a set of its own."""
        return _Sets(table_N[:, None], width_N[:, None])

    @staticmethod
    def join(parts: Sequence[_Sets]) -> _Sets:
        most = max(p.table_LM.shape[1] for p in parts)

        def wide(values: Ints, fill: int) -> Ints:
            room = ((0, 0), (0, most - values.shape[1]))
            return np.pad(values, room, constant_values=fill)

        return _Sets(
            np.concatenate([wide(p.table_LM, -1) for p in parts]),
            np.concatenate([wide(p.width_LM, 0) for p in parts]),
        )

    def __len__(self) -> int:
        return len(self.table_LM)


@dataclass(slots=True)
class _Totals:
    """What the cost of sets depends on, as running sums."""

    sums_LGE: Floats
    count_LG: Ints
    columns_L: Floats
    index_bytes_L: Floats
    bytes_L: Floats

    def pick(self, index: Ints) -> _Totals:
        return _Totals(
            self.sums_LGE[index],
            self.count_LG[index],
            self.columns_L[index],
            self.index_bytes_L[index],
            self.bytes_L[index],
        )

    def add(
        self, stage: _Stage, line_N: Ints, table_N: Ints, width_N: Ints, sign: int
    ) -> None:
        """Add shards to sets, or take them out; no set twice in one call."""
        bank, table = stage.bank, stage.tables[table_N]
        group = stage.groups_T[table_N]
        rows = bank.rows(table, width_N)
        self.sums_LGE[line_N, group] += sign * bank.encoding(rows)
        self.count_LG[line_N, group] += sign
        self.columns_L[line_N] += sign * bank.columns(table, width_N)
        self.index_bytes_L[line_N] += sign * stage.index_bytes_T[table_N]
        self.bytes_L[line_N] += sign * bank.bytes(table, width_N)

    def exchange(
        self, stage: _Stage, out: tuple[Ints, Ints], put: tuple[Ints, Ints]
    ) -> None:
        """Take a shard, (table, width), out of every set and put one in; 0 is none."""
        bank, line = stage.bank, np.arange(len(self.columns_L))
        encodings, changes = [], []
        for table_L, width_L in (out, put):
            table = stage.tables[table_L]
            encodings.append(bank.encoding(bank.rows(table, width_L)))
            held = width_L > 0
            changes.append(
                (
                    bank.columns(table, width_L),
                    stage.index_bytes_T[table_L] * held,
                    bank.bytes(table, width_L),
                    held.astype(np.int64),
                )
            )
        old, new = changes
        self.columns_L += new[0] - old[0]
        self.index_bytes_L += new[1] - old[1]
        self.bytes_L += new[2] - old[2]
        if self.sums_LGE.shape[1] == 1:
            self.sums_LGE[:, 0] += encodings[1] - encodings[0]
            self.count_LG[:, 0] += new[3] - old[3]
            return
        group_out, group_put = stage.groups_T[out[0]], stage.groups_T[put[0]]
        self.sums_LGE[line, group_out] -= encodings[0]
        self.sums_LGE[line, group_put] += encodings[1]
        self.count_LG[line, group_out] -= old[3]
        self.count_LG[line, group_put] += new[3]

    def replace(self, line_N: Ints, other: _Totals) -> None:
        """Take over other totals at some lines."""
        self.sums_LGE[line_N] = other.sums_LGE
        self.count_LG[line_N] = other.count_LG
        self.columns_L[line_N] = other.columns_L
        self.index_bytes_L[line_N] = other.index_bytes_L
        self.bytes_L[line_N] = other.bytes_L


class _Stage:
    """The tables of one stage and what a set of their shards costs."""

    def __init__(
        self, bank: ShardBank, stage: int, weights: tuple[float, float]
    ) -> None:
        """Take what forward and backward count; collectives count beside both."""
        self.bank = bank
        self.stage = stage
        self.weights = np.array(weights)
        self.tables: Ints = np.flatnonzero(bank.stages_T == stage)
        self.dims_T: Ints = bank.dims_T[self.tables]
        present, self.groups_T = np.unique(
            bank.groups_T[self.tables], return_inverse=True
        )
        self.num_groups = len(present)
        self.index_bytes_T: Floats = bank.loads_of(bank.whole_T[self.tables])[:, 0]
        self.most_bytes = float(bank.caps_W.max()) * (1 + TOLERANCE)
        self._grids = self._comms_grids() if min(weights) > 0 else []
        self.least_comms_ms = float(sum(ms[0] for _, ms in self._grids))
        self.widths_TU, self.num_widths_T = self._legal_widths()
        # An affine guess of what a shard adds to a rank gives prices their shape.
        narrow = bank.rows(self.tables, np.full(len(self.tables), COLUMN_MULTIPLE))
        narrow_T = bank.added(narrow) @ self.weights
        whole_T = bank.added(bank.whole_T[self.tables]) @ self.weights
        whole_T = np.maximum(whole_T, LEAST_ADDED * float(whole_T.max()))
        slope_T = (whole_T - narrow_T) / np.maximum(self.dims_T - COLUMN_MULTIPLE, 1)
        offset_T = narrow_T - slope_T * COLUMN_MULTIPLE
        self.offset_T: Floats = np.clip(offset_T, 0.0, whole_T)
        self.slope_T: Floats = (whole_T - self.offset_T) / self.dims_T

    def _comms_grids(self) -> list[tuple[Floats, Floats]]:
        """Collectives of a rank with more than its share: (amounts, milliseconds).

        One grid for columns, one for bytes of ids; amounts of all other ranks are what
        is left, in equal parts.
        """
        bank, stage = self.bank, self.stage
        num_ranks = bank.task.world_size
        grids = []
        for load, which in ((1, slice(1, None)), (0, slice(0, 1))):
            mean = bank.mean_loads_S3[stage, load]
            amounts = mean * np.linspace(1.0, min(num_ranks, 4.0), MAX_GRID)
            shape = (MAX_GRID, num_ranks, 3)
            loads = np.broadcast_to(bank.mean_loads_S3[stage], shape).copy()
            left = num_ranks * mean - amounts
            loads[:, :, load] = (left / max(1, num_ranks - 1))[:, None]
            loads[:, 0, load] = amounts
            comms = bank.simulator.stage_comms(stage, loads)
            ms = comms[:, :, which].max(axis=1).sum(axis=1)
            # A model may dip; more on one rank is not taken to be quicker.
            grids.append((amounts, np.minimum.accumulate(ms[::-1])[::-1].copy()))
        return grids

    def loosen(self, excess_ms: float) -> None:
        """Lower the collectives, which a placement found to be shorter than assumed."""
        for _, ms in self._grids:
            cut = min(excess_ms, float(ms[0]))
            ms -= cut
            excess_ms -= cut
        self.least_comms_ms = float(sum(ms[0] for _, ms in self._grids))

    def _legal_widths(self) -> tuple[Ints, Ints]:
        """Widths that a shard of each table may have, `T x U`, and how many."""
        task = self.bank.task
        known: dict[tuple[int, int, int], list[int]] = {}
        found = []
        for table in self.tables.tolist():
            dim = int(self.bank.dims_T[table])
            most = min(task.max_shards[table], task.world_size)
            key = (dim, task.min_widths[table], most)
            if key not in known:
                if task.uneven and most > 1:
                    least = max(COLUMN_MULTIPLE, task.min_widths[table])
                    least = -(-least // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
                    known[key] = [*range(least, dim - least + 1, COLUMN_MULTIPLE), dim]
                else:
                    splits = reversed(self.bank.splits(table))
                    known[key] = [split_widths(task, table, k)[0] for k in splits]
            found.append(known[key])
        count = np.array([len(w) for w in found])
        widths = np.zeros((len(found), int(count.max())), dtype=np.int64)
        widths[np.arange(widths.shape[1]) < count[:, None]] = np.concatenate(found)
        return widths, count

    def totals(self, sets: _Sets) -> _Totals:
        """Sum up sets."""
        bank, num_sets, num_groups = self.bank, len(sets), self.num_groups
        line, place = np.nonzero(sets.table_LM >= 0)
        held, width = sets.table_LM[line, place], sets.width_LM[line, place]
        table, cell = self.tables[held], line * num_groups + self.groups_T[held]
        shape = (num_sets, num_groups)
        sums = sum_by(cell, bank.encoding(bank.rows(table, width)), math.prod(shape))
        amounts = (
            bank.columns(table, width),
            self.index_bytes_T[held],
            bank.bytes(table, width),
        )
        return _Totals(
            sums.reshape(*shape, -1),
            np.bincount(cell, minlength=math.prod(shape)).reshape(shape),
            *(np.bincount(line, a, num_sets).astype(np.float64) for a in amounts),
        )

    def costs(self, totals: _Totals) -> Floats:
        """Cost of sets [ms]; infinite where no rank has the memory."""
        compute = np.zeros(totals.count_LG.shape)
        held = totals.count_LG > 0
        if held.any():
            compute[held] = self.bank.predict(totals.sums_LGE[held]) @ self.weights
        cost: Floats = compute.sum(axis=1)
        amounts = (totals.columns_L, totals.index_bytes_L)
        for (grid, ms), amount in zip(self._grids, amounts, strict=bool(self._grids)):
            # The next lower grid point: not above the truth between two of them.
            place = np.searchsorted(grid, amount * (1 + TOLERANCE), side="right") - 1
            cost += ms[np.maximum(place, 0)]
        cost[totals.bytes_L > self.most_bytes] = np.inf
        return cost

    def place(self, width_TW: Ints) -> _Sets:
        """Sets that the ranks of a placement hold."""
        table, rank = np.nonzero(width_TW[self.tables])
        return _gather(rank, table, width_TW[self.tables[table], rank])

    def place_of(self, table_N: Ints, width_N: Ints) -> Ints:
        """Where in `widths_TU` a table has a width."""
        found: Ints = (self.widths_TU[table_N] == width_N[:, None]).argmax(axis=1)
        return found

    def enumerate(self) -> _Sets | None:
        """All sets there are, place m for table m; None where those are too many."""
        options = [
            [0, *widths[:count].tolist()]
            for widths, count in zip(self.widths_TU, self.num_widths_T, strict=True)
        ]
        if math.prod(len(o) for o in options) > MAX_ENUMERATED:
            return None
        grid = np.meshgrid(*(np.array(o) for o in options), indexing="ij")
        width_LT = np.stack([axis.reshape(-1) for axis in grid], axis=1)[1:]
        table_LT = np.where(width_LT > 0, np.arange(len(options)), -1)
        return _Sets(table_LT.astype(np.int64), width_LT.astype(np.int64))

    def singles(self) -> _Sets:
        """Every table alone: whole, about half of it, and as narrow as it may be."""
        table = np.arange(len(self.tables))
        narrow, whole = np.zeros_like(table), self.num_widths_T - 1
        shards = np.concatenate(
            [
                np.stack([table, self.widths_TU[table, place]], axis=1)
                for place in (narrow, whole // 2, whole)
            ]
        )
        shards = np.unique(shards, axis=0)
        return _Sets.alone(shards[:, 0], shards[:, 1])


def _gather(set_N: Ints, table_N: Ints, width_N: Ints) -> _Sets:
    """Make sets of shards, each given with the number of its set."""
    order = np.argsort(set_N, kind="stable")
    set_N, table_N, width_N = set_N[order], table_N[order], width_N[order]
    used, line, count = np.unique(set_N, return_inverse=True, return_counts=True)
    place = np.arange(len(set_N)) - np.repeat(np.cumsum(count) - count, count)
    shape = (len(used), int(count.max(initial=0)))
    table_LM = np.full(shape, -1, dtype=np.int64)
    width_LM = np.zeros(shape, dtype=np.int64)
    table_LM[line, place], width_LM[line, place] = table_N, width_N
    return _Sets(table_LM, width_LM)


@dataclass(frozen=True, slots=True)
class _Limit:
    """Plans that keep the cost of every rank to a limit."""

    ms: float
    totals_C: Floats | None
    """Worth of each class at factor 1, a table with the fewest shards that it then
    needs; None where there are no such plans."""


class _Prices:
    """Prices of one stage's shards, made better round by round.

    A price is its class's factor times the shard's part in an affine guess of costs.
    Sets of a pool stand for all sets; where few exist, the pool holds all of them.
    """

    def __init__(
        self, stage: _Stage, placed: Sequence[Ints], cutoff_ms: float, seed: int
    ) -> None:
        self.stage = stage
        self.cutoff_ms = cutoff_ms * (1 + TOLERANCE)
        self.num_ranks = stage.bank.task.world_size
        self.rng = np.random.default_rng(seed)
        self.class_T = _classes(stage)
        self.num_classes = int(self.class_T.max()) + 1
        most = np.asarray(stage.bank.task.max_shards)[stage.tables]
        self.most_T: Ints = np.clip(most, 1, self.num_ranks)
        everything = stage.enumerate()
        self.holds_all = everything is not None
        if everything is None:
            parts = [stage.place(w) for w in placed]
            self.pool = _Sets.join([*parts, *self._random_sets(), stage.singles()])
        else:
            self.pool = everything
        self.cost_L = stage.costs(stage.totals(self.pool))
        heavy_H, alone_HU = self._alone()
        index = np.flatnonzero(self.cost_L <= self.cutoff_ms)
        self.pool, self.cost_L = self.pool.pick(index), self.cost_L[index]
        self.load_LC = self._loads(self.pool)
        self.limits = self._limits(heavy_H, alone_HU)

    def _random_sets(self) -> list[_Sets]:
        """Ranks of random balanced placements, some of the tables split."""
        stage, rng = self.stage, self.rng
        bank, tables = stage.bank, stage.tables
        if self.num_ranks < 2:
            return []
        starts = NUM_STARTS if len(tables) <= MANY_TABLES else NUM_STARTS // 4
        found = []
        for _ in range(starts):
            split = rng.random(len(tables)) < START_SPLIT_SHARE
            rows = [bank.whole_T[tables[~split]]]
            for t in tables[split].tolist():
                options = bank.splits(t)
                k = options[int(rng.integers(len(options)))]
                rows.append(bank.rows(np.full(k, t), split_widths(bank.task, t, k)))
            found.append(rng.permutation(np.concatenate(rows)))
        rows_LN = np.full((starts, max(map(len, found))), -1, dtype=np.int64)
        for line, rows_N in zip(rows_LN, found, strict=True):
            line[: len(rows_N)] = rows_N
        rank_LN, _ = place_lanes(bank, rows_LN, np.full(starts, np.inf))
        lane, place = np.nonzero(rank_LN >= 0)
        used = rows_LN[lane, place]
        table = np.searchsorted(tables, bank.table(used))
        set_N = lane * self.num_ranks + rank_LN[lane, place]
        return [_gather(set_N, table, bank.width(used))]

    def _alone(self) -> tuple[Ints, Floats]:
        """Bound the cost of sets with a shard of the tables that cost most.

        Returns:
            `H` tables and `H x U` milliseconds by width; infinite where a table has no
            such width.
        """
        stage = self.stage
        alone_TU = np.full(stage.widths_TU.shape, np.inf)
        every = np.arange(len(stage.tables))
        if self.holds_all:
            heavy = every
        else:
            whole_T = stage.costs(stage.totals(_Sets.alone(every, stage.dims_T)))
            heavy = np.flatnonzero(whole_T > HEAVY_SHARE * self.cutoff_ms)
            lightest = np.argsort(whole_T, kind="stable")[:NUM_COMPANIONS]
            for table in heavy.tolist():
                widths = stage.widths_TU[table, : stage.num_widths_T[table]]
                cost = stage.costs(
                    stage.totals(_Sets.alone(np.full_like(widths, table), widths))
                )
                if np.isfinite(cost).any():
                    widest = int(np.flatnonzero(np.isfinite(cost))[-1])
                    company = lightest[lightest != table]
                    least = self._in_company(table, int(widths[widest]), company)
                    cost *= min(1.0, least / cost[widest])
                alone_TU[table, : len(widths)] = cost
        line, column = np.nonzero(self.pool.width_LM)
        held, width_N = (
            a[line, column] for a in (self.pool.table_LM, self.pool.width_LM)
        )
        place = stage.place_of(held, width_N)
        np.minimum.at(alone_TU, (held, place), self.cost_L[line])
        return heavy, alone_TU[heavy]

    def _in_company(self, table: int, width: int, company_N: Ints) -> float:
        """Cost of a shard with others that lower the cost most, one after another."""
        stage = self.stage
        held = _Sets.alone(np.array([table]), np.array([width]))
        cost = np.inf
        while len(company_N):
            totals = stage.totals(held).pick(np.zeros_like(company_N))
            dims = stage.dims_T[company_N]
            totals.add(stage, np.arange(len(company_N)), company_N, dims, 1)
            cost_N = stage.costs(totals)
            best = int(cost_N.argmin())
            if cost_N[best] >= cost:
                break
            cost = float(cost_N[best])
            held = _Sets(
                np.append(held.table_LM, company_N[best])[None],
                np.append(held.width_LM, dims[best])[None],
            )
            company_N = np.delete(company_N, best)
        return cost

    def _loads(self, sets: _Sets) -> Floats:
        """Worth of each class in each set at factor 1, `L x C`."""
        stage = self.stage
        line, place = np.nonzero(sets.table_LM >= 0)
        table, width = sets.table_LM[line, place], sets.width_LM[line, place]
        loads: Floats = np.bincount(
            line * self.num_classes + self.class_T[table],
            weights=stage.offset_T[table] + stage.slope_T[table] * width,
            minlength=len(sets) * self.num_classes,
        ).astype(np.float64)
        return loads.reshape(len(sets), self.num_classes)

    def _limits(self, heavy_H: Ints, alone_HU: Floats) -> list[_Limit]:
        """List limits of a rank's cost, the cutoff last.

        Just above each of the others some table needs fewer shards than just below.
        """
        stage = self.stage
        dims_H1 = stage.dims_T[heavy_H][:, None]
        widths_HU = stage.widths_TU[heavy_H]
        order_HU = np.argsort(alone_HU, axis=1, kind="stable")
        cost_HU = np.take_along_axis(alone_HU, order_HU, axis=1)
        widest_HU = np.take_along_axis(widths_HU, order_HU, axis=1)
        widest_HU = np.maximum.accumulate(np.maximum(widest_HU, 1), axis=1)
        fewest_HU = -(-dims_H1 // widest_HU)
        falls_HU = np.diff(fewest_HU, axis=1, prepend=-1) != 0
        steps = np.unique(cost_HU[falls_HU & (cost_HU <= self.cutoff_ms)])
        if len(steps) > MAX_LIMITS:
            steps = steps[np.linspace(0, len(steps) - 1, MAX_LIMITS).astype(np.int64)]
        found = []
        for limit_ms in [*(steps * (1 - TOLERANCE)).tolist(), self.cutoff_ms]:
            fewest_T = np.ones(len(stage.tables))
            fits_HU = alone_HU <= limit_ms
            widest_H = np.where(fits_HU, widths_HU, 0).max(axis=1, initial=0)
            fewest_T[heavy_H] = -(-dims_H1[:, 0] // np.maximum(widest_H, 1))
            possible = widest_H.all() and (fewest_T <= self.most_T).all()
            worth_T = stage.offset_T * fewest_T + stage.slope_T * stage.dims_T
            found.append(
                _Limit(limit_ms, self._by_class(worth_T) if possible else None)
            )
        return found

    def _by_class(self, worth_T: Floats) -> Floats:
        totals: Floats = np.bincount(
            self.class_T, weights=worth_T, minlength=self.num_classes
        ).astype(np.float64)
        return totals

    # What the prices say.

    def _best_bound(self, price_C: Floats) -> float:
        """Best bound over the limits, by the pool's sets.

        A plan breaks a limit, or some rank of it holds a set worth the mean.
        """
        worth_L = self.load_LC @ price_C
        bound = 0.0
        for limit in self.limits:
            least = limit.ms
            if limit.totals_C is not None:
                share = float(limit.totals_C @ price_C) / self.num_ranks
                enough = worth_L >= share * (1 - TOLERANCE)
                least = float(self.cost_L[enough].min(initial=limit.ms))
            bound = max(bound, least)
        return bound

    def _next_limit(self, bound_ms: float) -> tuple[float, Floats]:
        """The lowest limit that could give a better bound, and the totals there."""
        possible = [(n.ms, n.totals_C) for n in self.limits if n.totals_C is not None]
        above = [p for p in possible if p[0] > bound_ms * (1 + 1e-6)]
        return above[0] if above else possible[-1]

    # Rounds.

    def bound(self, num_rounds: int, deadline: float) -> float:
        """Improve the prices and return the bound [ms]."""
        totals_C = self.limits[-1].totals_C
        if totals_C is None:
            return self.cutoff_ms
        if not totals_C.sum() > 0:
            return 0.0
        tried = [np.ones(self.num_classes)]
        best_C, best_ms = self._best_of(tried)
        target_ms, reach = 0.95 * self._next_limit(best_ms)[0], FIRST_REACH
        self._search(best_C, target_ms, best_ms, NUM_STEPS)
        best_C, best_ms = self._best_of(tried)
        for _ in range(num_rounds):
            if time.monotonic() > deadline or best_ms >= self.cutoff_ms * (1 - MIN_GAP):
                break
            trial_C, worth, target_ms = self._solve(best_C, best_ms, target_ms, reach)
            self._search(trial_C, target_ms * worth, best_ms, NUM_STEPS)
            target_ms *= worth
            tried.append(trial_C)
            best_C, best_ms = self._best_of(tried)
            if best_C is not trial_C:
                reach *= REACH_SHRINKS
        if num_rounds:
            self._search(best_C, best_ms, best_ms, NUM_FINAL_STEPS)
            best_C, best_ms = self._best_of(tried)
        return best_ms

    def _best_of(self, tried: Sequence[Floats]) -> tuple[Floats, float]:
        """The prices of the best bound by all sets known by now, and the bound."""
        bounds = [self._best_bound(price_C) for price_C in tried]
        best = int(np.argmax(bounds))
        return tried[best], bounds[best]

    def _solve(
        self, price_C: Floats, bound_ms: float, target_ms: float, reach: float
    ) -> tuple[Floats, float, float]:
        """Find the prices near `price_C` at which everything is worth most.

        No set of the pool may be worth more than 1, or than its cost over the target.

        Returns:
            The prices, what everything is worth per rank, and the target used [ms].
        """
        limit_ms, totals_C = self._next_limit(bound_ms)
        target_ms = min(max(target_ms, bound_ms), limit_ms)
        price_C = price_C * (self.num_ranks / float(totals_C @ price_C))
        most_L = np.maximum(self.cost_L / target_ms, 1.0)
        share_L = self.load_LC @ price_C / most_L
        share_L[self.cost_L > limit_ms] = -1.0
        size = POOL_BASE + POOL_PER_CLASS * self.num_classes
        use = np.sort(np.argsort(-share_L, kind="stable")[:size])
        use = use[share_L[use] > 0]
        # All prices may be too high: they are lowered alike, then changed.
        price_C = price_C / max(1.0, float(share_L[use].max(initial=0.0)))
        solved = optimize.linprog(
            -totals_C,
            A_ub=self.load_LC[use],
            b_ub=most_L[use],
            bounds=np.outer(price_C, (1 - reach, 1 + reach)),
            method="highs-ds",
        )
        if solved.x is None:
            raise AssertionError(f"prices within limits exist: {solved.message}")
        return solved.x, float(solved.x @ totals_C) / self.num_ranks, target_ms

    def _search(
        self, price_C: Floats, target_ms: float, bound_ms: float, steps: int
    ) -> None:
        """Add sets to the pool that cost little beside their worth."""
        limit_ms, totals_C = self._next_limit(bound_ms)
        index = np.flatnonzero(self.cost_L <= limit_ms)
        if self.holds_all or not len(index):
            return
        price_C = price_C * (self.num_ranks / float(totals_C @ price_C))
        worth_L = self.load_LC[index] @ price_C
        score = _score(worth_L, self.cost_L[index], target_ms)
        start = index[np.argsort(-score, kind="stable")[:NUM_LANES]]
        descent = _Descent(self, price_C, target_ms, limit_ms, self.pool.pick(start))
        found = descent.run(steps)
        cost_L = self.stage.costs(self.stage.totals(found))
        self.pool = _Sets.join([self.pool, found])
        self.load_LC = np.concatenate([self.load_LC, self._loads(found)])
        self.cost_L = np.concatenate([self.cost_L, cost_L])


def _score(worth_N: Floats, cost_N: Floats, target_ms: float) -> Floats:
    """How near sets come to being worth an average rank at less than the target."""
    score: Floats = np.minimum(worth_N, 1.0) * target_ms / np.maximum(cost_N, target_ms)
    # Of sets that are worth enough, the cheaper the better.
    score -= np.where(worth_N >= 1 - TOLERANCE, 1e-3 * cost_N / target_ms, 1e-3)
    return score


class _Descent:
    """Many sets side by side, each changed at random as long as that pays."""

    def __init__(
        self,
        prices: _Prices,
        price_C: Floats,
        target_ms: float,
        limit_ms: float,
        start: _Sets,
    ) -> None:
        self.stage = stage = prices.stage
        self.rng = prices.rng
        self.limit_ms, self.target_ms = limit_ms, target_ms
        factor_T = price_C[prices.class_T]
        self.offset_T, self.slope_T = (
            factor_T * stage.offset_T,
            factor_T * stage.slope_T,
        )
        room = min(len(stage.tables), start.table_LM.shape[1] + SPARE_PLACES)
        room = max(room - start.table_LM.shape[1], 0)
        self.table_LM = np.pad(start.table_LM, ((0, 0), (0, room)), constant_values=-1)
        self.width_LM = np.pad(start.width_LM, ((0, 0), (0, room)))
        self.totals = stage.totals(start)
        held = self.table_LM >= 0
        worth = np.where(held, self._worth(self.table_LM, self.width_LM), 0.0)
        self.worth_L: Floats = worth.sum(axis=1)
        self.score_L = _score(self.worth_L, stage.costs(self.totals), target_ms)
        # Tables are tried the likelier, the more they are worth beside their cost.
        guess_T = stage.offset_T + stage.slope_T * stage.dims_T
        whole_T = self._worth(np.arange(len(guess_T)), stage.dims_T)
        value_T = whole_T / np.maximum(guess_T, 1e-12)
        weight_T = np.exp(VALUE_BIAS * value_T / max(float(value_T.mean()), 1e-12))
        self.chance_T: Floats = np.cumsum(weight_T) / weight_T.sum()
        self.chance_T[-1] = 1.0

    def _worth(self, table_N: Ints, width_N: Ints) -> Floats:
        worth: Floats = self.offset_T[table_N] + self.slope_T[table_N] * width_N
        return worth

    def run(self, steps: int) -> _Sets:
        """Take some steps and return the sets."""
        for _ in range(steps):
            self._step()
        return _Sets(self.table_LM, self.width_LM)

    def _step(self) -> None:
        """Try some changes of every set and make the best one that pays.

        A change takes a shard out, puts one in, both, or alters a shard's width.
        """
        stage, num_lanes = self.stage, len(self.table_LM)
        count = num_lanes * NUM_CANDIDATES
        line = np.repeat(np.arange(num_lanes), NUM_CANDIDATES)
        kind = self.rng.integers(0, 4, count)
        # A random place that holds a shard, and one that does not.
        noise = self.rng.random((num_lanes, NUM_CANDIDATES, self.table_LM.shape[1]))
        held = (self.table_LM >= 0)[:, None]
        out = np.where(held, noise, -1.0).argmax(axis=2).reshape(-1)
        free = np.where(held, -1.0, noise).argmax(axis=2).reshape(-1)
        new = np.searchsorted(self.chance_T, self.rng.random(count), side="right")
        new = np.where(kind == _WIDTH, self.table_LM[line, out], new)
        width = self._random_widths(new, self.rng.random((2, count)))
        takes, puts = kind != _ADD, kind != _DROP
        place = np.where(takes, out, free)
        legal = (self.table_LM[line, place] >= 0) == takes
        again = (self.table_LM[line] == new[:, None]).any(axis=1)
        legal &= ~(puts & again) | (kind == _WIDTH)
        index = np.flatnonzero(legal)
        line, place, new, width = line[index], place[index], new[index], width[index]
        takes, puts = takes[index], puts[index]
        totals = self.totals.pick(line)
        old = np.maximum(self.table_LM[line, place], 0)
        old_width, new_width = self.width_LM[line, place] * takes, width * puts
        totals.exchange(stage, (old, old_width), (new, new_width))
        worth = self.worth_L[line] + self._worth(new, new_width) * puts
        worth -= self._worth(old, old_width) * takes
        cost = stage.costs(totals)
        score = np.where(
            cost <= self.limit_ms, _score(worth, cost, self.target_ms), -np.inf
        )
        # The best change of each set.
        order = np.lexsort((-score, line))
        first = order[np.flatnonzero(np.diff(line[order], prepend=-1))]
        first = first[score[first] > self.score_L[line[first]] + 1e-12]
        lane = line[first]
        self.table_LM[lane, place[first]] = np.where(puts[first], new[first], -1)
        self.width_LM[lane, place[first]] = np.where(puts[first], width[first], 0)
        self.totals.replace(lane, totals.pick(first))
        self.worth_L[lane], self.score_L[lane] = worth[first], score[first]

    def _random_widths(self, table_N: Ints, noise_2N: Floats) -> Ints:
        """A whole table more often than not, else any width that it may have."""
        count = self.stage.num_widths_T[table_N]
        pick = np.minimum((noise_2N[0] * count).astype(np.int64), count - 1)
        pick = np.where(noise_2N[1] < WHOLE_SHARE, count - 1, pick)
        widths: Ints = self.stage.widths_TU[table_N, pick]
        return widths


def _classes(stage: _Stage) -> Ints:
    """Which tables share a factor of their prices, `T` values from 0.

    Tables of like cost and like encoding (relative to the cost) share one: those
    nearest to the same of some tables that lie far from each other.
    """
    num_tables = len(stage.tables)
    if num_tables <= MAX_CLASSES:
        return np.arange(num_tables)
    bank = stage.bank
    encoding = bank.encoding(bank.whole_T[stage.tables])
    cost = np.maximum(stage.slope_T * stage.dims_T + stage.offset_T, 1e-12)
    points = np.column_stack([encoding / cost[:, None], np.log(cost)])
    spread = points.std(axis=0)
    points = (points - points.mean(axis=0)) / np.maximum(spread, 1e-12)
    points[:, :-1] /= math.sqrt(max(1, points.shape[1] - 1))
    centre = int(cost.argmax())
    nearest, distance = (
        np.zeros(num_tables, dtype=np.int64),
        np.full(num_tables, np.inf),
    )
    for number in range(MAX_CLASSES):
        new = np.square(points - points[centre]).sum(axis=1)
        nearest[new < distance] = number
        distance = np.minimum(distance, new)
        centre = int(distance.argmax())
    classes: Ints = np.unique(nearest, return_inverse=True)[1].astype(np.int64)
    return classes
