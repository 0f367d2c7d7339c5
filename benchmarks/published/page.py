"""Tables and a picture of models held against published timings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from published.kernels import KernelRow, family
from published.links import CollectiveRow

__all__ = ["card_table", "kernel_table", "link_table", "picture", "table"]

Predicted = Mapping[KernelRow, float]

LOCATIONS = {
    "device": "card's memory",
    "managed (UVM)": "host's memory",
    "managed_caching": "host's memory, cached",
}


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers are aligned right."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("| --- |" + " ---: |" * (len(header) - 1))
    lines += ["| " + " | ".join(str(c) for c in row) + " |" for row in rows]
    return "\n".join(lines)


def error(ratios: Sequence[float]) -> float:
    """Median of |predicted / measured - 1|."""
    return float(np.median(np.abs(np.asarray(ratios) - 1.0)))


def summary(
    rows: Sequence[KernelRow],
    predicted: Predicted,
    group: Callable[[KernelRow], Any],
) -> dict[str, float]:
    """Errors and ratios of some timings, each alike and each group of them alike."""
    ratios = {r: predicted[r] / r.time_ms for r in rows}
    groups: dict[Any, list[float]] = {}
    for row, ratio in ratios.items():
        groups.setdefault(group(row), []).append(ratio)
    values = list(ratios.values())
    return {
        "timings": len(values),
        "median_error": error(values),
        "median_ratio": float(np.median(values)),
        "groups": len(groups),
        "mean_of_groups_median_errors": float(
            np.mean([error(v) for v in groups.values()])
        ),
    }


def percent(share: float) -> str:
    """Show a share; NaN as a dash."""
    return "-" if math.isnan(share) else f"{share:.0%}"


def kernel_table(
    rows: Sequence[KernelRow],
    models: Mapping[str, Predicted],
    group: Callable[[KernelRow], Any],
) -> tuple[str, list[dict[str, Any]]]:
    """Median error and ratio of each model, by where rows are and by direction."""
    lines, raw = [], []
    for name, predicted in models.items():
        cells = []
        for location in LOCATIONS:
            for forward in (True, False):
                some = [
                    r
                    for r in rows
                    if r.location == location and r.is_forward == forward
                ]
                found = summary(some, predicted, group)
                raw.append(
                    {
                        "model": name,
                        "location": location,
                        "direction": "forward" if forward else "backward",
                        **found,
                    }
                )
                ratio = found["median_ratio"]
                shown = "-" if math.isnan(ratio) else f"{ratio:.2f}"
                cells.append(f"{percent(found['median_error'])} / {shown}")
        lines.append([name, *cells])
    header = ["median error / predicted over measured"]
    for shown in LOCATIONS.values():
        header += [f"{shown}, forward", "backward"]
    return table(header, lines), raw


def card_table(
    rows: Sequence[KernelRow], predicted: Predicted
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Each card's timings in its memory, by constants fitted without them."""
    cards: dict[str, dict[str, Any]] = {}
    lines = []
    for card in sorted({family(r.card) for r in rows}):
        entry: dict[str, Any] = {"timings": 0}
        cells: list[str] = []
        for name, forward in (("forward", True), ("backward", False)):
            ratios = [
                predicted[r] / r.time_ms
                for r in rows
                if family(r.card) == card
                and r.location == "device"
                and r.has_forward == forward
                and r.has_backward != forward
            ]
            entry["timings"] += len(ratios)
            known = bool(ratios)
            entry[f"{name}_ratio"] = float(np.median(ratios)) if known else None
            entry[f"{name}_error"] = error(ratios) if known else None
            cells += [
                str(len(ratios)),
                f"{error(ratios):.0%}" if known else "-",
                f"{np.median(ratios):.2f}" if known else "-",
            ]
        cards[card] = entry
        lines.append([card, *cells])
    header = ["card left out", "forward: timings", "error", "ratio"]
    header += ["backward: timings", "error", "ratio"]
    return table(header, lines), cards


def link_table(
    rows: Sequence[CollectiveRow], models: Mapping[str, Mapping[CollectiveRow, float]]
) -> tuple[str, list[dict[str, Any]]]:
    """Median error and ratio of each published table of collectives."""
    lines, raw = [], []
    for name in sorted({r.table for r in rows}):
        some = [r for r in rows if r.table == name]
        cells = []
        for model, predicted in models.items():
            ratios = [predicted[r] / r.time_ms for r in some]
            cells.append(f"{error(ratios):.1%} / {np.median(ratios):.2f}")
            raw.append(
                {
                    "table": name,
                    "model": model,
                    "sizes": len(some),
                    "median_error": error(ratios),
                    "worst_error": float(np.max(np.abs(np.array(ratios) - 1))),
                    "median_ratio": float(np.median(ratios)),
                }
            )
        lines.append([name, len(some), *cells])
    return table(["table", "sizes", *models], lines), raw


def picture(
    rows: Sequence[KernelRow],
    predicted: Predicted,
    links: Sequence[CollectiveRow],
    links_predicted: Mapping[CollectiveRow, float],
    path: Path,
) -> None:
    """Draw predicted over measured against measured times; see `bench_published`."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "published"
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), sharey=True)
    cards = sorted({family(r.card) for r in rows} | {r.card for r in links})
    colour = {card: f"C{i}" for i, card in enumerate(cards)}
    panels = (("forward kernels", True), ("backward kernels", False))
    for axis, (title, forward) in zip(axes, panels, strict=False):
        some = [r for r in rows if r.is_forward == forward]
        for card in cards:
            own = [r for r in some if family(r.card) == card]
            axis.scatter(
                [r.time_ms for r in own],
                [predicted[r] / r.time_ms for r in own],
                s=12,
                color=colour[card],
                label=card if own else None,
                alpha=0.6,
            )
        axis.set_title(f"{title}, card left out", fontsize=9)
    for card in cards:
        own_links = [r for r in links if r.card == card]
        axes[2].scatter(
            [r.time_ms for r in own_links],
            [links_predicted[r] / r.time_ms for r in own_links],
            s=12,
            color=colour[card],
            label=card if own_links else None,
            alpha=0.6,
        )
    axes[2].set_title("collectives, table left out", fontsize=9)
    for axis in axes:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.axhspan(1 / 1.35, 1.35, color="grey", alpha=0.15)
        axis.set_xlabel("measured [ms]")
        axis.legend(fontsize=7)
    axes[0].set_yticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
    axes[0].set_ylabel("predicted / measured")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
