"""Plans of a table whose padding id gets most lookups."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from torchrec.distributed.sharding_plan import get_default_sharders

from tests.builders import (
    GIB,
    cost_of,
    each,
    gpus,
    last_result,
    make_ebc,
    make_planner,
    only,
    sequences,
    types_of,
)
from torchrec_neuroshard.tables.profile import FeatureProfile, profile_ids
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

RANKS, ROWS, BATCH, LENGTH = 4, 100_000, 64, 50
RNG = np.random.default_rng(7)


def profile_of(share: float, hot: int = 0, rows: int = ROWS) -> FeatureProfile:
    """A batch of all ranks in which one id has a share of the lookups."""
    ids = RNG.integers(0, rows, RANKS * BATCH * LENGTH)
    ids[: round(share * len(ids))] = hot
    return profile_ids(RNG.permutation(ids), np.full(RANKS * BATCH, LENGTH))


def planner_of(profiles: dict[str, FeatureProfile], *kinds: str, **fields: Any) -> Any:
    arguments: dict[str, Any] = {
        "cost_model": AnalyticCostModel(launch_ms=0.001),
        "comms_model": AnalyticCommsModel(),
        "constraints": each(2, *kinds) if kinds else None,
        "profiles": profiles,
        "batch_size": BATCH,
        "topology": gpus(RANKS, hbm_cap=GIB),
    }
    return make_planner(**(arguments | fields))


def hot_notes(planner: Any) -> list[str]:
    return [n.text for n in last_result(planner).notes if n.code == "hot-rows"]


def test_a_forced_row_wise_plan_names_its_hot_rank() -> None:
    profile = profile_of(0.62)
    planner = planner_of({"f0": profile, "f1": profile_of(0.0)}, "row_wise")
    planner.plan(make_ebc([(ROWS, 64)] * 2), get_default_sharders())
    forward = [r.fwd_compute for r in last_result(planner).predicted.ranks]
    assert int(np.argmax(forward)) == 0
    assert forward[0] > 1.8 * max(forward[1:])
    [text] = hot_notes(planner)
    assert text.startswith(
        "id 0 is 62% of 't0': padding? All its lookups are on rank 0, which serves 7"
    )
    assert "Drop padding from the inputs, or shard the table column- or" in text
    assert "warning: id 0 is 62% of 't0'" in str(planner.report())


def test_ids_of_few_rows_are_named_without_a_padding_id() -> None:
    few = profile_of(0.0, rows=ROWS // 4)
    planner = planner_of({"f0": few, "f1": profile_of(0.0)}, "row_wise")
    planner.plan(make_ebc([(ROWS, 64)] * 2), get_default_sharders())
    [text] = hot_notes(planner)
    assert text.startswith("the ids of 't0' are not spread over its rows: rank 0 ")
    assert "Permute or hash the ids" in text


@pytest.mark.parametrize("knows", [True, False])
def test_a_plan_by_itself_avoids_row_wise_for_a_padded_table(knows: bool) -> None:
    """Every column shard gets all ids, so without ranges row-wise looks cheaper."""
    profile = profile_of(0.7)
    if not knows:
        profile = dataclasses.replace(profile, hot_rows=None)
    planner = planner_of({"f0": profile}, constraints=None)
    module = make_ebc([(ROWS, 64)])
    plan = planner.plan(module, get_default_sharders())
    assert types_of(plan)["t0"] == ("column_wise" if knows else "row_wise")
    assert hot_notes(planner) == []
    if knows:
        forced = planner_of(
            {"f0": profile}, constraints=only(sharding_types=["row_wise"])
        )
        forced.plan(module, get_default_sharders())
        assert cost_of(forced) > 1.2 * cost_of(planner)


def test_sequences_send_the_outputs_of_the_hot_rank() -> None:
    costs = []
    for profile in (profile_of(0.62), profile_of(0.0)):
        planner = planner_of(
            {"sf0": profile},
            constraints=only("s0", sharding_types=["row_wise"]),
            comms_model=AnalyticCommsModel(gb_per_s=0.01),
            cost_model=AnalyticCostModel(0.001, 0.0, 0.0),
        )
        planner.plan(sequences(64, rows=ROWS), get_default_sharders())
        [stage] = last_result(planner).predicted.stages
        costs.append(max(r.fwd_comms for r in stage.ranks))
    assert costs[0] == pytest.approx(costs[1] * 4 * (0.62 + 0.38 / 4), rel=0.05)


def test_memory_counts_the_lookups_of_each_rank() -> None:
    held = []
    for profile in (profile_of(0.62), profile_of(0.0)):
        profiles = {"f0": profile, "f1": profile_of(0.0)}
        planner = planner_of(profiles, "row_wise", batch_size=4096)
        planner.plan(make_ebc([(ROWS, 64)] * 2), get_default_sharders())
        ranks = planner.enumerator.memory.ranks(planner.get_selected_options())
        held.append([rank.activations for rank in ranks])
    hot, even = held
    assert hot[0] > 1.2 * even[0]
    assert max(hot[1:]) < even[0]
    assert len(set(even)) == 1


def test_ids_that_the_model_maps_to_rows_count_as_even() -> None:
    outside = profile_of(0.62, rows=ROWS * 1_000)
    planner = planner_of({"f0": outside, "f1": profile_of(0.0)}, "row_wise")
    planner.plan(make_ebc([(ROWS, 64)] * 2), get_default_sharders())
    forward = [r.fwd_compute for r in last_result(planner).predicted.ranks]
    assert forward == pytest.approx([forward[0]] * RANKS)
    assert hot_notes(planner) == []
