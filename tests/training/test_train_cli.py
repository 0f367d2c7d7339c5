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
    fwd_ms, bwd_ms = 1.1 * records[4].fwd_ms, 1.1 * records[4].bwd_ms
    again = dataclasses.replace(
        records[4], index=80, repeat_of=4, fwd_ms=fwd_ms, bwd_ms=bwd_ms
    )
    disturbed = dataclasses.replace(records[5], index=81, spread=0.8)
    path, out = tmp_path / "r.parquet", tmp_path / "mine"
    write_records(path, make_header(), [*records, again, disturbed])
    options = ["--epochs", "3", "--members", "2"]
    assert main(["train", str(path), "--out", str(out), *options]) == 0
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


def test_the_better_of_ensemble_and_linear_model_is_kept(tmp_path: Path) -> None:
    """Costs that are not linear, before the ensemble has learned them."""
    records = draw_records(160, 0, lambda t: t.embedding_dim**0.5)
    path = write_records(tmp_path / "r.parquet", make_header(), records)
    out, quiet = tmp_path / "b", Console(quiet=True)
    config = TrainConfig(epochs=1, num_members=1, batch_sets=16)
    learned, linear = train_bundle([path], out, "b", config, quiet)
    assert COMPUTE_BUNDLE.read_info(out).trained_on["kept"] == "linear"
    assert "Kept `linear`" in (out / "CARD.md").read_text()
    assert score(linear) < score(learned)
    stored = evaluate("stored", load_bundle(out), build_sets(records[::4]))
    assert stored.total_mape == pytest.approx(linear.total_mape, rel=1e-3)

    few = [r for r in records[:80] if not r.held_out or r.index < 16]
    path = write_records(tmp_path / "few.parquet", make_header(), few)
    with pytest.raises(RecordError, match="got 60 and 4"):
        train_bundle([path], out, "b", config, quiet)
