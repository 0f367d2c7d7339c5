"""A sharding type of a later TorchRec needs one row of our table of sharding types."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, enumerators

from tests.builders import gpus, last_result, make_ebc, make_planner
from torchrec_neuroshard.planner.checks import KNOWN_VALUES
from torchrec_neuroshard.tables.sharding_types import SHARDING_TYPES

NEW, LIKE = "later_row_wise", "row_wise"


class LaterSharder(EmbeddingBagCollectionSharder):
    """A sharder that offers the new type."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*super().sharding_types(compute_device_type), NEW]


@pytest.fixture
def later_torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TorchRec list the new type like row-wise sharding."""

    def known(value: Any) -> Any:
        return LIKE if isinstance(value, str) and value == NEW else value

    for name in ("calculate_shard_sizes_and_offsets", "get_partition_by_type"):
        inner = getattr(enumerators, name)

        def listed(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            named = {key: known(value) for key, value in kwargs.items()}
            return inner(*map(known, args), **named)

        monkeypatch.setattr(enumerators, name, listed)
    monkeypatch.setitem(
        KNOWN_VALUES, "sharding_types", [*KNOWN_VALUES["sharding_types"], NEW]
    )


def planned(kind: str) -> tuple[Any, Any]:
    """Return the sharding of each table, and the result of planning."""
    planner = make_planner(
        topology=gpus(4),
        constraints={
            "t0": ParameterConstraints(sharding_types=[kind]),
            "t1": ParameterConstraints(sharding_types=["column_wise", kind]),
        },
        batch_size=512,
        stats=[],  # TorchRec's own statistics switch on the name
    )
    module = make_ebc([(400_000, 64), (1_000, 64)])
    plan = planner.plan(module, [LaterSharder()])
    (tables,) = plan.plan.values()
    return tables, last_result(planner)


@pytest.mark.usefixtures("later_torchrec")
def test_a_row_of_the_table_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(SHARDING_TYPES[LIKE], name=NEW)
    monkeypatch.setitem(SHARDING_TYPES, NEW, row)
    tables, result = planned(NEW)
    known, expected = planned(LIKE)
    assert tables["t0"].sharding_type == NEW
    assert [s.shard_sizes for s in tables["t0"].sharding_spec.shards] == [
        s.shard_sizes for s in known["t0"].sharding_spec.shards
    ]
    assert result.fallback is None
    assert result.predicted.critical_path_ms == expected.predicted.critical_path_ms
