"""Published timings: shipped constants fit them, and stated errors are right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench_published import SETS_APART
from published.fitting import fit, shared_of
from published.kernels import read_kernels, read_measured
from published.links import fit_links, read_links
from torchrec_neuroshard.models.card_physics import PhysicalConstants
from torchrec_neuroshard.models.estimate_error import CHECKED_CARDS
from torchrec_neuroshard.models.published_links import CollectiveConstants

RESULT = Path(__file__).parents[2] / "benchmarks/results/published_202611.json"


def test_shipped_constants_are_the_fitted_ones() -> None:
    shipped = shared_of(PhysicalConstants())
    fitted = fit(read_kernels(), read_measured(SETS_APART))
    for name, value in shipped.items():
        assert value == pytest.approx(fitted[name], rel=0.03), name
    links = CollectiveConstants(intra_gb_per_s=1.0, inter_gb_per_s=1.0)
    for name, value in fit_links(read_links()).items():
        if name != "library_us":
            assert getattr(links, name) == pytest.approx(value, rel=0.03), name


def test_stated_errors_are_those_of_the_result() -> None:
    result = json.loads(RESULT.read_text())
    assert sorted(result["cards_left_out"]) == sorted(CHECKED_CARDS)
    for card, found in result["cards_left_out"].items():
        for name, known in dataclasses.asdict(CHECKED_CARDS[card]).items():
            value = found[name]
            assert (known is None) == (value is None), (card, name)
            if value is not None:
                assert known == pytest.approx(value, abs=0.0051), (card, name)
