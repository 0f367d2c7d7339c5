"""The interface of searches: `SearchConfig`, `SearchResult`, `Searcher`."""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from torchrec_neuroshard.costs.simulator import PredictedCosts, Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.errors import ConfigError, check_number
from torchrec_neuroshard.notes import Note

BOUNDS = ("none", "quick", "thorough")
"""Values of `SearchConfig.bound`."""
SEARCHES: Mapping[str, tuple[str, str]] = {
    "default": ("search.default", "NeuroShardSearcher"),
    "autoshard": ("papers.autoshard", "AutoShardSearcher"),
    "dreamshard": ("papers.dreamshard", "DreamShardSearcher"),
    "neuroshard": ("papers.neuroshard", "PaperSearcher"),
}
"""Name -> module in this package and class. They are imported on request,
since `papers` is a layer above this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig:
    """Settings of the default search: effort, time budget, bound and seed."""

    effort: float = 1.0
    """Factor on the number of placements that are improved side by side. More effort
    finds better plans, slowly. With 0, tables are placed and not improved."""
    restarts: int = 2
    """Rounds of restarts without a gain after which the search stops."""
    time_budget_seconds: float = 20.0
    """After this the best plan so far is returned."""
    bound: str = "none"
    """Whether to compute a lower bound on all plans: "none" does not; "quick" solves a
    simpler program for large tasks; "thorough" takes at most the rest of the budget.
    Costs of a measured machine have no bound (see `bounds`), whatever is asked for."""
    seed: int = 0
    """Seed of the restarts."""
    progress: Callable[[float], None] | None = None
    """Called with the critical path [ms] of the best plan whenever it gets shorter.
    With None, a terminal shows it."""

    def __post_init__(self) -> None:
        budget = self.time_budget_seconds
        check_number("time_budget_seconds", budget, above=True, finite=False)
        check_number("effort", self.effort)
        check_number("restarts", self.restarts, whole=True)
        check_number("seed", self.seed, whole=True)
        if not (self.progress is None or callable(self.progress)):
            raise ConfigError(f"progress must be a function, got {self.progress!r:.60}")
        if self.bound not in BOUNDS:
            raise ConfigError(
                f"bound must be one of {', '.join(BOUNDS)}, got '{self.bound}'"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """A placement with its predicted costs and a bound on them."""

    placement: Placement
    predicted: PredictedCosts
    lower_bound_ms: float
    """No placement should have a shorter critical path by this cost model; 0 if no
    bound was computed."""
    gap: float
    """`predicted.critical_path_ms / lower_bound_ms - 1`; infinite without a bound."""
    bound_is_proven: bool = False
    """Whether the bound is a proof, as the default search's always is. A search of your
    own may return an estimate."""
    search_seconds: float
    num_evaluated: int
    """Number of sets of shards that were priced."""
    notes: tuple[Note, ...] = ()
    """Remarks about the plan."""
    fallback: str | None = None
    """Why another planner made the plan; None if the search did."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The texts of the notes."""
        return tuple(note.text for note in self.notes)


class _Budgeted(Protocol):
    """Settings with a time budget; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def time_budget_seconds(self) -> float: ...


Config = TypeVar("Config", bound=_Budgeted)


class Searcher(ABC):
    """A search: finds a placement for a sharding task. Derive your own from it."""

    name: str = "unnamed"
    takes_choices: bool = False
    """Whether the search chooses sharding types and kernels itself
    (`ShardingTask.has_choices`). For other searches the planner chooses them."""

    @property
    def time_budget_seconds(self) -> float:
        """Seconds that a search may take; inf without a limit."""
        return math.inf

    def with_budget(self, seconds: float, effort: float = 1.0) -> Searcher:
        """Return the search with a smaller budget, for plans that need many searches.

        Args:
            seconds: Upper limit, in addition to its own budget.
            effort: Factor on its own effort; 0 is the least that finds a plan.

        Returns:
            By default the search itself, unchanged.
        """
        del seconds, effort
        return self

    @abstractmethod
    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        """Find a placement within the task's memory and placement rules.

        A search without support for placement rules must refuse a task that has some:
        see `rules.require_unconstrained`.

        Args:
            task: The sharding task.
            simulator: Predicts costs of the task's shards and placements. Its `task`
                is this task; it also has the cost model and the model of collectives.

        Raises:
            InfeasibleError: The tables do not fit; names the table or the total, and
                the way out.
            ConfigError: The search does not support the task's placement rules.
        """


class BudgetedSearcher(Searcher, Generic[Config]):
    """A search whose settings have a time budget.

    Args:
        config: The settings.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def time_budget_seconds(self) -> float:
        """See `Searcher.time_budget_seconds`."""
        return self.config.time_budget_seconds

    def with_budget(self, seconds: float, effort: float = 1.0) -> Self:
        """See `Searcher.with_budget`; ignores the effort."""
        del effort
        least = min(self.config.time_budget_seconds, seconds)
        other = copy.copy(self)
        other.config = dataclasses.replace(self.config, time_budget_seconds=least)
        return other
