"""Every rank of a large world, one after another, in one process with paper GPUs.

    walks = walk(plan, tables, world_size=128, local_world_size=8, batch_size=64)
    walks[17].static_bytes, walks[17].peak_bytes

A rank builds and steps its part of the model as TorchRec does over "nccl". Its peers
are not there: all have the same input, so what they send of ids is what this rank would
send to itself, and what they send of embeddings is zero.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import (
    DistributedModelParallel,
    comm,
    embeddingbag,
    model_parallel,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan

from harness.models import ConcatDLRM, draw_clicks, local_tables
from tests.paper_gpu import process_groups
from torchrec_neuroshard import TableConfig

__all__ = ["Exchange", "RankWalk", "one_rank", "walk"]


class Exchange(NamedTuple):
    """One all-to-all of a rank."""

    ranks: tuple[int, ...]
    """The group's, in its order."""
    dtype: torch.dtype
    sent: tuple[int, ...]
    """Values to each of them."""
    received: tuple[int, ...]
    """Values from each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWalk:
    """What a rank built and did."""

    rank: int
    shards: tuple[tuple[str, int, int, int, int], ...]
    """Table, first row, first column, rows and columns of each part, sorted."""
    kernels: tuple[tuple[str, ...], ...]
    """Tables of each fused kernel."""
    exchanges: tuple[Exchange, ...]
    """All-to-alls of a step, in order."""
    static_bytes: int
    """Device memory of the sharded tables and what belongs to them."""
    peak_bytes: int
    """Most device memory during a step, the above included."""
    managed_bytes: int
    """Managed memory of the tables."""


class _Done:
    """A collective that has ended."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Peers:
    """Stands in for the other ranks of an all-to-all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.exchanges: list[Exchange] = []

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> _Done | None:
        assert output.device == input.device == self._device, (output, input)
        assert output.dtype == input.dtype
        ranks = dist.get_process_group_ranks(group or c10d._get_default_group())
        sent = self._splits(input, input_split_sizes, len(ranks))
        received = self._splits(output, output_split_sizes, len(ranks))
        self.exchanges.append(Exchange(tuple(ranks), input.dtype, sent, received))
        if input.is_floating_point():
            output.zero_()
        else:
            me = dist.get_rank(group)
            assert set(received) <= {sent[me]}, (sent, received)
            first = sum(sent[:me])
            output.copy_(torch.cat([input[first : first + sent[me]]] * len(ranks)))
        return _Done() if async_op else None

    @staticmethod
    def _splits(
        tensor: torch.Tensor, sizes: Sequence[int] | None, count: int
    ) -> tuple[int, ...]:
        if not sizes:
            assert len(tensor) % count == 0
            return (len(tensor) // count,) * count
        assert len(sizes) == count and sum(sizes) == len(tensor)
        return tuple(sizes)


class _Replicas(DistributedDataParallel):
    """Replicas whose gradients are their own: there is nobody to add them to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, lambda state, bucket: _known(bucket.buffer()))


def _known(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


@contextlib.contextmanager
def one_rank(
    rank: int, world_size: int, local_world_size: int
) -> Iterator[tuple[torch.device, list[Exchange]]]:
    """Be one rank of a world.

    Yields:
        Its device, which is the current one, and its all-to-alls as they come.
    """
    device = torch.device("cuda", rank % local_world_size)
    peers = _Peers(device)
    places = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local_world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in places.items():
            patch.setitem(os.environ, name, str(value))
        for name in ("_INTRA_PG", "_CROSS_PG"):
            patch.setattr(comm, name, None)
        for module in (dist, c10d):
            patch.setattr(module, "all_to_all_single", peers.all_to_all_single)
        for module in (embeddingbag, model_parallel):
            patch.setattr(module, "DistributedDataParallel", _Replicas)
        torch.cuda.set_device(device)
        with process_groups.fake_world(rank, world_size):
            yield device, peers.exchanges


def walk(
    plan: ShardingPlan,
    tables: Sequence[TableConfig],
    *,
    world_size: int,
    local_world_size: int,
    batch_size: int,
    ranks: Sequence[int] | None = None,
) -> dict[int, RankWalk]:
    """Build a plan's `ConcatDLRM` on ranks in turn, and take a step on each.

    Args:
        plan: For the module `embeddings` of `ConcatDLRM`.
        tables: Its tables.
        world_size: Ranks that the plan is for.
        local_world_size: Ranks of a node.
        batch_size: Samples per rank.
        ranks: Which; None takes all.
    """
    found = {}
    gc.collect()
    gc.freeze()  # between ranks, what there was before need not be looked through
    try:
        for rank in range(world_size) if ranks is None else ranks:
            with one_rank(rank, world_size, local_world_size) as (device, exchanges):
                found[rank] = _step(rank, plan, tables, batch_size, device, exchanges)
    finally:
        gc.unfreeze()
    return found


def _step(
    rank: int,
    plan: ShardingPlan,
    tables: Sequence[TableConfig],
    batch_size: int,
    device: torch.device,
    exchanges: list[Exchange],
) -> RankWalk:
    ops: Any = torch.ops.paper_cuda
    gc.collect()
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    before = [(ops.launches(i), ops.allocated(i)) for i in others]
    batch = draw_clicks(tables, batch_size, 5, device)
    dense = ConcatDLRM(tables, device)
    base, managed = torch.cuda.memory_allocated(device), ops.managed(device.index)
    model = DistributedModelParallel(
        dense,
        device=device,
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder()],
    )
    static_bytes = torch.cuda.memory_allocated(device) - base
    managed_bytes = ops.managed(device.index) - managed
    torch.cuda.reset_peak_memory_stats(device)
    exchanges.clear()
    logits = model(batch.dense_BD, batch.ids)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.clicks_B)
    torch.autograd.backward(loss)
    for other, (launches, held) in zip(others, before, strict=True):
        # What earlier ranks held may be given back meanwhile, nothing is added.
        assert ops.launches(other) == launches, f"rank {rank} ran on device {other}"
        assert ops.allocated(other) <= held, f"rank {rank} took of device {other}"
    return RankWalk(
        rank=rank,
        shards=tuple(
            sorted((name, *corner, *v.shape) for name, v, corner in local_tables(model))
        ),
        kernels=_kernels(model),
        exchanges=tuple(exchanges),
        static_bytes=static_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(device) - base,
        managed_bytes=managed_bytes,
    )


def _kernels(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Tables of each fused kernel of a sharded model."""
    found = []
    for collection in model.modules():
        for lookup in getattr(collection, "_lookups", ()):
            for part in lookup.modules():
                if type(getattr(part, "_emb_module", None)).__name__ == _FUSED:
                    names = [t.name for t in part._config.embedding_tables]
                    found.append(tuple(sorted(names)))
    return tuple(sorted(found))


_FUSED = "SplitTableBatchedEmbeddingBagsCodegen"
