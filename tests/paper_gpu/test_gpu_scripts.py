"""What `benchmarks/gpu` does on a GPU alone: flushes, columns, kernels of plans."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builders import load_script, make_tables
from torchrec_neuroshard.profiles import uniform_profile

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


def test_kernels_of_plans_are_timed_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = load_script(BENCHMARKS / "gpu" / "plans.py")
    from planner_comparison import plans
    from planner_comparison.tasks import Task

    batch = 16
    profile = uniform_profile(batch_size=batch, pooling_factor=2.0, num_embeddings=50)
    tables = make_tables([8, 4], 50, 2.0, profile=profile, optimizer="sgd")
    task = Task(
        name="small",
        family="dlrm",
        tables=tables,
        world_size=2,
        batch_size=batch,
        memory_bytes=10**6,
        cluster="8 x H100",
    )
    stage = plans.Stage(
        sharding_type="table_wise",
        kernels=tuple(plans.KernelSet((table,), batch) for table in tables),
        column_order=plans.ColumnOrder((4, 4, 4), batch // 2),
    )
    plan = plans.RunPlan(
        stages=(stage,), rank_bytes=(1_600, 800), num_shards=2, num_split=0
    )
    made: dict[str, Any] = {"tasks": [(task, {"default": {"plan": plan}})]}
    script.write(tmp_path / "plans.pkl", made)
    options = script.parse_arguments(
        ["time", str(tmp_path / "plans.pkl"), "--out", str(tmp_path / "passes.pkl")]
    )
    options.run(options)
    timed = script.read(tmp_path / "passes.pkl")
    assert timed["hardware"]["device_type"] == "cuda"
    assert timed["reference_ms"] == 0.0
    kernels = timed["passes"]["small"]
    assert [len(passes) for passes in kernels] == [4, 4, 4]
    assert all(p.fwd_ms > 0 and p.bwd_ms > 0 for passes in kernels for p in passes)
