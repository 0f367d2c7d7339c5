"""The parts of the planner, each used alone in TorchRec's planner."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GridSearchProposer, UniformProposer
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import (
    PlannerError,
    PlannerErrorType,
    StorageReservation,
)
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    ATTACHES_OPTIMIZERS,
    QUICK,
    FixedSearcher,
    analytic,
    bag_sharders,
    by_table,
    each,
    gpus,
    keep_nothing_back,
    make_ebc,
    make_task,
    only,
    stock_planner,
)
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.planner import (
    NeuroShardEnumerator,
    NeuroShardEstimator,
    NeuroShardPartitioner,
    NeuroShardPerfModel,
    NeuroShardProposer,
    PlacementConstraints,
    PlanCosts,
)
from torchrec_neuroshard.planner.partitioner import MOST_SEARCHED
from torchrec_neuroshard.planner.spread_options import SpreadOption, sample_shards
from torchrec_neuroshard.search import NeuroShardSearcher
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

pytestmark = ATTACHES_OPTIMIZERS

SIZES = [(1000, 16), (2000, 256), (3000, 64), (500, 8)]


# --- enumerator -----------------------------------------------------------------


def kinds_of(
    topology: Topology,
    sizes: list[tuple[int, int]],
    constraints: dict[str, ParameterConstraints] | None = None,
    **settings: Any,
) -> dict[str, list[tuple[str, str]]]:
    """Sharding types and kernels of each table's options, in their order."""
    enumerator = NeuroShardEnumerator(
        topology, 64, constraints, **settings, **analytic()
    )
    kinds: dict[str, list[tuple[str, str]]] = {}
    for option in enumerator.enumerate(make_ebc(sizes), bag_sharders()):
        kind = (option.sharding_type, option.compute_kernel)
        kinds.setdefault(option.name, []).append(kind)
    return kinds


