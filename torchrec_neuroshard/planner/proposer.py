"""The proposer: offers the partitioner every table in all ways it may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Proposer,
    ShardingOption,
    Storage,
    Topology,
)

from torchrec_neuroshard.costs.placement_constraints import PlacementConstraints
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner.constraints import permits, too_few_ranks
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import device_tier, is_pooled, table_name
from torchrec_neuroshard.planner.plan_costs import CostedPart
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.search_space import other_caches
from torchrec_neuroshard.planner.sequence_splits import SequenceSplits
from torchrec_neuroshard.planner.spread_options import price_later, sample_shards
from torchrec_neuroshard.planner.ways import (
    FreeOption,
    Ways,
    equal_columns,
    even_rows,
    is_placeable,
    may_vary,
    narrowest_shard,
    on_nodes,
    other_grids,
    ways_of,
)
from torchrec_neuroshard.tables.sharding_types import (
    COLUMN_SHARDED_TYPES,
    COLUMN_WISE,
    TABLE_WISE,
)

Floats = npt.NDArray[np.float64]

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
        self._enumerator = enumerator
        self._even: set[int] = set()
        self._ways = ways_of(())
        self._placeable_K: dict[int, bool] = {}
        self._bytes_R2 = np.zeros((0, 2))
        self._rows: dict[str, list[int]] = {}
        listed = None
        if isinstance(enumerator, NeuroShardEnumerator):
            listed = enumerator.ways_in(search_space)
        self._is_by_class = listed is not None
        self._add(ways_of(search_space) if listed is None else listed)
        self._num_listed = self._ways.num_rows
        self._add_variants(range(self._num_listed))
        names = [table_name(self._table(rows)) for rows in self._rows.values()]
        self._rules = self._placement.rules(names, int(self._topology.world_size))
        self._room: dict[tuple[int, ...], int] = {}
        room = [getattr(d.storage, self._tier) for d in self._topology.devices]
        self._splits = SequenceSplits(self.costs, room, self._tier)
        self._split_sequences(self._rows)
        self._proposals = self._proposed()
        self._proposal = next(self._proposals)

    def _table(self, rows: Sequence[int]) -> ShardingOption:
        """Return an option of the table of these rows."""
        return self._ways.tables[self._ways.table_R[rows[0]]]

    def _add(self, ways: Ways) -> list[int]:
        """Add ways to their tables; return their rows."""
        first, before = self._ways.num_rows, self._ways
        self._ways = before.joined(ways) if first else ways
        new = range(first, self._ways.num_rows)
        bytes_R2 = shard_bytes(self._ways.take(new), self.costs.reader, self._memory)
        self._bytes_R2 = np.concatenate([self._bytes_R2, bytes_R2])
        tables = [option.fqn for option in self._ways.tables]
        for row, table in zip(new, self._ways.table_R[first:].tolist(), strict=True):
            self._rows.setdefault(tables[table], []).append(row)
        return list(new)

    @property
    def _memory(self) -> MemoryModel | None:
        if isinstance(self._enumerator, NeuroShardEnumerator):
            return self._enumerator.memory
        return None

    def _add_variants(self, rows: Iterable[int]) -> None:
        """Add variants of these rows (grids, caches, nodes) to their tables."""
        reader, least = self.costs.reader, self.costs.least_columns
        may_K = [may_vary(option, reader) for option in self._ways.kinds]
        varied = [r for r in rows if may_K[self._ways.kind_R[r]]]
        options = self._ways.options(varied)
        others: list[ShardingOption] = []
        if self._enumerator is not None:
            others += [e for o in options for e in even_rows(o, reader)]
            num_even = len(others)
            for option in (*options, *others):
                others += equal_columns(option, reader, least)
                others += other_grids(option, reader, least)
                others += other_caches(option, reader)
            if not self._is_by_class:
                self._enumerator.populate_estimates(others)
            self._even |= set(self._add(ways_of(others))[:num_even])
        number = {table: n for n, table in enumerate(self._rows)}
        nodes = [
            c
            for o in (*options, *others)
            for c in on_nodes(o, reader, number[o.fqn])
            if reader.has_cost(o)
        ]
        self._add(ways_of(nodes))

    def _split_sequences(
        self, rows_of: dict[str, list[int]], *, narrow: bool = False
    ) -> None:
        """Give sequence tables column-wise options of one width per module."""
        paths = {o.path for o in self._ways.kinds if self._splits.is_splittable(o)}
        if self._enumerator is None or not paths:
            return
        index, is_free = self._rules.index, self._rules.is_free
        by_table = {
            table: self._ways.options(rows)
            for table, rows in rows_of.items()
            if self._table(rows).path in paths
        }
        columns = [
            option
            for own in by_table.values()
            for option in own
            if option.sharding_type in COLUMN_SHARDED_TYPES
            and sample_shards(option)[0].perf is None
        ]
        self._enumerator.populate_estimates(columns)
        row = {
            id(option): r
            for table, options in by_table.items()
            for r, option in zip(rows_of[table], options, strict=True)
        }
        self._splits.apply(
            by_table,
            self._enumerator,
            lambda option: is_free(index[table_name(option)]),
            narrow=narrow,
        )
        new = [o for own in by_table.values() for o in own if id(o) not in row]
        kept = {table: list(rows) for table, rows in self._rows.items()}
        row |= zip(map(id, new), self._add(ways_of(new)), strict=True)
        self._rows |= kept
        for table, own in by_table.items():
            rows_of[table] = [row[id(option)] for option in own]

    def _proposed(self) -> Iterator[list[ShardingOption]]:
        """Yield the proposals of the class docstring, in order."""
        tables = [self._permitted(rows) for rows in self._rows.values()]
        first = list(map(self._free, tables))
        yield self._options(first)
        if isinstance(self._enumerator, NeuroShardEnumerator):
            listed = self._ways.options(range(self._num_listed))
            withheld = self._enumerator.withheld(listed)
            if withheld:
                self._add_variants(self._add(ways_of(withheld)))
                self._split_sequences(self._rows)
                more = list(map(self._permitted, self._rows.values()))
                free = partial(self._free, order=self._memory_order)
                yield self._options([free(rows) for rows in more])
        narrow = dict(zip(self._rows, tables, strict=True))
        self._split_sequences(narrow, narrow=True)
        least = [self._least(rows, self._memory_order) for rows in narrow.values()]
        options = self._options([(row, ()) for row in least])
        few = sum(o.num_shards for o in options) <= MOST_LISTED_SHARDS
        before = [None if rows else row for row, rows in first]
        if few and least != before:
            yield options

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

    def _permitted(self, rows: list[int]) -> list[int]:
        """Return a table's rows that placement constraints allow.

        Raises:
            ConfigError: They allow none.
        """
        if self._rules.is_free(self._rules.index[table_name(self._table(rows))]):
            return list(rows)
        reader, options = self.costs.reader, self._ways.options(rows)
        kept = [
            row
            for row, option in zip(rows, options, strict=True)
            if permits(self._rules, option, reader)
        ]
        if not kept:
            raise ConfigError(too_few_ranks(options))
        return kept

    def _free(
        self, rows: Sequence[int], order: Callable[[int], Any] | None = None
    ) -> tuple[int, Sequence[int]]:
        """Return the row that stands for a table in all its ways, and these ways.

        Args:
            rows: The table's ways.
            order: Sort key; the first row stands for all. None: as the class describes.

        Returns:
            The row, and the rows that it stands for; none if it stands for itself.
        """
        ways, searched = self._ways, [r for r in rows if self._is_placeable(r)]
        ranks = self._rules.ranks(self._rules.index[table_name(self._table(rows))])
        if ranks not in self._room:
            self._room[ranks] = max(
                getattr(self._topology.devices[r].storage, self._tier) for r in ranks
            )
        order = order or partial(self._cost_order, self._room[ranks], bool(searched))
        if searched:
            least = self._least(searched, order, self._cost_ms)
            return least, searched
        if ways.option(rows[0]).dependency is not None:
            least = self._least(rows, order, self._cost_ms)
            return least, ()
        ranked = sorted(
            rows, key=lambda r: (*order(r), self._cost_ms(r), *self._name_order(r))
        )
        runnable = [r for r in ranked if not self._is_faulty(r)] or ranked
        return runnable[0], runnable

    def _kind(self, row: int) -> int:
        return int(self._ways.kind_R[row])

    def _is_placeable(self, row: int) -> bool:
        """Whether a search can place a row's shards."""
        kind = self._kind(row)
        if kind not in self._placeable_K:
            self._placeable_K[kind] = is_placeable(
                self._ways.kinds[kind], self.costs.reader
            )
        return self._placeable_K[kind]

    def _options(
        self, chosen: Sequence[tuple[int, Sequence[int]]]
    ) -> list[ShardingOption]:
        """Return the options of a proposal, with estimates of their shards.

        Args:
            chosen: The row of each table, and the rows that it stands for.
        """
        options = [self._ways.option(row) for row, _ in chosen]
        for option, (row, _) in zip(options, chosen, strict=True):
            hbm, ddr = self._bytes_R2[row].astype(np.int64).tolist()
            for shard in sample_shards(option):
                if shard.storage is None:
                    shard.storage = Storage(hbm=hbm, ddr=ddr)
        if self._is_by_class:
            # TorchRec's statistics read the times of a proposal that does not fit.
            unpriced = [o for o in options if sample_shards(o)[0].perf is None]
            price_later(unpriced, self.costs.single_perfs, lambda: self.costs.encoder)
        return [
            FreeOption(option, self._ways, rows) if rows else option
            for option, (_, rows) in zip(options, chosen, strict=True)
        ]

    def _cost_ms(self, row: int) -> float:
        """Return the time of a row's slowest shard as if it were alone."""
        option = self._ways.option(row)
        perfs = [shard.perf for shard in option.shards]
        if None in perfs:
            (perfs,) = self.costs.single_perfs([option])
        return float(max(perf.total for perf in perfs))

    def _cost_order(self, room: int, may_be_split: bool, row: int) -> tuple[Any, ...]:
        """Sort key: options that run and fit come first, and column-wise ones lead."""
        option = self._ways.kinds[self._kind(row)]
        size = float(self._bytes_R2[row, ("hbm", "ddr").index(self._tier)])
        fused = option.compute_kernel == "fused"
        faulty = not may_be_split and self._is_faulty(row)
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

    def _memory_order(self, row: int) -> tuple[Any, ...]:
        # Rows split by free memory never fill a larger share of a rank than even rows.
        is_even, bytes_2 = row in self._even, self._bytes_R2[row].tolist()
        return (self._is_faulty(row), is_even, *bytes_2, *self._name_order(row))

    def _is_faulty(self, row: int) -> bool:
        return (
            self.costs.reader.run_fault(self._ways.kinds[self._kind(row)]) is not None
        )

    def _name_order(self, row: int) -> tuple[Any, ...]:
        option = self._ways.kinds[self._kind(row)]
        kind = option.sharding_type
        return kind != TABLE_WISE, kind, option.compute_kernel

    def _least(
        self,
        rows: Sequence[int],
        order: Callable[[int], Any],
        then: Callable[[int], Any] = lambda row: 0,
    ) -> int:
        """Return the first row by `order`; `then` and the name break ties."""
        orders = [order(row) for row in rows]
        least = min(orders)
        drawn = [r for r, own in zip(rows, orders, strict=True) if own == least]
        if not drawn[1:]:
            return drawn[0]
        return min(drawn, key=lambda r: (then(r), *self._name_order(r)))


def shard_bytes(ways: Ways, reader: TableReader, memory: MemoryModel | None) -> Floats:
    """Return the memory of each way's largest listed shard, `R x 2`: device and host.

    Ways without an estimate are ones that the memory model knows.
    """
    bytes_R2 = np.zeros((ways.num_rows, 2))
    unknown = []
    for row, (table, kind) in enumerate(
        zip(ways.table_R.tolist(), ways.kind_R.tolist(), strict=True)
    ):
        option = ways.kinds[kind]
        samples = sample_shards(option)
        if ways.tables[table] is not option or samples[0].storage is None:
            unknown.append(row)
            continue
        bytes_R2[row, 0] = max(s.storage.hbm for s in samples)
        bytes_R2[row, 1] = max(s.storage.ddr for s in samples)
    if unknown:
        assert memory is not None, "only its enumerator lists ways without estimates"
        some = ways.take(unknown)
        largest_N2 = some.largest_R2(reader.world_size, reader.node_size)
        found = memory.shard_bytes(some, np.arange(len(unknown)), *largest_N2.T)
        bytes_R2[unknown] = np.ceil(found)
    return bytes_R2
