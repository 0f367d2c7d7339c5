"""`neuroshard calibrate` from the command line, on this machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.builders import ONE_PASS
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.cost_models import load_bundle, load_comms_model
from torchrec_neuroshard.cost_models.bundle import COMMS_BUNDLE, COMPUTE_BUNDLE
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.record_store import (
    CommsStore,
    read_comms_records,
    read_records,
)
from torchrec_neuroshard.training import calibrate_cli
from torchrec_neuroshard.training.calibrate_cli import (
    COMMS_NAME,
    RECORDS_NAME,
    pinned_to,
    source_folder,
)
from torchrec_neuroshard.training.calibration import MIN_SETS
from torchrec_neuroshard.training.comms import CommsTrainConfig

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "compute_xeon.parquet"
COMMS_DATA = DATA.with_name("comms_gloo_epyc.parquet")


@pytest.fixture(autouse=True)
def all_records_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests may be busy with others."""
    monkeypatch.setattr(calibrate_cli, "steady_records", list)


def test_options_that_contradict_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", "--out", str(tmp_path / "b"), "--records", str(DATA)]
    assert main([*arguments, "--num-samples", "5", "--cpu", "0"]) == 2
    assert "--num-samples, --cpu say how to make new ones" in capsys.readouterr().err


def test_too_few_sets_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b"
    assert main(["calibrate", "--out", str(out), "--num-samples", "19"]) == 2
    assert "--num-samples 19 is too few" in capsys.readouterr().err
    assert not out.exists()


