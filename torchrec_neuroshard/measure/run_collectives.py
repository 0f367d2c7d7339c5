"""Measure TorchRec's collectives, under torchrun.

Every rank runs this module; rank 0 samples, keeps the records and shows progress. Each
pass of a sample stands beside a pass of one fixed reference collective, since the speed
of a shared machine drifts.

Shapes: `P` passes, `W` ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrec_neuroshard.errors import (
    ConfigError,
    NeuroShardError,
    RankFailureError,
)
from torchrec_neuroshard.hardware.devices import (
    BACKENDS,
    accelerator,
    backend_of,
    default_device_type,
    free_host_bytes,
    is_accelerator,
    synchronize,
    torch_threads,
)
from torchrec_neuroshard.measure.clock import Reference, keep_freed_memory
from torchrec_neuroshard.measure.collectives import (
    CollectiveRunner,
    CommsSamplingConfig,
    SampledCollective,
    sample_collective,
)
from torchrec_neuroshard.measure.kernels import column_permutation, device_fingerprint
from torchrec_neuroshard.measure.ranks import Ranks
from torchrec_neuroshard.measure.records import (
    CommsHeader,
    CommsRecord,
    command_line,
    relative_spread,
    repeatability,
    repeatability_line,
    utc_now,
)
from torchrec_neuroshard.measure.store import (
    RecordStore,
    journal_path,
    read_comms_records,
    read_header,
)
from torchrec_neuroshard.progress import phase

__all__ = [
    "BACKEND_NAMES",
    "CommsConfig",
    "collect_comms",
    "default_backend",
    "summary",
]

BACKEND_NAMES = " or ".join(BACKENDS.values())
_REFERENCE_BYTES_PER_PEER = 64 * 1024
_REFERENCE_SAMPLES = 5
"""The reference's speed is taken over so many samples: the machine drifts over minutes,
while a single pass of the reference is as noisy as the sample's."""
_REFERENCE_EVERY = 4
"""Passes of a sample per pass of the reference."""
_REFERENCE_QUANTILE = 0.25
"""Quantile of the reference's passes that tells the machine's speed. Where threads
share cores, passes differ by whole time slices: a median jumps between two values."""
_SLOWDOWN_PASSES = 40
_START_MARGIN_S = 1e-3
"""From the agreement on a start to the start, so that all ranks know of it."""
_MEMORY_SHARE = 0.25
"""Of the free memory of a node, what the buffers of its ranks may take."""


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
    min_samples: int = 0
    """Measured whatever the time."""
    sample_seconds: float = 0.15
    """Stop repeating a sample after this time."""
    min_passes: int = 3
    max_passes: int = 60
    kernel_rounds: int = 5
    """How often kernels of several ranks at once are timed beside one alone."""
    group_sizes: tuple[int, ...] = ()
    """Groups of the first so many ranks to measure beside all ranks, in the same run:
    the machine's drift is then the same for all world sizes."""
    sampling: CommsSamplingConfig = field(default_factory=CommsSamplingConfig)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS.values():
            raise ConfigError(f"backend must be {BACKEND_NAMES}, got '{self.backend}'")
        if not self.timeout_seconds > 0:
            raise ConfigError(
                f"timeout_seconds must be above 0, got {self.timeout_seconds}"
            )


class _CollectiveMeter:
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
        self, runner: CollectiveRunner | None, stop: bool = False
    ) -> tuple[float, float, bool]:
        """Start together.

        Returns:
            When this rank entered and left the collective [s], and whether some rank
            wanted to stop.
        """
        now, stopped = self._ranks.agree([self._ranks.clock(), float(stop)])
        if runner is None:
            return 0.0, 0.0, bool(stopped)
        begin = now + _START_MARGIN_S
        time.sleep(max(0.0, begin - self._ranks.clock()))
        arrival = self._ranks.clock()
        runner.run()
        synchronize(self._ranks.device)
        return arrival, self._ranks.clock(), bool(stopped)

    def nominal_ms(self, num_passes: int = 60) -> float:
        """Time of the reference, of many passes [ms]."""
        passes = [self._pass(self._reference)[:2] for _ in range(num_passes + 5)]
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
        if runner is not None:
            runner.run()  # connections, buffers and caches
        passes: list[tuple[float, float]] = []
        references: list[tuple[float, float]] = []
        deadline = time.perf_counter() + self._config.sample_seconds
        while True:
            enough = len(passes) + 1 >= self._config.min_passes
            late = enough and time.perf_counter() > deadline
            last = late or len(passes) + 1 >= self._config.max_passes
            if len(passes) % _REFERENCE_EVERY == 0:
                references.append(self._pass(self._reference)[:2])
            arrival, done, stop = self._pass(runner, stop=last)
            passes.append((arrival, done))
            if stop:
                break
        reference_P = self._taken_ms(references)
        gathered = self._ranks.gather(np.array(passes))  # P x 2 x all ranks
        members = list(group.ranks)
        last_P1 = gathered[:, 0, members].max(axis=1, keepdims=True)
        transfer_PW = np.maximum(gathered[:, 1, members] - last_P1, 0.0) * 1e3
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
            num_passes=len(passes),
            spread=relative_spread(transfer_PW.max(axis=1).tolist()),
            reference_ms=float(np.median(reference_P)),
            transfer_ms=tuple(map(float, np.median(transfer_PW, axis=0) * speed)),
        )


