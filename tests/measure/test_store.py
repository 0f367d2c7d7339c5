from __future__ import annotations

import dataclasses
import errno
import json
import lzma
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
from torchrec_neuroshard.measure.store import RecordStore, read_header, read_records
from torchrec_neuroshard.tables.profile import FeatureProfile

HEADER = make_header(
    "cpu x", reference_ms=2.5, seed=3, sampling={"max_shards": 4, "widths": [4, 64]}
)


def record(index: int) -> CostRecord:
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


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.jsonl"
    write(path, 2, 0, 1)
    assert [p.name for p in path.parent.iterdir()] == ["r.jsonl"]
    headers, records = read_records([path])
    assert headers == [HEADER]
    assert records == [record(0), record(1), record(2)]
    assert read_header(path) == HEADER


def test_lines_are_short(tmp_path: Path) -> None:
    """Nothing is written that a reader can fill in, and no digit that means nothing."""
    path = tmp_path / "r.jsonl"
    known = make_record([*record(0).tables, *record(0).tables], 1 / 3, 1e9)
    write_records(path, HEADER, [known])
    line = json.loads(lines_of(path)[1])
    known_names = "index batch_size tables fwd_ms bwd_ms num_passes spread"
    assert set(line) == set(known_names.split())
    assert line["fwd_ms"] == 0.33333 and line["bwd_ms"] == 10**9
    tables = line["tables"]
    assert all(len(column) == 4 for column in tables.values())
    assert tables["num_embeddings"] == [100, 100] * 2
    assert "optimizer" in tables and "profile.weighted" not in tables
    [read] = read_records([path])[1]
    assert read == dataclasses.replace(known, fwd_ms=0.33333)


def test_records_are_readable_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, 0)
    with RecordStore(path, HEADER) as store:
        store.append(record(5))
        assert store.done == {0, 5}
        assert read_records([path])[1] == [record(0), record(5)]


def test_later_lines_replace_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, 0, 1)
    better = dataclasses.replace(record(0), fwd_ms=0.5)
    with RecordStore(path, HEADER) as store:
        store.append(better)
        store.change_header(failed={"7": "broke the GPU"})
    for _ in range(2):
        assert read_records([path])[1] == [better, record(1)]
        header = read_header(path)
        assert header is not None and header.failed == {"7": "broke the GPU"}
        write(path)


def _write_and_wait(path: Path, pipe: Connection) -> None:
    with RecordStore(path, HEADER) as store:
        store.append(record(0))
        pipe.send("open")
        pipe.recv()
        store.append(record(2))


@pytest.mark.parametrize("end", ["close", "kill"])
def test_one_process_at_a_time_writes(tmp_path: Path, end: str) -> None:
    """A second collector is refused and spoils nothing; the first one goes on."""
    path = tmp_path / "r.jsonl"
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    other = context.Process(target=_write_and_wait, args=(path, there))
    other.start()
    assert here.recv() == "open"
    for _ in range(2):
        with pytest.raises(RecordError, match=r"is writing to .*r\.jsonl; wait"):
            RecordStore(path, HEADER)
        assert read_records([path])[1] == [record(0)]
    if end == "kill":
        other.kill()
    else:
        here.send("close")
    other.join()
    write(path, 1)
    assert {0, 1} <= {r.index for r in read_records([path])[1]}
    assert (2 in {r.index for r in read_records([path])[1]}) == (end == "close")
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_without_locks_records_are_written_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    write(tmp_path / "r.jsonl", 0)
    assert read_records([tmp_path / "r.jsonl"])[1] == [record(0)]


def test_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, 0)
    path.write_text(path.read_text() + '{"index": 3, "repeat')
    assert read_records([path])[1] == [record(0)]
    write(path, 2)
    assert read_records([path])[1] == [record(0), record(2)]


@pytest.mark.parametrize("start", ["", '{"finger', '{"fingerprint":{"de'])
def test_torn_header_is_written_again(tmp_path: Path, start: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(start)
    assert read_header(path) is None
    with pytest.raises(RecordError, match=r"there are no records at .*; measure with"):
        read_records([path])
    write(path, 4)
    assert read_records([path])[1] == [record(4)]


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
    path = tmp_path / "r.jsonl"
    write(path, 0)
    write(path, 1, header=dataclasses.replace(HEADER, command="x", created="y"))
    kept = path.read_bytes()
    other = dataclasses.replace(HEADER, **change)
    with pytest.raises(RecordMismatchError, match=rf"r\.jsonl .*{message}"):
        RecordStore(path, other)
    assert path.read_bytes() == kept


def test_a_file_without_records_is_of_any_run(tmp_path: Path) -> None:
    path, other = tmp_path / "r.jsonl", dataclasses.replace(HEADER, seed=4)
    write(path)
    write(path, 0, header=other)
    assert read_records([path]) == ([other], [record(0)])


def test_compressed_files_are_read_only(tmp_path: Path) -> None:
    plain = tmp_path / "r.jsonl"
    path = plain.with_suffix(".jsonl.xz")
    write(plain, 0, 1)
    data = lzma.compress(plain.read_bytes())
    path.write_bytes(data)
    assert read_records([path]) == read_records([plain])
    with pytest.raises(RecordError, match=r"compressed.*unpack it with 'xz -d'"):
        RecordStore(path, HEADER)
    path.write_bytes(data[:100])
    with pytest.raises(RecordError, match=r"cannot be read.*; measure again"):
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
    write(tmp_path / "a.jsonl", 0)
    write_records(tmp_path / "b.jsonl", HEADER, (twice_as_long, again))
    _, found = read_records([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [r.index for r in found] == [0, 1, 2]
    assert [r.repeat_of for r in found] == [None, None, 1]
    assert repeatability(found) == [0.0]


@pytest.mark.parametrize("data", [b"PAR1\x15\x04", b"a,b\n1,2\n", b"{}\n"])
def test_other_files_are_refused_and_kept(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(data)
    with pytest.raises(RecordError, match=r"not a file of records.*older version"):
        read_records([path])
    with pytest.raises(RecordError, match="not a file of records"):
        RecordStore(path, HEADER)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops}\n", r"line 2 of .*r\.jsonl is damaged \(Expecting"),
        ("[1]\n", "line 2 of "),
        ('{"index": 1}\n', "invalid compute record"),
        ('{"index":1,"mood":1}\n', "mood"),
        ('{"index":1,"batch_size":1,"tables":{}}\n', "line 2 of "),
        ('{"index":1,"batch_size":1,"tables":{"name":["a"],"a":[]}}\n', "line 2 of "),
        ('{"index":1,"batch_size":1,"tables":{"profile.a":[1]}}\n', "unknown field 'a"),
        ('{"index":1,"batch_size":"a","tables":{"name":["a"]}}\n', "line 2 of "),
    ],
)
def test_damaged_lines_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    write(path, 0)
    header, known = lines_of(path)
    path.write_text(header + line + known)
    with pytest.raises(RecordError, match=message):
        read_records([path])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99, "novelty": 1}, "layout 99, but this version reads 3"),
        ({"fingerprint": {"device": "x"}}, "invalid record header"),
        ({"novelty": 1}, "invalid record header"),
        ({"kind": "gossip"}, "has gossip records"),
    ],
)
def test_other_headers_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "r.jsonl"
    line = json.dumps({**to_fields(HEADER), **change})
    path.write_text(line + "\n")
    with pytest.raises(RecordError, match=message):
        read_header(path)
