"""Choose the way (sharding type and kernel) of each table, on balanced ranks.

A *choice* names one way for each table (`ShardingTask.alternatives`). Its cost on
perfectly balanced ranks is quick to compute: one kernel with the average rank's shards,
and collectives with equal loads. Starting from a few simple choices, many tables are
switched from one kind of way to another, as many as pays most; then single tables are
switched. Later steps change ways on real ranks (see `descent`).

Shapes: `T` entries of the task, one for each way; `N` tables; `F` ways of all tables in
sequence; `C` choices; `G` fusion groups; `S` stages; `E` encoding values; `M` memories.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse

from torchrec_neuroshard.costs.simulator import in_phases
from torchrec_neuroshard.costs.task import KernelFactors
from torchrec_neuroshard.search.feasibility import fitting, smallest_widths
from torchrec_neuroshard.search.shards import (
    Bools,
    Floats,
    Ints,
    ShardBank,
    sum_by,
)
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

MIN_GAIN, MIN_SINGLE_GAIN = 0.002, 1e-4
"""Least relative gain of a switch of many tables, and of a single table."""
MIN_ESTIMATED_GAIN = 0.05
"""Least relative gain of a switch to a kernel that was not measured."""
FILL = 0.95
"""Share of the memory that a choice may fill on average."""
MAX_SINGLE = 1000
"""Most switches of single tables that are priced in one step."""
MAX_CHOICES = 500
"""If there are no more choices than this, all are priced."""
MAX_STEPS = 40
"""Most switches in a row."""
PRICE_STEPS = 32
"""Steps of the search for a price of memory: rising prices, then bisection."""
SPREAD = 0.5
"""Starts spread tables that take longer than this share of an average rank."""
NUM_UNIFORM, NUM_CHEAPEST, MOST_UNIFORM = 2, 3, 500
"""Starts in which all tables take one kind of way, starts with the cheapest ways of one
stage, and the most tables for which both are used. Balanced ranks make mixed choices
look better than they are, so these starts add variety."""


class Choices:
    """Makes choices of ways, and prices them on balanced ranks."""

    def __init__(self, bank: ShardBank) -> None:
        """Compute what each way adds to the average rank.

        Args:
            bank: The task's shards.
        """
        self.bank = bank
        task = bank.task
        num_ranks = task.world_size
        self.ways = [w for w in task.ways if bank.leads_T[w[0]]]
        self._way_F: Ints = np.concatenate(self.ways)
        num_ways = [len(ways) for ways in self.ways]
        self._number_F: Ints = np.repeat(np.arange(len(self.ways)), num_ways)
        # Tables with fewer ways repeat their first one.
        most = max(num_ways)
        filled = [(*w, *w[:1] * (most - len(w))) for w in self.ways]
        self._way_NK: Ints = np.array(filled)
        count = len(task.tables)
        table, rank, alike = bank.parts(np.arange(count), alike=True)
        # The blocks of a grid are on different nodes.
        self.width_T: Ints = np.where(
            bank.moves_T, bank.dims_T, np.minimum(task.min_widths, bank.dims_T)
        )
        blocks_T = bank.dims_T / self.width_T
        piece_T = self._pieces()
        rows = bank.rows(table, piece_T[table], rank, alike=True)
        share_M1 = ((bank.dims_T / piece_T / num_ranks)[table] * alike)[:, None]
        self._encoding_TE = sum_by(table, bank.encoding(rows) * share_M1, count)
        self._extra_T2 = sum_by(table, bank.extra(rows) * share_M1, count)
        self._loads_T3 = sum_by(table, bank.loads_of(rows) * share_M1, count)
        skewed = np.flatnonzero(bank.simulator.skewed_T)
        self._skew_TX = self._skew(skewed, piece_T) if len(skewed) else None
        self._bytes_MT: Floats = (
            bank.sizes(np.arange(count), self.width_T) * bank.block_T * blocks_T
        )
        self._bytes_T = bank.scarcest(self._bytes_MT)
        self.has_caches = any(k is not None and k.has_cache for k in task.kernels)
        narrow = smallest_widths(task)
        rows = bank.rows(np.arange(count), narrow)
        # The average rank holds a fraction of a shard, but some rank runs a kernel.
        launch_ms = bank.simulator.encoder.launch_ms
        self._floor_T2: Floats = np.maximum(bank.alone(rows), launch_ms)
        if len(skewed):
            busiest = np.array([self._busiest(t) for t in skewed.tolist()])
            rows = bank.rows(skewed, narrow[skewed], busiest)
            floor_N2 = np.maximum(self._floor_T2[skewed], bank.alone(rows))
            self._floor_T2[skewed] = floor_N2
        shard_MT = bank.sizes(np.arange(count), narrow)
        self._shard_bytes_T = bank.scarcest(shard_MT)
        self.fits_T = fitting(task)
        kernels = self._kernels()
        numbers = {k: i for i, k in enumerate(dict.fromkeys(kernels))}
        self.kind_T: Ints = bank.stages_T * len(numbers) + np.array(
            [numbers[k] for k in kernels]
        )
        self.estimated_T = np.array([k is not None for k in task.kernels])
        # A single rank can be filled completely.
        self.room_M: Floats = bank.caps_MW.sum(axis=1)
        self.room_M[:1] *= FILL if num_ranks > 1 else 1.0

    def _busiest(self, table: int) -> int:
        """Return the rank of a block that gets most ids."""
        simulator = self.bank.simulator
        return int(simulator.loads_of_places(table, COLUMN_MULTIPLE)[:, 0].argmax())

    def _skew(self, skewed: Ints, width_T: Ints) -> Floats:
        """Return what ranks get beyond the mean rank's loads, `T x (W * 3)`.

        Only blocks with unequal lookups differ. If a block is a node, its place on the
        nodes is open, so the same rank of each node gets an equal share.

        Args:
            skewed: Tables with unequal lookups.
            width_T: Columns of each table's shards.
        """
        bank, num_ranks = self.bank, self.bank.task.world_size
        skew_TW3 = np.zeros((len(bank.dims_T), num_ranks, 3))
        for table in skewed.tolist():
            width, size = int(width_T[table]), int(bank.block_T[table])
            loads_P3 = bank.simulator.loads_of_places(table, width)
            beyond_P3 = loads_P3 - loads_P3.mean(axis=0)
            blocks = bank.dims_T[table] / width * size / num_ranks
            skew_TW3[table] = blocks * np.tile(beyond_P3, (num_ranks // size, 1))
        return skew_TW3.reshape(len(skew_TW3), -1)

    def _pieces(self) -> Ints:
        """Return the columns of each way's shards, `T`.

        A table that takes longer than an average rank is priced in column shards, since
        no rank can hold it whole.
        """
        bank, every = self.bank, np.arange(len(self.width_T))
        least_ms = sum(float(bank.own_ms_T[list(ways)].min()) for ways in self.ways)
        rank_ms = max(least_ms / bank.task.world_size, 1e-12)
        whole_ms = bank.total_ms(every, bank.dims_T)
        count_T = bank.enough_splits(every, whole_ms / rank_ms)
        width_T: Ints = -(-bank.dims_T // (count_T * COLUMN_MULTIPLE)) * COLUMN_MULTIPLE
        return np.where(bank.moves_T, np.minimum(width_T, bank.dims_T), self.width_T)

    def _kernels(self) -> list[tuple[KernelFactors | None, int]]:
        """Return what defines the kind of each way: kernel, and rank of its cache size.

        The share of misses is left out. The smallest caches of all tables are one kind,
        the second smallest another, and so on.
        """
        task = self.bank.task
        found = [(_kernel(factors), 0) for factors in task.kernels]
        for ways in self.ways if self.has_caches else ():
            sizes: dict[tuple[Any, ...], int] = {}
            for way in sorted(ways, key=lambda w: self._bytes_T[w]):
                kernel = found[way][0]
                key = task.sharding_types[way], self.width_T[way], kernel
                found[way] = kernel, sizes.setdefault(key, 0)
                sizes[key] += kernel is not None and kernel.has_cache
        return found

    def starts(self, deadline: float) -> list[Ints]:
        """Return the choices to place, the most promising ones first.

        Args:
            deadline: `time.monotonic()` after which no choice is improved.
        """
        free = self._freest()
        uniform = self._uniform(free)
        each = self._cheapest()
        found = [free, *each, *uniform]
        cost_C = self.costs(np.stack(found)).tolist()
        ms = {c.tobytes(): cost for c, cost in zip(found, cost_C, strict=True)}
        cheapest = min(found, key=lambda c: ms[c.tobytes()])
        ends = [self.improved(start, deadline) for start in (cheapest, free)]
        ends += self._best_of_all()
        known = {c.tobytes() for c in ends}
        for pool, most in ((uniform, NUM_UNIFORM), (each, NUM_CHEAPEST)):
            new = [c for c in pool if c.tobytes() not in known]
            if len(self.ways) <= MOST_UNIFORM:
                ends += sorted(new, key=lambda c: ms[c.tobytes()])[:most]
        # The cost of the freest choice on balanced ranks is realistic: keep it.
        ends = [*ends[:2], free, *ends[2:], *self._spread(free)]
        return list({c.tobytes(): c for c in ends}.values())

    def _spread(self, chosen_N: Ints) -> list[Ints]:
        """Return choices in which several ranks share the costliest tables.

        If several tables take longer than an average rank, a switch of one of them to
        rows or replicas gains nothing: another one is the bottleneck. And on balanced
        ranks none of them is one.

        Args:
            chosen_N: The way of each table, in the order of `ways`.
        """
        bank = self.bank
        if len(self.ways) > MOST_UNIFORM:
            return []
        cost_N = bank.own_ms_T[chosen_N]
        least_ms = SPREAD * float(cost_N.sum()) / bank.task.world_size
        costly_N = bank.moves_T[chosen_N] & (cost_N > least_ms)
        able_F = self.fits_T[self._way_F] & ~bank.moves_T[self._way_F]
        found = []
        for numbers, ways in self._kinds(able_F & costly_N[self._number_F]):
            order = np.argsort(-cost_N[numbers], kind="stable")
            for count in _counts(len(numbers)):
                chosen = chosen_N.copy()
                chosen[numbers[order[:count]]] = ways[order[:count]]
                if self._has_room(chosen):
                    found.append(chosen)
        return found

    def _best_of_all(self) -> list[Ints]:
        """Return the best of all choices if these are few, even if it fills ranks."""
        if math.prod(len(ways) for ways in self.ways) > MAX_CHOICES:
            return []
        every = np.array(list(itertools.product(*self.ways)))
        used_MC = self._bytes_MT[:, every].sum(axis=2)
        fits_C = (used_MC <= self.bank.caps_MW.sum(axis=1)[:, None]).all(axis=0)
        every = every[fits_C & self.fits_T[every].all(axis=1)]
        margin_C = MIN_ESTIMATED_GAIN * self.estimated_T[every].sum(axis=1)
        order = np.argsort(self.costs(every) * (1 + margin_C), kind="stable")
        return list(every[order[:1]])

    def _freest(self) -> Ints:
        """Return the choice that leaves the search the most freedom.

        It prefers column shards and measured kernels, and takes other ways only as far
        as memory requires.
        """
        bank = self.bank
        least = float(bank.own_ms_T.sum())
        cost_T = bank.own_ms_T + least * (~bank.moves_T + 2.0 * self.estimated_T)
        cost_T[~self.fits_T] = np.inf
        found = [self._within_memory(cost_T, n + 1) for n in range(len(self.room_M))]
        return next((c for c in found if c is not None), self.smallest())

    def _cheapest(self) -> list[Ints]:
        """Return choices with the least sum of the tables' own times within memory.

        The first allows every way. The others each prefer the ways of one stage, since
        the tables' own times do not count a stage's launches.
        """
        bank, found = self.bank, []
        for stage in (None, *np.unique(bank.stages_T).tolist()):
            cost_T = np.where(self.fits_T, bank.own_ms_T, np.inf)
            if stage is not None:
                cost_T += float(bank.own_ms_T.sum()) * (bank.stages_T != stage)
            # First only device memory has a price, then host memory, too.
            found += [
                self._within_memory(cost_T, n + 1) for n in range(len(self.room_M))
            ]
        return [chosen for chosen in found if chosen is not None]

    def _within_memory(self, cost_T: Floats, num_priced: int) -> Ints | None:
        """Return the choice of least cost within memory; None if none is found.

        Each byte has a price, the same for all tables. The method looks for the lowest
        price at which the cheapest ways fit.

        Args:
            cost_T: Cost of each way.
            num_priced: Number of memories with a price. Scarcer memory costs more.
        """
        worth_M = self.bank.worth_M[:num_priced]
        bytes_T: Floats = worth_M @ self._bytes_MT[:num_priced]
        room = float(worth_M @ self.room_M[:num_priced])
        low, high = 0.0, float(self.bank.own_ms_T.sum()) / max(room, 1.0)
        found: Ints | None = None
        price, line_N = 0.0, np.arange(len(self._way_NK))
        for _ in range(PRICE_STEPS):
            cost_NK = (cost_T + price * bytes_T)[self._way_NK]
            chosen: Ints = self._way_NK[line_N, cost_NK.argmin(axis=1)]
            if bytes_T[chosen].sum() <= room:
                found, high = chosen, price
                if price == 0.0:
                    break
            else:
                low, high = price, 4.0 * high if found is None else high
            price = high if found is None else (low + high) / 2
        return found if found is not None and self._has_room(found) else None

    def _has_room(self, chosen_CN: Ints) -> Bools:
        """Whether choices fit the total memory: `C`, or a scalar for one choice."""
        room: Bools = np.array(True)
        for bytes_T, most in zip(self._bytes_MT, self.room_M, strict=True):
            room = room & (bytes_T[chosen_CN].sum(axis=-1) <= most)
        return room

    def _uniform(self, first: Ints) -> list[Ints]:
        """Return, for each kind of way, the choice in which all tables take it.

        Tables without a way of this kind keep their way of `first`.
        """
        found = []
        for numbers, ways in self._kinds(self.fits_T[self._way_F]):
            chosen = first.copy()
            chosen[numbers] = ways
            if self._has_room(chosen):
                found.append(chosen)
        return found

    def _kinds(self, able_F: Bools) -> Iterator[tuple[Ints, Ints]]:
        """Yield the tables that may take one kind of way, and these ways, by kind."""
        for kind in np.unique(self.kind_T[self._way_F[able_F]]).tolist():
            own = np.flatnonzero(able_F & (self.kind_T[self._way_F] == kind))
            numbers, places = np.unique(self._number_F[own], return_index=True)
            yield numbers, self._way_F[own[places]]

    def smaller(self, chosen_N: Ints, at_least: int) -> Ints:
        """Return the choice with the largest shards switched to ways of less memory.

        Args:
            chosen_N: The way of each table, in the order of `ways`.
            at_least: Number of tables to switch, if there are as many.
        """
        chosen, changed, own_ms_T = chosen_N.copy(), 0, self.bank.own_ms_T
        for number in np.argsort(-self._shard_bytes_T[chosen], kind="stable").tolist():
            least = 0.9 * self._shard_bytes_T[chosen[number]]
            less = [
                w
                for w in self.ways[number]
                if self.fits_T[w] and self._shard_bytes_T[w] < least
            ]
            if less and changed < at_least:
                chosen[number] = min(less, key=lambda w: own_ms_T[w])
                changed += 1
        return chosen

    def smallest(self) -> Ints:
        """Return the choice that needs about the least memory on the fullest rank."""
        tables = np.arange(len(self.width_T))
        each = self.bank.scarcest(self.bank.sizes(tables, self.width_T))
        return np.array(
            [
                min(w, key=lambda v: (not self.fits_T[v], self._bytes_T[v], each[v]))
                for w in self.ways
            ]
        )

    def costs(self, chosen_CN: Ints) -> Floats:
        """Return the milliseconds of an iteration on balanced ranks, `C`.

        Args:
            chosen_CN: The way of each table, in the order of `ways`.
        """
        bank, task = self.bank, self.bank.task
        count, num_groups, num_stages = len(chosen_CN), task.num_groups, task.num_stages
        line = np.repeat(np.arange(count), chosen_CN.shape[1])
        way = chosen_CN.reshape(-1)
        cell = line * num_groups + bank.groups_T[way]
        size = count * num_groups
        members, order, starts = _members(way, cell, size, len(bank.groups_T))
        sums = members @ self._encoding_TE
        floor = np.zeros((size, 2))
        used = cell[order][starts]
        floor[used] = np.maximum.reduceat(self._floor_T2[way[order]], starts, axis=0)
        compute = np.zeros((size, 2))
        compute[used] = bank.predict(sums[used])
        compute = np.maximum(compute + members @ self._extra_T2, floor)
        stage = line * num_stages + bank.stages_T[way]
        staged, *_ = _members(way, stage, count * num_stages, len(bank.groups_T))
        loads = staged @ self._loads_T3
        shape = (count, task.world_size, num_stages, 3)
        loads_CWS3 = np.broadcast_to(
            loads.reshape(count, 1, num_stages, 3), shape
        ).copy()
        if self._skew_TX is not None:
            skew = (staged @ self._skew_TX).reshape(count, num_stages, -1, 3)
            loads_CWS3 += skew.swapaxes(1, 2)
        comms = bank.simulator.comms_costs(loads_CWS3).max(axis=1, keepdims=True)
        kernels = bank.simulator.stage_compute(compute.reshape(count, 1, num_groups, 2))
        placed_CT = np.zeros((count, len(bank.groups_T)), dtype=bool)
        placed_CT[line, way] = True
        unsorted_T = bank.columns_T * (bank.simulator.ordered_from_T == 1)
        columns_CS = (staged @ unsorted_T).reshape(count, num_stages)
        return bank.simulator.path_ms(
            in_phases(kernels, comms),
            bank.simulator.order_costs(columns_CS),
            bank.simulator.stage_order(placed_CT),
            loads_CWS3,
        )

    def improved(self, chosen_N: Ints, deadline: float) -> Ints:
        """Switch tables to other ways until no switch pays.

        Args:
            chosen_N: The way of each table, in the order of `ways`.
            deadline: `time.monotonic()` after which no step is taken.
        """
        now_N, now_ms = chosen_N, float(self.costs(chosen_N[None])[0])
        for _ in range(MAX_STEPS):
            if time.monotonic() > deadline:
                break
            found = [
                (float(cost_ms), candidates[i])
                for candidates, margin in self._switches(now_N)
                for i, cost_ms in enumerate(self.costs(candidates))
                if cost_ms < now_ms * (1 - margin)
            ] or self._cheaper_single(now_N, now_ms)
            if not found:
                break
            now_ms, now_N = min(found, key=lambda f: f[0])
        return now_N

    def _cheaper_single(self, now_N: Ints, now_ms: float) -> list[tuple[float, Ints]]:
        """Return cheaper choices with one table in another way, with their costs [ms].

        `_switches` orders tables by their own times, which leave out the costs of
        stages. Here every single switch is priced in full.
        """
        changes = [
            (number, way)
            for number, ways in enumerate(self.ways)
            for way in ways
            if way != now_N[number] and self.fits_T[way]
        ]
        if not 0 < len(changes) <= MAX_SINGLE:
            return []
        number_C, way_C = np.array(changes).T
        candidates = np.repeat(now_N[None], len(changes), axis=0)
        candidates[np.arange(len(changes)), number_C] = way_C
        new_C = self.estimated_T[way_C] & ~self.estimated_T[now_N[number_C]]
        margin_C = np.where(new_C, MIN_ESTIMATED_GAIN, MIN_SINGLE_GAIN)
        cost_C = self.costs(candidates)
        better = cost_C < now_ms * (1 - margin_C)
        better &= self._has_room(candidates)
        return [(float(cost_C[i]), candidates[i]) for i in np.flatnonzero(better)]

    def _switches(self, now_N: Ints) -> Iterator[tuple[Ints, float]]:
        """Switch tables from one kind of way to another, for all pairs of kinds.

        Args:
            now_N: The current way of each table.

        Yields:
            `C x N` choices that fit, and the least relative gain that a switch to this
            kind needs.
        """
        now_F = now_N[self._number_F]
        open_F = np.flatnonzero((self._way_F != now_F) & self.fits_T[self._way_F])
        number, way, now = (a[open_F] for a in (self._number_F, self._way_F, now_F))
        gain = self.bank.own_ms_T[way] - self.bank.own_ms_T[now]
        pair = self.kind_T[now] * (self.kind_T.max() + 1) + self.kind_T[way]
        order = np.lexsort((way, number, gain, pair))
        groups = np.split(order, np.flatnonzero(np.diff(pair[order])) + 1)
        for changes in sorted(groups, key=min) if len(order) else ():
            counts = _counts(len(changes))
            candidates = np.repeat(now_N[None], len(counts), axis=0)
            for line, count in enumerate(counts):
                candidates[line, number[changes[:count]]] = way[changes[:count]]
            fits = self._has_room(candidates)
            estimated = bool(self.estimated_T[way[changes[0]]])
            if fits.any():
                yield candidates[fits], MIN_ESTIMATED_GAIN if estimated else MIN_GAIN


def _kernel(factors: KernelFactors | None) -> KernelFactors | None:
    """Return the factors that all tables of a kernel share: all but the misses."""
    if factors is None or factors.host is None or not factors.has_cache:
        return factors
    return dataclasses.replace(
        factors, host=dataclasses.replace(factors.host, missed=0.0)
    )


def _members(
    way_N: Ints, cell_N: Ints, size: int, num_ways: int
) -> tuple[Any, Ints, Ints]:
    """Return the ways in each cell.

    Returns:
        A matrix, `size x num_ways`, that sums rows by cell; the order of the ways by
        cell; and the start of each cell that is not empty.
    """
    # Stable sorting takes a fraction of the time on 16-bit keys.
    is_small = size <= np.iinfo(np.int16).max
    order = np.argsort(cell_N.astype(np.int16) if is_small else cell_N, kind="stable")
    ends = np.cumsum(np.bincount(cell_N, minlength=size))
    indptr = np.concatenate([[0], ends])
    matrix = sparse.csr_array(
        (np.ones(len(order)), way_N[order], indptr), shape=(size, num_ways)
    )
    starts = np.flatnonzero(np.diff(cell_N[order], prepend=-1))
    return matrix, order, starts


def _counts(total: int) -> list[int]:
    """Return how many tables to switch at once: all small numbers, some large ones."""
    counts, count = [], 1
    while count < total:
        counts.append(count)
        count = max(count + 1, int(count * 1.5))
    return [*counts, total]
