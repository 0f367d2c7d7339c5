"""Whole plans, and reports on them and on other plans."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType

from tests.builders import (
    MIB,
    FixedSearcher,
    Triples,
    bag_config,
    bag_sharders,
    bags,
    by_table,
    cost_of,
    each,
    entries_of,
    gpus,
    last_result,
    last_task,
    make_ebc,
    make_planner,
    only,
    shards_of,
    stock_planner,
    types_of,
)
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner import PlacementConstraints
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
from torchrec_neuroshard.report.parts import Bottleneck
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.testing import AnalyticCostModel


def test_tables_next_to_a_split_one_are_column_wise_by_default() -> None:
    model = nn.ModuleDict(
        {name: make_ebc([(100, 16)] * 2, prefix=name) for name in "abc"}
    )

    def split_two(task: ShardingTask) -> Triples:
        shards = []
        for i, (table, least) in enumerate(
            zip(task.tables, task.min_widths, strict=True)
        ):
            is_split = table.name in ("a.at0", "b.bt0")
            if is_split and least == 16:
                raise InfeasibleError("this task keeps all tables whole")
            shards += [(i, 4, 0), (i, 12, 1)] if is_split else [(i, 16, 1)]
        return shards

    limits = only("bt1", sharding_types=["table_wise"])
    planner = make_planner(search=FixedSearcher(split_two), constraints=limits)
    assert types_of(planner.plan(model, bag_sharders())) == {
        "a.at0": "column_wise",
        "a.at1": "column_wise",
        "b.bt0": "column_wise",
        "b.bt1": "table_wise",
        "c.ct0": "table_wise",
        "c.ct1": "table_wise",
    }
    assert last_task(planner).num_groups == 4


def test_hosts_share_the_tables_in_their_memory() -> None:
    """There are two hosts with two ranks each."""
    limits = each(4, "table_wise", compute_kernels=["fused_uvm"])
    planner = make_planner(topology=gpus(4, 2), constraints=limits)
    plan = planner.plan(make_ebc([(100_000, 64)] * 4), bag_sharders())
    assert [rank for t in shards_of(plan).values() for *_, rank in t] == [0, 2, 1, 3]


def test_tables_that_do_not_fit_the_host_stay_on_the_device() -> None:
    # Two tables of 160 MiB, looked up less, and one of 290; the device has 340. By time
    # and by its memory alone the two would be in the host, which has 300.
    ebc = make_ebc([(655_360, 64), (655_360, 64), (1_187_840, 64)])
    planner = make_planner(
        topology=gpus(1, hbm_cap=340 * MIB, ddr_cap=300 * MIB),
        constraints=by_table(pooling_factors=[[1.0], [1.0], [20.0]]),
    )
    plan = planner.plan(ebc, bag_sharders())
    kernels = [p.compute_kernel for p in plan.plan[""].values()]
    assert kernels[:2] == ["fused", "fused"]
    assert kernels[2] in ("fused_uvm", "fused_uvm_caching")
    result = last_result(planner)
    assert result.fallback is None
    [hosted] = [n.text for n in result.notes if n.code == "host-memory"]
    assert "in host memory: 't2'" in hosted
    source = f"analytic; of 3 tables, 1 estimated (kernel {kernels[2]})"
    assert result.predicted.compute_source == source


@pytest.mark.parametrize("rank", [0, 1])
def test_the_search_does_not_get_memory_of_unpriced_tables(rank: int) -> None:
    """Its 244 MiB leave one rank no room for tables of 122 MiB; the other has it."""
    planner = make_planner(
        topology=gpus(hbm_cap=330 * MIB),
        constraints=each(3, "table_wise", compute_kernels=["fused"]),
        placement_constraints=PlacementConstraints(pin={"t0": [rank]}),
        strict_memory=True,
    )
    sizes = [(2_000_000, 64), (500_000, 64), (500_000, 64)]
    ebc = make_ebc(sizes, data_types={0: DataType.NFP8})
    ranks = {
        n: r for n, [(*_, r)] in shards_of(planner.plan(ebc, bag_sharders())).items()
    }
    assert ranks == {"t0": rank, "t1": 1 - rank, "t2": 1 - rank}


def test_unsplit_tables_fuse_with_those_that_must_stay_whole() -> None:
    # Only if t1, which may be split, is emitted table-wise as well is there one launch.
    model = AnalyticCostModel(launch_ms=100.0)
    planner = make_planner(1, constraints=each(1, "table_wise"), cost_model=model)
    plan = planner.plan(make_ebc([(1000, 64), (1000, 64)]), bag_sharders())
    assert set(types_of(plan).values()) == {"table_wise"}
    assert last_result(planner).predicted.ranks[0].fwd_compute < 200


def test_profiles_describe_their_features() -> None:
    profile = zipf_profile(
        batch_size=32, pooling_factor=9.0, num_embeddings=100, exponent=0.0
    )
    features = {0: ["a", "b"], 1: ["a"], 2: ["c"]}
    planner = make_planner(
        profiles={"a": profile}, constraints=only(pooling_factors=[1.0, 2.0])
    )
    planner.plan(make_ebc([(100, 8)] * 3, features=features), bag_sharders())
    both, known, unknown = last_task(planner).tables
    assert both.pooling_factor == pytest.approx(9.0 + 2.0)
    assert known.profile is not None
    assert known.profile.num_lookups == pytest.approx(9.0 * 128)
    assert known.profile.access_histogram == pytest.approx(
        profile.at_batch_size(128, 100).access_histogram
    )
    assert unknown.profile is None and unknown.pooling_factor == 1.0


@pytest.mark.parametrize("field", ["pooling_factors", "num_poolings", "batch_sizes"])
def test_constraints_that_change_between_two_plans_count(field: str) -> None:
    """TorchRec's enumerator and this package read them in place."""
    ebc = make_ebc([(1000, 64)] * 3)
    at_first = each(3, pooling_factors=[2.0])
    planner = make_planner(2, constraints=at_first)
    planner.plan(ebc, bag_sharders())
    before = cost_of(planner)
    for constraint in at_first.values():
        setattr(constraint, field, [7.0])
    planner.plan(ebc, bag_sharders())
    fresh = make_planner(
        2, constraints=each(3, **{"pooling_factors": [2.0], field: [7.0]})
    )
    fresh.plan(ebc, bag_sharders())
    assert before != cost_of(planner) == cost_of(fresh)


