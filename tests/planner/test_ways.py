"""Sharding types and column splits that the search chooses, and the last resort."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingPlan

from tests.builders import (
    analytic,
    bag_sharders,
    by_table,
    cost_of,
    each,
    entries_of,
    gpus,
    last_result,
    make_ebc,
    make_planner,
    sequences,
    shards_of,
    types_of,
)
from torchrec_neuroshard import rehearse
from torchrec_neuroshard.costs.placement_constraints import PlacementConstraints
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import reader
from torchrec_neuroshard.planner.enumerator import NeuroShardEnumerator
from torchrec_neuroshard.planner.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.proposer import NeuroShardProposer
from torchrec_neuroshard.planner.spread_options import sample_shards
from torchrec_neuroshard.planner.topology import topology_for
from torchrec_neuroshard.planner.ways import FreeOption, node_ranks
from torchrec_neuroshard.search import SearchResult
from torchrec_neuroshard.tables.table import MAX_CUDA_COLUMNS
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

TABLE, COLUMN = "table_wise", "column_wise"
ROW, REPLICAS = "row_wise", "data_parallel"


def test_a_table_that_slows_one_rank_becomes_row_wise() -> None:
    # The first is looked up as often as the other three together, and cannot be split
    # by columns. Lookups cost a lot, collectives next to nothing.
    constraints = by_table(
        sharding_types=[[TABLE, ROW]] * 4, pooling_factors=[[30.0], *[[10.0]] * 3]
    )
    planner = make_planner(
        4,
        "cuda",
        constraints=constraints,
        cost_model=AnalyticCostModel(launch_ms=0.001, lookup_ns=1000, byte_ns=0),
        comms_model=AnalyticCommsModel(gb_per_s=1e6),
    )
    plan = planner.plan(make_ebc([(10_000, 16)] * 4), bag_sharders())
    assert set(types_of(plan).values()) == {ROW}
    # A batch of 256: 15 lookups each on every rank; whole tables would be 30 on one.
    assert cost_of(planner) == pytest.approx(3 * (0.001 + 256 * 15e-3), rel=1e-2)


def test_tables_join_the_stage_of_one_that_must_be_elsewhere() -> None:
    # One launch is paid for two stages' worth; kernels of replicas are estimates, and
    # would be a stage of their own as well.
    nodes = each(1, "table_row_wise")
    planner = make_planner(topology=gpus(4, 2), constraints=nodes)
    plan = planner.plan(make_ebc([(1000, 256), (1000, 32), (1000, 32)]), bag_sharders())
    assert set(types_of(plan).values()) == {"table_row_wise"}


def test_small_tables_become_replicas_where_collectives_are_dear() -> None:
    # Replicas of the small ones send 6 kB of gradients, their outputs are 16 kB; those
    # of the large one would send 8 MB.
    planner = make_planner(
        2,
        "cuda",
        cost_model=AnalyticCostModel(launch_ms=1e-4, lookup_ns=1, byte_ns=1e-3),
        comms_model=AnalyticCommsModel(gb_per_s=1e-3),
    )
    ebc = make_ebc([(50, 32), (100_000, 32), (50, 32)])
    types = types_of(planner.plan(ebc, bag_sharders()))
    assert types["t0"] == types["t2"] == REPLICAS
    assert types["t1"] != REPLICAS
    source = last_result(planner).predicted.compute_source
    assert source == "analytic; of 3 tables, 2 estimated (kernel dense)"


@pytest.mark.parametrize("others", [[], [TABLE]])
@pytest.mark.parametrize("pin", [{}, {"t0": [2, 3]}])
def test_columns_of_a_table_that_must_be_in_one_node_are_split_there(
    others: list[str], pin: dict[str, list[int]]
) -> None:
    constraints = by_table(
        sharding_types=[["table_column_wise", *others]] * 4,
        pooling_factors=[[400.0], *[[30.0]] * 3],
    )
    planner = make_planner(
        4,
        "cuda",
        topology_arguments={"local_world_size": 2},
        constraints=constraints,
        cost_model=AnalyticCostModel(launch_ms=0.001, lookup_ns=0, byte_ns=1),
        comms_model=AnalyticCommsModel(gb_per_s=1e6),
        placement_constraints=PlacementConstraints(pin=pin),
    )
    plan = planner.plan(make_ebc([(10_000, 128)] * 4), bag_sharders())
    ranks = {name: [r for *_, r in held] for name, held in shards_of(plan).items()}
    assert types_of(plan)["t0"] == "table_column_wise"
    own, other = ([2, 3], {0, 1}) if pin or 2 in ranks["t0"] else ([0, 1], {2, 3})
    assert sorted(ranks.pop("t0")) == own
    assert all(set(held) <= other for held in ranks.values())


def test_tables_join_the_stage_of_one_that_must_be_in_one_node() -> None:
    types = [["table_column_wise", COLUMN]] * 2 + [["table_column_wise"]]
    constraints = by_table(sharding_types=types)
    planner = make_planner(3, "cuda", constraints=constraints)
    plan = planner.plan(make_ebc([(5000, 64)] * 3), bag_sharders())
    assert types_of(plan)["t0"] == "table_column_wise"


@pytest.mark.parametrize("num_nodes", [2, 16])
def test_a_way_is_proposed_once(num_nodes: int) -> None:
    """Also after the proposal that adds the withheld kernels."""
    topology, limits = gpus(2 * num_nodes, 2), each(2, "table_column_wise")
    enumerator = NeuroShardEnumerator(topology, 64, limits, **analytic())
    proposer = NeuroShardProposer(topology, limits, **analytic())
    options = enumerator.enumerate(make_ebc([(1000, 64)] * 2), bag_sharders())
    proposer.load(options, enumerator)
    kernels: list[set[str]] = []
    while (proposal := proposer.propose()) is not None:
        for option in proposal:
            ways = [
                (
                    o.sharding_type,
                    o.compute_kernel,
                    o.cache_params and o.cache_params.load_factor,
                    node_ranks(o, proposer.costs.reader),
                    tuple(tuple(s.size) for s in sample_shards(o)),
                )
                for o in FreeOption.ways_of(option)
            ]
            assert len(ways) == len(set(ways))
            kernels.append({way[1] for way in ways})
        proposer.feedback(partitionable=False)
    assert "fused_uvm_caching" in kernels[2]


def test_a_grid_has_no_more_blocks_than_nodes() -> None:
    # TorchRec's has a block for every 16 columns, several of them on a node.
    grid = each(1, "grid_shard", min_partition=16)
    planner = make_planner(topology=gpus(4, 2), constraints=grid)
    plan = planner.plan(make_ebc([(1001, 96)]), bag_sharders())
    shards = plan.plan[""]["t0"].sharding_spec.shards
    assert sorted(tuple(s.shard_offsets) for s in shards) == sorted(
        (row, column) for row in (0, 501) for column in (0, 48)
    )
    assert {s.placement.rank() for s in shards} == set(range(4))
    assert last_result(planner).fallback is None


# --- TorchRec's own plan --------------------------------------------------------


@pytest.mark.parametrize("widths", [(16, 40), (16, 16)])
def test_torchrecs_plan_is_refused_if_it_cannot_run(widths: tuple[int, int]) -> None:
    """The tables fit only if a rank holds several narrow shards of one table.

    The search gives a rank one shard of a table, so halves are its narrowest shards.
    """
    constraints = by_table(
        sharding_types=[[COLUMN]] * 2,
        compute_kernels=[["fused"]] * 2,
        min_partition=widths,
    )
    planner = make_planner(
        topology=gpus(3, hbm_cap=2_400_000),
        constraints=constraints,
        batch_size=1,
        strict_memory=True,
    )
    given = sequences(80, 80, prefix="t"), [EmbeddingCollectionSharder()]
    if widths[0] != widths[1]:
        with pytest.raises(PlannerError, match=r"table 't0' .* needs 314\.48 KiB"):
            planner.plan(*given)
    else:
        planner.plan(*given)
        result = last_result(planner)
        assert result.fallback is not None
        assert "fallback" in {note.code for note in result.notes}


def test_the_last_resort_does_not_depend_on_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same proposals are tried, however long TorchRec's planner takes."""

    def planned() -> str:
        planner = make_planner(
            topology=gpus(3, hbm_cap=2_400_000),
            constraints=each(2, COLUMN, compute_kernels=["fused"], min_partition=16),
            batch_size=1,
            strict_memory=True,
        )
        plan = planner.plan(
            sequences(80, 80, prefix="t"), [EmbeddingCollectionSharder()]
        )
        return str(plan)

    at_once = planned()
    clock = SimpleNamespace(time=itertools.count(step=1000).__next__)
    monkeypatch.setattr("torchrec.distributed.planner.planners.time", clock)
    assert planned() == at_once


