from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
