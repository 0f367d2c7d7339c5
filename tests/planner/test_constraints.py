"""Which ranks tables may be on, and in whose company: kept by every kind of plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import (
    ParameterConstraints,
)
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard import PlacementConstraints
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import (
    NeuroShardPlanner,
)
from torchrec_neuroshard.planner.constraints import PlacementRules

MakeEbc = Callable[..., EmbeddingBagCollection]
MakePlanner = Callable[..., NeuroShardPlanner]
Sharders = list[EmbeddingBagCollectionSharder]

SIZES = [(1000, 64), (5000, 32), (300, 16), (8000, 64), (2000, 128), (100, 8)]
NAMES = [f"t{i}" for i in range(len(SIZES))]


def ranks_of(plan: ShardingPlan) -> dict[str, set[int]]:
    return {
        f"{path}.{name}" if path else name: set(sharding.ranks)
        for path, module_plan in plan.plan.items()
        for name, sharding in module_plan.items()
    }


def uvm(**kwargs: Any) -> ParameterConstraints:
    return ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=["fused_uvm"], **kwargs
    )


# --- what the constraints mean ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pin": {"t33": [0]}},
            "pin names table 't33', which is not there; did you mean",
        ),
        (
            {"apart": [["t0", "user"]]},
            "apart names table 'user', .* the tables are 't0'",
        ),
        ({"pin": {"t0": [0, 4]}}, r"pin\['t0'\] has rank 4, which is not in 0 to 3"),
        ({"forbid_ranks": [-1]}, "forbid_ranks has rank -1, which is not in 0 to 3"),
        ({"forbid_ranks": range(4)}, "forbid_ranks forbids all 4 ranks"),
        (
            {"pin": {"t0": [1, 2]}, "forbid_ranks": [2, 1]},
            "'t0' is pinned to ranks 1, 2, all of which forbid_ranks forbids",
        ),
        (
            {"pin": {"t0": [0], "t1": [1, 2]}, "together": [["t1", "t0"]]},
            "'t0' and 't1' belong together, .* 't0' may be on rank 0, 't1' on ranks 1",
        ),
        (
            {"together": [["t0", "t1"], ["t1", "t2"]], "apart": [["t2", "t0"]]},
            "'t0' and 't2' are asked to lie both together and apart",
        ),
        (
            {"apart": [NAMES[:4]], "forbid_ranks": [3]},
            "'t0', 't1', 't2', 't3' belong apart, .* they may be on ranks 0, 1, 2. Pin",
        ),
        (
            {"pin": {"t0": [1], "t1": [1]}, "apart": [["t0", "t1", "t2"]]},
            "belong apart, .* nothing is left for 't[01]'",
        ),
    ],
)
def test_contradictions_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlacementConstraints(**arguments).rules(NAMES, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pin": {"t0": 1}}, r"pin\['t0'\] takes a list of ranks, .* got 1"),
        ({"pin": {"t0": []}}, r"pin\['t0'\] lists no rank"),
        ({"forbid_ranks": "01"}, "forbid_ranks takes a list of ranks"),
        ({"forbid_ranks": [True]}, "forbid_ranks takes a list of ranks"),
        ({"together": ["t0", "t1"]}, "together takes lists of tables.* is 't0'"),
        ({"apart": [["t0", "t0"]]}, "a set of apart needs at least two tables"),
    ],
)
def test_wrong_kinds_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlacementConstraints(**arguments)


def test_names_may_be_full_or_bare() -> None:
    tables = ["user.t", "item.t", "item.u"]
    pinned = PlacementConstraints(pin={"t": [0, 1], "item.t": [1, 2]})
    assert pinned.rules(tables, 4).allowed == {"user.t": (0, 1), "item.t": (1,)}
    apart = PlacementConstraints(apart=[["user.t", "u"]])
    assert apart.rules(tables, 4).apart == (("item.u", "user.t"),)
    both = PlacementConstraints(apart=[["t", "u"]])
    with pytest.raises(ConfigError, match="which several modules have; say which: 'it"):
        both.rules(tables, 4)


def test_constraints_compare_and_travel_as_json() -> None:
    constraints = PlacementConstraints(
        pin={"b": (3, 1, 1), "a": [0]}, together=[["d", "c"]], forbid_ranks={2}
    )
    assert constraints
    assert constraints.pin == {"a": (0,), "b": (1, 3)}
    assert PlacementConstraints(**constraints.to_json()) == constraints
    assert not PlacementConstraints()
    assert not PlacementConstraints().rules(NAMES, 4)


def test_placed_tables_narrow_the_ranks_of_others() -> None:
    rules = PlacementRules(
        4, {"a": (0, 1, 2)}, together=(("a", "b"),), apart=(("b", "c"), ("c", "d"))
    )
    by_company = rules.narrowed({"b": {2}})
    assert by_company.ranks("a") == (2,)
    assert by_company.ranks("c") == (0, 1, 3)
    assert by_company.ranks("d") == (0, 1, 2, 3)
    by_distance = rules.narrowed({"c": {0, 1}})
    assert by_distance.ranks("a") == (2,)
    assert by_distance.ranks("b") == (2, 3)
    assert rules.narrowed({"c": {0, 1, 2, 3}}).ranks("d") == ()


def test_breaches_are_told() -> None:
    rules = PlacementRules(
        4, {"a": (0, 1)}, together=(("a", "b"),), apart=(("c", "d"),)
    )
    fine = {"a": {0}, "b": {0}, "c": {1, 2}, "d": {3}, "e": {0, 1, 2, 3}}
    assert rules.breach(fine) is None
    for change, message in [
        ({"a": {2}, "b": {2}}, "'a' is on rank 2; it may be on ranks 0, 1 only"),
        ({"b": {1}}, "'a' and 'b' are on ranks 0, 1, not together"),
        ({"a": {0, 1}, "b": {0, 1}}, "'a' is on ranks 0, 1; it belongs on one"),
        ({"d": {2}}, "rank 2 holds both 'c' and 'd'"),
    ]:
        assert message in str(rules.breach(fine | change))
    assert rules.breach(fine | {"a": {2}, "b": {2}}, tables=["b"]) is None


# --- what the planner does with them ---

RULES = {
    "pinned": PlacementConstraints(pin={"t3": [1, 2], "t0": [3]}),
    "together": PlacementConstraints(together=[["t0", "t4"], ["t1", "t2", "t5"]]),
    "apart": PlacementConstraints(apart=[["t3", "t4", "t1"]]),
    "forbidden": PlacementConstraints(forbid_ranks=[1, 2]),
    "all": PlacementConstraints(
        pin={"t4": [0, 1, 3], "t3": [2]},
        together=[["t0", "t5"]],
        apart=[["t0", "t4"], ["t3", "t1"]],
        forbid_ranks=[1],
    ),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("max_switches", [0, 3])
def test_every_plan_keeps_them(
    rules: PlacementConstraints,
    max_switches: int,
    make_ebc: MakeEbc,
    make_planner: MakePlanner,
    sharders: Sharders,
) -> None:
    planner = make_planner(
        4,
        placement_constraints=rules,
        max_switches=max_switches,
        consider_stock=True,
    )
    plan = planner.plan(make_ebc(SIZES), sharders)
    held = ranks_of(plan)
    assert sorted(held) == NAMES
    assert rules.rules(held, 4).breach(held) is None
