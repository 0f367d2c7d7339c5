"""`neuroshard calibrate` from the command line, on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrec_neuroshard.cli import main
from torchrec_neuroshard.collect.store import read_records
from torchrec_neuroshard.collect.timing import PassCounts
from torchrec_neuroshard.cost_models import load_bundle
from torchrec_neuroshard.cost_models.bundle import read_info
from torchrec_neuroshard.cost_models.calibration_cli import RECORDS_NAME, pinned_to
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.errors import ConfigError

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "compute_cpu.parquet"
QUICK_PASSES = PassCounts(
    warm_up=0, min_passes=1, max_passes=1, budget_seconds=0.0, num_batches=1
)


def test_options_that_contradict_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", "--out", str(tmp_path / "b"), "--records", str(DATA)]
    assert main([*arguments, "--num-samples", "5", "--cpu", "0"]) == 2
    assert "--num-samples, --cpu say how to make new ones" in capsys.readouterr().err


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
        QUICK_PASSES,
    )
    out = tmp_path / "mine"
    core = str(min(os.sched_getaffinity(0)))
    arguments = [
        *("calibrate", "--out", str(out), "--max-gib", "0.001", "--steps", "4"),
        *("--cpu", core, "--seed", "3"),
    ]
    # Too few to judge by; what was measured stays.
    assert main([*arguments, "--num-samples", "6"]) == 2
    assert "measure more sets" in capsys.readouterr().err
    (_, first) = read_records([out / RECORDS_NAME])
    assert len(first) == 6
    assert main([*arguments, "--num-samples", "60"]) == 0
    (run_header,), records = read_records([out / RECORDS_NAME])
    assert len(records) == 60 and records[:6] == first
    assert run_header.sampling["max_weight_bytes"] == int(0.001 * 2**30)
    info = read_info(out)
    assert info.name == load_bundle(out).name == "mine"
    assert info.fingerprint.device == cpu_name()
    assert info.trained_on["calibrated_from"]["name"] == "cpu"
    printed = capsys.readouterr().out
    for name in ("before", "scaled", "tuned", "scratch", "linear", "stock"):
        assert f"{name}: forward " in printed
    assert f"Kept `{info.trained_on['kept']}`" in printed
