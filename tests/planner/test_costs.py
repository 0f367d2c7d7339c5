"""Costs of every sharding type, compared with calculations by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    ATTACHES_OPTIMIZERS,
    bag_sharders,
    by_table,
    cost_of,
    gpus,
    make_ebc,
    make_planner,
    only,
    sequences,
)
from torchrec_neuroshard.costs.simulator import PHASES
from torchrec_neuroshard.costs.task import ColumnShard
from torchrec_neuroshard.planner import NeuroShardPartitioner, PlanCosts
from torchrec_neuroshard.planner.compat import sharders_by_type
from torchrec_neuroshard.planner.option_facts import note_sharders
from torchrec_neuroshard.planner.placed import PlacedPlan, fusion_key
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.ways import is_placeable, node_ranks, on_nodes
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.tables.table import TableConfig, row_shard
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

BATCH = 100
LAUNCH, LOOKUP, BYTE = 0.5, 1e-3, 1e-6  # ms, ms per lookup, ms per byte
PROBED_LAUNCH = LAUNCH + LOOKUP + 16 * BYTE  # the probe reads a row of 16 bytes
INTRA, INTER = 1e5, 1e4  # bytes per ms


def costs_of(topology: Topology, constraints: Any = None) -> PlanCosts:
    model = AnalyticCostModel(LAUNCH, LOOKUP * 1e6, BYTE * 1e6)
    return PlanCosts(topology, constraints, cost_model=model)


def topology_of(world_size: int, node: int | None = None) -> Topology:
    return gpus(world_size, node, intra_host_bw=INTRA, inter_host_bw=INTER)


def placed(
    module: Any, topology: Topology, kinds: dict[str, tuple[str, str]], **fields: Any
) -> tuple[PlanCosts, list[ShardingOption]]:
    """Return a plan of tables with these sharding types and kernels."""
    constraints = {
        name: ParameterConstraints(
            sharding_types=[kind], compute_kernels=[kernel], **fields
        )
        for name, (kind, kernel) in kinds.items()
    }
    costs = costs_of(topology, constraints)
    enumerator = EmbeddingEnumerator(topology, BATCH, constraints)
    options = enumerator.enumerate(module, get_default_sharders())
    assert len(options) == len(kinds)
    partitioner = NeuroShardPartitioner(
        topology, constraints, search=SearchConfig(effort=0.0), costs=costs
    )
    return costs, partitioner.partition(options, topology)


def phases_of(costs: PlanCosts, plan: list[ShardingOption]) -> dict[str, list[Any]]:
    """Stage -> phases of each rank."""
    predicted = costs.placed(plan).predicted
    return {
        stage.name: [[getattr(r, p) for p in PHASES] for r in stage.ranks]
        for stage in predicted.stages
    }


# --- row shards -----------------------------------------------------------------


def test_row_shard_of_a_profile() -> None:
    profile = zipf_profile(batch_size=64, pooling_factor=8.0, num_embeddings=1000)
    table = TableConfig(
        name="t", num_embeddings=1000, embedding_dim=16, profile=profile, num_features=2
    )
    shard = row_shard(table, 250, 64)
    assert shard.num_embeddings == 250 and shard.num_features == 2
    assert shard.profile is not None
    assert shard.profile.num_lookups == pytest.approx(8 * 64 / 4)
    assert shard.profile.access_histogram == pytest.approx(
        [n / 4 for n in profile.access_histogram]
    )
    # Of four ids in each bag, each falls into the shard with probability 1/4.
    assert shard.profile.pooling_std == pytest.approx((4 * 0.25 * 0.75) ** 0.5)
    assert row_shard(table, 1000, 64) is table
    nothing = row_shard(table, 0, 64)
    assert nothing.profile is not None and nothing.profile.num_lookups == 0


# --- sharding types -------------------------------------------------------------


def test_row_wise_tables_share_a_kernel_and_its_collectives() -> None:
    ebc = make_ebc([(1000, 16), (2000, 8)])
    kinds = {f"t{i}": ("row_wise", "fused") for i in range(2)}
    costs, plan = placed(ebc, topology_of(4), kinds, pooling_factors=[6.0])
    ((name, ranks),) = phases_of(costs, plan).items()
    assert name == "model (row_wise)"
    batch = 4 * BATCH
    lookups = batch * 6 / 4  # of each table on each rank
    forward = LAUNCH + LOOKUP * 2 * lookups + BYTE * lookups * 4 * (16 + 8)
    index = 2 * (lookups * 8 + batch * 8) * 3 / 4 / INTRA
    # Every rank has partial sums of all 24 columns of all samples.
    pooled = batch * 24 * 4 * 3 / 4 / INTRA
    for rank in ranks:
        assert rank == pytest.approx([index, forward, pooled, pooled, 2 * forward])


@pytest.mark.parametrize("kind", ["table_row_wise", "grid_shard"])
def test_tables_in_nodes(kind: str) -> None:
    # Two nodes of two ranks; the grid's table has a column shard on each.
    width, sizes = 16, [(1000, 32)] if kind == "grid_shard" else [(1000, 16)] * 2
    kinds = {f"t{i}": (kind, "fused") for i in range(len(sizes))}
    topology = topology_of(4, 2)
    costs, plan = placed(
        make_ebc(sizes), topology, kinds, pooling_factors=[6.0], min_partition=16
    )
    ((name, ranks),) = phases_of(costs, plan).items()
    assert name == f"model ({kind})"
    batch = 4 * BATCH
    lookups = batch * 6 / 2  # half of the rows are on each rank
    forward = LAUNCH + LOOKUP * lookups + BYTE * lookups * 4 * width
    # One of three other ranks is in the node.
    per_byte = 1 / 4 / INTRA + 2 / 4 / INTER
    index = (lookups * 8 + batch * 8) * per_byte
    # In the node each of two ranks sends half of its partial sums to the other; then
    # each has sums of half of the samples, and sends half of these to the other node.
    in_node = batch * width * 4 / 2 / INTRA
    between = batch / 2 * width * 4 / 2 / INTER
    pooled = in_node + between
    for rank in ranks:
        assert rank == pytest.approx([index, forward, pooled, pooled, 2 * forward])


@pytest.mark.parametrize(
    ("device", "optimizer", "forward_factor", "backward_factor", "passes"),
    [
        # TorchRec takes dense kernels to be half as fast, and 9.22 passes over a table.
        ("cuda", torch.optim.SGD, 2.0, 2.0, 2 * 9.22),
        # As measured.
        ("cpu", torch.optim.SGD, 0.75, 1.17, 2.0),
        ("cpu", RowWiseAdagrad, 0.75, 1.17, 4.5),
        ("cpu", torch.optim.Adagrad, 0.75, 1.17, 12.7),
    ],
)
def test_replicas(
    device: str,
    optimizer: type[torch.optim.Optimizer],
    forward_factor: float,
    backward_factor: float,
    passes: float,
) -> None:
    sizes = [(1000, 16), (500, 8)]
    kinds = {f"t{i}": ("data_parallel", "dense") for i in range(2)}
    topology = Topology(
        world_size=2, compute_device=device, intra_host_bw=INTRA, hbm_mem_bw=1e6
    )
    model = make_ebc(sizes)
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
    costs, plan = placed(model, topology, kinds, pooling_factors=[6.0])
    ((name, ranks),) = phases_of(costs, plan).items()
    assert name == "model (data_parallel)"
    lookups = BATCH * 6  # of its own samples only
    fused = LAUNCH + LOOKUP * 2 * lookups + BYTE * lookups * 4 * (16 + 8)
    alone = [LAUNCH + LOOKUP * lookups + BYTE * lookups * 4 * d for d in (16, 8)]
    above = sum(a - PROBED_LAUNCH for a in alone)
    forward = fused + above * (forward_factor - 1)
    gradients = (1000 * 16 + 500 * 8) * 4
    # The probe: 65536 rows of 512 bytes; TorchRec counts ids and 8192 outputs, too.
    probe = LAUNCH + (LOOKUP + 512 * BYTE) * 65536
    byte_ms = (probe - PROBED_LAUNCH) / (65536 * 520 + 8192 * 512)
    backward = 2 * (fused + above * (backward_factor - 1))
    backward += passes * gradients * byte_ms
    reduced = 2 * gradients / 2 / INTRA
    for rank in ranks:
        assert rank == pytest.approx([0, forward, 0, reduced, backward])


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
@pytest.mark.parametrize("ids", [1, 8])
def test_a_sequence_sends_one_row_per_id(kind: str, ids: int) -> None:
    kinds = {"s0": (kind, "fused")}
    costs, plan = placed(sequences(16), topology_of(4), kinds, pooling_factors=[ids])
    table = costs.reader.table(plan[0])
    assert not table.pooled
    assert (table.num_outputs, table.num_bags) == (ids, 1)
    if kind == "table_wise":
        return
    ((_, ranks),) = phases_of(costs, plan).items()
    # Each rank returns the rows that it holds: a quarter of those of a sample.
    rows = 4 * BATCH * ids / 4 * 16 * 4 * 3 / 4 / INTRA
    for rank in ranks:
        assert rank[2:4] == pytest.approx([rows, rows])


class SlowOrder(AnalyticCostModel):
    """A microsecond per column and sample forward, two backward."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms

    def column_order(self, bytes_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        ms: npt.NDArray[np.float64] = bytes_N[..., None] / 4 * [self.ms, 2 * self.ms]
        return ms


@pytest.mark.parametrize(("kind", "columns"), [("grid_shard", 48), ("row_wise", 0)])
def test_columns_of_a_grid_are_reordered(kind: str, columns: int) -> None:
    path_ms = []
    for ms in (0.0, 1e-3):
        planner = make_planner(
            topology=gpus(4, 2),
            batch_size=4,
            constraints=by_table(sharding_types=[[kind]] * 2, min_partition=[16, None]),
            cost_model=SlowOrder(ms),
            comms_model=AnalyticCommsModel(),
        )
        # One table in two column shards over both nodes, one in a single node.
        planner.plan(make_ebc([(100, 32), (100, 16)]), bag_sharders())
        path_ms.append(cost_of(planner))
    # Four samples of each rank.
    assert path_ms[1] - path_ms[0] == pytest.approx(columns * 4 * 3e-3, abs=1e-9)


# --- whole plans ----------------------------------------------------------------

MIXED = {
    "t0": ("row_wise", "fused"),
    "t1": ("row_wise", "fused"),
    "t2": ("table_wise", "fused"),
    "t3": ("column_wise", "fused"),
    "t4": ("data_parallel", "dense"),
    "t5": ("table_row_wise", "fused"),
    "t6": ("table_wise", "fused_uvm"),
    "t7": ("grid_shard", "fused"),
}


@pytest.mark.parametrize("everywhere", [True, False])
def test_sums_over_shards_agree_with_the_stages(everywhere: bool) -> None:
    uniform = {"t0": MIXED["t0"], "t1": MIXED["t1"], "t2": MIXED["t4"]}
    kinds = uniform if everywhere else MIXED
    sizes = [(1000, 32), (500, 16), *[(100, 32)] * (len(kinds) - 2)]
    costs, plan = placed(make_ebc(sizes), topology_of(4, 2), kinds)
    predicted = PlacedPlan(plan, costs).predicted
    assert {s.name.split()[1] for s in predicted.stages} == {
        f"({kind})" for kind, _ in kinds.values()
    }
    for rank, found in enumerate(predicted.ranks):
        shards = [s.perf for o in plan for s in o.shards if s.rank == rank]
        for name, expected in (
            ("fwd_compute", found.fwd_compute),
            ("bwd_compute", found.bwd_compute),
            ("fwd_comms", found.index_comms + found.fwd_comms),
            ("bwd_comms", found.bwd_comms),
        ):
            total = sum(getattr(perf, name) for perf in shards)
            # A rank without shards of a stage takes part in its collectives.
            assert total <= expected * (1 + 1e-9)
            if everywhere or "compute" in name:
                assert total == pytest.approx(expected)
    costs.attribute(plan)
    assert PlacedPlan(plan, costs).predicted == predicted
    # Kernels that were not measured are counted.
    source = "analytic; of 3 tables, 1 estimated (kernel dense)"
    if not everywhere:
        source = "analytic; of 8 tables, 2 estimated (kernel dense, kernel fused_uvm)"
    assert predicted.compute_source == source


def test_caches_share_a_kernel_unless_only_some_prefetch() -> None:
    topology = topology_of(1)
    given = [CacheParams(), CacheParams(load_factor=0.3)]
    constraints = by_table(
        sharding_types=[["table_wise"]] * 3,
        compute_kernels=[["fused_uvm_caching"]] * 3,
        cache_params=[*given, CacheParams(prefetch_pipeline=True)],
    )
    costs = costs_of(topology, constraints)
    options = EmbeddingEnumerator(topology, BATCH, constraints).enumerate(
        make_ebc([(1000, 32)] * 3), get_default_sharders()
    )
    keys = [fusion_key(o, costs.reader, "table_wise") for o in options]
    assert keys[0] == keys[1] != keys[2]


# --- options as tables, and plans as placements ---


pytestmark = ATTACHES_OPTIMIZERS

Options = dict[tuple[str, str, str], ShardingOption]


def options_of(
    module: nn.Module,
    constraints: dict[str, ParameterConstraints] | None = None,
    **fused_params: Any,
) -> tuple[TableReader, Options]:
    """TorchRec's own options, by (table, sharding type, kernel), and their reader."""
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params or None)
    enumerator = EmbeddingEnumerator(gpus(), 32, constraints=constraints)
    options = enumerator.enumerate(module, [sharder])
    reader = TableReader(gpus(), constraints)
    note_sharders(options, sharders_by_type([sharder]))
    return reader, {(o.name, o.sharding_type, o.compute_kernel): o for o in options}


