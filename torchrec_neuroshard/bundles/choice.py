"""Candidate models, and the choice of the one with the lowest error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_Candidate = TypeVar("_Candidate")

POOR_ERROR = 1 / 3
"""A model with a larger error deserves a warning: the estimate, which needs no
measurement, is closer on each card that it was checked on (`CHECKED_CARDS`)."""


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
