"""The shipped bundle is what its card and its data say."""

from pathlib import Path

import numpy as np
import pytest

from torchrec_neuroshard.collect.store import read_records
from torchrec_neuroshard.cost_models import loading
from torchrec_neuroshard.cost_models.bundle import load_bundle, read_info
from torchrec_neuroshard.cost_models.training import (
    Evaluation,
    SetData,
    build_sets,
    evaluate,
    fit_linear,
    fit_stock,
)

BUNDLE = Path(loading.__file__).parent.parent / "pretrained" / "cpu"
DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "compute_cpu.parquet"


@pytest.fixture(scope="module")
def sets() -> tuple[SetData, SetData]:
    _, records = read_records([DATA])
    training = {r.index for r in records if not r.held_out}
    held_out = [r for r in records if r.held_out and r.repeat_of is None]
    names = {t.name for r in records if r.index in training for t in r.tables}
    bases = {name.rsplit("#", 1)[0] for name in names}
    assert not any(
        t.name.rsplit("#", 1)[0] in bases for r in held_out for t in r.tables
    ), "a held-out set has a table that was trained on"
    return build_sets([r for r in records if not r.held_out]), build_sets(held_out)


@pytest.fixture(scope="module")
def learned(sets: tuple[SetData, SetData]) -> Evaluation:
    return evaluate("learned", load_bundle(BUNDLE), sets[1])


def test_card_shows_the_errors_that_the_data_give(learned: Evaluation) -> None:
    row = (
        f"| learned | {learned.fwd_mape:.1%} | {learned.bwd_mape:.1%} | "
        f"{learned.total_mape:.1%} | {learned.total_median:.1%} | "
        f"{learned.kendall_tau:.3f} |"
    )
    assert row in (BUNDLE / "CARD.md").read_text()


def test_counts_and_ranges_are_those_of_the_data(
    sets: tuple[SetData, SetData],
) -> None:
    info = read_info(BUNDLE)
    assert info.trained_on["num_training_sets"] == sets[0].num_sets
    assert info.trained_on["num_test_sets"] == sets[1].num_sets
    widest = float(
        sets[0].features_NF.max(axis=0)[list(info.ranges).index("log2_width")]
    )
    assert info.ranges["log2_width"][1] == pytest.approx(widest)


def test_learned_beats_both_yardsticks_in_every_decile(
    sets: tuple[SetData, SetData], learned: Evaluation
) -> None:
    training, test = sets
    for model in (fit_linear(training), fit_stock(training)):
        other = evaluate(model.name, model, test)
        assert (np.array(learned.decile_mape) < np.array(other.decile_mape)).all()
        assert learned.kendall_tau > other.kendall_tau
