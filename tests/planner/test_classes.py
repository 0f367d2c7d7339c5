"""Tables of one class are listed once; plans are the same as if all were listed."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import Adam, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    ATTACHES_OPTIMIZERS,
    bag_sharders,
    each,
    gpus,
    last_result,
    make_ebc,
    make_planner,
    sequences,
)
from torchrec_neuroshard.costs.placement_constraints import PlacementConstraints
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator

GIB = 2**30
pytestmark = ATTACHES_OPTIMIZERS
KINDS = [
    None,
    ["table_wise", "column_wise"],
    ["row_wise", "table_wise"],
    ["table_column_wise", "table_row_wise"],
    ["grid_shard", "column_wise"],
    ["data_parallel", "row_wise", "column_wise"],
]
KERNELS = [None, None, ["fused"], ["fused", "fused_uvm_caching"], ["fused_uvm"]]


def drawn(seed: int) -> tuple[Any, dict[str, Any]]:
    """Return a model, and the arguments of its planner."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 15))
    sizes = [
        (int(10 ** rng.uniform(2, 6)), int(rng.choice([8, 32, 128, 1024])))
        for _ in range(count)
    ]
    types = {i: DataType.FP16 for i in range(count) if rng.random() < 0.3}
    share = [0.0, 0.3, 1.0][seed % 3]
    means = {i: PoolingType.MEAN for i in range(count) if rng.random() < share}
    weighted = not means and bool(rng.random() < 0.3)
    ebc = make_ebc(sizes, data_types=types, poolings=means, weighted=weighted)
    for number, parameter in enumerate(ebc.parameters()):
        optimizer = Adam if (seed + number) % 5 == 0 else RowWiseAdagrad
        apply_optimizer_in_backward(optimizer, [parameter], {"lr": 0.1})
    constraints = {
        f"t{i}": ParameterConstraints(
            sharding_types=KINDS[rng.integers(len(KINDS))],
            compute_kernels=KERNELS[rng.integers(len(KERNELS))],
            min_partition=[None, 16, 32][rng.integers(3)],
            pooling_factors=[float(rng.integers(1, 40))],
            cache_params=[None, CacheParams(load_factor=0.3)][rng.integers(2)],
        )
        for i in range(count)
        if rng.random() < 0.8
    }
    model: nn.Module = ebc
    if seed % 2:
        dims = [int(rng.choice([16, 64, 128]))] * 3
        limits = {"sharding_types": ["column_wise", "table_wise", "row_wise"]}
        constraints |= {
            f"s{i}": ParameterConstraints(pooling_factors=[20.0 * i + 1], **limits)
            for i in range(3)
        }
        rows = int(10 ** rng.uniform(2, 6))
        model = nn.ModuleList([ebc, sequences(*dims, rows=rows)])
    arguments: dict[str, Any] = {
        "topology": gpus(8, [8, 4][seed % 2], hbm_cap=GIB * [80, 1][seed % 3 == 0]),
        "batch_size": [64, 512][seed % 2],
        "constraints": constraints,
    }
    if seed % 4 == 1:
        together = [["t0", "t1"]] if rng.random() < 0.5 else []
        arguments["placement_constraints"] = PlacementConstraints(
            pin={f"t{count - 1}": [0, 1, 2, 3]}, together=together
        )
    return model, arguments


