"""Measure fused kernels with table sets.

`measure` is the only loop: it takes sets from a source, measures them within a time
budget and passes each record on. `neuroshard collect compute`, `neuroshard calibrate`
and the first launch on a device all run it.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

from torchrec_neuroshard.errors import DeviceFailureError
from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.hardware.device_types import GPU
from torchrec_neuroshard.hardware.devices import (
    as_device,
    free_cached_memory,
    torch_threads,
)
from torchrec_neuroshard.measure.clock import SetTimer
from torchrec_neuroshard.measure.kernels import (
    BOUNDS_CHECK,
    column_permutation,
    device_fingerprint,
)
from torchrec_neuroshard.measure.records import (
    CostRecord,
    RunHeader,
    TableSet,
    disturbance,
    repeatability,
    repeatability_line,
    steady_records,
)
from torchrec_neuroshard.measure.sets import SampledSet, SetSampler
from torchrec_neuroshard.measure.settings import CollectConfig
from torchrec_neuroshard.measure.store import RecordStore, read_header
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.tables.loaders import load_json
from torchrec_neuroshard.tables.table import TableConfig

_PLANS_TIME_SHARE = 0.2
"""Share of a time budget that is kept for measuring plans."""
NUM_ANCHORS = 25
"""Earlier sets that a resumed run measures again, to continue in the same time unit."""
MAX_TRIES = 4
"""Most measurements of a set that other work disturbs."""
_RECENT_SETS = 101
"""The reference set's usual time is its median over this many recent sets."""
_CHECKED_SETS = 20
"""A continued run must draw these first sets as before."""


# The loop


def measure(
    sets: Iterable[SampledSet],
    timer: SetTimer,
    keep: Callable[[CostRecord], object],
    *,
    until: float = math.inf,
    min_sets: int = 0,
    title: str = "measuring",
) -> dict[int, str]:
    """Measure sets until there are no more, or until the time is over.

    A set is measured again if other work disturbed it, or if the GPU was throttled then
    but not for most sets; `MAX_TRIES` limits the measurements. The best one is kept.
    Repeats alternate with new sets, because a disturbance lasts longer than one set.

    Args:
        sets: Sets to measure, possibly endless. The next set is drawn while the device
            works.
        timer: Times the sets.
        keep: Gets each record, and again if a set has a better one.
        until: No set is started after this time of `time.monotonic`.
        min_sets: Measure at least this many sets, even after `until`; disturbed ones
            are repeated afterwards.
        title: Text of the progress line, before the number of sets.

    Returns:
        Index of each set that did not fit into the device's memory -> its error.

    Raises:
        DeviceFailureError: A GPU failed, and only a new process can recover it;
            `args[1]` is the set's index.
    """
    source, queue = iter(sets), deque[SampledSet]()

    def draw() -> None:
        if not queue:
            queue.extend(itertools.islice(source, 1))

    records: dict[int, CostRecord] = {}
    disturbed: dict[int, tuple[SampledSet, int]] = {}  # set and number of measurements
    left_out: dict[int, str] = {}
    recent = deque[float](maxlen=_RECENT_SETS)
    num_throttled = 0
    may_return = ended = False

    def badness(record: CostRecord) -> tuple[bool, float]:  # throttled first
        is_held = bool(record.throttled) and 2 * num_throttled <= len(records)
        return is_held, disturbance(record, statistics.median(recent))

    with phase("") as shown:
        while True:
            shown.text = f"{title}, {len(records)} sets done"
            draw()
            if not queue and not ended:
                # No new sets: repeat only what training would drop.
                ended, steady = True, steady_records(list(records.values()))
                for record in steady:
                    disturbed.pop(record.index, None)
            if not queue and not disturbed:
                return left_out
            tried = max(len(records), len(left_out))
            if tried >= min_sets and time.monotonic() >= until:
                return left_out
            if disturbed and (not queue or (may_return and tried >= min_sets)):
                worst = max(disturbed, key=lambda index: badness(records[index]))
                sampled, tries = disturbed.pop(worst)
                may_return = False
            else:
                sampled, tries = queue.popleft(), 0
                may_return = True
            try:
                new = _measure_if_it_fits(sampled, timer, draw)
            except torch.OutOfMemoryError as error:
                if sampled.index not in records:
                    left_out[sampled.index] = str(error).splitlines()[0]
                continue
            old = records.get(sampled.index)
            recent.append(new.reference_ms or 1.0)
            if old is not None:
                dropped = old.num_throttled + bool(old.throttled)
                new = replace(new, num_throttled=dropped)
            if old is None or badness(new) < badness(old):
                num_throttled += bool(new.throttled) - bool(old and old.throttled)
                records[sampled.index] = new
                keep(new)
            if tries + 1 < MAX_TRIES and badness(records[sampled.index]) > (False, 1.0):
                disturbed[sampled.index] = sampled, tries + 1


