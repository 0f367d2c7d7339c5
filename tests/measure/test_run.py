from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.builders import ONE_PASS, make_header, make_record, write_records
from torchrec_neuroshard.bundles.find import physical_estimate
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.errors import DeviceFailureError
from torchrec_neuroshard.measure import clock, run
from torchrec_neuroshard.measure.clock import CPU_PASSES, Reference
from torchrec_neuroshard.measure.kernels import device_fingerprint
from torchrec_neuroshard.measure.records import CostRecord
from torchrec_neuroshard.measure.run import collect_compute
from torchrec_neuroshard.measure.sets import SamplingConfig, SetSampler
from torchrec_neuroshard.measure.settings import CollectConfig
from torchrec_neuroshard.measure.store import read_records
from torchrec_neuroshard.models.card_physics import PhysicalConstants
from torchrec_neuroshard.models.compute import PhysicalCostModel
from torchrec_neuroshard.tables.loaders import load_json

SAMPLING = SamplingConfig(
    max_shards=3,
    max_lookups=3_000,
    max_weight_bytes=int(0.001 * 2**30),
    batch_sizes=(64, 128),
)
ESTIMATE = physical_estimate("cpu")


def test_command_measures_sampled_sets_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, nominal_ms = tmp_path / "r.jsonl", Reference.nominal_ms
    monkeypatch.setattr(Reference, "nominal_ms", lambda self: nominal_ms(self, 9))
    clocks = {"sm_clock_mhz": 1_980.0, "memory_clock_mhz": 3_201.0}
    state = {**clocks, "temperature_c": 60.0, "throttled": ""}
    monitor = SimpleNamespace(state=lambda: state, num_failures=0)
    monkeypatch.setattr(clock, "find_gpu_monitor", lambda _: monitor)
    tables = tmp_path / "tables.json"
    workload = {"name": "mine", "rows": [*range(500, 530)], "pooling": [2.0] * 30}
    tables.write_text(json.dumps({"workloads": [workload]}))

    def collect(num_sets: int, *options: str) -> int:
        command = ["collect", "compute", "--out", str(path), "--tables", str(tables)]
        sizes = "--max-gib 0.001 --max-lookups 3000 --max-shards 3 --batch-sizes 64 128"
        others = f"--num-sets {num_sets} --seed 5 --set-seconds 0"
        return main([*command, *sizes.split(), *others.split(), *options])

    threads = torch.get_num_threads()
    assert collect(3) == 0
    assert torch.get_num_threads() == threads
    (header,), records = read_records([path])
    assert [r.index for r in records] == [0, 1, 2]
    assert header.seed == 5 and header.reference_ms > 0
    # A pass has four tensors: only the smallest size fits into 0.001 GiB.
    assert list(header.column_order_ms) == [str(2**14)]
    assert min(header.column_order_ms[str(2**14)]) > 0
    assert header.fingerprint == device_fingerprint(torch.device("cpu"), 1)
    assert header.sampling["max_lookups"] == 3_000
    assert header.sampling["workloads"] == ["mine"]
    assert header.sampling["num_base_tables"] == 30
    names = {t.name.split("/")[0] for r in records for t in r.tables}
    assert "mine" in names
    sampler = SetSampler(SAMPLING, 5, load_json(tables)["mine"], ESTIMATE)
    for record in records:
        found = record.sm_clock_mhz, record.memory_clock_mhz, record.temperature_c
        assert found == (1_980.0, 3_201.0, 60.0)
        sampled = sampler.sample(record.index)
        assert [t.name for t in record.tables] == [t.name for t in sampled.tables]
        assert record.batch_size == sampled.batch_size
        assert record.fwd_ms > 0 and record.bwd_ms > 0
        assert record.num_passes == CPU_PASSES.min_passes and record.reference_ms > 0
        for table, wanted in zip(record.tables, sampled.tables, strict=True):
            assert table.profile is not None and wanted.profile is not None
            assert table.profile.access_histogram == pytest.approx(
                wanted.profile.access_histogram, rel=1e-6, abs=1e-30
            )

    written = path.read_bytes()
    for options, message in (
        (["--seed", "6"], "seed: 5 against 6"),
        (["--max-shards", "4"], "sampling: "),
        (["--plan-share", "0.5"], "plan_share"),
        (["--plan-share", "33"], "plan_share needs 0 to 1, got 33.0"),
    ):
        assert collect(9, *options) == 2
        assert message in capsys.readouterr().err
        assert path.read_bytes() == written
    # Another version's estimate would draw other sets under the same indices.
    other = PhysicalCostModel(PhysicalConstants(), name="other", hardware="any")
    with monkeypatch.context() as upgrade:
        upgrade.setattr(
            "torchrec_neuroshard.commands.measure_run.physical_estimate",
            lambda _: other,
        )
        assert collect(9) == 2
    assert "first_sets" in capsys.readouterr().err
    assert path.read_bytes() == written
    assert collect(4) == 0
    (again,), more = read_records([path])
    assert again == header and more[:3] == records
    assert [r.index for r in more] == [0, 1, 2, 3]
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 sets measured again after the restart" in printed
    # The time limit includes imports and models: it starts with the command.
    begun = time.monotonic() - 100
    monkeypatch.setattr("torchrec_neuroshard.cli._STARTED", begun)
    assert collect(9, "--time-limit", "50") == 0
    assert read_records([path])[1] == more
    assert "stopped at the time limit of 50 s" in capsys.readouterr().out


