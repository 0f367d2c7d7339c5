"""`neuroshard collect comms`: measure TorchRec's collectives, under torchrun.

Every rank runs this module; rank 0 samples, keeps the records and shows progress. Each
pass of a sample stands beside a pass of one fixed reference collective, since the speed
of a shared machine drifts.

Shapes: `P` passes, `W` ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import signal
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from rich.console import Console

from torchrec_neuroshard.collect.comms_sampling import (
    CommsSamplingConfig,
    SampledCollective,
    sample_collective,
)
from torchrec_neuroshard.collect.progress import measuring_progress
from torchrec_neuroshard.collect.tbe import column_permutation, permute_bags
from torchrec_neuroshard.collect.timing import Reference, keep_freed_memory
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.errors import (
    ConfigError,
    NeuroShardError,
    RankFailureError,
)
from torchrec_neuroshard.record_store import (
    CommsStore,
    journal_path,
    read_comms_header,
    read_comms_records,
)
from torchrec_neuroshard.records import (
    CommsHeader,
    CommsRecord,
    Fingerprint,
    command_line,
    repeatability,
    utc_now,
)

__all__ = [
    "CollectiveRunner",
    "CommsConfig",
    "Ranks",
    "add_arguments",
    "collect_comms",
    "run",
    "summary",
]

_REFERENCE_BYTES_PER_PEER = 64 * 1024
_BANDWIDTH_BYTES = 16 * 2**20
_REFERENCE_SAMPLES = 5
"""The reference's speed is taken over so many samples: the machine drifts over minutes,
while a single pass of the reference is as noisy as the sample's."""
_REFERENCE_EVERY = 4
"""Passes of a sample per pass of the reference."""
_REFERENCE_QUANTILE = 0.25
"""Quantile of the reference's passes that tells the machine's speed. Where threads
share cores, passes differ by whole time slices: a median jumps between two values."""
_SLOWDOWN_ROUNDS, _SLOWDOWN_PASSES = 5, 40
_START_MARGIN_S = 1e-3
"""From the agreement on a start to the start, so that all ranks know of it."""
_MEMORY_SHARE = 0.25
"""Of the free memory of a node, what the buffers of its ranks may take."""
_LAUNCH = "torchrun --nproc-per-node 4 -m torchrec_neuroshard collect comms"

# The names of torch 2.13; older ones have only the second.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor
)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsConfig:
    """One run of the collector of collectives."""

    out: Path
    """Parquet file to write or to go on with."""
    backend: str = "gloo"
    """`gloo` (CPU) or `nccl` (CUDA)."""
    num_samples: int = 600
    """Records the file shall hold."""
    seed: int = 0
    timeout_seconds: float = 20.0
    """A rank that is silent for so long ends the run."""
    time_limit_seconds: float = float("inf")
    """Stop after this time; the same command goes on later."""
    sample_seconds: float = 0.15
    """Stop repeating a sample after this time."""
    min_passes: int = 3
    max_passes: int = 60
    group_sizes: tuple[int, ...] = ()
    """Groups of the first so many ranks to measure beside all ranks, in the same run:
    the machine's drift is then the same for all world sizes."""
    sampling: CommsSamplingConfig = field(default_factory=CommsSamplingConfig)

    def __post_init__(self) -> None:
        if self.backend not in ("gloo", "nccl"):
            raise ConfigError(f"backend must be gloo or nccl, got '{self.backend}'")
        if self.num_samples < 1 or not 1 <= self.min_passes <= self.max_passes:
            raise ConfigError(
                "num_samples must be at least 1 and passes 1 <= min <= max, got "
                f"{self.num_samples}, {self.min_passes}, {self.max_passes}"
            )
        if not self.timeout_seconds > 0:
            raise ConfigError(
                f"timeout_seconds must be above 0, got {self.timeout_seconds}"
            )


class _Group(NamedTuple):
    """A group of ranks that collectives run over."""

    process_group: dist.ProcessGroup | None
    """None: all ranks."""
    ranks: tuple[int, ...]
    """Members, of the group that rank 0 is in."""
    local_world_size: int


