"""Column splits: a beam over how many shards each table is split into."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from torchrec_neuroshard.search.base import SearchConfig
from torchrec_neuroshard.search.greedy_grid import ORDERS, LanePlans, plan_states
from torchrec_neuroshard.search.shards import (
    Floats,
    Ints,
    ShardBank,
    split_widths,
)

__all__ = ["beam_search", "required_splits"]

State = tuple[int, ...]
"""Shards per table: the multiset of splits, whatever their order."""

START_THRESHOLDS: tuple[float, ...] = (1.1, 0.95, 0.85, 0.7, 0.5, 0.35, 0.2)
"""Initial states: split each table until no shard costs more than this share of an
average rank's load, in all or in any phase."""
MIN_PHASE_SHARE = 0.05
"""Phases with a smaller share of the average rank's load are not looked at apart."""

MAX_LANE_SHARDS = 2_000_000
"""Shards of all lanes placed in one lockstep call; bounds the memory of a round."""
MAX_LANE_CELLS = 150_000_000
"""Shards times ranks of all lanes placed in one round: of very many, fewer caps and
splits are tried, and rounds that could try next to none are left to refinement."""
MIN_ROUND_LANES = 100
NUM_CAPS = 3
"""Caps tried after the first round: those that served the start states best."""
MIN_GAIN = 1e-3
"""Relative gain of a round below which the beam stops and refinement goes on."""


def required_splits(bank: ShardBank) -> State:
    """Return the fewest shards of each table such that each shard fits some rank."""
    task, allowed_TW = bank.task, bank.rules.allowed_TW
    needed = [bank.splits(table)[0] for table in range(len(task.tables))]
    for memory, caps_W in zip(task.memories, bank.caps_MW, strict=True):
        largest_T = np.full(len(needed), caps_W.max())
        if allowed_TW is not None:
            largest_T = np.where(allowed_TW, caps_W, 0.0).max(axis=1)
        for table, largest in enumerate(largest_T.tolist()):
            if memory.shard_bytes(table, int(bank.dims_T[table])) <= largest:
                continue
            splits = [k for k in bank.splits(table) if k >= needed[table]]
            widths = ((k, split_widths(task, table, k)[0]) for k in splits)
            fitting = (k for k, w in widths if memory.shard_bytes(table, w) <= largest)
            needed[table] = next(fitting, splits[-1])
    return tuple(needed)


