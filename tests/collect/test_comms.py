"""Sampling of collectives, their records, and what the collector refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.builders import make_comms_header, make_header, write_records
from torchrec_neuroshard.collect.comms import CommsConfig
from torchrec_neuroshard.collect.comms_sampling import (
    CommsSamplingConfig,
    sample_collective,
)
from torchrec_neuroshard.errors import (
    ConfigError,
    RecordError,
    RecordMismatchError,
)
from torchrec_neuroshard.record_store import (
    CommsStore,
    journal_path,
    read_comms_header,
    read_comms_records,
    read_records,
    record_kind,
)
from torchrec_neuroshard.records import (
    COLLECTIVES,
    CommsHeader,
    CommsRecord,
    repeatability,
)

SAMPLING = CommsSamplingConfig(bytes_per_rank=(1024, 2**20))
WORLD_4 = {"world": 4}


def record(
    index: int = 0, repeat_of: int | None = None, ms: float = 1.0
) -> CommsRecord:
    return CommsRecord(
        index=index,
        repeat_of=repeat_of,
        collective="pooled_forward",
        world_size=2,
        local_world_size=2,
        bytes_per_peer=(1024, 0),
        num_passes=2,
        spread=0.25,
        reference_ms=1.0,
        transfer_ms=(0.5 * ms, ms),
    )


# Sampling


def test_samples_depend_on_seed_and_index_alone() -> None:
    first = [sample_collective(i, 7, SAMPLING, WORLD_4) for i in range(50)]
    again = [sample_collective(i, 7, SAMPLING, WORLD_4) for i in reversed(range(50))]
    assert first == again[::-1]
    other = [sample_collective(i, 8, SAMPLING, WORLD_4) for i in range(50)]
    assert first != other


def test_samples_cover_sizes_collectives_and_skews() -> None:
    samples = [sample_collective(i, 0, SAMPLING, WORLD_4) for i in range(600)]
    assert {s.collective for s in samples} == set(COLLECTIVES)
    totals = np.array([sum(s.bytes_per_peer) for s in samples])
    assert np.quantile(totals, 0.05) < 3000
    assert np.quantile(totals, 0.95) > 500_000
    uneven = [s for s in samples if s.collective == "pooled_forward"]
    shares = np.array([max(s.bytes_per_peer) / sum(s.bytes_per_peer) for s in uneven])
    assert shares.min() == pytest.approx(0.25, abs=0.02)
    assert shares.max() == 1.0


def test_samples_hold_whole_values_and_rows() -> None:
    for index in range(300):
        sample = sample_collective(index, 1, SAMPLING, WORLD_4)
        unit = 4 * sample.batch_size if "pooled" in sample.collective else 8
        assert all(b % unit == 0 for b in sample.bytes_per_peer)
        assert any(sample.bytes_per_peer)
        if sample.collective in ("reduce_scatter", "all_gather", "all_reduce"):
            assert len(set(sample.bytes_per_peer)) == 1


def test_repeats_measure_an_earlier_sample_again() -> None:
    samples = [sample_collective(i, 0, SAMPLING, WORLD_4) for i in range(200)]
    repeats = [s for s in samples if s.repeat_of is not None]
    assert len(repeats) >= 5
    for again in repeats:
        assert again.repeat_of is not None
        assert again.index - again.repeat_of >= SAMPLING.repeat_lag
        earlier = samples[again.repeat_of]
        assert (
            dataclasses.replace(again, index=earlier.index, repeat_of=earlier.repeat_of)
            == earlier
        )


def test_every_group_is_drawn_at_its_size() -> None:
    sizes = {"world": 4, "local": 2, "cross": 3}
    samples = [sample_collective(i, 0, SAMPLING, sizes) for i in range(60)]
    assert {s.group for s in samples} == set(sizes)
    assert all(len(s.bytes_per_peer) == sizes[s.group] for s in samples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes_per_rank": (0, 5)}, r"bytes_per_rank needs 0 < low <= high"),
        ({"bytes_per_rank": (9, 5)}, r"got \(9, 5\)"),
        ({"repeat_every": 1}, "repeat_every must be at least 2, got 1"),
    ],
)
def test_bad_sampling_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SAMPLING, **changes)  # type: ignore[arg-type]


# Records and their files


def test_record_survives_json() -> None:
    data = json.loads(json.dumps(record(3, repeat_of=1).to_json()))
    assert CommsRecord.from_json(data) == record(3, repeat_of=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collective": "gossip"}, "collective 'gossip'; known are pooled_forward"),
        (
            {"world_size": 3},
            r"world_size \(3\) must be a multiple of local_world_size \(2\)",
        ),
        ({"num_passes": 0}, "record 0 needs a pass.*num_passes 0"),
        ({"bytes_per_peer": (1,)}, r"needs one value per rank \(2\)"),
        ({"transfer_ms": (1.5,)}, r"needs one value per rank \(2\)"),
    ],
)
def test_bad_records_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        dataclasses.replace(record(), **changes)  # type: ignore[arg-type]


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(RecordError, match=r"not a record of a collective.*colour"):
        CommsRecord.from_json({**record().to_json(), "colour": "red"})


def test_total_is_the_slowest_rank_and_repeats_are_compared() -> None:
    records = [record(0, ms=2.0), record(1, repeat_of=0, ms=3.0)]
    assert records[0].total_ms == 2.0
    assert repeatability(records) == [0.5]


def test_store_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    with CommsStore(path, make_comms_header()) as store:
        store.append(record(0))
        store.append(record(1))
        written = journal_path(path).read_text()
    path.unlink()
    # As if the process had died in the third write.
    journal_path(path).write_text(written + '{"index": 2, "coll')
    with CommsStore(path, make_comms_header()) as again:
        assert again.done == {0, 1}
        again.append(record(2))
    assert not journal_path(path).exists()
    [(kept, records)] = read_comms_records([path])
    assert kept == make_comms_header()
    assert [r.index for r in records] == [0, 1, 2]
    assert records[2].bytes_per_peer == record().bytes_per_peer
    assert records[2].transfer_ms == record().transfer_ms


def test_records_whose_ranks_start_late_are_left_out(tmp_path: Path) -> None:
    """Files of older versions hold some."""
    path = tmp_path / "c.parquet"
    lines = [
        make_comms_header().to_json(),
        {**record(0).to_json(), "delay_ms": [0.0, 0.0], "wait_ms": [0.1, 0.0]},
        {**record(1).to_json(), "delay_ms": [0.0, 5.0], "wait_ms": [5.0, 0.0]},
    ]
    journal_path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_comms_records([path]) == [(make_comms_header(), [record(0)])]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            make_comms_header(world_size=4),
            "holds records of world_size 2, 4 was asked for",
        ),
        (
            make_comms_header(backend="nccl"),
            "holds records of backend 'gloo', 'nccl' was asked",
        ),
        (make_comms_header(device="other"), "device: 'test device' against 'other'"),
    ],
)
def test_store_refuses_another_run(
    tmp_path: Path, asked: CommsHeader, message: str
) -> None:
    path = tmp_path / "c.parquet"
    with CommsStore(path, make_comms_header()) as store:
        store.append(record())
    with pytest.raises(RecordMismatchError, match=message):
        CommsStore(path, asked)


def test_backends_are_not_mixed(tmp_path: Path) -> None:
    for name in ("gloo", "nccl"):
        with CommsStore(tmp_path / name, make_comms_header(backend=name)) as store:
            store.append(record())
    with pytest.raises(RecordMismatchError, match="different backends: gloo, nccl"):
        read_comms_records([tmp_path / "gloo", tmp_path / "nccl"])


def test_kinds_of_records_are_told_apart(tmp_path: Path) -> None:
    comms, compute = tmp_path / "comms", tmp_path / "compute"
    with CommsStore(comms, make_comms_header()) as store:
        store.append(record())
        assert record_kind(comms) == "comms"  # a run under way
    assert record_kind(comms) == "comms"
    write_records(compute, make_header(), [])
    assert record_kind(compute) == "compute"
    with pytest.raises(RecordError, match="of 'neuroshard collect comms', not of"):
        read_records([comms])
    with pytest.raises(RecordError, match="of 'neuroshard collect compute', not of"):
        read_comms_records([compute])
    assert read_comms_header(tmp_path / "nothing") is None
    with pytest.raises(RecordError, match="nothing does not exist; measure with"):
        record_kind(tmp_path / "nothing")


# The collector's own checks, before any rank talks to another


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "mpi"}, "backend must be gloo or nccl, got 'mpi'"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"min_passes": 9, "max_passes": 3}, "1 <= min <= max"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be above 0"),
    ],
)
def test_bad_configuration_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CommsConfig(out=tmp_path / "c", **changes)  # type: ignore[arg-type]
