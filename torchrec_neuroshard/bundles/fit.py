"""Fit cost models of kernels to measured sets, and evaluate them.

First the physics is fitted: constants per kind of work (`models.physical`), by least
squares of relative errors. Then a network that corrects the physics is trained on the
same sets. Both may start from a model of another device: its constants are refitted,
its network is fine-tuned. Left-out sets decide between the candidates. The test sets
hold tables that no candidate has seen; their errors are only reported.

Shapes: see `models.network` and `models.physical`.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from torchrec_neuroshard.bundles.choice import Choice, Errors
from torchrec_neuroshard.bundles.fit_physics import fit_physics
from torchrec_neuroshard.bundles.set_data import SetData, rows_of
from torchrec_neuroshard.bundles.settings import TrainConfig
from torchrec_neuroshard.bundles.training_loop import fit, seeded, shuffled_batches
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.models.network import (
    SetCostNetwork,
    ShardInputs,
    set_inputs,
    shard_inputs,
)
from torchrec_neuroshard.models.physical import Physics, set_values, set_works
from torchrec_neuroshard.tables.features import feature_ranges

Floats = npt.NDArray[np.float64]

_INSIDE, _DEVIATIONS = 0.9, 1.645
"""90 % of normally distributed errors are within 1.645 standard deviations."""


def physics_network(physics: Physics) -> SetCostNetwork:
    """Return a network that corrects nothing and predicts the physics alone."""
    with seeded(0), torch.no_grad():
        network = SetCostNetwork(num_members=1, hidden=1, latent=1, head_hidden=1)
        for layer in (*network.encoder, *network.head):
            layer.zero_()
        network.physics = physics
    return network.eval()


# The network.


def _with_columns(
    rows_NX: npt.NDArray[np.float32], values: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Append the same values to each row."""
    return np.concatenate([rows_NX, np.tile(values, (len(rows_NX), 1))], axis=1)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Sets of one or more devices as the network's inputs."""

    inputs: tuple[torch.Tensor, ...]
    """`ShardInputs` of all shards; with several devices, `x` holds the device, too."""
    set_ids_N: npt.NDArray[np.int64]
    sets_S2: torch.Tensor
    """`Physics.sets_ms`."""
    y_SY: torch.Tensor
    """`set_inputs`; with several devices, it holds the device, too."""
    costs_S3: torch.Tensor
    """Forward, backward and total."""

    @classmethod
    def of(
        cls, parts: Sequence[tuple[SetData, Physics]], num_devices: int
    ) -> _Prepared:
        """Prepare the sets of several devices; `parts[d]` are of device `d`."""
        inputs: list[ShardInputs] = []
        ids, sets, ys, start = [], [], [], 0
        for d, (data, physics) in enumerate(parts):
            made = shard_inputs(data.features_NF, physics)
            one_hot = np.eye(max(num_devices, 1), dtype=np.float32)[d, :num_devices]
            inputs.append(made._replace(x_NX=_with_columns(made.x_NX, one_hot)))
            ids.append(data.set_ids_N + start)
            values_NV = set_values(data.features_NF, physics.least_threads)
            values_SV = data.sum_shards(values_NV)
            works_SG = set_works(values_SV, physics.least_threads)
            sets.append(physics.sets_ms(works_SG))
            ys.append(_with_columns(set_inputs(works_SG, values_SV), one_hot))
            start += data.num_sets
        costs = np.concatenate([data.costs_S2 for data, _ in parts])
        return cls(
            tuple(
                torch.from_numpy(np.concatenate(v)) for v in zip(*inputs, strict=True)
            ),
            np.concatenate(ids),
            torch.from_numpy(np.concatenate(sets)).float(),
            torch.from_numpy(np.concatenate(ys)),
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
        out = network.predict(sums, self.sets_S2[sets], self.y_SY[sets])
        with_total = torch.cat([out, out.sum(2, keepdim=True)], dim=2)
        return with_total.log() - self.costs_S3[sets].log()[:, None]


def train(
    data: SetData,
    config: TrainConfig,
    *,
    init: SetCostNetwork | None = None,
    others: Sequence[SetData] = (),
) -> SetCostNetwork:
    """Train an ensemble on all sets.

    With M members, each leaves out a different M-th of the sets, so that the members
    differ. All keep their last weights: the learning rate ends at 0, and choosing an
    epoch by left-out sets gains nothing.

    Args:
        data: Sets to train on.
        config: Sizes and rates.
        init: Network to fine-tune, with its physics. None starts from random weights
            and a physics fitted to the sets.
        others: Sets of other devices of this type to learn from as well. One network is
            trained for all devices, with the device as an input, and finally fine-tuned
            on `data`.
    """
    rng = np.random.default_rng(config.seed)
    physics = fit_physics(data) if init is None else init.physics
    parts = [(data, physics), *((o, fit_physics(o)) for o in others)]
    devices = len(parts) if others else 0
    prepared = _Prepared.of(parts, devices)
    with seeded(config.seed):
        if init is None:
            network = SetCostNetwork(
                config.num_members,
                config.hidden,
                config.latent,
                config.head_hidden,
                devices,
            )
            for values, mean, std in (
                (prepared.inputs[0], network.input_mean_X, network.input_std_X),
                (prepared.y_SY, network.set_mean_Y, network.set_std_Y),
            ):
                known = values[:, : len(mean)]
                mean.copy_(known.mean(dim=0))
                std.copy_(known.std(dim=0, correction=0).clamp_min(1e-2))
        else:
            network = copy.deepcopy(init)
        network.physics = physics
        _fit(network, prepared, config, rng)
        if others:
            network = network.of_device(0)
            prepared = _Prepared.of(parts[:1], 0)
            _fit(network, prepared, config.tuning(data.num_sets), rng)
    return network.eval()


def _fit(
    network: SetCostNetwork,
    training: _Prepared,
    config: TrainConfig,
    rng: np.random.Generator,
) -> None:
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
    seen_SM = torch.ones(num_sets, members)
    if members > 1:
        left_out_S = torch.from_numpy(rng.permutation(num_sets) % members)
        seen_SM[torch.arange(num_sets), left_out_S] = 0.0

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
        max_grad_norm=10.0,
        schedule=schedule,
    )


