"""Odd constraints, topologies, modules and planner arguments.

The planner is as a user gets it, but for costs that can be worked out by hand and a
search that is cut short. Each case works or ends in an error that names the table.
"""

from __future__ import annotations

import itertools
import pickle
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    ParameterConstraints,
    Topology,
    storage_reservations,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    PlannerError,
    StorageReservation,
)
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    CacheAlgorithm,
    CacheParams,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)

from tests.builders import (
    GIB,
    META,
    MIB,
    Chosen,
    bag_config,
    bags,
    check_plan,
    check_result,
    columns_only,
    cost_of,
    entry_of,
    fused_bags,
    gpus,
    make_planner,
    only,
    sequences,
    shards_of,
    stock_planner,
    types_of,
)
from torchrec_neuroshard import rehearse
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import (
    NeuroShardPlanner,
)
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


def searched(
    module: nn.Module, *args: Any, **arguments: Any
) -> tuple[ShardingPlan, NeuroShardPlanner]:
    """`plan_of`, of column shards alone, however cheap other types look."""
    arguments["constraints"] = columns_only(module, arguments.get("constraints"))
    return plan_of(module, *args, search_only=True, **arguments)


# Constraints.


@pytest.mark.parametrize(
    "kind",
    [
        "row_wise",
        "table_column_wise",
        "grid_shard",
        "data_parallel",
    ],
)
def test_one_sharding_type_is_allowed(kind: str) -> None:
    plan, _ = plan_of(
        bags(bag_config(0, dim=256), bag_config(1), bag_config(2)),
        4,
        topology_arguments={"local_world_size": 2},
        constraints=only(sharding_types=[kind]),
    )
    assert entry_of(plan).sharding_type == kind


@pytest.mark.parametrize("least", [3, 30, 100])
def test_min_partition_below_four_not_a_divisor_or_above_the_width(
    least: int,
) -> None:
    plan, _ = plan_of(
        bags(bag_config(0, rows=50_000, dim=64)),
        4,
        constraints=only(
            min_partition=least, sharding_types=["table_wise", "column_wise"]
        ),
    )
    widths = [w for _, w, _ in shards_of(plan)["t0"]]
    assert sum(widths) == 64 and not any(w % 4 for w in widths)
    assert widths == [64] or min(widths) >= least
    if least <= 30:
        assert len(widths) > 1


def test_num_poolings_multiply_the_lookups() -> None:
    _, planner = searched(
        bags(bag_config(0, feature_names=["a", "b"])),
        constraints=only(pooling_factors=[5.0, 2.0], num_poolings=[1.0, 3.0]),
    )
    assert planner.last_task is not None
    assert planner.last_task.tables[0].pooling_factor == 11.0


def test_batch_sizes_scale_the_lookups() -> None:
    _, planner = searched(
        bags(bag_config(0, feature_names=["a", "b"])),
        constraints=only(pooling_factors=[5.0, 2.0], batch_sizes=[64, 16]),
    )
    assert planner.last_task is not None
    assert planner.last_task.tables[0].pooling_factor == 5.5


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


def test_no_pooling_factors_are_no_lookups() -> None:
    """As in TorchRec's estimates."""
    costs = []
    for factors in ([], [0.0]):
        constraints = only(sharding_types=["row_wise"], pooling_factors=factors)
        _, planner = plan_of(bags(), constraints=constraints)
        assert planner.last_result is not None
        costs.append(planner.last_result.predicted.critical_path_ms)
    assert costs[0] == costs[1]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"cache_params": CacheParams(load_factor=0.0)}, r"t0.*load_factor is 0\.0; g"),
        ({"cache_params": CacheParams(load_factor=1.0)}, r"t0.*compute_kernels=\['fus"),
        ({"enforce_hbm": True}, r"t0.*enforce_hbm is True.*fused_uvm_caching.*allow"),
        (
            {
                "cache_params": CacheParams(
                    algorithm=CacheAlgorithm.LFU, prefetch_pipeline=True
                )
            },
            r"t0.*LFU and prefetch_pipeline.*leave one",
        ),
    ],
)
def test_caches_that_cannot_be_are_refused(fields: Any, match: str) -> None:
    constraints = only(compute_kernels=["fused_uvm_caching"], **fields)
    with pytest.raises(ConfigError, match=match):
        user_planner(constraints=constraints)


