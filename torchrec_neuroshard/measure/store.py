"""Files of records: Parquet, and a journal that survives any crash of the process.

During a run, each record is appended to `<file>.journal` as one line of JSON before the
next sample starts. The end of the run merges the journal into the Parquet file, which
is replaced atomically. After a crash, the start of the next run does so. Readers
combine both files. A run locks the journal, so that no other run writes to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_neuroshard.errors import RecordError, RecordMismatchError
from torchrec_neuroshard.files import parse_json, read_fields, to_fields, write_whole
from torchrec_neuroshard.measure.records import (
    SCHEMA_VERSION,
    CommsHeader,
    CommsRecord,
    CostRecord,
    RunHeader,
)

_HEADER_KEY = b"neuroshard_header"
_KINDS: Mapping[str, tuple[type[RunHeader], Any]] = {
    "compute": (RunHeader, CostRecord),
    "comms": (CommsHeader, CommsRecord),
}
"""Kind of records in `neuroshard collect` -> types of header and records."""

_RETIRED = "column_order_ms_per_mb"
"""Field of older files of collectives; kernels' files hold the reordering now."""


class RecordStore:
    """Appends the records of one run to a file; use it as a context manager."""

    def __init__(self, path: str | Path, header: RunHeader) -> None:
        """Open or create the file.

        Args:
            path: The Parquet file.
            header: Header of this run, of kernels or collectives; an existing file must
                hold the same run.

        Raises:
            RecordMismatchError: The file holds another run.
            RecordError: The file or its journal cannot be read, or another process
                writes to them.
        """
        self._path, self._journal = Path(path), journal_path(Path(path))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._locked = _lock(self._journal)
        try:
            known, records = _read(self._path)
            if known is not None:
                known.check_same_run(header, str(self._path))
            self.header: RunHeader = known or header
            self._records: dict[int, Any] = {r.index: r for r in records}
            # Merge a journal that a crash left behind, perhaps truncated.
            if self._journal.stat().st_size:
                self._merge()
                os.truncate(self._journal, 0)
            self._write(self.header)
        except BaseException:
            with self._locked, contextlib.suppress(FileNotFoundError):
                if not self._journal.stat().st_size:
                    self._journal.unlink()
            raise

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
        self._write(record)
        self._records[record.index] = record

    def note_failure(self, index: int, text: str) -> None:
        """Note in the header that a sample breaks the process, and why."""
        failed = {**self.header.failed, str(index): text}
        self.header = dataclasses.replace(self.header, failed=failed)

    def _write(self, line: RunHeader | CostRecord | CommsRecord) -> None:
        with self._journal.open("ab") as file:
            file.write(json.dumps(to_fields(line)).encode() + b"\n")

    def close(self) -> None:
        """Merge the journal into the Parquet file and let other processes write."""
        if self._locked.closed:
            return
        with self._locked:
            if self._merge():
                self._journal.unlink(missing_ok=True)

    def _merge(self) -> bool:
        """Write the Parquet file, if there is anything to write."""
        if not self._records and not self.header.failed:
            return False
        rows = [to_fields(self._records[i]) for i in sorted(self._records)]
        header = json.dumps(to_fields(self.header)).encode()
        table = pa.Table.from_pylist(rows).replace_schema_metadata(
            {_HEADER_KEY: header}
        )
        file = io.BytesIO()
        # No dictionary: a dictionary of numbers is larger than the numbers.
        pq.write_table(
            table,
            file,
            compression="zstd",
            compression_level=9,
            use_dictionary=False,
            write_page_checksum=True,
        )
        write_whole(self._path, file.getvalue())
        return True

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Merge the journal, also after an interruption."""
        self.close()


def _lock(journal: Path) -> BinaryIO:
    """Return the open journal, locked until it is closed or the process ends.

    Raises:
        RecordError: Another process has locked it.
    """
    while True:
        file = journal.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            path = journal.with_suffix("")
            raise RecordError(
                f"another process is writing to {path}; wait until it ends, or write "
                "to another file"
            ) from None
        except OSError:  # the file system has no locks
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), journal.stat()):
                return file
        file.close()  # its owner has merged and deleted it


def journal_path(path: Path) -> Path:
    """Return the path of the journal of a file."""
    return path.with_name(path.name + ".journal")


def read_header(path: str | Path) -> RunHeader | None:
    """Return the header of a file of records or its journal.

    Returns:
        The header, for collectives a `CommsHeader`; None if neither file exists.

    Raises:
        RecordError: The file or its journal cannot be read.
    """
    path = Path(path)
    if path.exists():
        with _naming(path):
            text = pq.read_schema(path).metadata[_HEADER_KEY].decode()
            data = dict(parse_json(text))
        return _header(data, path)
    lines = _journal_lines(path)
    return _header(lines[0], path) if lines else None


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
    """Read files of kernel records, including running runs.

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
    """Read files of records of collectives, including running runs.

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
        if files and (lines := files[0][0].measured_unlike(header)):
            raise RecordMismatchError(
                f"{path} was measured on another machine or with other settings than "
                f"the files before it ({'; '.join(lines)}); use files of one machine "
                "and the same settings"
            )
        files.append((header, records))
    return files


def _missing(path: str | Path, kind: str) -> RecordError:
    return RecordError(
        f"{path} does not exist; measure with 'neuroshard collect {kind} --out {path}'"
    )


def _read(path: Path) -> tuple[RunHeader | None, list[Any]]:
    """Read a file and its journal, which killed processes may have left."""
    header, lines, rows = read_header(path), _journal_lines(path), []
    if header is None:
        return None, []
    if path.exists():
        with _naming(path):
            rows = pq.read_table(path).to_pylist()
    if lines:
        journal = journal_path(path)
        header.check_same_run(_header(lines[0], journal), str(journal))
    kind, what = _KINDS[header.kind][1], f"{header.kind} record"
    read = [read_fields(kind, row, RecordError, what) for row in (*rows, *lines[1:])]
    records = {record.index: record for record in read}
    return header, [records[i] for i in sorted(records)]


def _header(data: dict[str, Any], path: Path) -> RunHeader:
    kind, version = str(data.get("kind", "compute")), data.get("schema_version")
    if kind not in _KINDS or version != SCHEMA_VERSION:
        raise RecordError(
            f"{path} has {kind:.60} records of layout {version!s:.60}, but this "
            f"version reads {SCHEMA_VERSION}; measure again or install the matching "
            "version"
        )
    data.pop(_RETIRED, None)
    return read_fields(_KINDS[kind][0], data, RecordError, "record header")


def _journal_lines(path: Path) -> list[dict[str, Any]]:
    """Parse a file's journal; a truncated last line is left out."""
    journal = journal_path(path)
    if not journal.exists():
        return []
    try:
        text = journal.read_text(encoding="utf-8", errors="replace")
        return [dict(parse_json(line)) for line in text.split("\n")[:-1]]
    except (OSError, TypeError, ValueError) as error:
        raise RecordError(
            f"{journal} is not a journal of records ({error}); delete the damaged line "
            "or the file"
        ) from error


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Convert all errors of reading a Parquet file into a `RecordError`."""
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"{path} is not a file of cost records ({error!r}); it may be truncated: "
            "restore it or measure again"
        ) from error
