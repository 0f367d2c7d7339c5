"""How NeuroShard's nets are trained: on measurements, or on another model's word.

The paper's recipe: Adam on the mean squared error of milliseconds, the best epoch by
samples kept apart. The paper measured up to 100,000 samples for each net. Where so many
were not measured, the nets can be trained to imitate models that generalise better from
few: samples are drawn by the paper's rules and a `CostModel` and a `CommsModel` label
them. The measured records then judge both.

Where the sources at hand are silent: samples are split at random (seeded), and of a
comms record measured twice the first one is taken.

Shapes: `N` shards, `L` known shards, `S` sets or samples, `W` ranks, `I` inputs of a
comms net (2W forward, W backward).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchrec_neuroshard.baselines.common import PAPER_BATCH_SIZE
from torchrec_neuroshard.baselines.neuroshard_models import (
    PAPER_FEATURES,
    PAPER_WIDTHS,
    CommsNets,
    ComputeNet,
    RankTimesNet,
    columns_in_paper_batch,
    shard_features,
)
from torchrec_neuroshard.cost_models.base import CommsModel, CostModel
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.features import ShardFeaturizer
from torchrec_neuroshard.placement import format_bytes
from torchrec_neuroshard.records import CommsRecord, CostRecord
from torchrec_neuroshard.tables import OPTIMIZERS, TableConfig
from torchrec_neuroshard.training.fit import fit, seeded, shuffled_batches

__all__ = [
    "CommsSamples",
    "FitReport",
    "PaperTrainConfig",
    "comparable_records",
    "draw_columns",
    "draw_set",
    "fit_comms",
    "fit_comms_to_model",
    "fit_compute",
    "fit_compute_to_model",
    "is_pooled",
    "measured_samples",
    "place_at_random_level",
    "predict_records",
    "split_samples",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_DIM = PAPER_FEATURES.index("dim")
_STD_FLOOR = 1e-6
"""Added to every standard deviation."""
_MOST_TABLES = 15
"""Tables of NeuroShard's measured sets: 1 to this."""
_MOST_BYTES = 4e9
"""Their memory, fp32."""
_MOST_DRAWS = 100_000
"""Of a set's tables, until one is small enough."""
_NUM_TABLES = (10, 59)
"""Tables of the placements whose all-to-all NeuroShard measured."""
_LONGEST_OFFSET_MS = 19
"""Longest start offset in NeuroShard's measurements of the all-to-all, from 1 on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTrainConfig:
    """NeuroShard's recipe: Adam on the mean squared error of milliseconds."""

    epochs: int = 1_000
    batch_samples: int = 512
    learning_rate: float = 1e-3
    max_samples: int = 100_000
    """Only the first ones are used."""
    validation_share: float = 0.1
    """Picks the best epoch."""
    test_share: float = 0.1
    """Only judged."""
    optimizer: str = "sgd"
    """Sets with this optimizer, fp32 weights and no weighted lookups are trained on:
    the paper measured no other, and its features cannot tell them apart."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch_samples, self.max_samples) < 1:
            raise ConfigError(
                "epochs, batch_samples and max_samples must be at least 1, got "
                f"{self.epochs}, {self.batch_samples}, {self.max_samples}"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"unknown optimizer '{self.optimizer}'; one of {', '.join(OPTIMIZERS)}"
            )
        shares = (self.validation_share, self.test_share)
        if min(shares) <= 0 or sum(shares) >= 1:
            raise ConfigError(
                "validation_share and test_share must be above 0 and below 1 together, "
                f"got {shares}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """How one net was trained, and how well it does on samples kept apart."""

    num_training: int
    num_validation: int
    num_test: int
    best_epoch: int
    """Counted from 1."""
    validation_mse: float
    """Best [ms^2]."""
    test_mse: float
    mean_test_mse: float
    """Of predicting the training samples' mean for all."""


def split_samples(
    count: int, config: PaperTrainConfig, what: str
) -> tuple[Ints, Ints, Ints]:
    """Training, validation and test samples."""
    count = min(count, config.max_samples)
    num_validation = max(1, int(count * config.validation_share))
    num_test = max(1, int(count * config.test_share))
    if count - num_validation - num_test < 1:
        raise RecordError(f"{count} {what} are too few to train on; measure more")
    order = np.random.default_rng(config.seed).permutation(count)
    apart = num_validation + num_test
    return order[apart:], order[:num_validation], order[num_validation:apart]


