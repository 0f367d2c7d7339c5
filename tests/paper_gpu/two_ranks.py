"""What each of two ranks does with its paper GPU; see `run_rank`."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    CPU,
    FixedSearcher,
    bag_config,
    bag_sharders,
    bags,
    columns_only,
    make_planner,
    stock_planner,
)
from tests.paper_gpu.pipelines import PIPELINES, journal_of
from torchrec_neuroshard.planner import replan

WORLD_SIZE = 2
BATCH_SIZE = 16
FEATURES = ("f0", "f1", "f2", "f3")
NUM_STEPS = 4


@contextmanager
def group(device: torch.device) -> Iterator[None]:
    """A process group for the device: as "nccl", or gloo on CPUs."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


class Scored(torch.nn.Module):
    """A loss of four tables with a fused optimizer, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.ebc = bags(*(bag_config(i, 500, 16) for i in range(4)), device=CPU)
        apply_optimizer_in_backward(RowWiseAdagrad, self.ebc.parameters(), {"lr": 0.1})
        self.dense = torch.nn.Linear(64, 1)

    def forward(self, features: Any) -> torch.Tensor:
        outputs = self.ebc(features).to_dict()
        pooled = torch.cat([outputs[f] for f in FEATURES], dim=1)
        loss: torch.Tensor = self.dense(pooled.sin()).square().mean() - pooled.mean()
        return loss


def train(plan: ShardingPlan, device: torch.device) -> list[float]:
    """Losses of a few steps of `Scored` by a plan."""
    model = DistributedModelParallel(
        Scored().to(device),
        device=device,
        plan=copy.deepcopy(plan),
        sharders=bag_sharders(),
    )
    for number, table in enumerate(model.state_dict().values()):
        for part in table.local_shards() if hasattr(table, "local_shards") else ():
            torch.nn.init.constant_(part.tensor, 0.1 + number)
    dense = torch.optim.SGD(model.module.dense.parameters(), lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        features = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.randint(0, 500, (BATCH_SIZE * 4,), generator=generator),
            lengths=torch.ones(BATCH_SIZE * 4, dtype=torch.int32),
        )
        dense.zero_grad()
        loss = model(features.to(device))
        loss.backward()
        dense.step()
        losses.append(float(loss.detach()))
    return losses


def plans(device: torch.device) -> dict[str, Any]:
    """Losses by our plan, by TorchRec's, and by that one after some shards moved."""
    columns = [(0, 16, 0), (1, 8, 0), (1, 8, 1), (2, 16, 1), (3, 16, 0)]
    planner = make_planner(
        WORLD_SIZE,
        device.type,
        topology_arguments={"local_world_size": WORLD_SIZE},
        batch_size=BATCH_SIZE,
        search=FixedSearcher(columns),
        constraints=columns_only(Scored()),
    )
    stock = stock_planner(planner.topology, batch_size=BATCH_SIZE)
    everyone, sharders = dist.group.WORLD, bag_sharders()
    ours = planner.collective_plan(Scored(), sharders, everyone)
    theirs = stock.collective_plan(Scored(), sharders, everyone)
    moved = replan(
        theirs,
        planner=planner,
        model=Scored(),
        budget_bytes=2**30,
        sharders=sharders,
    ).plan
    named = {"theirs": theirs, "ours": ours, "replanned": moved}
    return {name: train(plan, device) for name, plan in named.items()}


def journals(device: torch.device) -> dict[str, list[str]]:
    """What each of TorchRec's pipelines queues, with the lookups last or first."""
    return {
        f"{name} {order}": journal_of(
            name, device, lookups_first=order == "lookups first"
        )
        for name in PIPELINES
        for order in ("lookups last", "lookups first")
    }


PARTS: dict[str, Callable[[torch.device], Any]] = {
    "plans": plans,
    "journals": journals,
}


def run_rank(rank: int, parts: Sequence[str], folder: Path) -> None:
    """Do some parts, and write what was found to FOLDER/RANK.json."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    places = {"RANK": rank, "LOCAL_RANK": rank}
    places |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), WORLD_SIZE)
    os.environ.update({name: str(value) for name, value in places.items()})
    gpu, stores, init = (
        torch.device("cuda", rank),
        itertools.count(),
        dist.init_process_group,
    )
    torch.cuda.set_device(gpu)

    def init_group(backend: str) -> None:
        store = f"file://{folder}/store{next(stores)}"
        init(backend, init_method=store, rank=rank, world_size=WORLD_SIZE)

    dist.init_process_group = init_group  # type: ignore[assignment]
    found: dict[str, Any] = {}
    for part in parts:
        with group(gpu):
            found[part] = PARTS[part](gpu)
    if "plans" in parts:
        with group(CPU):
            found["plans on CPUs"] = plans(CPU)
    (folder / f"{rank}.json").write_text(json.dumps(found))
