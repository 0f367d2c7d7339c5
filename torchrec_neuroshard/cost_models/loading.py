"""`load_cost_model`: from a name, a path or a device to a cost model."""

from __future__ import annotations

import warnings
from pathlib import Path

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.cost_models.bundle import (
    COMMS_BUNDLE,
    COMPUTE_BUNDLE,
    BundleInfo,
    load_bundle,
    load_comms_bundle,
)
from torchrec_neuroshard.cost_models.comms import (
    DATASHEET_NODES,
    datasheet_comms_model,
)
from torchrec_neuroshard.cost_models.compute import (
    PhysicalConstants,
    PhysicalCostModel,
)
from torchrec_neuroshard.devices import current_device_name
from torchrec_neuroshard.errors import ConfigError, NeuroShardError

__all__ = ["bundle_folder", "load_comms_model", "load_cost_model", "pretrained_names"]

_PRETRAINED = Path(__file__).parent.parent / "pretrained"

_CPU_CONSTANTS = PhysicalConstants(
    memory_gb_per_s=20.0, launch_us=300.0, lookup_ns=30.0, efficiency=0.5
)
"""One core of a server CPU: assumed, not measured."""
_DEFAULT_GPU_GB_PER_S = 2_039.0
"""A100 80 GB data sheet; used only when the topology gives no bandwidth."""


def pretrained_names() -> tuple[str, ...]:
    """Names of the bundles that come with the package."""
    return tuple(sorted(p.parent.name for p in _PRETRAINED.glob("*/bundle.json")))


def bundle_folder(name: str | Path) -> Path | None:
    """Find the folder of a shipped bundle, or one given by its path, if it is there."""
    if str(name) in pretrained_names():
        return _PRETRAINED / str(name)
    return Path(name) if Path(name).is_dir() else None


def load_cost_model(
    cost_model: str | Path | CostModel = "auto",
    *,
    device_type: str = "cpu",
    hbm_gb_per_s: float | None = None,
) -> CostModel:
    """Find the cost model to plan with.

    Args:
        cost_model: "auto", the name of a shipped bundle, a bundle's folder, or a model.
            "auto" takes the bundle measured on this very device, else a physical
            estimate, with a warning; it never takes a CPU's bundle for a GPU. So it
            is with a folder that holds collectives alone.
        device_type: Device that is planned for: "cpu" or "cuda".
        hbm_gb_per_s: Its memory bandwidth, for the physical estimate.

    Raises:
        ConfigError: No bundle has that name or path.
        BundleCorruptError: The bundle is damaged.
        BundleMismatchError: The bundle is of another version of this package.
    """
    if isinstance(cost_model, CostModel):
        return cost_model
    if str(cost_model) == "auto":
        return _auto(device_type, hbm_gb_per_s)
    if (folder := bundle_folder(cost_model)) is not None:
        if COMPUTE_BUNDLE.is_in(folder) or not COMMS_BUNDLE.is_in(folder):
            return load_bundle(folder)
        warnings.warn(
            f"{folder} holds collectives alone: kernels are costed as by "
            "cost_model='auto'. 'neuroshard calibrate' or 'train' adds kernels to it",
            stacklevel=2,
        )
        return _auto(device_type, hbm_gb_per_s)
    raise ConfigError(
        f"unknown cost model '{cost_model}': it is neither 'auto', nor a shipped "
        f"bundle ({', '.join(pretrained_names()) or 'none'}), nor a folder made by "
        "'neuroshard train'"
    )


