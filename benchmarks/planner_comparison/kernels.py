"""Timing of the kernels of plans, one rank after another in one process.

A kernel that several plans share is timed once. The first two rounds time every kernel.
Later rounds, in changing order, time only kernels that may be the slowest of a plan,
since faster ones do not change the plan's times.

In a round, a table reads the same ids in all kernels that have it, in all plans.

A single timing of the reference set is noisy. A kernel's time is therefore divided by
the median reference of the passes around it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from planner_comparison.plans import (
    ColumnOrder,
    IdSplit,
    Join,
    Kernel,
    KernelSet,
    RunPlan,
    Times,
    with_profiles,
)
from rank_kernels.exchanges import bucketize_passes, repeat
from rank_kernels.tables import replica_passes
from torchrec_neuroshard.measure.clock import (
    Backward,
    Forward,
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
"""Number of rounds that time every kernel."""
_WARM_UP_SHARE = 8
"""The warm-up has one sample of so many: the kernel has run once, but its rows are as
cold as after other work."""
_SPEED_PASSES = 50
"""Passes of the reference in a timing of `check_quiet`."""
_QUIET_TIMINGS, _QUIET_SPREAD = 40, 0.1
"""A machine is quiet if the middle half of 40 timings of the reference, over some ten
seconds, spreads by at most 10 % of their median. References beside the kernels correct
slower changes."""
_AROUND = 4
"""Number of references before, and after, a pass that count for its unit."""
_COPIED_BYTES, _COPIES = 2**28, 9


class NoisyMachineError(RuntimeError):
    """Other programs disturb the timings."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One timed pass of a kernel."""

    round: int
    visit: int
    """Number of the pass, in the order of time."""
    fwd_ms: float
    bwd_ms: float
    reference_ms: float
    """Time of the reference set next to the pass; 0 without a reference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSettings:
    """Numbers of rounds and passes."""

    rounds: int = 5
    passes: int = 2
    """Timed passes of a kernel in a round, each with a new input."""
    contends: float = 0.8
    """Later rounds time a kernel only if its forward, backward or total time is at
    least this share of the plan's slowest."""


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
            arena_bytes: Maximum bytes of a set.
            reference_ms: Time of the cost model's reference [ms]; 0: no reference.
            settings: Numbers of rounds and passes.
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
        """Return the timed passes of every kernel of the plans."""
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
            beside = []
            for kernel in kernels:
                passes = self._visit(kernel, number, visits, inputs)
                beside += [p.reference_ms for p in passes]
                raw[kernel] += passes
            median = statistics.median(beside)
            self._speeds.append(self.reference_ms / median if median else 1.0)
        return raw

    def medians(self, raw: Mapping[Kernel, Sequence[Pass]]) -> Times:
        """Return forward and backward of each kernel [ms]; see `median_times`."""
        return median_times(raw, self.reference_ms)

    def machine_speed(self) -> float:
        """Return the machine's speed relative to the cost model's machine.

        It is the median over the rounds of the last measurement. A round's speed is
        that of the median reference beside its kernels.
        """
        return statistics.median(self._speeds)

    def speed_spread(self) -> float:
        """Return the range of the machine's speed over the rounds, relative to its
        median."""
        return (max(self._speeds) - min(self._speeds)) / self.machine_speed()

    def check_quiet(self) -> str:
        """Return how evenly the reference ran.

        Raises:
            NoisyMachineError: The machine is not quiet.
        """
        if self._timer.reference is None:
            return "not checked"
        speeds = [self._speed_now() for _ in range(_QUIET_TIMINGS)]
        low, middle, high = statistics.quantiles(speeds, n=4)
        spread = (high - low) / middle
        if spread > _QUIET_SPREAD:
            raise NoisyMachineError(
                f"the machine is not quiet: the middle half of {_QUIET_TIMINGS} "
                f"timings of the reference spreads by {spread:.1%}, more than "
                f"{_QUIET_SPREAD:.0%}; end other programs, or add --noisy"
            )
        return (
            f"the middle half of {_QUIET_TIMINGS} timings of the reference spreads by "
            f"{spread:.1%}, speed {middle:.2f} of the cost model's machine"
        )

    def _speed_now(self) -> float:
        reference = self._timer.reference
        if reference is None:
            return 1.0
        return self.reference_ms / reference.nominal_ms(_SPEED_PASSES)

    def _contenders(self, plans: Sequence[RunPlan], known: Times) -> Iterable[Kernel]:
        share = self._settings.contends
        for plan in plans:
            for stage in plan.stages:
                yield from stage.on_all_ranks
                held = [k for k in stage.kernels if k is not None]
                times = {k: (*known[k], sum(known[k])) for k in held}
                most = [max(column) for column in zip(*times.values(), strict=True)]
                for kernel, values in times.items():
                    if any(v >= share * m for v, m in zip(values, most, strict=True)):
                        yield kernel

    def _visit(
        self, kernel: Kernel, number: int, visits: Iterator[int], inputs: _Inputs
    ) -> list[Pass]:
        """Return the passes of one kernel in one round."""
        if isinstance(kernel, ColumnOrder):
            passes = self._order_passes(kernel)
        elif isinstance(kernel, Join):
            passes = self._join_passes(kernel)
        else:
            passes = self._passes_with_ids(kernel, inputs)
        times, _ = self._timer.time_passes(passes)
        return [Pass(number, next(visits), *each) for each in times]

    def _passes_with_ids(
        self, kernel: KernelSet | IdSplit, inputs: _Inputs
    ) -> Iterator[tuple[Forward, Backward]]:
        numbers = range(1, self._settings.passes + 1)
        drawn = itertools.chain(
            [inputs.draw(kernel, 0)],
            itertools.cycle(inputs.draw(kernel, n) for n in numbers),
        )
        tables, device = kernel.shards, self._device
        if isinstance(kernel, IdSplit):
            return bucketize_passes(tables, drawn, kernel.num_ranks, device)
        if kernel.replicated:
            return replica_passes(tables, drawn, device, tables[0].optimizer)
        fused = FusedTables(with_profiles(kernel), device, self._timer.arena)
        return passes_over(fused, drawn)

    def _order_passes(self, kernel: ColumnOrder) -> Iterator[tuple[Forward, Backward]]:
        values = torch.ones(kernel.batch_size, sum(kernel.widths), device=self._device)
        forward = column_permutation(kernel.widths, self._device)
        # FBGEMM's backward runs the same kernel with the parts in reverse order.
        backward = column_permutation(kernel.widths[::-1], self._device)

        def run_backward(output: torch.Tensor) -> None:
            backward(output)

        return repeat(lambda: forward(values), run_backward)

    def _join_passes(self, kernel: Join) -> Iterator[tuple[Forward, Backward]]:
        parts = [
            torch.ones(kernel.batch_size, width, device=self._device)
            for width in kernel.widths
        ]
        return repeat(lambda: torch.cat(parts, dim=1))  # backward, gradients are views


