"""Draw input batches that match the tables' profiles.

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

_PROFILE_BATCHES = 16
"""Ids are drawn from a profile of at least this many batches: a single batch's profile
lacks the ids that this batch did not read."""


def feature_names(table: TableConfig) -> tuple[str, ...]:
    """Return the names of the features that read a table.

    A single feature has the table's name; several are `name:0`, `name:1`, ...
    """
    if table.num_features == 1:
        return (table.name,)
    return tuple(f"{table.name}:{i}" for i in range(table.num_features))


def draw_batch(
    tables: Sequence[TableConfig], batch_size: int, seed: int
) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Draw one batch.

    A table has the same hot ids in every batch. Bag lengths follow the profile's mean
    and standard deviation (equal lengths if that is 0). Each table has its own random
    stream, so adding a table changes no other table's input.

    Args:
        tables: Tables, preferably with profiles; without one a power law is assumed.
        batch_size: Samples.
        seed: Seed of this batch; equal seeds give equal batches in any process.

    Returns:
        Feature name -> ids (`L` int64, bag after bag) and bag lengths (`B` int64).
        Concatenated over the features, `KeyedJaggedTensor.from_lengths_sync` takes
        them.

    Raises:
        ConfigError: `batch_size` is below 1 or the seed is negative.
        TableError: There are no tables, or two have the same name.
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
