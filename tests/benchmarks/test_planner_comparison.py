"""The comparison of planners: tasks, descriptions of plans, and the page."""

from __future__ import annotations

import dataclasses
import itertools
import lzma
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.planner import ParameterConstraints

from harness.dlrm_tables import generate_dlrm_tables
from tests.builders import ATTACHES_OPTIMIZERS, result_of
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import ShardingTask
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.measure.sets import is_held_out_table
from torchrec_neuroshard.models.collectives import BandwidthCommsModel
from torchrec_neuroshard.search import SearchResult
from torchrec_neuroshard.search.base import Searcher
from torchrec_neuroshard.testing import AnalyticCostModel

kernels, page, paired, planning, plans, results, rivals, run, tasks = (
    import_module(f"planner_comparison.{name}")
    for name in "kernels page paired planning plans results rivals run tasks".split()
)
pytestmark = ATTACHES_OPTIMIZERS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RANKS = 4
COMMS = BandwidthCommsModel(
    world_size=RANKS,
    local_world_size=RANKS,
    intra_gb_per_s=2.0,
    inter_gb_per_s=1.0,
)
COSTS = rivals.Costs(compute=AnalyticCostModel(), comms=COMMS)


def test_tasks_fit_and_are_of_unseen_tables() -> None:
    drawn = tasks.make_tasks(None, tasks.TaskSettings())
    assert len({t.name for t in drawn}) == len(drawn) >= 75
    assert {t.world_size for t in drawn} == {4, 8, 16}
    seen = {
        (t.pooling_factor, t.profile)
        for t in generate_dlrm_tables(seed=0)
        if not is_held_out_table(t.name, 0.2) and t.num_embeddings <= 1_000_000
    }
    for task in drawn:
        held = [tasks.held_bytes(t) for t in task.tables]
        assert sum(held) < task.memory_bytes * task.world_size
        assert max(held) < task.memory_bytes
        for table in task.tables:
            assert table.profile.num_distinct <= table.num_embeddings * (1 + 1e-9)
            if task.family == "dlrm":
                assert (table.pooling_factor, table.profile) not in seen


class Halves(Searcher):
    """A planner that halves every table it can and deals the parts to the ranks."""

    name = "halves"

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        triples = []
        for i, table in enumerate(task.tables):
            half = table.embedding_dim // 8 * 4
            if half:
                triples.append((i, half, i % task.world_size))
            triples.append((i, table.embedding_dim - half, (i + 1) % task.world_size))
        return result_of(task, triples, simulator)


class Nothing(Halves):
    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        raise InfeasibleError("nothing fits anywhere")


def test_a_search_s_plan_is_read_with_every_column_once_and_its_times_add_up() -> None:
    settings = tasks.TaskSettings(quick=True, max_rows=2_000, batch_size=256)
    [first, *_] = tasks.make_tasks(None, settings)
    small = dataclasses.replace(first, cluster="8 x H100")
    halved, without = (
        planning.ask(rivals.search_rival("x", "", kind), small, COSTS, "cpu", 60.0)
        for kind in (Halves, Nothing)
    )
    assert (without.status, without.plan) == ("no plan", None)  # none stands in for it
    [stage] = halved.plan.stages
    held = [s for k in stage.kernels for s in k.shards]
    columns = sum(t.embedding_dim for t in small.tables)
    assert stage.sharding_type == "column_wise"
    assert sum(s.embedding_dim for s in held) == columns
    assert halved.plan.num_split == sum(t.embedding_dim >= 8 for t in small.tables)
    [sent] = [c for c in stage.collectives if c.kind == "pooled_forward"]
    assert sum(sent.bytes_per_peer) == 4 * small.batch_size // RANKS * columns
    assert sum(stage.column_order.widths) == columns
    state = 4 * sum(s.num_embeddings for s in held)  # row-wise Adagrad
    weights = sum(t.weight_bytes for t in small.tables)
    assert sum(halved.plan.rank_bytes) == weights + state
    again = halved.plan.again()  # is timed apart
    assert not set(again.kernels) & set(halved.plan.kernels)
    assert again.collectives == halved.plan.collectives
    times = plans.predict_kernels(halved.plan.kernels, AnalyticCostModel())
    collectives = {
        c: plans.predict_collective(c, COMMS, RANKS) for c in halved.plan.collectives
    }
    [stage] = plans.stage_times(halved.plan, times, collectives)
    added = results.add_up([stage])
    assert added["critical_path_ms"] == pytest.approx(
        halved.notes["planner_predicts_ms"], rel=1e-3
    )
    assert added["kernel_path_ms"] < added["critical_path_ms"]
    even = dict.fromkeys(halved.plan.kernels, (1.0, 2.0))  # of sets, and of the order
    alike = plans.stage_times(halved.plan, even, collectives)
    assert results.add_up(alike)["kernel_path_ms"] == 2 * (1.0 + 2.0)


