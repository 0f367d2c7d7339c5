"""Training data of the papers' methods: tables, tasks, table sets and placements.

NeuroShard measured up to 100,000 sets and placements. To train on as many without
measuring them, `label_sets` and `label_placements` draw them by NeuroShard's rules, and
a model predicts their times. Only sets with one optimizer, fp32 weights and no weighted
lookups are comparable: the paper measured only these, and its features cannot tell
other sets from them.

Shapes: `N` shards, `L` known shards, `S` sets or placements, `T` tables, `W` ranks, `I`
inputs of a collective's net (2W forward, W backward).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from harness.dlrm_tables import generate_dlrm_tables
from harness.tasks import (
    TaskConfig,
    cap_rows,
    power_of_two_widths,
    sample_tasks,
)
from torchrec_neuroshard.costs.task import ShardingTask, format_bytes
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.measure.records import CommsRecord, CostRecord
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.papers.common import PAPER_BATCH_SIZE
from torchrec_neuroshard.papers.neuroshard_models import (
    PAPER_FEATURES,
    ComputeNet,
    columns_in_paper_batch,
    shard_features,
)
from torchrec_neuroshard.tables.features import ShardFeaturizer
from torchrec_neuroshard.tables.loaders import load_json
from torchrec_neuroshard.tables.table import TableConfig

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DIM = PAPER_FEATURES.index("dim")
PAPER_WIDTHS = (128, 64, 32, 16, 8, 4)
"""Widths in which NeuroShard trains every table: 856 tables become 5,136."""
LONGEST_OFFSET_MS = 19
"""Largest start offset in NeuroShard's measurements of the all-to-all, in steps."""
_MOST_TABLES = 15
"""NeuroShard's measured sets have 1 to 15 tables."""
_MOST_BYTES = 4e9
"""Most bytes of fp32 weights in a measured set of NeuroShard."""
_MOST_DRAWS = 100_000
"""Maximum number of draws of a set's tables."""
_MEMORY_SLACK = 1.5
"""Memory of a rank, relative to its even share or to the largest table."""


def read_tables(
    path: Path | None, workloads: Sequence[str], seed: int
) -> tuple[TableConfig, ...]:
    """Return the tables of a file's sets, or tables generated like the DLRM dataset.

    Args:
        path: JSON of table sets; None generates the tables.
        workloads: Names of the sets to take; empty takes all.
        seed: Seed of the generator.
    """
    if path is None:
        return generate_dlrm_tables(seed)
    sets = load_json(path)
    if missing := set(workloads) - set(sets):
        raise ConfigError(f"{path} has no workload '{min(missing)}'; it has {[*sets]}")
    return tuple(t for name in workloads or sets for t in sets[name])


# Tasks for the policies.


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTaskConfig:
    """Training and test tasks of a policy."""

    num_tables: tuple[int, int] = (10, 60)
    """Fewest and most tables of a task."""
    world_sizes: tuple[int, ...] = (2, 4, 6, 8)
    """Numbers of ranks, taken in turn."""
    widths: tuple[int, ...] = power_of_two_widths(128)
    """Widths, drawn evenly for each table."""
    batch_sizes: tuple[int, ...] = (2_048,)
    """Samples over all ranks, drawn for each task."""
    optimizers: tuple[str, ...] = ("rowwise_adagrad",)
    """Optimizers, drawn for each task."""
    max_rows: tuple[int, ...] = ()
    """Most rows of a table, drawn for each task. Empty: tables stay whole."""
    seed: int = 0


def split_tables(
    tables: Sequence[TableConfig], seed: int
) -> tuple[tuple[TableConfig, ...], tuple[TableConfig, ...]]:
    """Return two random halves of the tables, for training and test, as DreamShard."""
    order = np.random.default_rng(seed).permutation(len(tables))
    half = len(tables) // 2
    training = tuple(tables[i] for i in sorted(order[:half]))
    test = tuple(tables[i] for i in sorted(order[half:]))
    return training, test


