"""What the partitioner is asked to place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Proposer,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner.constraints import PlacementConstraints
from torchrec_neuroshard.planner.costs import CostedPart
from torchrec_neuroshard.planner.ideals import IdealCosts, Layout
from torchrec_neuroshard.planner.kernels import is_estimated
from torchrec_neuroshard.planner.table_reader import (
    cannot_run,
    device_tier,
    table_name,
)
from torchrec_neuroshard.planner.topologies import node_size
from torchrec_neuroshard.tables import COLUMN_MULTIPLE

__all__ = [
    "DEFAULT_MAX_SWITCHES",
    "NeuroShardProposer",
]

_TABLE_WISE: str = ShardingType.TABLE_WISE.value
_COLUMN_WISE: str = ShardingType.COLUMN_WISE.value

DEFAULT_MAX_SWITCHES = 4
"""Layouts tried beside the first one that fits; each costs a search."""
MIN_GAIN = 0.005
"""Part of an iteration that a switch must promise to be tried."""
MIN_ESTIMATED_GAIN = 0.1
"""The same for switches to kernels that were not measured."""
MAX_REPAIRS = 8
"""Layouts tried to make everything fit."""
FILL = 0.95
"""Part of the memory that a layout may fill on average to be worth a try."""


class NeuroShardProposer(CostedPart, Proposer):
    """Proposes one option per table; `NeuroShardPartitioner` does the search.

    A column-wise option in a proposal means that the table may be split, a table-wise
    one that it stays whole. Proposed are, in turn:

    - every table as free as its constraints allow (tables that cannot be searched: the
      cheapest option), but tables of which no allowed column shard fits any rank at
      once by rows or in the host's memory;
    - where that mixes both kinds in one module, every table whole;
    - until something fits: the tables that are too large for a rank, then the largest
      ones, switched to their cheapest option that fits; at last all of least memory;
    - from the best plan so far, greedily: tables switched to other sharding types,
      where perfectly balanced ranks would gain by it. A switch is kept if the plan
      that the search finds with it is rated better.

    Options that placement constraints leave no ranks for are never proposed.

    The other arguments are those of `CostedPart`.

    Args:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on it.
        max_switches: Layouts tried to find a better one than the first that fits; 0
            keeps every searched table table-wise or column-wise where it fits.
        time_budget_seconds: No switch is tried later than this after `load`; None is no
            limit.
        placement: Which ranks tables may be on. None: any.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        max_switches: int = DEFAULT_MAX_SWITCHES,
        time_budget_seconds: float | None = None,
        placement: PlacementConstraints | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(topology, constraints, **kwargs)
        self._placement = placement or PlacementConstraints()
        self._topology = topology
        self._constraints = constraints or {}
        self._tier = device_tier(topology)
        self._max_switches = max_switches
        self._time_budget_seconds = time_budget_seconds
        self._tables: list[list[ShardingOption]] = []
        self._queue: list[Layout] = []
        self._best: tuple[float, Layout] | None = None

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Prepare the proposals.

        Args:
            search_space: All options, with estimates.
            enumerator: Not needed.

        Raises:
            ConfigError: Placement constraints contradict each other or the model, or
                leave a table no way to be sharded.
        """
        del enumerator
        by_table: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            by_table.setdefault(option.fqn, []).append(option)
        names = [table_name(options[0]) for options in by_table.values()]
        world_size = int(self._topology.world_size)
        self._rules = self._placement.rules(names, world_size)
        self._tables = list(map(self._permitted, by_table.values()))
        self._sizes: dict[int, _Size] = {}
        self._start = time.monotonic()
        self._capacity = _capacity(self._topology, self._tier)
        self._seen: set[Layout] = set()
        self._num_repairs = self._num_switches = 0
        self._best = None
        self._ideals: IdealCosts | None = None
        self._free_choices = free = tuple(map(self._free, self._tables))
        whole = tuple(map(self._whole, self._tables))
        mixed: dict[str, set[str]] = {}
        for options, choice in zip(self._tables, free, strict=True):
            if self.costs.reader.is_searched(options[choice]):
                kinds = mixed.setdefault(options[choice].path, set())
                kinds.add(options[choice].sharding_type)
        self._queue = [self._without_giants(free)]
        if any(len(kinds) > 1 for kinds in mixed.values()):
            self._queue.append(self._without_giants(whole))

    def propose(self) -> list[ShardingOption] | None:
        """Return the next proposal, None after the last one."""
        while self._queue and self._queue[0] in self._seen:
            self._queue.pop(0)
        if not self._queue:
            return None
        layout = self._queue[0]
        return [o[c] for o, c in zip(self._tables, layout, strict=True)]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Learn how the proposal did; when none is left, think of another.

        Args:
            partitionable: Whether it fits.
            plan: Not needed.
            perf_rating: The critical path of its plan [ms].
            storage_constraint: The devices and the memory that shards may take.
        """
        del plan
        layout = self._queue.pop(0)
        self._seen.add(layout)
        if storage_constraint is not None:
            self._capacity = _capacity(storage_constraint, self._tier)
        if partitionable and perf_rating is not None:
            if self._best is None or perf_rating < self._best[0]:
                self._best = perf_rating, layout
        if self._queue or (partitionable and perf_rating is None):
            return
        following = self._repair(layout) if self._best is None else self._switch()
        if following is not None:
            self._queue.append(following)

    @property
    def best_rating(self) -> float | None:
        """Rating of the best plan since `load`; None where nothing fitted."""
        return None if self._best is None else self._best[0]

    # --- options of one table ---

    def _permitted(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Options that can be where placement constraints allow the table."""
        if self._rules.is_free(table_name(options[0])):
            return options
        size = node_size(self._topology)
        kept = [o for o in options if self._rules.permits(o, size)]
        if not kept:
            kinds = ", ".join(sorted({o.sharding_type for o in options}))
            raise ConfigError(
                f"table '{table_name(options[0])}' may only be sharded {kinds}, which "
                "needs more ranks than placement constraints leave it. Allow "
                "table-wise or column-wise sharding for it, or more ranks"
            )
        return kept

    def _free(self, options: Sequence[ShardingOption]) -> int:
        """The table as free as it may be."""
        searched = self._searched(options)
        if not searched:
            return _least(options, _cost_order)
        first, second = _COLUMN_WISE, _TABLE_WISE
        if not options[0].is_pooled:
            first, second = second, first
        return searched[first] if first in searched else searched[second]

    def _whole(self, options: Sequence[ShardingOption]) -> int:
        searched = self._searched(options)
        return searched[_TABLE_WISE] if _TABLE_WISE in searched else self._free(options)

    def _searched(self, options: Sequence[ShardingOption]) -> dict[str, int]:
        """Sharding type -> the option that the search places."""
        return {
            o.sharding_type: i
            for i, o in enumerate(options)
            if self.costs.reader.is_searched(o)
        }

    def _narrowest(self, option: ShardingOption) -> int:
        """Columns of the narrowest shard that the search may make of a table."""
        width = int(option.tensor.shape[1])
        if option.sharding_type != _COLUMN_WISE or not option.is_pooled:
            return width
        constraint = self._constraints.get(option.name)
        asked = int((constraint and constraint.min_partition) or COLUMN_MULTIPLE)
        table = table_name(option)
        if len(self._rules.company(table)) > 1:
            return width
        evenly = -(-width // len(self._rules.ranks(table)))
        return min(width, -(-max(asked, evenly) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE)

    def _measure(self, option: ShardingOption) -> _Size:
        sizes = [float(getattr(s.storage, self._tier)) for s in option.shards]
        total = sum(sizes)
        shard = max(sizes)
        if self.costs.reader.is_searched(option):
            shard = total * self._narrowest(option) / int(option.tensor.shape[1])
        return _Size(shard, total, sum(s.perf.total for s in option.shards))

    def _size(self, option: ShardingOption) -> _Size:
        """How large and slow an option is; looked at once for all of its shards."""
        size = self._sizes.get(id(option))
        if size is None:
            size = self._sizes[id(option)] = self._measure(option)
        return size

    def _shard_bytes(self, option: ShardingOption) -> float:
        return self._size(option).shard_bytes

    def _total_bytes(self, option: ShardingOption) -> float:
        return self._size(option).total_bytes

    # --- making it fit ---

    def _fits(self, option: ShardingOption) -> bool:
        ranks = self._rules.allowed.get(table_name(option), range(len(self._capacity)))
        return self._shard_bytes(option) <= max(self._capacity[r] for r in ranks)

    def _fill(self, layout: Layout) -> float:
        """Part of all devices' memory that a layout takes."""
        total = sum(
            self._total_bytes(o[c]) for o, c in zip(self._tables, layout, strict=True)
        )
        return total / max(1.0, sum(self._capacity))

    def _without_giants(self, layout: Layout) -> Layout:
        """Switch tables that fit no rank to their cheapest option that does."""
        choices = list(layout)
        for table, options in enumerate(self._tables):
            if not self._fits(options[choices[table]]):
                choices[table] = self._fitting(options, choices[table])
        return tuple(choices)

    def _fitting(self, options: Sequence[ShardingOption], choice: int) -> int:
        others = [
            i
            for i, o in enumerate(options)
            if i != choice and not cannot_run(o) and self._fits(o)
        ]
        return min(others, key=lambda i: _cost_order(options[i]), default=choice)

    def _repair(self, layout: Layout) -> Layout | None:
        """Return a layout that is easier to fit; None when there is no other."""
        self._num_repairs += 1
        following = self._without_giants(layout)
        smallest = tuple(_least(o, _memory_order) for o in self._tables)
        if self._num_repairs >= MAX_REPAIRS:
            following = smallest
        elif following in self._seen:
            following = self._smaller(following, 2 ** (self._num_repairs - 1))
        if following in self._seen:
            following = smallest
        return None if following in self._seen else following

    def _smaller(self, layout: Layout, at_least: int) -> Layout:
        """Switch the largest tables to what takes less of a rank, or of all."""
        choices, changed = list(layout), 0
        sizes = [
            self._shard_bytes(o[c]) for o, c in zip(self._tables, layout, strict=True)
        ]
        for table in sorted(range(len(sizes)), key=lambda t: -sizes[t]):
            too_full = self._fill(tuple(choices)) > FILL
            if changed >= at_least and not too_full:
                break
            options, choice = self._tables[table], choices[table]
            measure = self._total_bytes if too_full else self._shard_bytes
            least = 0.9 * measure(options[choice])
            less = [
                i
                for i, o in enumerate(options)
                if not cannot_run(o) and self._fits(o) and measure(o) < least
            ]
            if less:
                choices[table] = min(less, key=lambda i: _cost_order(options[i]))
                changed += 1
        return tuple(choices)

    # --- making it faster ---

    def _switch(self) -> Layout | None:
        """Return the layout of most promise near the best one."""
        assert self._best is not None
        late = self._time_budget_seconds is not None and (
            time.monotonic() - self._start > self._time_budget_seconds
        )
        if late or self._num_switches >= self._max_switches:
            return None
        if self._ideals is None:
            self._ideals = IdealCosts(self.costs, self._tables)
        ideals, base = self._ideals, self._best[1]
        before = ideals.cost(base)
        if before is None:
            return None
        found: list[tuple[float, Layout]] = []
        for layout in self._moves(base):
            after = None if layout in self._seen else ideals.cost(layout)
            if after is not None and after <= before * (1 - self._margin(base, layout)):
                found.append((after, layout))
        if not found:
            return None
        self._num_switches += 1
        return min(found)[1]

    def _margin(self, base: Layout, layout: Layout) -> float:
        changed = (
            options[new]
            for options, old, new in zip(self._tables, base, layout, strict=True)
            if old != new
        )
        return MIN_ESTIMATED_GAIN if any(map(is_estimated, changed)) else MIN_GAIN

    def _moves(self, base: Layout) -> Iterator[Layout]:
        """Some tables of a module switched to one other kind of option."""
        kinds: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
        for table, options in enumerate(self._tables):
            for choice, option in enumerate(options):
                key = (option.path, option.sharding_type, option.compute_kernel)
                like = choice == self._free_choices[table] or not (
                    self.costs.reader.is_searched(option)
                )
                if choice != base[table] and like and not cannot_run(option):
                    kinds.setdefault(key, []).append((table, choice))
        for _, changes in sorted(kinds.items()):
            # Those first that gain most, each taken for itself.
            changes.sort(key=lambda c: (self._own_gain(base, *c), c))
            for count in _counts(len(changes)):
                choices = list(base)
                for table, choice in changes[:count]:
                    choices[table] = choice
                layout = tuple(choices)
                if self._fill(layout) <= FILL:
                    yield layout

    def _own_gain(self, base: Layout, table: int, choice: int) -> float:
        """What switching a table adds to the ranks' work, all alone [ms]."""
        options = self._tables[table]
        old, new = options[base[table]], options[choice]
        return self._size(new).total_ms - self._size(old).total_ms


@dataclass(frozen=True, slots=True)
class _Size:
    """What an option takes, by its estimates."""

    shard_bytes: float
    """Memory of the device that its largest shard takes, at least."""
    total_bytes: float
    """The same of all shards."""
    total_ms: float
    """Work of all shards, each alone."""


def _counts(total: int) -> list[int]:
    """How many tables to switch at once: all small numbers, some large ones."""
    counts, count = [], 1
    while count < total:
        counts.append(count)
        count = max(count + 1, int(count * 1.5))
    return [*counts, total]


def _capacity(topology: Topology, tier: str) -> list[float]:
    return [float(getattr(d.storage, tier)) for d in topology.devices]


def _least(
    options: Sequence[ShardingOption], order: Callable[[ShardingOption], Any]
) -> int:
    return min(range(len(options)), key=lambda i: order(options[i]))


def _cost_order(option: ShardingOption) -> tuple[Any, ...]:
    cost = max(s.perf.total for s in option.shards)
    return (cannot_run(option), cost, *_name_order(option))


def _memory_order(option: ShardingOption) -> tuple[Any, ...]:
    scarce = max(s.storage.hbm for s in option.shards)
    other = max(s.storage.ddr for s in option.shards)
    return (cannot_run(option), scarce, other, *_name_order(option))


def _name_order(option: ShardingOption) -> tuple[Any, ...]:
    kind = option.sharding_type
    return kind != _TABLE_WISE, kind, option.compute_kernel
