"""Schedules: what is hidden, by hand; identities; what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from torchrec_neuroshard.costs.passes import TIMED, StagePhases
from torchrec_neuroshard.costs.schedules import (
    DENSE,
    SCHEDULES,
    SEQUENTIAL,
    DenseMs,
    find_schedule,
)
from torchrec_neuroshard.costs.simulator import PredictedCosts, RankCosts, StageCosts
from torchrec_neuroshard.errors import ConfigError

LAYERS = DenseMs(forward=2.0, backward=4.0, optimizer=1.0)
RANKS = (RankCosts(3.0, 5.0, 1.0, 1.5, 2.0), RankCosts(3.0, 1.0, 1.0, 1.5, 7.0))
"""Index, forward, its collective, backward's collective, backward [ms]."""


def costs(name: str, dense: DenseMs = LAYERS, *ranks: RankCosts) -> PredictedCosts:
    return PredictedCosts(
        stages=(StageCosts("ebc", ranks or RANKS),),
        schedule=find_schedule(name, dense),
        dense=dense,
    )


@pytest.mark.parametrize(
    ("name", "dense", "expected_ms"),
    [
        # All of it: 3 + 5 + 1 + 1.5 + 7 and 7 of other layers.
        ("none", LAYERS, 24.5),
        ("train_base", LAYERS, 24.5),
        # The index of the next batch runs beside 6 ms of other layers.
        ("train_sparse_dist", LAYERS, 21.5),
        # Of 3 ms, one is left.
        ("train_sparse_dist", DenseMs(forward=2.0), 17.5),
        # Nothing to run beside.
        ("train_sparse_dist", DenseMs(), 17.5),
        # Before the forward collective already: beside the lookups, too.
        ("train_prefetch_sparse_dist", LAYERS, 21.5),
        # Both collectives beside 4 ms; no rank waits between update and lookups.
        ("train_semi_sync", LAYERS, 8.0 + 1.5 + 7.0),
        # As sparse_dist, but the optimizer runs beside the lookups.
        ("train_fused_sparse_dist", LAYERS, 8.0 + 1.0 + 1.5 + 6.0),
    ],
)
def test_paths_by_hand(name: str, dense: DenseMs, expected_ms: float) -> None:
    assert costs(name, dense).critical_path_ms == pytest.approx(expected_ms)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("lookups_first", [False, True])
def test_parts_add_up_to_the_path(name: str, lookups_first: bool) -> None:
    rng = np.random.default_rng(0)
    for trial in range(30):
        times = rng.exponential(2.0, size=(2, 3, 6))
        times[..., 5] = 0.5 * times[..., 1]  # loading is a part of the lookups
        stages = tuple(
            StageCosts("ebc", tuple(RankCosts(*phases) for phases in ranks.tolist()))
            for ranks in times[: 1 + trial % 2]
        )
        layers = dict(zip(DENSE, rng.exponential(1.0 + trial % 3, 6), strict=True))
        dense = DenseMs(**layers, lookups_first=lookups_first)
        schedule = find_schedule(name, dense)
        found = PredictedCosts(stages=stages, schedule=schedule, dense=dense)
        assert sum(found.parts_ms.values()) == pytest.approx(found.critical_path_ms)
        assert min(found.parts_ms.values()) >= 0
    nothing = PredictedCosts(stages=(), schedule=schedule, dense=LAYERS)
    assert sum(nothing.parts_ms.values()) == nothing.critical_path_ms == 7.0


def test_parts_by_hand() -> None:
    layers = DenseMs(forward=2.0, backward=5.0, optimizer=1.0)
    parts = costs("train_semi_sync", layers).parts_ms
    # Rank 1 takes longest from an update to the end of the next lookups.
    assert {name: ms for name, ms in parts.items() if ms} == {
        **{"fwd_compute": 1.0, "bwd_comms": 1.5, "bwd_compute": 7.0},
        "dense": 8.0,
    }


def test_backward_collectives_run_beside_lower_layers() -> None:
    lower = DenseMs(
        forward=1.0, lower_forward=0.4, lower_backward=9.0, lookups_first=True
    )
    # Lookups first: 0.4 beside the forward collective, 1.5 beside 9 ms.
    assert costs("none", lower).critical_path_ms == pytest.approx(
        3.0 + 5.0 + 1.0 + 1.0 + 9.0 + 7.0
    )
    after = DenseMs(forward=1.0, lower_forward=0.4, lower_backward=9.0)
    assert costs("none", after).critical_path_ms == pytest.approx(17.5 + 10.4)


def test_caches_are_loaded_ahead_only_where_the_pipeline_does_so() -> None:
    ranks = [RankCosts(0.5, 6.0, 1.0, 1.5, 2.0, cache=4.0)]
    plain = costs("train_sparse_dist", LAYERS, *ranks)
    ahead = costs("train_prefetch_sparse_dist", LAYERS, *ranks)
    assert plain.critical_path_ms - ahead.critical_path_ms == pytest.approx(4.0)
    assert ahead.hidden_ms(ahead.schedule)["cache"] == pytest.approx(4.0)


def test_no_pipeline_is_slower_than_one_phase_after_another() -> None:
    rng = np.random.default_rng(2)
    found = StagePhases.plain(rng.exponential(size=(200, 4, 3, len(TIMED))))
    for lookups_first in (False, True):
        dense = DenseMs(
            **dict(zip(DENSE, rng.exponential(size=len(DENSE)), strict=True)),
            lookups_first=lookups_first,
        )
        longest = SEQUENTIAL.path_ms(found, dense)
        for name in SCHEDULES:
            path = find_schedule(name, dense).path_ms(found, dense)
            assert (path <= longest + 1e-9).all()


def test_the_docs_show_the_graph() -> None:
    page = Path(__file__).parents[2] / "docs" / "pipelines.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    for name, rows in SCHEDULES.items():
        for lookups, schedule in zip(("last", "first"), rows, strict=True):
            streams = "<br>".join(f"`{text}`" for text in schedule.streams)
            waits = "<br>".join(f"`{text}`" for text in schedule.waits) or "–"
            line = f"| `{name}` | {lookups} | {streams} | {waits} |"
            assert line in lines or name == "train_base"


def test_what_is_no_time_or_pipeline_is_refused() -> None:
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"dense_ms: optimizer must be a finite"):
            DenseMs(optimizer=wrong)
        with pytest.raises(ConfigError, match=f"got {wrong}"):
            DenseMs.of(wrong)
    assert DenseMs.of(6.0) == DenseMs(forward=2.0, backward=4.0)
    with pytest.raises(ConfigError, match=r"pipeline_type 'sparse_dist' .* known are"):
        find_schedule("sparse_dist", LAYERS)
