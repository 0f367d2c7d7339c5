"""The physics of measured devices: kinds of work, and what a unit of each takes.

A shard makes the device do work of `WORKS`: ids looked up, bytes missed by the cache,
rows updated. A device is a constant for each kind of work and direction, two launches
and the size of its cache; `bundles.fit` fits them to measured sets. What a fused kernel
takes is the launch and the sum over its shards of work times constant. A trained
network (`network`) bends that sum.

Shapes: `N` shards, `K` kinds of work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.models.physical import missed_bytes
from torchrec_neuroshard.tables.features import FEATURE_NAMES

__all__ = ["BACKWARD", "FORWARD", "WORKS", "Physics", "shard_works"]

Floats = npt.NDArray[np.float64]

WORKS: tuple[str, ...] = (
    "num_tables",
    "num_bags",
    "output_bytes",
    "page_walks",
    "num_lookups",
    "lookup_lines",
    "missed_bytes",
    "sorted_digits",
    "updated_bytes",
    "missed_gradient_bytes",
    "unfused_values",
    "unfused_page_walks",
    "state_rows",
    "weighted_lookups",
    "weighted_bytes",
    "half_distinct_values",
    "half_weighted_values",
)
"""Kinds of work. Names of `features.TOTAL_NAMES` mean the same here.

`page_walks` are distinct rows times the bits of the memory that the table takes beyond
a cache of its own: addresses that lie further apart take longer to translate.
`missed_bytes` are rows that the cache does not hold, by the access histogram.
`updated_bytes` are distinct rows and their optimizer state of the same width.
`state_rows` are distinct rows per number or row of optimizer state.

Of 32 kinds that were tried these are left: a kind stays if leaving it out raises the
mean error of four devices by 0.05 points or more
(`benchmarks/results/cost_models_202611.md`).
"""
NUM_FORWARD = WORKS.index("sorted_digits")
"""The forward pass does the first so many kinds."""
_ONLY_FORWARD = ("num_lookups", "lookup_lines", "missed_bytes")
BACKWARD = np.array([name not in _ONLY_FORWARD for name in WORKS])
"""Beside `WORKS`: whether the backward pass does it."""
FORWARD = np.arange(len(WORKS)) < NUM_FORWARD
_PAGES_FROM_BYTES = 2.0**16
_STATE_BYTES_PER_VALUE = 4.0
_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}


@dataclass(frozen=True, slots=True)
class Physics:
    """A measured device."""

    cache_bytes: float
    """What rows and gradients are read again from."""
    constants_K2: Floats
    """Milliseconds per unit of work, forward and backward."""
    launch_2: Floats
    """Milliseconds of a kernel over no work."""

    def shards_ms(self, features_NF: npt.NDArray[np.float32]) -> Floats:
        """Return what shards take, `N x 2`, launch aside; columns as FEATURE_NAMES."""
        times: Floats = shard_works(features_NF, self.cache_bytes) @ self.constants_K2
        return times


def shard_works(features_NF: npt.NDArray[np.float32], cache_bytes: float) -> Floats:
    """Return the work of shards.

    Args:
        features_NF: Columns in FEATURE_NAMES order, not normalised.
        cache_bytes: Size of the device's cache.

    Returns:
        `N x K`, columns in WORKS order.
    """
    column = {n: features_NF[:, i].astype(np.float64) for n, i in _INDEX.items()}
    distinct, outputs = column["num_distinct"], column["output_bytes"]
    walks = distinct * np.log2(1.0 + column["weight_bytes"] / _PAGES_FROM_BYTES)
    gradients = outputs / np.maximum(column["num_bags"], 1e-9) * column["num_lookups"]
    kept = np.minimum(1.0, cache_bytes / np.maximum(outputs, 1.0))
    fused = column["is_rowwise_adagrad"] * (1.0 - column["is_half"])
    fused = fused * (1.0 - column["is_shared"])
    wide_states = column["is_adagrad"] + 2.0 * column["is_adam"]
    width = np.round(2.0 ** column["log2_width"])
    made = {
        "page_walks": walks,
        "missed_bytes": missed_bytes(features_NF, column, cache_bytes),
        "updated_bytes": column["distinct_bytes"]
        + _STATE_BYTES_PER_VALUE * wide_states * width * distinct,
        "missed_gradient_bytes": np.maximum(gradients - outputs, 0.0) * (1.0 - kept),
        "unfused_page_walks": (1.0 - fused) * walks,
        "state_rows": distinct * (wide_states + column["is_rowwise_adagrad"]),
    }
    return np.stack([made[n] if n in made else column[n] for n in WORKS], axis=1)
