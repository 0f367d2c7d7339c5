"""Measure fused kernels over sampled table sets."""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torchrec_neuroshard.errors import ConfigError, DeviceFailureError, RecordError
from torchrec_neuroshard.files import parse_json
from torchrec_neuroshard.hardware.devices import (
    GpuMonitor,
    GpuState,
    as_device,
    device_bytes,
    find_gpu_monitor,
    free_cached_memory,
    gpu_uuid,
    torch_threads,
)
from torchrec_neuroshard.measure.clock import SetTimer
from torchrec_neuroshard.measure.fingerprint import device_fingerprint
from torchrec_neuroshard.measure.kernels import BOUNDS_CHECK
from torchrec_neuroshard.measure.records import (
    CostRecord,
    RunHeader,
    command_line,
    disturbance,
    repeatability,
    repeatability_line,
    steady_records,
    utc_now,
)
from torchrec_neuroshard.measure.sets import (
    SampledSet,
    SamplingConfig,
    SetSampler,
)
from torchrec_neuroshard.measure.store import (
    RecordStore,
    append_line,
    complete_lines,
    read_header,
)
from torchrec_neuroshard.progress import phase
from torchrec_neuroshard.tables.loaders import load_json
from torchrec_neuroshard.tables.table import TableConfig

__all__ = [
    "CollectConfig",
    "collect_compute",
    "default_sampling",
    "failures_path",
    "read_failures",
    "summary",
    "unit_factor",
]

NUM_ANCHORS = 25
"""Earlier sets that a resumed run measures again, to go on in the same unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectConfig:
    """One run of the compute collector."""

    out: Path
    """Parquet file to write or to go on with."""
    num_sets: int = 5_000
    """Records the file shall hold."""
    seed: int = 0
    device: str = "cpu"
    tables: tuple[Path, ...] = ()
    """JSON files of real tables to draw from beside generated ones."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    time_limit_seconds: float | None = None
    """Measure no further set after this time; None measures them all."""
    started: float | None = None
    """When the time began, by `time.monotonic`; None: when measuring begins."""
    set_seconds: float | None = None
    """A set is repeated for so long, or as often as it must be (`PassCounts`); None
    takes the device's. Less gives more sets in a time, each of less precision."""

    def __post_init__(self) -> None:
        if self.num_sets < 1:
            raise ConfigError(f"num_sets must be at least 1, got {self.num_sets}")


def _monitor(device: torch.device, say: Callable[[str], object]) -> GpuMonitor | None:
    """Find a way to watch a GPU's clocks, and tell whether there is one."""
    uuid = gpu_uuid(device)
    if uuid is None:
        return None
    monitor = find_gpu_monitor(uuid)
    say(
        "pynvml does not answer: clocks, temperature and throttling are not recorded"
        if monitor is None
        else "clocks and temperature are read by pynvml"
    )
    return monitor


def _base_tables(config: CollectConfig) -> list[TableConfig]:
    found: list[TableConfig] = []
    for path in config.tables:
        for tables in load_json(path).values():
            found.extend(tables)
    return found


def collect_compute(
    config: CollectConfig, say: Callable[[str], object] = print
) -> None:
    """Measure until the file holds `config.num_sets` records, or time is over.

    What there is to tell is told to `say`.

    Sets that other work disturbed, or that a GPU measured with its clocks held down
    while most were not, are measured again at the end while there is time. The better
    measurement is kept; each record says whether it was throttled. Sets that do not fit
    into the device's memory are left out, told, and tried again by the next run.

    Raises:
        RecordMismatchError: The file holds records of another machine or run.
        DeviceFailureError: A GPU failed for good; the same command goes on.
    """
    device = as_device(config.device)
    base_tables = _base_tables(config)
    header = RunHeader(
        fingerprint=device_fingerprint(device, 1),
        reference_ms=0.0,
        seed=config.seed,
        sampling={
            **_plain(dataclasses.asdict(config.sampling)),
            "workloads": sorted({t.name.rsplit("/", 1)[0] for t in base_tables}),
            "num_base_tables": len(base_tables),
        },
        command=command_line(),
        created=utc_now(),
        bounds_check=BOUNDS_CHECK,
    )
    with torch_threads(1):  # a rank on a CPU has one core
        _collect(config, header, base_tables, device, say)


