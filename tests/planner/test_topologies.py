"""Topologies: figures of cards, ranks and nodes, and sharding groups."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import HBM_CAP, INTRA_NODE_BANDWIDTH
from torchrec.distributed.planner.types import (
    CollectiveType,
    CustomTopologyData,
    GeneralizedCommsBandwidth,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    ATTACHES_OPTIMIZERS,
    CPU,
    GIB,
    analytic,
    bag_config,
    bag_sharders,
    bags,
    by_table,
    gpus,
    make_ebc,
    make_planner,
    only,
)
from torchrec_neuroshard import group_topology, topology_for
from torchrec_neuroshard.errors import ConfigError, PlanMismatchError, StalePlanWarning
from torchrec_neuroshard.hardware.cards import GPU_CARDS
from torchrec_neuroshard.models.compute import PhysicalCostModel
from torchrec_neuroshard.models.rank_groups import RankGroups
from torchrec_neuroshard.notes import Note
from torchrec_neuroshard.planner import NeuroShardPlanner, PlanCosts
from torchrec_neuroshard.planner.groups import sharding_group
from torchrec_neuroshard.planner.topology import PlannedDevices
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.report import html_report
from torchrec_neuroshard.tables.profile import zipf_profile
from torchrec_neuroshard.testing import AnalyticCostModel

CARD = 139 * GIB


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def planned(topology: Topology | None) -> NeuroShardPlanner:
    planner = NeuroShardPlanner(topology, stats=[], batch_size=64, **analytic())
    planner.plan(make_ebc([(1000, 64)]), bag_sharders())
    return planner


def costs_of(topology: Topology, cost_model: str) -> tuple[PlanCosts, list[str]]:
    """Return costs and the warnings on the way, except the one on estimates."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        costs = PlanCosts(topology, cost_model=cost_model)
    [warning] = caught  # all that there is to know, at once
    texts = str(warning.message).splitlines()
    assert costs.notes == tuple(Note("devices", text) for text in texts)
    return costs, [t for t in texts if "physical estimate" not in t]


def memory_gb_per_s(costs: PlanCosts) -> float:
    assert isinstance(costs.cost_model, PhysicalCostModel)
    return costs.cost_model.constants.memory_gb_per_s


BANDWIDTHS = {
    "hbm_mem_bw": "hbm_gb_per_s",
    "hbm_to_ddr_mem_bw": "host_gb_per_s",
    "intra_host_bw": "intra_gb_per_s",
    "inter_host_bw": "inter_gb_per_s",
}
"""TorchRec's argument -> the card's figure."""


def test_topologies_have_given_figures_else_the_cards() -> None:
    card = GPU_CARDS["h100"]
    given: dict[str, Any] = {"inter_gb_per_s": 12.5, "memory_gb": 94.0}
    topology = topology_for(
        "h100", num_nodes=2, ranks_per_node=4, host_memory_gb=2000, **given
    )
    assert (topology.world_size, topology.local_world_size) == (8, 4)
    assert topology.compute_device == "cuda"
    for theirs, ours in BANDWIDTHS.items():
        gb_per_s = given.get(ours, getattr(card, ours).value)
        # Bytes per millisecond.
        assert getattr(topology, theirs) == pytest.approx(gb_per_s * 1e6)
    for device in topology.devices:
        assert device.storage.hbm == 94 * 10**9
        assert device.storage.ddr == 500 * 10**9  # ranks share the host's
    plain = topology_for("h100", host_memory_gb=0).devices[0].storage
    assert (plain.hbm, plain.ddr) == (80 * 10**9, 0)


