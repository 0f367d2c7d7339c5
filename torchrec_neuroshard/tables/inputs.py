"""Input batches that read tables as their profiles say.

Shapes: `B` samples, `L` lookups.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.tables.access import AccessDistribution, draw_ids, draw_lengths
from torchrec_neuroshard.tables.table import TableConfig, check_tables

__all__ = ["draw_batch", "feature_names"]

_PROFILE_BATCHES = 16
"""Ids come from a profile of at least this many times the batch: a profile of the batch
itself knows none of the ids that the batch happened not to read."""


def feature_names(table: TableConfig) -> tuple[str, ...]:
    """Return the names of the features that read a table.

    One feature has the table's name; several are `name:0`, `name:1`, ...
    """
    if table.num_features == 1:
        return (table.name,)
    return tuple(f"{table.name}:{i}" for i in range(table.num_features))


def draw_batch(
    tables: Sequence[TableConfig], batch_size: int, seed: int
) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Draw one batch.

    A table's hot ids are the same in every batch; bag lengths follow the profile's
    mean and spread (equal lengths where the spread is 0). Each table draws from a
    stream of its own, so that adding a table changes no other's input.

    Args:
        tables: Tables, best with profiles; without one a power law is assumed.
        batch_size: Samples.
        seed: Of this batch; equal seeds give equal batches in any process.

    Returns:
        Feature name -> ids (`L` int64, bag after bag) and bag lengths (`B` int64). What
        `KeyedJaggedTensor.from_lengths_sync` takes when concatenated over the features.

    Raises:
        ConfigError: `batch_size` is below 1 or the seed negative.
        TableError: No tables, or two of one name.
    """
    check_tables(tables)
    if batch_size < 1 or seed < 0:
        raise ConfigError(
            f"batch_size must be at least 1 and seed at least 0, got {batch_size} and "
            f"{seed}"
        )
    batch = {}
    for table in tables:
        rng = np.random.default_rng([seed, zlib.crc32(table.name.encode())])
        known = table.profile.batch_size if table.profile is not None else 1
        profile = table.profile_at(max(known, _PROFILE_BATCHES * batch_size))
        distribution = AccessDistribution.from_profile(profile, table.num_embeddings)
        mean = profile.pooling_factor / table.num_features
        for feature in feature_names(table):
            lengths = draw_lengths(rng, mean, profile.pooling_std, batch_size)
            ids = draw_ids(rng, distribution, table.num_embeddings, int(lengths.sum()))
            batch[feature] = (ids, lengths)
    return batch
