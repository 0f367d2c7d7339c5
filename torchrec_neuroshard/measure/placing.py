"""Place shards on ranks as plans do, and limit what a measured set holds.

Shapes: `N` shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.tables.features import table_features
from torchrec_neuroshard.tables.table import (
    COLUMN_MULTIPLE,
    DATA_TYPE_BYTES,
    TableConfig,
)

_STATE_BYTES = {"adam": 8, "adagrad": 4}
"""Bytes of optimizer state per weight, without row-wise Adagrad's 4 bytes per row."""


def row_bytes(table: TableConfig) -> int:
    """Return the bytes of a row and its optimizer state."""
    value_bytes = DATA_TYPE_BYTES[table.data_type]
    return table.embedding_dim * (value_bytes + _STATE_BYTES.get(table.optimizer, 0))


@dataclass(slots=True)
class Room:
    """What a set may still hold."""

    lookups: float
    num_bytes: int
    shards: float

    def take(self, shard: TableConfig, batch_size: int) -> bool:
        """Take a shard; False if there is too little room for it."""
        lookups = batch_size * shard.pooling_factor
        num_bytes = shard.num_embeddings * row_bytes(shard)
        fits = (
            self.shards > 0 and lookups <= self.lookups and num_bytes <= self.num_bytes
        )
        if fits:
            self.lookups -= lookups
            self.num_bytes -= num_bytes
            self.shards -= 1
        return fits


def predict_alone_ms(
    shards: Sequence[TableConfig], batch_size: int, estimate: CostModel
) -> npt.NDArray[np.float64]:
    """Return the predicted time of each shard in a kernel of its own, `N`."""
    sums_NE = estimate.encode(table_features(shards, batch_size))
    times: npt.NDArray[np.float64] = estimate.predict_sums(sums_NE).sum(axis=1)
    return times


def split_columns(width: int, parts: int, narrowest: int) -> list[int]:
    """Return the widths of a table's column parts, which are as equal as possible.

    Args:
        width: Columns of the table.
        parts: Wanted number of parts.
        narrowest: Fewest columns of a part.
    """
    parts = max(1, min(parts, width // narrowest))
    units, rest = divmod(width // COLUMN_MULTIPLE, parts)
    return [COLUMN_MULTIPLE * (units + (i < rest)) for i in range(parts)]


def place_shards(
    shards: Sequence[TableConfig],
    batch_size: int,
    num_ranks: int,
    estimate: CostModel,
) -> list[list[TableConfig]]:
    """Return the shards of each rank.

    The shards are placed one by one, the slowest first, each onto the rank with the
    lowest predicted cost so far.
    """
    ranks: list[list[TableConfig]] = [[] for _ in range(num_ranks)]
    encoded_NE = estimate.encode(table_features(shards, batch_size))
    alone_ms_N = estimate.predict_sums(encoded_NE).sum(axis=1)
    sums_WE = np.zeros((num_ranks, encoded_NE.shape[1]))
    cost_ms_W = np.zeros(num_ranks)
    for i in np.argsort(-alone_ms_N, kind="stable"):
        rank = int(np.argmin(cost_ms_W))
        ranks[rank].append(shards[i])
        sums_WE[rank] += encoded_NE[i]
        cost_ms_W[rank] = estimate.predict_sums(sums_WE[rank : rank + 1]).sum()
    return ranks
