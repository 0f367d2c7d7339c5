"""The terms of a collective's time: counts, and bytes by size segments.

The time of a rank is a sum of terms, each times a coefficient of at least 0. The terms
are launch, messages, and the bytes that this rank, the busiest rank and all ranks send
and receive. Terms count the ranks, so the same coefficients hold for all world sizes.
The cost per byte differs between size segments; the last segment extends linearly
beyond the measured sizes. Terms of other ranks are maxima and sums, so the order of
ranks does not matter.

Shapes: `C` samples, `W` ranks, `K` terms.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SEGMENT_BYTES: tuple[float, ...] = (2.0**14, 2.0**18, 2.0**22)
"""Bounds between the segments of a byte term: a message's cost per byte changes with
the buffers and caches that it fills."""
_BYTE_TERMS = ("sent", "received", "own", "most_sent", "most_received", "total")
_COUNT_TERMS = ("launch", "peers", "messages", "mean_messages", "all_messages")
TERM_NAMES: tuple[str, ...] = (
    *_COUNT_TERMS,
    *(f"{name}_{i}" for name in _BYTE_TERMS for i in range(len(SEGMENT_BYTES) + 1)),
)
"""Terms of a rank's time; each is a count, or milliseconds at the nominal bandwidth."""

_FROM_OWNER = ("pooled_backward", "index")
"""Collectives whose bytes per peer are the bytes that a rank receives."""


def _exchanged(
    collective: str, bytes_CW: Floats, local_world_size: int, ratio: float
) -> tuple[Floats, Floats, Floats]:
    """Return each rank's bytes sent to and received from others, and its messages."""
    num_samples, world_size = bytes_CW.shape
    outside = world_size - local_world_size
    total_C1 = bytes_CW.sum(axis=1, keepdims=True)
    spread = bytes_CW * (local_world_size - 1 + ratio * outside)
    if outside:
        num_nodes = world_size // local_world_size
        by_node = bytes_CW.reshape(num_samples, num_nodes, local_world_size)
        node = np.repeat(by_node.sum(axis=2), local_world_size, axis=1)
        joined = node - bytes_CW + ratio * (total_C1 - node)
    else:
        joined = total_C1 - bytes_CW
    used = (bytes_CW > 0).astype(np.float64)
    messages = used * (world_size - 2) + used.sum(axis=1, keepdims=True)
    if collective in _FROM_OWNER:
        return joined, spread, messages
    return spread, joined, messages


def _inter_ratio(
    world_size: int, local_world_size: int, intra: float, inter: float
) -> float:
    """Return a byte's time between nodes over its time inside a node."""
    return intra / inter if world_size > local_world_size else 1.0


def collective_terms(
    collective: str,
    bytes_per_peer_CW: Floats,
    local_world_size: int,
    intra_gb_per_s: float,
    inter_gb_per_s: float,
) -> Floats:
    """Return the terms of every rank.

    Args:
        collective: One of `COLLECTIVES`.
        bytes_per_peer_CW: See `CommsRecord.bytes_per_peer`.
        local_world_size: Ranks per node.
        intra_gb_per_s: Bandwidth inside a node.
        inter_gb_per_s: Bandwidth between nodes; bytes between nodes are multiplied by
            the ratio of both bandwidths. Unused for one node.

    Returns:
        `C x W x K`, columns in TERM_NAMES order.
    """
    bytes_CW = np.asarray(bytes_per_peer_CW, dtype=np.float64)
    world_size = bytes_CW.shape[1]
    ratio = _inter_ratio(world_size, local_world_size, intra_gb_per_s, inter_gb_per_s)
    sent, received, messages = _exchanged(collective, bytes_CW, local_world_size, ratio)
    ones = np.ones_like(bytes_CW)
    columns = [
        ones,
        ones * (world_size - 1),
        messages,
        ones * messages.mean(axis=1, keepdims=True),
        ones * messages.sum(axis=1, keepdims=True),
    ]
    edges = (0.0, *SEGMENT_BYTES, float("inf"))
    for values in (
        sent,
        received,
        bytes_CW,
        ones * sent.max(axis=1, keepdims=True),
        ones * received.max(axis=1, keepdims=True),
        ones * sent.sum(axis=1, keepdims=True),
    ):
        columns += [
            np.clip(values - low, 0.0, high - low) / (intra_gb_per_s * 1e6)
            for low, high in itertools.pairwise(edges)
        ]
    return np.stack(columns, axis=2)


class CollectiveCurve:
    """A fast `collective_terms` times coefficients, for one group of ranks.

    Each byte term is one lookup in a piecewise linear curve, made of its segments.
    """

    def __init__(
        self,
        collective: str,
        coefficients_K: Floats,
        *,
        world_size: int,
        local_world_size: int,
        intra_gb_per_s: float,
        inter_gb_per_s: float,
    ) -> None:
        """Prepare the curves; for the arguments see `collective_terms`."""
        self._collective, self._local_world_size = collective, local_world_size
        self._ratio = _inter_ratio(
            world_size, local_world_size, intra_gb_per_s, inter_gb_per_s
        )
        num_counts = len(_COUNT_TERMS)
        launch, peers, self._message_ms, mean, everyone = coefficients_K[:num_counts]
        self._mean_ms = mean + everyone * world_size
        self._start_ms = launch + peers * (world_size - 1)
        slopes = coefficients_K[num_counts:] / (intra_gb_per_s * 1e6)
        slopes = slopes.reshape(len(_BYTE_TERMS), -1)
        self._edges = np.array([0.0, *SEGMENT_BYTES])
        rises = np.cumsum(slopes[:, :-1] * np.diff(self._edges), axis=1)
        self._values = np.concatenate([np.zeros((len(slopes), 1)), rises], axis=1)
        self._last_slopes = slopes[:, -1]

    def _curve(self, term: int, values: Floats) -> Floats:
        beyond = np.maximum(values - self._edges[-1], 0.0) * self._last_slopes[term]
        ms: Floats = beyond + np.interp(values, self._edges, self._values[term])
        return ms

    def __call__(self, bytes_per_peer_CW: Floats) -> Floats:
        """Return each rank's time, `C x W` [ms]."""
        sent, received, messages = _exchanged(
            self._collective, bytes_per_peer_CW, self._local_world_size, self._ratio
        )
        shared_C1 = (
            self._start_ms
            + messages.mean(axis=1, keepdims=True) * self._mean_ms
            + self._curve(3, sent.max(axis=1, keepdims=True))
            + self._curve(4, received.max(axis=1, keepdims=True))
            + self._curve(5, sent.sum(axis=1, keepdims=True))
        )
        ms: Floats = (
            shared_C1
            + messages * self._message_ms
            + self._curve(0, sent)
            + self._curve(1, received)
            + self._curve(2, bytes_per_peer_CW)
        )
        return ms