def _collect(
    config: CollectConfig,
    header: RunHeader,
    base_tables: Sequence[TableConfig],
    device: torch.device,
    say: Callable[[str], object],
) -> None:
    path = config.out
    known = read_header(path)
    if known is not None:
        known.check_same_run(header, str(path))
    timer = SetTimer(
        device,
        config.sampling.max_weight_bytes,
        reference_ms=known.reference_ms if known else None,
        budget_seconds=config.set_seconds,
    )
    header = known or dataclasses.replace(header, reference_ms=timer.reference_ms)
    meter = _SetMeter(config, base_tables, timer, _monitor(device, say))
    with RecordStore(path, header) as store:
        left_out = store.done | read_failures(path).keys()
        todo = [i for i in range(config.num_sets) if i not in left_out]
        if todo and timer.reference_ms:
            earlier = _anchors(store.records)
            factor = unit_factor(earlier, [meter.measure(r.index) for r in earlier])
            timer.reference_ms *= factor
            if earlier:
                say(
                    f"{len(earlier)} sets measured again after the restart: times are "
                    f"multiplied by {factor:.3f} to agree with the earlier ones"
                )
        run = _Run(config, meter, store)
        if not (run.measure(todo) and run.return_to_disturbed(todo)):
            say(f"stopped at the time limit of {config.time_limit_seconds:g} s")
    for line in meter.troubles():
        say(line)
    for index, why in read_failures(path).items():
        say(f"set {index} ended an earlier run and is left out: {why}")
    say(summary(path, store.header, store.records))


class _Run:
    """The sets that one process measures, within its time."""

    def __init__(
        self,
        config: CollectConfig,
        meter: _SetMeter,
        store: RecordStore,
    ) -> None:
        limit, started = config.time_limit_seconds, config.started
        begin = time.monotonic() if started is None else started
        self._deadline = math.inf if limit is None else begin + limit
        self._config, self._meter, self._store = config, meter, store

    def measure(self, indices: Sequence[int]) -> bool:
        """Measure sets; False where time was over before the last."""
        store = self._store
        total = len(store.done) + len(indices)
        with phase("") as shown:
            for index in indices:
                shown.text = f"measuring, {len(store.done)} of {total} sets done"
                if time.monotonic() > self._deadline:
                    return False
                record = self._measured(index)
                if record is not None:
                    store.append(record)
        return True

    def return_to_disturbed(self, indices: Sequence[int]) -> bool:
        """Measure again what was disturbed; False where time was over before."""
        store = self._store
        steady = {r.index for r in steady_records(store.records)}
        to_check = set(indices) - steady
        again = [r for r in store.records if r.index in to_check]
        if not again:
            return True
        usual_ms = statistics.median(r.reference_ms for r in store.records)
        with phase(f"measuring {len(again)} disturbed sets again"):
            for old in again:
                if time.monotonic() > self._deadline:
                    return False
                new = self._measured(old.index)
                if new is not None and _doubt(new, usual_ms) < _doubt(old, usual_ms):
                    num_throttled = old.num_throttled + bool(old.throttled)
                    store.append(dataclasses.replace(new, num_throttled=num_throttled))
        return True

    def _measured(self, index: int) -> CostRecord | None:
        try:
            return self._meter.measure_if_it_fits(index)
        except RuntimeError as error:
            raise _device_failure(self._config.out, index, error) from error


def _doubt(record: CostRecord, usual_ms: float) -> tuple[bool, float]:
    """Sort key of two measurements of a set: the lower one is kept."""
    return bool(record.throttled), disturbance(record, usual_ms)


def failures_path(path: Path) -> Path:
    """Where sets are noted that no process survived."""
    return path.with_name(f"{path.name}.failed")


def read_failures(path: Path) -> dict[int, str]:
    """Sets of a run that ended a process, and with which error."""
    noted = failures_path(path)
    if not noted.is_file():
        return {}
    try:
        lines = [parse_json(line) for line in complete_lines(noted)]
        return {int(line["index"]): str(line["error"]) for line in lines}
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise RecordError(
            f"{noted} is damaged ({error!r:.200}); delete it to try all sets again"
        ) from error


def _device_failure(path: Path, index: int, error: RuntimeError) -> RuntimeError:
    """Note a set after which a GPU does nothing more in this process.

    Returns:
        The error to raise: as it was, unless it is the device's.
    """
    text = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    # "CUDA error" of torch, "CUDA Error" of FBGEMM.
    if "cuda error" not in str(error).lower():
        return error
    append_line(failures_path(path), {"index": index, "error": text})
    return DeviceFailureError(
        f"set {index} failed on the device ({text}), which can do nothing more in this "
        f"process; {path} keeps what was measured, and the same command goes on "
        "without that set"
    )