@pytest.mark.parametrize(("nodes", "by_node"), [(2, ["table_row_wise"]), (1, [])])
def test_enumerator_keeps_one_option_of_each_kind(
    nodes: int, by_node: list[str]
) -> None:
    constraints = by_table(
        sharding_types=[None, ["row_wise", "data_parallel"], ["table_row_wise"]]
    )
    kinds = kinds_of(gpus(4, 4 // nodes), SIZES, constraints)
    assert kinds["t0"] == [
        ("column_wise", "fused"),
        ("data_parallel", "dense"),
        ("row_wise", "fused"),
        *((kind, "fused") for kind in by_node),  # on one node the same as row_wise
        ("table_wise", "fused"),
    ]
    assert kinds["t1"] == [("data_parallel", "dense"), ("row_wise", "fused")]
    assert kinds["t2"] == [("table_row_wise", "fused")]


TABLE_BYTES = 1000 * 64 * 4
SMALL, LARGE = (1000, 64), (36_000, 64)
HOSTED = {"fused_uvm", "fused_uvm_caching"}


@pytest.mark.parametrize(
    ("sizes", "room", "rules", "offered"),
    [
        ([SMALL], 2 * TABLE_BYTES, {}, set()),
        ([SMALL], 2 * TABLE_BYTES - 1, {}, {"t0"}),
        # Beside tables of which a device holds little more than one, small ones stay.
        ([LARGE, SMALL], 32 * TABLE_BYTES, {}, {"t0"}),
        ([LARGE, LARGE, SMALL], 32 * TABLE_BYTES, {}, {"t0", "t1", "t2"}),
        # Placement constraints crowd tables, or do not.
        ([SMALL] * 2, 3 * TABLE_BYTES, {"pin": {"t0": [0, 1]}}, set()),
        ([SMALL] * 2, 3 * TABLE_BYTES, {"forbid_ranks": [0, 1, 2]}, {"t0", "t1"}),
        ([SMALL] * 2, 3 * TABLE_BYTES, {"together": [["t0", "t1"]]}, {"t0", "t1"}),
    ],
)
def test_host_memory_is_offered_if_device_memory_is_scarce(
    sizes: list[tuple[int, int]], room: int, rules: Any, offered: set[str]
) -> None:
    placement = PlacementConstraints(**rules)
    kinds = kinds_of(gpus(4, hbm_cap=room), sizes, placement=placement)
    for name, own in kinds.items():
        fused = {t for t, k in own if k == "fused"}
        hosted = {(t, k) for t in fused for k in HOSTED if name in offered}
        assert {(t, k) for t, k in own if k in HOSTED} == hosted


def test_host_memory_is_offered_if_constraints_ask_for_it() -> None:
    asked = only(compute_kernels=["fused", "fused_uvm"])
    kinds = kinds_of(gpus(hbm_cap=100 * TABLE_BYTES), [SMALL], asked)["t0"]
    assert {k for _, k in kinds} == {"fused", "fused_uvm"}


# Of thousands of tables on hundreds of ranks


NODE = Topology(64, "cuda", local_world_size=64)


@pytest.mark.parametrize("rows", [3, 1001])
def test_shards_are_listed_as_torchrec_would_when_they_are_read(rows: int) -> None:
    enumerator = NeuroShardEnumerator(NODE, 64, **analytic())
    ebc = make_ebc([(rows, 64), (500, 32)])
    options = enumerator.enumerate(ebc, bag_sharders())
    later = [o for o in options if isinstance(o, SpreadOption)]
    assert {o.sharding_type for o in later} == {"row_wise", "data_parallel"}
    assert not any(o.is_listed for o in later)
    stock = EmbeddingEnumerator(NODE, 64).enumerate(ebc, bag_sharders())
    theirs = {
        (o.name, o.sharding_type): [(s.size, s.offset) for s in o.shards] for o in stock
    }
    for option in later:
        samples = [(tuple(s.size), s.storage) for s in sample_shards(option)]
        assert option.num_shards == 64
        boxes = [(s.size, s.offset) for s in option.shards]
        assert boxes == theirs[option.name, option.sharding_type]
        listed = [(tuple(s.size), s.storage) for s in option.shards]
        assert list(dict.fromkeys(listed)) == samples
        assert option.is_listed and option.num_shards == 64


def test_copies_of_options_can_be_changed() -> None:
    """TorchRec and this package change options, shards and perfs in place."""
    enumerator = NeuroShardEnumerator(NODE, 64, **analytic())
    options = enumerator.enumerate(make_ebc([(1001, 64), (500, 32)]), bag_sharders())
    kept = enumerator.last_stored_search_space
    assert kept is not None
    assert list(map(hash, kept)) == list(map(hash, options))
    copied = copy.deepcopy(options)
    for option in copied:
        option.input_lengths.append(1.0)
        option.compute_kernel = "dense"
        for shard in option.shards:
            shard.rank = 1
            shard.perf.fwd_compute += 1.0
        option.shards.append(option.shards[0])
    assert list(map(hash, kept)) == list(map(hash, options))
    assert all(o.tensor is c.tensor for o, c in zip(options, copied, strict=True))
    assert [o.input_lengths for o in options] == [[1.0]] * len(options)


def test_the_same_model_is_estimated_again_when_something_changed() -> None:
    """For the same module, TorchRec would return its earlier options."""
    costs = PlanCosts(gpus(), **analytic())
    enumerator = NeuroShardEnumerator(gpus(), 64, costs=costs)
    module, sharders = make_ebc([(1000, 64)]), bag_sharders()

    def estimates() -> list[tuple[int, float]]:
        shards = [s for o in enumerator.enumerate(module, sharders) for s in o.shards]
        return [(s.storage.hbm, s.perf.total) for s in shards]

    before = estimates()
    costs.use(AnalyticCostModel(launch_ms=1.0))
    slower = estimates()
    assert all(b[1] > a[1] for a, b in zip(before, slower, strict=True))
    apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), {"lr": 0.1})
    larger = estimates()
    assert all(b[0] > a[0] for a, b in zip(slower, larger, strict=True))
    assert enumerator.memory is not None
    with enumerator.memory.lenient():
        assert all(b[0] < a[0] for a, b in zip(larger, estimates(), strict=True))

    costs.use(analytic()["cost_model"])
    stock = EmbeddingEnumerator(
        gpus(),
        64,
        None,
        [NeuroShardEstimator(gpus(), costs=costs), EmbeddingStorageEstimator(gpus())],
    )
    listed: list[list[float]] = []
    for launch_ms in (0.0, 1.0, 0.0):
        costs.use(AnalyticCostModel(launch_ms=launch_ms))
        options = stock.enumerate(module, sharders)
        listed.append([s.perf.total for o in options for s in o.shards])
    assert all(b > a + 2.9 for a, b in zip(*listed[:2], strict=True))
    assert listed[2] == listed[0]


