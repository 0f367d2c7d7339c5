"""Sampling of collectives, their records, and settings that are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import (
    make_comms_header,
    make_comms_record,
    make_header,
    write_records,
)
from torchrec_neuroshard.errors import (
    ConfigError,
    NeuroShardError,
    RecordError,
    RecordMismatchError,
)
from torchrec_neuroshard.measure import run_collectives
from torchrec_neuroshard.measure.collectives import (
    REPEAT_LAG,
    sample_collective,
)
from torchrec_neuroshard.measure.ranks import Ranks
from torchrec_neuroshard.measure.sets import SamplingConfig
from torchrec_neuroshard.measure.settings import CollectConfig, CommsConfig
from torchrec_neuroshard.measure.store import (
    RecordStore,
    read_comms_records,
    read_header,
    read_records,
    record_kind,
)
from torchrec_neuroshard.models.base import COLLECTIVES

SIZES = (1024, 2**20)


# Sampling


def test_samples_cover_sizes_collectives_and_skews() -> None:
    samples = [sample_collective(i, 0, SIZES, {"world": 4}) for i in range(600)]
    assert {s.collective for s in samples} == set(COLLECTIVES)
    totals = np.array([sum(s.bytes_per_peer) for s in samples])
    assert np.quantile(totals, 0.05) < 3000
    assert np.quantile(totals, 0.95) > 500_000
    uneven = [s for s in samples if s.collective == "pooled_forward"]
    shares = np.array([max(s.bytes_per_peer) / sum(s.bytes_per_peer) for s in uneven])
    assert shares.min() == pytest.approx(0.25, abs=0.02)
    assert shares.max() == 1.0
    for sample in samples:  # whole values and rows
        unit = 4 * sample.batch_size if "pooled" in sample.collective else 8
        assert all(b % unit == 0 for b in sample.bytes_per_peer)
        assert any(sample.bytes_per_peer)
        if sample.collective in ("reduce_scatter", "all_gather", "all_reduce"):
            assert len(set(sample.bytes_per_peer)) == 1
    repeats = {s: samples[s.repeat_of] for s in samples if s.repeat_of is not None}
    assert len(repeats) >= 15
    for again, first in repeats.items():
        assert again.index - first.index >= REPEAT_LAG
        assert first == dataclasses.replace(again, index=first.index, repeat_of=None)


# Times


def test_a_transfer_counts_from_the_last_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 arrives 4 ms before rank 1 and waits for it."""
    runner = SimpleNamespace(run=lambda: None)
    monkeypatch.setattr(run_collectives, "CollectiveRunner", lambda *_, **__: runner)
    arrivals_s, ends_s = [0.0, 4e-3], [6e-3, 7e-3]
    group = SimpleNamespace(ranks=(0, 1), local_world_size=2, rank=0)
    group.process_group = None
    ranks: Any = SimpleNamespace(
        device=torch.device("cpu"),
        groups={"world": group},
        group_sizes={"world": 2},
        clock=lambda: 0.0,
        agree=lambda values: values,
        gather=lambda passes: np.array([[arrivals_s, ends_s]] * len(passes)),
    )
    meter = vars(run_collectives)["_CollectiveMeter"](ranks, 0.15)
    assert meter.nominal_ms(3) == pytest.approx(3.0)
    sampled = sample_collective(0, 0, SIZES, {"world": 2})
    found = meter.measure(sampled, reference_ms=6.0)
    assert found.reference_ms == pytest.approx(3.0)
    # The machine is half as fast as at its nominal speed.
    assert found.transfer_ms == pytest.approx((4.0, 6.0))


# Records and their files


def test_other_runs_backends_and_kinds_of_records_are_refused(tmp_path: Path) -> None:
    gloo, nccl, compute = (tmp_path / n for n in ("gloo", "nccl", "compute"))
    for path in (gloo, nccl):
        with RecordStore(path, make_comms_header(backend=path.name)) as store:
            store.append(make_comms_record())
            assert record_kind(path) == "comms"  # a running run
        assert record_kind(path) == "comms"
    for change, value in (
        ({"world_size": 4}, "world_size: 2"),
        ({"backend": "nccl"}, "'nccl'"),
        ({"device": "other"}, "'other'"),
    ):
        with pytest.raises(RecordMismatchError, match=value):
            RecordStore(gloo, make_comms_header(**change))
    with RecordStore(gloo, make_comms_header()) as store:
        assert store.done == {0}
    assert read_comms_records([gloo]) == [(make_comms_header(), [make_comms_record()])]
    write_records(compute, make_header(), [])
    assert record_kind(compute) == "compute"
    assert read_header(tmp_path / "nothing") is None
    reads: list[tuple[Callable[[], object], str]] = [
        (lambda: read_comms_records([gloo, nccl]), "backend: 'gloo' against 'nccl'"),
        (lambda: read_records([gloo]), "of 'neuroshard collect comms', not of"),
        (lambda: read_comms_records([compute]), "of 'neuroshard collect compute', not"),
        (
            lambda: record_kind(tmp_path / "nothing"),
            r"there are no records at .*; measure with",
        ),
    ]
    for read, value in reads:
        with pytest.raises(NeuroShardError, match=value):
            read()


@pytest.mark.parametrize(
    ("kind", "change", "value"),
    [
        (make_comms_record, {"collective": "gossip"}, "gossip"),
        (make_comms_record, {"world_size": 3}, r"world_size \(3\)"),
        (make_comms_record, {"transfer_ms": (1.5,)}, "transfer_ms"),
        (CommsConfig, {"out": Path("c"), "bytes_per_rank": (9, 5)}, r"\(9, 5\)"),
        (CollectConfig, {"out": Path("r"), "num_sets": 0}, "got 0"),
        (SamplingConfig, {"batch_sizes": (9, 8)}, r"\(9, 8\)"),
        (SamplingConfig, {"max_lookups": 0}, "max_lookups"),
    ],
)
def test_bad_values_are_refused(kind: Any, change: Any, value: str) -> None:
    with pytest.raises((ConfigError, RecordError), match=value):
        kind(**change)


@pytest.mark.parametrize(
    ("changes", "backend", "value"),
    [
        ({"RANK": ""}, "gloo", "RANK is not set.*torchrun --nproc-per-node"),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "gloo", "got 1"),
        ({"LOCAL_WORLD_SIZE": "4"}, "gloo", r"local_world_size \(4\)"),
        ({}, "nccl", "rank 0 has no CUDA device: torch sees 0"),
    ],
)
def test_bad_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], backend: str, value: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    rank_0_of_6 = {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
    for name, number in {**rank_0_of_6, **changes}.items():
        monkeypatch.setenv(name, number)
        if not number:
            monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=value):
        Ranks(backend, 5.0)
