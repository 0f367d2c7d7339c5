"""Plans in use: optimizers of `fused_params`, checkpoints, TorchRec's pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    ParameterConstraints,
    Topology,
    storage_reservations,
)

from tests.distributed.ranks import ONE_NODE, Jobs, Results
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

pytestmark = pytest.mark.distributed

OfCase = Callable[[str], list[dict[str, Any]]]
Constraints = Mapping[str, ParameterConstraints]

WORLD_SIZE = 2
LOCAL_BATCH = 4


def make_planner(constraints: Constraints) -> NeuroShardPlanner:
    return NeuroShardPlanner(
        topology=Topology(WORLD_SIZE, "cpu"),
        batch_size=LOCAL_BATCH,
        constraints=constraints,
        cost_model=AnalyticCostModel(),
        comms_model=AnalyticCommsModel(),
        storage_reservation=storage_reservations.FixedPercentageStorageReservation(
            percentage=0.0
        ),
        stats=[],
        debug=False,
    )


def small_model() -> EmbeddingBagCollection:
    torch.manual_seed(1)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=9,
                embedding_dim=dim,
                feature_names=[f"f{i}"],
            )
            for i, dim in enumerate((32, 16))
        ]
    )


def batch_of(rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (2 * LOCAL_BATCH,), generator=generator)
    values = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=["f0", "f1"], values=values, lengths=lengths)


def sharded_model(sharders: list[Any], constraints: Constraints) -> Any:
    model = small_model()
    plan = make_planner(constraints).collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    ), plan


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """Gather every table; the same on all ranks."""
    found = {}
    for key, value in model.state_dict().items():
        full = torch.zeros(value.size())
        for shard in value.local_shards():
            (row, column), (rows, width) = (
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
            )
            full[row : row + rows, column : column + width] = shard.tensor.detach()
        dist.all_reduce(full)
        found[key] = full
    return found


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
    plan = make_planner(HALVES).collective_plan(model, sharders, dist.group.WORLD)
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


@pytest.fixture
def results(ranks: Results) -> OfCase:
    return functools.partial(ranks, __name__, ONE_NODE)


def test_optimizer_of_fused_params_trains_as_unsharded(results: OfCase) -> None:
    for found in results("fused params"):
        assert found["forward"] < 1e-6 and found["weights"] < 1e-5
        assert found["moved"] > 1e-2


def test_checkpoint_moves_from_one_plan_to_another(results: OfCase) -> None:
    for found in results("checkpoint"):
        assert found["plans differ"] and found["unlike"] > 1e-3
        assert found["gap"] == 0.0


def test_pipelined_batches_give_what_the_bare_model_gives(results: OfCase) -> None:
    for found in results("pipeline"):
        assert max(found["gaps"]) < 1e-6
