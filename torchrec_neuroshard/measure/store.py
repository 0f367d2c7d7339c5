"""Keeping measurements: a journal that survives any end of the process, and Parquet.

While a run is under way each record is one line of JSON in `<file>.journal`, handed to
the system before the next sample starts. A finished or interrupted run is folded into
one Parquet file, written beside the old one and moved over it. Reading takes both
together.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_neuroshard.errors import RecordError, RecordMismatchError
from torchrec_neuroshard.files import parse_json, write_whole
from torchrec_neuroshard.measure.records import (
    CommsHeader,
    CommsRecord,
    CostRecord,
    RunHeader,
)
from torchrec_neuroshard.tables.profile import NUM_COUNT_BINS

__all__ = [
    "CommsStore",
    "JournaledStore",
    "RecordFormat",
    "RecordStore",
    "append_line",
    "complete_lines",
    "journal_path",
    "read_comms_header",
    "read_comms_records",
    "read_header",
    "read_records",
    "record_kind",
]

_HEADER_KEY = b"neuroshard_header"

_TABLE_TYPE = pa.struct(
    [
        ("name", pa.string()),
        ("num_embeddings", pa.int64()),
        ("embedding_dim", pa.int32()),
        ("pooling_factor", pa.float64()),
        ("num_features", pa.int32()),
        (
            "profile",
            pa.struct(
                [
                    ("batch_size", pa.int64()),
                    ("num_lookups", pa.float64()),
                    ("pooling_std", pa.float32()),
                    ("access_histogram", pa.list_(pa.float32(), NUM_COUNT_BINS)),
                    ("weighted", pa.bool_()),
                ]
            ),
        ),
        ("weighted", pa.bool_()),
        ("data_type", pa.string()),
        ("optimizer", pa.string()),
    ]
)
_SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("repeat_of", pa.int64()),
        ("held_out", pa.bool_()),
        ("batch_size", pa.int64()),
        ("tables", pa.list_(_TABLE_TYPE)),
        ("fwd_ms", pa.float64()),
        ("bwd_ms", pa.float64()),
        ("num_passes", pa.int32()),
        ("spread", pa.float32()),
        ("reference_ms", pa.float32()),
        ("sm_clock_mhz", pa.float32()),
        ("memory_clock_mhz", pa.float32()),
        ("temperature_c", pa.float32()),
        ("throttled", pa.string()),
        ("num_throttled", pa.int32()),
    ]
)


_COMMS_SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("repeat_of", pa.int64()),
        ("collective", pa.string()),
        ("group", pa.string()),
        ("world_size", pa.int32()),
        ("local_world_size", pa.int32()),
        ("bytes_per_peer", pa.list_(pa.int64())),
        ("num_passes", pa.int32()),
        ("spread", pa.float32()),
        ("reference_ms", pa.float32()),
        ("transfer_ms", pa.list_(pa.float64())),
    ]
)

_HeaderT = TypeVar("_HeaderT", bound=RunHeader)
_RecordT = TypeVar("_RecordT", CostRecord, CommsRecord)


@dataclass(frozen=True, slots=True)
class RecordFormat(Generic[_HeaderT, _RecordT]):
    """One kind of records, and how it is laid out in files."""

    kind: str
    """What `neuroshard collect` calls it."""
    header_type: type[_HeaderT]
    record_type: type[_RecordT]
    schema: pa.Schema


_COMPUTE = RecordFormat("compute", RunHeader, CostRecord, _SCHEMA)
_COMMS = RecordFormat("comms", CommsHeader, CommsRecord, _COMMS_SCHEMA)


class JournaledStore(Generic[_HeaderT, _RecordT]):
    """Appends the records of one run; use as a context manager."""

    def __init__(
        self,
        path: str | Path,
        header: _HeaderT,
        record_format: RecordFormat[_HeaderT, _RecordT],
    ) -> None:
        """Open the file and its journal, or start them.

        Args:
            path: The Parquet file.
            header: The run to append; it must be the one that the file holds.
            record_format: The kind of records.

        Raises:
            RecordMismatchError: The file holds another run.
            RecordError: The file or its journal cannot be read.
        """
        self._path = Path(path)
        self._journal_path = journal_path(self._path)
        self._format: RecordFormat[_HeaderT, _RecordT] = record_format
        old_header, records = _read_all(self._path, record_format)
        if old_header is not None:
            old_header.check_same_run(header, str(self._path))
            header = old_header
        self.header = header
        self._records: dict[int, _RecordT] = {r.index: r for r in records}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if next(complete_lines(self._journal_path), None) is None:
            append_line(self._journal_path, header.to_json())

    @property
    def records(self) -> Sequence[_RecordT]:
        """All records, those of earlier processes included."""
        return tuple(self._records.values())

    @property
    def done(self) -> set[int]:
        """Indices of the records."""
        return set(self._records)

    def append(self, record: _RecordT) -> None:
        """Keep one record, in place of an earlier one of its index.

        If the process is killed, the record stays; if the machine stops, those that it
        has not yet written to disk are lost.
        """
        append_line(self._journal_path, record.to_json())
        self._records[record.index] = record

    def close(self) -> None:
        """Fold the journal into the Parquet file."""
        if self._records:
            _write_parquet(self._path, self.header, self.records, self._format.schema)
            self._journal_path.unlink()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Fold the journal, also after an interruption."""
        self.close()


