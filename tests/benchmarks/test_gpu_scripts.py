"""Scripts for a GPU, tested on a CPU as far as possible."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from planner_comparison.results import read_results
from torchrec_neuroshard.measure.store import read_records

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
LOAN = FOLDER / "loan.sh"
MOST_FILES, MOST_BYTES = 8, 16 * 2**20
"""Maximum number of result files, and maximum bytes of each."""


# --- loan.sh, with a Python that only writes down what it is asked for ---

FAKE_PYTHON = """#!/bin/bash
echo "$*" >>"{calls}"
case "$*" in
*_fbgemm.py*) exec "{python}" "$@" ;;
*"plans.py time"*) {plans} ;;
*"--kinds uvm"*) {uvm} ;;
*"kernels.py"*) {kernels} ;;
*"collect compute"*) {sets} ;;
esac
"""
NOTHING = {"plans": ":", "kernels": ":", "uvm": ":", "sets": ":"}
FAKE_UNPACK = """
import pathlib, sys
form = pathlib.Path(sys.argv[1]).name + " --alone" * ("--alone" in sys.argv)
site = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
site.mkdir(exist_ok=True)
(site / "env.sh").write_text(f"export FORM='{form}'")
sys.exit(form == "in_place --alone")
"""
FAKE_CHECKS = """
import os, sys
passed, failed = {"in_place": (3, 0), "moved": (19, 1)}[os.environ["FORM"]]
print("ok   one\\n" * passed + "FAIL one\\n" * failed)
sys.exit(failed > 0)
"""


def run(
    folder: Path, step: str, python: str | Path = sys.executable, **given: str
) -> subprocess.CompletedProcess[str]:
    own = {n: str(folder / n.lower()) for n in ("GPU", "OUT", "WORK", "SITE")}
    fixed = {"DEVICE": "cpu", "QUICK": "1", "PYTHON": str(python)}
    (folder / "gpu").mkdir(exist_ok=True)
    if not (plans := folder / "gpu" / "plans.pkl").exists():
        plans.write_text("plans")
    return subprocess.run(
        ["bash", str(LOAN), step],
        env={**os.environ, **own, **fixed, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def unpack(folder: Path, step: str) -> Path:
    """Unpack the results, as loan.sh says."""
    found = list((folder / "out").iterdir())
    assert len(found) <= MOST_FILES
    assert max(p.stat().st_size for p in found) <= MOST_BYTES
    pieces = sorted((folder / "out").glob(f"{step}.tgz.*"))
    whole = BytesIO(b"".join(p.read_bytes() for p in pieces))
    with tarfile.open(fileobj=whole) as archive:
        archive.extractall(folder / "back", filter="data")
    return folder / "back"


def fake_python(folder: Path, **steps: str) -> Path:
    """Return a Python that notes its arguments and does what `steps` says."""
    known = {"calls": folder / "calls", "python": sys.executable, **NOTHING, **steps}
    python = folder / "python"
    python.write_text(FAKE_PYTHON.format(**known))
    python.chmod(0o755)
    return python


def calls_of(folder: Path) -> list[str]:
    """Return the script, or neuroshard's subcommand, and the options of each call."""
    lines = (folder / "calls").read_text().splitlines()
    return [re.sub(r"^(-m torchrec_neuroshard |\S*gpu/)", "", line) for line in lines]


def limit_of(call: str) -> int:
    return int(call.split("--seconds ")[1].split()[0])


