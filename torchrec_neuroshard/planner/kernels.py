"""Costs of kernels without measurements, relative to the measured fused kernel.

Three kinds of kernels are estimated:

- replicated tables: the fused kernel's time without its launch, times a factor, plus
  the optimizer's passes over all rows. Factor and passes are measured on CPUs;
  elsewhere they are TorchRec's, whatever the optimizer;
- kernels that read host memory: the fused kernel's time plus the transfer of rows over
  the link (`models.card_physics.host_memory_ms`);
- all others (Triton's, tables on disk, virtual tables): the fused kernel's time without
  its launch, times TorchRec's ratio of the two kernels.

Codecs of quantised collectives are kernels as well. Codecs and the optimizer's pass
read memory in order: on GPUs at the memory bandwidth times the share that kernels
reach, on CPUs as fast as columns are reordered, if that was measured, else at the fused
kernel's bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import (
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    UVM_CACHING_RATIO,
    kernel_bw_lookup,
)
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology

from torchrec_neuroshard.costs.task import HostRows, KernelFactors, WireCodec
from torchrec_neuroshard.models.row_cache import MissCurve
from torchrec_neuroshard.planner.option_facts import (
    OFFLOADED_KERNELS,
    cache_load,
    enforces_hbm,
    has_cache,
    is_dense,
    is_lfu,
    loads_ahead,
    option_codecs,
    table_name,
)
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.topology import GB_PER_S
from torchrec_neuroshard.tables.table import TableConfig

_CPU_DENSE = KernelFactors(forward=0.75, backward=1.17)
"""Factors of replicated tables on CPUs: means of a Zen 5 and a Zen 3 core, of which 32
and 20 sets of tables were measured (`benchmarks/results/dense_epyc_zen5_202611.md`,
`benchmarks/data/dense_epyc_zen3.parquet`)."""
_CPU_PASSES: Mapping[str, float] = {
    "sgd": 2.0,
    "rowwise_adagrad": 4.5,
    "adagrad": 12.7,
    "adam": 16.4,
}
"""Optimizer -> passes over a replicated table on CPUs. Those of SGD are the geometric
mean of both cores, 2.96 and 1.32. Others take 2.3, 6.4 and 8.3 times as many, as on the
Zen 3 core."""
_FLOAT, _FUSED = 4.0, EmbeddingComputeKernel.FUSED.value
_known_bandwidth = lru_cache(kernel_bw_lookup)
_CLAMPED = ("fp16", "bf16")
"""Codecs that clamp the values in a separate pass before the cast."""
_CODING_LAUNCHES = 0.5
"""Time of encoding and decoding few values, as a share of the fused forward kernel's
launch. Measured on one AMD EPYC (Zen 5) core
(`benchmarks/results/qcomms_gloo2_202611.md`)."""
MAX_KNOWN_CURVES = 2**14
"""Number of tables whose miss curves are cached."""


def is_estimated(option: ShardingOption) -> bool:
    """Whether the time of an option's kernel is estimated, not measured."""
    return bool(option.compute_kernel != _FUSED)


def kernel_factors(option: ShardingOption, reader: TableReader) -> KernelFactors | None:
    """Return the factors of an option's kernel relative to the fused kernel.

    Loading a cache counts as forward, even with prefetching.

    Args:
        option: An option with a cost (`TableReader.has_cost`).
        reader: Knows the devices, and how tables are accessed.

    Returns:
        None for the fused kernel itself.

    Raises:
        PlannerError: TorchRec has no such kernel for the device.
    """
    topology = reader.topology
    if is_dense(option):
        on_cpu = topology.compute_device == "cpu"
        return dense_factors(
            reader.table(option).optimizer,
            None if on_cpu else _slowness(option, topology),
        )
    if option.compute_kernel in OFFLOADED_KERNELS:
        _bandwidth(option, topology, option.compute_kernel)  # raises if there is none
        missed, link = _missed(option, reader), topology.hbm_to_ddr_mem_bw
        if enforces_hbm(option):
            if missed is None:
                return KernelFactors()  # it reads its rows as the fused kernel does
            link = topology.hbm_mem_bw
        return KernelFactors(
            host=HostRows(gb_per_s=float(link) * GB_PER_S, missed=missed)
        )
    if is_estimated(option):
        slowness = _slowness(option, topology)
        return KernelFactors(forward=slowness, backward=slowness)
    return None


