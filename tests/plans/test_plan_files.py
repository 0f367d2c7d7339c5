"""Plan files: reading back, errors and warnings."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    DataType,
    KeyValueParams,
    KVZCHTBEConfig,
    MultiPassPrefetchConfig,
    ShardingPlan,
)

from tests.builders import (
    FixedSearcher,
    Nested,
    bag_sharders,
    cost_of,
    each,
    gpus,
    make_ebc,
    make_planner,
    stock_planner,
)
from torchrec_neuroshard.errors import (
    PlanFileError,
    PlanMismatchError,
    StalePlanWarning,
)
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
from torchrec_neuroshard.plans.plan_json import stored_shardings, torchrec_plan
from torchrec_neuroshard.plans.stored_plan import read_plan
from torchrec_neuroshard.report import PlanComparison

SIZES = [(100, 32), (50, 16), (30, 8)]
CPUS = Topology(world_size=2, compute_device="cpu")
HALF = {"data_types": {0: DataType.FP16}}
TRIPLES = [(0, 20, 0), (0, 12, 1), (1, 16, 1), (2, 8, 0)]

Stored = tuple[Path, Nested, NeuroShardPlanner, ShardingPlan]


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """A file with an unevenly split plan, and the plan's model and planner."""
    model = Nested(make_ebc(SIZES))
    planner = make_planner(topology=CPUS, search=FixedSearcher(TRIPLES))
    plan = planner.plan(model, bag_sharders())
    path = tmp_path / "plan.json"
    save_plan(plan, path, model=model, planner=planner)
    return path, model, planner, plan


class Seven(IntEnum):
    """A type of which TorchRec knows nothing."""

    SEVEN = 7


