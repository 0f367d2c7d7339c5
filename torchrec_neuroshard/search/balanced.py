"""The integer program behind the lower bound: how short ranks with equal work are.

Whatever the placement, some rank has at least the average of a stage's work. So each
phase of a stage takes no less than

- the kernel's launch and the mean of all work over the ranks;
- what the largest shard of any of its tables takes alone;

and a collective no less than with the same total in equal parts on all ranks, nor than
the largest shard's alone (more to move never takes less). Which way each table takes,
and in how many shards, then decides how long an iteration takes at least. HiGHS finds
the best choice; where it stops early, its own bound counts.

Three things are left out, without which no plan is slower: how shards fit beside each
other into a rank's memory, rules on ranks, and putting outputs in order.

Shapes: `O` options, each a way of a table in some number of shards, `N` shards, `K`
rows of work (see `Work`), `M` memories, `G` fusion groups, `S` stages, `2` forward and
backward, `3` loads of collectives (see `simulator.PricedShards`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.search.shards import Bools, Floats, Ints, ShardBank, sum_by
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

__all__ = ["Options", "Program", "Work", "list_options", "owners"]

MAX_WHOLE = 600
"""Options up to which a table takes one of them whole; of more it may mix them."""
MAX_ALONE = 64
"""Tables of a stage whose largest shards are looked at, the costliest ones."""
NUM_KNOTS = 128
"""Loads at which a collective is looked up between two powers of two."""
MIP_GAP = 1e-3
"""How near HiGHS comes to the best choice."""
LEAST_SECONDS = 3.0
"""What HiGHS has where time is up."""
SLACK = 1e-6
"""What the solver's own tolerances may amount to."""


class Work(Protocol):
    """Work of kernels that adds up, so that its mean over ranks is known.

    Some rank's kernels take at least their launch and the mean of all shards' work.
    """

    covers: Sequence[tuple[int, ...]]
    """For each row of work, the phases it is part of together: forward 0, backward
    1."""

    def launch(self, groups: Sequence[int]) -> Floats:
        """Return the launch of any kernels of these groups together, `K` [ms]."""

    def of_shards(self, rows_N: Ints) -> Floats:
        """Return the work of shards, `N x K` [ms]."""

    def alone(self, rows_N: Ints) -> Floats:
        """Return the least that any kernel with each shard takes, `N x 2` [ms]."""


