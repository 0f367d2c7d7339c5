"""Integer programming on single-shard costs: the best plan if costs were additive.

The program keeps each table whole or cuts it into shards of equal width, and puts each
shard on a rank. It minimises the critical path as if the costs of shards added up. For
each stage, that is the largest rank's forward compute, the largest rank's backward
compute, and collectives at a fixed price per column and per index byte of the busiest
rank. HiGHS solves the program within a time limit.

The program does not know that shards share a kernel's launch and caches, or that
collectives are not linear. `SearchResult.predicted` prices its plan by the full models.

If HiGHS has no plan at the time limit, or one that is worse than the greedy plan by the
program's objective, the result is the greedy plan on predicted costs. If the greedy
fails too, the result is any plan that fits. `SearchResult.fallback` says which.

Shapes: `O` options (a table and its number of shards), `T` tables, `W` ranks, `P`
phases of all stages.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

from papers.heuristics import place_greedily
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.papers.common import finish, whole_widths
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

_TOLERANCE = 1e-6
"""Relative error of a rank's memory that HiGHS may make."""
_LEAST_GAIN = 1e-9
"""Relative loss against the greedy plan that still counts as rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MilpConfig:
    """Limits of HiGHS."""

    time_budget_seconds: float = 20.0
    """Time limit of HiGHS. It can run a little longer: some steps do not stop."""
    relative_gap: float = 1e-3
    """HiGHS stops when its plan is proven to be within this of the optimum."""

    def __post_init__(self) -> None:
        if not self.time_budget_seconds > 0 or not self.relative_gap >= 0:
            raise ConfigError(
                "time_budget_seconds must be above 0 and relative_gap at least 0, got "
                f"{self.time_budget_seconds} and {self.relative_gap}"
            )


@dataclass(frozen=True, slots=True)
class _Options:
    """All ways to cut each table, one per row."""

    table_O: Ints
    width_O: Ints
    shards_O: Ints
    bytes_O: Floats
    """Memory of one shard."""
    cost_OP: Floats
    """Time that one shard adds to each phase of its rank [ms]."""


class _Program:
    """The integer program of one task.

    Variables, in order: for each option and rank, whether the rank holds a shard of the
    option; for each option, whether it is taken; for each phase, the largest rank's
    time.
    """

    def __init__(self, task: ShardingTask, options: _Options) -> None:
        self.task, self.options = task, options
        # Times are divided by an even share of the total, to suit HiGHS's tolerances.
        whole_OP = options.cost_OP[options.shards_O == 1]
        self.unit_ms = max(float(whole_OP.sum()) / task.world_size, 1e-9)

    def solve(self, config: MilpConfig) -> tuple[Ints | None, str]:
        """Return the widths found, `T x W` or None, and HiGHS's message."""
        num_options, num_phases = self.options.cost_OP.shape
        num_ranks = self.task.world_size
        num_placed = num_options * num_ranks
        is_binary = np.r_[np.ones(num_placed + num_options), np.zeros(num_phases)]
        found = optimize.milp(
            1 - is_binary,
            integrality=is_binary,
            bounds=optimize.Bounds(0, np.where(is_binary, 1, np.inf)),
            constraints=self._constraints(),
            options={
                "time_limit": config.time_budget_seconds,
                "mip_rel_gap": config.relative_gap,
            },
        )
        if found.x is None:
            return None, str(found.message)
        placed_OW = found.x[:num_placed].reshape(num_options, num_ranks) > 0.5
        width_TW = np.zeros((len(self.task.tables), num_ranks), dtype=np.int64)
        option, rank = np.nonzero(placed_OW)
        width_TW[self.options.table_O[option], rank] = self.options.width_O[option]
        return width_TW, str(found.message)

    def _constraints(self) -> optimize.LinearConstraint:
        options, caps = self.options, self.task.memory_bytes
        num_options, num_phases = options.cost_OP.shape
        num_tables, num_ranks = len(self.task.tables), self.task.world_size
        cut_TO = options.table_O == np.arange(num_tables)[:, None]
        rank_WW = sparse.eye_array(num_ranks)
        every_W1 = np.ones((num_ranks, 1))
        cost_PO = sparse.coo_array(options.cost_OP.T / self.unit_ms)
        blocks = [
            # Each table takes exactly one option.
            [None, sparse.coo_array(cut_TO.astype(np.float64)), None],
            # An option that is taken has one shard on each of as many ranks.
            [
                sparse.kron(sparse.eye_array(num_options), every_W1.T),
                sparse.diags_array(-options.shards_O.astype(np.float64)),
                None,
            ],
            # In each phase, no rank takes longer than the largest.
            [
                sparse.kron(cost_PO, rank_WW),
                None,
                sparse.kron(-sparse.eye_array(num_phases), every_W1),
            ],
        ]
        count = num_ranks * num_phases
        equal = np.r_[np.ones(num_tables), np.zeros(num_options)]
        low, high = np.r_[equal, np.full(count, -np.inf)], np.r_[equal, np.zeros(count)]
        if caps:
            cap_W = np.asarray(caps, dtype=np.float64)
            unit_W = np.maximum(cap_W, 1.0)
            bytes_1O = sparse.coo_array(options.bytes_O[None])
            held = sparse.kron(bytes_1O, sparse.diags_array(1 / unit_W))
            blocks.append([held, None, None])
            low = np.r_[low, np.full(num_ranks, -np.inf)]
            # HiGHS may exceed a limit by its tolerance.
            high = np.r_[high, cap_W / unit_W - _TOLERANCE]
        matrix = sparse.block_array(blocks, format="csr")
        return optimize.LinearConstraint(matrix, low, high)

    def objective(self, width_TW: Ints) -> float:
        """Return the sum over phases of the largest rank's time [ms]."""
        options = self.options
        placed_OW = width_TW[options.table_O] == options.width_O[:, None]
        times_PW = options.cost_OP.T @ placed_OW
        return float(times_PW.max(axis=1).sum())


