"""The comparison of planners: its tasks, what it says of plans, and its page."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import ATTACHES_OPTIMIZERS, CPU, result_of
from torchrec_neuroshard.collect import timing
from torchrec_neuroshard.collect.sampling import is_held_out_table
from torchrec_neuroshard.collect.tbe import FusedTables, InputBatch
from torchrec_neuroshard.cost_models import BandwidthCommsModel, StockCostModel
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search import SearchResult
from torchrec_neuroshard.search.base import Searcher
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCostModel
from torchrec_neuroshard.workloads import generate_dlrm_tables

clusters, kernels, page, paired, planning, plans, results, rivals, run, tasks = (
    import_module(f"planner_comparison.{name}")
    for name in (
        *("clusters", "kernels", "page", "paired", "planning"),
        *("plans", "results", "rivals", "run", "tasks"),
    )
)
pytestmark = ATTACHES_OPTIMIZERS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RANKS = 4
NOTHING = Path("nothing trained")
COMMS = BandwidthCommsModel(
    world_size=RANKS,
    local_world_size=RANKS,
    intra_gb_per_s=2.0,
    inter_gb_per_s=1.0,
    latency_us=50.0,
)
COSTS = rivals.Costs(compute=AnalyticCostModel(), comms=COMMS)


@pytest.fixture(scope="module")
def drawn() -> Any:
    return tasks.make_tasks(None, tasks.TaskSettings())


@pytest.fixture(scope="module")
def small() -> Any:
    settings = tasks.TaskSettings(quick=True, max_rows=2_000, batch_size=256)
    [first, *_] = tasks.make_tasks(None, settings)
    return dataclasses.replace(first, cluster="8 x H100")


def named(*names: str) -> Any:
    return rivals.make_rivals(names, NOTHING, 1.0, "unknown")


def ask(rival: Any, task: Any, device: str = "cpu", seconds: float = 60.0) -> Any:
    return planning.ask(rival, task, COSTS, device, seconds)


def test_tasks_fit_and_are_of_unseen_tables(drawn: Any) -> None:
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


def test_a_gpus_batches_are_not_halved_by_a_cpus_limit() -> None:
    on_cpu, on_gpu = (tasks.TaskSettings(device_type=d) for d in ("cpu", "cuda"))
    assert on_cpu.fitting_batch(65_536, 1_000.0) == 8_192
    assert on_gpu.fitting_batch(65_536, 1_000.0) == 65_536


def test_published_tables_say_what_collectives_take() -> None:
    h100, pairs = (clusters.CLUSTERS[n] for n in ("8 x H100", "2 x 8 H100"))

    def ms(cluster: Any, kind: str, ranks: int, whole: float) -> float:
        sent = (int(whole / ranks),) * ranks
        return float(cluster.collective_ms(plans.Collective(kind, sent, 64)))

    # A large message moves at the published rate, a small one starts as the table's.
    large = 2**34 * 7 / 8 / 370e9 * 1e3
    assert ms(h100, "pooled_forward", 8, 2**34) == pytest.approx(large, rel=0.01)
    assert ms(h100, "index", 8, 1_024) == pytest.approx(11.1e-3, rel=0.02)
    # Of four ranks, three quarters leave a rank, not seven eighths.
    four, eight = (ms(h100, "pooled_backward", n, 2**34) for n in (4, 8))
    assert four == pytest.approx(6 / 7 * eight, rel=0.01)
    # What planners are told of the network is what the table comes to.
    between = 2**34 * 8 / 16 / pairs.inter_gb_per_s / 1e6
    assert ms(pairs, "pooled_forward", 16, 2**34) == pytest.approx(between, rel=0.1)
    both = ms(h100, "reduce_scatter", 8, 2**20) + ms(h100, "all_gather", 8, 2**20)
    assert ms(h100, "all_reduce", 8, 2**20) == pytest.approx(both)


class Halves(Searcher):
    """Halves every table that it can; parts go round the ranks."""

    name = "halves"

    def search(
        self, task: ShardingTask, cost_model: Any, comms_model: Any
    ) -> SearchResult:
        triples = []
        for i, table in enumerate(task.tables):
            half = table.embedding_dim // 8 * 4
            if half:
                triples.append((i, half, i % task.world_size))
            triples.append((i, table.embedding_dim - half, (i + 1) % task.world_size))
        return result_of(task, triples, cost_model, comms_model)


@pytest.fixture(scope="module")
def halved(small: Any) -> Any:
    """A task's plan as it runs, and what the planner predicted."""
    return ask(rivals.search_rival("halves", "", Halves), small)


