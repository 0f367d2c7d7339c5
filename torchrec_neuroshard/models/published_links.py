"""Collectives of cards without measurements, from published links.

A collective takes `start + transfer + 2 * sqrt(ramp * transfer)`, where `transfer` is
its bytes over the link's bandwidth. The ramp exists because long messages are sent in
pieces: the first pieces fill the path and the last ones drain it.
`benchmarks/bench_published.py` fits start and ramp to published tables; the bandwidths
are the cards' published figures.

Shapes: `C` candidates, `W` ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.cards import GpuCard
from torchrec_neuroshard.models.base import CommsModel
from torchrec_neuroshard.tables.features import OUTPUT_BYTES_PER_VALUE

Floats = npt.NDArray[np.float64]

_RCCL_CARDS = "mi"
"""Prefix of the cards that run RCCL instead of NCCL."""
_RCCL_START_US = 23.6
"""RCCL's start above NCCL's: rccl-tests on 8 MI355X against nccl-tests on 8 B200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveConstants:
    """Links of one kind of node, and constants that all nodes share."""

    intra_gb_per_s: float
    """Effective one-way bandwidth of a GPU to the others of its node [GB/s]."""
    inter_gb_per_s: float
    """Effective one-way bandwidth of a GPU to other nodes [GB/s]."""
    all_to_all_us: float = 11.6
    """Start of an all-to-all inside a node."""
    ring_us: float = 5.1
    """Additional start of reduce-scatter and all-gather."""
    between_nodes_us: float = 25.7
    """Additional start between nodes."""
    library_us: float = 0.0
    """Additional start of libraries other than NCCL."""
    intra_ramp_us: float = 2.7
    """Ramp inside a node."""
    inter_ramp_us: float = 4.0
    """Ramp between nodes."""

    def __post_init__(self) -> None:
        check_links(self.intra_gb_per_s, self.inter_gb_per_s)


def card_collectives(card: GpuCard) -> CollectiveConstants:
    """Return the constants of nodes with a card of `GPU_CARDS`."""
    rccl = card.name.startswith(_RCCL_CARDS)
    return CollectiveConstants(
        intra_gb_per_s=card.intra_gb_per_s.value,
        inter_gb_per_s=card.inter_gb_per_s.value,
        library_us=_RCCL_START_US if rccl else 0.0,
    )


def check_nodes(world_size: int, local_world_size: int) -> None:
    """Raise `ConfigError` unless the ranks fill whole nodes."""
    if world_size < 1 or local_world_size < 1 or world_size % local_world_size:
        raise ConfigError(
            f"world_size ({world_size}) must be a multiple of local_world_size "
            f"({local_world_size})"
        )


def check_links(intra_gb_per_s: float, inter_gb_per_s: float) -> None:
    """Raise `ConfigError` unless both bandwidths are above 0."""
    if not (intra_gb_per_s > 0 and inter_gb_per_s > 0):
        raise ConfigError(
            "bandwidths must be above 0 GB/s, got "
            f"{intra_gb_per_s} inside a node and {inter_gb_per_s} between nodes; "
            "pass intra_host_bw and inter_host_bw to the topology"
        )


