"""Plan the tables of TorchRec's DLRM and train it on several ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_dlrm.py
    torchrun --standalone --nproc-per-node 8 examples/train_dlrm.py \\
        --max-rows 40000000 --batch-size 8192                # eight GPUs, NCCL

A plain training script: three lines of it plan (`profile_inputs`, `NeuroShardPlanner`,
`collective_plan`), the others are TorchRec's own. The tables are MLPerf DLRM-v2's, with
rows capped at --max-rows. Put your batches in the place of `read_batches`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import warnings
from collections.abc import Iterator, Sequence

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

from torchrec_neuroshard import NeuroShardPlanner, TableConfig, profile_inputs
from torchrec_neuroshard.tables.inputs import draw_batch
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2

NUM_DENSE_FEATURES = 13
SHOWN_STEPS = 10
"""Steps over which a loss that is printed is averaged."""


def read_batches(
    tables: Sequence[TableConfig], batch_size: int, rank: int
) -> Iterator[Batch]:
    """Yield a rank's batches without end: skewed ids, and clicks that can be learnt."""
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
    """Build the model; its tables hold no memory until they are sharded."""
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
    # Fused into the kernels' backward pass; the planner counts its state, too.
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, shard and train."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--max-rows", type=int, default=100_000, help="of a table")
    parser.add_argument("--embedding-dim", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1_024, help="per rank")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cost-model", default="auto", help="or a bundle's folder")
    options = parser.parse_args(arguments)
    # Notices of TorchRec and torch about their own code.
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)

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

    # As many samples as all ranks read in one iteration: what the kernels will see.
    first = itertools.islice(batches, world_size)
    profiles = profile_inputs(batch.sparse_features for batch in first)
    planner = NeuroShardPlanner(
        topology=Topology(
            world_size=world_size,
            local_world_size=local_world_size,
            compute_device=device.type,
        ),
        batch_size=options.batch_size,
        profiles=profiles,
        cost_model=options.cost_model,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    if rank == 0:
        print(planner.report(), flush=True)

    sharded = DistributedModelParallel(
        model, device=device, plan=plan, sharders=sharders
    )
    # Of dense layers and data-parallel tables; other tables' optimizer is fused.
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
