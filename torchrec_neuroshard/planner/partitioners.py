"""Where a proposal's tables go: the search, inside TorchRec's loop."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ShardingType

from torchrec_neuroshard.errors import InfeasibleError, PlacementError
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.planner.constraints import (
    PlacementConstraints,
    PlacementRules,
    ranks_by_table,
)
from torchrec_neuroshard.planner.costs import CostedPart
from torchrec_neuroshard.planner.enumerators import NeuroShardEnumerator
from torchrec_neuroshard.planner.greedy import (
    memory_left,
    option_copies,
    place_greedily,
)
from torchrec_neuroshard.planner.plan_conversion import FusionGroups, fusion_key
from torchrec_neuroshard.planner.table_reader import (
    device_tier,
    has_own_optimizer,
    table_name,
)
from torchrec_neuroshard.planner.topologies import whole_nodes
from torchrec_neuroshard.search import NeuroShardSearcher, limited, make_searcher
from torchrec_neuroshard.search.base import SearchConfig, Searcher, SearchResult
from torchrec_neuroshard.tables import COLUMN_MULTIPLE, TableConfig

__all__ = ["NeuroShardPartitioner", "PlacedShards", "SearchRecord", "placed_shards"]

_TABLE_WISE = ShardingType.TABLE_WISE.value
_COLUMN_WISE = ShardingType.COLUMN_WISE.value
_TIERS = ("hbm", "ddr", "ssd")

LATER_EFFORT = 0.3
"""Effort of the searches after a plan's first one, relative to it."""
LATER_SHARE = 4.0
"""What all of them may take together, relative to the first one."""
LEAST_SECONDS = 0.5
"""A first search that took less counts as this."""
QUICK_SECONDS = 0.05
"""What a search gets that comes later still: enough to place tables, not to improve."""

PlacedShards = frozenset[tuple[str, int, int, int]]
"""Table name, offset, width and rank of each shard: what a plan comes down to."""


def placed_shards(task: ShardingTask, placement: Placement) -> PlacedShards:
    """Return what a placement comes down to, whatever the order of its tables."""
    return frozenset(
        (task.tables[s.table].name, s.offset, s.width, s.rank) for s in placement.shards
    )


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """One search that a partitioner made."""

    task: ShardingTask
    result: SearchResult


@dataclass(frozen=True, slots=True)
class _ShardStorage:
    """Memory of a table's shards, as TorchRec estimates it: linear in the width."""

    fixed: Mapping[str, float]
    per_column: Mapping[str, float]

    def at(self, width: int) -> Storage:
        """Memory of a shard of `width` columns."""
        return Storage(
            **{
                tier: math.ceil(self.fixed[tier] + self.per_column[tier] * width)
                for tier in _TIERS
            }
        )


