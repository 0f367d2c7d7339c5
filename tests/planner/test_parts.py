"""The parts of the planner, each alone inside TorchRec's own planner."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import (
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
)
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    ATTACHES_OPTIMIZERS,
    QUICK,
    FixedSearcher,
    analytic,
    bag_sharders,
    gpus,
    make_ebc,
    stock_planner,
)
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.planner import (
    NeuroShardEnumerator,
    NeuroShardEstimator,
    NeuroShardPartitioner,
    NeuroShardPerfModel,
    NeuroShardProposer,
    PlacementConstraints,
    PlanCosts,
)
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

pytestmark = ATTACHES_OPTIMIZERS

SIZES = [(1000, 16), (2000, 256), (3000, 64), (500, 8)]


def searchable(
    enumerator: EmbeddingEnumerator, module: Any, kind: str
) -> list[ShardingOption]:
    """The fused option of one sharding type of each table."""
    return [
        o
        for o in enumerator.enumerate(module, bag_sharders())
        if o.sharding_type == kind and o.compute_kernel == "fused"
    ]


@pytest.mark.parametrize(
    "part", ["enumerator", "estimator", "proposer", "partitioner", "performance_model"]
)
def test_each_part_works_in_the_stock_planner(part: str) -> None:
    topology = gpus()
    constraints = {"t1": ParameterConstraints(min_partition=32)}
    given: Any = (topology, constraints)
    proposer = NeuroShardProposer(*given, **analytic())
    estimators = [
        NeuroShardEstimator(*given, **analytic()),
        EmbeddingStorageEstimator(*given),
    ]
    partitioner = NeuroShardPartitioner(*given, search=QUICK, **analytic())
    arguments: dict[str, Any] = {
        "enumerator": {
            "enumerator": NeuroShardEnumerator(topology, 64, constraints, **analytic())
        },
        "estimator": {
            "enumerator": EmbeddingEnumerator(topology, 64, constraints, estimators)
        },
        "proposer": {"proposer": proposer},
        # One proposal: each of the stock ones' would be searched.
        "partitioner": {"partitioner": partitioner, "proposer": proposer},
        "performance_model": {
            "performance_model": NeuroShardPerfModel(*given, **analytic())
        },
    }[part]
    planner = stock_planner(topology, constraints=constraints, **arguments)
    plan = planner.plan(make_ebc(SIZES), bag_sharders())
    assert set(plan.plan[""]) == {"t0", "t1", "t2", "t3"}


# --- enumerator -----------------------------------------------------------------


def kinds_of(options: list[ShardingOption]) -> dict[str, list[tuple[str, str]]]:
    """Sharding types and kernels of each table's options, in their order."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for option in options:
        kind = (option.sharding_type, option.compute_kernel)
        kinds.setdefault(option.name, []).append(kind)
    return kinds


def test_enumerator_keeps_one_option_of_each_use() -> None:
    constraints = {
        "t1": ParameterConstraints(sharding_types=["row_wise", "data_parallel"]),
        "t2": ParameterConstraints(sharding_types=["table_row_wise", "table_wise"]),
        "t3": ParameterConstraints(compute_kernels=["fused_uvm"]),
    }
    topology = gpus(4, local_world_size=2)
    enumerator = NeuroShardEnumerator(topology, 64, constraints, **analytic())
    kinds = kinds_of(enumerator.enumerate(make_ebc(SIZES), bag_sharders()))
    assert kinds["t0"] == [
        ("column_wise", "fused"),
        ("data_parallel", "dense"),
        ("row_wise", "fused"),
        ("table_row_wise", "fused"),
        ("table_wise", "fused"),
    ]
    assert kinds["t1"] == [("data_parallel", "dense"), ("row_wise", "fused")]
    assert kinds["t2"] == [("table_row_wise", "fused"), ("table_wise", "fused")]
    assert {k for _, k in kinds["t3"]} == {"fused_uvm"}
    assert len({k for k, _ in kinds["t3"]}) > 2


