"""NeuroShard's recipe for its nets: Adam on the mean squared error of milliseconds.

The best epoch by samples kept apart counts. Samples are split at random, seeded.

Shapes: as in `data`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from papers.data import DIM, CommsSamples, Floats, Ints, Sets, measured_sets
from torchrec_neuroshard.bundles.training_loop import fit, seeded, shuffled_batches
from torchrec_neuroshard.errors import RecordError
from torchrec_neuroshard.measure.records import CostRecord
from torchrec_neuroshard.papers.neuroshard_models import (
    PAPER_WIDTHS,
    CommsNets,
    ComputeNet,
    RankTimesNet,
)

_STD_FLOOR = 1e-6
"""Added to every standard deviation."""
_SHARE = 0.1
"""Share of the samples that picks the best epoch, and as many that only judge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTrainConfig:
    """The paper's settings."""

    epochs: int = 1_000
    batch_samples: int = 512
    learning_rate: float = 1e-3
    optimizer: str = "sgd"
    """Optimizer of the tables of the sets that are trained on."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """How one net was trained, and its error on samples that only judge."""

    num_training: int
    num_test: int
    best_epoch: int
    """Counted from 1."""
    test_mse: float
    """In ms^2."""
    mean_test_mse: float
    """Error of predicting the training samples' mean for all."""


def split_samples(count: int, seed: int, what: str) -> tuple[Ints, Ints, Ints]:
    """Return training, validation and test samples."""
    kept = max(1, int(count * _SHARE))
    if count <= 2 * kept:
        raise RecordError(f"{count} {what} are too few to train on; measure more")
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
    # Small batches fill no table's last bins: what never varies is not scaled.
    deviation = torch.where(deviation < _STD_FLOOR, 1.0, deviation)
    return inputs.mean(dim=0), deviation + _STD_FLOOR


def fit_compute(
    sets: Sets, config: PaperTrainConfig, widths: Sequence[int] = PAPER_WIDTHS
) -> tuple[ComputeNet, FitReport]:
    """Train the net of kernels.

    Args:
        sets: Of comparable records (`measured_sets`), or labelled by a model.
        config: The recipe.
        widths: Features are standardised as if every table had each of these, as in
            the paper, whatever widths the sets have.

    Raises:
        RecordError: Too few sets.
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
    """Predict forward + backward of measured sets, `S` [ms]."""
    with torch.inference_mode():
        cost = measured_sets(records).predict(net, np.arange(len(records)))
    return cost.double().numpy()


def fit_comms(
    forward: CommsSamples, backward: CommsSamples, config: PaperTrainConfig
) -> tuple[CommsNets, FitReport, FitReport]:
    """Train the two nets of a number of ranks.

    Returns:
        The nets and the reports of the forward and of the backward one.

    Raises:
        RecordError: Too few samples.
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
