"""Plans in TorchRec's storage: stored by `storage_hash`, read by a `PlanLoader`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner, extract_plan
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
)
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheParams,
    PipelineType,
    ShardingType,
)
from torchrec.modules.embedding_configs import DataType

from tests.builders import (
    GIB,
    MIB,
    FixedSearcher,
    Nested,
    bag_config,
    bags,
    cost_of,
    each,
    gpus,
    last_result,
    make_ebc,
    make_planner,
    only,
    sequences,
    stock_planner,
    types_of,
)
from torchrec_neuroshard.bundles.find import load_cost_model
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.planner.compat import planner_part, torchrec_stashes
from torchrec_neuroshard.planner.partitioner import NeuroShardPartitioner
from torchrec_neuroshard.planner.topology import topology_for

pytestmark = pytest.mark.filterwarnings(
    "ignore:no cost model was measured", "ignore:the plan will run out of memory"
)

SHARDERS: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
SIZES = [(1_000_000, 64), (2_000_000, 64)]


class StoredPlan(PlanLoader):
    """A planner's last plan as TorchRec stores it."""

    def __init__(self, planner: EmbeddingShardingPlanner) -> None:
        options = pickle.loads(pickle.dumps(planner_part(planner, "best_plan")))
        self.options = {option.storage_hash(): option for option in options}
        self._hash: str | None = planner.hash_planner_context_inputs_str()

    def load(self) -> dict[int, ShardingOption] | None:
        return self.options

    def plan_context_hash(self) -> str | None:
        return self._hash

    def get_plan_id(self) -> str:
        return "plan"


class NoPlan(StoredPlan):
    """A storage without a plan for this context."""

    def load(self) -> None:
        return None


class SelectedPlan(StoredPlan):
    """A stored plan that is loaded in any context."""

    def plan_context_hash(self) -> None:
        return None


def by_types(*kinds: str, **given: Any) -> dict[str, Any]:
    """Three tables on two nodes of two GPUs, of these sharding types."""
    model = make_ebc([(5000, 64), (1001, 96), (300, 32)])
    return {
        "model": model,
        "topology": gpus(4, 2),
        "constraints": each(3, *kinds, **given),
    }


UNEVEN = CustomTopologyData({"hbm_cap": [16 * MIB, 48 * MIB]}, 2)
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "one node": lambda: {
        "model": make_ebc(SIZES),
        "topology": topology_for("h100", world_size=4),
    },
    "two nodes": lambda: {
        "model": make_ebc(SIZES),
        "topology": topology_for("h100", num_nodes=2),
    },
    "uneven columns": lambda: {
        "model": make_ebc([(100, 32), (50, 16), (30, 8)]),
        "search": FixedSearcher([(0, 20, 0), (0, 12, 1), (1, 16, 1), (2, 8, 0)]),
    },
    **{
        kind.value: partial(by_types, kind.value, min_partition=16)
        for kind in ShardingType
    },
    "uneven rows": lambda: {
        "model": bags(bag_config(0, 1000, 64)),
        "topology": gpus(2, custom_topology_data=UNEVEN),
        "constraints": only(sharding_types=["row_wise"]),
    },
    "host memory": lambda: by_types(compute_kernels=["fused_uvm"]),
    "caches": lambda: {  # which no table needs before the search
        "model": make_ebc(
            [(2_000_000, 64), (1_500_000, 64), (3_000_000, 32), (400_000, 128)]
        ),
        "topology": gpus(2, hbm_cap=512 * MIB, ddr_cap=8 * GIB),
        "batch_size": 512,
        "cost_model": load_cost_model("h100", device_type="cuda"),
        "comms_model": None,
        "constraints": each(4, pooling_factors=[10.0]),
    },
    "prefetched caches": lambda: (
        by_types(
            compute_kernels=["fused_uvm_caching"],
            cache_params=CacheParams(load_factor=0.3),
        )
        | {"pipeline_type": PipelineType.TRAIN_PREFETCH_SPARSE_DIST}
    ),
    "sequences": lambda: {"model": sequences(64, 64, 64), "topology": gpus(4)},
    "nested and weighted": lambda: {
        "model": Nested(make_ebc([(5000, 64), (70_000, 128)], weighted=True)),
        "topology": gpus(4),
    },
    "poolings and settings": lambda: by_types(
        num_poolings=[2.0],
        stochastic_rounding=True,
        bounds_check_mode=BoundsCheckMode.FATAL,
        output_dtype=DataType.FP16,
    ),
    "memory by TorchRec's count": lambda: {
        "model": make_ebc([(1000, 64)]),
        "topology": gpus(2, hbm_cap=1_200_000),
    },
    "TorchRec's enumerator": lambda: {
        "model": make_ebc(SIZES),
        "topology": gpus(4),
        "enumerator": EmbeddingEnumerator(gpus(4), 64),
    },
}


FIELDS = """shards sharding_type compute_kernel cache_params partition_by num_poolings
enforce_hbm stash_weights"""


