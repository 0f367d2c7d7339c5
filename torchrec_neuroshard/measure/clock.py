"""Timing fused kernels so that the same set gives the same milliseconds again.

A CPU's speed drifts by tens of percent within minutes. So every pass of a sample is
timed beside a pass of one fixed reference set, and the median of the ratios is given in
units of the reference's nominal time. A GPU is timed by events behind a flush of its
L2 cache; there the reference is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from torchrec_neuroshard.hardware.devices import (
    accelerator,
    find_gpu_monitor,
    is_accelerator,
)
from torchrec_neuroshard.measure.kernels import (
    Arena,
    FusedTables,
    InputBatch,
    draw_inputs,
    reserve_memory,
)
from torchrec_neuroshard.measure.records import relative_spread
from torchrec_neuroshard.measure.sets import SampledSet
from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.table import TableConfig

__all__ = [
    "CPU_PASSES",
    "DeviceClock",
    "Measurement",
    "PassCounts",
    "Reference",
    "SetTimer",
    "keep_freed_memory",
    "passes_over",
    "time_on_host",
]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the system.

    Otherwise each pass's output is fresh memory, and its first touch costs up to ten
    times what the kernel does. Affects this process only.
    """
    library = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6")
    with contextlib.suppress(AttributeError):  # another C library
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCounts:
    """How often a sample is run, after one pass that warms up."""

    min_passes: int
    """Timed passes that every sample gets."""
    max_passes: int
    """Most timed passes."""
    time_budget_seconds: float
    """After this time no pass is added to the least number."""
    num_batches: int
    """Different inputs that the timed passes take in turn."""


CPU_PASSES = PassCounts(
    min_passes=5, max_passes=19, time_budget_seconds=0.6, num_batches=19
)
"""A new input for every pass: as in training, where no batch comes twice."""
CUDA_PASSES = PassCounts(
    min_passes=7, max_passes=7, time_budget_seconds=0.0, num_batches=2
)
"""Two inputs do: the L2 cache is flushed between passes, nothing else holds them. The
warm-up loads kernels and allocates; should the first timed pass be slower still, the
median of seven leaves it out."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Raw passes of one sample and what follows from them [ms]."""

    fwd_raw_ms: tuple[float, ...]
    bwd_raw_ms: tuple[float, ...]
    ref_raw_ms: tuple[float, ...]
    fwd_ms: float
    bwd_ms: float
    gpu: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a `CostRecord`: a GPU's clocks meanwhile, where anything reads them."""

    @property
    def spread(self) -> float:
        """Median absolute deviation of forward + backward, over their median."""
        total = [f + b for f, b in zip(self.fwd_raw_ms, self.bwd_raw_ms, strict=True)]
        if self.ref_raw_ms:
            total = [t / r for t, r in zip(total, self.ref_raw_ms, strict=True)]
        return relative_spread(total)


Forward = Callable[[], torch.Tensor]
Backward = Callable[[torch.Tensor], None]
"""Takes what the forward pass returned."""
Times = Callable[[], tuple[float, float]]
"""Waits for a forward and a backward pass and returns their times [ms]."""
Clock = Callable[[Forward, Backward], Times]
"""Starts both passes."""


def time_on_host(forward: Forward, backward: Backward) -> Times:
    """Run both passes and time them by the processor's own clock."""
    start = time.perf_counter()
    output = forward()
    middle = time.perf_counter()
    backward(output)
    end = time.perf_counter()
    return lambda: ((middle - start) * 1e3, (end - middle) * 1e3)


class DeviceClock:
    """CUDA events around each pass, behind a flush of the L2 cache.

    The flush is repeated, so that the device is busy while the host queues the kernels:
    then the events time what the device does and not the host's overhead, as in
    training, where the host runs ahead. Where the device was through with the flush
    too early, the pass is queued again behind a flush twice as long. Later passes keep
    the longer flush until `TIMELY_PASSES` in a row were in time; then it is halved.
    """

    FLUSHED_SHARE = 2
    """L2 sizes written by a flush."""
    REPEATS, MAX_REPEATS = 16, 256
    """How often it is written at first, and at most."""
    TIMELY_PASSES = 20

    def __init__(self, device: torch.device) -> None:
        """Allocate what is written to flush, sized from the device's L2 cache.

        Args:
            device: An accelerator.
        """
        self._device, self._runtime = device, accelerator(device.type)
        cache: int = self._runtime.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(
            self.FLUSHED_SHARE * cache, dtype=torch.int8, device=device
        )
        self.repeats = self.REPEATS
        """How often the flush is written by now."""
        self._num_timely = 0

    def __call__(self, forward: Forward, backward: Backward) -> Times:
        """Queue both passes; again where the device did not stay busy."""
        # Events are recorded on the current device's stream, kernels run on theirs.
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
        """Keep the length that a pass took, or halve it after many in time."""
        self._num_timely = 0 if repeats > self.repeats else self._num_timely + 1
        self.repeats = repeats
        if self._num_timely >= self.TIMELY_PASSES and repeats > self.REPEATS:
            self.repeats, self._num_timely = repeats // 2, 0

    def _fill_queue(self, repeats: int) -> None:
        for _ in range(repeats):
            self._flush.zero_()


