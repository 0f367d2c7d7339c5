"""What is built from the sources installs beside any torch and fbgemm, and plans."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import torchrec_neuroshard
from torchrec_neuroshard.doctor import read_installed

ROOT = Path(__file__).parents[1]
PACKAGE = Path("torchrec_neuroshard")
BUILD = "import sys; from setuptools import build_meta as b; b.build_{}(sys.argv[1])"
PIP = ("-m", "pip", "--isolated", "--disable-pip-version-check", "--quiet")
FRAMEWORKS = {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}
MODEL = """
import torch, torchrec, torchrec_neuroshard
print("planned by", torchrec_neuroshard.__file__)

def model():
    tables = [
        torchrec.EmbeddingBagConfig(
            name=n, num_embeddings=5000, embedding_dim=64, feature_names=[n]
        )
        for n in ("user", "item")
    ]
    return torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
"""


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command out of reach of the checkout; return what it wrote."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made of what a source distribution holds."""
    work = tmp_path_factory.mktemp("packaging")
    sources = work / "sources"
    shutil.copytree(
        ROOT / PACKAGE, sources / PACKAGE, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, sources)
    (sources / "tests").mkdir()
    (sources / "tests/test_none.py").touch()
    call(sys.executable, "-c", BUILD.format("sdist"), work, cwd=sources)
    (sdist,) = work.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    unpacked = work / sdist.name.removesuffix(".tar.gz")
    assert not (unpacked / "tests").exists()
    call(sys.executable, "-c", BUILD.format("wheel"), work, cwd=unpacked)
    (found,) = work.glob("*.whl")
    return found


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def test_wheel_holds_the_package_and_its_licences(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {str(p.relative_to(ROOT)) for p in (ROOT / PACKAGE).rglob("*.*")}
    ours = {name for name in ours if "__pycache__" not in name}
    assert {n for n in names if ".dist-info/" not in n} == ours
    assert f"{PACKAGE}/py.typed" in names
    found = metadata(wheel)
    assert found["Version"] == torchrec_neuroshard.__version__
    assert found["License-Expression"] == "BSD-3-Clause"
    assert found.get_all("License-File") == ["LICENSE", "NOTICE"]


def test_installing_leaves_torch_and_fbgemm_alone(wheel: Path) -> None:
    wanted = metadata(wheel).get_all("Requires-Dist", [])
    plain = {w.partition(">=")[0] for w in wanted if "extra ==" not in w}
    assert "numpy" in plain and not plain & FRAMEWORKS
    arguments = ("install", "--dry-run", "--no-index", "--report", "-")
    (build,) = (name for name, _ in read_installed().fbgemm)
    extra = f"{wheel}[{'cpu' if build.endswith('-cpu') else 'cuda'}]"
    report = json.loads(call(sys.executable, *PIP, *arguments, extra, cwd=wheel.parent))
    names = {entry["metadata"]["name"] for entry in report["install"]}
    assert names <= {"torchrec-neuroshard"}
    # What would fetch the CUDA build over the CPU one.
    cpu = {w.partition("==")[0] for w in wanted if 'extra == "cpu"' in w}
    assert "fbgemm-gpu-cpu" in cpu and not cpu & {"torchrec", "fbgemm-gpu"}


@pytest.mark.nightly
def test_installed_wheel_plans(wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "venv", "--without-pip", "fresh", cwd=tmp_path)
    python = tmp_path / "fresh/bin/python"
    options = ("install", "--no-deps", "--no-index", "--ignore-installed")
    pip = (*PIP, "--python", python, *options, "--no-compile", wheel)
    call(sys.executable, *pip, cwd=tmp_path)
    (site,) = (tmp_path / "fresh/lib").glob("python3*/site-packages")
    # Its frameworks are those of the tests; an editable install there is not followed.
    (site / "frameworks.pth").write_text(sysconfig.get_paths()["purelib"])
    (tmp_path / "jobs.py").write_text(MODEL)
    out = call(
        tmp_path / "fresh/bin/neuroshard",
        *("plan", "jobs:model", "--card", "cpu", "--ranks", "2"),
        *("--seconds", "1", "--out", "plan.json"),
        cwd=tmp_path,
    )
    assert f"planned by {site / PACKAGE}" in out
    written = (tmp_path / "plan.json").read_text()
    assert '"user"' in written and '"item"' in written
