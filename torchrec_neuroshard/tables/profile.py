"""Feature profiles: statistics of a table's input, at any batch size.

A profile is measured once on some batches and converted to other batch sizes. Scaling
is not enough, because the number of distinct rows, and so a fused kernel's memory
traffic, does not grow in proportion to the batch.

Shapes: `B` samples, `C` = 17 count bins.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from torchrec_neuroshard.errors import ProfileError, check_number
from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.tables.access import (
    COUNT_BIN_HIGH,
    COUNT_BIN_LOW,
    NUM_COUNT_BINS,
    AccessDistribution,
)
from torchrec_neuroshard.tables.hot_rows import HotRows
from torchrec_neuroshard.tables.lengths import (
    batch_std,
    common_stds,
    length_std,
    quantiles,
)

_COUNTS = np.arange(1, 4096)
_DIGITS = 60.0
"""Counts whose share is below exp(-60) of the largest are left out."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DEFAULT_ZIPF_EXPONENT = 1.05
"""Assumed skew of features without a profile: the power law of NVIDIA's synthetic
recommendation models (distributed-embeddings, config_v3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureProfile:
    """How one feature, or all features of a table together, read the table."""

    batch_size: int
    """Samples that were counted."""
    num_lookups: float
    """Ids looked up in these samples."""
    pooling_std: float = 0.0
    """Standard deviation of the length of one bag."""
    common_std: float = 0.0
    """The part of a sample's deviation that it shares with its other features [ids]."""
    batch_std: float = 0.0
    """Standard deviation of batches' mean lengths, beyond chance [ids per sample]."""
    length_quantiles: tuple[float, ...] = ()
    """Lengths of one feature's samples at `lengths.LEVELS`: median, 95 %, 99 % and
    longest. Empty: unknown, or of several features."""
    access_histogram: tuple[float, ...] = ()
    """17 values: distinct ids that occur once, twice, 3-4, 5-8, ..., above 32768 times.

    Empty if unknown: `with_repeats` then assumes a power law."""
    weighted: bool = False
    """Whether lookups carry per-sample weights."""
    batch_share: float = 1.0
    """The feature's samples divided by those of the model's batch. Variable batches
    leave out repeated samples, so theirs is below 1."""
    hot_rows: HotRows | None = None
    """Which ids are looked up; None if unknown, which counts as evenly spread."""

    def __post_init__(self) -> None:
        size, bins = self.batch_size, self.access_histogram
        check_number("batch_size", size, least=1, whole=True, error=ProfileError)
        try:
            values = (
                self.num_lookups,
                self.pooling_std,
                self.common_std,
                self.batch_std,
                *self.length_quantiles,
                *bins,
            )
            holds = all(math.isfinite(v) and v >= 0 for v in values)
        except TypeError:
            holds = False
        if not holds:
            raise ProfileError(
                "a profile needs finite values of at least 0, got "
                f"num_lookups={self.num_lookups}, pooling_std={self.pooling_std}, "
                f"common_std={self.common_std}, batch_std={self.batch_std}, "
                f"access_histogram={self.access_histogram}; profile the batches again"
            )
        if not 0 < self.batch_share < math.inf:
            raise ProfileError(
                f"batch_share must be above 0, got {self.batch_share}; it is 1 unless "
                "the feature has fewer samples than the batch"
            )
        if self.access_histogram and len(self.access_histogram) != NUM_COUNT_BINS:
            raise ProfileError(
                f"access_histogram needs {NUM_COUNT_BINS} bins, got "
                f"{len(self.access_histogram)}; bin j counts the ids that occur "
                "2**(j-1)+1 to 2**j times"
            )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; `files.from_fields` reads it back."""
        data = to_fields(self)
        if self.hot_rows is None:
            del data["hot_rows"]
        for name in ("common_std", "batch_std", "length_quantiles"):
            if not data[name]:
                del data[name]
        return data

    @staticmethod
    def of_lengths(
        mean: float, p95: float, longest: float | None = None, *, common: float = 1.0
    ) -> FeatureProfile:
        """Return the profile of a feature of which only lengths are known.

        Args:
            mean: Mean ids per sample.
            p95: Ids that 95 % of the samples do not exceed.
            longest: Ids of the longest sample; None: unknown.
            common: Share of a sample's deviation that it shares with its other
                features. Sequences of one user mostly have one length.

        Raises:
            ProfileError: The figures contradict each other, or `common` is not a share.
        """
        std = length_std(mean, p95, longest)
        if not 0.0 <= common <= 1.0:
            raise ProfileError(f"common must be 0 to 1, got {common}")
        return FeatureProfile(
            batch_size=1,
            num_lookups=mean,
            pooling_std=std,
            common_std=common * std,
        )

    @property
    def pooling_factor(self) -> float:
        """Mean number of ids per sample."""
        return self.num_lookups / self.batch_size

    @property
    def num_distinct(self) -> float:
        """Distinct ids among the lookups; 0 without a histogram."""
        return float(sum(self.access_histogram))

    def access_rates(self, num_embeddings: int) -> tuple[Floats, Floats]:
        """Return groups of ids and their expected lookups in a batch of this size.

        Ids seen more than four times are expected equally often again. The rates of all
        other ids, including unseen ones, follow the gamma mixture of `at_batch_size`.
        If that has more ids than the table has rows, the rarest ids share the remaining
        rows.

        Args:
            num_embeddings: Rows of the table.

        Returns:
            Number of ids in each group, in total at most the rows, and the groups'
            rates, falling.
        """
        num_ids = np.asarray(self.access_histogram, dtype=np.float64)
        if not num_ids.sum() > 0:
            return np.zeros(0), np.zeros(0)
        rate = self.bin_mean_counts()
        if num_ids[0] > 0:
            rare_ids, rare_rate = _RareIds.fit(num_ids).rates(float(num_ids[0]))
            num_ids = np.concatenate([num_ids[3:], rare_ids])
            rate = np.concatenate([rate[3:], rare_rate])
        order = np.argsort(-rate, kind="stable")
        num_ids, rate = num_ids[order], rate[order]
        left = num_embeddings - (np.cumsum(num_ids) - num_ids)
        if left[-1] < num_ids[-1]:
            lookups = np.cumsum((num_ids * rate)[::-1])[::-1]
            last = int(np.argmax((left <= 0) | (lookups >= left * rate)))
            rows = max(float(left[last]), 1e-9)
            num_ids = np.append(num_ids[:last], rows)
            rate = np.append(rate[:last], lookups[last] / rows)
        return num_ids, rate

    def bin_mean_counts(self) -> Floats:
        """Return the mean count of an id in each bin, such that the lookups add up.

        Returns:
            `C` float64; empty bins have their lower bound.
        """
        ids, lookups = np.array(self.access_histogram), np.array([self.num_lookups])
        mean: Floats = bin_mean_counts(ids[None], lookups)[0]
        return mean

    def at_batch_size(
        self, batch_size: int, num_embeddings: float = math.inf
    ) -> FeatureProfile:
        """Return the expected profile at another batch size.

        Fewer samples: each lookup is kept with probability `batch_size /
        self.batch_size` (binomial thinning of the counts). More samples: lookups grow
        in proportion. A gamma mixture of Poisson rates, fitted to the rarely seen ids,
        predicts how many unseen ids appear; the table's rows cap them. For power laws
        with exponents 0 to 1.4, the distinct ids are within 0.5 % at twice the batch
        and 3 % at four times; beyond that they are a guess.

        Args:
            batch_size: Samples of the returned profile.
            num_embeddings: Rows of the table; caps the distinct ids.

        Returns:
            A profile whose `num_lookups` is exactly proportional to the batch.

        Raises:
            ProfileError: `batch_size` is below 1.
        """
        ratio = batch_size / self.batch_size
        lookups = self.num_lookups * ratio
        ids = np.asarray(self.access_histogram, dtype=np.float64)
        if ids.size and ratio != 1.0:
            change = _thin if ratio < 1.0 else _extrapolate
            ids = change(ids, self.bin_mean_counts(), ratio)
        total, cap = float(ids.sum()), min(lookups, num_embeddings)
        if total > cap > 0:
            ids = ids * (cap / total)
        return replace(
            self,
            batch_size=batch_size,
            num_lookups=lookups,
            access_histogram=tuple(ids.tolist()),
        )

    def with_repeats(self, batch_size: int, num_embeddings: int) -> FeatureProfile:
        """Return the expected profile of a batch; without a histogram, of a power law.

        Args:
            batch_size: Samples of the returned profile.
            num_embeddings: Rows of the table.
        """
        if self.access_histogram:
            return self.at_batch_size(batch_size, num_embeddings)
        top = [] if self.hot_rows is None else [s for _, s in self.hot_rows.top_ids]
        num_lookups = batch_size * self.pooling_factor
        assumed = zipf_profile(
            batch_size=batch_size,
            pooling_factor=self.pooling_factor * max(0.0, 1.0 - sum(top)),
            num_embeddings=num_embeddings,
        )
        bins = binned(np.array(top) * num_lookups) + assumed.access_histogram
        return replace(
            self,
            batch_size=batch_size,
            num_lookups=num_lookups,
            access_histogram=tuple(bins.tolist()),
        )

    def distinct_in_parts(self, num_parts: int, num_embeddings: int) -> FeatureProfile:
        """Return the profile if each part of the batch looks up an id at most once.

        Lookups are spread over the parts at random: with `n` parts, an id that occurs
        `c` times is expected in `n * (1 - (1 - 1 / n)**c)` of them.

        Args:
            num_parts: Equal parts of the batch, e.g. the ranks' local batches.
            num_embeddings: Rows of the table.
        """
        if not self.access_histogram:
            return self
        parts = float(num_parts)
        samples = max(1, round(self.batch_size / parts))
        lookups = parts * self.at_batch_size(samples, num_embeddings).num_distinct

        def in_parts(counts: npt.ArrayLike) -> Floats:
            chance = np.log1p(-1 / max(parts, 1 + 1e-9))
            expected: Floats = parts * -np.expm1(np.asarray(counts) * chance)
            return expected

        counts = in_parts(self.bin_mean_counts())
        low = np.floor(counts)
        upper = counts - low
        ids = np.asarray(self.access_histogram)
        histogram = np.zeros(NUM_COUNT_BINS)
        for count, share in ((low, 1 - upper), (low + 1, upper)):
            # Every id that occurs is in at least one part.
            bins = np.searchsorted(COUNT_BIN_HIGH, np.maximum(count, 1.0))
            np.add.at(histogram, bins, ids * share)
        lookups = min(max(lookups, self.num_distinct), self.num_lookups)
        hot = self.hot_rows
        if hot is not None and lookups > 0:
            top = [share * self.num_lookups for _, share in hot.top_ids]
            hot = hot.with_top_shares((in_parts(top) / lookups).tolist())
        rest = float(lookups) / max(self.num_lookups, 1e-9)
        return replace(
            self,
            num_lookups=lookups,
            pooling_std=self.pooling_std * rest,
            common_std=self.common_std * rest,
            batch_std=self.batch_std * rest,
            access_histogram=tuple(histogram.tolist()),
            hot_rows=hot,
        )


def bin_mean_counts(ids_NC: Floats, lookups_N: Floats) -> Floats:
    """Return the mean count of an id in each bin, such that the lookups add up.

    Only the bounds of a bin are known. The mean counts are at one fraction between low
    and high, the same in all bins; the open last bin takes the remaining lookups.

    Args:
        ids_NC: Distinct ids in each bin, for `N` histograms.
        lookups_N: Lookups of each histogram.

    Returns:
        `N x C` float64; empty bins have their lower bound.
    """
    low, high = COUNT_BIN_LOW, COUNT_BIN_HIGH.copy()
    high[-1] = low[-1]
    room = ids_NC @ (high - low)
    excess = lookups_N - ids_NC @ low
    fraction = np.where(room > 0, 1.0, 0.0)
    inside = (room > 0) & (excess < room)
    np.divide(np.maximum(excess, 0.0), room, out=fraction, where=inside)
    mean: Floats = low + (high - low) * fraction[:, None]
    left = np.maximum(excess - fraction * room, 0.0)
    last = ids_NC[:, -1]
    mean[:, -1] += np.where(last > 0, left / np.where(last > 0, last, 1.0), 0.0)
    return mean


_MOST_COUNT = 2.0**30
"""Largest count that SciPy's binomials take. In an almost empty last bin, which absorbs
the rounding errors of all lookups, the mean count can be huge."""


def _thin(ids: Floats, mean_count: Floats, keep: float) -> Floats:
    """Return the histogram after each lookup is kept with probability `keep`."""
    used = ids > 0
    # Binomial; a count between two integers is a mix of both.
    count = np.minimum(mean_count[used, None], _MOST_COUNT)
    low = np.floor(count)
    upper_weight = count - low
    edges = COUNT_BIN_LOW - 1

    def at_most(trials: Floats) -> Floats:
        inside = scipy.special.bdtr(np.minimum(edges, trials), trials.astype(int), keep)
        return np.where(edges < trials, inside, 1.0)

    below = at_most(low) * (1 - upper_weight) + at_most(low + 1) * upper_weight
    thinned: Floats = ids[used] @ np.diff(below, append=1.0)
    return thinned


_LOG_RATES = np.linspace(math.log(1e-8), math.log(32.0), 440)
RARE_RATES: Floats = np.exp(_LOG_RATES)
"""Grid of rare ids' rates [lookups per batch], rising."""
_NARROW_SHAPE = 100.0
"""From this shape on, the gamma density is narrow: all rates count as its mean."""


