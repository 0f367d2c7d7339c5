"""Colours of charts, light and dark, and files of few colours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

DOTS = 120
"""Dots per inch."""
THEMES: dict[str, dict[str, str]] = {
    "light": {
        "page": "#ffffff",
        "text": "#1f2328",
        "faint": "#d0d7de",
        "ours": "#0969da",
        "torchrec": "#bc4c00",
        "others": "#8c959f",
    },
    "dark": {
        "page": "#0d1117",
        "text": "#e6edf3",
        "faint": "#30363d",
        "ours": "#58a6ff",
        "torchrec": "#f0883e",
        "others": "#7d8590",
    },
}


def chart_paths(out: Path) -> list[Path]:
    """Return `<out>_light.png` and `<out>_dark.png`."""
    return [out.with_name(f"{out.name}_{theme}.png") for theme in THEMES]


def save(
    figure: Figure, path: Path, colors: Mapping[str, str], legend: float = 0.0
) -> None:
    """Style all axes of a figure, and write it with 64 colours.

    Args:
        figure: The figure.
        path: The file.
        colors: A theme of `THEMES`.
        legend: Share of the height that is kept free below the axes.
    """
    for axes in figure.axes:
        _style(axes, colors)
    figure.tight_layout(rect=(0, legend, 1, 1))
    figure.savefig(path, facecolor=colors["page"])
    picture = Image.open(path).convert("RGB")
    picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def _style(axes: Axes, colors: Mapping[str, str]) -> None:
    axes.set_facecolor(colors["page"])
    axes.grid(visible=True, color=colors["faint"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=colors["text"], labelsize=9)
    axes.set_title(
        axes.get_title("left"), loc="left", color=colors["text"], fontsize=11
    )
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(colors["text"])
        label.set_fontsize(9)
    for spine in axes.spines.values():
        spine.set_color(colors["faint"])
