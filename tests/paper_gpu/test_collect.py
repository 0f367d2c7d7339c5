"""`neuroshard collect` and `calibrate` on a device, from end to end."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import make_tables
from torchrec_neuroshard import load_cost_model
from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.collect import compute
from torchrec_neuroshard.collect.compute import read_failures
from torchrec_neuroshard.collect.tbe import FusedTables, draw_inputs, reserve_memory
from torchrec_neuroshard.collect.timing import SetTimer
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.record_store import read_comms_records, read_records
from torchrec_neuroshard.tables import OPTIMIZERS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings(
        r"ignore:[\s\S]*optimizer 'adam' is marked as:UserWarning"
    ),
]

SMALL = "--max-gib 0.001 --max-lookups 2000 --max-shards 3 --batch-sizes 64 128".split()
GIB = 2**30
NAME = "Paper GPU"
ops: Any = torch.ops.paper_cuda


def collect(path: Path, num_sets: int, *options: str) -> int:
    arguments = ["--out", str(path), "--num-sets", str(num_sets), *SMALL, *options]
    return main(["collect", "compute", *arguments])


@pytest.fixture
def card() -> Iterator[Any]:
    """Sets the size of the cards [GiB]."""
    before = ops.capacity()
    yield lambda gib: ops.set_capacity(int(gib * GIB))
    ops.set_capacity(before)


def test_the_gpu_is_found_and_all_kinds_of_sets_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    assert collect(path, 24) == 0
    (header,), records = read_records([path])
    assert (header.fingerprint.device, header.fingerprint.device_type) == (NAME, "cuda")
    assert header.reference_ms == 0
    assert [r.index for r in records] == list(range(24))  # no set is left out
    assert {t.optimizer for r in records for t in r.tables} == set(OPTIMIZERS)
    assert {t.data_type for r in records for t in r.tables} == {"fp32", "fp16"}
    assert all(r.num_passes == 7 and not r.reference_ms for r in records)


def test_adam_is_measured_over_fp32_weights_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    assert collect(path, 3, "--optimizers", "adam", "--fp16-share", "1") == 0
    _, records = read_records([path])
    assert {t.data_type for r in records for t in r.tables} == {"fp32"}
    tables = make_tables([8], optimizer="adam", data_type="fp16")
    with pytest.raises(ConfigError, match="adam over fp16"):
        FusedTables(tables, torch.device("cuda"))


def test_what_no_kernel_is_wide_enough_for_is_refused() -> None:
    FusedTables(make_tables([2048], rows=4), torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"'t1'.* 2,052 columns.* at most 2,048"):
        FusedTables(make_tables([8, 2052], rows=4), torch.device("cuda"))


def test_a_gpu_by_number_is_the_one_that_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event: Any = torch.cuda.Event
    made: list[Any] = []

    class Noted(event):
        def __init__(self, **options: bool) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Noted)
    before = ops.launches(0)
    assert collect(tmp_path / "r.parquet", 3, "--device", "cuda:5") == 0
    assert {e.device for e in made} == {torch.device("cuda", 5)}
    assert ops.launches(0) == before
    for start, end in zip(made[::2], made[1::2], strict=True):
        assert end.launches > start.launches


def test_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect(tmp_path / "r.parquet", 3, "--device", "cuda:64") == 2
    assert "no device 'cuda:64'" in capsys.readouterr().err


def test_a_set_that_breaks_the_device_is_left_out_by_the_next_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, broken_set = tmp_path / "r.parquet", 2
    measure = SetTimer.measure

    def breaking(self: SetTimer, *arguments: Any) -> Any:
        if arguments[3][1] == broken_set:  # the seed: the run's, and the set
            ops.break_at_next_kernel(3)
        return measure(self, *arguments)

    monkeypatch.setattr(SetTimer, "measure", breaking)
    try:
        assert collect(path, 4, "--device", "cuda:3") == 2
    finally:
        ops.repair(3)  # as a new process does
    assert f"set {broken_set} failed on the device" in capsys.readouterr().err
    failures = read_failures(path)
    assert list(failures) == [broken_set]
    assert "CUDA Error: an illegal memory access" in failures[broken_set]
    assert collect(path, 4, "--device", "cuda:3") == 0
    _, records = read_records([path])
    assert {r.index for r in records} == set(range(4)) - {broken_set}
    assert f"set {broken_set} ended an earlier run" in capsys.readouterr().out


@pytest.mark.parametrize("gib", [24, 141])
def test_plain_collect_draws_sets_that_fit_the_card(card: Any, gib: int) -> None:
    card(gib)
    parser = argparse.ArgumentParser()
    compute.add_arguments(parser)
    sampling = compute.sampling_from(parser.parse_args(["--out", "x"]))
    ops.set_foreign(0, int(0.03 * gib * GIB))  # what a driver takes
    try:
        reserve_memory(torch.device("cuda"), sampling.max_weight_bytes)
    finally:
        ops.set_foreign(0, 0)
    assert sampling.max_weight_bytes >= 0.6 * gib * GIB
    # Ids of two batches, and what drawing them takes, beside weights and a driver.
    ids = 8 * sampling.max_lookups
    assert sampling.max_weight_bytes + 6 * ids < 0.95 * gib * GIB
    assert sampling.optimizers == OPTIMIZERS


def test_inputs_are_bounds_checked_as_in_training() -> None:
    tables = make_tables([8], rows=10)
    kernel = FusedTables(tables, torch.device("cuda"))
    access = [AccessDistribution.power_law(10, 1.0)]
    batch = draw_inputs(tables, access, 4, (1,), torch.device("cuda"))
    before = ops.calls().get("fbgemm::bounds_check_indices", 0)
    kernel.forward(batch)
    assert ops.calls()["fbgemm::bounds_check_indices"] == before + 1


def test_calibrate_measures_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = dataclasses.replace(
        compute.default_sampling(torch.device("cuda")),
        max_lookups=2_000,
        batch_sizes=(64, 128),
        max_shards=3,
    )
    monkeypatch.setattr(compute, "default_sampling", lambda device: tiny)
    out = tmp_path / "paper"
    arguments = ["--num-samples", "20", "--max-gib", "0.001", "--steps", "4"]
    assert main(["calibrate", "--out", str(out), *arguments]) == 0
    assert NAME in load_cost_model(out, device_type="cuda").hardware


def test_collectives_are_measured_over_nccl_where_ranks_have_gpus(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.parquet"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "torchrec_neuroshard", "collect"]
    command += ["comms", "--out", str(path), "--num-samples", "12"]
    command += ["--sample-seconds", "0.01", "--max-bytes", "65536"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [(header, records)] = read_comms_records([path])
    assert (header.backend, header.world_size) == ("nccl", 2)
    assert (header.fingerprint.device, header.fingerprint.device_type) == (NAME, "cuda")
    assert [r.index for r in records] == list(range(12))
    assert len({r.collective for r in records}) > 3
