from __future__ import annotations

import time

import numpy as np
import pytest

from tests.builders import make_tables, make_task
from torchrec_neuroshard.search import SearchConfig, shards
from torchrec_neuroshard.search.refine import Plan, refine
from torchrec_neuroshard.search.shards import ShardBank, placement_from_widths
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel


def bank_of(
    num_tables: int,
    world_size: int,
    *,
    lookup_ns: float = 1.0,
    num_groups: int = 1,
    memory: int = 0,
) -> ShardBank:
    rng = np.random.default_rng(0)
    pooling = [float(rng.uniform(1, 20)) for _ in range(num_tables)]
    task = make_task(
        make_tables([32] * num_tables, pooling=pooling),
        world_size,
        groups=tuple(i % num_groups for i in range(num_tables)),
        memory=memory,
    )
    model = AnalyticCostModel(lookup_ns=lookup_ns)
    return ShardBank(Simulator(task, model, AnalyticCommsModel()))


def random_widths(
    bank: ShardBank, seed: int = 0
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Every table in one to three pieces of 4 columns or more on random ranks."""
    rng = np.random.default_rng(seed)
    widths = np.zeros((len(bank.dims_T), bank.task.world_size), dtype=np.int64)
    for row in widths:
        ranks = rng.choice(len(row), int(rng.integers(1, 4)), replace=False)
        row[ranks] = 4
        row[ranks[0]] += 32 - row.sum()
    return widths


@pytest.mark.parametrize("num_groups", [1, 3])
def test_running_sums_agree_with_the_simulator(
    num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "ROWS_AT_ONCE", 3)
    bank = bank_of(12, 4, num_groups=num_groups)
    plan = Plan(bank, random_widths(bank))
    for source in range(4):
        found = plan.swaps(np.array([source]))
        if len(found):
            plan.apply(found, len(found) // 2, plan.evaluate(found))
        found = plan.transfers(np.array([source]))
        plan.apply(found, len(found) // 2, plan.evaluate(found))
        predicted = bank.simulator.evaluate(placement_from_widths(plan.width_TW))
        assert plan.critical_ms == pytest.approx(predicted.critical_path_ms)
        assert plan.width_TW.sum(axis=1).tolist() == [32] * 12


def test_scores_come_true() -> None:
    bank = bank_of(12, 4)
    plan = Plan(bank, random_widths(bank))
    ranks = np.array([int(plan.loads_W.argmax())])
    for found in (plan.transfers(ranks), plan.swaps(ranks)):
        outcomes = plan.evaluate(found)
        for k in range(0, len(found), 7):
            trial = Plan(bank, plan.width_TW)
            trial.apply(found, k, outcomes)
            assert trial.score == pytest.approx(outcomes.score_K[k])
            fresh = Plan(bank, trial.width_TW)
            assert trial.score == pytest.approx(fresh.score)
            np.testing.assert_allclose(trial.bytes_MW, fresh.bytes_MW)
            np.testing.assert_allclose(trial.sums_WGE, fresh.sums_WGE, atol=1e-9)
            assert (trial.count_WG == fresh.count_WG).all()
    row = np.array([8, 8, 8, 8])
    expected = plan.evaluate_layouts([{3: row}])[0]
    plan.set_rows({3: row})
    assert plan.score == pytest.approx(expected)


def test_transfers_keep_to_memory() -> None:
    bank = bank_of(8, 4, memory=2 * 32 * 4000 + 4 * 4000)
    widths = np.zeros((8, 4), dtype=np.int64)
    widths[np.arange(8), np.arange(8) % 4] = 32
    plan = Plan(bank, widths)
    found = plan.transfers(np.array([0]))
    assert len(found)
    assert set(found.columns_K.tolist()) == {4}  # all that fits beside two tables
    assert len(plan.swaps(np.array([0])))


def test_splits_that_do_not_pay_are_joined() -> None:
    # Lookups are dear and bytes cheap: a split table costs its lookups once per shard.
    bank = bank_of(16, 4, lookup_ns=1000.0)
    widths = np.full((16, 4), 8, dtype=np.int64)
    start = Plan(bank, widths)
    config = SearchConfig(effort=5.0)
    best, best_ms = refine(bank, [widths], config, time.monotonic() + 60)
    assert best_ms < 0.5 * start.critical_ms
    assert (best > 0).sum() <= 20  # of 64 shards


def test_uneven_widths_even_out_two_ranks() -> None:
    # One table on two ranks with a small one beside it: 20 + 12 columns are best.
    task = make_task(make_tables([32, 8], pooling=10.0))
    model = AnalyticCostModel(launch_ms=0.0, lookup_ns=1e-6)
    bank = ShardBank(Simulator(task, model, AnalyticCommsModel()))
    widths = np.array([[32, 0], [8, 0]])
    best, _ = refine(bank, [widths], SearchConfig(), time.monotonic() + 60)
    assert sorted(best.sum(axis=0).tolist()) == [20, 20]
