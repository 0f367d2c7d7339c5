"""Simulated annealing on the set cost: the same objective, no insight into the problem.

Several chains walk at once, each from a placement of its own. A step changes one
placement per chain: a shard goes to another rank (changing places with the table's
shard there, if any), two shards change ranks, or a table is cut anew, near evenly, over
random ranks. Half of the moved shards are taken from a rank that is the slowest in some
phase. A step that lengthens the critical path by a share `d` is kept with probability
`exp(-d / temperature)`; temperatures fall geometrically. The best placement of all
chains and steps is the result. Only ranks that a step touches are costed anew, those of
all chains in one call.

Shapes: `C` chains, `T` tables, `W` ranks, `G` fusion groups, `S` stages, `P` phases of
all stages, `K` amounts that add up per rank, `N` shards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.baselines.common import finish, whole_widths
from torchrec_neuroshard.baselines.heuristics import place_by_cost
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
    placement_from_widths,
    split_widths,
)
from torchrec_neuroshard.simulator import Simulator, critical_path

__all__ = ["AnnealingConfig", "AnnealingSearcher"]

_MOST_CELLS = 20_000_000
"""Chains x tables x ranks, which bounds memory: large tasks have fewer chains."""
_SPLIT_SHARE, _SWAP_SHARE = 0.2, 0.3
"""Shares of the steps that cut a table anew, where it may be cut, and that make two
shards change ranks."""
_BYTE_DIGITS = 3
"""Digits to which memory is counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnealingConfig:
    """How long to anneal, and from how hot."""

    chains: int = 16
    steps: int = 10_000
    """Of each chain."""
    hottest: float = 0.05
    """First temperature: relative loss that is kept with probability 1/e."""
    coldest: float = 2e-4
    """Last temperature."""
    time_budget_seconds: float = 20.0
    """The best placement so far is returned after this; temperatures fall by steps, so
    that a run cut short has not cooled down."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.chains, self.steps) < 1:
            raise ConfigError(
                f"chains and steps must be at least 1, got {self.chains} and "
                f"{self.steps}"
            )
        if not 0 < self.coldest <= self.hottest:
            raise ConfigError(
                "temperatures must be above 0 and fall, got "
                f"{self.hottest} to {self.coldest}"
            )
        if not self.time_budget_seconds > 0:
            raise ConfigError(
                f"time_budget_seconds must be above 0, got {self.time_budget_seconds}"
            )


@dataclass(frozen=True, slots=True)
class _Step:
    """One proposal per chain: the widths that up to two tables are to have."""

    table_C2: Ints
    width_C2W: Ints
    changes_C2: npt.NDArray[np.bool_]
    """Which of the two count."""


@dataclass(frozen=True, slots=True)
class _State:
    """Placements of all chains and what they cost."""

    width_CTW: Ints
    amounts_CWK: Floats
    """What a rank holds, added up: see `_Chains.amounts`."""
    compute_CWG2: Floats
    cut_CS: Ints
    """Tables of each stage that are cut."""
    ms_C: Floats
    slowest_CP: Ints
    """Rank that is the slowest, in each phase of each stage."""

    def keep(self, other: _State, chains_C: npt.NDArray[np.bool_]) -> None:
        """Take some chains over from another state; widths are kept elsewhere."""
        for name in ("amounts_CWK", "compute_CWG2", "cut_CS", "ms_C", "slowest_CP"):
            getattr(self, name)[chains_C] = getattr(other, name)[chains_C]


class _Chains:
    """Placements under way."""

    def __init__(self, simulator: Simulator, width_TW: Ints, num_chains: int) -> None:
        self.simulator, self.task = simulator, simulator.task
        self.bank = bank = ShardBank(simulator)
        ends = np.cumsum(
            [
                self.task.num_groups * bank.encoding_dim,
                self.task.num_groups,
                self.task.num_stages * 3,
                1,
            ]
        )
        self._parts, self._num_amounts = ends[:-1], int(ends[-1])
        # Output columns are put in order again once any table of a stage is cut.
        every = np.full(len(width_TW), 2)
        columns_S = simulator.ordered_columns(every, bank.columns_T)
        self._order_S: Floats = simulator.order_costs(columns_S[None])[0].sum(axis=1)
        self.state = self._start(np.tile(width_TW, (num_chains, 1, 1)))

    def _start(self, width_CTW: Ints) -> _State:
        num_chains, _, num_ranks = width_CTW.shape
        chain, table, rank = np.nonzero(width_CTW)
        amounts = np.zeros((num_chains, num_ranks, self._num_amounts))
        shards = self.amounts(table, width_CTW[chain, table, rank])
        np.add.at(amounts, (chain, rank), shards)
        compute = np.zeros((num_chains, num_ranks, self.task.num_groups, 2))
        self._predict(compute, amounts, np.ones(compute.shape[:-1], dtype=np.bool_))
        cut = np.zeros((num_chains, self.task.num_stages), dtype=np.int64)
        chain, table = np.nonzero((width_CTW > 0).sum(axis=2) > 1)
        np.add.at(cut, (chain, self.bank.stages_T[table]), 1)
        ms, slowest = self._costs(amounts, compute, cut)
        return _State(width_CTW, amounts, compute, cut, ms, slowest)

    def amounts(self, table_N: Ints, width_N: Ints) -> Floats:
        """Return what shards add to their rank; nothing where the width is 0.

        Returns:
            `N x K`: the encoding and a 1 in the place of the group, three loads in the
            place of the stage, memory.
        """
        bank, held = self.bank, np.flatnonzero(width_N)
        table, width = table_N[held], width_N[held]
        group, stage = bank.groups_T[table], bank.stages_T[table]
        amounts = np.zeros((len(width_N), self._num_amounts))
        first = group * bank.encoding_dim
        rows = bank.rows(table, width)
        amounts[held[:, None], first[:, None] + np.arange(bank.encoding_dim)] = (
            bank.encoding(rows)
        )
        count, loads, memory = self._parts
        amounts[held, count + group] = 1
        amounts[held[:, None], (loads + 3 * stage)[:, None] + np.arange(3)] = (
            bank.loads_of(rows)
        )
        amounts[held, memory] = bank.bytes(table, width)
        return amounts

    def _predict(
        self,
        compute_CWG2: Floats,
        amounts_CWK: Floats,
        stale_CWG: npt.NDArray[np.bool_],
    ) -> None:
        """Fill in the kernels that have changed."""
        sums, count, *_ = np.split(amounts_CWK, self._parts, axis=-1)
        sums = sums.reshape(*stale_CWG.shape, self.bank.encoding_dim)
        held = count > 0.5
        compute_CWG2[stale_CWG & ~held] = 0.0
        chosen = stale_CWG & held
        if chosen.any():
            compute_CWG2[chosen] = self.bank.predict(sums[chosen])

    def _costs(
        self, amounts_CWK: Floats, compute_CWG2: Floats, cut_CS: Ints
    ) -> tuple[Floats, Ints]:
        """Critical paths, infinite where memory is exceeded, and the slowest ranks."""
        _, _, loads, memory = np.split(amounts_CWK, self._parts, axis=-1)
        compute = self.simulator.stage_compute(compute_CWG2)
        loads = loads.reshape(*compute.shape[:-1], 3)
        phases = self.simulator.phases(compute, loads)
        ms = critical_path(phases) + (cut_CS > 0) @ self._order_S
        # Sums that went up and down again are off by their rounding.
        over = memory[..., 0].round(_BYTE_DIGITS) > self.bank.caps_W
        slowest = phases.argmax(axis=1).reshape(len(phases), -1)
        return np.where(over.any(axis=1), np.inf, ms), slowest

    def take(self, step: _Step, limit_C: Floats) -> Ints:
        """Make the steps that no chain's limit forbids.

        Args:
            step: What to try.
            limit_C: Longest critical path that each chain accepts [ms].

        Returns:
            The chains that made their step.
        """
        state = self.state
        before = np.take_along_axis(state.width_CTW, step.table_C2[:, :, None], axis=1)
        differs = (before != step.width_C2W) & step.changes_C2[:, :, None]
        chain, place, rank = np.nonzero(differs)
        table = step.table_C2[chain, place]
        new, old = step.width_C2W[differs], before[differs]
        amounts, compute = state.amounts_CWK.copy(), state.compute_CWG2.copy()
        change = self.amounts(table, new) - self.amounts(table, old)
        np.add.at(amounts, (chain, rank), change)
        stale = np.zeros(compute.shape[:-1], dtype=np.bool_)
        stale[chain, rank, self.bank.groups_T[table]] = True
        self._predict(compute, amounts, stale)
        cut = state.cut_CS.copy()
        is_cut, was_cut = ((w > 0).sum(axis=2) > 1 for w in (step.width_C2W, before))
        more = (is_cut.astype(np.int64) - was_cut) * step.changes_C2
        lanes = np.arange(len(cut))[:, None]
        np.add.at(cut, (lanes, self.bank.stages_T[step.table_C2]), more)
        ms, slowest = self._costs(amounts, compute, cut)
        kept = np.isfinite(ms) & (ms <= limit_C) & differs.any(axis=(1, 2))
        mine = kept[chain]
        state.width_CTW[chain[mine], table[mine], rank[mine]] = new[mine]
        state.keep(_State(before, amounts, compute, cut, ms, slowest), kept)
        return np.flatnonzero(kept)


class _Proposals:
    """Draws steps."""

    def __init__(self, bank: ShardBank) -> None:
        self._bank = bank
        self._splits = [bank.splits(t) for t in range(len(bank.dims_T))]
        self._can_cut_T = np.array([len(s) > 1 for s in self._splits])

    def draw(self, state: _State, rng: np.random.Generator) -> _Step:
        """Draw a step for each chain."""
        num_chains, _, num_ranks = state.width_CTW.shape
        lanes = np.arange(num_chains)
        table, source = self._shards(state, rng)
        other, target = self._any_shards(state, rng)
        kind = rng.random(num_chains)
        swaps = (kind < _SWAP_SHARE) & (other != table)
        elsewhere = rng.integers(1, num_ranks, size=num_chains)
        target = np.where(swaps, target, (source + elsewhere) % num_ranks)
        pair = np.stack([table, other], axis=1)
        width = np.take_along_axis(state.width_CTW, pair[:, :, None], axis=1)
        for place in (0, 1):
            at_source = width[lanes, place, source]
            width[lanes, place, source] = width[lanes, place, target]
            width[lanes, place, target] = at_source
        cuts = (kind > 1 - _SPLIT_SHARE) & self._can_cut_T[table]
        for chain in np.flatnonzero(cuts).tolist():
            width[chain, 0] = self._cut(int(table[chain]), num_ranks, rng)
        return _Step(pair, width, np.stack([np.ones_like(swaps), swaps], axis=1))

    def _cut(self, table: int, num_ranks: int, rng: np.random.Generator) -> Ints:
        """Widths of a table cut a random way over random ranks, `W`."""
        task, splits = self._bank.task, self._splits[table]
        widths = split_widths(task, table, splits[rng.integers(len(splits))])
        ranks = rng.permutation(num_ranks)[: len(widths)]
        width_W = np.zeros(num_ranks, dtype=np.int64)
        width_W[ranks] = widths
        return width_W

    def _shards(self, state: _State, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Draw a shard per chain, of a slowest rank in half of the cases."""
        table, rank = self._any_shards(state, rng)
        num_chains, num_tables, _ = state.width_CTW.shape
        lanes = np.arange(num_chains)
        phase = rng.integers(state.slowest_CP.shape[1], size=num_chains)
        slowest = state.slowest_CP[lanes, phase]
        held_CT = state.width_CTW[lanes, :, slowest] > 0
        drawn = (rng.random((num_chains, num_tables)) * held_CT).argmax(axis=1)
        hot = (rng.random(num_chains) < 0.5) & held_CT.any(axis=1)
        return np.where(hot, drawn, table), np.where(hot, slowest, rank)

    def _any_shards(self, state: _State, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Draw a table and one of its ranks per chain."""
        num_chains, num_tables, num_ranks = state.width_CTW.shape
        table: Ints = rng.integers(num_tables, size=(num_chains,))
        held_CW = state.width_CTW[np.arange(num_chains), table] > 0
        rank: Ints = (rng.random((num_chains, num_ranks)) * held_CW).argmax(axis=1)
        return table, rank


class AnnealingSearcher(BudgetedSearcher[AnnealingConfig]):
    """Simulated annealing over splits and ranks; see the module's description."""

    name = "annealing"

    def __init__(self, config: AnnealingConfig | None = None) -> None:
        """Take the settings; None means the defaults."""
        super().__init__(config or AnnealingConfig())

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
        num_cells = len(task.tables) * task.world_size
        num_chains = max(1, min(self.config.chains, _MOST_CELLS // num_cells))
        chains = _Chains(simulator, _first(simulator), num_chains)
        deadline = start + self.config.time_budget_seconds
        width_TW, steps = _anneal(chains, self.config, deadline)
        warnings = []
        if steps < self.config.steps:
            warnings.append(
                f"the time budget of {self.config.time_budget_seconds:g} s was spent "
                f"after {steps} of {self.config.steps} steps, before it cooled down; "
                "this is the best placement until then"
            )
        placement = placement_from_widths(width_TW)
        placement.check(task)
        evaluated = chains.bank.num_evaluated + task.world_size
        return finish(placement, simulator, start, evaluated, warnings=warnings)


def _first(simulator: Simulator) -> Ints:
    """Widths to start from: the greedy's on predicted costs, else any that fit."""
    task = simulator.task
    try:
        rank_T = place_by_cost(simulator)
    except InfeasibleError:
        return pack(task)
    return whole_widths(task, rank_T)


def _anneal(
    chains: _Chains, config: AnnealingConfig, deadline: float
) -> tuple[Ints, int]:
    """Return the best widths, `T x W`, and the number of steps made."""
    state = chains.state
    best, best_ms = state.width_CTW[0].copy(), float(state.ms_C[0])
    if state.width_CTW.shape[2] == 1:
        return best, config.steps
    rng = np.random.default_rng(config.seed)
    proposals = _Proposals(chains.bank)
    cooling = np.geomspace(config.hottest, config.coldest, config.steps)
    for number, temperature in enumerate(cooling):
        if time.monotonic() > deadline:
            return best, number
        excess = temperature * rng.exponential(size=len(state.ms_C))
        moved = chains.take(proposals.draw(state, rng), state.ms_C * (1 + excess))
        if len(moved) and state.ms_C[moved].min() < best_ms:
            chain = moved[state.ms_C[moved].argmin()]
            best, best_ms = state.width_CTW[chain].copy(), float(state.ms_C[chain])
    return best, config.steps
