from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from tests.builders import (
    draw_memory,
    draw_tables,
    make_task,
    printed_elsewhere,
    search,
)
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.search import (
    NeuroShardSearcher,
    SearchConfig,
    SearchResult,
    default,
    make_searcher,
)
from torchrec_neuroshard.search.construct import Draft, construct
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel


def random_task(num_tables: int, world_size: int, **fields: Any) -> ShardingTask:
    rng = np.random.default_rng(0)
    widths = (4, 8, 12, 20, 24, 32, 64, 128)
    tables = draw_tables(rng, num_tables, widths, most_rows=10**7, spread=1.2)
    memory = draw_memory(rng, tables, world_size, total=1.3, evenness=50.0)
    fields = {"memory_bytes": memory, **fields}
    return make_task(tables, world_size, 4096, **fields)


def test_order_of_tables_does_not_matter() -> None:
    task = random_task(12, 4, memory_bytes=())
    turned = dataclasses.replace(task, tables=task.tables[::-1])
    assert search(turned).predicted.critical_path_ms == pytest.approx(
        search(task).predicted.critical_path_ms, rel=0.01
    )


SCRIPT = """
import json
from tests.search.test_default import found
print(json.dumps(found()))
"""


def found() -> Any:
    config = SearchConfig(effort=0.1, time_budget_seconds=600.0, bound="thorough")
    result = search(random_task(15, 4), config)
    return [repr(result.placement), result.lower_bound_ms]


def test_same_plan_in_every_process() -> None:
    assert found() == printed_elsewhere(SCRIPT, 1)


def test_a_plan_is_valid_even_without_time() -> None:
    task = random_task(60, 8)
    result = search(task, SearchConfig(time_budget_seconds=1e-6, bound="thorough"))
    result.placement.check(task)
    assert 0 < result.lower_bound_ms <= result.predicted.critical_path_ms


def test_large_starts_end_with_the_first_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Starts that are not begun in time are left out, so that many ranks take less."""
    monkeypatch.setattr(default, "MOST_PHASES", 1)
    made: list[Draft] = []

    def counted(*arguments: Any, **options: Any) -> Draft:
        made.append(construct(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(default, "construct", counted)
    task = random_task(20, 4)
    late = SearchConfig(time_budget_seconds=1e-6)
    search(task, late).placement.check(task)
    assert len(made) == 1
    search(task, SearchConfig(effort=0.0))
    assert len(made) > 2


def test_kernels_that_cost_nothing_are_planned() -> None:
    free = AnalyticCostModel(0.0, 0.0, 0.0), AnalyticCommsModel(math.inf)
    task = random_task(5, 3)
    result = search(task, SearchConfig(bound="thorough"), *free)
    result.placement.check(task)
    assert result.predicted.critical_path_ms == result.lower_bound_ms == 0.0


@pytest.mark.parametrize(("count", "ranks", "most"), [(1, 4, 3), (3, 5, 3), (2, 6, 4)])
def test_moves_of_one_step_keep_to_max_shards(
    count: int, ranks: int, most: int
) -> None:
    """Two moves, each of which may split a table once more, may not split it twice."""
    for seed in range(3):
        tables = draw_tables(np.random.default_rng(seed), count, (64, 128))
        task = make_task(tables, ranks, 4096, max_shards=(most,) * count)
        search(task).placement.check(task)


def test_a_bound_is_only_computed_on_request() -> None:
    task = random_task(15, 4)
    none, quick = (search(task, SearchConfig(bound=b)) for b in ("none", "quick"))
    assert none.placement == quick.placement
    assert (none.lower_bound_ms, none.gap) == (0.0, math.inf)
    assert 0 < quick.lower_bound_ms <= quick.predicted.critical_path_ms
    with pytest.raises(ConfigError, match="none, quick, thorough"):
        SearchConfig(bound="tight")


def test_make_searcher() -> None:
    assert make_searcher("default").name == "default"
    config = SearchConfig(seed=1)
    made = make_searcher(config)
    assert isinstance(made, NeuroShardSearcher) and made.config is config
    assert make_searcher(made) is made
    with pytest.raises(ConfigError, match=r"unknown search 'best'; one of .*default"):
        make_searcher("best")


class TakesModels(NeuroShardSearcher):
    """A search with the parameters that `Searcher.search` once had."""

    name = "takes models"

    def search(  # type: ignore[override]
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        raise AssertionError("called")


def test_a_search_with_other_parameters_is_refused() -> None:
    wanted = (
        r"search .takes models. takes other arguments than \(task, simulator\): "
        r"declare TakesModels\.search\(self, task, simulator\)"
    )
    with pytest.raises(ConfigError, match=wanted):
        make_searcher(TakesModels())
