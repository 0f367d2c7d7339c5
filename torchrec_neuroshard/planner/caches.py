"""Cache sizes for tables in host memory, from the device memory that a plan leaves.

Tables of one kernel share its cache. Predictions hold if each table's part has room for
the rows of the same number of batches. So a rank's caches grow or shrink together, to
the number of batches that fills the rank's memory.

Shapes: `N` shards of cached tables, `T` cached tables, `W` ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.types import CacheParams

from torchrec_neuroshard.models.row_cache import ASSOCIATIVITY
from torchrec_neuroshard.planner.kernels import miss_curve
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.plan_costs import PlanCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_BATCHES, MAX_LOAD = 2.0**20, 0.95
"""Limits of a cache: batches of rows, and share of the table's rows."""
_STEPS = 24
_NUM_KNOTS = 61


def size_caches(
    plan: Sequence[ShardingOption],
    sized: Sequence[bool],
    costs: PlanCosts,
    memory: MemoryModel,
    topology: Topology,
) -> list[ShardingOption]:
    """Return the plan with caches that fill each rank's memory, if that is faster.

    Args:
        plan: Placed options, one per table.
        sized: For each option, whether its cache size may change.
        costs: Prices plans.
        memory: Predicts what ranks allocate.
        topology: The devices, with the memory for plans.

    Returns:
        The plan itself, or a faster plan that differs only in cache sizes.
    """
    numbers = [n for n, may in enumerate(sized) if may]
    if not numbers or not all(map(memory.knows, plan)):
        return list(plan)
    caches = _Caches([plan[n] for n in numbers], plan, memory, costs, topology)
    found = list(plan)
    for number, load in zip(numbers, caches.fill().tolist(), strict=True):
        found[number] = with_load(plan[number], load)
    before, after = (costs.placed(p).predicted.critical_path_ms for p in (plan, found))
    return found if after < before else list(plan)


def with_load(option: ShardingOption, load: float) -> ShardingOption:
    """Return a copy of an option with a load factor, rounded down to four digits.

    The copy shares the option's shards.
    """
    other = copy.copy(option)
    params = option.cache_params or CacheParams()
    unit = 10.0 ** (math.floor(math.log10(load)) - 3)
    rounded = float(f"{math.floor(load / unit) * unit:.4g}")
    other.cache_params = dataclasses.replace(params, load_factor=rounded)
    return other


class _Caches:
    """The memory of a plan's caches, as a function of the batches they hold."""

    def __init__(
        self,
        cached: Sequence[ShardingOption],
        plan: Sequence[ShardingOption],
        memory: MemoryModel,
        costs: PlanCosts,
        topology: Topology,
    ) -> None:
        shards = [(t, s) for t, o in enumerate(cached) for s in o.shards]
        self._table_N = np.array([t for t, _ in shards])
        self._rank_N = np.array([int(s.rank) for _, s in shards])
        self._rows_N = np.array([float(s.size[0]) for _, s in shards])
        slots_N, self._slot_bytes_N = memory.cache_slots(cached, plan)
        self._log_batches = np.linspace(0.0, np.log(MOST_BATCHES), _NUM_KNOTS)
        curves = [miss_curve(o, costs.reader) for o in cached]
        loads_TK = np.stack([c.load_factors(np.exp(self._log_batches)) for c in curves])
        least_T = np.array([ASSOCIATIVITY / o.tensor.shape[0] for o in cached])
        self._loads_TK = np.clip(loads_TK, least_T[:, None], MAX_LOAD)
        caps_W = np.array([float(d.storage.hbm) for d in topology.devices])
        used_W = np.array([r.peak for r in memory.ranks(plan)])
        self._room_W = caps_W - used_W + self._of_ranks(slots_N, len(caps_W))

    def _of_ranks(self, slots_N: Floats, num_ranks: int) -> Floats:
        """Return the bytes of each rank for these slots per shard, `W`."""
        bytes_W: Floats = np.bincount(
            self._rank_N, weights=slots_N * self._slot_bytes_N, minlength=num_ranks
        ).astype(np.float64)
        return bytes_W

    def _loads(self, table_N: Ints, log_batches_N: Floats) -> Floats:
        """Return the load factors of tables' caches of this many batches, `N`."""
        place_N = log_batches_N / self._log_batches[-1] * (_NUM_KNOTS - 1)
        low_N = np.minimum(place_N.astype(int), _NUM_KNOTS - 2)
        first_N = self._loads_TK[table_N, low_N]
        second_N = self._loads_TK[table_N, low_N + 1]
        loads_N: Floats = first_N + (second_N - first_N) * (place_N - low_N)
        return loads_N

    def fill(self) -> Floats:
        """Return load factors, `T`: as many batches as the fullest of its ranks holds.

        The shards of a rank get the same number of batches.
        """
        num_ranks = len(self._room_W)
        low_W, high_W = np.zeros(num_ranks), np.full(num_ranks, np.log(MOST_BATCHES))
        for _ in range(_STEPS):
            middle_W = (low_W + high_W) / 2
            loads_N = self._loads(self._table_N, middle_W[self._rank_N])
            slots_N = self._rows_N * loads_N
            slots_N = np.ceil(slots_N / ASSOCIATIVITY + 1e-3) * ASSOCIATIVITY
            fits_W = self._of_ranks(slots_N, num_ranks) <= self._room_W
            low_W, high_W = (
                np.where(fits_W, middle_W, low_W),
                np.where(fits_W, high_W, middle_W),
            )
        log_T = np.full(len(self._loads_TK), np.inf)
        np.minimum.at(log_T, self._table_N, low_W[self._rank_N])
        return self._loads(np.arange(len(log_T)), log_T)
