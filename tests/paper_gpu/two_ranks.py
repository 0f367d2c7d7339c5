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

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.builders import (
    CPU,
    FixedSearcher,
    analytic,
    bag_config,
    bag_sharders,
    bags,
    columns_only,
    load_script,
    make_planner,
    stock_planner,
)
from tests.paper_gpu.pipelines import PIPELINES, journal_of
from torchrec_neuroshard import NeuroShardPlanner, PlanMonitor
from torchrec_neuroshard.planner import replan

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_dlrm.py"
WORLD_SIZE = 2
BATCH_SIZE = 16
FEATURES = ("f0", "f1", "f2", "f3")
EVERY, DRIFT_AT, MOVE_AT, NUM_STEPS = 6, 8, 27, 36
TABLE_WISE = ParameterConstraints(sharding_types=["table_wise"])


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


def planner_of(device: torch.device, **settings: Any) -> NeuroShardPlanner:
    return make_planner(
        WORLD_SIZE,
        device.type,
        topology_arguments={"local_world_size": WORLD_SIZE},
        batch_size=BATCH_SIZE,
        **settings,
    )


def train(
    plan: ShardingPlan,
    device: torch.device,
    num_steps: int,
    watch: Callable[[Any], Iterator[None]] | None = None,
) -> list[float]:
    """Losses of a job in which the tables of rank 0 become popular.

    Args:
        plan: Of `Scored`.
        device: Of this rank.
        num_steps: How long.
        watch: Is given the sharded model and asked for a value after each step.
    """
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
    watched = watch(model) if watch else itertools.repeat(None)
    losses = []
    for step in range(num_steps):
        popular = on_first_rank(plan) if step >= DRIFT_AT else ()
        ids = [12 if f"t{i}" in popular else 1 for i in range(4)]
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        features = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.randint(0, 500, (BATCH_SIZE * sum(ids),), generator=generator),
            lengths=torch.tensor(ids).repeat_interleave(BATCH_SIZE).int(),
        )
        dense.zero_grad()
        loss = model(features.to(device))
        loss.backward()
        dense.step()
        losses.append(float(loss.detach()))
        next(watched)
    return losses


def on_first_rank(plan: ShardingPlan) -> set[str]:
    return {name for name, s in plan.plan["ebc"].items() if s.ranks[0] == 0}


def plans(device: torch.device) -> dict[str, Any]:
    """Losses by our plan, by TorchRec's, and by that one after some shards moved."""
    columns = [(0, 16, 0), (1, 8, 0), (1, 8, 1), (2, 16, 1), (3, 16, 0)]
    planner = planner_of(
        device, search=FixedSearcher(columns), constraints=columns_only(Scored())
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
    return {name: train(plan, device, num_steps=4) for name, plan in named.items()}


def train_example() -> dict[str, Any]:
    """Losses of `examples/train_dlrm.py`, and where they were."""
    losses: list[torch.Tensor] = []

    class Noted(TrainPipelineSparseDist):
        def progress(self, batches: Any) -> Any:
            found = super().progress(batches)
            losses.append(found[0].detach())
            return found

    def table_wise(**given: Any) -> NeuroShardPlanner:
        """First weights follow the plan: take one for GPUs and CPUs."""
        given["constraints"] = dict.fromkeys(given["profiles"], TABLE_WISE)
        return NeuroShardPlanner(**given | analytic())

    script = load_script(EXAMPLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "TrainPipelineSparseDist", Noted)
        patch.setattr(script, "NeuroShardPlanner", table_wise)
        options = "--max-rows 500 --embedding-dim 8 --batch-size 32 --steps 6"
        script.main([*options.split(), "--cost-model", "cpu"])
    return {
        "losses": [float(loss) for loss in losses],
        "device": str(losses[0].device),
    }


def learn(device: torch.device, cache: Path) -> dict[str, Any]:
    """What a first launch and a second one measure."""
    found: dict[str, Any] = {}
    program = "torchrec_neuroshard.training.first_launch.PROGRAM"
    costs: dict[str, Any] = {"cost_model": "auto", "comms_model": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEUROSHARD_CACHE", str(cache))
        for launch in ("first", "second"):
            planner = planner_of(device, calibrate=0.5, **costs)
            planner.collective_plan(Scored(), bag_sharders(), dist.group.WORLD)
            found[launch] = {
                "kernels": planner.costs.cost_model.source,
                "collectives": planner.costs.comms_model.source,
                "warnings": [w for w in planner.costs.warnings if "first l" in w],
            }
            patch.setattr(program, ("-c", "raise SystemExit(1)"))  # to no second time
    return found


def follow(device: torch.device) -> dict[str, Any]:
    """A job whose plan follows its inputs, beside one whose plan stays."""
    # Paper GPUs time launches alone: by costs measured there all plans are as good.
    constraints = {f"t{i}": TABLE_WISE for i in range(4)}
    planner = planner_of(device, search="default", constraints=constraints)
    plan = planner.collective_plan(Scored(), bag_sharders(), dist.group.WORLD)
    found: dict[str, Any] = {"still": train(plan, device, NUM_STEPS)}
    planner.remember(Scored(), bag_sharders())

    def watch(model: Any) -> Iterator[None]:
        settings: dict[str, Any] = {"timed": 2, "max_overhead": 1.0}
        monitor = PlanMonitor(model, planner, every=EVERY, **settings)
        for step in range(NUM_STEPS):
            monitor.step()
            if step == MOVE_AT:
                done = monitor.replan()
                assert done is not None
                found["applied"], found["reason"] = done.applied, done.reason
            if step == NUM_STEPS - 1:
                report = monitor.last_report
                found["phases"] = report and sorted(report.measured.critical_ms)
                popular = on_first_rank(plan)
                found["on_first"] = (
                    len(popular),
                    len(popular & on_first_rank(model.plan)),
                )
                monitor.close()
            yield

    found["losses"] = train(plan, device, NUM_STEPS, watch)
    return found


def journals(device: torch.device) -> dict[str, list[str]]:
    """What each of TorchRec's pipelines queues, with the lookups last or first."""
    return {
        f"{name} {order}": journal_of(
            name, device, lookups_first=order == "lookups first"
        )
        for name in PIPELINES
        for order in ("lookups last", "lookups first")
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
        if part == "example":
            found[part] = train_example()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "device_count", lambda: 0)
                found["example on CPUs"] = train_example()
            continue
        with group(gpu):
            if part == "plans":
                found[part] = plans(gpu)
            elif part == "learned":
                found[part] = learn(gpu, folder / "cache")
            elif part == "followed":
                found[part] = follow(gpu)
            else:
                found[part] = journals(gpu)
        if part == "plans":
            with group(CPU):
                found["plans on CPUs"] = plans(CPU)
    (folder / f"{rank}.json").write_text(json.dumps(found))
