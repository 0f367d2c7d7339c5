"""The ranks that torchrun started, and the speed of their cores."""

from __future__ import annotations

import datetime
import logging
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from harness.options import RunError, read_options
from torchrec_neuroshard.bundles.find import load_comms_model
from torchrec_neuroshard.errors import NeuroShardError
from torchrec_neuroshard.measure.clock import Reference, keep_freed_memory
from torchrec_neuroshard.models.base import CommsModel

Config = TypeVar("Config")

_REFERENCE_PASSES = 9


class Ranks:
    """This process and its process groups."""

    def __init__(self, backend: str = "auto", timeout_s: float = 600.0) -> None:
        """Start the process groups.

        A CPU rank computes with one thread, as in the measurements of the cost model,
        and keeps freed memory.

        Args:
            backend: `nccl`, `gloo`, or `auto`: nccl if every rank has a GPU.
            timeout_s: Silence after which a rank counts as failed [s].

        Raises:
            RunError: The process was not started by torchrun, or there are fewer GPUs
                than ranks.
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
                f"{self.local_world_size} ranks need {self.local_world_size} GPUs, but "
                f"this machine has {num_gpus}; start fewer ranks, or run on the CPU"
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
        # A group for planning and measuring, which can take rank 0 minutes.
        self.control: Any = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(hours=2)
        )
        self.topology: dict[str, Any] = {
            "world_size": self.world_size,
            "local_world_size": self.local_world_size,
            "compute_device": self.device.type,
        }
        """Arguments of TorchRec's `Topology`."""

    def comms_model(self, bundle: str) -> CommsModel:
        """Return a bundle's measured collectives of these ranks.

        Raises:
            RunError: The bundle has none.
        """
        found = load_comms_model(
            bundle,
            device_type=self.device.type,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
        )
        if found is None:
            raise RunError(
                f"'{bundle}' has no measured collectives of {self.backend}; run "
                "'neuroshard collect comms' and 'neuroshard train'"
            )
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0 and return its result on every rank.

        Raises:
            RunError: `work` raised an error, which the message names.
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
        """Return the memory that every rank can use [bytes]."""
        if self.on_gpu:
            free = int(torch.cuda.mem_get_info(self.device)[0])
        else:
            text = Path("/proc/meminfo").read_text(encoding="ascii")
            fields = dict(line.split(":", 1) for line in text.splitlines())
            free = int(fields["MemAvailable"].split()[0]) * 1024
            free //= self.local_world_size
        return int(min(self.gather(free)))


class SpeedReference:
    """Measures the current speed of a core by a reference set; GPUs have none."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._reference = None if ranks.on_gpu else Reference()

    def read(self) -> float:
        """Return the time of the reference on all ranks at once [ms]; 0 on a GPU."""
        if self._reference is None:
            return 0.0
        dist.barrier(group=self._ranks.control)
        self._reference.run()
        return statistics.median(
            self._reference.run() for _ in range(_REFERENCE_PASSES)
        )


def run_on_ranks(
    config_type: type[Config],
    arguments: Sequence[str] | None,
    description: str,
    start: Callable[[Config], Ranks],
    run: Callable[[Config, Ranks], None],
) -> int:
    """Read the options, start the ranks and run; return the exit code.

    Args:
        config_type: As for `read_options`.
        arguments: As for `read_options`.
        description: As for `read_options`.
        start: Starts the ranks.
        run: What the ranks do. Its errors are printed without a traceback.
    """
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    try:
        config = read_options(config_type, arguments, description)
        run(config, start(config))
    except (RunError, NeuroShardError) as error:
        print(f"rank {os.environ.get('RANK', '?')}: {error}", file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0
