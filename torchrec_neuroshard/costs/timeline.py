"""The embedding part of an iteration as TorchRec runs it, without waits between types.

A rank has one stream of kernels, and all ranks share one stream of collectives. A
*stage* holds the tables of one sharding type of a module.

- Forward, a rank looks up one stage after another. The exchange of a stage's outputs
  starts when all ranks have looked it up, while they go on with the next stage. The
  module waits once, at the end, and then reorders the columns of split tables.
- A table-row-wise or grid stage first reduces its outputs inside each node. A rank
  waits for that before it looks the next stage up.
- Backward, the gradients of all stages are sent first, the last stage's first. A rank
  updates a stage's tables as soon as their gradients are there. Gradients of replicas
  are reduced after their kernel. Gradients of table-row-wise and grid stages are
  gathered inside each node right before their kernel.

A pass takes as long as its longest chain of work. Read from its end, the forward pass
is the backward pass, so both have the same chains. With kernels `k`, exchanges `x`, and
neither reordering nor replicas, a pass takes

    max over j of (max over ranks of sum of k[s <= j]) + sum of x[s >= j]

Source: `compute_and_output_dist` in torchrec/distributed/embeddingbag.py, and the order
of autograd.

Shapes: `W` ranks, `S` stages in TorchRec's order, which is the order of each type's
first table in the module; `J` chains. All arrays may have more leading axes, such as
candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Chains(NamedTuple):
    """All chains of a pass that can be the longest.

    A chain has kernels of one rank, and work that is equal on all ranks: reordering,
    exchanges and all-reduces. The first `S + 1` chains end with kernels in the backward
    pass; all others end with an all-reduce.
    """

    kernels_WJ: Floats
    """Kernels of each rank on each chain [ms]."""
    rest_J: Floats
    """All other work of each chain [ms]."""
    start_J: Ints
    """Index into `work_before`: the last stage whose kernels are on a chain. `S` is the
    last stage without its exchange."""
    first_J: Ints
    """The first stage whose kernels are on a chain."""
    reduced_J: Ints
    """Number of stages, from the first, whose all-reduces are on a chain."""

    @property
    def ms(self) -> Floats:
        """How long the pass takes the last rank [ms]."""
        longest: Floats = (self.kernels_WJ.max(axis=-2) + self.rest_J).max(axis=-1)
        return longest


class Inside(NamedTuple):
    """Collectives inside nodes, for which ranks wait between kernels."""

    ms_S: Floats
    """Time of each stage; 0 where ranks do not wait [ms]."""
    node_size: int
    """Ranks that wait for each other."""

    def after(self, kernels_WS: Floats) -> tuple[Floats, Floats]:
        """Return when each rank ends a stage, in the forward pass [ms].

        Returns:
            Before and after the stage's collective, in the shape of `kernels_WS`.
        """
        before_WS, after_WS = np.empty_like(kernels_WS), np.empty_like(kernels_WS)
        shape = (*kernels_WS.shape[:-2], -1, self.node_size)
        now_W = np.zeros(kernels_WS.shape[:-1])
        for s in range(kernels_WS.shape[-1]):
            now_W = now_W + kernels_WS[..., s]
            before_WS[..., s] = now_W
            ms = self.ms_S[..., s, None]
            if ms.any():
                met = now_W.reshape(shape).max(axis=-1, keepdims=True)
                met_W = np.broadcast_to(met, (*met.shape[:-1], self.node_size))
                now_W = np.where(ms > 0, met_W.reshape(now_W.shape) + ms, now_W)
            after_WS[..., s] = now_W
        return before_WS, after_WS


def chains(
    kernels_WS: Floats,
    exchanges_S: Floats,
    orders_S: Floats | None = None,
    reductions_S: Floats | None = None,
    inside: Inside | None = None,
) -> Chains:
    """Return the chains of a forward or a backward pass.

    Args:
        kernels_WS: Kernels of each rank and stage [ms].
        exchanges_S: Exchange of each stage's outputs or gradients, on its slowest rank
            [ms].
        orders_S: Reordering of each stage's columns, equal on all ranks [ms]. None: no
            table is split.
        reductions_S: All-reduce of each stage's gradients of replicas, in the backward
            pass [ms]. None: no table is replicated.
        inside: Collectives inside nodes. Chains with all-reduces leave them out.
    """
    num_stages = exchanges_S.shape[-1]
    if orders_S is not None and not orders_S.any():
        orders_S = None
    if reductions_S is not None and not reductions_S.any():
        reductions_S = None
    rest_K = work_before(exchanges_S, orders_S)
    sums_S = kernels_WS.cumsum(axis=-1)
    sums_K = np.concatenate([sums_S, sums_S[..., -1:]], axis=-1)
    met_S = sums_S if inside is None else inside.after(kernels_WS)[1]
    kernels = [np.concatenate([met_S, met_S[..., -1:]], axis=-1)]
    rest = [rest_K]
    places = [(k, 0, 0) for k in range(num_stages + 1)]
    if reductions_S is not None:
        # The last stage's replicas are reduced first.
        reduced_S = reductions_S.cumsum(axis=-1)
        used = reductions_S.reshape(-1, num_stages).any(axis=0)
        for s in np.flatnonzero(used).tolist():
            kernels.append(sums_K[..., s:] - (sums_S[..., s - 1 : s] if s else 0.0))
            rest.append(rest_K[..., s:] + reduced_S[..., s : s + 1])
            places += [(k, s, s + 1) for k in range(s, num_stages + 1)]
        # All-reduces right after all exchanges.
        kernels.append(np.zeros_like(sums_S[..., -1:]))
        rest.append(rest_K[..., :1] + reduced_S[..., -1:])
        places.append((0, num_stages, num_stages))
    return Chains(
        np.concatenate(kernels, axis=-1),
        np.concatenate(rest, axis=-1),
        *np.array(places, dtype=np.int64).T,
    )


def work_before(exchanges_S: Floats, orders_S: Floats | None = None) -> Floats:
    """Return the work before each stage's kernels in the backward pass, `S + 1` [ms].

    In the forward pass it is the work after them. The last value is without any
    exchange: kernels wait for all reordering.
    """
    num_stages = exchanges_S.shape[-1]
    rest = np.zeros((*exchanges_S.shape[:-1], num_stages + 1))
    if orders_S is None:
        rest[..., :-1] = exchanges_S[..., ::-1].cumsum(axis=-1)[..., ::-1]
        return rest
    ordered = np.zeros(exchanges_S.shape[:-1])
    for s in range(num_stages - 1, -1, -1):
        ordered = ordered + orders_S[..., s]
        rest[..., s] = exchanges_S[..., s] + np.maximum(rest[..., s + 1], ordered)
    rest[..., -1] = ordered
    return rest


def steps_before(
    start: int, exchanges_S: Floats, orders_S: Floats
) -> Iterator[tuple[int, float]]:
    """Yield the stages and times that `work_before` adds up [ms].

    Args:
        start: Index into the result of `work_before`.
        exchanges_S: Exchange of each stage.
        orders_S: Reordering of each stage.
    """
    last, first = len(exchanges_S) - 1, 0
    rest_K, ordered_S = work_before(exchanges_S, orders_S), orders_S[::-1].cumsum()
    for first in range(start, last + 1):
        yield first, float(exchanges_S[first])
        if first == last or ordered_S[last - first] >= rest_K[first + 1]:
            break
    yield from enumerate(orders_S[first:].tolist(), first)
