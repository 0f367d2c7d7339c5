"""Four gloo ranks train and save; others go on with another plan, as if nothing was.

Each sample has one id, and all factors are powers of two. So sums do not depend on the
plan's order, and losses can be compared bit by bit.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.builders import CPU, bag_config, bag_sharders, bags
from tests.distributed.ranks import NODE_SIZE, TWO_NODES, Jobs, OfJob
from tests.distributed.unsharded import local_parts, weights_of
from torchrec_neuroshard.plans.reshard import reshard

pytestmark = pytest.mark.distributed

NUM_NODES = TWO_NODES
WORLD_SIZE = TWO_NODES * NODE_SIZE
GLOBAL_BATCH, NUM_ROWS, DIM, NUM_TABLES, NUM_STEPS = 32, 24, 256, 3, 3

KINDS: dict[str, Callable[[int, int], Any]] = {
    "table": lambda i, world: table_wise(rank=(i + 1) % world),
    "columns": lambda i, world: column_wise(ranks=[i % world, (i + 1) % world]),
    "all columns": lambda i, world: column_wise(ranks=[*range(world)]),
    "rows": lambda i, world: row_wise(),
    "node rows": lambda i, world: table_row_wise(host_index=i % (world // NODE_SIZE)),
    "grid": lambda i, world: grid_shard(host_indexes=[*range(world // NODE_SIZE)]),
    "replicas": lambda i, world: data_parallel(),
    "mixed": lambda i, world: KINDS[["all columns", "rows", "table"][i]](i, world),
    "mixed anew": lambda i, world: KINDS[["rows", "table", "columns"][i]](i, world),
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.25}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.25, "eps": 1e-8}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.25, "eps": 1e-8}),
}


@dataclass(frozen=True)
class Case:
    """Train by an optimizer, save, and go on with another plan."""

    optimizer: str
    old: str
    new: str
    new_world: int = 2
    gap: float = 0.0
    """Largest difference of a sample's loss that is allowed."""
    state: str = "exact"


CASES = {
    f"{case.optimizer}: {case.old} -> {case.new} on {case.new_world}": case
    for case in (
        Case("SGD", "columns", "table", state="none"),
        Case("SGD", "replicas", "rows", 4, gap=1e-6, state="none"),
        Case("Adagrad", "mixed", "mixed anew"),
        Case("Adagrad", "table", "grid", 4),
        Case("Adagrad", "rows", "replicas", gap=1e-6),
        Case("Adagrad", "replicas", "columns", 4, gap=1e-6),
        Case("RowWiseAdagrad", "table", "rows"),
        Case("RowWiseAdagrad", "rows", "node rows", 4),
        Case("RowWiseAdagrad", "grid", "columns", 4),
        Case("RowWiseAdagrad", "replicas", "table", gap=1e-6),
        Case("RowWiseAdagrad", "columns", "rows", gap=0.01, state="mean"),
        Case("RowWiseAdagrad", "table", "all columns", 4, gap=0.01, state="copy"),
    )
}


