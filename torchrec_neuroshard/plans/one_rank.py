"""Act as one rank of a job, without its devices and without the other ranks.

TorchRec then shards a model on the "meta" device. A few of its methods and one of
FBGEMM's need data, other ranks or a GPU. They are replaced while a rank is acted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed import batched_embedding_kernel as kernels
from torchrec.distributed import collective_utils
from torchrec.distributed import comm as torchrec_comm
from torchrec.distributed import embedding_tower_sharding as towers
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.distributed.planner.types import Topology
from torchrec.modules.itep_modules import GenericITEPModule

from torchrec_neuroshard.hardware.device_types import GPU
from torchrec_neuroshard.planner.compat import POD_VARIABLES

_DEVICE_IS_MISSING = (
    "meta tensor",
    "'meta' backend",
    "torch not compiled with cuda",
    "nvidia driver",
    "no cuda gpus",
    "'_opnamespace'",
)
"""Words of errors that say nothing about a plan: data, a GPU or its code is missing."""
_DATA_IS_MISSING = _DEVICE_IS_MISSING[:2]


def is_of_this_machine(error: Exception, device_type: str) -> bool:
    """Whether sharding failed only because this machine lacks the rank's device."""
    limits = _DATA_IS_MISSING if device_type == "cpu" else _DEVICE_IS_MISSING
    return any(words in str(error).lower() for words in limits)


@contextlib.contextmanager
def quietly(level: int) -> Iterator[None]:
    """Silence all warnings, and logs up to a level."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def one_rank(rank: int, topology: Topology) -> Iterator[None]:
    """Act as one rank of a fake process group; restore everything on exit."""
    world_size, node = int(topology.world_size), int(topology.local_world_size)
    environment, hook = dict(os.environ), sys.excepthook
    os.environ |= {"LOCAL_RANK": str(rank % node), "LOCAL_WORLD_SIZE": str(node)}
    pod_nodes = str(max(int(topology.intra_group_size) // node, 1))
    os.environ |= dict.fromkeys(POD_VARIABLES, pod_nodes)
    on_gpu = topology.compute_device == GPU
    built = _with_gpu_kernels() if on_gpu else contextlib.nullcontext()
    try:
        with quietly(logging.WARNING), _without_other_ranks(), built:
            dist.init_process_group(
                "fake", rank=rank, world_size=world_size, store=FakeStore()
            )
            yield
    finally:
        sys.excepthook = hook  # torch replaces it with one that names the rank
        os.environ.clear()
        os.environ.update(environment)
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _replaced(*parts: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of modules and classes: owner, name and value of each."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in parts:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a method that needs other ranks or the device."""


def _without_other_ranks() -> contextlib.AbstractContextManager[None]:
    """Let modules be sharded without answers from other ranks.

    Otherwise TorchRec keeps the groups of a node forever, the first model of a process
    asks rank 0 whether to check collectives, and sequence and managed-collision modules
    gather shards from all ranks to describe their state. The latter also read from
    "meta" how many rows all ranks have. Towers would get no groups on "meta", and their
    dense layers would compare themselves with other ranks.
    """
    groups, mapped = towers.intra_and_cross_node_pg, ShardedManagedCollisionCollection
    create = "_create_managed_collision_modules"
    return _replaced(
        (torchrec_comm, "_INTRA_PG", None),
        (torchrec_comm, "_CROSS_PG", None),
        (collective_utils, "_INITIALIZED", True),  # since 1.7
        (ShardedEmbeddingCollection, "_initialize_torch_state", _nothing),
        (mapped, "_initialize_torch_state", _nothing),
        (mapped, create, _without_data(getattr(mapped, create))),
        (towers, "intra_and_cross_node_pg", lambda device=None: groups()),
        (towers, "DistributedDataParallel", lambda module, **_: module),
    )


def _with_gpu_kernels() -> contextlib.AbstractContextManager[None]:
    """Let FBGEMM build kernels on "meta" as on a GPU, with every GPU optimizer.

    On "meta" TorchRec asks for FBGEMM's CPU kernels, which have few optimizers. All
    tables count as on the device: shapes do not depend on it. The pruning state of ITEP
    is left out, since an operator of the GPU build fills it.
    """
    kernel = kernels.SplitTableBatchedEmbeddingBagsCodegen
    build = kernel.__init__

    @functools.wraps(build)
    def on_gpu(self: Any, embedding_specs: Any, *args: Any, **kwargs: Any) -> None:
        place = kernels.EmbeddingLocation.DEVICE, kernels.ComputeDevice.CUDA
        build(self, [(*spec[:2], *place) for spec in embedding_specs], *args, **kwargs)

    return _replaced(
        (kernel, "__init__", on_gpu),
        (GenericITEPModule, "init_itep_state", _nothing),
    )


class _Zeros(TorchFunctionMode):
    """Lists of tensors on "meta" hold zeros."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.tolist and args[0].is_meta:
            return [0] * args[0].numel()
        return func(*args, **(kwargs or {}))


def _without_data(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that runs although tensors on "meta" have no data."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> None:
        with _Zeros():
            method(*args, **kwargs)

    return run
