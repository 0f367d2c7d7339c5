"""What kernels cost that no bundle holds, in the terms of the measured fused one.

Three kinds are estimates. The kernel of replicas, with the optimizer's pass over all of
their rows, takes what the fused kernel takes above its launch, times a factor: measured
on CPUs, else what TorchRec's estimate takes it to be slower. Kernels that read the
host's memory take what the fused one takes and, beside it, what their rows take over
the link (`models.card_physics.host_memory_ms`). All others (Triton's, tables on disk,
virtual ones) take what the fused one takes above its launch, times what TorchRec's
estimate takes them to be slower.

Codecs of quantised collectives are kernels of their own. They and the optimizer's pass
go over memory in order: at a GPU's memory bandwidth, times the share of it that kernels
reach. On CPUs they take what was measured, at the fused kernel's bandwidth.
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
from torchrec.distributed.planner.types import (
    PlannerError,
    ShardingOption,
    Topology,
)

from torchrec_neuroshard.costs.task import HostRows, KernelFactors, WireCodec
from torchrec_neuroshard.models.row_cache import MissCurve
from torchrec_neuroshard.planner.option_facts import (
    OFFLOADED_KERNELS,
    cache_load,
    has_cache,
    is_dense,
    is_lfu,
    is_summed,
    loads_ahead,
    option_codecs,
    table_name,
)
from torchrec_neuroshard.planner.reader import (
    TableReader,
)
from torchrec_neuroshard.planner.topology import GB_PER_S
from torchrec_neuroshard.tables.table import TableConfig

__all__ = [
    "is_estimated",
    "kernel_factors",
    "load_factor",
    "miss_curve",
    "priced_codecs",
]

_MEASURED_DENSE: Mapping[str, KernelFactors] = {
    "cpu": KernelFactors(forward=0.78, backward=1.17, passes=2.96)
}
"""By device type. Fitted to 32 tables under SGD on one AMD EPYC (Zen 5) core
(`benchmarks/results/dense_epyc_zen5_fitted_202611.md`), and held to others in
`benchmarks/results/dense_epyc_zen5_202611.md`."""
_FLOAT, _FUSED = 4.0, EmbeddingComputeKernel.FUSED.value
_known_bandwidth = lru_cache(kernel_bw_lookup)
_CLAMPED = ("fp16", "bf16")
"""Codecs that limit the values in a pass of its own before they cast them."""
_MEASURED_CODING: Mapping[tuple[str, str], tuple[float, float]] = {
    ("cpu", "fp16"): (9.1, 3.7),
    ("cpu", "bf16"): (9.4, 3.4),
    ("cpu", "int8"): (8.1, 6.1),
    ("cpu", "mx4"): (430.0, 84.0),
}
"""Device type and codec -> bytes of memory that coding and decoding a value is worth.
Measured on one AMD EPYC (Zen 5) core; another run, which is kept, found 0.66 to 1.04
times these (`benchmarks/results/qcomms_gloo2_202611.md`)."""
_MEASURED_SUMS: Mapping[tuple[str, str], float] = {
    ("cpu", "fp16"): 19.0,
    ("cpu", "bf16"): 4.0,
}
"""The same of adding up a value, beyond what as many bytes of floats take: by the
processor's time of two gloo ranks; another run, which is kept, found 16 to 20 and 2 to
3 (`benchmarks/results/qcomms_kernels_202611.md`)."""
_CODING_LAUNCHES = 0.5
"""Of the fused forward kernel: what coding and decoding take of few values; measured
with them, 0.56 to 0.69 in the run that is kept."""
MAX_KNOWN_CURVES = 2**14
"""Tables whose misses are kept: worked out once, asked for many times."""


def is_estimated(option: ShardingOption) -> bool:
    """Whether an option's kernel is of a kind that was not measured."""
    return bool(option.compute_kernel != _FUSED)


