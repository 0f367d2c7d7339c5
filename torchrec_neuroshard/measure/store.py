"""Files of records: JSON lines, which a crash of the process leaves readable.

The first line is the run's header, each further line a record or a changed header. A
line is appended before the next sample starts; later lines replace earlier ones of the
same index, and the last header counts. A last line without its end was cut off by a
crash: readers skip it, and the next run removes it. A run locks its file.

Files whose name ends in `.xz` are compressed ones, which can only be read.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torchrec_neuroshard.errors import RecordError, RecordMismatchError
from torchrec_neuroshard.files import parse_json, read_fields, to_fields
from torchrec_neuroshard.measure.records import (
    SCHEMA_VERSION,
    CommsHeader,
    CommsRecord,
    CostRecord,
    RunHeader,
)
from torchrec_neuroshard.tables.access import NUM_COUNT_BINS
from torchrec_neuroshard.tables.table import TableConfig

_KINDS: Mapping[str, tuple[type[RunHeader], Any]] = {
    "compute": (RunHeader, CostRecord),
    "comms": (CommsHeader, CommsRecord),
}
"""Kind of records in `neuroshard collect` -> types of header and records."""

_HEADER_START = b'{"fingerprint"'
"""Start of a header's line."""
_OF_PROFILE = "profile."
"""Start of the names of a profile's columns."""