def _scaled_spread(ratio_S: Floats, spread_S: Floats) -> tuple[float, float]:
    """Return a factor on the members' spread, and a minimum of the uncertainty.

    With them, 90 % of left-out sets are inside the 90 % interval. Of the pairs that
    reach 90 %, the likeliest is taken.

    Args:
        ratio_S: Predicted over measured totals of left-out sets.
        spread_S: Relative standard deviation between the members on these sets.
    """
    error = np.abs(ratio_S - 1.0) / ratio_S
    best, likeliest = (1.0, float(np.quantile(error, _INSIDE)) / _DEVIATIONS), -np.inf
    for least in np.arange(0.0, 0.2, 0.005):
        for factor in np.arange(0.0, 4.1, 0.1):
            std = np.hypot(factor * spread_S, least) + 1e-6
            if (error <= _DEVIATIONS * std).mean() < _INSIDE:
                continue
            likely = float((-np.log(std) - 0.5 * (error / std) ** 2).mean())
            if likely > likeliest:
                best, likeliest = (float(factor), float(least)), likely
    return best


def as_cost_model(network: SetCostNetwork, data: SetData, name: str) -> NeuralCostModel:
    """Return a network trained on `data` as a cost model, to evaluate it unsaved."""
    return NeuralCostModel(
        network, name=name, hardware="", ranges=feature_ranges(data.features_NF)
    )


