"""Fit cost models of kernels to measured sets, and evaluate them.

First the physics is fitted: constants per kind of work (`models.physical`), by least
squares of relative errors. Then a network that corrects the physics is trained on the
same sets. Both may start from a model of another device: its constants are refitted,
its network is fine-tuned. Validation sets decide between the candidates. The test sets
hold tables that no candidate has seen; their errors are only reported.

Shapes: see `models.network` and `models.physical`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from torchrec_neuroshard.bundles.choice import Choice
from torchrec_neuroshard.bundles.fit_physics import fit_physics
from torchrec_neuroshard.bundles.set_data import SetData, rows_of
from torchrec_neuroshard.bundles.training_loop import fit, seeded, shuffled_batches
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.models.network import SetCostNetwork, ShardInputs, shard_inputs
from torchrec_neuroshard.models.physical import Physics, set_values
from torchrec_neuroshard.tables.features import FEATURE_NAMES

Floats = npt.NDArray[np.float64]

_FEW_SETS = 30
"""With fewer validation sets, training sets also calibrate the uncertainty."""
_INSIDE, _DEVIATIONS = 0.9, 1.645
"""90 % of normally distributed errors are within 1.645 standard deviations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of the training."""

    epochs: int = 120
    batch_sets: int = 256
    """Sets per step."""
    learning_rate: float = 1e-2
    """Peak learning rate; the first steps warm up, then a cosine falls to zero."""
    weight_decay: float = 1e-3
    num_members: int = 8
    """Networks in the ensemble."""
    hidden: int = 64
    latent: int = 16
    head_hidden: int = 32
    validation_share: float = 0.1
    """Share of the training sets used to pick each member's best epoch and the best
    candidate."""
    tuning_steps: int = 500
    """Steps of fine-tuning, in batches of at most 64 sets."""
    tuning_rate: float = 3e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.epochs, self.num_members, self.tuning_steps) < 1:
            raise ConfigError(
                "epochs, members and steps must be at least 1, got "
                f"{self.epochs}, {self.num_members} and {self.tuning_steps}"
            )

    def tuning(self, num_sets: int) -> TrainConfig:
        """Return the settings for fine-tuning on `num_sets` sets."""
        batch = min(64, self.batch_sets)
        epochs = -(-self.tuning_steps // max(1, -(-num_sets // batch)))
        return dataclasses.replace(
            self, epochs=epochs, batch_sets=batch, learning_rate=self.tuning_rate
        )


def physics_network(physics: Physics) -> SetCostNetwork:
    """Return a network that corrects nothing and predicts the physics alone."""
    with seeded(0), torch.no_grad():
        network = SetCostNetwork(num_members=1, hidden=1, latent=1, head_hidden=1)
        for layer in (*network.encoder, *network.head):
            layer.zero_()
        network.physics = physics
    return network.eval()


# The network.


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Sets of one or more devices as the network's inputs."""

    inputs: tuple[torch.Tensor, ...]
    """`ShardInputs` of all shards; with several devices, `x` holds the device, too."""
    set_ids_N: npt.NDArray[np.int64]
    sets_S2: torch.Tensor
    """`Physics.sets_ms`."""
    device_SD: torch.Tensor
    costs_S3: torch.Tensor
    """Forward, backward and total."""

    @classmethod
    def of(
        cls, parts: Sequence[tuple[SetData, Physics]], num_devices: int
    ) -> _Prepared:
        """Prepare the sets of several devices; `parts[d]` are of device `d`."""
        inputs: list[ShardInputs] = []
        ids, sets, device, start = [], [], [], 0
        for d, (data, physics) in enumerate(parts):
            made = shard_inputs(data.features_NF, physics)
            one_hot = np.eye(max(num_devices, 1), dtype=np.float32)[d, :num_devices]
            shown = np.tile(one_hot, (len(made.x_NX), 1))
            x_NX = np.concatenate([made.x_NX, shown], axis=1)
            inputs.append(made._replace(x_NX=x_NX))
            ids.append(data.set_ids_N + start)
            values_NV = set_values(data.features_NF, physics.least_threads)
            sets.append(physics.sets_ms(data.sum_shards(values_NV)))
            device.append(np.tile(one_hot, (data.num_sets, 1)))
            start += data.num_sets
        costs = np.concatenate([data.costs_S2 for data, _ in parts])
        return cls(
            tuple(
                torch.from_numpy(np.concatenate(v)) for v in zip(*inputs, strict=True)
            ),
            np.concatenate(ids),
            torch.from_numpy(np.concatenate(sets)).float(),
            torch.from_numpy(np.concatenate(device)),
            torch.from_numpy(np.c_[costs, costs.sum(axis=1)]).float(),
        )

    def error(
        self, network: SetCostNetwork, sets: npt.NDArray[np.int64] | None = None
    ) -> torch.Tensor:
        """Return log(predicted / measured) of some sets or all, `S x M x 3`."""
        if sets is None:
            sets = np.arange(len(self.costs_S3))
        rows, ids = rows_of(self.set_ids_N, sets)
        encoded = network.encode(*(v[rows] for v in self.inputs))
        sums = torch.zeros(len(sets), encoded.shape[1])
        sums = sums.index_add(0, torch.from_numpy(ids), encoded)
        out = network.predict(sums, self.sets_S2[sets], self.device_SD[sets])
        with_total = torch.cat([out, out.sum(2, keepdim=True)], dim=2)
        return with_total.log() - self.costs_S3[sets].log()[:, None]


