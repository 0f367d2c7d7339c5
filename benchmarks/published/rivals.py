"""TorchRec's estimate of published timings, to compare with this package's.

The estimator runs as in TorchRec's planner, with the card's bandwidth. It is that of
the installed TorchRec.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.types import CacheParams, CacheStatistics

from harness.models import build_collection
from published.kernels import KernelRow, device_constants
from torchrec_neuroshard.tables.features import FEATURE_NAMES

Floats = npt.NDArray[np.float64]

_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}
_KERNELS = {
    "device": "fused",
    "managed (UVM)": "fused_uvm",
    "managed_caching": "fused_uvm_caching",
}


def _column(row: KernelRow, name: str) -> Floats:
    return row.features[:, _INDEX[name]].astype(np.float64)


class _Misses(CacheStatistics):  # type: ignore[misc]
    """Misses of a table's cache, in the form that TorchRec's estimator takes."""

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


def stock_estimate(row: KernelRow) -> float:
    """Return TorchRec's estimate of a row's kernels [ms]."""
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
    options = EmbeddingEnumerator(topology, row.batches[0], constraints).enumerate(
        build_collection(row.tables, None), [EmbeddingBagCollectionSharder()]
    )
    perfs = [shard.perf for option in options for shard in option.shards]
    forward = sum(p.fwd_compute + p.prefetch_compute for p in perfs)
    backward = sum(p.bwd_compute for p in perfs)
    return float(row.has_forward * forward + row.has_backward * backward)
