"""`PlanMonitor`: watches the plan of a training job, and changes it when asked to."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from torchrec_neuroshard.errors import ConfigError, NeuroShardError
from torchrec_neuroshard.monitor.inputs import InputSampler
from torchrec_neuroshard.monitor.report import Assessor, Measured, MonitorReport
from torchrec_neuroshard.phase_timer import PhaseTimer
from torchrec_neuroshard.planner.launch.from_first import from_first, portable
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.plans.replan import ReplanResult, apply_moves
from torchrec_neuroshard.search.base import SearchConfig

__all__ = ["PlanMonitor", "Replanned"]

logger = logging.getLogger("torchrec_neuroshard.monitor")

_PATIENCE = timedelta(minutes=5)
"""A rank that does not come to a report for this long ends the monitor."""
_LAG = 2
"""Iterations between the last timed one and the report, for a GPU to get there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanned:
    """What `PlanMonitor.replan` did, the same on all ranks."""

    result: ReplanResult
    """What `replan` found."""
    applied: bool
    """Whether the model has the new plan now."""
    reason: str | None
    """Why it has not."""


class PlanMonitor:
    """Watches the plan of a training job: measures, compares, moves on request.

        monitor = PlanMonitor(model, planner)  # what DistributedModelParallel returned
        for batch in batches:
            train_step(batch)  # or pipeline.progress(batches)
            monitor.step()

    Every `every` iterations a few are timed, phase by phase, and rank 0 logs what was
    predicted beside what was measured, to the logger "torchrec_neuroshard.monitor".
    Inputs are profiled from the ids that enter the sharded modules, and the table whose
    inputs changed most is named. `replan()` looks for better places of the tables with
    these inputs, and moves them.

    A monitor never breaks training: what goes wrong on a rank ends in one warning on
    each, after which nothing more is measured.

    Attributes:
        last_report: On rank 0, what was found last; None before the first report.
    """

    def __init__(
        self,
        model: Any,
        planner: NeuroShardPlanner,
        *,
        every: int = 200,
        timed: int = 5,
        max_overhead: float = 0.005,
    ) -> None:
        """Install the hooks; every rank does, with the same settings.

        Args:
            model: The `DistributedModelParallel` in training.
            planner: Made its plan, or prices it.
            every: Iterations from report to report.
            timed: Iterations of these whose phases are timed.
            max_overhead: Part of the job's time that profiling inputs and predicting
                may take on a rank. What does not fit waits for the next report.

        Raises:
            ConfigError: A setting is outside what it may be, the ranks' settings
                differ, nothing in the model is sharded, the planner is for other ranks
                or knows no model.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "PlanMonitor needs a process group: call "
                "torch.distributed.init_process_group first"
            )
        self.last_report: MonitorReport | None = None
        self._model, self._planner = model, planner
        self._every, self._timed, self._max_overhead = every, timed, max_overhead
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._error: str | None = None
        self._is_over = False
        self._hooks: list[PhaseTimer | InputSampler] = []
        self._count = self._in_window = 0
        self._intervals: list[float] = []
        self._spent = 0.0
        failure = None
        try:
            self._check()
            self._sampler = InputSampler(
                model.module,
                rank=self._rank,
                world_size=self._world_size,
                on_error=self._fail,
            )
            self._hooks.append(self._sampler)
            self._time_phases()
        except Exception as error:
            failure = str(error)
        for rank, told in enumerate(self._all_tell((failure, every, timed))):
            if failure is None and told != (None, every, timed):
                failure = told[0] or (
                    f"rank {rank} has every={told[1]} and timed={told[2]}, rank "
                    f"{self._rank} {every} and {timed}: give all ranks the same"
                )
        if failure is not None:
            self.close()
            raise ConfigError(failure)
        self._began = self._left = time.perf_counter()
        if self._rank == 0:
            try:
                assert planner.last_model is not None, "checked by _check"
                self._assessor = Assessor(planner, *planner.last_model)
                self._assessor.planned(model.plan)
            except Exception as error:
                self._fail(error)

    def _check(self) -> None:
        """Raise a `ConfigError` where these cannot be watched, or not in this way."""
        if not isinstance(self._model, DistributedModelParallel):
            raise ConfigError(
                "PlanMonitor takes what DistributedModelParallel returned, got a "
                f"{type(self._model).__name__}"
            )
        planned = int(self._planner.topology.world_size)
        if planned != self._world_size:
            raise ConfigError(
                f"the planner is for {planned} ranks, training runs on "
                f"{self._world_size}"
            )
        if self._rank == 0 and self._planner.last_model is None:
            raise ConfigError(
                "the planner has planned no model: call planner.remember(model, "
                "sharders) before DistributedModelParallel takes the model"
            )
        if not 1 <= self._timed < self._every - _LAG or not self._max_overhead > 0:
            raise ConfigError(
                f"timed must be at least 1, every above timed + {_LAG} and "
                f"max_overhead above 0, got timed={self._timed}, every={self._every} "
                f"and max_overhead={self._max_overhead}"
            )

    def _time_phases(self) -> None:
        """Install a timer of the model's present kernels."""
        self._timer = PhaseTimer(
            self._model.module, self._model.device, wait=False, on_error=self._fail
        )
        self._timer.enabled = False
        self._hooks.append(self._timer)

    def _all_tell(self, message: Any) -> list[Any]:
        """Give every rank's message to all ranks; they wait for each other."""
        told: list[Any] = [None] * self._world_size
        dist.all_gather_object(told, message, group=self._group)
        return told

    @property
    def is_on(self) -> bool:
        """Whether this rank still measures."""
        return self._error is None

    def step(self) -> None:
        """Say that an iteration is over; on every rank, after each."""
        if self._is_over:
            return
        began = time.perf_counter()
        self._count += 1
        self._in_window += 1
        is_due = self._in_window == self._every
        message = None
        try:
            if self._error is None:
                self._measure(began)
                message = self._message() if is_due else None
        except Exception as error:
            self._fail(error)
        if is_due:
            self._in_window = 0
            self._exchange(message)
        self._left = time.perf_counter()
        self._spent += self._left - began

    def _measure(self, now: float) -> None:
        if self._timer.enabled:
            self._timer.end_iteration()
        elif self._count > 1:
            self._intervals.append(now - self._left)
        if self._in_window == 1:
            self._sampler.start()
        # On all ranks after the same iteration, so that they do it at once.
        if self._seconds_left(now) > 0:
            self._sampler.count_one()
        first = self._every - _LAG - self._timed
        if self._in_window == first:
            self._timer.take()
            self._timer.enabled = True
        elif self._in_window == first + self._timed:
            self._timer.enabled = False

    def _seconds_left(self, now: float) -> float:
        """Seconds that the monitor may take now."""
        return self._max_overhead * (now - self._began) - self._spent

    def _exchange(self, message: dict[str, Any] | None) -> None:
        """Tell all ranks what was measured; where one has failed, all are off."""
        began = time.perf_counter()
        try:
            told = self._all_tell((self._error, message))
            for rank, (text, _) in enumerate(told):
                if text is not None:
                    raise NeuroShardError(f"rank {rank}: {text}")
        except Exception as error:  # that, or a rank is not there
            self._is_over = True
            self._fail(error)
            return
        self._spent -= time.perf_counter() - began  # training waits for ranks, too
        try:
            if self._rank == 0:
                self._report([m for _, m in told])
        except Exception as error:
            self._fail(error)

    def _message(self) -> dict[str, Any]:
        intervals, self._intervals = self._intervals, []
        return {
            "iterations": self._timer.take_all(),
            "interval_ms": statistics.median(intervals) * 1e3,
            "profiles": self._sampler.take(),
        }

    def _report(self, told: Sequence[Any]) -> None:
        for message in told:
            self._assessor.profiles.update(message["profiles"])
        topology = self._planner.topology
        measured = Measured.put_together(
            [m["iterations"] for m in told],
            statistics.median(m["interval_ms"] for m in told),
            one_clock=self._model.device.type == "cpu"
            and topology.local_world_size >= topology.world_size,
        )
        self.last_report = self._assessor.assess(
            self._model.plan,
            measured,
            last_iteration=self._count,
            seconds=self._seconds_left(time.perf_counter()),
        )
        logger.info("%s", self.last_report)

    def _fail(self, error: Exception) -> None:
        """Measure no more on this rank, with one warning."""
        if self._error is None:
            self._error = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"PlanMonitor is off, training goes on: {self._error}", stacklevel=3
            )
            self._remove_hooks()

    def replan(
        self,
        *,
        budget_bytes: int | None = None,
        executable_only: bool = True,
        config: SearchConfig | None = None,
    ) -> Replanned | None:
        """Look for better places and move tables; on every rank, between iterations.

        Rank 0 calls `torchrec_neuroshard.replan` while the others wait. Costs are the
        planner's, with the profiles of the inputs seen so far. The moves are made by
        `apply_moves`, unless a train pipeline has batches under way.

        After moves `model.fused_optimizer` is a new object: give it to the wrappers and
        schedulers that hold the old one.

        Args:
            budget_bytes: Most to move, as rank 0 gives it. None: whatever pays.
            executable_only: See `torchrec_neuroshard.replan`.
            config: How hard to look.

        Returns:
            What was done. None where the monitor is off on any rank.

        Raises:
            ConfigError: A setting is outside what it may be.
            Exception: What the search raised on rank 0, on all ranks; or what failed
                after moves had begun, when the model is not sound any more.
        """
        told = self._all_tell((self._error, self._sampler.num_under_way))
        if any(error is not None for error, _ in told):
            return None
        result: Any = None
        wrong: BaseException | None = None
        if self._rank == 0:
            try:
                result = self._assessor.replan(
                    self._model.plan,
                    budget_bytes=budget_bytes,
                    executable_only=executable_only,
                    config=config,
                )
            except BaseException as error:
                wrong = error
        group = dist.group.WORLD
        assert group is not None, "there is one since this object was made"
        result, wrong = from_first((result, portable(wrong)), group, "looked for moves")
        if wrong is not None:
            raise wrong
        reason = self._move(result, any(number for _, number in told))
        self._left = time.perf_counter()
        return Replanned(result=result, applied=reason is None, reason=reason)

    def _move(self, result: ReplanResult, is_under_way: bool) -> str | None:
        """Carry out moves; say why not."""
        if not result.moves:
            return "no moves within the budget pay"
        if is_under_way:
            return (
                "a train pipeline has batches under way: let it run until its iterator "
                "ends, call replan() then, and go on with a new iterator"
            )
        try:
            apply_moves(self._model, result if self._rank == 0 else None)
        except ConfigError as error:  # on all ranks alike, with nothing moved
            return str(error)
        self._in_window = 0
        self._intervals.clear()
        self._hooks.pop().remove()  # the timer
        self._time_phases()
        if self._rank == 0:
            self._assessor.follow()
        return None

    def _remove_hooks(self) -> None:
        while self._hooks:  # the last to come is the first to go
            self._hooks.pop().remove()

    def close(self) -> None:
        """End it, on every rank: take the hooks out of the model."""
        self._error, self._is_over = self._error or "closed", True
        self._remove_hooks()
