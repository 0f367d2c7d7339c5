"""Predict what codecs of collectives and the lookup of distinct ids make of plans.

Nothing is measured: the cards are planned for by the estimate.
First 16 pooled tables on H100s, in one node and in four, with each codec; then eight
tables of sequences on one node, with and without `use_index_dedup`.

    python benchmarks/bench_exchanges.py --out benchmarks/results/exchanges_202611

writes `<out>.json` (raw) and `<out>.md`.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)

from harness.provenance import describe_run, keep_rows
from torchrec_neuroshard import NeuroShardPlanner, SearchConfig, topology_for
from torchrec_neuroshard.profiles import zipf_profile

WIDTH = 128
POOLED = [(2_000, 1)] * 4 + [(50_000, 4)] * 8 + [(5_000_000, 20)] * 4
"""Rows and ids per sample of each table."""
SEQUENCES = [(10_000_000, 20)] * 8
NODES = {1: 8_192, 4: 2_048}
"""Nodes of eight -> samples per rank."""
CODECS = ("fp32", "fp16", "int8")
EXPONENTS = (1.05, 1.3, 0.0)
SAMPLES = 2_048
SECONDS = 30.0


def plan(
    model: nn.Module,
    sharder: Any,
    tables: Sequence[tuple[int, int]],
    *,
    nodes: int,
    samples: int,
    exponent: float,
) -> dict[str, Any]:
    """The critical path of the plan found, and its tables by sharding type."""
    planner = NeuroShardPlanner(
        topology=topology_for("h100", num_nodes=nodes, ranks_per_node=8),
        batch_size=samples,
        profiles={
            f"t{i}": zipf_profile(
                batch_size=samples * 8 * nodes,
                pooling_factor=ids,
                num_embeddings=rows,
                exponent=exponent,
            )
            for i, (rows, ids) in enumerate(tables)
        },
        calibrate="never",
        search=SearchConfig(time_budget_seconds=SECONDS),
        stats=[],
    )
    found = planner.plan(model, [sharder])
    assert planner.last_result is not None
    kinds = Counter(str(s.sharding_type) for s in found.plan[""].values())
    return {
        "nodes": nodes,
        "samples": samples,
        "exponent": exponent,
        "critical_path_ms": planner.last_result.predicted.critical_path_ms,
        "gap": planner.last_result.gap,
        "sharding_types": dict(sorted(kinds.items())),
    }


def table_fields(tables: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"t{i}",
            "num_embeddings": rows,
            "embedding_dim": WIDTH,
            "feature_names": [f"t{i}"],
        }
        for i, (rows, _) in enumerate(tables)
    ]


def coded(codec: str, nodes: int) -> dict[str, Any]:
    tables = [EmbeddingBagConfig(**fields) for fields in table_fields(POOLED)]
    kind = CommType(codec)
    config = QCommsConfig(forward_precision=kind, backward_precision=kind)
    sharder = EmbeddingBagCollectionSharder(
        qcomm_codecs_registry=None
        if codec == "fp32"
        else get_qcomm_codecs_registry(config, device=torch.device("cuda"))
    )
    model = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    row = plan(model, sharder, POOLED, nodes=nodes, samples=NODES[nodes], exponent=1.05)
    return {"codec": codec, **row}


def deduplicated(dedup: bool, exponent: float) -> dict[str, Any]:
    tables = [EmbeddingConfig(**fields) for fields in table_fields(SEQUENCES)]
    model = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    sharder = EmbeddingCollectionSharder(use_index_dedup=dedup)
    row = plan(model, sharder, SEQUENCES, nodes=1, samples=SAMPLES, exponent=exponent)
    return {"dedup": dedup, **row}


def page(settings: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Codecs and distinct ids: predicted iterations and the plans found",
        "",
        "Estimates for H100s, of the embedding part of an iteration; not measured.",
        "",
        "| nodes x ranks | samples per rank | codec | predicted [ms] | gap | tables |",
        "| --- | ---: | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        if "codec" in row:
            kinds = ", ".join(
                f"{n} {kind}" for kind, n in row["sharding_types"].items()
            )
            lines.append(
                f"| {row['nodes']} x 8 | {row['samples']:,} | {row['codec']} | "
                f"{row['critical_path_ms']:.2f} | {row['gap']:.0%} | {kinds} |"
            )
    ms = {
        (row["exponent"], row["dedup"]): row["critical_path_ms"]
        for row in rows
        if "dedup" in row
    }
    lines += [
        "",
        "| ids follow rank^-x | all ids [ms] | distinct ids [ms] | times as fast |",
        "| ---: | ---: | ---: | ---: |",
        *(
            f"| {x} | {ms[x, False]:.2f} | {ms[x, True]:.2f} | "
            f"{ms[x, False] / ms[x, True]:.2f} |"
            for x in EXPONENTS
        ),
        "",
        f"Commit {settings['commit']}, {settings['date']}. `{settings['command']}`",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="path without suffix")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = [coded(codec, nodes) for nodes in NODES for codec in CODECS]
    rows += [deduplicated(on, x) for x in EXPONENTS for on in (False, True)]
    settings = describe_run()
    keep_rows(args.out, settings, rows, page)
    print(page(settings, rows))


if __name__ == "__main__":
    main()
