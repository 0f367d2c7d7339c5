"""Published figures of GPUs: what a card has where nothing was measured on it.

`cards.toml` holds the figures: each says where it is from and what kind of figure
it is. As in data sheets, memory is in GB and bandwidth in GB/s. Bandwidths of links are
*effective* ones: what a collective reaches in one direction, not the line rate.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchrec_neuroshard.errors import ConfigError, suggestion
from torchrec_neuroshard.files import from_fields

__all__ = ["GPU_CARDS", "Figure", "GpuCard", "card_named", "find_card"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its origin."""

    value: float
    basis: str
    """"data sheet", "published measurement" or "assumed"."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCard:
    """One kind of GPU, in a node of the kind that it is mostly sold in.

    A card of two devices (MI250X) is listed as one of them, since that is what torch
    shows and a rank plans for.
    """

    name: str
    """What users call it: the key in `GPU_CARDS`."""
    title: str
    device_names: tuple[str, ...]
    """Regular expressions of `torch.cuda.get_device_name`, without the maker's name."""
    memory_gb: Figure
    """Memory [GB]."""
    hbm_gb_per_s: Figure
    """Bandwidth of that memory [GB/s]."""
    l2_mib: Figure
    """L2 cache, all of its parts together [MiB]."""
    l3_mib: Figure
    """Cache between L2 and memory [MiB]; 0 where there is none."""
    host_gb_per_s: Figure
    """Effective one-way bandwidth to the host's memory [GB/s]."""
    intra_gb_per_s: Figure
    """Effective one-way bandwidth to the other GPUs of a node, all together [GB/s]."""
    inter_gb_per_s: Figure
    """Effective one-way bandwidth to other nodes, of one GPU's share of the NICs
    [GB/s]."""
    threads_per_ns: Figure | None = None
    """Of AMD's cards: threads that the cores issue an instruction for, 64 per clock
    and compute unit. FBGEMM's kernels do not keep up with the memory there; on
    NVIDIA's cards its bandwidth tells how fast they are."""
    gpus_per_node: int = 8


_CARDS = Path(__file__).with_suffix(".toml")

GPU_CARDS: Mapping[str, GpuCard] = {
    name: from_fields(GpuCard, {"name": name, **entry})
    for name, entry in tomllib.loads(_CARDS.read_text(encoding="utf-8")).items()
}
"""Name -> card."""

_MAKERS = re.compile(r"^((nvidia|tesla|amd|instinct)\s+)+", re.IGNORECASE)


def find_card(device_name: str | None) -> GpuCard | None:
    """Find the card that torch shows under a name.

    Args:
        device_name: As `torch.cuda.get_device_name` prints it, or a card's title.

    Returns:
        None for a card that the table lacks, and for a part of one (MIG).
    """
    name = device_name or ""
    bare = _MAKERS.sub("", name.strip())
    for card in GPU_CARDS.values():
        patterns = card.device_names
        if name == card.title or any(re.fullmatch(p, bare, re.I) for p in patterns):
            return card
    return None


def card_named(name: str) -> GpuCard:
    """Return the card of a name of `GPU_CARDS`, in any case.

    Raises:
        ConfigError: There is none.
    """
    try:
        return GPU_CARDS[name.lower()]
    except KeyError:
        raise ConfigError(
            f"unknown card '{name:.60}'; {suggestion(name, GPU_CARDS, 'cards')} Known "
            f"are {', '.join(GPU_CARDS)}. For another one name the nearest and give "
            "its own figures beside it"
        ) from None
