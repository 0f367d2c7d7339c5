"""AutoShard (KDD 2022, arXiv 2208.06399): an LSTM policy trained to balance compute.

Tables are placed one after another, costliest first. An LSTM reads the tables; each
rank's logit is a small net of the LSTM's state and of what the rank holds: its tables'
encodings summed, their predicted cost and their memory. The reward is how even the
finished plan is: compute of the least busy rank over that of the busiest. So
a slow but even plan is as good as a quick one, and collectives do not count: that is
the method, and it is kept. Policy and value are trained by an actor-critic with
V-trace; the cost net, which shares the tables' encoder, is trained along on the same
plans. Costs are measured or predicted by our cost model (`PlanCosts`).

Architecture, counts and rates are the paper's. Different here:

- Actors and learner take turns in one process, so that a run can be repeated: plans are
  drawn with the weights from before the latest update, as an actor of the paper would
  lag, and V-trace corrects for it. Batches are of whole plans, until they have 800
  steps, where the paper cuts plans off after 100 steps.
- Costs are divided by the first plans' mean cost of a rank (stored with the weights),
  since rates that suit a GPU's milliseconds do not suit a CPU's.
- A rank without room is not offered, unless `faithful_memory` asks for it. A table that
  has room nowhere goes, in training, to the freest rank and the plan has the paper's
  negative reward: the worst excess over the limit.
- Tasks of several numbers of ranks are mixed.

As in the released code, one optimizer serves all losses, so that the policy's reach the
tables' encoder too, and each rank holds a dummy table of zeros; losses of policy and
value are sums over steps, the cost net's is a mean.

Shapes: as in `policies`; `S` ranks of plans.
"""

from __future__ import annotations

import copy
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
    Rollout,
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
from torchrec_neuroshard.placement import ShardingTask
from torchrec_neuroshard.simulator import PredictedCosts
from torchrec_neuroshard.training.fit import seeded

__all__ = [
    "AutoShardConfig",
    "AutoShardNet",
    "AutoShardSearcher",
    "AutoShardTrainer",
    "vtrace",
]

_ENCODING = 32
_STATE = 64
_SIZE = POLICY_FEATURES.index("size")


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoShardConfig(PolicyConfig):
    """AutoShard's settings."""

    iterations: int = 125
    """Updates of the policy: the paper's 100,000 steps."""
    steps: int = 800
    """Least steps per update: the paper's 8 unrolls of 100."""
    cost_updates: int = 20
    """Steps of the cost net per update."""
    cost_batch: int = 512
    """Ranks of plans per step of the cost net."""
    buffer: int = 5_000
    """Latest ranks of plans that the cost net learns from."""
    learning_rate: float = 1e-3
    baseline_weight: float = 0.5
    max_gradient_norm: float = 40.0


