"""`neuroshard doctor`: do the installed torch, fbgemm and torchrec belong together?

All three packages must be of one release, and pip alone gets this wrong: torchrec
requires an unpinned `fbgemm-gpu`, so installing torchrec beside `fbgemm-gpu-cpu`
overwrites the files of the CPU build with the newest CUDA build.

Versions are read from package metadata. The packages are not imported, since importing
mismatched packages can crash; `--load` imports them in a separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Mapping

from torchrec_neuroshard.errors import EnvironmentMismatchError
from torchrec_neuroshard.progress import phase

RELEASES = {
    "1.6": ("2.11", "1.6.1"),
    "1.7": ("2.12", "1.7.0"),
    "1.8": ("2.13", "1.8.0"),
    "1.9": ("2.14", "1.9.2"),
}
"""Supported release of torchrec and fbgemm -> the matching release of torch, and the
version of torchrec that the tests run on (`make test-versions`).

Source: the compatibility table in FBGEMM's `fbgemm_gpu/__init__.py` (1.6 to 1.8);
1.9 continues the series.
"""

DEFAULT_RELEASE = "1.8"
"""Release that this package is developed and measured on. On CPUs, the backward of
FBGEMM 1.9's row-wise Adagrad takes twice as long, in places 15 times
(`benchmarks/results/fbgemm_19_202611.md`)."""

_FBGEMM = (
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu-nightly",
    "fbgemm-gpu-nightly-cpu",
)
"""Distributions that install the same folder, `fbgemm_gpu/`."""
_TORCHREC = ("torchrec", "torchrec-nightly")
_REQUIREMENTS = ("pyre-extensions", "tensordict", "torchmetrics", "tqdm")
"""Other packages that torchrec imports; `--no-deps` does not install them."""
_FRAMEWORKS = ("torch", "fbgemm_gpu", "torchrec")
_LOAD_TIMEOUT_S = 300


def read_installed() -> dict[str, str]:
    """Return package -> installed version, without importing the packages."""
    found = {}
    for name in ("torch", *_FBGEMM, *_TORCHREC, *_REQUIREMENTS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def find_problems(installed: Mapping[str, str]) -> list[str]:
    """Return a sentence for each package that is missing, clashes or mismatches."""
    fbgemm = [name for name in _FBGEMM if name in installed]
    found = _versions(installed)
    problems = [f"{name} is not installed" for name, v in found.items() if v is None]
    if missing := [name for name in _REQUIREMENTS if name not in installed]:
        problems.append(f"torchrec needs {', '.join(missing)}: not installed")
    if len(fbgemm) > 1:
        listed = " and ".join(f"{name} {installed[name]}" for name in fbgemm)
        problems.append(f"{listed} are both installed and overwrite each other's files")
    # A nightly's version does not tell its release: torch writes 2.14.0.dev20260801,
    # fbgemm and torchrec write 2026.8.1.
    dated = {
        name: version
        for name, version in found.items()
        if version is not None and not re.search(r"\.dev|^20\d\d\.", version)
    }
    if len({_release(name, version) for name, version in dated.items()}) > 1:
        release = _target(installed)
        problems.append(
            f"{', '.join(map(' '.join, dated.items()))} are of different releases; "
            f"torch {RELEASES[release][0]} needs fbgemm {release} and torchrec "
            f"{release}"
        )
    return problems


def fix_command(installed: Mapping[str, str]) -> str:
    """Return the shell command that installs matching packages in any environment.

    The release is that of the installed torch, which is the largest download. fbgemm's
    GPU build is chosen only if it alone is installed.
    """
    release = _target(installed)
    only_gpu = [name for name in _FBGEMM if name in installed] == ["fbgemm-gpu"]
    fbgemm = "fbgemm-gpu" if only_gpu else "fbgemm-gpu-cpu"
    pip = f"{shlex.quote(sys.executable or 'python')} -m pip"
    torch = f'"torch=={RELEASES[release][0]}.*"'
    return " && ".join(
        (
            # All at once: removing one deletes files that the others share.
            f"{pip} uninstall -y {' '.join(_FBGEMM)}",
            f"{pip} install {torch} torchmetrics==1.0.3 tensordict tqdm "
            "pyre-extensions iopath numpy",
            # Always --no-deps: torchrec requires the newest CUDA build of fbgemm.
            f'{pip} install --no-deps "{fbgemm}=={release}.*" "torchrec=={release}.*"',
        )
    )


def _target(installed: Mapping[str, str]) -> str:
    """Release that the packages should have."""
    known = [_release(name, installed.get(name)) for name in ("torch", "torchrec")]
    return next(filter(None, known), DEFAULT_RELEASE)


def _versions(installed: Mapping[str, str]) -> dict[str, str | None]:
    """Return the version of each framework, whichever distribution brought it."""
    names = {"torch": ("torch",), "torchrec": _TORCHREC, "fbgemm": _FBGEMM}
    return {
        framework: next((installed[n] for n in own if n in installed), None)
        for framework, own in names.items()
    }


def _release(package: str, version: str | None) -> str | None:
    """Release in `RELEASES` that a package's version belongs to, or None."""
    match = re.match(r"\d+\.\d+", version or "")
    for release, (torch, _) in RELEASES.items():
        if match and match.group() == (torch if package == "torch" else release):
            return release
    return None


