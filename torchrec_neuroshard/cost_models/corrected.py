"""Another model's times, corrected by some sets that were measured.

The logarithm of measured over predicted is taken to be a factor that all sets share,
plus what each table adds in proportion to its share of a set, plus what sets with
nearly the same tables have in common, plus how the machine was while it was measured,
plus noise: a Gaussian process, forward and backward apart. Noise is read off sets
measured again; how much tables and like sets matter is what makes the measurements
likeliest (C. E. Rasmussen, C. K. I. Williams: Gaussian Processes for Machine Learning,
5.4.1).
With few measurements it stays near the model, and far from them it returns to it.

Shapes: `N` shards, `F` features, `M` measured sets, `S` sets, `T` known tables, `E`
encoding values, `2` forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.cost_models.base import CostModel
from torchrec_neuroshard.cost_models.scaled import ScaledCostModel
from torchrec_neuroshard.features import FEATURE_NAMES, WIDTH_FEATURES

__all__ = ["CorrectedCostModel", "MeasuredSet"]

Floats = npt.NDArray[np.float64]

SHARED_STD = 0.3
"""Of the logarithm of the factor that all sets share: devices of one kind differ so."""
ROUND_STD = 0.05
"""Of the logarithm of a factor that a round's measurements share: machines drift."""
TABLE_STDS = (0.0, 0.05, 0.1, 0.2)
ALIKE_STDS = (0.02, 0.05, 0.1)
"""Of what a table adds, and of what like sets have in common: those that are tried."""
NOISE_STD, NOISE_RECORDS = 0.03, 4
"""Of one measurement, before any set was measured again, and how many of these that is
worth."""
REACH = 0.3
"""Distance, between the shares that tables have of sets, over which sets are alike."""
MAX_TABLES = 128
"""Tables that are told from each other: those with the largest shares."""
USUAL_SPREAD = 0.05
"""Of the passes of a set on a CPU, relative."""
_OF_TABLE = [i for i, name in enumerate(FEATURE_NAMES) if name not in WIDTH_FEATURES]
"""Columns that shards of one table share."""


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """A set of shards, and by how much it was off."""

    features_NF: npt.NDArray[np.float32]
    """Of its shards."""
    ratio_2: tuple[float, float]
    """Measured over predicted."""
    spread: float = 0.0
    """Relative median deviation of its passes: `CostRecord.spread`."""
    round: int = 0
    """Sets of one round were measured in turn, on the machine as it was then."""


