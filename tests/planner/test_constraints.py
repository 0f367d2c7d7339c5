"""Placement constraints, which every kind of plan satisfies."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.types import ShardingPlan

from tests.builders import (
    FixedSearcher,
    analytic,
    bag_sharders,
    each,
    entries_of,
    gpus,
    make_ebc,
    make_planner,
    types_of,
)
from torchrec_neuroshard import PlacementConstraints
from torchrec_neuroshard.errors import ConfigError, PlacementError, PlanMismatchError
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
from torchrec_neuroshard.plans.replan import replan

SIZES = [(1000, 64), (5000, 32), (300, 16), (8000, 64), (2000, 128), (100, 8)]
NAMES = [f"t{i}" for i in range(len(SIZES))]


def ranks_of(plan: ShardingPlan) -> dict[str, Collection[int]]:
    return {name: set(sharding.ranks) for name, sharding in entries_of(plan).items()}


def keeps(plan: ShardingPlan, placement: PlacementConstraints, world_size: int) -> bool:
    held = ranks_of(plan)
    rules = placement.rules(held, world_size)
    return rules.violation({rules.index[t]: on for t, on in held.items()}) is None


# --- what the constraints mean ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pin": {"t33": [0]}}, "'t33'"),
        ({"pin": {"t0": [0, 4]}}, r"pin\['t0'\] has rank 4"),
        ({"forbid_ranks": range(4)}, "forbid_ranks leave no rank for table 't0'"),
        ({"pin": {"t1": [1, 2]}, "forbid_ranks": [2, 1]}, "no rank for table 't1'"),
        ({"pin": {"t2": []}}, "pin.* no rank for table 't2'"),
        (
            {"pin": {"t0": [0], "t1": [1, 2]}, "together": [["t1", "t0"]]},
            "'t0' and 't1' must be together",
        ),
        (
            {"together": [["t0", "t1"], ["t1", "t2"]], "apart": [["t2", "t0"]]},
            "'t0' and 't2'",
        ),
        ({"apart": [NAMES[:4]], "forbid_ranks": [3]}, "'t0', 't1', 't2', 't3'"),
        (
            {
                "pin": {"t0": [0], "t2": [0, 1], "t3": [1, 0]},
                "apart": [["t0", "t2"], ["t2", "t3"], ["t0", "t3"]],
            },
            "no rank for table 't[23]'",
        ),
        ({"pin": {"t0": 1}}, r"pin\['t0'\] takes a list of ranks"),
        ({"pin": {"t0": [-1]}}, r"pin\['t0'\] takes a list of ranks"),
        ({"pin": {3: [0]}}, "a table's name in pin is a int, 3"),
        ({"pin": ["t0"]}, "pin is a list"),
        ({"forbid_ranks": 3}, "forbid_ranks takes a list of ranks"),
        ({"forbid_ranks": [True]}, "forbid_ranks"),
        ({"together": ["t0", "t1"]}, "together"),
        ({"apart": [3]}, "apart takes sets .* one set is 3"),
        ({"apart": [["t0", "t0"]]}, "apart"),
    ],
)
def test_impossible_constraints_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PlacementConstraints(**arguments).rules(NAMES, 4)


def test_names_may_have_a_module_or_not() -> None:
    tables = ["user.t", "item.t", "item.u"]
    for name in ("item.t", "item/t"):
        pinned = PlacementConstraints(pin={"t": [0, 1], name: [1, 2]})
        assert pinned.rules(tables, 4).allowed == {0: (0, 1), 1: (1,)}
    with pytest.raises(ConfigError, match="did you mean 'item/u'"):
        PlacementConstraints(pin={"itm/u": [0]}).rules(["item.u"], 2)
    apart = PlacementConstraints(apart=[["user.t", "u"]])
    assert apart.rules(tables, 4).apart == ((0, 2),)
    both = PlacementConstraints(apart=[["t", "u"]])
    with pytest.raises(ConfigError, match="which several modules have; use 'it"):
        both.rules(tables, 4)
    assert not PlacementConstraints().rules(NAMES, 4)


def test_consequences_of_constraints_hold() -> None:
    rules = PlacementConstraints(
        pin={"t0": [1], "t1": [1, 2], "t2": [0, 2, 3], "t3": [0, 3], "t5": [0, 1, 2]},
        together=[["t3", "t2"], ["t4", "t2"]],
        apart=[["t0", "t1"], ["t1", "t2"], ["t0", "t5"]],
    ).rules(NAMES, 4)
    company = (0, 3)
    found = [rules.ranks(i) for i in range(6)]
    assert found == [(1,), (2,), company, company, company, (0, 2)]


# --- what the planner does with them ---

RULES = PlacementConstraints(
    pin={"t4": [0, 1, 3], "t3": [2]},
    together=[["t0", "t5"]],
    apart=[["t0", "t4"], ["t3", "t1"]],
    forbid_ranks=[1],
)
KINDS: list[dict[str, Any]] = [
    {"sharding_types": ["table_wise"], "compute_kernels": ["fused_uvm"]},
    {
        "sharding_types": ["table_wise", "row_wise"],
        "compute_kernels": ["fused_uvm_caching"],
    },
    {"compute_kernels": ["fused"]},
    {"sharding_types": ["table_column_wise", "table_wise"]},
]


@pytest.mark.one_release
@pytest.mark.parametrize(
    "seed",
    [*range(3), *(pytest.param(s, marks=pytest.mark.nightly) for s in range(3, 8))],
)
def test_random_constraints_hold(seed: int) -> None:
    """With tables of all kinds, little memory and the real search."""
    rng = np.random.default_rng(seed)
    kinds = [{}, {}, {}, *KINDS]
    picks = rng.integers(0, len(kinds), len(SIZES))

    def draw(sets: int) -> list[list[str]]:
        return [rng.choice(NAMES, 2, replace=False).tolist() for _ in range(sets)]

    rules = PlacementConstraints(
        pin={n: rng.integers(0, 4, 2).tolist() for n in NAMES if rng.random() < 0.3},
        together=draw(seed % 2),
        apart=draw(1 + seed % 2),
        forbid_ranks=[3] if seed % 3 == 0 else [],
    )
    planner = make_planner(
        topology=gpus(4, 2, hbm_cap=6_500_000),
        constraints={
            n: ParameterConstraints(**kinds[picks[i]]) for i, n in enumerate(NAMES)
        },
        placement_constraints=rules,
    )
    try:
        plan = planner.plan(make_ebc(SIZES), bag_sharders())
    except ConfigError as error:
        assert re.search("pinned|together|apart", str(error))
    else:
        assert keeps(plan, rules, 4)


def test_node_wise_tables_stay_in_allowed_nodes() -> None:
    planner = make_planner(
        topology=gpus(4, 2),
        constraints=each(2, "table_row_wise"),
        placement_constraints=PlacementConstraints(pin={"t0": [1, 2, 3]}),
    )
    plan = planner.plan(make_ebc([(1000, 64), (10**5, 64)]), bag_sharders())
    assert set(types_of(plan).values()) == {"table_row_wise"}
    assert ranks_of(plan)["t0"] == {2, 3}


def to_rank_1(options: list[ShardingOption]) -> list[ShardingOption]:
    for option in options:
        option.shards[0].rank = 1
    return options


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ({"search": FixedSearcher([(0, 64, 1)])}, PlacementError, "search 'fixed'"),
        ({"callbacks": [to_rank_1]}, ConfigError, "placement_constraints"),
        # It deals the tables out from rank 0 on.
        ({"partitioner": GreedyPerfPartitioner()}, ConfigError, "placement_constr"),
    ],
)
def test_a_part_that_ignores_constraints_is_refused(
    part: dict[str, Any], error: type[Exception], message: str
) -> None:
    wanted = [1] if "partitioner" in part else [0]
    pinned = PlacementConstraints(pin={"t0": wanted})
    planner = make_planner(2, placement_constraints=pinned, **part)
    with pytest.raises(error, match=f"{message}.*'t0' is on rank {1 - wanted[0]}"):
        planner.plan(make_ebc([(1000, 64)]), bag_sharders())
    assert planner.last_result is None


# --- plans that are there already ---


def test_names_mean_tables_of_a_module() -> None:
    towers = {"user": make_ebc(SIZES[:2]), "item": make_ebc(SIZES[2:4])}
    rules = PlacementConstraints(
        pin={"t0": [1, 2]},
        together=[["user.t0", "item.t1"]],
        apart=[["item.t0", "user.t0"]],
    )
    planner = make_planner(3, placement_constraints=rules)
    held = ranks_of(planner.plan(nn.ModuleDict(towers), bag_sharders()))
    assert held["user.t0"] == held["item.t1"]
    assert set(held["item.t0"]) < {1, 2} > set(held["user.t0"])
    assert set(held["item.t0"]).isdisjoint(held["user.t0"])


def test_memory_for_pinned_tables_is_that_of_these_tables_alone() -> None:
    """Tables may leave device memory only where it is scarce."""
    model = nn.ModuleDict({"a": make_ebc([(100, 64)]), "b": make_ebc([(3000, 64)])})
    topology = gpus(8, hbm_cap=10_000 * 64 * 4)

    def kernels(**placement: Any) -> set[str]:
        rules = PlacementConstraints(**placement)
        enumerator = NeuroShardEnumerator(topology, 64, placement=rules, **analytic())
        options = enumerator.enumerate(model, bag_sharders())
        return {o.compute_kernel for o in options if not o.compute_kernel == "dense"}

    assert kernels(pin={"a.t0": [0]}) == kernels(pin={"a/t0": [0]}) == {"fused"}
    for pin in ({"t0": [0]}, {"a.t0": [0], "b/t0": [0]}):
        assert len(kernels(pin=pin)) > 1


def test_plan_files_and_moves_satisfy_constraints(tmp_path: Path) -> None:
    path, model = tmp_path / "plan.json", make_ebc(SIZES)
    # Every table where it may be, on as few ranks as that takes.
    start = [(t, SIZES[t][1], rank) for t, rank in enumerate([3, 0, 0, 2, 0, 3])]
    planner = make_planner(4, placement_constraints=RULES, search=FixedSearcher(start))
    plan = planner.plan(model, bag_sharders())
    save_plan(plan, path, model=model, planner=planner)
    assert load_plan(path, model=model, planner=planner).plan == plan.plan
    elsewhere = PlacementConstraints(pin={"t3": [0, 1]})
    other = make_planner(4, placement_constraints=elsewhere)
    with pytest.raises(PlanMismatchError, match="'t3' is on rank 2"):
        load_plan(path, model=model, planner=other)
    result = replan(
        plan, planner=planner, model=model, sharders=bag_sharders(), budget_bytes=2**60
    )
    assert result.moves
    assert result.after.critical_path_ms < result.before.critical_path_ms
    assert keeps(result.plan, RULES, 4)
