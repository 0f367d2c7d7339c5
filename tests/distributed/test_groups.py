"""2D parallelism: four gloo ranks train in two sharding groups of two.

`DMPCollection` wants a GPU, by an assertion and by the devices that it writes into a
plan; nothing else in it needs one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    CPU,
    FixedSearcher,
    bag_config,
    bags,
    by_table,
    make_planner,
)
from tests.distributed.ranks import NODE_SIZE, TWO_NODES, Jobs, OfJob
from tests.distributed.test_training import BagSharder
from tests.distributed.unsharded import (
    draw_batch,
    gap,
    loss_of,
    shard_model,
    weights_gap,
    weights_of,
)
from torchrec_neuroshard import group_topology

pytestmark = pytest.mark.distributed

WORLD_SIZE = TWO_NODES * NODE_SIZE
GROUP_SIZE = 2
LOCAL_BATCH, NUM_ROWS, NUM_STEPS, SYNC_INTERVAL = 5, 12, 3, 2
DIMS = (24, 16, 16, 8)
TYPES = ("column_wise", "table_wise", "row_wise", "data_parallel")
TRIPLES = [(0, 16, 0), (0, 8, 1), (1, 16, 1)]
ADAGRAD: dict[str, Any] = {"lr": 0.3, "eps": 1e-8}
KEYS = [f"f{i}" for i in range(len(DIMS))]
SHARDERS: list[Any] = [BagSharder()]


CASES = {"replicas in a node": ((0, 2), (1, 3)), "groups in a node": ((0, 1), (2, 3))}
"""Ranks of each sharding group, as TorchRec's documentation has them."""
NUM_NODES = TWO_NODES
Groups = Sequence[Sequence[int]]


def collection_class() -> Any:
    """TorchRec's `DMPCollection`, which takes CPUs."""
    from torch.distributed.remote_device import _remote_device
    from torchrec.distributed import model_parallel

    assert model_parallel.__file__ is not None
    path = Path(model_parallel.__file__)
    without_assertions = compile(path.read_text(), str(path), "exec", optimize=1)
    twin = ModuleType(model_parallel.__name__)
    exec(without_assertions, vars(twin))

    class OnCpus(twin.DMPCollection):  # type: ignore[name-defined]
        def _remap_sharding_plan(self, plan: ShardingPlan, **arguments: Any) -> None:
            super()._remap_sharding_plan(plan=plan, **arguments)
            for module_plan in plan.plan.values():
                for sharding in module_plan.values():
                    spec = sharding.sharding_spec
                    for shard in () if spec is None else spec.shards:
                        rank = shard.placement.rank()
                        shard.placement = _remote_device(f"rank:{rank}/cpu")

    return OnCpus


class Reference:
    """Each group's tables, unsharded; all of them on every rank."""

    def __init__(self, whole: Any, groups: Groups) -> None:
        self.groups = groups
        self.models = [copy.deepcopy(whole) for _ in groups]
        self.optimizers = [
            torch.optim.Adagrad(m.parameters(), **ADAGRAD) for m in self.models
        ]

    def step(self, batches: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        """Return the outputs of every rank."""
        outputs: list[dict[str, torch.Tensor]] = [{} for _ in batches]
        for model, ranks in zip(self.models, self.groups, strict=True):
            model.zero_grad()
            for rank in ranks:
                outputs[rank] = model(batches[rank]).to_dict()
            losses = [loss_of(outputs[rank], LOCAL_BATCH) for rank in ranks]
            torch.autograd.backward(torch.stack(losses).mean())
        # Gradients of data-parallel tables are means over all ranks.
        last = [list(m.parameters())[-1] for m in self.models]
        mean = torch.stack([p.grad for p in last if p.grad is not None]).mean(dim=0)
        for parameter in last:
            parameter.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()
        return outputs

    def sync(self) -> None:
        """Average weights and Adagrad's sums."""
        for same in zip(*(m.parameters() for m in self.models), strict=True):
            sums = [
                o.state[p]["sum"] for o, p in zip(self.optimizers, same, strict=True)
            ]
            for tensors in ([p.data for p in same], sums):
                mean = torch.stack(tensors).mean(dim=0)
                for tensor in tensors:
                    tensor.copy_(mean)


def run_case(groups: Groups, rank: int) -> dict[str, Any]:
    torch.manual_seed(3)
    whole = bags(
        *(bag_config(i, NUM_ROWS, dim) for i, dim in enumerate(DIMS)), device=CPU
    )
    inter_host = groups[0] == (0, 1)
    topology = group_topology(
        Topology(WORLD_SIZE, "cpu", local_world_size=NODE_SIZE),
        GROUP_SIZE,
        sync_interval=SYNC_INTERVAL,
        use_inter_host_allreduce=inter_host,
    )
    planner = make_planner(
        topology=topology,
        batch_size=LOCAL_BATCH,
        constraints=by_table(sharding_types=[[kind] for kind in TYPES]),
        search=FixedSearcher(TRIPLES),
    )
    plan = planner.collective_plan(whole, SHARDERS, dist.group.WORLD)
    types = tuple(s.sharding_type for s in plan.plan[""].values())
    model = copy.deepcopy(whole)
    apply_optimizer_in_backward(
        torch.optim.Adagrad, list(model.parameters())[:-1], {**ADAGRAD}
    )
    sharded = shard_model(
        model,
        plan,
        SHARDERS,
        collection_class(),
        world_size=WORLD_SIZE,
        sharding_group_size=GROUP_SIZE,
        global_pg=dist.group.WORLD,
        use_inter_host_allreduce=inter_host,
    )
    replicated = [p for n, p in sharded.named_parameters() if "t3" in n]
    optimizer = torch.optim.Adagrad(replicated, **ADAGRAD)
    reference = Reference(whole, groups)
    outputs_off = 0.0
    for step in range(NUM_STEPS):
        batches = [
            draw_batch(KEYS, LOCAL_BATCH, NUM_ROWS, 50 * step + r)
            for r in range(WORLD_SIZE)
        ]
        expected = reference.step(batches)[rank]
        outputs = sharded(batches[rank]).to_dict()
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(outputs, LOCAL_BATCH))
        optimizer.step()
        for key, value in outputs.items():
            outputs_off = max(outputs_off, gap(value, expected[key]))
        if (step + 1) % SYNC_INTERVAL == 0:
            sharded.sync()
            reference.sync()
    (group,) = (n for n, ranks in enumerate(groups) if rank in ranks)
    models, started = [weights_of(m) for m in reference.models], weights_of(whole)
    return {
        "types": types,
        "outputs": outputs_off,
        "weights": weights_gap(sharded, models[group]),
        "moved": min(gap(models[group][k], started[k]) for k in started),
        "replicas_apart": max(
            gap(models[0][k], models[1][k]) for k in list(started)[:-1]
        ),
    }


def rank_jobs(num_nodes: int, rank: int, _: Path) -> Jobs:
    cases = CASES if num_nodes == NUM_NODES else {}
    return {name: functools.partial(run_case, g, rank) for name, g in cases.items()}


@pytest.mark.parametrize("name", CASES)
def test_groups_train_as_unsharded_replicas_do(results: OfJob, name: str) -> None:
    for result in results(name):
        assert tuple(result["types"]) == TYPES
        assert result["outputs"] < 1e-5
        assert result["weights"] < 1e-5
        assert result["moved"] > 1e-2
        # One step came after the last average.
        assert result["replicas_apart"] > 1e-3
