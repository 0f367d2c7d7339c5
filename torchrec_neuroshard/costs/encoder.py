"""The cache of encodings of shards.

A *part* is a table, or some rows of it, with the batch that its kernel sees. A shard is
a part with a width. Each shard is encoded once.

Shapes: `N` shards, `P` parts, `U` widths in units of four columns, `R` encoded shards,
`E` encoding values, `F` features.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.tables.features import ShardFeaturizer, table_features
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE, TableConfig, row_shard

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PROBE_ROWS, _PROBE_WIDTH, _PROBE_LOOKUPS, _PROBE_BATCH = 10**6, 128, 65536, 8192
"""A kernel bound by memory bandwidth. The time per byte is derived from it."""
_ID_BYTES = 8


class ShardEncoder:
    """Encodes shards by one cost model, each once.

    Attributes:
        cost_model: Predicts fused kernels.
    """

    def __init__(self, cost_model: CostModel) -> None:
        """Start without tables.

        Args:
            cost_model: Predicts fused kernels.
        """
        self.cost_model = cost_model
        self._part_of: dict[tuple[int, int, int, int | None], int] = {}
        self._tables: list[TableConfig] = []  # Kept alive, since id() is the key.
        self._pooled_P: npt.NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._featurizer = ShardFeaturizer([], 1)
        self._row_PU: Ints = np.zeros((0, 0), dtype=np.int64)
        self._used = 0
        self._encoding_RE: Floats = np.zeros((64, cost_model.encoding_dim))

    @property
    def num_parts(self) -> int:
        """Parts that were asked for so far."""
        return len(self._tables)

    def parts(
        self,
        tables: Sequence[TableConfig],
        rows: Sequence[int],
        batch_sizes: Sequence[int],
        firsts: Sequence[int | None],
    ) -> Ints:
        """Return the numbers of parts; new parts are added.

        Args:
            tables: Whole tables; parts are shared only if the object is the same.
            rows: Rows of each part.
            batch_sizes: Batch that each part's kernel sees.
            firsts: First row of each part; None if its place does not matter.
        """
        new: list[tuple[TableConfig, int]] = []
        found = []
        for table, num, batch, first in zip(
            tables, rows, batch_sizes, firsts, strict=True
        ):
            key = (id(table), num, batch, first)
            part = self._part_of.setdefault(key, len(self._tables))
            if part == len(self._tables):
                self._tables.append(table)
                part_of = row_shard(table, num, batch, first=first)
                new.append((part_of, batch))
            found.append(part)
        if new:
            self._featurizer.add([t for t, _ in new], [batch for _, batch in new])
            self._pooled_P = np.append(self._pooled_P, [t.pooled for t, _ in new])
        return np.array(found, dtype=np.int64)

    def rows(self, part_N: Ints, width_N: Ints) -> Ints:
        """Return each shard's number; new shards are encoded."""
        units_N = width_N // COLUMN_MULTIPLE
        num_parts, num_units = self._row_PU.shape
        more = (
            len(self._tables) - num_parts,
            max(0, int(units_N.max(initial=-1)) + 1 - num_units),
        )
        if any(more):
            widened = [(0, count) for count in more]
            self._row_PU = np.pad(self._row_PU, widened, constant_values=-1)
        rows: Ints = self._row_PU[part_N, units_N]
        missing = rows < 0
        if missing.any():
            num_units = self._row_PU.shape[1]
            asked = np.unique(part_N[missing] * num_units + units_N[missing])
            part, units = np.divmod(asked, num_units)
            features = self._featurizer.features(part, units * COLUMN_MULTIPLE)
            new = self._used + np.arange(len(part))
            self._used += len(part)
            self._encoding_RE = with_room(self._encoding_RE, self._used)
            pooled = self._pooled_P[part]
            for some, encode in (
                (pooled, self.cost_model.encode),
                (~pooled, self.cost_model.encode_sequences),
            ):
                if some.any():
                    self._encoding_RE[new[some]] = encode(features[some])
            self._row_PU[part, units] = new
            rows = self._row_PU[part_N, units_N]
        return rows

    def encoding(self, rows_N: Ints) -> Floats:
        """Return the encoding of each shard, `N x E`."""
        return self._encoding_RE[rows_N]

    def features(self, part_N: Ints, width_N: Ints) -> npt.NDArray[np.float32]:
        """Return the features of each shard, `N x F`."""
        return self._featurizer.features(part_N, width_N)

    def num_lookups(self, part_N: Ints) -> Floats:
        """Return the number of ids that look up each part, `N`."""
        return self._featurizer.num_lookups[part_N]

    @functools.cached_property
    def launch_ms(self) -> Floats:
        """Forward and backward of the smallest kernel, `2` [ms]: the launch's cost."""
        tiny = TableConfig(
            name="launch", num_embeddings=1, embedding_dim=4, pooling_factor=1.0
        )
        encoding = self.cost_model.encode(table_features([tiny], 1))
        launch: Floats = self.cost_model.predict_sums(encoding)[0]
        return launch

    @functools.cached_property
    def byte_ms(self) -> float:
        """Forward time of the fused kernel per byte, without its launch [ms].

        Bytes are counted as TorchRec does: ids, rows read, outputs.
        """
        table = TableConfig(
            name="probe",
            num_embeddings=_PROBE_ROWS,
            embedding_dim=_PROBE_WIDTH,
            profile=zipf_profile(
                batch_size=_PROBE_BATCH,
                pooling_factor=_PROBE_LOOKUPS / _PROBE_BATCH,
                num_embeddings=_PROBE_ROWS,
                exponent=0.0,
            ),
        )
        encoding = self.cost_model.encode(table_features([table], _PROBE_BATCH))
        forward = float(self.cost_model.predict_sums(encoding)[0, 0])
        row_bytes = _PROBE_WIDTH * 4
        num_bytes = _PROBE_LOOKUPS * (_ID_BYTES + row_bytes)
        num_bytes += _PROBE_BATCH * row_bytes
        above_launch = forward - float(self.launch_ms[0])
        return above_launch / num_bytes if above_launch > 0 else 0.0

    @functools.cached_property
    def stream_ms(self) -> float:
        """Time per byte of kernels with sequential memory access [ms].

        If the cost model does not know it, the fused kernel's time per byte.
        """
        known = self.cost_model.stream_byte_ms
        return self.byte_ms if known is None else known

    def column_order(self, bytes_N: Floats) -> Floats:
        """Return the time to reorder columns of outputs, `N x 2` [ms].

        If the cost model does not know it, two sequential passes and a launch: that of
        the forward or backward kernel, whichever is shorter.

        Args:
            bytes_N: Outputs of a rank's own samples.
        """
        known = self.cost_model.column_order(bytes_N)
        if known is None:
            ms_N = self.launch_ms.min() + 2.0 * self.stream_ms * bytes_N
            known = np.stack([ms_N, ms_N], axis=-1)
        return known


def with_room(values_R: Any, num_rows: int) -> Any:
    """Return the array grown to at least `num_rows` rows; new rows are 0."""
    if num_rows <= len(values_R):
        return values_R
    more = max(num_rows, 2 * len(values_R)) - len(values_R)
    return np.pad(values_R, [(0, more), *[(0, 0)] * (values_R.ndim - 1)])