def test_a_plan_is_read_with_every_column_once(small: Any, halved: Any) -> None:
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


def test_times_add_up_as_in_the_simulator(halved: Any) -> None:
    times = plans.predict_kernels(
        halved.plan.kernels, AnalyticCostModel(), COMMS, RANKS
    )
    collectives = {
        c: plans.predict_collective(c, COMMS, RANKS) for c in halved.plan.collectives
    }
    added = plans.add_up(halved.plan, times, collectives)
    assert added["critical_path_ms"] == pytest.approx(
        halved.notes["planner_predicts_ms"], rel=1e-3
    )
    assert added["kernel_path_ms"] < added["critical_path_ms"]
    even = dict.fromkeys(halved.plan.kernels, (1.0, 2.0))  # of sets, and of the order
    assert plans.add_up(halved.plan, even, {})["kernel_path_ms"] == 2 * (1.0 + 2.0)


class Nothing(Halves):
    def search(self, *given: Any) -> SearchResult:
        raise InfeasibleError("nothing fits anywhere")


class Endless(Halves):
    def search(self, *given: Any) -> SearchResult:
        while True:
            pass


@pytest.mark.parametrize(
    ("search", "seconds", "status"),
    [(Nothing, 60.0, "no plan"), (Endless, 0.3, "timed out")],
)
def test_a_search_without_a_plan_is_not_replaced(
    small: Any, search: Any, seconds: float, status: str
) -> None:
    outcome = ask(rivals.search_rival("x", "", search), small, seconds=seconds)
    assert (outcome.status, outcome.plan) == (status, None)


