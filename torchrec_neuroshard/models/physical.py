"""What fused kernels take on a card that nothing was measured on.

A kernel works on all tables of a set at once. Its forward takes the launch, and on top
of it the longer of two things: one id after the other of the longest bags, or all of
the work. The work is moving bytes to and from memory, and what threads do per bag and
per id. A group of threads reads one row; all groups are as wide as the widest table of
the set needs, so a narrow table costs more beside a wide one. The backward sorts the
ids, sums the gradients of each row, and updates each row once.

Card by card, only data-sheet figures differ: memory bandwidth, cache, and the width of
an AMD wavefront. All other constants are shared. `benchmarks/bench_published.py` fits
them to published timings of six cards and to sets that were measured on an H200; its
results say how far off they are on a card that is left out.

Shapes: `N` shards, `F` features, `S` sets, `E` values per shard, `C` = 17 count bins of
the access histogram.
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
    "SET_VALUES",
    "PhysicalConstants",
    "host_memory_ms",
    "missed_bytes",
    "set_times",
    "shard_values",
    "updated_bytes",
]

Floats = npt.NDArray[np.float64]

_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}
_REFERENCE_GB_PER_S = 2_039.0
"""Work of threads is counted for an A100."""
_ID_BYTES, _OFFSET_BYTES, _LOOKUP_WEIGHT_BYTES = 8.0, 8.0, 4.0
_SECTOR_BYTES = 32.0
"""Least that memory moves: what row-wise Adagrad's one number per row costs, each
way."""
_STATE_BYTES_PER_VALUE = 4.0
_STEP_POWER = 4.0
"""The longest bag of a set is the 4th root of the sum over its shards of their mean bag
lengths to the 4th power: a maximum that sums can tell."""
_VALUES_PER_THREAD = 4.0
_WIDTHS = (32, 64, 128, 256)
"""Beyond each of these widths, the groups of threads of the whole set double."""
_ROW_ACCESSES = 3.0
"""Updating a row takes the threads as long as so many ids: read, compute, write."""
_HOT_ROW_LOOKUPS = 32.0
"""A row of more lookups is summed by a thread block of its own. Source: FBGEMM,
`max_segment_length_per_warp`."""
_SORT_TILE_IDS = 3_000.0
"""Fewer ids are sorted by one kernel; more, by some kernels for each 8 bits. Source:
CUB, DeviceRadixSort."""
_DIGIT_BITS = 8.0

SET_VALUES: tuple[str, ...] = (
    "tables",
    "forward_ms",
    "update_ms",
    "sort_ms",
    "lookup_thread_ms",
    "lookup_own_ms",
    "update_thread_ms",
    "update_own_ms",
    "ids",
    "rows",
    "weighted_tables",
    "bag_steps",
    *(f"wider_than_{width}" for width in _WIDTHS),
)
"""Columns of `shard_values`; a set's are the sums over its shards.

`forward_ms`, `update_ms` and `sort_ms` are what a shard adds to a set whose widest
table it is. `*_own_ms` are the parts of it that grow with the group of threads, and
`*_thread_ms` these parts per thread. `bag_steps` is no time: see `_STEP_POWER`.
"""
_AT = {name: i for i, name in enumerate(SET_VALUES)}


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
    least_threads: float = 8.0
    """Threads of the smallest group that reads a row: a quarter of a warp; 64 where
    FBGEMM does not divide its wavefronts (AMD)."""
    efficiency: float = 0.834
    """Share of the memory bandwidth that kernels reach."""
    forward_launch_us: float = 13.1
    """Bounds check and forward kernel of no work, gaps before them included."""
    backward_launch_us: float = 78.2
    """Sort of the ids and update kernels of no work: about ten kernels."""
    sort_pass_us: float = 11.8
    """Backward, kernels for 8 bits of the ids."""
    weight_gradient_us: float = 38.9
    """Backward of sets with weighted tables: kernels of no work."""
    forward_step_us: float = 0.41
    """Forward, one id after the other of a set's longest bags."""
    backward_step_us: float = 0.495
    """Backward, the same."""
    bag_ns: float = 0.71
    """Forward, one bag: the check of its ids, and where it begins."""
    lookup_thread_ns: float = 0.00223
    """Forward, one id and thread of its group."""
    sort_bag_ns: float = 0.141
    """Backward, one bag: which bag each id is of."""
    sort_ns: float = 0.088
    """Backward, sorting one id."""
    update_thread_ns: float = 0.00431
    """Backward, one id and thread of its group; of each row, `_ROW_ACCESSES` ids."""
    hot_row_ns: float = 31.1
    """Backward, a row of more than `_HOT_ROW_LOOKUPS` lookups."""
    adam_ns: float = 1.54
    """Backward, Adam's arithmetic for one row."""
    weight_gradient_ns: float = 0.439
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


