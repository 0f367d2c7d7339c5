"""Choose the way that each table is sharded in, greedily and on balanced ranks.

Where tables may be sharded in several ways (`ShardingTask.alternatives`), a choice says
which one each takes. What it would cost on perfectly balanced ranks is quick to work
out: a kernel for the average rank's shards, collectives at equal loads. From the choice
that leaves the search most freedom, tables of one kind of way are switched to another,
as many at once as pays most, then tables one by one; every choice on that path is a
start for the search proper (see `descent`), which goes on from there on real ranks.

Shapes: `T` tables, one index for each way, `N` tables proper, `F` their ways, one after
the other, `C` choices, `G` fusion groups, `S` stages, `E` encoding values, `W` ranks,
`P` approximate phases, `M` memories.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import (
    HOST,
    KernelFactors,
    ShardingTask,
    format_bytes,
)
from torchrec_neuroshard.search.feasibility import check_memory, describe, way_out
from torchrec_neuroshard.search.rules import merged
from torchrec_neuroshard.search.shards import (
    Floats,
    Ints,
    ShardBank,
    split_widths,
    sum_by,
)

__all__ = [
    "Choices",
    "block_widths",
    "column_task",
    "columns_of",
    "memory_left",
    "place_blocks",
    "take_room",
]

Bools = npt.NDArray[np.bool_]

MIN_GAIN = 0.002
"""Part of an iteration that a switch must promise."""
MIN_SINGLE_GAIN = 1e-4
"""The same for a switch of one table, once no more of them pay at once."""
MIN_ESTIMATED_GAIN = 0.05
"""The same for switches to kernels that were not measured."""
FILL = 0.95
"""Part of the memory that a choice may fill on average."""
MAX_CHOICES_PRICED = 1000
"""Choices that are all priced, where there are no more."""
MAX_STEPS = 40
"""Switches on a path."""
PRICE_STEPS = 32
"""Prices of memory that are tried: rising ones, then between two of them."""


class Choices:
    """Choices of ways, and what they would cost on balanced ranks."""

    def __init__(self, bank: ShardBank) -> None:
        """Add up what each way gives the average rank.

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
        # Of fewer ways than others have, the first one again and again.
        filled = [(*w, *w[:1] * (max(num_ways) - len(w))) for w in self.ways]
        self._way_NK: Ints = np.array(filled)
        count = len(task.tables)
        table, rank, alike = bank.parts(np.arange(count))
        # Of grid shards, the blocks of the columns are on so many nodes.
        self.width_T: Ints = np.where(
            bank.moves_T, bank.dims_T, np.minimum(task.min_widths, bank.dims_T)
        )
        blocks_T = bank.dims_T / self.width_T
        rows = bank.rows(table, self.width_T[table], rank)
        share_M1 = ((blocks_T / num_ranks)[table] * alike)[:, None]
        self._encoding_TE = sum_by(table, bank.encoding(rows) * share_M1, count)
        self._extra_T2 = sum_by(table, bank.extra(rows) * share_M1, count)
        self._loads_T3 = sum_by(table, bank.loads_of(rows) * share_M1, count)
        self._bytes_MT: Floats = (
            bank.sizes(np.arange(count), self.width_T) * bank.block_T * blocks_T
        )
        self._bytes_T = bank.scarcest(self._bytes_MT)
        self.has_caches = any(k is not None and k.has_cache for k in task.kernels)
        self.own_ms_T: Floats = (
            bank.total_ms(np.arange(count), self.width_T) * bank.block_T * blocks_T
        )
        narrow = [
            split_widths(task, t, bank.splits(t)[-1])[0]
            if bank.moves_T[t]
            else self.width_T[t]
            for t in range(count)
        ]
        rows = bank.rows(np.arange(count), np.array(narrow))
        # Part of a table on the average rank is a kernel on some rank.
        alone = bank.predict(bank.encoding(rows)) + bank.extra(rows)
        self._floor_T2: Floats = np.maximum(alone, bank.simulator.encoder.launch_ms)
        shard_MT = bank.sizes(np.arange(count), np.array(narrow))
        self._shard_bytes_T = bank.scarcest(shard_MT)
        self.fits_T = self._fits(shard_MT)
        kernels = self._kernels()
        numbers = {k: i for i, k in enumerate(dict.fromkeys(kernels))}
        self.kind_T: Ints = bank.stages_T * len(numbers) + np.array(
            [numbers[k] for k in kernels]
        )
        self.estimated_T = np.array([k is not None for k in task.kernels])
        # On one rank whatever fits in all can be placed.
        self.room_M: Floats = bank.caps_MW.sum(axis=1)
        self.room_M[:1] *= FILL if num_ranks > 1 else 1.0

    def _kernels(self) -> list[tuple[KernelFactors | None, int]]:
        """Return what all ways of one kind have in common: kernel and size of cache.

        Not what caches miss: of a table's caches, the smallest is of one kind with the
        smallest ones of others.
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

    def _fits(self, size_MT: Floats) -> Bools:
        """Whether some ranks that may hold a way have room for its smallest shards."""
        bank = self.bank
        room_TW: Bools = np.ones((size_MT.shape[1], bank.task.world_size), dtype=bool)
        if bank.rules.allowed_TW is not None:
            room_TW &= bank.rules.allowed_TW
        for size_T, caps_W in zip(size_MT, bank.caps_MW, strict=True):
            room_TW &= size_T[:, None] <= caps_W
        fits = np.zeros(len(room_TW), dtype=bool)
        for size in np.unique(bank.block_T).tolist():
            own = bank.block_T == size
            # A grid that needs more blocks than there are fits nowhere.
            blocks_TB = room_TW[own].reshape(int(own.sum()), -1, size).all(axis=2)
            room = blocks_TB.sum(axis=1)
            blocks_T = -(-bank.dims_T[own] // self.width_T[own])
            fits[own] = room >= np.where(bank.moves_T[own], 1, blocks_T)
        return fits

    def first(self) -> Ints:
        """Return the choice that leaves the search most freedom: a way of each table.

        Column shards where they fit, with the measured kernel where it fits; then as
        many of the largest tables otherwise as make everything fit on average.
        """
        bank = self.bank

        def order(way: int) -> tuple[Any, ...]:
            return (
                not self.fits_T[way],
                self.estimated_T[way],
                not bank.moves_T[way],
                self.own_ms_T[way],
            )

        chosen = np.array([min(ways, key=order) for ways in self.ways])
        for number in np.argsort(-self._bytes_T[chosen], kind="stable").tolist():
            if self._has_room(chosen):
                break
            fitting = [w for w in self.ways[number] if self.fits_T[w]]
            if fitting:
                self._shrink(chosen, number, fitting, order)
        return chosen

    def _shrink(
        self, chosen: Ints, number: int, ways: list[int], order: Callable[[int], Any]
    ) -> None:
        """Give a table the way that takes least of a memory that is full, in place.

        Not where that would fill another one.
        """
        now = chosen[number]
        total_M = self._bytes_MT[:, chosen].sum(axis=1)
        for bytes_T, full in zip(self._bytes_MT, total_M > self.room_M, strict=True):
            least = min(ways, key=lambda w: (bytes_T[w], order(w)))
            after_M = total_M - self._bytes_MT[:, now] + self._bytes_MT[:, least]
            fills = (after_M > self.room_M) & (after_M > total_M)
            if full and bytes_T[least] < 0.9 * bytes_T[now] and not fills.any():
                chosen[number] = least
                return

    def _has_room(self, chosen_CN: Ints) -> Bools:
        """Whether choices fit on average, `C`, or the one that is given."""
        room: Bools = np.array(True)
        for bytes_T, most in zip(self._bytes_MT, self.room_M, strict=True):
            room = room & (bytes_T[chosen_CN].sum(axis=-1) <= most)
        return room

    def uniform(self, most: int) -> list[Ints]:
        """Return the cheapest choices in which all tables take one kind of way."""
        found = self._uniform(self.first())
        if not found:
            return found
        order = np.argsort(self.costs(np.stack(found)), kind="stable")
        return [found[n] for n in order[:most]]

    def _uniform(self, first: Ints) -> list[Ints]:
        """Return the choices in which all tables that may take one kind of way do.

        The others keep their way in `first`.
        """
        found = []
        able_F = self.fits_T[self._way_F]
        for kind in np.unique(self.kind_T).tolist():
            own = np.flatnonzero(able_F & (self.kind_T[self._way_F] == kind))
            numbers, places = np.unique(self._number_F[own], return_index=True)
            chosen = first.copy()
            chosen[numbers] = self._way_F[own[places]]
            if self._has_room(chosen):
                found.append(chosen)
        return found

    def _at_price(self, cost_T: Floats, ms_per_byte: float, bytes_T: Floats) -> Ints:
        """Return the cheapest way of each table where memory has a price, too."""
        cost_NK = (cost_T + ms_per_byte * bytes_T)[self._way_NK]
        cheapest: Ints = self._way_NK[np.arange(len(cost_NK)), cost_NK.argmin(axis=1)]
        return cheapest

    def _within_memory(self) -> list[Ints]:
        """Return the choices of least time that fit, as if tables were alone.

        One takes any way of each table, one for each stage the ways of that stage alone
        where a table has some: what a stage costs beside its tables they do not tell.
        What memory is worth is the same for all tables: the least price at which the
        cheapest ways fit. Empty where that decides neither the sizes of caches nor what
        goes to a host whose memory is limited.
        """
        if not self.has_caches and len(self._bytes_MT) == 1:
            return []
        found = []
        for stage in (None, *np.unique(self.bank.stages_T).tolist()):
            cost_T = np.where(self.fits_T, self.own_ms_T, np.inf)
            if stage is not None:
                away = float(self.own_ms_T.sum()) * len(cost_T)
                cost_T = cost_T + away * (self.bank.stages_T != stage)
            # The device's memory alone has a price, or all do, the scarcer the more.
            for count in range(1, 1 + len(self._bytes_MT)):
                chosen = self._cheapest_within_memory(cost_T, count)
                found += [] if chosen is None else [chosen]
        return found

    def _cheapest_within_memory(self, cost_T: Floats, num_priced: int) -> Ints | None:
        worth_M = self.bank.worth_M[:num_priced]
        bytes_T: Floats = worth_M @ self._bytes_MT[:num_priced]
        room = float(worth_M @ self.room_M[:num_priced])
        low, high = 0.0, float(self.own_ms_T.sum()) / max(room, 1.0)
        found: Ints | None = None
        for _ in range(PRICE_STEPS):
            price = high if found is None else (low + high) / 2
            chosen = self._at_price(cost_T, price, bytes_T)
            if bytes_T[chosen].sum() <= room:
                found, high = chosen, price
            else:
                low, high = price, 4.0 * high if found is None else high
        return found if found is not None and self._has_room(found) else None

    def _cheapest(self) -> list[Ints]:
        """Return the cheapest of all choices on balanced ranks, where these are few.

        One of those that should fit, and one that may if ranks are filled to the brim.
        """
        ways = [[w for w in ways if self.fits_T[w]] for ways in self.ways]
        if not 0 < math.prod(map(len, ways)) <= MAX_CHOICES_PRICED:
            return []
        every = np.array(list(itertools.product(*ways)))
        size_MC = np.array([b[every].sum(axis=1) for b in self._bytes_MT])
        cost_C, best = self.costs(every), []
        for room_M in (self.room_M, self.bank.caps_MW.sum(axis=1)):
            fits_C = (size_MC <= room_M[:, None]).all(axis=0)
            if fits_C.any():
                best.append(np.where(fits_C, cost_C, np.inf).argmin())
        return [every[number] for number in dict.fromkeys(best)]

    def best(self, most: int, deadline: float) -> list[Ints]:
        """Return the most promising choices, those at which no switch pays first.

        Args:
            most: Choices wanted.
            deadline: `time.monotonic()` after which none is improved.
        """
        first = self.first()
        starts = np.stack(
            [first, *self._within_memory(), *self._uniform(first), *self._cheapest()]
        )
        order = np.argsort(self.costs(starts), kind="stable")
        cheapest = starts[order[: max(1, most - 1)]]
        found: dict[bytes, tuple[bool, float, Ints]] = {}
        for start in {c.tobytes(): c for c in (first, *cheapest)}.values():
            path = self.path(start, deadline)
            for place, (cost_ms, chosen) in enumerate(path):
                key = chosen.tobytes()
                if key not in found:
                    found[key] = place > 0, cost_ms, chosen
        ends = sorted(found.values(), key=lambda f: f[:2])
        best = [c for _, _, c in ends[: max(1, most - 1)]]
        # The choice of most freedom is as good as balanced ranks make it look.
        return [
            *best,
            *(c for c in [first] if not any((c == o).all() for o in best)),
        ]

    def smaller(self, chosen_N: Ints, at_least: int) -> Ints:
        """Return the choice with the largest shards' tables in ways that take less.

        Args:
            chosen_N: The way of each table, in the order of `ways`.
            at_least: Tables to switch, as far as there are so many.
        """
        chosen, changed = chosen_N.copy(), 0
        for number in np.argsort(-self._shard_bytes_T[chosen], kind="stable").tolist():
            least = 0.9 * self._shard_bytes_T[chosen[number]]
            less = [
                w
                for w in self.ways[number]
                if self.fits_T[w] and self._shard_bytes_T[w] < least
            ]
            if less and changed < at_least:
                chosen[number] = min(less, key=lambda w: self.own_ms_T[w])
                changed += 1
        return chosen

    def smallest(self) -> Ints:
        """Return the choice of least memory on the fullest rank, about."""
        tables = np.arange(len(self.width_T))
        each = self.bank.scarcest(self.bank.sizes(tables, self.width_T))
        return np.array(
            [
                min(w, key=lambda v: (not self.fits_T[v], self._bytes_T[v], each[v]))
                for w in self.ways
            ]
        )

    def costs(self, chosen_CN: Ints) -> Floats:
        """Milliseconds of an iteration on balanced ranks, `C`.

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
        comms = bank.simulator.comms_costs(loads_CWS3).max(axis=1)
        kernels: Floats = compute.reshape(count, num_groups * 2).sum(axis=1)
        total: Floats = kernels + comms.sum(axis=(1, 2))
        return total

    def path(self, start_N: Ints, deadline: float) -> list[tuple[float, Ints]]:
        """Switch tables to other ways as long as that pays.

        Args:
            start_N: The way of each table, in the order of `ways`.
            deadline: `time.monotonic()` after which no step is taken.

        Returns:
            Every choice on the path and its cost on balanced ranks, the last one first.
        """
        now, now_ms = start_N, float(self.costs(start_N[None])[0])
        path = [(now_ms, now)]
        for _ in range(MAX_STEPS):
            if time.monotonic() > deadline:
                break
            found = [
                (float(cost_ms), candidates[i])
                for candidates, margin in self.switches(now)
                for i, cost_ms in enumerate(self.costs(candidates))
                if cost_ms < now_ms * (1 - margin)
            ]
            if not found:
                found = self._cheaper_single(now, now_ms)
            if not found:
                break
            best = min(range(len(found)), key=lambda i: found[i][0])
            now_ms, now = found[best]
            path.append((now_ms, now))
        return path[::-1]

    def _cheaper_single(self, now_N: Ints, now_ms: float) -> list[tuple[float, Ints]]:
        """Return what one table in any other way makes cheaper, with its cost [ms].

        Several at once are told by what tables cost alone, which stages do not.
        """
        changes = [
            (number, way)
            for number, ways in enumerate(self.ways)
            for way in ways
            if way != now_N[number] and self.fits_T[way]
        ]
        if not 0 < len(changes) <= MAX_CHOICES_PRICED:
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

    def switches(self, now_N: Ints) -> Iterator[tuple[Ints, float]]:
        """Switch some tables from one kind of way to another, for all pairs of kinds.

        Args:
            now_N: The way that each table takes.

        Yields:
            `C x N` choices that fit, and the part of an iteration that a switch to
            such ways must gain.
        """
        now_F = now_N[self._number_F]
        open_F = np.flatnonzero((self._way_F != now_F) & self.fits_T[self._way_F])
        number, way, now = (a[open_F] for a in (self._number_F, self._way_F, now_F))
        gain = self.own_ms_T[way] - self.own_ms_T[now]
        pair = self.kind_T[now] * (self.kind_T.max() + 1) + self.kind_T[way]
        order = np.lexsort((way, number, gain, pair))
        groups = np.split(order, _firsts(pair[order])[1:]) if len(order) else []
        for changes in sorted(groups, key=min):
            counts = _counts(len(changes))
            candidates = np.repeat(now_N[None], len(counts), axis=0)
            for line, count in enumerate(counts):
                candidates[line, number[changes[:count]]] = way[changes[:count]]
            fits = self._has_room(candidates)
            estimated = bool(self.estimated_T[way[changes[0]]])
            if fits.any():
                yield candidates[fits], MIN_ESTIMATED_GAIN if estimated else MIN_GAIN


