"""Training the model of collectives on records, judging it on others.

A net takes more records than a straight line does. So candidates are made, from the
plainest to the trained net, and the one that errs least on other records is kept.

Shapes: `N` records, `W` ranks padded to the most, `K` terms, `L` collectives, `S`
group sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize, stats

from torchrec_neuroshard.bundles.training_loop import fit, hold_out, kept_line, seeded
from torchrec_neuroshard.errors import RecordError
from torchrec_neuroshard.measure.records import CommsRecord
from torchrec_neuroshard.models.base import COLLECTIVES
from torchrec_neuroshard.models.collectives_network import (
    FROM_OWNER,
    TERM_NAMES,
    CommsNetwork,
    physical_terms,
)

__all__ = [
    "CommsCandidates",
    "CommsData",
    "CommsEvaluation",
    "CommsTrainConfig",
    "build_comms",
    "evaluate_comms",
    "fit_coefficients",
    "make_candidates",
    "train_comms",
]

_LEAST_SHARE = 0.05
"""A rank that is through sooner than this share of the slowest one's time counts as
needing that share: such times are noise, and nobody waits for them."""
_LEAST_MS = 1e-3
_LEAST_RECORDS = 5
"""Fewest records of a collective that a factor of its own is taken from."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsTrainConfig:
    """How to train."""

    steps: int = 1_500
    """Steps over all records."""
    learning_rate: float = 1e-2
    """Peak; cosine to zero."""
    hidden: int = 16
    bend_penalty: float = 1e-3
    """On the squared log corrections of the net, which is to bend, not to replace."""
    validation_share: float = 0.15
    """Share of the training records that picks the best step."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CommsData:
    """Measured collectives as arrays, padded to the largest world."""

    terms_NWK: npt.NDArray[np.float32]
    present_NW: npt.NDArray[np.bool_]
    collective_N: npt.NDArray[np.int64]
    groups_N2: npt.NDArray[np.float32]
    """World and local size."""
    transfer_NW: npt.NDArray[np.float32]
    """Measured; 0 where padded."""

    def select(self, rows: npt.NDArray[np.int64]) -> CommsData:
        """Return some records."""
        return CommsData(*(getattr(self, name)[rows] for name in self.__slots__))

    def slowest_ms(self) -> npt.NDArray[np.float64]:
        """Time of each record's slowest rank, `N`."""
        slowest = self.transfer_NW.max(axis=1).astype(np.float64)
        return np.asarray(np.maximum(slowest, _LEAST_MS))


def build_comms(
    records: Sequence[CommsRecord], intra_gb_per_s: float, inter_gb_per_s: float
) -> CommsData:
    """Turn records into arrays.

    Args:
        records: Of any world sizes.
        intra_gb_per_s: Nominal bandwidth inside a node.
        inter_gb_per_s: Nominal bandwidth between nodes.

    Raises:
        RecordError: There are no records, or a bandwidth that they need is missing.
    """
    if not records:
        raise RecordError("no records to train on; run 'neuroshard collect comms'")
    crossing = any(r.world_size > r.local_world_size for r in records)
    if not intra_gb_per_s > 0 or (crossing and not inter_gb_per_s > 0):
        raise RecordError(
            "records of collectives need bandwidths above 0 GB/s, got "
            f"{intra_gb_per_s} inside a node and {inter_gb_per_s} between nodes; "
            "measure them again with 'neuroshard collect comms'"
        )
    count, width = len(records), max(r.world_size for r in records)
    data = CommsData(
        np.zeros((count, width, len(TERM_NAMES)), dtype=np.float32),
        np.zeros((count, width), dtype=np.bool_),
        np.array([COLLECTIVES.index(r.collective) for r in records]),
        np.array([[r.world_size, r.local_world_size] for r in records], np.float32),
        np.zeros((count, width), dtype=np.float32),
    )
    for i, r in enumerate(records):
        w = r.world_size
        units = np.array([r.bytes_per_peer], dtype=np.float64)
        data.terms_NWK[i, :w] = physical_terms(
            r.collective, units, r.local_world_size, intra_gb_per_s, inter_gb_per_s
        )[0]
        data.present_NW[i, :w] = True
        data.transfer_NW[i, :w] = r.transfer_ms
    return data


