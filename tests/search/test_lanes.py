"""Lanes: their sums, scores and changes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.builders import draw_memory, draw_tables, make_tables, make_task, search
from tests.fuzz import against_truth
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.search import SearchConfig, default, descent
from torchrec_neuroshard.search import lanes as lanes_module
from torchrec_neuroshard.search.choices import Choices
from torchrec_neuroshard.search.construct import construct, placed, starts
from torchrec_neuroshard.search.descent import Effort, descend, drafted, gathering
from torchrec_neuroshard.search.lanes import Lanes
from torchrec_neuroshard.search.moves import Moves
from torchrec_neuroshard.search.rules import follow
from torchrec_neuroshard.search.shards import ShardBank, placement_from_widths
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

COMMS = AnalyticCommsModel(gb_per_s=10.0)


def lanes_of(task: ShardingTask) -> Lanes:
    """Return greedy placements of a task."""
    bank = ShardBank(Simulator(task, AnalyticCostModel(), COMMS), merge=True)
    ways = [np.flatnonzero(bank.leads_T)]
    if task.has_choices:
        ways = Choices(bank).starts(np.inf)[:2]
    lanes = next(placed(construct(bank, *starts(bank, ways))))
    assert lanes.num_lanes > 1
    return lanes


def column_task() -> ShardingTask:
    rng = np.random.default_rng(0)
    tables = draw_tables(rng, 14, [8, 16, 32, 64])
    return make_task(
        tables,
        4,
        4096,
        memory_bytes=draw_memory(rng, tables, 4, total=3.0),
        groups=tuple(i % 3 for i in range(14)),
        stages=(0, 1, 1),
        together=((0, 1, 2), (6, 8)),
        apart=((3, 4), (4, 5, 7)),
        fixed_bytes=tuple(1000 + i for i in range(14)),
    )


def mixed_task() -> ShardingTask:
    """Return tables that may have any of five sharding types."""
    ways = ["column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel"]
    tables = [
        against_truth.table(500 * (n + 1), 32, *ways, module=n % 2, pooling=1.0 + 3 * n)
        for n in range(8)
    ]
    return against_truth.build({"ranks": 4, "node": 2, "tables": tables})


@pytest.mark.parametrize("make", [column_task, mixed_task])
def test_changed_lanes_have_the_costs_of_their_placements(
    make: Callable[[], ShardingTask],
) -> None:
    task = make()
    lanes = lanes_of(task)
    bank = lanes.bank
    descend(lanes, Effort(time.monotonic() + 600))
    lanes = Lanes.join([lanes.take(np.array([1, 0])), lanes])
    fresh = Lanes.of(bank, [lanes.width_TW(n) for n in range(lanes.num_lanes)])
    for name in ("critical_L", "score_L", "loads_LWP", "bytes_MLW", "loads_LWS3"):
        found, expected = getattr(lanes, name), getattr(fresh, name)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    assert (lanes.pieces_LT == fresh.pieces_LT).all()
    for lane, critical_ms in enumerate(lanes.critical_L):
        placement = placement_from_widths(follow(task, lanes.width_TW(lane)), task)
        placement.check(task)
        predicted = bank.simulator.evaluate(placement)
        assert critical_ms == pytest.approx(predicted.critical_path_ms)


def test_the_score_after_a_move_is_the_evaluated_one() -> None:
    # These collectives depend on sums of loads, so scores are nearly exact for them.
    task = make_task(make_tables([32, 16] * 8, pooling=[1.0 + i for i in range(16)]), 4)
    bank = ShardBank(Simulator(task, AnalyticCostModel(), COMMS), merge=True)
    width_TW = np.zeros((16, 4), dtype=np.int64)
    width_TW[np.arange(16), np.arange(16) % 4] = bank.dims_T
    lanes = Lanes.of(bank, [width_TW])
    moves = Moves(lanes, np.array([0]))
    assert len(moves.gain_K) > 20
    changes = moves.build(np.arange(len(moves.gain_K)))
    scores = lanes.evaluate(changes)
    for k in range(0, len(changes), 7):
        trial = lanes.take(np.array([0]))
        trial.apply(changes.pick(np.array([k])))
        assert trial.score_L[0] == pytest.approx(scores[k], rel=0.01)
        assert lanes.score_L[0] - trial.score_L[0] == pytest.approx(
            moves.gain_K[k], abs=0.05 * lanes.score_L[0]
        )


def test_moves_stay_within_memory() -> None:
    task = make_task(make_tables([32] * 8), 4, memory=2 * 32 * 4000 + 4 * 4000)
    bank = ShardBank(Simulator(task, AnalyticCostModel(), COMMS), merge=True)
    width_TW = np.zeros((8, 4), dtype=np.int64)
    width_TW[np.arange(8), np.arange(8) % 4] = 32
    moves = Moves(Lanes.of(bank, [width_TW]), np.array([0]))
    changes = moves.build(np.arange(len(moves.gain_K)))
    assert len(changes)
    whole = (changes.sign_N > 0) & (changes.width_N == 32)
    # No rank has room for a third table, so whole tables only move by swaps.
    assert set(np.bincount(changes.cand_N[whole])) <= {0, 2}


def test_splits_without_a_gain_are_joined() -> None:
    # Lookups are expensive and bytes cheap. Each shard repeats its table's lookups.
    task = make_task(make_tables([32] * 16, pooling=[1.0 + i for i in range(16)]), 4)
    found = search(task, cost_model=AnalyticCostModel(lookup_ns=1000.0))
    assert len(found.placement.shards) <= 20


def test_uneven_widths_balance_two_ranks() -> None:
    # Two ranks hold 40 columns: the best split of the large table is 20 + 12.
    task = make_task(make_tables([32, 8], pooling=10.0))
    model = AnalyticCostModel(launch_ms=0.0, lookup_ns=1e-6)
    shards = search(task, cost_model=model).placement.shards
    columns = np.bincount([s.rank for s in shards], [s.width for s in shards])
    assert columns.tolist() == [20, 20]


def test_a_lane_improves_the_same_alone_or_with_others() -> None:
    """The steps of a lane do not depend on other lanes if no lane is dropped."""
    task = make_task(draw_tables(np.random.default_rng(3), 12, [16, 64]), 4, 4096)
    bank = ShardBank(Simulator(task, load_cost_model("cpu"), COMMS), merge=True)
    lanes = next(placed(construct(bank, *starts(bank, [np.arange(12)]))))
    alone = lanes.take(np.array([0]))
    descend(alone, Effort(time.monotonic() + 600))
    beside = lanes.take(np.array([0, lanes.num_lanes - 1]))
    descend(beside, Effort(time.monotonic() + 600))
    assert beside.critical_L[0] == pytest.approx(alone.critical_L[0], rel=1e-6)


def test_a_rank_gives_away_its_wide_tables() -> None:
    """Only ranks with tables as wide take them, and no table is lost or split."""
    task = column_task()
    lanes = lanes_of(task)
    rng = np.random.default_rng(0)
    num_changed = 0
    for _ in range(10):
        copies, left = gathering(lanes, rng)
        from_lane = np.setdiff1d(np.arange(lanes.num_lanes), left)
        assert copies.num_lanes == len(from_lane)
        for lane, before in enumerate(from_lane.tolist()):
            old_TW, new_TW = lanes.width_TW(before), copies.width_TW(lane)
            np.testing.assert_array_equal(np.sort(old_TW), np.sort(new_TW))
            placement_from_widths(follow(task, new_TW.copy()), task).check(task)
            fewer = (new_TW.max(axis=0) < old_TW.max(axis=0)) & (
                (new_TW <= old_TW).all(axis=0)
            )
            assert fewer.any()
            assert (new_TW.max(axis=0) <= old_TW.max(axis=0)).all()
            num_changed += 1
    assert num_changed > 10


def test_the_best_start_of_each_stage_is_kept() -> None:
    task = mixed_task()
    bank = ShardBank(Simulator(task, AnalyticCostModel(), COMMS), merge=True)
    choices = Choices(bank).starts(np.inf)
    lanes = next(placed(construct(bank, *starts(bank, choices))))
    stages = [
        int(np.bincount(bank.stages_T[np.flatnonzero(pieces_T)]).argmax())
        for pieces_T in lanes.pieces_LT
    ]
    best = {
        stage: min(lanes.score_L[n] for n in range(len(stages)) if stages[n] == stage)
        for stage in stages
    }
    assert 2 < len(best) < lanes.num_lanes
    kept = default.of_every_kind(lanes, len(best))
    assert sorted(lanes.score_L[kept]) == sorted(best.values())
    more = default.of_every_kind(lanes, len(best) + 2)
    assert set(kept) < set(more)
    assert (np.diff(lanes.score_L[more]) > 0).all()


def test_wide_tables_are_gathered_on_few_ranks() -> None:
    """On a GPU, one wide table slows down the narrow ones of its rank."""
    tables = make_tables([256] * 4 + [16] * 60, 100_000, [1.0] * 4 + [20.0] * 60)
    model = load_cost_model("h100", device_type="cuda")
    placement = search(make_task(tables, 4, 4096), cost_model=model).placement
    wide = {s.rank for s in placement.shards if s.table < 4}
    assert len(wide) == 1


@pytest.mark.parametrize("make", [column_task, mixed_task])
def test_lanes_in_blocks_give_the_same_placement(
    make: Callable[[], ShardingTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, config = make(), SearchConfig(effort=0.0)
    at_once = search(task, config)
    bank = ShardBank(Simulator(task, AnalyticCostModel(), COMMS), merge=True)
    assert lanes_module.most_lanes(bank) > 100
    monkeypatch.setattr(lanes_module, "MOST_BYTES", 1)
    monkeypatch.setattr(lanes_module, "MOST_ENTRIES", 3)
    monkeypatch.setattr(default, "MOST_PHASES", 1)
    assert lanes_module.most_lanes(bank) == 1
    assert search(task, config).placement == at_once.placement


def test_changes_in_blocks_have_the_same_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many ranks make large blocks; no block begins after the deadline."""
    lanes = lanes_of(mixed_task())
    options = [(0, 0, way, 1) for way in range(5)] + [(1, 5, way, 1) for way in (5, 6)]
    changes, about = drafted(lanes, options)
    scores = lanes.evaluate(changes)
    monkeypatch.setattr(lanes_module, "MOST_ENTRIES", 6)
    monkeypatch.setattr(descent, "MOST_PHASES", 2 * lanes.phases_LWS4[0].size)
    again, about_again = drafted(lanes, options)
    np.testing.assert_allclose(about_again, about)
    np.testing.assert_allclose(lanes.evaluate(again), scores)
    late = lanes.evaluate(changes, deadline=0.0)
    assert np.isfinite(late).tolist() == sorted(np.isfinite(late), reverse=True)
    assert 0 < np.isfinite(late).sum() < len(changes)
    assert 0 < len(drafted(lanes, options, deadline=0.0)[1]) <= 2