def train(
    data: SetData,
    config: TrainConfig,
    *,
    init: SetCostNetwork | None = None,
    others: Sequence[SetData] = (),
) -> SetCostNetwork:
    """Train an ensemble.

    With M members, each leaves out a different M-th of the sets, and keeps the weights
    of its best epoch on the validation sets. The members' spread is scaled to match the
    errors on the validation sets. If there are few of these, training sets are used as
    well, each predicted by the member that left it out.

    Args:
        data: Sets to train on; a part becomes the validation sets.
        config: Sizes and rates.
        init: Network to fine-tune, with its physics. None starts from random weights
            and a physics fitted to the sets.
        others: Sets of other devices of this type to learn from as well. One network is
            trained for all devices, with the device as an input, and finally fine-tuned
            on `data`.
    """
    rng = np.random.default_rng(config.seed)
    training, validation = data.split(rng, config.validation_share)
    return _train(training, validation, config, rng, init, others)


def _train(
    training: SetData,
    validation: SetData,
    config: TrainConfig,
    rng: np.random.Generator,
    init: SetCostNetwork | None = None,
    others: Sequence[SetData] = (),
) -> SetCostNetwork:
    physics = fit_physics(training) if init is None else init.physics
    parts = [(training, physics), *((o, fit_physics(o)) for o in others)]
    devices = len(parts) if others else 0
    prepared = _Prepared.of(parts, devices)
    judged = _Prepared.of([(validation, physics)], devices)
    with seeded(config.seed):
        if init is None:
            network = SetCostNetwork(
                config.num_members,
                config.hidden,
                config.latent,
                config.head_hidden,
                devices,
            )
            x_NX = prepared.inputs[0][:, : network.num_inputs]
            network.input_mean_X.copy_(x_NX.mean(dim=0))
            network.input_std_X.copy_(x_NX.std(dim=0).clamp_min(1e-2))
        else:
            network = copy.deepcopy(init)
        network.physics = physics
        left_out_S = _fit(network, prepared, judged, config, rng)
        if others:
            network = network.of_device(0)
            prepared, judged = (
                _Prepared.of([(d, physics)], 0) for d in (training, validation)
            )
            tuning = config.tuning(training.num_sets)
            left_out_S = _fit(network, prepared, judged, tuning, rng)
    ratios_SM = _ratios(network, judged)
    mean_S, std_S = ratios_SM.mean(axis=1), ratios_SM.std(axis=1)
    if len(mean_S) < _FEW_SETS:
        ratios_SM = _ratios(network, prepared)
        unseen_S = ratios_SM[np.arange(len(ratios_SM)), left_out_S]
        mean_S = np.concatenate([mean_S, unseen_S])
        std_S = np.concatenate([std_S, ratios_SM.std(axis=1)])
    _scale_spread(network, mean_S, std_S)
    return network.eval()


