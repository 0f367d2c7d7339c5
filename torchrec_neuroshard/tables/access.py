"""How ids are drawn: distributions over groups of equally likely rows.

Shapes: `B` samples, `L` lookups, `G` groups of equally likely ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.special import lambertw, pdtr

from torchrec_neuroshard.errors import ProfileError

if TYPE_CHECKING:
    from torchrec_neuroshard.tables.profile import FeatureProfile

__all__ = [
    "COUNT_BIN_HIGH",
    "COUNT_BIN_LOW",
    "NUM_COUNT_BINS",
    "AccessDistribution",
    "coprime_step",
    "draw_ids",
    "draw_lengths",
]

NUM_COUNT_BINS = 17
"""Bins of the access histogram, as in the three seed papers' released features."""

COUNT_BIN_HIGH: npt.NDArray[np.float64] = np.array(
    [2.0**j for j in range(NUM_COUNT_BINS - 1)] + [np.inf]
)
"""Largest count of each bin: 1, 2, 4, 8, ..., 32768, infinity."""

COUNT_BIN_LOW: npt.NDArray[np.float64] = np.append(1.0, COUNT_BIN_HIGH[:-1] + 1)
"""Smallest count of each bin: 1, 2, 3, 5, 9, ..., 32769."""

_LEAST_RATE = 0.05
"""Lookups of an id a batch below which as many ids as there are rows may have it."""
_FITS = 8
"""Times that lookups are moved to rare ids until as many distinct ones are expected."""


@dataclass(frozen=True, slots=True)
class AccessDistribution:
    """Groups of ids; within a group all ids are equally likely."""

    num_ids: tuple[float, ...]
    """Ids of each group, most likely first."""
    share: tuple[float, ...]
    """Share of the lookups that each group gets; sums to 1."""

    @classmethod
    def power_law(cls, num_embeddings: int, exponent: float) -> AccessDistribution:
        """Ids whose probability falls with rank^-exponent; 0 is uniform.

        Raises:
            ProfileError: No rows, or an exponent below 0.
        """
        if num_embeddings < 1 or not exponent >= 0:
            raise ProfileError(
                "a power law needs num_embeddings of at least 1 and an exponent of at "
                f"least 0, got {num_embeddings} and {exponent}"
            )
        # Ranks 1..16 one by one, then groups that are 1/8 of their first rank wide.
        firsts, rank = [], 1
        while rank <= num_embeddings:
            firsts.append(rank)
            rank += 1 if rank <= 16 else rank // 8
        bounds = np.array([*firsts, num_embeddings + 1], dtype=np.float64)
        num_ids = np.diff(bounds)
        middle = (bounds[:-1] + bounds[1:] - 1) / 2
        mass = num_ids * middle**-exponent
        return cls(tuple(num_ids.tolist()), tuple((mass / mass.sum()).tolist()))

    @classmethod
    def from_profile(
        cls, profile: FeatureProfile, num_embeddings: int
    ) -> AccessDistribution:
        """Ids that are looked up as often as the profile's histogram counts.

        Ids that the profile has not met are never drawn: for a batch about as large as
        the profile's take `of_batch`.
        """
        ids = np.asarray(profile.access_histogram, dtype=np.float64)
        if not ids.any():
            return cls((float(num_embeddings),), (1.0,))
        ids = ids * min(1.0, num_embeddings / ids.sum())
        mass = ids * profile.bin_mean_counts()
        used = np.flatnonzero(ids)[::-1]
        return cls(tuple(ids[used]), tuple(mass[used] / mass.sum()))

    @classmethod
    def of_batch(
        cls, profile: FeatureProfile, num_embeddings: int
    ) -> AccessDistribution:
        """Ids of which batches like the profile's are made, each of them of others.

        A batch of as many lookups is expected to have as many distinct ids as the
        profile, as far as the table has rows: counts are held to be Poisson's, of which
        only those above 0 were seen (their rate by Lambert's W function). What was seen
        about once stands for all rows that are left.

        Args:
            profile: Of the batch size that batches will have.
            num_embeddings: Rows of the table.
        """
        ids = np.asarray(profile.access_histogram, dtype=np.float64)
        if not ids.any():
            return cls((float(num_embeddings),), (1.0,))
        used = np.flatnonzero(ids)[::-1]
        ids = ids[used] * min(1.0, num_embeddings / ids.sum())
        count = profile.bin_mean_counts()[used]
        above = np.maximum(count, 1 + 1e-9)  # at 1, where it is 0, W knows none
        rate = above + lambertw(-above * np.exp(-above)).real
        more = np.where(
            rate > _LEAST_RATE, ids * (count / np.maximum(rate, _LEAST_RATE) - 1), 0.0
        )
        room = max(0.0, num_embeddings - float(ids.sum()))
        more *= min(1.0, room / max(more.sum(), 1e-9))
        rare = rate <= _LEAST_RATE
        if rare.any():
            more[rare] = (room - more.sum()) * ids[rare] / ids[rare].sum()
        num_ids, mass = ids + more, ids * count
        for _ in range(_FITS if rare.any() else 0):
            # Few rows are left: some of what was seen once now comes twice.
            met = num_ids * -np.expm1(-mass / num_ids)
            lacks = min(ids.sum() - met.sum(), mass[~rare].sum() / 2)
            mass[rare] += lacks * mass[rare] / mass[rare].sum()
            mass[~rare] *= 1 - lacks / max(mass[~rare].sum(), 1e-9)
        return cls(tuple(num_ids.tolist()), tuple((mass / mass.sum()).tolist()))

    def histogram(self, num_lookups: float) -> tuple[float, ...]:
        """Return the expected access histogram of that many independent draws.

        How often an id is drawn is Poisson's.
        """
        num_ids, share = np.asarray(self.num_ids), np.asarray(self.share)
        used = (num_ids > 0) & (share > 0)
        rate = num_lookups * share[used] / num_ids[used]
        below = pdtr(COUNT_BIN_LOW - 1, rate[:, None])
        bins = num_ids[used] @ np.diff(below, append=1.0)
        return tuple(np.maximum(bins, 0.0).tolist())


