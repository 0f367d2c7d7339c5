"""The expected time of an iteration, whose kernels take more or less than predicted.

The slowest of several ranks that are predicted equal takes longer than their mean. With
64 ranks whose kernels err by 4 % each, the slowest is expected 9 % above it. Ranks that
run the same kernel err together, so they stay equal.

Shapes: `W` ranks, `S` stages, `6` phases in the order of `TIMED`, `D` draws, `K`
kernels that differ, `2` forward and backward, `X` any values.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import scipy

from torchrec_neuroshard.costs.passes import TIMED

__all__ = ["NUM_DRAWS", "OWN_SHARE", "alike_rows", "drawn_phases", "draws"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

OWN_SHARE = 0.5
"""Deviation between ranks whose kernels differ, over the uncertainty of a kernel. The
rest is common to all ranks. See `docs/how_it_works.md` for the data."""
_KERNELS = [TIMED.index("fwd_compute"), TIMED.index("bwd_compute")]
_ALIKE = 0.02
"""Kernels are the same if nothing differs by more than this share. The last rank of a
row-wise table has a few rows less."""
NUM_DRAWS, _MANY = 128, 10_000
"""Numbers of draws of an iteration, and of one value."""
_MOST = 0.2
"""Largest relative deviation. All drawn times stay above 0."""


def drawn_phases(phases_WS6: Floats, spread_WS: Floats, alike_WS: Ints) -> Floats:
    """Return drawn phases of iterations, `D x W x S x 6` [ms].

    Kernels take longer or shorter by a normal deviation, independent of other ranks, of
    other stages, and of the other direction. The mean over the draws of anything
    convex, as sums and maxima of phases are, is not below that of the given phases.

    Args:
        phases_WS6: Predicted phases of each rank in each stage [ms].
        spread_WS: Relative standard deviation of each rank's kernels.
        alike_WS: Numbers from 0 in each stage. Ranks with the same number err together.
    """
    phases_DWS6 = np.tile(phases_WS6, (NUM_DRAWS, 1, 1, 1))
    for stage, alike_W in enumerate(alike_WS.T):
        spread_W1 = np.minimum(spread_WS[:, stage, None], _MOST)
        deviation_DW2 = draws(int(alike_W.max()) + 1, stage)[:, alike_W] * spread_W1
        phases_DWS6[:, :, stage, _KERNELS] *= 1.0 + deviation_DW2
    return phases_DWS6


@functools.lru_cache(maxsize=32)
def draws(count: int, seed: int = 0) -> Floats:
    """Return `D x K x 2` standard normal values, the mean of each column 0.

    Each column has one value in each of `D` equally likely intervals. Values are scaled
    such that the mean over draws of the largest of the `K` is exact.

    Args:
        count: `K`.
        seed: Other seeds give other draws.
    """
    rng = np.random.default_rng(seed)
    interval = rng.permuted(np.tile(np.arange(NUM_DRAWS), (2 * count, 1)), axis=1)
    normal: Floats = scipy.special.ndtri(
        (interval + rng.random(interval.shape)) / NUM_DRAWS
    )
    normal -= normal.mean(axis=1, keepdims=True)
    normal = normal.T.reshape(-1, count, 2)
    if count == 1:
        return normal
    # The largest of K values is below x with the K-th power of the chance of one.
    chance = (np.arange(_MANY) + 0.5) / _MANY
    largest = scipy.special.ndtri(chance ** (1 / count)).mean()
    normal *= largest / normal.max(axis=1).mean(axis=0)
    return normal


def alike_rows(values_WX: Floats) -> Ints:
    """Return a number from 0 for each row, the same for rows that are nearly equal."""
    most_X = np.abs(values_WX).max(axis=0, initial=0.0)
    shares_WX = values_WX / np.where(most_X > 0, most_X, 1.0)
    alike_W = np.full(len(values_WX), -1)
    for number in range(len(values_WX)):
        left = np.flatnonzero(alike_W < 0)
        if not len(left):
            break
        off_WX = np.abs(shares_WX[left] - shares_WX[left[0]])
        alike_W[left[off_WX.max(axis=1, initial=0.0) <= _ALIKE]] = number
    return alike_W
