"""AutoShard: nets of the paper's sizes that learn to balance unseen tables."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.baselines.common import Tasks, as_searcher, equal_weights
from tests.builders import make_tables, make_task
from torchrec_neuroshard.baselines.autoshard import (
    AutoShardConfig,
    AutoShardNet,
    AutoShardSearcher,
    AutoShardTrainer,
    vtrace,
)
from torchrec_neuroshard.baselines.heuristics import RandomSearcher
from torchrec_neuroshard.baselines.policies import (
    POLICY_FEATURES,
    arrange,
    policy_log_probs,
    roll_out,
    view_task,
)
from torchrec_neuroshard.baselines.policy_training import (
    PlanCosts,
    SimulatedPlans,
    compare,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.simulator import PredictedCosts

QUICK = AutoShardConfig(iterations=24, steps=240, cost_updates=10, cost_batch=128)


def steps(
    tasks: tuple[ShardingTask, ...],
    costs: PlanCosts,
    count: int,
    config: AutoShardConfig = QUICK,
) -> AutoShardTrainer:
    trainer = AutoShardTrainer(tasks, costs, config)
    for iteration in range(count):
        trainer.step(iteration)
    return trainer


def test_settings_are_the_papers() -> None:
    config = AutoShardConfig()
    assert config.iterations * config.steps == 100_000
    assert config.iterations * config.cost_updates == 2_500
    assert (config.cost_batch, config.buffer) == (512, 5_000)
    assert (config.learning_rate, config.entropy_weight) == (1e-3, 1e-3)
    assert (config.baseline_weight, config.max_gradient_norm) == (0.5, 40.0)
    with pytest.raises(ConfigError, match="must be at least 1"):
        AutoShardConfig(steps=0)


def test_parameters_by_hand() -> None:
    encoder = 21 * 128 + 128 + 128 * 32 + 32
    cost_head = 32 * 64 + 64 + 64 + 1
    branches = (1 * 32 + 32) + (2 * 32 + 32)
    lstm = 2 * (4 * 64 * (64 + 64) + 2 * 4 * 64)
    logit = (192 * 128 + 128) + (128 * 128 + 128) + (128 * 64 + 64) + (64 + 1)
    value = 64 * 64 + 64 + 64 + 1
    expected = encoder + cost_head + branches + lstm + logit + value
    assert expected == 129_603
    assert sum(p.numel() for p in AutoShardNet().parameters()) == expected


def test_size_is_not_standardised(policy_tasks: Tasks) -> None:
    features = view_task(policy_tasks[0][0]).features
    net = AutoShardNet()
    net.set_statistics(features)
    standard = net.standardise(torch.from_numpy(features))
    size = POLICY_FEATURES.index("size")
    assert torch.equal(standard[:, size], torch.from_numpy(features[:, size]))
    assert standard[:, :3].mean(dim=0).abs().max() < 1e-4


def test_vtrace_by_hand() -> None:
    log_ratios = torch.log(torch.tensor([[0.5, 2.0, 1.0]]))
    rewards = torch.tensor([[0.0, 1.0, 7.0]])
    values = torch.tensor([[0.2, 0.4, 9.0]])
    is_step = torch.tensor([[True, True, False]])
    targets, advantages = vtrace(log_ratios, rewards, values, is_step)
    # Step 1: the ratio is cut to 1 and the value after it is 0.
    second = 0.4 + 1.0 * (1.0 + 0.0 - 0.4)
    first = 0.2 + 0.5 * (0.4 - 0.2) + 0.5 * 1.0 * (1.0 - 0.4)
    torch.testing.assert_close(targets, torch.tensor([[first, second, 0.0]]))
    expected = torch.tensor([[0.5 * (second - 0.2), 1.0 - 0.4, 0.0]])
    torch.testing.assert_close(advantages, expected)


def test_vtrace_on_policy_is_the_return() -> None:
    torch.manual_seed(0)
    rewards, values = torch.rand(4, 6), torch.rand(4, 6)
    is_step = torch.ones(4, 6, dtype=torch.bool)
    targets, advantages = vtrace(torch.zeros(4, 6), rewards, values, is_step)
    returns = rewards.flip(1).cumsum(dim=1).flip(1)
    torch.testing.assert_close(targets, returns)
    torch.testing.assert_close(advantages, returns - values)


def test_policy_losses_reach_the_encoder_and_not_the_cost_head(
    policy_tasks: Tasks,
) -> None:
    torch.manual_seed(0)
    net = AutoShardNet()
    episodes = arrange(net, [view_task(policy_tasks[0][0])])
    rollout = roll_out(net, episodes, torch.Generator().manual_seed(0))
    loss = policy_log_probs(net, episodes, rollout)[..., 0].sum()
    (loss + net.values(net.context(episodes)).sum()).backward()  # type: ignore[no-untyped-call]
    reached = {n.split(".")[0] for n, p in net.named_parameters() if p.grad is not None}
    policy = {"fraction", "lstm", "rank_branch", "logit", "value_head"}
    assert reached == {"encoder", *policy}


@pytest.fixture(scope="module")
def trainer(policy_tasks: Tasks, policy_costs: SimulatedPlans) -> AutoShardTrainer:
    return steps(policy_tasks[0], policy_costs, QUICK.iterations)


def test_trained_policy_beats_random_on_unseen_tables_and_ranks(
    trainer: AutoShardTrainer, policy_tasks: Tasks, policy_costs: SimulatedPlans
) -> None:
    (found,) = compare(
        as_searcher(AutoShardSearcher, trainer.net),
        [RandomSearcher()],
        policy_tasks[1],
        policy_costs,
    )
    assert found.num_pairs >= 15
    assert found.high < -0.05
    assert found.policy_balance > found.yardstick_balance


def test_cost_net_predicts_tables(
    trainer: AutoShardTrainer, policy_tasks: Tasks, policy_costs: SimulatedPlans
) -> None:
    predicted, expected = [], []
    for task in policy_tasks[1]:
        view = view_task(task)
        with torch.no_grad():
            costs = trainer.net.single_costs(torch.from_numpy(view.features))
        predicted += (costs * trainer.net.cost_scale_ms).tolist()
        expected += [_alone(task, int(i), policy_costs) for i in view.tables]
    correlation = torch.corrcoef(torch.tensor([predicted, expected]))[0, 1]
    assert float(correlation) > 0.8


def _alone(task: ShardingTask, table: int, costs: SimulatedPlans) -> float:
    alone = ShardingTask(
        tables=(task.tables[table],), world_size=1, batch_size=task.batch_size
    )
    width = task.tables[table].embedding_dim
    found = costs(alone, Placement.from_widths(1, [(0, width, 0)])).ranks[0]
    return found.fwd_compute + found.bwd_compute


def test_same_seed_same_weights_also_after_a_break(
    policy_tasks: Tasks, policy_costs: SimulatedPlans
) -> None:
    whole = steps(policy_tasks[0], policy_costs, 4)
    assert equal_weights(whole, steps(policy_tasks[0], policy_costs, 4))
    resumed = AutoShardTrainer(policy_tasks[0], policy_costs, QUICK)
    resumed.restore(steps(policy_tasks[0], policy_costs, 2).state())
    resumed.step(2)
    resumed.step(3)
    assert equal_weights(whole, resumed)
    other = dataclasses.replace(QUICK, seed=1)
    assert not equal_weights(whole, steps(policy_tasks[0], policy_costs, 4, other))


def test_buffer_keeps_the_latest(
    policy_tasks: Tasks, policy_costs: SimulatedPlans
) -> None:
    small = dataclasses.replace(QUICK, buffer=50)
    kept = steps(policy_tasks[0], policy_costs, 2, small).state()
    everything = steps(policy_tasks[0], policy_costs, 1).state()
    assert len(kept["cost"]) == len(kept["tables"]) == 50
    assert len(everything["cost"]) > 50


def test_overflow_is_a_negative_reward(policy_costs: SimulatedPlans) -> None:
    task = make_task(make_tables([4] * 3, 600), 2, 64, memory=16_000)
    trainer = AutoShardTrainer((task,), policy_costs, QUICK)
    # Two of three tables share a rank whatever is chosen: 1,200 of 1,000 rows.
    assert trainer.step(0)["reward"] == pytest.approx(-0.2)


def test_rewards_are_the_balance_of_what_is_measured(
    policy_tasks: Tasks, policy_costs: SimulatedPlans
) -> None:
    ratios = []

    def measure(task: ShardingTask, placement: Placement) -> PredictedCosts:
        found = policy_costs(task, placement)
        busy = [r.fwd_compute + r.bwd_compute for r in found.ranks]
        ratios.append(min(busy) / max(busy))
        return found

    roomy = tuple(dataclasses.replace(t, memory_bytes=()) for t in policy_tasks[0])
    shown = AutoShardTrainer(roomy, measure, QUICK).step(0)
    assert shown["reward"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)


def test_nothing_to_train_on_is_an_error(policy_costs: SimulatedPlans) -> None:
    with pytest.raises(ConfigError, match="no tasks to train on"):
        AutoShardTrainer((), policy_costs, QUICK)
