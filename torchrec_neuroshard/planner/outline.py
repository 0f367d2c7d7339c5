"""A model's outline: its modules and the shapes of its weights, without the weights.

`DistributedModelParallel` replaces modules of a model by sharded ones. To plan the
model again later, the planner keeps its outline, which needs almost no memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchrec_neuroshard.planner.compat import optimizer_attributes

_HOLDING = (torch.Tensor, nn.Module, dict, list, tuple)


def outline_of(module: nn.Module) -> nn.Module:
    """Return a copy with parameters and buffers on the "meta" device.

    Everything else is shared with the module.
    """
    copied: nn.Module = _outline(module, {})
    return copied


def _outline(value: Any, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, nn.Module):
        new: Any = type(value).__new__(type(value))
        known[id(value)] = new
        new.__dict__.update(vars(value))
        for name, held in vars(value).items():
            # Most attributes of modules are numbers and empty dictionaries.
            if isinstance(held, (dict, list, tuple)) and not held:
                continue
            if isinstance(held, _HOLDING):
                new.__dict__[name] = _outline(held, known)
        return new
    if isinstance(value, torch.Tensor):
        known[id(value)] = _weightless(value)
        return known[id(value)]
    if isinstance(value, dict) and any(map(_is_held, value.values())):
        found = type(value)()
        found.update({k: _outline(v, known) for k, v in value.items()})
        return found
    if type(value) in (list, tuple) and any(map(_is_held, value)):
        return type(value)(_outline(v, known) for v in value)
    return value


def _is_held(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, nn.Module))


def _weightless(tensor: torch.Tensor) -> torch.Tensor:
    new = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    new.__dict__.update(optimizer_attributes(tensor))
    return new
