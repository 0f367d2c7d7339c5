"""Phases of a real sharded model, beside the stages that the simulator assumes."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import PoolingType

from tests.builders import CPU, bag_config, bag_sharders, bags, make_planner
from tests.distributed.ranks import ONE_NODE, Jobs, OfJob
from tests.distributed.unsharded import draw_batch
from torchrec_neuroshard import PhaseTimer
from torchrec_neuroshard.simulator import PHASES

pytestmark = pytest.mark.distributed

BATCH, NUM_STEPS = 64, 3


class Model(nn.Module):
    """Two collections; a table with mean pooling has a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        mean = PoolingType.MEAN
        first, second = bag_config(0, 200, 32), bag_config(1, 300, 16, pooling=mean)
        self.user = bags(first, second, device=CPU)
        first, second = bag_config(2, 400, 64), bag_config(3, 50, 8, pooling=mean)
        self.item = bags(first, second, device=CPU)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled = [self.user(ids).values(), self.item(ids).values()]
        return torch.cat(pooled, dim=1).square().mean()


def train_two_collections() -> dict[str, Any]:
    torch.manual_seed(0)
    model, sharders = Model(), bag_sharders()
    planner = make_planner(batch_size=BATCH)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    timer = PhaseTimer(sharded, CPU)
    steps = []
    for step in range(NUM_STEPS):
        ids = draw_batch(["f0", "f1", "f2", "f3"], BATCH, 50, step)
        dist.barrier()
        start = time.perf_counter()
        sharded(ids).backward()
        end = time.perf_counter()
        modules = [dataclasses.asdict(t) for t in timer.take()]
        steps.append({"start": start, "end": end, "modules": modules})
    found = {"steps": steps, "num_kernels": timer.num_kernels}
    task, result = planner.last_task, planner.last_result
    if task is not None and result is not None:
        found |= {
            "stage_names": task.stage_names,
            "placed": [[s.rank, task.groups[s.table]] for s in result.placement.shards],
        }
    return found


def rank_jobs(num_nodes: int, _: int, __: Path) -> Jobs:
    return {"train": train_two_collections} if num_nodes == ONE_NODE else {}


def test_phases_of_the_plans_stages_follow_each_other(results: OfJob) -> None:
    trained = results("train")
    stages = trained[0]["stage_names"]
    assert sorted(name.split()[0] for name in stages) == ["item", "user"]
    for number, rank in enumerate(trained):
        groups = {group for holder, group in trained[0]["placed"] if holder == number}
        assert rank["num_kernels"] == len(groups) > 0
        for step in rank["steps"]:
            paths = [m["module"].rpartition(".")[2] for m in step["modules"]]
            assert paths == ["user", "item"]
            for module in step["modules"]:
                assert all(module["spans"][phase] for phase in PHASES)
                spans = [s for phase in PHASES for s in module["spans"][phase]]
                times = [step["start"], *(t for s in spans for t in s), step["end"]]
                assert times == sorted(times)
