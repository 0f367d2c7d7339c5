"""Every model that TorchRec's planner plans, ours plans as well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

from tests.builders import (
    MIB,
    QUICK,
    FixedSearcher,
    Triples,
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
    shards_of,
    stock_planner,
    types_of,
)
from torchrec_neuroshard import NeuroShardPlanner, rehearse, save_plan
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.planner import torchrec_plan
from torchrec_neuroshard.planner.torchrec_plan import stock_plan
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
