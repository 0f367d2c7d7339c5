"""Plans of all planners for a task, made in separate processes.

By default two planners run at the same time. Nothing is measured meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import multiprocessing
import signal
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import PlannerError

from harness.models import build_collection
from planner_comparison.clusters import CLUSTERS
from planner_comparison.paired import OURS
from planner_comparison.plans import NotRunError, RunPlan, read_plan
from planner_comparison.rivals import (
    Costs,
    Rival,
    Sharder,
    load_costs,
    make_rivals,
)
from planner_comparison.tasks import Task
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.errors import NeuroShardError

TRAINED = Path(__file__).parents[1] / "data" / "trained"
"""Folder of the comparison's nets, policies and bundles. It is not in the checkout;
`git checkout eadbc3d -- benchmarks/data/trained` restores those of the committed pages.
"""


class PlanTimeoutError(Exception):
    """A planner exceeded its time limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one planner on one task."""

    status: str
    """`plan`, `no plan`, `failed`, `timed out` or `not run`."""
    seconds: float
    reason: str = ""
    plan: RunPlan | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningSettings:
    """Planners, their costs and their time limits."""

    names: tuple[str, ...] | None = None
    """Names of planners. None: all."""
    trained: Path = TRAINED
    """Folder of the comparison's nets and policies. Planners without their nets are
    left out."""
    cost_model: str = "auto"
    device: str = "cpu"
    plan_seconds: float = 60.0
    """Time limit of a planner."""
    solver_seconds: float = 4.0
    few_sets: str | None = None
    """Bundle of the device that was calibrated on few sets."""
    other: str | None = None
    """Bundle of another device, for one more planner."""

    def rivals(self) -> list[Rival]:
        """Return the planners."""
        model = load_cost_model(self.cost_model, device_type=self.device)
        return make_rivals(
            self.names,
            self.trained,
            self.solver_seconds,
            model.hardware,
            self.few_sets,
            self.other,
        )

    def costs(self, task: Task) -> Costs:
        """Return the costs of a task's ranks on its cluster."""
        return load_costs(
            self.cost_model,
            self.device,
            CLUSTERS[task.cluster],
            task.world_size,
            task.kernels_faster,
        )


class Planners:
    """Processes that make plans."""

    def __init__(self, settings: PlanningSettings, num_processes: int) -> None:
        """Take the settings. The first task starts the processes.

        Args:
            settings: Settings of the planners.
            num_processes: Number of processes. 0: plan in this process.
        """
        self._settings, self._num_processes = settings, num_processes
        self._seconds = {r.name: 0.0 for r in settings.rivals()}
        self._pool: ProcessPoolExecutor | None = None

    def plan(self, task: Task) -> dict[str, Outcome]:
        """Return planner -> outcome on a task."""
        if not self._num_processes:
            _prepare(self._settings)
            return {name: _plan(name, task) for name in self._seconds}
        pool = self._pool = self._pool or ProcessPoolExecutor(
            self._num_processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
            initargs=(self._settings,),
        )
        # The slowest planners go first, so that processes end at about the same time.
        order = sorted(self._seconds, key=lambda name: -self._seconds[name])
        pending = {name: pool.submit(_plan, name, task) for name in order}
        outcomes = {}
        for name in self._seconds:
            try:
                outcomes[name] = pending[name].result()
            except BrokenProcessPool:
                outcomes[name] = Outcome(
                    status="failed", seconds=math.nan, reason="a planning process died"
                )
                self.close()
            self._seconds[name] = outcomes[name].seconds
        return outcomes

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


class _Worker:
    """State that a planning process keeps between tasks."""

    settings: PlanningSettings
    rivals: dict[str, Rival]


def _prepare(settings: PlanningSettings) -> None:
    """Load the planners of this process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    _Worker.settings = settings
    _Worker.rivals = {r.name: r for r in settings.rivals()}


def _plan(name: str, task: Task) -> Outcome:
    settings = _Worker.settings
    outcome = ask(
        _Worker.rivals[name],
        task,
        settings.costs(task),
        settings.device,
        settings.plan_seconds,
    )
    gc.collect()
    return outcome


def ask(rival: Rival, task: Task, costs: Costs, device: str, limit: float) -> Outcome:
    """Return the outcome of a planner on a task.

    Args:
        rival: The planner.
        task: The task.
        costs: Costs for planners that take a cost model.
        device: `cpu` or `cuda`.
        limit: Time limit of the planner [s].
    """
    start = time.perf_counter()

    def ended(status: str, reason: str = "") -> Outcome:
        return Outcome(
            status=status,
            seconds=time.perf_counter() - start,
            reason=" ".join(reason.split())[:300],
        )

    try:
        planner = rival.make(task, costs, device)  # which may train nets
        module = build_collection(task.tables)
        with _alarm(limit):
            start = time.perf_counter()
            found = planner.plan(module, [Sharder()])
            seconds = time.perf_counter() - start
    except PlanTimeoutError:
        return ended("timed out", f"not finished in {limit:g} s")
    except (PlannerError, NeuroShardError) as error:
        return ended("no plan", str(error))
    except Exception as error:  # an error in one planner must not end the comparison
        return ended("failed", f"{type(error).__name__}: {error}")
    notes = _notes(planner)
    if notes.get("fallback") and rival.name != OURS:
        # The search found no plan, and the plan is TorchRec's.
        return ended("no plan", notes["fallback"])
    try:
        plan = read_plan(found, task)
    except NotRunError as error:
        return ended("not run", str(error))
    return Outcome(status="plan", seconds=seconds, plan=plan, notes=notes)


def _notes(planner: EmbeddingShardingPlanner) -> dict[str, Any]:
    result = getattr(planner, "last_result", None)
    if result is None:
        return {}
    bounded = result.lower_bound_ms > 0
    return {
        "planner_predicts_ms": result.predicted.critical_path_ms,
        "lower_bound_ms": result.lower_bound_ms if bounded else None,
        "gap": result.gap if bounded and math.isfinite(result.gap) else None,
        "search_seconds": result.search_seconds,
        "num_evaluated": result.num_evaluated,
        "fallback": result.fallback,
        "warnings": list(result.warnings),
    }


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise PlanTimeoutError in the main thread after `seconds`."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise PlanTimeoutError

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old)
