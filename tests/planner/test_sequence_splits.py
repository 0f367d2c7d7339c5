"""Column splits of sequence tables: when, which tables, and one width per module."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan

from tests.builders import (
    bag_sharders,
    by_table,
    cost_of,
    each,
    gpus,
    last_result,
    make_ebc,
    make_planner,
    sequences,
    shards_of,
    types_of,
)
from torchrec_neuroshard.planner.constraints import PlacementConstraints
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

TABLE, COLUMN = "table_wise", "column_wise"
WORLD_SIZE = 4
SPLITS_PAY: dict[str, Any] = {
    "cost_model": AnalyticCostModel(launch_ms=0.0),
    "comms_model": AnalyticCommsModel(100.0),
}


def planned(
    dims: tuple[int, ...], *, dedup: bool = False, **arguments: Any
) -> tuple[NeuroShardPlanner, ShardingPlan]:
    planner = make_planner(**({"world_size": WORLD_SIZE} | SPLITS_PAY | arguments))
    sharder = EmbeddingCollectionSharder(use_index_dedup=dedup)
    return planner, planner.plan(sequences(*dims, prefix="t"), [sharder])


def widths_of(plan: ShardingPlan) -> dict[str, list[int]]:
    return {name: [s[1] for s in shards] for name, shards in shards_of(plan).items()}


def test_a_table_alone_is_split_over_all_ranks() -> None:
    planner, plan = planned((64,), constraints=each(1, TABLE, COLUMN))
    assert types_of(plan) == {"t0": COLUMN}
    assert sorted(rank for *_, rank in shards_of(plan)["t0"]) == [0, 1, 2, 3]
    assert widths_of(plan) == {"t0": [16] * WORLD_SIZE}
    whole, _ = planned((64,), constraints=each(1, TABLE))
    assert cost_of(planner) < 0.5 * cost_of(whole)
    assert last_result(planner).lower_bound_ms <= cost_of(planner)


def test_only_the_tables_that_slow_a_rank_are_split() -> None:
    constraints = by_table(
        sharding_types=[[TABLE, COLUMN]] * 6, pooling_factors=[[100.0], *[[10.0]] * 5]
    )
    _, plan = planned((64,) * 6, constraints=constraints)
    assert types_of(plan)["t0"] == COLUMN
    assert TABLE in types_of(plan).values()


def test_tables_of_one_module_get_shards_of_one_width() -> None:
    constraints = by_table(
        sharding_types=[[COLUMN]] * 3,
        min_partition=[16, 32, 8],
        pooling_factors=[[50.0], [20.0], [30.0]],
    )
    _, plan = planned((64,) * 3, constraints=constraints)
    assert set(types_of(plan).values()) == {COLUMN}
    assert {w for own in widths_of(plan).values() for w in own} == {32}


def test_whole_tables_share_the_stage_of_one_that_may_only_be_column_wise() -> None:
    only = ParameterConstraints(
        sharding_types=[COLUMN], min_partition=32, pooling_factors=[50.0]
    )
    _, plan = planned((32, 32, 32), world_size=2, constraints={"t0": only})
    assert set(types_of(plan).values()) == {COLUMN}
    held = {name: shards[0][-1] for name, shards in shards_of(plan).items()}
    assert held["t1"] == held["t2"] != held["t0"]


def test_other_modules_do_not_make_a_split_needless() -> None:
    """They run in stages of their own, during which no rank waits for this one."""
    model = nn.ModuleDict({"ids": sequences(64), "bags": make_ebc([(1000, 64)] * 12)})
    constraints = each(12, TABLE, COLUMN)
    constraints["s0"] = ParameterConstraints(sharding_types=[TABLE, COLUMN])
    planner = make_planner(WORLD_SIZE, constraints=constraints, **SPLITS_PAY)
    plan = planner.plan(model, [EmbeddingCollectionSharder(), *bag_sharders()])
    assert widths_of(plan)["ids.s0"] == [16] * WORLD_SIZE


@pytest.mark.parametrize(
    "arguments",
    [
        {"placement_constraints": PlacementConstraints(pin={"t0": [1, 2]})},
        {"dedup": True},
    ],
    ids=["few ranks", "repeated ids are removed"],
)
def test_these_tables_stay_whole(arguments: dict[str, Any]) -> None:
    _, plan = planned((64,), constraints=each(1, COLUMN), **arguments)
    assert widths_of(plan) == {"t0": [64]}


def test_tables_too_large_for_a_rank_are_split() -> None:
    """Whole tables would be quicker, but no rank has room for one."""
    planner, plan = planned(
        (64, 64),
        topology=gpus(4, hbm_cap=2_300_000),
        constraints=each(2, COLUMN, compute_kernels=["fused"], min_partition=32),
        batch_size=1,
        strict_memory=True,
        cost_model=AnalyticCostModel(launch_ms=1.0),
    )
    assert widths_of(plan) == {"t0": [32, 32], "t1": [32, 32]}
    assert last_result(planner).fallback is None