class NeuroShardPartitioner(CostedPart, Partitioner):
    """Splits and places a proposal's tables by searching on the learned cost of sets.

    Column-wise options may be split at any multiple of four columns, down to the
    constraint's `min_partition` (default 4) and at most once per rank; table-wise ones
    stay whole. Splits are of unequal widths only for CPU topologies. Options that are
    not searched (row-wise, data-parallel, offloaded, ...) are placed first, by
    TorchRec's greedy routine, and the memory they take is left out of the search.

    A pooled module of which some table is split gets all its column-wise options as
    column-wise shards, so that a rank runs one kernel for them; where none is split,
    they become table-wise as far as the constraints allow.

    A proposal whose shards all have ranks is a plan already and is only priced.

    Placement constraints hold for all of them: tables that are not searched are placed
    by the same routine on the ranks that they may be on, one by one, before all others.

    The proposal is not changed; the options returned are copies, whose shards' `perf`
    adds up to the cost of each rank's set.

    The other arguments are those of `CostedPart`.

    Attributes:
        records: The searches since `reset`.
        infeasible: Why the first proposal since `reset` that did not fit did not.
        placement: Which ranks tables may be on.

    Args:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on it.
        search: A search's name, its settings, or a searcher.
        enumerator: The planner's; says how much memory a split takes. None: what a
            table needs beside its weights is counted in full for each of its shards.
        placement: Which ranks tables may be on. None: any.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        search: str | SearchConfig | Searcher = "default",
        enumerator: Enumerator | None = None,
        placement: PlacementConstraints | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(topology, constraints, **kwargs)
        self._topology = topology
        self._constraints = constraints or {}
        self.placement = placement or PlacementConstraints()
        self._searcher = make_searcher(search)
        self._enumerator = enumerator
        self._tier = device_tier(topology)
        self.records: list[SearchRecord] = []
        self.infeasible: str | None = None
        self._seconds: float | None = None

    @property
    def searcher(self) -> Searcher:
        """What searches the placements."""
        return self._searcher

    @property
    def seconds(self) -> float:
        """What searching took since `reset`."""
        return self._seconds or 0.0

    def reset(self) -> None:
        """Forget earlier searches.

        The searches from now on share one time budget, and all but the first make
        less effort.
        """
        self.records = []
        self.infeasible = None
        self._seconds = 0.0

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Choose shards and ranks.

        Args:
            proposal: One option per table, with estimates.
            storage_constraint: The devices and the memory that shards may take.

        Returns:
            The chosen options, in the order of the proposal.

        Raises:
            PlannerError: Of type PARTITION, when nothing fits.
            ConfigError: The cost model predicts something that is not a time, or
                placement constraints cannot be kept, whatever the sizes.
        """
        rules = self.rules(proposal)
        if all(s.rank is not None for o in proposal for s in o.shards):
            return self._keep(proposal, storage_constraint, rules)
        is_searched = [self.costs.reader.is_searched(o) for o in proposal]
        searched = [o for o, s in zip(proposal, is_searched, strict=True) if s]
        not_searched = [o for o, s in zip(proposal, is_searched, strict=True) if not s]
        try:
            others = place_greedily(not_searched, storage_constraint, rules)
        except PlannerError as error:
            if rules:
                self.infeasible = self.infeasible or str(error)
            raise
        self.costs.share_launches(others)
        chosen: list[ShardingOption] = []
        if searched:
            chosen = self._search(
                searched,
                memory_left(storage_constraint, others),
                rules.narrowed(ranks_by_table(others)) if rules else rules,
            )
        placed, kept = iter(chosen), iter(others)
        plan = [next(placed if s else kept) for s in is_searched]
        self.costs.attribute(plan)
        return plan

    def rules(self, options: Sequence[ShardingOption]) -> PlacementRules:
        """Say what the placement constraints mean for a plan of these options.

        Raises:
            ConfigError: They name what is not there, or contradict each other.
        """
        return self.placement.rules(
            map(table_name, options), int(self._topology.world_size)
        )

    def _keep(
        self,
        plan: Sequence[ShardingOption],
        storage_constraint: Topology,
        rules: PlacementRules,
    ) -> list[ShardingOption]:
        """Price a plan that somebody else made."""
        breach = rules.breach(ranks_by_table(plan))
        if breach is not None:
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message=f"a given plan breaks the placement constraints: {breach}",
            )
        kept = option_copies(plan)
        nothing = Storage(hbm=0, ddr=0)
        for rank, left in enumerate(memory_left(storage_constraint, kept)):
            if not nothing.fits_in(left):
                raise PlannerError(
                    error_type=PlannerErrorType.PARTITION,
                    message=f"rank {rank} of a given plan holds more than its memory",
                )
        self.costs.share_launches(kept)
        self.costs.attribute(kept)
        return kept

    def _search(
        self,
        options: list[ShardingOption],
        memory: Sequence[Storage],
        rules: PlacementRules,
    ) -> list[ShardingOption]:
        storages = self._storages(options)
        task = self._task(options, storages, memory, rules)
        searcher, start = self._next_searcher(), time.monotonic()
        try:
            result = searcher.search(
                task, self.costs.cost_model, self.costs.comms_model
            )
        except InfeasibleError as error:
            self.infeasible = self.infeasible or str(error)
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION, message=str(error)
            ) from error
        finally:
            if self._seconds is not None:
                self._seconds += time.monotonic() - start
        try:
            result.placement.check(task)
        except PlacementError as error:
            raise type(error)(
                f"search '{searcher.name}' returned what cannot be used: {error}"
            ) from error
        self.records.append(SearchRecord(task, result))
        return self._emit(options, storages, result.placement)

    def _next_searcher(self) -> Searcher:
        """Return a searcher with what is left of the plan's time budget."""
        searcher = self._searcher
        if self._seconds is None or not self.records:
            return searcher
        config: Any = getattr(searcher, "config", None)
        left = getattr(config, "time_budget_seconds", math.inf) - self._seconds
        if type(searcher) is NeuroShardSearcher:
            first = self.records[0].result.search_seconds
            share = LATER_SHARE * max(first, LEAST_SECONDS)
            left = min(left, first + share - self._seconds)
            less: dict[str, Any] = (
                {"effort": config.effort * LATER_EFFORT}
                if left > 0
                else {
                    "beam_width": 1,
                    "num_candidates": 1,
                    "refine": False,
                    "exhaustive_limit": 0,
                }
            )
            searcher = NeuroShardSearcher(dataclasses.replace(config, **less))
        return limited(searcher, max(left, QUICK_SECONDS))

    def task(
        self,
        options: Sequence[ShardingOption],
        memory: Sequence[Storage],
        rules: PlacementRules,
    ) -> ShardingTask:
        """Say what a search is asked to place.

        Args:
            options: Options that are searched, with estimates.
            memory: What each rank has left for them.
            rules: Which ranks they may be on.
        """
        return self._task(options, self._storages(options), memory, rules)

    def _task(
        self,
        options: Sequence[ShardingOption],
        storages: Sequence[_ShardStorage],
        memory: Sequence[Storage],
        rules: PlacementRules,
    ) -> ShardingTask:
        topology = self._topology
        # As if some table of each module were split.
        fused = FusionGroups.from_keys(
            [fusion_key(o, self.costs.reader, o.sharding_type) for o in options]
        )
        tables = tuple(self.costs.reader.table(o) for o in options)
        min_widths = tuple(
            self._min_width(o, t.embedding_dim)
            for o, t in zip(options, tables, strict=True)
        )
        return ShardingTask(
            tables=tables,
            world_size=topology.world_size,
            batch_size=options[0].batch_size * topology.world_size,
            local_world_size=whole_nodes(
                topology.world_size, topology.local_world_size
            ),
            memory_bytes=tuple(max(0, getattr(m, self._tier)) for m in memory),
            fixed_bytes=tuple(math.ceil(s.fixed[self._tier]) for s in storages),
            column_bytes=tuple(s.per_column[self._tier] for s in storages),
            min_widths=min_widths,
            groups=fused.groups,
            stages=fused.stages,
            stage_names=fused.stage_names,
            uneven=topology.compute_device == "cpu",
            **_placement_fields(tables, rules),
        )

    def _min_width(self, option: ShardingOption, width: int) -> int:
        if option.sharding_type != _COLUMN_WISE or not option.is_pooled:
            return width
        constraint = self._constraints.get(option.name)
        asked = (constraint.min_partition if constraint else None) or COLUMN_MULTIPLE
        return min(width, math.ceil(asked / COLUMN_MULTIPLE) * COLUMN_MULTIPLE)

    def _storages(self, options: Sequence[ShardingOption]) -> list[_ShardStorage]:
        """Memory of each table's shards as a function of their width."""
        if self._enumerator is None:
            return [_bounded_storage(o) for o in options]
        probes = []
        for option in options:
            rows, width = (int(n) for n in option.tensor.shape)
            probe = copy.copy(option)
            probe.sharding_type = _COLUMN_WISE
            # The narrow one first; a table of four columns cannot be split.
            widths = (COLUMN_MULTIPLE, max(width, 2 * COLUMN_MULTIPLE))
            probe.shards = [Shard(size=[rows, w], offset=[0, 0]) for w in widths]
            probes.append(probe)
        self._enumerator.populate_estimates(probes)
        counts_all = isinstance(self._enumerator, NeuroShardEnumerator)
        storages = []
        for option, probe in zip(options, probes, strict=True):
            narrow, wide = probe.shards
            fixed, per_column = {}, {}
            for tier in _TIERS:
                low, high = getattr(narrow.storage, tier), getattr(wide.storage, tier)
                slope = (high - low) / (wide.size[1] - narrow.size[1])
                per_column[tier] = slope
                fixed[tier] = max(0.0, low - slope * narrow.size[1])
            counted = has_own_optimizer(option) or counts_all
            if counted and self.costs.reader.optimizer(option) == "rowwise_adagrad":
                # TorchRec spreads one value per row over the columns; in truth each
                # shard keeps its own.
                width = int(option.tensor.shape[1])
                state = 4.0 * int(option.tensor.shape[0])
                fixed[self._tier] += state
                per_column[self._tier] -= state / width
            storages.append(_ShardStorage(fixed, per_column))
        return storages

    def _emit(
        self,
        options: Sequence[ShardingOption],
        storages: Sequence[_ShardStorage],
        placement: Placement,
    ) -> list[ShardingOption]:
        by_table: list[list[Any]] = [[] for _ in options]
        for shard in placement.shards:
            by_table[shard.table].append(shard)
        # Modules in which the column-wise options must stay column-wise.
        column_wise = {
            o.path
            for o, shards in zip(options, by_table, strict=True)
            if o.sharding_type == _COLUMN_WISE
            and (len(shards) > 1 or not self._may_be_table_wise(o))
        }
        emitted = []
        for option, storage, shards in zip(options, storages, by_table, strict=True):
            new = copy.copy(option)
            if option.path not in column_wise:
                new.sharding_type = _TABLE_WISE
            rows = int(option.tensor.shape[0])
            new.shards = [
                Shard(
                    size=[rows, s.width],
                    offset=[0, s.offset],
                    storage=storage.at(s.width),
                    rank=s.rank,
                )
                for s in shards
            ]
            emitted.append(new)
        return emitted

    def _may_be_table_wise(self, option: ShardingOption) -> bool:
        constraint = self._constraints.get(option.name)
        allowed = constraint.sharding_types if constraint else None
        return not allowed or _TABLE_WISE in allowed


