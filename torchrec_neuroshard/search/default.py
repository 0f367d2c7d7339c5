"""The default search: ways to shard, placements, local improvement, bound if asked."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Self

import numpy as np

from torchrec_neuroshard.costs.simulator import Simulator, placed_arrays
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.models.base import CommsModel, CostModel, RangeWarning
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.progress import phase, shown
from torchrec_neuroshard.search.base import (
    BudgetedSearcher,
    SearchConfig,
    SearchResult,
)
from torchrec_neuroshard.search.bounds import Bound, lower_bound
from torchrec_neuroshard.search.choices import Choices
from torchrec_neuroshard.search.construct import Draft, construct, placed, starts
from torchrec_neuroshard.search.descent import Effort, improve
from torchrec_neuroshard.search.feasibility import (
    PACK_SECONDS,
    check_memory,
    pack,
)
from torchrec_neuroshard.search.lanes import Lanes
from torchrec_neuroshard.search.rules import check_constraints, follow
from torchrec_neuroshard.search.shards import Ints, ShardBank, placement_from_widths

__all__ = [
    "NeuroShardSearcher",
    "finish_result",
    "range_note",
    "range_notes",
    "telling",
]

CHOICE_SHARE = 0.25
"""Share of the time for choices of ways on balanced ranks."""
MAX_REPAIRS = 8
"""Times that a choice which does not fit is changed to one that takes less."""
LEAST_PACK_SECONDS = 0.5
"""Time for exact packing where greedy placing has used up the budget."""
BOUND_SHARE = 0.2
"""Time for a quick bound, relative to the search before it."""
MAX_WARNINGS = 20
"""Range warnings told one by one; the rest are counted."""


@contextlib.contextmanager
def telling(
    observer: Callable[[float], None] | None,
) -> Iterator[Callable[[float], None]]:
    """Pass shorter critical paths [ms] on to an observer, or to a terminal's line."""
    best_ms = math.inf
    with contextlib.ExitStack() as stack:
        if observer is None and sys.stderr.isatty():
            stack.enter_context(shown())
            line = stack.enter_context(phase("planning"))

            def observer(ms: float) -> None:
                line.text = f"planning, best {ms:.3f} ms"

        def tell(ms: float) -> None:
            nonlocal best_ms
            if ms < best_ms and observer is not None:
                best_ms = ms
                observer(ms)

        yield tell


class NeuroShardSearcher(BudgetedSearcher[SearchConfig]):
    """Places tables greedily in many lanes at once, then improves the best of them.

    Where tables may be sharded in several ways, choices are made first on balanced
    ranks (see `choices`) and changed by the same improvement.
    """

    name = "default"
    takes_choices = True

    def __init__(self, config: SearchConfig | None = None) -> None:
        """Take the settings; None means the defaults."""
        super().__init__(config or SearchConfig())

    def with_budget(self, seconds: float, effort: float = 1.0) -> Self:
        """See `Searcher.with_budget`; without effort, tables are placed, no more."""
        other = super().with_budget(seconds)
        less = other.config.effort * max(0.0, effort)
        other.config = dataclasses.replace(other.config, effort=less)
        return other

    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        """Find a placement.

        Raises:
            InfeasibleError: The tables cannot fit or be where the rules on ranks want
                them; names the table or the total, and what would make it fit.
            ConfigError: Rules on ranks contradict each other.
        """
        simulator, start = Simulator(task, cost_model, comms_model), time.monotonic()
        deadline = start + self.config.time_budget_seconds
        check_constraints(task)
        check_memory(task)
        bank = ShardBank(simulator, merge=True)
        with telling(self.config.progress) as tell:
            effort = Effort(deadline, tell)
            lanes = self._placed(bank, deadline)
            effort.see(lanes)
            if self.config.effort > 0:
                improve(lanes, self.config, effort)
        best, best_ms = effort.best_TW, effort.best_ms
        bound = self._bound(bank, best, best_ms, start, deadline)
        return finish_result(bank, best, bound, start)

    def _placed(self, bank: ShardBank, deadline: float) -> Lanes:
        """Return placements of all tables, the best first.

        Raises:
            InfeasibleError: None was found.
        """
        now = time.monotonic()
        ways = [np.flatnonzero(bank.leads_T)]
        choices = Choices(bank) if bank.task.has_choices else None
        if choices is not None:
            ways = choices.starts(now + CHOICE_SHARE * (deadline - now))
        lines = starts(bank, ways)
        drafts = [construct(bank, *lines)]
        good = {w.tobytes() for w in lines[0][drafts[0].fits_L]}
        lost = [w for w in ways if w.tobytes() not in good]
        if lost:
            drafts.append(construct(bank, *starts(bank, lost), by_size=True))
        if choices is not None and not any(d.fits_L.any() for d in drafts):
            drafts = [self._tighter(bank, choices, ways)]
        if any(d.fits_L.any() for d in drafts):
            lanes = placed(bank, drafts)
            return lanes.take(_by_choice(lanes))
        left = max(deadline - time.monotonic(), LEAST_PACK_SECONDS)
        return Lanes.of(bank, [pack(bank.task, min(left, PACK_SECONDS))])

    @staticmethod
    def _tighter(bank: ShardBank, choices: Choices, ways: list[Ints]) -> Draft:
        """Take ways that need less and less memory."""
        for first in (*ways, choices.smallest()):
            chosen = first
            for repair in range(MAX_REPAIRS):
                draft = construct(bank, *starts(bank, [chosen]), by_size=True)
                if draft.fits_L.any():
                    return draft
                following = choices.smaller(chosen, 2**repair)
                if (following == chosen).all():
                    break
                chosen = following
        return draft

    def _bound(
        self,
        bank: ShardBank,
        width_TW: Ints,
        best_ms: float,
        start: float,
        deadline: float,
    ) -> Bound:
        """Bound the task with each table for itself, if that is asked for."""
        if self.config.bound == "none":
            return Bound(0.0, False)
        now = time.monotonic()
        if self.config.bound == "quick":
            deadline = min(deadline, now + BOUND_SHARE * (now - start))
        task, each, plan_TW = bank.simulator.task, bank, width_TW
        if task.together:
            each = ShardBank(bank.simulator)
            plan_TW = follow(task, width_TW.copy())
        quick = self.config.bound == "quick"
        bound = lower_bound(each, plan_TW, best_ms, deadline=deadline, quick=quick)
        if each is not bank:
            bank.num_evaluated += each.num_evaluated
        return bound