def _measure_if_it_fits(
    sampled: SampledSet, timer: SetTimer, draw: Callable[[], None]
) -> CostRecord:
    """Measure a set; if memory runs out, free some and try once more."""
    was_tried = False
    while True:
        try:
            return measure_set(sampled, timer, draw)
        except torch.OutOfMemoryError:
            if was_tried:
                raise
        except RuntimeError as error:
            # torch says "CUDA error", FBGEMM "CUDA Error".
            if "cuda error" not in str(error).lower():
                raise
            text = str(error).strip().splitlines()[0]
            raise DeviceFailureError(text, sampled.index) from error
        # Free fragments of earlier sets. This is outside the handler, whose exception
        # keeps the failed set alive.
        was_tried = True
        gc.collect()
        free_cached_memory(timer.device)


def measure_set(
    sampled: SampledSet, timer: SetTimer, meanwhile: Callable[[], None] = lambda: None
) -> CostRecord:
    """Measure a set once, in any state of the device.

    Args:
        sampled: The set.
        timer: Times the set.
        meanwhile: Called while an accelerator works.
    """
    measured = timer.measure(sampled, meanwhile)
    drawn = {f.name: getattr(sampled, f.name) for f in fields(TableSet)}
    return CostRecord(**drawn, **vars(measured))


_ORDERED_WIDTHS = [64] * 32
_ORDERED_BYTES = (2**14, 2**20, 2**23, 2**26, 2**28)
"""Sizes of pooled outputs whose columns are reordered. The smallest is a launch."""