def _firsts(sorted_N: Ints) -> Ints:
    """Where in sorted values each one begins."""
    return np.flatnonzero(np.diff(sorted_N, prepend=-1))


def _kernel(factors: KernelFactors | None) -> KernelFactors | None:
    """Return what all tables in one kernel share: not what their caches miss."""
    if factors is None or factors.host is None or not factors.has_cache:
        return factors
    return dataclasses.replace(
        factors, host=dataclasses.replace(factors.host, missed=0.0)
    )


def _members(
    way_N: Ints, cell_N: Ints, size: int, num_ways: int
) -> tuple[Any, Ints, Ints]:
    """Return what is in each cell: a matrix, `size x num_ways`, that adds rows up.

    Returns:
        Also the order of the ways by cell, and where in it each cell that has some
        begins.
    """
    order = np.argsort(cell_N, kind="stable")
    ends = np.cumsum(np.bincount(cell_N, minlength=size))
    indptr = np.concatenate([[0], ends])
    matrix = sparse.csr_array(
        (np.ones(len(order)), way_N[order], indptr), shape=(size, num_ways)
    )
    starts = np.flatnonzero(np.diff(cell_N[order], prepend=-1))
    return matrix, order, starts


def _counts(total: int) -> list[int]:
    """How many tables to switch at once: all small numbers, some large ones."""
    counts, count = [], 1
    while count < total:
        counts.append(count)
        count = max(count + 1, int(count * 1.5))
    return [*counts, total]


