"""Choices of ways; `tests/fuzz` compares small tasks with every plan."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from tests.builders import make_tables, make_task, run_search
from tests.fuzz.against_truth import build, models, table
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.costs.simulator import Simulator
from torchrec_neuroshard.search import NeuroShardSearcher
from torchrec_neuroshard.search.choices import MIN_SINGLE_GAIN, Choices
from torchrec_neuroshard.search.shards import ShardBank
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel


def test_no_switch_of_a_single_table_improves_a_choice() -> None:
    """Most steps switch many tables; the last steps switch single tables."""
    rng = np.random.default_rng(5)
    tables = [
        table(
            int(10 ** rng.uniform(2, 7)),
            128,
            *("column_wise", "row_wise", "table_row_wise"),
            pooling=float(rng.integers(1, 101)),
        )
        for _ in range(12)
    ]
    task = build({"ranks": 16, "node": 8, "tables": tables})
    task = dataclasses.replace(task, batch_size=2**15)
    simulator = Simulator(task, load_cost_model("cpu"), AnalyticCommsModel(3.0))
    choices = Choices(ShardBank(simulator))
    [found, *_] = choices.starts(math.inf)
    [found_ms] = choices.costs(found[None])
    for number, ways in enumerate(choices.ways):
        others = np.repeat(found[None], len(ways), axis=0)
        others[:, number] = ways
        assert choices.costs(others).min() >= found_ms * (1 - MIN_SINGLE_GAIN)


@pytest.mark.parametrize("kind", ["row_wise", "table_row_wise", "data_parallel"])
def test_distinct_parts_represent_all_ranks_of_a_block(kind: str) -> None:
    rows = [1, 2, 5, 6, 8, 9]  # equal parts, a smaller last part, ranks without rows
    task = make_task(
        make_tables([8] * 6, rows, 2.0),
        8,
        local_world_size=4,
        sharding_types=(kind,) * 6,
    )
    bank = ShardBank(Simulator(task, *models(0)))
    place, rank, alike = bank.parts(np.arange(len(rows)))
    found = bank.rows(place, bank.dims_T[place], rank)
    for number in range(len(rows)):
        size = int(bank.block_T[number])
        same = np.full(size, number)
        every = bank.rows(same, bank.dims_T[same], np.arange(size))
        own = place == number
        assert sorted(np.repeat(found[own], alike[own])) == sorted(every)
        assert len(set(found[own].tolist())) == len(set(every.tolist()))


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_a_start_of_each_type_has_only_some_tables_in_host_memory(
    kind: str,
) -> None:
    rng = np.random.default_rng(0)
    rows = [int(10 ** rng.uniform(3, 6)) for _ in range(20)]
    ways = [*itertools.product(("column_wise", "row_wise"), (None, "uvm"))]
    tables = [table(n, 64, *ways, pooling=float(rng.integers(1, 51))) for n in rows]
    room = sum(rows) * 64 * 4 * 0.5 / 4
    task = build({"ranks": 4, "node": 4, "tables": tables, "memory": [int(room)] * 4})
    simulator = Simulator(task, load_cost_model("cpu"), AnalyticCommsModel(0.3))
    starts = Choices(ShardBank(simulator)).starts(math.inf)
    assert any(
        {task.sharding_types[way] for way in ways} == {kind}
        and {task.kernels[way] is None for way in ways} == {True, False}
        for ways in starts
    )


def test_a_table_that_no_rank_can_hold_whole_is_priced_in_column_shards() -> None:
    """Each column shard repeats the table's lookups."""
    task = make_task(make_tables([128] * 9, 10**5, [100.0, *[4.0] * 8]), 4, 2**14)
    models = AnalyticCostModel(), AnalyticCommsModel(1e9)
    choices = Choices(ShardBank(Simulator(task, *models)))
    [balanced_ms] = choices.costs(np.arange(9)[None])
    found_ms = run_search(
        NeuroShardSearcher(), task, *models
    ).predicted.critical_path_ms
    assert balanced_ms == pytest.approx(found_ms)


def test_several_costly_tables_are_spread_together() -> None:
    """One table in rows gains nothing while another one is the bottleneck."""
    tables = [
        table(rows, 4, "column_wise", "row_wise", pooling=pooling)
        for rows, pooling in [(10**6, 60.0)] * 5 + [(10**4, 2.0)] * 20
    ]
    task = build({"ranks": 8, "node": 8, "tables": tables})
    simulator = Simulator(task, load_cost_model("cpu"), AnalyticCommsModel(1.0))
    starts = Choices(ShardBank(simulator)).starts(math.inf)
    spread = [
        [n for n, way in enumerate(ways) if task.sharding_types[way] == "row_wise"]
        for ways in starts
    ]
    assert [0, 1, 2, 3, 4] in spread