def whole(options: Options, name: str) -> ShardingOption:
    return options[(name, "table_wise", "fused")]


def test_table_of_an_option() -> None:
    ebc = make_ebc([(100, 16), (50, 8)], weighted=True, data_types={1: DataType.FP16})
    chosen = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    reader, options = options_of(nn.ModuleDict({"e": ebc}), optimizer=chosen)
    table = reader.table(whole(options, "t1"))
    assert (table.name, table.num_embeddings, table.embedding_dim) == ("e.t1", 50, 8)
    assert (table.data_type, table.weighted) == ("fp16", True)
    assert table.optimizer == "rowwise_adagrad"  # the sharder's
    # Shards do not change what the table is.
    assert reader.table(options[("t1", "row_wise", "fused")]) is table


def test_tables_know_their_lookups_and_their_own_optimizers() -> None:
    ebc = make_ebc([(100, 16)] * 3, features={i: [f"a{i}", f"b{i}"] for i in range(3)})
    for name, kind in (("t0", RowWiseAdagrad), ("t1", torch.optim.RMSprop)):
        weight = ebc.embedding_bags[name].weight
        apply_optimizer_in_backward(kind, [weight], {"lr": 0.1})
    reader, options = options_of(
        ebc,
        only("t0", pooling_factors=[2.0, 3.0], num_poolings=[1.0, 4.0])
        | only("t1", pooling_factors=[2.0, 3.0], batch_sizes=[32, 16])
        | only("t2", pooling_factors=[4.0]),
    )
    tables = [reader.table(whole(options, f"t{i}")) for i in range(3)]
    assert [t.pooling_factor for t in tables] == pytest.approx([14.0, 3.5, 8.0])
    assert [t.num_features for t in tables] == [2, 2, 2]
    assert [t.optimizer for t in tables] == ["rowwise_adagrad", "adam", "sgd"]


