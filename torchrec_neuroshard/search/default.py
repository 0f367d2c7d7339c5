"""The default search: beam over splits, greedy ranks, local improvement, bound."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.search.base import SearchConfig, Searcher, SearchResult
from torchrec_neuroshard.search.beam import beam_search
from torchrec_neuroshard.search.bounds import NUM_ROUNDS, lower_bound
from torchrec_neuroshard.search.exhaustive import ExhaustiveSearcher, count_placements
from torchrec_neuroshard.search.feasibility import check_memory, pack
from torchrec_neuroshard.search.progress import Watch
from torchrec_neuroshard.search.refine import Plan, refine
from torchrec_neuroshard.search.rules import check_constraints, follow, merged
from torchrec_neuroshard.search.shards import Ints, ShardBank, placement_from_widths
from torchrec_neuroshard.simulator import Simulator

__all__ = ["NeuroShardSearcher", "finish_result", "range_messages"]

BOUND_SHARE = 0.2
"""Share of the time budget that is left for the bound."""
MAX_WARNINGS = 20
"""Range warnings told one by one; the rest are counted."""


class NeuroShardSearcher(Searcher):
    """Column splits by beam search, ranks by greedy grids, then local improvement."""

    name = "default"

    def __init__(self, config: SearchConfig | None = None) -> None:
        """Take the settings; None means the defaults."""
        self.config = config or SearchConfig()

    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        """Find a placement.

        Raises:
            InfeasibleError: The tables cannot fit or be where the rules on ranks want
                them; names the table or the total, and what would make it fit.
            ConfigError: Rules on ranks contradict each other.
        """
        start = time.monotonic()
        deadline = start + self.config.time_budget_seconds
        watch = Watch(self.config.progress, start, deadline)
        simulator = Simulator(task, cost_model, comms_model)
        try:
            result = self._search(simulator, deadline, watch)
            if simulator.column_order_costs(result.placement).any():
                result = self._or_whole(result, simulator, deadline, watch)
            return dataclasses.replace(result, search_seconds=time.monotonic() - start)
        finally:
            watch.report("done")

    def _search(
        self, simulator: Simulator, deadline: float, watch: Watch, bounded: bool = True
    ) -> SearchResult:
        task, start = simulator.task, time.monotonic()
        check_constraints(task)
        check_memory(merged(task))
        # One rank has one placement, but as many sets of shards as all the others.
        few = count_placements(task) <= self.config.exhaustive_limit
        if few and task.world_size > 1:
            result = ExhaustiveSearcher().search(
                task, simulator.cost_model, simulator.comms_model
            )
            warnings = range_messages(simulator, result.placement)
            return dataclasses.replace(result, warnings=warnings)
        bank = ShardBank(simulator, merge=True)
        best, bound = self._plan(bank, deadline, watch, bounded)
        return finish_result(bank, best, bound, start)

    def _or_whole(
        self,
        split: SearchResult,
        simulator: Simulator,
        deadline: float,
        watch: Watch,
    ) -> SearchResult:
        """Return the better of a placement with splits and the best one without.

        Putting the outputs of split tables in order costs the same however many are
        split; so it has no part in the search among placements with splits.
        """
        task = simulator.task
        whole_task = dataclasses.replace(task, max_shards=(1,) * len(task.tables))
        whole_simulator = simulator.for_task(whole_task)
        try:
            whole = self._search(whole_simulator, deadline, watch, bounded=False)
        except InfeasibleError:
            return split
        bound = min(split.lower_bound_ms, whole.predicted.critical_path_ms)
        better = min(split, whole, key=lambda r: r.predicted.critical_path_ms)
        cost = better.predicted.critical_path_ms
        return dataclasses.replace(
            better,
            lower_bound_ms=bound,
            gap=cost / bound - 1 if bound > 0 else 0.0,
            num_evaluated=split.num_evaluated + whole.num_evaluated,
        )

    def _plan(
        self, bank: ShardBank, deadline: float, watch: Watch, bounded: bool
    ) -> tuple[Ints, float]:
        """Find the widths of a placement and a lower bound, 0 if not wanted [ms]."""
        config = self.config
        # The bound is part of the search: some of the time is kept for it.
        refining = deadline - BOUND_SHARE * config.time_budget_seconds
        plans = [p.widths for p in beam_search(bank, config, refining, watch)]
        if not plans:
            plans = [pack(bank.task)]
        if watch.observer is not None and bounded:
            first_ms = Plan(bank, plans[0]).critical_ms
            watch.bound(self._bound(bank, plans, first_ms, deadline, rounds=0))
        best = plans[0]
        if config.refine:
            best, _ = refine(bank, plans, config, refining, watch)
        if not bounded:
            return best, 0.0
        best_ms = Plan(bank, best).critical_ms
        watch.report("bounding", best_ms=best_ms)
        return best, self._bound(bank, [best, *plans], best_ms, deadline)

    def _bound(
        self,
        bank: ShardBank,
        plans: Sequence[Ints],
        best_ms: float,
        deadline: float,
        rounds: int = NUM_ROUNDS,
    ) -> float:
        """Bound the task with each table for itself."""
        task, each = bank.simulator.task, bank
        if task.together:
            each = ShardBank(bank.simulator)
            plans = [follow(task, p.copy()) for p in plans]
        bound = lower_bound(
            each,
            plans,
            best_ms,
            seed=self.config.seed,
            deadline=deadline,
            rounds=rounds,
        )
        if each is not bank:
            bank.num_evaluated += each.num_evaluated
        return bound


def finish_result(
    bank: ShardBank, width_TW: Ints, bound_ms: float, start: float
) -> SearchResult:
    """Evaluate and check the placement found, and fill the result.

    Args:
        bank: The task's shards.
        width_TW: Columns of each table, followers (see `rules`) aside, on each rank.
        bound_ms: Lower bound of the critical path.
        start: `time.monotonic()` when the search began.
    """
    task = bank.simulator.task
    placement = placement_from_widths(follow(task, width_TW.copy()))
    placement.check(task)
    predicted = bank.simulator.evaluate(placement)
    bound = min(bound_ms, predicted.critical_path_ms)
    gap = predicted.critical_path_ms / bound - 1 if bound > 0 else 0.0
    return SearchResult(
        placement=placement,
        predicted=predicted,
        lower_bound_ms=bound,
        gap=gap,
        search_seconds=time.monotonic() - start,
        num_evaluated=bank.num_evaluated + bank.task.world_size,
        warnings=range_messages(bank.simulator, placement),
    )


def range_messages(simulator: Simulator, placement: Placement) -> tuple[str, ...]:
    """Say which placed shards lie outside the cost model's training range."""
    pairs = sorted({(s.table, s.width) for s in placement.shards})
    found: dict[tuple[int, str], str] = {}
    for warning in simulator.cost_model.range_warnings(simulator.features(pairs)):
        index = pairs[warning.shard][0]
        found.setdefault(
            (index, warning.feature),
            f"table '{simulator.task.tables[index].name}': {warning.feature} "
            f"{warning.value:.4g} is outside the cost model's range "
            f"{warning.low:.4g} to {warning.high:.4g}",
        )
    messages = list(found.values())
    if len(messages) > MAX_WARNINGS:
        more = len(messages) - MAX_WARNINGS
        messages = [*messages[:MAX_WARNINGS], f"... and {more} more like these"]
    return tuple(messages)