class _SetMeter:
    """Measures the sets of one run, and counts what it could not measure."""

    def __init__(
        self,
        config: CollectConfig,
        base_tables: Sequence[TableConfig],
        timer: SetTimer,
        monitor: GpuMonitor | None,
    ) -> None:
        self._config = config
        self._sampler = SetSampler(config.sampling, config.seed, base_tables)
        self._timer, self._monitor = timer, monitor
        self._ahead: SampledSet | None = None
        self._left_out: dict[int, str] = {}

    def measure(self, index: int) -> CostRecord:
        """Measure a set once, whatever the device's state."""
        sampled = self._ahead
        if sampled is None or sampled.index != index:
            sampled = self._sampler.sample(index)
        state: GpuState | None = None

        def meanwhile() -> None:
            nonlocal state
            # Most likely the next one: drawn while the device works on this one.
            self._ahead = self._sampler.sample(index + 1)
            if self._monitor is not None:
                state = self._monitor.state()

        source = index if sampled.repeat_of is None else sampled.repeat_of
        measured = self._timer.measure(
            sampled.tables,
            sampled.access,
            sampled.batch_size,
            (self._config.seed, source),
            meanwhile,
        )
        return CostRecord(
            index=index,
            repeat_of=sampled.repeat_of,
            held_out=sampled.held_out,
            batch_size=sampled.batch_size,
            tables=sampled.tables,
            **measured.for_record(),
            sm_clock_mhz=state.sm_clock_mhz if state else None,
            memory_clock_mhz=state.memory_clock_mhz if state else None,
            temperature_c=state.temperature_c if state else None,
            throttled=state.throttled_by() if state else "",
        )

    def measure_if_it_fits(self, index: int) -> CostRecord | None:
        """Measure a set, the second time where there was no memory; None: still not."""
        why = ""
        for _ in range(2):
            try:
                return self.measure(index)
            except torch.OutOfMemoryError as error:
                why = str(error).splitlines()[0]
            # Outside of the handler, which holds the failed set: what it and the sets
            # before have left in pieces.
            gc.collect()
            free_cached_memory(torch.device(self._config.device))
        self._left_out[index] = why
        return None

    def troubles(self) -> list[str]:
        """What there is to tell, one line each."""
        lines = [f"set {i} was left out: {why}" for i, why in self._left_out.items()]
        failures = 0 if self._monitor is None else self._monitor.num_failures
        if failures:
            lines.append(f"the driver did not tell its state {failures} times")
        return lines


def _anchors(records: Sequence[CostRecord]) -> list[CostRecord]:
    """Records spread evenly over those of an earlier process."""
    firsts = [r for r in records if r.repeat_of is None]
    step = max(1, len(firsts) // NUM_ANCHORS)
    return firsts[::step][:NUM_ANCHORS]


def unit_factor(earlier: Sequence[CostRecord], again: Sequence[CostRecord]) -> float:
    """Factor that brings a new process's times to the unit of an earlier one.

    The reference set lies elsewhere in memory after every start and may then be faster
    or slower than before beside the same samples, by some percent.

    Returns:
        Median of earlier over new totals; 1 without any.
    """
    if not earlier:
        return 1.0
    return statistics.median(
        e.total_ms / a.total_ms for e, a in zip(earlier, again, strict=True)
    )


def _plain(data: dict[str, object]) -> dict[str, object]:
    """Tuples as lists, as JSON gives them back."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}


def summary(path: Path, header: RunHeader, records: Sequence[CostRecord]) -> str:
    """One paragraph on what a record file holds and how repeatable it is."""
    text = (
        f"{path}: {len(records)} records on {header.fingerprint.device}, "
        f"{sum(r.held_out for r in records)} of held-out tables. "
        + repeatability_line(repeatability(records), "set")
    )
    dropped = sum(r.num_throttled for r in records)
    if dropped:
        text += f" {dropped} measurements dropped for throttling."
    throttled = sum(bool(r.throttled) for r in records)
    if throttled:
        text += f" {throttled} kept though the device was throttled."
    return text


def default_sampling(device: torch.device) -> SamplingConfig:
    """Return what is drawn for a device unless options say otherwise."""
    return SamplingConfig.for_device(device.type, device_bytes(device))
