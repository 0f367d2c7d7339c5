"""What `benchmarks/gpu/smoke.py` does on a GPU alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.builders import load_script

pytestmark = pytest.mark.nightly

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_kind_of_sets_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smoke = load_script(BENCHMARKS / "gpu" / "smoke.py")
    monkeypatch.setitem(smoke.COPY_BYTES, "cuda", 2**20)
    monkeypatch.setattr(smoke, "FLUSHES", {})
    out = tmp_path / "smoke.json"
    command = ["smoke.py", "--num-sets", "1", "--max-gib", "0.0001", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(smoke, "time_sets", lambda *_: {"set_seconds": 0.5})
    assert smoke.main() == 0
    found = json.loads(out.read_text())
    assert found["properties"]["multiprocessors"] > 0
    assert found["sets_in_20_minutes"] == 2_400
    assert found["flushes"] == 16
    assert list(found["kinds"]) == [
        *("rowwise_adagrad fp32", "rowwise_adagrad fp16", "sgd fp32", "sgd fp16"),
        *("adam fp32", "adagrad fp32", "adagrad fp16"),
    ]
