"""Predict how codec, widths and group layout shorten one all-to-all.

The ratios are compared with figures of Pinterest Engineering (June 2026). Pinterest's
table sizes and batch are not published. The all-to-alls here are so large that only
bytes count, and sizes cancel out in a ratio.

    python benchmarks/bench_group_layout.py > benchmarks/results/group_layout_202611.md
"""

from __future__ import annotations

import datetime
import logging
import warnings

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints

from torchrec_neuroshard import (
    NeuroShardPlanner,
    PlacementConstraints,
    SearchConfig,
    group_topology,
    topology_for,
)
from torchrec_neuroshard.commands.codecs import coded_sharders

NUM_TABLES, WIDTH, BATCH, PER_NODE = 64, 256, 4096, 8
STEPS = (
    ("FP32, all ranks in one group", "none", WIDTH, False),
    ("FP8", "fp8", WIDTH, False),
    ("half the widths", "fp8", WIDTH // 2, False),
    ("groups of one node", "fp8", WIDTH // 2, True),
)
LAYOUT_ALONE = ("groups of one node, with FP32 and full widths", "none", WIDTH, True)


def forward_ms(card: str, nodes: int, codec: str, width: int, grouped: bool) -> float:
    """Return the output all-to-all's time with coding, for evenly placed tables."""
    topology = topology_for(card, num_nodes=nodes, ranks_per_node=PER_NODE)
    if grouped:
        topology = group_topology(topology, PER_NODE, use_inter_host_allreduce=True)
    names = [f"t{number}" for number in range(NUM_TABLES)]
    ranks = int(topology.world_size)
    model = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=10_000,
                embedding_dim=width,
                feature_names=[name],
            )
            for name in names
        ],
    )
    planner = NeuroShardPlanner(
        topology=topology,
        batch_size=BATCH,
        constraints=dict.fromkeys(
            names, ParameterConstraints(sharding_types=["table_wise"])
        ),
        placement_constraints=PlacementConstraints(
            pin={name: [number % ranks] for number, name in enumerate(names)}
        ),
        search=SearchConfig(time_budget_seconds=0.2),
        calibrate="never",
        stats=[],
        debug=False,
    )
    planner.plan(
        model, coded_sharders([EmbeddingBagCollectionSharder()], codec, "cuda")
    )
    return float(planner.report().worst_ms["fwd_comms"])


def main() -> None:
    """Print the page of results."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("# Predicted: codec, widths and group layout\n")
    print(
        f"Forward all-to-all of outputs, with coding: {NUM_TABLES} table-wise tables "
        f"of {WIDTH} columns, {BATCH:,} samples per rank, {PER_NODE} GPUs per node. "
        "Nothing was measured. Bandwidths of links are published measurements or data "
        "sheet figures of the card. The time of coding is estimated from the memory "
        "that it moves. Each step includes the steps above it. Made by "
        f"`benchmarks/bench_group_layout.py` on {datetime.date.today()}.\n"
    )
    print("| card, nodes | step | ms | speed-up |\n| --- | --- | ---: | ---: |")
    for card in ("a100", "h100"):
        for nodes in (2, 4, 8):
            times = [forward_ms(card, nodes, *how) for _, *how in STEPS]
            for (name, *_), before, ms in zip(
                STEPS, [0.0, *times], times, strict=False
            ):
                gain = f"{before / ms:.2f}" if before else ""
                print(f"| {card}, {nodes} | {name} | {ms:.3f} | {gain} |")
            name, *how = LAYOUT_ALONE
            ms = forward_ms(card, nodes, *how)
            print(f"| {card}, {nodes} | {name} | {ms:.3f} | {times[0] / ms:.2f} |")


if __name__ == "__main__":
    main()
