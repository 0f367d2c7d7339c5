"""Reports of `NeuroShardPlanner` on its plan and on other plans."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from torchrec.distributed.types import ShardingPlan

from tests.builders import (
    bag_sharders,
    by_table,
    cost_of,
    each,
    entries_of,
    gpus,
    make_ebc,
    make_planner,
    stock_planner,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan


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
    worst = max(report.ranks, key=lambda r: (getattr(r.costs, found.phase), -r.rank))
    assert getattr(worst.costs, found.phase) >= found.phase_ms
    assert found.rank in {
        s.rank for t in report.tables if t.table == found.table for s in t.shards
    }
    assert f"bottleneck: {found.phase} on rank {found.rank} takes " in str(report)
    [kind] = [t.sharding_type for t in report.tables if t.table == found.table]
    assert f" ms in {found.stage}, table {found.table} " in str(report)
    assert found.stage.endswith(f"({kind})")