class MilpSearcher(BudgetedSearcher[MilpConfig]):
    """Places whole tables and equal splits by integer programming.

    `SearchResult.num_evaluated` counts options and the ranks of the result.
    """

    name = "milp"

    def __init__(self, config: MilpConfig | None = None) -> None:
        """Take the limits. None: the defaults."""
        super().__init__(config or MilpConfig())

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Return the plan of HiGHS, or a fallback that the result names.

        Raises:
            InfeasibleError: The tables cannot fit, or no plan that fits was found.
            ConfigError: The task has rules on which ranks tables use or share.
        """
        start = time.monotonic()
        require_unconstrained(task, self.name)
        check_memory(task)
        options = _options(simulator)
        program = _Program(task, options)
        found, message = program.solve(self.config)
        width_TW, fallback = _better(program, found, message)
        placement = placement_from_widths(width_TW)
        placement.check(task)
        evaluated = len(options.table_O) + task.world_size
        result = finish(placement, simulator, start, evaluated)
        return dataclasses.replace(result, fallback=fallback)


def _options(simulator: Simulator) -> _Options:
    task = simulator.task
    cuts = [
        (table, widths[0], len(widths))
        for table in range(len(task.tables))
        for count in legal_splits(task, table)
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
        bank.sizes(table_O, width_O)[0],
        cost_OSP.reshape(len(cuts), -1),
    )


def _better(
    program: _Program, found: Ints | None, message: str
) -> tuple[Ints, str | None]:
    """Return the best widths and, if they are not HiGHS's, the reason."""
    task, options = program.task, program.options
    whole = options.shards_O == 1
    try:
        rank_T = place_greedily(task, options.cost_OP[whole].sum(axis=1))
    except InfeasibleError:
        if found is not None:
            return found, None
        return pack(task), f"HiGHS found no plan ({message}); this is a plan that fits"
    greedy = whole_widths(task, rank_T)
    if found is None:
        return greedy, f"HiGHS found no plan ({message}); this is the greedy plan"
    best, other = program.objective(found), program.objective(greedy)
    if best <= other * (1 + _LEAST_GAIN):
        return found, None
    return greedy, (
        f"HiGHS's plan ({message}) is {best / other - 1:.1%} worse than the greedy "
        "plan by its own objective; this is the greedy plan"
    )
