"""The process among the others that torchrun started, and how fast its core is."""

from __future__ import annotations

import datetime
import logging
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.options import RunError
from torchrec_neuroshard.measure.clock import Reference, keep_freed_memory

__all__ = ["Ranks", "SpeedReference", "machine_speeds", "scaled_median"]

_REFERENCE_PASSES = 9


class Ranks:
    """This process among the others."""

    def __init__(self, backend: str = "auto", timeout_s: float = 600.0) -> None:
        """Start the process groups.

        A CPU rank computes with one thread, as costs were measured, and keeps freed
        memory.

        Args:
            backend: `nccl`, `gloo`, or `auto`: nccl where every rank has a GPU.
            timeout_s: A rank that is silent for so long in training has failed.

        Raises:
            RunError: Not started by torchrun, or fewer GPUs than ranks.
        """
        missing = [n for n in ("RANK", "WORLD_SIZE") if n not in os.environ]
        if missing:
            raise RunError(
                f"{', '.join(missing)} not set; start the ranks with 'torchrun "
                f"--standalone --nproc-per-node 2 {sys.argv[0]}'"
            )
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if backend == "auto":
            backend = "nccl" if num_gpus >= self.local_world_size else "gloo"
        self.backend = backend
        self.on_gpu = backend == "nccl"
        if self.on_gpu and num_gpus < self.local_world_size:
            raise RunError(
                f"{self.local_world_size} ranks on this machine need as many GPUs, it "
                f"has {num_gpus}; start fewer, or run them on the CPU"
            )
        self.device = torch.device("cpu")
        if self.on_gpu:
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
            keep_freed_memory()
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(backend, timeout=timeout)
        # What is not training: measuring and planning take rank 0 minutes.
        self.control: Any = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(hours=2)
        )

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Return what rank 0 gets from `work`, on every rank.

        Raises:
            RunError: What `work` raised, in words.
        """
        box: list[Any] = [None, ""]
        if self.rank == 0:
            try:
                box[0] = work()
            except Exception as error:
                logging.getLogger(__name__).debug("on rank 0", exc_info=True)
                box[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(box, 0, group=self.control)
        if box[1]:
            raise RunError(str(box[1]))
        return box[0]

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """Memory that every rank has for itself."""
        if self.on_gpu:
            free = int(torch.cuda.mem_get_info(self.device)[0])
        else:
            text = Path("/proc/meminfo").read_text(encoding="ascii")
            fields = dict(line.split(":", 1) for line in text.splitlines())
            free = int(fields["MemAvailable"].split()[0]) * 1024
            free //= self.local_world_size
        return int(min(self.gather(free)))


class SpeedReference:
    """How fast this rank's core is just now, by the reference set; a GPU has none."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._reference = None if ranks.on_gpu else Reference()

    def read(self) -> float:
        """Time of the reference on all ranks at once [ms]; 0 on a GPU."""
        if self._reference is None:
            return 0.0
        dist.barrier(group=self._ranks.control)
        self._reference.run()
        return statistics.median(
            self._reference.run() for _ in range(_REFERENCE_PASSES)
        )

    def slowdown(self, forward_and_backward: Sequence[float]) -> float:
        """How much longer the reference should take on all ranks than on one alone.

        Args:
            forward_and_backward: What `CommsModel.compute_slowdown` says of kernels.
        """
        if self._reference is None:
            return 1.0
        passes = [self._reference.run_phases() for _ in range(20)]
        forward, backward = map(statistics.median, zip(*passes, strict=True))
        slow_forward, slow_backward = map(float, forward_and_backward)
        total = forward * slow_forward + backward * slow_backward
        return float(total / (forward + backward))


def machine_speeds(
    reference_ms: Sequence[Sequence[float]], nominal_ms: float
) -> list[float]:
    """How fast the machine was in each round, beside when the kernels were measured.

    The reference jumps by a fifth from one trial to the next while the trials' own
    times do not: so one speed per round, by the median over its trials and ranks.

    Args:
        reference_ms: Of each round, every reading of the reference.
        nominal_ms: The reference on all ranks at once, as the models expect it; 0 is
            unknown, and every speed 1.
    """
    read = [statistics.median(row) for row in reference_ms]
    return [nominal_ms / ms if nominal_ms and ms else 1.0 for ms in read]


def scaled_median(
    rounds: Sequence[dict[str, Any]],
    speeds: Sequence[float],
    take: Callable[[dict[str, Any]], Sequence[float]],
) -> float:
    """Median over all rounds of what `take` finds in each, in the cost model's ms.

    Args:
        rounds: One plan's.
        speeds: Of at least as many rounds; see `machine_speeds`.
        take: A round's times by the clock.
    """
    pairs = zip(rounds, speeds, strict=False)
    return float(statistics.median(ms * s for r, s in pairs for ms in take(r)))
