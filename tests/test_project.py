"""The files around the package: workflow, citation, changelog agree with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

import torchrec_neuroshard

pytestmark = pytest.mark.one_release

ROOT = Path(__file__).parents[1]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_workflow_calls_targets_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    jobs = read(".github/workflows/ci.yml")["jobs"]
    commands = [s["run"] for j in jobs.values() for s in j["steps"] if "run" in s]
    called = {command.removeprefix("make ") for command in commands}
    assert called <= targets
    assert {"lint", "test", "test-versions", "docs"} <= called


def test_the_workflow_tests_every_python_that_installs() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    stated = set(re.findall(r"Python :: (3\.\d+)", text))
    matrix = read(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert set(matrix["python"]) == stated


def test_pages_name_the_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"install '\.\[(\w+)\]'", text))
    assert named == set(project["optional-dependencies"])


def test_the_install_page_names_what_is_brought() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (brought,) = re.findall(r"It brings only (.+?)\.", page, re.DOTALL)
    wanted = {d.partition(">=")[0] for d in project["dependencies"]}
    assert set(re.findall(r"`(\w+)`", brought)) == wanted


def test_notice_names_files_that_exist() -> None:
    text = (ROOT / "NOTICE").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w.-]+/[\w./-]*\w/?", text))
    repositories = {
        "ai-dynamo/aiconfigurator",
        "facebookresearch/HolisticTraceAnalysis",
        "facebookresearch/dlrm_datasets",
    }
    named -= repositories
    assert len(named) >= 5
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_citation_names_authors_of_the_papers() -> None:
    for paper in read("CITATION.cff")["references"]:
        assert paper["authors"][-1]["family-names"] == "Hu"  # of all three


def disagreement(version: str, changelog: str, citation: dict[str, Any]) -> str:
    """Return what CONTRIBUTING's section on releases forbids; empty if nothing."""
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    released = [h for h in headings if h != "Unreleased"]
    cited = f"{citation['version']} ({citation['date-released']})"
    if cited != released[0]:
        return f"CITATION.cff names {cited}, CHANGELOG's last release is {released[0]}"
    last = Version(citation["version"])
    if Version(version).is_devrelease:
        if headings[0] != "Unreleased":
            return f"version {version} has no section 'Unreleased'"
        of_next = Version(version) > last and re.fullmatch(r"[\d.]+\.dev0", version)
        return (
            "" if of_next else f"{version} is not the .dev0 of a version above {last}"
        )
    if headings[0] == "Unreleased" or Version(version) != last:
        return f"version {version} is a release; CHANGELOG begins with {headings[0]}"
    return ""


def test_version_changelog_and_citation_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, citation = torchrec_neuroshard.__version__, read("CITATION.cff")
    assert disagreement(version, changelog, citation) == ""


@pytest.mark.parametrize(
    ("version", "top", "cited", "expected"),
    [
        ("0.3.0", "0.3.0 (2027-01-02)", "0.3.0", ""),
        ("0.4.0.dev0", "Unreleased\n## 0.3.0 (2027-01-02)", "0.3.0", ""),
        ("0.3.0", "0.3.0 (2027-01-02)", "0.2.0", "CITATION.cff names 0.2.0"),
        ("0.3.0", "Unreleased\n## 0.3.0 (2027-01-02)", "0.3.0", "begins with Unrel"),
        ("0.3.1", "0.3.0 (2027-01-02)", "0.3.0", "0.3.1 is a release"),
        ("0.4.0.dev0", "0.3.0 (2027-01-02)", "0.3.0", "no section 'Unreleased'"),
        ("0.3.0.dev0", "Unreleased\n## 0.3.0 (2027-01-02)", "0.3.0", "above 0.3.0"),
    ],
)
def test_a_forgotten_step_of_a_release_is_found(
    version: str, top: str, cited: str, expected: str
) -> None:
    citation = {"version": cited, "date-released": "2027-01-02"}
    found = disagreement(version, f"## {top}\n## 0.2.0 (2026-11-28)\n", citation)
    assert (expected in found) if expected else not found
