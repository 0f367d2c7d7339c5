"""The folders of bundles, by name: those that come with the package, and others."""

from __future__ import annotations

from pathlib import Path

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.cards import GPU_CARDS

PRETRAINED = Path(__file__).parent.parent / "pretrained"


def pretrained_names() -> tuple[str, ...]:
    """Return the names of the bundles that come with the package."""
    return tuple(sorted(p.parent.name for p in PRETRAINED.glob("*/bundle.json")))


def bundle_folder(name: str | Path) -> Path | None:
    """Return a bundle's folder by its shipped name or path; None if there is none."""
    shipped = str(name).lower()
    folder = PRETRAINED / shipped if shipped in pretrained_names() else Path(name)
    return folder if str(name) and folder.is_dir() else None


def check_cost_model(name: str | Path) -> None:
    """Check that a cost model exists.

    Args:
        name: As for `load_cost_model`.

    Raises:
        ConfigError: No bundle or card has this name or path.
    """
    is_known = str(name) in ("auto", "measure") or str(name).lower() in GPU_CARDS
    if not is_known and bundle_folder(name) is None:
        raise ConfigError(
            f"unknown cost model '{name}'. Use 'auto', a shipped bundle "
            f"({', '.join(pretrained_names()) or 'none'}), a card "
            f"({', '.join(GPU_CARDS)}) or a folder from 'neuroshard train'"
        )


def source_folder(name: str | Path) -> Path:
    """Return the folder of a bundle to start a calibration from.

    Raises:
        ConfigError: There is no such bundle.
    """
    if (folder := bundle_folder(name)) is None:
        raise ConfigError(
            f"no bundle '{name}' to start from: it is neither a shipped bundle "
            f"({', '.join(pretrained_names()) or 'none'}) nor a folder made by "
            "'neuroshard train'"
        )
    return folder
