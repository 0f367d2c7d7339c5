"""What measured sets buy: this cost model and NeuroShard's nets on equal budgets.

Of one device's measured sets of an optimizer (fp32 weights, no weighted lookups: what
NeuroShard's inputs can tell apart) some are drawn, and both are trained on the same
ones alone: an ensemble of ours as `neuroshard train` does, NeuroShard's compute net by
the paper's recipe, and the linear model that is every card's yardstick. All are judged
on the same sets of tables that none was trained on.

    python benchmarks/bench_learning_curve.py benchmarks/data/compute_xeon.parquet \
        --out benchmarks/results/learning_curve_xeon

writes `<out>.json` (raw, after every training) and `<out>.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from harness.provenance import describe_run
from torchrec_neuroshard.baselines.neuroshard_training import (
    PaperTrainConfig,
    comparable_records,
    fit_compute,
    predict_records,
)
from torchrec_neuroshard.record_store import read_records
from torchrec_neuroshard.records import CostRecord, repeatability, steady_records
from torchrec_neuroshard.training.calibration import split_records
from torchrec_neuroshard.training.compute import (
    TrainConfig,
    as_cost_model,
    build_sets,
    fit_linear,
    train,
)

OURS, NETS, LINEAR = "ours", "NeuroShard's net", "linear"


def trained(
    drawn: Sequence[CostRecord], test: Sequence[CostRecord], optimizer: str, seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Train each model on the drawn sets; yield what it says of the others [ms]."""
    data, judged = build_sets(drawn), build_sets(test)
    network = train(data, TrainConfig(seed=seed))
    for name, model in (
        (OURS, as_cost_model(network, data, OURS)),
        (LINEAR, fit_linear(data)),
    ):
        predicted = model.predict_sets(
            judged.features_NF, judged.set_ids_N, judged.num_sets
        )
        yield name, predicted.sum(axis=1)
    recipe = PaperTrainConfig(optimizer=optimizer, seed=seed)
    net, _ = fit_compute(drawn, recipe)
    yield NETS, predict_records(net, test)


def errors(predicted: np.ndarray, test: Sequence[CostRecord]) -> dict[str, float]:
    measured = np.array([r.total_ms for r in test])
    error = np.abs(predicted / measured - 1)
    return {
        "mean": float(error.mean()),
        "median": float(np.median(error)),
        "rms_ms": float(np.sqrt(np.square(predicted - measured).mean())),
        "tau": float(stats.kendalltau(predicted, measured).statistic),
    }


def report(data: dict[str, Any]) -> str:
    run, records = data["run"], data["records"]
    lines = [
        "# What measured sets buy",
        "",
        f"Sets measured on {records['device']}, fp32, no weighted lookups, of one "
        "optimizer at a time; every model of a row is trained on the same ones alone "
        "and judged on the same sets of tables that it never saw. Absolute error of "
        "forward + backward, relative to the measured: mean, median; Kendall's tau; "
        "root mean square in ms, which is what NeuroShard's recipe minimises; "
        f"medians over {data['seeds']} seeds (which draw other sets and first weights)."
        " The same set measured again later differs by "
        f"{records['repeat_median']:.1%} (median).",
        "",
        "| optimizer | sets | judged on | model | mean | median | tau | ms |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for optimizer in records["test"]:
        mine = [c for c in data["cells"] if c["optimizer"] == optimizer]
        for size in sorted({c["size"] for c in mine}):
            cells = [c["errors"] for c in mine if c["size"] == size]
            for name in (OURS, NETS, LINEAR):
                mean, median, tau, rms_ms = (
                    statistics.median(c[name][key] for c in cells)
                    for key in ("mean", "median", "tau", "rms_ms")
                )
                lines.append(
                    f"| {optimizer} | {size:,} | {records['test'][optimizer]} | {name} "
                    f"| {mean:.1%} | {median:.1%} | {tau:.3f} | {rms_ms:.2f} |"
                )
    lines += ["", f"`{run['command']}`, commit {run['commit']}, {run['date']}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", default=["rowwise_adagrad", "sgd"])
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    torch.set_num_threads(1)
    headers, measured = read_records(args.records)
    found = steady_records(measured)
    training, test = split_records(found)
    sets = {o: comparable_records(training, o) for o in args.optimizers}
    judges = {o: comparable_records(test, o) for o in args.optimizers}
    data: dict[str, Any] = {
        "run": describe_run(),
        "seeds": args.seeds,
        "records": {
            "device": headers[0].fingerprint.device,
            "training": {o: len(r) for o, r in sets.items()},
            "test": {o: len(r) for o, r in judges.items()},
            "repeat_median": statistics.median(repeatability(found)),
        },
        "cells": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for optimizer, records in sets.items():
        for size in sorted({min(s, len(records)) for s in [*args.sizes, len(records)]}):
            for seed in range(args.seeds):
                order = np.random.default_rng([seed, size]).permutation(len(records))
                drawn = [records[i] for i in order[:size]]
                found_errors = {
                    name: errors(predicted, judges[optimizer])
                    for name, predicted in trained(
                        drawn, judges[optimizer], optimizer, seed
                    )
                }
                cell = {"optimizer": optimizer, "size": size, "seed": seed}
                data["cells"].append({**cell, "errors": found_errors})
                args.out.with_suffix(".json").write_text(json.dumps(data, indent=1))
                args.out.with_suffix(".md").write_text(report(data))
                shown = {n: round(e["mean"], 3) for n, e in found_errors.items()}
                print(f"{cell}: {shown}", flush=True)


if __name__ == "__main__":
    main()