def _fit(
    network: SetCostNetwork,
    training: _Prepared,
    validation: _Prepared,
    config: TrainConfig,
    rng: np.random.Generator,
) -> npt.NDArray[np.int64]:
    """Train, and return for each training set the member that left it out."""
    num_sets = len(training.costs_S3)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    num_steps = config.epochs * -(-num_sets // config.batch_sets)
    # The schedule divides by 0 if its first phase has one step.
    warm_up = 0.2 if num_steps == 10 else 0.1
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=num_steps, pct_start=warm_up
    )
    weight = torch.tensor([0.5, 0.5, 1.0])
    members = network.num_members
    left_out_S = rng.permutation(num_sets) % members
    seen_SM = torch.ones(num_sets, members)
    if members > 1:
        seen_SM[torch.arange(num_sets), torch.from_numpy(left_out_S)] = 0.0

    def loss(sets: npt.NDArray[np.int64]) -> torch.Tensor:
        error = training.error(network, sets) * weight
        huber = torch.nn.functional.smooth_l1_loss(
            error, torch.zeros_like(error), beta=0.02, reduction="none"
        )
        return (huber * seen_SM[sets][..., None]).sum() / len(sets)

    fit(
        network,
        optimizer,
        shuffled_batches(rng, num_sets, config.batch_sets, config.epochs),
        loss,
        lambda: (validation.error(network).exp() - 1).abs().mean(dim=(0, 2)),
        max_grad_norm=10.0,
        schedule=schedule,
    )
    return left_out_S


def _ratios(network: SetCostNetwork, sets: _Prepared) -> Floats:
    """Return each member's predicted total over the measured total, `S x M`."""
    with torch.no_grad():
        ratios_SM: Floats = sets.error(network)[..., 2].exp().double().numpy()
    return ratios_SM


def _scale_spread(network: SetCostNetwork, mean_S: Floats, std_S: Floats) -> None:
    """Scale the members' spread such that 90 % of sets are inside the 90 % interval.

    The scaling is a factor and a minimum uncertainty; of the pairs that reach 90 %, the
    likeliest is taken.

    Args:
        network: The network to scale.
        mean_S: Predicted over measured totals of sets that were not trained on.
        std_S: Standard deviation between the members on these sets.
    """
    error, spread = np.abs(mean_S - 1.0) / mean_S, std_S / mean_S
    best, likeliest = (1.0, 0.0), -np.inf
    for least in np.arange(0.0, 0.2, 0.005):
        for factor in np.arange(0.0, 4.1, 0.1):
            std = np.hypot(factor * spread, least) + 1e-6
            if (error <= _DEVIATIONS * std).mean() < _INSIDE:
                continue
            likely = float((-np.log(std) - 0.5 * (error / std) ** 2).mean())
            if likely > likeliest:
                best, likeliest = (float(factor), float(least)), likely
    network.spread_2.copy_(torch.tensor(best))


def as_cost_model(network: SetCostNetwork, data: SetData, name: str) -> NeuralCostModel:
    """Return a network trained on `data` as a cost model, to evaluate it unsaved."""
    return NeuralCostModel(
        network, name=name, hardware="", ranges=training_ranges(data)
    )