def test_options_are_column_sharded_and_placeable() -> None:
    ebc = make_ebc([(100, 256), (100, 10)])
    reader, options = options_of(ebc)
    columns = {k: o for k, o in options.items() if reader.is_column_sharded(o)}
    types = ("table_wise", "column_wise", "table_column_wise")
    assert columns.keys() == {("t0", kind, "fused") for kind in types}
    assert all(is_placeable(o, reader) for o in columns.values())
    # Which of two nodes is left open.
    by_node = columns[("t0", "table_column_wise", "fused")]
    nodes = TableReader(gpus(2, 1))
    assert not is_placeable(by_node, nodes)
    copies = on_nodes(by_node, nodes, 3)
    assert all(is_placeable(o, nodes) for o in copies)
    assert [node_ranks(o, nodes) for o in copies] == [range(1, 2), range(1)]
    # No kernel is known for them.
    reader, options = options_of(make_ebc([(9, 16)], data_types={0: DataType.INT4}))
    assert not any(reader.is_column_sharded(o) for o in options.values())


def test_fusion_key_separates_what_torchrec_separates() -> None:
    ebc = make_ebc(
        [(100, 16)] * 6, data_types={1: DataType.FP16}, poolings={2: PoolingType.MEAN}
    )
    for name, rate in (("t3", 0.5), ("t4", 0.1)):
        weight = ebc.embedding_bags[name].weight
        apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": rate})
    reader, options = options_of(ebc)
    keys = [fusion_key(whole(options, f"t{i}"), reader, "table_wise") for i in range(6)]
    assert len({repr(k) for k in keys}) == 5
    assert keys[0] == keys[5]
    column = fusion_key(whole(options, "t0"), reader, "column_wise")
    assert column != keys[0]


def test_placed_plan_keeps_shards_of_one_rank_separate() -> None:
    # TorchRec's own plans may put two shards of a table on one rank; it runs both.
    _, options = options_of(make_ebc([(100, 32), (50, 16)]))
    split = options[("t0", "column_wise", "fused")]
    other = options[("t1", "row_wise", "fused")]
    split.shards = [
        Shard(size=[100, 16], offset=[0, 0], rank=1),
        Shard(size=[100, 16], offset=[0, 16], rank=1),
    ]
    for rank, shard in enumerate(other.shards):
        shard.rank = rank
    costs = PlanCosts(gpus(), cost_model=AnalyticCostModel())
    placed = PlacedPlan([other, split], costs)
    both = ColumnShard(0, 0, 16, 1), ColumnShard(0, 16, 16, 1)
    assert placed.placement.shards == both
    assert placed.costed is not None and placed.costed.options == (split, other)
    assert placed.task is not None
    assert (placed.task.batch_size, placed.task.num_groups) == (64, 1)
