"""Compute cost models beyond their contract: exact numbers and wrappers."""

import dataclasses
import functools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.builders import draw_tables
from torchrec_neuroshard.cost_models import (
    BandwidthCommsModel,
    NeuralCostModel,
    PhysicalCostModel,
)
from torchrec_neuroshard.cost_models.compute import (
    ConcurrentCostModel,
    PhysicalConstants,
)
from torchrec_neuroshard.cost_models.estimate_error import EstimateFactors
from torchrec_neuroshard.cost_models.network import NetworkArrays, SetCostNetwork
from torchrec_neuroshard.cost_models.scaled import JoinedCostModel, RelievedCommsModel
from torchrec_neuroshard.features import table_features
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
    network.physical_PO2.fill_(1e-6)
    network.launch_2.fill_(0.1)
    features = torch.from_numpy(random_features(50, 9))
    inputs = network.inputs(features)
    network.input_mean_X.copy_(inputs.mean(dim=0))
    network.input_std_X.copy_(inputs.std(dim=0).clamp_min(1e-2))
    return NeuralCostModel(network, name="random", hardware="none", ranges={})


@pytest.mark.parametrize("count", [1, 7, 900])
def test_arrays_are_the_network(count: int) -> None:
    network = random_neural().network
    arrays, features = NetworkArrays(network), random_features(count, 5)
    with torch.inference_mode():
        encoded = network.encode(torch.from_numpy(features)).numpy()
    # In float32 sums of products in another order differ by that much.
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5)
    close(arrays.encode(features), encoded)
    rng = np.random.default_rng(6)
    members = rng.random((count, count)) < rng.random((count, 1))
    sums = members.astype(np.float32) @ encoded
    with torch.inference_mode():
        predicted = network.predict(torch.from_numpy(sums))
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


def test_kernels_among_others_take_longer_each_way() -> None:
    alone = random_neural()
    comms = AnalyticCommsModel()
    assert ConcurrentCostModel.of(alone, comms) is alone
    comms.compute_slowdown = (1.5, 2.0)
    slowed = ConcurrentCostModel.of(alone, comms)
    assert ConcurrentCostModel.of(slowed, comms) is slowed  # not twice
    sums = slowed.encode(random_features(4, 1))
    np.testing.assert_allclose(
        slowed.predict_sums(sums), alone.predict_sums(sums) * [1.5, 2.0]
    )


def test_wrappers_follow_a_device_that_is_off() -> None:
    """As hedging asks of the models under a schedule."""
    factors = EstimateFactors(bandwidth=0.5, link=0.5)
    alone = PhysicalCostModel(PhysicalConstants(), name="", hardware="")
    features = random_features(4, 1)
    other = alone.under(factors)
    sums = other.encode(features)
    slower = JoinedCostModel(alone).under(factors).predict_sums(sums)
    np.testing.assert_array_equal(slower[:, 0], other.predict_sums(sums).sum(axis=1))
    links = BandwidthCommsModel(
        world_size=2, local_world_size=2, intra_gb_per_s=1.0, inter_gb_per_s=1.0
    )
    reliefs = {"index_comms": 0.0, "fwd_comms": 0.1, "bwd_comms": 0.0}
    columns = np.full((1, 2), 64.0)
    whole = links.under(factors).all_to_all(columns, 4096)
    left = RelievedCommsModel(links, reliefs).under(factors).all_to_all(columns, 4096)
    np.testing.assert_allclose(whole - left, [[[0.1, 0.0]] * 2])
