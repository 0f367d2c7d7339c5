"""How short a critical path can be at best, under the same cost model.

Give every shard a price, at least 0. All tables are somewhere, so whatever the
placement, some rank holds shards worth at least the mean, and an iteration takes no
less than the cheapest set worth so much:

    max over ranks of C(S_r)  >=  min { C(S) : worth(S) >= total worth / W }

Any prices give a bound. The best ones are the dual of the linear program that packs
fractions of sets into W ranks; they are found by generating columns: solve the program
over a pool of sets, search for sets that its prices value too high, add them, again.

- Prices are affine in the width: a factor for tables alike, forward and backward apart,
  times what the model says that a shard adds to a rank. A table that costs much alone
  has four of its own: whole, for each of several shards, for their width, and for all
  of it, in equal parts on the ranks of a block that share its rows or have replicas.
- A table that may be sharded in several ways is worth the least that any of them is.
  Stages that have ways of one table are bound as one *part*; parts wait for each other,
  so their bounds add up. A set has shards of all stages of its part, and one way of a
  table. What lies on all ranks is in every set, so that a set tells which tables do,
  and with that what the other stages hold in total.
- `C(S)` is forward plus backward compute plus the collectives that the set forces:
  those of a rank with so many columns and ids beside others that share the rest
  equally. Of node-wise tables on other nodes nothing is known.
- Cases of which one has to hold are bound for themselves, the lowest first. A table
  is in a way of one stage or another. Forward and backward each wait for their own
  slowest rank: where the former takes between `low` and `high`, no set takes longer,
  and each takes `low` beside its backward even if it is quicker.
- Sets that cost more than the best plan known, or need more memory than any rank has,
  are left out: no better plan holds them. More sharply, for any limit, a plan either
  has a rank above it or is bound by the sets below it. Then a table whose shards cost
  more than the limit counts with the fewest shards that keep to it, each of which pays
  for its lookups.

Where few sets exist all are looked at: a proof, if the model of collectives says that
it keeps to assumption 1 (`CommsModel.even_is_fastest`). Where costs add up, there is
another proof (see `balanced`), which is told where no estimate is much above it. Else
the bound is an estimate: the cheapest sets are looked for by local search, last by a
longer one, and cheaper ones may have been missed; there the second assumption is made,
too.

Rules on ranks (which, and in whose company) are not looked at: without them, no plan is
slower. Neither is that outputs are put in order, but beside a shard of a split table.

1. *Collectives* are shortest where all ranks hold equally many columns and ids, and for
   a rank that holds more than its share, where the others hold equally many; loosened
   where the best plan known shows otherwise.
2. *A shard alone* costs no more than any set with it; loosened by the cheapest of such
   sets among those at hand and by those that a greedy search finds.

Shapes: `L` sets, `M` places for shards in a set, `N` shards, `T` tables of a part, one
index for each way (see `ShardBank`), `H` heavy ones, `U` widths, `V` prices, `A`
amounts, `S` stages, `G` fusion groups, `E` encoding values, `W` ranks, `K` ways, `2`
forward and backward, `3` both and collectives, or the loads of collectives.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize

from torchrec_neuroshard.placement_rules import joined_sets
from torchrec_neuroshard.search.balanced import balanced_bound
from torchrec_neuroshard.search.shards import (
    Floats,
    Ints,
    ShardBank,
    legal_splits,
    split_widths,
    sum_by,
)
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = ["Bound", "lower_bound"]

Bools = npt.NDArray[np.bool_]

MAX_CLASSES = 40
"""Tables have prices each up to this many; of more, similar ones share a factor."""
MAX_OWN_PRICES = 40
"""Tables with prices of their own, those that cost most alone."""
MAX_ENUMERATED = 20_000
"""All sets of a part are looked at where there are no more."""
NUM_STARTS = 16
"""Random placements whose ranks start the pool; a quarter of that for many tables."""
MAX_TABLES = 4000
"""Of more tables too few sets could be looked at to say anything."""
MAX_START_SHARDS, SHARDS_AT_ONCE = 400_000, 400_000
"""Shards in the sets of placements that start the pool: of more, some ranks are left
out; and those of sets that are added up at a time."""
MANY_TABLES = 300
START_SPLIT_SHARE = 0.1
"""Share of the tables that are split in the random placements."""
NUM_ROUNDS, NUM_PHASE_ROUNDS, NUM_CASE_ROUNDS = 4, 6, 2
"""Rounds of linear program and search: at first, of each direction alone, and of each
case."""
MAX_CHECKS = 3
"""Times that rounds go on after a longer search found cheaper sets."""
MAX_CASE_TABLES = 40
"""Most tables with choices for which cases are told apart."""
LEAST_MIXED = 0.02
"""Part of a table that has to be in another way before cases are told apart by it."""
FIRST_REACH, REACH_SHRINKS = 0.3, 0.75
"""How far prices may move in a round, relative; less after each without a gain."""
POOL_BASE, POOL_PER_PRICE = 300, 4
"""Sets that a linear program sees: those that the prices value highest."""
MAX_NODES, PROOF_SHARE, LEAST_SECONDS = 10, 0.3, 0.5
"""What the proof for costs that add up gets (see `balanced`); a share of the time."""
PROOF_WORTH = 0.01
"""Part of an estimate that a proof may be below to be told in its place."""
MIN_GAP = 1e-3
"""The bound is good enough when it is so near the best plan."""
NUM_LANES, NUM_CANDIDATES = 24, 16
"""Sets that a search improves at a time, and changes of each that a step tries."""
NUM_FRESH, FRESH_NOISE = 6, 0.3
"""How many of these sets are new ones, and how much chance has a say in them."""
NUM_STEPS, NUM_FINAL_STEPS = 10, 40
"""Steps of a round's search, and of the one at the end."""
SPARE_PLACES = 12
"""Shards that a set may hold more than the largest set at the start of a search."""
VALUE_BIAS = 3.0
"""How much likelier tables are tried that are worth more beside their cost."""
WHOLE_SHARE = 0.6
"""Share of the shards tried that are whole tables, beside those by chance."""
OWN_SHARE = 0.2
"""Tables that cost more than this share of a rank alone may have their own prices."""
HEAVY_SHARE = 0.4
"""Tables that cost more than this share of a rank alone may need several shards."""
NUM_COMPANIONS = 64
"""Tables, the cheapest ones, that are tried beside such a shard."""
LEAST_ADDED = 1e-6
"""Share of the costliest table's price that every table has at the start."""
MAX_LIMITS = 24
"""Limits of a rank's cost that are looked at."""
_OUT_OF_TIME = 1
"""SciPy's status of a program that its solver did not end in time."""
CHUNK = 2_000_000
"""Ranks of sets whose collectives are predicted at a time."""
LEAST_LOAD = 1e-3
"""Bytes or columns of a stage in use, at least."""
TOLERANCE = 1e-9
ROUNDING = 1e-7
"""How much lower nets, of single precision, may be for sums in another order."""

_SWAP, _DROP, _ADD, _WIDTH = range(4)
_WHOLE, _SHARD, _COLUMNS, _SPREAD = range(4)


LEAST_MS = 1e-12


class Bound(NamedTuple):
    """What no plan should be below."""

    ms: float
    is_proven: bool
    """False: an estimate, since sets were looked for."""


