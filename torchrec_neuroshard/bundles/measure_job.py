"""The first launch on a device calibrates: all ranks measure, rank 0 fits a bundle.

Each rank starts a separate process that measures. The job gets all memory back when the
process ends, and survives whatever kills the process: a kernel, the system or the time
limit. If one of the processes fails, all end at once. The processes form their own
group. They measure different sets of the user's tables (taking turns if they share a
CPU) and then collectives. Rank 0's process fits a bundle. The fit starts from the
shipped bundle of this device type that, times a factor, has the lowest error on the
sets.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from torchrec_neuroshard.bundles.find import physical_estimate, shipped_bundles
from torchrec_neuroshard.bundles.fit import evaluate
from torchrec_neuroshard.bundles.format import Bundle
from torchrec_neuroshard.bundles.make import make_bundle, make_comms_bundle
from torchrec_neuroshard.bundles.set_data import MIN_SETS, build_sets, split_records
from torchrec_neuroshard.bundles.settings import TrainConfig
from torchrec_neuroshard.errors import RankFailureError, RecordError
from torchrec_neuroshard.files import from_fields, to_fields
from torchrec_neuroshard.hardware.device_types import backend_of, is_accelerator
from torchrec_neuroshard.hardware.devices import (
    accelerator,
    device_bytes,
    free_host_bytes,
    own_device,
    torch_threads,
)
from torchrec_neuroshard.measure.clock import MOST_SET_SECONDS, SetTimer
from torchrec_neuroshard.measure.kernels import BOUNDS_CHECK, device_fingerprint
from torchrec_neuroshard.measure.placing import Room, place_shards, row_bytes
from torchrec_neuroshard.measure.ranks import (
    POLL_S,
    Failure,
    Ranks,
    telling_failures,
)
from torchrec_neuroshard.measure.records import (
    CostRecord,
    RunHeader,
    disturbance,
    steady_records,
)
from torchrec_neuroshard.measure.run import measure, measure_column_order
from torchrec_neuroshard.measure.run_collectives import collect_comms
from torchrec_neuroshard.measure.sets import PLAN_SHARE, SampledSet, SamplingConfig
from torchrec_neuroshard.measure.settings import CommsConfig
from torchrec_neuroshard.measure.store import RecordStore, read_records
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.progress import clear, shown
from torchrec_neuroshard.tables.access import AccessDistribution
from torchrec_neuroshard.tables.table import TableConfig

KERNELS_NAME, COMMS_NAME = "kernels.jsonl", "collectives.jsonl"
"""Files of the measured records, in the bundle's folder."""
_REQUEST, _BUNDLE, _REASON = "request.json", "bundle", "reason.txt"

