"""What fused kernels take on a card that nothing was measured on.

Each shard's time is what moving its bytes takes at the memory's bandwidth and what
handling its ids and rows takes, joined as the root of the sum of squares: the two
overlap, and the longer one decides. Bytes that a reuse model says are read again from
the card's cache do not count as moved. A set's time is the sum over its shards, the
launch of its kernels, and the steps of its longest bags.

The constants are few, and shared by all cards: fitted to published timings of V100,
A100, H100, H200, MI250X and MI350 by `benchmarks/bench_published.py`, whose results say
how far off they are on a card that is left out. A card brings data-sheet figures alone:
bandwidths, caches, and how many threads its cores issue instructions for.

Shapes: `N` shards, `F` features, `C` = 17 count bins of the access histogram.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.tables.features import FEATURE_NAMES
from torchrec_neuroshard.tables.profile import NUM_COUNT_BINS, bin_mean_counts

__all__ = [
    "STEP_POWER",
    "PhysicalConstants",
    "ShardTimes",
    "host_memory_ms",
    "missed_bytes",
    "shard_times",
    "updated_bytes",
]

Floats = npt.NDArray[np.float64]

_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}
_REFERENCE_THREADS_PER_NS = 19_500.0
_REFERENCE_GB_PER_S = 2_000.0
"""Work that is not bandwidth is counted for an A100, and shrinks with what a card's
cores issue. Where that is not known, with the cube root of the memory's bandwidth:
faster memory comes with faster cores."""
_ID_BYTES, _OFFSET_BYTES, _LOOKUP_WEIGHT_BYTES = 8.0, 8.0, 4.0
_SECTOR_BYTES = 32.0
"""Least that memory moves: what row-wise Adagrad's one number per row costs, each
way."""
_STATE_BYTES_PER_VALUE = 4.0
STEP_POWER = 4.0
"""The longest bag of a set is the 4th root of the sum over its shards of their mean bag
lengths to the 4th power: a maximum that sums can tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhysicalConstants:
    """A device in its published figures, and what all devices share."""

    memory_gb_per_s: float = 2_039.0
    """Memory bandwidth [GB/s]. Default: an A100's, as the two below."""
    cache_mib: float = 40.0
    """What rows and gradients are read again from [MiB]: L2, and L3 if there is
    one."""
    threads_per_ns: float | None = None
    """Threads that its cores issue an instruction for; None: not known."""
    host_gb_per_s: float = 24.0
    """Bandwidth to the host's memory, one way [GB/s]."""
    efficiency: float = 0.85
    """Share of the memory bandwidth that kernels reach."""
    forward_launch_us: float = 20.0
    """Bounds check and forward kernel of no work, gaps before them included. The check
    of many ids is not: current kernels leave no room for it in published times of both,
    though older ones took a quarter of the forward."""
    backward_launch_us: float = 107.0
    """Sort of the ids and update kernels of no work: about ten kernels."""
    bag_step_us: float = 0.86
    """One id after the other of a set's longest bags."""
    bag_ns: float = 0.154
    """Forward, one bag: a group of threads that reads where it begins and writes it."""
    lookup_ns: float = 0.124
    """Forward, one id."""
    gather_gb_per_s: float = 4_500.0
    """Forward, rows through the cache."""
    sort_ns: float = 0.164
    """Backward, sorting one id."""
    gradient_ns: float = 0.35
    """Backward, one id."""
    gradient_gb_per_s: float = 2_900.0
    """Backward, gradients through the cache."""
    access_ns: float = 0.336
    """Backward, reading and writing a distinct row, and each number or row of its
    optimizer state."""
    host_read: float = 1.27
    """What reading looked-up rows in the host's memory reaches, in `host_gb_per_s`:
    above 1, since the hottest are still cached."""
    host_update: float = 1.5
    """What updating rows there reaches: both ways at once."""
    cache_lookup_ns: float = 3.7
    """Forward, finding one id in a cache of rows (`fused_uvm_caching`)."""

    backward_factor: float = 1.0
    """On the time of backward kernels beside their launch."""

    def __post_init__(self) -> None:
        if not self.memory_gb_per_s > 0:
            raise ConfigError(
                f"memory_gb_per_s must be above 0, got {self.memory_gb_per_s}; give "
                "the topology its hbm_mem_bw (or ddr_mem_bw)"
            )
        if not self.host_gb_per_s > 0:
            raise ConfigError(
                f"host_gb_per_s must be above 0, got {self.host_gb_per_s}; give the "
                "topology its hbm_to_ddr_mem_bw"
            )

    @property
    def speed(self) -> float:
        """How many times as fast as the reference card it does other work."""
        if self.threads_per_ns is not None:
            return self.threads_per_ns / _REFERENCE_THREADS_PER_NS
        return float(np.cbrt(self.memory_gb_per_s / _REFERENCE_GB_PER_S))


