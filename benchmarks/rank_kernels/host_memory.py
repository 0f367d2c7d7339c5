"""Cases with tables in host memory (UVM), without and with caches of rows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    CacheAlgorithm,
    EmbeddingLocation,
    RecordCacheMetrics,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import UVMCacheStatsIndex

from rank_kernels.shapes import USUAL, Case, Notes, Passes, Shape, draw_shapes
from rank_kernels.tables import Gradient, build, fused
from torchrec_neuroshard.measure.kernels import InputBatch

WARM_UP, FRESH, COUNTED = (4, 60), 24, 6
"""Fewest and most batches that fill a cache; batches of timed passes; batches whose
misses are counted."""


def cached(
    shape: Shape,
    device: torch.device,
    notes: Notes,
    algorithm: CacheAlgorithm,
    load_factor: float,
) -> Passes:
    """Yield passes of tables in host memory behind a cache that is already full.

    Every pass has a new batch, since rows of the last one are in the cache. Misses are
    counted after the timed passes.
    """
    module = build(
        shape,
        device,
        location=EmbeddingLocation.MANAGED_CACHING,
        cache_algorithm=algorithm,
        cache_load_factor=load_factor,
        gather_uvm_cache_stats=True,
    )
    module.gather_uvm_cache_stats = False  # not during timed passes
    numbers, gradient = itertools.count(), Gradient(device)

    def draw() -> InputBatch:
        return shape.draw(device, next(numbers))

    def distinct(batch: InputBatch) -> int:
        ends = batch.offsets[:: shape.batch_size].tolist()
        parts = (batch.indices_L[a:b] for a, b in itertools.pairwise(ends))
        return sum(len(torch.unique(part)) for part in parts)

    def look_up(batch: InputBatch) -> torch.Tensor:
        output: torch.Tensor = module(batch.indices_L, batch.offsets)
        return output

    rows = load_factor * sum(t.num_embeddings for t in shape.tables)
    needed = math.ceil(3 * rows / distinct(draw()))
    warm_up = min(max(needed, WARM_UP[0]), WARM_UP[1])
    with torch.no_grad():
        for _ in range(warm_up):
            look_up(draw())

    def count() -> dict[str, Any]:
        module.gather_uvm_cache_stats = True
        module.record_cache_metrics = RecordCacheMetrics(True, False)
        module.reset_uvm_cache_stats()
        module.cache_miss_counter.zero_()
        batches = [draw() for _ in range(COUNTED)]
        with torch.no_grad():
            for batch in batches:
                look_up(batch)
        stats = module.get_uvm_cache_stats().tolist()
        return {
            "batches": COUNTED,
            "warm_up_batches": warm_up,
            "cache_rows": module.lxu_cache_weights.shape[0],
            "distinct": sum(map(distinct, batches)),
            # Counted before rows are loaded; the statistics below are of LRU alone.
            "missed": int(module.cache_miss_counter[1]),
            **{index.name: stats[index] for index in UVMCacheStatsIndex},
        }

    notes["misses"] = count
    fresh = itertools.cycle([draw() for _ in range(FRESH)])
    while True:
        yield (
            lambda: look_up(next(fresh)),  # also if the clock repeats the pass
            lambda output: torch.autograd.backward(output, gradient.like(output)),
        )


def uvm_cases(quick: bool) -> Iterator[Case]:
    """Yield tables in host memory, without and with caches."""
    ranges = dataclasses.replace(
        USUAL,
        rows=(3e5, 1e7),
        num_tables=(1, 3),
        pooling=(1, 20),
        widths=(32, 64, 128),
        max_bytes=2 * 2**30,
        max_values=2**28,
    )
    managed = EmbeddingLocation.MANAGED
    for shape in draw_shapes(12, ranges, quick):
        yield shape.case("device", partial(fused, shape))
        yield shape.case("managed", partial(fused, shape, location=managed))
        for algorithm, load in (("LRU", 0.05), ("LRU", 0.2), ("LFU", 0.2)):
            own = {"algorithm": CacheAlgorithm[algorithm], "load_factor": load}
            yield shape.case(f"{algorithm} {load}", partial(cached, shape, **own))
