"""`PlanMonitor`: watches a training loop, and changes its plan when that pays."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_neuroshard.errors import ConfigError, NeuroShardError
from torchrec_neuroshard.monitor.assessment import (
    Assessor,
    Measured,
    MonitorReport,
    Offer,
)
from torchrec_neuroshard.monitor.exchange import Exchange
from torchrec_neuroshard.monitor.inputs import InputSampler
from torchrec_neuroshard.monitor.kernel_records import (
    KernelRecords,
    TimedKernel,
    timed_kernels,
)
from torchrec_neuroshard.monitor.move_times import MoveRates, fill_ms_per_byte
from torchrec_neuroshard.phase_timer import PhaseTimer
from torchrec_neuroshard.planner.launch.from_first import portable
from torchrec_neuroshard.planner.planners import NeuroShardPlanner
from torchrec_neuroshard.planner.plans.plan_files import save_plan
from torchrec_neuroshard.planner.plans.replan import apply_moves

__all__ = ["PlanMonitor", "Replanned"]

logger = logging.getLogger("torchrec_neuroshard.monitor")

_LAG = 2
"""Iterations between the last timed one and the report, for a GPU to get there."""
_UNLIMITED = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """See `PlanMonitor`."""

    every: int
    timed: int
    max_overhead: float
    min_gain: float
    horizon: float
    budget_bytes: int | None
    records: str | None
    plan_file: str | None

    def __post_init__(self) -> None:
        if self.timed < 1 or self.every < self.timed + _LAG:
            raise ConfigError(
                f"timed must be at least 1 and every at least timed + {_LAG}, got "
                f"timed={self.timed} and every={self.every}"
            )
        if not 0 < self.max_overhead <= 1:
            raise ConfigError(
                f"max_overhead is a part of the time, above 0 and at most 1; got "
                f"{self.max_overhead}"
            )
        if not 0 <= self.min_gain < 1:
            raise ConfigError(f"min_gain must be in [0, 1), got {self.min_gain}")
        if not self.horizon > 0:
            raise ConfigError(f"horizon must be above 0, got {self.horizon}")
        if self.budget_bytes is not None and self.budget_bytes < 0:
            raise ConfigError(
                f"budget_bytes must be at least 0, got {self.budget_bytes}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanned:
    """What `PlanMonitor.replan` did."""

    offer: Offer | None
    """The better plan; None where none was found."""
    applied: bool
    """Whether the model has it now."""
    plan_file: Path | None
    """Where it is stored for the next start, if it is."""
    reason: str | None
    """Why it was not applied."""
    seconds: float
    """What moving took."""


class PlanMonitor:
    """Watches the plan of a training job: measures, compares, finds better ones.

        monitor = PlanMonitor(model, planner)  # what DistributedModelParallel returned
        for batch in batches:
            train_step(batch)  # or pipeline.progress(batches)
            monitor.step()

    Every `every` iterations a few are timed, phase by phase, and rank 0 logs what was
    predicted beside what was measured, to the logger "torchrec_neuroshard.monitor".
    Inputs are profiled from the ids that enter the sharded modules. Where a new plan
    would pay, that is a warning of the same logger, and `replan()` carries it out.

    A monitor never breaks training, nor does it hold it up: ranks do not wait for each
    other in `step()`, and what goes wrong ends in one warning, after which nothing more
    is measured.

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
        min_gain: float = 0.02,
        horizon: float = 10_000,
        budget_bytes: int | None = None,
        records: str | Path | None = None,
        plan_file: str | Path | None = None,
    ) -> None:
        """Install the hooks; every rank does, with the same settings.

        Args:
            model: The `DistributedModelParallel` in training.
            planner: Made its plan, or prices it.
            every: Iterations from report to report.
            timed: Iterations of these whose phases are timed.
            max_overhead: Part of the job's time that profiling inputs, predicting and
                searching may take on a rank. What does not fit waits for the next
                report.
            min_gain: Part of an iteration that a new plan must save.
            horizon: Iterations within which its moves must pay, to be told unasked.
            budget_bytes: Most that it may move. None: whatever pays.
            records: File for rank 0 to keep fused kernels' times in, for
                `neuroshard calibrate --records`. None: they are not kept.
            plan_file: File for plans that need a restart. None: they are not stored.

        Raises:
            ConfigError: A setting is outside what it may be, the ranks' settings
                differ, nothing in the model is sharded, the planner is for other ranks
                or knows no model.
        """
        settings: dict[str, Any] = {
            "every": every,
            "timed": timed,
            "max_overhead": max_overhead,
            "min_gain": min_gain,
            "horizon": horizon,
            "budget_bytes": budget_bytes,
            "records": None if records is None else str(records),
            "plan_file": None if plan_file is None else str(plan_file),
        }
        self.last_report: MonitorReport | None = None
        self._model = model
        self._error: str | None = None
        self._records: KernelRecords | None = None
        self._exchange = Exchange()
        self._is_silent = False
        self._is_first = self._exchange.rank == 0
        failure = _misfit(model, planner, self._exchange)
        try:
            self._settings = _Settings(**settings)
            if failure is None:
                self._hook(planner)
        except Exception as error:
            failure = failure or _text(error)
        try:
            self._agree(failure, settings)
        except Exception:
            self._remove_hooks()
            raise
        self._count = self._in_window = 0
        self._intervals: list[float] = []
        self._spent = 0.0
        self._began = self._left = time.perf_counter()
        self._tells_kernels, self._has_warned = True, False
        self._num_plans = 0
        self._kernels: list[Any] = [None] * self._exchange.world_size
        self._assessor: Assessor | None = None
        rates = self._measure_moves(planner)
        if self._is_first and rates is not None:
            self._begin(planner, rates)
        if self._error is None:
            self._sampler.start()

    def _hook(self, planner: NeuroShardPlanner) -> None:
        topology = planner.topology
        self._one_clock = (
            self._model.device.type == "cpu"
            and topology.local_world_size >= topology.world_size
        )
        self._sampler = InputSampler(
            self._model.module,
            rank=self._exchange.rank,
            world_size=self._exchange.world_size,
            on_error=self._fail,
        )
        self._timer = self._new_timer()

    def _measure_moves(self, planner: NeuroShardPlanner) -> MoveRates | None:
        """Time on all ranks what moves are made of, a few MiB of it.

        Where a rank cannot, all monitors are off.
        """
        on_cpu = self._model.device.type == "cpu"
        fill = send = 0.0
        failure = None
        try:
            fill = fill_ms_per_byte(self._model.device)
            send = 0.0 if on_cpu else _link_ms_per_byte(planner)
        except Exception as error:
            failure = _text(error)
        if on_cpu:
            send = self._exchange.send_ms_per_byte()
        failures, fills, sends = zip(
            *self._exchange.all_tell((failure, fill, send)), strict=True
        )
        for rank, text in enumerate(failures):
            if text is not None:
                self._fail(NeuroShardError(f"rank {rank}: {text}"))
                return None
        return MoveRates(fill_ms_per_byte=max(fills), send_ms_per_byte=max(sends))

    def _begin(self, planner: NeuroShardPlanner, rates: MoveRates) -> None:
        """Set up what rank 0 alone does."""
        settings = self._settings
        budget = settings.budget_bytes
        try:
            assert planner.last_model is not None
            module, sharders = planner.last_model
            self._module, self._planner = module, planner
            self._assessor = Assessor(
                planner,
                module,
                sharders,
                min_gain=settings.min_gain,
                budget_bytes=_UNLIMITED if budget is None else budget,
                horizon=settings.horizon,
                rates=rates,
            )
            self._assessor.planned(self._model.plan)
            if settings.records is not None:
                batch_size = planner.batch_size * self._exchange.world_size
                self._records = KernelRecords(
                    Path(settings.records),
                    device=self._model.device,
                    batch_size=batch_size,
                    slowdown=planner.costs.comms_model.compute_slowdown,
                )
        except Exception as error:
            self._fail(error)

    def _agree(self, failure: str | None, settings: Mapping[str, Any]) -> None:
        """Raise what is wrong on any rank on all of them."""
        told = self._exchange.all_tell((failure, settings))
        for rank, (text, settings) in enumerate(told):
            if text is not None:
                raise ConfigError(text)
            if settings != told[0][1]:
                raise ConfigError(
                    f"rank {rank} has other settings than rank 0: {settings} against "
                    f"{told[0][1]}; give all ranks the same"
                )

    def _new_timer(self) -> PhaseTimer:
        timer = PhaseTimer(
            self._model.module, self._model.device, wait=False, on_error=self._fail
        )
        timer.enabled = False
        return timer

    @property
    def seconds_spent(self) -> float:
        """What `step` took on this rank, all calls together [s]."""
        return self._spent

    @property
    def is_on(self) -> bool:
        """Whether this rank still measures."""
        return self._error is None

    def step(self) -> None:
        """Say that an iteration is over; on every rank, after each."""
        began = time.perf_counter()
        self._step(began)
        self._left = time.perf_counter()
        self._spent += self._left - began

    def _step(self, now: float) -> None:
        self._count += 1
        self._in_window += 1
        try:
            if self._error is None:
                self._measure(now)
        except Exception as error:
            self._fail(error)
        # Whatever went wrong, the other ranks' messages meet one of this rank.
        self._listen()
        if self._in_window == self._settings.every:
            self._in_window = 0
            self._tell()

    def _measure(self, now: float) -> None:
        settings = self._settings
        if self._timer.enabled:
            self._timer.end_iteration()
        elif self._count > 1:
            self._intervals.append(now - self._left)
        # On all ranks after the same iteration, so that they do it at once.
        if self._allowance(now) > 0:
            self._sampler.count_one()
        first = settings.every - _LAG - settings.timed
        if self._in_window == first:
            self._timer.forget()
            self._timer.enabled = True
        elif self._in_window == first + settings.timed:
            self._timer.enabled = False

    def _allowance(self, now: float) -> float:
        """Seconds that the monitor may take now."""
        return self._settings.max_overhead * (now - self._began) - self._spent

    def _tell(self) -> None:
        """Begin to tell rank 0 what was measured; also when nothing was."""
        if self._is_silent:
            return
        message: dict[str, Any] = {"error": self._error}
        try:
            if self._error is None:
                message = self._message()
        except Exception as error:
            self._fail(error)
            message = {"error": self._error}
        try:
            self._exchange.start(message)
        except Exception as error:
            self._fail(error, is_silent=True)
        if self._error is None:
            self._sampler.start()

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "error": None,
            "iterations": self._timer.take_all(),
            "interval_ms": statistics.median(self._intervals) * 1e3
            if self._intervals
            else None,
            "count": self._count,
            "num_plans": self._num_plans,
            "kernels": self._timer.kernels if self._tells_kernels else None,
            "profiles": self._sampler.take(),
        }
        self._intervals.clear()
        self._tells_kernels = False
        while message["profiles"] and not self._exchange.fits(message):
            message["profiles"].popitem()
        return message

    def _listen(self) -> None:
        """On rank 0, take what the ranks told, once it is there."""
        if self._is_silent:
            return
        try:
            told = self._exchange.finished()
        except Exception as error:
            self._fail(error, is_silent=True)
            return
        if told is None or self._error is not None:
            return
        try:
            for rank, message in enumerate(told):
                if message["error"] is not None:
                    raise NeuroShardError(f"rank {rank}: {message['error']}")
            self._report(told)
        except Exception as error:
            self._fail(error)

    def _report(self, told: Sequence[dict[str, Any]]) -> None:
        assert self._assessor is not None
        for rank, message in enumerate(told):
            self._kernels[rank] = message["kernels"] or self._kernels[rank]
            self._assessor.profiles.update(message["profiles"])
        intervals = [m["interval_ms"] for m in told if m["interval_ms"] is not None]
        if not intervals or told[0]["num_plans"] != self._num_plans:
            return  # of a plan that is gone
        iterations_W = [m["iterations"] for m in told]
        report = self._assessor.assess(
            self._model.plan,
            Measured.of(
                iterations_W,
                statistics.median(intervals),
                one_clock=self._one_clock,
            ),
            last_iteration=told[0]["count"],
            seconds=self._allowance(time.perf_counter()),
        )
        self.last_report = report
        is_news = report.offer is not None and not self._has_warned
        self._has_warned = self._has_warned or is_news
        logger.log(logging.WARNING if is_news else logging.INFO, "%s", report)
        if self._records is not None:
            timed: list[TimedKernel] = []
            for iterations, kernels in zip(iterations_W, self._kernels, strict=True):
                timed += timed_kernels(iterations, kernels)
            self._records.add(timed, self._assessor.tables)

    def _fail(self, error: Exception, is_silent: bool = False) -> None:
        """Turn the monitor off on this rank, with one warning.

        Args:
            error: What went wrong.
            is_silent: Whether the ranks cannot tell each other anything from now on.
        """
        if self._error is None:
            self._error = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"PlanMonitor is off, training goes on: {self._error}", stacklevel=3
            )
            self._remove_hooks()
        self._is_silent = self._is_silent or is_silent

    def replan(
        self, *, budget_bytes: int | None = None, seconds: float = 20.0
    ) -> Replanned | None:
        """Look for a better plan and carry it out; on every rank, between iterations.

        Costs are the planner's, with the profiles of the inputs seen so far, and times
        what was measured over what was predicted. Moves that TorchRec can make are made
        by `apply_moves`, unless a train pipeline has batches under way. Other plans go
        to the monitor's `plan_file` for the next start from a checkpoint.

        After moves `model.fused_optimizer` is a new object: give it to the wrappers and
        schedulers that hold the old one.

        Args:
            budget_bytes: Most to move. None: what the monitor was told.
            seconds: What the search may take, on rank 0, while the others wait.

        Returns:
            What was done, the same on all ranks. None where the monitor is off on any.

        Raises:
            ConfigError: A setting is outside what it may be.
            Exception: What failed after moves had begun; the model is not sound then.
        """
        failure = None
        if budget_bytes is not None and budget_bytes < 0:
            failure = f"budget_bytes must be at least 0, got {budget_bytes}"
        if not seconds > 0:
            failure = f"seconds must be above 0, got {seconds}"
        state = failure, self._error, self._sampler.num_under_way
        told = self._exchange.all_tell(state)
        for text, *_ in told:
            if text is not None:
                raise ConfigError(text)
        if any(error is not None for _, error, _ in told):
            return None
        offer, wrong = None, None
        if self._is_first:
            try:
                offer = self._find(budget_bytes, seconds)
            except BaseException as error:
                wrong = error
        offer, wrong = self._exchange.from_first((offer, portable(wrong)))
        if isinstance(wrong, Exception):
            self._fail(NeuroShardError(_text(wrong)))
            return None
        if wrong is not None:
            raise wrong
        done = self._carry_out(offer, sum(number for *_, number in told))
        self._left = time.perf_counter()
        return done

    def _find(self, budget_bytes: int | None, seconds: float) -> Offer | None:
        """Look for moves; else for a plan to start again with, if it can be stored."""
        assert self._assessor is not None
        report = self.last_report
        iteration_ms = 0.0 if report is None else report.measured.iteration_ms
        for executable_only in (True, False):
            if executable_only or self._settings.plan_file is not None:
                offer = self._assessor.look(
                    self._model.plan,
                    iteration_ms,
                    seconds=seconds,
                    budget_bytes=budget_bytes,
                    executable_only=executable_only,
                )
                if offer is not None:
                    return offer
        return None

    def _carry_out(self, offer: Offer | None, num_under_way: int) -> Replanned:
        reason, began = None, time.perf_counter()
        if offer is None:
            reason = "no plan was found that saves enough"
        elif num_under_way:
            reason = (
                "a train pipeline has batches under way: let it run until its iterator "
                "ends, call replan() then, and go on with a new iterator"
            )
        elif not offer.result.executable:
            reason = "TorchRec cannot make these moves without a restart"
        else:
            try:
                apply_moves(self._model, offer.result if self._is_first else None)
            except ConfigError as error:  # on all ranks alike, with nothing moved
                reason = str(error)
        seconds = time.perf_counter() - began
        if reason is None:
            assert offer is not None
            self._follow(offer, seconds)
        path = self._settings.plan_file
        is_stored = False
        if offer is not None and reason is not None and path is not None:
            if self._is_first:
                is_stored = self._store(offer, Path(path))
            is_stored = self._exchange.from_first(is_stored)
        return Replanned(
            offer=offer,
            applied=reason is None,
            plan_file=Path(path) if is_stored and path is not None else None,
            reason=reason,
            seconds=seconds if reason is None else 0.0,
        )

    def _follow(self, offer: Offer, seconds: float) -> None:
        """Watch the new plan from now on."""
        self._num_plans += 1
        self._in_window = 0
        self._intervals.clear()
        self._timer.remove()
        self._timer = self._new_timer()  # kernels are new
        self._tells_kernels, self._has_warned = True, False
        if self._assessor is not None:
            self._assessor.follow(offer, seconds)

    def _store(self, offer: Offer, path: Path) -> bool:
        try:
            save_plan(
                offer.result.plan, path, model=self._module, planner=self._planner
            )
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _remove_hooks(self) -> None:
        for part in ("_timer", "_sampler"):
            if hasattr(self, part):
                getattr(self, part).remove()

    def close(self) -> None:
        """End it: take the hooks out of the model, complete the file of records."""
        self._error = self._error or "closed"
        self._is_silent = True
        self._remove_hooks()
        if self._records is not None:
            self._records.close()


