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

from tests.distributed.ranks import ONE_NODE, Jobs, Results
from torchrec_neuroshard.simulator import PHASES

pytestmark = pytest.mark.distributed

WORLD_SIZE, BATCH, NUM_STEPS = 2, 64, 3
TABLES = {
    "user": ((200, 32, "sum"), (300, 16, "sum"), (100, 16, "mean")),
    "item": ((400, 64, "sum"), (50, 8, "sum")),
}
"""Rows, width and pooling of the tables of two collections; mean-pooled tables have a
kernel of their own."""


def train_two_collections(rank: int) -> dict[str, Any]:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.modules.embedding_configs import PoolingType

    from torchrec_neuroshard import NeuroShardPlanner, PhaseTimer
    from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, tables in TABLES.items():
                configs = [
                    EmbeddingBagConfig(
                        name=f"{name}{i}",
                        num_embeddings=rows,
                        embedding_dim=width,
                        feature_names=[f"{name}{i}"],
                        pooling=PoolingType[pooling.upper()],
                    )
                    for i, (rows, width, pooling) in enumerate(tables)
                ]
                setattr(self, name, EmbeddingBagCollection(tables=configs))

        def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
            pooled = [getattr(self, name)(ids).values() for name in TABLES]
            return torch.cat(pooled, dim=1).square().mean()

    sharders = [EmbeddingBagCollectionSharder()]
    torch.manual_seed(0)
    model = Model()
    planner = NeuroShardPlanner(
        topology=Topology(world_size=WORLD_SIZE, compute_device="cpu"),
        batch_size=BATCH,
        cost_model=AnalyticCostModel(launch_ms=1e-6, lookup_ns=0.0, byte_ns=1000.0),
        comms_model=AnalyticCommsModel(),
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    timer = PhaseTimer(sharded, torch.device("cpu"))
    keys = [f"{name}{i}" for name, tables in TABLES.items() for i in range(len(tables))]

    def draw() -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.randint(0, 50, (len(keys) * BATCH,)),
            lengths=torch.ones(len(keys) * BATCH, dtype=torch.int64),
        )

    steps = []
    for _ in range(NUM_STEPS):
        ids = draw()
        dist.barrier()
        start = time.perf_counter()
        sharded(ids).backward()
        end = time.perf_counter()
        taken = [dataclasses.asdict(t) for t in timer.take()]
        steps.append({"start": start, "end": end, "modules": taken})
    pipeline = TrainPipelineSparseDist(
        sharded,
        sharded.fused_optimizer,
        torch.device("cpu"),
        custom_model_fwd=lambda ids: (sharded(ids), ids),
    )
    batches = iter([draw() for _ in range(NUM_STEPS)])
    pipelined = []
    for _ in range(NUM_STEPS):
        pipeline.progress(batches)
        pipelined.append([dataclasses.asdict(t) for t in timer.take()])
    task = placed = None
    if planner.last_task is not None and planner.last_result is not None:
        task = planner.last_task
        shards = planner.last_result.placement.shards
        placed = [[s.rank, task.groups[s.table]] for s in shards]
    return {
        "steps": steps,
        "pipelined": pipelined,
        "num_kernels": timer.num_kernels,
        "num_collectives": timer.num_collectives,
        "num_stages": None if task is None else task.num_stages,
        "stage_names": None if task is None else task.stage_names,
        "placed": placed,
    }


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    if num_nodes != ONE_NODE:
        return {}
    return {"train": lambda: train_two_collections(rank)}


@pytest.fixture
def trained(ranks: Results) -> list[dict[str, Any]]:
    return ranks(__name__, ONE_NODE, "train")


def test_stages_and_groups_are_those_of_the_plan(trained: list[dict[str, Any]]) -> None:
    assert {name.split()[0] for name in trained[0]["stage_names"]} == {"user", "item"}
    for number, rank in enumerate(trained):
        assert rank["num_collectives"] == trained[0]["num_stages"] == 2
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
