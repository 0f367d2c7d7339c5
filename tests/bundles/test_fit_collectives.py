"""Training of models of collectives, their bundles and `neuroshard train`.

The records follow a known law: launch, peers, busiest direction, all bytes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import (
    make_comms_header,
    make_comms_record,
    make_planner,
    write_records,
)
from torchrec_neuroshard.bundles import find, fit_collectives, folders
from torchrec_neuroshard.bundles.descriptions import COMMS_BUNDLE, save_comms_bundle
from torchrec_neuroshard.bundles.find import load_comms_model, load_cost_model
from torchrec_neuroshard.bundles.fit_collectives import CommsData, build_comms
from torchrec_neuroshard.bundles.format import Bundle
from torchrec_neuroshard.bundles.make import make_comms_bundle
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.errors import BundleMismatchError, RecordError
from torchrec_neuroshard.measure.collectives import (
    sample_collective,
)
from torchrec_neuroshard.measure.records import CommsRecord
from torchrec_neuroshard.models.base import COLLECTIVES
from torchrec_neuroshard.models.collective_terms import TERM_NAMES, collective_terms

GB_PER_S = 2.0


def law(collective: str, bytes_per_peer: Sequence[int]) -> np.ndarray:
    """Return each rank's time [ms]; its dependence on the world size is not a term."""
    world = len(bytes_per_peer)
    units = np.array([bytes_per_peer], dtype=np.float64)
    terms = collective_terms(collective, units, world, GB_PER_S, 0.0)[0]
    values = dict(zip(TERM_NAMES, terms.T, strict=True))

    def total(name: str) -> np.ndarray:
        return np.asarray(np.sum([values[f"{name}_{i}"] for i in range(4)], axis=0))

    busiest = np.maximum(total("sent"), total("received"))
    crowd = 1 + 0.3 * np.log2(world)
    return np.asarray(
        0.1 + 0.05 * values["peers"] + crowd * busiest + 0.2 * total("total")
    )


def measure(
    world: int, count: int, seed: int, noise: float = 0.02
) -> list[CommsRecord]:
    rng = np.random.default_rng(seed)
    sizes = (1024, 2**24)
    records = []
    for index in range(count):
        sample = sample_collective(index, seed, sizes, {"world": world})
        ms = law(sample.collective, sample.bytes_per_peer)
        ms = ms * np.exp(rng.normal(0, noise, world))
        told: dict[str, Any] = {"index": index, "repeat_of": sample.repeat_of}
        sent = sample.collective, sample.bytes_per_peer
        records.append(make_comms_record(*sent, ms.tolist(), **told))
    return records


def data(worlds: Sequence[int], count: int = 150, seed: int = 0) -> CommsData:
    records = [r for w in worlds for r in measure(w, count, seed + w)]
    return build_comms(records, GB_PER_S, 0.0)


@pytest.fixture(scope="module")
def training() -> CommsData:
    return data((2, 4, 8))


def test_world_sizes_not_trained_on_are_predicted(training: CommsData) -> None:
    fitted = fit_collectives.fit_coefficients(training)
    rows = fit_collectives.evaluate_comms(fitted, training, data((3, 6), seed=100))
    totals = {r.world_size: r for r in rows if r.collective == "all"}
    assert set(totals) == {3, 6}
    for row in totals.values():
        assert not row.trained
        assert row.errors.median < 0.1
        assert row.errors.tau > 0.9
    by_name = [r for r in rows if r.collective != "all" and r.world_size == 3]
    assert {r.collective for r in by_name} == set(COLLECTIVES)
    assert sum(r.errors.number for r in by_name) == 150


def test_a_collective_without_records(training: CommsData) -> None:
    rows = training.collective_N != 0
    names = (field.name for field in dataclasses.fields(CommsData))
    left = CommsData(*(getattr(training, name)[rows] for name in names))
    fitted = fit_collectives.fit_coefficients(left)
    assert fitted[0].any()  # the others' mean
    start = np.full_like(fitted, 0.25)
    pulled = fit_collectives.fit_coefficients(left, start)
    assert np.unique(pulled[0]).size == 1  # unchanged, except for a factor


def test_too_little_to_train_on() -> None:
    few = data((2,), count=10)
    with pytest.raises(RecordError, match="10 records are too few to train on"):
        fit_collectives.fit_comms(few, few)
    crossing = dataclasses.replace(measure(2, 1, 0)[0], local_world_size=1)
    for records, message in (([], "no records"), ([crossing], "2.0 inside a node and")):
        with pytest.raises(RecordError, match=message):
            build_comms(records, GB_PER_S, 0.0)


def test_another_machines_model_is_a_start(training: CommsData) -> None:
    source = fit_collectives.fit_coefficients(training)
    few = data((2, 4), count=15, seed=20)
    few = dataclasses.replace(few, transfer_NW=few.transfer_NW * 2.5)
    found = fit_collectives.fit_comms(few, few, source)
    assert list(found.candidates) == ["before", "scaled", "tuned", "linear"]
    assert found.errors["scaled"] < 0.1 < found.errors["before"]
    assert found.errors["tuned"] < found.errors["linear"]
    assert found.kept in ("scaled", "tuned")
    assert f"Kept `{found.kept}`" in found.verdict()


# Bundles and the command