@pytest.mark.parametrize(
    ("options", "nodes", "per_node"),
    [
        ({}, 1, 8),
        ({"world_size": 16}, 2, 8),
        ({"world_size": 3}, 1, 3),
        ({"world_size": 12, "ranks_per_node": 4}, 3, 4),
        ({"world_size": 12, "num_nodes": 2}, 2, 6),
        ({"world_size": 12, "num_nodes": 2, "ranks_per_node": 6}, 2, 6),
    ],
)
def test_ranks_are_split_into_nodes(
    options: dict[str, int], nodes: int, per_node: int
) -> None:
    topology = topology_for("h100", **options)
    assert topology.world_size == nodes * per_node
    assert topology.local_world_size == per_node


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"card": "tpu"}, "unknown card 'tpu'"),
        ({"num_nodes": 0}, "num_nodes must be above 0 and finite, got 0"),
        ({"world_size": 0}, "world_size must be above 0 and finite, got 0"),
        ({"world_size": 2.5}, "world_size must be a whole number, got 2.5"),
        ({"num_nodes": "2"}, "num_nodes must be above 0 and finite, got '2'"),
        ({"host_memory_gb": -1}, "host_memory_gb must be above 0 and finite, got -1"),
        (
            {"world_size": 12},
            "12 ranks do not fill whole nodes of 8; take 8 or 16 ranks, or change",
        ),
        ({"world_size": 4, "ranks_per_node": 8}, "4 ranks .* of 8; take 8 ranks, or"),
        (
            {"world_size": 16, "num_nodes": 3},
            "world_size=16, num_nodes=3 contradict each other: .* leave one of them",
        ),
        (
            {"world_size": 16, "num_nodes": 2, "ranks_per_node": 4},
            "world_size=16, num_nodes=2, ranks_per_node=4 contradict each other",
        ),
    ],
)
def test_impossible_nodes_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        topology_for(**{"card": "h100", **options})


def test_a_named_card_replaces_only_torchrecs_defaults() -> None:
    naive = Topology(16, "cuda", local_world_size=8)
    before = vars(naive).copy()
    costs, [text] = costs_of(naive, "h100")
    assert "does not set hbm_cap, hbm_mem_bw, hbm_to_ddr_mem_bw, intra_host" in text
    assert "topology_for('h100', ...)" in text
    same, none = costs_of(topology_for("h100", num_nodes=2, ranks_per_node=8), "auto")
    assert none == []
    for name in BANDWIDTHS:
        ours, theirs = (getattr(c.topology, name) for c in (costs, same))
        assert ours == pytest.approx(theirs)
    assert costs.topology.devices[3].storage.hbm == 80 * 10**9
    assert vars(naive) == before and naive.devices[3].storage.hbm == 32 * GIB
    assert memory_gb_per_s(costs) == pytest.approx(3350.0)
    # Values given are left alone.
    topology = Topology(8, "cuda", hbm_cap=GIB, hbm_mem_bw=2.4e9, intra_host_bw=3e8)
    costs, [text] = costs_of(topology, "h100")
    assert text.startswith("the topology does not set hbm_to_ddr_mem_bw. The planner")
    assert costs.topology.hbm_mem_bw == 2.4e9
    assert costs.topology.intra_host_bw == 3e8
    assert costs.topology.devices[0].storage.hbm == GIB
    assert memory_gb_per_s(costs) == pytest.approx(2400.0)
    # Nothing given, no card: what is said is what is planned with.
    costs, [text] = costs_of(Topology(16, "cuda"), "auto")
    assert "TorchRec's defaults, which match no real card" in text
    assert "hbm_cap 34.36 GB, hbm_mem_bw 963.1 GB/s" in text
    assert memory_gb_per_s(costs) == pytest.approx(963.1, abs=0.1)


EQUAL: dict[str, Any] = {
    "hbm_cap": 32 * GIB,
    "ddr_cap": 128 * GIB,
    "hbm_mem_bw": 897 * GIB / 1000,
    "hbm_to_ddr_mem_bw": 32 * GIB / 1000,
    "intra_host_bw": 600 * GIB / 1000,
    "inter_host_bw": 12.5 * GIB / 1000,
}
"""Figures of a user that equal TorchRec's defaults."""


@pytest.mark.parametrize("name", EQUAL)
def test_figures_that_equal_torchrecs_defaults_can_be_given(name: str) -> None:
    topology = Topology(16, "cuda", local_world_size=8, **{name: EQUAL[name]})
    for given in (topology, copy.deepcopy(topology)):
        devices = PlannedDevices.of(given, "h100")
        assert devices.given == {name}
        kept = devices.topology
        storage = kept.devices[3].storage
        figures = {"hbm_cap": storage.hbm, "ddr_cap": storage.ddr}
        assert (figures.get(name) or getattr(kept, name)) == EQUAL[name]
        assert all(name not in text for text in devices.notes)


