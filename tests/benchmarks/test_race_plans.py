"""The race of TorchRec's plans against ours: on gloo ranks, and how it is judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import race_plans
from harness.planning import ALL_TYPES, BEST_PRACTICE, CALIBRATED, OURS, PLANNERS
from harness.race_page import (
    AGAIN,
    DENSE,
    EMBEDDING,
    ITERATION,
    balanced,
    better,
    page,
    ratio,
)
from harness.race_summary import QUIET_DRIFT, noise_of, summary
from harness.race_tasks import MOST_LOOKUPS, family_of, make_tasks
from tests.builders import torchrun
from torchrec_neuroshard.costs.simulator import PHASES

NUM_RANKS = 2
_GIB = 2**30


@pytest.mark.distributed
@pytest.mark.nightly
def test_all_plans_train_the_same_model(tmp_path: Path) -> None:
    options = "--backend gloo --max-gib 0.01 --rounds 3 --tasks mlperf-2,sequences-2"
    out = torchrun(
        NUM_RANKS,
        race_plans.__file__,
        *options.split(),
        "--out",
        "run",
        folder=tmp_path,
    )
    data = json.loads((tmp_path / "run.json").read_text())
    assert [t["name"] for t in data["tasks"]] == ["mlperf-2", "sequences-2"]
    assert (tmp_path / "run.md").read_text() == page(data)
    for task in data["tasks"]:
        assert summary(task, data) in out
        plans = task["plans"]
        assert list(plans) == [*PLANNERS, AGAIN, DENSE]
        for name, entry in plans.items():
            if "failed" in entry:  # TorchRec's replicated sequences do not train
                assert (task["name"], name) == ("sequences-2", ALL_TYPES)
                continue
            rounds = entry["rounds"]
            assert np.min(rounds["iteration_ms"]) > 0
            assert np.shape(rounds["iteration_ms"]) == (3, 2)
            if name == DENSE:
                continue
            # Same weights and batch: equal but for the order of additions.
            first = plans[BEST_PRACTICE]["rounds"]["losses"][0][0]
            assert rounds["losses"][0][0] == pytest.approx(first, rel=1e-5)
            assert rounds["losses"][0] != rounds["losses"][1]  # it learns
            assert np.shape(rounds["phases_ms"]) == (3, len(PHASES))
            assert np.min(rounds["phases_ms"]) > 0
            assert np.shape(rounds["rank_compute_ms"]) == (3, NUM_RANKS, 2)
            assert entry["predicted"]["embedding_ms"] > 0
        assert plans[AGAIN]["shards"] == plans[BEST_PRACTICE]["shards"]
        assert plans[CALIBRATED]["predicted"]["critical_path_ms"] <= (
            plans[BEST_PRACTICE]["predicted"]["critical_path_ms"] * 1.001
        )


def plan_of(*iteration_ms: float, predicted_ms: float = 1.0) -> dict[str, Any]:
    return {
        "predicted": {EMBEDDING: predicted_ms},
        "rounds": {"iteration_ms": [[ms, ms] for ms in iteration_ms]},
    }


def test_times_are_paired_by_rounds() -> None:
    slow = np.array([1.0, 2.0, 4.0])  # the machine's speed drifts
    plans = {
        OURS: plan_of(*(8.0 * slow)),
        BEST_PRACTICE: plan_of(*(20.0 * slow)),
        ALL_TYPES: plan_of(*(10.0 * slow)),
        AGAIN: plan_of(20.0, 44.0, 80.0),
        DENSE: plan_of(*(2.0 * slow)),
    }
    task = {"plans": plans}
    assert better(task) == ALL_TYPES
    found = ratio(task, OURS, ALL_TYPES, ITERATION)
    assert found.value == pytest.approx(0.8) and found.noise == pytest.approx(0.0)
    assert ratio(task, OURS, ALL_TYPES, EMBEDDING).value == pytest.approx(0.75)
    noise = ratio(task, AGAIN, BEST_PRACTICE, ITERATION)
    # Ratios 1, 1.1, 1: halfway between the third and fourth of six means of pairs.
    assert noise.value == pytest.approx(1.1**0.25)


def test_balance_takes_kernels_of_the_mean_rank() -> None:
    plan = plan_of(100.0, 100.0)
    kernels = [[10.0, 40.0], [20.0, 20.0]]  # forward and backward of each rank
    plan["rounds"]["rank_compute_ms"] = [kernels, kernels]
    task = {"plans": {OURS: plan, DENSE: plan_of(0.0, 0.0)}}
    assert balanced(task, OURS) == pytest.approx(1 - (5.0 + 10.0) / 100.0)


def test_a_page_tells_what_was_not_raced() -> None:
    rounds = {"phases_ms": [[1.0] * 5] * 2, "rank_compute_ms": [[[1.0, 1.0]] * 2] * 2}
    plans = {name: plan_of(10.0, 11.0) for name in (OURS, BEST_PRACTICE, AGAIN, DENSE)}
    for plan in plans.values():
        plan |= {"shards": {}, "sharding_types": {"table_wise/fused": 1}}
        plan["predicted"] |= {"phases_ms": dict.fromkeys(PHASES, 1.0)}
        plan["rounds"] |= {**rounds, "losses": [[0.5, 0.4]] * 2}
    plans[DENSE] = plan_of(1.0, 1.0)
    task = {
        "name": "mlperf-0",
        "num_tables": 1,
        "num_cut": 0,
        "gib": 0.1,
        "batch_size": 8,
        "optimizer": "sgd",
        "drift": 1.0,
        "plans": plans,
    }
    fields = ("hardware", "backend", "command", "date", "commit", "versions", "config")
    about: dict[str, Any] = dict.fromkeys(fields, "-")
    about |= {"hardware": dict.fromkeys(("device", "torch", "fbgemm"), "-")}
    about |= {"versions": {"torchrec": "-"}, "world_size": 2, "minutes": 1.0}
    about |= {"cost_model": {"hardware": "-", "comms_source": "-"}, "most_drift": 1.3}
    settings = {"rounds": 2, "iterations": 2, "phase_iterations": 1, "max_gib": 1.0}
    text = page({**about, "config": settings, "tasks": [task]})
    assert "| this planner | 1 | 1.000" in text
    assert "| this planner, calibrated |" not in text
    drifted = page({**about, "config": settings, "tasks": [{**task, "drift": 2.0}]})
    assert "drifted, twice: mlperf-0" in drifted and "## Summary" not in drifted


def test_noise_is_two_standard_errors() -> None:
    rng = np.random.default_rng(0)
    many = np.exp(rng.normal(0.0, 0.05, 1_000))
    plans = {OURS: plan_of(*many), BEST_PRACTICE: plan_of(*np.ones(1_000))}
    found = ratio({"plans": plans}, OURS, BEST_PRACTICE, ITERATION)
    assert found.noise == pytest.approx(2 * 1.023 * 0.05 / math.sqrt(1_000), rel=0.1)


def told(
    ours_ms: float,
    *,
    spread: float = 0.0,
    drift: float = 1.0,
    predicted_ms: float = 50.0,
    **cost_model: Any,
) -> list[str]:
    """Return the lines about our plan beside one of 60 ms, of them 10 dense layers'."""
    noise = np.exp(np.random.default_rng(0).normal(0.0, spread, (2, 20)))
    plans = {
        OURS: plan_of(*(ours_ms * noise[0]), predicted_ms=45.0),
        BEST_PRACTICE: plan_of(*[60.0] * 20, predicted_ms=predicted_ms),
        AGAIN: plan_of(*(60.0 * noise[1])),
        DENSE: plan_of(*[10.0] * 20),
    }
    for number, plan in enumerate(plans.values()):
        plan["shards"] = {"t0": f"table_wise {number}:8"}
        plan["predicted"]["phases_ms"] = dict.fromkeys(PHASES, 3.0)
        plan["rounds"] |= {"phases_ms": [[10.0] * 5] * 20, "reference_ms": [6.0] * 20}
    named = ("name", "num_tables", "optimizer")
    task = {**dict.fromkeys(named, "-"), "batch_size": 8, "plans": plans}
    costs = {
        "source": "measured (mean error 11%)",
        "hardware": "this CPU",
        "comms_source": "measured (median error 10%)",
        "reference_ms": 5.0,
    }
    data = {
        "world_size": 2,
        "hardware": {"device": "this CPU"},
        "load_average": (0.0, 2.4, 0.0),
        "most_drift": race_plans.MOST_DRIFT,
        "cost_model": costs | cost_model,
    }
    return summary({**task, "drift": drift}, data).splitlines()


