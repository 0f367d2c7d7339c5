"""NeuroShard's two loops, on costs that are easy to check by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import make_fingerprint, make_tables, make_task, run_search
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.papers.common import PAPER_BATCH_SIZE
from torchrec_neuroshard.papers.neuroshard import (
    NeuroShardConfig,
    NeuroShardLoops,
    OwnCosts,
    PaperSearcher,
    Shard,
    SharedCosts,
)
from torchrec_neuroshard.papers.neuroshard_models import (
    CommsNets,
    ComputeNet,
    NetsInfo,
    NeuroShardModels,
    shard_features,
    shipped_models,
)
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

COMPUTE, COMMS = AnalyticCostModel(), AnalyticCommsModel(gb_per_s=1.0)
QUICK = NeuroShardConfig(max_rounds=3, costs="shared")


def drawn_task(
    widths: tuple[int, ...], world_size: int = 2, seed: int = 0, **rest: Any
) -> ShardingTask:
    """Return a task with random rows and pooling factors."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(100, 100_000, len(widths)).tolist()
    pooling = rng.integers(1, 40, len(widths)).tolist()
    return make_task(make_tables(widths, rows, pooling), world_size, **rest)


def random_task(seed: int, world_size: int = 3) -> ShardingTask:
    rng = np.random.default_rng(seed)
    widths = tuple(int(w) for w in rng.choice((4, 8, 12, 32, 64, 128), 9))
    return drawn_task(widths, world_size, seed)


def make_loops(
    task: ShardingTask, config: NeuroShardConfig | None = None
) -> NeuroShardLoops:
    costs = SharedCosts(task, COMPUTE, COMMS)
    return NeuroShardLoops(task, costs, config or NeuroShardConfig())


def paper_search(task: ShardingTask, config: NeuroShardConfig = QUICK) -> SearchResult:
    return run_search(PaperSearcher(config), task, COMPUTE, COMMS)


def whole(task: ShardingTask) -> list[Shard]:
    return [(i, t.embedding_dim) for i, t in enumerate(task.tables)]


def test_greedy_takes_the_rank_that_was_cheapest_before_the_shard() -> None:
    # By cost the order is a, b, c. After a | b, c goes to b's rank, although b and c
    # together cost more than a and c. With a cap of 1.0, columns decide: 8 + 8 | 16.
    task = make_task(make_tables((16, 8, 8), pooling=(5, 9, 8)))
    # Lookups x (1 + 0.4 x width): 37.0, 37.8, 33.6.
    loops = make_loops(task)
    assert loops.greedy(whole(task), math.inf) == [[(1, 8)], [(0, 16), (2, 8)]]
    assert loops.greedy(whole(task), 1.0) == [[(1, 8), (2, 8)], [(0, 16)]]
    assert loops.greedy(whole(task), 0.9) is None


def test_objective_is_the_largest_sum_with_waiting() -> None:
    task = make_task(make_tables((16, 8, 8), pooling=(5, 9, 8)))
    # Two halves on one rank are priced as two tables: each pays for all lookups.
    ranks = [[(0, 8), (1, 8), (0, 8)], [(2, 8)]]
    # A lookup of eight columns takes 1 ns plus 0.1 ns per byte; backward, twice that.
    lookups = np.array([5 + 9 + 5, 8]) * 1024
    kernels = 3 * (0.01 + lookups * (1 + 0.1 * 8 * 4) * 1e-6)
    # Bytes to or from the other rank, at 1 GB/s. Rank 1 receives half of all columns:
    # 16.
    transfer = np.array([24, 16]) * 1024 * 4 / 2 / 1e6
    start = kernels + transfer
    expected = start.max() + transfer.max()
    assert make_loops(task).total_ms(ranks) == pytest.approx(expected)


def test_candidates_are_the_largest_and_the_costliest() -> None:
    rows, pooling = (900, 800, 100, 100, 100, 700), (1, 1, 9, 1, 8, 7)
    task = make_task(make_tables([64] * 6, rows, pooling))
    loops = make_loops(task, NeuroShardConfig(num_candidates=2))
    split = [state[-1] for state in loops.candidates(whole(task))]
    assert split == [(0, 32), (1, 32), (2, 32), (4, 32)]


