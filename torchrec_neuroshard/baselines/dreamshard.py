"""DreamShard (NeurIPS 2022, arXiv 2210.02023): cost net, policy net, estimated MDP.

Tables are placed one after another, costliest first. The policy sees, per rank, the sum
of its tables' encodings and the cost net's three predictions for it; which table comes
next it knows from the order alone. It is trained by REINFORCE on what the cost net
predicts for the finished plan. The cost net is trained on plans that the policy made
and that were costed for real, or by our cost model (`PlanCosts`); both take turns.

Architecture, counts and rates are the paper's; its counts are few where tasks differ
much (see the card of the policy that ships). Different here:

- Features are standardised by the training tables' statistics, stored with the weights.
  The released code standardises each task by itself, so that one table has different
  features in different tasks.
- Costs are divided by the mean of the first plans' (stored too), since rates that suit
  a GPU's milliseconds do not suit a CPU's.
- The plan's cost is our critical path, each phase as long as on its slowest rank, not
  the largest rank's sum.
- A rank without room is offered neither when plans are drawn nor in the update, which
  the released code forgets. A table that has room nowhere goes, in training, to the
  freest rank; the released code crashes.
- Tasks of several numbers of ranks are mixed.

Where the sources at hand are silent: losses are means over the batch; the costed plans
of an iteration are of random tasks, and all of them so far are learned from; the
three heads see costs of a rank, forward compute, backward all-to-all and backward
compute. Nets sum a rank's tables to zero where there is none.

Shapes: as in `policies`; `P` plans, `S` ranks of plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchrec_neuroshard.baselines.common import layers
from torchrec_neuroshard.baselines.policies import (
    POLICY_FEATURES,
    Episodes,
    PolicyNet,
    PolicySearcher,
    arrange,
    policy_log_probs,
    roll_out,
)
from torchrec_neuroshard.baselines.policy_training import (
    PlanCosts,
    PolicyConfig,
    PolicyTrainer,
    episode_placement,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.training.fit import seeded

__all__ = [
    "DreamShardConfig",
    "DreamShardNet",
    "DreamShardSearcher",
    "DreamShardTrainer",
]

_ENCODING = 32
_FP16_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DreamShardConfig(PolicyConfig):
    """DreamShard's settings."""

    iterations: int = 10
    plans_per_iteration: int = 10
    """Plans costed (N_collect)."""
    cost_updates: int = 300
    """Steps of the cost net per iteration (N_cost)."""
    policy_updates: int = 10
    """Steps of the policy net per iteration (N_RL), each on one random task."""
    episodes: int = 10
    """Plans drawn per step of the policy (N_episode)."""
    batch: int = 64
    """Plans, and as many single ranks, per step of the cost net."""
    learning_rate: float = 5e-4

    def __post_init__(self) -> None:
        super(DreamShardConfig, self).__post_init__()
        if self.episodes < 2:
            raise ConfigError(
                "episodes must be at least 2, since their spread scales the reward, "
                f"got {self.episodes}"
            )


