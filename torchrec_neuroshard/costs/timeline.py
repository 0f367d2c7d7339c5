"""The embedding part of an iteration as TorchRec runs it, without waits between types.

A rank has one stream of kernels, and all ranks share one stream of collectives. A
*stage* holds the tables of one sharding type of a module.

- Forward, a rank looks up one stage after another. The exchange of a stage's outputs
  starts when all ranks have looked it up, while they go on with the next stage. The
  module waits once, at the end, and then reorders the columns of split tables.
- Backward, the gradients of all stages are sent first, the last stage's first. A rank
  updates a stage's tables as soon as their gradients are there. Gradients of replicas
  are reduced after their kernel.

Read from its end, the forward pass is the backward pass. With kernels `k`, exchanges
`x`, and neither reordering nor replicas, each takes

    max over j of (max over ranks of sum of k[s <= j]) + sum of x[s >= j]

Source: `compute_and_output_dist` in torchrec/distributed/embeddingbag.py, and the order
of autograd.

Shapes: `W` ranks, `S` stages in TorchRec's order, which is the order of each type's
first table in the module. All arrays may have more leading axes, such as candidates.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def pass_ms(
    kernels_WS: Floats,
    exchanges_S: Floats,
    orders_S: Floats | None = None,
    reductions_S: Floats | None = None,
) -> Floats:
    """Return how long a forward or a backward pass takes the last rank [ms].

    Args:
        kernels_WS: Kernels of each rank and stage [ms].
        exchanges_S: Exchange of each stage's outputs or gradients, on its slowest rank
            [ms].
        orders_S: Reordering of each stage's columns, equal on all ranks [ms]. None: no
            table is split.
        reductions_S: All-reduce of each stage's gradients of replicas, in the backward
            pass [ms]. None: no table is replicated.
    """
    # In the order of the backward pass.
    ordered = sent = np.zeros(exchanges_S.shape[:-1])
    stages = range(exchanges_S.shape[-1] - 1, -1, -1)
    arrivals = []
    for s in stages:
        if orders_S is not None:
            ordered = ordered + orders_S[..., s]
        sent = np.maximum(sent, ordered) + exchanges_S[..., s]
        arrivals.append(sent)
    end_W = np.broadcast_to(ordered[..., None], kernels_WS.shape[:-1])
    for s, arrival in zip(stages, arrivals, strict=True):
        end_W = np.maximum(end_W, arrival[..., None]) + kernels_WS[..., s]
        if reductions_S is not None:
            reduced = np.maximum(sent, end_W.max(axis=-1)) + reductions_S[..., s]
            sent = np.where(reductions_S[..., s] > 0, reduced, sent)
    end: Floats = np.maximum(end_W.max(axis=-1), sent)
    return end
