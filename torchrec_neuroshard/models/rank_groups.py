"""Collectives among all ranks, inside nodes and between nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.models.base import CommsModel

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingGroup:
    """The job around a sharding group, which the group's topology does not show."""

    num_ranks: int
    """Ranks of all groups together."""
    ranks_per_node: int
    """Ranks per node, of all groups together."""
    num_replicas: int
    """Number of sharding groups, which is also the ranks of a replica group."""
    replicas_per_node: int
    """Ranks of one replica group in the same node."""
    sync_interval: int
    """Iterations between two averages of the weights."""

    def __str__(self) -> str:
        """Return the group as part of a sentence."""
        return (
            f"one of {self.num_replicas} sharding groups of {self.num_ranks} ranks, "
            f"{self.ranks_per_node} per node, whose weights are averaged every "
            f"{self.sync_interval} iterations ({self.replicas_per_node} replicas per "
            "node)"
        )


class RankGroups(CommsModel):
    """Combines models for the groups of ranks that TorchRec forms.

    A group between nodes consists of the ranks with the same local rank.
    """

    def __init__(
        self,
        world: CommsModel,
        *,
        node: CommsModel,
        cross: CommsModel,
        node_size: int,
        job: CommsModel | None = None,
        job_size: int = 0,
    ) -> None:
        """Set the model of each kind of group.

        Args:
            world: Model for all ranks of the plan.
            node: Model for the ranks of a node.
            cross: Model for one rank of each node.
            node_size: Ranks that share a table-row-wise table.
            job: Model for all ranks of the job, if `world` is one of several groups
                with the same tables; the job sums data-parallel tables' gradients.
            job_size: Ranks of the job.
        """
        self.world, self.node, self.cross = world, node, cross
        self.node_size = node_size
        self.job, self.job_size = job, job_size
        self.source, self.error = world.source, world.error
        every = (world, node, cross, *([] if job is None else [job]))
        self.even_is_fastest = all(model.even_is_fastest for model in every)
        self.compute_slowdown = (job or world).compute_slowdown
        self.overlaps, self.has_copies = world.overlaps, world.has_copies

    def all_to_all(self, columns_CW: Floats, batch_size: int) -> Floats:
        """See `CommsModel.all_to_all`."""
        return self.world.all_to_all(columns_CW, batch_size)

    def index_all_to_all(self, bytes_CW: Floats) -> Floats:
        """See `CommsModel.index_all_to_all`."""
        return self.world.index_all_to_all(bytes_CW)

    def row_wise(self, columns_CW: Floats, batch_size: int) -> Floats:
        """See `CommsModel.row_wise`."""
        return self.world.row_wise(columns_CW, batch_size)

    def all_reduce(self, bytes_CW: Floats) -> Floats:
        """See `CommsModel.all_reduce`."""
        if self.job is None:
            return self.world.all_reduce(bytes_CW)
        bytes_C1 = bytes_CW.max(axis=1, keepdims=True)
        ms_CW = self.job.all_reduce(np.repeat(bytes_C1, self.job_size, axis=1))
        slowest: Floats = np.broadcast_to(ms_CW.max(1, keepdims=True), bytes_CW.shape)
        return slowest

    def node_row_wise(self, columns_CW: Floats, batch_size: int) -> Floats:
        """Predict reduce-scatters in nodes and all-to-alls between them, both ways."""
        count, world_size = columns_CW.shape
        size = self.node_size
        num_nodes = world_size // size
        out = self.inside_nodes(columns_CW, batch_size)
        if num_nodes > 1:
            columns = columns_CW.reshape(count, num_nodes, size)
            flat = columns.swapaxes(1, 2).reshape(-1, num_nodes)
            between = self.cross.all_to_all(flat, batch_size // size)
            between = between.reshape(count, size, num_nodes, 2).swapaxes(1, 2)
            out += between.reshape(count, world_size, 2)
        return out

    def inside_nodes(self, columns_CW: Floats, batch_size: int) -> Floats:
        """See `CommsModel.inside_nodes`."""
        if self.node_size == 1:
            return np.zeros((*columns_CW.shape, 2))
        flat = columns_CW.reshape(-1, self.node_size)
        ms = self.node.row_wise(flat, batch_size)
        return ms.reshape(*columns_CW.shape, 2).copy()
