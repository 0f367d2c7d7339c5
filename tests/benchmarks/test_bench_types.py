"""The comparison of sharding types, on a task of three tables."""

from __future__ import annotations

import fnmatch
import functools
import json
from pathlib import Path
from typing import Any

import pytest

import bench_search
import bench_types
from tests.builders import ATTACHES_OPTIMIZERS

pytestmark = ATTACHES_OPTIMIZERS

SIZES = ((2_000, 32, 5), (50_000, 64, 1), (300, 16, 20))
SECONDS = 30.0


def make_task(**fields: Any) -> bench_types.Task:
    return bench_types.Task(
        name="tiny",
        tables=bench_types.tables_of(SIZES),
        ranks=2,
        batch_size=64,
        **fields,
    )


@pytest.fixture(scope="module")
def entry() -> dict[str, Any]:
    return bench_types.judge(make_task(), bench_types.FREE, SECONDS)


def row_of(entry: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"name": "tiny", "limits": {bench_types.FREE: entry, **others}}


def test_all_plans_are_priced_and_hold_every_table(entry: dict[str, Any]) -> None:
    plans = entry["torchrec"]
    assert sorted(plans) == ["default", "default, dp", "min 32", "min 32, dp"]
    assert all(plan["ms"] > 0 for plan in plans.values())
    assert bench_types.best_rival(entry)[0] == min(p["ms"] for p in plans.values())
    assert sum(entry["types"].values()) == len(SIZES)
    assert entry["fallback"] is None
    assert entry["bound_ms"] <= entry["ms"]


def test_limits_are_kept_and_only_asked_rivals_plan() -> None:
    found = bench_types.judge(make_task(), "rows", SECONDS)
    assert {kind.split("/")[0] for kind in found["types"]} == {"row_wise"}
    assert "torchrec" not in found
    every = make_task(all_rivals=True, min_partition=32)
    found = bench_types.judge(every, "rows", SECONDS)
    assert sorted(found["torchrec"]) == ["default", "default, dp"]


def test_what_does_not_fit_is_a_result() -> None:
    found = bench_types.judge(make_task(memory_bytes=1, host_bytes=1), "rows", SECONDS)
    assert found["failed"].startswith("no plan")
    text = bench_types.page({}, [row_of(found)])
    assert "| tiny | free | no plan |" in text


def test_a_worse_plan_is_named(entry: dict[str, Any]) -> None:
    best, name = bench_types.best_rival(entry)
    assert bench_types.losses(row_of({**entry, "ms": best})) == []
    (loss,) = bench_types.losses(row_of({**entry, "ms": 1.01 * best}))
    assert f"TorchRec's ({name})" in loss
    less = {k: v for k, v in entry.items() if k != "torchrec"}
    (loss,) = bench_types.losses(row_of(less, columns={**less, "ms": 0.9 * less["ms"]}))
    assert "free: columns" in loss
    fewer = {"as offered": less, "columns": {**less, "ms": 0.9 * less["ms"]}}
    (loss,) = bench_types.losses({"name": "tiny", "limits": fewer})
    assert "as offered: columns" in loss
    (loss,) = bench_types.losses(row_of(less, rows={"failed": "crashed: x"}))
    assert "rows: crashed" in loss


def test_the_tasks_are_the_same_again_and_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Drawing these takes long; that they are the same again is tested where they are.
    drawn = functools.cache(bench_search.make_dlrm_task)
    monkeypatch.setattr(bench_types, "make_dlrm_task", drawn)
    first, second = (list(bench_types.make_tasks(None)) for _ in range(2))
    assert first == second
    assert len({t.name for t in first}) == len(first)
    quick = bench_types.QUICK.split(",")
    assert all(fnmatch.filter([t.name for t in first], pattern) for pattern in quick)


def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_types, "make_tasks", lambda path: [make_task()])
    out = tmp_path / "types"
    command = ["--out", str(out), "--rival-seconds", str(SECONDS), "--resume"]
    command += ["--longer", "1"]
    assert bench_types.main(command) == 0
    first = json.loads(out.with_suffix(".json").read_text())
    assert [r["name"] for r in first["rows"]] == ["tiny"]
    assert {"command", "commit", "date", "hardware", "versions"} <= set(
        first["settings"]
    )
    assert list(first["rows"][0]["limits"]) == list(make_task().limits)
    text = out.with_suffix(".md").read_text()
    assert "| tiny | columns |" in text
    found = first["rows"][0]["limits"][bench_types.FREE]
    (longer,) = found["longer"]
    assert longer["ms"] <= found["ms"]
    share = f"{1 - longer['ms'] / found['ms']:.1%}".replace("%", " %")
    assert f"{longer['ms']:.4g} | {share} |" in text.split("## Longer searches")[1]
    capsys.readouterr()
    assert bench_types.main(command) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.with_suffix(".json").read_text()) == first
