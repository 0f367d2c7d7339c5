"""The comparison of planners: its tasks, what it says of plans, and its pages."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import ATTACHES_OPTIMIZERS, result_of
from torchrec_neuroshard.cost_models import BandwidthCommsModel
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.search import SearchResult
from torchrec_neuroshard.search.base import Searcher
from torchrec_neuroshard.testing import AnalyticCostModel

pytestmark = ATTACHES_OPTIMIZERS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RANKS = 4


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
    return parts("tasks").make_tasks(None, settings)[0]


def test_there_are_forty_tasks_and_the_same_ones_again(parts: Any, tasks: Any) -> None:
    again = parts("tasks").make_tasks(None, parts("tasks").TaskSettings())
    assert len(tasks) >= 40
    assert [t.to_json() for t in tasks] == [t.to_json() for t in again]
    assert len({t.name for t in tasks}) == len(tasks)
    assert {t.world_size for t in tasks} == {4, 8, 16}


def test_tasks_fit_and_read_no_more_rows_than_there_are(parts: Any, tasks: Any) -> None:
    for task in tasks:
        held = [parts("tasks").held_bytes(t) for t in task.tables]
        assert sum(held) < task.memory_bytes * task.world_size
        assert max(held) < task.memory_bytes
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
    rival = parts("rivals")._search_rival("halves", "", Halves)
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
    assert sum(by_kind["pooled_forward"].bytes_per_peer) == 4 * local * columns
    assert sum(by_kind["column_order"].widths) == columns
    state = 4 * sum(s.num_embeddings for s in held)  # row-wise Adagrad
    weights = sum(t.weight_bytes for t in small.tables)
    assert sum(halved.plan.rank_bytes) == weights + state


def test_times_add_up_as_in_the_simulator(parts: Any, halved: Any) -> None:
    plans, comms = parts("plans"), comms_model()
    kernels = plans.predict_kernels(halved.plan.kernels, AnalyticCostModel())
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
    rival = parts("rivals")._search_rival("nothing", "", Nothing)
    outcome = parts("planning").ask(rival, small, costs, "cpu", 60.0)
    assert (outcome.status, outcome.plan) == ("no plan", None)
    assert "nothing fits anywhere" in outcome.reason


def test_a_planner_that_takes_too_long_is_stopped(parts: Any, small: Any) -> None:
    class Endless(Halves):
        def search(self, *given: Any) -> SearchResult:
            while True:
                pass

    costs = parts("rivals").Costs(compute=AnalyticCostModel(), comms=comms_model())
    rival = parts("rivals")._search_rival("endless", "", Endless)
    outcome = parts("planning").ask(rival, small, costs, "cpu", 0.2)
    assert (outcome.status, outcome.plan) == ("timed out", None)


@pytest.mark.parametrize("name", ["greedy-size", "torchrec, best practice"])
def test_plans_for_gpus_need_none(parts: Any, small: Any, name: str) -> None:
    costs = parts("rivals").Costs(compute=AnalyticCostModel(), comms=comms_model())
    [rival] = parts("rivals").make_rivals([name], None, 1.0, "unknown")
    outcome = parts("planning").ask(rival, small, costs, "cuda", 60.0)
    assert outcome.status == "plan"
    assert max(outcome.plan.rank_bytes) <= small.memory_bytes


def test_collectives_of_gpus_are_not_measured(
    parts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = parts("run").parse_arguments
    assert parse(["--out", "x", "--device", "cuda"]).collectives == "predicted"
    with pytest.raises(SystemExit):
        parse(["--out", "x", "--device", "cuda", "--collectives", "measured"])
    assert "--collectives predicted" in capsys.readouterr().err


def results(paths: Mapping[str, Sequence[float | None]], family: str = "dlrm") -> Any:
    """Tasks with these measured critical paths; None is no plan."""
    tasks: list[dict[str, Any]] = []
    for number in range(len(next(iter(paths.values())))):
        planners = {}
        for name, values in paths.items():
            value = values[number]
            figures = {"critical_path_ms": value, "worst_rank_ms": value}
            found = {"measured": figures, "predicted": figures, "status": "plan"}
            none = {"status": "no plan", "reason": "a | b"}
            planners[name] = {"seconds": 1.0, **(none if value is None else found)}
        tasks.append(
            {
                "name": f"{family}-{number}",
                "family": family,
                "planners": planners,
                "collectives": "measured",
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


@pytest.mark.parametrize(
    ("ours", "met"), [([9.0, 9.0], True), ([9.9, 9.9], False), ([9.0, None], True)]
)
def test_what_was_expected_is_computed(
    parts: Any, ours: list[float | None], met: bool
) -> None:
    tasks = results({"default": ours, "neuroshard": [10.0, 10.0]})
    for task in tasks:
        task["planners"]["default"]["lower_bound_ms"] = 8.0
    faster, plans, _ = parts("paired").expectations(tasks, "cpu")
    assert faster.found.endswith("bounds at least 0.800")
    assert faster.met is met
    assert plans.met is (None not in ours)


def test_more_is_expected_of_a_gpu(parts: Any) -> None:
    best = "torchrec, best practice"
    tasks = results({"default": [7.0, 10.5], best: [10.0, 10.0]})
    plans, mean, worst = parts("paired").expectations(tasks, "cuda")
    assert (plans.met, mean.met, worst.met) == (True, False, False)
    assert worst.found == "1.050 on dlrm-1"
    tasks = results({"default": [7.0, 9.0], best: [10.0, 10.0]})
    assert all(e.met for e in parts("paired").expectations(tasks, "cuda"))


def test_a_method_must_beat_every_greedy_on_the_papers_tasks(parts: Any) -> None:
    greedies: dict[str, Any] = {g: [10.0, 10.0] for g in parts("paired").GREEDIES}
    [won] = parts("paired").expectations(
        results({"autoshard": [9.0, 9.0], **greedies}), "cpu"
    )
    greedies["greedy-size"] = [8.0, 9.0]
    paths = {"autoshard": [9.0, 9.0], **greedies}
    [lost] = parts("paired").expectations(results(paths), "cpu")
    [elsewhere] = parts("paired").expectations(results(paths, "mlperf"), "cpu")
    assert (won.met, lost.met, elsewhere.met) == (True, False, None)


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
        "cost_model": dict.fromkeys(
            ("name", "source", "hardware", "comms_source"), "x"
        ),
    }


def test_pages_show_every_task_and_drop_no_loss(parts: Any, tmp_path: Path) -> None:
    known = data(parts)
    parts("page").write_pages(known, tmp_path / "run")
    text = (tmp_path / "run.md").read_text()
    whole = (tmp_path / "run.html").read_text()
    assert json.loads((tmp_path / "run.json").read_text()) == known
    for shown in (text, whole):
        assert all(t["name"] in shown for t in known["tasks"])
        assert shown.count("no plan") >= 2 * 2  # by task, and with the reason
        assert "not met" not in shown
    assert "2/4" in text
    short = parts("page").short_table(known)
    assert short.startswith("| planner | plans of 4 | critical path, 2 tasks |")
    assert "| **default** | 4 | 0.750 (0.750 to 0.750) | 0.750 |" in short
    parts("page").write_pages({**known, "notes": ["It must be known."]}, tmp_path / "n")
    for suffix in (".md", ".html"):
        assert "It must be known." in (tmp_path / f"n{suffix}").read_text()
    known["tasks"][0]["collectives"] = "predicted"
    assert "(1 with predicted collectives)" in parts("page").short_table(known)
    assert whole.count("<svg") == 3
    assert "<script" not in whole and "src=" not in whole
    assert "&lt;default&gt;" in whole
    assert (tmp_path / "run_mlperf.svg").exists()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") >= 3 for line in rows)


def test_a_run_goes_on_where_it_was_cut_off(
    parts: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["--out", str(tmp_path / "run"), "--quick", "--max-rows", "1000"]
    command += ["--cost-model", "cpu", "--batch-size", "64", "--num-tasks", "2"]
    command += ["--collectives", "predicted", "--planning-processes", "0"]
    command += ["--planners", "greedy-size", "torchrec, best practice"]
    main = parts("run").main
    monkeypatch.setattr(sys, "argv", ["compare_planners.py", *command])
    main([*command, "--stop-after", "0"])
    first = json.loads((tmp_path / "run.json").read_text())
    main(command)
    both = json.loads((tmp_path / "run.json").read_text())
    assert [len(first["tasks"]), len(both["tasks"])] == [1, 2]
    assert both["tasks"][0] == first["tasks"][0]
    assert both["tasks"][1]["planners"]["greedy-size"]["status"] == "plan"
    assert str(tmp_path) not in (tmp_path / "run.json").read_text()
    assert "the same command goes on" in capsys.readouterr().out
    (tmp_path / "run.md").unlink()
    main([*command, "--pages-only"])
    assert both["tasks"][1]["name"] in (tmp_path / "run.md").read_text()
    with pytest.raises(SystemExit, match=r"of another run: its options is .*'seed': 0"):
        main([*command, "--seed", "1"])


@pytest.mark.distributed
def test_collectives_of_a_plan_are_run_by_ranks(parts: Any) -> None:
    collective = parts("plans").Collective
    kinds = ("pooled_forward", "pooled_backward", "reduce_scatter", "all_gather")
    wanted = [collective(kind, (4_096, 4_096), 64) for kind in (*kinds, "all_reduce")]
    wanted.append(collective("index", (8_192, 4_096), 64, 0.25))
    wanted.append(collective("column_order", (), 64, 0.0, (4, 8, 4)))
    group = parts("collectives").RankGroup(2)
    try:
        taken = group.measure(wanted, rounds=1, passes=2)
    finally:
        group.close()
    assert set(taken) == set(wanted)
    assert all(0 < ms < 10_000 for both in taken.values() for ms in both)
