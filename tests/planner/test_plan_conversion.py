from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import ATTACHES_OPTIMIZERS, gpus, make_ebc, only
from torchrec_neuroshard.costs.task import ColumnShard
from torchrec_neuroshard.planner.compat import sharders_by_type
from torchrec_neuroshard.planner.option_facts import note_sharders
from torchrec_neuroshard.planner.placed import PlacedPlan, fusion_key
from torchrec_neuroshard.planner.plan_costs import PlanCosts
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.ways import is_placeable, node_ranks, on_nodes
from torchrec_neuroshard.testing import AnalyticCostModel

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
