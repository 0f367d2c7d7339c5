"""Sharding groups of TorchRec's 2D parallelism (`DMPCollection`), to plan inside one.

A sharding group shares the tables out among its ranks; every other group holds a
replica of them. The ranks of one number in their groups, a replica group, average
their weights every so many iterations. What a plan is made for is the topology of one
group: TorchRec moves the plan to the ranks of each.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import Storage, Topology

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner.compat import with_ranks

__all__ = [
    "ShardingGroup",
    "group_topology",
    "sharding_group",
    "with_sharding_group",
]

_GROUP = "sharding_group"
"""Attribute of a topology: see `group_topology`."""

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingGroup:
    """What a sharding group's topology does not say: the job around it."""

    num_ranks: int
    """Of all groups."""
    ranks_per_node: int
    """Of all groups."""
    num_replicas: int
    """Sharding groups: ranks of a replica group."""
    replicas_per_node: int
    """Ranks of a replica group that lie in one node."""
    sync_interval: int
    """Iterations from one average of the weights to the next."""

    def __str__(self) -> str:
        """Return it as part of a sentence."""
        return (
            f"one of {self.num_replicas} sharding groups of {self.num_ranks} ranks, "
            f"{self.ranks_per_node} per node, whose weights are averaged every "
            f"{self.sync_interval} iterations, {self.replicas_per_node} in a node"
        )


def group_topology(
    topology: Topology,
    sharding_group_size: int,
    *,
    sync_interval: int = 1,
    use_inter_host_allreduce: bool = False,
) -> Topology:
    """Return the topology of one sharding group, to plan in and to rehearse.

    A plan for it is what `DMPCollection(plan=...)` takes, with the same
    `sharding_group_size` and `use_inter_host_allreduce`, and the topology's
    `intra_group_size` as `node_group_size`. A device has what the least of its
    replicas has.

    Args:
        topology: All ranks.
        sharding_group_size: Ranks that the tables are shared out among; divides all.
        sync_interval: Iterations between two calls of `DMPCollection.sync`.
        use_inter_host_allreduce: As in TorchRec: whether a group's ranks follow one
            another; else those of a replica group do.

    Raises:
        ConfigError: The size does not divide the ranks, the interval is below 1, or
            the topology is a group's already.
    """
    num_ranks, size = int(topology.world_size), sharding_group_size
    if sharding_group(topology) is not None:
        raise ConfigError(
            "the topology is one of a sharding group already; pass that of all ranks"
        )
    if size < 1 or num_ranks % size:
        raise ConfigError(
            f"sharding_group_size={size} does not divide the {num_ranks} ranks of the "
            f"topology; take one of {', '.join(map(str, _divisors(num_ranks)))}, or "
            "other ranks"
        )
    if sync_interval < 1:
        raise ConfigError(f"sync_interval must be at least 1, got {sync_interval}")
    follow, ranks = use_inter_host_allreduce, np.arange(num_ranks)
    groups_GR = ranks.reshape(-1, size) if follow else ranks.reshape(size, -1).T
    replicas_RG, per_node = groups_GR.T, int(topology.local_world_size)
    devices = []
    for rank, replicas in enumerate(replicas_RG):
        held = [dataclasses.astuple(topology.devices[r].storage) for r in replicas]
        least = Storage(*map(min, zip(*held, strict=True)))
        device = topology.devices[replicas[0]]
        devices.append(dataclasses.replace(device, rank=rank, storage=least))
    in_node = _side_by_side(groups_GR, per_node)
    in_pod = _side_by_side(groups_GR, int(topology.intra_group_size))
    found = with_ranks(
        topology,
        devices,
        ranks_per_node=in_node,
        nodes_per_pod=in_pod // in_node if in_pod > in_node else None,
    )
    group = ShardingGroup(
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        num_replicas=num_ranks // size,
        replicas_per_node=_side_by_side(replicas_RG, per_node),
        sync_interval=sync_interval,
    )
    return with_sharding_group(found, group)


def with_sharding_group(topology: Topology, group: ShardingGroup | None) -> Topology:
    """Note on the topology of a sharding group, in place, what is around it."""
    setattr(topology, _GROUP, group)
    return topology


def sharding_group(topology: Topology) -> ShardingGroup | None:
    """Return what `group_topology` knew; None where the topology is of all ranks."""
    group: ShardingGroup | None = vars(topology).get(_GROUP)
    return group


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _side_by_side(groups_NR: Ranks, node_size: int) -> int:
    """Most ranks that whole groups can be cut into, each part inside one node."""
    nodes_NR = groups_NR // node_size
    return max(
        n
        for n in _divisors(nodes_NR.shape[1])
        if (np.ptp(nodes_NR.reshape(-1, n), axis=1) == 0).all()
    )
