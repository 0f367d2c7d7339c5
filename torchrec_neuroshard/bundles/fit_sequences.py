"""Fit the physics of a CPU's unpooled kernels; see `models.sequences`.

Shapes: `S` sets, `K` kinds of work, `2` forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.bundles.fit_physics import fit_constants
from torchrec_neuroshard.bundles.set_data import MIN_SETS, SetData, build_sets
from torchrec_neuroshard.measure.records import CostRecord
from torchrec_neuroshard.models.sequences import (
    CPU_SEQUENCES,
    SET_WORKS,
    SHARD_WORKS,
    SequenceKernels,
    map_values,
    set_works,
    shard_works,
)

Floats = npt.NDArray[np.float64]

_FEW_SETS = 5
"""Fewest sets that scale another CPU's constants."""
_LOG2_BYTES = 17.0, 20.0, 26.0
"""Least, first and largest size of the cache."""


def fit_sequences(
    records: Sequence[CostRecord], device: str, reference_ms: float
) -> SequenceKernels | None:
    """Fit the constants to measured sets of sequences.

    With fewer than `MIN_SETS` sets to fit to or to test on, the constants of another
    CPU are scaled, by a factor for each direction. The error is then that of the sets.

    Args:
        records: Records of one CPU; sets of pooled rows are left out.
        device: The CPU's name.
        reference_ms: Nominal time of its reference set.

    Returns:
        The physics, with its error on held-out tables; None with fewer than five sets.
    """
    some = [r for r in records if not r.tables[0].pooled]
    training = [r for r in some if not r.held_out]
    test = [r for r in some if r.held_out and r.repeat_of is None]
    if min(len(training), len(test)) < MIN_SETS:
        return _scaled(some, device, reference_ms) if len(some) >= _FEW_SETS else None
    data, constants, sizes = build_sets(training), [], []
    for direction in (0, 1):

        def works_of(log2_bytes: float, direction: int = direction) -> Floats:
            return _works(data, direction, 2.0**log2_bytes)

        measured_S = data.costs_S2[:, direction]
        fitted_K, log2_bytes = fit_constants(works_of, measured_S, bounds=_LOG2_BYTES)
        names = (*SET_WORKS[direction], *SHARD_WORKS[direction])
        values = zip(names, fitted_K.tolist(), strict=True)
        constants.append({name: float(f"{v:.4g}") for name, v in values if v > 0})
        sizes.append(float(round(2.0**log2_bytes)))
    fitted = SequenceKernels(
        constants=(constants[0], constants[1]),
        cache_bytes=(sizes[0], sizes[1]),
        error=0.0,
        device=device,
        reference_ms=reference_ms,
        num_sets=len(training),
    )
    tested = build_sets(test)
    ratio_S = predict(fitted, tested).sum(axis=1) / tested.costs_S2.sum(axis=1)
    return replace(fitted, error=float(f"{np.abs(ratio_S - 1).mean():.3g}"))


def predict(kernels: SequenceKernels, data: SetData) -> Floats:
    """Return the predicted times of sets of sequences, `S x 2` [ms]."""
    sums_SV = data.sum_shards(kernels.encode(data.features_NF, 1.0))
    return kernels.predict(sums_SV, 1.0)


def _scaled(
    records: Sequence[CostRecord], device: str, reference_ms: float
) -> SequenceKernels:
    """Return another CPU's constants times a factor for each direction."""
    data = build_sets(records)
    predicted_S2 = predict(CPU_SEQUENCES, data)
    factor_2 = np.median(data.costs_S2 / predicted_S2, axis=0)
    total_S = (predicted_S2 * factor_2).sum(axis=1)
    forward, backward = (
        {name: float(f"{factor * value:.4g}") for name, value in known.items()}
        for known, factor in zip(
            CPU_SEQUENCES.constants, factor_2.tolist(), strict=True
        )
    )
    return replace(
        CPU_SEQUENCES,
        constants=(forward, backward),
        error=float(np.abs(total_S / data.costs_S2.sum(axis=1) - 1).mean()),
        device=device,
        reference_ms=reference_ms,
        num_sets=len(records),
    )


def _works(data: SetData, direction: int, cache_bytes: float) -> Floats:
    """Return the work of each set, `S x K`: its own, then its shards' sum."""
    sums_S3 = data.sum_shards(map_values(data.features_NF))
    shards_NK = shard_works(data.features_NF, direction, cache_bytes)
    own_SG = set_works(sums_S3, direction, cache_bytes)
    return np.concatenate([own_SG, data.sum_shards(shards_NK)], axis=1)
