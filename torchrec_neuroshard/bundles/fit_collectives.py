"""Fit coefficients of collectives to records, and evaluate them on other records.

The candidates are another machine's coefficients (as they are, rescaled, or refitted
with a pull toward the rescaled ones) and a fit to these records alone. The candidate
with the lowest error in cross-validation is kept.

Shapes: `N` records, `W` ranks padded to the largest world, `K` terms, `L` collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.bundles.choice import Choice, Errors
from torchrec_neuroshard.bundles.fit_physics import fit_constants
from torchrec_neuroshard.bundles.set_data import NUM_FOLDS
from torchrec_neuroshard.errors import RecordError
from torchrec_neuroshard.measure.records import CommsRecord
from torchrec_neuroshard.models.base import COLLECTIVES
from torchrec_neuroshard.models.collective_terms import TERM_NAMES, collective_terms

Floats = npt.NDArray[np.float64]

_LEAST_SHARE = 0.05
"""Times below this share of the slowest rank's time are raised to it: they are noise,
and nobody waits for them."""
_LEAST_MS = 1e-3
_LEAST_RECORDS = 5
"""A collective with fewer records gets no factor of its own."""
_FEWEST_RECORDS = 20
"""Fewest records to fit to."""


@dataclass(frozen=True, slots=True)
class CommsData:
    """Measured collectives as arrays, padded to the largest world."""

    terms_NWK: Floats
    present_NW: npt.NDArray[np.bool_]
    collective_N: npt.NDArray[np.int64]
    world_size_N: npt.NDArray[np.int64]
    transfer_NW: Floats
    """Measured times [ms]; 0 for padding."""

    def select(self, records_N: npt.NDArray[np.bool_]) -> CommsData:
        """Return the data of some records."""
        return CommsData(
            self.terms_NWK[records_N],
            self.present_NW[records_N],
            self.collective_N[records_N],
            self.world_size_N[records_N],
            self.transfer_NW[records_N],
        )

    def slowest_ms(self) -> Floats:
        """Return the time of each record's slowest rank, `N`."""
        return np.asarray(np.maximum(self.transfer_NW.max(axis=1), _LEAST_MS))


def build_comms(
    records: Sequence[CommsRecord], intra_gb_per_s: float, inter_gb_per_s: float
) -> CommsData:
    """Convert records into arrays.

    Args:
        records: Records of any world sizes.
        intra_gb_per_s: Nominal bandwidth inside a node.
        inter_gb_per_s: Nominal bandwidth between nodes.

    Raises:
        RecordError: There are no records, or a bandwidth is missing.
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
        np.zeros((count, width, len(TERM_NAMES))),
        np.zeros((count, width), dtype=np.bool_),
        np.array([COLLECTIVES.index(r.collective) for r in records]),
        np.array([r.world_size for r in records]),
        np.zeros((count, width)),
    )
    for i, r in enumerate(records):
        w = r.world_size
        data.terms_NWK[i, :w] = collective_terms(
            r.collective,
            np.array([r.bytes_per_peer]),
            r.local_world_size,
            intra_gb_per_s,
            inter_gb_per_s,
        )[0]
        data.present_NW[i, :w] = True
        data.transfer_NW[i, :w] = r.transfer_ms
    return data


def predict_comms(coefficients_LK: Floats, data: CommsData) -> Floats:
    """Return the predicted time of each record's slowest rank, `N` [ms]."""
    each_NK = coefficients_LK[data.collective_N]
    slowest: Floats = np.einsum("nwk,nk->nw", data.terms_NWK, each_NK).max(axis=1)
    return slowest


def fit_coefficients(data: CommsData, start_LK: Floats | None = None) -> Floats:
    """Fit coefficients of at least 0 per collective; see `fit_constants`.

    Args:
        data: Records to fit to.
        start_LK: Coefficients that the fit is pulled toward, with the weight of all
            records of a collective; collectives without records keep them. None fits
            without a pull; collectives without records get the others' mean.

    Returns:
        `L x K`.
    """
    floored_NW = np.maximum(data.transfer_NW, _LEAST_SHARE * data.slowest_ms()[:, None])

    def fit_one(number: int) -> Floats:
        of_one_NW = data.present_NW & (data.collective_N == number)[:, None]
        terms, measured_ms = data.terms_NWK[of_one_NW], floored_NW[of_one_NW]
        start_K = None if start_LK is None else start_LK[number]
        pull = len(measured_ms)
        return fit_constants(lambda _: terms, measured_ms, start_K, pull=pull)[0]

    fitted_LK = np.zeros((len(COLLECTIVES), len(TERM_NAMES)))
    if start_LK is not None:
        fitted_LK[:] = start_LK
    measured = np.unique(data.collective_N)
    for number in measured:
        fitted_LK[number] = fit_one(number)
    if start_LK is None:
        others = np.setdiff1d(np.arange(len(COLLECTIVES)), measured)
        fitted_LK[others] = fitted_LK[measured].mean(axis=0)
    return _rescaled(fitted_LK, data)