def place_blocks(bank: ShardBank, chosen_N: Ints) -> Ints:
    """Put the chosen tables that are split by rows, or replicated, on their ranks.

    Those of a node go, the costliest first, to the nodes that then have the least to
    do among those with memory.

    Returns:
        `T x W` widths; 0 for all tables that lie in column shards.

    Raises:
        InfeasibleError: One of them finds no room.
    """
    task = bank.task
    width_TW = bank.no_widths()
    free_MW = bank.caps_MW.copy()
    loads_W = np.zeros(task.world_size)
    own = chosen_N[~bank.moves_T[chosen_N]]
    whole_ms = bank.total_ms(own, bank.dims_T[own])
    order = np.lexsort((own, -whole_ms, bank.block_T[own] < task.world_size))
    for table in own[order].tolist():
        width_W = block_widths(bank, table, loads_W, free_MW, width_TW)
        if width_W is None:
            raise InfeasibleError(_no_room(bank, table, free_MW))
        take_room(bank, table, width_W, loads_W, free_MW)
        width_TW[table] = width_W
    return width_TW


def _no_room(bank: ShardBank, table: int, free_MW: Floats) -> str:
    """Say what a table that is split by rows, or replicated, finds no room for."""
    task = bank.task
    count, size = task.num_blocks(table), int(bank.block_T[table])
    width = min(int(bank.dims_T[table]), int(task.min_widths[table]))
    needs_M = bank.sizes(np.array([table]), np.array([width]))[:, 0]
    # Of each block its fullest rank tells, of all blocks the last one that is needed.
    room_MB = free_MW.reshape(len(free_MW), -1, size).min(axis=2)
    has_M = np.sort(room_MB, axis=1)[:, max(0, room_MB.shape[1] - count)]
    place = int((needs_M - has_M).argmax())
    rules = " and the rules on ranks" if bank.rules else ""
    return (
        f"{HOST * place}{describe(task, table)} needs {format_bytes(needs_M[place])} "
        f"on each of {count * size} ranks ({task.sharding_types[table]}); other "
        f"tables{rules} leave {format_bytes(max(0.0, has_M[place]))}. {way_out(task)}"
    )


