"""Sampling of collectives, their records, and what the collector refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

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


# Records and their files


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"collective": "gossip"}, "gossip"),
        ({"world_size": 3}, r"world_size \(3\)"),
        ({"num_passes": 0}, "num_passes 0"),
        ({"transfer_ms": (1.5,)}, "transfer_ms"),
    ],
)
def test_bad_records_are_refused(changes: dict[str, Any], value: str) -> None:
    with pytest.raises(RecordError, match=value):
        dataclasses.replace(record(), **changes)


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
    ("asked", "value"),
    [
        (make_comms_header(world_size=4), "world_size 2"),
        (make_comms_header(backend="nccl"), "'nccl'"),
        (make_comms_header(device="other"), "'other'"),
    ],
)
def test_store_refuses_another_run(
    tmp_path: Path, asked: CommsHeader, value: str
) -> None:
    path = tmp_path / "c.parquet"
    with CommsStore(path, make_comms_header()) as store:
        store.append(record())
    with pytest.raises(RecordMismatchError, match=value):
        CommsStore(path, asked)


def test_backends_are_not_mixed(tmp_path: Path) -> None:
    for name in ("gloo", "nccl"):
        with CommsStore(tmp_path / name, make_comms_header(backend=name)) as store:
            store.append(record())
    with pytest.raises(RecordMismatchError, match="gloo, nccl"):
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
    ("changes", "value"),
    [
        ({"backend": "mpi"}, "mpi"),
        ({"num_samples": 0}, "num_samples"),
        ({"min_passes": 9, "max_passes": 3}, "9, 3"),
        ({"timeout_seconds": 0.0}, "timeout_seconds"),
    ],
)
def test_bad_configuration_is_refused(
    tmp_path: Path, changes: dict[str, Any], value: str
) -> None:
    with pytest.raises(ConfigError, match=value):
        CommsConfig(out=tmp_path / "c", **changes)


@pytest.mark.parametrize("changes", [{"bytes_per_rank": (9, 5)}, {"repeat_every": 1}])
def test_bad_sampling_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        CommsSamplingConfig(**changes)
