"""Records of measurements: a table set or collective, its time, and the machine."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_neuroshard.errors import RecordError, RecordMismatchError
from torchrec_neuroshard.models.base import COLLECTIVES
from torchrec_neuroshard.tables.table import TableConfig

SCHEMA_VERSION = 3
"""Version of the record layout; other versions are refused."""

MAX_SPREAD = 0.1
"""Relative median deviation of passes up to which a record always counts as steady."""
MAX_REFERENCE_RATIO = 1.5
"""Reference time, over the median of all records', up to which a record always counts
as steady. Of the first 6,000 shipped records, 0.7 % exceed this or `MAX_SPREAD`."""
USUAL_SHARE = 0.8
"""Share of a run's records that count as usual for its machine, even if it is never
quiet; only records worse than these are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The hardware and libraries of a measurement."""

    device: str
    """Name of the CPU or GPU."""
    device_type: str
    """`cpu` or `cuda`."""
    num_threads: int
    """CPU threads of the kernel; 1 for a rank with one core."""
    torch: str
    fbgemm: str


def command_line() -> str:
    """Return the running command, for the provenance of a file."""
    name = Path(sys.argv[0]).name
    ours = name in ("neuroshard", "__main__.py")
    return shlex.join(["neuroshard" if ours else name, *sys.argv[1:]])


def utc_now() -> str:
    """Return the current time, UTC, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """Header of a file of kernel records."""

    fingerprint: Fingerprint
    reference_ms: float = 0.0
    """Nominal forward + backward time of the reference set [ms]; 0 before it is
    measured, and for devices steady enough to need no reference."""
    seed: int
    sampling: Mapping[str, Any]
    """The sampling configuration, in full."""
    command: str = field(default_factory=command_line)
    created: str = field(default_factory=utc_now)
    bounds_check: str = "none"
    """How FBGEMM checks ids in a timed forward: `warning`, as in TorchRec's training;
    `none` in older files."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Index of each sample that broke a GPU's process -> its error."""
    column_order_ms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Bytes of pooled outputs -> time to reorder the parts of column-wise tables,
    forward and backward [ms], in the unit of the records. Empty for collectives and in
    older files."""
    schema_version: int = SCHEMA_VERSION
    kind: str = "compute"
    """Kind of records, as `neuroshard collect` calls it."""

    def check_same_run(self, other: RunHeader, where: str) -> None:
        """Check that `other`'s records can be added to this header's file.

        Raises:
            RecordMismatchError: Hardware, libraries, seed, sampling or check of ids
                differ.
        """
        names = ["kind", "seed", "world_size", "local_world_size", "sampling"]
        lines = self.why_incomparable(other) + _differences(self, other, names)
        if lines:
            raise RecordMismatchError(
                f"{where} holds records of another run ({'; '.join(lines)}); write to "
                "another file, or measure with the same machine, libraries and options"
            )

    def why_incomparable(self, other: RunHeader) -> list[str]:
        """Return the differences that make the two runs' times incomparable."""
        names = [f.name for f in dataclasses.fields(Fingerprint)]
        lines = _differences(self.fingerprint, other.fingerprint, names)
        return lines + _differences(self, other, ["bounds_check", "backend"])


