"""Helpers of the papers' searches: nets, memory, whole-table plans, results."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
from torch import nn

from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import Placement, ShardingTask
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.search.base import SearchResult
from torchrec_neuroshard.search.shards import Floats, Ints, placement_from_widths

PAPER_BATCH_SIZE = 65_536
"""The only batch size, over all ranks, that the papers measured."""


def layers(sizes: Sequence[int], relu_last: bool = False) -> nn.Sequential:
    """Return linear layers with ReLU between them, and after the last if asked."""
    parts: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        parts += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(parts if relu_last else parts[:-1]))


def whole_bytes(task: ShardingTask) -> Floats:
    """Return the memory of each whole table [bytes]."""
    return np.array(
        [task.shard_bytes(i, t.embedding_dim) for i, t in enumerate(task.tables)]
    )


def whole_widths(task: ShardingTask, rank_T: Ints) -> Ints:
    """Return `T x W` widths, with every table whole on its rank in `rank_T`."""
    width_TW = np.zeros((len(task.tables), task.world_size), dtype=np.int64)
    width_TW[np.arange(len(task.tables)), rank_T] = [
        t.embedding_dim for t in task.tables
    ]
    return width_TW


def whole_placement(task: ShardingTask, rank_T: Ints) -> Placement:
    """Return the placement with every table whole on its rank in `rank_T`."""
    return placement_from_widths(whole_widths(task, rank_T))


def finish(
    placement: Placement,
    simulator: Simulator,
    start: float,
    num_evaluated: int,
    *,
    warnings: Iterable[str] = (),
) -> SearchResult:
    """Return the result of a search, with the placement's predicted costs.

    These methods have no lower bound, so the gap is infinite.

    Args:
        placement: The placement found, already checked.
        simulator: Predicts with the models that the search was given.
        start: `time.monotonic()` at the start of the search.
        num_evaluated: Number of rank sets that were priced.
        warnings: Texts of the result's notes.
    """
    return SearchResult(
        placement=placement,
        predicted=simulator.evaluate(placement),
        lower_bound_ms=0.0,
        gap=math.inf,
        search_seconds=time.monotonic() - start,
        num_evaluated=num_evaluated,
        notes=tuple(Note("search", text) for text in warnings),
    )
