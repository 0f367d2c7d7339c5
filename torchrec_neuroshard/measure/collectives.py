"""Draw and run TorchRec's collectives, for measurements.

`sample_collective` draws a collective, as a pure function of a seed. `CollectiveRunner`
runs it, with its buffers and with TorchRec's copies around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchrec_neuroshard.measure.kernels import permute_bags
from torchrec_neuroshard.measure.records import Collective
from torchrec_neuroshard.measure.sets import repeated_index
from torchrec_neuroshard.models.base import COLLECTIVES

# The first names are torch 2.13's; older releases have only the second ones.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor
)
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)

REPEAT_EVERY, REPEAT_LAG = 20, 60
"""One in this many records repeats an earlier collective, at least this many records
later."""
_BYTES_MULTIPLE = 8
"""Messages have a multiple of this size: whole int64 and fp32 values."""
_VALUE_BYTES = 4
_BATCH_SIZES = (8, 8_192)
"""Smallest and largest number of samples per rank, the rows of the pooled outputs."""
_UNEVEN = ("pooled_forward", "pooled_backward", "index")
"""Collectives in which ranks may hold different numbers of bytes."""
_WEIGHTS = {
    "pooled_forward": 0.3,
    "pooled_backward": 0.3,
    "index": 0.16,
    "reduce_scatter": 0.08,
    "all_gather": 0.08,
    "all_reduce": 0.08,
}


def sample_collective(
    index: int,
    seed: int,
    bytes_per_rank: tuple[int, int],
    group_sizes: dict[str, int],
) -> Collective:
    """Return collective number `index` of a run.

    Args:
        index: Position in the run.
        seed: The run's seed; equal seeds give equal samples.
        bytes_per_rank: Smallest and largest mean number of bytes that a rank sends,
            including those to itself.
        group_sizes: Group name -> number of ranks.
    """
    repeat_of = repeated_index(index, REPEAT_EVERY, REPEAT_LAG)
    source = index if repeat_of is None else repeat_of
    rng = np.random.default_rng([seed, source])
    group = str(rng.choice(sorted(group_sizes)))
    world_size = group_sizes[group]
    collective = str(rng.choice(COLLECTIVES, p=[_WEIGHTS[c] for c in COLLECTIVES]))
    low, high = map(math.log, bytes_per_rank)
    mean_bytes = math.exp(rng.uniform(low, high))
    if collective in _UNEVEN:
        shares = _shares(rng, world_size)
    else:
        shares = np.full(world_size, 1 / world_size)
    least, most = map(math.log, _BATCH_SIZES)
    most = min(most, max(least, math.log(mean_bytes / (4 * _VALUE_BYTES * world_size))))
    batch_size = 2 * round(math.exp(rng.uniform(least, most)) / 2)
    multiple = _BYTES_MULTIPLE
    if collective.startswith("pooled"):
        multiple = _VALUE_BYTES * batch_size
    per_peer = mean_bytes * shares  # total = mean x W, over W peers each
    units = np.round(per_peer / multiple).astype(np.int64) * multiple
    if not units.any():
        units[int(per_peer.argmax())] = multiple
    return Collective(
        index=index,
        repeat_of=repeat_of,
        collective=collective,
        group=group,
        bytes_per_peer=tuple(map(int, units)),
        batch_size=batch_size,
        lengths_share=float(1 / (1 + math.exp(rng.uniform(0, math.log(50))))),
    )


def _shares(rng: np.random.Generator, world_size: int) -> npt.NDArray[np.float64]:
    """Draw the ranks' shares of all bytes, from balanced to all on one rank."""
    kind = rng.choice(["balanced", "uneven", "some", "one"], p=[0.2, 0.5, 0.2, 0.1])
    if kind == "balanced":
        return np.full(world_size, 1 / world_size)
    if kind == "one":
        return np.asarray(np.eye(world_size)[int(rng.integers(world_size))])
    shares = rng.dirichlet(np.full(world_size, math.exp(rng.uniform(-1, 4))))
    if kind == "some":  # several ranks hold nothing
        empty = rng.permutation(world_size)[: int(rng.integers(1, world_size))]
        shares[empty] = 0.0
        shares = shares / max(shares.sum(), 1e-12)
    return np.asarray(shares, dtype=np.float64)