@functools.cache
def _rarely_met() -> Floats:
    """Return the probability of at most four lookups in a batch, for each rate."""
    found: Floats = scipy.special.pdtr(4, RARE_RATES)
    return found


@dataclass(frozen=True, slots=True)
class _RareIds:
    """Gamma mixture of Poisson rates, fitted to the ids seen at most four times.

    Exact for uniform ids (scale 0) and for an infinite power law (scale 1).
    """

    shape: float
    """Shape of the rates' gamma density; below 0, new ids never run out."""
    scale: float

    @classmethod
    def fit(cls, ids: Floats) -> _RareIds:
        """Fit to the ratios of the first three bins (1, 2, and 3-4 lookups)."""
        once, twice, three_or_four = (float(v) for v in ids[:3])
        # The mixture has f_{k+1} / f_k = (slope + (k - 1) * scale) / (k + 1), where
        # slope is (1 + shape) * scale.
        slope = min(max(2 * twice / once, 1e-9), 4.0)
        ratio = three_or_four / twice if twice > 0 else 0.0
        linear = 4 + 3 * slope
        constant = slope * (4 + slope) - 12 * ratio
        scale = (math.sqrt(max(linear**2 - 8 * constant, 0.0)) - linear) / 4
        scale = min(max(scale, 1e-6), 1 - 1e-6)
        return cls(slope / scale - 1, scale)

    def rates(self, once: float) -> tuple[Floats, Floats]:
        """Return numbers and rates of ids seen at most four times, unseen ids included.

        Args:
            once: Ids seen once.
        """
        odds = self.scale / (1 - self.scale)
        if self.shape > _NARROW_SHAPE:  # all have about the same rate
            rate = np.array([self.shape * odds])
            return once * np.exp(rate) / rate * scipy.special.pdtr(4, rate), rate
        log_density = (
            math.log(once)
            - scipy.special.gammaln(self.shape + 1)
            - (self.shape + 1) * math.log(self.scale)
            + self.shape * _LOG_RATES
            - RARE_RATES / odds
        )
        num_ids = np.exp(log_density) * (_LOG_RATES[1] - _LOG_RATES[0])
        return num_ids * _rarely_met(), RARE_RATES

    def fresh(self, once: float, more: float) -> Floats:
        """Return the histogram of ids that first appear in further lookups.

        Args:
            once: Ids seen once so far.
            more: Further lookups divided by the lookups counted so far.
        """
        growth, power = math.log1p(more * self.scale), -self.shape
        if abs(power) < 1e-9:
            num_fresh = once * growth / self.scale
        else:
            num_fresh = once * math.expm1(power * growth) / (power * self.scale)
        success = more * self.scale / (1 + more * self.scale)
        # Beyond about shape * odds, each share is about `success` times the previous.
        last = max(0.0, self.shape) * more * self.scale + _DIGITS / -math.log(success)
        count = _COUNTS[: math.ceil(last) + 2]
        log_step = np.log((count[:-1] + self.shape) * success / count[1:])
        log_share = np.append(0.0, np.cumsum(log_step))
        share = np.exp(log_share - log_share.max())
        bins = np.searchsorted(COUNT_BIN_HIGH, count)
        histogram = np.zeros(NUM_COUNT_BINS)
        np.add.at(histogram, bins, share / share.sum())
        return num_fresh * histogram


