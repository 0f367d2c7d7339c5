"""Draw the table sets to measure, as pure functions of a seed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.measure.draws import (
    RealTables,
    draw_batch_size,
    draw_tables,
    kind_of,
    log_uniform_int,
    with_ids,
)
from torchrec_neuroshard.measure.placing import (
    Room,
    place_shards,
    predict_alone_ms,
    row_bytes,
    split_columns,
)
from torchrec_neuroshard.measure.records import TableSet
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.features import table_features
from torchrec_neuroshard.tables.table import OPTIMIZERS, TableConfig, row_shard

PLAN_SHARE = 1 / 3
"""Share of the sets that are drawn as plans have them."""

_PLAN_TABLES, _PLAN_RANKS, _CHECK_RANKS = (10, 60), (4, 16), (4, 8)
"""Fewest and most tables and ranks of a drawn plan, and ranks of a plan that is
measured on all ranks."""
_ROW_WISE_PLANS, _ROW_SETS = 0.6, 1 / 3
"""Share of the plans with row-wise tables, and share of these that give the set of the
row-wise kernel."""
_MOST_PARTS = 4
"""Most column parts of a table."""
_ROOM, _CHECK_ROOM = 1 / 4, 1 / 32
"""Lookups of a plan, as a share of the most that its ranks' sets may have: column parts
repeat lookups, and a plan that is measured on all ranks should take a few seconds."""
_CHECK_INDEX = 10**9
"""Index of the first plan that is measured on all ranks, beyond any run's sets."""
_SEQUENCE_SAMPLES = 1 / 16, 1 / 4
"""Fewest and most samples of a set of sequences, over those of other sets."""
_VALUES_PER_LOOKUP = 16
"""Most values that a set of sequences returns, per lookup of the largest set."""
_GIB = 2**30
_WEIGHT_SHARE = 0.7
"""Share of a GPU's memory for weights; ids, outputs and the driver need the rest."""
_BYTES_PER_LOOKUP = 1_400
"""Memory per lookup of the largest set: a 141 GB card gets 100 million lookups, whose
ids take a twentieth of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """Ranges to draw table sets from; ranges are inclusive."""

    max_shards: int = 40
    """Most shards in a set."""
    widths: tuple[int, int] = (4, 256)
    """Fewest and most columns of a shard, multiples of 4."""
    batch_sizes: tuple[int, int] = (512, 8_192)
    """Fewest and most samples of a pass."""
    rows: tuple[int, int] = (10, 10_000_000)
    """Fewest and most rows of a generated table; larger real tables are left out."""
    max_lookups: int = 4_000_000
    """Most lookups of a set, so that a sample takes about a second."""
    max_weight_bytes: int = 4 * 2**30
    """Most weight bytes of a set, the arena's size. They include the state of
    Adagrad, as large as fp32 weights, and of Adam, twice as large."""
    plan_share: float = PLAN_SHARE
    """Share of sets that are one rank's tables of a plan."""
    sequence_share: float = 0.1
    """Share of sets whose rows are not pooled: tables of an `EmbeddingCollection`."""
    max_plan_batch: int | None = None
    """Most samples of a plan, over all ranks; None takes the most of `batch_sizes`."""
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
        for name in ("plan_share", "sequence_share"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ConfigError(f"{name} needs 0 to 1, got {share}")
        if self.max_shards < 1 or self.max_lookups < 1:
            raise ConfigError(
                "max_shards and max_lookups must be at least 1, got "
                f"{self.max_shards} and {self.max_lookups}"
            )

    @classmethod
    def for_memory(cls, memory_bytes: int | None) -> Self:
        """Return the default configuration for a device.

        A GPU has tens of times more memory and bandwidth than a CPU, and kernels for
        all optimizers.

        Args:
            memory_bytes: Total memory of a GPU; None: the device is a CPU.
        """
        if memory_bytes is None:
            return cls()
        # From the total memory, not the free one, so a continued run draws the same.
        room = int(_WEIGHT_SHARE * memory_bytes) // _GIB * _GIB
        return cls(
            max_shards=100,
            batch_sizes=(512, 65_536),
            max_plan_batch=524_288,  # 8,192 samples each of 64 ranks
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
    """Draws the table sets of one run; equal arguments give equal sets."""

    def __init__(
        self,
        config: SamplingConfig,
        seed: int,
        base_tables: Sequence[TableConfig],
        estimate: CostModel,
    ) -> None:
        """Split the real tables into training, validation and test tables.

        Tables that differ only by name are on one side, that of the first one's name.

        Args:
            config: Ranges to draw from.
            seed: The run's seed.
            base_tables: Real tables, each with a profile, named "workload/table"; may
                be empty.
            estimate: Rough cost model. It makes cheap sets as frequent as expensive
                ones, and places the shards of plans.
        """
        self._config, self._seed, self._estimate = config, seed, estimate
        shares = config.held_out_share, config.validation_share
        first_names: dict[TableConfig, str] = {}
        parts = defaultdict[str, list[TableConfig]](list)
        for table in base_tables:
            looked_up = table.profile is not None and table.profile.num_lookups > 0
            if looked_up and table.num_embeddings <= config.rows[1]:
                name = first_names.setdefault(kind_of(table), table.name)
                parts[part_of(_draw_by_name(name), shares)].append(table)
        self._real = {part: RealTables(tables) for part, tables in parts.items()}

    def sample(self, index: int) -> SampledSet:
        """Return set number `index` of the run."""
        config = self._config
        repeat_of = repeated_index(index, config.repeat_every, config.repeat_lag)
        source = index if repeat_of is None else repeat_of
        draw = np.random.default_rng([self._seed, source]).random()
        part = part_of(draw, (config.held_out_sets, config.validation_sets))
        rng = np.random.default_rng([self._seed, source, 1])
        is_plan = rng.random() < config.plan_share and self._pools(source)
        found = (self._of_plan if is_plan else self._closest)(source, part, rng)
        return dataclasses.replace(found, index=index, repeat_of=repeat_of)

    def _pools(self, source: int) -> bool:
        """Whether the rows of a set are pooled. Other draws do not depend on it."""
        draw = np.random.default_rng([self._seed, source, 2]).random()
        return bool(draw >= self._config.sequence_share)

    def plan_sets(self, number: int) -> list[SampledSet]:
        """Return the sets of all ranks of a plan of test tables, whole or column-wise.

        The sets' indices are in no run. Row-wise tables are left out: they take equally
        long on all ranks.
        """
        source = _CHECK_INDEX + number * _CHECK_RANKS[1]
        rng = np.random.default_rng([self._seed, source, 1])
        ranks = int(rng.integers(*_CHECK_RANKS, endpoint=True))
        real = self._real.get("test")
        batch_size, tables = self._plan_tables(source, real, rng, ranks, _CHECK_ROOM)
        sets = [
            self._of_rank(source + i, "test", batch_size, shards)
            for i, shards in enumerate(self._place(rng, tables, batch_size, ranks))
            if shards
        ]
        return [dataclasses.replace(found, plan=number) for found in sets]

    def _of_plan(self, source: int, part: str, rng: np.random.Generator) -> SampledSet:
        """Draw a plan and return a set of one of its ranks."""
        ranks = log_uniform_int(rng, *_PLAN_RANKS)
        with_rows = rng.random() < _ROW_WISE_PLANS
        real = self._real_tables(part, rng)
        batch_size, tables = self._plan_tables(source, real, rng, ranks, _ROOM)
        by_rows = set[TableConfig]()
        if with_rows:
            by_rows = _draw_row_wise(rng, tables, ranks, self._config.rows[0])
        others = [table for table in tables if table not in by_rows]
        filled = [s for s in self._place(rng, others, batch_size, ranks) if s]
        chosen = filled[int(rng.integers(len(filled)))]
        if by_rows and rng.random() < _ROW_SETS:
            chosen = [
                row_shard(table, -(-table.num_embeddings // ranks), batch_size)
                for table in tables
                if table in by_rows
            ]
        return self._of_rank(source, part, batch_size, chosen)

    def _closest(self, source: int, part: str, rng: np.random.Generator) -> SampledSet:
        """Draw sets and return the one that is closest to a drawn cost."""
        config = self._config
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
        return found

    def _predict_ms(self, drawn: SampledSet) -> float:
        features_NF = table_features(drawn.tables, drawn.batch_size)
        one_set_N = np.zeros(len(drawn.tables), dtype=np.int64)
        return float(self._estimate.predict_sets(features_NF, one_set_N, 1).sum())

    def _draw(
        self,
        source: int,
        part: str,
        rng: np.random.Generator,
        max_lookups: float | None,
    ) -> SampledSet:
        """Draw a set with tables of one part, with up to `max_lookups` if given."""
        config, pooled = self._config, self._pools(source)
        # Many lookups need many tables and samples.
        reach = math.sqrt((max_lookups or 0.0) / config.max_lookups)
        fewest, most = config.batch_sizes
        if not pooled:
            low, high = _SEQUENCE_SAMPLES
            fewest, most = max(1, int(low * fewest)), max(1, int(high * most))
        batch_size = draw_batch_size(rng, max(fewest, int(reach * most)), most)
        least = max(1, int(reach * config.max_shards))
        num_shards = log_uniform_int(rng, least, config.max_shards)
        if max_lookups is None:
            max_lookups = config.max_lookups * math.exp(-rng.exponential(1.2))
        max_values = math.inf if pooled else _VALUES_PER_LOOKUP * config.max_lookups
        room = Room(max_lookups, config.max_weight_bytes, num_shards)
        real, name = self._real_tables(part, rng), f"generated/{source}"
        drawn: list[tuple[TableConfig, AccessDistribution]] = []
        bases = draw_tables(rng, config, real, name, mixed=True, pooled=pooled)
        for base, exponent in itertools.islice(bases, 4 * num_shards):
            room.lookups = min(room.lookups, max_values / base.embedding_dim)
            if room.take(base, batch_size):
                drawn.append(with_ids(rng, base, exponent, batch_size))
            if not room.shards:
                break
        if not drawn:  # a small table, so that no set is empty
            small = dataclasses.replace(
                base,
                num_embeddings=min(base.num_embeddings, 1000),
                pooling_factor=min(base.pooling_factor, max_lookups / batch_size),
                profile=None,
            )
            drawn.append(with_ids(rng, small, 1.0, batch_size))
        tables, access = zip(*drawn, strict=True)
        return self._set(source, part, batch_size, tables, access)

    def _plan_tables(
        self,
        source: int,
        real: RealTables | None,
        rng: np.random.Generator,
        num_ranks: int,
        room_share: float,
    ) -> tuple[int, list[TableConfig]]:
        """Draw a plan's batch size and tables, of one workload.

        Args:
            source: Number of the draw.
            real: Real tables to draw from; None generates tables.
            rng: Draws the plan.
            num_ranks: Ranks of the plan.
            room_share: Lookups of the tables, as a share of the most that the ranks'
                sets may have.
        """
        config = self._config
        most = max(1, num_ranks * config.max_shards // 2)
        count = min(int(rng.integers(*_PLAN_TABLES, endpoint=True)), most)
        name = f"generated/{source}"
        drawn = draw_tables(rng, config, real, name, mixed=False)
        bases = list(itertools.islice(drawn, count))
        # Jobs of many ranks have large batches.
        low, high = config.batch_sizes
        high = config.max_plan_batch or high
        pooling = sum(base.pooling_factor for base, _ in bases)
        enough = room_share * config.max_lookups * num_ranks / pooling
        most = max(low, min(high, int(enough)))
        batch_size = draw_batch_size(rng, min(math.isqrt(low * high), most), most)
        # So few rows that most sets have room: all tables take up to half of the ranks'
        # memory, and each up to a quarter of one rank's.
        most_bytes = config.max_weight_bytes
        held = sum(row_bytes(base) * base.num_embeddings for base, _ in bases)
        shrink = min(1.0, most_bytes * num_ranks / 2 / held)
        tables = []
        for base, exponent in bases:
            rows = int(shrink * base.num_embeddings)
            rows = min(rows, most_bytes // 4 // row_bytes(base))
            pooling = min(base.pooling_factor, config.max_lookups / batch_size)
            base = dataclasses.replace(
                base, num_embeddings=max(rows, config.rows[0]), pooling_factor=pooling
            )
            tables.append(with_ids(rng, base, exponent, batch_size)[0])
        return batch_size, tables

    def _place(
        self,
        rng: np.random.Generator,
        tables: Sequence[TableConfig],
        batch_size: int,
        num_ranks: int,
    ) -> list[list[TableConfig]]:
        """Return the shards of each rank.

        Tables are split by columns, more often and into more parts if they cost more.
        """
        alone_ms_T = predict_alone_ms(tables, batch_size, self._estimate)
        # Parts of one rank's fair share of the cost, times a factor.
        fair_ms = alone_ms_T.sum() / num_ranks * math.exp(rng.uniform(-1.0, 1.0))
        wanted_T = alone_ms_T / fair_ms * np.exp(rng.normal(0.0, 0.5, len(tables)))
        shards = []
        for table, wanted in zip(tables, wanted_T, strict=True):
            parts = min(math.ceil(wanted), _MOST_PARTS)
            widths = split_columns(table.embedding_dim, parts, self._config.widths[0])
            shards += [table.with_width(width) for width in widths]
        return place_shards(shards, batch_size, num_ranks, self._estimate)

    def _of_rank(
        self, source: int, part: str, batch_size: int, shards: Sequence[TableConfig]
    ) -> SampledSet:
        """Return a set of the shards that fit into it, at least of the first one."""
        config = self._config
        room = Room(config.max_lookups, config.max_weight_bytes, config.max_shards)
        kept = [shard for shard in shards if room.take(shard, batch_size)]
        return self._set(source, part, batch_size, kept or shards[:1])

    def _set(
        self,
        source: int,
        part: str,
        batch_size: int,
        tables: Sequence[TableConfig],
        access: Sequence[AccessDistribution] | None = None,
    ) -> SampledSet:
        return SampledSet(
            index=source,
            seed=(self._seed, source),
            held_out=part == "test",
            validation=part == "validation",
            batch_size=batch_size,
            tables=tuple(
                dataclasses.replace(table, name=f"{table.name}#{i}")
                for i, table in enumerate(tables)
            ),
            access=None if access is None else tuple(access),
        )

    def _real_tables(self, part: str, rng: np.random.Generator) -> RealTables | None:
        """Return a part's real tables, or None to generate tables."""
        is_real = bool(rng.random() < self._config.real_share)
        return self._real.get(part) if is_real else None


def _draw_row_wise(
    rng: np.random.Generator,
    tables: Sequence[TableConfig],
    num_ranks: int,
    least_rows: int,
) -> set[TableConfig]:
    """Draw up to a third of the tables, large ones more often than small ones."""
    rows_T = np.array([table.num_embeddings for table in tables])
    order = np.argsort(-rng.random(len(tables)) * np.log(rows_T + 1), kind="stable")
    able = order[rows_T[order] >= num_ranks * least_rows]
    count = int(rng.integers(len(tables) // 3, endpoint=True))
    return {tables[i] for i in able[:count].tolist()}


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
    """Whether a table's name is among those held out, equally in every run and process.

    `SetSampler` holds out a table and all its twins by the name of the first.
    """
    return _draw_by_name(name) < share


@functools.cache
def _draw_by_name(name: str) -> float:
    """Return a number from 0 to 1 that depends only on the name."""
    digest = 0
    for byte in name.encode():
        digest = (digest * 257 + byte) % 2_147_483_647
    return float(np.random.default_rng(digest).random())
