"""What the tests of both placement policies share."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from torchrec_neuroshard.baselines.policies import (
    Policy,
    PolicyInfo,
    PolicyNet,
    PolicySearcher,
)
from torchrec_neuroshard.placement import ShardingTask

__all__ = ["Tasks", "as_searcher", "equal_weights"]

Tasks = tuple[tuple[ShardingTask, ...], tuple[ShardingTask, ...]]
"""To train on, and to test on."""

Kind = TypeVar("Kind", bound=PolicySearcher)


def as_searcher(kind: type[Kind], net: PolicyNet) -> Kind:
    info = PolicyInfo(
        method=kind.method, name="test", hardware="none", ranges={}, trained_on={}
    )
    return kind(Policy(net.eval(), info))


def equal_weights(a: Any, b: Any) -> bool:
    """Of the nets of two trainers."""
    states = a.net.state_dict(), b.net.state_dict()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])
