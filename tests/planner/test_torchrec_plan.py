"""What TorchRec's own planner plans, ours plans as well, and no worse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner import utils as torchrec_utils
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CacheParams, ShardingPlan

from tests.builders import (
    Chosen,
    bag_sharders,
    cost_of,
    make_ebc,
    make_planner,
    stock_planner,
    types_of,
)
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.options.spread_options import SpreadOption
from torchrec_neuroshard.planner.parts import proposers, torchrec_plan
from torchrec_neuroshard.planner.parts.shard_estimators import (
    OutOfTimeError,
    SizesEstimator,
)
from torchrec_neuroshard.planner.parts.torchrec_plan import StockPlan, stock_plan

pytestmark = pytest.mark.usefixtures("patience")

MOST_DRAWS = 100_000


def stock_cost(
    planner: NeuroShardPlanner, topology: Topology, module: Any, **arguments: Any
) -> float:
    """What TorchRec's plan costs by our planner's estimates."""
    chosen = Chosen()
    own = stock_planner(topology, callbacks=[chosen], **arguments)
    own.plan(module, bag_sharders())
    return planner.costs.evaluate(planner.costs.lower(chosen.options)).critical_path_ms


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """End TorchRec's search for a cache size where it would draw for ever."""
    search = torchrec_utils.LuusJaakolaSearch
    original, draws = search.uniform, [0]

    def uniform(self: Any, *arguments: Any) -> float:
        draws[0] += 1
        assert draws[0] < MOST_DRAWS, "the search for a cache size does not end"
        return float(original(self, *arguments))

    monkeypatch.setattr(search, "uniform", uniform)


@pytest.mark.usefixtures("few_draws")
def test_torchrecs_scaling_of_caches_ends() -> None:
    """Without statistics there is nothing to scale, and its budget is zero."""
    constraints = {
        f"t{i}": ParameterConstraints(
            sharding_types=["row_wise"],
            compute_kernels=["fused_uvm_caching"],
            cache_params=CacheParams(load_factor=0.1),
        )
        for i in range(2)
    }
    constraints["t2"] = ParameterConstraints(
        sharding_types=["row_wise"], compute_kernels=["fused"]
    )
    arguments = {
        "constraints": constraints,
        "proposer": EmbeddingOffloadScaleupProposer(),
    }
    ebc = make_ebc([(100_000, 64)] * 3)
    topology = Topology(2, "cuda")
    plan = stock_planner(topology, **arguments).plan(ebc, bag_sharders())
    arguments["proposer"] = EmbeddingOffloadScaleupProposer()
    planner = make_planner(topology=topology, consider_stock=True, **arguments)
    for _ in range(2):
        found = planner.plan(ebc, bag_sharders())
        assert types_of(found) == types_of(plan)
        kernels, stock_kernels = (
            {n: e.compute_kernel for n, e in p.plan[""].items()} for p in (found, plan)
        )
        assert kernels == stock_kernels


def test_widths_that_no_fused_kernel_takes_are_no_candidate() -> None:
    ebc = make_ebc([(1000, 30)])
    searched = make_planner(2)
    searched.plan(ebc, bag_sharders())
    planner = make_planner(2, consider_stock=True)
    (entry,) = planner.plan(ebc, bag_sharders()).plan[""].values()
    # Of FBGEMM's kernels on CPUs, that of replicas alone takes any width.
    assert entry.compute_kernel == "dense"
    assert cost_of(planner) == pytest.approx(cost_of(searched))


@pytest.mark.parametrize(
    "case",
    [
        {
            "sizes": [(1, 4), (1, 4), (1, 8)],
            "world": (8, "cpu"),
            "constraints": {
                "t1": ParameterConstraints(sharding_types=["table_wise"]),
                "t2": ParameterConstraints(pooling_factors=[15.0]),
            },
        },
        {
            "sizes": [(4593, 4096)],
            "world": (2, "cuda"),
            "topology_arguments": {"hbm_cap": 31_029_555},
        },
        {
            "sizes": [(100_000, 64)] * 3,
            "world": (8, "cuda"),
            "topology_arguments": {"local_world_size": 4, "hbm_cap": 8_000_000},
        },
    ],
)
def test_no_worse_than_torchrecs_plan(case: dict[str, Any]) -> None:
    arguments = {k: v for k, v in case.items() if k not in ("sizes", "world")}
    topology = Topology(*case["world"], **arguments.pop("topology_arguments", {}))
    planner = make_planner(topology=topology, consider_stock=True, **arguments)
    ebc = make_ebc(case["sizes"])
    planner.plan(ebc, bag_sharders())
    constraints = arguments.get("constraints")
    theirs = stock_cost(planner, topology, ebc, constraints=constraints)
    assert cost_of(planner) <= theirs * (1 + 1e-9)


