"""The comparison of planners: its tasks, what it says of plans, and its pages."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import ATTACHES_OPTIMIZERS, make_header, result_of
from torchrec_neuroshard.baselines.dreamshard import DreamShardSearcher
from torchrec_neuroshard.baselines.neuroshard_models import (
    ComputeNet,
    NeuroShardModels,
    load_models,
    save_models,
)
from torchrec_neuroshard.baselines.neuroshard_training import FitReport
from torchrec_neuroshard.baselines.policies import Policy, save_policy
from torchrec_neuroshard.collect.sampling import is_held_out_table
from torchrec_neuroshard.cost_models import BandwidthCommsModel, StockCostModel
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.features import table_features
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search import SearchResult
from torchrec_neuroshard.search.base import Searcher
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCostModel
from torchrec_neuroshard.workloads import generate_dlrm_tables

pytestmark = ATTACHES_OPTIMIZERS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RANKS = 4
NOTHING = Path("nothing trained")


@pytest.fixture(scope="module")
def parts() -> Iterator[Any]:
    """Import the benchmark's modules as its script does."""
    sys.path.insert(0, str(BENCHMARKS))
    yield lambda name: importlib.import_module(f"planner_comparison.{name}")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def tasks(parts: Any) -> Any:
    return parts("tasks").make_tasks(None, parts("tasks").TaskSettings())


@pytest.fixture(scope="module")
def small(parts: Any) -> Any:
    settings = parts("tasks").TaskSettings(quick=True, max_rows=2_000, batch_size=256)
    [first, *_] = parts("tasks").make_tasks(None, settings)
    return dataclasses.replace(first, cluster="8 x H100")


def test_tasks_are_of_unseen_tables_and_the_same_ones_again(
    parts: Any, tasks: Any
) -> None:
    again = parts("tasks").make_tasks(None, parts("tasks").TaskSettings())
    assert len(tasks) >= 75  # and 12 of EMBark's tables, where these are at hand
    assert [t.to_json() for t in tasks] == [t.to_json() for t in again]
    assert len({t.name for t in tasks}) == len(tasks)
    assert {t.world_size for t in tasks} == {2, 4, 8, 16}
    assert {t.batch_size for t in tasks} == {2_048, 4_096, 8_192, 16_384}
    seen = {
        (t.pooling_factor, t.profile)
        for t in generate_dlrm_tables(seed=0)
        if not is_held_out_table(t.name, 0.2) and t.num_embeddings <= 1_000_000
    }
    own = [t for task in tasks if task.family == "dlrm" for t in task.tables]
    assert not seen.intersection((t.pooling_factor, t.profile) for t in own)


def test_published_tables_say_what_collectives_take(parts: Any) -> None:
    clusters, collective = parts("clusters").CLUSTERS, parts("plans").Collective
    h100, a100 = clusters["8 x H100"], clusters["8 x A100"]
    pairs = clusters["2 x 8 H100"]

    def ms(cluster: Any, kind: str, ranks: int, whole: float) -> float:
        sent = (int(whole / ranks),) * ranks
        return float(cluster.collective_ms(collective(kind, sent, 64)))

    # A large message moves at the published rate, a small one starts as the table's.
    assert ms(h100, "pooled_forward", 8, 2**34) == pytest.approx(
        2**34 * 7 / 8 / 370e9 * 1e3, rel=0.01
    )
    assert ms(h100, "index", 8, 1_024) == pytest.approx(11.1e-3, rel=0.02)
    assert ms(a100, "pooled_forward", 8, 2**28) > 1.4 * ms(
        h100, "pooled_forward", 8, 2**28
    )
    # Of four ranks, three quarters leave a rank, not seven eighths.
    assert ms(h100, "pooled_backward", 4, 2**34) == pytest.approx(
        6 / 7 * ms(h100, "pooled_backward", 8, 2**34), rel=0.01
    )
    assert ms(pairs, "pooled_forward", 16, 1_024) == pytest.approx(37.6e-3, rel=0.01)
    # What planners are told of the network is what the table comes to.
    assert ms(pairs, "pooled_forward", 16, 2**34) == pytest.approx(
        2**34 * 8 / 16 / pairs.inter_gb_per_s / 1e6, rel=0.1
    )
    both = ms(h100, "reduce_scatter", 8, 2**20) + ms(h100, "all_gather", 8, 2**20)
    assert ms(h100, "all_reduce", 8, 2**20) == pytest.approx(both)
    uneven = collective("pooled_forward", (2**20, *(0,) * 7), 64)
    even = collective("pooled_forward", (2**20,) * 8, 64)
    assert h100.collective_ms(uneven) == h100.collective_ms(even)


def test_tasks_fit_and_read_no_more_rows_than_there_are(parts: Any, tasks: Any) -> None:
    for task in tasks:
        held = [parts("tasks").held_bytes(t) for t in task.tables]
        assert sum(held) < task.memory_bytes * task.world_size
        assert max(held) < task.memory_bytes
        lookups = task.batch_size * sum(t.pooling_factor for t in task.tables)
        assert lookups <= parts("tasks").MOST_LOOKUPS
        for table in task.tables:
            assert table.profile.num_distinct <= table.num_embeddings * (1 + 1e-9)


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