def _fit(
    net: nn.Module,
    predict: Callable[[Ints], torch.Tensor],
    target: torch.Tensor,
    parts: tuple[Ints, Ints, Ints],
    config: PaperTrainConfig,
) -> FitReport:
    """Train by the recipe and keep the weights of the best epoch."""
    training, validation, test = parts

    def mse(samples: Ints) -> torch.Tensor:
        return nn.functional.mse_loss(predict(samples), target[samples])

    rng = np.random.default_rng([config.seed, 1])
    best = fit(
        net,
        torch.optim.Adam(net.parameters(), lr=config.learning_rate),
        shuffled_batches(rng, training, config.batch_samples, config.epochs),
        mse,
        lambda epoch, losses: mse(validation),
    )
    net.eval()
    mean = target[training].mean(dim=0)
    with torch.no_grad():
        test_mse = float(mse(test))
    return FitReport(
        num_training=len(training),
        num_validation=len(validation),
        num_test=len(test),
        best_epoch=int(best.epoch),
        validation_mse=float(best.error),
        test_mse=test_mse,
        mean_test_mse=float((target[test] - mean).square().mean()),
    )


@dataclass(frozen=True, slots=True)
class _Sets:
    """Sets of known shards, and what each takes."""

    features_LF: torch.Tensor
    shards_N: Ints
    """Known shard of each set's shards, set after set."""
    counts_S: Ints
    """Shards of each set."""
    total_ms_S: torch.Tensor
    """Forward + backward."""

    @classmethod
    def of_records(cls, records: Sequence[CostRecord]) -> _Sets:
        """Return measured sets, their shards all different."""
        counts = np.array([len(r.tables) for r in records], dtype=np.int64)
        features = [shard_features(r.tables, r.batch_size) for r in records]
        return cls(
            torch.from_numpy(np.concatenate(features)),
            np.arange(counts.sum()),
            counts,
            torch.tensor([r.total_ms for r in records], dtype=torch.float32),
        )

    def predict(self, net: ComputeNet, sets: Ints) -> torch.Tensor:
        """Milliseconds of some sets, in the order given."""
        counts = self.counts_S[sets]
        starts = np.cumsum(self.counts_S) - self.counts_S
        skipped = starts[sets] - (np.cumsum(counts) - counts)
        place = np.repeat(skipped, counts) + np.arange(counts.sum())
        ids = torch.from_numpy(np.repeat(np.arange(len(sets)), counts))
        features = self.features_LF[self.shards_N[place]]
        cost: torch.Tensor = net(features, ids, len(sets))
        return cost


def fit_compute(
    records: Sequence[CostRecord], config: PaperTrainConfig | None = None
) -> tuple[ComputeNet, FitReport]:
    """Train the compute net on measured sets.

    Features are standardised by their mean and standard deviation over the tables of
    all sets at each of `PAPER_WIDTHS`, as in the paper, whatever widths they have.

    Args:
        records: Measured sets; see `comparable_records` for those that are taken.
        config: The recipe; None is the paper's.

    Raises:
        RecordError: Too few records.
    """
    config = config or PaperTrainConfig()
    records = comparable_records(records, config.optimizer)[: config.max_samples]
    parts = split_samples(len(records), config, f"sets with {config.optimizer}, fp32")
    sets = _Sets.of_records(records)
    return _fit_compute(sets, _statistics(sets.features_LF), parts, config)


def _fit_compute(
    sets: _Sets,
    statistics: tuple[torch.Tensor, torch.Tensor],
    parts: tuple[Ints, Ints, Ints],
    config: PaperTrainConfig,
) -> tuple[ComputeNet, FitReport]:
    with seeded(config.seed):
        net = ComputeNet()
        net.mean_F.copy_(statistics[0])
        net.std_F.copy_(statistics[1])
        report = _fit(
            net,
            lambda chosen: sets.predict(net, chosen),
            sets.total_ms_S,
            parts,
            config,
        )
    return net, report


