"""Jobs of the examples train only where the plan fits, whatever stands around them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchrec_neuroshard import cli

pytestmark = pytest.mark.filterwarnings("ignore:no cost model was measured")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/slurm/train.sbatch"
MANIFEST = ROOT / "examples/kubernetes/train.yaml"
SMALL = "name,num_embeddings,embedding_dim\nuser,2000,16\nitem,1000,16\n"
HUGE = "name,num_embeddings,embedding_dim\nuser,2000000000,512\n"
RANKS = 2


class Node:
    """A folder with a table file, and commands that note what they are called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        self.model, self.plan = folder / "tables.csv", folder / "plan.json"
        self.model.write_text(SMALL)
        self.add("scontrol", 'printf "node7\\nnode8\\n"')
        self.add("srun")
        self.gate(0)

    def add(self, name: str, does: str = "") -> None:
        command = self.folder / "bin" / name
        noted = f'printf "%s\\n" "$@" > "{self.folder}/{name}.called"\n'
        command.write_text(f"#!/bin/sh\n{noted}{does}\n")
        command.chmod(0o755)

    def gate(self, code: int) -> None:
        """Let the gate end with a code, as `cli.main` would."""
        self.add("neuroshard", f"exit {code}")

    def called_with(self, name: str) -> list[str] | None:
        noted = self.folder / f"{name}.called"
        return noted.read_text().splitlines() if noted.exists() else None

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        given = {
            "BATCH_SIZE": "64",
            "CARD": "h100",
            "MODEL": str(self.model),
            "PLAN": str(self.plan),
            "SECONDS_TO_PLAN": "0.2",
        }
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PATH": path, **given, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def run_slurm(self) -> subprocess.CompletedProcess[str]:
        return self.run(
            "bash",
            str(SCRIPT),
            "--epochs",
            "2",
            TRAIN="train.py",
            SLURM_JOB_NUM_NODES="1",
            SLURM_GPUS_ON_NODE=str(RANKS),
            SLURM_JOB_ID="17",
            SLURM_JOB_NODELIST="node[7-8]",
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_slurm_trains_where_the_plan_fits(node: Node) -> None:
    ended = node.run_slurm()
    assert ended.returncode == 0, ended.stderr
    gate = node.called_with("neuroshard")
    assert gate is not None and "--rehearse" in gate
    assert cli.main(gate) == 0  # of this model, as the script asks for it
    assert node.plan.exists()
    started = node.called_with("srun")
    assert started is not None
    assert started[1:5] == ["torchrun", "--nnodes", "1", "--nproc-per-node"]
    assert started[5] == str(RANKS) and "node7:29500" in started
    assert started[-3:] == ["train.py", "--epochs", "2"]


def test_slurm_ends_where_no_plan_fits(node: Node) -> None:
    """With the real command, in a process of its own."""
    node.model.write_text(HUGE)
    real = f'exec "{sys.executable}" -W ignore -m torchrec_neuroshard "$@"'
    node.add("neuroshard", real)
    ended = node.run_slurm()
    assert ended.returncode == cli.EXIT_NO_PLAN, ended.stderr
    assert "neuroshard: error: no plan for" in ended.stderr
    assert ended.stderr.endswith("take more ranks or a smaller batch\n")
    assert node.called_with("srun") is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (cli.EXIT_USER_ERROR, "the model or an option cannot be used"),
        (cli.EXIT_BROKEN_ENVIRONMENT, "this node's environment is broken"),
        (cli.EXIT_FAULT, "neuroshard itself failed"),
        (137, "neuroshard itself failed"),
    ],
)
def test_slurm_passes_on_why_it_ends(node: Node, code: int, said: str) -> None:
    node.gate(code)
    ended = node.run_slurm()
    assert ended.returncode == code and said in ended.stderr
    assert node.called_with("srun") is None


def test_slurm_ends_without_the_command(node: Node) -> None:
    (node.folder / "bin/neuroshard").unlink()
    ended = node.run_slurm()
    assert ended.returncode == 127 and "environment is broken" in ended.stderr
    assert node.called_with("srun") is None


def test_kubernetes_gates_the_first_pod(node: Node) -> None:
    service, job = yaml.safe_load_all(MANIFEST.read_text())
    pod = job["spec"]["template"]["spec"]
    [gate], [train] = pod["initContainers"], pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in gate["env"]}
    pods = job["spec"]["parallelism"]
    assert int(environment["RANKS"]) == pods * int(environment["RANKS_PER_NODE"])
    assert train["resources"]["limits"]["nvidia.com/gpu"] == 8
    # Names that must agree.
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr {name}-0.{pod['subdomain']} " in train["args"][0]
    [rule] = job["spec"]["podFailurePolicy"]["rules"]
    codes = rule["onExitCodes"]
    assert codes["containerName"] == gate["name"] and rule["action"] == "FailJob"
    assert codes["values"] == [cli.EXIT_NO_PLAN, cli.EXIT_USER_ERROR]

    def run(index: str) -> int:
        here = {"RANKS": str(RANKS), "RANKS_PER_NODE": str(RANKS)}
        command = [*gate["command"], *gate["args"]]
        ended = node.run(*command, JOB_COMPLETION_INDEX=index, **here)
        return ended.returncode

    node.gate(cli.EXIT_NO_PLAN)
    assert run("1") == 0 and node.called_with("neuroshard") is None
    assert run("0") == cli.EXIT_NO_PLAN
    arguments: Any = node.called_with("neuroshard")
    assert cli.main(arguments) == 0 and node.plan.exists()


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs/job_gate.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE)
    codes = {int(code) for cell in listed for code in cell.split(",")}
    known = {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
    assert codes == {0, *known}
