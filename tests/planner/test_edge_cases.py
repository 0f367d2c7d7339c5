"""Odd constraints, topologies, modules and planner arguments.

The planner is as a user gets it, but for costs that can be worked out by hand and a
search that is cut short. Each case works or ends in an error that names the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import re
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import (
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import CustomTopologyData, PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import BoundsCheckMode, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.builders import (
    MIB,
    bag_config,
    bag_sharders,
    bags,
    by_table,
    check_plan,
    check_result,
    cost_of,
    each,
    entry_of,
    gpus,
    last_result,
    last_task,
    make_ebc,
    make_planner,
    only,
    shards_of,
    stock_planner,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.compat import POD_VARIABLES
from torchrec_neuroshard.planner.groups import check_pods
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.search import SearchConfig

TORCHREC = tuple(int(n) for n in version("torchrec").split(".")[:2])


def plan_of(
    module: nn.Module, world_size: int = 2, **arguments: Any
) -> tuple[ShardingPlan, NeuroShardPlanner]:
    """Plan, and check that every value of every table is placed exactly once."""
    planner = make_planner(world_size, "cuda", **arguments)
    plan = planner.plan(module, get_default_sharders())
    check_plan(plan, module, world_size)
    if plan.plan:
        assert np.isfinite(cost_of(planner)) and cost_of(planner) > 0
    if planner.last_task is not None:
        check_result(planner)
    return plan, planner


# Constraints.

IN_PLAN: dict[str, Any] = {
    "enforce_hbm": True,
    "stochastic_rounding": False,
    "bounds_check_mode": BoundsCheckMode.FATAL,
    "output_dtype": DataType.FP16,
}
"""Fields that `DistributedModelParallel` reads from the plan."""

OTHERS = """sharding_types compute_kernels min_partition pooling_factors num_poolings
batch_sizes is_weighted cache_params device_group key_value_params feature_names
use_virtual_table"""
"""Fields that the planner itself reads, or TorchRec's enumerator."""


def test_settings_reach_the_plan_and_no_field_is_left_out() -> None:
    known = {f.name for f in dataclasses.fields(ParameterConstraints)}
    assert known <= {*OTHERS.split(), *IN_PLAN}
    fields = [{}, *({name: value} for name, value in IN_PLAN.items())]
    constraints: dict[str, ParameterConstraints] = {}
    for i, field in enumerate(fields):
        constraints |= only(f"t{i}", sharding_types=["table_wise"], **field)
    planner = make_planner(2, "cuda", constraints=constraints)
    plan = planner.plan(make_ebc([(1000, 64)] * len(fields)), bag_sharders())
    for i, field in enumerate(fields):
        entry = entry_of(plan, f"t{i}")
        assert {n: getattr(entry, n) for n in IN_PLAN} == dict.fromkeys(IN_PLAN) | field
    # TorchRec gives tables of unlike settings kernels of their own.
    assert last_task(planner).num_groups == len(fields)


@pytest.mark.parametrize("least", [3, 100])
def test_min_partition_below_four_or_above_the_width(least: int) -> None:
    limits = each(1, "table_wise", "column_wise", min_partition=least)
    table = bag_config(0, rows=50_000, dim=64)
    plan, _ = plan_of(bags(table), 4, constraints=limits)
    widths = [w for _, w, _ in shards_of(plan)["t0"]]
    assert not any(w % 4 for w in widths) and min(widths) >= min(least, 64)
    assert (len(widths) > 1) == (least == 3)


def test_grids_with_varying_batches_are_left_out_before_1_9() -> None:
    """They are left out for all tables of a module, whose features are one tensor."""

    def kind(*types: str) -> str:
        limits = only(sharding_types=list(types)) | only("t1", batch_sizes=[8])
        module = bags(bag_config(dim=64), bag_config(1, dim=64))
        plan, _ = plan_of(module, 4, topology=gpus(4, 2), constraints=limits)
        return str(entry_of(plan).sharding_type)

    if TORCHREC >= (1, 9):
        assert kind("grid_shard") == "grid_shard"
        return
    assert kind("grid_shard", "table_row_wise") == "table_row_wise"
    with pytest.raises(ConfigError, match=r"'t0' .*; it has 8 beside \d+\."):
        kind("grid_shard")


