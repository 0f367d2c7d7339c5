"""The race of TorchRec's plan and ours, on ranks that talk over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import race_plans
from harness.options import RunError, read_options
from harness.planning import BEST_PRACTICE, OURS
from torchrec_neuroshard.simulator import PHASES

SCRIPT = Path(race_plans.__file__)
PAIRS, BLOCK, DIM, BATCH = 2, 3, 16, 128
RACERS = (BEST_PRACTICE, OURS)


@dataclass(frozen=True)
class Race:
    results: dict[str, Any]
    stdout: str


def run_race(folder: Path, num_ranks: int) -> Race:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), str(SCRIPT)]
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
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return Race(json.loads((folder / "demo.json").read_text()), ended.stdout)


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Race:
    return run_race(tmp_path_factory.mktemp("race"), 2)


@pytest.mark.distributed
def test_one_rank_is_enough(tmp_path: Path) -> None:
    results = run_race(tmp_path, 1).results
    for name in RACERS:
        shards = results["planners"][name]["shards"]
        assert {s["rank"] for e in shards.values() for s in e["shards"]} == {0}
        (held,) = results["planners"][name]["rounds"][0]["weight_bytes"]
        assert held == 4 * DIM * sum(t["num_embeddings"] for t in results["tables"])
    assert results["world_size"] == 1
    assert results["all_to_all_gb_per_s"] > 0


@pytest.mark.distributed
def test_both_plans_train_the_same_model(race: Race) -> None:
    stock, ours = (race.results["planners"][n]["rounds"] for n in RACERS)
    assert len(stock) == len(ours) == PAIRS
    for one, other in zip(stock, ours, strict=True):
        # Same weights and batch: equal but for the order of additions. Later, row-wise
        # Adagrad keeps one state per shard, so another split trains a little
        # differently.
        assert one["losses"][0] == pytest.approx(other["losses"][0], abs=1e-6)
        assert one["losses"] == pytest.approx(other["losses"], abs=5e-2)
        assert len(set(one["losses"])) > 1
    assert stock[0]["losses"] == stock[1]["losses"]  # each round begins anew


@pytest.mark.distributed
@pytest.mark.parametrize("name", RACERS)
def test_plans_place_every_column_once(race: Race, name: str) -> None:
    shards = race.results["planners"][name]["shards"]
    assert sorted(shards) == sorted(t["name"] for t in race.results["tables"])
    for entry in shards.values():
        assert entry["sharding_type"] in ("table_wise", "column_wise")
        columns = [
            column
            for s in sorted(entry["shards"], key=lambda s: s["offset"])
            for column in range(s["offset"], s["offset"] + s["width"])
        ]
        assert columns == list(range(DIM))


@pytest.mark.distributed
def test_every_phase_is_predicted_and_measured(race: Race) -> None:
    for name in RACERS:
        entry = race.results["planners"][name]
        assert set(entry["predicted"]["phases_ms"]) == set(PHASES)
        assert set(entry["judged"]) == {*PHASES, "embedding", "iteration"}
        for phase in PHASES:
            assert entry["predicted"]["phases_ms"][phase] > 0
            assert entry["judged"][phase]["clock_ms"] > 0
        for trained in entry["rounds"]:
            assert len(trained["iteration_ms"]) == BLOCK
    stock, ours = (race.results["planners"][n]["predicted"] for n in RACERS)
    assert ours["embedding_ms"] <= stock["embedding_ms"] * 1.001


@pytest.mark.distributed
def test_what_is_printed_is_what_is_written(race: Race) -> None:
    assert race.stdout.count("wrote demo.json") == 1  # one rank speaks
    assert race_plans.report(race.results) in race.stdout
    profile = race.results["tables"][20]["profile"]
    assert profile["batch_size"] == 2 * BATCH  # what both ranks read in one iteration
    assert profile["num_lookups"] == 100 * 2 * BATCH


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
        (["--embedding-dim", "30"], "must be a multiple of 4.*got 30"),
        (["--block-iterations", "0"], "--block-iterations must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--all-to-all-gb-per-s", "-1"], "at least 0, got -1.0"),
        (["--device", "tpu"], "auto, cpu or cuda, not 'tpu'"),
    ],
)
def test_settings_are_checked(arguments: list[str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        read_options(race_plans.RaceConfig, arguments, "A race.")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_it_says_how_to_start_it(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert race_plans.main([]) == 2
    assert "start the ranks with 'torchrun" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() >= 64, reason="has the GPUs")
def test_more_ranks_than_gpus_are_refused(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "64")):
        alone.setenv(name, value)
    assert race_plans.main(["--device", "cuda"]) == 2
    assert "64 ranks on this machine need as many GPUs" in capsys.readouterr().err
