"""Train a few tables and log predicted and measured times.

    python examples/watch_training.py --lines phases.jsonl --tensorboard runs/plan
    tensorboard --logdir runs/plan

It runs on one CPU rank, or on more of them by torchrun. See docs/monitoring.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard import (
    JsonLinesReporter,
    NeuroShardPlanner,
    PlanMonitor,
    TableConfig,
    profile_inputs,
)
from torchrec_neuroshard.reporters import PhaseRecord, PlanRecord, Reporter
from torchrec_neuroshard.tables.inputs import draw_batch
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2

CPU = torch.device("cpu")
BATCH_SIZE = 512
"""Samples per rank."""
NUM_BATCHES = 8
"""Batches of a rank. Training cycles through them."""


class TensorBoard(Reporter):
    """Writes the plan and the times of phases as TensorBoard events."""

    def __init__(self, folder: Path) -> None:
        """Take the folder for `tensorboard --logdir`."""
        self._folder = folder
        self._writer: Any = None

    def write_plan(self, plan: PlanRecord) -> None:
        """Open the folder and write a plan's figures."""
        if self._writer is None:
            # Imported here: without --tensorboard, the package is not needed.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        for name, value in plan.scalars.items():
            self._writer.add_scalar(name, value, plan.iteration)

    def write_phases(self, phases: Sequence[PhaseRecord]) -> None:
        """Write planned, predicted and measured times."""
        for phase in phases:
            for kind, ms in phase.scalars.items():
                self._writer.add_scalar(f"{phase.name}/{kind}", ms, phase.iteration)

    def close(self) -> None:
        """Write what is left; only rank 0 has a writer."""
        if self._writer is not None:
            self._writer.close()


def read_batches(tables: Sequence[TableConfig], rank: int) -> list[KeyedJaggedTensor]:
    """Return batches with skewed ids; each rank has its own."""
    batches = []
    for number in range(NUM_BATCHES):
        drawn = draw_batch(tables, BATCH_SIZE, seed=rank * NUM_BATCHES + number)
        ids, lengths = zip(*drawn.values(), strict=True)
        batches.append(
            KeyedJaggedTensor(
                keys=list(drawn),
                values=torch.from_numpy(np.concatenate(ids)),
                lengths=torch.from_numpy(np.concatenate(lengths)),
            )
        )
    return batches


def build_model(tables: Sequence[TableConfig]) -> EmbeddingBagCollection:
    """Return tables on the meta device, with an optimizer fused into the kernels."""
    model = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                embedding_dim=t.embedding_dim,
                num_embeddings=t.num_embeddings,
                feature_names=[t.name],
            )
            for t in tables
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.01})
    return model


def train(lines: Path, others: Sequence[Reporter], num_steps: int) -> None:
    """Plan, shard and train under `PlanMonitor`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tables = mlperf_dlrm_v2(max_rows=10_000, embedding_dim=32)[:8]
    batches, model = read_batches(tables, rank), build_model(tables)
    sharders = [EmbeddingBagCollectionSharder()]
    planner = NeuroShardPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"),
        batch_size=BATCH_SIZE,
        profiles=profile_inputs(batches[:world_size]),
        cost_model="cpu",
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    monitor = PlanMonitor(
        sharded,
        planner,
        every=num_steps // 2,
        reporters=[JsonLinesReporter(lines), *others],
    )
    for step in range(num_steps):
        sharded(batches[step % NUM_BATCHES]).values().square().mean().backward()
        monitor.step()
    monitor.close()
    if rank == 0:
        show(lines)


def show(lines: Path) -> None:
    """Print the last report in the file."""
    records = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    last = max(record["iteration"] for record in records)
    print(
        f"{'iteration':>9}  {'rank':>4}  phase        planned  predicted  measured [ms]"
    )
    for record in records:
        if (record["record"], record["iteration"]) != ("phase", last):
            continue
        rank = "all" if record["rank"] is None else record["rank"]
        kinds = (("planned", 7), ("predicted", 9), ("measured", 8))
        times = (
            f"{'-' if ms is None else f'{ms:.3f}':>{width}}"
            for ms, width in ((record[f"{kind}_ms"], width) for kind, width in kinds)
        )
        print(f"{last:>9}  {rank:>4}  {record['phase']:<11}", *times, sep="  ")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=Path, help="write JSON lines to this file")
    parser.add_argument(
        "--tensorboard", type=Path, help="write TensorBoard events to this folder"
    )
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    options = parser.parse_args(arguments)
    others: list[Reporter] = []
    if options.tensorboard:
        others.append(TensorBoard(options.tensorboard))
    # Hide notices of TorchRec and torch about their own code.
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            alone = f"file://{folder}/store"
            dist.init_process_group("gloo", alone, rank=0, world_size=1)
        try:
            train(options.lines or Path(folder, "lines"), others, options.steps)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
