"""Builds the paper GPU's library, and starts processes that have paper GPUs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

LIBRARY = "PAPER_CUDA_LIBRARY"
"""Environment variable that holds the library's path."""
_ROOT = Path(__file__).resolve().parents[2]
_SOURCE = Path(__file__).with_name("paper_cuda.cpp")
_FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared")
_LIBRARIES = ("-lc10", "-ltorch_cpu")
_TORCH_RELEASES = ("2.13.", "2.14.")
"""The library is written against torch's own headers, which each release changes."""


def _why_not() -> str:
    """Why there can be no paper GPU here; empty if there can."""
    if not sys.platform.startswith("linux"):
        return "the paper GPU needs Linux"
    if shutil.which("g++") is None:
        return "the paper GPU is built by g++, which is not installed"
    if torch.version.cuda is not None:
        return "the paper GPU needs a build of torch for CPUs"
    if not torch.__version__.startswith(_TORCH_RELEASES):
        return (
            f"the paper GPU is written against torch {' and '.join(_TORCH_RELEASES)}, "
            f"this is {torch.__version__}"
        )
    return ""


needs_paper_gpus = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


def _build() -> Path:
    """Return the library's path; compile it if the user's cache does not hold it.

    Its name is made of the source, the flags and torch's release.
    """
    key = hashlib.sha256(_SOURCE.read_bytes())
    key.update(repr((_FLAGS, _LIBRARIES, torch.__version__)).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "torchrec_neuroshard" / "paper_gpu"
    library = folder / f"paper_cuda_{key.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    installed = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        built = Path(temporary) / library.name
        paths = (f"-I{installed / 'include'}", f"-L{installed / 'lib'}")
        command = ["g++", *_FLAGS, *paths, str(_SOURCE), *_LIBRARIES, "-o", str(built)]
        subprocess.run(command, check=True)
        built.replace(library)  # whole or not at all, whoever else builds it
    return library


def run_inside(function: str, *arguments: str) -> None:
    """Call MODULE:FUNCTION in a process that has paper GPUs; raise if it fails."""
    module, _, name = function.partition(":")
    code = f"import tests.paper_gpu.device, sys, {module} as m; m.{name}(*sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=_ROOT,
        env={**os.environ, LIBRARY: str(_build()), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        timeout=600,
        check=True,
    )
