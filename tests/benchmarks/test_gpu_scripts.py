"""What is run on a GPU, as far as a CPU can tell that it is right."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.builders import CPU, load_script
from torchrec_neuroshard.record_store import read_records

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
LOAN = FOLDER / "loan.sh"
MOST_FILES, MOST_BYTES = 8, 16 * 2**20
"""What may come back from a command."""


def test_parts_of_tables_equal_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = load_script(FOLDER / "columns.py")
    tables = columns.whole_tables(500, 16, "fp32")
    for case in ("uneven", "narrow"):
        found = columns.largest_difference(tables, columns.CASES[case], 16, CPU)
        assert max(found) <= columns.TOLERANCE
    repeat = columns.repeat_inputs

    def shifted(*arguments: object) -> object:
        batch = repeat(*arguments)
        batch.indices_L[:7] = (batch.indices_L[:7] + 1) % 500
        return batch

    monkeypatch.setattr(columns, "repeat_inputs", shifted)
    found = columns.largest_difference(tables, columns.CASES["uneven"], 16, CPU)
    assert min(found) > columns.TOLERANCE


class Timer:
    """Takes four seconds a task; the second task does not fit."""

    reference_ms = 7.0

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.asked = clock, list[str]()

    def __call__(self, *settings: object) -> Timer:
        return self

    def measure(self, found: Sequence[Any]) -> dict[str, list[str]]:
        self.clock[0] += 4.0
        [plan] = found
        self.asked.append(plan.name)
        if plan.name == "second":
            raise torch.OutOfMemoryError("no memory")
        return {"kernel": [f"pass of {plan.name}"]}


def test_plans_are_timed_until_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given again, the command goes on; what does not fit is left out."""
    plans = load_script(FOLDER / "plans.py")
    timer, names = Timer([100.0]), ("first", "second", "third")
    kernels = import_module("planner_comparison.kernels")
    monkeypatch.setattr(kernels, "KernelTimer", timer)
    monkeypatch.setattr(plans.time, "monotonic", lambda: timer.clock[0])
    tasks = []
    for name in names:
        plan = SimpleNamespace(name=name, rank_bytes=(1, 2))
        entries = {"default": {"plan": plan}, "torchrec": {"plan": None}}
        tasks.append((SimpleNamespace(name=name), entries))
    plans.write(tmp_path / "plans.pkl", {"tasks": tasks})
    out = tmp_path / "passes.pkl"
    command = ["time", str(tmp_path / "plans.pkl"), "--device", "cpu"]
    options = plans.parse_arguments([*command, "--out", str(out), "--seconds", "9"])
    for asked, timed in ((names[:2], ["first"]), (names, ["first", "third"])):
        options.run(options)
        assert list(plans.read(out)["passes"]) == timed
        assert set(timer.asked) == set(asked)
        timer.clock[0] = 100.0
    assert plans.read(out)["passes"]["third"] == [["pass of third"]]


