"""Several models of one thing, of which the one that errs least is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Choice"]

_Candidate = TypeVar("_Candidate")


@dataclass(frozen=True, slots=True)
class Choice(Generic[_Candidate]):
    """Candidates by name, and which one to keep."""

    candidates: Mapping[str, _Candidate]
    errors: Mapping[str, float]
    """Error of each candidate, by which one is chosen."""
    criterion: str
    """What that error is, in words."""

    @property
    def kept(self) -> str:
        """Name of the candidate that errs least; of equals the first."""
        return min(self.errors, key=self.errors.__getitem__)

    @property
    def best(self) -> _Candidate:
        """The candidate kept."""
        return self.candidates[self.kept]

    def verdict(self) -> str:
        """Say in one sentence what is kept and why."""
        listed = ", ".join(f"{name} {error:.1%}" for name, error in self.errors.items())
        return f"Kept `{self.kept}`, of least {self.criterion} ({listed})."
