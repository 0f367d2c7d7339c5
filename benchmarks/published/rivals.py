"""Models held against published timings beside the shipped one.

Three: this package's physical estimate as it was before it was fitted; TorchRec's
estimate with the card's bandwidths; and the most that TorchRec's estimator can be made
into, its `HardwarePerfConfig` with coefficients fitted to the same timings.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from published.fitting import group
from published.kernels import KernelRow, device_constants
from torchrec_neuroshard.features import FEATURE_NAMES
from torchrec_neuroshard.planner.costs.hardware_config import (
    fit_coefficients,
    torchrec_sizes,
)

__all__ = ["FittedStock", "earlier_estimate", "stock_estimate"]

Floats = npt.NDArray[np.float64]

_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}
_LINK_GB_PER_S = 32.0 * 1.024**3
"""TorchRec's HBM_TO_DDR_MEM_BW, which few users replace."""
_UVM_SLOWDOWN = 10.0
_CACHING_RATIO = 0.2


def _column(row: KernelRow, name: str) -> Floats:
    return row.features[:, _INDEX[name]].astype(np.float64)


def earlier_estimate(row: KernelRow) -> float:
    """The physical estimate up to November 2026 [ms], UVM rescaled as TorchRec does."""
    bandwidth = device_constants(row.card).memory_gb_per_s
    bytes_per_ms = bandwidth * 1e6 * 0.6
    lookup, distinct = _column(row, "lookup_bytes"), _column(row, "distinct_bytes")
    gathered = distinct + (lookup - distinct) / 3
    indices = 8 * _column(row, "num_lookups") + 4 * _column(row, "weighted_lookups")
    ids = _column(row, "num_lookups") * 0.02e-6
    forward = (gathered + _column(row, "output_bytes") + indices) / bytes_per_ms + ids
    state = 1 + _column(row, "is_adagrad") + 2 * _column(row, "is_adam")
    backward = (gathered + 2 * state * distinct + 4 * indices) / bytes_per_ms + 4 * ids
    slower = bandwidth / _device_gb_per_s(row)
    both = forward.sum() * row.has_forward + backward.sum() * row.has_backward
    return float(both * slower + 0.02 * (row.has_forward + row.has_backward))


def _device_gb_per_s(row: KernelRow) -> float:
    """TorchRec's bandwidth of a kernel (`kernel_bw_lookup`)."""
    memory = device_constants(row.card).memory_gb_per_s
    if row.location == "device":
        return memory
    ratio = row.cache_ratio if row.cache_ratio > 0 else _CACHING_RATIO
    ratio = 0.0 if row.location == "managed (UVM)" else ratio
    return (ratio * memory + (1 - ratio) * _LINK_GB_PER_S) / _UVM_SLOWDOWN


def stock_estimate(row: KernelRow) -> float:
    """TorchRec's estimate with the card's memory bandwidth [ms]."""
    sizes, _, penalty = torchrec_sizes(row.features)
    bytes_per_ms = _device_gb_per_s(row) * 1e6
    forward = float((sizes[:, :3].sum(axis=1) * penalty).sum()) / bytes_per_ms
    weighted = bool(_column(row, "is_weighted").any())
    return forward * (row.has_forward + row.has_backward * (3.1 if weighted else 2.0))


@dataclasses.dataclass(frozen=True)
class FittedStock:
    """TorchRec's `HardwarePerfConfig`: coefficients per kernel and direction."""

    coefficients: Mapping[tuple[str, bool], tuple[float, ...]]

    @classmethod
    def fit(cls, rows: Sequence[KernelRow]) -> FittedStock:
        """Fit with the loss and weights that the physical model is fitted with."""
        kinds = sorted({(r.location, r.is_forward) for r in rows})
        return cls(
            {
                kind: cls._fit([r for r in rows if (r.location, r.is_forward) == kind])
                for kind in kinds
            }
        )

    @staticmethod
    def _fit(rows: Sequence[KernelRow]) -> tuple[float, ...]:
        terms = np.array([_terms(r) for r in rows])
        counts = Counter(map(group, rows))
        weight = np.array([4.0 / np.sqrt(counts[group(r)]) for r in rows])
        return fit_coefficients(terms, np.array([r.time_ms for r in rows]), weight)

    def predict(self, row: KernelRow) -> float:
        """Predict one timing [ms]; NaN for kernels that none was fitted to."""
        found = self.coefficients.get((row.location, row.is_forward))
        return float("nan") if found is None else float(_terms(row) @ np.array(found))


def _terms(row: KernelRow) -> Floats:
    """Milliseconds of each coefficient at 1, `4`."""
    forward, backward, penalty = torchrec_sizes(row.features)
    total = (forward * penalty[:, None]).sum(axis=0) * row.has_forward
    total = total + backward.sum(axis=0) * row.has_backward
    terms: Floats = total / (_device_gb_per_s(row) * 1e6)
    return terms
