"""Timing fused kernels so that the same set gives the same milliseconds again.

A CPU's speed drifts by tens of percent within minutes. So every pass of a sample is
timed beside a pass of one fixed reference set, and the median of the ratios is given in
units of the reference's nominal time. A GPU is timed by events behind a flush of its
L2 cache; there the reference is left out.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchrec_neuroshard.hardware.devices import accelerator, is_accelerator
from torchrec_neuroshard.measure.kernels import (
    BOUNDS_CHECK,
    Arena,
    FusedTables,
    InputBatch,
    InputDraws,
    reserve_memory,
)
from torchrec_neuroshard.measure.records import relative_spread
from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.tables.table import TableConfig

__all__ = [
    "CPU_PASSES",
    "CUDA_PASSES",
    "Clock",
    "DeviceClock",
    "Draw",
    "HostClock",
    "Measurement",
    "PassCounts",
    "Reference",
    "SetTimer",
    "Times",
    "keep_freed_memory",
]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory instead of returning it to the system.

    Otherwise each pass's output is fresh memory, and its first touch costs up to ten
    times what the kernel does. Affects this process only.

    Returns:
        Whether the C library has the setting (glibc).
    """
    library = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6")
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCounts:
    """How often a sample is run."""

    warm_up: int
    """Passes before the timed ones."""
    min_passes: int
    """Timed passes that every sample gets."""
    max_passes: int
    """Most timed passes."""
    budget_seconds: float
    """After this time no pass is added to the least number."""
    num_batches: int
    """Different inputs that the timed passes take in turn."""


CPU_PASSES = PassCounts(
    warm_up=1, min_passes=5, max_passes=19, budget_seconds=0.6, num_batches=19
)
"""A new input for every pass: as in training, where no batch comes twice."""
CUDA_PASSES = PassCounts(
    warm_up=1, min_passes=7, max_passes=7, budget_seconds=0.0, num_batches=2
)
"""Two inputs do: the L2 cache is flushed between passes, nothing else holds them. One
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

    @property
    def spread(self) -> float:
        """Median absolute deviation of forward + backward, over their median."""
        total = [f + b for f, b in zip(self.fwd_raw_ms, self.bwd_raw_ms, strict=True)]
        if self.ref_raw_ms:
            total = [t / r for t, r in zip(total, self.ref_raw_ms, strict=True)]
        return relative_spread(total)

    def for_record(self) -> dict[str, Any]:
        """Return the timing fields of a `CostRecord`."""
        return {
            "fwd_ms": self.fwd_ms,
            "bwd_ms": self.bwd_ms,
            "num_passes": len(self.fwd_raw_ms),
            "spread": self.spread,
            "reference_ms": statistics.median(self.ref_raw_ms or (0.0,)),
        }


Times = Callable[[], tuple[float, float]]
"""Waits for a forward and a backward pass and returns their times [ms]."""


class Clock(Protocol):
    """Times a forward and a backward pass."""

    def start(
        self,
        forward: Callable[[], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
    ) -> Times:
        """Start both, the second on what the first returns."""
        ...


class HostClock:
    """The processor's own clock."""

    def start(
        self,
        forward: Callable[[], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
    ) -> Times:
        """Run both; see `Clock`."""
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
        self._device = device
        cache: int = (
            accelerator(device.type).get_device_properties(device).L2_cache_size
        )
        self._flush = torch.empty(
            self.FLUSHED_SHARE * cache, dtype=torch.int8, device=device
        )
        self.repeats = self.REPEATS
        """How often the flush is written by now."""
        self._num_timely = 0

    def start(
        self,
        forward: Callable[[], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
    ) -> Times:
        """Queue both; again where the device did not stay busy. See `Clock`."""
        device = accelerator(self._device.type)
        # Events are recorded on the current device's stream, kernels run on theirs.
        with device.device(self._device):
            repeats = self.repeats
            while True:
                events: list[Any] = [device.Event(enable_timing=True) for _ in range(4)]
                self._fill_queue(repeats)
                events[0].record()
                output = forward()
                events[1].record()
                was_idle = events[0].query()
                self._fill_queue(repeats)
                events[2].record()
                backward(output)
                events[3].record()
                was_idle = events[2].query() or was_idle
                if not was_idle or repeats >= self.MAX_REPEATS:
                    break
                repeats *= 2
        self._adapt(repeats)

        def times() -> tuple[float, float]:
            events[3].synchronize()
            return events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3])

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


