"""Calibration from another device's bundle: candidates, choice, the command."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.builders import (
    ONE_PASS,
    costed,
    draw_records,
    make_fingerprint,
    make_header,
    write_records,
)
from torchrec_neuroshard.bundles import cache
from torchrec_neuroshard.bundles.cache import CacheKey
from torchrec_neuroshard.bundles.descriptions import COMPUTE_DESCRIPTION, BundleInfo
from torchrec_neuroshard.bundles.fit import as_cost_model, fit_model, train
from torchrec_neuroshard.bundles.fit_physics import best_factor
from torchrec_neuroshard.bundles.folders import PRETRAINED
from torchrec_neuroshard.bundles.format import COMPUTE_BUNDLE, Bundle
from torchrec_neuroshard.bundles.make import make_bundle
from torchrec_neuroshard.bundles.set_data import (
    MIN_SETS,
    SetData,
    build_sets,
    split_records,
)
from torchrec_neuroshard.bundles.settings import TrainConfig
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.commands.bundles_run import RECORDS_NAME
from torchrec_neuroshard.errors import ConfigError, RecordError
from torchrec_neuroshard.hardware.devices import cpu_name
from torchrec_neuroshard.measure.records import CostRecord
from torchrec_neuroshard.measure.store import read_records
from torchrec_neuroshard.models.compute import NeuralCostModel
from torchrec_neuroshard.models.network import SetCostNetwork
from torchrec_neuroshard.tables.features import feature_ranges
from torchrec_neuroshard.tables.table import TableConfig

SIZES = {"num_members": 2, "hidden": 24, "latent": 4, "head_hidden": 12}
QUICK = TrainConfig(tuning_steps=120, batch_sets=32, **SIZES)


def make_records(
    count: int, seed: int, *, power: float = 0.7, factor: float = 1.0, max_dim: int = 32
) -> list[CostRecord]:
    """Make records of a device; a lower `power` makes wide rows cheaper.

    How the rows enter is odd, the same on all devices, and takes many sets to learn.
    """

    def per_lookup(table: TableConfig) -> float:
        rows = np.log10(table.num_embeddings)
        return float(table.embedding_dim**power * (1 + 0.6 * np.sin(6 * rows)))

    sizes = {"max_tables": 5, "max_dim": max_dim}
    return draw_records(count, seed, per_lookup, factor=factor, **sizes)


@pytest.fixture(scope="module")
def source() -> NeuralCostModel:
    """Train a model of the device with power 0.7, on narrow tables."""
    data = build_sets(make_records(400, 0, max_dim=24))
    network = train(data, TrainConfig(epochs=40, batch_sets=64, **SIZES))
    return as_cost_model(network, data, "there")


def split(records: list[CostRecord]) -> tuple[SetData, SetData]:
    training, test = split_records(records)
    return build_sets(training), build_sets(test)


def predict(network: SetCostNetwork, data: SetData) -> np.ndarray:
    model = NeuralCostModel(network, name="", hardware="", ranges={})
    return model.predict_sets(data.features_NF, data.set_ids_N, data.num_sets)


# Factors


def test_best_factor_leaves_no_bias() -> None:
    rng = np.random.default_rng(0)
    predicted = rng.uniform(1, 10, 41)
    measured = predicted * rng.lognormal(-0.5, 0.4, 41)
    logs = np.log(best_factor(predicted, measured) * predicted / measured)
    assert np.median(logs) == pytest.approx(0.0, abs=1e-12)


# Candidates


def test_a_worse_ensemble_is_not_kept(source: NeuralCostModel) -> None:
    # The same device: nothing to learn, and a destructive learning rate.
    training, test = split(make_records(60, 1))
    config = TrainConfig(tuning_steps=2, tuning_rate=3.0, **SIZES)
    found = fit_model(training, test, config, start=source)
    assert found.kept in ("before", "refitted")
    assert f"Kept `{found.kept}`" in found.verdict()


# Bundles


def test_bundle_and_card_tell_what_was_done(
    tmp_path: Path, source: NeuralCostModel
) -> None:
    old, out, path = (tmp_path / n for n in ("old", "new", "r.jsonl"))
    info = BundleInfo(
        name="old",
        fingerprint=make_fingerprint("there"),
        reference_ms=8.0,
        network=SIZES,
        ranges=source.ranges,
        trained_on={"num_training_sets": 400},
    )
    COMPUTE_BUNDLE.save(old, source.network, info, "# card\n")
    before = (old / "bundle.json").read_bytes()
    with pytest.raises(ConfigError, match="is the bundle to start from"):
        make_bundle([], tmp_path / "x" / ".." / "old", "old", QUICK, start=Bundle(old))
    assert (old / "bundle.json").read_bytes() == before
    records = make_records(120, 1, power=0.9, factor=0.6)
    write_records(path, make_header("here", reference_ms=6.0), records)
    found = make_bundle([path], out, "mine", QUICK, start=Bundle(old))
    info, model = COMPUTE_DESCRIPTION.read_info(out), Bundle(out).cost_model()
    assert (info.fingerprint.device, info.reference_ms) == ("here", 6.0)
    assert info.trained_on["started_from"] == "old"
    # Fine-tuning learns what constants cannot express.
    scores = {n: c.evaluation.log_error for n, c in found.candidates.items()}
    assert scores["tuned"] < scores["refitted"] < 0.6 * scores["before"]
    assert info.trained_on["kept"] == found.kept == "tuned"
    training, test = split(read_records([path])[1])  # as stored
    ranges = {n: c.ranges for n, c in found.candidates.items()}
    first, new = source.ranges, feature_ranges(training.features_NF)
    assert ranges["before"] == first and ranges["physics"] == new
    assert first["log2_width"][1] < ranges["tuned"]["log2_width"][1] == 7
    assert ranges["tuned"]["log2_width"][0] == 2
    for name, (low, high) in ranges["tuned"].items():
        assert low == min(first[name][0], new[name][0])
        assert high == max(first[name][1], new[name][1])
    assert info.ranges == ranges["tuned"]
    tuned = predict(found.candidates["tuned"].network, test)
    # Weights are stored in half precision.
    np.testing.assert_allclose(predict(model.network, test), tuned, rtol=1e-3)
    card = (out / "CARD.md").read_text()
    for name, candidate in found.candidates.items():
        e = candidate.evaluation
        assert (
            f"{name}" in card
            and f"| {e.forward.mean:.1%} | {e.backward.mean:.1%} |" in card
        )
    assert "Started from `old`, measured on there (400 training sets)" in card


def test_split_keeps_held_out_tables_and_repeats_apart() -> None:
    records = make_records(48, 0)
    again = [dataclasses.replace(records[i], index=44 + i, repeat_of=i) for i in (4, 5)]
    training, test = split_records([*records, *again])
    assert {r.index for r in test} == {i for i in range(48) if i % 4 == 0}
    assert {r.index for r in training} == {i for i in range(50) if i % 4} - {48}
    for few in (records[:40:2], [r for r in records if not r.held_out]):
        with pytest.raises(RecordError, match=f"needs {MIN_SETS} sets to train on"):
            split_records(few[:12])


def test_measures_and_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny sets, so that the whole command takes seconds."""
    # The machine may be busy with other work: all records count.
    monkeypatch.setattr("torchrec_neuroshard.measure.records.USUAL_SHARE", 1.0)
    monkeypatch.setattr("torchrec_neuroshard.measure.clock.CPU_PASSES", ONE_PASS)
    out = tmp_path / "mine"
    arguments = ["calibrate", "--out", str(out), "--max-gib", "0.001", "--steps", "4"]
    for option, value, message in (
        ("--num-sets", "49", "--num-sets 49 is too few"),
        ("--from", "tpu", "no bundle 'tpu' to start from"),
    ):
        assert main([*arguments, option, value]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()
    # Time for too few test sets.
    limited = [*arguments, "--num-sets", "60", "--time-limit", "0.001"]
    assert main(limited) == 2
    assert "measure more sets" in capsys.readouterr().err
    assert main([*arguments, "--num-sets", "60"]) == 0
    said = capsys.readouterr().out
    (header,), every = read_records([out / RECORDS_NAME])
    records = [r for r in every if r.plan is None]
    assert len(records) == 60
    of_plans = [r for r in every if r.plan is not None]
    assert {r.plan for r in of_plans} == {0, 1, 2} and len(of_plans) >= 6
    assert all(r.held_out for r in of_plans)
    assert MIN_SETS <= sum(r.held_out for r in records) <= 60 - MIN_SETS
    assert header.sampling["max_weight_bytes"] == int(0.001 * 2**30)
    info = COMPUTE_DESCRIPTION.read_info(out)
    assert Bundle(out).cost_model().name == "mine"
    assert info.fingerprint.device == cpu_name()
    assert info.trained_on["started_from"] in ("cpu", "cpu_epyc", "cpu_epyc_zen5")
    assert f"Kept `{info.trained_on['kept']}`" in said
    started = info.trained_on["started_from"]
    assert f"'{started}' unchanged: " in said and "calibrated: " in said
    card = (out / "CARD.md").read_text()
    assert f"{len(of_plans)} ranks of 3 plans of held-out tables" in card


def test_calibrate_says_what_is_known_about_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **settings: object) -> None:
        raise RecordError("nothing is measured here")

    def told(out: Path, *options: str) -> str:
        assert main(["calibrate", "--device", "cpu", "--out", str(out), *options]) == 2
        said = capsys.readouterr()
        assert "nothing is measured here" in said.err
        return said.out

    monkeypatch.setattr(
        "torchrec_neuroshard.commands.measure_run.measure_kernels", stop
    )
    monkeypatch.setenv("NEUROSHARD_CACHE", str(tmp_path / "cache"))
    shipped, out = PRETRAINED / "cpu_epyc", tmp_path / "mine"
    info = COMPUTE_DESCRIPTION.read_info(shipped)

    def use_cpu(name: str) -> None:
        monkeypatch.setattr(
            "torchrec_neuroshard.hardware.devices.cpu_name", lambda: name
        )

    use_cpu("A CPU (1/2)")
    said = told(out)
    assert "no shipped bundle was measured on A CPU (1/2)" in said
    assert "takes up to about 8 minutes" in said
    assert "in the cache" not in said and "earlier run" not in said
    assert "about 2 minutes" in told(out, "--seconds", "100")
    use_cpu(info.fingerprint.device)
    key = CacheKey(
        device=info.fingerprint.device,
        device_type="cpu",
        world_size=2,
        local_world_size=2,
        optimizers=("sgd",),
        data_types=("fp32",),
    )
    cache.store(shipped, key, created="2026-11-30T00:00:00+00:00", seconds=40.0)
    said = told(out)
    assert f"'cpu_epyc' was measured on this kind of device, {key.device}:" in said
    assert f"first launches on {key.device} in the cache: 1. Later" in said
    out.mkdir()
    (out / RECORDS_NAME).touch()
    assert f"{out / RECORDS_NAME} holds sets of an earlier run" in told(out)


def test_calibrate_keeps_a_bundle_of_other_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(PRETRAINED / "cpu_epyc", tmp_path / "mine")
    before = (out / "bundle.json").read_bytes()
    assert main(["calibrate", "--device", "cpu", "--out", str(out)]) == 2
    assert f"{out} holds a bundle of other measurements" in capsys.readouterr().err
    assert (out / "bundle.json").read_bytes() == before


def test_calibration_starts_from_the_nearest_bundle(tmp_path: Path) -> None:
    """Times of a shipped bundle, on a device that takes three times as long."""
    cost, path = Bundle(PRETRAINED / "cpu_epyc").cost_model(), tmp_path / "r.jsonl"
    records = costed(make_records(60, 3), cost)
    slow = [
        dataclasses.replace(r, fwd_ms=3 * r.fwd_ms, bwd_ms=3 * r.bwd_ms)
        for r in records
    ]
    write_records(path, make_header("here"), slow)
    make_bundle([path], tmp_path / "out", "mine", QUICK, start="nearest")
    trained_on = COMPUTE_DESCRIPTION.read_info(tmp_path / "out").trained_on
    assert trained_on["started_from"] == "cpu_epyc"