def test_a_rival_may_have_our_types(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *others = sorted(t.name for t in small.tables)
    given = {first: ["row_wise"], second: ["data_parallel"]}
    given |= {name: ["table_wise", "column_wise"] for name in others}
    monkeypatch.setattr(rivals, "_our_types", lambda *_: given)
    [rival] = named("embark, our types")
    held = {
        s.sharding_type: {t.name for k in s.kernels for t in k.shards}
        for s in ask(rival, small).plan.stages
    }
    assert held.pop("row_wise") == {first}
    assert held.pop("data_parallel") == {second}
    assert set.union(*held.values()) == set(others)


def test_nets_are_those_of_the_tasks_optimizer(small: Any) -> None:
    nets = [
        SimpleNamespace(trained_on={"settings": {"recipe": {"optimizer": name}}})
        for name in ("sgd", "adam")
    ]
    for own, optimizer in zip(nets, ("sgd", "adam"), strict=True):
        table = dataclasses.replace(small.tables[0], optimizer=optimizer)
        task = dataclasses.replace(small, tables=(table,))
        assert rivals.nets_for(nets, task) is own


def test_whose_nets_are_not_there_is_left_out(tmp_path: Path) -> None:
    """Policies ship: AutoShard and DreamShard plan by these."""
    found = {r.name for r in rivals.make_rivals(None, NOTHING, 1.0, "unknown")}
    assert {paired.PAPER_NETS, paired.PAPER_MEASURED}.isdisjoint(found)
    assert {"autoshard", "dreamshard"} <= found
    with pytest.raises(ValueError, match="'nobody'"):
        named("nobody")
    for wrong in (["--trained", str(tmp_path / "missing")], ["--unknown"]):
        with pytest.raises(SystemExit):
            run.parse_arguments(["--out", "x", *wrong])


def test_rows_may_be_split_although_kernels_run_on_cpus(small: Any) -> None:
    """TorchRec's sharder keeps that back on CPUs; here they stand in for GPUs."""
    hot = dataclasses.replace(
        small.tables[0], num_embeddings=20_000, embedding_dim=4, pooling_factor=200.0
    )
    task = dataclasses.replace(
        small, tables=(hot, *small.tables[1:]), memory_bytes=10**9, batch_size=2_048
    )
    [rival] = named("torchrec")
    outcome = ask(rival, task)
    split = {s.sharding_type for s in outcome.plan.stages}
    assert split & set(plans.ROW_TYPES)


def test_the_hottest_shard_is_split_until_ranks_are_even(small: Any) -> None:
    split, whole = (ask(r, small) for r in named("embark", "greedy-cost"))
    assert [split.status, whole.status] == ["plan", "plan"]
    assert split.notes["planner_predicts_ms"] <= whole.notes["planner_predicts_ms"]
    assert max(split.plan.rank_bytes) <= small.memory_bytes


def test_torchrecs_bandwidth_is_fitted_to_measured_costs() -> None:
    fitted = rivals.fitted_gb_per_s
    assert fitted(StockCostModel(200.0), "cuda") == pytest.approx(200.0)
    assert fitted(StockCostModel(200.0), "cpu") == pytest.approx(400.0)


def measured(paths: Mapping[str, Sequence[float | None]], family: str = "dlrm") -> Any:
    """Tasks with these measured critical paths; None is no plan."""
    found: list[dict[str, Any]] = []
    for number in range(len(next(iter(paths.values())))):
        planners = {}
        for name, values in paths.items():
            value = values[number]
            figures = {
                **dict.fromkeys(("critical_path_ms", "kernel_path_ms"), value),
                "worst_rank_ms": value,
                "collectives_ms": 0.0,
            }
            plan = {"measured": figures, "predicted": figures, "status": "plan"}
            none = {"status": "no plan", "reason": "a | b"}
            planners[name] = {"seconds": 1.0, **(none if value is None else plan)}
        found.append(
            {
                **dict.fromkeys(("name", "task"), f"{family}-{number}"),
                "family": family,
                "planners": planners,
                "cluster": "8 x H100",
                "machine_speed": 1.0,
            }
        )
    return found


def test_ratios_are_paired_and_turn_round() -> None:
    both = measured({"a": [1.0, 2.0, None, 9.0], "b": [2.0, 1.0, 5.0, 10.0]})
    ours, theirs = (paired.compare(both, *names) for names in ("ab", "ba"))
    assert (ours.num_tasks, ours.wins, ours.losses) == (3, 2, 1)
    assert (theirs.wins, theirs.losses) == (1, 2)
    assert ours.mean * theirs.mean == pytest.approx(1.0)
    assert (ours.worst, ours.worst_task) == (2.0, "dlrm-1")
    assert ours.low <= ours.mean <= ours.high


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = [
        low <= 1.0 <= high
        for low, high in (
            paired.bootstrap(np.exp(rng.normal(0, 0.2, 40)).tolist())
            for _ in range(100)
        )
    ]
    assert 85 <= sum(covered) <= 100


def test_what_chance_makes_is_what_a_plan_differs_from_itself_by() -> None:
    rng = np.random.default_rng(0)
    ours = rng.uniform(1, 9, 200)
    again = ours * np.exp(rng.normal(0, 0.03, 200))
    both = measured({"default": ours.tolist(), "default, again": again.tolist()})
    deviation, count = paired.noise(both)
    assert (deviation, count) == (pytest.approx(0.03, rel=0.15), 200)
    assert paired.detectable(both) == pytest.approx(2.8 * deviation / 200**0.5)


def test_the_page_drops_no_loss(tmp_path: Path) -> None:
    paths: dict[str, list[float | None]] = {
        "default": [3.0, 4.0],
        "torchrec": [6.0, None],
        "torchrec, best practice": [4.0, 8.0],
        "embark": [2.0, 4.0],
        "random": [None, None],
    }
    words = ("name", "source", "hardware", "device", "torch", "fbgemm")
    known = {
        "tasks": measured(paths),
        "num_tasks": 4,
        "rivals": [{"name": n, "about": "", "training": ""} for n in paths],
        "hardware": {**dict.fromkeys(words, "x"), "device_type": "cpu"},
        "cost_model": dict.fromkeys(words, "x"),
        **dict.fromkeys(("torchrec", "commit", "command", "created", "updated"), "x"),
        **{"environment": {}, "options": {}, "clusters": {"8 x H100": "published"}},
        "notes": ["It must be known."],
    }
    results.write_results(known, tmp_path / "run")
    assert results.read_results(tmp_path / "run") == known
    page.write_page(known, tmp_path / "run")
    text = (tmp_path / "run.md").read_text()
    assert "- It must be known." in text
    assert "| random | no plan | dlrm-0, dlrm-1 | a / b |" in text
    [_, against] = text.split("## `default` over each rival")
    rows = [line.strip("| ").split(" | ") for line in against.splitlines()]
    row = {cells[0]: cells[1:] for cells in reversed(rows)}
    assert row["embark"][1:] == ["1.50", "0/1"]
    assert row["random"] == ["-"] * 3
    assert row["the shortest of TorchRec's"][1:] == ["0.75", "2/0"]
    assert row["the shortest of all rivals'"][1:] == ["1.50", "0/1"]


def test_the_readmes_table_is_the_results(tmp_path: Path) -> None:
    readme = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    table = page.headline(
        results.read_results(BENCHMARKS / "results" / "planners_zen3_202611")
    )
    assert table in readme
    copy = tmp_path / "README.md"
    copy.write_text(readme.replace("0.", "9."), encoding="utf-8")
    run.renew(copy, table)
    assert copy.read_text(encoding="utf-8").count(table) == 1


def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: Any) -> None:
    command = ["--out", str(tmp_path / "run"), "--quick", "--max-rows", "1000"]
    command += ["--cost-model", "cpu", "--num-tasks", "1", "--planning-processes", "0"]
    command += ["--planners", "greedy-size", "torchrec, best practice"]
    monkeypatch.setattr(run, "_QUICK_BATCH", 64)
    monkeypatch.setattr(
        kernels.KernelTimer, "medians", lambda _, raw: dict.fromkeys(raw, (2.0, 4.0))
    )
    run.main(command)
    found = results.read_results(tmp_path / "run")
    assert [t["cluster"] for t in found["tasks"]] == ["8 x H100", "8 x A100"]
    for task in found["tasks"]:
        whole, best = (task["planners"][name] for name in command[-2:])
        assert whole["measured"]["kernel_path_ms"] == 2.0 + 4.0
        assert whole["predicted"]["kernel_path_ms"] not in (0.0, 2.0 + 4.0)
        assert best["status"] == "plan"
    assert str(tmp_path) not in (tmp_path / "run.json").read_text()
    assert "| greedy-size | 1/1 |" in (tmp_path / "run.md").read_text()
    with pytest.raises(SystemExit):  # results are not written over
        run.main(command)