def dense_factors(optimizer: str, slowness: float | None) -> KernelFactors:
    """Return the factors of replicated tables.

    Args:
        optimizer: As in `TableConfig.optimizer`.
        slowness: How much slower than the fused kernel TorchRec estimates this kernel
            on a GPU. None: a CPU, of which kernels were measured.
    """
    if slowness is None:
        return replace(_CPU_DENSE, passes=_CPU_PASSES[optimizer])
    passes = DP_ELEMENTWISE_KERNELS_PERF_FACTOR * slowness
    return KernelFactors(forward=slowness, backward=slowness, passes=passes)


def priced_codecs(option: ShardingOption) -> tuple[WireCodec, WireCodec]:
    """Return an option's codecs, forward and backward, with their kernels' cost.

    Args:
        option: An option after `note_sharders`.
    """
    forward, backward = option_codecs(option)
    return _priced(forward), _priced(backward)


@lru_cache
def _priced(codec: WireCodec) -> WireCodec:
    sent = codec.wire_bytes
    if sent == _FLOAT or codec.name == WireCodec().name:  # not coded
        return codec
    # Clamping reads and writes a float. Rows are read twice, once for their scale.
    first = 2 * _FLOAT if codec.name in _CLAMPED else 0.0
    first += _FLOAT if codec.row_values > 1 else 0.0
    return replace(
        codec,
        encode_bytes=first + _FLOAT + sent,
        decode_bytes=sent + _FLOAT,
        launches=_CODING_LAUNCHES,
    )


def _missed(option: ShardingOption, reader: TableReader) -> float | None:
    """Return the share of a batch's distinct rows that miss the option's cache.

    It comes from the statistics in the cache parameters, else from the table's profile.
    """
    if not has_cache(option):
        return None
    ratio, params = load_factor(option), option.cache_params
    stats = params.stats if params else None
    if stats is not None:
        return float(stats.expected_miss_rate(ratio))
    return float(miss_curve(option, reader).misses([ratio])[0])


def load_factor(option: ShardingOption) -> float:
    """Return the share of a table's rows in its cache."""
    return cache_load(option) or UVM_CACHING_RATIO


def miss_curve(option: ShardingOption, reader: TableReader) -> MissCurve:
    """Return the misses of an option's table as a function of the cache's size.

    Args:
        option: An option with a cost; its cache parameters set the eviction policy.
        reader: Knows the devices, and how tables are accessed.
    """
    samples = int(option.batch_size) * reader.world_size
    return _curve(reader.table(option), samples, is_lfu(option))


@lru_cache(maxsize=MAX_KNOWN_CURVES)
def _curve(table: TableConfig, num_samples: int, is_lfu: bool) -> MissCurve:
    profile = table.profile_at(num_samples)
    return MissCurve(profile, table.num_embeddings, is_lfu=is_lfu)


def _slowness(option: ShardingOption, topology: Topology) -> float:
    """Return how much slower than the fused kernel TorchRec estimates this kernel."""
    fused = _bandwidth(option, topology, _FUSED)
    return fused / _bandwidth(option, topology, option.compute_kernel)


def _bandwidth(option: ShardingOption, topology: Topology, kernel: str) -> float:
    """Return TorchRec's estimated bandwidth of a kernel for the option's table.

    Raises:
        PlannerError: TorchRec has no such kernel for the device.
    """
    params = option.cache_params
    found = _known_bandwidth(
        compute_device=topology.compute_device,
        compute_kernel=kernel,
        hbm_mem_bw=topology.hbm_mem_bw,
        ddr_mem_bw=topology.ddr_mem_bw,
        hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
        caching_ratio=params.load_factor if params else None,
        prefetch_pipeline=loads_ahead(option),
        ssd_mem_bw=topology.ssd_mem_bw,
    )
    if found is None:
        raise PlannerError(
            f"table '{table_name(option)}': TorchRec has no kernel '{kernel}' "
            f"for '{topology.compute_device}'; remove it from compute_kernels in the "
            "constraints or from the sharder's kernels"
        )
    return float(found)