def test_kernel_that_the_device_lacks_is_named() -> None:
    class Optimistic(EmbeddingBagCollectionSharder):
        def compute_kernels(self, kind: str, device: str) -> list[str]:
            return list(super().compute_kernels(kind, "cuda"))

    planner = user_planner(
        device="cpu", constraints=only(compute_kernels=["fused_uvm"])
    )
    with pytest.raises(PlannerError, match=r"'t0'.* no kernel 'fused_uvm' for 'cpu'"):
        planner.plan(bags(), [Optimistic()])


def test_tables_of_another_device_group_are_left_out() -> None:
    model = nn.ModuleDict({"here": bags(bag_config(0)), "there": bags(bag_config(1))})
    constraints = {
        "t0": ParameterConstraints(device_group="cuda"),
        "t1": ParameterConstraints(device_group="cpu"),
    }
    planner = user_planner(constraints=constraints)
    if TORCHREC < (1, 7):
        assert set(planner.plan(model, get_default_sharders()).plan) == {"here"}
        return
    # TorchRec wants every module in every plan, and names those left out.
    with pytest.raises(PlannerError, match="there"):
        planner.plan(model, get_default_sharders())
    plan, _ = plan_of(bags(bag_config(0), bag_config(1)), constraints=constraints)
    assert set(plan.plan[""]) == {"t0"}


@pytest.mark.parametrize("both", [False, True])
def test_enumerator_with_the_constraints(both: bool) -> None:
    constraints = dict(only(sharding_types=["table_wise"]))
    topology = Topology(4, "cuda")
    enumerator = EmbeddingEnumerator(topology, 64, constraints=constraints)
    plan, _ = plan_of(
        bags(bag_config(0, rows=100_000, dim=256)),
        4,
        enumerator=enumerator,
        constraints=constraints if both else None,
    )
    assert types_of(plan)["t0"] == "table_wise"


# Topologies.


def test_several_nodes_name_their_local_devices() -> None:
    plan, _ = plan_of(
        bags(*(bag_config(i, dim=32) for i in range(8))),
        8,
        topology_arguments={"local_world_size": 4},
    )
    seen = set()
    for sharding in plan.plan[""].values():
        for meta in sharding.sharding_spec.shards:
            rank = meta.placement.rank()
            seen.add(rank)
            assert meta.placement.device() == torch.device(f"cuda:{rank % 4}")
    assert seen == set(range(8))


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


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", None), ("cuda", None), ("cuda", "table_row_wise")]
)
def test_ranks_that_do_not_fill_their_nodes(device: str, kind: str | None) -> None:
    """TorchRec plans for them; placements name the devices of the nodes as given."""
    constraints = only(sharding_types=[kind]) if kind else {}
    with pytest.warns(UserWarning, match="8 ranks do not fill nodes of 6: .* of 4"):
        plan, planner = plan_of(
            bags(),
            8,
            device,
            topology_arguments={"local_world_size": 6},
            constraints=constraints,
            comms_model=None,
        )
    known = planner.last_result
    assert known is not None
    assert any("do not fill nodes of 6" in w for w in known.warnings)
    if device == "cuda":
        for sharding in plan.plan[""].values():
            for meta in sharding.sharding_spec.shards:
                rank = meta.placement.rank()
                assert meta.placement.device() == torch.device("cuda", rank % 6)


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


def test_a_table_larger_than_the_memory_is_split() -> None:
    plan, planner = plan_of(
        bags(bag_config(0, rows=100_000, dim=64)),  # 24.4 MiB
        topology_arguments={"hbm_cap": 16 * MIB},
        constraints=only(sharding_types=["table_wise", "column_wise"]),
    )
    assert [w for _, w, _ in shards_of(plan)["t0"]] == [32, 32]
    result = planner.last_result
    assert result is not None and result.fallback is None
    assert [s.width for s in result.placement.shards] == [32, 32]


def test_tables_are_offloaded_where_a_reservation_leaves_no_room() -> None:
    plan, planner = plan_of(
        bags(bag_config(0, rows=100_000, dim=64)),
        topology_arguments={"hbm_cap": 128 * MIB},
        constraints=only(sharding_types=["table_wise"]),
        storage_reservation=storage_reservations.FixedPercentageStorageReservation(0.9),
        consider_stock=False,
    )
    assert entry_of(plan).compute_kernel in ("fused_uvm", "fused_uvm_caching")
    assert planner.last_result is not None and planner.last_result.fallback is None


