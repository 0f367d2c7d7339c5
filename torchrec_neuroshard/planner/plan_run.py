"""One planning run: what was searched, and which plan won."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrec.distributed.planner.types import Proposer, ShardingOption

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner.costs.hedging import (
    cautions,
    choose_plan,
    draw_paths,
    is_uncertain,
    robustness,
)
from torchrec_neuroshard.planner.costs.plan_costs import PlanCosts
from torchrec_neuroshard.planner.parts.partitioners import SearchLog
from torchrec_neuroshard.planner.parts.proposers import NeuroShardProposer
from torchrec_neuroshard.planner.parts.torchrec_plan import TorchRecOption, TorchRecPlan
from torchrec_neuroshard.report import Robustness

__all__ = ["PlanRun"]

Callback = Callable[[list[ShardingOption]], list[ShardingOption]]


class PlanRun:
    """What is known of a run of TorchRec's loop, from its start to the plan returned.

    Attributes:
        log: The searches made.
        torchrec: TorchRec's own plan.
        fallback: Why that one was taken, if it was.
        notes: Warnings for the plan's result.
        selected: The options of the plan returned; None until there is one.
        robustness: How the plan does if its costs are off; None where they were
            measured.

    Args:
        torchrec: The candidate and last resort.
        proposers: The planner's, without the candidate's.
        violation: Says how a plan breaks the caller's constraints on placement.
        uncertain: What plans cost, if that is an estimate under whose error the plan
            returned must hold up; None: the plan rated best is returned.
    """

    def __init__(
        self,
        torchrec: TorchRecPlan,
        proposers: Sequence[Proposer],
        violation: Callable[[Sequence[ShardingOption]], str | None],
        uncertain: PlanCosts | None = None,
    ) -> None:
        self.robustness: Robustness | None = None
        self._uncertain = uncertain
        self.log = SearchLog()
        self.torchrec = torchrec
        self.fallback: str | None = None
        self.notes: list[str] = []
        self.selected: list[ShardingOption] | None = None
        self._searches = [p for p in proposers if isinstance(p, NeuroShardProposer)]
        self._violation = violation

    def callbacks(self, given: Sequence[Callback]) -> list[Callback]:
        """Return the caller's callbacks between those that watch over the plan."""
        return [self._see_winner, *given, self.select]

    def _see_winner(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """First of TorchRec's callbacks: sees whose plan was rated best."""
        options = self._hold_up(options)
        if not _is_torchrecs(options):
            return options
        rating = self.torchrec.proposer.rating
        assert rating is not None, "a plan that is returned was rated"
        ratings = [p.best_rating for p in self._searches if p.best_rating is not None]
        against = f"{min(ratings):.4g} ms" if ratings else "none"
        self.fallback = (
            f"it is predicted to take {rating:.4g} ms, the search's {against}"
        )
        if ratings and min(ratings) < rating:
            self.fallback += ", which is too often slower where the estimate is off"
        return options

    def _hold_up(self, best: list[ShardingOption]) -> list[ShardingOption]:
        """Choose the plan that holds up under the error of costs not measured."""
        plans = self.log.plans
        # Costs that were measured since are uncertain no more.
        if self._uncertain is None or not is_uncertain(self._uncertain) or not plans:
            return best
        paths_KC = draw_paths(self._uncertain, plans)
        theirs = next((n for n, p in enumerate(plans) if _is_torchrecs(p)), None)
        costs = self._uncertain
        cautions_C = [len(cautions(costs, p, costs.topology)) for p in plans]
        chosen = choose_plan(paths_KC, theirs, cautions_C)
        self.robustness = robustness(paths_KC, chosen, theirs)
        return plans[chosen]

    def select(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Last of TorchRec's callbacks: sees the plan that is returned."""
        self.selected = options
        return options

    def check(self) -> None:
        """Check the plan that is returned against the caller's constraints.

        Raises:
            ConfigError: A part that the caller gave broke them.
        """
        if self.selected is not None and (violation := self._violation(self.selected)):
            raise ConfigError(
                f"the plan breaks placement_constraints: {violation}. A partitioner, "
                "callback or plan loader that was given made it so"
            )


def _is_torchrecs(plan: Sequence[ShardingOption]) -> bool:
    return all(isinstance(o, TorchRecOption) for o in plan)
