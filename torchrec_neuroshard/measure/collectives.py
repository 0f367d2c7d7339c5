"""Draw and run TorchRec's collectives, for measurements.

`sample_collective` draws a collective, as a pure function of a seed. `CollectiveRunner`
runs it by TorchRec's own modules, with their copies and work on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import KJTAllToAll, PooledEmbeddingsAllToAll
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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
    """Runs one collective as a sharded module does on this rank.

    The exchanges of ids and of pooled outputs are TorchRec's. Gradients, which the
    backward all-to-all and the all-gather transfer, are divided by the number of ranks.
    The exchange of ids begins with a permutation of the features, as they are sorted by
    rank.
    Source: torchrec.distributed.dist_data and comm_ops, 1.8.
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
        group = dist.group.WORLD if process_group is None else process_group
        assert group is not None
        self._group, self._device = group, device
        self._world_size = world_size = len(sampled.bytes_per_peer)
        self.run: Callable[[], Any] = getattr(self, f"_{sampled.collective}")
        """Run the collective, wait for it and return its result."""
        if sampled.collective == "index":
            self._prepare_index(sampled)
            return
        values = [b // _VALUE_BYTES for b in sampled.bytes_per_peer]
        columns = [v // sampled.batch_size for v in values]
        shape = (world_size, values[rank])
        if sampled.collective == "all_gather":
            shape = (1, values[rank])
        elif sampled.collective.startswith("pooled"):
            shape = (sampled.batch_size * world_size, columns[rank])
            self._pooled = PooledEmbeddingsAllToAll(group, columns, device)
        self.input = torch.ones(shape, device=device)
        if sampled.collective == "pooled_backward":
            self._leaf = self.input.requires_grad_()
            self._output = self._pooled(self._leaf).wait()
            self.input = torch.ones_like(self._output)

    def _prepare_index(self, sampled: Collective) -> None:
        """Create bags of ids; the share of lengths decides how many a peer gets."""
        values = [b // 8 for b in sampled.bytes_per_peer]
        wanted = [max(1, round(v * sampled.lengths_share)) if v else 0 for v in values]
        batch = self._batch_size = min(sampled.batch_size, *filter(None, wanted))
        features = [w // batch for w in wanted]
        ids = [v - batch * n for v, n in zip(values, features, strict=True)]
        lengths = [
            _even_lengths(count, batch * n)
            for count, n in zip(ids, features, strict=True)
            if n
        ]
        self._keys = [str(i) for i in range(sum(features))]
        self._lengths = torch.cat(lengths).to(self._device)
        self._ids = torch.zeros(sum(ids), dtype=torch.int64, device=self._device)
        # Reverse each peer's features.
        starts = np.cumsum(features) - features
        self._order = [
            int(i)
            for start, n in zip(starts, features, strict=True)
            for i in np.arange(start, start + n)[::-1]
        ]
        self._to_all = KJTAllToAll(self._group, features)

    def _pooled_forward(self) -> torch.Tensor:
        output: torch.Tensor = self._pooled(self.input).wait()
        return output

    def _pooled_backward(self) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(
            self._output, self._leaf, self.input, retain_graph=True
        )
        return gradient

    def _index(self) -> KeyedJaggedTensor:
        # A new batch, whose lengths by feature nobody has added up yet.
        batch = KeyedJaggedTensor(
            keys=self._keys,
            values=self._ids,
            lengths=self._lengths,
            stride=self._batch_size,
        )
        received: KeyedJaggedTensor = (
            self._to_all(batch.permute(self._order)).wait().wait()
        )
        return received

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