def test_unknown_source_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--from", "tpu", "--out", str(tmp_path / "b")]) == 2
    assert "no bundle 'tpu' to start from" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_pinning_holds_while_measuring_and_no_longer() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    with pinned_to(core):
        assert os.sched_getaffinity(0) == {core}
    with pinned_to(None):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ConfigError, match="may run on cores"), pinned_to(99_999):
        pass


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_measures_trains_and_goes_on(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiny sets, so that two runs of the whole command take seconds."""
    monkeypatch.setattr(
        "torchrec_neuroshard.collect.timing.CPU_PASSES",
        ONE_PASS,
    )
    out = tmp_path / "mine"
    core = str(min(os.sched_getaffinity(0)))
    arguments = [
        *("calibrate", "--out", str(out), "--max-gib", "0.001", "--steps", "4"),
        *("--cpu", core, "--seed", "3"),
    ]
    # Time for too few to judge by; what was measured stays.
    limited = [*arguments, "--num-samples", "40", "--time-limit", "0.001"]
    assert main(limited) == 2
    assert "measure more sets" in capsys.readouterr().err
    assert main([*arguments, "--num-samples", "20"]) == 0
    _, first = read_records([out / RECORDS_NAME])
    # Four of these 20 are held out: further sets complete the split.
    assert sum(r.held_out for r in first[:20]) < MIN_SETS
    assert MIN_SETS <= sum(r.held_out for r in first) <= len(first) - MIN_SETS
    capsys.readouterr()
    assert main([*arguments, "--num-samples", "60"]) == 0
    (run_header,), records = read_records([out / RECORDS_NAME])
    known = {r.index: r for r in records}
    assert len(records) >= 60 and all(known[r.index] == r for r in first)
    assert run_header.sampling["max_weight_bytes"] == int(0.001 * 2**30)
    info = COMPUTE_BUNDLE.read_info(out)
    assert info.name == load_bundle(out).name == "mine"
    assert info.fingerprint.device == cpu_name()
    assert info.trained_on["calibrated_from"]["name"] == "cpu"
    printed = capsys.readouterr().out
    for name in ("before", "scaled", "tuned", "scratch", "linear", "stock"):
        assert f"{name}: forward " in printed
    assert f"Kept `{info.trained_on['kept']}`" in printed
    assert "no collectives: they will be predicted" in printed
    assert not COMMS_BUNDLE.is_in(out)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny sets of kernels, measured on this machine."""
    out = tmp_path_factory.mktemp("measured")
    path = out / RECORDS_NAME
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_neuroshard.collect.timing.CPU_PASSES", ONE_PASS)
        collect = ["collect", "compute", "--out", str(path), "--max-gib", "0.001"]
        assert main([*collect, "--num-sets", "90", "--seed", "3"]) == 0
    return path


def collect_at_once(command: Sequence[str], **_: Any) -> SimpleNamespace:
    """Stands for `collect comms` among two ranks; its records are of another day."""
    out = Path(command[command.index("--out") + 1])
    [(header, records)] = read_comms_records([COMMS_DATA])
    fingerprint = dataclasses.replace(header.fingerprint, device=cpu_name())
    chosen = [r for r in records if r.world_size == 2 and r.repeat_of is None][:150]
    with CommsStore(out, dataclasses.replace(header, fingerprint=fingerprint)) as store:
        for record in chosen:
            store.append(record)
    return SimpleNamespace(returncode=0)


def test_collectives_are_measured_in_the_same_command(
    tmp_path: Path,
    measured: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        assert options["env"]["OMP_NUM_THREADS"] == "1"
        commands.append(command)
        return collect_at_once(command)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(
        "torchrec_neuroshard.training.calibrate_cli.CommsTrainConfig",
        partial(CommsTrainConfig, steps=60),
    )
    out = tmp_path / "mine"
    arguments = ["calibrate", "--from", "cpu_epyc", "--records", str(measured)]
    arguments += ["--out", str(out), "--steps", "4", "--ranks", "2"]
    assert main([*arguments, "--comms-samples", "36", "--seed", "5"]) == 0
    (command,) = commands
    started = " ".join(command)
    assert "--nproc-per-node 2 -m torchrec_neuroshard collect comms" in started
    assert f"--out {out / COMMS_NAME} --seed 5 --backend gloo" in started
    assert "--num-samples 36 --time-limit 180.0" in started
    info = COMMS_BUNDLE.read_info(out)
    assert (info.backend, info.world_sizes) == ("gloo", (2,))
    assert info.fingerprint.device == cpu_name() and not info.carried_over
    printed = " ".join(capsys.readouterr().out.split())
    assert "of least median error (before " in printed
    assert "2 ranks (in training): median error" in printed
    assert "# Compute cost model" in (out / "CARD.md").read_text()
    assert "# Communication cost model" in (out / "COMMS_CARD.md").read_text()
    model = load_comms_model(out, device_type="cpu", world_size=2, local_world_size=2)
    assert model is not None and model.source == "measured"


def test_kernels_stay_calibrated_where_ranks_fail(
    tmp_path: Path,
    measured: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "subprocess.run", lambda *_, **__: SimpleNamespace(returncode=7)
    )
    out = tmp_path / "mine"
    arguments = ["calibrate", "--from", "cpu_epyc", "--records", str(measured)]
    assert main([*arguments, "--out", str(out), "--steps", "4", "--ranks", "3"]) == 2
    assert "among 3 ranks ended with code 7" in capsys.readouterr().err
    assert load_bundle(out).name == "mine" and not COMMS_BUNDLE.is_in(out)


def test_collectives_carried_over_say_where_they_are_from(
    tmp_path: Path, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    arguments = ["calibrate", "--from", "cpu_epyc", "--records", str(measured)]
    arguments += ["--out", str(out), "--steps", "4", "--keep-collectives"]
    assert main(arguments) == 0
    theirs = COMMS_BUNDLE.read_info(source_folder("cpu_epyc"))
    info = COMMS_BUNDLE.read_info(out)
    assert info.carried_over and info.fingerprint == theirs.fingerprint
    assert "not on this machine" in " ".join(capsys.readouterr().out.split())
    device = theirs.fingerprint.device
    assert (
        f"Measured on {device} over gloo, not on" in (out / "COMMS_CARD.md").read_text()
    )
    models = [
        load_comms_model(folder, device_type="cpu", world_size=2, local_world_size=2)
        for folder in (out, source_folder("cpu_epyc"))
    ]
    columns = np.array([[64.0, 8.0]])
    here, there = (m.all_to_all(columns, 1024) for m in models if m is not None)
    np.testing.assert_allclose(here, there)
    assert [m.source for m in models if m is not None] == [
        f"measured on {device}",
        "measured",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "2", "--keep-collectives"], "leave one out"),
        (["--ranks", "1"], "--ranks must be at least 2, got 1"),
        (["--ranks", "9", "--device", "cuda"], "but torch sees none"),
        (["--keep-collectives"], "holds no collectives; measure them with --ranks"),
    ],
)
def test_collectives_that_cannot_be_had_are_refused_first(
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    out = tmp_path / "mine"
    assert main(["calibrate", "--from", "cpu", "--out", str(out), *options]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
