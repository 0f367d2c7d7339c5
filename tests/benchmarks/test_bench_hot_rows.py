"""The benchmark of padded inputs runs, and its padding is what it says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

import bench_hot_rows as bench
from tests.builders import torchrun

ARGS = argparse.Namespace(
    tables=2, rows=1_000, dim=8, pooling=20, batch_size=64, share=0.62, seed=0
)


def test_padding_replaces_ids_and_keeps_their_number() -> None:
    tables = bench.make_tables(ARGS)
    inputs = bench.make_inputs(tables, ARGS, rank=1)
    for spread, padded in zip(inputs[bench.SPREAD], inputs[bench.PADDED], strict=True):
        ids, replaced = spread.ids.values(), padded.ids.values()
        assert (
            spread.ids.lengths().tolist() == padded.ids.lengths().tolist() == [20] * 128
        )
        assert (ids == 0).float().mean().item() < 0.01
        assert (replaced == 0).float().mean().item() == pytest.approx(0.62, abs=0.04)
        assert (ids[replaced != 0] == replaced[replaced != 0]).all()


@pytest.mark.distributed
@pytest.mark.nightly
def test_every_plan_is_trained_and_its_hot_rank_predicted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--cost-model", "cpu_epyc", "--rounds", "2", "--iterations", "1"]
    options += ["--rows", "4000", "--batch-size", "128", "--out", str(out)]
    torchrun(2, bench.__file__, *options)
    data = json.loads(out.with_suffix(".json").read_text())
    found = {(t["input"], t["plan"]): t for t in data["trials"]}
    assert len(found) == 6
    hot = found[bench.PADDED, bench.ROW_WISE]
    assert hot["predicted_kernels_ms"][0] > 1.5 * hot["predicted_kernels_ms"][1]
    assert hot["blind_kernels_ms"][0] == pytest.approx(hot["blind_kernels_ms"][1])
    even = found[bench.SPREAD, bench.ROW_WISE]
    assert even["predicted_kernels_ms"] == pytest.approx(even["blind_kernels_ms"])
    assert all(k["n"] == 2 for t in data["trials"] for k in t["kernels_ms"])
    assert "padded: row-wise" in out.with_suffix(".md").read_text()
