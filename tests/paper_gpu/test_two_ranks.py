"""Two ranks on paper GPUs, beside two on CPUs: equal losses, memory, restarts."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.paper_gpu.build import LIBRARY
from tests.paper_gpu.journals import replay
from torchrec_neuroshard.schedules import (
    COLLECTIVES,
    DENSE,
    SCHEDULES,
    TIMED,
    DenseMs,
    find_schedule,
)
from torchrec_neuroshard.training.calibrate_cli import source_folder

ROOT = Path(__file__).parents[2]
MULTI_GPU = ROOT / "benchmarks" / "torchrun_multi_gpu.py"
ROUNDING = 1e-6
"""Relative, of losses. Libraries add in another order where memory begins at another
place: to the bit on an AMD EPYC, on an Intel Xeon up to 7e-8 apart."""


def torchrun(script: Path, *options: str, **environment: str) -> str:
    """Run two ranks; what they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), *options]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONHASHSEED": "0", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def read(folder: Path) -> Sequence[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Sequence[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gpus")
    torchrun(ROOT / "tests/paper_gpu/two_ranks.py", str(folder))
    return read(folder)


@pytest.fixture(scope="module")
def cpus(tmp_path_factory: pytest.TempPathFactory) -> Sequence[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cpus")
    torchrun(ROOT / "tests/paper_gpu/two_ranks.py", str(folder), **{LIBRARY: ""})
    return read(folder)


def test_the_example_trains_as_on_cpus(
    gpus: Sequence[dict[str, Any]], cpus: Sequence[dict[str, Any]]
) -> None:
    for rank, (found, expected) in enumerate(zip(gpus, cpus, strict=True)):
        assert found["example"]["device"] == f"cuda:{rank}"
        assert expected["example"]["device"] == "cpu"
        losses = found["example"]["losses"]
        assert losses == pytest.approx(expected["example"]["losses"], rel=ROUNDING)
        assert len(set(losses)) > 1


@pytest.mark.parametrize("plan", ["ours", "theirs", "replanned", "again"])
def test_plans_train_as_on_cpus(
    gpus: Sequence[dict[str, Any]], cpus: Sequence[dict[str, Any]], plan: str
) -> None:
    for found, expected in zip(gpus, cpus, strict=True):
        losses = found["trials"][plan]
        assert losses == pytest.approx(expected["trials"][plan], rel=ROUNDING)
        assert len(set(losses)) > 1


@pytest.mark.parametrize("lookups", ["lookups last", "lookups first"])
@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "none"])
def test_schedules_are_those_of_torchrecs_pipelines(
    gpus: Sequence[dict[str, Any]], name: str, lookups: str
) -> None:
    journals = [found["journals"][f"{name} {lookups}"] for found in gpus]
    rng = random.Random(7)

    def some_ms(phases: Sequence[str]) -> dict[str, float]:
        return {p: rng.choice([0.0, rng.expovariate(0.3)]) for p in phases}

    for _ in range(12):
        common = some_ms([*COLLECTIVES, *DENSE])
        ranks = [some_ms([p for p in TIMED if p not in common]) for _ in journals]
        phase_ms = [{**common, **own} for own in ranks]
        dense = DenseMs(
            **{p: common[p] for p in DENSE}, lookups_first=lookups == "lookups first"
        )
        schedule = find_schedule(name, dense)
        for own in phase_ms:
            own["cache"] *= schedule.prefetches
        phases_CWS6 = np.array([[[[own[p] for p in TIMED]] for own in phase_ms]])
        (path_ms,) = schedule.path_ms(phases_CWS6, dense)
        assert replay(journals, phase_ms) == pytest.approx(path_ms)


def test_planners_race_as_on_cpus(
    gpus: Sequence[dict[str, Any]], cpus: Sequence[dict[str, Any]]
) -> None:
    found, expected = gpus[0]["race"], cpus[0]["race"]
    assert found == expected and len(found) == 2
    assert all(len(set(losses)) > 1 for losses in found.values())


def test_a_failed_trial_gives_its_memory_back(gpus: Sequence[dict[str, Any]]) -> None:
    for found in gpus:
        failed = found["trials"]["failed"]
        assert failed["error"].startswith("rank 1: OutOfMemoryError: CUDA out of mem")
        assert failed["kept_bytes"] <= 0  # earlier garbage may go, too


def test_first_launch_is_remembered_by_the_second(
    gpus: Sequence[dict[str, Any]],
) -> None:
    learned = gpus[0]["learned"]  # the first rank plans
    for launch in ("first", "second"):
        assert learned[launch] == {
            "kernels": "measured",
            "collectives": "measured",
            "warnings": [],
        }


def test_plan_follows_the_inputs_and_losses_stay(
    gpus: Sequence[dict[str, Any]],
) -> None:
    first, second = (found["learned"] for found in gpus)
    for found in (first, second):
        watched = found["watched"]
        assert watched["is_on"] and watched["applied"], watched["reason"]
        assert watched["on_first"] == [2, 1] and watched["moved_bytes"] > 0
        expected = pytest.approx(found["still"]["losses"], rel=ROUNDING)
        assert watched["losses"] == expected
        assert len(set(watched["losses"])) > 1
    assert len(first["watched"]["phases"]) == 5
    assert second["watched"]["phases"] is None


def test_plans_fit_the_memory_that_is_free(tmp_path: Path) -> None:
    out, costs = tmp_path / "run", tmp_path / "costs"
    shutil.copytree(source_folder("cpu_epyc"), costs)
    comms = json.loads((costs / "comms.json").read_text())
    comms["backend"] = "nccl"  # as if measured so: none ships
    (costs / "comms.json").write_text(json.dumps(comms))
    options = ["--quick", "--cost-model", str(costs), "--out", str(out)]
    options += ["--workloads", "dlrm", "--rounds", "1", "--num-tables", "5"]
    options += ["--planners", "ours", "--max-rows", "1000000000"]
    options += ["--memory-share", "0.1"]

    torchrun(MULTI_GPU, *options, PAPER_CUDA_BYTES=str(100 * 2**20))
    data: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    entry = data["workloads"]["dlrm"]["planners"]["ours"]
    assert "failed" not in entry and entry["rounds"][0]["peak_bytes"][0] > 0
