"""When and from which sources a result was made."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from torchrec_neuroshard.collect.fingerprint import device_fingerprint

__all__ = ["commit", "describe_run", "keep_rows", "kept_rows", "now"]


def commit() -> str:
    """Return the short hash of the commit that is checked out.

    Where tracked files differ from it, "-dirty" follows; results that are being written
    do not count.
    """
    files = (":/", ":(top,exclude)benchmarks/results")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *files)
    found = _git("rev-parse", "--short", "HEAD") or "unknown"
    return f"{found}-dirty" if changed else found


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def now() -> str:
    """Return the time to the second, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def describe_run() -> dict[str, Any]:
    """Return what a result made on a CPU names: command, commit, machine, versions."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "date": now(),
        "hardware": asdict(device_fingerprint(torch.device("cpu"), 1)),
        "versions": {n: version(n) for n in ("torch", "torchrec", "numpy", "scipy")},
        "load_average": os.getloadavg(),
        "threads": torch.get_num_threads(),
    }


def kept_rows(out: Path | None, *, resume: bool) -> list[dict[str, Any]]:
    """Return the rows that an earlier call wrote to `<out>.json`, if it is to go on."""
    if not resume or out is None or not out.with_suffix(".json").exists():
        return []
    rows: list[dict[str, Any]] = json.loads(out.with_suffix(".json").read_text())[
        "rows"
    ]
    return rows


def keep_rows(
    out: Path | None,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    page: Callable[[dict[str, Any], list[dict[str, Any]]], str],
) -> None:
    """Write what `kept_rows` reads, and the page of it; nothing without a path.

    Args:
        out: Path without a suffix.
        settings: What `describe_run` says, and more.
        rows: Results so far.
        page: Makes Markdown of both.
    """
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"settings": settings, "rows": rows}, indent=1)
    out.with_suffix(".json").write_text(data + "\n")
    out.with_suffix(".md").write_text(page(settings, rows))
