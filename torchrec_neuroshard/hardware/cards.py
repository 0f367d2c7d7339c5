"""Published figures of GPUs, for GPUs without measurements.

`cards.toml` holds the figures, each with its source and its basis. As in data sheets,
memory is in GB and bandwidth in GB/s. Bandwidths of links are *effective*: the rate
that a collective reaches in one direction, not the line rate.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_neuroshard.errors import ConfigError, is_number, suggestion
from torchrec_neuroshard.files import from_fields


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its basis and source."""

    value: float
    basis: str
    """"data sheet", "published measurement" or "assumed"."""
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCard:
    """One model of GPU, in the kind of node that it is usually sold in.

    A card with two devices (MI250X) is listed as one device, because torch shows single
    devices and a rank uses one.
    """

    name: str
    """Name that users type: the key in `GPU_CARDS`."""
    title: str
    device_names: tuple[str, ...]
    """Regular expressions for `torch.cuda.get_device_name` without the maker's name."""
    memory_gb: Figure
    """Memory [GB]."""
    hbm_gb_per_s: Figure
    """Bandwidth of that memory [GB/s]."""
    l2_mib: Figure
    """L2 cache, all partitions together [MiB]."""
    l3_mib: Figure
    """Cache between L2 and memory [MiB]; 0 if there is none."""
    host_gb_per_s: Figure
    """Effective one-way bandwidth to the host's memory [GB/s]."""
    intra_gb_per_s: Figure
    """Effective one-way bandwidth to all other GPUs of a node together [GB/s]."""
    inter_gb_per_s: Figure
    """Effective one-way bandwidth to other nodes, for one GPU's share of the NICs
    [GB/s]."""
    collective_launch_us: Figure | None = None
    """Start of a collective of NCCL inside a node, without its steps; None for cards
    that run another library."""
    collective_step_us: Figure | None = None
    """Additional start of a collective for each step from rank to rank."""
    threads_per_ns: Figure | None = None
    """Issue rate of AMD cards: threads per ns, 64 per clock and compute unit. On AMD,
    FBGEMM's kernels cannot keep up with the memory; on NVIDIA, the memory's bandwidth
    alone decides how fast they are."""
    gpus_per_node: int = 8


_CARDS = Path(__file__).with_suffix(".toml")

GPU_CARDS: Mapping[str, GpuCard] = {
    name: from_fields(GpuCard, {"name": name, **entry})
    for name, entry in tomllib.loads(_CARDS.read_text(encoding="utf-8")).items()
}
"""Name -> card."""

_MAKERS = re.compile(r"^((nvidia|tesla|amd|instinct)\s+)+", re.IGNORECASE)


def find_card(device_name: str | None) -> GpuCard | None:
    """Return the card that torch shows under a name.

    Args:
        device_name: Name from `torch.cuda.get_device_name`, or a card's title.

    Returns:
        The card; None for cards that are not listed and for MIG partitions.
    """
    name = device_name or ""
    bare = _MAKERS.sub("", name.strip())
    for card in GPU_CARDS.values():
        patterns = card.device_names
        if name == card.title or any(re.fullmatch(p, bare, re.I) for p in patterns):
            return card
    return None


def card_named(name: str) -> GpuCard:
    """Return the card with this name in `GPU_CARDS`; upper and lower case are equal.

    Raises:
        ConfigError: No card has this name.
    """
    text = str(name).lower()
    if (card := GPU_CARDS.get(text)) is not None:
        return card
    near = suggestion(text, GPU_CARDS, "cards")
    if inside := [n for n in GPU_CARDS if n in text]:
        near = f"did you mean '{max(inside, key=len)}'?"
    raise ConfigError(
        f"unknown card {name!r:.60}; {near} Known cards: {', '.join(GPU_CARDS)}. For "
        "another card, name the most similar one and pass your card's own figures"
    )


def node_counts(
    usual: int,
    *,
    world_size: int | None = None,
    num_nodes: int | None = None,
    ranks_per_node: int | None = None,
) -> tuple[int, int]:
    """Return the number of nodes and of ranks per node.

    Args:
        usual: Ranks per node by default.
        world_size: As for `planner.topology.topology_for`.
        num_nodes: As for `planner.topology.topology_for`.
        ranks_per_node: As for `planner.topology.topology_for`.

    Raises:
        ConfigError: A number is not above 0, or they contradict each other.
    """
    counts: dict[str, Any] = {
        "world_size": world_size,
        "num_nodes": num_nodes,
        "ranks_per_node": ranks_per_node,
    }
    check_positive(counts)
    for name, value in counts.items():
        if value is not None and not is_number(value, whole=True):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if world_size is None:
        return num_nodes or 1, ranks_per_node or usual
    if num_nodes is None:
        per_node = ranks_per_node or min(world_size, usual)
        if world_size % per_node:
            below = world_size // per_node * per_node
            fitting = [str(n) for n in (below, below + per_node) if n]
            raise ConfigError(
                f"{world_size} ranks do not fill whole nodes of {per_node}; take "
                f"{' or '.join(fitting)} ranks, or change the ranks per node"
            )
        return world_size // per_node, per_node
    if world_size != num_nodes * (ranks_per_node or world_size // num_nodes):
        given = ", ".join(f"{n}={v}" for n, v in counts.items() if v is not None)
        raise ConfigError(
            f"{given} contradict each other: world_size must be num_nodes times "
            "ranks_per_node; leave one of them out"
        )
    return num_nodes, world_size // num_nodes


def check_positive(values: Mapping[str, Any]) -> None:
    """Check that figures are above 0; None is skipped.

    Args:
        values: Name of an argument -> its value.

    Raises:
        ConfigError: A value is not a finite number above 0.
    """
    for name, value in values.items():
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            raise ConfigError(f"{name} must be above 0 and finite, got {value!r}")
