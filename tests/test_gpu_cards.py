"""Published figures of GPUs, found by the names that torch shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.gpu_cards import GPU_CARDS, Figure, card_named, find_card

SHOWN = {
    "Tesla V100-SXM2-16GB": "v100",
    "Tesla V100-SXM2-32GB": "v100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PG509-200": "a100-40gb",
    "A100-PG509-200": "a100-40gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "AMD Instinct MI250X/MI250": "mi250x",
    "AMD Instinct MI250X": "mi250x",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI350X": "mi350",
    "AMD Instinct MI355X": "mi350",
}


@pytest.mark.parametrize("device_name", SHOWN)
def test_the_name_that_torch_shows_finds_the_card(device_name: str) -> None:
    card = find_card(device_name)
    assert card is not None and card.name == SHOWN[device_name]


@pytest.mark.parametrize(
    "device_name",
    [
        None,
        "",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA GB200",
        "NVIDIA GeForce RTX 4090",
        "AMD Instinct MI300A",
        "AMD EPYC 9354 (25/17)",
    ],
)
def test_other_cards_and_parts_of_cards_are_not_taken_for_one(
    device_name: str | None,
) -> None:
    assert find_card(device_name) is None


def test_every_card_is_found_and_named() -> None:
    assert set(SHOWN.values()) == set(GPU_CARDS)
    assert card_named("H100") is GPU_CARDS["h100"]
    with pytest.raises(ConfigError, match=r"unknown card 'tpu'; known are v100, a100"):
        card_named("tpu")


@pytest.mark.parametrize("name", GPU_CARDS)
def test_links_are_slower_the_further_they_reach(name: str) -> None:
    card = GPU_CARDS[name]
    figures = card.figures()
    assert set(figures) == {f for f in figures if figures[f].source}
    assert card.inter_gb_per_s.value < card.intra_gb_per_s.value
    assert card.intra_gb_per_s.value < card.hbm_gb_per_s.value
    assert card.host_gb_per_s.value < card.hbm_gb_per_s.value
    # L2 holds a small part of memory: units were not mixed up.
    assert 0 < card.l2_mib.value * 2**20 < 0.01 * card.memory_gb.value * 1e9


def test_a_figure_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        Figure(-1.0, "assumed", "nowhere")


def test_the_documentation_shows_the_table() -> None:
    marks = {"data sheet": "", "published measurement": "*", "assumed": "?"}
    rows = {
        f"| `{card.name}` | "
        + " | ".join(f"{f.value:,g}{marks[f.basis]}" for f in card.figures().values())
        + " |"
        for card in GPU_CARDS.values()
    }
    page = Path(__file__).parents[1] / "docs" / "gpus.md"
    shown = {line for line in page.read_text().splitlines() if line.startswith("| `")}
    assert shown == rows
