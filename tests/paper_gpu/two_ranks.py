"""What two ranks do, on paper GPUs or on CPUs; started by torchrun.

    torchrun --standalone --nproc-per-node 2 tests/paper_gpu/two_ranks.py FOLDER

Each rank writes what it found to FOLDER/RANK.json.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import race_plans
from harness.models import build_collection, draw_batches
from harness.ranks import Ranks
from harness.training_runs import TrialConfig, TrialError, run_trial
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
)
from tests.paper_gpu.pipelines import PIPELINES, journal_of
from torchrec_neuroshard import NeuroShardPlanner, PlanMonitor, TableConfig
from torchrec_neuroshard.planner import replan

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_dlrm.py"
BATCH_SIZE = 16
QUICK = TrialConfig(warm_up=1, iterations=3, phase_iterations=2, learning_rate=0.5)
TABLES = tuple(
    TableConfig(
        name=f"t{i}",
        num_embeddings=4_000 * (i + 1),
        embedding_dim=16,
        pooling_factor=3.0,
        optimizer=optimizer,
    )
    for i, optimizer in enumerate(("sgd", "rowwise_adagrad", "adagrad"))
)


def train_example() -> dict[str, Any]:
    """Losses of `examples/train_dlrm.py`, and where they were."""
    losses: list[torch.Tensor] = []

    class Noted(TrainPipelineSparseDist):
        def progress(self, batches: Any) -> Any:
            found = super().progress(batches)
            losses.append(found[0].detach())
            return found

    script = load_script(EXAMPLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "TrainPipelineSparseDist", Noted)
        patch.setattr(script, "NeuroShardPlanner", alike)
        options = "--max-rows 500 --embedding-dim 8 --batch-size 32 --steps 6"
        script.main([*options.split(), "--cost-model", "cpu"])
    return {
        "losses": [float(loss) for loss in losses],
        "device": str(losses[0].device),
    }


def alike(**given: Any) -> NeuroShardPlanner:
    """A planner of one plan for GPUs and CPUs: first weights follow the plan."""
    only = ParameterConstraints(sharding_types=["table_wise"])
    given["constraints"] = dict.fromkeys(given["profiles"], only)
    return NeuroShardPlanner(**{**given, **analytic(), "consider_stock": False})


def module() -> torch.nn.Module:
    found = torch.nn.Module()
    found.embeddings = build_collection(TABLES)
    return found


def planner_of(ranks: Ranks) -> NeuroShardPlanner:
    return make_planner(
        ranks.world_size,
        ranks.device.type,
        topology_arguments={"local_world_size": ranks.local_world_size},
        search=FixedSearcher([(0, 16, 0), (1, 8, 0), (1, 8, 1), (2, 16, 1)]),
        batch_size=BATCH_SIZE,
        constraints=columns_only(module()),
    )


def train(ranks: Ranks, plan: ShardingPlan) -> list[float]:
    batches = draw_batches(TABLES, BATCH_SIZE, 0, ranks.rank, ranks.device)
    result = run_trial(plan, TABLES, batches, QUICK, control=ranks.control)
    return list(result.losses)


def trials(ranks: Ranks) -> dict[str, Any]:
    """Train a plan, TorchRec's, one that finds no memory, and the first one again."""
    planner = planner_of(ranks)
    plan = planner.collective_plan(module(), bag_sharders(), dist.group.WORLD)
    stock = EmbeddingShardingPlanner(topology=planner.topology, batch_size=BATCH_SIZE)
    theirs = stock.collective_plan(module(), bag_sharders(), dist.group.WORLD)
    found: dict[str, Any] = {
        "ours": train(ranks, plan),
        "theirs": train(ranks, theirs),
    }
    moved = ranks.on_first(lambda: moved_plan(theirs, planner))
    found["replanned"] = train(ranks, moved)
    if ranks.on_gpu:
        found["failed"] = fail(ranks, plan)
    found["again"] = train(ranks, plan)
    return found


