"""How much memory ranks are taken to have where nobody says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology

from tests.builders import GIB, bag_sharders, make_ebc
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.testing import AnalyticCommsModel, AnalyticCostModel

CARD = 139 * GIB


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, as far as the planner looks at it."""
    properties = SimpleNamespace(name="Big GPU", total_memory=CARD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(
        "torchrec.distributed.planner.planners.get_device_type", lambda: "cuda"
    )


def plan_notes(topology: Topology | None) -> tuple[NeuroShardPlanner, list[str]]:
    planner = NeuroShardPlanner(
        topology,
        64,
        cost_model=AnalyticCostModel(),
        comms_model=AnalyticCommsModel(),
        stats=[],
        consider_stock=False,
    )
    planner.plan(make_ebc([(1000, 64)]), bag_sharders())
    assert planner.last_result is not None
    return planner, [w for w in planner.last_result.warnings if "memory of a rank" in w]


def test_the_card_is_as_large_as_it_is(group: None, card: None) -> None:
    planner, [note] = plan_notes(None)
    assert [d.storage.hbm for d in planner._topology.devices] == [CARD]
    assert "the Big GPU here has 139.0 GiB; for other cards pass a topology" in note


def test_a_given_topology_stays_as_it_is(card: None) -> None:
    default = Topology(2, "cuda")
    _, [note] = plan_notes(default)
    assert [d.storage.hbm for d in default.devices] == [32 * GIB] * 2
    assert "32 GiB, as TorchRec takes any card" in note
    assert f"pass Topology(hbm_cap={CARD})" in note
    assert plan_notes(Topology(2, "cuda", hbm_cap=CARD))[1] == []
    assert plan_notes(Topology(2, "cpu"))[1] == []


def test_without_a_card_nothing_is_said(group: None) -> None:
    planner, notes = plan_notes(None)
    assert planner._topology.compute_device == "cpu"
    assert notes == []
    assert plan_notes(Topology(2, "cuda"))[1] == []
