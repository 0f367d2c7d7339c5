from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from torchrec_neuroshard.report import chrome_trace, write_chrome_trace
from torchrec_neuroshard.simulator import PredictedCosts, RankCosts, StageCosts

PREDICTED = PredictedCosts(
    stages=(
        StageCosts("ebc", (RankCosts(1, 2, 3, 4, 5), RankCosts(1, 5, 3, 4, 2))),
        StageCosts("other", (RankCosts(0, 1, 1, 1, 1), RankCosts(0, 0, 1, 1, 0))),
    )
)


def spans(rank: int, track: int) -> list[tuple[str, float, float]]:
    return [
        (e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3)
        for e in chrome_trace(PREDICTED)["traceEvents"]
        if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, track)
    ]


def test_ranks_start_a_phase_together_and_wait_for_the_slowest() -> None:
    assert spans(0, 0)[:3] == [
        ("index_comms", 0, 1),
        ("fwd_compute", 1, 3),
        ("fwd_comms", 6, 9),
    ]
    assert spans(0, 1)[0] == ("wait in fwd_compute", 3, 6)
    assert spans(1, 0)[1] == ("fwd_compute", 1, 6)


def test_backward_visits_the_stages_in_reverse() -> None:
    stages = [
        e["args"]["stage"]
        for e in chrome_trace(PREDICTED)["traceEvents"]
        if e["ph"] == "X" and e["pid"] == 0 and e["tid"] == 0
    ]
    assert stages == ["ebc"] * 3 + ["other"] * 4 + ["ebc"] * 2


def test_a_rank_does_one_thing_at_a_time_until_the_critical_path() -> None:
    last = 0.0
    for rank in (0, 1):
        busy = sorted((a, b) for t in (0, 1) for _, a, b in spans(rank, t))
        for (_, end), (start, _) in itertools.pairwise(busy):
            assert start == pytest.approx(end)
        last = max(last, busy[-1][1])
    assert last == pytest.approx(PREDICTED.critical_path_ms)


def test_file_is_json_with_its_sources(tmp_path: Path) -> None:
    write_chrome_trace(PREDICTED, tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data["otherData"]["critical_path_ms"] == PREDICTED.critical_path_ms
    names = [e["args"]["name"] for e in data["traceEvents"] if "name" in e["args"]]
    assert names[:1] == ["rank 0"] and "rank 1" in names