def _extrapolate(ids: Floats, mean_count: Floats, ratio: float) -> Floats:
    """Return the histogram at `ratio` times the lookups."""
    more = ratio - 1
    # An id seen m times has a rate of about m: gamma posterior of shape m, scale 1.
    shape, scale = mean_count.copy(), np.ones(NUM_COUNT_BINS)
    fresh = np.zeros(NUM_COUNT_BINS)
    if ids[0] > 0:
        rare = _RareIds.fit(ids)
        shape[:3] += rare.shape
        scale[:3] = rare.scale
        fresh = rare.fresh(float(ids[0]), more)
    # Further lookups of a known id are negative binomial under that posterior.
    some = ids > 0
    further = COUNT_BIN_HIGH[:-1] - mean_count[some, None]
    success = 1 / (1 + more * scale[some, None])
    below = scipy.special.betainc(
        shape[some, None], np.maximum(further + 1, 1e-9), success
    )
    below = np.where(further > -1, below, 0.0)
    return ids[some] @ np.diff(below, prepend=0.0, append=1.0) + fresh


def binned(counts: Floats) -> Floats:
    """Return the access histogram of ids with expected numbers of lookups, `C`."""
    bins = np.searchsorted(COUNT_BIN_HIGH, np.maximum(counts, 1.0))
    weights = np.minimum(counts, 1.0)
    return np.bincount(bins, weights, NUM_COUNT_BINS).astype(np.float64)