class CorrectedCostModel(ScaledCostModel):
    """Another model's kernels, corrected where sets were measured; see the module."""

    def __init__(self, alone: CostModel, measured: Sequence[MeasuredSet]) -> None:
        """Learn from measurements; several may be of one set.

        Args:
            alone: The model that they were compared with.
            measured: At least one set.
        """
        super().__init__(alone, (1.0, 1.0))
        self.error = None
        self.source = f"{alone.source}, corrected by {len(measured)} measured sets"
        nothing = alone.predict_sums(np.zeros((1, alone.encoding_dim)))
        assert (nothing == 0).all(), "an empty set takes no time"
        known = [self._own(m.features_NF) for m in measured]
        total: dict[bytes, float] = {}
        for keys, own_N in known:
            for key, own in zip(keys, own_N / own_N.sum(), strict=True):
                total[key] = total.get(key, 0.0) + float(own)
        most = sorted(total, key=lambda k: total[k], reverse=True)[:MAX_TABLES]
        self._place = {key: place for place, key in enumerate(most)}
        share_MT = np.stack([self._shares(*one).sum(axis=0) for one in known])
        share_MT /= np.array([own_N.sum() for _, own_N in known])[:, None]
        round_M1 = np.array([[m.round] for m in measured], dtype=np.float64)
        rows, which = np.unique(
            np.hstack([share_MT, round_M1]), axis=0, return_inverse=True
        )
        self._share_MT, which = rows[:, :-1], which.reshape(-1)
        same_MM = rows[:, -1:] == rows[:, -1]
        # One that was disturbed counts as a part of one.
        weights = np.array([1 / (1 + (m.spread / USUAL_SPREAD) ** 2) for m in measured])
        count_M = np.bincount(which, weights)
        self._fits = []
        for logs in np.log([m.ratio_2 for m in measured]).T:
            mean_M = np.bincount(which, weights * logs) / count_M
            squares = float(weights @ (logs - mean_M[which]) ** 2)
            again = len(logs) - len(count_M)
            noise = NOISE_STD**2 * NOISE_RECORDS + squares
            noise /= NOISE_RECORDS + again
            apart_MM = ROUND_STD**2 * same_MM + np.diag(noise / count_M)
            self._fits.append(self._fit(mean_M, apart_MM))

    @property
    def additive(self) -> None:
        """What was measured bends sums; see `CostModel.additive`."""
        return None

    @property
    def encoding_dim(self) -> int:
        """The other model's, each known table's time alone, and that of all."""
        return self.alone.encoding_dim + len(self._place) + 1

    def encode(self, features_NF: npt.NDArray[np.float32]) -> Floats:
        """See `CostModel.encode`."""
        keys, own_N = self._own(features_NF)
        parts = [self.alone.encode(features_NF), self._shares(keys, own_N)]
        return np.concatenate([*parts, own_N[:, None]], axis=1)

    def predict_sums(self, sums_SE: Floats) -> Floats:
        """See `CostModel.predict_sums`."""
        dim = self.alone.encoding_dim
        plain: Floats = self.alone.predict_sums(sums_SE[:, :dim])
        share_ST = self._share(sums_SE)
        logs = [self._kernel(share_ST, *fit.stds) @ fit.weights_M for fit in self._fits]
        corrected: Floats = plain * np.exp(np.stack(logs, axis=1))
        return corrected

    def relative_uncertainty(self, sums_SE: Floats) -> Floats:
        """What the measurements leave open of each set's total."""
        costs_S2 = self.predict_sums(sums_SE)
        total_S = np.maximum(costs_S2.sum(axis=1), 1e-9)
        off: Floats = (costs_S2 * self.log_stds(sums_SE)).sum(axis=1) / total_S
        return off

    def log_stds(self, sums_SE: Floats) -> Floats:
        """Standard deviations of the logarithms of `predict_sums`, `S x 2`."""
        share_ST = self._share(sums_SE)
        return np.stack([self._std(share_ST, fit) for fit in self._fits], axis=1)

    def _own(self, features_NF: npt.NDArray[np.float32]) -> tuple[list[bytes], Floats]:
        """Which table each shard is of, and what it takes alone [ms]."""
        alone_N2 = self.alone.predict_sums(self.alone.encode(features_NF))
        keys = [row.tobytes() for row in features_NF[:, _OF_TABLE]]
        return keys, np.maximum(alone_N2.sum(axis=1), 1e-9)

    def _shares(self, keys: Sequence[bytes], own_N: Floats) -> Floats:
        """Put what shards take alone under their tables: `N x T`."""
        out_NT = np.zeros((len(keys), len(self._place)))
        for row, key in enumerate(keys):
            place = self._place.get(key)
            if place is not None:
                out_NT[row, place] = own_N[row]
        return out_NT

    def _share(self, sums_SE: Floats) -> Floats:
        """Return the share of each known table in sets: `S x T`."""
        dim = self.alone.encoding_dim
        share_ST: Floats = sums_SE[:, dim:-1] / np.maximum(sums_SE[:, -1:], 1e-9)
        return share_ST

    def _kernel(self, share_ST: Floats, table_std: float, alike_std: float) -> Floats:
        """Covariance of sets with those measured: `S x M`."""
        product_SM = share_ST @ self._share_MT.T
        square_S1 = (share_ST**2).sum(axis=1, keepdims=True)
        square_M = (self._share_MT**2).sum(axis=1)
        apart_SM = np.maximum(square_S1 + square_M - 2 * product_SM, 0.0)
        alike_SM = alike_std**2 * np.exp(-apart_SM / (2 * REACH**2))
        all_SM: Floats = SHARED_STD**2 + table_std**2 * product_SM + alike_SM
        return all_SM

    def _fit(self, log_M: Floats, apart_MM: Floats) -> _Fit:
        """Take the standard deviations that make the measurements likeliest.

        Args:
            log_M: Of measured over predicted.
            apart_MM: Covariance of what the sets themselves have no part in.
        """
        fits = []
        for stds in itertools.product(TABLE_STDS, ALIKE_STDS):
            covariance_MM = self._kernel(self._share_MT, *stds) + apart_MM
            lower_MM = np.linalg.cholesky(covariance_MM).astype(np.float64)
            white_M = np.linalg.solve(lower_MM, log_M)
            likelihood = -0.5 * white_M @ white_M - np.log(np.diag(lower_MM)).sum()
            weights_M: Floats = np.linalg.solve(lower_MM.T, white_M)
            fits.append((likelihood, _Fit(stds, weights_M, lower_MM)))
        return max(fits, key=lambda fit: float(fit[0]))[1]

    def _std(self, share_ST: Floats, fit: _Fit) -> Floats:
        table_std, alike_std = fit.stds
        own_S = SHARED_STD**2 + alike_std**2
        own_S = own_S + table_std**2 * (share_ST**2).sum(axis=1)
        white_MS = np.linalg.solve(fit.lower_MM, self._kernel(share_ST, *fit.stds).T)
        std_S: Floats = np.sqrt(np.maximum(own_S - (white_MS**2).sum(axis=0), 0.0))
        return std_S


@dataclass(frozen=True, slots=True)
class _Fit:
    """Of one direction."""

    stds: tuple[float, float]
    """Of tables and of like sets."""
    weights_M: Floats
    lower_MM: Floats
    """Cholesky factor of the covariance of what was measured."""
