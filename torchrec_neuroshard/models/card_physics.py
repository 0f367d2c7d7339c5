"""The physics of cards without measurements, from published figures.

Cards differ only in data-sheet figures: memory bandwidth, cache, and the width of an
AMD wavefront. All other constants are shared. `benchmarks/bench_published.py` fits them
to published timings of six cards and to measured sets of an H200; its results state the
error on a card that was left out of the fit.

Shapes: `N` shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.models.physical import (
    LEAST_THREADS,
    SET_WORKS,
    WORKS,
    Physics,
    columns,
    wide_state_bytes,
)

Floats = npt.NDArray[np.float64]

_REFERENCE_GB_PER_S = 2_039.0
"""Memory bandwidth of the A100, whose threads are the unit of speed."""
_ID_BYTES, _OFFSET_BYTES, _LOOKUP_WEIGHT_BYTES = 8.0, 8.0, 4.0
_SECTOR_BYTES = 32.0
"""Smallest transfer of memory; each number or row of optimizer state costs one each
way, here on top of its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhysicalConstants:
    """Published figures of a device, and constants that all devices share."""

    memory_gb_per_s: float = 2_039.0
    """Memory bandwidth [GB/s]. This default and the next two are an A100's."""
    cache_mib: float = 40.0
    """Cache for repeated reads of rows and gradients [MiB]: L2, and L3 if any."""
    host_gb_per_s: float = 24.0
    """One-way bandwidth to the host's memory [GB/s]."""
    work_speed: float | None = None
    """Speed of the threads relative to an A100's; None takes the ratio of the memory
    bandwidths. On NVIDIA's cards, that is more accurate than cores times clock, which
    would predict an H200's backward 12 % too high instead of 5 % too low (medians, with
    the H200 left out of the fit)."""
    least_threads: float = LEAST_THREADS
    """Threads of the smallest group that reads a row: a quarter of a warp; 64 on AMD,
    where FBGEMM does not divide wavefronts."""
    efficiency: float = 0.834
    """Share of the memory bandwidth that kernels reach."""
    forward_launch_us: float = 13.1
    """Forward: empty bounds check and kernel, including the gaps before them."""
    backward_launch_us: float = 78.1
    """Backward: empty sort of the ids and update, about ten kernels."""
    sort_pass_us: float = 11.8
    """Backward: kernels that sort 8 bits of the ids."""
    weight_gradient_us: float = 39.0
    """Backward of sets with weighted tables: empty kernels."""
    forward_step_us: float = 0.406
    """Forward: one id of a set's longest bags."""
    backward_step_us: float = 0.494
    """Backward: one id of a set's longest bags."""
    bag_ns: float = 0.713
    """Forward: one bag, with the check of its ids and its offset."""
    lookup_thread_ns: float = 0.00223
    """Forward: one id and thread of its group."""
    sort_bag_ns: float = 0.141
    """Backward: one bag, to find the bag of each id."""
    sort_ns: float = 0.0875
    """Backward: sorting one id."""
    update_thread_ns: float = 0.00431
    """Backward: one id and thread of its group."""
    hot_row_ns: float = 31.2
    """Backward: one row with many lookups."""
    adam_ns: float = 1.48
    """Backward: Adam's arithmetic for one row."""
    weight_gradient_ns: float = 0.438
    """Backward: the gradient of one lookup's weight."""
    host_read: float = 1.27
    """Speed of reading looked-up rows in the host's memory, as a multiple of
    `host_gb_per_s`; above 1, since the hottest rows are cached nevertheless."""
    host_update: float = 1.54
    """Speed of updating rows in the host's memory, as a multiple of `host_gb_per_s`;
    above 1, since both directions run at once."""
    cache_lookup_ns: float = 3.59
    """Forward: finding one id in a cache of rows (`fused_uvm_caching`)."""
    lookup_ns: float = 0.0
    """Forward: one id of any width, for CPUs."""
    gradient_ns: float = 0.0
    """Backward: one id of any width, for CPUs."""

    def __post_init__(self) -> None:
        if not self.memory_gb_per_s > 0:
            raise ConfigError(
                f"the memory bandwidth must be above 0 GB/s, got "
                f"{self.memory_gb_per_s}; pass hbm_mem_bw (or ddr_mem_bw) to the "
                "topology"
            )
        if not self.host_gb_per_s > 0:
            raise ConfigError(
                "the bandwidth to the host's memory must be above 0 GB/s, got "
                f"{self.host_gb_per_s}; pass hbm_to_ddr_mem_bw to the topology"
            )

    @property
    def speed(self) -> float:
        """Speed of the threads relative to an A100's."""
        return self.work_speed or self.memory_gb_per_s / _REFERENCE_GB_PER_S

    @property
    def byte_ms(self) -> float:
        """Time per byte of memory [ms]."""
        return 1e-6 / (self.memory_gb_per_s * self.efficiency)

    def physics(self) -> Physics:
        """Return the constants for each kind of work."""
        byte, ns = self.byte_ms, 1e-6 / self.speed
        forward = {
            "num_lookups": _ID_BYTES * byte + self.lookup_ns * ns,
            "num_bags": _OFFSET_BYTES * byte + self.bag_ns * ns,
            "missed_bytes": byte,
            "output_bytes": byte,
            "weighted_lookups": _LOOKUP_WEIGHT_BYTES * byte,
            "lookup_threads": self.lookup_thread_ns * ns,
            "launch": 1e-3 * self.forward_launch_us,
            "longest_bag": 1e-3 * self.forward_step_us,
            "widened_lookups": self.lookup_thread_ns * ns,
        }
        backward = {
            "num_lookups": _ID_BYTES * byte + (self.sort_ns + self.gradient_ns) * ns,
            "num_bags": _OFFSET_BYTES * byte + self.sort_bag_ns * ns,
            "gradient_bytes": byte,
            "missed_gradient_bytes": byte,
            "updated_bytes": 2.0 * byte,
            "state_rows": 2.0 * _SECTOR_BYTES * byte,
            "adam_rows": self.adam_ns * ns,
            "weighted_lookups": _LOOKUP_WEIGHT_BYTES * byte
            + self.weight_gradient_ns * ns,
            "update_threads": self.update_thread_ns * ns,
            "hot_rows": self.hot_row_ns * ns,
            "launch": 1e-3 * self.backward_launch_us,
            "longest_bag": 1e-3 * self.backward_step_us,
            "widened_updates": self.update_thread_ns * ns,
            "sort_passes": 1e-3 * self.sort_pass_us,
            "weighted_sets": 1e-3 * self.weight_gradient_us,
        }
        shards, sets = (
            np.array([[forward.get(n, 0.0), backward.get(n, 0.0)] for n in names])
            for names in (WORKS, SET_WORKS)
        )
        return Physics(self.cache_mib * 2**20, shards, sets, self.least_threads)


