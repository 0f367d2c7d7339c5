"""Sharding groups of 2D parallelism: their topology and the cost of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import CustomTopologyData
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    ATTACHES_OPTIMIZERS,
    CPU,
    GIB,
    bag_config,
    bag_sharders,
    bags,
    by_table,
    gpus,
    make_planner,
)
from torchrec_neuroshard import group_topology
from torchrec_neuroshard.errors import ConfigError, PlanMismatchError, StalePlanWarning
from torchrec_neuroshard.models.rank_groups import RankGroups
from torchrec_neuroshard.planner.groups import sharding_group
from torchrec_neuroshard.plans.plan_files import load_plan, save_plan
from torchrec_neuroshard.plans.rehearse import rehearse
from torchrec_neuroshard.report import html_report

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