def test_tables_of_another_device_group_are_left_out() -> None:
    here, there = bags(bag_config(0)), bags(bag_config(1))
    model, both = nn.ModuleDict({"a": here, "b": there}), bags(*map(bag_config, (0, 1)))
    sharders = get_default_sharders()

    def told(name: str, group: str, device: str) -> Any:
        text = (
            f"tables '{name}' are not in the plan: .* device_group '{group}'.*{device}"
        )
        return pytest.warns(UserWarning, match=text)

    constraints = by_table(device_group=["cuda", "cpu"])
    planner = make_planner(2, "cuda", constraints=constraints)
    with told("t1", "cpu", "cuda"):
        assert set(planner.plan(both, sharders).plan[""]) == {"t0"}
    assert [n.code for n in last_result(planner).notes] == ["unsharded"]
    with told("t0", "cuda", "cpu"):
        plan = make_planner(2, constraints=constraints).plan(both, sharders)
    assert set(plan.plan[""]) == {"t1"}
    with told("b.t1", "cpu", "cuda"):
        if TORCHREC < (1, 7):
            assert set(planner.plan(model, sharders).plan) == {"a"}
        else:
            # TorchRec wants every module in every plan, and names those left out.
            with pytest.raises(PlannerError, match="'b'"):
                planner.plan(model, sharders)
    # By path, and with no table left.
    constraints = {"a/t0": ParameterConstraints(device_group="gpu")}
    planner = make_planner(2, "cuda", constraints=constraints)
    model = nn.ModuleDict({"a": here})
    with told("a.t0", "gpu", "cuda"):
        plan = planner.plan(model, sharders)
    assert not plan.plan


def test_constraints_of_a_given_enumerator_are_kept() -> None:
    """The memory of its estimator is also kept."""
    topology, limits = gpus(4), each(1, "table_wise", "column_wise", min_partition=128)
    theirs = EmbeddingEnumerator(topology, 64, constraints=limits)
    table = bag_config(0, rows=100_000, dim=256)
    plan, planner = plan_of(bags(table), 4, topology=topology, enumerator=theirs)
    assert [width for _, width, _ in shards_of(plan)["t0"]] == [128, 128]
    [kept] = planner.get_selected_options()
    listed = {o.storage_hash(): o.shards for o in theirs.last_stored_search_space or ()}
    known = listed[kept.storage_hash()]
    assert [s.storage for s in kept.shards] == [s.storage for s in known]


# Topologies.


def test_pods_of_several_nodes() -> None:
    kinds = only(sharding_types=["table_row_wise"])
    topology = gpus(8, 2, pod_size=2)
    plan, _ = plan_of(bags(), 8, topology=topology, constraints=kinds)
    ranks = entry_of(plan).ranks
    # Two nodes of two ranks are a pod, which holds all rows of a table.
    assert len(ranks) == 4 and len({r // 4 for r in ranks}) == 1
    assert rehearse(bags(), plan, topology, batch_size=32).runs


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "pod_size"), [(12, 4, 2), (2, 2, 2), (4, 2, 4)]
)
def test_pods_that_do_not_fill_the_ranks_only_matter_to_tables_in_pods(
    num_ranks: int, per_node: int, pod_size: int
) -> None:
    topology = gpus(num_ranks, per_node, pod_size=pod_size)
    told = f"pod.* of {per_node * pod_size} ranks, which do not fill the {num_ranks} "
    for kind in ("table_row_wise", "grid_shard"):
        limits = only(sharding_types=[kind], min_partition=16)
        with pytest.raises(ConfigError, match=f"table 't0' .*{told}"):
            plan_of(bags(), num_ranks, topology=topology, constraints=limits)
    for kinds in (["table_wise", "column_wise"], ["table_row_wise", "row_wise"], None):
        limits = only(sharding_types=kinds)
        plan, _ = plan_of(bags(), num_ranks, topology=topology, constraints=limits)
        assert entry_of(plan).sharding_type != "table_row_wise"
        assert rehearse(bags(), plan, topology, batch_size=32).runs


