"""Plans that are measured before one of them is taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.planner import Topology

from tests.builders import (
    META,
    analytic,
    bag_config,
    bag_sharders,
    bags,
    draw_tables,
    make_planner,
    make_record,
    make_task,
)
from torchrec_neuroshard import NeuroShardPlanner, SearchConfig, topology_for
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.features import table_features
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.planner import PlanCosts
from torchrec_neuroshard.planner.launch.finalists import MAX_ROUNDS, Finalists
from torchrec_neuroshard.records import CostRecord
from torchrec_neuroshard.search import NeuroShardSearcher, SearchResult, make_searcher
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCostModel
from torchrec_neuroshard.training.first_launch import LaunchRequest

pytestmark = pytest.mark.one_release

RANKS = 4
TOPOLOGY = Topology(world_size=RANKS, compute_device="cpu")
SEARCH = SearchConfig(effort=0.1, restarts=2, beam_width=1, time_budget_seconds=4.0)
MODEL = AnalyticCostModel()
TASK = make_task(draw_tables(np.random.default_rng(7), 16, [16, 32]), RANKS)
FACTOR = dict(
    zip(
        [t.num_embeddings for t in TASK.tables],
        np.exp(0.3 * np.random.default_rng(8).standard_normal(16)).tolist(),
        strict=True,
    )
)
"""Rows of a table -> how much longer it really takes than the model says."""


def true_ms(tables: Sequence[TableConfig], batch_size: int) -> tuple[float, float]:
    features = table_features(tables, batch_size)
    alone = MODEL.predict_sums(MODEL.encode(features))
    off = np.array([FACTOR.get(t.num_embeddings, 1.0) for t in tables])
    forward, backward = (alone * off[:, None]).sum(axis=0).tolist()
    return forward, backward


def true_path(placement: Placement, task: ShardingTask = TASK) -> float:
    """Slowest forward and backward; collectives are next to nothing."""
    held: list[list[TableConfig]] = [[] for _ in range(task.world_size)]
    for shard in placement.shards:
        held[shard.rank].append(task.tables[shard.table].with_width(shard.width))
    both = np.array([true_ms(tables, task.batch_size) for tables in held if tables])
    return float(both.max(axis=0).sum())


class Stand_in:
    """Measures by the truth; notes what was asked for."""

    def __init__(self, spoil: Callable[[int], None] = lambda _: None) -> None:
        self.requests: list[LaunchRequest] = []
        self._spoil = spoil

    def __call__(self, request: LaunchRequest) -> list[CostRecord]:
        self.requests.append(request)
        self._spoil(len(self.requests))
        return [
            make_record(
                tables,
                *true_ms(tables, request.batch_size),
                index=number,
                batch_size=request.batch_size,
            )
            for number, tables in enumerate(request.sets)
        ]


def choose(
    stand_in: Stand_in, count: int = 3, seconds: float = 600.0, search: Any = SEARCH
) -> tuple[SearchResult, PlanCosts]:
    costs = PlanCosts(TOPOLOGY, **analytic())
    finalists = Finalists(count, seconds, TOPOLOGY, stand_in)
    return finalists.choose(make_searcher(search), TASK, costs), costs


@pytest.fixture(scope="module")
def first() -> SearchResult:
    """What the search finds without measurements."""
    return NeuroShardSearcher(SEARCH).search(TASK, **analytic())


@pytest.fixture(scope="module")
def chosen() -> tuple[SearchResult, PlanCosts, Stand_in]:
    stand_in = Stand_in()
    return *choose(stand_in), stand_in


def test_the_plan_that_is_really_better_is_chosen(
    first: SearchResult, chosen: tuple[SearchResult, PlanCosts, Stand_in]
) -> None:
    result, costs, stand_in = chosen
    result.placement.check(TASK)
    assert len(stand_in.requests) == MAX_ROUNDS
    assert true_path(result.placement) < 0.97 * true_path(first.placement)
    # It is not flattered: what is predicted of it now is what it takes.
    path_ms = result.predicted.critical_path_ms
    assert path_ms == pytest.approx(true_path(result.placement), rel=0.02)
    assert first.predicted.critical_path_ms < 0.97 * true_path(first.placement)
    assert "corrected by" in costs.cost_model.source
    assert 0 < result.lower_bound_ms <= path_ms


def test_the_report_names_the_finalists(
    first: SearchResult, chosen: tuple[SearchResult, PlanCosts, Stand_in]
) -> None:
    finalists = chosen[0].finalists
    rounds = [f.round for f in finalists]
    assert rounds == sorted(rounds) and set(rounds) <= {1, 2, 3} and len(rounds) > 3
    (taken,) = [f for f in finalists if f.chosen]
    assert taken.corrected_ms == min(f.corrected_ms for f in finalists)
    # The slowest of several ranks is slower than each is expected to be.
    path_ms = chosen[0].predicted.critical_path_ms
    assert path_ms <= taken.corrected_ms < 1.02 * path_ms
    assert finalists[0].predicted_ms == first.predicted.critical_path_ms
    for finalist in finalists:
        assert 1 <= finalist.num_measured <= RANKS
        assert finalist.measured_ms == pytest.approx(finalist.corrected_ms, rel=0.05)


def test_what_is_measured_decides_plans_that_differ(
    chosen: tuple[SearchResult, PlanCosts, Stand_in],
) -> None:
    request = chosen[2].requests[0]
    assert len(set(request.sets)) == len(request.sets)
    results = NeuroShardSearcher(SEARCH).finalists(TASK, **analytic(), count=3)
    assert len(results) == 3
    paths = [r.predicted.critical_path_ms for r in results]
    assert paths == sorted(paths) and paths[-1] < 1.05 * paths[0]
    assert all(r.lower_bound_ms == results[0].lower_bound_ms for r in results)
    seen: list[set[tuple[tuple[int, int], ...]]] = []
    for result in results:
        held: dict[int, list[tuple[int, int]]] = {}
        for s in result.placement.shards:
            held.setdefault(s.rank, []).append((s.table, s.width))
        ranks = result.predicted.ranks
        slowest = max(range(RANKS), key=lambda r: ranks[r].fwd_compute)
        sets = {tuple(h) for h in held.values()}
        for other in seen:
            assert tuple(held[slowest]) not in other
            assert len(sets & other) <= RANKS / 2
        seen.append(sets)


def test_one_finalist_is_measured_and_searched_on_from(first: SearchResult) -> None:
    result, _ = choose(Stand_in(), count=1)
    assert len(result.finalists) == MAX_ROUNDS
    assert true_path(result.placement) <= true_path(first.placement)


def test_a_spent_budget_ends_the_rounds() -> None:
    stand_in = Stand_in(lambda _: time.sleep(0.02))
    result, _ = choose(stand_in, seconds=0.01)
    assert len(stand_in.requests) == 1
    assert {f.round for f in result.finalists} == {1}
    assert 0 < stand_in.requests[0].seconds <= 0.01


@pytest.mark.parametrize("fails_in", [1, 2])
def test_a_failure_leaves_the_plan_of_the_search(
    fails_in: int, first: SearchResult
) -> None:
    def spoil(number: int) -> None:
        if number == fails_in:
            raise OSError("no process")

    with pytest.warns(UserWarning, match=r"failed \(OSError: no process\): the plan"):
        result, costs = choose(Stand_in(spoil))
    assert result.placement == first.placement and result.finalists == ()
    assert costs.cost_model.source == "analytic"
    assert "measuring finalists failed" in costs.warnings[-1]


def test_nothing_measured_is_a_failure(first: SearchResult) -> None:
    stand_in = Stand_in()
    with pytest.warns(UserWarning, match="no set of the finalists could be measured"):
        finalists = Finalists(2, 60.0, TOPOLOGY, lambda request: stand_in(request)[:0])
        costs = PlanCosts(TOPOLOGY, **analytic())
        result = finalists.choose(make_searcher(SEARCH), TASK, costs)
    assert result.placement == first.placement


def test_searches_of_one_plan_say_so() -> None:
    message = "search 'greedy-size' hands over one plan, measure_finalists needs"
    with pytest.raises(ConfigError, match=message):
        choose(Stand_in(), search="greedy-size")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measure_finalists": -1}, "measure_finalists must be at least 0, got -1"),
        (
            {"measure_finalists": 2, "calibrate": "never"},
            "measures, which calibrate='never' forbids",
        ),
        (
            {
                "measure_finalists": 2,
                "topology": topology_for("h100", ranks_per_node=2),
                "pipeline_type": "train_sparse_dist",
            },
            "pipeline_type is 'train_sparse_dist'; leave one of them out",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_planner(**arguments)


# In the planner.


def plan(planner: NeuroShardPlanner) -> None:
    sizes = [(t.num_embeddings, t.embedding_dim) for t in TASK.tables]
    model = bags(*(bag_config(i, *size) for i, size in enumerate(sizes)), device=META)
    planner.plan(model, bag_sharders())


def test_a_planner_reports_and_keeps_the_corrected_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = Stand_in()
    monkeypatch.setattr(
        "torchrec_neuroshard.training.first_launch.measure_sets",
        lambda request, _: stand_in(request),
    )
    planner = make_planner(RANKS, measure_finalists=2, search=SEARCH, search_only=False)
    plan(planner)
    report = planner.report()
    assert planner.last_result is not None
    assert report.finalists == planner.last_result.finalists != ()
    assert report.to_json()["finalists"][0]["round"] == 1
    assert f"{len(report.finalists)} plans were measured" in str(report)
    assert sum(", chosen" in line for line in str(report).splitlines()) == 1
    assert "corrected by" in report.compute_source
    request = stand_in.requests[0]
    assert (request.world_size, request.batch_size) == (1, 64 * RANKS)
    # The next plan is corrected by measurements of its own.
    plan(planner)
    assert planner.costs.cost_model.source.count("corrected") == 1


def test_kernels_are_really_measured() -> None:
    """In a process of its own, whose records come back."""
    planner = make_planner(2, measure_finalists=2, calibrate=1.0, cost_model="cpu")
    model = bags(*(bag_config(i, 500, 16) for i in range(4)), device=META)
    planner.plan(model, bag_sharders())
    assert planner.last_result is not None
    finalists = planner.last_result.finalists
    assert finalists and finalists[0].num_measured > 0
    assert finalists[0].measured_ms != finalists[0].predicted_ms