def explain_failure(what: str, error: Exception) -> EnvironmentMismatchError | None:
    """Return an error that explains a broken installation; None for any other cause.

    Args:
        what: The name that was being loaded.
        error: The error that loading it raised.

    Returns:
        The error to raise instead if torch, fbgemm or torchrec is missing, or fails
        while the versions do not match; None otherwise.
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
        "torchrec_neuroshard doctor`: it prints the command that fixes this."
    )


def _is_of_frameworks(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FRAMEWORKS


def load_frameworks() -> str | None:
    """Import the three packages in a new process and run one embedding kernel.

    Returns:
        None if that worked, else the last line that the process printed.
    """
    # Call an operator, since a library of the wrong build may load and then crash.
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
    return lines[-1].strip() if lines else f"exit code {done.returncode}"


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the options of `neuroshard doctor`."""
    parser.add_argument(
        "--load",
        action="store_true",
        help="also import the packages and run a kernel, in a separate process",
    )


def run_doctor(args: argparse.Namespace) -> int:
    """Print whether the packages belong together, how to fix them, and what is there.

    Args:
        args: `load`, as parsed from the options.

    Returns:
        1 if anything keeps the packages from working together, else 0.
    """
    installed = read_installed()
    problems = find_problems(installed)
    if args.load and not problems:
        with phase("loading torch, fbgemm and torchrec"):
            failure = load_frameworks()
        if failure is not None:
            problems = [f"versions match, but the packages do not load: {failure}"]
    if problems:
        print(f"not ok: {'; '.join(problems)}. To fix this, run")
        print(f"    {fix_command(installed)}")
        print("(on a machine with a GPU, replace fbgemm-gpu-cpu with fbgemm-gpu)")
    else:
        print("ok: torch, fbgemm and torchrec belong together")
    fbgemm = ", ".join(f"{n} {installed[n]}" for n in _FBGEMM if n in installed)
    torchrec = _versions(installed)["torchrec"]
    if torchrec and _release("torchrec", torchrec) is None:
        first, *_, last = RELEASES
        print(
            f"warning: torchrec {torchrec} is not supported; supported releases are "
            f"{first} to {last}"
        )
    print(f"python    {platform.python_version()}  {sys.executable}")
    print(f"torch     {installed.get('torch', 'missing')}")
    print(f"fbgemm    {fbgemm or 'missing'}")
    print(f"torchrec  {torchrec or 'missing'}")
    return 1 if problems else 0
