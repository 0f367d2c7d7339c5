"""The physics of a device: kinds of work, and the time of a unit of each.

A fused kernel processes all tables of a set at once. Each shard adds work of the kinds
`WORKS`: ids looked up, bytes missed by the cache, rows updated. The set adds work of
the kinds `SET_WORKS`: the launch, the ids of the longest bags, which are read one after
the other, and threads that narrow tables waste next to a wide one. A device has one
constant per kind of work and direction. `bundles.fit` fits the constants to measured
sets, `models.card_physics` derives them from published figures. A trained network
(`models.network`) corrects the shards' part and the total.

Shapes: `N` shards, `S` sets, `K` kinds of shards' work, `G` kinds of sets' work, `V`
values of a set, `C` = 17 count bins of the access histogram.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.tables.access import NUM_COUNT_BINS
from torchrec_neuroshard.tables.features import FEATURE_NAMES
from torchrec_neuroshard.tables.profile import bin_mean_counts

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
    "lookup_threads",
    "update_threads",
    "hot_rows",
    "adam_rows",
    "gradient_bytes",
)
"""Kinds of a shard's work. Kinds with the name of a feature are that feature.

`page_walks`: distinct rows times log2(1 + table bytes / 64 KiB). Large tables have many
pages, whose addresses take longer to translate.
`missed_bytes`: rows that the cache does not hold, by the access histogram.
`updated_bytes`: distinct rows, and optimizer state as wide as the rows.
`missed_gradient_bytes`: gradients that ids of the same bag read again from memory.
`unfused_page_walks`: page walks of optimizers that FBGEMM's CPU kernels do not fuse.
`state_rows`: distinct rows, once for each number or row of optimizer state.
`lookup_threads`: ids times the threads that read one of the shard's rows.
`update_threads`: the same for the backward, where a distinct row counts as 3 ids.
`hot_rows`: rows with more than 32 lookups; each is summed by its own thread block.
Source: FBGEMM, `max_segment_length_per_warp`.
`adam_rows`: distinct rows that Adam updates.
`gradient_bytes`: gradients of bags that are not empty.
"""
SET_WORKS: tuple[str, ...] = (
    "launch",
    "longest_bag",
    "widened_lookups",
    "widened_updates",
    "sort_passes",
    "weighted_sets",
)
"""Kinds of a set's work.

`launch`: 1. `longest_bag`: ids of the longest bags.
`widened_lookups`, `widened_updates`: threads of narrow tables in excess of their own
`lookup_threads` and `update_threads`, because the widest table decides how many threads
read a row of any table in the set.
`sort_passes`: 8-bit passes of the backward's sort of ids. A single kernel sorts few
ids. Source: CUB, DeviceRadixSort.
`weighted_sets`: 1 if a table has weighted lookups, else 0.
"""
SET_VALUES: tuple[str, ...] = (
    "num_tables",
    "num_lookups",
    "lookup_bytes",
    "distinct_bytes",
    "output_bytes",
    "update_ids",
    "lookup_threads",
    "update_threads",
    "num_rows",
    "weighted_tables",
    "bag_steps",
    "wider_than_32",
    "wider_than_64",
    "wider_than_128",
    "wider_than_256",
)
"""Sums over shards that determine a set's work. `bag_steps` are mean bag lengths to the
4th power: the 4th root of their sum is close to the longest."""
LEAST_THREADS = 8.0
"""Threads of the smallest group that reads a row on NVIDIA's cards."""

_PAGES_FROM_BYTES = 2.0**16
_STATE_BYTES_PER_VALUE = 4.0
_ROW_IDS = 3.0
"""Updating a row takes its threads as long as this many ids: read, compute, write."""
_HOT_ROW_LOOKUPS = 32.0
_WIDTHS = (32, 64, 128, 256)
_VALUES_PER_THREAD = 4.0
_WIDEST_THREADS = np.array([0.0, *(2.0 * w / _VALUES_PER_THREAD for w in _WIDTHS)])
"""Threads that read a row, by the number of `_WIDTHS` that the widest table exceeds."""
_STEP_POWER = 4.0
_SORT_TILE_IDS, _DIGIT_BITS = 3_000.0, 8.0
_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}
_AT = {name: i for i, name in enumerate(SET_VALUES)}


