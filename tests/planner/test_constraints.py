"""Placement constraints, and constraints by module path for tables of the same name."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan

from tests.builders import (
    Chosen,
    FixedSearcher,
    analytic,
    bag_sharders,
    each,
    entries_of,
    gpus,
    keep_nothing_back,
    make_ebc,
    make_planner,
    stock_planner,
    types_of,
)
from torchrec_neuroshard import PlacementConstraints, rehearse
from torchrec_neuroshard.commands.files import read_constraints
from torchrec_neuroshard.commands.inputs import GivenModel, given_constraints
from torchrec_neuroshard.errors import ConfigError, PlacementError, PlanMismatchError
from torchrec_neuroshard.planner import NeuroShardEnumerator
from torchrec_neuroshard.planner.torchrec_plan import stock_plan
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


# --- constraints by module path ---


TOWERS = [(4000, 64), (8000, 32)]
ROW_WISE = ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[20.0])
TABLE_WISE = ParameterConstraints(sharding_types=["table_wise"])
BY_PATH = {"user.ebc/t0": ROW_WISE, "item.ebc.t0": TABLE_WISE}
"""Both forms; the second is the one that TorchEasyRec writes."""


def towers() -> nn.ModuleDict:
    """Tables t0 and t1 at `user.ebc`, and others of these names at `item.ebc`."""
    return nn.ModuleDict(
        {side: nn.ModuleDict({"ebc": make_ebc(TOWERS)}) for side in ("user", "item")}
    )


def pooling_of(options: list[ShardingOption]) -> dict[str, float]:
    return {f"{o.path}.{o.name}": float(sum(o.input_lengths)) for o in options}


def test_tables_of_the_same_name_have_separate_constraints() -> None:
    """A path wins over a bare name."""
    chosen = Chosen()
    planner = make_planner(
        topology=gpus(2),
        constraints=BY_PATH | each(2, "data_parallel"),
        callbacks=[chosen],
    )
    types = types_of(planner.plan(towers(), bag_sharders()))
    assert types == {
        "user.ebc.t0": "row_wise",
        "item.ebc.t0": "table_wise",
        "user.ebc.t1": "data_parallel",
        "item.ebc.t1": "data_parallel",
    }
    assert pooling_of(chosen.options) == dict.fromkeys(types, 1.0) | {
        "user.ebc.t0": 20.0
    }
    reader = planner.costs.reader
    read = {o.path: reader.table(o) for o in chosen.options if o.name == "t0"}
    assert read["user.ebc"].pooling_factor == 20.0
    assert read["item.ebc"].pooling_factor == 1.0


def test_an_unknown_path_is_noted_with_a_suggestion() -> None:
    planner = make_planner(constraints={"usr.ebc/t0": TABLE_WISE, "t9": TABLE_WISE})
    with pytest.warns(UserWarning) as told:
        planner.plan(towers(), bag_sharders())
    [text] = [str(w.message) for w in told]
    assert "name table 'usr.ebc/t0', which the model does not have" in text
    assert "did you mean 'user.ebc/t0'" in text
    assert text.endswith("? The same holds for 't9'.")


def test_a_device_group_applies_to_one_modules_table() -> None:
    constraints = {"user.ebc/t0": ParameterConstraints(device_group="cpu")}
    enumerator = NeuroShardEnumerator(gpus(2), 64, constraints, **analytic())
    options = enumerator.enumerate(towers(), bag_sharders())
    found = {(o.path, o.name) for o in options}
    assert ("user.ebc", "t0") not in found and ("item.ebc", "t0") in found


def test_memory_of_the_host_is_for_the_module_that_may_use_it() -> None:
    fused = ParameterConstraints(compute_kernels=["fused"])
    cached = ParameterConstraints(compute_kernels=["fused_uvm_caching"])
    enumerator = NeuroShardEnumerator(
        gpus(2), 64, {"user.ebc/t0": fused, "item.ebc/t0": cached}, **analytic()
    )
    options = enumerator.enumerate(towers(), bag_sharders())
    kernels = {
        side: {
            o.compute_kernel
            for o in [*options, *enumerator.withheld(options)]
            if (o.path, o.name) == (f"{side}.ebc", "t0")
        }
        for side in ("user", "item")
    }
    assert kernels == {"user": {"fused"}, "item": {"fused_uvm_caching"}}


def test_torchrecs_parts_work_with_module_keys() -> None:
    """Our parts in TorchRec's planner, its parts in ours, and its own plan."""
    topology = gpus(2)
    ours = NeuroShardEnumerator(topology, 64, BY_PATH, **analytic())
    types = types_of(
        stock_planner(topology, enumerator=ours, constraints=BY_PATH).plan(
            towers(), bag_sharders()
        )
    )
    assert (types["user.ebc.t0"], types["item.ebc.t0"]) == ("row_wise", "table_wise")
    settings: Any = {"storage_reservation": keep_nothing_back(), "stats": []}
    plan = stock_plan(
        towers(),
        bag_sharders(),
        [],
        topology=topology,
        batch_size=64,
        constraints=BY_PATH,
        debug=False,
        **settings,
    )
    assert types_of(plan)["item.ebc.t0"] == "table_wise"
    assert types_of(plan)["user.ebc.t0"] == "row_wise"
    reserved = [
        make_planner(topology=gpus(2), constraints=given, storage_reservation=None)
        .reserve(towers(), bag_sharders())
        .devices[0]
        .storage.hbm
        for given in (BY_PATH, {"t0": ROW_WISE}, {"t0": TABLE_WISE})
    ]
    # A reservation knows no modules: the one that looks up most counts for both.
    assert reserved[0] == reserved[1] < reserved[2]


