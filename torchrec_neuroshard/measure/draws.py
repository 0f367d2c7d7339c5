"""Draw tables, real or generated, and what all tables of a set have in common."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE, TableConfig

if TYPE_CHECKING:
    from torchrec_neuroshard.measure.sets import SamplingConfig

_USUAL_WIDTHS = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)


class RealTables:
    """The real tables of one part. Each kind counts once in its workload."""

    def __init__(self, tables: Iterable[TableConfig]) -> None:
        kinds: dict[tuple[str, TableConfig], TableConfig] = {}
        workloads = defaultdict[str, list[TableConfig]](list)
        for table in tables:
            workload = table.name.rpartition("/")[0]
            if kinds.setdefault((workload, kind_of(table)), table) is table:
                workloads[workload].append(table)
        self.workloads = list(workloads.values())
        self._below = np.cumsum(np.sqrt([len(kinds) for kinds in self.workloads]))

    def workload(self, rng: np.random.Generator) -> Sequence[TableConfig]:
        """Draw a workload, in proportion to the square root of its kinds."""
        draw = rng.random() * self._below[-1]
        return self.workloads[int(np.searchsorted(self._below, draw, side="right"))]


def kind_of(table: TableConfig) -> TableConfig:
    """Return what a table has in common with its twins."""
    return dataclasses.replace(table, name="")


def vary(
    rng: np.random.Generator, table: TableConfig, config: SamplingConfig
) -> TableConfig:
    """Draw a variant of a real table, with other rows and another pooling factor."""
    rows = int(table.num_embeddings * math.exp(rng.normal(0.0, 0.3)))
    return dataclasses.replace(
        table,
        num_embeddings=min(max(rows, config.rows[0]), config.rows[1]),
        pooling_factor=table.pooling_factor * math.exp(rng.normal(0.0, 0.3)),
    )


def generate(
    rng: np.random.Generator, config: SamplingConfig, name: str
) -> tuple[TableConfig, float]:
    """Generate a table, and the exponent of its ids' power law."""
    rows = log_uniform_int(rng, *config.rows)
    pooling = math.exp(rng.uniform(math.log(0.2), math.log(200.0)))
    if rng.random() < 0.4:
        pooling = 1.0
    exponent = 0.0 if rng.random() < 0.15 else float(rng.uniform(0.5, 1.4))
    return _generated(name, rows, pooling), exponent


def generate_workload(
    rng: np.random.Generator, config: SamplingConfig, names: Sequence[str]
) -> tuple[list[TableConfig], list[float]]:
    """Generate the tables of one workload, and the exponents of their ids' power laws.

    Their rows spread around the workload's own middle, most poolings are 1, and their
    ids are about equally skewed.
    """
    count = len(names)
    middle, spread = log_uniform_int(rng, *config.rows), rng.uniform(1.0, 3.0)
    rows = np.clip(middle * np.exp(rng.normal(0.0, spread, count)), *config.rows)
    long = np.exp(rng.uniform(math.log(2.0), math.log(200.0), count))
    is_long = rng.random(count) < rng.uniform(0.0, 0.5)
    poolings = np.where(is_long, long, 1.0)
    exponents = np.maximum(rng.normal(rng.uniform(0.5, 1.3), 0.2, count), 0.0)
    tables = map(_generated, names, rows.tolist(), poolings.tolist())
    return list(tables), exponents.tolist()


def _generated(name: str, rows: float, pooling: float) -> TableConfig:
    return TableConfig(
        name=name,
        num_embeddings=int(rows),
        embedding_dim=COLUMN_MULTIPLE,
        pooling_factor=pooling,
    )


def width_rule(
    rng: np.random.Generator, config: SamplingConfig, rule: str
) -> Callable[[TableConfig], int]:
    """Return the function that draws the widths of one set's or plan's tables.

    Args:
        rng: Draws the widths.
        config: Has their range.
        rule: "own" keeps a table's width; "one", "few" and "usual" draw among usual
            widths; "any" draws any width.
    """
    low, high = config.widths
    if rule == "own":
        return lambda table: min(max(table.embedding_dim, low), high)
    if rule == "any":
        logs = math.log(low), math.log(high)
        return lambda table: max(low, round(math.exp(rng.uniform(*logs)) / 4) * 4)
    usual = [w for w in _USUAL_WIDTHS if low <= w <= high]
    if rule != "usual":
        usual = rng.choice(usual, 1 if rule == "one" else 3).tolist()
    return lambda table: usual[rng.integers(len(usual))]


def draw_kernel(rng: np.random.Generator, config: SamplingConfig) -> dict[str, Any]:
    """Draw what all tables of a kernel have in common."""
    optimizer = str(rng.choice(config.optimizers))
    data_type = "fp16" if rng.random() < config.fp16_share else "fp32"
    if optimizer == "adam":  # FBGEMM's kernel takes no other weights
        data_type = "fp32"
    weighted = bool(rng.random() < config.weighted_share)
    return {"optimizer": optimizer, "data_type": data_type, "weighted": weighted}


def draw_batch_size(rng: np.random.Generator, low: int, high: int) -> int:
    """Draw a batch size; half of them are a power of two where one is in range."""
    batch_size = log_uniform_int(rng, low, high)
    if rng.random() < 0.5:
        usual_size: int = 2 ** round(math.log2(batch_size))
        batch_size = min(max(usual_size, low), high)
    return batch_size


def with_ids(
    rng: np.random.Generator, table: TableConfig, exponent: float, batch_size: int
) -> tuple[TableConfig, AccessDistribution]:
    """Draw how a table is read.

    Args:
        rng: Draws the spread of the bags' lengths.
        table: A table; its profile gives the distribution of its ids.
        exponent: Gives the distribution of a table without a profile.
        batch_size: Samples.

    Returns:
        The table with the profile that is expected, and the distribution of its ids.
    """
    rows, pooling = table.num_embeddings, table.pooling_factor
    if table.profile is not None:
        distribution = AccessDistribution.from_profile(table.profile, rows)
    else:
        distribution = AccessDistribution.power_law(rows, exponent)
    spread = float(rng.choice([0.0, 1.0, 2.0]))
    std = spread * math.sqrt(pooling / table.num_features)
    histogram = distribution.histogram(batch_size * pooling)
    pooling, std, *bins = _short_numbers((pooling, std, *histogram))
    profile = FeatureProfile(
        batch_size=batch_size,
        num_lookups=batch_size * pooling,
        pooling_std=std,
        access_histogram=tuple(bins),
        weighted=table.weighted,
    )
    table = dataclasses.replace(table, pooling_factor=pooling, profile=profile)
    return table, distribution


def _short_numbers(values: Sequence[float]) -> list[float]:
    """Round down to 11 significant bits: errors below 0.1 %, files half as large."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    kept = bits & np.uint32(0xFFFF_E000)
    rounded: list[float] = kept.view(np.float32).tolist()
    return rounded


def log_uniform_int(rng: np.random.Generator, low: int, high: int) -> int:
    """Draw a whole number from `low` to `high`, log-uniform."""
    value = math.exp(rng.uniform(math.log(low), math.log(high + 1)))
    return min(high, max(low, int(value)))
