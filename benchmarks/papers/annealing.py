"""Simulated annealing on the critical path: a baseline without problem knowledge.

Several chains run side by side from the same placement. In each step, every chain tries
one change of its placement:

- a shard moves to another rank, in exchange for the same table's shard there, if any;
- two shards swap their ranks;
- a table is cut again, into nearly equal shards on random ranks.

Half of the moved shards come from a rank that is the slowest in some phase. A change
that lengthens the critical path by a share `d` is kept with probability
`exp(-d / temperature)`. Temperatures fall geometrically. The result is the best
placement of all chains and steps. A step prices only the ranks that it changes, for all
chains in one call.

Shapes: `C` chains, `T` tables, `W` ranks, `G` fusion groups, `S` stages, `P` phases of
all stages, `K` amounts that add up per rank, `N` shards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from papers.heuristics import place_by_cost
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
    placement_from_widths,
    split_widths,
)

_MOST_CELLS = 20_000_000
"""Maximum of chains x tables x ranks, to bound memory. Large tasks get fewer chains."""
_SPLIT_SHARE, _SWAP_SHARE = 0.2, 0.3
"""Share of the steps that cut a table again, if it may be cut, and share of the steps
that swap two shards."""
_BYTE_DIGITS = 3
"""Decimal places to which memory is rounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnealingConfig:
    """Length and temperatures of the annealing."""

    chains: int = 16
    steps: int = 10_000
    """Steps per chain."""
    hottest: float = 0.05
    """First temperature: the relative loss that is kept with probability 1/e."""
    coldest: float = 2e-4
    """Last temperature."""
    time_budget_seconds: float = 20.0
    """Time after which the best placement so far is returned. Temperatures fall with
    the steps, so a run that is cut short has not cooled down."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.chains, self.steps) < 1:
            raise ConfigError(
                f"chains and steps must be at least 1, got {self.chains} and "
                f"{self.steps}"
            )
        if not 0 < self.coldest <= self.hottest:
            raise ConfigError(
                "coldest must be above 0 and at most hottest, got coldest "
                f"{self.coldest} and hottest {self.hottest}"
            )
        if not self.time_budget_seconds > 0:
            raise ConfigError(
                f"time_budget_seconds must be above 0, got {self.time_budget_seconds}"
            )


class _Chains:
    """Placements of all chains, and their costs."""

    def __init__(self, simulator: Simulator, width_TW: Ints, num_chains: int) -> None:
        self.simulator, self.task = simulator, simulator.task
        self.bank = bank = ShardBank(simulator)
        groups, stages = self.task.num_groups, self.task.num_stages
        ends = np.cumsum([groups * bank.encoding_dim, groups, stages * 3, 1])
        self._parts = ends[:-1]
        # If any table of a stage is cut, its output columns have to be reordered.
        every = np.full(len(width_TW), 2)
        columns_S = simulator.ordered_columns(every, bank.columns_T)
        self._reorder_S2: Floats = simulator.order_costs(columns_S[None])[0]
        self._order_1S: Ints = simulator.stage_order(every[None] > 0)
        self._splits = [bank.splits(t) for t in range(len(width_TW))]
        self._can_cut_T = np.array([len(s) > 1 for s in self._splits])
        self.width_CTW: Ints = np.tile(width_TW, (num_chains, 1, 1))
        shape = (num_chains, self.task.world_size)
        # Per rank the sum of `_amounts` and the kernels' times; per chain the number of
        # cut tables in each stage, the critical path and each phase's slowest rank.
        self._state: tuple[npt.NDArray[Any], ...] = (
            np.zeros((*shape, ends[-1])),
            np.zeros((*shape, groups, 2)),
        )
        is_cut_T = (width_TW > 0).sum(axis=1) > 1
        cut_S = np.bincount(bank.stages_T[is_cut_T], minlength=stages)
        placed = np.nonzero(self.width_CTW)
        width_N = self.width_CTW[placed]
        cut_CS = np.tile(cut_S, (num_chains, 1))
        self._state = self._changed(placed, 0 * width_N, width_N, cut_CS)

    @property
    def ms_C(self) -> Floats:
        """Critical path of each chain [ms]."""
        return self._state[3]

    def _amounts(self, table_N: Ints, width_N: Ints) -> Floats:
        """Return the amounts that shards add to their rank; zeros for width 0.

        Returns:
            `N x K`: the encoding and a count of 1 at the shard's group, three loads at
            its stage, and its memory.
        """
        bank, held = self.bank, np.flatnonzero(width_N)
        table, width = table_N[held], width_N[held]
        group, stage = bank.groups_T[table], bank.stages_T[table]
        amounts = np.zeros((len(width_N), self._state[0].shape[-1]))
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
        amounts[held, memory] = bank.sizes(table, width)[0]
        return amounts

    def _predict(
        self,
        compute_CWG2: Floats,
        amounts_CWK: Floats,
        stale_CWG: npt.NDArray[np.bool_],
    ) -> None:
        """Predict the kernels that have changed, in place."""
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
        """Return critical paths, infinite if memory is exceeded, and slowest ranks."""
        _, _, loads, memory = np.split(amounts_CWK, self._parts, axis=-1)
        compute = self.simulator.stage_compute(compute_CWG2)
        loads = loads.reshape(*compute.shape[:-1], 3)
        phases = self.simulator.phases(compute, loads)
        reorder_CS2 = (cut_CS > 0)[..., None] * self._reorder_S2
        ms = self.simulator.path_ms(phases, reorder_CS2, self._order_1S, loads)
        # Adding and subtracting leaves rounding errors in the sums.
        over = memory[..., 0].round(_BYTE_DIGITS) > self.bank.caps_MW[0]
        slowest = phases.argmax(axis=1).reshape(len(phases), -1)
        return np.where(over.any(axis=1), np.inf, ms), slowest

    def _changed(
        self,
        where_3N: tuple[npt.NDArray[Any], ...],
        old_N: Ints,
        new_N: Ints,
        cut_CS: Ints,
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return the state after changing widths at `where_3N`: chain, table, rank."""
        chain, table, rank = where_3N
        amounts, compute = self._state[0].copy(), self._state[1].copy()
        change = self._amounts(table, new_N) - self._amounts(table, old_N)
        np.add.at(amounts, (chain, rank), change)
        stale = np.zeros(compute.shape[:-1], dtype=np.bool_)
        stale[chain, rank, self.bank.groups_T[table]] = True
        self._predict(compute, amounts, stale)
        return (amounts, compute, cut_CS, *self._costs(amounts, compute, cut_CS))

    def step(self, limit_C: Floats, rng: np.random.Generator) -> Ints:
        """Try one step per chain and return the chains that made theirs.

        Args:
            limit_C: Longest critical path that each chain accepts [ms].
            rng: Draws the steps.
        """
        table_C2, before, after = self._draw(rng)
        differs = before != after
        chain, place, rank = np.nonzero(differs)
        table, new = table_C2[chain, place], after[differs]
        cut = self._state[2].copy()
        is_cut, was_cut = ((w > 0).sum(axis=2) > 1 for w in (after, before))
        lanes = np.arange(len(cut))[:, None]
        more = is_cut.astype(np.int64) - was_cut
        np.add.at(cut, (lanes, self.bank.stages_T[table_C2]), more)
        state = self._changed((chain, table, rank), before[differs], new, cut)
        ms = state[3]
        kept = np.isfinite(ms) & (ms <= limit_C) & differs.any(axis=(1, 2))
        mine = kept[chain]
        self.width_CTW[chain[mine], table[mine], rank[mine]] = new[mine]
        for held, found in zip(self._state, state, strict=True):
            held[kept] = found[kept]
        return np.flatnonzero(kept)

    def _draw(self, rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
        """Return two tables per chain, and their widths before and after a step."""
        num_chains, _, num_ranks = self.width_CTW.shape
        lanes = np.arange(num_chains)
        table, source = self._shards(rng)
        other, target = self._any_shards(rng)
        kind = rng.random(num_chains)
        swaps = (kind < _SWAP_SHARE) & (other != table)
        elsewhere = rng.integers(1, num_ranks, size=num_chains)
        target = np.where(swaps, target, (source + elsewhere) % num_ranks)
        pair = np.stack([table, other], axis=1)
        before = self.width_CTW[lanes[:, None], pair]
        after = before.copy()
        for place, some in ((0, lanes), (1, np.flatnonzero(swaps))):
            after[some, place, source[some]] = before[some, place, target[some]]
            after[some, place, target[some]] = before[some, place, source[some]]
        cuts = (kind > 1 - _SPLIT_SHARE) & self._can_cut_T[table]
        for chain in np.flatnonzero(cuts).tolist():
            after[chain, 0] = self._cut(int(table[chain]), num_ranks, rng)
        return pair, before, after

    def _cut(self, table: int, num_ranks: int, rng: np.random.Generator) -> Ints:
        """Return the widths of a table cut at random over random ranks, `W`."""
        splits = self._splits[table]
        widths = split_widths(self.task, table, splits[rng.integers(len(splits))])
        width_W = np.zeros(num_ranks, dtype=np.int64)
        width_W[rng.permutation(num_ranks)[: len(widths)]] = widths
        return width_W

    def _shards(self, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return a random shard per chain; half of them are on a slowest rank."""
        table, rank = self._any_shards(rng)
        num_chains, num_tables, _ = self.width_CTW.shape
        lanes, slowest_CP = np.arange(num_chains), self._state[4]
        phase = rng.integers(slowest_CP.shape[1], size=num_chains)
        slowest = slowest_CP[lanes, phase]
        held_CT = self.width_CTW[lanes, :, slowest] > 0
        drawn = (rng.random((num_chains, num_tables)) * held_CT).argmax(axis=1)
        hot = (rng.random(num_chains) < 0.5) & held_CT.any(axis=1)
        return np.where(hot, drawn, table), np.where(hot, slowest, rank)

    def _any_shards(self, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return a random table and one of its ranks per chain."""
        num_chains, num_tables, num_ranks = self.width_CTW.shape
        table: Ints = rng.integers(num_tables, size=(num_chains,))
        held_CW = self.width_CTW[np.arange(num_chains), table] > 0
        rank: Ints = (rng.random((num_chains, num_ranks)) * held_CW).argmax(axis=1)
        return table, rank


class AnnealingSearcher(BudgetedSearcher[AnnealingConfig]):
    """Simulated annealing over splits and ranks; see the module's docstring."""

    name = "annealing"

    def __init__(self, config: AnnealingConfig | None = None) -> None:
        """Take the settings. None: the defaults."""
        super().__init__(config or AnnealingConfig())

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Return the best placement of all chains.

        Raises:
            InfeasibleError: The tables cannot fit, or no plan that fits was found.
            ConfigError: The task has rules on which ranks tables use or share.
        """
        start = time.monotonic()
        require_unconstrained(task, self.name)
        check_memory(task)
        num_cells = len(task.tables) * task.world_size
        num_chains = max(1, min(self.config.chains, _MOST_CELLS // num_cells))
        chains = _Chains(simulator, _first(simulator), num_chains)
        deadline = start + self.config.time_budget_seconds
        width_TW, steps = _anneal(chains, self.config, deadline)
        warnings = []
        if steps < self.config.steps:
            warnings.append(
                f"the time budget of {self.config.time_budget_seconds:g} s ended "
                f"after {steps} of {self.config.steps} steps, before the annealing "
                "cooled down; this is the best plan found by then"
            )
        placement = placement_from_widths(width_TW)
        placement.check(task)
        evaluated = chains.bank.num_evaluated + task.world_size
        return finish(placement, simulator, start, evaluated, warnings=warnings)


def _first(simulator: Simulator) -> Ints:
    """Return the first widths: the greedy plan, or else any plan that fits."""
    task = simulator.task
    try:
        rank_T = place_by_cost(simulator)
    except InfeasibleError:
        return pack(task)
    return whole_widths(task, rank_T)


def _anneal(
    chains: _Chains, config: AnnealingConfig, deadline: float
) -> tuple[Ints, int]:
    """Return the best widths, `T x W`, and the number of steps taken."""
    best, best_ms = chains.width_CTW[0].copy(), float(chains.ms_C[0])
    if chains.width_CTW.shape[2] == 1:
        return best, config.steps
    rng = np.random.default_rng(config.seed)
    cooling = np.geomspace(config.hottest, config.coldest, config.steps)
    for number, temperature in enumerate(cooling):
        if time.monotonic() > deadline:
            return best, number
        excess = temperature * rng.exponential(size=len(chains.ms_C))
        moved = chains.step(chains.ms_C * (1 + excess), rng)
        if len(moved) and chains.ms_C[moved].min() < best_ms:
            chain = moved[chains.ms_C[moved].argmin()]
            best, best_ms = chains.width_CTW[chain].copy(), float(chains.ms_C[chain])
    return best, config.steps
