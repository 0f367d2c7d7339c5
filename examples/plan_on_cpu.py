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
from torchrec_neuroshard.report import write_html
from torchrec_neuroshard.workloads.mlperf import mlperf_dlrm_v2

GB_PER_S = 1e6
"""Of a data sheet, in bytes per millisecond: TorchRec's unit of bandwidth."""


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
    parser.add_argument("--html", help="file to write the report to as a page")
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
                    hbm_mem_bw=figure("hbm_gb_per_s") * GB_PER_S,
                    intra_host_bw=figure("nvlink_gb_per_s") * GB_PER_S,
                    inter_host_bw=figure("network_gb_per_s") * GB_PER_S,
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
    gigabytes = sum(t.weight_bytes for t in tables) / 1e9
    print(
        f"{len(tables)} tables, {gigabytes:.1f} GB, on {options.ranks} x "
        f"{options.gpu.upper()}, {options.batch_size:,} samples each; planned in "
        f"{seconds:.1f} s\n"
    )
    report = planner.report()
    print(report)
    if options.html:
        title = f"{len(tables)} tables on {options.ranks} x {options.gpu.upper()}"
        write_html(report, options.html, title)
        print(f"\nwrote {options.html}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
