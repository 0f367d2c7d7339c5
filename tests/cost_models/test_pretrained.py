"""The shipped bundles are what their cards and data say."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchrec_neuroshard.cost_models import (
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
from torchrec_neuroshard.features import FEATURE_NAMES
from torchrec_neuroshard.record_store import read_comms_records, read_records
from torchrec_neuroshard.records import steady_records
from torchrec_neuroshard.training.calibration import split_records
from torchrec_neuroshard.training.compute import (
    build_sets,
    evaluate,
)

BUNDLE = loading.PRETRAINED / "cpu"
FOUR: dict[str, Any] = {"world_size": 4, "local_world_size": 4}
DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "compute_xeon.parquet"


def test_card_shows_the_errors_that_the_data_give() -> None:
    training, held_out = split_records(steady_records(read_records([DATA])[1]))
    names = {t.name for r in training for t in r.tables}
    bases = {name.rsplit("#", 1)[0] for name in names}
    assert not any(
        t.name.rsplit("#", 1)[0] in bases for r in held_out for t in r.tables
    ), "a held-out set has a table that was trained on"
    learned = evaluate("learned", load_bundle(BUNDLE), build_sets(held_out))
    trained_on = COMPUTE_BUNDLE.read_info(BUNDLE).trained_on
    assert trained_on["num_training_sets"] == len(training)
    assert trained_on["num_test_sets"] == len(held_out)
    row = (
        f"| learned | {learned.fwd_mape:.1%} | {learned.bwd_mape:.1%} | "
        f"{learned.total_mape:.1%} | {learned.total_median:.1%} | "
        f"{learned.kendall_tau:.3f} |"
    )
    assert row in (BUNDLE / "CARD.md").read_text()


@pytest.mark.parametrize(("name", "world_size"), [("epyc", 3), ("epyc_zen5", 6)])
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
    card = (bundle / "COMMS_CARD.md").read_text()
    row = re.search(rf"\| {world_size} \| all \| no \| (\d+) \| ([\d.]+)%", card)
    assert row is not None and int(row[1]) == len(errors)
    assert 100 * np.median(errors) == pytest.approx(float(row[2]), rel=0.03)


def test_collectives_come_in_the_compute_models_milliseconds() -> None:
    bundle = BUNDLE.parent / "cpu_epyc"
    compute = COMPUTE_BUNDLE.read_info(bundle).reference_ms
    own = COMMS_BUNDLE.read_info(bundle).compute_reference_ms
    assert compute != own
    measured = load_comms_bundle(bundle, compute=None, **FOUR)
    found = load_comms_model(bundle, device_type="cpu", **FOUR)
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
    ids=str,
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
