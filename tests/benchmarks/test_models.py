"""Models of a table set, before and after they are sharded."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.models import (
    NUM_DENSE_FEATURES,
    OPTIMIZER_CLASSES,
    ConcatDLRM,
    build_collection,
    draw_clicks,
    fill_tables,
    local_tables,
)
from tests.builders import ATTACHES_OPTIMIZERS
from torchrec_neuroshard.planner.options.table_reader import TableReader
from torchrec_neuroshard.tables import OPTIMIZERS, TableConfig

pytestmark = ATTACHES_OPTIMIZERS

CPU = torch.device("cpu")
TABLES = (
    TableConfig(name="a", num_embeddings=70_000, embedding_dim=8, pooling_factor=2.0),
    TableConfig(
        name="b",
        num_embeddings=50,
        embedding_dim=12,
        pooling_factor=3.0,
        num_features=2,
        optimizer="sgd",
    ),
)


Cut = tuple[int, int, int, int]
"""First row and column, rows and columns of a shard."""


class Sharded(nn.Module):
    """What a sharded model says that a rank holds."""

    def __init__(self, cuts: dict[str, list[Cut]]) -> None:
        super().__init__()
        self.shards = {name: list(map(shard, parts)) for name, parts in cuts.items()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        tables = {
            f"embeddings.embedding_bags.{name}.weight": SimpleNamespace(
                local_shards=partial(list, shards)
            )
            for name, shards in self.shards.items()
        }
        return {**tables, "bottom.weight": torch.ones(3)}


def shard(cut: Cut) -> SimpleNamespace:
    top, left, height, width = cut
    return SimpleNamespace(
        tensor=torch.zeros(height, width),
        metadata=SimpleNamespace(shard_offsets=[top, left]),
    )


def filled(cuts: dict[str, list[Cut]]) -> dict[str, torch.Tensor]:
    """Tables put together again from the parts."""
    model = Sharded(cuts)
    fill_tables(model, TABLES, seed=5)
    whole = {
        t.name: torch.full((t.num_embeddings, t.embedding_dim), torch.nan)
        for t in TABLES
    }
    for name, values, (top, left) in local_tables(model):
        height, width = values.shape
        whole[name][top : top + height, left : left + width] = values
    return whole


def test_first_weights_do_not_depend_on_the_cuts() -> None:
    one = filled({"a": [(0, 0, 70_000, 8)], "b": [(0, 0, 50, 12)]})
    cut = filled(
        {
            "a": [(0, 0, 66_000, 8), (66_000, 0, 4_000, 8)],  # across a chunk's end
            "b": [(0, 0, 50, 4), (0, 4, 50, 8)],
        }
    )
    for name, values in one.items():
        assert not values.isnan().any()
        assert torch.equal(values, cut[name])
    assert one["a"].abs().max() <= 70_000**-0.5
    assert not torch.equal(one["a"][:50], one["a"][65_536 : 65_536 + 50])


def test_replicas_are_filled_like_tables() -> None:
    class Replica(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"x.embedding_bags.b.weight": self.values}

        def __init__(self) -> None:
            super().__init__()
            self.values = torch.zeros(50, 12)

    replica = Replica()
    fill_tables(replica, TABLES, seed=5)
    assert torch.equal(replica.values, filled({"b": [(0, 0, 50, 12)]})["b"])


def test_every_optimizer_reaches_the_planner() -> None:
    assert set(OPTIMIZER_CLASSES) == set(OPTIMIZERS)
    tables = [
        TableConfig(
            name=name,
            num_embeddings=10,
            embedding_dim=4,
            pooling_factor=1.0,
            optimizer=name,
        )
        for name in OPTIMIZERS
    ]
    collection = build_collection(tables)
    reader = TableReader(world_size=2, constraints=None, profiles=None)
    for name, parameter in zip(OPTIMIZERS, collection.parameters(), strict=True):
        assert parameter.is_meta
        option: Any = SimpleNamespace(
            tensor=parameter, module=("embeddings", collection), compute_kernel="fused"
        )
        assert reader.optimizer(option) == name


def test_output_is_in_the_tables_order_whatever_the_plan() -> None:
    from torchrec.sparse.jagged_tensor import KeyedTensor

    model = ConcatDLRM(TABLES, CPU)
    batch = draw_clicks(TABLES, 6, seed=3, device=CPU)
    assert batch.dense_BD.shape == (6, NUM_DENSE_FEATURES)
    assert batch.ids.keys() == ["a", "b:0", "b:1"]
    parts = {
        "a": torch.randn(6, 8),
        "b:0": torch.randn(6, 12),
        "b:1": torch.ones(6, 12),
    }
    outputs = []
    for keys in (["a", "b:0", "b:1"], ["b:1", "a", "b:0"]):
        found = KeyedTensor.from_tensor_list(keys, [parts[k] for k in keys])
        model.embeddings = _Fixed(found)
        outputs.append(model(batch.dense_BD, batch.ids))
    assert torch.equal(outputs[0], outputs[1])


class _Fixed(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, ids: Any) -> Any:
        return self.output


def test_dense_layers_are_the_same_on_all_ranks_and_leave_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    one, two = ConcatDLRM(TABLES, CPU), ConcatDLRM(TABLES, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
    for a, b in zip(one.top.parameters(), two.top.parameters(), strict=True):
        assert torch.equal(a, b)


def test_batches_repeat_by_seed() -> None:
    one, same = (draw_clicks(TABLES, 4, 7, CPU) for _ in range(2))
    other = draw_clicks(TABLES, 4, 8, CPU)
    assert torch.equal(one.dense_BD, same.dense_BD)
    assert torch.equal(one.ids.values(), same.ids.values())
    assert not torch.equal(one.dense_BD, other.dense_BD)
    assert set(one.clicks_B.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("name", ["a", "b"])
def test_tables_of_the_collection_are_the_configured(name: str) -> None:
    (found,) = (
        c for c in build_collection(TABLES).embedding_bag_configs() if c.name == name
    )
    wanted = next(t for t in TABLES if t.name == name)
    assert found.num_embeddings == wanted.num_embeddings
    assert found.embedding_dim == wanted.embedding_dim
    assert len(found.feature_names) == wanted.num_features
