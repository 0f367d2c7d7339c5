"""One rank of a world on one device: what its allocator counts, at rest and in steps.

Collectives are those of a process group that sends nothing: every rank is taken to get
the same batches, so that others send what this rank would send itself. Their buffers
are allocated as on a cluster; NCCL's own are not torch's and not counted.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torchrec.distributed.dist_data as dist_data
import torchrec.distributed.embedding as sharded_sequences
import torchrec.distributed.embeddingbag as sharded_bags
import torchrec.sparse.jagged_tensor as jagged_tensor
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding import rw_sharding, twrw_sharding
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineSparseDist,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from torchrec_neuroshard.planner.compat import without_other_ranks

__all__ = ["NODE", "Bags", "make_batch", "measure"]

NODE = 8
"""Ranks of a node."""
PIPELINES = {
    "train_sparse_dist": TrainPipelineSparseDist,
    "train_prefetch_sparse_dist": PrefetchTrainPipelineSparseDist,
}
STEPS = 4
"""The last of them is measured."""

_bucketize = rw_sharding.bucketize_kjt_before_all2all


class Bags(nn.Module):
    """An embedding collection and a loss, as TorchRec's pipelines want a model."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.embeddings = collection

    def forward(self, batch: Any) -> tuple[torch.Tensor, None]:
        """Return a loss on the outputs, which nobody keeps, and nothing."""
        return _Loss.apply(*_outputs(self.embeddings(batch.ids))), None