def race(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Losses of both plans in `benchmarks/race_plans.py`; on the first rank alone."""
    out = folder / "race.json"
    config = race_plans.RaceConfig(
        device=ranks.device.type,
        cost_model="cpu_epyc",
        max_rows=300,
        embedding_dim=8,
        min_partition=8,  # a split table is another optimizer, and plans are not alike
        batch_size=BATCH_SIZE,
        pairs=1,
        block_iterations=2,
        output=str(out),
    )
    race_plans.run(config, ranks)
    if ranks.rank:
        return {}
    planners = json.loads(out.read_text())["planners"]
    return {name: p["rounds"][0]["losses"] for name, p in planners.items()}


def moved_plan(plan: ShardingPlan, planner: NeuroShardPlanner) -> ShardingPlan:
    """TorchRec's plan after some of its shards moved."""
    return replan(
        plan,
        planner=planner,
        model=module(),
        budget_bytes=2**30,
        sharders=bag_sharders(),
    ).plan


def fail(ranks: Ranks, plan: ShardingPlan) -> dict[str, Any]:
    """Train where rank 1 has next to no memory, with nobody collecting garbage."""
    ops: Any = torch.ops.paper_cuda
    capacity, index = ops.capacity(), ranks.device.index
    gc.collect()  # earlier garbage, which would hide what the trial leaves
    gc.disable()
    base = ops.allocated(index)
    if ranks.rank == 1:
        ops.set_capacity(base + 200_000)
    error = ""
    try:
        train(ranks, plan)
    except TrialError as failure:
        error = str(failure)
    ops.set_capacity(capacity)
    kept_bytes = ops.allocated(index) - base
    gc.enable()
    return {"error": error, "kept_bytes": kept_bytes}


LEARNED = ("f0", "f1", "f2", "f3")
EVERY, DRIFT_AT, MOVE_AT, NUM_STEPS = 6, 8, 27, 36


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
        pooled = torch.cat([outputs[f] for f in LEARNED], dim=1)
        loss: torch.Tensor = self.dense(pooled.sin()).square().mean() - pooled.mean()
        return loss


def learning_planner(ranks: Ranks, **costs: Any) -> NeuroShardPlanner:
    """A planner of four whole tables."""
    only = ParameterConstraints(sharding_types=["table_wise"])
    return make_planner(
        ranks.world_size,
        ranks.device.type,
        topology_arguments={"local_world_size": ranks.local_world_size},
        search="default",
        batch_size=BATCH_SIZE,
        constraints={f"t{i}": only for i in range(4)},
        **costs,
    )


def learn(ranks: Ranks, cache: Path) -> dict[str, Any]:
    """First launch, second launch, and a job whose inputs drift and plan follows."""
    found: dict[str, Any] = {}
    program = "torchrec_neuroshard.training.first_launch.PROGRAM"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEUROSHARD_CACHE", str(cache))
        for launch in ("first", "second"):
            planner = learning_planner(
                ranks, cost_model="auto", comms_model=None, calibrate=0.5
            )
            plan = planner.collective_plan(Scored(), bag_sharders(), dist.group.WORLD)
            found[launch] = {
                "kernels": planner.costs.cost_model.source,
                "collectives": planner.costs.comms_model.source,
                "warnings": [w for w in planner.costs.warnings if "first l" in w],
            }
            patch.setattr(program, ("-c", "raise SystemExit(1)"))  # to no second time
    # Paper GPUs time launches alone, so that by these costs all plans are as good.
    planner = learning_planner(ranks)
    plan = planner.collective_plan(Scored(), bag_sharders(), dist.group.WORLD)
    found["still"] = drift(ranks, planner, plan, None)
    monitor: dict[str, Any] = {"timed": 2, "max_overhead": 1.0}
    found["watched"] = drift(ranks, planner, plan, {"every": EVERY, **monitor})
    return found


def drift(
    ranks: Ranks,
    planner: NeuroShardPlanner,
    plan: ShardingPlan,
    settings: dict[str, Any] | None,
) -> dict[str, Any]:
    """Train while the tables of rank 0 become popular; move them, if watched."""
    planner.remember(Scored(), bag_sharders())
    model = DistributedModelParallel(
        Scored().to(ranks.device),
        device=ranks.device,
        plan=copy.deepcopy(plan),
        sharders=bag_sharders(),
    )
    for number, table in enumerate(model.state_dict().values()):
        for part in table.local_shards() if hasattr(table, "local_shards") else ():
            torch.nn.init.constant_(part.tensor, 0.1 + number)
    dense = torch.optim.SGD(model.module.dense.parameters(), lr=0.01)
    popular = {n for n, s in plan.plan["ebc"].items() if s.ranks[0] == 0}
    monitor = PlanMonitor(model, planner, **settings) if settings else None
    found: dict[str, Any] = {"losses": []}
    for step in range(NUM_STEPS):
        ids = [12 if step >= DRIFT_AT and f"t{i}" in popular else 1 for i in range(4)]
        generator = torch.Generator().manual_seed(10 * step + ranks.rank)
        features = KeyedJaggedTensor(
            keys=list(LEARNED),
            values=torch.randint(0, 500, (BATCH_SIZE * sum(ids),), generator=generator),
            lengths=torch.tensor(ids).repeat_interleave(BATCH_SIZE).int(),
        )
        dense.zero_grad()
        loss = model(features.to(ranks.device))
        loss.backward()
        dense.step()
        found["losses"].append(float(loss.detach()))
        if monitor is None:
            continue
        monitor.step()
        if step == MOVE_AT:
            done = monitor.replan()
            assert done is not None
            found["applied"], found["reason"] = done.applied, done.reason
            found["moved_bytes"] = done.result.moved_bytes
    if monitor is not None:
        report = monitor.last_report
        found["is_on"] = monitor.is_on
        found["phases"] = report and sorted(report.measured.critical_ms)
        found["on_first"] = [
            len(popular & {n for n, s in p.plan["ebc"].items() if s.ranks[0] == 0})
            for p in (plan, model.plan)
        ]
        monitor.close()
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {"example": train_example()}
    folder = Path(sys.argv[1])
    with pytest.MonkeyPatch.context() as patch:
        # torchrun's store still holds what the first group left there.
        init = functools.partial(
            dist.init_process_group,
            init_method=f"file://{folder}/store",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        patch.setattr(dist, "init_process_group", init)
        ranks = Ranks()
    found["trials"] = trials(ranks)
    if ranks.on_gpu:
        found["learned"] = learn(ranks, folder / "cache")
        found["journals"] = {
            f"{name} {order}": journal_of(
                name, ranks.device, lookups_first=order == "lookups first"
            )
            for name in PIPELINES
            for order in ("lookups last", "lookups first")
        }
    found["race"] = race(ranks, folder)
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