def sample_policy_tasks(
    tables: Sequence[TableConfig], config: PolicyTaskConfig, num_tasks: int
) -> tuple[ShardingTask, ...]:
    """Return random tasks of distinct tables."""
    sizes = config.world_sizes
    per_size = [
        sample_tasks(
            tables,
            TaskConfig(
                world_size=size,
                batch_size=config.batch_sizes[0],
                num_tables=config.num_tables,
                widths=config.widths,
                seed=config.seed * len(sizes) + number,
            ),
            -(-num_tasks // len(sizes)),
        )
        for number, size in enumerate(sizes)
    ]
    mixed = [task for turn in zip(*per_size, strict=True) for task in turn]
    rng = np.random.default_rng(config.seed)
    return tuple(_varied(t, config, rng) for t in mixed[:num_tasks])


def _varied(
    task: ShardingTask, config: PolicyTaskConfig, rng: np.random.Generator
) -> ShardingTask:
    """Return a task with random batch size, optimizer and row cap, and with memory."""
    batch_size = int(rng.choice(config.batch_sizes))
    optimizer = str(rng.choice(config.optimizers))
    tables = task.tables
    if config.max_rows:
        rows = int(rng.choice(config.max_rows))
        tables = tuple(cap_rows(t, rows) for t in tables)
    task = dataclasses.replace(
        task,
        batch_size=batch_size,
        tables=tuple(dataclasses.replace(t, optimizer=optimizer) for t in tables),
        column_bytes=(),
    )
    held = [task.shard_bytes(i, t.embedding_dim) for i, t in enumerate(task.tables)]
    cap = int(_MEMORY_SLACK * max(sum(held) / task.world_size, *held))
    return dataclasses.replace(task, memory_bytes=(cap,) * task.world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelConfig:
    """Random samples for NeuroShard's nets, labelled by a model."""

    num_samples: int = 100_000
    batch_sizes: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    """Samples over all ranks, drawn for each set and placement."""
    widths: tuple[int, ...] = PAPER_WIDTHS
    """Widths of the sets' tables. Every table comes in each of them."""
    longest_offset_ms: float = LONGEST_OFFSET_MS
    """Longest start offset of a rank [ms]. The default is the paper's, for GPUs."""
    seed: int = 0


# Table sets for the net of kernels.


@dataclass(frozen=True, slots=True)
class Sets:
    """Table sets, as indices into known shards, and their times."""

    features_LF: torch.Tensor
    shards_N: Ints
    """Index of each shard in `features_LF`, set after set."""
    counts_S: Ints
    """Number of shards of each set."""
    total_ms_S: torch.Tensor
    """Forward + backward."""

    def predict(self, net: ComputeNet, sets: Ints) -> torch.Tensor:
        """Return the net's predictions for some sets, in the given order [ms]."""
        counts = self.counts_S[sets]
        starts = np.cumsum(self.counts_S) - self.counts_S
        skipped = starts[sets] - (np.cumsum(counts) - counts)
        place = np.repeat(skipped, counts) + np.arange(counts.sum())
        ids = torch.from_numpy(np.repeat(np.arange(len(sets)), counts))
        features = self.features_LF[self.shards_N[place]]
        encoded = net.encode(features)
        sums = encoded.new_zeros(len(sets), encoded.shape[1])
        return net.cost(sums.index_add(0, ids, encoded))


def comparable_records(
    records: Iterable[CostRecord], optimizer: str
) -> list[CostRecord]:
    """Return an optimizer's comparable records, without repeated measurements."""
    kind = (optimizer, "fp32", False)
    return [
        r
        for r in records
        if r.repeat_of is None
        and all((t.optimizer, t.data_type, t.weighted) == kind for t in r.tables)
    ]


def measured_sets(records: Sequence[CostRecord]) -> Sets:
    """Return measured sets; every shard of theirs is a known shard.

    Raises:
        RecordError: There is no record.
    """
    if not records:
        raise RecordError(
            "no record has the optimizer, fp32 weights and unweighted lookups; measure "
            "such sets or choose another --optimizer"
        )
    counts = np.array([len(r.tables) for r in records], dtype=np.int64)
    features = [shard_features(r.tables, r.batch_size) for r in records]
    return Sets(
        torch.from_numpy(np.concatenate(features)),
        np.arange(counts.sum()),
        counts,
        torch.tensor([r.total_ms for r in records], dtype=torch.float32),
    )


def label_sets(
    cost_model: CostModel, tables: Sequence[TableConfig], config: LabelConfig
) -> Sets:
    """Return random sets by the paper's rule, with times of a cost model."""
    widths, batch_sizes = config.widths, config.batch_sizes
    table_L = np.repeat(np.arange(len(tables)), len(widths))
    width_L = np.tile(widths, len(tables))
    rows_L = np.array([t.num_embeddings for t in tables])[table_L]
    num_samples = config.num_samples
    rng = np.random.default_rng([config.seed, num_samples])
    drawn = [draw_set(rng, 4.0 * rows_L * width_L) for _ in range(num_samples)]
    batch_S = rng.integers(len(batch_sizes), size=num_samples)
    counts_S = np.array([len(d) for d in drawn])
    set_N = np.repeat(np.arange(num_samples), counts_S)
    shards_N = np.concatenate(drawn)
    sums = np.zeros((num_samples, cost_model.encoding_dim))
    features = []
    for number, batch_size in enumerate(batch_sizes):
        featurizer = ShardFeaturizer(tables, batch_size)
        encodings = cost_model.encode(featurizer.features(table_L, width_L))
        mine = batch_S[set_N] == number
        np.add.at(sums, set_N[mine], encodings[shards_N[mine]])
        features.append(shard_features(tables, batch_size)[table_L])
        features[-1][:, DIM] = width_L
    return Sets(
        torch.from_numpy(np.concatenate(features)),
        shards_N + len(table_L) * batch_S[set_N],
        counts_S,
        torch.from_numpy(cost_model.predict_sums(sums).sum(axis=1)).float(),
    )


def draw_set(rng: np.random.Generator, size_L: Floats) -> Ints:
    """Return the shards of a random set: 1 to 15 of them, at most 4 GB together.

    A set that is too large is drawn again with the same number of shards.

    Args:
        rng: Random generator.
        size_L: Bytes of each known shard.

    Raises:
        ConfigError: No draw is small enough.
    """
    count = int(rng.integers(1, _MOST_TABLES + 1))
    for _ in range(_MOST_DRAWS):
        drawn: Ints = rng.integers(len(size_L), size=(count,))
        if size_L[drawn].sum() <= _MOST_BYTES:
            return drawn
    raise ConfigError(
        f"{_MOST_DRAWS:,} draws of {count} tables all hold more than "
        f"{format_bytes(_MOST_BYTES)}; lower --max-rows or --widths"
    )


# Placements for the nets of collectives.


@dataclass(frozen=True, slots=True)
class CommsSamples:
    """Inputs and times of one all-to-all."""

    inputs_SI: Floats
    target_SW: Floats
    """Milliseconds of each rank."""


def is_pooled(record: CommsRecord) -> bool:
    """Return whether a record is a pooled all-to-all inside one node."""
    within = record.world_size == record.local_world_size
    return within and record.collective.startswith("pooled_")


def measured_samples(
    records: Sequence[CommsRecord], world_size: int, config: LabelConfig
) -> tuple[CommsSamples, CommsSamples]:
    """Return measured samples of the forward and of the backward all-to-all.

    All ranks started together when they were measured. Forward samples get start
    offsets like the paper's, and each rank's wait for the last one is added.
    """
    samples = []
    for name in ("pooled_forward", "pooled_backward"):
        chosen = [
            r
            for r in records
            if (r.collective, r.world_size) == (name, world_size)
            and is_pooled(r)
            and r.repeat_of is None
        ]
        shape = len(chosen), world_size
        sent = np.reshape([r.bytes_per_peer for r in chosen], shape)
        columns = sent * (world_size / (4 * PAPER_BATCH_SIZE))
        transfer = np.reshape([r.transfer_ms for r in chosen], shape)
        samples.append(CommsSamples(columns, transfer))
    forward, backward = samples
    rng = np.random.default_rng([config.seed, world_size])
    return _with_offsets(forward, rng, config), backward


def _with_offsets(
    samples: CommsSamples, rng: np.random.Generator, config: LabelConfig
) -> CommsSamples:
    """Return forward samples whose ranks start at different times.

    As in the paper, offsets are whole steps of a 19th of the longest offset. A limit
    of 1 to 19 steps is drawn per sample, each rank draws an offset below it, and the
    smallest offset is subtracted.
    """
    shape = samples.target_SW.shape
    steps = rng.integers(1, LONGEST_OFFSET_MS + 1, size=(len(samples.target_SW), 1))
    offsets = np.floor(rng.random(shape) * steps)
    offsets *= config.longest_offset_ms / LONGEST_OFFSET_MS
    offsets -= offsets.min(axis=1, keepdims=True)
    wait = offsets.max(axis=1, keepdims=True) - offsets
    inputs = np.concatenate([samples.inputs_SI, offsets], axis=1)
    return CommsSamples(inputs, wait + samples.target_SW)


def draw_columns(rng: np.random.Generator) -> Ints:
    """Return the columns of 10 to 59 random tables, as in the paper."""
    drawn: Ints = rng.choice(PAPER_WIDTHS, size=(rng.integers(10, 60),))
    return drawn


def label_placements(
    comms_model: CommsModel,
    world_size: int,
    config: LabelConfig,
    draw: Callable[[np.random.Generator], npt.ArrayLike] = draw_columns,
) -> tuple[CommsSamples, CommsSamples]:
    """Return random placements by the paper's rules, with times of a model.

    Args:
        comms_model: Predicts the times.
        world_size: Number of ranks.
        config: Settings of the samples.
        draw: Draws the output columns of a placement's tables.

    Returns:
        Samples of the forward and of the backward all-to-all.
    """
    num_samples, batch_sizes = config.num_samples, config.batch_sizes
    rng = np.random.default_rng([config.seed, world_size, num_samples])
    held = np.array(
        [place_at_random_level(rng, draw(rng), world_size) for _ in range(num_samples)]
    )
    batch_S = rng.integers(len(batch_sizes), size=num_samples)
    transfer, columns = np.zeros((num_samples, world_size, 2)), np.zeros(held.shape)
    for number, batch_size in enumerate(batch_sizes):
        mine = batch_S == number
        transfer[mine] = comms_model.all_to_all(held[mine], batch_size)
        columns[mine] = columns_in_paper_batch(held[mine], batch_size)
    forward = CommsSamples(columns, transfer[..., 0])
    backward = CommsSamples(columns, transfer[..., 1])
    return _with_offsets(forward, rng, config), backward


def place_at_random_level(
    rng: np.random.Generator, columns_T: npt.ArrayLike, world_size: int
) -> Floats:
    """Return each rank's columns after a random placement, as in NeuroShard.

    A level p from 0 to 1 is drawn. Widest first, each table goes to a random rank with
    probability p, otherwise to the rank with the fewest columns.
    """
    level = rng.random()
    held = np.zeros(world_size)
    for columns in np.sort(np.asarray(columns_T, dtype=np.float64))[::-1]:
        random = rng.random() < level
        held[rng.integers(world_size) if random else held.argmin()] += columns
    return held