@dataclass(frozen=True, slots=True)
class Physics:
    """The physics of one device."""

    cache_bytes: float
    """Size of the cache for repeated reads of rows and gradients."""
    constants_K2: Floats
    """Milliseconds per unit of a shard's work, forward and backward."""
    set_constants_G2: Floats
    """Milliseconds per unit of a set's work; the first row is the launch."""
    least_threads: float = LEAST_THREADS
    """Threads of the smallest group that reads a row."""

    def shards_ms(self, features_NF: npt.NDArray[np.float32]) -> Floats:
        """Return the time that each shard adds to its set, `N x 2`.

        Args:
            features_NF: Columns in FEATURE_NAMES order.
        """
        works_NK = shard_works(features_NF, self.cache_bytes, self.least_threads)
        times: Floats = works_NK @ self.constants_K2
        return times

    def sets_ms(self, works_SG: Floats) -> Floats:
        """Return the time of sets beyond their shards', `S x 2`, including the launch.

        Args:
            works_SG: Result of `set_works`.
        """
        times: Floats = works_SG @ self.set_constants_G2
        return times


def columns(features_NF: npt.NDArray[np.float32]) -> Mapping[str, Floats]:
    """Return feature name -> values of all shards."""
    return {n: features_NF[:, i].astype(np.float64) for n, i in _INDEX.items()}


def wide_state_bytes(column: Mapping[str, Floats]) -> Floats:
    """Return the bytes of row-wide optimizer state, over all distinct rows."""
    values = (column["is_adagrad"] + 2.0 * column["is_adam"]) * np.round(
        2.0 ** column["log2_width"]
    )
    state: Floats = _STATE_BYTES_PER_VALUE * values * column["num_distinct"]
    return state


def _threads(log2_width_N: Floats, least_threads: float) -> Floats:
    """Return the threads that read a row: a power of two, with 4 values per thread."""
    # Subtract a little, since widths are float32 logarithms.
    groups = np.ceil(log2_width_N - np.log2(_VALUES_PER_THREAD) - 1e-4)
    threads: Floats = np.maximum(least_threads, 2.0**groups)
    return threads


def _update_ids(column: Mapping[str, Floats]) -> Floats:
    return column["num_lookups"] + _ROW_IDS * column["num_distinct"]


def shard_works(
    features_NF: npt.NDArray[np.float32],
    cache_bytes: float,
    least_threads: float = LEAST_THREADS,
) -> Floats:
    """Return the work of shards.

    Args:
        features_NF: Columns in FEATURE_NAMES order, not normalised.
        cache_bytes: Size of the device's cache.
        least_threads: Threads of its smallest group.

    Returns:
        `N x K`, columns in WORKS order.
    """
    column = columns(features_NF)
    distinct, outputs = column["num_distinct"], column["output_bytes"]
    rows_NC, counts_NC = _rows_by_count(features_NF, column)
    walks = page_walks(column)
    gradients = outputs / np.maximum(column["num_bags"], 1e-9) * column["num_lookups"]
    kept = np.minimum(1.0, cache_bytes / np.maximum(outputs, 1.0))
    fused = column["is_rowwise_adagrad"] * (1.0 - column["is_half"])
    fused = fused * (1.0 - column["is_shared"])
    wide_states = column["is_adagrad"] + 2.0 * column["is_adam"]
    threads = _threads(column["log2_width"], least_threads)
    made = {
        "page_walks": walks,
        "missed_bytes": _missed_bytes(column, rows_NC, counts_NC, cache_bytes),
        "updated_bytes": column["distinct_bytes"] + wide_state_bytes(column),
        "missed_gradient_bytes": np.maximum(gradients - outputs, 0.0) * (1.0 - kept),
        "unfused_page_walks": (1.0 - fused) * walks,
        "state_rows": distinct * (wide_states + column["is_rowwise_adagrad"]),
        "lookup_threads": threads * column["num_lookups"],
        "update_threads": threads * _update_ids(column),
        "hot_rows": (rows_NC * (counts_NC > _HOT_ROW_LOOKUPS)).sum(axis=1),
        "adam_rows": column["is_adam"] * distinct,
        "gradient_bytes": np.minimum(gradients, outputs),
    }
    return np.stack([made[n] if n in made else column[n] for n in WORKS], axis=1)


