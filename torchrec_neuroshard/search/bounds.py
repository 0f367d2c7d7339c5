"""Lower bound: the critical path that no placement can beat, by the cost model.

It is the shortest iteration on ranks that share all work evenly. It is a proof, and
exists if the cost model has an additive lower bound on its times, as estimates for
cards do (`CostModel.additive`), and if balanced loads are the fastest for the
collectives (`CommsModel.even_is_fastest`). Nets and measured collectives have none.

In every placement, some rank has at least the average work of a stage. So its kernels
take, forward or backward, at least as long as

- the kernel's launch plus the mean work over all ranks;
- the largest shard of any of the stage's tables alone.

A collective takes at least as long as with equal loads on all ranks, and as long as its
largest shard alone, because moving more never takes less time.

Ids are exchanged one stage after another. A forward or backward pass takes at least as
long as each of these, whatever the order of the stages (see `costs/timeline.py`):

- the kernels of a stage and its exchange, or its all-reduce;
- the exchanges of all stages, and the shortest launch of any kernel, or all
  all-reduces;
- the mean work of all stages, and the shortest launch; together with all exchanges if
  kernels do not run beside them.

How long that takes at least depends on each table's *option*: its way and its number of
shards (a range of numbers if shards may be uneven). HiGHS picks the options with the
shortest iteration, which is the bound. If it stops early, its own bound is used.

The program ignores three things that can only make a plan slower: whether shards fit
together into each rank's memory, placement rules, and the reordering of outputs.

Shapes: `O` options, `N` shards, `M` memories, `E` encoding values, `S` stages, `X`
widths or costs, `2` forward and backward, `3` loads of collectives (see
`simulator.PricedShards`), `4` collectives (exchange of ids, of outputs, of gradients;
all-reduce), `6` phases of a stage: forward, backward and the collectives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.search.shards import (
    Bools,
    Floats,
    Ints,
    ShardBank,
    spread_out,
    sum_by,
)
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE

MAX_WHOLE = 600
"""Up to this many options, each table takes exactly one. With more, a table may take
shares of several, which is quicker to solve and a looser bound."""
MAX_ALONE = 64
"""Most tables per stage whose largest shards are considered, the costliest first."""
NUM_KNOTS = 128
"""Loads between two powers of two at which a collective is predicted."""
MIP_GAP = 1e-3
"""Relative gap to the best choice at which HiGHS stops."""
LEAST_SECONDS = 3.0
"""Least time limit of HiGHS, even after the deadline."""
_LOADS = ((2,), (3, 4), (5,))
"""The phases that each load of collectives takes."""
SLACK = 1e-6
"""The bound is lowered by this relative amount for the solver's tolerances."""
ROUNDING = 1e-7
"""Relative amount by which a placement may exceed the memory of all ranks."""


def lower_bound(bank: ShardBank, deadline: float = math.inf) -> float:
    """Return a lower bound on the critical path of every placement [ms].

    More alternatives never raise it, except by HiGHS's tolerance.

    Args:
        bank: The task's shards, not merged.
        deadline: `time.monotonic()` after which the bound is not improved. If it has
            passed, tasks with many options are solved only as a linear program, which
            is quicker and a looser bound.

    Returns:
        0 if the models have no bound, or the solver finds nothing.
    """
    simulator = bank.simulator
    additive = simulator.cost_model.additive
    if additive is None or not simulator.comms_model.even_is_fastest:
        return 0.0
    options = list_options(bank, additive)
    room_M = bank.caps_MW.sum(axis=1) * (1 + ROUNDING)
    # Memory rarely matters: solve without its limits first, which is quicker.
    for in_memory in (False, True):
        program = Program(bank, additive[0], options, in_memory=in_memory)
        bound_ms, bytes_M = program.solve(deadline - time.monotonic())
        if (bytes_M <= room_M).all():
            break
    return bound_ms


def _work(bank: ShardBank, additive: Floats, rows_N: Ints) -> Floats:
    """Return kernel work of shards that adds up, without launches, `N x 2` [ms].

    Some rank's kernels take at least their launch plus the mean work of all shards.

    Args:
        bank: The task's shards.
        additive: See `CostModel.additive`; the first row is the launch.
        rows_N: Rows of the bank.
    """
    work: Floats = bank.encoding(rows_N) @ additive[1:] + bank.extra(rows_N)
    return work


