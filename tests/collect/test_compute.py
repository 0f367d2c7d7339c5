from __future__ import annotations

import argparse
import dataclasses
import io
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.builders import ONE_PASS, make_record
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.collect.compute import (
    CollectConfig,
    add_arguments,
    collect_compute,
    read_failures,
    sampling_from,
    unit_factor,
)
from torchrec_neuroshard.collect.fingerprint import device_fingerprint
from torchrec_neuroshard.collect.sampling import SamplingConfig, sample_set
from torchrec_neuroshard.collect.timing import CPU_PASSES, Reference
from torchrec_neuroshard.devices import GpuMonitor, GpuState
from torchrec_neuroshard.errors import (
    ConfigError,
    DeviceFailureError,
)
from torchrec_neuroshard.record_store import journal_path, read_records
from torchrec_neuroshard.records import CostRecord

OPTIONS = (
    "--max-gib 0.001 --max-lookups 3000 --max-shards 3 --batch-sizes 64 128 --seed 5 "
    "--set-seconds 0"
).split()
SAMPLING = SamplingConfig(
    max_shards=3,
    max_lookups=3_000,
    max_weight_bytes=int(0.001 * 2**30),
    batch_sizes=(64, 128),
)


def collect(path: Path, num_sets: int, *options: str) -> int:
    arguments = ["--out", str(path), "--num-sets", str(num_sets), *OPTIONS, *options]
    return main(["collect", "compute", *arguments])


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("collect") / "r.parquet"
    nominal_ms = Reference.nominal_ms
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "nominal_ms", lambda self: nominal_ms(self, 9))
        assert collect(path, 3) == 0
    return path


def test_command_measures_the_sampled_sets(collected: Path) -> None:
    (header,), records = read_records([collected])
    assert [r.index for r in records] == [0, 1, 2]
    assert not journal_path(collected).exists()
    assert header.seed == 5 and header.reference_ms > 0
    assert header.fingerprint == device_fingerprint(torch.device("cpu"), 1)
    assert header.sampling["max_lookups"] == 3_000
    for record in records:
        sampled = sample_set(record.index, 5, SAMPLING, [])
        assert [t.name for t in record.tables] == [t.name for t in sampled.tables]
        assert record.batch_size == sampled.batch_size
        assert record.fwd_ms > 0 and record.bwd_ms > 0
        assert record.num_passes == CPU_PASSES.min_passes and record.reference_ms > 0
        for found, wanted in zip(record.tables, sampled.tables, strict=True):
            assert found.profile is not None and wanted.profile is not None
            assert found.profile.access_histogram == pytest.approx(
                wanted.profile.access_histogram, rel=1e-6, abs=1e-30
            )