def _by_choice(lanes: Lanes) -> Ints:
    """Return lanes in order: the best of each choice of ways, then the second ones."""
    _, choice_L = np.unique(lanes.pieces_LT > 0, axis=0, return_inverse=True)
    order = np.lexsort((lanes.score_L, choice_L.reshape(-1)))
    first = np.flatnonzero(np.diff(choice_L.reshape(-1)[order], prepend=-1))
    sizes = np.diff(first, append=len(order))
    nth = np.arange(len(order)) - np.repeat(first, sizes)
    lane_order: Ints = order[np.lexsort((lanes.score_L[order], nth))]
    return lane_order


def finish_result(
    bank: ShardBank, width_TW: Ints, bound: Bound, start: float
) -> SearchResult:
    """Evaluate and check the placement found, and fill the result.

    Args:
        bank: The task's shards.
        width_TW: Columns of each table, followers (see `rules`) aside, on each rank.
        bound: Lower bound of the critical path.
        start: `time.monotonic()` when the search began.
    """
    task = bank.simulator.task
    placement = placement_from_widths(follow(task, width_TW.copy()), task)
    placement.check(task)
    predicted = bank.simulator.evaluate(placement)
    bound_ms = min(bound.ms, predicted.critical_path_ms)
    gap = predicted.critical_path_ms / bound_ms - 1 if bound_ms > 0 else math.inf
    return SearchResult(
        placement=placement,
        predicted=predicted,
        lower_bound_ms=bound_ms,
        bound_is_proven=bound.is_proven,
        gap=gap,
        search_seconds=time.monotonic() - start,
        num_evaluated=bank.num_evaluated + bank.task.world_size,
        notes=range_notes(bank.simulator, placement),
    )


def range_notes(simulator: Simulator, placement: Placement) -> tuple[Note, ...]:
    """Say which placed shards lie outside the cost model's training range."""
    arrays = np.stack(placed_arrays(placement))[[0, 1, 3]]
    table_N, width_N, rows_N = np.unique(arrays, axis=1)
    features = simulator.shard_features(table_N, width_N, rows_N)
    found: dict[tuple[int, str], Note] = {}
    for warning in simulator.cost_model.range_warnings(features):
        index = int(table_N[warning.shard])
        note = range_note(simulator.task.tables[index].name, warning)
        found.setdefault((index, warning.feature), note)
    notes = list(found.values())
    if len(notes) > MAX_WARNINGS:
        text = f"... and {len(notes) - MAX_WARNINGS} more like these"
        notes[MAX_WARNINGS:] = [Note("out-of-range", text)]
    return tuple(notes)


def range_note(table: str, warning: RangeWarning) -> Note:
    """Say which feature of a table's shard is outside the training range."""
    text = (
        f"table '{table}': {warning.feature} {warning.value:.4g} is outside the cost "
        f"model's range {warning.low:.4g} to {warning.high:.4g}"
    )
    return Note("out-of-range", text, table)
