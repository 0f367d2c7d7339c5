"""Watch a training job: compare predicted and measured times, move tables on request.

`PlanMonitor` measures on all ranks and exchanges the times. Rank 0 predicts.

Shapes: `W` ranks, `S` stages.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard.costs.simulator import PHASES, PredictedCosts
from torchrec_neuroshard.errors import (
    ConfigError,
    NeuroShardError,
    check_kind,
    check_number,
)
from torchrec_neuroshard.exchange import first_decides, from_all
from torchrec_neuroshard.phase_timer import (
    InputSampler,
    PhaseTimer,
    PhaseTimes,
    critical_times,
)
from torchrec_neuroshard.planner.given_plans import copied
from torchrec_neuroshard.planner.option_facts import table_name
from torchrec_neuroshard.planner.placed import stage_name
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.plans.replan import ReplanResult, apply_moves, replan
from torchrec_neuroshard.reporters import PhaseRecord, PlanRecord, Reporter, write_to
from torchrec_neuroshard.tables.profile import FeatureProfile

logger = logging.getLogger("torchrec_neuroshard.monitor")

_COMPUTE = ("fwd_compute", "bwd_compute")
_LEAST_DRIFT = 1.1
"""Inputs that changed by a smaller factor are not reported."""
_UNLIMITED = 2**62
_PATIENCE = timedelta(minutes=5)
"""The monitor ends if a rank does not reach a report within this time."""
_CLOSED = "closed"
_EXCHANGED = "exchanged measured times"
_LAG = 2
"""Iterations between the last timed one and the report, so that a GPU has finished."""


Phase = tuple[str, int | None]
"""One of `PHASES`, and a rank; None is all ranks together."""


def predicted_phases(
    costs: PredictedCosts, stages: Collection[str]
) -> dict[Phase, float]:
    """Return the predicted phases of some stages [ms]."""
    timed_S = [stage.name in stages for stage in costs.stages]
    phases_WS5 = costs.phases_WS6[:, timed_S, : len(PHASES)]
    critical = dict(zip(PHASES, phases_WS5.max(axis=0).sum(axis=0), strict=True))
    found: dict[Phase, float] = {(p, None): float(ms) for p, ms in critical.items()}
    for rank, phases in enumerate(phases_WS5.sum(axis=1)):
        found |= {(p, rank): float(phases[PHASES.index(p)]) for p in _COMPUTE}
    return found


def measured_phases(
    iterations_W: Sequence[Sequence[Sequence[PhaseTimes]]],
) -> dict[Phase, float]:
    """Return the median of each phase's measured times [ms].

    Phases that no rank timed are left out.

    Args:
        iterations_W: Result of `PhaseTimer.take_all` on each rank, with the same number
            of iterations.
    """
    median = statistics.median
    steps = [critical_times(by_rank) for by_rank in zip(*iterations_W, strict=True)]
    times = [t for rank in iterations_W for step in rank for t in step]
    found: dict[Phase, float] = {
        (p, None): median(sum(module[p] for module in step) for step in steps)
        for p in PHASES
        if any(t.spans[p] for t in times)
    }
    for rank, own in enumerate(iterations_W):
        for p in _COMPUTE:
            found[p, rank] = median(sum(t.duration_ms(p) for t in step) for step in own)
    return found


@dataclass(frozen=True, slots=True)
class Drift:
    """A table whose inputs have changed since it was planned."""

    table: str
    """Full name, "module.table"."""
    planned: FeatureProfile
    """Profile that was planned for, of one local batch."""
    now: FeatureProfile
    """Profile measured since, of one local batch."""

    @property
    def factor(self) -> float:
        """Factor, at least 1, by which lookups or distinct ids rose or fell."""
        pairs = (
            (self.planned.num_lookups, self.now.num_lookups),
            (self.planned.num_distinct, self.now.num_distinct),
        )
        return max(max(a, b, 1.0) / max(min(a, b), 1.0) for a, b in pairs)

    def __str__(self) -> str:
        """Return the drift as text."""
        return (
            f"table '{self.table}': planned for {self.planned.pooling_factor:.2f} ids "
            f"per sample, now {self.now.pooling_factor:.2f}; distinct ids in a batch "
            f"{self.planned.num_distinct:,.0f}, now {self.now.num_distinct:,.0f}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorReport:
    """Predicted and measured times of one stretch of training.

    Compute phases have a time per rank and the slowest rank's time. Collectives have
    one time for all ranks. Only timed modules count.
    """

    last_iteration: int
    """Last iteration of the stretch, counted from the monitor's first."""
    iteration_ms: float
    """Time of a whole iteration in the training loop, while no phases are timed."""
    planned: Mapping[Phase, float]
    """Times predicted for the inputs that were planned for [ms]."""
    predicted: Mapping[Phase, float]
    """Times predicted for the current inputs [ms]; equals `planned` until these are
    known."""
    measured: Mapping[Phase, float]
    """Measured times [ms], without phases that were not timed."""
    drifts: tuple[Drift, ...]
    """Tables whose inputs changed, largest change first."""

    @property
    def rest_ms(self) -> float:
        """Time of an iteration outside the embeddings, without a pipeline [ms]."""
        phases = (ms for (_, rank), ms in self.measured.items() if rank is None)
        return max(self.iteration_ms - sum(phases), 0.0)

    @property
    def differences(self) -> tuple[Phase, ...]:
        """Compute phases of each rank, and collectives; the largest error first."""
        found = [
            (phase, rank)
            for phase, rank in self.measured
            if (rank is None) == (phase not in _COMPUTE)
        ]
        return tuple(
            sorted(found, key=lambda p: -abs(self.measured[p] - self.predicted[p]))
        )

    @property
    def records(self) -> tuple[PhaseRecord, ...]:
        """Records for reporters: the whole iteration, and each phase by rank."""
        whole = PhaseRecord(
            iteration=self.last_iteration,
            phase="iteration",
            measured_ms=self.iteration_ms,
        )
        phases = (
            PhaseRecord(
                iteration=self.last_iteration,
                rank=rank,
                phase=phase,
                planned_ms=planned_ms,
                predicted_ms=self.predicted[phase, rank],
                measured_ms=self.measured.get((phase, rank)),
            )
            for (phase, rank), planned_ms in self.planned.items()
        )
        return (whole, *phases)

    def __str__(self) -> str:
        """Return the report as text."""
        lines = [f"iteration {self.last_iteration}: {self.iteration_ms:.3f} ms"]
        for phase, rank in self.measured:
            if rank is None:
                planned, predicted, measured = (
                    ms[phase, None]
                    for ms in (self.planned, self.predicted, self.measured)
                )
                lines.append(
                    f"{phase}: {planned:.3f} ms planned, {predicted:.3f} with current "
                    f"inputs, {measured:.3f} measured"
                )
        for phase, rank in self.differences[:1]:
            where = "all ranks" if rank is None else f"rank {rank}"
            lines.append(
                f"largest difference: {phase} of {where}: "
                f"{self.predicted[phase, rank]:.3f} ms predicted, "
                f"{self.measured[phase, rank]:.3f} measured"
            )
        lines += [f"largest drift: {drift}" for drift in self.drifts[:1]]
        return "\n".join(lines)


