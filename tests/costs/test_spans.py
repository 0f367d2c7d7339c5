"""Spans of an iteration: held to the formulas of a pass and of the pipelines."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from torchrec_neuroshard.costs.passes import TIMED, StagePhases
from torchrec_neuroshard.costs.schedules import (
    DENSE,
    SCHEDULES,
    SEQUENTIAL,
    DenseMs,
    Schedule,
    find_schedule,
)
from torchrec_neuroshard.costs.spans import Iteration, Span
from torchrec_neuroshard.costs.timeline import chains


def random_phases(
    rng: np.random.Generator, schedule: Schedule = SEQUENTIAL, num_stages: int = 1
) -> StagePhases:
    """Return phases of 1 to 5 ranks, without reordering and replicas."""
    shape = (1, rng.integers(1, 6), num_stages, len(TIMED))
    phases_CWS6 = rng.exponential(size=shape)
    if not schedule.prefetches:
        phases_CWS6[..., TIMED.index("cache")] = 0.0
    return StagePhases.plain(phases_CWS6)


def with_replicas(rng: np.random.Generator, given: StagePhases) -> StagePhases:
    """Return phases in which some stages are replicated and some reorder columns."""
    num_stages = len(given.modules_S)
    replicated_CS = rng.random((1, num_stages)) < 0.3
    phases_CWS6 = given.phases_CWS6.copy()
    for phase in ("index_comms", "fwd_comms"):
        phases_CWS6[..., TIMED.index(phase)] *= ~replicated_CS[:, None]
    return dataclasses.replace(
        given,
        phases_CWS6=phases_CWS6,
        reorder_CS2=rng.exponential(size=(1, num_stages, 2)) * rng.integers(2),
        replicated_CS=replicated_CS,
    )


def with_nodes(rng: np.random.Generator, given: StagePhases) -> StagePhases:
    """Return phases in which some stages have collectives inside nodes of 2 ranks."""
    phases_CWS6 = np.concatenate([given.phases_CWS6, given.phases_CWS6[:, ::-1]], 1)
    inside = rng.exponential(size=(1, len(given.modules_S), 2))
    inside *= rng.random((1, len(given.modules_S), 1)) < 0.5
    size = int(rng.choice([0, 2]))
    return dataclasses.replace(
        given, phases_CWS6=phases_CWS6, inside_CS2=inside, node_size=size
    )


def random_dense(rng: np.random.Generator, lookups_first: bool) -> DenseMs:
    ms = rng.exponential(rng.choice([0.3, 1.0, 3.0]), len(DENSE)).tolist()
    return DenseMs(**dict(zip(DENSE, ms, strict=True)), lookups_first=lookups_first)


@pytest.mark.parametrize("num_modules", [1, 2])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_an_iteration_without_a_pipeline_is_the_sum_of_its_passes(
    num_stages: int, num_modules: int
) -> None:
    rng = np.random.default_rng(num_stages)
    for _ in range(20):
        modules_S = np.sort(rng.integers(num_modules, size=num_stages))
        phases = dataclasses.replace(
            with_replicas(rng, random_phases(rng, num_stages=num_stages)),
            modules_S=tuple(modules_S.tolist()),
        )
        phases_WS6, reorder_S2 = phases.phases_CWS6[0], phases.reorder_CS2[0]
        index_S, _, x_S, g_S, *_ = np.moveaxis(phases_WS6.max(axis=0), -1, 0)
        forward = 0.0
        for module in np.unique(modules_S):
            own = modules_S == module
            # Columns of all modules are reordered after the last one's lookups.
            orders_S = reorder_S2[:, 0] * (module == modules_S[-1])
            lookups_WS = phases_WS6[..., 1] * own
            forward += float(chains(lookups_WS, x_S * own, orders_S).ms)
        replicated_S = phases.replicated_CS[0]
        backward = chains(
            phases_WS6[..., 4],
            np.where(replicated_S, 0.0, g_S),
            reorder_S2[:, 1],
            np.where(replicated_S, g_S, 0.0),
        ).ms
        dense = random_dense(rng, lookups_first=False)
        expected = index_S.sum() + forward + float(backward) + dense.total_ms
        found = Iteration(SEQUENTIAL, dense, phases)
        assert found.period_ms == pytest.approx(expected, rel=1e-9)
        assert sum(step.ms for step in found.steps) == pytest.approx(expected)


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("lookups_first", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_iteration_takes_the_longest_way_through_its_schedule(
    name: str, lookups_first: bool, num_stages: int
) -> None:
    rng = np.random.default_rng(num_stages)
    for overlaps, reorders in [(True, False), (False, False), (True, True)] * 8:
        dense = random_dense(rng, lookups_first)
        schedule = find_schedule(name, dense)
        phases = dataclasses.replace(
            random_phases(rng, schedule, num_stages),
            modules_S=(0,) * (num_stages - 1) + (0 if reorders else 1,),
            overlaps=overlaps,
            reorder_CS2=rng.exponential(size=(1, num_stages, 2)) * reorders,
        )
        found = Iteration(schedule, dense, phases)
        expected = schedule.path_ms(phases, dense)[0]
        assert found.period_ms == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["none", "train_sparse_dist"])
def test_ranks_of_a_node_wait_for_collectives_inside_it(name: str) -> None:
    rng = np.random.default_rng(0)
    for overlaps in (True, False) * 10:
        dense = random_dense(rng, lookups_first=False)
        schedule = find_schedule(name, dense)
        phases = with_nodes(rng, random_phases(rng, schedule, num_stages=3))
        phases = dataclasses.replace(phases, overlaps=overlaps)
        expected = schedule.path_ms(phases, dense)[0]
        parts = sum(part.ms for part in schedule.parts(phases, dense))
        assert parts == pytest.approx(expected)
        if overlaps:
            found = Iteration(schedule, dense, phases)
            assert found.period_ms == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("lookups_first", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_work_happens_once_and_streams_do_one_thing_at_a_time(
    name: str, lookups_first: bool
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        dense = random_dense(rng, lookups_first)
        schedule = find_schedule(name, dense)
        phases = random_phases(rng, schedule, num_stages=3)
        phases_WS6 = phases.phases_CWS6[0]
        found = Iteration(schedule, dense, phases)
        spans = found.spans(range(len(phases_WS6)))
        for rank, own in itertools.groupby(spans, key=lambda span: span.rank):
            held = list(own)
            worked = sum(s.end_ms - s.start_ms for s in held)
            meeting = phases_WS6[..., [0, 2, 3]].max(axis=0).sum()
            alone = phases_WS6[rank][:, [1, 4, 5]].sum()
            assert worked == pytest.approx(meeting + alone + dense.total_ms)
            for stream in ("compute", "collectives", "cache"):
                of_stream = [s for s in held if s.stream == stream]
                # With lower layers, the fused pipeline has a second stream of kernels.
                if stream != "compute" or name != "train_fused_sparse_dist":
                    assert_apart(of_stream)
            assert all(0 <= s.start_ms < s.end_ms for s in held)
            assert max(s.end_ms for s in held) <= found.period_ms * (1 + 1e-9)


def assert_apart(spans: list[Span]) -> None:
    spans = sorted(spans, key=lambda span: span.start_ms)
    for first, second in itertools.pairwise(spans):
        assert first.end_ms <= second.start_ms + 1e-9, (first, second)


def by_hand() -> Iteration:
    """Two ranks and two stages, without a pipeline and dense layers.

    Ids arrive at 2. Rank 0 looks up until 4 and 5, rank 1 until 3 and 6. Outputs travel
    from 4 to 7 and from 7 to 8. Gradients of stage 1 travel from 8 to 9, of stage 0
    from 9 to 11. Rank 0 updates stage 1 from 9 to 12 and stage 0 until 13, rank 1 from
    9 to 10 and from 11 to 12.
    """
    stages = [
        [[1.0, 2.0, 3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 0.5, 1.0, 3.0, 0.0]],
        [[1.0, 1.0, 2.0, 2.0, 1.0, 0.0], [1.0, 3.0, 1.0, 1.0, 1.0, 0.0]],
    ]
    return Iteration(SEQUENTIAL, DenseMs(), StagePhases.plain(np.array([stages])))


def test_spans_by_hand() -> None:
    found = by_hand()
    spans = {(s.rank, s.phase, s.stage): s for s in found.spans([0, 1])}
    assert found.period_ms == pytest.approx(13)
    exchanges = {
        ("index_comms", 0): [0.0, 1.0],
        ("index_comms", 1): [1.0, 2.0],
        ("fwd_comms", 0): [4.0, 7.0],
        ("fwd_comms", 1): [7.0, 8.0],
        ("bwd_comms", 1): [8.0, 9.0],
        ("bwd_comms", 0): [9.0, 11.0],
    }
    assert {
        key: [round(span.start_ms, 9), round(span.end_ms, 9)]
        for key, span in spans.items()
    } == {
        **{(rank, *name): ms for rank in (0, 1) for name, ms in exchanges.items()},
        (0, "fwd_compute", 0): [2.0, 4.0],
        (0, "fwd_compute", 1): [4.0, 5.0],
        (1, "fwd_compute", 0): [2.0, 3.0],
        (1, "fwd_compute", 1): [3.0, 6.0],
        (0, "bwd_compute", 1): [9.0, 12.0],
        (0, "bwd_compute", 0): [12.0, 13.0],
        (1, "bwd_compute", 1): [9.0, 10.0],
        (1, "bwd_compute", 0): [11.0, 12.0],
    }
    assert {s.batch for s in spans.values()} == {0}
    binding = [(s.phase, s.stage, s.rank, s.ms) for s in found.steps]
    assert binding == [
        ("index_comms", 0, 0, 1.0),
        ("index_comms", 1, 0, 1.0),
        ("fwd_compute", 0, 0, 2.0),
        ("fwd_comms", 0, 0, 3.0),
        ("fwd_comms", 1, 1, 1.0),  # the slowest rank
        ("bwd_comms", 1, 0, 1.0),
        ("bwd_compute", 1, 0, 3.0),
        ("bwd_compute", 0, 0, 1.0),
    ]
    bound = {key for key, span in spans.items() if span.binds}
    kernels = {key for key in bound if key[1].endswith("compute")}
    assert kernels == {(0, "fwd_compute", 0), *((0, "bwd_compute", s) for s in (0, 1))}
    # Both ranks take part in an exchange.
    assert {(r, "fwd_comms", s) for r in (0, 1) for s in (0, 1)} <= bound
    assert not {(r, "bwd_comms", 0) for r in (0, 1)} & bound


def test_the_next_batch_is_labelled() -> None:
    """Its ids travel beside this batch's dense layers."""
    phases = StagePhases.plain(np.array([[[[3.0, 5.0, 1.0, 1.5, 2.0, 0.0]]]]))
    dense = DenseMs(forward=2.0, backward=4.0)
    found = Iteration(find_schedule("train_sparse_dist", dense), dense, phases)
    spans = {span.phase: span for span in found.spans([0])}
    assert spans["index_comms"].batch == 1
    assert (spans["index_comms"].start_ms, spans["index_comms"].end_ms) == (6.0, 9.0)
    assert {s.batch for phase, s in spans.items() if phase != "index_comms"} == {0}


def test_work_is_cut_where_the_iteration_begins() -> None:
    """A rank that is done early looks up the next batch: no collective is left."""
    ranks = [[[0.0, 4.0, 1.0, 1.0, 6.0, 0.0]], [[0.0, 4.0, 1.0, 1.0, 2.0, 0.0]]]
    phases = StagePhases.plain(np.array([ranks]))
    dense = DenseMs(forward=1.0, lookups_first=True)
    found = Iteration(find_schedule("train_sparse_dist", dense), dense, phases)
    assert found.period_ms == pytest.approx(4 + 1 + 1 + 1 + 6)
    early, late = (
        [s for s in found.spans([1]) if s.phase == "fwd_compute" and s.batch == batch]
        for batch in (0, 1)
    )
    assert not early and [(s.start_ms, s.end_ms) for s in late] == [(9.0, 13.0)]


def test_no_work_takes_no_time() -> None:
    phases = StagePhases.plain(np.zeros((1, 2, 1, len(TIMED))))
    found = Iteration(SEQUENTIAL, DenseMs(), phases)
    assert found.period_ms == 0 and not found.steps and not found.spans([0, 1])
