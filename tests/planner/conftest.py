"""Models and planners that the planner's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType

from torchrec_neuroshard.cost_models import CommsModel, CostModel
from torchrec_neuroshard.placement import Placement, ShardingTask
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.search import SearchConfig, Searcher, SearchResult
from torchrec_neuroshard.simulator import Simulator
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

Sizes = Sequence[tuple[int, int]]
MakeEbc = Callable[..., EmbeddingBagCollection]
MakePlanner = Callable[..., NeuroShardPlanner]


class FixedSearcher(Searcher):
    """Places (table, width, rank) triples given beforehand; counts its calls."""

    name = "fixed"

    def __init__(self, triples: Sequence[tuple[int, int, int]]) -> None:
        self.triples = triples
        self.tasks: list[ShardingTask] = []

    def search(
        self, task: ShardingTask, cost_model: CostModel, comms_model: CommsModel
    ) -> SearchResult:
        self.tasks.append(task)
        placement = Placement.from_widths(task.world_size, self.triples)
        predicted = Simulator(task, cost_model, comms_model).evaluate(placement)
        return SearchResult(
            placement=placement,
            predicted=predicted,
            lower_bound_ms=0.5 * predicted.critical_path_ms,
            gap=1.0,
            search_seconds=0.25,
            num_evaluated=7,
            warnings=("from the search",),
        )


@pytest.fixture
def fixed_searcher() -> type[FixedSearcher]:
    return FixedSearcher


@pytest.fixture
def make_ebc() -> MakeEbc:
    """Build an EmbeddingBagCollection from (rows, dim) pairs, tables t0, t1, ..."""

    def build(
        sizes: Sizes,
        *,
        weighted: bool = False,
        prefix: str = "",
        features: dict[int, list[str]] | None = None,
        data_types: dict[int, DataType] | None = None,
        poolings: dict[int, PoolingType] | None = None,
    ) -> EmbeddingBagCollection:
        tables = [
            EmbeddingBagConfig(
                name=f"{prefix}t{i}",
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=(features or {}).get(i, [f"{prefix}f{i}"]),
                data_type=(data_types or {}).get(i, DataType.FP32),
                pooling=(poolings or {}).get(i, PoolingType.SUM),
            )
            for i, (rows, dim) in enumerate(sizes)
        ]
        return EmbeddingBagCollection(
            tables=tables, device=torch.device("meta"), is_weighted=weighted
        )

    return build


@pytest.fixture
def make_planner() -> MakePlanner:
    """Build a planner with costs that can be worked out by hand."""

    def build(
        world_size: int = 2, compute_device: str = "cpu", **kwargs: Any
    ) -> NeuroShardPlanner:
        topology = kwargs.pop("topology", None) or Topology(
            world_size=world_size,
            compute_device=compute_device,
            **kwargs.pop("topology_arguments", {}),
        )
        arguments: dict[str, Any] = {
            "batch_size": 64,
            "cost_model": AnalyticCostModel(),
            "comms_model": AnalyticCommsModel(),
            "search": SearchConfig(beam_width=1, num_candidates=4, refine=False),
            "storage_reservation": FixedPercentageStorageReservation(percentage=0.0),
            "stats": [],
            "debug": False,
            # What is under test are searched placements, unless a test says otherwise.
            "consider_stock": False,
        }
        return NeuroShardPlanner(topology=topology, **(arguments | kwargs))

    return build


@pytest.fixture
def sharders() -> list[EmbeddingBagCollectionSharder]:
    return [EmbeddingBagCollectionSharder()]


def shards_of(plan: ShardingPlan) -> dict[str, list[tuple[int, int, int]]]:
    """Table -> (offset, width, rank) of each shard, by offset."""
    found = {}
    for path, module_plan in plan.plan.items():
        for name, sharding in module_plan.items():
            found[f"{path}.{name}" if path else name] = sorted(
                (m.shard_offsets[1], m.shard_sizes[1], r)
                for m, r in zip(
                    sharding.sharding_spec.shards, sharding.ranks, strict=True
                )
            )
    return found


@pytest.fixture
def read_shards() -> Callable[[ShardingPlan], dict[str, list[tuple[int, int, int]]]]:
    return shards_of


def types_of(plan: ShardingPlan) -> dict[str, str]:
    """Table -> sharding type."""
    return {
        f"{path}.{name}" if path else name: sharding.sharding_type
        for path, module_plan in plan.plan.items()
        for name, sharding in module_plan.items()
    }


@pytest.fixture
def read_types() -> Callable[[ShardingPlan], dict[str, str]]:
    return types_of


@pytest.fixture
def selected() -> tuple[list[ShardingOption], Callable[..., list[ShardingOption]]]:
    """A list, and a planner callback that fills it with the chosen options."""
    seen: list[ShardingOption] = []

    def remember(options: list[ShardingOption]) -> list[ShardingOption]:
        seen[:] = options
        return options

    return seen, remember
