"""Hold the predicted cost of data-parallel tables to measured ones.

A data-parallel table runs TorchRec's dense kernel, whose backward pass writes a
gradient of every row; DistributedDataParallel copies and reduces it, and an optimizer
passes over all rows. No bundle holds that kernel: `planner/costs/kernels.py` derives it
from the fused one. Here both kernels run on the same ids, taking turns, so that a
machine whose speed drifts slows both, and what counts is how much longer the dense one
takes, predicted and measured. Then two or more ranks reduce gradients of the same
sizes.

    torchrun --nproc-per-node 2 benchmarks/bench_dense.py --cost-model cpu_epyc_zen5 \
        --out benchmarks/results/dense_epyc_zen5_202611

writes `<out>.json` (raw) and `<out>.md`. One rank measures kernels, the others wait.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology

from harness.provenance import commit, now
from torchrec_neuroshard import profile_inputs
from torchrec_neuroshard.collect.tbe import FusedTables, InputBatch
from torchrec_neuroshard.collect.timing import keep_freed_memory
from torchrec_neuroshard.cost_models import load_comms_model
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.planner import NeuroShardEnumerator
from torchrec_neuroshard.tables import TableConfig

# The factors in planner/costs/kernels.py were fitted to rows 1,000 to 1,000,000, widths
# 16 and 64, 512 and 4,096 samples, 1 and 20 ids; these lie between.
ROWS = (3_000, 30_000, 300_000)
WIDTHS = (32, 128)
SAMPLES = (1_024, 2_048)
IDS = (3, 10)
GRID = {"rows": ROWS, "widths": WIDTHS, "samples": SAMPLES, "ids": IDS}
WARM_UP, PASSES = 2, 20
LEARNING_RATE = 0.01

Case = tuple[int, int, int, int]
"""Rows, width, samples, ids per sample."""
Times = dict[str, float]


def draw(case: Case, seed: int) -> KeyedJaggedTensor:
    """Ids of one feature; low ones are more likely."""
    rows, _, batch_size, pooling = case
    uniform = np.random.default_rng(seed).random(batch_size * pooling)
    return KeyedJaggedTensor(
        keys=["f"],
        values=torch.from_numpy((rows * uniform**3).astype(np.int64)),
        lengths=torch.full((batch_size,), pooling, dtype=torch.int64),
    )


def predict(case: Case, cost_model: str) -> dict[str, Times]:
    """The planner's price of the table as a fused and as a data-parallel one."""
    rows, width, batch_size, _ = case
    table = EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=width, feature_names=["f"]
    )
    model = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    found = {}
    for kernel, kind in (("fused", "table_wise"), ("dense", "data_parallel")):
        enumerator = NeuroShardEnumerator(
            Topology(world_size=1, compute_device="cpu"),
            batch_size,
            {"t": ParameterConstraints(sharding_types=[kind])},
            cost_model=cost_model,
            profiles=profile_inputs([draw(case, seed) for seed in range(4)]),
        )
        [option] = enumerator.enumerate(model, [EmbeddingBagCollectionSharder()])
        perf = option.shards[0].perf
        found[kernel] = {"forward": perf.fwd_compute, "backward": perf.bwd_compute}
    return found


