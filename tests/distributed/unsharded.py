"""Sharded tables beside unsharded ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

from tests.builders import CPU


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every table of an unsharded model."""
    state = model.state_dict()
    return {k: v.detach().clone() for k, v in state.items() if "embedding" in k}


def shard_model(
    model: nn.Module,
    plan: Any,
    sharders: Any,
    kind: Any = DistributedModelParallel,
    **arguments: Any,
) -> Any:
    """Shard a model and copy its weights, since TorchRec draws new ones."""
    start = weights_of(model)
    sharded = kind(model, device=CPU, plan=plan, sharders=sharders, **arguments)
    state = sharded.state_dict()
    with torch.no_grad():
        for _, part, held in local_parts({k: state[k] for k in start}, start):
            part.copy_(held)
    return sharded


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors; 0 if they are empty."""
    assert one.shape == other.shape
    off = (one.detach() - other.detach()).abs()
    return float(off.max()) if off.numel() else 0.0


def local_parts(
    state: Mapping[str, Any], whole: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each shard on this rank, and its part of the whole tensor.

    Args:
        state: Of a sharded module.
        whole: Of an unsharded one, by the same keys.
    """
    for key, value in state.items():
        if hasattr(value, "local_shards"):
            held = [(s.tensor, s.metadata.shard_offsets) for s in value.local_shards()]
        elif hasattr(value, "to_local"):  # TorchRec's 2D parallelism keeps DTensors
            local = value.to_local()
            # A rank without shards has an offset all the same.
            held = list(zip(local.local_shards(), local.local_offsets(), strict=False))
        else:
            held = [(value, (0, 0))]
        for tensor, (top, left) in held:
            rows, width = tensor.shape
            yield key, tensor, whole[key][top : top + rows, left : left + width]


def loss_of(outputs: Mapping[str, torch.Tensor], num_samples: int) -> torch.Tensor:
    """Return a loss in which every column of every output has its own gradient."""
    total = torch.zeros(())
    for key in sorted(outputs):
        value = outputs[key]
        scale = torch.linspace(0.5, 1.5, value.shape[1])
        total = total + (value.sin() * scale).sum()
    return total / num_samples


def train_step(
    outputs: Mapping[str, torch.Tensor],
    expected: Sequence[Mapping[str, torch.Tensor]],
    rank: int,
    optimizer: torch.optim.Optimizer,
    num_samples: int,
) -> dict[str, float]:
    """Train a sharded model and an unsharded one by the same losses.

    Args:
        outputs: The sharded model's on this rank.
        expected: The unsharded model's for each rank's batch.
        rank: This rank.
        optimizer: Of the unsharded parameters, and those that no kernel trains.
        num_samples: In a rank's batch.

    Returns:
        The gap of each output on this rank.
    """
    assert outputs.keys() == expected[rank].keys()
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(outputs, num_samples))
    # Gradients are means over the ranks.
    losses = [loss_of(of_rank, num_samples) for of_rank in expected]
    torch.autograd.backward(torch.stack(losses).mean())
    optimizer.step()
    return {key: gap(value, expected[rank][key]) for key, value in outputs.items()}


def weights_gap(sharded: nn.Module, want: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of this rank's shards from whole tables."""
    state = sharded.state_dict()
    parts = local_parts({key: state[key] for key in want}, want)
    return max((gap(shard, part) for _, shard, part in parts), default=0.0)


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """Gather every sharded table; the result is the same on all ranks."""
    found = {}
    for key, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            continue
        whole = torch.zeros(value.size())
        for _, shard, part in local_parts({key: value}, {key: whole}):
            part.copy_(shard.detach())
        dist.all_reduce(whole)
        found[key] = whole
    return found


def draw_batch(
    keys: Sequence[str],
    batch_size: int,
    num_rows: int,
    seed: int,
    *,
    weighted: bool = False,
    num_ids: tuple[int, int] = (0, 3),
) -> KeyedJaggedTensor:
    """Draw bags of `num_ids` ids, from the least to the most."""
    generator = torch.Generator().manual_seed(seed)
    least, most = num_ids
    lengths = torch.randint(
        least,
        most + 1,
        (len(keys) * batch_size,),
        generator=generator,
        dtype=torch.int32,
    )
    total = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.randint(0, num_rows, (total,), generator=generator),
        lengths=lengths,
        weights=torch.rand(total, generator=generator) if weighted else None,
    )
