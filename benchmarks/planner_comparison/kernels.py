"""Kernels of plans, timed rank after rank in one process.

What several plans share is timed once. Every kernel is timed in the first two rounds;
later rounds, in changing order, go on with those that may be the slowest of a plan:
what is far below has no part in the plan's times.

In a round a table reads the same ids in all kernels that hold it, whoever put it there.

A pass of the reference is disturbed as easily as a kernel's, and takes less time.
So a pass counts in units of the median reference of the passes around it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from planner_comparison.plans import (
    ColumnOrder,
    Kernel,
    KernelSet,
    RunPlan,
    Times,
    with_profiles,
)
from torchrec_neuroshard.measure.clock import (
    Measurement,
    PassCounts,
    SetTimer,
    passes_over,
)
from torchrec_neuroshard.measure.kernels import (
    FusedTables,
    InputBatch,
    column_permutation,
    draw_inputs,
)
from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.table import TableConfig

_SEED = 0
_WHOLE_ROUNDS = 2
"""In which every kernel is timed."""
_WARM_UP_SHARE = 8
"""A kernel warms up on one of so many samples: it has run once, its rows are as cold
as after other work."""
_SPEED_PASSES = 50
"""Of the reference alone, when a round begins: they tell the machine's speed."""
_AROUND = 4
"""References before and after a pass that its unit is taken from, beside its own."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One timed pass of a kernel."""

    round: int
    visit: int
    """Place among all passes, in the order of time."""
    fwd_ms: float
    bwd_ms: float
    reference_ms: float
    """Of the reference set, timed beside it; 0 where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSettings:
    """How long kernels are timed."""

    rounds: int = 5
    passes: int = 2
    """Timed passes of a kernel in a round, each on a new input."""
    contends: float = 0.8
    """Share of a plan's slowest forward, backward or total from which on a kernel is
    timed in the later rounds, too."""


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
            counts=PassCounts(
                min_passes=settings.passes,
                max_passes=settings.passes,
                time_budget_seconds=0.0,
                num_batches=settings.passes,
            ),
        )
        self._device = device
        self._speeds: list[float] = []
        self.reference_ms = self._timer.reference_ms

    def measure(self, plans: Sequence[RunPlan]) -> dict[Kernel, list[Pass]]:
        """Time every kernel of the plans."""
        self._speeds.clear()
        kernels = kernels_of(plans)
        raw: dict[Kernel, list[Pass]] = {k: [] for k in kernels}
        order = random.Random(_SEED)
        visits = itertools.count()
        inputs = _Inputs(self._device)
        for number in range(self._settings.rounds):
            if number >= _WHOLE_ROUNDS:
                known = self.medians(raw)
                kernels = list(dict.fromkeys(self._contenders(plans, known)))
            order.shuffle(kernels)
            inputs.begin(number)
            self._speeds.append(self._speed_now())
            for kernel in kernels:
                raw[kernel] += self._visit(kernel, number, visits, inputs)
        return raw

    def medians(self, raw: Mapping[Kernel, Sequence[Pass]]) -> Times:
        """Return forward and backward of each kernel [ms]; see `median_times`."""
        return median_times(raw, self.reference_ms)

    def machine_speed(self) -> float:
        """Return how fast the machine was, over where the cost model was measured.

        The median over the rounds of what was last measured.
        """
        return statistics.median(self._speeds)

    def _speed_now(self) -> float:
        reference = self._timer.reference
        if reference is None:
            return 1.0
        return self.reference_ms / reference.nominal_ms(_SPEED_PASSES)

    def _contenders(self, plans: Sequence[RunPlan], known: Times) -> Iterable[Kernel]:
        share = self._settings.contends
        for plan in plans:
            for stage in plan.stages:
                if stage.column_order is not None:
                    yield stage.column_order
                held = [k for k in stage.kernels if k is not None]
                times = {k: (*known[k], sum(known[k])) for k in held}
                most = [max(column) for column in zip(*times.values(), strict=True)]
                for kernel, values in times.items():
                    if any(v >= share * m for v, m in zip(values, most, strict=True)):
                        yield kernel

    def _visit(
        self, kernel: Kernel, number: int, visits: Iterator[int], inputs: _Inputs
    ) -> list[Pass]:
        """Time one kernel in one round."""
        if isinstance(kernel, ColumnOrder):
            found = self._time_order(kernel)
        else:
            numbers = range(1, self._settings.passes + 1)
            inputs_of = itertools.chain(
                [inputs.draw(kernel, 0)],
                itertools.cycle(inputs.draw(kernel, n) for n in numbers),
            )
            fused = FusedTables(with_profiles(kernel), self._device, self._timer.arena)
            found = self._timer.measure_passes(
                passes_over(fused, kernel.batch_size, inputs_of)
            )
        beside = found.ref_raw_ms or (0.0,) * len(found.fwd_raw_ms)
        raw = (found.fwd_raw_ms, found.bwd_raw_ms, beside)
        return [Pass(number, next(visits), *t) for t in zip(*raw, strict=True)]

    def _time_order(self, kernel: ColumnOrder) -> Measurement:
        values = torch.ones(kernel.batch_size, sum(kernel.widths), device=self._device)
        forward = column_permutation(kernel.widths, self._device)
        # FBGEMM's backward is the same kernel with the parts in the other order.
        backward = column_permutation(kernel.widths[::-1], self._device)

        def run_backward(output: torch.Tensor) -> None:
            backward(output)

        both = (lambda: forward(values), run_backward)
        return self._timer.measure_passes(itertools.repeat(both))


def kernels_of(plans: Iterable[RunPlan]) -> list[Kernel]:
    """Return the kernels of all plans, each once, in the order of `KernelTimer`."""
    return list(dict.fromkeys(k for plan in plans for k in plan.kernels))


def median_times(
    raw: Mapping[Kernel, Sequence[Pass]], reference_ms: float = 0.0
) -> Times:
    """Return the median forward and backward of each kernel [ms].

    Each pass counts in units of the reference timed around it.

    Args:
        raw: Passes of each kernel.
        reference_ms: What the reference takes; 0 where there is none.
    """
    unit = reference_ms or 1.0
    return {
        kernel: (
            unit * statistics.median(forward for forward, _ in own),
            unit * statistics.median(backward for _, backward in own),
        )
        for kernel, own in _in_references(raw).items()
    }


def join_inputs(batches: Sequence[InputBatch]) -> InputBatch:
    """Put inputs of the same samples together, one table's features after another's.

    Args:
        batches: Of kernels that hold other tables; with weights all or none.
    """
    weights = [b.weights_L for b in batches if b.weights_L is not None]
    ends = itertools.accumulate((len(b.indices_L) for b in batches), initial=0)
    return InputBatch(
        torch.cat([b.indices_L for b in batches]),
        torch.cat(
            [
                batches[0].offsets[:1],
                *(b.offsets[1:] + e for b, e in zip(batches, ends, strict=False)),
            ]
        ),
        torch.cat(weights) if weights else None,
    )


class _Inputs:
    """What the kernels read: each table the same in a round, in whichever kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[TableConfig, int], int] = {}
        self._round = 0
        self._drawn: dict[tuple[int, int], InputBatch] = {}

    def begin(self, number: int) -> None:
        """Go on to a round; what earlier ones read is forgotten."""
        self._round = number
        self._drawn.clear()

    def draw(self, kernel: KernelSet, index: int) -> InputBatch:
        """Return an input of a kernel in the round.

        Args:
            kernel: What reads it.
            index: 0 for the warm-up's, of few samples; 1, 2, ... for the timed passes.
        """
        return join_inputs(
            [self._of(t, kernel.batch_size, index) for t in kernel.shards]
        )

    def _of(self, shard: TableConfig, batch_size: int, index: int) -> InputBatch:
        # Columns of a table read what the table does.
        table = dataclasses.replace(shard, name="", embedding_dim=4)
        number = self._tables.setdefault((table, batch_size), len(self._tables))
        if (found := self._drawn.get((number, index))) is not None:
            return found
        profile = table.profile_at(batch_size)
        drawn = draw_inputs(
            [dataclasses.replace(table, profile=profile)],
            [AccessDistribution.of_batch(profile, table.num_embeddings)],
            batch_size if index else max(1, batch_size // _WARM_UP_SHARE),
            (_SEED, self._round, number, index),
            self._device,
        )
        self._drawn[number, index] = drawn
        return drawn


def _in_references(
    raw: Mapping[Kernel, Sequence[Pass]],
) -> dict[Kernel, list[tuple[float, float]]]:
    """Return forward and backward of passes, in units of the references around."""
    order = sorted((p for own in raw.values() for p in own), key=lambda p: p.visit)
    beside = [p.reference_ms or 1.0 for p in order]
    unit = {
        one.visit: statistics.median(beside[max(0, i - _AROUND) : i + _AROUND + 1])
        for i, one in enumerate(order)
    }
    return {
        kernel: [(p.fwd_ms / unit[p.visit], p.bwd_ms / unit[p.visit]) for p in own]
        for kernel, own in raw.items()
    }
