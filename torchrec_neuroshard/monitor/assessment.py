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
from torch import nn

from torchrec_neuroshard.phase_timer import PhaseTimes, critical_times
from torchrec_neuroshard.placement import format_bytes
from torchrec_neuroshard.planner.given_plans import PlanOptions
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.planner.replan import ReplanConfig, ReplanResult, replan
from torchrec_neuroshard.planner.table_reader import table_name
from torchrec_neuroshard.profiles import FeatureProfile
from torchrec_neuroshard.simulator import PHASES, PredictedCosts
from torchrec_neuroshard.tables import TableConfig

__all__ = ["Assessor", "Difference", "Measured", "MonitorReport", "Offer"]

_COMPUTE = ("fwd_compute", "bwd_compute")
_REMEMBERED = 3
"""Reports that correction factors are taken over: few, so that they follow drift."""
_MOST_FACTOR = 5.0
"""Factors are held to it and to its inverse: where more is missing, as in a collective
that is all latency, what is missing does not grow with what is predicted."""
_MIN_SEARCH_SECONDS = 0.05


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
    """What moving takes: as the collectives' model predicts, or as the last moves went,
    byte for byte."""

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
            f"{self.break_even} iterations"
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
    """None: nothing that pays was found, or there was no time to look."""

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
    ) -> None:
        """Take what plans are made with.

        Args:
            planner: Made the plan at work.
            model: As it was planned.
            sharders: Of its modules.
            min_gain: Part of an iteration that a new plan must save.
            budget_bytes: Most that it may move.
        """
        self._planner, self._model, self._sharders = planner, model, list(sharders)
        self._min_gain, self._budget_bytes = min_gain, budget_bytes
        self.profiles: dict[str, FeatureProfile] = {}
        self.tables: dict[str, TableConfig] = {}
        self.seconds = 0.0
        self._seen: dict[str, deque[tuple[float, float]]] = {
            p: deque(maxlen=_REMEMBERED) for p in PHASES
        }
        self._move_ms_per_byte: float | None = None
        self._planned: tuple[Any, PredictedCosts] | None = None

    @property
    def factors(self) -> dict[str, float]:
        """Phase -> measured over predicted; of phases that were measured."""
        found = {}
        for phase, pairs in self._seen.items():
            if pairs:
                factor = sum(ms for ms, _ in pairs) / sum(ms for _, ms in pairs)
                found[phase] = min(max(factor, 1 / _MOST_FACTOR), _MOST_FACTOR)
        return found

    def planned(self, plan: Any) -> PredictedCosts:
        """Price a plan with the inputs that the planner was given; kept."""
        if self._planned is None or self._planned[0] != plan:
            self._planned = plan, self._price(self._planner, plan)
        return self._planned[1]

    def _price(self, planner: NeuroShardPlanner, plan: Any) -> PredictedCosts:
        started = time.perf_counter()
        options = PlanOptions(
            self._model, self._sharders, planner.enumerator, planner.costs
        ).of(plan)
        reader = planner.costs.reader
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
            predicted = self._price(
                self._planner.relearned(profiles=self.profiles), plan
            )
        if is_fresh or not self.profiles:
            self._learn(predicted, measured)
        offer = None
        left = seconds - (time.perf_counter() - started) - 2 * self.seconds
        if left >= _MIN_SEARCH_SECONDS and self._may_pay(predicted, measured):
            offer = self.look(plan, measured.iteration_ms, seconds=left)
        return MonitorReport(
            last_iteration=last_iteration,
            planned=planned,
            predicted=predicted,
            measured=measured,
            differences=_differences(predicted, measured),
            factors=self.factors,
            offer=offer,
        )

    def _learn(self, predicted: PredictedCosts, measured: Measured) -> None:
        """Remember what was measured over what was predicted for the same inputs."""
        both = {
            p: (ms, _critical(predicted, measured)[p])
            for p, ms in measured.critical_ms.items()
        }
        for phase in _COMPUTE:
            both[phase] = (
                sum(r[phase] for r in measured.by_rank_ms),
                sum(_of_ranks(predicted, measured, phase)),
            )
        for phase, (ms, predicted_ms) in both.items():
            if ms > 0 and predicted_ms > 0:
                self._seen[phase].append((ms, predicted_ms))

    def _may_pay(self, predicted: PredictedCosts, measured: Measured) -> bool:
        """Whether kernels spread evenly would save enough; searching takes longer."""
        factors, saved_ms = self.factors, 0.0
        for stage in predicted.stages:
            for phase in _COMPUTE:
                ms_W = np.array([getattr(r, phase) for r in stage.ranks])
                saved_ms += factors.get(phase, 1.0) * float(ms_W.max() - ms_W.mean())
        return saved_ms > self._min_gain * measured.iteration_ms

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
        planner = self._planner.relearned(profiles=self.profiles, factors=self.factors)
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
            move_ms=self._move_ms(result),
        )

    def _move_ms(self, result: ReplanResult) -> float:
        if self._move_ms_per_byte is not None:
            return self._move_ms_per_byte * result.moved_bytes
        bytes_W = np.zeros(len(result.before.ranks))
        for move in result.moves:
            bytes_W[move.to_rank] += move.num_bytes
        ms_CW = self._planner.costs.comms_model.index_all_to_all(bytes_W[None])
        return float(ms_CW.max())

    def follow(self, num_bytes: int, seconds: float) -> None:
        """Take it that moves were made, for the inputs known now.

        Args:
            num_bytes: Moved.
            seconds: What that took.
        """
        if num_bytes:
            self._move_ms_per_byte = seconds * 1e3 / num_bytes
        self._planner = self._planner.relearned(profiles=self.profiles)
