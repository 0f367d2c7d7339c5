"""Chooses the comms model for a topology: measured, published, or by bandwidths."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CollectiveType,
    GeneralizedCommsBandwidth,
)

from torchrec_neuroshard.bundles.find import load_comms_model
from torchrec_neuroshard.hardware.device_types import is_accelerator
from torchrec_neuroshard.models.adjusted import RelievedCommsModel
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.models.collectives import BandwidthCommsModel
from torchrec_neuroshard.models.rank_groups import RankGroups
from torchrec_neuroshard.planner.groups import node_size, sharding_group, whole_nodes
from torchrec_neuroshard.planner.topology import GB_PER_S, PlannedDevices


def find_rank_groups(
    devices: PlannedDevices, world: CommsModel, cost_model: str | Path | CostModel
) -> CommsModel:
    """Return the comms model of all ranks and of TorchRec's groups of ranks.

    Args:
        devices: The devices to plan for.
        world: The comms model of all ranks.
        cost_model: The planner's `cost_model`.
    """
    if isinstance(world, RelievedCommsModel):  # its inner model has the groups
        return world
    topology = devices.topology
    world_size, size = int(topology.world_size), node_size(topology)
    group = sharding_group(topology)
    if size >= world_size and group is None:
        return world
    find = partial(find_comms_model, devices, cost_model)
    node = cross = world
    if size < world_size:
        node = find(size, min(int(topology.local_world_size), size))
        cross = find(world_size // size, 1)
    return RankGroups(
        world,
        node=node,
        cross=cross,
        node_size=size,
        job=find(group.num_ranks, group.ranks_per_node) if group else None,
        job_size=group.num_ranks if group else 0,
    )


def find_comms_model(
    devices: PlannedDevices,
    cost_model: str | Path | CostModel,
    world_size: int,
    local_world_size: int,
) -> CommsModel:
    """Return the comms model of some ranks: measured, published, or by bandwidths.

    Bandwidths per collective in the topology (`generalized_comms_bandwidths`) come
    first. Other bandwidths that the caller set replace measurements. Default bandwidths
    are used only for links without measurements. If ranks do not fill whole nodes, the
    largest node size that they fill is used.
    """
    local_world_size = whole_nodes(world_size, local_world_size)
    topology = devices.topology
    if not isinstance(topology.comms_bandwidths, BasicCommsBandwidths):
        links = topology.comms_bandwidths
        model = _by_collective(links, world_size, local_world_size)
        model.overlaps = is_accelerator(topology.compute_device)
        return model
    intra = topology.intra_host_bw * GB_PER_S
    inter = topology.inter_host_bw * GB_PER_S
    given = devices.given & {"intra_host_bw", "inter_host_bw"}
    known = load_comms_model(
        None if isinstance(cost_model, CostModel) else cost_model,
        device_type=topology.compute_device,
        world_size=world_size,
        local_world_size=local_world_size,
        intra_gb_per_s=intra if "intra_host_bw" in given else None,
        inter_gb_per_s=inter if "inter_host_bw" in given else None,
        unmeasured_inter_gb_per_s=inter,
        card=devices.card,
    )
    whose = "topology" if given else "TorchRec default"
    found = known or BandwidthCommsModel(
        world_size=world_size,
        local_world_size=local_world_size,
        intra_gb_per_s=intra,
        inter_gb_per_s=inter,
        source=f"{whose} bandwidths, not measured",
    )
    found.overlaps = is_accelerator(topology.compute_device)
    return found


def _by_collective(
    links: GeneralizedCommsBandwidth, world_size: int, local_world_size: int
) -> CommsModel:
    """Return a comms model with the caller's bandwidth of each collective."""
    all_to_all, *others = (
        links.get_bw(
            local_world_size=local_world_size,
            world_size=world_size,
            collective_type=kind,
        )
        for kind in (
            CollectiveType.ALL_TO_ALL,
            CollectiveType.REDUCE_SCATTER,
            CollectiveType.ALL_GATHER,
            CollectiveType.ALL_REDUCE,
        )
    )
    scatter, gather, reduce = (all_to_all / other for other in others)
    return BandwidthCommsModel(
        world_size=world_size,
        local_world_size=local_world_size,
        intra_gb_per_s=all_to_all * GB_PER_S,
        inter_gb_per_s=all_to_all * GB_PER_S,
        relative_ms=(scatter, gather, reduce),
        source="topology bandwidths, not measured",
    )