def count_histogram(counts: npt.NDArray[np.integer[Any]]) -> tuple[float, ...]:
    """Return how many of `counts` (one per distinct id) fall in each bin."""
    counts = counts[counts > 0]
    bins = np.searchsorted(COUNT_BIN_HIGH, counts.astype(np.float64))
    return tuple(float(v) for v in np.bincount(bins, minlength=NUM_COUNT_BINS))


def zipf_profile(
    *,
    batch_size: int,
    pooling_factor: float,
    num_embeddings: int,
    exponent: float = DEFAULT_ZIPF_EXPONENT,
) -> FeatureProfile:
    """Return the expected profile of ids that follow a power law, rank^-exponent.

    Args:
        batch_size: Samples.
        pooling_factor: Mean ids per sample.
        num_embeddings: Rows of the table.
        exponent: Skew; 0 is uniform.

    Raises:
        ProfileError: There are no rows, or a value is negative or not finite.
    """
    access = AccessDistribution.power_law(num_embeddings, exponent)
    lookups = batch_size * pooling_factor
    return FeatureProfile(
        batch_size=batch_size,
        num_lookups=lookups,
        access_histogram=access.histogram(lookups),
    )


def merge_profiles(profiles: Sequence[FeatureProfile]) -> FeatureProfile:
    """Return the profile of a table that several features read.

    Ids are counted per feature: an id that two features look up counts twice.

    Args:
        profiles: One profile per feature, all at one batch size.
    """
    known = all(p.access_histogram for p in profiles)
    columns = zip(*(p.access_histogram for p in profiles), strict=True) if known else ()
    variance = float(np.mean([p.pooling_std**2 for p in profiles]))
    return FeatureProfile(
        batch_size=profiles[0].batch_size,
        num_lookups=sum(p.num_lookups for p in profiles),
        pooling_std=math.sqrt(variance),
        common_std=sum(p.common_std for p in profiles),
        batch_std=sum(p.batch_std for p in profiles),
        length_quantiles=profiles[0].length_quantiles if len(profiles) == 1 else (),
        access_histogram=tuple(float(sum(c)) for c in columns),
        weighted=any(p.weighted for p in profiles),
        hot_rows=HotRows.merged((p.hot_rows, p.num_lookups) for p in profiles),
    )


