"""Any search on tasks in which tables may be sharded in several ways."""

from __future__ import annotations

import math
import time

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search.base import Searcher, SearchResult
from torchrec_neuroshard.search.choices import (
    Choices,
    column_task,
    columns_of,
    memory_left,
    place_blocks,
)
from torchrec_neuroshard.search.default import MAX_REPAIRS
from torchrec_neuroshard.search.feasibility import pack
from torchrec_neuroshard.search.rules import follow, merged
from torchrec_neuroshard.search.shards import (
    Ints,
    ShardBank,
    placement_from_widths,
)
from torchrec_neuroshard.simulator import Simulator

__all__ = ["ChoosingSearcher"]

MAX_CHOICES = 4
"""Choices of ways that are placed."""


class ChoosingSearcher(Searcher):
    """Chooses how each table is sharded; leaves column shards to another search.

    The choice is made on balanced ranks (see `choices`), the cheapest that fits.
    """

    takes_choices = True

    def __init__(self, searcher: Searcher) -> None:
        """Take the search that places column shards."""
        self._searcher = searcher
        self.name = searcher.name

    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        """Find a placement.

        Raises:
            InfeasibleError: The tables cannot fit.
            ConfigError: See the search that places column shards.
        """
        start = time.monotonic()
        simulator = Simulator(task, cost_model, comms_model)
        bank = ShardBank(simulator, merge=True)
        choices = Choices(bank)
        width_TW, found = self._first_that_fits(bank, choices)
        placement = placement_from_widths(width_TW, task)
        placement.check(task)
        predicted = simulator.evaluate(placement)
        evaluated = bank.num_evaluated + (found.num_evaluated if found else 0)
        return SearchResult(
            placement=placement,
            predicted=predicted,
            lower_bound_ms=0.0,
            gap=math.inf,
            search_seconds=time.monotonic() - start,
            num_evaluated=evaluated,
            warnings=found.warnings if found else (),
            fallback=found.fallback if found else None,
        )

    def _first_that_fits(
        self, bank: ShardBank, choices: Choices
    ) -> tuple[Ints, SearchResult | None]:
        problem: InfeasibleError | None = None
        for first in (*choices.best(MAX_CHOICES, math.inf), choices.smallest()):
            chosen = first
            for repair in range(MAX_REPAIRS):
                try:
                    return self._place(bank, chosen)
                except InfeasibleError as error:
                    problem = problem or error
                    chosen = choices.smaller(chosen, 2**repair)
        assert problem is not None, "there is a choice"
        raise problem

    def _place(self, bank: ShardBank, chosen: Ints) -> tuple[Ints, SearchResult | None]:
        """Place the chosen ways: widths, and what the search found, if there was any.

        Raises:
            InfeasibleError: They do not fit.
        """
        width_TW = place_blocks(bank, chosen)
        tables = columns_of(bank, chosen)
        if not tables:
            return width_TW, None
        simulator = bank.simulator
        free_MW = memory_left(bank, width_TW)
        task = column_task(simulator.task, tables, free_MW, width_TW)
        found = self._searcher.search(task, simulator.cost_model, simulator.comms_model)
        placement = found.placement
        if task.host_memory_bytes:
            try:
                placement.check(task)
            except InfeasibleError:  # of which the search knows nothing
                packed = follow(task, pack(merged(task)))
                placement = placement_from_widths(packed, task)
        for shard in placement.shards:
            width_TW[tables[shard.table], shard.rank] += shard.width
        return width_TW, found