def outcome(model: nn.Module, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return whether ways were listed by class, and the plan with its costs."""
    planner = make_planner(**arguments)
    try:
        plan: ShardingPlan = planner.plan(model, get_default_sharders())
    except Exception as error:
        return None, type(error), str(error)
    by_class = not planner.enumerator.listed
    return by_class, str(plan), last_result(planner).predicted.phases_WS6.tolist()


IN_FULL = {1, 7}
"""Seeds whose models may need all options: a mean may need rows."""


@pytest.mark.parametrize("seed", range(8))
def test_plans_are_the_same_as_if_all_options_were_listed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, arguments = drawn(seed)
    by_class, *short = outcome(model, arguments)
    assert by_class or seed in IN_FULL
    monkeypatch.setattr(
        NeuroShardEnumerator, "by_class", lambda _: contextlib.nullcontext()
    )
    in_full, *long = outcome(model, arguments)
    assert short == long
    assert not in_full


def test_torchrecs_filters_run_once_for_each_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inputs make no class; constraints and settings of a table do."""
    asked: list[str] = []
    narrowed = NeuroShardEnumerator.narrowed_types

    def note(self: Any, table: str, types: list[str]) -> list[str]:
        asked.append(table)
        return narrowed(self, table, types)

    monkeypatch.setattr(NeuroShardEnumerator, "narrowed_types", note)
    limits = each(20, "table_wise", "row_wise")
    for i in range(20):
        limits[f"t{i}"] = dataclasses.replace(limits[f"t{i}"], pooling_factors=[i + 1])
    limits["t7"] = dataclasses.replace(limits["t7"], sharding_types=["row_wise"])
    model = make_ebc([(100 + i, 32 if i % 2 else 64) for i in range(20)])
    model.embedding_bag_configs()[9].some_new_setting = True
    make_planner(topology=gpus(4), constraints=limits).plan(model, bag_sharders())
    assert asked == ["t0", "t1", "t7", "t9"]


def test_the_search_space_holds_the_options_of_the_plan() -> None:
    planner = make_planner(topology=gpus(2))
    planner.plan(make_ebc([(1000, 64)] * 3), bag_sharders())
    stored = planner.enumerator.last_stored_search_space
    chosen = planner.get_selected_options()
    assert [o.storage_hash() for o in stored] == [o.storage_hash() for o in chosen]
    assert all(shard.rank is None for o in stored for shard in o.shards)
    every = planner.enumerator.all_options(make_ebc([(1000, 64)] * 3), bag_sharders())
    assert len(every) > len(stored)


@pytest.mark.parametrize("rows", [1000, 10**7])
def test_means_that_may_need_rows_are_listed_in_full(rows: int) -> None:
    """A MEAN table in rows makes all tables of its module row-wise."""
    planner = make_planner(topology=gpus(2, hbm_cap=2 * GIB))
    sizes = [(1000, 64), (rows, 64), (rows // 2, 64)]
    means = {1: PoolingType.MEAN, 2: PoolingType.MEAN}
    planner.plan(make_ebc(sizes, poolings=means), bag_sharders())
    assert bool(planner.enumerator.listed) == (rows > 1000)


def test_fields_of_later_releases_follow_the_sharding_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TorchRec may add a field to options that depends on the sharding type."""
    populate = NeuroShardEnumerator.populate_estimates

    def newer(self: Any, options: list[Any]) -> None:
        for option in options:
            option.num_nodes = 2 if option.sharding_type == "table_row_wise" else None
        populate(self, options)

    monkeypatch.setattr(NeuroShardEnumerator, "populate_estimates", newer)
    planner = make_planner(topology=gpus(8, 4))
    enumerator, model = planner.enumerator, make_ebc([(1000 + i, 64) for i in range(4)])
    with enumerator.by_class():
        stand_ins = enumerator.enumerate(model, bag_sharders())
    ways = enumerator.ways_in(stand_ins)
    for option in ways.options(range(ways.num_rows)):
        expected = 2 if option.sharding_type == "table_row_wise" else None
        assert option.num_nodes == expected
    names = {option.name for option in ways.options(range(ways.num_rows))}
    assert names == {"t0", "t1", "t2", "t3"}


def test_statistics_of_a_proposal_that_does_not_fit_have_times() -> None:
    planner = make_planner(
        topology=gpus(2, hbm_cap=2**23),
        constraints=each(2, compute_kernels=["fused"]),
        stats=None,
        strict_memory=True,
    )
    with pytest.raises(PlannerError, match="MiB"):
        planner.plan(make_ebc([(100_000, 64)] * 2), bag_sharders())
