"""Compare cost models with published timings and with measurements on an H200.

For GPUs without measurements, the planner uses a physical estimate. This script fits
the estimate's constants to published timings of fused kernels on six GPUs and of
collectives on nine (`published/*.tsv`, each row with its source), and to table sets
measured on an H200. Errors are those on cards and sources that were left out of the
fit. TorchRec's estimate is shown, too.

    python benchmarks/bench_published.py --out benchmarks/results/published_202611

writes `<out>.json` (raw) and `<out>.md`. It needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.options import add_option
from harness.pages import table, write_page
from harness.provenance import describe_run
from published import kernels
from published.fitting import fit, left_out, predict, predict_sets, shared_of
from published.kernels import (
    MEASURED,
    KernelRow,
    MeasuredSets,
    family,
    read_kernels,
    read_measured,
)
from published.links import (
    fit_links,
    predict_links,
    read_links,
    table_left_out,
)
from published.nccl import SHARED, read_nccl, shipped_starts
from published.nccl_page import evaluate, nccl_sections
from published.page import (
    card_table,
    kernel_table,
    link_table,
    set_table,
)
from published.rivals import stock_estimate
from torchrec_neuroshard.models.card_physics import PhysicalConstants
from torchrec_neuroshard.models.published_links import CollectiveConstants

Floats = npt.NDArray[np.float64]
SETS_APART = 12
"""The fit uses every so many-th measured set."""


def kernel_models(
    rows: list[KernelRow], some: MeasuredSets, sets: MeasuredSets
) -> tuple[dict[str, dict[KernelRow, float]], dict[str, Floats], dict[str, float]]:
    """Return the predictions of all models [ms], and the fitted constants.

    Args:
        rows: Published timings.
        some: Measured sets to fit to.
        sets: Measured sets to predict.

    Returns:
        Predicted timings by model, predicted sets by model, and the fitted constants.
    """
    fitted = fit(rows, some)
    shipped = {**fitted, **shared_of(PhysicalConstants())}

    def without(key: Callable[[KernelRow], str]) -> dict[KernelRow, float]:
        found = left_out(rows, some, key)
        by_key = {value: predict(rows, shared) for value, shared in found.items()}
        if sets.card in found:
            set_models["H200 left out"] = predict_sets(sets, found[sets.card])
        return {r: float(by_key[key(r)][i]) for i, r in enumerate(rows)}

    set_models = {"ours": predict_sets(sets, shipped)}
    models = {
        "TorchRec": {r: stock_estimate(r) for r in rows},
        "ours": dict(zip(rows, predict(rows, shipped).tolist(), strict=True)),
        "- source left out": without(lambda r: r.source),
        "- card left out": without(lambda r: family(r.card)),
    }
    return models, set_models, fitted


def spread_of_tables(predicted: dict[KernelRow, float]) -> float:
    """Return the standard deviation of log ratios within a card and phase."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row, ms in predicted.items():
        if row.location == "device":
            logs = groups.setdefault((family(row.card), row.phase), [])
            logs.append(float(np.log(ms / row.time_ms)))
    within = np.concatenate([np.array(v) - np.mean(v) for v in groups.values()])
    return float(np.sqrt(np.mean(within**2)))


