"""`neuroshard doctor`: do the installed torch, fbgemm and torchrec fit together?

Three packages of one release are needed, and pip alone gets this wrong: torchrec asks
for an unpinned `fbgemm-gpu`, so that installing it beside `fbgemm-gpu-cpu` writes the
newest CUDA build over the CPU one's files.

Versions are read from package metadata. None of the three is imported, since importing
a clashing set is what crashes; `--load` does that in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys
import traceback
from dataclasses import dataclass

from torchrec_neuroshard.errors import EnvironmentMismatchError
from torchrec_neuroshard.progress import phase

__all__ = [
    "RELEASES",
    "Installed",
    "add_doctor",
    "explain_failure",
    "find_problems",
    "load_frameworks",
    "mend_command",
    "read_installed",
    "run_doctor",
]

RELEASES = {
    "1.6": ("2.11", "1.6.1"),
    "1.7": ("2.12", "1.7.0"),
    "1.8": ("2.13", "1.8.0"),
    "1.9": ("2.14", "1.9.2"),
}
"""Release of torchrec and of fbgemm that is supported -> the release of torch that
belongs to it, and the version of torchrec that the tests run on (`make test-versions`).

Source: the compatibility table in FBGEMM's `fbgemm_gpu/__init__.py` (1.6 to 1.8);
1.9 continues the series.
"""

DEFAULT_RELEASE = "1.8"
"""The release that this package is developed and measured on."""

_FBGEMM = (
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu-nightly",
    "fbgemm-gpu-nightly-cpu",
)
"""Distributions that all install the same folder, `fbgemm_gpu/`."""
_REQUIREMENTS = ("pyre-extensions", "tensordict", "torchmetrics", "tqdm")
"""What torchrec imports beside torch and fbgemm, left out by `--no-deps`."""
_FRAMEWORKS = ("torch", "fbgemm_gpu", "torchrec")
_LOAD_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """Versions in a Python environment; None where a package is absent."""

    torch: str | None = None
    fbgemm: tuple[tuple[str, str], ...] = ()
    """Name and version of each installed distribution that holds fbgemm."""
    torchrec: str | None = None
    missing: tuple[str, ...] = ()
    """What torchrec needs besides and that is not installed."""


def read_installed() -> Installed:
    """Return what the running interpreter has, without importing it."""
    return Installed(
        torch=_version("torch"),
        fbgemm=tuple((name, v) for name in _FBGEMM if (v := _version(name))),
        torchrec=_version("torchrec") or _version("torchrec-nightly"),
        missing=tuple(name for name in _REQUIREMENTS if not _version(name)),
    )


def find_problems(installed: Installed) -> list[str]:
    """Say what is missing, clashes or does not belong together."""
    found = {"torch": installed.torch, "torchrec": installed.torchrec}
    found["fbgemm"] = installed.fbgemm[0][1] if installed.fbgemm else None
    problems = [f"{name} is not installed" for name, v in found.items() if v is None]
    if installed.missing:
        problems.append(f"torchrec needs {', '.join(installed.missing)}, not installed")
    if len(installed.fbgemm) > 1:
        listed = " and ".join(map(" ".join, installed.fbgemm))
        problems.append(
            f"{listed} are both installed, and both own the folder fbgemm_gpu"
        )
    # A nightly's version says nothing of the release that it belongs to: torch writes
    # 2.14.0.dev20260801, fbgemm and torchrec write 2026.8.1.
    dated = {
        name: version
        for name, version in found.items()
        if version is not None and not re.search(r"\.dev|^20\d\d\.", version)
    }
    if len({_release(name, version) for name, version in dated.items()}) > 1:
        release = _target(installed)
        problems.append(
            f"{', '.join(map(' '.join, dated.items()))} are of different releases; "
            f"torch {RELEASES[release][0]} belongs with fbgemm {release} and torchrec "
            f"{release}"
        )
    return problems


def mend_command(installed: Installed) -> str:
    """Return the one shell command that makes a sound set of any environment.

    The release is that of the installed torch, the largest download. The build of
    fbgemm is for GPUs where that one alone is installed.
    """
    release = _target(installed)
    only_gpu = [name for name, _ in installed.fbgemm] == ["fbgemm-gpu"]
    fbgemm = "fbgemm-gpu" if only_gpu else "fbgemm-gpu-cpu"
    pip = f"{shlex.quote(sys.executable or 'python')} -m pip"
    torch = f'"torch=={RELEASES[release][0]}.*"'
    return " && ".join(
        (
            # All at once: removing one takes the shared files of the others along.
            f"{pip} uninstall -y {' '.join(_FBGEMM)}",
            f"{pip} install {torch} torchmetrics==1.0.3 tensordict tqdm "
            "pyre-extensions iopath numpy",
            # Never without --no-deps: torchrec asks for the newest CUDA fbgemm.
            f'{pip} install --no-deps "{fbgemm}=={release}.*" "torchrec=={release}.*"',
        )
    )


def _target(installed: Installed) -> str:
    """Release to mend towards."""
    return (
        _release("torch", installed.torch)
        or _release("torchrec", installed.torchrec)
        or DEFAULT_RELEASE
    )


def _release(package: str, version: str | None) -> str | None:
    """Release in `RELEASES` that a package's version belongs to; None if none does."""
    match = re.match(r"\d+\.\d+", version or "")
    for release, (torch, _) in RELEASES.items():
        if match and match.group() == (torch if package == "torch" else release):
            return release
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def explain_failure(what: str, error: Exception) -> EnvironmentMismatchError | None:
    """Tell a broken installation from a fault of our own.

    Args:
        what: The name that was being loaded.
        error: What loading it raised.

    Returns:
        The error to raise instead, when torch, fbgemm or torchrec is missing or
        fails in a set that does not belong together; None for any other cause.
    """
    causes = find_problems(read_installed())
    frames = traceback.walk_tb(error.__traceback__)
    passed = [frame.f_globals.get("__name__") for frame, _ in frames] if causes else []
    missing = error.name if isinstance(error, ImportError) else None
    if not any(_is_of_frameworks(module) for module in (missing, *passed)):
        return None
    found = f" ({'; '.join(causes)})" if causes else ""
    return EnvironmentMismatchError(
        f"{what} needs torch, fbgemm and torchrec of one release, but loading them "
        f"failed: {error}{found}. Run `{shlex.quote(sys.executable)} -m "
        "torchrec_neuroshard doctor`: it prints the command that mends this."
    )


