from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard.errors import ProfileError
from torchrec_neuroshard.tables.access import (
    COUNT_BIN_HIGH,
    COUNT_BIN_LOW,
    AccessDistribution,
    draw_ids,
)
from torchrec_neuroshard.tables.profile import (
    FeatureProfile,
    count_histogram,
    merge_profiles,
    profile_inputs,
    zipf_profile,
)

ids_per_bin = st.lists(
    st.one_of(st.just(0.0), st.floats(0.01, 1e6)), min_size=17, max_size=17
)


@st.composite
def profiles(draw: st.DrawFn) -> FeatureProfile:
    """Draw any histogram, with any number of lookups that it allows."""
    histogram = np.array(draw(ids_per_bin))
    low = float(histogram @ COUNT_BIN_LOW)
    top = np.append(COUNT_BIN_HIGH[:-1], 1e6)
    lookups = low + draw(st.floats(0, 1)) * (float(histogram @ top) - low)
    return FeatureProfile(
        batch_size=draw(st.integers(1, 100_000)),
        num_lookups=lookups,
        access_histogram=tuple(histogram),
    )


@settings(deadline=None, max_examples=60)
@given(
    profiles(),
    st.lists(st.floats(0.001, 4), min_size=2, max_size=3),
    st.integers(1, 5_000_000),
)
def test_other_batches_keep_their_bounds(
    profile: FeatureProfile, factors: list[float], rows: int
) -> None:
    mean = profile.bin_mean_counts()
    assert (mean >= COUNT_BIN_LOW * (1 - 1e-12)).all()
    assert (mean <= COUNT_BIN_HIGH * (1 + 1e-12)).all()
    total = float(np.array(profile.access_histogram) @ mean)
    assert total == pytest.approx(profile.num_lookups, rel=1e-9, abs=1e-6)
    own = profile.at_batch_size(profile.batch_size)
    assert own.access_histogram == pytest.approx(profile.access_histogram)
    fewer = 0.0
    for size in sorted({max(1, int(f * profile.batch_size)) for f in factors}):
        lookups = profile.num_lookups * size / profile.batch_size
        other = profile.at_batch_size(size, rows)
        assert other.batch_size == size
        assert other.num_lookups == pytest.approx(lookups, rel=1e-12)
        assert other.num_distinct <= min(lookups, rows) * (1 + 1e-9)
        distinct = profile.at_batch_size(size).num_distinct
        assert fewer <= distinct * (1 + 1e-9) + 1e-9
        fewer = distinct


def furthest(one: FeatureProfile, other: FeatureProfile) -> float:
    """Return the largest difference between bins."""
    bins = np.array([one.access_histogram, other.access_histogram])
    return float(np.abs(bins[0] - bins[1]).max())


