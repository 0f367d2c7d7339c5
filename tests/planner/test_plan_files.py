from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    DataType,
    KeyValueParams,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import PoolingType

from tests.builders import (
    Chosen,
    FixedSearcher,
    Nested,
    bag_sharders,
    gpus,
    make_ebc,
    make_planner,
    sequences,
    stock_planner,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import (
    NeuroShardPlanLoader,
    NeuroShardPlanner,
    PlanFileError,
    PlanMismatchError,
    StalePlanWarning,
    load_plan,
    read_plan,
    save_plan,
)
from torchrec_neuroshard.planner.plans.plan_files import PLAN_SCHEMA_VERSION
from torchrec_neuroshard.profiles import uniform_profile
from torchrec_neuroshard.testing import AnalyticCostModel

SIZES = [(100, 32), (50, 16), (30, 8)]
TYPES = [
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
    "data_parallel",
]
CPUS = Topology(world_size=2, compute_device="cpu")
TRIPLES = [(0, 20, 0), (0, 12, 1), (1, 16, 1), (2, 8, 0)]


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Nested, NeuroShardPlanner, ShardingPlan]:
    """A file with an unevenly split plan, and what it was made from."""
    model = Nested(make_ebc(SIZES))
    planner = make_planner(topology=CPUS, search=FixedSearcher(TRIPLES))
    plan = planner.plan(model, bag_sharders())
    path = tmp_path / "plan.json"
    save_plan(plan, path, model=model, planner=planner)
    return path, model, planner, plan


Stored = tuple[Path, Nested, NeuroShardPlanner, ShardingPlan]


@pytest.mark.parametrize("sharding_type", TYPES)
def test_every_sharding_type_comes_back_as_it_was(
    tmp_path: Path, sharding_type: str
) -> None:
    topology = Topology(world_size=4, local_world_size=2, compute_device="cuda")
    names = [f"t{i}" for i in range(3)]
    planner = stock_planner(
        topology,
        constraints={
            n: ParameterConstraints(sharding_types=[sharding_type], min_partition=4)
            for n in names
        },
    )
    model = Nested(make_ebc(SIZES))
    plan = planner.plan(model, bag_sharders())
    assert {s.sharding_type for s in plan.plan["sparse.ebc"].values()} == {
        sharding_type
    }
    save_plan(plan, tmp_path / "plan.json", model=model, planner=planner)
    loaded = load_plan(tmp_path / "plan.json", model=model, planner=planner)
    assert loaded == plan
    assert str(loaded) == str(plan)
    kinds = {type(s) for p in loaded.plan.values() for s in p.values()}
    assert kinds == {type(s) for p in plan.plan.values() for s in p.values()}


def test_uneven_plan_comes_back_as_it_was(stored: Stored) -> None:
    path, model, planner, plan = stored
    assert load_plan(path, model=model, planner=planner) == plan


def test_settings_of_a_table_come_back_as_they_were(stored: Stored) -> None:
    path, model, planner, plan = stored
    tables = plan.plan["sparse.ebc"]
    tables["t0"] = dataclasses.replace(
        tables["t0"],
        compute_kernel="fused_uvm_caching",
        cache_params=CacheParams(
            algorithm=CacheAlgorithm.LFU, load_factor=0.25, precision=DataType.FP16
        ),
        enforce_hbm=True,
        stochastic_rounding=False,
        bounds_check_mode=BoundsCheckMode.WARNING,
        output_dtype=DataType.BF16,
        key_value_params=KeyValueParams(
            ssd_storage_directory="/ssd", ps_hosts=(("::1", 2000), ("::1", 2001))
        ),
    )
    save_plan(plan, path, model=model, planner=planner)
    loaded = load_plan(path, model=model, planner=planner)
    assert loaded == plan
    assert loaded.plan["sparse.ebc"]["t0"].key_value_params == KeyValueParams(
        ssd_storage_directory="/ssd", ps_hosts=(("::1", 2000), ("::1", 2001))
    )


