"""Charts of a run: plan quality beside planning time, and quality by family."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.charts import DOTS, THEMES, chart_paths, save
from planner_comparison import page, paired
from planner_comparison.paired import BEST_PRACTICE, OURS, SPLIT_TYPES

_INCHES = (10.0, 4.2)
_LETTER, _LINE, _DOT = 0.0145, 0.042, 0.022
"""Width of a letter, height of a line in labels, and size of a dot, as shares of the
axes."""


def draw_charts(data: dict[str, Any], out: Path) -> list[Path]:
    """Write the charts of `chart_paths`; return their paths.

    The left chart has one dot per planner: median planning seconds, and the geometric
    mean of measured time relative to TorchRec's best practice. The right chart has the
    same ratio by family of tasks.

    Args:
        data: All results of the run.
        out: Path without suffix.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    view, paths = page.views(data)[0], chart_paths(out)
    for path, colors in zip(paths, THEMES.values(), strict=True):
        figure = Figure(figsize=_INCHES, dpi=DOTS, facecolor=colors["page"])
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        _draw_dots(left, view, page.planners(data), colors)
        _draw_families(right, view, page.stock(data), colors)
        save(figure, path, colors)
    return paths


def _kind(name: str) -> str:
    if name.startswith(OURS):
        return "ours"
    return "torchrec" if name.startswith("torchrec") else "others"


def _draw_dots(
    axes: Axes, view: page.View, names: Sequence[str], colors: Mapping[str, str]
) -> None:
    dots = []
    for name in names:
        over = paired.compare(view.tasks, name, BEST_PRACTICE, view.metric)
        seconds = page.planning_seconds(view.tasks, name)
        if over and seconds and name != paired.AGAIN:
            dots.append((over.mean, statistics.median(seconds), name))
    axes.set_xscale("log")
    axes.set_title("plans and planning time; lower left is better", loc="left")
    axes.set_xlabel("planning, seconds (median)")
    axes.set_ylabel("kernels alone; 1 = TorchRec, table- and column-wise")
    if not dots:
        return
    means, seconds = [d[0] for d in dots], [d[1] for d in dots]
    axes.set_xlim(min(seconds) / 1.6, max(seconds) * 14)  # room for labels
    axes.set_ylim(min(means) - 0.04, max(means) + 0.04)
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [to_axes.transform((own, mean)) for mean, own, _ in dots]
    taken = [(x - _DOT / 2, x + _DOT / 2, y) for x, y in places]
    for (mean, own, name), (x, y) in sorted(zip(dots, places, strict=True)):
        color = colors[_kind(name)]
        axes.scatter(
            [own], [mean], s=110 if name == OURS else 45, color=color, zorder=3
        )
        text = re.sub(f"^{OURS}", "this planner", name)
        text = text.replace("torchrec", "TorchRec")
        begin, end = x + _DOT, x + _DOT + _LETTER * (len(text) + 1)
        others = [t for t in taken if t != (x - _DOT / 2, x + _DOT / 2, y)]
        steps = itertools.chain.from_iterable((n, -n) for n in itertools.count())
        height = next(
            h
            for h in (y + step * _LINE / 4 for step in steps)
            if not any(
                begin < right and end > left and abs(h - at) < _LINE
                for left, right, at in others
            )
        )
        taken.append((begin, end, height))
        moved = abs(height - y) > _LINE / 2
        axes.annotate(
            text,
            (x, y),
            (begin, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=color,
            fontsize=8.5,
            fontweight="bold" if name == OURS else "normal",
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.6,
                "relpos": (0, 0.5),
            }
            if moved
            else None,
        )


def _draw_families(
    axes: Axes, view: page.View, stock: Sequence[str], colors: Mapping[str, str]
) -> None:
    bars = {
        "this planner": (OURS, "ours"),
        "TorchRec, all types": (SPLIT_TYPES, "torchrec"),
    }
    groups = page.families(view)
    height = 0.8 / len(bars)
    for row, (label, (name, kind)) in enumerate(bars.items()):
        for place, tasks in enumerate(groups.values()):
            over = paired.compare(tasks, name, BEST_PRACTICE, view.metric)
            if over is None:
                continue
            middle = place + (row - (len(bars) - 1) / 2) * height
            axes.barh(
                middle,
                over.mean,
                height * 0.9,
                color=colors[kind],
                label=label if not place else None,
                xerr=[[over.mean - over.low], [over.high - over.mean]],
                ecolor=colors["text"],
                error_kw={"linewidth": 1},
            )
            axes.annotate(
                f"{over.mean:.2f}",
                (0.02, middle),
                va="center",
                color=colors["page"],
                fontsize=9,
                fontweight="bold",
            )
    axes.axvline(1.0, color=colors["text"], linewidth=1, linestyle="--")
    names = [f"{name} ({len(tasks)})" for name, tasks in groups.items()]
    axes.set_yticks(range(len(groups)), names)
    axes.invert_yaxis()
    axes.set_title("by family of tables (tasks); shorter is better", loc="left")
    axes.set_xlabel("kernels alone; 1 = TorchRec, table- and column-wise")
    axes.legend(
        frameon=False,
        labelcolor=colors["text"],
        fontsize=8.5,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        ncols=len(bars),
    )
