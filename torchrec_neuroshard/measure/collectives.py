"""TorchRec's collectives, each with its buffers and the copies around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrec_neuroshard.measure.kernels import permute_bags

__all__ = ["CollectiveRunner"]

# The names of torch 2.13; older ones have only the second.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor
)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveRunner:
    """One collective with its buffers, as TorchRec issues it on this rank.

    The pooled all-to-all comes with TorchRec's copies around it: into the send buffer,
    and from rank-major to row-major order. So do its fresh output buffers. Gradients,
    which the backward one and the all-gather bring, are divided by the ranks. The index
    all-to-all comes with the permutations of a KeyedJaggedTensor's features before and
    after it.
    Source: torchrec.distributed.comm_ops and dist_data, 1.8.
    """

    def __init__(
        self,
        collective: str,
        bytes_per_peer: Sequence[int],
        batch_size: int,
        lengths_share: float,
        *,
        process_group: dist.ProcessGroup | None,
        rank: int,
        device: torch.device,
    ) -> None:
        """Make the inputs.

        Args:
            collective: One of `COLLECTIVES`.
            bytes_per_peer: As in `CommsRecord`.
            batch_size: Samples of a rank; the pooled collectives' bytes are rows of so
                many samples.
            lengths_share: Of the index all-to-all: share of its bytes that are lengths.
            process_group: Ranks that take part; None is all.
            rank: This rank's place among them.
            device: Where the buffers are.
        """
        self._group, self._device = process_group, device
        self._batch_size = batch_size
        self._world_size = len(bytes_per_peer)
        world_size, mine = self._world_size, bytes_per_peer[rank]
        self._columns = [b // 4 // batch_size for b in bytes_per_peer]
        self._my_columns = self._columns[rank]
        self.output: torch.Tensor | tuple[torch.Tensor, ...] = torch.empty(0)
        self.run: Callable[[], None]
        """Issue it and wait for it; the result is in `output`."""
        if collective == "pooled_forward":
            self._input = self._values(batch_size * world_size, self._my_columns)
            self.run = self._pooled_forward
        elif collective == "pooled_backward":
            self._input = self._values(batch_size, sum(self._columns))
            self.run = self._pooled_backward
        elif collective == "index":
            self._prepare_index(bytes_per_peer, lengths_share, rank)
            self.run = self._index
        elif collective == "reduce_scatter":
            self._input = self._values(world_size, mine // 4)
            self.run = self._reduce_scatter
        elif collective == "all_gather":
            self._input = self._values(1, mine // 4)
            self.run = self._all_gather
        else:
            self._input = self._values(world_size, mine // 4)
            self.run = self._all_reduce

    def _prepare_index(
        self, bytes_per_peer: Sequence[int], lengths_share: float, rank: int
    ) -> None:
        """Make bags of ids, as many for a peer as its share of lengths says."""
        values = [b // 8 for b in bytes_per_peer]
        wanted = [max(1, round(v * lengths_share)) for v in values if v]
        batch = self._batch_size = min(self._batch_size, *wanted)
        features = [
            max(1, round(v * lengths_share) // batch) if v else 0 for v in values
        ]
        ids = [v - batch * n for v, n in zip(values, features, strict=True)]
        self._sends = [[batch * n for n in features], ids]
        self._receives = [[n[rank]] * self._world_size for n in self._sends]
        device = self._device
        lengths = [
            _even_lengths(count, batch * n)
            for count, n in zip(ids, features, strict=True)
            if n
        ]
        self._lengths = torch.cat(lengths).to(device).view(-1, batch)
        self._ids = torch.zeros(sum(ids), dtype=torch.int64, device=device)
        mine = features[rank]
        # Each peer's features in reverse; afterwards from rank-major to feature-major.
        starts = np.cumsum([0, *features])
        order = [
            start + n - 1 - i
            for start, n in zip(starts, features, strict=False)
            for i in range(n)
        ]
        back = [w * mine + i for i in range(mine) for w in range(self._world_size)]
        self._order, self._recat = (
            torch.tensor(o, dtype=torch.int32, device=device) for o in (order, back)
        )

    def set_input(self, values: torch.Tensor) -> None:
        """Replace the fp32 input by another of the same shape."""
        assert values.shape == self._input.shape
        self._input = values

    def _values(self, rows: int, columns: int) -> torch.Tensor:
        return torch.ones(rows, columns, device=self._device)

    def _exchange(
        self, output: torch.Tensor, send: torch.Tensor, out: list[int], into: list[int]
    ) -> Any:
        return dist.all_to_all_single(
            output, send, out, into, group=self._group, async_op=True
        )

    def _splits(self) -> tuple[list[int], list[int]]:
        """Values from each rank, and to each rank, in the forward direction."""
        sources = [self._batch_size * c for c in self._columns]
        return sources, [self._batch_size * self._my_columns] * self._world_size

    def _pooled_forward(self) -> None:
        sources, targets = self._splits()
        output = torch.empty(sum(sources), device=self._device)
        send = torch.empty(self._input.numel(), device=self._device)
        send.copy_(self._input.view(-1))
        self._exchange(output, send, sources, targets).wait()
        parts = torch.split(output, sources)
        self.output = torch.cat(
            [
                p.view(self._batch_size, c)
                for p, c in zip(parts, self._columns, strict=True)
            ],
            dim=1,
        )

    def _pooled_backward(self) -> None:
        sources, targets = self._splits()
        by_rank = torch.split(self._input, self._columns, dim=1)
        send = torch.cat([g.contiguous().view(-1) for g in by_rank])
        output = torch.empty(sum(targets), device=self._device)
        self._exchange(output, send, targets, sources).wait()
        shape = (self._batch_size * self._world_size, self._my_columns)
        self.output = output.view(shape).div_(self._world_size)

    def _index(self) -> None:
        lengths, ids = permute_bags(self._order, self._lengths, self._ids)
        permuted = lengths.view(-1), ids
        splits = torch.tensor(
            [[*counts, self._batch_size] for counts in zip(*self._sends, strict=True)],
            device=self._device,
        ).flatten()
        received = torch.empty_like(splits)
        dist.all_to_all_single(
            received, splits, group=self._group, async_op=True
        ).wait()
        received.tolist()  # TorchRec reads them to make room
        outputs, pending = [], []
        for sent, into, out in zip(permuted, self._sends, self._receives, strict=True):
            outputs.append(torch.empty(sum(out), dtype=sent.dtype, device=self._device))
            pending.append(self._exchange(outputs[-1], sent, out, into))
        for work in pending:
            work.wait()
        lengths, ids = outputs
        if len(self._recat):
            by_feature = lengths.view(-1, self._batch_size)
            lengths, ids = permute_bags(self._recat, by_feature, ids)
        self.output = lengths.view(-1), ids

    def _reduce_scatter(self) -> None:
        output = self._input.new_empty((1, self._input.shape[1]))
        _reduce_scatter(output, self._input, group=self._group, async_op=True).wait()
        self.output = output

    def _all_gather(self) -> None:
        output = self._input.new_empty((self._world_size, self._input.shape[1]))
        _all_gather(output, self._input, group=self._group, async_op=True).wait()
        self.output = output.div_(self._world_size)

    def _all_reduce(self) -> None:
        dist.all_reduce(self._input, group=self._group, async_op=True).wait()
        self.output = self._input


def _even_lengths(num_ids: int, num_bags: int) -> torch.Tensor:
    """Spread ids over bags."""
    lengths = torch.full((num_bags,), num_ids // num_bags, dtype=torch.int64)
    lengths[: num_ids % num_bags] += 1
    return lengths
