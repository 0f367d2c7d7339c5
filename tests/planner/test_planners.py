from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import ShardingOption
from torchrec.modules.embedding_configs import DataType

from tests.builders import (
    CPU_SIZES,
    FixedSearcher,
    Triples,
    bag_config,
    bag_sharders,
    bags,
    check_result,
    columns_only,
    cost_of,
    gpus,
    make_ebc,
    make_planner,
    sequences,
    shards_of,
    types_of,
)
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.planner import NeuroShardPlanner, PlacementConstraints
from torchrec_neuroshard.profiles import uniform_profile
from torchrec_neuroshard.search import (
    SearchConfig,
    Searcher,
    SearchResult,
)
from torchrec_neuroshard.testing import AnalyticCostModel


@pytest.mark.parametrize("compute_device", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [1, 8])
def test_every_column_is_placed(compute_device: str, world_size: int) -> None:
    planner = make_planner(world_size, compute_device)
    plan = planner.plan(make_ebc(CPU_SIZES), bag_sharders())
    check_result(planner)
    shards = shards_of(plan)
    for i, (_, dim) in enumerate(CPU_SIZES):
        assert sum(w for _, w, _ in shards[f"t{i}"]) == dim
        if compute_device == "cuda":
            assert len({w for _, w, _ in shards[f"t{i}"]}) == 1
    if world_size == 1:
        assert all(len(s) == 1 for s in shards.values())


def test_split_module_is_column_wise_throughout() -> None:
    ebc = make_ebc([(100, 16), (100, 32)])
    split = make_planner(search=FixedSearcher([(0, 16, 0), (1, 12, 0), (1, 20, 1)]))
    assert set(types_of(split.plan(ebc, bag_sharders())).values()) == {"column_wise"}
    whole = make_planner(search=FixedSearcher([(0, 16, 0), (1, 32, 1)]))
    assert set(types_of(whole.plan(ebc, bag_sharders())).values()) == {"table_wise"}
    assert split.last_task is not None and split.last_task.num_groups == 1


def test_a_module_without_splits_stays_table_wise_beside_a_split_one() -> None:
    model = nn.ModuleDict(
        {name: make_ebc([(100, 16)], prefix=f"{name}_") for name in ("a", "b")}
    )

    def split_a(task: ShardingTask) -> Triples:
        split = [t.name for t in task.tables].index("a.a_t0")
        return [(split, 8, 0), (split, 8, 1), (1 - split, 16, 0)]

    planner = make_planner(search=FixedSearcher(split_a))
    plan = planner.plan(model, bag_sharders())
    assert types_of(plan) == {"a.a_t0": "column_wise", "b.b_t0": "table_wise"}
    assert planner.last_task is not None and planner.last_task.num_groups == 2


def test_stock_plan_is_taken_where_the_search_finds_none() -> None:
    class Helpless(Searcher):
        def search(self, task: Any, *models: Any) -> SearchResult:
            raise InfeasibleError(f"no room for '{task.tables[0].name}'")

    constraints = {"t0": ParameterConstraints(sharding_types=["table_wise"])}
    planner = make_planner(2, constraints=constraints, search=Helpless())
    planner.plan(make_ebc([(1000, 64)]), bag_sharders())
    check_result(planner)
    result = planner.last_result
    assert result is not None
    assert result.fallback == "no room for 't0'"
    assert any("TorchRec's own plan was taken" in w for w in result.warnings)
    assert [s.width for s in result.placement.shards] == [64]
    # Nothing was searched: how short a path could be is not known.
    assert (result.lower_bound_ms, result.gap) == (0.0, math.inf)


def test_table_too_large_for_a_rank_goes_row_wise() -> None:
    # 977 MiB over two ranks of 600: halves fit only by rows, for the table may not be
    # split by columns.
    constraints = {
        "t0": ParameterConstraints(min_partition=256, compute_kernels=["fused"]),
        "t1": ParameterConstraints(sharding_types=["table_wise", "column_wise"]),
    }
    planner = make_planner(
        2,
        "cuda",
        topology_arguments={"hbm_cap": 600 * 2**20},
        constraints=constraints,
    )
    plan = planner.plan(make_ebc([(1_000_000, 256), (1000, 16)]), bag_sharders())
    types = types_of(plan)
    assert types["t0"] == "row_wise" and types["t1"] in ("table_wise", "column_wise")
    check_result(planner)
    assert planner.last_result is not None and planner.last_result.fallback is None


