"""Time fused kernels repeatably: the same set gives the same milliseconds again.

A CPU's speed drifts by tens of percent within minutes. Therefore every pass of a sample
is timed together with a pass of one fixed reference set. The median of the ratios,
times the reference's nominal time, is the result. A GPU is timed by events after a
flush of its L2 cache, and needs no reference.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchrec_neuroshard.hardware.device_types import is_accelerator
from torchrec_neuroshard.hardware.devices import accelerator, find_gpu_monitor
from torchrec_neuroshard.measure.kernels import (
    Arena,
    FusedTables,
    InputBatch,
    draw_inputs,
    reserve_memory,
)
from torchrec_neuroshard.measure.records import Measurement, relative_spread
from torchrec_neuroshard.measure.sets import SampledSet
from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.table import TableConfig

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the system.

    Otherwise each pass writes its output to fresh memory, whose first touch costs up to
    ten times as much as the kernel. Affects this process only.
    """
    library = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6")
    with contextlib.suppress(AttributeError):  # another C library
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCounts:
    """How often a sample is run, after one warm-up pass."""

    min_passes: int
    """Fewest timed passes."""
    max_passes: int
    """Most timed passes."""
    time_budget_seconds: float
    """Once this time is up, stop after `min_passes`."""
    num_batches: int
    """Different inputs that the timed passes use in turn."""


CPU_PASSES = PassCounts(
    min_passes=5, max_passes=19, time_budget_seconds=0.6, num_batches=19
)
"""Every pass has a new input, as in training, where no batch occurs twice."""
MOST_SET_SECONDS = 0.2
"""Longest time to repeat a set of a calibration on a CPU: a model learns more from many
noisy sets than from few precise ones."""
CUDA_PASSES = PassCounts(
    min_passes=7, max_passes=7, time_budget_seconds=0.0, num_batches=2
)
"""Two inputs suffice, because the L2 cache is flushed between passes. The warm-up loads
kernels and allocates memory; if the first timed pass is slower nevertheless, the median
of seven ignores it."""


Forward = Callable[[], torch.Tensor]
Backward = Callable[[torch.Tensor], None]
"""Runs a backward pass; takes the forward pass's output."""
Times = Callable[[], tuple[float, float]]
"""Waits for a forward and a backward pass and returns their times [ms]."""
Clock = Callable[[Forward, Backward], Times]
"""Starts a forward and a backward pass and times them."""


def time_on_host(forward: Forward, backward: Backward) -> Times:
    """Run both passes and time them with this thread's clock.

    The kernels run on this thread. Its clock stops while other processes use its core.
    """
    start = time.thread_time()
    output = forward()
    middle = time.thread_time()
    backward(output)
    end = time.thread_time()
    return lambda: ((middle - start) * 1e3, (end - middle) * 1e3)


class DeviceClock:
    """Times passes with CUDA events, each after a flush of the L2 cache.

    The flush repeats, so that the device is busy while the host queues the kernels. The
    events then time the device without the host's overhead, as in training, where the
    host runs ahead. If the device finishes the flush too early, the pass is queued
    again after a flush twice as long. Later passes keep the longer flush. After
    `TIMELY_PASSES` passes in a row that were queued in time, it is halved.
    """

    FLUSHED_SHARE = 2
    """Size of the flushed buffer, in L2 sizes."""
    REPEATS, MAX_REPEATS = 16, 256
    """How often the buffer is written at first, and at most."""
    TIMELY_PASSES = 20

    def __init__(self, device: torch.device) -> None:
        """Allocate the flushed buffer, sized from the device's L2 cache.

        Args:
            device: An accelerator.
        """
        self._device, self._runtime = device, accelerator(device.type)
        cache: int = self._runtime.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(
            self.FLUSHED_SHARE * cache, dtype=torch.int8, device=device
        )
        self.repeats = self.REPEATS
        """How often the buffer is currently written."""
        self._num_timely = 0

    def __call__(self, forward: Forward, backward: Backward) -> Times:
        """Queue both passes, and again if the device did not stay busy."""
        # Events are recorded on the current device's stream: make it the kernels'.
        with self._runtime.device(self._device):
            repeats = self.repeats
            while True:
                start, middle, restart, end = (
                    self._runtime.Event(enable_timing=True) for _ in range(4)
                )
                self._fill_queue(repeats)
                start.record()
                output = forward()
                middle.record()
                was_idle = start.query()
                self._fill_queue(repeats)
                restart.record()
                backward(output)
                end.record()
                was_idle = restart.query() or was_idle
                if not was_idle or repeats >= self.MAX_REPEATS:
                    break
                repeats *= 2
        self._adapt(repeats)

        def times() -> tuple[float, float]:
            end.synchronize()
            return start.elapsed_time(middle), restart.elapsed_time(end)

        return times

    def _adapt(self, repeats: int) -> None:
        """Keep a pass's length of the flush, or halve it after many timely passes."""
        self._num_timely = 0 if repeats > self.repeats else self._num_timely + 1
        self.repeats = repeats
        if self._num_timely >= self.TIMELY_PASSES and repeats > self.REPEATS:
            self.repeats, self._num_timely = repeats // 2, 0

    def _fill_queue(self, repeats: int) -> None:
        for _ in range(repeats):
            self._flush.zero_()


