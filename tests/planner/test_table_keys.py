"""Constraints by module path, for tables of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.types import ShardingOption

from tests.builders import (
    Chosen,
    analytic,
    bag_sharders,
    each,
    gpus,
    keep_nothing_back,
    make_ebc,
    make_planner,
    stock_planner,
    types_of,
)
from torchrec_neuroshard import rehearse
from torchrec_neuroshard.commands.inputs import GivenModel, read_constraints
from torchrec_neuroshard.errors import ConfigError, PlanMismatchError
from torchrec_neuroshard.planner import NeuroShardEnumerator
from torchrec_neuroshard.planner.torchrec_plan import stock_plan
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan

SIZES = [(4000, 64), (8000, 32)]
ROW_WISE = ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[20.0])
TABLE_WISE = ParameterConstraints(sharding_types=["table_wise"])
BY_PATH = {"user.ebc/t0": ROW_WISE, "item.ebc.t0": TABLE_WISE}
"""Both forms; the second is the one that TorchEasyRec writes."""


def towers() -> nn.ModuleDict:
    """Tables t0 and t1 at `user.ebc`, and others of these names at `item.ebc`."""
    return nn.ModuleDict(
        {side: nn.ModuleDict({"ebc": make_ebc(SIZES)}) for side in ("user", "item")}
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
    texts = [str(w.message) for w in told]
    assert "name table 'usr.ebc/t0', which the model does not have" in texts[0]
    assert "did you mean 'user.ebc/t0'" in texts[0]
    assert "'t9', which the model does not have; the tables are 't0', 't1'." in texts[1]


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
    found = read_constraints(path, given)
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
        read_constraints(path, given)
