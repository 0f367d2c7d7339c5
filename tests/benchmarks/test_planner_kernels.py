"""What the comparison of planners needs to judge plans for a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import CPU
from torchrec_neuroshard.collect import timing
from torchrec_neuroshard.collect.tbe import FusedTables, InputBatch
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def parts() -> Iterator[Any]:
    """Import the benchmark's modules as its script does."""
    sys.path.insert(0, str(BENCHMARKS))
    yield lambda name: importlib.import_module(f"planner_comparison.{name}")
    sys.path.remove(str(BENCHMARKS))


def batches(parts: Any, **settings: Any) -> list[int]:
    tasks = parts("tasks")
    found = tasks.make_tasks(None, tasks.TaskSettings(batch_size=65_536, **settings))
    return [t.batch_size for t in found]


def test_a_gpus_batches_are_not_halved_by_a_cpus_limit(parts: Any) -> None:
    on_cpu, on_gpu = batches(parts), batches(parts, device_type="cuda")
    assert on_cpu.count(65_536) < len(on_cpu) / 4
    assert on_gpu.count(65_536) > len(on_gpu) * 3 / 4
    assert batches(parts, device_type="cuda", most_lookups=12_500_000) == on_cpu


@pytest.mark.parametrize("counts", [timing.CPU_PASSES, timing.CUDA_PASSES])
def test_no_timed_pass_reads_the_warm_ups_short_batch(
    parts: Any, counts: timing.PassCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU warms up three times and has two inputs unless it is told otherwise."""
    kernels, tasks, plans = parts("kernels"), parts("tasks"), parts("plans")
    monkeypatch.setattr(timing, "CPU_PASSES", counts)
    [task, *_] = tasks.make_tasks(
        None, tasks.TaskSettings(quick=True, max_rows=500, batch_size=64)
    )
    kernel = plans.KernelSet((task.tables[0],), task.batch_size)
    plan = plans.RunPlan(
        stages=(plans.Stage(sharding_type="table_wise", kernels=(kernel,)),),
        rank_bytes=(kernel.shards[0].weight_bytes,),
        num_shards=1,
        num_split=0,
    )
    read: list[InputBatch] = []
    timer = kernels.KernelTimer(
        CPU, 2**20, 1.0, kernels.KernelSettings(rounds=1, passes=4)
    )
    forward = FusedTables.forward

    def watched(self: FusedTables, batch: InputBatch) -> torch.Tensor:
        if self.output_dim == kernel.shards[0].embedding_dim:  # not the reference
            read.append(batch)
        return forward(self, batch)

    monkeypatch.setattr(FusedTables, "forward", watched)
    [passes] = timer.measure([plan]).values()
    assert len(passes) == 4
    samples = [len(b.offsets) - 1 for b in read]
    assert samples == [8] * counts.warm_up + [64] * 4
    assert len({id(b) for b in read[-4:]}) == 4


def test_medians_of_passes_need_no_timer(parts: Any) -> None:
    kernels = parts("kernels")
    passes = [kernels.Pass(0, i, t, 2 * t, 0.0) for i, t in enumerate((3.0, 1.0, 2.0))]
    assert kernels.median_times({"kernel": passes}) == {"kernel": (2.0, 4.0)}
    beside = [kernels.Pass(0, i, 3.0, 6.0, 2.0) for i in range(3)]
    assert kernels.median_times({"kernel": beside}, 10.0) == {"kernel": (15.0, 30.0)}


@pytest.mark.parametrize(
    ("hardware", "device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "cuda", "h100"),
        ("NVIDIA H200", "cuda", "h200"),
        ("AMD EPYC 7763", "cpu", "physical"),
    ],
)
def test_the_estimate_is_of_the_card_that_was_measured(
    parts: Any,
    hardware: str,
    device: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rivals, planned_on = parts("rivals"), []

    def planner(task: Any, costs: Any, device: str) -> None:
        planned_on.append(costs.compute)

    monkeypatch.setattr(rivals, "_neuroshard", planner)
    costs = rivals.Costs(compute=AnalyticCostModel(), comms=AnalyticCommsModel())
    costs.compute.hardware = hardware
    named = ["default, nothing measured"]
    [rival] = rivals.make_rivals(named, Path("none"), 1.0, hardware, 10)
    rival.make(None, costs, device)
    assert [model.name for model in planned_on] == [name]
