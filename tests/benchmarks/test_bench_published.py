"""Published timings: shipped constants fit them, and stated errors are right."""

from __future__ import annotations

import dataclasses
import json
import lzma
from pathlib import Path

import pytest

from bench_published import SETS_APART
from published.fitting import fit, shared_of
from published.kernels import read_kernels, read_measured
from published.links import fit_links, read_links
from published.nccl import (
    FAMILIES,
    SHARED,
    constants_of,
    fit_nccl,
    over_runs,
    predict_nccl,
    read_nccl,
    shipped_starts,
    without_tables,
)
from published.nccl_page import errors
from torchrec_neuroshard.models.card_physics import PhysicalConstants
from torchrec_neuroshard.models.estimate_error import CHECKED_CARDS
from torchrec_neuroshard.models.published_links import CollectiveConstants

RESULT = Path(__file__).parents[2] / "benchmarks/results/published_202611.json.xz"
DOCS = Path(__file__).parents[2] / "docs/gpus.md"


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
    result = json.loads(lzma.open(RESULT).read())
    assert sorted(result["cards_left_out"]) == sorted(CHECKED_CARDS)
    for card, found in result["cards_left_out"].items():
        for name, known in dataclasses.asdict(CHECKED_CARDS[card]).items():
            value = found[name]
            assert (known is None) == (value is None), (card, name)
            if value is not None:
                assert known == pytest.approx(value, abs=0.0051), (card, name)


def test_shipped_starts_and_gains_are_fitted_to_nvidias_tables() -> None:
    half = [t for t in over_runs(read_nccl()) if t.dtype == "half"]
    known = [t for t in half if t.family in FAMILIES]
    links = CollectiveConstants(intra_gb_per_s=1.0, inter_gb_per_s=1.0)
    shipped = {n: getattr(links, n) for n in SHARED} | shipped_starts()
    assert fit_nccl(known) == pytest.approx(shipped, rel=0.02)


def test_stated_errors_of_nccl_are_those_of_the_tables() -> None:
    result = json.loads(lzma.open(RESULT).read())["nccl"]["models"]
    half = [t for t in over_runs(read_nccl()) if t.dtype == "half"]
    known = [t for t in half if t.family in FAMILIES]
    found = {
        "before": errors(
            [(t, predict_nccl(t, without_tables(constants_of(t)))) for t in known]
        ),
        "ours": errors([(t, predict_nccl(t, constants_of(t))) for t in known]),
    }
    for name, values in found.items():
        for size in ("all", "below 1 MiB"):
            for figure in ("median", "p90"):
                stated = result[name][size][figure]
                assert values[size][figure] == pytest.approx(stated, abs=0.001)
    for name in ("ours", "- card left out", "- folder left out"):
        assert result[name]["all"]["median"] < 0.12
        assert result[name]["below 1 MiB"]["median"] < 0.20
    text = DOCS.read_text()
    own, left = (result[n] for n in ("ours", "- card left out"))
    for e in (own["all"], own["below 1 MiB"], left["all"], left["below 1 MiB"]):
        assert f"{e['median']:.1%}".replace("%", " %") in text