class Ranks:
    """The ranks of a run: their groups, their common clock and their end."""

    def __init__(
        self, backend: str, timeout_seconds: float, group_sizes: Sequence[int] = ()
    ) -> None:
        """Join the other ranks, as torchrun's environment says.

        A process group that is there already is used and left as it is; it must be of
        the backend that is measured.

        Args:
            backend: `gloo` or `nccl`.
            timeout_seconds: A rank that is silent for so long has failed.
            group_sizes: See `CommsConfig`.

        Raises:
            ConfigError: Not started by torchrun, by a single rank, on unlike nodes,
                without the backend's devices, in a process group of another backend,
                or with groups that cannot be made.
        """
        missing = [n for n in ("RANK", "WORLD_SIZE") if n not in os.environ]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not set: collectives are measured by several "
                f"processes; start them with '{_LAUNCH} ...'"
            )
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self.rank = int(os.environ["RANK"])
        if self.world_size < 2:
            raise ConfigError(
                f"collectives need at least 2 ranks, got {self.world_size}; start "
                f"with '{_LAUNCH} ...'"
            )
        if self.world_size % self.local_world_size:
            raise ConfigError(
                f"world_size ({self.world_size}) must be a multiple of "
                f"local_world_size ({self.local_world_size}); give every node the same "
                "--nproc-per-node"
            )
        self.backend = backend
        self.device = torch.device("cpu")
        if backend == "nccl":
            local_rank = self.rank % self.local_world_size
            if torch.cuda.device_count() <= local_rank:
                raise ConfigError(
                    f"backend 'nccl' needs one CUDA device per rank; this node has "
                    f"{torch.cuda.device_count()} for {self.local_world_size} ranks"
                )
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        self._timeout_seconds = timeout_seconds
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self._is_guest = dist.is_initialized()
        if not self._is_guest:
            dist.init_process_group(backend, timeout=timeout)
        elif dist.get_backend() != backend:
            raise ConfigError(
                f"this process is in a group of backend '{dist.get_backend()}'; "
                f"measure '{backend}' before it is made or after it is destroyed"
            )
        self._store = dist.distributed_c10d._get_default_store()
        self._control: dist.ProcessGroup | None = dist.new_group(
            backend="gloo", timeout=timeout
        )
        self._groups = {
            "world": _Group(None, tuple(range(self.world_size)), self.local_world_size)
        }
        if 1 < self.local_world_size < self.world_size:
            self._add_subgroups(timeout)
        for size in sorted(set(group_sizes) - {self.world_size}):
            self._add_first(size, timeout)
        self._clock_offset_s = self._measure_clock_offset()
        self._processes = self._gather_processes()

    def _add_subgroups(self, timeout: datetime.timedelta) -> None:
        """Make the groups that table-row-wise and grid sharding use."""
        local, world = self.local_world_size, self.world_size
        rows = [tuple(range(n, n + local)) for n in range(0, world, local)]
        columns = [tuple(range(i, world, local)) for i in range(local)]
        for name, groups, size in (("local", rows, local), ("cross", columns, 1)):
            made = [dist.new_group(list(g), timeout=timeout) for g in groups]
            mine = next(i for i, g in enumerate(groups) if self.rank in g)
            self._groups[name] = _Group(made[mine], groups[0], size)

    def _add_first(self, size: int, timeout: datetime.timedelta) -> None:
        """Make a group of the first ranks: whole nodes, or a part of one."""
        local = self.local_world_size
        if not 1 < size < self.world_size or (size > local and size % local):
            raise ConfigError(
                f"a group of {size} ranks cannot be made of {self.world_size} ranks "
                f"with {local} per node; sizes are 2 to {self.world_size - 1}, beyond "
                f"a node in multiples of {local}"
            )
        ranks = tuple(range(size))
        made = dist.new_group(list(ranks), timeout=timeout)
        self._groups[f"first {size}"] = _Group(made, ranks, min(size, local))

    @property
    def smallest_group(self) -> str:
        """Name of the group of fewest ranks."""
        return min(self.group_sizes, key=lambda name: (self.group_sizes[name], name))

    @property
    def group_sizes(self) -> dict[str, int]:
        """Ranks of each group."""
        return {name: len(g.ranks) for name, g in self._groups.items()}

    def group(self, name: str) -> _Group:
        """Return a group: this rank's process group, and rank 0's members."""
        return self._groups[name]

    def group_rank(self, name: str) -> int:
        """Return this rank's place in its group; -1 where it is in none."""
        return dist.get_rank(self._groups[name].process_group)

    def clock(self) -> float:
        """Seconds on rank 0's clock."""
        return time.perf_counter() + self._clock_offset_s

    def _measure_clock_offset(self) -> float:
        """What to add to this rank's clock to get rank 0's.

        Ranks of one node share a clock. Others ask rank 0, 20 times; the quickest
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

    def _gather_processes(self) -> list[tuple[str, int]]:
        processes: list[Any] = [None] * self.world_size
        mine = (socket.gethostname(), os.getpid())
        dist.all_gather_object(processes, mine, group=self._control)
        return processes

    def agree(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks; also a barrier."""
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._control)
        return [float(v) for v in tensor]

    def share(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, 0, group=self._control)
        return box[0]

    def gather(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return every rank's array, stacked along a new last axis."""
        mine = torch.from_numpy(np.ascontiguousarray(values))
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self._control)
        return np.stack([p.numpy() for p in parts], axis=-1)

    def bandwidth(self, other: int, num_bytes: int = _BANDWIDTH_BYTES) -> float:
        """Rate of a large message between rank 0 and another [GB/s], on every rank."""
        buffer = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        times = []
        for _ in range(16):  # the first one sets up the connection
            start = time.perf_counter()
            for source, target in ((0, other), (other, 0)):
                if self.rank == source:
                    dist.send(buffer, target)
                elif self.rank == target:
                    dist.recv(buffer, source)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return float(self.share(2 * num_bytes / statistics.median(times[1:]) / 1e9))

    def describe(self, rank: int) -> str:
        """Return a rank with its host and process."""
        host, process = self._processes[rank]
        return f"rank {rank} ({host}, process {process})"

    def _known_dead(self, rank: int) -> bool:
        """Whether a rank's process is gone; False where that cannot be seen."""
        host, process = self._processes[rank]
        if host != socket.gethostname():
            return False
        try:
            state = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
        except FileNotFoundError:
            return Path("/proc/self").exists()
        return state.rpartition(")")[2].split()[0] in "XZ"

    def roll_call(self, reason: str) -> dict[int, str | None]:
        """After a failure: find out which ranks are still there, and why they stopped.

        Returns:
            Rank -> what it stopped for; None for a rank that does not answer.
        """
        with contextlib.suppress(RuntimeError):
            self._store.set(f"neuroshard/stopped/{self.rank}", reason)
        # Closing the connections wakes whoever waits for this rank.
        self._control = None
        self._groups.clear()
        self.close()
        answers: dict[int, str | None] = {r: None for r in range(self.world_size)}
        answers[self.rank] = reason
        deadline = time.monotonic() + self._timeout_seconds + 2
        while time.monotonic() < deadline:
            awaited = [r for r, answer in answers.items() if answer is None]
            for rank in awaited:
                key = f"neuroshard/stopped/{rank}"
                with contextlib.suppress(RuntimeError):
                    if self._store.check([key]):
                        answers[rank] = self._store.get(key).decode()
            if all(answers[r] is not None or self._known_dead(r) for r in awaited):
                break
            time.sleep(0.1)
        return answers

    def close(self) -> None:
        """Leave the group, or give that up when it does not come to an end."""
        if self._is_guest:
            return

        def leave() -> None:
            with contextlib.suppress(RuntimeError, AssertionError, ValueError):
                dist.destroy_process_group()

        thread = threading.Thread(target=leave, daemon=True)
        thread.start()
        thread.join(self._timeout_seconds)