class RecordStore:
    """Appends the records of one run to a file; use it as a context manager."""

    def __init__(self, path: str | Path, header: RunHeader) -> None:
        """Open or create the file.

        Args:
            path: The file.
            header: Header of this run, of kernels or collectives. A file with records
                must hold the same run; its own header counts.

        Raises:
            RecordMismatchError: The file holds another run.
            RecordError: The file cannot be read, it is compressed, or another process
                writes to it.
        """
        path = Path(path)
        if path.suffix == ".xz":
            raise RecordError(
                f"{path} is compressed and can only be read; unpack it with 'xz -d' to "
                "continue it, or write to another file"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        try:
            self._lock(path)
            known, records = _read(path)
            self._records: dict[int, Any] = {r.index: r for r in records}
            self.header: RunHeader = header
            if known is not None and (records or known.failed):
                known.check_same_run(header, str(path))
                self.header = known
                data = path.read_bytes()
                self._file.truncate(data.rindex(b"\n") + 1)
            else:
                self._file.truncate(0)
                self.change_header()
        except BaseException:
            self.close()
            raise

    def _lock(self, path: Path) -> None:
        """Lock the file until it is closed or the process ends."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(
                f"another process is writing to {path}; wait until it ends, or write "
                "to another file"
            ) from None
        except OSError:  # the file system has no locks
            pass

    @property
    def records(self) -> Sequence[Any]:
        """All records, including those of earlier processes."""
        return tuple(self._records.values())

    @property
    def done(self) -> set[int]:
        """Indices of all records."""
        return set(self._records)

    def append(self, record: CostRecord | CommsRecord) -> None:
        """Append a record; it replaces an earlier record with its index.

        The record survives if the process is killed. If the machine stops, records that
        are not yet on the disk are lost.
        """
        self._write(_packed(record))
        self._records[record.index] = record

    def change_header(self, **fields: Any) -> None:
        """Change fields of the header."""
        self.header = dataclasses.replace(self.header, **fields)
        self._write(to_fields(self.header))

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Let other processes write to the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


def read_header(path: str | Path) -> RunHeader | None:
    """Return the header of a file of records.

    Returns:
        The header, for collectives a `CommsHeader`; None if there is no file, or none
        that a run has begun to write.

    Raises:
        RecordError: The file cannot be read.
    """
    return _read(Path(path), with_records=False)[0]


def record_kind(path: str | Path) -> str:
    """Return the kind of a file's records: `compute` or `comms`.

    Raises:
        RecordError: There is no such file, or it is not a file of records.
    """
    if (header := read_header(path)) is None:
        raise _missing(path, "compute")
    return header.kind


def read_records(
    paths: Iterable[str | Path],
) -> tuple[list[RunHeader], list[CostRecord]]:
    """Read files of kernel records, also while they are measured.

    Returns:
        The headers, one per file, and all records. The indices of a later file follow
        those of the files before, so that repeats refer to their own file. Times are
        converted to the first file's unit, by the nominal times of the reference set;
        times without a reference stay as they are.

    Raises:
        RecordError: A file is missing, empty or not a record file.
        RecordMismatchError: The files are of different hardware or libraries.
    """
    headers: list[RunHeader] = []
    records: list[CostRecord] = []
    for header, found in _read_files(paths, "compute"):
        start = 1 + max((r.index for r in records), default=-1)
        unit_ms = headers[0].reference_ms if headers else 0.0
        factor = unit_ms / header.reference_ms if unit_ms and header.reference_ms else 1
        order_ms = {
            size: (factor * forward, factor * backward)
            for size, (forward, backward) in header.column_order_ms.items()
        }
        headers.append(
            dataclasses.replace(
                header,
                reference_ms=factor * header.reference_ms,
                column_order_ms=order_ms,
            )
        )
        records += [
            dataclasses.replace(
                record,
                index=start + record.index,
                repeat_of=None
                if record.repeat_of is None
                else start + record.repeat_of,
                plan=None if record.plan is None else start + record.plan,
                fwd_ms=factor * record.fwd_ms,
                bwd_ms=factor * record.bwd_ms,
            )
            for record in found
        ]
    return headers, records


def read_comms_records(
    paths: Iterable[str | Path],
) -> list[tuple[CommsHeader, list[CommsRecord]]]:
    """Read files of records of collectives, also while they are measured.

    Returns:
        Each file's header and records.

    Raises:
        RecordError: A file is missing, empty or not a file of records of collectives.
        RecordMismatchError: The files are of different hardware, libraries or
            backends.
    """
    return _read_files(paths, "comms")


def _read_files(paths: Iterable[str | Path], kind: str) -> list[tuple[Any, list[Any]]]:
    """Read files of records of one kind and device."""
    files: list[tuple[Any, list[Any]]] = []
    for path in map(Path, paths):
        header, records = _read(path)
        if header is None:
            raise _missing(path, kind)
        if header.kind != kind:
            raise RecordError(
                f"{path} holds records of 'neuroshard collect {header.kind}', not of "
                f"'neuroshard collect {kind}'; name another file"
            )
        if files and (lines := files[0][0].why_incomparable(header)):
            raise RecordMismatchError(
                f"{path} was measured on another machine or with other settings than "
                f"the files before it ({'; '.join(lines)}); use files of one machine "
                "and the same settings"
            )
        files.append((header, records))
    return files


def _missing(path: str | Path, kind: str) -> RecordError:
    return RecordError(
        f"there are no records at {path}; measure with 'neuroshard collect {kind} "
        f"--out {path}'"
    )


def _read(path: Path, with_records: bool = True) -> tuple[RunHeader | None, list[Any]]:
    """Return the header, None if there is none, and the records in order."""
    header: RunHeader | None = None
    records: dict[int, Any] = {}
    for number, line in enumerate(_lines(path), start=1):
        is_header = line.startswith(_HEADER_START)
        if not (is_header or with_records):
            continue
        try:
            data = dict(parse_json(line.decode()))
            if header is not None and not is_header:
                kind, what = _KINDS[header.kind][1], f"{header.kind} record"
                record = read_fields(kind, _unpacked(data), RecordError, what)
                records[record.index] = record
        except (TypeError, ValueError) as error:
            raise RecordError(
                f"line {number} of {path} is damaged ({error}); delete the line or "
                "measure again"
            ) from error
        if is_header:
            header = _header(data, path)
    return header, [records[i] for i in sorted(records)]


def _header(data: dict[str, Any], path: Path) -> RunHeader:
    kind, version = str(data.get("kind", "compute")), data.get("schema_version")
    if kind not in _KINDS or version != SCHEMA_VERSION:
        raise RecordError(
            f"{path} has {kind:.60} records of layout {version!s:.60}, but this "
            f"version reads {SCHEMA_VERSION}; measure again or install the matching "
            "version"
        )
    what = f"record header in {path}"
    return read_fields(_KINDS[kind][0], data, RecordError, what)


def _lines(path: Path) -> list[bytes]:
    """Return the whole lines of a file; none if there is no file."""
    try:
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return []
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise RecordError(f"{path} cannot be read ({error}); measure again") from error
    if not data.startswith(_HEADER_START[: len(data)]):
        raise RecordError(
            f"{path} is not a file of records of this version; name another file, or "
            "measure again if it is of an older version"
        )
    return data.split(b"\n")[:-1]


# Lines are short: numbers have five digits, fields that the reader can fill in are
# left out, and the tables of a set are columns.


def _packed(record: CostRecord | CommsRecord) -> dict[str, Any]:
    data: dict[str, Any] = _rounded(
        _without(to_fields(record), _defaults(type(record)))
    )
    if isinstance(record, CostRecord):
        rows = [_row(table, record.batch_size) for table in data["tables"]]
        names = dict.fromkeys(name for row in rows for name in row)
        data["tables"] = {name: [row.get(name) for row in rows] for name in names}
    return data


def _unpacked(data: dict[str, Any]) -> dict[str, Any]:
    if "tables" in data:
        names, columns = zip(*data["tables"].items(), strict=True)
        data["tables"] = [
            _table(dict(zip(names, row, strict=True)), data["batch_size"])
            for row in zip(*columns, strict=True)
        ]
    return data


def _row(table: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Return a table's fields and its profile's, without those that `_table` adds."""
    row = _without(table, _defaults(TableConfig))
    profile = row.pop("profile", {})
    while profile.get("access_histogram", [1])[-1:] == [0]:
        profile["access_histogram"].pop()
    profile = _without(profile, _rounded(_expected_profile(row, batch_size)))
    return row | {_OF_PROFILE + name: value for name, value in profile.items()}


def _table(row: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Return a table's fields, with its profile."""
    row = {name: value for name, value in row.items() if value is not None}
    profile = _expected_profile(row, batch_size)
    for name in [name for name in row if name.startswith(_OF_PROFILE)]:
        profile[name.removeprefix(_OF_PROFILE)] = row.pop(name)
    if bins := profile.get("access_histogram"):
        profile["access_histogram"] = bins + [0.0] * (NUM_COUNT_BINS - len(bins))
    return {**row, "profile": profile}


def _expected_profile(row: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Return the fields of a profile that most often follow from the others."""
    return {
        "batch_size": batch_size,
        "num_lookups": float(batch_size) * float(row.get("pooling_factor", 1.0)),
        "pooling_std": 0.0,
        "weighted": row.get("weighted", False),
        "batch_share": 1.0,
    }


def _defaults(kind: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that have a default."""
    return {f.name: f.default for f in dataclasses.fields(kind)}


def _without(data: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose values are not known."""
    return {n: v for n, v in data.items() if n not in known or known[n] != v}


def _rounded(value: Any) -> Any:
    """Return JSON data with numbers of five digits; whole ones have no point."""
    if isinstance(value, float):
        short = float(f"{value:.5g}")
        return int(short) if short.is_integer() else short
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value
