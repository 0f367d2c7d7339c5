"""Paper GPUs: `torch.cuda` over devices that live in host memory (`paper_cuda.cpp`).

Import this module before torch; `build.run_inside` starts a process that does. There,
`torch.device("cuda", 3)` holds real tensors, and "nccl" is gloo. Times, races, NCCL and
the devices' memory are not shown.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

assert "torch" not in sys.modules, "import tests.paper_gpu.device before torch"


def _load() -> None:
    """Load the library, after those of torch that it needs; print no notices."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None, "there is no torch"
    saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)  # of operators that are registered twice
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(found.origin).parent / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.environ["PAPER_CUDA_LIBRARY"])
    os.dup2(saved, 2)


_load()

import torch  # noqa: E402

from tests.paper_gpu import process_groups  # noqa: E402

ops: Any = torch.ops.paper_cuda
"""What the library offers beside torch's operators."""
PROPERTIES = SimpleNamespace(
    name="Paper GPU",
    total_memory=80 * 2**30,
    multi_processor_count=132,
    shared_memory_per_block_optin=227 * 1024,
    major=9,
    minor=0,
    warp_size=32,
)


def index_of(device: Any = None) -> int:
    """Index of a device in any of the ways that torch takes it; None is the current."""
    if device is not None and not isinstance(device, int):
        device = torch.device(device).index
    return int(ops.current_device()) if device is None or device < 0 else device


class Stream(torch.Stream):
    """A queue whose work is done as soon as it is queued."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        given = given or {"device": torch.device("cuda", index_of(device))}
        made: Stream = super().__new__(cls, **given)
        return made

    def wait_stream(self, stream: Any) -> None:
        ops.note(f"wait {self.stream_id} {stream.stream_id}")

    def synchronize(self) -> None:
        ops.note(f"host {self.stream_id}")


class Event:
    """Notes who records it and who waits for it."""

    def __init__(self, **_: bool) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        ops.note(f"record host{id(self)} {(stream or current_stream()).stream_id}")

    def wait(self, stream: Any = None) -> None:
        ops.note(f"block host{id(self)} {(stream or current_stream()).stream_id}")

    def synchronize(self) -> None:
        pass


def current_stream(device: Any = None) -> Any:
    """The stream that a thread queues work on, of a device."""
    index = index_of(device)
    return Stream(
        stream_id=ops.current_stream(index),
        device_index=index,
        device_type=1,  # CUDA
    )


def set_stream(stream: Any) -> None:
    """Queue this thread's work on a stream."""
    if stream is not None:
        ops.set_device(stream.device.index)
        ops.set_stream(stream.device.index, stream.stream_id)


class _OnDevice:
    """`torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = ops.current_device()
        if self.idx >= 0:
            ops.set_device(self.idx)

    def __exit__(self, *error: object) -> None:
        ops.set_device(self.prev_idx)


class _OnStream:
    """`torch.cuda.stream`: also makes the stream's device the current one."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._before: list[tuple[int, int]] = []

    def __enter__(self) -> _OnStream:
        if self.stream is not None:
            index = self.stream.device.index
            self._before.append((ops.current_device(), ops.current_stream(index)))
            set_stream(self.stream)
        return self

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            device, stream = self._before.pop()
            ops.set_stream(self.stream.device.index, stream)
            ops.set_device(device)


def _seed_all(seed: int) -> None:
    for generator in torch.cuda.default_generators:
        generator.manual_seed(seed)


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _install() -> None:
    """Put the paper GPUs behind `torch.cuda`."""
    cuda: Any = torch.cuda
    values: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "StreamContext": _OnStream,
        "stream": _OnStream,
        "device": _OnDevice,
        "_lazy_init": _always(None),
        "_is_compiled": _always(True),
        "_is_in_bad_fork": _always(False),
        "is_available": _always(True),
        "is_initialized": _always(True),
        "device_count": lambda: ops.device_count(),
        "current_device": lambda: ops.current_device(),
        "set_device": lambda device: ops.set_device(index_of(device)),
        "current_stream": current_stream,
        "set_stream": set_stream,
        "synchronize": _always(None),
        "get_device_properties": _always(PROPERTIES),
        "manual_seed_all": _seed_all,
        "default_generators": tuple(
            torch.Generator(torch.device("cuda", i)) for i in range(ops.device_count())
        ),
    }
    for name, value in values.items():
        setattr(cuda, name, value)
    # Parts of torch that are there in builds for CUDA alone.
    compiled: Any = torch._C
    compiled._cuda_getCurrentRawStream = _always(0)
    compiled._nccl_version, compiled._nccl_version_suffix = _always(0), _always(b"")
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    torch.accelerator.is_available = _always(True)
    torch.backends.cuda.is_built = _always(True)
    process_groups.install()


def _permute_with_gradients(*arguments: Any) -> Any:
    return torch.ops.fbgemm.permute_pooled_embs_auto_grad(*arguments)


_install()
# FBGEMM's build for CPUs has gradients of this operator for CPUs alone; its twin's it
# has for all devices.
_library: Any = torch.library.Library("fbgemm", "IMPL")  # type: ignore[no-untyped-call]
_library.impl(
    "permute_pooled_embs_auto_grad_split", _permute_with_gradients, "AutogradCUDA"
)