def test_what_fits_no_device_goes_to_the_host() -> None:
    # 488 MiB for two ranks of 200.
    planner = make_planner(2, "cuda", topology_arguments={"hbm_cap": 200 * 2**20})
    plan = planner.plan(make_ebc([(2_000_000, 64), (1000, 16)]), bag_sharders())
    kernels = {n: p.compute_kernel for n, p in plan.plan[""].items()}
    assert kernels["t0"] in ("fused_uvm", "fused_uvm_caching")
    assert kernels["t1"] == "fused"
    result = planner.last_result
    assert result is not None and result.fallback is None
    assert any("'t0': in the host's memory" in w for w in result.warnings)
    assert result.predicted.compute_source == "analytic; estimated for 1 of 2 tables"


def test_hosts_share_the_tables_in_their_memory() -> None:
    """Of two hosts with two ranks each."""
    limits = ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=["fused_uvm"]
    )
    planner = make_planner(
        topology=gpus(4, 2), constraints={f"t{i}": limits for i in range(4)}
    )
    plan = planner.plan(make_ebc([(100_000, 64)] * 4), bag_sharders())
    assert [rank for t in shards_of(plan).values() for *_, rank in t] == [0, 2, 1, 3]


def test_what_the_host_lacks_room_for_stays_on_the_device() -> None:
    # Two tables of 160 MiB, looked up less, and one of 290; the device has 340. By time
    # and by its memory alone the two would be in the host, which has 300.
    ebc = make_ebc([(655_360, 64), (655_360, 64), (1_187_840, 64)])
    planner = make_planner(
        1,
        "cuda",
        constraints={
            name: ParameterConstraints(pooling_factors=[pooling])
            for name, pooling in (("t0", 1.0), ("t1", 1.0), ("t2", 20.0))
        },
        topology_arguments={"hbm_cap": 340 * 2**20, "ddr_cap": 300 * 2**20},
        consider_stock=False,
    )
    plan = planner.plan(ebc, bag_sharders())
    kernels = [p.compute_kernel for p in plan.plan[""].values()]
    assert kernels[:2] == ["fused", "fused"]
    assert kernels[2] in ("fused_uvm", "fused_uvm_caching")
    result = planner.last_result
    assert result is not None and result.fallback is None


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_other_sharding_types_where_asked_for(kind: str) -> None:
    ebc = make_ebc([(1000, 64), (2000, 32), (3000, 64)])
    constraints = columns_only(ebc, {"t0": ParameterConstraints(sharding_types=[kind])})
    planner = make_planner(2, "cuda", constraints=constraints)
    plan = planner.plan(ebc, bag_sharders())
    types = types_of(plan)
    assert types["t0"] == kind
    assert {types["t1"], types["t2"]} <= {"table_wise", "column_wise"}
    check_result(planner)
    result, task = planner.last_result, planner.last_task
    assert result is not None and task is not None
    assert [t.name for t in task.tables] == ["t1", "t2"]
    assert result.fallback is None
    # Its own part of the cost is not forgotten.
    alone = planner.costs.simulator(task).evaluate(result.placement)
    assert result.predicted.critical_path_ms > alone.critical_path_ms


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_unpriced_tables_is_left_out_of_the_search(rank: int) -> None:
    """Its 244 MiB leave one rank no room for tables of 122 MiB; the other has it."""
    whole = ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=["fused"]
    )
    planner = make_planner(
        2,
        "cuda",
        constraints=dict.fromkeys(("t0", "t1", "t2"), whole),
        topology_arguments={"hbm_cap": 330 * 2**20},
        placement_constraints=PlacementConstraints(pin={"t0": [rank]}),
        strict_memory=True,
    )
    sizes = [(2_000_000, 64), (500_000, 64), (500_000, 64)]
    ebc = make_ebc(sizes, data_types={0: DataType.INT4})
    ranks = {
        n: r for n, [(*_, r)] in shards_of(planner.plan(ebc, bag_sharders())).items()
    }
    assert ranks == {"t0": rank, "t1": 1 - rank, "t2": 1 - rank}


