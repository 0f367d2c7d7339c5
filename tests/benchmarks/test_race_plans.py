"""The race of TorchRec's plan and ours, on ranks that talk over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import race_plans
from harness.options import RunError, read_options
from harness.planning import BEST_PRACTICE, OURS
from torchrec_neuroshard.simulator import PHASES

PAIRS, BLOCK, DIM, BATCH = 2, 3, 16, 128
RACERS = (BEST_PRACTICE, OURS)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "num_ranks", [2, pytest.param(1, marks=pytest.mark.nightly)], ids=str
)
def test_both_plans_train_the_same_model(tmp_path: Path, num_ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), race_plans.__file__]
    settings = {
        "device": "cpu",
        "max-rows": 2_000,
        "embedding-dim": DIM,
        "min-partition": 4,
        "batch-size": BATCH,
        "pairs": PAIRS,
        "block-iterations": BLOCK,
    }
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "demo.json").read_text())
    assert ended.stdout.count("wrote demo.json") == 1  # one rank speaks
    assert race_plans.report(results) in ended.stdout
    profile = results["tables"][20]["profile"]
    assert profile["batch_size"] == num_ranks * BATCH  # what all ranks read
    stock, ours = (results["planners"][n] for n in RACERS)
    for one, other in zip(stock["rounds"], ours["rounds"], strict=True):
        # Same weights and batch: equal but for the order of additions. Later, row-wise
        # Adagrad keeps one state per shard, so another split trains a little
        # differently.
        assert one["losses"][0] == pytest.approx(other["losses"][0], abs=1e-6)
        assert one["losses"] == pytest.approx(other["losses"], abs=5e-2)
        assert len(set(one["losses"])) > 1
    assert stock["rounds"][0]["losses"] == stock["rounds"][1]["losses"]  # begun anew
    for entry in (stock, ours):
        for phase in PHASES:
            assert entry["predicted"]["phases_ms"][phase] > 0
            assert entry["judged"][phase]["clock_ms"] > 0
        assert sorted(entry["shards"]) == sorted(t["name"] for t in results["tables"])
        for placed in entry["shards"].values():
            assert sum(s["width"] for s in placed["shards"]) == DIM
    predicted = [e["predicted"]["embedding_ms"] for e in (ours, stock)]
    assert predicted[0] <= predicted[1] * 1.001


def test_times_are_scaled_by_the_speed_of_their_round() -> None:
    rounds = [
        {
            "iteration_ms": [10.0 * slow],
            "embedding_ms": [6.0 * slow],
            "phases_ms": {name: [1.0 * slow] for name in PHASES},
        }
        for slow in (1.0, 2.0, 4.0)
    ]
    judged = race_plans.judge({"rounds": rounds}, [0.5, 0.25, 0.125])
    assert judged["iteration"] == {"measured_ms": 5.0, "clock_ms": 20.0}
    assert judged["embedding"] == {"measured_ms": 3.0, "clock_ms": 12.0}
    assert judged["fwd_comms"] == {"measured_ms": 0.5, "clock_ms": 2.0}


def test_speedup_is_of_plans_of_the_same_round() -> None:
    def rounds(*times: float) -> dict[str, Any]:
        return {"rounds": [{"iteration_ms": [t, t, 100.0]} for t in times]}

    found = race_plans.speedup(
        rounds(2.0, 4.0, 9.0), rounds(1.0, 4.0, 3.0), "iteration_ms"
    )
    assert found == {
        "median": 2.0,
        "low_quartile": 1.5,
        "high_quartile": 2.5,
        "num_pairs": 3,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--embedding-dim", "30"], "got 30"),
        (["--block-iterations", "0"], "got 0"),
        (["--device", "tpu"], "'tpu'"),
    ],
)
def test_settings_are_checked(arguments: list[str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        read_options(race_plans.RaceConfig, arguments, "A race.")


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "start the ranks with 'torchrun"), ({"WORLD_SIZE": "64"}, "64 ranks")],
)
def test_it_says_how_to_start_it(
    given: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", **given}.items():
        monkeypatch.setenv(name, value)
    assert race_plans.main(["--device", "cuda"]) == 2
    assert message in capsys.readouterr().err
