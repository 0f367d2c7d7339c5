"""Fit the constants of a device's physics to measured sets.

Shapes: see `models.physical`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.linalg import block_diag

from torchrec_neuroshard.bundles.set_data import SetData
from torchrec_neuroshard.hardware.device_types import is_accelerator
from torchrec_neuroshard.models.physical import (
    LEAST_THREADS,
    SET_WORKS,
    WORKS,
    Physics,
    set_values,
    set_works,
    shard_works,
)

Floats = npt.NDArray[np.float64]

_LOG2_CACHE_BYTES = 19.0, 27.0
"""Smallest and largest cache: 512 KiB and 128 MiB."""
_STEP = 0.05
"""Step of the parameter to find its slope."""
_LEAST_MS = 1e-9
_ROBUST = 0.03
"""Errors of the logarithm above this count linearly, not squared."""
_FORWARD_ALONE = (
    "num_lookups",
    "lookup_lines",
    "missed_bytes",
    "lookup_threads",
    "widened_lookups",
)
_BACKWARD_ALONE = (
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
    "update_threads",
    "hot_rows",
    "adam_rows",
    "gradient_bytes",
    "widened_updates",
    "sort_passes",
    "weighted_sets",
)
"""Kinds of work that only forward or only backward has; both have all others."""
_ACCELERATORS_ALONE = (
    "lookup_threads",
    "update_threads",
    "hot_rows",
    "adam_rows",
    "gradient_bytes",
    *SET_WORKS[1:],
)
"""Kinds of work that CPUs do not have. They reduce the physics' error on an H200 from
16 to 7 % (`benchmarks/results/cost_models_202611.md`)."""


def best_factor(predicted_S: Floats, measured_S: Floats) -> float:
    """Return the factor on the predictions that leaves no bias: the median ratio."""
    return float(np.median(measured_S / predicted_S))


def fit_constants(
    works_of: Callable[[float], Floats],
    measured_N: Floats,
    start_K: Floats | None = None,
    *,
    pull: float = 1.0,
    bounds: tuple[float, float, float] = (0.0, 0.5, 1.0),
) -> tuple[Floats, float]:
    """Fit constants of at least 0 by least squares of log(predicted / measured).

    Args:
        works_of: Returns the work of the samples, `N x K`, from a parameter that is
            fitted, too. Its least value gives the most work of each kind.
        measured_N: Measured times.
        start_K: Constants that the fit is pulled toward; None for no pull.
        pull: Strength of the pull, as a number of additional samples per constant.
        bounds: The parameter's least value, its start and its largest value.

    Returns:
        `K` constants, 0 or as in `start_K` for kinds of work that no sample has; and
        the parameter.
    """
    most_NK = works_of(bounds[0])
    # In these units, a constant is about its share of the time.
    unit_K = np.sqrt(np.mean((most_NK / measured_N[:, None]) ** 2, axis=0))
    present_K = unit_K > 0.0
    unit_P = unit_K[present_K]
    start_P = np.full(len(unit_P), 1.0 / len(unit_P))
    weight = 0.0
    if start_K is not None:
        start_P, weight = start_K[present_K] * unit_P, np.sqrt(pull)

    def shares(parameter: float) -> Floats:
        works: Floats = works_of(parameter)[:, present_K] / unit_P
        return works

    def times(values: Floats) -> Floats:
        ms: Floats = np.maximum(shares(values[-1]) @ values[:-1], _LEAST_MS)
        return ms

    def residuals(values: Floats) -> Floats:
        logs_N = np.log(times(values) / measured_N)
        return np.concatenate([logs_N, weight * (values[:-1] - start_P)])

    def jacobian(values: Floats) -> Floats:
        ms_N = times(values)
        beside = np.append(values[:-1], values[-1] + _STEP)
        slope_N = np.log(times(beside) / ms_N) / _STEP
        of_logs = np.column_stack([shares(values[-1]) / ms_N[:, None], slope_N])
        of_pull = weight * np.eye(len(start_P), len(values))
        return np.concatenate([of_logs, of_pull])

    low, begin, high = bounds
    found = optimize.least_squares(
        residuals,
        np.append(np.maximum(start_P, 1e-4), begin),
        jacobian,
        bounds=(
            np.append(np.zeros(len(unit_P)), low),
            np.append(np.full_like(unit_P, np.inf), high),
        ),
        loss="soft_l1",
        f_scale=_ROBUST,
    )
    fitted_K = np.zeros(len(unit_K)) if start_K is None else start_K.copy()
    fitted_K[present_K] = found.x[:-1] / unit_P
    return fitted_K, float(found.x[-1])


def _set_works(data: SetData, cache_bytes: float, least_threads: float) -> Floats:
    """Return the work of each set: its shards' sum and its own, `S x (K + G)`."""
    shards_NK = shard_works(data.features_NF, cache_bytes, least_threads)
    values_SV = data.sum_shards(set_values(data.features_NF, least_threads))
    works_SG = set_works(values_SV, least_threads)
    return np.concatenate([data.sum_shards(shards_NK), works_SG], axis=1)


def fitted_kinds(device_type: str) -> npt.NDArray[np.bool_]:
    """Return which kinds of work get a constant, forward and backward.

    Returns:
        `(K + G) x 2`; the rows are WORKS, then SET_WORKS.
    """
    names = (*WORKS, *SET_WORKS)
    absent = () if is_accelerator(device_type) else _ACCELERATORS_ALONE
    return np.column_stack(
        [~np.isin(names, (*absent, *n)) for n in (_BACKWARD_ALONE, _FORWARD_ALONE)]
    )


def fit_physics(data: SetData, start: Physics | None = None) -> Physics:
    """Fit a device's constants and the size of its cache.

    Args:
        data: Measured sets.
        start: Another device's physics. The fit is pulled toward its constants, times a
            factor.
    """
    is_fitted = fitted_kinds(data.device_type)
    threads = LEAST_THREADS if start is None else start.least_threads

    @functools.lru_cache(maxsize=2)
    def works_of(log2_bytes: float) -> Floats:
        """Return a block of rows and columns each for forward and backward."""
        works = _set_works(data, 2.0**log2_bytes, threads)
        blocks: Floats = block_diag(*(works[:, kinds] for kinds in is_fitted.T))
        return blocks

    near_K, least, most = None, *_LOG2_CACHE_BYTES
    begin = (least + most) / 2 - 1.0
    if start is not None:
        begin = min(max(np.log2(start.cache_bytes), least + 0.1), most - 0.1)
        near = np.concatenate([start.constants_K2, start.set_constants_G2])
        before = _set_works(data, start.cache_bytes, threads) @ near
        near = near * list(map(best_factor, before.T, data.costs_S2.T))
        near_K = near.T[is_fitted.T]
    fitted_K, log2_bytes = fit_constants(
        works_of, data.costs_S2.T.ravel(), near_K, bounds=(least, begin, most)
    )
    predicted = np.maximum(works_of(log2_bytes) @ fitted_K, _LEAST_MS).reshape(2, -1)
    constants = np.zeros(is_fitted.shape)
    constants.T[is_fitted.T] = fitted_K
    constants *= list(map(best_factor, predicted, data.costs_S2.T))
    shards, sets = np.split(constants, [len(WORKS)])
    sets[0] = np.maximum(sets[0], 1e-4)
    return Physics(2.0**log2_bytes, shards, sets, threads)
