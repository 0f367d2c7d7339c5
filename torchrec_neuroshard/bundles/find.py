"""Find cost models by name, path or device: `load_cost_model`."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from pathlib import Path

from torchrec_neuroshard.bundles.folders import (
    bundle_folder,
    check_cost_model,
    pretrained_names,
)
from torchrec_neuroshard.bundles.format import Bundle
from torchrec_neuroshard.errors import (
    ConfigError,
    NeuroShardError,
    check_kind,
    check_number,
)
from torchrec_neuroshard.hardware.cards import GPU_CARDS, GpuCard, card_named, find_card
from torchrec_neuroshard.hardware.device_types import (
    BACKENDS,
    GPU,
    backend_of,
    is_accelerator,
)
from torchrec_neuroshard.hardware.devices import current_device_name
from torchrec_neuroshard.models.base import (
    CPU_IDS,
    CPU_JOIN,
    CommsModel,
    CostModel,
)
from torchrec_neuroshard.models.card_physics import PhysicalConstants
from torchrec_neuroshard.models.compute import PhysicalCostModel
from torchrec_neuroshard.models.estimate_error import EstimateError
from torchrec_neuroshard.models.published_links import published_comms_model

_CPU_CONSTANTS = PhysicalConstants(
    memory_gb_per_s=20.0,
    cache_mib=2.0,
    efficiency=0.5,
    forward_launch_us=300.0,
    backward_launch_us=300.0,
    sort_pass_us=0.0,
    forward_step_us=0.0,
    backward_step_us=0.0,
    work_speed=1.0,
    lookup_thread_ns=0.0,
    update_thread_ns=0.0,
    lookup_ns=30.0,
    gradient_ns=120.0,
)
"""Constants of one core of a server CPU; assumed, not measured."""
_A100_THREADS_PER_NS = 19_492.0
"""108 multiprocessors at 1.41 GHz, 128 threads each. Source: NVIDIA A100 white
paper."""
_STAND_IN = "cpu_epyc_zen5"
"""Bundle whose gloo collectives stand in for CPUs without measured collectives."""


def card_constants(card: GpuCard) -> PhysicalConstants:
    """Return the physical model's constants for a card of `GPU_CARDS`."""
    threads = card.threads_per_ns
    return PhysicalConstants(
        memory_gb_per_s=card.hbm_gb_per_s.value,
        cache_mib=card.l2_mib.value + card.l3_mib.value,
        host_gb_per_s=card.host_gb_per_s.value,
        work_speed=None if threads is None else threads.value / _A100_THREADS_PER_NS,
        least_threads=8.0 if threads is None else 64.0,
    )


def shipped_bundles(device_type: str) -> list[Bundle]:
    """Return the bundles with a compute model that come with the package.

    Warns about bundles that cannot be read.

    Args:
        device_type: Device type that they were measured on, a key of `BACKENDS`.
    """
    found = []
    for name in pretrained_names():
        bundle = find_bundle(name)
        try:
            info = bundle.compute if bundle else None
            if bundle and info and info.fingerprint.device_type == device_type:
                found.append(bundle)
        except NeuroShardError as error:
            warnings.warn(f"shipped bundle '{name}' is unusable: {error}", stacklevel=3)
    return found


def find_bundle(name: str | Path) -> Bundle | None:
    """Return a bundle by its shipped name or folder; None if there is no folder."""
    folder = bundle_folder(name)
    return None if folder is None else Bundle.at(folder)


def find_named_card(
    cost_model: str | Path | CostModel, device_type: str
) -> GpuCard | None:
    """Return the card that a cost model is for, by its name or measured device.

    Args:
        cost_model: Same as for `load_cost_model`.
        device_type: Device type to plan for, a key of `BACKENDS`.

    Returns:
        The card; None if it is unknown.

    Raises:
        ConfigError: `cost_model` names a card, but the devices are not GPUs.
    """
    if isinstance(cost_model, CostModel):
        if device_type != GPU:
            return None
        estimated = cost_model.error.card if cost_model.error else None
        return card_named(estimated) if estimated else find_card(cost_model.hardware)
    check_kind("cost_model", cost_model, str, os.PathLike, CostModel)
    card = GPU_CARDS.get(str(cost_model).lower())
    if card is not None and device_type != GPU:
        raise ConfigError(
            f"cost model '{cost_model}' is for GPUs, but the devices to plan for are "
            f"of type '{device_type}': use a topology with compute_device='{GPU}' or "
            "another cost model"
        )
    bundle = find_bundle(cost_model)
    if card is not None or bundle is None or device_type != GPU:
        return card
    return find_card(bundle.compute.fingerprint.device) if bundle.compute else None


