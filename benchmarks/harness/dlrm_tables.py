"""Generator of tables like those of the DLRM embedding-lookup dataset.

facebookresearch/dlrm_datasets (MIT licence) has the lookups of 856 production-like
tables in one batch of 65,536 samples. `generate_dlrm_tables` makes tables with the same
published aggregates.

Shapes: `T` tables, `C` = 17 count bins.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.tables.access import NUM_COUNT_BINS
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table import TableConfig

DLRM_NUM_TABLES = 856
"""Number of tables in the 2021 dataset."""
DLRM_BATCH_SIZE = 65_536
"""Samples of the dataset."""
DLRM_NUM_LOOKUPS = 887_017_990
"""Lookups of the dataset (embedding_bag/2021/locality_stats.txt)."""
DLRM_NUM_DISTINCT = 128_435_723
"""Distinct ids of the dataset, summed over the tables (same file)."""
# fmt: off
DLRM_LOOKUP_SHARES: tuple[float, ...] = (
    0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.050, 0.049, 0.048,
    0.048, 0.043, 0.031, 0.023, 0.019,
)
"""Share of the dataset's lookups that go to ids of each count bin (same file)."""

_MEAN_COUNTS = np.array([
    1, 2, 3.39, 6.21, 11.6, 22.4, 43.9, 88.9, 178, 357, 716, 1_420, 2_864, 5_550,
    11_061, 22_127, 49_862,
])
"""Mean count of an id in each bin: lookup share divided by distinct share."""
# fmt: on

# Quantiles of the dataset: (share of the tables, value), with linear interpolation; for
# reuse, of the logarithm. Many tables share a value: the floor of 100 rows, the hash
# sizes of 3, 5, 6, 6.62 and 12.54 million, one id per sample.
_ROW_QUANTILES = (
    (0.0, 100.0),
    (0.15, 100.0),
    (0.248, 29_300.0),
    (0.252, 30_000.0),
    (0.33, 3_000_000.0),
    (0.36, 3_000_000.0),
    (0.43, 4_900_000.0),
    (0.477, 5_000_000.0),
    (0.5, 5_865_012.0),
    (0.515, 5_900_000.0),
    (0.75, 5_999_903.0),
    (0.88, 6_000_000.0),
    (0.888, 6_570_000.0),
    (0.95, 6_618_930.0),
    (0.968, 6_620_000.0),
    (0.972, 12_540_000.0),
    (1.0, 12_543_670.0),
)
_EMPTY_SHARE = 36 / 856
_POOLING_QUANTILES = (
    (_EMPTY_SHARE, 0.0),
    (0.049, 0.03),
    (0.051, 0.03),
    (0.168, 0.999),
    (0.1681, 1.0),
    (0.2931, 1.0),
    (0.5, 4.57),
    (0.75, 17.9),
    (0.771, 20.0),
    (0.883, 36.0),
    (0.942, 66.0),
    (0.95, 77.3),
    (0.988, 104.0),
    (1.0, 193.1),
)
_REUSE_QUANTILES = (
    (0.0, 1.1),
    (0.05, 1.6),
    (0.25, 6.2),
    (0.5, 12.0),
    (0.75, 180.0),
    (0.95, 16_384.0),
    (1.0, 131_072.0),
)
_LOG_REUSE_QUANTILES = tuple(
    (share, math.log(reuse)) for share, reuse in _REUSE_QUANTILES
)

# Only tables with few ids per sample have more lookups per distinct id than this. Such
# ids get 4 % of all lookups.
_HOT_REUSE, _HOT_POOLING = 16_384.0, 4.0

# Correlations of rows, pooling and reuse in a Gaussian copula. They reproduce the
# published correlation of log rows and log pooling, and the published distinct ids.
_ROWS_POOLING, _ROWS_REUSE, _POOLING_REUSE = 0.32, -0.85, 0.1


