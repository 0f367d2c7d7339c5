"""The default search: ways to shard, column splits, ranks, local improvement, bound."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.progress import phase, shown
from torchrec_neuroshard.search.base import (
    BudgetedSearcher,
    SearchConfig,
    SearchResult,
)
from torchrec_neuroshard.search.beam import beam_search
from torchrec_neuroshard.search.bounds import Bound, lower_bound
from torchrec_neuroshard.search.choices import (
    MIN_GAIN,
    Choices,
    column_task,
    columns_of,
    memory_left,
    place_blocks,
)
from torchrec_neuroshard.search.exhaustive import ExhaustiveSearcher, count_placements
from torchrec_neuroshard.search.feasibility import (
    PACK_SECONDS,
    check_memory,
    pack,
    pack_exactly,
)
from torchrec_neuroshard.search.refine import Plan, refine
from torchrec_neuroshard.search.rules import check_constraints, follow, merged
from torchrec_neuroshard.search.shards import Ints, ShardBank, placement_from_widths
from torchrec_neuroshard.simulator import Simulator, placed_arrays

__all__ = ["NeuroShardSearcher", "finish_result", "range_messages", "telling"]

BOUND_SHARE = 0.2
"""Share of the time budget that is left for the bound, beside what is not needed."""
CHOICE_SHARE = 0.25
"""Share of the time for choices of ways on balanced ranks."""
LEAST_PACK_SECONDS = 0.5
"""What exact packing gets where greedy placing found no room in all of the time."""
MAX_CHOICES, MORE_CHOICES = 4, 4
"""Choices of ways that are placed, of those found on balanced ranks; and how many more
where caches of many sizes are among the ways."""
LEAST_CHOICES, CHOSEN_TABLES = 2, 4000
"""Of many tables fewer choices, at least so many and no more tables together: improving
one gains more than placing the next."""
MAX_TRIED_CHOICES = 3000
"""Placements of tables with several ways that are all tried."""
MAX_REPAIRS = 8
"""Times that a choice which does not fit is changed to one that takes less."""
MAX_RELIEFS, MAX_RELIEVING, RELIEVED_TABLES = 4, 12, 1500
"""Times that tables which hold up ranks are sharded in another way, choices that are
placed for it, and the tables that these have together."""
NUM_RELIEVED = 2
"""Plans, the best after the first time, of which it is done again."""
QUICK_CAPS = (1.1, float("inf"))
"""Caps with which these are placed."""
MAX_REFINED_TABLES = 250
"""Tables that, all in column shards, are first improved as such."""
MAX_CELLS = 2**28
"""Ways times ranks of all plans that are kept while choices are tried."""
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


def _other(simulator: Simulator, task: ShardingTask) -> Simulator:
    """Return the simulator of another task with the same encodings."""
    return Simulator(
        task, simulator.cost_model, simulator.comms_model, simulator.encoder
    )


class NeuroShardSearcher(BudgetedSearcher[SearchConfig]):
    """Column splits by beam search, ranks by greedy grids, then local improvement.

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
        less: dict[str, Any] = {"effort": other.config.effort * effort}
        if effort <= 0:
            less = {"beam_width": 1, "num_candidates": 1}
            less |= {"refine": False, "exhaustive_limit": 0}
        other.config = dataclasses.replace(other.config, **less)
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
        with telling(self.config.progress) as tell:
            result = self._search(simulator, deadline, tell)
        seconds = time.monotonic() - start
        return dataclasses.replace(result, search_seconds=seconds)

    def _search(
        self, simulator: Simulator, deadline: float, tell: Callable[[float], None]
    ) -> SearchResult:
        task, start = simulator.task, time.monotonic()
        check_constraints(task)
        limit = self.config.exhaustive_limit
        check_memory(merged(task))
        if task.has_choices:
            limit = min(limit, MAX_TRIED_CHOICES)
        # One rank has one placement of columns, but as many sets of shards as others.
        several = task.world_size > 1 or task.has_choices
        if several and count_placements(task) <= limit:
            result = ExhaustiveSearcher().search(
                task, simulator.cost_model, simulator.comms_model
            )
            warnings = range_messages(simulator, result.placement)
            return dataclasses.replace(result, warnings=warnings)
        bank = ShardBank(simulator, merge=True)
        best, bound = self._plan(bank, deadline, tell)
        return finish_result(bank, best, bound, start)

    def _plan(
        self, bank: ShardBank, deadline: float, tell: Callable[[float], None]
    ) -> tuple[Ints, Bound]:
        """Find the widths of a placement and a lower bound."""
        config = self.config
        # The bound is part of the search: some of the time is kept for it.
        refining = deadline - BOUND_SHARE * config.time_budget_seconds
        choices = Choices(bank) if bank.task.has_choices else None
        if choices is not None:
            plans = self._choose(bank, choices, refining)
        else:
            plans = self._split(bank, config, refining)
            if bank.has_order:
                plans += self._whole(bank, refining)
        best = plans[0]
        if config.refine:
            best, _ = refine(bank, plans, config, refining, tell, choices)
        best_ms = Plan(bank, best).critical_ms
        tell(best_ms)
        return best, self._bound(bank, [best, *plans], best_ms, deadline)

    @staticmethod
    def _split(bank: ShardBank, config: SearchConfig, deadline: float) -> list[Ints]:
        """Place tables that all lie in column shards: widths, the best first."""
        plans = beam_search(bank, config, deadline)
        left = max(deadline - time.monotonic(), LEAST_PACK_SECONDS)
        return plans or [pack(bank.task, min(left, PACK_SECONDS))]

    def _whole(self, bank: ShardBank, deadline: float) -> list[Ints]:
        """The same without splits, after which no outputs need be put in order.

        Empty where the tables fit no rank whole.
        """
        task = bank.simulator.task
        whole_task = dataclasses.replace(task, max_shards=(1,) * len(task.tables))
        whole = ShardBank(_other(bank.simulator, whole_task), merge=True)
        config = dataclasses.replace(self.config, max_rounds=0)
        try:
            check_memory(whole.task)
            return self._split(whole, config, deadline)[:1]
        except InfeasibleError:
            return []

    def _choose(self, bank: ShardBank, choices: Choices, deadline: float) -> list[Ints]:
        """Place tables that may be sharded in several ways: widths, the best first.

        Raises:
            InfeasibleError: None of the choices tried fits.
        """
        found: list[tuple[float, int, Ints]] = []
        numbers = itertools.count()  # so that plans are never compared by widths
        problem: InfeasibleError | None = None
        now = time.monotonic()
        most = min(
            MAX_CHOICES + MORE_CHOICES * choices.has_caches,
            max(LEAST_CHOICES, CHOSEN_TABLES // len(bank.task.ways)),
        )
        until = now + CHOICE_SHARE * (deadline - now)
        promising = choices.best(most, until)
        blocks: list[Ints] = []
        if len(bank.task.ways) <= MAX_REFINED_TABLES and bank.moves_T.any():
            # No worse than without column shards, which even ranks make look good.
            blocks = Choices(bank, blocks_only=True).best(MAX_CHOICES, until)
        for number, chosen in enumerate((*promising, *blocks, choices.smallest())):
            if found and (time.monotonic() > deadline or number >= most + len(blocks)):
                break
            for repair in range(MAX_REPAIRS):
                try:
                    plans = self._place(bank, chosen, self.config, deadline)
                except InfeasibleError as error:
                    problem = problem or error
                    following = choices.smaller(chosen, 2**repair)
                    if (following == chosen).all():
                        break
                    chosen = following
                    continue
                for width_TW in plans:
                    cost_ms = Plan(bank, width_TW).critical_ms
                    found.append((cost_ms, next(numbers), width_TW))
                found = sorted(found)[: max(1, MAX_CELLS // found[0][2].size)]
                break
        if not found:
            assert problem is not None, "some choice was tried"
            left = max(deadline - time.monotonic(), LEAST_PACK_SECONDS)
            packed, _ = pack_exactly(bank.task, min(left, PACK_SECONDS))
            if packed is None:
                raise problem
            found.append((Plan(bank, packed).critical_ms, next(numbers), packed))
        # The best plan of each choice.
        starts = {choices.of(f[2]).tobytes(): f for f in sorted(found)[::-1]}
        near = list(starts.values())
        for most_steps in (1, MAX_RELIEFS - 1):
            best_ms = min(found)[0]
            relieved: list[tuple[float, int, Ints]] = []
            for start_ms, _, width_TW in near:
                better = self._relieve(
                    bank, choices, width_TW, start_ms, best_ms, most_steps, deadline
                )
                relieved += [(ms, next(numbers), w) for ms, w in better]
            found += relieved
            near = sorted(relieved)[:NUM_RELIEVED]
        return [width_TW for *_, width_TW in sorted(found)]

    def _relieve(
        self,
        bank: ShardBank,
        choices: Choices,
        width_TW: Ints,
        now_ms: float,
        best_ms: float,
        most_steps: int,
        deadline: float,
    ) -> list[tuple[float, Ints]]:
        """Shard tables that hold up ranks in another way as long as that pays.

        Args:
            bank: The task's shards.
            choices: Their ways.
            width_TW: The plan to begin with.
            now_ms: Its critical path.
            best_ms: Of the best plan. Choices that even balanced ranks take as long
                for are not placed.
            most_steps: How often.
            deadline: `time.monotonic()` after which no choice is placed.

        Returns:
            The best plan of each step, its critical path [ms] and its widths.
        """
        config = dataclasses.replace(self.config, max_rounds=0, caps=QUICK_CAPS)
        most = min(MAX_RELIEVING, max(2, RELIEVED_TABLES // len(choices.ways)))
        now_N = choices.of(width_TW)
        found: list[tuple[float, Ints]] = []
        while len(found) < most_steps:
            step: list[tuple[float, int, Ints, Ints]] = []
            for chosen in choices.relieving(now_N, most, best_ms):
                if time.monotonic() > deadline:
                    break
                with contextlib.suppress(InfeasibleError):
                    for width_TW in self._place(bank, chosen, config, deadline):
                        cost_ms = Plan(bank, width_TW).critical_ms
                        step.append((cost_ms, len(step), width_TW, chosen))
            if not step or min(step)[0] >= now_ms * (1 - MIN_GAIN):
                break
            now_ms, _, width_TW, now_N = min(step)
            found.append((now_ms, width_TW))
        return found

    def _place(
        self,
        bank: ShardBank,
        chosen_N: Ints,
        config: SearchConfig,
        deadline: float,
    ) -> list[Ints]:
        """Place tables of which the way to be sharded is chosen.

        Raises:
            InfeasibleError: They do not fit.
        """
        width_TW = place_blocks(bank, chosen_N)
        tables = columns_of(bank, chosen_N)
        if not tables:
            return [width_TW]
        free_MW = memory_left(bank, width_TW)
        task = column_task(bank.simulator.task, tables, free_MW, width_TW)
        part = ShardBank(_other(bank.simulator, task), merge=True)
        plans = self._split(part, config, deadline)
        if part.has_order and config.max_rounds:
            plans += self._whole(part, deadline)
        if config.refine and config.max_rounds and not width_TW.any():
            # No worse than if column shards alone were allowed.
            if len(tables) <= MAX_REFINED_TABLES:
                plans = [refine(part, plans, config, deadline)[0], *plans]
        found = []
        for part_TW in plans:
            found.append(width_TW.copy())
            found[-1][tables] = part_TW
        return found

    def _bound(
        self,
        bank: ShardBank,
        plans: Sequence[Ints],
        best_ms: float,
        deadline: float,
    ) -> Bound:
        """Bound the task with each table for itself."""
        task, each = bank.simulator.task, bank
        if task.together:
            each = ShardBank(bank.simulator)
            plans = [follow(task, p.copy()) for p in plans]
        bound = lower_bound(
            each, plans, best_ms, seed=self.config.seed, deadline=deadline
        )
        if each is not bank:
            bank.num_evaluated += each.num_evaluated
        return bound


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
        warnings=range_messages(bank.simulator, placement),
    )


def range_messages(simulator: Simulator, placement: Placement) -> tuple[str, ...]:
    """Say which placed shards lie outside the cost model's training range."""
    arrays = np.stack(placed_arrays(placement))[[0, 1, 3]]
    table_N, width_N, rows_N = np.unique(arrays, axis=1)
    features = simulator.shard_features(table_N, width_N, rows_N)
    found: dict[tuple[int, str], str] = {}
    for warning in simulator.cost_model.range_warnings(features):
        index = int(table_N[warning.shard])
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