def write(
    folder: Path, worlds: Sequence[int], count: int = 60, noise: float = 0.02
) -> list[Path]:
    return [
        write_records(
            folder / f"{world}.jsonl",
            make_comms_header(world, "gloo", "a CPU", sampling={"cores": 2}),
            measure(world, count, world, noise),
        )
        for world in worlds
    ]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a bundle trained on 2 and 4 ranks and tested on 3."""
    folder = tmp_path_factory.mktemp("comms")
    found = make_comms_bundle(
        write(folder, (2, 3, 4)),
        folder / "bundle",
        "mine",
        test_world_sizes=(3,),
    )
    trained = {2: True, 3: False, 4: True}
    assert {(e.world_size, e.trained) for e in found.best.evaluations} == set(
        trained.items()
    )
    return folder / "bundle"


def load(folder: Path, world: int = 3) -> np.ndarray:
    ranks = {"world_size": world, "local_world_size": world}
    model = Bundle(folder).comms_model(compute=None, **ranks)
    assert model.source == "measured" and model.error is not None
    return model.all_to_all(np.full((1, world), 64.0), 512)


def test_bundle_predicts_its_records(bundle: Path) -> None:
    info = COMMS_BUNDLE.read_info(bundle)
    assert (info.backend, info.world_sizes) == ("gloo", (2, 4))
    assert info.intra_gb_per_s == GB_PER_S
    expected = law("pooled_forward", [64 * 512 * 4 // 4] * 4)
    np.testing.assert_allclose(load(bundle, 4)[0, :, 0], expected, rtol=0.25)
    assert "| 3 | all | no | 60 |" in (bundle / "COMMS_CARD.md").read_text()
    load(bundle, 8)  # twice as many ranks as were measured: no warning
    with pytest.warns(UserWarning, match=r"of 9 ranks are extrapolated.*at 2, 4"):
        load(bundle, 9)


@pytest.mark.parametrize("changes", [{"comms_version": 1}, {"comms_version": 9}])
def test_other_versions_are_refused(
    bundle: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    text = (bundle / "comms.json").read_text()
    (tmp_path / "comms.json").write_text(json.dumps({**json.loads(text), **changes}))
    with pytest.raises(BundleMismatchError, match="this package reads"):
        load(tmp_path)


def test_collectives_join_a_compute_model_of_their_device(
    bundle: Path, tmp_path: Path
) -> None:
    both = shutil.copytree(folders.PRETRAINED / "cpu", tmp_path / "both")
    info = COMMS_BUNDLE.read_info(bundle)
    with pytest.raises(BundleMismatchError, match="measured on a CPU; name another"):
        save_comms_bundle(both, info, "card")
    device = load_cost_model(both).hardware
    fingerprint = dataclasses.replace(info.fingerprint, device=device)
    info = dataclasses.replace(info, fingerprint=fingerprint)
    save_comms_bundle(both, info, "# Collectives")
    assert load_cost_model(both).hardware == device
    assert load(both, 2).shape == (1, 2, 2)
    assert (both / "COMMS_CARD.md").read_text() == "# Collectives\n"


def test_command_dispatches_on_the_kind_of_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(p) for p in write(tmp_path, (2, 3))]
    out = tmp_path / "out"
    command = ["train", *paths, "--out", str(out), "--test-world-sizes"]
    for kept, message in (
        (["6"], "no records of world size 6"),
        (["2", "3"], "every world size is"),
    ):
        assert main([*command, *kept]) == 2
        assert message in capsys.readouterr().err and not out.exists()
    assert main([*command, "3"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"3 ranks \(not in training\): \d+ collectives, median", printed)
    assert load(out, 2).shape == (1, 2, 2)


def test_a_model_with_a_large_error_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = write(tmp_path, (2,), count=28, noise=2.0)
    assert main(["train", str(path), "--out", str(tmp_path / "poor")]) == 0
    printed = capsys.readouterr().out
    told = r"\nwarning: these collectives are predicted with an error of (\d+%); above"
    [error] = re.findall(told, printed)
    model = Bundle(tmp_path / "poor").comms_model(
        compute=None, world_size=2, local_world_size=2
    )
    assert f"{model.error:.0%}" == error
    # Older bundles do not tell their error.
    file = tmp_path / "poor/comms.json"
    stored = json.loads(file.read_text())
    del stored["trained_on"]["errors"]
    file.write_text(json.dumps(stored))
    model = Bundle(tmp_path / "poor").comms_model(
        compute=None, world_size=2, local_world_size=2
    )
    assert model.source == "measured" and model.error is None


def test_planner_finds_measured_or_published_collectives(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found_for(cost_model: str | Path, device: str, kind: str = "cpu") -> Any:
        """Return the model found for this machine's device."""
        monkeypatch.setattr(find, "current_device_name", lambda _: device)
        return load_comms_model(
            cost_model, device_type=kind, world_size=8, local_world_size=8
        )

    found = found_for(bundle, "another CPU")
    np.testing.assert_array_equal(
        found.all_to_all(np.full((1, 8), 64.0), 512), load(bundle, 8)
    )
    # Measured with gloo, so not for GPUs. Published links are labelled as such.
    published = found_for(bundle, "NVIDIA H200", "cuda")
    assert published.source == "published links of h200, not measured"
    assert found_for(bundle, "NVIDIA A10", "cuda") is None

    # "auto" takes a shipped bundle of this very device.
    one = shutil.copytree(folders.PRETRAINED / "cpu", tmp_path / "shipped" / "one")
    shutil.copy(bundle / "comms.json", one)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "PRETRAINED", tmp_path / "shipped")
        assert found_for("auto", "another CPU") is None
        assert found_for("auto", "a CPU").source == "measured"

    # A bundle with only collectives leaves kernels to "auto".
    with pytest.warns(UserWarning, match="no cost model was measured on a CPU") as said:
        planner = make_planner(cost_model=bundle, comms_model=None)
    alone = "holds only collectives: kernels are costed"
    assert any(alone in str(w.message) for w in said)
    assert "physical estimate" in planner.costs.cost_model.source
    assert planner.costs.comms_model.source == "measured"
