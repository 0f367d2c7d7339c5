"""Plans of models with dynamicemb tables, with a stand-in for dynamicemb."""

from __future__ import annotations

import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.planner.types import PlannerError

from tests.builders import (
    GIB,
    QUICK,
    analytic,
    bag_config,
    bag_sharders,
    bags,
    entries_of,
    gpus,
    keep_nothing_back,
)
from tests.contrib import dynamicemb_stand_in as stand_in
from torchrec_neuroshard.contrib.dynamicemb import (
    DynamicEmbeddingShardingPlanner,
    dynamic_bytes,
)
from torchrec_neuroshard.errors import ConfigError, EnvironmentMismatchError

HUGE = 10**9
STATIC = [bag_config(i, 10_000 * (i + 1), 64) for i in range(3)]
DYNAMIC = bag_config(9, HUGE, 64)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dynamicemb.planner", stand_in)


def dynamic(**options: Any) -> stand_in.DynamicEmbParameterConstraints:
    return stand_in.DynamicEmbParameterConstraints(
        sharding_types=["row_wise"],
        use_dynamicemb=True,
        dynamicemb_options=stand_in.DynamicEmbTableOptions(**options),
    )


def planner(
    *tables: Any, hbm_cap: int = 80 * GIB, **options: Any
) -> DynamicEmbeddingShardingPlanner:
    """Return a planner of these tables; tables as large as `HUGE` are dynamic."""
    static = stand_in.DynamicEmbParameterConstraints(compute_kernels=["fused"])
    return DynamicEmbeddingShardingPlanner(
        eb_configs=list(tables),
        topology=gpus(4, hbm_cap=hbm_cap),
        batch_size=64,
        constraints={
            t.name: dynamic(**options) if t.num_embeddings == HUGE else static
            for t in tables
        },
        storage_reservation=keep_nothing_back(),
        search=QUICK,
        stats=[],
        debug=False,
        **analytic(),
    )


def test_static_tables_are_planned_as_if_alone_on_smaller_devices() -> None:
    both = planner(*STATIC, DYNAMIC, global_hbm_for_values=8 * GIB)
    model = nn.ModuleDict({"ebc": bags(*STATIC, DYNAMIC)})
    found = entries_of(both.plan(model, bag_sharders()))
    sharding = found.pop("ebc.t9")
    assert isinstance(sharding, stand_in.DynamicEmbParameterSharding)
    assert (sharding.sharding_type, sharding.ranks) == ("row_wise", [0, 1, 2, 3])
    alone = planner(*STATIC, hbm_cap=80 * GIB - both.reserved_bytes)
    rest = nn.ModuleDict({"ebc": bags(*STATIC)})
    assert found == entries_of(alone.plan(rest, bag_sharders()))
    assert set(found) == {f"ebc.t{i}" for i in range(3)}
    assert "t9" not in str(both.static.report())


def test_dynamic_tables_leave_less_memory_for_static_ones() -> None:
    big = bag_config(0, 2_000_000, 64)  # 488 MiB
    room = 18 * GIB
    model = bags(big, DYNAMIC)
    planner(big, DYNAMIC, hbm_cap=room).plan(model, bag_sharders())
    crowded = planner(big, DYNAMIC, hbm_cap=room, global_hbm_for_values=4 * 13 * GIB)
    with pytest.raises(PlannerError, match="t0"):
        crowded.plan(model, bag_sharders())
    with pytest.raises(ConfigError, match=r"tables t9 need 1\d\.\d+ GiB.*has 10\.00"):
        planner(DYNAMIC, hbm_cap=10 * GIB, global_hbm_for_values=32 * GIB)


def test_a_model_of_dynamic_tables_alone() -> None:
    found = entries_of(planner(DYNAMIC).plan(bags(DYNAMIC), bag_sharders()))
    assert {n: s.compute_kernel for n, s in found.items()} == {
        "t9": "customized_kernel"
    }


class Strategy(Enum):
    STEP = 1
    NO_EVICTION = 2


@pytest.mark.parametrize(
    ("options", "slots", "slot"),
    [
        ({}, 1024, 21),
        ({"score_strategy": (Strategy.STEP, Strategy.STEP)}, 1024, 29),
        ({"score_strategy": Strategy.NO_EVICTION}, 2048, 21),
        ({"caching": True}, 1024 + 4096 // 256, 21),
        ({"admission_counter": SimpleNamespace(capacity=512)}, 1536, 21),
    ],
)
def test_bytes_are_those_of_values_and_hash_tables(
    options: dict[str, Any], slots: int, slot: int
) -> None:
    given = dynamic(global_hbm_for_values=4 * 4096, **options)
    table = bag_config(0, 4000, 64)
    stand_in.DynamicEmbeddingShardingPlanner([table], gpus(4), 64, {"t0": given})
    assert given.dynamicemb_options is not None
    taken = dynamic_bytes(given.dynamicemb_options)
    assert taken == 4096 + slots * slot + slots * 4 // 128 + 1


def test_without_dynamicemb_its_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dynamicemb.planner")
    with pytest.raises(EnvironmentMismatchError, match="dynamicemb is not installed"):
        planner(*STATIC)
