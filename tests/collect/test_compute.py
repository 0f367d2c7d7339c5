from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from torchrec_neuroshard.cli import main
from torchrec_neuroshard.collect.compute import (
    CollectConfig,
    collect_compute,
    device_fingerprint,
    repeatability,
    summary,
    unit_factor,
)
from torchrec_neuroshard.collect.sampling import SamplingConfig, sample_set
from torchrec_neuroshard.collect.store import journal_path, read_records
from torchrec_neuroshard.errors import ConfigError, RecordMismatchError
from torchrec_neuroshard.records import CostRecord

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
        assert len(record.ref_raw_ms) == len(record.fwd_raw_ms) >= 5
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


def test_killed_collector_loses_only_the_sample_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
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
            journal = journal_path(path)
            if journal.exists() and journal.read_bytes().count(b"\n") >= 4:
                break
            time.sleep(0.01)
    finally:
        process.kill()
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()
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
        fwd_raw_ms=(ms,),
        bwd_raw_ms=(ms,),
        fwd_ms=ms,
        bwd_ms=ms,
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


def test_summary_counts(collected: Path) -> None:
    assert f"{collected}: " in summary(collected)
    assert "of held-out tables" in summary(collected)


def test_missing_gpu_is_named(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    config = CollectConfig(out=tmp_path / "r.parquet", device="cuda")
    with pytest.raises(ConfigError, match="'cuda' was asked for but torch sees none"):
        collect_compute(config, Console(quiet=True))


def test_bad_configs_are_refused(tmp_path: Path) -> None:
    good = CollectConfig(out=tmp_path / "r.parquet")
    for name in ("num_sets", "num_threads"):
        with pytest.raises(ConfigError, match="must be at least 1"):
            dataclasses.replace(good, **{name: 0})  # type: ignore[arg-type]
