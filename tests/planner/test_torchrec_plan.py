"""What TorchRec plans, we plan: tables out of the search, and the last resort."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)

from tests.builders import (
    META,
    MIB,
    QUICK,
    FixedSearcher,
    Triples,
    bag_config,
    bag_sharders,
    cost_of,
    each,
    entries_of,
    gpus,
    keep_nothing_back,
    last_result,
    make_ebc,
    make_planner,
    only,
    sequences,
    shards_of,
    stock_planner,
    types_of,
)
from torchrec_neuroshard import (
    NeuroShardPlanner,
    PlacementConstraints,
    rehearse,
    save_plan,
)
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.planner import NeuroShardPartitioner, torchrec_plan
from torchrec_neuroshard.planner.greedy import place_greedily
from torchrec_neuroshard.planner.option_facts import is_even, table_name
from torchrec_neuroshard.planner.proposer import NeuroShardProposer
from torchrec_neuroshard.planner.torchrec_plan import stock_plan
from torchrec_neuroshard.planner.unsearched import place_unsearched
from torchrec_neuroshard.planner.ways import FreeOption
from torchrec_neuroshard.plans.plan_files import load_plan

pytestmark = pytest.mark.filterwarnings(
    "ignore:the plan will run out of memory:UserWarning"
)


def test_no_worse_than_torchrecs_plan() -> None:
    table_wise = only("t1", sharding_types=["table_wise"])
    constraints = table_wise | only("t2", pooling_factors=[15.0])
    settings: Any = {"topology": Topology(8, "cpu"), "constraints": constraints}
    planner, ebc = make_planner(**settings), make_ebc([(1, 4), (1, 4), (1, 8)])
    planner.plan(ebc, bag_sharders())
    theirs = stock_planner(**settings).plan(ebc, bag_sharders())
    cost = planner.evaluate(theirs, ebc, bag_sharders()).critical_path_ms
    assert cost_of(planner) <= cost * (1 + 1e-9)


STOCK: dict[str, Any] = {
    "topology": Topology(2, "cuda"),
    "batch_size": 64,
    "constraints": each(2, "table_wise", "row_wise"),
}


def test_the_plan_to_compare_with_is_torchrecs(monkeypatch: pytest.MonkeyPatch) -> None:
    ebc = make_ebc([(10_000, 64), (300, 64), (2_000_000, 128)])
    listed = make_planner(**STOCK).enumerator.enumerate(ebc, bag_sharders())
    theirs = stock_planner(**STOCK).plan(ebc, bag_sharders())
    settings: Any = {**STOCK, "storage_reservation": keep_nothing_back(), "stats": []}
    assert str(stock_plan(ebc, bag_sharders(), listed, **settings)) == str(theirs)
    monkeypatch.setattr(torchrec_plan, "MOST_SHARDS", 8)
    with pytest.raises(PlannerError, match=r"would estimate 12 shards one by one"):
        stock_plan(ebc, bag_sharders(), listed, **settings)


# --- on devices that outputs fill: TorchRec counts shards, ranks allocate more ---

SMALL = [(100, 64)] * 4


def planner_of(**arguments: Any) -> NeuroShardPlanner:
    """Return a planner for two devices of 2 MiB, as a TorchRec user would."""
    settings: dict[str, Any] = {
        "topology": gpus(hbm_cap=2 * MIB),
        "batch_size": 512,
        "storage_reservation": None,
    }
    return make_planner(**(settings | arguments))


def test_tables_that_torchrec_plans_are_planned_saved_and_loaded(
    tmp_path: Path,
) -> None:
    ebc, constraints = make_ebc(SMALL), each(4, "table_wise")
    settings: Any = {"topology": gpus(hbm_cap=2 * MIB), "constraints": constraints}
    stock_planner(batch_size=512, **settings).plan(ebc, bag_sharders())
    planner = planner_of(**settings)
    with pytest.warns(
        UserWarning, match="the plan will run out of memory: rank"
    ) as caught:
        plan = planner.plan(ebc, bag_sharders())
    assert sorted(r for e in entries_of(plan).values() for r in e.ranks) == [0, 0, 1, 1]
    rehearsed = rehearse(ebc, plan, planner.topology, bag_sharders(), batch_size=512)
    warned = str(caught[0].message).removeprefix("the plan will run out of memory: ")
    assert rehearsed.ranks[0].faults[0].startswith(warned.split(".")[0])
    path = tmp_path / "plan.json"
    save_plan(plan, path, model=ebc, planner=planner)
    second = planner_of(**settings)
    assert load_plan(path, model=ebc, planner=second) == plan
    for each_of in (planner, second):
        severe = [n for n in last_result(each_of).notes if n.severity == "error"]
        assert [n.code for n in severe] == ["memory"] and not each_of.report().fits
        assert severe[0].text.startswith("the plan will run out of memory")
    with pytest.raises(PlannerError, match=r"every rank needs .* Lower batch_size"):
        planner_of(**settings, strict_memory=True).plan(ebc, bag_sharders())


def test_a_plan_that_fits_wins_over_one_that_fits_for_torchrec() -> None:
    """By TorchRec's memory count, row-wise is fastest for all tables."""
    kernels = ["dense", "fused"]
    planner = planner_of(
        topology=gpus(hbm_cap=3 * MIB + 2**18),
        storage_reservation=keep_nothing_back(),
        constraints=each(4, "data_parallel", "row_wise", compute_kernels=kernels),
    )
    plan = planner.plan(make_ebc(SMALL), bag_sharders())
    assert set(types_of(plan).values()) == {"data_parallel"}
    assert planner.report().fits