def named_coefficients(coefficients_LK: Floats) -> dict[str, dict[str, float]]:
    """Return collective -> term -> coefficient, without zero coefficients."""
    return {
        name: {t: float(v) for t, v in zip(TERM_NAMES, row, strict=True) if v > 0}
        for name, row in zip(COLLECTIVES, coefficients_LK, strict=True)
    }


def _rescaled(coefficients_LK: Floats, data: CommsData) -> Floats:
    """Return coefficients times one factor per collective, the median ratio.

    The factor with the lowest relative error would be too low for noisy records.
    """
    ratio_N = data.slowest_ms() / predict_comms(coefficients_LK, data).clip(_LEAST_MS)
    factors_L1 = np.full((len(COLLECTIVES), 1), np.median(ratio_N))
    for number in range(len(COLLECTIVES)):
        rows = data.collective_N == number
        if rows.sum() >= _LEAST_RECORDS:
            factors_L1[number] = np.median(ratio_N[rows])
    rescaled_LK: Floats = coefficients_LK * factors_L1
    return rescaled_LK


def _coefficients(data: CommsData, source_LK: Floats | None) -> dict[str, Floats]:
    """Return the coefficients of each candidate; see `fit_comms`."""
    made: dict[str, Floats] = {}
    if source_LK is not None:
        made["before"] = source_LK
        made["scaled"] = _rescaled(source_LK, data)
        made["tuned"] = fit_coefficients(data, made["scaled"])
    return {**made, "linear": fit_coefficients(data)}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsEvaluation:
    """Errors of a model's times for the slowest rank of measured collectives."""

    world_size: int
    collective: str
    """One of `COLLECTIVES`, or `all`."""
    trained: bool
    """Whether the training records have this world size."""
    errors: Errors

    def line(self) -> str:
        """Return the errors as a line of text."""
        return (
            f"{self.world_size} ranks ({'' if self.trained else 'not '}in training): "
            f"{self.errors.number} collectives, median error {self.errors.median:.2%}, "
            f"90th percentile {self.errors.percentile_90:.2%}, tau "
            f"{self.errors.tau:.4f}"
        )


def evaluate_comms(
    coefficients_LK: Floats, training: CommsData, test: CommsData
) -> list[CommsEvaluation]:
    """Return the errors of coefficients on records that they were not fitted to.

    Returns:
        One row per world size and collective, and one row per world size for all
        collectives.
    """
    predicted, measured = predict_comms(coefficients_LK, test), test.slowest_ms()
    rows = []
    for world_size in np.unique(test.world_size_N):
        of_world = test.world_size_N == world_size
        by_collective = (test.collective_N == i for i in range(len(COLLECTIVES)))
        for name, of_one in zip(
            ("all", *COLLECTIVES), (of_world, *by_collective), strict=True
        ):
            chosen = of_world & of_one
            if chosen.any():
                rows.append(
                    CommsEvaluation(
                        world_size=int(world_size),
                        collective=name,
                        trained=bool((training.world_size_N == world_size).any()),
                        errors=Errors.of(predicted[chosen], measured[chosen]),
                    )
                )
    return rows


@dataclass(frozen=True, slots=True)
class CommsCandidate:
    """One candidate model of collectives."""

    coefficients_LK: Floats
    evaluations: tuple[CommsEvaluation, ...]
    """Errors on the test records, by world size and collective."""


def fit_comms(
    training: CommsData, test: CommsData, source_LK: Floats | None = None
) -> Choice[CommsCandidate]:
    """Make the candidates for collectives and choose by cross-validation.

    Args:
        training: Records to fit to.
        test: Records for the reported errors.
        source_LK: Another machine's coefficients for this backend, to start from.

    Returns:
        Candidate `linear`, a fit to the training records alone. With `source_LK` also
        `before`, `scaled` and `tuned`.

    Raises:
        RecordError: There are too few records.
    """
    count = len(training.collective_N)
    if count < _FEWEST_RECORDS:
        raise RecordError(f"{count} records are too few to train on; measure more")
    fold_N = np.random.default_rng(0).permutation(count) % NUM_FOLDS
    logs = defaultdict[str, list[Floats]](list)
    for fold in range(NUM_FOLDS):
        left_out = training.select(fold_N == fold)
        fitted = _coefficients(training.select(fold_N != fold), source_LK)
        for name, found_LK in fitted.items():
            predicted = predict_comms(found_LK, left_out).clip(_LEAST_MS)
            logs[name].append(np.abs(np.log(predicted / left_out.slowest_ms())))
    errors = {name: float(np.median(np.concatenate(e))) for name, e in logs.items()}
    made = {
        name: CommsCandidate(found_LK, tuple(evaluate_comms(found_LK, training, test)))
        for name, found_LK in _coefficients(training, source_LK).items()
    }
    return Choice(made, errors, "median |log ratio| in cross-validation")