def _is_of_frameworks(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FRAMEWORKS


def load_frameworks() -> str | None:
    """Import the three packages in a new process and run one embedding kernel.

    Returns:
        None when that worked, else the last line that it printed.
    """
    # An operator call, since a library of the wrong build may load and then crash.
    code = (
        "import torch, fbgemm_gpu, torchrec\n"
        "lengths = torch.ones(3, dtype=torch.int64)\n"
        "offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)\n"
        "assert offsets.tolist() == [0, 1, 2, 3], offsets\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LOAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"still loading after {_LOAD_TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"it ended with code {done.returncode}"


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the options of `neuroshard doctor`."""
    parser.add_argument(
        "--load",
        action="store_true",
        help="also import the packages and run a kernel, in a process of its own",
    )


def run_doctor(args: argparse.Namespace) -> int:
    """Print what is installed and the command that mends it.

    Args:
        args: `load`, as parsed from the options.

    Returns:
        1 if anything keeps the packages from working together, else 0.
    """
    installed = read_installed()
    fbgemm = ", ".join(map(" ".join, installed.fbgemm))
    print(f"python    {platform.python_version()}  {sys.executable}")
    print(f"torch     {installed.torch or 'missing'}")
    print(f"fbgemm    {fbgemm or 'missing'}")
    print(f"torchrec  {installed.torchrec or 'missing'}")
    problems = find_problems(installed)
    if args.load and not problems:
        with phase("loading torch, fbgemm and torchrec"):
            failure = load_frameworks()
        if failure is not None:
            problems = [f"versions fit, but the packages do not load: {failure}"]
    if installed.torchrec and _release("torchrec", installed.torchrec) is None:
        first, *_, last = RELEASES
        print(f"\nwarning: torchrec {installed.torchrec} is none of {first} to {last}")
    for problem in problems:
        print(f"\nerror: {problem}")
    if problems:
        print("this mends it (with a GPU, put fbgemm-gpu for fbgemm-gpu-cpu):")
        print(f"    {mend_command(installed)}")
        return 1
    print("\nok: these belong together")
    return 0
