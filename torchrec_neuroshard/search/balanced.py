"""A proof of how short a critical path can be, for costs that add up.

Some models, estimates of cards above all, say of what their times are a sum
(`CostModel.additive`). By these a phase takes, on the slowest rank, no less than

- a launch and the mean over all ranks, since some rank has that much to do;
- what the largest shard of any table that is there takes alone;

and collectives no less than at even loads (`CommsModel.even_is_fastest`). What the
tables' ways, and into how many shards they are split, then make of an iteration at
least is an integer program. All that its solver rules out is ruled out, even where it
stops early. What no rank can hold beside other tables, rules on ranks, and putting
outputs in order are not looked at.

Shapes: `O` options, each a way of a table split into some number of shards, `T` tables,
one index for each way, `N` widths, `S` stages, `G` fusion groups, `2` forward and
backward, `3` loads of collectives (see `simulator.PricedShards`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from torchrec_neuroshard.search.shards import Floats, Ints, ShardBank
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = ["balanced_bound"]

MAX_SHARDS = 100_000
"""Shards of different tables and widths that are looked at; of more nothing is said."""
LEAST_LOAD, NUM_PIECES, NUM_KNOTS = 1e-3, 4, 512
"""Straight pieces under a collective's time over its load, from this share of the
largest load on; knots at which a piece's time is looked up."""
TINY = 1e-12
"""Share of a load for which a collective is made at all."""
MIP_GAP = 1e-3
"""How near the solver comes to the best bound of this kind."""
SLACK = 1e-6
"""What the solver's own tolerances may amount to."""


@dataclass(frozen=True, slots=True)
class _Options:
    """What options cost and hold at least."""

    own_O: Ints
    """The table proper, counting from 0."""
    way_O: Ints
    mean_O2: Floats
    """Compute of all shards, launches aside, over the number of ranks [ms]."""
    alone_O2: Floats
    """Compute of the largest shard alone [ms]."""
    loads_O3: Floats
    """Loads of all ranks together."""
    bytes_O: Floats


def balanced_bound(bank: ShardBank, *, seconds: float, nodes: int) -> float:
    """Bound the critical path of every placement from below.

    Args:
        bank: The task's shards, each table for itself.
        seconds: For the solver.
        nodes: Of the solver's tree.

    Returns:
        Milliseconds: a proof; 0 where costs do not add up or tables are too many.
    """
    simulator = bank.simulator
    additive = simulator.cost_model.additive
    most = bank.dims_T.sum() // COLUMN_MULTIPLE
    if (
        additive is None
        or not simulator.comms_model.even_is_fastest
        or most > MAX_SHARDS
    ):
        return 0.0
    options = _options(bank, additive[1:])
    program = _Program(bank, options, additive[0])
    found = optimize.milp(
        np.array(program.cost),
        integrality=np.array(program.whole, dtype=np.int64),
        bounds=optimize.Bounds(0.0, np.array(program.most)),
        constraints=program.rules(),
        options={"mip_rel_gap": MIP_GAP, "node_limit": nodes, "time_limit": seconds},
    )
    bound = found.mip_dual_bound
    if bound is None or not math.isfinite(bound):
        return 0.0
    return max(0.0, float(bound)) * (1 - SLACK)


