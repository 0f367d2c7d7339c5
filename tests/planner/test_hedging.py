"""Plans by costs that were not measured: which one holds up if these are off."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.planner import Topology

from tests.builders import (
    bag_sharders,
    by_table,
    each,
    last_result,
    make_ebc,
    make_planner,
    shards_of,
)
from torchrec_neuroshard import NeuroShardPlanner, PlacementConstraints, topology_for
from torchrec_neuroshard.cost_models import load_cost_model
from torchrec_neuroshard.cost_models.estimate_error import (
    EstimateError,
    EstimateFactors,
)
from torchrec_neuroshard.planner import PlanCosts
from torchrec_neuroshard.planner.costs.given_plans import PlanOptions
from torchrec_neuroshard.planner.costs.hedging import (
    NUM_DRAWS,
    choose_plan,
    is_uncertain,
)

pytestmark = pytest.mark.one_release

SIZES = [(200_000, 64), (50_000, 32), (1000, 128), (30_000, 16), (500, 64)]


def estimated(topology: Topology | None = None, **arguments: Any) -> NeuroShardPlanner:
    """A planner for cards that nothing was measured on."""
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
            search_only=False,
            **arguments,
        )


def test_the_least_expected_time_of_plans_that_do_no_harm_is_taken() -> None:
    draws = np.arange(100)
    theirs, slow = np.ones(100), np.full(100, 0.9)
    fast_but_risky = np.where(draws < 6, 1.03, 0.2)
    sound = np.where(draws < 5, 1.5, 0.7)
    paths = np.stack([fast_but_risky, slow, theirs, sound], axis=1)
    assert choose_plan(paths, reference=2) == 3
    # Without a reference, the least expected time counts.
    assert choose_plan(paths, None) == 0
    # 1 % more than TorchRec's is not worse.
    paths[:6, 0] = 1.01
    assert choose_plan(paths, reference=2) == 0
    # Nothing beats the reference: it is taken, however slow.
    assert choose_plan(np.stack([theirs * 1.03, theirs], axis=1), reference=1) == 1
    # A caution has to be worth 2 %.
    near = np.stack([theirs, 0.99 * theirs, 0.97 * theirs], axis=1)
    assert choose_plan(near, None, cautions_C=[0, 1, 2]) == 0
    assert choose_plan(near, None, cautions_C=[0, 1, 1]) == 2


@pytest.mark.parametrize("least", [None, 8])
def test_estimates_split_no_table_below_32_columns_unless_told(
    least: int | None,
) -> None:
    """Which saves milliseconds by the estimate alone, as no narrower one was timed."""
    planner = estimated(
        topology_for("h100", num_nodes=4, ranks_per_node=4),
        constraints=each(3, "column_wise", min_partition=least, pooling_factors=[80.0]),
    )
    plan = planner.plan(
        make_ebc([(1_000, 128), (1_000, 96), (500, 16)]), bag_sharders()
    )
    narrowest = min(width for _, width, _ in shards_of(plan)["t0"])
    assert narrowest == 32 if least is None else 8 <= narrowest < 32
    cautioned = [w for w in last_result(planner).warnings if "estimate is unch" in w]
    assert len(cautioned) == (narrowest < 32)


def test_a_rank_much_fuller_than_the_others_is_pointed_out() -> None:
    rules = PlacementConstraints(pin={"t0": [1]})
    planner = estimated(
        topology_for("h100", num_nodes=2, ranks_per_node=2, memory_gb=4),
        placement_constraints=rules,
        constraints=each(1, "table_wise"),
    )
    planner.plan(make_ebc([(10_000_000, 64), (1_000, 64)]), bag_sharders())
    [found] = [w for w in last_result(planner).warnings if "times the mean" in w]
    assert found.startswith("rank 1 holds 2.") and "4.0 times the mean" in found


def test_paths_without_an_error_are_those_predicted() -> None:
    kinds = [None, ["row_wise"], ["table_row_wise"], ["data_parallel"]]
    constraints = by_table(
        sharding_types=kinds, compute_kernels=[["fused_uvm"], None, None, None]
    )
    planner = estimated(constraints=constraints, consider_stock=False)
    ebc, sharders = make_ebc(SIZES), bag_sharders()
    plan = planner.plan(ebc, sharders)
    costs = planner.costs
    options = PlanOptions(ebc, sharders, planner.enumerator, costs).of(plan)
    exactly = EstimateFactors()
    same = costs.cost_model.under(exactly), costs.comms_model.under(exactly)
    slower = EstimateFactors(bandwidth=0.5, launch=2.0, link=0.5)
    other = costs.cost_model.under(slower), costs.comms_model.under(slower)
    predicted = costs.evaluate(costs.lower(options)).critical_path_ms
    paths = costs.paths_under([options, options], [same, other, same])
    assert paths.shape == (3, 2)
    np.testing.assert_allclose(paths[[0, 2]], predicted, rtol=1e-9)
    assert (paths[1] > 1.5 * predicted).all()
    # Every encoding is the other model's: as if it had been the planner's.
    foreign = PlanCosts(costs.topology, constraints, cost_model=other[0])
    foreign.comms_model = other[1]
    expected = foreign.evaluate(foreign.lower(options)).critical_path_ms
    np.testing.assert_allclose(paths[1], expected, rtol=1e-6)


def test_plans_by_an_estimate_say_how_they_hold_up() -> None:
    planner = estimated()
    assert is_uncertain(planner.costs)
    plan = planner.plan(make_ebc(SIZES), bag_sharders())
    report, result = planner.report(), last_result(planner)
    assert report.robustness is not None
    found = report.robustness
    assert found.num_draws == NUM_DRAWS and found.num_plans >= 2
    assert (found.mean_ratio or 2.0) <= (found.worst_ratio or 1.0)
    assert result.predicted.uncertainty == pytest.approx(found.std_ms / found.mean_ms)
    assert str(found) in str(report)
    assert report.to_json()["robustness"]["num_draws"] == NUM_DRAWS
    assert str(estimated().plan(make_ebc(SIZES), bag_sharders())) == str(plan)


def test_a_plan_that_may_lose_gives_way_to_torchrecs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def paths(self: PlanCosts, plans: Any, truths: Any, *_: Any) -> Any:
        """All plans but the last, TorchRec's, are slow in a tenth of the draws."""
        found = np.full((len(truths), len(plans)), 0.5)
        found[: len(truths) // 10] = 1.2
        found[:, -1] = 1.0
        return found

    monkeypatch.setattr(PlanCosts, "paths_under", paths)
    planner = estimated()
    planner.plan(make_ebc(SIZES), bag_sharders())
    fallback = last_result(planner).fallback or ""
    assert "too often slower where the estimate is off" in fallback