# --- prepare.sh, in a repository of its own ---


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs git or prepare.sh in a small repository with packs beside it."""
    root, shared = tmp_path / "root", tmp_path / "shared"
    packs = shared / "device" / "packs"
    for folder in (packs, shared / "data", root / "docs", root / "benchmarks" / "gpu"):
        folder.mkdir(parents=True)
    for name in ("packs/fbgemm-min_in_place.pack.000", "packs/fbgemm-min.pack.000"):
        (shared / "device" / name).write_text("pack")
    for name in ("device/unpack_fbgemm.py", "device/smoke_fbgemm.py"):
        (shared / name).write_text("script")
    (shared / "data" / "real_tables.json").write_text("{}")
    (root / "docs" / "page.md").write_text("read")
    script = root / "benchmarks" / "gpu" / "prepare.sh"
    script.write_bytes((FOLDER / "prepare.sh").read_bytes())

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        if command[0] != "git":
            command = ("bash", str(script), *command[1:])
        names = [f"GIT_{who}_NAME" for who in ("AUTHOR", "COMMITTER")]
        names += [f"GIT_{who}_EMAIL" for who in ("AUTHOR", "COMMITTER")]
        return subprocess.run(
            command,
            cwd=root,
            env={**os.environ, **dict.fromkeys(names, "somebody")},
            capture_output=True,
            text=True,
            check=False,
        )

    run("git", "init", "-q", "-b", "main")
    run("git", "add", "-A")
    run("git", "commit", "-q", "-m", "all")
    return run


def test_a_light_tree_is_prepared_and_undone(
    tmp_path: Path, prepare: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    root = tmp_path / "root"
    found = prepare("prepare.sh")
    assert found.returncode == 0, found.stderr
    assert found.stdout == "0 MiB of 64 travel: 1 files and .gpu\n"
    assert not (root / "docs").exists()
    assert (root / ".gpu" / "moved" / "fbgemm-min.pack.000").read_text() == "pack"
    assert prepare("git", "status", "--porcelain").stdout == ""
    again = prepare("prepare.sh")
    assert again.returncode == 1 and "switch to main first, or undo" in again.stderr
    (root / ".gpu" / "plans.pkl").write_text("plans")
    assert prepare("prepare.sh", "undo").returncode == 0
    assert prepare("git", "branch").stdout == "* main\n"
    assert (root / "docs" / "page.md").exists()
    assert prepare("prepare.sh").returncode == 0  # before the second command
    assert (root / ".gpu" / "plans.pkl").exists()


def test_what_cannot_travel_is_refused(
    tmp_path: Path, prepare: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "root" / "new.py").write_text("1")
    found = prepare("prepare.sh")
    assert found.returncode == 1 and "git status is not clean" in found.stderr
    (tmp_path / "root" / "new.py").unlink()
    with (tmp_path / "shared" / "data" / "real_tables.json").open("wb") as file:
        file.truncate(63 * 2**20)
    found = prepare("prepare.sh")
    assert found.returncode == 1 and "more than 62 MiB would travel" in found.stderr
    assert prepare("git", "branch").stdout == "* main\n"
    assert (tmp_path / "root" / "docs").exists()


# --- loan.sh, with a Python that only writes down what it is asked for ---

FAKE_PYTHON = """#!/bin/bash
echo "$*" >>"{calls}"
case "$*" in
*_fbgemm.py*) exec "{python}" "$@" ;;
*" collect "*) {collect} ;;
esac
"""
FAKE_UNPACK = """
import pathlib, sys
form = pathlib.Path(sys.argv[1]).name + " --alone" * ("--alone" in sys.argv)
site = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
site.mkdir(exist_ok=True)
(site / "env.sh").write_text(f"export FORM='{form}'")
sys.exit(form in %r)
"""
FAKE_CHECKS = """
import os, sys
passed, failed = %r[os.environ["FORM"]]
print("ok   one\\n" * passed + "FAIL one\\n" * failed)
sys.exit(failed > 0)
"""
FORMS = ("in_place --alone", "in_place", "moved")


@dataclasses.dataclass(frozen=True)
class Loan:
    """Folders of a loan, and what its commands are told."""

    folder: Path
    python: str = sys.executable

    def variables(self, **given: str) -> dict[str, str]:
        own = {n: str(self.folder / n.lower()) for n in ("GPU", "OUT", "WORK", "SITE")}
        fixed = {"DEVICE": "cpu", "QUICK": "1", "PYTHON": self.python}
        return {**os.environ, **own, **fixed, **given}

    def run(self, step: str, **given: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "gpu").mkdir(exist_ok=True)
        return subprocess.run(
            ["bash", str(LOAN), step],
            env=self.variables(**given),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def unpack(self, step: str) -> Path:
        """Unpack what came back, as loan.sh says."""
        pieces = sorted((self.folder / "out").glob(f"{step}.tgz.*"))
        found = list((self.folder / "out").iterdir())
        assert len(found) <= MOST_FILES
        assert max(p.stat().st_size for p in found) <= MOST_BYTES
        target = self.folder / "back"
        whole = BytesIO(b"".join(p.read_bytes() for p in pieces))
        with tarfile.open(fileobj=whole) as archive:
            archive.extractall(target, filter="data")
        return target

    def fake(
        self,
        checks: Mapping[str, tuple[int, int]],
        broken: tuple[str, ...] = (),
        collect: str = "exit 0",
    ) -> Loan:
        """Return it with packs whose forms pass and fail so many checks each."""
        gpu, python = self.folder / "gpu", self.folder / "python"
        for form in ("in_place", "moved"):
            (gpu / form).mkdir(parents=True)
        (gpu / "unpack_fbgemm.py").write_text(FAKE_UNPACK % (broken,))
        (gpu / "smoke_fbgemm.py").write_text(FAKE_CHECKS % (dict(checks),))
        text = FAKE_PYTHON.format(
            calls=self.folder / "calls", python=sys.executable, collect=collect
        )
        python.write_text(text)
        python.chmod(0o755)
        return dataclasses.replace(self, python=str(python))

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("step", "given", "text"),
    [
        ("three", {}, "no step 'three'"),
        ("one", {"LIMIT": "8 min"}, "LIMIT=8 min"),
        ("two", {}, "plans.pkl is missing"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, step: str, given: dict[str, str], text: str
) -> None:
    ended = Loan(tmp_path).run(step, **given)
    assert ended.returncode == 2
    assert text in ended.stdout


@pytest.mark.parametrize(
    ("checks", "broken", "how"),
    [
        ({FORMS[0]: (17, 3)}, (), FORMS[0]),
        ({FORMS[1]: (3, 0), FORMS[2]: (19, 1)}, FORMS[:1], FORMS[2]),
    ],
)
def test_the_first_form_of_fbgemm_that_works_is_taken(
    tmp_path: Path,
    checks: dict[str, tuple[int, int]],
    broken: tuple[str, ...],
    how: str,
) -> None:
    """A copy works if it passes more than twice as many checks as it fails."""
    loan = Loan(tmp_path).fake(checks, broken)
    ended = loan.run("one", LIMIT="200")
    assert ended.returncode == 0, ended.stdout
    back = loan.unpack("one")
    assert (back / "how").read_text().strip() == how
    steps = [c for c in loan.calls() if "fbgemm.py" not in c]
    assert [s.split()[0] for s in steps] == [
        "benchmarks/gpu/smoke.py",
        "-m",
        "benchmarks/gpu/columns.py",
    ]
    limit = float(steps[1].split("--time-limit ")[1].split()[0])
    assert 0 < limit < 150  # of 200, what columns.py and the file do not need


def test_where_no_form_of_fbgemm_works_the_command_ends(tmp_path: Path) -> None:
    loan = Loan(tmp_path).fake(dict.fromkeys(FORMS, (6, 14)))
    ended = loan.run("one")
    assert ended.returncode == 1
    assert "no form of FBGEMM works here" in ended.stdout
    assert (loan.unpack("one") / "fbgemm.txt").read_text().count("FAIL") == 14
    assert not any("collect" in c for c in loan.calls())


def test_results_of_a_failed_step_come_back_in_pieces(tmp_path: Path) -> None:
    journal = tmp_path / "work" / "compute.parquet.journal"
    write = f"head -c $((20 * 1024 * 1024)) /dev/urandom >{journal}; exit 3"
    loan = Loan(tmp_path).fake({FORMS[0]: (20, 0)}, collect=write)
    ended = loan.run("one")
    assert ended.returncode == 1
    assert "collect: exit code 3" in ended.stdout
    assert "columns: exit code 0" in ended.stdout
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["one.tgz.aa", "one.tgz.ab"]
    back = loan.unpack("one")
    assert (back / journal.name).read_bytes() == journal.read_bytes()


# --- loan.sh for real, on a CPU ---


@pytest.mark.slow
@pytest.mark.nightly
def test_a_loan_from_end_to_end(tmp_path: Path) -> None:
    loan, bundle = Loan(tmp_path), tmp_path / "bundle"
    ended = loan.run("one", LIMIT="300", NUM="100")
    assert ended.returncode == 0, ended.stdout
    back = loan.unpack("one")
    records = back / "compute.parquet"
    assert len(read_records([records])[1]) == 100
    smoke = json.loads((back / "smoke.json").read_text())
    assert smoke["copy_gb_per_s"] > 0 and smoke["sets_in_20_minutes"] > 0
    assert smoke["flush"] == {"left_out": "a CPU is timed without a flush"}
    cases = json.loads((back / "columns.json").read_text())["cases"]
    assert all(case.get("equal", True) for case in cases.values())

    def python(*arguments: str | Path) -> None:
        subprocess.run(
            [sys.executable, *map(str, arguments)], check=True, cwd=ROOT, timeout=300
        )

    neuroshard = ("-m", "torchrec_neuroshard")
    few = ("--epochs", "3", "--members", "2")
    python(*neuroshard, "train", records, "--out", bundle, *few)
    plans, quick = FOLDER / "plans.py", ("--quick", "--num-tasks", "1", "--worlds", "4")
    small = ("--max-rows", "2000", "--batch-size", "256")
    ours = ("--planners", "default", "torchrec, best practice", "--processes", "0")
    made = tmp_path / "gpu" / "plans.pkl"
    python(
        *(plans, "make", "--bundle", bundle, "--device", "cpu", "--out", made),
        *(*quick, *small, *ours),
    )
    ended = loan.run("two", LIMIT="120")
    assert ended.returncode == 0, ended.stdout
    passes = loan.unpack("two") / "passes.pkl"
    race = tmp_path / "race"
    python(plans, "judge", made, passes, "--bundle", bundle, "--out", race)
    page = race.with_suffix(".md").read_text()
    for name in ("**default**", "default, again", "default, estimate"):
        assert f"| {name} | 1/1 |" in page