@dataclass(frozen=True, slots=True)
class Options:
    """The least costs and sizes of options."""

    own_O: Ints
    """The option's table, counted from 0; all ways of a table have the same number."""
    way_O: Ints
    mean_O2: Floats
    """Work of all shards, divided by the number of ranks [ms]."""
    loads_O3: Floats
    """Loads, summed over all ranks."""
    bytes_OM: Floats
    """Memory, summed over all ranks."""
    alone_O6: Floats
    """Phases of a rank that holds only the largest shard [ms]."""

    def pick(self, index: Ints | Bools) -> Self:
        """Return some of the options."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))

    def useful(self, group_O: Ints, *, in_memory: bool) -> Self:
        """Return the options that no other option of the same table beats.

        Args:
            group_O: Fusion groups; options of different groups are not compared.
            in_memory: Whether memory is compared, too.
        """
        costs = [self.mean_O2, self.loads_O3, self.alone_O6]
        cost_OX = np.concatenate([*costs, *[self.bytes_OM] * in_memory], axis=1)
        # Among equal costs, less memory comes first.
        order = np.lexsort((self.bytes_OM.sum(axis=1), cost_OX.sum(axis=1)))
        key_O = self.own_O * (int(group_O.max()) + 1) + group_O
        kept: list[int] = []
        for held in _alike(key_O[order]):
            left = order[held]
            while len(left):
                kept.append(int(left[0]))
                left = left[(cost_OX[left] < cost_OX[left[0]]).any(axis=1)]
        return self.pick(np.sort(np.array(kept)))


def list_options(bank: ShardBank, additive: Floats) -> Options:
    """Return the options of all tables whose shards fit an empty rank.

    Args:
        bank: The task's shards, not merged.
        additive: See `CostModel.additive`.
    """
    task = bank.task
    counts = [(w, *c) for w in range(len(bank.dims_T)) for c in _counts(bank, w)]
    way_O, few_O, many_O = np.array(counts, dtype=np.int64).T
    # An option has `few` to `many` shards. Its widest is at least the mean of `many`.
    width_O = -(-bank.dims_T[way_O] // (many_O * COLUMN_MULTIPLE)) * COLUMN_MULTIPLE
    fits_O = (bank.sizes(way_O, width_O) <= bank.caps_MW.max(axis=1)[:, None]).all(0)
    way_O, few_O, many_O, width_O = (v[fits_O] for v in (way_O, few_O, many_O, width_O))
    dim_O, size_O = bank.dims_T[way_O], bank.block_T[way_O]
    place_N, rank_N, alike_N = bank.parts(way_O)
    row_N = bank.rows(way_O[place_N], width_O[place_N], rank_N)
    times_N1 = (alike_N * dim_O[place_N] / width_O[place_N])[:, None]
    work_O2, loads_O3 = (
        sum_by(place_N, values * times_N1, len(way_O))
        for values in (_work(bank, additive, row_N), bank.loads_of(row_N))
    )
    # Every shard receives all ids of its table, however narrow it is.
    loads_O3[:, 0] *= few_O * width_O / dim_O
    first_O = np.flatnonzero(np.diff(place_N, prepend=-1))
    # Any kernel that holds a shard takes at least as long as with this shard alone.
    compute_O2 = bank.alone(row_N[first_O])
    comms_O4 = _comms_alone(bank, way_O, width_O)
    varied_O = few_O < dim_O / width_O
    for way in np.unique(way_O[varied_O]).tolist():
        own = np.flatnonzero(varied_O & (way_O == way))
        work_O2[own], compute_O2[own] = _uneven(
            bank, additive, way, few_O[own], many_O[own]
        )
    _, fixed_MT, column_MT = task.memory
    bytes_MO = fixed_MT[:, way_O] * few_O + column_MT[:, way_O] * dim_O
    return Options(
        own_O=owners(task)[way_O],
        way_O=way_O,
        mean_O2=work_O2 / task.world_size,
        loads_O3=loads_O3,
        bytes_OM=(size_O * bytes_MO).T,
        alone_O6=np.concatenate([compute_O2, comms_O4], axis=1),
    )


def owners(task: ShardingTask) -> Ints:
    """Return the number of each entry's table, from 0; ways of a table share it."""
    number_T = np.zeros(len(task.tables), dtype=np.int64)
    for number, ways in enumerate(task.ways):
        number_T[list(ways)] = number
    return number_T