Draw = Callable[[int], InputBatch]
"""Makes a kernel's inputs: number 0 is the warm-up's, 1, 2, ... the timed passes'."""


def _drawn(
    tables: Sequence[TableConfig],
    access: Sequence[AccessDistribution],
    batch_size: int,
    seed: Sequence[int],
    device: torch.device,
) -> Draw:
    """Return what draws batches as ids are accessed."""
    draws = InputDraws(tables, access, batch_size, device)
    return lambda number: draws.draw((*seed, number))


class _Passes:
    """Forward and backward passes of one kernel over a few batches, in turn."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        draw: Draw,
        batch_size: int,
        num_batches: int,
        device: torch.device,
        arena: Arena | None,
        clock: Clock,
        bounds_check: str = BOUNDS_CHECK,
    ) -> None:
        self._clock = clock
        self._kernel = FusedTables(tables, device, arena, bounds_check)
        self._num_features = sum(t.num_features for t in tables)
        self._draw, self._num_batches = draw, num_batches
        self._batches: list[InputBatch] = []
        generator = torch.Generator(device=device)
        generator.manual_seed(0)
        self._grad = torch.empty(batch_size, self._kernel.output_dim, device=device)
        self._grad.normal_(0.0, 0.01, generator=generator)
        self._next = 0

    def draw(self) -> None:
        """Make the next pass's input, so that `start` finds it ready."""
        if self._next % self._num_batches == len(self._batches):
            self._batches.append(self._draw(len(self._batches) + 1))

    def start(self) -> Times:
        """Start forward and backward of the next batch."""
        self.draw()
        batch = self._batches[self._next % self._num_batches]
        self._next += 1
        return self._clock.start(*self._on(batch))

    def warm_up(self, count: int) -> None:
        """Run untimed passes over an input of their own."""
        forward, backward = self._on(self._draw(0))
        for _ in range(count):
            backward(forward())

    def _on(
        self, batch: InputBatch
    ) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
        grad = self._grad[: (len(batch.offsets) - 1) // self._num_features]
        return (
            lambda: self._kernel.forward(batch),
            lambda output: torch.autograd.backward(output, grad),
        )


class Reference:
    """The fixed set that every pass is compared with."""

    NUM_TABLES, ROWS, WIDTH, BATCH_SIZE, POOLING = 4, 250_000, 64, 1_024, 8.0

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        """Build the reference set in memory of its own.

        Args:
            device: The device.
            clock: None: the processor's.
        """
        profile = zipf_profile(
            batch_size=self.BATCH_SIZE,
            pooling_factor=self.POOLING,
            num_embeddings=self.ROWS,
            exponent=1.0,
        )
        tables = [
            TableConfig(
                name=str(i),
                num_embeddings=self.ROWS,
                embedding_dim=self.WIDTH,
                pooling_factor=self.POOLING,
                profile=profile,
            )
            for i in range(self.NUM_TABLES)
        ]
        access = [AccessDistribution.power_law(self.ROWS, 1.0)] * self.NUM_TABLES
        self._passes = _Passes(
            tables,
            _drawn(tables, access, self.BATCH_SIZE, (17,), device),
            self.BATCH_SIZE,
            4,
            device,
            Arena(device, self.NUM_TABLES * self.ROWS * self.WIDTH * 4),
            clock or HostClock(),
            # A unit of time, which bundles of before ids were checked are given in.
            bounds_check="none",
        )

    def run(self) -> float:
        """One forward and backward pass [ms]."""
        return sum(self.run_phases())

    def run_phases(self) -> tuple[float, float]:
        """One forward and one backward pass [ms]."""
        return self._passes.start()()

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
        budget_seconds: float | None = None,
        num_passes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Allocate the arena and the reference.

        Args:
            device: CPU or CUDA.
            arena_bytes: Most weight bytes of a set.
            reference_ms: Nominal time of the reference; None measures it now. A GPU
                has none.
            budget_seconds: Stop repeating a sample after this time. None takes the
                device's: `CPU_PASSES` or `CUDA_PASSES`.
            num_passes: Timed passes that every sample gets, each with an input of its
                own. None takes the device's.
            clock: What times an accelerator's passes; None: a `DeviceClock`.
        """
        self.device = device
        counts = CUDA_PASSES if is_accelerator(device.type) else CPU_PASSES
        if budget_seconds is not None:
            counts = dataclasses.replace(counts, budget_seconds=budget_seconds)
        if num_passes is not None:
            counts = dataclasses.replace(
                counts,
                min_passes=num_passes,
                max_passes=num_passes,
                num_batches=num_passes,
            )
        self._counts = counts
        self._arena: Arena | None = None
        self._reference: Reference | None = None
        self.reference_ms = 0.0
        self._clock: Clock
        if is_accelerator(device.type):
            self._clock = clock or DeviceClock(device)
            reserve_memory(device, arena_bytes)
            return
        keep_freed_memory()
        self._clock, self._arena = HostClock(), Arena(device, arena_bytes)
        self._reference = Reference(device, self._clock)
        self.reference_ms = (
            self._reference.nominal_ms() if reference_ms is None else reference_ms
        )

    def machine_speed(self, num_passes: int = 200) -> float:
        """Return how fast the machine is now, over where `reference_ms` was measured.

        1 where there is no reference.
        """
        if self._reference is None:
            return 1.0
        return self.reference_ms / self._reference.nominal_ms(num_passes)

    def measure(
        self,
        tables: Sequence[TableConfig],
        access: Sequence[AccessDistribution] | None,
        batch_size: int,
        seed: Sequence[int],
        meanwhile: Callable[[], None] | None = None,
    ) -> Measurement:
        """Time forward and backward of the fused kernel over `tables`.

        Args:
            tables: Shards of one rank, each with a profile at `batch_size`.
            access: How the ids of each are drawn; None: as its profile tells.
            batch_size: Samples of a pass.
            seed: Makes the inputs.
            meanwhile: Called once all passes are started: an accelerator is still at
                work on them then.
        """
        if access is None:
            access = [
                AccessDistribution.of_batch(t.profile_at(batch_size), t.num_embeddings)
                for t in tables
            ]
        drawn = _drawn(tables, access, batch_size, seed, self.device)
        return self.measure_on(tables, drawn, batch_size, meanwhile)

    def measure_on(
        self,
        tables: Sequence[TableConfig],
        draw: Draw,
        batch_size: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> Measurement:
        """Time the same on inputs that are made elsewhere.

        Args:
            tables: Shards of one rank.
            draw: Makes the inputs; the warm-up's may be of fewer samples.
            batch_size: Samples of a timed pass.
            meanwhile: As in `measure`.
        """
        passes = _Passes(
            tables,
            draw,
            batch_size,
            self._counts.num_batches,
            self.device,
            self._arena,
            self._clock,
        )
        passes.warm_up(self._counts.warm_up)
        return self._repeat(passes.draw, passes.start, meanwhile)

    def measure_calls(
        self,
        forward: Callable[[], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
    ) -> Measurement:
        """Time anything else that has two directions, as `measure` times a kernel.

        Args:
            forward: Returns an output.
            backward: Takes it.
        """
        for _ in range(self._counts.warm_up):
            backward(forward())
        return self._repeat(lambda: None, lambda: self._clock.start(forward, backward))

    def _repeat(
        self,
        draw: Callable[[], None],
        start: Callable[[], Times],
        meanwhile: Callable[[], None] | None = None,
    ) -> Measurement:
        """Run often enough, each time beside the reference.

        Args:
            draw: Makes the next input, so that `start` finds it ready.
            start: Starts a forward and a backward pass.
            meanwhile: Called once all passes are started.
        """
        counts = self._counts
        started: list[Times] = []
        ref: list[float] = []
        deadline = time.perf_counter() + counts.budget_seconds
        while len(started) < counts.max_passes:
            if len(started) >= counts.min_passes and time.perf_counter() > deadline:
                break
            draw()
            if self._reference is not None:
                # Once untimed: the sample has pushed the reference out of the caches,
                # and a large sample would look cheap beside a reference it slowed down.
                self._reference.run()
                ref.append(self._reference.run())
            started.append(start())
        if meanwhile is not None:
            meanwhile()
        fwd, bwd = zip(*(times() for times in started), strict=True)
        units = [ms / self.reference_ms for ms in ref] or [1.0] * len(fwd)

        def median(passes: Sequence[float]) -> float:
            return statistics.median(p / u for p, u in zip(passes, units, strict=True))

        return Measurement(fwd, bwd, tuple(ref), median(fwd), median(bwd))