@dataclass(frozen=True, slots=True)
class ShardTimes:
    """What shards add to a set's kernels, launches aside [ms], each `N`."""

    forward: Floats
    sort: Floats
    """Backward: ids put in the order of their rows."""
    update: Floats
    """Backward: gradients gathered, rows and optimizer state updated."""
    weight_gradient: Floats
    """Backward of weighted tables: gradient of the lookups' weights."""
    steps: Floats
    """Mean bag length to the power of `STEP_POWER`: not a time."""

    @property
    def backward(self) -> Floats:
        """All of the backward."""
        total: Floats = self.sort + self.update + self.weight_gradient
        return total


def _columns(features_NF: npt.NDArray[np.float32]) -> Mapping[str, Floats]:
    return {n: features_NF[:, i].astype(np.float64) for n, i in _INDEX.items()}


def missed_bytes(
    features_NF: npt.NDArray[np.float32], column: Mapping[str, Floats], cache: float
) -> Floats:
    """Bytes of rows that come from memory: of each row once, and what the cache lacks.

    The rows of most lookups fill the cache first; tables come one after the other, so
    each has all of it.
    """
    ids_NC = features_NF[:, -NUM_COUNT_BINS:] * column["num_distinct"][:, None]
    counts_NC = bin_mean_counts(ids_NC, column["num_lookups"])
    row_bytes = column["lookup_bytes"] / np.maximum(column["num_lookups"], 1e-9)
    held_NC = ids_NC * row_bytes[:, None]
    hotter_NC = np.cumsum(held_NC[:, ::-1], axis=1)[:, ::-1] - held_NC
    missing_NC = 1.0 - np.clip(
        (cache - hotter_NC) / np.maximum(held_NC, 1e-9), 0.0, 1.0
    )
    repeated_NC = held_NC * (counts_NC - 1.0) * missing_NC
    missed: Floats = column["distinct_bytes"] + repeated_NC.sum(axis=1)
    return missed


