"""Odd constraints, topologies, modules and planner arguments.

The planner is as a user gets it, but for costs that can be worked out by hand and a
search that is cut short. Each case works or ends in an error that names the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import (
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    PlannerError,
    StorageReservation,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import BoundsCheckMode, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad

from tests.builders import (
    MIB,
    Chosen,
    bag_config,
    bag_sharders,
    bags,
    by_table,
    check_plan,
    check_result,
    columns_only,
    cost_of,
    each,
    entries_of,
    entry_of,
    fused_bags,
    gpus,
    last_task,
    make_ebc,
    make_planner,
    only,
    sequences,
    shards_of,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.testing import AnalyticCostModel

TORCHREC = tuple(int(n) for n in version("torchrec").split(".")[:2])


def user_planner(
    world_size: int = 2, device: str = "cuda", **arguments: Any
) -> NeuroShardPlanner:
    """Other sharding types and TorchRec's own plan are looked at, as by default."""
    return make_planner(world_size, device, **{"search_only": False, **arguments})


def plan_of(
    module: nn.Module,
    world_size: int = 2,
    device: str = "cuda",
    sharders: list[Any] | None = None,
    **arguments: Any,
) -> tuple[ShardingPlan, NeuroShardPlanner]:
    """Plan, and check that every value of every planned table has its place."""
    planner = user_planner(world_size, device, **arguments)
    plan = planner.plan(module, sharders or get_default_sharders())
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
"""Fields that `DistributedModelParallel` reads off the plan."""

OTHERS = """sharding_types compute_kernels min_partition pooling_factors num_poolings
batch_sizes is_weighted cache_params device_group key_value_params feature_names
use_virtual_table"""
"""Fields that the planner itself reads, or TorchRec's enumerator."""


def test_no_field_is_left_out() -> None:
    known = {f.name for f in dataclasses.fields(ParameterConstraints)}
    assert known <= {*OTHERS.split(), *IN_PLAN}


def test_settings_reach_the_plan() -> None:
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


@pytest.mark.parametrize("least", [3, 30, 100])
def test_min_partition_below_four_not_a_divisor_or_above_the_width(
    least: int,
) -> None:
    limits = each(1, "table_wise", "column_wise", min_partition=least)
    table = bag_config(0, rows=50_000, dim=64)
    plan, _ = plan_of(bags(table), 4, constraints=limits)
    widths = [w for _, w, _ in shards_of(plan)["t0"]]
    assert not any(w % 4 for w in widths) and min(widths) >= min(least, 64)
    assert (len(widths) > 1) == (least <= 30)


def test_grids_of_varying_batches_are_left_out_before_1_9() -> None:
    """Of every table of the module: its features come as one tensor."""
    arguments: dict[str, Any] = {"topology_arguments": {"local_world_size": 2}}

    def kind(*types: str) -> str:
        limits = only(sharding_types=list(types)) | only("t1", batch_sizes=[8])
        module = bags(bag_config(dim=64), bag_config(1, dim=64))
        plan, _ = plan_of(module, 4, constraints=limits, **arguments)
        return str(entry_of(plan).sharding_type)

    if TORCHREC >= (1, 9):
        assert kind("grid_shard") == "grid_shard"
        return
    assert kind("grid_shard", "table_row_wise") == "table_row_wise"
    with pytest.raises(
        ConfigError, match=r"'t0' .* batch_sizes has 8 beside \d+\. All"
    ):
        kind("grid_shard")


def test_tables_of_another_device_group_are_left_out() -> None:
    model = nn.ModuleDict({"here": bags(bag_config(0)), "there": bags(bag_config(1))})
    constraints = by_table(device_group=["cuda", "cpu"])
    planner = user_planner(constraints=constraints)
    if TORCHREC < (1, 7):
        assert set(planner.plan(model, get_default_sharders()).plan) == {"here"}
        return
    # TorchRec wants every module in every plan, and names those left out.
    with pytest.raises(PlannerError, match="there"):
        planner.plan(model, get_default_sharders())
    plan, _ = plan_of(bags(bag_config(0), bag_config(1)), constraints=constraints)
    assert set(plan.plan[""]) == {"t0"}


