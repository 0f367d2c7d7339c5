"""Published figures of GPUs: what a card has where nothing was measured on it.

Data sheets count memory in GB and bandwidth in GB/s, and so does this table; every
figure says where it is from and what kind of figure it is. Bandwidths of links are
*effective* ones: what a collective reaches in one direction, not the line rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torchrec_neuroshard.errors import ConfigError

__all__ = ["GPU_CARDS", "Figure", "GpuCard", "card_named", "find_card"]

Basis = Literal["data sheet", "published measurement", "assumed"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its origin."""

    value: float
    basis: Basis
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCard:
    """One kind of GPU, in a node of the kind that it is mostly sold in.

    A card of two devices (MI250X) is listed as one of them, since that is what torch
    shows and a rank plans for.
    """

    name: str
    """What users call it: the key in `GPU_CARDS`."""
    title: str
    device_names: tuple[str, ...]
    """Regular expressions of `torch.cuda.get_device_name`, without the maker's name."""
    memory_gb: Figure
    """Memory [GB]."""
    hbm_gb_per_s: Figure
    """Bandwidth of that memory [GB/s]."""
    threads_per_ns: Figure
    """Threads that its cores issue an instruction for: what keeps them from being
    faster where memory does not. 128 per clock and streaming multiprocessor of an
    NVIDIA card, 64 per clock and compute unit of an AMD one."""
    l2_mib: Figure
    """L2 cache, all of its parts together [MiB]."""
    l3_mib: Figure
    """Cache between L2 and memory [MiB]; 0 where there is none."""
    host_gb_per_s: Figure
    """Effective one-way bandwidth to the host's memory [GB/s]."""
    intra_gb_per_s: Figure
    """Effective one-way bandwidth to the other GPUs of a node, all together [GB/s]."""
    inter_gb_per_s: Figure
    """Effective one-way bandwidth to other nodes, of one GPU's share of the NICs
    [GB/s]."""
    gpus_per_node: int = 8


def _sheet(value: float, source: str) -> Figure:
    return Figure(value, "data sheet", source)


def _published(value: float, source: str) -> Figure:
    return Figure(value, "published measurement", source)


def _assumed(value: float, source: str) -> Figure:
    return Figure(value, "assumed", source)


_V100 = "NVIDIA V100 data sheet (January 2020)"
_A100 = "NVIDIA A100 data sheet (June 2021)"
_H100 = "NVIDIA H100 data sheet (2023)"
_H200 = "NVIDIA H200 data sheet (2024)"
_V100_PAPER = "NVIDIA Tesla V100 architecture white paper"
_A100_PAPER = "NVIDIA A100 architecture white paper"
_H100_PAPER = "NVIDIA H100 architecture white paper"
_AMPERE = "NVIDIA Ampere GPU architecture tuning guide"
_HOPPER = "NVIDIA Hopper tuning guide"
_MI200 = "AMD Instinct MI250X data sheet (2021)"
_MI300 = "AMD Instinct MI300X data sheet (2023)"
_MI350 = "AMD Instinct MI350X data sheet (2025)"
_ROCM = "ROCm documentation, reference/gpu-specs"
_RCCL = "RCCL, src/graph/topo.h, and ROCm/rccl #1210 (an AMD engineer)"


def _cores(count: int, threads: int, ghz: float, source: str) -> Figure:
    """Threads per ns of cores that issue so many per clock."""
    return _sheet(round(count * threads * ghz), f"{count} at {ghz} GHz: {source}")


_NO_L3 = _sheet(0.0, "no such cache")
_AMD_L3 = _sheet(256.0, f"Infinity Cache: {_ROCM}")
_PCIE_3 = _published(12.0, "PCIe 3.0 x16 in NCCL's topology, src/graph/topo.h")
_PCIE_4 = _published(24.0, "PCIe 4.0 x16 in NCCL's topology, src/graph/topo.h")
_PCIE_5 = _published(55.6, "PCIe 5.0 x16: NVIDIA's blog on nvbandwidth (2025)")
_NVSWITCH_3 = _published(230.0, "NVIDIA/nccl-tests #149 (maintainer); line rate 300")
_NVSWITCH_4 = _published(370.0, "NVIDIA/nccl-tests #212 (maintainer); line rate 450")
_NVSWITCH_5 = _published(
    670.0, "nccl-tests of 8 B200, all-to-all of 16 GiB: 673; line rate 900"
)
_NIC_400 = _published(
    35.0,
    "nccl-tests of 2 x 8 B200, one 400G NIC per GPU: all-to-all of 16 GiB has a bus "
    "bandwidth of 69.4, the NIC's times two; line rate 50",
)
_NIC_200 = _assumed(17.5, "one 200G NIC per GPU (DGX A100), as 35 of 50 at 400G")
_NIC_100 = _assumed(8.75, "one 100G NIC per GPU, as 35 of 50 at 400G")

