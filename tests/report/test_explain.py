from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import pytest

from tests.builders import (
    FixedSearcher,
    Triples,
    analytic,
    make_tables,
    make_task,
    run_search,
)
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.report import PlanReport, explain
from torchrec_neuroshard.report.parts import (
    PlanBasis,
    ShardReport,
    TableReport,
    WeightSync,
    rank_reports,
)

SHARD = ShardReport(rank=0, num_embeddings=333, embedding_dim=64, used_bytes=2**30)
TABLES = [
    TableReport(
        table=f"t{i}",
        sharding_type="row_wise",
        compute_kernel="fused",
        num_embeddings=999,
        embedding_dim=64,
        shards=tuple(dataclasses.replace(SHARD, rank=r) for r in range(3)),
    )
    for i in range(6)
]


def staged_task(num_ranks: int = 3, memory: int = 0) -> ShardingTask:
    tables = make_tables([64] * 6, pooling=[40.0, 9.0, 8.0, 7.0, 3.0, 2.0])
    groups = (0, 0, 0, 1, 1, 1)
    return make_task(
        tables, num_ranks, 512, memory=memory, groups=groups, stages=(0, 1)
    )


def simulator_of(task: ShardingTask) -> Simulator:
    return Simulator(task, **analytic())


def explained(
    triples: Triples, task: ShardingTask, tables: Sequence[TableReport] = ()
) -> PlanReport:
    result = run_search(FixedSearcher(triples), task, **analytic())
    memory_bytes = [2**31] * task.world_size
    ranks = rank_reports(tables, result.predicted.ranks, memory_bytes)
    report = PlanReport.of(result, tables, ranks)
    splits = explain(simulator_of(task), result.placement, result.predicted)
    return dataclasses.replace(report, splits=splits)


def test_a_split_is_told_by_what_the_table_would_cost_in_one_piece() -> None:
    """Brute force: price the unsplit table on each rank in turn."""
    task = staged_task()
    triples = [(0, 24, 0), (0, 20, 1), (0, 20, 2), (3, 32, 0), (3, 32, 2)]
    triples += [(1, 64, 1), (2, 64, 2), (4, 64, 1), (5, 64, 1)]
    report = explained(triples, task, TABLES)
    assert [s.table for s in report.splits] == ["t0", "t3"]
    for split in report.splits:
        table = int(split.table[1:])
        others = [t for t in triples if t[0] != table]
        wholes = [
            Placement.from_widths(3, [*others, (table, 64, rank)]) for rank in range(3)
        ]
        paths = [simulator_of(task).evaluate(w).critical_path_ms for w in wholes]
        assert split.whole_ms == pytest.approx(min(paths), rel=1e-9)
        assert split.whole_rank == int(np.argmin(paths))
        change = split.compute_change_ms + split.comms_change_ms
        assert change == pytest.approx(min(paths) - report.critical_path_ms, abs=1e-9)
    assert report.splits[0].shards == ((24, 0), (20, 1), (20, 2))


@pytest.mark.parametrize(("memory", "room"), [(520_000, ()), (640_000, (0, 1))])
def test_a_table_stays_off_ranks_without_memory(
    memory: int, room: tuple[int, ...]
) -> None:
    """Tables have 256,000 bytes; unsplitting frees half a table on ranks 0 and 1."""
    halves = [(t, 32, r) for t in (0, 5) for r in (0, 1)]
    triples = [*halves, (1, 64, 0), (2, 64, 1), (3, 64, 2), (4, 64, 2)]
    splits = explained(triples, staged_task(memory=memory)).splits
    assert {s.table for s in splits} == {"t0", "t5"}
    for split in splits:
        if room:
            assert split.whole_rank in room
        else:
            assert split.whole_rank is None and split.whole_ms is None
            needed = "unsplit it needs 250.00 KiB, more than any rank has free"
            assert needed in split.line(1.0)


def test_text_and_json_hold_the_figures() -> None:
    halves = [(0, 32, 0), (0, 32, 1)]
    report = explained(
        [*halves, *((t, 64, 2) for t in range(1, 6))], staged_task(), TABLES
    )
    brief, text = str(report), report.text(verbose=True)
    path_ms = report.critical_path_ms
    path = f"critical path {path_ms:.3f} ms, estimated bound {path_ms / 2:.3f} ms"
    assert text.startswith(f"iteration {path_ms:.3f} ms\n{path}, gap 100.0%\n")
    proven = dataclasses.replace(report, bound_is_proven=True)
    assert f" ms, lower bound {path_ms / 2:.3f} ms" in str(proven)
    assert "bound" not in str(dataclasses.replace(report, lower_bound_ms=0.0))
    rows = [line.split()[-9:] for line in text.splitlines()]
    for table in TABLES:
        place = ["row_wise", "fused", "3", "ranks", "0-2"]
        assert ["3.00", table.table, "999", "64", *place] in rows
    assert "- warning: from the search" in brief and "t0: columns 32 on" in brief
    assert brief.endswith("\n\nFor details, print report.text(verbose=True).")
    assert "t5" in text and "t5" not in brief
    data = json.loads(json.dumps(report.to_json()))
    assert data["gap"] == 1.0
    assert data["iteration_ms"] == path_ms
    assert data["ranks"][1]["costs"] == report.ranks[1].costs.to_json()


