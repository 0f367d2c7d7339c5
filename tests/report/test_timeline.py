"""The timeline of an iteration: which ranks are drawn, and what the text says."""

from __future__ import annotations

import dataclasses

import pytest

from torchrec_neuroshard.costs.schedules import DenseMs, find_schedule
from torchrec_neuroshard.costs.simulator import PredictedCosts, RankCosts, StageCosts
from torchrec_neuroshard.files import from_fields, to_fields
from torchrec_neuroshard.report.timeline import MAX_RANKS, Timeline

STAGES = (
    StageCosts(
        "sparse (row_wise)",
        (RankCosts(1.0, 2.0, 3.0, 2.0, 1.0), RankCosts(1.0, 1.0, 2.0, 2.0, 1.0)),
    ),
    StageCosts(
        "sparse (column_wise)",
        (RankCosts(1.0, 1.0, 1.0, 1.0, 3.0), RankCosts(1.0, 3.0, 1.0, 1.0, 1.0)),
    ),
)
ONE = StageCosts("ebc", (STAGES[0].ranks[0], RankCosts(1.0, 1.0, 1.0, 1.0, 3.0)))


def drawn(predicted: PredictedCosts) -> Timeline:
    found = Timeline.of(predicted)
    assert found is not None
    return found


def test_the_text_says_what_binds_and_what_overlaps() -> None:
    """Rank 0 looks up column_wise tables from 4 to 5, beside outputs of row_wise ones.

    Gradients of row_wise tables travel from 9 to 11, and rank 0 updates column_wise
    tables from 9 to 12.
    """
    assert str(drawn(PredictedCosts(STAGES))) == (
        "binding: index_comms, fwd_compute on rank 0 (row_wise), fwd_comms, "
        "bwd_comms (column_wise), bwd_compute on rank 0; beside kernels of rank 0 "
        "[ms]: fwd_comms 1.000 of 4.000, bwd_comms 2.000 of 3.000"
    )


def test_modules_are_named_if_there_are_several() -> None:
    other = StageCosts("other (column_wise)", STAGES[1].ranks)
    text = str(drawn(PredictedCosts((STAGES[0], other))))
    assert "bwd_comms (other (column_wise))" in text


def test_one_stage_without_a_pipeline_overlaps_nothing() -> None:
    found = drawn(PredictedCosts((ONE,)))
    assert not found.overlaps
    assert str(found) == (
        "binding: index_comms, fwd_compute on rank 0, fwd_comms, bwd_comms, "
        "bwd_compute on rank 1; nothing overlaps"
    )


def test_ids_of_the_next_batch_travel_beside_dense_layers() -> None:
    dense = DenseMs(forward=4.0)
    schedule = find_schedule("train_sparse_dist", dense)
    found = drawn(PredictedCosts((ONE,), schedule=schedule, dense=dense))
    assert str(found) == (
        "binding: fwd_compute on rank 0, fwd_comms, dense layers, bwd_comms, "
        "bwd_compute on rank 1; beside kernels of rank 1 [ms]: index_comms 1.000 of "
        "1.000"
    )
    assert {span.batch for span in found.spans if span.phase == "index_comms"} == {1}


@pytest.mark.parametrize("name", ["none", "train_sparse_dist"])
def test_it_takes_as_long_as_the_critical_path(name: str) -> None:
    split = dataclasses.replace(STAGES[0], reorder_ms=(0.5, 0.75))
    copies = dataclasses.replace(STAGES[1], is_replicated=True, module=1)
    predicted = PredictedCosts(
        (split, copies), schedule=find_schedule(name, DenseMs()), dense=DenseMs()
    )
    found = drawn(predicted)
    assert found.period_ms == pytest.approx(predicted.critical_path_ms)
    reorders = {
        s.phase: s.end_ms - s.start_ms for s in found.spans if "reord" in s.phase
    }
    assert reorders == pytest.approx({"fwd_reorder": 0.5, "bwd_reorder": 0.75})


def test_of_many_ranks_some_are_drawn() -> None:
    # Rank 7 is the slowest, rank 13 binds in the backward pass, rank 20 is the fastest.
    costs = [RankCosts(1.0, 2.0, 1.0, 1.0, 2.0)] * 100
    costs[7] = RankCosts(1.0, 9.0, 1.0, 1.0, 1.0)
    costs[13] = RankCosts(1.0, 1.0, 1.0, 1.0, 5.0)
    costs[20] = RankCosts(1.0, 0.5, 1.0, 1.0, 0.5)
    found = drawn(PredictedCosts((StageCosts("ebc", tuple(costs)),)))
    assert len(found.ranks) == MAX_RANKS and {7, 13, 20} <= {*found.ranks}
    assert found.ranks == tuple(sorted(found.ranks))
    assert {span.rank for span in found.spans} == {*found.ranks}
    assert " of 100, among them those that bind, the slowest" in found.drawn
    few = drawn(PredictedCosts((StageCosts("ebc", tuple(costs[:8])),)))
    assert few.ranks == tuple(range(8)) and not few.drawn


@pytest.mark.parametrize("stages", [(), (StageCosts("ebc", (RankCosts(*[0.0] * 5),)),)])
def test_nothing_is_drawn_without_times(stages: tuple[StageCosts, ...]) -> None:
    assert Timeline.of(PredictedCosts(stages)) is None


def test_a_timeline_is_stored() -> None:
    found = drawn(PredictedCosts(STAGES))
    assert from_fields(Timeline, to_fields(found)) == found
