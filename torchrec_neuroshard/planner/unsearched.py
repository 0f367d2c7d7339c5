"""Chooses options for the tables that the search does not place, all together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology

from torchrec_neuroshard.costs.placement_rules import PlacementRules
from torchrec_neuroshard.planner.constraints import ranks_by_table
from torchrec_neuroshard.planner.greedy import (
    less_room,
    option_copies,
    place_greedily,
    place_unit,
)
from torchrec_neuroshard.planner.option_facts import is_even
from torchrec_neuroshard.planner.placed import fusion_key, stock_phases
from torchrec_neuroshard.planner.plan_costs import LaunchedPerf, PlanCosts

Floats = npt.NDArray[np.float64]
Score = tuple[float, float]

_COMPUTE = (1, 4)
"""Places of forward and backward kernels in `stock_phases`."""

MOST_SHARDS = 10_000
"""Most shards to place for better options. This is not a time limit, since a plan must
not depend on the machine's load."""


@dataclass(frozen=True, slots=True)
class _Load:
    """What a placed option adds to the time of ranks."""

    phases_W5: Floats
    """Milliseconds in each phase, without launches."""
    launches: dict[tuple[int, Hashable], tuple[float, float]]
    """Rank and kernel -> milliseconds of a launch, forward and backward."""


def place_unsearched(
    tables: Sequence[Sequence[ShardingOption]],
    topology: Topology,
    rules: PlacementRules,
    costs: PlanCosts,
) -> list[ShardingOption]:
    """Return one placed option per table; together they take little time.

    Every start is placed greedily: the tables' first options, those of least memory,
    and the same sharding type for all. From each start, one table after another moves
    to the option and ranks that shorten the plan most, until none does.

    Args:
        tables: The options of each table, with estimates, the preferred one first.
        topology: The devices, with the memory for shards.
        rules: Which ranks tables may use.
        costs: Knows the launches that options share.

    Raises:
        PlannerError: No start fits (type PARTITION).
    """
    kinds = sorted({option.sharding_type for own in tables for option in own})
    starts = [
        [own[0] for own in tables],
        [min(own, key=_bytes) for own in tables],
        *(
            [
                next((o for o in own if o.sharding_type == kind), own[0])
                for own in tables
            ]
            for kind in kinds
        ),
    ]
    placed: list[list[ShardingOption]] = []
    errors: list[PlannerError] = []
    for start in {tuple(map(id, start)): start for start in starts}.values():
        try:
            placed.append(place_greedily(start, topology, rules))
        except PlannerError as error:
            errors.append(error)
    if not placed:
        raise errors[0]
    if all(len(own) == 1 for own in tables):
        return placed[0]
    descent = _Descent(tables, topology, rules, costs, MOST_SHARDS)
    even = sorted(filter(is_even, placed), key=descent.score)
    best = min(map(descent.improved, even or placed[:1]), key=lambda found: found[0])
    return best[1]


def _bytes(option: ShardingOption) -> tuple[int, int]:
    return max((shard.storage.hbm, shard.storage.ddr) for shard in option.shards)


@dataclass(slots=True)
class _Descent:
    """Improves plans, one table at a time, while shards may be placed."""

    tables: Sequence[Sequence[ShardingOption]]
    topology: Topology
    rules: PlacementRules
    costs: PlanCosts
    num_left: int
    """Shards that may still be placed."""

    def score(self, plan: Sequence[ShardingOption]) -> Score:
        """Return the milliseconds of a plan, and a measure of how uneven ranks are."""
        return _score(list(map(self._load, plan)))

    def improved(
        self, plan: Sequence[ShardingOption]
    ) -> tuple[Score, list[ShardingOption]]:
        """Return the best plan that changes of single tables lead to."""
        plan, loads = list(plan), list(map(self._load, plan))
        best, is_better = _score(loads), True
        while is_better:
            is_better = False
            slowest = _phases(loads).sum(axis=1).argmax()
            ms = [-load.phases_W5[slowest].sum() for load in loads]
            for table in sorted(range(len(plan)), key=ms.__getitem__):
                for option in self._tries(table, plan, best[0]):
                    now = [*loads]
                    now[table] = self._load(option)
                    changed = [*plan[:table], option, *plan[table + 1 :]]
                    if (score := _score(now)) < best and is_even(changed):
                        plan, loads, best, is_better = changed, now, score, True
        return best, plan

    def _tries(
        self, table: int, plan: Sequence[ShardingOption], most_ms: float
    ) -> Iterator[ShardingOption]:
        """Yield a table's options, placed beside all other tables of a plan."""
        beside = [*plan[:table], *plan[table + 1 :]]
        if len(self.tables[table]) == 1 or self.num_left <= 0:
            return
        room = less_room(self.topology, beside)
        rules = self.rules.restricted(ranks_by_table(beside, self.rules))
        self.num_left -= sum(option.num_shards for option in beside)
        for option in self.tables[table]:
            if max(shard.perf.total for shard in option.shards) > most_ms:
                continue
            self.num_left -= option.num_shards
            tried = option_copies([option])
            try:
                place_unit(tried, room, rules)
            except PlannerError:
                continue
            yield tried[0]

    def _load(self, option: ShardingOption) -> _Load:
        load = _Load(np.zeros((self.costs.reader.world_size, 5)), {})
        kernel = fusion_key(option, self.costs.reader, option.sharding_type)
        launch_ms = self.costs.launch_ms(option)
        for shard in option.shards:
            load.phases_W5[shard.rank] += stock_phases(shard.perf)[:5]
            if isinstance(shard.perf, LaunchedPerf):
                load.phases_W5[shard.rank, _COMPUTE] -= launch_ms
                load.launches[shard.rank, kernel] = launch_ms
        return load


def _phases(loads: Sequence[_Load]) -> Floats:
    """Return the milliseconds of ranks (`W x 5`), with one launch of each kernel."""
    phases_W5: Floats = np.sum([load.phases_W5 for load in loads], axis=0)
    launches = {key: ms for load in loads for key, ms in load.launches.items()}
    for (rank, _), launch_ms in launches.items():
        phases_W5[rank, _COMPUTE] += launch_ms
    return phases_W5


def _score(loads: Sequence[_Load]) -> Score:
    phases_W5 = _phases(loads)
    uneven = (phases_W5.sum(axis=1) ** 2).sum()
    # Rounded, so that noise in the first number does not hide the second.
    return round(float(phases_W5.max(axis=0).sum()), 9), round(float(uneven), 9)