def test_row_wise_is_not_listed_twice_on_one_node() -> None:
    constraints = {"t1": ParameterConstraints(sharding_types=["table_row_wise"])}
    enumerator = NeuroShardEnumerator(gpus(), 64, constraints, **analytic())
    kinds = kinds_of(enumerator.enumerate(make_ebc(SIZES), bag_sharders()))
    assert "table_row_wise" not in {k for k, _ in kinds["t0"]}
    assert {k for k, _ in kinds["t1"]} == {"table_row_wise"}


def test_host_memory_is_offered_where_device_memory_is_scarce() -> None:
    def kernels(hbm_cap: int, **constraint: Any) -> set[tuple[str, str]]:
        constraints = {"t0": ParameterConstraints(**constraint)}
        enumerator = NeuroShardEnumerator(
            gpus(hbm_cap=hbm_cap), 64, constraints, **analytic()
        )
        found = kinds_of(enumerator.enumerate(make_ebc([(1000, 64)]), bag_sharders()))
        return {(t, k) for t, k in found["t0"] if k not in ("fused", "dense")}

    size = 1000 * 64 * 4
    assert not kernels(hbm_cap=2 * size)
    assert kernels(hbm_cap=2 * size - 1) == {
        (kind, kernel)
        for kind in ("row_wise", "table_wise", "column_wise")
        for kernel in ("fused_uvm", "fused_uvm_caching")
    }
    assert kernels(hbm_cap=100 * size, compute_kernels=["fused", "fused_uvm"]) == {
        (kind, "fused_uvm") for kind in ("row_wise", "table_wise", "column_wise")
    }


@pytest.mark.parametrize(("num_large", "all_offered"), [(1, False), (2, True)])
def test_small_tables_stay_on_the_devices(num_large: int, all_offered: bool) -> None:
    size = 1000 * 64 * 4
    sizes = [(36_000, 64)] * num_large + [(1000, 64)]
    enumerator = NeuroShardEnumerator(gpus(4, hbm_cap=32 * size), 64, **analytic())
    options = enumerator.enumerate(make_ebc(sizes), bag_sharders())
    offered = {o.name for o in options if o.compute_kernel == "fused_uvm"}
    small = {f"t{num_large}"} if all_offered else set()
    assert offered == {f"t{i}" for i in range(num_large)} | small


@pytest.mark.parametrize(
    ("placement", "offered"),
    [
        (PlacementConstraints(pin={"t0": [0, 1]}), False),
        (PlacementConstraints(pin={"t0": [1]}), True),
        (PlacementConstraints(forbid_ranks=[0, 1, 2]), True),
        (PlacementConstraints(together=[["t0", "t1"]]), True),
    ],
)
def test_host_memory_is_offered_where_tables_are_crowded(
    placement: PlacementConstraints, offered: bool
) -> None:
    size = 1000 * 64 * 4
    enumerator = NeuroShardEnumerator(
        gpus(4, hbm_cap=3 * size), 64, placement=placement, **analytic()
    )
    options = enumerator.enumerate(make_ebc([(1000, 64)] * 2), bag_sharders())
    assert any(o.compute_kernel == "fused_uvm" for o in options) == offered


# --- estimator ------------------------------------------------------------------


