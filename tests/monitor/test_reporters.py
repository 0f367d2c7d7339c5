"""Output of the reporters, read back with the target libraries."""

from __future__ import annotations

import importlib.util
import json
import logging
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.builders import bag_sharders, bags, make_planner
from torchrec_neuroshard import (
    JsonLinesReporter,
    MLflowReporter,
    TensorBoardReporter,
    reporters,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.monitor import MonitorReport
from torchrec_neuroshard.reporters import PlanRecord, Reporter, write_to

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PLAN = PlanRecord(
    phases_ms={"fwd_compute": (1.5, 2.0), "fwd_comms": (0.5, 0.5)},
    used_bytes=(2.0**30, 2.0**31),
    memory_bytes=(2**34, None),
)
SLOWEST, SECOND, UNTIMED = (
    ("fwd_compute", None),
    ("fwd_compute", 1),
    ("fwd_comms", None),
)
REPORT = MonitorReport(
    last_iteration=200,
    iteration_ms=9.0,
    planned={SLOWEST: 2.0, SECOND: 2.0, UNTIMED: 0.5},
    predicted={SLOWEST: 3.0, SECOND: 2.5, UNTIMED: 0.5},
    measured={SLOWEST: 3.25, SECOND: 2.75},
    drifts=(),
)


def test_lines_have_the_fields_that_are_documented(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    JsonLinesReporter(path).write_plan(PLAN)
    JsonLinesReporter(path).write_phases(REPORT.records)  # appends
    plan, whole, *phases = map(json.loads, path.read_text().splitlines())
    assert plan == {
        "record": "plan",
        "plan": "",
        "iteration": 0,
        "phases_ms": {"fwd_compute": [1.5, 2.0], "fwd_comms": [0.5, 0.5]},
        "used_bytes": [2**30, 2**31],
        "memory_bytes": [2**34, None],
        "unit": "ms",
    }
    assert whole["phase"] == "iteration" and whole["measured_ms"] == 9.0
    assert whole["planned_ms"] is whole["predicted_ms"] is None
    assert [p["measured_ms"] for p in phases] == [3.25, 2.75, None]
    assert phases[1] == {
        "record": "phase",
        "iteration": 200,
        "rank": 1,
        "phase": "fwd_compute",
        "planned_ms": 2.0,
        "predicted_ms": 2.5,
        "measured_ms": 2.75,
        "unit": "ms",
    }


def test_files_that_cannot_be_written_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write '.*': it is a folder"):
        JsonLinesReporter(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot write '.*lines': no folder"):
        JsonLinesReporter(tmp_path / "none" / "lines")


def test_tensorboard_shows_predicted_beside_measured(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    reporter = TensorBoardReporter(tmp_path)
    assert not [
        *tmp_path.iterdir()
    ]  # only rank 0 writes, but all ranks create reporters
    reporter.write_plan(PLAN)
    reporter.write_phases(REPORT.records)
    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()

    def points(run: str, tag: str) -> list[tuple[int, float]]:
        return [(p.step, p.value) for p in shown.Scalars(run, tag)]

    chart = "fwd_compute_ms/rank_1"
    assert points("planned", chart) == [(0, 2.0), (200, 2.0)]
    assert points("predicted", chart) == [(200, 2.5)]
    assert points("measured", chart) == [(200, 2.75)]
    assert points("planned", "used_gib/rank_1") == [(0, 2.0)]
    measured = shown.Runs()["measured"]["scalars"]
    assert measured == ["iteration_ms/all_ranks", "fwd_compute_ms/all_ranks", chart]
    reporter.close()
    reporter.write_phases(REPORT.records)  # reopens its files
    assert len([*(tmp_path / "measured").iterdir()]) == 2
    reporter.close()


@pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None,
    reason="mlflow brings some forty packages along: not in requirements/dev.txt",
)
def test_mlflow_keeps_each_time_by_its_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri(tmp_path.as_uri())
    client = mlflow.MlflowClient()
    experiment = mlflow.set_experiment("planned").experiment_id
    given = client.create_run(experiment).info.run_id
    reporter = MLflowReporter(given)
    reporter.write_plan(PLAN)
    reporter.write_phases(REPORT.records)

    def points(name: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in client.get_metric_history(given, name)]

    metric = "fwd_compute_ms/rank_1"
    assert points(f"{metric}/planned") == [(0, 2.0), (200, 2.0)]
    assert points(f"{metric}/predicted") == [(200, 2.5)]
    assert points(f"{metric}/measured") == [(200, 2.75)]
    assert points("used_gib/rank_0/planned") == [(0, 1.0)]
    assert not points("fwd_comms_ms/all_ranks/measured")
    # More than MLflow takes at once, to the active run.
    ranks = (1.0,) * 1200
    many = PlanRecord(
        plan="h100", phases_ms={"fwd_compute": ranks}, used_bytes=(), memory_bytes=()
    )
    with mlflow.start_run() as active:
        MLflowReporter().write_plan(many)
    metrics = client.get_run(active.info.run_id).data.metrics
    assert len(metrics) == 1200 and "h100/fwd_compute_ms/rank_1199/planned" in metrics


@pytest.mark.parametrize(
    ("kind", "package"),
    [("TensorBoardReporter", "tensorboard"), ("MLflowReporter", "mlflow")],
)
def test_a_missing_package_is_named_at_once(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules, "tensorboard", "mlflow"]:
        if "tensorboard" in name or name.partition(".")[0] == "mlflow":
            monkeypatch.setitem(sys.modules, name, None)  # cannot be imported
    fresh = runpy.run_path(str(reporters.__file__))
    fresh["JsonLinesReporter"](tmp_path / "phases.jsonl").write_plan(PLAN)
    with pytest.raises(ConfigError, match=f"{kind} needs {package}: pip install"):
        fresh[kind](str(tmp_path))


class Broken(Reporter):
    def write_plan(self, plan: PlanRecord) -> None:
        raise OSError("disk full")

    def write_phases(self, phases: Any) -> None:
        raise OSError("disk full")


def test_a_failing_reporter_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "phases.jsonl"
    given = [Broken(), JsonLinesReporter(path)]

    def write(reporter: Reporter) -> None:
        reporter.write_phases(REPORT.records)

    with pytest.warns(UserWarning) as caught:
        write_to(given, write, "training goes on")
        write_to(given, write, "training goes on")
    [warning] = caught
    text = "Broken is off, training goes on: OSError: disk full"
    assert str(warning.message) == text
    assert len(path.read_text().splitlines()) == 2 * len(REPORT.records)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")  # an error here would make other ranks hang
        write_to([Broken()], write, "training goes on")
    assert caplog.messages == [text]


def test_planners_write_what_their_report_says(tmp_path: Path) -> None:
    """Works through `stats` in any release of TorchRec."""
    path = tmp_path / "plan.jsonl"
    stats = JsonLinesReporter(path).build_stats(None, "h100")
    planner = make_planner(stats=stats)
    planner.plan(bags(), bag_sharders())
    [line] = map(json.loads, path.read_text().splitlines())
    assert line["plan"] == "h100" and line["iteration"] == 0
    ranks = planner.report().ranks
    phases = line["phases_ms"]
    for phase in ("fwd_compute", "bwd_comms", "bwd_compute"):
        predicted = [getattr(rank.costs, phase) for rank in ranks]
        assert phases[phase] == pytest.approx(predicted) and max(predicted) > 0
    both = [rank.costs.index_comms + rank.costs.fwd_comms for rank in ranks]
    assert phases["fwd_comms"] == pytest.approx(both)
    assert line["used_bytes"] == [rank.used_bytes for rank in ranks]
    assert line["memory_bytes"] == [rank.memory_bytes for rank in ranks]
    with pytest.warns(UserWarning, match="Broken is off, planning goes on"):
        make_planner(stats=Broken().build_stats(None, "")).plan(bags(), bag_sharders())
