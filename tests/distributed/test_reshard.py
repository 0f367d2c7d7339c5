"""Four gloo ranks train and save; others go on with another plan, as if nothing was.

Each sample has one id, and all factors are powers of two. So sums do not depend on the
plan's order, and losses can be compared bit by bit.
"""

from __future__ import annotations

import functools
import json
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
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.builders import CPU, bag_config, bag_sharders, bags
from tests.distributed.ranks import (
    NODE_SIZE,
    TWO_NODES,
    Jobs,
    OfJob,
    Results,
    run_ranks,
)
from tests.distributed.unsharded import local_parts, weights_of
from torchrec_neuroshard.plans.reshard import reshard

pytestmark = pytest.mark.distributed

NUM_NODES = TWO_NODES
WORLD_SIZE = TWO_NODES * NODE_SIZE
FOLDERS = "folders.json"
"""Names the folder of each case for the ranks that resume."""
GLOBAL_BATCH, NUM_ROWS, DIM, NUM_TABLES, NUM_STEPS = 32, 24, 256, 3, 3
LATER = range(NUM_STEPS, 2 * NUM_STEPS)

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

    def __init__(self, optimizer: str, plan: ShardingPlan) -> None:
        model = Model(optimizer)
        start = weights_of(model)
        self.model = DistributedModelParallel(
            model,
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
        load_checkpoint(state, checkpoint_id=folder)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def train(self, steps: Sequence[int]) -> list[list[float]]:
        """Return the losses of all samples in each step."""
        size, rank = dist.get_world_size(), dist.get_rank()
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
            dist.all_gather_object(parts, losses.tolist())
            found.append([loss for part in parts for loss in part])
        return found


def train_and_save(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    """Train, save, convert, and store the losses of the steps that follow."""
    job = Job(case.optimizer, plan_of(case.old, WORLD_SIZE))
    job.train(range(NUM_STEPS))
    old = folder / "old"
    save_checkpoint(job.state(), checkpoint_id=old)
    unbroken = torch.tensor(job.train(LATER))
    states: set[str] = set()
    if rank == 0:
        report = reshard(old, plan_of(case.new, case.new_world), folder / "new")
        states = {table.state for table in report.tables}
        torch.save(unbroken, folder / "unbroken.pt")
        shutil.rmtree(old)
    dist.barrier()
    return {"states": sorted(states), "folder": str(folder)}


def resume(case: Case, folder: Path) -> dict[str, Any]:
    """Load what was converted; return the largest difference of a sample's loss."""
    later = Job(case.optimizer, plan_of(case.new, case.new_world))
    later.load(folder / "new")
    unbroken = torch.load(folder / "unbroken.pt")
    gaps = (torch.tensor(later.train(LATER)) - unbroken).abs()
    return {"gap": float(gaps.max()), "loss": float(unbroken.abs().max())}


def rank_jobs(num_nodes: int, rank: int, folder: Path) -> Jobs:
    """Four ranks train; two resume what `FOLDERS` names, in a group of their own."""
    if num_nodes == NUM_NODES:
        made = {name: folder / f"reshard-{i}" for i, name in enumerate(CASES)}
        jobs: Jobs = {}
        for name, case in CASES.items():
            jobs[name] = functools.partial(train_and_save, case, made[name], rank)
            if case.new_world == WORLD_SIZE:
                again = functools.partial(resume, case, made[name])
                jobs[f"{name}, resumed"] = again
        return jobs
    if not (folder / FOLDERS).exists():
        return {}
    return {
        name: functools.partial(resume, CASES[name], Path(made_in))
        for name, made_in in json.loads((folder / FOLDERS).read_text()).items()
    }


@pytest.fixture(scope="module")
def on_two_ranks(ranks: Results, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what two new ranks found, by case."""
    folder = tmp_path_factory.mktemp("resumed")
    names = [name for name, case in CASES.items() if case.new_world == NODE_SIZE]
    made = {name: ranks(__name__, NUM_NODES, name)[0]["folder"] for name in names}
    (folder / FOLDERS).write_text(json.dumps(made))
    return [of_rank[__name__] for of_rank in run_ranks(1, [__name__], folder, False)]


@pytest.mark.parametrize("name", CASES)
def test_losses_go_on_as_if_unbroken(
    name: str, results: OfJob, request: pytest.FixtureRequest
) -> None:
    case = CASES[name]
    assert results(name)[0]["states"] == [case.state]
    if case.new_world == WORLD_SIZE:
        found = results(f"{name}, resumed")
    else:
        found = [of_rank[name] for of_rank in request.getfixturevalue("on_two_ranks")]
    for of_rank in found:
        assert of_rank["loss"] > 1.0
        assert of_rank["gap"] <= case.gap * of_rank["loss"]
    if case.state in ("mean", "copy"):
        assert found[0]["gap"] > 0.0, "the state is exact after all"