def test_one_table_that_fits_no_rank_whole_fits_in_rows() -> None:
    told: list[Any] = []

    class Told(EmbeddingStats):
        def log(self, **given: Any) -> None:
            told.append(given["sharding_plan"].plan)

    ebc = make_ebc([(4096, 128)])
    whole = each(1, "table_wise", compute_kernels=["fused"])
    with pytest.raises(PlannerError, match="such as row_wise") as caught:
        planner_of(constraints=whole).plan(ebc, bag_sharders())
    assert caught.value.error_type == PlannerErrorType.STRICT_CONSTRAINTS
    rows = each(1, "table_wise", "row_wise", compute_kernels=["fused"])
    plan = planner_of(constraints=rows, stats=[Told()]).plan(ebc, bag_sharders())
    assert shards_of(plan) == {"t0": [(0, 128, 0), (0, 128, 1)]}
    assert told == [plan.plan]  # not of the count by which nothing fitted


def test_without_a_plan_the_error_says_how_many_ranks_are_enough() -> None:
    def plan_on(count: int, strict_memory: bool = True) -> None:
        planner_of(
            topology=gpus(count, hbm_cap=20 * MIB),
            strict_memory=strict_memory,
            storage_reservation=keep_nothing_back(),
            batch_size=64,
            constraints=each(2, "table_wise", "row_wise", compute_kernels=["fused"]),
        ).plan(make_ebc([(10**6, 64), (10**5, 16)]), bag_sharders())

    with pytest.raises(PlannerError) as caught:
        plan_on(2, strict_memory=False)
    found = re.search(r"\. (\d+) ranks of this kind are enough\.", str(caught.value))
    assert found is not None
    plan_on(int(found[1]))
    with pytest.raises(PlannerError):
        plan_on(int(found[1]) - 1)


def test_enough_ranks_are_found_with_measured_collectives() -> None:
    planner = make_planner(
        topology=Topology(2, "cpu", ddr_cap=20 * MIB),
        cost_model="cpu",
        comms_model=None,
        constraints=each(1, "column_wise"),
    )
    assert "measured" in planner.costs.comms_model.source
    with pytest.raises(PlannerError, match="4 ranks of this kind are enough"):
        planner.plan(make_ebc([(300_000, 64)]), bag_sharders())


def test_tables_too_large_for_any_memory_are_refused_as_by_torchrec() -> None:
    """Their width does not matter."""
    planner = planner_of(
        storage_reservation=FixedPercentageStorageReservation(0.15),
        constraints=each(2, "table_wise", "row_wise"),
    )
    with pytest.raises(PlannerError) as caught:
        planner.plan(make_ebc([(10**9, 10**5)] * 2), bag_sharders())
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE


# --- a caller's callbacks and stats ---------------------------------------------


