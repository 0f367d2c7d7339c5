"""The race of TorchRec's plans against ours: on gloo ranks, and how it is judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import race_plans
from harness.planning import ALL_TYPES, BEST_PRACTICE, CALIBRATED, OURS
from harness.race_page import (
    AGAIN,
    DENSE,
    EMBEDDING,
    ITERATION,
    better,
    page,
    ratio,
    summary,
)
from harness.race_tasks import MOST_LOOKUPS, make_tasks
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
        assert summary(task) in out
        plans = task["plans"]
        assert list(plans) == [*race_plans.PLANNERS, AGAIN, DENSE]
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
    assert noise.value == pytest.approx(1.0) and noise.noise == 0.0


def test_noise_is_two_standard_errors() -> None:
    rng = np.random.default_rng(0)
    many = np.exp(rng.normal(0.0, 0.05, 10_000))
    plans = {OURS: plan_of(*many), BEST_PRACTICE: plan_of(*np.ones(10_000))}
    found = ratio({"plans": plans}, OURS, BEST_PRACTICE, ITERATION)
    assert found.noise == pytest.approx(2 * 1.253 * 0.05 / math.sqrt(10_000), rel=0.05)


def test_a_drifting_machine_is_seen() -> None:
    steady = {"plan": plan_of(*[10.0] * 8)}
    assert race_plans.drift_of(steady) == 1.0
    slower = {"plan": plan_of(*[10.0] * 4, *[15.0] * 4)}
    assert race_plans.drift_of(slower) > race_plans.MOST_DRIFT


def test_tasks_fit_into_the_memory() -> None:
    tasks = make_tasks(None, seed=1, most_bytes=_GIB // 4)
    families = {t.family for t in tasks}
    assert families == {"mlperf", "dlrm", "production", "sequences"}
    assert len({t.tables[0].optimizer for t in tasks}) == 3
    for task in tasks:
        assert task.held_bytes <= _GIB // 4
        lookups = sum(t.pooling_factor for t in task.tables) * task.batch_size
        assert lookups <= MOST_LOOKUPS or task.batch_size == 512
    again = make_tasks(None, seed=1, most_bytes=_GIB // 4)
    assert again == tasks
    assert make_tasks(None, seed=2, most_bytes=_GIB // 4) != tasks
