"""Outputs of split tables are put in order, whoever predicts it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from torchrec.distributed.planner import ParameterConstraints

from tests.builders import (
    Chosen,
    FixedSearcher,
    bag_sharders,
    cost_of,
    gpus,
    make_ebc,
    make_planner,
)
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel


class SlowOrder(AnalyticCommsModel):
    """A microsecond per column and sample forward, two backward."""

    def column_order(
        self, columns_C: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        ms: npt.NDArray[np.float64] = columns_C[:, None] * batch_size * [1e-3, 2e-3]
        return ms


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("grid_shard", 48), ("table_row_wise", 0), ("row_wise", 0)],
)
def test_columns_of_a_grid_are_put_in_order(kind: str, columns: int) -> None:
    path_ms = []
    for comms in (AnalyticCommsModel(), SlowOrder()):
        planner = make_planner(
            topology=gpus(4, 2),
            batch_size=4,
            constraints={
                f"t{i}": ParameterConstraints(
                    sharding_types=[kind], min_partition=least
                )
                for i, least in enumerate((16, None))
            },
            comms_model=comms,
        )
        # One table in two column shards over both nodes, one in a single node.
        planner.plan(make_ebc([(100, 32), (100, 16)]), bag_sharders())
        path_ms.append(cost_of(planner))
    # Sixteen samples over all ranks.
    assert path_ms[1] - path_ms[0] == pytest.approx(columns * 16 * 3e-3, abs=1e-9)


@pytest.mark.parametrize(
    ("triples", "columns"),
    [([(0, 16, 0), (1, 32, 1)], 0), ([(0, 16, 0), (1, 12, 0), (1, 20, 1)], 48)],
    ids=["whole", "split"],
)
def test_simulator_and_plan_agree(
    triples: list[tuple[int, int, int]], columns: int
) -> None:
    costs = {}
    for name, comms in (("free", AnalyticCommsModel()), ("slow", SlowOrder())):
        chosen = Chosen()
        planner = make_planner(
            batch_size=8,
            comms_model=comms,
            search=FixedSearcher(triples),
            callbacks=[chosen],
        )
        planner.plan(make_ebc([(100, 16), (100, 32)]), bag_sharders())
        assert planner.last_result is not None and planner.last_task is not None
        simulated = Simulator(planner.last_task, AnalyticCostModel(), comms).evaluate(
            planner.last_result.placement
        )
        predicted = planner.last_result.predicted
        assert predicted.critical_path_ms == pytest.approx(simulated.critical_path_ms)
        shared = [0.0, 0.0]
        for option in chosen.options:
            for shard in option.shards:
                assert shard.rank is not None and shard.perf is not None
                shared[shard.rank] += shard.perf.total
        costs[name] = predicted.critical_path_ms, *shared
    extra = np.array(costs["slow"]) - np.array(costs["free"])
    # Sixteen samples over all ranks.
    np.testing.assert_allclose(extra, columns * 16 * 3e-3, atol=1e-9)
