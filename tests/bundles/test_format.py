"""Bundles: saving, loading, finding by name, and the shipped ones."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.builders import make_fingerprint
from torchrec_neuroshard.bundles import find, folders
from torchrec_neuroshard.bundles.descriptions import COMMS_BUNDLE, COMPUTE_DESCRIPTION
from torchrec_neuroshard.bundles.find import load_comms_model, load_cost_model
from torchrec_neuroshard.bundles.fit import evaluate
from torchrec_neuroshard.bundles.format import COMPUTE_BUNDLE, Bundle
from torchrec_neuroshard.bundles.set_data import build_sets, split_records
from torchrec_neuroshard.errors import (
    BundleCorruptError,
    BundleMismatchError,
    ConfigError,
)
from torchrec_neuroshard.hardware.cards import GPU_CARDS
from torchrec_neuroshard.hardware.devices import cpu_name
from torchrec_neuroshard.measure.records import steady_records
from torchrec_neuroshard.measure.store import read_comms_records, read_records
from torchrec_neuroshard.models.base import CommsModel
from torchrec_neuroshard.models.compute import NeuralCostModel, PhysicalCostModel
from torchrec_neuroshard.tables.features import FEATURE_NAMES, FEATURE_VERSION

BUNDLE = folders.PRETRAINED / "cpu"
FOUR: dict[str, Any] = {"world_size": 4, "local_world_size": 4}
DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "compute_xeon.jsonl.xz"


def write_bundle(folder: Path, device: str = "test device") -> None:
    """Write a shipped bundle as another device's."""
    network, info = COMPUTE_BUNDLE.load(BUNDLE)
    info = dataclasses.replace(info, fingerprint=make_fingerprint(device))
    COMPUTE_BUNDLE.save(folder, network, info, "# card\n")


def edited(**changes: object) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **changes}).encode()


INFO, WEIGHTS = "bundle.json", "weights.safetensors"
SIZES = {"num_members": 2, "hidden": 8, "latent": 2, "head_hidden": 4}
VERSION = f"feature columns of version {FEATURE_VERSION}"


@pytest.mark.parametrize(
    ("name", "damage", "error", "message"),
    [
        (WEIGHTS, lambda data: data[:-1] + b"?", BundleCorruptError, "checksum"),
        (INFO, lambda data: b"[1]", BundleCorruptError, "bundle.json is damaged"),
        (
            INFO,
            edited(fingerprint={"device": "x"}),
            BundleCorruptError,
            "is missing or malformed",
        ),
        (INFO, edited(network=SIZES), BundleCorruptError, "size mis"),
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
        Bundle(tmp_path).cost_model()
    path.unlink()
    with pytest.raises(BundleCorruptError, match=name):
        Bundle(tmp_path).cost_model()


def test_load_by_path_name_and_object(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    model = load_cost_model(tmp_path)
    assert load_cost_model(model) is model and model.hardware == "test device"
    assert model.reference_ms == Bundle(BUNDLE).cost_model().reference_ms > 0
    assert (tmp_path / "CARD.md").read_text() == "# card\n"
    assert load_cost_model("cpu_epyc_zen5").source == "measured"
    with pytest.warns(UserWarning, match="measured on NVIDIA H100 SXM 80 GB: costs"):
        card = load_cost_model("H100", device_type="cuda")
    assert isinstance(card, PhysicalCostModel)
    assert card.constants.memory_gb_per_s == 3350.0
    comms = load_comms_model("h100", device_type="cuda", **FOUR)
    assert comms is not None and "published links of h100" in comms.source
    for name in ("h200", "H200"):
        assert load_cost_model(name, device_type="cuda").source == "measured"
    own = load_cost_model("h200", device_type="cuda", card=GPU_CARDS["h200"])
    assert own.source == "measured"
    for name, source in (
        ("cpu_epyc_zen5", "another device type, AMD EPYC .*: not an estimate for cuda"),
        ("h200", "another card, NVIDIA H200, not NVIDIA H100 SXM 80 GB"),
    ):
        said = f"'{name}' was measured on {source}.* are not for NVIDIA H100 SXM 80 GB"
        with pytest.warns(UserWarning, match=said):
            model = load_cost_model(name, device_type="cuda", card=GPU_CARDS["h100"])
        assert re.fullmatch(f"measured on {source}", model.source)
    with pytest.raises(ConfigError, match=r"'h100' is for GPUs, but .* 'cpu'"):
        load_cost_model("h100", device_type="cpu")
    with pytest.raises(ConfigError, match=r"'tpu'.*cpu_epyc.* a card \(v100,"):
        load_cost_model("tpu")


def test_auto_takes_the_bundle_of_this_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "PRETRAINED", tmp_path)
    write_bundle(tmp_path / "other", device="another CPU")
    with pytest.warns(UserWarning, match="physical estimate"):
        assert isinstance(load_cost_model("auto"), PhysicalCostModel)
    write_bundle(tmp_path / "this", device=cpu_name())
    assert isinstance(load_cost_model("auto"), NeuralCostModel)
    # Never for a GPU, whose card is found by its name.
    for device, gb_per_s in ((cpu_name(), 3350.0), ("NVIDIA B200", None)):
        monkeypatch.setattr(find, "current_device_name", lambda _, d=device: d)
        with pytest.warns(UserWarning, match="no cost model was measured") as said:
            model = load_cost_model("auto", device_type="cuda", hbm_gb_per_s=gb_per_s)
        assert isinstance(model, PhysicalCostModel)
        assert model.constants.memory_gb_per_s == (gb_per_s or 7672.0)
        assert "not measured" in model.source
    assert model.name == "b200" and model.error is not None
    assert "7,672 GB/s" in str(said[0].message)
    assert "never checked on this card" in str(said[0].message)


@pytest.mark.parametrize(
    ("card", "gb_per_s", "hardware"),
    [
        ("h200", 4800.0, None),
        ("h200", 2400.0, "H200 SXM 141 GB with this bandwidth"),
        ("h100", 3350.0, "H100 SXM 80 GB"),
    ],
)
def test_auto_takes_the_bundle_of_the_planned_card_as_sold(
    card: str, gb_per_s: float, hardware: str | None
) -> None:
    caught: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if hardware:
        match = f"no cost model was measured on NVIDIA {hardware}: costs are"
        caught = pytest.warns(UserWarning, match=match)
    with caught:
        model = load_cost_model(
            device_type="cuda", hbm_gb_per_s=gb_per_s, card=GPU_CARDS[card]
        )
    assert model.source == (
        "physical estimate, not measured" if hardware else "measured"
    )


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cpu", "xeon"),
        ("cpu_epyc", "epyc_zen4"),
        ("cpu_epyc_zen5", "epyc_zen5"),
        ("h200", "h200"),
    ],
)
def test_card_shows_the_errors_that_the_data_give(name: str, file: str) -> None:
    folder, path = BUNDLE.parent / name, DATA.parent / f"compute_{file}.jsonl.xz"
    training, held_out = split_records(steady_records(read_records([path])[1]))
    trained_on = COMPUTE_DESCRIPTION.read_info(folder).trained_on
    assert trained_on["num_test_sets"] == len(held_out)
    if name == "cpu":  # the file has all sets of no other bundle's training
        assert trained_on["num_training_sets"] == len(training)
    learned = evaluate("learned", Bundle(folder).cost_model(), build_sets(held_out))
    errors = [learned.forward.mean, learned.backward.mean, learned.total.mean]
    errors += [learned.total.median, learned.cheapest.mean]
    chosen_by = f"{trained_on['errors']['learned']:.1%}"
    cells = ["| **learned**", chosen_by, *(f"{e:.1%}" for e in errors)]
    cells += [f"{learned.total.bias:+.1%}", f"{learned.inside:.0%}"]
    row = " | ".join([*cells, f"{learned.total.tau:.3f} |"])
    assert row in (folder / "CARD.md").read_text()


