"""The default search, from a sharding task to a placement.

1. `choices` picks the way (sharding type and kernel) of each table on balanced ranks.
2. `construct` places the tables greedily, in many variants (lanes) at once. The best
   ones are placed again with the wide tables on fewer ranks.
3. `descent` improves the lanes by local search and restarts.
4. Where lengths of samples differ, the good placement with the shortest expected
   iteration is taken.
5. `bounds` computes a lower bound if one was asked for and the models have one.

If greedy placement finds no room, an integer program packs the tables (`feasibility`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Self

import numpy as np

from torchrec_neuroshard.costs.lengths import lengths_differ
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.progress import phase, shown
from torchrec_neuroshard.search.base import (
    SEARCHES,
    BudgetedSearcher,
    SearchConfig,
    Searcher,
    SearchResult,
)
from torchrec_neuroshard.search.bounds import lower_bound
from torchrec_neuroshard.search.choices import Choices
from torchrec_neuroshard.search.construct import (
    Draft,
    construct,
    gathered,
    placed,
    starts,
)
from torchrec_neuroshard.search.descent import (
    MOST_PHASES,
    NUM_STARTS,
    Effort,
    improve,
    in_order,
)
from torchrec_neuroshard.search.feasibility import (
    PACK_SECONDS,
    check_memory,
    pack,
)
from torchrec_neuroshard.search.lanes import Lanes, most_lanes
from torchrec_neuroshard.search.rules import check_constraints, follow
from torchrec_neuroshard.search.shards import Ints, ShardBank, placement_from_widths

CHOICE_SHARE = 0.25
"""Share of the budget for choosing ways on balanced ranks."""
MAX_REPAIRS = 8
"""Most times that a choice which does not fit is changed to use less memory."""
LEAST_PACK_SECONDS = 0.5
"""Time for exact packing if greedy placement has used up the budget."""


@contextlib.contextmanager
def telling(
    observer: Callable[[float], None] | None,
) -> Iterator[Callable[[float], None]]:
    """Yield a function that reports shorter critical paths [ms].

    They go to the observer or, without one, to a line of the terminal.
    """
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
    """The default search: chooses ways, places tables, improves placements.

    The module's docstring lists the steps.
    """

    name = "default"
    takes_choices = True

    def __init__(self, config: SearchConfig | None = None) -> None:
        """Take the settings; None means the defaults."""
        super().__init__(config or SearchConfig())

    def with_budget(self, seconds: float, effort: float = 1.0) -> Self:
        """See `Searcher.with_budget`; with effort 0, tables are only placed."""
        other = super().with_budget(seconds)
        less = other.config.effort * max(0.0, effort)
        other.config = dataclasses.replace(other.config, effort=less)
        return other

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Find a placement.

        Raises:
            InfeasibleError: The tables do not fit within memory and placement rules;
                names the table or the total, and the way out.
            ConfigError: Placement rules contradict each other.
        """
        start = time.monotonic()
        deadline = start + self.config.time_budget_seconds
        check_constraints(task)
        check_memory(task)
        bank = ShardBank(simulator, merge=True)
        with telling(self.config.progress) as tell:
            effort = Effort(deadline, tell, keeps_others=lengths_differ(simulator))
            lanes = self._placed(bank, effort)
            if self.config.effort > 0:
                improve(lanes, self.config, effort)
        bound_ms = self._bound(bank, deadline)
        return finish_result(bank, least_expected(bank, effort), bound_ms, start)

    def _placed(self, bank: ShardBank, effort: Effort) -> Lanes:
        """Return the most promising greedy placements of all tables, the best first.

        Args:
            bank: The task's shards.
            effort: The deadline; keeps the best placement.

        Raises:
            InfeasibleError: No placement was found.
        """
        now, deadline = time.monotonic(), effort.deadline
        ways = [np.flatnonzero(bank.leads_T)]
        choices = Choices(bank) if bank.task.has_choices else None
        if choices is not None:
            ways = choices.starts(now + CHOICE_SHARE * (deadline - now))
        drafts, good = self._drafts(bank, ways, effort)
        lost = [w for w in ways if w.tobytes() not in good]
        if lost and not (good and effort.is_over):
            drafts += self._drafts(bank, lost, effort, by_size=True)[0]
        if choices is not None and not any(d.fits_L.any() for d in drafts):
            drafts = [self._tighter(bank, choices, ways)]
        lanes = self._best(drafts, effort)
        again = None if lanes is None or effort.is_over else gathered(lanes)
        if again is not None:
            lanes = self._best([again], effort, lanes)
        if lanes is not None:
            return lanes
        left = max(deadline - time.monotonic(), LEAST_PACK_SECONDS)
        width_TW = pack(bank.simulator.task, min(left, PACK_SECONDS))
        width_TW[~bank.leads_T] = 0  # leaders stand for their followers
        lanes = Lanes.of(bank, [width_TW])
        effort.see(lanes)
        return lanes

    @staticmethod
    def _best(
        drafts: list[Draft], effort: Effort, lanes: Lanes | None = None
    ) -> Lanes | None:
        """Return the most promising of some lanes and of the finished lanes of drafts.

        Returns:
            None if there are no lanes and no draft has found room.
        """
        for block in itertools.chain.from_iterable(map(placed, drafts)):
            effort.see(block)
            both = block if lanes is None else Lanes.join([lanes, block])
            most = max(2, min(NUM_STARTS, most_lanes(block.bank)))
            lanes = both.take(of_every_kind(both, most))
            if effort.is_over:
                break
        return lanes

    @staticmethod
    def _drafts(
        bank: ShardBank, ways: list[Ints], effort: Effort, *, by_size: bool = False
    ) -> tuple[list[Draft], set[bytes]]:
        """Place tables in all starts of some choices; after the deadline, in fewer.

        Returns:
            The drafts, and the choices (as bytes) of which some start found room.
        """
        lines = starts(bank, ways)
        most = max(1, MOST_PHASES // (4 * bank.task.num_stages * bank.task.world_size))
        drafts: list[Draft] = []
        good: set[bytes] = set()
        for start in range(0, len(lines[0]), most):
            ways_LT, count_LT = (line[start : start + most] for line in lines)
            drafts.append(construct(bank, ways_LT, count_LT, by_size=by_size))
            good |= {w.tobytes() for w in ways_LT[drafts[-1].fits_L]}
            if good and effort.is_over:
                break
        return drafts, good

    @staticmethod
    def _tighter(bank: ShardBank, choices: Choices, ways: list[Ints]) -> Draft:
        """Switch to ways that need less memory until some placement fits."""
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

    def _bound(self, bank: ShardBank, deadline: float) -> float:
        """Compute the bound that the settings ask for [ms].

        Tables kept together are bounded one by one.
        """
        if self.config.bound == "none":
            return 0.0
        if self.config.bound == "quick":
            deadline = time.monotonic()
        each = ShardBank(bank.simulator) if bank.simulator.task.together else bank
        bound_ms = lower_bound(each, deadline)
        if each is not bank:
            bank.num_evaluated += each.num_evaluated
        return bound_ms


def least_expected(bank: ShardBank, effort: Effort) -> Ints:
    """Return the widths of the placement whose iteration is expected to be shortest.

    Without lengths that differ, that is the shortest critical path. With them, whole
    tables vary more than tables over all ranks, and replicas vary most.
    """
    if not effort.others:
        return effort.best_TW
    task = bank.simulator.task

    def expected_ms(width_TW: Ints) -> float:
        placement = placement_from_widths(follow(task, width_TW.copy()), task)
        return bank.simulator.evaluate(placement).expected_ms

    found = [effort.best_TW, *(width_TW for _, width_TW in effort.others.values())]
    return min(found, key=expected_ms)


def of_every_kind(lanes: Lanes, most: int) -> Ints:
    """Return the most promising lanes, the best first.

    Lanes whose tables are mostly in one stage (say, row-wise) tend to stay so. They may
    start worse than others and end better. So the best lane of each such stage is kept.

    Args:
        lanes: Placements.
        most: Number of lanes to keep.
    """
    member_TS = np.eye(lanes.bank.task.num_stages)[lanes.bank.stages_T]
    order = in_order(lanes.score_L)
    stage_L = ((lanes.pieces_LT[order] > 0) @ member_TS).argmax(axis=1)
    _, first = np.unique(stage_L, return_index=True)
    rest = np.setdiff1d(np.arange(len(order)), first)
    kept: Ints = order[np.sort(np.concatenate([np.sort(first), rest])[:most])]
    return kept


def finish_result(
    bank: ShardBank, width_TW: Ints, bound_ms: float, start: float
) -> SearchResult:
    """Check and evaluate the placement that was found, and return the result.

    Args:
        bank: The task's shards.
        width_TW: Columns of each table on each rank, without followers (see `rules`).
        bound_ms: Lower bound of the critical path; 0 without one.
        start: `time.monotonic()` when the search began.
    """
    task = bank.simulator.task
    placement = placement_from_widths(follow(task, width_TW.copy()), task)
    placement.check(task)
    predicted = bank.simulator.evaluate(placement)
    bound_ms = min(bound_ms, predicted.critical_path_ms)
    gap = predicted.critical_path_ms / bound_ms - 1 if bound_ms > 0 else math.inf
    return SearchResult(
        placement=placement,
        predicted=predicted,
        lower_bound_ms=bound_ms,
        bound_is_proven=bound_ms > 0,
        gap=gap,
        search_seconds=time.monotonic() - start,
        num_evaluated=bank.num_evaluated + bank.task.world_size,
    )


def make_searcher(search: str | SearchConfig | Searcher) -> Searcher:
    """Return the search for a name, for settings, or a given search itself.

    Raises:
        ConfigError: The name is unknown, or the search takes other arguments than
            `Searcher.search`.
    """
    if isinstance(search, Searcher):
        try:
            inspect.signature(search.search).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"search '{search.name}' takes other arguments than (task, simulator): "
                f"declare {type(search).__name__}.search(self, task, simulator). "
                "simulator.cost_model and simulator.comms_model are the models"
            ) from error
        return search
    if isinstance(search, SearchConfig):
        return NeuroShardSearcher(search)
    if search not in SEARCHES:
        raise ConfigError(
            f"unknown search '{search}'; one of {', '.join(sorted(SEARCHES))}, or pass "
            "a SearchConfig or a Searcher"
        )
    module, name = SEARCHES[search]
    package = __name__.partition(".")[0]
    made = getattr(importlib.import_module(f"{package}.{module}"), name)()
    assert isinstance(made, Searcher)
    return made
