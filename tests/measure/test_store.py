from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.builders import (
    make_fingerprint,
    make_header,
    make_record,
    make_tables,
    write_records,
)
from torchrec_neuroshard.errors import RecordError, RecordMismatchError
from torchrec_neuroshard.files import to_fields
from torchrec_neuroshard.measure.records import CostRecord, RunHeader, repeatability
from torchrec_neuroshard.measure.store import (
    RecordStore,
    journal_path,
    read_header,
    read_records,
)
from torchrec_neuroshard.tables.profile import FeatureProfile

HEADER = make_header(
    "cpu x", reference_ms=2.5, seed=3, sampling={"max_shards": 4, "widths": [4, 64]}
)


def record(index: int) -> CostRecord:
    # Halves and quarters: the file keeps single precision.
    profile = FeatureProfile(
        batch_size=16,
        num_lookups=40.0,
        pooling_std=0.5,
        access_histogram=(20.25, 5.0, *[0.0] * 14, 1.5),
        weighted=True,
    )
    kind: Any = {"num_features": 2, "profile": profile}
    kind |= {"weighted": True, "data_type": "fp16", "optimizer": "sgd"}
    tables = make_tables([8, 4], 100 + index, 2.5, **kind)
    measured: Any = {"num_passes": 3, "spread": 0.125, "reference_ms": 2.25}
    repeat_of = index - 1 if index % 2 else None
    return make_record(tables, 1.1, 2.2, index=index, repeat_of=repeat_of, **measured)


def write(path: Path, *indices: int, header: RunHeader = HEADER) -> None:
    write_records(path, header, map(record, indices))


def test_parquet_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.parquet"
    write(path, 2, 0, 1)
    assert not journal_path(path).exists()
    assert [p.name for p in path.parent.iterdir()] == ["r.parquet"]
    headers, records = read_records([path])
    assert headers == [HEADER]
    assert records == [record(0), record(1), record(2)]
    assert read_header(path) == HEADER


def test_records_are_readable_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    write(path, 0)
    store = RecordStore(path, HEADER)
    store.append(record(5))
    assert store.done == {0, 5}
    assert read_records([path])[1] == [record(0), record(5)]
    kept = journal_path(path).read_bytes()
    store.close()
    assert read_records([path])[1] == [record(0), record(5)]
    # As if the process had been killed between the file and its journal.
    journal_path(path).write_bytes(kept)
    assert read_records([path])[1] == [record(0), record(5)]
    write(path, 1)
    assert read_records([path])[1] == [record(0), record(1), record(5)]


def _write_and_wait(path: Path, pipe: Connection) -> None:
    with RecordStore(path, HEADER) as store:
        store.append(record(0))
        pipe.send("open")
        pipe.recv()


@pytest.mark.parametrize("end", ["close", "kill"])
def test_one_process_at_a_time_writes(tmp_path: Path, end: str) -> None:
    path = tmp_path / "r.parquet"
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    other = context.Process(target=_write_and_wait, args=(path, there))
    other.start()
    assert here.recv() == "open"
    for _ in range(2):
        with pytest.raises(RecordError, match=r"is writing to .*r\.parquet; wait"):
            RecordStore(path, HEADER)
        assert read_records([path])[1] == [record(0)]
    if end == "kill":
        other.kill()
    else:
        here.send("close")
    other.join()
    write(path, 1)
    assert read_records([path])[1] == [record(0), record(1)]
    assert [p.name for p in tmp_path.iterdir()] == ["r.parquet"]


