"""What TorchRec's own planner plans, ours plans as well, and no worse."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import PlannerError

from tests.builders import (
    bag_sharders,
    cost_of,
    entry_of,
    make_ebc,
    make_planner,
    stock_planner,
)
from torchrec_neuroshard.planner.options.spread_options import SpreadOption
from torchrec_neuroshard.planner.parts import proposers, torchrec_plan
from torchrec_neuroshard.planner.parts.shard_estimators import (
    OutOfTimeError,
    SizesEstimator,
)
from torchrec_neuroshard.planner.parts.torchrec_plan import StockPlan, stock_plan

pytestmark = pytest.mark.usefixtures("patience")


def test_widths_that_no_fused_kernel_takes_are_no_candidate() -> None:
    planner = make_planner(2, consider_stock=True)
    plan = planner.plan(make_ebc([(1000, 30)]), bag_sharders())
    # Of FBGEMM's kernels on CPUs, that of replicas alone takes any width.
    assert entry_of(plan).compute_kernel == "dense"
    assert planner.last_result is not None and planner.last_result.fallback is None


@pytest.mark.parametrize(
    ("sizes", "topology", "constraints"),
    [
        ([(4593, 4096)], Topology(2, "cuda", hbm_cap=31_029_555), {}),
        pytest.param(
            [(100_000, 64)] * 3,
            Topology(8, "cuda", local_world_size=4, hbm_cap=8_000_000),
            {},
            marks=pytest.mark.nightly,
        ),
        (
            [(1, 4), (1, 4), (1, 8)],
            Topology(8, "cpu"),
            {
                "t1": ParameterConstraints(sharding_types=["table_wise"]),
                "t2": ParameterConstraints(pooling_factors=[15.0]),
            },
        ),
    ],
)
def test_no_worse_than_torchrecs_plan(
    sizes: list[tuple[int, int]],
    topology: Topology,
    constraints: dict[str, ParameterConstraints],
) -> None:
    settings: Any = {"topology": topology, "constraints": constraints}
    planner, ebc = make_planner(**settings, consider_stock=True), make_ebc(sizes)
    planner.plan(ebc, bag_sharders())
    theirs = stock_planner(**settings).plan(ebc, bag_sharders())
    cost = planner.evaluate(theirs, ebc, bag_sharders()).critical_path_ms
    assert cost_of(planner) <= cost * (1 + 1e-9)


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


FEW_TYPES = {
    f"t{i}": ParameterConstraints(sharding_types=["table_wise", "row_wise"])
    for i in range(2)
}
STOCK: dict[str, Any] = {
    "topology": Topology(2, "cuda"),
    "batch_size": 64,
    "constraints": FEW_TYPES,
}


def stock(seconds: float) -> StockPlan:
    """TorchRec's plan of three tables, within some seconds."""
    return stock_plan(three_tables(), bag_sharders(), **STOCK, seconds=seconds)


def three_tables() -> Any:
    return make_ebc([(10_000, 64), (300, 64), (2_000_000, 128)])


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], None]:
    """Stop the clock but for calls of a method, which take a second each."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(torchrec_plan, "time", clock)

    def slow(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            now[0] += 1.0
            return method(*arguments, **named)

        monkeypatch.setattr(owner, name, timed)

    return slow


def test_the_plan_to_compare_with_is_torchrecs_where_time_suffices() -> None:
    found = stock(math.inf)
    theirs = stock_planner(**STOCK).plan(three_tables(), bag_sharders())
    assert str(found.plan) == str(theirs)
    assert not found.is_cut
    assert found.num_proposals > 100


def test_torchrecs_planner_stops_within_its_estimates(
    slowed: Callable[[type, str], None],
) -> None:
    slowed(SizesEstimator, "estimate")
    with pytest.raises(OutOfTimeError, match="it had estimated 2 of 3 tables"):
        stock(1.5)


# The first plan is waited for, and the first of each proposer for a second.
@pytest.mark.parametrize(("seconds", "count"), [(4.5, 4), (0.5, 1), (2.5, 3)])
def test_torchrecs_planner_stops_within_its_proposals(
    slowed: Callable[[type, str], None], seconds: float, count: int
) -> None:
    slowed(GreedyPerfPartitioner, "partition")
    cut = stock(seconds)
    assert (cut.is_cut, cut.num_proposals) == (True, count)


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
