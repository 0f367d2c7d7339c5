"""`neuroshard train-neuroshard`: from record files to nets and a card."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrec_neuroshard.baselines.neuroshard_cli import PaperRun
from torchrec_neuroshard.baselines.neuroshard_models import (
    PAPER_FEATURES,
    load_models,
)
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.cost_models import load_cost_model
from torchrec_neuroshard.errors import ConfigError

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
KERNELS = DATA / "compute_epyc_zen5.parquet"
COLLECTIVES = DATA / "comms_gloo_epyc_zen5.parquet"

pytestmark = pytest.mark.skipif(
    not (KERNELS.exists() and COLLECTIVES.exists()), reason="no measured records"
)


def options(out: Path, *more: str, comms: Path = COLLECTIVES) -> list[str]:
    files = ["--compute", str(KERNELS), "--comms", str(comms), "--out", str(out)]
    return ["train-neuroshard", *files, "--world-sizes", "2", "--epochs", "2", *more]


def test_trained_on_records(tmp_path: Path, phases: list[str]) -> None:
    assert main(options(tmp_path)) == 0
    assert phases[1:] == [
        "reading the records",
        "training the net of kernels",
        "training the nets of 2 ranks",
    ]
    models = load_models(tmp_path)
    assert list(models.comms) == [2]
    assert models.fingerprint.device == load_cost_model("cpu_epyc_zen5").hardware
    kernels, forward, backward = models.trained_on["judgements"]
    assert [j["what"] for j in (kernels, forward, backward)] == [
        "kernels",
        "forward all-to-all of 2 ranks",
        "backward all-to-all of 2 ranks",
    ]
    assert 0 < kernels["errors"]["median"] and kernels["others"] is None
    assert models.trained_on["settings"]["recipe"]["epochs"] == 2
    assert "| labels | measured | measured |" in models.card
    row = f"| kernels | {kernels['num_samples']} | {kernels['errors']['mean']:.1%} |"
    assert row in models.card


def test_labelled_by_a_cost_model(tables_file: Path, tmp_path: Path) -> None:
    more = ("--label", "--cost-model", "cpu_epyc_zen5", "--num-samples", "300")
    cut = ("--batch-sizes", "2048", "--max-rows", "5000", "--widths", "16", "48")
    assert main(options(tmp_path, *more, *cut, "--tables", str(tables_file))) == 0
    models = load_models(tmp_path)
    dim, row = (PAPER_FEATURES.index(n) for n in ("dim", "row"))
    assert float(models.compute.mean_F[dim]) == 32
    assert float(models.compute.mean_F[row]) <= 5_000
    for judgement in models.trained_on["judgements"]:
        assert judgement["report"]["num_training"] == 240
        assert 0 < judgement["others"]["mean"] < 0.5
    assert "| labels | predicted by `cpu_epyc_zen5`, for samples drawn" in models.card


def test_other_machines_and_missing_models_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = DATA / "comms_gloo_epyc.parquet"
    assert main(options(tmp_path, comms=other)) == 2
    assert "collectives on AMD EPYC (25/17); train on one" in capsys.readouterr().err
    assert main(options(tmp_path, "--label")) == 2
    assert "labels come from a cost model" in capsys.readouterr().err
    more = ("--label", "--cost-model", "cpu", "--num-samples", "300")
    assert main(options(tmp_path, *more)) == 2
    assert "cost model 'cpu' has no collectives" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="num_samples must be at least 1"):
        PaperRun(compute=(KERNELS,), num_samples=0)