def generate_dlrm_tables(
    seed: int = 0, embedding_dim: int = 64
) -> tuple[TableConfig, ...]:
    """Return 856 tables with the aggregates of the 2021 DLRM dataset.

    Rows, pooling factors and reuse (lookups per distinct id) follow the dataset's
    quantiles, coupled by a Gaussian copula. Each table's histogram is the dataset's,
    tilted by a power of the count to match the table's reuse. All histograms together
    are raked to the dataset's shares.

    Total lookups and distinct ids are as published. Lookups and distinct ids per count
    bin are within 0.01 of the published shares. Quantiles of rows and pooling are
    within 6 %, those of reuse within 40 %. The correlation of log rows and log pooling
    (of tables with at least one lookup) is 0.49 within 0.05. No table is a copy of one
    in the dataset.

    Args:
        seed: Seed of the tables; equal seeds give equal tables.
        embedding_dim: Columns of every table; the dataset does not state them.

    Returns:
        Tables `dlrm_0` to `dlrm_855`, with profiles at 65,536 samples. As in the
        dataset, a few are never read.

    Raises:
        ConfigError: The seed is negative.
        TableError: `embedding_dim` is not a positive multiple of 4.
    """
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, got {seed}")
    rng = np.random.default_rng([seed, DLRM_NUM_TABLES])
    rows_T, lookups_T, reuse_T = _draw_sizes(rng)
    distinct_T = _settle_distinct(rows_T, lookups_T, reuse_T)
    histogram_TC = _rake_histograms(lookups_T, distinct_T)
    return tuple(
        TableConfig(
            name=f"dlrm_{i}",
            num_embeddings=int(rows),
            embedding_dim=embedding_dim,
            pooling_factor=float(lookups) / DLRM_BATCH_SIZE,
            profile=FeatureProfile(
                batch_size=DLRM_BATCH_SIZE,
                num_lookups=float(lookups),
                pooling_std=_pooling_std(float(lookups) / DLRM_BATCH_SIZE),
                access_histogram=tuple(map(float, histogram)),
            ),
        )
        for i, (rows, lookups, histogram) in enumerate(
            zip(rows_T, lookups_T, histogram_TC, strict=True)
        )
    )


def _pooling_std(pooling: float) -> float:
    """Return the deviation of Poisson lengths; 0 for exactly one id per sample.

    The dataset's own lengths are "not held to as high of a standard" (its README).
    """
    return 0.0 if pooling == 1.0 else math.sqrt(pooling)