def stage(forward: list[float], backward: list[float], **given: Any) -> dict[str, Any]:
    """Return a stage without collectives, unless others are given."""
    collectives = dict.fromkeys(results.COLLECTIVE_TIMES, 0.0)
    orders = dict.fromkeys(("fwd_order_ms", "bwd_order_ms"), 0.0)
    kernels = {"sharding_type": "", "fwd_ms": forward, "bwd_ms": backward}
    return {**kernels, **collectives, **orders, **given}


def test_stages_add_up_without_waits_between_them() -> None:
    stages = [
        stage([3.0, 0.0], [1.0, 5.0], index_ms=1.0, fwd_comms_ms=2.0, bwd_comms_ms=4.0),
        stage([0.0, 3.0], [6.0, 2.0], index_ms=2.0),
        stage([1.0, 1.0], [1.0, 1.0], reduce_ms=3.0),  # replicas
    ]
    found = results.add_up(stages)
    # Ids take 1 + 2. Forward, ranks are done at 4 and stage 1's exchange at 5.
    # Backward, gradients of stage 1 arrive at 4, and ranks are done at 8 and 9. The
    # replicas' kernel ends at 1; their all-reduce follows that exchange, until 7.
    assert found["critical_path_ms"] == 3 + 5 + 9
    assert found["kernel_path_ms"] == 4 + 8
    assert found["collectives_ms"] == 1 + 2 + 4 + 2 + 3


def outcome(ms: float | None) -> dict[str, Any]:
    """Return a planner's entry with this measured critical path; None: no plan."""
    if ms is None:
        return {"seconds": 1.0, "status": "no plan", "reason": "a | b"}
    figures = results.add_up([stage([ms], [0.0])])
    plan = {"measured": figures, "predicted": figures}
    return {"seconds": 1.0, "status": "plan", **plan}