def _placement_fields(
    tables: Sequence[TableConfig], rules: PlacementRules
) -> dict[str, Any]:
    """Fields of a task that say which ranks its tables may be on, and with whom."""
    if not rules:
        return {}
    ranks_T = tuple(rules.allowed.get(t.name) for t in tables)
    for table, ranks in zip(tables, ranks_T, strict=True):
        if ranks == ():
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message=f"table '{table.name}': tables that are not searched took the "
                "last rank that placement constraints left it",
            )
    number = {t.name: i for i, t in enumerate(tables)}
    together, apart = (
        tuple(tuple(number[n] for n in names if n in number) for names in sets)
        for sets in (rules.together, rules.apart)
    )
    return {
        "allowed_ranks": tuple(ranks or () for ranks in ranks_T),
        "together": together,
        "apart": apart,
    }


def _bounded_storage(option: ShardingOption) -> _ShardStorage:
    """Upper bound on a shard's memory from the storage of the whole table."""
    rows, width = (int(n) for n in option.tensor.shape)
    weights = rows * option.tensor.element_size()
    fixed, per_column = {}, {}
    for tier in _TIERS:
        # Equal in all shards; of one whole table it is the table's.
        total = sum(getattr(s.storage, tier) for s in option.shards)
        per_column[tier] = min(weights, total / width)
        fixed[tier] = total - per_column[tier] * width
    return _ShardStorage(fixed, per_column)
