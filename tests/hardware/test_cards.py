"""Published figures of GPUs, found by the names that torch shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.cards import (
    GPU_CARDS,
    Figure,
    GpuCard,
    card_named,
    find_card,
)

SHOWN = {
    "Tesla V100-SXM2-16GB": "v100",
    "NVIDIA A100 80GB PCIe": "a100",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PG509-200": "a100-40gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "AMD Instinct MI250X/MI250": "mi250x",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI355X": "mi350",
    "": None,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA H200 NVL": None,
    "NVIDIA GB200": None,
    "AMD Instinct MI300A": None,
    "AMD EPYC 9354 (25/17)": None,
}


def test_cards_are_found_by_torchs_name_and_their_own() -> None:
    found = {name: find_card(name) for name in SHOWN}
    assert {name: card and card.name for name, card in found.items()} == SHOWN
    for card in GPU_CARDS.values():
        assert find_card(card.title) is card
    assert card_named("H100") is GPU_CARDS["h100"]
    with pytest.raises(ConfigError, match="'tpu'"):
        card_named("tpu")


def figures(card: GpuCard) -> list[Figure | None]:
    """Return the figures of the documentation's table; None is a missing one."""
    known = [getattr(card, n) for n in GpuCard.__slots__ if n != "threads_per_ns"]
    return [value for value in known if value is None or isinstance(value, Figure)]


def test_links_are_slower_the_further_they_reach() -> None:
    for card in GPU_CARDS.values():
        assert all(f.source for f in figures(card) if f)
        assert card.inter_gb_per_s.value < card.intra_gb_per_s.value
        assert card.intra_gb_per_s.value < card.hbm_gb_per_s.value
        assert card.host_gb_per_s.value < card.hbm_gb_per_s.value
        # Units are not mixed up: L2 is a small part of memory.
        assert 0 < card.l2_mib.value * 2**20 < 0.01 * card.memory_gb.value * 1e9


def test_the_documentation_shows_the_table() -> None:
    marks = {"data sheet": "", "published measurement": "*", "assumed": "?"}

    def cell(figure: Figure | None) -> str:
        return f"{figure.value:,g}{marks[figure.basis]}" if figure else "-"

    rows = {
        f"| `{card.name}` | " + " | ".join(map(cell, figures(card))) + " |"
        for card in GPU_CARDS.values()
    }
    page = Path(__file__).parents[2] / "docs" / "gpus.md"
    shown = {line for line in page.read_text().splitlines() if line.startswith("| `")}
    assert shown == rows
