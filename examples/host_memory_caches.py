"""Plan a model that is larger than the GPUs' memory.

    python examples/host_memory_caches.py              # MLPerf DLRM-v2 on one H100
    python examples/host_memory_caches.py --ranks 4 --memory-gb 20 --html caches.html

Tables that do not fit are kept in host memory, with a cache of their rows on the GPU
(TorchRec's `fused_uvm_caching`). The planner chooses these tables and the size of each
cache by how often rows are looked up in the profiles. The script compares this with a
common set-up: TorchRec's planner, with the same load factor for the cache of every
table.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_neuroshard import (
    NeuroShardError,
    NeuroShardPlanner,
    SearchConfig,
    TableConfig,
    topology_for,
    write_html,
)
from torchrec_neuroshard.hardware.cards import GPU_CARDS
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
    """Plan both ways, print the comparison and return the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--gpu", choices=sorted(GPU_CARDS), default="h100", help="card of every rank"
    )
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, all in one node")
    parser.add_argument(
        "--memory-gb", type=float, help="memory of a GPU, instead of the card's"
    )
    parser.add_argument(
        "--host-memory-gb", type=float, default=512, help="host memory of the node"
    )
    parser.add_argument("--batch-size", type=int, default=8192, help="samples per rank")
    parser.add_argument(
        "--load-factor",
        type=float,
        default=0.2,
        help="of all caches in TorchRec's plan",
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="time budget of the search"
    )
    parser.add_argument("--html", help="write the comparison to this HTML file")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # TorchRec's notices about its own code
    warnings.simplefilter("ignore")  # the report shows the planner's warnings

    tables = mlperf_dlrm_v2()
    model, sharders = build_tables(tables), [EmbeddingBagCollectionSharder()]
    try:
        topology = topology_for(
            options.gpu,
            ranks_per_node=options.ranks,
            memory_gb=options.memory_gb,
            host_memory_gb=options.host_memory_gb,
        )
        planner = NeuroShardPlanner(
            topology=topology,
            batch_size=options.batch_size,
            cost_model=options.gpu,
            # With your own data: profile_inputs(batches).
            profiles={t.name: t.profile for t in tables if t.profile is not None},
            search=SearchConfig(time_budget_seconds=options.seconds),
        )
        planner.plan(model, sharders)
        usual = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=options.batch_size,
            constraints={
                t.name: ParameterConstraints(
                    compute_kernels=["fused_uvm_caching"],
                    cache_params=CacheParams(load_factor=options.load_factor),
                    pooling_factors=[t.pooling_factor],
                )
                for t in tables
            },
            stats=[],
        ).plan(model, sharders)
        name = f"every cache {options.load_factor:g}"
        compared = planner.compare(usual, model, sharders, name)
    except (NeuroShardError, PlannerError) as error:
        print(f"host_memory_caches: {error}", file=sys.stderr)
        return 2
    gigabytes = sum(t.weight_bytes for t in tables) / 1e9
    memory = sum(d.storage.hbm for d in topology.devices) / 1e9
    print(f"{gigabytes:.1f} GB of tables, {memory:.1f} GB of GPU memory\n")
    for table in compared.second.tables:
        print(f"{table.table:<8}{table.num_embeddings:>12,} rows: {table.place}")
        if table.host is not None:
            print(f"{'':<8}{table.host}")
    print(f"\n{compared.verdict}")
    print(f"compute: {compared.second.compute_source}")
    if options.html:
        write_html(compared, options.html, "Tables in host memory")
        print(f"wrote {options.html}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
