"""What rank 0 makes of the ranks' times: predicted beside measured, and what drifted.

Shapes: `W` ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchrec_neuroshard.phase_timer import PhaseTimes, critical_times
from torchrec_neuroshard.planner.costs.given_plans import PlanOptions
from torchrec_neuroshard.planner.options.table_reader import table_name
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.plans.replan import ReplanResult, replan
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.search.base import SearchConfig
from torchrec_neuroshard.simulator import PHASES, PredictedCosts

__all__ = ["Assessor", "Difference", "Drift", "Measured", "MonitorReport", "Phases"]

_COMPUTE = ("fwd_compute", "bwd_compute")
_LEAST_DRIFT = 1.1
"""Inputs that changed by less than this factor are not named."""
_UNLIMITED = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Phases of one iteration, in the modules that are timed."""

    critical_ms: Mapping[str, float]
    """Phase -> what it takes over all ranks; see `critical_times`."""
    by_rank_ms: tuple[Mapping[str, float], ...]
    """The compute phases of each rank."""

    @classmethod
    def of(cls, costs: PredictedCosts, modules: Collection[str]) -> Phases:
        """Return the predicted phases of these modules, and of what holds one."""

        def is_timed(name: str) -> bool:
            inside = "" if name == "model" else f"{name}."
            return any(f"{path}.".startswith(inside) for path in modules)

        stages = [s for s in costs.stages if is_timed(s.name.rpartition(" (")[0])]
        return cls(
            critical_ms={
                p: sum(max(getattr(r, p) for r in s.ranks) for s in stages)
                for p in PHASES
            },
            by_rank_ms=tuple(
                {p: sum(getattr(s.ranks[rank], p) for s in stages) for p in _COMPUTE}
                for rank in range(len(costs.ranks))
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(Phases):
    """What all ranks measured in the timed iterations of a report.

    A phase that was not timed is left out.
    """

    iteration_ms: float
    """Of a whole iteration, as the ranks' loops took it without timing phases."""
    modules: frozenset[str]
    """Paths of the modules whose phases are timed."""

    @property
    def rest_ms(self) -> float:
        """Of an iteration without a pipeline: what is not the embedding part."""
        return max(self.iteration_ms - sum(self.critical_ms.values()), 0.0)

    @classmethod
    def put_together(
        cls,
        iterations_W: Sequence[Sequence[Sequence[PhaseTimes]]],
        iteration_ms: float,
        *,
        one_clock: bool,
    ) -> Measured:
        """Put together what ranks timed.

        Args:
            iterations_W: Of each rank: `PhaseTimer.take_all`, as many on all.
            iteration_ms: Of a whole iteration.
            one_clock: See `critical_times`.
        """
        critical = [
            critical_times(by_rank, one_clock=one_clock)
            for by_rank in zip(*iterations_W, strict=True)
        ]
        times = [t for rank in iterations_W for step in rank for t in step]
        return cls(
            iteration_ms=iteration_ms,
            modules=frozenset(t.module for t in times),
            critical_ms={
                p: statistics.median(sum(m[p] for m in step) for step in critical)
                for p in PHASES
                if any(t.spans[p] for t in times)
            },
            by_rank_ms=tuple(
                {
                    p: statistics.median(
                        sum(t.duration_ms(p) for t in step) for step in rank
                    )
                    for p in _COMPUTE
                }
                for rank in iterations_W
            ),
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """A phase that took other than predicted."""

    phase: str
    rank: int | None
    """None: a collective, of all ranks."""
    predicted_ms: float
    measured_ms: float

    def __str__(self) -> str:
        """Return it as text."""
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        return (
            f"{self.phase} of {where}: {self.predicted_ms:.3f} ms predicted, "
            f"{self.measured_ms:.3f} measured"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """A table whose inputs are no longer those that were planned for."""

    table: str
    """Full name, "module.table"."""
    planned: FeatureProfile
    """At one local batch."""
    now: FeatureProfile

    @property
    def factor(self) -> float:
        """How many times as many, or as few, lookups or distinct ids there are now."""
        pairs = (
            (self.planned.num_lookups, self.now.num_lookups),
            (self.planned.num_distinct, self.now.num_distinct),
        )
        return max(max(a, b, 1.0) / max(min(a, b), 1.0) for a, b in pairs)

    def __str__(self) -> str:
        """Return it as text."""
        return (
            f"table '{self.table}': {self.planned.pooling_factor:.2f} ids per sample "
            f"planned for, {self.now.pooling_factor:.2f} now; distinct ids in a batch "
            f"{self.planned.num_distinct:,.0f} and {self.now.num_distinct:,.0f}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorReport:
    """Predicted beside measured, of one stretch of training."""

    last_iteration: int
    """Counted from the monitor's first."""
    planned: Phases
    """Predicted with the inputs that the plan was made for."""
    predicted: Phases
    """With the inputs as they are now; `planned` while those are not known."""
    measured: Measured
    differences: tuple[Difference, ...]
    """Of each compute phase of each rank and of each collective, the largest first."""
    drifts: tuple[Drift, ...]
    """Tables whose inputs changed, the most changed first."""

    def __str__(self) -> str:
        """Return it as text."""
        planned, predicted = self.planned.critical_ms, self.predicted.critical_ms
        lines = [
            f"iteration {self.last_iteration}: {self.measured.iteration_ms:.3f} ms",
            *(
                f"{p}: {planned[p]:.3f} ms planned, {predicted[p]:.3f} with today's "
                f"inputs, {ms:.3f} measured"
                for p, ms in self.measured.critical_ms.items()
            ),
        ]
        if self.differences:
            lines.append(f"largest difference: {self.differences[0]}")
        if self.drifts:
            lines.append(f"largest drift: {self.drifts[0]}")
        return "\n".join(lines)


def _differences(predicted: Phases, measured: Phases) -> tuple[Difference, ...]:
    found = [
        Difference(p, None, predicted.critical_ms[p], ms)
        for p, ms in measured.critical_ms.items()
        if p not in _COMPUTE
    ]
    ranks = zip(predicted.by_rank_ms, measured.by_rank_ms, strict=True)
    for rank, (before, after) in enumerate(ranks):
        found += [Difference(p, rank, before[p], after[p]) for p in _COMPUTE]
    return tuple(sorted(found, key=lambda d: -abs(d.measured_ms - d.predicted_ms)))


class Assessor:
    """Prices the plan at work as inputs and times come in.

    Attributes:
        profiles: Of the features seen so far.
    """

    def __init__(
        self, planner: NeuroShardPlanner, model: nn.Module, sharders: Sequence[Any]
    ) -> None:
        """Take what plans are made with.

        Args:
            planner: Made the plan at work, or prices it.
            model: As it was planned.
            sharders: Of its modules.
        """
        self._planner, self._model, self._sharders = planner, model, list(sharders)
        self.profiles: dict[str, FeatureProfile] = {}
        self._plan: Any = None
        self._options: list[Any] = []
        self._planned: PredictedCosts
        self._seconds = 0.0

    def planned(self, plan: Any) -> PredictedCosts:
        """Price a plan with the inputs that the planner was given; kept."""
        if self._plan is None:
            planner = self._planner
            self._options = PlanOptions(
                self._model, self._sharders, planner.enumerator, planner.costs
            ).of(plan)
            self._plan, self._planned = plan, self._price(planner)
        return self._planned

    def _price(self, planner: NeuroShardPlanner) -> PredictedCosts:
        started = time.perf_counter()
        priced = planner.costs.evaluate(planner.costs.lower(self._options))
        self._seconds = time.perf_counter() - started
        return priced

    def _drifts(self, now: NeuroShardPlanner) -> tuple[Drift, ...]:
        readers = self._planner.costs.reader, now.costs.reader
        found = []
        for option in self._options:
            if readers[0].has_cost(option):
                planned, present = (
                    r.table(option).profile_at(now.batch_size) for r in readers
                )
                name = table_name(option)
                found.append(Drift(table=name, planned=planned, now=present))
        named = [d for d in found if d.factor >= _LEAST_DRIFT]
        return tuple(sorted(named, key=lambda d: -d.factor))

    def assess(
        self, plan: Any, measured: Measured, *, last_iteration: int, seconds: float
    ) -> MonitorReport:
        """Set predicted beside measured.

        Args:
            plan: At work.
            measured: What the ranks measured.
            last_iteration: When.
            seconds: What this may take; with less than the last time, inputs are taken
                to be those that were planned for.
        """
        costs = self.planned(plan)
        planned = predicted = Phases.of(costs, measured.modules)
        drifts: tuple[Drift, ...] = ()
        if self.profiles and self._seconds <= seconds:
            now = self._planner.relearned(self.profiles)
            predicted = Phases.of(self._price(now), measured.modules)
            drifts = self._drifts(now)
        return MonitorReport(
            last_iteration=last_iteration,
            planned=planned,
            predicted=predicted,
            measured=measured,
            differences=_differences(predicted, measured),
            drifts=drifts,
        )

    def replan(
        self,
        plan: Any,
        *,
        budget_bytes: int | None,
        executable_only: bool,
        config: SearchConfig | None,
    ) -> ReplanResult:
        """Call `replan` with inputs as they are now."""
        return replan(
            plan,
            planner=self._planner.relearned(self.profiles),
            model=self._model,
            budget_bytes=_UNLIMITED if budget_bytes is None else budget_bytes,
            sharders=self._sharders,
            executable_only=executable_only,
            config=config,
        )

    def follow(self) -> None:
        """Take it that moves were made, for the inputs known now."""
        self._planner = self._planner.relearned(self.profiles)
        self._plan = None
