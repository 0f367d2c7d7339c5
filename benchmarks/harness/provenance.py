"""When and from which sources a result was made."""

from __future__ import annotations

import datetime
import subprocess

__all__ = ["commit", "now"]


def commit() -> str:
    """Return the short hash of the commit that is checked out."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def now() -> str:
    """Return the time to the second, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
