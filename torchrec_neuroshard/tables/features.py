"""Features of shards, the cost models' inputs: named, versioned columns.

Shapes: `T` tables, `N` shards, `F` features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import FeatureSchemaError
from torchrec_neuroshard.tables.access import NUM_COUNT_BINS
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table import DATA_TYPE_BYTES, TableConfig

FEATURE_VERSION = 2
"""Incremented whenever a column changes its meaning."""

NUM_TOTALS = 16
"""The first columns are physical quantities of a shard; a set has their sums."""

OUTPUT_BYTES_PER_VALUE = 4
"""Pooled outputs leave the kernel as fp32."""
_LINE_BYTES, _DIGIT_BITS = 64, 8
"""Cache line of a CPU [bytes], and digits of the ids' radix sort [bits]."""


def _columns(
    table: TableConfig, profile: FeatureProfile, batch_size: int
) -> dict[str, float]:
    """Return the features of a table by name, in order, independent of its width.

    `*_bytes` and `*_values` count a shard of one column. `*_lines` count a shard whose
    rows fill one cache line.

    `weighted_bytes` are read again for the gradient of the lookups' weights. `*_lines`
    are the cache lines that the rows occupy. `sorted_digits` are ids times the passes
    of the radix sort at the start of the backward. `unfused_values` are gradients that
    FBGEMM's CPU backward adds one by one: for every optimizer except row-wise Adagrad,
    for fp16 weights, and for tables with several features. `half_*` are converted to
    fp32 and back.
    Source: FBGEMM 1.8, embedding_backward_split_cpu_template.cpp, csr2csc and
    radix_sort_parallel.
    """
    lookups, distinct = profile.num_lookups, profile.num_distinct
    # A row that is not pooled is a bag of one id.
    bags = batch_size * table.num_outputs if table.pooled else lookups
    per_bag = lookups / bags if table.pooled else 1.0
    length_std = profile.pooling_std if table.pooled else 0.0
    weighted_lookups = lookups if table.weighted else 0.0
    value_bytes = DATA_TYPE_BYTES[table.data_type]
    is_half, is_shared = value_bytes == 2, table.num_features > 1
    is_rowwise_adagrad = table.optimizer == "rowwise_adagrad"
    is_fused = is_rowwise_adagrad and not is_half and not is_shared
    return {
        "num_tables": 1.0,
        "num_lookups": lookups,
        "num_distinct": distinct,
        "lookup_bytes": lookups * value_bytes,
        "distinct_bytes": distinct * value_bytes,
        "output_bytes": bags * OUTPUT_BYTES_PER_VALUE,
        "num_bags": bags,
        "weighted_lookups": weighted_lookups,
        "weighted_bytes": weighted_lookups * value_bytes,
        "lookup_lines": lookups,
        "distinct_lines": distinct,
        "sorted_digits": lookups * -(-table.num_embeddings.bit_length() // _DIGIT_BITS),
        "unfused_values": 0.0 if is_fused else lookups,
        "half_distinct_values": distinct if is_half else 0.0,
        "half_weighted_values": weighted_lookups if is_half else 0.0,
        "weight_bytes": float(table.num_embeddings) * value_bytes,
        "log2_rows": np.log2(table.num_embeddings),
        "log2_width": 0.0,
        "width_mod_16": 1 / 16,
        "log2_pooling": np.log2(max(per_bag, 2.0**-10)),
        "pooling_cv": length_std / max(per_bag, 2.0**-10),
        "log2_batch": np.log2(batch_size),
        "log2_reuse": np.log2(max(lookups, 1.0) / max(distinct, 1.0)),
        "is_weighted": table.weighted,
        "is_half": is_half,
        "is_shared": is_shared,
        "is_rowwise_adagrad": is_rowwise_adagrad,
        "is_adagrad": table.optimizer == "adagrad",
        "is_adam": table.optimizer == "adam",
        **{
            f"distinct_share_{j}": num_ids / max(distinct, 1e-9)
            for j, num_ids in enumerate(profile.access_histogram)
        },
    }


FEATURE_NAMES: tuple[str, ...] = tuple(
    _columns(
        TableConfig(name="any", num_embeddings=1, embedding_dim=4),
        FeatureProfile(
            batch_size=1,
            num_lookups=1.0,
            access_histogram=(1.0, *[0.0] * (NUM_COUNT_BINS - 1)),
        ),
        batch_size=1,
    )
)
"""Columns of a feature matrix, in order."""

_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}
_PER_COLUMN = [i for n, i in _INDEX.items() if n.endswith(("_bytes", "_values"))]
_PER_LINE = [i for n, i in _INDEX.items() if n.endswith("_lines")]


