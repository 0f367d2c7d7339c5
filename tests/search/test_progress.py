from __future__ import annotations

import dataclasses
import io
import itertools
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.builders import make_tables, make_task, search
from torchrec_neuroshard import progress
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.search import progress as module
from torchrec_neuroshard.search.progress import ProgressLine, SearchProgress

HALFWAY = SearchProgress(
    phase="refining", seconds=3.0, seconds_left=17.0, best_ms=12.5, bound_ms=12.0
)


def best_ms(
    progress: Callable[[SearchProgress], None] | None, memory: int = 10**9
) -> float:
    # Within its time, however busy the machine is.
    config = SearchConfig(progress=progress, effort=0.1, time_budget_seconds=600.0)
    tables = make_tables([32] * 30, pooling=[1.0 + i for i in range(30)])
    task = make_task(tables, 4, memory=memory)
    return search(task, config).predicted.critical_path_ms


def test_an_observer_sees_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.0)
    seen: list[SearchProgress] = []
    found_ms = best_ms(seen.append)
    phases = list(dict.fromkeys(p.phase for p in seen))
    assert phases == ["splits", "refining", "bounding", "done"]
    best = [p.best_ms for p in seen]
    assert best == sorted(best, reverse=True)
    assert best[-1] == pytest.approx(found_ms)
    assert 0 < seen[-1].bound_ms <= found_ms
    assert 0 <= seen[-1].gap < 0.2
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(seen))
    assert all(p.seconds_left <= 600.0 for p in seen)


def test_an_observer_changes_nothing_and_reports_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REPORT_SECONDS", float("inf"))
    seen: list[SearchProgress] = []
    assert best_ms(seen.append) == best_ms(None)
    assert all(a.phase != b.phase for a, b in itertools.pairwise(seen))


def test_a_search_that_fails_is_done() -> None:
    seen: list[SearchProgress] = []
    with pytest.raises(InfeasibleError):
        best_ms(seen.append, memory=1000)
    assert seen[-1].phase == "done"
    assert seen[-1].gap == float("inf")


def shown(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> str:
    """What a line writes while `HALFWAY` is reported."""
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(progress, "TICK_S", 0.001)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    line = ProgressLine()
    line(HALFWAY)
    for _ in range(1000 if terminal else 20):
        if "neuroshard: " in out.getvalue():
            break
        time.sleep(0.01)
    line(dataclasses.replace(HALFWAY, phase="done"))
    assert not [t for t in threading.enumerate() if "_run" in t.name]
    return out.getvalue()


def test_the_line_tells_cost_gap_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(monkeypatch, True)
    assert "planning: refining, best 12.500 ms" in text
    assert "gap 4.2%, at most 17 s left, " in text
    assert text.endswith("\r\x1b[K")


def test_a_search_outside_of_commands_writes_into_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown(monkeypatch, False) == ""
