"""Plans with estimated costs, and the notes on them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torchrec.distributed.planner import Topology

from tests.builders import (
    bag_sharders,
    each,
    last_result,
    make_ebc,
    make_planner,
    shards_of,
)
from torchrec_neuroshard import NeuroShardPlanner, topology_for
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.models.estimate_error import EstimateError
from torchrec_neuroshard.report import html_report

pytestmark = pytest.mark.one_release


def estimated(topology: Topology | None = None, **arguments: Any) -> NeuroShardPlanner:
    """Return a planner for cards without measurements."""
    topology = topology or topology_for("h100", num_nodes=2, ranks_per_node=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the result holds them, too
        model = load_cost_model("h100", device_type="cuda")
        model.error = EstimateError(card="h100")
        return make_planner(
            topology=topology,
            batch_size=256,
            cost_model=model,
            comms_model=None,
            **arguments,
        )


@pytest.mark.parametrize("least", [None, 8])
def test_estimates_split_no_table_below_32_columns_unless_told(
    least: int | None,
) -> None:
    """Narrower splits save time only by the estimate, since none was measured."""
    planner = estimated(
        topology_for("h100", num_nodes=4, ranks_per_node=4),
        constraints=each(3, "column_wise", min_partition=least, pooling_factors=[80.0]),
    )
    plan = planner.plan(
        make_ebc([(1_000, 128), (1_000, 96), (500, 16)]), bag_sharders()
    )
    narrowest = min(width for _, width, _ in shards_of(plan)["t0"])
    assert narrowest == 32 if least is None else 8 <= narrowest < 32
    cautioned = [n for n in last_result(planner).notes if n.code == "unusual"]
    assert len(cautioned) == (narrowest < 32)


def test_the_plan_shows_the_error_of_an_estimate() -> None:
    planner = estimated()
    planner.plan(make_ebc([(200_000, 64), (50_000, 32), (500, 64)]), bag_sharders())
    report = planner.report()
    assert 0.1 < report.uncertainty == last_result(planner).predicted.uncertainty < 0.2
    stated = f"standard deviation of {report.uncertainty:.1%}"
    for text in (report.text(verbose=True), html_report(report)):
        assert stated in text and "nets" not in text


def test_the_plan_shows_the_expected_iteration() -> None:
    planner = estimated(
        topology_for("h100", num_nodes=1, ranks_per_node=4),
        constraints=each(4, "table_wise"),
    )
    tables = [(50_000, 64), (60_000, 60), (70_000, 56), (80_000, 52)]
    planner.plan(make_ebc(tables), bag_sharders())
    report, predicted = planner.report(), last_result(planner).predicted
    assert report.iteration_ms == pytest.approx(predicted.expected_ms)
    assert report.critical_path_ms == predicted.critical_path_ms
    assert 1.005 < report.iteration_ms / report.critical_path_ms < 1.1
    assert str(report).startswith(f"iteration {predicted.expected_ms:.3f} ms: ")