def test_an_error_of_an_estimator_is_raised_at_once() -> None:
    class Refusing(EmbeddingStorageEstimator):
        num_asked = 0

        def estimate(self, *_args: Any, **_named: Any) -> None:
            self.num_asked += 1
            raise ValueError("a table without a name")

    refusing = Refusing(gpus())
    enumerator = NeuroShardEnumerator(gpus(), 64, estimator=refusing)
    with pytest.raises(ValueError, match="a table without a name"):
        enumerator.enumerate(make_ebc([(1000, 64)]), bag_sharders())
    assert refusing.num_asked == 1
    assert enumerator._world_size == 2


def test_shards_that_are_priced_when_read_can_be_copied() -> None:
    enumerator = NeuroShardEnumerator(gpus(), 64, **analytic())
    options = enumerator.enumerate(make_ebc(SIZES), bag_sharders())
    copied = copy.deepcopy(options)
    shards = [s for o in options for s in o.shards]
    assert [s.perf for s in shards] == [s.perf for o in copied for s in o.shards]
    again = pickle.loads(pickle.dumps(shards))
    assert [s.perf for s in again] == [s.perf for s in shards]
    assert again == shards


# --- estimator ------------------------------------------------------------------


def test_estimates_are_those_of_single_shards() -> None:
    constraints = only("t1", pooling_factors=[7.0], min_partition=64)
    given: Any = (gpus(), constraints)
    ours = NeuroShardEstimator(*given, **analytic())
    options = EmbeddingEnumerator(
        gpus(), 64, constraints, [ours, EmbeddingStorageEstimator(*given)]
    ).enumerate(make_ebc(SIZES), bag_sharders())
    reader = ours.costs.reader
    options = [o for o in options if reader.is_column_sharded(o)]
    assert "table_column_wise" in {o.sharding_type for o in options}
    for option in options:
        for shard in option.shards:
            width, perf = shard.size[1], shard.perf
            table = dataclasses.replace(reader.table(option), embedding_dim=width)
            simulator = Simulator(make_task([table], 2, 128), *analytic().values())
            alone = simulator.evaluate(Placement.from_widths(2, [(0, width, 0)]))
            costs = alone.ranks[0]
            assert (perf.fwd_compute, perf.bwd_compute) == pytest.approx(
                (costs.fwd_compute, costs.bwd_compute)
            )
            assert (perf.fwd_comms, perf.bwd_comms) == pytest.approx(
                (costs.index_comms + costs.fwd_comms, costs.bwd_comms)
            )