def training_ranges(data: SetData) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest value of each per-shard feature."""
    low, high = data.features_NF.min(axis=0), data.features_NF.max(axis=0)
    return {
        name: (float(low[i]), float(high[i])) for i, name in enumerate(FEATURE_NAMES)
    }


# Evaluation and choice.


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Errors of a model on measured sets."""

    name: str
    fwd_mape: float
    bwd_mape: float
    total_mape: float
    """Mean absolute error of forward + backward, relative to the measured time."""
    total_median: float
    cheapest_mape: float
    """`total_mape` of the cheapest tenth of the sets."""
    bias: float
    """Mean error of forward + backward, relative to the measured time."""
    inside: float
    """Share of the sets inside the model's 90 % interval."""
    kendall_tau: float
    """Kendall's tau of predicted and measured totals."""

    @property
    def score(self) -> float:
        """Mean error of forward, backward and total, which ranks the candidates."""
        return (self.fwd_mape + self.bwd_mape + self.total_mape) / 3

    def line(self) -> str:
        """Return the errors as a line of text."""
        return (
            f"{self.name}: forward {self.fwd_mape:.2%}, backward {self.bwd_mape:.2%}, "
            f"total {self.total_mape:.2%} (median {self.total_median:.2%}, bias "
            f"{self.bias:+.2%}), tau {self.kendall_tau:.4f}"
        )


def evaluate(name: str, model: CostModel, data: SetData) -> Evaluation:
    """Return a model's errors on measured sets."""
    sums = model.sum_sets(data.features_NF, data.set_ids_N, data.num_sets)
    predicted = model.predict_sums(sums)
    error = np.abs(predicted / data.costs_S2 - 1)
    measured, total = data.costs_S2.sum(axis=1), predicted.sum(axis=1)
    total_error = np.abs(total / measured - 1)
    cheap = measured <= np.quantile(measured, 0.1)
    interval = _DEVIATIONS * model.relative_uncertainty(sums) * total
    return Evaluation(
        name=name,
        fwd_mape=float(error[:, 0].mean()),
        bwd_mape=float(error[:, 1].mean()),
        total_mape=float(total_error.mean()),
        total_median=float(np.median(total_error)),
        cheapest_mape=float(total_error[cheap].mean()),
        bias=float((total / measured - 1).mean()),
        inside=float((np.abs(total - measured) <= interval).mean()),
        kendall_tau=float(stats.kendalltau(total, measured).statistic),
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate model for a device."""

    network: SetCostNetwork
    ranges: Mapping[str, tuple[float, float]]
    """Feature name -> smallest and largest value in training."""
    evaluation: Evaluation
    """Errors on the test sets of held-out tables; its name is the candidate's."""


def fit_model(
    data: SetData,
    test: SetData,
    config: TrainConfig,
    *,
    start: NeuralCostModel | None = None,
    others: Sequence[SetData] = (),
) -> Choice[Candidate]:
    """Make the candidates for a device and choose by their validation errors.

    Args:
        data: The device's training sets; a part becomes the validation sets.
        test: The device's sets of held-out tables, for the reported errors.
        config: Sizes and rates.
        start: A model of another device to start from.
        others: Sets of other devices to learn from as well; only without `start`.

    Returns:
        Candidates `physics` and `learned`; with `start`, candidates `before`,
        `physics`, `refitted` and `tuned`.
    """
    rng = np.random.default_rng(config.seed)
    training, validation = data.split(rng, config.validation_share)
    ranges = training_ranges(data)
    if start is None:
        learned = _train(training, validation, config, rng, others=others)
        made = {
            "physics": (physics_network(learned.physics), ranges),
            "learned": (learned, ranges),
        }
    else:
        both = {
            name: (min(start.ranges[name][0], low), max(start.ranges[name][1], high))
            for name, (low, high) in ranges.items()
        }
        refitted = copy.deepcopy(start.network)
        refitted.physics = fit_physics(training, start.network.physics)
        tuning = config.tuning(training.num_sets)
        tuned = _train(training, validation, tuning, rng, refitted)
        made = {
            "before": (start.network, start.ranges),
            "physics": (physics_network(refitted.physics), ranges),
            "refitted": (refitted, both),
            "tuned": (tuned, both),
        }
    candidates: dict[str, Candidate] = {}
    errors: dict[str, float] = {}
    for name, (network, seen) in made.items():
        model = as_cost_model(network, data, name)
        errors[name] = evaluate(name, model, validation).score
        candidates[name] = Candidate(network, seen, evaluate(name, model, test))
    return Choice(
        candidates, errors, "mean error over forward, backward and total in validation"
    )
