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
from torchrec_neuroshard import NeuroShardPlanner, save_plan
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


@pytest.mark.parametrize("kinds", [("table_wise",), ("table_wise", "row_wise")])
def test_tables_are_planned_that_torchrec_plans(kinds: tuple[str, ...]) -> None:
    ebc, constraints = make_ebc(SMALL), only(*kinds)
    topology = gpus(hbm_cap=2 * MIB)
    stock_planner(topology, batch_size=512, constraints=constraints).plan(
        ebc, bag_sharders()
    )
    with pytest.warns(UserWarning, match="out of memory ahead: rank"):
        plan = planner_of(constraints=constraints).plan(ebc, bag_sharders())
    assert sorted(r for e in entries_of(plan).values() for r in e.ranks) == [0, 0, 1, 1]
    with pytest.raises(PlannerError, match=r"every rank needs .* Lower batch_size"):
        planner_of(constraints=constraints, strict_memory=True).plan(
            ebc, bag_sharders()
        )


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


def test_a_planner_that_found_no_plan_plans_the_next_model() -> None:
    """One table that fits no rank whole, and does in rows; statistics of one run."""
    told: list[Any] = []

    class Told(EmbeddingStats):
        def log(self, **given: Any) -> None:
            told.append(given["sharding_plan"].plan)

    ebc = make_ebc([(4096, 128)])
    whole = planner_of(
        constraints=only("table_wise", count=1, compute_kernels=["fused"]),
        stats=[Told()],
    )
    with pytest.raises(PlannerError) as caught:
        whole.plan(ebc, bag_sharders())
    assert caught.value.error_type == PlannerErrorType.STRICT_CONSTRAINTS
    assert "Allow row-wise sharding" in str(caught.value)
    told.clear()
    constraints = only("table_wise", "row_wise", count=1, compute_kernels=["fused"])
    planner = planner_of(constraints=constraints, stats=[Told()])
    plan = planner.plan(ebc, bag_sharders())
    assert shards_of(plan) == {"t0": [(0, 128, 0), (0, 128, 1)]}
    assert told == [plan.plan]  # not of the count by which nothing fitted


def test_a_stored_plan_is_loaded_that_fits_by_torchrecs_count(tmp_path: Path) -> None:
    path, ebc = tmp_path / "plan.json", make_ebc(SMALL)
    first = planner_of(constraints=only("table_wise"))
    plan = first.plan(ebc, bag_sharders())
    save_plan(plan, path, model=ebc, planner=first)
    second = planner_of(constraints=only("table_wise"))
    second.plan_loader = NeuroShardPlanLoader(path, second)
    assert second.plan(ebc, bag_sharders()) == plan
    assert second.last_result is not None
    assert any("out of memory ahead" in text for text in second.last_result.warnings)


def test_what_fits_by_neither_count_is_told_how_many_ranks_are_enough() -> None:
    ebc = make_ebc([(10**6, 64), (10**5, 16)])
    room = {"storage_reservation": keep_nothing_back(), "batch_size": 64}
    kernels = only("table_wise", "row_wise", count=2, compute_kernels=["fused"])
    with pytest.raises(PlannerError) as caught:
        planner_of(
            topology=gpus(2, hbm_cap=20 * MIB), constraints=kernels, **room
        ).plan(ebc, bag_sharders())
    found = re.search(r"\. (\d+) ranks of this kind are enough\.\n", str(caught.value))
    assert found is not None
    enough = int(found[1])
    for count in (enough, enough - 1):
        planner = planner_of(
            topology=gpus(count, hbm_cap=20 * MIB),
            constraints=kernels,
            strict_memory=True,
            **room,
        )
        if count < enough:
            with pytest.raises(PlannerError):
                planner.plan(ebc, bag_sharders())
        else:
            planner.plan(ebc, bag_sharders())


def test_tables_that_no_memory_holds_are_refused_as_by_torchrec() -> None:
    """However wide they are."""
    planner = planner_of(
        storage_reservation=FixedPercentageStorageReservation(0.15),
        constraints=only("table_wise", "row_wise", count=2),
    )
    with pytest.raises(PlannerError) as caught:
        planner.plan(make_ebc([(10**7, 10**7)] * 2), bag_sharders())
    assert caught.value.error_type == PlannerErrorType.INSUFFICIENT_STORAGE