def _options(bank: ShardBank, weights_E2: Floats) -> _Options:
    """List the options of every table that some rank has room for."""
    task, num_ranks = bank.task, bank.task.world_size
    room = float(bank.caps_W.max())
    found: list[tuple[int, int, Floats, Floats, Floats, float]] = []
    for own, ways in enumerate(task.ways):
        for way in ways:
            blocks = task.num_blocks(way)
            if bank.moves_T[way]:
                found += [
                    (own, way, *costs) for costs in _splits(bank, way, weights_E2)
                ]
                continue
            width = -(-int(bank.dims_T[way]) // blocks)
            size = float(bank.bytes(np.array([way]), np.array([width]))[0])
            if size > room:
                continue
            _, rank, alike = bank.parts(np.array([way]))
            rows = bank.rows(np.full(len(rank), way), np.full(len(rank), width), rank)
            times = (alike * blocks)[:, None]
            mean = (_additive(bank, rows, weights_E2) * times).sum(axis=0) / num_ranks
            loads = (bank.loads_of(rows) * times).sum(axis=0)
            size *= int(bank.block_T[way]) * blocks
            found.append((own, way, mean, _alone(bank, rows)[0], loads, size))
    return _Options(*(np.array(column) for column in zip(*found, strict=True)))


def _splits(
    bank: ShardBank, way: int, weights_E2: Floats
) -> Iterable[tuple[Floats, Floats, Floats, float]]:
    """Costs of a table in columns: whole, in 2 or 3 shards, 4 to 7, 8 to 15, ..."""
    task, dim = bank.task, int(bank.dims_T[way])
    rows = bank.whole_T[[way]]
    mean = _additive(bank, rows, weights_E2)[0] / task.world_size
    [loads] = bank.loads_of(rows)
    [size] = bank.bytes(np.array([way]), np.array([dim]))
    room = float(bank.caps_W.max())
    if size <= room:
        yield mean, _alone(bank, rows)[0], loads, float(size)
    most = bank.splits(way)[-1]
    if most < 2:
        return
    least = -(-max(1, task.min_widths[way]) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    width_N = np.arange(least, dim - least + 1, COLUMN_MULTIPLE)
    rows = bank.rows(np.full(len(width_N), way), width_N)
    each_N2, alone_N2 = _additive(bank, rows, weights_E2), _alone(bank, rows)
    fits_N = bank.bytes(np.full(len(width_N), way), width_N) <= room
    # No sum over shards is below a straight line under all of them, whatever its slope.
    slopes_K2 = np.diff(each_N2, axis=0, prepend=0.0) / COLUMN_MULTIPLE
    under_K2 = (each_N2 - slopes_K2[:, None] * width_N[:, None]).min(axis=1)
    few = 2
    while few <= most:
        many = min(2 * few - 1, most)
        # The widest of so many shards is no narrower than their mean.
        wide_N = width_N * many >= dim
        if (wide_N & fits_N).any():
            number_1 = np.arange(few, many + 1)[:, None, None]
            total_2 = (number_1 * under_K2 + slopes_K2 * dim).max(axis=1).min(axis=0)
            yield (
                np.maximum(total_2, 0.0) / task.world_size,
                alone_N2[wide_N & fits_N].min(axis=0),
                loads * [few, 1, 1],
                float(size + (few - 1) * task.fixed_bytes[way]),
            )
        few *= 2


def _additive(bank: ShardBank, rows_N: Ints, weights_E2: Floats) -> Floats:
    """What shards add to any set at least, `N x 2` [ms]."""
    added: Floats = bank.encoding(rows_N) @ weights_E2 + bank.extra(rows_N)
    return added


def _alone(bank: ShardBank, rows_N: Ints) -> Floats:
    """What shards take alone, `N x 2` [ms]."""
    alone: Floats = bank.predict(bank.encoding(rows_N)) + bank.extra(rows_N)
    return alone


class _Program:
    """The integer program: which option each table takes, and what phases then take."""

    def __init__(self, bank: ShardBank, options: _Options, launch_2: Floats) -> None:
        """State it."""
        self.cost: list[float] = []
        self.most: list[float] = []
        self.whole: list[bool] = []
        self._cells: list[tuple[npt.ArrayLike, npt.ArrayLike]] = []
        self._most: list[float] = []
        self._bank, self._launch_2 = bank, launch_2
        num_options = len(options.own_O)
        self._takes: Ints = np.array(
            [self._add(whole=True) for _ in range(num_options)]
        )
        for own in range(int(options.own_O.max()) + 1):
            taken = self._takes[options.own_O == own]
            self._rule(taken, np.full(len(taken), -1.0), -1.0)
        room = max(1.0, float(bank.caps_W.sum()))  # ranks may have no memory at all
        if math.isfinite(room):
            self._rule(self._takes, options.bytes_O / room, 1.0)
        for stage in np.unique(bank.stages_T[options.way_O]).tolist():
            self._add_stage(stage, options)

    def rules(self) -> optimize.LinearConstraint:
        """All that the variables have to keep to."""
        line = np.repeat(
            np.arange(len(self._cells)), [np.size(column) for column, _ in self._cells]
        )
        column = np.concatenate([np.ravel(c) for c, _ in self._cells])
        value = np.concatenate([np.ravel(v) for _, v in self._cells])
        shape = (len(self._cells), len(self.cost))
        matrix = sparse.csr_matrix((value, (line, column)), shape=shape)
        return optimize.LinearConstraint(matrix, ub=np.array(self._most))

    def _add(self, cost: float = 0.0, *, whole: bool = False) -> int:
        """Add a variable: a time, an amount, or whether something is so."""
        self.cost.append(cost)
        self.most.append(1.0 if whole else np.inf)
        self.whole.append(whole)
        return len(self.cost) - 1

    def _rule(
        self, columns: npt.ArrayLike, values: npt.ArrayLike, most: float = 0.0
    ) -> None:
        """Ask that variables times values be no more than this."""
        self._cells.append((columns, values))
        self._most.append(most)

    def _add_stage(self, stage: int, options: _Options) -> None:
        """Add the phases of a stage."""
        bank = self._bank
        times = [self._add(1.0), self._add(1.0)]
        held = np.flatnonzero(bank.stages_T[options.way_O] == stage)
        group_O, is_used = bank.groups_T[options.way_O], self._add(whole=True)
        for group in np.unique(group_O[held]).tolist():
            own = held[group_O[held] == group]
            runs = self._add(whole=True)
            self._rule([runs, is_used], [1.0, -1.0])
            for option in own.tolist():
                self._rule([self._takes[option], runs], [1.0, -1.0])
            for phase, time in enumerate(times):
                columns = [time, runs, *self._takes[own]]
                launch = self._launch_2[phase]
                self._rule(columns, [-1.0, launch, *options.mean_O2[own, phase]])
                for option in own.tolist():
                    alone = options.alone_O2[option, phase]
                    self._rule([time, self._takes[option]], [-1.0, alone])
        for phase, time in enumerate(times):
            columns = [time, *self._takes[held]]
            self._rule(columns, [-1.0, *options.mean_O2[held, phase]])
        for load in range(3):
            if options.loads_O3[held, load].any():
                self._add_collective(stage, load, is_used, held, options)

    def _add_collective(
        self, stage: int, load: int, is_used: int, held: Ints, options: _Options
    ) -> None:
        """Add what moves one of a stage's loads: straight pieces under its time."""
        each = options.loads_O3[held, load]
        total = float(each.sum())
        ends = np.concatenate([[0.0], np.geomspace(LEAST_LOAD, 1.0, NUM_PIECES)])
        knots = np.linspace(ends[:-1], ends[1:], NUM_KNOTS, axis=1)
        knots[0, 0] = TINY if each.all() else 0.0
        time = self._add(1.0)
        first, pieces, amounts = [time], [], []
        values = [-1.0]
        even_ms = self._even_ms(stage, load, knots * total)
        for share_N, ms_N in zip(knots, even_ms, strict=True):
            rise = (ms_N[-1] - ms_N[0]) / (share_N[-1] - share_N[0])
            line_N = ms_N[0] + rise * (share_N - share_N[0])
            # Between two knots the time is no less than at the first.
            over = float((line_N[1:] - ms_N[:-1]).max(initial=0.0))
            piece, amount = self._add(whole=True), self._add()
            self._rule([amount, piece], [1.0, -share_N[-1]])
            self._rule([amount, piece], [-1.0, share_N[0]])
            pieces.append(piece)
            amounts.append(amount)
            first += [piece, amount]
            values += [ms_N[0] - rise * share_N[0] - over, rise]
        self._rule(first, values)
        for sign in (1.0, -1.0):
            self._rule([*pieces, is_used], [sign] * len(pieces) + [-sign])
            columns = [*amounts, *self._takes[held]]
            shares = [sign] * len(amounts) + list(-sign * each / total)
            self._rule(columns, shares)

    def _even_ms(self, stage: int, load: int, total_PN: Floats) -> Floats:
        """Time of a stage's collectives at even loads, of the phases of one load."""
        bank, num_ranks = self._bank, self._bank.task.world_size
        loads = np.zeros((total_PN.size, num_ranks, 3))
        # As of a stage in use, however little is sent.
        loads[..., load] = np.maximum(total_PN.reshape(-1, 1), TINY) / num_ranks
        ms = bank.simulator.stage_comms(stage, loads).max(axis=1)
        own = ms[:, :1] if load == 0 else ms[:, 1:]
        total: Floats = own.sum(axis=1).reshape(total_PN.shape)
        return total
