"""Plans for train pipelines: their costs, their differences, and errors."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.types import PipelineType, ShardingPlan

from tests.builders import (
    bag_config,
    bag_sharders,
    bags,
    by_table,
    cost_of,
    gpus,
    last_result,
    last_task,
    make_planner,
    shards_of,
)
from torchrec_neuroshard import DenseMs, NeuroShardPlanner, rehearse
from torchrec_neuroshard.costs.schedules import DENSE, SCHEDULES
from torchrec_neuroshard.costs.task import Placement
from torchrec_neuroshard.errors import ConfigError, StalePlanWarning
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
from torchrec_neuroshard.search.bounds import MIP_GAP
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

TABLES = ((128, 50.0), (256, 200.0), (128, 200.0))
"""Width of a table, and ids per sample. Every split sends these many ids again."""
ALL = {"t0", "t1", "t2"}
LAYERS = DenseMs(forward=10.0, backward=20.0)


def module() -> Any:
    return bags(*(bag_config(i, 1000, dim) for i, (dim, _) in enumerate(TABLES)))


def planner_for(pipeline: Any, dense: Any = LAYERS) -> NeuroShardPlanner:
    """Return a planner for two GPUs with fast kernels and a slow link."""
    return make_planner(
        topology=gpus(),
        cost_model=AnalyticCostModel(0.01, 0.0, 0.0003),
        comms_model=AnalyticCommsModel(20.0),
        batch_size=8192,
        constraints=by_table(
            sharding_types=[["table_wise", "column_wise"]] * 3,
            pooling_factors=[[ids] for _, ids in TABLES],
            min_partition=[64] * 3,
        ),
        pipeline_type=pipeline,
        dense_ms=dense,
    )


def planned(pipeline: Any, dense: Any = LAYERS) -> tuple[NeuroShardPlanner, Any]:
    planner = planner_for(pipeline, dense)
    return planner, planner.plan(module(), bag_sharders())


def path_of(planner: NeuroShardPlanner, plan: ShardingPlan) -> float:
    return planner.evaluate(plan, module(), bag_sharders()).critical_path_ms


def split(plan: ShardingPlan) -> set[str]:
    return {name for name, shards in shards_of(plan).items() if len(shards) > 1}


def test_the_choice_of_plan_depends_on_the_pipeline() -> None:
    plain, whole = planned(None)
    pipelined, parted = planned(PipelineType.TRAIN_SPARSE_DIST)
    # A split evens kernels out and sends ids twice; beside 30 ms that costs nothing.
    assert split(whole) == set() and split(parted) == ALL
    assert path_of(plain, whole) < path_of(plain, parted)
    assert path_of(pipelined, parted) < 0.99 * path_of(pipelined, whole)
    assert path_of(plain, whole) == pytest.approx(cost_of(plain))
    assert path_of(pipelined, parted) == pytest.approx(cost_of(pipelined))
    # Other layers alone change no plan.
    more, same = planned("none", 12.0)
    bare, plan = planned(None, None)
    assert shards_of(plan) == shards_of(same)
    assert cost_of(more) == cost_of(bare) + 12.0
    bounds = [last_result(p).lower_bound_ms for p in (bare, more)]
    assert bounds[1] == pytest.approx(bounds[0] + 12.0)
    assert bare.report().schedule is None


@pytest.mark.parametrize("pipeline", ["train_sparse_dist", "train_semi_sync"])
def test_the_search_finds_the_shortest_path_of_the_schedule(pipeline: str) -> None:
    planner, _ = planned(pipeline)
    result, task = last_result(planner), last_task(planner)
    ways = [
        [[(t, dim, 0)], [(t, dim, 1)], [(t, dim // 2, 0), (t, dim // 2, 1)]]
        for t, (dim, _) in enumerate(TABLES)
    ]
    paths = []
    for chosen in itertools.product(*ways):
        placement = Placement.from_widths(2, [*itertools.chain(*chosen)], task)
        stages = planner.costs.simulator(task).evaluate(placement).stages
        paths.append(dataclasses.replace(result.predicted, stages=stages))
    best = min(paths, key=lambda p: p.critical_path_ms).critical_path_ms
    assert result.predicted.critical_path_ms == pytest.approx(best)
    if pipeline != "train_semi_sync":
        assert 0 <= result.gap <= MIP_GAP


def test_reports_say_what_is_hidden() -> None:
    planner, _ = planned("train_sparse_dist")
    report = planner.report()
    assert report.schedule is not None and report.schedule.dense_ms == 30.0
    hidden = report.schedule.hidden_ms
    assert hidden["index_comms"] == report.schedule.phases_ms["index_comms"] > 0
    assert hidden["fwd_compute"] == 0
    assert "'train_sparse_dist' with 30.000 ms of other layers" in report.text(True)
    assert report.to_json()["schedule"]["hidden_ms"] == hidden
    # What a split is good for is told under the pipeline: it pays.
    assert {s.table for s in report.splits} == ALL
    assert all((s.whole_ms or 0) > cost_of(planner) for s in report.splits)
    shown_ms = sum(report.schedule.phases_ms.values()) - sum(hidden.values())
    assert sum(t.path_ms for t in report.tables) == pytest.approx(shown_ms, rel=1e-6)


@pytest.mark.parametrize("pipeline", [None, *SCHEDULES])
def test_the_page_draws_the_whole_iteration(pipeline: str | None) -> None:
    planner, _ = planned(pipeline, 6.0)
    report = planner.report()
    charts = [chart for section in report.sections() for chart in section.charts]
    [drawn] = [chart for chart in charts if chart["kind"] == "timeline"]
    assert drawn["period_ms"] == pytest.approx(report.critical_path_ms)
    ran = [
        end - start
        for rank, _, phase, *_, start, end, _ in drawn["spans"]
        if rank == 0 and phase in DENSE
    ]
    assert sum(ran) == pytest.approx(6.0)
    assert report.critical_path_ms == cost_of(planner)


def test_plan_files_say_the_pipeline(tmp_path: Path) -> None:
    planner, plan = planned("train_semi_sync")
    path = tmp_path / "plan.json"
    save_plan(plan, path, model=module(), planner=planner)
    assert load_plan(path, model=module(), planner=planner) == plan
    with pytest.warns(StalePlanWarning, match=r"pipeline_type .* and train_sparse"):
        load_plan(path, model=module(), planner=planner_for("train_sparse_dist"))


@pytest.mark.filterwarnings("ignore:pipeline_type")
def test_missing_dense_time_is_noted() -> None:
    for dense, is_noted in ((None, True), (1.0, False)):
        planner, _ = planned("train_sparse_dist", dense)
        codes = [note.code for note in last_result(planner).notes]
        assert ("dense-time" in codes) == is_noted

    given = module(), planned(None)[1], gpus(), bag_sharders()
    with pytest.raises(ConfigError, match="pipeline_type 'sparse' is unknown"):
        rehearse(*given, batch_size=8, pipeline_type="sparse")