@pytest.mark.parametrize(
    ("exponent", "rows"), [(0.0, 20_000), (1.05, 5_000_000), (1.3, 300)]
)
def test_other_batch_sizes_match_samples(exponent: float, rows: int) -> None:
    rng = np.random.default_rng(5)
    distribution = AccessDistribution.power_law(rows, exponent)
    ids = draw_ids(rng, distribution, rows, 400_000)
    part = count_profile(ids[rng.random(len(ids)) < 0.1], 400)
    thinned = count_profile(ids, 4_000).at_batch_size(400)
    # Sampling noise of a count is at most its square root; four of those. Within a bin
    # the counts are known by their mean only: 3 % of the ids move.
    noise = 4 * math.sqrt(part.num_distinct)
    assert abs(thinned.num_distinct - part.num_distinct) <= noise
    assert furthest(thinned, part) <= noise + 0.03 * part.num_distinct
    half, whole = (count_profile(ids[:n], n // 1_000) for n in (100_000, 200_000))
    grown = half.at_batch_size(200, rows)
    assert grown.num_distinct == pytest.approx(whole.num_distinct, rel=0.01)
    assert furthest(grown, whole) <= 0.1 * whole.num_distinct


def test_histogram_bins_are_half_open_powers_of_two() -> None:
    counts = np.array([1, 2, 3, 4, 5, 8, 9, 32_768, 32_769, 10**9])
    expected = np.zeros(17)
    np.add.at(expected, [0, 1, 2, 2, 3, 3, 4, 15, 16, 16], 1)
    assert count_histogram(counts) == tuple(expected)
    assert count_histogram(np.array([], dtype=np.int64)) == (0.0,) * 17


def test_even_profile_by_hand() -> None:
    profile = zipf_profile(
        batch_size=100, pooling_factor=2, num_embeddings=400, exponent=0.0
    )
    rate = 200 / 400
    assert profile.num_distinct == pytest.approx(400 * (1 - math.exp(-rate)))
    assert profile.access_histogram[0] == pytest.approx(400 * rate * math.exp(-rate))
    assert profile.access_histogram[1] == pytest.approx(
        400 * rate**2 / 2 * math.exp(-rate)
    )


def test_merging_adds_up() -> None:
    first = FeatureProfile(
        batch_size=4, num_lookups=4, pooling_std=3, access_histogram=(4, *[0] * 16)
    )
    second = FeatureProfile(
        batch_size=4,
        num_lookups=2,
        pooling_std=4,
        access_histogram=(0, 1, *[0] * 15),
        weighted=True,
    )
    merged = merge_profiles([first, second])
    assert (merged.num_lookups, merged.weighted) == (6, True)
    assert merged.access_histogram == (4, 1, *[0] * 15)
    assert merged.pooling_std == pytest.approx(math.sqrt((9 + 16) / 2))
    bare = FeatureProfile(batch_size=4, num_lookups=2)
    assert merge_profiles([first, bare]).access_histogram == ()


def count_profile(ids: np.ndarray, batch_size: int) -> FeatureProfile:
    _, counts = np.unique(ids, return_counts=True)
    return FeatureProfile(
        batch_size=batch_size,
        num_lookups=float(len(ids)),
        access_histogram=count_histogram(counts),
    )


FLOATS, ONES = torch.tensor([1.5, 2.0]), torch.tensor([1, 1])
MINUS = torch.tensor([3, -1])


def jagged(
    bags: dict[str, list[list[int]]], weights: bool = False
) -> KeyedJaggedTensor:
    values = [i for rows in bags.values() for bag in rows for i in bag]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(bags),
        values=torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(
            [len(bag) for rows in bags.values() for bag in rows], dtype=torch.int64
        ),
        weights=torch.ones(len(values)) if weights else None,
    )


def test_inputs_match_a_count_by_hand() -> None:
    """All batches count; the order of features may differ between them."""
    rng = np.random.default_rng(0)
    batches: list[dict[str, list[list[int]]]] = [
        {
            key: [list(rng.zipf(1.5, rng.poisson(6)) % 50) for _ in range(100)]
            for key in keys
        }
        for keys in (("x", "y"), ("y", "x"))
    ]
    batches += [{"x": [[]], "y": [[]]}, {"x": [], "y": []}]
    found = profile_inputs([jagged(b, weights=i == 1) for i, b in enumerate(batches)])
    assert list(found) == ["x", "y"]
    for key, profile in found.items():
        bags = [bag for b in batches for bag in b[key]]
        counts = collections.Counter(int(i) for bag in bags for i in bag)
        assert profile.batch_size == len(bags) == 201
        assert profile.num_lookups == counts.total()
        assert profile.pooling_std == pytest.approx(np.std([len(bag) for bag in bags]))
        assert profile.weighted
        assert profile.access_histogram == tuple(
            sum(low <= c <= high for c in counts.values())
            for low, high in zip(COUNT_BIN_LOW, COUNT_BIN_HIGH, strict=True)
        )


def test_variable_batches_tell_their_share_of_samples() -> None:
    """Feature x has two samples, which stand for the batch's four, then one."""
    batches = [
        KeyedJaggedTensor(
            keys=["x", "y"],
            values=torch.arange(count + 4),
            lengths=torch.ones(count + 4, dtype=torch.int64),
            stride_per_key_per_rank=[[count], [4]],
            inverse_indices=(["x", "y"], torch.tensor([[0] * 4, [*range(4)]])),
        )
        for count in (2, 1)
    ]
    x, y = profile_inputs(batches).values()
    assert (x.batch_size, x.batch_share) == (3, 3 / 8)
    assert (y.batch_size, y.batch_share) == (8, 1)
    [whole] = profile_inputs([jagged({"a": [[1]]})]).values()
    assert whole.batch_share == 1


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"batch_share": 0.0}, "batch_share must be above 0, got 0"),
        ({"pooling_std": -1.0}, "pooling_std=-1"),
        ({"access_histogram": (1.0, 2.0)}, "17 bins"),
        ([], "no batches"),
        ([jagged({"a": [[1]]}), jagged({"b": [[1]]})], r"\['a', 'b'\]"),
        ([jagged({"a": []})], "feature 'a' has no samples"),
        (jagged({"a": [[1]]}), r"Pass \[batch\]"),
        (None, r"got one NoneType\. Pass \[batch\]"),
        ([3], "batch 0 is a int, not a KeyedJaggedTensor"),
        (
            [KeyedJaggedTensor(["a"], FLOATS, lengths=ONES)],
            "'a' of batch 0 has ids of type fl",
        ),
        (
            [KeyedJaggedTensor(["a"], ONES, lengths=MINUS)],
            "'a' of batch 0 .*lengths from -1",
        ),
    ],
)
def test_bad_profiles_and_inputs_are_refused(given: Any, value: str) -> None:
    with pytest.raises(ProfileError, match=value):
        if isinstance(given, dict):
            FeatureProfile(**{"batch_size": 4, "num_lookups": 2.0, **given})
        else:
            profile_inputs(given)


def test_all_but_empty_bins_are_thinned_like_empty_ones() -> None:
    """The open bin's ids get only the rounding error of all lookups."""
    profile = FeatureProfile(
        batch_size=4096,
        num_lookups=8877.0,
        access_histogram=(
            *(8061.241723433023, 339.0306816422909, 40.49227054363876),
            *(1.8184545129139336, 0.0626302412596012, 0.002818473987314102),
            *(0.0001171473306485587, 4.889473029202119e-06, 1.854751207345521e-07),
            *(5.947843434303392e-09, 9.40299280268031e-11, 1.0539251210928755e-12),
            *(2.1333241067243487e-15, 6.603431788830918e-25, 2.0878838217544903e-26),
            *(1.1676726164378303e-28, 4.787783579955701e-31),
        ),
    )
    fewer = profile.at_batch_size(512)
    assert fewer.num_lookups == 8877.0 / 8
    assert 0 < fewer.num_distinct <= fewer.num_lookups
