from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    PlannerError,
    ShardingOption,
)
from torchrec.distributed.sharding_plan import get_default_sharders

from torchrec_neuroshard.cost_models import CostModel
from torchrec_neuroshard.errors import ConfigError, InfeasibleError, ProfileError
from torchrec_neuroshard.planner import NeuroShardPlanner, partitioners
from torchrec_neuroshard.planner.partitioners import NeuroShardPartitioner
from torchrec_neuroshard.profiles import FeatureProfile, uniform_profile
from torchrec_neuroshard.search import (
    SearchConfig,
    Searcher,
    SearchResult,
)
from torchrec_neuroshard.search.default import NeuroShardSearcher
from torchrec_neuroshard.search.progress import ProgressLine
from torchrec_neuroshard.simulator import PHASES
from torchrec_neuroshard.testing import AnalyticCostModel

GIB = 2**30
CPU_SIZES = [(1000, 16), (2000, 32), (3000, 64), (4000, 128), (500, 8)]

MakeEbc = Callable[..., EmbeddingBagCollection]
MakePlanner = Callable[..., NeuroShardPlanner]
Sharders = list[EmbeddingBagCollectionSharder]
ReadShards = Callable[[Any], dict[str, list[tuple[int, int, int]]]]
ReadTypes = Callable[[Any], dict[str, str]]
Selected = tuple[list[ShardingOption], Callable[..., Any]]

WHOLE = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(2)}


def check(planner: NeuroShardPlanner) -> None:
    """The result is a full placement and its sums are those of its ranks."""
    result, task = planner.last_result, planner.last_task
    assert result is not None and task is not None
    result.placement.check(task)
    assert result.predicted.critical_path_ms == pytest.approx(
        sum(
            max(getattr(r, phase) for r in stage.ranks)
            for stage in result.predicted.stages
            for phase in PHASES
        )
    )
    assert result.lower_bound_ms <= result.predicted.critical_path_ms


