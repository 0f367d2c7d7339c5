from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gate import plan_gate

ROOT = Path(__file__).parents[2]
STORED: plan_gate.Outcomes = json.loads(plan_gate.STORED.read_text())["tasks"]

Change = Callable[[dict[str, Any]], Any]


@pytest.mark.slow
def test_plans_and_predictions_are_the_stored_ones() -> None:
    # A process of its own, since its clock is slowed down; another order of hashes.
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gate.plan_gate"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-5_000:]


def test_every_sharding_type_and_kernel_is_planned() -> None:
    tables = [
        table
        for task in STORED.values()
        for record in task.values()
        for table in record.get("plan", {}).values()
    ]
    assert {t.get("sharding_type") for t in tables} >= {
        "table_wise",
        "column_wise",
        "table_column_wise",
        "row_wise",
        "table_row_wise",
        "grid_shard",
        "data_parallel",
    }
    assert {t.get("compute_kernel") for t in tables} >= {
        "fused",
        "fused_uvm",
        "fused_uvm_caching",
        "dense",
    }
    assert {r["fallback"] for r in STORED["fallback"].values()} == {True}


def changed(change: Change) -> tuple[plan_gate.Outcomes, plan_gate.Outcomes]:
    """One stored plan and the same after a change."""
    old = {"mlperf": {"cpu": STORED["mlperf"]["cpu"]}}
    new = copy.deepcopy(old)
    change(new["mlperf"]["cpu"])
    return old, new


def other_ranks(record: dict[str, Any]) -> None:
    record["plan"]["t0"]["ranks"] = [99]


def slower(factor: float) -> Change:
    def change(record: dict[str, Any]) -> None:
        record["critical_path_ms"] *= factor

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (other_ranks, r"mlperf, cpu: plan.t0.ranks.*99"),
        (slower(1 + 1e-8), r"critical_path_ms: \d+\.\d+ -> \d+\.\d+ \(\+1\.00e-08\)"),
        (slower(1.5), r"critical path .* ms \(\+50\.0000%\)"),
        (lambda r: r.pop("lower_bound_ms"), r"lower_bound_ms: \d.* -> gone"),
        (lambda r: r.update(more=1), r"more: none -> 1"),
        (lambda r: r["stages"].pop(), r"stages: .* -> \[\]"),
    ],
)
def test_any_change_is_found_on_the_same_machine(change: Change, expected: str) -> None:
    found = "\n".join(plan_gate.compare(*changed(change), exact=True))
    assert re.search(expected, found), found
    assert "note: " not in found


def test_nothing_is_found_where_nothing_changed() -> None:
    assert not list(plan_gate.compare(STORED, copy.deepcopy(STORED), exact=True))
    almost = changed(slower(1 + 1e-12))
    assert not list(plan_gate.compare(*almost, exact=True))


def test_a_task_or_variant_more_or_less_is_found() -> None:
    old = {"mlperf": STORED["mlperf"], "kernels": STORED["kernels"]}
    new = {"mlperf": {"cpu": STORED["mlperf"]["cpu"]}, "fallback": STORED["fallback"]}
    found = list(plan_gate.compare(old, new, exact=False))
    assert "mlperf, cuda: stored, but not planned any more" in found
    assert "kernels, asked for: stored, but not planned any more" in found
    assert "fallback, only: planned, but not stored" in found


def test_another_machine_may_find_another_plan_that_costs_the_same() -> None:
    (line,) = plan_gate.compare(*changed(other_ranks), exact=False)
    assert line.startswith("note: mlperf, cpu: another plan, critical path")
    assert not list(plan_gate.compare(*changed(slower(1 + 1e-5)), exact=False))
    assert list(plan_gate.compare(*changed(slower(1 + 2e-4)), exact=False))

    def dearer(record: dict[str, Any]) -> None:
        other_ranks(record)
        slower(1.01)(record)

    (line,) = plan_gate.compare(*changed(dearer), exact=False)
    assert line.startswith("mlperf, cpu: another plan") and "+1.0000%" in line


def test_the_file_is_written_as_it_is_read() -> None:
    stored = json.loads(plan_gate.STORED.read_text())
    text = plan_gate.as_text(stored["machine"], stored["tasks"])
    assert text == plan_gate.STORED.read_text()
