"""Places the tables of a proposal by a search, inside TorchRec's loop."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from torchrec_neuroshard.costs.placement_rules import PlacementRules
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import HOST, ShardingTask, format_bytes
from torchrec_neuroshard.errors import InfeasibleError, PlacementError
from torchrec_neuroshard.planner.caches import size_caches
from torchrec_neuroshard.planner.cautions import optimizer_notes
from torchrec_neuroshard.planner.compat import sharders_by_type
from torchrec_neuroshard.planner.constraints import (
    PlacementConstraints,
    ranks_by_table,
)
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.greedy import (
    check_memory,
    full_rank,
    memory_left,
    option_copies,
    place_greedily,
    without,
)
from torchrec_neuroshard.planner.kernels import is_estimated
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import (
    device_tier,
    has_cache,
    has_open_cache,
    is_dense,
    note_sharders,
    table_name,
)
from torchrec_neuroshard.planner.plan_costs import CostedPart
from torchrec_neuroshard.planner.search_space import SearchSpace
from torchrec_neuroshard.planner.ways import FreeOption, is_placeable
from torchrec_neuroshard.search import SearchConfig, make_searcher
from torchrec_neuroshard.search.base import Searcher, SearchResult
from torchrec_neuroshard.search.choosing import ChoosingSearcher

__all__ = ["NeuroShardPartitioner", "SearchLog", "SearchRecord"]

LATER_EFFORT = 0.3
"""Effort of the searches after a plan's first one, relative to it."""
LATER_SHARE = 4.0
"""What all of them may take together, relative to the first one."""
MOST_REPAIRS = 3
"""Times that a plan which overfills a rank is searched anew, with less memory."""
LEAST_SECONDS = 0.5
"""A first search that took less counts as this."""
QUICK_SECONDS = 0.05
"""What a search gets that comes later still: enough to place tables, not to improve."""


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """One search that a partitioner made."""

    task: ShardingTask
    result: SearchResult


@dataclass(slots=True)
class SearchLog:
    """The searches of one planning run, which share a time budget.

    All but the first make less effort.
    """

    records: list[SearchRecord] = dataclasses.field(default_factory=list)
    infeasible: str | None = None
    """Why of proposals that did not fit the one with most to choose from did not."""
    num_ways: int = 0
    """Of that proposal's tables."""
    is_crowded: bool = False
    """Whether the outputs of a rank's own samples leave no memory for tables."""
    seconds: float = 0.0
    """What the searches took."""

    def next(self, searcher: Searcher) -> Searcher:
        """Return the search with what is left of the budget."""
        if not self.records:
            return searcher
        first = max(self.records[0].result.search_seconds, LEAST_SECONDS)
        left = searcher.time_budget_seconds - self.seconds
        share = first * (1 + LATER_SHARE) - self.seconds
        effort = LATER_EFFORT if share > 0 else 0.0
        return searcher.with_budget(max(min(left, share), QUICK_SECONDS), effort)


