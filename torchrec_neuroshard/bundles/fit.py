"""Training the set model on records, judging it on tables it never saw.

Shapes: as in `network`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize, stats

from torchrec_neuroshard.bundles.training_loop import (
    fit,
    hold_out,
    seeded,
    shuffled_batches,
)
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.measure.records import CostRecord
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.models.network import (
    OPTIMIZER_KINDS,
    SetCostNetwork,
    physical_basis,
)
from torchrec_neuroshard.tables.features import FEATURE_NAMES, table_features

__all__ = [
    "MEAN_ERROR",
    "Evaluation",
    "SetData",
    "TrainConfig",
    "as_cost_model",
    "best_factor",
    "build_sets",
    "evaluate",
    "fit_linear",
    "fit_relative",
    "fresh_network",
    "score",
    "train",
    "training_ranges",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How to train."""

    epochs: int = 120
    batch_sets: int = 256
    """Sets per step."""
    learning_rate: float = 1e-2
    """Peak; warmed up over the first steps, then cosine to zero."""
    weight_decay: float = 1e-3
    num_members: int = 5
    """Networks in the ensemble."""
    hidden: int = 96
    latent: int = 16
    head_hidden: int = 48
    validation_share: float = 0.1
    """Share of the training sets that picks each member's best epoch."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.epochs, self.num_members) < 1:
            raise ConfigError(
                "epochs and members must be at least 1, got "
                f"{self.epochs} and {self.num_members}"
            )


@dataclass(frozen=True, slots=True)
class SetData:
    """Measured sets as arrays."""

    features_NF: npt.NDArray[np.float32]
    set_ids_N: npt.NDArray[np.int64]
    """Sorted."""
    costs_S2: npt.NDArray[np.float64]
    """Measured forward and backward [ms]."""

    @property
    def num_sets(self) -> int:
        """Sets."""
        return len(self.costs_S2)

    def select(self, sets: npt.NDArray[np.int64]) -> SetData:
        """Return the data of some sets, in the order given."""
        starts = np.searchsorted(self.set_ids_N, np.arange(self.num_sets + 1))
        rows = [np.arange(starts[s], starts[s + 1]) for s in sets]
        ids = [np.full(len(r), i) for i, r in enumerate(rows)]
        return SetData(
            self.features_NF[np.concatenate(rows)],
            np.concatenate(ids),
            self.costs_S2[sets],
        )


def build_sets(records: Sequence[CostRecord]) -> SetData:
    """Turn records into arrays.

    Raises:
        RecordError: There are none, or one has a time that is not above 0.
    """
    if not records:
        raise RecordError("no records to train on; run 'neuroshard collect compute'")
    for record in records:
        if not (record.fwd_ms > 0 and record.bwd_ms > 0):
            raise RecordError(
                f"record {record.index} has times {record.fwd_ms}, {record.bwd_ms} ms; "
                "times must be above 0"
            )
    return SetData(
        np.concatenate([table_features(r.tables, r.batch_size) for r in records]),
        np.repeat(np.arange(len(records)), [len(r.tables) for r in records]),
        np.array([[r.fwd_ms, r.bwd_ms] for r in records]),
    )


def fit_relative(
    matrix_SP: npt.NDArray[np.float64], measured_S: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Fit constants of at least 0 to `matrix @ constants = measured`.

    Returns:
        `P`, with the least sum of squared errors relative to the measured.
    """
    relative = matrix_SP / measured_S[:, None]
    scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-30)
    solution, _ = optimize.nnls(relative / scale, np.ones(len(relative)))
    return np.asarray(solution / scale)


def best_factor(
    predicted_S: npt.NDArray[np.float64], measured_S: npt.NDArray[np.float64]
) -> float:
    """Return the factor on predictions that has the least mean relative error."""
    # Least sum of |f * p / y - 1| is the median of y / p, weighted by p / y.
    ratio = np.sort(measured_S / predicted_S)
    weight = np.cumsum(1.0 / ratio)
    return float(ratio[np.searchsorted(weight, weight[-1] / 2)])


