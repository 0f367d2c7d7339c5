"""Bundles: what is saved is what is loaded, and nothing else is accepted."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.builders import make_fingerprint, make_tables
from torchrec_neuroshard.cost_models import load_bundle, load_cost_model, loading
from torchrec_neuroshard.cost_models.bundle import COMPUTE_BUNDLE, BundleInfo
from torchrec_neuroshard.cost_models.compute import NeuralCostModel, PhysicalCostModel
from torchrec_neuroshard.cost_models.loading import pretrained_names
from torchrec_neuroshard.cost_models.network import SetCostNetwork
from torchrec_neuroshard.devices import cpu_name
from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
    ConfigError,
)
from torchrec_neuroshard.features import FEATURE_NAMES, FEATURE_VERSION, table_features

SIZES = {"num_members": 2, "hidden": 8, "latent": 2, "head_hidden": 4}


def write_bundle(folder: Path, device: str = "test device") -> SetCostNetwork:
    torch.manual_seed(0)
    network = SetCostNetwork(**SIZES)
    network.physical_PO2.fill_(1e-6)
    network.launch_2.fill_(0.1)
    info = BundleInfo(
        name="test",
        fingerprint=make_fingerprint(device),
        reference_ms=8.0,
        network=SIZES,
        ranges={name: (0.0, 1.0) for name in FEATURE_NAMES},
        trained_on={},
    )
    COMPUTE_BUNDLE.save(folder, network, info, "# card\n")
    return network


def test_saved_and_loaded_predict_the_same(tmp_path: Path) -> None:
    network = write_bundle(tmp_path)
    features = table_features(make_tables([16]), 1024)
    ids = np.zeros(1, dtype=np.int64)
    saved = NeuralCostModel(network, name="test", hardware="", ranges={})
    loaded = load_bundle(tmp_path)
    np.testing.assert_array_equal(
        saved.predict_sets(features, ids, 1), loaded.predict_sets(features, ids, 1)
    )
    assert (loaded.name, loaded.hardware) == ("test", "test device")
    assert loaded.reference_ms == 8.0
    assert (tmp_path / "CARD.md").read_text() == "# card\n"


def edited(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "bundle.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def lacking(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def written(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "bundle.json").write_text(text)


def flip_a_bit(folder: Path) -> None:
    weights = folder / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


VERSION = f"feature columns of version {FEATURE_VERSION}"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (flip_a_bit, BundleCorruptError, "checksum"),
        (lacking("weights.safetensors"), BundleCorruptError, "weights.safetensors"),
        (lacking("bundle.json"), BundleCorruptError, "not a cost-model bundle"),
        (written("{ not json"), BundleCorruptError, "bundle.json is damaged"),
        (written("[1]"), BundleCorruptError, "bundle.json is damaged"),
        (edited(fingerprint={"device": "x"}), BundleCorruptError, "garbles a field"),
        (edited(network={**SIZES, "hidden": 16}), BundleCorruptError, "size mismatch"),
        (edited(feature_names=["a", "b"]), BundleMismatchError, VERSION),
        (edited(bundle_version=99), BundleMismatchError, "bundle version 99"),
    ],
)
def test_unsound_bundles_are_refused(
    tmp_path: Path,
    damage: Callable[[Path], object],
    error: type[Exception],
    message: str,
) -> None:
    write_bundle(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=message):
        load_bundle(tmp_path)


def test_load_by_path_name_and_object(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    model = load_cost_model(tmp_path)
    assert load_cost_model(model) is model
    assert "cpu" in pretrained_names()
    with pytest.raises(ConfigError, match=r"unknown cost model 'tpu'.*cpu"):
        load_cost_model("tpu")


def test_auto_never_takes_a_cpu_bundle_for_a_gpu() -> None:
    with pytest.warns(UserWarning, match="no cost model was measured.*collect"):
        model = load_cost_model("auto", device_type="cuda", hbm_gb_per_s=3350.0)
    assert isinstance(model, PhysicalCostModel)
    assert model.constants.memory_gb_per_s == 3350.0
    assert "not measured" in model.source


def test_auto_takes_the_bundle_of_this_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PRETRAINED", tmp_path)
    write_bundle(tmp_path / "other", device="another CPU")
    with pytest.warns(UserWarning, match="physical estimate"):
        assert isinstance(load_cost_model("auto"), PhysicalCostModel)
    write_bundle(tmp_path / "this", device=cpu_name())
    assert isinstance(load_cost_model("auto"), NeuralCostModel)
