"""Models of collectives, from the topology's bandwidths or from measurements."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.models.base import COLLECTIVES, CommsModel
from torchrec_neuroshard.models.collective_terms import CollectiveCurve
from torchrec_neuroshard.models.published_links import check_links, check_nodes
from torchrec_neuroshard.tables.features import OUTPUT_BYTES_PER_VALUE

Floats = npt.NDArray[np.float64]


class BandwidthCommsModel(CommsModel):
    """Predicts bytes over the topology's bandwidths.

    A rank has finished when it has sent its columns of every sample to the sample's
    rank and received all columns of its own samples; both directions run at once. Bytes
    inside the node and bytes to other nodes take their times one after the other.
    """

    even_is_fastest = True
    has_copies = False

    def __init__(
        self,
        *,
        world_size: int,
        local_world_size: int,
        intra_gb_per_s: float,
        inter_gb_per_s: float,
        relative_ms: tuple[float, float, float] = (1.0, 1.0, 1.0),
        source: str = "datasheet, not measured",
    ) -> None:
        """Set ranks and bandwidths.

        Args:
            world_size: Number of ranks.
            local_world_size: Ranks per node.
            intra_gb_per_s: Bandwidth of a rank inside its node.
            inter_gb_per_s: Bandwidth of a rank to other nodes.
            relative_ms: Times of a reduce-scatter, an all-gather and an all-reduce,
                relative to all-to-alls of the same number of bytes.
            source: Origin of the numbers, for reports.

        Raises:
            ConfigError: A bandwidth is missing, or the ranks do not fill whole nodes.
        """
        check_nodes(world_size, local_world_size)
        check_links(intra_gb_per_s, inter_gb_per_s)
        self.source = source
        self._world_size = world_size
        self._relative_3 = np.array(relative_ms)
        # Shares of a rank's traffic inside the node and to other nodes.
        inside = (local_world_size - 1) / world_size
        outside = (world_size - local_world_size) / world_size
        self._ms_per_byte = inside / (intra_gb_per_s * 1e6) + outside / (
            inter_gb_per_s * 1e6
        )

    def all_to_all(self, columns_CW: Floats, batch_size: int) -> Floats:
        """Predict each rank's pooled-output all-to-all; see `CommsModel.all_to_all`."""
        sent = columns_CW * (batch_size * OUTPUT_BYTES_PER_VALUE)
        received = sent.sum(axis=1, keepdims=True) / self._world_size
        ms = np.maximum(sent, received) * self._ms_per_byte
        return np.stack([ms, ms], axis=2)

    def row_wise(self, columns_CW: Floats, batch_size: int) -> Floats:
        """See `CommsModel.row_wise`."""
        ms_CW2 = super().row_wise(columns_CW, batch_size)
        ms_CW2 *= self._relative_3[:2]
        return ms_CW2

    def all_reduce(self, bytes_CW: Floats) -> Floats:
        """See `CommsModel.all_reduce`."""
        ms_CW = super().all_reduce(bytes_CW)
        ms_CW *= self._relative_3[2]
        return ms_CW


def _at(ranks: int, measured: Mapping[int, tuple[float, ...]]) -> tuple[float, float]:
    """Interpolate between measured numbers of ranks; extrapolate linearly beyond."""
    known = sorted(measured)
    values = np.array([measured[n] for n in known])
    forward, backward = (np.interp(ranks, known, values[:, i]) for i in (0, 1))
    if ranks > known[-1] and len(known) > 1:
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        forward, backward = values[-1] + np.maximum(slope, 0) * (ranks - known[-1])
    return float(forward), float(backward)


