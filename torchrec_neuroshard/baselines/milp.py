"""Integer programming on single-shard costs: what a cost per shard can achieve.

Every table is kept whole or cut into shards of one width; every shard goes on a rank.
The program minimises the critical path as it would be if costs added up: for each stage
the largest rank's forward compute, the same backward, and collectives at a fixed price
per column and per index byte of the busiest rank. HiGHS solves it within a time limit.

That kernels share their launch and their caches, and that collectives are not linear,
it cannot know: the plan is the best one for costs of shards alone, predicted (in
`SearchResult.predicted`) by the models as they are.

Where HiGHS has no plan by the limit, or one that is no better by the program's own
objective, the result is the greedy's on predicted costs, or any that fits, and
`SearchResult.fallback` says so.

Shapes: `O` options (a table in so many shards), `T` tables, `W` ranks, `P` phases of
all stages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

from torchrec_neuroshard.baselines.common import finish, whole_widths
from torchrec_neuroshard.baselines.heuristics import place_greedily
from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search.base import BudgetedSearcher, SearchResult
from torchrec_neuroshard.search.feasibility import check_memory, pack
from torchrec_neuroshard.search.rules import require_unconstrained
from torchrec_neuroshard.search.shards import (
    Floats,
    Ints,
    ShardBank,
    legal_splits,
    placement_from_widths,
    split_widths,
)
from torchrec_neuroshard.simulator import Simulator

__all__ = ["MilpConfig", "MilpSearcher"]

_TOLERANCE = 1e-6
"""To which HiGHS keeps constraints, relative to a rank's memory here."""
_LEAST_GAIN = 1e-9
"""Relative gain over the greedy below which HiGHS found nothing better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MilpConfig:
    """Limits of the program and of its solver."""

    splits: bool = True
    """Whether tables may be cut, into shards of one width."""
    time_budget_seconds: float = 20.0
    """HiGHS stops soon after this; some of its steps cannot be interrupted."""
    relative_gap: float = 1e-3
    """HiGHS stops when its plan is proven to be this near its optimum."""

    def __post_init__(self) -> None:
        if not self.time_budget_seconds > 0 or not self.relative_gap >= 0:
            raise ConfigError(
                "time_budget_seconds must be above 0 and relative_gap at least 0, got "
                f"{self.time_budget_seconds} and {self.relative_gap}"
            )


@dataclass(frozen=True, slots=True)
class _Options:
    """Ways to cut each table, one row each."""

    table_O: Ints
    width_O: Ints
    shards_O: Ints
    bytes_O: Floats
    """Of one shard."""
    cost_OP: Floats
    """What one shard adds to each phase of its rank [ms]."""


class _Program:
    """The integer program of one task.

    Variables: a shard of option o on rank r, for all o then r; whether option o is
    taken; the largest rank's time in each phase.
    """

    def __init__(self, task: ShardingTask, options: _Options) -> None:
        self.task, self.options = task, options
        num_options, num_phases = options.cost_OP.shape
        self._num_placed = num_options * task.world_size
        # Milliseconds relative to an even share, so that tolerances mean something.
        whole_OP = options.cost_OP[options.shards_O == 1]
        self.unit_ms = max(float(whole_OP.sum()) / task.world_size, 1e-9)
        self._shape = num_options, task.world_size, num_phases

    def solve(self, config: MilpConfig) -> tuple[Ints | None, str]:
        """Return the widths found, `T x W`, if any, and what HiGHS says of its end."""
        num_options, num_ranks, num_phases = self._shape
        num_binary = self._num_placed + num_options
        found = optimize.milp(
            np.r_[np.zeros(num_binary), np.ones(num_phases)],
            integrality=np.r_[np.ones(num_binary), np.zeros(num_phases)],
            bounds=optimize.Bounds(
                0, np.r_[np.ones(num_binary), np.full(num_phases, np.inf)]
            ),
            constraints=[
                optimize.LinearConstraint(matrix.tocsr(), low, high)
                for matrix, low, high in self._constraints()
            ],
            options={
                "time_limit": config.time_budget_seconds,
                "mip_rel_gap": config.relative_gap,
            },
        )
        if found.x is None:
            return None, str(found.message)
        placed_OW = found.x[: self._num_placed].reshape(num_options, num_ranks) > 0.5
        width_TW = np.zeros((len(self.task.tables), num_ranks), dtype=np.int64)
        option, rank = np.nonzero(placed_OW)
        width_TW[self.options.table_O[option], rank] = self.options.width_O[option]
        return width_TW, str(found.message)

    def _constraints(self) -> Sequence[tuple[sparse.coo_array, Floats, Floats]]:
        return [
            self._one_option_each(),
            self._all_shards_placed(),
            self._largest_ranks(),
            *([self._memory()] if self.task.memory_bytes else []),
        ]

    def _one_option_each(self) -> tuple[sparse.coo_array, Floats, Floats]:
        """Each table is cut one way."""
        num_options, num_tables = self._shape[0], len(self.task.tables)
        taken = self._num_placed + np.arange(num_options)
        matrix = self._matrix(
            np.ones(num_options), self.options.table_O, taken, num_tables
        )
        return matrix, np.ones(num_tables), np.ones(num_tables)

    def _all_shards_placed(self) -> tuple[sparse.coo_array, Floats, Floats]:
        """As many ranks hold a shard of an option as it has shards, if it is taken."""
        num_options, num_ranks, _ = self._shape
        row = np.arange(num_options)
        matrix = self._matrix(
            np.r_[np.ones(self._num_placed), -self.options.shards_O],
            np.r_[np.repeat(row, num_ranks), row],
            np.r_[np.arange(self._num_placed), self._num_placed + row],
            num_options,
        )
        return matrix, np.zeros(num_options), np.zeros(num_options)

    def _largest_ranks(self) -> tuple[sparse.coo_array, Floats, Floats]:
        """No rank is longer in a phase than the largest."""
        _, num_ranks, num_phases = self._shape
        option, phase = np.nonzero(self.options.cost_OP)
        cost = self.options.cost_OP[option, phase] / self.unit_ms
        rank = np.arange(num_ranks)
        count = num_ranks * num_phases
        largest = self._num_placed + self._shape[0] + np.arange(num_phases)
        matrix = self._matrix(
            np.r_[np.repeat(cost, num_ranks), -np.ones(count)],
            np.r_[(phase[:, None] * num_ranks + rank).ravel(), np.arange(count)],
            np.r_[
                (option[:, None] * num_ranks + rank).ravel(),
                np.repeat(largest, num_ranks),
            ],
            count,
        )
        return matrix, np.full(count, -np.inf), np.zeros(count)

    def _memory(self) -> tuple[sparse.coo_array, Floats, Floats]:
        """No rank holds more than it has."""
        num_options, num_ranks, _ = self._shape
        cap_W = np.asarray(self.task.memory_bytes, dtype=np.float64)
        unit_W = np.maximum(cap_W, 1.0)
        share_OW = self.options.bytes_O[:, None] / unit_W
        matrix = self._matrix(
            share_OW.ravel(),
            np.tile(np.arange(num_ranks), num_options),
            np.arange(self._num_placed),
            num_ranks,
        )
        # What a solver takes for equal may be a little more.
        return matrix, np.full(num_ranks, -np.inf), cap_W / unit_W - _TOLERANCE

    def _matrix(
        self, values: Floats, rows: Ints, columns: Ints, num_rows: int
    ) -> sparse.coo_array:
        num_variables = self._num_placed + self._shape[0] + self._shape[2]
        return sparse.coo_array((values, (rows, columns)), (num_rows, num_variables))

    def objective(self, width_TW: Ints) -> float:
        """Sum over phases of the largest rank's time, costs added up [ms]."""
        options = self.options
        placed_OW = width_TW[options.table_O] == options.width_O[:, None]
        times_PW = options.cost_OP.T @ placed_OW
        return float(times_PW.max(axis=1).sum())


