"""What two ranks do, on paper GPUs or on CPUs; started by torchrun.

    torchrun --standalone --nproc-per-node 2 tests/paper_gpu/two_ranks.py FOLDER

Each rank writes what it found to FOLDER/RANK.json.
"""

from __future__ import annotations

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
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan

import race_plans
from harness.models import build_collection, draw_batches
from harness.ranks import Ranks
from harness.training_runs import TrialConfig, TrialError, run_trial
from tests.builders import (
    FixedSearcher,
    analytic,
    bag_sharders,
    columns_only,
    load_script,
    make_planner,
)
from tests.paper_gpu.pipelines import PIPELINES, journal_of
from torchrec_neuroshard import NeuroShardPlanner, TableConfig
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
