"""The interface of searches: settings, results, `Searcher`."""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from torchrec_neuroshard.costs.simulator import PredictedCosts
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.notes import Note

__all__ = [
    "BudgetedSearcher",
    "Config",
    "SearchConfig",
    "SearchResult",
    "Searcher",
]

BOUNDS = ("none", "quick", "thorough")
"""How hard a search may try to bound its plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig:
    """Settings of the default search: effort, limits of time, seed."""

    effort: float = 1.0
    """Factor on the placements that are improved side by side: more find better plans,
    slowly. 0 places tables and improves nothing."""
    restarts: int = 2
    """Rounds of disturbed restarts without a gain after which it stops."""
    time_budget_seconds: float = 20.0
    """The best plan so far is returned after this."""
    bound: str = "none"
    """Lower bound of all plans: "none" is computed; "quick" takes about a fifth of
    the search's time; "thorough" what is left of the budget."""
    seed: int = 0
    progress: Callable[[float], None] | None = None
    """Is told the critical path of the best plan so far [ms] whenever it gets shorter.
    None: a terminal shows it."""

    def __post_init__(self) -> None:
        if not self.time_budget_seconds > 0:
            raise ConfigError(
                f"time_budget_seconds must be above 0, got {self.time_budget_seconds}"
            )
        if not self.effort >= 0 or self.restarts < 0:
            raise ConfigError(
                "effort and restarts must be at least 0, got "
                f"{self.effort} and {self.restarts}"
            )
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
    """No placement of the task should have a shorter critical path, by this model; 0
    where nothing is known."""
    gap: float
    """`predicted.critical_path_ms / lower_bound_ms - 1`; infinite where not known."""
    bound_is_proven: bool = False
    """Whether the bound is a proof. Otherwise it is an estimate: it rests on sets of
    shards that were looked for, and cheaper ones may have been missed."""
    search_seconds: float
    num_evaluated: int
    """Candidate rank sets whose cost was evaluated."""
    notes: tuple[Note, ...] = ()
    """What to know of it."""
    fallback: str | None = None
    """Why another planner's plan was taken, if it was."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The texts of its notes."""
        return tuple(note.text for note in self.notes)


class _Budgeted(Protocol):
    """Settings that say how long a search may take; a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def time_budget_seconds(self) -> float: ...


Config = TypeVar("Config", bound=_Budgeted)


class Searcher(ABC):
    """Finds a placement for a task."""

    name: str = "unnamed"
    takes_choices: bool = False
    """Whether tasks may have tables that are sharded in several ways, by rows, or
    replicated (`ShardingTask.has_choices`). The planner chooses for other searches."""

    @property
    def time_budget_seconds(self) -> float:
        """Seconds that a search may take; inf where it knows no limit."""
        return math.inf

    def with_budget(self, seconds: float, effort: float = 1.0) -> Searcher:
        """Return the search with less time and effort, for a plan of many searches.

        Args:
            seconds: It takes no longer than this, or than its own budget.
            effort: Relative to its own; 0 is the least with which it finds a plan.

        Returns:
            By default the search itself, which then takes what it takes.
        """
        del seconds, effort
        return self

    @abstractmethod
    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        """Find a placement that keeps to the task's limits and rules on ranks.

        A search that knows no such rules refuses a task that has some: see
        `rules.require_unconstrained`.

        Raises:
            InfeasibleError: The tables cannot fit; names the table or the total, and
                what would make it fit.
            ConfigError: The task has rules on ranks that the search does not know.
        """


class BudgetedSearcher(Searcher, Generic[Config]):
    """A search whose settings say how long it may take.

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
        """See `Searcher.with_budget`; the effort is not looked at."""
        del effort
        least = min(self.config.time_budget_seconds, seconds)
        other = copy.copy(self)
        other.config = dataclasses.replace(self.config, time_budget_seconds=least)
        return other
