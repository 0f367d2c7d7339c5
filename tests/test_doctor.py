"""Which installations are sound, and whether the printed repairs repair them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrec_neuroshard
from torchrec_neuroshard import doctor
from torchrec_neuroshard.doctor import Installed, Problem, diagnose
from torchrec_neuroshard.errors import EnvironmentMismatchError

ROOT = Path(torchrec_neuroshard.__file__).parents[1]


def installed(release: str = "1.8", build: str = "cpu") -> Installed:
    """A sound environment of one release and build."""
    name = "fbgemm-gpu-cpu" if build == "cpu" else "fbgemm-gpu"
    return Installed(
        python="3.11.7",
        torch=f"{doctor.RELEASES[release]}.0",
        torch_build="cpu" if build == "cpu" else "cuda 13.0",
        fbgemm=((name, f"{release}.0"),),
        fbgemm_files=True,
        fbgemm_files_version=f"{release}.0",
        fbgemm_build=build,
        torchrec=f"{release}.0",
    )


SOUND = installed()
OVERWRITTEN = dataclasses.replace(  # what `pip install torchrec` makes of it
    SOUND,
    fbgemm=(("fbgemm-gpu", "1.9.0"), ("fbgemm-gpu-cpu", "1.8.0")),
    fbgemm_files_version="1.9.0",
    fbgemm_build="cuda",
)
NO_FBGEMM = dataclasses.replace(
    SOUND, fbgemm=(), fbgemm_files=False, fbgemm_files_version=None, fbgemm_build=None
)


def severities(problems: list[Problem]) -> list[str]:
    return [problem.severity for problem in problems]


def errors(environment: Installed) -> list[Problem]:
    return [p for p in diagnose(environment) if p.severity == "error"]


def apply(environment: Installed, command: str) -> Installed:
    """What a pip command makes of an environment: the part of pip we rely on."""
    words = shlex.split(command)
    assert words[1:3] == ["-m", "pip"], command
    if words[3] == "uninstall":
        assert words[4] == "-y"
        gone = set(words[5:]) & {name for name, _ in environment.fbgemm}
        if not gone:
            return environment
        return dataclasses.replace(
            environment,
            fbgemm=tuple(x for x in environment.fbgemm if x[0] not in gone),
            fbgemm_files=False,  # the files are shared: removed with any of them
            fbgemm_files_version=None,
            fbgemm_build=None,
        )
    assert words[3] == "install"
    for word in words[4:]:
        name, _, pin = word.partition("==")
        version = pin.replace("*", "0")
        series = pin.removesuffix("*")
        if name == "torch":
            held = environment.torch or ""
            if held != pin and not held.startswith(series):
                environment = dataclasses.replace(
                    environment, torch=version, torch_build="cuda 13.0"
                )
        elif name == "torchrec":
            assert "--no-deps" in words, "it would bring a CUDA fbgemm along"
            environment = dataclasses.replace(environment, torchrec=version)
        elif name in doctor.FBGEMM_DISTRIBUTIONS:
            assert "--no-deps" in words
            others = tuple(x for x in environment.fbgemm if x[0] != name)
            held = dict(environment.fbgemm).get(name, "")
            if held.startswith(series) and pin:
                continue  # satisfied: pip leaves the files as they are
            environment = dataclasses.replace(
                environment,
                fbgemm=(*others, (name, version)),
                fbgemm_files=True,
                fbgemm_files_version=version,
                fbgemm_build="cpu" if name.endswith("-cpu") else "cuda",
            )
        else:
            left = tuple(x for x in environment.missing if x != name)
            environment = dataclasses.replace(environment, missing=left)
    return environment


VERSIONS = ("1.1.0", "1.2.0", "1.6.1", "1.8.0", "1.9.2", "2026.8.1")
FBGEMM = st.lists(
    st.tuples(st.sampled_from(doctor.FBGEMM_DISTRIBUTIONS), st.sampled_from(VERSIONS)),
    max_size=2,
    unique_by=lambda pair: pair[0],
)

# No deadline: a busy machine is no defect.
REPEATABLE = settings(deadline=None, derandomize=True, max_examples=300)


@st.composite
def environments(draw: st.DrawFn) -> Installed:
    has_files = draw(st.booleans())
    build = st.sampled_from(["cpu", "cuda", "rocm", None])
    torch = draw(
        st.sampled_from(
            [None, "2.5.1", "2.11.0", "2.13.0+cpu", "2.14.0", "2.15.0.dev20270101"]
        )
    )
    torch_build = draw(st.sampled_from(["cpu", "cuda 13.0", "rocm 6.4", None]))
    return Installed(
        python="3.11.7",
        torch=torch,
        torch_build=torch_build if torch else None,
        fbgemm=tuple(draw(FBGEMM)),
        fbgemm_files=has_files,
        fbgemm_files_version=draw(st.sampled_from(VERSIONS)) if has_files else None,
        fbgemm_build=draw(build) if has_files else None,
        torchrec=draw(st.sampled_from([None, *VERSIONS])),
        missing=tuple(draw(st.sets(st.sampled_from(doctor.TORCHREC_REQUIREMENTS)))),
    )


@pytest.mark.parametrize("release", doctor.RELEASES)
@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_packages_of_one_release_fit(release: str, build: str) -> None:
    problems = diagnose(installed(release, build))
    assert severities(problems) == (
        [] if release in doctor.SUPPORTED_RELEASES else ["warning"]
    )


def test_patch_and_local_versions_do_not_matter() -> None:
    environment = dataclasses.replace(
        SOUND, torch="2.13.1+cpu", torchrec="1.8.2", fbgemm_files_version="1.8.0+cpu"
    )
    assert diagnose(environment) == []


def test_cpu_build_under_the_cuda_builds_name_fits() -> None:
    environment = dataclasses.replace(SOUND, fbgemm=(("fbgemm-gpu", "1.8.0+cpu"),))
    assert diagnose(environment) == []


def test_cuda_fbgemm_over_the_cpu_one() -> None:
    (problem,) = diagnose(OVERWRITTEN)
    assert problem.severity == "error"
    assert "fbgemm-gpu 1.9.0 and fbgemm-gpu-cpu 1.8.0 are both" in problem.message
    assert "1.9.0, cuda build" in problem.message
    assert problem.repair == (
        "python -m pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu",
        'python -m pip install --no-deps "fbgemm-gpu-cpu==1.8.*"',
    )


def test_two_distributions_clash_even_where_the_right_files_won() -> None:
    environment = dataclasses.replace(
        OVERWRITTEN, fbgemm_files_version="1.8.0", fbgemm_build="cpu"
    )
    (problem,) = diagnose(environment)
    assert problem.severity == "error"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": None, "torch_build": None}, "torch is not installed"),
        ({"torchrec": None}, "torchrec is not installed"),
        ({"missing": ("tensordict", "tqdm")}, "torchrec needs tensordict, tqdm"),
        ({"torchrec": "1.7.0"}, "torch 2.13.0, torchrec 1.7.0, fbgemm 1.8.0 are of"),
        ({"torch": "2.12.0"}, "torch 2.12 belongs with fbgemm 1.7 and torchrec 1.7"),
        ({"torch": "2.5.1"}, "torch 2.5.1, .* are of different releases"),
        ({"fbgemm_files": False}, "the folder fbgemm_gpu is gone"),
        ({"fbgemm_files_version": "1.7.0"}, "the files .* are 1.7.0, cpu build"),
        ({"fbgemm_build": "cuda"}, "the files .* are 1.8.0, cuda build"),
        (
            {"fbgemm": (("fbgemm-gpu", "1.8.0"),), "fbgemm_build": "cuda"},
            "fbgemm is a cuda build, but torch 2.13.0 is a cpu build",
        ),
    ],
)
def test_clash_is_named(changes: dict[str, object], message: str) -> None:
    environment = dataclasses.replace(SOUND, **changes)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=message):
        assert not errors(environment), "\n".join(
            p.message for p in errors(environment)
        )


def test_torchrec_without_fbgemm() -> None:
    (problem,) = diagnose(NO_FBGEMM)
    assert problem.severity == "error"
    assert problem.repair[0] == (
        'python -m pip install --no-deps "fbgemm-gpu-cpu==1.8.*"'
    )


def test_empty_environment_gets_the_whole_recipe_in_order() -> None:
    (problem,) = diagnose(Installed(python="3.11.7"))
    assert [command.split("install ")[1] for command in problem.repair] == [
        '"torch==2.13.*"',
        '--no-deps "fbgemm-gpu-cpu==1.8.*"',
        '--no-deps "torchrec==1.8.*"',
        "tensordict torchmetrics==1.0.3 tqdm pyre-extensions iopath numpy "
        '"torch==2.13.*"',
    ]


def test_cpu_fbgemm_beside_cuda_torch_only_warns() -> None:
    environment = dataclasses.replace(SOUND, torch_build="cuda 13.0")
    (problem,) = diagnose(environment)
    assert problem.severity == "warning"
    assert problem.repair[-1].endswith('"fbgemm-gpu==1.8.*"')


def test_nightly_builds_only_warn() -> None:
    environment = dataclasses.replace(
        SOUND,
        torch="2.15.0.dev20270101+cpu",
        fbgemm=(("fbgemm-gpu-nightly-cpu", "2027.1.1"),),
        fbgemm_files_version="2027.1.1",
        torchrec="2027.1.1",
    )
    assert severities(diagnose(environment)) == ["warning"]


@REPEATABLE
@given(environments())
def test_repairs_lead_to_an_environment_without_errors(environment: Installed) -> None:
    # Each run sees more: which build of torch arrives is the package index's choice,
    # and fbgemm is fitted to that one only then.
    for _ in range(3):
        for problem in errors(environment):
            assert problem.repair, problem.message
            for command in problem.repair:
                environment = apply(environment, command)
    assert errors(environment) == []


@REPEATABLE
@given(environments())
def test_one_run_repairs_what_torch_leaves_open(environment: Installed) -> None:
    environment = dataclasses.replace(
        environment, torch="2.13.0+cpu", torch_build="cpu"
    )
    for problem in errors(environment):
        for command in problem.repair:
            environment = apply(environment, command)
    assert errors(environment) == []


@REPEATABLE
@given(environments())
def test_gravest_problems_come_first(environment: Installed) -> None:
    found = severities(diagnose(environment))
    assert found == sorted(found, key=["error", "warning"].index)


@REPEATABLE
@given(environments())
def test_every_error_is_shown_with_its_commands_unbroken(
    environment: Installed,
) -> None:
    problems = diagnose(environment)
    lines = doctor.render(environment, problems).splitlines()
    for problem in problems:
        assert f"{problem.severity}: {problem.message}" in lines
        assert {f"    {command}" for command in problem.repair} <= set(lines)
    assert ("ok: these belong together" in lines) == (not problems)


def run_doctor(
    *options: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it here, or where `folder` is all that is installed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    flags: list[str] = []
    if folder is not None:
        environment["PYTHONPATH"] += f"{os.pathsep}{folder}"
        flags.append("-S")
    return subprocess.run(
        [sys.executable, *flags, "-m", "torchrec_neuroshard", "doctor", *options],
        env=environment,
        cwd=folder or ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def write_package(
    folder: Path, distribution: str, version: str, files: dict[str, str]
) -> None:
    name = distribution.replace("-", "_")
    files = {
        f"{name}-{version}.dist-info/METADATA": "Metadata-Version: 2.1\n"
        f"Name: {distribution}\nVersion: {version}\n",
        **files,
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


CRASH = "raise SystemExit('the doctor imported this')\n"


def write_environment(folder: Path) -> None:
    """CPU torch 2.13, fbgemm-gpu-cpu 1.8, torchrec 1.8; none can be imported."""
    version = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
    write_package(
        folder,
        "torch",
        "2.13.0+cpu",
        {"torch/__init__.py": CRASH, "torch/version.py": version},
    )
    target = '\n{"version": "1.8.0", "target": "default", "variant": "cpu"}\n'
    write_package(
        folder,
        "fbgemm-gpu-cpu",
        "1.8.0",
        {
            "fbgemm_gpu/__init__.py": CRASH,
            "fbgemm_gpu/docs/target.default.json.py": target,
        },
    )
    write_package(folder, "torchrec", "1.8.0", {"torchrec/__init__.py": CRASH})
    for name in doctor.TORCHREC_REQUIREMENTS:
        write_package(folder, name, "1.0", {})


def test_sound_files_exit_0_without_being_imported(tmp_path: Path) -> None:
    write_environment(tmp_path)
    done = run_doctor(folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2.13.0+cpu" in done.stdout
    assert "fbgemm-gpu-cpu 1.8.0  CPU build" in done.stdout


def test_overwritten_files_exit_1(tmp_path: Path) -> None:
    write_environment(tmp_path)
    target = '{"version": "1.9.0", "target": "default", "variant": "cuda"}'
    files = {"fbgemm_gpu/docs/target.default.json.py": target}
    write_package(tmp_path, "fbgemm-gpu", "1.9.0", files)
    done = run_doctor(folder=tmp_path)
    assert done.returncode == 1
    assert "error: fbgemm-gpu 1.9.0 and fbgemm-gpu-cpu 1.8.0 are both" in done.stdout
    python = shlex.quote(sys.executable)
    assert (
        f"    {python} -m pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu\n"
        f'    {python} -m pip install --no-deps "fbgemm-gpu-cpu==1.8.*"\n'
    ) in done.stdout


def test_files_of_release_1_2_are_read_too(tmp_path: Path) -> None:
    write_environment(tmp_path)
    (tmp_path / "fbgemm_gpu/docs/target.default.json.py").unlink()
    stated = '__version__: str = "1.2.0"\n__variant__: str = "cuda"\n'
    (tmp_path / "fbgemm_gpu/docs/version.py").write_text(stated)
    done = run_doctor(folder=tmp_path)
    assert done.returncode == 1
    assert "the files in the folder fbgemm_gpu are 1.2.0, cuda build" in done.stdout


def test_cuda_and_rocm_builds_of_torch_are_told_apart(tmp_path: Path) -> None:
    write_environment(tmp_path)
    for text, shown in [
        (
            "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
            "CUDA 13.0 build",
        ),
        ("cuda: Optional[str] = None\nhip = '6.4.1'\n", "ROCM 6.4.1 build"),
    ]:
        (tmp_path / "torch/version.py").write_text(text)
        done = run_doctor(folder=tmp_path)
        assert shown in done.stdout
        assert done.returncode == 0
        assert "warning: fbgemm is a CPU build" in done.stdout


def test_nothing_installed_exits_1_with_the_recipe(tmp_path: Path) -> None:
    done = run_doctor(folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "error: torch is not installed" in done.stdout
    assert 'install "torch==2.13.*"' in done.stdout


def test_this_environment_is_sound_and_loads() -> None:
    done = run_doctor("--load")
    assert done.returncode == 0, done.stdout + done.stderr
    assert importlib.metadata.version("torch") in done.stdout
    assert f"torchrec  {importlib.metadata.version('torchrec')}" in done.stdout


def test_loading_reports_the_last_line_of_a_failure(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(
        "#!/bin/sh\necho first >&2\necho 'OSError: no symbol' >&2\nexit 3\n"
    )
    fake.chmod(0o755)
    assert doctor.load_frameworks(str(fake)) == "OSError: no symbol"
    fake.write_text("#!/bin/sh\nkill -SEGV $$\n")
    assert doctor.load_frameworks(str(fake)) == "it ended with code -11"


def test_load_failure_makes_the_doctor_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "read_installed", lambda: SOUND)
    monkeypatch.setattr(doctor, "load_frameworks", lambda: "OSError: no symbol")
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args([])) == 0
    assert doctor.run(parser.parse_args(["--load"])) == 1
    assert "do not load: OSError: no symbol" in capsys.readouterr().out


def raised_inside(module: str) -> Exception:
    """An error whose traceback passes through a frame of that module."""
    code = compile("raise AttributeError('no operator')", module, "exec")
    try:
        exec(code, {"__name__": module})
    except AttributeError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("environment", "module", "explained"),
    [
        (OVERWRITTEN, "torchrec.modules", True),
        (OVERWRITTEN, "torchrec_neuroshard.tables", False),
        (SOUND, "torchrec.modules", False),
    ],
)
def test_failure_is_blamed_on_a_clash_only_where_there_is_one(
    environment: Installed,
    module: str,
    explained: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "read_installed", lambda: environment)
    reason = doctor.explain_failure("Planner", raised_inside(module))
    assert (reason is not None) == explained
    if reason is not None:
        assert isinstance(reason, EnvironmentMismatchError)
        assert "no operator (fbgemm-gpu 1.9.0 and" in str(reason)
