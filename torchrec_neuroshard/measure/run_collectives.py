"""Measure TorchRec's collectives, under torchrun.

Every rank runs this module; rank 0 draws samples, stores records and shows progress.
The speed of a shared machine drifts, so times are relative to a fixed reference
collective, which is timed every few passes.

Shapes: `P` passes, `W` ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import NeuroShardError, RankFailureError
from torchrec_neuroshard.hardware.device_types import backend_of, is_accelerator
from torchrec_neuroshard.hardware.devices import (
    accelerator,
    default_device_type,
    free_host_bytes,
    synchronize,
    torch_threads,
)
from torchrec_neuroshard.measure.clock import Reference, keep_freed_memory
from torchrec_neuroshard.measure.collectives import (
    CollectiveRunner,
    sample_collective,
)
from torchrec_neuroshard.measure.kernels import device_fingerprint
from torchrec_neuroshard.measure.ranks import Ranks
from torchrec_neuroshard.measure.records import (
    Collective,
    CommsHeader,
    CommsRecord,
    relative_spread,
    repeatability,
    repeatability_line,
)
from torchrec_neuroshard.measure.settings import CommsConfig
from torchrec_neuroshard.measure.store import RecordStore, read_header
from torchrec_neuroshard.progress import phase

_MIN_PASSES, _MAX_PASSES = 3, 60
"""Fewest and most passes of a sample."""
_REFERENCE_BYTES_PER_PEER = 64 * 1024
_REFERENCE_SAMPLES = 5
"""Samples over which the reference's speed is averaged. The machine drifts over
minutes, but a single pass of the reference is as noisy as a sample's."""
_REFERENCE_EVERY = 4
"""Passes of a sample per pass of the reference."""
_REFERENCE_QUANTILE = 0.25
"""Quantile of the reference's passes that measures the machine's speed. If threads
share cores, passes differ by whole time slices, and a median jumps between values."""
_KERNEL_PASSES = 40
_START_MARGIN_S = 1e-3
"""Delay between agreeing on a start and starting, so that all ranks are ready."""
_MEMORY_SHARE = 0.25
"""Share of a node's free memory for the buffers of its ranks."""


