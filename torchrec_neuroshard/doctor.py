"""`neuroshard doctor`: do the installed torch, fbgemm and torchrec fit together?

Three packages of one release are needed, in one build (CPU or CUDA), and pip alone
gets this wrong: torchrec asks for an unpinned `fbgemm-gpu`, so that installing it
beside `fbgemm-gpu-cpu` writes the newest CUDA build over the CPU one's files.

Everything here is read from package metadata and files. None of the three is
imported, since importing a clashing set is what crashes; `--load` does that in a
process of its own.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchrec_neuroshard.errors import EnvironmentMismatchError
from torchrec_neuroshard.progress import phase

__all__ = [
    "FBGEMM_DISTRIBUTIONS",
    "RELEASES",
    "Installed",
    "Problem",
    "add_arguments",
    "diagnose",
    "explain_failure",
    "load_frameworks",
    "read_installed",
    "render",
    "run",
]

RELEASES = {
    "1.2": "2.7",
    "1.3": "2.8",
    "1.4": "2.9",
    "1.5": "2.10",
    "1.6": "2.11",
    "1.7": "2.12",
    "1.8": "2.13",
    "1.9": "2.14",
}
"""Release of torchrec and of fbgemm -> the torch release that belongs to it.

Source: the compatibility table in FBGEMM's `fbgemm_gpu/__init__.py` (1.2 to 1.8);
1.9 continues the series.
"""

DEFAULT_RELEASE = "1.8"
"""The release that this package is developed and measured on."""

SUPPORTED_RELEASES = {"1.6": "1.6.1", "1.7": "1.7.0", "1.8": "1.8.0", "1.9": "1.9.2"}
"""TorchRec releases whose planner interfaces this package supports -> the version that
the tests run on (`make test-versions`)."""

FBGEMM_DISTRIBUTIONS = (
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu-nightly",
    "fbgemm-gpu-nightly-cpu",
)
"""Distributions that all install the same folder, `fbgemm_gpu/`."""

TORCHREC_REQUIREMENTS = ("pyre-extensions", "tensordict", "torchmetrics", "tqdm")
"""What torchrec imports beside torch and fbgemm, left out by `--no-deps`."""

_FRAMEWORKS = ("torch", "fbgemm_gpu", "torchrec")

_LOAD_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """What one Python environment holds, as far as this package cares.

    Versions keep their local label, such as `2.13.0+cpu`.
    """

    python: str
    """Version of the interpreter."""
    executable: str = "python"
    """Command or path of the interpreter, for the repair commands."""
    torch: str | None = None
    """Version of torch; None when absent."""
    torch_build: str | None = None
    """`cpu`, `cuda 13.0`, `rocm 6.4` ...; None when it cannot be told."""
    fbgemm: tuple[tuple[str, str], ...] = ()
    """Name and version of each installed distribution that holds fbgemm."""
    fbgemm_files: bool = False
    """Whether the folder `fbgemm_gpu` can be imported from."""
    fbgemm_files_version: str | None = None
    """Version that the files in that folder state; None when they do not."""
    fbgemm_build: str | None = None
    """Build that those files state: `cpu`, `cuda` ...; None when they do not."""
    torchrec: str | None = None
    """Version of torchrec; None when absent."""
    missing: tuple[str, ...] = ()
    """Names out of `TORCHREC_REQUIREMENTS` that are not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong, and the commands that put it right."""

    severity: Literal["error", "warning"]
    """A `warning` leaves a working installation, for some purposes."""
    message: str
    """What clashes, with the versions found."""
    repair: tuple[str, ...] = ()
    """Shell commands, to be run in this order."""


def read_installed() -> Installed:
    """Read what the running interpreter would import, without importing it.

    Returns:
        The environment's description, for `diagnose`.
    """
    torch_folder = _package_folder("torch")
    fbgemm_folder = _package_folder("fbgemm_gpu")
    files_version, fbgemm_build = _fbgemm_target(fbgemm_folder)
    fbgemm = [(name, _version(name)) for name in FBGEMM_DISTRIBUTIONS]
    return Installed(
        python=platform.python_version(),
        executable=sys.executable or "python",
        torch=(_version("torch") or _stated_version(torch_folder))
        if torch_folder
        else None,
        torch_build=_torch_build(torch_folder),
        fbgemm=tuple((name, version) for name, version in fbgemm if version),
        fbgemm_files=fbgemm_folder is not None,
        fbgemm_files_version=files_version,
        fbgemm_build=fbgemm_build,
        torchrec=(_version("torchrec") or _version("torchrec-nightly"))
        if _package_folder("torchrec")
        else None,
        missing=tuple(name for name in TORCHREC_REQUIREMENTS if not _version(name)),
    )


def diagnose(installed: Installed) -> list[Problem]:
    """Find what is missing, clashes or does not belong together.

    Args:
        installed: what an environment holds.

    Returns:
        The problems, gravest first; empty when everything fits. The repairs of one
        environment agree with each other: each leads to the same set of versions.
    """
    missing = list(_find_missing(installed))
    clashes = list(_find_fbgemm_clashes(installed))
    replaces_fbgemm = any(clash.severity == "error" for clash in clashes)
    return sorted(
        [
            *missing,
            *clashes,
            *_find_release_clashes(installed, replaces_fbgemm),
            *_find_support_limits(installed),
        ],
        key=lambda problem: problem.severity,  # "error" < "warning"; stable
    )


def _find_missing(installed: Installed) -> Iterator[Problem]:
    release, build = _target(installed)
    if installed.torch is None:
        yield Problem(
            severity="error",
            message="torch is not installed",
            repair=_recipe(installed, release, build),
        )
        return
    if installed.torchrec is None:
        yield Problem(
            severity="error",
            message="torchrec is not installed",
            repair=_recipe(installed, release, build),
        )
    if not installed.fbgemm and not installed.fbgemm_files:
        yield Problem(
            severity="error",
            message="fbgemm is not installed; torchrec cannot be imported without it",
            repair=_recipe(installed, release, build),
        )
    if installed.missing and installed.torchrec is not None:
        yield Problem(
            severity="error",
            message=f"torchrec needs {', '.join(installed.missing)}, not installed",
            repair=(_install_requirements(installed, f"torch=={installed.torch}"),),
        )


def _find_fbgemm_clashes(installed: Installed) -> Iterator[Problem]:
    release, build = _target(installed)
    names = [name for name, _ in installed.fbgemm]
    reinstall = _replace_fbgemm(installed, release, build)
    if len(names) > 1:
        listed = " and ".join(f"{name} {version}" for name, version in installed.fbgemm)
        yield Problem(
            severity="error",
            message=f"{listed} are both installed, and both own the folder fbgemm_gpu: "
            f"the files there now are {_describe_files(installed)}",
            repair=reinstall,
        )
    elif names and not installed.fbgemm_files:
        yield Problem(
            severity="error",
            message=f"{names[0]} is listed as installed, but the folder fbgemm_gpu is "
            "gone or empty, as after uninstalling another build of it",
            repair=reinstall,
        )
    elif names and _overwritten(installed):
        name, version = installed.fbgemm[0]
        yield Problem(
            severity="error",
            message=f"{name} {version} is listed as installed, but the files in the "
            f"folder fbgemm_gpu are {_describe_files(installed)}",
            repair=reinstall,
        )
    torch_kind, fbgemm_kind = _kind(installed.torch_build), installed.fbgemm_build
    if torch_kind is None or fbgemm_kind is None or torch_kind == fbgemm_kind:
        return
    if fbgemm_kind == "cpu":
        # The CPU build links only torch's CPU libraries, which every build holds.
        yield Problem(
            severity="warning",
            message=f"fbgemm is a CPU build and torch {installed.torch} a {torch_kind} "
            "build: planning works, tables on a GPU do not",
            repair=reinstall,
        )
    elif len(names) < 2:
        yield Problem(
            severity="error",
            message=f"fbgemm is a {fbgemm_kind} build, but torch {installed.torch} is "
            f"a {torch_kind} build: importing fbgemm_gpu fails",
            repair=reinstall,
        )


def _find_release_clashes(
    installed: Installed, replaces_fbgemm: bool
) -> Iterator[Problem]:
    release, build = _target(installed)
    versions = {"torch": installed.torch, "torchrec": installed.torchrec}
    if not replaces_fbgemm:  # else that repair brings the right release already
        versions["fbgemm"] = _fbgemm_version(installed)
    found = {n: _release(n, version) for n, version in versions.items() if version}
    # One known release dates an unknown one as foreign, unless that is a nightly.
    unknown = [n for n, release_of in found.items() if release_of is None]
    nightly = [n for n in unknown if _is_nightly(versions[n])]
    clashing = [n for n in found if n not in nightly]
    releases = {found[n] for n in clashing}
    if len(releases) > 1:
        listed = ", ".join(f"{name} {versions[name]}" for name in clashing)
        yield Problem(
            severity="error",
            message=f"{listed} are of different releases; {_belongs(release)}",
            repair=_recipe(installed, release, build),
        )
        unknown = nightly
    if unknown:
        listed = ", ".join(f"{name} {versions[name]}" for name in unknown)
        yield Problem(
            severity="warning",
            message=f"{listed}: not a release that the table knows "
            f"({', '.join(RELEASES)}), so nothing says what belongs to it",
        )


def _find_support_limits(installed: Installed) -> Iterator[Problem]:
    release = _minor(installed.torchrec)
    first, *_, last = SUPPORTED_RELEASES
    if release in RELEASES and release not in SUPPORTED_RELEASES:
        yield Problem(
            severity="warning",
            message=f"torchrec {installed.torchrec} is older than what is supported "
            f"({first} to {last})",
        )


def _target(installed: Installed) -> tuple[str, str]:
    """Release and build to repair towards: torch's own, as the largest download."""
    release = (
        _release("torch", installed.torch)
        or _release("torchrec", installed.torchrec)
        or DEFAULT_RELEASE
    )
    return release, "cuda" if _kind(installed.torch_build) == "cuda" else "cpu"


