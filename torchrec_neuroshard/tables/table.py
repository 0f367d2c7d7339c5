"""Embedding tables as the planner sees them: sizes, types and how they are read."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import TableError, is_number
from torchrec_neuroshard.files import TOO_LARGE, read_fields, to_fields
from torchrec_neuroshard.tables.hot_rows import ROUNDING, HotRows
from torchrec_neuroshard.tables.lengths import gamma_at
from torchrec_neuroshard.tables.profile import FeatureProfile, binned
from torchrec_neuroshard.tables.spellings import meant_value

COLUMN_MULTIPLE = 4
"""FBGEMM's fused kernels need every shard width to be a multiple of this."""

MAX_CUDA_COLUMNS = 2_048
"""Most columns of a shard in FBGEMM's CUDA kernels (FBGEMM 1.8 checks this)."""

DATA_TYPE_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
"""Bytes of one weight."""

MEASURED_TYPES: tuple[str, ...] = ("fp32", "fp16")
"""Weight types whose kernels `measure.kernels` can time."""

OPTIMIZERS: tuple[str, ...] = ("rowwise_adagrad", "sgd", "adam", "adagrad")
"""Optimizers that the cost models know by name."""

MAX_FEATURES = 100_000
"""Most features of a table: a measurement makes an input for each."""


_LONGEST = 2.326
"""Standard normal value that one in 100 exceeds."""

