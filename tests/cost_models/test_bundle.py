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


def edited(**changes: object) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **changes}).encode()


INFO, WEIGHTS = "bundle.json", "weights.safetensors"
VERSION = f"feature columns of version {FEATURE_VERSION}"


@pytest.mark.parametrize(
    ("name", "damage", "error", "message"),
    [
        (WEIGHTS, lambda data: data[:-1] + b"?", BundleCorruptError, "checksum"),
        (INFO, lambda data: b"[1]", BundleCorruptError, "bundle.json is damaged"),
        (INFO, edited(fingerprint={"device": "x"}), BundleCorruptError, "garbles a"),
        (INFO, edited(network={**SIZES, "hidden": 16}), BundleCorruptError, "size mis"),
        (INFO, edited(feature_names=["a", "b"]), BundleMismatchError, VERSION),
        (INFO, edited(bundle_version=99), BundleMismatchError, "bundle version 99"),
    ],
)
def test_unsound_bundles_are_refused(
    tmp_path: Path,
    name: str,
    damage: Callable[[bytes], bytes],
    error: type[Exception],
    message: str,
) -> None:
    write_bundle(tmp_path)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(error, match=message):
        load_bundle(tmp_path)
    path.unlink()
    with pytest.raises(BundleCorruptError, match=name):
        load_bundle(tmp_path)


def test_load_by_path_name_and_object(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    model = load_cost_model(tmp_path)
    assert load_cost_model(model) is model
    for device_type, source in (
        ("cpu", "measured"),
        ("cuda", "measured on another kind of device, AMD EPYC"),
    ):
        found = load_cost_model("cpu_epyc_zen5", device_type=device_type)
        assert found.source.startswith(source)
    with pytest.warns(UserWarning, match="measured on NVIDIA H100 SXM 80 GB: costs"):
        card = load_cost_model("H100", device_type="cuda")
    assert isinstance(card, PhysicalCostModel)
    assert card.constants.memory_gb_per_s == 3350.0
    with pytest.raises(ConfigError, match=r"'h100' is a GPU's, the devices .* 'cpu'"):
        load_cost_model("h100", device_type="cpu")
    with pytest.raises(ConfigError, match=r"'tpu'.*cpu_epyc.* nor a card \(v100,"):
        load_cost_model("tpu")


def test_auto_takes_the_bundle_of_this_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PRETRAINED", tmp_path)
    write_bundle(tmp_path / "other", device="another CPU")
    with pytest.warns(UserWarning, match="physical estimate"):
        assert isinstance(load_cost_model("auto"), PhysicalCostModel)
    write_bundle(tmp_path / "this", device=cpu_name())
    assert isinstance(load_cost_model("auto"), NeuralCostModel)
    # Never for a GPU: its card is found by its name.
    for device, gb_per_s in ((cpu_name(), 3350.0), ("NVIDIA B200", None)):
        monkeypatch.setattr(loading, "current_device_name", lambda _, d=device: d)
        with pytest.warns(UserWarning, match="no cost model was measured") as said:
            model = load_cost_model("auto", device_type="cuda", hbm_gb_per_s=gb_per_s)
        assert isinstance(model, PhysicalCostModel)
        assert model.constants.memory_gb_per_s == (gb_per_s or 7672.0)
        assert "not measured" in model.source
    assert model.name == "b200" and model.error is not None
    assert "7,672 GB/s" in str(said[0].message)
    assert "never checked on this one" in str(said[0].message)
