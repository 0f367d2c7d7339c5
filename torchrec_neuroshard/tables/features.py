"""What a cost model sees of a shard: named, versioned columns.

Shapes: `T` tables, `N` shards, `F` features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import FeatureSchemaError
from torchrec_neuroshard.tables.profile import NUM_COUNT_BINS
from torchrec_neuroshard.tables.table import DATA_TYPE_BYTES, TableConfig

__all__ = [
    "FEATURE_NAMES",
    "FEATURE_VERSION",
    "NUM_TOTALS",
    "OUTPUT_BYTES_PER_VALUE",
    "ShardFeaturizer",
    "check_schema",
    "table_features",
]

FEATURE_VERSION = 2
"""Changes whenever a column changes its meaning."""

TOTAL_NAMES: tuple[str, ...] = (
    "num_tables",
    "num_lookups",
    "num_distinct",
    "lookup_bytes",
    "distinct_bytes",
    "output_bytes",
    "num_bags",
    "weighted_lookups",
    "weighted_bytes",
    "lookup_lines",
    "distinct_lines",
    "sorted_digits",
    "unfused_values",
    "half_distinct_values",
    "half_weighted_values",
    "weight_bytes",
)
"""Physical quantities of a shard; a set's are their sums.

`weighted_bytes` are read once more for the gradient of the lookups' weights. `*_lines`
are what rows of `*_bytes` take of a cache. `sorted_digits` are ids times the passes of
the radix sort that the backward starts with. `unfused_values` are gradients that
FBGEMM's CPU backward adds one by one: of all optimizers but row-wise Adagrad, of fp16
weights, and of tables with several features. `half_*` are converted to fp32 and back.
Source: FBGEMM 1.8, embedding_backward_split_cpu_template.cpp, csr2csc and
radix_sort_parallel.
"""

NUM_TOTALS = len(TOTAL_NAMES)

FEATURE_NAMES: tuple[str, ...] = (
    *TOTAL_NAMES,
    "log2_rows",
    "log2_width",
    "width_mod_16",
    "log2_pooling",
    "pooling_cv",
    "log2_batch",
    "log2_reuse",
    "is_weighted",
    "is_half",
    "is_shared",
    "is_rowwise_adagrad",
    "is_adagrad",
    "is_adam",
    *(f"distinct_share_{j}" for j in range(NUM_COUNT_BINS)),
)
"""Columns of a feature matrix, in order."""

OUTPUT_BYTES_PER_VALUE = 4
"""Pooled outputs leave the kernel as fp32."""
_LINE_BYTES, _DIGIT_BITS = 64, 8
"""Of a CPU's cache, and of the sort of the ids."""

_INDEX = {name: i for i, name in enumerate(FEATURE_NAMES)}


def check_schema(names: Sequence[str], version: int) -> None:
    """Raise `FeatureSchemaError` unless these are this version's columns."""
    if version != FEATURE_VERSION or tuple(names) != FEATURE_NAMES:
        odd = sorted(set(names) ^ set(FEATURE_NAMES)) or "order"
        raise FeatureSchemaError(
            f"feature columns of version {version} were given, this package computes "
            f"version {FEATURE_VERSION} (differing: {odd}); train the model again"
        )


