"""Candidate models, and the choice of the one with the lowest error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_Candidate = TypeVar("_Candidate")


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

    def verdict(self) -> str:
        """Return a sentence that says which candidate is kept and why."""
        listed = ", ".join(f"{name} {error:.1%}" for name, error in self.errors.items())
        return f"Kept `{self.kept}`: it has the lowest {self.criterion} ({listed})."
