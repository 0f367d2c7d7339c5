"""Plans that are made on a CPU, timed on a GPU and judged on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.builders import load_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def plans() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield load_script(BENCHMARKS / "gpu" / "plans.py")
    sys.path.remove(str(BENCHMARKS))


class Timer:
    """Takes so many seconds a task; the third task does not fit."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.reference_ms = 7.0
        self.asked: list[str] = []

    def __call__(self, *settings: Any) -> Timer:
        return self

    def measure(self, found: Sequence[Any]) -> dict[str, list[str]]:
        self._clock[0] += self._seconds
        [plan] = found
        self.asked.append(plan.name)
        if plan.name == "third":
            raise torch.OutOfMemoryError("no memory")
        return {"kernel": [f"pass of {plan.name}"]}


@pytest.fixture
def timed(
    plans: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Timer, Any]:
    """A timer of 4 seconds a task, and what times four tasks for so many seconds."""
    from planner_comparison import kernels

    clock = [100.0]
    timer = Timer(clock, 4.0)
    monkeypatch.setattr(kernels, "KernelTimer", timer)
    monkeypatch.setattr(plans.time, "monotonic", lambda: clock[0])
    names = ("first", "second", "third", "fourth")
    tasks = [
        (
            SimpleNamespace(name=name),
            {
                "default": {"plan": SimpleNamespace(name=name, rank_bytes=(1, 2))},
                "torchrec": {"plan": None},
            },
        )
        for name in names
    ]
    plans.write(tmp_path / "plans.pkl", {"tasks": tasks})

    def time(seconds: float) -> dict[str, Any]:
        command = ["time", str(tmp_path / "plans.pkl"), "--device", "cpu"]
        command += ["--out", str(tmp_path / "passes.pkl"), "--seconds", str(seconds)]
        options = plans.parse_arguments(command)
        options.run(options)
        return dict(plans.read(tmp_path / "passes.pkl"))

    return timer, time


def test_what_does_not_fit_is_left_out(timed: tuple[Timer, Any]) -> None:
    timer, time = timed
    found = time(1000.0)
    assert timer.asked == ["first", "second", "third", "fourth"]
    assert list(found["passes"]) == ["first", "second", "fourth"]
    assert found["passes"]["second"] == [["pass of second"]]
    assert found["reference_ms"] == 7.0
    assert found["hardware"]["device_type"] == "cpu"


def test_timing_ends_in_time_and_goes_on_with_what_is_left(
    timed: tuple[Timer, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    timer, time = timed
    assert list(time(9.0)["passes"]) == ["first", "second"]
    assert "time is over" in capsys.readouterr().out
    assert list(time(9.0)["passes"]) == ["first", "second", "fourth"]
    assert timer.asked == ["first", "second", "third", "fourth"]


def results() -> dict[str, Any]:
    """Two tasks: we take half of the best practice, predicted a quarter."""

    def planner(measured: float, predicted: float) -> dict[str, Any]:
        return {
            "status": "plan",
            "seconds": 1.0,
            "reason": "",
            **{
                kind: {"critical_path_ms": ms, "kernel_path_ms": ms - 1}
                for kind, ms in (("measured", measured), ("predicted", predicted))
            },
        }

    failed = {"status": "no plan", "seconds": 1.0, "reason": "Too little memory."}
    tasks = [
        {
            "name": name,
            "cluster": "8 x H100",
            "kernel_errors": [-0.1, 0.3],
            "planners": {
                "default": planner(5.0, 4.0),
                "torchrec, best practice": planner(10.0, 16.0),
                "default, again": planner(5.0 * again, 4.0),
                "neuroshard": failed,
            },
        }
        for name, again in (("one", 1.1), ("two", 1 / 1.1))
    ]
    return {
        "hardware": {"device": "NVIDIA H100", "torch": "2.11", "fbgemm": "1.6"},
        "planned": {"command": "make", "commit": "c", "date": "d", "estimate": "h100"},
        "judged": {"command": "judge", "commit": "c", "date": "d"},
        "num_planned": 3,
        "tasks": tasks,
    }


def test_the_page_says_ratios_noise_and_who_has_no_plan(plans: Any) -> None:
    page = plans.report(results())
    rows = {
        row.split("|")[1].strip(): [c.strip() for c in row.split("|")[2:-1]]
        for row in page.splitlines()
        if row.startswith("| `")
    }
    path, kernels = "0.500 (0.500 to 0.500)", "0.444 (0.444 to 0.444)"
    assert rows["`default`"] == [
        *("2 of 2", path, "0.250", "2/0", kernels, "0.200", "0.750")
    ]
    assert rows["`torchrec, best practice`"][1] == "1.000 (1.000 to 1.000)"
    assert rows["`neuroshard`"] == ["0 of 2", *["-"] * 6]
    assert "2 of 3 tasks were timed" in page
    assert "is noise (standard deviation: 9.5% over 2 tasks)" in page
    assert "A kernel's predicted time is off by 20.0% (median of 4)" in page
    assert "`neuroshard` has no plan for two: no plan. Too little memory." in page


@pytest.mark.parametrize(
    ("hardware", "estimate"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("AMD EPYC 7763", "measure")],
)
def test_the_estimate_is_for_the_bundles_card(
    plans: Any, hardware: str, estimate: str
) -> None:
    from torchrec_neuroshard.testing import AnalyticCostModel

    model = AnalyticCostModel()
    model.hardware = hardware
    planning = SimpleNamespace(cost_model=model, device="cuda")
    assert plans.estimate_for(planning) == estimate


def test_tasks_for_a_gpu_keep_its_batch(plans: Any) -> None:
    command = ["make", "--bundle", "h100", "--out", "x", "--num-tasks", "5"]
    options = plans.parse_arguments(command)
    tasks = plans.choose_tasks(options)
    assert len(tasks) == 5
    assert {t.batch_size for t in tasks} == {65_536}
    assert {(t.world_size, t.cluster) for t in tasks} <= {
        (8, "8 x H100"),
        (16, "2 x 8 H100"),
    }