def comms_model() -> BandwidthCommsModel:
    return BandwidthCommsModel(
        world_size=RANKS,
        local_world_size=RANKS,
        intra_gb_per_s=2.0,
        inter_gb_per_s=1.0,
        latency_us=50.0,
    )


@pytest.fixture(scope="module")
def halved(parts: Any, small: Any) -> Any:
    """A task, its plan as it runs, and what the planner predicted."""
    costs = parts("rivals").Costs(compute=AnalyticCostModel(), comms=comms_model())
    rival = parts("rivals").search_rival("halves", "", Halves)
    return parts("planning").ask(rival, small, costs, "cpu", 60.0)


def test_a_plan_is_read_with_every_column_once(small: Any, halved: Any) -> None:
    [stage] = halved.plan.stages
    held = [s for k in stage.kernels for s in k.shards]
    columns = sum(t.embedding_dim for t in small.tables)
    assert stage.sharding_type == "column_wise"
    assert sum(s.embedding_dim for s in held) == columns
    assert halved.plan.num_split == sum(t.embedding_dim >= 8 for t in small.tables)
    local = small.batch_size // RANKS
    by_kind = {c.kind: c for c in stage.collectives}
    assert stage.column_order is not None
    assert sum(by_kind["pooled_forward"].bytes_per_peer) == 4 * local * columns
    assert sum(stage.column_order.widths) == columns
    state = 4 * sum(s.num_embeddings for s in held)  # row-wise Adagrad
    weights = sum(t.weight_bytes for t in small.tables)
    assert sum(halved.plan.rank_bytes) == weights + state


def test_columns_are_put_in_order_as_by_a_rank_alone(parts: Any) -> None:
    cluster = parts("clusters").CLUSTERS["8 x H100"]
    few, many = (
        parts("rivals").load_costs("cpu_epyc", "cpu", cluster, ranks).comms
        for ranks in (2, 8)
    )
    columns, samples = np.array([64.0]), 512
    found = few.column_order(columns, 2 * samples)
    assert found.min() > 0
    np.testing.assert_allclose(found, many.column_order(columns, 8 * samples))


