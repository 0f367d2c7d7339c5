"""The ranks that measure together: groups, common clock, exchange, failures."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.exchange import first_decides, from_all
from torchrec_neuroshard.hardware.device_types import device_type_of, is_accelerator
from torchrec_neuroshard.hardware.devices import accelerator, own_device, synchronize

_BANDWIDTH_BYTES = 16 * 2**20
_LAUNCH = "torchrun --nproc-per-node 4 -m torchrec_neuroshard collect comms"

POLL_S = 0.25
"""How often a rank looks whether another rank has failed."""
_FAILED = "failed"
"""Key of the store: why a rank failed, once one has."""
_CONNECT_SECONDS = 30.0
"""Longest time to connect to the store."""

_TCP_STORE = cast(Any, dist).TCPStore

T = TypeVar("T")


class _Group(NamedTuple):
    """A group of ranks that collectives run over."""

    process_group: dist.ProcessGroup | None
    """The process group; None for all ranks."""
    ranks: tuple[int, ...]
    """Members of rank 0's group."""
    local_world_size: int

    @property
    def rank(self) -> int:
        """This rank's index in its group; -1 if it is in none."""
        return dist.get_rank(self.process_group)


class Ranks:
    """The ranks of a run: their groups, common clock and exchange of values."""

    def __init__(
        self, backend: str, timeout_seconds: float, group_sizes: Sequence[int] = ()
    ) -> None:
        """Join the other ranks, by torchrun's environment variables.

        An existing process group of this backend is used and not destroyed.

        Args:
            backend: `gloo` or `nccl`.
            timeout_seconds: A rank that does not respond for this long has failed.
            group_sizes: See `CommsConfig`.

        Raises:
            ConfigError: The process was not started by torchrun, there is only one
                rank, nodes have different numbers of ranks, devices are missing, or a
                group cannot be formed.
        """
        try:
            self.rank, self.world_size = (
                int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")
            )
        except KeyError as missing:
            raise ConfigError(
                f"{missing.args[0]} is not set: measuring collectives takes several "
                f"processes; start them with '{_LAUNCH} ...'"
            ) from None
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        if self.world_size < 2:
            raise ConfigError(
                f"collectives need at least 2 ranks, got {self.world_size}; start "
                f"with '{_LAUNCH} ...'"
            )
        if self.world_size % self.local_world_size:
            raise ConfigError(
                f"world_size ({self.world_size}) must be a multiple of "
                f"local_world_size ({self.local_world_size}); use the same "
                "--nproc-per-node on every node"
            )
        kind = device_type_of(backend)
        self.device = own_device(kind, self.rank % self.local_world_size)
        if is_accelerator(kind):
            accelerator(kind).set_device(self.device)
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._is_guest = dist.is_initialized()
        if not self._is_guest:
            dist.init_process_group(backend, timeout=self._timeout)
        self._control: Any = dist.new_group(backend="gloo", timeout=self._timeout)
        self.groups = {
            "world": _Group(None, tuple(range(self.world_size)), self.local_world_size)
        }
        """Name -> this rank's process group, with the members of rank 0's group."""
        local, world = self.local_world_size, self.world_size
        if 1 < local < world:  # groups of table-row-wise and grid sharding
            nodes = [range(n, n + local) for n in range(0, world, local)]
            self._add("local", nodes, local)
            self._add("cross", [range(i, world, local) for i in range(local)], 1)
        for size in sorted(set(group_sizes) - {world}):
            if not 1 < size < world or (size > local and size % local):
                raise ConfigError(
                    f"a group of {size} ranks cannot be formed from {world} ranks with "
                    f"{local} per node; sizes must be 2 to {world - 1}, and above "
                    f"{local} a multiple of {local}"
                )
            self._add(f"first {size}", [range(size)], min(size, local))
        self._clock_offset_s = self._measure_clock_offset()
        self._hosts = self.gather_objects(socket.gethostname())

    def _add(self, name: str, groups: Sequence[range], local_world_size: int) -> None:
        """Create groups under one name; this rank stores its own group."""
        made: list[Any] = [
            dist.new_group(list(g), timeout=self._timeout) for g in groups
        ]
        mine = next((i for i, g in enumerate(groups) if self.rank in g), 0)
        self.groups[name] = _Group(made[mine], tuple(groups[0]), local_world_size)

    @property
    def group_sizes(self) -> dict[str, int]:
        """Number of ranks of each group."""
        return {name: len(g.ranks) for name, g in self.groups.items()}

    def clock(self) -> float:
        """Return the time on rank 0's clock [s]."""
        return time.perf_counter() + self._clock_offset_s

    def _measure_clock_offset(self) -> float:
        """Return the offset from this rank's clock to rank 0's [s].

        Ranks of one node share a clock. Other ranks ask rank 0 20 times; the fastest
        answer counts.
        """
        if self.local_world_size == self.world_size:
            return 0.0
        best, offset = float("inf"), 0.0
        for other in range(1, self.world_size):
            for _ in range(20):
                stamp = torch.zeros(1, dtype=torch.float64)
                if self.rank == other:
                    sent = time.perf_counter()
                    dist.send(stamp, 0, group=self._control)
                    dist.recv(stamp, 0, group=self._control)
                    received = time.perf_counter()
                    if received - sent < best:
                        best = received - sent
                        offset = float(stamp) - (sent + received) / 2
                elif self.rank == 0:
                    dist.recv(stamp, other, group=self._control)
                    stamp[0] = time.perf_counter()
                    dist.send(stamp, other, group=self._control)
        return offset

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks; also a barrier."""
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._control)
        return [float(v) for v in tensor]

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone; see `exchange.first_decides`."""
        return first_decides(work, self._control, "opened the file")

    def gather(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return all ranks' arrays, stacked along a new last axis."""
        return np.stack(self.gather_objects(values), axis=-1)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return all ranks' values, on every rank."""
        return from_all(value, self._control, "gathered their times")

    def turn(self) -> tuple[int, int]:
        """Return this rank's index on its host, and the most ranks of any host."""
        hosts = self._hosts
        return hosts[: self.rank].count(hosts[self.rank]), max(map(hosts.count, hosts))

    def bandwidth(self, other: int) -> float:
        """Return the rate of a large message between rank 0 and `other` [GB/s]."""
        buffer = torch.ones(_BANDWIDTH_BYTES, dtype=torch.uint8, device=self.device)
        times = []
        for _ in range(16):  # the first one sets up the connection
            start = time.perf_counter()
            for source, target in ((0, other), (other, 0)):
                if self.rank == source:
                    dist.send(buffer, target)
                elif self.rank == target:
                    dist.recv(buffer, source)
            synchronize(self.device)
            times.append(time.perf_counter() - start)
        rate = 2 * _BANDWIDTH_BYTES / statistics.median(times[1:]) / 1e9
        return float(self.gather_objects(rate)[0])

    def close(self) -> None:
        """Leave the process group; give up if that takes longer than the timeout."""
        if self._is_guest:
            return

        def leave() -> None:
            with contextlib.suppress(RuntimeError, AssertionError, ValueError):
                dist.destroy_process_group()

        thread = threading.Thread(target=leave, daemon=True)
        thread.start()
        thread.join(self._timeout.total_seconds())


Failure = Callable[[], str | None]
"""Returns why another rank failed; None if no rank has."""


@contextlib.contextmanager
def served_store(address: str) -> Iterator[int]:
    """Serve a store in which ranks meet, and yield its port.

    Args:
        address: Where other ranks reach this process.
    """
    store = _TCP_STORE(address, 0, is_master=True, wait_for_workers=False)
    try:
        yield int(store.port)
    except BaseException:
        time.sleep(4 * POLL_S)  # all ranks read why it failed
        raise


@contextlib.contextmanager
def telling_failures(rank: int, address: str, port: int) -> Iterator[Failure]:
    """Tell other ranks of an error inside, and yield what they have told.

    Args:
        rank: This rank.
        address: Where the store is served.
        port: Its port.

    Raises:
        RuntimeError: There is no such store.
    """
    patience = datetime.timedelta(seconds=_CONNECT_SECONDS)
    store = _TCP_STORE(address, port, wait_for_workers=False, timeout=patience)

    def failure() -> str | None:
        # The store is taken away when rank 0 has a result.
        with contextlib.suppress(RuntimeError):
            if store.check([_FAILED]):
                return str(store.get(_FAILED).decode())
        return None

    try:
        yield failure
    except BaseException as error:
        if failure() is None:
            text = str(error) or type(error).__name__
            with contextlib.suppress(RuntimeError):
                store.set(_FAILED, f"rank {rank} failed: {text}")
        raise
