from __future__ import annotations

import numpy as np
import pytest

from torchrec_neuroshard.tables.access import (
    AccessDistribution,
    draw_ids,
    draw_lengths,
)
from torchrec_neuroshard.tables.profile import count_histogram, zipf_profile


@pytest.mark.parametrize(
    ("mean", "std"), [(3.0, 0.0), (2.3, 0.0), (5.0, 2.236), (5.0, 6.0)]
)
def test_lengths_have_the_mean_and_spread(mean: float, std: float) -> None:
    lengths = draw_lengths(np.random.default_rng(1), mean, std, 50_000)
    assert lengths.dtype == np.int64 and lengths.min() >= 0
    error = max(std, 0.5) / np.sqrt(50_000)
    assert abs(lengths.mean() - mean) < 5 * error
    if std > 0:
        assert lengths.std() == pytest.approx(std, rel=0.03)
    else:
        assert set(lengths) <= {int(mean), int(mean) + 1}


@pytest.mark.parametrize(("rows", "exponent"), [(1, 1.0), (50, 0.0), (200_000, 0.9)])
def test_draws_match_the_expected_histogram(rows: int, exponent: float) -> None:
    distribution = AccessDistribution.power_law(rows, exponent)
    ids = draw_ids(np.random.default_rng(2), distribution, rows, 30_000)
    assert ids.min() >= 0 and ids.max() < rows
    _, counts = np.unique(ids, return_counts=True)
    expected = np.array(distribution.histogram(30_000))
    noise = 4 * np.sqrt(np.maximum(expected, 1))
    assert (np.abs(np.array(count_histogram(counts)) - expected) <= noise).all()


def test_profile_gives_its_distribution_back() -> None:
    large = zipf_profile(batch_size=65_536, pooling_factor=10, num_embeddings=50_000)
    found = AccessDistribution.from_profile(large, 50_000)
    assert sum(found.share) == pytest.approx(1)
    assert sum(found.num_ids) == pytest.approx(large.num_distinct)
    expected = large.at_batch_size(1_024)
    assert sum(found.histogram(10_240)) == pytest.approx(
        expected.num_distinct, rel=0.02
    )
    # An empty profile gives a uniform distribution.
    empty = zipf_profile(batch_size=4, pooling_factor=0, num_embeddings=10)
    uniform = AccessDistribution((10.0,), (1.0,))
    assert AccessDistribution.from_profile(empty, 10) == uniform
    assert AccessDistribution.of_batch(empty, 10) == uniform


@pytest.mark.parametrize("rows", [300, 50_000, 10**9])
@pytest.mark.parametrize("exponent", [0.0, 1.2])
def test_batches_have_as_many_distinct_ids_as_their_profile(
    rows: int, exponent: float
) -> None:
    profile = zipf_profile(
        batch_size=2_048, pooling_factor=4, num_embeddings=rows, exponent=exponent
    )
    count = round(profile.num_lookups)
    found = AccessDistribution.of_batch(profile, rows)
    assert sum(found.num_ids) <= rows * (1 + 1e-9)
    batches = [
        draw_ids(np.random.default_rng(seed), found, rows, count) for seed in (1, 2)
    ]
    distinct = [len(np.unique(ids)) for ids in batches]
    assert np.mean(distinct) == pytest.approx(profile.num_distinct, rel=0.04)
    # Fresh batches: in a large table, most ids have not been seen before.
    if rows == 10**9:
        both = len(np.unique(np.concatenate(batches)))
        wider = profile.at_batch_size(2 * profile.batch_size, rows)
        assert both == pytest.approx(wider.num_distinct, rel=0.1)
