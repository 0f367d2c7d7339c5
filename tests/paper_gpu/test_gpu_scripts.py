"""Scripts for a GPU at hand for minutes: their CUDA code, with small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.nightly

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
KINDS = (
    "column_order",
    "bucketize",
    "permute",
    "dense",
    "unpooled",
    "codecs",
    "vbe",
    "weights",
    "uvm",
)


def run(script: str, out: Path, *options: str) -> None:
    command = [sys.executable, str(FOLDER / script), "--device", "cuda"]
    subprocess.run([*command, "--out", str(out), *options], check=True, timeout=300)


def test_all_kinds_of_kernels_run_but_weights_that_cuda_cannot_train(
    tmp_path: Path,
) -> None:
    """A copy takes no time on a paper GPU, so its kind is left out."""
    out = tmp_path / "kernels.parquet"
    run("kernels.py", out, "--quick", "--kinds", *KINDS)
    rows = pq.read_table(out).to_pylist()
    assert {r["kind"] for r in rows} == set(KINDS)
    errors = {r["variant"]: r["error"] for r in rows if r["error"]}
    assert set(errors) == {"bf16", "int8"}
    assert all("cache_precision" in error for error in errors.values())
    assert {r["flushes"] for r in rows if not r["error"]} == {16}
    cached = [json.loads(r["notes"])["misses"] for r in rows if r["notes"]]
    assert cached and all(c["cache_rows"] > 0 < c["distinct"] for c in cached)