def test_the_page_drops_no_loss(tmp_path: Path) -> None:
    paths: dict[str, list[float | None]] = {  # the machine was noisy on the last task
        "default": [3.0, 4.0, 9.0],
        "torchrec, all types, min_partition=32": [6.0, None, 1.0],
        "torchrec, best practice": [4.0, 8.0, 1.0],
        "embark": [2.0, 4.0, 1.0],
        "random": [None, None, None],
    }
    words = ("name", "source", "hardware", "device", "torch", "fbgemm")
    known = {
        "tasks": [
            {
                **dict.fromkeys(("name", "task"), f"dlrm-{number}"),
                **{"family": "dlrm", "cluster": "8 x H100", "world_size": 8},
                **{"machine_speed": 1.0, "speed_spread": 0.3 * (number == 2)},
                **{"kernels_faster": 1.0, "batch_size": 4096},
                **{"num_tables": 4, "num_cut": 1, "weight_bytes": 1, "uncut_bytes": 5},
                "planners": {name: outcome(ms[number]) for name, ms in paths.items()},
            }
            for number in range(3)
        ],
        "num_tasks": 4,
        "rivals": [{"name": n, "about": "", "training": ""} for n in paths],
        "hardware": {**dict.fromkeys(words, "x"), "device_type": "cpu"},
        "cost_model": dict.fromkeys(words, "x"),
        **dict.fromkeys(("torchrec", "commit", "command", "created", "updated"), "x"),
        **{"environment": {}, "options": {}, "clusters": {"8 x H100": "published"}},
        "notes": ["It must be known."],
        "quiet": "not checked",
    }
    results.write_results(known, tmp_path / "run")
    assert results.read_results(tmp_path / "run") == known
    page.write_page(known, tmp_path / "run")
    text = (tmp_path / "run.md").read_text()
    assert "- It must be known." in text
    assert "changed by more than 25% meanwhile: dlrm-2." in text
    assert "| random | no plan | dlrm-0, dlrm-1, dlrm-2 | a / b |" in text
    [_, against] = text.split("## `default` relative to each rival")
    rows = [line.strip("| ").split(" | ") for line in against.splitlines()]
    row = {cells[0]: cells[1:] for cells in reversed(rows)}
    assert row["embark"][1:] == ["1.50, dlrm-0", "0/1"]
    assert row["random"] == ["-"] * 3
    assert row["the shortest of TorchRec's"][1:] == ["0.75, dlrm-0", "2/0"]
    assert row["the shortest of all rivals'"][1:] == ["1.50, dlrm-0", "0/1"]
    [_, expected] = text.split("## Expected")
    assert "0.612 (0.500 to 0.750) | yes |" in expected
    assert "| 0 of 2; 0.750 on dlrm-0 | yes |" in expected
    assert "the median, measured | 1.000 | yes |" in expected
    assert "min_partition=32`, 8 ranks | 1.00 s; 1.00 s | yes |" in expected