def lower_bound(
    bank: ShardBank,
    placed: Sequence[Ints],
    critical_ms: float,
    *,
    seed: int = 0,
    deadline: float = math.inf,
    rounds: int = NUM_ROUNDS,
) -> Bound:
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
        bound rests on. 0 where nothing is known: of more than MAX_TABLES tables.
    """
    task = bank.task
    if len(task.ways) > MAX_TABLES:
        return Bound(0.0, False)
    joined = joined_sets({int(bank.stages_T[w]) for w in ways} for ways in task.ways)
    parts = [_Part(bank, stages, frozenset()) for stages in joined]
    left = deadline - time.monotonic()
    proven_ms = 0.0
    if rounds and left > LEAST_SECONDS:
        seconds = max(LEAST_SECONDS, PROOF_SHARE * left)
        proven_ms = balanced_bound(bank, seconds=seconds, nodes=MAX_NODES)
    if proven_ms >= critical_ms * (1 - MIN_GAP):
        return Bound(min(critical_ms, proven_ms), True)
    known = [part.least_ms for part in parts]
    # What leaves nothing to choose first; all at a glance at first, for better cutoffs.
    order = sorted(range(len(parts)), key=lambda i: len(parts[i].tables) > 0)
    for number in (0, rounds) if rounds and len(parts) > 1 else (rounds,):
        for i in order:
            cutoff = critical_ms - (sum(known) - known[i])
            found = _part_bound(parts[i], placed, cutoff, seed, deadline, number)
            known[i] = max(known[i], found)
    proven = bank.simulator.comms_model.even_is_fastest
    proven = proven and all(part.is_proven for part in parts)
    bound = sum(known)
    if proven_ms >= bound * (1 - (0.0 if proven else PROOF_WORTH)):
        bound, proven = proven_ms, True
    return Bound(
        critical_ms if bound >= critical_ms else bound * (1 - ROUNDING), proven
    )


def _part_bound(
    part: _Part,
    placed: Sequence[Ints],
    cutoff_ms: float,
    seed: int,
    deadline: float,
    rounds: int,
) -> float:
    """Bound one part: at first as it is, then by cases of which one has to hold."""
    best = part.costs(part.totals(part.place(placed[0]))).sum(axis=1)
    excess_ms = max(0.0, float(best.max()) - cutoff_ms)
    part.loosen(excess_ms)
    part.is_proven = excess_ms <= TOLERANCE * cutoff_ms
    if not len(part.tables):
        return min(cutoff_ms, float(best[0]))
    prices = _Prices(part, placed, cutoff_ms, np.random.default_rng(seed))
    part.is_proven &= prices.holds_all
    first = _Case(prices, _View(), cutoff_ms)
    bound = max(part.least_ms, first.bound(rounds, deadline))
    few = not part.has_choices or part.num_own <= MAX_CASE_TABLES
    enough = bound >= cutoff_ms * (1 - MIN_GAP)
    if rounds and few and not enough and time.monotonic() < deadline:
        bound = max(bound, first.split(deadline))
    return bound


@dataclass(frozen=True, slots=True)
class _View:
    """The phases that are bound."""

    weights: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def cost(self, costs_L3: Floats) -> Floats:
        """Cost of sets [ms]."""
        phases = zip(self.weights, costs_L3.T, strict=True)
        cost: Floats = np.sum([w * ms for w, ms in phases if w], axis=0)
        return cost


@dataclass(frozen=True, slots=True)
class _Sets:
    """Sets of shards; -1 and 0 fill places that hold none."""

    table_LM: Ints
    """Index among the part's tables."""
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
    amounts_LA: Floats
    """See `_Part.amounts`."""

    def pick(self, index: Ints) -> _Totals:
        return _Totals(
            self.sums_LGE[index], self.count_LG[index], self.amounts_LA[index]
        )

    def exchange(
        self, part: _Part, out: tuple[Ints, Ints], put: tuple[Ints, Ints]
    ) -> None:
        """Take a shard, (table, width), out of every set and put one in; 0 is none."""
        line = np.arange(len(self.sums_LGE))
        for (table_L, width_L), sign in ((out, -1), (put, 1)):
            encoding, amounts = part.describe(table_L, width_L)
            self.amounts_LA += sign * amounts
            group = part.groups_T[table_L]
            if self.sums_LGE.shape[1] == 1:
                self.sums_LGE[:, 0] += sign * encoding
            else:
                self.sums_LGE[line, group] += sign * encoding
            self.count_LG[line, group] += sign * (width_L > 0)

    def replace(self, line_N: Ints, other: _Totals) -> None:
        """Take over other totals at some lines."""
        self.sums_LGE[line_N] = other.sums_LGE
        self.count_LG[line_N] = other.count_LG
        self.amounts_LA[line_N] = other.amounts_LA


