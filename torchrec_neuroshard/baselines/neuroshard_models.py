"""NeuroShard's own cost models (arXiv 2305.01868) and how they are trained.

One net for compute: each table's 20 features are encoded, the encodings of a rank's
tables are summed, and a head gives forward + backward together. Two nets per number of
ranks for the all-to-all: they see every rank's sum of widths (forward also when each
rank starts) and give every rank's time. All are trained on raw milliseconds.

The released nets know one batch size, 65,536. Here a batch of `B` samples is put in
its terms: `pooling_factor` is the lookups over 65,536, and sums of widths are
multiplied by B / 65,536, so that lookups and bytes are right and at 65,536 samples
every input is the paper's. What the features leave out is left out here too: batch size
otherwise, bag-length spread, features that share a table; optimizer, weight type and
weighted lookups, of which one kind is trained on.

Where the sources at hand are silent: samples are split at random (seeded), the pooling
factor of a table read by several features counts the lookups of all of them, and of a
comms record measured twice the first one is taken.

    python -m torchrec_neuroshard.baselines.neuroshard_models --out neuroshard_cpu \
        --compute compute_cpu.parquet --comms comms_gloo.parquet

Shapes: `N` shards, `S` sets or samples, `F` = 20 features, `E` = 32 encoding values,
`W` ranks, `I` inputs of a comms net (2W forward, W backward).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from torchrec_neuroshard.collect.store import read_comms_records, read_records
from torchrec_neuroshard.cost_models.base import CommsModel
from torchrec_neuroshard.cost_models.bundle import (
    check_finite,
    read_checked,
    read_description,
    write_whole,
)
from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
    ConfigError,
    FeatureSchemaError,
    RecordError,
    RecordMismatchError,
)
from torchrec_neuroshard.profiles import NUM_COUNT_BINS
from torchrec_neuroshard.records import CommsRecord, CostRecord, Fingerprint
from torchrec_neuroshard.tables import COLUMN_MULTIPLE, OPTIMIZERS, TableConfig

__all__ = [
    "PAPER_BATCH_SIZE",
    "PAPER_FEATURES",
    "PAPER_MAX_DIM",
    "CommsNets",
    "ComputeNet",
    "FitReport",
    "NeuroShardModels",
    "PaperTrainConfig",
    "RankTimesNet",
    "augment_tables",
    "columns_in_paper_batch",
    "comparable_records",
    "fit_comms",
    "fit_comms_to_model",
    "fit_compute",
    "load_models",
    "main",
    "place_at_random_level",
    "predict_records",
    "save_models",
    "shard_features",
    "train_models",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PAPER_BATCH_SIZE = 65_536
"""Samples of all measurements of NeuroShard."""

PAPER_MAX_DIM = 128
"""Widest table of NeuroShard's augmentation."""

PAPER_FEATURES: tuple[str, ...] = tuple(
    sorted(
        [*(f"bin_{j}" for j in range(NUM_COUNT_BINS)), "dim", "pooling_factor", "row"]
    )
)
"""Columns of the features: keys in the order of sorted strings, bin_10 before bin_2.

`bin_j` is the share of the distinct ids that occur 2**(j-1)+1 to 2**j times, `dim` the
width, `pooling_factor` the mean lookups per sample, `row` the rows, at least 100."""

_MIN_ROWS = 100
_DIM = PAPER_FEATURES.index("dim")
_STD_FLOOR = 1e-6
"""Added to every standard deviation."""
_OFFSETS_MS = (1, 19)
"""Range of the longest start offset in NeuroShard's measurements of the all-to-all."""
_FORMAT_VERSION = 1
_WEIGHTS, _INFO = "neuroshard.safetensors", "neuroshard.json"


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


# What the nets see.


def augment_tables(
    tables: Iterable[TableConfig], max_dim: int = PAPER_MAX_DIM
) -> tuple[TableConfig, ...]:
    """Return every table at `max_dim` and its halves while they divide by 4.

    128 gives the paper's six widths: 856 tables become 5,136.

    Raises:
        ConfigError: `max_dim` is not a positive multiple of 4.
    """
    return tuple(t.with_width(w) for t in tables for w in _halves(max_dim))