class DreamShardNet(PolicyNet):
    """Cost net and policy net, each with an encoder of its own."""

    def __init__(self) -> None:
        """Make the layers; weights are random until trained or loaded."""
        super().__init__()
        encoder = [len(POLICY_FEATURES), 128, _ENCODING]
        self.cost_encoder = layers(encoder, relu_last=True)
        self.rank_heads = nn.ModuleList(layers([_ENCODING, 64, 1]) for _ in range(3))
        self.plan_head = layers([_ENCODING, 64, 1])
        self.policy_encoder = layers(encoder, relu_last=True)
        self.cost_branch = layers([3, 64, _ENCODING], relu_last=True)
        self.logit = nn.Linear(2 * _ENCODING, 1)

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """Encode tables for the cost net, `... x 32`."""
        encoded: torch.Tensor = self.cost_encoder(self.standardise(features))
        return encoded

    def rank_costs(self, sums: torch.Tensor) -> torch.Tensor:
        """Forward compute, backward all-to-all, backward compute: `... x 3`."""
        return torch.cat([head(sums) for head in self.rank_heads], dim=-1)

    def plan_cost(self, sums_WK: torch.Tensor) -> torch.Tensor:
        """Cost of plans from their ranks' sums: `... x W x 32` to `...`.

        Encodings are at least 0, so that ranks added as padding change nothing.
        """
        cost: torch.Tensor = self.plan_head(sums_WK.amax(dim=-2))[..., 0]
        return cost

    def single_costs(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Sum of the three predictions for each table alone."""
        return self.rank_costs(self.encode(features_NF)).sum(dim=-1)

    def items(self, features_ETF: torch.Tensor) -> torch.Tensor:
        """Encodings for the cost net, without gradient, and for the policy net."""
        standard = self.standardise(features_ETF)
        encodings = self.cost_encoder(standard).detach(), self.policy_encoder(standard)
        return torch.cat(encodings, dim=-1)

    def context(self, episodes: Episodes) -> torch.Tensor:
        """Nothing: no more than the order tells which table is next."""
        return episodes.features_ETF[..., :0]

    def logits(self, sums_WK: torch.Tensor, context_C: torch.Tensor) -> torch.Tensor:
        """See `PolicyNet.logits`."""
        costs = self.rank_costs(sums_WK[..., :_ENCODING]).detach()
        seen = torch.cat([sums_WK[..., _ENCODING:], self.cost_branch(costs)], dim=-1)
        logits: torch.Tensor = self.logit(seen)[..., 0]
        return logits


@dataclass(frozen=True, slots=True)
class _Plans:
    """Costed plans."""

    task_P: npt.NDArray[np.int64]
    ranks_PT: npt.NDArray[np.int64]
    """Rank of each table of a task's view; -1 in the padding."""
    rank_costs_PW3: npt.NDArray[np.float32]
    """Milliseconds, as `DreamShardNet.rank_costs`."""
    plan_cost_P: npt.NDArray[np.float32]
    """Milliseconds."""

    def joined(self, other: _Plans) -> _Plans:
        parts = (
            np.concatenate([getattr(self, f.name), getattr(other, f.name)])
            for f in dataclasses.fields(self)
        )
        return _Plans(*parts)


class DreamShardTrainer(PolicyTrainer):
    """Costs plans, trains the cost net, trains the policy on it; and again."""

    method = "dreamshard"

    def __init__(
        self, tasks: Sequence[ShardingTask], costs: PlanCosts, config: DreamShardConfig
    ) -> None:
        """Take the training tasks and what their plans cost.

        Raises:
            ConfigError: There is no task.
        """
        with seeded(config.seed):
            self._net = DreamShardNet()
        super().__init__(self._net, tasks, costs, config)
        self.config = config
        self._features = [torch.from_numpy(v.features) for v in self.views]
        self._plans: _Plans | None = None

    @property
    def net(self) -> DreamShardNet:
        """Cost net and policy net."""
        return self._net

    def step(self, iteration: int) -> Mapping[str, float]:
        """Cost plans, update the cost net, then the policy net."""
        config = self.config
        rng, generator = self._begin(iteration)
        new = self._collect(rng, generator)
        if self._plans is None:
            self.net.cost_scale_ms.fill_(float(new.plan_cost_P.mean()))
            self._plans = new
        else:
            self._plans = self._plans.joined(new)
        plans = self._plans
        losses = [self._update_cost(plans, rng) for _ in range(config.cost_updates)]
        rewards = [
            self._update_policy(rng, generator) for _ in range(config.policy_updates)
        ]
        return {
            "plan_ms": float(new.plan_cost_P.mean()),
            "cost_loss": float(np.mean(losses)),
            "reward": float(np.mean(rewards)),
        }

    def _collect(self, rng: np.random.Generator, generator: torch.Generator) -> _Plans:
        """Draw plans of random tasks from the policy and have them costed."""
        chosen = rng.integers(len(self.tasks), size=self.config.plans_per_iteration)
        episodes = arrange(self.net, [self.views[i] for i in chosen])
        rollout = roll_out(self.net, episodes, generator)
        longest = max(len(v.tables) for v in self.views)
        widest = max(t.world_size for t in self.tasks)
        ranks = np.full((len(chosen), longest), -1, dtype=np.int64)
        rank_costs = np.zeros((len(chosen), widest, 3), dtype=np.float32)
        plan_cost = np.zeros(len(chosen), dtype=np.float32)
        for e, number in enumerate(chosen):
            task, view = self.tasks[number], self.views[number]
            placement = episode_placement(task, episodes, rollout, e)
            predicted = self.costs(task, placement)
            of_table = episodes.ranks(rollout.actions_ET, e)
            ranks[e, : len(view.tables)] = of_table[view.tables]
            rank_costs[e, : task.world_size] = [
                (r.fwd_compute, r.bwd_comms, r.bwd_compute) for r in predicted.ranks
            ]
            plan_cost[e] = predicted.critical_path_ms
        return _Plans(chosen.astype(np.int64), ranks, rank_costs, plan_cost)

    def _sums(
        self, plans: _Plans, chosen: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of encodings of each rank, `P x W x 32`, and whether it holds any."""
        widest = plans.rank_costs_PW3.shape[1]
        features = torch.cat([self._features[plans.task_P[p]] for p in chosen])
        ranks_PT = plans.ranks_PT[chosen]
        plan, step = np.nonzero(ranks_PT >= 0)
        slot = torch.from_numpy(plan * widest + ranks_PT[plan, step])
        encoded = self.net.encode(features)
        sums = encoded.new_zeros(len(chosen) * widest, encoded.shape[1])
        sums = sums.index_add(0, slot, encoded)
        held = torch.bincount(slot, minlength=len(sums)) > 0
        return sums.reshape(len(chosen), widest, -1), held.reshape(-1, widest)

    def _update_cost(self, plans: _Plans, rng: np.random.Generator) -> float:
        """Step on the four squared errors, of plans and of single ranks."""
        chosen = rng.integers(len(plans.task_P), size=self.config.batch)
        scale = float(self.net.cost_scale_ms)
        sums, held = self._sums(plans, chosen)
        wanted = torch.from_numpy(plans.plan_cost_P[chosen]) / scale
        loss = nn.functional.mse_loss(self.net.plan_cost(sums), wanted)
        plan, rank = np.nonzero(held.numpy())
        picked = rng.integers(len(plan), size=self.config.batch)
        plan, rank = plan[picked], rank[picked]
        rank_costs = torch.from_numpy(plans.rank_costs_PW3[chosen[plan], rank]) / scale
        predicted = self.net.rank_costs(sums[plan, rank])
        loss = loss + (predicted - rank_costs).square().mean(dim=0).sum()
        self._optimize(loss)
        return float(loss.detach())

    def _update_policy(
        self, rng: np.random.Generator, generator: torch.Generator
    ) -> float:
        """Step by REINFORCE on one task; return the mean reward."""
        view = self.views[rng.integers(len(self.views))]
        episodes = arrange(self.net, [view] * self.config.episodes)
        rollout = roll_out(self.net, episodes, generator)
        with torch.no_grad():
            encoded = self.net.encode(episodes.features_ETF)
            chosen = nn.functional.one_hot(rollout.actions_ET, len(view.caps)).float()
            reward = -self.net.plan_cost(torch.einsum("etw,etk->ewk", chosen, encoded))
            advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        log_probs = policy_log_probs(self.net, episodes, rollout)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
        taken = log_probs.gather(-1, rollout.actions_ET[..., None])[..., 0]
        loss = -(taken * advantage[:, None]).mean()
        self._optimize(loss - self.config.entropy_weight * entropy)
        return float(reward.mean())

    def _optimize(self, loss: torch.Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return weights, optimizer and costed plans."""
        plans = {} if self._plans is None else dataclasses.asdict(self._plans)
        return {
            "net": self.net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "plans": {name: torch.from_numpy(a) for name, a in plans.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self.net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])
        plans = {name: a.numpy() for name, a in state["plans"].items()}
        self._plans = _Plans(**plans) if plans else None


class DreamShardSearcher(PolicySearcher):
    """Places tables as a trained DreamShard policy does.

    `faithful_memory=True` counts a table's memory as the released code does: the
    weights alone, as fp16.
    """

    method = "dreamshard"

    @staticmethod
    def make_net() -> DreamShardNet:
        """Return an untrained net."""
        return DreamShardNet()

    @staticmethod
    def paper_memory(task: ShardingTask) -> tuple[list[float], list[float]]:
        """Weights as fp16, the task's limits."""
        held = [
            float(t.num_embeddings * t.embedding_dim * _FP16_BYTES) for t in task.tables
        ]
        caps = task.memory_bytes or (np.inf,) * task.world_size
        return held, [float(c) for c in caps]
