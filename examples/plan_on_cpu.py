"""Plan for a machine with eight GPUs on one that has none.

    python examples/plan_on_cpu.py                  # 8 x H100, MLPerf DLRM-v2 in full
    python examples/plan_on_cpu.py --gpu h200 --ranks 16 --ranks-per-node 8

The tables lie on the meta device, so planning needs neither a GPU nor their memory.
Where no cost model was measured on the GPU, costs are a physical estimate from the data
sheet's figures, and the output says so: good enough to see the shape of a plan, not to
promise milliseconds.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_neuroshard import NeuroShardError, NeuroShardPlanner, TableConfig
from torchrec_neuroshard.placement import Placement
from torchrec_neuroshard.simulator import PredictedCosts
from torchrec_neuroshard.workloads.mlperf import mlperf_dlrm_v2

TORCHREC_GB = 1024**3 / 1000
"""TorchRec takes bandwidths in bytes per millisecond and counts a GB as 2**30 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Figures of NVIDIA's data sheets (SXM modules)."""

    hbm_gb: float
    hbm_gb_per_s: float
    nvlink_gb_per_s: float = 450.0
    """One direction of NVLink 4."""
    network_gb_per_s: float = 50.0
    """One 400 Gbit/s network card per GPU."""


GPUS = {
    "h100": Gpu(hbm_gb=80.0, hbm_gb_per_s=3_350.0),
    "h200": Gpu(hbm_gb=141.0, hbm_gb_per_s=4_800.0),
}


def build_tables(tables: Sequence[TableConfig]) -> EmbeddingBagCollection:
    """Build the model's tables without memory behind them."""
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


def rank_lines(predicted: PredictedCosts, placement: Placement) -> list[str]:
    """Predicted phases of each rank; a star marks the slowest of a column."""
    phases = ("fwd_compute", "fwd_comms", "bwd_comms", "bwd_compute")
    worst = {p: max(getattr(r, p) for r in predicted.ranks) for p in phases}
    lines = ["rank  shards  columns" + "".join(f"{p:>13}" for p in phases) + "   [ms]"]
    for rank, costs in enumerate(predicted.ranks):
        held = [s for s in placement.shards if s.rank == rank]
        cells = [
            f"{getattr(costs, p):>12.3f}"
            + ("*" if worst[p] > 0 and getattr(costs, p) == worst[p] else " ")
            for p in phases
        ]
        columns = sum(s.width for s in held)
        lines.append(f"{rank:>4}{len(held):>8}{columns:>9,}" + "".join(cells))
    return lines


def phase_changes(now: PredictedCosts, then: PredictedCosts) -> tuple[float, float]:
    """How much longer the slowest ranks' compute and collectives take [ms]."""

    def slowest(costs: PredictedCosts, phase: str) -> float:
        return float(max(getattr(rank, phase) for rank in costs.ranks))

    compute, comms = (
        sum(slowest(then, p) - slowest(now, p) for p in phases)
        for phases in (("fwd_compute", "bwd_compute"), ("fwd_comms", "bwd_comms"))
    )
    return compute, comms