def test_the_summary_begins_with_the_tables_and_ends_with_a_sentence() -> None:
    lines = told(55.0)
    assert (
        lines[1]
        == "tables' part of an iteration: 50.0 ms with TorchRec's best practice"
    )
    assert lines[2] == "  our plan: 0.900 of it (0.900 to 0.900), predicted 0.900"
    assert lines[3] == "whole iteration: 60.0 ms with TorchRec's best practice"
    assert lines[-1] == (
        "With our plan, the tables' part took 0.90 of TorchRec's best practice (0.90 "
        "to 0.90), the iteration 0.92: our plan is faster, by more than the noise of "
        "0.0%."
    )
    assert len(lines) == 7  # a quiet machine and a close prediction need no more
    assert "our plan is slower, by more than" in told(66.0)[-1]
    assert "no more than this machine's noise of " in told(60.5, spread=0.05)[-1]


def test_the_noise_is_that_of_equal_plans_if_it_is_larger() -> None:
    plans = {name: plan_of(*[60.0] * 20) for name in (OURS, BEST_PRACTICE)}
    plans |= {AGAIN: plan_of(*[57.0] * 20), DENSE: plan_of(*[10.0] * 20)}
    found = noise_of({"plans": plans}, [OURS], EMBEDDING)
    assert found == pytest.approx(50.0 / 47.0 - 1)