def _draw_sizes(
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return rows, lookups and target reuse of each table."""
    copula = np.array(
        [
            [1.0, _ROWS_POOLING, _ROWS_REUSE],
            [_ROWS_POOLING, 1.0, _POOLING_REUSE],
            [_ROWS_REUSE, _POOLING_REUSE, 1.0],
        ]
    )
    normal_T3 = rng.standard_normal((DLRM_NUM_TABLES, 3)) @ np.linalg.cholesky(copula).T
    # Each stratum has one table, so that the quantiles hold for any seed.
    rank_T3 = np.argsort(np.argsort(normal_T3, axis=0), axis=0)
    stratum_T3 = (rank_T3 + 0.5) / DLRM_NUM_TABLES
    # Tables that are never read must have the fewest rows. They swap rows and reuse
    # with tables that do.
    empty = stratum_T3[:, 1] < _EMPTY_SHARE
    small = stratum_T3[:, 0] < _ROW_QUANTILES[1][0]
    wrong = np.flatnonzero(empty & ~small)
    partner = rng.choice(np.flatnonzero(small & ~empty), len(wrong), replace=False)
    to, source = np.r_[wrong, partner], np.r_[partner, wrong]
    stratum_T3[np.ix_(to, [0, 2])] = stratum_T3[np.ix_(source, [0, 2])]
    rows = _interpolate(stratum_T3[:, 0], _ROW_QUANTILES)
    pooling = _interpolate(stratum_T3[:, 1], _POOLING_QUANTILES)
    pooling[empty] = 0.0
    # A table whose ids would all be hotter than in 95 % of the tables swaps its pooling
    # factor with a large table.
    too_hot = np.flatnonzero(pooling * DLRM_BATCH_SIZE > _HOT_REUSE * rows)
    large = np.flatnonzero((rows > 1e6) & (pooling < _HOT_POOLING))
    swap = rng.choice(large, len(too_hot), replace=False)
    pooling[too_hot], pooling[swap] = pooling[swap], pooling[too_hot]
    lookups = _settle_lookups(pooling)
    reuse = np.exp(_interpolate(stratum_T3[:, 2], _LOG_REUSE_QUANTILES))
    reuse = np.where(pooling > _HOT_POOLING, np.minimum(reuse, _HOT_REUSE), reuse)
    return np.round(rows).astype(np.int64), lookups, reuse


def _interpolate(
    stratum_T: npt.NDArray[np.float64], quantiles: tuple[tuple[float, float], ...]
) -> npt.NDArray[np.float64]:
    share, value = zip(*quantiles, strict=True)
    result: npt.NDArray[np.float64] = np.interp(
        stratum_T, np.array(share), np.array(value)
    )
    return result


def _settle_lookups(
    pooling_T: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Return integer lookups with the dataset's sum; poolings of 0 and 1 stay."""
    lookups = np.round(pooling_T * DLRM_BATCH_SIZE).astype(np.int64)
    free = pooling_T > 1.0
    goal = DLRM_NUM_LOOKUPS - int(lookups[~free].sum())
    scaled = pooling_T[free] * (goal / float(pooling_T[free].sum()))
    lookups[free] = np.floor(scaled / scaled.sum() * goal)
    largest = int(np.argmax(lookups))
    lookups[largest] += DLRM_NUM_LOOKUPS - int(lookups.sum())
    return lookups


def _settle_distinct(
    rows_T: npt.NDArray[np.int64],
    lookups_T: npt.NDArray[np.int64],
    reuse_T: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return distinct ids per table: near the target reuse, with the published sum."""

    def distinct(log_scale: float) -> npt.NDArray[np.float64]:
        reuse = 1 + (reuse_T - 1) * math.exp(log_scale)
        found: npt.NDArray[np.float64] = np.minimum(lookups_T / reuse, rows_T)
        found[lookups_T > 0] = np.maximum(found[lookups_T > 0], 1.0)
        return found

    log_scale = optimize.brentq(
        lambda x: float(distinct(x).sum()) - DLRM_NUM_DISTINCT, -4.0, 4.0
    )
    return distinct(log_scale)


def _rake_histograms(
    lookups_T: npt.NDArray[np.int64], distinct_T: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return each table's distinct ids per bin, `T x C`.

    A table's share of bin j is `base_j * mean_count_j ** tilt`. The tilt makes the
    table's mean count equal to its reuse. The base is adjusted until the bins' sums
    over all tables are the published ones.
    """
    used = lookups_T > 0
    distinct, lookups = distinct_T[used], lookups_T[used].astype(np.float64)
    log_count = np.log(_MEAN_COUNTS)
    goal_C = np.array(DLRM_LOOKUP_SHARES) / sum(DLRM_LOOKUP_SHARES)
    log_base = np.log(goal_C) - log_count
    log_reuse = np.log(np.minimum(lookups / distinct, _MEAN_COUNTS[-1] * (1 - 1e-9)))
    for _ in range(25):
        tilt = _solve_tilts(log_base, log_count, log_reuse)
        histogram = distinct[:, None] * _softmax(log_base + tilt[:, None] * log_count)
        found_C = (histogram * _MEAN_COUNTS).sum(axis=0)
        log_base += np.log(goal_C) - np.log(found_C / found_C.sum())
    out = np.zeros((len(lookups_T), NUM_COUNT_BINS))
    out[used] = histogram
    return out


def _softmax(log_weight_TC: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = special.softmax(log_weight_TC, axis=1)
    return result


def _solve_tilts(
    log_base_C: npt.NDArray[np.float64],
    log_count_C: npt.NDArray[np.float64],
    log_reuse_T: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return each table's tilt by bisection, since the mean count grows with it."""
    low = np.full_like(log_reuse_T, -20.0)
    high = np.full_like(log_reuse_T, 20.0)
    for _ in range(30):
        middle = (low + high) / 2
        weight = log_base_C + middle[:, None] * log_count_C
        mean = special.logsumexp(weight + log_count_C, axis=1) - special.logsumexp(
            weight, axis=1
        )
        above = mean > log_reuse_T
        high = np.where(above, middle, high)
        low = np.where(above, low, middle)
    return (low + high) / 2