def _differences(mine: object, other: object, names: Iterable[str]) -> list[str]:
    """Return one line per attribute that differs between two objects."""
    pairs = [
        (name, getattr(mine, name, None), getattr(other, name, None)) for name in names
    ]
    return [
        f"{name}: {own!r} against {its!r}" for name, own, its in pairs if own != its
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommsHeader(RunHeader):
    """Header of a file of records of collectives."""

    backend: str
    """`gloo` or `nccl`."""
    world_size: int
    """Ranks of the run."""
    local_world_size: int
    """Ranks per node."""
    intra_gb_per_s: float = 0.0
    """Measured rate of one large message between two ranks of a node."""
    inter_gb_per_s: float = 0.0
    """The same between two nodes; 0 if the run had one node."""
    compute_slowdown: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Number of ranks of a node that run kernels at once -> factor on the time of a
    forward and a backward, because they share memory and cores. Empty for GPUs."""
    compute_reference_ms: float = 0.0
    """Forward + backward of the kernels' reference set on a single rank in this run; it
    relates the time units of kernels and collectives. 0 for GPUs."""
    kind: str = "comms"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSet:
    """Tables of one fused kernel."""

    index: int
    """Position in the run; with the run's seed it determines the set."""
    repeat_of: int | None = None
    """Index of the earlier record whose set is measured again."""
    held_out: bool = False
    """Whether all tables are held out to test trained models."""
    validation: bool = False
    """Whether all tables are held out for validation; False in older files."""
    plan: int | None = None
    """Number of the plan of which this is one rank's set; None for other sets. All
    ranks' sets of the plan are measured."""
    batch_size: int
    """Samples of one pass."""
    tables: tuple[TableConfig, ...]
    """Shards of the set; each `profile` is at `batch_size`."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Forward and backward time of a kernel, from several passes."""

    fwd_ms: float
    """Median of the forward passes, relative to the reference if there is one."""
    bwd_ms: float
    """The same for the backward passes, including the optimizer step."""
    num_passes: int
    """Timed passes."""
    spread: float
    """Median absolute deviation of the passes' forward + backward over their median."""
    reference_ms: float = 0.0
    """Median forward + backward of the reference set, timed alternately with the
    passes; 0 without a reference."""
    sm_clock_mhz: float | None = None
    """A GPU's core clock during the passes; None if unknown."""
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    """A GPU's temperature during the passes."""
    throttled: str = ""
    """Why the device was throttled during the passes; empty if it was not."""

    @property
    def total_ms(self) -> float:
        """Forward + backward [ms]."""
        return self.fwd_ms + self.bwd_ms


@dataclass(frozen=True, kw_only=True)
class CostRecord(Measurement, TableSet):
    """The measurement of one fused kernel over one table set."""

    num_throttled: int = 0
    """Earlier measurements of this set that were dropped because of throttling."""

    def __post_init__(self) -> None:
        if not self.tables:
            raise RecordError(f"record {self.index} has no tables")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective over one group of ranks, `W` of them."""

    index: int
    """Position in the run; with the run's seed it determines the collective."""
    repeat_of: int | None = None
    """Index of the earlier record that is measured again."""
    collective: str
    """One of `COLLECTIVES`."""
    group: str = "world"
    """`world` is all ranks, `local` the ranks of a node, `cross` one rank per node."""
    bytes_per_peer: tuple[int, ...]
    """Bytes that each rank sends to every rank; for `pooled_backward` and `index`, the
    bytes that it receives from every rank. In all other collectives, all pairs exchange
    the same number of bytes."""
    batch_size: int = 0
    """Samples of a rank, the rows of the pooled collectives' outputs; 0 in older
    files."""
    lengths_share: float = 0.5
    """Share of the `index` collective's bytes that are lengths instead of ids; 0.5 in
    older files."""


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
    """Median absolute deviation of the slowest rank's time over its median."""
    reference_ms: float
    """Median of the reference collective, timed every few passes."""
    transfer_ms: tuple[float, ...]
    """Median time of each rank from the last arrival until it finished, relative to the
    reference's speed in this sample and the samples before."""

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            raise RecordError(
                f"record {self.index} is of unknown collective "
                f"'{self.collective:.60}'; the collectives are "
                f"{', '.join(COLLECTIVES)}"
            )
        if self.local_world_size < 1 or self.world_size % self.local_world_size:
            raise RecordError(
                f"record {self.index}: world_size ({self.world_size}) must be a "
                f"multiple of local_world_size ({self.local_world_size})"
            )
        rows = (self.bytes_per_peer, self.transfer_ms)
        if any(len(row) != self.world_size for row in rows):
            raise RecordError(
                f"record {self.index} needs bytes_per_peer and transfer_ms for each of "
                f"its {self.world_size} ranks"
            )

    @property
    def total_ms(self) -> float:
        """Time of the slowest rank, without waiting [ms]."""
        return max(self.transfer_ms)


def repeatability(records: Sequence[CostRecord | CommsRecord]) -> list[float]:
    """Return the relative differences in time between samples and their repeats.

    No model can be more accurate than this on average.
    """
    by_index = {r.index: r for r in records}
    return [
        abs(r.total_ms / by_index[r.repeat_of].total_ms - 1)
        for r in records
        if r.repeat_of is not None and r.repeat_of in by_index
    ]


def repeatability_line(differences: Sequence[float], unit: str) -> str:
    """Return a line that says how much repeated measurements differ.

    Args:
        differences: Result of `repeatability`.
        unit: Noun for a sample, e.g. "set".
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
    """Return the median absolute deviation of values, divided by their median."""
    middle = statistics.median(values)
    return statistics.median(abs(v - middle) for v in values) / middle


def disturbance(record: CostRecord, usual_reference_ms: float) -> float:
    """Return how much other work disturbed a record; up to 1 it counts as steady.

    Args:
        record: The record.
        usual_reference_ms: The reference set's median over the run; unused for devices
            without a reference.
    """
    reference = 0.0
    if record.reference_ms:
        reference = record.reference_ms / usual_reference_ms
    return max(record.spread / MAX_SPREAD, reference / MAX_REFERENCE_RATIO)


def steady_records(records: Sequence[CostRecord]) -> list[CostRecord]:
    """Return the records that other work on the machine did not disturb.

    A disturbed record shows two signs, which do not depend on any model: its passes
    differ more than is usual on this machine, or its reference set was far slower.
    Records of a throttled GPU are left out too, unless most records are throttled.

    Args:
        records: Records of one device. A GPU has no reference, so only its passes
            count.
    """
    cool = [r for r in records if not r.throttled]
    if 2 * len(cool) >= len(records):
        records = cool
    if not records:
        return []
    usual_ms = statistics.median(r.reference_ms for r in records)
    found = [disturbance(r, usual_ms) for r in records]
    most = max(1.0, float(np.quantile(found, USUAL_SHARE)))
    return [r for r, value in zip(records, found, strict=True) if value <= most]