_KERNEL_SHARE, _COMMS_SHARE = 0.5, 0.75
"""Shares of the budget after which measuring kernels, and then collectives, ends."""
PROGRAM = ("-m", "torchrec_neuroshard.bundles.measure_job")
_FREE_SHARE = 0.5
"""Share of the free memory that the sets of all ranks may take."""
_USUAL_SETS = 60
"""A set is repeated for a shorter time if the budget is too short for this many."""
_MOST_COMMS_SECONDS, _USUAL_COLLECTIVES = 0.05, 100
"""The same limits for collectives."""
_SCALE_ROWS = 4
"""A table of a set takes at most one part in this many of the set's memory."""
_MOST_DISTURBED = 0.25
"""Largest share of disturbed sets; beyond it the measurement is not trusted."""
_STEPS, _STEPS_PER_S = 300, 10
"""Training steps; short budgets get fewer, but at least a fifth."""
_MIN_COLLECTIVES = 40
_SEED = 0
_PR_SET_PDEATHSIG = 1
"""Source: Linux, prctl.h."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """What to measure; the same on all ranks."""

    shards: tuple[TableConfig, ...]
    """Shards that the search may place: whole tables, column shards and row shards."""
    kernels: tuple[int, ...]
    """Kernel of each shard."""
    tables: tuple[int, ...]
    """Table of each shard."""
    row_kernels: tuple[int, ...]
    """Kernels of row shards; every rank has one of each of their tables."""
    plan_ranks: int
    """Ranks of the job's plans; `world_size` unless one rank measures alone."""
    batch_size: int
    """Samples that a kernel sees."""
    device_type: str
    world_size: int
    local_world_size: int
    seconds: float
    """Time budget."""
    grace_seconds: float = 60.0
    """Extra time, since starting may take long on a busy machine. A process is ended
    after twice the budget plus this; ranks wait for each other for the budget plus
    this."""

    @property
    def limit_seconds(self) -> float:
        """Time after which a process is ended."""
        return 2 * self.seconds + self.grace_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One rank of the group that measures."""

    rank: int
    address: str = ""
    """Where rank 0 serves a store, in which the ranks meet; unused by a single rank."""
    port: int = 0


# In the job's own process.


def take_part(request: LaunchRequest, member: Member, folder: Path) -> Path | None:
    """Measure in a separate process and wait until it ends.

    Args:
        request: What to measure.
        member: This rank.
        folder: An empty folder; on rank 0 it gets the bundle.

    Returns:
        The bundle's folder on rank 0; None on other ranks.

    Raises:
        RankFailureError: The process, or another rank's, failed or took too long.
        ConfigError: This rank has no device.
        OSError: The process could not be started.
    """
    text = json.dumps(to_fields(request))
    (folder / _REQUEST).write_text(text, encoding="utf-8")
    if request.world_size == 1:
        _run(request, member, folder, lambda: None)
    else:
        with telling_failures(member.rank, member.address, member.port) as failure:
            _run(request, member, folder, failure)
    if member.rank:
        return None
    if Bundle(folder / _BUNDLE).compute is None:
        raise RankFailureError("its process wrote no bundle")
    return folder / _BUNDLE


def _run(
    request: LaunchRequest, member: Member, folder: Path, failure: Failure
) -> None:
    """Run the process that measures, until it or another rank's process fails."""
    end = time.monotonic() + request.limit_seconds
    with subprocess.Popen(
        [sys.executable, *PROGRAM, str(folder), str(os.getpid())],
        env=_environment(request, member),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Progress is shown on rank 0 alone.
        stderr=None if member.rank == 0 else subprocess.DEVNULL,
    ) as process:
        try:
            while (code := _code_after(process, POLL_S)) is None:
                if (reason := failure()) is not None:
                    raise RankFailureError(reason)
                if time.monotonic() > end:
                    limit_s = request.limit_seconds
                    raise RankFailureError(f"it had not finished after {limit_s:.0f} s")
        finally:
            process.kill()
    if code:
        reason = f"its process exited with code {code}"
        with contextlib.suppress(OSError):
            reason = (folder / _REASON).read_text(encoding="utf-8")
        raise RankFailureError(reason)