def test_result_describes_the_plan_after_callbacks() -> None:
    def swap(options: list[ShardingOption]) -> list[ShardingOption]:
        for option in options:
            for shard in option.shards:
                assert shard.rank is not None
                shard.rank = 1 - shard.rank
        return options[::-1]

    ebc = make_ebc([(100, 16), (100, 32)])
    searcher = FixedSearcher([(0, 16, 0), (1, 32, 1)])
    kinds = each(2, "table_wise", "column_wise")
    planner = make_planner(search=searcher, callbacks=[swap], constraints=kinds)
    plan = planner.plan(ebc, bag_sharders())
    assert shards_of(plan) == {"t0": [(0, 16, 1)], "t1": [(0, 32, 0)]}
    result, task = last_result(planner), last_task(planner)
    ranks = {task.tables[s.table].name: s.rank for s in result.placement.shards}
    assert ranks == {"t0": 1, "t1": 0}
    # What the search said holds of every placement of the same tables.
    assert result.lower_bound_ms == pytest.approx(0.5 * cost_of(planner))
    assert result.gap == pytest.approx(1.0)
    assert (result.search_seconds, result.num_evaluated) == (0.25, 7)
    assert result.notes == (Note("search", "from the search"),)


def test_plan_does_not_depend_on_the_order_of_tables() -> None:
    rows_dims = [(100, 16), (800_000, 128), (5000, 64), (300_000, 64), (90, 128)]
    tables = [bag_config(i, rows, dim) for i, (rows, dim) in enumerate(rows_dims)]
    limits = only("t1", pooling_factors=[5.0])
    found = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 1, 0, 3]):
        planner = make_planner(2, "cuda", constraints=limits)
        plan = planner.plan(bags(*(tables[i] for i in order)), bag_sharders())
        entries = {name: str(entry) for name, entry in entries_of(plan).items()}
        found.append((entries, cost_of(planner)))
    assert found[0] == found[1]


# --- reports ---


def test_any_plan_is_evaluated_as_planned() -> None:
    """The plan is row-wise, and its memory is what the reservation leaves."""
    planner = make_planner(4, "cuda", constraints=each(2, "row_wise"))
    ebc = make_ebc([(4_000, 32), (3_000, 64)])
    plan = planner.plan(ebc, bag_sharders())
    planned = planner.report()
    found = planner.evaluate(plan, ebc, bag_sharders())
    assert found.critical_path_ms == pytest.approx(planned.critical_path_ms)
    assert [r.costs for r in found.ranks] == [r.costs for r in planned.ranks]
    assert (found.lower_bound_ms, found.gap) == (0.0, math.inf)
    # What the planner said of its own plan is not forgotten by that.
    assert planner.report() == planned
    for report in (planned, found):
        used = sum(r.used_bytes for r in report.ranks)
        assert sum(t.used_bytes for t in report.tables) == pytest.approx(used)
        shards = [s for t in report.tables for s in t.shards]
        for rank in report.ranks:
            assert rank.num_shards == 2 and rank.columns == 96
            assert rank.memory_bytes is not None
            assert 4_000 * 32 + 3_000 * 64 < rank.used_bytes < rank.memory_bytes
            held, costs = [s for s in shards if s.rank == rank.rank], rank.costs
            kernels = costs.fwd_compute + costs.bwd_compute
            parts = sum(s.compute_ms for s in held), sum(s.comms_ms for s in held)
            total = sum(costs.to_json().values())
            assert parts == pytest.approx((kernels, total - kernels), rel=1e-3)