@pytest.mark.parametrize("compute_device", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_every_column_is_placed(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    read_shards: ReadShards,
    compute_device: str,
    world_size: int,
) -> None:
    planner = make_planner(world_size, compute_device)
    plan = planner.plan(make_ebc(CPU_SIZES), sharders)
    check(planner)
    shards = read_shards(plan)
    for i, (_, dim) in enumerate(CPU_SIZES):
        assert sum(w for _, w, _ in shards[f"t{i}"]) == dim
        if compute_device == "cuda":
            assert len({w for _, w, _ in shards[f"t{i}"]}) == 1
    if world_size == 1:
        assert all(len(s) == 1 for s in shards.values())


def test_split_module_is_column_wise_throughout(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    read_types: ReadTypes,
    fixed_searcher: Any,
) -> None:
    ebc = make_ebc([(100, 16), (100, 32)])
    split = make_planner(search=fixed_searcher([(0, 16, 0), (1, 12, 0), (1, 20, 1)]))
    assert set(read_types(split.plan(ebc, sharders)).values()) == {"column_wise"}
    whole = make_planner(search=fixed_searcher([(0, 16, 0), (1, 32, 1)]))
    assert set(read_types(whole.plan(ebc, sharders)).values()) == {"table_wise"}
    assert split.last_task is not None and split.last_task.num_groups == 1


def test_a_module_without_splits_stays_table_wise_beside_a_split_one(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    read_types: ReadTypes,
    fixed_searcher: Any,
) -> None:
    model = nn.ModuleDict(
        {
            "a": make_ebc([(100, 16)], prefix="a_"),
            "b": make_ebc([(100, 16)], prefix="b_"),
        }
    )
    planner = make_planner(search=fixed_searcher([]))
    searcher = planner._partitioner.searcher

    def triples(task: Any) -> list[tuple[int, int, int]]:
        split = [t.name for t in task.tables].index("a.a_t0")
        return [(split, 8, 0), (split, 8, 1), (1 - split, 16, 0)]

    original = searcher.search

    def search(task: Any, *models: Any) -> Any:
        searcher.triples = triples(task)
        return original(task, *models)

    searcher.search = search
    plan = planner.plan(model, sharders)
    assert read_types(plan) == {"a.a_t0": "column_wise", "b.b_t0": "table_wise"}
    assert planner.last_task is not None and planner.last_task.num_groups == 2


def test_more_ranks_than_tables(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    planner = make_planner(8)
    planner.plan(make_ebc([(1000, 64)]), sharders)
    check(planner)
    assert planner.last_result is not None
    assert len(planner.last_result.predicted.ranks) == 8


def test_multi_node_placements_name_the_local_device(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    planner = make_planner(8, "cuda", topology_arguments={"local_world_size": 4})
    plan = planner.plan(make_ebc([(1000, 32)] * 12), sharders)
    check(planner)
    assert planner.last_task is not None and planner.last_task.local_world_size == 4
    seen = set()
    for sharding in plan.plan[""].values():
        for meta in sharding.sharding_spec.shards:
            rank = meta.placement.rank()
            seen.add(rank)
            assert meta.placement.device() == torch.device(f"cuda:{rank % 4}")
    assert seen == set(range(8))


def test_memory_tight_table_is_split(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    ebc = make_ebc([(1_000_000, 64)])  # 244 MiB
    cap = 160 * 2**20
    constraints = {"t0": ParameterConstraints(sharding_types=["column_wise"])}
    planner = make_planner(
        2, "cuda", topology_arguments={"hbm_cap": cap}, constraints=constraints
    )
    planner.plan(ebc, sharders)
    check(planner)
    assert planner.last_result is not None
    assert [s.width for s in planner.last_result.placement.shards] == [32, 32]
    assert planner.last_result.fallback is None


def test_ranks_of_unequal_memory(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    caps = [2**20, 300 * 2**20]
    planner = make_planner(
        2,
        "cuda",
        topology_arguments={
            "custom_topology_data": CustomTopologyData({"hbm_cap": caps}, 2)
        },
    )
    planner.plan(make_ebc([(1_000_000, 64)]), sharders)
    check(planner)
    assert planner.last_result is not None
    assert [s.rank for s in planner.last_result.placement.shards] == [1]


def test_cpu_topology_is_limited_by_its_ddr(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    selected: Selected,
) -> None:
    options, remember = selected
    cap = 300 * 2**20
    planner = make_planner(
        2, "cpu", topology_arguments={"ddr_cap": cap}, callbacks=[remember]
    )
    planner.plan(make_ebc([(1_000_000, 64)] * 2), sharders)
    check(planner)
    used = [0, 0]
    for option in options:
        for shard in option.shards:
            assert shard.storage.hbm == 0
            used[shard.rank] += shard.storage.ddr
    assert min(used) > 0 and max(used) <= cap


def test_infeasible_error_reaches_the_caller(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    constraints = {"t0": ParameterConstraints(compute_kernels=["fused"])}
    planner = make_planner(
        2, "cuda", topology_arguments={"hbm_cap": 2**20}, constraints=constraints
    )
    with pytest.raises(
        PlannerError, match=r"(?s)^table 't0'.*GiB.*Unable to find a plan"
    ):
        planner.plan(make_ebc([(1_000_000, 64)]), sharders)
    assert planner.last_result is None


def test_stock_plan_is_taken_where_the_search_finds_none(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    class Helpless(Searcher):
        def search(self, task: Any, *models: Any) -> SearchResult:
            raise InfeasibleError(f"no room for '{task.tables[0].name}'")

    constraints = {"t0": ParameterConstraints(sharding_types=["table_wise"])}
    planner = make_planner(2, constraints=constraints, search=Helpless())
    planner.plan(make_ebc([(1000, 64)]), sharders)
    check(planner)
    result = planner.last_result
    assert result is not None
    assert result.fallback == "no room for 't0'"
    assert any("TorchRec's own plan was taken" in w for w in result.warnings)
    assert [s.width for s in result.placement.shards] == [64]
    # Nothing was searched: how short a path could be is not known.
    assert (result.lower_bound_ms, result.gap) == (0.0, math.inf)


def test_table_too_large_for_a_rank_goes_row_wise(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    read_types: ReadTypes,
) -> None:
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
    plan = planner.plan(make_ebc([(1_000_000, 256), (1000, 16)]), sharders)
    types = read_types(plan)
    assert types["t0"] == "row_wise" and types["t1"] in ("table_wise", "column_wise")
    check(planner)
    assert planner.last_result is not None and planner.last_result.fallback is None


def test_more_ranks_than_columns(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    read_types: ReadTypes,
) -> None:
    # Two shards of four columns, 38 MiB each, for 16 ranks of 20 MiB.
    planner = make_planner(16, "cuda", topology_arguments={"hbm_cap": 20 * 2**20})
    plan = planner.plan(make_ebc([(2_500_000, 8)]), sharders)
    assert read_types(plan) == {"t0": "row_wise"}
    result = planner.last_result
    assert result is not None and result.placement.shards == ()


def test_what_fits_no_device_goes_to_the_host(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    # 488 MiB for two ranks of 200.
    planner = make_planner(2, "cuda", topology_arguments={"hbm_cap": 200 * 2**20})
    plan = planner.plan(make_ebc([(2_000_000, 64), (1000, 16)]), sharders)
    kernels = {n: p.compute_kernel for n, p in plan.plan[""].items()}
    assert kernels["t0"] in ("fused_uvm", "fused_uvm_caching")
    assert kernels["t1"] == "fused"
    result = planner.last_result
    assert result is not None and result.fallback is None
    assert any("'t0': in the host's memory" in w for w in result.warnings)
    assert result.predicted.compute_source == "analytic; estimated for 1 of 2 tables"


@pytest.mark.parametrize("kind", ["row_wise", "table_row_wise", "data_parallel"])
def test_other_sharding_types_where_asked_for(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    read_types: ReadTypes,
    kind: str,
) -> None:
    columns = ParameterConstraints(sharding_types=["table_wise", "column_wise"])
    constraints = {
        "t0": ParameterConstraints(sharding_types=[kind]),
        "t1": columns,
        "t2": columns,
    }
    planner = make_planner(2, "cuda", constraints=constraints)
    plan = planner.plan(make_ebc([(1000, 64), (2000, 32), (3000, 64)]), sharders)
    types = read_types(plan)
    assert types["t0"] == kind
    assert {types["t1"], types["t2"]} <= {"table_wise", "column_wise"}
    check(planner)
    result, task = planner.last_result, planner.last_task
    assert result is not None and task is not None
    assert [t.name for t in task.tables] == ["t1", "t2"]
    assert result.fallback is None
    # Its own part of the cost is not forgotten.
    alone = planner.costs.simulator(task).evaluate(result.placement)
    assert result.predicted.critical_path_ms > alone.critical_path_ms


def test_only_stock_tables(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    constraints = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    planner = make_planner(2, "cuda", constraints=constraints)
    planner.plan(make_ebc([(1000, 64)]), sharders)
    assert planner.last_task is None
    assert planner.last_result is not None
    assert planner.last_result.predicted.critical_path_ms > 0


def test_memory_of_stock_tables_is_left_out_of_the_search(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    # The row-wise table takes 122 MiB of each rank; beside it, 244 MiB do not fit
    # into the remaining 200 whole.
    constraints = {
        "t0": ParameterConstraints(sharding_types=["row_wise"]),
        "t1": ParameterConstraints(sharding_types=["column_wise"]),
    }
    planner = make_planner(
        2,
        "cuda",
        constraints=constraints,
        topology_arguments={"hbm_cap": 330 * 2**20},
    )
    planner.plan(make_ebc([(1_000_000, 64), (1_000_000, 64)]), sharders)
    assert planner.last_result is not None
    assert [s.width for s in planner.last_result.placement.shards] == [32, 32]


def test_min_partition_is_the_narrowest_shard(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    def narrowest(min_partition: int | None) -> int:
        constraints = {"t0": ParameterConstraints(min_partition=min_partition)}
        planner = make_planner(8, constraints=constraints)
        planner.plan(make_ebc([(100_000, 64)]), sharders)
        assert planner.last_result is not None
        return min(s.width for s in planner.last_result.placement.shards)

    assert narrowest(None) < 30
    assert narrowest(30) == 32  # rounded up to a multiple of four
    assert narrowest(64) == 64
    assert narrowest(1000) == 64


def test_table_wise_constraint_is_kept_in_a_split_module(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    read_types: ReadTypes,
    read_shards: ReadShards,
) -> None:
    constraints = {
        "t0": ParameterConstraints(sharding_types=["table_wise"]),
        "t1": ParameterConstraints(sharding_types=["column_wise"]),
    }
    planner = make_planner(4, constraints=constraints)
    plan = planner.plan(make_ebc([(1000, 64), (1000, 64), (100_000, 128)]), sharders)
    check(planner)
    types, shards = read_types(plan), read_shards(plan)
    assert types == {"t0": "table_wise", "t1": "column_wise", "t2": "column_wise"}
    assert len(shards["t0"]) == 1
    assert planner.last_task is not None
    groups = planner.last_task.groups
    assert groups[1] == groups[2] != groups[0]


def test_unsplit_tables_fuse_with_those_that_must_stay_whole(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    read_types: ReadTypes,
) -> None:
    # Only if t1, which may be split, is emitted table-wise as well is there one launch.
    constraints = {"t0": ParameterConstraints(sharding_types=["table_wise"])}
    model = AnalyticCostModel(launch_ms=100.0)
    planner = make_planner(1, constraints=constraints, cost_model=model)
    plan = planner.plan(make_ebc([(1000, 64), (1000, 64)]), sharders)
    assert set(read_types(plan).values()) == {"table_wise"}
    assert planner.last_result is not None
    assert planner.last_result.predicted.ranks[0].fwd_compute < 200


def test_pooling_factors_count_over_features(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    features = {0: ["a", "b"], 1: ["c", "d", "e"], 2: ["a"]}
    constraints = {
        "t0": ParameterConstraints(pooling_factors=[3.0, 4.0]),
        "t1": ParameterConstraints(pooling_factors=[2.0]),
    }
    planner = make_planner(constraints=constraints)
    planner.plan(make_ebc([(100, 8)] * 3, features=features), sharders)
    assert planner.last_task is not None
    tables = planner.last_task.tables
    assert [t.pooling_factor for t in tables] == [7.0, 6.0, 1.0]
    assert [t.num_features for t in tables] == [2, 3, 1]
    assert planner.last_task.batch_size == 64 * 2


def test_profiles_describe_their_features(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    profile = uniform_profile(batch_size=32, pooling_factor=9.0, num_embeddings=100)
    features = {0: ["a", "b"], 1: ["a"], 2: ["c"]}
    planner = make_planner(
        profiles={"a": profile},
        constraints={"t0": ParameterConstraints(pooling_factors=[1.0, 2.0])},
    )
    planner.plan(make_ebc([(100, 8)] * 3, features=features), sharders)
    assert planner.last_task is not None
    both, known, unknown = planner.last_task.tables
    assert both.pooling_factor == pytest.approx(9.0 + 2.0)
    assert known.profile is not None
    assert known.profile.num_lookups == pytest.approx(9.0 * 128)
    assert known.profile.access_histogram == pytest.approx(
        profile.at_batch_size(128, 100).access_histogram
    )
    assert unknown.profile is None and unknown.pooling_factor == 1.0


def test_unknown_feature_in_profiles(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    profile = FeatureProfile(batch_size=1, num_lookups=1.0)
    planner = make_planner(profiles={"f0": profile, "typo": profile})
    with pytest.raises(ProfileError, match=r"'typo'.*known features: f0, f1"):
        planner.plan(make_ebc([(100, 8)] * 2), sharders)


def test_unknown_cost_model_and_search(make_planner: MakePlanner) -> None:
    with pytest.raises(ConfigError, match="unknown cost model 'nonesuch'"):
        make_planner(cost_model="nonesuch")
    with pytest.raises(ConfigError, match="unknown search 'nonesuch'"):
        make_planner(search="nonesuch")


def test_several_collections(make_ebc: MakeEbc, make_planner: MakePlanner) -> None:
    model = nn.ModuleDict(
        {
            "plain": make_ebc(CPU_SIZES),
            "weighted": make_ebc([(700, 32), (900, 64)], weighted=True),
            "sequence": EmbeddingCollection(
                tables=[
                    EmbeddingConfig(
                        name="s0",
                        num_embeddings=100,
                        embedding_dim=32,
                        feature_names=["s"],
                    )
                ],
                device=torch.device("meta"),
            ),
        }
    )
    planner = make_planner(
        2,
        constraints={
            name: ParameterConstraints(
                sharding_types=["table_wise", "column_wise"],
                pooling_factors=[5.0 if name == "s0" else 1.0],
            )
            for name in ("t0", "s0")
        },
    )
    plan = planner.plan(model, get_default_sharders())
    check(planner)
    assert set(plan.plan) == {"plain", "weighted", "sequence"}
    assert planner.last_task is not None
    tables = {t.name: t for t in planner.last_task.tables}
    groups = dict(zip(tables, planner.last_task.groups, strict=True))
    assert len(set(groups.values())) == 3
    # The same table name in two modules is two tables.
    assert tables["weighted.t0"].weighted and not tables["plain.t0"].weighted
    assert (tables["sequence.s0"].num_features, len(plan.plan["sequence"])) == (5, 1)


def test_sequence_tables_stay_whole(make_planner: MakePlanner) -> None:
    tables = [
        EmbeddingConfig(
            name=f"s{i}",
            num_embeddings=10_000,
            embedding_dim=128,
            feature_names=[f"f{i}"],
        )
        for i in range(3)
    ]
    module = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    columns = ParameterConstraints(sharding_types=["table_wise", "column_wise"])
    planner = make_planner(8, constraints={t.name: columns for t in tables})
    plan = planner.plan(module, [EmbeddingCollectionSharder()])
    check(planner)
    for sharding in plan.plan[""].values():
        assert sharding.sharding_type == "table_wise"
        assert len(sharding.ranks) == 1


def test_no_tables(make_planner: MakePlanner, sharders: Sharders) -> None:
    planner = make_planner()
    assert planner.plan(nn.Linear(2, 2), sharders).plan == {}
    assert planner.last_result is None and planner.last_task is None


def test_planner_can_be_used_again(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    planner = make_planner()
    first = planner.plan(make_ebc(CPU_SIZES), sharders)
    other = planner.plan(make_ebc([(900, 24)] * 3), sharders)
    again = planner.plan(make_ebc(CPU_SIZES), sharders)
    assert str(first) == str(again) != str(other)


class BrokenCostModel(AnalyticCostModel):
    """Predicts nan, as a network does whose weights diverged."""

    name = "broken"

    def predict_sums(self, sums_SE: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.full((len(sums_SE), 2), np.nan)


def test_nan_cost_model(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    planner = make_planner(cost_model=BrokenCostModel())
    with pytest.raises(ConfigError, match=r"'broken' predicts .*nan.* for t0"):
        planner.plan(make_ebc(CPU_SIZES), sharders)


def test_result_describes_the_plan_after_callbacks(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    fixed_searcher: Any,
) -> None:
    def swap(options: list[ShardingOption]) -> list[ShardingOption]:
        for option in options:
            for shard in option.shards:
                shard.rank = 1 - shard.rank
        return options[::-1]

    searcher = fixed_searcher([(0, 16, 0), (1, 32, 1)])
    planner = make_planner(search=searcher, callbacks=[swap], constraints=WHOLE)
    planner.plan(make_ebc([(100, 16), (100, 32)]), sharders)
    result, task = planner.last_result, planner.last_task
    assert result is not None and task is not None
    names = [t.name for t in task.tables]
    ranks = {names[s.table]: s.rank for s in result.placement.shards}
    assert ranks == {"t0": 1, "t1": 0}
    # The bound is of every placement of the same tables.
    assert result.gap == pytest.approx(1.0)


def test_result_holds_what_the_search_said(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    fixed_searcher: Any,
) -> None:
    searcher = fixed_searcher([(0, 16, 0), (1, 32, 1)])
    planner = make_planner(search=searcher, constraints=WHOLE)
    planner.plan(make_ebc([(100, 16), (100, 32)]), sharders)
    result = planner.last_result
    assert result is not None
    assert result.lower_bound_ms == pytest.approx(
        0.5 * result.predicted.critical_path_ms
    )
    assert result.gap == pytest.approx(1.0)
    assert (result.search_seconds, result.num_evaluated) == (0.25, 7)
    assert result.warnings == ("from the search",)


@pytest.mark.parametrize("compute_device", ["cpu", "cuda"])
def test_stock_sums_over_shards_agree_with_the_set_cost(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    selected: Selected,
    compute_device: str,
) -> None:
    options, remember = selected
    planner = make_planner(2, compute_device, callbacks=[remember])
    planner.plan(make_ebc(CPU_SIZES), sharders)
    assert planner.last_result is not None
    ranks = planner.last_result.predicted.ranks
    parts = {
        "fwd_compute": ("fwd_compute",),
        "fwd_comms": ("index_comms", "fwd_comms"),
        "bwd_compute": ("bwd_compute",),
        "bwd_comms": ("bwd_comms",),
    }
    for name, phases in parts.items():
        sums = [0.0] * 2
        for option in options:
            for shard in option.shards:
                sums[shard.rank] += getattr(shard.perf, name)
        assert sums == pytest.approx(
            [sum(getattr(r, p) for p in phases) for r in ranks]
        )
    rating = NoopPerfModel(planner._topology).rate(options)
    assert rating == pytest.approx(
        max(sum(getattr(r, phase) for phase in PHASES) for r in ranks)
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_long_searches_are_shown_on_a_terminal_only(
    make_planner: MakePlanner, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    partitioner = make_planner(2, search="default")._partitioner
    assert isinstance(partitioner, NeuroShardPartitioner)
    searcher = partitioner.searcher
    assert isinstance(searcher, NeuroShardSearcher)
    assert isinstance(searcher.config.progress, ProgressLine) == is_terminal


def test_stock_stats_print_the_set_cost(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    stats = EmbeddingStats()
    planner = make_planner(2, stats=[stats], debug=True)
    planner.plan(make_ebc(CPU_SIZES), sharders)
    assert planner.last_result is not None
    text = "\n".join(stats._stats_table)
    expected = planner.last_result.predicted.critical_path_ms
    assert f"Critical Path (comms + compute): {round(expected, 3)}" in text
    assert round(expected, 3) > 0.01


def test_the_inputs_are_not_changed(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    constraints = {"t3": ParameterConstraints(min_partition=32)}
    before = repr(constraints)
    topology = Topology(world_size=2, compute_device="cpu")
    shown = repr(topology)
    planner = make_planner(topology=topology, constraints=constraints)
    planner.plan(make_ebc(CPU_SIZES), sharders)
    assert repr(constraints) == before and repr(topology) == shown


def test_defaults_are_filled_around_the_callers_parts(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    proposer = GreedyProposer()
    topology = Topology(world_size=2, compute_device="cpu")
    model = NoopPerfModel(topology)
    planner = make_planner(
        topology=topology, proposer=proposer, performance_model=model
    )
    planner.plan(make_ebc(CPU_SIZES), sharders)
    check(planner)
    assert planner._proposers == [proposer] and planner._perf_model is model
    assert isinstance(planner._partitioner, NeuroShardPartitioner)
    assert isinstance(planner, EmbeddingShardingPlanner)


def test_timeout_limits_the_search(make_planner: MakePlanner) -> None:
    planner = make_planner(
        timeout_seconds=3, search=SearchConfig(time_budget_seconds=100.0)
    )
    assert planner._partitioner.searcher.config.time_budget_seconds == 3.0
    planner = make_planner(
        timeout_seconds=300, search=SearchConfig(time_budget_seconds=10.0)
    )
    assert planner._partitioner.searcher.config.time_budget_seconds == 10.0


@pytest.mark.parametrize("name", ["neuroshard", "annealing", "milp"])
def test_timeout_limits_named_searches(make_planner: MakePlanner, name: str) -> None:
    def seconds(**arguments: Any) -> float:
        searcher: Any = make_planner(search=name, **arguments)._partitioner.searcher
        assert searcher.name == name
        return float(searcher.config.time_budget_seconds)

    own = seconds()
    assert own > 3.0
    assert seconds(timeout_seconds=3) == 3.0
    assert seconds(timeout_seconds=10**6) == min(own, 10**6)


@pytest.mark.parametrize("search", ["default", "annealing"])
def test_all_searches_of_a_plan_share_one_budget(
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
    monkeypatch: pytest.MonkeyPatch,
    search: str,
) -> None:
    """Of a plan of TorchRec's proposers, which propose one change after the other."""
    planner = make_planner(
        4,
        "cuda",
        search=search,
        timeout_seconds=20,
        proposer=GreedyProposer(use_depth=False),
    )
    kind: Any = type(planner._partitioner.searcher)
    original, now, given = kind.search, [0.0], []

    def take_all_of_it(self: Any, *arguments: Any) -> SearchResult:
        seconds = self.config.time_budget_seconds
        given.append(seconds)
        now[0] += seconds
        quick = self.with_budget(0.01)
        found: SearchResult = original(quick, *arguments)
        return dataclasses.replace(found, search_seconds=seconds)

    monkeypatch.setattr(kind, "search", take_all_of_it)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(partitioners, "time", clock)
    planner.plan(make_ebc([(1000 * (i + 1), 16) for i in range(8)]), sharders)
    assert len(given) > 15
    assert sum(given) <= 20.0 + len(given) * partitioners.QUICK_SECONDS


@pytest.mark.filterwarnings("ignore:HeuristicalStorageReservation:FutureWarning")
def test_auto_cost_model_says_what_it_rests_on(
    make_ebc: MakeEbc, sharders: Sharders
) -> None:
    topology = Topology(world_size=2, compute_device="cuda")
    with pytest.warns(UserWarning, match="no cost model was measured on"):
        planner = NeuroShardPlanner(topology=topology, stats=[])
    planner.plan(make_ebc(CPU_SIZES), sharders)
    assert planner.last_result is not None
    assert any("no cost model was measured" in w for w in planner.last_result.warnings)


def test_collective_plan_needs_a_process_group(
    make_ebc: MakeEbc, make_planner: MakePlanner
) -> None:
    with pytest.raises(RuntimeError, match="init_process_group first, or plan"):
        make_planner().collective_plan(make_ebc(CPU_SIZES))


SAME_EVERYWHERE = """
import logging, torch
logging.disable(logging.WARNING)
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec_neuroshard import NeuroShardPlanner, SearchConfig
from torchrec_neuroshard.testing import AnalyticCostModel

ebc = EmbeddingBagCollection(
    tables=[
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=1000 + 97 * i,
            embedding_dim=(16, 64, 128)[i % 3], feature_names=[f"f{i}"],
        )
        for i in range(9)
    ],
    device=torch.device("meta"),
)
planner = NeuroShardPlanner(
    topology=Topology(world_size=4, compute_device="cuda"), batch_size=64, stats=[],
    constraints={
        "t1": ParameterConstraints(sharding_types=["row_wise", "table_row_wise"]),
        "t2": ParameterConstraints(sharding_types=["table_wise", "column_wise"]),
    },
    storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
    cost_model=AnalyticCostModel(), search=SearchConfig(time_budget_seconds=60.0),
)
plan = planner.plan(ebc, [EmbeddingBagCollectionSharder()])
print(plan)
print(planner.last_result.placement, planner.last_result.predicted)
print(planner.hash_planner_context_inputs_str())
"""


def test_plan_does_not_depend_on_the_hash_seed() -> None:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SAME_EVERYWHERE],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert "row_wise" in outputs[0]
    assert outputs[0] == outputs[1]


def test_cost_model_is_loaded_once(
    make_ebc: MakeEbc, make_planner: MakePlanner, sharders: Sharders
) -> None:
    planner = make_planner()
    parts: list[Any] = [
        *planner._proposers,
        planner._partitioner,
        planner._perf_model,
        planner._enumerator._estimators[0],
    ]
    assert all(part.costs is planner.costs for part in parts)
    assert isinstance(planner.costs.cost_model, CostModel)


def test_weighted_tables(
    make_planner: MakePlanner, make_ebc: MakeEbc, sharders: Sharders
) -> None:
    planner = make_planner()
    planner.plan(make_ebc(CPU_SIZES, weighted=True), sharders)
    check(planner)
    assert planner.last_task is not None
    assert all(t.weighted for t in planner.last_task.tables)


def test_nested_and_root_paths(make_planner: MakePlanner, sharders: Sharders) -> None:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"]
    )
    model = nn.Sequential(
        nn.Sequential(
            EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        )
    )
    constraints = {"t": ParameterConstraints(sharding_types=["table_wise"])}
    planner = make_planner(constraints=constraints)
    plan = planner.plan(model, sharders)
    assert list(plan.plan) == ["0.0"]
    assert planner.last_task is not None
    assert planner.last_task.tables[0].name == "0.0.t"
