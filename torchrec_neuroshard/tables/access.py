"""Distributions of ids, as groups of equally likely ids, and draws from them.

Shapes: `B` samples, `L` lookups, `G` groups of equally likely ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import scipy

from torchrec_neuroshard.errors import ProfileError

if TYPE_CHECKING:
    from torchrec_neuroshard.tables.profile import FeatureProfile

NUM_COUNT_BINS = 17
"""Bins of the access histogram; the three seed papers' features have the same."""

COUNT_BIN_HIGH: npt.NDArray[np.float64] = np.array(
    [2.0**j for j in range(NUM_COUNT_BINS - 1)] + [np.inf]
)
"""Largest count of each bin: 1, 2, 4, 8, ..., 32768, infinity."""

COUNT_BIN_LOW: npt.NDArray[np.float64] = np.append(1.0, COUNT_BIN_HIGH[:-1] + 1)
"""Smallest count of each bin: 1, 2, 3, 5, 9, ..., 32769."""

_LEAST_RATE = 0.05
"""Lookups per id and batch; ids with a lower rate stand for all remaining rows."""
_FITS = 8
"""Rounds of moving lookups to rare ids until the expected number of distinct ids
matches."""


@dataclass(frozen=True, slots=True)
class AccessDistribution:
    """Groups of ids; all ids of a group are equally likely."""

    num_ids: tuple[float, ...]
    """Number of ids in each group, most likely group first."""
    share: tuple[float, ...]
    """Share of the lookups that each group gets; sums to 1."""

    @classmethod
    def power_law(cls, num_embeddings: int, exponent: float) -> AccessDistribution:
        """Return a power law: probability falls with rank^-exponent; 0 is uniform.

        Raises:
            ProfileError: There are no rows, or the exponent is below 0.
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
        """Return the distribution of the profile's ids, by its histogram.

        Ids that the profile has not seen are never drawn. For batches about as large as
        the profile's, use `of_batch`.
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
        """Return a distribution whose fresh batches match the profile.

        A batch with the profile's number of lookups is expected to have the profile's
        number of distinct ids, if the table has enough rows. Counts are taken to be
        Poisson's, and only counts above 0 were seen; Lambert's W function gives their
        rate. Ids seen about once stand for all remaining rows.

        Args:
            profile: A profile of the batch size that will be drawn.
            num_embeddings: Rows of the table.
        """
        ids = np.asarray(profile.access_histogram, dtype=np.float64)
        if not ids.any():
            return cls((float(num_embeddings),), (1.0,))
        used = np.flatnonzero(ids)[::-1]
        ids = ids[used] * min(1.0, num_embeddings / ids.sum())
        count = profile.bin_mean_counts()[used]
        above = np.maximum(count, 1 + 1e-9)  # the rate of a count of 1 is 0
        rate = above + scipy.special.lambertw(-above * np.exp(-above)).real
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
            # Few rows are left: some ids that were seen once are now drawn twice.
            met = num_ids * -np.expm1(-mass / num_ids)
            lacks = min(ids.sum() - met.sum(), mass[~rare].sum() / 2)
            mass[rare] += lacks * mass[rare] / mass[rare].sum()
            mass[~rare] *= 1 - lacks / max(mass[~rare].sum(), 1e-9)
        return cls(tuple(num_ids.tolist()), tuple((mass / mass.sum()).tolist()))

    def histogram(self, num_lookups: float) -> tuple[float, ...]:
        """Return the expected access histogram of `num_lookups` independent draws.

        The count of each id is Poisson distributed.
        """
        num_ids, share = np.asarray(self.num_ids), np.asarray(self.share)
        used = (num_ids > 0) & (share > 0)
        rate = num_lookups * share[used] / num_ids[used]
        below = scipy.special.pdtr(COUNT_BIN_LOW - 1, rate[:, None])
        bins = num_ids[used] @ np.diff(below, append=1.0)
        return tuple(np.maximum(bins, 0.0).tolist())


def draw_lengths(
    rng: np.random.Generator, mean: float, std: float, batch_size: int
) -> npt.NDArray[np.int64]:
    """Draw `batch_size` bag lengths with this mean and about this standard deviation.

    A deviation of 0 gives equal lengths, up to the mean's fraction. Deviations up to
    Poisson's give Poisson lengths, larger ones negative binomial lengths.
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
    """Return a factor that, modulo the rows, permutes them and separates neighbours."""
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

    A permutation spreads hot ids over the table. It depends only on the number of rows,
    so every batch has the same hot ids.

    Args:
        rng: Source of the draws.
        distribution: Probabilities of the ids.
        num_embeddings: Rows of the table.
        count: Number of ids to draw.

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