def test_a_job_without_the_pods_of_its_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topology = gpus(8, 2, pod_size=2)
    kinds = only(sharding_types=["table_row_wise"])
    plan, _ = plan_of(bags(), 8, topology=topology, constraints=kinds)
    other, _ = plan_of(bags(), 8, topology=topology)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name in POD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    check_pods(topology, other)
    check_pods(gpus(8, 2), plan)
    told = r"'t0' .* pods of 4 ranks .* groups of 2, .*TORCHREC_RESOLVED_POD_SIZE=2"
    with pytest.raises(ConfigError, match=told):
        check_pods(topology, plan)
    for name in POD_VARIABLES:
        monkeypatch.setenv(name, "2")
    check_pods(topology, plan)


@pytest.mark.parametrize(
    ("rows", "block", "optimizer", "ranks", "runs"),
    [
        (2000, 32, "EXACT_ROWWISE_ADAGRAD", (8, 2, 2), False),
        (2000, 32, "EMAINPLACE_ROWWISE_ADAGRAD", (8, 2, 4), False),
        (2000, 64, "EXACT_ROWWISE_ADAGRAD", (4, 1, 2), False),
        (1, 64, "EXACT_ROWWISE_ADAGRAD", (8, 2, None), False),
        # One block, no pods, or no state per row.
        (2000, 128, "EXACT_ROWWISE_ADAGRAD", (8, 2, 2), True),
        (2000, 64, "EXACT_ROWWISE_ADAGRAD", (8, 2, None), True),
        (3, 64, "EXACT_ROWWISE_ADAGRAD", (8, 4, None), True),
        (2000, 64, "EXACT_ROWWISE_ADAGRAD", (4, 1, None), True),
        (2000, 32, "EXACT_ADAGRAD", (8, 2, 2), True),
        (1, 64, "EXACT_SGD", (8, 2, None), True),
    ],
)
def test_grids_whose_optimizer_state_torchrec_cannot_build_are_left_out(
    rows: int,
    block: int,
    optimizer: str,
    ranks: tuple[int, int, int | None],
    runs: bool,
) -> None:
    world_size, per_node, pod = ranks
    topology = gpus(world_size, per_node, **{"pod_size": pod} if pod else {})
    table = bags(bag_config(0, rows=rows, dim=128))
    sharders = [EmbeddingBagCollectionSharder({"optimizer": EmbOptimType[optimizer]})]
    grid = only(sharding_types=["grid_shard"], min_partition=block)
    stock = stock_planner(topology, constraints=grid).plan(table, sharders)
    report = rehearse(table, stock, topology, sharders, batch_size=64)
    told = [fault for rank in report.ranks for fault in rank.faults]
    ours = r"'t0'.*TorchRec cannot build the state per row of \w+ for grid.*Allow other"
    for message in ("Total volume of shards", ours):
        assert any(re.search(message, fault) for fault in told) != runs, told
    planner = make_planner(topology=topology, constraints=grid)
    if runs:
        plan = planner.plan(table, sharders)
    else:
        with pytest.raises(ConfigError, match=f"table {ours}"):
            planner.plan(table, sharders)
        both = only(sharding_types=["grid_shard", "table_row_wise"])
        planner = make_planner(topology=topology, constraints=both)
        plan = planner.plan(table, sharders)
    assert rehearse(table, plan, topology, sharders, batch_size=64).runs


