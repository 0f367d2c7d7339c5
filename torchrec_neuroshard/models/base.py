"""The cost-model interface: what a fused kernel over a set of shards takes.

Shapes: `N` shards, `F` features, `E` encoding values, `S` sets, `C` candidates, `W`
ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.models.card_physics import PhysicalConstants, host_memory_ms
from torchrec_neuroshard.models.estimate_error import (
    EstimateError,
)
from torchrec_neuroshard.tables.features import OUTPUT_BYTES_PER_VALUE

__all__ = ["COLLECTIVES", "CommsModel", "CostModel", "RangeWarning"]


COLLECTIVES: tuple[str, ...] = (
    "pooled_forward",
    "pooled_backward",
    "index",
    "reduce_scatter",
    "all_gather",
    "all_reduce",
)
"""What TorchRec issues around its kernels: the all-to-all of pooled outputs and of
their gradients, that of the indices, both of row-wise, that of data-parallel."""


@dataclass(frozen=True, slots=True)
class RangeWarning:
    """A shard's feature lies outside what the model was trained on."""

    shard: int
    """Row of the feature matrix."""
    feature: str
    value: float
    low: float
    high: float


class CostModel(ABC):
    """Forward and backward time of one fused kernel that holds a set of shards.

    A set is known to the model only through the sum of its shards' encodings, so that
    order cannot matter and adding or removing a shard is one vector operation.
    """

    name: str = "unnamed"
    """What `NeuroShardPlanner(cost_model=...)` called it, or a path."""
    hardware: str = "unknown"
    """The device whose times are predicted."""
    source: str = "measured"
    """`measured`, or what else the numbers rest on (shown beside them)."""
    error: EstimateError | None = None
    """How far off an estimate may be; None for what was measured."""
    reference_ms: float = 0.0
    """Nominal time of the reference set (`measure.clock`) in the same units; 0 where
    the device is timed without one."""

    @property
    def additive(self) -> npt.NDArray[np.float64] | None:
        """What a set of shards takes at least, forward and backward: `(1 + E) x 2`.

        No set that is not empty takes less than the first row and its sum of encodings
        times the others, nor less than any of its shards takes alone; all are at least
        0. None where nothing of the kind is known.
        """
        return None

    @property
    @abstractmethod
    def encoding_dim(self) -> int:
        """Values per encoding, `E`."""

    @abstractmethod
    def encode(self, features_NF: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Encode shards.

        Args:
            features_NF: Columns in FEATURE_NAMES order, not normalised.

        Returns:
            `N x E`; the encoding of a set is the sum over its shards.

        Raises:
            FeatureSchemaError: F differs from the model's schema.
        """

    @abstractmethod
    def predict_sums(self, sums_SE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Predict sets from the sums of their encodings.

        Returns:
            `S x 2` milliseconds, forward and backward; exactly 0 for the empty set (an
            all-zero row), at least 0 otherwise.
        """

    def sum_sets(
        self,
        features_NF: npt.NDArray[np.float32],
        set_ids_N: npt.NDArray[np.int64],
        num_sets: int,
    ) -> npt.NDArray[np.float64]:
        """Return the sums of sets' encodings, `S x E`; arguments as `predict_sets`."""
        sums = np.zeros((num_sets, self.encoding_dim))
        np.add.at(sums, set_ids_N, self.encode(features_NF))
        return sums

    def predict_sets(
        self,
        features_NF: npt.NDArray[np.float32],
        set_ids_N: npt.NDArray[np.int64],
        num_sets: int,
    ) -> npt.NDArray[np.float64]:
        """Predict sets of shards.

        Args:
            features_NF: Features of all shards.
            set_ids_N: The set of each shard, values in `[0, num_sets)`.
            num_sets: Sets, empty ones included.

        Returns:
            `num_sets x 2` milliseconds.
        """
        return self.predict_sums(self.sum_sets(features_NF, set_ids_N, num_sets))

    def relative_uncertainty(
        self, sums_SE: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Relative standard deviation of each set's total; 0 where not known.

        By default, what the error of an estimate makes.
        """
        if self.error is None:
            return np.zeros(len(sums_SE))
        costs_S2 = self.predict_sums(sums_SE)
        total_S = np.maximum(costs_S2.sum(axis=1), 1e-9)
        shares: npt.NDArray[np.float64] = costs_S2 @ self.error.time_std / total_S
        return shares

    def host_memory(
        self,
        features_NF: npt.NDArray[np.float32],
        gb_per_s_N: npt.NDArray[np.float64],
        missed_N: npt.NDArray[np.float64] | None,
    ) -> npt.NDArray[np.float64]:
        """Predict what rows in the host's memory add to the fused kernel's time.

        No bundle has measured such kernels: by default the physical estimate of them.

        Args:
            features_NF: Features of the shards.
            gb_per_s_N: Bandwidth to the host's memory, one way.
            missed_N: Shares of the distinct rows that a cache on the device lacks;
                None: there is no cache.

        Returns:
            `N x 2` [ms], forward and backward.
        """
        return host_memory_ms(features_NF, PhysicalConstants(), gb_per_s_N, missed_N)

    @property
    def stream_byte_ms(self) -> float | None:
        """A byte in a pass that reads or writes memory in order [ms]; None: unknown."""
        return None

    def range_warnings(
        self, features_NF: npt.NDArray[np.float32]
    ) -> Sequence[RangeWarning]:
        """Features outside the training range; empty where there is none."""
        return ()


class CommsModel(ABC):
    """Time of the collectives around the fused kernels."""

    source: str = "datasheet, not measured"
    compute_slowdown: tuple[float, float] = (1.0, 1.0)
    """How many times as long forward and backward kernels take while all ranks of a
    node run theirs: ranks on CPUs share memory and cores, GPUs do not."""

    even_is_fastest: bool = False
    """Whether no loads take less than the same total in equal parts, nor any with a
    greater part on one rank less than with the rest in equal parts."""

    @abstractmethod
    def all_to_all(
        self, columns_CW: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        """Predict the pooled-output all-to-all of each rank.

        Args:
            columns_CW: Output columns that each rank holds (sum over its shards of
                width x features).
            batch_size: Samples over all ranks.

        Returns:
            `C x W x 2` milliseconds, forward and backward.
        """

    def column_order(
        self, columns_C: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        """Predict how long a rank puts the parts of split tables in order.

        Once any table of a module is split, TorchRec brings the columns of all its
        outputs, as they come from the ranks, into the order of the tables.

        Args:
            columns_C: Output columns of all tables of the module.
            batch_size: Samples over all ranks.

        Returns:
            `C x 2` milliseconds, forward and backward; by default nothing.
        """
        del batch_size
        return np.zeros((len(columns_C), 2))

    # The other collectives move bytes in the patterns of the pooled all-to-all; a model
    # that knows them better overrides these.

    def index_all_to_all(
        self, bytes_CW: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Predict the all-to-all of the KeyedJaggedTensor's lengths and ids.

        Args:
            bytes_CW: What each rank is sent by all ranks together, itself included.

        Returns:
            `C x W` milliseconds.
        """
        columns_CW = bytes_CW / OUTPUT_BYTES_PER_VALUE
        return self.all_to_all(columns_CW, 1)[..., 1]

    def row_wise(
        self, columns_CW: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        """Predict the reduce-scatter and the all-gather of row-wise tables.

        Args:
            columns_CW: Output columns of the row-wise tables, the same on every rank.
            batch_size: Samples over all ranks.

        Returns:
            `C x W x 2` milliseconds: forward reduce-scatter, backward all-gather.
        """
        return self.all_to_all(columns_CW, batch_size)

    def node_row_wise(
        self, columns_CW: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        """Predict what moves for tables whose rows are spread over one node's ranks.

        Args:
            columns_CW: Output columns of these tables, equal in a node.
            batch_size: Samples over all ranks.

        Returns:
            `C x W x 2` milliseconds: forward reduce-scatter inside nodes and all-to-all
            between them, and the reverse; by default, all ranks are one node.
        """
        return self.row_wise(columns_CW, batch_size)

    def all_reduce(self, bytes_CW: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Predict the all-reduce of data-parallel tables' gradients.

        Args:
            bytes_CW: Gradient bytes, the same on every rank.

        Returns:
            `C x W` milliseconds.
        """
        halves = self.all_to_all(bytes_CW / OUTPUT_BYTES_PER_VALUE, 1)
        both: npt.NDArray[np.float64] = halves.sum(axis=2)
        return both