def test_a_short_time_budget_returns_the_best_plan_so_far() -> None:
    task = random_task(1)
    result = paper_search(task, dataclasses.replace(QUICK, time_budget_seconds=1e-9))
    result.placement.check(task)
    assert len(result.placement.shards) == len(task.tables)  # nothing was split yet
    assert "the time budget of 1e-09 s ended before" in result.warnings[0]


# The paper's own nets, with random weights.


@pytest.fixture
def models() -> NeuroShardModels:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        compute, comms = ComputeNet(), {3: CommsNets.fresh(3)}
    compute.std_F.fill_(1e3)
    here = make_fingerprint("x")
    info = NetsInfo(world_sizes=(3,), fingerprint=here, trained_on={})
    return NeuroShardModels(info=info, compute=compute, comms=comms)


def test_own_costs_are_the_nets_predictions(models: NeuroShardModels) -> None:
    task = random_task(0)
    nets = models.comms[3]
    costs = OwnCosts(task, models, SharedCosts(task, COMPUTE, COMMS))
    ranks = [[(0, 32), (4, 8)], [(1, 4), (0, 64)], [(2, 12)]]
    kernels, columns = [], []
    with torch.no_grad():
        for shards in ranks:
            tables = [task.tables[t].with_width(w) for t, w in shards]
            features = torch.from_numpy(shard_features(tables, task.batch_size))
            total = models.compute.encode(features).sum(dim=0, keepdim=True)
            kernels.append(float(models.compute.cost(total)[0]))
            columns.append(sum(w for _, w in shards) * 1024 / PAPER_BATCH_SIZE)
        backward = nets.backward(torch.tensor([columns]))[0]
        start = torch.tensor(kernels) + backward
        forward = nets.forward(torch.tensor([[*columns, *(start - start.min())]]))[0]
    assert [costs.compute_ms(s) for s in ranks] == pytest.approx(kernels, rel=1e-5)
    expected = float((start + forward).max())
    loops = NeuroShardLoops(task, costs, NeuroShardConfig(costs="own"))
    assert loops.total_ms(ranks) == pytest.approx(expected, rel=1e-5)


def test_the_given_model_replaces_nets_for_other_numbers_of_ranks(
    models: NeuroShardModels,
) -> None:
    task = random_task(0, 2)
    searcher = PaperSearcher(NeuroShardConfig(max_rounds=1), models=models)
    (warning,) = run_search(searcher, task, COMPUTE, COMMS).warnings
    assert "trained for 3 ranks, not for 2" in warning and COMMS.source in warning
    load = np.array([1.0, 5.0]), np.array([64.0, 8.0])
    found = OwnCosts(task, models, SharedCosts(task, COMPUTE, COMMS)).comms_ms(*load)
    expected = SharedCosts(task, COMPUTE, COMMS).comms_ms(*load)
    np.testing.assert_array_equal(found, expected)


def test_the_device_selects_the_shipped_nets() -> None:
    task, config = random_task(0, 2), NeuroShardConfig(max_rounds=1)
    of_a_device = AnalyticCostModel()
    of_a_device.hardware = "AMD EPYC (26/2)"
    result = run_search(PaperSearcher(config), task, of_a_device, COMMS)
    assert not result.warnings
    assert shipped_models("no such cpu") is None
    given = PaperSearcher(config, models=shipped_models(of_a_device.hardware))
    # With the device's nets, the given cost model does not change the plan.
    expected = run_search(given, task, AnalyticCostModel(launch_ms=9.0), COMMS)
    assert result.placement == expected.placement
    # Without nets for the device, the search uses the given cost model.
    without = run_search(PaperSearcher(config), task, COMPUTE, COMMS)
    (warning,) = without.warnings
    assert "this package has no nets of NeuroShard for none" in warning
    shared = paper_search(task, dataclasses.replace(config, costs="shared"))
    assert without.placement == shared.placement