def test_a_journal_that_its_owner_deletes_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner ends between the opening of the journal and its locking."""
    path, lock = tmp_path / "r.parquet", fcntl.flock
    owner, locked = RecordStore(path, HEADER), []
    owner.append(record(0))

    def end_first(file: Any, operation: int) -> None:
        owner.close()
        locked.append(file)
        lock(file, operation)

    monkeypatch.setattr("fcntl.flock", end_first)
    with RecordStore(path, HEADER) as store:
        assert len(locked) == 2
        store.append(record(1))
        assert read_records([path])[1] == [record(0), record(1)]


def test_without_locks_records_are_written_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    write(tmp_path / "r.parquet", 0)
    assert read_records([tmp_path / "r.parquet"])[1] == [record(0)]


def test_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    with RecordStore(path, HEADER) as store:
        store.append(record(0))
        torn = journal_path(path).read_text() + '{"index": 3, "repeat'
    path.unlink()
    journal_path(path).write_text(torn)
    assert read_records([path])[1] == [record(0)]
    write(path, 2)
    assert read_records([path])[1] == [record(0), record(2)]


@pytest.mark.parametrize(("start", "before"), [("", (0,)), ('{"finger', ())])
def test_torn_header_is_written_again(
    tmp_path: Path, start: str, before: tuple[int, ...]
) -> None:
    path = tmp_path / "r.parquet"
    if before:
        write(path, *before)
    journal_path(path).write_text(start)
    assert read_header(path) == (HEADER if before else None)
    with RecordStore(path, HEADER) as store:
        store.append(record(4))
        assert [r.index for r in read_records([path])[1]] == [*before, 4]
    assert [r.index for r in read_records([path])[1]] == [*before, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "seed: 3 against 4"),
        ({"bounds_check": "warning"}, "bounds_check: 'none'"),
        ({"sampling": {"max_shards": 5}}, "sampling: "),
        ({"fingerprint": make_fingerprint("gpu")}, "device: 'cpu x' against 'gpu'"),
    ],
)
def test_other_runs_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "r.parquet"
    write(path, 0)
    write(path, 1, header=dataclasses.replace(HEADER, command="x", created="y"))
    other = dataclasses.replace(HEADER, **change)
    with pytest.raises(RecordMismatchError, match=rf"r\.parquet .*{message}"):
        RecordStore(path, other)
    journal_path(path).write_text(json.dumps(to_fields(other)) + "\n")
    with pytest.raises(RecordMismatchError, match=message):
        read_records([path])


def test_files_of_two_machines_are_not_read_together(tmp_path: Path) -> None:
    files = {
        "a": HEADER,
        "b": dataclasses.replace(HEADER, seed=9),
        "c": dataclasses.replace(HEADER, fingerprint=make_fingerprint("cpu y")),
        "d": dataclasses.replace(HEADER, bounds_check="warning"),
    }
    for index, (name, header) in enumerate(files.items()):
        write(tmp_path / name, index, header=header)
    headers, records = read_records([tmp_path / "a", tmp_path / "b"])
    assert [h.seed for h in headers] == [3, 9] and len(records) == 2
    for name, message in (
        ("c", "use files of one machine"),
        ("d", "bounds_check: 'none' against 'war"),
    ):
        with pytest.raises(RecordMismatchError, match=message):
            read_records([tmp_path / "a", tmp_path / name])


def test_times_of_all_files_are_in_the_unit_of_the_first(tmp_path: Path) -> None:
    """Two runs with the same ratios to the reference have the same times."""
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    write(paths[0], 0)
    slower = dataclasses.replace(HEADER, reference_ms=5.0, seed=9)
    again = make_record(record(0).tables, 2.2, 4.4, reference_ms=4.0)
    write_records(paths[1], slower, [again])
    # Without a reference, times stay as they are.
    write(paths[2], 0, header=dataclasses.replace(HEADER, reference_ms=0.0))
    headers, found = read_records(paths)
    assert [h.reference_ms for h in headers] == [2.5, 2.5, 0.0]
    assert [(r.fwd_ms, r.bwd_ms) for r in found] == [(1.1, 2.2)] * 3
    headers, found = read_records([paths[2], paths[1]])
    assert [h.reference_ms for h in headers] == [0.0, 5.0]
    assert [r.fwd_ms for r in found] == [1.1, 2.2]


def test_repeats_are_of_sets_of_their_own_file(tmp_path: Path) -> None:
    twice_as_long = make_record(record(0).tables, 2.2, 4.4, index=0)
    again = make_record(record(0).tables, 2.2, 4.4, index=1, repeat_of=0)
    write(tmp_path / "a.parquet", 0)
    write_records(tmp_path / "b.parquet", HEADER, (twice_as_long, again))
    _, found = read_records([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    assert [r.index for r in found] == [0, 1, 2]
    assert [r.repeat_of for r in found] == [None, None, 1]
    assert repeatability(found) == [0.0]


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_other_files_are_refused(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "r.parquet"
    write(path, 0, 1)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(RecordError, match=r"not a file of cost records.*truncated"):
        read_records([path])
    with pytest.raises(RecordError, match="not a file of cost records"):
        RecordStore(path, HEADER)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(RecordError, match="not a file of cost records"):
        read_records([path])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops}\n", "not a journal of records"),
        (b"[1]\n", "not a journal of records"),
        (b'{"index": 1}\n', "invalid compute record"),
        (json.dumps({**to_fields(record(0)), "mood": 1}).encode() + b"\n", "mood"),
    ],
)
def test_damaged_journal_is_refused(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "r.parquet"
    header = json.dumps(to_fields(HEADER)).encode() + b"\n"
    journal_path(path).write_bytes(header + line)
    with pytest.raises(RecordError, match=message):
        read_records([path])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99, "novelty": 1}, "layout 99, but this version reads 2"),
        ({"fingerprint": {"device": "x"}}, "invalid record header"),
        ({"novelty": 1}, "invalid record header"),
        ({"kind": "gossip"}, "has gossip records"),
    ],
)
def test_other_headers_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "r.parquet"
    line = json.dumps({**to_fields(HEADER), **change})
    journal_path(path).write_text(line + "\n")
    with pytest.raises(RecordError, match=message):
        read_header(path)