def load_comms_model(
    cost_model: str | Path = "auto",
    *,
    device_type: str,
    world_size: int,
    local_world_size: int,
    intra_gb_per_s: float | None = None,
    inter_gb_per_s: float | None = None,
    unmeasured_inter_gb_per_s: float | None = None,
) -> CommsModel | None:
    """Find the model of collectives that belongs to a cost model.

    Args:
        cost_model: As for `load_cost_model`.
        device_type: Device that is planned for: "cpu" (gloo) or "cuda" (NCCL).
        world_size: Ranks.
        local_world_size: Ranks per node.
        intra_gb_per_s: Bandwidth inside a node to predict for; None is as measured.
        inter_gb_per_s: Same between nodes.
        unmeasured_inter_gb_per_s: Bandwidth between nodes to assume, with a warning,
            where the bundle was measured on one node; None is an error then.

    Returns:
        What was measured, if the bundle holds it for this backend; else the published
        links of this machine's GPU, unless bandwidths are given; None where neither is
        known and the topology's bandwidths have to do.

    Raises:
        BundleCorruptError: The bundle is damaged.
        BundleMismatchError: The bundle is of another version of this package.
        ConfigError: The ranks do not fill whole nodes, or were measured on one node.
    """
    backend = "nccl" if device_type == "cuda" else "gloo"
    device = current_device_name(device_type)
    if str(cost_model) == "auto":
        folders = sorted(p.parent for p in _PRETRAINED.glob("*/comms.json"))
    else:
        folders = list(filter(None, [bundle_folder(cost_model)]))
    for folder in filter(COMMS_BUNDLE.is_in, folders):
        info = COMMS_BUNDLE.read_info(folder)
        wanted = str(cost_model) != "auto" or info.fingerprint.device == device
        if wanted and info.backend == backend:
            many = world_size > local_world_size
            assumed = unmeasured_inter_gb_per_s
            if many and not info.inter_gb_per_s and inter_gb_per_s is None and assumed:
                inter_gb_per_s = assumed
                warnings.warn(
                    f"the collectives of {folder} were measured inside one node: "
                    f"{assumed:g} GB/s between nodes is assumed. Give the topology "
                    "inter_host_bw or run 'neuroshard collect comms' on several nodes",
                    stacklevel=2,
                )
            return load_comms_bundle(
                folder,
                # One unit for kernels and collectives.
                compute=_kernels_beside(folder, device_type),
                backend=backend,
                world_size=world_size,
                local_world_size=local_world_size,
                intra_gb_per_s=intra_gb_per_s,
                inter_gb_per_s=inter_gb_per_s,
            )
    if intra_gb_per_s is not None or inter_gb_per_s is not None:
        return None
    for node in DATASHEET_NODES:
        if device_type == "cuda" and node in (device or "").lower():
            return datasheet_comms_model(
                node, world_size=world_size, local_world_size=local_world_size
            )
    return None


def _kernels_beside(folder: Path, device_type: str) -> BundleInfo | None:
    """The compute model in whose unit a bundle's collectives are to be given."""
    if not COMPUTE_BUNDLE.is_in(folder):
        shipped = _shipped_for(device_type)
        return None if shipped is None else COMPUTE_BUNDLE.read_info(shipped)
    return COMPUTE_BUNDLE.read_info(folder)


def _shipped_for(device_type: str) -> Path | None:
    """The shipped bundle that was measured on this very device."""
    device = current_device_name(device_type)
    for name in pretrained_names():
        try:
            fingerprint = COMPUTE_BUNDLE.read_info(_PRETRAINED / name).fingerprint
        except NeuroShardError as error:
            warnings.warn(f"shipped bundle '{name}' is unusable: {error}", stacklevel=4)
            continue
        if fingerprint.device_type == device_type and fingerprint.device == device:
            return _PRETRAINED / name
    return None


def _auto(device_type: str, hbm_gb_per_s: float | None) -> CostModel:
    if (shipped := _shipped_for(device_type)) is not None:
        return load_bundle(shipped)
    device = current_device_name(device_type)
    shown = device or f"a {device_type} device that is not on this machine"
    warnings.warn(
        f"no cost model was measured on {shown}: costs are a physical estimate from "
        "memory bandwidth. On that machine run 'neuroshard collect compute' and "
        "'neuroshard train', then pass cost_model=<the folder>; shipped bundles that "
        f"can be asked for by name: {', '.join(pretrained_names()) or 'none'}",
        stacklevel=3,
    )
    if device_type == "cpu":
        constants = _CPU_CONSTANTS
    else:
        constants = PhysicalConstants(
            memory_gb_per_s=hbm_gb_per_s or _DEFAULT_GPU_GB_PER_S
        )
    return PhysicalCostModel(constants, name="physical", hardware=device or device_type)
