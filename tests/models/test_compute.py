"""Cost models of kernels beyond their contract: exact numbers and wrappers."""

import dataclasses
import functools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.builders import draw_tables
from torchrec_neuroshard.models.adjusted import ConcurrentCostModel
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.models.network import (
    NetworkArrays,
    SetCostNetwork,
    set_inputs,
    shard_inputs,
)
from torchrec_neuroshard.models.physical import (
    SET_VALUES,
    SET_WORKS,
    WORKS,
    Physics,
    set_works,
)
from torchrec_neuroshard.tables.features import table_features
from torchrec_neuroshard.testing import AnalyticCommsModel


def random_features(num_tables: int, seed: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    tables = draw_tables(rng, num_tables, range(4, 260, 4))
    return table_features(
        [dataclasses.replace(t, weighted=rng.random() < 0.3) for t in tables], 2048
    )


def random_neural(seed: int = 0) -> NeuralCostModel:
    torch.manual_seed(seed)
    network = SetCostNetwork(num_members=3, hidden=16, latent=4, head_hidden=8)
    sets = np.full((len(SET_WORKS), 2), 1e-6)
    sets[0] = 0.1
    network.physics = Physics(2.0**20, np.full((len(WORKS), 2), 1e-6), sets)
    inputs = torch.from_numpy(shard_inputs(random_features(50, 9), network.physics)[0])
    network.input_mean_X.copy_(inputs.mean(dim=0))
    network.input_std_X.copy_(inputs.std(dim=0).clamp_min(1e-2))
    return NeuralCostModel(network, name="random", hardware="none", ranges={})


@pytest.mark.parametrize("count", [1, 7, 900])
def test_arrays_predict_like_the_network(count: int) -> None:
    network = random_neural().network
    arrays, features = NetworkArrays(network), random_features(count, 5)
    with torch.inference_mode():
        inputs = map(torch.from_numpy, shard_inputs(features, network.physics))
        encoded = network.encode(*inputs).numpy()
    # Float32 sums in another order differ by this much.
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5)
    close(arrays.encode(features), encoded)
    rng = np.random.default_rng(6)
    members = rng.random((count, count)) < rng.random((count, 1))
    sums = members.astype(np.float32) @ encoded
    with torch.inference_mode():
        values = sums[:, : len(SET_VALUES)]
        works = set_works(values, network.physics.least_threads)
        sets = torch.from_numpy(network.physics.sets_ms(works)).float()
        known = torch.from_numpy(set_inputs(works, values))
        predicted = network.predict(torch.from_numpy(sums), sets, known)
    close(arrays.predict(sums), predicted.numpy())
    assert arrays.encode(features[:0]).shape == (0, encoded.shape[1])
    assert arrays.predict(sums[:0]).shape == (0, 3, 2)


def test_uncertainty_is_the_spread_of_the_members() -> None:
    model, features = random_neural(), random_features(10, 4)
    assert (model.relative_uncertainty(model.encode(features)) > 0).all()
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    same = NeuralCostModel(model.network, name="same", hardware="none", ranges={})
    spread = same.relative_uncertainty(same.encode(features))
    np.testing.assert_allclose(spread, 0, atol=1e-5)


def test_reordering_is_interpolated_between_measured_sizes() -> None:
    known = {"2000": (2.0, 3.0), "1000": (1.5, 2.0)}
    network = random_neural().network
    model = NeuralCostModel(
        network, name="m", hardware="none", ranges={}, column_order_ms=known
    )
    sizes = np.array([100.0, 1000.0, 1500.0, 4000.0])
    expected = np.array([[0.15, 0.2], [1.5, 2.0], [1.75, 2.5], [4.0, 6.0]])
    assert model.column_order(sizes) == pytest.approx(expected)
    # The largest reads and writes 2000 bytes in 2.5 ms on average.
    assert model.stream_byte_ms == pytest.approx(2.5 / 2000 / 2)
    disturbed = NeuralCostModel(
        network,
        name="m",
        hardware="none",
        ranges={},
        column_order_ms={**known, "4000": (9.0, 9.0)},
    )
    assert disturbed.stream_byte_ms == model.stream_byte_ms
    comms = AnalyticCommsModel()
    comms.compute_slowdown = (1.5, 2.0)
    slowed = ConcurrentCostModel.of(model, comms).column_order(sizes)
    assert slowed == pytest.approx(expected * [1.5, 2.0])


def test_concurrent_kernels_take_longer_both_ways() -> None:
    alone = random_neural()
    comms = AnalyticCommsModel()
    assert ConcurrentCostModel.of(alone, comms) is alone
    comms.compute_slowdown = (1.5, 2.0)
    slowed = ConcurrentCostModel.of(alone, comms)
    assert ConcurrentCostModel.of(slowed, comms) is slowed  # must not count twice
    sums = slowed.encode(random_features(4, 1))
    np.testing.assert_allclose(
        slowed.predict_sums(sums), alone.predict_sums(sums) * [1.5, 2.0]
    )
