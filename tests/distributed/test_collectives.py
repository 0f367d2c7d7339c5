"""What the collector of collectives runs, beside what TorchRec runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import NODE_SIZE, TWO_NODES, Jobs, Results

pytestmark = pytest.mark.distributed

WORLD_SIZE, BATCH = TWO_NODES * NODE_SIZE, 6
COLUMNS, NUM_IDS = (8, 0, 20, 4), (10, 0, 30, 20)
LENGTHS_SHARE = 0.3
"""Part of an index all-to-all that is lengths."""


def compare(rank: int) -> dict[str, bool]:
    """Whether each collective moves what TorchRec's moves."""
    from torchrec.distributed.dist_data import (
        PooledEmbeddingsAllToAll,
        PooledEmbeddingsReduceScatter,
    )

    from torchrec_neuroshard.measure.collectives import CollectiveRunner
    from torchrec_neuroshard.measure.records import Collective

    def moved(name: str, bytes_per_peer: Sequence[int], given: Any = None) -> Any:
        sampled = Collective(
            index=0,
            collective=name,
            group="world",
            bytes_per_peer=tuple(bytes_per_peer),
            batch_size=BATCH,
            lengths_share=LENGTHS_SHARE,
        )
        runner = CollectiveRunner(sampled, None, rank, torch.device("cpu"))
        if given is not None:
            assert given.shape == runner.input.shape
            runner.input = given
        return runner.run()

    group: Any = dist.group.WORLD
    equal: dict[str, bool] = {}
    torch.manual_seed(rank)

    to_all: Any = PooledEmbeddingsAllToAll(group, list(COLUMNS), torch.device("cpu"))
    embeddings = torch.randn(BATCH * WORLD_SIZE, COLUMNS[rank], requires_grad=True)
    theirs = to_all(embeddings, batch_size_per_rank=[BATCH] * WORLD_SIZE).wait()
    units = [4 * BATCH * columns for columns in COLUMNS]
    forward = moved("pooled_forward", units, embeddings.detach())
    equal["pooled_forward"] = torch.equal(forward, theirs)
    gradient = torch.randn_like(theirs)
    theirs.backward(gradient)
    assert embeddings.grad is not None
    backward = moved("pooled_backward", units, gradient)
    equal["pooled_backward"] = torch.equal(backward, embeddings.grad)

    partial = torch.randn(BATCH * WORLD_SIZE, 4, requires_grad=True)
    reduce: Any = PooledEmbeddingsReduceScatter(group)
    reduced = reduce(partial).wait()
    units = [4 * BATCH * 4] * WORLD_SIZE
    scattered = moved("reduce_scatter", units, partial.detach().view(WORLD_SIZE, -1))
    equal["reduce_scatter"] = torch.equal(scattered.view(BATCH, 4), reduced)
    gradient = torch.randn_like(reduced)
    reduced.backward(gradient)
    assert partial.grad is not None
    gathered = moved("all_gather", units, gradient.view(1, -1)).view_as(partial)
    equal["all_gather"] = torch.equal(gathered, partial.grad)

    ids = moved("index", [8 * count for count in NUM_IDS])
    received = [ids.lengths().numel(), ids.values().numel()]
    lengths = int(LENGTHS_SHARE * NUM_IDS[rank])
    expected = [lengths * WORLD_SIZE, (NUM_IDS[rank] - lengths) * WORLD_SIZE]
    equal["index"] = received == expected

    given = torch.full((WORLD_SIZE, 5), float(rank))
    total = moved("all_reduce", [4 * 5] * WORLD_SIZE, given)
    ranks = torch.full((WORLD_SIZE, 5), float(sum(range(WORLD_SIZE))))
    equal["all_reduce"] = torch.equal(total, ranks)
    return equal


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    return {"compare": lambda: compare(rank)} if num_nodes == TWO_NODES else {}


def test_collectives_compute_what_torchrec_computes(ranks: Results) -> None:
    for equal in ranks(__name__, TWO_NODES, "compare"):
        assert len(equal) == 6 and all(equal.values()), equal
