"""Chart of a race: what each job takes, over TorchRec's better plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.charts import DOTS, THEMES, chart_paths, save
from harness.race_page import (
    EMBEDDING,
    ITERATION,
    RACERS,
    better,
    figures,
    kept_tasks,
    mean,
    predicted,
    ratio,
    smallest,
    trained,
)

_WIDTH, _ROW, _LEGEND = 10.0, 0.24, 0.3
"""Inches of the figure, of a task and of the legend."""
_MARKS = {"ours": "o", "others": "s"}


def draw_chart(data: dict[str, Any], out: Path) -> list[Path]:
    """Write the charts of `chart_paths`; return their paths.

    The left chart has the iteration of each task, the right one its tables' part beside
    the prediction.

    Args:
        data: All results of the race.
        out: Path without suffix.
    """
    tasks, paths = kept_tasks(data), chart_paths(out)
    for path, colors in zip(paths, THEMES.values(), strict=True):
        size = _WIDTH, 1.4 + _ROW * len(tasks)
        figure = Figure(figsize=size, dpi=DOTS, facecolor=colors["page"])
        left, right = figure.subplots(1, 2, sharey=True)
        _draw(left, tasks, ITERATION, "iteration", colors)
        _draw(right, tasks, EMBEDDING, "tables' part (| predicted)", colors)
        left.set_yticks(range(len(tasks)), [t["name"] for t in tasks])
        left.invert_yaxis()
        handles, labels = left.get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            frameon=False,
            labelcolor=colors["text"],
            fontsize=8.5,
            loc="lower center",
            ncols=len(labels),
        )
        save(figure, path, colors, legend=_LEGEND / size[1])
    return paths


def _draw(
    axes: Axes,
    tasks: Sequence[dict[str, Any]],
    what: str,
    title: str,
    colors: Mapping[str, str],
) -> None:
    """Draw a measure of all tasks: a dot with its noise for each planner."""
    found = figures(tasks)
    for number, (name, label) in enumerate(RACERS.items()):
        there = [(row, t) for row, t in enumerate(tasks) if name in trained(t)]
        values = [ratio(t, name, better(t), what) for _, t in there]
        places = [row + 0.3 * number - 0.15 for row, _ in there]
        kind = ("others", "ours")[number]
        axes.errorbar(
            [v.value for v in values],
            places,
            xerr=[v.value * v.noise for v in values],
            fmt=_MARKS[kind],
            markersize=4,
            color=colors[kind],
            elinewidth=1,
            label=f"{label} (mean {mean(found, name, what):.3f})",
        )
        if what == EMBEDDING:
            axes.scatter(
                [predicted(t, name, better(t)) for _, t in there],
                places,
                marker="|",
                s=60,
                color=colors["torchrec"],
                zorder=3,
            )
    noise = smallest(found, what)
    axes.axvspan(1 - noise, 1 + noise, color=colors["faint"], alpha=0.5)
    axes.axvline(1.0, color=colors["text"], linewidth=1, linestyle="--")
    axes.set_title(f"{title} over TorchRec's better plan", loc="left")
    axes.set_xlabel("left is faster; grey: differences of equal plans")
