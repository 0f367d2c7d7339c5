"""Plan for a machine with eight GPUs on one that has none.

    python examples/plan_on_cpu.py                  # 8 x H100, MLPerf DLRM-v2 in full
    python examples/plan_on_cpu.py --gpu h200 --ranks 16 --ranks-per-node 8

The tables lie on the meta device, so planning needs neither a GPU nor their memory.
Where no cost model was measured on the GPU, costs are a physical estimate from
published figures, and the output says so: good enough to see the shape of a plan, not
to promise milliseconds.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Sequence

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_neuroshard import (
    NeuroShardError,
    NeuroShardPlanner,
    TableConfig,
    topology_for,
)
from torchrec_neuroshard.hardware.cards import GPU_CARDS
from torchrec_neuroshard.report import write_html
from torchrec_neuroshard.tables.mlperf import mlperf_dlrm_v2


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
    parser.add_argument("--gpu", choices=sorted(GPU_CARDS), default="h100")
    parser.add_argument("--hbm-gb", type=float, help="memory of a GPU")
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
    ranks_per_node = min(options.ranks, options.ranks_per_node)
    logging.getLogger("torchrec").setLevel(logging.ERROR)

    start = time.perf_counter()
    try:
        tables = mlperf_dlrm_v2(options.max_rows, options.embedding_dim)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the result holds them, too
            planner = NeuroShardPlanner(
                topology=topology_for(
                    options.gpu,
                    num_nodes=options.ranks // ranks_per_node,
                    ranks_per_node=ranks_per_node,
                    memory_gb=options.hbm_gb,
                    hbm_gb_per_s=options.hbm_gb_per_s,
                    intra_gb_per_s=options.nvlink_gb_per_s,
                    inter_gb_per_s=options.network_gb_per_s,
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
