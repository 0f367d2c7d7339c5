"""NeuroShard's training of its nets: Adam on the mean squared error of milliseconds.

Validation samples select the best epoch. Samples are split at random with a seed.

Shapes: as in `data`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from papers.data import (
    DIM,
    PAPER_WIDTHS,
    CommsSamples,
    Floats,
    Ints,
    Sets,
    measured_sets,
)
from torchrec_neuroshard.bundles.training_loop import fit, seeded, shuffled_batches
from torchrec_neuroshard.errors import RecordError
from torchrec_neuroshard.measure.records import CostRecord
from torchrec_neuroshard.papers.neuroshard_models import (
    FORMAT,
    AllNets,
    CommsNets,
    ComputeNet,
    NeuroShardModels,
    RankTimesNet,
)

_STD_FLOOR = 1e-6
"""Added to every standard deviation."""
_SHARE = 0.1
"""Share of the samples for validation, and share for the test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTrainConfig:
    """The paper's settings."""

    epochs: int = 1_000
    batch_samples: int = 512
    learning_rate: float = 1e-3
    optimizer: str = "sgd"
    """Optimizer of the training sets' tables."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """Training of one net, and its error on test samples."""

    num_training: int
    num_test: int
    best_epoch: int
    """Best epoch, counted from 1."""
    test_mse: float
    """Mean squared error [ms^2]."""
    mean_test_mse: float
    """Error of a constant prediction, the mean of the training samples [ms^2]."""


def split_samples(count: int, seed: int, what: str) -> tuple[Ints, Ints, Ints]:
    """Return training, validation and test samples."""
    kept = max(1, int(count * _SHARE))
    if count <= 2 * kept:
        raise RecordError(f"{count} {what} are too few for training; measure more")
    order = np.random.default_rng(seed).permutation(count)
    return order[2 * kept :], order[:kept], order[kept : 2 * kept]


def _fit(
    net: nn.Module,
    predict: Callable[[Ints], torch.Tensor],
    target: torch.Tensor,
    config: PaperTrainConfig,
    what: str,
) -> FitReport:
    training, validation, test = split_samples(len(target), config.seed, what)

    def mse(samples: Ints) -> torch.Tensor:
        return nn.functional.mse_loss(predict(samples), target[samples])

    rng = np.random.default_rng([config.seed, 1])
    best_epoch = fit(
        net,
        torch.optim.Adam(net.parameters(), lr=config.learning_rate),
        shuffled_batches(rng, training, config.batch_samples, config.epochs),
        mse,
        lambda: mse(validation),
    )
    net.eval()
    mean = target[training].mean(dim=0)
    with torch.no_grad():
        test_mse = float(mse(test))
    return FitReport(
        num_training=len(training),
        num_test=len(test),
        best_epoch=int(best_epoch),
        test_mse=test_mse,
        mean_test_mse=float((target[test] - mean).square().mean()),
    )


def _mean_and_deviation(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    deviation = inputs.std(dim=0, correction=0)
    # In small batches the last bins are empty. Constant features are not scaled.
    deviation = torch.where(deviation < _STD_FLOOR, 1.0, deviation)
    return inputs.mean(dim=0), deviation + _STD_FLOOR


def fit_compute(
    sets: Sets, config: PaperTrainConfig, widths: Sequence[int] = PAPER_WIDTHS
) -> tuple[ComputeNet, FitReport]:
    """Return the trained kernel net and a report.

    Args:
        sets: Sets of comparable records (`measured_sets`), or sets labelled by a model.
        config: The settings.
        widths: The width is standardised as if every table had each of these, as in the
            paper.

    Raises:
        RecordError: There are too few sets.
    """
    with seeded(config.seed):
        net = ComputeNet()
        mean, deviation = _mean_and_deviation(sets.features_LF.double())
        mean[DIM], deviation[DIM] = _mean_and_deviation(torch.tensor(widths).double())
        net.mean_F.copy_(mean)
        net.std_F.copy_(deviation)
        predict = functools.partial(sets.predict, net)
        report = _fit(net, predict, sets.total_ms_S, config, "table sets")
    return net, report


def predict_records(net: ComputeNet, records: Sequence[CostRecord]) -> Floats:
    """Return the predicted forward + backward of measured sets, `S` [ms]."""
    with torch.inference_mode():
        cost = measured_sets(records).predict(net, np.arange(len(records)))
    return cost.double().numpy()


def fit_comms(
    forward: CommsSamples, backward: CommsSamples, config: PaperTrainConfig
) -> tuple[CommsNets, FitReport, FitReport]:
    """Return the two trained nets of one number of ranks, and their reports.

    Returns:
        The nets, the forward net's report, and the backward net's report.

    Raises:
        RecordError: There are too few samples.
    """
    with seeded(config.seed):
        nets = CommsNets.fresh(forward.target_SW.shape[1])
        return (
            nets,
            _fit_ranks(nets.forward, forward, config),
            _fit_ranks(nets.backward, backward, config),
        )


def _fit_ranks(
    net: RankTimesNet, samples: CommsSamples, config: PaperTrainConfig
) -> FitReport:
    target = torch.from_numpy(samples.target_SW).float()
    what = f"samples of an all-to-all of {target.shape[1]} ranks"
    split_samples(len(target), config.seed, what)
    inputs = torch.from_numpy(samples.inputs_SI)
    mean, deviation = _mean_and_deviation(inputs)
    net.mean_I.copy_(mean)
    net.std_I.copy_(deviation)
    return _fit(net, lambda s: net(inputs[s].float()), target, config, what)


def save_models(folder: str | Path, models: NeuroShardModels, card: str) -> None:
    """Write all nets and their card; a file is never half written."""
    FORMAT.save(folder, AllNets(models.compute, models.comms), models.info, card)
