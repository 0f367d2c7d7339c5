"""Fit the constants of a device's physics to measured sets.

Shapes: see `models.physical`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import optimize

from torchrec_neuroshard.bundles.set_data import SetData
from torchrec_neuroshard.hardware.devices import is_accelerator
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

_CACHE_BYTES = tuple(2.0**n for n in range(19, 28))
"""Cache sizes to try: 512 KiB to 128 MiB."""
_ROBUST = 0.03
"""Relative errors above this count linearly, not squared."""
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
    works_SK: Floats,
    measured_S: Floats,
    start_K: Floats | None = None,
    *,
    pull: float = 1.0,
    robust: float | None = None,
) -> Floats:
    """Fit constants of at least 0 by least squares of relative errors.

    Args:
        works_SK: Work of the samples.
        measured_S: Measured times of the samples.
        start_K: Constants that the fit is pulled toward; None for no pull.
        pull: Strength of the pull, as a number of additional samples per constant.
        robust: Errors above this count linearly; None counts all errors squared.
    """
    relative = works_SK / measured_S[:, None]
    scale_K = np.linalg.norm(relative, axis=0) / np.sqrt(len(measured_S))
    scale_K = np.maximum(scale_K, 1e-30)
    relative = relative / scale_K
    ridge, wanted = np.zeros((0, relative.shape[1])), np.zeros(0)
    if start_K is not None:
        ridge = np.sqrt(pull) * np.eye(relative.shape[1])
        wanted = np.sqrt(pull) * start_K * scale_K
    weight_S = np.ones(len(measured_S))
    for _ in range(1 if robust is None else 6):
        matrix = np.concatenate([relative * weight_S[:, None], ridge])
        solution, _ = optimize.nnls(matrix, np.concatenate([weight_S, wanted]))
        error = np.abs(relative @ solution - 1.0)
        if robust is not None:
            weight_S = 1.0 / np.sqrt(np.maximum(error, robust) / robust)
    fitted: Floats = solution / scale_K
    return fitted


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
    near_2: list[Floats | None] = [None, None]
    if start is not None:
        near = np.concatenate([start.constants_K2, start.set_constants_G2])
        before = _set_works(data, start.cache_bytes, threads) @ near
        near_2 = list((near * list(map(best_factor, before.T, data.costs_S2.T))).T)
    best, least = None, np.inf
    for cache_bytes in _CACHE_BYTES:
        works = _set_works(data, cache_bytes, threads)
        constants = np.zeros(is_fitted.shape)
        for c, near_K in enumerate(near_2):
            kinds = is_fitted[:, c]
            constants[kinds, c] = fit_constants(
                works[:, kinds],
                data.costs_S2[:, c],
                None if near_K is None else near_K[kinds],
                robust=_ROBUST,
            )
        predicted = np.maximum(works @ constants, 1e-9)
        factors = list(map(best_factor, predicted.T, data.costs_S2.T))
        # Least squares of relative errors favours low predictions.
        constants *= factors
        error = float(np.abs(np.log(predicted * factors / data.costs_S2)).mean())
        if error < least:
            shards, sets = np.split(constants, [len(WORKS)])
            sets[0] = np.maximum(sets[0], 1e-4)
            best, least = Physics(cache_bytes, shards, sets, threads), error
    assert best is not None
    return best
