"""TorchRec's estimator with coefficients that come nearest to a cost model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)

from tests.builders import bag_config, bags, stock_planner
from torchrec_neuroshard.features import FEATURE_NAMES
from torchrec_neuroshard.planner import hardware_perf_config
from torchrec_neuroshard.planner.costs.hardware_config import HardwareConfigFit
from torchrec_neuroshard.testing import AnalyticCostModel

BATCH_SIZE = 256
TOPOLOGY = Topology(2, "cpu")


class Linear(AnalyticCostModel):
    """What TorchRec's form can say: time is bytes that the kernel writes."""

    def encode(self, features_NF: Any) -> Any:
        output = features_NF[:, [FEATURE_NAMES.index("output_bytes")]]
        return np.asarray(output, dtype=np.float64)

    @property
    def encoding_dim(self) -> int:
        return 1

    def predict_sums(self, sums_SE: Any) -> Any:
        return sums_SE * np.array([[2e-6, 6e-6]])


@pytest.fixture(scope="module")
def shipped() -> HardwareConfigFit:
    """Of a bundle that was measured."""
    return hardware_perf_config(TOPOLOGY, "cpu_epyc_zen5", batch_size=BATCH_SIZE)


def perfs(estimator: Any) -> dict[tuple[str, str], Any]:
    """Table and sharding type -> what an estimator says of its first shard."""
    model = bags(*(bag_config(i, 3000 * (i + 1), 16 * (i + 1)) for i in range(3)))
    found = EmbeddingEnumerator(TOPOLOGY, BATCH_SIZE, estimator=[estimator]).enumerate(
        model, [EmbeddingBagCollectionSharder()]
    )
    return {(o.name, o.sharding_type): o.shards[0].perf for o in found}


def test_a_cost_of_that_form_is_found() -> None:
    found = hardware_perf_config(TOPOLOGY, Linear(), batch_size=BATCH_SIZE)
    # But for what keeps the others from being anything.
    assert max(found.backward_error) < 0.1
    bandwidth = float(TOPOLOGY.ddr_mem_bw)
    assert found.backward[2] == pytest.approx(6e-6 * bandwidth, rel=0.1)
    # Narrow rows pay TorchRec's penalty in the forward pass, of others none.
    assert found.forward_error[0] > 2 * found.backward_error[0]
    assert found.forward_of_rows[2] == pytest.approx(2e-6 * bandwidth, rel=0.2)


def test_the_error_stated_is_that_of_other_tables(shipped: HardwareConfigFit) -> None:
    for median, most in (shipped.forward_error, shipped.backward_error):
        assert 0.0 < median < most
    other = hardware_perf_config(
        TOPOLOGY, "cpu_epyc_zen5", batch_size=BATCH_SIZE, seed=1
    )
    assert other.forward_error[0] == pytest.approx(shipped.forward_error[0], abs=0.1)
    assert other.backward_error[0] == pytest.approx(shipped.backward_error[0], abs=0.1)


def test_what_is_printed_is_the_configuration(shipped: HardwareConfigFit) -> None:
    text = str(shipped)
    assert "cost model 'cpu_epyc_zen5'" in text
    assert f"{shipped.forward_error[0]:.0%} (90 % of the sets within" in text
    registry = EmbeddingPerfEstimatorFactory._registry
    before = dict(registry)
    try:
        exec(text, {})
        printed = EmbeddingPerfEstimatorFactory.create("neuroshard", topology=TOPOLOGY)
    finally:
        registry.clear()
        registry.update(before)
    given = EmbeddingPerfEstimatorFactory.create_with_config(
        shipped.config, topology=TOPOLOGY
    )
    default = EmbeddingPerfEstimator(TOPOLOGY)
    own, same, other = perfs(given), perfs(printed), perfs(default)
    assert own.keys() == same.keys() == other.keys()
    for key, perf in own.items():
        assert perf.fwd_compute == pytest.approx(same[key].fwd_compute, rel=1e-3)
        assert perf.bwd_compute == pytest.approx(same[key].bwd_compute, rel=1e-3)
        assert perf.fwd_compute != pytest.approx(other[key].fwd_compute, rel=0.05)


def test_stock_planner_plans_with_it(shipped: HardwareConfigFit) -> None:
    estimator = EmbeddingPerfEstimatorFactory.create_with_config(
        shipped.config, topology=TOPOLOGY
    )
    enumerator = EmbeddingEnumerator(
        TOPOLOGY,
        BATCH_SIZE,
        estimator=[estimator, EmbeddingStorageEstimator(TOPOLOGY)],
    )
    planner = stock_planner(TOPOLOGY, enumerator=enumerator)
    plan = planner.plan(bags(), [EmbeddingBagCollectionSharder()])
    assert set(plan.plan[""]) == {"t0", "t1", "t2"}