def test_constraints_of_a_given_enumerator_are_kept() -> None:
    topology, limits = gpus(4), each(1, "table_wise", "column_wise", min_partition=128)
    enumerator = EmbeddingEnumerator(topology, 64, constraints=limits)
    table = bag_config(0, rows=100_000, dim=256)
    plan, _ = plan_of(bags(table), 4, topology=topology, enumerator=enumerator)
    assert [width for _, width, _ in shards_of(plan)["t0"]] == [128, 128]


# Topologies.


@pytest.mark.parametrize("node", [4, 6])
def test_placements_name_the_devices_of_nodes_that_ranks_fill_or_not(node: int) -> None:
    plan, _ = plan_of(
        bags(*(bag_config(i) for i in range(8))),
        8,
        topology_arguments={"local_world_size": node},
        constraints=only(sharding_types=["table_row_wise"]),
        comms_model=None,
    )
    for sharding in plan.plan[""].values():
        for meta in sharding.sharding_spec.shards:
            device = torch.device("cuda", meta.placement.rank() % node)
            assert meta.placement.device() == device


@pytest.mark.parametrize(("kind", "count"), [("table_wise", 1), ("table_row_wise", 4)])
def test_pods_of_several_nodes(kind: str, count: int) -> None:
    plan, _ = plan_of(
        bags(bag_config(0, rows=4000)),
        8,
        topology_arguments={"local_world_size": 2, "pod_size": 2},
        constraints=only(sharding_types=[kind]),
    )
    ranks = entry_of(plan).ranks
    assert entry_of(plan).sharding_type == kind
    # Two nodes of two ranks are a pod, which holds all rows of a table.
    assert len(ranks) == count and len({r // 4 for r in ranks}) == 1


def unequal(*caps: int) -> dict[str, Any]:
    return {"custom_topology_data": CustomTopologyData({"hbm_cap": [*caps]}, len(caps))}


@pytest.mark.parametrize(
    ("caps", "rows", "kernel"),
    [
        ([100, 300], [25_000, 75_000], "fused"),
        # The first and the last have an equal part.
        ([100, 150, 50, 100], [10, 15, 5, 10], "fused"),
        # Buckets of five rows.
        ([200, 100, 100], [20, 10, 15], "dram_virtual_table"),
    ],
)
def test_unequal_memory_makes_unequal_row_shards(
    caps: list[int], rows: list[int], kernel: str
) -> None:
    virtual = kernel == "dram_virtual_table"
    buckets = {"use_virtual_table": True, "total_num_buckets": sum(rows) // 5}
    table = bag_config(0, sum(rows), **buckets if virtual else {})
    topology = gpus(len(caps), **unequal(*(cap * MIB for cap in caps)))
    constraints = only(sharding_types=["row_wise"], compute_kernels=[kernel])
    plan, _ = plan_of(
        bags(table), len(caps), topology=topology, constraints=constraints
    )
    found = [m.shard_sizes[0] for m in entry_of(plan).sharding_spec.shards]
    stock = EmbeddingEnumerator(topology, 64, constraints)
    [option] = stock.enumerate(bags(table), get_default_sharders())
    assert found == rows == [s.size[0] for s in option.shards]


class PlainReservation(StorageReservation):
    """Keeps nothing back, and has none of the attributes of TorchRec's own."""

    def __init__(self) -> None:
        self._last: Topology | None = None

    def reserve(self, topology: Topology, *args: Any, **kwargs: Any) -> Topology:
        self._last = topology
        return topology

    @property
    def last_reserved_topology(self) -> Topology | None:
        return self._last


RESERVATIONS = [lambda: HeuristicalStorageReservation(0.15), PlainReservation]


@pytest.mark.parametrize("make", RESERVATIONS)
def test_tables_fit_what_a_reservation_leaves(make: Any) -> None:
    given, chosen = make(), Chosen()
    # Two tables of 24.4 MiB; what is kept back takes the room of one.
    plan_of(
        bags(*(bag_config(i, rows=100_000, dim=64) for i in range(2))),
        1,
        topology=gpus(1, hbm_cap=56 * MIB),
        storage_reservation=given,
        callbacks=[chosen],
    )
    left = given.last_reserved_topology.devices[0].storage.hbm
    assert (left == 56 * MIB) == (make is PlainReservation) and left > 0
    held = [s.storage.hbm for o in chosen.options for s in o.shards if s.storage]
    assert sum(held) <= left


@pytest.mark.parametrize("make", RESERVATIONS)
def test_a_table_larger_than_all_memory_is_named(make: Any) -> None:
    planner = user_planner(
        topology_arguments={"hbm_cap": 4 * MIB},
        constraints=only(compute_kernels=["fused"]),
        storage_reservation=make(),
    )
    with pytest.raises(
        PlannerError, match=r"^table 't0'.*needs 0\.02 GiB.*[Rr]aise world"
    ):
        planner.plan(bags(bag_config(0, rows=100_000, dim=64)), get_default_sharders())
    assert planner.last_result is None


# Modules.


def test_several_collections_of_both_kinds() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Sequential(bags(bag_config(0), bag_config(1)))),
            "b": bags(bag_config(0), weighted=True),
            "c": sequences(32),
            "d": sequences(64, prefix="z"),
        }
    )
    limits = columns_only(model, only("s0", pooling_factors=[5.0]))
    plan, planner = plan_of(model, search_only=True, constraints=limits)
    assert set(entries_of(plan)) == {"a.0.0.t0", "a.0.0.t1", "b.t0", "c.s0", "d.z0"}
    tables = {t.name: t for t in last_task(planner).tables}
    assert last_task(planner).num_groups == 4
    # The same table name in two modules is two tables.
    assert tables["b.t0"].weighted and not tables["a.0.0.t0"].weighted
    # A row for each id.
    assert (tables["c.s0"].num_features, tables["d.z0"].num_features) == (5, 1)