def _counts(bank: ShardBank, way: int) -> Iterator[tuple[int, int]]:
    """Yield the fewest and the most column shards of each option of a way.

    If shards may be uneven, one option stands for several numbers of shards.
    """
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
    bank: ShardBank, additive: Floats, way: int, few_O: Ints, many_O: Ints
) -> tuple[Floats, Floats]:
    """Bound the work and the largest shard of a table in shards of any widths.

    The work of a shard depends on its width. A straight line that lies below the work
    at every width also bounds the sum over shards, since the widths add up to the
    table's. The best of several slopes is used.

    Returns:
        Work of all shards, `O x 2`, and the largest shard alone, `O x 2` [ms].
    """
    dim, narrowest = int(bank.dims_T[way]), int(bank.narrowest_T[way])
    width_N = np.arange(narrowest, dim - narrowest + 1, COLUMN_MULTIPLE)
    row_N = bank.rows(np.full(len(width_N), way), width_N)
    each_N2 = _work(bank, additive, row_N)
    slope_X2 = np.diff(each_N2, axis=0, prepend=0.0) / COLUMN_MULTIPLE
    under_X2 = (each_N2 - slope_X2[:, None] * width_N[:, None]).min(axis=1)
    ends_2OX2 = np.stack([few_O, many_O])[:, :, None, None] * under_X2 + slope_X2 * dim
    total_O2 = np.maximum(ends_2OX2.min(axis=0).max(axis=1), 0.0)
    wide_ON1 = (width_N * many_O[:, None] >= dim)[..., None]
    return total_O2, np.where(wide_ON1, bank.alone(row_N), np.inf).min(axis=1)


def _comms_alone(bank: ShardBank, way_O: Ints, width_O: Ints) -> Floats:
    """Predict the collectives with only one shard, or block of ranks, of each option.

    Returns:
        `O x 4` [ms]; 0 for ways whose blocks contain all ranks.
    """
    size_O = np.where(
        bank.block_T[way_O] < bank.task.world_size, bank.block_T[way_O], 0
    )
    place_N, rank_N = spread_out(size_O)
    row_N = bank.rows(way_O[place_N], width_O[place_N], rank_N)
    loads_N3 = bank.loads_of(row_N)
    ms_N3 = bank.simulator.single_comms(way_O[place_N], loads_N3, rank_N, place_N)
    most_O3 = np.zeros((len(way_O), 3))
    np.maximum.at(most_O3, place_N, ms_N3)
    return _collectives(most_O3, bank.loads_of(bank.whole_T[way_O])[:, 2] > 0)


def _collectives(ms_N3: Floats, replicated_N: npt.ArrayLike) -> Floats:
    """Return the times of the four collectives, `N x 4` [ms].

    Args:
        ms_N3: Exchange of ids, of outputs, and of gradients [ms].
        replicated_N: Whether tables are replicated. Then the last is an all-reduce.
    """
    index_N, sent_N, returned_N = ms_N3.T
    reduced_N = returned_N * np.asarray(replicated_N)
    return np.stack([index_N, sent_N, returned_N - reduced_N, reduced_N], axis=1)