def find_nothing(_task: ShardingTask) -> Triples:
    raise InfeasibleError("nothing fits")


@pytest.mark.parametrize("search", [QUICK, FixedSearcher(find_nothing)])
def test_an_error_of_a_callback_is_raised(search: Any) -> None:
    """Also in TorchRec's own planner, the last resort."""

    def refuse(_options: Any) -> Any:
        raise KeyError("a callback's own error")

    limits = each(2, "table_wise", compute_kernels=["fused"])
    settings: Any = {"search": search, "topology": gpus(), "constraints": limits}
    ebc = make_ebc([(1000, 16)] * 2)
    with pytest.raises(KeyError, match="a callback's own error"):
        planner_of(**settings, callbacks=[refuse]).plan(ebc, bag_sharders())
    planner = planner_of(**settings)
    planner.plan(ebc, bag_sharders())
    assert (last_result(planner).fallback is None) == (search is QUICK)


def test_an_error_of_the_last_resort_is_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_args: Any, **_named: Any) -> None:
        raise ZeroDivisionError("in TorchRec")

    monkeypatch.setattr(torchrec_plan, "stock_plan", fail)
    planner = planner_of(constraints=each(1, "table_wise", compute_kernels=["fused"]))
    with pytest.raises(PlannerError) as caught:
        planner.plan(make_ebc([(10**6, 128)]), bag_sharders())
    cause = caught.value.__cause__
    assert cause is not None and "TorchRec's own planner failed" in str(cause)
    assert isinstance(cause.__cause__, ZeroDivisionError)


# --- tables that the search does not place, such as quantised ones ---


SHARDERS = get_default_sharders()
SIZES = [(4527, 16), (100, 256), (200_000, 64), (30_000_000, 8)]


def quantised(sizes: Sequence[tuple[int, int]], order: Sequence[int] = ()) -> Any:
    """Quantised bags; `order` is that of the tables, which are named by size."""
    tables = [bag_config(i, *size) for i, size in enumerate(sizes)]
    for config in tables:
        config.data_type = DataType.INT8
    return QuantEmbeddingBagCollection(
        tables=[tables[i] for i in order or range(len(tables))],
        is_weighted=False,
        device=META,
    )


def proposed(
    planner: NeuroShardPlanner, options: list[ShardingOption]
) -> list[ShardingOption]:
    """The first proposal."""
    proposer = NeuroShardProposer(planner.topology, costs=planner.costs)
    proposer.load(options, planner.enumerator)
    found = proposer.propose()
    assert found is not None
    return found


def price(planner: NeuroShardPlanner, plan: list[ShardingOption]) -> float:
    """The critical path of unsearched options, whose launches are shared [ms]."""
    planner.costs.share_launches(plan)
    return planner.costs.placed(plan).predicted.critical_path_ms


@pytest.mark.parametrize("topology", [gpus(2), gpus(8), Topology(4, "cpu")])
@pytest.mark.parametrize("sizes", [SIZES[:2], SIZES[1:3], SIZES[:3]])
def test_no_combination_of_options_is_cheaper(
    topology: Topology, sizes: list[tuple[int, int]]
) -> None:
    planner = make_planner(topology=topology, batch_size=512)
    options = planner.enumerator.enumerate(quantised(sizes), SHARDERS)
    tables = [list(FreeOption.ways_of(o)) for o in proposed(planner, options)]
    rules = planner.placement_constraints.rules(
        [table_name(own[0]) for own in tables], topology.world_size
    )
    found = place_unsearched(tables, topology, rules, planner.costs)
    best = min(
        price(planner, place_greedily(options, topology, rules))
        for options in itertools.product(*tables)
    )
    assert price(planner, found) <= best * (1 + 1e-6)