def test_figures_by_rank_and_from_topology_for_are_given() -> None:
    # This is TorchRec's own constant, which a plain topology has if it is left out.
    wanted = HBM_CAP, INTRA_NODE_BANDWIDTH
    plain = Topology(8, "cuda", hbm_cap=wanted[0], intra_host_bw=wanted[1])
    assert PlannedDevices.of(plain, "h100").given == set()
    named = topology_for(
        "h100", memory_gb=wanted[0] / 1e9, intra_gb_per_s=wanted[1] / 1e6
    )
    costs, none = costs_of(named, "h100")
    assert none == [] and costs.devices.given == {"hbm_cap", "intra_host_bw"}
    assert costs.topology.intra_host_bw == pytest.approx(wanted[1])
    assert costs.topology.devices[0].storage.hbm == wanted[0]
    by_rank = CustomTopologyData({"hbm_cap": [wanted[0]] * 8}, 8)
    costs, [text] = costs_of(Topology(8, "cuda", custom_topology_data=by_rank), "h100")
    assert costs.devices.given == {"hbm_cap"} and "hbm_cap" not in text
    assert costs.topology.devices[0].storage.hbm == wanted[0]


def test_a_pickled_topology_has_the_cards_bandwidths_but_no_more_memory() -> None:
    """Pickling makes TorchRec's defaults and equal numbers of a user alike."""
    sent = pickle.loads(pickle.dumps(Topology(8, "cuda", hbm_to_ddr_mem_bw=5e7)))
    devices = PlannedDevices.of(sent, "h100")
    assert devices.given == {"hbm_cap", "ddr_cap", "hbm_to_ddr_mem_bw"}
    assert devices.topology.devices[0].storage.hbm == 32 * GIB
    assert devices.topology.hbm_mem_bw == pytest.approx(3350e6)


@pytest.mark.parametrize(
    ("argument", "value", "read_as"),
    [("hbm_mem_bw", 3350, "0.00335 GB/s"), ("inter_host_bw", 50e9, "50,000 GB/s")],
)
def test_impossible_bandwidths_are_noted(
    argument: str, value: float, read_as: str
) -> None:
    topology = Topology(16, "cuda", local_world_size=8, **{argument: value})
    devices = PlannedDevices.of(topology, AnalyticCostModel())
    [text] = devices.notes
    assert text.startswith(f"{argument}={value:g} is impossible")
    assert f"so that is {read_as}. Multiply GB/s by 1,000,000, or call" in text
    assert devices.topology is topology  # nobody guesses what is meant


class SlowExchange(GeneralizedCommsBandwidth):
    """Bandwidths that differ by collective."""

    intra_host_bw = inter_host_bw = 4e8

    def get_bw(
        self, local_world_size: int, world_size: int, collective_type: CollectiveType
    ) -> float:
        assert (local_world_size, world_size) == (4, 4)
        return {"all_to_all": 1e8, "all_reduce": 8e8}.get(collective_type.value, 4e8)


def test_bandwidths_of_single_collectives() -> None:
    topology = Topology(4, "cuda", generalized_comms_bandwidths=SlowExchange())
    comms = PlanCosts(topology, cost_model=AnalyticCostModel()).comms_model
    columns_CW = np.full((1, 4), 64.0)
    exchanged = comms.all_to_all(columns_CW, 1024)
    sent_bytes = 3 / 4 * 64 * 1024 * 4  # to other ranks
    assert exchanged == pytest.approx(sent_bytes / 1e8)
    assert comms.row_wise(columns_CW, 1024) == pytest.approx(exchanged / 4)
    reduced = comms.all_reduce(columns_CW * 1024 * 4)
    assert reduced == pytest.approx(exchanged.sum(axis=2) / 8)


