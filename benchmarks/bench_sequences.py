"""Errors of the cost model of unpooled kernels on CPUs, from committed records.

Fits the constants that the package ships (`models.sequences.CPU_SEQUENCES`), and states
their error on held-out tables, beside that of pooled kernels with bags of one id. A
second table states what a model of one CPU is off on another one, if times are scaled
by a power of the ratio of both reference sets. No other CPU has measured sequences, so
pooled kernels stand for them.

    python benchmarks/bench_sequences.py --out benchmarks/results/sequences_202611
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from published.kernels import device_constants, read_kernels
from torchrec_neuroshard.bundles.find import shipped_bundles
from torchrec_neuroshard.bundles.fit_sequences import fit_sequences, predict
from torchrec_neuroshard.bundles.set_data import SetData, build_sets
from torchrec_neuroshard.files import to_fields, write_whole
from torchrec_neuroshard.measure.records import (
    CostRecord,
    repeatability,
    repeatability_line,
    steady_records,
)
from torchrec_neuroshard.measure.store import read_records
from torchrec_neuroshard.models.compute import PhysicalCostModel
from torchrec_neuroshard.tables.features import ShardFeaturizer

DATA = Path(__file__).parent / "data"
RECORDS = DATA / "compute_epyc_zen3_sequences.jsonl.xz"
POWERS = (0.0, 0.5, 1.0)
"""Powers of the ratio of both reference sets. 0 does not scale."""
MOST_SETS = 300
UNPOOLED = "NVIDIA/recsys-examples"
"""Source of timings of kernels without pooling."""


def held_out(records: list[CostRecord]) -> list[CostRecord]:
    """Return the sets of held-out tables, without repeats."""
    return [r for r in records if r.held_out and r.repeat_of is None]


def errors(predicted_S2: Any, data: SetData) -> dict[str, float]:
    """Return errors of forward, backward and total."""
    total = predicted_S2.sum(axis=1) / data.costs_S2.sum(axis=1)
    each = np.abs(predicted_S2 / data.costs_S2 - 1).mean(axis=0)
    return {
        "forward": float(each[0]),
        "backward": float(each[1]),
        "total": float(np.abs(total - 1).mean()),
        "total_median": float(np.median(np.abs(total - 1))),
        "median_ratio": float(np.median(total)),
    }


def of_sequences() -> dict[str, Any]:
    """Fit to the records and compare with pooled kernels."""
    headers, measured = read_records([RECORDS])
    records = steady_records(measured)
    [header] = headers
    device, unit = header.fingerprint.device, header.reference_ms
    kernels = fit_sequences(records, device, unit)
    assert kernels is not None
    data = build_sets(held_out(records))
    found = {"unpooled": errors(predict(kernels, data), data)}
    for bundle in shipped_bundles("cpu"):
        model = bundle.cost_model()
        pooled = model.predict_sets(data.features_NF, data.set_ids_N, data.num_sets)
        best = np.median(data.costs_S2.sum(axis=1) / pooled.sum(axis=1))
        name = f"{bundle.folder.name}, as bags of one id, times {best:.2f}"
        found[name] = errors(pooled * best, data)
    noise = repeatability_line(repeatability(records), "set")
    sets = len(records), kernels.num_sets, data.num_sets
    return {
        "device": device,
        "sets": sets,
        "noise": noise,
        "errors": found,
        "kernels": to_fields(kernels),
    }


def of_transfer() -> list[dict[str, Any]]:
    """Apply each shipped model to pooled sets of the other CPUs."""
    bundles = {b.folder.name: b for b in shipped_bundles("cpu")}
    files = {
        "cpu": "compute_xeon",
        "cpu_epyc": "compute_epyc_zen4",
        "cpu_epyc_zen5": "compute_epyc_zen5",
    }
    rows = []
    for of, to in itertools.permutations(files, 2):
        [header], measured = read_records([DATA / f"{files[to]}.jsonl.xz"])
        data = build_sets(held_out(steady_records(measured))[:MOST_SETS])
        model = bundles[of].cost_model()
        alone = model.predict_sets(data.features_NF, data.set_ids_N, data.num_sets)
        ratio = header.reference_ms / model.reference_ms
        for power in POWERS:
            found = errors(alone * ratio**power, data)
            rows.append({"of": of, "to": to, "power": power, **found})
    return rows


def of_cards() -> list[dict[str, Any]]:
    """Compare published timings of unpooled kernels on GPUs with cards' estimates."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in read_kernels():
        is_own = row.location == "device" and row.source.startswith(UNPOOLED)
        if not is_own or row.phase not in ("forward", "backward"):
            continue
        constants = device_constants(row.card)
        model = PhysicalCostModel(constants, name=row.card, hardware=row.card)
        featurizer = ShardFeaturizer([], 1)
        featurizer.add([replace(t, pooled=False) for t in row.tables], row.batches)
        widths = [t.embedding_dim for t in row.tables]
        encoded = model.encode_sequences(
            featurizer.features(np.arange(len(row.tables)), widths)
        )
        both = model.predict_sums(encoded.sum(axis=0, keepdims=True))[0]
        direction = int(row.phase == "backward")
        ratio = float(both[direction]) / row.time_ms
        found.setdefault((row.card, row.phase), []).append(ratio)
    return [
        {
            "card": card,
            "phase": phase,
            "timings": len(ratios),
            "median": float(np.median(ratios)),
            "least": min(ratios),
            "most": max(ratios),
        }
        for (card, phase), ratios in sorted(found.items())
    ]


