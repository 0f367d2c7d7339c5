"""Plan for eight GPUs on a machine without any.

    python examples/plan_on_cpu.py                  # 8 x H100, MLPerf DLRM-v2 in full
    python examples/plan_on_cpu.py --gpu h200 --ranks 16 --ranks-per-node 8

The tables are on the meta device, so planning needs no GPU and no memory for them. If
there is no cost model for the GPU, costs are a physical estimate from published
figures, and the output says so. The estimate shows the shape of a plan; its times are
not exact.
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
    """Return the model's tables on the meta device, without memory."""
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
    """Plan, print the report and return the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--gpu", choices=sorted(GPU_CARDS), default="h100", help="card of every rank"
    )
    parser.add_argument(
        "--hbm-gb", type=float, help="memory of a GPU, instead of the card's"
    )
    parser.add_argument(
        "--hbm-gb-per-s", type=float, help="memory bandwidth, instead of the card's"
    )
    parser.add_argument(
        "--nvlink-gb-per-s", type=float, help="bandwidth of a rank inside its node"
    )
    parser.add_argument(
        "--network-gb-per-s", type=float, help="bandwidth of a rank to other nodes"
    )
    parser.add_argument("--ranks", type=int, default=8, help="GPUs in all nodes")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="GPUs per node")
    parser.add_argument("--batch-size", type=int, default=8192, help="samples per rank")
    parser.add_argument(
        "--max-rows", type=int, default=40_000_000, help="most rows of a table"
    )
    parser.add_argument(
        "--embedding-dim", type=int, default=128, help="columns of every table"
    )
    parser.add_argument(
        "--min-partition", type=int, default=32, help="least columns of a shard"
    )
    parser.add_argument(
        "--cost-model", default="auto", help="auto, a bundle's name or its folder"
    )
    parser.add_argument("--html", help="write the report to this HTML file")
    parser.add_argument(
        "--verbose", action="store_true", help="print all details of the report"
    )
    options = parser.parse_args(arguments)
    ranks_per_node = min(options.ranks, options.ranks_per_node)
    logging.getLogger("torchrec").setLevel(logging.ERROR)

    start = time.perf_counter()
    try:
        tables = mlperf_dlrm_v2(options.max_rows, options.embedding_dim)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report shows them
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
    print(report.text(options.verbose, more="For details, add --verbose."))
    if options.html:
        title = f"{len(tables)} tables on {options.ranks} x {options.gpu.upper()}"
        write_html(report, options.html, title)
        print(f"\nwrote {options.html}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