def _columns(features_NF: npt.NDArray[np.float32]) -> Mapping[str, Floats]:
    return {n: features_NF[:, i].astype(np.float64) for n, i in _INDEX.items()}


def _rows_by_count(
    features_NF: npt.NDArray[np.float32], column: Mapping[str, Floats]
) -> tuple[Floats, Floats]:
    """Distinct rows in each count bin, and how often one of them is looked up."""
    rows_NC = features_NF[:, -NUM_COUNT_BINS:] * column["num_distinct"][:, None]
    return rows_NC, bin_mean_counts(rows_NC, column["num_lookups"])


def missed_bytes(
    features_NF: npt.NDArray[np.float32], column: Mapping[str, Floats], cache: float
) -> Floats:
    """Bytes of rows that come from memory: of each row once, and what the cache lacks.

    The rows of most lookups fill the cache first; tables come one after the other, so
    each has all of it.
    """
    rows_NC, counts_NC = _rows_by_count(features_NF, column)
    row_bytes = column["lookup_bytes"] / np.maximum(column["num_lookups"], 1e-9)
    held_NC = rows_NC * row_bytes[:, None]
    hotter_NC = np.cumsum(held_NC[:, ::-1], axis=1)[:, ::-1] - held_NC
    missing_NC = 1.0 - np.clip(
        (cache - hotter_NC) / np.maximum(held_NC, 1e-9), 0.0, 1.0
    )
    repeated_NC = held_NC * (counts_NC - 1.0) * missing_NC
    missed: Floats = column["distinct_bytes"] + repeated_NC.sum(axis=1)
    return missed


