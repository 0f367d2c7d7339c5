from __future__ import annotations

import numpy as np
import pytest

from tests.builders import make_tables, make_task
from torchrec_neuroshard.search import shards
from torchrec_neuroshard.search.refine import Plan
from torchrec_neuroshard.search.rules import follow
from torchrec_neuroshard.search.shards import ShardBank, placement_from_widths
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("together", [(), ((0, 1, 2, 3), (6, 8))])
def test_a_plan_costs_what_its_placement_costs_whatever_is_done_to_it(
    num_groups: int,
    together: tuple[tuple[int, ...], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of tables that lie together stands for all of them."""
    monkeypatch.setattr(shards, "ROWS_AT_ONCE", 3)
    rng = np.random.default_rng(0)
    task = make_task(
        make_tables([32] * 12, pooling=rng.uniform(1, 20, 12).tolist()),
        4,
        groups=tuple(i % num_groups for i in range(12)),
        stages=(0, 1, 2) if num_groups > 1 and together else (),
        together=together,
        fixed_bytes=tuple(1000 + i for i in range(12)),
        memory=10**6,
    )
    simulator = Simulator(task, AnalyticCostModel(), AnalyticCommsModel())
    bank = ShardBank(simulator, merge=bool(together))
    width_TW = np.zeros((12, 4), dtype=np.int64)
    for table in np.flatnonzero(bank.leads_T):
        count = int(rng.integers(1, 4)) if task.max_shards[table] > 1 else 1
        ranks = rng.choice(4, count, replace=False)
        width_TW[table, ranks] = 4
        width_TW[table, ranks[0]] += bank.dims_T[table] - width_TW[table].sum()
    plan = Plan(bank, width_TW)
    for source in range(4):
        for find in (plan.transfers, plan.swaps):
            found = find(np.array([source]))
            outcomes = plan.evaluate(found)
            for k in range(0, len(found), 5):
                trial = Plan(bank, plan.width_TW)
                trial.apply(found, k, outcomes)
                fresh = Plan(bank, trial.width_TW)
                assert trial.score == pytest.approx(outcomes.score_K[k])
                assert trial.score == pytest.approx(fresh.score)
                np.testing.assert_allclose(trial.bytes_MW, fresh.bytes_MW)
                np.testing.assert_allclose(trial.sums_WGE, fresh.sums_WGE, atol=1e-9)
                assert (trial.count_WG == fresh.count_WG).all()
            if len(found):
                plan.apply(found, len(found) // 2, outcomes)
            placement = placement_from_widths(follow(task, plan.width_TW.copy()))
            placement.check(task)
            predicted_ms = simulator.evaluate(placement).critical_path_ms
            assert plan.critical_ms == pytest.approx(predicted_ms)
            np.testing.assert_allclose(plan.bytes_MW[0], placement.rank_bytes(task))
    row = np.array([8, 8, 8, 8])
    expected = plan.evaluate_layouts([{5: row}])[0]
    plan.set_rows({5: row})
    assert plan.score == pytest.approx(expected)


def test_transfers_keep_to_memory() -> None:
    task = make_task(make_tables([32] * 8), 4, memory=2 * 32 * 4000 + 4 * 4000)
    simulator = Simulator(task, AnalyticCostModel(), AnalyticCommsModel())
    widths = np.zeros((8, 4), dtype=np.int64)
    widths[np.arange(8), np.arange(8) % 4] = 32
    plan = Plan(ShardBank(simulator), widths)
    found = plan.transfers(np.array([0]))
    assert set(found.columns_K.tolist()) == {4}  # all that fits beside two tables
    assert len(plan.swaps(np.array([0])))
