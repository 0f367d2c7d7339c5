"""The possible error of the physical estimate.

The figures are residuals of each card's timings, predicted by constants that were
fitted to all other cards (`benchmarks/bench_published.py` prints this table).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CardCheck:
    """Errors on one card's timings, predicted by constants fitted without them.

    Errors are medians over timings of tables in the card's memory.
    """

    timings: int
    forward_error: float | None
    """|predicted / measured - 1|; None if there are no timings."""
    backward_error: float | None


CHECKED_CARDS: Mapping[str, CardCheck] = {
    "a100": CardCheck(9, 0.33, 0.15),
    "h100": CardCheck(17, 0.11, 0.20),
    "h200": CardCheck(9320, 0.25, 0.09),
    "mi250x": CardCheck(6, 0.13, None),
    "mi350": CardCheck(69, None, 0.24),
    "v100": CardCheck(24, 0.25, 0.07),
}
"""Name of a card -> its check, for tables in its memory. Both sizes of the A100 count
as one card, as do both makes of the H100. Full data:
`benchmarks/results/published_202611.json.xz`."""

LOG_STD: Mapping[str, float] = {"forward": 0.23, "backward": 0.12}
"""Standard deviation over the cards of log(predicted / measured), from that file."""

_FAMILY: Mapping[str, str] = {"a100-40gb": "a100"}
"""Card -> another card with the same chip, but more or less memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateError:
    """The error of the physical estimate for one card."""

    card: str | None = None
    """Name of the card, a key of `CHECKED_CARDS` if it was checked; None if unknown."""

    @property
    def checked(self) -> CardCheck | None:
        """The card's own check, or None."""
        return CHECKED_CARDS.get(self._family)

    @property
    def _family(self) -> str:
        name = self.card or ""
        return _FAMILY.get(name, name)

    def _others(self, field: str) -> list[float]:
        """Return one figure of all other cards that have it."""
        found = [
            getattr(c, field) for n, c in CHECKED_CARDS.items() if n != self._family
        ]
        return [value for value in found if value is not None]

    @property
    def time_std(self) -> npt.NDArray[np.float64]:
        """Standard deviation of log time, without launches: forward and backward."""
        return np.array([LOG_STD["forward"], LOG_STD["backward"]])

    @property
    def forward(self) -> float:
        """Largest error of forward kernels on the other cards, as a share."""
        return max(self._others("forward_error"))

    @property
    def backward(self) -> float:
        """Largest error of backward kernels on the other cards, as a share."""
        return max(self._others("backward_error"))

    @property
    def of_card(self) -> tuple[float, float]:
        """Forward and backward error: the card's own, or the largest of the others."""
        own = self.checked
        forward, backward = (own.forward_error, own.backward_error) if own else (0, 0)
        return forward or self.forward, backward or self.backward

    def __str__(self) -> str:
        """Return the error in words, for warnings and reports."""
        text = (
            f"forward within {self.forward:.0%} on {len(self._others('forward_error'))}"
            f" other cards, backward within {self.backward:.0%} on "
            f"{len(self._others('backward_error'))}"
        )
        own = self.checked
        if own is None:
            return f"{text}; never checked on this card"
        errors = {"forward": own.forward_error, "backward": own.backward_error}
        known = [f"{n} {e:.0%}" for n, e in errors.items() if e is not None]
        return f"{text}; on this card, {' and '.join(known)} ({own.timings} timings)"