def load_cost_model(
    cost_model: str | Path | CostModel = "auto",
    *,
    device_type: str = "cpu",
    hbm_gb_per_s: float | None = None,
    host_gb_per_s: float | None = None,
    card: GpuCard | None = None,
) -> CostModel:
    """Return the cost model to plan with.

    Args:
        cost_model: A model, or one of:

            - "auto": the shipped bundle measured on `card` or, without a card, on this
              very device; else a physical estimate, with a warning. A CPU's bundle is
              never used for a GPU, and none for a card with another bandwidth.
            - the name of a shipped bundle.
            - the name of a card of `GPU_CARDS`: its shipped bundle, else its physical
              estimate.
            - a bundle's folder. If the folder holds only collectives, kernels are
              costed as with "auto".
            - "measure": the estimate that a planner uses until it has measured.
        device_type: Device type to plan for, a key of `BACKENDS`.
        hbm_gb_per_s: Memory bandwidth for the physical estimate; None takes the card's.
        host_gb_per_s: One-way bandwidth to the host's memory; None takes the card's.
        card: Card to plan for. None takes the named card, else this machine's.

    Raises:
        ConfigError: No bundle has this name or path, or a card is named for CPUs.
        BundleCorruptError: The bundle is damaged.
        BundleMismatchError: The bundle is of another version of this package.
    """
    if isinstance(cost_model, CostModel):
        return cost_model
    if device_type not in BACKENDS:
        raise ConfigError(
            f"device_type must be one of {', '.join(BACKENDS)}, got {device_type!r:.60}"
        )
    for name, rate in (("hbm", hbm_gb_per_s), ("host", host_gb_per_s)):
        if rate is not None:
            check_number(f"{name}_gb_per_s", rate, above=True)
    if card is not None:
        check_kind("card", card, GpuCard)
    named = find_named_card(cost_model, device_type)
    if str(cost_model) == "measure":
        return physical_estimate(
            device_type, hbm_gb_per_s, card, host_gb_per_s=host_gb_per_s
        )
    sold = card.hbm_gb_per_s.value if card else None
    is_altered = bool(sold and not math.isclose(hbm_gb_per_s or sold, sold))
    is_auto = str(cost_model) == "auto"
    bundle = None if is_auto else find_bundle(cost_model)
    check_cost_model(cost_model)
    if bundle and bundle.comms and not bundle.compute:
        warnings.warn(
            f"{bundle.folder} holds only collectives: kernels are costed as with "
            "cost_model='auto'. 'neuroshard calibrate' or 'train' adds kernels to it",
            stacklevel=2,
        )
        is_auto = True
    if is_auto:
        device = _planned_device(device_type, card)
        bundle = shipped_for(device_type, device, None if is_altered else card)
    if bundle is not None:
        model = bundle.cost_model()
        assert bundle.compute is not None
        made = bundle.compute.fingerprint
        planned = card.title if card else device_type
        if made.device_type != device_type:
            model.source = (
                f"measured on another device type, {model.hardware} "
                f"({made.device_type}): not an estimate for {device_type}"
            )
        elif card and find_card(made.device) is not card:
            model.source = f"measured on another card, {model.hardware}, not {planned}"
        else:
            return model
        model.measured_error = None  # it is not this card's
        warnings.warn(
            f"cost model '{cost_model}' was {model.source}. The milliseconds, and the "
            f"plan that they choose, are not for {planned}. Leave the cost model out, "
            "or name one that was measured on these devices",
            stacklevel=2,
        )
        return model
    estimate = physical_estimate(
        device_type, hbm_gb_per_s, card or named, host_gb_per_s=host_gb_per_s
    )
    basis = f"{estimate.constants.memory_gb_per_s:,.0f} GB/s of memory bandwidth"
    if estimate.error is not None:
        basis += f" ({estimate.error})"
    hardware = estimate.hardware + " with this bandwidth" * is_altered
    warnings.warn(
        f"no cost model was measured on {hardware}: costs are a physical "
        f"estimate from {basis}. On that machine run 'neuroshard calibrate --out "
        "FOLDER', then name FOLDER as the cost model. Shipped cost models are "
        f"{', '.join(pretrained_names()) or 'none'}",
        stacklevel=2,
    )
    return estimate


