"""Other modules than EmbeddingBagCollection: we plan what TorchRec plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)

from tests.builders import (
    GIB,
    META,
    bag_config,
    bags,
    cost_of,
    fused_bags,
    gpus,
    make_planner,
    only,
    sequences,
    stock_planner,
)

NUM_TABLES = 3


def configs(**arguments: Any) -> list[EmbeddingBagConfig]:
    return [bag_config(i, **arguments) for i in range(NUM_TABLES)]


def feature_processed() -> Any:
    return FeatureProcessedEmbeddingBagCollection(
        bags(weighted=True),
        PositionWeightedModuleCollection(
            {f"f{i}": 10 for i in range(NUM_TABLES)}, device=torch.device("cpu")
        ),
    )


def quantised() -> Any:
    return QuantEmbeddingBagCollection(
        tables=configs(data_type=DataType.INT8), is_weighted=False, device=META
    )


def tied() -> Any:
    shared = bags()
    return nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})


class Unheard(nn.Module):
    """Not a TorchRec module, so it has no configurations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(100, 16, device="meta"))


class UnheardSharder(EmbeddingBagCollectionSharder):
    @property
    def module_type(self) -> Any:
        return Unheard

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        return {"weight": module.weight}


KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "feature processed": (feature_processed, NUM_TABLES),
    "fused": (fused_bags, NUM_TABLES),
    "without features": (
        lambda: bags(bag_config(0, feature_names=[]), *configs()[1:]),
        NUM_TABLES,
    ),
    "tied": (tied, NUM_TABLES),
    "quantised": (quantised, 0),
    "tower": (lambda: EmbeddingTower(bags(), nn.Linear(3, 3)), 0),
    "no TorchRec module": (
        lambda: nn.ModuleDict({"own": Unheard(), "plain": bags()}),
        NUM_TABLES,
    ),
    "odd widths": (lambda: bags(*configs(dim=10)), 0),
}
"""Kind -> its module and how many of its tables the search places."""


SHARDERS: list[Any] = [
    UnheardSharder(),
    QuantEmbeddingBagCollectionSharder(),
    EmbeddingTowerSharder(),
    *get_default_sharders(),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_that_torchrec_plans(kind: str) -> None:
    build, num_searched = KINDS[kind]
    module = build()
    topology = Topology(2, "cpu" if kind == "odd widths" else "cuda")
    planner = make_planner(topology=topology)
    stock = stock_planner(topology).plan(module, SHARDERS)
    plan = planner.plan(module, SHARDERS)
    assert {p: set(m) for p, m in plan.plan.items()} == {
        p: set(m) for p, m in stock.plan.items()
    }
    result, task = planner.last_result, planner.last_task
    if kind == "feature processed":
        assert task is not None and all(t.weighted for t in task.tables)
    # Replicas and rows, which the search may choose as well, are not counted there.
    assert (0 if task is None else len(task.tables)) <= num_searched
    if plan.plan:
        assert result is not None and result.fallback is None
        assert result.predicted.critical_path_ms > 0


def two_towers() -> Any:
    tower = EmbeddingTower(bags(bag_config(rows=60_000_000, dim=64)), nn.Linear(3, 3))
    model = nn.Module()
    model.tower, model.towers = tower, nn.ModuleList([tower])
    return model


def two_names() -> Any:
    model = nn.Module()
    one = bags(bag_config(rows=60_000_000, dim=64))
    model.one, model.two = one, nn.Sequential(nn.ModuleList([one]))
    return model


@pytest.mark.parametrize("build", [two_names, two_towers])
def test_a_module_with_several_names_is_counted_once(build: Callable[[], Any]) -> None:
    """`DistributedModelParallel` shards it under the first and reuses it."""
    model = build()
    planner = make_planner(topology=gpus(2, hbm_cap=16 * GIB, ddr_cap=8 * GIB))
    plan = planner.plan(model, SHARDERS)
    places = [
        (tables["t0"].compute_kernel, tables["t0"].sharding_spec)
        for tables in plan.plan.values()
    ]
    names = [n for n, _ in model.named_modules(remove_duplicate=False)]
    assert sorted(plan.plan) == sorted(
        n for n in names if n in ("one", "two.0.0", "tower", "towers.0")
    )
    assert all(place == ("fused", places[0][1]) for place in places)
    first, *_ = [n for n in names if n in plan.plan]
    report = planner.report()
    assert [t.table for t in report.tables] == [f"{first}.t0"]
    assert planner.evaluate(plan, model, SHARDERS).tables == report.tables
    assert not planner.compare(plan, model, SHARDERS).moves


def test_sequences_inside_other_modules_are_priced_as_sequences() -> None:
    """TorchRec marks the options of such modules as pooled."""
    sharders = [*SHARDERS]

    def cost(module: Any, kind: str = "row_wise") -> float:
        limits = only("s0", sharding_types=[kind], pooling_factors=[20.0])
        planner = make_planner(topology=gpus(2), constraints=limits)
        planner.plan(nn.ModuleDict({"part": module}), sharders)
        return cost_of(planner)

    alone = pytest.approx(cost(sequences(64)))
    tower = EmbeddingTower(sequences(64), nn.Identity())
    assert cost(tower, "table_row_wise") == alone
    pec = pytest.importorskip("torchrec.distributed.pec_embedding")  # since 1.7
    sharders.append(pec.PECEmbeddingCollectionSharder())
    assert cost(pec.PECEmbeddingCollection(sequences(64))) == alone