class _Beam:
    """States, their shards and their best placements."""

    def __init__(self, bank: ShardBank, config: SearchConfig) -> None:
        self.bank = bank
        self.config = config
        self.base = required_splits(bank)
        self.splits = [bank.splits(t) for t in range(len(self.base))]
        cells = len(self.base) * bank.task.world_size
        self.most_lanes = max(4, MAX_LANE_CELLS // cells)
        self.seen: set[State] = set()
        self.kept: list[tuple[float, State, Ints, Floats]] = []
        # The last cap, which always serves, and those in even steps before it.
        step = -(-len(config.caps) * len(ORDERS) // self.most_lanes)
        self.caps = config.caps[::-1][::step][::-1]

    def shards(self, state: State) -> Ints:
        """Bank rows of a state."""
        split = [t for t, k in enumerate(state) if k > 1]
        pairs = [
            (t, w) for t in split for w in split_widths(self.bank.task, t, state[t])
        ]
        is_whole = self.bank.leads_T.copy()
        is_whole[split] = False
        whole = self.bank.whole_T[is_whole]
        if not pairs:
            return whole
        table, width = np.array(pairs).T
        return np.concatenate([whole, self.bank.rows(table, width)])

    def split_further(self, state: State, table: int, step: int) -> State | None:
        """Return the state with one table in more shards, the next number or twice."""
        now = state[table]
        options = [k for k in self.splits[table] if k > now]
        if not options:
            return None
        k = (
            options[0]
            if step == 0
            else max([o for o in options if o <= 2 * now] or [0])
        )
        if k == 0 or (step and k == options[0]):
            return None
        return (*state[:table], k, *state[table + 1 :])

    def start_states(self) -> list[State]:
        """Return the fewest splits, and splits by thresholds on a shard's cost."""
        bank = self.bank
        cost_TP = bank.approximate(np.arange(len(bank.dims_T)), bank.dims_T)
        mean_P = bank.mean_phases_P
        total_T = cost_TP.sum(axis=1) / max(float(mean_P.sum()), 1e-12)
        counted = mean_P > MIN_PHASE_SHARE * mean_P.sum()
        phase_T = (cost_TP[:, counted] / mean_P[counted]).max(axis=1, initial=0.0)
        states = [self.base]
        for share_T in (total_T, phase_T):
            for threshold in START_THRESHOLDS:
                wanted = np.ceil(share_T / threshold).tolist()
                states.append(
                    tuple(
                        max(k, next((o for o in splits if o >= w), splits[-1]))
                        for k, w, splits in zip(
                            self.base, wanted, self.splits, strict=True
                        )
                    )
                )
        return states

    def neighbours(
        self, state: State, widths_TW: Ints, phases_WP: Floats
    ) -> list[State]:
        """Split further what lies on the hottest ranks, and the largest tables."""
        bank, count = self.bank, self.config.num_candidates
        loads = phases_WP.sum(axis=1)
        hottest = np.argsort(-loads, kind="stable")[: max(1, len(loads) // 8)]
        hottest = np.unique(np.concatenate([hottest, phases_WP.argmax(axis=0)]))
        table, column = np.nonzero(widths_TW[:, hottest])
        width = widths_TW[table, hottest[column]]
        cost = bank.approximate(table, width).sum(axis=1)
        hot = table[np.argsort(-cost, kind="stable")][:count]
        size = bank.scarcest(bank.sizes(np.arange(len(bank.dims_T)), bank.dims_T))
        big = np.argsort(-size / np.array(state), kind="stable")[: max(1, count // 3)]
        tables = list(dict.fromkeys([*hot.tolist(), *big.tolist()]))
        found = [self.split_further(state, t, step) for t in tables for step in (0, 1)]
        return [s for s in found if s is not None]

    def evaluate(self, states: Sequence[State], orders: Sequence[str]) -> None:
        """Place new states and keep the best."""
        caps, bank = self.caps, self.bank
        fresh = [s for s in dict.fromkeys(states) if s not in self.seen]
        self.seen.update(fresh)
        lanes = len(caps) * len(orders)
        batch = max(1, MAX_LANE_SHARDS // (lanes * len(bank.dims_T)))
        for start in range(0, len(fresh), batch):
            some = fresh[start : start + batch]
            plans = plan_states(bank, [self.shards(s) for s in some], caps, orders)
            self._keep(some, plans, lanes)
            if len(self.caps) > NUM_CAPS and np.isfinite(plans.cost_L).any():
                # The best lane of each cap, over all states and orders.
                by_cap = plans.cost_L.reshape(len(some), len(caps), len(orders))
                best = np.argsort(by_cap.min(axis=(0, 2)), kind="stable")[:NUM_CAPS]
                self.caps = tuple(caps[c] for c in sorted(best.tolist()))

    def _keep(self, states: Sequence[State], plans: LanePlans, lanes: int) -> None:
        for i, state in enumerate(states):
            lane = i * lanes + int(plans.cost_L[i * lanes : (i + 1) * lanes].argmin())
            if np.isfinite(plans.cost_L[lane]):
                self.kept.append(
                    (
                        float(plans.cost_L[lane]),
                        state,
                        plans.widths(self.bank, lane),
                        plans.phases_LWP[lane],
                    )
                )
        self.kept.sort(key=lambda k: (k[0], k[1]))
        del self.kept[self.config.beam_width :]


def beam_search(bank: ShardBank, config: SearchConfig, deadline: float) -> list[Ints]:
    """Search column splits, greedily placed.

    Args:
        bank: The task's shards.
        config: Beam width, candidates, rounds and caps.
        deadline: `time.monotonic()` after which no new round starts.

    Returns:
        Widths, `T x W`, of the best placements, best first; empty where greedy placing
        found no room.
    """
    beam = _Beam(bank, config)
    starts = beam.start_states()
    starts = starts[: 1 + beam.most_lanes // NUM_CAPS]
    beam.evaluate(starts[:1], ORDERS)
    beam.evaluate(starts[1:], ORDERS if not beam.kept else ORDERS[:1])
    expanded: set[State] = set()
    for _ in range(config.max_rounds if beam.most_lanes >= MIN_ROUND_LANES else 0):
        if time.monotonic() > deadline or not beam.kept:
            break
        best = beam.kept[0][0]
        states: list[State] = []
        for _, state, widths_TW, phases_WP in beam.kept:
            if state not in expanded:
                expanded.add(state)
                states += beam.neighbours(state, widths_TW, phases_WP)
        beam.evaluate(states, ORDERS[:1])
        if beam.kept[0][0] > best * (1 - MIN_GAIN):
            break
    return [widths for _, _, widths, _ in beam.kept]