def test_a_setting_of_unknown_type_is_refused(stored: Stored) -> None:
    path, model, planner, plan = stored
    plan.plan["sparse.ebc"]["t0"].enforce_hbm = object()
    with pytest.raises(PlanFileError, match=r"'sparse.ebc.t0': a setting of type obj"):
        save_plan(plan, path, model=model, planner=planner)


def test_sequence_tables_and_a_model_that_is_one_module(tmp_path: Path) -> None:
    model = sequences(8)
    planner = make_planner()
    plan = planner.plan(model, [EmbeddingCollectionSharder()])
    save_plan(plan, tmp_path / "plan.json", model=model, planner=planner)
    [table] = read_plan(tmp_path / "plan.json").fingerprint.tables
    assert (table.full_name, table.pooling, table.data_type) == ("s0", "none", "fp32")
    assert load_plan(tmp_path / "plan.json", model=model, planner=planner) == plan


def test_predicted_costs_are_kept(stored: Stored) -> None:
    path, model, planner, plan = stored
    result = planner.last_result
    assert result is not None
    predicted = read_plan(path).predicted
    assert predicted is not None
    assert predicted["critical_path_ms"] == result.predicted.critical_path_ms
    assert predicted["gap"] == result.gap
    unbounded = dataclasses.replace(result, lower_bound_ms=0.0, gap=math.inf)
    save_plan(plan, path, model=model, planner=planner, result=unbounded)
    predicted = read_plan(path).predicted
    assert predicted is not None and predicted["gap"] is None
    save_plan(plan, path, model=model, topology=CPUS)
    assert read_plan(path).predicted is None


def test_planner_and_its_parts_say_the_same(stored: Stored) -> None:
    path, model, planner, plan = stored
    first = read_plan(path)
    save_plan(
        plan,
        path,
        model=model,
        topology=CPUS,
        batch_size=64,
        cost_model=planner.costs.cost_model,
    )
    # How often tables are read, what sharders ask and the loop only planners know.
    assert read_plan(path).fingerprint == dataclasses.replace(
        first.fingerprint, pooling_factors=None, exchanges=None, pipeline_type=None
    )
    assert first.fingerprint.cost_model == planner.costs.cost_model.name
    assert first.fingerprint.versions["torch"] == torch.__version__


def test_planner_or_topology_is_asked_for(stored: Stored) -> None:
    path, model, planner, _ = stored
    with pytest.raises(ConfigError, match="pass the planner or the topology"):
        load_plan(path, model=model)
    with pytest.raises(ConfigError, match="a planner has its own"):
        load_plan(path, model=model, planner=planner, batch_size=4)
    with pytest.raises(ConfigError, match="pass the planner, or"):
        NeuroShardPlanLoader(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sizes": [(100, 32), (50, 16), (31, 8)]},
            "num_embeddings of table 'sparse.ebc.t2': expected 31, found 30",
        ),
        (
            {"sizes": [(100, 32), (50, 16), (30, 12)]},
            "embedding_dim of table 'sparse.ebc.t2': expected 12, found 8",
        ),
        (
            {"data_types": {0: DataType.FP16}},
            "data_type of table 'sparse.ebc.t0': expected fp16, found fp32",
        ),
        (
            {"poolings": {1: PoolingType.MEAN}},
            "pooling of table 'sparse.ebc.t1': expected mean, found sum",
        ),
        (
            {"features": {1: ["f1", "g1"]}},
            "feature_names of table 'sparse.ebc.t1': expected f1, g1, found f1",
        ),
        (
            {"sizes": [*SIZES, (5, 4)]},
            "table 'sparse.ebc.t3': expected a table, found no such table",
        ),
        (
            {"sizes": SIZES[:2]},
            "table 'sparse.ebc.t2': expected no such table, found a table",
        ),
    ],
)
def test_other_tables_are_refused(
    stored: Stored, change: dict[str, Any], message: str
) -> None:
    path, _, planner, _ = stored
    change = {"sizes": SIZES, **change}
    other = Nested(make_ebc(change.pop("sizes"), **change))
    with pytest.raises(PlanMismatchError, match="another job") as caught:
        load_plan(path, model=other, planner=planner)
    assert [str(m) for m in caught.value.mismatches] == [message]
    assert message in str(caught.value)