class Model(nn.Module):
    """Loss of each sample; dense layers do not change it, but are trained."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        tables = [bag_config(i, NUM_ROWS, DIM) for i in range(NUM_TABLES)]
        self.sparse = nn.ModuleDict({"ebc": bags(*tables, device=CPU)})
        kind, arguments = OPTIMIZERS[optimizer]
        own = dict(arguments)  # TorchRec writes into it
        apply_optimizer_in_backward(kind, self.sparse.parameters(), own)
        self.dense = nn.Linear(2, 1)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        found = self.sparse["ebc"](batch).to_dict()
        parts = [found[key].square().sum(dim=1) for key in sorted(found)]
        losses = torch.stack(parts).sum(dim=0)
        trained = self.dense.weight.sum() + self.dense.bias.sum()
        return losses + (trained - trained.detach())


def plan_of(kind: str, world_size: int) -> ShardingPlan:
    model = Model("SGD")
    tables = {f"t{i}": KINDS[kind](i, world_size) for i in range(NUM_TABLES)}
    found = construct_module_sharding_plan(
        model.sparse["ebc"],
        tables,
        bag_sharders()[0],
        local_size=NODE_SIZE,
        world_size=world_size,
        device_type="cpu",
    )
    return ShardingPlan({"sparse.ebc": found})


class Job:
    """The ranks of a group that train the model under a plan."""

    def __init__(self, optimizer: str, plan: ShardingPlan, group: Any) -> None:
        model, self.group = Model(optimizer), group
        start = weights_of(model)
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(group),
            device=CPU,
            plan=plan,
            sharders=bag_sharders(),
        )
        state = self.model.state_dict()
        with torch.no_grad():
            for _, part, held in local_parts({k: state[k] for k in start}, start):
                part.copy_(held)
        own = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        kind, arguments = OPTIMIZERS[optimizer]
        dense: list[Any] = [
            KeyedOptimizerWrapper(
                {k: v for k, v in own.items() if "sparse" not in k}, torch.optim.Adam
            )
        ]
        if tables := {k: v for k, v in own.items() if "sparse" in k}:
            make = functools.partial(kind, **arguments)
            dense.append(KeyedOptimizerWrapper(tables, make))
        for each in dense:
            each.init_state()
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, *dense])

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, folder: Path) -> None:
        state = self.state()
        load_checkpoint(state, checkpoint_id=folder, process_group=self.group)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def train(self, steps: Sequence[int]) -> list[list[float]]:
        """Return the losses of all samples in each step."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        found = []
        for step in steps:
            rng = torch.Generator().manual_seed(step)
            ids = torch.randint(NUM_ROWS, (NUM_TABLES, GLOBAL_BATCH), generator=rng)
            mine = ids.chunk(size, dim=1)[rank]
            batch = KeyedJaggedTensor(
                keys=[f"f{i}" for i in range(NUM_TABLES)],
                values=mine.flatten(),
                lengths=torch.ones(mine.numel(), dtype=torch.int32),
            )
            self.optimizer.zero_grad()
            losses = self.model(batch)
            losses.mean().backward()
            self.optimizer.step()
            parts: list[Any] = [None] * size
            dist.all_gather_object(parts, losses.tolist(), group=self.group)
            found.append([loss for part in parts for loss in part])
        return found


def go_on(
    case: Case, folder: Path, groups: dict[int, Any], rank: int
) -> dict[str, Any]:
    job = Job(case.optimizer, plan_of(case.old, WORLD_SIZE), groups[WORLD_SIZE])
    job.train(range(NUM_STEPS))
    old, new = folder / "old", folder / "new"
    save_checkpoint(job.state(), checkpoint_id=old)
    steps = range(NUM_STEPS, 2 * NUM_STEPS)
    unbroken = torch.tensor(job.train(steps))
    plan, states = plan_of(case.new, case.new_world), set[str]()
    if rank == 0:
        states = {table.state for table in reshard(old, plan, new).tables}
    dist.barrier()
    found: dict[str, Any] = {}
    if rank < case.new_world:
        later = Job(case.optimizer, plan, groups[case.new_world])
        later.load(new)
        gaps = (torch.tensor(later.train(steps)) - unbroken).abs()
        found = {"gap": float(gaps.max()), "loss": float(unbroken.abs().max())}
    dist.barrier()
    if rank == 0:
        shutil.rmtree(old)
        shutil.rmtree(new)
    return found | {"states": sorted(states)}


def rank_jobs(num_nodes: int, rank: int, folder: Path) -> Jobs:
    if num_nodes != NUM_NODES:
        return {}
    groups = {2: dist.new_group(ranks=[0, 1]), WORLD_SIZE: dist.group.WORLD}
    # TorchRec makes the groups of its nodes once, on all ranks.
    in_order = sorted(CASES.items(), key=lambda item: -item[1].new_world)
    return {
        name: functools.partial(go_on, case, folder, groups, rank)
        for name, case in in_order
    }


@pytest.mark.parametrize("name", CASES)
def test_losses_go_on_as_if_unbroken(name: str, results: OfJob) -> None:
    case = CASES[name]
    found = results(name)
    assert found[0]["states"] == [case.state]
    for of_rank in found[: case.new_world]:
        assert of_rank["loss"] > 1.0
        assert of_rank["gap"] <= case.gap * of_rank["loss"]
    if case.state in ("mean", "copy"):
        assert found[0]["gap"] > 0.0, "the state is exact after all"