def passes_over(
    kernel: FusedTables, batches: Iterable[InputBatch]
) -> Iterator[tuple[Forward, Backward]]:
    """Yield a kernel's forward and backward pass for each batch.

    Args:
        kernel: The kernel.
        batches: Batches, taken one at a time.
    """
    generator = torch.Generator(device=kernel.device).manual_seed(0)
    grad_RD = torch.empty(0, kernel.output_dim, device=kernel.device)
    for batch in batches:
        num_rows = kernel.num_outputs(batch)
        if num_rows > len(grad_RD):
            grad_RD = grad_RD.new_empty(num_rows, kernel.output_dim)
            grad_RD.normal_(0.0, 0.01, generator=generator)
        yield (
            partial(kernel.forward, batch),
            partial(torch.autograd.backward, grad_tensors=grad_RD[:num_rows]),
        )


class Reference:
    """The fixed table set that every pass on a CPU is compared with."""

    NUM_TABLES, ROWS, WIDTH, BATCH_SIZE, POOLING = 4, 250_000, 64, 1_024, 8.0
    NUM_BATCHES = 4

    def __init__(self) -> None:
        """Build the reference set in its own memory."""
        device = torch.device("cpu")
        tables = [
            TableConfig(
                name=str(i),
                num_embeddings=self.ROWS,
                embedding_dim=self.WIDTH,
                pooling_factor=self.POOLING,
            )
            for i in range(self.NUM_TABLES)
        ]
        access = [AccessDistribution.power_law(self.ROWS, 1.0)] * self.NUM_TABLES
        arena = Arena(self.NUM_TABLES * self.ROWS * self.WIDTH * 4)
        # Without the check of ids, so that the time unit is the older bundles'.
        kernel = FusedTables(tables, device, arena, bounds_check="none")
        batches = [
            draw_inputs(tables, access, self.BATCH_SIZE, (17, number), device)
            for number in range(1, self.NUM_BATCHES + 1)
        ]
        self._passes = passes_over(kernel, itertools.cycle(batches))

    def run(self) -> float:
        """Run a forward and a backward pass; return their total time [ms]."""
        return sum(self.run_phases())

    def run_phases(self) -> tuple[float, float]:
        """Run a forward and a backward pass; return both times [ms]."""
        return time_on_host(*next(self._passes))()

    def nominal_ms(self, num_passes: int = 200) -> float:
        """Return the median of many passes in a row [ms].

        In a row, the rows stay in the caches. Between samples, which evict them, a pass
        takes longer.
        """
        for _ in range(20):
            self.run()
        return statistics.median(self.run() for _ in range(num_passes))


