"""What reporters write."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.builders import bag_sharders, bags, make_planner
from torchrec_neuroshard import JsonLinesReporter
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.monitor import MonitorReport
from torchrec_neuroshard.reporters import PlanRecord, Reporter, write_to

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


def test_scalars_are_the_known_times_by_name() -> None:
    assert PLAN.scalars["fwd_compute_ms/rank_1"] == 2.0
    assert PLAN.scalars["used_gib/rank_1"] == 2.0
    found = {phase.name: phase.scalars for phase in REPORT.records}
    assert found["iteration_ms/all_ranks"] == {"measured": 9.0}
    assert found["fwd_compute_ms/rank_1"] == {
        "planned": 2.0,
        "predicted": 2.5,
        "measured": 2.75,
    }
    assert found["fwd_comms_ms/all_ranks"] == {"planned": 0.5, "predicted": 0.5}


def test_files_that_cannot_be_written_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write '.*': it is a folder"):
        JsonLinesReporter(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot write '.*lines': no folder"):
        JsonLinesReporter(tmp_path / "none" / "lines")


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
