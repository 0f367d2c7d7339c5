"""One measurement: a table set or a collective, its time, and where it was taken."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrec_neuroshard.errors import RecordError, RecordMismatchError
from torchrec_neuroshard.models.base import COLLECTIVES
from torchrec_neuroshard.tables.table import TableConfig

__all__ = [
    "SCHEMA_VERSION",
    "Collective",
    "CommsHeader",
    "CommsRecord",
    "CostRecord",
    "Fingerprint",
    "RunHeader",
    "TableSet",
    "command_line",
    "disturbance",
    "relative_spread",
    "repeatability",
    "repeatability_line",
    "steady_records",
    "utc_now",
]

SCHEMA_VERSION = 2
"""Version of the record layout; another version is refused."""

MAX_SPREAD = 0.1
"""Relative median deviation up to which a record's passes always agree."""
MAX_REFERENCE_RATIO = 1.5
"""Reference over the median of all records' up to which a record is always usable. Of
the 6,000 records first shipped 0.7 % exceed this or `MAX_SPREAD`."""
USUAL_SHARE = 0.8
"""Of a run's records, those that are taken to show how its machine is, not how it was
disturbed: on machines that are never quiet only the worst of the rest are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The hardware and libraries that a time belongs to."""

    device: str
    """Name of the CPU or GPU."""
    device_type: str
    """`cpu` or `cuda`."""
    num_threads: int
    """CPU threads of the kernel (1: one rank, one core)."""
    torch: str
    fbgemm: str


def command_line() -> str:
    """Return the command under way, as provenance."""
    return " ".join(map(shlex.quote, ["neuroshard", *sys.argv[1:]]))


def utc_now() -> str:
    """Return the time, UTC, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """What all records of one file share."""

    fingerprint: Fingerprint
    reference_ms: float = 0.0
    """Nominal forward + backward time of the reference set [ms]; 0 where the device is
    steady enough to be timed without one, and before it is measured."""
    seed: int
    sampling: Mapping[str, Any]
    """The sampling configuration, in full."""
    command: str = field(default_factory=command_line)
    created: str = field(default_factory=utc_now)
    bounds_check: str = "none"
    """How FBGEMM checks ids within a timed forward: `warning`, as TorchRec trains;
    `none` in files from before it was on."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Index of each sample that a GPU failed on for good -> its error."""
    schema_version: int = SCHEMA_VERSION
    kind: str = "compute"
    """What `neuroshard collect` calls it."""

    def check_same_run(self, other: RunHeader, where: str) -> None:
        """Refuse to mix `other`'s records with this header's.

        Raises:
            RecordMismatchError: Other hardware, libraries, seed, sampling or check of
                ids.
        """
        names = ["kind", "seed", "world_size", "local_world_size", "sampling"]
        lines = self.measured_unlike(other) + _differences(self, other, names)
        if lines:
            raise RecordMismatchError(
                f"{where} holds records of another run ({'; '.join(lines)}); write to "
                "another file, or measure with the same machine, libraries and options"
            )

    def measured_unlike(self, other: RunHeader) -> list[str]:
        """Return one line per reason why times of `other` mean something else."""
        names = [f.name for f in dataclasses.fields(Fingerprint)]
        lines = _differences(self.fingerprint, other.fingerprint, names)
        return lines + _differences(self, other, ["bounds_check", "backend"])


