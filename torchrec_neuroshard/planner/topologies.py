"""The devices to plan for, where the caller leaves them to what this machine has."""

from __future__ import annotations

import dataclasses

import torch
from torchrec.distributed.planner.constants import HBM_CAP
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import Topology

__all__ = ["default_topology", "memory_notes", "whole_nodes"]

_GIB = 2**30
_SAME = 0.1
"""Relative difference of memory that is not worth a word."""


def default_topology() -> Topology:
    """Return TorchRec's topology of the process group, with the memory of this card.

    TorchRec takes every card to have 32 GiB.

    Raises:
        ValueError: There is no process group.
    """
    topology = EmbeddingShardingPlanner()._topology
    memory = _card_memory(topology)
    for device in topology.devices if memory is not None else ():
        device.storage = dataclasses.replace(device.storage, hbm=memory)
    return topology


def whole_nodes(world_size: int, local_world_size: int) -> int:
    """Return the ranks per node, at most as many as given, that fill whole nodes."""
    most = min(int(world_size), int(local_world_size))
    return max(n for n in range(1, most + 1) if world_size % n == 0)


def memory_notes(topology: Topology, is_default: bool) -> tuple[str, ...]:
    """Say where the memory of the devices is taken from, if that may surprise.

    Args:
        topology: The devices to plan for.
        is_default: Whether it is `default_topology`'s.
    """
    memory = _card_memory(topology)
    if memory is None:
        return ()
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    card = f"the {name} here has {memory / _GIB:.1f} GiB"
    if is_default:
        return (f"memory of a rank: {card}; for other cards pass a topology",)
    caps = {int(d.storage.hbm) for d in topology.devices}
    if caps == {HBM_CAP} and abs(memory - HBM_CAP) > _SAME * HBM_CAP:
        return (
            f"memory of a rank: {HBM_CAP / _GIB:.0f} GiB, as TorchRec takes any card "
            f"to have; {card}: pass Topology(hbm_cap={memory})",
        )
    return ()


def _card_memory(topology: Topology) -> int | None:
    """Bytes of the card that this process uses; None where it plans for no such."""
    if topology.compute_device != "cuda" or not torch.cuda.is_available():
        return None
    device = torch.cuda.current_device()
    return int(torch.cuda.get_device_properties(device).total_memory)