# Evaluation and choice.


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Errors of a model on measured sets."""

    name: str
    forward: Errors
    backward: Errors
    total: Errors
    """Errors of forward + backward."""
    cheapest: Errors
    """The same for the cheapest tenth of the sets."""
    workloads: Mapping[str, Errors]
    """Workload -> the same for sets with most tables from it."""
    inside: float
    """Share of the sets inside the model's 90 % interval."""
    log_error: float
    """Mean of |log(predicted / measured)| over forward, backward and total. It ranks
    candidates, because it does not favour low predictions."""

    def line(self) -> str:
        """Return the errors as a line of text."""
        return (
            f"{self.name}: forward {self.forward.mean:.2%}, backward "
            f"{self.backward.mean:.2%}, total {self.total.mean:.2%} (median "
            f"{self.total.median:.2%}, bias {self.total.bias:+.2%}), tau "
            f"{self.total.tau:.4f}"
        )


def evaluate(name: str, model: CostModel, data: SetData) -> Evaluation:
    """Return a model's errors on measured sets."""
    sums = model.sum_sets(data.features_NF, data.set_ids_N, data.num_sets)
    predicted_S2, measured_S2 = model.predict_sums(sums), data.costs_S2
    predicted_S3, measured_S3 = (
        np.c_[costs, costs.sum(axis=1)] for costs in (predicted_S2, measured_S2)
    )
    total_S, measured_S = predicted_S3[:, 2], measured_S3[:, 2]

    def total_of(sets_S: npt.NDArray[np.bool_]) -> Errors:
        return Errors.of(total_S[sets_S], measured_S[sets_S])

    forward, backward, total = map(Errors.of, predicted_S3.T, measured_S3.T)
    interval_S = _DEVIATIONS * model.relative_uncertainty(sums) * total_S
    return Evaluation(
        name=name,
        forward=forward,
        backward=backward,
        total=total,
        cheapest=total_of(measured_S <= np.quantile(measured_S, 0.1)),
        workloads={
            str(workload): total_of(data.workload_S == workload)
            for workload in np.unique(data.workload_S)
        },
        inside=float((np.abs(total_S - measured_S) <= interval_S).mean()),
        log_error=float(np.abs(np.log(predicted_S3 / measured_S3)).mean()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanErrors:
    """Errors of a model on plans of which all ranks were measured."""

    num_plans: int
    num_sets: int
    """Ranks of all plans."""
    busiest: float
    """Predicted over measured time of the busiest rank, geometric mean of the plans."""
    spread: float
    """Standard deviation of log(measured / predicted) among the ranks of one plan. The
    search balances predictions, so this is the imbalance that it cannot see."""

    def __str__(self) -> str:
        """Return the errors as part of a sentence."""
        return (
            f"the busiest rank is predicted at {self.busiest:.3f} of its time, and "
            f"errors differ by {self.spread:.1%} among the ranks of a plan (standard "
            "deviation)"
        )


def plan_errors(model: CostModel, data: SetData) -> PlanErrors | None:
    """Return a model's errors on the plans in the data; None if there are none."""
    found = []
    for plan in np.unique(data.plan_S[data.plan_S >= 0]):
        ranks = data.select(np.flatnonzero(data.plan_S == plan))
        if ranks.num_sets > 1:
            predicted_W = model.predict_sets(
                ranks.features_NF, ranks.set_ids_N, ranks.num_sets
            ).sum(axis=1)
            found.append((predicted_W, ranks.costs_S2.sum(axis=1)))
    if not found:
        return None
    logs = [np.log(measured_W / predicted_W) for predicted_W, measured_W in found]
    squares = sum(float(((log_W - log_W.mean()) ** 2).sum()) for log_W in logs)
    busiest = [
        np.log(predicted.max() / measured.max()) for predicted, measured in found
    ]
    num_sets = sum(map(len, logs))
    return PlanErrors(
        num_plans=len(found),
        num_sets=num_sets,
        busiest=float(np.exp(np.mean(busiest))),
        spread=math.sqrt(squares / (num_sets - len(found))),
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate model for a device."""

    network: SetCostNetwork
    ranges: Mapping[str, tuple[float, float]]
    """Feature name -> smallest and largest value in training."""
    evaluation: Evaluation
    """Errors on the test sets of held-out tables; its name is the candidate's."""
    plans: PlanErrors | None
    """Errors on the plans among the test sets, if there are any."""


def fit_model(
    data: SetData,
    test: SetData,
    config: TrainConfig,
    *,
    start: NeuralCostModel | None = None,
    others: Sequence[SetData] = (),
) -> Choice[Candidate]:
    """Make the candidates for a device and choose by their errors on left-out sets.

    With few sets, all candidates are made once per fold without its sets, to be judged,
    and in the end from all sets.

    Args:
        data: The device's training sets; see `SetData.splits`.
        test: The device's sets of held-out tables, for the reported errors.
        config: Sizes and rates.
        start: A model of another device to start from.
        others: Sets of other devices to learn from as well; only without `start`.

    Returns:
        Candidates `physics` and `learned`; with `start`, candidates `before`,
        `physics`, `refitted` and `tuned`.
    """
    splits = data.splits(np.random.default_rng(config.seed), config.validation_share)
    judged = defaultdict[str, list[tuple[float, Floats, Floats]]](list)
    for training, left_out in splits:
        made = _make_networks(training, config, start, others)
        for name, network in made.items():
            judged[name].append(_judge(network, left_out))
    if len(splits) > 1:
        made = _make_networks(data, config, start, others)
    ranges = feature_ranges(data.features_NF)
    seen = {"physics": ranges, "learned": ranges}
    if start is not None:
        seen["before"] = dict(start.ranges)
        seen["refitted"] = seen["tuned"] = {
            name: (min(start.ranges[name][0], low), max(start.ranges[name][1], high))
            for name, (low, high) in ranges.items()
        }
    candidates: dict[str, Candidate] = {}
    errors: dict[str, float] = {}
    for name, network in made.items():
        found, ratios, spreads = zip(*judged[name], strict=True)
        weights = [len(ratio_S) for ratio_S in ratios]
        errors[name] = float(np.average(found, weights=weights))
        scaled = _scaled_spread(np.concatenate(ratios), np.concatenate(spreads))
        network.spread_2.copy_(torch.tensor(scaled))
        model = as_cost_model(network, data, name)
        candidates[name] = Candidate(
            network, seen[name], evaluate(name, model, test), plan_errors(model, test)
        )
    return Choice(candidates, errors, "mean |log ratio| on left-out sets")


def _make_networks(
    data: SetData,
    config: TrainConfig,
    start: NeuralCostModel | None,
    others: Sequence[SetData],
) -> dict[str, SetCostNetwork]:
    """Return the network of each candidate; see `fit_model`."""
    if start is None:
        learned = train(data, config, others=others)
        return {"physics": physics_network(learned.physics), "learned": learned}
    refitted = copy.deepcopy(start.network)
    refitted.physics = fit_physics(data, start.network.physics)
    return {
        "before": copy.deepcopy(start.network),
        "physics": physics_network(refitted.physics),
        "refitted": refitted,
        "tuned": train(data, config.tuning(data.num_sets), init=refitted),
    }


def _judge(network: SetCostNetwork, data: SetData) -> tuple[float, Floats, Floats]:
    """Return the `log_error` on sets, each total's ratio, and the members' spread.

    The ratio is predicted over measured, the spread relative to the prediction.
    """
    with torch.no_grad():
        prepared = _Prepared.of([(data, network.physics)], 0)
        ratios_SM3 = prepared.error(network).exp().double().numpy()
    ratio_S3 = ratios_SM3.mean(axis=1)
    total_SM = ratios_SM3[..., 2]
    spread_S = total_SM.std(axis=1) / total_SM.mean(axis=1)
    return float(np.abs(np.log(ratio_S3)).mean()), ratio_S3[:, 2], spread_S