def _differences(mine: object, other: object, names: Iterable[str]) -> list[str]:
    """Return one line per attribute in which two objects differ."""
    pairs = [
        (name, getattr(mine, name, None), getattr(other, name, None)) for name in names
    ]
    return [
        f"{name}: {own!r} against {its!r}" for name, own, its in pairs if own != its
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsHeader(RunHeader):
    """What all records of one file of collectives share."""

    backend: str
    """`gloo` or `nccl`."""
    world_size: int
    """Ranks of the run."""
    local_world_size: int
    """Ranks per node."""
    intra_gb_per_s: float = 0.0
    """Measured rate of one large message between two ranks of a node."""
    inter_gb_per_s: float = 0.0
    """Same between two nodes; 0 where the run had one."""
    compute_slowdown: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Ranks of one node -> how many times as long forward and backward kernels take
    while so many run theirs, which share its memory and cores. Empty for GPUs."""
    column_order_ms_per_mb: Mapping[str, tuple[float, float]] = field(
        default_factory=dict
    )
    """Ranks of one node -> milliseconds per 2^20 bytes of pooled outputs that the parts
    of column-wise tables take to be put in order, forward and backward, while so many
    ranks do so. Empty for GPUs."""
    compute_reference_ms: float = 0.0
    """Forward + backward of the reference set that kernels are timed beside, on one
    rank alone in this run: ties the two units of time together. 0 for GPUs."""
    kind: str = "comms"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSet:
    """Tables of one fused kernel."""

    index: int
    """Position in the run; the set follows from the run's seed and this."""
    repeat_of: int | None = None
    """Index of the earlier record whose set is measured once more."""
    held_out: bool = False
    """Whether all tables are of the part that trained models are tested on."""
    validation: bool = False
    """Whether all are of the part that chooses among them. False in older files."""
    batch_size: int
    """Samples of one pass."""
    tables: tuple[TableConfig, ...]
    """Shards of the set; each `profile` is at `batch_size`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRecord(TableSet):
    """Forward and backward time of one fused kernel over one table set."""

    fwd_ms: float
    """Median of the forward passes, relative to the reference if there is one."""
    bwd_ms: float
    """Same for the backward passes, optimizer step included."""
    num_passes: int
    """Timed passes."""
    spread: float
    """Median absolute deviation of a pass's forward + backward, over their median."""
    reference_ms: float = 0.0
    """Median forward + backward of the reference set beside them; 0 without one."""
    sm_clock_mhz: float | None = None
    """A GPU's core clock during the passes; None where nothing reads it."""
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    """A GPU's temperature then."""
    throttled: str = ""
    """Why the device held its clocks down during this measurement; empty if it did
    not."""
    num_throttled: int = 0
    """Earlier measurements of this set that were dropped, since the device held its
    clocks down then."""

    def __post_init__(self) -> None:
        if not self.tables:
            raise RecordError(f"record {self.index} has no tables")

    @property
    def total_ms(self) -> float:
        """Forward + backward [ms]."""
        return self.fwd_ms + self.bwd_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective over one group of ranks, `W` of them."""

    index: int
    """Position in the run; the collective follows from the run's seed and this."""
    repeat_of: int | None = None
    """Index of the earlier record that is measured once more."""
    collective: str
    """One of `COLLECTIVES`."""
    group: str = "world"
    """`world` is all ranks, `local` those of a node, `cross` one of each node."""
    bytes_per_peer: tuple[int, ...]
    """What each rank sends to every rank [bytes]; for `pooled_backward` and `index`
    what it is sent by every rank. The others pass the same between all pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsRecord(Collective):
    """Times of one collective."""

    world_size: int
    """Ranks of the group, `W`."""
    local_world_size: int
    """Ranks of the group per node."""
    num_passes: int
    """Timed passes."""
    spread: float
    """Median absolute deviation of the slowest rank's time, over its median."""
    reference_ms: float
    """Median of the reference collective, timed every few passes."""
    transfer_ms: tuple[float, ...]
    """Median time of each rank from the last arrival until it was through, relative
    to the reference's speed in this and the samples before."""

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise RecordError(
                f"record {self.index} is of collective '{self.collective:.60}'; known "
                f"are {', '.join(COLLECTIVES)}"
            )
        if self.local_world_size < 1 or self.world_size % self.local_world_size:
            raise RecordError(
                f"record {self.index}: world_size ({self.world_size}) must be a "
                f"multiple of local_world_size ({self.local_world_size})"
            )
        rows = (self.bytes_per_peer, self.transfer_ms)
        if any(len(row) != self.world_size for row in rows):
            raise RecordError(
                f"record {self.index} needs one value per rank ({self.world_size}) "
                "of bytes_per_peer and transfer_ms"
            )

    @property
    def total_ms(self) -> float:
        """Time of the slowest rank, without waiting [ms]."""
        return max(self.transfer_ms)


def repeatability(records: Sequence[CostRecord | CommsRecord]) -> list[float]:
    """Relative differences of total time between a sample and its later repeats.

    No model can be more accurate than this on average.
    """
    by_index = {r.index: r for r in records}
    return [
        abs(r.total_ms / by_index[r.repeat_of].total_ms - 1)
        for r in records
        if r.repeat_of is not None and r.repeat_of in by_index
    ]


def repeatability_line(differences: Sequence[float], unit: str) -> str:
    """Say in one line how much samples differ from the same ones measured again.

    Args:
        differences: Of `repeatability`.
        unit: What a sample is.
    """
    if not differences:
        return f"No {unit} was measured twice."
    return (
        f"The same {unit} measured again later in the run differs by "
        f"{np.median(differences):.1%} (median), {np.mean(differences):.1%} (mean), "
        f"{np.quantile(differences, 0.9):.1%} (90th percentile), over "
        f"{len(differences)} {unit}s. No model can be better than this."
    )


def relative_spread(values: Sequence[float]) -> float:
    """Return the median absolute deviation of values over their median."""
    middle = statistics.median(values)
    return statistics.median(abs(v - middle) for v in values) / middle


def disturbance(record: CostRecord, usual_reference_ms: float) -> float:
    """How much other work disturbed a record; up to 1 it always counts as steady.

    Args:
        record: The record.
        usual_reference_ms: The reference set's median over the run; not used for a
            device that is timed without one.
    """
    reference = 0.0
    if record.reference_ms:
        reference = record.reference_ms / usual_reference_ms
    return max(record.spread / MAX_SPREAD, reference / MAX_REFERENCE_RATIO)


def steady_records(records: Sequence[CostRecord]) -> list[CostRecord]:
    """Leave out what was measured while other work disturbed the machine.

    Such a record shows it by itself, whatever a model predicts: its passes disagree
    more than is usual on this machine, or the reference set beside it was far slower.
    Records of a throttled GPU are left out too, unless most of them are throttled.

    Args:
        records: Of one device; on a GPU there is no reference, only the passes speak.
    """
    cool = [r for r in records if not r.throttled]
    if 2 * len(cool) >= len(records):
        records = cool
    if not records:
        return []
    spreads = [r.spread for r in records]
    references = [r.reference_ms for r in records]
    most_spread = max(MAX_SPREAD, float(np.quantile(spreads, USUAL_SHARE)))
    most_ms = max(
        MAX_REFERENCE_RATIO * statistics.median(references),
        float(np.quantile(references, USUAL_SHARE)),
    )
    return [r for r in records if r.spread <= most_spread and r.reference_ms <= most_ms]