def check_schema(names: Sequence[str], version: int) -> None:
    """Raise `FeatureSchemaError` unless these are this version's columns."""
    if version != FEATURE_VERSION or tuple(names) != FEATURE_NAMES:
        odd = sorted(set(names) ^ set(FEATURE_NAMES)) or "order"
        raise FeatureSchemaError(
            f"the model needs feature columns of version {version}, but this package "
            f"computes version {FEATURE_VERSION} (differing: {odd}); train the model "
            "again"
        )


class ShardFeaturizer:
    """Computes features of column shards; tables can be added later.

    Features that do not depend on the width are computed once per table.
    """

    def __init__(self, tables: Sequence[TableConfig], batch_size: int) -> None:
        """Take tables whose kernels see `batch_size` samples."""
        self._base_TF = np.zeros((0, len(FEATURE_NAMES)))
        self._value_bytes_T = np.zeros(0)
        self.add(tables, [batch_size] * len(tables))

    def add(self, tables: Sequence[TableConfig], batch_sizes: Sequence[int]) -> None:
        """Add tables and, for each, the number of samples that its kernel sees."""
        base_TF = np.zeros((len(tables), len(FEATURE_NAMES)))
        for row, table, batch_size in zip(base_TF, tables, batch_sizes, strict=True):
            profile = table.profile_at(batch_size)
            row[:] = [*_columns(table, profile, batch_size).values()]
        value_bytes = [float(DATA_TYPE_BYTES[t.data_type]) for t in tables]
        self._base_TF = np.concatenate([self._base_TF, base_TF])
        self._value_bytes_T = np.append(self._value_bytes_T, value_bytes)

    @property
    def num_lookups(self) -> npt.NDArray[np.float64]:
        """Lookups of each table in one batch, `T`."""
        return self._base_TF[:, _INDEX["num_lookups"]]

    def features(
        self, table_N: npt.ArrayLike, width_N: npt.ArrayLike
    ) -> npt.NDArray[np.float32]:
        """Return the features of column shards.

        Args:
            table_N: Index of each shard's table.
            width_N: Columns of each shard.

        Returns:
            `N x F` float32, columns in FEATURE_NAMES order, not normalised.
        """
        table = np.asarray(table_N, dtype=np.int64)
        width = np.asarray(width_N, dtype=np.float64)
        lines = np.ceil(width * self._value_bytes_T[table] / _LINE_BYTES)
        out = self._base_TF[table]
        out[:, _PER_COLUMN] *= width[:, None]
        out[:, _PER_LINE] *= lines[:, None]
        out[:, _INDEX["log2_width"]] = np.log2(width)
        out[:, _INDEX["width_mod_16"]] = width % 16 / 16
        return out.astype(np.float32)


def table_features(
    tables: Sequence[TableConfig], batch_size: int
) -> npt.NDArray[np.float32]:
    """Return the `T x F` features of whole tables at `batch_size` samples."""
    featurizer = ShardFeaturizer(tables, batch_size)
    widths = [t.embedding_dim for t in tables]
    return featurizer.features(np.arange(len(tables)), widths)


def feature_ranges(
    features_NF: npt.NDArray[np.float32],
) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest value of each feature of shards."""
    low_F, high_F = features_NF.min(axis=0), features_NF.max(axis=0)
    pairs = zip(low_F.tolist(), high_F.tolist(), strict=True)
    return dict(zip(FEATURE_NAMES, pairs, strict=True))