def copy_gb_per_s() -> float:
    """Return the bandwidth of a CPU's memory in a large copy by one thread [GB/s]."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.int8)
    target, seconds = torch.empty_like(source), []
    for _ in range(_COPIES):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2e-9 * _COPIED_BYTES / statistics.median(seconds)


def kernels_of(plans: Iterable[RunPlan]) -> list[Kernel]:
    """Return all different kernels of the plans, in the order of `KernelTimer`."""
    return list(dict.fromkeys(k for plan in plans for k in plan.kernels))


def median_times(
    raw: Mapping[Kernel, Sequence[Pass]], reference_ms: float = 0.0
) -> Times:
    """Return the median forward and backward of each kernel [ms].

    Each pass is divided by the reference timed around it.

    Args:
        raw: Passes of each kernel.
        reference_ms: Nominal time of the reference [ms]; 0: no reference.
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
    """Return one input of several, with one table's features after another's.

    Args:
        batches: Inputs of different tables for the same samples. All have weights, or
            none has.
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
    """Inputs of kernels: in a round, a table reads the same ids in every kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[TableConfig, int], int] = {}
        self._round = 0
        self._drawn: dict[tuple[int, int], InputBatch] = {}

    def begin(self, number: int) -> None:
        """Start a round and forget the inputs of earlier ones."""
        self._round = number
        self._drawn.clear()

    def draw(self, kernel: KernelSet | IdSplit, index: int) -> InputBatch:
        """Return an input of a kernel in the round.

        Args:
            kernel: The kernel.
            index: 0: warm-up, with few samples; 1, 2, ...: timed passes.
        """
        return join_inputs(
            [self._of(t, kernel.batch_size, index) for t in kernel.shards]
        )

    def _of(self, shard: TableConfig, batch_size: int, index: int) -> InputBatch:
        # A column shard reads the ids of its table.
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
    """Return forward and backward of passes, divided by the references around them."""
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
