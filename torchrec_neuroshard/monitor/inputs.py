"""Fresh profiles of a job's inputs, taken where batches enter the sharded modules.

A kernel sees the batch of all ranks. In place of it each rank takes as many of its own
batches as there are ranks, of its share of the features alone, so that all ranks
together count the ids of about one batch of one rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchrec_neuroshard.devices import accelerator, is_accelerator
from torchrec_neuroshard.profiles import FeatureProfile, profile_ids

__all__ = ["InputSampler"]

Ints = npt.NDArray[np.integer[Any]]


class InputSampler:
    """Takes copies of ids on their way into a model's sharded modules."""

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int,
        world_size: int,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Install the hooks.

        Args:
            model: What holds the sharded modules.
            rank: This rank, which profiles each `world_size`-th feature.
            world_size: All ranks, and how many batches make a profile.
            on_error: Called with what goes wrong in a hook, after which no more ids are
                taken.
        """
        self._rank, self._world_size, self._on_error = rank, world_size, on_error
        self._wanted = 0
        self._taps = [_Tap(self, m) for m in _outermost(model)]
        self._batches: dict[str, list[tuple[Any, Any, bool]]] = {}
        self._full: deque[str] = deque()
        self._profiles: dict[str, FeatureProfile] = {}
        self._owners: dict[str, _Tap] = {}

    @property
    def num_under_way(self) -> int:
        """Batches whose ids were sent and that no kernel has seen yet.

        A train pipeline has some; a plain loop has none between iterations.
        """
        return max((tap.num_under_way for tap in self._taps), default=0)

    def start(self) -> None:
        """Take ids of the next batches, unless some wait to be counted."""
        if not self._full and not self._batches:
            self._wanted = self._world_size
            for tap in self._taps:
                tap.num_taken = 0

    def count_one(self) -> None:
        """Profile one feature whose ids are complete, if there is one."""
        if not self._full:
            return
        feature = self._full.popleft()
        ids, lengths, weighted = zip(*self._batches.pop(feature), strict=True)
        joined = np.concatenate([_array(t) for t in lengths])
        if len(joined):
            self._profiles[feature] = profile_ids(
                np.concatenate([_array(t) for t in ids]), joined, any(weighted)
            )

    def take(self) -> dict[str, FeatureProfile]:
        """Return what was profiled since the last call."""
        profiles, self._profiles = self._profiles, {}
        return profiles

    def remove(self) -> None:
        """Take the hooks out of the model."""
        self._wanted = 0
        for tap in self._taps:
            tap.remove()

    def see(self, tap: _Tap, features: Any) -> None:
        """Take a batch on its way into a module, if any is wanted."""
        if tap.num_taken >= self._wanted:
            return
        tap.num_taken += 1
        try:
            # Features may have batches of their own, or come as something else.
            if (
                not hasattr(features, "weights_or_none")
                or features.variable_stride_per_key()
            ):
                return
            for key in sorted(features.keys())[self._rank :: self._world_size]:
                if self._owners.setdefault(key, tap) is not tap:
                    continue  # another module reads the same ids
                held = self._batches.setdefault(key, [])
                if len(held) < self._wanted and key not in self._full:
                    jagged, weights = features[key], features.weights_or_none()
                    copies = _copy(jagged.values()), _copy(jagged.lengths())
                    held.append((*copies, weights is not None))
                    if len(held) == self._wanted:
                        self._full.append(key)
        except Exception as error:
            self._wanted = 0
            self._on_error(error)


class _Tap:
    """Sees what goes into one module, and counts what comes out."""

    def __init__(self, sampler: InputSampler, module: Any) -> None:
        self._module = module
        self.num_taken = 0
        self.num_under_way = 0
        input_dist, compute = module.input_dist, module.compute_and_output_dist

        def seen_input_dist(ctx: Any, features: Any, *args: Any, **kwargs: Any) -> Any:
            sent = input_dist(ctx, features, *args, **kwargs)
            self.num_under_way += 1
            # Afterwards, when TorchRec has counted the ids of each feature.
            sampler.see(self, features)
            return sent

        def seen_compute(*args: Any, **kwargs: Any) -> Any:
            self.num_under_way -= 1
            return compute(*args, **kwargs)

        self._names = {
            "input_dist": seen_input_dist,
            "compute_and_output_dist": seen_compute,
        }
        for name, function in self._names.items():
            setattr(module, name, function)

    def remove(self) -> None:
        for name, function in self._names.items():
            if vars(self._module).get(name) is function:
                delattr(self._module, name)


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Sharded modules that are not part of another one."""
    if hasattr(model, "input_dist") and hasattr(model, "compute_and_output_dist"):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _copy(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy in the host's memory, and the event after which it is there."""
    if not is_accelerator(tensor.device.type):
        return tensor.detach().clone(), None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    device = accelerator(tensor.device.type)
    event = device.Event()
    event.record(device.current_stream(tensor.device))
    return host, event


def _array(copied: tuple[torch.Tensor, Any]) -> Ints:
    tensor, event = copied
    if event is not None:
        event.synchronize()
    array: Ints = tensor.numpy()
    return array