class CollectiveRunner:
    """Runs one collective as TorchRec does on this rank, with its buffers and copies.

    The pooled all-to-all includes TorchRec's copies into the send buffer and from
    rank-major to row-major order, and the allocation of its output buffers. Gradients,
    which the backward all-to-all and the all-gather transfer, are divided by the number
    of ranks. The index all-to-all includes the permutations of a KeyedJaggedTensor's
    features before and after it.
    Source: torchrec.distributed.comm_ops and dist_data, 1.8.
    """

    def __init__(
        self,
        sampled: Collective,
        process_group: dist.ProcessGroup | None,
        rank: int,
        device: torch.device,
    ) -> None:
        """Create the inputs.

        Args:
            sampled: The collective to run.
            process_group: Group of the participating ranks; None for all ranks.
            rank: This rank's index in the group.
            device: Device of the buffers.
        """
        self._group, self._device = process_group, device
        self._world_size = world_size = len(sampled.bytes_per_peer)
        self._batch_size = batch_size = sampled.batch_size
        my_values = sampled.bytes_per_peer[rank] // _VALUE_BYTES
        self._columns = [
            b // _VALUE_BYTES // batch_size for b in sampled.bytes_per_peer
        ]
        self._my_columns = my_columns = self._columns[rank]
        # Values from and to each rank, in the forward direction.
        self._sources = [batch_size * columns for columns in self._columns]
        self._targets = [batch_size * my_columns] * world_size
        self.run: Callable[[], Any] = getattr(self, f"_{sampled.collective}")
        """Run the collective, wait for it and return its result."""
        if sampled.collective == "index":
            self._prepare_index(sampled, rank)
            return
        shapes = {
            "pooled_forward": (batch_size * world_size, my_columns),
            "pooled_backward": (batch_size, sum(self._columns)),
            "all_gather": (1, my_values),
        }
        shape = shapes.get(sampled.collective, (world_size, my_values))
        self.input = torch.ones(shape, device=device)

    def _prepare_index(self, sampled: Collective, rank: int) -> None:
        """Create bags of ids; the share of lengths decides how many a peer gets."""
        values = [b // 8 for b in sampled.bytes_per_peer]
        wanted = [max(1, round(v * sampled.lengths_share)) if v else 0 for v in values]
        batch = self._batch_size = min(self._batch_size, *filter(None, wanted))
        features = [w // batch for w in wanted]
        ids = [v - batch * n for v, n in zip(values, features, strict=True)]
        self._sends = [[batch * n for n in features], ids]
        self._receives = [[n[rank]] * self._world_size for n in self._sends]
        device, world_size, mine = self._device, self._world_size, features[rank]
        lengths = [
            _even_lengths(count, batch * n)
            for count, n in zip(ids, features, strict=True)
            if n
        ]
        self._lengths = torch.cat(lengths).to(device).view(-1, batch)
        self._ids = torch.zeros(sum(ids), dtype=torch.int64, device=device)
        # Before: reverse each peer's features. After: rank-major to feature-major.
        starts = np.cumsum(features) - features
        order = [
            np.arange(start, start + n)[::-1]
            for start, n in zip(starts, features, strict=True)
        ]
        back = np.arange(world_size * mine).reshape(world_size, mine).T.flatten()
        self._order, self._recat = (
            torch.tensor(o, dtype=torch.int32, device=device)
            for o in (np.concatenate(order), back)
        )

    def _exchange(
        self, output: torch.Tensor, send: torch.Tensor, out: list[int], into: list[int]
    ) -> Any:
        return dist.all_to_all_single(
            output, send, out, into, group=self._group, async_op=True
        )

    def _pooled_forward(self) -> torch.Tensor:
        output = torch.empty(sum(self._sources), device=self._device)
        send = torch.empty(self.input.numel(), device=self._device)
        send.copy_(self.input.view(-1))
        self._exchange(output, send, self._sources, self._targets).wait()
        parts = [
            part.view(self._batch_size, columns)
            for part, columns in zip(
                torch.split(output, self._sources), self._columns, strict=True
            )
        ]
        return torch.cat(parts, dim=1)

    def _pooled_backward(self) -> torch.Tensor:
        by_rank = torch.split(self.input, self._columns, dim=1)
        send = torch.cat([g.contiguous().view(-1) for g in by_rank])
        output = torch.empty(sum(self._targets), device=self._device)
        self._exchange(output, send, self._targets, self._sources).wait()
        shape = (self._batch_size * self._world_size, self._my_columns)
        return output.view(shape).div_(self._world_size)

    def _index(self) -> tuple[torch.Tensor, torch.Tensor]:
        lengths, ids = permute_bags(self._order, self._lengths, self._ids)
        splits = torch.tensor(
            [[*counts, self._batch_size] for counts in zip(*self._sends, strict=True)],
            device=self._device,
        ).flatten()
        received = torch.empty_like(splits)
        dist.all_to_all_single(received, splits, group=self._group)
        received.tolist()  # TorchRec reads the sizes to allocate its outputs
        outputs, pending = [], []
        sent = (lengths.view(-1), ids)
        for send, into, out in zip(sent, self._sends, self._receives, strict=True):
            outputs.append(torch.empty(sum(out), dtype=send.dtype, device=self._device))
            pending.append(self._exchange(outputs[-1], send, out, into))
        for work in pending:
            work.wait()
        lengths, ids = outputs
        if len(self._recat):
            by_feature = lengths.view(-1, self._batch_size)
            lengths, ids = permute_bags(self._recat, by_feature, ids)
        return lengths.view(-1), ids

    def _reduce_scatter(self) -> torch.Tensor:
        output = self.input.new_empty((1, self.input.shape[1]))
        _reduce_scatter(output, self.input, group=self._group, async_op=True).wait()
        return output

    def _all_gather(self) -> torch.Tensor:
        output = self.input.new_empty((self._world_size, self.input.shape[1]))
        _all_gather(output, self.input, group=self._group, async_op=True).wait()
        return output.div_(self._world_size)

    def _all_reduce(self) -> torch.Tensor:
        dist.all_reduce(self.input, group=self._group, async_op=True).wait()
        return self.input


def _even_lengths(num_ids: int, num_bags: int) -> torch.Tensor:
    """Return bag lengths that spread the ids evenly."""
    lengths = torch.full((num_bags,), num_ids // num_bags, dtype=torch.int64)
    lengths[: num_ids % num_bags] += 1
    return lengths