def test_a_table_larger_than_all_memory_is_named() -> None:
    planner = user_planner(
        topology_arguments={"hbm_cap": 4 * MIB},
        constraints=only(compute_kernels=["fused"]),
    )
    with pytest.raises(
        PlannerError,
        match=r"(?s)^table 't0'.*needs 0\.02 GiB.*raise world_size.*Unable to find a p",
    ):
        planner.plan(bags(bag_config(0, rows=100_000, dim=64)), get_default_sharders())
    assert planner.last_result is None


# Modules.


def test_module_nested_deep() -> None:
    model = nn.Sequential(nn.ModuleDict({"a": nn.Sequential(bags())}))
    plan, planner = searched(model)
    assert list(plan.plan) == ["0.a.0"]
    assert planner.last_task is not None
    assert planner.last_task.tables[0].name == "0.a.0.t0"


def test_several_collections_of_both_kinds() -> None:
    model = nn.ModuleDict(
        {
            "a": bags(bag_config(0), bag_config(1)),
            "b": bags(bag_config(0), weighted=True),
            "c": sequences(32),
            "d": sequences(64, prefix="z"),
        }
    )
    plan, planner = searched(model, constraints=only("s0", pooling_factors=[5.0]))
    assert {p: set(m) for p, m in plan.plan.items()} == {
        "a": {"t0", "t1"},
        "b": {"t0"},
        "c": {"s0"},
        "d": {"z0"},
    }
    assert planner.last_task is not None
    tables = {t.name: t for t in planner.last_task.tables}
    groups = dict(zip(tables, planner.last_task.groups, strict=True))
    assert len(set(groups.values())) == 4
    # The same table name in two modules is two tables.
    assert tables["b.t0"].weighted and not tables["a.t0"].weighted
    # A row for each id.
    assert (tables["c.s0"].num_features, tables["d.z0"].num_features) == (5, 1)


@pytest.mark.parametrize("model", [EmbeddingBagCollection([], device=META), nn.ReLU()])
def test_nothing_to_shard(model: nn.Module) -> None:
    plan, planner = plan_of(model)
    assert not any(plan.plan.values()) and planner.last_task is None
    if isinstance(model, nn.ReLU):
        assert plan.plan == {} and planner.last_result is None


def test_tables_that_no_search_places_share_the_ranks() -> None:
    # Each alone is read fastest by rows, all together by tables.
    model = QuantEmbeddingBagCollection(
        tables=[bag_config(i, data_type=DataType.INT8) for i in range(12)],
        is_weighted=False,
        device=META,
    )
    sharders: list[Any] = [QuantEmbeddingBagCollectionSharder()]
    _, planner = plan_of(model, 4, sharders=sharders, consider_stock=False)
    theirs = stock_planner(planner.topology).plan(model, sharders)
    cost = planner.evaluate(theirs, model, sharders).critical_path_ms
    assert cost_of(planner) <= cost * (1 + 1e-9)


# Kinds of tables.


def test_mean_and_sum_pooling_in_one_collection() -> None:
    _, planner = searched(
        bags(bag_config(0), bag_config(1, pooling=PoolingType.MEAN), bag_config(2))
    )
    assert planner.last_task is not None
    groups = planner.last_task.groups
    assert groups[0] == groups[2] != groups[1]
    assert planner.last_task.num_stages == 1


@pytest.mark.parametrize("least", [None, (16, 32)])
def test_sequence_shards_have_one_width(least: tuple[int, int] | None) -> None:
    sizes: tuple[Any, ...] = least or (None, None)
    constraints = {
        f"s{i}": ParameterConstraints(
            sharding_types=["column_wise"], min_partition=size
        )
        for i, size in enumerate(sizes)
    }
    plan, _ = plan_of(sequences(64, 64), 4, constraints=constraints)
    widths = {w for shards in shards_of(plan).values() for _, w, _ in shards}
    assert len(widths) == 1


def test_table_on_ssd() -> None:
    plan, _ = plan_of(
        bags(),
        topology_arguments={"ssd_cap": 2**40},
        constraints=only(compute_kernels=["key_value"]),
    )
    assert entry_of(plan).compute_kernel == "key_value"


# The planner's own arguments and promises.


def test_timeout_holds_inside_a_long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [bag_config(i, rows=1000 + 37 * i, dim=64) for i in range(80)]
    clock = itertools.count(0.0, 0.05)  # of which each look takes a while
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    long = SearchConfig(effort=1000.0)
    plan_of(bags(*tables), 8, "cpu", timeout_seconds=1, search=long)
    # The rest of the planning is not part of the search.
    assert 1 < next(clock) < 3


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