def test_more_choices_are_no_worse_where_collectives_take_long_to_begin() -> None:
    """Those of sharding types that no table takes do not run: neither plan nor bound
    counts them.
    """
    rng = np.random.default_rng(4)
    sizes = [
        (int(10 ** rng.uniform(4, 6)), int(rng.choice([16, 32, 64, 128])))
        for _ in range(12)
    ]

    def planned(*types: str) -> SearchResult:
        planner = make_planner(
            topology=topology_for("h100", ranks_per_node=8),
            comms_model=None,
            batch_size=512,
            constraints=each(len(sizes), *types, pooling_factors=[5.0]),
        )
        planner.plan(make_ebc(sizes), bag_sharders())
        return last_result(planner)

    free = planned()
    fewer = [planned("row_wise"), planned("table_wise", "column_wise")]
    least_ms = min(r.predicted.critical_path_ms for r in fewer)
    assert free.predicted.critical_path_ms <= least_ms * (1 + 1e-9)
    assert free.lower_bound_ms <= least_ms * (1 + 1e-9)


# --- tables that a GPU's kernels do not take as they are ---


@pytest.mark.parametrize(
    ("topology", "module", "kind"),
    [
        (gpus(), make_ebc([(1000, 2052)]), COLUMN),
        (gpus(), sequences(4096), COLUMN),
        (gpus(8, 2), make_ebc([(1000, 8192)]), "grid_shard"),
    ],
    ids=["bags", "sequences", "grid"],
)
def test_wide_tables_are_split_by_columns(
    topology: Any, module: Any, kind: str
) -> None:
    limits = None if kind == COLUMN else each(1, kind)
    planner = make_planner(topology=topology, constraints=limits)
    sharders = get_default_sharders()
    plan = planner.plan(module, sharders)
    report = rehearse(module, plan, topology, sharders, batch_size=64)
    assert report.runs, str(report)
    [(name, first)] = entries_of(plan).items()
    widths = {s.shard_sizes[1] for s in first.sharding_spec.shards}
    assert max(widths) <= MAX_CUDA_COLUMNS
    assert first.sharding_type == kind
    if name == "s0":
        assert len(widths) == 1


