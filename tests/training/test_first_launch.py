"""What a first launch draws, and what it does without memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints

from tests.builders import META, bag_config, bags, make_planner, make_tables
from torchrec_neuroshard.collect.timing import SetTimer
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.planner.first_launch import FirstLaunch
from torchrec_neuroshard.tables import DATA_TYPE_BYTES
from torchrec_neuroshard.training import first_launch
from torchrec_neuroshard.training.first_launch import (
    LaunchRequest,
    draw_launch_set,
)

SHARDS = make_tables([16, 8, 16, 64, 32], rows=[500, 500, 900, 10**8, 100])


def make_request(**fields: Any) -> LaunchRequest:
    """Four tables, one of them whole or in half, in two kernels."""
    known: dict[str, Any] = {
        "shards": SHARDS,
        "kernels": (0, 0, 0, 1, 1),
        "tables": (0, 0, 1, 2, 3),
        "batch_size": 128,
        "device_type": "cpu",
        "world_size": 2,
        "local_world_size": 2,
        "seconds": 1.0,
    }
    return LaunchRequest(**{**known, **fields})


def test_request_survives_the_way_to_another_process() -> None:
    request = make_request(hbm_gb_per_s=12.5)
    assert LaunchRequest.from_json(request.to_json()) == request
    request = make_request(sets=(SHARDS[:2], SHARDS[3:]), reference_ms=4.5)
    assert LaunchRequest.from_json(request.to_json()) == request


def test_sets_are_of_one_kernel_hold_a_table_once_and_fit() -> None:
    request, most = make_request(), 2**22
    seen: set[str] = set()
    for index in range(60):
        drawn = draw_launch_set(request, index, most)
        assert drawn == draw_launch_set(request, index, most)
        names = [t.name.partition("#")[0] for t in drawn]
        shards = [next(s for s in SHARDS if s.name == n) for n in names]
        places = [SHARDS.index(s) for s in shards]
        assert len({request.kernels[p] for p in places}) == 1
        tables = [request.tables[p] for p in places]
        assert len(set(tables)) == len(tables) > 0
        held = sum(
            t.num_embeddings * t.embedding_dim * DATA_TYPE_BYTES[t.data_type]
            for t in drawn
        )
        assert held <= most
        for table, shard in zip(drawn, shards, strict=True):
            # A table that is too large loses rows, not lookups.
            assert table.num_embeddings <= shard.num_embeddings
            wanted = shard.profile_at(request.batch_size).num_lookups
            assert table.profile_at(request.batch_size).num_lookups == wanted
        seen.update(names)
    assert seen == {t.name for t in SHARDS}


def test_a_set_without_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = SetTimer(
        torch.device("cpu"), 2**20, 1.0, min_passes=1, max_passes=1, num_batches=1
    )

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    arguments = (make_request(), 0, timer, torch.device("cpu"), 2**20)
    record = first_launch._measure_set(*arguments)
    assert record is not None and record.fwd_ms > 0 and record.held_out
    monkeypatch.setattr(timer, "measure", full)
    assert first_launch._measure_set(*arguments) is None


def launch_of(calibrate: str | float, cost_model: str = "measure") -> FirstLaunch:
    planner = make_planner(cost_model="cpu", comms_model=None)
    return FirstLaunch(planner.costs, cost_model, calibrate, None)


def test_what_the_search_may_place_is_what_is_drawn() -> None:
    constraints = {
        "t0": ParameterConstraints(sharding_types=["table_wise"]),
        "t1": ParameterConstraints(
            sharding_types=["column_wise"], min_partition=32, pooling_factors=[7.0]
        ),
        "t2": ParameterConstraints(sharding_types=["row_wise"]),
    }
    planner = make_planner(
        search_only=False, cost_model="cpu", comms_model=None, constraints=constraints
    )
    model = bags(*(bag_config(i, 1000, 64) for i in range(3)), device=META)

    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(super().sharding_types("cuda"))

    options = planner.enumerator.enumerate(model, [Sharder()])
    launch = FirstLaunch(planner.costs, "measure", 3.0, constraints)
    request = launch.request(options, 2)
    found = {
        (t.name.rpartition(".")[2], t.num_embeddings, t.embedding_dim)
        for t in request.shards
    }
    assert found == {
        ("t0", 1000, 64),
        ("t1", 1000, 64),
        ("t1", 1000, 32),
        ("t2", 500, 64),
    }
    assert request.batch_size == 2 * 64 and request.seconds == 3.0
    pooling = {t.name: t.pooling_factor for t in request.shards}
    assert 7.0 in pooling.values()
    # Rows of a table run in a kernel of their own.
    whole = np.array([t.num_embeddings == 1000 for t in request.shards])
    kernels = np.array(request.kernels)
    assert not set(kernels[whole]) & set(kernels[~whole])


@pytest.mark.parametrize(
    ("calibrate", "cost_model", "message"),
    [
        ("often", "auto", "must be 'auto', 'never' or a number of seconds"),
        (0.0, "auto", "above 0, got 0.0"),
        (5.0, "cpu", "measures for cost_model 'auto' or 'measure', got another"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    calibrate: Any, cost_model: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        launch_of(calibrate, cost_model)


def test_budget_of_cpus_is_nothing_unless_asked_for() -> None:
    assert launch_of("auto", "auto").seconds == 0.0
    assert launch_of("auto").seconds == 60.0
    assert launch_of(7).seconds == 7.0
    assert launch_of("never").seconds == 0.0


def test_without_measuring_there_is_a_warning_and_the_estimate() -> None:
    planner = make_planner(cost_model="measure", comms_model=None, calibrate="never")
    model = bags(bag_config(0, 100, 16), device=META)
    with pytest.warns(UserWarning, match="'never', and the cache holds none"):
        planner.plan(model, [EmbeddingBagCollectionSharder()])
    assert "not measured" in planner.costs.cost_model.source
    assert planner.last_result is not None
    assert any("cache holds none" in w for w in planner.last_result.warnings)


def test_a_request_without_tables_is_refused() -> None:
    launch = launch_of("auto")
    with pytest.raises(ConfigError, match="no table runs a kernel"):
        launch.request([], 2)
    assert dataclasses.replace(make_request(), seed=1) != make_request()