def _least_time(data: CommsData) -> npt.NDArray[np.float64]:
    """Measured times, `N x W`, kept from being smaller than means anything."""
    slowest = data.slowest_ms()[:, None]
    floored: npt.NDArray[np.float64] = np.maximum(
        data.transfer_NW, _LEAST_SHARE * slowest
    )
    return floored


def fit_coefficients(data: CommsData) -> npt.NDArray[np.float64]:
    """Fit non-negative coefficients per collective by relative least squares.

    What the net starts from, for all world sizes alike.

    Returns:
        `L x K`.
    """
    measured_NW = _least_time(data)

    def fit_one(_: str, rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        present = data.present_NW[rows]
        matrix = data.terms_NWK[rows][present].astype(np.float64)
        return fit_relative(matrix, measured_NW[rows][present])

    return _fit_each(data, fit_one)


def _fit_each(
    data: CommsData,
    fit_one: Callable[[str, npt.NDArray[np.bool_]], npt.NDArray[np.float64]],
) -> npt.NDArray[np.float64]:
    """Fit each collective to its records; one without any takes the others' mean."""
    fitted = np.full((len(COLLECTIVES), len(TERM_NAMES)), np.nan)
    for number, name in enumerate(COLLECTIVES):
        rows = data.collective_N == number
        if rows.any():
            fitted[number] = fit_one(name, rows)
    known = ~np.isnan(fitted[:, 0])
    fitted[~known] = fitted[known].mean(axis=0)
    return fitted


class _Tensors:
    """A `CommsData` as tensors, with its distinct group sizes."""

    def __init__(self, data: CommsData) -> None:
        self.terms = torch.from_numpy(data.terms_NWK)
        self.present = torch.from_numpy(data.present_NW)
        self.collective = torch.from_numpy(data.collective_N)
        groups, which = np.unique(data.groups_N2, axis=0, return_inverse=True)
        self.groups = torch.from_numpy(groups)
        self.which = torch.from_numpy(which.reshape(-1).astype(np.int64))
        self.log_transfer = torch.from_numpy(_least_time(data)).float().log()
        self.log_slowest = torch.from_numpy(data.slowest_ms()).float().log()


def _forward(network: CommsNetwork, data: _Tensors) -> torch.Tensor:
    """Times of every rank, `N x W` [ms]; 0 where padded."""
    table = network.coefficients(data.groups)  # S x L x K
    rows = table[data.which, data.collective]
    return torch.einsum("nwk,nk->nw", data.terms, rows) * data.present


def predict_comms(network: CommsNetwork, data: CommsData) -> npt.NDArray[np.float64]:
    """Predict the times of measured records, `N x W` [ms]; 0 where padded."""
    with torch.no_grad():
        return _forward(network, _Tensors(data)).double().numpy()


def train_comms(
    data: CommsData,
    config: CommsTrainConfig,
    init: CommsNetwork | None = None,
) -> CommsNetwork:
    """Train the model of collectives.

    Args:
        data: Records to train on; a part picks the best step.
        config: Steps and rates.
        init: Start from these weights (fine-tuning) instead of a linear fit.

    Raises:
        RecordError: Too few records.
    """
    count = len(data.collective_N)
    rng = np.random.default_rng(config.seed)
    held_out, others = hold_out(rng, count, config.validation_share)
    if len(others) < 20:
        raise RecordError(f"{count} records are too few to train on; measure more")
    validation, training = data.select(held_out), data.select(others)
    with seeded(config.seed):
        if init is None:
            start = fit_coefficients(training)
            start = np.maximum(start, 1e-3 * start.max(axis=1, keepdims=True))
            network = _network_of(start, config.hidden)
        else:
            network = copy.deepcopy(init)
        _fit(network, _Tensors(training), validation, config)
    return network.eval()


def _fit(
    network: CommsNetwork,
    training: _Tensors,
    validation: CommsData,
    config: CommsTrainConfig,
) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate)
    every = max(1, config.steps // 20)

    def penalty() -> torch.Tensor:
        bends = network.bends(training.groups)
        return config.bend_penalty * bends.square().sum(dim=2).mean()

    # Every step is over all records; so many of them are an epoch.
    starts = range(0, config.steps, every)
    fit(
        network,
        optimizer,
        [[training] * min(every, config.steps - start) for start in starts],
        lambda data: _loss(network, data),
        lambda: float(np.median(_slowest_error(network, validation))),
        penalty=penalty,
        schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps),
    )


