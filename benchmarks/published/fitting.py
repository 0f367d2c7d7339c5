"""Fit the constants that all cards share, and leave sources and cards out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize

from published.kernels import KernelRow, device_constants, family
from torchrec_neuroshard.models.physical import (
    STEP_POWER,
    PhysicalConstants,
    host_memory_ms,
    shard_times,
)

__all__ = [
    "FORWARD_GAP_US",
    "SORT_LAUNCH_US",
    "card_left_out",
    "fit",
    "group",
    "left_out",
    "predict",
    "shared_of",
    "softened",
]

Floats = npt.NDArray[np.float64]

_EDGE = 0.3
"""Relative errors beyond count by their size, no longer by their square."""
FORWARD_GAP_US = 15.0
"""Of the forward launch: bounds check and gaps, which traces of kernels leave out."""
SORT_LAUNCH_US = 61.0
"""Of the backward launch: the sort's kernels of no work."""

START: Mapping[str, tuple[float, float]] = {
    "forward_launch_us": (21.0, 1.3),
    "bag_step_us": (0.5, 3.0),
    "bag_ns": (0.2, 3.0),
    "lookup_ns": (0.1, 3.0),
    "gather_gb_per_s": (5_000.0, 3.0),
    "backward_launch_us": (110.0, 1.5),
    "sort_ns": (0.15, 2.0),
    "gradient_ns": (0.2, 3.0),
    "gradient_gb_per_s": (5_000.0, 3.0),
    "access_ns": (0.2, 3.0),
    "host_read": (1.0, 2.0),
    "host_update": (1.5, 2.0),
    "cache_lookup_ns": (3.6, 2.0),
}
"""Constant -> expected value, and the factor that it may well be off by: what the
timings say nothing of stays there."""
WALL_SOURCES = ("NVIDIA/recsys-examples", "TorchRec")
"""Their times are of the clock around many calls; the others are of kernels."""


def predict(rows: Sequence[KernelRow], shared: Mapping[str, float]) -> Floats:
    """Predict timings: of each, the parts of the model that it covers [ms]."""
    out = np.zeros(len(rows))
    by_card: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        by_card.setdefault(row.card, []).append(number)
    for card, numbers in by_card.items():
        constants = dataclasses.replace(device_constants(card), **shared)
        out[numbers] = _predict_card([rows[n] for n in numbers], constants)
    return out


def _predict_card(rows: Sequence[KernelRow], c: PhysicalConstants) -> Floats:
    features = np.concatenate([r.features for r in rows])
    first = np.cumsum([0] + [len(r.tables) for r in rows[:-1]])

    def per_row(values_T: Floats) -> Floats:
        return np.add.reduceat(values_T, first)

    def which(chosen: Callable[[KernelRow], bool]) -> npt.NDArray[np.bool_]:
        return np.array([chosen(r) for r in rows])

    times = shard_times(features, c)
    wall = which(lambda r: r.source.startswith(WALL_SOURCES))
    sorts = which(lambda r: r.phase != "backward_cta+warp")
    forward = per_row(times.forward) + 1e-3 * (
        c.forward_launch_us
        - np.where(wall, 0.0, FORWARD_GAP_US)
        + c.bag_step_us * per_row(times.steps) ** (1 / STEP_POWER)
    )
    backward = per_row(times.update) + 1e-3 * c.backward_launch_us
    backward += np.where(sorts, per_row(times.sort), -1e-3 * SORT_LAUNCH_US)
    missed = np.concatenate([r.missed for r in rows])
    kinds = (("managed (UVM)", None), ("managed_caching", missed))
    for location, misses in kinds:
        there = which(lambda r, at=location: r.location == at)  # type: ignore[misc]
        if there.any():
            host = host_memory_ms(features, c, c.host_gb_per_s, misses)
            forward += there * per_row(host[:, 0])
            backward += there * per_row(host[:, 1])
    total: Floats = forward * which(lambda r: r.has_forward)
    total += backward * which(lambda r: r.has_backward)
    return total


def group(row: KernelRow) -> tuple[str, str, str, str]:
    """Timings that count as much as any other such: one source, card and quantity."""
    return row.source, row.card, row.phase, row.location


def softened(off: Floats) -> Floats:
    """Residuals whose squares grow with the error where it is large, not its square."""
    soft: Floats = np.sqrt(2 * _EDGE**2 * (np.sqrt(1 + (off / _EDGE) ** 2) - 1))
    return soft


def fit(rows: Sequence[KernelRow]) -> dict[str, float]:
    """Fit all shared constants: least squares of log ratios, far ones by their size.

    Args:
        rows: Timings; each group of them counts alike.
    """
    names = list(START)
    start = np.log([START[n][0] for n in names])
    width = np.log([START[n][1] for n in names])
    sizes = Counter(map(group, rows))
    weight = np.array([4.0 / np.sqrt(sizes[group(r)]) for r in rows])
    measured = np.log([r.time_ms for r in rows])

    def residuals(values: Floats) -> Floats:
        shared = dict(zip(names, np.exp(values).tolist(), strict=True))
        off = np.log(predict(rows, shared)) - measured
        return np.concatenate([weight * softened(off), (values - start) / width])

    found = optimize.least_squares(residuals, start, diff_step=1e-4)
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))


def left_out(
    rows: Sequence[KernelRow], key: Callable[[KernelRow], Any]
) -> dict[KernelRow, float]:
    """Predict each timing by constants fitted without those of its key [ms]."""
    out: dict[KernelRow, float] = {}
    for value in sorted({key(r) for r in rows}):
        shared = fit([r for r in rows if key(r) != value])
        other = [r for r in rows if key(r) == value]
        out.update(zip(other, predict(other, shared).tolist(), strict=True))
    return out


def card_left_out(rows: Sequence[KernelRow]) -> dict[KernelRow, float]:
    """Leave a card's family out at a time."""
    return left_out(rows, lambda r: family(r.card))


def shared_of(constants: PhysicalConstants) -> dict[str, float]:
    """The shared constants of a device, as shipped."""
    return {name: getattr(constants, name) for name in START}
