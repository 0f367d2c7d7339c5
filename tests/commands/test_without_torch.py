"""Mistakes are told, and saved plans are shown, without torch and TorchRec."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import bag_sharders, make_ebc, make_planner
from torchrec_neuroshard import save_plan
from torchrec_neuroshard.bundles import cache
from torchrec_neuroshard.bundles.folders import PRETRAINED
from torchrec_neuroshard.cli import COMMANDS, EXIT_BROKEN_ENVIRONMENT

WITHOUT_TORCH = """
import contextlib, io, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchrec", "fbgemm_gpu"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from torchrec_neuroshard.cli import main

found = []
for command in json.load(sys.stdin):
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(command.split())
        except SystemExit as stop:
            code = stop.code
    found.append((code, out.getvalue(), errors.getvalue()))
json.dump(found, sys.stdout)
"""
TABLES = "name,num_embeddings,embedding_dim\nuser,200000,64\nitem,100000,32\n"


Result = tuple[int, str, str]
"""Exit code, output and errors of a command."""


def run(folder: Path, *commands: str) -> list[Result]:
    """Run commands in a process without torch, TorchRec and FBGEMM."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(commands),
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [(code, out, errors) for code, out, errors in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files of tables, two plans, and files that are damaged."""
    found = tmp_path_factory.mktemp("here")
    (found / "t.csv").write_text(TABLES)
    (found / "bad.csv").write_text("name,num_embeddings\nuser,3\n")
    (found / "bad.json").write_text("[1, 2")
    (found / "odd.json").write_text('{"user": {"min_partitions": 3}}')
    (found / "usr.json").write_text('{"usr": {"min_partition": 8}}')
    (found / "pin.json").write_text('{"pin": {"user": [7]}}')
    (found / "empty").mkdir()
    model = make_ebc([(1000, 64), (500, 16)])
    for name, batch_size in (("a.json", 64), ("b.json", 128)):
        planner = make_planner(2, batch_size=batch_size)
        plan = planner.plan(model, bag_sharders())
        save_plan(plan, found / name, model=model, planner=planner)
    return found


def test_help_needs_no_torch(folder: Path) -> None:
    commands = [*(c.name for c in COMMANDS), "collect compute", "collect comms"]
    helps = run(folder, *(f"{command} --help" for command in commands))
    for command, (code, shown, errors) in zip(commands, helps, strict=True):
        assert (code, errors) == (0, ""), command
        assert shown.startswith(f"usage: neuroshard {command} ")


MISTAKES = {
    "plan t.csv --rank 8": "unknown argument '--rank'; did you mean --ranks?",
    "plan t.csv --ranks eight": "'eight' is not a whole number",
    "plan t.csv --search best": "'best' is not one of the searches",
    "plan t.csv --card h10": "unknown card 'h10'; did you mean 'h100'",
    "plan t.csv --ranks 12 --card h100": "12 ranks do not fill whole nodes of 8",
    "plan t.csv --cost-model nix": "unknown cost model 'nix'",
    "plan no.csv": "cannot read 'no.csv': No such file or directory",
    "plan bad.csv": "'embedding_dim' is missing",
    "plan bad.json": "'bad.json' cannot be read as JSON",
    "plan no.py:model": "cannot load 'no.py:model': there is no such file",
    "plan nobody.wrote:it": "ModuleNotFoundError: No module named 'nobody'",
    "plan email.wrote:it": "ModuleNotFoundError: No module named 'email.wrote'",
    "plan t.csv --constraints no.json": "cannot read 'no.json'",
    "plan t.csv --constraints odd.json": "unknown field 'min_partitions'",
    "plan t.csv --constraints usr.json": "names table 'usr', which the model does not",
    "plan t.csv --placement pin.json --ranks 2": "pin['user'] has rank 7, but the 2",
    "plan t.csv --placement odd.json": "unknown field 'user'",
    "plan t.csv --profiles bad.json": "'bad.json' cannot be read as JSON",
    "plan t.csv --out no/plan.json": "cannot write 'no/plan.json': no folder",
    "sweep t.csv --card h100,h10": "unknown card 'h10'",
    "sweep no.csv": "cannot read 'no.csv'",
    "show no.json": "cannot read the plan file 'no.json'",
    "show bad.json": "'bad.json' is not a plan file, or is damaged",
    "diff a.json no.json": "cannot read the plan file 'no.json'",
    "rehearse no.json t.csv": "cannot read the plan file 'no.json'",
    "rehearse a.json no.csv": "cannot read 'no.csv'",
    "reshard empty --to a.json --dry-run": "'empty' holds no checkpoint",
    "reshard empty --to no.json --dry-run": "cannot read the plan file",
    "profile no.parquet --out p.json": "there is no data at no.parquet",
    "calibrate --out t.csv": "cannot write to the folder 't.csv'",
    "calibrate --out new --from nix": "no bundle 'nix' to start from",
    "collect compute --out t.csv/r": "cannot write to the folder 't.csv'",
    "collect compute --out r --tables no.json": "cannot read 'no.json'",
    "train no.jsonl --out new": "no.jsonl",
}
"""Command -> what it says."""


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Result]:
    """Return the mistaken commands with what they say."""
    return dict(zip(MISTAKES, run(folder, *MISTAKES), strict=True))


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_told_without_torch(told: dict[str, Result], command: str) -> None:
    code, shown, errors = told[command]
    assert (code, shown) == (2, "")
    assert MISTAKES[command] in errors and "Traceback" not in errors


def test_work_without_torch_ends_with_the_doctors_code(folder: Path) -> None:
    [(code, _, errors)] = run(folder, "plan t.csv")
    assert code == EXIT_BROKEN_ENVIRONMENT and "doctor`" in errors


def test_plans_are_shown_and_compared_without_torch(folder: Path) -> None:
    show, diff = run(
        folder,
        "show a.json --verbose --html shown.html --json shown.json",
        "diff a.json b.json --verbose --html d.html --json d.json",
    )
    assert (show[0], show[2]) == (diff[0], diff[2]) == (0, "")
    assert "made for 2 ranks" in show[1] and "samples per second" in diff[1]
    for name in ("shown.html", "d.html"):
        assert "<html" in (folder / name).read_text()
    tables = json.loads((folder / "shown.json").read_text())["tables"]
    assert {table["num_embeddings"] for table in tables} == {1000, 500}
    assert json.loads((folder / "d.json").read_text())["second"]["name"] == "b.json"


def test_a_dash_reads_a_plan_from_standard_input(folder: Path) -> None:
    for command, says in (("show -", "-: made for 2 ranks"), ("diff b.json -", "-")):
        with (folder / "a.json").open() as plan:
            done = subprocess.run(
                [sys.executable, "-m", "torchrec_neuroshard", *command.split()],
                cwd=folder,
                stdin=plan,
                capture_output=True,
                text=True,
            )
        assert (done.returncode, done.stderr) == (0, "") and says in done.stdout


def test_the_cache_is_listed_and_cleared_without_torch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEUROSHARD_CACHE", str(tmp_path))
    key = cache.CacheKey(
        device="A CPU",
        device_type="cpu",
        world_size=2,
        local_world_size=2,
        optimizers=("sgd",),
        data_types=("fp32",),
    )
    cache.store(PRETRAINED / "cpu", key, created="2026-11-30", seconds=3.0)
    listed, cleared, empty = run(folder, "cache", "cache clear", "cache list")
    assert listed[0] == 0 and "2 x A CPU (2 a node), sgd, fp32; " in listed[1]
    assert cleared == (0, f"deleted 1 measurements from {tmp_path}\n", "")
    assert empty == (0, f"{tmp_path} holds no measurements\n", "")
