"""Cost models of kernels: learned and physical."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import FeatureSchemaError
from torchrec_neuroshard.models.base import (
    CPU_IDS,
    CPU_IDS_REFERENCE_MS,
    CPU_JOIN,
    CostModel,
    RangeWarning,
)
from torchrec_neuroshard.models.card_physics import PhysicalConstants, host_memory_ms
from torchrec_neuroshard.models.estimate_error import EstimateError
from torchrec_neuroshard.models.network import NetworkArrays, SetCostNetwork
from torchrec_neuroshard.models.physical import (
    SET_VALUES,
    SET_WORKS,
    set_values,
    set_works,
)
from torchrec_neuroshard.models.sequences import (
    CPU_SEQUENCES,
    NUM_VALUES,
    OTHER_CPU_ERROR,
    SCALE_POWER,
    SequenceKernels,
)
from torchrec_neuroshard.tables.features import FEATURE_NAMES

_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}
_LONGEST = SET_WORKS.index("longest_bag")


def _check_columns(features_NF: npt.NDArray[np.float32]) -> None:
    if features_NF.ndim != 2 or features_NF.shape[1] != len(FEATURE_NAMES):
        raise FeatureSchemaError(
            f"expected {len(FEATURE_NAMES)} feature columns, got shape "
            f"{features_NF.shape}; compute them with ShardFeaturizer"
        )


class NeuralCostModel(CostModel):
    """The learned model of sets; see `network.SetCostNetwork`."""

    def __init__(
        self,
        network: SetCostNetwork,
        *,
        name: str,
        hardware: str,
        ranges: Mapping[str, tuple[float, float]],
        reference_ms: float = 0.0,
        column_order_ms: Mapping[str, tuple[float, float]] | None = None,
        sequences: SequenceKernels | None = None,
    ) -> None:
        """Wrap a trained network.

        Args:
            network: Network with trained weights.
            name: Name of the model.
            hardware: Device whose times are predicted.
            ranges: Feature name -> smallest and largest value in training.
            reference_ms: Nominal time of the reference set in the model's unit; 0 for
                devices without a reference.
            column_order_ms: See `RunHeader`; None if it was not measured.
            sequences: Unpooled kernels of a CPU. None takes those of another CPU, and
                on GPUs bags of one id.
        """
        self.name, self.hardware = name, hardware
        self.ranges = dict(ranges)
        rows = sorted((int(size), *ms) for size, ms in (column_order_ms or {}).items())
        self._order_P3 = np.array(rows, dtype=np.float64).reshape(-1, 3)
        self.reference_ms = reference_ms
        if reference_ms:
            slower = (reference_ms / CPU_IDS_REFERENCE_MS) ** SCALE_POWER
            self.ids, self.join = CPU_IDS.times(slower), CPU_JOIN
        self.network = network.eval()
        self._arrays = NetworkArrays(network)
        if sequences is None and reference_ms:  # a CPU
            sequences = CPU_SEQUENCES
        self.sequences, self._unit, self._sequence_error = sequences, 1.0, 0.0
        if sequences is not None:
            is_own = sequences.device == hardware
            self._sequence_error = sequences.error if is_own else OTHER_CPU_ERROR
            self.sequence_error = (
                f"rows that are not pooled: measured on {sequences.device}, scaled; "
                f"pooled kernels of another CPU are {OTHER_CPU_ERROR:.0%} off that way"
            )
            ratio = (reference_ms or 1.0) / (sequences.reference_ms or 1.0)
            self._unit = ratio if is_own else ratio**SCALE_POWER

    @property
    def encoding_dim(self) -> int:
        """Values per encoding: the network's, then those of unpooled kernels."""
        return self._num_pooled + (0 if self.sequences is None else NUM_VALUES)

    @property
    def _num_pooled(self) -> int:
        return self.network.encoding_dim

    def encode(self, features_NF: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Encode shards; see `CostModel.encode`."""
        _check_columns(features_NF)
        encoded_NE = np.zeros((len(features_NF), self.encoding_dim))
        encoded_NE[:, : self._num_pooled] = self._arrays.encode(features_NF)
        return encoded_NE

    def encode_sequences(
        self, features_NF: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float64]:
        """Encode shards whose rows are not pooled; see `CostModel`."""
        if self.sequences is None:
            return self.encode(features_NF)
        _check_columns(features_NF)
        encoded_NE = np.zeros((len(features_NF), self.encoding_dim))
        values_NV = self.sequences.encode(features_NF, self._unit)
        encoded_NE[:, self._num_pooled :] = values_NV
        return encoded_NE

    def _members(self, sums_SE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        pooled_SE = np.asarray(sums_SE)[:, : self._num_pooled]
        milliseconds = self._arrays.predict(pooled_SE).astype(np.float64)
        milliseconds[pooled_SE[:, 0] < 0.5] = 0.0
        return milliseconds

    def _sequences_ms(
        self, sums_SE: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return the part of unpooled kernels, `S x 2`."""
        if self.sequences is None:
            return np.zeros((len(sums_SE), 2))
        return self.sequences.predict(sums_SE[:, self._num_pooled :], self._unit)

    def predict_sums(self, sums_SE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the ensemble's mean; see `CostModel.predict_sums`."""
        mean: npt.NDArray[np.float64] = self._members(sums_SE).mean(axis=1)
        return mean if self.sequences is None else mean + self._sequences_ms(sums_SE)

    def relative_uncertainty(
        self, sums_SE: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return the spread of the members' totals, scaled to validation errors."""
        own_S = self._sequences_ms(sums_SE).sum(axis=1)
        totals = self._members(sums_SE).sum(axis=2) + own_S[:, None]
        mean = np.maximum(totals.mean(axis=1), 1e-9)
        factor, least = self.network.spread_2.tolist()
        both: npt.NDArray[np.float64] = np.hypot(
            factor * totals.std(axis=1) / mean, np.where(sums_SE[:, 0] < 0.5, 0, least)
        )
        if self.sequences is not None:
            both = np.hypot(both, self._sequence_error * own_S / mean)
        return both

    def column_order(
        self, bytes_N: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64] | None:
        """Interpolate between the measured sizes; see `CostModel.column_order`.

        Beyond the smallest and the largest size, times are proportional to the bytes.
        """
        if not len(self._order_P3):
            return None
        sizes, *ms_2P = self._order_P3.T
        beyond_N = bytes_N / np.clip(bytes_N, sizes[0], sizes[-1])
        inside = [np.interp(bytes_N, sizes, ms_P) for ms_P in ms_2P]
        predicted: npt.NDArray[np.float64] = np.stack(inside, axis=-1)
        return predicted * beyond_N[..., None]

    @property
    def stream_byte_ms(self) -> float | None:
        """Half the least time per byte of the reorderings, which read and write.

        Longer ones were small, or other work disturbed them.
        """
        if not len(self._order_P3):
            return None
        sizes, forward, backward = self._order_P3.T
        return float(((forward + backward) / 2 / sizes).min()) / 2

    def range_warnings(
        self, features_NF: npt.NDArray[np.float32]
    ) -> Sequence[RangeWarning]:
        """Return the features outside the training ranges."""
        found = []
        for name, (low, high) in self.ranges.items():
            column = features_NF[:, _INDEX[name]]
            slack = 1e-3 * max(abs(low), abs(high), 1e-6)
            outside = np.flatnonzero((column < low - slack) | (column > high + slack))
            found += [
                RangeWarning(int(i), name, float(column[i]), low, high) for i in outside
            ]
        return found


class PhysicalCostModel(CostModel):
    """The physics of a device, from its published figures; see `card_physics`."""

    source = "physical estimate, not measured"

    def __init__(
        self,
        constants: PhysicalConstants,
        *,
        name: str,
        hardware: str,
        error: EstimateError | None = None,
    ) -> None:
        """Set the device's constants.

        Args:
            constants: Figures of the device, and shared constants.
            name: Name of the model.
            hardware: Device whose times are predicted.
            error: Possible error of the estimate; None if unknown.
        """
        self.name, self.hardware = name, hardware
        self.constants = constants
        self.error = error
        self._physics = constants.physics()

    @property
    def encoding_dim(self) -> int:
        """Values per encoding: `SET_VALUES`, then forward and backward."""
        return len(SET_VALUES) + 2

    @property
    def additive(self) -> npt.NDArray[np.float64]:
        """Launch, and each shard's own work; see `CostModel.additive`."""
        values_V2 = np.zeros((len(SET_VALUES), 2))
        launch_2 = self._physics.set_constants_G2[0]
        return np.concatenate([launch_2[None], values_V2, np.eye(2)])

    def encode(self, features_NF: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Encode shards; see `encoding_dim` and `CostModel.encode`."""
        _check_columns(features_NF)
        values_NV = set_values(features_NF, self._physics.least_threads)
        return np.concatenate([values_NV, self._physics.shards_ms(features_NF)], axis=1)

    def predict_sums(self, sums_SE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Predict the time of shards' and sets' work; see `Physics`.

        In the forward, the ids of the longest bags overlap with all other work: the
        result is the root of the sum of both squares.
        """
        works_SG = set_works(sums_SE[:, :-2], self._physics.least_threads)
        constants_G2 = self._physics.set_constants_G2
        times_S2 = np.maximum(sums_SE[:, -2:], 0.0) + works_SG @ constants_G2
        launch_ms = constants_G2[0, 0]
        longest_S = works_SG[:, _LONGEST] * constants_G2[_LONGEST, 0]
        work_S = times_S2[:, 0] - launch_ms - longest_S
        times_S2[:, 0] = launch_ms + np.hypot(work_S, longest_S)
        return np.where(sums_SE[:, :1] > 0.5, times_S2, 0.0)

    def host_memory(
        self,
        features_NF: npt.NDArray[np.float32],
        gb_per_s_N: npt.NDArray[np.float64],
        missed_N: npt.NDArray[np.float64] | None,
    ) -> npt.NDArray[np.float64]:
        """Predict with the device's own bandwidth; see `CostModel.host_memory`."""
        own_N = np.full(len(gb_per_s_N), self.constants.host_gb_per_s)
        return host_memory_ms(features_NF, self.constants, own_N, missed_N)

    @property
    def stream_byte_ms(self) -> float:
        """See `CostModel.stream_byte_ms`."""
        return self.constants.byte_ms