_RULES = {
    "name": "text",
    "num_embeddings": "a whole number of at least 1 and below 2**63",
    "embedding_dim": f"a positive multiple of {COLUMN_MULTIPLE} (pad the table to one)",
    "pooling_factor": "a finite number of at least 0",
    "num_features": f"1 to {MAX_FEATURES:,}",
    "outputs_per_sample": "a finite number above 0",
    "pooled": "true or false",
    "weighted": "false if rows are not pooled",
    "profile": "a FeatureProfile",
    "data_type": f"one of {', '.join(DATA_TYPE_BYTES)}",
    "optimizer": f"one of {', '.join(OPTIMIZERS)}",
}
"""Field of a table -> its allowed values, for error messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """One embedding table, or a column shard of one, and how it is read."""

    name: str
    num_embeddings: int
    """Rows ("hash size")."""
    embedding_dim: int
    """Columns of the table or shard; a multiple of 4."""
    pooling_factor: float = 1.0
    """Mean ids per sample, summed over the table's features."""
    num_features: int = 1
    """Features (bags per sample) that read the table; each has its own output."""
    outputs_per_sample: float | None = None
    """Bags per sample; None for `num_features`. The two differ if features have fewer
    bags than samples."""
    pooled: bool = True
    """Whether the rows of a bag are summed, as in an `EmbeddingBagCollection`. Tables
    of an `EmbeddingCollection` return a row for each id."""
    profile: FeatureProfile | None = None
    """Measured access, over all features together; None assumes a power law."""
    weighted: bool = False
    """Whether lookups carry per-sample weights."""
    data_type: str = "fp32"
    """Weight type, a key of DATA_TYPE_BYTES."""
    optimizer: str = "rowwise_adagrad"
    """Optimizer, one of OPTIMIZERS."""

    def __post_init__(self) -> None:
        width = self.embedding_dim
        holds = {  # NaN fails each of them
            "name": isinstance(self.name, str),
            "num_embeddings": is_number(self.num_embeddings, whole=True)
            and 1 <= self.num_embeddings < TOO_LARGE,
            "embedding_dim": is_number(width, whole=True)
            and 1 <= width < TOO_LARGE
            and width % COLUMN_MULTIPLE == 0,
            "pooling_factor": is_number(self.pooling_factor)
            and 0 <= self.pooling_factor < math.inf,
            "num_features": is_number(self.num_features, whole=True)
            and 1 <= self.num_features <= MAX_FEATURES,
            "outputs_per_sample": is_number(self.outputs_per_sample or 1)
            and 0 < self.num_bags < math.inf,
            "pooled": isinstance(self.pooled, bool),
            "weighted": self.pooled or not self.weighted,
            "profile": isinstance(self.profile, FeatureProfile | None),
            "data_type": self.data_type in DATA_TYPE_BYTES,
            "optimizer": self.optimizer in OPTIMIZERS,
        }
        for field, rule in _RULES.items():
            if not holds[field]:
                given = getattr(self, field)
                raise TableError(
                    f"table '{self.name!s:.100}': {field} must be {rule}, got "
                    f"{given!r:.100}{meant_value(field, given)}"
                )

    @property
    def num_bags(self) -> float:
        """Bags per sample, each with its own length."""
        given = self.outputs_per_sample
        return float(self.num_features) if given is None else given

    @property
    def num_outputs(self) -> float:
        """Rows that the kernel returns per sample."""
        return self.num_bags if self.pooled else self.pooling_factor

    @property
    def weight_bytes(self) -> int:
        """Size of the weights [bytes]."""
        return (
            self.num_embeddings * self.embedding_dim * DATA_TYPE_BYTES[self.data_type]
        )

    def profile_at(self, batch_size: int) -> FeatureProfile:
        """Return the access profile at a batch of `batch_size` samples.

        The lookups follow the profile if there is one, else `pooling_factor`.
        """
        known = self.profile or FeatureProfile(
            batch_size=1, num_lookups=self.pooling_factor, weighted=self.weighted
        )
        return _with_repeats(known, batch_size, self.num_embeddings)

    def batch_spreads(self, num_samples: float) -> tuple[float, float, float]:
        """Return what the ids of batches of so many samples differ by.

        Returns:
            Standard deviations over the mean: what features of a sample share, what
            they do not, and what whole batches differ by. 0 if unknown.
        """
        profile = self.profile
        if profile is None or not profile.pooling_factor > 0:
            return 0.0, 0.0, 0.0
        common, bags = profile.common_std, self.num_bags
        own = max(bags * profile.pooling_std**2 - common**2 / bags, 0.0)
        scale = 1.0 / (profile.pooling_factor * math.sqrt(num_samples))
        batch = profile.batch_std / profile.pooling_factor
        return common * scale, math.sqrt(own) * scale, batch

    def longest_batch(self, num_samples: float) -> float:
        """Return the ids of the longest of 100 batches over those of the mean one."""
        spread = math.hypot(*self.batch_spreads(num_samples))
        return max(1.0, float(gamma_at(np.array(_LONGEST), spread)))

    def with_width(self, embedding_dim: int) -> TableConfig:
        """Return the column shard of this table with `embedding_dim` columns."""
        return dataclasses.replace(self, embedding_dim=embedding_dim)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; `from_json` reads it back."""
        data = to_fields(self)
        if self.outputs_per_sample is None:
            del data["outputs_per_sample"]
        if self.pooled:
            del data["pooled"]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TableConfig:
        """Read what `to_json` wrote.

        Raises:
            TableError: A key is missing or unknown, or a value is out of range.
        """
        return read_fields(cls, data, TableError, "table")


_with_repeats = functools.lru_cache(maxsize=2**17)(FeatureProfile.with_repeats)
"""Cached, since every part of a planner computes the same profiles."""


def is_skewed(table: TableConfig, part_rows: int, batch_size: int) -> bool:
    """Whether row shards of a table get unequal numbers of lookups, as far as known.

    Args:
        table: The whole table.
        part_rows: Rows of each shard; the last one may have fewer.
        batch_size: Samples that the kernel sees.
    """
    profile, rows = table.profile, table.num_embeddings
    if profile is None or profile.hot_rows is None:
        return False
    lookups = profile.pooling_factor * batch_size
    return profile.hot_rows.is_skewed(part_rows, rows, lookups)


def row_shard(
    table: TableConfig,
    rows: int,
    batch_size: int,
    *,
    first: int | None = None,
) -> TableConfig:
    """Return a table that describes a row shard.

    A shard's lookups and its distinct ids of each count follow the profile's
    `hot_rows`. Without these, or without `first`, they are in proportion to its rows.
    Every shard of a pooled table returns a partial sum for each bag.

    Args:
        table: The whole table.
        rows: Rows of the shard; 0 if there are more ranks than rows.
        batch_size: Samples that the kernel sees.
        first: First row of the shard; None means any shard of so many rows.
    """
    if rows >= table.num_embeddings:
        return table
    share = rows / table.num_embeddings
    whole = table.profile_at(batch_size)
    histogram = tuple(n * share for n in whole.access_histogram)
    if first is not None and whole.hot_rows is not None:
        [share] = whole.hot_rows.shares([first], [rows], table.num_embeddings).tolist()
        share = min(share, 1.0)  # it may be rounded up
        histogram = _histogram_of(whole, whole.hot_rows, share, first, rows)
    per_bag = whole.num_lookups / (batch_size * table.num_bags)
    # Each id of a bag falls into the shard with probability `share`.
    variance = (share * whole.pooling_std) ** 2 + share * (1 - share) * per_bag
    return dataclasses.replace(
        table,
        num_embeddings=max(1, rows),
        pooling_factor=table.pooling_factor * share,
        profile=dataclasses.replace(
            whole,
            num_lookups=whole.num_lookups * share,
            pooling_std=math.sqrt(variance),
            access_histogram=histogram,
            hot_rows=None,
        ),
    )


def _histogram_of(
    whole: FeatureProfile, hot: HotRows, share: float, first: int, rows: int
) -> tuple[float, ...]:
    """Return the access histogram of a row shard.

    Frequent ids count in the shard that holds them. The other ids are in proportion to
    the shard's other lookups, and at most its rows.
    """
    own, lookups = hot.top_within(first, rows), whole.num_lookups
    others, left = _without_top_ids(whole)
    rest = max(share - sum(own), 0.0) / left if left > ROUNDING else 0.0
    bins = others * rest
    if own:
        bins += binned(np.array(own) * lookups)
    most = min(lookups * share, float(rows))
    bins *= min(1.0, most / max(float(bins.sum()), 1e-9))
    return tuple(bins.tolist())


@functools.lru_cache(maxsize=2**12)
def _without_top_ids(
    profile: FeatureProfile,
) -> tuple[npt.NDArray[np.float64], float]:
    """Return the access histogram of all but the frequent ids, and their share."""
    top = [share for _, share in profile.hot_rows.top_ids] if profile.hot_rows else []
    bins = np.array(profile.access_histogram)
    bins -= binned(np.array(top) * profile.num_lookups)
    return np.maximum(bins, 0.0), 1.0 - sum(top)


def check_tables(tables: Sequence[TableConfig]) -> None:
    """Raise `TableError` if there are no tables or two have the same name."""
    if not tables:
        raise TableError("no tables given; pass at least one TableConfig")
    counted = Counter(table.name for table in tables)
    if twice := [name for name, count in counted.items() if count > 1]:
        raise TableError(f"table '{twice[0]}' is given twice; names must differ")
