"""The loop that all trainings share: what it keeps, and what it hands on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from torchrec_neuroshard.training.fit import Fit, fit, seeded


class Members(nn.Module):
    """Two members with a weight and a bias each; every step adds 1 to all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.bias = nn.Parameter(torch.zeros(2))

    def loss(self, _: int) -> torch.Tensor:
        return -self.weight.sum() - self.bias.sum()


def run(network: Members, errors: Sequence[torch.Tensor | float]) -> Fit:
    return fit(
        network,
        torch.optim.SGD(network.parameters(), lr=1.0),
        [[epoch] for epoch, _ in enumerate(errors)],
        network.loss,
        iter(errors).__next__,
    )


def test_each_member_keeps_its_own_best_epoch() -> None:
    network = Members()
    errors = [torch.tensor(e) for e in ([3.0, 3.0], [1.0, 4.0], [2.0, 2.0])]
    best = run(network, errors)
    assert best.error.tolist() == [1.0, 2.0] and best.epoch.tolist() == [2, 3]
    assert network.weight.tolist() == [[2.0] * 3, [3.0] * 3]
    assert network.bias.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("errors", "best"),
    [
        ([1.0, 1.0, 1.0], 1),  # of equals the first
        ([1.0, 1.0 - 1e-15, 1.0], 2),  # not in float32
        ([math.nan, math.nan], 0),  # no epoch: the weights that it began with
    ],
)
def test_one_error_is_of_the_whole_network(errors: list[float], best: int) -> None:
    network = Members()
    assert int(run(network, errors).epoch) == best
    assert network.weight.tolist() == [[float(best)] * 3] * 2
    assert network.bias.tolist() == [float(best)] * 2


def test_seed_decides_and_leaves_the_callers_state() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    drawn = []
    for seed in (1, 1, 2):
        with seeded(seed):
            assert torch.get_num_threads() == 1
            drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
