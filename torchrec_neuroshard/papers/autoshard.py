"""AutoShard (KDD 2022, arXiv 2208.06399): an LSTM policy trained to balance compute.

Tables are placed one after another, costliest first. An LSTM reads the tables. A small
net computes each rank's logit from the LSTM's state and from the rank's tables: the sum
of their encodings, their predicted cost and their memory.

Training rewards balance: the compute of the least busy rank divided by that of the
busiest. A slow but even plan is therefore as good as a quick one, and collectives do
not count. We keep this, since it is the method.

The architecture is the paper's. As in the released code, each rank holds a dummy table
of zeros. Unlike the released code, the policy cannot choose a rank without room.

`benchmarks/papers/policies.py` trains the policy, the value head and the cost head.

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
_STATE = 64
_SIZE = POLICY_FEATURES.index("size")


class AutoShardNet(PolicyNet):
    """AutoShard's net: table encoder, cost head, LSTM policy and value head."""

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
        """Return standardised features; the size stays raw, as in the paper."""
        standard = super().standardise(features).clone()
        standard[..., _SIZE] = features[..., _SIZE]
        return standard

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """Return the encodings of tables, `... x 32`."""
        encoded: torch.Tensor = self.encoder(self.standardise(features))
        return encoded

    def rank_cost(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the compute of ranks from their sums: `... x 32` to `...`."""
        cost: torch.Tensor = self.cost_head(sums)[..., 0]
        return cost

    def single_costs(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Return the predicted compute of each table alone."""
        return self.rank_cost(self.encode(features_NF))

    def items(self, features_ETF: torch.Tensor) -> torch.Tensor:
        """Return encodings and sizes, which are summed per rank."""
        encoded = self.encode(features_ETF)
        return torch.cat([encoded, features_ETF[..., _SIZE : _SIZE + 1]], dim=-1)

    def context(
        self, features_ETF: torch.Tensor, count_E: torch.Tensor
    ) -> torch.Tensor:
        """Return the LSTM's state before each table is placed, `E x T x 64`."""
        encoded = self.encode(features_ETF)
        step = torch.arange(encoded.shape[1], dtype=encoded.dtype)
        assigned = (step / count_E[:, None])[..., None]
        inputs = torch.cat([encoded, self.fraction(assigned).relu()], dim=-1)
        states: torch.Tensor = self.lstm(inputs)[0]
        return states

    def logits(self, sums_WK: torch.Tensor, context_C: torch.Tensor) -> torch.Tensor:
        """Return the logit of each rank, as `PolicyNet.logits`."""
        encoded, size = sums_WK[..., :_ENCODING], sums_WK[..., _ENCODING:]
        # An empty rank costs nothing, whatever the net predicts for it.
        cost = self.rank_cost(encoded).detach()[..., None] * (size > 0)
        load = self.rank_branch(torch.cat([cost, size], dim=-1)).relu()
        # Every rank has a dummy table of zeros.
        dummy = self.encoder(encoded.new_zeros(len(POLICY_FEATURES)))
        rank = torch.cat([encoded + dummy, load], dim=-1)
        state = context_C[..., None, :].expand_as(rank)
        seen = torch.cat([state, rank, state * rank], dim=-1)
        logits: torch.Tensor = self.logit(seen)[..., 0]
        return logits


class AutoShardSearcher(PolicySearcher):
    """Places whole tables by a trained AutoShard policy."""

    method, net_type = "autoshard", AutoShardNet
