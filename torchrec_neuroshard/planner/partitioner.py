"""The partitioner: runs the search on a proposal, inside TorchRec's loop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PlannerError,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from torchrec_neuroshard.costs.placement_constraints import PlacementConstraints
from torchrec_neuroshard.costs.placement_rules import PlacementRules
from torchrec_neuroshard.costs.task import HOST, ShardingTask, format_bytes
from torchrec_neuroshard.errors import InfeasibleError, PlacementError
from torchrec_neuroshard.papers.choosing import ChoosingSearcher
from torchrec_neuroshard.planner.caches import size_caches
from torchrec_neuroshard.planner.cautions import optimizer_notes
from torchrec_neuroshard.planner.compat import sharders_by_type
from torchrec_neuroshard.planner.constraints import ranks_by_table
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.greedy import (
    PlanOptions,
    check_memory,
    full_rank,
    memory_left,
    no_fit,
    option_copies,
    without,
)
from torchrec_neuroshard.planner.kernels import is_estimated
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import (
    device_tier,
    has_cache,
    has_open_cache,
    is_dense,
    is_even,
    is_pooled,
    note_sharders,
    table_name,
)
from torchrec_neuroshard.planner.plan_costs import CostedPart
from torchrec_neuroshard.planner.search_space import SearchSpace
from torchrec_neuroshard.planner.unsearched import place_unsearched
from torchrec_neuroshard.planner.ways import (
    FreeOption,
    Ways,
    is_placeable,
    proposed_ways,
)
from torchrec_neuroshard.search.base import SearchConfig, Searcher, SearchResult
from torchrec_neuroshard.search.default import make_searcher
from torchrec_neuroshard.tables.sharding_types import COLUMN_WISE

LATER_EFFORT = 0.3
"""Effort of each search after the first, as a share of the first."""
MOST_SEARCHED = 8
"""Most proposals to search before their greedy plans decide which ones are. This is not
a time limit, since a plan must not depend on the machine's load."""
MOST_REPAIRS = 3
"""Most times that a plan which overfills a rank is searched again with less memory."""
LATER_SECONDS = 2.0
"""Time limit of a later search once the time budget is spent."""
QUICK_SECONDS = 0.05
"""Time limit of a search after the deadline: enough to place tables, not to improve."""


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """One search that a partitioner made."""

    task: ShardingTask
    result: SearchResult


@dataclass(slots=True)
class SearchLog:
    """The searches of one planning run, which share a time budget.

    Searches after the first make less effort.
    """

    deadline: float = math.inf
    """`time.monotonic()` after which tables are only placed."""
    records: list[SearchRecord] = dataclasses.field(default_factory=list)
    infeasible: str | None = None
    """Why no plan fits; of several proposals, the reason of the one with most ways."""
    num_ways: int = 0
    """Ways of all tables in that proposal."""
    is_crowded: bool = False
    """Whether the outputs for a rank's own samples leave no memory for tables."""
    num_proposals: int = 0
    """Proposals so far, with those that did not fit."""
    began_with: tuple[Topology, tuple[int, ...]] | None = None
    """The devices, and the hashes of the first proposal."""
    seconds: float = 0.0
    """Time that the searches took so far."""
    best_ms: float = math.inf
    """Critical path of the shortest plan so far."""

    def next(self, searcher: Searcher) -> Searcher:
        """Return the searcher with the effort and time of the next search."""
        left, effort = self.deadline - time.monotonic(), 1.0
        if self.records:
            effort = LATER_EFFORT
            rest = searcher.time_budget_seconds - self.seconds
            left = min(left, max(rest, LATER_SECONDS))
        elif left == math.inf:
            return searcher
        return searcher.with_budget(max(left, QUICK_SECONDS), effort)