def test_stored_plans_show_what_the_planner_said(tmp_path: Path) -> None:
    ebc, path = make_ebc([(4_000, 32), (30_000, 64), (300, 16)]), tmp_path / "p.json"
    planner, fresh = make_planner(2, "cuda"), make_planner(2, "cuda")
    planned = planner.plan(ebc, bag_sharders())
    before = planner.report()
    save_plan(planned, path, model=ebc, planner=planner)
    assert load_plan(path, model=ebc, planner=fresh).plan == planned.plan
    report = fresh.report()
    assert report.tables == before.tables and report.lower_bound_ms == 0.0
    assert [r.costs for r in report.ranks] == [r.costs for r in before.ranks]
    assert fresh.last_model is not None
    assert len(fresh.get_selected_options()) == 3


def test_plans_are_compared_by_one_cost() -> None:
    ebc = make_ebc([(4_000, 32), (3_000, 64), (50, 16)])
    kinds = [["table_wise"], ["row_wise"], ["data_parallel"]]
    planner = make_planner(2, "cuda", constraints=by_table(sharding_types=kinds))
    with pytest.raises(ConfigError, match="there is no plan to report on"):
        planner.compare(ShardingPlan({}), ebc)
    plan = planner.plan(ebc, bag_sharders())
    same = planner.compare(plan, ebc, bag_sharders())
    assert not same.moves and same.saved_ms == pytest.approx(0.0)
    assert "all 3 tables are placed the same" in str(same)
    theirs = by_table(sharding_types=[kinds[2], kinds[0], kinds[0]])
    stock = stock_planner(gpus(), constraints=theirs).plan(ebc, bag_sharders())
    found = planner.compare(stock, ebc, bag_sharders(), "stock")
    paths = [
        planner.evaluate(p, ebc, bag_sharders()).critical_path_ms for p in (stock, plan)
    ]
    assert found.saved_ms == pytest.approx(paths[0] - paths[1])
    assert f"this plan takes {paths[1]:.3f} ms instead of {paths[0]:.3f}" in str(found)
    # Every rank has a replica of t0 already, one of them half of t1 and all of t2.
    assert {m.table: m.moved_bytes for m in found.moves} == {
        "t0": 0,
        "t1": 3_000 * 64 * 4 / 2,
        "t2": 50 * 16 * 4,
    }
    assert [m.table for m in found.moves] == ["t1", "t2", "t0"]
    assert found.moves[2].before == "data_parallel (dense), 2 shards on ranks 0-1"
    assert found.moves[0].after == "row_wise, 2 shards on ranks 0-1"


def test_parts_of_the_tables_add_up_to_the_critical_path() -> None:
    kinds = [["row_wise"], ["column_wise"], ["data_parallel"]]
    planner = make_planner(4, "cuda", constraints=by_table(sharding_types=kinds))
    ebc = make_ebc([(4_000, 32), (30_000, 64), (300, 16), (2_000, 128)])
    entries = entries_of(planner.plan(ebc, bag_sharders()))
    num_shards = {name: len(entry.ranks) for name, entry in entries.items()}
    report = planner.report()
    assert report.critical_path_ms == cost_of(planner)
    assert sum(r.num_shards for r in report.ranks) == sum(num_shards.values())
    in_columns = [t for t in entries if "column" in entries[t].sharding_type]
    assert {s.table: len(s.shards) for s in report.splits} == {
        t: num_shards[t] for t in in_columns if num_shards[t] > 1
    }
    parts = [t.path_ms for t in report.tables]
    assert sum(parts) == pytest.approx(report.critical_path_ms, rel=1e-6)
    assert parts == sorted(parts, reverse=True) and parts[0] < report.critical_path_ms
    found = report.bottleneck
    assert found is not None and 0 < found.table_ms <= found.phase_ms
    assert found.phase_ms == pytest.approx(max(report.parts_ms.values()))
    assert found.phase_ms == report.parts_ms[found.phase]
    whole = f"{found.phase_ms:.3f} of {report.iteration_ms:.3f} ms, rank {found.rank}; "
    assert f"slowest phase: {found.phase}, {whole}" in str(report)


@pytest.mark.parametrize(
    ("table_ms", "told"),
    [(3.1, "t1 is most of it"), (3.0, "its largest table, t1, takes 3.000")],
)
def test_the_slowest_phase_names_its_table(table_ms: float, told: str) -> None:
    known: dict[str, Any] = {"table": "t1", "rank": 2, "table_ms": table_ms}
    found = Bottleneck(phase="bwd_comms", phase_ms=6.0, **known)
    whole = f"6.000 of 9.000 ms, rank 2; {told}"
    assert found.line(9.0) == f"slowest phase: bwd_comms, {whole}"
    older = dataclasses.replace(found, stage="ebc (row_wise)")
    assert older.line(9.0) == f"slowest phase: bwd_comms of ebc (row_wise), {whole}"