def _recipe(installed: Installed, release: str, build: str) -> tuple[str, ...]:
    """Commands for whatever is not of that release yet, in the one order that works."""
    torch_pin = f"torch=={RELEASES[release]}.*"
    steps: list[str] = []
    if _release("torch", installed.torch) != release:
        steps.append(f'{_pip(installed)} install "{torch_pin}"')
    if _release("fbgemm", _fbgemm_version(installed)) != release:
        steps += _replace_fbgemm(installed, release, build)
    if _release("torchrec", installed.torchrec) != release:
        # Never without --no-deps: torchrec asks for the newest CUDA fbgemm.
        pin = _pin("torchrec", release)
        steps.append(f"{_pip(installed)} install --no-deps {pin}")
    return *steps, _install_requirements(installed, torch_pin)


def _replace_fbgemm(installed: Installed, release: str, build: str) -> tuple[str, ...]:
    name = "fbgemm-gpu" if build == "cuda" else "fbgemm-gpu-cpu"
    install = f"{_pip(installed)} install --no-deps {_pin(name, release)}"
    if not installed.fbgemm:
        return (install,)
    # All of them at once: removing one takes the shared files of the others along.
    names = " ".join(name for name, _ in installed.fbgemm)
    return f"{_pip(installed)} uninstall -y {names}", install