_H100_SXM = GpuCard(
    name="h100",
    title="NVIDIA H100 SXM 80 GB",
    device_names=(r"H100 80GB HBM3", r"H100 SXM5 80GB"),
    memory_gb=_sheet(80.0, _H100),
    hbm_gb_per_s=_sheet(3_350.0, _H100),
    threads_per_ns=_cores(132, 128, 1.98, _H100_PAPER),
    l2_mib=_sheet(50.0, _HOPPER),
    l3_mib=_NO_L3,
    host_gb_per_s=_PCIE_5,
    intra_gb_per_s=_NVSWITCH_4,
    inter_gb_per_s=_NIC_400,
)

_A100_80GB = GpuCard(
    name="a100",
    title="NVIDIA A100 SXM 80 GB",
    device_names=(r"A100-SXM4?-80GB", r"A100 80GB PCIe", r"A100-PG509-210"),
    memory_gb=_sheet(80.0, _A100),
    hbm_gb_per_s=_sheet(2_039.0, _A100),
    threads_per_ns=_cores(108, 128, 1.41, _A100_PAPER),
    l2_mib=_sheet(40.0, _AMPERE),
    l3_mib=_NO_L3,
    host_gb_per_s=_PCIE_4,
    intra_gb_per_s=_NVSWITCH_3,
    inter_gb_per_s=_NIC_200,
)

