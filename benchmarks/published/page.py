"""Tables that compare models with published timings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.pages import table
from published.kernels import KernelRow, MeasuredSets, family
from published.links import CollectiveRow

Floats = npt.NDArray[np.float64]
Predicted = Mapping[KernelRow, float]

LOCATIONS = {
    "device": "card's memory",
    "managed (UVM)": "host's memory",
    "managed_caching": "host's memory, cached",
}


def error(ratios: Sequence[float]) -> float:
    """Return the median of |predicted / measured - 1|."""
    return float(np.median(np.abs(np.asarray(ratios) - 1.0)))


def _error_and_ratio(ratios: Sequence[float]) -> str:
    """Return median error and median ratio as text; dashes without predictions."""
    if not len(ratios) or np.isnan(ratios).all():
        return "- / -"
    return f"{error(ratios):.1%} / {np.median(ratios):.2f}"


def kernel_table(rows: Sequence[KernelRow], models: Mapping[str, Predicted]) -> str:
    """Return the table of each model's errors, by location of rows and direction."""
    head = ["median error / predicted over measured"]
    for shown in LOCATIONS.values():
        head += [f"{shown}, forward", "backward"]
    lines = []
    for name, predicted in models.items():
        cells = [name]
        for location in LOCATIONS:
            for forward in (True, False):
                some = [
                    r
                    for r in rows
                    if r.location == location and r.is_forward == forward
                ]
                ratios = [predicted[r] / r.time_ms for r in some]
                cells.append(_error_and_ratio(ratios))
        lines.append(cells)
    return table(head, lines)


def card_table(
    rows: Sequence[KernelRow], predicted: Predicted, of_sets: Mapping[str, Floats]
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the table of errors on cards left out of the fit, and its data.

    Only timings with tables in the card's memory count.

    Args:
        rows: Published timings.
        predicted: Timing -> prediction without its card [ms].
        of_sets: Card -> ratios of the sets measured on it, `S x 2`.
    """
    cards: dict[str, dict[str, Any]] = {}
    lines = []
    for card in sorted({family(r.card) for r in rows}):
        entry: dict[str, Any] = {"timings": 0}
        cells = [card]
        for name, forward in (("forward", True), ("backward", False)):
            ratios = [
                predicted[r] / r.time_ms
                for r in rows
                if family(r.card) == card
                and r.location == "device"
                and r.has_forward == forward
                and r.has_backward != forward
            ]
            if card in of_sets:
                ratios += of_sets[card][:, int(not forward)].tolist()
            entry["timings"] += len(ratios)
            entry[f"{name}_ratio"] = float(np.median(ratios)) if ratios else None
            entry[f"{name}_error"] = error(ratios) if ratios else None
            cells += [str(len(ratios)), _error_and_ratio(ratios)]
        cards[card] = entry
        lines.append(cells)
    head = "card left out | forward: timings | error / ratio | backward: timings | "
    return table(f"{head}error / ratio", lines), cards


def set_table(sets: MeasuredSets, models: Mapping[str, Floats]) -> str:
    """Return the table of errors on measured sets, by number of tables."""
    sizes = np.diff([*sets.first, len(sets.features)])
    bounds = [(1, 1), (2, 8), (9, 40), (41, 100), (1, 100)]
    lines = []
    for low, high in bounds:
        held = (sizes >= low) & (sizes <= high)
        cells = [f"{low} to {high}" if high > low else f"{low}", f"{held.sum():,}"]
        for times in models.values():
            ratios = times[held] / sets.times_ms[held]
            off, middle = np.abs(ratios - 1).mean(axis=0), np.median(ratios, axis=0)
            cells += [f"{e:.1%} / {m:.2f}" for e, m in zip(off, middle, strict=True)]
        lines.append(cells)
    head = [cell for n in models for cell in (f"{n}, forward", "backward")]
    return table(["tables", "sets", *head], lines)


def link_table(
    rows: Sequence[CollectiveRow], models: Mapping[str, Mapping[CollectiveRow, float]]
) -> str:
    """Return the table of errors on each published table of collectives."""
    lines = []
    for name in sorted({r.table for r in rows}):
        some = [r for r in rows if r.table == name]
        cells = [
            _error_and_ratio([predicted[r] / r.time_ms for r in some])
            for predicted in models.values()
        ]
        lines.append([name, str(len(some)), *cells])
    return table(["table", "sizes", *models], lines)