def test_launches_of_fused_stock_tables_count_once() -> None:
    """Tables without a learned cost count TorchRec's estimate and one launch."""
    constraints = each(3, "row_wise", compute_kernels=["fused"])
    tables = make_ebc(
        [(1000, 16)] * 3, data_types=dict.fromkeys(range(3), DataType.NFP8)
    )
    theirs = EmbeddingEnumerator(
        gpus(), 64, constraints, [EmbeddingPerfEstimator(gpus(), constraints)]
    ).enumerate(tables, bag_sharders())
    model = AnalyticCostModel(launch_ms=0.5, lookup_ns=0, byte_ns=0)
    costs = PlanCosts(gpus(), constraints, cost_model=model)
    enumerator = NeuroShardEnumerator(gpus(), 64, constraints, costs=costs)
    partitioner = NeuroShardPartitioner(gpus(), constraints, costs=costs)
    plan = partitioner.partition(enumerator.enumerate(tables, bag_sharders()), gpus())
    ranks = costs.placed(plan).predicted.ranks
    shards = [o.shards[0].perf for o in theirs]
    stock = sum(perf.fwd_compute for perf in shards)
    assert ranks[0].fwd_compute == pytest.approx(0.5 + stock)
    stock = sum(perf.bwd_compute for perf in shards)
    assert ranks[1].bwd_compute == pytest.approx(1.0 + stock)
    stock = sum(perf.fwd_comms for perf in shards)
    assert ranks[0].index_comms + ranks[0].fwd_comms == pytest.approx(stock)


# --- proposer -------------------------------------------------------------------


@pytest.mark.parametrize("fits", [True, False])
def test_least_memory_follows_when_the_fastest_does_not_fit(fits: bool) -> None:
    constraints = each(1, "row_wise", "data_parallel")
    options = NeuroShardEnumerator(gpus(), 64, constraints, **analytic()).enumerate(
        make_ebc([(1_000_000, 16), (100, 16)]), bag_sharders()
    )
    for shard in (s for o in options if o.compute_kernel == "dense" for s in o.shards):
        shard.perf.fwd_compute = shard.perf.bwd_compute = shard.perf.bwd_comms = 0.0
    proposer = NeuroShardProposer(gpus(), constraints, **analytic())
    proposer.load(options)
    found: list[dict[str, str]] = []
    while (proposal := proposer.propose()) is not None and len(found) < 10:
        found.append({o.name: o.sharding_type for o in proposal})
        proposer.feedback(partitionable=fits)
    of_first = ["data_parallel"] if fits else ["data_parallel", "row_wise"]
    assert [kinds["t0"] for kinds in found] == of_first
    assert found[0]["t1"] == "column_wise"


# --- partitioner ----------------------------------------------------------------


def test_infeasible_proposals_are_partition_errors() -> None:
    limits = each(1, "table_wise")
    enumerator = NeuroShardEnumerator(gpus(), 64, limits, **analytic())
    proposal = enumerator.enumerate(make_ebc([(10**6, 64)]), bag_sharders())
    partitioner = NeuroShardPartitioner(gpus(), **analytic())
    with pytest.raises(PlannerError, match=r"table 't0'.*GiB") as caught:
        partitioner.partition(proposal, gpus(hbm_cap=10**8))
    assert caught.value.error_type == PlannerErrorType.PARTITION
    assert partitioner.log.infeasible == str(caught.value)


def test_a_proposal_is_searched_and_left_as_it_was() -> None:
    constraints = only("t1", min_partition=30)
    enumerator = NeuroShardEnumerator(gpus(), 64, constraints, **analytic())
    options = enumerator.enumerate(make_ebc([(100, 64)] * 3), bag_sharders())
    kinds = {"t0": "table_wise", "t1": "column_wise", "t2": "column_wise"}
    proposal = [o for o in options if kinds[o.name] == o.sharding_type]
    searcher = FixedSearcher([(i, 64, i % 2) for i in range(3)])
    before = list(map(str, proposal))
    plan = NeuroShardPartitioner(
        gpus(), constraints, search=searcher, enumerator=enumerator, **analytic()
    ).partition(proposal, gpus(hbm_cap=10**9))
    assert list(map(str, proposal)) == before
    assert [[s.rank for s in o.shards] for o in plan] == [[0], [1], [0]]
    (task,) = searcher.tasks
    assert task.min_widths == (64, 32, 4)
    assert task.groups == (0, 1, 1)
    assert enumerator.memory is not None
    with enumerator.memory.at_peak(proposal):
        common = math.ceil(enumerator.memory.common_bytes(proposal))
    assert task.memory_bytes == (10**9 - common,) * 2
    assert not task.uneven
    # Beside 100 rows of 64 floats: ids of 128 samples, their outputs.
    assert task.shard_bytes(2, 64) == pytest.approx(
        proposal[2].shards[0].storage.hbm, abs=2
    )