def load_comms_model(
    cost_model: str | Path | None = "auto",
    *,
    device_type: str,
    world_size: int,
    local_world_size: int,
    intra_gb_per_s: float | None = None,
    inter_gb_per_s: float | None = None,
    unmeasured_inter_gb_per_s: float | None = None,
    card: GpuCard | None = None,
) -> CommsModel | None:
    """Return the model of collectives that belongs to a cost model.

    Args:
        cost_model: Same as for `load_cost_model`; None if it has no measured
            collectives.
        device_type: Device type to plan for, a key of `BACKENDS`.
        world_size: Number of ranks.
        local_world_size: Ranks per node.
        intra_gb_per_s: Bandwidth inside a node to predict for; None keeps the measured
            bandwidth.
        inter_gb_per_s: The same between nodes.
        unmeasured_inter_gb_per_s: Bandwidth between nodes to assume, with a warning, if
            the bundle was measured on one node; None raises an error instead.
        card: Card to plan for. None takes the named card, else this machine's.

    Returns:
        The first of these that exists: the bundle's collectives for this backend; the
        card's published links, with the given bandwidths in place of its own; on CPUs
        without a given bandwidth inside a node, collectives measured on another CPU.
        None if there are none: only the topology's bandwidths are known then.

    Raises:
        BundleCorruptError: The bundle is damaged.
        BundleMismatchError: The bundle is of another version of this package.
        ConfigError: The ranks do not fill whole nodes, or no bandwidth between nodes is
            known.
    """
    device = _planned_device(device_type, card)
    if card is None and cost_model is not None:
        card = find_named_card(cost_model, device_type)
    card = card or find_card(device)
    bundle = _measured_collectives(cost_model, device_type, device)
    stands_in = False
    if bundle is None and intra_gb_per_s is None and not is_accelerator(device_type):
        stands_in, bundle = True, find_bundle(_STAND_IN)
    info = bundle.comms if bundle else None
    if bundle is None or info is None:
        if card is None:
            return None
        return published_comms_model(
            card,
            world_size=world_size,
            local_world_size=local_world_size,
            intra_gb_per_s=intra_gb_per_s,
            inter_gb_per_s=inter_gb_per_s,
        )
    crosses_unmeasured = world_size > local_world_size and not info.inter_gb_per_s
    if crosses_unmeasured and inter_gb_per_s is None and unmeasured_inter_gb_per_s:
        inter_gb_per_s = unmeasured_inter_gb_per_s
        if not stands_in:
            warnings.warn(
                f"the collectives of {bundle.folder} were measured inside one node: "
                f"{inter_gb_per_s:g} GB/s between nodes is assumed. Pass inter_host_bw "
                "to the topology or run 'neuroshard collect comms' on several nodes",
                stacklevel=2,
            )
    # The compute model whose time unit the collectives must have.
    kernels: Bundle | None = bundle
    if bundle.compute is None:
        kernels = shipped_for(device_type, current_device_name(device_type))
    model = bundle.comms_model(
        compute=kernels.compute if kernels else None,
        world_size=world_size,
        local_world_size=local_world_size,
        intra_gb_per_s=intra_gb_per_s,
        inter_gb_per_s=inter_gb_per_s,
    )
    if stands_in:
        where = f"measured on {info.fingerprint.device} as a stand-in"
        model.source = model.source.replace("measured", where, 1)
        model.error = None  # it is not this CPU's
    return model


def _planned_device(device_type: str, card: GpuCard | None) -> str | None:
    """Return this machine's device name; None if the plan is for another card."""
    device = current_device_name(device_type)
    return device if card is None or card is find_card(device) else None


def _measured_collectives(
    cost_model: str | Path | None, device_type: str, device: str | None
) -> Bundle | None:
    """Return a bundle with collectives of the type's backend, or None."""
    backend = backend_of(device_type)
    if cost_model is None:
        return None
    if str(cost_model) != "auto":
        bundle = find_bundle(cost_model)
        info = bundle.comms if bundle else None
        return bundle if info and info.backend == backend else None
    for bundle in shipped_bundles(device_type):
        info = bundle.comms
        if info and (info.backend, info.fingerprint.device) == (backend, device):
            return bundle
    return None


def shipped_for(
    device_type: str, device: str | None, card: GpuCard | None = None
) -> Bundle | None:
    """Return the shipped bundle measured on a device or a card, or None.

    Args:
        device_type: Device type, a key of `BACKENDS`.
        device: Name of the device; None if only the card counts.
        card: A card of `GPU_CARDS`; None if only the device counts.
    """
    for bundle in shipped_bundles(device_type):
        assert bundle.compute is not None
        found = bundle.compute.fingerprint.device
        if found == device or (card and find_card(found) is card):
            return bundle
    return None


def physical_estimate(
    device_type: str,
    hbm_gb_per_s: float | None = None,
    card: GpuCard | None = None,
    *,
    host_gb_per_s: float | None = None,
) -> PhysicalCostModel:
    """Return the physical estimate for a device without measurements.

    Args:
        device_type: Device type, a key of `BACKENDS`.
        hbm_gb_per_s: Memory bandwidth; None takes the card's.
        card: Card to plan for; None takes this machine's.
        host_gb_per_s: One-way bandwidth to the host's memory; None takes the card's.
    """
    device = current_device_name(device_type)
    card = card or find_card(device)
    absent = f"a {device_type} device that is not on this machine"
    shown = card.title if card else device or absent
    if not is_accelerator(device_type):
        estimate = PhysicalCostModel(_CPU_CONSTANTS, name="physical", hardware=shown)
        estimate.ids, estimate.join = CPU_IDS, CPU_JOIN
        return estimate
    constants = card_constants(card) if card else PhysicalConstants()
    constants = dataclasses.replace(
        constants,
        memory_gb_per_s=hbm_gb_per_s or constants.memory_gb_per_s,
        host_gb_per_s=host_gb_per_s or constants.host_gb_per_s,
    )
    name = card.name if card else None
    return PhysicalCostModel(
        constants,
        name=name or "physical",
        hardware=shown,
        error=EstimateError(card=name),
    )
