"""Training and test of AutoShard's and DreamShard's policies.

Nets and searches are in the library, in `papers.autoshard` and `papers.dreamshard`.
Counts and learning rates are the papers'. Both methods differ from the papers in this:

- Costs are divided by the mean of the first plans, which is stored with the weights.
  Learning rates for milliseconds of a GPU do not suit those of a CPU.
- A full rank is never chosen, and the update leaves it out. A table that fits no rank
  goes to the freest one.
- Tasks have several numbers of ranks, and a cost model predicts all costs.

AutoShard: the reward is the compute of the least busy rank divided by that of the
busiest. If a plan exceeds a rank's memory, the reward is the largest excess, negative.
Policy and value are trained by an actor-critic with V-trace. The cost net shares the
tables' encoder and is trained on the same plans. Actors and learner take turns in one
process, so that a run can be repeated. Plans are drawn with the weights from before the
latest update, since the paper's actors lag, too. A batch has whole plans, until it has
800 steps; the paper cuts plans off after 100 steps. As in the released code, one
optimizer serves all losses, the losses of policy and value are sums over steps, and the
loss of the cost net is a mean.

DreamShard: the policy is trained by REINFORCE on the cost net's prediction for the
finished plan. The cost net is trained on the policy's plans, and a plan's cost is our
critical path, not the largest rank's sum. The two trainings alternate. Losses are means
over the batch. An iteration prices plans of random tasks, and the cost net learns from
all plans so far. Its three heads predict forward compute, backward all-to-all and
backward compute of a rank.

Shapes: as in the library's `policies`; `E` episodes, `P` plans.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchrec_neuroshard.bundles.training_loop import seeded
from torchrec_neuroshard.costs.simulator import PredictedCosts, Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.models.base import CommsModel, CostModel
from torchrec_neuroshard.papers.autoshard import AutoShardNet, AutoShardSearcher
from torchrec_neuroshard.papers.common import whole_placement
from torchrec_neuroshard.papers.dreamshard import DreamShardNet, DreamShardSearcher
from torchrec_neuroshard.papers.policies import (
    ILLEGAL,
    POLICY_FEATURES,
    Policy,
    PolicyNet,
    PolicySearcher,
    TaskView,
    policy_format,
    view_task,
)
from torchrec_neuroshard.search.base import Searcher

Rng = np.random.Generator
PlanCosts = Callable[[ShardingTask, Placement], PredictedCosts]
"""Predicts a plan's costs, for example `SimulatedPlans`."""

_RESAMPLES = 10_000
_STANDARDISED = 4
"""Number of standardised features. The shares after them stay raw."""
_STD_FLOOR = 1e-6