def _install_requirements(installed: Installed, torch_pin: str) -> str:
    # torch is named again so that no requirement can replace it.
    return (
        f"{_pip(installed)} install tensordict torchmetrics==1.0.3 tqdm "
        f'pyre-extensions iopath numpy "{torch_pin}"'
    )


def _pip(installed: Installed) -> str:
    return f"{shlex.quote(installed.executable)} -m pip"


def _pin(name: str, release: str) -> str:
    return f'"{name}=={release}.*"'


def _belongs(release: str) -> str:
    return (
        f"torch {RELEASES[release]} belongs with fbgemm {release} and torchrec "
        f"{release}"
    )


def _overwritten(installed: Installed) -> bool:
    """Whether the files of the one distribution are those of another build."""
    name, version = installed.fbgemm[0]
    stated = installed.fbgemm_files_version
    if stated is not None and stated.partition("+")[0] != version.partition("+")[0]:
        return True
    # The other way round means nothing: `fbgemm-gpu` is also the CPU build's name
    # on the index of PyTorch's own CPU builds.
    return name.endswith("-cpu") and installed.fbgemm_build not in (None, "cpu")


def _describe_files(installed: Installed) -> str:
    version = installed.fbgemm_files_version or "of an unknown version"
    return f"{version}, {installed.fbgemm_build or 'unknown'} build"