RESERVATIONS: dict[str, Callable[[], StorageReservation]] = {
    "heuristical": lambda: storage_reservations.HeuristicalStorageReservation(0.15),
    "plain": PlainReservation,
}


@pytest.mark.parametrize("name", RESERVATIONS)
def test_storage_reservation(name: str) -> None:
    given, chosen = RESERVATIONS[name](), Chosen()
    plan, _ = plan_of(
        bags(),
        topology=gpus(hbm_cap=GIB),
        storage_reservation=given,
        callbacks=[chosen],
    )
    assert set(plan.plan[""]) == {"t0", "t1", "t2"}
    reserved = given.last_reserved_topology
    assert reserved is not None
    left = [device.storage.hbm for device in reserved.devices]
    assert all((n == GIB) == (name == "plain") and n > 0 for n in left)
    for rank in range(2):
        held = [
            s.storage.hbm
            for o in chosen.options
            for s in o.shards
            if s.rank == rank and s.storage is not None
        ]
        assert sum(held) <= left[rank]


@pytest.mark.parametrize("name", RESERVATIONS)
def test_storage_reservation_of_a_plan_that_does_not_fit(name: str) -> None:
    planner = user_planner(
        topology_arguments={"hbm_cap": 4 * MIB},
        constraints=only(compute_kernels=["fused"]),
        storage_reservation=RESERVATIONS[name](),
    )
    with pytest.raises(PlannerError, match="t0"):
        planner.plan(bags(bag_config(0, rows=100_000, dim=64)), get_default_sharders())


def test_planner_takes_one_model_after_another() -> None:
    planner = user_planner()
    models = [bags(), bags(bag_config(7, dim=64)), bags(), nn.Linear(2, 2)]
    plans = [str(planner.plan(m, get_default_sharders())) for m in models]
    assert plans[0] == plans[2] != plans[1]
    assert planner.last_result is None


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


def test_plan_can_be_pickled() -> None:
    plan, planner = plan_of(bags())
    assert str(pickle.loads(pickle.dumps(plan))) == str(plan)
    again = pickle.loads(pickle.dumps(planner.last_result))
    assert again == planner.last_result


def test_table_that_fits_without_its_optimizer_is_planned_with_a_warning() -> None:
    """TorchRec counts the state of optimizers set in the backward pass alone."""
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD}
    model = bags(bag_config(0, rows=100_000, dim=64))
    sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params=params)]
    settings: dict[str, Any] = {
        # The weights are 24.4 MiB, so is the state.
        "topology_arguments": {"hbm_cap": 40 * MIB},
        "constraints": only(compute_kernels=["fused"]),
    }
    with pytest.raises(PlannerError, match="t0"):
        user_planner(1, strict_memory=True, **settings).plan(model, sharders)
    planner = user_planner(1, **settings)
    with pytest.warns(UserWarning) as caught:
        planner.plan(model, sharders)
    (warned,) = [str(w.message) for w in caught if "out of memory" in str(w.message)]
    assert re.match(r"out of memory ahead: rank 0 needs 0\.05 GiB .*strict_me", warned)
    assert planner.last_result is not None
    told = ". ".join(w for w in planner.last_result.warnings if w in warned)
    assert told == warned
    (rank,) = planner.report().ranks
    assert rank.used_bytes > 48 * MIB
    plan, size = planner.last_plan, planner.batch_size
    assert plan is not None
    report = rehearse(model, plan, planner.topology, sharders, batch_size=size)
    (fault,) = report.ranks[0].faults
    assert fault.startswith(warned.split(": ")[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_memory_of_the_optimizer_state_is_the_same_by_every_way() -> None:
    """Of one table of 24.4 MiB, in each of the ways that TorchRec knows."""
    config, chosen = bag_config(0, rows=100_000, dim=64), Chosen()
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    applied = bags(config)
    apply_optimizer_in_backward(RowWiseAdagrad, applied.parameters(), {"lr": 0.1})
    found = []
    for model, sharders in (
        (applied, [EmbeddingBagCollectionSharder()]),
        (bags(config), [EmbeddingBagCollectionSharder(fused_params=fused_params)]),
        (fused_bags(config, optimizer=RowWiseAdagrad), get_default_sharders()),
    ):
        plan_of(
            model,
            sharders=sharders,
            constraints=only(
                compute_kernels=["fused"], sharding_types=["table_wise", "column_wise"]
            ),
            callbacks=[chosen],
        )
        shards = [s for o in chosen.options for s in o.shards]
        found.append([(s.size, s.storage.hbm) for s in shards if s.storage])
    assert all(each == found[0] for each in found)