def test_estimates_are_those_of_single_shards() -> None:
    constraints = {"t1": ParameterConstraints(pooling_factors=[7.0], min_partition=64)}
    topology = gpus()
    estimator = NeuroShardEstimator(topology, constraints, **analytic())
    enumerator = EmbeddingEnumerator(
        topology,
        64,
        constraints,
        [estimator, EmbeddingStorageEstimator(topology, constraints)],
    )
    options = enumerator.enumerate(make_ebc(SIZES), bag_sharders())
    checked = 0
    for option in options:
        if not estimator.costs.reader.is_column_sharded(option):
            continue
        table = estimator.costs.reader.table(option)
        task = ShardingTask(tables=(table,), world_size=2, batch_size=128)
        simulator = Simulator(task, AnalyticCostModel(), AnalyticCommsModel())
        for shard in option.shards:
            forward, backward = simulator.single_costs([(0, shard.size[1])])[0]
            comms = AnalyticCommsModel().all_to_all(
                np.array([[shard.size[1], 0.0]]), 128
            )[0, 0]
            ids = np.array([[simulator.index_bytes_per_table[0], 0.0]])
            comms[0] += AnalyticCommsModel().index_all_to_all(ids)[0, 0]
            assert (shard.perf.fwd_compute, shard.perf.bwd_compute) == pytest.approx(
                (forward, backward)
            )
            assert (shard.perf.fwd_comms, shard.perf.bwd_comms) == pytest.approx(
                tuple(comms)
            )
            checked += 1
    kinds = {o.sharding_type for o in options}
    assert "table_column_wise" in kinds and checked > 12


def test_other_options_keep_stock_costs_plus_a_launch() -> None:
    topology = gpus()
    ebc = make_ebc([(1000, 10)])  # no fused kernel takes ten columns
    storage = EmbeddingStorageEstimator(topology)

    def perfs(estimator: Any) -> dict[tuple[str, str], Any]:
        enumerator = EmbeddingEnumerator(topology, 64, None, [estimator, storage])
        return {
            (o.sharding_type, o.compute_kernel): o.shards[0].perf
            for o in enumerator.enumerate(ebc, bag_sharders())
        }

    ours = perfs(
        NeuroShardEstimator(
            topology,
            cost_model=AnalyticCostModel(launch_ms=0.5, lookup_ns=0, byte_ns=0),
        )
    )
    stock = perfs(EmbeddingPerfEstimator(topology))
    rows = ours[("row_wise", "fused")]
    assert rows.fwd_compute == pytest.approx(
        stock[("row_wise", "fused")].fwd_compute + 0.5
    )
    assert rows.bwd_compute == pytest.approx(
        stock[("row_wise", "fused")].bwd_compute + 1.0
    )
    assert rows.fwd_comms == stock[("row_wise", "fused")].fwd_comms
    dense = ("data_parallel", "dense")
    assert ours[dense] == stock[dense]


def test_launches_of_fused_stock_tables_count_once() -> None:
    constraints = {
        f"t{i}": ParameterConstraints(sharding_types=["row_wise"]) for i in range(3)
    }
    model = AnalyticCostModel(launch_ms=0.5, lookup_ns=0, byte_ns=0)
    costs = PlanCosts(gpus(), constraints, cost_model=model)
    enumerator = NeuroShardEnumerator(gpus(), 64, constraints, costs=costs)
    tables = make_ebc(
        [(1000, 16)] * 3, data_types=dict.fromkeys(range(3), DataType.INT4)
    )
    proposal = enumerator.enumerate(tables, bag_sharders())
    proposal = [o for o in proposal if o.compute_kernel == "fused"]
    plan = NeuroShardPartitioner(gpus(), constraints, costs=costs).partition(
        proposal, gpus()
    )
    ranks = costs.evaluate(costs.lower(plan)).ranks
    stock = 3 * (proposal[0].shards[0].perf.fwd_compute - 0.5)
    assert ranks[0].fwd_compute == pytest.approx(0.5 + stock)
    assert ranks[1].bwd_compute == pytest.approx(1.0 + 2 * stock)


# --- proposer -------------------------------------------------------------------


def proposals(
    proposer: NeuroShardProposer, options: list[ShardingOption], fits: bool
) -> list[dict[str, str]]:
    proposer.load(options)
    found = []
    while (proposal := proposer.propose()) is not None:
        found.append(
            {o.name: f"{o.sharding_type} {o.compute_kernel}" for o in proposal}
        )
        proposer.feedback(partitionable=fits)
        assert len(found) < 10
    return found


