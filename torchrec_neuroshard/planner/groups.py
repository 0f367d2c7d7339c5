"""Which ranks share tables: nodes, pods and the sharding groups of 2D parallelism.

With 2D parallelism (`DMPCollection`), each *sharding group* holds all tables, sharded
among its ranks, so every other group is a replica. Ranks at the same position of their
groups average their weights every few iterations. A plan is made for the topology of
one group, and TorchRec applies it to every group.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import Storage, Topology
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard.errors import ConfigError, check_kind, check_number
from torchrec_neuroshard.models.rank_groups import ShardingGroup
from torchrec_neuroshard.planner.compat import (
    POD_VARIABLES,
    group_size_of_job,
    with_ranks,
)
from torchrec_neuroshard.tables.sharding_types import NODE_TYPES

_GROUP = "sharding_group"
"""Attribute that `group_topology` sets on a topology."""

_MOST_TIMES, _SECONDS = 64, 2.0
"""`enough_ranks` tries up to this multiple of the ranks, for this many seconds."""

Ranks = npt.NDArray[np.int64]


def group_topology(
    topology: Topology,
    sharding_group_size: int,
    *,
    sync_interval: int = 1,
    use_inter_host_allreduce: bool = False,
) -> Topology:
    """Return the topology of one sharding group, to plan for or to rehearse.

    Pass a plan for this topology to `DMPCollection(plan=...)`, with the same
    `sharding_group_size` and `use_inter_host_allreduce`, and with the topology's
    `intra_group_size` as `node_group_size`. If replicas of a rank have different
    memory, the smallest counts.

    Args:
        topology: All ranks.
        sharding_group_size: Ranks that share one copy of the tables. It must divide the
            number of ranks.
        sync_interval: Iterations between two calls of `DMPCollection.sync`.
        use_inter_host_allreduce: As in TorchRec. True: a sharding group has consecutive
            ranks. False: a replica group has.

    Raises:
        ConfigError: The size does not divide the ranks, the interval is below 1, or
            the topology is already that of a group.
    """
    check_kind("topology", topology, Topology)
    check_number("sharding_group_size", sharding_group_size, least=1, whole=True)
    check_number("sync_interval", sync_interval, least=1, whole=True)
    num_ranks, size = int(topology.world_size), sharding_group_size
    if sharding_group(topology) is not None:
        raise ConfigError(
            "the topology is already that of a sharding group; pass the topology of "
            "all ranks"
        )
    if num_ranks % size:
        raise ConfigError(
            f"sharding_group_size={size} does not divide the {num_ranks} ranks of the "
            f"topology; take one of {', '.join(map(str, _divisors(num_ranks)))}, or "
            "change the number of ranks"
        )
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
    """Attach the job around a sharding group to its topology, in place."""
    setattr(topology, _GROUP, group)
    return topology


def sharding_group(topology: Topology) -> ShardingGroup | None:
    """Return the group that a topology is of; None if it is of all ranks."""
    group: ShardingGroup | None = vars(topology).get(_GROUP)
    return group


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _side_by_side(groups_NR: Ranks, node_size: int) -> int:
    """Return the largest part, in ranks, that divides groups within single nodes."""
    nodes_NR = groups_NR // node_size
    return max(
        n
        for n in _divisors(nodes_NR.shape[1])
        if (np.ptp(nodes_NR.reshape(-1, n), axis=1) == 0).all()
    )


def whole_nodes(world_size: int, local_world_size: int) -> int:
    """Return the most ranks per node, up to `local_world_size`, that fill all nodes."""
    most = min(int(world_size), int(local_world_size))
    return max(n for n in range(1, most + 1) if world_size % n == 0)


def node_size(topology: Topology) -> int:
    """Return the number of ranks that TorchRec spreads a table-row-wise table over."""
    return whole_nodes(topology.world_size, topology.intra_group_size)


def pod_fault(topology: Topology) -> str | None:
    """Return why tables cannot be spread over a topology's pods; None if they can.

    TorchRec spreads table-row-wise and grid shards over whole pods of `pod_size` nodes.
    It does not start a job whose ranks do not fill whole pods.
    """
    group, node = int(topology.intra_group_size), int(topology.local_world_size)
    world_size = int(topology.world_size)
    if group <= node or world_size % group == 0:
        return None
    return (
        f"pod_size={group // node} makes pods of {group} ranks, which do not fill the "
        f"{world_size} ranks of the topology. Give Topology a pod_size that divides "
        f"its {world_size // node} nodes, or leave pod_size out"
    )


def check_pods(topology: Topology, plan: ShardingPlan) -> None:
    """Check that TorchRec runs a plan's tables in the pods of its topology.

    Plans of sharding groups are not checked: `DMPCollection` is told the size.

    Raises:
        ConfigError: TorchRec would use groups of another size and leave shards out.
    """
    group, node = int(topology.intra_group_size), int(topology.local_world_size)
    if group <= node or sharding_group(topology) is not None:
        return
    tables = [
        f"{path}.{name}" if path else name
        for path, module in plan.plan.items()
        for name, sharding in module.items()
        if sharding.sharding_type in NODE_TYPES
    ]
    used = group_size_of_job(int(topology.world_size)) if tables else group
    if used != group:
        names = " ".join(f"{name}={group // node}" for name in POD_VARIABLES)
        raise ConfigError(
            f"table '{tables[0]}' is planned in pods of {group} ranks (pod_size="
            f"{group // node}), but this job runs table-row-wise shards in groups of "
            f"{used}, and TorchRec would leave shards out. Start the job with {names}, "
            "or leave pod_size out of the topology"
        )


def enough_ranks(fits: Callable[[Topology], bool], topology: Topology) -> int:
    """Return a number of ranks on which a model fits: double, then bisect.

    Args:
        fits: Whether the model has a plan on these devices.
        topology: The devices on which it has none.

    Returns:
        Ranks, in whole nodes if there are several nodes. 0: none found in time.
    """
    num_ranks, node = int(topology.world_size), int(topology.local_world_size)
    step = node if node < num_ranks else 1
    too_few, enough = num_ranks // step, 0
    most, end = _MOST_TIMES * too_few, time.monotonic() + _SECONDS
    while enough != too_few + 1 and time.monotonic() < end:
        count = (too_few + enough) // 2 if enough else 2 * too_few
        if count > most:
            break
        if fits(_more_ranks(topology, count * step)):
            enough = count
        else:
            too_few = count
    return enough * step


def _more_ranks(topology: Topology, count: int) -> Topology:
    """Return a copy with `count` ranks; new ranks are like the last one."""
    given, node = topology.devices, int(topology.local_world_size)
    more = [
        dataclasses.replace(copy.deepcopy(given[-1]), rank=r)
        for r in range(len(given), count)
    ]
    pod = topology.intra_group_size // node
    return with_ranks(
        topology,
        [*given, *more],
        ranks_per_node=node if node < len(given) else count,
        nodes_per_pod=pod if pod > 1 else None,
    )
