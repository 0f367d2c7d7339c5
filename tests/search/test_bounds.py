"""Bounds of larger tasks, worked out by hand or near plans that are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.builders import make_tables, make_task, search
from torchrec_neuroshard.search import SearchConfig, bounds
from torchrec_neuroshard.search.bounds import lower_bound
from torchrec_neuroshard.search.lanes import Lanes
from torchrec_neuroshard.search.shards import Ints, ShardBank
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.workloads import generate_dlrm_tables


def balanced(num_tables: int) -> tuple[ShardBank, Ints]:
    """Equal tables on four ranks; half of a rank's time is the launch."""
    task = make_task(make_tables([16] * num_tables, pooling=5.0), 4, 4096)
    launch_ms = num_tables / 4 * 4096 * 5.0 * (1.0 + 6.4) * 1e-6
    cost_model = AnalyticCostModel(launch_ms=launch_ms)
    width_TW = np.zeros((num_tables, 4), dtype=np.int64)
    width_TW[np.arange(num_tables), np.arange(num_tables) % 4] = 16
    return ShardBank(Simulator(task, cost_model, AnalyticCommsModel())), width_TW


def test_every_rank_pays_for_its_launch() -> None:
    bank, width_TW = balanced(40)
    [optimum] = Lanes.of(bank, [width_TW]).critical_L
    found_ms = lower_bound(bank, [width_TW], 1.01 * optimum).ms
    assert found_ms == pytest.approx(optimum, rel=0.01)
    assert lower_bound(bank, [width_TW], optimum).ms <= optimum


def test_a_split_table_pays_for_its_lookups_again() -> None:
    # Lookups alone cost; one table has as many as all others together, four times, so
    # that no split makes its ranks quicker.
    task = make_task(make_tables([16] * 21, pooling=[400.0] + [5.0] * 20), 4)
    cost_model = AnalyticCostModel(launch_ms=0.0, lookup_ns=100.0, byte_ns=0.0)
    bank = ShardBank(Simulator(task, cost_model, AnalyticCommsModel(gb_per_s=1e6)))
    width_TW = np.zeros((21, 4), dtype=np.int64)
    width_TW[0, 0] = 16
    width_TW[np.arange(1, 21), 1 + np.arange(20) % 3] = 16
    [critical_ms] = Lanes.of(bank, [width_TW]).critical_L
    assert critical_ms == pytest.approx(3 * 400 * 1024 * 100e-6, rel=1e-3)
    found_ms = lower_bound(bank, [width_TW], critical_ms).ms
    assert found_ms == pytest.approx(critical_ms, rel=1e-3)


def test_the_bound_is_near_the_plan_of_the_dlrm_tables() -> None:
    pool, rng = generate_dlrm_tables(0), np.random.default_rng(0)
    picks = rng.choice(len(pool), 40, replace=False)
    widths = rng.choice([4, 16, 64, 128], 40)
    tables = [pool[p].with_width(int(w)) for p, w in zip(picks, widths, strict=True)]
    config = SearchConfig(bound="thorough")
    assert search(make_task(tables, 8, 4096), config).gap < 0.03


def test_where_a_solver_finds_no_prices_those_before_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # By its rounding errors HiGHS found none for tables of 10^10 rows, once in 1,200.
    calls = []

    def no_prices(*_: Any, **__: Any) -> SimpleNamespace:
        calls.append(1)
        return SimpleNamespace(status=2, x=None, message="infeasible")

    monkeypatch.setattr(bounds, "optimize", SimpleNamespace(linprog=no_prices))
    bank, width_TW = balanced(30)
    [critical_ms] = Lanes.of(bank, [width_TW]).critical_L
    assert 0 < lower_bound(bank, [width_TW], critical_ms).ms <= critical_ms
    assert calls
