"""Tables that may be sharded in several ways, held against every plan there is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from torchrec_neuroshard.cost_models import (
    BandwidthCommsModel,
    load_comms_model,
    load_cost_model,
)
from torchrec_neuroshard.cost_models.rank_groups import RankGroups
from torchrec_neuroshard.errors import InfeasibleError
from torchrec_neuroshard.placement import KernelFactors, Placement, ShardingTask
from torchrec_neuroshard.search import NeuroShardSearcher, SearchConfig, bounds
from torchrec_neuroshard.search.balanced import balanced_bound
from torchrec_neuroshard.search.choices import MIN_SINGLE_GAIN, Choices
from torchrec_neuroshard.search.shards import (
    Floats,
    Ints,
    ShardBank,
    placement_from_widths,
)
from torchrec_neuroshard.sharding_types import SHARDING_TYPES
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel
from torchrec_neuroshard.workloads import mlperf_dlrm_v2

UVM = KernelFactors(forward=5.0, backward=7.0)
DENSE = KernelFactors(forward=1.5, backward=2.0, passes=3.0)
NUM_TASKS = 40
"""Drawn tasks of which every placement is evaluated, once for all tests."""


def random_task(seed: int, **changes: Any) -> ShardingTask:
    """A few tables of one or two modules, each with some of the ways there are."""
    rng = np.random.default_rng(seed)
    num_ranks, node = [(2, 2), (3, 3), (4, 2)][seed % 3]
    kinds: list[tuple[str, KernelFactors | None]] = [
        ("column_wise", None),
        ("row_wise", None),
        ("data_parallel", DENSE),
        ("column_wise", UVM),
    ]
    if node < num_ranks:
        kinds.append(("table_row_wise", None))
    tables: list[TableConfig] = []
    rows: list[tuple[Any, ...]] = []
    alternatives = []
    groups: dict[tuple[int, str, bool], int] = {}
    for number in range(int(rng.integers(2, 5 if num_ranks < 4 else 4))):
        table = TableConfig(
            name=f"t{number}",
            num_embeddings=int(10 ** rng.uniform(0.3, 4)),
            embedding_dim=int(rng.choice([4, 8])),
            pooling_factor=float(rng.lognormal(1.0, 1.5)),
        )
        module = int(rng.integers(2))
        ways: list[int] = []
        for kind, kernel in kinds:
            if ways and rng.random() < 0.35:
                continue
            size = SHARDING_TYPES[kind].block_size(num_ranks, node)
            part = SHARDING_TYPES[kind].part_rows(table.num_embeddings, size)
            group = groups.setdefault((module, kind, kernel is UVM), len(groups))
            column_bytes = 0.0 if kernel is UVM else part * 4.0
            whole = SHARDING_TYPES[kind].block != "rank"
            ways.append(len(tables))
            tables.append(table)
            rows.append((kind, kernel, group, column_bytes, table.embedding_dim, whole))
        alternatives.append(tuple(ways))
    kinds_T, kernels, group_T, bytes_T, dims_T, whole_T = zip(*rows, strict=True)
    stages: dict[tuple[int, str], int] = {}
    stage_G = [stages.setdefault(k[:2], len(stages)) for k in groups]
    fields: dict[str, Any] = {
        "tables": tuple(tables),
        "world_size": num_ranks,
        "batch_size": 120,
        "local_world_size": node,
        "groups": group_T,
        "stages": tuple(stage_G),
        "alternatives": tuple(alternatives),
        "sharding_types": kinds_T,
        "kernels": kernels,
        "column_bytes": bytes_T,
        "min_widths": tuple(
            d if w else 4 for d, w in zip(dims_T, whole_T, strict=True)
        ),
    }
    return ShardingTask(**{**fields, **changes})


def layouts(task: ShardingTask, table: int) -> list[list[int]]:
    """Every way to lay one table out: columns on each rank."""
    num_ranks, dim = task.world_size, task.tables[table].embedding_dim
    size = task.block_size(table)
    if size > 1:
        return [
            [dim * (r // size == b) for r in range(num_ranks)]
            for b in range(num_ranks // size)
        ]
    units = itertools.product(range(dim // 4 + 1), repeat=num_ranks)
    return [[4 * u for u in row] for row in units if 4 * sum(row) == dim]


def every_placement(task: ShardingTask) -> Any:
    """All of them, those over memory too."""
    options = [
        [(way, row) for way in ways for row in layouts(task, way)] for ways in task.ways
    ]
    for picks in itertools.product(*options):
        width_TW: Ints = np.zeros((len(task.tables), task.world_size), dtype=np.int64)
        for way, row in picks:
            width_TW[way] = row
        yield placement_from_widths(width_TW, task)


def models(seed: int) -> tuple[AnalyticCostModel, AnalyticCommsModel]:
    rng = np.random.default_rng(seed)
    launch, lookup, byte = 10 ** rng.uniform([-2.5, 0, -1], [-0.5, 2.5, 1])
    compute = AnalyticCostModel(launch_ms=launch, lookup_ns=lookup, byte_ns=byte)
    return compute, AnalyticCommsModel(gb_per_s=10 ** rng.uniform(-2, 0))


def sums(model: AnalyticCostModel) -> Any:
    """The launch, and what a table, a lookup and a byte add, forward and backward."""
    launch, *others = model.predict_sums(np.eye(3))
    return np.stack([launch, np.zeros(2), *others])


class EveryCost(NamedTuple):
    """All placements of a task without limits, in the order of `every_placement`."""

    best: Placement
    costs_P: Floats
    """Critical path of each [ms]."""
    bytes_PW: Floats
    """What each puts on each rank."""


@functools.cache
def every_cost(seed: int) -> EveryCost:
    """Evaluate every placement, which takes longer than all searches."""
    task = random_task(seed)
    simulator = Simulator(task, *models(seed))
    costs, held, best_ms, best = [], [], math.inf, None
    for placement in every_placement(task):
        cost = simulator.evaluate(placement).critical_path_ms
        costs.append(cost)
        held.append(placement.rank_bytes(task))
        if cost < best_ms:
            best_ms, best = cost, placement
    assert best is not None
    return EveryCost(best, np.array(costs), np.array(held))


@pytest.mark.parametrize("kind", ["all sets", "some sets", "sums"])
def test_no_plan_is_below_the_bound(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "some sets":
        monkeypatch.setattr(bounds, "MAX_ENUMERATED", 0)
    if kind == "sums":
        monkeypatch.setattr(AnalyticCostModel, "additive", property(sums))
    gaps = []
    for seed in range({"all sets": NUM_TASKS, "some sets": 4, "sums": 8}[kind]):
        task = random_task(seed)
        simulator = Simulator(task, *models(seed))
        best, costs_P, _ = every_cost(seed)
        best_ms = float(costs_P.min())
        width_TW = np.zeros((len(task.tables), task.world_size), dtype=np.int64)
        for shard in best.shards:
            width_TW[shard.table, shard.rank] = shard.width
        # A cutoff above the optimum, as after a search that did not reach it.
        bank = ShardBank(simulator)
        if kind == "sums":
            bound = bounds.Bound(balanced_bound(bank, seconds=60.0, nodes=10), True)
        else:
            bound = bounds.lower_bound(bank, [width_TW], 1.05 * best_ms)
        assert bound.ms <= best_ms * (1 + 1e-9), f"task {seed}"
        assert bound.is_proven is (kind != "some sets")
        gaps.append(best_ms / bound.ms - 1)
    # Sums know of even ranks alone, which so few tables do not make.
    assert np.median(gaps) < (0.08 if kind == "sums" else 0.01)
    assert np.mean(gaps) < (0.2 if kind == "sums" else 0.05)


def search(task: ShardingTask, seed: int) -> Any:
    return NeuroShardSearcher(SearchConfig()).search(task, *models(seed))


@pytest.mark.parametrize("limited", [False, True])
def test_every_way_is_searched(limited: bool) -> None:
    """Feasible exactly where some plan is, and about as good as the best of all."""
    worse: list[float] = []
    infeasible = 0
    for seed in range(NUM_TASKS):
        task = random_task(seed)
        _, costs_P, bytes_PW = every_cost(seed)
        if limited:
            rng = np.random.default_rng(1000 + seed)
            sizes = [min(task.shard_bytes(w, 4) for w in ways) for ways in task.ways]
            cap = int(rng.uniform(0.2, 2.0) * max(1.0, sum(sizes)))
            task = random_task(seed, memory_bytes=(cap,) * task.world_size)
            costs_P = costs_P[(bytes_PW <= cap).all(axis=1)]
        if not len(costs_P):
            infeasible += 1
            with pytest.raises(InfeasibleError):
                search(task, seed)
            continue
        best = costs_P.min()
        result = search(task, seed)
        result.placement.check(task)
        cost = result.predicted.critical_path_ms
        simulator = Simulator(task, *models(seed))
        assert cost == pytest.approx(
            simulator.evaluate(result.placement).critical_path_ms
        )
        assert result.lower_bound_ms <= best * (1 + 1e-9)
        assert math.isfinite(result.gap)
        worse.append(cost / best - 1)
    assert min(worse) > -1e-9
    assert np.mean(np.array(worse) < 1e-6) >= 0.95, sorted(worse)[-8:]
    assert max(worse) < 0.01, sorted(worse)[-8:]
    assert limited == (infeasible > 0)


def test_hot_tables_are_split_by_rows_though_columns_alone_are_far_from_good() -> None:
    """Eight large tables fill the ranks, and one of two hot ones has to be split."""
    kinds, num_ranks, max_rows = ("column_wise", "row_wise"), 8, 400_000
    tables = [
        dataclasses.replace(
            t, num_embeddings=min(t.num_embeddings, max_rows), embedding_dim=64
        )
        for t in mlperf_dlrm_v2()
    ]
    hot = {i for i, t in enumerate(tables) if t.pooling_factor > 20}
    assert len(hot) == 2

    def best_ms(*, prescribed: bool) -> float:
        ways = [
            (table, kind)
            for i, table in enumerate(tables)
            for kind in (kinds if not prescribed else (kinds[i in hot],))
        ]
        each = 1 if prescribed else 2
        firsts = range(0, len(ways), each)
        part = {"column_wise": 1, "row_wise": num_ranks}
        task = ShardingTask(
            tables=tuple(t for t, _ in ways),
            world_size=num_ranks,
            batch_size=2_048,
            groups=tuple(kinds.index(k) for _, k in ways),
            stages=(0, 1),
            sharding_types=tuple(k for _, k in ways),
            min_widths=tuple(32 if k == "column_wise" else 64 for _, k in ways),
            column_bytes=tuple(t.num_embeddings * 4.0 / part[k] for t, k in ways),
            memory_bytes=(int(1.26 * max_rows * 256),) * num_ranks,
            alternatives=() if prescribed else tuple((i, i + 1) for i in firsts),
        )
        result = NeuroShardSearcher(SearchConfig(effort=0.1, restarts=2)).search(
            task, load_cost_model("cpu_epyc_zen5"), AnalyticCommsModel(300.0)
        )
        return result.predicted.critical_path_ms

    assert best_ms(prescribed=False) <= best_ms(prescribed=True) * (1 + 1e-9)


def choices_of_many_types() -> Choices:
    """Twelve tables, some of them hot, on two nodes."""
    kinds = ("column_wise", "row_wise", "table_row_wise")
    rng, count = np.random.default_rng(5), 12
    tables = [
        TableConfig(
            name=f"t{i}",
            num_embeddings=int(10 ** rng.uniform(2, 7)),
            embedding_dim=128,
            pooling_factor=float(rng.integers(1, 101)),
        )
        for i in range(count)
    ]
    task = ShardingTask(
        tables=tuple(t for t in tables for _ in kinds),
        world_size=16,
        local_world_size=8,
        batch_size=2**15,
        groups=tuple(range(3)) * count,
        stages=tuple(range(3)),
        sharding_types=kinds * count,
        alternatives=tuple(tuple(range(i, i + 3)) for i in range(0, 3 * count, 3)),
    )
    simulator = Simulator(task, load_cost_model("cpu"), AnalyticCommsModel(3.0))
    return Choices(ShardBank(simulator))


def test_choices_are_made_table_by_table_at_last() -> None:
    """No other way of one table would be cheaper, though tables switch many at once."""
    choices = choices_of_many_types()
    [(found_ms, found), *_] = choices.path(choices.first(), math.inf)
    for number, ways in enumerate(choices.ways):
        others = np.repeat(found[None], len(ways), axis=0)
        others[:, number] = ways
        assert choices.costs(others).min() >= found_ms * (1 - MIN_SINGLE_GAIN)


@pytest.mark.parametrize("kind", ["row_wise", "table_row_wise", "data_parallel"])
def test_parts_of_tables_stand_for_all_ranks(kind: str) -> None:
    rows = [1, 2, 5, 6, 8, 9]  # equal parts, a smaller last one, ranks without any
    tables = tuple(
        TableConfig(name=f"t{n}", num_embeddings=n, embedding_dim=8, pooling_factor=2.0)
        for n in rows
    )
    task = ShardingTask(
        tables=tables,
        world_size=8,
        local_world_size=4,
        batch_size=64,
        sharding_types=(kind,) * len(rows),
    )
    bank = ShardBank(Simulator(task, *models(0)))
    place, rank, alike = bank.parts(np.arange(len(rows)))
    found = bank.rows(place, bank.dims_T[place], rank)
    for table in range(len(rows)):
        size = int(bank.block_T[table])
        same = np.full(size, table)
        every = bank.rows(same, bank.dims_T[same], np.arange(size))
        own = place == table
        assert sorted(np.repeat(found[own], alike[own])) == sorted(every)
        assert len(set(found[own].tolist())) == len(set(every.tolist()))


def test_ranks_alike_take_as_long() -> None:
    """A bound looks at one rank of each kind."""
    num_ranks, node = 16, 4
    rng = np.random.default_rng(3)
    learned = load_comms_model(
        "cpu_epyc",
        device_type="cpu",
        world_size=num_ranks,
        local_world_size=node,
        intra_gb_per_s=5.0,
        inter_gb_per_s=1.0,
    )
    assert learned is not None
    of_node = BandwidthCommsModel(
        world_size=node, local_world_size=node, intra_gb_per_s=5.0, inter_gb_per_s=1.0
    )
    groups = RankGroups(learned, node=of_node, cross=of_node, node_size=node)
    for alike in (1, node):
        loads = np.repeat(rng.uniform(0, 1e4, (50, 1)), num_ranks, axis=1)
        loads[:, :alike] += rng.uniform(0, 1e5, (50, 1))
        for name in ("all_to_all", "row_wise", "node_row_wise"):
            ms = getattr(groups, name)(loads, 512)
            kinds = ms[:, [0, min(alike, num_ranks - 1), num_ranks - 1]]
            assert (kinds.max(axis=1) == ms.max(axis=1)).all()
        ms_CW = groups.index_all_to_all(loads)
        assert (ms_CW[:, [0, alike, -1]].max(axis=1) == ms_CW.max(axis=1)).all()
