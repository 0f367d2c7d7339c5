"""Draw tables, real or generated, and what all tables of a set have in common."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table import COLUMN_MULTIPLE, TableConfig

if TYPE_CHECKING:
    from torchrec_neuroshard.measure.sets import SamplingConfig

_SEVERAL_FEATURES = 0.05
"""Share of the tables of mixed sets that several features read."""
_USUAL_WIDTHS = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
_SEQUENCE_WIDTHS = (16, 32, 64, 128, 256, 512)
_LENGTHS = (1.0, 4_096.0)
"""Shortest and longest mean length of sequences."""
_LENGTH_SPREADS = (0.0, 0.5, 1.0, 1.5)
"""Standard deviations of sequences' lengths, over the mean; 1 is a geometric
distribution, which is close to Zipf's."""


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


def draw_tables(
    rng: np.random.Generator,
    config: SamplingConfig,
    real: RealTables | None,
    name: str,
    *,
    mixed: bool,
    pooled: bool = True,
) -> Iterator[tuple[TableConfig, float]]:
    """Yield tables of one kernel without end, and the exponents of their power laws.

    Args:
        rng: Draws the tables.
        config: Has their ranges.
        real: Real tables to vary; their exponents count for nothing. None generates
            tables.
        name: Start of the names of generated tables.
        mixed: Whether each table is of another workload, some with several features.
            Else all are of one, as in a model.
        pooled: Whether rows are pooled. Otherwise all tables have one width, and
            pooling factors are lengths of sequences.
    """
    generate = _any_table(rng, config) if mixed else _one_workload(rng, config)
    rules = ["one", "few"] if real is None else ["own", "one", "few"]
    if mixed:
        rules = ["one", "usual", "any"]
    draw_width = _width_rule(rng, config, str(rng.choice(rules)))
    kernel = _draw_kernel(rng, config)
    if not pooled:
        kernel |= {"weighted": False, "pooled": False}
        width = int(rng.choice(_SEQUENCE_WIDTHS))
    kinds: Sequence[TableConfig] = ()
    for number in itertools.count():
        if real is None:
            rows, pooling, exponent = generate()
            base = TableConfig(
                name=f"{name}/{number}",
                num_embeddings=rows,
                embedding_dim=COLUMN_MULTIPLE,
                pooling_factor=pooling,
            )
        else:
            if mixed or not number:
                kinds = real.workload(rng)
            base = _vary(rng, kinds[int(rng.integers(len(kinds)))], config)
            exponent = 1.0
        if mixed:
            several = rng.random() < _SEVERAL_FEATURES
            kernel["num_features"] = int(rng.integers(2, 5)) if several else 1
        if not pooled:
            length = _log_uniform(rng, *_LENGTHS) * kernel.get("num_features", 1)
            base = dataclasses.replace(base, pooling_factor=length)
        columns = draw_width(base) if pooled else width
        table = dataclasses.replace(base, embedding_dim=columns, **kernel)
        yield table, exponent


def _vary(
    rng: np.random.Generator, table: TableConfig, config: SamplingConfig
) -> TableConfig:
    """Draw a variant of a real table, with other rows and another pooling factor."""
    rows = int(table.num_embeddings * math.exp(rng.normal(0.0, 0.3)))
    return dataclasses.replace(
        table,
        num_embeddings=min(max(rows, config.rows[0]), config.rows[1]),
        pooling_factor=table.pooling_factor * math.exp(rng.normal(0.0, 0.3)),
    )


_Generate = Callable[[], tuple[int, float, float]]
"""Draws rows, a pooling factor, and the exponent of the ids' power law."""


def _any_table(rng: np.random.Generator, config: SamplingConfig) -> _Generate:
    """Return a function that generates any tables."""

    def generate() -> tuple[int, float, float]:
        pooling = 1.0 if rng.random() < 0.4 else _log_uniform(rng, 0.2, 200.0)
        exponent = 0.0 if rng.random() < 0.15 else float(rng.uniform(0.5, 1.4))
        return log_uniform_int(rng, *config.rows), pooling, exponent

    return generate


def _one_workload(rng: np.random.Generator, config: SamplingConfig) -> _Generate:
    """Return a function that generates the tables of one workload.

    Their rows spread around the workload's own middle, most poolings are 1, and their
    ids are about equally skewed.
    """
    middle, spread = log_uniform_int(rng, *config.rows), rng.uniform(1.0, 3.0)
    long_share, skew = rng.uniform(0.0, 0.5), rng.uniform(0.5, 1.3)

    def generate() -> tuple[int, float, float]:
        rows = np.clip(middle * math.exp(rng.normal(0.0, spread)), *config.rows)
        pooling = _log_uniform(rng, 2.0, 200.0) if rng.random() < long_share else 1.0
        return int(rows), pooling, max(float(rng.normal(skew, 0.2)), 0.0)

    return generate


def _width_rule(
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
        return lambda table: max(low, round(_log_uniform(rng, low, high) / 4) * 4)
    usual = [w for w in _USUAL_WIDTHS if low <= w <= high]
    if rule != "usual":
        usual = rng.choice(usual, 1 if rule == "one" else 3).tolist()
    return lambda table: usual[rng.integers(len(usual))]


def _draw_kernel(rng: np.random.Generator, config: SamplingConfig) -> dict[str, Any]:
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
    length = pooling / table.num_features
    if table.pooled:
        std = float(rng.choice([0.0, 1.0, 2.0])) * math.sqrt(length)
    else:
        std = float(rng.choice(_LENGTH_SPREADS)) * length
    histogram = distribution.histogram(batch_size * pooling)
    # Four digits: errors below 0.1 %, and short files.
    pooling, std, *bins = (float(f"{v:.4g}") for v in (pooling, std, *histogram))
    profile = FeatureProfile(
        batch_size=batch_size,
        num_lookups=batch_size * pooling,
        pooling_std=std,
        access_histogram=tuple(bins),
        weighted=table.weighted,
    )
    table = dataclasses.replace(table, pooling_factor=pooling, profile=profile)
    return table, distribution


def log_uniform_int(rng: np.random.Generator, low: int, high: int) -> int:
    """Draw a whole number from `low` to `high`, log-uniform."""
    return min(high, max(low, int(_log_uniform(rng, low, high + 1))))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))
