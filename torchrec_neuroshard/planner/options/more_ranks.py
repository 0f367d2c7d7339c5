"""How many ranks of one kind are enough for a model that has no plan on fewer."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable

from torchrec.distributed.planner.types import Topology

from torchrec_neuroshard.planner.compat import with_ranks

__all__ = ["enough_ranks"]

MOST_TIMES = 64
"""Ranks that are tried, relative to those there are."""
SECONDS = 2.0
"""After so many no other number is tried."""


def enough_ranks(fits: Callable[[Topology], bool], topology: Topology) -> int:
    """Double the ranks until a model fits, then look for fewer.

    Args:
        fits: Whether the model has a plan on these devices.
        topology: The devices that it has none on.

    Returns:
        Ranks, in whole nodes where there are several; 0 where none are found in time.
    """
    num_ranks, node = int(topology.world_size), int(topology.local_world_size)
    step = node if node < num_ranks else 1
    too_few, enough = num_ranks // step, 0
    most, end = MOST_TIMES * too_few, time.monotonic() + SECONDS
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
    """Return a copy with so many ranks, each new one as the last one is."""
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
