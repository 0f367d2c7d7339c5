"""Which collectives to measure: pure functions of a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.measure.sets import repeated_index
from torchrec_neuroshard.models.base import COLLECTIVES

__all__ = ["CommsSamplingConfig", "SampledCollective", "sample_collective"]

_BYTES_MULTIPLE = 8
"""Every message is a whole number of int64 and of fp32 values."""
_VALUE_BYTES = 4
_BATCH_SIZES = (8, 8_192)
"""Samples of a rank: rows of the pooled outputs."""
_UNEVEN = ("pooled_forward", "pooled_backward", "index")
"""Collectives in which ranks may hold different amounts."""
_WEIGHTS = {
    "pooled_forward": 0.3,
    "pooled_backward": 0.3,
    "index": 0.16,
    "reduce_scatter": 0.08,
    "all_gather": 0.08,
    "all_reduce": 0.08,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsSamplingConfig:
    """What to measure; ranges are inclusive."""

    bytes_per_rank: tuple[int, int] = (1024, 2**30)
    """Least and most bytes that a rank sends on average, itself included."""
    repeat_every: int = 20
    """Every so many records one earlier sample is measured again."""
    repeat_lag: int = 60
    """How many records later, at least."""

    def __post_init__(self) -> None:
        low, high = self.bytes_per_rank
        if not 0 < low <= high:
            raise ConfigError(
                f"bytes_per_rank needs 0 < low <= high, got ({low}, {high}); the high "
                "end is capped by the memory at hand"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledCollective:
    """One collective to measure."""

    index: int
    repeat_of: int | None
    collective: str
    group: str
    bytes_per_peer: tuple[int, ...]
    """See `CommsRecord.bytes_per_peer`."""
    batch_size: int
    """Of the pooled collectives: samples of a rank, which the bytes are rows of."""
    lengths_share: float
    """Of the `index` collective: share of the bytes that are lengths, not ids."""


def sample_collective(
    index: int,
    seed: int,
    config: CommsSamplingConfig,
    group_sizes: dict[str, int],
) -> SampledCollective:
    """Return the collective number `index` of a run.

    Args:
        index: Position in the run.
        seed: The run's seed; equal seeds give equal samples.
        config: Ranges to draw from.
        group_sizes: Group name -> its ranks.
    """
    repeat_of = repeated_index(index, config.repeat_every, config.repeat_lag)
    source = index if repeat_of is None else repeat_of
    rng = np.random.default_rng([seed, source])
    group = str(rng.choice(sorted(group_sizes)))
    world_size = group_sizes[group]
    collective = str(rng.choice(COLLECTIVES, p=[_WEIGHTS[c] for c in COLLECTIVES]))
    low, high = map(math.log, config.bytes_per_rank)
    mean_bytes = math.exp(rng.uniform(low, high))
    if collective in _UNEVEN:
        shares = _shares(rng, world_size)
    else:
        shares = np.full(world_size, 1 / world_size)
    least, most = map(math.log, _BATCH_SIZES)
    most = min(most, max(least, math.log(mean_bytes / (4 * _VALUE_BYTES * world_size))))
    batch_size = 2 * round(math.exp(rng.uniform(least, most)) / 2)
    multiple = _BYTES_MULTIPLE
    if collective.startswith("pooled"):
        multiple = _VALUE_BYTES * batch_size
    per_peer = mean_bytes * shares  # total = mean x W, over W peers each
    units = np.round(per_peer / multiple).astype(np.int64) * multiple
    if not units.any():
        units[int(per_peer.argmax())] = multiple
    return SampledCollective(
        index=index,
        repeat_of=repeat_of,
        collective=collective,
        group=group,
        bytes_per_peer=tuple(map(int, units)),
        batch_size=batch_size,
        lengths_share=float(1 / (1 + math.exp(rng.uniform(0, math.log(50))))),
    )


def _shares(rng: np.random.Generator, world_size: int) -> npt.NDArray[np.float64]:
    """Shares of the ranks in the total, from balanced to all on one rank."""
    kind = rng.choice(["balanced", "uneven", "some", "one"], p=[0.2, 0.5, 0.2, 0.1])
    if kind == "balanced":
        return np.full(world_size, 1 / world_size)
    if kind == "one":
        return np.asarray(np.eye(world_size)[int(rng.integers(world_size))])
    shares = rng.dirichlet(np.full(world_size, math.exp(rng.uniform(-1, 4))))
    if kind == "some":  # several ranks hold nothing at all
        empty = rng.permutation(world_size)[: int(rng.integers(1, world_size))]
        shares[empty] = 0.0
        shares = shares / max(shares.sum(), 1e-12)
    return np.asarray(shares, dtype=np.float64)
