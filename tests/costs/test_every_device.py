"""What holds for the cost model of every device: shipped bundles, cards, other CPUs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.builders import make_tables, make_task
from torchrec_neuroshard import load_cost_model
from torchrec_neuroshard.bundles.find import physical_estimate, pretrained_names
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.hardware.cards import GPU_CARDS
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.tables.features import table_features
from torchrec_neuroshard.testing import AnalyticCommsModel

pytestmark = pytest.mark.filterwarnings("ignore:no cost model was measured")

DEVICES = sorted({*pretrained_names(), *GPU_CARDS})
OTHER_CPU = "another CPU"


def model_of(device: str) -> CostModel:
    if device == OTHER_CPU:
        return physical_estimate("cpu")
    kind = "cuda" if device in GPU_CARDS else "cpu"
    return load_cost_model(device, device_type=kind)


@pytest.mark.parametrize("device", [*DEVICES, OTHER_CPU])
def test_reordering_the_columns_of_a_split_takes_time(device: str) -> None:
    task = make_task(make_tables([8, 512]), world_size=2, batch_size=65_536)
    simulator = Simulator(task, model_of(device), AnalyticCommsModel())
    columns_CS = np.array([[4.0], [512.0], [100_000.0]])
    order_CS2 = simulator.order_costs(columns_CS)
    assert (order_CS2 > 0).all() and (np.diff(order_CS2, axis=0) > 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_states_an_uncertainty(device: str) -> None:
    model = model_of(device)
    tables = make_tables([8, 64, 512], [100, 10**5, 10**7], [1.0, 30.0, 200.0])
    sums = np.cumsum(model.encode(table_features(tables, 4096)), axis=0)
    assert (model.relative_uncertainty(sums) > 0.005).all()