def passes_over(
    kernel: FusedTables, batch_size: int, batches: Iterable[InputBatch]
) -> Iterator[tuple[Forward, Backward]]:
    """Yield a kernel's forward and backward pass over each batch.

    Args:
        kernel: The kernel.
        batch_size: Most samples of a batch.
        batches: Each is drawn when its passes are asked for.
    """
    generator = torch.Generator(device=kernel.device).manual_seed(0)
    grad_BD = torch.empty(batch_size, kernel.output_dim, device=kernel.device)
    grad_BD.normal_(0.0, 0.01, generator=generator)
    for batch in batches:
        num_samples = (len(batch.offsets) - 1) // kernel.num_features
        yield (
            partial(kernel.forward, batch),
            partial(torch.autograd.backward, grad_tensors=grad_BD[:num_samples]),
        )


class Reference:
    """The fixed set that every pass on a CPU is compared with."""

    NUM_TABLES, ROWS, WIDTH, BATCH_SIZE, POOLING = 4, 250_000, 64, 1_024, 8.0
    NUM_BATCHES = 4

    def __init__(self) -> None:
        """Build the reference set in memory of its own."""
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
        # A unit of time, which bundles of before ids were checked are given in.
        kernel = FusedTables(tables, device, arena, bounds_check="none")
        batches = [
            draw_inputs(tables, access, self.BATCH_SIZE, (17, number), device)
            for number in range(1, self.NUM_BATCHES + 1)
        ]
        self._passes = passes_over(kernel, self.BATCH_SIZE, itertools.cycle(batches))

    def run(self) -> float:
        """One forward and backward pass [ms]."""
        return sum(self.run_phases())

    def run_phases(self) -> tuple[float, float]:
        """One forward and one backward pass [ms]."""
        return time_on_host(*next(self._passes))()

    def nominal_ms(self, num_passes: int = 200) -> float:
        """Median of many passes, one after the other [ms].

        Its rows stay in the caches meanwhile: beside sets, which push them out, a pass
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
            device: CPU or CUDA.
            arena_bytes: Most weight bytes of a set.
            reference_ms: Nominal time of the reference; None measures it now. A GPU
                has none.
            time_budget_seconds: Stop repeating a sample after this time. None: the
                budget of `counts`.
            counts: How often a sample is run. None takes the device's: `CPU_PASSES` or
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
        """Timed beside every pass; None on a GPU."""
        self.reference_ms = 0.0
        self.monitor = find_gpu_monitor(device)
        """Reads a GPU's clocks; None where nothing does."""
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
        """Time forward and backward of the fused kernel over a set.

        Args:
            sampled: The set.
            meanwhile: Called once all passes are started: an accelerator is still at
                work on them then.
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
        return self.measure_passes(passes_over(kernel, batch_size, batches), meanwhile)

    def measure_passes(
        self,
        passes: Iterator[tuple[Forward, Backward]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Measurement:
        """Time anything that has two directions, each time beside the reference.

        Args:
            passes: Without end. The first warms up.
            meanwhile: As in `measure`.
        """
        forward, backward = next(passes)
        backward(forward())
        counts = self._counts
        started: list[Times] = []
        ref: list[float] = []
        deadline = time.perf_counter() + counts.time_budget_seconds
        while len(started) < counts.max_passes:
            if len(started) >= counts.min_passes and time.perf_counter() > deadline:
                break
            forward, backward = next(passes)
            if self.reference is not None:
                # Once untimed: the sample has pushed the reference out of the caches,
                # and a large sample would look cheap beside a reference it slowed down.
                self.reference.run()
                ref.append(self.reference.run())
            started.append(self.clock(forward, backward))
        meanwhile()
        gpu = {} if self.monitor is None else self.monitor.state()
        fwd, bwd = zip(*(times() for times in started), strict=True)
        units = [ms / self.reference_ms for ms in ref] or [1.0] * len(fwd)

        def median(passes: Sequence[float]) -> float:
            return statistics.median(p / u for p, u in zip(passes, units, strict=True))

        return Measurement(fwd, bwd, tuple(ref), median(fwd), median(bwd), gpu)
