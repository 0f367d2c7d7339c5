"""The comparison of planners on several ranks, on two that talk over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.builders import load_script

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "torchrun_multi_gpu.py"
PLANNERS = ["ours", "torchrec-best", "torchrec"]


@dataclass(frozen=True)
class Run:
    returncode: int
    stdout: str
    stderr: str


def launch(out: Path, *options: str, num_ranks: int = 2) -> Run:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), str(SCRIPT), "--quick"]
    command += ["--backend", "gloo", "--cost-model", "cpu_epyc", "--out", str(out)]
    command += ["--workloads", "dlrm", "--rounds", "1", "--num-tables", "5"]
    command += ["--planners", ",".join(PLANNERS), *options]
    ended = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return Run(ended.returncode, ended.stdout, ended.stderr)


def read(out: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    return data


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("multi") / "run"
    ended = launch(path)
    assert ended.returncode == 0, ended.stderr
    return path


def test_every_plan_is_predicted_trained_and_told(out: Path) -> None:
    data = read(out)
    planners = data["workloads"]["dlrm"]["planners"]
    assert list(planners) == PLANNERS
    total = data["workloads"]["dlrm"]["table_gib"]
    for entry in planners.values():
        (trained,) = entry["rounds"]
        assert entry["predicted"]["embedding_ms"] > 0
        assert len(trained["iteration_ms"]) == data["config"]["iterations"]
        assert len(trained["embedding_ms"]) == data["config"]["phase_iterations"]
        for name, values in trained["phases_ms"].items():
            assert min(values) > 0, name
        # Replicas are held by all ranks, other tables once; state is not counted.
        assert sum(trained["weight_bytes"]) > 0.8 * total * 2**30
    text = out.with_suffix(".md").read_text()
    assert "A dry run on CPUs" in text
    for name in PLANNERS:
        assert text.count(f"| `{name}` |") == 2
    assert out.with_suffix(".svg").read_text().startswith("<?xml")


def test_no_plan_changes_what_is_learnt(out: Path) -> None:
    planners = read(out)["workloads"]["dlrm"]["planners"]
    losses = [entry["rounds"][0]["losses"] for entry in planners.values()]
    assert len(set(losses[0])) > 1  # it learns
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_same_command_goes_on_and_a_bad_plan_does_not_end_it(out: Path) -> None:
    data = read(out)
    planners = data["workloads"]["dlrm"]["planners"]
    kept = planners["ours"]["rounds"]
    planners["torchrec"].update(rounds=[], unfinished=2)
    planners["torchrec-best"].update(rounds=[])
    out.with_suffix(".json").write_text(json.dumps(data))
    plan = out.with_name(f"{out.name}_plans") / planners["torchrec-best"]["plan"]
    plan.write_text("{")

    ended = launch(out)
    assert ended.returncode == 0, ended.stderr
    again = read(out)
    planners = again["workloads"]["dlrm"]["planners"]
    assert again["num_starts"] == 2
    assert planners["ours"]["rounds"] == kept
    assert planners["torchrec"]["failed"] == "training: it ended the run 2 times"
    assert planners["torchrec-best"]["failed"].startswith("training: PlanFileError")
    text = out.with_suffix(".md").read_text()
    assert "| `torchrec` | training: it ended the run 2 times |" in text


class OneRank:
    """Rank 0, alone."""

    rank = 0

    def on_first(self, work: Callable[[], Any]) -> Any:
        return work()


def test_results_of_another_run_are_refused(out: Path) -> None:
    script = load_script(SCRIPT)
    before = out.with_suffix(".json").read_bytes()
    config = script.RunConfig(out=str(out))
    data = read(out)
    with pytest.raises(script.RunError, match="is of a run with another config;"):
        script.Results(config, OneRank(), {**data, "config": {"batch_size": 1}})
    assert out.with_suffix(".json").read_bytes() == before
    assert script.Results(config, OneRank(), data).data["num_starts"] > 1
