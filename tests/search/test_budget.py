"""Moves within a budget, checked against every placement of tiny tasks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.builders import make_tables, make_task
from tests.fuzz.against_truth import layouts
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ColumnShard, Placement, ShardingTask
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.search.budget import MoveBudget, Shards
from torchrec_neuroshard.search.lanes import Lanes
from torchrec_neuroshard.search.shards import Ints, ShardBank, placement_from_widths
from torchrec_neuroshard.search.within import improve_within
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

ROWS = 1000
LIGHT = SearchConfig(restarts=5, effort=0.2)


def task_of(
    dims: Sequence[int], world_size: int, seed: int = 0, **fields: Any
) -> ShardingTask:
    pooling = np.random.default_rng(seed).uniform(1, 20, len(dims)).tolist()
    return make_task(make_tables(dims, ROWS, pooling), world_size, **fields)


def bank_of(task: ShardingTask) -> ShardBank:
    return ShardBank(Simulator(task, AnalyticCostModel(), AnalyticCommsModel()))


def budget_of(
    task: ShardingTask, at_work: Sequence[Shards], limit: float, **kwargs: Any
) -> MoveBudget:
    count = len(task.tables)
    return MoveBudget(
        task,
        at_work,
        limit_bytes=limit,
        column_bytes=[4 * ROWS] * count,
        shard_bytes=[4 * ROWS] * count,
        **kwargs,
    )


def in_order(widths: Sequence[int], ranks: Sequence[int]) -> Shards:
    ends = itertools.accumulate(widths)
    return tuple((e - w, w, r) for e, w, r in zip(ends, widths, ranks, strict=True))


def bytes_between(old: Shards, new: Shards) -> int:
    """Return the bytes to move: each part of a shard costs its columns and one more."""
    total = 0
    for (a, w, r), (b, v, s) in itertools.product(old, new):
        shared = min(a + w, b + v) - max(a, b)
        if shared > 0 and r != s:
            total += 4 * ROWS * (shared + 1)
    return total


def random_widths(rng: np.random.Generator, count: int) -> list[int]:
    """Return random widths of `count` shards of 32 columns."""
    cuts = np.sort(rng.choice(np.arange(1, 8), count - 1, False)) * 4
    return [int(w) for w in np.diff(cuts, prepend=0, append=32)]


@pytest.mark.parametrize("all_leave", [False, True])
def test_shards_are_ordered_to_move_the_fewest_bytes(all_leave: bool) -> None:
    rng = np.random.default_rng(1)
    task = task_of([32], 5)
    for _ in range(40):
        # The current plan has shards in any order, several of them on some ranks.
        widths = random_widths(rng, int(rng.integers(1, 5)))
        old = in_order(widths, rng.integers(0, 5, len(widths)).tolist())
        budget = budget_of(task, [old], np.inf, all_leave=all_leave)
        row = np.zeros(5, dtype=np.int64)
        count = int(rng.choice([1, 2, 4]))
        row[rng.choice(5, count, replace=False)] = 32 // count
        held = np.flatnonzero(row).tolist()
        layouts = [
            in_order(row[list(ranks)].tolist(), ranks)
            for ranks in itertools.permutations(held)
        ]
        if all_leave:
            layouts = [
                new
                for new in layouts
                if not any(
                    r == s and min(a + w, b + v) > max(a, b)
                    for (a, w, r), (b, v, s) in itertools.product(old, new)
                )
            ]
        [found] = budget.bytes(np.array([0]), row[None])
        if (row == budget.width_TW[0]).all():
            assert found == 0
            continue
        expected = min((bytes_between(old, new) for new in layouts), default=np.inf)
        assert found == expected
        if layouts:
            new = budget.shards(0, row)
            assert bytes_between(old, new) == found
            assert sorted(new) == list(new) and {r for *_, r in new} == set(held)


def test_forbidden_changes_cost_infinite_bytes() -> None:
    task = task_of([16, 16, 16], 3)
    at_work = [in_order([8, 8], [0, 1])] * 3
    budget = budget_of(task, at_work, np.inf, stay=[0], keep_cuts=[1])
    rows = np.array([[8, 8, 0], [8, 0, 8], [16, 0, 0], [12, 4, 0]])
    prices = [budget.bytes(np.full(4, t), rows).tolist() for t in range(3)]
    shard, inf = 4 * ROWS * 9, np.inf
    assert prices == [[0, inf, inf, inf], [0, shard, inf, inf], [0, shard, shard, inf]]


def test_adjacent_shards_on_one_rank_are_joined() -> None:
    task = task_of([16], 2)
    twice, apart = in_order([8, 4, 4], [1, 0, 0]), in_order([4, 8, 4], [0, 1, 0])
    joined = in_order([8, 8], [1, 0])
    for old, stay, new in (
        (twice, [], joined),
        (twice, [0], twice),
        (apart, [], apart),
    ):
        budget = budget_of(task, [old], 0.0, stay=stay)
        assert budget.shards(0, budget.width_TW[0]) == new


def test_several_shards_on_one_rank_are_priced_as_such() -> None:
    task = task_of([16, 16], 2)
    twice = [in_order([8, 8], [0, 0]), in_order([16], [1])]
    budget = budget_of(task, twice, 0.0, keep_cuts=[0, 1])
    bank = bank_of(task)
    [joined] = Lanes.of(bank, [budget.width_TW]).critical_L
    for table, width, parts in budget.doubled():
        bank.price_as(table, width, parts)
    placement = Placement(
        2, tuple(ColumnShard(t, *s) for t, shards in enumerate(twice) for s in shards)
    )
    expected = bank.simulator.evaluate(placement).critical_path_ms
    [apart] = Lanes.of(bank, [budget.width_TW]).critical_L
    assert apart == pytest.approx(expected)
    assert expected > joined


@pytest.mark.parametrize(("seed", "share"), [(0, 0.25), (1, 0.0), (1, 0.25), (1, 1.0)])
def test_best_plan_within_the_budget_is_reached(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    dims, num_ranks = [8, 8, 4, 12], 2 + seed % 2
    task = task_of(dims, num_ranks, seed, uneven=False)
    at_work = [in_order([dim], [int(rng.integers(0, 2))]) for dim in dims]
    limit = share * 4 * ROWS * sum(dims)
    budget, bank = budget_of(task, at_work, limit), bank_of(task)
    found = improve_within(bank, budget, LIGHT, time.monotonic() + 600)

    def cost(width_TW: Ints) -> float:
        placement = placement_from_widths(width_TW)
        return bank.simulator.evaluate(placement).critical_path_ms

    assert budget.bytes(np.arange(4), found).sum() <= limit
    rows = [np.array(layouts(task, table)) for table in range(4)]
    best_ms = min(
        cost(np.stack(chosen))
        for chosen in itertools.product(*rows)
        if budget.bytes(np.arange(4), np.stack(chosen)).sum() <= limit
    )
    assert cost(found) == pytest.approx(best_ms, rel=1e-3)


def test_tables_do_not_move_for_a_small_gain() -> None:
    """A wide table moves because it saves much; small tables save little and stay."""
    task = task_of([64, *[4] * 6], 2)
    at_work = [in_order([32, 32], [0, 1]), *[in_order([4], [0])] * 6]

    def improved(min_gain: float) -> tuple[float, float]:
        """Return the critical path and the moved bytes."""
        budget = budget_of(task, at_work, np.inf, min_gain=min_gain)
        bank = bank_of(task)
        found = improve_within(bank, budget, LIGHT, time.monotonic() + 600)
        [critical_ms] = Lanes.of(bank, [found]).critical_L
        return critical_ms, budget.bytes(np.arange(7), found).sum()

    (start_ms, none), (best_ms, most) = improved(0.999), improved(0.0)
    assert none == 0
    saved = 1 - best_ms / start_ms
    assert saved > 0.01
    assert improved(2 * saved)[1] == 0
    some_ms, some = improved(saved / 2)
    assert 0 < some < most
    assert some_ms <= best_ms * (1 + saved / 2)


def test_moved_tables_keep_to_memory_and_rules() -> None:
    task = task_of(
        [8] * 6,
        3,
        memory_bytes=(10**6, 10**6, 2 * 4 * ROWS * 8),
        allowed_ranks=((0,), *((),) * 5),
        apart=((1, 2),),
    )
    at_work = [in_order([8], [0]) for _ in range(6)]
    budget = budget_of(task, at_work, np.inf, together=[(3, 4)])
    bank = bank_of(task)
    found = improve_within(bank, budget, LIGHT, time.monotonic() + 600)
    assert (found != budget.width_TW).any()
    assert found[0].tolist() == [8, 0, 0]
    assert (found[3] == found[4]).all() and (found[3] > 0).sum() == 1
    assert found[:, 2].sum() <= 16
    # Moved tables are apart. Tables that stay may still break a rule.
    if (found[1:3] != budget.width_TW[1:3]).any():
        assert not ((found[1] > 0) & (found[2] > 0)).any()


def test_tables_kept_together_move_together() -> None:
    task = task_of([8] * 4, 2)
    budget = budget_of(
        task, [in_order([8], [0])] * 4, np.inf, together=[(0, 1), (2, 3)]
    )
    found = improve_within(bank_of(task), budget, LIGHT, time.monotonic() + 600)
    assert (found[[0, 2]] == found[[1, 3]]).all()
    assert sorted(found.argmax(axis=1).tolist()) == [0, 0, 1, 1]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
def test_every_move_is_needed_and_within_the_budget(share: float) -> None:
    rng = np.random.default_rng(4)
    dims = rng.choice([8, 16, 32], 24).tolist()
    task = task_of(dims, 4, uneven=False)
    at_work = [in_order([dim], [int(rng.integers(0, 2))]) for dim in dims]
    limit, config = share * 4 * ROWS * sum(dims), SearchConfig(restarts=0)
    bank, every = bank_of(task), np.arange(24)

    def improved(min_gain: float) -> tuple[Ints, MoveBudget, float]:
        budget = budget_of(task, at_work, limit, min_gain=min_gain)
        found = improve_within(bank, budget, config, time.monotonic() + 600)
        assert budget.bytes(every, found).sum() <= limit
        return found, budget, float(Lanes.of(bank, [found]).critical_L[0])

    best_ms = improved(0.0)[2]
    found, budget, _ = improved(0.05)
    changed = np.flatnonzero((found != budget.width_TW).any(axis=1))
    assert len(changed)
    for table in changed:
        back = found.copy()
        back[table] = budget.width_TW[table]
        assert Lanes.of(bank, [back]).critical_L[0] > best_ms * 1.05


def test_fixed_blocks_are_not_joined() -> None:
    """All split sequence tables of a module have one width, even if one shard pays."""
    kinds = ("equal_columns", "column_wise")
    task = task_of([32, 32], 2, sharding_types=kinds, min_widths=(16, 32))
    at_work = [in_order([16, 16], [0, 1]), in_order([32], [0])]
    model = AnalyticCostModel(lookup_ns=1000.0)
    bank = ShardBank(Simulator(task, model, AnalyticCommsModel()))
    budget = budget_of(task, at_work, np.inf)
    width_TW = improve_within(bank, budget, LIGHT, time.monotonic() + 60)
    assert width_TW[0].tolist() == [16, 16]
