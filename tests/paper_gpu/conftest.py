"""Runs the modules of this folder in processes that have paper GPUs, one process each.

The paper GPU has to be there before torch, which the process that collects the tests
has long imported. So that process hands the chosen tests of a module to a child and
tells what the child reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paper_gpu.build import LIBRARY, build, environment, why_not

_HERE = Path(__file__).resolve().parent
_REPORTS = "PAPER_CUDA_REPORTS"
"""Environment variable: where a child writes its reports, a line of JSON each."""
_TIMEOUT_S = 600.0
_INSIDE = LIBRARY in os.environ
_found = pytest.StashKey[dict[str, list[pytest.TestReport]]]()


def _is_ours(item: pytest.Item) -> bool:
    return item.path.is_relative_to(_HERE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "" if _INSIDE else why_not()
    for item in filter(_is_ours, items):
        item.add_marker("paper_gpu")
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = os.environ.get(_REPORTS)
    if path is not None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(report._to_json()) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> bool | None:
    if _INSIDE or not _is_ours(item) or item.get_closest_marker("skip"):
        return None
    reports = item.session.stash.setdefault(_found, {})
    if item.nodeid not in reports:
        mates = [i for i in item.session.items if i.path == item.path]
        reports.update(_run_inside(item.config, mates))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports[item.nodeid]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_inside(
    config: pytest.Config, items: list[pytest.Item]
) -> dict[str, list[pytest.TestReport]]:
    """Run tests of one module in a child that has paper GPUs; the reports of each."""
    folder = config._tmp_path_factory.mktemp("paper_gpu")  # type: ignore[attr-defined]
    path = folder / "reports.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", ""]
    command += [f"--basetemp={folder / 'tmp'}", *(i.nodeid for i in items)]
    reports: dict[str, list[pytest.TestReport]] = {i.nodeid: [] for i in items}
    try:
        done = subprocess.run(
            command,
            cwd=config.rootpath,
            env={**environment(build()), _REPORTS: str(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        code, output = str(done.returncode), done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = f"none after {_TIMEOUT_S:g} s", str(error.stdout)
    except RuntimeError as error:
        code, output = "none: not built", str(error)
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            report = pytest.TestReport._from_json(json.loads(line))
            reports[report.nodeid].append(report)
    for item in items:
        if not any(r.when == "teardown" for r in reports[item.nodeid]):
            text = f"the process ended within this test, code {code}:\n{output[-6000:]}"
            failed = pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={name: 1 for name in item.keywords},
                outcome="failed",
                longrepr=text,
                when="call",
            )
            reports[item.nodeid].append(failed)
    return reports


@pytest.fixture(autouse=_INSIDE)
def first_device() -> None:
    """Begin on the first device, whatever an earlier test made current."""
    import torch

    torch.cuda.set_device(0)