class SetTimer:
    """Times table sets on one device."""

    def __init__(
        self,
        device: torch.device,
        arena_bytes: int,
        reference_ms: float | None = None,
        *,
        time_budget_seconds: float | None = None,
        counts: PassCounts | None = None,
    ) -> None:
        """Allocate the arena and the reference.

        Args:
            device: CPU or CUDA device.
            arena_bytes: Most weight bytes of a set.
            reference_ms: Nominal time of the reference; None measures it now. Unused on
                a GPU.
            time_budget_seconds: Stop repeating a sample after this time; None takes the
                budget of `counts`.
            counts: How often a sample is run; None takes the device's `CPU_PASSES` or
                `CUDA_PASSES`.
        """
        self.device = device
        on_gpu = is_accelerator(device.type)
        self._counts = counts or (CUDA_PASSES if on_gpu else CPU_PASSES)
        if time_budget_seconds is not None:
            self._counts = dataclasses.replace(
                self._counts, time_budget_seconds=time_budget_seconds
            )
        self.arena: Arena | None = None
        self.reference: Reference | None = None
        """The reference set, timed with every pass; None on a GPU."""
        self.reference_ms = 0.0
        self.monitor = find_gpu_monitor(device)
        """Reads a GPU's clocks; None if they cannot be read."""
        self.clock: Clock = time_on_host
        if on_gpu:
            self.clock = DeviceClock(device)
            reserve_memory(device, arena_bytes)
            return
        keep_freed_memory()
        self.arena = Arena(arena_bytes)
        self.reference = Reference()
        self.reference_ms = (
            self.reference.nominal_ms() if reference_ms is None else reference_ms
        )

    def measure(
        self, sampled: SampledSet, meanwhile: Callable[[], None] = lambda: None
    ) -> Measurement:
        """Time forward and backward of the fused kernel with a set's tables.

        Args:
            sampled: The set.
            meanwhile: Called after all passes are started, while an accelerator still
                works on them.
        """
        tables, batch_size = sampled.tables, sampled.batch_size
        access = sampled.access or [
            AccessDistribution.of_batch(t.profile_at(batch_size), t.num_embeddings)
            for t in tables
        ]

        def draw(number: int) -> InputBatch:
            seed = (*sampled.seed, number)
            return draw_inputs(tables, access, batch_size, seed, self.device)

        kernel = FusedTables(tables, self.device, self.arena)
        timed = itertools.cycle(map(draw, range(1, self._counts.num_batches + 1)))
        batches = itertools.chain(map(draw, [0]), timed)
        return self.measure_passes(passes_over(kernel, batches), meanwhile)

    def measure_passes(
        self,
        passes: Iterator[tuple[Forward, Backward]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Measurement:
        """Time any forward and backward passes, together with the reference.

        Args:
            passes: Endless passes; the first is the warm-up.
            meanwhile: Same as in `measure`.
        """
        times, state = self.time_passes(passes, meanwhile)
        unit_ms = self.reference_ms or 1.0
        units = [ref / unit_ms or 1.0 for *_, ref in times]
        fwd = [ms / unit for (ms, _, _), unit in zip(times, units, strict=True)]
        bwd = [ms / unit for (_, ms, _), unit in zip(times, units, strict=True)]
        return Measurement(
            fwd_ms=statistics.median(fwd),
            bwd_ms=statistics.median(bwd),
            num_passes=len(times),
            spread=relative_spread([sum(t) for t in zip(fwd, bwd, strict=True)]),
            reference_ms=statistics.median(ref for *_, ref in times),
            **state,
        )

    def time_passes(
        self,
        passes: Iterator[tuple[Forward, Backward]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[list[tuple[float, float, float]], dict[str, Any]]:
        """Return the times of single passes; see `measure_passes`.

        Returns:
            Forward, backward and reference of each pass [ms], the last 0 without a
            reference, and a GPU's state as fields of a `Measurement`.
        """
        forward, backward = next(passes)
        backward(forward())
        counts = self._counts
        started: list[tuple[Times, float]] = []
        deadline = time.perf_counter() + counts.time_budget_seconds
        while len(started) < counts.max_passes:
            if len(started) >= counts.min_passes and time.perf_counter() > deadline:
                break
            forward, backward = next(passes)
            reference_ms = 0.0
            if self.reference is not None:
                # First an untimed run: the sample has evicted the reference from the
                # caches. A slowed-down reference would make large samples look cheap.
                self.reference.run()
                reference_ms = self.reference.run()
            started.append((self.clock(forward, backward), reference_ms))
        meanwhile()
        state = {} if self.monitor is None else self.monitor.state()
        return [(*times(), ref) for times, ref in started], state
