"""Scripts for a GPU, tested on a CPU as far as possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from harness.models import OPTIMIZER_CLASSES
from planner_comparison.results import read_results
from torchrec_neuroshard.measure.store import read_records

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
LOAN = FOLDER / "loan.sh"
MOST_FILES, MOST_BYTES = 8, 16 * 2**20
"""Maximum number of result files, and maximum bytes of each."""


# --- loan.sh, with a Python that does what it is told ---

FAKE_PYTHON = """#!/bin/bash
case "$*" in
*"plans.py time"*) {plans} ;;
*"kernels.py"*) {kernels} ;;
esac
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


def test_a_command_that_is_cut_off_leaves_results(tmp_path: Path) -> None:
    work, python = tmp_path / "work", tmp_path / "python"
    steps = {
        "plans": f"echo plans >{work}/one/passes.pkl",
        "kernels": f"echo some >{work}/one/kernels.parquet; exec sleep 100",
    }
    python.write_text(FAKE_PYTHON.format(**steps))
    python.chmod(0o755)
    ended = run(tmp_path, "one", python, LIMIT="24")
    assert ended.returncode == 1
    assert "kernels: exit code 124" in ended.stdout
    assert "no time for: host memory" in ended.stdout
    back = unpack(tmp_path, "one")
    assert (back / "passes.pkl").read_text() == "plans\n"
    assert (back / "kernels.parquet").read_text() == "some\n"
    assert "kernels: exit code 124" in (back / "one.log").read_text()


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
    variants = {"fused sgd", "no optimizer", *OPTIMIZER_CLASSES}
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