@pytest.mark.parametrize(("name", "world_size"), [("epyc", 3), ("epyc_zen5", 6)])
def test_collectives_err_as_the_card_says(name: str, world_size: int) -> None:
    """Checked at world sizes that were not in training."""
    bundle = BUNDLE.parent / f"cpu_{name}"
    [(_, records)] = read_comms_records([DATA.parent / f"comms_gloo_{name}.jsonl.xz"])
    assert world_size not in COMMS_BUNDLE.read_info(bundle).world_sizes
    ranks = {"world_size": world_size, "local_world_size": world_size}
    # In the time unit of the run that measured them.
    model = Bundle(bundle).comms_model(compute=None, **ranks)
    errors = []
    for r in records:
        if r.world_size == world_size and r.repeat_of is None:
            sent = np.array([r.bytes_per_peer], dtype=np.float64)
            predicted = model.predict(r.collective, sent)
            errors.append(abs(predicted.max() / max(r.transfer_ms) - 1))
    card = (bundle / "COMMS_CARD.md").read_text()
    row = re.search(rf"\| {world_size} \| all \| no \| (\d+) \| ([\d.]+)%", card)
    assert row is not None and int(row[1]) == len(errors)
    assert 100 * np.median(errors) == pytest.approx(float(row[2]), rel=0.03)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        default_dtype(torch.bfloat16),
        torch.device("meta"),
        torch.autocast("cpu", dtype=torch.bfloat16),
        FakeTensorMode(),
    ],
    ids=["dtype", "device", "autocast", "fake"],  # the same in all processes
)
def test_predictions_do_not_depend_on_torchs_defaults(settings: Any) -> None:
    def predictions() -> list[Any]:
        compute = load_cost_model("cpu")
        comms = load_comms_model("cpu", device_type="cpu", **FOUR)
        assert comms is not None
        sums = compute.encode(np.ones((1, len(FEATURE_NAMES)), dtype=np.float32))
        exchange = comms.all_to_all(np.full((1, 4), 64.0), 512)
        return [compute.predict_sums(sums).tolist(), exchange.tolist()]

    expected = predictions()
    with settings:
        assert predictions() == expected


def test_measured_collectives_stand_in_for_other_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exchange(model: CommsModel | None) -> npt.NDArray[np.float64]:
        assert model is not None
        return model.all_to_all(np.full((1, 4), 64.0), 512)

    monkeypatch.setattr(find, "current_device_name", lambda _: "another CPU (1/2)")
    cpus = {"device_type": "cpu", **FOUR}
    found = load_comms_model("auto", **cpus)
    measured = exchange(load_comms_model("cpu_epyc_zen5", **cpus))
    np.testing.assert_array_equal(exchange(found), measured)
    assert found is not None and found.source.startswith("measured on AMD EPYC")
    assert found.source.endswith("as a stand-in") and found.error is None
    # A given bandwidth takes precedence over another machine's measurements.
    assert load_comms_model("auto", **cpus, intra_gb_per_s=5.0) is None
    # Collectives have the compute model's time unit.
    bundle = folders.PRETRAINED / "cpu_epyc"
    compute = COMPUTE_DESCRIPTION.read_info(bundle).reference_ms
    own = COMMS_BUNDLE.read_info(bundle).compute_reference_ms
    measured = exchange(Bundle(bundle).comms_model(compute=None, **FOUR))
    scaled = exchange(load_comms_model(bundle, **cpus))
    assert compute != own
    np.testing.assert_allclose(scaled, measured * compute / own)