def columns_of(bank: ShardBank, chosen_N: Ints) -> list[int]:
    """Return the chosen tables that lie in column shards, followers among them."""
    taken = np.zeros(len(bank.leader_T), dtype=bool)
    taken[chosen_N[bank.moves_T[chosen_N]]] = True
    return [int(t) for t in np.flatnonzero(taken[bank.leader_T])]


def memory_left(bank: ShardBank, width_TW: Ints) -> Floats:
    """Return the memory of each rank that placed tables leave, `M x W` bytes."""
    held, rank = np.nonzero(width_TW)
    left: Floats = bank.caps_MW - bank.sizes_of_ranks(held, width_TW[held, rank], rank)
    return left


def block_widths(
    bank: ShardBank, table: int, loads_W: Floats, free_MW: Floats, width_TW: Ints
) -> Ints | None:
    """Put a table that is split by rows, or replicated, on the least loaded blocks.

    Args:
        bank: The task's shards.
        table: Index of the way.
        loads_W: What ranks have to do [ms].
        free_MW: Memory left [bytes].
        width_TW: Columns placed so far; rules on ranks are held against them.

    Returns:
        `W` widths; None where too few blocks have memory and are allowed.
    """
    task = bank.task
    size, count = int(bank.block_T[table]), task.num_blocks(table)
    width = min(int(bank.dims_T[table]), int(task.min_widths[table]))
    room_MW = free_MW >= bank.sizes(np.array([table]), np.array([width]))
    room_W: Bools = np.all(room_MW, axis=0)
    if bank.rules:
        room_W &= bank.rules.open_ranks(width_TW, table)
    room_B: Bools = np.all(room_W.reshape(-1, size), axis=1)
    if room_B.sum() < count:
        return None
    load_B = np.where(room_B, loads_W.reshape(-1, size).max(axis=1), np.inf)
    width_BW = np.zeros((len(room_B), size), dtype=np.int64)
    width_BW[np.argsort(load_B, kind="stable")[:count]] = width
    return width_BW.reshape(-1)


