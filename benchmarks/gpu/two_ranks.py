"""Train tables on two ranks that share one device, beside one rank with whole tables.

    python benchmarks/gpu/two_ranks.py --out two_ranks.json

The ranks talk over gloo, since NCCL refuses two ranks on one GPU. Each case shards
tables by one type, or by all types at once. Its losses must equal those of one rank
that holds the same tables whole: TorchRec's exchange works on the device's tensors,
whatever the widths of column shards. A case that fails has its error.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.models import local_tables

WORLD_SIZE, PATIENCE_S = 2, 20.0
ROWS, STEPS, BATCH_SIZE, RATE = 1000, 5, 64, 0.5
TOLERANCE = 1e-5
"""Relative difference of losses; kernels add in different orders."""
TABLES: Mapping[str, tuple[str, Sequence[tuple[int, int]]]] = {
    "whole": ("table_wise", [(64, 1)]),
    "even": ("column_wise", [(32, 0), (32, 1)]),
    "uneven": ("column_wise", [(48, 0), (16, 1)]),
    "rows": ("row_wise", [(64, 0), (64, 1)]),
    "node rows": ("table_row_wise", [(64, 0), (64, 1)]),
    "replicas": ("data_parallel", []),
}
"""Table -> sharding type, and width and rank of each shard."""
CASES: Mapping[str, Sequence[str]] = {
    **{name: [name] for name in TABLES},
    "all but rows": ["whole", "even", "uneven", "replicas"],
    "all": list(TABLES),
}


def sharding(name: str, device: torch.device) -> ParameterSharding:
    """Return a table's shards; both ranks have the same device."""
    kind, parts = TABLES[name]
    if kind == "data_parallel":
        ranks = list(range(WORLD_SIZE))
        return ParameterSharding(kind, compute_kernel="dense", ranks=ranks)
    by_rows, left, shards = kind.endswith("row_wise"), 0, []
    for number, (width, rank) in enumerate(parts):
        place = f"rank:{rank}/{device}"
        height = ROWS // len(parts) if by_rows else ROWS
        offsets = [number * height, 0] if by_rows else [0, left]
        shards.append(ShardMetadata(offsets, [height, width], place))
        left += width
    return ParameterSharding(
        kind,
        compute_kernel="fused",
        ranks=[rank for _, rank in parts],
        sharding_spec=EnumerableShardingSpec(shards),
    )


class Model(nn.Module):
    """Tables alone."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=ROWS,
                    embedding_dim=64,
                    feature_names=[name],
                )
                for name in names
            ],
            device=device,
        )

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Return the loss; every column of every table has its own gradient."""
        values = self.tables(batch).values()
        scale = torch.linspace(0.5, 1.5, values.shape[1], device=values.device)
        loss: torch.Tensor = (values.sin() * scale).sum() / len(values)
        return loss


def draw_batch(
    names: Sequence[str], step: int, rank: int, device: torch.device
) -> KeyedJaggedTensor:
    """Return bags of none to three ids for a rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (len(names) * BATCH_SIZE,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    batch = KeyedJaggedTensor(keys=list(names), values=ids, lengths=lengths)
    return batch.to(device)


def train_whole(model: Model, names: Sequence[str]) -> list[float]:
    """Return the losses of one rank with the batches of all ranks."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    device = next(model.parameters()).device
    for step in range(STEPS):
        optimizer.zero_grad()
        own = [model(draw_batch(names, step, r, device)) for r in range(WORLD_SIZE)]
        loss = torch.stack(own).mean()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss))
    return losses


def train_sharded(
    model: Model, names: Sequence[str], device: torch.device
) -> list[float]:
    """Return the mean losses of all ranks; the tables start as those of `model`."""
    rank = dist.get_rank()
    plan = EmbeddingModuleShardingPlan({n: sharding(n, device) for n in names})
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}
    sharded = DistributedModelParallel(
        Model(names, torch.device("meta")),
        device=device,
        plan=ShardingPlan({"tables": plan}),
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
    )
    bags: Any = model.tables.embedding_bags
    with torch.no_grad():
        for name, part, (top, left) in local_tables(sharded):
            rows, width = part.shape
            whole = bags[name].weight
            part.copy_(whole[top : top + rows, left : left + width])
    replicas = [
        p for name, p in sharded.named_parameters() if ".replicas." in f".{name}"
    ]
    optimizer = torch.optim.SGD(replicas, lr=RATE) if replicas else None
    losses = []
    for step in range(STEPS):
        if optimizer is not None:
            optimizer.zero_grad()
        loss = sharded(draw_batch(names, step, rank, device))
        torch.autograd.backward(loss)
        if optimizer is not None:
            optimizer.step()
        mean = loss.detach().cpu().double() / WORLD_SIZE
        dist.all_reduce(mean)
        losses.append(float(mean))
    return losses


def run_case(
    names: Sequence[str], rank: int, device: torch.device, store: Path
) -> dict[str, Any]:
    """Return the losses of two ranks and of one, or the error."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )
    try:
        torch.manual_seed(1)
        model = Model(names, device)
        sharded = train_sharded(model, names, device)
        whole = train_whole(model, names)
    except Exception as error:  # one type's fault must not hide the others
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        dist.destroy_process_group()
    pairs = zip(sharded, whole, strict=True)
    difference = max(abs(s - w) / abs(w) for s, w in pairs)
    return {
        "equal": difference <= TOLERANCE and len(set(whole)) == STEPS,
        "difference": difference,
        "losses": sharded,
        "whole": whole,
    }


def run_rank(rank: int, name: str, out: Path, until: float, folder: Path) -> None:
    """Run all cases; rank 0 writes after each."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    size = str(WORLD_SIZE)
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    torch.set_num_threads(1)
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found: dict[str, Any] = {}
    for number, (case, names) in enumerate(CASES.items()):
        if time.time() >= until:
            print("the time is up", flush=True)
            return
        found[case] = run_case(names, rank, device, folder / str(number))
        if rank == 0:
            out.write_text(json.dumps({"device": str(device), "cases": found}))
            shown = {k: v for k, v in found[case].items() if not isinstance(v, list)}
            print(f"{case}: {shown}", flush=True)


def main() -> int:
    """Run all cases; return 1 if one differs or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    until = time.time() + args.seconds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        rest = (args.device, args.out, until, Path(folder))
        ranks = [
            context.Process(target=run_rank, args=(rank, *rest), daemon=True)
            for rank in range(WORLD_SIZE)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    if not args.out.exists():
        print("no case was trained")
        return 1
    cases = json.loads(args.out.read_text())["cases"]
    return int(not all(case.get("equal") for case in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