def test_a_noisy_machine_is_told() -> None:
    quiet, noisy = "\n".join(told(55.0)), "\n".join(told(55.0, drift=1.2))
    assert "noise: rounds vary by 20%;" in noisy and 1.2 > QUIET_DRIFT
    for text in ("its load average was 2.4", "each of the 2 ranks needs a core"):
        assert text in noisy and text not in quiet
    assert "Run it again while nothing else runs" in "\n".join(told(55.0, spread=0.3))
    last = told(55.0, drift=race_plans.MOST_DRIFT + 0.05)[-1]
    assert last.endswith("but rounds varied by 35%, so this run decides nothing.")


def test_a_poor_prediction_is_explained() -> None:
    assert "prediction:" not in "\n".join(told(55.0, predicted_ms=40.0))
    here = told(55.0, predicted_ms=25.0)
    assert [here[6], *here[8:10]] == [
        "prediction: 25.0 ms instead of 50.0 for TorchRec's best practice (kernels "
        "6.0, measured 20.0; collectives 9.0, measured 30.0)",
        "  kernels: measured (mean error 11%), this CPU; collectives: measured "
        "(median error 10%)",
        "  A core takes 1.20 times as long as when the kernels were measured.",
    ]
    advice = "Not all of it was measured on this kind of machine"
    assert advice not in "\n".join(here)
    assert "If other work ran then, measure it again" in here[-2]
    for unmeasured in (
        {"source": "physical estimate, not measured", "reference_ms": 0.0},
        {"hardware": "another CPU"},
        {"comms_source": "measured on another CPU as a stand-in"},
    ):
        assert advice in "\n".join(told(55.0, predicted_ms=25.0, **unmeasured))


def test_a_drifting_machine_is_seen() -> None:
    steady = {"plan": plan_of(*[10.0] * 8)}
    assert race_plans.drift_of(steady) == 1.0
    slower = {"plan": plan_of(*[10.0] * 4, *[15.0] * 4)}
    assert race_plans.drift_of(slower) > race_plans.MOST_DRIFT


def test_tasks_fit_into_the_memory() -> None:
    tasks = make_tasks(None, seed=1, most_bytes=_GIB // 4)
    families = {family_of(t.name) for t in tasks}
    assert families == {"mlperf", "dlrm", "production", "sequences"}
    assert len({t.tables[0].optimizer for t in tasks}) == 3
    for task in tasks:
        assert task.held_bytes <= _GIB // 4
        lookups = sum(t.pooling_factor for t in task.tables) * task.batch_size
        assert lookups <= MOST_LOOKUPS or task.batch_size == 512
    again = make_tasks(None, seed=1, most_bytes=_GIB // 4)
    assert again == tasks
    assert make_tasks(None, seed=2, most_bytes=_GIB // 4) != tasks