def _text(error: BaseException) -> str:
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def _link_ms_per_byte(planner: NeuroShardPlanner) -> float:
    """What a byte to another rank takes, by the model of collectives."""
    sent_bytes = np.full((1, int(planner.topology.world_size)), float(2**24))
    return float(planner.costs.comms_model.index_all_to_all(sent_bytes).max()) / 2**24


def _misfit(model: Any, planner: Any, exchange: Exchange) -> str | None:
    """Say why a model and a planner cannot be watched together, if so."""
    if not all(hasattr(model, name) for name in ("module", "plan", "device")):
        return (
            "PlanMonitor watches what DistributedModelParallel returned, got a "
            f"{type(model).__name__}"
        )
    if not isinstance(planner, NeuroShardPlanner):
        return (
            "PlanMonitor prices plans by a NeuroShardPlanner, got a "
            f"{type(planner).__name__}"
        )
    world_size = exchange.world_size
    if int(planner.topology.world_size) != world_size:
        return (
            f"the planner is for {planner.topology.world_size} ranks, training runs on "
            f"{world_size}"
        )
    if exchange.rank == 0 and planner.last_model is None:
        return (
            "the planner has planned no model: call planner.remember(model, sharders) "
            "before DistributedModelParallel takes the model"
        )
    return None
