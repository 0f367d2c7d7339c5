"""Builders as fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan

from tests import builders
from torchrec_neuroshard.planner import NeuroShardPlanner, torchrec_plan


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, TorchRec's planner is asked."""
    monkeypatch.setattr(torchrec_plan, "LEAST_STOCK_SECONDS", 15.0)


@pytest.fixture
def fixed_searcher() -> type[builders.FixedSearcher]:
    return builders.FixedSearcher


@pytest.fixture
def make_ebc() -> Callable[..., EmbeddingBagCollection]:
    return builders.make_ebc


@pytest.fixture
def make_planner() -> Callable[..., NeuroShardPlanner]:
    return builders.make_planner


@pytest.fixture
def sharders() -> list[EmbeddingBagCollectionSharder]:
    return builders.bag_sharders()


@pytest.fixture
def read_shards() -> Callable[[ShardingPlan], dict[str, list[tuple[int, int, int]]]]:
    return builders.shards_of


@pytest.fixture
def read_types() -> Callable[[ShardingPlan], dict[str, str]]:
    return builders.types_of
