"""TorchRec's parts in our planner and ours in TorchRec's: each alone, and combined."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torchrec.distributed.planner import partitioners, proposers
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.perf_models import NoopPerfModel, NoopStorageModel
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import Partitioner, PlanLoader, Proposer
from torchrec.distributed.types import CacheParams

from tests.builders import (
    QUICK,
    Chosen,
    analytic,
    bag_sharders,
    check_plan,
    each,
    gpus,
    last_result,
    make_ebc,
    make_planner,
    stock_planner,
)
from torchrec_neuroshard.planner import (
    NeuroShardEnumerator,
    NeuroShardEstimator,
    NeuroShardPartitioner,
    NeuroShardPerfModel,
    NeuroShardPlanner,
    NeuroShardProposer,
)

TOPOLOGY = gpus()
# TorchRec's EmbeddingOffloadScaleupProposer needs cache_params for cached tables.
CONSTRAINTS = each(
    2,
    "table_wise",
    "row_wise",
    compute_kernels=["fused", "fused_uvm_caching"],
    cache_params=CacheParams(load_factor=0.5),
)
GIVEN: Any = (TOPOLOGY, CONSTRAINTS)
Parts = dict[str, Callable[..., Any]]


def torchrecs(module: Any, role: type) -> dict[str, Callable[[], Any]]:
    """Name -> TorchRec's own classes of a role, whatever its release has."""
    return {
        name: kind
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, role) and kind.__module__ == module.__name__
    }


class NothingStored(PlanLoader):
    """A storage without a plan, whatever the context."""

    def load(self) -> None:
        return None

    def plan_context_hash(self) -> None:
        return None

    def get_plan_id(self) -> str:
        return "plan"


def with_our_estimator() -> EmbeddingEnumerator:
    ours = NeuroShardEstimator(*GIVEN, **analytic())
    estimators = [ours, EmbeddingStorageEstimator(*GIVEN)]
    return EmbeddingEnumerator(TOPOLOGY, 64, CONSTRAINTS, estimators)


ROLES: dict[str, tuple[str, Parts]] = {
    "enumerator": (
        "enumerate",
        {
            "ours": lambda: NeuroShardEnumerator(
                TOPOLOGY, 64, CONSTRAINTS, **analytic()
            ),
            "TorchRec's": lambda: EmbeddingEnumerator(TOPOLOGY, 64, CONSTRAINTS),
            "with our estimator": with_our_estimator,
        },
    ),
    "proposer": (
        "propose",
        {
            "ours": lambda: NeuroShardProposer(*GIVEN, **analytic()),
            "two": lambda: [proposers.GreedyProposer(), proposers.UniformProposer()],
            **torchrecs(proposers, Proposer),
        },
    ),
    "partitioner": (
        "partition",
        {
            "ours": lambda: NeuroShardPartitioner(*GIVEN, search=QUICK, **analytic()),
            **torchrecs(partitioners, Partitioner),
        },
    ),
    "storage_reservation": (
        "reserve",
        {
            "fixed": lambda: FixedPercentageStorageReservation(0.1),
            "heuristical": lambda: HeuristicalStorageReservation(0.15),
        },
    ),
    "performance_model": (
        "rate",
        {
            "ours": lambda: NeuroShardPerfModel(*GIVEN, **analytic()),
            "of times": lambda: NoopPerfModel(TOPOLOGY),
            "of memory": lambda: NoopStorageModel(TOPOLOGY),
        },
    ),
    "stats": ("log", {"TorchRec's": EmbeddingStats}),
    "plan_loader": ("load", {"empty": NothingStored}),
}
"""Role -> the method that TorchRec's planner calls, and parts of this role."""
NONE: Parts = {"default": lambda: None}
COMBINED = [
    {"enumerator": enumerator, "proposer": proposer, "partitioner": partitioner}
    for enumerator in ("default", "ours", "TorchRec's")
    for proposer in NONE | ROLES["proposer"][1]
    for partitioner in NONE | ROLES["partitioner"][1]
]
ALONE = [
    {role: name}
    for role, (_, parts) in ROLES.items()
    for name in parts
    if name == "with our estimator" or role not in COMBINED[0]
]
USED_UP = {"DynamicProgrammingProposer", "EmbeddingOffloadScaleupProposer"}
"""For a second plan of TorchRec's planner, they propose nothing or loop forever."""


def test_torchrecs_parts_are_found() -> None:
    names = {*ROLES["partitioner"][1], *ROLES["proposer"][1]}
    assert names >= {"GreedyPerfPartitioner", "MemoryBalancedPartitioner"}
    assert names >= {"GreedyProposer", "DynamicProgrammingProposer"}


def watched(part: Any, method: str, asked: list[str]) -> Any:
    """The part, which from now on notes that its method is called."""
    inner = getattr(part, method)

    def noted(*args: Any, **named: Any) -> Any:
        asked.append(method)
        return inner(*args, **named)

    setattr(part, method, noted)
    return part


@pytest.mark.parametrize("make", [make_planner, stock_planner])
@pytest.mark.parametrize(
    "names", [*COMBINED, *ALONE], ids=lambda n: "-".join(n.values())
)
def test_parts_of_both_work_together(
    names: dict[str, str], make: Callable[..., Any]
) -> None:
    """All are asked, and a second plan of the same planner equals the first."""
    ebc = make_ebc([(1000, 16), (20_000, 64)])
    asked: list[str] = []
    chosen, given, expected = Chosen(), {}, set()
    for role, name in names.items():
        method, parts = ROLES[role]
        if name != "default":
            given[role] = part = parts[name]()
            expected.add(method)
            for one in part if isinstance(part, list) else [part]:
                watched(one, method, asked)
    planner = make(
        topology=TOPOLOGY, constraints=CONSTRAINTS, callbacks=[chosen], **given
    )
    plan = planner.plan(ebc, bag_sharders())
    check_plan(plan, ebc, 2)
    assert {*asked} == expected
    assert {option.name for option in chosen.options} == {"t0", "t1"}
    if isinstance(planner, NeuroShardPlanner):
        assert last_result(planner).fallback is None
        assert "t1" in planner.report().text(verbose=True)
    if make is make_planner or names.get("proposer") not in USED_UP:
        assert planner.plan(ebc, bag_sharders()) == plan