class _Part:
    """The tables of stages that wait for each other's choices, and what sets cost."""

    def __init__(
        self, bank: ShardBank, stages: Sequence[int], banned: frozenset[int]
    ) -> None:
        """Take what one or more stages hold.

        Args:
            bank: The task's shards.
            stages: Stages.
            banned: Ways that are left out.
        """
        self.bank, self.banned = bank, banned
        task = bank.task
        self.stages: Ints = np.array(stages)
        self.num_ranks = task.world_size
        held = np.flatnonzero(np.isin(bank.stages_T, self.stages))
        held = held[~np.isin(held, list(banned))]
        left = [[w for w in ways if w not in banned] for ways in task.ways]
        owner = {way: n for n, ways in enumerate(left) for way in ways}
        single = {ways[0] for ways in left if len(ways) == 1}
        # What has to be on every rank is no matter of price.
        fixed = np.isin(held, list(single)) & (bank.block_T[held] == self.num_ranks)
        fixed &= self.num_ranks > 1
        self.tables, self.fixed = held[~fixed], held[fixed]
        numbers = np.array([owner[w] for w in self.tables.tolist()], dtype=np.int64)
        self.own_T: Ints = np.unique(numbers, return_inverse=True)[1].reshape(-1)
        """The table proper that each is a way of, counting from 0."""
        self.num_own = int(self.own_T.max(initial=-1)) + 1
        self.siblings_TK, self.num_siblings_T = self._siblings()
        self.has_choices = self.num_own < len(self.tables)
        self.dims_T: Ints = bank.dims_T[self.tables]
        self.block_T: Ints = bank.block_T[self.tables]
        self.stage_T: Ints = np.searchsorted(self.stages, bank.stages_T[self.tables])
        present = np.unique(bank.groups_T[held])
        self.num_groups = len(present)
        self.groups_T: Ints = np.searchsorted(present, bank.groups_T[self.tables])
        self.most_bytes = float(bank.caps_W.max()) * (1 + TOLERANCE)
        self.excess_ms = 0.0
        self.is_proven = True
        """Whether no set cheaper than those looked at can exist."""
        self._fix(np.searchsorted(present, bank.groups_T[self.fixed]))
        self._totals_known()
        self.widths_TU, self.num_widths_T = self._legal_widths()
        none = np.full((1, 1), -1)
        self.least_3: Floats = self.costs(self.totals(_Sets(none, none + 1)))[0]
        """Costs of a set without shards; no collectives where these are not known."""
        if self.has_choices:
            self.least_3[2] = 0.0
        self.least_ms = float(self.least_3[2])

    def _siblings(self) -> tuple[Ints, Ints]:
        """Ways of the same table of each, `T x K`, and how many."""
        count = np.bincount(self.own_T, minlength=self.num_own)
        order = np.argsort(self.own_T, kind="stable")
        first = np.cumsum(count) - count
        place = np.arange(int(count.max(initial=1)))
        index = first[:, None] + np.minimum(place, count[:, None] - 1)
        return order[index][self.own_T], count[self.own_T]

    def _fix(self, group_N: Ints) -> None:
        """What every set holds besides: tables that have to be on all ranks."""
        bank = self.bank
        rows = bank.whole_T[self.fixed]
        self._sums_GE = sum_by(group_N, bank.encoding(rows), self.num_groups)
        self._count_G = np.bincount(group_N, minlength=self.num_groups)
        self._extra_2 = bank.extra(rows).sum(axis=0)
        size = bank.bytes(self.fixed, bank.dims_T[self.fixed])
        self._bytes = float(size.sum())
        stage = np.searchsorted(self.stages, bank.stages_T[self.fixed])
        self._loads_S3 = sum_by(stage, bank.loads_of(rows), len(self.stages))
        self._total_S3 = sum_by(stage, self._total_loads(self.fixed), len(self.stages))

    def _total_loads(self, table_N: Ints) -> Floats:
        """Loads of whole tables on all ranks together, `N x 3`."""
        bank = self.bank
        line, rank, alike = bank.parts(table_N)
        table = table_N[line]
        loads = bank.loads_of(bank.rows(table, bank.dims_T[table], rank))
        return sum_by(line, loads * alike[:, None], len(table_N))

    def _totals_known(self) -> None:
        """What stages hold in total, as far as a set tells.

        A table whose ways are of one stage is there. One that is on no rank of the set
        is not on all ranks; its other ways may be of one stage.
        """
        total_T3 = self._total_loads(self.tables)
        num_stages = len(self.stages)
        self._known_TS3 = np.zeros((len(self.tables), num_stages, 3))
        if not self.has_choices:
            self._total_S3 += sum_by(self.stage_T, total_T3, num_stages)
        everywhere = self.block_T == self.num_ranks
        for number in range(self.num_own if self.has_choices else 0):
            ways = np.flatnonzero(self.own_T == number)
            left = ways[~everywhere[ways]] if self.num_ranks > 1 else ways
            if len(set(self.stage_T[ways].tolist())) == 1:
                left = ways
            known = np.zeros((num_stages, 3))
            if len(set(self.stage_T[left].tolist())) == 1:
                known[self.stage_T[left[0]]] = total_T3[left].min(axis=0)
            self._total_S3 += known
            for way in ways.tolist():
                own = np.zeros((num_stages, 3))
                own[self.stage_T[way]] = total_T3[way]
                self._known_TS3[way] = own - known
        self._tells = bool(self._known_TS3.any())
        # All ranks of a node send equally much where they pool.
        kinds = {
            int(s): int(b) for s, b in zip(self.stage_T, self.block_T, strict=True)
        }
        self._alike_S = [
            kinds.get(i, 1)
            if self.bank.pooled_S[s] and kinds.get(i, 1) < self.num_ranks
            else 1
            for i, s in enumerate(self.stages.tolist())
        ]

    def loosen(self, excess_ms: float) -> None:
        """Lower the collectives, which a placement found to be shorter than assumed."""
        self.excess_ms = excess_ms
        self.least_3[2] = self.least_ms = max(0.0, self.least_ms - excess_ms)

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
                    splits = reversed(legal_splits(task, table))
                    known[key] = [split_widths(task, table, k)[0] for k in splits]
            found.append(known[key])
        count = np.array([len(w) for w in found], dtype=np.int64)
        widths = np.zeros((len(found), int(count.max(initial=0))), dtype=np.int64)
        if found:
            held = np.arange(widths.shape[1]) < count[:, None]
            widths[held] = np.concatenate(found)
        return widths, count

    def describe(self, table_N: Ints, width_N: Ints) -> tuple[Floats, Floats]:
        """Encodings and amounts of shards, `N x E` and `N x A`; of width 0, zeros.

        Amounts are what kernels take besides, memory, and of each stage: loads, shards
        of split tables, and what a set with the shard tells of the loads of all ranks.
        """
        bank, table = self.bank, self.tables[table_N]
        rows = bank.rows(table, width_N)
        num_stages, line = len(self.stages), np.arange(len(rows))
        loads = bank.loads_of(rows)
        stage = self.stage_T[table_N]
        columns = [bank.extra(rows), bank.bytes(table, width_N)[:, None]]
        if num_stages > 1:
            own = np.zeros((len(rows), num_stages, 3))
            own[line, stage] = loads
            loads = own.reshape(len(rows), 3 * num_stages)
        columns.append(loads)
        split = np.zeros((len(rows), num_stages))
        if bank.has_order:
            split[line, stage] = (width_N > 0) & (width_N < self.dims_T[table_N])
        columns.append(split)
        if self._tells:
            known = self._known_TS3[table_N].reshape(len(rows), 3 * num_stages)
            columns.append(known * (width_N > 0)[:, None])
        return bank.encoding(rows), np.concatenate(columns, axis=1)

    def totals(self, sets: _Sets) -> _Totals:
        """Sum up sets."""
        num_sets, num_groups = len(sets), self.num_groups
        line, place = np.nonzero(sets.table_LM >= 0)
        held, width = sets.table_LM[line, place], sets.width_LM[line, place]
        cell = line * num_groups + self.groups_T[held]
        shape = (num_sets, num_groups)
        encoding, amounts = self.describe(held, width)
        sums = sum_by(cell, encoding, math.prod(shape)).reshape(*shape, -1)
        count = np.bincount(cell, minlength=math.prod(shape)).reshape(shape)
        return _Totals(
            sums + self._sums_GE,
            count + self._count_G,
            sum_by(line, amounts, num_sets),
        )

    def costs_of(self, sets: _Sets, comms: bool = True) -> Floats:
        """Costs of sets, some at a time; see `costs`."""
        ends_L = np.cumsum((sets.table_LM >= 0).sum(axis=1)) // SHARDS_AT_ONCE
        parts = np.split(np.arange(len(sets)), np.flatnonzero(np.diff(ends_L)) + 1)
        totals = (self.totals(sets.pick(p)) for p in parts)
        return np.concatenate([self.costs(t, comms) for t in totals])

    def costs(self, totals: _Totals, comms: bool = True) -> Floats:
        """Forward, backward and collectives of sets, `L x 3` [ms].

        Infinite where no rank has the memory; collectives are 0 where not asked for.
        """
        compute = np.zeros((*totals.count_LG.shape, 2))
        held = totals.count_LG > 0
        if held.any():
            compute[held] = self.bank.predict(totals.sums_LGE[held])
        costs = np.zeros((len(compute), 3))
        costs[:, :2] = compute.sum(axis=1) + totals.amounts_LA[:, :2] + self._extra_2
        step = max(1, CHUNK // self.num_ranks)
        for i in range(0, len(costs) if comms else 0, step):
            costs[i : i + step, 2] = self._comms(totals.amounts_LA[i : i + step])
        costs[totals.amounts_LA[:, 2] + self._bytes > self.most_bytes] = np.inf
        return costs

    def _comms(self, amounts_LA: Floats) -> Floats:
        """Collectives of a rank with these loads beside others alike, `L` [ms]."""
        bank, num_ranks, num_stages = self.bank, self.num_ranks, len(self.stages)
        num_lines = len(amounts_LA)
        loads, split, known = np.split(
            amounts_LA[:, 3:], [3 * num_stages, 4 * num_stages], axis=1
        )
        own_LS3 = loads.reshape(num_lines, num_stages, 3) + self._loads_S3
        total_LS3 = np.broadcast_to(self._total_S3, own_LS3.shape)
        if self._tells:
            total_LS3 = total_LS3 + known.reshape(own_LS3.shape)
            # What rounding leaves of tables that are taken off is no load of a stage.
            total_LS3 = np.where(total_LS3 > LEAST_LOAD, total_LS3, 0.0)
        own_LS3 = np.maximum(own_LS3, total_LS3 / num_ranks)
        ms = np.zeros(num_lines)
        order = np.zeros((num_lines, bank.task.num_stages))
        for i, stage in enumerate(self.stages.tolist()):
            # Sets that hold no more than their share of a stage are all alike in it.
            different, which_L = np.unique(
                np.concatenate([own_LS3[:, i], total_LS3[:, i]], axis=1),
                axis=0,
                return_inverse=True,
            )
            loads = np.empty((len(different), num_ranks, 3))
            for load in range(3):
                alike = self._alike_S[i] if load == 1 else 1
                own, total = different[:, load], different[:, 3 + load]
                left = np.maximum(total - alike * own, 0.0) / max(1, num_ranks - alike)
                loads[:, :alike, load] = own[:, None]
                loads[:, alike:, load] = left[:, None]
            # Ranks with as much to do take as long, in the node of the first or not.
            kinds = [0, min(self._alike_S[i], num_ranks - 1), num_ranks - 1]
            stage_ms = bank.simulator.stage_comms(stage, loads)[:, kinds]
            ms += stage_ms.max(axis=1).sum(axis=1)[which_L.reshape(-1)]
            if bank.has_order and bank.pooled_S[stage] and self._alike_S[i] == 1:
                order[:, stage] = total_LS3[:, i, 1] * (split[:, i] > 0.5)
        if bank.has_order:
            ms += bank.order_ms(order)
        return np.maximum(ms - self.excess_ms, 0.0)

    def place(self, width_TW: Ints) -> _Sets:
        """Sets that the ranks of a placement hold; one without shards at least."""
        table, rank = np.nonzero(width_TW[self.tables])
        if not len(table):
            return _Sets(np.full((1, 1), -1), np.zeros((1, 1), dtype=np.int64))
        kept = np.flatnonzero(rank % -(-len(rank) // MAX_START_SHARDS) == 0)
        table, rank = table[kept], rank[kept]
        return _gather(rank, table, width_TW[self.tables[table], rank])

    def place_of(self, table_N: Ints, width_N: Ints) -> Ints:
        """Where in `widths_TU` a table has a width."""
        found: Ints = (self.widths_TU[table_N] == width_N[:, None]).argmax(axis=1)
        return found

    @property
    def has_few_sets(self) -> bool:
        """Whether all sets there are can be looked at."""
        options = np.bincount(self.own_T, weights=self.num_widths_T) + 1
        return bool(math.prod(options.tolist()) <= MAX_ENUMERATED)

    def enumerate(self) -> _Sets:
        """All sets there are, place n for table n."""
        options: list[list[tuple[int, int]]] = [[(-1, 0)] for _ in range(self.num_own)]
        for table, own in enumerate(self.own_T.tolist()):
            widths = self.widths_TU[table, : self.num_widths_T[table]].tolist()
            options[own] += [(table, width) for width in widths]
        grid = np.meshgrid(*(np.arange(len(o)) for o in options), indexing="ij")
        picks = [
            np.array(o)[axis.reshape(-1)] for o, axis in zip(options, grid, strict=True)
        ]
        shards = np.stack(picks, axis=1)[1:]
        return _Sets(shards[..., 0].copy(), shards[..., 1].copy())

    def singles(self, table: Ints) -> _Sets:
        """Tables alone: whole, about half of each, and as narrow as it may be."""
        whole = self.num_widths_T[table] - 1
        shards = np.concatenate(
            [
                np.stack([table, self.widths_TU[table, place]], axis=1)
                for place in (np.zeros_like(table), whole // 2, whole)
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


class _Prices:
    """Prices of one part's shards, and the sets by which they are judged.

    Tables have two prices of their class, or four of their own. Sets of a pool stand
    for all sets; where few exist, the pool holds all of them.
    """

    def __init__(
        self,
        part: _Part,
        placed: Sequence[Ints] | _Prices,
        cutoff_ms: float,
        rng: np.random.Generator,
    ) -> None:
        """Describe the tables and start the pool.

        Args:
            part: The tables.
            placed: Placements found by the search, or prices of which the sets, as far
                as they are possible here, are taken over.
            cutoff_ms: What plans better than the best one known keep to.
            rng: Of the sets looked at.
        """
        self.part, self.rng = part, rng
        self.num_ranks = part.num_ranks
        self._guess()
        most = np.asarray(part.bank.task.max_shards)[part.tables]
        self.most_T: Ints = np.clip(most, 1, self.num_ranks)
        self.moves_T = part.block_T == 1
        every = np.arange(len(part.tables))
        self.alone_T3: Floats = self._alone_costs(every, part.dims_T)
        self._lay_out(cutoff_ms)
        alone = every
        if part.num_own > MANY_TABLES:
            # Of so many, the light ones are never worth a rank: no set by themselves.
            alone = np.flatnonzero(self.heavy_T >= 0)
        singles = part.singles(alone)
        self.holds_all = part.has_few_sets
        if self.holds_all:
            self.pool = part.enumerate()
        elif isinstance(placed, _Prices):
            self.pool = _Sets.join([self._inherited(placed), singles])
        else:
            parts = [part.place(w) for w in placed]
            self.pool = _Sets.join([*parts, *self._random_sets(), singles])
        self.costs_L3 = part.costs_of(self.pool)
        usable = np.isfinite(self.costs_L3[:, 0])
        if not part.has_choices and not self.holds_all:
            usable &= self.costs_L3.sum(axis=1) <= cutoff_ms * (1 + TOLERANCE)
        index = np.flatnonzero(usable)
        self.pool, self.costs_L3 = self.pool.pick(index), self.costs_L3[index]
        self.load_LV = self._loads(self.pool)
        self._describe_heavy(cutoff_ms)

    def _guess(self) -> None:
        """Guess what shards add to a rank, affine in the width: the shape of prices.

        All ways of a table have the price of the cheapest one, in equal parts on all
        ranks of a block.
        """
        part, bank = self.part, self.part.bank
        dims_T, size = part.dims_T, part.block_T[:, None]
        narrow = np.where(part.block_T == 1, COLUMN_MULTIPLE, dims_T)
        narrow_T2 = bank.added(bank.rows(part.tables, narrow)) * size
        whole_T2 = bank.added(bank.whole_T[part.tables]) * size
        whole_T2 = np.maximum(whole_T2, LEAST_ADDED * whole_T2.max(axis=0))
        wide = np.maximum(dims_T - COLUMN_MULTIPLE, 1)[:, None]
        slope_T2 = (whole_T2 - narrow_T2) / wide
        offset_T2 = np.clip(narrow_T2 - slope_T2 * COLUMN_MULTIPLE, 0.0, whole_T2)
        offset_T2[part.block_T > 1] = 0.0
        self.cost_T2: Floats = whole_T2
        """What the whole of each costs on all its ranks together."""
        total_T = whole_T2.sum(axis=1)
        if part.has_choices:
            total_T = total_T + _comms_guess(part)
        first_N = np.lexsort((total_T, part.own_T))
        first_N = first_N[np.flatnonzero(np.diff(part.own_T[first_N], prepend=-1))]
        self.best_T: Ints = first_N[part.own_T]
        """The way of the same table that is thought cheapest."""
        ratio_T2 = whole_T2[self.best_T] / np.maximum(whole_T2, LEAST_MS)
        self.offset_T2: Floats = offset_T2 * ratio_T2
        whole_T2 = whole_T2[self.best_T]
        self.slope_T2: Floats = (whole_T2 - self.offset_T2) / dims_T[:, None]
        self.whole_T2: Floats = whole_T2

    def _alone_costs(self, table_N: Ints, width_N: Ints) -> Floats:
        """Costs of shards alone, `N x 3` [ms].

        Without collectives where these depend on what lies on other ranks.
        """
        comms = not self.part.has_choices
        return self.part.costs_of(_Sets.alone(table_N, width_N), comms)

    def _lay_out(self, cutoff_ms: float) -> None:
        """Say which prices there are, and which of them each table has."""
        part = self.part
        cost_T = np.where(self.moves_T, self.alone_T3.sum(axis=1), 0.0)
        cost_N = np.zeros(part.num_own)
        np.maximum.at(cost_N, part.own_T, cost_T)
        dearest = np.argsort(-cost_N, kind="stable")[:MAX_OWN_PRICES]
        least = self.share_of(OWN_SHARE, cutoff_ms)
        self.heavy_H: Ints = np.sort(dearest[cost_N[dearest] > least])
        """Tables proper that have prices of their own."""
        place_N = np.full(part.num_own, -1)
        place_N[self.heavy_H] = np.arange(len(self.heavy_H))
        self.heavy_T: Ints = place_N[part.own_T]
        self.class_T = _classes(part, self.best_T, self.whole_T2)
        self.num_classes = int(self.class_T.max()) + 1
        self.num_light = 2 * self.num_classes
        self.num_prices = self.num_light + 4 * len(self.heavy_H)
        self.spread_H: Bools = np.zeros(len(self.heavy_H), dtype=bool)
        blocks = (self.heavy_T >= 0) & ~self.moves_T
        self.spread_H[self.heavy_T[blocks]] = True

    def share_of(self, share: float, cutoff_ms: float) -> float:
        """Part of what a rank may do besides what every rank does [ms]."""
        every_ms = float(self.part.least_3.sum())
        return every_ms + share * max(0.0, cutoff_ms - every_ms)

    def start(self, weights: tuple[float, float, float]) -> Floats:
        """Prices as guessed."""
        scale = np.array(weights[:2])
        price_V = np.zeros(self.num_prices)
        price_V[: self.num_light] = np.tile(scale, self.num_classes)
        own = price_V[self.num_light :].reshape(-1, 4)
        best = np.flatnonzero(self.best_T == np.arange(len(self.best_T)))
        best = best[self.heavy_T[best] >= 0]
        heavy = self.heavy_T[best]
        whole, offset = self.whole_T2[best] @ scale, self.offset_T2[best] @ scale
        own[heavy] = np.stack([whole, offset, whole - offset, whole], axis=1)
        return price_V

    def affine(self, price_V: Floats) -> tuple[Floats, Floats, Floats]:
        """Price of a shard, of a column, and of a whole table on one rank, `T`."""
        part = self.part
        factor_T2 = price_V[: self.num_light].reshape(-1, 2)[self.class_T]
        offset_T = (factor_T2 * self.offset_T2).sum(axis=1)
        slope_T = (factor_T2 * self.slope_T2).sum(axis=1)
        whole_T = offset_T + slope_T * part.dims_T
        own = price_V[self.num_light :].reshape(-1, 4)
        held = np.flatnonzero((self.heavy_T >= 0) & self.moves_T)
        if len(held):
            prices = own[self.heavy_T[held]]
            offset_T[held] = prices[:, _SHARD]
            slope_T[held] = prices[:, _COLUMNS] / part.dims_T[held]
            whole_T[held] = prices[:, _WHOLE]
        spread = np.flatnonzero((self.heavy_T >= 0) & ~self.moves_T)
        if len(spread):
            whole_T[spread] = own[self.heavy_T[spread], _SPREAD]
            slope_T[spread] = whole_T[spread] / part.dims_T[spread]
            offset_T[spread] = 0.0
        size = part.block_T
        return offset_T / size, slope_T / size, whole_T / size

    def _loads(self, sets: _Sets) -> Floats:
        """How often each price counts in each set, `L x V`."""
        part = self.part
        line, place = np.nonzero(sets.table_LM >= 0)
        table, width = sets.table_LM[line, place], sets.width_LM[line, place]
        heavy, dim = self.heavy_T[table], part.dims_T[table]
        loads = np.zeros(len(sets) * self.num_prices)

        def add(index: Ints, price: Ints, amount: Floats) -> None:
            cell = line[index] * self.num_prices + price
            loads[:] += np.bincount(cell, weights=amount, minlength=len(loads))

        light = np.flatnonzero(heavy < 0)
        guess = self.offset_T2[table] + self.slope_T2[table] * width[:, None]
        guess /= part.block_T[table][:, None]
        for i in range(2):
            add(light, 2 * self.class_T[table[light]] + i, guess[light, i])
        first = self.num_light + 4 * heavy
        moves = (heavy >= 0) & self.moves_T[table]
        whole = np.flatnonzero(moves & (width == dim))
        add(whole, first[whole] + _WHOLE, np.ones(len(whole)))
        split = np.flatnonzero(moves & (width < dim))
        add(split, first[split] + _SHARD, np.ones(len(split)))
        share = width / dim
        add(split, first[split] + _COLUMNS, share[split])
        spread = np.flatnonzero((heavy >= 0) & ~self.moves_T[table])
        share = share / part.block_T[table]
        add(spread, first[spread] + _SPREAD, share[spread])
        return loads.reshape(len(sets), self.num_prices)

    def _inherited(self, other: _Prices) -> _Sets:
        """Sets of a pool without the ways left out here; fixed tables are in all."""
        part, pool = self.part, other.pool
        way_LM = np.where(pool.table_LM >= 0, other.part.tables[pool.table_LM], -1)
        legal: Bools = ~np.any(np.isin(way_LM, list(part.banned)), axis=1)
        line, place = np.nonzero(legal[:, None] & np.isin(way_LM, part.tables))
        table = np.searchsorted(part.tables, way_LM[line, place])
        return _gather(line, table, pool.width_LM[line, place])

    def _random_sets(self) -> list[_Sets]:
        """Ranks of random balanced placements, some of the tables split."""
        part, rng, bank = self.part, self.rng, self.part.bank
        num_ranks = self.num_ranks
        if num_ranks < 2:
            return []
        starts = NUM_STARTS if part.num_own <= MANY_TABLES else NUM_STARTS // 4
        found, spread = [], []
        for number in range(starts):
            chosen = self._random_ways(number)
            moved = chosen[self.moves_T[chosen]]
            spread.append(chosen[~self.moves_T[chosen]])
            tables = part.tables[moved]
            split = rng.random(len(tables)) < START_SPLIT_SHARE
            rows = [bank.whole_T[tables[~split]]]
            for t in tables[split].tolist():
                options = bank.splits(t)
                k = options[int(rng.integers(len(options)))]
                rows.append(bank.rows(np.full(k, t), split_widths(bank.task, t, k)))
            found.append(rng.permutation(np.concatenate(rows)))
        rows_LN = np.full((starts, max(1, *map(len, found))), -1, dtype=np.int64)
        for line, rows_N in zip(rows_LN, found, strict=True):
            line[: len(rows_N)] = rows_N
        # One after the other, from another rank in each turn.
        place_N = np.arange(rows_LN.shape[1])
        dealt_N = (place_N + place_N // num_ranks) % num_ranks
        rank_LN = np.where(rows_LN >= 0, dealt_N, -1)
        # No rank holds two shards of a table.
        key_LN = bank.table(np.maximum(rows_LN, 0)) * num_ranks + rank_LN
        for number, key_N in enumerate(key_LN):
            twice = np.ones(len(key_N), dtype=bool)
            twice[np.unique(key_N, return_index=True)[1]] = False
            rank_LN[number, twice] = -1
        num_shards = sum(len(s) for s in found)
        num_shards += sum(int(part.block_T[ways].sum()) for ways in spread)
        step = -(-num_shards // MAX_START_SHARDS)
        lane, place = np.nonzero((rank_LN >= 0) & (rank_LN % step == 0))
        used = rows_LN[lane, place]
        shards = [
            np.stack(
                [
                    lane * num_ranks + rank_LN[lane, place],
                    np.searchsorted(part.tables, bank.table(used)),
                    bank.width(used),
                ]
            )
        ]
        for number, ways in enumerate(spread):
            for way in ways.tolist():
                size = int(part.block_T[way])
                first = int(rng.integers(num_ranks // size)) * size
                rank = first + np.arange(size)
                sets = number * num_ranks + rank[rank % step == 0]
                fill = np.full((2, len(sets)), [[way], [part.dims_T[way]]])
                shards.append(np.concatenate([sets[None], fill]))
        return [_gather(*np.concatenate(shards, axis=1))]

    def _random_ways(self, number: int) -> Ints:
        """A way of each table: of many tables the one thought best, of some others."""
        part, rng = self.part, self.rng
        first = np.flatnonzero(np.diff(np.sort(part.own_T), prepend=-1))
        if not part.has_choices:
            return np.argsort(part.own_T, kind="stable")[first]
        chance = (number + 0.5) / NUM_STARTS
        noise = rng.random(len(part.tables))
        # The other ways are tried of ever more tables.
        noise -= 2.0 * (self.best_T == np.arange(len(noise)))
        noise += (
            4.0
            * (rng.random(part.num_own) < chance)[part.own_T]
            * (self.best_T == np.arange(len(noise)))
        )
        order = np.lexsort((noise, part.own_T))
        return order[first]

    def _describe_heavy(self, cutoff_ms: float) -> None:
        """Costs of shards of the tables that cost most, alone and in company.

        `alone_HU3` is infinite where a table has no such width, `dips_H` what the best
        company makes of the costs.
        """
        part = self.part
        cost_T = self.alone_T3.sum(axis=1)
        wanted = self.moves_T & (cost_T > self.share_of(HEAVY_SHARE, cutoff_ms))
        self.split_H: Ints = np.flatnonzero(self.moves_T if self.holds_all else wanted)
        """Tables of which it is looked at how many shards they need."""
        widths_HU = part.widths_TU[self.split_H]
        self.alone_HU3: Floats = np.full((*widths_HU.shape, 3), np.inf)
        self.dips_H: Floats = np.ones(len(self.split_H))
        if self.holds_all or not len(self.split_H):
            return
        lightest = np.argsort(cost_T, kind="stable")
        lightest = lightest[self.moves_T[lightest]][:NUM_COMPANIONS]
        place = np.arange(part.widths_TU.shape[1])
        line_N, place_N = np.nonzero(place < part.num_widths_T[self.split_H, None])
        width_N = part.widths_TU[self.split_H[line_N], place_N]
        costs = self._alone_costs(self.split_H[line_N], width_N)
        self.alone_HU3[line_N, place_N] = costs
        cost_HU = self.alone_HU3.sum(axis=2)
        for line, table in enumerate(self.split_H.tolist()):
            possible = np.flatnonzero(np.isfinite(cost_HU[line]))
            if len(possible):
                widest = int(possible[-1])
                width = int(part.widths_TU[table, widest])
                company = lightest[part.own_T[lightest] != part.own_T[table]]
                least = self._in_company(table, width, company)
                self.dips_H[line] = min(1.0, least / cost_HU[line, widest])

    def _in_company(self, table: int, width: int, company_N: Ints) -> float:
        """Cost of a shard with others that lower the cost most, one after another."""
        part = self.part
        held = _Sets.alone(np.array([table]), np.array([width]))
        cost = np.inf
        while len(company_N):
            totals = part.totals(held).pick(np.zeros_like(company_N))
            dims = part.dims_T[company_N]
            none = np.zeros_like(company_N)
            totals.exchange(part, (none, none), (company_N, dims))
            cost_N = part.costs(totals, comms=not part.has_choices).sum(axis=1)
            best = int(cost_N.argmin())
            if cost_N[best] >= cost:
                break
            cost = float(cost_N[best])
            held = _Sets(
                np.append(held.table_LM, company_N[best])[None],
                np.append(held.width_LM, dims[best])[None],
            )
            company_N = company_N[part.own_T[company_N] != part.own_T[company_N[best]]]
        return cost

    def add(self, sets: _Sets) -> None:
        """Add sets to the pool."""
        costs = self.part.costs_of(sets)
        self.pool = _Sets.join([self.pool, sets])
        self.load_LV = np.concatenate([self.load_LV, self._loads(sets)])
        self.costs_L3 = np.concatenate([self.costs_L3, costs])


@dataclass(frozen=True, slots=True)
class _Limit:
    """Plans that keep the cost of every rank to a limit."""

    ms: float
    light_V: Floats
    """How often the prices of classes count in all tables together."""
    fewest_H: Ints
    """Shards that each table with prices of its own then needs at least."""
    split_H: Bools
    """Whether it may be in several shards."""
    whole_H: Bools
    """Whether it may be whole on a rank."""
    spread_H: Bools
    """Whether it may be on all ranks of a block."""

    def total(self, price_V: Floats) -> float:
        """What all tables are worth."""
        num_light = len(self.light_V)
        own = price_V[num_light:].reshape(-1, 4)
        split = np.maximum(self.fewest_H, 2) * own[:, _SHARD] + own[:, _COLUMNS]
        least = np.where(self.whole_H, own[:, _WHOLE], np.inf)
        least = np.minimum(least, np.where(self.split_H, split, np.inf))
        least = np.minimum(least, np.where(self.spread_H, own[:, _SPREAD], np.inf))
        return float(self.light_V @ price_V[:num_light] + least.sum())


class _Case:
    """The bound of one view, made better round by round."""

    def __init__(self, prices: _Prices, view: _View, cutoff_ms: float) -> None:
        """Start with prices that are guessed."""
        self.prices, self.view = prices, view
        self.cutoff_ms = cutoff_ms * (1 + TOLERANCE)
        self.best_V = prices.start(view.weights)
        self.best_ms = 0.0
        self.cost_L = view.cost(prices.costs_L3)
        self.limits = self._limits()
        self._used: tuple[Ints, Floats] = (np.zeros(0, np.int64), np.zeros(0))

    # Cases of which one has to hold.

    def split(self, deadline: float) -> float:
        """Tell cases apart and return the least of their bounds [ms]."""
        table = self._undecided()
        if table is not None:
            return self._split_ways(table, deadline)
        least = [self.prices.part.least_ms]
        for weights in ((0.0, 1.0, 0.0), (1.0, 0.0, 0.0)):
            case = _Case(self.prices, _View(weights), self.cutoff_ms - sum(least))
            least.append(case.bound(NUM_PHASE_ROUNDS, deadline))
        return max(self.best_ms, sum(least))

    def _undecided(self) -> int | None:
        """The table proper, if any, of which the program mixes ways most."""
        prices, part = self.prices, self.prices.part
        index, weight = self._used
        if not part.has_choices or not len(index):
            return None
        held = prices.pool.table_LM[index]
        line, place = np.nonzero(held >= 0)
        table, width = held[line, place], prices.pool.width_LM[index[line], place]
        share = weight[line] * width / (part.dims_T[table] * part.block_T[table])
        num_stages = len(part.stages)
        cell = part.own_T[table] * num_stages + part.stage_T[table]
        sums = np.bincount(cell, weights=share, minlength=part.num_own * num_stages)
        share_NS = sums.reshape(part.num_own, num_stages)
        total_N = np.maximum(share_NS.sum(axis=1), 1e-12)
        mixed_N = 1.0 - share_NS.max(axis=1) / total_N
        kinds = np.zeros_like(share_NS)
        kinds[part.own_T, part.stage_T] = 1
        mixed_N[kinds.sum(axis=1) < 2] = 0.0
        cost_N = np.zeros(part.num_own)
        np.maximum.at(cost_N, part.own_T, prices.whole_T2.sum(axis=1))
        most = int((mixed_N * cost_N).argmax())
        return most if mixed_N[most] > LEAST_MIXED else None

    def _split_ways(self, own: int, deadline: float) -> float:
        """Tell cases apart by the stage that a table's way is of."""
        part = self.prices.part
        ways = np.flatnonzero(part.own_T == own)
        found = []
        for stage in np.unique(part.stage_T[ways]).tolist():
            others = part.tables[ways[part.stage_T[ways] != stage]].tolist()
            less = _Part(part.bank, part.stages.tolist(), part.banned.union(others))
            less.loosen(part.excess_ms)
            if not len(less.tables):
                cost_ms = float(self.view.cost(less.least_3[None])[0])
                found.append(min(cost_ms, self.cutoff_ms))
                continue
            prices = _Prices(less, self.prices, self.cutoff_ms, self.prices.rng)
            case = _Case(prices, self.view, self.cutoff_ms)
            found.append(case.bound(NUM_CASE_ROUNDS, deadline))
        return min(found)

    def _limits(self) -> list[_Limit]:
        """List limits of a rank's cost that plans can keep to, the cutoff last.

        Just above each of the others some table needs fewer shards than just below.
        """
        prices, part = self.prices, self.prices.part
        alone_HU = self._alone()
        heavy_H = prices.split_H
        dims_H1 = part.dims_T[heavy_H][:, None]
        widths_HU = part.widths_TU[heavy_H]
        order_HU = np.argsort(alone_HU, axis=1, kind="stable")
        cost_HU = np.take_along_axis(alone_HU, order_HU, axis=1)
        widest_HU = np.take_along_axis(widths_HU, order_HU, axis=1)
        widest_HU = np.maximum.accumulate(np.maximum(widest_HU, 1), axis=1)
        fewest_HU = -(-dims_H1 // widest_HU)
        falls_HU = np.diff(fewest_HU, axis=1, prepend=-1) != 0
        steps = np.unique(cost_HU[falls_HU & (cost_HU <= self.cutoff_ms)])
        levels = [*(steps * (1 - TOLERANCE)).tolist(), self.cutoff_ms]

        def limit(number: int) -> _Limit | None:
            fewest_T = np.where(prices.moves_T, 1, 0)
            fits_HU = alone_HU <= levels[number]
            widest_H = np.where(fits_HU, widths_HU, 0).max(axis=1, initial=0)
            few_H = -(-dims_H1[:, 0] // np.maximum(widest_H, 1))
            fits_H = (widest_H > 0) & (few_H <= prices.most_T[heavy_H])
            fewest_T[heavy_H] = np.where(fits_H, few_H, 0)
            return self._limit(levels[number], fewest_T)

        # Every plan has a rank above the limits that none can keep to.
        first = bisect.bisect_left(
            range(len(levels)), True, key=lambda n: limit(n) is not None
        )
        self.floor_ms = levels[first - 1] if first else 0.0
        use = np.unique(
            np.linspace(first, len(levels) - 1, MAX_LIMITS).astype(np.int64)
        )
        found = [limit(n) for n in use.tolist() if n < len(levels)]
        return [n for n in found if n is not None]

    def _limit(self, limit_ms: float, fewest_T: Ints) -> _Limit | None:
        """Count every table with the fewest shards; None where one has no way left."""
        prices, part = self.prices, self.prices.part
        spread_T = ~prices.moves_T
        possible_N = np.zeros(part.num_own, dtype=bool)
        possible_N[part.own_T[spread_T | (fewest_T > 0)]] = True
        if not possible_N.all():
            return None
        # Of the ways of one table the fewest; one that may be spread has one share.
        few_N = np.full(part.num_own, part.num_ranks + 1)
        moved = np.flatnonzero(fewest_T > 0)
        np.minimum.at(few_N, part.own_T[moved], fewest_T[moved])
        most_N = np.zeros(part.num_own, dtype=np.int64)
        np.maximum.at(most_N, part.own_T[moved], prices.most_T[moved])
        spread_N = np.zeros(part.num_own, dtype=bool)
        spread_N[part.own_T[spread_T]] = True
        light = np.flatnonzero(
            (prices.heavy_T < 0) & (prices.best_T == np.arange(len(prices.best_T)))
        )
        own = part.own_T[light]
        times = np.where(spread_N[own] | part.has_choices, 1, few_N[own])
        extra = np.maximum(times - 1, 0)[:, None] * prices.offset_T2[light]
        worth = prices.whole_T2[light] + extra
        light_V = np.zeros(prices.num_light)
        for i in range(2):
            np.add.at(light_V, 2 * prices.class_T[light] + i, worth[:, i])
        few_H, most_H = few_N[prices.heavy_H], most_N[prices.heavy_H]
        return _Limit(
            ms=limit_ms,
            light_V=light_V,
            fewest_H=few_H,
            split_H=(few_H <= most_H) & (most_H > 1),
            whole_H=few_H == 1,
            spread_H=spread_N[prices.heavy_H],
        )

    def _alone(self) -> Floats:
        """Bound the cost of sets with a shard of a table that costs much, `H x U`."""
        prices, part = self.prices, self.prices.part
        shape = prices.alone_HU3.shape
        alone_HU = self.view.cost(prices.alone_HU3.reshape(-1, 3)).reshape(shape[:2])
        alone_HU *= prices.dips_H[:, None]
        line_T = np.full(len(part.tables), -1)
        line_T[prices.split_H] = np.arange(len(prices.split_H))
        line, column = np.nonzero(prices.pool.table_LM >= 0)
        held, width = (
            a[line, column] for a in (prices.pool.table_LM, prices.pool.width_LM)
        )
        use = np.flatnonzero(line_T[held] >= 0)
        held, width, line = held[use], width[use], line[use]
        place = part.place_of(held, width)
        np.minimum.at(alone_HU, (line_T[held], place), self.cost_L[line])
        return alone_HU

    # What the prices say.

    def _bound_of(self, price_V: Floats) -> float:
        """Best bound over the limits, by the pool's sets.

        A plan breaks a limit, or some rank of it holds a set worth the mean.
        """
        worth_L = self.prices.load_LV @ price_V
        bound = self.floor_ms
        for limit in self.limits:
            share = limit.total(price_V) / self.prices.num_ranks
            if not share > 0:
                continue  # where all is worth nothing, any set is worth the mean
            enough = worth_L >= share * (1 - TOLERANCE)
            least = float(self.cost_L[enough].min(initial=limit.ms))
            bound = max(bound, least)
        return bound

    def _next_limit(self, bound_ms: float) -> _Limit:
        """The lowest limit that could give a better bound.

        Where all is worth nothing by the prices at hand, a limit gives none.
        """
        able = [n for n in self.limits if n.total(self.best_V) > 0]
        above = [n for n in able if n.ms > bound_ms * (1 + 1e-6)]
        return above[0] if above else able[-1]

    # Rounds.

    def bound(self, num_rounds: int, deadline: float) -> float:
        """Improve the prices and return the bound [ms]."""
        self.best_ms = self._improve(num_rounds, deadline)
        return self.best_ms

    def _improve(self, num_rounds: int, deadline: float) -> float:
        if not self.limits:
            return self.cutoff_ms
        if not self.limits[-1].total(self.best_V) > 0:
            return 0.0
        tried = [self.best_V]
        best_ms = self._choose(tried)
        target_ms, reach = 0.95 * self._next_limit(best_ms).ms, FIRST_REACH
        self._search(self.best_V, target_ms, best_ms, NUM_STEPS)
        best_ms = self._choose(tried)
        for number in range(1, num_rounds * MAX_CHECKS + 1):
            if time.monotonic() > deadline or best_ms >= self.cutoff_ms * (1 - MIN_GAP):
                break
            left = deadline - time.monotonic()
            solved = self._solve(best_ms, target_ms, reach, left)
            if solved is None:
                break
            trial_V, worth, target_ms = solved
            self._search(trial_V, target_ms * worth, best_ms, NUM_STEPS)
            target_ms *= worth
            tried.append(trial_V)
            best_ms = self._choose(tried)
            if self.best_V is not trial_V:
                reach *= REACH_SHRINKS
            if number % num_rounds == 0:
                self._search(self.best_V, best_ms, best_ms, NUM_FINAL_STEPS)
                checked_ms = self._choose(tried)
                if checked_ms >= best_ms * (1 - MIN_GAP):
                    return checked_ms
                # Cheaper sets were found: they may be the cure.
                best_ms = target_ms = checked_ms
        before_ms = math.inf
        while num_rounds and best_ms < before_ms * (1 - MIN_GAP):
            # A search starts from the best sets of those before it.
            before_ms = best_ms
            self._search(self.best_V, best_ms, best_ms, NUM_FINAL_STEPS)
            best_ms = self._choose(tried)
        return best_ms

    def _choose(self, tried: Sequence[Floats]) -> float:
        """Take the prices of the best bound by all sets known by now, and return it."""
        bounds = [self._bound_of(price_V) for price_V in tried]
        best = int(np.argmax(bounds))
        self.best_V = tried[best]
        return bounds[best]

    def _solve(
        self, bound_ms: float, target_ms: float, reach: float, seconds: float
    ) -> tuple[Floats, float, float] | None:
        """Find the prices near the best ones at which everything is worth most.

        No set of the pool may be worth more than 1, or than its cost over the target.

        Returns:
            The prices, what everything is worth per rank, and the target used [ms].
            None where that takes longer than `seconds`, or HiGHS sees no such prices
            for its rounding: those known by now hold all the same.
        """
        prices, limit = self.prices, self._next_limit(bound_ms)
        target_ms = min(max(target_ms, bound_ms), limit.ms)
        price_V = self.best_V * (prices.num_ranks / limit.total(self.best_V))
        most_L = np.maximum(self.cost_L / target_ms, 1.0)
        worth_L = prices.load_LV @ price_V
        share_L = np.where(self.cost_L <= limit.ms, worth_L / most_L, -1.0)
        size = POOL_BASE + POOL_PER_PRICE * prices.num_prices
        use = np.sort(np.argsort(-share_L, kind="stable")[:size])
        use = use[share_L[use] > 0]
        # All prices may be too high: lowered alike, they are possible.
        scale = max(1.0, float(share_L[use].max(initial=0.0)))
        num_light, num_heavy = prices.num_light, len(prices.heavy_H)
        light = price_V[:num_light].reshape(-1, 2)
        own = price_V[num_light:].reshape(-1, 4)
        step = reach * np.concatenate(
            [
                np.broadcast_to(light.mean(axis=1, keepdims=True), light.shape).ravel(),
                np.broadcast_to(own.max(axis=1, keepdims=True), own.shape).ravel(),
            ]
        )
        # What each table with prices of its own counts as: no more than any way.
        places = num_light + 4 * np.arange(num_heavy)
        rules = []
        for index, factors in (
            (np.flatnonzero(limit.whole_H), {_WHOLE: np.ones(num_heavy)}),
            (
                np.flatnonzero(limit.split_H),
                {_SHARD: np.maximum(limit.fewest_H, 2), _COLUMNS: np.ones(num_heavy)},
            ),
            (np.flatnonzero(limit.spread_H), {_SPREAD: np.ones(num_heavy)}),
        ):
            rule = np.zeros((len(index), prices.num_prices + num_heavy))
            rule[np.arange(len(index)), prices.num_prices + index] = 1.0
            for which, factor in factors.items():
                rule[np.arange(len(index)), places[index] + which] = -factor[index]
            rules.append(rule)
        sets = np.pad(prices.load_LV[use], ((0, 0), (0, num_heavy)))
        rules_AV = np.concatenate([sets, *rules])
        most_A = np.concatenate([most_L[use], np.zeros(len(rules_AV) - len(use))])
        gain_V = np.zeros(prices.num_prices + num_heavy)
        gain_V[:num_light] = -limit.light_V
        gain_V[prices.num_prices :] = -1.0
        ends = np.full((len(gain_V), 2), [0.0, np.inf])
        ends[: prices.num_prices, 0] = np.maximum(price_V - step, 0.0) / scale
        ends[: prices.num_prices, 1] = price_V + step
        solved = optimize.linprog(
            gain_V,
            A_ub=rules_AV,
            b_ub=most_A,
            bounds=ends,
            method="highs-ds",
            options={"time_limit": max(seconds, 0.0)},
        )
        if solved.status == _OUT_OF_TIME or solved.x is None:
            return None
        worth = -float(solved.fun) / prices.num_ranks
        weight = -solved.ineqlin.marginals[: len(use)]
        self._used = (use[weight > 0], weight[weight > 0])
        return solved.x[: prices.num_prices], worth, target_ms

    def _search(
        self, price_V: Floats, target_ms: float, bound_ms: float, steps: int
    ) -> None:
        """Add sets to the pool that cost little beside their worth."""
        prices, limit = self.prices, self._next_limit(bound_ms)
        index = np.flatnonzero(self.cost_L <= limit.ms)
        if prices.holds_all or not len(index):
            return
        price_V = price_V * (prices.num_ranks / limit.total(price_V))
        worth_L = prices.load_LV[index] @ price_V
        score = _score(worth_L, self.cost_L[index], target_ms)
        start = index[np.argsort(-score, kind="stable")[: NUM_LANES - NUM_FRESH]]
        sets = _Sets.join([prices.pool.pick(start), self._fresh(price_V)])
        descent = _Descent(self, price_V, target_ms, limit.ms, sets)
        prices.add(descent.run(steps))
        new = self.view.cost(prices.costs_L3[len(self.cost_L) :])
        self.cost_L = np.concatenate([self.cost_L, new])

    def _fresh(self, price_V: Floats) -> _Sets:
        """Sets of tables that are worth much beside their cost, more or less."""
        prices, part = self.prices, self.prices.part
        worth_T = prices.affine(price_V)[2]
        cost_T = prices.cost_T2 @ np.array(self.view.weights[:2]) / part.block_T
        noise = prices.rng.normal(0.0, FRESH_NOISE, (NUM_FRESH, len(worth_T)))
        value_LT = np.log(np.maximum(worth_T, 1e-12) / cost_T) + noise
        # One way of a table: the first of them in this order.
        order_LT = np.argsort(-value_LT, axis=1, kind="stable")
        line = np.arange(NUM_FRESH)[:, None]
        own_LT = part.own_T[order_LT]
        by_own = np.lexsort(
            (np.broadcast_to(np.arange(len(worth_T)), own_LT.shape), own_LT)
        )
        again = np.zeros(own_LT.shape, dtype=bool)
        sorted_own = own_LT[line, by_own]
        again[line, by_own] = np.diff(sorted_own, axis=1, prepend=-1) == 0
        gain_LT = np.where(again, 0.0, worth_T[order_LT])
        before_LT = np.cumsum(gain_LT, axis=1) - gain_LT
        lane, place = np.nonzero((before_LT < 1.0) & ~again)
        table = order_LT[lane, place]
        return _gather(lane, table, part.dims_T[table])


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
        case: _Case,
        price_V: Floats,
        target_ms: float,
        limit_ms: float,
        start: _Sets,
    ) -> None:
        self.view, self.prices = case.view, case.prices
        self.part = part = case.prices.part
        self.rng = case.prices.rng
        self.limit_ms, self.target_ms = limit_ms, target_ms
        self.offset_T, self.slope_T, self.whole_T = case.prices.affine(price_V)
        room = min(part.num_own, start.table_LM.shape[1] + SPARE_PLACES)
        room = max(room - start.table_LM.shape[1], 0)
        self.table_LM = np.pad(start.table_LM, ((0, 0), (0, room)), constant_values=-1)
        self.width_LM = np.pad(start.width_LM, ((0, 0), (0, room)))
        self.totals = part.totals(start)
        held = self.table_LM >= 0
        worth = np.where(held, self._worth(self.table_LM, self.width_LM), 0.0)
        self.worth_L: Floats = worth.sum(axis=1)
        cost_L = self.view.cost(part.costs(self.totals))
        self.score_L = _score(self.worth_L, cost_L, target_ms)
        # Tables are tried the likelier, the more they are worth beside their cost.
        weights = np.array(self.view.weights[:2])
        guess_T = self.prices.whole_T2 @ weights
        value_T = self.whole_T * part.block_T / np.maximum(guess_T, 1e-12)
        weight_T = np.exp(VALUE_BIAS * value_T / max(float(value_T.mean()), 1e-12))
        self.chance_T: Floats = np.cumsum(weight_T) / weight_T.sum()
        self.chance_T[-1] = 1.0

    def _worth(self, table_N: Ints, width_N: Ints) -> Floats:
        worth: Floats = np.where(
            width_N == self.part.dims_T[table_N],
            self.whole_T[table_N],
            self.offset_T[table_N] + self.slope_T[table_N] * width_N,
        )
        return worth

    def run(self, steps: int) -> _Sets:
        """Take some steps and return the sets."""
        for _ in range(steps):
            self._step()
        return _Sets(self.table_LM, self.width_LM)

    def _step(self) -> None:
        """Try some changes of every set and make the best one that pays.

        A change takes a shard out, puts one in, both, or alters a shard's width, or
        the way of its table.
        """
        part, num_lanes = self.part, len(self.table_LM)
        count = num_lanes * NUM_CANDIDATES
        line = np.repeat(np.arange(num_lanes), NUM_CANDIDATES)
        kind = self.rng.integers(0, 4, count)
        # A random place that holds a shard, and one that does not.
        noise = self.rng.random((num_lanes, NUM_CANDIDATES, self.table_LM.shape[1]))
        held = (self.table_LM >= 0)[:, None]
        out = np.where(held, noise, -1.0).argmax(axis=2).reshape(-1)
        free = np.where(held, -1.0, noise).argmax(axis=2).reshape(-1)
        new = np.searchsorted(self.chance_T, self.rng.random(count), side="right")
        new = np.where(kind == _WIDTH, self._sibling(self.table_LM[line, out]), new)
        width = self._random_widths(new, self.rng.random((2, count)))
        takes, puts = kind != _ADD, kind != _DROP
        place = np.where(takes, out, free)
        legal = (self.table_LM[line, place] >= 0) == takes
        beside = np.where(held[:, 0], part.own_T[self.table_LM], -1)[line]
        beside[np.flatnonzero(takes), place[takes]] = -1
        legal &= ~(puts & (beside == part.own_T[new][:, None]).any(axis=1))
        index = np.flatnonzero(legal)
        line, place, new, width = line[index], place[index], new[index], width[index]
        takes, puts = takes[index], puts[index]
        totals = self.totals.pick(line)
        old = np.maximum(self.table_LM[line, place], 0)
        old_width, new_width = self.width_LM[line, place] * takes, width * puts
        totals.exchange(part, (old, old_width), (new, new_width))
        worth = self.worth_L[line] + self._worth(new, new_width) * puts
        worth -= self._worth(old, old_width) * takes
        cost = self.view.cost(part.costs(totals))
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

    def _sibling(self, table_N: Ints) -> Ints:
        """Some way of each table."""
        part = self.part
        if not part.has_choices:
            return table_N
        pick = self.rng.random(len(table_N)) * part.num_siblings_T[table_N]
        siblings: Ints = part.siblings_TK[table_N, pick.astype(np.int64)]
        return siblings

    def _random_widths(self, table_N: Ints, noise_2N: Floats) -> Ints:
        """A whole table more often than not, else any width that it may have."""
        count = self.part.num_widths_T[table_N]
        pick = np.minimum((noise_2N[0] * count).astype(np.int64), count - 1)
        pick = np.where(noise_2N[1] < WHOLE_SHARE, count - 1, pick)
        widths: Ints = self.part.widths_TU[table_N, pick]
        return widths


def _comms_guess(part: _Part) -> Floats:
    """What the collectives of each whole table take, about, `T` [ms]."""
    bank = part.bank
    slopes_T3 = bank.comms_per_load_S3[bank.stages_T[part.tables]]
    loads_T3 = bank.loads_of(bank.whole_T[part.tables])
    guess: Floats = (loads_T3 * slopes_T3).sum(axis=1) * part.block_T
    return guess


def _classes(part: _Part, best_T: Ints, whole_T2: Floats) -> Ints:
    """Which tables share factors of their prices, `T` values from 0.

    Tables of like cost and like encoding (relative to the cost) share them: those
    nearest to the same of some tables that lie far from each other. Ways of one table
    are alike.
    """
    if part.num_own <= MAX_CLASSES:
        return part.own_T
    bank = part.bank
    best = np.unique(best_T)
    encoding = bank.encoding(bank.whole_T[part.tables[best]])
    cost = np.maximum(whole_T2[best].sum(axis=1), 1e-12)
    points = np.column_stack([encoding / cost[:, None], np.log(cost)])
    spread = points.std(axis=0)
    points = (points - points.mean(axis=0)) / np.maximum(spread, 1e-12)
    points[:, :-1] /= math.sqrt(max(1, points.shape[1] - 1))
    centre = int(cost.argmax())
    nearest, distance = (
        np.zeros(len(best), dtype=np.int64),
        np.full(len(best), np.inf),
    )
    for number in range(MAX_CLASSES):
        new = np.square(points - points[centre]).sum(axis=1)
        nearest[new < distance] = number
        distance = np.minimum(distance, new)
        centre = int(distance.argmax())
    classes: Ints = np.unique(nearest, return_inverse=True)[1].astype(np.int64)
    return classes[np.searchsorted(best, best_T)]