def test_times_are_in_units_of_the_references_around_them() -> None:
    """A slower machine changes nothing, nor does one disturbed reference."""
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


def test_a_table_reads_the_same_in_all_kernels_of_a_round(small: Any) -> None:
    one, other, *_ = (t.with_width(8) for t in small.tables)
    inputs = kernels._Inputs(torch.device("cpu"))

    def ids(*shards: TableConfig, index: int = 1) -> list[int]:
        drawn = inputs.draw(plans.KernelSet(shards, small.batch_size), index)
        return [int(i) for i in drawn.indices_L]

    assert ids(one) + ids(other) == ids(one, other)
    assert ids(other.with_width(4), one) == ids(other) + ids(one)
    assert ids(one, index=2) != ids(one)
    assert 0 < len(ids(one, index=0)) < len(ids(one)) / 4  # the warm-up's
    before = ids(one)
    inputs.begin(1)
    assert ids(one) != before


def test_no_timed_pass_reads_the_warm_ups_short_batch(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU warms up three times and has two inputs unless it is told otherwise."""
    monkeypatch.setattr(timing, "CPU_PASSES", timing.CUDA_PASSES)
    kernel = plans.KernelSet((small.tables[0],), 64)
    plan = SimpleNamespace(kernels=[kernel])
    read: list[InputBatch] = []
    settings = kernels.KernelSettings(rounds=1, passes=4)
    timer = kernels.KernelTimer(CPU, 2**20, 1.0, settings)
    forward = FusedTables.forward

    def watched(self: FusedTables, batch: InputBatch) -> torch.Tensor:
        if self.output_dim == kernel.shards[0].embedding_dim:  # not the reference
            read.append(batch)
        return forward(self, batch)

    monkeypatch.setattr(FusedTables, "forward", watched)
    [passes] = timer.measure([plan]).values()
    assert len(passes) == 4
    samples = [len(b.offsets) - 1 for b in read]
    assert samples == [8] * timing.CUDA_PASSES.warm_up + [64] * 4
    assert len({id(b) for b in read[-4:]}) == 4
