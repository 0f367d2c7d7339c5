"""What is run on a GPU, as far as a CPU can tell that it is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.builders import (
    load_script,
    make_fingerprint,
    make_header,
    make_record,
    make_tables,
    write_records,
)
from torchrec_neuroshard.profiles import uniform_profile
from torchrec_neuroshard.records import CostRecord
from torchrec_neuroshard.training.compute import build_sets

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
CPU = torch.device("cpu")


@pytest.mark.parametrize("case", ["uneven", "four ways", "narrow"])
def test_parts_of_tables_equal_whole_ones(case: str) -> None:
    columns = load_script(FOLDER / "columns.py")
    tables = columns.whole_tables(500, 16, "fp32")
    widths = columns.CASES[case]
    assert [sum(w) for w in widths] == [t.embedding_dim for t in tables]
    output, weight = columns.largest_difference(tables, widths, 16, CPU)
    assert max(output, weight) <= columns.TOLERANCE


def test_parts_that_read_other_ids_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = load_script(FOLDER / "columns.py")
    tables = columns.whole_tables(500, 16, "fp32")
    repeat = columns.repeat_inputs

    def shifted(*arguments: object) -> object:
        batch = repeat(*arguments)
        batch.indices_L[:7] = (batch.indices_L[:7] + 1) % 500
        return batch

    monkeypatch.setattr(columns, "repeat_inputs", shifted)
    output, weight = columns.largest_difference(
        tables, columns.CASES["uneven"], 16, CPU
    )
    assert min(output, weight) > columns.TOLERANCE


def record(index: int, fwd_ms: float, bwd_ms: float) -> CostRecord:
    profile = uniform_profile(
        batch_size=256, pooling_factor=4.0, num_embeddings=100_000
    )
    tables = make_tables([32], 100_000, 4.0, profile=profile)
    return make_record(tables, fwd_ms, bwd_ms, index=index, batch_size=256)


def test_shares_of_the_bandwidth_by_hand() -> None:
    bandwidth = load_script(FOLDER / "bandwidth.py")
    sets = build_sets([record(0, 1.0, 4.0), record(1, 2.0, 4.0)])
    found = bandwidth.shares(sets, copy_gb_per_s=2.0)
    lookups, width, samples = 1024, 32 * 4, 256
    forward = lookups * (width + 8) + samples * width
    expected = forward / 1e-3 / 2e9
    np.testing.assert_allclose(found["fwd_all"], [expected, expected / 2], rtol=1e-6)
    distinct = found["bwd_all"] * 4e-3 * 2e9 - lookups * (width + 8)
    rows = distinct / (2 * width)
    assert rows[0] == pytest.approx(1024 * (1 - 1024 / 2e5), rel=1e-2)


def test_bandwidth_of_another_device_is_refused(tmp_path: Path) -> None:
    here = make_fingerprint("this one", device_type="cuda")
    path = tmp_path / "r.parquet"
    write_records(path, make_header(fingerprint=here), [record(0, 1.0, 2.0)])
    smoke = tmp_path / "smoke.json"
    smoke.write_text(json.dumps({"hardware": {"device": "another"}}))
    command = [sys.executable, str(FOLDER / "bandwidth.py"), str(path)]
    command += ["--smoke", str(smoke), "--out", str(tmp_path / "b")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "is of another, the records of this one" in ended.stderr


def test_unknown_steps_are_named(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["bash", str(FOLDER / "run_all.sh"), "fly"],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHON": sys.executable,
            "OUT": str(tmp_path / "out"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "no step 'fly'; known:" in ended.stderr
