"""Placement rules: plans keep them, and errors name rules that contradict."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.builders import draw_tables, make_tables, make_task, run_search, search
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.costs.task import HostRows, KernelFactors, ShardingTask
from torchrec_neuroshard.errors import ConfigError, InfeasibleError
from torchrec_neuroshard.papers.choosing import ChoosingSearcher
from torchrec_neuroshard.search import SearchConfig, Searcher, SearchResult
from torchrec_neuroshard.search.feasibility import pack
from torchrec_neuroshard.search.shards import placement_from_widths
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.testing.cases import random_task

COMMS = AnalyticCommsModel(gb_per_s=10.0)
COMPUTE = AnalyticCostModel(launch_ms=0.05)


def refined(task: ShardingTask, **options: Any) -> SearchResult:
    return search(task, SearchConfig(bound="thorough", **options), COMPUTE, COMMS)


def wide_task(**options: Any) -> ShardingTask:
    """Return thirty tables on eight ranks."""
    tables = draw_tables(np.random.default_rng(11), 30, [4, 8, 12, 64])
    return make_task(tables, 8, 4096, **options)


def test_rules_are_kept() -> None:
    pinned = {5: (0, 1, 2), 6: (0, 1, 2), 17: (4,), 18: (4, 7)}
    task = wide_task(
        allowed_ranks=tuple(pinned.get(i, ()) for i in range(30)),
        together=((4, 20), (21, 22), (11, 12, 13)),
        apart=((4, 5), (20, 21, 23), (5, 6, 7), tuple(range(23, 30))),
    )
    result = refined(task, effort=0.2)
    result.placement.check(task)
    assert 0 < result.lower_bound_ms <= result.predicted.critical_path_ms


def test_rules_that_ask_for_nothing_change_nothing() -> None:
    task = wide_task()
    every = tuple(range(8))
    same = wide_task(allowed_ranks=(every,) * 30, together=((3,),), apart=((4,), ()))
    same = dataclasses.replace(same, max_shards=task.max_shards)
    assert refined(same, effort=0.1).placement == refined(task, effort=0.1).placement


@pytest.mark.parametrize(("memory", "in_host"), [(9600, 0), (9000, 1), (6000, 2)])
def test_tables_kept_together_get_the_same_way(memory: int, in_host: int) -> None:
    """Three tables of 3200 bytes are kept together; a fourth one is free.

    The three have three ways: none, the first, or the first two are in host memory.
    """
    tables = make_tables([32] * 4, 100, (9.0, 5.0, 5.0, 1.0), data_type="int8")
    ways = [*itertools.product(range(3), repeat=2), (3, 0)]
    is_out = [table < number for table, number in ways]
    slow = KernelFactors(forward=5.0, host=HostRows(gb_per_s=10.0))
    task = make_task(
        [tables[table] for table, _ in ways],
        2,
        memory_bytes=(memory, 3200),
        column_bytes=tuple(0.0 if out else 100.0 for out in is_out),
        kernels=tuple(slow if out else None for out in is_out),
        alternatives=((0, 1, 2), (3, 4, 5), (6, 7, 8)),
        together=((0, 3, 6), (1, 4, 7), (2, 5, 8)),
        uneven=False,
    )
    result = refined(task)
    result.placement.check(task)
    held = {s.table: s.rank for s in result.placement.shards}
    assert {table % 3 for table in held if table < 9} == {in_host}
    assert 0 < result.lower_bound_ms <= result.predicted.critical_path_ms


def test_packing_finds_a_placement_that_greedy_placement_misses() -> None:
    """The first two tables fill ranks 0 and 1, so the other two must share rank 2."""
    task = make_task(
        make_tables([4] * 4, [1000, 1000, 600, 400]),
        3,
        64,
        memory=16_000,
        allowed_ranks=((0, 1), (0, 1), (1, 2), ()),
        apart=((0, 3), (1, 3)),
    )
    placement = placement_from_widths(pack(task))
    placement.check(task)
    ranks = [s.rank for s in sorted(placement.shards, key=lambda s: s.table)]
    assert sorted(ranks[:2]) == [0, 1] and ranks[2:] == [2, 2]


class FindsNothing(Searcher):
    name = "nothing"

    def search(self, task: ShardingTask, simulator: Simulator) -> SearchResult:
        raise InfeasibleError("nothing found")


def packed_task() -> ShardingTask:
    """Return tables that fill both ranks; greedy placement finds no room for them."""
    sizes = [900, 870, 830, 860, 160, 820, 940, 330]
    return make_task(
        make_tables([4] * 8, sizes),
        2,
        4096,
        memory_bytes=(33_600, 57_760),
        together=((0, 1), (2, 3)),
        groups=(0, 1) * 4,
        uneven=False,
    )


def test_packing_keeps_tables_together() -> None:
    task = packed_task()
    models = AnalyticCostModel(), AnalyticCommsModel()
    found = run_search(ChoosingSearcher(FindsNothing()), task, *models)
    found.placement.check(task)


def test_packed_tables_that_are_kept_together_are_priced_once() -> None:
    told: list[float] = []
    result = search(packed_task(), SearchConfig(effort=0.0, progress=told.append))
    assert told == pytest.approx([result.predicted.critical_path_ms])


@pytest.mark.parametrize("seed", range(12))
def test_random_rules_are_kept_in_full_memory(seed: int) -> None:
    """A plan is found where another one fills all ranks to the last byte."""
    task = random_task(seed)
    [used_W] = search(task, SearchConfig(effort=0.0)).placement.rank_bytes(task)
    task = dataclasses.replace(task, memory_bytes=tuple(map(math.ceil, used_W)))
    search(task, SearchConfig(effort=0.1)).placement.check(task)


CONTRADICTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"together": ((0, 1),), "allowed_ranks": ((0,), (1, 2), (), ())},
        ConfigError,
        r"'t0' and 't1' must be together, but no rank",
    ),
    (
        {"together": ((0, 1), (1, 2)), "apart": ((0, 2),)},
        ConfigError,
        r"'t0' and 't2' must be both",
    ),
    (
        {"apart": ((0, 1, 2),), "allowed_ranks": ((0, 1),) * 3 + ((),)},
        ConfigError,
        r"'t0', 't1', 't2' must be apart, but there are too few ranks",
    ),
    (
        {"allowed_ranks": ((2,), (2,), (), ()), "memory_bytes": (10**6, 10**6, 60_000)},
        InfeasibleError,
        r"'t0', 't1' may only be on rank 2 and need",
    ),
    (
        {"together": ((0, 1),), "allowed_ranks": ((0, 1), (), (), ())}
        | {"host_column_bytes": (100.0,) * 4, "host_memory_bytes": (900, 10, 9000)},
        InfeasibleError,
        r"^tables 't0', 't1' must be together and need",
    ),
    # No two rules contradict each other, only all of them together.
    (
        {"apart": tuple(itertools.combinations(range(4), 2))},
        InfeasibleError,
        r"proven by exact packing",
    ),
]


@pytest.mark.parametrize(("rules", "kind", "message"), CONTRADICTIONS)
def test_contradictions_are_named_before_the_search(
    rules: dict[str, Any], kind: type[Exception], message: str
) -> None:
    task = make_task(make_tables([8] * 4), 3, 64, **rules)
    with pytest.raises(kind, match=message):
        refined(task)
