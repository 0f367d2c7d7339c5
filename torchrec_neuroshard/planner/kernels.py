"""What kernels cost that no bundle holds, in the terms of the measured fused one.

Two kinds are estimates: the kernel of replicas, with the optimizer's pass over all of
their rows, and kernels that read the host's memory. Both take what the fused kernel
takes above its launch, times a factor: measured for replicas on CPUs, else what
TorchRec's estimate takes them to be slower.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchrec.distributed.planner.constants import (
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    kernel_bw_lookup,
)
from torchrec.distributed.planner.types import (
    PlannerError,
    ShardingOption,
    Topology,
)

from torchrec_neuroshard.placement import KernelFactors
from torchrec_neuroshard.planner.table_reader import (
    OFFLOADED_KERNELS,
    is_dense,
    table_name,
)

__all__ = ["is_estimated", "kernel_factors"]

_MEASURED_DENSE: Mapping[str, KernelFactors] = {
    "cpu": KernelFactors(forward=0.78, backward=1.17, passes=2.96)
}
"""By device type. Fitted to 32 tables under SGD on one AMD EPYC (Zen 5) core, and held
to others in `benchmarks/results/dense_epyc_zen5_202611.md`."""


def is_estimated(option: ShardingOption) -> bool:
    """Whether an option's kernel is of a kind that was not measured."""
    return is_dense(option) or option.compute_kernel in OFFLOADED_KERNELS


def kernel_factors(option: ShardingOption, topology: Topology) -> KernelFactors | None:
    """Return the factors of an option's kernel over the fused one.

    Loading a cache ahead counts into the forward, for as long as TorchRec estimated in
    the option's shards.

    Args:
        option: An option that has a cost (`TableReader.has_cost`).
        topology: Device and bandwidths.

    Returns:
        None where the kernel is the fused one itself.

    Raises:
        PlannerError: TorchRec has no such kernel for the device.
    """
    prefetch = 0.0
    if option.cache_params is not None:
        shard = option.shards[0]
        ahead = shard.perf.prefetch_compute if shard.perf else 0.0
        prefetch = ahead / shard.size[1]
    if is_dense(option):
        known = _MEASURED_DENSE.get(topology.compute_device)
        if known is not None:
            return known
        slowness = _slowness(option, topology)
        passes = DP_ELEMENTWISE_KERNELS_PERF_FACTOR * slowness
        return KernelFactors(forward=slowness, backward=slowness, passes=passes)
    if is_estimated(option):
        slowness = _slowness(option, topology)
        return KernelFactors(
            forward=slowness, backward=slowness, prefetch_ms_per_column=prefetch
        )
    return KernelFactors(prefetch_ms_per_column=prefetch) if prefetch else None


def _slowness(option: ShardingOption, topology: Topology) -> float:
    """How much slower than a fused kernel TorchRec's estimate takes this one.

    Raises:
        PlannerError: TorchRec has no such kernel for the device.
    """
    params = option.cache_params

    def bandwidth(kernel: str) -> float:
        found = kernel_bw_lookup(
            compute_device=topology.compute_device,
            compute_kernel=kernel,
            hbm_mem_bw=topology.hbm_mem_bw,
            ddr_mem_bw=topology.ddr_mem_bw,
            hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
            caching_ratio=params.load_factor if params else None,
            prefetch_pipeline=bool(params and params.prefetch_pipeline),
        )
        if found is None:
            raise PlannerError(
                f"table '{table_name(option)}': TorchRec has no kernel '{kernel}' "
                f"for '{topology.compute_device}'; leave it out of the "
                "constraint's compute_kernels or of what the sharder offers"
            )
        return float(found)

    return bandwidth("fused") / bandwidth(option.compute_kernel)
