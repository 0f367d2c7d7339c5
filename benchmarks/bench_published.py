"""Hold cost models against timings that others published.

On a GPU that nothing was measured on, plans rest on a physical estimate. Its constants
are fitted here to published timings of fused kernels on six GPUs and of collectives on
two (`published/*.tsv`, each row with its source); and it is held against timings of
cards, and of sources, that were left out of the fit. Beside it stands TorchRec's.

    python benchmarks/bench_published.py --out benchmarks/results/published_202611 \
        --trace a100x8_one_node.json.gz --trace a100x16_two_nodes.json.gz

writes `<out>.json` (raw) and `<out>.md`. It needs no GPU. Of traces of
`torch.profiler` it tells what ran beside each collective.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from harness.pages import table
from harness.provenance import describe_run
from published import kernels
from published.fitting import card_left_out, fit, left_out, predict, shared_of
from published.kernels import KernelRow, family, read_kernels
from published.links import (
    fit_links,
    predict_links,
    read_links,
    table_left_out,
)
from published.page import card_table, kernel_table, link_table, overlap_table
from published.rivals import stock_estimate
from published.traces import overlaps, read_trace
from torchrec_neuroshard.models.physical import PhysicalConstants
from torchrec_neuroshard.models.published_links import CollectiveConstants


def kernel_models(rows: list[KernelRow]) -> dict[str, dict[KernelRow, float]]:
    """Predict all timings by all models [ms]."""
    shipped = predict(rows, shared_of(PhysicalConstants())).tolist()
    return {
        "TorchRec": {r: stock_estimate(r) for r in rows},
        "ours": dict(zip(rows, shipped, strict=True)),
        "- source left out": left_out(rows, lambda r: r.source),
        "- card left out": card_left_out(rows),
    }


def spread_of_tables(predicted: dict[KernelRow, float]) -> float:
    """Standard deviation of log ratios within a card's quantity, on device memory."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row, ms in predicted.items():
        if row.location == "device":
            logs = groups.setdefault((family(row.card), row.phase), [])
            logs.append(float(np.log(ms / row.time_ms)))
    within = np.concatenate([np.array(v) - np.mean(v) for v in groups.values()])
    return float(np.sqrt(np.mean(within**2)))


def spreads(cards: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What `estimate_error` goes by: of the cards' ratios, left out."""
    forward = {
        k: np.log(v["forward_ratio"]) for k, v in cards.items() if v["forward_ratio"]
    }
    backward = {
        k: np.log(v["backward_ratio"]) for k, v in cards.items() if v["backward_ratio"]
    }
    both = sorted(set(forward) & set(backward))
    speed = np.array([forward[k] for k in both])
    beyond = np.array([forward[k] - backward[k] for k in both])
    return {
        "bandwidth": float(np.sqrt(np.mean(np.square(list(forward.values()))))),
        "backward": float(np.sqrt(np.mean(beyond**2))),
        "correlation": float(
            (speed * beyond).sum() / np.sqrt((speed**2).sum() * (beyond**2).sum())
        ),
    }


def unused(path: Path) -> list[tuple[str, int]]:
    """Why timings of the file are not used, and how many."""
    with path.open(newline="") as file:
        reasons = Counter(r["use"] for r in csv.DictReader(file, delimiter="\t"))
    return [(why, n) for why, n in reasons.most_common() if why != "used"]


def main() -> None:
    """Fit, leave out, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="results, no suffix")
    parser.add_argument("--trace", type=Path, action="append", default=[])
    args = parser.parse_args()

    logging.disable(logging.WARNING)  # of topologies that TorchRec's factory lacks
    rows, sizes = read_kernels(), read_links()
    models = kernel_models(rows)
    cards_md, cards = card_table(rows, models["- card left out"])
    fitted, shipped = fit(rows), shared_of(PhysicalConstants())
    linked = fit_links(sizes)
    link_models = {
        "ours": dict(zip(sizes, predict_links(sizes).tolist(), strict=True)),
        "table left out": table_left_out(sizes),
    }
    both = CollectiveConstants(intra_gb_per_s=1.0, inter_gb_per_s=1.0)
    shipped_links = {n: getattr(both, n) for n in linked if n != "library_us"}

    constants_md = table(
        ["constant", "fitted", "shipped"],
        [[n, f"{v:.3g}", f"{shipped[n]:g}"] for n, v in fitted.items()]
        + [
            [n, f"{v:.3g}", f"{shipped_links[n]:g}" if n in shipped_links else "23.6"]
            for n, v in linked.items()
        ],
    )
    left = models["- card left out"]
    spread = {**spreads(cards), "tables": spread_of_tables(left)}
    raw = {
        **describe_run(),
        "cards_left_out": cards,
        "spreads": spread,
        "constants": {"fitted": {**fitted, **linked}, "shipped": shipped},
        "timings": [
            {
                "source": r.source,
                "card": r.card,
                "phase": r.phase,
                "location": r.location,
                "measured_ms": r.time_ms,
                **{name.strip(): round(p[r], 5) for name, p in models.items()},
            }
            for r in rows
        ],
    }
    sections = [
        "# Models held against published timings\n",
        f"`{raw['command']}`, commit {raw['commit']}, {raw['date']}, torchrec "
        f"{raw['versions']['torchrec']}. No GPU took part: the timings "
        "are others', row by row with their sources in `benchmarks/published/`. "
        "All errors are medians of |predicted / measured - 1|.\n",
        "## Fused kernels\n",
        kernel_table(rows, models),
        "\nTimings of one source, card and quantity weigh as much as any other such "
        "group in the fits, which minimise log ratios, large ones less. *TorchRec* is "
        "its `EmbeddingPerfEstimator`, run with the cards' memory bandwidths, and what "
        "each cache misses as `CacheParams.stats`. A dash: "
        "without that source or card, no timing of such kernels is left. Of caches, "
        "one source states the size: what they miss was not checked.\n",
        cards_md,
        "\nMedians of timings in the card's memory. The spread of these ratios is what "
        f"`EstimateError` goes by: bandwidth {spread['bandwidth']:.2f}, backward "
        f"beside it {spread['backward']:.2f}, their correlation "
        f"{spread['correlation']:.2f} (logarithms, four cards). Within "
        f"one card's quantity they spread by {spread['tables']:.2f}.\n",
        "Not used: "
        + "; ".join(
            f"{n} ({why.removeprefix('not used: ')})" for why, n in unused(kernels.DATA)
        )
        + ".\n",
        "## Collectives\n",
        link_table(sizes, link_models),
        "\nMedian error / predicted over measured. The links' effective bandwidths are "
        "the cards' published ones, of which those of B200 and MI355X are the largest "
        "sizes of these very tables: what is left out is start and ramp. Tables of "
        "MI355X inside a node contradict each other by a quarter at equal sizes.\n",
    ]
    for path in args.trace:
        sections.append(f"## Beside the collectives of {path.name}\n")
        sections.append(f"{overlap_table(overlaps(read_trace(path)))}\n")
    sections += ["## Constants\n", constants_md]
    args.out.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")
    args.out.with_suffix(".md").write_text("\n".join(sections) + "\n")
    print(args.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
