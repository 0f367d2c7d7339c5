"""The interfaces of cost models: fused kernels with sets of shards, and collectives.

Shapes: `N` shards, `F` features, `E` encoding values, `S` sets, `C` candidates, `W`
ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.models.card_physics import PhysicalConstants, host_memory_ms
from torchrec_neuroshard.models.estimate_error import EstimateError
from torchrec_neuroshard.tables.features import OUTPUT_BYTES_PER_VALUE

COLLECTIVES: tuple[str, ...] = (
    "pooled_forward",
    "pooled_backward",
    "index",
    "reduce_scatter",
    "all_gather",
    "all_reduce",
)
"""TorchRec's collectives: the all-to-all of pooled outputs, of their gradients and of
the indices, the two of row-wise sharding, and the one of data-parallel sharding."""


@dataclass(frozen=True, slots=True)
class RangeWarning:
    """A shard's feature outside the model's training range."""

    shard: int
    """Row of the feature matrix."""
    feature: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class IdKernels:
    """Times of the kernels that prepare ids for an exchange or a lookup."""

    pooled_ns: float
    """Finding the rank that holds one id of a row-wise table, and sorting the ids of a
    bag by rank."""
    sequence_ns: float
    """The same if ids of one rank stay in their order, for tables of sequences."""
    rank_bag_ns: float
    """Counting the ids of one bag for one rank, of the tables that are split by rows.
    """
    permute_bag_ns: float
    """Moving one bag of received ids to its table's place; moving its ids takes two
    sequential passes, if that is longer."""

    def times(self, factor: float) -> IdKernels:
        """Return the times of a device that takes so many times as long."""
        return IdKernels(*(factor * ns for ns in astuple(self)))


GPU_IDS = IdKernels(0.103, 0.79, 0.0, 0.39)
"""Published timings. FBGEMM's pull request 2346 has `block_bucketize_sparse_features`
of 49 million ids on an unnamed GPU of 2024: 5.08 ms for bags, 38.9 with the kernel that
sequences still use. In a profile of an A100, `permute_2D_sparse_data` of 1.0 million
bags with 15.8 million ids takes 388 us."""
CPU_IDS = IdKernels(8.0, 8.4, 3.3, 4.6)
"""Of one core of an Intel Xeon (6/106), whose reference takes `CPU_IDS_REFERENCE_MS`.
70 cases were measured (`benchmarks/data/ids_xeon.parquet`); the fit is 13 % off (mean).
"""
CPU_IDS_REFERENCE_MS = 3.757
CPU_JOIN = (1.3, 0.0)
"""`CostModel.join` of CPUs. On the same core, a copy of 16 MiB takes 0.65 times as long
as reordering as many bytes in parts of 128 columns; `stream_byte_ms` is of reorderings.
"""


class CostModel(ABC):
    """Forward and backward time of one fused kernel with a set of shards.

    The model sees a set only as the sum of its shards' encodings. Therefore order does
    not matter, and adding or removing a shard is one vector operation.
    """

    name: str = "unnamed"
    """Name in `NeuroShardPlanner(cost_model=...)`, or a path."""
    hardware: str = "unknown"
    """Device whose times are predicted."""
    source: str = "measured"
    """Origin of the numbers, for reports, e.g. `measured`."""
    error: EstimateError | None = None
    """Possible error of an estimate; None for measured models."""
    measured_error: float | None = None
    """Mean relative error of a measured model in its validation; None if unknown."""
    reference_ms: float = 0.0
    """Nominal time of the reference set (`measure.clock`) in the model's unit; 0 for
    devices without a reference."""
    measures_sequences: bool = False
    """Whether rows that are not pooled were measured on this device."""
    sequence_error: str = (
        "rows that are not pooled count as bags of one id: in published timings of an "
        "H100 and an H200 (one benchmark, 128 columns) 1.7 to 2.2 times too long "
        "forward, 1.0 to 1.3 times backward"
    )
    """Origin and error of lookups of sequences, if they were not measured."""
    ids: IdKernels = GPU_IDS
    """Kernels that prepare ids. No bundle has measured them."""
    join: tuple[float, float] = (2.0, 1.0)
    """Sequential passes and launches that it takes to join the outputs of several
    stages. No bundle has measured it."""

    @property
    def errors(self) -> tuple[float, float] | None:
        """Relative errors of forward and backward kernels; None if unknown."""
        if self.error is not None:
            return self.error.of_card
        if self.measured_error is None:
            return None
        return self.measured_error, self.measured_error

    @property
    def additive(self) -> npt.NDArray[np.float64] | None:
        """Lower bound on a set's time, forward and backward: `(1 + E) x 2`, or None.

        The first row is a constant, the others are coefficients of at least 0. A
        non-empty set takes at least the constant plus its sum of encodings times the
        coefficients, and at least as long as each of its shards alone. None if no such
        bound is known.
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

    def encode_sequences(
        self, features_NF: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float64]:
        """Encode shards whose rows are not pooled, as in an `EmbeddingCollection`.

        The default takes each row as a bag of one id. See `encode`.
        """
        return self.encode(features_NF)

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
        """Return the sums of sets' encodings, `S x E`; see `predict_sets`."""
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
            num_sets: Number of sets, including empty ones.

        Returns:
            `num_sets x 2` milliseconds.
        """
        return self.predict_sums(self.sum_sets(features_NF, set_ids_N, num_sets))

    def relative_uncertainty(
        self, sums_SE: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return the relative standard deviation of each set's total; 0 if unknown.

        The default follows from the estimate's error.
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
        """Predict the time that rows in the host's memory add to the fused kernel.

        The default is a physical estimate, since no bundle has measured such kernels.

        Args:
            features_NF: Features of the shards.
            gb_per_s_N: One-way bandwidth to the host's memory.
            missed_N: Shares of the distinct rows that are not in a cache on the device;
                None if there is no cache.

        Returns:
            `N x 2` [ms], forward and backward.
        """
        return host_memory_ms(features_NF, PhysicalConstants(), gb_per_s_N, missed_N)

    @property
    def stream_byte_ms(self) -> float | None:
        """Time per byte of sequential memory access [ms]; None if unknown."""
        return None

    def column_order(
        self, bytes_N: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64] | None:
        """Predict how long the device takes to reorder the parts of split tables.

        If any table of a module is split, TorchRec reorders the columns of all outputs
        of the module, from the order of the ranks to the order of the tables.

        Args:
            bytes_N: Outputs of a rank's own samples.

        Returns:
            `N x 2` [ms], forward and backward; None if it was not measured. Then
            `ShardEncoder.column_order` estimates it.
        """
        del bytes_N
        return None

    def range_warnings(
        self, features_NF: npt.NDArray[np.float32]
    ) -> Sequence[RangeWarning]:
        """Return the features outside the training range; none without a range."""
        return ()


class CommsModel(ABC):
    """Time of the collectives around the fused kernels."""

    source: str = "datasheet, not measured"
    error: float | None = None
    """Median relative error of a collective; None if unknown."""
    compute_slowdown: tuple[float, float] = (1.0, 1.0)
    """Factors on forward and backward kernels while all ranks of a node run theirs:
    ranks on CPUs share memory and cores, GPUs do not."""

    overlaps: bool = True
    """Whether kernels run beside collectives. On CPUs both need the same cores."""
    has_copies: bool = True
    """Whether the times include the copies of ids and outputs around a collective, as
    those of measured ranks do. If not, the simulator adds them."""
    even_is_fastest: bool = False
    """Whether equal parts are fastest. No distribution of a total takes less time than
    equal parts. If one rank has a given larger part, no distribution of the rest takes
    less time than equal parts."""

    @abstractmethod
    def all_to_all(
        self, columns_CW: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        """Predict the pooled-output all-to-all of each rank.

        Args:
            columns_CW: Output columns of each rank: width x features, summed over its
                shards.
            batch_size: Samples over all ranks.

        Returns:
            `C x W x 2` milliseconds, forward and backward.
        """

    # By default, the other collectives take as long as pooled all-to-alls of the same
    # bytes. Models that predict them better override these methods.

    def index_all_to_all(
        self, bytes_CW: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Predict the all-to-all of the KeyedJaggedTensor's lengths and ids.

        Args:
            bytes_CW: Bytes that each rank receives from all ranks, including itself.

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
        """Predict the collectives of tables whose rows are split over a node's ranks.

        Args:
            columns_CW: Output columns of these tables, equal in a node.
            batch_size: Samples over all ranks.

        Returns:
            `C x W x 2` milliseconds: in the forward a reduce-scatter inside nodes and
            an all-to-all between nodes, in the backward the reverse. The default treats
            all ranks as one node.
        """
        return self.row_wise(columns_CW, batch_size)

    def inside_nodes(
        self, columns_CW: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        """Predict the part of `node_row_wise` that is inside nodes, `C x W x 2` [ms].

        Ranks wait for it between kernels. By default all of it is.
        """
        return self.node_row_wise(columns_CW, batch_size)

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