def kernel_factors(option: ShardingOption, reader: TableReader) -> KernelFactors | None:
    """Return what an option's kernel takes beside the fused one.

    Loading a cache counts into the forward, also where it is loaded ahead.

    Args:
        option: An option that has a cost (`TableReader.has_cost`).
        reader: Knows the devices, and how tables are accessed.

    Returns:
        None where the kernel is the fused one itself.

    Raises:
        PlannerError: TorchRec has no such kernel for the device.
    """
    topology = reader.topology
    if is_dense(option):
        known = _MEASURED_DENSE.get(topology.compute_device)
        if known is not None:
            return known
        slowness = _slowness(option, topology)
        passes = DP_ELEMENTWISE_KERNELS_PERF_FACTOR * slowness
        return KernelFactors(forward=slowness, backward=slowness, passes=passes)
    if option.compute_kernel in OFFLOADED_KERNELS:
        _bandwidth(option, topology, option.compute_kernel)  # raises if there is none
        return KernelFactors(
            host=HostRows(
                gb_per_s=float(topology.hbm_to_ddr_mem_bw) * GB_PER_S,
                missed=_missed(option, reader),
            )
        )
    if is_estimated(option):
        slowness = _slowness(option, topology)
        return KernelFactors(forward=slowness, backward=slowness)
    return None


def priced_codecs(
    option: ShardingOption, reader: TableReader
) -> tuple[WireCodec, WireCodec]:
    """Return an option's codecs, forward and backward, with what their kernels take.

    Args:
        option: Noted by its sharder (`note_sharders`).
        reader: Knows the devices.
    """
    device = str(reader.topology.compute_device)
    forward, backward = (_priced(c, device) for c in option_codecs(option))
    if is_summed(option):
        sums = _MEASURED_SUMS.get((device, forward.name), 0.0)
        forward = replace(forward, encode_bytes=forward.encode_bytes + sums)
    return forward, backward


@lru_cache
def _priced(codec: WireCodec, device_type: str) -> WireCodec:
    known = _MEASURED_CODING.get((device_type, codec.name))
    if known is None:
        sent = codec.wire_bytes
        if sent == _FLOAT or codec.name == WireCodec().name:  # not coded
            return codec
        # Clamping reads and writes a float, rows are read twice: once for their scale.
        first = 2 * _FLOAT if codec.name in _CLAMPED else 0.0
        first += _FLOAT if codec.row_values > 1 else 0.0
        known = first + _FLOAT + sent, sent + _FLOAT
    encode, decode = known
    return replace(
        codec,
        encode_bytes=encode,
        decode_bytes=decode,
        launches=_CODING_LAUNCHES,
    )


def _missed(option: ShardingOption, reader: TableReader) -> float | None:
    """Share of a batch's distinct rows that the option's cache lacks.

    By the statistics that TorchRec was given, else by how the table is accessed.
    """
    if not has_cache(option):
        return None
    ratio, params = load_factor(option), option.cache_params
    stats = params.stats if params else None
    if stats is not None:
        return float(stats.expected_miss_rate(ratio))
    return float(miss_curve(option, reader).misses([ratio])[0])


def load_factor(option: ShardingOption) -> float:
    """Return the share of a table's rows that its cache holds."""
    return cache_load(option) or UVM_CACHING_RATIO


def miss_curve(option: ShardingOption, reader: TableReader) -> MissCurve:
    """Return what caches of an option's table lack, whatever their size.

    Args:
        option: One that has a cost; its cache parameters say which rows go.
        reader: Knows the devices, and how tables are accessed.
    """
    samples = int(option.batch_size) * reader.world_size
    return _curve(reader.table(option), samples, is_lfu(option))


@lru_cache(maxsize=MAX_KNOWN_CURVES)
def _curve(table: TableConfig, num_samples: int, is_lfu: bool) -> MissCurve:
    profile = table.profile_at(num_samples)
    return MissCurve(profile, table.num_embeddings, is_lfu=is_lfu)


def _slowness(option: ShardingOption, topology: Topology) -> float:
    """How much slower than a fused kernel TorchRec's estimate takes this one."""
    fused = _bandwidth(option, topology, _FUSED)
    return fused / _bandwidth(option, topology, option.compute_kernel)


def _bandwidth(option: ShardingOption, topology: Topology, kernel: str) -> float:
    """What TorchRec's estimate takes a kernel of the option's table to reach.

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
            f"for '{topology.compute_device}'; leave it out of the "
            "constraint's compute_kernels or of what the sharder offers"
        )
    return float(found)
