"""TorchRec's pipelines, and a journal of what each queues on which stream.

`run_ranks` needs paper GPUs. Phases are known by the operators that only
they launch: the model's lower layer ends in a sigmoid, its upper one in a tanh.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec import EmbeddingBagCollection
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import train_pipelines as torchrec
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.builders import (
    CPU,
    FixedSearcher,
    bag_config,
    bag_sharders,
    bags,
    each,
    make_planner,
)
from tests.costs.iteration import Modules

WORLD_SIZE = 2
NUM_BATCHES = 24
_BATCH, _WIDTH = 4, 8

ONE_TYPE: Modules = [["table_wise"]]
_SHARDING: dict[str, Callable[[int], Any]] = {
    "table_wise": lambda rank: table_wise(rank),
    "column_wise": lambda rank: column_wise([1, 0]),  # TorchRec reorders the columns
    "row_wise": lambda rank: row_wise(),
    "table_row_wise": lambda rank: table_row_wise(0),
    "data_parallel": lambda rank: data_parallel(),
}
"""Sharding type -> how the table with this rank among its type's two is sharded."""

PIPELINES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "train_base": (torchrec.TrainPipelineBase, {}),
    "train_sparse_dist": (TrainPipelineSparseDist, {}),
    "train_prefetch_sparse_dist": (torchrec.PrefetchTrainPipelineSparseDist, {}),
    "train_semi_sync": (torchrec.TrainPipelineSemiSync, {"start_batch": 0}),
    "train_fused_sparse_dist": (torchrec.TrainPipelineFusedSparseDist, {}),
}
"""Pipeline -> its class and options."""
MODULES: dict[str, Modules] = {
    "one type": ONE_TYPE,
    "one module": [["row_wise", "column_wise", "table_wise"]],
    "two modules": [["table_wise", "column_wise"], ["column_wise", "table_wise"]],
    "all types": [
        ["table_wise", "data_parallel", "column_wise"],
        ["table_row_wise", "row_wise"],
    ],
}
Case = tuple[str, str, str]
"""Modules, pipeline, and whether the model calls them first or last."""
LOOKUPS = ("lookups last", "lookups first")
CASES: list[Case] = [
    *itertools.product(["one type"], PIPELINES, LOOKUPS),
    *itertools.product(
        ["one module", "two modules", "all types"],
        ["train_base", "train_sparse_dist"],
        LOOKUPS,
    ),
]


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

    def __init__(
        self, device: torch.device, lookups_first: bool, modules: Modules
    ) -> None:
        super().__init__()
        numbers = itertools.count()
        self.embeddings = nn.ModuleList()
        for types in modules:
            kinds = [kind for kind in types for _ in range(2)]
            tables = [bag_config(next(numbers), 1_000, _WIDTH) for _ in kinds]
            module = bags(*tables)
            for kind, table in zip(kinds, module.parameters(), strict=True):
                if kind != "data_parallel":
                    apply_optimizer_in_backward(RowWiseAdagrad, [table], {"lr": 0.1})
            self.embeddings.append(module)
        self.num_tables = next(numbers)
        torch.manual_seed(1)
        self.below = nn.Linear(3, _WIDTH).to(device)
        self.above = nn.Linear((self.num_tables + 1) * _WIDTH, 1).to(device)
        self.lookups_first = lookups_first

    def forward(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if self.lookups_first:
            pooled = [module(batch.ids) for module in self.embeddings]
            below = torch.sigmoid(self.below(batch.dense))
        else:
            below = torch.sigmoid(self.below(batch.dense))
            pooled = [module(batch.ids) for module in self.embeddings]
        both = torch.cat([*(p.values() for p in pooled), below], dim=1)
        loss = torch.tanh(self.above(both)).mean()
        return loss, loss.detach()


def _batches(rank: int, num_tables: int) -> Iterator[_Batch]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(NUM_BATCHES):
        lengths = torch.full((num_tables * _BATCH,), 2, dtype=torch.int64)
        yield _Batch(
            torch.rand(_BATCH, 3, generator=generator),
            KeyedJaggedTensor(
                keys=[f"f{i}" for i in range(num_tables)],
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
        if isinstance(table, ShardedTensor):
            for part in table.local_shards():
                nn.init.constant_(part.tensor, 0.1)
    dense = [p for n, p in sharded.named_parameters() if "embeddings" not in n]
    return make(sharded, torch.optim.SGD(dense, lr=0.1), device, **options)


def _losses_on(device: torch.device) -> list[float]:
    """Losses of a few batches by a plan of ours, in which one table is split."""
    model = _Model(device, False, ONE_TYPE)
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
    batches = _batches(dist.get_rank(), model.num_tables)
    return [float(pipeline.progress(batches)) for _ in range(4)]


def _plan(model: _Model, modules: Modules, cached: bool) -> ShardingPlan:
    plans = {}
    for number, (module, types) in enumerate(
        zip(model.embeddings, modules, strict=True)
    ):
        kinds = [_SHARDING[kind](rank) for kind in types for rank in range(2)]
        assert isinstance(module, EmbeddingBagCollection)
        names = [table.name for table in module.embedding_bag_configs()]
        plan = construct_module_sharding_plan(
            module, dict(zip(names, kinds, strict=True)), device_type="cuda"
        )
        for sharding in plan.values() if cached else ():
            sharding.compute_kernel = "fused_uvm_caching"
            sharding.cache_params = CacheParams(load_factor=0.2, prefetch_pipeline=True)
        plans[f"embeddings.{number}"] = plan
    return ShardingPlan(plans)


def _note_stages(sharded: nn.Module) -> None:
    """Note the stage of a thread's next launches: of all types of all modules."""
    stages = itertools.count()
    for module in sharded.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for lookup, sent in zip(module._lookups, module._output_dists, strict=True):
                _note_stage(next(stages), lookup, sent)


def _note_stage(stage: int, lookup: nn.Module, sent: nn.Module) -> None:
    def note(thread: str) -> None:
        torch.ops.paper_cuda.note(f"stage {stage} {thread}")

    def noted(output: Any) -> Any:
        note("host")
        output.register_hook(lambda gradient: note("engine"))
        return output

    def sending(_: nn.Module, __: Any, awaitable: Any) -> None:
        reordering = awaitable.callbacks
        reordering[:] = [noted, *reordering, noted]

    lookup.register_forward_pre_hook(lambda *_: note("host"))
    lookup.register_forward_hook(lambda _, __, output: noted(output))
    sent.register_forward_hook(sending)


@contextlib.contextmanager
def _noted_ids() -> Iterator[None]:
    """Note that the next exchanges of whole numbers are a stage's lengths and ids."""
    original = KJTAllToAllTensorsAwaitable.__init__

    def start(*args: Any, **kwargs: Any) -> None:
        torch.ops.paper_cuda.note("ids")
        original(*args, **kwargs)

    with mock.patch.object(KJTAllToAllTensorsAwaitable, "__init__", start):
        yield


def _journal_of(case: Case, device: torch.device) -> list[str]:
    """Train a few batches by a pipeline; what it queued, in the host's order."""
    modules, name, lookups = case
    model = _Model(device, lookups == "lookups first", MODULES[modules])
    plan = _plan(model, MODULES[modules], cached="prefetch" in name)
    pipeline = _pipeline(name, model, plan, device)
    _note_stages(pipeline._model)
    ops: Any = torch.ops.paper_cuda
    batches = _batches(dist.get_rank(), model.num_tables)
    start = len(ops.journal())
    ops.keep_journal(True)
    with contextlib.suppress(StopIteration), _noted_ids():
        while True:
            pipeline.progress(batches)
    ops.keep_journal(False)
    return list(ops.journal()[start:])


def _run_rank(rank: int, folder: str) -> None:
    """Write a rank's losses and journals to FOLDER/RANK.json."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    places = {"RANK": rank, "LOCAL_RANK": rank}
    places |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), WORLD_SIZE)
    os.environ.update({name: str(value) for name, value in places.items()})
    gpu, found = torch.device("cuda", rank), dict[str, Any]()
    torch.cuda.set_device(gpu)
    for backend, device in (("gloo", CPU), ("nccl", gpu)):
        store = f"file://{folder}/{backend}"
        dist.init_process_group(
            backend, init_method=store, rank=rank, world_size=WORLD_SIZE
        )
        found[f"losses on {device.type}"] = _losses_on(device)
        if device == gpu:
            found["journals"] = [_journal_of(case, gpu) for case in CASES]
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def run_ranks(folder: str) -> None:
    """Run all ranks; each leaves a file in the folder."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_run_rank, args=(rank, folder))
        for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * WORLD_SIZE
