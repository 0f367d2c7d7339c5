"""The bandwidth model of collectives, by hand."""

import numpy as np
import pytest

from torchrec_neuroshard.cost_models import BandwidthCommsModel
from torchrec_neuroshard.errors import ConfigError


def model(world: int = 4, local: int = 4) -> BandwidthCommsModel:
    return BandwidthCommsModel(
        world_size=world,
        local_world_size=local,
        intra_gb_per_s=100.0,
        inter_gb_per_s=10.0,
    )


def test_balanced_ranks_send_three_quarters_of_their_bytes() -> None:
    ms = model().all_to_all(np.full((1, 4), 64.0), 1000)
    expected = 64 * 1000 * 4 * 0.75 / 100e6
    np.testing.assert_allclose(ms, expected)


def test_a_rank_that_holds_nothing_still_receives() -> None:
    ms = model().all_to_all(np.array([[128.0, 0.0, 0.0, 0.0]]), 1000)
    remote = 1000 * 4 * 0.75 / 100e6
    np.testing.assert_allclose(ms[0, :, 0], [128 * remote] + [32 * remote] * 3)


def test_bytes_between_nodes_take_the_slow_link() -> None:
    ms = model(world=8, local=4).all_to_all(np.full((1, 8), 64.0), 1000)
    sent = 64 * 1000 * 4
    expected = sent * (3 / 8) / 100e6 + sent * (4 / 8) / 10e6
    np.testing.assert_allclose(ms, expected)


def test_one_rank_sends_nothing() -> None:
    one = BandwidthCommsModel(
        world_size=1,
        local_world_size=1,
        intra_gb_per_s=1,
        inter_gb_per_s=1,
        latency_us=5,
    )
    assert (one.all_to_all(np.full((1, 1), 64.0), 1000) == 0).all()


def test_candidates_are_independent() -> None:
    columns = np.random.default_rng(0).uniform(0, 100, (6, 4))
    together = model().all_to_all(columns, 512)
    for i in range(6):
        np.testing.assert_allclose(
            model().all_to_all(columns[i : i + 1], 512)[0], together[i]
        )


def test_ranks_must_fill_nodes_and_bandwidths_be_given() -> None:
    with pytest.raises(ConfigError, match=r"world_size \(6\) must be a multiple"):
        model(world=6, local=4)
    with pytest.raises(ConfigError, match="bandwidths must be above 0"):
        BandwidthCommsModel(
            world_size=2, local_world_size=2, intra_gb_per_s=0, inter_gb_per_s=1
        )
