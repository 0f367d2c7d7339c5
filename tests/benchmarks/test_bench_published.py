"""Published timings: what ships fits them, what is stated was found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from published.fitting import fit, shared_of
from published.kernels import read_kernels
from published.links import fit_links, read_links
from published.rivals import stock_estimate
from torchrec_neuroshard.cost_models.comms_published import CollectiveConstants
from torchrec_neuroshard.cost_models.estimate_error import CHECKED_CARDS
from torchrec_neuroshard.cost_models.physical import PhysicalConstants

RESULT = Path(__file__).parents[2] / "benchmarks/results/published_202611.json"


def test_shipped_constants_are_the_fitted_ones() -> None:
    shipped = shared_of(PhysicalConstants())
    for name, value in fit(read_kernels()).items():
        assert shipped[name] == pytest.approx(value, rel=0.03), name
    links = CollectiveConstants(intra_gb_per_s=1.0, inter_gb_per_s=1.0)
    for name, value in fit_links(read_links()).items():
        if name != "library_us":
            assert getattr(links, name) == pytest.approx(value, rel=0.03), name


def test_stated_errors_are_those_of_the_result() -> None:
    result = json.loads(RESULT.read_text())
    assert sorted(result["cards_left_out"]) == sorted(CHECKED_CARDS)
    for card, found in result["cards_left_out"].items():
        stated = CHECKED_CARDS[card]
        for name, value in found.items():
            known = getattr(stated, name)
            assert (known is None) == (value is None), (card, name)
            if value is not None:
                assert known == pytest.approx(value, abs=0.0051), (card, name)


def test_the_rival_is_torchrecs_own_estimator() -> None:
    rows = read_kernels()
    row = next(r for r in rows if len(r.tables) == 1 and r.card == "h100")
    ids = row.batches[0] * row.tables[0].pooling_factor
    slower = 1 if row.location == "device" else 3_350 * 10 / (32 * 1.024**3)
    forward = ids * (8 + 512 + 512) / 3_350e6 * slower
    both = forward * (row.has_forward + 2 * row.has_backward)
    np.testing.assert_allclose(stock_estimate(row), both, rtol=1e-6)