@pytest.mark.parametrize(
    ("caps", "rows", "kernel"),
    [
        # An even part, 59 MiB, does not fit the third rank.
        ([100, 150, 50, 100], [240_000, 360_000, 120_000, 240_000], "fused"),
        # It fits, and ranks have as much to do.
        ([100, 150, 50, 100], [10, 10, 10, 10], "fused"),
        # Buckets of five rows.
        ([200, 100, 100], [20, 10, 15], "dram_virtual_table"),
    ],
)
def test_unequal_memory_makes_unequal_row_shards_where_even_ones_do_not_fit(
    caps: list[int], rows: list[int], kernel: str
) -> None:
    virtual = kernel == "dram_virtual_table"
    buckets = {"use_virtual_table": True, "total_num_buckets": sum(rows) // 5}
    table = bag_config(0, sum(rows), 64, **buckets if virtual else {})
    data = CustomTopologyData({"hbm_cap": [cap * MIB for cap in caps]}, len(caps))
    topology = gpus(len(caps), custom_topology_data=data)
    limits = only(sharding_types=["row_wise"], compute_kernels=[kernel])
    plan, _ = plan_of(bags(table), len(caps), topology=topology, constraints=limits)
    found = [m.shard_sizes[0] for m in entry_of(plan).sharding_spec.shards]
    stock = EmbeddingEnumerator(topology, 64, limits)
    [option] = stock.enumerate(bags(table), get_default_sharders())
    assert found == rows
    assert (found == [s.size[0] for s in option.shards]) == (len(set(rows)) > 1)


def test_tables_fit_what_a_reservation_leaves() -> None:
    given = HeuristicalStorageReservation(0.15)
    # Two tables of 24.4 MiB; what is kept back takes the room of one.
    _, planner = plan_of(
        make_ebc([(100_000, 64)] * 2),
        1,
        topology=gpus(1, hbm_cap=56 * MIB),
        storage_reservation=given,
    )
    reserved = given.last_reserved_topology
    assert reserved is not None
    held = [s.storage.hbm for o in planner.get_selected_options() for s in o.shards]
    assert sum(held) <= reserved.devices[0].storage.hbm < 56 * MIB


# The planner's own arguments and promises.


def test_timeout_holds_inside_a_long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_ebc([(1000 + 37 * i, 64) for i in range(80)])
    clock = itertools.count(0.0, 0.05)  # of which each look takes a while
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    long = SearchConfig(effort=1000.0)
    plan_of(module, 8, timeout_seconds=1, search=long)
    # The rest of the planning is not part of the search.
    assert 1 < next(clock) < 3


def test_planner_takes_one_model_after_another() -> None:
    planner = make_planner(2, "cuda")
    models = [bags(), bags(bag_config(7, dim=64)), bags(), nn.Linear(2, 2)]
    plans, results = [], []
    for model in models:
        plans.append(planner.plan(model, get_default_sharders()))
        results.append(planner.last_result)
    assert str(plans[0]) == str(plans[2]) != str(plans[1])
    assert results[0] is not None and results[3] is None
    again = pickle.loads(pickle.dumps((plans[0], results[0])))
    assert str(again[0]) == str(plans[0]) and again[1] == results[0]


SIZES = [(1000, 64)] * 2


class MyCollection(EmbeddingBagCollection):
    """A subclass, for which no sharder is registered."""


def test_unused_tables_and_constraints_are_noted() -> None:
    other = make_ebc([(9, 8)], prefix="other ")
    other.__class__ = MyCollection
    untaken = "tables 'other t0' are not sharded.* module 'b' of class MyCollection"
    for name, factors, model, message in (
        ("t0", [1.0, 3.0], {}, "'t0': pooling_factors has 2 values for 1 feature"),
        ("t_0", [3.0], {}, "table 't_0', which the model .* did you mean 't0'"),
        ("t0", [1.0], {"b": other}, untaken),
    ):
        constraints = only(name, pooling_factors=factors)
        planner = make_planner(2, "cuda", constraints=constraints)
        module = nn.ModuleDict({"a": make_ebc(SIZES), **model})
        with pytest.warns(UserWarning, match=message):
            plan = planner.plan(module, bag_sharders())
        assert set(plan.plan) == {"a"} and set(plan.plan["a"]) == {"t0", "t1"}
        noted = {n.code: n for n in last_result(planner).notes}
        [code] = noted.keys() & {"constraints", "unsharded"}
        assert re.search(message, noted[code].text)
        assert noted[code].table == (None if code == "unsharded" else name)