def take_room(
    bank: ShardBank, table: int, width_W: Ints, loads_W: Floats, free_MW: Floats
) -> None:
    """Add a table's shards to the load of ranks and take their memory, in place.

    Args:
        bank: The task's shards.
        table: Index of the way.
        width_W: Its columns on each rank.
        loads_W: What ranks have to do [ms].
        free_MW: Memory left [bytes].
    """
    tables = np.full(len(width_W), table)
    loads_W += bank.total_ms(tables, width_W)
    free_MW -= bank.sizes(tables, width_W)


def column_task(
    task: ShardingTask, tables: Sequence[int], free_MW: Floats, width_TW: Ints
) -> ShardingTask:
    """Return the task of some tables that lie in column shards.

    Args:
        task: The whole task.
        tables: Those tables, of each name one.
        free_MW: Memory that the others leave.
        width_TW: Where the others are.

    Raises:
        InfeasibleError: The others leave one of them no rank, or too little memory.
    """
    place = {t: i for i, t in enumerate(tables)}
    groups = sorted({task.groups[t] for t in tables})
    stages = sorted({task.stages[g] for g in groups})
    fields: dict[str, Any] = {
        name: tuple(getattr(task, name)[t] for t in tables)
        for name in (
            "tables",
            "fixed_bytes",
            "column_bytes",
            "host_fixed_bytes",
            "host_column_bytes",
            "min_widths",
            "max_shards",
            "sharding_types",
            "pooled",
            "codecs",
            "repeats",
            "kernels",
        )
    }
    closed: list[set[int]] = [set() for _ in tables]
    for members in task.apart:
        taken = np.flatnonzero(width_TW[list(members)].any(axis=0)).tolist()
        for t in members:
            if t in place:
                closed[place[t]].update(taken)
    if task.allowed_ranks or any(closed):
        every = range(task.world_size)
        allowed = [
            tuple(
                r for r in (task.allowed_ranks or ((),) * len(task.tables))[t] or every
            )
            for t in tables
        ]
        fields["allowed_ranks"] = tuple(
            tuple(r for r in ranks if r not in shut)
            for ranks, shut in zip(allowed, closed, strict=True)
        )
        for table, ranks in zip(fields["tables"], fields["allowed_ranks"], strict=True):
            if not ranks:  # which would mean any
                raise InfeasibleError(
                    f"table '{table.name}' finds no rank: tables that it must lie "
                    "apart from, split by rows or replicated, are on all that it may "
                    "be on. Take it out of the set (apart) or allow these tables other "
                    "sharding types alone"
                )
    for name in ("together", "apart"):
        sets = [tuple(place[t] for t in s if t in place) for s in getattr(task, name)]
        fields[name] = tuple(s for s in sets if len(s) > 1)
    names = "memory_bytes", "host_memory_bytes"
    for name, free_W in zip(names, free_MW.tolist(), strict=False):
        if getattr(task, name):
            fields[name] = tuple(int(max(0.0, free)) for free in free_W)
    part = dataclasses.replace(
        task,
        **fields,
        groups=tuple(groups.index(task.groups[t]) for t in tables),
        stages=tuple(stages.index(task.stages[g]) for g in groups),
        stage_names=tuple(task.stage_names[s] for s in stages),
        alternatives=(),
    )
    check_memory(merged(part), is_part=True)
    return part