def test_table_wise_constraint_is_kept_in_a_split_module() -> None:
    constraints = {
        "t0": ParameterConstraints(sharding_types=["table_wise"]),
        "t1": ParameterConstraints(sharding_types=["column_wise"]),
    }
    planner = make_planner(4, constraints=constraints)
    plan = planner.plan(
        make_ebc([(1000, 64), (1000, 64), (100_000, 128)]), bag_sharders()
    )
    check_result(planner)
    types, shards = types_of(plan), shards_of(plan)
    assert types == {"t0": "table_wise", "t1": "column_wise", "t2": "column_wise"}
    assert len(shards["t0"]) == 1
    assert planner.last_task is not None
    groups = planner.last_task.groups
    assert groups[1] == groups[2] != groups[0]


def test_unsplit_tables_fuse_with_those_that_must_stay_whole() -> None:
    # Only if t1, which may be split, is emitted table-wise as well is there one launch.
    constraints = {"t0": ParameterConstraints(sharding_types=["table_wise"])}
    model = AnalyticCostModel(launch_ms=100.0)
    planner = make_planner(1, constraints=constraints, cost_model=model)
    plan = planner.plan(make_ebc([(1000, 64), (1000, 64)]), bag_sharders())
    assert set(types_of(plan).values()) == {"table_wise"}
    assert planner.last_result is not None
    assert planner.last_result.predicted.ranks[0].fwd_compute < 200


def test_pooling_factors_count_over_features() -> None:
    features = {0: ["a", "b"], 1: ["c", "d", "e"], 2: ["a"], 3: list("fghij")}
    constraints = {
        "t0": ParameterConstraints(pooling_factors=[3.0, 4.0]),
        "t1": ParameterConstraints(pooling_factors=[2.0]),
    }
    planner = make_planner(constraints=constraints)
    planner.plan(make_ebc([(100, 8)] * 4, features=features), bag_sharders())
    assert planner.last_task is not None
    tables = planner.last_task.tables
    assert [t.pooling_factor for t in tables] == [7.0, 6.0, 1.0, 5.0]
    assert [t.num_features for t in tables] == [2, 3, 1, 5]
    assert planner.last_task.batch_size == 64 * 2


def test_profiles_describe_their_features() -> None:
    profile = uniform_profile(batch_size=32, pooling_factor=9.0, num_embeddings=100)
    features = {0: ["a", "b"], 1: ["a"], 2: ["c"]}
    planner = make_planner(
        profiles={"a": profile},
        constraints={"t0": ParameterConstraints(pooling_factors=[1.0, 2.0])},
    )
    planner.plan(make_ebc([(100, 8)] * 3, features=features), bag_sharders())
    assert planner.last_task is not None
    both, known, unknown = planner.last_task.tables
    assert both.pooling_factor == pytest.approx(9.0 + 2.0)
    assert known.profile is not None
    assert known.profile.num_lookups == pytest.approx(9.0 * 128)
    assert known.profile.access_histogram == pytest.approx(
        profile.at_batch_size(128, 100).access_histogram
    )
    assert unknown.profile is None and unknown.pooling_factor == 1.0


def test_unknown_cost_model_and_search() -> None:
    with pytest.raises(ConfigError, match="unknown cost model 'nonesuch'"):
        make_planner(cost_model="nonesuch")
    with pytest.raises(ConfigError, match="unknown search 'nonesuch'"):
        make_planner(search="nonesuch")


def test_sequence_tables_stay_whole() -> None:
    module = sequences(128, 128, 128, rows=10_000)
    planner = make_planner(8, constraints=columns_only(module))
    plan = planner.plan(module, [EmbeddingCollectionSharder()])
    check_result(planner)
    for sharding in plan.plan[""].values():
        assert sharding.sharding_type == "table_wise"
        assert len(sharding.ranks) == 1


PLACED = [(0, 16, 0), (1, 32, 1)]