def _fbgemm_version(installed: Installed) -> str | None:
    if installed.fbgemm_files_version is None and installed.fbgemm:
        return installed.fbgemm[0][1]
    return installed.fbgemm_files_version


def _kind(build: str | None) -> str | None:
    return None if build is None else build.partition(" ")[0]


def _is_nightly(version: str | None) -> bool:
    """Whether a version says nothing of the release that it belongs to."""
    # torch writes 2.14.0.dev20260801, fbgemm and torchrec write 2026.8.1.
    return _minor(version) is None or bool(re.search(r"\.dev|^20\d\d\.", version or ""))


def _minor(version: str | None) -> str | None:
    match = re.match(r"\d+\.\d+", version or "")
    return match.group() if match else None


def _release(package: str, version: str | None) -> str | None:
    """Release in `RELEASES` that a package's version belongs to; None if none does."""
    found = _minor(version)
    if package == "torch":
        return next((ours for ours, its in RELEASES.items() if its == found), None)
    return found if found in RELEASES else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_folder(package: str) -> Path | None:
    """Folder that `import package` would load; None if it would find none."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if not isinstance(spec, importlib.machinery.ModuleSpec) or spec.origin is None:
        return None  # absent, or a folder with no __init__.py
    return Path(spec.origin).parent


def _stated_version(folder: Path) -> str:
    text = _read(folder, "version.py") or ""
    match = re.search(r"^__version__[^=\n]*=\s*['\"]([^'\"]+)", text, re.M)
    return match.group(1) if match else "unknown"


def _torch_build(folder: Path | None) -> str | None:
    text = _read(folder, "version.py")
    if text is None:
        return None
    for kind, variable in (("cuda", "cuda"), ("rocm", "hip"), ("xpu", "xpu")):
        match = re.search(rf"^{variable}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.M)
        if match:
            return f"{kind} {match.group(1)}"
    return "cpu"


def _fbgemm_target(folder: Path | None) -> tuple[str | None, str | None]:
    """Version and build that fbgemm's own files state."""
    text = _read(folder, "docs/target.default.json.py")  # as in 1.6 to 1.8
    if text is not None:
        try:
            stated = json.loads(text)
        except ValueError:
            return None, None
        return stated.get("version"), stated.get("variant")
    text = _read(folder, "docs/version.py") or ""  # as in 1.2
    pattern = r"^__(version|variant)__[^=\n]*=\s*\"([^\"]+)\""
    found: dict[str, str] = dict(re.findall(pattern, text, re.M))
    return found.get("version"), found.get("variant")


def _read(folder: Path | None, name: str) -> str | None:
    try:
        return None if folder is None else (folder / name).read_text("utf-8")
    except OSError:
        return None