@dataclass(frozen=True, slots=True)
class Options:
    """What options cost and hold at least."""

    own_O: Ints
    """The table proper, counting from 0."""
    way_O: Ints
    mean_OK: Floats
    """Work of all shards over the number of ranks [ms]."""
    loads_O3: Floats
    """Loads of all ranks together."""
    bytes_OM: Floats
    """Memory of all ranks together."""
    alone_O5: Floats
    """Phases of a rank with the largest shard alone [ms]."""

    def pick(self, index: Ints | Bools) -> Self:
        """Return some of them."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))

    def useful(self, group_O: Ints, *, in_memory: bool) -> Self:
        """Leave out options that are never better than another of the same table.

        Args:
            group_O: Their fusion groups; options of different ones are not compared.
            in_memory: Whether one that takes less memory counts as better.
        """
        costs = [self.mean_OK, self.loads_O3, self.alone_O5]
        cost_OX = np.concatenate([*costs, *[self.bytes_OM] * in_memory], axis=1)
        # Where costs are the same, the one of less memory comes first.
        order = np.lexsort((self.bytes_OM.sum(axis=1), cost_OX.sum(axis=1)))
        key_O = self.own_O * (int(group_O.max()) + 1) + group_O
        kept: list[int] = []
        for held in _alike(key_O[order]):
            left = order[held]
            while len(left):
                kept.append(int(left[0]))
                left = left[(cost_OX[left] < cost_OX[left[0]]).any(axis=1)]
        return self.pick(np.sort(np.array(kept)))


def list_options(bank: ShardBank, work: Work) -> Options:
    """List the options of every table that some rank has room for.

    Args:
        bank: The task's shards, each table for itself.
        work: What kernels take.
    """
    task = bank.task
    counts = [(w, *c) for w in range(len(bank.dims_T)) for c in _counts(bank, w)]
    way_O, few_O, many_O = np.array(counts, dtype=np.int64).T
    # The widest shard is no narrower than the mean of the most shards.
    width_O = -(-bank.dims_T[way_O] // (many_O * COLUMN_MULTIPLE)) * COLUMN_MULTIPLE
    fits_O = (bank.sizes(way_O, width_O) <= bank.caps_MW.max(axis=1)[:, None]).all(0)
    way_O, few_O, many_O, width_O = (v[fits_O] for v in (way_O, few_O, many_O, width_O))
    dim_O, size_O = bank.dims_T[way_O], bank.block_T[way_O]
    place_N, rank_N, alike_N = bank.parts(way_O)
    row_N = bank.rows(way_O[place_N], width_O[place_N], rank_N)
    times_N1 = (alike_N * dim_O[place_N] / width_O[place_N])[:, None]
    work_OK, loads_O3 = (
        sum_by(place_N, values * times_N1, len(way_O))
        for values in (work.of_shards(row_N), bank.loads_of(row_N))
    )
    # All shards of a table are sent its ids, however few columns they have.
    loads_O3[:, 0] *= few_O * width_O / dim_O
    first_O = np.flatnonzero(np.diff(place_N, prepend=-1))
    compute_O2, comms_O3 = (
        work.alone(row_N[first_O]),
        _comms_alone(bank, way_O, width_O),
    )
    varied_O = few_O < dim_O / width_O
    for way in np.unique(way_O[varied_O]).tolist():
        own = np.flatnonzero(varied_O & (way_O == way))
        work_OK[own], compute_O2[own] = _uneven(
            bank, work, way, few_O[own], many_O[own]
        )
    _, fixed_MT, column_MT = task.memory
    bytes_MO = fixed_MT[:, way_O] * few_O + column_MT[:, way_O] * dim_O
    return Options(
        own_O=owners(task)[way_O],
        way_O=way_O,
        mean_OK=work_OK / task.world_size,
        loads_O3=loads_O3,
        bytes_OM=(size_O * bytes_MO).T,
        alone_O5=np.concatenate([compute_O2, comms_O3], axis=1),
    )


def owners(task: ShardingTask) -> Ints:
    """Return the table proper that each way is of, counting from 0."""
    number_T = np.zeros(len(task.tables), dtype=np.int64)
    for number, ways in enumerate(task.ways):
        number_T[list(ways)] = number
    return number_T


def _counts(bank: ShardBank, way: int) -> Iterator[tuple[int, int]]:
    """Yield the fewest and the most shards of columns of a way's options."""
    splits = bank.splits(way)
    if not bank.moves_T[way]:
        splits = (int(bank.num_blocks_T[way]),)
    if not (bank.task.uneven and bank.moves_T[way]):
        yield from ((k, k) for k in splits)
        return
    few = 1
    while few <= splits[-1]:
        many = min(few + few // 2, splits[-1])
        yield few, many
        few = many + 1


def _uneven(
    bank: ShardBank, work: Work, way: int, few_O: Ints, many_O: Ints
) -> tuple[Floats, Floats]:
    """Bound the work and the largest shard of a table in shards of any widths.

    No sum over shards is below a straight line under all of them, whatever its slope.

    Returns:
        Work of all shards, `O x K`, and the largest one alone, `O x 2` [ms].
    """
    dim, narrowest = int(bank.dims_T[way]), int(bank.narrowest_T[way])
    width_N = np.arange(narrowest, dim - narrowest + 1, COLUMN_MULTIPLE)
    row_N = bank.rows(np.full(len(width_N), way), width_N)
    each_NK = work.of_shards(row_N)
    slope_XK = np.diff(each_NK, axis=0, prepend=0.0) / COLUMN_MULTIPLE
    under_XK = (each_NK - slope_XK[:, None] * width_N[:, None]).min(axis=1)
    ends_2OXK = np.stack([few_O, many_O])[:, :, None, None] * under_XK + slope_XK * dim
    total_OK = np.maximum(ends_2OXK.min(axis=0).max(axis=1), 0.0)
    wide_ON1 = (width_N * many_O[:, None] >= dim)[..., None]
    return total_OK, np.where(wide_ON1, work.alone(row_N), np.inf).min(axis=1)


def _comms_alone(bank: ShardBank, way_O: Ints, width_O: Ints) -> Floats:
    """Predict the collectives of one shard, or block, of each option alone.

    Returns:
        `O x 3` [ms], by the load they move; 0 for ways that are alike on all ranks.
    """
    size_O = np.where(
        bank.block_T[way_O] < bank.task.world_size, bank.block_T[way_O], 0
    )
    place_N = np.repeat(np.arange(len(way_O)), size_O)
    rank_N = np.arange(len(place_N)) - np.repeat(np.cumsum(size_O) - size_O, size_O)
    row_N = bank.rows(way_O[place_N], width_O[place_N], rank_N)
    loads_N3 = bank.loads_of(row_N)
    ms_N3 = bank.simulator.single_comms(way_O[place_N], loads_N3, rank_N, place_N)
    most_O3 = np.zeros((len(way_O), 3))
    np.maximum.at(most_O3, place_N, ms_N3)
    return _by_load(most_O3, bank.loads_of(bank.whole_T[way_O])[:, 2] > 0)


def _by_load(ms_N3: Floats, replicated_N: npt.ArrayLike) -> Floats:
    """Turn ids, forward and backward into times of ids, columns and gradients."""
    both_N, replicated_N = ms_N3[:, 1:].sum(axis=1), np.asarray(replicated_N)
    return np.stack(
        [ms_N3[:, 0], both_N * ~replicated_N, both_N * replicated_N], axis=1
    )


class Program:
    """Which option each table takes, and how long phases then are."""

    def __init__(
        self,
        bank: ShardBank,
        work: Work,
        options: Options,
        *,
        in_memory: bool,
    ) -> None:
        """State it.

        Args:
            bank: The task's shards, each table for itself.
            work: What kernels take.
            options: All that tables may be.
            in_memory: Whether all that is taken has to fit into all ranks' memory
                together.
        """
        options = options.useful(bank.groups_T[options.way_O], in_memory=in_memory)
        self._bank, self._work, self._options = bank, work, options
        num_stages = bank.task.num_stages
        self._cost: list[float] = []
        self._whole: list[bool] = []
        self._cells: list[tuple[npt.ArrayLike, npt.ArrayLike]] = []
        self._most: list[float] = []
        whole = len(options.own_O) <= MAX_WHOLE
        self._takes: Ints = np.array([self._add(whole=whole) for _ in options.own_O])
        self._time_S5: Ints = np.full((num_stages, 5), -1)
        """The variable of each phase; -1: there is none."""
        for own in _alike(options.own_O):
            self._rule(self._takes[own], np.full(len(own), -1.0), -1.0)
        room_M = bank.caps_MW.sum(axis=1)
        for room, bytes_O in zip(room_M, options.bytes_OM.T, strict=True):
            if in_memory and math.isfinite(room):
                self._rule(self._takes, bytes_O / max(room, 1.0), 1.0)
        for held in _alike(bank.stages_T[options.way_O]):
            self._add_stage(int(bank.stages_T[options.way_O[held[0]]]), held)

    def solve(self, seconds: float) -> tuple[float, Floats]:
        """Return the least time of an iteration [ms], and the memory it takes, `M`.

        Both are 0 where HiGHS finds nothing in time, or for its rounding.

        Args:
            seconds: For the integer program. Where nothing is left, only tasks of few
                options are solved so, others as a linear program.
        """
        sizes = [np.size(column) for column, _ in self._cells]
        line = np.repeat(np.arange(len(sizes)), sizes)
        column, value = (
            np.concatenate([np.ravel(cell) for cell in cells])
            for cells in zip(*self._cells, strict=True)
        )
        shape = (len(sizes), len(self._cost))
        matrix = sparse.csr_matrix((value, (line, column)), shape=shape)
        cost, most_C = np.array(self._cost), np.array(self._most)
        # Times have no limit; all else is a share or whether something is so.
        most = np.where(cost > 0, np.inf, 1.0)
        num_options = len(self._takes)
        linear = optimize.linprog(
            cost,
            A_ub=matrix,
            b_ub=most_C,
            bounds=np.column_stack([np.zeros(len(cost)), most]),
            method="highs-ds",
            options={"time_limit": max(seconds, LEAST_SECONDS)},
        )
        bound, share_O = 0.0, np.zeros(num_options)
        if linear.status == 0:
            bound, share_O = float(linear.fun), linear.x[:num_options]
        if seconds > 0 or num_options <= MAX_WHOLE:
            found = optimize.milp(
                cost,
                integrality=np.array(self._whole, dtype=np.int64),
                bounds=optimize.Bounds(0.0, most),
                constraints=optimize.LinearConstraint(matrix, ub=most_C),
                options={
                    "mip_rel_gap": MIP_GAP,
                    "time_limit": max(seconds, LEAST_SECONDS),
                },
            )
            if found.mip_dual_bound is not None:
                bound = max(bound, float(found.mip_dual_bound))
            if found.x is not None:
                share_O = found.x[:num_options]
        bytes_M: Floats = share_O @ self._options.bytes_OM
        return max(0.0, bound) * (1 - SLACK), bytes_M

    def _add(self, cost: float = 0.0, *, whole: bool = False) -> int:
        """Add a variable: a time, a share, or whether something is so."""
        self._cost.append(cost)
        self._whole.append(whole)
        return len(self._cost) - 1

    def _rule(
        self, columns: npt.ArrayLike, values: npt.ArrayLike, most: float = 0.0
    ) -> None:
        """Ask that variables times values be no more than this."""
        self._cells.append((columns, values))
        self._most.append(most)

    def _add_stage(self, stage: int, held: Ints) -> None:
        """Add the phases of a stage and its options."""
        options = self._options
        loads = options.loads_O3[held].any(axis=0)
        for phase in np.flatnonzero(np.append([True, True], loads)).tolist():
            self._time_S5[stage, phase] = self._add(1.0)
            self._add_alone(stage, phase, held)
        used = self._uses(held)
        self._add_work(stage, held, used)
        groups = _alike(self._bank.groups_T[options.way_O[held]])
        for group in groups if len(groups) > 1 else ():
            self._add_work(stage, held[group], self._uses(held[group]))
        for load in np.flatnonzero(loads).tolist():
            self._add_collective(stage, load, used, held)

    def _uses(self, held: Ints) -> int:
        """Add whether any of these options is taken."""
        used = self._add(whole=True)
        for own in _alike(self._options.own_O[held]):
            columns = [*self._takes[held[own]], used]
            self._rule(columns, [*[1.0] * len(own), -1.0])
        return used

    def _add_work(self, stage: int, held: Ints, runs: int) -> None:
        """Ask that kernels take as long as their launch and the mean of their work."""
        groups = np.unique(self._bank.groups_T[self._options.way_O[held]])
        launch_K = self._work.launch(groups.tolist())
        for k, covers in enumerate(self._work.covers):
            times = self._time_S5[stage, list(covers)]
            mean = self._options.mean_OK[held, k]
            columns = [*times, runs, *self._takes[held]]
            self._rule(columns, [*[-1.0] * len(times), launch_K[k], *mean])

    def _add_alone(self, stage: int, phase: int, held: Ints) -> None:
        """Ask that a phase take as long as the largest shard of each table."""
        options, time = self._options, int(self._time_S5[stage, phase])
        alone_N = options.alone_O5[held, phase]
        tables = _alike(options.own_O[held])
        most = np.array([alone_N[own].max() for own in tables])
        for table in np.argsort(-most, kind="stable")[:MAX_ALONE].tolist():
            own = tables[table]
            self._rule([time, *self._takes[held[own]]], [-1.0, *alone_N[own]])

    def _add_collective(self, stage: int, load: int, used: int, held: Ints) -> None:
        """Add what moves one of a stage's loads: straight pieces under its time.

        Pieces lie between powers of two, the same ones for all tasks.
        """
        options, each = self._options, self._options.loads_O3[held, load]
        tables = _alike(options.own_O[held])
        most = sum(float(each[own].max()) for own in tables)
        num_ways = np.bincount(options.own_O)
        least = sum(
            float(each[own].min())
            for own in tables
            if len(own) == num_ways[options.own_O[held[own[0]]]]
        )
        low = math.floor(math.log2(max(least, float(each[each > 0].min()))))
        ends = 2.0 ** np.arange(low, max(low + 1, math.ceil(math.log2(most))) + 1)
        knots = np.linspace(ends[:-1], ends[1:], NUM_KNOTS, axis=1)
        even_ms = self._even_ms(stage, load, knots)
        columns, values = [int(self._time_S5[stage, 2 + load])], [-1.0]
        pieces, amounts = [], [*(-each / most)]
        for load_N, ms_N in zip(knots, even_ms, strict=True):
            line_N = np.linspace(ms_N[0], ms_N[-1], NUM_KNOTS)
            # Between two knots the time is no less than at the first.
            over = float((line_N[1:] - ms_N[:-1]).max(initial=0.0))
            piece, above = self._add(whole=True), self._add()
            self._rule([above, piece], [1.0, -1.0])
            pieces += [piece, above]
            amounts += [load_N[0] / most, (load_N[-1] - load_N[0]) / most]
            columns += [piece, above]
            values += [ms_N[0] - over, ms_N[-1] - ms_N[0]]
        self._rule(columns, values)
        starts = np.ones(len(knots))
        self._rule([*pieces[::2], used], [*starts, -1.0])
        self._rule([used, *pieces[::2]], [1.0, *np.negative(starts).tolist()])
        self._rule([*self._takes[held], *pieces], -np.array(amounts))

    def _even_ms(self, stage: int, load: int, load_PN: Floats) -> Floats:
        """Predict a stage's collectives of one load in equal parts [ms]."""
        num_ranks = self._bank.task.world_size
        loads = np.zeros((load_PN.size, num_ranks, 3))
        loads[..., load] = load_PN.reshape(-1, 1) / num_ranks
        ms_N3 = self._bank.simulator.stage_comms(stage, loads).max(axis=1)
        total: Floats = _by_load(ms_N3, load == 2)[:, load].reshape(load_PN.shape)
        return total


def _alike(key_N: Ints) -> list[Ints]:
    """Return the places of each value that there is."""
    order = np.argsort(key_N, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key_N[order])) + 1)