def test_text_draws_a_bar_per_rank_and_of_many_ranks_the_slowest() -> None:
    triples = [(t, 64, 9 * t + 3) for t in range(6)]
    report = explained(triples, staged_task(num_ranks=64))
    lines = str(report).splitlines()
    start = lines.index("Ranks:") + 1
    bars = lines[start : start + 8]
    by_time = sorted(report.ranks, key=lambda r: -r.total_ms)
    assert [int(bar.split()[1]) for bar in bars] == [r.rank for r in by_time[:8]]
    assert all(f" {by_time[i].total_ms:.3f} ms " in bar for i, bar in enumerate(bars))
    assert max(map(len, bars)) <= 80
    drawn = [bar.split()[2] for bar in bars[:6]]
    longest = len(drawn[0])
    for rank, bar in zip(by_time, drawn, strict=False):
        per_ms = longest / by_time[0].total_ms
        assert abs(len(bar) - per_ms * rank.total_ms) <= 1
        assert abs(bar.count("#") - per_ms * rank.kernels_ms) <= 1
    assert lines[start + 8] == "and 56 more ranks"
    worst = max(r.costs.fwd_compute for r in report.ranks)
    told = report.text(verbose=True).splitlines()
    assert [x.split()[0] for x in told if f" {worst:.3f}*" in x] == ["3"]


def test_samples_per_second_count_all_ranks_and_replicas() -> None:
    report = explained([(t, 64, t % 3) for t in range(6)], staged_task())
    assert report.samples_per_s is None and "per second" not in str(report)
    basis = PlanBasis(
        card=None,
        figures=(),
        batch_size=512,
        batch_size_is_default=False,
        ids_per_sample=(),
        assumed_features=(),
    )
    sync = WeightSync(
        num_replicas=2, interval=10, rank_bytes=1.0, sync_ms=5.0, source="measured"
    )
    known = dataclasses.replace(report, critical_path_ms=1.5, basis=basis)
    assert known.samples_per_s == pytest.approx(3 * 512 / 1.5e-3)
    assert "1.500 ms: 1,020,000 samples per second, 341,000 per rank" in str(known)
    spread = dataclasses.replace(known, spread_ms=0.5)
    assert spread.samples_per_s == pytest.approx(3 * 512 / 2e-3)
    assert str(spread).startswith("iteration 2.000 ms: 768,000 samples per second")
    assert "critical path 1.500 ms, estimated bound" in str(spread)
    assert spread.gap == known.gap  # the bound is without a spread
    assert "mean, which adds 0.500 ms to the critical path" in spread.text(verbose=True)
    assert "which adds" not in known.text(verbose=True)
    known = dataclasses.replace(known, weight_sync=sync)
    assert known.samples_per_s == pytest.approx(6 * 512 / 2e-3)
    assert known.rank_samples_per_s == pytest.approx(512 / 2e-3)


def test_errors_of_kernels_and_collectives_add_up_to_that_of_the_iteration() -> None:
    """Kernels of 6 ms are 0.8 ms off, collectives of 3 ms 0.6: 1.0 of 10 ms."""
    parts = {"fwd_compute": 2.0, "bwd_compute": 4.0, "fwd_comms": 3.0, "dense": 1.0}
    plain = explained([(t, 64, t % 3) for t in range(6)], staged_task())
    report = dataclasses.replace(
        plain,
        critical_path_ms=10.0,
        parts_ms=parts,
        compute_errors=(0.2, 0.1),
        comms_error=0.2,
    )
    assert report.compute_error == pytest.approx(0.8 / 6.0)
    assert report.error == pytest.approx(0.1)
    assert str(report).startswith("iteration 10.000 ms +-10%\n")
    assert report.sources == "compute: analytic, +-13%; collectives: analytic, +-20%"
    unknown = dataclasses.replace(report, comms_error=None)
    assert unknown.error is None and str(unknown).startswith("iteration 10.000 ms\n")
    assert unknown.sources.endswith("collectives: analytic, error unknown")
    alone = dataclasses.replace(unknown, parts_ms={"bwd_compute": 10.0})
    assert alone.error == pytest.approx(0.1), "nothing is exchanged"