def explain_failure(what: str, error: Exception) -> EnvironmentMismatchError | None:
    """Tell a broken installation from a fault of our own.

    Args:
        what: the name that was being loaded.
        error: what loading it raised.

    Returns:
        The error to raise instead, when torch, fbgemm or torchrec is missing or
        fails in a set that does not belong together; None for any other cause.
    """
    causes = [p.message for p in diagnose(read_installed()) if p.severity == "error"]
    is_import_error = isinstance(error, ImportError)
    if not (
        (is_import_error and _top_level(getattr(error, "name", None)) in _FRAMEWORKS)
        or (causes and _passes_through_frameworks(error))
    ):
        return None
    found = f" ({'; '.join(causes)})" if causes else ""
    return EnvironmentMismatchError(
        f"{what} needs torch, fbgemm and torchrec of one release, but loading them "
        f"failed: {error}{found}. Run `{shlex.quote(sys.executable)} -m "
        "torchrec_neuroshard doctor`: it prints the commands that repair this."
    )


def _passes_through_frameworks(error: BaseException) -> bool:
    frame = error.__traceback__
    while frame is not None:
        if _top_level(frame.tb_frame.f_globals.get("__name__")) in _FRAMEWORKS:
            return True
        frame = frame.tb_next
    return False


def _top_level(module: str | None) -> str:
    return (module or "").partition(".")[0]


def load_frameworks(executable: str = sys.executable) -> str | None:
    """Import the three packages in a new process and run one embedding kernel.

    Args:
        executable: the interpreter to do it with.

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
            [executable, "-c", code],
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


def render(installed: Installed, problems: list[Problem]) -> str:
    """Write the environment and its problems as text.

    Args:
        installed: what was found.
        problems: what `diagnose` made of it.

    Returns:
        Several lines; each repair command stands on a line of its own, unbroken.
    """
    fbgemm = ", ".join(f"{name} {version}" for name, version in installed.fbgemm)
    if not fbgemm and installed.fbgemm_files:
        fbgemm = f"{installed.fbgemm_files_version or 'unknown'} (not from a package)"
    rows = [
        ("python", installed.python, installed.executable),
        ("torch", installed.torch, _build_label(installed.torch_build)),
        ("fbgemm", fbgemm or None, _build_label(installed.fbgemm_build)),
        ("torchrec", installed.torchrec, ""),
    ]
    width = max(len(version or "missing") for _, version, _ in rows)
    lines = [
        f"{name:<10}{version or 'missing':<{width}}  {note if version else ''}".rstrip()
        for name, version, note in rows
    ]
    for problem in problems:
        lines += ["", f"{problem.severity}: {problem.message}"]
        if problem.repair:
            lines += ["repair:", *(f"    {command}" for command in problem.repair)]
    if not problems:
        lines += ["", "ok: these belong together"]
    return "\n".join(lines)


def _build_label(build: str | None) -> str:
    if build is None:
        return "build unknown"
    kind, _, toolkit = build.partition(" ")
    return f"{kind.upper()} {toolkit}".strip() + " build"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `neuroshard doctor`."""
    parser.add_argument(
        "--load",
        action="store_true",
        help="also import the packages and run a kernel, in a process of its own",
    )


def run(args: argparse.Namespace) -> int:
    """Print what is installed and what to do about it.

    Args:
        args: `load`, as parsed from the options.

    Returns:
        1 if anything keeps the packages from working together, else 0.
    """
    installed = read_installed()
    problems = diagnose(installed)
    broken = any(problem.severity == "error" for problem in problems)
    if args.load and not broken:
        with phase("loading torch, fbgemm and torchrec"):
            failure = load_frameworks()
        if failure is not None:
            release, build = _target(installed)
            problems.append(
                Problem(
                    severity="error",
                    message=f"versions fit, but the packages do not load: {failure}",
                    repair=_replace_fbgemm(installed, release, build),
                )
            )
            broken = True
    print(render(installed, problems))
    return int(broken)
