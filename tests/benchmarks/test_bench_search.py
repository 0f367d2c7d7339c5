"""The comparison of planners by predicted costs, on a task of three tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bench_search
from tests.builders import ATTACHES_OPTIMIZERS

pytestmark = ATTACHES_OPTIMIZERS

TASK = bench_search.Task(
    family="tiny",
    label="0",
    tables=bench_search.tables_of([(2_000, 32, 5), (50_000, 64, 1), (300, 16, 20)]),
    ranks=2,
    batch_size=64,
)


@pytest.mark.parametrize("method", ["ours, rows", "torchrec, min 32, dp"])
def test_every_method_places_every_table(method: str) -> None:
    found = bench_search.measure(TASK, method, 60.0)
    assert sum(found["types"].values()) == len(TASK.tables)
    assert found["ms"] > 0
    if method in bench_search.OURS:
        assert {kind.split("/")[0] for kind in found["types"]} == {"row_wise"}
        assert found["bound_ms"] <= found["ms"]


def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(bench_search, "make_tasks", lambda path: [TASK])
    command = ["--out", str(tmp_path / "first"), "--methods", "ours"]
    bench_search.main(command)
    data = json.loads((tmp_path / "first.json").read_text())
    assert {"command", "commit", "date", "hardware", "versions"} <= set(
        data["settings"]
    )
    [found] = data["rows"]
    before = ["--before", str(tmp_path / "first.json")]
    monkeypatch.setattr(bench_search, "execute", lambda *_: found)
    bench_search.main([*command, *before])
    page = (tmp_path / "first.md").read_text()
    assert f"| tiny-0/cpu | ours | {found['ms']:.4g} | 1.0000 |" in page
    assert "geometric mean of 1: 1.0000" in page


def test_seconds_are_compared_with_torchrecs_by_family() -> None:
    seconds = {"torchrec": (0.05, 0.08, 2.0), "ours": (0.1, 0.08, 0.5)}
    known = {
        (method, f"t{n}"): {"family": "random", "seconds": value}
        for method, values in seconds.items()
        for n, value in enumerate(values)
    }
    found = bench_search.seconds_over_torchrec(known)
    assert "| random | below 0.1 s | 2 | 0.065 | 0.090 | 1.50 | 1.00 to 2.00 |" in found
    assert "| random | at least 0.1 s | 1 | 2.000 | 0.500 | 0.25 | " in found
    only_ours = {key: row for key, row in known.items() if key[0] == "ours"}
    assert not bench_search.seconds_over_torchrec(only_ours)
