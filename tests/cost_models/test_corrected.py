"""Models corrected by sets that were measured."""

from __future__ import annotations

import numpy as np
import pytest

from tests.builders import draw_tables
from torchrec_neuroshard.cost_models.base import CostModel
from torchrec_neuroshard.cost_models.corrected import CorrectedCostModel, MeasuredSet
from torchrec_neuroshard.features import table_features
from torchrec_neuroshard.testing import AnalyticCostModel, CostModelContract
from torchrec_neuroshard.testing.cases import sample_features

BATCH = 512
TABLES = draw_tables(np.random.default_rng(0), 24, [8, 16, 32, 64])
FEATURES = table_features(TABLES, BATCH)
MODEL = AnalyticCostModel()


def draw_sets(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [sorted(rng.choice(len(TABLES), 6, replace=False)) for _ in range(count)]


def predict(model: CostModel, chosen: list[int]) -> np.ndarray:
    sums = model.encode(FEATURES[chosen]).sum(axis=0, keepdims=True)
    both: np.ndarray = model.predict_sums(sums)[0]
    return both


def measure(
    chosen: list[int], factors_T: np.ndarray, noise: float = 0.0
) -> MeasuredSet:
    """A set whose tables take so many times what the model says."""
    alone = np.array([predict(MODEL, [t]).sum() for t in chosen])
    ratio = float(alone @ factors_T[chosen] / alone.sum()) * np.exp(noise)
    return MeasuredSet(FEATURES[chosen], (ratio, 2 * ratio))


class TestContract(CostModelContract):
    def make_cost_model(self) -> CostModel:
        features = sample_features()
        sets = [MeasuredSet(features[i:], (1.1 + i / 10, 0.9)) for i in range(3)]
        return CorrectedCostModel(MODEL, sets)


def test_sets_measured_cost_what_was_measured_and_new_ones_learn_of_it() -> None:
    factors = np.exp(0.2 * np.random.default_rng(1).standard_normal(len(TABLES)))
    known, new = draw_sets(40, 2), draw_sets(40, 3)
    model = CorrectedCostModel(MODEL, [measure(s, factors) for s in known])
    off: dict[str, list[float]] = {"known": [], "new": [], "before": []}
    for name, sets in (("known", known), ("new", new)):
        for chosen in sets:
            truth = np.array(measure(chosen, factors).ratio_2)
            truth *= predict(MODEL, chosen)
            off[name].append(np.abs(np.log(predict(model, chosen) / truth)).max())
    for chosen in new:
        ratio = measure(chosen, factors).ratio_2[0]
        off["before"].append(abs(np.log(ratio)))
    assert max(off["known"]) < 0.05
    assert np.mean(off["new"]) < 0.4 * np.mean(off["before"])


def test_one_set_moves_all_others_by_what_they_share() -> None:
    chosen = draw_sets(1, 4)[0]
    model = CorrectedCostModel(MODEL, [MeasuredSet(FEATURES[chosen], (1.2, 0.8))])
    other = [t for t in range(len(TABLES)) if t not in chosen][:5]
    ratio = predict(model, other) / predict(MODEL, other)
    np.testing.assert_allclose(ratio, [1.2, 0.8], rtol=0.03)
    assert "corrected by 1 measured set" in model.source


def test_noise_and_disturbed_records_move_the_model_less() -> None:
    chosen = draw_sets(1, 5)[0]
    steady = [MeasuredSet(FEATURES[chosen], (1.0, 1.0), 0.01)] * 3
    model = CorrectedCostModel(
        MODEL, [*steady, MeasuredSet(FEATURES[chosen], (3.0, 3.0), 0.5)]
    )
    ratio = predict(model, chosen) / predict(MODEL, chosen)
    assert (np.abs(ratio - 1) < 0.02).all()
    # What was measured is surer than what was not.
    other = [t for t in range(len(TABLES)) if t not in chosen][:5]
    sums = np.stack([model.encode(FEATURES[s]).sum(axis=0) for s in (chosen, other)])
    known, unknown = model.relative_uncertainty(sums)
    assert 0 < known < unknown < 0.5


def test_what_a_whole_round_shares_is_not_the_sets_part() -> None:
    """Sets measured in both rounds tell that the machine was slower in the second."""
    both, later = draw_sets(6, 8), draw_sets(12, 9)[6:]
    sets = [MeasuredSet(FEATURES[s], (1.0, 1.0), round=1) for s in both]
    sets += [MeasuredSet(FEATURES[s], (1.1, 1.1), round=2) for s in (*both, *later)]
    model = CorrectedCostModel(MODEL, sets)
    of_both, of_later = (
        np.mean([predict(model, s) / predict(MODEL, s) for s in some])
        for some in (both, later)
    )
    assert of_later == pytest.approx(of_both, rel=0.02)


def test_a_table_is_known_by_what_it_is_whatever_its_width() -> None:
    halves = [t.with_width(t.embedding_dim // 2) for t in TABLES]
    features = table_features(halves, BATCH)
    factors = np.ones(len(TABLES))
    slow = int(np.argmax([predict(MODEL, [t]).sum() for t in range(len(TABLES))]))
    factors[slow] = 1.5
    sets = [measure(s, factors) for s in draw_sets(40, 6)]
    model = CorrectedCostModel(MODEL, sets)

    def ratio(table: int) -> float:
        rows = features[[table]]
        return float(
            model.predict_sums(model.encode(rows))[0, 0]
            / MODEL.predict_sums(MODEL.encode(rows))[0, 0]
        )

    others = [ratio(t) for t in range(len(TABLES)) if t != slow]
    assert ratio(slow) > max(others)
    assert ratio(slow) == pytest.approx(1.5, rel=0.15)
