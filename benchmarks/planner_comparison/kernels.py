"""Fused kernels of plans, timed rank after rank in one process.

A set of shards that several plans share is timed once. Every set is timed in the first
round; later rounds, in changing order, go on with those that may be the slowest of a
plan: what is far below has no part in the plan's times.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from planner_comparison.plans import KernelSet, RunPlan, with_profiles
from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.collect.timing import SetTimer

_SEED = 0

Times = dict[KernelSet, tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSettings:
    """How long kernels are timed."""

    rounds: int = 3
    passes: int = 2
    """Timed passes of a set in a round, each on a new input."""
    contends: float = 0.8
    """Share of a plan's slowest forward, backward or total from which on a set is timed
    in the later rounds, too."""


class KernelTimer:
    """Times sets of shards on one device."""

    def __init__(
        self,
        device: torch.device,
        arena_bytes: int,
        reference_ms: float,
        settings: KernelSettings,
    ) -> None:
        """Prepare the device.

        Args:
            device: CPU or CUDA.
            arena_bytes: Most bytes of a set.
            reference_ms: What the cost model's reference took; 0 if it has none.
            settings: How long.
        """
        self._settings = settings
        self._timer = SetTimer(
            device,
            arena_bytes,
            reference_ms=reference_ms or None,
            budget_seconds=0.0,
            min_passes=settings.passes,
            max_passes=settings.passes,
        )
        self.reference_ms = self._timer.reference_ms
        self._seen_reference_ms: list[float] = []

    @property
    def machine_speed(self) -> float:
        """How fast the machine was, in units of the cost model's milliseconds."""
        if not self._seen_reference_ms:
            return 1.0
        return self.reference_ms / statistics.median(self._seen_reference_ms)

    def measure(self, plans: Sequence[RunPlan]) -> tuple[Times, dict[KernelSet, int]]:
        """Time every kernel of the plans.

        Returns:
            Forward and backward of each set, medians [ms], and the passes of each.
        """
        self._seen_reference_ms.clear()
        kernels = list(dict.fromkeys(k for plan in plans for k in plan.kernels))
        raw: dict[KernelSet, tuple[list[float], list[float]]] = {
            k: ([], []) for k in kernels
        }
        order = random.Random(_SEED)
        for number in range(self._settings.rounds):
            if number:
                kernels = list(dict.fromkeys(self._contenders(plans, medians(raw))))
            order.shuffle(kernels)
            for kernel in kernels:
                for kept, new in zip(
                    raw[kernel], self._visit(kernel, number), strict=True
                ):
                    kept.extend(new)
        return medians(raw), {k: len(fwd) for k, (fwd, _) in raw.items()}

    def _contenders(
        self, plans: Sequence[RunPlan], known: Times
    ) -> Iterable[KernelSet]:
        share = self._settings.contends
        for plan in plans:
            for stage in plan.stages:
                held = [k for k in stage.kernels if k is not None]
                times = {k: (*known[k], sum(known[k])) for k in held}
                most = [max(column) for column in zip(*times.values(), strict=True)]
                for kernel, values in times.items():
                    if any(v >= share * m for v, m in zip(values, most, strict=True)):
                        yield kernel

    def _visit(self, kernel: KernelSet, number: int) -> tuple[list[float], list[float]]:
        """Time one set; each pass in units of the reference timed beside it."""
        access = [
            AccessDistribution.from_profile(
                shard.profile or shard.profile_at(kernel.batch_size),
                shard.num_embeddings,
            )
            for shard in kernel.shards
        ]
        found = self._timer.measure(
            with_profiles(kernel), access, kernel.batch_size, (_SEED, number)
        )
        self._seen_reference_ms.extend(found.ref_raw_ms)
        unit = self.reference_ms or 1.0
        beside = found.ref_raw_ms or (unit,) * len(found.fwd_raw_ms)
        return (
            [f / r * unit for f, r in zip(found.fwd_raw_ms, beside, strict=True)],
            [b / r * unit for b, r in zip(found.bwd_raw_ms, beside, strict=True)],
        )


def medians(raw: dict[KernelSet, tuple[list[float], list[float]]]) -> Times:
    """Return the median forward and backward of each set."""
    return {
        kernel: (statistics.median(fwd), statistics.median(bwd))
        for kernel, (fwd, bwd) in raw.items()
    }