def shard_values(
    features_NF: npt.NDArray[np.float32], constants: PhysicalConstants
) -> Floats:
    """Return what `set_times` needs to know of shards, `N x E`.

    Args:
        features_NF: Columns in FEATURE_NAMES order, not normalised.
        constants: The device.
    """
    c, column = constants, _columns(features_NF)
    ms_per_byte = 1e-6 / (c.memory_gb_per_s * c.efficiency)
    ms_per_ns = 1e-6 / c.speed
    cache = c.cache_mib * 2**20
    ids, distinct, tables = (
        column[n] for n in ("num_lookups", "num_distinct", "num_tables")
    )
    outputs, bags = column["output_bytes"], np.maximum(column["num_bags"], 1e-9)
    width = 2.0 ** column["log2_width"]
    rows_NC, counts_NC = _rows_by_count(features_NF, column)
    indices = (
        _ID_BYTES * ids
        + _LOOKUP_WEIGHT_BYTES * column["weighted_lookups"]
        + _OFFSET_BYTES * column["num_bags"]
    )
    # Less a little, since widths are logarithms of float32.
    groups = np.ceil(column["log2_width"] - np.log2(_VALUES_PER_THREAD) - 1e-4)
    threads = np.maximum(c.least_threads, 2.0**groups)
    lookup_thread = c.lookup_thread_ns * ms_per_ns * ids
    update_thread = c.update_thread_ns * ms_per_ns * (ids + _ROW_ACCESSES * distinct)
    moved = missed_bytes(features_NF, column, cache) + outputs + indices
    forward = (
        threads * lookup_thread
        + (c.lookup_ns * ids + c.bag_ns * column["num_bags"]) * ms_per_ns
        + moved * ms_per_byte
    )
    # Each id reads the gradient of its bag; what the cache cannot hold, from memory.
    gradients = outputs / bags * ids
    kept = np.minimum(1.0, cache / np.maximum(outputs, 1.0))
    moved = np.minimum(gradients, outputs)
    moved = moved + np.maximum(gradients - outputs, 0.0) * (1.0 - kept)
    moved = moved + indices + updated_bytes(column)
    hot_rows = (rows_NC * (counts_NC > _HOT_ROW_LOOKUPS)).sum(axis=1)
    work_ns = (
        c.gradient_ns * ids
        + c.hot_row_ns * hot_rows
        + c.adam_ns * column["is_adam"] * distinct
        + c.weight_gradient_ns * column["weighted_lookups"]
    )
    values: dict[str, Floats] = {
        "tables": tables,
        "forward_ms": forward,
        "update_ms": threads * update_thread
        + work_ns * ms_per_ns
        + moved * ms_per_byte,
        "sort_ms": (c.sort_ns * ids + c.sort_bag_ns * column["num_bags"]) * ms_per_ns,
        "lookup_thread_ms": lookup_thread,
        "lookup_own_ms": threads * lookup_thread,
        "update_thread_ms": update_thread,
        "update_own_ms": threads * update_thread,
        "ids": ids,
        "rows": tables * 2.0 ** column["log2_rows"],
        "weighted_tables": tables * (column["is_weighted"] > 0),
        "bag_steps": (ids / bags) ** _STEP_POWER,
        **{f"wider_than_{w}": tables * (width > w + 0.5) for w in _WIDTHS},
    }
    return np.stack([values[name] for name in SET_VALUES], axis=1)


def set_times(sums_SE: Floats, constants: PhysicalConstants) -> Floats:
    """Predict the kernels of sets from the sums of their shards' values.

    Returns:
        `S x 3` [ms]: forward, update and sort, launches included; the backward is the
        last two together. 0 for empty sets.
    """
    c = constants
    values = {name: np.maximum(sums_SE[:, i], 0.0) for name, i in _AT.items()}
    threads = np.full(len(sums_SE), c.least_threads)
    for width in _WIDTHS:
        group = max(c.least_threads, 2.0 * width / _VALUES_PER_THREAD)
        threads[values[f"wider_than_{width}"] > 0.5] = group

    def widened(part: str) -> Floats:
        """What narrow tables take longer for the widest one's sake."""
        beyond = threads * values[f"{part}_thread_ms"] - values[f"{part}_own_ms"]
        longer: Floats = np.maximum(beyond, 0.0)
        return longer

    longest = values["bag_steps"] ** (1.0 / _STEP_POWER)
    forward = np.hypot(
        values["forward_ms"] + widened("lookup"), 1e-3 * c.forward_step_us * longest
    )
    update = values["update_ms"] + widened("update")
    update += 1e-3 * c.backward_step_us * longest
    update += 1e-3 * c.weight_gradient_us * (values["weighted_tables"] > 0.5)
    passes = np.ceil(np.log2(values["rows"] + 1.0) / _DIGIT_BITS)
    many = values["ids"] ** 2 / (values["ids"] ** 2 + _SORT_TILE_IDS**2)
    sort = values["sort_ms"] + 1e-3 * c.sort_pass_us * passes * many
    times = np.stack(
        [
            forward + 1e-3 * c.forward_launch_us,
            update + 1e-3 * c.backward_launch_us,
            sort,
        ],
        axis=1,
    )
    held: Floats = np.where(values["tables"][:, None] > 0.5, times, 0.0)
    return held


def updated_bytes(column: Mapping[str, Floats]) -> Floats:
    """Bytes of distinct rows and of their optimizer state, read and written."""
    return 2.0 * column["distinct_bytes"] + _state_bytes(column)


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