def test_the_form_of_fbgemm_that_works_is_taken_and_results_come_back(
    tmp_path: Path,
) -> None:
    """A copy works if it passes more than twice as many checks as it fails."""
    passes = tmp_path / "work" / "one" / "passes.pkl"
    write = f"head -c $((20 * 1024 * 1024)) /dev/urandom >{passes}; exit 1"
    broken = f"[ -e {tmp_path}/broken ] || {{ touch {tmp_path}/broken; exit 3; }}"
    gpu = tmp_path / "gpu"
    for form in ("in_place", "moved"):
        (gpu / form).mkdir(parents=True)
    (gpu / "unpack_fbgemm.py").write_text(FAKE_UNPACK)
    (gpu / "smoke_fbgemm.py").write_text(FAKE_CHECKS)
    python = fake_python(tmp_path, plans=write, kernels=broken)
    ended = run(tmp_path, "one", python)
    assert ended.returncode == 1
    assert "plans: exit code 1" in ended.stdout
    assert "kernels: exit code 0" in ended.stdout
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["one.tgz.aa", "one.tgz.ab"]
    back = unpack(tmp_path, "one")
    assert (back / passes.name).read_bytes() == passes.read_bytes()
    assert (back / "how").read_text().strip() == "moved"
    # Plans come before everything else, and a failed device gets a new process.
    steps = [c for c in calls_of(tmp_path) if "_fbgemm.py" not in c]
    scripts = ["plans.py", *3 * ["kernels.py"], "two_ranks.py", "collect"]
    assert [c.split()[0] for c in steps] == scripts
    assert "--kinds uvm" in steps[3]
    assert 150 < limit_of(steps[0]) < 200
    assert all(50 < limit_of(c) < 100 for c in steps[1:3])
    assert all(20 < limit_of(c) < 60 for c in steps[3:5])
    assert 300 < limit_of(steps[5]) < 420 and "--seed 1" in steps[5]


def test_a_command_that_is_cut_off_leaves_results(tmp_path: Path) -> None:
    work = tmp_path / "work"
    python = fake_python(
        tmp_path,
        plans=f"echo plans >{work}/one/passes.pkl",
        kernels=f"echo some >{work}/one/kernels.parquet; exec sleep 100",
    )
    ended = run(tmp_path, "one", python, LIMIT="24")
    assert ended.returncode == 1
    assert "kernels: exit code 124" in ended.stdout
    assert "no time for: host memory" in ended.stdout
    back = unpack(tmp_path, "one")
    assert (back / "passes.pkl").read_text() == "plans\n"
    assert (back / "kernels.parquet").read_text() == "some\n"
    assert "kernels: exit code 124" in (back / "one.log").read_text()


def test_the_second_command_takes_new_plans_and_then_sets(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "one").mkdir(parents=True)
    (work / "one" / "passes.pkl").write_text("of other plans")
    measured = f"echo one >{work}/two/sets.jsonl; exit 2"
    python = fake_python(tmp_path, sets=measured)
    ended = run(tmp_path, "two", python, NUM="7")
    assert ended.returncode == 1
    steps = calls_of(tmp_path)
    assert [c.split()[0] for c in steps] == ["plans.py"] + 3 * ["collect"]
    assert 80 < limit_of(steps[0]) < 110
    assert 150 < limit_of(steps[1]) < 220
    assert "--num-sets 7" in steps[1] and "--seed 2" in steps[1]
    back = unpack(tmp_path, "two")
    assert (back / "sets.jsonl").exists()
    assert not (back / "passes.pkl").exists()


def test_no_command_starts_without_plans(tmp_path: Path) -> None:
    (tmp_path / "gpu").mkdir()
    options = {"GPU": str(tmp_path / "gpu"), "OUT": str(tmp_path / "out")}
    for step in ("one", "two"):
        ended = subprocess.run(
            ["bash", str(LOAN), step],
            env={**os.environ, **options},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 2
        assert "plans.pkl is missing" in ended.stderr


# --- kernels.py ---


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def test_kernels_are_timed_and_those_that_fail_say_why(tmp_path: Path) -> None:
    out = tmp_path / "kernels.parquet"
    kinds = ("column_order", "dense", "uvm")
    command = [sys.executable, str(FOLDER / "kernels.py"), "--out", str(out)]
    command += ["--device", "cpu", "--quick", "--kinds", *kinds]

    def call(*more: str) -> str:
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, check=True, cwd=ROOT
        )
        return done.stdout

    call()
    rows = rows_of(out)
    assert list(dict.fromkeys(r["kind"] for r in rows)) == list(kinds)
    for row in rows:
        assert json.loads(row["shape"]) and row["amount"] > 0
        if row["error"] is None:
            assert row["fwd_ms"] > 0 and row["bwd_ms"] > 0 and row["num_passes"] == 2
    failed = {r["variant"]: r["error"] for r in rows if r["error"]}
    assert set(failed) == {"managed", "LRU 0.05", "LRU 0.2", "LFU 0.2"}
    assert all("needs a GPU" in error for error in failed.values())
    dense = [r for r in rows if r["kind"] == "dense"]
    variants = {"fused sgd", "no optimizer", "sgd", "adagrad"}
    for shape in {r["shape"] for r in dense}:
        assert {r["variant"] for r in dense if r["shape"] == shape} == variants
    # The file has these kinds, and there is no time for another one.
    assert "the time is up in 'codecs'" in call("codecs", "--seconds", "0")
    assert rows_of(out) == rows


