"""The files around the package: workflow, citation, changelog agree with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def test_notice_names_files_that_exist() -> None:
    text = (ROOT / "NOTICE").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w.-]+/[\w./-]*\w/?", text))
    repositories = {"facebookresearch/dlrm_datasets", "ai-dynamo/aiconfigurator"}
    named -= repositories
    assert len(named) >= 5
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_citation_and_changelog_name_this_version() -> None:
    version = torchrec_neuroshard.__version__
    citation = read("CITATION.cff")
    assert citation["version"] == version
    for paper in citation["references"]:
        assert paper["authors"][-1]["family-names"] == "Hu"  # of all three
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {version}" in changelog.replace("[", "").replace("]", "")
