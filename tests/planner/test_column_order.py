"""Outputs of split tables are put in order, whoever predicts it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.builders import (
    FixedSearcher,
    bag_sharders,
    by_table,
    cost_of,
    gpus,
    make_ebc,
    make_planner,
)
from torchrec_neuroshard.testing import AnalyticCommsModel


class SlowOrder(AnalyticCommsModel):
    """A microsecond per column and sample forward, two backward."""

    def column_order(
        self, columns_C: npt.NDArray[np.float64], batch_size: int
    ) -> npt.NDArray[np.float64]:
        ms: npt.NDArray[np.float64] = columns_C[:, None] * batch_size * [1e-3, 2e-3]
        return ms


@pytest.mark.parametrize(("kind", "columns"), [("grid_shard", 48), ("row_wise", 0)])
def test_columns_of_a_grid_are_put_in_order(kind: str, columns: int) -> None:
    path_ms = []
    for comms in (AnalyticCommsModel(), SlowOrder()):
        planner = make_planner(
            topology=gpus(4, 2),
            batch_size=4,
            constraints=by_table(sharding_types=[[kind]] * 2, min_partition=[16, None]),
            comms_model=comms,
        )
        # One table in two column shards over both nodes, one in a single node.
        planner.plan(make_ebc([(100, 32), (100, 16)]), bag_sharders())
        path_ms.append(cost_of(planner))
    # Sixteen samples over all ranks.
    assert path_ms[1] - path_ms[0] == pytest.approx(columns * 16 * 3e-3, abs=1e-9)


def test_a_plan_of_split_columns_counts_their_order() -> None:
    found = []
    for comms in (AnalyticCommsModel(), SlowOrder()):
        planner = make_planner(
            batch_size=8,
            comms_model=comms,
            search=FixedSearcher([(0, 16, 0), (1, 12, 0), (1, 20, 1)]),
        )
        planner.plan(make_ebc([(100, 16), (100, 32)]), bag_sharders())
        shared = [0.0, 0.0]
        for option in planner.get_selected_options():
            for shard in option.shards:
                shared[shard.rank] += shard.perf.total
        found.append(np.array([cost_of(planner), *shared]))
    # All 48 columns, sixteen samples over all ranks.
    np.testing.assert_allclose(found[1] - found[0], 48 * 16 * 3e-3, atol=1e-9)