# The planner's own arguments and promises.


def test_timeout_holds_inside_a_long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [bag_config(i, rows=1000 + 37 * i, dim=64) for i in range(80)]
    clock = itertools.count(0.0, 0.05)  # of which each look takes a while
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    long = SearchConfig(effort=1000.0)
    plan_of(bags(*tables), 8, "cpu", timeout_seconds=1, search=long)
    # The rest of the planning is not part of the search.
    assert 1 < next(clock) < 3


def test_planner_takes_one_model_after_another() -> None:
    planner = user_planner()
    models = [bags(), bags(bag_config(7, dim=64)), bags(), nn.Linear(2, 2)]
    plans, results = [], []
    for model in models:
        plans.append(planner.plan(model, get_default_sharders()))
        results.append(planner.last_result)
    assert str(plans[0]) == str(plans[2]) != str(plans[1])
    assert results[0] is not None and results[3] is None
    again = pickle.loads(pickle.dumps((plans[0], results[0])))
    assert str(again[0]) == str(plans[0]) and again[1] == results[0]


# NumPy warns where infinities are subtracted, before the error tells why.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_cost_model_that_predicts_no_time_is_named(value: float) -> None:
    class Broken(AnalyticCostModel):
        name = "broken"

        def predict_sums(
            self, sums_SE: npt.NDArray[np.float64]
        ) -> npt.NDArray[np.float64]:
            return np.full((len(sums_SE), 2), value)

    planner = user_planner(cost_model=Broken())
    with pytest.raises(ConfigError, match=rf"'broken' predicts .*{value:.0f}.* for t0"):
        planner.plan(bags(), get_default_sharders())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_memory_of_the_optimizer_state_is_the_same_by_both_ways() -> None:
    """Of one table of 24.4 MiB, by its sharder or by a module that fuses it."""
    config, chosen = bag_config(0, rows=100_000, dim=64), Chosen()
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    found = []
    for model, sharders in (
        (bags(config), [EmbeddingBagCollectionSharder(fused_params=fused_params)]),
        (fused_bags(config, optimizer=RowWiseAdagrad), get_default_sharders()),
    ):
        plan_of(
            model,
            sharders=sharders,
            constraints=each(1, "table_wise", "column_wise", compute_kernels=["fused"]),
            callbacks=[chosen],
        )
        shards = [s for o in chosen.options for s in o.shards]
        found.append([(s.size, s.storage.hbm) for s in shards if s.storage])
    assert found[0] == found[1]
