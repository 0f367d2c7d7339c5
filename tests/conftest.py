"""What holds for all tests."""

from __future__ import annotations

import os
import tempfile

import pytest

from torchrec_neuroshard import progress


def pytest_configure(config: pytest.Config) -> None:
    """Plans must not depend on what this machine has measured before."""
    nowhere = os.path.join(
        tempfile.gettempdir(), "neuroshard-no-cache", str(os.getpid())
    )
    os.environ["NEUROSHARD_CACHE"] = nowhere


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests in one process, and all that share ranks in one, too."""
    for item in items:
        shares_ranks = hasattr(getattr(item, "module", None), "rank_jobs")
        group = "ranks" if shares_ranks else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What commands say that they do, in order."""
    found: list[str] = []
    original = progress.Phase

    def noted(text: str) -> progress.Phase:
        found.append(text)
        return original(text=text)

    monkeypatch.setattr(progress, "Phase", noted)
    return found
