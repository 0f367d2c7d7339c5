"""Scripts for a GPU, tested on a CPU as far as possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

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
*" collect "*) {collect} ;;
esac
"""
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


def test_the_form_of_fbgemm_that_works_is_taken_and_results_come_back(
    tmp_path: Path,
) -> None:
    """A copy works if it passes more than twice as many checks as it fails."""
    journal = tmp_path / "work" / "compute.parquet.journal"
    write = f"head -c $((20 * 1024 * 1024)) /dev/urandom >{journal}; exit 3"
    gpu, python, calls = (tmp_path / name for name in ("gpu", "python", "calls"))
    for form in ("in_place", "moved"):
        (gpu / form).mkdir(parents=True)
    (gpu / "unpack_fbgemm.py").write_text(FAKE_UNPACK)
    (gpu / "smoke_fbgemm.py").write_text(FAKE_CHECKS)
    known = {"calls": calls, "python": sys.executable, "collect": write}
    python.write_text(FAKE_PYTHON.format(**known))
    python.chmod(0o755)
    ended = run(tmp_path, "one", python, LIMIT="200")
    assert ended.returncode == 1
    assert "collect: exit code 3" in ended.stdout
    assert "columns: exit code 0" in ended.stdout
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["one.tgz.aa", "one.tgz.ab"]
    back = unpack(tmp_path, "one")
    assert (back / journal.name).read_bytes() == journal.read_bytes()
    assert (back / "how").read_text().strip() == "moved"
    [collect] = [c for c in calls.read_text().splitlines() if " collect " in c]
    limit = float(collect.split("--time-limit ")[1].split()[0])
    assert 0 < limit < 150  # of 200, what columns.py and the file do not need


# --- loan.sh for real, on a CPU ---


@pytest.mark.nightly
def test_a_loan_from_end_to_end(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    ended = run(tmp_path, "one", LIMIT="3000", NUM="100")
    assert ended.returncode == 0, ended.stdout
    back = unpack(tmp_path, "one")
    records = back / "compute.parquet"
    assert len(read_records([records])[1]) == 100
    smoke = json.loads((back / "smoke.json").read_text())
    assert smoke["copy_gb_per_s"] > 0 and smoke["sets_in_20_minutes"] > 0
    cases = json.loads((back / "columns.json").read_text())["cases"]
    assert all(case.get("equal", True) for case in cases.values())

    def python(*arguments: str | Path) -> None:
        subprocess.run(
            [sys.executable, *map(str, arguments)], check=True, cwd=ROOT, timeout=3000
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
    ended = run(tmp_path, "two", LIMIT="1200")
    assert ended.returncode == 0, ended.stdout
    passes = unpack(tmp_path, "two") / "passes.pkl"
    race = tmp_path / "race"
    python(plans, "judge", made, passes, "--bundle", bundle, "--out", race)
    page = race.with_suffix(".md").read_text()
    for name in ("**default**", "default, again", "default, estimate"):
        assert f"| {name} | 1/1 |" in page
