"""Which collectives' model goes with a topology: measured, published, or bandwidths."""

from __future__ import annotations

import warnings
from pathlib import Path

from torchrec.distributed.planner.constants import (
    CROSS_NODE_BANDWIDTH,
    INTRA_NODE_BANDWIDTH,
)
from torchrec.distributed.planner.types import Topology

from torchrec_neuroshard.cost_models import (
    BandwidthCommsModel,
    CommsModel,
    CostModel,
    load_comms_model,
)
from torchrec_neuroshard.planner.staged import RankGroups
from torchrec_neuroshard.planner.topologies import whole_nodes

__all__ = ["GB_PER_S", "find_comms_model", "find_rank_groups"]

GB_PER_S = 1e-6
"""TorchRec counts bandwidth in bytes per millisecond."""


def find_rank_groups(
    topology: Topology, world: CommsModel, cost_model: str | Path | CostModel
) -> RankGroups:
    """Collectives of all ranks and of the groups that TorchRec makes of them."""
    world_size = int(topology.world_size)
    asked = getattr(topology, "intra_group_size", topology.local_world_size)
    size = whole_nodes(world_size, int(asked))
    node = cross = world
    if size < world_size:
        local = min(int(topology.local_world_size), size)
        node = find_comms_model(topology, cost_model, size, local)
        cross = find_comms_model(topology, cost_model, world_size // size, 1)
    return RankGroups(world=world, node=node, cross=cross, node_size=size)


def find_comms_model(
    topology: Topology,
    cost_model: str | Path | CostModel,
    world_size: int,
    local_world_size: int,
) -> CommsModel:
    """Find the collectives' model: measured, published, or the topology's bandwidths.

    Bandwidths that the caller gave the topology replace the measured ones; TorchRec's
    own defaults replace nothing, but stand in for links that were not measured. Where
    ranks do not fill whole nodes, the largest nodes stand in that they do fill.
    """
    nodes = whole_nodes(world_size, local_world_size)
    if nodes < min(local_world_size, world_size):
        warnings.warn(
            f"{world_size} ranks do not fill nodes of {local_world_size}: collectives "
            f"are costed as in nodes of {nodes}",
            stacklevel=2,
        )
    local_world_size = nodes
    intra, inter = topology.intra_host_bw, topology.inter_host_bw
    given_intra, given_inter = (
        intra != INTRA_NODE_BANDWIDTH,
        inter != CROSS_NODE_BANDWIDTH,
    )
    if not isinstance(cost_model, CostModel):
        known = load_comms_model(
            cost_model,
            device_type=topology.compute_device,
            world_size=world_size,
            local_world_size=local_world_size,
            intra_gb_per_s=intra * GB_PER_S if given_intra else None,
            inter_gb_per_s=inter * GB_PER_S if given_inter else None,
            unmeasured_inter_gb_per_s=inter * GB_PER_S,
        )
        if known is not None:
            return known
    given = given_intra or given_inter
    return BandwidthCommsModel(
        world_size=world_size,
        local_world_size=local_world_size,
        intra_gb_per_s=intra * GB_PER_S,
        inter_gb_per_s=inter * GB_PER_S,
        source=f"{'topology' if given else 'TorchRec default'} bandwidths, "
        "not measured",
    )
