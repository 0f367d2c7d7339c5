"""Timing fused kernels so that the same set gives the same milliseconds again.

A CPU's speed drifts by tens of percent within minutes. So every pass of a sample is
timed beside a pass of one fixed reference set, and the median of the ratios is given in
units of the reference's nominal time. A GPU is timed by events behind a flush of its
L2 cache; there the reference is left out.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.collect.tbe import Arena, FusedTables, InputBatch, draw_inputs
from torchrec_neuroshard.profiles import zipf_profile
from torchrec_neuroshard.tables import TableConfig

__all__ = ["Measurement", "Reference", "SetTimer", "keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory instead of returning it to the system.

    Otherwise each pass's output is fresh memory, and its first touch costs up to ten
    times what the kernel does. Affects this process only.

    Returns:
        Whether the C library has the setting (glibc).
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6")
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Raw passes of one sample and what follows from them [ms]."""

    fwd_raw_ms: tuple[float, ...]
    bwd_raw_ms: tuple[float, ...]
    ref_raw_ms: tuple[float, ...]
    fwd_ms: float
    bwd_ms: float


class _Passes:
    """Forward and backward passes of one kernel over a few batches, in turn."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        access: Sequence[AccessDistribution],
        batch_size: int,
        num_batches: int,
        seed: Sequence[int],
        device: torch.device,
        arena: Arena | None,
    ) -> None:
        self._device = device
        self._kernel = FusedTables(tables, device, arena)
        self._tables, self._access = tables, access
        self._batch_size, self._seed = batch_size, seed
        self._num_batches = num_batches
        self._batches: list[InputBatch] = []
        generator = torch.Generator(device=device)
        generator.manual_seed(0)
        self._grad = torch.empty(batch_size, self._kernel.output_dim, device=device)
        self._grad.normal_(0.0, 0.01, generator=generator)
        self._next = 0
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(2 * cache, dtype=torch.int8, device=device)

    def draw(self) -> None:
        """Make the next pass's input, so that `run` finds it ready."""
        number = self._next % self._num_batches
        if number == len(self._batches):
            self._batches.append(
                draw_inputs(
                    self._tables,
                    self._access,
                    self._batch_size,
                    (*self._seed, number),
                    self._device,
                )
            )

    def run(self) -> tuple[float, float]:
        """Forward and backward of the next batch [ms]."""
        self.draw()
        batch = self._batches[self._next % self._num_batches]
        self._next += 1
        if self._flush is None:
            start = time.perf_counter()
            output = self._kernel.forward(batch)
            middle = time.perf_counter()
            torch.autograd.backward(output, self._grad)
            end = time.perf_counter()
            return (middle - start) * 1e3, (end - middle) * 1e3
        self._flush.zero_()
        events: list[Any] = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(4)
        ]
        events[0].record()
        output = self._kernel.forward(batch)
        events[1].record()
        self._flush.zero_()
        events[2].record()
        torch.autograd.backward(output, self._grad)
        events[3].record()
        events[3].synchronize()
        return events[0].elapsed_time(events[1]), events[2].elapsed_time(events[3])


class Reference:
    """The fixed set that every pass is compared with."""

    NUM_TABLES, ROWS, WIDTH, BATCH_SIZE, POOLING = 4, 250_000, 64, 1_024, 8.0

    def __init__(self, device: torch.device) -> None:
        """Build the reference set in memory of its own."""
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
            access,
            self.BATCH_SIZE,
            4,
            (17,),
            device,
            Arena(device, self.NUM_TABLES * self.ROWS * self.WIDTH * 4),
        )

    def run(self) -> float:
        """One forward and backward pass [ms]."""
        return sum(self._passes.run())

    def nominal_ms(self, num_passes: int = 200) -> float:
        """Median of many passes [ms]."""
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
        budget_seconds: float = 0.6,
        min_passes: int = 5,
        max_passes: int = 19,
        num_batches: int = 20,
    ) -> None:
        """Allocate the arena and the reference.

        Args:
            device: CPU or CUDA.
            arena_bytes: Most weight bytes of a set.
            reference_ms: Nominal time of the reference; None measures it now. A GPU
                has none.
            budget_seconds: Stop repeating a sample after this time.
            min_passes: Timed passes that every sample gets.
            max_passes: Most timed passes.
            num_batches: Different inputs that the passes take in turn; as in training,
                where no batch comes twice, unless fewer than the passes.
        """
        self._device = device
        self._budget_seconds = budget_seconds
        self._min_passes, self._max_passes = min_passes, max_passes
        self._num_batches = num_batches
        self._arena = Arena(device, arena_bytes) if device.type == "cpu" else None
        self._reference: Reference | None = None
        self.reference_ms = 0.0
        if device.type == "cpu":
            keep_freed_memory()
            self._reference = Reference(device)
            self.reference_ms = (
                self._reference.nominal_ms() if reference_ms is None else reference_ms
            )

    def measure(
        self,
        tables: Sequence[TableConfig],
        access: Sequence[AccessDistribution],
        batch_size: int,
        seed: Sequence[int],
    ) -> Measurement:
        """Time forward and backward of the fused kernel over `tables`.

        Args:
            tables: Shards of one rank, each with a profile at `batch_size`.
            access: How the ids of each are drawn.
            batch_size: Samples of a pass.
            seed: Makes the inputs.
        """
        passes = _Passes(
            tables,
            access,
            batch_size,
            self._num_batches,
            seed,
            self._device,
            self._arena,
        )
        passes.run()
        if self._device.type == "cuda":
            passes.run()
            passes.run()
        fwd: list[float] = []
        bwd: list[float] = []
        ref: list[float] = []
        deadline = time.perf_counter() + self._budget_seconds
        while len(fwd) < self._max_passes:
            if len(fwd) >= self._min_passes and time.perf_counter() > deadline:
                break
            passes.draw()
            if self._reference is not None:
                # Once untimed: the sample has pushed the reference out of the caches,
                # and a large sample would look cheap beside a reference it slowed down.
                self._reference.run()
                ref.append(self._reference.run())
            forward, backward = passes.run()
            fwd.append(forward)
            bwd.append(backward)
        return Measurement(
            fwd_raw_ms=tuple(fwd),
            bwd_raw_ms=tuple(bwd),
            ref_raw_ms=tuple(ref),
            fwd_ms=self._nominal(fwd, ref),
            bwd_ms=self._nominal(bwd, ref),
        )

    def _nominal(self, raw: Sequence[float], ref: Sequence[float]) -> float:
        if not ref:
            return statistics.median(raw)
        ratios = [a / b for a, b in zip(raw, ref, strict=True)]
        return statistics.median(ratios) * self.reference_ms