def test_one_proposal_where_every_table_may_be_split() -> None:
    options = NeuroShardEnumerator(gpus(), 64, **analytic()).enumerate(
        make_ebc(SIZES), bag_sharders()
    )
    proposer = NeuroShardProposer(gpus(), **analytic())
    assert proposals(proposer, options, True) == [
        {f"t{i}": "column_wise fused" for i in range(4)}
    ]


def test_least_memory_follows_when_the_fastest_does_not_fit() -> None:
    constraints = {
        "t0": ParameterConstraints(sharding_types=["row_wise", "data_parallel"])
    }
    options = NeuroShardEnumerator(gpus(), 64, constraints, **analytic()).enumerate(
        make_ebc([(1_000_000, 16), (100, 16)]), bag_sharders()
    )
    for option in options:
        if option.sharding_type == "data_parallel":
            for shard in option.shards:
                shard.perf.fwd_compute = shard.perf.bwd_compute = 0.0
                shard.perf.bwd_comms = 0.0
    proposer = NeuroShardProposer(gpus(), constraints, **analytic())
    fitting = proposals(proposer, options, True)
    assert [p["t0"] for p in fitting] == ["data_parallel dense"]
    tight = proposals(proposer, options, False)
    assert tight[0] == fitting[0]
    assert tight[1]["t0"] == "row_wise fused" and len(tight) == 2
    assert tight[0]["t1"] == "column_wise fused"


# --- partitioner ----------------------------------------------------------------


def test_partitioner_leaves_the_proposal_as_it_was() -> None:
    constraints = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    enumerator = NeuroShardEnumerator(gpus(), 64, constraints, **analytic())
    options = enumerator.enumerate(make_ebc([(1000, 64)] * 3), bag_sharders())
    proposal = [o for o in options if o.sharding_type != "table_wise"][:1] + [
        o for o in options if o.sharding_type == "column_wise"
    ]
    assert [o.name for o in proposal] == ["t0", "t1", "t2"]
    before = [str(o) for o in proposal]
    partitioner = NeuroShardPartitioner(gpus(), constraints, search=QUICK, **analytic())
    plan = partitioner.partition(proposal, gpus())
    assert [str(o) for o in proposal] == before
    assert [o.name for o in plan] == ["t0", "t1", "t2"]
    assert all(s.rank is not None for o in plan for s in o.shards)
    assert not any(a is b for a, b in zip(proposal, plan, strict=True))


def test_memory_of_splits_is_that_of_torchrec() -> None:
    """On CPUs; of GPUs, see test_memory.py."""
    rows, width = 100_000, 64
    ebc = make_ebc([(rows, width)])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    topology = Topology(world_size=2, compute_device="cpu")
    enumerator = NeuroShardEnumerator(topology, 64, **analytic())
    proposal = searchable(enumerator, ebc, "column_wise")
    partitioner = NeuroShardPartitioner(
        topology,
        search=FixedSearcher([(0, 32, 0), (0, 32, 1)]),
        enumerator=enumerator,
        **analytic(),
    )
    (split,) = partitioner.partition(proposal, topology)
    (again,) = searchable(enumerator, ebc, "column_wise")
    again.shards = [Shard(size=s.size, offset=s.offset) for s in split.shards]
    enumerator.populate_estimates([again])
    # Row-wise Adagrad keeps a value per row and shard, TorchRec counts one per row.
    missing = 4 * rows / 2
    for ours, theirs in zip(split.shards, again.shards, strict=True):
        assert ours.storage.ddr == pytest.approx(theirs.storage.ddr + missing, abs=4)


