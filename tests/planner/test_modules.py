"""Other modules than EmbeddingBagCollection: what is planned, and what trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.itep_embeddingbag import ITEPEmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
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
    last_result,
    make_planner,
    only,
    sequences,
    stock_planner,
    types_of,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner import NeuroShardEnumerator
from torchrec_neuroshard.tables.profile import FeatureProfile
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

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


EVERY_SHARDER: list[Any] = [
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
    stock = stock_planner(topology).plan(module, EVERY_SHARDER)
    plan = planner.plan(module, EVERY_SHARDER)
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
    plan = planner.plan(model, EVERY_SHARDER)
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
    assert planner.evaluate(plan, model, EVERY_SHARDER).tables == report.tables
    assert not planner.compare(plan, model, EVERY_SHARDER).moves


def test_sequences_inside_other_modules_are_priced_as_sequences() -> None:
    """TorchRec marks the options of such modules as pooled."""
    sharders = [*EVERY_SHARDER]

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


# --- what a device does not train (distributed/test_support.py trains plans) ---


SHARDERS: list[Any] = [
    ITEPEmbeddingBagCollectionSharder(),
    EmbeddingTowerSharder(),
    *get_default_sharders(),
]
SEEN = {
    "profiles": {"f1": FeatureProfile(batch_size=1, num_lookups=1, batch_share=1 / 8)}
}
"""Profiles of batches whose feature f1 has an eighth of the samples."""


class SplitsRows(EmbeddingBagCollectionSharder):
    """Offers on CPUs what TorchRec's sharder offers on GPUs."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        found: list[str] = super().sharding_types("cuda")
        return found


SPLITS_ROWS: list[Any] = [SplitsRows()]
ROWS, NODE_ROWS, GRID = ["row_wise"], ["table_row_wise"], ["grid_shard"]
REPLICAS, WHOLE = ["data_parallel"], ["table_wise"]


def of_mean(*means: int, count: int = 2, rows: int = 1000) -> Any:
    """Bags; those of these numbers have mean pooling."""
    return bags(
        *(
            bag_config(
                i,
                rows,
                128,
                pooling=PoolingType.MEAN if i in means else PoolingType.SUM,
            )
            for i in range(count)
        )
    )


def planned(
    module: nn.Module, device: str, sharders: Any = SHARDERS, **arguments: Any
) -> dict[str, str]:
    topology = gpus(4, 2) if device == "cuda" else None
    planner = make_planner(4, topology=topology, **arguments)
    return types_of(planner.plan(module, sharders))


def pruned() -> ITEPEmbeddingBagCollection:
    return ITEPEmbeddingBagCollection(bags(), GenericITEPModule({"t0": 2000}))


MANY_BAGS = fused_bags(*(bag_config(i, 20, 64) for i in range(30)))
ON_CPUS: list[tuple[nn.Module, Any, str]] = [
    (EmbeddingTower(bags(), nn.Linear(3, 3)), {}, "towers on GPUs only"),
    (pruned(), {}, r"\(ITEP\) on GPUs only"),
    (
        bags(),
        only(sharding_types=REPLICAS) | only("t1", batch_sizes=[8]),
        "dense kernel takes one batch size .* it has 8 beside 64",
    ),
    (sequences(4, prefix="t"), only(sharding_types=REPLICAS), "pools the ids"),
    (
        sequences(32, prefix="t"),
        only(batch_sizes=[8]),
        "gradients of repeated samples .* they have 8 beside 64",
    ),
]
"""A model, its constraints, and why CPUs do not train it; GPUs do."""
NOWHERE: list[tuple[nn.Module, Any, str]] = [
    # FBGEMM's GPU kernels raise "cache_precision bf16 not supported!".
    *(
        (bags(bag_config(data_type=kind)), {}, f"FBGEMM trains .* is {kind.value}")
        for kind in (DataType.BF16, DataType.INT8)
    ),
    # Two hooks reduce their gradients; the second backward pass fails.
    (
        MANY_BAGS,
        only(sharding_types=REPLICAS),
        "FusedEmbeddingBagCollection twice",
    ),
]
MEANS: list[tuple[nn.Module, Any, str]] = [
    (
        of_mean(0),
        only(sharding_types=ROWS) | only("t1", sharding_types=WHOLE),
        r"t1' .*table 't0' .*MEAN.* Allow row_wise",
    ),
    (of_mean(0), only(sharding_types=GRID), "t0' .*grid_shard returns sums .* MEAN"),
]


