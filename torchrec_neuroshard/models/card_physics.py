"""The physics of cards without measurements, from published figures.

Card by card, only data-sheet figures differ: memory bandwidth, cache, and the width of
an AMD wavefront. All other constants are shared. `benchmarks/bench_published.py` fits
them to published timings of six cards and to sets that were measured on an H200; its
results say how far off they are on a card that is left out.

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

__all__ = ["PhysicalConstants", "host_memory_ms"]

Floats = npt.NDArray[np.float64]

_REFERENCE_GB_PER_S = 2_039.0
"""Work of threads is counted for an A100."""
_ID_BYTES, _OFFSET_BYTES, _LOOKUP_WEIGHT_BYTES = 8.0, 8.0, 4.0
_SECTOR_BYTES = 32.0
"""Least that memory moves: what a number or row of optimizer state costs each way, here
on top of its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhysicalConstants:
    """A device in its published figures, and what all devices share."""

    memory_gb_per_s: float = 2_039.0
    """Memory bandwidth [GB/s]. Default: an A100's, as the two below."""
    cache_mib: float = 40.0
    """What rows and gradients are read again from [MiB]: L2, and L3 if there is
    one."""
    host_gb_per_s: float = 24.0
    """Bandwidth to the host's memory, one way [GB/s]."""
    work_speed: float | None = None
    """How many times as fast as an A100 its threads work; None: as its memory. On
    NVIDIA's cards bandwidth tells it better than cores and clocks, which would put the
    backward of an H200 12 % too high in place of 5 % too low (medians, left out)."""
    least_threads: float = LEAST_THREADS
    """Threads of the smallest group that reads a row: a quarter of a warp; 64 where
    FBGEMM does not divide its wavefronts (AMD)."""
    efficiency: float = 0.834
    """Share of the memory bandwidth that kernels reach."""
    forward_launch_us: float = 13.1
    """Bounds check and forward kernel of no work, gaps before them included."""
    backward_launch_us: float = 78.1
    """Sort of the ids and update kernels of no work: about ten kernels."""
    sort_pass_us: float = 11.8
    """Backward, kernels for 8 bits of the ids."""
    weight_gradient_us: float = 39.0
    """Backward of sets with weighted tables: kernels of no work."""
    forward_step_us: float = 0.406
    """Forward, one id after the other of a set's longest bags."""
    backward_step_us: float = 0.494
    """Backward, the same."""
    bag_ns: float = 0.713
    """Forward, one bag: the check of its ids, and where it begins."""
    lookup_thread_ns: float = 0.00223
    """Forward, one id and thread of its group."""
    sort_bag_ns: float = 0.141
    """Backward, one bag: which bag each id is of."""
    sort_ns: float = 0.0875
    """Backward, sorting one id."""
    update_thread_ns: float = 0.00431
    """Backward, one id and thread of its group."""
    hot_row_ns: float = 31.2
    """Backward, a row of many lookups."""
    adam_ns: float = 1.48
    """Backward, Adam's arithmetic for one row."""
    weight_gradient_ns: float = 0.438
    """Backward, the gradient of one lookup's weight."""
    host_read: float = 1.27
    """What reading looked-up rows in the host's memory reaches, in `host_gb_per_s`:
    above 1, since the hottest are still cached."""
    host_update: float = 1.54
    """What updating rows there reaches: both ways at once."""
    cache_lookup_ns: float = 3.59
    """Forward, finding one id in a cache of rows (`fused_uvm_caching`)."""
    lookup_ns: float = 0.0
    """Forward, one id of any width: of CPUs."""
    gradient_ns: float = 0.0
    """Backward, one id of any width: of CPUs."""

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
        """How many times as fast as the reference card its threads work."""
        return self.work_speed or self.memory_gb_per_s / _REFERENCE_GB_PER_S

    @property
    def byte_ms(self) -> float:
        """Milliseconds that a byte of memory takes."""
        return 1e-6 / (self.memory_gb_per_s * self.efficiency)

    def physics(self) -> Physics:
        """Return the constants of each kind of work."""
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
    """Bytes of the optimizer state of distinct rows, read and written."""
    rowwise = _SECTOR_BYTES * column["is_rowwise_adagrad"] * column["num_distinct"]
    both: Floats = 2.0 * (wide_state_bytes(column) + rowwise)
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
    c, column = constants, columns(features_NF)
    bytes_per_ms = np.asarray(gb_per_s_N) * 1e6
    read_bytes_per_ms = bytes_per_ms * c.host_read
    update_bytes_per_ms = bytes_per_ms * c.host_update
    if missed_N is None:
        # Where few rows repeat, all of them cross the link.
        forward = np.maximum(
            column["lookup_bytes"] / read_bytes_per_ms,
            column["distinct_bytes"] / bytes_per_ms,
        )
        updated = 2.0 * column["distinct_bytes"] + _state_bytes(column)
        backward = updated / update_bytes_per_ms
    else:
        # A row that comes in puts another out.
        swapped = 2.0 * missed_N * column["distinct_bytes"] / update_bytes_per_ms
        found = c.cache_lookup_ns * 1e-6 * column["num_lookups"] / c.speed
        forward = swapped + found
        backward = _state_bytes(column) / update_bytes_per_ms
    return np.stack([forward, backward], axis=1)