class RecordStore(JournaledStore[RunHeader, CostRecord]):
    """A store of compute records."""

    def __init__(self, path: str | Path, header: RunHeader) -> None:
        """Open or start a file of compute records; see `JournaledStore`."""
        super().__init__(path, header, _COMPUTE)


class CommsStore(JournaledStore[CommsHeader, CommsRecord]):
    """A store of the records of collectives."""

    def __init__(self, path: str | Path, header: CommsHeader) -> None:
        """Open or start a file of records of collectives; see `JournaledStore`."""
        super().__init__(path, header, _COMMS)


def journal_path(path: Path) -> Path:
    """Where the records of a run under way are kept."""
    return path.with_name(path.name + ".journal")


def read_header(path: str | Path) -> RunHeader | None:
    """Return the header of a file of compute records or its journal.

    Returns:
        None where there is neither yet.

    Raises:
        RecordError: The file or its journal cannot be read.
    """
    return _find_header(Path(path), _COMPUTE)


def read_comms_header(path: str | Path) -> CommsHeader | None:
    """Same as `read_header` for records of collectives."""
    return _find_header(Path(path), _COMMS)


def _find_header(
    path: Path, record_format: RecordFormat[_HeaderT, _RecordT]
) -> _HeaderT | None:
    data = _raw_header(path)
    return None if data is None else _header(data, path, record_format)


def _raw_header(path: Path) -> dict[str, Any] | None:
    if path.exists():
        return _read_parquet_header(path)
    journal = journal_path(path)
    line = next(complete_lines(journal), None)
    return None if line is None else _parse(line, journal)


def record_kind(path: str | Path) -> str:
    """Return the kind of a file's records: `compute` or `comms`.

    Raises:
        RecordError: There is no such file, or it is not a file of records.
    """
    header = _raw_header(Path(path))
    if header is None:
        raise RecordError(f"{path} does not exist; measure with {_command(Path(path))}")
    return str(header.get("kind", _COMPUTE.kind))


def _command(path: Path, kind: str = "compute") -> str:
    return f"'neuroshard collect {kind} --out {path}'"


def read_records(
    paths: Iterable[str | Path],
) -> tuple[list[RunHeader], list[CostRecord]]:
    """Read files of compute records, runs under way included.

    Returns:
        The headers, one per file, and all records: those of a later file are numbered
        on, so that each repeat is of a set of its own file. All times are in the unit
        of the first file, in which its reference set takes its nominal time; those
        timed without a reference stay as they are.

    Raises:
        RecordError: A file is missing, empty or not a record file.
        RecordMismatchError: The files are of different hardware or libraries.
    """
    files = _read_files(paths, _COMPUTE)
    headers: list[RunHeader] = []
    records: list[CostRecord] = []
    unit_ms = files[0][0].reference_ms if files else 0.0
    for header, in_file in files:
        start = 1 + max((r.index for r in records), default=-1)
        with_reference = unit_ms and header.reference_ms
        factor = unit_ms / header.reference_ms if with_reference else 1.0
        headers.append(
            dataclasses.replace(header, reference_ms=factor * header.reference_ms)
        )
        for record in in_file:
            source = record.repeat_of
            if start:
                record = dataclasses.replace(
                    record,
                    index=start + record.index,
                    repeat_of=None if source is None else start + source,
                    fwd_ms=factor * record.fwd_ms,
                    bwd_ms=factor * record.bwd_ms,
                )
            records.append(record)
    return headers, records


def read_comms_records(
    paths: Iterable[str | Path],
) -> list[tuple[CommsHeader, list[CommsRecord]]]:
    """Read files of records of collectives, runs under way included.

    Returns:
        Each file's header and records.

    Raises:
        RecordError: A file is missing, empty or not a file of such records.
        RecordMismatchError: The files are of different hardware, libraries or
            backends.
    """
    files = _read_files(paths, _COMMS)
    backends = sorted({header.backend for header, _ in files})
    if len(backends) > 1:
        raise RecordMismatchError(
            f"the files hold records of different backends: {', '.join(backends)}; "
            "train on one backend's records at a time"
        )
    return files