def test_costs_and_planners_go_by_faster_kernels(
    parts: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals, times = parts("rivals"), 4.0
    cluster = parts("clusters").CLUSTERS["8 x H100"]
    measured, faster = (
        rivals.load_costs("cpu_epyc", "cpu", cluster, 8, f) for f in (1.0, times)
    )
    features = table_features(small.tables, small.batch_size)
    one_set = np.zeros(len(small.tables), dtype=np.int64)
    both = [c.compute.predict_sets(features, one_set, 1) for c in (measured, faster)]
    np.testing.assert_allclose(both[0], times * both[1])
    columns, samples = np.array([64.0]), 4_096
    order = [c.comms.column_order(columns, samples) for c in (measured, faster)]
    np.testing.assert_allclose(order[0], times * order[1])
    sent = np.full((1, 8), 64.0)
    links = [c.comms.all_to_all(sent, samples) for c in (measured, faster)]
    np.testing.assert_array_equal(*links)

    # TorchRec's planner is told of faster memory, by default and where it is fitted.
    fitted = rivals.fitted_gb_per_s
    assert fitted(faster.compute, "cpu") == pytest.approx(
        times * fitted(measured.compute, "cpu")
    )
    told: list[float] = []

    def topology(*given: Any) -> None:
        told.append(given[-1])
        raise InfeasibleError("told")

    monkeypatch.setattr(rivals, "_topology", topology)
    named = ["default", "torchrec", "torchrec, all types, fitted"]
    for costs in (measured, faster):
        for rival in rivals.make_rivals(named, NOTHING, 1.0, "unknown", 10):
            with pytest.raises(InfeasibleError, match="told"):
                rival.make(small, costs, "cpu")
    assert told[3:] == pytest.approx([times * bandwidth for bandwidth in told[:3]])

    left = {r.name for r in rivals.make_rivals(None, NOTHING, 1.0, "unknown", 10)}
    left -= {r.name for r in rivals.make_rivals(None, NOTHING, 1.0, "unknown", 10, 2.0)}
    assert left == {"autoshard", "dreamshard"}


def test_times_add_up_as_in_the_simulator(parts: Any, halved: Any) -> None:
    plans, comms = parts("plans"), comms_model()
    kernels = plans.predict_kernels(
        halved.plan.kernels, AnalyticCostModel(), comms, RANKS
    )
    collectives = {
        c: plans.predict_collective(c, comms, RANKS) for c in halved.plan.collectives
    }
    added = plans.add_up(halved.plan, kernels, collectives)
    assert added["critical_path_ms"] == pytest.approx(
        halved.notes["planner_predicts_ms"], rel=1e-3
    )
    assert added["kernel_path_ms"] < added["critical_path_ms"]


def test_a_search_without_a_plan_is_not_replaced(parts: Any, small: Any) -> None:
    class Nothing(Halves):
        def search(self, *given: Any) -> SearchResult:
            raise InfeasibleError("nothing fits anywhere")

    costs = parts("rivals").Costs(compute=AnalyticCostModel(), comms=comms_model())
    rival = parts("rivals").search_rival("nothing", "", Nothing)
    outcome = parts("planning").ask(rival, small, costs, "cpu", 60.0)
    assert (outcome.status, outcome.plan) == ("no plan", None)
    assert "nothing fits anywhere" in outcome.reason


def test_a_rival_may_have_our_types(
    parts: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals = parts("rivals")
    costs = rivals.Costs(compute=AnalyticCostModel(), comms=comms_model())
    ours = rivals._our_types(small, costs, "cpu")
    assert set(ours) == {t.name for t in small.tables}
    names = sorted(ours)
    by_rows = {names[0]: "row_wise", names[1]: "data_parallel"}
    given = {
        n: [by_rows[n]] if n in by_rows else rivals._COLUMN_AND_TABLE for n in ours
    }
    monkeypatch.setattr(rivals, "_our_types", lambda *_: given)
    [rival] = rivals.make_rivals(["embark, our types"], NOTHING, 1.0, "unknown", 10)
    plan = parts("planning").ask(rival, small, costs, "cpu", 60.0).plan
    held = {
        s.sharding_type: {t.name for k in s.kernels for t in k.shards}
        for s in plan.stages
    }
    assert held.pop("row_wise") == {names[0]}
    assert held.pop("data_parallel") == {names[1]}
    assert set.union(*held.values()) == set(names[2:])


def test_a_planner_that_takes_too_long_is_stopped(parts: Any, small: Any) -> None:
    class Endless(Halves):
        def search(self, *given: Any) -> SearchResult:
            while True:
                pass

    costs = parts("rivals").Costs(compute=AnalyticCostModel(), comms=comms_model())
    rival = parts("rivals").search_rival("endless", "", Endless)
    outcome = parts("planning").ask(rival, small, costs, "cpu", 0.2)
    assert (outcome.status, outcome.plan) == ("timed out", None)


@pytest.mark.parametrize("name", ["greedy-size", "torchrec, best practice"])
def test_plans_for_gpus_need_none(parts: Any, small: Any, name: str) -> None:
    costs = parts("rivals").Costs(compute=AnalyticCostModel(), comms=comms_model())
    [rival] = parts("rivals").make_rivals([name], NOTHING, 1.0, "unknown", 10)
    outcome = parts("planning").ask(rival, small, costs, "cuda", 60.0)
    assert outcome.status == "plan"
    assert max(outcome.plan.rank_bytes) <= small.memory_bytes


def test_the_papers_nets_are_those_of_the_tasks_optimizer(
    parts: Any, small: Any, tmp_path: Path
) -> None:
    """Nets of other hardware are no rivals; of these, one plans each task."""
    rivals = parts("rivals")
    kernels = FitReport(
        num_training=80,
        num_validation=10,
        num_test=10,
        best_epoch=1,
        validation_mse=1.0,
        test_mse=1.0,
        mean_test_mse=2.0,
    )
    for name, device in (("sgd", "here"), ("adam", "here"), ("sgd", "elsewhere")):
        models = NeuroShardModels(
            fingerprint=make_header(device=device).fingerprint,
            compute=ComputeNet(),
            comms={},
            trained_on={
                "settings": {"recipe": {"optimizer": name, "seed": 3, "epochs": 5}},
                "judgements": [{"report": dataclasses.asdict(kernels)}],
            },
        )
        save_models(tmp_path / f"{rivals.LABELLED}{name}_{device}", models)
    names = {r.name: r for r in rivals.make_rivals(None, tmp_path, 1.0, "here", 10)}
    assert parts("paired").PAPER_NETS in names
    assert "neuroshard, measured nets" not in names
    assert "default, 100 sets" not in names
    rival = names[parts("paired").PAPER_NETS]
    told = rival.training()["nets"]
    assert [n["optimizer"] for n in told] == ["adam", "sgd"]
    assert (told[0]["sets"], told[0]["test_rms_ms"]) == (80, 1.0)
    assert told[0]["judged_error"] == []  # nothing was measured on such a device
    nets = [load_models(f) for f in sorted(tmp_path.glob("*_here"))]
    for optimizer in ("adam", "sgd"):
        own = tuple(dataclasses.replace(t, optimizer=optimizer) for t in small.tables)
        chosen = rivals.nets_for(nets, dataclasses.replace(small, tables=own))
        assert chosen.trained_on["settings"]["recipe"]["optimizer"] == optimizer


def test_whose_nets_are_not_there_is_left_out(
    parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Policies ship: AutoShard and DreamShard plan by these, and their rows say so."""
    rivals, paired = parts("rivals"), parts("paired")
    found = {r.name: r for r in rivals.make_rivals(None, NOTHING, 1.0, "unknown", 10)}
    need = {paired.PAPER_NETS, paired.PAPER_MEASURED, "default, 100 sets"}
    assert need.isdisjoint(found)
    for method in paired.POLICIES:
        assert "trained on another device's costs for roww" in found[method].about
    with pytest.raises(ValueError, match="no planner 'default, 100 sets' here"):
        rivals.make_rivals(["default, 100 sets"], NOTHING, 1.0, "unknown", 10)
    run, missing = parts("run"), str(tmp_path / "missing")
    with pytest.raises(SystemExit):
        run.parse_arguments(["--out", "x", "--trained", missing])
    assert f"--trained names no folder: {missing}" in capsys.readouterr().err
    assert run.parse_arguments(["--out", "x"]).trained == run.TRAINED


def test_policies_are_those_of_the_tasks_optimizer(
    parts: Any, small: Any, tmp_path: Path
) -> None:
    """Where a method has none of this hardware, the one that ships plans."""
    rivals, shipped = parts("rivals"), DreamShardSearcher().policy
    for optimizer, hardware in (("sgd", "here"), ("rowwise_adagrad", "elsewhere")):
        settings = {"tasks": {"optimizers": [optimizer]}}
        info = dataclasses.replace(
            shipped.info,
            name=optimizer,
            hardware=hardware,
            trained_on={"settings": settings, "training_seconds": 2.0},
        )
        folder = tmp_path / f"dreamshard_{optimizer}"
        save_policy(folder, Policy(shipped.net, info), "")
    made = rivals.make_rivals(["dreamshard"], tmp_path, 1.0, "here", 10)
    told = made[0].training()
    assert told["names"] == [shipped.info.name, "sgd"]
    assert told["training_seconds"] == 2.0 + shipped.info.trained_on["training_seconds"]
    costs = rivals.Costs(compute=AnalyticCostModel(), comms=comms_model())
    for optimizer, name in (("sgd", "sgd"), ("rowwise_adagrad", shipped.info.name)):
        own = tuple(dataclasses.replace(t, optimizer=optimizer) for t in small.tables)
        task = dataclasses.replace(small, tables=own)
        partitioner = made[0].make(task, costs, "cpu")._partitioner
        assert partitioner.searcher.policy.info.name == name


def test_rows_may_be_split_although_kernels_run_on_cpus(parts: Any, small: Any) -> None:
    """TorchRec's sharder keeps that back on CPUs; here they stand in for GPUs."""
    hot = dataclasses.replace(
        small.tables[0], num_embeddings=20_000, embedding_dim=4, pooling_factor=200.0
    )
    task = dataclasses.replace(
        small, tables=(hot, *small.tables[1:]), memory_bytes=10**9, batch_size=2_048
    )
    costs = parts("rivals").Costs(compute=AnalyticCostModel(), comms=comms_model())
    [rival] = parts("rivals").make_rivals(["torchrec"], NOTHING, 1.0, "unknown", 10)
    outcome = parts("planning").ask(rival, task, costs, "cpu", 60.0)
    split = {s.sharding_type for s in outcome.plan.stages}
    assert split & set(parts("plans").ROW_TYPES)


def test_a_plan_timed_again_shares_no_kernel(halved: Any) -> None:
    again = halved.plan.again()
    assert len(again.kernels) == len(halved.plan.kernels)
    assert not set(again.kernels) & set(halved.plan.kernels)
    assert again.collectives == halved.plan.collectives


def test_the_hottest_shard_is_split_until_ranks_are_even(
    parts: Any, halved: Any, small: Any
) -> None:
    costs = parts("rivals").Costs(compute=AnalyticCostModel(), comms=comms_model())
    names = ["embark", "greedy-cost"]
    found = [
        parts("planning").ask(rival, small, costs, "cpu", 60.0)
        for rival in parts("rivals").make_rivals(names, NOTHING, 1.0, "unknown", 10)
    ]
    split, whole = (f.notes["planner_predicts_ms"] for f in found)
    assert [f.status for f in found] == ["plan", "plan"]
    assert split <= whole
    assert max(found[0].plan.rank_bytes) <= small.memory_bytes


def test_torchrecs_bandwidth_is_fitted_to_measured_costs(parts: Any) -> None:
    fitted = parts("rivals").fitted_gb_per_s
    quick, slow = (fitted(StockCostModel(b), "cuda") for b in (200.0, 20.0))
    assert quick == pytest.approx(200.0)
    assert slow == pytest.approx(20.0)
    assert fitted(StockCostModel(200.0), "cpu") == pytest.approx(400.0)


def results(paths: Mapping[str, Sequence[float | None]], family: str = "dlrm") -> Any:
    """Tasks with these measured critical paths; None is no plan."""
    tasks: list[dict[str, Any]] = []
    for number in range(len(next(iter(paths.values())))):
        planners = {}
        for name, values in paths.items():
            value = values[number]
            figures = {
                **dict.fromkeys(("critical_path_ms", "kernel_path_ms"), value),
                "worst_rank_ms": value,
                "collectives_ms": 0.0,
                "ranks_ms": [[value, 0.0]],
            }
            found = {"measured": figures, "predicted": figures, "status": "plan"}
            none = {"status": "no plan", "reason": "a | b"}
            planners[name] = {"seconds": 1.0, **(none if value is None else found)}
        tasks.append(
            {
                "name": f"{family}-{number}",
                "task": f"{family}-{number}",
                "family": family,
                "planners": planners,
                "cluster": "8 x H100",
                "machine_speed": 1.0,
            }
        )
    return tasks


def test_a_planner_is_even_with_itself(parts: Any) -> None:
    tasks = results({"default": [3.0, 5.0, 8.0]})
    found = parts("paired").compare(tasks, "default", "default")
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)
    assert (found.wins, found.losses, found.num_tasks) == (0, 0, 3)


def test_ratios_are_paired_and_turn_round(parts: Any) -> None:
    tasks = results({"a": [1.0, 2.0, None, 9.0], "b": [2.0, 1.0, 5.0, 10.0]})
    ours = parts("paired").compare(tasks, "a", "b")
    theirs = parts("paired").compare(tasks, "b", "a")
    assert (ours.num_tasks, ours.wins, ours.losses) == (3, 2, 1)
    assert (theirs.wins, theirs.losses) == (1, 2)
    assert ours.mean * theirs.mean == pytest.approx(1.0)
    assert (ours.worst, ours.worst_task) == (2.0, "dlrm-1")
    assert ours.low <= ours.mean <= ours.high


def test_the_interval_covers_the_mean_as_often_as_it_says(parts: Any) -> None:
    rng = np.random.default_rng(0)
    covered = [
        low <= 1.0 <= high
        for low, high in (
            parts("paired").bootstrap(np.exp(rng.normal(0, 0.2, 40)).tolist())
            for _ in range(100)
        )
    ]
    assert 85 <= sum(covered) <= 100


BEST = "torchrec, best practice"


@pytest.mark.parametrize(
    ("ours", "met"),
    [
        ([7.9, 8.0], [True, True, True, True]),
        ([8.0, 10.4], [False, True, False, True]),
        ([10.2, 10.2], [False, False, True, True]),
        ([7.9, None], [True, True, True, False]),
    ],
)
def test_what_was_expected_is_computed(
    parts: Any, ours: list[float | None], met: list[bool]
) -> None:
    again = [None if v is None else v * 1.001 for v in ours]
    again[-1] = None if ours[-1] is None else ours[-1] / 1.001
    tasks = results(
        {
            "default": [*ours, *ours],
            "default, again": [*again, *again],
            BEST: [10.0] * 4,
        }
    )
    for task in tasks:
        task["planners"]["default"]["lower_bound_ms"] = 7.0
    best, behind, stock, plans = parts("paired").expectations(tasks)
    assert best.found.endswith("bounds at least 0.700")
    assert [e.met for e in (best, behind, stock, plans)] == met


def test_what_chance_makes_is_what_a_plan_differs_from_itself_by(parts: Any) -> None:
    rng = np.random.default_rng(0)
    ours = rng.uniform(1, 9, 200)
    again = ours * np.exp(rng.normal(0, 0.03, 200))
    tasks = results({"default": ours.tolist(), "default, again": again.tolist()})
    deviation, count = parts("paired").noise(tasks)
    assert (deviation, count) == (pytest.approx(0.03, rel=0.15), 200)
    assert parts("paired").detectable(tasks) == pytest.approx(
        2.8 * deviation / 200**0.5
    )


def test_a_method_must_beat_every_greedy_on_the_papers_tasks(parts: Any) -> None:
    greedies: dict[str, Any] = {g: [10.0, 10.0] for g in parts("paired").GREEDIES}
    [won] = parts("paired").expectations(results({"autoshard": [9.0, 9.0], **greedies}))
    greedies["greedy-size"] = [8.0, 9.0]
    paths = {"autoshard": [9.0, 9.0], **greedies}
    [lost] = parts("paired").expectations(results(paths))
    [elsewhere] = parts("paired").expectations(results(paths, "mlperf"))
    assert (won.met, lost.met, elsewhere.met) == (True, False, None)
    assert parts("paired").expectations(results({"autoshard": [9.0, 9.0]})) == []


def data(parts: Any) -> Any:
    paths: dict[str, list[float | None]] = {
        "default": [3.0, 4.0],
        "torchrec, best practice": [4.0, None],
    }
    rivals = [{"name": n, "about": f"<{n}>", "training": {}} for n in paths]
    return {
        "tasks": results(paths) + results(paths, "mlperf"),
        "num_tasks": 4,
        "rivals": rivals,
        "families": parts("tasks").FAMILIES,
        "hardware": {
            "device": "a CPU",
            "device_type": "cpu",
            "torch": "2",
            "fbgemm": "1",
        },
        "torchrec": "1",
        "commit": "abc",
        "command": "python compare",
        "created": "now",
        "updated": "now",
        "options": {"seed": 0},
        "cost_model": dict.fromkeys(("name", "source", "hardware"), "x"),
        "clusters": {"8 x H100": "published"},
    }


def test_pages_show_every_task_and_drop_no_loss(parts: Any, tmp_path: Path) -> None:
    known = data(parts)
    parts("results").write_results(known, tmp_path / "run")
    assert parts("results").read_results(tmp_path / "run") == known
    parts("page").write_pages(known, tmp_path / "run")
    text = (tmp_path / "run.md").read_text()
    whole = (tmp_path / "run.html").read_text()
    assert all(t["name"] in whole for t in known["tasks"])
    lost = ("no plan", "dlrm-1, mlperf-1", "a / b")
    assert f"| {' | '.join(lost)} |" in text
    assert "".join(f"<td>{cell}</td>" for cell in lost) in whole
    assert "of each task [ms]" in whole and "of each task [ms]" not in text
    assert "not met" not in text + whole
    assert "2/4" in text
    short = parts("page").headline(known)
    assert short.startswith("| planner, 4 tasks | kernel time (95 % interval)")
    even = "0.750 (0.750 to 0.750)"
    assert f"| **this planner** | {even} | 0.75 | 2 / 0 |" in short
    parts("page").write_pages({**known, "notes": ["It must be known."]}, tmp_path / "n")
    for suffix in (".md", ".html"):
        assert "It must be known." in (tmp_path / f"n{suffix}").read_text()
    assert whole.count("<img") == 3
    assert "<script" not in whole
    assert whole.count("src=") == whole.count("src='data:image/png;")
    assert "&lt;default&gt;" in whole
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") >= 3 for line in rows)


def test_ours_is_set_beside_every_rival_and_the_shortest(parts: Any) -> None:
    paths: dict[str, list[float | None]] = {
        "default": [3.0, 4.0],
        "default, columns only": [6.0, 5.0],
        "torchrec": [6.0, None],
        "torchrec, best practice": [4.0, 8.0],
        "embark": [2.0, 4.0],
        "random": [None, None],
    }
    rivals = [{"name": n, "about": "", "training": {}} for n in paths]
    known = {**data(parts), "rivals": rivals, "tasks": results(paths)}
    pages = [t.markdown() for t in parts("page").tables(known)]

    def row(of: str, rival: str) -> list[str]:
        [table] = [p for p in pages if p.startswith(f"## `{of}` over each rival")]
        [line] = [n for n in table.splitlines() if n.startswith(f"| {rival} |")]
        return [c.strip() for c in line.strip("|").split("|")[1:]]

    def mean(cell: str) -> float:
        return float(cell.split()[0])

    stock = row("default", "the shortest of TorchRec's")
    assert mean(stock[0]) == pytest.approx((3 / 4 * 4 / 8) ** 0.5, abs=1e-3)
    assert stock[1:] == ["0.75", "2/0"]
    whole = row("default", "the shortest of all rivals'")
    assert mean(whole[0]) == pytest.approx((3 / 2 * 4 / 4) ** 0.5, abs=1e-3)
    assert whole[1:] == ["1.50", "0/1"]
    assert row("default", "embark")[1:] == ["1.50", "0/1"]
    assert row("default", "random") == ["-"] * 3
    columns = row("default, columns only", "embark")
    assert mean(columns[0]) == pytest.approx((6 / 2 * 5 / 4) ** 0.5, abs=1e-3)


def test_faster_kernels_leave_collectives_as_they_are(parts: Any) -> None:
    paired = parts("paired")
    tasks = results({"default": [10.0], "embark": [20.0]})
    for name, kernels in (("default", 8.0), ("embark", 19.0)):
        entry = tasks[0]["planners"][name]["measured"]
        entry[paired.KERNELS] = kernels
        entry[paired.COLLECTIVES] = entry[paired.PATH] - kernels
    [as_it_is] = paired.scaled(tasks, "default", "embark", 1).values()
    assert as_it_is == pytest.approx(10 / 20)
    [faster] = paired.scaled(tasks, "default", "embark", 4).values()
    assert faster == pytest.approx((8 / 4 + 2) / (19 / 4 + 1))


def test_a_run_is_judged_by_kernels_as_fast_as_planned_for(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = parts("kernels").KernelTimer
    monkeypatch.setattr(timer, "medians", lambda _, raw: dict.fromkeys(raw, (2.0, 4.0)))
    command = ["--out", str(tmp_path / "run"), "--quick", "--max-rows", "1000"]
    command += ["--cost-model", "cpu", "--batch-size", "64", "--num-tasks", "1"]
    command += ["--planning-processes", "0", "--least-speed", "0"]
    command += ["--most-scatter", "9", "--planners", "greedy-size"]
    parts("run").main([*command, "--kernels-faster", "8"])
    data = parts("results").read_results(tmp_path / "run")
    assert "gloo" not in data["clusters"]  # its collectives are this machine's, too
    task, _ = data["tasks"]  # on two clusters
    found = task["planners"]["greedy-size"]["measured"]
    assert found["ranks_ms"] == [[2 / 8, 4 / 8]] * task["world_size"]
    assert found["kernel_path_ms"] == pytest.approx((2 + 4) / 8)
    page = (tmp_path / "run.md").read_text()
    assert "Kernels count as 8 times faster than they were timed" in page
    assert "own nets: off" not in page  # no table without rows
    with pytest.raises(SystemExit):
        parts("run").main([*command, "--kernels-faster", "0"])


def test_tries_that_were_not_kept_are_told_of(parts: Any) -> None:
    known, page = data(parts), parts("page")
    assert "not kept" not in page.markdown(known, "run")
    limits = {"least_speed": 0.9, "most_scatter": 0.15}
    tries = [
        {"machine_speed": speed, "scatter": scatter, **limits}
        for speed, scatter in ((0.8, 0.1), (0.7, 0.3), (1.0, 0.3))
    ]
    text = page.markdown({**known, "not_kept": tries}, "run")
    assert "2 tries on a machine below the least speed and 1 whose passes" in text


def test_the_readmes_table_is_the_results(
    parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = parts("results").read_results(
        BENCHMARKS / "results" / "planners_zen3_202611"
    )
    readme = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    before = parts("page").headline(results)
    assert before in readme
    parts("results").write_results(data(parts), tmp_path / "run")
    copy = tmp_path / "README.md"
    copy.write_text(readme, encoding="utf-8")
    options = ["--out", str(tmp_path / "run"), "--pages-only", "--readme", str(copy)]
    parts("run").main(options)
    table = capsys.readouterr().out.strip()
    assert table.startswith("| planner, 4 tasks |")
    renewed = copy.read_text(encoding="utf-8")
    assert table in renewed and before not in renewed
    assert renewed.split("## How it works")[1] == readme.split("## How it works")[1]


def test_a_run_goes_on_where_it_was_cut_off(
    parts: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["--out", str(tmp_path / "run"), "--quick", "--max-rows", "1000"]
    command += ["--cost-model", "cpu", "--batch-size", "64", "--num-tasks", "2"]
    command += ["--planning-processes", "0", "--least-speed", "0"]
    command += ["--plan-ahead", "--clusters", "8 x H100", "--plan-seconds", "60"]
    command += ["--planners", "greedy-size", "torchrec, best practice"]
    main = parts("run").main
    monkeypatch.setattr(sys, "argv", ["compare_planners.py", *command])
    main([*command, "--stop-after", "0"])
    assert "the same command goes on" in capsys.readouterr().out
    read = parts("results").read_results
    first = read(tmp_path / "run")
    timer = parts("kernels").KernelTimer
    with monkeypatch.context() as disturbed:
        disturbed.setattr(timer, "scatter", lambda *_: 0.2)
        main(command)
        assert "differ by 0.20 of their mean" in capsys.readouterr().out
    after = read(tmp_path / "run")
    assert after["tasks"] == first["tasks"]
    assert [t["scatter"] for t in after["not_kept"]] == [0.2]
    main(command)
    both = read(tmp_path / "run")
    assert [len(first["tasks"]), len(both["tasks"])] == [1, 2]
    assert both["tasks"][0] == first["tasks"][0]
    assert both["tasks"][1]["planners"]["greedy-size"]["status"] == "plan"
    assert str(tmp_path) not in (tmp_path / "run.json").read_text()
    (tmp_path / "run.html").unlink()
    main([*command, "--pages-only"])
    assert both["tasks"][1]["name"] in (tmp_path / "run.html").read_text()
    with pytest.raises(SystemExit, match=r"of another run: its options is .*'seed': 0"):
        main([*command, "--seed", "1"])


@pytest.fixture
def timed(parts: Any) -> Any:
    """Timer, and what makes raw passes of times and references, one after another."""
    timer = object.__new__(parts("kernels").KernelTimer)
    timer.reference_ms = 10.0
    visits = itertools.count()

    def kernel(*times: float, references: Sequence[float] | None = None) -> list[Any]:
        beside = references or [1.0] * len(times)
        return [
            parts("kernels").Pass(number, next(visits), time, 2 * time, reference)
            for number, (time, reference) in enumerate(zip(times, beside, strict=True))
        ]

    return timer, kernel


def test_scatter_is_that_of_the_median_kernel(timed: Any) -> None:
    timer, kernel = timed
    raw = {
        "steady": kernel(1.0, 1.0, 1.0, 1.0),
        "twice": kernel(1.0, 2.0, 3.0),
        "thrice": kernel(1.0, 4.0, 7.0),
        "seen once": kernel(1.0, 9.0),
    }
    assert timer.scatter(raw) == pytest.approx(1.0 / 2.0)
    assert timer.scatter({"seen once": raw["seen once"]}) == 0.0


def test_times_are_in_units_of_the_references_around_them(timed: Any) -> None:
    """A slower machine changes them, and one disturbed reference does not."""
    timer, kernel = timed
    raw = {
        "usual": kernel(*[3.0] * 20),
        "beside a disturbed one": kernel(3.0, references=[9.0]),
        "as before": kernel(*[3.0] * 20),
        "on a slower machine": kernel(*[6.0] * 20, references=[2.0] * 20),
    }
    for times in timer.medians(raw).values():
        assert times == pytest.approx((30.0, 60.0))


def test_a_table_reads_the_same_in_all_kernels_of_a_round(
    parts: Any, small: Any
) -> None:
    kernels, batch = parts("kernels"), small.batch_size
    one, other, *_ = (t.with_width(8) for t in small.tables)
    inputs = kernels._Inputs(torch.device("cpu"))

    def ids(*shards: TableConfig, index: int = 1) -> list[int]:
        drawn = inputs.draw(parts("plans").KernelSet(shards, batch), index)
        return [int(i) for i in drawn.indices_L]

    assert ids(one) + ids(other) == ids(one, other)
    assert ids(other.with_width(4), one) == ids(other) + ids(one)
    assert ids(one, index=2) != ids(one)
    assert 0 < len(ids(one, index=0)) < len(ids(one)) / 4  # the warm-up's
    before = ids(one)
    inputs.begin(1)
    assert ids(one) != before


def test_some_clusters_judge_a_part_of_the_tasks(parts: Any, tasks: Any) -> None:
    clusters = parts("clusters").CLUSTERS
    comparison = object.__new__(parts("run").Comparison)
    comparison._clusters = set(clusters) - {"gloo"}
    judged = comparison._spread(tasks)
    counts = {c: 0 for c in clusters}
    for task in tasks:
        for cluster in judged[task.name]:
            assert task.world_size in cluster.worlds
            counts[cluster.name] += 1
    of_eight = sum(t.world_size in (4, 8) for t in tasks)
    assert counts["8 x H100"] == of_eight
    assert counts["8 x A100"] == -(-of_eight // clusters["8 x A100"].every)
    assert counts["2 x 8 H100"] == sum(t.world_size == 16 for t in tasks)
    assert counts["gloo"] == 0


def test_tasks_on_a_slow_machine_are_left_out_and_end_a_run(
    parts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, kept, asked = parts("run"), [], []
    monkeypatch.setattr(run, "write_results", lambda data, out: kept.append(out))
    monkeypatch.setattr(run, "write_pages", lambda data, out: None)
    comparison = object.__new__(run.Comparison)
    comparison._options = run.parse_arguments(["--out", str(tmp_path / "x")])
    speeds = iter([1.0, 0.8, 0.8, 0.95, 0.8, 0.7, 0.6, 1.0])
    comparison.tasks = [SimpleNamespace(name=str(i)) for i in range(8)]
    comparison.data = {"tasks": [], "not_kept": []}
    comparison._say = lambda *_: None

    def one(task: Any, following: Sequence[Any]) -> list[dict[str, Any]]:
        asked.append(task.name)
        assert following == []  # nothing is planned ahead unless asked for
        found = {"task": task.name, "machine_speed": next(speeds), "scatter": 0.01}
        return [{**found, "planners": {"default": {}}}]

    comparison._run_task = one
    comparison.run()
    slow = [(t["task"], t["machine_speed"]) for t in comparison.data["not_kept"]]
    assert slow == [("1", 0.8), ("2", 0.8), ("4", 0.8), ("5", 0.7), ("6", 0.6)]
    assert all("planners" not in t for t in comparison.data["not_kept"])
    assert asked == ["0", "1", "2", "3", "4", "5", "6"]
    assert [t["task"] for t in comparison.data["tasks"]] == ["0", "3"]
    # What is not kept is written, too, once there are results to write it with.
    assert len(kept) == 7


def test_what_takes_long_plans_a_part_of_the_tasks(parts: Any, tasks: Any) -> None:
    planning, name = parts("planning"), "default, nothing measured"
    settings = planning.PlanningSettings(names=(name, "random"), cost_model="cpu")
    planners = planning.Planners(settings, 0)
    [rival, other] = settings.rivals()
    asked = [t for t in tasks if rival.plans(t)]
    assert len(tasks) / rival.every / 2 < len(asked) < len(tasks) / rival.every * 2
    assert all(other.plans(t) for t in tasks)
    for task in tasks:
        wanted = [name, "random"] if task in asked else ["random"]
        assert planners._names(task) == wanted


def test_a_task_that_was_begun_is_planned_once(
    parts: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning, asked = parts("planning"), []

    def pool(num_processes: int, **_: Any) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(num_processes)

    def plan(name: str, task: Any) -> Any:
        asked.append((name, task.cluster))
        return planning.Outcome(status=task.cluster, seconds=1.0)

    monkeypatch.setattr(planning, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(planning, "_plan", plan)
    settings = planning.PlanningSettings(
        names=("random", "greedy-dim"), cost_model="cpu"
    )
    planners = planning.Planners(settings, 1)
    clusters = ("8 x H100", "8 x A100")
    for cluster in 2 * clusters:
        planners.begin(dataclasses.replace(small, cluster=cluster))
    for cluster in clusters:
        outcomes = planners.plan(dataclasses.replace(small, cluster=cluster))
        assert {name: o.status for name, o in outcomes.items()} == {
            "random": cluster,
            "greedy-dim": cluster,
        }
    planners.close()
    assert sorted(asked) == sorted(itertools.product(settings.names, clusters))


@pytest.mark.distributed
def test_collectives_of_a_plan_are_run_by_ranks(parts: Any) -> None:
    collective = parts("plans").Collective
    kinds = ("pooled_forward", "pooled_backward", "reduce_scatter", "all_gather")
    wanted = [collective(kind, (4_096, 4_096), 64) for kind in (*kinds, "all_reduce")]
    wanted.append(collective("index", (8_192, 4_096), 64, 0.25))
    group = parts("collectives").RankGroup(2)
    try:
        taken = group.measure(wanted, rounds=1, passes=2)
    finally:
        group.close()
    assert set(taken) == set(wanted)
    assert all(0 < ms < 10_000 for ms in taken.values())