class Noting(NeuroShardSearcher):
    """The default search; a list shared by its copies keeps their efforts."""

    efforts: list[float]

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        self.efforts.append(self.config.effort)
        return super().search(task, simulator)


def noting() -> Noting:
    searcher = Noting(QUICK)
    searcher.efforts = []
    return searcher


class Unchanged(StorageReservation):
    """Returns the topology itself, the same for every plan."""

    last_reserved_topology = None
    _percentage = 0.0

    def reserve(self, topology: Topology, *_args: Any, **_named: Any) -> Topology:
        return topology


@pytest.mark.parametrize("reservation", [keep_nothing_back(), Unchanged()])
def test_a_second_plan_of_the_stock_planner_is_searched_like_the_first(
    reservation: StorageReservation,
) -> None:
    searcher, ebc = noting(), make_ebc([(1000, 16)] * 2)
    partitioner = NeuroShardPartitioner(gpus(), search=searcher, **analytic())
    planner = stock_planner(
        gpus(),
        partitioner=partitioner,
        proposer=UniformProposer(),
        storage_reservation=reservation,
    )
    first = planner.plan(ebc, bag_sharders())
    num_searches = len(partitioner.log.records)
    efforts = [*searcher.efforts]
    assert efforts[0] == QUICK.effort and set(efforts[1:]) == {0.3 * QUICK.effort}
    assert planner.plan(ebc, bag_sharders()) == first
    assert searcher.efforts == 2 * efforts
    assert len(partitioner.log.records) == num_searches


def test_few_of_many_proposals_are_searched() -> None:
    """The others are placed by TorchRec's routine; no plan is worse than its own."""
    searcher, ebc = noting(), make_ebc([(100_000, 16), (1000, 64), (20_000, 128)])
    model = NeuroShardPerfModel(gpus(), **analytic())
    ours = NeuroShardPartitioner(gpus(), search=searcher, **analytic())
    rated = []
    for partitioner in (ours, None):
        planner = stock_planner(
            gpus(),
            partitioner=partitioner,
            proposer=GridSearchProposer(),
            performance_model=model,
            constraints=each(3, "table_wise", "row_wise", "data_parallel"),
        )
        planner.plan(ebc, bag_sharders())
        rated.append(model.rate(planner._best_plan))
    assert rated[0] <= rated[1] * (1 + 1e-9)
    assert ours.log.num_proposals > 27
    assert MOST_SEARCHED <= len(searcher.efforts) < 2 * MOST_SEARCHED


# --- performance model ----------------------------------------------------------


def test_rating_is_the_critical_path() -> None:
    topology = Topology(world_size=2, compute_device="cpu")
    limits = each(3, "table_wise", compute_kernels=["fused"])
    enumerator = EmbeddingEnumerator(topology, 64, limits)
    plan = enumerator.enumerate(make_ebc([(100, 16)] * 3), bag_sharders())
    rating = NeuroShardPerfModel(
        topology,
        cost_model=AnalyticCostModel(launch_ms=1.0, lookup_ns=0.0, byte_ns=1000.0),
        comms_model=AnalyticCommsModel(gb_per_s=1e9),
    )
    # 128 samples read 64 bytes of a table each: 8.192 ms, and twice that backward.
    for ranks, count in (((0, 0, 1), 2), ((0, 0, 0), 3)):
        for option, rank in zip(plan, ranks, strict=True):
            option.shards[0].rank = rank
        assert rating.rate(plan) == pytest.approx(3 * (1 + count * 8.192))