def _state_bytes(column: Mapping[str, Floats]) -> Floats:
    """Return the bytes of optimizer state read and written for distinct rows."""
    rowwise = _SECTOR_BYTES * column["is_rowwise_adagrad"] * column["num_distinct"]
    both: Floats = 2.0 * (wide_state_bytes(column) + rowwise)
    return both


def host_memory_ms(
    features_NF: npt.NDArray[np.float32],
    constants: PhysicalConstants,
    gb_per_s_N: Floats | float,
    missed_N: Floats | None = None,
) -> Floats:
    """Predict the time that rows in the host's memory add to the fused kernel.

    Args:
        features_NF: Columns in FEATURE_NAMES order, not normalised.
        constants: Constants of the device.
        gb_per_s_N: One-way bandwidth to the host's memory.
        missed_N: Shares of the distinct rows that are not in a cache of rows on the
            card; None if there is no cache (`fused_uvm`). The optimizer's state is
            never cached.

    Returns:
        `N x 2` [ms], forward and backward.
    """
    c, column = constants, columns(features_NF)
    bytes_per_ms = np.asarray(gb_per_s_N) * 1e6
    read_bytes_per_ms = bytes_per_ms * c.host_read
    update_bytes_per_ms = bytes_per_ms * c.host_update
    if missed_N is None:
        # Every distinct row crosses the link at least once.
        forward = np.maximum(
            column["lookup_bytes"] / read_bytes_per_ms,
            column["distinct_bytes"] / bytes_per_ms,
        )
        updated = 2.0 * column["distinct_bytes"] + _state_bytes(column)
        backward = updated / update_bytes_per_ms
    else:
        # Each row that enters the cache evicts another.
        swapped = 2.0 * missed_N * column["distinct_bytes"] / update_bytes_per_ms
        found = c.cache_lookup_ns * 1e-6 * column["num_lookups"] / c.speed
        forward = swapped + found
        backward = _state_bytes(column) / update_bytes_per_ms
    return np.stack([forward, backward], axis=1)
