"""Keeping measurements: a journal that survives any end of the process, and Parquet.

While a run is under way each record is one line of `<file>.journal`, flushed to disk
before the next sample starts. A finished or interrupted run is folded into one Parquet
file, written beside the old one and moved over it. Reading takes both together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_neuroshard.errors import RecordError, RecordMismatchError
from torchrec_neuroshard.profiles import NUM_COUNT_BINS
from torchrec_neuroshard.records import CostRecord, RunHeader

__all__ = ["RecordStore", "journal_path", "read_header", "read_records"]

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
        ("fwd_raw_ms", pa.list_(pa.float32())),
        ("bwd_raw_ms", pa.list_(pa.float32())),
        ("ref_raw_ms", pa.list_(pa.float32())),
        ("fwd_ms", pa.float64()),
        ("bwd_ms", pa.float64()),
    ]
)


class RecordStore:
    """Appends the records of one run; use as a context manager."""

    def __init__(self, path: str | Path, header: RunHeader) -> None:
        """Open the file and its journal, or start them.

        Args:
            path: The Parquet file.
            header: The run to append; it must be the one that the file holds.

        Raises:
            RecordMismatchError: The file holds another run.
            RecordError: The file or its journal cannot be read.
        """
        self._path = Path(path)
        self._journal_path = journal_path(self._path)
        old_header, records = _read_all(self._path)
        if old_header is not None:
            header = _same_run(old_header, header, self._path)
        self.header = header
        self._records = records
        self.done = {r.index for r in records}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self._journal_path)
        if next(_journal_lines(self._journal_path), None) is None:
            self._append_line(json.dumps(header.to_json()))
        self._file = self._journal_path.open("a", encoding="utf-8")

    def _append_line(self, line: str) -> None:
        with self._journal_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def append(self, record: CostRecord) -> None:
        """Keep one record; it is on disk when this returns."""
        self._file.write(json.dumps(record.to_json()) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._records.append(record)
        self.done.add(record.index)

    def close(self) -> None:
        """Fold the journal into the Parquet file."""
        self._file.close()
        if self._records:
            _write_parquet(self._path, self.header, self._records)
            self._journal_path.unlink()

    def __enter__(self) -> RecordStore:
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


def journal_path(path: Path) -> Path:
    """Where the records of a run under way are kept."""
    return path.with_name(path.name + ".journal")


def read_header(path: str | Path) -> RunHeader | None:
    """Return the header of a record file or its journal, None where there is none yet.

    Raises:
        RecordError: The file or its journal cannot be read.
    """
    return _read_all(Path(path))[0]


def read_records(
    paths: Iterable[str | Path],
) -> tuple[list[RunHeader], list[CostRecord]]:
    """Read files of records, runs under way included.

    Returns:
        The headers, one per file, and all records.

    Raises:
        RecordError: A file is missing, empty or not a record file.
        RecordMismatchError: The files are of different hardware or libraries.
    """
    headers: list[RunHeader] = []
    records: list[CostRecord] = []
    for path in map(Path, paths):
        header, new = _read_all(path)
        if header is None:
            raise RecordError(
                f"{path} does not exist; measure with 'neuroshard collect compute "
                f"--out {path}'"
            )
        if headers:
            lines = headers[0].fingerprint.mismatch(header.fingerprint)
            if lines:
                raise RecordMismatchError(
                    f"{path} was measured elsewhere than the files before it "
                    f"({'; '.join(lines)}); train on one machine's records at a time"
                )
        headers.append(header)
        records.extend(new)
    return headers, records


def _same_run(old: RunHeader, new: RunHeader, path: Path) -> RunHeader:
    old.check_same_run(new, str(path))
    return old


def _read_all(path: Path) -> tuple[RunHeader | None, list[CostRecord]]:
    header: RunHeader | None = None
    records: dict[int, CostRecord] = {}
    if path.exists():
        header, in_file = _read_parquet(path)
        records.update((r.index, r) for r in in_file)
    journal = journal_path(path)
    lines = _journal_lines(journal)
    first = next(lines, None)
    if first is not None:  # else there is no journal, or not even its header
        journal_header = RunHeader.from_json(_parse(first, journal))
        if header is not None:
            header.check_same_run(journal_header, str(journal))
        header = header or journal_header
        for line in lines:
            record = CostRecord.from_json(_parse(line, journal))
            records[record.index] = record
    return header, [records[i] for i in sorted(records)]


def _parse(line: str, path: Path) -> dict[str, object]:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{path} is damaged ({error}); delete the line or the file"
        ) from error
    if not isinstance(data, dict):
        raise RecordError(f"{path} is not a journal of records")
    return data


def _journal_lines(path: Path) -> Iterator[str]:
    """Complete lines; one cut off by the end of the process is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n"):
                yield line


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        with path.open("r+b") as file:
            file.truncate(end)


def _read_parquet(path: Path) -> tuple[RunHeader, list[CostRecord]]:
    try:
        table = pq.read_table(path)
        header = json.loads(table.schema.metadata[_HEADER_KEY])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise RecordError(
            f"{path} is not a file of cost records ({error!r}); it may be truncated: "
            "restore it or measure again"
        ) from error
    return (
        RunHeader.from_json(header),
        [CostRecord.from_json(row) for row in table.to_pylist()],
    )


def _write_parquet(
    path: Path, header: RunHeader, records: Sequence[CostRecord]
) -> None:
    rows = sorted((r.to_json() for r in records), key=lambda r: r["index"])
    schema = _SCHEMA.with_metadata({_HEADER_KEY: json.dumps(header.to_json()).encode()})
    table = pa.Table.from_pylist(rows, schema=schema)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(table, temporary, compression="zstd", compression_level=19)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