def test_command_goes_on_where_it_stopped(
    collected: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headers, records = read_records([collected])
    written = collected.read_bytes()
    for options, message in (
        (["--seed", "6"], "seed: 5 against 6"),
        (["--max-shards", "4"], "sampling: "),
    ):
        assert collect(collected, 9, *options) == 2
        assert message in capsys.readouterr().err
        assert collected.read_bytes() == written
    assert collect(collected, 4) == 0
    again, more = read_records([collected])
    assert again == headers
    assert more[:3] == records
    assert [r.index for r in more] == [0, 1, 2, 3]
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 sets measured again after the restart" in printed


def test_the_time_limit_counts_from_the_start_of_the_command(
    collected: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What imports and models took before is part of it."""
    begun = time.monotonic() - 100
    monkeypatch.setattr("torchrec_neuroshard.cli._STARTED", begun)
    path = Path(shutil.copy(collected, tmp_path))
    assert collect(path, 9, "--time-limit", "50") == 0
    assert read_records([path]) == read_records([collected])
    assert "stopped at the time limit of 50 s" in capsys.readouterr().out


def test_real_tables_and_the_gpus_state_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = GpuState(
        sm_clock_mhz=1_980.0,
        memory_clock_mhz=3_201.0,
        temperature_c=60.0,
        throttle_reasons=0,
    )
    module = "torchrec_neuroshard.collect.compute"
    monkeypatch.setattr("torchrec_neuroshard.collect.timing.CPU_PASSES", ONE_PASS)
    monkeypatch.setattr(Reference, "nominal_ms", lambda self: 1.0)
    monkeypatch.setattr(f"{module}.gpu_uuid", lambda _: "GPU-0")
    monkeypatch.setattr(
        f"{module}.find_gpu_monitor", lambda _: GpuMonitor(lambda: state)
    )
    tables = tmp_path / "tables.json"
    workloads = [
        {"name": "mine", "rows": [500] * 30, "pooling": [2.0] * 30},
    ]
    tables.write_text(json.dumps({"workloads": workloads}))
    config = CollectConfig(
        out=tmp_path / "r.parquet",
        num_sets=2,
        tables=(tables,),
        sampling=dataclasses.replace(SAMPLING, real_share=1.0),
    )
    threads = torch.get_num_threads()
    collect_compute(config, Console(quiet=True))
    assert torch.get_num_threads() == threads
    (header,), records = read_records([config.out])
    assert header.sampling["workloads"] == ["mine"]
    assert header.sampling["num_base_tables"] == 30
    assert all(t.name.startswith("mine/") for r in records for t in r.tables)
    for record in records:
        found = record.sm_clock_mhz, record.memory_clock_mhz, record.temperature_c
        assert found == (1_980.0, 3_201.0, 60.0)


def timed(index: int, ms: float = 1.0, **changes: Any) -> CostRecord:
    tables = sample_set(0, 0, SAMPLING, []).tables
    known = {"index": index, "spread": 0.01, "reference_ms": 1.0}
    return make_record(tables, ms, ms, **{**known, **changes})


def test_a_slower_reference_after_a_restart_is_made_up_for() -> None:
    earlier = [timed(i, 10.0 + i) for i in range(5)]
    again = [timed(i, (10.0 + i) * 0.8) for i in range(4)] + [timed(4, 1000.0)]
    assert unit_factor(earlier, again) == pytest.approx(1.25)
    assert unit_factor([], []) == 1.0


Measure = Callable[[int], CostRecord]
Collect = Callable[..., tuple[list[CostRecord], str]]


@pytest.fixture
def collect_as(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Collect:
    """Collect sets whose measurements are made up."""
    monkeypatch.setattr(Reference, "nominal_ms", lambda self: 1.0)

    def run(measure: Measure, num_sets: int, **fields: Any) -> Any:
        monkeypatch.setattr(
            "torchrec_neuroshard.collect.compute._SetMeter.measure",
            lambda self, index: measure(index),
        )
        path, file = tmp_path / "r.parquet", io.StringIO()
        config = CollectConfig(out=path, num_sets=num_sets, sampling=SAMPLING, **fields)
        collect_compute(config, Console(width=500, file=file))
        return read_records([path])[1], file.getvalue()

    return run


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ({"spread": 0.5}, {"spread": 0.9}, "first"),
        ({"throttled": "power brake"}, {}, "second"),
        ({"throttled": "power brake"}, {"throttled": "power brake"}, "first"),
    ],
)
def test_disturbed_and_throttled_sets_are_measured_again(
    collect_as: Collect, first: dict[str, Any], second: dict[str, Any], kept: str
) -> None:
    """Of both measurements of set 2 the better one is kept."""
    measured: list[int] = []

    def measure(index: int) -> CostRecord:
        measured.append(index)
        again = measured.count(2) > 1
        return timed(index, **((second if again else first) if index == 2 else {}))

    records, printed = collect_as(measure, 9)
    assert measured == [*range(9), 2]
    assert records[2].spread < 0.6
    better = first if kept == "first" else second
    assert records[2].throttled == better.get("throttled", "")
    assert records[2].num_throttled == ("throttled" in first and kept == "second")
    told = "1 kept though the device was throttled" in printed
    assert told == bool(records[2].throttled)


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_set_gets_a_second_chance_at_memory(
    collect_as: Collect, num_failures: int
) -> None:
    failures = iter(range(num_failures))

    def measure(index: int) -> CostRecord:
        if index == 1 and next(failures, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore lines")
        return timed(index)

    records, printed = collect_as(measure, 3)
    assert [r.index for r in records] == [[0, 1, 2], [0, 2]][num_failures - 1]
    told = "set 1 was left out: CUDA out of memory. Tried\n"
    assert (told in printed) == (num_failures == 2)


def test_a_set_that_breaks_the_device_is_noted_and_not_tried_again(
    collect_as: Collect, tmp_path: Path
) -> None:
    def measure(index: int) -> CostRecord:
        if index == 1:
            raise RuntimeError("CUDA error: an illegal memory access\nmore lines")
        return timed(index)

    with pytest.raises(DeviceFailureError, match="set 1"):
        collect_as(measure, 3)
    noted = read_failures(tmp_path / "r.parquet")
    assert noted == {1: "CUDA error: an illegal memory access"}
    records, _ = collect_as(measure, 3)
    assert [r.index for r in records] == [0, 2]

    def faulty(index: int) -> CostRecord:
        raise RuntimeError("shapes differ")  # our fault, not the device's

    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        collect_as(faulty, 4)
    assert read_failures(tmp_path / "r.parquet") == noted


def test_no_sets_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 0"):
        CollectConfig(out=Path("r"), num_sets=0)


def test_options_change_what_the_device_would_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def sampling(options: str) -> SamplingConfig:
        return sampling_from(parser.parse_args(f"--out x --device {options}".split()))

    assert sampling("cpu") == SamplingConfig()
    gpu = SamplingConfig.for_device("cuda", 24 * 2**30)
    module = "torchrec_neuroshard.collect.compute"
    monkeypatch.setattr(f"{module}.as_device", torch.device)
    monkeypatch.setattr(f"{module}.device_bytes", lambda device: 24 * 2**30)
    assert sampling("cuda:1") == gpu
    changed = sampling("cuda --max-gib 2 --max-shards 7")
    wanted = dataclasses.replace(gpu, max_weight_bytes=2 * 2**30, max_shards=7)
    assert changed == wanted