@pytest.mark.parametrize(
    ("world_size", "width", "least", "expected"),
    [
        (4, 4096, 4, {2, 4}),
        (4, 4096, 2048, {2}),
        (4, 2052, 4, {3}),
        # Two ranks cannot hold it in one shard each: TorchRec's own shards.
        (2, 8192, 2048, {4}),
    ],
)
def test_wide_tables_have_few_shards(
    world_size: int,
    width: int,
    least: int,
    expected: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "cuts_wide_bags", lambda: False)
    limits = each(1, min_partition=least)
    planner = make_planner(topology=gpus(world_size), constraints=limits)
    plan = planner.plan(make_ebc([(1000, width)]), bag_sharders())
    shards = shards_of(plan)["t0"]
    assert len(shards) in expected
    assert sum(w for _, w, _ in shards) == width
    assert len({rank for *_, rank in shards}) == min(len(shards), world_size)


def test_bags_that_a_kernel_cuts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM 1.6 returns zeros beyond 1,024 columns of fused bags on GPUs."""
    monkeypatch.setattr(reader, "cuts_wide_bags", lambda: True)
    model = nn.ModuleDict({"bags": make_ebc([(1000, 2048)]), "ids": sequences(2048)})

    def widest(*types: str) -> dict[str, int]:
        limits = {"t0": each(1, *types)["t0"]} if types else None
        planner = make_planner(topology=gpus(1), constraints=limits)
        plan = planner.plan(model, get_default_sharders())
        assert rehearse(model, plan, gpus(1), batch_size=64).runs
        return {
            name: max(s.shard_sizes[1] for s in found.sharding_spec.shards)
            for name, found in entries_of(plan).items()
            if found.sharding_spec is not None
        }

    assert widest()["bags.t0"] <= 1024
    assert widest()["ids.s0"] == 2048
    assert "bags.t0" not in widest("data_parallel")
    for kind in ("table_wise", "row_wise"):
        with pytest.raises(ConfigError, match=r"'bags\.t0'.* at most 1,024 columns"):
            widest(kind)


def test_wide_tables_stay_whole_on_cpus() -> None:
    planner = make_planner(constraints=each(1, "table_wise"))
    plan = planner.plan(make_ebc([(1000, 4096)]), bag_sharders())
    assert [w for _, w, _ in shards_of(plan)["t0"]] == [4096]


# --- column splits of sequence tables: when, which, and one width per module ---


TABLE, COLUMN = "table_wise", "column_wise"
WORLD_SIZE = 4
SPLITS_PAY: dict[str, Any] = {
    "cost_model": AnalyticCostModel(launch_ms=0.0),
    "comms_model": AnalyticCommsModel(100.0),
}


def planned(
    dims: tuple[int, ...], *, dedup: bool = False, **arguments: Any
) -> tuple[NeuroShardPlanner, ShardingPlan]:
    planner = make_planner(**({"world_size": WORLD_SIZE} | SPLITS_PAY | arguments))
    sharder = EmbeddingCollectionSharder(use_index_dedup=dedup)
    return planner, planner.plan(sequences(*dims, prefix="t"), [sharder])


def widths_of(plan: ShardingPlan) -> dict[str, list[int]]:
    return {name: [s[1] for s in shards] for name, shards in shards_of(plan).items()}


def test_a_table_alone_is_split_over_all_ranks() -> None:
    planner, plan = planned((64,), constraints=each(1, TABLE, COLUMN))
    assert types_of(plan) == {"t0": COLUMN}
    assert sorted(rank for *_, rank in shards_of(plan)["t0"]) == [0, 1, 2, 3]
    assert widths_of(plan) == {"t0": [16] * WORLD_SIZE}
    whole, _ = planned((64,), constraints=each(1, TABLE))
    assert cost_of(planner) < 0.5 * cost_of(whole)
    assert last_result(planner).lower_bound_ms <= cost_of(planner)


def test_only_the_tables_that_slow_a_rank_are_split() -> None:
    constraints = by_table(
        sharding_types=[[TABLE, COLUMN]] * 6, pooling_factors=[[100.0], *[[10.0]] * 5]
    )
    _, plan = planned((64,) * 6, constraints=constraints)
    assert types_of(plan)["t0"] == COLUMN
    assert TABLE in types_of(plan).values()


def test_tables_of_one_module_get_shards_of_one_width() -> None:
    constraints = by_table(
        sharding_types=[[COLUMN]] * 3,
        min_partition=[16, 32, 8],
        pooling_factors=[[50.0], [20.0], [30.0]],
    )
    _, plan = planned((64,) * 3, constraints=constraints)
    assert set(types_of(plan).values()) == {COLUMN}
    assert {w for own in widths_of(plan).values() for w in own} == {32}


def test_whole_tables_share_the_stage_of_one_that_may_only_be_column_wise() -> None:
    only = ParameterConstraints(
        sharding_types=[COLUMN], min_partition=32, pooling_factors=[50.0]
    )
    _, plan = planned((32, 32, 32), world_size=2, constraints={"t0": only})
    assert set(types_of(plan).values()) == {COLUMN}
    held = {name: shards[0][-1] for name, shards in shards_of(plan).items()}
    assert held["t1"] == held["t2"] != held["t0"]


def test_other_modules_do_not_make_a_split_needless() -> None:
    """They run in stages of their own, during which no rank waits for this one."""
    model = nn.ModuleDict({"ids": sequences(64), "bags": make_ebc([(1000, 64)] * 12)})
    constraints = each(12, TABLE, COLUMN)
    constraints["s0"] = ParameterConstraints(sharding_types=[TABLE, COLUMN])
    planner = make_planner(WORLD_SIZE, constraints=constraints, **SPLITS_PAY)
    plan = planner.plan(model, [EmbeddingCollectionSharder(), *bag_sharders()])
    assert widths_of(plan)["ids.s0"] == [16] * WORLD_SIZE


@pytest.mark.parametrize(
    "arguments",
    [
        {"placement_constraints": PlacementConstraints(pin={"t0": [1, 2]})},
        {"dedup": True},
    ],
    ids=["few ranks", "repeated ids are removed"],
)
def test_these_tables_stay_whole(arguments: dict[str, Any]) -> None:
    _, plan = planned((64,), constraints=each(1, COLUMN), **arguments)
    assert widths_of(plan) == {"t0": [64]}


def test_tables_too_large_for_a_rank_are_split() -> None:
    """Whole tables would be quicker, but no rank has room for one."""
    planner, plan = planned(
        (64, 64),
        topology=gpus(4, hbm_cap=2_300_000),
        constraints=each(2, COLUMN, compute_kernels=["fused"], min_partition=32),
        batch_size=1,
        strict_memory=True,
        cost_model=AnalyticCostModel(launch_ms=1.0),
    )
    assert widths_of(plan) == {"t0": [32, 32], "t1": [32, 32]}
    assert last_result(planner).fallback is None
