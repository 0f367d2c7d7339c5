"""Plan the tables of TorchRec's DLRM and train it on several ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_dlrm.py
    torchrun --standalone --nproc-per-node 8 examples/train_dlrm.py \\
        --max-rows 40000000 --batch-size 8192                # eight GPUs, NCCL

This is a plain TorchRec training script. Only `profile_inputs`, `NeuroShardPlanner`,
`collective_plan` and `save_plan` come from this package. The tables are those of MLPerf
DLRM-v2, with at most --max-rows rows each. Replace `read_batches` by your own input.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard import (
    NeuroShardPlanner,
    TableConfig,
    profile_inputs,
    save_plan,
    topology_for,
)
from torchrec_neuroshard.hardware.cards import find_card
from torchrec_neuroshard.hardware.devices import current_device_name
from torchrec_neuroshard.tables.inputs import draw_batch
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2

NUM_DENSE_FEATURES = 13
SHOWN_STEPS = 10
"""Each printed loss is the mean of this many steps."""


def read_batches(
    tables: Sequence[TableConfig], batch_size: int, rank: int
) -> Iterator[Batch]:
    """Yield batches of one rank for ever: skewed ids, and clicks that can be learnt."""
    rng = np.random.default_rng(rank)
    taste = np.linspace(-1.0, 1.0, NUM_DENSE_FEATURES)
    while True:
        drawn = draw_batch(tables, batch_size, seed=int(rng.integers(2**31)))
        ids, lengths = zip(*drawn.values(), strict=True)
        dense = rng.normal(size=(batch_size, NUM_DENSE_FEATURES)).astype(np.float32)
        clicks = rng.random(batch_size) < 1 / (1 + np.exp(-dense @ taste))
        yield Batch(
            dense_features=torch.from_numpy(dense),
            sparse_features=KeyedJaggedTensor(
                keys=list(drawn),
                values=torch.from_numpy(np.concatenate(ids)),
                lengths=torch.from_numpy(np.concatenate(lengths)),
            ),
            labels=torch.from_numpy(clicks.astype(np.int32)),
        )


def build_model(tables: Sequence[TableConfig], device: torch.device) -> DLRMTrain:
    """Return the model; its tables get memory only when they are sharded."""
    torch.manual_seed(0)
    embeddings = EmbeddingBagCollection(
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
    # TBE runs this optimizer in its backward pass. The planner counts its state.
    apply_optimizer_in_backward(RowWiseAdagrad, embeddings.parameters(), {"lr": 0.01})
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=embeddings,
            dense_in_features=NUM_DENSE_FEATURES,
            dense_arch_layer_sizes=[256, tables[0].embedding_dim],
            over_arch_layer_sizes=[256, 128, 1],
            dense_device=device,
        )
    )


def find_topology(
    device_name: str | None, device_type: str, world_size: int, ranks_per_node: int
) -> Topology:
    """Return the topology of the job, with published figures if the GPU is known."""
    card = find_card(device_name)
    if card is None:  # a CPU, or a GPU without published figures here
        return Topology(
            world_size=world_size,
            local_world_size=ranks_per_node,
            compute_device=device_type,
        )
    return topology_for(card.name, world_size=world_size, ranks_per_node=ranks_per_node)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, save the plan, shard and train."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--max-rows", type=int, default=100_000, help="most rows of a table"
    )
    parser.add_argument(
        "--embedding-dim", type=int, default=128, help="columns of every table"
    )
    parser.add_argument(
        "--batch-size", type=int, default=1_024, help="samples per rank"
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument(
        "--cost-model", default="auto", help="auto, a bundle's name or its folder"
    )
    parser.add_argument(
        "--save-plan",
        type=Path,
        default=Path("dlrm_plan.json"),
        metavar="FILE",
        help="where rank 0 writes the plan, to load it with the checkpoint",
    )
    options = parser.parse_args(arguments)

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_world_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    tables = mlperf_dlrm_v2(options.max_rows, options.embedding_dim)
    batches = read_batches(tables, options.batch_size, rank)
    model = build_model(tables, device)
    sharders = [EmbeddingBagCollectionSharder()]

    device_name = current_device_name(device.type)
    if rank == 0:
        print(f"training on {world_size} ranks, each on {device_name}", flush=True)
    # One batch per rank: together they are the samples of one iteration.
    first = itertools.islice(batches, world_size)
    profiles = profile_inputs(batch.sparse_features for batch in first)
    planner = NeuroShardPlanner(
        topology=find_topology(device_name, device.type, world_size, local_world_size),
        batch_size=options.batch_size,
        profiles=profiles,
        cost_model=options.cost_model,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    if rank == 0:
        print(planner.report())
        save_plan(plan, options.save_plan, model=model, planner=planner)
        print(f"saved the plan to {options.save_plan}", flush=True)

    sharded = DistributedModelParallel(
        model, device=device, plan=plan, sharders=sharders
    )
    # For dense layers and data-parallel tables; TBE updates all other tables.
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.005),
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
    pipeline = TrainPipelineSparseDist(sharded, optimizer, device)
    losses = []
    for step in range(1, options.steps + 1):
        loss, _logits, _clicks = pipeline.progress(batches)
        losses.append(loss)
        if rank == 0 and step % SHOWN_STEPS == 0:
            mean = torch.stack(losses[-SHOWN_STEPS:]).mean().item()
            print(f"steps {step - SHOWN_STEPS + 1:>3} to {step:>3}: loss {mean:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