class DenseTable(nn.Module):
    """What TorchRec makes of a data-parallel table."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.kernel = DenseTableBatchedEmbeddingBagsCodegen(
            [(rows, width)], use_cpu=True
        )

    def forward(self, batch: InputBatch) -> torch.Tensor:
        out: torch.Tensor = self.kernel(batch.indices_L, batch.offsets)
        return out


def measure(case: Case, alone: dist.ProcessGroup) -> dict[str, Times]:
    """Median times of both kernels, in turn [ms].

    It is the thread's own time: others on the machine do not add to it.
    """
    rows, width, batch_size, pooling = case
    table = TableConfig(name="t", num_embeddings=rows, embedding_dim=width)
    fused = FusedTables([table], torch.device("cpu"))
    dense = DistributedDataParallel(
        DenseTable(rows, width),
        process_group=alone,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        static_graph=True,
    )
    optimizer = torch.optim.SGD(dense.parameters(), lr=LEARNING_RATE)
    gradient = torch.full((batch_size, width), 1e-3)

    def step_dense(out: torch.Tensor) -> None:
        torch.autograd.backward(out, gradient)
        optimizer.step()
        optimizer.zero_grad()

    kernels: dict[str, tuple[Callable[[InputBatch], Any], Callable[[Any], None]]] = {
        "fused": (fused.forward, lambda out: torch.autograd.backward(out, gradient)),
        "dense": (dense, step_dense),
    }
    raw: dict[str, list[tuple[float, float]]] = {name: [] for name in kernels}
    for number in range(WARM_UP + PASSES):
        ids = draw(case, number).values()
        batch = InputBatch(ids, torch.arange(batch_size + 1) * pooling, None)
        # Whoever comes second finds the ids in the cache.
        for name in list(kernels)[:: 1 if number % 2 else -1]:
            forward, backward = kernels[name]
            start = time.thread_time()
            out = forward(batch)
            middle = time.thread_time()
            backward(out)
            end = time.thread_time()
            if number >= WARM_UP:
                raw[name].append(((middle - start) * 1e3, (end - middle) * 1e3))
    return {
        name: {
            "forward": statistics.median(f for f, _ in passes),
            "backward": statistics.median(b for _, b in passes),
        }
        for name, passes in raw.items()
    }


def reduce_gradients(num_bytes: int) -> float:
    """Median time of an all-reduce, from the last rank's start [ms]."""
    gradient = torch.zeros(num_bytes // 4)
    taken = []
    for number in range(WARM_UP + PASSES):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(gradient)
        if number >= WARM_UP:
            taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def over(entry: dict[str, Any], phase: str, source: str) -> float:
    """How many times as long the dense kernel takes as the fused one."""
    times: dict[str, Times] = entry[source]
    return times["dense"][phase] / times["fused"][phase]


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def report(data: dict[str, Any]) -> str:
    lines = [
        "# Data-parallel tables, predicted and measured",
        "",
        f"Bundle `{data['cost_model']}` on {data['device']}, torch {data['torch']}; "
        f"medians of {PASSES} passes, both kernels in turn, of the thread's own time. "
        "*Ratio*, measured and predicted, is how many times "
        "as long the dense kernel takes as the fused one on the same ids; backward "
        "holds the copy of the gradient and SGD's step. *Off by* is predicted over "
        "measured ratio.",
        "",
        "| rows | width | samples | ids | forward, measured | predicted | off by "
        "| backward, measured | predicted | off by |",
        "| ---: " * 10 + "|",
    ]
    errors: dict[str, list[float]] = {"forward": [], "backward": []}
    for entry in data["kernels"]:
        cells = [f"{n:,}" for n in entry["case"]]
        for phase, seen in errors.items():
            is_so = over(entry, phase, "measured")
            said = over(entry, phase, "predicted")
            seen.append(said / is_so)
            cells += [f"{is_so:.2f}", f"{said:.2f}", f"{seen[-1]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [""]
    for phase, seen in errors.items():
        spread = [max(e, 1 / e) for e in seen]
        lines.append(
            f"{phase.capitalize()}: off by {geometric_mean(seen):.2f} on geometric "
            f"mean, by a factor of {statistics.median(spread):.2f} on median and "
            f"{max(spread):.2f} at most."
        )
    lines += [
        "",
        f"All-reduce over {data['world_size']} gloo ranks "
        f"({data['comms_source']}), without the drift taken out:",
        "",
        "| bytes | measured [ms] | predicted [ms] | off by |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for entry in data["reductions"]:
        said, is_so = entry["predicted_ms"], entry["measured_ms"]
        lines.append(
            f"| {entry['bytes']:,} | {is_so:.3f} | {said:.3f} | {said / is_so:.2f} |"
        )
    lines += ["", f"Commit {data['commit']}, {data['date']}. `{data['command']}`", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cost-model", default="cpu", help="bundle to judge")
    for name, default in GRID.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone = dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    data: dict[str, Any] = {
        "cost_model": args.cost_model,
        "device": cpu_name(),
        "torch": torch.__version__,
        "world_size": world_size,
        "comms_source": "no model",
        "date": now(),
        "commit": commit(),
        "command": shlex.join(["torchrun", *sys.argv]),
        "kernels": [],
        "reductions": [],
    }
    if alone is not None:
        for case in itertools.product(*(getattr(args, n) for n in GRID)):
            measured = measure(case, alone)
            predicted = predict(case, args.cost_model)
            data["kernels"].append(
                {"case": case, "measured": measured, "predicted": predicted}
            )
            print(data["kernels"][-1], flush=True)
    dist.barrier()
    comms = load_comms_model(
        args.cost_model,
        device_type="cpu",
        world_size=world_size,
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    shapes = itertools.product(args.rows, args.widths)
    sizes = sorted({4 * rows * width for rows, width in shapes})
    for num_bytes in sizes if comms is not None else []:
        measured_ms = reduce_gradients(num_bytes)
        assert comms is not None
        said = comms.all_reduce(np.full((1, world_size), float(num_bytes)))
        data["comms_source"] = comms.source
        data["reductions"].append(
            {
                "bytes": num_bytes,
                "measured_ms": measured_ms,
                "predicted_ms": float(said.max()),
            }
        )
    if rank == 0:
        args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(report(data))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
