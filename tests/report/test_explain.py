from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import pytest

from tests.builders import FixedSearcher, Triples, analytic, make_tables, make_task
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.report import PlanReport, explain
from torchrec_neuroshard.report.parts import ShardReport, TableReport

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
    result = FixedSearcher(triples).search(task, **analytic())
    report = PlanReport.of(result, tables, [2**31] * task.world_size)
    splits = explain(simulator_of(task), result.placement, result.predicted)
    return dataclasses.replace(report, splits=splits)


def test_a_split_is_told_by_what_the_table_would_cost_in_one_piece() -> None:
    """Brute force: the same placement, the table whole on each rank in turn."""
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
    """Tables have 256,000 bytes; ranks 0 and 1 would get half of one back."""
    halves = [(t, 32, r) for t in (0, 5) for r in (0, 1)]
    triples = [*halves, (1, 64, 0), (2, 64, 1), (3, 64, 2), (4, 64, 2)]
    splits = explained(triples, staged_task(memory=memory)).splits
    assert {s.table for s in splits} == {"t0", "t5"}
    for split in splits:
        if room:
            assert split.whole_rank in room
        else:
            assert split.whole_rank is None and split.whole_ms is None
            assert "needs 250.00 KiB, more than any rank has free" in split.line(1.0)


def test_text_and_json_hold_the_figures() -> None:
    halves = [(0, 32, 0), (0, 32, 1)]
    report = explained(
        [*halves, *((t, 64, 2) for t in range(1, 6))], staged_task(), TABLES
    )
    text, path_ms = str(report), report.critical_path_ms
    assert (
        f"critical path {path_ms:.3f} ms, estimated bound {path_ms / 2:.3f} ms" in text
    )
    proven = dataclasses.replace(report, bound_is_proven=True)
    assert f"ms, lower bound {path_ms / 2:.3f} ms" in str(proven)
    unknown = dataclasses.replace(report, lower_bound_ms=0.0)
    assert "ms, bound not computed\n" in str(unknown)
    rows = [line.split()[-9:] for line in text.splitlines()]
    for table in TABLES:
        place = ["row_wise", "fused", "3", "ranks", "0-2"]
        assert ["3.00", table.table, "999", "64", *place] in rows
    assert "- warning: from the search" in text and "t0: 32 on rank" in text
    data = json.loads(json.dumps(report.to_json()))
    assert data["gap"] == 1.0
    assert data["ranks"][1]["costs"] == report.ranks[1].costs.to_json()


def test_of_many_ranks_the_slowest_are_shown_first() -> None:
    triples = [(t, 64, 9 * t + 3) for t in range(6)]
    report = explained(triples, staged_task(num_ranks=64))
    lines = str(report).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("rank "))
    shown = [line.split() for line in lines[start + 1 : start + 51]]
    assert [row[0] for row in shown[:6]] == ["3", "12", "21", "30", "39", "48"]
    assert lines[start + 51] == "... and 14 more"
    worst = max(r.costs.fwd_compute for r in report.ranks)
    assert [row[0] for row in shown if f"{worst:.3f}*" in row] == ["3"]
