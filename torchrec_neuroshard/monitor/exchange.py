"""What ranks tell rank 0 while they train: nobody waits for anybody.

A gather is started by all ranks after the same iteration and runs in the threads of a
gloo group of its own; each rank looks at later iterations whether it is through. What
is not through when the next one is due never will be, which is an error on that rank
alone.
"""

from __future__ import annotations

import pickle
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrec_neuroshard.errors import ConfigError, RankFailureError
from torchrec_neuroshard.planner.launch.from_first import from_first

__all__ = ["Exchange"]

CAPACITY_BYTES = 2**18
"""Most that a rank tells at once: the profiles of some 2,000 features."""
_HEADER_BYTES = 8
_SENT_VALUES, _ROUNDS = 2**20, 3


class Exchange:
    """A group of all ranks, for what is not part of training.

    Attributes:
        rank: This rank.
        world_size: All ranks.
    """

    def __init__(self) -> None:
        """Make the group; every rank does.

        Raises:
            ConfigError: There is no process group.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "PlanMonitor needs a process group: call "
                "torch.distributed.init_process_group first"
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        self._work: Any = None
        self._sent: torch.Tensor | None = None
        self._received: list[torch.Tensor] = []

    def fits(self, message: Any) -> bool:
        """Whether a message is not too long."""
        return len(pickle.dumps(message)) <= CAPACITY_BYTES - _HEADER_BYTES

    def start(self, message: Any) -> None:
        """Begin to tell rank 0 something that fits; returns at once.

        Raises:
            RankFailureError: The one before is not through.
        """
        if self._work is not None:
            raise RankFailureError(
                "other ranks did not tell rank 0 what they measured: call "
                "monitor.step() after each iteration on every rank"
            )
        data = pickle.dumps(message)
        assert len(data) <= CAPACITY_BYTES - _HEADER_BYTES, "asked `fits` before"
        buffer = np.zeros(CAPACITY_BYTES, dtype=np.uint8)
        buffer[:_HEADER_BYTES] = np.array([len(data)], dtype=np.int64).view(np.uint8)
        buffer[_HEADER_BYTES : _HEADER_BYTES + len(data)] = np.frombuffer(
            data, dtype=np.uint8
        )
        self._sent = torch.from_numpy(buffer)
        self._received = []
        if self.rank == 0:
            self._received = [
                torch.empty_like(self._sent) for _ in range(self.world_size)
            ]
        self._work = dist.gather(
            self._sent,
            self._received or None,
            dst=0,
            group=self._group,
            async_op=True,
        )

    def finished(self) -> list[Any] | None:
        """Return every rank's message on rank 0, once; None while there is none.

        Raises:
            RuntimeError: A rank has gone.
        """
        if self._work is None or not self._work.is_completed():
            return None
        work, self._work = self._work, None
        work.wait()
        received, self._received, self._sent = self._received, [], None
        return [_read(buffer) for buffer in received] or None

    def all_tell(self, message: Any) -> list[Any]:
        """Give every rank's message to all ranks; they wait for each other."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, message)
        return found

    def send_ms_per_byte(self) -> float:
        """Time what this rank sends to a neighbour, or is sent; every rank calls it."""
        peer = self.rank ^ 1
        if peer >= self.world_size:
            return 0.0
        values = torch.zeros(_SENT_VALUES)
        way = dist.irecv if self.rank % 2 else dist.isend
        taken_ms = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            works = dist.batch_isend_irecv([dist.P2POp(way, values, peer, self._group)])
            for work in works:
                work.wait()
            taken_ms.append((time.perf_counter() - start) * 1e3)
        return statistics.median(taken_ms) / (4 * _SENT_VALUES)

    def from_first(self, message: Any) -> Any:
        """Give rank 0's message to all ranks; they wait for it."""
        group = dist.group.WORLD
        assert group is not None, "this object has asked for it"
        return from_first(message, group, "told what it measured")


def _read(buffer: torch.Tensor) -> Any:
    data = buffer.numpy()
    length = int(data[:_HEADER_BYTES].view(np.int64)[0])
    return pickle.loads(data[_HEADER_BYTES : _HEADER_BYTES + length].tobytes())