def fit_compute_to_model(
    cost_model: CostModel,
    tables: Sequence[TableConfig],
    *,
    batch_sizes: Sequence[int],
    num_samples: int,
    config: PaperTrainConfig,
    widths: Sequence[int] = (),
) -> tuple[ComputeNet, FitReport]:
    """Train the compute net on another model's predictions instead of measurements.

    Sets are drawn by the paper's rule: 1 to 15 of the augmented tables, one as often as
    it comes; one of more than 4 GB has its tables drawn again, not their number.

    Args:
        cost_model: Gives the labels.
        tables: To be augmented.
        batch_sizes: Samples over all ranks; each set is at one of these. The paper
            knows one.
        num_samples: Sets to label.
        config: The recipe.
        widths: That each table is augmented to; empty is the paper's.

    Raises:
        ConfigError: No draw of a number of tables stays below 4 GB.
    """
    tables = [dataclasses.replace(t, optimizer=config.optimizer) for t in tables]
    widths = widths or PAPER_WIDTHS
    table_L = np.repeat(np.arange(len(tables)), len(widths))
    width_L = np.tile(widths, len(tables))
    rows_L = np.array([t.num_embeddings for t in tables])[table_L]
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
        features[-1][:, _DIM] = width_L
    features_LF = torch.from_numpy(np.concatenate(features))
    total = cost_model.predict_sums(sums).sum(axis=1)
    sets = _Sets(
        features_LF,
        shards_N + len(table_L) * batch_S[set_N],
        counts_S,
        torch.from_numpy(total).float(),
    )
    statistics = _mean_and_deviation(features_LF.double())
    parts = split_samples(num_samples, config, "labelled sets")
    return _fit_compute(sets, statistics, parts, config)


def draw_set(rng: np.random.Generator, size_L: Floats) -> Ints:
    """Draw the tables of a set: 1 to 15 by numbers, 4 GB together at most.

    Args:
        rng: Source of the draws.
        size_L: Bytes of each table.

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


def comparable_records(
    records: Iterable[CostRecord], optimizer: str
) -> list[CostRecord]:
    """Return the sets of one optimizer with fp32 weights and without weighted lookups.

    A set measured again is left out.
    """
    kind = (optimizer, "fp32", False)
    return [
        r
        for r in records
        if r.repeat_of is None
        and all((t.optimizer, t.data_type, t.weighted) == kind for t in r.tables)
    ]


def _statistics(features_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation over the shards at each of the augmented widths."""
    every = features_NF.double().repeat_interleave(len(PAPER_WIDTHS), dim=0)
    every[:, _DIM] = torch.tensor(PAPER_WIDTHS).double().repeat(len(features_NF))
    return _mean_and_deviation(every)