def test_result_describes_the_plan_after_callbacks() -> None:
    def swap(options: list[ShardingOption]) -> list[ShardingOption]:
        for option in options:
            for shard in option.shards:
                assert shard.rank is not None
                shard.rank = 1 - shard.rank
        return options[::-1]

    ebc, searcher = make_ebc([(100, 16), (100, 32)]), FixedSearcher(PLACED)
    planner = make_planner(
        search=searcher, callbacks=[swap], constraints=columns_only(ebc)
    )
    plan = planner.plan(ebc, bag_sharders())
    assert shards_of(plan) == {"t0": [(0, 16, 1)], "t1": [(0, 32, 0)]}
    result, task = planner.last_result, planner.last_task
    assert result is not None and task is not None
    names = [t.name for t in task.tables]
    ranks = {names[s.table]: s.rank for s in result.placement.shards}
    assert ranks == {"t0": 1, "t1": 0}
    # The bound is of every placement of the same tables.
    assert result.gap == pytest.approx(1.0)


def test_result_holds_what_the_search_said() -> None:
    ebc, searcher = make_ebc([(100, 16), (100, 32)]), FixedSearcher(PLACED)
    planner = make_planner(search=searcher, constraints=columns_only(ebc))
    planner.plan(ebc, bag_sharders())
    result = planner.last_result
    assert result is not None
    assert result.lower_bound_ms == pytest.approx(
        0.5 * result.predicted.critical_path_ms
    )
    assert result.gap == pytest.approx(1.0)
    assert (result.search_seconds, result.num_evaluated) == (0.25, 7)
    assert result.warnings == ("from the search",)


def test_the_inputs_are_not_changed() -> None:
    constraints = {"t3": ParameterConstraints(min_partition=32)}
    before = repr(constraints)
    topology = Topology(world_size=2, compute_device="cpu")
    shown = repr(topology)
    planner = make_planner(topology=topology, constraints=constraints)
    planner.plan(make_ebc(CPU_SIZES), bag_sharders())
    assert repr(constraints) == before and repr(topology) == shown


def test_defaults_are_filled_around_the_callers_parts() -> None:
    calls = []

    class OwnProposer(GreedyProposer):
        def propose(self) -> Any:
            calls.append("propose")
            return super().propose()

    class OwnModel(NoopPerfModel):
        def rate(self, plan: list[ShardingOption]) -> float:
            calls.append("rate")
            return float(super().rate(plan))

    topology = Topology(world_size=2, compute_device="cpu")
    planner = make_planner(
        topology=topology, proposer=OwnProposer(), performance_model=OwnModel(topology)
    )
    planner.plan(make_ebc(CPU_SIZES), bag_sharders())
    check_result(planner)
    assert {"propose", "rate"} == set(calls)
    assert planner.last_seconds["search"] > 0
    assert isinstance(planner, EmbeddingShardingPlanner)


@pytest.mark.filterwarnings("ignore:HeuristicalStorageReservation:FutureWarning")
def test_auto_cost_model_says_what_it_rests_on() -> None:
    topology = Topology(world_size=2, compute_device="cuda")
    with pytest.warns(UserWarning, match="no cost model was measured on"):
        planner = NeuroShardPlanner(topology=topology, stats=[])
    planner.plan(make_ebc(CPU_SIZES[:2]), bag_sharders())
    assert planner.last_result is not None
    assert any("no cost model was measured" in w for w in planner.last_result.warnings)


def test_collective_plan_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group first, or plan"):
        make_planner().collective_plan(make_ebc(CPU_SIZES))


@pytest.mark.one_release
def test_plan_does_not_depend_on_the_order_of_tables() -> None:
    rng = np.random.default_rng(0)
    tables = [
        bag_config(i, int(10 ** rng.uniform(2, 6)), int(rng.choice([16, 64, 128])))
        for i in range(7)
    ]
    constraints = {
        f"t{i}": ParameterConstraints(pooling_factors=[float(rng.lognormal(1, 1))])
        for i in range(0, 7, 2)
    }

    def planned(order: list[int]) -> tuple[dict[str, Any], float]:
        names = [f"t{i}" for i in order]
        given = {n: constraints[n] for n in names if n in constraints}
        planner = make_planner(
            3,
            constraints=given,
            search=SearchConfig(restarts=1, effort=0.1, time_budget_seconds=60.0),
        )
        plan = planner.plan(bags(*(tables[i] for i in order)), bag_sharders())
        return {n: str(plan.plan[""][n]) for n in sorted(names)}, cost_of(planner)

    assert planned([0, 1, 2, 3, 4, 5, 6]) == planned([6, 2, 4, 1, 0, 5, 3])