def typed(value: Any) -> Any:
    """Return a value with the type of each of its parts.

    An `IntEnum` equals an int, and a named tuple a tuple.
    """
    parts: Any = value
    if isinstance(value, Mapping):
        parts = {key: typed(part) for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = [typed(part) for part in value]
    elif hasattr(value, "__dict__") and not isinstance(value, Enum):
        parts = typed(vars(value))
    return type(value), parts


def stored_entry(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["plan"]["sparse.ebc"]["t0"]
    return found


@pytest.mark.parametrize(
    "sharding_type", ["column_wise", "row_wise", "grid_shard", "data_parallel"]
)
def test_every_sharding_type_comes_back_as_it_was(
    tmp_path: Path, sharding_type: str
) -> None:
    topology, constraints = gpus(4, 2), each(3, sharding_type, min_partition=4)
    planner = stock_planner(topology, constraints=constraints)
    model, path = Nested(make_ebc(SIZES)), tmp_path / "plan.json"
    plan = planner.plan(model, bag_sharders())
    save_plan(plan, path, model=model, planner=planner)
    loaded = load_plan(path, model=model, planner=planner)
    assert loaded == plan and typed(loaded.plan) == typed(plan.plan)


def test_settings_of_a_table_come_back_as_they_were(stored: Stored) -> None:
    path, model, planner, plan = stored
    tables = plan.plan["sparse.ebc"]
    stored_elsewhere = KeyValueParams(
        ssd_storage_directory="/ssd",
        ps_hosts=(("::1", 2000), ("::1", 2001)),
        kvzch_tbe_config=KVZCHTBEConfig(
            threshold_calculation_bucket_stride=1.0,
            optimizer_state_dtypes_for_st=frozenset({("momentum", 1), ("exp", 0)}),
        ),
    )
    tables["t0"] = dataclasses.replace(
        tables["t0"],
        compute_kernel="fused_uvm_caching",
        cache_params=CacheParams(
            algorithm=CacheAlgorithm.LFU,
            load_factor=0.25,
            precision=DataType.FP16,
            multipass_prefetch_config=MultiPassPrefetchConfig(num_passes=3),
        ),
        enforce_hbm=True,
        stochastic_rounding=False,
        bounds_check_mode=BoundsCheckMode.WARNING,
        output_dtype=DataType.BF16,
        key_value_params=stored_elsewhere,
    )
    save_plan(plan, path, model=model, planner=planner)
    loaded = load_plan(path, model=model, planner=planner)
    assert loaded == plan and typed(loaded.plan) == typed(plan.plan)
    assert loaded.plan["sparse.ebc"]["t0"].key_value_params == stored_elsewhere
    # Numbers of NumPy become Python's.
    tables["t0"].ranks = [np.int64(rank) for rank in tables["t0"].ranks]
    tables["t0"].cache_params.load_factor = np.float32(0.25)
    read = dataclasses.replace(read_plan(path), shardings=stored_shardings(plan))
    assert typed(torchrec_plan(read).plan) == typed(loaded.plan)
    # What cannot be stored leaves no file.
    path.unlink()
    for value in (object(), Seven.SEVEN, math.inf):
        tables["t0"].enforce_hbm = value
        fault = rf"'sparse.ebc.t0': a setting of type {type(value).__name__} cannot be"
        with pytest.raises(PlanFileError, match=fault):
            save_plan(plan, path, model=model, planner=planner)
    model = Nested(make_ebc(SIZES[:2]))
    with pytest.raises(
        PlanFileError, match=r"'t2' of module 'sparse.ebc' is only in the p"
    ):
        save_plan(plan, path, model=model, planner=planner)
    assert [*path.parent.iterdir()] == []


def test_costs_are_stored_only_with_their_plan(stored: Stored) -> None:
    path, model, planner, plan = stored
    known = planner.last_known
    assert known is not None and read_plan(path).report() == known.report()
    assert load_plan(path, model=model, planner=planner) == plan
    other = make_planner(
        topology=CPUS, search=FixedSearcher([(0, 32, 0), (1, 16, 1), (2, 8, 1)])
    ).plan(model, bag_sharders())
    save_plan(other, path, model=model, planner=planner)
    assert read_plan(path).shown is None
    assert "iteration unknown" in str(read_plan(path).report())
    assert load_plan(path, model=model, planner=planner) == other
    save_plan(other, path, model=model, planner=planner)  # it is the last one by now
    assert read_plan(path).shown is not None
    assert plan != other and [*path.parent.iterdir()] == [path]


def test_a_plan_that_was_resharded_is_not_stored_with_the_costs_of_the_first(
    stored: Stored,
) -> None:
    """TorchRec's resharding changes the running plan in place."""
    path, model, planner, plan = stored
    whole = make_planner(
        topology=CPUS, search=FixedSearcher([(0, 32, 0), (1, 16, 1), (2, 8, 1)])
    ).plan(model, bag_sharders())
    before = planner.evaluate(plan, model, bag_sharders())
    plan.plan["sparse.ebc"]["t0"] = whole.plan["sparse.ebc"]["t0"]
    save_plan(plan, path, model=model, planner=planner)
    assert read_plan(path).shown is None
    # The planner's own plan is still the one that it reports on.
    compared = planner.compare(plan, model, bag_sharders())
    assert compared.second.critical_path_ms == before.critical_path_ms
    assert [m.table for m in compared.moves] == ["sparse.ebc.t0"]


def test_a_loaded_plan_is_reported_on_with_the_sharders_that_were_given(
    stored: Stored,
) -> None:
    path, model, planner, plan = stored
    params = {"optimizer": EmbOptimType.ADAM}
    adam = [EmbeddingBagCollectionSharder(fused_params=params)]
    load_plan(path, model=model, planner=planner, sharders=adam)
    assert planner.report().ranks == planner.evaluate(plan, model, adam).ranks
    # The planner knows them by now.
    load_plan(path, model=model, planner=planner)
    assert planner.report().ranks == planner.evaluate(plan, model, adam).ranks
    assert planner.report().ranks != planner.evaluate(plan, model).ranks


def test_a_plan_that_was_edited_is_not_shown_with_the_costs_of_the_first(
    stored: Stored,
) -> None:
    path, *_ = stored

    def edit(data: dict[str, Any]) -> None:
        entry = data["plan"]["sparse.ebc"]["t1"]
        entry["ranks"], entry["shards"][0]["placement"] = [0], "rank:0/cpu"

    assert not math.isnan(read_plan(path).report().critical_path_ms)
    edit_json(path, edit)
    report = read_plan(path).report()
    assert math.isnan(report.critical_path_ms)
    assert [note.code for note in report.notes] == ["stored"]


def test_older_files_are_shown_without_a_spread(stored: Stored) -> None:
    path, *_ = stored
    report = read_plan(path).report()
    edit_json(path, lambda data: data["report"].pop("spread_ms"))
    without = read_plan(path).report()
    assert without == dataclasses.replace(report, spread_ms=0.0)
    assert without.iteration_ms == report.critical_path_ms


def test_older_files_do_not_tell_what_fills_a_rank(stored: Stored) -> None:
    def edit(data: dict[str, Any]) -> None:
        for rank in data["report"]["ranks"]:
            del rank["parts_bytes"], rank["device_bytes"]

    path, *_ = stored
    report = read_plan(path).report()
    edit_json(path, edit)
    without = read_plan(path).report()
    assert without.critical_path_ms == report.critical_path_ms
    for rank, old in zip(report.ranks, without.ranks, strict=True):
        assert rank.device_bytes and old.device_bytes is None and not old.parts_bytes
        assert rank.used_bytes == old.used_bytes


def test_plans_for_other_inputs_are_told_apart(stored: Stored) -> None:
    path, model, _, plan = stored
    other = path.with_name("other.json")
    known = each(3, pooling_factors=[7.0])
    planner = make_planner(topology=CPUS, constraints=known)
    save_plan(plan, other, model=model, planner=planner)
    compared = read_plan(path).compared_to(read_plan(other), ("a", "b"))
    texts = [note.text for note in compared.notes]
    assert any("ids per sample differ for 'sparse.ebc.t0'" in text for text in texts)
    assert not read_plan(path).compared_to(read_plan(path), ("a", "b")).notes


def compared(tmp_path: Path, *planners: NeuroShardPlanner) -> PlanComparison:
    """Save a plan of each of two planners, and compare what was saved."""
    stored = []
    for number, planner in enumerate(planners):
        path, model = tmp_path / f"{number}.json", Nested(make_ebc(SIZES))
        plan = planner.plan(model, bag_sharders())
        save_plan(plan, path, model=model, planner=planner)
        stored.append(read_plan(path))
    first, second = stored
    return first.compared_to(second, ("a", "b"))


def test_other_ranks_and_batches_are_compared_by_samples_per_second(
    tmp_path: Path,
) -> None:
    two, larger = make_planner(2, batch_size=64), make_planner(2, batch_size=256)
    four, as_many = make_planner(4, batch_size=64), make_planner(4, batch_size=32)
    for other in (four, larger):
        found = compared(tmp_path, two, other)
        first, second = (p.samples_per_s for p in (found.first, found.second))
        assert first and second and second > first
        assert f"instead of {found.first.rate} ({second / first - 1:+.1%}), with" in (
            found.verdict
        )
        assert "saves" not in str(found) and "loses" not in str(found)
        for name in ("iteration [ms]", "critical path [ms]"):
            row = next(x for x in str(found).splitlines() if x.startswith(name))
            assert "%" not in row
        saved = found.to_json()
        assert saved["saved_ms"] is None
        assert saved["second"]["samples_per_s"] == second
    assert [(n.severity, n.text) for n in compared(tmp_path, two, four).notes] == [
        (
            "info",
            "world_size is 2 in 'a' and 4 in 'b', so an iteration trains another "
            "number of samples",
        )
    ]
    found = compared(tmp_path, two, as_many)
    saved_ms = found.first.iteration_ms - found.second.iteration_ms
    assert found.saved_ms == saved_ms and "per iteration" in found.verdict


def test_times_on_other_devices_are_not_compared(tmp_path: Path) -> None:
    cpus, cards = make_planner(2), make_planner(2, "cuda")
    slower = make_planner(2, dense_ms=5.0)
    for other, why in (
        (cards, "compute_device is cpu in 'a' and cuda in 'b'"),
        (slower, "other layers take 0.000 ms in 'a' and 5.000 ms in 'b'"),
    ):
        found = compared(tmp_path, cpus, other)
        rates = [f"({p.rate} samples per second)" for p in (found.first, found.second)]
        assert found.verdict.startswith(f"times are not compared, since {why}; predict")
        assert all(rate in found.verdict for rate in rates)
        shown, after = str(found).split("fullest rank")
        assert "%" not in shown.split("Slowest ranks")[1] and "%" in after
        assert found.to_json()["saved_ms"] is None
        assert f"{why}, so the costs are not comparable" in str(found)


@pytest.mark.parametrize(
    ("sizes", "fields", "topology", "message"),
    [
        (
            [*SIZES[:2], (31, 8)],
            {},
            CPUS,
            "t2': num_embeddings is 30 in the file and 31 here",
        ),
        (SIZES, HALF, CPUS, "ebc.t0': data_type is fp32 in the file and fp16 here"),
        ([*SIZES, (5, 4)], {}, CPUS, "'sparse.ebc.t3' is only here"),
        (SIZES, {}, Topology(4, "cpu"), "world_size is 2 in the file and 4 here"),
        (SIZES, {}, gpus(), "compute_device is cpu in the file and cuda here"),
    ],
)
def test_other_jobs_are_refused(
    stored: Stored, sizes: Any, fields: Any, topology: Topology, message: str
) -> None:
    model = Nested(make_ebc(sizes, **fields))
    with pytest.raises(
        PlanMismatchError, match=f"not fit this job: .*{message}.*Make a new plan"
    ):
        load_plan(stored[0], model=model, planner=stock_planner(topology))


def test_a_plan_of_the_enclosing_module_is_refused(tmp_path: Path) -> None:
    """For example a table file's plan, for a model with these tables deeper inside."""
    model, path = make_ebc([(1000, 16)]), tmp_path / "p.json"
    planner = make_planner(2, "cpu")
    save_plan(planner.plan(model, bag_sharders()), path, model=model, planner=planner)
    deeper = nn.ModuleDict({"inner": model})
    message = (
        "no sharder matches module '' of class ModuleDict; .* or load a plan of 'inner'"
    )
    for known in (planner, stock_planner(planner.topology)):
        with pytest.raises(PlanMismatchError, match=message):
            load_plan(path, model=deeper, planner=known)
        assert load_plan(path, model=model, planner=known).plan


def test_differences_between_jobs_are_warned_of(stored: Stored) -> None:
    path, model, _, plan = stored
    edit_json(path, lambda d: d["fingerprint"]["versions"].update(torchrec="1.2.3"))
    topology = Topology(world_size=2, compute_device="cpu", ddr_cap=2**30)
    planner = stock_planner(topology, batch_size=32)
    with pytest.warns(StalePlanWarning, match="torchrec is 1.2.3 in") as warned:
        assert load_plan(path, model=model, planner=planner) == plan
    text = str(warned[0].message)
    assert "batch_size is 64 in the file and 32 here" in text
    assert f" in the file and 2 x {2**30} here" in text
    assert warned[0].filename == __file__


def test_files_of_earlier_versions_are_read(stored: Stored) -> None:
    """Their fingerprints have more fields."""
    path, model, planner, plan = stored

    def change(data: dict[str, Any]) -> None:
        data["fingerprint"] |= {"gb_per_s": {"hbm_mem_bw": 2.0}, "dense_ms": {}}
        data["fingerprint"]["versions"]["torch"] = "2.13.0"
        data["predicted"] = {"critical_path_ms": 1.0, "ranks": []}
        del data["report"]
        stored_entry(data)["setting_of_a_newer_torchrec"] = None

    for edit in (lambda d: d["report"].update(field_of_another_version=1), change):
        edit_json(path, edit)
        assert load_plan(path, model=model, planner=planner) == plan
        report = read_plan(path).report()
        assert [note.code for note in report.notes] == ["stored"]
        assert "memory counts only weights" in str(report)


def test_plans_that_constraints_forbid_are_refused(stored: Stored) -> None:
    path, model, _, _ = stored
    for kind, message in (
        (
            {"sharding_types": ["table_wise"]},
            "is column_wise in the file, but .* allow only table_wise",
        ),
        (
            {"compute_kernels": ["dense"]},
            "is fused in the file, but .* allow only dense",
        ),
    ):
        planner = make_planner(constraints=each(1, **kind))
        with pytest.raises(PlanMismatchError, match=rf"'sparse\.ebc\.t0' {message}"):
            load_plan(path, model=model, planner=planner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=2), "schema is 2, but this version reads 1"),
        (lambda d: d["fingerprint"].pop("tables"), "'tables' is missing"),
        (lambda d: stored_entry(d)["shards"][1].update(offset=[1, 20]), "exactly once"),
        (lambda d: stored_entry(d).update(ranks=[0, 2]), "rank 2 is not in 0 to 1"),
        (
            lambda d: stored_entry(d).update(new_setting=3),
            "release has no setting 'new_setting'",
        ),
        (
            lambda d: stored_entry(d).update(
                cache_params={"record": "os", "fields": {}}
            ),
            "release has no setting of type 'os'",
        ),
        (
            lambda d: stored_entry(d).update(
                cache_params={"record": "CacheParams", "fields": {"new": 1}}
            ),
            "release has no setting 'new'",
        ),
    ],
)
def test_damaged_contents_are_refused(
    stored: Stored, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = stored[0]
    edit_json(path, change)
    with pytest.raises(PlanFileError, match=message) as caught:
        torchrec_plan(read_plan(path))
    assert str(path) in str(caught.value)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(PlanFileError, match="or is damaged: it holds no JSON"):
        read_plan(path)
    for odd, reason in ((path.with_name("none"), "No such file"), (path.parent, "Is")):
        with pytest.raises(PlanFileError, match=f"cannot read .*{odd}': {reason}"):
            read_plan(odd)


def test_a_module_under_two_names_is_stored_once(tmp_path: Path) -> None:
    model, path = nn.Module(), tmp_path / "plan.json"
    both = make_ebc([(1000, 64)] * 2)
    model.one, model.two = both, nn.ModuleList([both])
    planner = make_planner(2, "cuda")
    plan = planner.plan(model, bag_sharders())
    save_plan(plan, path, model=model, planner=planner)
    stored = read_plan(path)
    assert set(stored.shardings) == {"one"} and set(plan.plan) == {"one", "two.0"}
    assert stored.report().critical_path_ms == cost_of(planner)
    assert load_plan(path, model=model, planner=make_planner(2, "cuda")) == plan