def page(
    sequences: dict[str, Any],
    transfer: list[dict[str, Any]],
    cards: list[dict[str, Any]],
    command: str,
) -> str:
    """Return the results as Markdown."""
    total, fitted, tested = sequences["sets"]
    lines = [
        "# Unpooled kernels on CPUs",
        "",
        f"`{command}`",
        "",
        f"`benchmarks/data/{RECORDS.name}` has {total} sets of tables of an "
        f"`EmbeddingCollection`, on one core of an {sequences['device']}. Mean lengths "
        f"are 1 to 4,096. {fitted} sets are to fit to, {tested} are of held-out "
        f"tables. {sequences['noise']}",
        "",
        "*Mean errors on the sets of held-out tables. Pooled models predict each id as "
        "a bag of one, times the factor that leaves no bias.*",
        "",
        "| model | forward | backward | total | total, median |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, e in sequences["errors"].items():
        shown = (e[k] for k in ("forward", "backward", "total", "total_median"))
        lines.append(f"| {name} | {' | '.join(f'{v:.1%}' for v in shown)} |")
    lines += [
        "",
        "## On other CPUs",
        "",
        "No other CPU has measured sequences. Pooled kernels show what scaling is "
        "worth: a bundle's predictions for another CPU's sets of held-out tables, "
        "times a power of the ratio of both reference sets.",
        "",
        "*Median of predicted over measured totals, and mean error of the total.*",
        "",
        "| of | to | "
        + " | ".join(f"power {p:g}, median | error" for p in POWERS)
        + " |",
        "| --- | --- |" + " ---: |" * (2 * len(POWERS)),
    ]
    for i in range(0, len(transfer), len(POWERS)):
        row = transfer[i : i + len(POWERS)]
        cells = (f"{r['median_ratio']:.2f} | {r['total']:.0%}" for r in row)
        lines.append(f"| {row[0]['of']} | {row[0]['to']} | {' | '.join(cells)} |")
    means = [
        float(np.mean([r["total"] for r in transfer if r["power"] == p]))
        for p in POWERS
    ]
    cells = (f" | {m:.0%}" for m in means)
    lines += [f"| mean | | {' | '.join(cells)} |", ""]
    lines += [
        "## On GPUs",
        "",
        "Estimates of cards take an id as a bag of one. Published timings of unpooled "
        "kernels are NVIDIA's (recsys-examples; `benchmarks/published/kernels.tsv`): "
        "about a million ids, one for each sample, 128 columns, without FBGEMM's check "
        "of ids.",
        "",
        "*Predicted over published.*",
        "",
        "| card | kernel | timings | median | least | most |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for e in cards:
        ratios = " | ".join(f"{e[k]:.2f}" for k in ("median", "least", "most"))
        lines.append(f"| {e['card']} | {e['phase']} | {e['timings']} | {ratios} |")
    lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Write the page and its data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sequences, transfer, cards = of_sequences(), of_transfer(), of_cards()
    command = f"python benchmarks/bench_sequences.py --out {args.out}"
    write_whole(
        args.out.with_suffix(".md"), page(sequences, transfer, cards, command).encode()
    )
    data = (
        json.dumps(
            {"sequences": sequences, "transfer": transfer, "cards": cards}, indent=1
        )
        + "\n"
    )
    write_whole(args.out.with_suffix(".json"), data.encode())


if __name__ == "__main__":
    main()
