"""Draw the table sets to measure, as pure functions of a seed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.devices import device_bytes
from torchrec_neuroshard.measure.records import TableSet
from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.tables.table import DATA_TYPE_BYTES, OPTIMIZERS, TableConfig

STATE_BYTES = {"adam": 8, "adagrad": 4}
"""Bytes of optimizer state per weight, without row-wise Adagrad's 4 bytes per row."""

_USUAL_WIDTHS = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
_GIB = 2**30
_WEIGHT_SHARE = 0.7
"""Share of a GPU's memory for weights; ids, outputs and the driver need the rest."""
_BYTES_PER_LOOKUP = 1_400
"""A GPU's memory per lookup of the largest set: 100 million lookups on 141 GB, so that
two copies of the ids, and drawing them, take a twentieth of the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """Ranges to draw table sets from; ranges are inclusive."""

    max_shards: int = 40
    """Most shards in a set."""
    widths: tuple[int, int] = (4, 256)
    """Fewest and most columns of a shard."""
    batch_sizes: tuple[int, int] = (512, 8_192)
    """Fewest and most samples of a pass."""
    rows: tuple[int, int] = (10, 10_000_000)
    """Fewest and most rows of a generated table; larger real tables are left out."""
    max_lookups: int = 4_000_000
    """Most lookups of a set, so that a sample takes about a second."""
    max_weight_bytes: int = 4 * 2**30
    """Most weight bytes of a set, the arena's size. They include the state of
    Adagrad, as large as fp32 weights, and of Adam, twice as large."""
    real_share: float = 0.6
    """Share of sets drawn from real tables, if any are given."""
    held_out_share: float = 0.2
    """Share of the tables (not of the sets) held out of training."""
    held_out_sets: float = 0.2
    """Share of the sets made of held-out tables."""
    validation_share: float = 0.1
    """Share of the tables held out to choose between trained models. A set never mixes
    training, validation and test tables."""
    validation_sets: float = 0.1
    """Share of the sets made of validation tables."""
    cost_range_ms: tuple[float, float] = (0.2, 100.0)
    """Range of the sets' costs; log-uniform, if costs are predicted."""
    num_candidates: int = 3
    """Sets drawn for each measured set; the set closest to the wanted cost is kept."""
    optimizers: tuple[str, ...] = ("rowwise_adagrad", "sgd")
    weighted_share: float = 0.1
    """Share of sets with per-sample weights."""
    fp16_share: float = 0.1
    """Share of sets with fp16 weights."""
    repeat_every: int = 20
    """One in this many records measures an earlier set again."""
    repeat_lag: int = 100
    """Fewest records between a set and its repeat."""

    def __post_init__(self) -> None:
        low, high = self.batch_sizes
        if not 0 < low <= high:
            raise ConfigError(f"batch_sizes need 0 < low <= high, got ({low}, {high})")
        if self.max_shards < 1 or self.max_lookups < 1:
            raise ConfigError(
                "max_shards and max_lookups must be at least 1, got "
                f"{self.max_shards} and {self.max_lookups}"
            )

    @classmethod
    def for_device(cls, device: torch.device) -> Self:
        """Return the default configuration for a device.

        A GPU has tens of times more memory and bandwidth than a CPU, and kernels for
        all optimizers.
        """
        memory_bytes = device_bytes(device)
        if memory_bytes is None:
            return cls()
        # From the total memory, not the free one, so a continued run draws the same.
        room = int(_WEIGHT_SHARE * memory_bytes) // _GIB * _GIB
        return cls(
            max_shards=100,
            batch_sizes=(512, 65_536),
            rows=(10, 100_000_000),
            max_lookups=min(100_000_000, max(memory_bytes // _BYTES_PER_LOOKUP, 1)),
            max_weight_bytes=min(100 * 10**9, max(room, 1)),
            optimizers=OPTIMIZERS,
            fp16_share=0.3,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSet(TableSet):
    """One set to measure."""

    seed: tuple[int, ...]
    """Seed of the inputs; a repeated set has the same inputs."""
    access: tuple[AccessDistribution, ...] | None = None
    """Distribution of each table's ids; None follows the profiles."""


def repeated_index(index: int, every: int, lag: int) -> int | None:
    """Return the earlier sample that sample `index` repeats; None if it is a new one.

    Args:
        index: Position in the run.
        every: One in this many samples is a repeat; each repeats another sample.
        lag: Fewest samples between a sample and its repeat.
    """
    if index % every != every - 1:
        return None
    whole_lag = -(-lag // every) * every
    earlier = index - whole_lag - 1 - (index // every) % (every - 1)
    return earlier if earlier >= 0 else None


class SetSampler:
    """Draws the table sets of one run; equal seeds give equal sets."""

    def __init__(
        self,
        config: SamplingConfig,
        seed: int,
        base_tables: Sequence[TableConfig],
        predict_ms: Callable[[SampledSet], float] = lambda drawn: 1.0,
    ) -> None:
        """Split the real tables into training, validation and test tables.

        Args:
            config: Ranges to draw from.
            seed: The run's seed.
            base_tables: Real tables, each with a profile; may be empty.
            predict_ms: Rough cost of a set; it makes cheap sets as frequent as
                expensive ones.
        """
        self._config, self._seed = config, seed
        self._any_given = bool(base_tables)
        self._predict_ms = predict_ms
        self._pools = defaultdict[str, list[TableConfig]](list)
        shares = config.held_out_share, config.validation_share
        for table in base_tables:
            looked_up = table.profile is not None and table.profile.num_lookups > 0
            if looked_up and table.num_embeddings <= config.rows[1]:
                part = part_of(_draw_by_name(table.name), shares)
                self._pools[part].append(table)

    def sample(self, index: int) -> SampledSet:
        """Return set number `index` of the run."""
        config = self._config
        repeat_of = repeated_index(index, config.repeat_every, config.repeat_lag)
        source = index if repeat_of is None else repeat_of
        draw = np.random.default_rng([self._seed, source]).random()
        part = part_of(draw, (config.held_out_sets, config.validation_sets))
        rng = np.random.default_rng([self._seed, source, 1])
        low, high = map(math.log, config.cost_range_ms)
        target, best, most = rng.uniform(low, high), math.inf, None
        for _ in range(config.num_candidates):
            drawn = self._draw(source, part, rng, most)
            ms = max(self._predict_ms(drawn), 1e-9)
            if (distance := abs(math.log(ms) - target)) < best:
                best, found = distance, drawn
            # Scale the next candidate's lookups by the ratio of wanted to found cost.
            lookups = drawn.batch_size * sum(t.pooling_factor for t in drawn.tables)
            most = min(lookups * math.exp(target) / ms, config.max_lookups)
        return dataclasses.replace(found, index=index, repeat_of=repeat_of)

    def _draw(
        self,
        source: int,
        part: str,
        rng: np.random.Generator,
        max_lookups: float | None,
    ) -> SampledSet:
        """Draw a set with tables of one part, with up to `max_lookups` if given."""
        config = self._config
        # Many lookups need many tables and samples.
        reach = math.sqrt((max_lookups or 0.0) / config.max_lookups)
        fewest, most = config.batch_sizes
        fewest = max(fewest, int(reach * most))
        batch_size = _log_uniform_int(rng, fewest, most)
        if rng.random() < 0.5:  # half of the sets have a power of two
            usual_size: int = 2 ** round(math.log2(batch_size))
            low, high = config.batch_sizes
            batch_size = min(max(usual_size, low), high)
        least = max(1, int(reach * config.max_shards))
        num_shards = _log_uniform_int(rng, least, config.max_shards)
        lookup_budget = config.max_lookups * math.exp(-rng.exponential(1.2))
        if max_lookups is not None:
            lookup_budget = max_lookups
        pool = self._pools[part]
        real = self._any_given and bool(rng.random() < config.real_share)
        optimizer = str(rng.choice(config.optimizers))
        weighted = bool(rng.random() < config.weighted_share)
        data_type = "fp16" if rng.random() < config.fp16_share else "fp32"
        if optimizer == "adam":  # FBGEMM's kernel takes no other weights
            data_type = "fp32"
        value_bytes = DATA_TYPE_BYTES[data_type] + STATE_BYTES.get(optimizer, 0)
        draw_width = _width_rule(rng, config)

        tables: list[TableConfig] = []
        access: list[AccessDistribution] = []
        free_bytes = config.max_weight_bytes
        free_lookups = lookup_budget
        for number in range(4 * num_shards):
            if len(tables) == num_shards:
                break
            base, exponent = None, 0.0
            if real and pool:
                base = pool[rng.integers(len(pool))]
                rows, pooling = _vary(rng, base, config)
            else:
                rows, pooling, exponent = _generate(rng, config)
            name = base.name if base else f"generated/{source}/{number}"
            spread = float(rng.choice([0.0, 1.0, 2.0]))
            num_features = 1 if rng.random() < 0.95 else int(rng.integers(2, 5))
            width = draw_width(rng)
            fits = (
                batch_size * pooling <= free_lookups
                and rows * width * value_bytes <= free_bytes
            )
            if not fits:
                if tables or number < 3 * num_shards:
                    continue
                # Last resort: a small table, so that no set is empty.
                rows, base, exponent = min(rows, 1000), None, 1.0
                pooling = min(pooling, lookup_budget / batch_size)
            free_bytes -= rows * width * value_bytes
            free_lookups -= batch_size * pooling
            if base is not None and base.profile is not None:
                distribution = AccessDistribution.from_profile(base.profile, rows)
            else:
                distribution = AccessDistribution.power_law(rows, exponent)
            std = spread * math.sqrt(pooling / num_features)
            histogram = distribution.histogram(batch_size * pooling)
            pooling, std, *bins = _short_numbers((pooling, std, *histogram))
            profile = FeatureProfile(
                batch_size=batch_size,
                num_lookups=batch_size * pooling,
                pooling_std=std,
                access_histogram=tuple(bins),
                weighted=weighted,
            )
            table = TableConfig(
                name=f"{name}#{len(tables)}",
                num_embeddings=rows,
                embedding_dim=width,
                pooling_factor=pooling,
                num_features=num_features,
                profile=profile,
                weighted=weighted,
                data_type=data_type,
                optimizer=optimizer,
            )
            tables.append(table)
            access.append(distribution)
        return SampledSet(
            index=source,
            seed=(self._seed, source),
            held_out=part == "test",
            validation=part == "validation",
            batch_size=batch_size,
            tables=tuple(tables),
            access=tuple(access),
        )


def _short_numbers(values: Sequence[float]) -> list[float]:
    """Round to 11 significant bits: errors up to 0.05 %, files half as large."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    kept = (bits + np.uint32(1 << 12)) & np.uint32(0xFFFF_E000)
    rounded: list[float] = kept.view(np.float32).tolist()
    return rounded


def _log_uniform_int(rng: np.random.Generator, low: int, high: int) -> int:
    value = math.exp(rng.uniform(math.log(low), math.log(high + 1)))
    return min(high, max(low, int(value)))


def part_of(draw: float, shares: tuple[float, float]) -> str:
    """Return "test", "validation" or "train" for a draw.

    Args:
        draw: A number from 0 to 1.
        shares: Shares of "test" and "validation"; the rest is "train".
    """
    test, validation = shares
    if draw < test:
        return "test"
    return "validation" if draw < test + validation else "train"


def is_held_out_table(name: str, share: float) -> bool:
    """Whether a table is among the tables held out of all cost models' training.

    Tables are split by name, equally in every run and process.
    """
    return _draw_by_name(name) < share


@functools.cache
def _draw_by_name(name: str) -> float:
    """Return a number from 0 to 1 that depends only on the name."""
    digest = 0
    for byte in name.encode():
        digest = (digest * 257 + byte) % 2_147_483_647
    return float(np.random.default_rng(digest).random())


def _width_rule(
    rng: np.random.Generator, config: SamplingConfig
) -> Callable[[np.random.Generator], int]:
    """Return the function that draws the widths of one set."""
    low, high = config.widths
    kind = rng.choice(["one", "usual", "any"], p=[0.3, 0.3, 0.4])
    usual = [w for w in _USUAL_WIDTHS if low <= w <= high] or [low]
    if kind == "any":
        widest = range(low, high + 1, 4)[-1]
        logs = math.log(low), math.log(widest)
        return lambda rng: max(low, round(math.exp(rng.uniform(*logs)) / 4) * 4)
    if kind == "one":
        usual = [int(rng.choice(usual))]
    return lambda rng: usual[rng.integers(len(usual))]


def _vary(
    rng: np.random.Generator, base: TableConfig, config: SamplingConfig
) -> tuple[int, float]:
    """Draw rows and pooling factor of a variant of a real table."""
    rows = int(base.num_embeddings * math.exp(rng.normal(0.0, 0.3)))
    pooling = base.pooling_factor * math.exp(rng.normal(0.0, 0.3))
    return min(max(rows, config.rows[0]), config.rows[1]), pooling


def _generate(
    rng: np.random.Generator, config: SamplingConfig
) -> tuple[int, float, float]:
    """Draw rows, pooling factor and power-law exponent of a generated table."""
    rows = _log_uniform_int(rng, *config.rows)
    pooling = math.exp(rng.uniform(math.log(0.2), math.log(200.0)))
    if rng.random() < 0.4:
        pooling = 1.0
    exponent = 0.0 if rng.random() < 0.15 else float(rng.uniform(0.5, 1.4))
    return rows, pooling, exponent