def spreads(cards: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the spread of median ratios over left-out cards, for `EstimateError`."""
    found = {}
    for phase in ("forward", "backward"):
        ratios = [v[f"{phase}_ratio"] for v in cards.values() if v[f"{phase}_ratio"]]
        found[phase] = float(np.sqrt(np.mean(np.log(ratios) ** 2)))
    return found


def unused(path: Path) -> list[tuple[str, int]]:
    """Return reasons why timings in the file are not used, with their counts."""
    with path.open(newline="") as file:
        reasons = Counter(r["use"] for r in csv.DictReader(file, delimiter="\t"))
    return [(why, n) for why, n in reasons.most_common() if why != "used"]


def main() -> None:
    """Fit with all and with left-out timings, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_option(parser, "out", ..., "path of the results, without suffix", Path)
    args = parser.parse_args()

    logging.disable(logging.WARNING)  # TorchRec warns about its topologies
    rows, sizes = read_kernels(), read_links()
    sets = read_measured()
    models, set_models, fitted = kernel_models(rows, read_measured(SETS_APART), sets)
    ratios = set_models["H200 left out"] / sets.times_ms
    cards_md, cards = card_table(rows, models["- card left out"], {sets.card: ratios})
    shipped = shared_of(PhysicalConstants())
    linked = fit_links(sizes)
    link_models = {
        "ours": dict(zip(sizes, predict_links(sizes).tolist(), strict=True)),
        "table left out": table_left_out(sizes),
    }
    nccl = evaluate(read_nccl())
    both = CollectiveConstants(intra_gb_per_s=1.0, inter_gb_per_s=1.0)
    shipped_links = {n: getattr(both, n) for n in linked if n != "library_us"}

    shipped_nccl = {n: getattr(both, n) for n in SHARED} | shipped_starts()

    constants_md = table(
        ["constant", "fitted", "shipped"],
        [
            [n, f"{v:.3g}", f"{shipped[n]:g}" if n in shipped else "-"]
            for n, v in fitted.items()
        ]
        + [
            [n, f"{v:.3g}", f"{shipped_links[n]:g}" if n in shipped_links else "23.6"]
            for n, v in linked.items()
        ]
        + [
            [f"NCCL: {n}", f"{v:.3g}", f"{shipped_nccl[n]:g}"]
            for n, v in nccl["fitted"].items()
        ],
    )
    left = models["- card left out"]
    spread = {**spreads(cards), "tables": spread_of_tables(left)}
    raw = {
        **describe_run(),
        "cards_left_out": cards,
        "measured_sets": {
            name: {
                "mean_error": np.abs(ms / sets.times_ms - 1).mean(axis=0).tolist(),
                "median_ratio": np.median(ms / sets.times_ms, axis=0).tolist(),
            }
            for name, ms in set_models.items()
        },
        "spreads": spread,
        "nccl": nccl,
        "constants": {"fitted": {**fitted, **linked}, "shipped": shipped},
    }
    sections = [
        "# Cost models compared with published timings\n",
        f"`{raw['command']}`, commit {raw['commit']}, {raw['date']}, torchrec "
        f"{raw['versions']['torchrec']}. No GPU was used. The published timings and "
        "their sources are in `benchmarks/published/`. All errors are medians of "
        "|predicted / measured - 1|.\n",
        "## Fused kernels\n",
        kernel_table(rows, models),
        "\nThe fits minimise log ratios; large ratios weigh less. Each group of one "
        "source, card and quantity has the same weight. All published timings of H100 "
        "and H200 are of kernels without pooling. *TorchRec* is its "
        "`EmbeddingPerfEstimator` with the cards' memory bandwidths, and with each "
        "cache's misses as `CacheParams.stats`. A dash means that no timing of these "
        "kernels is left without the source or card. Only one source states the size "
        "of its caches, so predicted misses were not checked.\n",
        cards_md,
        "\nMedians of timings in the card's memory. For the H200, nearly all timings "
        "are the measured sets. `EstimateError` uses the spread of these ratios: "
        f"forward {spread['forward']:.2f}, backward {spread['backward']:.2f} (standard "
        "deviations of logarithms). Within one card and phase, ratios of published "
        f"timings have a standard deviation of {spread['tables']:.2f}.\n",
        "## Sets measured on an H200\n",
        set_table(sets, set_models),
        f"\n{len(sets.first):,} sets of 1 to 100 tables from `benchmarks/data/"
        f"{MEASURED.name}`: mean error / median of predicted over measured. The fit of "
        f"*ours* uses every {SETS_APART}th set. The fit of *H200 left out* uses none "
        "of them and no published timing of an H200, but the form of the model was "
        "chosen with these sets.\n",
        "Unused published timings: "
        + "; ".join(
            f"{n} ({why.removeprefix('not used: ')})" for why, n in unused(kernels.DATA)
        )
        + ".\n",
        "## Collectives\n",
        link_table(sizes, link_models),
        "\nMedian error / median of predicted over measured. Bandwidths of links are "
        "the cards' published ones. For B200 and MI355X they come from the largest "
        "sizes of these tables, so only latency and ramp-up are tested. *Ours* of 8 "
        "B200 is fitted to NVIDIA's tables below; *table left out* is the model of "
        "several nodes and of RCCL. Tables of MI355X in one node "
        "differ from each other by a quarter at equal sizes.\n",
        *nccl_sections(nccl),
    ]
    sections += ["## Constants\n", constants_md]
    write_page(args.out, raw, "\n".join(sections) + "\n")
    print(args.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
