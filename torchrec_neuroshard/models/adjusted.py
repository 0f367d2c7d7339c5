"""Models that adjust another model's times, by factors or to a schedule.

A search minimises the sum of an iteration's phases, each on its slowest rank. Under a
schedule, some phases are hidden by others, and some add up on each rank. The adjusted
models express this, so that searches need not know about schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.models.base import CommsModel, CostModel, RangeWarning

Floats = npt.NDArray[np.float64]


class AdjustedCostModel(CostModel):
    """Another model's kernels, with forward and backward times mixed by a matrix."""

    def __init__(
        self, alone: CostModel, kernels_22: Floats, host_22: Floats | None = None
    ) -> None:
        """Wrap a model.

        Args:
            alone: The model to adjust.
            kernels_22: Matrix that multiplies forward and backward times.
            host_22: The same for rows in the host's memory; None changes nothing.
        """
        self.alone = alone
        self.name, self.hardware = alone.name, alone.hardware
        self.source, self.error = alone.source, alone.error
        self.measured_error = alone.measured_error
        self.reference_ms = alone.reference_ms
        self.ids, self.join = alone.ids, alone.join
        self.measures_sequences = alone.measures_sequences
        self.sequence_error = alone.sequence_error
        self._kernels_22 = kernels_22
        self._host_22 = np.eye(2) if host_22 is None else host_22

    @property
    def encoding_dim(self) -> int:
        """See `CostModel`."""
        return self.alone.encoding_dim

    @property
    def additive(self) -> Floats | None:
        """See `CostModel.additive`."""
        alone = self.alone.additive
        return None if alone is None else alone @ self._kernels_22

    def encode(self, features_NF: npt.NDArray[np.float32]) -> Floats:
        """See `CostModel.encode`."""
        return self.alone.encode(features_NF)

    def encode_sequences(self, features_NF: npt.NDArray[np.float32]) -> Floats:
        """See `CostModel.encode_sequences`."""
        return self.alone.encode_sequences(features_NF)

    def predict_sums(self, sums_SE: Floats) -> Floats:
        """See `CostModel.predict_sums`."""
        adjusted: Floats = self.alone.predict_sums(sums_SE) @ self._kernels_22
        return adjusted

    def host_memory(
        self,
        features_NF: npt.NDArray[np.float32],
        gb_per_s_N: Floats,
        missed_N: Floats | None,
    ) -> Floats:
        """See `CostModel.host_memory`."""
        alone = self.alone.host_memory(features_NF, gb_per_s_N, missed_N)
        adjusted: Floats = alone @ self._host_22
        return adjusted

    @property
    def stream_byte_ms(self) -> float | None:
        """See `CostModel.stream_byte_ms`."""
        return self.alone.stream_byte_ms

    def column_order(self, bytes_N: Floats) -> Floats | None:
        """See `CostModel.column_order`."""
        return self.alone.column_order(bytes_N)

    def relative_uncertainty(self, sums_SE: Floats) -> Floats:
        """See `CostModel.relative_uncertainty`."""
        return self.alone.relative_uncertainty(sums_SE)

    def range_warnings(
        self, features_NF: npt.NDArray[np.float32]
    ) -> Sequence[RangeWarning]:
        """See `CostModel.range_warnings`."""
        return self.alone.range_warnings(features_NF)


class ConcurrentCostModel(AdjustedCostModel):
    """Another model's kernels, while all ranks of a node run theirs at once."""

    @classmethod
    def of(cls, alone: CostModel, comms_model: CommsModel) -> CostModel:
        """Return the model with the slowdown among the ranks of `comms_model`."""
        if comms_model.compute_slowdown == (1.0, 1.0) or isinstance(alone, cls):
            return alone
        return cls(alone, np.diag(comms_model.compute_slowdown))

    def column_order(self, bytes_N: Floats) -> Floats | None:
        """See `CostModel.column_order`; all ranks reorder at once."""
        alone = self.alone.column_order(bytes_N)
        return None if alone is None else alone @ self._kernels_22


def as_one_phase(alone: CostModel) -> CostModel:
    """Return a model that counts the backward and the next forward as one phase.

    The phase is the forward's; the backward takes 0.
    """
    both_22 = np.array([[1.0, 0.0], [1.0, 0.0]])
    return AdjustedCostModel(alone, both_22, both_22)


class RelievedCommsModel(CommsModel):
    """Another model's collectives, without the time that overlaps with longer work.

    The other model's `compute_slowdown` is not passed on, since the kernels' times
    already include it.
    """

    def __init__(self, base: CommsModel, reliefs_ms: Mapping[str, float]) -> None:
        """Wrap a model.

        Args:
            base: The model to adjust.
            reliefs_ms: Name of a collective phase in `simulator.PHASES` -> milliseconds
                to subtract; 0 for missing names.
        """
        self.base = base
        self.even_is_fastest = base.even_is_fastest
        self.source, self.error = base.source, base.error
        self.overlaps, self.has_copies = base.overlaps, base.has_copies
        names = ("index_comms", "fwd_comms", "bwd_comms")
        reliefs = [reliefs_ms.get(name, 0.0) for name in names]
        self._relief_ms, self._relief_2 = reliefs[0], np.array(reliefs[1:])

    def _left(self, ms_X2: Floats) -> Floats:
        left: Floats = np.maximum(ms_X2 - self._relief_2, 0.0)
        return left

    def all_to_all(self, columns_CW: Floats, batch_size: int) -> Floats:
        """See `CommsModel.all_to_all`."""
        return self._left(self.base.all_to_all(columns_CW, batch_size))

    def index_all_to_all(self, bytes_CW: Floats) -> Floats:
        """See `CommsModel.index_all_to_all`."""
        whole = self.base.index_all_to_all(bytes_CW)
        left: Floats = np.maximum(whole - self._relief_ms, 0.0)
        return left

    def row_wise(self, columns_CW: Floats, batch_size: int) -> Floats:
        """See `CommsModel.row_wise`."""
        return self._left(self.base.row_wise(columns_CW, batch_size))

    def node_row_wise(self, columns_CW: Floats, batch_size: int) -> Floats:
        """See `CommsModel.node_row_wise`."""
        return self._left(self.base.node_row_wise(columns_CW, batch_size))

    def inside_nodes(self, columns_CW: Floats, batch_size: int) -> Floats:
        """See `CommsModel.inside_nodes`; collectives between nodes are hidden first."""
        inside = self.base.inside_nodes(columns_CW, batch_size)
        return np.minimum(inside, self.node_row_wise(columns_CW, batch_size))

    def all_reduce(self, bytes_CW: Floats) -> Floats:
        """See `CommsModel.all_reduce`; it runs in the backward."""
        whole = self.base.all_reduce(bytes_CW)
        left: Floats = np.maximum(whole - self._relief_2[1], 0.0)
        return left
