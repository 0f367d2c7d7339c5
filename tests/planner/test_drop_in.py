"""What TorchRec's own planner plans, ours plans, on devices that outputs fill.

TorchRec counts the memory of shards; ranks allocate more.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

from tests.builders import (
    MIB,
    bag_sharders,
    entries_of,
    gpus,
    keep_nothing_back,
    make_ebc,
    make_planner,
    shards_of,
    stock_planner,
    types_of,
)
from torchrec_neuroshard import NeuroShardPlanner, rehearse, save_plan
from torchrec_neuroshard.planner.plans.plan_files import NeuroShardPlanLoader

pytestmark = pytest.mark.filterwarnings("ignore:out of memory ahead:UserWarning")
SMALL = [(100, 64)] * 4


def planner_of(**arguments: Any) -> NeuroShardPlanner:
    """A planner of two devices of 2 MiB, as TorchRec's users make one."""
    settings: dict[str, Any] = {
        "batch_size": 512,
        "search_only": False,
        "storage_reservation": None,
    }
    settings["topology"] = gpus(hbm_cap=2 * MIB)
    return make_planner(**(settings | arguments))


def only(*kinds: str, count: int = 4, **fields: Any) -> dict[str, Any]:
    """The same constraints of all tables."""
    wanted = ParameterConstraints(sharding_types=list(kinds), **fields)
    return {f"t{i}": wanted for i in range(count)}


def test_tables_are_planned_stored_and_loaded_that_torchrec_plans(
    tmp_path: Path,
) -> None:
    ebc, constraints = make_ebc(SMALL), only("table_wise")
    settings: Any = {"topology": gpus(hbm_cap=2 * MIB), "constraints": constraints}
    stock_planner(batch_size=512, **settings).plan(ebc, bag_sharders())
    planner = planner_of(**settings)
    with pytest.warns(UserWarning, match="out of memory ahead: rank") as caught:
        plan = planner.plan(ebc, bag_sharders())
    assert sorted(r for e in entries_of(plan).values() for r in e.ranks) == [0, 0, 1, 1]
    rehearsed = rehearse(ebc, plan, planner.topology, bag_sharders(), batch_size=512)
    warned = str(caught[0].message).removeprefix("out of memory ahead: ")
    assert rehearsed.ranks[0].faults[0].startswith(warned.split(".")[0])
    path = tmp_path / "plan.json"
    save_plan(plan, path, model=ebc, planner=planner)
    second = planner_of(**settings)
    second.plan_loader = NeuroShardPlanLoader(path, second)
    assert second.plan(ebc, bag_sharders()) == plan
    for found in (planner.last_result, second.last_result):
        assert found is not None
        assert any("out of memory ahead" in text for text in found.warnings)
    with pytest.raises(PlannerError, match=r"every rank needs .* Lower batch_size"):
        planner_of(**settings, strict_memory=True).plan(ebc, bag_sharders())


def test_a_plan_that_fits_is_preferred_to_one_that_torchrec_would_take() -> None:
    """By TorchRec's count all tables are quickest in rows."""
    constraints = only("data_parallel", "row_wise", compute_kernels=["dense", "fused"])
    planner = planner_of(
        topology=gpus(hbm_cap=3 * MIB + 2**18),
        storage_reservation=keep_nothing_back(),
        constraints=constraints,
    )
    plan = planner.plan(make_ebc(SMALL), bag_sharders())
    assert set(types_of(plan).values()) == {"data_parallel"}
    assert planner.last_result is not None
    assert not any("out of memory" in text for text in planner.last_result.warnings)


def test_one_table_that_fits_no_rank_whole_fits_in_rows() -> None:
    told: list[Any] = []

    class Told(EmbeddingStats):
        def log(self, **given: Any) -> None:
            told.append(given["sharding_plan"].plan)

    ebc = make_ebc([(4096, 128)])
    whole = only("table_wise", count=1, compute_kernels=["fused"])
    with pytest.raises(PlannerError, match="Allow row-wise sharding") as caught:
        planner_of(constraints=whole).plan(ebc, bag_sharders())
    assert caught.value.error_type == PlannerErrorType.STRICT_CONSTRAINTS
    rows = only("table_wise", "row_wise", count=1, compute_kernels=["fused"])
    plan = planner_of(constraints=rows, stats=[Told()]).plan(ebc, bag_sharders())
    assert shards_of(plan) == {"t0": [(0, 128, 0), (0, 128, 1)]}
    assert told == [plan.plan]  # not of the count by which nothing fitted


def test_what_fits_by_neither_count_is_told_how_many_ranks_are_enough() -> None:
    ebc = make_ebc([(10**6, 64), (10**5, 16)])
    settings: dict[str, Any] = {
        "storage_reservation": keep_nothing_back(),
        "batch_size": 64,
        "constraints": only(
            "table_wise", "row_wise", count=2, compute_kernels=["fused"]
        ),
    }

    def plan_on(count: int, strict_memory: bool = True) -> None:
        topology = gpus(count, hbm_cap=20 * MIB)
        planner_of(topology=topology, strict_memory=strict_memory, **settings).plan(
            ebc, bag_sharders()
        )

    with pytest.raises(PlannerError) as caught:
        plan_on(2, strict_memory=False)
    found = re.search(r"\. (\d+) ranks of this kind are enough\.", str(caught.value))
    assert found is not None
    plan_on(int(found[1]))
    with pytest.raises(PlannerError):
        plan_on(int(found[1]) - 1)


def test_tables_that_no_memory_holds_are_refused_as_by_torchrec() -> None:
    """However wide they are."""
    planner = planner_of(
        storage_reservation=FixedPercentageStorageReservation(0.15),
        constraints=only("table_wise", "row_wise", count=2),
    )
    with pytest.raises(PlannerError) as caught:
        planner.plan(make_ebc([(10**9, 10**5)] * 2), bag_sharders())
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE
