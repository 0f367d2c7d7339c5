"""Phases of a real sharded model, beside the stages that the simulator assumes."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import PoolingType

from tests.builders import CPU, bag_config, bag_sharders, bags, make_planner
from tests.distributed.ranks import ONE_NODE, Jobs, OfJob
from torchrec_neuroshard import PhaseTimer
from torchrec_neuroshard.simulator import PHASES

pytestmark = pytest.mark.distributed

BATCH, NUM_STEPS = 64, 3
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
TABLES = {
    "user": ((200, 32, SUM), (300, 16, SUM), (100, 16, MEAN)),
    "item": ((400, 64, SUM), (50, 8, SUM)),
}
"""Rows, width and pooling of the tables of two collections; mean-pooled tables have a
kernel of their own."""
KEYS = [f"{name}{i}" for name, tables in TABLES.items() for i in range(len(tables))]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, tables in TABLES.items():
            configs = [
                bag_config(
                    rows=rows,
                    dim=width,
                    name=f"{name}{i}",
                    feature_names=[f"{name}{i}"],
                    pooling=pooling,
                )
                for i, (rows, width, pooling) in enumerate(tables)
            ]
            setattr(self, name, bags(*configs, device=CPU))

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled = [getattr(self, name)(ids).values() for name in TABLES]
        return torch.cat(pooled, dim=1).square().mean()


def draw() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=KEYS,
        values=torch.randint(0, 50, (len(KEYS) * BATCH,)),
        lengths=torch.ones(len(KEYS) * BATCH, dtype=torch.int64),
    )


def train_two_collections() -> dict[str, Any]:
    torch.manual_seed(0)
    model, sharders = Model(), bag_sharders()
    planner = make_planner(batch_size=BATCH)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    timer = PhaseTimer(sharded, CPU)

    def taken() -> list[dict[str, Any]]:
        return [dataclasses.asdict(t) for t in timer.take()]

    steps = []
    for _ in range(NUM_STEPS):
        ids = draw()
        dist.barrier()
        start = time.perf_counter()
        sharded(ids).backward()
        end = time.perf_counter()
        steps.append({"start": start, "end": end, "modules": taken()})
    pipeline = TrainPipelineSparseDist(
        sharded,
        sharded.fused_optimizer,
        CPU,
        custom_model_fwd=lambda ids: (sharded(ids), ids),
    )
    batches = iter([draw() for _ in range(NUM_STEPS)])
    pipelined = []
    for _ in range(NUM_STEPS):
        pipeline.progress(batches)
        pipelined.append(taken())
    found = {
        "steps": steps,
        "pipelined": pipelined,
        "num_kernels": timer.num_kernels,
    }
    task, result = planner.last_task, planner.last_result
    if task is not None and result is not None:
        found |= {
            "num_stages": task.num_stages,
            "stage_names": task.stage_names,
            "placed": [[s.rank, task.groups[s.table]] for s in result.placement.shards],
        }
    return found


def rank_jobs(num_nodes: int, _: int, __: Path) -> Jobs:
    return {"train": train_two_collections} if num_nodes == ONE_NODE else {}


@pytest.fixture
def trained(results: OfJob) -> list[dict[str, Any]]:
    return results("train")


def test_stages_and_groups_are_those_of_the_plan(trained: list[dict[str, Any]]) -> None:
    assert {name.split()[0] for name in trained[0]["stage_names"]} == {"user", "item"}
    for number, rank in enumerate(trained):
        assert trained[0]["num_stages"] == 2
        groups = {group for holder, group in trained[0]["placed"] if holder == number}
        assert rank["num_kernels"] == len(groups) > 0


def test_phases_follow_each_other(trained: list[dict[str, Any]]) -> None:
    for rank in trained:
        for step in rank["steps"]:
            paths = [m["module"].rpartition(".")[2] for m in step["modules"]]
            assert paths == ["user", "item"]
            for module in step["modules"]:
                spans = [s for phase in PHASES for s in module["spans"][phase]]
                assert all(module["spans"][phase] for phase in PHASES)
                times = [step["start"], *(t for s in spans for t in s), step["end"]]
                assert times == sorted(times)


def test_train_pipeline_hides_the_index_exchange_alone(
    trained: list[dict[str, Any]],
) -> None:
    for rank in trained:
        assert len(rank["pipelined"]) == NUM_STEPS
        for module in itertools.chain(*rank["pipelined"]):
            assert not module["spans"].pop("index_comms")
            spans = [s for phase in PHASES[1:] for s in module["spans"][phase]]
            assert all(module["spans"].values())
            times = [t for s in spans for t in s]
            assert times == sorted(times)