def _mean_and_deviation(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    deviation = inputs.std(dim=0, correction=0)
    # Small batches fill no table's last bins: what never varies is not scaled.
    deviation = torch.where(deviation < _STD_FLOOR, 1.0, deviation)
    return inputs.mean(dim=0), deviation + _STD_FLOOR


def predict_records(net: ComputeNet, records: Sequence[CostRecord]) -> Floats:
    """Predict forward + backward of measured sets, `S` [ms]."""
    with torch.inference_mode():
        cost = _Sets.of_records(records).predict(net, np.arange(len(records)))
    return cost.double().numpy()


@dataclass(frozen=True, slots=True)
class CommsSamples:
    """What a net of one all-to-all is trained on."""

    inputs_SI: Floats
    target_SW: Floats
    """Milliseconds of each rank."""


def is_pooled(record: CommsRecord) -> bool:
    """Whether it is an all-to-all of pooled outputs within one node."""
    within = record.world_size == record.local_world_size
    return within and record.collective.startswith("pooled_")


def measured_samples(
    records: Sequence[CommsRecord], world_size: int, collective: str
) -> CommsSamples:
    """Samples of a pooled all-to-all over all ranks of one node.

    Ranks start together: the offsets that forward samples have are 0.
    """
    chosen = [
        r
        for r in records
        if r.collective == collective
        and r.world_size == world_size
        and is_pooled(r)
        and r.repeat_of is None
    ]
    sent = np.array([r.bytes_per_peer for r in chosen], dtype=np.float64)
    columns = sent.reshape(-1, world_size) * (world_size / (4 * PAPER_BATCH_SIZE))
    transfer = np.array([r.transfer_ms for r in chosen]).reshape(-1, world_size)
    if collective == "pooled_backward":
        return CommsSamples(columns, transfer)
    return _with_offsets(columns, np.zeros_like(transfer), transfer)


def _with_offsets(columns: Floats, wait: Floats, transfer: Floats) -> CommsSamples:
    """Forward samples: a rank starts after the first by what that one waits more."""
    offsets = wait.max(axis=1, keepdims=True) - wait
    return CommsSamples(np.concatenate([columns, offsets], axis=1), wait + transfer)


def _fit_ranks(
    net: RankTimesNet, samples: CommsSamples, config: PaperTrainConfig, what: str
) -> FitReport:
    parts = split_samples(len(samples.target_SW), config, what)
    inputs = torch.from_numpy(samples.inputs_SI)
    mean, deviation = _mean_and_deviation(inputs)
    net.mean_I.copy_(mean)
    net.std_I.copy_(deviation)
    single = inputs.float()
    target = torch.from_numpy(samples.target_SW).float()
    return _fit(net, lambda chosen: net(single[chosen]), target, parts, config)


def _fit_nets(
    world_size: int,
    forward: CommsSamples,
    backward: CommsSamples,
    config: PaperTrainConfig,
) -> tuple[CommsNets, FitReport, FitReport]:
    with seeded(config.seed):
        nets = CommsNets.fresh(world_size)
        what = f"samples of the {{}} all-to-all of {world_size} ranks"
        return (
            nets,
            _fit_ranks(nets.forward, forward, config, what.format("forward")),
            _fit_ranks(nets.backward, backward, config, what.format("backward")),
        )


def fit_comms(
    records: Sequence[CommsRecord],
    world_size: int,
    config: PaperTrainConfig | None = None,
) -> tuple[CommsNets, FitReport, FitReport]:
    """Train the two nets of one number of ranks on measured collectives.

    Args:
        records: Those of other collectives, groups and sizes are left out.
        world_size: Ranks, all on one node.
        config: The recipe; None is the paper's.

    Returns:
        The nets and what is known of the forward and of the backward one.

    Raises:
        RecordError: Too few records of this number of ranks.
    """
    return _fit_nets(
        world_size,
        measured_samples(records, world_size, "pooled_forward"),
        measured_samples(records, world_size, "pooled_backward"),
        config or PaperTrainConfig(),
    )


def place_at_random_level(
    rng: np.random.Generator, columns_T: npt.ArrayLike, world_size: int
) -> Floats:
    """Place tables as NeuroShard's measurements do and return each rank's columns.

    A level p is drawn from 0 to 1; widest first, each table goes to a random rank with
    probability p, else to the rank that has the fewest columns.

    Args:
        rng: Source of the draws.
        columns_T: Columns of the tables.
        world_size: Ranks.
    """
    level = rng.random()
    held = np.zeros(world_size)
    for columns in np.sort(np.asarray(columns_T, dtype=np.float64))[::-1]:
        random = rng.random() < level
        held[rng.integers(world_size) if random else held.argmin()] += columns
    return held


def draw_columns(rng: np.random.Generator) -> Ints:
    """Draw the columns of 10 to 59 tables from the augmented widths, as the paper."""
    low, high = _NUM_TABLES
    drawn: Ints = rng.choice(PAPER_WIDTHS, size=(rng.integers(low, high + 1),))
    return drawn


def fit_comms_to_model(
    comms_model: CommsModel,
    draw: Callable[[np.random.Generator], npt.ArrayLike],
    *,
    world_size: int,
    batch_sizes: Sequence[int],
    num_samples: int,
    config: PaperTrainConfig,
    longest_offset_ms: float = _LONGEST_OFFSET_MS,
) -> tuple[CommsNets, FitReport, FitReport]:
    """Train the two nets on another model's predictions instead of measurements.

    The samples are placements by the paper's rule (`place_at_random_level`), with its
    start offsets: r of 19 values up to the longest, each rank in whole steps of a 19th
    of it below r, minus the smallest.

    Args:
        comms_model: Gives the labels.
        draw: Draws the output columns of the tables to be placed (`draw_columns`).
        world_size: Ranks.
        batch_sizes: Samples over all ranks; each placement is at one of these.
        num_samples: Placements to label.
        config: The recipe.
        longest_offset_ms: The paper's suits a GPU's costs.
    """
    rng = np.random.default_rng([config.seed, world_size, num_samples])
    held = np.array(
        [place_at_random_level(rng, draw(rng), world_size) for _ in range(num_samples)]
    )
    steps = rng.integers(1, _LONGEST_OFFSET_MS + 1, size=(num_samples, 1))
    offsets = np.floor(rng.random((num_samples, world_size)) * steps)
    offsets *= longest_offset_ms / _LONGEST_OFFSET_MS
    wait = offsets.max(axis=1, keepdims=True) - offsets
    batch_S = rng.integers(len(batch_sizes), size=num_samples)
    transfer, columns = np.zeros((num_samples, world_size, 2)), np.zeros(held.shape)
    for number, batch_size in enumerate(batch_sizes):
        mine = batch_S == number
        transfer[mine] = comms_model.all_to_all(held[mine], batch_size)
        columns[mine] = columns_in_paper_batch(held[mine], batch_size)
    return _fit_nets(
        world_size,
        _with_offsets(columns, wait, transfer[..., 0]),
        CommsSamples(columns, transfer[..., 1]),
        config,
    )
