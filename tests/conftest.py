"""What holds for all tests."""

from __future__ import annotations

import os
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Plans must not depend on what this machine has measured before."""
    nowhere = os.path.join(
        tempfile.gettempdir(), "neuroshard-no-cache", str(os.getpid())
    )
    os.environ["NEUROSHARD_CACHE"] = nowhere