def _halves(max_dim: int) -> list[int]:
    if max_dim < COLUMN_MULTIPLE or max_dim % COLUMN_MULTIPLE:
        raise ConfigError(
            f"max_dim must be a positive multiple of {COLUMN_MULTIPLE}, got {max_dim}"
        )
    widths = [max_dim]
    while widths[-1] % 2 == 0 and widths[-1] // 2 % COLUMN_MULTIPLE == 0:
        widths.append(widths[-1] // 2)
    return widths


def shard_features(
    tables: Iterable[TableConfig], batch_size: int
) -> npt.NDArray[np.float32]:
    """Return the paper's features of shards.

    Args:
        tables: Shards, or tables whole.
        batch_size: Samples over all ranks.

    Returns:
        `N x F` float32, columns in `PAPER_FEATURES` order, not standardised.
    """
    rows = []
    for table in tables:
        profile = table.profile_at(batch_size)
        distinct = max(profile.num_distinct, 1e-9)
        values = {
            f"bin_{j}": n / distinct for j, n in enumerate(profile.access_histogram)
        }
        values["dim"] = table.embedding_dim
        values["pooling_factor"] = profile.num_lookups / PAPER_BATCH_SIZE
        values["row"] = max(_MIN_ROWS, table.num_embeddings)
        rows.append([values[name] for name in PAPER_FEATURES])
    return np.array(rows, dtype=np.float32).reshape(-1, len(PAPER_FEATURES))


def columns_in_paper_batch(columns: npt.ArrayLike, batch_size: int) -> Floats:
    """Return sums of widths that at 65,536 samples are as many bytes."""
    scaled: Floats = np.asarray(columns, np.float64) * (batch_size / PAPER_BATCH_SIZE)
    return scaled


# The nets.


class ComputeNet(nn.Module):
    """Forward + backward of one fused kernel over a set of shards: 8,993 parameters."""

    mean_F: torch.Tensor
    std_F: torch.Tensor

    def __init__(self) -> None:
        """Make the layers; weights are random until trained or loaded."""
        super().__init__()
        self.register_buffer("mean_F", torch.zeros(len(PAPER_FEATURES)))
        self.register_buffer("std_F", torch.ones(len(PAPER_FEATURES)))
        self.encoder = _layers([len(PAPER_FEATURES), 128, 32], relu_last=True)
        self.head = _layers([32, 64, 1])

    def encode(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Encode shards, `N x E`; a set's encoding is the sum.

        Raises:
            FeatureSchemaError: There are not 20 columns.
        """
        if features_NF.shape[1] != len(PAPER_FEATURES):
            raise FeatureSchemaError(
                f"NeuroShard's compute net takes {len(PAPER_FEATURES)} features, got "
                f"{features_NF.shape[1]}; compute them with shard_features"
            )
        encoded: torch.Tensor = self.encoder((features_NF - self.mean_F) / self.std_F)
        return encoded

    def cost(self, sums_SE: torch.Tensor) -> torch.Tensor:
        """Milliseconds of sets, `S`; unbounded below, as in the paper."""
        cost: torch.Tensor = self.head(sums_SE)[:, 0]
        return cost

    def forward(
        self, features_NF: torch.Tensor, set_ids_N: torch.Tensor, num_sets: int
    ) -> torch.Tensor:
        """Milliseconds of sets given by their shards, `S`."""
        encoded = self.encode(features_NF)
        sums = encoded.new_zeros(num_sets, encoded.shape[1])
        return self.cost(sums.index_add(0, set_ids_N, encoded))


class RankTimesNet(nn.Module):
    """Time of every rank in one all-to-all of `W` ranks."""

    mean_I: torch.Tensor
    std_I: torch.Tensor

    def __init__(self, num_inputs: int, world_size: int) -> None:
        """Make the layers.

        Args:
            num_inputs: `2W` forward (sums of widths, then start offsets in ms), `W`
                backward (sums of widths).
            world_size: `W`.
        """
        super().__init__()
        self.register_buffer("mean_I", torch.zeros(num_inputs))
        self.register_buffer("std_I", torch.ones(num_inputs))
        self.layers = _layers([num_inputs, 128, 64, 32, 16, world_size])

    def forward(self, inputs_SI: torch.Tensor) -> torch.Tensor:
        """Milliseconds from each rank's own start until it is through, `S x W`."""
        out: torch.Tensor = self.layers((inputs_SI - self.mean_I) / self.std_I)
        return out


def _layers(sizes: Sequence[int], relu_last: bool = False) -> nn.Sequential:
    parts: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        parts += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(parts if relu_last else parts[:-1]))


@dataclass(frozen=True, slots=True)
class CommsNets:
    """The two nets of one number of ranks."""

    forward: RankTimesNet
    backward: RankTimesNet

    @classmethod
    def fresh(cls, world_size: int) -> CommsNets:
        """Return untrained nets."""
        return cls(
            RankTimesNet(2 * world_size, world_size),
            RankTimesNet(world_size, world_size),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuroShardModels:
    """All nets of one kind of hardware."""

    fingerprint: Fingerprint
    """Where the compute records were measured."""
    compute: ComputeNet
    comms: Mapping[int, CommsNets]
    """World size -> nets; only the sizes that were measured."""
    trained_on: Mapping[str, Any]
    """Records, settings and reports behind the weights."""


# Training.


@contextlib.contextmanager
def _one_thread(seed: int) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _split(count: int, config: PaperTrainConfig, what: str) -> tuple[Ints, Ints, Ints]:
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
    optimizer = torch.optim.Adam(net.parameters(), lr=config.learning_rate)
    rng = np.random.default_rng([config.seed, 1])

    def mse(samples: Ints) -> torch.Tensor:
        return nn.functional.mse_loss(predict(samples), target[samples])

    best, best_epoch, kept = float("inf"), 0, copy.deepcopy(net.state_dict())
    for epoch in range(config.epochs):
        order = rng.permutation(training)
        for start in range(0, len(order), config.batch_samples):
            optimizer.zero_grad()
            loss = mse(order[start : start + config.batch_samples])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            error = float(mse(validation))
        if error < best:
            best, best_epoch = error, epoch + 1
            kept = copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)
    net.eval()
    mean = target[training].mean(dim=0)
    with torch.no_grad():
        test_mse = float(mse(test))
    return FitReport(
        num_training=len(training),
        num_validation=len(validation),
        num_test=len(test),
        best_epoch=best_epoch,
        validation_mse=best,
        test_mse=test_mse,
        mean_test_mse=float((target[test] - mean).square().mean()),
    )


class _Sets:
    """Measured sets: features of all shards, and where each set's begin."""

    def __init__(self, records: Sequence[CostRecord]) -> None:
        self.features = torch.from_numpy(
            np.concatenate([shard_features(r.tables, r.batch_size) for r in records])
        )
        self.counts = np.array([len(r.tables) for r in records])
        self.starts = np.cumsum(self.counts) - self.counts

    def predict(self, net: ComputeNet, sets: Ints) -> torch.Tensor:
        """Milliseconds of some sets, in the order given."""
        counts = self.counts[sets]
        skipped = self.starts[sets] - (np.cumsum(counts) - counts)
        rows = np.repeat(skipped, counts) + np.arange(counts.sum())
        ids = torch.from_numpy(np.repeat(np.arange(len(sets)), counts))
        cost: torch.Tensor = net(self.features[rows], ids, len(sets))
        return cost


def fit_compute(
    records: Sequence[CostRecord], config: PaperTrainConfig | None = None
) -> tuple[ComputeNet, FitReport]:
    """Train the compute net on measured sets.

    Features are standardised by their mean and standard deviation over the augmented
    tables (`augment_tables`) of all sets, as in the paper, whatever widths they have.

    Args:
        records: Measured sets; see `comparable_records` for those that are taken.
        config: The recipe; None is the paper's.

    Raises:
        RecordError: Too few records.
    """
    config = config or PaperTrainConfig()
    records = comparable_records(records, config.optimizer)[: config.max_samples]
    parts = _split(len(records), config, f"sets with {config.optimizer}, fp32")
    sets = _Sets(records)
    target = torch.tensor([r.total_ms for r in records], dtype=torch.float32)
    with _one_thread(config.seed):
        net = ComputeNet()
        mean, std = _statistics(sets.features)
        net.mean_F.copy_(mean)
        net.std_F.copy_(std)
        report = _fit(
            net, lambda chosen: sets.predict(net, chosen), target, parts, config
        )
    return net, report


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
    widths = _halves(PAPER_MAX_DIM)
    every = features_NF.double().repeat_interleave(len(widths), dim=0)
    every[:, _DIM] = torch.tensor(widths).double().repeat(len(features_NF))
    return every.mean(dim=0), every.std(dim=0, correction=0) + _STD_FLOOR


def predict_records(net: ComputeNet, records: Sequence[CostRecord]) -> Floats:
    """Predict forward + backward of measured sets, `S` [ms]."""
    with torch.inference_mode():
        cost = _Sets(records).predict(net, np.arange(len(records)))
    return cost.double().numpy()


@dataclass(frozen=True, slots=True)
class _CommsSamples:
    inputs_SI: Floats
    target_SW: Floats


def _is_pooled(record: CommsRecord) -> bool:
    """Whether it is an all-to-all of pooled outputs within one node."""
    within = record.world_size == record.local_world_size
    return within and record.collective.startswith("pooled_")


def _measured_samples(
    records: Sequence[CommsRecord], world_size: int, collective: str
) -> _CommsSamples:
    """Samples of a pooled all-to-all over all ranks of one node.

    Forward times run from a rank's own start, so they hold what it waits for the last
    one; backward samples are those whose ranks start together.
    """
    forward = collective == "pooled_forward"
    chosen = [
        r
        for r in records
        if r.collective == collective
        and r.world_size == world_size
        and _is_pooled(r)
        and r.repeat_of is None
        and (forward or not any(r.delay_ms))
    ]
    sent = np.array([r.bytes_per_peer for r in chosen], dtype=np.float64)
    columns = sent.reshape(-1, world_size) * (world_size / (4 * PAPER_BATCH_SIZE))
    transfer = np.array([r.transfer_ms for r in chosen]).reshape(-1, world_size)
    if not forward:
        return _CommsSamples(columns, transfer)
    wait = np.array([r.wait_ms for r in chosen]).reshape(-1, world_size)
    return _with_offsets(columns, wait, transfer)


def _with_offsets(columns: Floats, wait: Floats, transfer: Floats) -> _CommsSamples:
    """Forward samples: a rank starts after the first by what that one waits more."""
    offsets = wait.max(axis=1, keepdims=True) - wait
    return _CommsSamples(np.concatenate([columns, offsets], axis=1), wait + transfer)


def _fit_ranks(
    net: RankTimesNet, samples: _CommsSamples, config: PaperTrainConfig, what: str
) -> FitReport:
    parts = _split(len(samples.target_SW), config, what)
    inputs = torch.from_numpy(samples.inputs_SI)
    net.mean_I.copy_(inputs.mean(dim=0))
    net.std_I.copy_(inputs.std(dim=0, correction=0) + _STD_FLOOR)
    single = inputs.float()
    target = torch.from_numpy(samples.target_SW).float()
    return _fit(net, lambda chosen: net(single[chosen]), target, parts, config)


def _fit_nets(
    world_size: int,
    forward: _CommsSamples,
    backward: _CommsSamples,
    config: PaperTrainConfig,
) -> tuple[CommsNets, FitReport, FitReport]:
    with _one_thread(config.seed):
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
        _measured_samples(records, world_size, "pooled_forward"),
        _measured_samples(records, world_size, "pooled_backward"),
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


def fit_comms_to_model(
    comms_model: CommsModel,
    columns_T: npt.ArrayLike,
    *,
    world_size: int,
    batch_size: int,
    num_samples: int,
    config: PaperTrainConfig,
) -> tuple[CommsNets, FitReport, FitReport]:
    """Train the two nets on another model's predictions instead of measurements.

    For a number of ranks that was not measured. The samples are placements of the
    given tables by the paper's rule (`place_at_random_level`), with its start offsets:
    r from 1 to 19 ms, each rank a whole number below r, minus the smallest.

    Args:
        comms_model: Gives the labels.
        columns_T: Output columns of the tables to be placed.
        world_size: Ranks.
        batch_size: Samples over all ranks.
        num_samples: Placements to label.
        config: The recipe.
    """
    rng = np.random.default_rng([config.seed, world_size, num_samples])
    held = [
        place_at_random_level(rng, columns_T, world_size) for _ in range(num_samples)
    ]
    low, high = _OFFSETS_MS
    longest = rng.integers(low, high + 1, size=(num_samples, 1))
    offsets = np.floor(rng.random((num_samples, world_size)) * longest)
    wait = offsets.max(axis=1, keepdims=True) - offsets
    transfer = comms_model.all_to_all(np.array(held), batch_size)
    columns = columns_in_paper_batch(held, batch_size)
    return _fit_nets(
        world_size,
        _with_offsets(columns, wait, transfer[..., 0]),
        _CommsSamples(columns, transfer[..., 1]),
        config,
    )


def train_models(
    compute: Sequence[Path],
    comms: Sequence[Path] = (),
    config: PaperTrainConfig | None = None,
    console: Console | None = None,
    *,
    mix_hardware: bool = False,
) -> NeuroShardModels:
    """Train all nets on record files of one machine.

    Sets of held-out tables are left out of training and judged apart.

    Args:
        compute: Files of `neuroshard collect compute`.
        comms: Files of `neuroshard collect comms`, any numbers of ranks.
        config: The recipe; None is the paper's.
        console: Where progress is printed.
        mix_hardware: Take collectives of another device than the kernels; the sums
            that the search makes of both are then of no machine.

    Raises:
        RecordError: A file cannot be read, or there are too few records.
        RecordMismatchError: The files are of different machines.
    """
    config, console = config or PaperTrainConfig(), console or Console()
    headers, records = read_records(compute)
    files = read_comms_records(comms)
    devices = sorted({h.fingerprint.device for h, _ in files})
    if not mix_hardware and devices not in ([], [headers[0].fingerprint.device]):
        raise RecordMismatchError(
            f"kernels were measured on {headers[0].fingerprint.device}, collectives on "
            f"{', '.join(devices)}; train on one machine's records or allow it by "
            "--mix-hardware"
        )
    net, report = fit_compute([r for r in records if not r.held_out], config)
    reports = {"compute": dataclasses.asdict(report)}
    console.print(_line("compute", report))
    held_out = comparable_records((r for r in records if r.held_out), config.optimizer)
    if held_out:
        measured = np.array([r.total_ms for r in held_out])
        error = float(np.abs(predict_records(net, held_out) / measured - 1).mean())
        reports["compute"]["held_out_mape"] = error
        console.print(
            f"{len(held_out)} sets of held-out tables: mean relative error {error:.1%}"
        )
    nets: dict[int, CommsNets] = {}
    collectives = [r for _, of_file in files for r in of_file]
    for world_size in sorted({r.world_size for r in collectives if _is_pooled(r)}):
        nets[world_size], forward, backward = fit_comms(collectives, world_size, config)
        for name, fitted in (("forward", forward), ("backward", backward)):
            reports[f"comms {world_size} {name}"] = dataclasses.asdict(fitted)
            console.print(_line(f"{name} all-to-all of {world_size} ranks", fitted))
    return NeuroShardModels(
        fingerprint=headers[0].fingerprint,
        compute=net,
        comms=nets,
        trained_on={
            "recipe": dataclasses.asdict(config),
            "reports": reports,
            "comms_devices": devices,
            "backends": sorted({h.backend for h, _ in files}),
            "commands": [h.command for h in [*headers, *(h for h, _ in files)]],
        },
    )


def _line(name: str, report: FitReport) -> str:
    return (
        f"{name}: {report.num_training} samples, best epoch {report.best_epoch}, test "
        f"error {report.test_mse**0.5:.3f} ms (root mean square), of the mean "
        f"{report.mean_test_mse**0.5:.3f} ms"
    )


# On disk: `neuroshard.safetensors` (weights and statistics) and `neuroshard.json`.


def _modules(models: NeuroShardModels) -> dict[str, nn.Module]:
    modules: dict[str, nn.Module] = {"compute": models.compute}
    for world_size, nets in models.comms.items():
        modules[f"comms.{world_size}.forward"] = nets.forward
        modules[f"comms.{world_size}.backward"] = nets.backward
    return modules


def save_models(folder: str | Path, models: NeuroShardModels) -> None:
    """Write all nets into a folder; each file appears whole or not at all."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights = save_tensors(
        {
            f"{name}.{key}": value.detach().contiguous()
            for name, module in _modules(models).items()
            for key, value in module.state_dict().items()
        }
    )
    info = {
        "format_version": _FORMAT_VERSION,
        "feature_names": PAPER_FEATURES,
        "batch_size": PAPER_BATCH_SIZE,
        "world_sizes": sorted(models.comms),
        "fingerprint": dataclasses.asdict(models.fingerprint),
        "trained_on": dict(models.trained_on),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    write_whole(path / _WEIGHTS, weights)
    write_whole(path / _INFO, (json.dumps(info, indent=1) + "\n").encode())


def load_models(folder: str | Path) -> NeuroShardModels:
    """Load what `save_models` wrote and check all of it.

    Raises:
        BundleCorruptError: A file is missing, truncated or damaged.
        BundleMismatchError: It is of another version or other features.
    """
    path = Path(folder)
    if not (path / _INFO).is_file():
        raise BundleCorruptError(
            f"{path} holds no models of NeuroShard (no {_INFO}); train them with "
            "'python -m torchrec_neuroshard.baselines.neuroshard_models'"
        )
    info = read_description(path / _INFO)
    expected = (_FORMAT_VERSION, list(PAPER_FEATURES), PAPER_BATCH_SIZE)
    names = ("format_version", "feature_names", "batch_size")
    if tuple(info.get(name) for name in names) != expected:
        raise BundleMismatchError(
            f"{path / _INFO} has version {info.get('format_version')} or other "
            f"features than this package, which reads version {_FORMAT_VERSION}; train "
            "again"
        )
    weights = read_checked(path / _WEIGHTS, info.get("weights_sha256"))
    try:
        models = NeuroShardModels(
            fingerprint=Fingerprint(**info["fingerprint"]),
            compute=ComputeNet(),
            comms={int(w): CommsNets.fresh(int(w)) for w in info["world_sizes"]},
            trained_on=info["trained_on"],
        )
        tensors = load_tensors(weights)
        for name, module in _modules(models).items():
            start = f"{name}."
            module.load_state_dict(
                {k[len(start) :]: v for k, v in tensors.items() if k.startswith(start)}
            )
            module.eval()
    except (SafetensorError, RuntimeError, TypeError, KeyError, ValueError) as error:
        raise BundleCorruptError(
            f"{path} does not hold the nets that {_INFO} tells of ({error}); restore "
            "it or train again"
        ) from error
    for module in _modules(models).values():
        check_finite(path / _WEIGHTS, module)
    return models


def main(argv: Sequence[str] | None = None) -> int:
    """Train on record files and write the nets."""
    defaults = PaperTrainConfig()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--compute", type=Path, nargs="+", required=True)
    parser.add_argument("--comms", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--optimizer", default=defaults.optimizer)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument(
        "--mix-hardware",
        action="store_true",
        help="take collectives of another device than the kernels",
    )
    args = parser.parse_args(argv)
    models = train_models(
        args.compute,
        args.comms,
        PaperTrainConfig(epochs=args.epochs, optimizer=args.optimizer, seed=args.seed),
        mix_hardware=args.mix_hardware,
    )
    save_models(args.out, models)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
