"""What is built from the sources: its files, its metadata, and an index's page."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import torchrec_neuroshard

ROOT = Path(__file__).parents[1]
PACKAGE = Path("torchrec_neuroshard")
BUILD = "import sys; from setuptools import build_meta as b; b.build_{}(sys.argv[1])"
MARKDOWN = "text/markdown"
FRAMEWORKS = {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}


def relative_links(text: str) -> set[str]:
    """Paths in Markdown and HTML, without those in samples of code."""
    shown = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    paths = re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset|href)=\"([^\"]+)", shown)
    links = {(path or source).partition("#")[0] for path, source in paths}
    return {link for link in links if link and not link.startswith("http")}


README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS = relative_links(README)


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command out of reach of the checkout; return what it wrote."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution of this checkout."""
    work = tmp_path_factory.mktemp("sdist")
    sources = work / "sources"
    hidden = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (PACKAGE, "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / name, sources / name, ignore=hidden)
    for file in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy(file, sources)
    (sources / "tests").mkdir()
    (sources / "tests/test_none.py").touch()
    call(sys.executable, "-c", BUILD.format("sdist"), work, cwd=sources)
    (packed,) = work.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(work, filter="data")
    return work / packed.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Iterator[zipfile.ZipFile]:
    """A wheel made of the source distribution."""
    call(sys.executable, "-c", BUILD.format("wheel"), sdist.parent, cwd=sdist)
    (found,) = sdist.parent.glob("*.whl")
    with zipfile.ZipFile(found) as archive:
        yield archive


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def test_the_source_distribution_has_the_pages_that_its_pages_name(sdist: Path) -> None:
    pages = [
        *sdist.glob("*.md"),
        *sdist.glob("docs/*.md"),
        *sdist.glob("examples/*.md"),
    ]
    assert len(pages) > 30 and sdist / "CHANGELOG.md" in pages
    named = {
        (page.parent / link).resolve().relative_to(sdist.resolve())
        for page in pages
        for link in relative_links(page.read_text(encoding="utf-8"))
    }
    missing = {str(path) for path in named if not (sdist / path).exists()}
    assert {path for path in missing if not path.startswith("tests/")} == set()
    assert not (sdist / "tests").exists()
    shipped = {p.name for p in (sdist / "examples").rglob("*") if p.is_file()}
    examples = (ROOT / "examples").rglob("*.*")
    assert shipped == {p.name for p in examples if p.suffix != ".pyc"}


def test_the_page_of_an_index_has_no_relative_link(wheel: zipfile.ZipFile) -> None:
    metadata = metadata_of(wheel)
    page = metadata.get_payload()
    assert isinstance(page, str) and metadata["Description-Content-Type"] == MARKDOWN
    assert relative_links(page) == set() and "<picture>" not in page
    assert "[TorchRec](https://github.com/pytorch/torchrec)" in page
    picture, caption, _ = README[README.index("<picture>") :].split("\n\n", 2)
    left_out = {path for path in LINKS if f"(`{path}`)" not in page}
    assert left_out == relative_links(picture + caption)
    headings = re.compile("^#+ .+$", re.MULTILINE)
    assert headings.findall(page) == headings.findall(README)


def test_with_an_address_readmes_links_lead_there() -> None:
    index_page = runpy.run_path(str(ROOT / "setup.py"))["index_page"]
    page = index_page(README, "https://forge.example/a/b")
    assert relative_links(page) == set() and "<picture>" not in page
    pages = {path for path in LINKS if not path.endswith(".png")}
    assert all(
        f"](https://forge.example/a/b/blob/HEAD/{path}" in page for path in pages
    )
    pictures = README.count("<picture>")
    assert page.count("](https://forge.example/a/b/raw/HEAD/docs/images/") == pictures


def test_wheel_holds_the_package_its_licences_and_no_framework(
    wheel: zipfile.ZipFile,
) -> None:
    names, metadata = set(wheel.namelist()), metadata_of(wheel)
    (entries,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
    entry_points = wheel.read(entries).decode()
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