class Program:
    """The integer program: the option of each table, and the phases' least times."""

    def __init__(
        self,
        bank: ShardBank,
        launch_2: Floats,
        options: Options,
        *,
        in_memory: bool,
    ) -> None:
        """Build the variables and constraints.

        Args:
            bank: The task's shards, not merged.
            launch_2: The shortest launch of a kernel [ms].
            options: Options of all tables.
            in_memory: Whether the total memory of all tables is limited to that of all
                ranks.
        """
        options = options.useful(bank.groups_T[options.way_O], in_memory=in_memory)
        self._bank, self._launch_2, self._options = bank, launch_2, options
        num_stages = bank.task.num_stages
        self._cost: list[float] = []
        self._limit: list[float] = []
        self._whole: list[bool] = []
        self._cells: list[tuple[npt.ArrayLike, npt.ArrayLike]] = []
        self._most: list[float] = []
        whole = len(options.own_O) <= MAX_WHOLE
        self._takes: Ints = np.array([self._add(whole=whole) for _ in options.own_O])
        self._time_S6: Ints = np.full((num_stages, 6), -1)
        """The variable of each phase's time; -1 if the phase takes none."""
        self._forward_S: Ints = np.full(num_stages, -1)
        """The variable of the forward pass of each stage's module."""
        self._backward = self._add_time(1.0)
        """The variable of the backward pass."""
        for own in _alike(options.own_O):
            self._rule(self._takes[own], np.full(len(own), -1.0), -1.0)
        room_M = bank.caps_MW.sum(axis=1)
        for room, bytes_O in zip(room_M, options.bytes_OM.T, strict=True):
            if in_memory and math.isfinite(room):
                self._rule(self._takes, bytes_O / max(room, 1.0), 1.0)
        stage_O = bank.stages_T[options.way_O]
        module_S = np.array(bank.task.modules)
        for module in np.unique(module_S[stage_O]).tolist():
            self._forward_S[module_S == module] = self._add_time(1.0)
        for held in _alike(stage_O):
            self._add_stage(int(stage_O[held[0]]), held)
        self._add_passes()

    def solve(self, seconds: float) -> tuple[float, Floats]:
        """Return the least time of an iteration [ms], and the memory it needs, `M`.

        Both are 0 if HiGHS finds nothing in time or fails numerically.

        Args:
            seconds: Time limit. If it is 0 or less, tasks with many options are solved
                only as a linear program, which is quicker and a looser bound.
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
        most = np.array(self._limit)
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

    def _add(self, cost: float = 0.0, *, whole: bool = False, most: float = 1.0) -> int:
        """Add a variable (a time, a share, or a yes or no); return its index."""
        self._cost.append(cost)
        self._limit.append(most)
        self._whole.append(whole)
        return len(self._cost) - 1

    def _add_time(self, cost: float = 0.0) -> int:
        """Add a time without an upper limit; return its index."""
        return self._add(cost, most=math.inf)

    def _rule(
        self, columns: npt.ArrayLike, values: npt.ArrayLike, most: float = 0.0
    ) -> None:
        """Add a constraint: the sum of variables times values is at most `most`."""
        self._cells.append((columns, values))
        self._most.append(most)

    def _add_stage(self, stage: int, held: Ints) -> None:
        """Add the phases of a stage, whose options have the indices `held`."""
        options = self._options
        loads = np.flatnonzero(options.loads_O3[held].any(axis=0)).tolist()
        phases = [0, 1, *(phase for load in loads for phase in _LOADS[load])]
        for phase in phases:
            # Ids are exchanged one stage after another.
            self._time_S6[stage, phase] = self._add_time(1.0 if phase == 2 else 0.0)
            self._add_alone(stage, phase, held)
        used = self._uses(held)
        self._add_work(stage, held, used)
        groups = _alike(self._bank.groups_T[options.way_O[held]])
        for group in groups if len(groups) > 1 else ():
            self._add_work(stage, held[group], self._uses(held[group]))
        for load in loads:
            self._add_collective(stage, load, used, held)
        forward, backward, _, sent, returned, reduced = self._time_S6[stage].tolist()
        self._at_least(int(self._forward_S[stage]), forward, sent)
        self._at_least(self._backward, backward, returned)
        self._at_least(self._backward, backward, reduced)

    def _at_least(self, time: int, *parts: int) -> None:
        """Require that a time is at least the sum of others; -1 stands for none."""
        columns = [time, *(part for part in parts if part >= 0)]
        self._rule(columns, [-1.0, *[1.0] * (len(columns) - 1)])

    def _add_passes(self) -> None:
        """Require that passes last as long as all stages' work or exchanges."""
        launch_2 = self._launch_2
        forward: list[int] = np.unique(self._forward_S[self._forward_S >= 0]).tolist()
        sent_S, returned_S, reduced_S = self._time_S6[:, 3:].T
        overlaps = self._bank.simulator.comms_model.overlaps
        backward_S = np.concatenate([returned_S, reduced_S[: 0 if overlaps else None]])
        passes = (forward, sent_S), ([self._backward], backward_S)
        for k, (times, moved_S) in enumerate(passes):
            less = [-1.0] * len(times)
            moved = moved_S[moved_S >= 0]
            ones = np.ones(len(moved))
            beside = moved[: 0 if overlaps else None]
            columns = [*times, *self._takes, *beside]
            values = [*less, *self._options.mean_O2[:, k], *ones[: len(beside)]]
            self._rule(columns, values, -launch_2[k])
            self._rule([*times, *moved], [*less, *ones], -launch_2[k])
        for each in forward:
            self._at_least(each, *sent_S[self._forward_S == each])
        self._at_least(self._backward, *returned_S, *reduced_S)

    def _uses(self, held: Ints) -> int:
        """Add a variable: whether any of these options is taken; return its index."""
        used = self._add(whole=True)
        for own in _alike(self._options.own_O[held]):
            columns = [*self._takes[held[own]], used]
            self._rule(columns, [*[1.0] * len(own), -1.0])
        return used

    def _add_work(self, stage: int, held: Ints, runs: int) -> None:
        """Require that kernels take at least their launch plus their mean work.

        The launch counts only if `runs` is 1, and if all tables share a kernel: the
        rank with the most work need not have tables of every fusion group.
        """
        groups = np.unique(self._bank.groups_T[self._options.way_O[held]])
        launch_2 = self._launch_2 * (len(groups) == 1)
        for k in (0, 1):
            columns = [self._time_S6[stage, k], runs, *self._takes[held]]
            mean = self._options.mean_O2[held, k]
            self._rule(columns, [-1.0, launch_2[k], *mean])

    def _add_alone(self, stage: int, phase: int, held: Ints) -> None:
        """Require that a phase takes at least as long as each table's largest shard."""
        options, time = self._options, int(self._time_S6[stage, phase])
        alone_N = options.alone_O6[held, phase]
        tables = _alike(options.own_O[held])
        most = np.array([alone_N[own].max() for own in tables])
        for table in np.argsort(-most, kind="stable")[:MAX_ALONE].tolist():
            own = tables[table]
            self._rule([time, *self._takes[held[own]]], [-1.0, *alone_N[own]])

    def _add_collective(self, stage: int, load: int, used: int, held: Ints) -> None:
        """Require that a collective takes at least as long as with balanced loads.

        Its time over the load is a curve. Straight lines below the curve, one between
        each two powers of two, replace it. The powers are the same for all tasks.
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
        starts, pieces, amounts = [], [], [*(-each / most)]
        for load_N in knots:
            piece, above = self._add(whole=True), self._add()
            self._rule([above, piece], [1.0, -1.0])
            starts.append(piece)
            pieces += [piece, above]
            amounts += [load_N[0] / most, (load_N[-1] - load_N[0]) / most]
        even_ms = self._even_ms(stage, load, knots)
        for phase, phase_ms in zip(_LOADS[load], even_ms, strict=True):
            values = [-1.0]
            for ms_N in phase_ms:
                line_N = np.linspace(ms_N[0], ms_N[-1], NUM_KNOTS)
                # Between two knots, the time is at least that at the first knot.
                over = float((line_N[1:] - ms_N[:-1]).max(initial=0.0))
                values += [ms_N[0] - over, ms_N[-1] - ms_N[0]]
            self._rule([int(self._time_S6[stage, phase]), *pieces], values)
        ones = np.ones(len(starts))
        self._rule([*starts, used], [*ones, -1.0])
        self._rule([used, *starts], [1.0, *np.negative(ones).tolist()])
        self._rule([*self._takes[held], *pieces], -np.array(amounts))

    def _even_ms(self, stage: int, load: int, load_PN: Floats) -> Iterator[Floats]:
        """Yield a stage's collectives with one load balanced over all ranks [ms]."""
        num_ranks = self._bank.task.world_size
        loads = np.zeros((load_PN.size, num_ranks, 3))
        loads[..., load] = load_PN.reshape(-1, 1) / num_ranks
        ms_N3 = self._bank.simulator.stage_comms(stage, loads).max(axis=1)
        ms_N4 = _collectives(ms_N3, load == 2)
        for phase in _LOADS[load]:
            yield ms_N4[:, phase - 2].reshape(load_PN.shape)


def _alike(key_N: Ints) -> list[Ints]:
    """Return the indices of each distinct value."""
    order = np.argsort(key_N, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key_N[order])) + 1)
