"""Which ranks tables may be on, and with which others: kept by every kind of plan."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingPlan

from tests.builders import (
    FixedSearcher,
    bag_sharders,
    cost_of,
    make_ebc,
    make_planner,
    types_of,
)
from torchrec_neuroshard import PlacementConstraints
from torchrec_neuroshard.errors import ConfigError, PlacementError
from torchrec_neuroshard.planner import (
    NeuroShardPlanLoader,
    PlanMismatchError,
    load_plan,
    replan,
    save_plan,
)

SIZES = [(1000, 64), (5000, 32), (300, 16), (8000, 64), (2000, 128), (100, 8)]
NAMES = [f"t{i}" for i in range(len(SIZES))]


def ranks_of(plan: ShardingPlan) -> dict[str, Collection[int]]:
    return {
        f"{path}.{name}" if path else name: set(sharding.ranks)
        for path, module_plan in plan.plan.items()
        for name, sharding in module_plan.items()
    }


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
        ({"forbid_ranks": range(4)}, "forbids all 4 ranks"),
        ({"pin": {"t0": [1, 2]}, "forbid_ranks": [2, 1]}, "'t0'.* ranks 1, 2"),
        (
            {"pin": {"t0": [0], "t1": [1, 2]}, "together": [["t1", "t0"]]},
            "'t0' and 't1' belong together",
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
    ],
)
def test_contradictions_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlacementConstraints(**arguments).rules(NAMES, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pin": {"t0": 1}}, r"pin\['t0'\]"),
        ({"forbid_ranks": [True]}, "forbid_ranks"),
        ({"together": ["t0", "t1"]}, "together"),
        ({"apart": [["t0", "t0"]]}, "apart"),
    ],
)
def test_wrong_kinds_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlacementConstraints(**arguments)


def test_names_may_be_full_or_bare() -> None:
    tables = ["user.t", "item.t", "item.u"]
    pinned = PlacementConstraints(pin={"t": [0, 1], "item.t": [1, 2]})
    assert pinned.rules(tables, 4).allowed == {0: (0, 1), 1: (1,)}
    apart = PlacementConstraints(apart=[["user.t", "u"]])
    assert apart.rules(tables, 4).apart == ((0, 2),)
    both = PlacementConstraints(apart=[["t", "u"]])
    with pytest.raises(ConfigError, match="which several modules have; say which: 'it"):
        both.rules(tables, 4)


def test_company_shares_the_ranks_of_all() -> None:
    rules = PlacementConstraints(
        pin={"t0": [0, 1, 2], "t2": [1, 2, 3]}, together=[["t0", "t1"], ["t1", "t2"]]
    ).rules(NAMES, 4)
    assert rules.together == ((0, 1, 2),)
    assert {rules.ranks(i) for i in range(3)} == {(1, 2)}


def test_what_follows_from_constraints_is_drawn() -> None:
    rules = PlacementConstraints(
        pin={"t0": [1], "t1": [1, 2], "t2": [0, 2, 3]},
        together=[["t3", "t2"]],
        apart=[["t0", "t1"], ["t1", "t2"]],
    ).rules(NAMES, 4)
    assert [rules.ranks(i) for i in range(4)] == [(1,), (2,), (0, 3), (0, 3)]


def test_constraints_compare_and_travel_as_json() -> None:
    constraints = PlacementConstraints(
        pin={"b": (3, 1, 1), "a": [0]}, together=[["d", "c"]], forbid_ranks={2}
    )
    assert constraints
    assert constraints.pin == {"a": (0,), "b": (1, 3)}
    assert PlacementConstraints(**constraints.to_json()) == constraints
    assert not PlacementConstraints()
    assert not PlacementConstraints().rules(NAMES, 4)


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


@pytest.mark.parametrize("name", RULES)
def test_every_plan_keeps_them(name: str) -> None:
    compute_device, copies = ("cpu", 4) if name == "all" else ("cuda", 1)
    rules = RULES[name]
    planner = make_planner(
        4,
        compute_device,
        placement_constraints=rules,
        consider_stock=True,
    )
    plan = planner.plan(make_ebc(copies * SIZES), bag_sharders())
    assert len(ranks_of(plan)) == copies * len(SIZES)
    assert keeps(plan, rules, 4)


KINDS = {
    "host memory": {
        "sharding_types": ["table_wise"],
        "compute_kernels": ["fused_uvm"],
    },
    "caching": {
        "sharding_types": ["table_wise", "row_wise"],
        "compute_kernels": ["fused_uvm_caching"],
    },
    "every type": {"compute_kernels": ["fused"]},
    "by node": {"sharding_types": ["table_column_wise", "table_wise"]},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_tables_of_any_kernel_keep_them(kind: dict[str, list[str]]) -> None:
    """Half of the tables are of kinds that are not searched."""
    rules = RULES["all"]
    planner = make_planner(
        topology=Topology(4, "cuda", local_world_size=2),
        placement_constraints=rules,
        constraints={n: ParameterConstraints(**kind) for n in NAMES[::2]},
    )
    plan = planner.plan(make_ebc(SIZES), bag_sharders())
    assert keeps(plan, rules, 4)


@pytest.mark.one_release
@pytest.mark.parametrize(
    "seed",
    [*range(3), *(pytest.param(s, marks=pytest.mark.nightly) for s in range(3, 8))],
)
def test_constraints_drawn_at_random(seed: int) -> None:
    """Of tables of all kinds, in scarce memory, through the real search."""
    rng = np.random.default_rng(seed)
    kinds = [None, None, None, *KINDS.values()]
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
        topology=Topology(4, "cuda", local_world_size=2, hbm_cap=6_500_000),
        constraints={
            n: ParameterConstraints(**kinds[k])
            for n, k in zip(NAMES, picks, strict=True)
            if kinds[k] is not None
        },
        placement_constraints=rules,
        consider_stock=seed == 1,
    )
    try:
        plan = planner.plan(make_ebc(SIZES), bag_sharders())
    except ConfigError as error:
        assert re.search("pinned|together|apart", str(error))
        assert "callback" not in str(error)
    else:
        assert keeps(plan, rules, 4)


def test_row_wise_and_replicas_need_every_rank() -> None:
    for name in ("row_wise", "data_parallel"):
        only = {"t0": ParameterConstraints(sharding_types=[name])}
        planner = make_planner(
            2,
            "cuda",
            constraints=only,
            placement_constraints=PlacementConstraints(pin={"t0": [1]}),
        )
        with pytest.raises(
            ConfigError,
            match=f"'t0' may only be sharded {name}, which needs more ranks",
        ):
            planner.plan(make_ebc([(10**6, 64)]), bag_sharders())


def test_node_wise_tables_stay_in_allowed_nodes() -> None:
    only = ParameterConstraints(sharding_types=["table_row_wise"])
    for ranks, node in [([2, 3], {2, 3}), ([0, 1, 2], {0, 1})]:
        planner = make_planner(
            topology=Topology(4, "cuda", local_world_size=2),
            constraints={"t0": only, "t1": only},
            placement_constraints=PlacementConstraints(pin={"t0": ranks}),
        )
        plan = planner.plan(make_ebc([(1000, 64), (10**5, 64)]), bag_sharders())
        assert set(types_of(plan).values()) == {"table_row_wise"}
        assert ranks_of(plan)["t0"] == node
    planner = make_planner(
        topology=Topology(4, "cuda", local_world_size=2),
        constraints={"t0": only},
        placement_constraints=PlacementConstraints(pin={"t0": [1, 2]}),
    )
    with pytest.raises(ConfigError, match="'t0' may only be sharded table_row_wise"):
        planner.plan(make_ebc([(1000, 64)]), bag_sharders())


def test_company_costs_what_pins_to_one_rank_do() -> None:
    """Two of three tables of 31 GB fit a device of 80, the third is cached."""
    names = ["t0", "t1", "t2"]
    found = {}
    for rules in (
        PlacementConstraints(together=[names]),
        PlacementConstraints(pin={name: [0] for name in names}),
    ):
        planner = make_planner(
            topology=Topology(2, "cuda", hbm_cap=80 * 10**9),
            placement_constraints=rules,
            batch_size=8192,
        )
        plan = planner.plan(make_ebc([(60_500_000, 128)] * 3), bag_sharders())
        assert keeps(plan, rules, 2)
        kernels = [sharding.compute_kernel for sharding in plan.plan[""].values()]
        found[rules] = cost_of(planner), sorted(kernels)
    company, pins = found.values()
    assert company[0] == pytest.approx(pins[0], rel=1e-3)
    assert company[1] == ["fused", "fused", "fused_uvm_caching"]


def test_a_stock_plan_that_breaks_them_is_no_candidate() -> None:
    """Everything on one rank is slow: TorchRec's plan would win."""
    sizes = [(1000, 64)] * 4
    searcher = FixedSearcher([(i, 64, 0) for i in range(4)])
    arguments: dict[str, Any] = {"search": searcher, "consider_stock": True}
    free = make_planner(2, **arguments)
    free.plan(make_ebc(sizes), bag_sharders())
    assert free.last_result is not None and free.last_result.fallback is not None
    pinned = PlacementConstraints(pin={f"t{i}": [0] for i in range(4)})
    planner = make_planner(2, **arguments, placement_constraints=pinned)
    plan = planner.plan(make_ebc(sizes), bag_sharders())
    assert planner.last_result is not None and planner.last_result.fallback is None
    assert keeps(plan, pinned, 2)