class MeasuredCommsModel(CommsModel):
    """Measured collectives, for one group of ranks; see `collective_terms`."""

    source = "measured"

    def __init__(
        self,
        coefficients_LK: Floats,
        *,
        world_size: int,
        local_world_size: int,
        measured_gb_per_s: tuple[float, float],
        intra_gb_per_s: float | None = None,
        inter_gb_per_s: float | None = None,
        slowdowns: Mapping[int, tuple[float, ...]] | None = None,
        time_scale: float = 1.0,
    ) -> None:
        """Set coefficients, ranks and bandwidths.

        Args:
            coefficients_LK: Coefficients, a row per collective, a column per term.
            world_size: Ranks to predict for; need not have been measured.
            local_world_size: Ranks per node.
            measured_gb_per_s: Bandwidth inside a node and between nodes on the measured
                machine; the second is 0 if only one node was measured.
            intra_gb_per_s: Bandwidth inside a node to predict for; None keeps the
                measured bandwidth.
            inter_gb_per_s: The same between nodes.
            slowdowns: See `CommsHeader.compute_slowdown`; None for no slowdown.
            time_scale: Factor on all times that converts them to the compute model's
                unit.

        Raises:
            ConfigError: The ranks do not fill whole nodes, or a required bandwidth is
                unknown.
        """
        check_nodes(world_size, local_world_size)
        intra = measured_gb_per_s[0] if intra_gb_per_s is None else intra_gb_per_s
        inter = measured_gb_per_s[1] if inter_gb_per_s is None else inter_gb_per_s
        needs_inter = world_size > local_world_size
        if not intra > 0 or (needs_inter and not inter > 0):
            raise ConfigError(
                f"bandwidths must be above 0 GB/s, got {intra} inside a node and "
                f"{inter} between nodes; the collectives were measured on one node, or "
                "the topology has no bandwidths: pass intra_host_bw and inter_host_bw "
                "to the topology, or run 'neuroshard collect comms' on several nodes"
            )
        self._time_scale = time_scale
        self.compute_slowdown = _at(local_world_size, slowdowns or {1: (1.0, 1.0)})
        self._world_size, self._local_world_size = world_size, local_world_size
        self._collectives = {
            name: CollectiveCurve(
                name,
                coefficients_LK[number],
                world_size=world_size,
                local_world_size=local_world_size,
                intra_gb_per_s=intra,
                inter_gb_per_s=inter,
            )
            for number, name in enumerate(COLLECTIVES)
        }

    def predict(self, collective: str, bytes_per_peer_CW: Floats) -> Floats:
        """Predict each rank's time from the last rank's arrival until it finishes.

        Args:
            collective: One of `COLLECTIVES`.
            bytes_per_peer_CW: See `CommsRecord.bytes_per_peer`.

        Returns:
            `C x W` milliseconds; 0 if no rank sends anything.

        Raises:
            ConfigError: The number of ranks differs from the model's.
        """
        if bytes_per_peer_CW.shape[1] != self._world_size:
            raise ConfigError(
                f"the model is for {self._world_size} ranks, got values of "
                f"{bytes_per_peer_CW.shape[1]}"
            )
        if self._world_size == 1:
            return np.zeros(bytes_per_peer_CW.shape)
        bytes_CW = np.asarray(bytes_per_peer_CW, dtype=np.float64)
        ms = self._collectives[collective](bytes_CW)
        ms[bytes_CW.sum(axis=1) == 0] = 0.0
        return ms * self._time_scale

    def all_to_all(self, columns_CW: Floats, batch_size: int) -> Floats:
        """Predict each rank's pooled-output all-to-all; see `CommsModel.all_to_all`."""
        bytes_CW = columns_CW * (OUTPUT_BYTES_PER_VALUE * batch_size / self._world_size)
        both = [
            self.predict(name, bytes_CW)
            for name in ("pooled_forward", "pooled_backward")
        ]
        return np.stack(both, axis=2)

    def index_all_to_all(self, bytes_CW: Floats) -> Floats:
        """Predict the index all-to-all; see `CommsModel.index_all_to_all`."""
        return self.predict("index", bytes_CW / self._world_size)

    def row_wise(self, columns_CW: Floats, batch_size: int) -> Floats:
        """Predict reduce-scatter and all-gather; see `CommsModel.row_wise`."""
        bytes_CW = columns_CW * (OUTPUT_BYTES_PER_VALUE * batch_size / self._world_size)
        both = [
            self.predict(name, bytes_CW) for name in ("reduce_scatter", "all_gather")
        ]
        return np.stack(both, axis=2)

    def all_reduce(self, bytes_CW: Floats) -> Floats:
        """Predict the all-reduce; see `CommsModel.all_reduce`."""
        return self.predict("all_reduce", bytes_CW / self._world_size)
