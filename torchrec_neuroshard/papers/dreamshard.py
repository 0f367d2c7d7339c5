"""DreamShard (NeurIPS 2022, arXiv 2210.02023): cost net, policy net, estimated MDP.

Tables are placed one after another, costliest first. For each rank the policy sees the
sum of its tables' encodings and three predictions of the cost net: forward compute,
backward all-to-all and backward compute. It does not see the next table. The
architecture is the paper's. Two things differ from the released code:

- Features are standardised by statistics of the training tables, which are stored with
  the weights. The released code standardises each task by itself, so one table has
  different features in different tasks.
- The policy cannot choose a rank without room. The released code crashes if no rank has
  room.

Paper and code do not say what an empty rank's sum is; here it is zero.
`benchmarks/papers/policies.py` trains both nets.

Shapes: as in `policies`.
"""

from __future__ import annotations

import torch
from torch import nn

from torchrec_neuroshard.papers.common import layers
from torchrec_neuroshard.papers.policies import (
    POLICY_FEATURES,
    PolicyNet,
    PolicySearcher,
)

_ENCODING = 32


class DreamShardNet(PolicyNet):
    """DreamShard's cost net and policy net, each with its own encoder."""

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
        """Return the cost net's encodings of tables, `... x 32`."""
        encoded: torch.Tensor = self.cost_encoder(self.standardise(features))
        return encoded

    def rank_costs(self, sums: torch.Tensor) -> torch.Tensor:
        """Return forward compute, backward all-to-all, backward compute, `... x 3`."""
        return torch.cat([head(sums) for head in self.rank_heads], dim=-1)

    def single_costs(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Return the sum of the three predictions for each table alone."""
        return self.rank_costs(self.encode(features_NF)).sum(dim=-1)

    def items(self, features_ETF: torch.Tensor) -> torch.Tensor:
        """Return encodings of the cost net, without gradient, and of the policy net."""
        standard = self.standardise(features_ETF)
        encodings = self.cost_encoder(standard).detach(), self.policy_encoder(standard)
        return torch.cat(encodings, dim=-1)

    def context(
        self, features_ETF: torch.Tensor, count_E: torch.Tensor
    ) -> torch.Tensor:
        """Return no values: the policy does not see the next table."""
        return features_ETF[..., :0]

    def logits(self, sums_WK: torch.Tensor, context_C: torch.Tensor) -> torch.Tensor:
        """Return the logit of each rank, as `PolicyNet.logits`."""
        costs = self.rank_costs(sums_WK[..., :_ENCODING]).detach()
        seen = torch.cat([sums_WK[..., _ENCODING:], self.cost_branch(costs)], dim=-1)
        logits: torch.Tensor = self.logit(seen)[..., 0]
        return logits


class DreamShardSearcher(PolicySearcher):
    """Places whole tables by a trained DreamShard policy."""

    method, net_type = "dreamshard", DreamShardNet