def test_whole_plans_are_measured_and_are_no_anchors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "CPU_PASSES", ONE_PASS)
    path, said = tmp_path / "r.jsonl", list[str]()

    def collect(num_sets: int, **changes: Any) -> list[CostRecord]:
        settings = {"out": path, "sampling": SAMPLING, "num_plans": 2, **changes}
        config = CollectConfig(num_sets=num_sets, **settings)
        collect_compute(config, ESTIMATE, said.append)
        return read_records([path])[1]

    sampler = SetSampler(SAMPLING, 0, [], ESTIMATE)
    wanted = [s.index for n in range(2) for s in sampler.plan_sets(n)]
    assert not [r for r in collect(2, time_budget_seconds=1e-3) if r.plan is not None]
    records = collect(2)
    assert [r.index for r in records] == [0, 1, *wanted]
    assert [r.plan for r in records[2:]] == sorted(r.plan or 0 for r in records[2:])
    more = collect(3)
    assert [r.index for r in more] == [0, 1, 2, *wanted]
    assert more[3:] == records[2:]
    assert sum("2 sets measured again after the restart" in text for text in said) == 1


def timed(index: int, ms: float = 1.0, **changes: Any) -> CostRecord:
    tables = SetSampler(SAMPLING, 0, [], ESTIMATE).sample(0).tables
    known = {"index": index, "spread": 0.01, "reference_ms": 1.0}
    return make_record(tables, ms, ms, **{**known, **changes})


def test_a_slower_reference_after_a_restart_is_corrected() -> None:
    earlier = [timed(i, 10.0 + i) for i in range(5)]
    again = [timed(i, (10.0 + i) * 0.8) for i in range(4)] + [timed(4, 1000.0)]
    assert run.unit_factor(earlier, again) == pytest.approx(1.25)


Measure = Callable[[int], CostRecord]
Collect = Callable[[Measure, int], tuple[list[CostRecord], str]]


@pytest.fixture
def collect_as(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Collect:
    """Collect sets with given measurements."""
    monkeypatch.setattr(Reference, "nominal_ms", lambda self: 1.0)

    def collect(measure: Measure, num_sets: int) -> Any:
        monkeypatch.setattr(
            "torchrec_neuroshard.measure.run.measure_set",
            lambda sampled, *_: measure(sampled.index),
        )
        path, told = tmp_path / "r.jsonl", list[str]()
        config = CollectConfig(out=path, num_sets=num_sets, sampling=SAMPLING)
        run.collect_compute(config, ESTIMATE, told.append)
        return read_records([path])[1], "\n".join(told)

    return collect


def test_disturbed_and_throttled_sets_are_measured_again(collect_as: Collect) -> None:
    """The better of a set's measurements is kept."""
    held = {"throttled": "power brake"}
    both: dict[int, list[dict[str, Any]]] = {
        2: [{"spread": 0.5}, {"spread": 0.9}, {"spread": 0.6}, {"spread": 0.7}],
        3: [held, {}],
        4: [held] * 4,
        5: [{"spread": 0.9}, {"spread": 0.02}],
    }
    measured: list[int] = []

    def measure(index: int) -> CostRecord:
        measured.append(index)
        known = both.get(index, [{}])
        return timed(index, **known[measured.count(index) - 1])

    records, printed = collect_as(measure, 15)
    assert [measured.count(i) for i in range(15)] == [
        len(both.get(i, [{}])) for i in range(15)
    ]
    assert measured[:4] == [0, 1, 2, 2]  # disturbed and new sets alternate
    spreads = [r.spread for r in records[2:6]]
    assert spreads == pytest.approx([0.5, 0.01, 0.01, 0.02])
    assert [r.throttled for r in records[2:6]] == ["", "", "power brake", ""]
    assert [r.num_throttled for r in records[2:6]] == [0, 1, 0, 0]
    assert "1 were kept although the device was throttled" in printed


def test_a_set_is_retried_when_memory_runs_out(collect_as: Collect) -> None:
    tried: list[int] = []

    def measure(index: int) -> CostRecord:
        tried.append(index)
        if index == 2 or tried.count(1) == 1 == index:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore lines")
        return timed(index)

    records, printed = collect_as(measure, 3)
    assert [r.index for r in records] == [0, 1] and tried == [0, 1, 1, 2, 2]
    assert "set 2 was left out: CUDA out of memory. Tried\n" in printed
    assert "set 1 was" not in printed


def test_a_measured_set_is_kept_when_its_repeat_runs_out_of_memory(
    collect_as: Collect,
) -> None:
    tried: list[int] = []

    def measure(index: int) -> CostRecord:
        tried.append(index)
        if tried.count(1) > 1 and index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return timed(index, spread=0.9 if index == 1 else 0.01)

    records, printed = collect_as(measure, 10)
    assert [r.index for r in records] == list(range(10)) and tried.count(1) == 3
    assert "left out" not in printed


def test_a_set_that_breaks_the_device_is_noted_and_not_tried_again(
    collect_as: Collect, tmp_path: Path
) -> None:
    def measure(index: int) -> CostRecord:
        if index < 2:
            raise RuntimeError("CUDA error: an illegal memory access\nmore lines")
        if index == 3:
            raise RuntimeError("shapes differ")  # our bug, not the device's
        return timed(index)

    for index in range(2):
        with pytest.raises(DeviceFailureError, match=f"set {index}"):
            collect_as(measure, 3)
    records, printed = collect_as(measure, 3)
    assert [r.index for r in records] == [2]
    left_out = "set 1 ended an earlier run and is left out: CUDA error: an illegal"
    assert left_out in printed
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        collect_as(measure, 4)
    (header,), _ = read_records([tmp_path / "r.jsonl"])
    assert list(header.failed) == ["0", "1"]


def test_the_unit_of_another_machine_is_not_taken_over(
    collect_as: Collect, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    write_records(path, make_header("another machine", reference_ms=1e6), [])
    collect_as(timed, 1)
    (header,), _ = read_records([path])
    assert header.reference_ms == 1.0
