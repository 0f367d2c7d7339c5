"""Cost models with simple formulas, whose results are easy to check by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import FeatureSchemaError
from torchrec_neuroshard.models.base import CommsModel, CostModel, IdKernels
from torchrec_neuroshard.tables.features import FEATURE_NAMES


class AnalyticCostModel(CostModel):
    """Cost model with a fixed cost per launch, per lookup and per byte read.

    forward = launch_ms + lookup_ns * lookups + byte_ns * bytes. Backward takes twice as
    long. Reordering columns and preparing ids takes no time.
    """

    name = "analytic"
    hardware = "none"
    source = "analytic"
    ids = IdKernels(0.0, 0.0, 0.0, 0.0)

    def __init__(
        self, launch_ms: float = 0.01, lookup_ns: float = 1.0, byte_ns: float = 0.1
    ) -> None:
        """Set the three constants."""
        self._weights = np.array([launch_ms, lookup_ns * 1e-6, byte_ns * 1e-6])

    @property
    def additive(self) -> npt.NDArray[np.float64] | None:
        """The whole formula; see `CostModel.additive`."""
        launch, lookup, byte = self._weights
        forward = np.array([launch, 0.0, lookup, byte])
        return np.stack([forward, 2 * forward], axis=1)

    @property
    def encoding_dim(self) -> int:
        """Number of encoding values: tables, lookups and bytes."""
        return 3

    def encode(self, features_NF: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Return the columns with tables, lookups and bytes."""
        if features_NF.shape[1] != len(FEATURE_NAMES):
            raise FeatureSchemaError(
                f"expected {len(FEATURE_NAMES)} feature columns, got "
                f"{features_NF.shape[1]}"
            )
        columns = [
            FEATURE_NAMES.index(n)
            for n in ("num_tables", "num_lookups", "lookup_bytes")
        ]
        return features_NF[:, columns].astype(np.float64)

    def predict_sums(self, sums_SE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the formula's times; each set pays for one launch."""
        held = sums_SE.copy()
        held[:, 0] = np.minimum(np.round(held[:, 0]), 1.0)
        forward = held @ self._weights
        return np.stack([forward, 2 * forward], axis=1)

    def column_order(
        self, bytes_N: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64] | None:
        """Return 0 for all sizes."""
        return np.zeros((*bytes_N.shape, 2))


class AnalyticCommsModel(CommsModel):
    """Model of collectives with one bandwidth for sent and received bytes."""

    source = "analytic"
    even_is_fastest = True

    def __init__(self, gb_per_s: float = 100.0) -> None:
        """Set the bandwidth."""
        self._bytes_per_ms = gb_per_s * 1e6

    def all_to_all(
        self, columns_CW: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        """Return the time of the bytes sent or received, whichever are more."""
        world_size = columns_CW.shape[1]
        remote = batch_size * 4 * (world_size - 1) / world_size
        sent = columns_CW * remote
        received = columns_CW.sum(axis=1, keepdims=True) * remote / world_size
        ms = np.maximum(sent, received) / self._bytes_per_ms
        return np.stack([ms, ms], axis=2)
