"""The comparison of planners on several ranks, run on two gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import torchrun_multi_gpu as multi_gpu
from tests.builders import torchrun

PLANNERS = ["ours", "torchrec-best"]


@pytest.mark.distributed
@pytest.mark.nightly
def test_every_plan_is_predicted_trained_and_told(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--backend", "gloo", "--cost-model", "cpu_epyc", "--out", str(out)]
    options += ["--workloads", "dlrm", "--rounds", "1", "--num-tables", "5"]
    options += ["--quick", "--planners", ",".join(PLANNERS)]
    torchrun(2, multi_gpu.__file__, *options)
    data = json.loads(out.with_suffix(".json").read_text())
    planners = data["workloads"]["dlrm"]["planners"]
    assert list(planners) == PLANNERS
    total = data["workloads"]["dlrm"]["table_gib"]
    losses = []
    for entry in planners.values():
        (trained,) = entry["rounds"]
        assert entry["predicted"]["embedding_ms"] > 0
        assert len(trained["iteration_ms"]) == data["config"]["iterations"]
        for name, values in trained["phases_ms"].items():
            assert min(values) > 0, name
        # Replicas are on all ranks, other tables once; optimizer state is not counted.
        assert sum(trained["weight_bytes"]) > 0.8 * total * 2**30
        losses.append(trained["losses"])
        assert (tmp_path / "run_plans" / entry["plan"]).exists()
    assert losses[1] == pytest.approx(
        losses[0], rel=1e-5
    )  # both plans have the same losses
    assert len(set(losses[0])) > 1  # it learns
    text = out.with_suffix(".md").read_text()
    assert "A dry run on CPUs" in text
    for name in PLANNERS:
        assert text.count(f"| `{name}` |") == 2