class CollectiveRunner:
    """One collective with its buffers, as TorchRec issues it on this rank.

    The pooled all-to-all comes with TorchRec's copies around it: into the send buffer,
    and from rank-major to row-major order. So do its fresh output buffers. The index
    all-to-all comes with the permutations of a KeyedJaggedTensor's features before and
    after it.
    Source: torchrec.distributed.comm_ops and dist_data, 1.8.
    """

    def __init__(
        self,
        collective: str,
        bytes_per_peer: Sequence[int],
        batch_size: int,
        lengths_share: float,
        *,
        process_group: dist.ProcessGroup | None,
        rank: int,
        device: torch.device,
    ) -> None:
        """Make the inputs.

        Args:
            collective: One of `COLLECTIVES`.
            bytes_per_peer: As in `CommsRecord`.
            batch_size: Samples of a rank; the pooled collectives' bytes are rows of so
                many samples.
            lengths_share: Of the index all-to-all: share of its bytes that are lengths.
            process_group: Ranks that take part; None is all.
            rank: This rank's place among them.
            device: Where the buffers are.
        """
        self._group, self._device = process_group, device
        self._batch_size = batch_size
        self._world_size = len(bytes_per_peer)
        world_size, mine = self._world_size, bytes_per_peer[rank]
        self._columns = [b // 4 // batch_size for b in bytes_per_peer]
        self._my_columns = self._columns[rank]
        self.output: torch.Tensor | tuple[torch.Tensor, ...] = torch.empty(0)
        self.run: Callable[[], None]
        """Issue it and wait for it; the result is in `output`."""
        if collective == "pooled_forward":
            self._input = self._values(batch_size * world_size, self._my_columns)
            self.run = self._pooled_forward
        elif collective == "pooled_backward":
            self._input = self._values(batch_size, sum(self._columns))
            self.run = self._pooled_backward
        elif collective == "index":
            self._prepare_index(bytes_per_peer, lengths_share, rank)
            self.run = self._index
        elif collective == "reduce_scatter":
            self._input = self._values(world_size, mine // 4)
            self.run = self._reduce_scatter
        elif collective == "all_gather":
            self._input = self._values(1, mine // 4)
            self.run = self._all_gather
        else:
            self._input = self._values(world_size, mine // 4)
            self.run = self._all_reduce

    def _prepare_index(
        self, bytes_per_peer: Sequence[int], lengths_share: float, rank: int
    ) -> None:
        """Make bags of ids, as many for a peer as its share of lengths says."""
        values = [b // 8 for b in bytes_per_peer]
        wanted = [max(1, round(v * lengths_share)) for v in values if v]
        batch = self._batch_size = min(self._batch_size, *wanted)
        features = [
            max(1, round(v * lengths_share) // batch) if v else 0 for v in values
        ]
        ids = [v - batch * n for v, n in zip(values, features, strict=True)]
        self._sends = [[batch * n for n in features], ids]
        self._receives = [[n[rank]] * self._world_size for n in self._sends]
        device = self._device
        lengths = [
            _even_lengths(count, batch * n)
            for count, n in zip(ids, features, strict=True)
            if n
        ]
        self._lengths = torch.cat(lengths).to(device).view(-1, batch)
        self._ids = torch.zeros(sum(ids), dtype=torch.int64, device=device)
        mine = features[rank]
        # Each peer's features in reverse; afterwards from rank-major to feature-major.
        starts = np.cumsum([0, *features])
        order = [
            start + n - 1 - i
            for start, n in zip(starts, features, strict=False)
            for i in range(n)
        ]
        back = [w * mine + i for i in range(mine) for w in range(self._world_size)]
        self._order, self._recat = (
            torch.tensor(o, dtype=torch.int32, device=device) for o in (order, back)
        )

    def set_input(self, values: torch.Tensor) -> None:
        """Replace the fp32 input by another of the same shape."""
        assert values.shape == self._input.shape
        self._input = values

    def _values(self, rows: int, columns: int) -> torch.Tensor:
        return torch.ones(rows, columns, device=self._device)

    def _exchange(
        self, output: torch.Tensor, send: torch.Tensor, out: list[int], into: list[int]
    ) -> Any:
        return dist.all_to_all_single(
            output, send, out, into, group=self._group, async_op=True
        )

    def _splits(self) -> tuple[list[int], list[int]]:
        """Values from each rank, and to each rank, in the forward direction."""
        sources = [self._batch_size * c for c in self._columns]
        return sources, [self._batch_size * self._my_columns] * self._world_size

    def _pooled_forward(self) -> None:
        sources, targets = self._splits()
        output = torch.empty(sum(sources), device=self._device)
        send = torch.empty(self._input.numel(), device=self._device)
        send.copy_(self._input.view(-1))
        self._exchange(output, send, sources, targets).wait()
        parts = torch.split(output, sources)
        self.output = torch.cat(
            [
                p.view(self._batch_size, c)
                for p, c in zip(parts, self._columns, strict=True)
            ],
            dim=1,
        )

    def _pooled_backward(self) -> None:
        sources, targets = self._splits()
        by_rank = torch.split(self._input, self._columns, dim=1)
        send = torch.cat([g.contiguous().view(-1) for g in by_rank])
        output = torch.empty(sum(targets), device=self._device)
        self._exchange(output, send, targets, sources).wait()
        shape = (self._batch_size * self._world_size, self._my_columns)
        self.output = output.view(shape).div_(self._world_size)

    def _index(self) -> None:
        lengths, ids = permute_bags(self._order, self._lengths, self._ids)
        permuted = lengths.view(-1), ids
        splits = torch.tensor(
            [[*counts, self._batch_size] for counts in zip(*self._sends, strict=True)],
            device=self._device,
        ).flatten()
        received = torch.empty_like(splits)
        dist.all_to_all_single(
            received, splits, group=self._group, async_op=True
        ).wait()
        received.tolist()  # TorchRec reads them to make room
        outputs, pending = [], []
        for sent, into, out in zip(permuted, self._sends, self._receives, strict=True):
            outputs.append(torch.empty(sum(out), dtype=sent.dtype, device=self._device))
            pending.append(self._exchange(outputs[-1], sent, out, into))
        for work in pending:
            work.wait()
        lengths, ids = outputs
        if len(self._recat):
            by_feature = lengths.view(-1, self._batch_size)
            lengths, ids = permute_bags(self._recat, by_feature, ids)
        self.output = lengths.view(-1), ids

    def _reduce_scatter(self) -> None:
        output = self._input.new_empty((1, self._input.shape[1]))
        _reduce_scatter(output, self._input, group=self._group, async_op=True).wait()
        self.output = output

    def _all_gather(self) -> None:
        output = self._input.new_empty((self._world_size, self._input.shape[1]))
        _all_gather(output, self._input, group=self._group, async_op=True).wait()
        self.output = output

    def _all_reduce(self) -> None:
        dist.all_reduce(self._input, group=self._group, async_op=True).wait()
        self.output = self._input


def _even_lengths(num_ids: int, num_bags: int) -> torch.Tensor:
    """Spread ids over bags."""
    lengths = torch.full((num_bags,), num_ids // num_bags, dtype=torch.int64)
    lengths[: num_ids % num_bags] += 1
    return lengths


class _Meter:
    """Times collectives on the ranks' common clock."""

    def __init__(self, ranks: Ranks, config: CommsConfig) -> None:
        self._ranks, self._config = ranks, config
        self._recent_ms: deque[list[float]] = deque(maxlen=_REFERENCE_SAMPLES)
        name = ranks.smallest_group
        self._reference_ranks = list(ranks.group(name).ranks)
        self._reference = self._runner(
            "pooled_forward",
            [_REFERENCE_BYTES_PER_PEER] * len(self._reference_ranks),
            name,
            batch_size=256,
        )

    def _runner(
        self,
        collective: str,
        bytes_per_peer: Sequence[int],
        group: str,
        batch_size: int,
        lengths_share: float = 0.5,
    ) -> CollectiveRunner | None:
        """Make this rank's part; None where it is not in the group."""
        if self._ranks.group_rank(group) < 0:
            return None
        return CollectiveRunner(
            collective,
            bytes_per_peer,
            batch_size,
            lengths_share,
            process_group=self._ranks.group(group).process_group,
            rank=self._ranks.group_rank(group),
            device=self._ranks.device,
        )

    def _pass(
        self, runner: CollectiveRunner | None, delay_ms: float, stop: bool = False
    ) -> tuple[float, float, bool]:
        """Start together, but for the delay.

        Returns:
            When this rank entered and left the collective [s], and whether some rank
            wanted to stop.
        """
        now, stopped = self._ranks.agree([self._ranks.clock(), float(stop)])
        if runner is None:
            return 0.0, 0.0, bool(stopped)
        begin = now + _START_MARGIN_S + delay_ms * 1e-3
        time.sleep(max(0.0, begin - self._ranks.clock()))
        arrival = self._ranks.clock()
        runner.run()
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return arrival, self._ranks.clock(), bool(stopped)

    def nominal_ms(self, num_passes: int = 60) -> float:
        """Time of the reference, of many passes [ms]."""
        passes = [self._pass(self._reference, 0.0)[:2] for _ in range(num_passes + 5)]
        return float(np.quantile(self._taken_ms(passes[5:]), _REFERENCE_QUANTILE))

    def _taken_ms(
        self, passes: Sequence[tuple[float, float]]
    ) -> npt.NDArray[np.float64]:
        """Time of each pass of the reference, `P`."""
        gathered = self._ranks.gather(np.array(passes))[..., self._reference_ranks]
        arrival_PW, done_PW = gathered[:, 0], gathered[:, 1]
        taken_P: npt.NDArray[np.float64] = done_PW.max(axis=1) - arrival_PW.max(axis=1)
        return taken_P * 1e3

    def measure(self, sampled: SampledCollective, reference_ms: float) -> CommsRecord:
        """Time one sample; the record is the same on every rank."""
        group = self._ranks.group(sampled.group)
        runner = self._runner(
            sampled.collective,
            sampled.bytes_per_peer,
            sampled.group,
            sampled.batch_size,
            sampled.lengths_share,
        )
        delay = 0.0
        if runner is not None:
            delay = sampled.delay_ms[self._ranks.group_rank(sampled.group)]
            runner.run()  # connections, buffers and caches
        passes: list[tuple[float, float]] = []
        references: list[tuple[float, float]] = []
        deadline = time.perf_counter() + self._config.sample_seconds
        while True:
            enough = len(passes) + 1 >= self._config.min_passes
            late = enough and time.perf_counter() > deadline
            last = late or len(passes) + 1 >= self._config.max_passes
            if len(passes) % _REFERENCE_EVERY == 0:
                references.append(self._pass(self._reference, 0.0)[:2])
            arrival, done, stop = self._pass(runner, delay, stop=last)
            passes.append((arrival, done))
            if stop:
                break
        reference_P = self._taken_ms(references)
        gathered = self._ranks.gather(np.array(passes))  # P x 2 x all ranks
        members = list(group.ranks)
        arrival_PW = gathered[:, 0, members] * 1e3
        done_PW = gathered[:, 1, members] * 1e3
        first_P1 = arrival_PW.min(axis=1, keepdims=True)
        arrival_PW, done_PW = arrival_PW - first_P1, done_PW - first_P1
        last_P1 = arrival_PW.max(axis=1, keepdims=True)
        transfer_PW = np.maximum(done_PW - last_P1, 0.0)
        self._recent_ms.append(list(map(float, reference_P)))
        recent_ms = [ms for passes_ms in self._recent_ms for ms in passes_ms]
        speed = reference_ms / float(np.quantile(recent_ms, _REFERENCE_QUANTILE))
        return CommsRecord(
            index=sampled.index,
            repeat_of=sampled.repeat_of,
            collective=sampled.collective,
            group=sampled.group,
            world_size=len(members),
            local_world_size=group.local_world_size,
            bytes_per_peer=sampled.bytes_per_peer,
            delay_ms=sampled.delay_ms,
            arrival_raw_ms=_rows(arrival_PW),
            done_raw_ms=_rows(done_PW),
            ref_raw_ms=tuple(map(float, reference_P)),
            wait_ms=tuple(map(float, np.median(last_P1 - arrival_PW, axis=0))),
            transfer_ms=tuple(map(float, np.median(transfer_PW, axis=0) * speed)),
        )


def _rows(values_PW: npt.NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in np.round(values_PW, 5))


def collect_comms(config: CommsConfig, console: Console | None = None) -> None:
    """Measure, together with the other ranks, until the file holds enough records.

    Call it in every rank.

    Raises:
        ConfigError: The ranks were not started by torchrun, or not so that it works.
        RecordMismatchError: The file holds records of another run, world size or
            backend. On rank 0 alone; elsewhere a `NeuroShardError` says where to look.
        RankFailureError: A rank died or fell silent; what was measured is kept. On
            the lowest rank that is left; elsewhere a `NeuroShardError`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a rank on a CPU has one core
    keep_freed_memory()
    ranks = Ranks(config.backend, config.timeout_seconds, config.group_sizes)
    # torchrun ends all ranks when one dies: they still have to say so and to tidy up.
    with _stop_on_signal() as stop:
        try:
            _collect(config, ranks, stop, console or Console(quiet=ranks.rank > 0))
        except NeuroShardError:
            ranks.close()
            raise
        except RuntimeError as error:
            answers = ranks.roll_call(str(error))
            raise _explain_failure(answers, ranks, config) from error
        else:
            ranks.close()
        finally:
            torch.set_num_threads(threads)


def _explain_failure(
    answers: dict[int, str | None], ranks: Ranks, config: CommsConfig
) -> NeuroShardError:
    """Return the error of the whole run, on the lowest rank that is left."""
    silent = [r for r, answer in answers.items() if answer is None]
    if silent:
        what = f"{', '.join(map(ranks.describe, silent))} died or fell silent"
    else:
        what = f"rank {ranks.rank} failed: {answers[ranks.rank]}"
    kept = f"{config.out} and {journal_path(config.out)} keep what was measured"
    reporter = min(r for r, answer in answers.items() if answer is not None)
    if ranks.rank != reporter:
        return NeuroShardError(f"rank {reporter} reports the failure")
    return RankFailureError(f"{what}; {kept}; the same command goes on from there")


def _collect(
    config: CommsConfig, ranks: Ranks, stop: Sequence[int], console: Console
) -> None:
    known, cap = _open_together(config, ranks)
    meter = _Meter(ranks, config)
    sampling = _capped(config.sampling, cap)
    local, world = ranks.local_world_size, ranks.world_size
    intra = ranks.bandwidth(1) if local > 1 else 0.0
    inter = ranks.bandwidth(local) if local < world else 0.0
    reference_ms = meter.nominal_ms()
    kernels = _KernelTimes({}, {}, 0.0)
    if known is None and ranks.device.type == "cpu":
        kernels = _time_kernels(ranks)
    header = CommsHeader(
        fingerprint=_fingerprint(ranks),
        reference_ms=reference_ms,
        seed=config.seed,
        sampling=_sampling_json(sampling, ranks),
        command=command_line(),
        created=utc_now(),
        backend=config.backend,
        world_size=world,
        local_world_size=local,
        intra_gb_per_s=intra,
        inter_gb_per_s=inter,
        compute_slowdown=kernels.slowdown,
        column_order_ms_per_mb=kernels.column_order_ms_per_mb,
        compute_reference_ms=kernels.reference_ms,
    )
    header = ranks.share(known or header)
    with contextlib.ExitStack() as stack:
        store = None
        if ranks.rank == 0:
            store = stack.enter_context(CommsStore(config.out, header))
            progress = stack.enter_context(measuring_progress(console, "samples"))
            bar = progress.add_task(
                f"{world} ranks", total=config.num_samples, completed=0, rate=0.0
            )
            progress.update(bar, completed=len(store.done))
        done = ranks.share(store.done if store else None)
        deadline = time.monotonic() + config.time_limit_seconds
        for index in (i for i in range(config.num_samples) if i not in done):
            late = ranks.rank == 0 and time.monotonic() > deadline
            if ranks.agree([float(late or bool(stop))])[0]:
                break
            sampled = sample_collective(index, header.seed, sampling, ranks.group_sizes)
            record = meter.measure(sampled, header.reference_ms)
            if store is not None:
                store.append(record)
                progress.update(bar, advance=1, rate=progress.tasks[0].speed or 0.0)
    if ranks.rank == 0 and config.out.exists():
        console.print(summary(config.out))


class _KernelTimes(NamedTuple):
    """What ranks do beside collectives; fields as in `CommsHeader`."""

    slowdown: dict[str, tuple[float, ...]]
    column_order_ms_per_mb: dict[str, tuple[float, ...]]
    reference_ms: float


def _time_kernels(ranks: Ranks) -> _KernelTimes:
    """Time kernels and copies on several ranks of a node at once, and on one alone."""
    reference, order = Reference(ranks.device), _ColumnOrder(ranks.device)
    local = ranks.local_world_size
    counts = sorted({1, local, *(n for n in ranks.group_sizes.values() if n < local)})
    rounds: dict[int, list[npt.NDArray[np.float64]]] = {n: [] for n in counts}
    for count in counts * _SLOWDOWN_ROUNDS:
        mine = []
        for work in (reference.run_phases, order.run):
            ranks.agree([0.0])
            passes = np.ones((_SLOWDOWN_PASSES, 2))
            if ranks.rank < count:
                passes = np.array([work() for _ in passes])
            mine.append(np.median(passes, axis=0))
        everyone = ranks.gather(np.concatenate(mine))[:, :count]
        rounds[count].append(everyone.mean(axis=1))
    times = {n: np.median(rounds[n], axis=0) for n in counts}
    alone = times[1][:2]
    return _KernelTimes(
        {str(n): tuple(map(float, times[n][:2] / alone)) for n in counts},
        {str(n): tuple(map(float, times[n][2:] / order.MEGABYTES)) for n in counts},
        float(alone.sum()),
    )


class _ColumnOrder:
    """Puts the parts of column-wise tables' pooled outputs in order."""

    ROWS, PARTS, WIDTH, MEGABYTES = 1024, 32, 64, 8

    def __init__(self, device: torch.device) -> None:
        self._run = column_permutation([self.WIDTH] * self.PARTS, device)
        shape = (self.ROWS, self.PARTS * self.WIDTH)
        self._input = torch.ones(shape, device=device, requires_grad=True)
        self._grad = torch.ones(shape, device=device)

    def run(self) -> tuple[float, float]:
        """Forward and backward [ms]."""
        start = time.perf_counter()
        output = self._run(self._input)
        middle = time.perf_counter()
        torch.autograd.backward(output, self._grad)
        end = time.perf_counter()
        self._input.grad = None
        return (middle - start) * 1e3, (end - middle) * 1e3


def _open_together(config: CommsConfig, ranks: Ranks) -> tuple[CommsHeader | None, int]:
    """Look at the file on rank 0; tell all ranks what it holds or why it will not do.

    Returns:
        The file's header if it has one, and the most bytes per rank.
    """
    limit = ranks.agree([-float(_memory_cap(ranks))])[0]
    known: CommsHeader | None = None
    failure: NeuroShardError | None = None
    cap = 1 << int(-limit).bit_length() - 1
    if ranks.rank == 0:
        try:
            known = read_comms_header(config.out)
            if known is not None:
                cap = int(known.sampling["bytes_per_rank"][1])
                asked = dataclasses.replace(
                    known,
                    fingerprint=_fingerprint(ranks),
                    seed=config.seed,
                    backend=config.backend,
                    world_size=ranks.world_size,
                    local_world_size=ranks.local_world_size,
                    sampling=_sampling_json(_capped(config.sampling, cap), ranks),
                )
                known.check_same_run(asked, str(config.out))
        except NeuroShardError as error:
            failure = error
    failed, known, cap = ranks.share((failure is not None, known, cap))
    if failure is not None:
        raise failure
    if failed:
        raise NeuroShardError("rank 0 cannot use the file; see its message")
    return known, cap


def _memory_cap(ranks: Ranks) -> int:
    """Most bytes per rank that the buffers of this node's ranks have room for."""
    if ranks.device.type == "cuda":
        free = int(torch.cuda.mem_get_info()[0])
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with contextlib.suppress(OSError):
            text = Path("/proc/meminfo").read_text(encoding="ascii")
            lines = dict(line.split(":", 1) for line in text.splitlines())
            free = int(lines["MemAvailable"].split()[0]) * 1024
        free //= ranks.local_world_size
    # Input, send buffer, output and its copy; one rank may send for all.
    copies = 2 + 2 * (ranks.world_size if ranks.device.type == "cuda" else 1)
    return max(1024, int(free * _MEMORY_SHARE / copies))


def _capped(sampling: CommsSamplingConfig, cap: int) -> CommsSamplingConfig:
    low, high = sampling.bytes_per_rank
    return dataclasses.replace(sampling, bytes_per_rank=(low, max(low, min(high, cap))))


def _sampling_json(sampling: CommsSamplingConfig, ranks: Ranks) -> dict[str, Any]:
    data = dataclasses.asdict(sampling)
    data["bytes_per_rank"] = list(sampling.bytes_per_rank)
    data["groups"] = sorted(ranks.group_sizes)
    data["cores"] = len(os.sched_getaffinity(0))
    return data


def _fingerprint(ranks: Ranks) -> Fingerprint:
    name = cpu_name()
    if ranks.device.type == "cuda":
        name = torch.cuda.get_device_name(ranks.device)
    fbgemm = "none"
    for package in ("fbgemm-gpu", "fbgemm-gpu-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            fbgemm = importlib.metadata.version(package)
    return Fingerprint(
        device=name,
        device_type=ranks.device.type,
        num_threads=1,
        torch=torch.__version__,
        fbgemm=fbgemm,
    )


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[list[int]]:
    """Collect requests to end, which torchrun passes on, instead of dying of them."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    old = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def summary(path: Path) -> str:
    """One paragraph on what a record file holds and how repeatable it is."""
    [(header, records)] = read_comms_records([path])
    text = (
        f"{path}: {len(records)} records of {header.world_size} ranks over "
        f"{header.backend} on {header.fingerprint.device}; one message inside a node "
        f"{header.intra_gb_per_s:.2f} GB/s, reference {header.reference_ms:.3f} ms"
    )
    differences = repeatability(records)
    if len(differences) >= 2:
        tenth = statistics.quantiles(differences, n=10)[-1]
        text += (
            f"; repeatability: median {statistics.median(differences):.1%}, 90th "
            f"percentile {tenth:.1%} over {len(differences)} samples measured again"
        )
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `neuroshard collect comms`."""
    sampling = CommsSamplingConfig()
    low, high = sampling.bytes_per_rank
    parser.add_argument("--out", type=Path, required=True, help="Parquet file")
    parser.add_argument("--backend", default="gloo", help="gloo or nccl")
    parser.add_argument("--num-samples", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-bytes", type=int, default=low, help="per rank")
    parser.add_argument(
        "--max-bytes", type=int, default=high, help="per rank; capped by free memory"
    )
    parser.add_argument(
        "--max-delay-ms",
        type=float,
        default=sampling.max_delay_ms,
        help="longest delay of a rank's start",
    )
    parser.add_argument(
        "--timeout", type=float, default=20.0, help="a silent rank's [s]"
    )
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), help="of the run [s]"
    )
    parser.add_argument("--sample-seconds", type=float, default=0.15)
    parser.add_argument(
        "--group-sizes",
        type=int,
        nargs="*",
        default=(),
        help="also measure groups of the first so many ranks",
    )


def run(args: argparse.Namespace) -> int:
    """Run `neuroshard collect comms`; only one rank prints what went wrong."""
    try:
        collect_comms(
            CommsConfig(
                out=args.out,
                backend=args.backend,
                num_samples=args.num_samples,
                seed=args.seed,
                timeout_seconds=args.timeout,
                time_limit_seconds=args.time_limit,
                sample_seconds=args.sample_seconds,
                group_sizes=tuple(args.group_sizes),
                sampling=CommsSamplingConfig(
                    bytes_per_rank=(args.min_bytes, args.max_bytes),
                    max_delay_ms=args.max_delay_ms,
                ),
            )
        )
    except NeuroShardError as error:
        if isinstance(error, RankFailureError) or os.environ.get("RANK", "0") == "0":
            raise
        return 2
    return 0