def measure_column_order(
    timer: SetTimer, max_bytes: int
) -> dict[str, tuple[float, float]]:
    """Time the reordering of column-wise tables' parts.

    Args:
        timer: Times the passes.
        max_bytes: Most bytes for a pass's four tensors.

    Returns:
        See `RunHeader.column_order_ms`.
    """
    found = {}
    permute = column_permutation(_ORDERED_WIDTHS, timer.device)
    for size in _ORDERED_BYTES:
        if 4 * size > max_bytes:
            break
        shape = (size // 4 // sum(_ORDERED_WIDTHS), sum(_ORDERED_WIDTHS))
        pooled = torch.ones(shape, device=timer.device, requires_grad=True)
        grad = torch.ones(shape, device=timer.device)

        def forward(pooled: torch.Tensor = pooled) -> torch.Tensor:
            pooled.grad = None
            return permute(pooled)

        backward = partial(torch.autograd.backward, grad_tensors=grad)
        measured = timer.measure_passes(itertools.repeat((forward, backward)))
        found[str(size)] = measured.fwd_ms, measured.bwd_ms
    return found


# A file of records


def collect_compute(
    config: CollectConfig,
    estimate: CostModel,
    say: Callable[[str], object] = print,
) -> None:
    """Measure until the file holds `config.num_sets` records or the time is over.

    Sets that do not fit into the device's memory are left out with a message; the next
    run tries them again.

    Args:
        config: Settings of the run.
        estimate: Rough cost model, for drawing sets; see `SetSampler`.
        say: Gets the messages.

    Raises:
        RecordMismatchError: The file holds records of another machine or run.
        DeviceFailureError: A GPU failed, and only a new process can recover it; the
            same command continues.
    """
    device, path, base = as_device(config.device), config.out, list[TableConfig]()
    for file in config.tables:
        base.extend(itertools.chain.from_iterable(load_json(file).values()))
    sampler = SetSampler(config.sampling, config.seed, base, estimate)
    known, fingerprint = read_header(path), device_fingerprint(device, 1)
    if known is not None and known.fingerprint != fingerprint:
        known = None  # of another machine; the store refuses it if it has records
    with torch_threads(1):  # a rank on a CPU has one core
        timer = SetTimer(
            device,
            config.sampling.max_weight_bytes,
            reference_ms=known.reference_ms if known else None,
            time_budget_seconds=config.set_seconds,
        )
        if timer.monitor is not None:
            say("pynvml reads clocks and temperature")
        elif device.type == GPU:
            say("pynvml does not answer: clocks and throttling are not recorded")
        header = RunHeader(
            fingerprint=fingerprint,
            reference_ms=timer.reference_ms,
            seed=config.seed,
            sampling={
                **to_fields(config.sampling),
                "workloads": sorted({t.name.rsplit("/", 1)[0] for t in base}),
                "num_base_tables": len(base),
                # Other tables, estimates and versions draw other sets.
                "first_sets": _checksum(map(sampler.sample, range(_CHECKED_SETS))),
            },
            bounds_check=BOUNDS_CHECK,
        )
        with RecordStore(path, header) as store:
            if not store.header.column_order_ms:
                order_ms = measure_column_order(timer, config.sampling.max_weight_bytes)
                store.change_header(column_order_ms=order_ms)
            _fill(config, store, timer, sampler, say)
    if timer.monitor is not None and timer.monitor.num_failures:
        say(f"reading the GPU's state failed {timer.monitor.num_failures} times")
    for index, why in store.header.failed.items():
        say(f"set {index} ended an earlier run and is left out: {why}")
    say(_summary(path, store.header, store.records))


def _checksum(sets: Iterable[SampledSet]) -> int:
    return zlib.crc32(repr(list(sets)).encode())


def _fill(
    config: CollectConfig,
    store: RecordStore,
    timer: SetTimer,
    sampler: SetSampler,
    say: Callable[[str], object],
) -> None:
    """Measure the sets that a file lacks, then the plans."""
    until = plans_until = math.inf
    if config.time_budget_seconds is not None:
        begin = time.monotonic() if config.started is None else config.started
        plans_until = begin + config.time_budget_seconds
        share = 1.0 - _PLANS_TIME_SHARE if config.num_plans else 1.0
        until = begin + share * config.time_budget_seconds
    done, failed = store.done, store.header.failed
    known = done | set(map(int, failed))
    todo = [i for i in range(config.num_sets) if i not in known]
    firsts = [r for r in store.records if r.repeat_of is None and r.plan is None]
    earlier = firsts[:: max(1, len(firsts) // NUM_ANCHORS)][:NUM_ANCHORS]
    if todo and timer.reference_ms and earlier:
        again = [measure_set(sampler.sample(r.index), timer) for r in earlier]
        factor = unit_factor(earlier, again)
        timer.reference_ms *= factor
        say(
            f"{len(earlier)} sets measured again after the restart: new times are "
            f"multiplied by {factor:.3f} to match the earlier ones"
        )
    try:
        left_out = measure(
            map(sampler.sample, todo),
            timer,
            store.append,
            until=until,
            title=f"measuring {len(todo)} sets",
        )
        num_missing = len(set(todo) - store.done) - len(left_out)
        for number in range(config.num_plans):
            if time.monotonic() >= plans_until:
                break
            sets = [s for s in sampler.plan_sets(number) if s.index not in known]
            title = f"measuring the ranks of plan {number + 1} of {config.num_plans}"
            left_out |= measure(sets, timer, store.append, title=title)
    except DeviceFailureError as error:
        text, index = error.args
        store.change_header(failed={**failed, str(index): text})
        raise DeviceFailureError(
            f"set {index} failed on the device ({text}), which this process cannot use "
            f"any more; {config.out} keeps the measured records, and the same command "
            "continues without this set"
        ) from error
    if num_missing > 0:
        say(f"stopped at the time limit of {config.time_budget_seconds:g} s")
    for index, why in left_out.items():
        say(f"set {index} was left out: {why}")


def unit_factor(earlier: Sequence[CostRecord], again: Sequence[CostRecord]) -> float:
    """Return the factor that converts a new process's times to an earlier one's unit.

    Each process allocates the reference set at other addresses, which can make it a few
    percent faster or slower than before.

    Returns:
        Median of earlier over new totals.
    """
    pairs = zip(earlier, again, strict=True)
    return statistics.median(e.total_ms / a.total_ms for e, a in pairs)


def _summary(path: Path, header: RunHeader, records: Sequence[CostRecord]) -> str:
    """Return a paragraph on a file's records and their repeatability."""
    text = (
        f"{path}: {len(records)} records on {header.fingerprint.device}, "
        f"{sum(r.held_out for r in records)} of held-out tables. "
        + repeatability_line(repeatability(records), "set")
    )
    dropped = sum(r.num_throttled for r in records)
    if dropped:
        text += f" {dropped} measurements were dropped because of throttling."
    throttled = sum(bool(r.throttled) for r in records)
    if throttled:
        text += f" {throttled} were kept although the device was throttled."
    return text
