"""The training loop of all networks, with seeded weights and shuffled batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchrec_neuroshard.hardware.devices import torch_threads

_Batch = TypeVar("_Batch")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the initial weights, on one thread; the caller's random state stays."""
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def shuffled_batches(
    rng: np.random.Generator,
    samples: int | npt.NDArray[np.int64],
    batch_size: int,
    num_epochs: int,
) -> Iterator[list[npt.NDArray[np.int64]]]:
    """Yield each epoch's batches: all samples once, in a new order each epoch.

    Args:
        rng: Draws the order at the start of each epoch.
        samples: Indices of the samples, or their number.
        batch_size: Samples of a batch; an epoch's last batch may be smaller.
        num_epochs: Number of epochs.
    """
    for _ in range(num_epochs):
        order = rng.permutation(samples)
        starts = range(0, len(order), batch_size)
        yield [order[start : start + batch_size] for start in starts]


def fit(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: Iterable[Iterable[_Batch]],
    loss: Callable[[_Batch], torch.Tensor],
    validate: Callable[[], torch.Tensor | float] | None = None,
    *,
    max_grad_norm: float | None = None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> torch.Tensor:
    """Train a network and leave it with the weights of its best or last epoch.

    Args:
        network: The network. In an ensemble, `validate` returns one error per member
            and the first dimension of every parameter is the member; each member keeps
            its own best epoch.
        optimizer: Optimizer of the network's parameters.
        epochs: The batches of each epoch.
        loss: Loss of a batch.
        validate: Called after each epoch, without gradients; returns the error that
            decides which epoch is best. Without it, the last epoch's weights stay.
        max_grad_norm: Gradients are scaled down to this norm.
        schedule: Learning-rate schedule, stepped after every batch.

    Returns:
        The best epoch, counted from 1, of the network or of each member; 0 if no
        epoch's error was a number, or without `validate`.
    """
    parameters = dict(network.named_parameters())
    kept = {name: p.detach().clone() for name, p in parameters.items()}
    best_epoch = torch.tensor(0)
    least = torch.tensor(float("inf"), dtype=torch.float64)
    for epoch, batches in enumerate(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss(batch).backward()  # type: ignore[no-untyped-call]
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
        if validate is None:
            continue
        with torch.no_grad():
            error = torch.as_tensor(validate(), dtype=torch.float64)
            improved = error < least
            least = torch.where(improved, error, least)
            best_epoch = torch.where(improved, epoch + 1, best_epoch)
            for name, parameter in parameters.items():
                rest = (1,) * (parameter.dim() - improved.dim())
                chosen = improved.view(improved.shape + rest)
                kept[name] = torch.where(chosen, parameter, kept[name])
    if validate is not None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])
    return best_epoch
