"""What a schedule leaves of another model's times, so that they add up to a path.

Searches make the sum of an iteration's phases short, each on its slowest rank. Under a
schedule some of them take nothing at first, and some add up on each rank: where the
models say so, a search needs to know nothing of schedules.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.cost_models.scaled import ScaledCommsModel, ScaledCostModel

__all__ = ["JoinedCostModel", "RelievedCommsModel"]

Floats = npt.NDArray[np.float64]


class JoinedCostModel(ScaledCostModel):
    """Another model's kernels, the backward pass and the next forward as one phase."""

    def __init__(self, alone: CostModel) -> None:
        """Take a model."""
        super().__init__(alone, (1.0, 1.0))

    def predict_sums(self, sums_SE: Floats) -> Floats:
        """See `CostModel.predict_sums`; all of it counts as forward."""
        return _joined(self.alone.predict_sums(sums_SE))

    def host_memory(
        self,
        features_NF: npt.NDArray[np.float32],
        gb_per_s_N: Floats,
        missed_N: Floats | None,
    ) -> Floats:
        """See `CostModel.host_memory`."""
        return _joined(self.alone.host_memory(features_NF, gb_per_s_N, missed_N))


class RelievedCommsModel(ScaledCommsModel):
    """Another model's collectives, less what runs beside something longer."""

    def __init__(self, base: CommsModel, reliefs_ms: Mapping[str, float]) -> None:
        """Take a model.

        Args:
            base: The model.
            reliefs_ms: Index, forward and backward collective, by the names of
                `simulator.PHASES` -> what does not count of it.
        """
        super().__init__(base, index=1.0, forward=1.0, backward=1.0)
        self._relief_ms = reliefs_ms["index_comms"]
        self._relief_2 = np.array([reliefs_ms["fwd_comms"], reliefs_ms["bwd_comms"]])

    def _scaled(self, ms_X2: Floats) -> Floats:
        left: Floats = np.maximum(ms_X2 - self._relief_2, 0.0)
        return left

    def column_order(self, columns_C: Floats, batch_size: int) -> Floats:
        """See `CommsModel.column_order`: kernels, beside nothing."""
        return self.base.column_order(columns_C, batch_size)

    def index_all_to_all(self, bytes_CW: Floats) -> Floats:
        """See `CommsModel.index_all_to_all`."""
        whole = self.base.index_all_to_all(bytes_CW)
        left: Floats = np.maximum(whole - self._relief_ms, 0.0)
        return left

    def all_reduce(self, bytes_CW: Floats) -> Floats:
        """See `CommsModel.all_reduce`."""
        whole = self.base.all_reduce(bytes_CW)
        left: Floats = np.maximum(whole - self._relief_2[1], 0.0)
        return left


def _joined(ms_N2: Floats) -> Floats:
    total: Floats = np.zeros_like(ms_N2)
    total[:, 0] = ms_N2.sum(axis=1)
    return total