class _Loss(torch.autograd.Function):
    """A loss with gradients as large as its inputs; nothing else takes memory."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.of = [(o.shape, o.dtype, o.device) for o in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(s, dtype=t, device=d) for s, t, d in ctx.of)


class _Batch(Pipelineable):
    def __init__(self, ids: KeyedJaggedTensor) -> None:
        self.ids = ids

    def to(self, device: torch.device, non_blocking: bool = False) -> _Batch:
        return _Batch(self.ids.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> _Batch:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        self.ids.record_stream(stream)


class _Done:
    def wait(self, *_: Any) -> bool:
        return True


def make_batch(
    lengths: Mapping[str, int], batch_size: int, *, weighted: bool
) -> KeyedJaggedTensor:
    """Return ids of which the host knows how many there are.

    Args:
        lengths: Feature -> ids of each sample.
        batch_size: Samples.
        weighted: Whether lookups have weights.
    """
    counts = [n * batch_size for n in lengths.values()]
    return KeyedJaggedTensor(
        keys=list(lengths),
        values=torch.zeros(sum(counts), dtype=torch.int64),
        weights=torch.zeros(sum(counts)) if weighted else None,
        lengths=torch.cat(
            [torch.full((batch_size,), n, dtype=torch.int32) for n in lengths.values()]
        ),
        length_per_key=counts,
        stride=batch_size,
    )


def measure(
    collection: nn.Module,
    plan: ShardingPlan,
    sharders: Sequence[ModuleSharder[Any]],
    batch: KeyedJaggedTensor,
    *,
    rank: int,
    world_size: int,
    pipeline: str,
) -> dict[str, int]:
    """Shard a collection as one rank of a world does, and take some steps.

    Args:
        collection: On "meta"; the plan names it "embeddings".
        plan: Of the collection.
        sharders: Of the collection.
        batch: What every rank gets, on the host.
        rank: Which rank to be.
        world_size: Ranks of the world.
        pipeline: "none", or the value of a member of TorchRec's `PipelineType`.

    Returns:
        Bytes at rest ("static") and at the "peak" of the last step. Without a pipeline
        the batch lies on the device all the time and is not counted.
    """
    device = torch.device("cuda", rank % NODE % torch.cuda.device_count())
    torch.cuda.set_device(device)
    gc.collect()
    base = torch.cuda.memory_allocated(device)
    with _world(rank, world_size):
        model = DistributedModelParallel(
            Bags(collection),
            device=device,
            plan=plan,
            sharders=list(sharders),
            init_data_parallel=False,
        )
        static = torch.cuda.memory_allocated(device) - base
        if pipeline == "none":
            ids = _Batch(batch.to(device))
            given = torch.cuda.memory_allocated(device) - base - static
            for _ in range(STEPS):
                torch.cuda.reset_peak_memory_stats(device)
                model(ids)[0].backward()
        else:
            given = 0
            unused = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
            loop = PIPELINES[pipeline](model, unused, device)
            batches = iter([_Batch(batch)] * (STEPS + 4))
            for _ in range(STEPS):
                torch.cuda.reset_peak_memory_stats(device)
                loop.progress(batches)
        peak = torch.cuda.max_memory_allocated(device) - base - given
    return {"static": static, "peak": peak}


def _outputs(found: Any) -> list[torch.Tensor]:
    """Of bags one tensor, of sequences one for each feature."""
    if hasattr(found, "length_per_key"):
        return [found.values()]
    return [sequence.values() for sequence in found.values()]


@contextlib.contextmanager
def _world(rank: int, world_size: int) -> Iterator[None]:
    """Be a rank of a world whose other ranks do not exist."""
    node = min(NODE, world_size)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank % node),
        LOCAL_WORLD_SIZE=str(node),
    )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    with contextlib.ExitStack() as undo:
        undo.callback(dist.destroy_process_group)
        undo.enter_context(without_other_ranks())
        for owner, name, new in (
            (dist, "all_to_all_single", _send_nothing),
            (distributed_c10d, "all_to_all_single", _send_nothing),
            (dist_data.SplitsAllToAllAwaitable, "__init__", _init_splits),
            (dist_data.SplitsAllToAllAwaitable, "_wait_impl", lambda s: s.equal),
            (jagged_tensor, "_maybe_compute_length_per_key", _spread_evenly),
            (rw_sharding, "bucketize_kjt_before_all2all", _bucketize_evenly),
            (twrw_sharding, "bucketize_kjt_before_all2all", _bucketize_evenly),
            (sharded_bags, "validate_keyed_jagged_tensor", lambda *a, **k: None),
            (sharded_bags, "DistributedDataParallel", _replicate),
            (sharded_sequences, "DistributedDataParallel", _replicate),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        yield


def _send_nothing(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> _Done | None:
    for sizes, tensor in ((output_split_sizes, output), (input_split_sizes, input)):
        assert not sizes or sum(sizes) == tensor.shape[0]
    return _Done() if async_op else None


def _init_splits(
    self: Any, input_tensors: Sequence[torch.Tensor], pg: Any, **_: Any
) -> None:
    super(dist_data.SplitsAllToAllAwaitable, self).__init__()
    rank = dist.get_rank(pg)
    self.equal = [[t.cpu().tolist()[rank]] * pg.size() for t in input_tensors]


def _spread_evenly(keys: Sequence[str], *args: Any, **kwargs: Any) -> list[int]:
    """Lengths that only the device knows."""
    names = ("stride", "stride_per_key", "variable_stride_per_key", "length_per_key")
    given = dict(zip((*names, "lengths", "offsets", "values"), args, strict=False))
    given.update(kwargs)
    if given["length_per_key"] is not None:
        known: list[int] = given["length_per_key"]
        return known
    return _parts(given["values"].numel(), len(keys))


def _parts(total: int, count: int) -> list[int]:
    return [total // count + (i < total % count) for i in range(count)]


def _bucketize_evenly(
    ids: KeyedJaggedTensor, num_buckets: int, *args: Any, **kwargs: Any
) -> Any:
    found = _bucketize(ids, num_buckets, *args, **kwargs)
    each = [_parts(n, num_buckets) for n in ids.length_per_key()]
    found[0]._length_per_key = [part[b] for b in range(num_buckets) for part in each]
    return found


def _replicate(*args: Any, **kwargs: Any) -> DistributedDataParallel:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.clear()  # which torch would compare, as written
    replicated = DistributedDataParallel(*args, **kwargs)
    replicated.register_comm_hook(None, hook)
    return replicated