class PublishedCommsModel(CommsModel):
    """Start, ramp and bytes over published links; see the module's docstring.

    In an all-to-all, a rank has finished when it has sent its columns of every sample
    to the sample's rank and received all columns of its own samples. Bytes to other
    nodes use the rank's own share of the network; at the same time, the other bytes use
    the links inside the node. Rings of reduce-scatter and all-gather leave a node over
    the network shares of all its ranks.
    """

    even_is_fastest = True
    has_copies = False

    def __init__(
        self,
        constants: CollectiveConstants,
        *,
        world_size: int,
        local_world_size: int,
        source: str = "published links, not measured",
    ) -> None:
        """Set links and ranks.

        Args:
            constants: Links and constants.
            world_size: Number of ranks.
            local_world_size: Ranks per node.
            source: Origin of the numbers, for reports.

        Raises:
            ConfigError: The ranks do not fill whole nodes.
        """
        check_nodes(world_size, local_world_size)
        self.constants, self.source = constants, source
        self._world_size, self._local_world_size = world_size, local_world_size

    def collective_ms(self, bytes_any: Floats, *, ring: bool) -> Floats:
        """Predict one collective.

        Args:
            bytes_any: Size of a rank's whole buffer, including its own part: the input
                of an all-to-all or reduce-scatter, the output of an all-gather.
            ring: Whether the collective is a reduce-scatter or all-gather.

        Returns:
            Milliseconds, in the shape of `bytes_any`; 0 on a single rank.
        """
        c, ranks, local = self.constants, self._world_size, self._local_world_size
        num_nodes = ranks // local
        if ranks == 1:
            return np.zeros(bytes_any.shape)
        leaves = (ranks - 1) / ranks
        start = c.all_to_all_us + c.library_us + (c.ring_us if ring else 0.0)
        if num_nodes == 1:
            us_per_byte = leaves / (c.intra_gb_per_s * 1e3)
            ramp = c.intra_ramp_us
        else:
            start, ramp = start + c.between_nodes_us, c.inter_ramp_us
            if ring:
                slowest = min(c.intra_gb_per_s, c.inter_gb_per_s * local)
                us_per_byte = leaves / (slowest * 1e3)
            else:
                # Per byte of the buffer: time to other nodes, and inside the node.
                across = leaves * (num_nodes - 1) / num_nodes / c.inter_gb_per_s
                inside = (local - 1) / ranks / c.intra_gb_per_s
                us_per_byte = max(across, inside) * 1e-3
        moved_us = np.asarray(bytes_any, dtype=np.float64) * us_per_byte
        ms: Floats = 1e-3 * (start + 2.0 * np.sqrt(ramp * moved_us) + moved_us)
        return ms

    def all_to_all(self, columns_CW: Floats, batch_size: int) -> Floats:
        """Predict each rank's pooled-output all-to-all; see `CommsModel.all_to_all`."""
        sent = columns_CW * (batch_size * OUTPUT_BYTES_PER_VALUE)
        received = sent.sum(axis=1, keepdims=True) / self._world_size
        ms = self.collective_ms(np.maximum(sent, received), ring=False)
        return np.stack([ms, ms], axis=2)

    def row_wise(self, columns_CW: Floats, batch_size: int) -> Floats:
        """Predict reduce-scatter and all-gather; see `CommsModel.row_wise`."""
        sent = columns_CW * (batch_size * OUTPUT_BYTES_PER_VALUE)
        ms = self.collective_ms(sent, ring=True)
        return np.stack([ms, ms], axis=2)

    def all_reduce(self, bytes_CW: Floats) -> Floats:
        """Predict the all-reduce, a reduce-scatter and an all-gather."""
        return 2.0 * self.collective_ms(bytes_CW, ring=True)


def published_comms_model(
    card: GpuCard,
    *,
    world_size: int,
    local_world_size: int,
    intra_gb_per_s: float | None = None,
    inter_gb_per_s: float | None = None,
) -> PublishedCommsModel:
    """Return the model of collectives from the published links of a card's nodes.

    Args:
        card: Card of all ranks.
        world_size: Number of ranks.
        local_world_size: Ranks per node.
        intra_gb_per_s: Bandwidth of a rank inside its node; None takes the card's.
        inter_gb_per_s: The same to other nodes.

    Raises:
        ConfigError: The ranks do not fill whole nodes.
    """
    given = {"intra_gb_per_s": intra_gb_per_s, "inter_gb_per_s": inter_gb_per_s}
    known = {name: value for name, value in given.items() if value is not None}
    return PublishedCommsModel(
        dataclasses.replace(card_collectives(card), **known),
        world_size=world_size,
        local_world_size=local_world_size,
        source=f"{'given' if known else 'published'} links of {card.name}, not "
        "measured",
    )
