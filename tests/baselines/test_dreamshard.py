"""DreamShard: nets of the paper's sizes that learn to place unseen tables."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from scipy import stats

from tests.baselines.common import Tasks, as_searcher, equal_weights
from torchrec_neuroshard.baselines.dreamshard import (
    DreamShardConfig,
    DreamShardNet,
    DreamShardSearcher,
    DreamShardTrainer,
)
from torchrec_neuroshard.baselines.heuristics import RandomSearcher
from torchrec_neuroshard.baselines.policies import (
    arrange,
    roll_out,
    view_task,
)
from torchrec_neuroshard.baselines.policy_training import (
    SimulatedPlans,
    compare,
    episode_placement,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.simulator import PredictedCosts

QUICK = DreamShardConfig(
    iterations=5, cost_updates=60, policy_updates=40, learning_rate=2e-3
)
BRIEF = DreamShardConfig(iterations=3, cost_updates=4, policy_updates=2)


def trained(
    tasks: tuple[ShardingTask, ...],
    costs: SimulatedPlans,
    config: DreamShardConfig = QUICK,
) -> DreamShardTrainer:
    trainer = DreamShardTrainer(tasks, costs, config)
    for iteration in range(config.iterations):
        trainer.step(iteration)
    return trainer


@pytest.fixture(scope="module")
def trainer(policy_tasks: Tasks, policy_costs: SimulatedPlans) -> DreamShardTrainer:
    return trained(policy_tasks[0], policy_costs)


def test_settings_are_the_papers() -> None:
    config = DreamShardConfig()
    assert dataclasses.asdict(config) == {
        "iterations": 10,
        "plans_per_iteration": 10,
        "cost_updates": 300,
        "policy_updates": 10,
        "episodes": 10,
        "batch": 64,
        "learning_rate": 5e-4,
        "entropy_weight": 1e-3,
        "seed": 0,
    }
    with pytest.raises(ConfigError, match="episodes must be at least 2"):
        DreamShardConfig(episodes=1)


def test_parameters_by_hand() -> None:
    encoder = 21 * 128 + 128 + 128 * 32 + 32
    head = 32 * 64 + 64 + 64 + 1
    branch = 3 * 64 + 64 + 64 * 32 + 32
    expected = 2 * encoder + 4 * head + branch + 64 + 1
    assert expected == 24_997
    assert sum(p.numel() for p in DreamShardNet().parameters()) == expected


def test_plan_cost_takes_ranks_in_any_order_and_empty_ones() -> None:
    torch.manual_seed(0)
    net = DreamShardNet()
    sums = torch.rand(3, 4, 32)
    expected = net.plan_cost(sums)
    torch.testing.assert_close(net.plan_cost(sums[:, [2, 0, 3, 1]]), expected)
    padded = torch.cat([sums, torch.zeros(3, 2, 32)], dim=1)
    torch.testing.assert_close(net.plan_cost(padded), expected)
    assert (net.encode(torch.randn(9, 21)) >= 0).all()


def test_policy_losses_do_not_reach_the_cost_net(policy_tasks: Tasks) -> None:
    torch.manual_seed(0)
    net = DreamShardNet()
    episodes = arrange(net, [view_task(policy_tasks[0][0])])
    net.logits(net.items(episodes.features_ETF), net.context(episodes)).sum().backward()  # type: ignore[no-untyped-call]
    reached = {n.split(".")[0] for n, p in net.named_parameters() if p.grad is not None}
    assert reached == {"policy_encoder", "cost_branch", "logit"}


def test_trained_policy_beats_random_on_unseen_tables_and_ranks(
    trainer: DreamShardTrainer, policy_tasks: Tasks, policy_costs: SimulatedPlans
) -> None:
    names = [{t.name for task in part for t in task.tables} for part in policy_tasks]
    assert not names[0] & names[1]
    sizes = [{task.world_size for task in part} for part in policy_tasks]
    assert not sizes[0] & sizes[1]
    (found,) = compare(
        as_searcher(DreamShardSearcher, trainer.net),
        [RandomSearcher()],
        policy_tasks[1],
        policy_costs,
    )
    assert found.num_pairs >= 15
    assert found.high < -0.05


def test_cost_net_ranks_unseen_plans(
    trainer: DreamShardTrainer, policy_tasks: Tasks, policy_costs: SimulatedPlans
) -> None:
    net = trainer.net
    generator = torch.Generator().manual_seed(0)
    predicted, expected = [], []
    for task in policy_tasks[1]:
        episodes = arrange(net, [view_task(task)])
        rollout = roll_out(net, episodes, generator)
        chosen = torch.nn.functional.one_hot(rollout.actions_ET, task.world_size)
        encoded = net.encode(episodes.features_ETF)
        sums = torch.einsum("etw,etk->ewk", chosen.float(), encoded)
        predicted.append(float(net.plan_cost(sums).detach()))
        plan = episode_placement(task, episodes, rollout, 0)
        expected.append(policy_costs(task, plan).critical_path_ms)
    assert stats.spearmanr(predicted, expected).statistic > 0.7


def test_same_seed_same_weights_also_after_a_break(
    policy_tasks: Tasks, policy_costs: SimulatedPlans
) -> None:
    whole = trained(policy_tasks[0], policy_costs, BRIEF)
    assert equal_weights(whole, trained(policy_tasks[0], policy_costs, BRIEF))
    other = dataclasses.replace(BRIEF, seed=1)
    assert not equal_weights(whole, trained(policy_tasks[0], policy_costs, other))
    first = DreamShardTrainer(policy_tasks[0], policy_costs, BRIEF)
    first.step(0)
    second = DreamShardTrainer(policy_tasks[0], policy_costs, BRIEF)
    second.restore(first.state())
    second.step(1)
    second.step(2)
    assert equal_weights(whole, second)


def test_plans_are_costed_by_whatever_measures_them(
    policy_tasks: Tasks, policy_costs: SimulatedPlans
) -> None:
    measured: list[Placement] = []

    def measure(task: ShardingTask, placement: Placement) -> PredictedCosts:
        placement.check(dataclasses.replace(task, memory_bytes=()))
        measured.append(placement)
        return policy_costs(task, placement)

    config = dataclasses.replace(BRIEF, iterations=2, plans_per_iteration=7)
    trainer = DreamShardTrainer(policy_tasks[0], measure, config)
    for iteration in range(2):
        trainer.step(iteration)
    assert len(measured) == 14
    as_searcher(DreamShardSearcher, trainer.net).search(
        policy_tasks[1][0], policy_costs.cost_model, policy_costs.comms_for(3)
    )
    assert len(measured) == 14


def test_nothing_to_train_on_is_an_error(policy_costs: SimulatedPlans) -> None:
    with pytest.raises(ConfigError, match="no tasks to train on"):
        DreamShardTrainer((), policy_costs, BRIEF)
