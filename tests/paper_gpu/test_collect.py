"""`neuroshard collect` and `calibrate` on a device, from end to end."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrec_neuroshard import load_cost_model
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.measure.sets import SamplingConfig
from torchrec_neuroshard.measure.store import read_comms_records, read_records
from torchrec_neuroshard.tables.table import OPTIMIZERS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings(
        r"ignore:[\s\S]*optimizer 'adam' is marked as:UserWarning"
    ),
]

SMALL = "--max-gib 0.001 --max-lookups 2000 --max-shards 3 --batch-sizes 64 128".split()
NAME = "Paper GPU"
ops: Any = torch.ops.paper_cuda


def test_a_gpu_by_number_is_the_one_that_is_timed_with_all_kinds_of_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event: Any = torch.cuda.Event
    made: list[Any] = []

    class Noted(event):
        def __init__(self, **options: bool) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Noted)
    before, path = ops.launches(0), tmp_path / "r.jsonl"
    arguments = ["--out", str(path), "--num-sets", "24", *SMALL]
    arguments += ["--device", "cuda:5", "--plan-share", "0.5"]
    assert main(["collect", "compute", *arguments]) == 0
    assert {e.device for e in made} == {torch.device("cuda", 5)}
    assert ops.launches(0) == before
    for start, end in zip(made[::2], made[1::2], strict=True):
        assert end.launches > start.launches
    (header,), records = read_records([path])
    assert (header.fingerprint.device, header.fingerprint.device_type) == (NAME, "cuda")
    assert header.reference_ms == 0
    assert header.sampling["plan_share"] == 0.5
    assert max(r.batch_size for r in records) <= 128  # plans' sets, too
    assert [r.index for r in records] == list(range(24))  # no set is left out
    assert {t.optimizer for r in records for t in r.tables} == set(OPTIMIZERS)
    assert {t.data_type for r in records for t in r.tables} == {"fp32", "fp16"}
    assert all(r.num_passes == 7 and not r.reference_ms for r in records)


def test_calibrate_finds_and_measures_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = dataclasses.replace(
        SamplingConfig.for_device(torch.device("cuda")),
        max_lookups=2_000,
        batch_sizes=(64, 128),
        max_plan_batch=None,
        max_shards=3,
    )
    monkeypatch.setattr(SamplingConfig, "for_device", lambda device: tiny)
    out = tmp_path / "paper"
    arguments = ["--num-sets", "60", "--max-gib", "0.001", "--steps", "4"]
    assert main(["calibrate", "--out", str(out), *arguments]) == 0
    assert NAME in load_cost_model(out, device_type="cuda").hardware


def test_collectives_are_measured_over_nccl_where_ranks_have_gpus(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "torchrec_neuroshard", "collect"]
    command += ["comms", "--out", str(path), "--num-samples", "12"]
    command += ["--sample-seconds", "0.01", "--max-bytes", "65536"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2000, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [(header, records)] = read_comms_records([path])
    assert (header.backend, header.world_size) == ("nccl", 2)
    assert (header.fingerprint.device, header.fingerprint.device_type) == (NAME, "cuda")
    assert [r.index for r in records] == list(range(12))
    assert len({r.collective for r in records}) > 3