def _loss(network: CommsNetwork, data: _Tensors) -> torch.Tensor:
    ms = _forward(network, data).clamp_min(_LEAST_MS * 0.1)
    each = (ms.log() - data.log_transfer)[data.present]
    slowest = ms.amax(dim=1).log() - data.log_slowest
    zero = torch.zeros(1)
    huber = torch.nn.functional.smooth_l1_loss
    return huber(slowest, zero.expand_as(slowest), beta=0.05) + 0.5 * huber(
        each, zero.expand_as(each), beta=0.05
    )


def _network_of(coefficients_LK: npt.NDArray[np.float64], hidden: int) -> CommsNetwork:
    """Return a network that takes coefficients as they are; those of 0 as next to 0."""
    network = CommsNetwork(hidden)
    with torch.no_grad():
        network.log_coefficients_LK.copy_(
            torch.from_numpy(np.log(np.maximum(coefficients_LK, 1e-9)))
        )
    return network


def _bandwidth_coefficients(data: CommsData) -> npt.NDArray[np.float64]:
    """One latency and one bandwidth per collective, as coefficients `L x K`.

    Counted are the bytes of the rank that sends most, or is sent most in collectives
    whose bytes per peer are those that a rank is sent.
    """
    measured_N = data.slowest_ms()

    def fit_one(name: str, rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        side = "most_received" if name in FROM_OWNER else "most_sent"
        columns = [i for i, n in enumerate(TERM_NAMES) if n.rpartition("_")[0] == side]
        busiest = data.terms_NWK[rows, 0][:, columns].sum(axis=1).astype(np.float64)
        matrix = np.stack([np.ones(rows.sum()), busiest], axis=1)
        fitted_K = np.zeros(len(TERM_NAMES))
        launch = TERM_NAMES.index("launch")
        fitted_K[launch], fitted_K[columns] = fit_relative(matrix, measured_N[rows])
        return fitted_K

    return _fit_each(data, fit_one)


def _rescaled(network: CommsNetwork, data: CommsData) -> CommsNetwork:
    """Return a network times one factor per collective: half of the data is above it.

    The factor of least relative error would lean low where records are noisy.
    """
    scaled = copy.deepcopy(network)
    predicted_N = predict_comms(network, data).max(axis=1)
    ratio_N = data.slowest_ms() / predicted_N.clip(min=_LEAST_MS)
    overall = np.median(ratio_N)
    with torch.no_grad():
        for number in range(len(COLLECTIVES)):
            rows = data.collective_N == number
            factor = overall
            if rows.sum() >= _LEAST_RECORDS:
                factor = np.median(ratio_N[rows])
            scaled.log_coefficients_LK[number] += float(np.log(factor))
    return scaled


@dataclass(frozen=True, slots=True)
class CommsCandidates:
    """Models of the same collectives, and which one to keep."""

    networks: Mapping[str, CommsNetwork]
    """By name: of another machine `before`, `scaled` and `tuned`; `learned`, `linear`
    and `bandwidth` of these records alone."""
    errors: Mapping[str, float]
    """Median error on records that judge alone."""
    kept: str
    """The one that errs least; of equals the first."""

    @property
    def network(self) -> CommsNetwork:
        """The model to keep."""
        return self.networks[self.kept]

    def verdict(self) -> str:
        """Say in one sentence what is kept and why."""
        return kept_line(self.kept, self.errors, "median error")


def make_candidates(
    training: CommsData,
    test: CommsData,
    config: CommsTrainConfig,
    source: CommsNetwork | None = None,
) -> CommsCandidates:
    """Make models of collectives and choose one.

    Args:
        training: Records to fit to.
        test: Records that judge and choose.
        config: Steps and rates.
        source: The model of another machine of this backend, to start from.

    Raises:
        RecordError: Too few records.
    """
    networks: dict[str, CommsNetwork] = {}
    if source is not None:
        scaled = _rescaled(source, training)
        tuned = train_comms(training, config, scaled)
        networks = {"before": source, "scaled": scaled, "tuned": tuned}
    networks["learned"] = train_comms(training, config)
    plain = {
        "linear": fit_coefficients(training),
        "bandwidth": _bandwidth_coefficients(training),
    }
    with seeded(config.seed):
        for name, coefficients_LK in plain.items():
            network = _network_of(coefficients_LK, config.hidden)
            # Relative least squares lean low where records are noisy.
            networks[name] = _rescaled(network, training).eval()
    errors = {
        name: float(np.median(_slowest_error(network, test)))
        for name, network in networks.items()
    }
    return CommsCandidates(networks, errors, min(errors, key=errors.__getitem__))


def _slowest_error(network: CommsNetwork, data: CommsData) -> npt.NDArray[np.float64]:
    predicted = predict_comms(network, data).max(axis=1)
    error: npt.NDArray[np.float64] = np.abs(predicted / data.slowest_ms() - 1)
    return error


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsEvaluation:
    """How well a model predicts the slowest rank of measured collectives."""

    world_size: int
    collective: str
    """One of `COLLECTIVES`, or `all`."""
    trained: bool
    """Whether the training records have this world size."""
    num_records: int
    median: float
    """Of the absolute error relative to the measured time."""
    mean: float
    percentile_90: float
    kendall_tau: float
    """Not a number for fewer than three records."""

    def line(self) -> str:
        """Return the errors as printed."""
        return (
            f"median error {self.median:.2%}, 90th percentile "
            f"{self.percentile_90:.2%}, tau {self.kendall_tau:.4f}"
        )


def evaluate_comms(
    network: CommsNetwork, training: CommsData, test: CommsData
) -> list[CommsEvaluation]:
    """Judge a model on records that it was not trained on.

    Returns:
        One row per world size and collective, and one per world size for all.
    """
    predicted = predict_comms(network, test).max(axis=1)
    measured = test.slowest_ms()
    seen = set(training.groups_N2[:, 0].astype(int))
    rows = []
    for world_size in sorted(set(test.groups_N2[:, 0].astype(int))):
        for number, name in [(-1, "all"), *enumerate(COLLECTIVES)]:
            chosen = test.groups_N2[:, 0] == world_size
            if number >= 0:
                chosen = chosen & (test.collective_N == number)
            if not chosen.any():
                continue
            error = np.abs(predicted[chosen] / measured[chosen] - 1)
            tau = float("nan")
            if chosen.sum() > 2:
                tau = stats.kendalltau(predicted[chosen], measured[chosen]).statistic
            rows.append(
                CommsEvaluation(
                    world_size=int(world_size),
                    collective=name,
                    trained=world_size in seen,
                    num_records=int(chosen.sum()),
                    median=float(np.median(error)),
                    mean=float(error.mean()),
                    percentile_90=float(np.quantile(error, 0.9)),
                    kendall_tau=float(tau),
                )
            )
    return rows
