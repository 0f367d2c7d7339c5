from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Callable

import pytest

from tests.builders import make_tables, make_task, search
from torchrec_neuroshard import progress
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.search.default import telling


def best_ms(observer: Callable[[float], None] | None) -> float:
    # The budget is long enough for a busy machine.
    config = SearchConfig(progress=observer, effort=0.1, time_budget_seconds=600.0)
    tables = make_tables([32] * 30, pooling=[1.0 + i for i in range(30)])
    return search(make_task(tables, 4), config).predicted.critical_path_ms


def test_an_observer_sees_better_plans_and_changes_nothing() -> None:
    seen: list[float] = []
    found_ms = best_ms(seen.append)
    assert all(later < earlier for earlier, later in itertools.pairwise(seen))
    assert seen[-1] == pytest.approx(found_ms)
    assert best_ms(None) == found_ms


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_the_best_plan(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(progress, "TICK_S", 0.001)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with telling(None) as tell:
        tell(12.5)
        tell(13.0)
        for _ in range(1000 if terminal else 20):
            if "best 12.500 ms" in out.getvalue():
                break
            time.sleep(0.01)
    assert ("planning, best 12.500 ms" in out.getvalue()) == terminal
    assert "13.000" not in out.getvalue()
