"""TorchRec's pipelines, and a journal of what each queues on which stream.

Run on every rank of a group over "nccl". Phases are known by the operators that only
they launch: the model's lower layer ends in a sigmoid, its upper one in a tanh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import train_pipelines as torchrec
from torchrec.distributed.types import CacheParams
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.builders import (
    FixedSearcher,
    bag_config,
    bag_sharders,
    bags,
    each,
    make_planner,
)

NUM_BATCHES = 24
_BATCH, _WIDTH = 4, 8
_TABLES = ("t0", "t1")

PIPELINES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "train_base": (torchrec.TrainPipelineBase, {}),
    "train_sparse_dist": (TrainPipelineSparseDist, {}),
    "train_prefetch_sparse_dist": (torchrec.PrefetchTrainPipelineSparseDist, {}),
    "train_semi_sync": (torchrec.TrainPipelineSemiSync, {"start_batch": 0}),
    "train_fused_sparse_dist": (torchrec.TrainPipelineFusedSparseDist, {}),
}
"""Pipeline -> its class and options."""


@dataclass
class _Batch(Pipelineable):
    """What a pipeline moves to the device."""

    dense: torch.Tensor
    ids: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> _Batch:
        return _Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.ids.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None:
        self.dense.record_stream(stream)
        self.ids.record_stream(stream)


class _Model(nn.Module):
    """Lookups after or before the layer that needs none of them, then one more."""

    def __init__(self, device: torch.device, lookups_first: bool) -> None:
        super().__init__()
        self.embeddings = bags(*(bag_config(i, 1_000, _WIDTH) for i in range(2)))
        tables = self.embeddings.parameters()
        apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.1})
        torch.manual_seed(1)
        self.below = nn.Linear(3, _WIDTH).to(device)
        self.above = nn.Linear(3 * _WIDTH, 1).to(device)
        self.lookups_first = lookups_first

    def forward(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if self.lookups_first:
            pooled = self.embeddings(batch.ids)
            below = torch.sigmoid(self.below(batch.dense))
        else:
            below = torch.sigmoid(self.below(batch.dense))
            pooled = self.embeddings(batch.ids)
        both = torch.cat([pooled.values(), below], dim=1)
        loss = torch.tanh(self.above(both)).mean()
        return loss, loss.detach()


def _batches(rank: int) -> Iterator[_Batch]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(NUM_BATCHES):
        lengths = torch.full((len(_TABLES) * _BATCH,), 2, dtype=torch.int64)
        yield _Batch(
            torch.rand(_BATCH, 3, generator=generator),
            KeyedJaggedTensor(
                keys=["f0", "f1"],
                values=torch.randint(1_000, (int(lengths.sum()),), generator=generator),
                lengths=lengths,
            ),
        )


def _pipeline(name: str, model: _Model, plan: Any, device: torch.device) -> Any:
    make, options = PIPELINES[name]
    sharded = DistributedModelParallel(
        model, device=device, plan=plan, sharders=bag_sharders()
    )
    for table in sharded.module.embeddings.state_dict().values():
        for part in table.local_shards():
            nn.init.constant_(part.tensor, 0.1)
    dense = [p for n, p in sharded.named_parameters() if "embeddings" not in n]
    return make(sharded, torch.optim.SGD(dense, lr=0.1), device, **options)


def losses_on(device: torch.device) -> list[float]:
    """Losses of a few batches by a plan of ours, in which one table is split."""
    model = _Model(device, lookups_first=False)
    planner = make_planner(
        dist.get_world_size(),
        device.type,
        topology_arguments={"local_world_size": dist.get_world_size()},
        batch_size=_BATCH,
        search=FixedSearcher([(0, 8, 1), (1, 4, 0), (1, 4, 1)]),
        constraints=each(2, "table_wise", "column_wise"),
    )
    plan = planner.collective_plan(model, bag_sharders(), dist.group.WORLD)
    pipeline = _pipeline("train_base", model, plan, device)
    batches = _batches(dist.get_rank())
    return [float(pipeline.progress(batches)) for _ in range(4)]


def journal_of(name: str, device: torch.device, *, lookups_first: bool) -> list[str]:
    """Train a few batches by a pipeline; what it queued, in the host's order."""
    model = _Model(device, lookups_first)
    constraint = ParameterConstraints(sharding_types=["table_wise"])
    if "prefetch" in name:
        constraint.compute_kernels = ["fused_uvm_caching"]
        constraint.cache_params = CacheParams(load_factor=0.2, prefetch_pipeline=True)
    planner = EmbeddingShardingPlanner(
        topology=Topology(dist.get_world_size(), "cuda"),
        constraints=dict.fromkeys(_TABLES, constraint),
    )
    plan = planner.collective_plan(model, bag_sharders(), dist.group.WORLD)
    pipeline = _pipeline(name, model, plan, device)
    ops: Any = torch.ops.paper_cuda
    batches = _batches(dist.get_rank())
    start = len(ops.journal())
    ops.keep_journal(True)
    with contextlib.suppress(StopIteration):
        while True:
            pipeline.progress(batches)
    ops.keep_journal(False)
    return list(ops.journal()[start:])
