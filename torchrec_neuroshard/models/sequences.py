"""Unpooled lookups on CPUs, the kernels of `EmbeddingCollection` tables.

On CPUs, FBGEMM has other kernels for rows that are not pooled. The forward copies a row
for each id. The backward adds up the gradients of each distinct id in a hash map that
all tables of a kernel share, and then updates the rows. Pooled kernels sort the ids
instead, which is several times as fast. On GPUs, both run the same kind of kernel, and
a row that is not pooled counts as a bag of one id.

Source: FBGEMM 1.8, `split_embedding_nobag_codegen_forward_cpu_kernel` and
`split_embedding_nobag_backward_exact_cpu_kernel`.

Shapes: `N` shards, `S` sets, `K` kinds of work, `V` = 6 values of an encoding, `2`
forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.models.physical import columns, missed_bytes, page_walks

Floats = npt.NDArray[np.float64]

SHARD_WORKS: tuple[tuple[str, ...], tuple[str, ...]] = (
    ("num_lookups", "output_bytes", "missed_bytes", "page_walks", "half_bytes"),
    (
        "num_lookups",
        "output_bytes",
        "num_distinct",
        "page_walks",
        "state_bytes",
        "half_distinct_values",
    ),
)
"""Kinds of a shard's work, forward and backward. `output_bytes` are those of fp32 rows,
one for each id; `half_bytes` are the part that is converted from fp16; `state_bytes`
are read for the optimizer's state. See `physical.WORKS` for the others."""
SET_WORKS: tuple[tuple[str, ...], tuple[str, ...]] = (
    ("launch",),
    ("launch", "map_inserts", "map_finds"),
)
"""Kinds of a set's work. A distinct id is inserted into the hash map, and each id is
found in it. Both take longer the larger the map is."""
NUM_VALUES = 6
"""Values of a shard's encoding: 1, forward and backward [ms], distinct ids, bytes of
the hash map, ids."""
_ENTRY_BYTES = 128.0
"""Bytes of an entry of the hash map, without its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceKernels:
    """The physics of one CPU's unpooled kernels."""

    constants: tuple[Mapping[str, float], Mapping[str, float]]
    """Kind of work -> milliseconds per unit, forward and backward; others take 0."""
    cache_bytes: tuple[float, float]
    """Forward, the cache for repeated reads of rows. Backward, the size from which the
    hash map becomes slow."""
    error: float
    """Mean relative error of the total on sets of held-out tables."""
    device: str
    """CPU that was measured."""
    reference_ms: float
    """Time of the reference set (`measure.clock`) in the constants' unit."""
    num_sets: int
    """Sets that the constants were fitted to."""

    def __post_init__(self) -> None:
        known = [{*s, *k} for s, k in zip(SHARD_WORKS, SET_WORKS, strict=True)]
        values = [v for of in self.constants for v in of.values()]
        sizes = (*self.cache_bytes, self.reference_ms, *values)
        if any(
            not names >= {*of} for names, of in zip(known, self.constants, strict=True)
        ):
            raise ValueError(f"unknown kinds of work in {self.constants}")
        if not all(math.isfinite(v) and v >= 0 for v in (self.error, *sizes)):
            raise ValueError("constants and sizes must be finite and at least 0")

    def encode(self, features_NF: npt.NDArray[np.float32], unit: float) -> Floats:
        """Return encodings of shards, `N x V`.

        Args:
            features_NF: Columns in FEATURE_NAMES order.
            unit: Factor on all times.
        """
        ms_2N = [
            shard_works(features_NF, direction, self.cache_bytes[direction])
            @ self._constants(direction, SHARD_WORKS)
            for direction in (0, 1)
        ]
        ones = np.ones(len(features_NF))
        values = np.stack([ones, *ms_2N, *map_values(features_NF).T], axis=1)
        values[:, 1:3] *= unit
        return values

    def predict(self, sums_SV: Floats, unit: float) -> Floats:
        """Return the time of sets, `S x 2` [ms]; 0 for those without such shards."""
        times_S2 = np.maximum(sums_SV[:, 1:3], 0.0)
        for direction in (0, 1):
            works = set_works(sums_SV[:, 3:], direction, self.cache_bytes[direction])
            times_S2[:, direction] += (
                unit * works @ self._constants(direction, SET_WORKS)
            )
        return np.where(sums_SV[:, :1] > 0.5, times_S2, 0.0)

    def _constants(
        self, direction: int, works: tuple[tuple[str, ...], tuple[str, ...]]
    ) -> Floats:
        return np.array(
            [self.constants[direction].get(n, 0.0) for n in works[direction]]
        )


def shard_works(
    features_NF: npt.NDArray[np.float32], direction: int, cache_bytes: float
) -> Floats:
    """Return the work of shards, `N x K`; 0 is forward, 1 backward."""
    column = columns(features_NF)
    width = np.round(2.0 ** column["log2_width"])
    rowwise = column["is_rowwise_adagrad"] + column["is_adagrad"]
    made: dict[str, Callable[[], Floats]] = {
        "missed_bytes": lambda: missed_bytes(features_NF, cache_bytes),
        "page_walks": lambda: page_walks(column),
        "half_bytes": lambda: column["is_half"] * column["output_bytes"],
        "state_bytes": lambda: 4.0 * rowwise * width * column["num_distinct"],
    }
    names = SHARD_WORKS[direction]
    return np.stack([made[n]() if n in made else column[n] for n in names], axis=1)


def map_values(features_NF: npt.NDArray[np.float32]) -> Floats:
    """Return each shard's distinct ids, bytes of the hash map, and ids, `N x 3`."""
    column = columns(features_NF)
    distinct, width = column["num_distinct"], np.round(2.0 ** column["log2_width"])
    held = distinct * (_ENTRY_BYTES + 4.0 * width)
    return np.stack([distinct, held, column["num_lookups"]], axis=1)


def set_works(sums_S3: Floats, direction: int, cache_bytes: float) -> Floats:
    """Return the work of sets, `S x K`, from the sums of their `map_values`."""
    ones = np.ones((len(sums_S3), 1))
    if not direction:
        return ones
    distinct, held, ids = np.maximum(sums_S3, 0.0).T
    depth = np.log2(1.0 + held / cache_bytes)
    return np.concatenate([ones, np.stack([distinct * depth, ids * depth], axis=1)], 1)


CPU_SEQUENCES = SequenceKernels(
    constants=(
        {
            "launch": 0.9957,
            "num_lookups": 1.044e-05,
            "output_bytes": 1.173e-07,
            "missed_bytes": 3.41e-07,
            "page_walks": 1.502e-05,
            "half_bytes": 3.777e-07,
        },
        {
            "launch": 0.4133,
            "map_inserts": 0.0006573,
            "map_finds": 9.988e-06,
            "num_lookups": 3.641e-05,
            "output_bytes": 1.028e-07,
            "num_distinct": 0.001147,
            "page_walks": 3.517e-05,
            "state_bytes": 3.281e-07,
            "half_distinct_values": 2.809e-06,
        },
    ),
    cache_bytes=(4531172.0, 723585.0),
    error=0.105,
    device="AMD EPYC (25/1)",
    reference_ms=12.045807500000283,
    num_sets=552,
)
"""Of bundles without sequences. See `benchmarks/results/sequences_202611.md`."""
SCALE_POWER = 0.5
"""Power of the ratio of both CPUs' reference sets that scales times of another CPU.
With 1, pooled kernels of another CPU are 94 % off, without scaling 87 %."""
OTHER_CPU_ERROR = 0.39
"""Mean relative error of pooled kernels that were scaled so, over six pairs of CPUs."""