# --- loan.sh for real, on a CPU ---


@pytest.mark.nightly
def test_a_loan_from_end_to_end(tmp_path: Path) -> None:
    bundle, first = tmp_path / "bundle", tmp_path / "first"

    def python(*arguments: str | Path) -> None:
        subprocess.run(
            [sys.executable, *map(str, arguments)], check=True, cwd=ROOT, timeout=3000
        )

    plans, made = FOLDER / "plans.py", tmp_path / "gpu" / "plans.pkl"
    quick = ("--quick", "--num-tasks", "1", "--worlds", "4")
    small = ("--max-rows", "2000", "--batch-size", "256")
    ours = ("--planners", "default", "torchrec, best practice", "--processes", "0")

    def make(cost_model: str | Path) -> None:
        python(
            *(plans, "make", "--bundle", cost_model, "--device", "cpu", "--out", made),
            *(*quick, *small, *ours),
        )

    made.parent.mkdir()
    make("cpu_epyc_zen5")
    ended = run(tmp_path, "one", LIMIT="3000", NUM="120")
    assert ended.returncode == 0, ended.stdout
    back = unpack(tmp_path, "one")
    assert (back / "passes.pkl").exists()
    rows = rows_of(back / "kernels.parquet")
    failed = {r["variant"] for r in rows if r["error"]}
    assert failed <= {"bf16", "int8"}
    assert {r["kind"] for r in rows_of(back / "uvm.parquet")} == {"uvm"}
    trained = json.loads((back / "two_ranks.json").read_text())["cases"]
    assert all(case["equal"] for case in trained.values()) and "all" in trained
    made.unlink()

    records = (back / "sets.jsonl").rename(tmp_path / "records.jsonl")
    assert len(read_records([records])[1]) == 120
    neuroshard, few = ("-m", "torchrec_neuroshard"), ("--epochs", "3", "--members", "2")
    python(*neuroshard, "train", records, "--out", first, *few)
    make(first)
    ended = run(tmp_path, "two", LIMIT="1200", NUM="60")
    assert ended.returncode == 0, ended.stdout
    back = unpack(tmp_path, "two")
    measured = back / "sets.jsonl"
    assert len(read_records([measured])[1]) == 60
    python(*neuroshard, "train", records, measured, "--out", bundle, *few)
    race = tmp_path / "race"
    passes = back / "passes.pkl"
    python(plans, "judge", made, passes, "--bundle", first, "--out", race)
    page = race.with_suffix(".md").read_text()
    for name in ("**default**", "default, again", "torchrec, best practice"):
        assert f"| {name} | 1/1 |" in page
    check_kernels(race)
    expected = tmp_path / "expected"
    cpu = ("--device", "cpu")
    python(plans, "expect", made, "--bundle", first, "--out", expected, *cpu)
    text = expected.with_suffix(".md").read_text()
    assert "nothing was measured" in text and "| **default** | 1/1 |" in text


def check_kernels(race: Path) -> None:
    """Every rank of every stage names the record of its kernel."""
    [task] = read_results(race)["tasks"]
    _, found = read_records([race.with_name("race_kernels.jsonl")])
    records = {r.index: r for r in found}
    used = set()
    for name, entry in task["planners"].items():
        for stage in entry["measured"]["stages"]:
            ran = zip(stage["kernels"], stage["fwd_ms"], stage["bwd_ms"], strict=True)
            for index, *ms in ran:
                if index is None:
                    assert ms == [0.0, 0.0]
                    continue
                record = records[index]
                assert ms == [record.fwd_ms, record.bwd_ms]
                assert (record.repeat_of is not None) == (name == "default, again")
                used.add(index)
    assert used == set(records)