@pytest.mark.parametrize(
    ("device", "module", "limits", "fault"),
    [
        *(("cpu", *case) for case in (*ON_CPUS, *NOWHERE)),
        *(("cuda", *case) for case in (*NOWHERE, *MEANS)),
    ],
)
def test_what_is_not_trained_is_refused(
    device: str, module: nn.Module, limits: Any, fault: str
) -> None:
    with pytest.raises(ConfigError, match=f"table '.*{fault}"):
        planned(module, device, constraints=limits)


@pytest.mark.parametrize(
    ("module", "limits"),
    [
        *(case[:2] for case in ON_CPUS),
        (of_mean(), MEANS[0][1]),
        (of_mean(1), MEANS[1][1]),
    ],
)
def test_gpus_train_it(module: nn.Module, limits: Any) -> None:
    types = planned(module, "cuda", constraints=limits)
    for name, constraint in limits.items():
        assert not constraint.sharding_types or [types[name]] == (
            constraint.sharding_types
        )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bags_with_a_fused_optimizer_are_not_replicated(device: str) -> None:
    assert "data_parallel" not in planned(MANY_BAGS, device).values()


@pytest.mark.parametrize("told", [{"constraints": only("t1", batch_sizes=[8])}, SEEN])
def test_rows_are_not_split_for_variable_batches_over_gloo(told: Any) -> None:
    """Gloo gathers tensors of one size; a constraint or profiles tell of several."""
    module = bags(bag_config(0), bag_config(1))
    limits = told.get("constraints", {}) | only(sharding_types=ROWS)
    with pytest.raises(ConfigError, match=r"'t0' .* over gloo row_wise .* 8 beside 64"):
        planned(module, "cpu", SPLITS_ROWS, **told | {"constraints": limits})
    types = planned(module, "cpu", SPLITS_ROWS, **told)
    assert set(types.values()) <= {*WHOLE, "column_wise"}
    assert planned(module, "cuda", **told | {"constraints": limits})["t0"] == "row_wise"


def options_of(module: nn.Module, **arguments: Any) -> dict[str, set[str]]:
    """Sharding types that are listed for each table."""
    enumerator = NeuroShardEnumerator(
        gpus(4, 2),
        64,
        cost_model=AnalyticCostModel(),
        comms_model=AnalyticCommsModel(),
        **arguments,
    )
    found: dict[str, set[str]] = {}
    for option in enumerator.enumerate(module, SHARDERS):
        found.setdefault(option.name, set()).add(option.sharding_type)
    return found


def test_row_wise_means_stay_apart_from_other_types() -> None:
    """TorchRec divides the outputs of the whole module, but for row-wise sums."""
    rows = {*ROWS, *NODE_ROWS}
    mixed = options_of(of_mean(0))
    assert not mixed["t0"] & rows and mixed["t0"] >= {*WHOLE, *REPLICAS}
    assert mixed["t1"] >= rows
    both = options_of(of_mean(0, 1))
    assert not (both["t0"] | both["t1"]) & rows
    assert options_of(of_mean(0, count=1))["t0"] >= rows
    # All are row-wise where one can be nothing else.
    for limits in (ROWS, NODE_ROWS):
        forced = options_of(of_mean(0), constraints=only(sharding_types=limits))
        assert forced == {"t0": {*limits}, "t1": rows}
    large = options_of(of_mean(0, rows=10**9))
    assert large == {"t0": rows, "t1": rows}


def test_a_given_plan_with_wrong_means_is_said_to_be_one() -> None:
    limits = only("t0", sharding_types=ROWS) | only("t1", sharding_types=WHOLE)
    module, topology = of_mean(0), gpus(4, 2)
    theirs = stock_planner(topology, constraints=limits).plan(module, SHARDERS)
    planner = make_planner(4, topology=topology)
    (note,) = planner.evaluate(theirs, module, SHARDERS).notes
    assert (note.code, note.table, note.severity) == ("cannot-run", "t1", "error")
    assert "divides its outputs by their number of ids" in note.text


def test_a_callers_enumerator_may_list_what_is_not_trained() -> None:
    enumerator = EmbeddingEnumerator(gpus(4, 2), 64)
    module = bags(bag_config(data_type=DataType.BF16))
    planner = make_planner(4, topology=gpus(4, 2), enumerator=enumerator)
    with pytest.warns(UserWarning, match="table 't0': on GPUs FBGEMM trains"):
        planner.plan(module, SHARDERS)
    assert "cannot-run" in {note.code for note in last_result(planner).notes}