def draw_lengths(
    rng: np.random.Generator, mean: float, std: float, batch_size: int
) -> npt.NDArray[np.int64]:
    """Draw `batch_size` bag lengths with this mean and about this spread.

    Spread 0 gives equal lengths (but for the fraction of the mean); a spread up to that
    of a Poisson distribution gives Poisson lengths, a larger one negative binomial.
    """
    variance = std**2
    if variance <= 0:
        one_more = rng.random(batch_size) < mean % 1
        return int(mean) + one_more.astype(np.int64)
    if variance <= mean * 1.05:
        return rng.poisson(mean, batch_size)
    success = mean / variance
    number = mean * success / (1 - success)
    return rng.negative_binomial(number, success, batch_size)


def coprime_step(num_embeddings: int) -> int:
    """Return a factor that, modulo the rows, permutes them and parts neighbours."""
    step = max(1, int(num_embeddings * 0.6180339887))
    while math.gcd(step, num_embeddings) != 1:
        step += 1
    return step


def draw_ids(
    rng: np.random.Generator,
    distribution: AccessDistribution,
    num_embeddings: int,
    count: int,
) -> npt.NDArray[np.int64]:
    """Draw ids independently.

    Hot ids lie anywhere in the table, by a permutation that depends on the rows only:
    batch after batch reads the same ones.

    Args:
        rng: Source of the draws.
        distribution: How likely the ids are.
        num_embeddings: Rows of the table.
        count: Ids to draw.

    Returns:
        `L` int64, values in `[0, num_embeddings)`.
    """
    # Within a group, an id's rank is linear in the draw that picks it.
    shares = np.cumsum([0.0, *distribution.share])
    ranks = np.cumsum([0.0, *distribution.num_ids])
    rank = np.interp(rng.random(count), shares, ranks).astype(np.int64)
    rank = np.minimum(rank, num_embeddings - 1)
    spread: npt.NDArray[np.int64] = (
        rank * coprime_step(num_embeddings) + num_embeddings // 3
    ) % num_embeddings
    return spread
