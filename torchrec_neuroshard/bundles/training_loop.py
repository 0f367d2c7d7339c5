"""The loop that trains every net on samples, and what it starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchrec_neuroshard.hardware.devices import torch_threads

__all__ = ["Fit", "fit", "kept_line", "seeded", "shuffled_batches"]

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


def kept_line(kept: str, errors: Mapping[str, float], what: str) -> str:
    """Say in one sentence which of several models is kept and why.

    Args:
        kept: Its name.
        errors: Name -> error of each model.
        what: Which error it is.
    """
    listed = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
    return f"Kept `{kept}`, of least {what} ({listed})."


@dataclass(frozen=True, slots=True)
class Fit:
    """The best epoch, whose weights were kept; one value per member, or one."""

    error: torch.Tensor
    """Least error in validation, float64."""
    epoch: torch.Tensor
    """Counted from 1; 0 where no epoch's error was a number."""


def fit(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: Iterable[Iterable[_Batch]],
    loss: Callable[[_Batch], torch.Tensor],
    validate: Callable[[], torch.Tensor | float],
    *,
    penalty: Callable[[], torch.Tensor] | None = None,
    max_grad_norm: float | None = None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Fit:
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
        penalty: Added to each loss.
        max_grad_norm: Gradients are scaled down to this norm.
        schedule: Of the learning rate, stepped after every batch.
    """
    parameters = dict(network.named_parameters())
    kept = {name: p.detach().clone() for name, p in parameters.items()}
    best = Fit(torch.tensor(float("inf"), dtype=torch.float64), torch.tensor(0))
    for epoch, batches in enumerate(epochs):
        for batch in batches:
            value = loss(batch)
            optimizer.zero_grad()
            whole = value if penalty is None else value + penalty()
            whole.backward()  # type: ignore[no-untyped-call]
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
        with torch.no_grad():
            error = torch.as_tensor(validate(), dtype=torch.float64)
            improved = error < best.error
            best = Fit(
                torch.where(improved, error, best.error),
                torch.where(improved, epoch + 1, best.epoch),
            )
            for name, parameter in parameters.items():
                rest = (1,) * (parameter.dim() - improved.dim())
                chosen = improved.view(improved.shape + rest)
                kept[name] = torch.where(chosen, parameter, kept[name])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    return best