def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: Any) -> None:
    command = ["--out", str(tmp_path / "run"), "--quick", "--max-rows", "1000"]
    command += ["--cost-model", "cpu", "--num-tasks", "1", "--planning-processes", "0"]
    command += ["--noisy", "--scaled-to", "h100", "--minutes", "5"]
    command += ["--planners", "embark", "torchrec, best practice"]
    monkeypatch.setattr(run, "_QUICK_BATCH", 64)
    monkeypatch.setattr(
        kernels.KernelTimer, "medians", lambda _, raw: dict.fromkeys(raw, (2.0, 4.0))
    )
    run.main(command)
    found = results.read_results(tmp_path / "run")
    faster = found["kernels_faster"]
    assert faster > 1
    assert [t["kernels_faster"] for t in found["tasks"]] == [1.0, faster]
    for task in found["tasks"]:
        whole, best = (task["planners"][name] for name in command[-2:])
        measured_ms = (2.0 + 4.0) / task["kernels_faster"]
        kept = pytest.approx(measured_ms, rel=5e-4)  # four digits
        assert whole["measured"]["kernel_path_ms"] == kept
        assert whole["predicted"]["kernel_path_ms"] not in (0.0, measured_ms)
        assert best["status"] == "plan"
    own, scaled = (t["planners"]["embark"]["predicted"] for t in found["tasks"])
    assert scaled["kernel_path_ms"] < 2 * own["kernel_path_ms"] / faster
    with lzma.open(tmp_path / "run.json.xz", "rt") as file:
        assert str(tmp_path) not in file.read()
    assert "| embark | 1/1 |" in (tmp_path / "run.md").read_text()
    assert (tmp_path / "run_dark.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):  # results are not written over
        run.main(command)


def test_times_are_in_units_of_the_references_around_them() -> None:
    """A slower machine or one disturbed reference does not change the times."""
    visits = itertools.count()

    def passes(count: int, ms: float, reference: float) -> list[Any]:
        return [
            kernels.Pass(n, next(visits), ms, 2 * ms, reference) for n in range(count)
        ]

    raw = {
        "usual": passes(20, 3.0, 1.0),
        "beside a disturbed one": passes(1, 3.0, 9.0),
        "as before": passes(20, 3.0, 1.0),
        "on a slower machine": passes(20, 6.0, 2.0),
    }
    for times in kernels.median_times(raw, 10.0).values():
        assert times == pytest.approx((30.0, 60.0))


@pytest.mark.filterwarnings("ignore:.*an autograd kernel:UserWarning")
def test_kernels_besides_lookups_are_timed_and_count(monkeypatch: Any) -> None:
    """Replicas run TorchRec's kernel, ids of row shards are split, outputs joined."""
    settings = tasks.TaskSettings(quick=True, max_rows=2_000, batch_size=256)
    [first, *_] = tasks.make_tasks(None, settings)
    small = dataclasses.replace(first, cluster="8 x H100", tables=first.tables[:4])
    kinds = ["data_parallel", "row_wise", "table_wise", "table_wise"]
    constraints = {
        table.name: ParameterConstraints(sharding_types=[kind])
        for table, kind in zip(small.tables, kinds, strict=True)
    }
    monkeypatch.setattr(rivals, "_constraints", lambda *_: constraints)
    [ours] = rivals.make_rivals(("default",), Path("none"), 1.0, "x")
    plan = planning.ask(ours, small, COSTS, "cpu", 60.0).plan
    replicas, by_rows, last = plan.stages
    [copies] = set(replicas.kernels)
    local, widths = 256 // RANKS, [t.embedding_dim for t in small.tables]
    assert copies == plans.KernelSet(small.tables[:1], local, replicated=True)
    assert not any(k.replicated for k in by_rows.kernels)
    assert by_rows.id_split == plans.IdSplit(small.tables[1:2], RANKS, local)
    assert last.join == plans.Join((*widths[:2], sum(widths[2:])), local)
    assert (replicas.on_all_ranks, by_rows.on_all_ranks) == ([], [by_rows.id_split])
    timer = kernels.KernelTimer(
        torch.device("cpu"), 2**24, 0.0, kernels.KernelSettings(rounds=1, passes=1)
    )
    times = timer.medians(timer.measure([plan]))
    assert set(times) == set(plan.kernels) >= {copies, by_rows.id_split, last.join}
    assert min(forward for forward, _ in times.values()) > 0
    assert times[last.join][1] < times[copies][1], "gradients of outputs are views"
    even = dict.fromkeys(times, (1.0, 2.0))  # three stages, and the split and the join
    added = plans.stage_times(plan, even, dict.fromkeys(plan.collectives, 0.0))
    assert results.add_up(added)["kernel_path_ms"] == 3 * (1.0 + 2.0) + 2 * 1.0


def test_replicas_are_predicted_as_by_the_planner(monkeypatch: Any) -> None:
    settings = tasks.TaskSettings(quick=True, max_rows=2_000, batch_size=256)
    [first, *_] = tasks.make_tasks(None, settings)
    small = dataclasses.replace(first, cluster="8 x H100")
    constraint = ParameterConstraints(sharding_types=["data_parallel"])
    constraints = {t.name: constraint for t in small.tables}
    monkeypatch.setattr(rivals, "_constraints", lambda *_: constraints)
    [ours] = rivals.make_rivals(("default",), Path("none"), 1.0, "x")
    found = planning.ask(ours, small, COSTS, "cpu", 60.0)
    times = plans.predict_kernels(found.plan.kernels, COSTS.compute)
    collectives = {
        c: plans.predict_collective(c, COMMS, RANKS) for c in found.plan.collectives
    }
    added = results.add_up(plans.stage_times(found.plan, times, collectives))
    assert added["critical_path_ms"] == pytest.approx(
        found.notes["planner_predicts_ms"], rel=1e-3
    )


def test_faster_kernels_split_ids_faster() -> None:
    alone = rivals.load_cost_model("cpu", device_type="cpu")
    faster = rivals.FasterKernels.of(alone, 4.0)
    assert faster.ids.pooled_ns == alone.ids.pooled_ns / 4