class NeuroShardPartitioner(CostedPart, Partitioner):
    """Shards and places a proposal's tables by searching on the learned cost of sets.

    An option of `NeuroShardProposer`'s leaves the search every way that its table may
    be sharded in; any other is kept to its type and kernel. Column-wise options
    may be split at any multiple of four columns, down to the constraint's
    `min_partition` (default 4, on GPUs whose costs are an estimate 32) and at most once
    per rank, into unequal widths only for CPU topologies. Options that the cost model
    has no price for are placed first, by TorchRec's greedy routine, and the memory they
    take is left out of the search.

    Placement constraints hold for all of them: tables that are not searched are placed
    by the same routine on the ranks that they may be on, one by one, before all others.

    The proposal is not changed; the options returned are copies, whose shards' `perf`
    adds up to the cost of each rank's set, and whose `storage` to what the rank
    allocates, where `NeuroShardEnumerator` estimates memory.

    The other arguments are those of `CostedPart`.

    Attributes:
        searcher: What searches the placements.
        placement: Which ranks tables may be on.
        log: The searches made.

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
        self.placement = placement or PlacementConstraints()
        self.searcher = make_searcher(search)
        self._enumerator = enumerator
        self.log = SearchLog()
        self._sharders: Mapping[str, ModuleSharder[Any]] = {}

    def start(
        self, log: SearchLog, sharders: Iterable[ModuleSharder[Any]] = ()
    ) -> None:
        """Start a planning run.

        Args:
            log: Of the run.
            sharders: Of the run, for options whose estimators did not read them.
        """
        self.log, self._sharders = log, sharders_by_type(sharders)

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
        for option in proposal:
            note_sharders((option, *FreeOption.ways_of(option)), self._sharders)
        rules, room, memory = self.rules(proposal), storage_constraint, self._memory
        common = 0.0 if memory is None else memory.common_bytes(proposal)
        if memory is not None:
            storage_constraint = without(room, common)
        ways = [
            option.ways
            if isinstance(option, FreeOption)
            else (option,) * is_placeable(option, self.costs.reader)
            for option in proposal
        ]
        try:
            self._check_room(proposal, storage_constraint, room)
            plan = self._fitted(proposal, ways, storage_constraint, room, rules)
            for _ in range(MOST_REPAIRS):
                if memory is None or full_rank(room, plan) is None:
                    break
                # What tables take beside each other shows only in a plan.
                over = max(-left.hbm for left in memory_left(room, plan))
                beside = memory.common_bytes(plan, placed=True)
                common = max(beside, common + max(0, over))
                less = without(room, common)
                plan = self._fitted(proposal, ways, less, room, rules)
            if memory is not None:
                check_memory(room, plan, "the search's plan")
        except PlannerError as error:
            num_ways = sum(map(len, ways))
            if self.log.infeasible is None or num_ways > self.log.num_ways:
                self.log.infeasible, self.log.num_ways = str(error), num_ways
            raise
        return plan

    def _fitted(
        self,
        proposal: list[ShardingOption],
        ways: list[tuple[ShardingOption, ...]],
        storage_constraint: Topology,
        room: Topology,
        rules: PlacementRules,
    ) -> list[ShardingOption]:
        """Place tables, again where a disk is full, and size their caches."""
        plan = self._place(proposal, ways, storage_constraint, rules)
        if full_rank(storage_constraint, plan) is not None:
            # The search counts no disks; TorchRec's routine does.
            offloaded = [is_estimated(o) and not is_dense(o) for o in plan]
            again = [
                chosen if out else option
                for option, chosen, out in zip(proposal, plan, offloaded, strict=True)
            ]
            ways = [() if out else w for w, out in zip(ways, offloaded, strict=True)]
            self.costs.attribute(plan)
            plan = self._place(_without_ranks(again), ways, storage_constraint, rules)
        if self._memory is not None:
            sized = [
                has_cache(chosen)
                and any(map(has_open_cache, FreeOption.ways_of(option)))
                for option, chosen in zip(proposal, plan, strict=True)
            ]
            plan = size_caches(plan, sized, self.costs, self._memory, room)
        self._attribute(plan)
        return plan

    def _check_room(
        self, proposal: Sequence[ShardingOption], less: Topology, room: Topology
    ) -> None:
        """Refuse to plan where the outputs of a rank's own samples leave no memory.

        Raises:
            PlannerError: They leave none.
        """
        has, left = (max(d.storage.hbm for d in t.devices) for t in (room, less))
        if left > 0 or left == has:
            return
        self.log.is_crowded = True
        batch_size = max(option.batch_size for option in proposal)
        raise PlannerError(
            error_type=PlannerErrorType.PARTITION,
            message=f"every rank needs {format_bytes(has - left)} for the outputs of "
            f"its own {batch_size} samples, whatever its tables, and has "
            f"{format_bytes(max(0, has))}. Lower batch_size ({batch_size}) or take "
            "ranks with more memory",
        )

    @property
    def _memory(self) -> MemoryModel | None:
        if isinstance(self._enumerator, NeuroShardEnumerator):
            return self._enumerator.memory
        return None

    def _attribute(self, plan: Sequence[ShardingOption]) -> None:
        """Share out to shards what each rank takes, time and memory."""
        self.costs.attribute(plan)
        if self._memory is not None:
            self._memory.attribute(plan)

    def _place(
        self,
        proposal: Sequence[ShardingOption],
        ways: Sequence[tuple[ShardingOption, ...]],
        storage_constraint: Topology,
        rules: PlacementRules,
    ) -> list[ShardingOption]:
        """Place tables without ways by TorchRec's routine, the others by the search."""
        # By name: the order that a model lists its tables in must not matter.
        both = sorted(zip(proposal, ways, strict=True), key=lambda p: table_name(p[0]))
        given = [o for o, w in both if not w]
        searched = [w for _, w in both if w]
        others = place_greedily(given, storage_constraint, rules)
        self.costs.share_launches(others)
        chosen: list[ShardingOption] = []
        if searched:
            chosen = self._search(
                searched,
                memory_left(storage_constraint, others),
                rules.restricted(ranks_by_table(others, rules)) if rules else rules,
            )
        placed = {table_name(o): o for o in (*others, *chosen)}
        return [placed[table_name(o)] for o in proposal]

    def rules(self, options: Sequence[ShardingOption]) -> PlacementRules:
        """Say what the placement constraints mean for a plan of these options.

        Raises:
            ConfigError: They name what is not there, or contradict each other.
        """
        return self.placement.rules(
            map(table_name, options), int(self._topology.world_size)
        )

    def _search(
        self,
        tables: Sequence[Sequence[ShardingOption]],
        memory: Sequence[Storage],
        rules: PlacementRules,
    ) -> list[ShardingOption]:
        space = SearchSpace.of(
            tables,
            reader=self.costs.reader,
            enumerator=self._enumerator,
            memory=memory,
            rules=rules,
            least_columns=self.costs.least_columns,
        )
        log, start = self.log, time.monotonic()
        searcher = log.next(self.searcher)
        task = space.task
        if not searcher.takes_choices and (task.has_choices or task.host_memory_bytes):
            searcher = ChoosingSearcher(searcher)
        self.costs.check_model(task)
        try:
            cost_model, comms_model, const_ms = self.costs.searched_models(space.task)
            result = searcher.search(task, cost_model, comms_model)
        except InfeasibleError as error:
            odd = optimizer_notes(space.options, self.costs.reader)
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message="\n".join(
                    [self._explained(str(error), memory), *(n.text for n in odd)]
                ),
            ) from error
        finally:
            log.seconds += time.monotonic() - start
        try:
            result.placement.check(space.task)
        except PlacementError as error:
            raise type(error)(
                f"search '{searcher.name}' returned what cannot be used: {error}"
            ) from error
        spread = space.over_hosts(result.placement)
        if spread != result.placement:
            with contextlib.suppress(InfeasibleError, PlacementError):
                spread.check(task)
                same = Simulator(task, cost_model, comms_model).evaluate(spread)
                now_ms = result.predicted.critical_path_ms
                if same.critical_path_ms <= now_ms * (1 + 1e-9):
                    result = dataclasses.replace(
                        result, placement=spread, predicted=same
                    )
        result = self.costs.predict(space.task, result, const_ms)
        log.records.append(SearchRecord(space.task, result))
        return space.placed(result.placement)

    def _explained(self, message: str, memory: Sequence[Storage]) -> str:
        """Add what ranks have before anything is searched, where that is less.

        Not to a message about the host's memory alone.
        """
        tier = device_tier(self._topology)
        whole = max(getattr(d.storage, tier) for d in self._topology.devices)
        left = max(getattr(m, tier) for m in memory)
        if format_bytes(left) == format_bytes(whole) or message.startswith(HOST):
            return message
        return (
            f"{message.rstrip('.')}. Of the {format_bytes(whole)} of a rank, the "
            "storage reservation, the outputs of its own samples and tables that are "
            f"not searched leave {format_bytes(max(0, left))}."
        )


def _without_ranks(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Copies of options whose shards are to be placed."""
    copies = option_copies(options)
    for option in copies:
        for shard in option.shards:
            shard.rank = None
    return copies
