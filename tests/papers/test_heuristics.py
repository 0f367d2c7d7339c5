"""Greedy and random placement of whole tables."""

import pytest

from papers.heuristics import (
    CostGreedySearcher,
    GreedySearcher,
)
from tests.builders import make_tables, make_task, run_search
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.search.base import Searcher
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

MODELS = AnalyticCostModel(), AnalyticCommsModel()


def ranks_of(searcher: Searcher, problem: ShardingTask) -> list[int]:
    placement = run_search(searcher, problem, *MODELS).placement
    assert len(placement.shards) == len(problem.tables)  # whole tables only
    return [s.rank for s in placement.shards]


def test_a_full_rank_is_never_chosen() -> None:
    # After 32 | 24, rank 1 has the fewest columns, but its memory is full.
    tables = make_tables([32, 24, 16], [100, 4_000, 100])
    problem = make_task(tables, 2, memory=24 * 4 * 4_000)
    assert ranks_of(GreedySearcher("dim"), problem) == [0, 1, 0]


# Sizes 40, 32, 24, 16 (x 100 bytes): 40 | 32, then 24 joins 32, 16 joins 40.
# Widths 4, 8, 12, 16: 16 | 12, 8 joins 12, 4 joins 16.
# Lookups 4, 24, 12, 32: 32 | 24, 12 joins 24, 4 joins 32.
# Times log10 rows 9.6, 48, 20.4, 44.7: 48 | 44.7, 20.4 joins 44.7, 9.6 joins 48.
def test_greedies_by_hand() -> None:
    rows, widths, pooling = (250, 100, 50, 25), (4, 8, 12, 16), (1.0, 3.0, 1.0, 2.0)
    problem = make_task(make_tables(widths, rows, pooling), 2, 256)
    for key in ("size", "dim", "lookup"):
        assert ranks_of(GreedySearcher(key), problem) == [0, 1, 1, 0], key
    assert ranks_of(GreedySearcher("size-lookup"), problem) == [0, 0, 1, 1]
    with pytest.raises(
        ConfigError, match="unknown greedy key 'rows'; take one of size"
    ):
        GreedySearcher("rows")


def test_cost_greedy_balances_predicted_costs() -> None:
    tables = make_tables([16] * 5, 10**4, [1.0, 8.0, 5.0, 4.0, 2.0])
    problem = make_task(tables, 2, 512)
    # 8 | 5 -> 8 | 5 + 4 -> 8 + 2 | 9 -> 10 | 9 + 1
    assert ranks_of(CostGreedySearcher(), problem) == [1, 0, 1, 1, 0]
