"""Plans in use: optimizers of `fused_params`, checkpoints, TorchRec's pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    ParameterConstraints,
)

from tests.builders import CPU, bag_config, bags, make_planner
from tests.distributed.ranks import ONE_NODE, Jobs, OfJob
from tests.distributed.unsharded import draw_batch, whole_weights
from torchrec_neuroshard.planner import NeuroShardPlanner

pytestmark = pytest.mark.distributed

Constraints = Mapping[str, ParameterConstraints]

WORLD_SIZE = 2
LOCAL_BATCH = 4


def plain_planner(constraints: Constraints) -> NeuroShardPlanner:
    return make_planner(
        WORLD_SIZE, search_only=False, batch_size=LOCAL_BATCH, constraints=constraints
    )


def small_model() -> EmbeddingBagCollection:
    torch.manual_seed(1)
    return bags(bag_config(0, 9, 32), bag_config(1, 9, 16), device=CPU)


def batch_of(rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return draw_batch(["f0", "f1"], LOCAL_BATCH, 9, generator)


def sharded_model(sharders: list[Any], constraints: Constraints) -> Any:
    model = small_model()
    plan = plain_planner(constraints).collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    ), plan


HALVES = {
    "t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=16),
    "t1": ParameterConstraints(sharding_types=["table_wise"]),
}
WHOLE = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(2)}


def run_fused_params(rank: int) -> dict[str, Any]:
    """One step of SGD inside the kernels, against the unsharded tables."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    )
    model, _ = sharded_model([sharder], HALVES)
    start = whole_weights(model)
    reference = small_model()
    reference.load_state_dict(start)
    outputs = model(batch_of(rank, 0)).values()
    wanted = reference(batch_of(rank, 0)).values()
    forward = float((outputs - wanted).abs().max())
    outputs.square().sum().backward()
    loss = sum(reference(batch_of(r, 0)).values().square().sum() for r in range(2))
    (loss / WORLD_SIZE).backward()
    after = whole_weights(model)
    weights = max(
        float((p.detach() - 0.5 * p.grad - after[k]).abs().max())
        for k, p in reference.named_parameters()
    )
    moved = max(float((after[k] - start[k]).abs().max()) for k in start)
    return {"forward": forward, "weights": weights, "moved": moved}


def run_checkpoint(folder: Path) -> dict[str, Any]:
    """Weights saved under one plan and loaded under another."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    sharders = [EmbeddingBagCollectionSharder()]
    first, plan = sharded_model(sharders, HALVES)
    before = whole_weights(first)
    state_dict_saver.save(
        {"model": first.state_dict()}, checkpoint_id=folder / "checkpoint"
    )
    second, other = sharded_model(sharders, WHOLE)
    unlike = max(
        float((w - before[k]).abs().max()) for k, w in whole_weights(second).items()
    )
    state = {"model": second.state_dict()}
    state_dict_loader.load(state, checkpoint_id=folder / "checkpoint")
    second.load_state_dict(state["model"])
    after = whole_weights(second)
    return {
        "plans differ": str(plan) != str(other),
        "unlike": unlike,
        "gap": max(float((after[k] - before[k]).abs().max()) for k in before),
    }


class Ranked(nn.Module):
    """A model whose forward gives a loss, as TorchRec's pipelines want it."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.ebc(batch).values()
        return pooled.square().sum(), pooled.detach()


def run_pipeline(rank: int) -> dict[str, Any]:
    """Batches through TrainPipelineSparseDist give what the bare model gives."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    model = Ranked(small_model())
    sharders = [EmbeddingBagCollectionSharder()]
    plan = plain_planner(HALVES).collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    sharded.eval()
    wanted = [sharded(batch_of(rank, step))[1] for step in range(4)]
    # The tables are trained in their kernels; here nothing is, for eval.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    pipeline = TrainPipelineSparseDist(sharded, optimizer, torch.device("cpu"))
    batches = iter([batch_of(rank, step) for step in range(4)])
    gaps = []
    for expected in wanted:
        out = pipeline.progress(batches)
        gaps.append(float((out - expected).abs().max()))
    return {"gaps": gaps}


def rank_jobs(num_nodes: int, rank: int, folder: Path) -> Jobs:
    if num_nodes != ONE_NODE:
        return {}
    return {
        "fused params": lambda: run_fused_params(rank),
        "checkpoint": lambda: run_checkpoint(folder),
        "pipeline": lambda: run_pipeline(rank),
    }


def test_optimizer_of_fused_params_trains_as_unsharded(results: OfJob) -> None:
    for found in results("fused params"):
        assert found["forward"] < 1e-6 and found["weights"] < 1e-5
        assert found["moved"] > 1e-2


def test_checkpoint_moves_from_one_plan_to_another(results: OfJob) -> None:
    for found in results("checkpoint"):
        assert found["plans differ"] and found["unlike"] > 1e-3
        assert found["gap"] == 0.0


def test_pipelined_batches_give_what_the_bare_model_gives(results: OfJob) -> None:
    for found in results("pipeline"):
        assert max(found["gaps"]) < 1e-6
