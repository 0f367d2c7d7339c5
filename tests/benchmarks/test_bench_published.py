"""Published timings: what ships fits them, what is stated was found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from published.fitting import fit, shared_of
from published.kernels import read_kernels
from published.links import fit_links, read_links
from published.rivals import FittedStock, stock_estimate
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


def test_the_rival_is_torchrecs_formula() -> None:
    """Sizes and coefficients give what TorchRec's evaluator gives."""
    types = pytest.importorskip("torchrec.distributed.planner.estimator.types")
    estimator = pytest.importorskip("torchrec.distributed.planner.estimator.estimator")
    config = pytest.importorskip("torchrec.distributed.planner.estimator.config")
    row = next(
        r
        for r in read_kernels()
        if len(r.tables) == 1 and r.is_forward and r.card == "h100"
        if r.location == "device"
    )
    (table,), (batch,) = row.tables, row.batches
    context = types.ShardPerfContext(
        sharding_type="table_wise",
        compute_kernel="fused",
        hash_size=table.num_embeddings,
        emb_dim=table.embedding_dim,
        batch_sizes=[batch],
        num_poolings=[1.0],
        input_lengths=[table.pooling_factor],
        world_size=1,
        local_world_size=1,
        device_bw=3_350e6,
    )
    evaluator = estimator.TableWiseEvaluator()
    theirs = evaluator.compute_fwd_comp(context, config.EmbeddingPerfEstimatorConfig())
    device = evaluator._get_device_bw(context, config.EmbeddingPerfEstimatorConfig())
    ours = stock_estimate(row) * 3_350e6 / device
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    same = FittedStock({("device", True): (1.0, 1.0, 1.0, 0.0)})
    np.testing.assert_allclose(same.predict(row), stock_estimate(row))