def test_a_partitioner_that_ignores_them_makes_no_plan() -> None:
    apart = PlacementConstraints(together=[["t0", "t1"]])
    planner = make_planner(
        2, partitioner=GreedyPerfPartitioner(), placement_constraints=apart
    )
    with pytest.raises(ConfigError, match=r"breaks placement_constraints: .*'t[01]'"):
        planner.plan(make_ebc([(1000, 64)] * 2), bag_sharders())


def test_a_search_that_does_not_know_them_says_so() -> None:
    planner = make_planner(
        4, search="milp", placement_constraints=RULES["pinned"], consider_stock=True
    )
    with pytest.raises(ConfigError, match=r"allowed_ranks.*search='default'"):
        planner.plan(make_ebc(SIZES), bag_sharders())


def test_a_search_that_ignores_them_is_named() -> None:
    planner = make_planner(
        2,
        search=FixedSearcher([(0, 64, 1)]),
        placement_constraints=PlacementConstraints(pin={"t0": [0]}),
    )
    with pytest.raises(PlacementError, match=r"search 'fixed' .* 't0' is on rank 1"):
        planner.plan(make_ebc([(1000, 64)]), bag_sharders())


def test_a_callback_may_not_break_them() -> None:
    def to_rank_1(options: list[ShardingOption]) -> list[ShardingOption]:
        for option, shard in itertools.product(options, range(1)):
            option.shards[shard].rank = 1
        return options

    planner = make_planner(
        2,
        callbacks=[to_rank_1],
        placement_constraints=PlacementConstraints(pin={"t0": [0]}),
    )
    with pytest.raises(ConfigError, match="'t0' is on rank 1"):
        planner.plan(make_ebc([(1000, 64)]), bag_sharders())
    assert planner.last_result is None


