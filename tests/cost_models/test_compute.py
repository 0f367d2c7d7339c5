"""Identities every compute cost model keeps, and exact numbers of the simple ones."""

import functools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchrec_neuroshard.cost_models import (
    CostModel,
    NeuralCostModel,
    PhysicalCostModel,
    StockCostModel,
)
from torchrec_neuroshard.cost_models.compute import (
    ConcurrentCostModel,
    PhysicalConstants,
)
from torchrec_neuroshard.cost_models.network import NetworkArrays, SetCostNetwork
from torchrec_neuroshard.errors import ConfigError, FeatureSchemaError
from torchrec_neuroshard.features import FEATURE_NAMES, table_features
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel


def random_features(num_tables: int, seed: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    tables = [
        TableConfig(
            name=str(i),
            num_embeddings=int(rng.integers(10, 10**6)),
            embedding_dim=4 * int(rng.integers(1, 65)),
            pooling_factor=float(rng.uniform(0.1, 50)),
            weighted=bool(rng.random() < 0.3),
        )
        for i in range(num_tables)
    ]
    return table_features(tables, 2048)


def random_neural(seed: int = 0) -> NeuralCostModel:
    torch.manual_seed(seed)
    network = SetCostNetwork(num_members=3, hidden=16, latent=4, head_hidden=8)
    network.physical_PO2.fill_(1e-6)
    network.launch_2.fill_(0.1)
    features = torch.from_numpy(random_features(50, 9))
    inputs = network.inputs(features)
    network.input_mean_X.copy_(inputs.mean(dim=0))
    network.input_std_X.copy_(inputs.std(dim=0).clamp_min(1e-2))
    ranges = {
        name: (float(column.min()), float(column.max()))
        for name, column in zip(FEATURE_NAMES, features.numpy().T, strict=True)
    }
    return NeuralCostModel(network, name="random", hardware="none", ranges=ranges)


def models() -> list[CostModel]:
    constants = PhysicalConstants(memory_gb_per_s=2000)
    return [
        random_neural(),
        PhysicalCostModel(constants, name="physical", hardware="none"),
        StockCostModel(),
        AnalyticCostModel(),
    ]


@pytest.mark.parametrize("model", models(), ids=lambda m: type(m).__name__)
def test_order_of_tables_does_not_matter(model: CostModel) -> None:
    features = random_features(12, 0)
    one_set = np.zeros(12, dtype=np.int64)
    forward = model.predict_sets(features, one_set, 1)
    backward = model.predict_sets(features[::-1].copy(), one_set, 1)
    np.testing.assert_allclose(forward, backward, rtol=1e-5)


@pytest.mark.parametrize("model", models(), ids=lambda m: type(m).__name__)
def test_removing_a_shard_is_subtracting_its_encoding(model: CostModel) -> None:
    features = random_features(8, 1)
    encoded = model.encode(features)
    removed = encoded.sum(axis=0, keepdims=True) - encoded[3]
    kept = np.delete(np.arange(8), 3)
    alone = model.predict_sets(features[kept], np.zeros(7, dtype=np.int64), 1)
    np.testing.assert_allclose(model.predict_sums(removed), alone, rtol=1e-4)


@pytest.mark.parametrize("model", models(), ids=lambda m: type(m).__name__)
def test_empty_set_costs_nothing_and_others_something(model: CostModel) -> None:
    costs = model.predict_sets(random_features(5, 2), np.full(5, 1), 3)
    assert (costs[[0, 2]] == 0).all()
    assert (costs[1] > 0).all()


@pytest.mark.parametrize("model", models(), ids=lambda m: type(m).__name__)
def test_wrong_number_of_columns_is_refused(model: CostModel) -> None:
    with pytest.raises(FeatureSchemaError, match="feature columns"):
        model.encode(np.zeros((2, 5), dtype=np.float32))


def test_sets_are_independent_of_the_batch_they_are_scored_in() -> None:
    model = random_neural()
    sums = model.encode(random_features(30, 3))
    together = model.predict_sums(sums)
    alone = np.concatenate([model.predict_sums(sums[i : i + 1]) for i in range(30)])
    np.testing.assert_allclose(together, alone, rtol=1e-5)


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
    shape = (3, 2)
    assert arrays.encode(features[:0]).shape == (0, encoded.shape[1])
    assert arrays.predict(sums[:0]).shape == (0, *shape)


def test_uncertainty_is_the_spread_of_the_members() -> None:
    model = random_neural()
    sums = model.encode(random_features(10, 4))
    assert (model.relative_uncertainty(sums) > 0).all()
    same = random_neural()
    with torch.no_grad():
        for parameter in same.network.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    same = NeuralCostModel(same.network, name="same", hardware="none", ranges={})
    spread = same.relative_uncertainty(same.encode(random_features(10, 4)))
    np.testing.assert_allclose(spread, 0, atol=1e-5)


def test_out_of_range_features_are_named() -> None:
    model = random_neural()
    inside = random_features(50, 9)
    assert not model.range_warnings(inside)
    huge = table_features(
        [TableConfig(name="h", num_embeddings=10**9, embedding_dim=1024)], 2048
    )
    named = {w.feature for w in model.range_warnings(huge)}
    assert {"log2_rows", "log2_width", "weight_bytes"} <= named


@pytest.mark.parametrize(("width", "penalty"), [(32, 1.75), (64, 1.15), (128, 1.0)])
def test_stock_formula(width: int, penalty: float) -> None:
    table = TableConfig(
        name="t", num_embeddings=1000, embedding_dim=width, pooling_factor=3.0
    )
    model = StockCostModel(memory_gb_per_s=897.0)
    costs = model.predict_sets(
        table_features([table], 100), np.zeros(1, dtype=np.int64), 1
    )
    lookups = 300
    moved = 8 * lookups + lookups * width * 4 + 100 * width * 4
    expected = moved * penalty / (897.0 * 1e6)
    np.testing.assert_allclose(costs[0], [expected, 2 * expected], rtol=1e-5)


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
    assert slowed.encoding_dim == alone.encoding_dim
    np.testing.assert_array_equal(
        slowed.relative_uncertainty(sums), alone.relative_uncertainty(sums)
    )


def test_bandwidth_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="memory_gb_per_s must be above 0, got 0"):
        PhysicalConstants(memory_gb_per_s=0)