def why_split(planner: NeuroShardPlanner, memory_bytes: float) -> list[str]:
    """Say of each split table what the plan would cost with it in one piece."""
    result, task = planner.last_result, planner.last_task
    assert result is not None and task is not None
    simulator = planner.costs.simulator(task)
    now = result.predicted.critical_path_ms
    per_rank = [r.fwd_compute + r.bwd_compute for r in result.predicted.ranks]
    critical = max(range(task.world_size), key=per_rank.__getitem__)
    lines = []
    for index, table in enumerate(task.tables):
        shards = result.placement.table_shards(index)
        if len(shards) < 2:
            continue
        name = table.name.rpartition(".")[2]
        widths = ", ".join(f"{s.width} on rank {s.rank}" for s in shards)
        lines.append(f"{name}: {widths}")
        if table.weight_bytes > memory_bytes:
            lines.append(
                f"    it has {table.weight_bytes / 1e9:.1f} GB, a rank "
                f"{memory_bytes / 1e9:.1f} GB"
            )
            continue
        others = [
            (s.table, s.width, s.rank)
            for s in result.placement.shards
            if s not in shards
        ]
        whole = [
            simulator.evaluate(
                Placement.from_widths(
                    task.world_size, [*others, (index, table.embedding_dim, rank)]
                )
            )
            for rank in range(task.world_size)
        ]
        best = min(
            range(task.world_size), key=lambda rank: whole[rank].critical_path_ms
        )
        then = whole[best].critical_path_ms
        compute, comms = phase_changes(result.predicted, whole[best])
        alone = float(simulator.single_costs([(index, table.embedding_dim)]).sum())
        where = "part of it is" if any(s.rank == critical for s in shards) else "not"
        lines += [
            f"    {where} on the critical rank, {critical}, whose kernel takes "
            f"{per_rank[critical]:.3f} ms; whole, its kernel would take {alone:.3f} ms",
            f"    in one piece on its best rank, {best}, the critical path would be "
            f"{then:.3f} instead of {now:.3f} ms ({then / now - 1:+.1%}: compute "
            f"{compute:+.3f}, collectives {comms:+.3f})",
        ]
    return lines or ["no table is split"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan and print; the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100")
    parser.add_argument("--hbm-gb", type=float, help="instead of the data sheet's")
    parser.add_argument("--hbm-gb-per-s", type=float, help="memory bandwidth")
    parser.add_argument("--nvlink-gb-per-s", type=float, help="of a rank in its node")
    parser.add_argument("--network-gb-per-s", type=float, help="of a rank to others")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8192, help="per rank")
    parser.add_argument("--max-rows", type=int, default=40_000_000)
    parser.add_argument("--embedding-dim", type=int, default=128)
    parser.add_argument("--min-partition", type=int, default=32)
    parser.add_argument("--cost-model", default="auto")
    options = parser.parse_args(arguments)
    sheet = GPUS[options.gpu]
    logging.getLogger("torchrec").setLevel(logging.ERROR)

    def figure(name: str) -> float:
        given = getattr(options, name)
        return float(getattr(sheet, name) if given is None else given)

    memory_bytes = figure("hbm_gb") * 1e9
    start = time.perf_counter()
    try:
        tables = mlperf_dlrm_v2(options.max_rows, options.embedding_dim)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the result holds them, too
            planner = NeuroShardPlanner(
                topology=Topology(
                    world_size=options.ranks,
                    local_world_size=min(options.ranks, options.ranks_per_node),
                    compute_device="cuda",
                    hbm_cap=int(memory_bytes),
                    hbm_mem_bw=figure("hbm_gb_per_s") * TORCHREC_GB,
                    intra_host_bw=figure("nvlink_gb_per_s") * TORCHREC_GB,
                    inter_host_bw=figure("network_gb_per_s") * TORCHREC_GB,
                ),
                batch_size=options.batch_size,
                constraints={
                    t.name: ParameterConstraints(
                        sharding_types=["table_wise", "column_wise"],
                        compute_kernels=["fused"],
                        min_partition=options.min_partition,
                        pooling_factors=[t.pooling_factor],
                    )
                    for t in tables
                },
                storage_reservation=FixedPercentageStorageReservation(0.15),
                cost_model=options.cost_model,
                profiles={t.name: t.profile for t in tables if t.profile is not None},
            )
            planner.plan(build_tables(tables), [EmbeddingBagCollectionSharder()])
    except (NeuroShardError, PlannerError) as error:
        print(f"plan_on_cpu: {error}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - start
    result = planner.last_result
    assert result is not None

    gigabytes = sum(t.weight_bytes for t in tables) / 1e9
    print(
        f"{len(tables)} tables, {gigabytes:.1f} GB, on {options.ranks} x "
        f"{options.gpu.upper()}, {options.batch_size:,} samples each; planned in "
        f"{seconds:.1f} s, {result.num_evaluated:,} rank sets evaluated\n"
    )
    print("\n".join(rank_lines(result.predicted, result.placement)))
    print(
        f"\ncritical path {result.predicted.critical_path_ms:.3f} ms, lower bound "
        f"{result.lower_bound_ms:.3f} ms, gap {result.gap:.1%}"
    )
    print(
        f"compute: {result.predicted.compute_source}; collectives: "
        f"{result.predicted.comms_source}"
    )
    print("\nSplit tables, and why:")
    print("\n".join(why_split(planner, memory_bytes)))
    if result.warnings:
        print("\nWarnings:")
        print("\n".join(f"- {text}" for text in result.warnings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