def check_same(first: NeuroShardPlanner, second: NeuroShardPlanner) -> None:
    """Both planners' last plans are the same options, whatever their order."""
    ours, theirs = (
        {
            o.fqn: (vars(o) | {"shards": o.shards, "module": o.module[0]})
            for o in planner.get_selected_options()
        }
        for planner in (first, second)
    )
    assert ours.keys() == theirs.keys()
    for name, own in ours.items():
        for field in FIELDS.split():
            assert own.get(field) == theirs[name].get(field), (name, field)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_plan_comes_back_from_torchrecs_storage(name: str) -> None:
    given, searcher = SETTINGS[name](), FixedSearcher([])
    model = given.pop("model")
    first = make_planner(**given)
    plan = first.plan(model, SHARDERS)
    stored = StoredPlan(first)
    same = {n: v for n, v in SETTINGS[name]().items() if n != "model"}
    second = make_planner(**same | {"search": searcher}, plan_loader=stored)
    assert second.plan(model, SHARDERS) == plan
    assert second.plan_loader is stored and searcher.tasks == []
    check_same(first, second)
    assert cost_of(second) == pytest.approx(cost_of(first))
    assert last_result(second).fallback is None
    # A loaded plan can be stored again, and also after other questions.
    again = StoredPlan(second)
    assert again.options.keys() == stored.options.keys()
    first.compare(plan, model, SHARDERS)
    for planner in (first, second):
        assert planner.hash_planner_context_inputs_str() == stored.plan_context_hash()
    assert first.hash_planner_context_inputs() == second.hash_planner_context_inputs()
    if name == "TorchRec's enumerator":
        return  # it keeps its own list
    extracted = extract_plan(first.enumerator.last_stored_search_space, stored.options)
    assert [(o.fqn, o.shards) for o in extracted] == [
        (o.fqn, o.shards) for o in stored.options.values()
    ]


TIGHT = {"topology": gpus(2, hbm_cap=1_200_000)}
"""Devices on which a table of 1000 x 64 fits by TorchRec's count alone."""


def test_without_a_stored_plan_one_is_made() -> None:
    """The storage is asked once, with the hash of the first search's options."""
    model, first = make_ebc([(1000, 64)]), make_planner(**TIGHT)
    plan = first.plan(model, SHARDERS)
    second = make_planner(**TIGHT, plan_loader=NoPlan(first))
    assert second.plan(model, SHARDERS) == plan
    other = make_planner(**TIGHT, batch_size=63, plan_loader=StoredPlan(first))
    with pytest.raises(PlannerError, match="planner input mismatch") as caught:
        other.plan(model, SHARDERS)
    assert caught.value.error_type == PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH


def test_torchrecs_plan_as_the_last_resort_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise PlannerError(error_type=PlannerErrorType.PARTITION, message="no")

    monkeypatch.setattr(NeuroShardPartitioner, "_place", fail)
    model, first = make_ebc([(1000, 64), (300, 32)]), make_planner(topology=gpus(2))
    plan = first.plan(model, SHARDERS)
    assert last_result(first).fallback
    # The last resort does not ask the storage: TorchRec lists other options.
    second = make_planner(topology=gpus(2), plan_loader=NoPlan(first))
    assert second.plan(model, SHARDERS) == plan and last_result(second).fallback
    third = make_planner(topology=gpus(2), plan_loader=StoredPlan(first))
    assert third.plan(model, SHARDERS) == plan and not last_result(third).fallback


def test_torchrecs_own_stored_plans_are_loaded() -> None:
    """Its options that the search does not list are not in the context either."""
    model, limits = make_ebc(SIZES), each(2, "table_wise", "column_wise")
    stock = stock_planner(gpus(4), constraints=each(2, "table_wise"))
    plan, stored = stock.plan(model, SHARDERS), SelectedPlan(stock)
    planner = make_planner(topology=gpus(4), constraints=limits, plan_loader=stored)
    assert planner.plan(model, SHARDERS) == plan
    assert set(types_of(plan).values()) == {"table_wise"}


@pytest.mark.parametrize(
    "given",
    [
        {"constraints": each(2, "row_wise")},
        {"constraints": each(2, "column_wise", compute_kernels=["fused_uvm"])},
        {"model": make_ebc(SIZES[:1])},
    ],
)
def test_a_plan_that_may_not_be_used_is_refused(given: dict[str, Any]) -> None:
    first = make_planner(topology=gpus(4), constraints=each(2, "column_wise"))
    first.plan(make_ebc(SIZES), SHARDERS)
    stored = SelectedPlan(first)
    model = {"model": make_ebc(SIZES), **given}.pop("model")
    given = {n: v for n, v in given.items() if n != "model"}
    planner = make_planner(topology=gpus(4), **given, plan_loader=stored)
    with pytest.raises(PlannerError, match="not all search space is covered") as caught:
        planner.plan(model, SHARDERS)
    assert caught.value.error_type == PlannerErrorType.PLAN_LOADING_FAILED


@pytest.mark.skipif(not torchrec_stashes(), reason="TorchRec stashes since 1.9")
def test_stashed_tables_of_a_stored_plan_stay_stashed() -> None:
    given: dict[str, Any] = {
        "topology": gpus(hbm_cap=500 * MIB, hbm_to_ddr_mem_bw=2**30 * 50 / 1000),
        "constraints": each(3, "table_wise", compute_kernels=["fused"]),
        "stash_bytes": 150 * MIB,
    }
    model, first = make_ebc([(300 * 4096, 64)] * 3), make_planner(**given)
    plan = first.plan(model, SHARDERS)
    assert first.stashed_tables
    second = make_planner(**given, plan_loader=StoredPlan(first))
    assert second.plan(model, SHARDERS) == plan
    assert second.stashed_tables == first.stashed_tables
    check_same(first, second)


def test_fresh_profiles_are_planned_for_whatever_is_stored() -> None:
    model, first = make_ebc([(1000, 16)] * 3), make_planner(4)
    first.plan(model, SHARDERS)
    second = make_planner(4, plan_loader=StoredPlan(first))
    assert second.relearned({}).plan_loader is None