class SimulatedPlans:
    """Predicts plans by a cost model and a model of collectives."""

    def __init__(
        self, cost_model: CostModel, comms_for: Callable[[int], CommsModel]
    ) -> None:
        """Take the cost model, and a function: number of ranks -> collectives."""
        self.cost_model = cost_model
        self.comms_for = comms_for
        self._simulators: dict[int, Simulator] = {}

    def __call__(self, task: ShardingTask, placement: Placement) -> PredictedCosts:
        """Return the predicted costs of a plan."""
        return self.simulator(task).evaluate(placement)

    def simulator(self, task: ShardingTask) -> Simulator:
        """Return the simulator of a task."""
        # The simulator keeps its task alive, so no other task gets the same id.
        if id(task) not in self._simulators:
            comms_model = self.comms_for(task.world_size)
            self._simulators[id(task)] = Simulator(task, self.cost_model, comms_model)
        return self._simulators[id(task)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """Settings of both methods."""

    iterations: int
    learning_rate: float
    """First learning rate. It falls linearly to 0."""
    entropy_weight: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if name != "seed" and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoShardConfig(PolicyConfig):
    """AutoShard's settings."""

    iterations: int = 125
    """Updates of the policy. 125 equal the paper's 100,000 steps."""
    steps: int = 800
    """Minimum steps per update: the paper has 8 unrolls of 100."""
    cost_updates: int = 20
    """Steps of the cost net per update."""
    cost_batch: int = 512
    """Ranks of plans in a batch of the cost net."""
    buffer: int = 5_000
    """Number of the latest ranks of plans that the cost net learns from."""
    learning_rate: float = 1e-3
    baseline_weight: float = 0.5
    max_gradient_norm: float = 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DreamShardConfig(PolicyConfig):
    """DreamShard's settings."""

    iterations: int = 10
    plans_per_iteration: int = 10
    """Plans priced per iteration (N_collect)."""
    cost_updates: int = 300
    """Steps of the cost net per iteration (N_cost)."""
    policy_updates: int = 10
    """Steps of the policy net per iteration (N_RL), each on one random task."""
    episodes: int = 10
    """Plans drawn per step of the policy (N_episode), at least 2."""
    batch: int = 64
    """Plans in a batch of the cost net, with as many single ranks."""
    learning_rate: float = 5e-4


# Episodes.


@dataclass(frozen=True, slots=True)
class Episodes:
    """Several tasks side by side, padded, with tables in the order of placing."""

    tables_ET: npt.NDArray[np.int64]
    """Step -> index of its table in the task."""
    features_ETF: torch.Tensor
    bytes_ET: torch.Tensor
    caps_EW: torch.Tensor
    is_table_ET: torch.Tensor
    """False in the padding."""
    is_rank_EW: torch.Tensor

    @property
    def count_E(self) -> torch.Tensor:
        """Number of tables of each episode."""
        return self.is_table_ET.sum(dim=1)

    def ranks(self, actions_ET: torch.Tensor, episode: int) -> npt.NDArray[np.int64]:
        """Return the rank of each table of one episode, in the task's order."""
        count = int(self.is_table_ET[episode].sum())
        ranks = np.empty(count, dtype=np.int64)
        ranks[self.tables_ET[episode, :count]] = actions_ET[episode, :count].numpy()
        return ranks


@torch.no_grad()
def arrange(net: PolicyNet, views: Sequence[TaskView]) -> Episodes:
    """Return tasks for `roll_out`, with the largest predicted cost first."""
    lengths = [len(v.tables) for v in views]
    flat = torch.from_numpy(np.concatenate([v.features for v in views]))
    costs = net.single_costs(flat).double().numpy()
    keys = np.split(costs, np.cumsum(lengths)[:-1])
    orders = [np.argsort(-key, kind="stable") for key in keys]
    widest = max(len(v.caps) for v in views)
    shape = len(views), max(lengths)
    tables = np.zeros(shape, dtype=np.int64)
    features = np.zeros((*shape, len(POLICY_FEATURES)), dtype=np.float32)
    memory = np.zeros(shape)
    caps = np.full((len(views), widest), -math.inf)
    for e, (view, order) in enumerate(zip(views, orders, strict=True)):
        tables[e, : len(order)] = view.tables[order]
        features[e, : len(order)] = view.features[order]
        memory[e, : len(order)] = view.bytes[order]
        caps[e, : len(view.caps)] = view.caps
    return Episodes(
        tables_ET=tables,
        features_ETF=torch.from_numpy(features),
        bytes_ET=torch.from_numpy(memory),
        caps_EW=torch.from_numpy(caps),
        is_table_ET=torch.arange(shape[1]) < torch.tensor(lengths)[:, None],
        is_rank_EW=torch.from_numpy(caps > -math.inf),
    )


@dataclass(frozen=True, slots=True)
class Rollout:
    """A policy's choices in each step of each episode."""

    actions_ET: torch.Tensor
    log_probs_ET: torch.Tensor
    """Log probabilities of the choices."""
    legal_ETW: torch.Tensor
    """True: the rank could be chosen. If no rank has room, it is the freest one."""


@torch.no_grad()
def roll_out(
    net: PolicyNet, episodes: Episodes, generator: torch.Generator | None = None
) -> Rollout:
    """Return a policy's placement of all tables; it never chooses a full rank.

    Args:
        net: The policy.
        episodes: From `arrange`.
        generator: Draws the choices. None: take the likeliest rank; ties go to the
            first.
    """
    items = net.items(episodes.features_ETF) * episodes.is_table_ET[..., None]
    context = net.context(episodes.features_ETF, episodes.count_E)
    num_episodes, length = episodes.is_table_ET.shape
    num_ranks = episodes.caps_EW.shape[1]
    sums = items.new_zeros(num_episodes, num_ranks, items.shape[2])
    room = episodes.caps_EW.clone()
    steps: list[tuple[torch.Tensor, ...]] = []
    for t in range(length):
        legal = episodes.is_rank_EW & (room >= episodes.bytes_ET[:, t, None])
        stuck = ~legal.any(dim=1)
        freest = nn.functional.one_hot(room.argmax(dim=1), num_ranks).bool()
        legal = torch.where(stuck[:, None], freest, legal)
        logits = net.logits(sums, context[:, t]).masked_fill(~legal, ILLEGAL)
        log_probs = torch.log_softmax(logits, dim=-1)
        action = _choose(log_probs, generator)
        chosen = nn.functional.one_hot(action, num_ranks)
        sums = sums + chosen[..., None] * items[:, t, None]
        room = room - torch.where(
            chosen.bool(), episodes.bytes_ET[:, t, None], torch.zeros_like(room)
        )
        log_prob = log_probs.gather(1, action[:, None])[:, 0]
        steps.append((action, log_prob, legal))
    return Rollout(*(torch.stack(step, dim=1) for step in zip(*steps, strict=True)))


def _choose(log_probs: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    if generator is None:
        return log_probs.argmax(dim=1)
    return torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]


def set_statistics(net: PolicyNet, features_NF: npt.NDArray[np.float32]) -> None:
    """Standardise by the statistics of these training tables from now on."""
    head = torch.from_numpy(features_NF[:, :_STANDARDISED]).double()
    net.mean_F[:_STANDARDISED] = head.mean(dim=0).float()
    deviation = head.std(dim=0, unbiased=False).float()
    net.std_F[:_STANDARDISED] = deviation + _STD_FLOOR


class PolicyTrainer(ABC):
    """Base class of trainers: runs iterations, with one Adam for all losses."""

    paper: ClassVar[str]
    config_type: ClassVar[Any]
    searcher_type: ClassVar[type[PolicySearcher]]
    net: PolicyNet

    def __init__(
        self,
        net: PolicyNet,
        tasks: Sequence[ShardingTask],
        costs: PlanCosts,
        config: PolicyConfig,
    ) -> None:
        """Take an untrained net, the training tasks and the costs of plans."""
        self.tasks, self.costs, self.config = tuple(tasks), costs, config
        self.views = [view_task(t) for t in tasks]
        set_statistics(net, np.concatenate([v.features for v in self.views]))
        self._parameters = list(net.parameters())
        self._optimizer = torch.optim.Adam(self._parameters)

    def train(self, report: Callable[[int, Mapping[str, float]], None]) -> None:
        """Run all iterations; `report` gets the number and figures of each."""
        with seeded(0):
            for iteration in range(self.config.iterations):
                left = 1 - iteration / self.config.iterations
                self._optimizer.param_groups[0]["lr"] = self.config.learning_rate * left
                rng = np.random.default_rng([self.config.seed, iteration])
                draws = torch.Generator().manual_seed(int(rng.integers(2**62)))
                report(iteration, self._step(rng, draws))

    @abstractmethod
    def _step(self, rng: Rng, generator: torch.Generator) -> Mapping[str, float]:
        """Run one iteration; return its figures."""

    def _optimize(self, loss: torch.Tensor, max_norm: float | None = None) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, max_norm)
        self._optimizer.step()


