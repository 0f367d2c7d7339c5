"""The proposer: offers the partitioner every table in all ways it may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Proposer,
    ShardingOption,
    Topology,
)

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner.constraints import (
    PlacementConstraints,
    permits,
    too_few_ranks,
)
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.option_facts import (
    device_tier,
    is_pooled,
    table_name,
)
from torchrec_neuroshard.planner.plan_costs import CostedPart
from torchrec_neuroshard.planner.search_space import other_caches
from torchrec_neuroshard.planner.sequence_splits import SequenceSplits
from torchrec_neuroshard.planner.spread_options import sample_shards
from torchrec_neuroshard.planner.ways import (
    FreeOption,
    equal_columns,
    even_rows,
    is_placeable,
    narrowest_shard,
    on_nodes,
    other_grids,
)
from torchrec_neuroshard.tables.sharding_types import COLUMN_WISE, TABLE_WISE

MOST_LISTED_SHARDS = 1_000_000
"""Most shards of the proposal of least memory. If it does not fit either, TorchRec's
loop creates all of its shards, each of more than half a kilobyte."""


class NeuroShardProposer(CostedPart, Proposer):
    """Proposes one option per table; `NeuroShardPartitioner` does the search.

    It makes up to three proposals, each only if the one before does not fit:

    1. Every table in all ways that its constraints allow. One option stands for all of
       them in `NeuroShardPartitioner`, and for itself in any other partitioner. It is
       column-wise or table-wise if that fits a rank, else the cheapest that fits.
       For a table that no search places, it stands for all options that can run.
    2. The same with the kernels that the enumerator withheld.
    3. Every table by its option of least memory.

    Options that placement constraints rule out are never proposed.

    For the other arguments, see `CostedPart`.

    Args:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on the table.
        placement: Which ranks tables may use. None: any.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        placement: PlacementConstraints | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(topology, constraints, **kwargs)
        self._placement = PlacementConstraints.of(placement)
        self._topology = topology
        self._tier = device_tier(topology)
        self._proposal: list[ShardingOption] | None = None

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Prepare the proposals.

        Args:
            search_space: All options, with estimates.
            enumerator: Estimates ways that TorchRec does not list: grids of other
                blocks, even rows and caches of other sizes (see `ways`). None: these
                are not proposed.

        Raises:
            ConfigError: Placement constraints contradict each other or the model, or
                rule out all options of a table.
        """
        self._by_table: dict[str, list[ShardingOption]] = {}
        self._even: set[int] = set()
        self._search_space, self._enumerator = search_space, enumerator
        self._add(search_space)
        names = [table_name(options[0]) for options in self._by_table.values()]
        self._rules = self._placement.rules(names, int(self._topology.world_size))
        self._room: dict[tuple[int, ...], int] = {}
        room = [getattr(d.storage, self._tier) for d in self._topology.devices]
        self._splits = SequenceSplits(self.costs, room, self._tier)
        self._split_sequences(self._by_table)
        self._proposals = self._proposed()
        self._proposal = next(self._proposals)

    def _add(self, options: Sequence[ShardingOption]) -> None:
        """Add options, with their variants (grids, caches, nodes), to their tables."""
        others = []
        if self._enumerator is not None:
            reader, least = self.costs.reader, self.costs.least_columns
            others += [e for o in options for e in even_rows(o, reader)]
            self._even |= set(map(id, others))
            for option in (*options, *others):
                others += equal_columns(option, reader, least)
                others += other_grids(option, reader, least)
                others += other_caches(option, reader)
            self._enumerator.populate_estimates(others)
        added: dict[str, list[ShardingOption]] = {}
        for option in (*options, *others):
            self._by_table.setdefault(option.fqn, []).append(option)
            added.setdefault(option.fqn, []).append(option)
        for number, (table, own) in enumerate(self._by_table.items()):
            known = [o for o in added.get(table, ()) if self.costs.reader.has_cost(o)]
            own += [c for o in known for c in on_nodes(o, self.costs.reader, number)]

    def _split_sequences(
        self, by_table: dict[str, list[ShardingOption]], *, narrow: bool = False
    ) -> None:
        """Give sequence tables column-wise options of one width per module."""
        if self._enumerator is not None:
            index, is_free = self._rules.index, self._rules.is_free
            self._splits.apply(
                by_table,
                self._enumerator,
                lambda option: is_free(index[table_name(option)]),
                narrow=narrow,
            )

    def _proposed(self) -> Iterator[list[ShardingOption]]:
        """Yield the proposals of the class docstring, in order."""
        tables = [list(self._permitted(own)) for own in self._by_table.values()]
        ways = list(map(self._ways, tables))
        first = list(map(self._free, tables, ways))
        yield first
        if isinstance(self._enumerator, NeuroShardEnumerator):
            withheld = self._enumerator.withheld(self._search_space)
            if withheld:
                self._add(withheld)
                self._split_sequences(self._by_table)
                more = list(map(self._permitted, self._by_table.values()))
                free = partial(self._free, order=self._memory_order)
                yield list(map(free, more, map(self._ways, more)))
        narrow = dict(zip(self._by_table, tables, strict=True))
        self._split_sequences(narrow, narrow=True)
        least = [_least(options, self._memory_order) for options in narrow.values()]
        few = sum(o.num_shards for o in least) <= MOST_LISTED_SHARDS
        if few and any(a is not b for a, b in zip(least, first, strict=True)):
            yield least

    def propose(self) -> list[ShardingOption] | None:
        """Return the next proposal; None after the last one."""
        return self._proposal

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Move on to the next proposal, unless this one fits.

        Args:
            partitionable: Whether the proposal fits.
            plan: Not needed.
            perf_rating: Not needed.
            storage_constraint: Not needed.
        """
        del plan, perf_rating, storage_constraint
        self._proposal = None if partitionable else next(self._proposals, None)

    def _permitted(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Return the options that placement constraints allow.

        Raises:
            ConfigError: They allow none.
        """
        if self._rules.is_free(self._rules.index[table_name(options[0])]):
            return options
        reader = self.costs.reader
        kept = [o for o in options if permits(self._rules, o, reader)]
        if not kept:
            raise ConfigError(too_few_ranks(options))
        return kept

    def _free(
        self,
        options: Sequence[ShardingOption],
        ways: Sequence[ShardingOption],
        order: Callable[[ShardingOption], Any] | None = None,
    ) -> ShardingOption:
        """Return one option that stands for a table in all its ways.

        Args:
            options: The table's options.
            ways: Those of them that a search can place.
            order: Sort key; the first option stands for all. None: as the class
                describes.
        """
        ranks = self._rules.ranks(self._rules.index[table_name(options[0])])
        if ranks not in self._room:
            self._room[ranks] = max(
                getattr(self._topology.devices[r].storage, self._tier) for r in ranks
            )
        room = self._room[ranks]
        order = order or partial(self._cost_order, room, bool(ways))
        if ways or options[0].dependency is not None:
            least = _least(ways or options, order, _cost_ms)
            return FreeOption(least, ways) if ways else least
        ranked = sorted(
            options, key=lambda o: (*order(o), _cost_ms(o), *_name_order(o))
        )
        runnable = [o for o in ranked if not self._is_faulty(o)] or ranked
        return FreeOption(runnable[0], runnable)

    def _ways(self, options: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return the options whose shards a search can place."""
        reader = self.costs.reader
        return [o for o in options if is_placeable(o, reader)]

    def _cost_order(
        self, room: int, may_be_split: bool, option: ShardingOption
    ) -> tuple[Any, ...]:
        """Sort key: options that run and fit come first, and column-wise ones lead."""
        size = max(float(getattr(s.storage, self._tier)) for s in sample_shards(option))
        fused = option.compute_kernel == "fused"
        faulty = not may_be_split and self._is_faulty(option)
        if may_be_split:
            narrowest = narrowest_shard(
                option, self.costs.reader, self.costs.least_columns
            )
            size *= narrowest / max(int(s.size[1]) for s in sample_shards(option))
        elif option.is_pooled:  # no search will choose a better option
            return (faulty, size > room, not fused)
        first, second = (COLUMN_WISE, TABLE_WISE)
        if not is_pooled(option):
            first, second = second, first
        kind = option.sharding_type
        return (
            faulty,
            size > room,
            not (fused and kind in (first, second)),
            not (fused and kind == first),
        )

    def _memory_order(self, option: ShardingOption) -> tuple[Any, ...]:
        scarce = max(s.storage.hbm for s in sample_shards(option))
        other = max(s.storage.ddr for s in sample_shards(option))
        # Rows split by free memory never fill a larger share of a rank than even rows.
        is_even = id(option) in self._even
        return (self._is_faulty(option), is_even, scarce, other, *_name_order(option))

    def _is_faulty(self, option: ShardingOption) -> bool:
        return self.costs.reader.run_fault(option) is not None


def _least(
    options: Sequence[ShardingOption],
    order: Callable[[ShardingOption], Any],
    then: Callable[[ShardingOption], Any] = lambda option: 0,
) -> ShardingOption:
    """Return the first option by `order`; `then` breaks ties."""
    orders = [order(option) for option in options]
    least = min(orders)
    drawn = [o for o, own in zip(options, orders, strict=True) if own == least]
    return (
        min(drawn, key=lambda o: (then(o), *_name_order(o))) if drawn[1:] else drawn[0]
    )


def _cost_ms(option: ShardingOption) -> float:
    return float(max(s.perf.total for s in option.shards))


def _name_order(option: ShardingOption) -> tuple[Any, ...]:
    kind = option.sharding_type
    return kind != TABLE_WISE, kind, option.compute_kernel