class ShardFeaturizer:
    """Features of column shards of a list of tables, which may grow.

    What does not depend on the width is computed once per table.
    """

    def __init__(self, tables: Sequence[TableConfig], batch_size: int) -> None:
        """Derive each table's profile at `batch_size` samples."""
        self._base_TF = np.zeros((0, len(FEATURE_NAMES)), dtype=np.float64)
        self._value_bytes_T = np.zeros(0)
        self._rows_T = np.zeros(0)
        self.add(tables, [batch_size] * len(tables))

    def add(self, tables: Sequence[TableConfig], batch_sizes: Sequence[int]) -> None:
        """Add tables to the list, each with the samples that its kernel sees."""
        base_TF = np.zeros((len(tables), len(FEATURE_NAMES)), dtype=np.float64)
        value_bytes_T = np.array([float(DATA_TYPE_BYTES[t.data_type]) for t in tables])
        rows_T = np.array([t.num_embeddings for t in tables], dtype=np.float64)
        for row, table, batch_size in zip(base_TF, tables, batch_sizes, strict=True):
            profile = table.profile_at(batch_size)
            lookups, distinct = profile.num_lookups, profile.num_distinct
            per_bag = lookups / (batch_size * table.num_outputs)
            shares = np.asarray(profile.access_histogram) / max(distinct, 1e-9)
            values = {
                "num_tables": 1.0,
                "num_lookups": lookups,
                "num_distinct": distinct,
                "num_bags": batch_size * table.num_outputs,
                "sorted_digits": lookups
                * -(-table.num_embeddings.bit_length() // _DIGIT_BITS),
                "weighted_lookups": lookups if table.weighted else 0.0,
                "log2_rows": np.log2(table.num_embeddings),
                "log2_pooling": np.log2(max(per_bag, 2.0**-10)),
                "pooling_cv": profile.pooling_std / max(per_bag, 2.0**-10),
                "log2_batch": np.log2(batch_size),
                "log2_reuse": np.log2(max(lookups, 1.0) / max(distinct, 1.0)),
                "is_weighted": float(table.weighted),
                "is_half": float(DATA_TYPE_BYTES[table.data_type] == 2),
                "is_shared": float(table.num_features > 1),
                "is_rowwise_adagrad": float(table.optimizer == "rowwise_adagrad"),
                "is_adagrad": float(table.optimizer == "adagrad"),
                "is_adam": float(table.optimizer == "adam"),
            }
            for name, value in values.items():
                row[_INDEX[name]] = value
            row[-NUM_COUNT_BINS:] = shares
        self._base_TF = np.concatenate([self._base_TF, base_TF])
        self._value_bytes_T = np.concatenate([self._value_bytes_T, value_bytes_T])
        self._rows_T = np.concatenate([self._rows_T, rows_T])

    @property
    def num_lookups(self) -> npt.NDArray[np.float64]:
        """Ids of each table in one batch, `T`."""
        lookups: npt.NDArray[np.float64] = self._base_TF[:, _INDEX["num_lookups"]]
        return lookups

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
        out = self._base_TF[table]
        row_bytes = width * self._value_bytes_T[table]
        row_lines = np.ceil(row_bytes / _LINE_BYTES)
        column = {name: out[:, i] for name, i in _INDEX.items()}  # views
        lookups, distinct = column["num_lookups"], column["num_distinct"]
        half, weighted_lookups = column["is_half"], column["weighted_lookups"]
        fused = column["is_rowwise_adagrad"] * (1 - half) * (1 - column["is_shared"])
        column["lookup_bytes"][:] = lookups * row_bytes
        column["distinct_bytes"][:] = distinct * row_bytes
        column["output_bytes"][:] = column["num_bags"] * width * OUTPUT_BYTES_PER_VALUE
        column["weighted_bytes"][:] = weighted_lookups * row_bytes
        column["lookup_lines"][:] = lookups * row_lines
        column["distinct_lines"][:] = distinct * row_lines
        column["unfused_values"][:] = (1 - fused) * lookups * width
        column["half_distinct_values"][:] = half * distinct * width
        column["half_weighted_values"][:] = half * weighted_lookups * width
        column["weight_bytes"][:] = self._rows_T[table] * row_bytes
        column["log2_width"][:] = np.log2(width)
        column["width_mod_16"][:] = width % 16 / 16
        return out.astype(np.float32)


def table_features(
    tables: Sequence[TableConfig], batch_size: int
) -> npt.NDArray[np.float32]:
    """Return the `T x F` features of whole tables at `batch_size` samples."""
    featurizer = ShardFeaturizer(tables, batch_size)
    widths = [t.embedding_dim for t in tables]
    return featurizer.features(np.arange(len(tables)), widths)
