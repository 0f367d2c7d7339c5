"""The loop that trains every net on samples, and what it starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchrec_neuroshard.hardware.devices import torch_threads

__all__ = ["fit", "seeded", "shuffled_batches"]

_Batch = TypeVar("_Batch")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw first weights from a seed, on one thread; leave the caller's state alone."""
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def shuffled_batches(
    rng: np.random.Generator,
    samples: int | npt.NDArray[np.int64],
    batch_size: int,
    num_epochs: int,
) -> Iterator[list[npt.NDArray[np.int64]]]:
    """Yield each epoch's batches: all samples once, in another order each time.

    Args:
        rng: Draws an order when its epoch begins.
        samples: Which ones, or how many.
        batch_size: Samples of a batch; the last one of an epoch may be smaller.
        num_epochs: Epochs.
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
    validate: Callable[[], torch.Tensor | float],
    *,
    max_grad_norm: float | None = None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> torch.Tensor:
    """Train a network, and leave it with the weights of its best epoch.

    Args:
        network: Where it is an ensemble whose `validate` returns one error per member,
            the first dimension of all parameters is the member: each keeps its own
            best epoch.
        optimizer: Of its parameters.
        epochs: The batches of each epoch.
        loss: Loss of a batch.
        validate: Called without gradients after each epoch; returns the error to
            choose by.
        max_grad_norm: Gradients are scaled down to this norm.
        schedule: Of the learning rate, stepped after every batch.

    Returns:
        The best epoch, counted from 1, of each member or of all; 0 where no epoch's
        error was a number.
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
        with torch.no_grad():
            error = torch.as_tensor(validate(), dtype=torch.float64)
            improved = error < least
            least = torch.where(improved, error, least)
            best_epoch = torch.where(improved, epoch + 1, best_epoch)
            for name, parameter in parameters.items():
                rest = (1,) * (parameter.dim() - improved.dim())
                chosen = improved.view(improved.shape + rest)
                kept[name] = torch.where(chosen, parameter, kept[name])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    return best_epoch
