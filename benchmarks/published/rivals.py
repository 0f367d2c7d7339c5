"""What published timings are held against beside this package's estimate.

The physical estimate as it was before it was fitted; TorchRec's estimator, run as its
planner runs it, with the card's bandwidth; and the most that it can be made into, its
`HardwarePerfConfig` with coefficients fitted to the same timings. TorchRec is whichever
release comes first on the path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import (
    EmbeddingPerfEstimatorConfig,
    EmbeddingPerfEstimatorFactory,
    EstimatorPerfCoefficients,
    PerfCoefficient,
    PerfCoefficientConfig,
)
from torchrec.distributed.planner.estimator.types import PrefetchCoefficients
from torchrec.distributed.planner.types import ShardEstimator, ShardingOption
from torchrec.distributed.types import CacheParams, CacheStatistics
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from published.fitting import group, softened
from published.kernels import KernelRow, device_constants
from torchrec_neuroshard.features import FEATURE_NAMES

__all__ = ["FittedStock", "stock_estimate"]

Floats = npt.NDArray[np.float64]

_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}
_LINK_GB_PER_S = 32.0 * 1.024**3
"""TorchRec's HBM_TO_DDR_MEM_BW, which few users replace."""
_UVM_SLOWDOWN = 10.0
_CACHING_RATIO = 0.2
_KERNELS = {
    "device": "fused",
    "managed (UVM)": "fused_uvm",
    "managed_caching": "fused_uvm_caching",
}
_SIZES = 4
"""Ids, bytes looked up, output and rows: what coefficients of a direction multiply."""
_PREFETCHED = 3
"""Lookups, distinct rows, fetched values: the same of what a cache fetches."""
_PREFETCH_UNIT = 1e-6
"""Milliseconds per lookup, row or value that a coefficient of 1 stands for."""


def _column(row: KernelRow, name: str) -> Floats:
    return row.features[:, _INDEX[name]].astype(np.float64)


class _Misses(CacheStatistics):  # type: ignore[misc]
    """What a table's cache lacks, as TorchRec's estimator asks for it."""

    def __init__(self, distinct: float, missed: float) -> None:
        self._distinct, self._missed = distinct, missed

    @property
    def expected_lookups(self) -> float:
        return self._distinct

    def expected_miss_rate(self, clf: float) -> float:
        return self._missed

    @property
    def cacheability(self) -> float:
        return self._missed


class _Config(EmbeddingPerfEstimatorConfig):  # type: ignore[misc]
    """TorchRec's, with one coefficient of table-wise kernels at 1 and others at 0."""

    def __init__(self, forward: bool, number: int) -> None:
        zero = PerfCoefficient(0.0, 0.0, 0.0, 0.0)
        one = [float(i == number) for i in range(_SIZES + _PREFETCHED)]
        both = [zero, zero]
        both[not forward] = PerfCoefficient(*one[:_SIZES])
        self.coefficients = PerfCoefficientConfig(
            table_wise=EstimatorPerfCoefficients(*both),
            prefetch=PrefetchCoefficients(
                *(forward * _PREFETCH_UNIT * c for c in one[_SIZES:])
            ),
        )


class _Estimates(ShardEstimator):  # type: ignore[misc]
    """Forward, backward and prefetch [ms] of all options, by several estimators."""

    def __init__(self, estimators: Sequence[Any]) -> None:
        self._estimators = estimators
        self.found: list[tuple[float, float, float]] = []

    def estimate(
        self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any
    ) -> None:
        """Run all of them; TorchRec 1.6 passes the sharders by position."""
        for estimator in self._estimators:
            estimator.estimate(sharding_options, *args, **kwargs)
            perfs = [s.perf for o in sharding_options for s in o.shards]
            self.found.append(
                (
                    sum(p.fwd_compute for p in perfs),
                    sum(p.bwd_compute for p in perfs),
                    sum(p.prefetch_compute for p in perfs),
                )
            )


@functools.cache
def _by_torchrec(row: KernelRow) -> Floats:
    """TorchRec's estimate of the row's kernels [ms].

    Returns:
        Its own coefficients, and each coefficient at 1: of the forward, of the fetch
        of cached rows, and of the backward.
    """
    topology = Topology(
        world_size=1,
        compute_device="cuda",
        hbm_cap=2**50,
        ddr_cap=2**50,
        hbm_mem_bw=device_constants(row.card).memory_gb_per_s * 1e6,
    )
    distinct = _column(row, "num_distinct")
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=["table_wise"],
            compute_kernels=[_KERNELS[row.location]],
            pooling_factors=[table.pooling_factor],
            batch_sizes=[batch],
            is_weighted=table.weighted,
            cache_params=CacheParams(
                load_factor=row.cache_ratio, stats=_Misses(distinct[i], row.missed[i])
            )
            if row.cache_ratio > 0
            else None,
        )
        for i, (table, batch) in enumerate(zip(row.tables, row.batches, strict=True))
    }
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                num_embeddings=t.num_embeddings,
                embedding_dim=t.embedding_dim,
                feature_names=[t.name],
                data_type=DataType[t.data_type.upper()],
            )
            for t in row.tables
        ],
        is_weighted=any(t.weighted for t in row.tables),
        device=torch.device("meta"),
    )
    make = functools.partial(
        EmbeddingPerfEstimatorFactory.create_with_config,
        topology=topology,
        constraints=constraints,
    )
    units = [(True, i) for i in range(_SIZES + _PREFETCHED)]
    units += [(False, i) for i in range(_SIZES)]
    estimates = _Estimates(
        [make(EmbeddingPerfEstimatorConfig())]
        + [
            make(_Config(*unit), use_linear_regression_prefetch_estimate=True)
            for unit in units
        ]
    )
    EmbeddingEnumerator(
        topology, row.batches[0], constraints, estimator=[estimates]
    ).enumerate(collection, [EmbeddingBagCollectionSharder()])
    phases = np.array([row.has_forward, row.has_backward, row.has_forward])
    found: Floats = (np.array(estimates.found) * phases).sum(axis=1)
    return found


def stock_estimate(row: KernelRow) -> float:
    """TorchRec's estimate with the card's memory bandwidth [ms]."""
    return float(_by_torchrec(row)[0])


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
        measured = np.log([r.time_ms for r in rows])

        def residuals(logs: Floats) -> Floats:
            off = np.log(terms @ np.exp(logs)) - measured
            # Without a launch and with few cards, some coefficient may be anything.
            return np.concatenate([weight * softened(off), logs[:3] / 3, logs[3:] / 9])

        start = np.log([1.0, 1.0, 1.0, *[0.1] * (terms.shape[1] - 3)])
        return tuple(np.exp(optimize.least_squares(residuals, start).x).tolist())

    def predict(self, row: KernelRow) -> float:
        """Predict one timing [ms]; NaN for kernels that none was fitted to."""
        found = self.coefficients.get((row.location, row.is_forward))
        return float("nan") if found is None else float(_terms(row) @ np.array(found))


def _terms(row: KernelRow) -> Floats:
    """Milliseconds of each coefficient at 1: four sizes, and what a cache fetches."""
    ones = _by_torchrec(row)[1:]
    terms = ones[:_SIZES] + ones[-_SIZES:]
    if row.location == "managed_caching" and row.is_forward:
        terms = np.concatenate([terms, ones[_SIZES : _SIZES + _PREFETCHED]])
    return terms
