"""Reporters write a plan's predicted costs and training's measured times.

    monitor = PlanMonitor(model, planner, reporters=[JsonLinesReporter("times.jsonl")])

`PlanMonitor` passes its plan and every report to them, on rank 0. A reporter is also a
`PlanReporter` of TorchRec's planning API (since 1.9): any planner of TorchRec takes the
result of its `build_stats` as `stats`.
"""

from __future__ import annotations

import abc
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import (
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.errors import check_kind
from torchrec_neuroshard.files import check_outputs, json_text, to_fields
from torchrec_neuroshard.planner.option_facts import device_tier
from torchrec_neuroshard.report import PlanReport

logger = logging.getLogger(__name__)

_SHARD_PHASES = (*PHASES[1:], "prefetch_compute")
"""Phases of a shard in TorchRec's `Perf`, where index exchanges are in `fwd_comms`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """A plan's predicted time and memory on each rank."""

    plan: str = ""
    """SKU that TorchRec plans for; "" in training."""
    iteration: int = 0
    """Iteration after which training has this plan."""
    phases_ms: Mapping[str, tuple[float, ...]]
    """Phase -> each rank's time."""
    used_bytes: tuple[float, ...]
    """Memory that each rank's shards need, where fused tables are stored."""
    memory_bytes: tuple[int | None, ...]
    """Memory that each rank has for shards; None if unknown."""
    unit: str = "ms"
    """Unit of the phases."""

    @classmethod
    def of_report(cls, report: PlanReport, iteration: int) -> PlanRecord:
        """Return the record of a planner's report."""
        ranks = report.ranks
        return cls(
            iteration=iteration,
            phases_ms={p: tuple(getattr(r.costs, p) for r in ranks) for p in PHASES},
            used_bytes=tuple(r.used_bytes for r in ranks),
            memory_bytes=tuple(r.memory_bytes for r in ranks),
        )

    @classmethod
    def of_options(
        cls, plan: str, options: Sequence[ShardingOption], topology: Topology
    ) -> PlanRecord:
        """Return the record of a plan by one of TorchRec's planners.

        Args:
            plan: SKU that the plan is for.
            options: The plan's options, placed and estimated.
            topology: The devices, with the memory that is left for shards.
        """
        tier = device_tier(topology)

        def sums(part: str, field: str) -> tuple[float, ...]:
            """Add up a field of the shards' perf or storage, if known, on each rank."""
            found = [0.0] * len(topology.devices)
            for shard in (shard for option in options for shard in option.shards):
                found[shard.rank] += getattr(getattr(shard, part), field, 0.0)
            return tuple(found)

        return cls(
            plan=plan,
            phases_ms={phase: sums("perf", phase) for phase in _SHARD_PHASES},
            used_bytes=sums("storage", tier),
            memory_bytes=tuple(int(getattr(d.storage, tier)) for d in topology.devices),
        )

    @property
    def scalars(self) -> dict[str, float]:
        """The plan's figures by name, e.g. "fwd_compute_ms/rank_0"."""
        times = {
            f"{phase}_{self.unit}/rank_{rank}": ms
            for phase, by_rank in self.phases_ms.items()
            for rank, ms in enumerate(by_rank)
        }
        used = enumerate(self.used_bytes)
        return times | {f"used_gib/rank_{r}": size / 2**30 for r, size in used}


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRecord:
    """Planned, predicted and measured time of one phase in training."""

    iteration: int
    """Last iteration of the measured stretch."""
    rank: int | None = None
    """Rank; None for all ranks together."""
    phase: str
    """One of `costs.simulator.PHASES`, or "iteration" for the whole iteration."""
    planned_ms: float | None = None
    """Time predicted for the inputs that were planned for."""
    predicted_ms: float | None = None
    """Time predicted for the current inputs."""
    measured_ms: float | None = None
    """Measured time; None if the phase was not timed."""
    unit: str = "ms"

    @property
    def name(self) -> str:
        """Name, e.g. "fwd_compute_ms/rank_0" or "iteration_ms/all_ranks"."""
        where = "all_ranks" if self.rank is None else f"rank_{self.rank}"
        return f"{self.phase}_{self.unit}/{where}"

    @property
    def scalars(self) -> dict[str, float]:
        """The known times, by "planned", "predicted" and "measured"."""
        kinds = ("planned", "predicted", "measured")
        times = {kind: getattr(self, f"{kind}_ms") for kind in kinds}
        return {kind: ms for kind, ms in times.items() if ms is not None}


class Reporter(abc.ABC):
    """Writes plans and their times in training to a file or tracking tool.

    A reporter that raises an exception is dropped with one warning; training and
    planning go on.
    """

    @abc.abstractmethod
    def write_plan(self, plan: PlanRecord) -> None:
        """Write a plan's predicted costs."""

    @abc.abstractmethod
    def write_phases(self, phases: Sequence[PhaseRecord]) -> None:
        """Write the phases of one stretch of training."""

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Close files; the next write opens them again."""

    def build_stats(self, ctx: Any, sku: str) -> list[Stats]:
        """Return stats for a TorchRec planner: TorchRec's own, and this reporter's.

        Args:
            ctx: TorchRec's `PlannerSessionContext`; not used.
            sku: Name of the plan in the output.
        """
        return [EmbeddingStats(), _WrittenStats(self, sku)]


class _WrittenStats(Stats):
    """Writes a plan that one of TorchRec's planners found."""

    def __init__(self, reporter: Reporter, sku: str) -> None:
        self._reporters, self._sku = [reporter], sku

    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        storage_reservation: StorageReservation,
        best_plan: Sequence[ShardingOption],
        **_: Any,
    ) -> None:
        """See `Stats`; writes nothing if the search found no plan."""
        if not sharding_plan.plan:
            return

        def write(reporter: Reporter) -> None:
            room = storage_reservation.last_reserved_topology or topology
            reporter.write_plan(PlanRecord.of_options(self._sku, best_plan, room))

        write_to(self._reporters, write, "planning goes on")


def write_to(
    reporters: list[Reporter], write: Callable[[Reporter], None], goes_on: str
) -> None:
    """Write to each reporter; one that fails is removed with a warning.

    Args:
        reporters: The active reporters; changed in place.
        write: Writes to one reporter.
        goes_on: End of the warning, e.g. "training goes on".
    """
    for reporter in [*reporters]:
        try:
            write(reporter)
        except Exception as error:
            reporters.remove(reporter)
            name, cause = type(reporter).__name__, f"{type(error).__name__}: {error}"
            text = f"{name} is off, {goes_on}: {cause}"
            try:
                warnings.warn(text, stacklevel=2)
            except UserWarning:  # raised on this rank only: other ranks would hang
                logger.warning("%s", text)


class JsonLinesReporter(Reporter):
    """Appends to a file, one JSON object per line.

    `"record"` is "plan" or "phase"; the other fields are those of `PlanRecord` or
    `PhaseRecord`. Unknown values are null.

    Args:
        path: The file; existing content stays.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        check_kind("path", path, str, os.PathLike)
        [self._path] = check_outputs(Path(path))

    def write_plan(self, plan: PlanRecord) -> None:
        """See `Reporter`."""
        self._append([{"record": "plan", **to_fields(plan)}])

    def write_phases(self, phases: Sequence[PhaseRecord]) -> None:
        """See `Reporter`."""
        self._append([{"record": "phase", **to_fields(phase)} for phase in phases])

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json_text(record, indent=None) for record in records))