def test_a_model_without_the_planned_module_is_refused(stored: Stored) -> None:
    path, _, planner, _ = stored
    with pytest.raises(
        PlanMismatchError, match=r"table 'sparse\.ebc\.t0': expected no"
    ):
        load_plan(path, model=make_ebc(SIZES), planner=planner)


def test_a_plan_of_what_is_around_the_tables_is_told(tmp_path: Path) -> None:
    """As one of a file of tables is, for a model that holds these deeper inside."""
    model, path = make_ebc([(1000, 16)]), tmp_path / "p.json"
    planner = make_planner(2, "cpu")
    save_plan(planner.plan(model, bag_sharders()), path, model=model, planner=planner)
    deeper = nn.ModuleDict({"inner": model})
    message = "shards module '', a ModuleDict, which no .* tables are in 'inner'"
    with pytest.raises(PlanMismatchError, match=message):
        load_plan(path, model=deeper, planner=planner)
    topology = planner.costs.topology
    with pytest.warns(UserWarning, match=message):
        load_plan(path, model=deeper, topology=topology)
    assert load_plan(path, model=model, topology=topology).plan


def test_tables_outside_the_plan_count(stored: Stored) -> None:
    path, model, planner, plan = stored
    more = copy.copy(model)
    more.sparse = nn.ModuleDict(
        {"ebc": model.sparse["ebc"], "new": make_ebc([(9, 4)], prefix="n_")}
    )
    with pytest.raises(
        PlanMismatchError, match=r"unsharded: expected sparse\.new\.n_t0, found none"
    ):
        load_plan(path, model=more, planner=planner)
    save_plan(plan, path, model=more, planner=planner)
    assert load_plan(path, model=more, planner=planner) == plan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 4}, "world_size: expected 4, found 2"),
        ({"local_world_size": 1}, "local_world_size: expected 1, found 2"),
        ({"compute_device": "cuda"}, "compute_device: expected cuda, found cpu"),
    ],
)
def test_other_ranks_are_refused(
    stored: Stored, arguments: dict[str, Any], message: str
) -> None:
    path, model, _, _ = stored
    topology = Topology(**{"world_size": 2, "compute_device": "cpu", **arguments})
    with pytest.raises(PlanMismatchError) as caught:
        load_plan(path, model=model, topology=topology)
    assert message in [str(m) for m in caught.value.mismatches]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 32}, "batch_size: expected 32, found 64"),
        ({"cost_model": "cpu"}, "cost_model: expected cpu, found "),
        (
            {"topology": {"ddr_cap": 2**30}},
            f"memory_bytes: expected 2 x {2**30}, found 2 x ",
        ),
        (
            {"topology": {"intra_host_bw": 25e6}},
            r"intra_host_bw \[GB/s\]: expected 25, found ",
        ),
        (
            {"topology": {"inter_host_bw": 5e6, "hbm_mem_bw": 2e9}},
            r"hbm_mem_bw \[GB/s\]: expected 2000, .*inter_host_bw .*: expected 5, ",
        ),
    ],
)
def test_other_circumstances_are_warned_of(
    stored: Stored, arguments: dict[str, Any], message: str
) -> None:
    path, model, _, plan = stored
    topology = Topology(
        world_size=2, compute_device="cpu", **arguments.pop("topology", {})
    )
    with pytest.warns(StalePlanWarning, match=message):
        loaded = load_plan(path, model=model, topology=topology, **arguments)
    assert loaded == plan


def test_other_host_memory_is_warned_of(tmp_path: Path) -> None:
    model, path = make_ebc(SIZES), tmp_path / "plan.json"
    plan = make_planner(topology=gpus(2)).plan(model, bag_sharders())
    for ddr_cap in (2**31, 2**30):
        save_plan(plan, path, model=model, topology=gpus(2, ddr_cap=ddr_cap))
    text = f"^[^;]*host_memory_bytes: expected 2 x {2**31}, found 2 x {2**30}[^;]*$"
    with pytest.warns(StalePlanWarning, match=text):
        load_plan(path, model=model, topology=gpus(2, ddr_cap=2**31))


