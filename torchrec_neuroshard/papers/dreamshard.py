"""DreamShard (NeurIPS 2022, arXiv 2210.02023): cost net, policy net, estimated MDP.

Tables are placed one after another, costliest first. The policy sees, per rank, the sum
of its tables' encodings and the cost net's three predictions for it: forward compute,
backward all-to-all and backward compute. Which table comes next it knows from the order
alone. The architecture is the paper's. Different here:

- Features are standardised by the training tables' statistics, stored with the weights.
  The released code standardises each task by itself, so that one table has different
  features in different tasks.
- A rank without room is not offered; the released code crashes where no rank has room.

Where the sources at hand are silent: nets sum a rank's tables to zero where there is
none. `benchmarks/papers/policies.py` trains both nets.

Shapes: as in `policies`.
"""

from __future__ import annotations

import torch
from torch import nn

from torchrec_neuroshard.papers.common import layers
from torchrec_neuroshard.papers.policies import (
    POLICY_FEATURES,
    Episodes,
    PolicyNet,
    PolicySearcher,
)

__all__ = ["DreamShardNet", "DreamShardSearcher"]

_ENCODING = 32


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


class DreamShardSearcher(PolicySearcher):
    """Places tables as a trained DreamShard policy does."""

    method = "dreamshard"

    @staticmethod
    def make_net() -> DreamShardNet:
        """Return an untrained net."""
        return DreamShardNet()
