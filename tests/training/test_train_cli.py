"""`neuroshard train` from record files to a bundle that loads."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.builders import draw_set, make_header, make_record, write_records
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.cost_models import load_bundle
from torchrec_neuroshard.cost_models.bundle import COMPUTE_BUNDLE
from torchrec_neuroshard.errors import RecordError
from torchrec_neuroshard.profiles import zipf_profile
from torchrec_neuroshard.record_store import RecordStore
from torchrec_neuroshard.records import CostRecord
from torchrec_neuroshard.tables import TableConfig
from torchrec_neuroshard.training.compute import (
    TrainConfig,
    build_sets,
    evaluate,
    score,
)
from torchrec_neuroshard.training.train_cli import train_bundle

BATCH_SIZE = 1024


def record(index: int, *, held_out: bool, scale: float = 1.0) -> CostRecord:
    pooling = 1.0 + index % 17
    table = TableConfig(
        name=f"t{index}",
        num_embeddings=1000 * (1 + index % 5),
        embedding_dim=4 * (1 + index % 7),
        pooling_factor=pooling,
        profile=zipf_profile(
            batch_size=BATCH_SIZE,
            pooling_factor=pooling,
            num_embeddings=1000 * (1 + index % 5),
        ),
    )
    cost = scale * (0.1 + 0.01 * pooling * table.embedding_dim)
    return make_record(
        (table,),
        cost,
        2 * cost,
        index=index,
        held_out=held_out,
        batch_size=BATCH_SIZE,
    )


def write(path: Path, num_held_out: int = 20, device: str = "test device") -> Path:
    records = [record(i, held_out=i < num_held_out) for i in range(80)]
    again = record(3, held_out=True, scale=1.1)
    records.append(dataclasses.replace(again, index=80, repeat_of=3))
    return write_records(path, make_header(device), records)


def test_command_trains_on_steady_records_and_writes_bundle_and_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path / "r.parquet"), tmp_path / "mine"
    with RecordStore(path, make_header()) as store:
        store.append(dataclasses.replace(record(81, held_out=False), spread=0.8))
    code = main(
        ["train", str(path), "--out", str(out), "--epochs", "3", "--members", "2"]
    )
    assert code == 0
    assert "learned: forward " in capsys.readouterr().out
    model, trained_on = load_bundle(out), COMPUTE_BUNDLE.read_info(out).trained_on
    assert model.name == "mine"
    assert trained_on["num_training_sets"] == 60 and trained_on["num_disturbed"] == 1
    card = (out / "CARD.md").read_text()
    test = build_sets([record(i, held_out=True) for i in range(20)])
    kept = evaluate(trained_on["kept"], model, test)
    assert f"| {kept.name} | {kept.fwd_mape:.1%} | {kept.bwd_mape:.1%} |" in card
    assert "test device" in card
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
    rng = np.random.default_rng(0)
    records = []
    for index in range(160):
        batch_size, tables = draw_set(rng, str(index), 7, 32)
        cost = 0.05 + sum(
            1e-6 * batch_size * t.pooling_factor * t.embedding_dim**0.5 for t in tables
        )
        held_out = index % 4 == 0
        records.append(
            make_record(
                tables,
                cost,
                2 * cost,
                index=index,
                batch_size=batch_size,
                held_out=held_out,
            )
        )
    path = write_records(tmp_path / "r.parquet", make_header(), records)
    out = tmp_path / "b"
    config = TrainConfig(epochs=epochs, num_members=1, batch_sets=16)
    evaluations = train_bundle([path], out, "b", config, Console(quiet=True))
    assert COMPUTE_BUNDLE.read_info(out).trained_on["kept"] == kept
    assert f"Kept `{kept}`" in (out / "CARD.md").read_text()
    best = min(evaluations[:2], key=score)
    assert best.name == kept
    test = build_sets([r for r in records if r.held_out])
    stored = evaluate("stored", load_bundle(out), test)
    assert stored.total_mape == pytest.approx(best.total_mape, rel=1e-3)


def test_too_few_held_out_sets(tmp_path: Path) -> None:
    records = write(tmp_path / "r.parquet", num_held_out=4)
    with pytest.raises(RecordError, match="got 76 and 4"):
        train_bundle([records], tmp_path / "b", "b", TrainConfig(), Console(quiet=True))
