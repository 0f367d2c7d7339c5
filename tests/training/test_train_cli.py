"""`neuroshard train` from record files to a bundle that loads."""

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from tests.builders import draw_records, make_header, write_records
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.cost_models import load_bundle
from torchrec_neuroshard.cost_models.bundle import COMPUTE_BUNDLE
from torchrec_neuroshard.errors import RecordError
from torchrec_neuroshard.training.compute import (
    TrainConfig,
    build_sets,
    evaluate,
    score,
)
from torchrec_neuroshard.training.train_cli import train_bundle


def test_command_trains_on_steady_records_and_writes_bundle_and_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = draw_records(80, 0)
    again, disturbed = (
        dataclasses.replace(records[4], index=80, repeat_of=4),
        dataclasses.replace(records[5], index=81, spread=0.8),
    )
    again = dataclasses.replace(
        again, fwd_ms=1.1 * again.fwd_ms, bwd_ms=1.1 * again.bwd_ms
    )
    path, out = tmp_path / "r.parquet", tmp_path / "mine"
    write_records(path, make_header(), [*records, again, disturbed])
    code = main(
        ["train", str(path), "--out", str(out), "--epochs", "3", "--members", "2"]
    )
    assert code == 0
    assert "learned: forward " in capsys.readouterr().out
    model, trained_on = load_bundle(out), COMPUTE_BUNDLE.read_info(out).trained_on
    assert model.name == "mine"
    assert trained_on["num_training_sets"] == 60 and trained_on["num_disturbed"] == 1
    card = (out / "CARD.md").read_text()
    test = build_sets(records[::4])
    kept = evaluate(trained_on["kept"], model, test)
    assert f"| {kept.name} | {kept.fwd_mape:.1%} | {kept.bwd_mape:.1%} |" in card
    assert "differs by 10.0% (median)" in card
    assert "| disturbed records, left out | 1 |" in card


@pytest.mark.parametrize(
    ("epochs", "kept"),
    [
        (1, "linear"),
        pytest.param(60, "learned", marks=pytest.mark.nightly),
    ],
)
def test_the_better_of_ensemble_and_linear_model_is_kept(
    tmp_path: Path, epochs: int, kept: str
) -> None:
    """Costs that are not linear, before and after the ensemble has learned them."""
    records = draw_records(160, 0, lambda t: t.embedding_dim**0.5)
    path = write_records(tmp_path / "r.parquet", make_header(), records)
    out = tmp_path / "b"
    config = TrainConfig(epochs=epochs, num_members=1, batch_sets=16)
    evaluations = train_bundle([path], out, "b", config, Console(quiet=True))
    assert COMPUTE_BUNDLE.read_info(out).trained_on["kept"] == kept
    assert f"Kept `{kept}`" in (out / "CARD.md").read_text()
    best = min(evaluations[:2], key=score)
    assert best.name == kept
    test = build_sets(records[::4])
    stored = evaluate("stored", load_bundle(out), test)
    assert stored.total_mape == pytest.approx(best.total_mape, rel=1e-3)


def test_too_few_held_out_sets(tmp_path: Path) -> None:
    records = [r for r in draw_records(80, 0) if not r.held_out or r.index < 16]
    path = write_records(tmp_path / "r.parquet", make_header(), records)
    with pytest.raises(RecordError, match="got 60 and 4"):
        train_bundle([path], tmp_path / "b", "b", TrainConfig(), Console(quiet=True))