def stages_of(options: Sequence[ShardingOption], modules: Collection[str]) -> set[str]:
    """Return the stages of these modules and of modules that contain them."""
    return {
        stage_name(o.path, o.sharding_type)
        for o in options
        if any(not o.path or f"{m}.".startswith(f"{o.path}.") for m in modules)
    }


def changed_inputs(
    options: Sequence[ShardingOption],
    planner: NeuroShardPlanner,
    now: NeuroShardPlanner,
) -> tuple[Drift, ...]:
    """Return the tables whose inputs changed, largest change first.

    Args:
        options: The plan's options.
        planner: The planner that made the plan.
        now: `planner.relearned` with current profiles.
    """
    readers = planner.costs.reader, now.costs.reader
    found = [
        Drift(table_name(o), *(r.table(o).profile_at(now.batch_size) for r in readers))
        for o in options
        if readers[0].has_cost(o)
    ]
    changed = [drift for drift in found if drift.factor >= _LEAST_DRIFT]
    return tuple(sorted(changed, key=lambda d: -d.factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanned:
    """Outcome of `PlanMonitor.replan`, the same on all ranks."""

    result: ReplanResult
    """Result of `replan`."""
    applied: bool
    """Whether the model has the new plan now."""
    reason: str | None
    """Why the model does not have the new plan; None if it has."""


class PlanMonitor:
    """Watches the plan of a training job: measures, compares, moves on request.

        monitor = PlanMonitor(model, planner)  # the DistributedModelParallel
        for batch in batches:
            train_step(batch)  # or pipeline.progress(batches)
            monitor.step()

    Of every `every` iterations, a few are timed phase by phase. Rank 0 then logs
    predicted and measured times to the logger "torchrec_neuroshard.monitor", and names
    the table whose inputs changed most; inputs are profiled from the ids that enter the
    sharded modules. Reporters write the same elsewhere.
    `replan()` searches for a better plan for these inputs and moves the tables.

    A monitor never breaks training. If something fails on a rank, this rank stops
    measuring; at the next report all ranks warn once and the monitor ends.

    Attributes:
        last_report: The last report, on rank 0; None before the first.
    """

    def __init__(
        self,
        model: Any,
        planner: NeuroShardPlanner,
        *,
        every: int = 200,
        timed: int = 5,
        max_overhead: float = 0.005,
        reporters: Sequence[Reporter] = (),
    ) -> None:
        """Install the hooks; call this on every rank, with the same settings.

        Args:
            model: The `DistributedModelParallel` in training.
            planner: Planner that made the plan, or that predicts its costs.
            every: Iterations between reports.
            timed: Number of these iterations whose phases are timed.
            max_overhead: Largest share of the job's time that profiling and predicting
                may take on a rank. Work beyond it waits for the next report.
            reporters: Write the plan and every report, on rank 0 only. A reporter that
                fails is dropped with a warning.

        Raises:
            ConfigError: A setting is not allowed, the ranks' settings differ, nothing
                in the model is sharded, or the planner is for another number of ranks
                or has planned no model.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "PlanMonitor needs a process group: call "
                "torch.distributed.init_process_group first"
            )
        self.last_report: MonitorReport | None = None
        self._model, self._planner = model, planner
        self._every, self._timed, self._max_overhead = every, timed, max_overhead
        self._reporters: list[Reporter] = []
        self._profiles: dict[str, FeatureProfile] = {}
        self._priced: ShardingPlan | None = None
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._error: str | None = None
        self._is_over = False
        self._hooks = contextlib.ExitStack()
        self._count = self._in_window = 0
        self._intervals: list[float] = []
        self._spent = self._deadline = self._price_seconds = 0.0
        failure = ""
        try:
            self._reporters += reporters
            self._check()
            self._sampler = InputSampler(
                model.module, self._rank, self._world_size, self._fail
            )
            self._hooks.callback(self._sampler.remove)
            self._timer = self._new_timer()
            self._timer.remove()
            self._hooks.callback(lambda: self._timer.remove())
            self._plan = copied(model.plan)
        except Exception as error:
            failure = str(error)
        told = from_all((failure, every, timed), self._group, _EXCHANGED)
        failure = failure or next((text for text, *_ in told if text), "")
        settings = sorted({f"every={e} and timed={t}" for _, e, t in told})
        if not failure and len(settings) > 1:
            failure = f"ranks have {', '.join(settings)}: use the same on all ranks"
        if failure:
            self._hooks.close()
            raise ConfigError(failure)
        self._began = self._left = time.perf_counter()
        if self._rank == 0:
            try:
                assert planner.last_model is not None, "_check requires it"
                self._planned_model = planner.last_model
                self._price_plan()
            except Exception as error:
                self._fail(error)

    def _check(self) -> None:
        """Check that this rank can watch the model with these settings."""
        check_kind("planner", self._planner, NeuroShardPlanner)
        check_number("every", self._every, whole=True)
        check_number("timed", self._timed, whole=True)
        check_number("max_overhead", self._max_overhead, finite=False)
        every, timed, planned = self._every, self._timed, self._planner.topology
        if not isinstance(self._model, DistributedModelParallel):
            raise ConfigError(
                "PlanMonitor takes a DistributedModelParallel, got a "
                f"{type(self._model).__name__}"
            )
        if planned.world_size != self._world_size:
            raise ConfigError(
                f"the planner is for {planned.world_size} ranks, but training runs on "
                f"{self._world_size}"
            )
        if self._rank == 0 and self._planner.last_model is None:
            raise ConfigError(
                "the planner has planned no model: call planner.remember(model, "
                "sharders) before DistributedModelParallel takes the model"
            )
        for number, reporter in enumerate(self._reporters):
            if not isinstance(reporter, Reporter):
                raise ConfigError(
                    f"reporters[{number}] is {reporter!r:.80}, not a Reporter: pass "
                    "objects, e.g. JsonLinesReporter('phases.jsonl')"
                )
        if not 1 <= timed < every - _LAG or not self._max_overhead > 0:
            raise ConfigError(
                f"timed must be at least 1, every above timed + {_LAG} and "
                f"max_overhead above 0, got timed={timed}, every={every} and "
                f"max_overhead={self._max_overhead}"
            )

    def _new_timer(self) -> PhaseTimer:
        """Hook a timer into the model's current kernels."""
        return PhaseTimer(
            self._model.module, self._model.device, wait=False, on_error=self._fail
        )

    @property
    def is_on(self) -> bool:
        """Whether this rank still measures."""
        return self._error is None

    def step(self) -> None:
        """Call this on every rank after each iteration."""
        if self._is_over:
            return
        now = time.perf_counter()
        allowed = self._max_overhead * (now - self._began)
        self._deadline = now + allowed - self._spent
        self._count += 1
        self._in_window += 1
        message = None
        try:
            if self.is_on:
                message = self._measure(now)
        except Exception as error:
            self._fail(error)
        if self._in_window == self._every:
            self._in_window = 0
            self._exchange(message)
        self._left = time.perf_counter()
        self._spent += self._left - now

    def _measure(self, now: float) -> Any:
        """Time the iterations that are due; return this rank's part of a report."""
        if self._timer.enabled:
            self._timer.end_iteration()
        elif self._count > 1:
            self._intervals.append(now - self._left)
        left = self._every - self._in_window
        if left == _LAG + self._timed:
            self._timer = self._new_timer()
            if self._model.plan != self._plan:
                self._plan = copied(self._model.plan)
                self._intervals.clear()
        elif left == _LAG:
            self._timer.remove()
        if left:
            return None
        intervals, self._intervals = self._intervals, []
        profiles = self._sampler.profile(lambda: time.perf_counter() < self._deadline)
        return self._timer.take_all(), statistics.median(intervals) * 1e3, profiles

    def _exchange(self, message: Any) -> None:
        """Exchange the ranks' measurements; if a rank has failed, end on all ranks."""
        began = time.perf_counter()
        try:
            told = from_all((self._error, message), self._group, _EXCHANGED)
            for rank, (text, _) in enumerate(told):
                if text is not None:
                    raise NeuroShardError(f"rank {rank}: {text}")
        except Exception as error:  # a rank failed or is missing
            self._is_over = True
            self._fail(error)
            if self._error != _CLOSED:
                # On all ranks in the same step, since warnings may be errors.
                text = f"PlanMonitor is off, training goes on: {self._error}"
                warnings.warn(text, stacklevel=3)
            return
        waited = time.perf_counter() - began  # training would wait as long
        self._spent -= waited
        self._deadline += waited
        if self._rank == 0:
            try:
                self._report(*zip(*(found for _, found in told), strict=True))
            except Exception as error:
                self._fail(error)

    def _report(self, iterations_W: Any, interval_ms_W: Any, profiles_W: Any) -> None:
        for profiles in profiles_W:
            self._profiles.update(profiles)
        if self._model.plan != self._plan:  # the times are another plan's
            return
        self._price_plan()
        timed = {times.module for step in iterations_W[0] for times in step}
        stages = stages_of(self._options, timed)
        planned = predicted = predicted_phases(self._planned, stages)
        drifts: tuple[Drift, ...] = ()
        left = self._deadline - time.perf_counter()
        if self._profiles and left > self._price_seconds:
            now = self._planner.relearned(self._profiles)
            predicted = predicted_phases(self._price(now), stages)
            drifts = changed_inputs(self._options, self._planner, now)
        self.last_report = MonitorReport(
            last_iteration=self._count,
            iteration_ms=statistics.median(interval_ms_W),
            planned=planned,
            predicted=predicted,
            measured=measured_phases(iterations_W),
            drifts=drifts,
        )
        logger.info("%s", self.last_report)
        records = self.last_report.records
        self._have_written(lambda reporter: reporter.write_phases(records))

    def _price_plan(self) -> None:
        """Price the current plan for the planned inputs and have it written, once."""
        if self._priced is self._plan:
            return
        of_plan = self._plan, *self._planned_model
        self._options = self._planner.placed_options(*of_plan)
        self._planned = self._price(self._planner)
        self._priced = self._plan
        if self._reporters:
            report = self._planner.evaluate(*of_plan)
            record = PlanRecord.of_report(report, self._count)
            self._have_written(lambda reporter: reporter.write_plan(record))

    def _price(self, planner: NeuroShardPlanner) -> PredictedCosts:
        began = time.perf_counter()
        costs = planner.costs.placed(self._options).predicted
        self._price_seconds = time.perf_counter() - began
        return costs

    def _have_written(self, write: Callable[[Reporter], None]) -> None:
        write_to(self._reporters, write, "training goes on")

    def _fail(self, error: Exception) -> None:
        """Stop measuring on this rank; the others learn of it at the next report."""
        if self._error is None:
            self._error = f"{type(error).__name__}: {error}"
            self._hooks.close()

    def replan(self, *, budget_bytes: int | None = None) -> Replanned | None:
        """Search for a better plan and move tables; all ranks call it, between steps.

        Rank 0 calls `torchrec_neuroshard.replan` while the other ranks wait. Costs are
        the planner's, for the profiles of the inputs seen so far. `apply_moves` moves
        the tables, unless a train pipeline has batches in flight.

        After moves, `model.fused_optimizer` is a new object: pass it to wrappers and
        schedulers that hold the old one.

        Args:
            budget_bytes: Most bytes to move; rank 0's value counts. None sets no limit.

        Returns:
            The outcome; None if the monitor has ended on any rank.

        Raises:
            ConfigError: A setting is not allowed.
            Exception: An error of rank 0's search, raised on all ranks; or an error
                while tables were moved, after which the model is broken.
        """
        mine = self._error, self._sampler.num_under_way
        told = from_all(mine, self._group, _EXCHANGED)
        if any(error is not None for error, _ in told):
            return None

        def search() -> ReplanResult:
            model, sharders = self._planned_model
            return replan(
                self._model.plan,
                planner=self._planner.relearned(self._profiles),
                model=model,
                sharders=sharders,
                budget_bytes=_UNLIMITED if budget_bytes is None else budget_bytes,
            )

        group = dist.group.WORLD
        assert group is not None, "__init__ requires a process group"
        result = first_decides(search, group, "looked for moves")
        reason = self._move(result, any(number for _, number in told))
        self._left = time.perf_counter()
        return Replanned(result=result, applied=reason is None, reason=reason)

    def _move(self, result: ReplanResult, is_under_way: bool) -> str | None:
        """Move the tables; return the reason if they are not moved."""
        if not result.moves:
            return "no moves within the budget pay off"
        if is_under_way:
            return (
                "a train pipeline has batches in flight: let it run until its iterator "
                "ends, then call replan() and continue with a new iterator"
            )
        try:
            apply_moves(self._model, result if self._rank == 0 else None)
        except ConfigError as error:  # on all ranks, before anything was moved
            return str(error)
        self._in_window, self._plan = 0, copied(self._model.plan)
        self._intervals.clear()
        self._timer.remove()
        if self._rank == 0:  # plan for current inputs from now on
            self._planner = self._planner.relearned(self._profiles)
        return None

    def close(self) -> None:
        """Remove the hooks from the model; call this on every rank.

        If ranks keep calling `step`, the monitor ends on all ranks at the next report.
        """
        self._error = self._error or _CLOSED
        self._hooks.close()
        self._have_written(lambda reporter: reporter.close())