class _CollectiveMeter:
    """Times collectives on the ranks' common clock."""

    def __init__(self, ranks: Ranks, sample_seconds: float) -> None:
        self._ranks, self._sample_seconds = ranks, sample_seconds
        self._recent_ms: deque[list[float]] = deque(maxlen=_REFERENCE_SAMPLES)
        sizes = ranks.group_sizes
        smallest = min(sizes, key=lambda name: (sizes[name], name))
        self._reference_ranks = list(ranks.groups[smallest].ranks)
        self._reference = self._runner(
            Collective(
                index=-1,
                collective="pooled_forward",
                group=smallest,
                bytes_per_peer=(_REFERENCE_BYTES_PER_PEER,) * sizes[smallest],
                batch_size=256,
            )
        )

    def _runner(self, sampled: Collective) -> CollectiveRunner | None:
        """Return the runner for this rank; None if it is not in the group."""
        group = self._ranks.groups[sampled.group]
        if group.rank < 0:
            return None
        return CollectiveRunner(
            sampled, group.process_group, group.rank, self._ranks.device
        )

    def _pass(
        self, runner: CollectiveRunner | None, stop: bool = False
    ) -> tuple[float, float, bool]:
        """Run a pass that all ranks start together.

        Returns:
            When this rank entered and left the collective [s], and whether any rank
            wants to stop.
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
        """Return the time of the reference, over many passes [ms]."""
        passes = [self._pass(self._reference)[:2] for _ in range(num_passes + 5)]
        taken_P = self._transfer_ms(passes[5:], self._reference_ranks).max(axis=1)
        return float(np.quantile(taken_P, _REFERENCE_QUANTILE))

    def _transfer_ms(
        self, passes: Sequence[tuple[float, float]], members: list[int]
    ) -> npt.NDArray[np.float64]:
        """Return each pass's time from the last arrival to each member's end, `P x W`.

        Args:
            passes: When this rank entered and left the collective [s].
            members: Participating ranks.
        """
        gathered = self._ranks.gather(np.array(passes))[..., members]
        last_P1 = gathered[:, 0].max(axis=1, keepdims=True)
        taken_PW: npt.NDArray[np.float64] = np.maximum(gathered[:, 1] - last_P1, 0.0)
        return taken_PW * 1e3

    def measure(self, sampled: Collective, reference_ms: float) -> CommsRecord:
        """Time one sample; the record is the same on every rank."""
        group, runner = self._ranks.groups[sampled.group], self._runner(sampled)
        if runner is not None:
            runner.run()  # connections, buffers and caches
        passes: list[tuple[float, float]] = []
        references: list[tuple[float, float]] = []
        deadline = time.perf_counter() + self._sample_seconds
        stop = False
        while not stop:
            late = time.perf_counter() > deadline
            last = len(passes) + 1 >= (_MIN_PASSES if late else _MAX_PASSES)
            if len(passes) % _REFERENCE_EVERY == 0:
                references.append(self._pass(self._reference)[:2])
            arrival, done, stop = self._pass(runner, stop=last)
            passes.append((arrival, done))
        reference_P = self._transfer_ms(references, self._reference_ranks).max(axis=1)
        transfer_PW = self._transfer_ms(passes, list(group.ranks))
        self._recent_ms.append(reference_P.tolist())
        recent_ms = [ms for passes_ms in self._recent_ms for ms in passes_ms]
        speed = reference_ms / float(np.quantile(recent_ms, _REFERENCE_QUANTILE))
        drawn = {f.name: getattr(sampled, f.name) for f in fields(Collective)}
        return CommsRecord(
            **drawn,
            world_size=len(group.ranks),
            local_world_size=group.local_world_size,
            num_passes=len(passes),
            spread=relative_spread(transfer_PW.max(axis=1).tolist()),
            reference_ms=float(np.median(reference_P)),
            transfer_ms=tuple(map(float, np.median(transfer_PW, axis=0) * speed)),
        )


def collect_comms(config: CommsConfig, say: Callable[[str], object] = print) -> None:
    """Measure, together with the other ranks, until the file holds enough records.

    Call it on every rank; on rank 0, `say` gets the messages.

    Raises:
        ConfigError: The ranks were not started by torchrun, or with wrong settings.
        RecordMismatchError: The file holds records of another run, world size or
            backend. All ranks raise it.
        RankFailureError: This rank failed, or waited for a rank that died or stopped
            responding; records measured so far are kept.
    """
    keep_freed_memory()
    ranks = Ranks(config.backend, config.timeout_seconds, config.group_sizes)
    # A rank on a CPU has one core. If a rank dies, torchrun ends all others with a
    # signal: they must still report it and clean up.
    with torch_threads(1), _stop_on_signal() as stop:
        try:
            _collect(config, ranks, stop, say)
        except NeuroShardError:
            raise
        except RuntimeError as error:
            raise RankFailureError(
                f"rank {ranks.rank} stopped: {error}. {config.out} keeps the measured "
                "records; the same command continues from there"
            ) from error
        finally:
            ranks.close()


def _collect(
    config: CommsConfig, ranks: Ranks, stop: Sequence[int], say: Callable[[str], object]
) -> None:
    most_bytes = int(-ranks.agree([-float(_memory_cap(ranks))])[0])
    opened: list[RecordStore] = []

    def open_store() -> tuple[CommsHeader, set[int]]:
        opened.append(store := _open(config, ranks, most_bytes))
        return cast(CommsHeader, store.header), store.done

    header, done = ranks.from_first(open_store)
    store = opened[0] if opened else None
    with store or contextlib.nullcontext(), phase("") as shown:
        meter = _CollectiveMeter(ranks, config.sample_seconds)
        if not header.reference_ms:
            speeds = _measure_speeds(config, ranks, meter)
            header = replace(header, **speeds)
            if store is not None:
                store.change_header(**speeds)
        low, high = header.sampling["bytes_per_rank"]
        deadline = time.monotonic() + config.time_budget_seconds
        for index in (i for i in range(config.num_samples) if i not in done):
            late = index >= config.min_samples and time.monotonic() > deadline
            if ranks.agree([float(late or bool(stop))])[0]:
                break
            sampled = sample_collective(
                index, header.seed, (low, high), ranks.group_sizes
            )
            record = meter.measure(sampled, header.reference_ms)
            if store is not None:
                store.append(record)
                shown.text = (
                    f"measuring, {len(store.done)} of {config.num_samples} collectives "
                    f"of {ranks.world_size} ranks done"
                )
    if store is not None and store.done:
        say(
            f"{config.out}: {len(store.done)} records of {header.world_size} ranks "
            f"with {header.backend} on {header.fingerprint.device}; one message inside "
            f"a node {header.intra_gb_per_s:.2f} GB/s, reference "
            f"{header.reference_ms:.3f} ms. "
            + repeatability_line(repeatability(store.records), "collective")
        )


def _open(config: CommsConfig, ranks: Ranks, most_bytes: int) -> RecordStore:
    """Open the file of a run; the speeds in the header of a new run are 0.

    Args:
        config: The run's settings.
        ranks: The run's ranks.
        most_bytes: Most bytes per rank that the memory allows. A continued run keeps
            its first value, so that it draws the same samples.

    Raises:
        RecordMismatchError: The file holds another run.
    """
    known, fingerprint = read_header(config.out), device_fingerprint(ranks.device, 1)
    if isinstance(known, CommsHeader) and known.fingerprint == fingerprint:
        most_bytes = known.sampling["bytes_per_rank"][1]
    low, high = config.bytes_per_rank
    header = CommsHeader(
        fingerprint=fingerprint,
        seed=config.seed,
        sampling={
            "bytes_per_rank": [low, max(low, min(high, most_bytes))],
            "groups": sorted(ranks.groups),
            "cores": len(os.sched_getaffinity(0)),
        },
        backend=config.backend,
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
    )
    return RecordStore(config.out, header)


def _measure_speeds(
    config: CommsConfig, ranks: Ranks, meter: _CollectiveMeter
) -> dict[str, Any]:
    """Return fields of `CommsHeader`: links, reference and kernels."""
    local, world = ranks.local_world_size, ranks.world_size
    kernels: dict[str, Any] = {}
    if not is_accelerator(ranks.device.type):
        kernels = _time_kernels(ranks, config.kernel_rounds)
    return {
        "intra_gb_per_s": ranks.bandwidth(1) if local > 1 else 0.0,
        "inter_gb_per_s": ranks.bandwidth(local) if local < world else 0.0,
        "reference_ms": meter.nominal_ms(),
        **kernels,
    }


def _time_kernels(ranks: Ranks, num_rounds: int) -> dict[str, Any]:
    """Time kernels on one rank, and on several ranks of a node at once.

    Returns:
        Fields of `CommsHeader`.
    """
    local = ranks.local_world_size
    counts = sorted({1, local, *(n for n in ranks.group_sizes.values() if n < local)})
    reference = Reference()
    rounds: dict[int, list[npt.NDArray[np.float64]]] = {n: [] for n in counts}
    for count in counts * num_rounds:
        ranks.agree([0.0])
        passes = np.ones((_KERNEL_PASSES, 2))
        if ranks.rank < count:
            passes = np.array([reference.run_phases() for _ in passes])
        everyone = ranks.gather(np.median(passes, axis=0))[:, :count]
        rounds[count].append(everyone.mean(axis=1))
    times = {str(n): np.median(rounds[n], axis=0) for n in counts}
    alone = times["1"]
    return {
        "compute_slowdown": {n: (t / alone).tolist() for n, t in times.items()},
        "compute_reference_ms": float(alone.sum()),
    }


def _memory_cap(ranks: Ranks) -> int:
    """Return the most bytes per rank that fit into this node's free memory."""
    on_host = not is_accelerator(ranks.device.type)
    if on_host:
        free = free_host_bytes() // ranks.local_world_size
    else:
        free = int(accelerator(ranks.device.type).mem_get_info()[0])
    # Input, send buffer, output and its copy; one rank may send all bytes.
    copies = 2 + 2 * (1 if on_host else ranks.world_size)
    return max(1024, int(free * _MEMORY_SHARE / copies))


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[list[int]]:
    """Collect the signals that torchrun forwards, instead of dying from them."""
    received: list[int] = []
    old = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def default_backend() -> str:
    """Return the accelerators' backend if every rank has one, else gloo."""
    kind = default_device_type()
    local = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if is_accelerator(kind) and accelerator(kind).device_count() < int(local):
        kind = "cpu"
    return backend_of(kind)
