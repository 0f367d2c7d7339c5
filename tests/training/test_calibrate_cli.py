"""`neuroshard calibrate` from the command line, on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import ONE_PASS
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.cost_models import load_bundle
from torchrec_neuroshard.cost_models.bundle import COMPUTE_BUNDLE
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.record_store import read_records
from torchrec_neuroshard.training import calibrate_cli
from torchrec_neuroshard.training.calibrate_cli import RECORDS_NAME
from torchrec_neuroshard.training.calibration import MIN_SETS


def test_measures_and_trains(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiny sets, so that the whole command takes seconds."""
    # The machine that runs the tests may be busy with others.
    monkeypatch.setattr(calibrate_cli, "steady_records", list)
    monkeypatch.setattr("torchrec_neuroshard.collect.timing.CPU_PASSES", ONE_PASS)
    out = tmp_path / "mine"
    arguments = ["calibrate", "--out", str(out), "--max-gib", "0.001", "--steps", "4"]
    for option, value, message in (
        ("--num-samples", "49", "--num-samples 49 is too few"),
        ("--from", "tpu", "no bundle 'tpu' to start from"),
    ):
        assert main([*arguments, option, value]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()
    # Time for too few to judge by.
    limited = [*arguments, "--num-samples", "60", "--time-limit", "0.001"]
    assert main(limited) == 2
    assert "measure more sets" in capsys.readouterr().err
    assert main([*arguments, "--num-samples", "60"]) == 0
    (header,), records = read_records([out / RECORDS_NAME])
    assert len(records) == 60
    assert MIN_SETS <= sum(r.held_out for r in records) <= 60 - MIN_SETS
    assert header.sampling["max_weight_bytes"] == int(0.001 * 2**30)
    info = COMPUTE_BUNDLE.read_info(out)
    assert load_bundle(out).name == "mine"
    assert info.fingerprint.device == cpu_name()
    assert info.trained_on["calibrated_from"]["name"] == "cpu"
    assert f"Kept `{info.trained_on['kept']}`" in capsys.readouterr().out
