"""Tables, tasks, table sets and placements that the papers' methods are trained on.

NeuroShard measured up to 100,000 sets and placements. Where fewer were measured,
`label_sets` and `label_placements` draw as many by its rules and take a model's word
for their times. Sets of one optimizer, with fp32 weights and without weighted lookups,
are comparable: the paper measured no others, and its features cannot tell them apart.

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
    PAPER_WIDTHS,
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
LONGEST_OFFSET_MS = 19
"""Longest start offset in NeuroShard's measurements of the all-to-all, from 1 on."""
_MOST_TABLES = 15
"""NeuroShard's measured sets have 1 to 15 tables."""
_MOST_BYTES = 4e9
"""Most fp32 weights of such a set."""
_MOST_DRAWS = 100_000
"""Draws of a set's tables until one is small enough."""
_MEMORY_SLACK = 1.5
"""Memory of a policy's rank over its even share, or over the largest table."""


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
    """The tasks that a policy is trained on and judged by."""

    num_tables: tuple[int, int] = (10, 60)
    """Fewest and most tables of a task."""
    world_sizes: tuple[int, ...] = (2, 4, 6, 8)
    """Numbers of ranks, taken in turn."""
    widths: tuple[int, ...] = power_of_two_widths(128)
    """Drawn evenly for each table."""
    batch_sizes: tuple[int, ...] = (2_048,)
    """Samples over all ranks; one is drawn for each task."""
    optimizers: tuple[str, ...] = ("rowwise_adagrad",)
    """One is drawn for each task."""
    max_rows: tuple[int, ...] = ()
    """A task's longer tables are cut to one of these; empty cuts none."""
    seed: int = 0


def split_tables(
    tables: Sequence[TableConfig], seed: int
) -> tuple[tuple[TableConfig, ...], tuple[TableConfig, ...]]:
    """Split tables into two halves, to train on and to judge by: DreamShard's rule."""
    order = np.random.default_rng(seed).permutation(len(tables))
    half = len(tables) // 2
    training = tuple(tables[i] for i in sorted(order[:half]))
    test = tuple(tables[i] for i in sorted(order[half:]))
    return training, test


def sample_policy_tasks(
    tables: Sequence[TableConfig], config: PolicyTaskConfig, num_tasks: int
) -> tuple[ShardingTask, ...]:
    """Draw tasks of distinct tables."""
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
    """Draw a task's batch size, optimizer and longest tables; limit its memory."""
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
    """The samples that a model labels for NeuroShard's nets."""

    num_samples: int = 100_000
    batch_sizes: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    """Samples over all ranks; each set and placement is at one of these."""
    widths: tuple[int, ...] = PAPER_WIDTHS
    """Every table of the sets is known at each of these."""
    longest_offset_ms: float = LONGEST_OFFSET_MS
    """Longest start offset of a rank; the paper's suits a GPU's costs."""
    seed: int = 0


# Table sets for the net of kernels.


@dataclass(frozen=True, slots=True)
class Sets:
    """Sets of known shards and their times."""

    features_LF: torch.Tensor
    shards_N: Ints
    """Known shard of each set's shards, set after set."""
    counts_S: Ints
    """Shards of each set."""
    total_ms_S: torch.Tensor
    """Forward + backward."""

    def predict(self, net: ComputeNet, sets: Ints) -> torch.Tensor:
        """Return the net's milliseconds of some sets, in the order given."""
        counts = self.counts_S[sets]
        starts = np.cumsum(self.counts_S) - self.counts_S
        skipped = starts[sets] - (np.cumsum(counts) - counts)
        place = np.repeat(skipped, counts) + np.arange(counts.sum())
        ids = torch.from_numpy(np.repeat(np.arange(len(sets)), counts))
        features = self.features_LF[self.shards_N[place]]
        cost: torch.Tensor = net(features, ids, len(sets))
        return cost


def comparable_records(
    records: Iterable[CostRecord], optimizer: str
) -> list[CostRecord]:
    """Return the comparable sets of an optimizer, without repeated measurements."""
    kind = (optimizer, "fp32", False)
    return [
        r
        for r in records
        if r.repeat_of is None
        and all((t.optimizer, t.data_type, t.weighted) == kind for t in r.tables)
    ]


def measured_sets(records: Sequence[CostRecord]) -> Sets:
    """Return measured sets; each of their shards is a known one.

    Raises:
        RecordError: There is no record.
    """
    if not records:
        raise RecordError("no record is of the optimizer's kind, fp32 and unweighted")
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
    """Draw sets by the paper's rule and take their times from a cost model."""
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
    """Draw the tables of a set: 1 to 15 of them, at most 4 GB together.

    A set that is too large has its tables drawn again, not their number.

    Args:
        rng: Source of the draws.
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
    """Whether it is an all-to-all of pooled outputs within one node."""
    within = record.world_size == record.local_world_size
    return within and record.collective.startswith("pooled_")


def measured_samples(
    records: Sequence[CommsRecord], world_size: int, config: LabelConfig
) -> tuple[CommsSamples, CommsSamples]:
    """Return samples of the forward and of the backward all-to-all of one node's ranks.

    The ranks were measured starting together. Forward samples get the start offsets
    that the paper's measurements have, and each rank's wait for the last one.
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
    """Return forward samples whose ranks start one after another.

    The offsets follow the paper: r of 19 values up to the longest, each rank in whole
    steps of a 19th of it below r, minus the smallest.
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
    """Draw the columns of 10 to 59 tables from the paper's widths, as the paper."""
    drawn: Ints = rng.choice(PAPER_WIDTHS, size=(rng.integers(10, 60),))
    return drawn


def label_placements(
    comms_model: CommsModel,
    world_size: int,
    config: LabelConfig,
    draw: Callable[[np.random.Generator], npt.ArrayLike] = draw_columns,
) -> tuple[CommsSamples, CommsSamples]:
    """Draw placements by the paper's rules and take their times from a model.

    Args:
        comms_model: Gives the times.
        world_size: Ranks.
        config: What is drawn.
        draw: Draws the output columns of the tables to be placed.

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
    """Place tables as NeuroShard's measurements do and return each rank's columns.

    A level p is drawn from 0 to 1. Widest first, each table goes to a random rank with
    probability p, else to the rank that has the fewest columns.
    """
    level = rng.random()
    held = np.zeros(world_size)
    for columns in np.sort(np.asarray(columns_T, dtype=np.float64))[::-1]:
        random = rng.random() < level
        held[rng.integers(world_size) if random else held.argmin()] += columns
    return held