def profile_inputs(batches: Iterable[Any]) -> dict[str, FeatureProfile]:
    """Profile each feature over some batches of model input.

    All batches count as one large batch: eight local batches give the profile of one
    iteration on eight ranks. Memory grows with the number of ids. Features with fewer
    samples than the batch (variable batches) have a `batch_share` below 1.

    Args:
        batches: KeyedJaggedTensors, one per training batch, all with the same keys.

    Returns:
        Feature name -> profile over all samples of the batches.

    Raises:
        ProfileError: There are no batches, a batch is not a KeyedJaggedTensor, its
            features differ from the first batch's, or its ids are not whole numbers.
    """
    if hasattr(batches, "stride") or not isinstance(batches, Iterable):
        # Iterating over a single batch would yield its keys.
        raise ProfileError(
            f"profile_inputs takes several batches, e.g. a list; got one "
            f"{type(batches).__name__}. Pass [batch]"
        )
    found: dict[str, list[tuple[Ints, Ints]]] | None = None
    weighted, num_samples = False, 0
    for number, batch in enumerate(batches):
        if not all(hasattr(batch, n) for n in ("keys", "stride", "to_dict")):
            raise ProfileError(
                f"batch {number} is a {type(batch).__name__}, not a "
                "KeyedJaggedTensor; pass the model's sparse inputs, e.g. "
                "[batch.sparse_features for batch in data]"
            )
        if found is None:
            found = {key: [] for key in batch.keys()}
        if odd := sorted(set(batch.keys()) ^ found.keys()):
            raise ProfileError(
                f"batch {number} has other features than batch 0 (differing: {odd}); "
                "profile batches of one model input"
            )
        if batch.stride() == 0:  # TorchRec cannot split an empty batch
            continue
        num_samples += batch.stride()
        weighted = weighted or batch.weights_or_none() is not None
        for key, jagged in batch.to_dict().items():
            both = jagged.values(), jagged.lengths()
            ids, lengths = (part.detach().cpu().numpy() for part in both)
            is_whole = not ids.size or np.issubdtype(ids.dtype, np.integer)
            if not is_whole or (lengths < 0).any():
                raise ProfileError(
                    f"feature '{key}' of batch {number} has ids of type {ids.dtype} "
                    f"and lengths from {lengths.min(initial=0)}; pass whole ids, and "
                    "lengths of at least 0"
                )
            found[key].append((ids, lengths))
    if found is None:
        raise ProfileError("profile_inputs got no batches; pass at least one")
    profiles, lengths = {}, dict[str, Ints]()
    for key, parts in found.items():
        if not any(len(of_batch) for _, of_batch in parts):
            raise ProfileError(
                f"feature '{key}' has no samples in any batch; profile batches "
                "with data"
            )
        ids, lengths[key] = (np.concatenate(each) for each in zip(*parts, strict=True))
        profiles[key] = replace(
            profile_ids(ids, lengths[key], weighted),
            batch_share=len(lengths[key]) / num_samples,
            batch_std=batch_std([of_batch for _, of_batch in parts]),
        )
    return {
        key: replace(profiles[key], common_std=shared)
        for key, shared in common_stds(lengths).items()
    }


def profile_ids(
    ids: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    weighted: bool = False,
) -> FeatureProfile:
    """Return the profile of one feature.

    Args:
        ids: Ids looked up, over all samples.
        lengths: Number of ids of each sample; at least one sample.
        weighted: Whether lookups carry weights.
    """
    distinct, counts = np.unique(ids, return_counts=True)
    return FeatureProfile(
        batch_size=len(lengths),
        num_lookups=float(len(ids)),
        pooling_std=float(lengths.std()),
        length_quantiles=quantiles(lengths),
        access_histogram=count_histogram(counts),
        weighted=weighted,
        hot_rows=HotRows.counted(distinct, counts),
    )
