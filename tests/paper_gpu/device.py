"""Paper GPUs: `torch.cuda` over devices that live in host memory (`paper_cuda.cpp`).

For this process, import this module before torch. From outside, start a process with
`build.environment(build.build())`; Python then does so by itself:

    from tests.paper_gpu.build import build, environment
    subprocess.run([sys.executable, "script.py"], env=environment(build()))

There, `torch.device("cuda", 3)` holds real tensors, `torch.cuda.mem_get_info` counts
their bytes (rounded up to 512, as the caching allocator does; managed memory apart),
and "nccl" is gloo. Blocks of a MiB and more take no host memory before they are
written. What is not shown: any time, races, NCCL itself, memory that FBGEMM's kernels
and NCCL allocate within themselves, fragmentation.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.paper_gpu.build import LIBRARY, stand_in

assert "torch" not in sys.modules, "import tests.paper_gpu.device before torch"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the notices of operators registered twice to ourselves."""
    saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)


def _load() -> None:
    """Load the library, and before it those of this interpreter's torch that it needs.

    It names no folder of theirs: it is kept for longer than the environment whose torch
    it was linked with.
    """
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None, "there is no torch"
    folder, library = Path(found.origin).parent / "lib", Path(os.environ[LIBRARY])
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    if (folder / "libc10_cuda.so").is_file():  # a build for CUDA, without its kernels
        ctypes.CDLL(str(folder / "libc10_cuda.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(stand_in(library)), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


with _quiet():
    _load()

import torch  # noqa: E402

from tests.paper_gpu import process_groups  # noqa: E402

ops: Any = torch.ops.paper_cuda
"""What the library offers beside torch's operators."""


def index_of(device: Any = None) -> int:
    """Index of a device in any of the ways that torch takes it; None is the current.

    Raises:
        RuntimeError: There is no such device.
    """
    if device is None:
        index = -1
    elif isinstance(device, int):
        index = device
    else:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        index = -1 if device.index is None else device.index
    if index >= ops.device_count():
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return int(ops.current_device()) if index < 0 else index


class Stream(torch.Stream):
    """A queue whose work is done as soon as it is queued."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if not given:
            given = {
                "device": torch.device("cuda", index_of(device)),
                "priority": priority,
            }
        made: Stream = super().__new__(cls, **given)
        return made

    def wait_stream(self, stream: Any) -> None:
        ops.note(f"wait {self.stream_id} {stream.stream_id}")

    def synchronize(self) -> None:
        ops.note(f"host {self.stream_id}")
        _wait(self.device.index, time.perf_counter())


_waited_until: dict[int, float] = {}
"""Device -> when the last work was recorded that somebody has waited for."""


def _wait(index: int, seconds: float) -> None:
    _waited_until[index] = max(seconds, _waited_until.get(index, 0.0))


class Event:
    """Recorded when the host gets there; `query` says busy until it is waited for."""

    def __init__(self, enable_timing: bool = False, **_: bool) -> None:
        self._timed = enable_timing
        self._seconds: float | None = None
        self.device: torch.device | None = None
        self.launches = 0
        """Operators that its device had run when it was recorded."""

    def record(self, stream: Any = None) -> None:
        stream = stream or current_stream()
        self.device = stream.device
        self.launches = ops.launches(stream.device.index)
        self._seconds = time.perf_counter()
        ops.note(f"record host{id(self)} {stream.stream_id}")

    def wait(self, stream: Any = None) -> None:
        ops.note(f"block host{id(self)} {(stream or current_stream()).stream_id}")

    def query(self) -> bool:
        if self.device is None or self._seconds is None:
            return True
        return self._seconds <= _waited_until.get(self.device.index, 0.0)

    def synchronize(self) -> None:
        if self.device is not None and self._seconds is not None:
            _wait(self.device.index, self._seconds)

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed):
            raise ValueError(
                "Both events must be created with argument 'enable_timing=True'."
            )
        if self._seconds is None or end._seconds is None:
            raise ValueError(
                "Both events must be recorded before calculating elapsed time."
            )
        if self.device != end.device:
            raise RuntimeError("CUDA error: invalid resource handle")
        if not end.query():
            raise RuntimeError("CUDA error: device not ready")
        # Operators take as long each: passes of one set take equally long.
        return (end.launches - self.launches) * 0.01


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


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="Paper GPU",
        uuid=f"00000000-0000-0000-0000-{index_of(device):012d}",
        total_memory=ops.capacity(),
        L2_cache_size=2**20,
        multi_processor_count=132,
        shared_memory_per_block_optin=227 * 1024,
        major=9,
        minor=0,
        warp_size=32,
    )


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    index, total = index_of(device), ops.capacity()
    return total - ops.allocated(index), total


def _synchronize(device: Any = None) -> None:
    _wait(index_of(device), time.perf_counter())


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
        "synchronize": _synchronize,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_properties": _properties,
        "mem_get_info": _mem_get_info,
        "empty_cache": _always(None),
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
