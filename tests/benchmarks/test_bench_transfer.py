"""The comparison of fine-tuning with training from scratch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builders import load_script, make_header, make_record, make_tables
from tests.builders import write_records as write
from torchrec_neuroshard.profiles import uniform_profile
from torchrec_neuroshard.training.calibration import MIN_SETS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_transfer.py"


def test_sets_that_were_never_measured_again_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = load_script(SCRIPT)
    profile = uniform_profile(batch_size=16, pooling_factor=2.0, num_embeddings=1000)
    tables = make_tables([32], 1000, 2.0, profile=profile)
    records = [
        make_record(tables, index=i, held_out=i < MIN_SETS) for i in range(2 * MIN_SETS)
    ]
    path = write(tmp_path / "compute.parquet", make_header(), records)

    def cell(*given: Any) -> dict[str, Any]:
        errors = dict.fromkeys(transfer.COLUMNS, 0.1) | {"score": 0.1}
        return {
            "size": given[-2],
            "seed": given[-1],
            "seconds": 1.0,
            "errors": dict.fromkeys(transfer.METHODS, errors),
        }

    monkeypatch.setattr(transfer, "run_cell", cell)
    out = tmp_path / "transfer"
    command = ["bench_transfer.py", str(path), "--sizes", "5", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(out)])
    transfer.main()
    data = json.loads(out.with_suffix(".json").read_text())
    assert data["records"]["repeat_median"] is None
    page = out.with_suffix(".md").read_text()
    assert "No set was measured again later on the target." in page