def _rows_by_count(
    features_NF: npt.NDArray[np.float32], column: Mapping[str, Floats]
) -> tuple[Floats, Floats]:
    """Return the distinct rows in each bin and the mean count of a row, `N x C`."""
    rows_NC = features_NF[:, -NUM_COUNT_BINS:] * column["num_distinct"][:, None]
    return rows_NC, bin_mean_counts(rows_NC, column["num_lookups"])


def page_walks(column: Mapping[str, Floats]) -> Floats:
    """Return the page walks of shards; see `WORKS`."""
    per_row = np.log2(1.0 + column["weight_bytes"] / _PAGES_FROM_BYTES)
    walks: Floats = column["num_distinct"] * per_row
    return walks


def missed_bytes(features_NF: npt.NDArray[np.float32], cache: float) -> Floats:
    """Return the bytes of rows that the cache does not hold; see `WORKS`."""
    column = columns(features_NF)
    return _missed_bytes(column, *_rows_by_count(features_NF, column), cache)


def _missed_bytes(
    column: Mapping[str, Floats], rows_NC: Floats, counts_NC: Floats, cache: float
) -> Floats:
    """Return the bytes read from memory: each row once, and repeats the cache misses.

    The hottest rows fill the cache first. Tables are processed one after the other, so
    each has the whole cache.
    """
    row_bytes = column["lookup_bytes"] / np.maximum(column["num_lookups"], 1e-9)
    held_NC = rows_NC * row_bytes[:, None]
    hotter_NC = np.cumsum(held_NC[:, ::-1], axis=1)[:, ::-1] - held_NC
    missing_NC = 1.0 - np.clip(
        (cache - hotter_NC) / np.maximum(held_NC, 1e-9), 0.0, 1.0
    )
    repeated_NC = held_NC * (counts_NC - 1.0) * missing_NC
    missed: Floats = column["distinct_bytes"] + repeated_NC.sum(axis=1)
    return missed


def set_values(
    features_NF: npt.NDArray[np.float32], least_threads: float = LEAST_THREADS
) -> Floats:
    """Return each shard's part of `SET_VALUES`, `N x V`."""
    column = columns(features_NF)
    ids, tables = column["num_lookups"], column["num_tables"]
    threads = _threads(column["log2_width"], least_threads)
    width = 2.0 ** column["log2_width"]
    bag_ids = ids / np.maximum(column["num_bags"], 1e-9)
    made = {
        "update_ids": _update_ids(column),
        "lookup_threads": threads * ids,
        "update_threads": threads * _update_ids(column),
        "num_rows": tables * 2.0 ** column["log2_rows"],
        "weighted_tables": tables * (column["is_weighted"] > 0),
        "bag_steps": bag_ids**_STEP_POWER,
        **{f"wider_than_{w}": tables * (width > w + 0.5) for w in _WIDTHS},
    }
    return np.stack([made[n] if n in made else column[n] for n in SET_VALUES], axis=1)


def set_works(
    values_SV: npt.NDArray[np.floating], least_threads: float = LEAST_THREADS
) -> Floats:
    """Return the work of sets from the sums of their shards' `set_values`.

    Returns:
        `S x G`, columns in SET_WORKS order.
    """
    known_SV = np.maximum(values_SV, 0.0)
    value = {n: known_SV[:, i] for n, i in _AT.items()}
    num_narrower = (known_SV[:, -len(_WIDTHS) :] > 0.5).sum(axis=1)
    threads = np.maximum(least_threads, _WIDEST_THREADS)[num_narrower]
    ids = value["num_lookups"].astype(np.float64)
    passes = np.ceil(np.log2(value["num_rows"] + 1.0) / _DIGIT_BITS)
    works_SG = np.empty((len(known_SV), len(SET_WORKS)))
    for i, work in enumerate(
        (
            1.0,
            value["bag_steps"] ** (1.0 / _STEP_POWER),
            np.maximum(threads * ids - value["lookup_threads"], 0.0),
            np.maximum(threads * value["update_ids"] - value["update_threads"], 0.0),
            passes * ids**2 / (ids**2 + _SORT_TILE_IDS**2),
            value["weighted_tables"] > 0.5,
        )
    ):
        works_SG[:, i] = work
    return works_SG
