"""Collectives of cards without measurements, from published tables and links.

A collective takes `start + transfer + 2 * sqrt(ramp * transfer)`, where `transfer` is
its bytes over the link's bandwidth. The ramp exists because long messages are sent in
pieces: the first pieces fill the path and the last ones drain it. Inside a node, NCCL's
start is a launch and a number of steps from rank to rank. A card has its own launch and
step. An all-to-all with long messages starts later, up to a plateau.

`benchmarks/bench_published.py` fits all constants to published tables; the bandwidths
are the cards' published figures.

Shapes: `C` candidates, `W` ranks.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.hardware.cards import GpuCard
from torchrec_neuroshard.models.base import CommsModel
from torchrec_neuroshard.tables.features import OUTPUT_BYTES_PER_VALUE

Floats = npt.NDArray[np.float64]

Collective = Literal["all_to_all", "ring", "all_reduce"]
"""A ring is a reduce-scatter or an all-gather."""

_FITTED_ERROR, _BORROWED_ERROR, _RCCL_ERROR = 0.06, 0.32, 0.38
"""Median errors inside a node. NCCL, with this card left out of the fit but others with
its links kept; with all of those left out (the worst of A100, H100 and B200); RCCL (the
worse of two tables of MI355X). Source: `benchmarks/results/published_202611.md`."""
_BETWEEN_NODES_ERROR = 0.6
"""Largest error between nodes: in a traced job of 16 A100, all-to-alls take up to 1.6
times as long as predicted (docs/gpus.md). nccl-tests of 16 B200 are 3 % off."""
_RCCL_START_US = 23.6
"""RCCL's start above NCCL's: rccl-tests on 8 MI355X against nccl-tests on 8 B200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveConstants:
    """Links of one kind of node, and constants that all nodes share.

    NCCL's constants inside a node are fitted to NVIDIA's tables of 2, 4 and 8 GPUs.
    Two tables of one card in folders of different NCCL versions differ by 1.1 %
    (median; 90th percentile 5.6 %), below 1 MiB by 1.8 % (8.8 %). Rows of nearly all
    folders state version 2.29.2, so other versions may differ by more.
    """

    intra_gb_per_s: float
    """Effective one-way bandwidth of a GPU to the others of its node [GB/s]."""
    inter_gb_per_s: float
    """Effective one-way bandwidth of a GPU to other nodes [GB/s]."""
    launch_us: float | None = None
    """Start inside a node without steps; see `GpuCard.collective_launch_us`. None takes
    the constants of libraries other than NCCL."""
    step_us: float = 0.0
    """One step from rank to rank inside a node."""
    intra_ramp_us: float = 2.7
    """Ramp inside a node."""
    all_to_all_steps: float = 0.6
    """Steps of an all-to-all, beside one for each doubling of ranks. A ring has one
    step for each other rank, and an all-reduce has two."""
    plateau_us: float = 3.1
    """Additional start of an all-to-all with long messages."""
    plateau_kib: float = 11.5
    """Message from one rank to another that has half of this addition [KiB]."""
    all_to_all_gain: float = 1.045
    """Bandwidth that an all-to-all of many ranks reaches, relative to the link's."""
    ring_gain: float = 1.035
    """The same of a ring."""
    all_reduce_gain: float = 1.175
    """The same of an all-reduce. Switches add up, which saves bytes."""

    # The others are for several nodes and for libraries other than NCCL.
    all_to_all_us: float = 11.6
    """Start of an all-to-all."""
    ring_us: float = 5.1
    """Additional start of reduce-scatter and all-gather."""
    between_nodes_us: float = 25.7
    """Additional start between nodes."""
    library_us: float = 0.0
    """Additional start of libraries other than NCCL."""
    inter_ramp_us: float = 4.0
    """Ramp between nodes."""

    def __post_init__(self) -> None:
        check_links(self.intra_gb_per_s, self.inter_gb_per_s)