def test_infeasible_proposals_are_partition_errors() -> None:
    enumerator = NeuroShardEnumerator(gpus(), 64, **analytic())
    proposal = searchable(enumerator, make_ebc([(10**6, 64)]), "table_wise")
    partitioner = NeuroShardPartitioner(gpus(), **analytic())
    with pytest.raises(PlannerError, match=r"table 't0'.*GiB") as caught:
        partitioner.partition(proposal, gpus(hbm_cap=10**8))
    assert caught.value.error_type == PlannerErrorType.PARTITION
    assert partitioner.log.infeasible == str(caught.value)


def test_task_of_a_proposal() -> None:
    constraints = {"t1": ParameterConstraints(min_partition=30)}
    enumerator = NeuroShardEnumerator(gpus(), 64, constraints, **analytic())
    options = enumerator.enumerate(make_ebc([(100, 64)] * 3), bag_sharders())
    kinds = {"t0": "table_wise", "t1": "column_wise", "t2": "column_wise"}
    proposal = [o for o in options if kinds[o.name] == o.sharding_type]
    searcher = FixedSearcher([(i, 64, i % 2) for i in range(3)])
    NeuroShardPartitioner(
        gpus(), constraints, search=searcher, enumerator=enumerator, **analytic()
    ).partition(proposal, gpus(hbm_cap=10**9))
    (task,) = searcher.tasks
    assert task.min_widths == (64, 32, 4)
    assert task.groups == (0, 1, 1)
    assert enumerator.memory is not None
    common = math.ceil(enumerator.memory.common_bytes(proposal))
    assert task.memory_bytes == (10**9 - common,) * 2
    assert not task.uneven
    # Beside 100 rows of 64 floats: ids of 128 samples, their outputs.
    assert task.shard_bytes(2, 64) == pytest.approx(
        proposal[2].shards[0].storage.hbm, abs=2
    )


# --- performance model ----------------------------------------------------------


def test_rating_is_the_critical_path() -> None:
    topology = Topology(world_size=2, compute_device="cpu")
    enumerator = EmbeddingEnumerator(topology, 64)
    plan = searchable(enumerator, make_ebc([(100, 16)] * 3), "table_wise")
    model = AnalyticCostModel(launch_ms=1.0, lookup_ns=0.0, byte_ns=1000.0)
    rating = NeuroShardPerfModel(
        topology, cost_model=model, comms_model=AnalyticCommsModel(gb_per_s=0.001)
    )

    def rate(*ranks: int) -> float:
        for option, rank in zip(plan, ranks, strict=True):
            option.shards[0].rank = rank
        return rating.rate(plan)

    # 128 samples read 64 bytes of a table each: 8.192 ms, and twice that backward.
    table, column = 128 * 64 * 1e-3, 128 * 4 / 2 / 1000
    index = 128 * (8 + 8) / 2 / 1000  # ids and lengths, half of them remote
    for count, rating_ms in ((2, rate(0, 0, 1)), (3, rate(0, 0, 0))):
        compute, comms = 3 * (1 + count * table), 2 * 16 * count * column
        assert rating_ms == pytest.approx(compute + comms + count * index)
    assert rate(1, 0, 1) == rate(0, 1, 0)


def test_rating_counts_stock_tables() -> None:
    topology = gpus()
    options = EmbeddingEnumerator(topology, 64).enumerate(
        make_ebc([(100, 16), (100, 10)]), bag_sharders()
    )
    by_kind = {(o.name, o.sharding_type, o.compute_kernel): o for o in options}
    whole = by_kind[("t0", "table_wise", "fused")]
    rows = by_kind[("t1", "row_wise", "fused")]
    whole.shards[0].rank = 1
    for rank, shard in enumerate(rows.shards):
        shard.rank = rank
        shard.perf.fwd_compute = 10.0
        shard.perf.fwd_comms = shard.perf.bwd_comms = shard.perf.bwd_compute = 0.0
        shard.perf.prefetch_compute = 5.0
    rating = NeuroShardPerfModel(topology, **analytic())
    assert rating.rate([whole, rows]) == pytest.approx(rating.rate([whole]) + 15.0)
