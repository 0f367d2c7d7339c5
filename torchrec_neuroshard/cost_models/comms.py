"""Communication cost models."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.cost_models.base import CommsModel
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.features import OUTPUT_BYTES_PER_VALUE

__all__ = ["BandwidthCommsModel"]


class BandwidthCommsModel(CommsModel):
    """Bytes over the topology's bandwidths, plus one latency per collective.

    A rank is done when it has sent its own columns of every sample to the sample's
    rank and received all columns of its own samples; both directions run at once.
    Bytes that leave the node go over the slower of the two links.
    """

    def __init__(
        self,
        *,
        world_size: int,
        local_world_size: int,
        intra_gb_per_s: float,
        inter_gb_per_s: float,
        latency_us: float = 0.0,
        source: str = "datasheet, not measured",
    ) -> None:
        """Take the topology.

        Args:
            world_size: Ranks.
            local_world_size: Ranks per node.
            intra_gb_per_s: Bandwidth of a rank inside its node.
            inter_gb_per_s: Bandwidth of a rank to other nodes.
            latency_us: Fixed cost of one collective.
            source: Shown beside the numbers.

        Raises:
            ConfigError: A bandwidth is missing, or the ranks do not fill whole nodes.
        """
        if world_size < 1 or local_world_size < 1 or world_size % local_world_size:
            raise ConfigError(
                f"world_size ({world_size}) must be a multiple of local_world_size "
                f"({local_world_size})"
            )
        if not (intra_gb_per_s > 0 and inter_gb_per_s > 0):
            raise ConfigError(
                "bandwidths must be above 0 GB/s, got "
                f"{intra_gb_per_s} inside a node and {inter_gb_per_s} between nodes; "
                "give the topology intra_host_bw and inter_host_bw"
            )
        self.source = source
        self._world_size = world_size
        self._latency_ms = latency_us * 1e-3 if world_size > 1 else 0.0
        # Share of a rank's traffic that stays in the node, and that leaves it.
        inside = (local_world_size - 1) / world_size
        outside = (world_size - local_world_size) / world_size
        self._ms_per_byte = inside / (intra_gb_per_s * 1e6) + outside / (
            inter_gb_per_s * 1e6
        )

    def all_to_all(
        self, columns_CW: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        """Predict each rank's pooled-output all-to-all; see `CommsModel.all_to_all`."""
        sent = columns_CW * (batch_size * OUTPUT_BYTES_PER_VALUE)
        received = sent.sum(axis=1, keepdims=True) / self._world_size
        ms = np.maximum(sent, received) * self._ms_per_byte + self._latency_ms
        return np.stack([ms, ms], axis=2)