def card_collectives(card: GpuCard) -> CollectiveConstants:
    """Return the constants of nodes with a card of `GPU_CARDS`."""
    launch, step = card.collective_launch_us, card.collective_step_us
    return CollectiveConstants(
        intra_gb_per_s=card.intra_gb_per_s.value,
        inter_gb_per_s=card.inter_gb_per_s.value,
        launch_us=launch.value if launch else None,
        step_us=step.value if step else 0.0,
        library_us=0.0 if launch else _RCCL_START_US,
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


@dataclass(frozen=True, slots=True)
class _Terms:
    """Terms of one collective of `b` bytes [ms].

    It takes `start + per_byte * b + root * sqrt(b) + plateau * b / (b + half_bytes)`.
    """

    start: float
    per_byte: float
    root: float
    plateau: float = 0.0
    half_bytes: float = 0.0


def _make_terms(start_us: float, us_per_byte: float, ramp_us: float) -> _Terms:
    root = 2.0 * math.sqrt(ramp_us * us_per_byte)
    return _Terms(1e-3 * start_us, 1e-3 * us_per_byte, 1e-3 * root)


_MOST_RANKS = 8
"""Ranks of the largest published table. More ranks have the same number of steps."""


def _in_node(c: CollectiveConstants, ranks: int) -> dict[Collective, _Terms]:
    """Return the terms of NCCL's collectives inside one node."""
    assert c.launch_us is not None
    # A rank's bytes leave it, except its own part. Few ranks reach less of the
    # bandwidth: 2 reach 3/4 of what many reach, 4 reach 7/8.
    us_per_byte = (ranks - 1) / (ranks - 0.5) / (c.intra_gb_per_s * 1e3)
    most = min(ranks, _MOST_RANKS)
    direct_steps = c.all_to_all_steps + math.log2(most)
    steps_and_load: dict[Collective, tuple[float, float]] = {
        "all_to_all": (direct_steps, 1 / c.all_to_all_gain),
        "ring": (most - 1, 1 / c.ring_gain),
        "all_reduce": (2 * (most - 1), 2 / c.all_reduce_gain),
    }
    found = {
        name: _make_terms(
            c.launch_us + c.step_us * steps, us_per_byte * load, c.intra_ramp_us
        )
        for name, (steps, load) in steps_and_load.items()
    }
    found["all_to_all"] = dataclasses.replace(
        found["all_to_all"],
        plateau=c.plateau_us * 1e-3,
        half_bytes=c.plateau_kib * 1024 * ranks,
    )
    return found


def _elsewhere(
    c: CollectiveConstants, ranks: int, local: int
) -> dict[Collective, _Terms]:
    """Return the terms between nodes, and those of libraries other than NCCL."""
    num_nodes = ranks // local
    leaves = (ranks - 1) / ranks
    start = c.all_to_all_us + c.library_us
    if num_nodes == 1:
        ramp = c.intra_ramp_us
        direct = around = leaves / (c.intra_gb_per_s * 1e3)
    else:
        start, ramp = start + c.between_nodes_us, c.inter_ramp_us
        slowest = min(c.intra_gb_per_s, c.inter_gb_per_s * local)
        around = leaves / (slowest * 1e3)
        # Per byte of the buffer: time to other nodes, and inside the node.
        across = leaves * (num_nodes - 1) / num_nodes / c.inter_gb_per_s
        inside = (local - 1) / ranks / c.intra_gb_per_s
        direct = max(across, inside) * 1e-3
    ring = _make_terms(start + c.ring_us, around, ramp)
    return {
        "all_to_all": _make_terms(start, direct, ramp),
        "ring": ring,
        "all_reduce": _Terms(2 * ring.start, 2 * ring.per_byte, 2 * ring.root),
    }


class PublishedCommsModel(CommsModel):
    """Start, ramp and bytes over published links; see the module's docstring.

    In an all-to-all, a rank has finished when it has sent its columns of every sample
    to the sample's rank and received all columns of its own samples. Bytes to other
    nodes use the rank's own share of the network; at the same time, the other bytes use
    the links inside the node. Rings of reduce-scatter and all-gather leave a node over
    the network shares of all its ranks. Between nodes, an all-reduce is a
    reduce-scatter and an all-gather.
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
        error: float | None = None,
    ) -> None:
        """Set links and ranks.

        Args:
            constants: Links and constants.
            world_size: Number of ranks.
            local_world_size: Ranks per node.
            source: Origin of the numbers, for reports.
            error: See `CommsModel.error`.

        Raises:
            ConfigError: The ranks do not fill whole nodes.
        """
        check_nodes(world_size, local_world_size)
        self.constants, self.source, self.error = constants, source, error
        self._world_size = world_size
        if world_size == 1:
            self._terms = dict.fromkeys(get_args(Collective), _Terms(0.0, 0.0, 0.0))
        elif world_size == local_world_size and constants.launch_us is not None:
            self._terms = _in_node(constants, world_size)
        else:
            self._terms = _elsewhere(constants, world_size, local_world_size)

    def collective_ms(self, bytes_any: Floats, collective: Collective) -> Floats:
        """Predict one collective.

        Args:
            bytes_any: Size of a rank's whole buffer, including its own part: the input
                of an all-to-all, reduce-scatter or all-reduce, the output of an
                all-gather.
            collective: Which collective.

        Returns:
            Milliseconds, in the shape of `bytes_any`; 0 on a single rank.
        """
        terms = self._terms[collective]
        ms: Floats = np.sqrt(bytes_any, dtype=np.float64)
        ms *= terms.root
        ms += terms.start
        ms += bytes_any * terms.per_byte
        if terms.plateau:
            missing = bytes_any + terms.half_bytes
            ms += terms.plateau
            ms -= terms.plateau * terms.half_bytes / missing
        return ms

    def all_to_all(self, columns_CW: Floats, batch_size: int) -> Floats:
        """Predict each rank's pooled-output all-to-all; see `CommsModel.all_to_all`."""
        sent = columns_CW * (batch_size * OUTPUT_BYTES_PER_VALUE)
        received = sent.sum(axis=1, keepdims=True) / self._world_size
        ms = self.collective_ms(np.maximum(sent, received), "all_to_all")
        return np.stack([ms, ms], axis=2)

    def row_wise(self, columns_CW: Floats, batch_size: int) -> Floats:
        """Predict reduce-scatter and all-gather; see `CommsModel.row_wise`."""
        sent = columns_CW * (batch_size * OUTPUT_BYTES_PER_VALUE)
        ms = self.collective_ms(sent, "ring")
        return np.stack([ms, ms], axis=2)

    def all_reduce(self, bytes_CW: Floats) -> Floats:
        """Predict the all-reduce; see `CommsModel.all_reduce`."""
        return self.collective_ms(bytes_CW, "all_reduce")


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
        error=_error(card, world_size > local_world_size),
    )


def _error(card: GpuCard, crosses_nodes: bool) -> float:
    """Return the error of a card's collectives; see `CommsModel.error`."""
    if crosses_nodes:
        return _BETWEEN_NODES_ERROR
    if card.collective_launch_us is None:
        return _RCCL_ERROR
    is_fitted = card.collective_launch_us.basis != "assumed"
    return _FITTED_ERROR if is_fitted else _BORROWED_ERROR