def test_this_machines_card_has_its_actual_memory(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = SimpleNamespace(name="NVIDIA H200", total_memory=CARD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: shown)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: shown.name)
    monkeypatch.setattr(
        "torchrec.distributed.planner.planners.get_device_type", lambda: "cuda"
    )
    planner = planned(None)
    assert [d.storage.hbm for d in planner.topology.devices] == [CARD]
    assert planner.topology.hbm_mem_bw == pytest.approx(4800e6)
    basis = planner.report().basis
    assert basis is not None and basis.card == "NVIDIA H200 SXM 141 GB"
    assert basis.figures[0].basis == "this machine"
    # A topology that is given is completed, not changed.
    default = Topology(2, "cuda")
    assert planned(default).topology.devices[1].storage.hbm == CARD
    assert default.devices[1].storage.hbm == 32 * GIB
    small = Topology(2, "cuda", hbm_cap=GIB)
    assert planned(small).topology.devices[0].storage.hbm == GIB
    # Another card is planned for than the one here.
    other = planned(topology_for("a100-40gb", ranks_per_node=2))
    assert other.topology.devices[0].storage.hbm == 40 * 10**9


@pytest.mark.usefixtures("group")
def test_a_group_that_cannot_train_with_the_plan_is_warned() -> None:
    planner = make_planner(calibrate="never")
    with pytest.warns(UserWarning, match="has 2 ranks, but the process group has 1"):
        planner.collective_plan(make_ebc([(1000, 64)]), bag_sharders())


def test_reports_show_the_basis_of_costs() -> None:
    profile = zipf_profile(batch_size=64, pooling_factor=3.0, num_embeddings=100)
    planner = make_planner(
        topology=topology_for("h100-pcie", ranks_per_node=2),
        batch_size=None,
        constraints=only("t1", pooling_factors=[20.0]),
        profiles={"f0": profile},
    )
    planner.plan(make_ebc([(100, 64), (100, 64), (100, 32)]), bag_sharders())
    report = planner.report()
    text = report.text(verbose=True)
    for shown, figure in (
        (text, "H100 PCIe 80 GB, 512 samples per rank (TorchRec's default)"),
        (text, "memory bandwidth 2,000 GB/s (data sheet: NVIDIA H100 data "),
        (text, "profiles of batches (1 feature)"),
        (text, "the constraints, with repeats assumed Zipfian (1 feature)"),
        (text, "links inside a node 48 GB/s (assumed: over PCIe"),
        (text, "1 id per sample assumed for 'f2'"),
        (html_report(report), "NVIDIA H100 data sheet (2022)"),
    ):
        assert figure in shown
    basis = json.loads(json.dumps(report.to_json()))["basis"]
    assert basis["card"] == "NVIDIA H100 PCIe 80 GB"
    assert basis["batch_size"] == 512 and basis["batch_size_is_default"]
    assert basis["assumed_features"] == ["f2"]


# --- sharding groups of 2D parallelism, and the cost of replicas ---


INTRA, INTER = 100e6, 10e6
"""Bytes per millisecond: 100 and 10 GB/s."""


