"""One measurement: a table set, its time, and where the time was taken."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_neuroshard.errors import (
    ConfigError,
    RecordError,
    RecordMismatchError,
)
from torchrec_neuroshard.tables import TableConfig

__all__ = ["SCHEMA_VERSION", "CostRecord", "Fingerprint", "RunHeader", "repeatability"]

SCHEMA_VERSION = 1
"""Version of the record layout; another version is refused."""


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

    def mismatch(self, other: Fingerprint) -> list[str]:
        """Return one line per field in which `other` differs."""
        return [
            f"{f.name}: {getattr(self, f.name)!r} against {getattr(other, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """What all records of one file share."""

    fingerprint: Fingerprint
    reference_ms: float
    """Nominal forward + backward time of the reference set [ms]; 0 where the device is
    steady enough to be timed without one."""
    seed: int
    sampling: Mapping[str, Any]
    """The sampling configuration, in full."""
    command: str
    created: str
    """UTC, ISO 8601."""
    schema_version: int = SCHEMA_VERSION

    def check_same_run(self, other: RunHeader, where: str) -> None:
        """Refuse to mix `other`'s records with this header's.

        Raises:
            RecordMismatchError: Other hardware, libraries, seed or sampling.
        """
        lines = self.fingerprint.mismatch(other.fingerprint)
        for name in ("schema_version", "seed"):
            if getattr(self, name) != getattr(other, name):
                lines.append(
                    f"{name}: {getattr(self, name)!r} against {getattr(other, name)!r}"
                )
        if dict(self.sampling) != dict(other.sampling):
            lines.append(f"sampling: {self.sampling} against {other.sampling}")
        if lines:
            raise RecordMismatchError(
                f"{where} holds records of another run ({'; '.join(lines)}); write to "
                "another file, or measure with the same machine, libraries and options"
            )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; `from_json` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunHeader:
        """Read what `to_json` wrote.

        Raises:
            RecordError: The header is of another layout.
        """
        try:
            version = data["schema_version"]
            if version != SCHEMA_VERSION:
                raise RecordError(
                    f"records have layout {version}, this version reads "
                    f"{SCHEMA_VERSION}; measure again or install the matching version"
                )
            return cls(**{**data, "fingerprint": Fingerprint(**data["fingerprint"])})
        except (KeyError, TypeError) as error:
            raise RecordError(f"not a record header: {error!r}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRecord:
    """Forward and backward time of one fused kernel over one table set."""

    index: int
    """Position in the run; the set follows from the run's seed and this."""
    repeat_of: int | None = None
    """Index of the earlier record whose set is measured once more."""
    held_out: bool = False
    """Whether all tables are of the part never used for training."""
    batch_size: int
    """Samples of one pass."""
    tables: tuple[TableConfig, ...]
    """Shards of the set; each `profile` is at `batch_size`."""
    fwd_raw_ms: tuple[float, ...]
    """Each timed forward pass."""
    bwd_raw_ms: tuple[float, ...]
    """Each timed backward pass, optimizer step included."""
    ref_raw_ms: tuple[float, ...] = ()
    """The reference set's forward + backward pass beside each; empty without one."""
    fwd_ms: float
    """Median of the forward passes, relative to the reference if there is one."""
    bwd_ms: float
    """Same for the backward passes."""

    def __post_init__(self) -> None:
        counts = {len(self.fwd_raw_ms), len(self.bwd_raw_ms)}
        if self.ref_raw_ms:
            counts.add(len(self.ref_raw_ms))
        if len(counts) != 1 or not self.fwd_raw_ms:
            raise RecordError(
                f"record {self.index} has unequal numbers of passes: "
                f"{len(self.fwd_raw_ms)} forward, {len(self.bwd_raw_ms)} backward, "
                f"{len(self.ref_raw_ms)} reference"
            )
        if not self.tables:
            raise RecordError(f"record {self.index} has no tables")

    @property
    def total_ms(self) -> float:
        """Forward + backward [ms]."""
        return self.fwd_ms + self.bwd_ms

    def spread(self) -> float:
        """Median absolute deviation of the total over its passes, relative."""
        total = [f + b for f, b in zip(self.fwd_raw_ms, self.bwd_raw_ms, strict=True)]
        if self.ref_raw_ms:
            total = [t / r for t, r in zip(total, self.ref_raw_ms, strict=True)]
        middle = statistics.median(total)
        return statistics.median(abs(t - middle) for t in total) / middle

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; `from_json` reads it back."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["tables"] = [t.to_json() for t in self.tables]
        for name in ("fwd_raw_ms", "bwd_raw_ms", "ref_raw_ms"):
            data[name] = list(data[name])
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostRecord:
        """Read what `to_json` wrote.

        Raises:
            RecordError: A key is missing or unknown, or a value is out of range.
        """
        try:
            return cls(
                **{
                    **data,
                    "tables": tuple(TableConfig.from_json(t) for t in data["tables"]),
                    "fwd_raw_ms": tuple(data["fwd_raw_ms"]),
                    "bwd_raw_ms": tuple(data["bwd_raw_ms"]),
                    "ref_raw_ms": tuple(data["ref_raw_ms"]),
                }
            )
        except (KeyError, TypeError, ConfigError) as error:
            raise RecordError(f"not a cost record: {error!r}") from error


def repeatability(records: Sequence[CostRecord]) -> list[float]:
    """Relative differences of total time between a set and its later repeats.

    No model can be more accurate than this on average.
    """
    by_index = {r.index: r for r in records}
    return [
        abs(r.total_ms / by_index[r.repeat_of].total_ms - 1)
        for r in records
        if r.repeat_of is not None and r.repeat_of in by_index
    ]
