"""Compare the errors of kernel cost models, by the number of measured sets.

    pip install scikit-learn==1.9.1
    python benchmarks/bench_cost_models.py --out benchmarks/results/cost_models_202611

writes `<out>.json`. Every model is fitted to part of a device's records. Its error is
the mean error of forward + backward on sets of held-out tables. `--devices` and
`--sizes` run a part of the benchmark.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from harness.provenance import describe_run
from torchrec_neuroshard.bundles.fit import (
    TrainConfig,
    as_cost_model,
    evaluate,
    fit_model,
    physics_network,
    train,
)
from torchrec_neuroshard.bundles.fit_physics import fit_physics
from torchrec_neuroshard.bundles.set_data import SetData, build_sets, split_records
from torchrec_neuroshard.measure.records import steady_records
from torchrec_neuroshard.measure.store import read_records
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.models.network import SetCostNetwork
from torchrec_neuroshard.tables.features import NUM_TOTALS

Floats = npt.NDArray[np.float64]
DATA = Path(__file__).parent / "data"
DEVICES = ("epyc_zen4", "epyc_zen5", "xeon", "h200")
SIZES, FEW = (100, 300, 1_000), (20, 50, 100)
"""Numbers of sets to fit to: without a start model, and with another processor's."""
START = {"epyc_zen4": "epyc_zen5", "epyc_zen5": "epyc_zen4", "xeon": "epyc_zen4"}


def read_device(name: str) -> tuple[SetData, SetData]:
    """Return a device's training sets, shuffled, and its sets of held-out tables."""
    headers, records = read_records([DATA / f"compute_{name}.jsonl.xz"])
    kind = headers[0].fingerprint.device_type
    data, test = (
        build_sets(part, kind) for part in split_records(steady_records(records))
    )
    order = np.random.default_rng(0).permutation(data.num_sets)
    return data.select(order), test


def first(data: SetData, count: int) -> SetData:
    """Return the first `count` sets."""
    return data.select(np.arange(min(count, data.num_sets)))


def error_of(network: SetCostNetwork, test: SetData) -> float:
    """Return the mean error of forward + backward."""
    return evaluate("", as_cost_model(network, test, ""), test).total.mean


def set_inputs(data: SetData, physics_SX: Floats) -> Floats:
    """Return inputs of residual models: totals, means over shards, the physics."""
    sums = data.sum_shards(data.features_NF.astype(np.float64))
    sums[:, NUM_TOTALS:] /= sums[:, :1]
    sums[:, :NUM_TOTALS] = np.log1p(sums[:, :NUM_TOTALS])
    return np.concatenate([sums, np.log(physics_SX)], axis=1)


def residual_error(
    network: SetCostNetwork, make: Callable[[], Any], data: SetData, test: SetData
) -> float:
    """Return the error of the physics times a model of its log ratio to the data."""
    physics = as_cost_model(network, data, "")
    alone = [
        physics.predict_sets(d.features_NF, d.set_ids_N, d.num_sets)
        for d in (data, test)
    ]
    inputs = [set_inputs(d, p) for d, p in zip((data, test), alone, strict=True)]
    total = np.zeros(test.num_sets)
    for c in range(2):
        model = make().fit(inputs[0], np.log(data.costs_S2 / alone[0])[:, c])
        total += alone[1][:, c] * np.exp(model.predict(inputs[1]))
    return float(np.abs(total / test.costs_S2.sum(axis=1) - 1).mean())


def without_head(data: SetData, config: TrainConfig) -> SetCostNetwork:
    """Return a net whose head is zero, so the costs of shards add up."""
    network = train(data, dataclasses.replace(config, epochs=1))
    with torch.no_grad():
        for layer in network.head:
            layer.zero_().requires_grad_(False)
    return train(data, config, init=network)


def without_set_work(data: SetData, config: TrainConfig) -> SetCostNetwork:
    """Return a net whose head does not see the set's work."""
    network = train(data, dataclasses.replace(config, epochs=1))
    network.set_std_Y.fill_(1e9)
    return train(data, config, init=network)


RESIDUALS: Mapping[str, Callable[[], Any]] = {
    "+ ridge": lambda: make_pipeline(
        StandardScaler(), RidgeCV(10.0 ** np.arange(-1.0, 4.5, 0.5))
    ),
    "+ trees": lambda: HistGradientBoostingRegressor(random_state=0),
}


def alone_errors(data: SetData, test: SetData) -> dict[str, float]:
    """Return the errors of all models that are fitted to this device alone."""
    config = TrainConfig()
    of_shards = fit_physics(dataclasses.replace(data, device_type="cpu"))
    network = physics_network(fit_physics(data))
    return {
        "physics of shards": error_of(physics_network(of_shards), test),
        "physics": error_of(network, test),
        **{n: residual_error(network, m, data, test) for n, m in RESIDUALS.items()},
        "+ net": error_of(train(data, config), test),
        "+ net, no head": error_of(without_head(data, config), test),
        "+ net, no set work": error_of(without_set_work(data, config), test),
    }


def start_errors(
    start: NeuralCostModel, data: SetData, test: SetData
) -> dict[str, float]:
    """Return the errors of all candidates that start from another device's model."""
    fitted = fit_model(data, test, TrainConfig(), start=start)
    errors = {n: c.evaluation.total.mean for n, c in fitted.candidates.items()}
    return {**errors, "kept": fitted.best.evaluation.total.mean}


def main() -> None:
    """Fit all models, compute their errors and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="path of the result, without suffix"
    )
    parser.add_argument(
        "--devices",
        nargs="+",
        default=DEVICES,
        choices=DEVICES,
        help="devices to run (default: all)",
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=SIZES,
        help="numbers of sets to fit to",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {**describe_run(), "alone": {}, "started": {}}

    def keep(kind: str, device: str, count: int, errors: dict[str, float]) -> None:
        result[kind].setdefault(device, {})[count] = errors
        shown = ", ".join(f"{n} {e:.1%}" for n, e in errors.items())
        print(f"{kind}, {device}, {count}: {shown}", flush=True)
        path = args.out.with_suffix(".json")
        path.write_text(json.dumps(result, indent=1) + "\n")

    for device in args.devices:
        data, test = read_device(device)
        for count in args.sizes:
            keep("alone", device, count, alone_errors(first(data, count), test))
        if device in START:
            there, _ = read_device(START[device])
            there = first(there, max(SIZES))
            model = as_cost_model(train(there, TrainConfig()), there, START[device])
            for count in FEW:
                errors = start_errors(model, first(data, count), test)
                keep("started", device, count, errors)


if __name__ == "__main__":
    main()