def test_shards_of_one_size_are_estimated_as_each_would_be() -> None:
    topology = Topology(4, "cuda", local_world_size=2)
    ebc = make_ebc([(1001, 256), (500, 128), (3, 64)])
    found, wanted = (
        EmbeddingEnumerator(topology, 64, estimator=[estimator]).enumerate(
            ebc, bag_sharders()
        )
        for estimator in (
            SizesEstimator(topology),
            EmbeddingPerfEstimator(topology=topology),
        )
    )
    assert max(o.num_shards for o in found) == 4
    theirs = {(o.fqn, o.sharding_type, o.compute_kernel): o.shards for o in wanted}
    for option in found:
        key = option.fqn, option.sharding_type, option.compute_kernel
        assert [(s.size, s.offset, s.perf) for s in option.shards] == [
            (s.size, s.offset, s.perf) for s in theirs[key]
        ]


def stock(seconds: float, *, like: ShardingPlan | None = None) -> StockPlan:
    """TorchRec's plan of three tables, within some seconds."""
    found = stock_plan(
        make_ebc([(10_000, 64), (300, 64), (2_000_000, 128)]),
        bag_sharders(),
        topology=Topology(2, "cuda"),
        batch_size=64,
        constraints=FEW_TYPES,
        seconds=seconds,
    )
    assert like is None or str(found.plan) == str(like)
    return found


FEW_TYPES = {
    f"t{i}": ParameterConstraints(sharding_types=["table_wise", "row_wise"])
    for i in range(2)
}


class Clock:
    """Stands still but for calls that take a second each."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def during(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self.now += 1.0
            return method(*arguments, **named)

        return timed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the planner to compare with."""
    found = Clock()
    monkeypatch.setattr(torchrec_plan, "time", found)
    return found


def test_the_plan_to_compare_with_is_torchrecs_where_time_suffices() -> None:
    ebc = make_ebc([(10_000, 64), (300, 64), (2_000_000, 128)])
    topology = Topology(2, "cuda")
    planner = stock_planner(topology, constraints=FEW_TYPES, batch_size=64)
    found = stock(math.inf, like=planner.plan(ebc, bag_sharders()))
    assert not found.is_cut
    assert found.num_proposals > 100


def test_torchrecs_planner_stops_within_its_estimates(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = clock.during(SizesEstimator.estimate)
    monkeypatch.setattr(SizesEstimator, "estimate", estimate)
    with pytest.raises(OutOfTimeError, match="it had estimated 2 of 3 tables"):
        stock(1.5)


def test_torchrecs_planner_stops_within_its_proposals(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = clock.during(GreedyPerfPartitioner.partition)
    monkeypatch.setattr(GreedyPerfPartitioner, "partition", partition)
    cut = stock(4.5)
    assert cut.is_cut
    assert cut.num_proposals == 4
    # The first plan is waited for, and the first of each proposer for a second.
    assert stock(0.5).num_proposals == 1
    assert stock(2.5).num_proposals == 3


def test_shards_too_many_to_list_are_not_listed_to_say_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither for TorchRec's message nor by its own planner, the last resort."""
    asked: list[Any] = []
    monkeypatch.setattr(proposers, "MOST_LISTED_SHARDS", 10)
    monkeypatch.setattr(torchrec_plan, "LEAST_SHARD_SECONDS", 1e3)
    monkeypatch.setattr(
        torchrec_plan, "EmbeddingShardingPlanner", lambda **given: asked.append(given)
    )
    planner = make_planner(
        topology=Topology(world_size=8, compute_device="cuda", hbm_cap=2**20),
        search_only=False,
        constraints={
            f"t{i}": ParameterConstraints(compute_kernels=["fused"]) for i in range(4)
        },
    )
    ebc = make_ebc([(100_000 + i, 64) for i in range(4)])
    with pytest.raises(PlannerError, match=r"the freest rank, 0, has 1\.00 MiB"):
        planner.plan(ebc, bag_sharders())
    listed = planner.enumerator.last_stored_search_space
    assert listed is not None
    assert not any(isinstance(o, SpreadOption) and o.is_listed for o in listed)
    assert not asked
