"""`neuroshard train-policy` from tables to a policy that loads, killed on the way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torchrec_neuroshard.baselines.autoshard import AutoShardSearcher
from torchrec_neuroshard.baselines.dreamshard import DreamShardSearcher
from torchrec_neuroshard.baselines.heuristics import GreedySearcher, RandomSearcher
from torchrec_neuroshard.baselines.policies import PolicySearcher, shipped_policy
from torchrec_neuroshard.baselines.policy_cli import PolicyRun
from torchrec_neuroshard.baselines.policy_training import (
    PolicyTaskConfig,
    SimulatedPlans,
    compare,
    sample_policy_tasks,
)
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.cost_models import CommsModel, load_cost_model
from torchrec_neuroshard.cost_models.loading import load_comms_model
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.workloads import generate_dlrm_tables

SEARCHERS: dict[str, type[PolicySearcher]] = {
    "dreamshard": DreamShardSearcher,
    "autoshard": AutoShardSearcher,
}


def options(
    method: str, tables: Path, out: Path, iterations: int, seed: int = 0
) -> list[str]:
    return [
        *("train-policy", "--method", method, "--cost-model", "cpu"),
        *("--tables", str(tables), "--out", str(out), "--seed", str(seed)),
        *("--set", f"iterations={iterations}", "--num-tasks", "8", "--num-test-tasks"),
        *("6", "--num-tables", "20", "30", "--world-sizes", "2", "3"),
        *("--batch-sizes", "512", "--gb-per-s", "50"),
    ]


def same_weights(a: Path, b: Path) -> bool:
    first, second = (load_file(p / "weights.safetensors") for p in (a, b))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_killed_run_goes_on_to_the_same_weights(
    tables_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, whole, other = (tmp_path / name for name in ("killed", "whole", "other"))
    iterations = 4
    command = options("autoshard", tables_file, killed, iterations)
    process = subprocess.Popen(
        [sys.executable, "-m", "torchrec_neuroshard", *command],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (killed / "checkpoint.pt").is_file():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "policy.json").exists()
    assert main(command) == 0
    went_on = re.search(r"went on from iteration (\d+)", capsys.readouterr().out)
    assert went_on is not None and 0 < int(went_on[1]) < iterations
    assert main(options("autoshard", tables_file, whole, iterations)) == 0
    assert "went on" not in capsys.readouterr().out
    assert same_weights(killed, whole)
    assert not (killed / "checkpoint.pt").exists()
    assert main(options("autoshard", tables_file, other, 1, seed=1)) == 0
    assert not same_weights(whole, other)


def test_card_and_description_say_what_was_done(
    tables_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    phases: list[str],
) -> None:
    assert main(options("dreamshard", tables_file, tmp_path, 1)) == 0
    assert phases[1:] == ["training", "judging by other tables"]
    shown = capsys.readouterr().out
    policy = DreamShardSearcher(tmp_path).policy
    assert list(policy.info.ranges["batch_size"]) == [512, 512]
    assert list(policy.info.ranges["world_size"]) == [2, 3]
    assert policy.info.hardware == load_cost_model("cpu").hardware
    assert policy.info.trained_on["num_training_tables"] == 40
    assert policy.info.trained_on["method"]["iterations"] == 1
    card = (tmp_path / "CARD.md").read_text()
    assert "| collectives | 50 GB/s assumed, not measured |" in card
    assert "| iterations | 1 | 10 |" in card
    assert "| cost_updates | 300 | 300 |" in card
    assert "| tables | tables.json |" in card
    for name in ("random", "greedy-size", "greedy-lookup", "greedy-cost"):
        (row,) = re.findall(rf"^\| {name} \| (.*)$", card, re.MULTILINE)
        change = row.split(" | ")[0]
        assert f"against {name}: {change}" in shown


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (["--workload", "x"], "has no workload 'x'; it has w"),
        (["--num-tasks", "0"], "num_tasks and num_test_tasks must be at least 1"),
        (["--num-tables", "30", "41"], "lower num_tables"),
        (["--cost-model", "nowhere"], "unknown cost model 'nowhere'"),
        (["--set", "iterations=0"], "iterations must be at least 1, got 0"),
        (["--set", "momentum=1"], "dreamshard has no setting 'momentum'; it has bat"),
    ],
)
def test_user_errors(
    extra: list[str],
    reason: str,
    tables_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*options("dreamshard", tables_file, tmp_path, 1), *extra]) == 2
    assert reason in capsys.readouterr().err


def test_workload_needs_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train-policy", "--method", "dreamshard", "--out", str(tmp_path)]
    assert main([*command, "--workload", "w"]) == 2
    assert "give --tables too" in capsys.readouterr().err


def test_method_is_checked() -> None:
    with pytest.raises(ConfigError, match="unknown method 'x'; one of autoshard, dre"):
        PolicyRun(method="x", cost_model="cpu")


@pytest.mark.parametrize("method", SEARCHERS)
def test_shipped_policy_beats_the_papers_on_tables_of_another_seed(method: str) -> None:
    folder = shipped_policy(method)
    assert sum(f.stat().st_size for f in folder.iterdir()) < 1_000_000
    searcher, cost_model = SEARCHERS[method](), load_cost_model("cpu_epyc_zen5")
    assert searcher.policy.info.hardware == cost_model.hardware

    def collectives(world_size: int) -> CommsModel:
        found = load_comms_model(
            "cpu_epyc_zen5",
            device_type="cpu",
            world_size=world_size,
            local_world_size=world_size,
        )
        assert found is not None
        return found

    tables = generate_dlrm_tables(seed=99)
    config = PolicyTaskConfig(num_tables=(20, 40), world_sizes=(3, 5))
    tasks = sample_policy_tasks(tables, config, 16)
    others = [RandomSearcher(), GreedySearcher("size-lookup")]
    costs = SimulatedPlans(cost_model, collectives)
    random, greedy = compare(searcher, others, tasks, costs)
    assert random.num_pairs == greedy.num_pairs == 16
    assert random.high < -0.05
    assert greedy.change < -0.03