def test_host_memory_is_used_only_where_devices_are_full() -> None:
    module = quantised([(400_000, 48)] * 5)
    planner = make_planner(topology=gpus(2, hbm_cap=40 * MIB), batch_size=4096)
    plan = planner.plan(module, SHARDERS)
    kernels = [entry.compute_kernel for entry in entries_of(plan).values()]
    assert 0 < sum(kernel == "quant" for kernel in kernels) < 5


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([(600_000, 32)], r"a shard of table 't0' \(.*\) needs .*the freest rank has"),
        ([(200_000, 32)] * 4, "'t0', .* together need .*all ranks have 0.02 GiB"),
    ],
)
def test_the_error_names_what_does_not_fit(
    sizes: list[tuple[int, int]], text: str
) -> None:
    topology = gpus(2, hbm_cap=12 * MIB, ddr_cap=0)
    kinds = each(len(sizes), "table_wise", compute_kernels=["quant"])
    planner = make_planner(topology=topology, batch_size=64, constraints=kinds)
    with pytest.raises(PlannerError, match=text):
        planner.plan(quantised(sizes), SHARDERS)


def test_the_order_of_tables_does_not_matter() -> None:
    alike = [(200_000, 64)] * 6
    plans = [
        make_planner(topology=gpus(4)).plan(quantised(alike, order), SHARDERS)
        for order in ([0, 1, 2, 3, 4, 5], [3, 5, 1, 0, 4, 2])
    ]
    first, second = ({k: str(v) for k, v in entries_of(p).items()} for p in plans)
    assert first == second


def test_placement_constraints_hold() -> None:
    placement = PlacementConstraints(
        pin={"t0": [3], "t2": [1, 2]}, together=[["t1", "t0"]]
    )
    planner = make_planner(topology=gpus(4), placement_constraints=placement)
    found = entries_of(planner.plan(quantised(SIZES), SHARDERS))
    assert set(found["t0"].ranks) == set(found["t1"].ranks) == {3}
    assert set(found["t2"].ranks) <= {1, 2}
    assert planner.last_result is not None and not planner.last_result.fallback


def test_no_plan_of_torchrec_is_shorter_where_devices_are_full() -> None:
    sizes = [(10_000 * (i + 1), 32) for i in range(12)]
    module, topology = quantised(sizes), gpus(2, hbm_cap=12 * MIB)
    planner = make_planner(topology=topology, batch_size=2048)
    planner.plan(module, SHARDERS)
    stock = stock_plan(module, SHARDERS, [], topology=topology, batch_size=2048)
    theirs = planner.evaluate(stock, module, SHARDERS).critical_path_ms
    assert cost_of(planner) <= theirs * (1 + 1e-6)


def test_sequences_of_a_module_are_split_into_equal_widths() -> None:
    """Widths of 16 and 32 are the cheapest, but TorchRec's all-to-all takes one."""
    topology, planner = gpus(4), make_planner(topology=gpus(4))
    constraints = {
        f"s{i}": ParameterConstraints(
            sharding_types=["column_wise", "table_wise"],
            compute_kernels=["fused"],
            min_partition=width,
        )
        for i, width in enumerate([16, 32])
    }
    options = EmbeddingEnumerator(topology, 64, constraints=constraints).enumerate(
        sequences(64, 64), SHARDERS
    )
    for option in options:
        whole_ms = 1.0 if option.sharding_type == "table_wise" else 0.2
        for shard in option.shards:
            shard.perf.fwd_compute = whole_ms
            shard.perf.fwd_comms = shard.perf.bwd_comms = shard.perf.bwd_compute = 0.0
    tables = [[o for o in options if o.name == name] for name in ("s0", "s1")]
    tables = [
        sorted(own, key=lambda o: o.sharding_type != "table_wise") for own in tables
    ]
    rules = planner.placement_constraints.rules(
        [table_name(own[0]) for own in tables], topology.world_size
    )
    found = place_unsearched(tables, topology, rules, planner.costs)
    assert is_even(found)
    widths = [{int(s.size[1]) for s in option.shards} for option in options]
    assert {16} in widths and {32} in widths


def test_torchrecs_plan_as_the_last_resort_shares_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise PlannerError(error_type=PlannerErrorType.PARTITION, message="no")

    monkeypatch.setattr(NeuroShardPartitioner, "_place", fail)
    planner = make_planner(topology=gpus(2))
    module = quantised([(100, 16)] * 8)
    plan = planner.plan(module, SHARDERS)
    assert planner.last_result is not None and planner.last_result.fallback
    again = planner.evaluate(plan, module, SHARDERS)
    assert cost_of(planner) == pytest.approx(again.critical_path_ms)
