"""Tasks to train policies on, comparisons, and runs that go on where they stopped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.baselines.common import Tasks
from tests.builders import make_tables, make_task
from torchrec_neuroshard.baselines.dreamshard import DreamShardNet
from torchrec_neuroshard.baselines.heuristics import GreedySearcher, RandomSearcher
from torchrec_neuroshard.baselines.policy_training import (
    PolicyConfig,
    PolicyTaskConfig,
    PolicyTrainer,
    SimulatedPlans,
    balance,
    compare,
    finish_training,
    run_training,
    sample_policy_tasks,
    split_tables,
    yardsticks,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

COMMS = AnalyticCommsModel()


def test_halves_share_no_table(policy_tables: tuple[TableConfig, ...]) -> None:
    training, test = split_tables(policy_tables, seed=0)
    names = [{t.name for t in half} for half in (training, test)]
    assert names[0] | names[1] == {t.name for t in policy_tables}
    assert not names[0] & names[1] and len(training) == len(test)
    assert split_tables(policy_tables, seed=1)[0] != training
    with pytest.raises(ConfigError, match="1 tables cannot be split"):
        split_tables(policy_tables[:1], seed=0)


def test_tasks_are_as_asked_for(policy_tables: tuple[TableConfig, ...]) -> None:
    config = PolicyTaskConfig(
        num_tables=(5, 9),
        world_sizes=(2, 3),
        widths=(4, 8, 16),
        batch_sizes=(256, 512),
        optimizers=("sgd", "rowwise_adagrad"),
        max_rows=(50, 1_000),
    )
    tasks = sample_policy_tasks(policy_tables, config, 7)
    assert [t.world_size for t in tasks] == [2, 3, 2, 3, 2, 3, 2]
    assert {t.batch_size for t in tasks} == {256, 512}
    kinds = [{w.optimizer for w in t.tables} for t in tasks]
    assert {"sgd"} in kinds and {"rowwise_adagrad"} in kinds
    assert all(len(kind) == 1 for kind in kinds)
    rows = [max(w.num_embeddings for w in t.tables) for t in tasks]
    assert set(rows) == {50, 1_000}
    assert {w.embedding_dim for t in tasks for w in t.tables} == {4, 8, 16}
    assert {len(t.tables) for t in tasks} <= set(range(5, 10))
    assert tasks == sample_policy_tasks(policy_tables, config, 9)[:7]
    seeded = dataclasses.replace(config, seed=1)
    assert tasks != sample_policy_tasks(policy_tables, seeded, 7)
    for task in tasks:
        held = [t.weight_bytes for t in task.tables]
        wanted = 1.5 * max(sum(held) / task.world_size, *held)
        assert task.memory_bytes == (int(wanted),) * task.world_size


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="world_sizes must be at least 1 each"):
        PolicyTaskConfig(world_sizes=(2, 0))
    with pytest.raises(ConfigError, match="batch_sizes is empty; give at least one"):
        PolicyTaskConfig(batch_sizes=())
    with pytest.raises(ConfigError, match=r"memory_slack must be at least 1, got 0\.5"):
        PolicyTaskConfig(memory_slack=0.5)


def test_simulated_plans_are_the_simulators(policy_tasks: Tasks) -> None:
    models = AnalyticCostModel(), AnalyticCommsModel()
    costs = SimulatedPlans(models[0], lambda world_size: models[1])
    for task in policy_tasks[0][:3]:
        plan = Placement.from_widths(
            task.world_size,
            [(i, t.embedding_dim, i % 2) for i, t in enumerate(task.tables)],
        )
        assert costs(task, plan) == Simulator(task, *models).evaluate(plan)


def test_comparison_by_hand(policy_tasks: Tasks, policy_costs: SimulatedPlans) -> None:
    tasks = policy_tasks[0]
    (same,) = compare(
        GreedySearcher("dim"), [GreedySearcher("dim")], tasks, policy_costs
    )
    assert (same.change, same.low, same.high) == (0.0, 0.0, 0.0)
    assert same.policy_ms == same.yardstick_ms
    ours, theirs = GreedySearcher("lookup"), RandomSearcher()
    (found,) = compare(ours, [theirs], tasks, policy_costs)
    costs = [
        [
            s.search(t, policy_costs.cost_model, AnalyticCommsModel()).predicted
            for t in tasks
        ]
        for s in (ours, theirs)
    ]
    ratios = [
        a.critical_path_ms / b.critical_path_ms - 1 for a, b in zip(*costs, strict=True)
    ]
    mean = sum(ratios) / len(ratios)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in ratios) / len(ratios))
    assert found.change == pytest.approx(mean)
    # Far from the ends, a mean's bootstrap interval is about 1.96 standard errors.
    error = 1.96 * deviation / math.sqrt(len(ratios))
    assert found.low == pytest.approx(mean - error, abs=0.2 * error)
    assert found.high == pytest.approx(mean + error, abs=0.2 * error)
    assert found.policy_balance == pytest.approx(
        sum(map(balance, costs[0])) / len(tasks)
    )


def test_infeasible_tasks_are_counted_and_not_compared(
    policy_costs: SimulatedPlans,
) -> None:
    def task(rows: tuple[int, ...]) -> ShardingTask:
        return make_task(make_tables([4] * len(rows), rows), 2, 64, memory=16_000)

    # By width all are equal: tables go to the two ranks in turn.
    both_fit = [(400, 400, 600, 600), (400, 500, 600, 500)]
    only_by_size, only_by_width = (300, 400, 500, 700), (400, 500, 300, 500, 300)
    tasks = [task(rows) for rows in (*both_fit, only_by_size, only_by_width)]
    by_size, by_width = GreedySearcher("size"), GreedySearcher("dim")
    tasks.append(task((900, 900, 900)))
    (found,) = compare(by_size, [by_width], tasks, policy_costs)
    assert (found.num_pairs, found.num_infeasible, found.num_lost) == (2, 1, 1)
    impossible = [task((900, 900, 900))]
    with pytest.raises(ConfigError, match="no task can be placed by both"):
        compare(by_size, [by_width], impossible, policy_costs)


def test_yardsticks_are_the_papers() -> None:
    assert [s.name for s in yardsticks()] == [
        "random",
        "greedy-size",
        "greedy-dim",
        "greedy-lookup",
        "greedy-size-lookup",
        "greedy-cost",
    ]


class CountingTrainer(PolicyTrainer):
    """Iteration k multiplies by 3 and adds k: its order and number show."""

    method = "counting"
    net = DreamShardNet()

    def __init__(self, stop_at: int = -1) -> None:
        self._config = PolicyConfig(iterations=6, learning_rate=1.0)
        self.value, self.stop_at = 1, stop_at

    def step(self, iteration: int) -> Mapping[str, float]:
        if iteration == self.stop_at:
            raise KeyboardInterrupt
        self.value = 3 * self.value + iteration
        return {"value": float(self.value)}

    def state(self) -> dict[str, Any]:
        return {"value": torch.tensor(self.value)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value = int(state["value"])


def test_runs_go_on_where_they_stopped(tmp_path: Path) -> None:
    whole, seen = CountingTrainer(), list[int]()
    assert run_training(whole, tmp_path / "a", {}, lambda i, m: seen.append(i)) == 0
    assert seen == list(range(6))
    with pytest.raises(KeyboardInterrupt):
        run_training(CountingTrainer(4), tmp_path / "b", {}, lambda i, m: None)
    rest, seen = CountingTrainer(), []
    assert run_training(rest, tmp_path / "b", {}, lambda i, m: seen.append(i)) == 4
    assert seen == [4, 5] and rest.value == whole.value
    finish_training(tmp_path / "b")
    assert not list((tmp_path / "b").iterdir())


def test_another_runs_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_training(CountingTrainer(2), tmp_path, {"seed": 0}, lambda i, m: None)
    with pytest.raises(ConfigError, match="of a run with other settings"):
        run_training(CountingTrainer(), tmp_path, {"seed": 1}, lambda i, m: None)
    (state,) = tmp_path.iterdir()
    state.write_bytes(b"not a state")
    with pytest.raises(ConfigError, match=r"cannot be read .* delete it to start anew"):
        run_training(CountingTrainer(), tmp_path, {"seed": 0}, lambda i, m: None)


def test_threads_and_random_state_are_given_back(tmp_path: Path) -> None:
    trainer = CountingTrainer()
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    run_training(trainer, tmp_path, {}, lambda i, m: None)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
