"""What rank 0 makes of the ranks' times: predicted beside measured, and better plans.

Shapes: `W` ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from torchrec_neuroshard.monitor.move_times import MoveRates
from torchrec_neuroshard.phase_timer import PhaseTimes, critical_times
from torchrec_neuroshard.placement import format_bytes
from torchrec_neuroshard.planner.costs.given_plans import PlanOptions
from torchrec_neuroshard.planner.options.table_reader import table_name
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.planner.plans.replan import ReplanConfig, ReplanResult, replan
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.simulator import PHASES, PredictedCosts
from torchrec_neuroshard.tables import TableConfig

__all__ = ["Assessor", "Difference", "Measured", "MonitorReport", "Offer"]

Floats = npt.NDArray[np.float64]

_COMPUTE = ("fwd_compute", "bwd_compute")
_REMEMBERED = 3
"""Reports that correction factors are taken over: few, so that they follow drift."""
_MOST_FACTOR = 5.0
"""Factors are held to it and to its inverse: where more is missing, as in a collective
that is all latency, what is missing does not grow with what is predicted."""
_MIN_SEARCH_SECONDS, _MOST_SEARCH_SECONDS = 0.05, 1.0
"""Training waits for a search: it takes no longer, however much time is saved up."""
_TOLD_APART = 0.1
"""Part of the mean by which ranks must be predicted to differ, so that what they were
measured to differ by says what such a difference takes."""
_GROWTH = 1.2
"""By so much must what even kernels would save have grown since the last search: a plan
that could not be bettered is not searched for again at each report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What all ranks measured in the timed iterations of a report."""

    iteration_ms: float
    """Of a whole iteration, as the ranks' loops took it without timing phases."""
    modules: frozenset[str]
    """Paths of the modules whose phases are timed."""
    critical_ms: Mapping[str, float]
    """Phase -> what it took over all ranks; see `critical_times`. What was not timed is
    left out."""
    by_rank_ms: tuple[Mapping[str, float], ...]
    """The compute phases of each rank."""

    @property
    def rest_ms(self) -> float:
        """Of an iteration without a pipeline: what is not the embedding part."""
        return max(self.iteration_ms - sum(self.critical_ms.values()), 0.0)

    @classmethod
    def of(
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
            one_clock: Whether all ranks are on one machine.
        """
        critical: list[Mapping[str, float]] = []
        for by_rank in zip(*iterations_W, strict=True):
            modules = critical_times(by_rank, one_clock=one_clock)
            critical.append({p: sum(m[p] for m in modules) for p in PHASES})
        timed = {
            phase
            for rank in iterations_W
            for iteration in rank
            for times in iteration
            for phase in PHASES
            if times.spans[phase]
        }
        return cls(
            iteration_ms=iteration_ms,
            modules=frozenset(t.module for t in iterations_W[0][0]),
            critical_ms={
                p: statistics.median(c[p] for c in critical)
                for p in PHASES
                if p in timed
            },
            by_rank_ms=tuple(
                {
                    phase: statistics.median(
                        sum(t.duration_ms(phase) for t in iteration)
                        for iteration in rank
                    )
                    for phase in _COMPUTE
                }
                for rank in iterations_W
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
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
class Offer:
    """A plan that is predicted to be better than the one at work."""

    result: ReplanResult
    """With costs as measured, as far as they were."""
    saved_ms: float
    """Of each iteration."""
    iteration_ms: float
    """Measured."""
    move_ms: float
    """What moving takes; see `move_times`."""
    search_ms: float
    """What finding it took on rank 0, while training waited."""

    @property
    def break_even(self) -> int:
        """Iterations after which the moves have paid."""
        return math.ceil(self.move_ms / self.saved_ms) if self.saved_ms > 0 else 0

    def __str__(self) -> str:
        """Return it as text."""
        share = self.saved_ms / self.iteration_ms
        moved = format_bytes(self.result.moved_bytes)
        text = f"a new plan saves {self.saved_ms:.3f} ms ({share:.1%}) per iteration"
        if not self.result.executable:
            return f"{text}; it moves {moved}, after a restart"
        return (
            f"{text}; moving {moved} takes about {self.move_ms:.0f} ms and pays after "
            f"{self.break_even} iterations (found in {self.search_ms:.0f} ms)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorReport:
    """Predicted beside measured, of one stretch of training."""

    last_iteration: int
    """Counted from the monitor's first."""
    planned: PredictedCosts
    """Of the plan at work, with the inputs that it was made for."""
    predicted: PredictedCosts
    """With the inputs as they are now; `planned` while those are not known."""
    measured: Measured
    differences: tuple[Difference, ...]
    """Of each compute phase of each rank and of each collective, the largest first."""
    factors: Mapping[str, float]
    """Phase -> measured over predicted, over the last reports."""
    offer: Offer | None
    """Found at this report or an earlier one. None: nothing that pays within the
    horizon was found, or there was no time to look."""

    def __str__(self) -> str:
        """Return it as text."""
        measured = self.measured
        timed = sum(measured.critical_ms.values())
        planned, predicted = (
            sum(_critical(c, measured)[p] for p in measured.critical_ms)
            for c in (self.planned, self.predicted)
        )
        lines = [
            f"iteration {self.last_iteration}: {measured.iteration_ms:.3f} ms, the "
            f"embedding part {timed:.3f} ms; predicted {predicted:.3f} with today's "
            f"inputs, {planned:.3f} with those that were planned for"
        ]
        of_phases = _critical(self.predicted, measured)
        lines.append(
            "predicted / measured: "
            + ", ".join(
                f"{phase} {of_phases[phase]:.3f} / {ms:.3f}"
                for phase, ms in measured.critical_ms.items()
            )
        )
        if self.differences:
            lines.append(f"largest difference: {self.differences[0]}")
        if self.offer is not None:
            lines.append(str(self.offer))
        return "\n".join(lines)


def _stages(costs: PredictedCosts, modules: frozenset[str]) -> list[Any]:
    """Stages of modules that are timed, or that hold one that is."""

    def is_timed(name: str) -> bool:
        inside = "" if name == "model" else f"{name}."
        return any(f"{path}.".startswith(inside) for path in modules)

    return [s for s in costs.stages if is_timed(s.name.rpartition(" (")[0])]


def _critical(costs: PredictedCosts, measured: Measured) -> dict[str, float]:
    """Predicted phases of the timed modules, each as long as on its slowest rank."""
    stages = _stages(costs, measured.modules)
    return {p: sum(max(getattr(r, p) for r in s.ranks) for s in stages) for p in PHASES}


def _of_ranks(costs: PredictedCosts, measured: Measured, phase: str) -> list[float]:
    stages = _stages(costs, measured.modules)
    return [
        sum(getattr(s.ranks[rank], phase) for s in stages)
        for rank in range(len(measured.by_rank_ms))
    ]


def _differences(costs: PredictedCosts, measured: Measured) -> tuple[Difference, ...]:
    critical = _critical(costs, measured)
    found = [
        Difference(phase=p, rank=None, predicted_ms=critical[p], measured_ms=ms)
        for p, ms in measured.critical_ms.items()
        if p not in _COMPUTE
    ]
    for phase in _COMPUTE:
        predicted_W = _of_ranks(costs, measured, phase)
        found += [
            Difference(
                phase=phase, rank=rank, predicted_ms=p, measured_ms=by_phase[phase]
            )
            for rank, (p, by_phase) in enumerate(
                zip(predicted_W, measured.by_rank_ms, strict=True)
            )
        ]
    return tuple(sorted(found, key=lambda d: -abs(d.measured_ms - d.predicted_ms)))


class Assessor:
    """Prices the plan at work and its rivals, as inputs and times come in.

    Attributes:
        profiles: Of the features seen so far.
        tables: Full name -> the table with its present profile, as of the last report.
        seconds: What the last prediction took.
    """

    def __init__(
        self,
        planner: NeuroShardPlanner,
        model: nn.Module,
        sharders: Sequence[Any],
        *,
        min_gain: float,
        budget_bytes: int,
        horizon: float,
        rates: MoveRates,
    ) -> None:
        """Take what plans are made with.

        Args:
            planner: Made the plan at work.
            model: As it was planned.
            sharders: Of its modules.
            min_gain: Part of an iteration that a new plan must save.
            budget_bytes: Most that it may move.
            horizon: Iterations within which its moves must pay, to be told unasked.
            rates: Of moves, as measured by the ranks.
        """
        self._planner, self._model, self._sharders = planner, model, list(sharders)
        self._min_gain, self._budget_bytes = min_gain, budget_bytes
        self._horizon, self._rates = horizon, rates
        self.profiles: dict[str, FeatureProfile] = {}
        self.tables: dict[str, TableConfig] = {}
        self.seconds = 0.0
        self._seen: dict[str, deque[tuple[float, float | None]]] = {
            p: deque(maxlen=_REMEMBERED) for p in PHASES
        }
        self._planned: tuple[Any, PredictedCosts] | None = None
        self._options: list[Any] = []
        self._offer: Offer | None = None
        self._searched = 0.0, 0.0

    @property
    def factors(self) -> dict[str, float]:
        """Phase -> measured over predicted; of phases that were measured."""
        return {
            phase: _held(statistics.median(factor for factor, _ in seen))
            for phase, seen in self._seen.items()
            if seen
        }

    @property
    def weights(self) -> dict[str, float]:
        """Phase -> what a predicted millisecond more takes.

        Less than the factor where some of what is measured does not grow with what is
        predicted: moves do not save that part.
        """
        found = self.factors
        for phase, seen in self._seen.items():
            known = [weight for _, weight in seen if weight is not None]
            if known:
                found[phase] = _held(statistics.median(known))
        return found

    def planned(self, plan: Any) -> PredictedCosts:
        """Price a plan with the inputs that the planner was given; kept."""
        if self._planned is None or self._planned[0] != plan:
            planner = self._planner
            self._options = PlanOptions(
                self._model, self._sharders, planner.enumerator, planner.costs
            ).of(plan)
            self._planned = plan, self._price(planner)
        return self._planned[1]

    def _price(self, planner: NeuroShardPlanner) -> PredictedCosts:
        """Price the plan of `planned`: only what is known of inputs is new."""
        started = time.perf_counter()
        options, reader = self._options, planner.costs.reader
        self.tables = {
            table_name(o): reader.table(o) for o in options if reader.has_cost(o)
        }
        priced = planner.costs.evaluate(planner.costs.lower(options))
        self.seconds = time.perf_counter() - started
        return priced

    def assess(
        self,
        plan: Any,
        measured: Measured,
        *,
        last_iteration: int,
        seconds: float,
    ) -> MonitorReport:
        """Set predicted beside measured; look for a better plan if there is time.

        Args:
            plan: At work.
            measured: What the ranks measured.
            last_iteration: When.
            seconds: What this may take.
        """
        started = time.perf_counter()
        planned = predicted = self.planned(plan)
        is_fresh = bool(self.profiles) and self.seconds <= seconds
        if is_fresh:
            predicted = self._price(self._planner.relearned(profiles=self.profiles))
        if is_fresh or not self.profiles:
            self._learn(predicted, measured)
        left = seconds - (time.perf_counter() - started) - 2 * self.seconds
        self._search(plan, predicted, measured, left)
        return MonitorReport(
            last_iteration=last_iteration,
            planned=planned,
            predicted=predicted,
            measured=measured,
            differences=_differences(predicted, measured),
            factors=self.factors,
            offer=self._offer,
        )

    def _learn(self, predicted: PredictedCosts, measured: Measured) -> None:
        """Remember what was measured over what was predicted for the same inputs."""
        critical = _critical(predicted, measured)
        for phase, ms in measured.critical_ms.items():
            if phase not in _COMPUTE and ms > 0 and critical[phase] > 0:
                self._seen[phase].append((ms / critical[phase], None))
        for phase in _COMPUTE:
            measured_W = np.array([r[phase] for r in measured.by_rank_ms])
            predicted_W = np.array(_of_ranks(predicted, measured, phase))
            if measured_W.sum() > 0 and predicted_W.sum() > 0:
                self._seen[phase].append(_factor_and_weight(measured_W, predicted_W))

    def _search(
        self, plan: Any, predicted: PredictedCosts, measured: Measured, seconds: float
    ) -> None:
        """Look for a plan that pays, if there is a sign of one and time.

        The sign: ranks' kernels, spread evenly, would save enough, and more than when
        it was last looked for, unless that was in far less time.
        """
        weights, saved_ms, worth_ms = self.weights, 0.0, 0.0
        for stage in predicted.stages:
            for phase in _COMPUTE:
                ms_W = np.array([getattr(r, phase) for r in stage.ranks])
                uneven_ms = float(ms_W.max() - ms_W.mean())
                saved_ms += uneven_ms
                worth_ms += weights.get(phase, 1.0) * uneven_ms
        seconds = min(seconds, _MOST_SEARCH_SECONDS)
        last_ms, last_seconds = self._searched
        if worth_ms <= self._min_gain * measured.iteration_ms:
            self._offer, self._searched = None, (min(saved_ms, last_ms), last_seconds)
        elif seconds >= _MIN_SEARCH_SECONDS and (
            saved_ms > _GROWTH * last_ms
            or (self._offer is None and seconds >= 2 * last_seconds)
        ):
            self._searched = saved_ms, seconds
            found = self.look(plan, measured.iteration_ms, seconds=seconds)
            pays = found is not None and found.break_even <= self._horizon
            self._offer = found if pays else None

    def look(
        self,
        plan: Any,
        iteration_ms: float,
        *,
        seconds: float,
        budget_bytes: int | None = None,
        executable_only: bool = True,
    ) -> Offer | None:
        """Search for a better plan, with costs as measured.

        Args:
            plan: At work.
            iteration_ms: What an iteration takes; 0: not known.
            seconds: What the search may take.
            budget_bytes: Most to move. None: what the monitor was told.
            executable_only: See `replan`.

        Returns:
            None where nothing saves enough.
        """
        started = time.perf_counter()
        planner = self._planner.relearned(profiles=self.profiles, factors=self.weights)
        budget = self._budget_bytes if budget_bytes is None else budget_bytes
        result = replan(
            plan,
            planner=planner,
            model=self._model,
            budget_bytes=budget,
            sharders=self._sharders,
            executable_only=executable_only,
            config=ReplanConfig(time_budget_seconds=seconds),
        )
        before, after = (c.critical_path_ms for c in (result.before, result.after))
        iteration_ms = iteration_ms or before
        if not result.moves or before - after < self._min_gain * iteration_ms:
            return None
        return Offer(
            result=result,
            saved_ms=before - after,
            iteration_ms=iteration_ms,
            move_ms=self._rates.predict_ms(result),
            search_ms=(time.perf_counter() - started) * 1e3,
        )

    def follow(self, offer: Offer, seconds: float) -> None:
        """Take it that moves were made, for the inputs known now.

        Args:
            offer: What was moved.
            seconds: What that took.
        """
        self._rates = self._rates.corrected(offer.move_ms, seconds * 1e3)
        self._planner = self._planner.relearned(profiles=self.profiles)
        self._offer, self._searched = None, (0.0, 0.0)
        self._planned = None  # moves change the plan in place


def _held(factor: float) -> float:
    return min(max(factor, 1 / _MOST_FACTOR), _MOST_FACTOR)


def _factor_and_weight(
    measured_W: Floats, predicted_W: Floats
) -> tuple[float, float | None]:
    """Measured over predicted; and how fast the one grows with the other.

    The latter by the ranks' differences, where they are predicted to differ. At zero
    predicted, less than nothing is never measured: it is at most the former.
    """
    factor = float(measured_W.sum() / predicted_W.sum())
    apart_W = predicted_W - predicted_W.mean()
    if float(np.abs(apart_W).max()) < _TOLD_APART * float(predicted_W.mean()):
        return factor, None
    weight = float(apart_W @ (measured_W - measured_W.mean()) / (apart_W @ apart_W))
    return factor, min(factor, weight)