def _code_after(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Wait for a process; return its exit code, or None if it still runs."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchVerdict:
    """How far to trust the measurement of a first launch."""

    num_sets: int
    num_disturbed: int
    """Sets that other work disturbed every time they were measured."""
    error: float
    """The bundle's mean error of forward, backward and total on held-out sets."""
    estimate_error: float
    """The same error of the cost model that was used before."""

    @property
    def is_worse(self) -> bool:
        """Whether the cost model from before is better than the bundle."""
        return self.error > self.estimate_error

    @property
    def is_sound(self) -> bool:
        """Whether later launches may use the bundle."""
        is_quiet = self.num_disturbed <= _MOST_DISTURBED * self.num_sets
        return is_quiet and not self.is_worse

    def __str__(self) -> str:
        """Return the figures for and against the bundle."""
        return (
            f"other work disturbed {self.num_disturbed} of {self.num_sets} sets; on "
            f"held-out sets the measured model's error is {self.error:.1%}, the "
            f"estimate's {self.estimate_error:.1%}"
        )


def judge(bundle: Path, estimate: CostModel) -> LaunchVerdict | None:
    """Judge the bundle of a first launch by its records.

    Args:
        bundle: Folder that `take_part` returned.
        estimate: Cost model to use without the bundle.

    Returns:
        The verdict; None if the bundle's folder holds no records.

    Raises:
        RecordError: There are too few records, or they are damaged.
        BundleError: The bundle cannot be used.
    """
    path = bundle / KERNELS_NAME
    if not path.exists():
        return None
    (header,), records = read_records([path])
    _, held_out = split_records(_steady_enough(records))
    data = build_sets(held_out)
    usual_ms = header.reference_ms or 1.0
    return LaunchVerdict(
        num_sets=len(records),
        num_disturbed=sum(disturbance(r, usual_ms) > 1.0 for r in records),
        error=evaluate("bundle", Bundle(bundle).cost_model(), data).log_error,
        estimate_error=evaluate("estimate", estimate, data).log_error,
    )


def _environment(request: LaunchRequest, member: Member) -> dict[str, str]:
    """Return the environment of the measuring process, for torch.distributed.

    Raises:
        ConfigError: This rank has no device.
    """
    local_rank = member.rank % request.local_world_size
    device = own_device(request.device_type, local_rank)
    mine = dict(
        RANK=str(member.rank),
        WORLD_SIZE=str(request.world_size),
        LOCAL_WORLD_SIZE=str(request.local_world_size),
        # Both processes see the same devices.
        LOCAL_RANK=str(local_rank if device.index is None else device.index),
        MASTER_ADDR=member.address,
        MASTER_PORT=str(member.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 of the job serves the store
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
    )
    if request.device_type == "cpu":
        mine["OMP_NUM_THREADS"] = "1"
    others = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    return others | mine


# In the process that measures.


def draw_launch_set(request: LaunchRequest, index: int, max_bytes: int) -> SampledSet:
    """Return set number `index`: a draw of shards that a rank may get.

    Args:
        request: Shards to draw from.
        index: Number of the set; equal numbers give equal sets.
        max_bytes: Most bytes of a set; larger tables lose rows.
    """
    rng = np.random.default_rng([_SEED, index])
    # A kernel's probability is in proportion to its shards.
    kernel = request.kernels[int(rng.integers(len(request.kernels)))]
    is_plan = rng.random() < PLAN_SHARE
    shards = (_plan_shards if is_plan else _any_shards)(request, kernel, rng)
    drawn: list[TableConfig] = []
    room = Room(math.inf, max_bytes, math.inf)
    for shard in shards:
        most_rows = max(1, max_bytes // _SCALE_ROWS // row_bytes(shard))
        rows = min(shard.num_embeddings, most_rows)
        shard = _with_rows(shard, rows, request.batch_size, len(drawn))
        if room.take(shard, request.batch_size):
            drawn.append(shard)
    rounds = _rounds(request)
    if rounds > 1 and index // 2 % 2:
        drawn = [dataclasses.replace(shard, pooled=True) for shard in drawn]
    return SampledSet(
        index=index,
        seed=(_SEED, index),
        # Every other one of the first sets is held out, so that few sets suffice.
        held_out=index % (2 if index < 2 * rounds * MIN_SETS else 5) == 0,
        batch_size=request.batch_size,
        tables=tuple(drawn),
    )


def _rounds(request: LaunchRequest) -> int:
    """Return 2 if two models are fitted: CPUs have other kernels for sequences.

    Half of the sets of sequences are then measured as pooled ones.
    """
    on_cpu = not is_accelerator(request.device_type)
    return 2 if on_cpu and not all(shard.pooled for shard in request.shards) else 1


def _ways(request: LaunchRequest, kernel: int) -> dict[int, list[TableConfig]]:
    """Return table -> its shards in a kernel, the widest first."""
    ways: dict[int, list[TableConfig]] = {}
    for shard, own, table in zip(
        request.shards, request.kernels, request.tables, strict=True
    ):
        if own == kernel:
            ways.setdefault(table, []).append(shard)
    return {t: sorted(w, key=lambda s: -s.embedding_dim) for t, w in ways.items()}


def _any_shards(
    request: LaunchRequest, kernel: int, rng: np.random.Generator
) -> list[TableConfig]:
    """Draw one shard each of some of a kernel's tables."""
    ways = list(_ways(request, kernel).values())
    usual = len(ways) / request.plan_ranks
    # From one table to twice a rank's average, plus two for split tables.
    most = max(1.0, min(len(ways), 2 * usual + 2))
    count = round(float(np.exp(rng.uniform(0, np.log(most)))))
    chosen = (ways[i] for i in rng.permutation(len(ways))[:count])
    return [shards[int(rng.integers(len(shards)))] for shards in chosen]


_estimate = functools.cache(physical_estimate)


def _plan_shards(
    request: LaunchRequest, kernel: int, rng: np.random.Generator
) -> list[TableConfig]:
    """Draw a plan of a kernel's tables, and return the shards of one rank.

    Every rank has one row shard of each row-wise table.
    """
    ways = _ways(request, kernel)
    pairs = zip(request.kernels, request.tables, strict=True)
    elsewhere = {table for own, table in pairs if own != kernel}
    share = rng.random()  # of the tables that may be in another kernel
    chosen = [w for t, w in ways.items() if t not in elsewhere or rng.random() < share]
    chosen = chosen or list(ways.values())
    shards: list[TableConfig] = []
    for widest, *narrow in chosen:
        shard = (widest, *narrow)[int(rng.integers(1 + len(narrow)))]
        parts = widest.embedding_dim // shard.embedding_dim
        shards += [shard] * parts
    if kernel in request.row_kernels:
        return list(dict.fromkeys(shards))
    estimate = _estimate(request.device_type)
    ranks = place_shards(shards, request.batch_size, request.plan_ranks, estimate)
    filled = [rank for rank in ranks if rank]
    return filled[int(rng.integers(len(filled)))]


def _with_rows(
    shard: TableConfig, rows: int, batch_size: int, place: int
) -> TableConfig:
    profile = shard.profile_at(batch_size)
    if rows < shard.num_embeddings:
        access = AccessDistribution.of_batch(profile, rows)
        histogram = access.histogram(profile.num_lookups)
        profile = dataclasses.replace(profile, access_histogram=histogram)
    name = f"{shard.name}#{place}"
    return dataclasses.replace(shard, name=name, num_embeddings=rows, profile=profile)


def measure_and_fit(request: LaunchRequest, folder: Path, begin: float) -> None:
    """Measure as one rank of the group; rank 0 writes the bundle.

    Args:
        request: What to measure.
        folder: Gets the bundle on rank 0.
        begin: `time.monotonic()` when the budget began to count.

    Raises:
        RecordError: Time or memory allowed too few sets.
        RankFailureError: Another rank died or took too long.
    """
    backend = backend_of(request.device_type)
    patience = request.seconds + request.grace_seconds
    ranks = Ranks(backend, patience) if request.world_size > 1 else None
    device = own_device(request.device_type, 0) if ranks is None else ranks.device
    until = begin + _KERNEL_SHARE * request.seconds
    with torch_threads(1):
        found, order_ms, reference_ms = _measure_kernels(request, ranks, device, until)
    bundle = folder / _BUNDLE
    _say(begin, f"{len(found)} sets of your tables measured")
    is_first = ranks is None or ranks.rank == 0
    if is_first:
        header = RunHeader(
            fingerprint=device_fingerprint(device, 1),
            reference_ms=reference_ms,
            bounds_check=BOUNDS_CHECK,
            seed=_SEED,
            sampling={"first_launch": True, "num_shards": len(request.shards)},
            column_order_ms=order_ms,
        )
        with RecordStore(bundle / KERNELS_NAME, header) as store:
            for record in found:
                store.append(record)
    if ranks is not None:
        left = begin + _COMMS_SHARE * request.seconds - time.monotonic()
        usual = (_COMMS_SHARE - _KERNEL_SHARE) * request.seconds / _USUAL_COLLECTIVES
        collect_comms(
            CommsConfig(
                out=bundle / COMMS_NAME,
                backend=backend,
                num_samples=10_000,
                timeout_seconds=patience,
                time_budget_seconds=max(left, 0.1),
                min_samples=_MIN_COLLECTIVES,
                kernel_rounds=2,
                sample_seconds=min(_MOST_COMMS_SECONDS, usual),
                bytes_per_rank=_bytes_per_rank(request),
            ),
            _tell,
        )
    _say(begin, "collectives measured")
    if is_first:
        _fit(request, bundle)
        _say(begin, "cost models fitted")


def _say(begin: float, text: str) -> None:
    clear()
    _tell(f"neuroshard: {text}, {time.monotonic() - begin:.0f} s")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def _bytes_per_rank(request: LaunchRequest) -> tuple[int, int]:
    """Return a range of collective sizes around the sizes of the user's outputs."""
    samples = request.batch_size / request.world_size
    widest: dict[int, float] = {}
    for shard, table in zip(request.shards, request.tables, strict=True):
        columns = shard.embedding_dim * shard.num_outputs
        widest[table] = max(columns, widest.get(table, 0))
    total = 4.0 * samples * sum(widest.values())
    low, high = int(total / request.world_size / 64), int(2 * total)
    return max(1024, low), max(65_536, high)


def _measure_kernels(
    request: LaunchRequest,
    ranks: Ranks | None,
    device: torch.device,
    until: float,
) -> tuple[list[CostRecord], dict[str, tuple[float, float]], float]:
    """Measure this rank's sets.

    Returns:
        All ranks' records, the reordering as in `RunHeader`, and their time unit.
    """
    if ranks is None:
        return measure_mine(request, None, device, until)
    turn, turns = ranks.turn() if device.type == "cpu" else (0, 1)
    begin = time.monotonic()
    for number in range(turns):
        ranks.agree([0.0])
        if number == turn:
            end = begin + (until - begin) * (turn + 1) / turns
            measured = measure_mine(request, ranks, device, end)
    everyone = ranks.gather_objects(measured)
    # One unit for all: that of the rank whose reference was disturbed least.
    unit_ms = min(ms for *_, ms in everyone)
    found: list[CostRecord] = []
    found_order: dict[str, tuple[float, float]] = {}
    for records, order_ms, ms in everyone:
        ratio = unit_ms / ms if ms else 1.0  # a GPU has no reference
        found_order |= {n: (ratio * f, ratio * b) for n, (f, b) in order_ms.items()}
        found += (
            dataclasses.replace(
                r,
                fwd_ms=ratio * r.fwd_ms,
                bwd_ms=ratio * r.bwd_ms,
                reference_ms=ratio * r.reference_ms,
            )
            for r in records
        )
    return found, found_order, unit_ms


def measure_mine(
    request: LaunchRequest,
    ranks: Ranks | None,
    device: torch.device,
    until: float,
) -> tuple[list[CostRecord], dict[str, tuple[float, float]], float]:
    """Measure until a time, but at least this rank's part of the minimum of sets.

    The first rank also times the reordering of columns.

    Returns:
        The records, the reordering as in `RunHeader`, and this rank's time unit. The
        median of the records' reference times is the unit, so that a rank on a slower
        host or far memory does not count as disturbed.
    """
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    max_bytes = _free_bytes(device, request.local_world_size)
    each = None
    if device.type == "cpu":
        time_left = max(0.0, until - time.monotonic())
        each = min(MOST_SET_SECONDS, time_left * size / _USUAL_SETS)
    timer = SetTimer(device, max_bytes, time_budget_seconds=each)
    order_ms = {} if rank else measure_column_order(timer, max_bytes)
    kept: dict[int, CostRecord] = {}
    measure(
        (draw_launch_set(request, i, max_bytes) for i in rank_indices(rank, size)),
        timer,
        lambda record: kept.update({record.index: record}),
        until=until,
        min_sets=-(-2 * _rounds(request) * MIN_SETS // size),
        title="measuring your tables",
    )
    if not kept:
        raise RecordError("none of the sets of tables could be measured")
    usual_ms = statistics.median(r.reference_ms for r in kept.values())
    ratio = timer.reference_ms / usual_ms if usual_ms else 1.0  # none on a GPU
    records = [
        dataclasses.replace(r, reference_ms=ratio * r.reference_ms)
        for r in kept.values()
    ]
    return records, order_ms, timer.reference_ms


def rank_indices(rank: int, size: int) -> Iterator[int]:
    """Yield the numbers of a rank's sets: one of every `size`, each time the next.

    So each rank measures sets to train on and sets to test on. The latter have even
    numbers.
    """
    return (row * size + (rank + row) % size for row in itertools.count())


def _free_bytes(device: torch.device, num_ranks: int) -> int:
    """Return the memory that a rank's sets may take: a share of the free memory."""
    usual = SamplingConfig.for_memory(device_bytes(device)).max_weight_bytes
    if is_accelerator(device.type):
        free, _ = accelerator(device.type).mem_get_info(device)
        return min(usual, int(_FREE_SHARE * free))
    return min(usual, int(_FREE_SHARE * free_host_bytes() / num_ranks))


def _fit(request: LaunchRequest, bundle: Path) -> None:
    records = bundle / KERNELS_NAME
    steps = max(_STEPS // 5, min(_STEPS, int(_STEPS_PER_S * request.seconds)))
    make_bundle(
        [records],
        bundle,
        "first launch",
        TrainConfig(tuning_steps=steps, seed=_SEED),
        start="nearest",
        select=_steady_enough,
    )
    collectives = bundle / COMMS_NAME
    if collectives.exists():
        alike = shipped_bundles(request.device_type)
        known = (bundle for bundle in alike if bundle.comms)
        before = next(known, None)
        make_comms_bundle([collectives], bundle, "first launch", before=before)


def _steady_enough(records: Sequence[CostRecord]) -> list[CostRecord]:
    """Leave out disturbed records, unless too few would be left to fit and judge."""
    steady = steady_records(records)
    held_out = sum(r.held_out for r in steady)
    enough = min(held_out, len(steady) - held_out) >= MIN_SETS
    return steady if enough else list(records)


def _end_with(parent: int) -> None:
    """Let Linux kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(3)


def _main(folder: Path, parent: int) -> int:
    begin = time.monotonic()
    _end_with(parent)
    del sys.argv[1:]  # `command_line` is for bundle cards
    data = json.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    request = from_fields(LaunchRequest, data)
    warnings.simplefilter("ignore")
    _tell(
        f"neuroshard: first launch on this device: measuring for about "
        f"{request.seconds:.0f} s; later launches use the cached result"
    )
    try:
        with shown():
            measure_and_fit(request, folder, begin)
    except Exception as error:
        if isinstance(error, RuntimeError | RankFailureError):
            # Perhaps another rank failed first: let it say why, and end this process.
            time.sleep(4 * POLL_S)
        text = f"{type(error).__name__}: {error}"
        (folder / _REASON).write_text(text.splitlines()[0], "utf-8")
        return 1
    return 0


if __name__ == "__main__":
    # Not `sys.exit`: if ranks of the group died, its threads may never end.
    os._exit(_main(Path(sys.argv[1]), int(sys.argv[2])))
