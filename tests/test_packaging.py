"""What is built from the sources installs beside any torch and fbgemm, and plans."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import torchrec_neuroshard

ROOT = Path(__file__).parents[1]
PACKAGE = Path("torchrec_neuroshard")
BUILD = "import sys; from setuptools import build_meta as b; b.build_{}(sys.argv[1])"
FRAMEWORKS = {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command out of reach of the checkout; return what it wrote."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(work: Path) -> Path:
    """A wheel made of what a source distribution holds."""
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


def test_wheel_holds_the_package_its_licences_and_no_framework(tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(tmp_path)) as archive:
        names = set(archive.namelist())
        (folder,) = {n.partition("/")[0] for n in names if ".dist-info/" in n}
        metadata = message_from_bytes(archive.read(f"{folder}/METADATA"))
        entry_points = archive.read(f"{folder}/entry_points.txt").decode()
    ours = {str(p.relative_to(ROOT)) for p in (ROOT / PACKAGE).rglob("*.*")}
    ours = {name for name in ours if "__pycache__" not in name}
    assert {n for n in names if ".dist-info/" not in n} == ours
    assert f"{PACKAGE}/py.typed" in names
    assert "neuroshard = torchrec_neuroshard.cli:" in entry_points
    assert metadata["Version"] == torchrec_neuroshard.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    # Installing it leaves torch and fbgemm alone.
    wanted = metadata.get_all("Requires-Dist", [])
    plain = {w.partition(">=")[0] for w in wanted if "extra ==" not in w}
    assert "numpy" in plain and not plain & FRAMEWORKS
    # What would fetch the CUDA build over the CPU one.
    cpu = {w.partition("==")[0] for w in wanted if 'extra == "cpu"' in w}
    assert "fbgemm-gpu-cpu" in cpu and not cpu & {"torchrec", "fbgemm-gpu"}