@pytest.mark.parametrize("way", ["constraints", "profiles", "torchrec"])
def test_other_lookups_are_warned_of(stored: Stored, way: str) -> None:
    path, model, _, plan = stored
    constraints = {
        name: ParameterConstraints(pooling_factors=[4.0]) for name in ("t0", "t2")
    }
    arguments: dict[str, Any] = {"constraints": constraints}
    if way == "profiles":
        often = uniform_profile(batch_size=128, pooling_factor=4.0, num_embeddings=100)
        arguments = {"profiles": {"f0": often, "f2": often}}
    planner = (
        stock_planner(Topology(2, "cpu"), **arguments)
        if way == "torchrec"
        else make_planner(**arguments)
    )
    with pytest.warns(StalePlanWarning) as caught:
        assert load_plan(path, model=model, planner=planner) == plan
    (text,) = (str(w.message) for w in caught)
    for name in ("t0", "t2"):
        table = f"'sparse.ebc.{name}'"
        assert f"pooling factor of table {table}: expected 4, found 1" in text
    assert "t1'" not in text


def test_lookups_that_are_much_the_same_are_not_warned_of(stored: Stored) -> None:
    path, model, _, plan = stored
    nearly = ParameterConstraints(pooling_factors=[1.05])
    planner = make_planner(constraints={"t0": nearly})
    assert load_plan(path, model=model, planner=planner) == plan


def test_files_without_lookups_and_bandwidths_are_read(stored: Stored) -> None:
    path, model, planner, plan = stored

    def change(data: dict[str, Any]) -> None:
        del data["fingerprint"]["gb_per_s"], data["fingerprint"]["pooling_factors"]

    edit_json(path, change)
    assert load_plan(path, model=model, planner=planner) == plan


def test_other_hardware_and_versions_are_warned_of(stored: Stored) -> None:
    path, model, planner, plan = stored

    def change(data: dict[str, Any]) -> None:
        data["fingerprint"]["hardware"] = "another CPU"
        data["fingerprint"]["versions"]["torchrec"] = "1.2.3"
        del data["fingerprint"]["versions"]["torch"]

    edit_json(path, change)
    with pytest.warns(
        StalePlanWarning, match="hardware: expected .*, found anoth"
    ) as w:
        assert load_plan(path, model=model, planner=planner) == plan
    assert "version of torchrec: expected 1." in str(w[0].message)
    assert f"version of torch: expected {torch.__version__}, found none" in str(
        w[0].message
    )
    assert w[0].filename == __file__


def test_what_the_caller_does_not_say_is_not_compared(stored: Stored) -> None:
    path, model, _, plan = stored
    assert load_plan(path, model=model, topology=CPUS) == plan


def test_missing_file(stored: Stored, tmp_path: Path) -> None:
    _, model, planner, _ = stored
    with pytest.raises(PlanFileError, match=r"cannot read .*No such file"):
        load_plan(tmp_path / "none.json", model=model, planner=planner)


def test_later_schema_is_refused(stored: Stored) -> None:
    path = stored[0]
    edit_json(path, lambda d: d.update(schema=PLAN_SCHEMA_VERSION + 1))
    with pytest.raises(PlanFileError, match=r"has schema 2, this version reads 1"):
        read_plan(path)