def _read_files(
    paths: Iterable[str | Path], record_format: RecordFormat[_HeaderT, _RecordT]
) -> list[tuple[_HeaderT, list[_RecordT]]]:
    files: list[tuple[_HeaderT, list[_RecordT]]] = []
    for path in map(Path, paths):
        header, records = _read_all(path, record_format)
        if header is None:
            raise RecordError(
                f"{path} does not exist; measure with "
                f"{_command(path, record_format.kind)}"
            )
        if files:
            lines = files[0][0].measured_unlike(header)
            if lines:
                raise RecordMismatchError(
                    f"{path} was measured elsewhere or otherwise than the files before "
                    f"it ({'; '.join(lines)}); train on one machine's records at a "
                    "time, measured alike"
                )
        files.append((header, records))
    return files


def _read_all(
    path: Path, record_format: RecordFormat[_HeaderT, _RecordT]
) -> tuple[_HeaderT | None, list[_RecordT]]:
    header: _HeaderT | None = None
    records: dict[int, _RecordT] = {}
    if path.exists():
        header, in_file = _read_parquet(path, record_format)
        records.update((r.index, r) for r in in_file)
    journal = journal_path(path)
    lines = complete_lines(journal)
    first = next(lines, None)
    if first is not None:  # else there is no journal, or not even its header
        journal_header = _header(_parse(first, journal), journal, record_format)
        if header is not None:
            header.check_same_run(journal_header, str(journal))
        header = header or journal_header
        rows = (_parse(line, journal) for line in lines)
        records.update((r.index, r) for r in _records(rows, record_format))
    return header, [records[i] for i in sorted(records)]


def _header(
    data: dict[str, Any], path: Path, record_format: RecordFormat[_HeaderT, _RecordT]
) -> _HeaderT:
    kind = data.get("kind", _COMPUTE.kind)
    if kind != record_format.kind:
        raise RecordError(
            f"{path} holds records of 'neuroshard collect {kind!s:.60}', not of "
            f"'neuroshard collect {record_format.kind}'; name another file"
        )
    return record_format.header_type.from_json(data)


def _parse(line: str, path: Path) -> dict[str, Any]:
    try:
        data = parse_json(line)
    except ValueError as error:
        raise RecordError(
            f"{path} is damaged ({error}); delete the line or the file"
        ) from error
    if not isinstance(data, dict):
        raise RecordError(f"{path} is not a journal of records")
    return data


def append_line(path: Path, data: Any) -> None:
    """Add a line of JSON to a file; the system has it when this returns.

    What an earlier process, or a full disk, has left of a line is dropped.
    """
    line = json.dumps(data).encode() + b"\n"
    with path.open("ab+", buffering=0) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.truncate(path.read_bytes().rfind(b"\n") + 1)
        end = file.seek(0, os.SEEK_END)
        if (written := file.write(line)) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes fit", path)


def complete_lines(path: Path) -> Iterator[str]:
    """Complete lines; one cut off by the end of the process is left out."""
    if not path.exists():
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error


def _read_parquet_header(path: Path) -> dict[str, Any]:
    try:
        header = parse_json(pq.read_schema(path).metadata[_HEADER_KEY].decode())
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise _not_records(path, error) from error
    if not isinstance(header, dict):
        raise RecordError(f"{path} has no header of records")
    return header


def _read_parquet(
    path: Path, record_format: RecordFormat[_HeaderT, _RecordT]
) -> tuple[_HeaderT, list[_RecordT]]:
    header = _header(_read_parquet_header(path), path, record_format)
    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _not_records(path, error) from error
    return header, list(_records(rows, record_format))


def _records(
    rows: Iterable[dict[str, Any]], record_format: RecordFormat[_HeaderT, _RecordT]
) -> Iterator[_RecordT]:
    """Records of rows, but for collectives whose ranks were told to start late.

    Files of older versions hold some.
    """
    for row in rows:
        delay_ms = row.pop("delay_ms", None)
        row.pop("wait_ms", None)
        if not (isinstance(delay_ms, list) and any(delay_ms)):
            yield record_format.record_type.from_json(row)


def _not_records(path: Path, error: Exception) -> RecordError:
    return RecordError(
        f"{path} is not a file of cost records ({error!r}); it may be truncated: "
        "restore it or measure again"
    )


def _write_parquet(
    path: Path,
    header: RunHeader,
    records: Sequence[CostRecord] | Sequence[CommsRecord],
    schema: pa.Schema,
) -> None:
    rows = sorted((r.to_json() for r in records), key=lambda r: r["index"])
    schema = schema.with_metadata({_HEADER_KEY: json.dumps(header.to_json()).encode()})
    table = pa.Table.from_pylist(rows, schema=schema)
    file = io.BytesIO()
    # Figures are short and differ; a dictionary of them takes more room than they do.
    pq.write_table(
        table,
        file,
        compression="zstd",
        compression_level=9,
        use_dictionary=False,
        write_page_checksum=True,
    )
    write_whole(path, file.getvalue())
