"""Date, commit and machine of a result."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from torchrec_neuroshard.measure.kernels import device_fingerprint


def commit() -> str:
    """Return the short hash of the checked-out commit.

    "-dirty" is added if tracked files have changed, except those in
    benchmarks/results.
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


def describe_run(
    device: torch.device | str = "cpu", launcher: str = "python"
) -> dict[str, Any]:
    """Return the command, commit, date, machine and versions of a result.

    Args:
        device: The measured device.
        launcher: First word of the command, `python` or `torchrun`.
    """
    libraries = ("torch", "torchrec", "numpy", "scipy")
    return {
        "command": shlex.join([launcher, *map(_shown, sys.argv)]),
        "commit": commit(),
        "date": now(),
        "hardware": asdict(device_fingerprint(torch.device(device), 1)),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in libraries},
        },
        "load_average": os.getloadavg(),
    }


def _shown(argument: str) -> str:
    """Return an argument, or NAME=PATH, without this machine's folders."""
    name, equals, value = argument.rpartition("=")
    path = Path(value)
    return f"{name}{equals}{path.name}" if path.is_absolute() else argument