def stored_entry(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["plan"]["sparse.ebc"]["t0"]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="other"), "its format is not"),
        (lambda d: d.pop("plan"), "KeyError"),
        (lambda d: d.update(plan=[]), "damaged"),
        (lambda d: d["fingerprint"].pop("tables"), "not a fingerprint"),
        (lambda d: d["plan"]["sparse.ebc"].pop("t1"), "'t1' .* in the model alone"),
        (lambda d: d["fingerprint"]["tables"].pop(), "in the plan alone"),
        (lambda d: stored_entry(d).pop("shards"), "KeyError"),
        (lambda d: stored_entry(d)["shards"].pop(), "exactly once"),
        (lambda d: stored_entry(d)["shards"][1].update(offset=[0, 16]), "overlap"),
        (lambda d: stored_entry(d)["shards"][1].update(offset=[1, 20]), "exactly once"),
        (lambda d: stored_entry(d)["shards"][1].update(size=[100, 16]), "exactly once"),
        (lambda d: stored_entry(d).update(ranks=[0, 2]), "rank 2 is not in 0 to 1"),
        (
            lambda d: stored_entry(d)["shards"][0].update(placement="here"),
            r"placed on ranks \[None, 1\]",
        ),
        (
            lambda d: stored_entry(d).update(new_setting=3),
            "knows no setting 'new_setting'",
        ),
        (
            lambda d: stored_entry(d).update(
                cache_params={"record": "os", "fields": {}}
            ),
            "knows no setting of type 'os'",
        ),
    ],
)
def test_damaged_contents_are_refused(
    stored: Stored, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = stored[0]
    edit_json(path, change)
    with pytest.raises(PlanFileError, match=message) as caught:
        read_plan(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("change", [list.pop, lambda ranks: ranks.append(ranks[0])])
def test_costs_of_other_ranks_are_refused(
    stored: Stored, change: Callable[[list[Any]], Any]
) -> None:
    path = stored[0]
    edit_json(path, lambda d: change(d["predicted"]["ranks"]))
    with pytest.raises(PlanFileError, match=r"damaged: ValueError\('ranks: \d, not 2'"):
        read_plan(path).report()


def test_a_cut_file_is_refused(stored: Stored) -> None:
    path = stored[0]
    path.write_text(path.read_text()[:-40])
    with pytest.raises(PlanFileError, match=r"is damaged: it is not JSON"):
        read_plan(path)


def test_a_setting_left_at_none_by_a_newer_torchrec_is_ignored(stored: Stored) -> None:
    path, _, _, plan = stored
    edit_json(path, lambda d: stored_entry(d).update(new_setting=None))
    assert read_plan(path).plan == plan


def test_plan_of_another_model_is_not_stored(stored: Stored, tmp_path: Path) -> None:
    _, _, planner, plan = stored
    with pytest.raises(PlanFileError, match=r"'t2' of module 'sparse.ebc' is in the p"):
        save_plan(
            plan, tmp_path / "x", model=Nested(make_ebc(SIZES[:2])), planner=planner
        )
    assert list(tmp_path.glob("x*")) == []


def test_only_listed_shards_are_stored(stored: Stored) -> None:
    path, model, planner, plan = stored

    class Chunks:
        shards = plan.plan["sparse.ebc"]["t1"].sharding_spec.shards

    plan.plan["sparse.ebc"]["t1"].sharding_spec = Chunks()
    with pytest.raises(PlanFileError, match=r"listed one by one .* not Chunks"):
        save_plan(plan, path, model=model, planner=planner)


def test_our_planner_returns_the_stored_plan(
    stored: Stored,
) -> None:
    path, model, first, plan = stored
    searcher = FixedSearcher([])
    planner = make_planner(search=searcher)
    planner.plan_loader = NeuroShardPlanLoader(path, planner)
    assert planner.plan(model, bag_sharders()) == plan
    assert searcher.tasks == []  # nothing was searched
    assert planner.last_result is not None and first.last_result is not None
    assert planner.last_result.predicted == first.last_result.predicted


def test_torchrecs_planner_returns_the_stored_plan(stored: Stored) -> None:
    path, model, _, plan = stored
    topology = Topology(world_size=2, compute_device="cpu")
    enumerator = EmbeddingEnumerator(topology, 64)
    loader = NeuroShardPlanLoader(
        path, enumerator=enumerator, topology=topology, batch_size=64
    )
    chosen = Chosen()
    planner = stock_planner(
        topology,
        enumerator=enumerator,
        plan_loader=loader,
        callbacks=[chosen],
    )
    assert planner.plan(model, bag_sharders()) == plan
    assert planner._num_proposals == 0
    # The stats and validators need both.
    assert len(chosen.options) == len(SIZES)
    for shard in (s for o in chosen.options for s in o.shards):
        assert shard.perf is not None and shard.perf.total > 0
        assert shard.storage is not None and shard.storage.ddr > 0
    assert stock_planner(topology).plan(model, bag_sharders()) != plan


@pytest.mark.parametrize("sharding_type", TYPES)
def test_loader_handles_every_sharding_type(tmp_path: Path, sharding_type: str) -> None:
    constraints = {
        f"t{i}": ParameterConstraints(sharding_types=[sharding_type], min_partition=4)
        for i in range(3)
    }
    topology = Topology(world_size=4, local_world_size=2, compute_device="cuda")
    first = stock_planner(topology, constraints=constraints)
    model = Nested(make_ebc(SIZES))
    plan = first.plan(model, bag_sharders())
    save_plan(plan, tmp_path / "plan.json", model=model, planner=first)
    second = stock_planner(topology, constraints=constraints)
    second.plan_loader = NeuroShardPlanLoader(tmp_path / "plan.json", second)
    assert second.plan(model, bag_sharders()) == plan
    assert second._num_proposals == 0


def test_loader_refuses_another_model(stored: Stored) -> None:
    planner = make_planner()
    planner.plan_loader = NeuroShardPlanLoader(stored[0], planner)
    with pytest.raises(PlanMismatchError, match=r"'sparse\.ebc\.t3': expected a table"):
        planner.plan(Nested(make_ebc([*SIZES, (9, 8)])), bag_sharders())


def test_loader_warns_where_load_plan_does(stored: Stored) -> None:
    path, model, _, plan = stored
    planner = make_planner(batch_size=32)
    planner.plan_loader = NeuroShardPlanLoader(path, planner)
    with pytest.warns(StalePlanWarning, match="batch_size: expected 32, found 64"):
        assert planner.plan(model, bag_sharders()) == plan


def test_loader_refuses_what_constraints_forbid(stored: Stored) -> None:
    path, model, _, _ = stored
    planner = make_planner(
        constraints={"t1": ParameterConstraints(sharding_types=["table_wise"])}
    )
    planner.plan_loader = NeuroShardPlanLoader(path, planner)
    with pytest.raises(
        PlanMismatchError,
        match=r"'sparse\.ebc\.t1': expected table_wise/fused, found column_wise/fused",
    ):
        planner.plan(model, bag_sharders())


def test_loader_without_a_file(stored: Stored, tmp_path: Path) -> None:
    _, model, _, _ = stored
    planner = make_planner()
    planner.plan_loader = NeuroShardPlanLoader(tmp_path / "none", planner)
    with pytest.raises(PlanFileError, match="cannot read"):
        planner.plan(model, bag_sharders())
    planner.plan_loader = NeuroShardPlanLoader(
        tmp_path / "none", planner, missing_ok=True
    )
    assert planner.plan(model, bag_sharders()).plan["sparse.ebc"].keys() == {
        "t0",
        "t1",
        "t2",
    }


def test_file_replaces_an_older_one_whole(stored: Stored) -> None:
    path, model, planner, plan = stored
    path.write_text("old")
    save_plan(plan, path, model=model, planner=planner)
    assert read_plan(path).plan == plan
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_no_warning_on_the_way_back(stored: Stored) -> None:
    path, model, planner, plan = stored
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_plan(path, model=model, planner=planner) == plan


def test_placements_name_devices(stored: Stored) -> None:
    path = stored[0]
    spec = read_plan(path).plan.plan["sparse.ebc"]["t0"].sharding_spec
    assert [str(m.placement) for m in spec.shards] == ["rank:0/cpu", "rank:1/cpu"]


def test_other_cost_model_is_named(stored: Stored) -> None:
    path, model, _, _ = stored

    class Renamed(AnalyticCostModel):
        name = "renamed"

    with pytest.warns(StalePlanWarning, match="cost_model: expected renamed, found"):
        load_plan(path, model=model, planner=make_planner(cost_model=Renamed()))