def shard_times(
    features_NF: npt.NDArray[np.float32], constants: PhysicalConstants
) -> ShardTimes:
    """Predict what shards add to the kernels of their set.

    Args:
        features_NF: Columns in FEATURE_NAMES order, not normalised.
        constants: The device.
    """
    c, column = constants, _columns(features_NF)
    bytes_per_ms = c.memory_gb_per_s * 1e6 * c.efficiency
    cache = c.cache_mib * 2**20
    ids, distinct = column["num_lookups"], column["num_distinct"]
    outputs, bags = column["output_bytes"], np.maximum(column["num_bags"], 1e-9)
    indices = (
        _ID_BYTES * ids
        + _LOOKUP_WEIGHT_BYTES * column["weighted_lookups"]
        + _OFFSET_BYTES * column["num_bags"]
    )

    def joined(work_ns: Floats, through_cache_ms: Floats, moved: Floats) -> Floats:
        work_ms = (work_ns * 1e-6 + through_cache_ms) / c.speed
        both: Floats = np.hypot(work_ms, moved / bytes_per_ms)
        return both

    moved = missed_bytes(features_NF, column, cache) + outputs + indices
    forward = joined(
        c.lookup_ns * ids + c.bag_ns * column["num_bags"],
        column["lookup_bytes"] / (c.gather_gb_per_s * 1e6),
        moved,
    )
    # Each id reads the gradient of its bag; what the cache cannot hold, from memory.
    gradients = outputs / bags * ids
    kept = np.minimum(1.0, cache / np.maximum(outputs, 1.0))
    moved = np.minimum(gradients, outputs)
    moved = moved + np.maximum(gradients - outputs, 0.0) * (1.0 - kept)
    moved = moved + indices + updated_bytes(column)
    update = joined(
        c.gradient_ns * ids + c.access_ns * distinct * (1.0 + _states(column)),
        gradients / (c.gradient_gb_per_s * 1e6),
        moved,
    )
    weighted = column["is_weighted"] > 0
    return ShardTimes(
        forward=forward,
        sort=c.backward_factor * c.sort_ns * 1e-6 * ids / c.speed,
        update=c.backward_factor * update,
        weight_gradient=c.backward_factor * np.where(weighted, forward, 0.0),
        steps=(ids / bags) ** STEP_POWER,
    )


def updated_bytes(column: Mapping[str, Floats]) -> Floats:
    """Bytes of distinct rows and of their optimizer state, read and written."""
    return 2.0 * column["distinct_bytes"] + _state_bytes(column)


def _states(column: Mapping[str, Floats]) -> Floats:
    """Rows or numbers of optimizer state beside a row of weights."""
    states: Floats = (
        column["is_rowwise_adagrad"] + column["is_adagrad"] + 2.0 * column["is_adam"]
    )
    return states


def _state_bytes(column: Mapping[str, Floats]) -> Floats:
    width = np.round(2.0 ** column["log2_width"])
    values = (column["is_adagrad"] + 2.0 * column["is_adam"]) * width
    per_row = values * _STATE_BYTES_PER_VALUE
    per_row = per_row + _SECTOR_BYTES * column["is_rowwise_adagrad"]
    both: Floats = 2.0 * per_row * column["num_distinct"]
    return both


def host_memory_ms(
    features_NF: npt.NDArray[np.float32],
    constants: PhysicalConstants,
    gb_per_s_N: Floats | float,
    missed_N: Floats | None = None,
) -> Floats:
    """Predict what rows in the host's memory add to the fused kernel's time.

    Args:
        features_NF: Columns in FEATURE_NAMES order, not normalised.
        constants: The device.
        gb_per_s_N: Bandwidth to the host's memory, one way.
        missed_N: Shares of the distinct rows that a cache of rows on the card lacks;
            None: there is no cache (`fused_uvm`). The optimizer's state is not cached.

    Returns:
        `N x 2` [ms], forward and backward.
    """
    c, column = constants, _columns(features_NF)
    bytes_per_ms = np.asarray(gb_per_s_N) * 1e6
    read_bytes_per_ms = bytes_per_ms * c.host_read
    update_bytes_per_ms = bytes_per_ms * c.host_update
    if missed_N is None:
        # Where few rows repeat, all of them cross the link.
        forward = np.maximum(
            column["lookup_bytes"] / read_bytes_per_ms,
            column["distinct_bytes"] / bytes_per_ms,
        )
        backward = updated_bytes(column) / update_bytes_per_ms
    else:
        # A row that comes in puts another out.
        swapped = 2.0 * missed_N * column["distinct_bytes"] / update_bytes_per_ms
        found = c.cache_lookup_ns * 1e-6 * column["num_lookups"] / c.speed
        forward = swapped + found
        backward = _state_bytes(column) / update_bytes_per_ms
    return np.stack([forward, backward], axis=1)
