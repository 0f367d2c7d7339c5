"""The benchmark of bundles: times of ranks, figures of plans, and a small run."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bench_calibration as bench
from harness.provenance import describe_run
from planner_comparison import kernels
from planner_comparison.tasks import make_tasks
from tests.builders import ATTACHES_OPTIMIZERS
from torchrec_neuroshard.measure.clock import Reference

pytestmark = ATTACHES_OPTIMIZERS

FIRST, SECOND = bench.TORCHREC


def task_of(
    again_ms: list[float], **plans: tuple[list[float], list[float]]
) -> dict[str, Any]:
    """Return a task's results from the measured and predicted times of each plan."""
    entries = {
        name.replace("_", " "): {"measured_ms": measured, "predicted_ms": {"a": told}}
        for name, (measured, told) in plans.items()
    }
    entries[FIRST] = entries.pop("first")
    entries[SECOND] = entries.pop("second")
    return {"group": "g", "again_ms": again_ms, "plans": entries}


def test_errors_are_among_ranks_and_noise_is_that_of_one_timing() -> None:
    # The level, 2, does not count.
    plan = ([2.2, 2.0, 2.0, 1.8], [1.0, 1.0, 1.0, 1.0])
    again = [2.2, 2.0, 2.0 * math.exp(0.02), 1.8 * math.exp(-0.02)]
    task = task_of(again, a=plan, first=plan, second=plan)
    errors = bench.errors(task["plans"]["a"], "a")
    assert errors.mean() == pytest.approx(0.0)
    assert bench.pooled_sd([errors]) == pytest.approx(
        np.log([1.1, 1.0, 1.0, 0.9]).std(ddof=1)
    )
    noise = bench.noise_sd([task, task])
    assert noise == pytest.approx(math.sqrt(2 * 0.02**2 / 3 / 2))
    # Two plans with other means: the deviation is within each.
    other = {"measured_ms": [5.0, 5.0], "predicted_ms": {"a": [1.0, 1.0]}}
    assert bench.pooled_sd([errors, bench.errors(other, "a")]) == pytest.approx(
        math.sqrt(float(errors @ errors) / 4)
    )


def test_the_shorter_of_torchrecs_plans_counts_and_losses_are_counted() -> None:
    ours, long, short = (
        ([10.3, 2.0], [9.0, 2.0]),
        ([20.0, 1.0],) * 2,
        ([10.0, 9.0],) * 2,
    )
    lost = task_of(ours[0], a=ours, first=long, second=short)
    won = task_of(ours[0], a=ours, first=long, second=long)
    assert bench.over_torchrec(lost, "a") == pytest.approx(1.03)
    assert bench.over_torchrec(won, "a") == pytest.approx(0.515)
    assert math.isnan(bench.over_torchrec(won, "b"))
    data = {"reference_ms": 2.0, "bundles": {"a": {"reference_ms": 1.0}}}
    level = task_of(ours[0], a=ours, first=ours, second=long)
    level["plans"][FIRST] = {**level["plans"][FIRST], "measured_ms": [10.2, 2.0]}
    assert 1 < bench.over_torchrec(level, "a") < bench.LOST
    row = bench._row(data, [lost, won, level], "a")
    assert row[-1] == "1" and row[-2] == "0.515, 1.030"
    # 9 of 10.3 ms, on a machine whose reference takes twice as long.
    assert row[5] == f"{2 * 9.0 / 10.3:.3f} (0.0%)"


def test_the_command_is_kept_without_folders(monkeypatch: Any) -> None:
    given = ["run.py", "--out", "/home/me/out", "mine=/home/me/bundle", "a=b", "x/y"]
    monkeypatch.setattr("sys.argv", given)
    assert describe_run()["command"] == "python run.py --out out mine=bundle a=b x/y"


def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: Any) -> None:
    def small_tasks(path: Path | None, settings: Any) -> Any:
        return make_tasks(path, dataclasses.replace(settings, quick=True))

    monkeypatch.setattr(bench, "make_tasks", small_tasks)
    monkeypatch.setattr(kernels, "_COPIED_BYTES", 2**16)
    monkeypatch.setattr(Reference, "BATCH_SIZE", 8)
    out = tmp_path / "run"
    command = [
        "--out",
        str(out),
        "--bundles",
        "one=cpu",
        "two=cpu",
        "zen5=cpu_epyc_zen5",
    ]
    command += ["--max-rows", "1000", "--batch-sizes", "64", "--rounds", "2", "--quick"]
    bench.main(command)
    text = out.with_suffix(".json").read_text(encoding="utf-8")
    data = json.loads(text)
    assert {"command", "commit", "date", "hardware", "versions"} <= data["run"].keys()
    [task] = data["tasks"]
    assert task["plans"].keys() == {"one", "two", "zen5", *bench.TORCHREC}
    for plan in task["plans"].values():
        ranks = len(plan["measured_ms"])
        assert ranks == task["world_size"] == len(plan["traits"])
        assert min(plan["measured_ms"]) > 0
        told = plan["predicted_ms"]
        assert told["one"] == told["two"] != told["zen5"]
        assert len(told["one"]) == ranks
    # Equal kernels are timed once, and a plan timed again is timed anew.
    assert task["plans"]["one"] == task["plans"]["two"]
    assert task["again_ms"] != task["plans"]["one"]["measured_ms"]
    page = out.with_suffix(".md").read_text(encoding="utf-8")
    assert "| one, all | 1 |" in page and "| two, seed 0, batch 64 | 1 |" in page
    assert str(tmp_path) not in text + page
    with pytest.raises(SystemExit):  # results are not written over
        bench.main(command)