def policy_log_probs(
    net: PolicyNet, episodes: Episodes, rollout: Rollout
) -> torch.Tensor:
    """Return log probabilities of all ranks, with gradients, `E x T x W`.

    Full ranks have about -1e9.
    """
    items = net.items(episodes.features_ETF) * episodes.is_table_ET[..., None]
    chosen = nn.functional.one_hot(rollout.actions_ET, episodes.caps_EW.shape[1])
    placed = chosen[..., None] * items[:, :, None]
    before = placed.cumsum(dim=1) - placed
    # Skip the padding, which is more than half of the array.
    real = episodes.is_table_ET[..., None] & episodes.is_rank_EW[:, None]
    context = net.context(episodes.features_ETF, episodes.count_E)[:, :, None].expand(
        *real.shape, -1
    )
    logits = torch.zeros(real.shape, dtype=items.dtype)
    logits[real] = net.logits(before[real][:, None], context[real])[:, 0]
    logits = logits.masked_fill(~rollout.legal_ETW, ILLEGAL)
    return torch.log_softmax(logits, dim=-1)


# AutoShard.


def vtrace(
    log_ratios_ET: torch.Tensor,
    rewards_ET: torch.Tensor,
    values_ET: torch.Tensor,
    is_step_ET: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return value targets and policy advantages, with clips and discount of 1.

    Args:
        log_ratios_ET: Log of learner's over actor's probability of each choice.
        rewards_ET: Reward after each step.
        values_ET: Value of the state before each step.
        is_step_ET: False after an episode's end, where the value is 0.

    Returns:
        Targets and advantages, each `E x T`, 0 after an episode's end.

    Source: IMPALA (arXiv 1802.01561), section 4.1.
    """
    clipped = log_ratios_ET.exp().clamp_max(1.0) * is_step_ET
    values = values_ET * is_step_ET
    after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = clipped * (rewards_ET + after - values)
    excess = torch.zeros_like(values[:, 0])
    excesses = []
    for t in reversed(range(values.shape[1])):
        excess = deltas[:, t] + clipped[:, t] * excess
        excesses.append(excess)
    targets = values + torch.stack(excesses[::-1], dim=1)
    next_targets = torch.cat([targets[:, 1:], torch.zeros_like(after[:, :1])], dim=1)
    return targets, clipped * (rewards_ET + next_targets - values)


class AutoShardTrainer(PolicyTrainer):
    """Trainer of AutoShard: make plans, update the policy, update the cost net."""

    paper = "AutoShard (KDD 2022, arXiv 2208.06399)"
    config_type, searcher_type = AutoShardConfig, AutoShardSearcher
    net: AutoShardNet
    config: AutoShardConfig

    def __init__(
        self, tasks: Sequence[ShardingTask], costs: PlanCosts, config: AutoShardConfig
    ) -> None:
        """Take the training tasks and the costs of plans; only compute counts."""
        with seeded(config.seed):
            self.net = AutoShardNet()
        super().__init__(self.net, tasks, costs, config)
        self._actor = copy.deepcopy(self.net)
        self._ranks: list[tuple[torch.Tensor, float]] = []
        """Features of a rank's tables, and the rank's compute [ms]."""

    def _step(self, rng: Rng, generator: torch.Generator) -> Mapping[str, float]:
        chosen, steps = list[int](), 0
        while steps < self.config.steps:
            chosen.append(int(rng.integers(len(self.tasks))))
            steps += len(self.views[chosen[-1]].tables)
        episodes = arrange(self._actor, [self.views[i] for i in chosen])
        rollout = roll_out(self._actor, episodes, generator)
        rewards = self._play(chosen, episodes, rollout)
        # The next plans are made with the weights from before this update.
        self._actor.load_state_dict(self.net.state_dict())
        self._update_policy(episodes, rollout, rewards)
        losses = [self._update_cost(rng) for _ in range(self.config.cost_updates)]
        return {"reward": float(rewards.mean()), "cost_loss": float(np.mean(losses))}

    def _play(
        self, chosen: Sequence[int], episodes: Episodes, rollout: Rollout
    ) -> torch.Tensor:
        """Price plans, keep their ranks, and return the rewards, `E`."""
        rewards, new = [], list[tuple[torch.Tensor, float]]()
        for e, number in enumerate(chosen):
            task, view = self.tasks[number], self.views[number]
            of_table = episodes.ranks(rollout.actions_ET, e)
            placement = whole_placement(task, of_table)
            found = self.costs(task, placement)
            busy_W = np.array([r.fwd_compute + r.bwd_compute for r in found.ranks])
            # Share of memory left on the fullest rank; negative if it is exceeded.
            room = 1 - placement.rank_bytes(task)[0] / view.caps
            even = busy_W.min() / busy_W.max()
            rewards.append(float(room.min() if room.min() < 0 else even))
            ranks = of_table[view.tables]
            for rank in np.unique(ranks):
                held = torch.from_numpy(view.features[ranks == rank])
                new.append((held, float(busy_W[rank])))
        if not self._ranks:
            self.net.cost_scale_ms.fill_(float(np.mean([ms for _, ms in new])))
        self._ranks = (self._ranks + new)[-self.config.buffer :]
        return torch.tensor(rewards)

    def _update_policy(
        self, episodes: Episodes, rollout: Rollout, rewards_E: torch.Tensor
    ) -> None:
        """Take a step on policy gradient, squared error of the value, and entropy."""
        is_step = episodes.is_table_ET
        log_probs = policy_log_probs(self.net, episodes, rollout)
        taken = log_probs.gather(-1, rollout.actions_ET[..., None])[..., 0]
        states = self.net.context(episodes.features_ETF, episodes.count_E)
        values = self.net.value_head(states)[..., 0]
        last = is_step & ~torch.roll(is_step, -1, dims=1)
        last[:, -1] = is_step[:, -1]
        with torch.no_grad():
            targets, advantages = vtrace(
                taken - rollout.log_probs_ET, last * rewards_E[:, None], values, is_step
            )
        policy_loss = -(taken * advantages)[is_step].sum()
        value_loss = 0.5 * (targets - values)[is_step].square().sum()
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)[is_step].sum()
        loss = (
            policy_loss
            + self.config.baseline_weight * value_loss
            - self.config.entropy_weight * entropy
        )
        self._optimize(loss, self.config.max_gradient_norm)

    def _update_cost(self, rng: Rng) -> float:
        """Take a step on the squared error of buffered ranks; return the loss."""
        drawn = rng.integers(len(self._ranks), size=self.config.cost_batch)
        held, costs = zip(*(self._ranks[i] for i in drawn), strict=True)
        encoded = self.net.encode(torch.cat(held))
        rank = np.repeat(np.arange(len(held)), [len(h) for h in held])
        sums = encoded.new_zeros(len(held), encoded.shape[1])
        sums = sums.index_add(0, torch.from_numpy(rank), encoded)
        wanted = torch.tensor(costs) / self.net.cost_scale_ms
        loss = nn.functional.mse_loss(self.net.rank_cost(sums), wanted)
        self._optimize(loss, self.config.max_gradient_norm)
        return float(loss.detach())


# DreamShard.


class _Plan(NamedTuple):
    """A priced plan."""

    features_TF: torch.Tensor
    rank_T: npt.NDArray[np.int64]
    rank_costs_W3: npt.NDArray[np.float32]
    """Costs of each rank [ms], as `DreamShardNet.rank_costs`."""
    plan_ms: float


class DreamShardTrainer(PolicyTrainer):
    """Trainer of DreamShard: price plans, train the cost net, train the policy."""

    paper = "DreamShard (NeurIPS 2022, arXiv 2210.02023)"
    config_type, searcher_type = DreamShardConfig, DreamShardSearcher
    net: DreamShardNet
    config: DreamShardConfig

    def __init__(
        self, tasks: Sequence[ShardingTask], costs: PlanCosts, config: DreamShardConfig
    ) -> None:
        """Take the training tasks and the costs of plans."""
        with seeded(config.seed):
            self.net = DreamShardNet()
        super().__init__(self.net, tasks, costs, config)
        self._plans: list[_Plan] = []
        self._widest = max(t.world_size for t in tasks)

    def _step(self, rng: Rng, generator: torch.Generator) -> Mapping[str, float]:
        new = self._collect(rng, generator)
        mean_ms = float(np.mean([p.plan_ms for p in new], dtype=np.float32))
        if not self._plans:
            self.net.cost_scale_ms.fill_(mean_ms)
        self._plans += new
        losses = [self._update_cost(rng) for _ in range(self.config.cost_updates)]
        rewards = [
            self._update_policy(self.views[rng.integers(len(self.views))], generator)
            for _ in range(self.config.policy_updates)
        ]
        return {
            "plan_ms": mean_ms,
            "cost_loss": float(np.mean(losses)),
            "reward": float(np.mean(rewards)),
        }

    def _collect(self, rng: Rng, generator: torch.Generator) -> list[_Plan]:
        """Return priced plans of random tasks, drawn by the policy."""
        chosen = rng.integers(len(self.tasks), size=self.config.plans_per_iteration)
        episodes = arrange(self.net, [self.views[i] for i in chosen])
        rollout = roll_out(self.net, episodes, generator)
        plans = []
        for e, number in enumerate(chosen):
            task, view = self.tasks[number], self.views[number]
            of_table = episodes.ranks(rollout.actions_ET, e)
            predicted = self.costs(task, whole_placement(task, of_table))
            ranks = predicted.ranks
            costs = [(r.fwd_compute, r.bwd_comms, r.bwd_compute) for r in ranks]
            features, rank_T = torch.from_numpy(view.features), of_table[view.tables]
            costs_W3 = np.array(costs, dtype=np.float32)
            plans.append(_Plan(features, rank_T, costs_W3, predicted.critical_path_ms))
        return plans

    def _sums(self, plans: Sequence[_Plan]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums of encodings, `P x W x 32`, and which ranks have tables."""
        slots = [p.rank_T + i * self._widest for i, p in enumerate(plans)]
        slot = torch.from_numpy(np.concatenate(slots))
        encoded = self.net.encode(torch.cat([p.features_TF for p in plans]))
        sums = encoded.new_zeros(len(plans) * self._widest, encoded.shape[1])
        sums = sums.index_add(0, slot, encoded)
        held = torch.bincount(slot, minlength=len(sums)) > 0
        shape = len(plans), self._widest
        return sums.reshape(*shape, -1), held.reshape(shape)

    def _update_cost(self, rng: Rng) -> float:
        """Take a step on squared errors of plans and ranks; return the loss."""
        drawn = rng.integers(len(self._plans), size=self.config.batch)
        plans = [self._plans[i] for i in drawn]
        scale = float(self.net.cost_scale_ms)
        sums, held = self._sums(plans)
        wanted = torch.tensor([p.plan_ms for p in plans]) / scale
        loss = nn.functional.mse_loss(self._plan_cost(sums), wanted)
        plan, rank = np.nonzero(held.numpy())
        picked = rng.integers(len(plan), size=self.config.batch)
        plan, rank = plan[picked], rank[picked]
        of_rank = [plans[p].rank_costs_W3[r] for p, r in zip(plan, rank, strict=True)]
        rank_costs = torch.from_numpy(np.stack(of_rank)) / scale
        predicted = self.net.rank_costs(sums[plan, rank])
        loss = loss + (predicted - rank_costs).square().mean(dim=0).sum()
        self._optimize(loss)
        return float(loss.detach())

    def _plan_cost(self, sums_WK: torch.Tensor) -> torch.Tensor:
        """Return the cost of plans from their ranks' sums: `... x W x 32` to `...`.

        Encodings are at least 0, so ranks added as padding change nothing.
        """
        cost: torch.Tensor = self.net.plan_head(sums_WK.amax(dim=-2))[..., 0]
        return cost

    def _update_policy(self, view: TaskView, generator: torch.Generator) -> float:
        """Take a REINFORCE step on one task; return the mean reward."""
        episodes = arrange(self.net, [view] * self.config.episodes)
        rollout = roll_out(self.net, episodes, generator)
        with torch.no_grad():
            encoded = self.net.encode(episodes.features_ETF)
            chosen = nn.functional.one_hot(rollout.actions_ET, len(view.caps)).float()
            reward = -self._plan_cost(torch.einsum("etw,etk->ewk", chosen, encoded))
            advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        log_probs = policy_log_probs(self.net, episodes, rollout)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
        taken = log_probs.gather(-1, rollout.actions_ET[..., None])[..., 0]
        loss = -(taken * advantage[:, None]).mean()
        self._optimize(loss - self.config.entropy_weight * entropy)
        return float(reward.mean())


METHODS: dict[str, Any] = {
    "autoshard": AutoShardTrainer,
    "dreamshard": DreamShardTrainer,
}
"""Method -> trainer. Arguments: tasks, costs of plans, the method's config."""


# Files.


def save_policy(folder: str | Path, policy: Policy, card: str) -> None:
    """Write the policy's weights, statistics and description, and a card."""
    files = policy_format(policy.info.method, lambda: policy.net)
    files.save(folder, policy.net, policy.info, card)


# Test.


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A policy compared with one baseline, on tasks that both can place."""

    name: str
    num_pairs: int
    num_infeasible: int
    """Tasks that only the policy can place."""
    num_lost: int
    """Tasks that only the baseline can place."""
    change: float
    """Mean of the policy's iteration time over the baseline's, minus 1."""
    low: float
    """Lower end of the mean's 95 % bootstrap interval."""
    high: float


def compare(
    searcher: Searcher,
    others: Sequence[Searcher],
    tasks: Sequence[ShardingTask],
    costs: SimulatedPlans,
) -> list[Comparison]:
    """Return the policy's predicted times compared with each baseline, task by task.

    Raises:
        ConfigError: There is no task that both the policy and a baseline can place.
    """
    ours = [_iteration_ms(searcher, t, costs) for t in tasks]
    return [
        _comparison(other.name, ours, [_iteration_ms(other, t, costs) for t in tasks])
        for other in others
    ]


def _iteration_ms(
    searcher: Searcher, task: ShardingTask, costs: SimulatedPlans
) -> float | None:
    """Return the predicted time of a search's plan; None without a plan."""
    try:
        found = searcher.search(task, costs.simulator(task))
    except InfeasibleError:
        return None
    return found.predicted.critical_path_ms


def _comparison(
    name: str, ours: Sequence[float | None], theirs: Sequence[float | None]
) -> Comparison:
    both = list(zip(ours, theirs, strict=True))
    ratio = np.array([a / b - 1 for a, b in both if a is not None and b is not None])
    if not len(ratio):
        raise ConfigError(f"no task can be placed by both the policy and '{name}'")
    rng = np.random.default_rng(0)
    means = rng.choice(ratio, size=(_RESAMPLES, len(ratio))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975)).tolist()
    return Comparison(
        name=name,
        num_pairs=len(ratio),
        num_infeasible=sum(a is not None and b is None for a, b in both),
        num_lost=sum(a is None and b is not None for a, b in both),
        change=float(ratio.mean()),
        low=low,
        high=high,
    )