def two_nodes(world_size: int = 8, **arguments: Any) -> Topology:
    bandwidths = {"intra_host_bw": INTRA, "inter_host_bw": INTER}
    return gpus(world_size, world_size // 2, **bandwidths, **arguments)


@pytest.mark.parametrize(
    ("size", "inter_host", "per_node", "replicas_per_node"),
    [
        # Groups 0 2 4 6, 1 3 5 7; replicas 0 1, 2 3, ...
        (4, False, 2, 2),
        # Groups 0 1 2 3, 4 5 6 7; replicas 0 4, 1 5, ...
        (4, True, 4, 1),
        # Groups 0 4, 1 5, ...; replicas 0 1 2 3, 4 5 6 7
        (2, False, 1, 4),
    ],
)
def test_ranks_of_a_group_are_in_torchrecs_nodes(
    size: int, inter_host: bool, per_node: int, replicas_per_node: int
) -> None:
    topology = group_topology(two_nodes(), size, use_inter_host_allreduce=inter_host)
    group = sharding_group(topology)
    assert group is not None
    assert (topology.world_size, len(topology.devices)) == (size, size)
    assert topology.local_world_size == topology.intra_group_size == per_node
    assert group.num_replicas == 8 // size
    assert group.replicas_per_node == replicas_per_node


def test_nodes_pods_and_memory_are_divided() -> None:
    # Of 12 ranks in nodes of 4, groups 0 3 6 9: one, one, one and one per node, but
    # 1 4 7 10 has two in the second.
    assert group_topology(gpus(12, 4), 4).local_world_size == 1
    found = group_topology(gpus(16, 4, pod_size=2), 8)
    assert (found.local_world_size, found.intra_group_size) == (2, 4)
    # A device has what the least of its replicas has.
    caps = [GIB * n for n in (8, 7, 6, 5, 1, 2, 3, 4)]
    data = CustomTopologyData({"hbm_cap": caps}, 8)
    topology = group_topology(two_nodes(custom_topology_data=data), 4)
    found = [device.storage.hbm // GIB for device in topology.devices]
    assert found == [7, 5, 1, 3]
    for size in (0, 3, 16):
        with pytest.raises(ConfigError, match=f"sharding_group_size.*{size}"):
            group_topology(two_nodes(), size)
    with pytest.raises(ConfigError, match="already"):
        group_topology(topology, 2)


@ATTACHES_OPTIMIZERS[0]
@ATTACHES_OPTIMIZERS[1]
@pytest.mark.parametrize(
    ("inter_host", "kind"), [(False, torch.optim.SGD), (True, torch.optim.Adagrad)]
)
def test_average_of_replicas_is_priced(inter_host: bool, kind: Any) -> None:
    model = bags(bag_config(0, 1000, 64), bag_config(1, 500, 32), device=CPU)
    apply_optimizer_in_backward(kind, model.parameters(), {"lr": 0.1})
    topology = group_topology(
        two_nodes(4), 2, sync_interval=5, use_inter_host_allreduce=inter_host
    )
    kinds = by_table(sharding_types=[["table_wise"], ["data_parallel"]])
    planner = make_planner(topology=topology, constraints=kinds)
    planner.plan(model, bag_sharders())
    sync = planner.report().weight_sync
    assert sync is not None
    # The data-parallel table is none of it; Adagrad keeps a sum for each weight.
    size = 1000 * 64 * 4 * (1 if kind is torch.optim.SGD else 2)
    assert sync.rank_bytes == size
    # Two replicas send and receive half of it, twice.
    assert sync.sync_ms == pytest.approx(size / (INTER if inter_host else INTRA))
    assert sync.ms_per_iteration == pytest.approx(sync.sync_ms / 5)
    assert "averaged every 5 iterations" in planner.report().text(verbose=True)
    assert "averaged every 5 iterations" in html_report(planner.report())


def test_gradients_of_replicated_tables_go_to_all_ranks() -> None:
    comms = make_planner(topology=group_topology(two_nodes(), 4)).costs.comms_model
    assert isinstance(comms, RankGroups)
    num_bytes = np.full((1, 4), 8e6)
    # Of 8 ranks, 3 of 8 parts go inside the node and 4 between nodes, twice.
    expected = 2 * 8e6 * (3 / 8 / INTRA + 4 / 8 / INTER)
    assert comms.all_reduce(num_bytes) == pytest.approx(np.full((1, 4), expected))
    assert comms.all_to_all(num_bytes, 1).shape == (1, 4, 2)


def test_plans_are_rehearsed_in_a_group_and_fit_any_number_of_replicas(
    tmp_path: Path,
) -> None:
    model, path = bags(), tmp_path / "plan.json"
    planner = make_planner(topology=group_topology(two_nodes(4), 2))
    plan = planner.plan(model, bag_sharders())
    found = rehearse(model, plan, planner.topology, bag_sharders(), batch_size=64)
    assert found.runs and (found.world_size, found.num_built) == (2, 2)
    assert "one of 2 sharding groups of 4 ranks" in str(found)
    save_plan(plan, path, model=model, planner=planner)
    assert str(load_plan(path, model=model, planner=planner)) == str(plan)
    # Four replicas, dealt out such that a group's nodes are the same.
    more = make_planner(topology=group_topology(two_nodes(8), 2))
    with pytest.warns(StalePlanWarning, match=r"sharding_group .* and one of 4"):
        assert str(load_plan(path, model=model, planner=more)) == str(plan)
    whole = make_planner(topology=two_nodes(4))
    with pytest.raises(PlanMismatchError, match=r"world_size is 2 .* and 4"):
        load_plan(path, model=model, planner=whole)
