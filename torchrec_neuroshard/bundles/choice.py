"""Errors of candidate models, and the choice of the one with the lowest error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from scipy import stats

_Candidate = TypeVar("_Candidate")

POOR_ERROR = 1 / 3
"""A model with a larger error deserves a warning: the estimate, which needs no
measurement, is closer on each card that it was checked on (`CHECKED_CARDS`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Errors of predicted times, relative to the measured times."""

    number: int
    """Number of times."""
    mean: float
    """Mean of the absolute error, as are the next two."""
    median: float
    percentile_90: float
    bias: float
    """Mean of the error with its sign."""
    tau: float
    """Kendall's tau of predicted and measured times; NaN for fewer than three."""

    @classmethod
    def of(
        cls, predicted_N: npt.NDArray[np.float64], measured_N: npt.NDArray[np.float64]
    ) -> Errors:
        """Return the errors of at least one predicted time."""
        error_N = predicted_N / measured_N - 1.0
        size_N = np.abs(error_N)
        tau = float("nan")
        if len(error_N) > 2:
            tau = float(stats.kendalltau(predicted_N, measured_N).statistic)
        return cls(
            number=len(error_N),
            mean=float(size_N.mean()),
            median=float(np.median(size_N)),
            percentile_90=float(np.quantile(size_N, 0.9)),
            bias=float(error_N.mean()),
            tau=tau,
        )


@dataclass(frozen=True, slots=True)
class Choice(Generic[_Candidate]):
    """Candidates by name, and the errors that decide which one is kept."""

    candidates: Mapping[str, _Candidate]
    errors: Mapping[str, float]
    """Error of each candidate; the lowest is kept."""
    criterion: str
    """Name of this error, e.g. "median error"."""

    @property
    def kept(self) -> str:
        """Name of the candidate with the lowest error; ties go to the earliest."""
        return min(self.errors, key=self.errors.__getitem__)

    @property
    def best(self) -> _Candidate:
        """The candidate with the lowest error."""
        return self.candidates[self.kept]

    @property
    def error(self) -> float:
        """The lowest error."""
        return self.errors[self.kept]

    def verdict(self) -> str:
        """Return a sentence that says which candidate is kept and why."""
        listed = ", ".join(f"{name} {error:.1%}" for name, error in self.errors.items())
        return f"Kept `{self.kept}`: it has the lowest {self.criterion} ({listed})."


def stated_error(trained_on: Mapping[str, Any]) -> float | None:
    """Return the error of the kept candidate, from a bundle; None if it has none."""
    errors, kept = trained_on.get("errors"), trained_on.get("kept")
    error = errors.get(kept) if isinstance(errors, Mapping) else None
    return float(error) if isinstance(error, float | int) else None


def poor_fit(error: float | None) -> str | None:
    """Return a warning about a large error, to follow the model's name; else None."""
    if error is None or error <= POOR_ERROR:
        return None
    return (
        f"with an error of {error:.0%}; above {POOR_ERROR:.0%}, an estimate without "
        "measurements is as good. Measure more records, while no other work runs"
    )
