"""How long the samples of features are: what is counted in batches, or given.

Ranks get other samples, so they have more or fewer ids than the mean. How far a rank's
batch is off depends on three figures of a profile: the deviation of a sample
(`pooling_std`), the part of it that all features of a sample share (`common_std`), and
what whole batches differ by (`batch_std`).

Shapes: `K` features, `B` samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from torchrec_neuroshard.errors import ProfileError, check_number

Floats = npt.NDArray[np.float64]

LEVELS = (0.5, 0.95, 0.99, 1.0)
"""Levels of a profile's quantiles of lengths."""
_MOST_SAMPLES = 4_096
"""Samples that correlations are computed from."""
_STEPS = 50
_NO_LIMIT = 20.0
"""The longest sample over the 95 % quantile, if the longest is unknown."""
_CONCENTRATIONS = np.logspace(6, -2, 400)
"""Beta distributions' concentrations, falling: spreads from none to two lengths."""


def length_std(mean: float, p95: float, longest: float | None = None) -> float:
    """Return the standard deviation of lengths of which three figures are known.

    The beta distribution from 0 to the longest that has this mean and this quantile.

    Args:
        mean: Mean length.
        p95: Length that 95 % of the samples do not exceed.
        longest: Length of the longest sample; None: unknown.

    Raises:
        ProfileError: The figures are not in the order mean, p95, longest, or negative.
    """
    most = _NO_LIMIT * p95 if longest is None else longest
    for name, value in (("mean", mean), ("p95", p95), ("longest", most)):
        check_number(f"length: {name}", value, error=ProfileError)
    if not mean <= p95 <= most:
        raise ProfileError(
            f"lengths need mean <= p95 <= longest, got {mean:g}, {p95:g} and {most:g}; "
            "give the longest length of which 5 % are exceeded as p95"
        )
    if mean in (0.0, p95, most):
        return 0.0
    share = mean / most
    alpha, beta = share * _CONCENTRATIONS, (1 - share) * _CONCENTRATIONS
    found = scipy.special.betaincinv(alpha, beta, 0.95)
    reached = found >= min(p95 / most, 0.999)
    place = int(reached.argmax()) if reached.any() else int(found.argmax())
    return math.sqrt(mean * (most - mean) / (1.0 + float(_CONCENTRATIONS[place])))


def quantiles(lengths_B: npt.NDArray[np.integer[Any]]) -> tuple[float, ...]:
    """Return the quantiles of lengths at `LEVELS`."""
    return tuple(float(v) for v in np.quantile(lengths_B, LEVELS, method="higher"))


def batch_std(batches: Sequence[npt.NDArray[np.integer[Any]]]) -> float:
    """Return what mean lengths of batches differ by, beyond chance.

    Samples that do not depend on each other explain some of the differences. A result
    above 0 exceeds these by two standard deviations.

    Args:
        batches: Lengths of each batch's samples.

    Returns:
        Standard deviation between batches, in ids per sample.
    """
    some = [lengths for lengths in batches if len(lengths)]
    if len(some) < 2:
        return 0.0
    by_chance = np.concatenate(some).var() / np.mean([len(s) for s in some])
    between = float(np.var([s.mean() for s in some], ddof=1))
    margin = 1.0 + 2.0 * math.sqrt(2.0 / (len(some) - 1))
    return math.sqrt(max(between - margin * float(by_chance), 0.0))


def gamma_at(normal: Floats, spread: float) -> Floats:
    """Return gamma values of mean 1 at the levels of standard normal values.

    Source: Wilson and Hilferty, 1931: the cube root of a gamma variable is nearly
    normal. Up to a relative deviation of 0.5, quantiles are within 1 %.
    """
    ninth = spread**2 / 9.0
    values: Floats = np.maximum(1.0 - ninth + normal * ninth**0.5, 0.0) ** 3
    return values


def common_stds(
    lengths: Mapping[str, npt.NDArray[np.integer[Any]]],
) -> dict[str, float]:
    """Return the deviation of each feature's lengths that all features share.

    One factor per sample explains the correlations: those of two features are the
    product of their loadings. Negative correlations count as none.

    Args:
        lengths: Feature -> lengths of all samples. Features with another number of
            samples than most others share nothing.

    Returns:
        Feature -> loading times standard deviation, in ids.
    """
    found = dict.fromkeys(lengths, 0.0)
    counts = [len(of) for of in lengths.values()]
    usual = max(set(counts), key=counts.count, default=0)
    kept = {f: v for f, v in lengths.items() if len(v) == usual and v.std() > 0}
    if len(kept) < 2:
        return found
    step = max(1, usual // _MOST_SAMPLES)
    values_KB = np.stack([v[::step].astype(np.float64) for v in kept.values()])
    std_K1 = values_KB.std(axis=1, keepdims=True)
    values_KB -= values_KB.mean(axis=1, keepdims=True)
    values_KB /= np.where(std_K1 > 0, std_K1, 1.0)
    correlation_KK = np.maximum(values_KB @ values_KB.T / values_KB.shape[1], 0.0)
    correlation_KK -= np.diag(np.diag(correlation_KK))
    noise = 2.0 / math.sqrt(values_KB.shape[1])
    correlation_KK[correlation_KK < noise] = 0.0
    loading_K = np.sqrt(correlation_KK.mean(axis=1))
    for _ in range(_STEPS):
        squares_K = np.maximum((loading_K**2).sum() - loading_K**2, 1e-12)
        wanted_K = correlation_KK @ loading_K / squares_K
        loading_K = np.clip((loading_K + wanted_K) / 2.0, 0.0, 1.0)
    for (feature, of), loading in zip(kept.items(), loading_K.tolist(), strict=True):
        found[feature] = loading * float(of.std())
    return found
