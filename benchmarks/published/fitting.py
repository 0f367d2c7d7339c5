"""Fit the constants that all cards share, also with sources or cards left out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize

from published.kernels import KernelRow, MeasuredSets, device_constants, family
from torchrec_neuroshard.models.card_physics import PhysicalConstants, host_memory_ms
from torchrec_neuroshard.models.compute import PhysicalCostModel

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_EDGE = 0.3
"""Log errors above this count by their size, smaller ones by their square."""
_SETS_WEIGHT = 12.0
"""Weight of the measured sets, in groups of published timings. There are as many groups
of forward kernels."""

FIT_ONLY: Mapping[str, tuple[float, float]] = {
    "forward_kernel_us": (5.0, 1.3),
    "wall_us": (10.0, 3.0),
    "update_launch_us": (30.0, 1.5),
    "unpooled": (2.0, 2.0),
}
"""Constants that only the fit uses, since published timings differ from a training
loop. Kernel traces leave out the bounds check and gaps, so a forward kernel without
work takes `forward_kernel_us`. Most traces leave out the sort, too, and the backward's
launch then takes `update_launch_us`. Wall-clock times of many calls add `wall_us`.
Kernels without pooling do not read bags and take `unpooled` times as long per id."""

START: Mapping[str, tuple[float, float]] = {
    "efficiency": (0.85, 1.1),
    "forward_launch_us": (12.0, 3.0),
    "forward_step_us": (0.4, 3.0),
    "bag_ns": (0.43, 3.0),
    "lookup_thread_ns": (0.001, 5.0),
    "backward_launch_us": (70.0, 3.0),
    "backward_step_us": (0.4, 3.0),
    "sort_pass_us": (10.0, 2.0),
    "sort_bag_ns": (0.2, 3.0),
    "sort_ns": (0.07, 3.0),
    "update_thread_ns": (0.003, 5.0),
    "hot_row_ns": (10.0, 10.0),
    "adam_ns": (1.0, 3.0),
    "weight_gradient_us": (20.0, 10.0),
    "weight_gradient_ns": (0.2, 10.0),
    "host_read": (1.0, 2.0),
    "host_update": (1.5, 2.0),
    "cache_lookup_ns": (3.6, 2.0),
    **FIT_ONLY,
}
"""Constant -> expected value, and the factor by which it may be wrong. Constants that
no timing depends on keep the expected value. For `bag_ns` it comes from the bounds
checks in traces of an A100 (0.31 and 0.60 ns)."""
WALL_SOURCES = ("NVIDIA/recsys-examples", "TorchRec")
"""Sources with wall-clock times of many calls of kernels without pooling. All other
sources time kernels with pooling."""


def predict(rows: Sequence[KernelRow], shared: Mapping[str, float]) -> Floats:
    """Return predictions of the parts of the model that each timing covers [ms]."""
    out = np.zeros(len(rows))
    by_card: dict[tuple[str, bool], list[int]] = {}
    for number, row in enumerate(rows):
        wall = row.source.startswith(WALL_SOURCES)
        by_card.setdefault((row.card, wall), []).append(number)
    for (card, wall), numbers in by_card.items():
        own = _with(device_constants(card), shared)
        # No timing covers the bounds check or the gradient of lookups' weights.
        own = dataclasses.replace(
            own, bag_ns=0.0, weight_gradient_us=0.0, weight_gradient_ns=0.0
        )
        if wall:
            own = dataclasses.replace(
                own,
                sort_bag_ns=0.0,
                lookup_thread_ns=own.lookup_thread_ns * shared["unpooled"],
            )
        elif family(card) in ("a100", "v100"):
            # In traces of 2021 and 2022, FBGEMM did not divide warps yet.
            own = dataclasses.replace(own, least_threads=32.0)
        chosen = [rows[n] for n in numbers]
        out[numbers] = _predict_card(chosen, own, wall, shared)
    return out


def _with(device: PhysicalConstants, shared: Mapping[str, float]) -> PhysicalConstants:
    known = {n: v for n, v in shared.items() if n not in FIT_ONLY}
    return dataclasses.replace(device, **known)


def _predict_card(
    rows: Sequence[KernelRow],
    c: PhysicalConstants,
    wall: bool,
    shared: Mapping[str, float],
) -> Floats:
    features = np.concatenate([r.features for r in rows])
    first = np.cumsum([0] + [len(r.tables) for r in rows[:-1]])

    def which(chosen: Callable[[KernelRow], bool]) -> Bools:
        return np.array([chosen(r) for r in rows])

    forward, backward = _set_times(features, first, c).T
    unsorted = dataclasses.replace(c, sort_ns=0.0, sort_bag_ns=0.0, sort_pass_us=0.0)
    update = _set_times(features, first, unsorted)[:, 1]
    kernel_us = shared["forward_kernel_us"] - c.forward_launch_us
    extra_us = shared["wall_us"] if wall else kernel_us
    forward = forward + 1e-3 * extra_us
    sort_launch = 1e-3 * (c.backward_launch_us - shared["update_launch_us"])
    sorts = which(lambda r: r.phase != "backward_cta+warp")
    backward = np.where(sorts, backward, update - sort_launch)
    missed = np.concatenate([r.missed for r in rows])
    kinds = (("managed (UVM)", None), ("managed_caching", missed))
    for location, misses in kinds:
        there = which(lambda r, at=location: r.location == at)  # type: ignore[misc]
        if there.any():
            host = host_memory_ms(features, c, c.host_gb_per_s, misses)
            host = np.add.reduceat(host, first)
            forward = forward + there * host[:, 0]
            backward = backward + there * host[:, 1]
    total: Floats = forward * which(lambda r: r.has_forward)
    total += backward * which(lambda r: r.has_backward)
    return total


def predict_sets(sets: MeasuredSets, shared: Mapping[str, float]) -> Floats:
    """Return predictions of measured sets, `S x 2` [ms]."""
    constants = _with(device_constants(sets.card), shared)
    return _set_times(sets.features, sets.first, constants)


def _set_times(
    features: npt.NDArray[np.float32],
    first: npt.NDArray[np.int64],
    constants: PhysicalConstants,
) -> Floats:
    model = PhysicalCostModel(constants, name="a card", hardware="a card")
    return model.predict_sums(np.add.reduceat(model.encode(features), first))


def group(row: KernelRow) -> tuple[str, str, str, str]:
    """Return the group of a timing. All groups have the same weight in the fit."""
    return row.source, row.card, row.phase, row.location


def softened(off: Floats) -> Floats:
    """Return residuals whose squares grow linearly with large errors."""
    soft: Floats = np.sqrt(2 * _EDGE**2 * (np.sqrt(1 + (off / _EDGE) ** 2) - 1))
    return soft


def fit(rows: Sequence[KernelRow], sets: MeasuredSets | None) -> dict[str, float]:
    """Return the shared constants, fitted by softened least squares of log ratios.

    Args:
        rows: Timings. Each group of them has the same weight.
        sets: Measured sets. None: they are left out.
    """
    sizes = Counter(map(group, rows))
    weight = np.array([4.0 / np.sqrt(sizes[group(r)]) for r in rows])
    measured = np.log([r.time_ms for r in rows])
    width = np.log([factor for _, factor in START.values()])

    def residuals(shared: Mapping[str, float], moved: Floats) -> list[Floats]:
        off = np.log(predict(rows, shared)) - measured
        parts = [weight * softened(off), moved / width]
        if sets is not None:
            off = np.log(predict_sets(sets, shared) / sets.times_ms)
            each = 4.0 * np.sqrt(_SETS_WEIGHT / len(off))
            parts.append(each * softened(off).ravel())
        return parts

    return fit_logs({n: value for n, (value, _) in START.items()}, residuals)


def fit_logs(
    start: Mapping[str, float],
    residuals: Callable[[Mapping[str, float], Floats], Sequence[Floats]],
    **options: Any,
) -> dict[str, float]:
    """Return constants that make the squares of residuals least.

    Args:
        start: First values; all constants are above 0.
        residuals: Function of the constants, and of how far their logarithms are from
            the first ones.
        options: Further arguments of `least_squares`.
    """
    first = np.log(list(start.values()))

    def constants(values: Floats) -> dict[str, float]:
        return dict(zip(start, np.exp(values).tolist(), strict=True))

    def all_residuals(values: Floats) -> Floats:
        return np.concatenate(residuals(constants(values), values - first))

    found = optimize.least_squares(all_residuals, first, diff_step=1e-4, **options)
    return constants(found.x)


def left_out(
    rows: Sequence[KernelRow], sets: MeasuredSets, key: Callable[[KernelRow], str]
) -> dict[str, dict[str, float]]:
    """Return key -> constants that were fitted without the key's timings.

    The measured sets are left out only with the H200.
    """
    found = {}
    for value in sorted({key(r) for r in rows}):
        others = [r for r in rows if key(r) != value]
        found[value] = fit(others, None if value == sets.card else sets)
    return found


def shared_of(constants: PhysicalConstants) -> dict[str, float]:
    """Return the shipped shared constants of a device."""
    return {n: getattr(constants, n) for n in START if n not in FIT_ONLY}
