"""How the times of several ranks are combined; see also tests/distributed."""

from __future__ import annotations

import pytest

from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.phase_timer import (
    PhaseTimes,
    critical_times,
    embedding_ms,
)

Spans = list[tuple[float, float]]


def rank(
    index: Spans, forward: Spans, out: Spans, back: Spans, backward: Spans
) -> list[PhaseTimes]:
    """Return one module's phases on one rank [ms]."""
    phases = zip(PHASES, (index, forward, out, back, backward), strict=True)
    seconds = {name: [(a / 1e3, b / 1e3) for a, b in spans] for name, spans in phases}
    return [PhaseTimes("ebc", seconds)]


EARLY = rank([(0, 5)], [(5, 6), (6, 7)], [(7, 14)], [(30, 36)], [(36, 40)])
LATE = rank([(2, 5)], [(5, 12)], [(12, 15)], [(33, 36)], [(36, 37)])
EMPTY = rank([(1, 5)], [], [(5, 15)], [(31, 36)], [])


def test_collectives_count_from_the_last_arrival_and_compute_on_the_slowest() -> None:
    (found,) = critical_times([EARLY, LATE, EMPTY])
    assert found == pytest.approx(
        {
            "index_comms": 3,
            "fwd_compute": 7,
            "fwd_comms": 3,
            "bwd_comms": 3,
            "bwd_compute": 4,
        }
    )
    # Without a common clock, the rank that arrives last has the shortest time.
    (other,) = critical_times([EARLY, elsewhere(LATE), EMPTY])
    assert other == pytest.approx(found)


def later(times: list[PhaseTimes], by_s: float, clock: str = "") -> list[PhaseTimes]:
    """Return the same phases, which run later or on a clock that is ahead."""
    return [
        PhaseTimes(
            t.module,
            {n: [(a + by_s, b + by_s) for a, b in s] for n, s in t.spans.items()},
            clock,
        )
        for t in times
    ]


def elsewhere(times: list[PhaseTimes]) -> list[PhaseTimes]:
    """Return the same times on a clock that is nine seconds ahead."""
    return later(times, 9.0, "another")


def test_embedding_lasts_from_the_last_start_to_the_last_end() -> None:
    # Forward from 2 to 15, backward from 33 to 40.
    assert embedding_ms([EARLY, LATE, EMPTY]) == pytest.approx(13 + 7)
    two = [[*r, *later(r, 0.06)] for r in (EARLY, LATE, EMPTY)]
    assert embedding_ms(two) == pytest.approx(2 * (13 + 7))
    # The second module runs beside the first: from 2 to 20 and from 33 to 45.
    beside = [[*r, *later(r, 0.005)] for r in (EARLY, LATE, EMPTY)]
    assert embedding_ms(beside) == pytest.approx(18 + 12)
    # Without a common clock, the sum of the phases.
    ranks = [EARLY, elsewhere(LATE), EMPTY]
    assert embedding_ms(ranks) == pytest.approx(3 + 7 + 3 + 3 + 4)
