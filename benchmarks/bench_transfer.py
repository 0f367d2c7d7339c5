"""Compare fine-tuning a bundle on a new device with training from scratch there.

Of one device's measured sets some are drawn (a few hundred, as `neuroshard calibrate`
would measure), the source bundle is calibrated on them, and every candidate is judged
on the same sets, made only of tables that neither training ever saw:

- `before`: the source bundle as it is;
- `scaled`: times one factor per direction, fitted on the drawn sets;
- `tuned`: fine-tuned on them;
- `scratch`: an ensemble of the same size trained on them alone;
- `linear`, `stock`: the yardsticks of every card, fitted on them.

    python benchmarks/bench_transfer.py benchmarks/data/compute_epyc_zen4.parquet \
        --source cpu --sizes 100 300 1000 --seeds 3 \
        --out benchmarks/results/transfer_epyc_202611

writes `<out>.json` (raw, after every cell) and `<out>.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.provenance import commit, now
from torchrec_neuroshard.cost_models.bundle import COMPUTE_BUNDLE, load_bundle
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.record_store import read_records
from torchrec_neuroshard.records import repeatability, steady_records
from torchrec_neuroshard.training.calibrate_cli import source_folder
from torchrec_neuroshard.training.calibration import (
    BEFORE,
    LINEAR,
    SCALED,
    SCRATCH,
    TUNED,
    CalibrationConfig,
    calibrate,
    split_records,
)
from torchrec_neuroshard.training.compute import (
    Evaluation,
    SetData,
    TrainConfig,
    as_cost_model,
    build_sets,
    evaluate,
    fit_stock,
    score,
    train,
)

METHODS = (BEFORE, SCALED, TUNED, SCRATCH, LINEAR, "stock")
COLUMNS = {
    "fwd_mape": "forward",
    "bwd_mape": "backward",
    "total_mape": "total",
    "total_median": "total, median",
    "kendall_tau": "tau",
}


def entry(evaluation: Evaluation) -> dict[str, Any]:
    return {**dataclasses.asdict(evaluation), "score": score(evaluation)}


def run_cell(
    source: Path, training: SetData, test: SetData, size: int, seed: int
) -> dict[str, Any]:
    """Draw `size` sets, calibrate on them, judge every candidate."""
    order = np.random.default_rng([seed, size]).permutation(training.num_sets)
    drawn = training.select(order[:size])
    start = time.perf_counter()
    found = calibrate(
        load_bundle(source),
        COMPUTE_BUNDLE.read_info(source).network,
        drawn,
        test,
        CalibrationConfig(seed=seed),
    )
    seconds = time.perf_counter() - start
    evaluations = [
        *(c.evaluation for c in found.candidates.values()),
        evaluate("stock", fit_stock(drawn), test),
    ]
    return {
        "size": size,
        "seed": seed,
        "seconds": seconds,
        "factors": list(found.factors_2),
        "kept": found.kept,
        "errors": {e.name: entry(e) for e in evaluations},
    }


def run_full(training: SetData, test: SetData, seed: int) -> dict[str, Any]:
    """Train as `neuroshard train` does on all sets there are: what more sets give."""
    start = time.perf_counter()
    network = train(training, TrainConfig(seed=seed))
    seconds = time.perf_counter() - start
    judged = evaluate("all", as_cost_model(network, training, "all"), test)
    return {"size": training.num_sets, "seconds": seconds, **entry(judged)}


def _values(cells: Sequence[dict[str, Any]], method: str, column: str) -> list[float]:
    return [cell["errors"][method][column] for cell in cells]


def _shown(column: str, values: Sequence[float]) -> str:
    """Median over the seeds, and the least and the most."""
    number = ".3f" if column == "kendall_tau" else ".1%"
    middle = format(statistics.median(values), number)
    low, high = format(min(values), number), format(max(values), number)
    return middle if low == high else f"{middle} ({low} to {high})"


def _repeatability(records: dict[str, Any]) -> str:
    if records["repeat_median"] is None:
        return "No set was measured again later on the target."
    return (
        "The same set measured again later on the target differs by "
        f"{records['repeat_median']:.1%} (median of {records['num_repeats']})."
    )


def report(data: dict[str, Any]) -> str:
    records = data["records"]
    lines = [
        "# Fine-tuning a cost model for another device against training from scratch",
        "",
        f"Source: bundle `{data['source']['name']}`, measured on "
        f"{data['source']['device']} ({data['source']['num_training_sets']} sets to "
        f"train on). Target: {records['device']}, torch {records['torch']}, fbgemm "
        f"{records['fbgemm']}; {records['num_training']} sets to draw from, "
        f"{records['num_test']} sets of tables that neither device's training saw "
        f"judge every row; {records['num_disturbed']} records that other work "
        "disturbed (their passes or the reference beside them tell) are left out. "
        + _repeatability(records),
        "",
        "Mean absolute percentage error of milliseconds: median over seeds (least to "
        "most). Each seed draws other sets and other first weights. "
        + ("`all` has one seed." if "all" in data else ""),
        "",
        "| sets | model | " + " | ".join(COLUMNS.values()) + " |",
        "| --- | --- |" + " --- |" * len(COLUMNS),
    ]
    for size in sorted({cell["size"] for cell in data["cells"]}):
        cells = [cell for cell in data["cells"] if cell["size"] == size]
        for method in METHODS:
            shown = [_shown(c, _values(cells, method, c)) for c in COLUMNS]
            lines.append(f"| {size} | {method} | " + " | ".join(shown) + " |")
    if "all" in data:
        shown = [_shown(c, [data["all"][c]]) for c in COLUMNS]
        lines.append(f"| {data['all']['size']} | all | " + " | ".join(shown) + " |")
    seconds = statistics.median(cell["seconds"] for cell in data["cells"])
    lines += [
        "",
        "`before`: the source as it is. `scaled`: times one factor per direction. "
        "`tuned`: fine-tuned, what `neuroshard calibrate` keeps unless another row of "
        "the first four errs less. `scratch`: the same network on the same sets alone. "
        "`linear`, `stock`: a non-negative linear model of the physical inputs, and "
        "TorchRec's formula times one factor, both fitted on the same sets. `all`: "
        "`neuroshard train` with all sets of the target.",
        "",
        f"Both trainings of a cell took {seconds:.0f} s (median) on one shared core of "
        f"{data['machine']}: a figure of a busy machine.",
        "",
        f"Command: `{data['command']}`",
        "",
        f"Commit {data['commit']}, {data['created']}, torch {data['torch']}, Python "
        f"{data['python']}. Raw figures: the JSON file of the same name.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--source", default="cpu", help="bundle to start from")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="also train on all sets")
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    torch.set_num_threads(1)
    headers, measured = read_records(args.records)
    found = steady_records(measured)
    training, test = map(build_sets, split_records(found))
    if max(args.sizes) > training.num_sets:
        parser.error(f"--sizes: there are {training.num_sets} sets to draw from")
    source = source_folder(args.source)
    old, repeats = COMPUTE_BUNDLE.read_info(source), repeatability(found)
    data: dict[str, Any] = {
        "command": " ".join(map(shlex.quote, ["python", *sys.argv])),
        "created": now(),
        "commit": commit(),
        "machine": cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "config": dataclasses.asdict(CalibrationConfig()),
        "source": {
            "name": old.name,
            "device": old.fingerprint.device,
            "num_training_sets": old.trained_on["num_training_sets"],
        },
        "records": {
            "device": headers[0].fingerprint.device,
            "torch": headers[0].fingerprint.torch,
            "fbgemm": headers[0].fingerprint.fbgemm,
            "num_training": training.num_sets,
            "num_test": test.num_sets,
            "num_disturbed": len(measured) - len(found),
            "num_repeats": len(repeats),
            "repeat_median": statistics.median(repeats) if repeats else None,
        },
        "cells": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(report(data))

    for size in args.sizes:
        for seed in range(args.seeds):
            cell = run_cell(source, training, test, size, seed)
            data["cells"].append(cell)
            write()
            scores = {n: round(e["score"], 4) for n, e in cell["errors"].items()}
            print(f"{size} sets, seed {seed}: {scores}", flush=True)
    if args.all:
        data["all"] = run_full(training, test, 0)
        write()


if __name__ == "__main__":
    main()