def fit_linear(data: SetData) -> SetCostNetwork:
    """Fit a linear model: a network of launches and rates that bends nothing.

    Its constants are at least 0, and have the least sum of squared relative errors. It
    is the yardstick of trained networks, and what they start from. Optimizers without
    data take row-wise Adagrad's constants.
    """
    totals, kinds = physical_basis(torch.from_numpy(data.features_NF))
    product = torch.einsum("np,no->npo", totals.double(), kinds.double()).numpy()
    num_sets, (_, num_totals, num_kinds) = data.num_sets, product.shape
    sums = np.zeros((num_sets, num_totals, num_kinds))
    np.add.at(sums, data.set_ids_N, product)
    present = sums.sum(axis=(0, 1)) > 0
    weights = np.zeros((num_totals, num_kinds, 2))
    launch = np.zeros(2)
    for c in range(2):
        columns = sums[:, :, present].reshape(num_sets, -1)
        matrix = np.concatenate([columns, np.ones((num_sets, 1))], axis=1)
        solution = fit_relative(matrix, data.costs_S2[:, c])
        weights[:, present, c] = solution[:-1].reshape(num_totals, -1)
        launch[c] = solution[-1]
    fallback = OPTIMIZER_KINDS.index("rowwise_adagrad")
    if not present[fallback]:
        fallback = int(np.flatnonzero(present)[0])
    weights[:, ~present] = weights[:, fallback : fallback + 1]
    with seeded(0), torch.no_grad():
        network = SetCostNetwork(num_members=1, hidden=1, latent=1, head_hidden=1)
        for layer in (*network.encoder, *network.head):
            layer.zero_()
        network.physical_PO2.copy_(torch.from_numpy(weights))
        network.launch_2.copy_(torch.from_numpy(launch))
    return network.eval()


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How well a model predicts measured sets."""

    name: str
    num_sets: int
    fwd_mape: float
    bwd_mape: float
    total_mape: float
    """Mean absolute error of forward + backward, relative to the measured."""
    total_median: float
    kendall_tau: float
    """Of predicted and measured totals."""

    def line(self) -> str:
        """Return the errors as printed."""
        return (
            f"{self.name}: forward {self.fwd_mape:.2%}, backward {self.bwd_mape:.2%}, "
            f"total {self.total_mape:.2%} (median {self.total_median:.2%}), tau "
            f"{self.kendall_tau:.4f}"
        )


def evaluate(name: str, model: CostModel, data: SetData) -> Evaluation:
    """Judge a model on measured sets."""
    predicted = model.predict_sets(data.features_NF, data.set_ids_N, data.num_sets)
    error = np.abs(predicted / data.costs_S2 - 1)
    measured = data.costs_S2.sum(axis=1)
    total = predicted.sum(axis=1)
    total_error = np.abs(total / measured - 1)
    return Evaluation(
        name=name,
        num_sets=data.num_sets,
        fwd_mape=float(error[:, 0].mean()),
        bwd_mape=float(error[:, 1].mean()),
        total_mape=float(total_error.mean()),
        total_median=float(np.median(total_error)),
        kendall_tau=float(stats.kendalltau(total, measured).statistic),
    )


MEAN_ERROR = "mean error over forward, backward and total"
"""What `score` returns, in words."""


def score(evaluation: Evaluation) -> float:
    """Mean error of forward, backward and total: what candidates are compared by."""
    return (evaluation.fwd_mape + evaluation.bwd_mape + evaluation.total_mape) / 3


def training_ranges(data: SetData) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of each per-shard feature."""
    low, high = data.features_NF.min(axis=0), data.features_NF.max(axis=0)
    return {
        name: (float(low[i]), float(high[i])) for i, name in enumerate(FEATURE_NAMES)
    }


def train(
    data: SetData, config: TrainConfig, init: SetCostNetwork | None = None
) -> SetCostNetwork:
    """Train an ensemble.

    All members see the same batches and differ by their first weights. Each keeps the
    weights of its best epoch on the validation sets.

    Args:
        data: Sets to train on; a part becomes the validation sets.
        config: Sizes and rates.
        init: Start from these weights (fine-tuning) instead of random ones.
    """
    rng = np.random.default_rng(config.seed)
    held_out, others = hold_out(rng, data.num_sets, config.validation_share)
    if not len(others):
        raise RecordError(f"{data.num_sets} sets are too few to train on; measure more")
    validation, training = data.select(held_out), data.select(others)
    with seeded(config.seed):
        network = (
            fresh_network(training, config) if init is None else copy.deepcopy(init)
        )
        _fit(network, training, validation, config, rng)
    return network.eval()


def fresh_network(data: SetData, config: TrainConfig) -> SetCostNetwork:
    """Return an untrained ensemble whose physical constants fit the data."""
    network = SetCostNetwork(
        config.num_members, config.hidden, config.latent, config.head_hidden
    )
    linear = fit_linear(data)
    network.physical_PO2.copy_(linear.physical_PO2)
    network.launch_2.copy_(linear.launch_2.clamp_min(1e-3))
    inputs = network.inputs(torch.from_numpy(data.features_NF))
    network.input_mean_X.copy_(inputs.mean(dim=0))
    network.input_std_X.copy_(inputs.std(dim=0).clamp_min(1e-2))
    return network


def _forward(network: SetCostNetwork, data: SetData) -> torch.Tensor:
    encoded = network.encode(torch.from_numpy(data.features_NF))
    sums = torch.zeros(data.num_sets, encoded.shape[1])
    sums = sums.index_add(0, torch.from_numpy(data.set_ids_N), encoded)
    return network.predict(sums)


def _log_error(predicted_SM2: torch.Tensor, data: SetData) -> torch.Tensor:
    """Log ratio of forward, backward and total, `S x M x 3`."""
    with_total = torch.cat([predicted_SM2, predicted_SM2.sum(2, keepdim=True)], dim=2)
    measured = torch.from_numpy(data.costs_S2).float()
    measured = torch.cat([measured, measured.sum(1, keepdim=True)], dim=1)
    return with_total.log() - measured.log()[:, None]


def _fit(
    network: SetCostNetwork,
    training: SetData,
    validation: SetData,
    config: TrainConfig,
    rng: np.random.Generator,
) -> None:
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    num_steps = config.epochs * -(-training.num_sets // config.batch_sets)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=num_steps, pct_start=0.1
    )
    weight = torch.tensor([0.5, 0.5, 1.0])

    def loss(sets: npt.NDArray[np.int64]) -> torch.Tensor:
        batch = training.select(sets)
        error = _log_error(_forward(network, batch), batch)
        huber = torch.nn.functional.smooth_l1_loss(
            error * weight, torch.zeros_like(error), beta=0.02, reduction="sum"
        )
        return huber / batch.num_sets

    def validate() -> torch.Tensor:
        error = _log_error(_forward(network, validation), validation)
        return (error.exp() - 1).abs().mean(dim=(0, 2))

    fit(
        network,
        optimizer,
        shuffled_batches(rng, training.num_sets, config.batch_sets, config.epochs),
        loss,
        validate,
        max_grad_norm=10.0,
        schedule=schedule,
    )


def as_cost_model(network: SetCostNetwork, data: SetData, name: str) -> NeuralCostModel:
    """Wrap a network trained on `data`, for judging it before it is saved."""
    return NeuralCostModel(
        network, name=name, hardware="", ranges=training_ranges(data)
    )
