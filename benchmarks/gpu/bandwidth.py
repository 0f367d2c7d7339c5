"""How near fused kernels come to a device's memory bandwidth, and what decides it.

    python benchmarks/gpu/bandwidth.py compute.parquet --smoke smoke.json \\
        --out benchmarks/results/bandwidth_h200

Two counts of what a pass moves, over its time, beside the measured bandwidth of a copy:
`all`, every looked-up row read from memory, and `least`, every distinct row once, as if
caches held the rest. Forward reads rows and ids and writes outputs; backward reads
gradients for every lookup (or every bag, at least) and reads and writes rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from torchrec_neuroshard.features import FEATURE_NAMES
from torchrec_neuroshard.record_store import read_records
from torchrec_neuroshard.records import CostRecord, steady_records
from torchrec_neuroshard.training.compute import SetData, build_sets

Floats = npt.NDArray[np.float64]

_ID_BYTES = 8
SHARES = ("fwd_all", "fwd_least", "bwd_all", "bwd_least")


def totals(sets: SetData, name: str) -> Floats:
    """A physical quantity, added up over the shards of each set."""
    column = sets.features_NF[:, FEATURE_NAMES.index(name)].astype(np.float64)
    return np.bincount(sets.set_ids_N, weights=column, minlength=sets.num_sets)


def shares(sets: SetData, copy_gb_per_s: float) -> dict[str, Floats]:
    """Bytes over time, as shares of a copy's bandwidth."""
    lookup, distinct, output = (
        totals(sets, f"{n}_bytes") for n in ("lookup", "distinct", "output")
    )
    ids = _ID_BYTES * totals(sets, "num_lookups")
    moved = {
        "fwd_all": lookup + ids + output,
        "fwd_least": distinct + ids + output,
        "bwd_all": lookup + ids + 2 * distinct,
        "bwd_least": output + ids + 2 * distinct,
    }
    fwd_ms, bwd_ms = sets.costs_S2.T
    return {
        name: bytes_S
        / (fwd_ms if name.startswith("fwd") else bwd_ms)
        / 1e6
        / copy_gb_per_s
        for name, bytes_S in moved.items()
    }


def traits(records: Sequence[CostRecord], sets: SetData) -> dict[str, Floats]:
    """What of the tables may decide it."""
    lookups = np.maximum(totals(sets, "num_lookups"), 1.0)
    distinct = np.maximum(totals(sets, "num_distinct"), 1.0)
    bags = np.maximum(totals(sets, "num_bags"), 1.0)
    return {
        "bytes looked up": totals(sets, "lookup_bytes"),
        "bytes per looked-up row": totals(sets, "lookup_bytes") / lookups,
        "lookups per distinct row": lookups / distinct,
        "ids per bag": lookups / bags,
        "shards": totals(sets, "num_tables"),
        "samples": np.array([float(r.batch_size) for r in records]),
        "weight bytes": totals(sets, "weight_bytes"),
    }


def by_fifths(trait: Floats, values: dict[str, Floats]) -> list[dict[str, float]]:
    """Medians in fifths of a trait."""
    parts = np.array_split(np.argsort(trait, kind="stable"), 5)
    return [
        {
            "from": float(trait[part].min()),
            "to": float(trait[part].max()),
            **{name: float(np.median(v[part])) for name, v in values.items()},
        }
        for part in parts
        if len(part)
    ]


def report(data: dict[str, Any]) -> str:
    """The tables in Markdown."""
    lines = [
        f"# Memory bandwidth of fused kernels: {data['device']}",
        "",
        f"{data['num_sets']:,} sets; a copy moves {data['copy_gb_per_s']:,.0f} GB/s, "
        "read and written. Shares of that, by two counts of what a pass moves: `all`, "
        "every looked-up row; `least`, every distinct row once.",
        "",
        "| | 10th percentile | median | 90th percentile |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {name} | " + " | ".join(f"{v:.1%}" for v in data["shares"][name]) + " |"
            for name in SHARES
        ),
        "",
        "## What decides it",
        "",
        "Spearman's rank correlation of each share with a trait of the set.",
        "",
        "| trait | " + " | ".join(SHARES) + " |",
        "| --- |" + " ---: |" * len(SHARES),
    ]
    for trait, found in data["correlation"].items():
        cells = " | ".join(f"{found[name]:+.2f}" for name in SHARES)
        lines.append(f"| {trait} | {cells} |")
    for trait, fifths in data["fifths"].items():
        lines += [
            "",
            f"By fifths of {trait}, medians:",
            "",
            "| from | to | " + " | ".join(SHARES) + " |",
            "| ---: | ---: |" + " ---: |" * len(SHARES),
        ]
        for row in fifths:
            cells = " | ".join(f"{row[name]:.1%}" for name in SHARES)
            lines.append(f"| {row['from']:.4g} | {row['to']:.4g} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Analyse and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--smoke", type=Path, required=True, help="of smoke.py")
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    headers, measured = read_records(args.records)
    smoke = json.loads(args.smoke.read_text(encoding="utf-8"))
    device = headers[0].fingerprint.device
    if smoke["hardware"]["device"] != device:
        parser.error(
            f"{args.smoke} is of {smoke['hardware']['device']}, the records of {device}"
        )
    records = [r for r in steady_records(measured) if r.repeat_of is None]
    sets = build_sets(records)
    found = shares(sets, smoke["copy_gb_per_s"])
    kinds = traits(records, sets)
    correlation = {
        trait: {
            name: float(stats.spearmanr(values, found[name]).statistic)
            for name in SHARES
        }
        for trait, values in kinds.items()
    }
    data = {
        "device": device,
        "num_sets": sets.num_sets,
        "copy_gb_per_s": smoke["copy_gb_per_s"],
        "shares": {
            name: [float(q) for q in np.quantile(v, (0.1, 0.5, 0.9))]
            for name, v in found.items()
        },
        "correlation": correlation,
        "fifths": {trait: by_fifths(v, found) for trait, v in kinds.items()},
    }
    args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(report(data))
    print(report(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
