"""The clusters on which plans are compared, with published times of collectives.

Times of collectives do not come from any planner's model, but from published tables of
8 and of 2 x 8 B200. If only the rate of large messages is published for a card, the
sizes in the tables are scaled. Large messages then move at the card's published rate,
and small ones have the latency of the table.

- The tables have even all-to-alls. An uneven one takes as long as an even one with the
  bytes of its busiest rank.
- In nodes without 8 ranks, the bytes that leave a rank are looked up.
- Between nodes, only the all-to-all is published, with a 400G network card per GPU. The
  rings of reduce-scatter and all-gather use all cards of a node. They take as long as
  inside a node, plus the additional latency of the all-to-all.
- An all-reduce is a reduce-scatter followed by an all-gather.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner_comparison.plans import Collective
from published.links import read_links
from torchrec_neuroshard.hardware.cards import GPU_CARDS

_TABLE = "nccl-tests B200 HGX"
_TABLE_RANKS = 8
_H100 = GPU_CARDS["h100"]
_KINDS = {
    "index": "alltoall",
    "pooled_forward": "alltoall",
    "pooled_backward": "alltoall",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster with published bandwidths of its links."""

    name: str
    about: str
    intra_gb_per_s: float
    """Published bandwidth per rank of large collectives in a node, one way."""
    inter_gb_per_s: float = _H100.inter_gb_per_s.value
    """The same between nodes, over a 400G network card per rank of 2 x 8 B200."""
    worlds: tuple[int, ...] = (4, 8)
    """Numbers of ranks of tasks that are compared on this cluster."""
    ranks_per_node: int = 8

    def local_world_size(self, world_size: int) -> int:
        """Return the ranks per node."""
        return min(world_size, self.ranks_per_node)

    def collective_ms(self, collective: Collective) -> float:
        """Return the published time of a collective [ms]."""
        if collective.kind == "all_reduce":
            return sum(
                self._ms(kind, collective.bytes_per_peer)
                for kind in ("reduce_scatter", "all_gather")
            )
        return self._ms(_KINDS[collective.kind], collective.bytes_per_peer)

    def _ms(self, kind: str, bytes_per_peer: tuple[int, ...]) -> float:
        ranks = len(bytes_per_peer)
        whole = float(max(ranks * max(bytes_per_peer), sum(bytes_per_peer)))
        if ranks <= self.ranks_per_node:
            return self._in_node(kind, whole * (ranks - 1) / ranks)
        between = _table("alltoall", 2)
        if kind == "alltoall":
            return _look_up(between, whole)
        later = between[0, 1] - _table("alltoall", 1)[0, 1]
        return self._in_node(kind, whole * (ranks - 1) / ranks) + float(later)

    def _in_node(self, kind: str, leaves: float) -> float:
        table = _table(kind, 1)
        leaving = (_TABLE_RANKS - 1) / _TABLE_RANKS
        largest_bytes, largest_ms = table[-1]
        rate = largest_bytes * leaving / largest_ms * 1e-6  # GB/s
        return _look_up(table, leaves / leaving * rate / self.intra_gb_per_s)


@functools.cache
def _table(kind: str, nodes: int) -> Floats:
    """Return bytes of a rank's buffer and times [ms], sorted by size."""
    rows = sorted(
        (r.num_bytes, r.time_ms)
        for r in read_links()
        if (r.source, r.collective, r.nodes) == (_TABLE, kind, nodes)
    )
    return np.array(rows)


def _look_up(table: Floats, num_bytes: float) -> float:
    """Return the time of a size: log interpolation, proportional beyond the table."""
    sizes, ms = table.T
    if num_bytes >= sizes[-1]:
        return float(ms[-1] * num_bytes / sizes[-1])
    place = np.log(max(num_bytes, sizes[0]))
    return float(np.exp(np.interp(place, np.log(sizes), np.log(ms))))


CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster(
            name="8 x H100",
            about="one node with NVSwitch: times of 8 B200, sizes scaled to H100's "
            f"{_H100.intra_gb_per_s.value:g} GB/s (NVIDIA/nccl-tests issue 212)",
            intra_gb_per_s=_H100.intra_gb_per_s.value,
        ),
        Cluster(
            name="2 x 8 H100",
            about="two such nodes, 400G a GPU: times of 2 x 8 B200 with the same cards",
            intra_gb_per_s=_H100.intra_gb_per_s.value,
            worlds=(16,),
        ),
    )
}


def cluster_of(world_size: int) -> Cluster:
    """Return the cluster on which tasks with this number of ranks are compared."""
    return next(c for c in CLUSTERS.values() if world_size in c.worlds)