class MilpSearcher(BudgetedSearcher[MilpConfig]):
    """Assigns whole tables and even splits to ranks by integer programming.

    `SearchResult.num_evaluated` counts single shards and the result's ranks.
    """

    name = "milp"

    def __init__(self, config: MilpConfig | None = None) -> None:
        """Take the limits; None means the defaults."""
        super().__init__(config or MilpConfig())

    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        """Find a placement.

        Raises:
            InfeasibleError: The tables cannot fit, or no packing was found.
            ConfigError: The task says which ranks tables may share or use.
        """
        start = time.monotonic()
        require_unconstrained(task, self.name)
        check_memory(task)
        simulator = Simulator(task, cost_model, comms_model)
        options = _options(simulator, self.config.splits)
        program = _Program(task, options)
        found, message = program.solve(self.config)
        width_TW, fallback = _better(program, found, message)
        placement = placement_from_widths(width_TW)
        placement.check(task)
        evaluated = len(options.table_O) + task.world_size
        return finish(placement, simulator, start, evaluated, fallback=fallback)


def _options(simulator: Simulator, splits: bool) -> _Options:
    task = simulator.task
    cuts = [
        (table, widths[0], len(widths))
        for table in range(len(task.tables))
        for count in (legal_splits(task, table) if splits else (1,))
        if len(set(widths := split_widths(task, table, count))) == 1
    ]
    table_O, width_O, shards_O = np.array(cuts, dtype=np.int64).T
    bank = ShardBank(simulator)
    compute_O2 = simulator.single_compute(simulator.price(table_O, width_O))
    stage_O = bank.stages_T[table_O]
    loads_O3 = bank.loads_of(bank.rows(table_O, width_O))
    comms_O = (bank.comms_per_load_S3[stage_O] * loads_O3).sum(axis=1)
    cost_OSP = np.zeros((len(cuts), task.num_stages, 3))
    cost_OSP[np.arange(len(cuts)), stage_O] = np.c_[compute_O2, comms_O]
    return _Options(
        table_O,
        width_O,
        shards_O,
        bank.bytes(table_O, width_O),
        cost_OSP.reshape(len(cuts), -1),
    )


def _better(
    program: _Program, found: Ints | None, message: str
) -> tuple[Ints, str | None]:
    """Return the widths to take, and why they are not HiGHS's if they are not."""
    task, options = program.task, program.options
    whole = options.shards_O == 1
    try:
        rank_T = place_greedily(task, options.cost_OP[whole].sum(axis=1))
    except InfeasibleError:
        if found is not None:
            return found, None
        return pack(task), f"HiGHS found no plan ({message}): any that fits was taken"
    greedy = whole_widths(task, rank_T)
    if found is None:
        return greedy, f"HiGHS found no plan ({message}): the greedy's was taken"
    best, other = program.objective(found), program.objective(greedy)
    if best <= other * (1 + _LEAST_GAIN):
        return found, None
    return greedy, (
        f"HiGHS's plan ({message}) is {best / other - 1:.1%} worse than the greedy's "
        "by its own objective: the greedy's was taken"
    )
