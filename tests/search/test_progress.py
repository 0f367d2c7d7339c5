from __future__ import annotations

import dataclasses
import io
import itertools

import pytest
from rich.console import Console

from tests.builders import make_tables, make_task, search
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.search import progress as module
from torchrec_neuroshard.search.progress import ProgressLine, SearchProgress

HALFWAY = SearchProgress(
    phase="refining", seconds=3.0, seconds_left=17.0, best_ms=12.5, bound_ms=12.0
)


def best_ms(config: SearchConfig, memory: int = 10**9) -> float:
    tables = make_tables([32] * 30, pooling=[1.0 + i for i in range(30)])
    task = make_task(tables, 4, memory=memory)
    return search(task, config).predicted.critical_path_ms


def test_an_observer_sees_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.0)
    seen: list[SearchProgress] = []
    found_ms = best_ms(SearchConfig(progress=seen.append))
    phases = list(dict.fromkeys(p.phase for p in seen))
    assert phases == ["splits", "refining", "bounding", "done"]
    best = [p.best_ms for p in seen]
    assert best == sorted(best, reverse=True)
    assert best[-1] == pytest.approx(found_ms)
    assert 0 < seen[-1].bound_ms <= found_ms
    assert 0 <= seen[-1].gap < 0.2
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(seen))
    assert all(p.seconds_left <= 20.0 for p in seen)


def test_an_observer_changes_nothing_and_reports_are_few() -> None:
    seen: list[SearchProgress] = []
    assert best_ms(SearchConfig(progress=seen.append)) == best_ms(SearchConfig())
    assert len(seen) < 60


def test_a_search_that_fails_is_done() -> None:
    seen: list[SearchProgress] = []
    with pytest.raises(InfeasibleError):
        best_ms(SearchConfig(progress=seen.append), memory=1000)
    assert seen[-1].phase == "done"
    assert seen[-1].gap == float("inf")


def shown(terminal: bool, *reports: SearchProgress) -> str:
    out = io.StringIO()
    line = ProgressLine(Console(file=out, force_terminal=terminal, width=120))
    for report in reports:
        line(report)
    line.close()
    return out.getvalue()


def test_the_line_tells_cost_gap_and_time() -> None:
    text = shown(True, HALFWAY)
    assert "refining, best 12.500 ms" in text
    assert "about 4.2 % above" in text
    assert "3 s, at most 17 left" in text


def test_short_searches_and_files_stay_quiet() -> None:
    assert shown(False, HALFWAY) == ""
    assert shown(True, dataclasses.replace(HALFWAY, seconds=1.0)) == ""
    unknown = dataclasses.replace(HALFWAY, best_ms=float("inf"), bound_ms=0.0)
    assert "best" not in shown(True, unknown)
