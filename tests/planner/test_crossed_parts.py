"""TorchRec's parts in our planner and ours in TorchRec's, in all combinations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torchrec.distributed.planner import partitioners, proposers
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import Partitioner, Proposer
from torchrec.distributed.types import CacheParams

from tests.builders import (
    QUICK,
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
Parts = Mapping[str, Callable[[], Any]]


def torchrecs(module: Any, role: type) -> dict[str, Callable[[], Any]]:
    """Name -> TorchRec's own classes of a role, whatever its release has."""
    return {
        name: kind
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, role) and kind.__module__ == module.__name__
    }


PARTITIONERS: Parts = {
    "default": lambda: None,
    "ours": lambda: NeuroShardPartitioner(*GIVEN, search=QUICK, **analytic()),
    **torchrecs(partitioners, Partitioner),
}
PROPOSERS: Parts = {
    "default": lambda: None,
    "ours": lambda: NeuroShardProposer(*GIVEN, **analytic()),
    "two": lambda: [proposers.GreedyProposer(), proposers.UniformProposer()],
    **torchrecs(proposers, Proposer),
}
ENUMERATORS: Parts = {
    "default": lambda: None,
    "ours": lambda: NeuroShardEnumerator(TOPOLOGY, 64, CONSTRAINTS, **analytic()),
    "TorchRec's": lambda: EmbeddingEnumerator(TOPOLOGY, 64, CONSTRAINTS),
}

USED_UP = {"DynamicProgrammingProposer", "EmbeddingOffloadScaleupProposer"}
"""For a second plan of TorchRec's planner, they propose nothing or loop forever."""


def test_torchrecs_parts_are_found() -> None:
    assert {"GreedyPerfPartitioner", "MemoryBalancedPartitioner"} <= {*PARTITIONERS}
    assert {"GreedyProposer", "DynamicProgrammingProposer"} <= {*PROPOSERS}


@pytest.mark.parametrize("enumerator", ENUMERATORS)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_parts_of_both_work_together(proposer: str, enumerator: str) -> None:
    """A second plan of the same planner equals the first."""
    ebc = make_ebc([(1000, 16), (20_000, 64)])
    makers: list[Callable[..., EmbeddingShardingPlanner]]
    makers = [make_planner, stock_planner]
    for name, partitioner in PARTITIONERS.items():
        for make in makers:
            parts = {
                "partitioner": partitioner(),
                "proposer": PROPOSERS[proposer](),
                "enumerator": ENUMERATORS[enumerator](),
            }
            if make is stock_planner and name == "default":
                parts["performance_model"] = NeuroShardPerfModel(*GIVEN, **analytic())
            given = {role: part for role, part in parts.items() if part is not None}
            planner = make(topology=TOPOLOGY, constraints=CONSTRAINTS, **given)
            plan = planner.plan(ebc, bag_sharders())
            check_plan(plan, ebc, 2)
            if isinstance(planner, NeuroShardPlanner):
                assert last_result(planner).fallback is None
                assert "t1" in planner.report().text(verbose=True)
            if make is make_planner or proposer not in USED_UP:
                assert planner.plan(ebc, bag_sharders()) == plan
