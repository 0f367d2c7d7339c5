"""The shipped bundles are what their cards and data say."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchrec_neuroshard.cost_models import (
    PhysicalCostModel,
    load_comms_model,
    load_cost_model,
    loading,
)
from torchrec_neuroshard.cost_models.bundle import (
    COMMS_BUNDLE,
    COMPUTE_BUNDLE,
    load_bundle,
    load_comms_bundle,
)
from torchrec_neuroshard.errors import ConfigError
from torchrec_neuroshard.features import FEATURE_NAMES
from torchrec_neuroshard.record_store import read_comms_records, read_records
from torchrec_neuroshard.records import steady_records
from torchrec_neuroshard.training.calibration import split_records
from torchrec_neuroshard.training.compute import (
    Evaluation,
    SetData,
    as_cost_model,
    build_sets,
    evaluate,
    fit_linear,
)

BUNDLE = loading.PRETRAINED / "cpu"
FOUR: dict[str, Any] = {"world_size": 4, "local_world_size": 4}
DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "compute_xeon.parquet"


@pytest.fixture(scope="module")
def sets() -> tuple[SetData, SetData]:
    training, held_out = split_records(steady_records(read_records([DATA])[1]))
    names = {t.name for r in training for t in r.tables}
    bases = {name.rsplit("#", 1)[0] for name in names}
    assert not any(
        t.name.rsplit("#", 1)[0] in bases for r in held_out for t in r.tables
    ), "a held-out set has a table that was trained on"
    return build_sets(training), build_sets(held_out)


@pytest.fixture(scope="module")
def learned(sets: tuple[SetData, SetData]) -> Evaluation:
    return evaluate("learned", load_bundle(BUNDLE), sets[1])


def test_card_shows_the_errors_that_the_data_give(
    sets: tuple[SetData, SetData], learned: Evaluation
) -> None:
    trained_on = COMPUTE_BUNDLE.read_info(BUNDLE).trained_on
    assert trained_on["num_training_sets"] == sets[0].num_sets
    assert trained_on["num_test_sets"] == sets[1].num_sets
    row = (
        f"| learned | {learned.fwd_mape:.1%} | {learned.bwd_mape:.1%} | "
        f"{learned.total_mape:.1%} | {learned.total_median:.1%} | "
        f"{learned.kendall_tau:.3f} |"
    )
    assert row in (BUNDLE / "CARD.md").read_text()


@pytest.mark.nightly
def test_learned_beats_the_linear_model_in_every_decile(
    sets: tuple[SetData, SetData], learned: Evaluation
) -> None:
    training, test = sets
    linear = as_cost_model(fit_linear(training), training, "linear")
    order = np.argsort(test.costs_S2.sum(axis=1), kind="stable")
    deciles = [test.select(part) for part in np.array_split(order, 10)]
    ensemble = load_bundle(BUNDLE)
    for part in deciles:
        error = evaluate("learned", ensemble, part).total_mape
        assert error < evaluate("linear", linear, part).total_mape
    assert learned.kendall_tau > evaluate("linear", linear, test).kendall_tau


@pytest.mark.parametrize("world_size", [3, 6])
@pytest.mark.parametrize("name", ["epyc", "epyc_zen5"])
def test_collectives_err_as_the_card_says(name: str, world_size: int) -> None:
    """At world sizes that were not in training."""
    bundle = BUNDLE.parent / f"cpu_{name}"
    [(_, records)] = read_comms_records([DATA.parent / f"comms_gloo_{name}.parquet"])
    assert world_size not in COMMS_BUNDLE.read_info(bundle).world_sizes
    ranks = {"world_size": world_size, "local_world_size": world_size}
    # In milliseconds of the run that measured them.
    model = load_comms_bundle(bundle, compute=None, **ranks)
    errors = []
    for r in records:
        if r.world_size == world_size and r.repeat_of is None:
            sent = np.array([r.bytes_per_peer], dtype=np.float64)
            predicted = model.predict(r.collective, sent)
            errors.append(abs(predicted.max() / max(r.transfer_ms) - 1))
    row = next(
        line
        for line in (bundle / "COMMS_CARD.md").read_text().splitlines()
        if line.startswith(f"| {world_size} | all | no |")
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert int(cells[3]) == len(errors)
    assert float(np.median(errors)) == pytest.approx(
        float(cells[4].rstrip("%")) / 100, rel=0.03
    )


def test_collectives_come_in_the_compute_models_milliseconds() -> None:
    name = "cpu_epyc"
    bundle = BUNDLE.parent / name
    compute = COMPUTE_BUNDLE.read_info(bundle).reference_ms
    own = COMMS_BUNDLE.read_info(bundle).compute_reference_ms
    assert compute != own
    measured = load_comms_bundle(bundle, compute=None, **FOUR)
    found = load_comms_model(name, device_type="cpu", **FOUR)
    assert found is not None
    columns = np.full((1, 4), 64.0)
    np.testing.assert_allclose(
        found.all_to_all(columns, 512),
        measured.all_to_all(columns, 512) * compute / own,
    )


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
    ids=["dtype", "device", "autocast", "fake"],
)
def test_predictions_are_the_same_whatever_torch_is_told(settings: Any) -> None:
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


def test_a_cards_name_asks_for_its_estimate() -> None:
    with pytest.warns(UserWarning, match="measured on NVIDIA H100 SXM 80 GB: costs"):
        model = load_cost_model("H100", device_type="cuda")
    assert isinstance(model, PhysicalCostModel)
    assert model.constants.memory_gb_per_s == 3350.0
    with pytest.raises(ConfigError, match=r"'h100' is a GPU's, the devices .* 'cpu'"):
        load_cost_model("h100", device_type="cpu")
    comms = load_comms_model(
        "h100", device_type="cuda", world_size=16, local_world_size=8
    )
    assert comms is not None and "published links of h100" in comms.source


def test_a_cpus_bundle_for_a_gpu_is_shown_as_what_it_is() -> None:
    model = load_cost_model("cpu_epyc_zen5", device_type="cuda")
    assert model.source.startswith("measured on another kind of device, AMD EPYC")
    assert load_cost_model("cpu_epyc_zen5").source == "measured"


def test_measured_collectives_stand_in_for_those_of_other_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "current_device_name", lambda _: "another CPU (1/2)")
    found = load_comms_model("auto", device_type="cpu", **FOUR)
    measured = load_comms_model("cpu_epyc_zen5", device_type="cpu", **FOUR)
    assert found is not None and measured is not None
    assert found.source.startswith("measured on AMD EPYC")
    assert found.source.endswith("which stands in")
    columns = np.full((1, 4), 64.0)
    np.testing.assert_array_equal(
        found.all_to_all(columns, 512), measured.all_to_all(columns, 512)
    )
    # A bandwidth that is given goes before what another machine measured.
    given = {**FOUR, "intra_gb_per_s": 5.0}
    assert load_comms_model("auto", device_type="cpu", **given) is None