def test_ids_of_one_module_count_in_a_rehearsal_and_a_plan_file(tmp_path: Path) -> None:
    model, chosen = towers(), Chosen()
    planner = make_planner(
        topology=gpus(2), constraints=BY_PATH, callbacks=[chosen], batch_size=512
    )
    plan = planner.plan(model, bag_sharders())
    settings: Any = {"batch_size": 512, "sharders": bag_sharders()}
    known, less = (
        rehearse(towers(), plan, gpus(2), constraints=given, **settings)
        for given in (BY_PATH, {"item.ebc.t0": TABLE_WISE})
    )
    assert known.ranks[0].activation_bytes > less.ranks[0].activation_bytes
    save_plan(plan, tmp_path / "plan.json", model=model, planner=planner)
    load_plan(tmp_path / "plan.json", model=model, planner=planner)
    other = {"user.ebc/t0": TABLE_WISE, "item.ebc/t0": TABLE_WISE}
    with pytest.raises(PlanMismatchError, match=r"'user\.ebc\.t0' is row_wise"):
        load_plan(
            tmp_path / "plan.json",
            model=model,
            planner=make_planner(topology=gpus(2), constraints=other, batch_size=512),
        )


def test_files_of_constraints_name_modules(tmp_path: Path) -> None:
    given = GivenModel(
        module=towers(),
        sharders=list(bag_sharders()),
        constraints={"item.ebc.t0": ROW_WISE, "t1": TABLE_WISE},
        profiles={},
    )
    path = tmp_path / "c.json"
    path.write_text(
        '{"*": {"min_partition": 16}, "t0": {"min_partition": 32}, '
        '"user.ebc/t0": {"sharding_types": ["column_wise"]}}'
    )
    found = given_constraints(read_constraints(path), given)
    read = {
        key: (found[key].min_partition, found[key].sharding_types)
        for key in (f"{s}.ebc/t{i}" for s in ("user", "item") for i in range(2))
    }
    assert read == {
        "user.ebc/t0": (32, ["column_wise"]),
        "item.ebc/t0": (32, ["row_wise"]),
        "user.ebc/t1": (16, ["table_wise"]),
        "item.ebc/t1": (16, ["table_wise"]),
    }
    assert found["item.ebc/t0"].pooling_factors == [20.0]
    path.write_text('{"usr.ebc/t0": {}}')
    with pytest.raises(ConfigError, match=r"'usr.ebc/t0', which .* 'user.ebc/t0'"):
        given_constraints(read_constraints(path), given)
