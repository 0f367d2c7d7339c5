"""The default search: beam over splits, greedy ranks, local improvement, bound."""

from __future__ import annotations

import dataclasses
import time

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.search.base import SearchConfig, Searcher, SearchResult
from torchrec_neuroshard.search.beam import beam_search
from torchrec_neuroshard.search.bounds import lower_bound
from torchrec_neuroshard.search.exhaustive import ExhaustiveSearcher, count_placements
from torchrec_neuroshard.search.feasibility import check_memory, pack
from torchrec_neuroshard.search.refine import refine
from torchrec_neuroshard.search.shards import Ints, ShardBank, placement_from_widths
from torchrec_neuroshard.simulator import Simulator

__all__ = ["NeuroShardSearcher", "finish_result", "range_messages"]

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
            InfeasibleError: The tables cannot fit; names the table or the total, and
                what would make it fit.
        """
        start = time.monotonic()
        deadline = start + self.config.time_budget_seconds
        check_memory(task)
        simulator = Simulator(task, cost_model, comms_model)
        if count_placements(task) <= self.config.exhaustive_limit:
            result = ExhaustiveSearcher().search(task, cost_model, comms_model)
            return dataclasses.replace(
                result,
                warnings=range_messages(simulator, result.placement),
                search_seconds=time.monotonic() - start,
            )
        bank = ShardBank(simulator)
        plans = [p.widths for p in beam_search(bank, self.config, deadline)]
        if not plans:
            plans = [pack(task)]
        best = plans[0]
        if self.config.refine:
            best, _ = refine(bank, plans, self.config, deadline)
        bound = lower_bound(bank, [best, *plans], self.config.seed)
        return finish_result(bank, best, bound, start)


def finish_result(
    bank: ShardBank, width_TW: Ints, bound_ms: float, start: float
) -> SearchResult:
    """Evaluate and check the placement found, and fill the result.

    Args:
        bank: The task's shards.
        width_TW: Columns of each table on each rank.
        bound_ms: Lower bound of the critical path.
        start: `time.monotonic()` when the search began.
    """
    placement = placement_from_widths(width_TW)
    placement.check(bank.task)
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
