"""Tables that the search does not place, such as quantised ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)

from tests.builders import (
    META,
    MIB,
    bag_config,
    cost_of,
    each,
    entries_of,
    gpus,
    make_planner,
    sequences,
)
from torchrec_neuroshard import NeuroShardPlanner, PlacementConstraints
from torchrec_neuroshard.planner import NeuroShardPartitioner
from torchrec_neuroshard.planner.greedy import place_greedily
from torchrec_neuroshard.planner.option_facts import is_even, table_name
from torchrec_neuroshard.planner.proposer import NeuroShardProposer
from torchrec_neuroshard.planner.torchrec_plan import stock_plan
from torchrec_neuroshard.planner.unsearched import place_unsearched
from torchrec_neuroshard.planner.ways import FreeOption

SHARDERS = get_default_sharders()
SIZES = [(4527, 16), (100, 256), (200_000, 64), (30_000_000, 8)]


def quantised(sizes: Sequence[tuple[int, int]], order: Sequence[int] = ()) -> Any:
    """Quantised bags; `order` is that of the tables, which are named by size."""
    tables = [bag_config(i, *size) for i, size in enumerate(sizes)]
    for config in tables:
        config.data_type = DataType.INT8
    return QuantEmbeddingBagCollection(
        tables=[tables[i] for i in order or range(len(tables))],
        is_weighted=False,
        device=META,
    )


def proposed(
    planner: NeuroShardPlanner, options: list[ShardingOption]
) -> list[ShardingOption]:
    """The first proposal."""
    proposer = NeuroShardProposer(planner.topology, costs=planner.costs)
    proposer.load(options, planner.enumerator)
    found = proposer.propose()
    assert found is not None
    return found


def price(planner: NeuroShardPlanner, plan: list[ShardingOption]) -> float:
    """The critical path of unsearched options, whose launches are shared [ms]."""
    planner.costs.share_launches(plan)
    return planner.costs.placed(plan).predicted.critical_path_ms


@pytest.mark.parametrize("topology", [gpus(2), gpus(8), Topology(4, "cpu")])
@pytest.mark.parametrize("sizes", [SIZES[:2], SIZES[1:3], SIZES[:3]])
def test_no_combination_of_options_is_cheaper(
    topology: Topology, sizes: list[tuple[int, int]]
) -> None:
    planner = make_planner(topology=topology, batch_size=512)
    options = planner.enumerator.enumerate(quantised(sizes), SHARDERS)
    tables = [list(FreeOption.ways_of(o)) for o in proposed(planner, options)]
    rules = planner.placement_constraints.rules(
        [table_name(own[0]) for own in tables], topology.world_size
    )
    found = place_unsearched(tables, topology, rules, planner.costs)
    best = min(
        price(planner, place_greedily(options, topology, rules))
        for options in itertools.product(*tables)
    )
    assert price(planner, found) <= best * (1 + 1e-6)


def test_host_memory_is_used_only_where_devices_are_full() -> None:
    module = quantised([(400_000, 48)] * 5)
    planner = make_planner(topology=gpus(2, hbm_cap=40 * MIB), batch_size=4096)
    plan = planner.plan(module, SHARDERS)
    kernels = [entry.compute_kernel for entry in entries_of(plan).values()]
    assert 0 < sum(kernel == "quant" for kernel in kernels) < 5


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([(600_000, 32)], r"a shard of table 't0' \(.*\) needs .*the freest rank has"),
        ([(200_000, 32)] * 4, "'t0', .* together need .*all ranks have 0.02 GiB"),
    ],
)
def test_the_error_names_what_does_not_fit(
    sizes: list[tuple[int, int]], text: str
) -> None:
    topology = gpus(2, hbm_cap=12 * MIB, ddr_cap=0)
    kinds = each(len(sizes), "table_wise", compute_kernels=["quant"])
    planner = make_planner(topology=topology, batch_size=64, constraints=kinds)
    with pytest.raises(PlannerError, match=text):
        planner.plan(quantised(sizes), SHARDERS)


def test_the_order_of_tables_does_not_matter() -> None:
    alike = [(200_000, 64)] * 6
    plans = [
        make_planner(topology=gpus(4)).plan(quantised(alike, order), SHARDERS)
        for order in ([0, 1, 2, 3, 4, 5], [3, 5, 1, 0, 4, 2])
    ]
    first, second = ({k: str(v) for k, v in entries_of(p).items()} for p in plans)
    assert first == second


def test_placement_constraints_hold() -> None:
    placement = PlacementConstraints(
        pin={"t0": [3], "t2": [1, 2]}, together=[["t1", "t0"]]
    )
    planner = make_planner(topology=gpus(4), placement_constraints=placement)
    found = entries_of(planner.plan(quantised(SIZES), SHARDERS))
    assert set(found["t0"].ranks) == set(found["t1"].ranks) == {3}
    assert set(found["t2"].ranks) <= {1, 2}
    assert planner.last_result is not None and not planner.last_result.fallback


def test_no_plan_of_torchrec_is_shorter_where_devices_are_full() -> None:
    sizes = [(10_000 * (i + 1), 32) for i in range(12)]
    module, topology = quantised(sizes), gpus(2, hbm_cap=12 * MIB)
    planner = make_planner(topology=topology, batch_size=2048)
    planner.plan(module, SHARDERS)
    stock = stock_plan(module, SHARDERS, [], topology=topology, batch_size=2048)
    theirs = planner.evaluate(stock, module, SHARDERS).critical_path_ms
    assert cost_of(planner) <= theirs * (1 + 1e-6)


def test_sequences_of_a_module_are_split_into_equal_widths() -> None:
    """Widths of 16 and 32 are the cheapest, but TorchRec's all-to-all takes one."""
    topology, planner = gpus(4), make_planner(topology=gpus(4))
    constraints = {
        f"s{i}": ParameterConstraints(
            sharding_types=["column_wise", "table_wise"],
            compute_kernels=["fused"],
            min_partition=width,
        )
        for i, width in enumerate([16, 32])
    }
    options = EmbeddingEnumerator(topology, 64, constraints=constraints).enumerate(
        sequences(64, 64), SHARDERS
    )
    for option in options:
        whole_ms = 1.0 if option.sharding_type == "table_wise" else 0.2
        for shard in option.shards:
            shard.perf.fwd_compute = whole_ms
            shard.perf.fwd_comms = shard.perf.bwd_comms = shard.perf.bwd_compute = 0.0
    tables = [[o for o in options if o.name == name] for name in ("s0", "s1")]
    tables = [
        sorted(own, key=lambda o: o.sharding_type != "table_wise") for own in tables
    ]
    rules = planner.placement_constraints.rules(
        [table_name(own[0]) for own in tables], topology.world_size
    )
    found = place_unsearched(tables, topology, rules, planner.costs)
    assert is_even(found)
    widths = [{int(s.size[1]) for s in option.shards} for option in options]
    assert {16} in widths and {32} in widths


def test_torchrecs_plan_as_the_last_resort_shares_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise PlannerError(error_type=PlannerErrorType.PARTITION, message="no")

    monkeypatch.setattr(NeuroShardPartitioner, "_place", fail)
    planner = make_planner(topology=gpus(2))
    module = quantised([(100, 16)] * 8)
    plan = planner.plan(module, SHARDERS)
    assert planner.last_result is not None and planner.last_result.fallback
    again = planner.evaluate(plan, module, SHARDERS)
    assert cost_of(planner) == pytest.approx(again.critical_path_ms)