_CARDS = (
    GpuCard(
        name="v100",
        title="NVIDIA V100 SXM2 32 GB",
        device_names=(r"V100-SXM[23]-\d+GB(-LS)?", r"V100-PCIE-\d+GB"),
        memory_gb=_sheet(32.0, _V100),
        hbm_gb_per_s=_sheet(900.0, _V100),
        threads_per_ns=_cores(80, 128, 1.53, _V100_PAPER),
        l2_mib=_sheet(6.0, _V100_PAPER),
        l3_mib=_NO_L3,
        host_gb_per_s=_PCIE_3,
        intra_gb_per_s=_published(
            120.0, "6 links of 20: NVIDIA/nccl-tests #149 (maintainer); line rate 150"
        ),
        inter_gb_per_s=_NIC_100,
    ),
    _A100_80GB,
    replace(
        _A100_80GB,
        name="a100-40gb",
        title="NVIDIA A100 SXM 40 GB",
        device_names=(r"A100-SXM4?-40GB", r"A100-PCIE-40GB", r"A100-PG509-200"),
        memory_gb=_sheet(40.0, _A100),
        hbm_gb_per_s=_sheet(1_555.0, _A100),
    ),
    _H100_SXM,
    replace(
        _H100_SXM,
        name="h100-pcie",
        title="NVIDIA H100 PCIe 80 GB",
        device_names=(r"H100( 80GB)? PCIe",),
        hbm_gb_per_s=_sheet(2_000.0, "NVIDIA H100 data sheet (2022): 2 TB/s"),
        threads_per_ns=_cores(114, 128, 1.755, _H100_PAPER),
        intra_gb_per_s=_assumed(
            48.0,
            "over PCIe 5.0, as NCCL's topology takes it: NVLink bridges join two cards",
        ),
        inter_gb_per_s=_NIC_200,
    ),
    replace(
        _H100_SXM,
        name="h200",
        title="NVIDIA H200 SXM 141 GB",
        device_names=(r"H200",),
        memory_gb=_sheet(141.0, _H200),
        hbm_gb_per_s=_sheet(4_800.0, _H200),
    ),
    GpuCard(
        name="b200",
        title="NVIDIA B200 SXM 180 GB",
        device_names=(r"B200",),
        memory_gb=_sheet(180.0, "NVIDIA DGX B200 data sheet (2024): 1,440 of eight"),
        hbm_gb_per_s=_published(
            7_672.0, "clock and bus width as the driver states them: pytorch/ao #4002"
        ),
        threads_per_ns=_assumed(
            37_225.0,
            "148 as the driver states them (pytorch/ao #4002), at 1.965 GHz",
        ),
        l2_mib=_published(126.5, "as the driver states it: pytorch/ao #4002"),
        l3_mib=_NO_L3,
        host_gb_per_s=_PCIE_5,
        intra_gb_per_s=_NVSWITCH_5,
        inter_gb_per_s=_NIC_400,
    ),
    GpuCard(
        name="mi250x",
        title="AMD Instinct MI250X, one of its two dies",
        device_names=(r"MI250X( */ *MI250)?",),
        memory_gb=_sheet(64.0, f"{_MI200}: 128 of two dies"),
        hbm_gb_per_s=_sheet(1_638.0, f"{_MI200}: 3,277 of two dies"),
        threads_per_ns=_cores(110, 64, 1.7, f"{_MI200}: 220 of two dies"),
        l2_mib=_sheet(8.0, _ROCM),
        l3_mib=_NO_L3,
        host_gb_per_s=_PCIE_4,
        intra_gb_per_s=_assumed(
            108.0, f"three links of 36 that leave a card: {_RCCL}; line rate 150"
        ),
        inter_gb_per_s=_NIC_100,
    ),
    GpuCard(
        name="mi300x",
        title="AMD Instinct MI300X",
        device_names=(r"MI300X( VF)?",),
        memory_gb=_sheet(192.0, _MI300),
        hbm_gb_per_s=_sheet(5_300.0, _MI300),
        threads_per_ns=_cores(304, 64, 2.1, _MI300),
        l2_mib=_sheet(32.0, _ROCM),
        l3_mib=_AMD_L3,
        host_gb_per_s=_PCIE_5,
        intra_gb_per_s=_published(336.0, f"seven links of 48: {_RCCL}; line rate 448"),
        inter_gb_per_s=_NIC_400,
    ),
    GpuCard(
        name="mi350",
        title="AMD Instinct MI350X or MI355X",
        device_names=(r"MI35[05]X( VF)?",),
        memory_gb=_sheet(288.0, _MI350),
        hbm_gb_per_s=_sheet(8_000.0, _MI350),
        threads_per_ns=_cores(256, 64, 2.2, f"{_MI350}; 2.4 of an MI355X"),
        l2_mib=_sheet(32.0, _ROCM),
        l3_mib=_AMD_L3,
        host_gb_per_s=_PCIE_5,
        intra_gb_per_s=_published(
            360.0, "rccl-tests of 8 MI355X, all-to-all of 16 GiB: 361; line rate 537"
        ),
        inter_gb_per_s=_published(
            44.0,
            "rccl-tests of 2 x 8 MI355X, one 400G NIC per GPU: all-to-all of 16 GiB "
            "has a bus bandwidth of 86.7 and 91.1, the NIC's times two; line rate 50",
        ),
    ),
)

GPU_CARDS: Mapping[str, GpuCard] = {card.name: card for card in _CARDS}
"""Name -> card."""

_MAKERS = re.compile(r"^((nvidia|tesla|amd|instinct)\s+)+", re.IGNORECASE)


def find_card(device_name: str | None) -> GpuCard | None:
    """Find the card that torch shows under a name.

    Args:
        device_name: As `torch.cuda.get_device_name` prints it, or a card's title.

    Returns:
        None for a card that the table lacks, and for a part of one (MIG).
    """
    name = device_name or ""
    bare = _MAKERS.sub("", name.strip())
    for card in _CARDS:
        patterns = card.device_names
        if name == card.title or any(re.fullmatch(p, bare, re.I) for p in patterns):
            return card
    return None


def card_named(name: str) -> GpuCard:
    """Return the card of a name of `GPU_CARDS`, in any case.

    Raises:
        ConfigError: There is none.
    """
    try:
        return GPU_CARDS[name.lower()]
    except KeyError:
        raise ConfigError(
            f"unknown card '{name}'; known are {', '.join(GPU_CARDS)}. For another "
            "one name the nearest and give its own figures beside it"
        ) from None
