"""Process groups of paper GPUs: what is asked for as "nccl" is gloo, and takes no
tensors of the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

_GLOO = "cpu:gloo,cuda:gloo"
_backend = [_GLOO]
"""What "nccl" is."""
_asked_for_nccl: dict[dist.ProcessGroup, bool] = {}
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


def _is_nccl(group: dist.ProcessGroup | None) -> bool:
    if group is None:
        if not dist.is_initialized():
            return False
        group = c10d._get_default_group()
    return _asked_for_nccl.get(group, False)


def _means_nccl(backend: object) -> bool:
    return str(backend).lower() in ("nccl", "cuda:nccl")


def _init_process_group(
    original: Callable[..., None],
) -> Callable[..., None]:
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        nccl = backend is None or _means_nccl(backend)
        original(_backend[0] if nccl else backend, *args, **kwargs)
        _asked_for_nccl[c10d._get_default_group()] = nccl

    return init


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        nccl = _is_nccl(None) if backend is None else _means_nccl(backend)
        inner = _backend[0] if nccl else backend
        group = original(ranks, timeout, inner, *args, **kwargs)
        if group is not None:
            _asked_for_nccl[group] = nccl
        return group

    return new_group


def _destroy_process_group(original: Callable[..., None]) -> Callable[..., None]:
    def destroy(group: dist.ProcessGroup | None = None) -> None:
        # A group that is kept beyond its end would end with the process, too late.
        if group is None:
            _asked_for_nccl.clear()
        else:
            _asked_for_nccl.pop(group, None)
        original(group)

    return destroy


def _over_nccl(answer: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps a question about a group: the answer of one over NCCL."""
    return lambda original: (
        lambda group=None: answer if _is_nccl(group) else original(group)
    )


def _device_types(original: property) -> property:
    def found(group: dist.ProcessGroup) -> list[torch.device]:
        if _is_nccl(group):
            return [torch.device("cuda")]
        types: list[torch.device] = original.fget(group)  # type: ignore[misc]
        return types

    return property(found)


def _strict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse tensors of the CPU over NCCL, in c10d's words; note who may wait."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        groups = [v for v in values if isinstance(v, dist.ProcessGroup)]
        if _is_nccl(groups[0] if groups else None):
            for value in values:
                for one in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(one, torch.Tensor) and one.is_cpu:
                        raise RuntimeError(
                            "No backend type associated with device type cpu"
                        )
        if groups and groups[0] is not c10d._get_default_group():
            torch.ops.paper_cuda.note(f"group {groups[0].group_name}")
        work = original(*args, **kwargs)
        name = "none" if work is None else f"work{id(work)}"
        torch.ops.paper_cuda.note(f"issued {name}")
        return work

    return collective


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note that the current stream waits for a collective."""

    def wait(work: Any, *args: Any) -> Any:
        ops = torch.ops.paper_cuda
        stream = ops.current_stream(ops.current_device())
        ops.note(f"block work{id(work)} {stream}")
        return original(work, *args)

    return wait


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be a rank over "nccl" whose peers are not there: collectives do nothing."""
    _backend[0] = "fake"
    try:
        dist.init_process_group(
            "nccl", rank=rank, world_size=world_size, store=FakeStore()
        )
        yield
    finally:
        _backend[0] = _GLOO
        if dist.is_initialized():
            dist.destroy_process_group()


def install() -> None:
    """Put them behind `torch.distributed`."""
    dist.Work.wait = _noted(dist.Work.wait)  # type: ignore[method-assign]
    kind: Any = dist.ProcessGroup
    kind._device_types = _device_types(kind._device_types)
    wrappers: dict[str, Callable[..., Any]] = {
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "destroy_process_group": _destroy_process_group,
        "get_backend": _over_nccl("nccl"),
        "_get_object_coll_device": _over_nccl("cuda"),
        "is_nccl_available": lambda original: lambda: True,
        **{name: _strict for name in _COLLECTIVES},
    }
    for name, wrap in wrappers.items():
        wrapped = wrap(getattr(c10d, name))
        for module in (c10d, dist):
            if hasattr(module, name):
                setattr(module, name, wrapped)