def collect_comms(config: CommsConfig, say: Callable[[str], object] = print) -> None:
    """Measure, together with the other ranks, until the file holds enough records.

    Call it in every rank; what there is to tell, rank 0 tells to `say`.

    Raises:
        ConfigError: The ranks were not started by torchrun, or not so that it works.
        RecordMismatchError: The file holds records of another run, world size or
            backend. On rank 0 alone; elsewhere a `NeuroShardError` says where to look.
        RankFailureError: This rank failed, or waited for one that died or fell silent;
            what was measured is kept.
    """
    keep_freed_memory()
    ranks = Ranks(config.backend, config.timeout_seconds, config.group_sizes)
    # A rank on a CPU has one core. torchrun ends all ranks when one dies: they still
    # have to say so and to tidy up.
    with torch_threads(1), _stop_on_signal() as stop:
        try:
            _collect(config, ranks, stop, say)
        except NeuroShardError:
            raise
        except RuntimeError as error:
            raise RankFailureError(
                f"rank {ranks.rank} stopped: {error}. {config.out} and "
                f"{journal_path(config.out)} keep what was measured; the same command "
                "goes on from there"
            ) from error
        finally:
            ranks.close()


def _collect(
    config: CommsConfig, ranks: Ranks, stop: Sequence[int], say: Callable[[str], object]
) -> None:
    known, cap = _open_together(config, ranks)
    meter = _CollectiveMeter(ranks, config)
    sampling = _capped(config.sampling, cap)
    local, world = ranks.local_world_size, ranks.world_size
    intra = ranks.bandwidth(1) if local > 1 else 0.0
    inter = ranks.bandwidth(local) if local < world else 0.0
    reference_ms = meter.nominal_ms()
    kernels: dict[str, Any] = {}
    if known is None and not is_accelerator(ranks.device.type):
        kernels = _time_kernels(ranks, config.kernel_rounds)
    header = CommsHeader(
        fingerprint=device_fingerprint(ranks.device, 1),
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
        **kernels,
    )
    header = ranks.share(known or header)
    with contextlib.ExitStack() as stack:
        store = None
        if ranks.rank == 0:
            store = stack.enter_context(RecordStore(config.out, header))
        shown = stack.enter_context(phase(""))
        done = ranks.share(store.done if store else None)
        deadline = time.monotonic() + config.time_limit_seconds
        for index in (i for i in range(config.num_samples) if i not in done):
            late = (
                ranks.rank == 0
                and index >= config.min_samples
                and time.monotonic() > deadline
            )
            if ranks.agree([float(late or bool(stop))])[0]:
                break
            sampled = sample_collective(index, header.seed, sampling, ranks.group_sizes)
            record = meter.measure(sampled, header.reference_ms)
            if store is not None:
                store.append(record)
                shown.text = (
                    f"measuring, {len(store.done)} of {config.num_samples} collectives "
                    f"of {world} ranks done"
                )
    if ranks.rank == 0 and config.out.exists():
        say(summary(config.out))


def _time_kernels(ranks: Ranks, num_rounds: int) -> dict[str, Any]:
    """Time kernels and copies on several ranks of a node at once, and on one alone.

    Returns:
        Fields of `CommsHeader`.
    """
    reference, order = Reference(), _ColumnOrder(ranks.device)
    local = ranks.local_world_size
    counts = sorted({1, local, *(n for n in ranks.group_sizes.values() if n < local)})
    rounds: dict[int, list[npt.NDArray[np.float64]]] = {n: [] for n in counts}
    for count in counts * num_rounds:
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

    def both(values: npt.NDArray[np.float64]) -> tuple[float, float]:
        return float(values[0]), float(values[1])

    return {
        "compute_slowdown": {str(n): both(t[:2] / alone) for n, t in times.items()},
        "column_order_ms_per_mb": {
            str(n): both(t[2:] / order.MEGABYTES) for n, t in times.items()
        },
        "compute_reference_ms": float(alone.sum()),
    }


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
            known = read_header(config.out, CommsHeader)
            if known is not None:
                cap = int(known.sampling["bytes_per_rank"][1])
                asked = dataclasses.replace(
                    known,
                    fingerprint=device_fingerprint(ranks.device, 1),
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
    on_host = not is_accelerator(ranks.device.type)
    if on_host:
        free = free_host_bytes() // ranks.local_world_size
    else:
        free = int(accelerator(ranks.device.type).mem_get_info()[0])
    # Input, send buffer, output and its copy; one rank may send for all.
    copies = 2 + 2 * (1 if on_host else ranks.world_size)
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
    return (
        f"{path}: {len(records)} records of {header.world_size} ranks over "
        f"{header.backend} on {header.fingerprint.device}; one message inside a node "
        f"{header.intra_gb_per_s:.2f} GB/s, reference {header.reference_ms:.3f} "
        "ms. " + repeatability_line(repeatability(records), "collective")
    )


def default_backend() -> str:
    """Name the backend of the accelerators here, where there is one per rank."""
    kind = default_device_type()
    local = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if is_accelerator(kind) and accelerator(kind).device_count() < int(local):
        kind = "cpu"
    return backend_of(kind)