class AutoShardNet(PolicyNet):
    """Table encoder, cost head, LSTM policy and value."""

    def __init__(self) -> None:
        """Make the layers; weights are random until trained or loaded."""
        super().__init__()
        self.encoder = layers([len(POLICY_FEATURES), 128, _ENCODING], relu_last=True)
        self.cost_head = layers([_ENCODING, 64, 1])
        self.fraction = nn.Linear(1, _ENCODING)
        self.lstm = nn.LSTM(2 * _ENCODING, _STATE, num_layers=2, batch_first=True)
        self.rank_branch = nn.Linear(2, _ENCODING)
        self.logit = layers([3 * _STATE, 128, 128, 64, 1])
        self.value_head = layers([_STATE, 64, 1])

    def standardise(self, features: torch.Tensor) -> torch.Tensor:
        """Standardise raw features except the size, as in the paper."""
        standard = super().standardise(features).clone()
        standard[..., _SIZE] = features[..., _SIZE]
        return standard

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """Encode tables, `... x 32`."""
        encoded: torch.Tensor = self.encoder(self.standardise(features))
        return encoded

    def rank_cost(self, sums: torch.Tensor) -> torch.Tensor:
        """Forward + backward compute of ranks, from sums: `... x 32` to `...`."""
        cost: torch.Tensor = self.cost_head(sums)[..., 0]
        return cost

    def single_costs(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Predicted compute of each table alone."""
        return self.rank_cost(self.encode(features_NF))

    def items(self, features_ETF: torch.Tensor) -> torch.Tensor:
        """Encodings and sizes."""
        encoded = self.encode(features_ETF)
        return torch.cat([encoded, features_ETF[..., _SIZE : _SIZE + 1]], dim=-1)

    def context(self, episodes: Episodes) -> torch.Tensor:
        """State of the LSTM when each table is to be placed, `E x T x 64`."""
        encoded = self.encode(episodes.features_ETF)
        count = episodes.is_table_ET.sum(dim=1, keepdim=True)
        step = torch.arange(encoded.shape[1], dtype=encoded.dtype)
        assigned = (step / count)[..., None]
        inputs = torch.cat([encoded, self.fraction(assigned).relu()], dim=-1)
        states: torch.Tensor = self.lstm(inputs)[0]
        return states

    def logits(self, sums_WK: torch.Tensor, context_C: torch.Tensor) -> torch.Tensor:
        """See `PolicyNet.logits`."""
        encoded, size = sums_WK[..., :_ENCODING], sums_WK[..., _ENCODING:]
        # An empty rank costs nothing, whatever the net says of no tables.
        cost = self.rank_cost(encoded).detach()[..., None] * (size > 0)
        load = self.rank_branch(torch.cat([cost, size], dim=-1)).relu()
        # Every rank holds a table of zeros, so that none is empty.
        dummy = self.encoder(encoded.new_zeros(len(POLICY_FEATURES)))
        rank = torch.cat([encoded + dummy, load], dim=-1)
        state = context_C[..., None, :].expand_as(rank)
        seen = torch.cat([state, rank, state * rank], dim=-1)
        logits: torch.Tensor = self.logit(seen)[..., 0]
        return logits

    def values(self, context_C: torch.Tensor) -> torch.Tensor:
        """Expected reward in each state: `... x C` to `...`."""
        value: torch.Tensor = self.value_head(context_C)[..., 0]
        return value


def vtrace(
    log_ratios_ET: torch.Tensor,
    rewards_ET: torch.Tensor,
    values_ET: torch.Tensor,
    is_step_ET: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets of the value and advantages of the policy, both clips and discount 1.

    Args:
        log_ratios_ET: Log of the learner's over the actor's probability of each choice.
        rewards_ET: Paid after each step.
        values_ET: Of the state before each step.
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


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Training data of the cost net: sets of tables on a rank, with their costs."""

    tables_SN: npt.NDArray[np.int32]
    """Rows of all tasks' features; -1 in the padding."""
    cost_S: npt.NDArray[np.float32]
    """Forward + backward compute [ms]."""


class AutoShardTrainer(PolicyTrainer):
    """Makes plans, updates policy and value, updates the cost net; and again."""

    method = "autoshard"

    def __init__(
        self, tasks: Sequence[ShardingTask], costs: PlanCosts, config: AutoShardConfig
    ) -> None:
        """Take the training tasks and what their plans cost; only compute counts.

        Raises:
            ConfigError: There is no task.
        """
        with seeded(config.seed):
            self._net = AutoShardNet()
        super().__init__(self._net, tasks, costs, config)
        self.config = config
        self._features = torch.from_numpy(
            np.concatenate([v.features for v in self.views])
        )
        lengths = [len(v.tables) for v in self.views]
        self._first_row = np.cumsum(lengths) - lengths
        self._actor = copy.deepcopy(self._net)
        self._ranks = _Ranks(
            np.zeros((0, max(lengths)), dtype=np.int32), np.zeros(0, dtype=np.float32)
        )

    @property
    def net(self) -> AutoShardNet:
        """Table encoder, cost head, LSTM policy and value."""
        return self._net

    def step(self, iteration: int) -> Mapping[str, float]:
        """Make plans with the actor's weights and learn from them."""
        config = self.config
        rng, generator = self._begin(iteration)
        chosen = self._choose_tasks(rng)
        episodes = arrange(self._actor, [self.views[i] for i in chosen])
        rollout = roll_out(self._actor, episodes, generator)
        rewards = self._play(chosen, episodes, rollout)
        # From here on the actor has the weights from before this update.
        self._actor.load_state_dict(self.net.state_dict())
        self._update_policy(episodes, rollout, rewards)
        losses = [self._update_cost(rng) for _ in range(config.cost_updates)]
        return {
            "reward": float(rewards.mean()),
            "cost_loss": float(np.mean(losses)),
        }

    def _choose_tasks(self, rng: np.random.Generator) -> list[int]:
        chosen, steps = [], 0
        while steps < self.config.steps:
            chosen.append(int(rng.integers(len(self.tasks))))
            steps += len(self.views[chosen[-1]].tables)
        return chosen

    def _play(
        self, chosen: Sequence[int], episodes: Episodes, rollout: Rollout
    ) -> torch.Tensor:
        """Have plans costed; keep their ranks and return the rewards, `E`."""
        rewards = []
        held: list[npt.NDArray[np.int64]] = []
        costs: list[float] = []
        for e, number in enumerate(chosen):
            task, view = self.tasks[number], self.views[number]
            placement = episode_placement(task, episodes, rollout, e)
            busy_W = _compute(self.costs(task, placement))
            # Least share of a rank's memory that is left; below 0 where it overflows.
            room = 1 - np.array(placement.rank_bytes(task)) / view.caps
            even = busy_W.min() / busy_W.max()
            rewards.append(float(room.min() if room.min() < 0 else even))
            ranks = episodes.ranks(rollout.actions_ET, e)[view.tables]
            for rank in np.unique(ranks):
                held.append(self._first_row[number] + np.flatnonzero(ranks == rank))
                costs.append(float(busy_W[rank]))
        self._keep(held, costs)
        return torch.tensor(rewards)

    def _keep(
        self, held: Sequence[npt.NDArray[np.int64]], costs: Sequence[float]
    ) -> None:
        if not len(self._ranks.cost_S):
            self.net.cost_scale_ms.fill_(float(np.mean(costs)))
        new = np.full((len(held), self._ranks.tables_SN.shape[1]), -1, dtype=np.int32)
        for row, tables in zip(new, held, strict=True):
            row[: len(tables)] = tables
        self._ranks = _Ranks(
            np.concatenate([self._ranks.tables_SN, new])[-self.config.buffer :],
            np.concatenate([self._ranks.cost_S, np.array(costs, dtype=np.float32)])[
                -self.config.buffer :
            ],
        )

    def _update_policy(
        self, episodes: Episodes, rollout: Rollout, rewards_E: torch.Tensor
    ) -> None:
        """Step on policy gradient, squared error of the value, and entropy."""
        is_step = episodes.is_table_ET
        log_probs = policy_log_probs(self.net, episodes, rollout)
        taken = log_probs.gather(-1, rollout.actions_ET[..., None])[..., 0]
        values = self.net.values(self.net.context(episodes))
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
        self._optimize(loss)

    def _update_cost(self, rng: np.random.Generator) -> float:
        """Step on the squared error of ranks in the buffer."""
        picked = rng.integers(len(self._ranks.cost_S), size=self.config.cost_batch)
        tables_SN = self._ranks.tables_SN[picked]
        rank, place = np.nonzero(tables_SN >= 0)
        encoded = self.net.encode(self._features[tables_SN[rank, place]])
        sums = encoded.new_zeros(len(picked), encoded.shape[1])
        sums = sums.index_add(0, torch.from_numpy(rank), encoded)
        wanted = torch.from_numpy(self._ranks.cost_S[picked]) / self.net.cost_scale_ms
        loss = nn.functional.mse_loss(self.net.rank_cost(sums), wanted)
        self._optimize(loss)
        return float(loss.detach())

    def _optimize(self, loss: torch.Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        limit = self.config.max_gradient_norm
        nn.utils.clip_grad_norm_(self.net.parameters(), limit)
        self._optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return both sets of weights, the optimizer and the buffer."""
        return {
            "net": self.net.state_dict(),
            "actor": self._actor.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "tables": torch.from_numpy(self._ranks.tables_SN),
            "cost": torch.from_numpy(self._ranks.cost_S),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        self.net.load_state_dict(state["net"])
        self._actor.load_state_dict(state["actor"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._ranks = _Ranks(state["tables"].numpy(), state["cost"].numpy())


def _compute(costs: PredictedCosts) -> npt.NDArray[np.float64]:
    """Forward + backward of each rank [ms]."""
    return np.array([r.fwd_compute + r.bwd_compute for r in costs.ranks])


class AutoShardSearcher(PolicySearcher):
    """Places tables as a trained AutoShard policy does.

    `faithful_memory=True` offers every rank whatever it holds, as the released code
    does.
    """

    method = "autoshard"

    @staticmethod
    def make_net() -> AutoShardNet:
        """Return an untrained net."""
        return AutoShardNet()

    @staticmethod
    def paper_memory(task: ShardingTask) -> tuple[list[float], list[float]]:
        """No limit."""
        return [0.0] * len(task.tables), [np.inf] * task.world_size
