"""Which installations pass, and what `neuroshard doctor` says about others."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import torchrec_neuroshard
from torchrec_neuroshard.errors import EnvironmentMismatchError
from torchrec_neuroshard.hardware import doctor
from torchrec_neuroshard.hardware.doctor import find_problems, fix_command

ROOT = Path(torchrec_neuroshard.__file__).parents[1]
SOUND = {
    **{"torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"},
    **dict.fromkeys(("pyre-extensions", "tensordict", "torchmetrics", "tqdm"), "1.0"),
}
OVERWRITTEN = {**SOUND, "fbgemm-gpu": "1.9.0"}  # after `pip install torchrec`


def changed(**changes: str) -> dict[str, str]:
    return {**SOUND, **changes}


def without(*names: str) -> dict[str, str]:
    return {name: v for name, v in SOUND.items() if name not in names}


def test_packages_of_one_release_fit() -> None:
    for release, (torch, _) in doctor.RELEASES.items():
        versions = {"fbgemm-gpu": f"{release}.0", "torchrec": f"{release}.2"}
        found = {**without("fbgemm-gpu-cpu"), **versions, "torch": f"{torch}.1"}
        assert not find_problems(found)
    assert not find_problems(changed(torch="2.15.0.dev20270101+cpu"))
    assert not find_problems(changed(torchrec="2027.1.1"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (without("torchrec"), "torchrec is not installed"),
        (without("tensordict", "tqdm"), "torchrec needs tensordict, tqdm"),
        (OVERWRITTEN, "fbgemm-gpu 1.9.0 and fbgemm-gpu-cpu 1.8.0 are both"),
        (changed(torchrec="1.7.0"), "torchrec 1.7.0, fbgemm 1.8.0 are of different"),
        (changed(torch="2.12.0"), "torch 2.12 needs fbgemm 1.7"),
    ],
)
def test_clash_is_named(environment: dict[str, str], message: str) -> None:
    assert message in "; ".join(find_problems(environment))


@pytest.mark.parametrize(
    ("environment", "pins"),
    [
        (
            {"torch": "2.12.0", "fbgemm-gpu": "1.8.0"},
            "torch==2.12.* fbgemm-gpu==1.7.* torchrec==1.7.*",
        ),
        (OVERWRITTEN, "torch==2.13.* fbgemm-gpu-cpu==1.8.* torchrec==1.8.*"),
    ],
)
def test_command_installs_one_release(environment: dict[str, str], pins: str) -> None:
    torch_pin, *other_pins = pins.split()
    removal, torch, others = fix_command(environment).split(" && ")
    assert {"uninstall", "fbgemm-gpu", "fbgemm-gpu-cpu"} <= set(shlex.split(removal))
    assert torch_pin in shlex.split(torch)
    # Without --no-deps, torchrec would install the newest CUDA build of fbgemm.
    assert shlex.split(others)[-3:] == ["--no-deps", *other_pins]


def run_doctor(folder: Path) -> tuple[int, str]:
    """Run it with only the packages in `folder` installed."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "torchrec_neuroshard", "doctor"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_doctor_imports_no_framework(tmp_path: Path) -> None:
    packages = {"torch": "2.13.0", "fbgemm-gpu-cpu": "1.8.0", "torchrec": "1.8.0"}
    others = ("pyre-extensions", "tensordict", "torchmetrics", "tqdm")
    for name, version in {**packages, **dict.fromkeys(others, "1.0")}.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    for name in ("torch", "fbgemm_gpu", "torchrec"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    code, out = run_doctor(tmp_path)
    assert code == 0 and out.startswith("ok: ") and "fbgemm-gpu-cpu 1.8.0" in out
    (tmp_path / "torchrec-1.8.0.dist-info").rename(tmp_path / "gone")
    code, out = run_doctor(tmp_path)
    assert code == 1 and out.startswith("not ok: torchrec is not installed")
    assert "torchrec==1.8.*" in out


def test_a_failure_to_load_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho first >&2\necho 'OSError: no symbol' >&2\nexit 3")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    failure = doctor.load_frameworks()
    assert failure == "OSError: no symbol"
    monkeypatch.setattr(doctor, "read_installed", lambda: SOUND)
    monkeypatch.setattr(doctor, "load_frameworks", lambda: failure)
    from torchrec_neuroshard.cli import main

    assert main(["doctor"]) == 0
    assert main(["doctor", "--load"]) == 1
    assert "do not load: OSError: no symbol" in capsys.readouterr().out


def test_only_failures_with_a_clash_are_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for environment, module, explained in (
        (OVERWRITTEN, "torchrec.modules", True),
        (OVERWRITTEN, "torchrec_neuroshard.tables.table", False),
        (SOUND, "torchrec.modules", False),
    ):
        monkeypatch.setattr(doctor, "read_installed", lambda found=environment: found)
        # An error whose traceback passes through a frame of that module.
        code = compile("raise AttributeError('no operator')", module, "exec")
        with pytest.raises(AttributeError) as raised:
            exec(code, {"__name__": module})
        reason = doctor.explain_failure("Planner", raised.value)
        assert isinstance(reason, EnvironmentMismatchError) == explained
