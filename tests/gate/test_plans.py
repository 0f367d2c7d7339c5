from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gate import plan_gate

STORED: plan_gate.Outcomes = json.loads(plan_gate.STORED.read_text())["tasks"]

QUICK = (
    "all_sharding_types",
    "kernels",
    "sequence_embeddings",
    "several_modules",
    "placement_rules",
    "replanning",
    "papers_searches",
    "estimates",
    "foreign_enumerators",
    "simulator",
)
"""Tasks that take a fifth of what all take."""


@pytest.mark.parametrize(
    "tasks", [QUICK, pytest.param((), marks=pytest.mark.nightly, id="all")]
)
def test_plans_and_predictions_are_the_stored_ones(tasks: tuple[str, ...]) -> None:
    # A process of its own, since its clock is slowed down; another order of hashes.
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gate.plan_gate", *tasks],
        cwd=root,
        env={
            **os.environ,
            "PYTHONHASHSEED": "4242",
            "PYTHONPATH": f"{root}{os.pathsep}{root / 'benchmarks'}",
        },
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-5_000:]


@pytest.mark.parametrize(
    ("factor", "ranks", "exact", "fails"),
    [
        (1 + 1e-12, None, True, False),
        (1 + 1e-8, None, True, True),
        (1 + 1e-5, None, False, False),
        (1 + 2e-4, None, False, True),
        (1 + 1e-5, [99], False, False),
        (1.01, [99], False, True),
    ],
)
def test_a_changed_plan_is_a_failure(
    factor: float, ranks: list[int] | None, exact: bool, fails: bool
) -> None:
    old = {"mlperf": {"cpu": STORED["mlperf"]["cpu"]}}
    new = copy.deepcopy(old)
    record = new["mlperf"]["cpu"]
    record["critical_path_ms"] *= factor
    if ranks:
        record["plan"]["t0"]["ranks"] = ranks
    found = list(plan_gate.compare(old, new, exact=exact))
    assert any(not line.startswith("note: ") for line in found) == fails