def test_stock_proposals_are_held_to_them() -> None:
    """TorchRec's proposer knows nothing of them; the partitioner keeps them."""
    rules = RULES["all"]
    whole = ParameterConstraints(sharding_types=["table_wise", "column_wise"])
    planner = make_planner(
        4,
        proposer=GreedyProposer(),
        constraints=dict.fromkeys(NAMES, whole),
        placement_constraints=rules,
    )
    plan = planner.plan(make_ebc(SIZES), bag_sharders())
    assert keeps(plan, rules, 4)


# --- plans that are there already ---


class Towers(nn.Module):
    """Two modules with tables of the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.user = make_ebc(SIZES[:2])
        self.item = make_ebc(SIZES[2:4])


def test_names_mean_tables_of_a_module() -> None:
    rules = PlacementConstraints(
        pin={"t0": [1, 2]},
        together=[["user.t0", "item.t1"]],
        apart=[["item.t0", "user.t0"]],
    )
    planner = make_planner(3, placement_constraints=rules)
    held = ranks_of(planner.plan(Towers(), bag_sharders()))
    assert held["user.t0"] == held["item.t1"]
    assert set(held["item.t0"]) < {1, 2} > set(held["user.t0"])
    assert set(held["item.t0"]).isdisjoint(held["user.t0"])


def test_files_are_held_to_them(tmp_path: Path) -> None:
    rules, path = RULES["pinned"], tmp_path / "plan.json"
    model = make_ebc(SIZES)
    planner = make_planner(4, placement_constraints=rules)
    plan = planner.plan(model, bag_sharders())
    save_plan(plan, path, model=model, planner=planner)
    assert load_plan(path, model=model, planner=planner).plan == plan.plan
    assert load_plan(path, model=model, planner=make_planner(4)).plan == plan.plan
    elsewhere = PlacementConstraints(pin={"t0": [0, 1]})
    other = make_planner(4, placement_constraints=elsewhere)
    other.plan_loader = NeuroShardPlanLoader(path, other)
    with pytest.raises(PlanMismatchError, match="'t0' is on rank 3"):
        other.plan(model, bag_sharders())


@pytest.mark.parametrize("name", ["apart", "forbidden", "all"])
def test_moves_keep_them(name: str) -> None:
    """From everything where it may be, but as few ranks as that takes."""
    model = make_ebc(SIZES)
    rules = RULES[name]
    start = {
        "apart": [0, 1, 0, 0, 2, 0],
        "forbidden": [0, 0, 0, 0, 0, 0],
        "all": [3, 0, 0, 2, 0, 3],
    }
    triples = [(t, SIZES[t][1], r) for t, r in enumerate(start[name])]
    planner = make_planner(
        4, placement_constraints=rules, search=FixedSearcher(triples)
    )
    plan = planner.plan(model, bag_sharders())
    result = replan(
        plan, planner=planner, model=model, sharders=bag_sharders(), budget_bytes=2**60
    )
    assert result.moves
    assert result.after.critical_path_ms < result.before.critical_path_ms
    assert keeps(result.plan, rules, 4)
