from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.builders import ONE_PASS
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.collect.compute import (
    MAX_ATTEMPTS,
    MAX_ROUNDS,
    CollectConfig,
    add_arguments,
    collect_compute,
    failures_path,
    read_failures,
    sampling_from,
    summary,
    unit_factor,
)
from torchrec_neuroshard.collect.fingerprint import device_fingerprint
from torchrec_neuroshard.collect.sampling import SamplingConfig, sample_set
from torchrec_neuroshard.collect.timing import CPU_PASSES, SetTimer
from torchrec_neuroshard.devices import GpuMonitor, GpuState
from torchrec_neuroshard.errors import (
    ConfigError,
    DeviceFailureError,
    RecordMismatchError,
)
from torchrec_neuroshard.record_store import journal_path, read_header, read_records
from torchrec_neuroshard.records import CostRecord, repeatability
from torchrec_neuroshard.tables import TableConfig

OPTIONS = (
    "--max-gib 0.001 --max-lookups 3000 --max-shards 3 --batch-sizes 64 128 --seed 5"
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
        assert record.num_passes >= 5 and record.reference_ms > 0
        for found, wanted in zip(record.tables, sampled.tables, strict=True):
            assert found.profile is not None and wanted.profile is not None
            assert found.profile.access_histogram == pytest.approx(
                wanted.profile.access_histogram, rel=1e-6, abs=1e-30
            )


def test_command_goes_on_where_it_stopped(
    collected: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_records([collected])
    assert collect(collected, 4) == 0
    headers, records = read_records([collected])
    assert headers == before[0]
    assert records[:3] == before[1]
    assert [r.index for r in records] == [0, 1, 2, 3]
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 sets measured again after the restart" in printed
    assert "4 records on" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "6"], "seed: 5 against 6"),
        (["--max-shards", "4"], "sampling: "),
        (["--num-threads", "2"], "num_threads: 1 against 2"),
    ],
)
def test_command_refuses_to_mix_runs(
    collected: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = collected.read_bytes()
    assert collect(collected, 9, *options) == 2
    error = capsys.readouterr().err
    assert "holds records of another run" in error and message in error
    assert collected.read_bytes() == before


def test_records_of_another_machine_are_refused(
    collected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = device_fingerprint(torch.device("cpu"), 1)
    monkeypatch.setattr(
        "torchrec_neuroshard.collect.compute.device_fingerprint",
        lambda *_: dataclasses.replace(here, device="another cpu"),
    )
    config = CollectConfig(out=collected, num_sets=9, seed=5, sampling=SAMPLING)
    with pytest.raises(RecordMismatchError, match=r"device: .* against 'another cpu'"):
        collect_compute(config, Console(quiet=True))


def test_real_tables_are_drawn_from_files(tmp_path: Path) -> None:
    tables = tmp_path / "tables.json"
    workloads = [
        {"name": "mine", "rows": [500] * 30, "pooling": [2.0] * 30},
        {"name": "other", "rows": [600] * 30},
    ]
    tables.write_text(json.dumps({"workloads": workloads}))
    sampling = dataclasses.replace(SAMPLING, real_share=1.0)
    config = CollectConfig(
        out=tmp_path / "r.parquet",
        num_sets=2,
        tables=(tables,),
        workloads=("mine",),
        sampling=sampling,
    )
    threads = torch.get_num_threads()
    collect_compute(config, Console(quiet=True))
    assert torch.get_num_threads() == threads
    (header,), records = read_records([config.out])
    assert header.sampling["workloads"] == ["mine"]
    assert header.sampling["num_base_tables"] == 30
    assert all(t.name.startswith("mine/") for r in records for t in r.tables)
    missing = dataclasses.replace(config, workloads=("mine", "hers"))
    with pytest.raises(ConfigError, match=r"has no workloads \['hers'\]; it has"):
        collect_compute(missing, Console(quiet=True))


def ended_by(number: signal.Signals, path: Path) -> int:
    """Send a signal to a collector that has kept three sets; return its exit code."""
    arguments = ["--out", str(path), "--num-sets", "100000", *OPTIONS]
    process = subprocess.Popen(
        [sys.executable, "-m", "torchrec_neuroshard", "collect", "compute", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            # Sets that were disturbed are measured again: a set may have two lines.
            kept = journal_path(path).exists() and read_header(path)
            if kept and len(read_records([path])[1]) >= 3:
                break
            time.sleep(0.05)
    finally:
        process.send_signal(number)
        process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_collector_folds_its_journal(
    tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "r.parquet"
    assert ended_by(number, path) == 130
    assert not journal_path(path).exists()
    assert len(read_records([path])[1]) >= 3


def test_killed_collector_loses_only_the_sample_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    assert ended_by(signal.SIGKILL, path) == -signal.SIGKILL
    assert not path.exists()
    complete = journal_path(path).read_bytes().count(b"\n") - 1
    headers, before = read_records([path])
    assert [r.index for r in before] == list(range(complete))
    assert collect(path, complete + 2) == 0
    again, after = read_records([path])
    assert again == headers
    assert [r.index for r in after] == list(range(complete + 2))
    assert [r.fwd_ms for r in after[:complete]] == [r.fwd_ms for r in before]
    assert not journal_path(path).exists()


def timed(index: int, ms: float, repeat_of: int | None = None) -> CostRecord:
    return CostRecord(
        index=index,
        repeat_of=repeat_of,
        batch_size=64,
        tables=sample_set(0, 0, SAMPLING, []).tables,
        fwd_ms=ms,
        bwd_ms=ms,
        num_passes=1,
        spread=0.0,
    )


def test_a_slower_reference_after_a_restart_is_made_up_for() -> None:
    earlier = [timed(i, 10.0 + i) for i in range(5)]
    again = [timed(i, (10.0 + i) * 0.8) for i in range(4)] + [timed(4, 1000.0)]
    assert unit_factor(earlier, again) == pytest.approx(1.25)
    assert unit_factor([], []) == 1.0


def test_repeatability_compares_with_the_first_time() -> None:
    records = [timed(0, 2.0), timed(1, 4.0), timed(2, 2.2, 0), timed(3, 3.0, 1)]
    assert repeatability(records) == pytest.approx([0.1, 0.25])
    assert repeatability([timed(5, 1.0, repeat_of=4)]) == []


def spread_out(record: CostRecord, index: int, spread: float) -> CostRecord:
    return dataclasses.replace(record, index=index, spread=spread, reference_ms=1.0)


@pytest.mark.parametrize("second", [0.05, 0.9])
def test_disturbed_sets_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: float
) -> None:
    """Set 2 is disturbed at first; of both times the steadier one is kept."""
    measured: list[int] = []

    def measure(self: Any, index: int, following: object = None) -> CostRecord:
        measured.append(index)
        first = 0.5 if index == 2 else 0.01
        spread = second if measured.count(index) > 1 else first
        return spread_out(timed(index, 1.0), index, spread)

    monkeypatch.setattr(
        "torchrec_neuroshard.collect.compute._SetMeter.measure", measure
    )
    config = CollectConfig(out=tmp_path / "r.parquet", num_sets=9, sampling=SAMPLING)
    collect_compute(config, Console(quiet=True))
    _, records = read_records([config.out])
    assert [r.index for r in records] == list(range(9))
    assert measured == [*range(9), *[2] * (1 if second < 0.1 else MAX_ROUNDS)]
    assert records[2].spread == pytest.approx(min(0.5, second))


def test_split_comes_first_and_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[bool] = []

    def measure(self: Any, index: int, following: object = None) -> CostRecord:
        sampled = sample_set(index, 0, SAMPLING, [])
        order.append(sampled.held_out)
        record = spread_out(timed(index, 1.0, sampled.repeat_of), index, 0.01)
        return dataclasses.replace(record, held_out=sampled.held_out)

    monkeypatch.setattr(
        "torchrec_neuroshard.collect.compute._SetMeter.measure", measure
    )
    config = CollectConfig(
        out=tmp_path / "r.parquet", num_sets=30, sampling=SAMPLING, min_split=8
    )
    collect_compute(config, Console(quiet=True))
    within = [sample_set(i, 0, SAMPLING, []).held_out for i in range(30)]
    assert 0 < sum(within) < 8
    assert sum(order) == 8 and len(order) == 30 + 8 - sum(within)
    assert sum(order[: 8 + sum(within)]) == sum(within)


def test_summary_counts(collected: Path) -> None:
    (header,), records = read_records([collected])
    hot = [dataclasses.replace(r, throttled="power brake") for r in records[:2]]
    text = summary(collected, header, [*hot, *records[2:]])
    assert f": {len(records)} records on {header.fingerprint.device}" in text
    assert text.endswith("; 2 kept though the device was throttled")


def test_missing_gpu_is_named(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    config = CollectConfig(out=tmp_path / "r.parquet", device="cuda")
    with pytest.raises(ConfigError, match="no device 'cuda'"):
        collect_compute(config, Console(quiet=True))


def test_bad_configs_are_refused(tmp_path: Path) -> None:
    good = CollectConfig(out=tmp_path / "r.parquet")
    for name in ("num_sets", "num_threads"):
        with pytest.raises(ConfigError, match="must be at least 1"):
            dataclasses.replace(good, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="time limit must be above 0 s, got 0"):
        dataclasses.replace(good, time_limit_seconds=0)
    with pytest.raises(ConfigError, match="set must be at least 0, got -1"):
        dataclasses.replace(good, set_seconds=-1)


# Limits, and a GPU that gets hot, with stand-ins for its driver


def state(reasons: int) -> GpuState:
    return GpuState(
        sm_clock_mhz=1_980.0,
        memory_clock_mhz=3_201.0,
        temperature_c=60.0 + reasons,
        throttle_reasons=reasons,
    )


HOT, FINE = 0x20, 0x0


@pytest.fixture
def watched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[list[CostRecord], str]]:
    """Collect sets on a device that is, after each measurement, in a given state."""
    monkeypatch.setattr("torchrec_neuroshard.collect.compute.COOL_DOWN_S", 0.0)
    monkeypatch.setattr("torchrec_neuroshard.collect.timing.CPU_PASSES", ONE_PASS)

    def run(
        reasons: Iterator[int] | None, num_sets: int
    ) -> tuple[list[CostRecord], str]:
        monitor = None
        if reasons is not None:
            # Sets that other work disturbs are measured again at the end.
            monitor = GpuMonitor(lambda: state(next(reasons, FINE)))
        monkeypatch.setattr(
            "torchrec_neuroshard.collect.compute.gpu_uuid", lambda _: "GPU-0"
        )
        monkeypatch.setattr(
            "torchrec_neuroshard.collect.compute.find_gpu_monitor", lambda _: monitor
        )
        config = CollectConfig(
            out=tmp_path / "r.parquet", num_sets=num_sets, seed=5, sampling=SAMPLING
        )
        console = Console(width=200, file=io.StringIO())
        collect_compute(config, console)
        return read_records([config.out])[1], console.file.getvalue()  # type: ignore[attr-defined]

    return run


def test_throttled_measurements_are_dropped_counted_and_repeated(
    watched: Callable[..., tuple[list[CostRecord], str]],
) -> None:
    records, printed = watched(iter([FINE, HOT, HOT, FINE, FINE]), 3)
    assert [r.num_throttled for r in records] == [0, 2, 0]
    assert "clocks and temperature are read by pynvml" in printed
    for record in records:
        assert record.sm_clock_mhz == 1_980.0
        assert record.memory_clock_mhz == 3_201.0
        assert record.temperature_c == 60.0
    assert "2 measurements were dropped: the device was throttled" in printed
    assert "2 measurements dropped for throttling" in printed


def test_drops_stay_counted_where_a_disturbed_set_is_measured_again(
    watched: Callable[..., tuple[list[CostRecord], str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "torchrec_neuroshard.collect.compute.steady_records",
        lambda records: [r for r in records if r.index != 1],
    )
    # The new measurement of set 1 is always the steadier one.
    disturbances = itertools.cycle([0.5, 2.0])
    monkeypatch.setattr(
        "torchrec_neuroshard.collect.compute.disturbance",
        lambda record, usual_ms: next(disturbances),
    )
    records, printed = watched(iter([FINE, HOT, FINE, FINE, HOT, HOT, FINE]), 3)
    assert [r.num_throttled for r in records] == [0, 3, 0]
    assert "3 measurements were dropped: the device was throttled" in printed


def test_a_set_that_stays_throttled_is_kept_and_says_so(
    watched: Callable[..., tuple[list[CostRecord], str]],
) -> None:
    hot_on_set_1 = [FINE, *[HOT] * MAX_ATTEMPTS, FINE]
    records, printed = watched(itertools.chain(hot_on_set_1, itertools.repeat(HOT)), 3)
    assert [r.throttled for r in records] == ["", "software thermal slowdown", ""]
    assert records[1].num_throttled >= MAX_ATTEMPTS - 1
    assert "1 kept though the device was throttled" in " ".join(printed.split())


def test_a_throttled_set_is_measured_again_when_the_card_has_cooled(
    watched: Callable[..., tuple[list[CostRecord], str]],
) -> None:
    hot_on_set_1 = [FINE, *[HOT] * MAX_ATTEMPTS, FINE]
    records, _ = watched(iter(hot_on_set_1), 3)
    assert [r.throttled for r in records] == [""] * 3
    assert [r.num_throttled for r in records] == [0, MAX_ATTEMPTS, 0]


def test_a_card_that_is_always_throttled_costs_little_time(
    watched: Callable[..., tuple[list[CostRecord], str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each dropped measurement takes as if 8 s, of the 20 s that a run has for them."""
    ticks = itertools.count(step=8)
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda _: None)
    monkeypatch.setattr("torchrec_neuroshard.collect.compute.time", clock)
    # Nothing is measured again for other work on this machine.
    monkeypatch.setattr("torchrec_neuroshard.collect.compute.steady_records", list)
    records, printed = watched(itertools.repeat(HOT), 6)
    assert [r.num_throttled for r in records] == [3, 0, 0, 0, 0, 0]
    assert {r.throttled for r in records} == {"software thermal slowdown"}
    assert "3 measurements were dropped: the device was throttled" in printed


def test_a_set_too_large_for_the_device_is_left_out_and_told(
    watched: Callable[..., tuple[list[CostRecord], str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure = SetTimer.measure

    def limited(self: SetTimer, tables: Sequence[TableConfig], *rest: Any) -> Any:
        if tables == sample_set(1, 5, SAMPLING, []).tables:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore lines")
        return measure(self, tables, *rest)

    monkeypatch.setattr(SetTimer, "measure", limited)
    records, printed = watched(iter([FINE, FINE]), 3)
    assert [r.index for r in records] == [0, 2]
    assert "set 1 was left out: CUDA out of memory. Tried\n" in printed


def test_a_set_that_finds_memory_the_second_time_is_kept(
    watched: Callable[..., tuple[list[CostRecord], str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure, failed = SetTimer.measure, list[bool]()

    def limited(self: SetTimer, tables: Sequence[TableConfig], *rest: Any) -> Any:
        if tables == sample_set(1, 5, SAMPLING, []).tables and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(self, tables, *rest)

    monkeypatch.setattr(SetTimer, "measure", limited)
    records, printed = watched(iter([FINE] * 3), 3)
    assert failed and [r.index for r in records] == [0, 1, 2]
    assert "left out" not in printed


def test_a_set_that_breaks_the_device_is_noted_and_not_tried_again(
    watched: Callable[..., tuple[list[CostRecord], str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    measure = SetTimer.measure

    def breaking(self: SetTimer, tables: Sequence[TableConfig], *rest: Any) -> Any:
        if tables == sample_set(1, 5, SAMPLING, []).tables:
            raise RuntimeError("CUDA error: an illegal memory access\nmore lines")
        return measure(self, tables, *rest)

    monkeypatch.setattr(SetTimer, "measure", breaking)
    with pytest.raises(DeviceFailureError, match=r"set 1 failed on the device \(CUDA"):
        watched(iter([FINE] * 9), 3)
    path = tmp_path / "r.parquet"
    assert read_failures(path) == {1: "CUDA error: an illegal memory access"}
    records, printed = watched(iter([FINE] * 9), 3)
    assert [r.index for r in records] == [0, 2]
    assert "set 1 ended an earlier run and is left out: CUDA error: an ill" in printed


def test_faults_of_our_own_are_not_taken_for_the_device_s(
    watched: Callable[..., tuple[list[CostRecord], str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def faulty(*_: Any) -> Any:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(SetTimer, "measure", faulty)
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        watched(iter([FINE]), 1)
    assert not failures_path(tmp_path / "r.parquet").exists()


def test_no_set_is_begun_after_the_time_limit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("torchrec_neuroshard.cli._STARTED", now)
    path = tmp_path / "r.parquet"
    assert collect(path, 100_000, "--time-limit", "0.5") == 0
    assert "stopped at the time limit of 0.5 s" in capsys.readouterr().out
    _, records = read_records([path])
    assert [r.index for r in records] == list(range(len(records)))
    assert len(records) < 100


def test_the_time_limit_counts_from_the_start_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What imports and models took before is part of it."""
    begun = time.monotonic() - 100
    monkeypatch.setattr("torchrec_neuroshard.cli._STARTED", begun)
    path = tmp_path / "r.parquet"
    assert collect(path, 2, "--time-limit", "10000") == 0
    assert collect(path, 9, "--time-limit", "50") == 0
    assert len(read_records([path])[1]) == 2


def test_a_set_is_repeated_for_the_seconds_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    assert collect(path, 3, "--set-seconds", "0") == 0
    _, records = read_records([path])
    assert [r.num_passes for r in records] == [CPU_PASSES.min_passes] * 3


def options(*arguments: str) -> SamplingConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return sampling_from(parser.parse_args(["--out", "x", *arguments]))


def test_options_change_what_the_device_would_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert options("--device", "cpu") == SamplingConfig()
    gpu = SamplingConfig.for_device("cuda", 24 * 2**30)
    monkeypatch.setattr("torchrec_neuroshard.collect.compute.as_device", torch.device)
    monkeypatch.setattr(
        "torchrec_neuroshard.collect.compute.device_bytes", lambda device: 24 * 2**30
    )
    assert options("--device", "cuda:1") == gpu
    changed = "--device cuda --max-gib 2 --batch-sizes 64 128 --optimizers adam sgd"
    assert options(
        *changed.split(), "--fp16-share", "0", "--max-shards", "7"
    ) == dataclasses.replace(
        gpu,
        max_weight_bytes=2 * 2**30,
        batch_sizes=(64, 128),
        optimizers=("adam", "sgd"),
        fp16_share=0.0,
        max_shards=7,
    )


def test_a_device_that_nothing_watches_is_measured(
    watched: Callable[..., tuple[list[CostRecord], str]],
) -> None:
    records, printed = watched(None, 1)
    assert [r.sm_clock_mhz for r in records] == [None]
    assert "pynvml does not answer" in printed