class NeuroShardPartitioner(CostedPart, Partitioner):
    """Shards and places a proposal's tables with a search over learned costs.

    For an option of `NeuroShardProposer`, the search may use every way to shard the
    table. Any other option keeps its sharding type and kernel. Column-wise options may
    be split at any multiple of four columns, down to the constraint's `min_partition`
    (default 4; 32 on GPUs whose costs are estimates), into at most one shard per rank.
    Splits are uneven only for CPU topologies.

    Tables whose options the cost model does not cover are placed first; see
    `place_unsearched`. The search gets the memory that they leave. Placement
    constraints hold for them as well.

    Some of TorchRec's proposers make thousands of proposals. After the first few, a
    proposal is placed with TorchRec's greedy routine, and searched only if that plan is
    shorter than all before.

    The proposal is not changed; the returned options are copies. The `perf` of a
    rank's shards adds up to the cost of the rank's set of tables. If
    `NeuroShardEnumerator` counts memory, their `storage` adds up to what the rank
    allocates.

    For the other arguments, see `CostedPart`.

    Attributes:
        searcher: Searches the placements.
        placement: Which ranks tables may use.
        log: The searches of the current or last planning run.

    Args:
        topology: The devices to plan for.
        constraints: Table name -> TorchRec's constraints on the table.
        search: The name of a search, a `SearchConfig` or a `Searcher`.
        enumerator: The planner's enumerator, which knows the memory of a split. None:
            every shard counts all memory that its table needs beside its weights.
        placement: Which ranks tables may use. None: any.
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
        self.placement = PlacementConstraints.of(placement)
        self.searcher = make_searcher(search)
        self._enumerator = enumerator
        self.log = SearchLog()
        self._sharders: Mapping[str, ModuleSharder[Any]] = {}
        self._last_space: tuple[Any, SearchSpace] | None = None

    def start(
        self, log: SearchLog, sharders: Iterable[ModuleSharder[Any]] = ()
    ) -> None:
        """Start a planning run.

        Args:
            log: The run's log.
            sharders: The run's sharders, for options whose estimators did not read
                them.
        """
        self.log, self._sharders = log, sharders_by_type(sharders)

    def _log_proposal(self, proposal: list[ShardingOption], room: Topology) -> None:
        """Count a proposal, in a new log if TorchRec has started another plan.

        TorchRec announces no plan. But its storage reservations return new devices for
        each plan, and no plan has the same proposal twice.
        """
        key = tuple(sorted(map(hash, proposal)))
        if (known := self.log.began_with) is not None:
            if known[0] is not room or known[1] == key:
                self.log = SearchLog()
        if self.log.began_with is None:
            self.log.began_with = room, key
        self.log.num_proposals += 1

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Choose shards and ranks.

        Args:
            proposal: One option per table, with estimates.
            storage_constraint: The devices, with the memory left for shards.

        Returns:
            The chosen options, in the order of the proposal.

        Raises:
            PlannerError: No plan fits (type PARTITION).
            ConfigError: The cost model predicts something that is not a time, or
                placement constraints cannot be satisfied with any amount of memory.
        """
        self._log_proposal(proposal, storage_constraint)
        if not isinstance(self._enumerator, NeuroShardEnumerator):
            for option in proposal:
                note_sharders((option, *FreeOption.ways_of(option)), self._sharders)
        rules, room = self.rules(proposal), storage_constraint
        ways, rows = proposed_ways(proposal)
        tables = [
            own if is_placeable(first, self.costs.reader) else []
            for own, first in zip(rows, ways.kinds_of(r[0] for r in rows), strict=True)
        ]
        try:
            plan: list[ShardingOption] | None = None
            if self.log.num_proposals > MOST_SEARCHED:
                nothing: list[list[int]] = [[] for _ in tables]
                greedy = self._planned(proposal, ways, nothing, room, rules)
                if self._path_ms(greedy) >= self.log.best_ms:
                    plan = greedy
            plan = plan or self._planned(proposal, ways, tables, room, rules)
        except PlannerError as error:
            num_ways = sum(map(len, tables))
            if self.log.infeasible is None or num_ways > self.log.num_ways:
                self.log.infeasible, self.log.num_ways = str(error), num_ways
            raise
        finally:
            self._last_space = None
        self.log.best_ms = min(self.log.best_ms, self._path_ms(plan))
        return PlanOptions(plan)

    def _planned(
        self,
        proposal: list[ShardingOption],
        ways: Ways,
        tables: list[list[int]],
        room: Topology,
        rules: PlacementRules,
    ) -> list[ShardingOption]:
        """Return a plan that fits.

        Args:
            proposal: One option per table.
            ways: Ways to shard tables.
            tables: The ways of each table to search.
            room: The devices, with the memory left for shards.
            rules: Which ranks tables may use.

        Raises:
            PlannerError: There is none.
        """
        memory = self._memory
        if memory is None:
            return self._fitted(proposal, ways, tables, room, room, rules)
        first = [
            ways.option(rows[0]) if rows else option
            for option, rows in zip(proposal, tables, strict=True)
        ]
        # Bounds would leave out plans that fit, so estimates come first.
        with memory.at_peak(first):
            plan = self._repaired(proposal, ways, tables, room, rules, memory)
        if full_rank(room, plan) is not None:
            plan = self._repaired(proposal, ways, tables, room, rules, memory)
        check_memory(room, plan, "the search's plan")
        return plan

    def _repaired(
        self,
        proposal: list[ShardingOption],
        ways: Ways,
        tables: list[list[int]],
        room: Topology,
        rules: PlacementRules,
        memory: MemoryModel,
    ) -> list[ShardingOption]:
        """Return a plan, searched again with less memory while it overfills a rank.

        Memory that depends on neighbouring tables shows only in a plan. The last plan
        may still overfill a rank.

        Raises:
            PlannerError: The first search finds no plan.
        """

        def fitted(common: float, host: float = 0.0) -> list[ShardingOption]:
            less = without(room, common, host)
            return self._fitted(proposal, ways, tables, less, room, rules)

        common, host = memory.common_bytes(proposal), 0.0
        self._check_room(proposal, without(room, common), room)
        # Count in advance what only shows once some tables are replicated.
        mixed = memory.common_bytes(proposal, mixed=may_mix(ways, tables))
        try:
            plan = fitted(mixed)
            common = mixed
        except PlannerError:
            if mixed == common:
                raise
            plan = fitted(common)
        for _ in range(MOST_REPAIRS):
            if full_rank(room, plan) is None:
                break
            left, before = memory_left(room, plan), (common, host)
            beside = memory.common_bytes(plan, placed=True)
            common = max(beside, common + max(0, *(-m.hbm for m in left)))
            host += max(0, *(-m.ddr for m in left))
            if (common, host) == before:
                break
            try:
                plan = fitted(common, host)
            except PlannerError:
                break
        return plan

    def _path_ms(self, plan: Sequence[ShardingOption]) -> float:
        return self.costs.placed(plan).predicted.critical_path_ms

    def _fitted(
        self,
        proposal: list[ShardingOption],
        ways: Ways,
        tables: list[list[int]],
        storage_constraint: Topology,
        room: Topology,
        rules: PlacementRules,
    ) -> list[ShardingOption]:
        """Return a plan with sized caches; place again if a disk is full."""
        plan = self._place(proposal, ways, tables, storage_constraint, rules)
        if not is_even(plan):
            raise no_fit(
                "the proposal splits sequence tables of one module into "
                "different widths, which TorchRec's all-to-all does not support"
            )
        if full_rank(storage_constraint, plan) is not None:
            # The search does not count disk space, but TorchRec's routine does.
            offloaded = [is_estimated(o) and not is_dense(o) for o in plan]
            again = [
                chosen if out else option
                for option, chosen, out in zip(proposal, plan, offloaded, strict=True)
            ]
            searched = [
                [] if out else rows for rows, out in zip(tables, offloaded, strict=True)
            ]
            self.costs.attribute(plan)
            again = _without_ranks(again)
            plan = self._place(again, ways, searched, storage_constraint, rules)
        if self._memory is not None:
            sized = [
                has_cache(chosen)
                and any(map(has_open_cache, FreeOption.kinds_of(option)))
                for option, chosen in zip(proposal, plan, strict=True)
            ]
            plan = size_caches(plan, sized, self.costs, self._memory, room)
        self.costs.attribute(plan)
        if self._memory is not None:
            self._memory.attribute(plan)
        return plan

    def _check_room(
        self, proposal: Sequence[ShardingOption], less: Topology, room: Topology
    ) -> None:
        """Check that the outputs for a rank's own samples leave memory for tables.

        Raises:
            PlannerError: They leave none.
        """
        has, left = (max(d.storage.hbm for d in t.devices) for t in (room, less))
        if left > 0 or left == has:
            return
        self.log.is_crowded = True
        batch_size = max(option.batch_size for option in proposal)
        raise no_fit(
            f"every rank needs {format_bytes(has - left)} for the outputs of "
            f"its own {batch_size} samples, whatever its tables, and has "
            f"{format_bytes(max(0, has))}. Lower batch_size ({batch_size}) or use "
            "ranks with more memory"
        )

    @property
    def _memory(self) -> MemoryModel | None:
        if isinstance(self._enumerator, NeuroShardEnumerator):
            return self._enumerator.memory
        return None

    def _place(
        self,
        proposal: Sequence[ShardingOption],
        ways: Ways,
        tables: Sequence[list[int]],
        storage_constraint: Topology,
        rules: PlacementRules,
    ) -> list[ShardingOption]:
        """Place tables without ways, then search for the others."""
        # Sort by name: among equal plans, the model's order of tables must not decide.
        order = sorted(range(len(proposal)), key=lambda n: table_name(proposal[n]))
        searched = [tables[n] for n in order if tables[n]]
        paths = {proposal[n].path for n in order if tables[n]}
        given = [
            _unsearched_options(proposal[n], paths) for n in order if not tables[n]
        ]
        others = place_unsearched(given, storage_constraint, rules, self.costs)
        self.costs.share_launches(others)
        chosen: list[ShardingOption] = []
        if searched:
            chosen = self._search(
                ways,
                searched,
                [n for n in order if tables[n]],
                memory_left(storage_constraint, others),
                rules.restricted(ranks_by_table(others, rules)) if rules else rules,
            )
        placed = {table_name(o): o for o in (*others, *chosen)}
        return [placed[table_name(o)] for o in proposal]

    def rules(self, options: Sequence[ShardingOption]) -> PlacementRules:
        """Return the placement constraints as rules for the tables of these options.

        Raises:
            ConfigError: They name an unknown table or rank, or contradict each other.
        """
        return self.placement.rules(
            map(table_name, options), int(self._topology.world_size)
        )

    def _search(
        self,
        ways: Ways,
        tables: Sequence[Sequence[int]],
        places: Sequence[int],
        memory: Sequence[Storage],
        rules: PlacementRules,
    ) -> list[ShardingOption]:
        space = self._space(ways, tables, places, memory, rules)
        log, start = self.log, time.monotonic()
        searcher = log.next(self.searcher)
        task = space.task
        if not searcher.takes_choices and (task.has_choices or task.host_memory_bytes):
            searcher = ChoosingSearcher(searcher)
        simulator, const_ms = self.costs.searched_simulator(task)
        self.costs.check_model(simulator)
        try:
            result = searcher.search(simulator.task, simulator)
        except InfeasibleError as error:
            every = space.ways.options(range(space.ways.num_rows))
            odd = optimizer_notes(every, self.costs.reader)
            told = [self._explained(str(error), memory), *(n.text for n in odd)]
            raise no_fit("\n".join(told)) from error
        finally:
            log.seconds += time.monotonic() - start
        try:
            result.placement.check(space.task)
        except PlacementError as error:
            raise type(error)(
                f"search '{searcher.name}' returned an invalid placement: {error}"
            ) from error
        spread = space.over_hosts(result.placement)
        if spread != result.placement:
            with contextlib.suppress(InfeasibleError, PlacementError):
                spread.check(task)
                same = simulator.evaluate(spread)
                now_ms = result.predicted.critical_path_ms
                if same.critical_path_ms <= now_ms * (1 + 1e-9):
                    result = dataclasses.replace(
                        result, placement=spread, predicted=same
                    )
        result = self.costs.predict(space.task, result, const_ms)
        log.records.append(SearchRecord(space.task, result))
        plans = [space.placed(result.placement, apart=apart) for apart in (False, True)]
        return min(
            plans, key=lambda plan: self.costs.placed(plan).predicted.expected_ms
        )

    def _space(
        self,
        ways: Ways,
        tables: Sequence[Sequence[int]],
        places: Sequence[int],
        memory: Sequence[Storage],
        rules: PlacementRules,
    ) -> SearchSpace:
        """Return the search space; a proposal's later searches only change memory."""
        peak = self._memory and self._memory.peak
        key = ways, tables, places, rules, peak
        if self._last_space is not None and not rules.together:
            known, space = self._last_space
            if known == key:
                return space.with_memory(memory)
        space = SearchSpace.of(
            ways,
            tables,
            reader=self.costs.reader,
            enumerator=self._enumerator,
            memory=memory,
            rules=rules,
            least_columns=self.costs.least_columns,
            places=places,
        )
        self._last_space = key, space
        return space

    def _explained(self, message: str, memory: Sequence[Storage]) -> str:
        """Add to a message how much memory ranks have left before the search.

        A message about host memory stays as it is.
        """
        tier = device_tier(self._topology)
        whole = max(getattr(d.storage, tier) for d in self._topology.devices)
        left = max(getattr(m, tier) for m in memory)
        if format_bytes(left) == format_bytes(whole) or message.startswith(HOST):
            return message
        return (
            f"{message.rstrip('.')}. Of a rank's {format_bytes(whole)}, the storage "
            "reservation, the outputs for its own samples and tables that the search "
            f"does not place leave {format_bytes(max(0, left))}."
        )


def may_mix(ways: Ways, tables: Sequence[Sequence[int]]) -> set[str]:
    """Return the paths of modules whose tables may be replicated, or not."""
    rows = [row for own in tables for row in own]
    kinds = [ways.kinds[k] for k in np.unique(ways.kind_R[rows]).tolist()]
    replicated = {option.path for option in kinds if is_dense(option)}
    return replicated & {option.path for option in kinds if not is_dense(option)}


def _unsearched_options(
    option: ShardingOption, searched_paths: Collection[str]
) -> list[ShardingOption]:
    """Return the options to choose from for a table that the search does not place.

    The search chooses the widths of a module's sequence tables, which must agree. So
    its other sequence tables are not split into columns.
    """
    first, *others = FreeOption.ways_of(option)
    must_be_whole = not is_pooled(first) and first.path in searched_paths
    kept = [o for o in others if not must_be_whole or o.sharding_type != COLUMN_WISE]
    return [first, *kept]


def _without_ranks(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Return copies of options whose shards have no ranks yet."""
    copies = option_copies(options)
    for option in copies:
        for shard in option.shards:
            shard.rank = None
    return copies
