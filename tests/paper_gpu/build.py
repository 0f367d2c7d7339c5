"""Builds the paper GPU's library, once for a source and a release of torch.

Also how processes get it: `environment` makes Python load it before anything else, in
children and their children (torchrun's ranks) alike.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = "PAPER_CUDA_LIBRARY"
"""Environment variable that holds the library's path; Python loads what it names."""
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_SOURCE = _HERE / "paper_cuda.cpp"
_STAND_IN = _HERE / "no_cuda.cpp"
_FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared")
_LIBRARIES = ("-lc10", "-ltorch_cpu")
_TORCH_RELEASES = ("2.13.", "2.14.")
"""The library is written against torch's own headers, which each release changes."""


def why_not() -> str:
    """Why there can be no paper GPU here; empty if there can."""
    import torch

    if not sys.platform.startswith("linux"):
        return "the paper GPU needs Linux"
    if shutil.which("g++") is None:
        return "the paper GPU is built by g++, which is not installed"
    if torch.cuda.is_available():
        return "there is a real GPU here"
    if not torch.__version__.startswith(_TORCH_RELEASES):
        return (
            f"the paper GPU is written against torch {' and '.join(_TORCH_RELEASES)}, "
            f"this is {torch.__version__}"
        )
    return ""


def build() -> Path:
    """Return the library's path; compiles it where that was not done before.

    It is kept in the user's cache folder (`XDG_CACHE_HOME`), named after its sources,
    the flags and the release of torch. Beside it, for a build of torch for CUDA, lies
    what stands in for that build's kernels (`stand_in`).

    Raises:
        RuntimeError: The compiler failed; what it said.
    """
    import torch

    key = hashlib.sha256(_SOURCE.read_bytes() + _STAND_IN.read_bytes())
    key.update(
        repr((_FLAGS, _LIBRARIES, torch.__version__, sys.version_info[:2])).encode()
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "torchrec_neuroshard" / "paper_gpu"
    library = folder / f"paper_cuda_{key.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    installed = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        built = Path(temporary) / library.name
        if torch.version.cuda is not None:
            _build_stand_in(stand_in(built), installed)
            stand_in(built).replace(stand_in(library))
        _compile(built, installed, _SOURCE, f"-L{installed / 'lib'}", *_LIBRARIES)
        built.replace(library)  # whole or not at all, whoever else builds it
    return library


def stand_in(library: Path) -> Path:
    """Return the path of what stands in for `libtorch_cuda.so`, beside a library."""
    return library.with_name(f"no_cuda_{library.name}")


def _build_stand_in(target: Path, installed: Path) -> None:
    """Build a library without kernels that torch's Python module takes for CUDA's."""
    folder = installed / "lib"
    own = target.with_suffix(".own.so")
    _compile(own, installed, _STAND_IN)
    wanted = _symbols("--undefined-only", folder / "libtorch_python.so")
    of_cuda = _symbols("--defined-only", *folder.glob("libtorch_[cn][uv]*.so"))
    names = sorted((wanted & of_cuda) - _symbols("--defined-only", own))
    functions = target.with_suffix(".s")
    functions.write_text(
        "".join(f".globl {n}\n.type {n},@function\n{n}: ud2\n" for n in names)
        + '.section .note.GNU-stack,"",@progbits\n'
    )
    soname = "-Wl,-soname,libtorch_cuda.so"  # the loader looks for no other then
    _compile(target, installed, _STAND_IN, str(functions), soname)


def _symbols(kind: str, *libraries: Path) -> set[str]:
    done = subprocess.run(
        ["nm", "-D", kind, *map(str, libraries)],
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[-1] for line in done.stdout.splitlines() if " " in line}


def _compile(target: Path, installed: Path, source: Path, *more: str) -> None:
    include = f"-I{installed / 'include'}"
    command = ["g++", *_FLAGS, include, str(source), *more, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ cannot build {source}:\n{done.stderr[-4000:]}")


def environment(library: Path) -> dict[str, str]:
    """Return this process's environment with the paper GPUs that `build` returned."""
    found = dict(os.environ)
    paths = [str(_HERE / "startup"), str(_ROOT), str(_ROOT / "benchmarks")]
    paths += [p for p in (found.get("PYTHONPATH"),) if p]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    found[LIBRARY] = str(library)
    found.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return found
