"""Lengths of samples: counted, given, and what batches of them differ by."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.builders import make_tables
from torchrec_neuroshard.errors import ProfileError
from torchrec_neuroshard.tables.lengths import (
    batch_std,
    common_stds,
    gamma_at,
    length_std,
)
from torchrec_neuroshard.tables.profile import (
    FeatureProfile,
    merge_profiles,
    profile_inputs,
)

Ints = npt.NDArray[np.int64]


@pytest.mark.parametrize(
    ("shape", "most"), [(0.5, 40.0), (1.0, 20.0), (2.0, 15.0), (8.0, 5.0)]
)
def test_the_deviation_follows_from_mean_and_quantile(
    shape: float, most: float
) -> None:
    """Of gamma distributions, whose longest sample is far away."""
    law = stats.gamma(shape, scale=100 / shape)
    found = length_std(100.0, law.ppf(0.95), 100 * most)
    assert found == pytest.approx(100 / shape**0.5, rel=0.06)


def test_lengths_that_are_cut_off_have_two_peaks() -> None:
    """Zipf's law with exponent 1.2, cut off at 4,096."""
    lengths = np.minimum(np.random.default_rng(0).zipf(1.2, 400_000), 4_096)
    found = length_std(lengths.mean(), np.quantile(lengths, 0.95), 4_096)
    assert found == pytest.approx(lengths.std(), rel=0.06)


def test_equal_lengths_have_no_deviation() -> None:
    assert length_std(500, 500) == length_std(500, 500, 500) == 0.0
    assert length_std(0, 0, 10) == 0.0


@pytest.mark.parametrize(
    "given", [(10, 5, 20), (10, 30, 20), (-1, 5, 20), (float("nan"), 5, 20)]
)
def test_lengths_that_contradict_each_other_are_refused(
    given: tuple[float, float, float],
) -> None:
    with pytest.raises(ProfileError, match="length"):
        FeatureProfile.of_lengths(*given)


def drawn(loading: float, std: float, factor: npt.NDArray[np.float64]) -> Ints:
    own = np.random.default_rng(int(100 * loading + std)).normal(size=len(factor))
    values = 200 + std * (loading * factor + (1 - loading**2) ** 0.5 * own)
    rounded: Ints = np.round(values).astype(np.int64)
    return rounded


def test_one_factor_explains_what_features_share() -> None:
    factor = np.random.default_rng(1).normal(size=4_000)
    lengths = {
        "all": drawn(1.0, 9.0, factor),
        "most": drawn(0.8, 30.0, factor),
        "half": drawn(0.5, 20.0, factor),
        "none": drawn(0.0, 20.0, factor),
        "less": drawn(0.8, 30.0, factor)[:100],
        "equal": np.full(4_000, 7),
    }
    found = common_stds(lengths)
    expected = {"all": 9.0, "most": 24.0, "half": 10.0, "none": 0.0}
    assert {f: found[f] for f in expected} == pytest.approx(expected, abs=1.5)
    assert found["less"] == found["equal"] == 0.0
    assert common_stds({"alone": lengths["all"]}) == {"alone": 0.0}


def test_batches_differ_only_beyond_chance() -> None:
    rng = np.random.default_rng(2)
    even = [rng.poisson(50, 256) for _ in range(40)]
    assert batch_std(even) == 0.0
    means = rng.normal(50, 10, 40)
    uneven = [rng.poisson(max(mean, 1.0), 256) for mean in means]
    assert batch_std(uneven) == pytest.approx(means.std(), rel=0.15)
    assert batch_std(even[:1]) == 0.0


@pytest.mark.parametrize("spread", [0.01, 0.1, 0.3, 0.5])
def test_batches_follow_a_gamma_distribution(spread: float) -> None:
    levels = np.array([0.05, 0.25, 0.5, 0.75, 0.95, 0.99])
    expected = stats.gamma(spread**-2, scale=spread**2).ppf(levels)
    assert gamma_at(stats.norm.ppf(levels), spread) == pytest.approx(expected, rel=0.02)


def jagged(lengths: dict[str, Ints]) -> KeyedJaggedTensor:

    every = np.concatenate([*lengths.values()])
    return KeyedJaggedTensor.from_lengths_sync(
        keys=[*lengths],
        values=torch.zeros(int(every.sum()), dtype=torch.int64),
        lengths=torch.from_numpy(every),
    )


def test_profiles_of_batches_know_their_lengths() -> None:
    rng = np.random.default_rng(3)
    batches = []
    for _ in range(8):
        length = rng.geometric(0.02, 128)
        batches.append(
            jagged({"item": length, "action": length, "one": np.ones(128, int)})
        )
    found = profile_inputs(batches)
    item = found["item"]
    assert item.common_std == pytest.approx(item.pooling_std, rel=0.05)
    assert found["one"].common_std == found["one"].pooling_std == 0.0
    median, p95, p99, longest = item.length_quantiles
    assert median < item.pooling_factor < p95 < p99 < longest
    assert item.batch_std == 0.0
    read = item.to_json()
    assert read["length_quantiles"] == [median, p95, p99, longest]
    assert "common_std" not in found["one"].to_json()


def test_a_table_adds_up_what_its_features_share() -> None:
    one = FeatureProfile.of_lengths(100, 300)
    [table] = make_tables([8], 1_000, [200.0], num_features=2)
    for common in (1.0, 0.0):
        each = dataclasses.replace(one, common_std=common * one.pooling_std)
        read = dataclasses.replace(table, profile=merge_profiles([each, each]))
        factor = 2.0 if common else 2**0.5
        spread = np.hypot.reduce(read.batch_spreads(64))
        assert spread == pytest.approx(factor * one.pooling_std / 200 / 8)


@pytest.mark.parametrize("common", [0.0, 0.7, 1.0])
def test_the_longest_of_100_batches_is_that_of_drawn_batches(common: float) -> None:
    rng = np.random.default_rng(4)
    lengths = rng.geometric(1 / 50, (20_000, 32))
    expected = np.quantile(lengths.sum(axis=1), 0.99) / (32 * 50)
    std = float(lengths.std())
    profile = FeatureProfile(
        batch_size=1, num_lookups=50.0, pooling_std=std, common_std=common * std
    )
    [table] = make_tables([8], 1_000, [50.0], profile=profile)
    assert table.longest_batch(32) == pytest.approx(expected, rel=0.02)
    assert table.longest_batch(32 * 64) == pytest.approx(
        1 + (expected - 1) / 8, rel=0.02
    )
    plain = dataclasses.replace(table, profile=None)
    assert plain.longest_batch(32) == 1.0
